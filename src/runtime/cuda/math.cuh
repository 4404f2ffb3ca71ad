#pragma once
// The CPU's row arithmetic (cpu/vector.hpp, cpu/vector-inl.hpp) on a warp: 32 interleaved chains are its 32 lanes, so sums have the same bits.
#include <cuda_runtime.h>

#include <cstdint>

#include "core/numeric.hpp"

namespace specstate::runtime::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

/// Chains added in halves; every lane gets the sum.
__device__ inline float sum_chains(float x) {
  for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(kAllLanes, x, half);
  return x;
}
/// sum of x^2 over a row, lane by lane; eight loads in flight (a zero behind the end changes no bit).
template <class X>
__device__ float sum_squares(int lane, std::int64_t n, X x) {
  float s = 0;
  for (std::int64_t i = lane; i < n; i += 256) {
    float v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = i + 32 * u < n ? x(i + 32 * u) : 0.0f;
#pragma unroll
    for (int u = 0; u < 8; ++u) s = fmaf(v[u], v[u], s);
  }
  return sum_chains(s);
}

/// e^x as cpu/vector-inl.hpp computes it.
__device__ inline float exponential(float x) {
  if (isnan(x)) return x;
  const float clamped = fminf(fmaxf(x, -104.0f), 89.0f), mf = rintf(clamped * 0x1.715476p+0f);
  const int m = static_cast<int>(mf), half = m >> 1;
  float r = fmaf(-mf, 0x1.62e4p-1f, clamped);
  r = fmaf(-mf, 0x1.7f7d1cp-20f, r);
  float q = 0x1.6a2434p-10f;
  q = fmaf(q, r, 0x1.1239e2p-7f);
  q = fmaf(q, r, 0x1.5558f2p-5f);
  q = fmaf(q, r, 0x1.555492p-3f);
  q = fmaf(q, r, 0x1.fffffcp-2f);
  const float e = 1.0f + fmaf(r * r, q, r);
  return e * __int_as_float((half + 127) << 23) * __int_as_float((m - half + 127) << 23);
}
__device__ inline float sigmoid(float x) {
  const float e = exponential(-fabsf(x));
  return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

__device__ inline float from_bits(std::uint16_t x) { return __uint_as_float(static_cast<std::uint32_t>(x) << 16); }
__device__ inline std::uint16_t to_bits(float x) { return core::from_float<core::bfloat16>(x).bits; }

}  // namespace specstate::runtime::cuda
