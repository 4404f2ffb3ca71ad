#pragma once
// The one address formula of the family: element offset = sum of index * stride, in 64 bits (a pool of many layers has slots of
// 56 MB, so a 32-bit product wraps at slot 153).
#include <cstdint>

#include "core/numeric.hpp"
#include "kda/args.hpp"

namespace specstate::kda {

/// Element offset of a.[i0, i1, ...]; indices that are left out are 0.
SPECSTATE_HD inline std::int64_t at(const Array& a, std::int64_t i0, std::int64_t i1 = 0, std::int64_t i2 = 0, std::int64_t i3 = 0,
                                    std::int64_t i4 = 0) {
  return i0 * a.stride[0] + i1 * a.stride[1] + i2 * a.stride[2] + i3 * a.stride[3] + i4 * a.stride[4];
}

/// Pointer to an element, whatever its storage type.
SPECSTATE_HD inline char* address(const Array& a, std::int64_t offset) { return static_cast<char*>(a.data) + offset * (a.bf16 ? 2 : 4); }

SPECSTATE_HD inline float load(const Array& a, std::int64_t offset) {
  return a.bf16 ? core::to_float(static_cast<const core::bfloat16*>(a.data)[offset]) : static_cast<const float*>(a.data)[offset];
}

SPECSTATE_HD inline void store(const Array& a, std::int64_t offset, float value) {
  if (a.bf16)
    static_cast<core::bfloat16*>(a.data)[offset] = core::from_float<core::bfloat16>(value);
  else
    static_cast<float*>(a.data)[offset] = value;
}

SPECSTATE_HD inline std::int32_t& at(const Pending& a, std::int64_t layer, std::int64_t slot) {
  return a.data[layer * a.stride[0] + slot * a.stride[1]];
}

SPECSTATE_HD inline std::int64_t index(const Index& a, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t at = i * a.stride[0] + j * a.stride[1];
  return a.wide ? static_cast<const std::int64_t*>(a.data)[at] : static_cast<const std::int32_t*>(a.data)[at];
}

/// Tokens to fold of a request, as the indices in device memory say it; it may be more than there are entries.
SPECSTATE_HD inline std::int64_t accepted(const FoldCall& a, std::int64_t layer, std::int64_t request, std::int64_t slot) {
  if (!a.pending) return index(a.accept, request);
  if (slot <= a.null_slot || slot < 0 || slot >= a.pool) return 0;
  if (a.cu && index(a.cu, request) >= index(a.cu, request + 1)) return 0;
  return at(a.pending, layer, slot);
}

}  // namespace specstate::kda
