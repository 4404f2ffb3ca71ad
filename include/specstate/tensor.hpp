#pragma once
// TensorView: a non-owning, trivially copyable description of an array in caller-owned memory.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "specstate/export.hpp"

namespace specstate {

enum class DType : std::uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3FN,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat64,
  kBool,
};

/// Bytes of one element.
SPECSTATE_API std::int64_t size_of(DType dtype) noexcept;
/// The name that error texts use: "float32", "bfloat16", "float8_e4m3fn", ...
SPECSTATE_API const char* name_of(DType dtype) noexcept;

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;
  /// Pinned host memory that the GPU can address. Counts as host memory for the CPU backend.
  bool pinned = false;

  /// The same place for a kernel: pinned-ness does not count.
  friend bool operator==(const Device& a, const Device& b) noexcept { return a.type == b.type && a.index == b.index; }
};

/// "cpu" or "cuda:0".
SPECSTATE_API std::string name_of(const Device& device);

inline constexpr int kMaxDims = 8;

/// Pointer, dtype, device, sizes and element strides. A default-constructed view means "argument not given".
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device{};
  std::int32_t ndim = -1;
  std::int64_t sizes[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};  // in elements

  TensorView() = default;
  /// A dense row-major view.
  SPECSTATE_API TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> sizes, Device device = {});

  constexpr bool given() const noexcept { return ndim >= 0; }
  constexpr std::int64_t size(int dim) const noexcept { return sizes[dim < 0 ? dim + ndim : dim]; }
  constexpr std::int64_t stride(int dim) const noexcept { return strides[dim < 0 ? dim + ndim : dim]; }
  constexpr std::int64_t numel() const noexcept {
    std::int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= sizes[i];
    return n;
  }
  /// True if the last `dims` dimensions are dense row-major (sizes of 0 or 1 have no say).
  SPECSTATE_API bool inner_contiguous(int dims) const noexcept;
  bool contiguous() const noexcept { return inner_contiguous(ndim); }
  /// View of entry `i` of the first dimension.
  SPECSTATE_API TensorView operator[](std::int64_t i) const noexcept;
  template <class T>
  constexpr T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

/// "(2, 3, 4)", "(5,)" or "()": how error texts print shapes.
SPECSTATE_API std::string shape_text(const TensorView& t);

}  // namespace specstate
