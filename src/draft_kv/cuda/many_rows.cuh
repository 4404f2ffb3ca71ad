#pragma once
// Up to 128 rows, as they lie: a matrix product with the epilogue inside.
//
// A block makes tiles of 64 kGroups rows x 128 columns, whole sums: no two blocks share any. One thread asks for a ring of stages (64 features) of weights and rows, by tensor map, before anybody
// knows which rows are written; two idle warps find that out meanwhile, and fetch what the epilogue wants. kGroups groups of four warps multiply 64 rows each and then finish them where they
// are, in registers: four lanes hold a row's head, so norm and rotary need two shuffles and no shared memory. Meanwhile the ring fills for the next tile.
// Bound by reading the weights once, so everything is ring: with 1 group 9 to 12 stages of 16 KB and of as many rows as there are, with 2 groups 6 of 32 KB.
#include "draft_kv/cuda/finish.cuh"
#include "draft_kv/cuda/tensor_core.cuh"
#include "draft_kv/cuda/trace.hpp"
#include "draft_kv/cuda/work.hpp"

namespace specstate::draft_kv::cuda {

inline constexpr int kMostStages = 16;
inline constexpr int kFewRows = 64;  // of a group of four warps
inline constexpr std::size_t kStageBytes = std::size_t{kColumns} * kDepth * 2, kRowTileBytes = std::size_t{kFewRows} * kDepth * 2;

template <int kGroups>
struct Many {
  static constexpr int kThreads = 128 * (kGroups + 1), kRows = 64 * kGroups;
  static constexpr int kStages = kGroups == 1 ? kMostStages : 6;

  struct Tail {
    std::int64_t slot[kRows];
    Row list[kRows];
    int position[kRows], bucket[2 * kRows];
    float norm[kMaxLayers * 128], eps[kMaxLayers];
    std::uint64_t full[kStages], empty[kStages], planned;  // planned: what plan_beside leaves is there
    int warp_count[kThreads / 32];
  };
};

struct ManyShape {
  int head_tiles;  // of the launch
  Runs runs;
  // many_shape fills these in.
  int stages = 0;  // of the ring
  int box = 0;     // rows of a stage: those of a tile, or (1 group) of the launch, a multiple of 8
};
SPECSTATE_HD constexpr std::size_t many_stage_bytes(int box) { return kStageBytes + static_cast<std::size_t>(box) * kDepth * 2; }
template <int kGroups>
constexpr std::size_t many_shared_bytes(int stages, int box) {
  return 1024 + stages * many_stage_bytes(box) + sizeof(typename Many<kGroups>::Tail);
}
template <int kGroups>
constexpr ManyShape many_shape(ManyShape s, int tokens, std::size_t most) {
  s.box = kGroups == 1 ? (tokens + 7) / 8 * 8 : Many<kGroups>::kRows;
  s.stages = Many<kGroups>::kStages;
  while (kGroups == 1 && many_shared_bytes<1>(s.stages, s.box) > most) --s.stages;
  return s;
}
static_assert(many_shared_bytes<2>(6, 128) <= 232448 && many_shared_bytes<1>(8, 64) <= 232448);

/// Words j and j + 1 of four lanes, two channels each -> four neighbouring channels a lane: from 8 (j + (q & 1)) + 2 (q & 2) on.
__device__ __forceinline__ void four_channels(const float (&x)[2], const float (&next)[2], int q, float (&out)[4]) {
  const bool odd = q & 1;
  const float a = __shfl_xor_sync(~0u, odd ? x[0] : next[0], 1), b = __shfl_xor_sync(~0u, odd ? x[1] : next[1], 1);
  out[0] = odd ? a : x[0], out[1] = odd ? b : x[1], out[2] = odd ? next[0] : a, out[3] = odd ? next[1] : b;
}

/// Of each row the sum over its words (a butterfly), then over the four lanes, in x[row][0].
template <int kRows, int kN>
__device__ __forceinline__ void sums_of_words(float (&x)[kRows][kN]) {
#pragma unroll
  for (int step = 1; step < kN; step *= 2)
#pragma unroll
    for (int j = 0; j < kN; j += 2 * step)
#pragma unroll
      for (int h = 0; h < kRows; ++h) x[h][j] += x[h][j + step];
#pragma unroll
  for (int far = 1; far < 4; far *= 2)
#pragma unroll
    for (int h = 0; h < kRows; ++h) x[h][0] += __shfl_xor_sync(~0u, x[h][0], far);
}

/// Two values of Io, rounded.
template <class Io>
__device__ __forceinline__ std::uint32_t io_pair(float low, float high) {
  return std::is_same_v<Io, core::bfloat16> ? bf16_pair(low, high) : fp16_pair(low, high);
}
template <class Io>
__device__ __forceinline__ void from_io_pair(std::uint32_t pair, float& low, float& high) {
  if constexpr (std::is_same_v<Io, core::bfloat16>) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    low = __half2float(__ushort_as_half(static_cast<unsigned short>(pair))),
    high = __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
}
template <class Io>
__device__ __forceinline__ void round_pair(float& low, float& high) {
  from_io_pair<Io>(io_pair<Io>(low, high), low, high);
}

/// Two rows of 128 columns by four lanes: d[4 j + 2 h + {0, 1}] is word 4 j + q of row h in the lane with place q, first the sum. Where slot < 0 nothing is written.
template <int kBase>
struct Words {
  float* d;
  __device__ __forceinline__ float& operator()(int j, int h, int e) const { return d[4 * (kBase + j) + 2 * h + e]; }
};

/// The angles of a row, all loads at once: of split halves [j][c, c, s, s], of neighbours [j][c, s].
template <int kHeadDim>
__device__ __forceinline__ void load_angles(const Problem& p, int layer, int position, int q, float (&angle)[32]) {
  const int half = p.rotary_dim / 2;
  const float* const from = p.table + layer * p.table_layer + position * p.table_row;
  if (p.is_neox_style) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j)
      if (8 * j < half) {
        const float2 c = __ldg(reinterpret_cast<const float2*>(from + 8 * j + 2 * q)),
                     s = __ldg(reinterpret_cast<const float2*>(from + half + 8 * j + 2 * q));
        angle[4 * j] = c.x, angle[4 * j + 1] = c.y, angle[4 * j + 2] = s.x, angle[4 * j + 3] = s.y;
      }
  } else {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      if (4 * j + q < half) angle[2 * j] = __ldg(from + 4 * j + q), angle[2 * j + 1] = __ldg(from + half + 4 * j + q);
  }
}

/// Words of rows of a head, in place, with those kApart * 4 words further.
template <int kApart, int kRows, class W>
__device__ __forceinline__ void turn_words(const W& y, const float (&angle)[kRows][32]) {
#pragma unroll
  for (int j = 0; j < kApart; ++j)
#pragma unroll
    for (int h = 0; h < kRows; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float a = y(j, h, e), b = y(j + kApart, h, e), c = angle[h][4 * j + e], s = angle[h][4 * j + 2 + e];
        y(j, h, e) = a * c - b * s, y(j + kApart, h, e) = b * c + a * s;
      }
}

/// One head of K of kRows rows, whose words y(j, row, 0 or 1) are rounded: norm and rotary. Step by step for all of them, since each row alone is a chain of latencies.
template <class Io, int kHeadDim, int kRows, class W>
__device__ __forceinline__ void finish_k(const Problem& p, const float (&angle)[kRows][32], int q, const W& y, const float* norm,
                                         float eps) {
  constexpr int kHead = kHeadDim / 8;
  float chunk[kRows][kHead / 2];
#pragma unroll
  for (int j = 0; j < kHead / 2; ++j)
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      const float x[4] = {y(j, h, 0), y(j, h, 1), y(j + kHead / 2, h, 0), y(j + kHead / 2, h, 1)};
      chunk[h][j] = chunk_squares(x);
    }
  sums_of_words(chunk);
#pragma unroll
  for (int h = 0; h < kRows; ++h) chunk[h][0] = norm_factor(chunk[h][0], kHeadDim, eps);
#pragma unroll
  for (int j = 0; j < kHead; ++j) {
    const float2 w = *reinterpret_cast<const float2*>(norm + 8 * j + 2 * q);
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      y(j, h, 0) = y(j, h, 0) * chunk[h][0] * w.x, y(j, h, 1) = y(j, h, 1) * chunk[h][0] * w.y;
      if (p.round_after_norm) round_pair<Io>(y(j, h, 0), y(j, h, 1));
    }
  }
  if (!p.is_neox_style) {
#pragma unroll
    for (int j = 0; j < kHead; ++j)
#pragma unroll
      for (int h = 0; h < kRows; ++h)
        if (4 * j + q < p.rotary_dim / 2) {
          const float c = angle[h][2 * j], s = angle[h][2 * j + 1], a = y(j, h, 0), b = y(j, h, 1);
          y(j, h, 0) = a * c - b * s, y(j, h, 1) = b * c + a * s;
        }
  } else if (p.rotary_dim == 128) {
    if constexpr (kHeadDim == 128) turn_words<8>(y, angle);
  } else if (p.rotary_dim == 64) {
    turn_words<4>(y, angle);
  } else if (p.rotary_dim == 32) {
    turn_words<2>(y, angle);
  } else {
    turn_words<1>(y, angle);
  }
}

/// kWords * 8 channels from `channel` on of one head of K or V, of one row, into the pool; `word(j)` gives two of them, rounded. Where slot < 0 nothing is written.
template <class Io, int kWords, class W>
__device__ __forceinline__ void store_row(const Problem& p, const Head& head, int channel, std::int64_t slot, int q, const W& word) {
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  const LayerPool& pool = p.target[head.is_v][head.layer].pool;
  const DType dtype = head.is_v ? p.v_dtype : p.k_dtype;
  const bool wide = head.is_v ? p.v_wide : p.k_wide, odd = q & 1;
  const std::int64_t offset = pool_offset(pool, slot, head.index);
  if (wide && dtype == kType) {
    auto* const to = static_cast<std::uint16_t*>(pool.data) + offset + channel + 8 * odd + 2 * (q & 2);
#pragma unroll
    for (int j = 0; j < kWords; j += 2) {
      const std::uint32_t a = word(j), b = word(j + 1), other = __shfl_xor_sync(~0u, odd ? a : b, 1);
      if (slot >= 0) *reinterpret_cast<uint2*>(to + 8 * j) = make_uint2(odd ? other : a, odd ? b : other);
    }
    return;
  }
  const float scale = scale_of(p, head);
#pragma unroll
  for (int j = 0; j < kWords; j += 2) {
    float x[2], next[2], out[4];
    from_io_pair<Io>(word(j), x[0], x[1]), from_io_pair<Io>(word(j + 1), next[0], next[1]);
    four_channels(x, next, q, out);
    if (slot >= 0) store_channels(pool, dtype, wide, offset, channel + 8 * (j + odd) + 2 * (q & 2), scale, out);
  }
}
/// One head of two rows of sums.
template <class Io, int kHeadDim, class W>
__device__ __forceinline__ void finish_two_rows(const Problem& p, const Head& head, const std::int64_t (&slot)[2], const int (&position)[2],
                                                int q, const W& y, const float* norm, float eps) {
  if (!head.is_v) {
    float angle[2][32] = {};  // or what is not loaded would be taken for alive since the tile before
#pragma unroll
    for (int h = 0; h < 2; ++h) load_angles<kHeadDim>(p, p.first_layer + head.layer, position[h], q, angle[h]);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) round_pair<Io>(y(j, h, 0), y(j, h, 1));
    finish_k<Io, kHeadDim, 2>(p, angle, q, y, norm, eps);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    store_row<Io, kHeadDim / 8>(p, head, 0, slot[h], q, [&](int j) { return io_pair<Io>(y(j, h, 0), y(j, h, 1)); });
}

/// 128 columns of two rows; `norms` and `eps` are the launch's.
template <class Io, int kHeadDim>
__device__ __forceinline__ void finish_part(const Problem& p, const std::int64_t (&slot)[2], const int (&position)[2], int head_tile, int q,
                                            float* d, const float* norms, const float* eps) {
  constexpr int kHeads = kColumns / kHeadDim;
  const Head first = head_of(head_tile * kHeads, p.heads), last = kHeads == 1 ? first : head_of(head_tile * kHeads + 1, p.heads);
  if (p.bias.data) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const Head& head = j < kHeadDim / 8 ? first : last;
      const int column = ((head.is_v ? p.heads : 0) + head.index) * kHeadDim + 8 * (j % (kHeadDim / 8)) + 2 * q;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = value_at(p.bias.data, p.bias.dtype, (p.first_layer + head.layer) * p.bias_layer + (column + e) * p.bias.stride);
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  finish_two_rows<Io, kHeadDim>(p, first, slot, position, q, Words<0>{d}, norms + first.layer * kHeadDim, eps[first.layer]);
  if constexpr (kHeads == 2)
    finish_two_rows<Io, kHeadDim>(p, last, slot, position, q, Words<8>{d}, norms + last.layer * kHeadDim, eps[last.layer]);
}

/// What the epilogue wants, by one warp while the columns are multiplied: which rows are written (slot -1: not); angles, bias and
/// norm on their way to L2, of head `number` of the launch (-1: none). (One warp, which needs no barrier but its own; the others learn of it through an mbarrier.)
template <int kHeadDim, int kRows, class Tail>
__device__ __forceinline__ void plan_beside(const Problem& p, Tail& tail, bool raise, int number, int lane) {
  for (int i = lane; i < kRows; i += 32) tail.slot[i] = -1, tail.position[i] = 0;
  const int count =
      plan_rows<32, kRows / 32, 2 * kRows>(p.rows, tail.list, tail.bucket, tail.warp_count, raise, lane, [] { __syncwarp(); });
  const Head head = head_of(max(number, 0), p.heads);
  for (int i = lane; i < count; i += 32) {
    const Row row = tail.list[i];
    tail.slot[row.row] = row.slot, tail.position[row.row] = row.position;
    if (number >= 0 && !head.is_v) {
      const float* const angles = p.table + (p.first_layer + head.layer) * p.table_layer + row.position * p.table_row;
      for (int c = 0; c < p.rotary_dim; c += 32) prefetch_l2(angles + c);
    }
  }
  if (number < 0 || 32 * lane >= kHeadDim) return;
  const auto on_its_way = [&](const Values& v, std::int64_t at) {
    prefetch_l2(static_cast<const unsigned char*>(v.data) + (at + 32 * lane * v.stride) * size_of_value(v.dtype));
  };
  const int layer = p.first_layer + head.layer;
  if (p.bias.data) on_its_way(p.bias, layer * p.bias_layer + ((head.is_v ? p.heads : 0) + head.index) * kHeadDim * p.bias.stride);
  if (!head.is_v) on_its_way(p.norm, layer * p.norm_layer);
  if (lane == 0) prefetch_l2(static_cast<const float*>(p.eps.data) + layer * p.eps.stride);
}

template <int kHeadDim>
__device__ __forceinline__ void fetch_norms(const Problem& p, float* norm, float* eps, int thread, int threads) {
  for (int i = thread; i < p.layers * kHeadDim; i += threads)
    norm[i] = value_at(p.norm.data, p.norm.dtype, (p.first_layer + i / kHeadDim) * p.norm_layer + (i % kHeadDim) * p.norm.stride);
  if (thread < p.layers) eps[thread] = static_cast<const float*>(p.eps.data)[(p.first_layer + thread) * p.eps.stride];
}

template <class Io, int kHeadDim, int kGroups>
__global__ void __launch_bounds__(Many<kGroups>::kThreads, 1)
    many_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p,
              const __grid_constant__ ManyShape shape) {
  using M = Many<kGroups>;
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const int stages = kGroups == 1 ? shape.stages : M::kStages;
  const std::uint32_t tile_bytes = shape.box * kDepth * 2, stage_bytes = static_cast<std::uint32_t>(kStageBytes) + tile_bytes;
  auto& tail = *reinterpret_cast<typename M::Tail*>(memory + stages * stage_bytes);
  const int thread = threadIdx.x, group = thread / 128, count = p.rows.tokens, tiles = shape.head_tiles;
  if (thread == 0) {
    prefetch_map(weights), prefetch_map(rows);
    for (int i = 0; i < stages; ++i) ptx::barrier_init(&tail.full[i], 1), ptx::barrier_init(&tail.empty[i], 4 * kGroups);
    ptx::barrier_init(&tail.planned, 96);
    ptx::fence_barriers();
  }
  ptx::wait_for_previous();
  __syncthreads();
  trace(kStart);

  if (group == 0) {
    if (thread == 0) {
      const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
      const int weight_row = p.first_layer * 2 * p.heads * kHeadDim;
      int stage = 0;
      std::uint32_t parity = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x)
        for (int k = 0; k < p.hidden / kDepth; ++k) {
          unsigned char* const a = memory + stage * stage_bytes;
          ptx::barrier_wait(&tail.empty[stage], parity);
          ptx::barrier_expect(&tail.full[stage], stage_bytes);
          tile_load(a + tile_bytes, weights, k * kDepth, weight_row + t * kColumns, &tail.full[stage], once);
          tile_load(a, rows, k * kDepth, static_cast<int>(p.rows.first), &tail.full[stage], keep);
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      trace(kAsked);
    } else if (thread >= 32) {
      fetch_norms<kHeadDim>(p, tail.norm, tail.eps, thread - 32, 96);
      if (thread < 64)
        plan_beside<kHeadDim, M::kRows>(p, tail, blockIdx.x == 0, static_cast<int>(blockIdx.x) * (kColumns / kHeadDim), thread - 32);
      ptx::barrier_arrive(&tail.planned);
    }
  } else {
    const int side = group - 1, warp = thread / 32 % 4;
    StageProducts<Io, kColumns> products{ptx::shared(memory),
                                         stage_bytes,
                                         side * static_cast<std::uint32_t>(kRowTileBytes),
                                         tile_bytes,
                                         ptx::shared(tail.full),
                                         ptx::shared(tail.empty),
                                         stages,
                                         false};
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      float d[64], sum[64];
#pragma unroll
      for (int j = 0; j < 64; ++j) d[j] = sum[j] = 0;  // d: or the compiler takes it for alive from the tile before
      products.add_runs(sum, d, shape.runs, 0, shape.runs.count);
      __syncwarp();
      trace(kSummed);
      ptx::barrier_wait(&tail.planned, 0);  // what was found out meanwhile
      trace(kPlanThere);
      // Asked for again, here, so that nothing that follows from them is kept in registers while the products run.
      int lane_here;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      const int first_of_warp = side * 64 + 16 * warp;
      if (first_of_warp >= count) continue;
      int position[2];
      std::int64_t slot[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = first_of_warp + lane_here / 4 + 8 * h;  // beyond the last row: slot -1
        slot[h] = tail.slot[i], position[h] = tail.position[i];
      }
      if (!__any_sync(~0u, slot[0] >= 0 || slot[1] >= 0)) continue;
      finish_part<Io, kHeadDim>(p, slot, position, t, lane_here % 4, sum, tail.norm, tail.eps);
      trace(kFinished);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
