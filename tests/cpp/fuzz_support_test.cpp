// The promises that fuzz targets hold a call to (tests/fuzz/fuzz.hpp): each must be able to fail.
#include <gtest/gtest.h>

#include "../fuzz/fuzz.hpp"
#include "core/match.hpp"

using namespace specstate;
using namespace specstate::fuzz;

namespace {

struct Tensors {
  Input input{nullptr, 0};  // no bytes: nothing is damaged, everything dense
  Call call{input};
  TensorView in = call.in(DType::kInt32, {2, 3}, {1, 5});
  TensorView out = call.out(DType::kInt32, {2, 3});
};

TEST(FuzzCall, FillsInputsAndPoisonsOutputs) {
  Tensors t;
  for (int i = 0; i < 6; ++i) {
    EXPECT_GE(t.in.as<std::int32_t>()[i], 1);
    EXPECT_LE(t.in.as<std::int32_t>()[i], 5);
    EXPECT_EQ(t.out.as<std::uint32_t>()[i], 0xA5A5A5A5u);
  }
  EXPECT_EQ(t.call.run([&] { t.out.as<std::int32_t>()[5] = 1; }), 0);
  EXPECT_EQ(t.call.run([] { core::throw_value("refused"); }), 0);
}

TEST(FuzzCallDeathTest, SeesBrokenPromises) {
  Tensors t;
  EXPECT_DEATH(t.call.run([&] { t.in.as<std::int32_t>()[0] = 9; }), "an input was written");
  EXPECT_DEATH(t.call.run([&] { t.out.as<std::int32_t>()[0] = 9, core::throw_value("too late"); }), "a refused call wrote");
  EXPECT_DEATH(t.call.run([] { core::throw_value(""); }), "an error without a text");
}

TEST(FuzzCallDeathTest, SeesWritesBetweenElements) {
  // Bytes that ask for room after the last dimension: not damaged (0), wide (3 of 4 -> chance), dimension 1, no odd element.
  for (int wide = 0; wide < 3; ++wide) {
    const std::uint8_t bytes[] = {0, 3, static_cast<std::uint8_t>(wide), 0, 0, 0, 0};
    Input input(bytes, sizeof bytes);
    Call call(input);
    const TensorView out = call.out(DType::kInt32, {2, 3});
    if (out.contiguous()) continue;
    EXPECT_EQ(call.run([&] { out.as<std::int32_t>()[out.strides[0]] = 1; }), 0);
    EXPECT_DEATH(call.run([&] { out.as<std::int32_t>()[out.strides[0] - 1] = 1; }), "between the elements");
    return;
  }
  FAIL() << "no strided view was made";
}

}  // namespace
