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

/// NaN and negative numbers are no mass.
SPECSTATE_HD inline double mass(double x) { return x > 0 ? x : 0; }

/// How long sums run, of masses in id order and of survivals in order of rank: in blocks of 64 terms and groups of 64 blocks. The sum up
/// to a term is groups before + (blocks before in its group + the terms of its block, one by one). It never falls, and each part can be
/// summed by another thread to the same bits.
inline constexpr std::int64_t kSumBlock = 64, kSumGroup = 64 * kSumBlock;

class RunningSum {
 public:
  /// The sum up to and including x.
  SPECSTATE_HD double add(double x) {
    if (n_ % kSumBlock == 0) {
      blocks_ += terms_, terms_ = 0;
      if (n_ % kSumGroup == 0) groups_ += blocks_, blocks_ = 0;
    }
    ++n_;
    terms_ += x;
    return value();
  }
  SPECSTATE_HD double value() const { return groups_ + (blocks_ + terms_); }

 private:
  double groups_ = 0, blocks_ = 0, terms_ = 0;
  std::int64_t n_ = 0;
};

/// Survivals below this are never chosen for verification.
inline constexpr double kLeastSurvival = 1e-6;

}  // namespace specstate::accept
