#pragma once
// What the targets share: values from the fuzzer's bytes, and the tensors of one call.
//
// A target builds a call that is nearly right: sizes that fit each other, ids that are mostly inside, and now and then a tensor with
// one thing wrong (a dtype, a rank, a size, a stride, its device, or not given at all). The call must then either throw
// specstate::Error and leave all memory as it was, or run clean under the sanitizers, write its outputs only, and nothing between
// the elements of a strided one. Each tensor has exactly the memory that its view reaches, in an allocation of its own, so that
// AddressSanitizer sees one step outside.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <memory>
#include <vector>

#include "core/numeric.hpp"
#include "specstate/error.hpp"
#include "specstate/executor.hpp"
#include "specstate/tensor.hpp"

// The harness itself is not what coverage should be collected of.
#if defined(__clang__)
#define SPECSTATE_HARNESS __attribute__((no_sanitize("coverage")))
#else
#define SPECSTATE_HARNESS
#endif

namespace specstate::fuzz {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

/// Values from the bytes of the input; when they have run out, the lowest of each range.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::int64_t integer(std::int64_t lowest, std::int64_t highest) {
    const std::uint64_t range = static_cast<std::uint64_t>(highest - lowest) + 1;
    std::uint64_t value = 0;
    for (std::uint64_t covered = 1; covered < range && covered < (1ull << 56); covered <<= 8) value = value << 8 | byte();
    return lowest + static_cast<std::int64_t>(value % range);
  }
  bool chance(int one_in) { return integer(0, one_in - 1) == one_in - 1; }
  bool flip() { return chance(2); }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[integer(0, static_cast<std::int64_t>(values.size()) - 1)];
  }

 private:
  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  const std::uint8_t* data_;
  std::size_t size_, at_ = 0;
};

/// What a tensor holds. Bulk values come from a generator that the input seeds: its bytes are for the structure.
struct Values {
  std::int64_t lowest, highest;  ///< of integers
  float low = -2, high = 2;      ///< of floats
  bool distinct = false;         ///< integers count upwards, around the range: requests of a batch, permutations, rows of a pool
};
inline constexpr Values kPoison{0, -1};  ///< an output: a pattern that nobody writes by chance

class Call {
 public:
  explicit Call(Input& input) : input_(input) {}

  TensorView in(DType dtype, std::vector<std::int64_t> sizes, Values values = {0, 3}) { return make(dtype, sizes, values, false); }
  /// Floats from 0 to 1: probabilities, scales.
  TensorView unit(DType dtype, std::vector<std::int64_t> sizes) { return make(dtype, sizes, {0, 1, 0, 1}, false); }
  TensorView out(DType dtype, std::vector<std::int64_t> sizes) { return make(dtype, sizes, kPoison, true); }
  TensorView inout(DType dtype, std::vector<std::int64_t> sizes, Values values = {0, 3}) { return make(dtype, sizes, values, true); }

  /// Runs the operation and holds it to its promises.
  template <class F>
  SPECSTATE_HARNESS int run(F&& operation) {
    for (Buffer& b : buffers_) b.before.assign(b.memory.get(), b.memory.get() + b.bytes);
    bool refused = false;
    try {
      operation();
    } catch (const Error& e) {
      if (e.what()[0] == 0) fail("an error without a text");
      refused = true;
    }
    for (const Buffer& b : buffers_) {
      if (refused || !b.writable) {
        if (b.bytes > 0 && std::memcmp(b.before.data(), b.memory.get(), b.bytes) != 0)
          fail(refused ? "a refused call wrote" : "an input was written");
        continue;
      }
      if (static_cast<std::size_t>(b.view.numel() * size_of(b.view.dtype)) == b.bytes) continue;  // no gaps
      std::vector<bool> element(b.bytes);
      each_element(b.view, [&](std::int64_t offset) SPECSTATE_HARNESS {
        const std::int64_t size = size_of(b.view.dtype), at = b.origin + offset * size;
        for (std::int64_t i = 0; i < size; ++i) element[static_cast<std::size_t>(at + i)] = true;
      });
      for (std::size_t i = 0; i < b.bytes; ++i)
        if (!element[i] && b.before[i] != b.memory[i]) fail("something between the elements of an output was written");
    }
    return 0;
  }

 private:
  struct Buffer {
    TensorView view;
    std::unique_ptr<std::uint8_t[]> memory;
    std::size_t bytes = 0;
    std::int64_t origin = 0;  // byte of element (0, 0, ...)
    bool writable = false;
    std::vector<std::uint8_t> before;
  };

  template <class F>
  SPECSTATE_HARNESS static void each_element(const TensorView& t, F&& f) {
    for (int d = 0; d < t.ndim; ++d)
      if (t.sizes[d] <= 0) return;
    std::int64_t index[kMaxDims] = {}, offset = 0;
    for (;;) {
      f(offset);
      int d = t.ndim - 1;
      for (; d >= 0; --d) {
        offset += t.strides[d];
        if (++index[d] < t.sizes[d]) break;
        offset -= t.strides[d] * t.sizes[d];
        index[d] = 0;
      }
      if (d < 0) return;
    }
  }

  TensorView make(DType dtype, const std::vector<std::int64_t>& sizes, Values values, bool writable) {
    TensorView t;
    t.dtype = dtype;
    t.ndim = static_cast<std::int32_t>(sizes.size());
    for (int d = 0; d < t.ndim; ++d) t.sizes[d] = sizes[static_cast<std::size_t>(d)];
    if (input_.chance(64)) damage(t);
    // Dense, or with room after some dimension.
    std::int64_t stride = 1;
    const std::int64_t wide = input_.chance(4) ? input_.integer(0, t.ndim) : -1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (d == wide) stride = stride * 2 + (input_.flip() ? 1 : 0);
      t.strides[d] = stride;
      stride *= t.sizes[d] > 0 ? t.sizes[d] : 1;
    }
    if (t.ndim > 0 && input_.chance(64)) t.strides[input_.integer(0, t.ndim - 1)] = input_.pick<std::int64_t>({0, -1, 1, 2, 3, 7});
    if (input_.chance(256)) t.device = {DeviceType::kCuda, 0};
    if (input_.chance(256)) return {};  // not given

    std::int64_t low = 0, high = 0;
    bool empty = false;
    for (int d = 0; d < t.ndim; ++d) {
      if (t.sizes[d] <= 0) {
        empty = true;
        continue;
      }
      const std::int64_t reach = t.strides[d] * (t.sizes[d] - 1);
      (reach < 0 ? low : high) += reach;
    }
    const std::int64_t size = size_of(t.dtype), elements = empty ? 0 : high - low + 1;
    if (elements > (1 << 22)) return {};
    Buffer& b = buffers_.emplace_back();
    b.bytes = static_cast<std::size_t>(elements * size);
    b.memory = std::make_unique<std::uint8_t[]>(b.bytes);
    std::fill_n(b.memory.get(), b.bytes, std::uint8_t{0xA5});
    b.origin = empty ? 0 : -low * size;
    b.writable = writable;
    t.data = b.memory.get() + b.origin;
    b.view = t;
    if (values.lowest <= values.highest) fill(t, values);
    return t;
  }

  void damage(TensorView& t) {
    switch (input_.integer(0, 3)) {
      case 0: t.dtype = static_cast<DType>(input_.integer(0, static_cast<int>(DType::kBool))); break;
      case 1:
        if (t.ndim > 0) t.sizes[input_.integer(0, t.ndim - 1)] = input_.integer(0, 9);
        break;
      case 2:
        if (t.ndim > 0) --t.ndim;
        break;
      case 3:
        if (t.ndim < kMaxDims) t.sizes[t.ndim++] = input_.integer(0, 2);
        break;
    }
  }

  SPECSTATE_HARNESS void fill(const TensorView& t, Values values) {
    constexpr std::int64_t kTile = 1024;
    if (!values.distinct && t.contiguous() && t.numel() > kTile) {  // repeats: the fuzzer's time belongs to the library
      TensorView tile = t;
      tile.ndim = 1, tile.sizes[0] = kTile, tile.strides[0] = 1;
      fill(tile, values);
      const std::int64_t bytes = t.numel() * size_of(t.dtype), step = kTile * size_of(t.dtype);
      for (std::int64_t at = step; at < bytes; at += step)
        std::memcpy(t.as<std::byte>() + at, t.data, static_cast<std::size_t>(std::min(step, bytes - at)));
      return;
    }
    std::uint64_t state = static_cast<std::uint64_t>(input_.integer(0, 65535)) * 0x9E3779B97F4A7C15ull + 1;
    const bool wild = input_.chance(16);  // this tensor also has values from outside
    auto next = [&state] {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return state >> 11;
    };
    std::uint64_t count = next();
    each_element(t, [&](std::int64_t offset) SPECSTATE_HARNESS {
      const bool outside = wild && next() % 8 == 0;
      const std::uint64_t range = static_cast<std::uint64_t>(values.highest - values.lowest) + 1;
      std::int64_t integer = values.lowest + static_cast<std::int64_t>((values.distinct ? count++ : next()) % range);
      float real = values.low + (values.high - values.low) * (static_cast<float>(next() % 4097) / 4096.0f);
      if (outside) {
        const std::int64_t integers[] = {-1, values.highest + 1, values.lowest - 1, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1 << 20};
        const float reals[] = {
            0.0f, -0.0f, 1e30f, -1e30f, 1e-40f, static_cast<float>(INFINITY), -static_cast<float>(INFINITY), static_cast<float>(NAN)};
        integer = integers[next() % 8], real = reals[next() % 8];
      }
      switch (t.dtype) {
        case DType::kFloat32: t.as<float>()[offset] = real; break;
        case DType::kFloat64: t.as<double>()[offset] = real; break;
        case DType::kBFloat16: t.as<core::bfloat16>()[offset] = core::from_float<core::bfloat16>(real); break;
        case DType::kFloat16: t.as<core::float16>()[offset] = core::from_float<core::float16>(real); break;
        case DType::kInt16:
        case DType::kUInt16: t.as<std::int16_t>()[offset] = static_cast<std::int16_t>(integer); break;
        case DType::kInt32:
        case DType::kUInt32: t.as<std::int32_t>()[offset] = static_cast<std::int32_t>(integer); break;
        case DType::kInt64:
        case DType::kUInt64: t.as<std::int64_t>()[offset] = integer; break;
        default: t.as<std::uint8_t>()[offset] = static_cast<std::uint8_t>(next()); break;
      }
    });
  }

  Input& input_;
  std::deque<Buffer> buffers_;
};

/// One thread, so that a finding replays exactly.
class Serial final : public Executor {
 public:
  void parallel_for(std::int64_t n, std::int64_t, Body body, void* context) override { body(context, 0, n); }
  int concurrency() const override { return 1; }
};

}  // namespace specstate::fuzz

/// Not inline: nobody calls it but the fuzzer, and it must be there to be found.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  static specstate::fuzz::Serial serial;
  specstate::set_executor(&serial);
  return 0;
}
