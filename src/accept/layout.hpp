#pragma once
// Addresses and element reads of the acceptance tensors, in 64 bits, on host and device.
#include <cstdint>
#include <limits>

#include "core/numeric.hpp"

namespace specstate::accept {

inline constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

/// Offset in elements of entry [i, j] (and the start of its row if there are more dimensions).
SPECSTATE_HD inline std::int64_t element_offset(const TensorView& t, std::int64_t i, std::int64_t j) {
  return i * t.strides[0] + j * t.strides[1];
}

SPECSTATE_HD inline std::int64_t index_at(const TensorView& t, std::int64_t offset) {
  return t.dtype == DType::kInt64 ? t.as<std::int64_t>()[offset] : t.as<std::int32_t>()[offset];
}

/// An element of a floating-point tensor as float64, exactly.
SPECSTATE_HD inline double real_at(const TensorView& t, std::int64_t offset) {
  switch (t.dtype) {
    case DType::kFloat64: return t.as<double>()[offset];
    case DType::kBFloat16: return core::to_float(t.as<core::bfloat16>()[offset]);
    case DType::kFloat16: return core::to_float(t.as<core::float16>()[offset]);
    default: return t.as<float>()[offset];
  }
}

}  // namespace specstate::accept
