#pragma once
// The same epilogue as finish_part's, out of shared memory: 16 rows of rounded sums a warp, finished by a loop over rows. It gives the same bits.
//
// What this saves is instructions: unrolled over all words of a thread, the epilogue is thousands of them, each used once, and took 3000 to 7500 cycles, most of them for
// instructions on their way.
// Rows of kStride bytes, of which 8 lie in different banks: two bytes a column and 16 more.
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

/// Four 8 x 8 matrices of 16-bit values into shared memory; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t to, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/// The sums of 16 rows x 8 kWords columns of a warp, as the tensor cores leave them, rounded.
template <class Io, int kStride, int kWords>
__device__ __forceinline__ void leave_words(unsigned char* unit, int lane, const float* d) {
  const std::uint32_t to = ptx::shared(unit) + lane % 16 * kStride + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < kWords; j += 2)
    store_matrices(to + j * 16, io_pair<Io>(d[4 * j], d[4 * j + 1]), io_pair<Io>(d[4 * j + 2], d[4 * j + 3]),
                   io_pair<Io>(d[4 * j + 4], d[4 * j + 5]), io_pair<Io>(d[4 * j + 6], d[4 * j + 7]));
}

/// Cosines and sines of the channels 4 c .. + 3 and half a head further that lane c of a head holds (split halves: of the first four).
template <int kHeadDim>
__device__ __forceinline__ void load_turns(const Problem& p, const float* table, int position, int c, float (&cosine)[4],
                                           float (&sine)[4]) {
  const int half = p.rotary_dim / 2;
  const float* const from = table + position * p.table_row;
  if (p.is_neox_style) {
    const int i = 4 * c & (half - 1);
    const float4 x = __ldg(reinterpret_cast<const float4*>(from + i)), y = __ldg(reinterpret_cast<const float4*>(from + half + i));
    cosine[0] = x.x, cosine[1] = x.y, cosine[2] = x.z, cosine[3] = x.w, sine[0] = y.x, sine[1] = y.y, sine[2] = y.z, sine[3] = y.w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = min((e < 2 ? 0 : kHeadDim / 4) + 2 * c + e % 2, half - 1);
      cosine[e] = __ldg(from + i), sine[e] = __ldg(from + half + i);
    }
  }
}

/// Norm weights of the channels 4 c .. + 3 and half a head further.
template <int kHeadDim>
__device__ __forceinline__ void load_norm(const Values& norm, std::int64_t at, int c, float (&w)[8]) {
  if (norm.dtype == DType::kBFloat16 || norm.dtype == DType::kFloat16) {
    std::uint16_t bits[8];
#pragma unroll
    for (int e = 0; e < 8; ++e)
      bits[e] = static_cast<const std::uint16_t*>(norm.data)[at + (e / 4 * (kHeadDim / 2) + 4 * c + e % 4) * norm.stride];
#pragma unroll
    for (int e = 0; e < 8; ++e)
      w[e] = norm.dtype == DType::kBFloat16 ? core::to_float(core::bfloat16{bits[e]}) : __half2float(__ushort_as_half(bits[e]));
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) w[e] = value_at(norm.data, norm.dtype, at + (e / 4 * (kHeadDim / 2) + 4 * c + e % 4) * norm.stride);
  }
}

/// 128 columns from head `number` of the launch on, of rows first, first + step, .. below `rows`, 2 kBatch rows each -> the pool, by a warp: 16 lanes a row. `word(row, byte)` gives 8 bytes of a row
/// once `ready` has returned; angles and norm weights are on their way before.
template <class Io, int kHeadDim, int kBatch, class Word, class Ready>
__device__ __forceinline__ void finish_rows(const Problem& p, Word word, int number, const std::int64_t* slots, const int* positions,
                                            int first, int step, int rows, Ready ready) {
  constexpr int kHeads = kColumns / kHeadDim, kLanes = kHeadDim / 8, kHalf = kHeadDim / 2;
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int in_row = lane % 16, c = in_row % kLanes;
  const Head head = head_of(number + in_row / kLanes, p.heads);
  const bool any_k = kHeads == 1 ? !head.is_v : __any_sync(~0u, !head.is_v);
  const LayerPool& pool = p.target[head.is_v][head.layer].pool;
  const DType dtype = head.is_v ? p.v_dtype : p.k_dtype;
  const bool wide = head.is_v ? p.v_wide : p.k_wide, native = wide && dtype == kType;
  const float* const table = p.table + (p.first_layer + head.layer) * p.table_layer;
  const int byte = in_row / kLanes * 128 + 8 * c;  // of a row
  float cosine[kBatch][4] = {}, sine[kBatch][4] = {}, w[8] = {}, e = 0;
  std::int64_t to[kBatch];  // element offset of a row's head; -1: not written, or beyond the last row
  const auto load = [&](int i) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = i + 2 * b + lane / 16;
      const std::int64_t slot = slots[row];
      to[b] = slot < 0 ? -1 : pool_offset(pool, slot, head.index);
      if (any_k) load_turns<kHeadDim>(p, table, positions[row], c, cosine[b], sine[b]);
    }
  };
  load(first);
  if (any_k) {
    load_norm<kHeadDim>(p.norm, (p.first_layer + head.layer) * p.norm_layer, c, w);
    e = static_cast<const float*>(p.eps.data)[(p.first_layer + head.layer) * p.eps.stride];
  }
  auto* const data = static_cast<std::uint16_t*>(pool.data) + 4 * c;
  ready();
#pragma unroll 1
  for (int i = first; i < rows; i += step) {
    uint2 low[kBatch], high[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int row = i + 2 * b + lane / 16;
      low[b] = word(row, byte), high[b] = word(row, byte + 2 * kHalf);
    }
    if (any_k) {
      float y[kBatch][8], even[kBatch], odd[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        from_io_pair<Io>(low[b].x, y[b][0], y[b][1]), from_io_pair<Io>(low[b].y, y[b][2], y[b][3]);
        from_io_pair<Io>(high[b].x, y[b][4], y[b][5]), from_io_pair<Io>(high[b].y, y[b][6], y[b][7]);
        const float chunks[2][4] = {{y[b][0], y[b][1], y[b][4], y[b][5]}, {y[b][2], y[b][3], y[b][6], y[b][7]}};
        even[b] = chunk_squares(chunks[0]), odd[b] = chunk_squares(chunks[1]);
      }
#pragma unroll
      for (int far = 2; far < kLanes; far *= 2)
#pragma unroll
        for (int b = 0; b < kBatch; ++b) even[b] += __shfl_xor_sync(~0u, even[b], far), odd[b] += __shfl_xor_sync(~0u, odd[b], far);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) even[b] += odd[b], even[b] += __shfl_xor_sync(~0u, even[b], 1);
      // Root and reciprocal are long chains: a lane makes them for one of the rows, and the others take it.
      static_assert(kBatch <= kLanes);
      float mine = even[0];
#pragma unroll
      for (int b = 1; b < kBatch; ++b) mine = c % kBatch == b ? even[b] : mine;
      mine = norm_factor(mine, kHeadDim, e);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float factor = kBatch == 1 ? mine : __shfl_sync(~0u, mine, b, kLanes);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[b][j] = y[b][j] * factor * w[j];
        if (p.round_after_norm) {
#pragma unroll
          for (int j = 0; j < 8; j += 2) round_pair<Io>(y[b][j], y[b][j + 1]);
        }
      }
      if (!p.is_neox_style) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if ((j < 2 ? 0 : kHeadDim / 4) + 2 * c + j % 2 < p.rotary_dim / 2) {
              const float x = y[b][2 * j], z = y[b][2 * j + 1];
              y[b][2 * j] = x * cosine[b][j] - z * sine[b][j], y[b][2 * j + 1] = z * cosine[b][j] + x * sine[b][j];
            }
      } else if (p.rotary_dim == kHeadDim) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float x = y[b][j], z = y[b][4 + j];
            y[b][j] = x * cosine[b][j] - z * sine[b][j], y[b][4 + j] = z * cosine[b][j] + x * sine[b][j];
          }
      } else {  // the partner is another lane's
        const int apart = p.rotary_dim / 8;
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float other = __shfl_xor_sync(~0u, y[b][j], apart);
            const float first = y[b][j] * cosine[b][j] - other * sine[b][j], second = y[b][j] * cosine[b][j] + other * sine[b][j];
            if (4 * c < p.rotary_dim) y[b][j] = c & apart ? second : first;
          }
      }
      if (kHeads == 1 || !head.is_v) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          low[b] = make_uint2(io_pair<Io>(y[b][0], y[b][1]), io_pair<Io>(y[b][2], y[b][3]));
          high[b] = make_uint2(io_pair<Io>(y[b][4], y[b][5]), io_pair<Io>(y[b][6], y[b][7]));
        }
      }
    }
    if (native) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (to[b] >= 0) *reinterpret_cast<uint2*>(data + to[b]) = low[b], *reinterpret_cast<uint2*>(data + to[b] + kHalf) = high[b];
    } else {
      const float scale = scale_of(p, head);
#pragma unroll 1
      for (int n = 0; n < 2 * kBatch; ++n) {
        if (to[0] >= 0) {
          float4 v;
          from_io_pair<Io>(low[0].x, v.x, v.y), from_io_pair<Io>(low[0].y, v.z, v.w);
          store_four_here(pool.data, dtype, wide, to[0] + (n % 2 * kHalf + 4 * c) * pool.channel_stride, pool.channel_stride, scale, v);
        }
        low[0] = high[0];
        if (n % 2)
#pragma unroll
          for (int b = 1; b < kBatch; ++b) low[b - 1] = low[b], high[b - 1] = high[b], to[b - 1] = to[b];
      }
    }
    if (i + step < rows) load(i + step);
  }
}

/// `count` quarters of heads of V of 128 channels, all of one layer, from number v of all layers on, of `rows` rows -> the pool, eight rows of a quarter a warp at a time, by warp `warp` of
/// `warps`. `word(row, byte)` gives 16 bytes, the first of a row's quarters at byte 0, once `ready` has returned.
template <class Io, class Word, class Ready>
__device__ __forceinline__ void finish_quarters(const Problem& p, Word word, int v, int count, const std::int64_t* slots, int rows,
                                                int warp, int warps, Ready ready) {
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const bool native = p.v_wide && p.v_dtype == kType;
  const int layer = v / (4 * p.heads), quarter = v - layer * 4 * p.heads;
  const LayerPool pool = p.target[1][layer].pool;
  int n = warp % max(count, 1), first = warp / max(count, 1) * 8;
  ready();
#pragma unroll 1
  while (count > 0 && first < rows) {
    const int channel = 32 * ((quarter + n) % 4) + 8 * (lane % 4), row = first + lane / 4;
    const std::int64_t slot = slots[row];
    if (slot >= 0) {
      const uint4 x = word(row, 64 * n + 16 * (lane % 4));
      const std::int64_t offset = pool_offset(pool, slot, (quarter + n) / 4);
      if (native) {
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(pool.data) + offset + channel) = x;
      } else {
        const float scale = scale_of(p, {layer, (quarter + n) / 4, true});
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          float4 y;
          from_io_pair<Io>(part ? x.z : x.x, y.x, y.y), from_io_pair<Io>(part ? x.w : x.y, y.z, y.w);
          store_four_here(pool.data, p.v_dtype, p.v_wide, offset + (channel + 4 * part) * pool.channel_stride, pool.channel_stride, scale,
                          y);
        }
      }
    }
    for (n += warps; n >= count; n -= count) first += 8;
  }
}
template <class Io, class Word>
__device__ __forceinline__ void finish_quarters(const Problem& p, Word word, int v, int count, const std::int64_t* slots, int rows,
                                                int warp, int warps) {
  finish_quarters<Io>(p, word, v, count, slots, rows, warp, warps, [] {});
}

/// The product of target features (features.cuh), where there are no heads: columns `column` .. + columns - 1, a multiple of 16, of up to 8 rows of rounded sums from row `first` on, and
/// their sums of squares, one every 16 columns. Four lanes for these.
template <class Io, int kStride>
__device__ __forceinline__ void finish_feature_columns(const Context& context, const unsigned char* unit, int first, int rows, int column,
                                                       int columns) {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int c = lane % 4, blocks = columns / 16;
#pragma unroll 1
  for (int i = lane / 4; i - lane / 4 < rows * blocks; i += 8) {
    const bool valid = i < rows * blocks;
    const int row = valid ? i / blocks : 0, block = valid ? i - row * blocks : 0;
    const uint2 word = *reinterpret_cast<const uint2*>(unit + row * kStride + 32 * block + 8 * c);
    float x[4];
    from_io_pair<Io>(word.x, x[0], x[1]), from_io_pair<Io>(word.y, x[2], x[3]);
    float even = fmaf(x[1], x[1], x[0] * x[0]), odd = fmaf(x[3], x[3], x[2] * x[2]);
    even += __shfl_xor_sync(~0u, even, 2), odd += __shfl_xor_sync(~0u, odd, 2);
    even += odd, even += __shfl_xor_sync(~0u, even, 1);
    if (!valid) continue;
    const std::int64_t at = (first + row) * static_cast<std::int64_t>(context.hidden) + column + 16 * block;
    if (c == 0 && context.squares) context.squares[at / 16] = even;
    *reinterpret_cast<uint2*>(context.raw + at + 4 * c) = word;
  }
}

}  // namespace specstate::draft_kv::cuda
