// Sparse MLA around the swap: the row that is cached, the indexer's keys and choice, and attention over the rows that the swap made resident.
#include <algorithm>

#include "runtime/cuda/math.cuh"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/turn.cuh"

namespace specstate::runtime::cuda {

using specstate::cuda::blocks_for;

namespace {

using i64 = std::int64_t;
using i32 = std::int32_t;
constexpr int kThreads = 128, kRowsOfBlock = kThreads / 32, kWide = 256, kAtOnce = 8;
constexpr std::size_t kMostStaged = std::size_t{64} << 10;

__device__ void store_latent(const Latent& l, i64 row, int lane) {
  if (l.locs[row] < 0) return;
  const float* kv = l.kv + row * l.stride;
  std::uint16_t* to = l.to + i64{l.locs[row]} * (l.C + l.Dr);
  const float sum = sum_squares(lane, l.C, [&](i64 i) { return kv[i]; });
  const float s = 1.0f / sqrtf(sum / static_cast<float>(l.C) + l.eps);
  for (i64 i = lane; i < l.C + l.Dr; i += 32) to[i] = to_bits(i < l.C ? kv[i] * s * l.norm[i] : kv[i]);
}

// LayerNorm as cpu::layer_norm, its deviations computed where they are needed again.
__device__ void store_key(const IndexKeys& k, const Rows& rows, i64 row, int lane) {
  const float* x = k.x + row * k.stride;
  std::uint16_t* to = k.to + (i64{rows.requests[row / rows.width]} * k.L + rows.positions[row]) * k.dim;
  float sum = 0;
  for (i64 i = lane; i < k.dim; i += 32) sum += x[i];
  const float mean = sum_chains(sum) / static_cast<float>(k.dim);
  const float squares = sum_squares(lane, k.dim, [&](i64 i) { return x[i] - mean; });
  const float s = 1.0f / sqrtf(squares / static_cast<float>(k.dim) + 1e-6f);
  for (i64 i = lane; i < k.dim; i += 32) to[i] = to_bits((x[i] - mean) * s * k.w[i] + k.b[i]);
}

// A warp a row of the one kind or of the other.
__global__ void __launch_bounds__(kThreads) cached_rows(Rows rows, Latent latent, IndexKeys keys) {
  my_turn();
  const i64 row = i64{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= rows.count() || row / rows.width >= *rows.real) return;
  if (blockIdx.y == 0)
    store_latent(latent, row, lane);
  else
    store_key(keys, rows, row, lane);
}

__global__ void __launch_bounds__(kThreads) scatter(const std::uint16_t* from, i64 n, i64 width, const i32* locs, std::uint16_t* to) {
  my_turn();
  const i64 i = i64{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n * width && locs[i / width] >= 0) to[i64{locs[i / width]} * width + i % width] = from[i];
}

/// Orders floats as unsigned integers.
__device__ std::uint32_t ordered(float x) {
  const std::uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/// Inclusive sums over the block, in place; `sums` has blockDim.x entries.
__device__ void prefix(i32* sums) {
  const int t = static_cast<int>(threadIdx.x);
  for (int step = 1; step < kWide; step *= 2) {
    __syncthreads();
    const i32 before = t >= step ? sums[t - step] : 0;
    __syncthreads();
    sums[t] += before;
  }
  __syncthreads();
}

/// The index score of a position against kHeads heads of the query, the sum over the heads before them in `total`.
template <int kHeads>
__device__ float index_score(const float* q, const float* weights, const std::uint16_t* key, i64 Di, bool wide, float total) {
  float dot[kHeads] = {};
  if (wide) {
    for (i64 i = 0; i < Di; i += 8) {
      const uint4 eight = *reinterpret_cast<const uint4*>(key + i);
      const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          dot[h] = fmaf(q[h * Di + i + 2 * w], __uint_as_float(words[w] << 16), dot[h]);
          dot[h] = fmaf(q[h * Di + i + 2 * w + 1], __uint_as_float(words[w] & 0xFFFF0000u), dot[h]);
        }
    }
  } else {
    for (i64 i = 0; i < Di; ++i)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) dot[h] = fmaf(q[h * Di + i], from_bits(key[i]), dot[h]);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) total = fmaf(weights[h], dot[h] > 0 ? dot[h] : 0.0f, total);
  return total;
}

// A block a row. Scores to memory (they stay in L2), then the K-th of them by four rounds of a radix choice, eight bits a round, then
// positions in rising order: each thread owns a run of neighbours, so ties go to the lower position by counting.
__global__ void __launch_bounds__(kWide) select_rows(Rows rows, const float* q, i64 stride, i64 weights, i64 Hi, i64 Di, float scale,
                                                     const std::uint16_t* keys, i64 L, i64 K, float* scores, i32* selected) {
  __shared__ i32 histogram[256];
  __shared__ i32 sums[kWide];
  __shared__ std::uint32_t limit;
  __shared__ i32 wanted;
  SPECSTATE_DYNAMIC_SHARED(memory);
  float* query = reinterpret_cast<float*>(memory);  // [Hi, Di], then the heads' weights
  my_turn();
  const i64 row = blockIdx.x, b = row / rows.width;
  const int t = static_cast<int>(threadIdx.x);
  selected += row * K;
  const i64 n = b < *rows.real ? rows.positions[row] + i64{1} : 0;
  if (n <= K) {
    for (i64 i = t; i < K; i += kWide) selected[i] = i < n ? static_cast<i32>(i) : -1;
    return;
  }
  q += row * stride, scores += row * L;
  const std::uint16_t* mine = keys + rows.requests[b] * L * Di;
  for (i64 i = t; i < Hi * Di + Hi; i += kWide) query[i] = i < Hi * Di ? q[i] : q[weights + i - Hi * Di] * scale;
  __syncthreads();
  const bool wide = Di % 8 == 0;  // rows of 16-byte pieces
  for (i64 p = t; p < n; p += kWide) {
    float total = 0;
    i64 h = 0;
    for (; h + 2 <= Hi; h += 2) total = index_score<2>(query + h * Di, query + Hi * Di + h, mine + p * Di, Di, wide, total);
    if (h < Hi) total = index_score<1>(query + h * Di, query + Hi * Di + h, mine + p * Di, Di, wide, total);
    scores[p] = total + 0.0f;
  }
  if (t == 0) limit = 0, wanted = static_cast<i32>(K);
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[t] = 0;
    __syncthreads();
    const std::uint32_t high = limit;
    for (i64 p = t; p < n; p += kWide) {
      const std::uint32_t u = ordered(scores[p]);
      if (shift == 24 || u >> (shift + 8) == high >> (shift + 8)) atomicAdd(&histogram[u >> shift & 255], 1);
    }
    __syncthreads();
    // From the highest bin down to the one that has the K-th: eight at a time, then one by one.
    if (t < 32) {
      i32 eight = 0;
      for (int i = 0; i < 8; ++i) eight += histogram[255 - 8 * t - i];
      sums[t] = eight;
    }
    __syncthreads();
    if (t == 0) {
      i32 left = wanted;
      int eights = 0;
      while (sums[eights] < left) left -= sums[eights++];
      int bin = 255 - 8 * eights;
      while (histogram[bin] < left) left -= histogram[bin--];
      limit = high | static_cast<std::uint32_t>(bin) << shift, wanted = left;
    }
    __syncthreads();
  }
  // All scores above the limit are chosen, and the first `wanted` of those that equal it.
  const i64 run = (n + kWide - 1) / kWide, from = min(n, t * run), to = min(n, from + run);
  const std::uint32_t at = limit;
  i32 above = 0, equal = 0;
  for (i64 p = from; p < to; ++p) {
    const std::uint32_t u = ordered(scores[p]);
    above += u > at, equal += u == at;
  }
  sums[t] = equal;
  prefix(sums);
  const i32 equal_before = sums[t] - equal, taken = max(0, min(equal, wanted - equal_before));
  __syncthreads();
  sums[t] = above + taken;
  prefix(sums);
  i64 out = sums[t] - above - taken;
  i32 left = taken;
  for (i64 p = from; p < to; ++p) {
    const std::uint32_t u = ordered(scores[p]);
    if (u > at || (u == at && left-- > 0)) selected[out++] = static_cast<i32>(p);
  }
}

/// Sum or maximum over the block in one fixed tree; everyone gets it. `room` has a float for each warp.
template <bool kMax>
__device__ float over_block(float x, float* room) {
  for (int half = 16; half > 0; half /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, half);
    x = kMax ? fmaxf(x, other) : x + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  float all = room[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) all = kMax ? fmaxf(all, room[w]) : all + room[w];
  return all;
}

// A block a row and head. A warp scores a position, lanes are channels; then every thread owns output channels, and the sum over positions is one
// chain in the order of the selection, so a row's result depends on what it selected and on nothing else. kStaged: the selected rows are brought into
// shared memory first, all loads in flight at once; otherwise there are too many of them, and both passes fetch several at a time.
template <bool kStaged>
__global__ void __launch_bounds__(kThreads)
    attend(Rows rows, const i32* selected, const i32* locs, i64 K, const std::uint16_t* latent, const float* up, const float* rope,
           i64 rope_stride, i64 rope_step, i64 C, i64 Dr, float scale, float* out, i32* fault) {
  SPECSTATE_DYNAMIC_SHARED(memory);
  const i64 row = blockIdx.x, h = blockIdx.y, Hm = gridDim.y, width = C + Dr;
  std::uint16_t* const tile = reinterpret_cast<std::uint16_t*>(memory);             // [K, width] where staged
  float* const score = reinterpret_cast<float*>(tile + (kStaged ? K * width : 0));  // [K]
  float* const query = score + K;                                                   // [width]
  i32* const where = reinterpret_cast<i32*>(query + width);                         // [K]
  __shared__ float room[kThreads / 32];
  my_turn();
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const int n = static_cast<int>(K), w = static_cast<int>(width);
  const bool real = row / rows.width < *rows.real;
  out += (row * Hm + h) * C, selected += row * K, locs += row * K;
  for (i64 k = t; k < K; k += kThreads) {
    const i32 loc = locs[k], position = selected[k];
    where[k] = loc;
    if (real && loc < 0 && position >= 0) *fault = 1;
  }
  for (i64 i = t; i < width; i += kThreads)
    query[i] = (i < C ? up[(row * Hm + h) * C + i] : rope[row * rope_stride + h * rope_step + i - C]) * scale;
  if (!real) {
    for (i64 i = t; i < C; i += kThreads) out[i] = 0;
    return;
  }
  __syncthreads();
  if constexpr (kStaged) {
    const int pieces = static_cast<int>(width) / 8, count = static_cast<int>(K) * pieces;  // of 16 bytes
    for (int i0 = t; i0 < count; i0 += kThreads * kAtOnce) {
      uint4 some[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = i0 + u * kThreads, loc = i < count ? where[i / pieces] : -1;
        some[u] = {0, 0, 0, 0};
        if (loc >= 0) some[u] = *reinterpret_cast<const uint4*>(latent + loc * width + i % pieces * 8);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (i0 + u * kThreads < count) *reinterpret_cast<uint4*>(tile + i64{8} * (i0 + u * kThreads)) = some[u];
    }
    __syncthreads();
  }
  // Zero where no row is: in place of branches, which would keep the loads of a lane from being in flight together.
  const auto value = [&](int k, int i) {
    if constexpr (kStaged) return from_bits(tile[k * w + i]);
    return where[k] >= 0 ? from_bits(latent[where[k] * width + i]) : 0.0f;
  };
  for (int k0 = warp; k0 < n; k0 += kRowsOfBlock * kAtOnce) {
    float dot[kAtOnce] = {};
    for (int i = lane; i < w; i += 32)
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) dot[u] = fmaf(query[i], value(min(k0 + u * kRowsOfBlock, n - 1), i), dot[u]);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) dot[u] = sum_chains(dot[u]);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (const int k = k0 + u * kRowsOfBlock; lane == 0 && k < n) score[k] = where[k] >= 0 ? dot[u] : -INFINITY;
  }
  __syncthreads();
  float top = -INFINITY;
  for (i64 k = t; k < K; k += kThreads) top = fmaxf(top, score[k]);
  top = over_block<true>(top, room);
  float sum = 0;
  for (i64 k = t; k < K; k += kThreads) {
    const float e = score[k] == -INFINITY ? 0.0f : exponential(score[k] - top);
    score[k] = e;
    sum += e;
  }
  sum = over_block<false>(sum, room);
  __syncthreads();
  const float inverse = 1.0f / sum;
  for (int i = t; i < C; i += kThreads) {
    float acc = 0;
    for (int k0 = 0; k0 < n; k0 += 2 * kAtOnce) {
      float v[2 * kAtOnce], part[2 * kAtOnce];
#pragma unroll
      for (int u = 0; u < 2 * kAtOnce; ++u) v[u] = value(min(k0 + u, n - 1), i), part[u] = k0 + u < n ? score[k0 + u] : 0.0f;
#pragma unroll
      for (int u = 0; u < 2 * kAtOnce; ++u) acc = fmaf(part[u], v[u], acc);
    }
    out[i] = acc * inverse;
  }
}

}  // namespace

void store_rows(const Rows& rows, const Latent& latent, const IndexKeys& keys, Stream stream) {
  launch(cached_rows, {dim3(blocks_for(rows.count(), kRowsOfBlock), keys.x ? 2 : 1), kThreads}, stream, rows, latent, keys);
}
void scatter_rows(const std::uint16_t* from, i64 n, i64 width, const i32* locs, std::uint16_t* to, Stream stream) {
  launch(scatter, {blocks_for(n * width, kThreads), kThreads}, stream, from, n, width, locs, to);
}
void select(const Rows& rows, const float* q, i64 stride, i64 weights, i64 Hi, i64 Di, float scale, const std::uint16_t* keys, i64 L, i64 K,
            float* scores, i32* selected, Stream stream) {
  launch(select_rows, {static_cast<unsigned>(rows.count()), kWide, static_cast<std::size_t>(Hi * Di + Hi) * 4}, stream, rows, q, stride,
         weights, Hi, Di, scale, keys, L, K, scores, selected);
}
void latent_attention(const Rows& rows, const i32* selected, const i32* locs, i64 K, const std::uint16_t* latent, const float* up,
                      const float* rope, i64 rope_stride, i64 rope_step, i64 Hm, i64 C, i64 Dr, float scale, float* out, i32* fault,
                      Stream stream) {
  const dim3 grid(static_cast<unsigned>(rows.count()), static_cast<unsigned>(Hm));
  const std::size_t rest = static_cast<std::size_t>(2 * K + C + Dr) * 4, tile = static_cast<std::size_t>(K * (C + Dr)) * 2;
  const bool staged = (C + Dr) % 8 == 0 && tile <= kMostStaged;
  launch(staged ? attend<true> : attend<false>, {grid, kThreads, rest + (staged ? tile : 0)}, stream, rows, selected, locs, K, latent, up,
         rope, rope_stride, rope_step, C, Dr, scale, out, fault);
}

}  // namespace specstate::runtime::cuda
