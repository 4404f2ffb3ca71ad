// Core: tensor views, storage types, the argument matcher.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/match.hpp"
#include "core/numeric.hpp"
#include "text_of.hpp"

using namespace specstate;
using namespace specstate::core;
using specstate::testing::text_of;

namespace {

TEST(Numeric, EveryBfloat16AndFloat16RoundTrips) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const bfloat16 b{static_cast<std::uint16_t>(i)};
    if (!std::isnan(to_float(b))) EXPECT_EQ(from_float<bfloat16>(to_float(b)).bits, i);
    const float16 h{static_cast<std::uint16_t>(i)};
    if (!std::isnan(to_float(h))) EXPECT_EQ(from_float<float16>(to_float(h)).bits, i);
  }
}

TEST(Numeric, EveryFloat8RoundTripsAndSaturates) {
  for (std::uint32_t i = 0; i < 256; ++i) {
    const float8_e4m3fn f{static_cast<std::uint8_t>(i)};
    if (!std::isnan(to_float(f))) EXPECT_EQ(from_float<float8_e4m3fn>(to_float(f)).bits, i) << i;
  }
  EXPECT_EQ(to_float(from_float<float8_e4m3fn>(1e9f)), 448.0f);
  EXPECT_EQ(to_float(from_float<float8_e4m3fn>(-INFINITY)), -448.0f);
  EXPECT_EQ(to_float(from_float<float8_e4m3fn>(464.0f)), 448.0f);
  EXPECT_TRUE(std::isnan(to_float(from_float<float8_e4m3fn>(NAN))));
}

// Rounding against the nearest representable value found by search.
template <class T>
void nearest_even(std::uint32_t count, std::uint32_t step) {
  std::vector<float> values;
  for (std::uint32_t i = 0; i < count; ++i) {
    const float v = to_float(T{static_cast<decltype(T::bits)>(i)});
    if (std::isfinite(v)) values.push_back(v);
  }
  for (std::size_t i = 0; i + 1 < values.size(); i += step) {
    const double middle = (static_cast<double>(values[i]) + values[i + 1]) / 2;
    const float m = static_cast<float>(middle);
    if (m != middle) continue;
    const auto got = from_float<T>(m);
    EXPECT_EQ(got.bits & 1u, 0u) << "tie at " << m;
    EXPECT_EQ(to_float(from_float<T>(std::nextafter(m, INFINITY))), std::max(values[i], values[i + 1]));
    EXPECT_EQ(to_float(from_float<T>(std::nextafter(m, -INFINITY))), std::min(values[i], values[i + 1]));
  }
}

TEST(Numeric, RoundsToNearestTiesToEven) {
  nearest_even<float8_e4m3fn>(127, 1);
  nearest_even<bfloat16>(0x7F80, 7);
  nearest_even<float16>(0x7C00, 7);
}

TEST(TensorView, Contiguity) {
  float x[24];
  TensorView t(x, DType::kFloat32, {2, 3, 4});
  EXPECT_TRUE(t.contiguous());
  t.strides[0] = 100;
  EXPECT_FALSE(t.contiguous());
  EXPECT_TRUE(t.inner_contiguous(2));
  t.sizes[0] = 1;
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(shape_text(t), "(1, 3, 4)");
  EXPECT_EQ(shape_text(TensorView(x, DType::kFloat32, {5})), "(5,)");
  EXPECT_FALSE(TensorView{}.given());
}

TEST(Matcher, NamesOperationArgumentExpectedAndGot) {
  float x[12];
  TensorView t(x, DType::kFloat32, {3, 4});
  TensorView u(x, DType::kFloat32, {3, 2});
  Sym B("B"), K("K");
  Checker check("swap");
  check.arg("t", t).required().dtype(DType::kFloat32).shape({B, K});
  EXPECT_EQ(B.value(), 3);
  EXPECT_EQ(text_of([&] { check.arg("u", u).shape({B, K}); }), "swap: u: expected shape [B=3, K=4], got (3, 2).");
  EXPECT_EQ(text_of([&] {
              check.arg("u", u).dtype({DType::kInt32, DType::kInt64});
            }),
            "swap: u: expected dtype int32 or int64, got float32.");
  EXPECT_EQ(text_of([&] { check.arg("v", TensorView{}).required(); }), "swap: v: expected a tensor, got none.");
  EXPECT_EQ(text_of([&] { check.arg("u", u).shape({Dim::at_least(4, "B")}); }), "swap: u: expected shape [B >= 4], got (3, 2).");
  EXPECT_EQ(text_of([&] { check.arg("u", u).text("exact words").ndim(3); }), "exact words");
  check.arg("absent", TensorView{}).dtype(DType::kInt32).shape({B}).inner_contiguous(1);  // optional: skipped
}

TEST(Matcher, ARefusedShapeBindsNothing) {
  float x[12];
  TensorView t(x, DType::kFloat32, {3, 4});
  Sym B("B");
  Checker check("op");
  EXPECT_THROW(check.arg("t", t).shape({B, 5}), Error);
  EXPECT_FALSE(B.bound());
  EXPECT_THROW(check.arg("t", t).shape({B, B}), Error);  // 3 != 4
}

TEST(Matcher, StridesDevicesAndOverlap) {
  float x[24];
  TensorView t(x, DType::kFloat32, {3, 4});
  Checker check("op");
  TensorView broadcast = t;
  broadcast.strides[0] = 0;
  EXPECT_THROW(check.arg("t", broadcast).written(), Error);
  TensorView column_major = t;
  column_major.strides[0] = 1, column_major.strides[1] = 3;
  check.arg("t", column_major).written();
  EXPECT_THROW(check.arg("t", column_major).inner_contiguous(1), Error);
  TensorView gpu = t;
  gpu.device = {DeviceType::kCuda, 1};
  check.arg("t", t).same_device();
  EXPECT_EQ(text_of([&] { check.arg("g", gpu).same_device(); }), "op: g: expected device cpu (where t is), got cuda:1.");
  TensorView next(x + 12, DType::kFloat32, {3, 4});
  EXPECT_FALSE(may_overlap(t, next));
  EXPECT_TRUE(may_overlap(t, TensorView(x + 11, DType::kFloat32, {1})));
}

TEST(Matcher, MemoryAndSizesAreThere) {
  float x[12];
  Checker check("op");
  EXPECT_EQ(text_of([&] {
              check.arg("t", TensorView(nullptr, DType::kFloat32, {3, 4})).same_device();
            }),
            "op: t: expected memory for shape (3, 4), got a null pointer.");
  EXPECT_EQ(text_of([&] {
              check.arg("t", TensorView(nullptr, DType::kFloat32, {3, 4})).written();
            }),
            "op: t: expected memory for shape (3, 4), got a null pointer.");
  EXPECT_EQ(text_of([&] {
              check.arg("t", TensorView(x, DType::kFloat32, {-1, 3})).same_device();
            }),
            "op: t: expected sizes of 0 or more, got shape (-1, 3).");
  check.arg("t", TensorView(nullptr, DType::kFloat32, {0, 4})).same_device();  // nothing there to point to
}

TEST(Matcher, AddressesAndCountsFit) {
  alignas(8) char x[64];
  const auto seen = [](const TensorView& t, bool bytes = false, bool written = false) {
    return text_of([&] {
      Checker check("op");
      ArgCheck a = check.arg("a", t);
      if (bytes) a.as_bytes();
      written ? a.written() : a.same_device();
    });
  };
  for (const DType d : {DType::kInt16, DType::kInt32, DType::kFloat64}) {
    const TensorView odd(x + 1, d, {2});
    const std::string text =
        "op: a: expected a data pointer that is a multiple of " + std::to_string(size_of(d)) + " bytes, got remainder 1.";
    EXPECT_EQ(seen(odd), text);
    EXPECT_EQ(seen(odd, false, true), text);
    EXPECT_EQ(seen(odd, true), "");
    EXPECT_EQ(seen(odd, true, true), "");
    EXPECT_EQ(seen(TensorView(x + 1, d, {0})), "");
  }
  EXPECT_EQ(seen(TensorView(nullptr, DType::kInt32, {2}), true), "op: a: expected memory for shape (2,), got a null pointer.");
  // A broadcast or empty view may claim any shape; its products must not come back into range.
  constexpr std::int64_t kHuge = std::int64_t{1} << 32;
  TensorView t(x, DType::kInt32, {kHuge, kHuge});
  t.strides[0] = t.strides[1] = 0;
  const std::string text = "op: a: expected elements and bytes that 64 bits can count, got shape (4294967296, 4294967296).";
  EXPECT_EQ(seen(t), text);
  t.sizes[1] = 1 << 20;
  EXPECT_EQ(seen(t), "");
  EXPECT_EQ(seen(t, false, true), "op: a: expected elements that do not share memory, got stride 0 for shape (4294967296, 1048576).");
  t.sizes[1] = 2, t.strides[0] = kHuge;
  EXPECT_EQ(seen(t), "op: a: expected elements and bytes that 64 bits can count, got shape (4294967296, 2).");
  t.sizes[0] = 1, t.strides[0] = INT64_MAX;  // a dimension of one entry has no stride
  EXPECT_EQ(seen(t), "");
  t.sizes[0] = 2, t.strides[0] = INT64_MIN;
  EXPECT_EQ(seen(t), "op: a: expected elements and bytes that 64 bits can count, got shape (2, 2).");
  TensorView empty(nullptr, DType::kInt32, {0, kHuge, kHuge});
  EXPECT_EQ(seen(empty), "op: a: expected elements and bytes that 64 bits can count, got shape (0, 4294967296, 4294967296).");
  TensorView many(x, DType::kInt32, {1});
  many.ndim = 9;
  EXPECT_EQ(seen(many), "op: a: expected at most 8 dimensions, got 9.");
  EXPECT_EQ(seen(TensorView(x, static_cast<DType>(99), {2})), "op: a: expected a dtype, got unknown (99).");
}

/// Calls of many arguments are looked at another way first: the same are refused, with the same words.
TEST(Matcher, OutputsOfLongCallsShareMemoryWithNothing) {
  std::vector<char> memory(4096);
  std::vector<std::string> names(60);
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = "a" + std::to_string(i);
  std::mt19937 random(7);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<TensorView> all;
    std::vector<bool> written;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::int64_t place = static_cast<std::int64_t>(random() % (round % 2 ? 4000 : 60)),
                         size = 1 + static_cast<std::int64_t>(random() % 30);
      all.emplace_back(memory.data() + (round % 2 ? place : 64 * static_cast<std::int64_t>(i) + place % 34), DType::kUInt8,
                       std::initializer_list<std::int64_t>{round % 2 ? size % 4 + 1 : size});
      written.push_back(random() % 3 == 0);
    }
    std::string expected;
    for (std::size_t i = 0; i < names.size() && expected.empty(); ++i)
      for (std::size_t j = 0; written[i] && j < names.size() && expected.empty(); ++j) {
        if (i == j || (written[j] && j > i)) continue;
        const auto *a = all[i].as<char>(), *b = all[j].as<char>();
        if (a < b + all[j].sizes[0] && b < a + all[i].sizes[0])
          expected = "op: " + names[i] + ": expected memory of its own, got memory that overlaps " + names[j] + ".";
      }
    refused += !expected.empty();
    EXPECT_EQ(text_of([&] {
                Checker check("op");
                for (std::size_t i = 0; i < names.size(); ++i) {
                  ArgCheck a = check.arg(names[i].c_str(), all[i]);
                  a.same_device();
                  if (written[i]) a.written();
                }
                check.outputs_apart();
              }),
              expected);
  }
  EXPECT_GT(refused, 50);
  EXPECT_LT(refused, 390);
}

TEST(Matcher, OutputsShareMemoryWithNothing) {
  float x[48];
  const auto part = [&](int at) { return TensorView(x + at, DType::kFloat32, {3, 4}); };
  const TensorView in = part(0), other_in = part(0), out = part(12), other_out = part(24), empty(x, DType::kFloat32, {0, 4});
  const auto apart = [](auto&& arguments) {
    return text_of([&] {
      Checker check("op");
      arguments(check);
      check.outputs_apart();
    });
  };
  // Inputs may share memory, an argument may be looked at twice, what is empty or not given touches nothing.
  EXPECT_EQ(apart([&](Checker& c) {
              c.arg("a", in).same_device();
              c.arg("b", other_in).same_device();
              c.arg("out", out).same_device().written();
              c.arg("out", out).shape({3, 4});
              c.arg("state", other_out).same_device();
              c.arg("state", other_out).written();
              c.arg("empty", empty).same_device().written();
              c.arg("absent", TensorView{}).same_device().written();
            }),
            "");
  EXPECT_EQ(apart([&](Checker& c) {
              c.arg("a", part(2)).same_device();
              c.arg("out", in).same_device().written();
            }),
            "op: out: expected memory of its own, got memory that overlaps a.");
  EXPECT_EQ(apart([&](Checker& c) {
              c.arg("out", in).same_device().written();
              c.arg("a", part(11)).same_device();
            }),
            "op: out: expected memory of its own, got memory that overlaps a.");
  EXPECT_EQ(apart([&](Checker& c) {
              c.arg("first", in).same_device().written();
              c.arg("second", part(5)).same_device().written();
            }),
            "op: second: expected memory of its own, got memory that overlaps first.");
}

TEST(Matcher, ViewsWovenIntoOneBufferDoNotOverlap) {
  float x[2 * 3 * 24];
  const auto strided = [&](int offset, std::initializer_list<std::int64_t> sizes, std::initializer_list<std::int64_t> strides) {
    TensorView t(x + offset, DType::kFloat32, sizes);
    std::copy(strides.begin(), strides.end(), t.strides);
    return t;
  };
  // [rows 2, steps 3, taps 3, q|k of 4 channels]: q and k as [row, step, channel, tap].
  const TensorView q = strided(0, {2, 3, 4, 3}, {72, 24, 1, 8}), k = strided(4, {2, 3, 4, 3}, {72, 24, 1, 8});
  EXPECT_FALSE(may_overlap(q, k));
  EXPECT_FALSE(may_overlap(k, q));
  EXPECT_TRUE(may_overlap(q, strided(3, {2, 3, 4, 3}, {72, 24, 1, 8})));
  EXPECT_TRUE(may_overlap(q, strided(5, {2, 3, 4, 3}, {72, 24, 1, 8})));
  // Slots of 72 floats: a state of 40 and a window of 32.
  EXPECT_FALSE(may_overlap(strided(0, {2, 40}, {72, 1}), strided(40, {2, 32}, {72, 1})));
  EXPECT_TRUE(may_overlap(strided(0, {2, 41}, {72, 1}), strided(40, {2, 32}, {72, 1})));
  EXPECT_TRUE(may_overlap(strided(0, {2, 40}, {72, 1}), strided(40, {2, 33}, {72, 1})));
  EXPECT_TRUE(may_overlap(strided(0, {2, 40}, {72, 1}), strided(40, {2, 32}, {71, 1})));
}

}  // namespace
