#pragma once
// A row with what belongs to it: values, and in DSv4 pages the scales behind them.
#include "hisparse/cuda/rows.cuh"

namespace specstate::hisparse::cuda {

/// Lane l brings the l-th of up to 32 ways; the warp goes them. Scales are asked for before the values and stored behind them: a load
/// from the host that is waited for on its own costs as much as a row.
__device__ __forceinline__ void go_ways(int vec, i64 item, const Way& mine, u32 count) {
  const bool wide = mine.scale != nullptr && vec >= 8;
  uint2 scale{};
  if (wide)
    scale = load_once(reinterpret_cast<const uint2*>(mine.scale));
  else if (mine.scale != nullptr)
    copy_scale(vec, mine.scale, mine.scale_to);
  move_any(vec, mine.from, mine.to, count, static_cast<u32>(item));
  if (wide) *reinterpret_cast<uint2*>(mine.scale_to) = scale;
}

}  // namespace specstate::hisparse::cuda
