// The block drafters' own kernels: rotary of the block's rows, attention over the materialized context and the block, and the proposals.
#include <algorithm>

#include "runtime/cuda/math.cuh"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/turn.cuh"

namespace specstate::runtime::cuda {

using specstate::cuda::blocks_for;

namespace {

using i64 = std::int64_t;
using i32 = std::int32_t;
constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxDim = 256, kAtOnce = 8;

__global__ void __launch_bounds__(kThreads)
    embed_rows_of_block(Rows rows, i64 block, const i32* last, i64 mask, const float* table, i64 d, float* x) {
  my_turn();
  const i64 i = i64{blockIdx.x} * kThreads + threadIdx.x, row = i / d, b = row / block;
  if (b >= rows.batch) return;
  const i64 id = row % block == 0 && b < *rows.real ? last[rows.requests[b]] : mask;
  x[i] = table[id * d + i % d];
}

/// A head's row as attention takes it, by a warp: normed, rotated (`table`: cosines, then sines, of its position), scaled.
__device__ void rotate(int lane, const float* x, i64 D, const float* norm, float eps, const float* table, i64 R, float scale, float* to) {
  const float sum = sum_squares(lane, D, [&](i64 i) { return x[i]; });
  const float s = 1.0f / sqrtf(sum / static_cast<float>(D) + eps);
  for (i64 i = lane; i < D; i += 32) to[i] = x[i] * s * norm[i];
  __syncwarp();
  const i64 half = R / 2;
  float y[kMaxDim / 32] = {};
#pragma unroll
  for (int u = 0; u < kMaxDim / 32; ++u)
    if (const i64 i = lane + 32 * u; i < D) {
      y[u] = to[i];
      if (i < half)
        y[u] = to[i] * table[i] - to[i + half] * table[half + i];
      else if (i < R)
        y[u] = to[i] * table[i - half] + to[i - half] * table[i];
    }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < kMaxDim / 32; ++u)
    if (const i64 i = lane + 32 * u; i < D) to[i] = y[u] * scale;
}

// A block a row and head. Its warps rotate the query and the block's keys, each block for itself: a launch would cost more. Then a warp scores a key, lanes are channels; values are summed by as many chains as the block holds copies of a head.
__global__ void __launch_bounds__(kThreads)
    attend_block(Rows rows, i64 block, const float* qkv, i64 stride, i64 heads, i64 kv_heads, i64 D, Rotary rotary, i64 window,
                 const std::uint16_t* k_pool, const std::uint16_t* v_pool, i64 pool_step, float* out) {
  SPECSTATE_DYNAMIC_SHARED(memory);
  float* const own_keys = reinterpret_cast<float*>(memory);  // [block, D]
  float* const score = own_keys + block * D;
  __shared__ float query[kMaxDim], room[kWarps], parts[kThreads];
  const i64 row = blockIdx.x, b = row / block, h = blockIdx.y, kv = h / (heads / kv_heads), step = kv_heads * D;
  my_turn();
  if (b >= *rows.real) return;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const i64 n = rows.positions[b * rows.width], own = n + row % block, first = window ? max(i64{0}, own - window + 1) : 0,
            total = n + block - first;
  const std::uint16_t *keys = k_pool + rows.requests[b] * pool_step * step + kv * D,
                      *values = v_pool + rows.requests[b] * pool_step * step + kv * D;
  const float *block_keys = qkv + b * block * stride + (heads + kv) * D, *block_values = block_keys + kv_heads * D;
  for (i64 j = warp; j <= block; j += kWarps) {
    const bool key = j < block;
    rotate(lane, key ? block_keys + j * stride : qkv + row * stride + h * D, D, key ? rotary.k_norm : rotary.q_norm, rotary.eps,
           rotary.table + (key ? n + j : own) * rotary.dim, rotary.dim, key ? 1.0f : rotary.scale, key ? own_keys + j * D : query);
  }
  __syncthreads();
  // Of several keys at a time, so that their loads are in flight together.
  const i64 context = max(i64{0}, n - first);
  for (i64 k0 = warp; k0 < context; k0 += kWarps * kAtOnce) {
    float dot[kAtOnce] = {};
    for (i64 i = lane; i < D; i += 32)
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const i64 k = min(k0 + u * kWarps, context - 1);
        dot[u] = fmaf(query[i], from_bits(keys[(first + k) * step + i]), dot[u]);
      }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (k0 + u * kWarps >= context) break;
      dot[u] = sum_chains(dot[u]);
      if (lane == 0) score[k0 + u * kWarps] = dot[u];
    }
  }
  for (i64 k = context + warp; k < total; k += kWarps) {
    const float* key = own_keys + (first + k - n) * D;
    float dot = 0;
    for (i64 i = lane; i < D; i += 32) dot = fmaf(query[i], key[i], dot);
    dot = sum_chains(dot);
    if (lane == 0) score[k] = dot;
  }
  __syncthreads();
  float top = -INFINITY;
  for (i64 k = t; k < total; k += kThreads) top = fmaxf(top, score[k]);
  for (int half = 16; half > 0; half /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, half));
  if (lane == 0) room[warp] = top;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, room[w]);
  __syncthreads();
  float sum = 0;
  for (i64 k = t; k < total; k += kThreads) sum += score[k] = exponential(score[k] - top);
  sum = sum_chains(sum);
  if (lane == 0) room[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += room[w];
  const int chains = static_cast<int>(kThreads / D), c = t % static_cast<int>(D), chain = t / static_cast<int>(D);
  float acc = 0;
  if (chain < chains) {
    i64 k = chain;
    for (; k + (kAtOnce - 1) * chains < context; k += kAtOnce * chains) {
      float v[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) v[u] = from_bits(values[(first + k + u * chains) * step + c]);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) acc = fmaf(score[k + u * chains], v[u], acc);
    }
    for (; k < total; k += chains) {
      const i64 p = first + k;
      acc = fmaf(score[k], p < n ? from_bits(values[p * step + c]) : block_values[(p - n) * stride + c], acc);
    }
  }
  parts[t] = acc;
  __syncthreads();
  if (chain == 0) {
    for (int i = 1; i < chains; ++i) acc += parts[i * D + c];
    out[row * heads * D + h * D + c] = acc * (1.0f / sum);
  }
}

}  // namespace

void embed_block(const Rows& rows, i64 block, const i32* last, i64 mask, const float* table, i64 d, float* x, Stream stream) {
  launch(embed_rows_of_block, {blocks_for(rows.batch * block * d, kThreads), kThreads}, stream, rows, block, last, mask, table, d, x);
}
void block_attention(const Rows& rows, i64 block, const float* qkv, i64 stride, i64 heads, i64 kv_heads, i64 D, const Rotary& rotary,
                     i64 window, i64 L, const std::uint16_t* k_pool, const std::uint16_t* v_pool, i64 pool_step, float* out,
                     Stream stream) {
  const i64 most = window ? std::min(window, L) + block : L + block;
  const dim3 grid(static_cast<unsigned>(rows.batch * block), static_cast<unsigned>(heads));
  const std::size_t shared = static_cast<std::size_t>(most + block * D) * 4;
  launch(attend_block, {grid, kThreads, shared}, stream, rows, block, qkv, stride, heads, kv_heads, D, rotary, window, k_pool, v_pool,
         pool_step, out);
}

}  // namespace specstate::runtime::cuda
