#pragma once
// The same epilogue as finish_part's, out of shared memory, with eight lanes a row of 128 columns: a lane has two pieces of 8 channels half a head apart, so words, angles and what goes
// to the pool move 16 bytes at a time, and a piece's partner in the rotary over the whole head is the same lane's. It gives the same bits.
//
// What it is for: beside the products of bulk_rows all accesses to memory, exchanges between lanes among them, get one wavefront of 128 bytes in some 14 cycles. With four lanes a row 8 rows
// took 3700 cycles, and more where a spilled register stood between them.
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

/// Cosines and sines of what lane c of a head holds: split halves: of the first piece's channels; neighbours: of both pieces' pairs.
template <int kHeadDim>
__device__ __forceinline__ void load_eight_turns(const Problem& p, const float* table, int position, int c, float (&cosine)[8],
                                                 float (&sine)[8]) {
  const int half = p.rotary_dim / 2;
  const float* const from = table + position * p.table_row;
  if (p.is_neox_style) {
    const float* const at = from + (8 * c & (half - 1));
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      const float4 x = __ldg(reinterpret_cast<const float4*>(at + e)), y = __ldg(reinterpret_cast<const float4*>(at + half + e));
      cosine[e] = x.x, cosine[e + 1] = x.y, cosine[e + 2] = x.z, cosine[e + 3] = x.w;
      sine[e] = y.x, sine[e + 1] = y.y, sine[e + 2] = y.z, sine[e + 3] = y.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int i = min((e < 4 ? 0 : kHeadDim / 4) + 4 * c + e % 4, half - 1);
      cosine[e] = __ldg(from + i), sine[e] = __ldg(from + half + i);
    }
  }
}

/// The rotary of a lane's 16 channels, y[0..7] and half a head further y[8..15].
template <int kHeadDim>
__device__ __forceinline__ void turn_eight(const Problem& p, int c, const float (&cosine)[8], const float (&sine)[8], float (&y)[16]) {
  if (!p.is_neox_style) {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if ((e < 4 ? 0 : kHeadDim / 4) + 4 * c + e % 4 < p.rotary_dim / 2) {
        const float a = y[2 * e], b = y[2 * e + 1];
        y[2 * e] = a * cosine[e] - b * sine[e], y[2 * e + 1] = b * cosine[e] + a * sine[e];
      }
  } else if (p.rotary_dim == kHeadDim) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float a = y[e], b = y[8 + e];
      y[e] = a * cosine[e] - b * sine[e], y[8 + e] = b * cosine[e] + a * sine[e];
    }
  } else {  // the partner is another lane's
    const int apart = p.rotary_dim / 16;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float other = __shfl_xor_sync(~0u, y[e], apart);
      const float first = y[e] * cosine[e] - other * sine[e], second = y[e] * cosine[e] + other * sine[e];
      if (8 * c < p.rotary_dim) y[e] = c & apart ? second : first;
    }
  }
}

/// 128 columns (a head, or two of 64) of 4 kBatch rows of kStride bytes from `rows` on -> the pool, by a warp. `head` is that of the calling lane, `slot`, `position`: of these rows, -1:
/// not written; `norm`, `eps`: of the lane's head of K.
template <class Io, int kHeadDim, int kStride, int kBatch>
__device__ __forceinline__ void finish_eight(const Problem& p, const Head& head, const unsigned char* rows, const std::int64_t* slot,
                                             const int* position, const float* norm, float eps, int lane) {
  constexpr int kLanes = kHeadDim / 16, kHalf = kHeadDim / 2;
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  const int c = lane % kLanes, row = lane / 8;
  const unsigned char* const from = rows + row * kStride + lane % 8 / kLanes * (2 * kHeadDim) + 16 * c;
  uint4 low[kBatch], high[kBatch];
  const bool any_k = kHeadDim == 128 ? !head.is_v : __any_sync(~0u, !head.is_v);
  float cosine[kBatch][8] = {}, sine[kBatch][8] = {};
  if (any_k) {
    const float* const table = p.table + (p.first_layer + head.layer) * p.table_layer;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load_eight_turns<kHeadDim>(p, table, position[4 * b + row], c, cosine[b], sine[b]);
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    low[b] = *reinterpret_cast<const uint4*>(from + 4 * b * kStride);
    high[b] = *reinterpret_cast<const uint4*>(from + 4 * b * kStride + kHeadDim);
  }
  if (any_k) {
    float y[kBatch][16], squares[kBatch][4], factor[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      from_io_pair<Io>(low[b].x, y[b][0], y[b][1]), from_io_pair<Io>(low[b].y, y[b][2], y[b][3]);
      from_io_pair<Io>(low[b].z, y[b][4], y[b][5]), from_io_pair<Io>(low[b].w, y[b][6], y[b][7]);
      from_io_pair<Io>(high[b].x, y[b][8], y[b][9]), from_io_pair<Io>(high[b].y, y[b][10], y[b][11]);
      from_io_pair<Io>(high[b].z, y[b][12], y[b][13]), from_io_pair<Io>(high[b].w, y[b][14], y[b][15]);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float chunk[4] = {y[b][2 * q], y[b][2 * q + 1], y[b][8 + 2 * q], y[b][9 + 2 * q]};
        squares[b][q] = chunk_squares(chunk);
      }
    }
#pragma unroll
    for (int far = 1; far < kLanes; far *= 2)
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int q = 0; q < 4; ++q) squares[b][q] += __shfl_xor_sync(~0u, squares[b][q], far);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      factor[b] = norm_factor((squares[b][0] + squares[b][1]) + (squares[b][2] + squares[b][3]), kHeadDim, eps);
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      const float4 w = *reinterpret_cast<const float4*>(norm + (j < 8 ? 0 : kHalf) + 8 * c + j % 8);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        y[b][j] = y[b][j] * factor[b] * w.x, y[b][j + 1] = y[b][j + 1] * factor[b] * w.y;
        y[b][j + 2] = y[b][j + 2] * factor[b] * w.z, y[b][j + 3] = y[b][j + 3] * factor[b] * w.w;
        if (p.round_after_norm) round_pair<Io>(y[b][j], y[b][j + 1]), round_pair<Io>(y[b][j + 2], y[b][j + 3]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) turn_eight<kHeadDim>(p, c, cosine[b], sine[b], y[b]);
    if (kHeadDim == 128 || !head.is_v) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        low[b] = make_uint4(io_pair<Io>(y[b][0], y[b][1]), io_pair<Io>(y[b][2], y[b][3]), io_pair<Io>(y[b][4], y[b][5]),
                            io_pair<Io>(y[b][6], y[b][7]));
        high[b] = make_uint4(io_pair<Io>(y[b][8], y[b][9]), io_pair<Io>(y[b][10], y[b][11]), io_pair<Io>(y[b][12], y[b][13]),
                             io_pair<Io>(y[b][14], y[b][15]));
      }
    }
  }
  const LayerPool& pool = p.target[head.is_v][head.layer].pool;
  const DType dtype = head.is_v ? p.v_dtype : p.k_dtype;
  const bool wide = head.is_v ? p.v_wide : p.k_wide;
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const std::int64_t to = slot[4 * b + row];
    if (to < 0) continue;
    const std::int64_t offset = pool_offset(pool, to, head.index);
    if (wide && dtype == kType) {
      auto* const at = static_cast<std::uint16_t*>(pool.data) + offset + 8 * c;
      *reinterpret_cast<uint4*>(at) = low[b], *reinterpret_cast<uint4*>(at + kHalf) = high[b];
    } else {
      const float scale = scale_of(p, head);
#pragma unroll 1
      for (int part = 0; part < 4; ++part) {
        float x[4];
        from_io_pair<Io>(low[b].x, x[0], x[1]), from_io_pair<Io>(low[b].y, x[2], x[3]);
        store_channels(pool, dtype, wide, offset, part / 2 * kHalf + 8 * c + part % 2 * 4, scale, x);
        low[b].x = low[b].z, low[b].y = low[b].w, low[b].z = high[b].x, low[b].w = high[b].y, high[b].x = high[b].z, high[b].y = high[b].w;
      }
    }
  }
}

/// 16 bytes that nobody reads again soon: they need not go through L1's memory.
__device__ __forceinline__ float4 load_once(const float4* from) {
  float4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
  return x;
}

/// Are a launch's heads of K of 128 channels those of finish_usual_k?
template <class Io>
__device__ __forceinline__ bool has_usual_k(const Problem& p) {
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  return p.is_neox_style && p.rotary_dim == 128 && p.k_wide && p.k_dtype == kType && p.norm.dtype == kType && p.norm.stride == 1 &&
         p.norm_layer % 8 == 0 && reinterpret_cast<std::uintptr_t>(p.norm.data) % 16 == 0;
}
/// The usual case of the same: a head of K of 128 channels, turned as a whole in split halves, into a pool of Io whose heads lie dense; rows first, first + step, .. (four each) below
/// `end`, each once ready(row) has returned. The norm's weights are of Io, too, and lie in pieces of 16 bytes. Everything that does not change from row to row is in registers, and the next rows' angles are on their way while these are finished: no argument is read and nothing is
/// decided between the rows. (Where they were, 4 rows took 2800 cycles and more.)
template <class Io, int kStride, class Ready>
__device__ __forceinline__ void finish_usual_k(const Problem& p, const Head& head, const unsigned char* rows, const std::int64_t* slots,
                                               const int* positions, int first, int end, int step, int lane, Ready ready) {
  const int c = lane % 8, row = lane / 8;
  const LayerPool& pool = p.target[0][head.layer].pool;
  auto* const to = static_cast<std::uint16_t*>(pool.data) + head.index * pool.head_stride + 8 * c;
  const std::int64_t slot_stride = pool.slot_stride, table_row = p.table_row;
  const float* const table = p.table + (p.first_layer + head.layer) * p.table_layer + 8 * c;
  const bool rounds = p.round_after_norm;
  const unsigned char* const from = rows + row * kStride + 16 * c;
  const int layer = p.first_layer + head.layer;
  const auto* const norm = reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.norm.data) + layer * p.norm_layer) + c;
  const uint4 low_weights = __ldg(norm), high_weights = __ldg(norm + 8);
  const std::uint32_t w[8] = {low_weights.x,  low_weights.y,  low_weights.z,  low_weights.w,
                              high_weights.x, high_weights.y, high_weights.z, high_weights.w};
  const float eps = __ldg(static_cast<const float*>(p.eps.data) + layer * p.eps.stride);
  float4 next[4];
  const auto load = [&](int i) {
    const auto* const at = reinterpret_cast<const float4*>(table + positions[i + row] * table_row);
    next[0] = load_once(at), next[1] = load_once(at + 1), next[2] = load_once(at + 16), next[3] = load_once(at + 17);
  };
  if (first < end) load(first);
#pragma unroll 1
  for (int i = first; i < end; i += step) {
    ready(i);
    const uint4 low = *reinterpret_cast<const uint4*>(from + i * kStride), high = *reinterpret_cast<const uint4*>(from + i * kStride + 128);
    const std::int64_t slot = slots[i + row];
    const float cosine[8] = {next[0].x, next[0].y, next[0].z, next[0].w, next[1].x, next[1].y, next[1].z, next[1].w};
    const float sine[8] = {next[2].x, next[2].y, next[2].z, next[2].w, next[3].x, next[3].y, next[3].z, next[3].w};
    if (i + step < end) load(i + step);
    float y[16], squares[4];
    from_io_pair<Io>(low.x, y[0], y[1]), from_io_pair<Io>(low.y, y[2], y[3]);
    from_io_pair<Io>(low.z, y[4], y[5]), from_io_pair<Io>(low.w, y[6], y[7]);
    from_io_pair<Io>(high.x, y[8], y[9]), from_io_pair<Io>(high.y, y[10], y[11]);
    from_io_pair<Io>(high.z, y[12], y[13]), from_io_pair<Io>(high.w, y[14], y[15]);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float chunk[4] = {y[2 * q], y[2 * q + 1], y[8 + 2 * q], y[9 + 2 * q]};
      squares[q] = chunk_squares(chunk);
    }
    // Over j, lanes 1, 2 and 4 apart, then over q. Each lane keeps half of its sums at a time: six exchanges instead of twelve.
    const bool one = c & 1, two = c & 2;
    float low_sum = one ? squares[2] : squares[0], high_sum = one ? squares[3] : squares[1];
    low_sum += __shfl_xor_sync(~0u, one ? squares[0] : squares[2], 1), high_sum += __shfl_xor_sync(~0u, one ? squares[1] : squares[3], 1);
    float sum = (two ? high_sum : low_sum) + __shfl_xor_sync(~0u, two ? low_sum : high_sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 2);  // q and its neighbour: (0 + 1), (2 + 3)
    sum += __shfl_xor_sync(~0u, sum, 1);
    const float factor = norm_factor(sum, 128, eps);
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      float first_weight, second_weight;
      from_io_pair<Io>(w[j / 2], first_weight, second_weight);
      y[j] = y[j] * factor * first_weight, y[j + 1] = y[j + 1] * factor * second_weight;
    }
    if (rounds) {
#pragma unroll
      for (int j = 0; j < 16; j += 2) round_pair<Io>(y[j], y[j + 1]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float a = y[e], b = y[8 + e];
      y[e] = a * cosine[e] - b * sine[e], y[8 + e] = b * cosine[e] + a * sine[e];
    }
    if (slot < 0) continue;
    auto* const at = to + slot * slot_stride;
    *reinterpret_cast<uint4*>(at) =
        make_uint4(io_pair<Io>(y[0], y[1]), io_pair<Io>(y[2], y[3]), io_pair<Io>(y[4], y[5]), io_pair<Io>(y[6], y[7]));
    *reinterpret_cast<uint4*>(at + 64) =
        make_uint4(io_pair<Io>(y[8], y[9]), io_pair<Io>(y[10], y[11]), io_pair<Io>(y[12], y[13]), io_pair<Io>(y[14], y[15]));
  }
}

/// One quarter of a head of V of 128 channels into such a pool: rows first, first + step, .. (eight each) below `end`; `rows`: where the quarter begins.
template <int kStride, class Ready>
__device__ __forceinline__ void finish_usual_v(const LayerPool& pool, int head, int quarter, const unsigned char* rows,
                                               const std::int64_t* slots, int first, int end, int step, int lane, Ready ready) {
  auto* const to = static_cast<std::uint16_t*>(pool.data) + head * pool.head_stride + 32 * quarter + 8 * (lane % 4);
  const std::int64_t slot_stride = pool.slot_stride;
  const unsigned char* const from = rows + lane / 4 * kStride + 16 * (lane % 4);
#pragma unroll 1
  for (int i = first; i < end; i += step) {
    ready(i);
    const std::int64_t slot = slots[i + lane / 4];
    const uint4 x = *reinterpret_cast<const uint4*>(from + i * kStride);
    if (slot >= 0) *reinterpret_cast<uint4*>(to + slot * slot_stride) = x;
  }
}

}  // namespace specstate::draft_kv::cuda
