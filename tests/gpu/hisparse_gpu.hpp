#pragma once
// What the GPU tests of HiSparse share: pinned host rows that both backends read, and the numbers that they draw.
#include <algorithm>
#include <memory>
#include <new>
#include <numeric>

#include "gpu_test.hpp"

namespace specstate::gpu_test {
template <>
struct DTypeOf<std::int16_t> {
  static constexpr DType value = DType::kInt16;
};
}  // namespace specstate::gpu_test

namespace specstate::gpu_test {

using i64 = std::int64_t;
using i32 = std::int32_t;
using i16 = std::int16_t;
using u8 = std::uint8_t;
inline std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

/// Pinned memory that both backends read, and that transfers write.
class Pinned {
 public:
  explicit Pinned(i64 bytes, unsigned seed = 1) : bytes_(bytes), data_(Arena<true>::get().take(at(bytes))) {
    if (!data_) throw std::bad_alloc();
    std::mt19937_64 random(seed);
    for (i64 i = 0; i + 8 <= bytes; i += 8) {
      const std::uint64_t x = random();
      std::memcpy(data_ + i, &x, 8);
    }
  }
  Pinned(const Pinned&) = delete;
  ~Pinned() { Arena<true>::get().give(data_, at(bytes_)); }
  u8* data() const { return data_; }
  /// For a CUDA call the same memory, said to be pinned; for a CPU call plain memory.
  TensorView rows(i64 rows, i64 item, Where where) const {
    return TensorView(data_, DType::kUInt8, {rows, item}, {DeviceType::kCpu, 0, where == Where::kDevice});
  }

 private:
  i64 bytes_;
  u8* data_;
};

constexpr i64 kPage = 37440;

struct Random : std::mt19937 {
  using std::mt19937::mt19937;
  i64 pick(i64 low, i64 high) { return low + static_cast<i64>((*this)() % static_cast<unsigned>(high - low + 1)); }
  bool one_in(unsigned n) { return (*this)() % n == 0; }
};

}  // namespace specstate::gpu_test
