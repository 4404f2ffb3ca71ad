#pragma once
// Norm and rotary of K for any head dim, dtype and stride: what any_rows and the launch function have in common.
#include "draft_kv/cuda/finish.cuh"

namespace specstate::draft_kv::cuda {

__device__ __forceinline__ float round_to(DType io, float x) {
  if (io == DType::kBFloat16) return rounded<core::bfloat16>(x);
  if (io == DType::kFloat16) return rounded<core::float16>(x);
  return x;
}

/// Norm and rotary of one K head of `dim` channels in shared memory, by a warp; the caller rounds. Ends with the warp in step.
struct AnyNormRope {
  TensorView norm, eps, table;  // [L, D], [L], [P, R] or [L, P, R]
  int head_dim, rotary_dim;
  bool is_neox_style, round_after_norm;
  DType io;
};
__device__ inline void norm_rope(const AnyNormRope& x, int layer, std::int64_t position, float* p, int lane) {
  float squares = 0;
  for (int i = lane; i < x.head_dim; i += 32) squares = fmaf(p[i], p[i], squares);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  const float s = norm_factor(squares, x.head_dim, x.eps.as<float>()[layer * x.eps.strides[0]]);
  for (int i = lane; i < x.head_dim; i += 32) {
    const float y = p[i] * s * value_at(x.norm.data, x.norm.dtype, layer * x.norm.strides[0] + i * x.norm.strides[1]);
    p[i] = x.round_after_norm ? round_to(x.io, y) : y;
  }
  __syncwarp();
  const int half = x.rotary_dim / 2, d = x.table.ndim - 2;
  const std::int64_t row = (d ? layer * x.table.strides[0] : 0) + position * x.table.strides[d];
  for (int i = lane; i < half; i += 32) {
    const RotaryPair pair = rotary_pair(i, half, x.is_neox_style);
    const float c = value_at(x.table.data, x.table.dtype, row + i * x.table.strides[d + 1]);
    const float sine = value_at(x.table.data, x.table.dtype, row + (half + i) * x.table.strides[d + 1]);
    const float a = p[pair.first], b = p[pair.second];
    p[pair.first] = a * c - b * sine;
    p[pair.second] = b * c + a * sine;
  }
  __syncwarp();
}

inline AnyNormRope any_norm_rope(const NormRope& nr) {
  return {nr.k_norm_weight,    nr.eps, nr.cos_sin_cache, static_cast<int>(nr.head_dim), static_cast<int>(nr.rotary_dim), nr.is_neox_style,
          nr.round_after_norm, nr.io};
}

}  // namespace specstate::draft_kv::cuda
