#pragma once
// The fused epilogue: what becomes of one head of one row once its projection is complete. Bias and rounding, for K the norm, the rotary
// and rounding again, then the pool.
//
// Both products leave the columns of a tile as the tensor cores do: of a row, lane q of four has the columns 8 j + 2 q + {0, 1}. In words of two
// channels: word 4 j + q of lane q, 0 <= j < 16. A word's partner is the word half a head further: with a rotary over the whole head, words are turned
// with their partners. Both sum the squares of a head in one order: a word and its partner ("chunk"), then over j, then over q, each as a butterfly.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "draft_kv/cuda/rows.cuh"

namespace specstate::draft_kv::cuda {

template <class Io>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (sizeof(Io) == 4) return x;
  return core::to_float(core::from_float<Io>(x));
}
template <>
__device__ __forceinline__ float rounded<core::bfloat16>(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}
template <>
__device__ __forceinline__ float rounded<core::float16>(float x) {
  return __half2float(__float2half_rn(x));
}

__device__ __forceinline__ float value_at(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kBFloat16) return core::to_float(static_cast<const core::bfloat16*>(data)[i]);
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(data)[i]);
  if (dtype == DType::kFloat64) return static_cast<float>(static_cast<const double*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

__device__ __forceinline__ int size_of_value(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat64 ? 8 : 2; }
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/// Two floats as two e4m3 codes, saturating.
__device__ __forceinline__ std::uint16_t e4m3_pair(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ std::uint32_t bf16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ std::uint32_t fp16_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Reads an argument of the kernel, so that its line of 64 bytes is there when it is wanted.
__device__ __forceinline__ void touch(int argument) {  // somebody must want it, or it is not read
  asm volatile("{\n.reg .pred never;\nsetp.eq.s32 never, %0, -1234567;\n@never nanosleep.u32 1;\n}\n" ::"r"(argument));
}
__device__ __forceinline__ void touch(const LayerPool& pool) {
  touch(static_cast<int>(pool.slot_stride)), touch(static_cast<int>(pool.channel_stride));
}

/// One channel into the pool.
__device__ __forceinline__ void store_channel(void* data, DType dtype, std::int64_t at, float scale, float x) {
  if (dtype == DType::kBFloat16)
    static_cast<core::bfloat16*>(data)[at] = core::from_float<core::bfloat16>(x);
  else if (dtype == DType::kFloat16)
    static_cast<core::float16*>(data)[at] = core::from_float<core::float16>(x);
  else if (dtype == DType::kFloat32)
    static_cast<float*>(data)[at] = x;
  else
    static_cast<core::float8_e4m3fn*>(data)[at] = core::from_float<core::float8_e4m3fn>(x / scale);
}
/// Four channels, one at a time or as one piece: what is rarer than bfloat16 in one piece stands outside of the kernels' unrolled code.
__device__ __forceinline__ void store_four_here(void* data, DType dtype, bool wide, std::int64_t at, std::int64_t stride, float scale,
                                                float4 x) {
  const float v[4] = {x.x, x.y, x.z, x.w};
  if (!wide) {
    for (int i = 0; i < 4; ++i) store_channel(data, dtype, at + i * stride, scale, v[i]);
  } else if (dtype == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = x;
  } else if (dtype == DType::kFloat16) {
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(data) + at) = make_uint2(fp16_pair(x.x, x.y), fp16_pair(x.z, x.w));
  } else if (dtype == DType::kBFloat16) {
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(data) + at) = make_uint2(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w));
  } else {
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint8_t*>(data) + at) =
        e4m3_pair(x.x / scale, x.y / scale) | static_cast<std::uint32_t>(e4m3_pair(x.z / scale, x.w / scale)) << 16;
  }
}
inline __device__ __noinline__ void store_four(void* data, DType dtype, bool wide, std::int64_t at, std::int64_t stride, float scale,
                                               float4 x) {
  store_four_here(data, dtype, wide, at, stride, scale, x);
}
inline __device__ __noinline__ void store_two(void* data, DType dtype, bool wide, std::int64_t at, std::int64_t stride, float scale,
                                              float2 x) {
  if (!wide) {
    store_channel(data, dtype, at, scale, x.x), store_channel(data, dtype, at + stride, scale, x.y);
  } else if (dtype == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(data) + at) = x;
  } else if (dtype == DType::kFloat16) {
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(data) + at) = fp16_pair(x.x, x.y);
  } else {
    *reinterpret_cast<std::uint16_t*>(static_cast<std::uint8_t*>(data) + at) = e4m3_pair(x.x / scale, x.y / scale);
  }
}

/// Two neighbouring channels of a head, already rounded to Io, into the pool: as one piece where the pool allows it (`wide`).
__device__ __forceinline__ void store_channels(const LayerPool& pool, DType dtype, bool wide, std::int64_t head_offset, int channel,
                                               float scale, const float (&x)[2]) {
  if (wide && dtype == DType::kBFloat16)
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(pool.data) + head_offset + channel) = bf16_pair(x[0], x[1]);
  else
    store_two(pool.data, dtype, wide && dtype != DType::kBFloat16, head_offset + channel * pool.channel_stride, pool.channel_stride, scale,
              make_float2(x[0], x[1]));
}
/// Four.
__device__ __forceinline__ void store_channels(const LayerPool& pool, DType dtype, bool wide, std::int64_t head_offset, int channel,
                                               float scale, const float (&x)[4]) {
  if (wide && dtype == DType::kBFloat16)
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(pool.data) + head_offset + channel) =
        make_uint2(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]));
  else
    store_four(pool.data, dtype, wide, head_offset + channel * pool.channel_stride, pool.channel_stride, scale,
               make_float4(x[0], x[1], x[2], x[3]));
}

__device__ __forceinline__ float scale_of(const Problem& p, const Head& head) {
  const DType dtype = head.is_v ? p.v_dtype : p.k_dtype;
  if (dtype != DType::kFloat8E4M3FN && dtype != DType::kUInt8) return 1.0f;
  const Values& s = head.is_v ? p.v_scale : p.k_scale;
  return s.data ? value_at(s.data, s.dtype, (p.first_layer + head.layer) * s.stride) : p.target[head.is_v][head.layer].scale;
}

/// The sum of squares of a chunk: a word and its partner.
__device__ __forceinline__ float chunk_squares(const float (&x)[4]) {
  return fmaf(x[1], x[1], x[0] * x[0]) + fmaf(x[3], x[3], x[2] * x[2]);
}
__device__ __forceinline__ float norm_factor(float squares, int head_dim, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(head_dim) + eps);
}

// ------------------------------------------------------------------------------------------------- the norm of target features (features.cuh)

/// What the product leaves, and the norm. (Of other_heads.cuh: a projection; no squares, but a bias.)
struct Context {
  std::uint16_t* raw;  // [rows, hidden] of Io; after normalize_rows the finished rows
  float* squares;      // [rows, hidden / 16], or null
  Values norm;         // [hidden]
  float eps;
  int hidden;
  Values bias{};  // [layers, hidden / layers], or not there
  std::int64_t bias_layer = 0;
  int layer_columns = 1;
};

/// Adds the bias to the words 0, 1, .. of a row that start at `column`: lane q of four has two columns of each.
template <int kWords>
__device__ __forceinline__ void add_context_bias(const Context& c, int column, int q, float (&x)[2 * kWords]) {
  if (!c.bias.data) return;
#pragma unroll 1
  for (int at = 2 * q; at < 8 * kWords && column + at < c.hidden; at += 8) {
    const int layer = (column + at) / c.layer_columns;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float b =
          value_at(c.bias.data, c.bias.dtype, layer * c.bias_layer + (column + at + e - layer * c.layer_columns) * c.bias.stride);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        if (8 * j == at - 2 * q) x[2 * j + e] += b;
    }
  }
}

/// The sum of squares of 64 columns of a row, from those of 16 each.
__device__ __forceinline__ float squares_of_64(const Context& c, int row, int block) {
  const float4 x = reinterpret_cast<const float4*>(c.squares)[static_cast<std::int64_t>(row) * (c.hidden / 64) + block];
  return (x.x + x.y) + (x.z + x.w);
}
/// The factor of a row, by a warp.
__device__ __forceinline__ float row_factor(const Context& c, int row, int lane) {
  float squares = 0;
#pragma unroll 4
  for (int b = lane; b < c.hidden / 64; b += 32) squares += squares_of_64(c, row, b);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  return norm_factor(squares, c.hidden, c.eps);
}

/// Eight neighbouring values of a raw row, normed and rounded.
template <class Io>
__device__ __forceinline__ uint4 normed_piece(uint4 raw, float factor, const float (&norm)[8]) {
  std::uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Io x{static_cast<std::uint16_t>(word[i] >> (16 * e))};
      y[e] = core::to_float(x) * factor * norm[2 * i + e];
    }
    word[i] = std::is_same_v<Io, core::bfloat16> ? bf16_pair(y[0], y[1]) : fp16_pair(y[0], y[1]);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <class Io>
__device__ __forceinline__ uint4 normed_piece(const Context& c, uint4 raw, float factor, int column) {
  float norm[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) norm[e] = value_at(c.norm.data, c.norm.dtype, (column + e) * c.norm.stride);
  return normed_piece<Io>(raw, factor, norm);
}

}  // namespace specstate::draft_kv::cuda
