#pragma once
// Rows of all numbers: a matrix product with the epilogue inside.
//
// A persistent block makes tiles of 64 kGroups rows x 128 columns, whole sums: no two blocks share any. Warps 0 - 3 fill a ring of stages (64 features): the weights by tensor
// map; the rows by tensor map, too, where they lie one behind the other, else, since they may lie anywhere (compaction), by 16-byte asynchronous copies. kGroups groups of
// four warps multiply 64 rows each and then finish them where they are, in registers: four lanes hold a row's head, so norm and rotary need two shuffles and no shared
// memory. Meanwhile the ring fills for the next tile.
//
//   1 group    up to 64 rows. Bound by reading the weights once, so everything is ring: 9 to 12 stages of 16 KB and of the rows. 80 blocks that do nothing else read 84 MB so
//              in 22 us, and nothing has to be exchanged between blocks. Rows are asked for as they lie, by the first thread, before anybody knows which of them are
//              written; three idle warps find that out meanwhile, and fetch what the epilogue wants. Where a product makes the rows (features.cuh), the weights are asked for while
//              it still runs, and the three warps norm a stage's rows where they lie, between their arrival and the products.
//   2 groups   up to 128 rows likewise; and more of them where 3 would leave the last round of tiles emptier.
//   3 groups   the rest. What decides the shape: the memory system takes about 2500 cycles to bring a stage under load, so three must be under way; and a run's sum needs
//              registers beside the accumulators (problem.hpp). 64 + 64 a thread and three groups leave both: five stages of 40 KB. (128 x 256 tiles have no room
//              for their sums but in place of a stage.)
// Weights or rows by multicast to clusters of 2 or 4 were slower in every form.
#include "draft_kv/cuda/finish.cuh"
#include "draft_kv/cuda/tensor_core.cuh"
#include "draft_kv/cuda/trace.hpp"
#include "draft_kv/cuda/work.hpp"

namespace specstate::draft_kv::cuda {

inline constexpr int kPlanRows = 1024;  // planned by every block itself; longer calls bring a list
inline constexpr int kMostStages = 16;
inline constexpr int kFewRows = 64;  // of a group of four warps
inline constexpr std::size_t kStageBytes = std::size_t{kColumns} * kDepth * 2, kRowTileBytes = std::size_t{kFewRows} * kDepth * 2;

template <int kGroups>
struct Many {
  static constexpr int kThreads = 128 * (kGroups + 1), kRows = 64 * kGroups;
  static constexpr int kPlanned = kGroups == 1 ? kRows : kPlanRows;
  static constexpr int kLayers = kGroups == 3 ? 6 : kMaxLayers;  // of a launch: their norm weights stay here
  static constexpr int kTables = kGroups == 3 ? 1 : kRows;       // rows that are planned beside the first tile
  static constexpr std::size_t kTileBytes = std::size_t{kRows} * kDepth * 2;
  static constexpr int kStages = kGroups == 1 ? kMostStages : kGroups == 2 ? 6 : 5;

  struct Tail {
    std::int64_t slot[kPlanned];
    Row list[kTables];
    int position[kPlanned], bucket[2 * kTables];
    float norm[kLayers * 128], eps[kLayers];
    int fetched[kRows];                                    // rows of ctx of the tile whose rows are copied
    std::uint64_t full[kStages], empty[kStages], planned;  // planned: what plan_beside leaves is there
    std::uint64_t landed[kGroups == 1 ? kStages : 1];      // target features: before they are normed, when the stage is full
    float factor[kGroups == 1 ? kRows : 1];
    int warp_count[kThreads / 32];
    std::uint16_t row[kPlanned];
  };
};

struct ManyShape {
  int head_tiles;   // of the launch
  const Row* list;  // made by plan_kernel, or null: planned here
  const int* list_count;
  Runs runs;
  bool listed = false;  // row i of ctx is row i of the list
  // many_shape fills these in.
  bool as_they_lie = false;  // one tile of rows, and row i of the launch is row i of it
  int stages = 0;            // of the ring
  int box = 0;               // rows of a stage: those of a tile, or (1 group) of the launch, a multiple of 8
};
SPECSTATE_HD constexpr std::size_t many_stage_bytes(int box) { return kStageBytes + static_cast<std::size_t>(box) * kDepth * 2; }
template <int kGroups>
constexpr std::size_t many_shared_bytes(int stages, int box) {
  return 1024 + stages * many_stage_bytes(box) + sizeof(typename Many<kGroups>::Tail);
}
template <int kGroups>
constexpr ManyShape many_shape(ManyShape s, int tokens, std::size_t most) {
  s.as_they_lie = kGroups == 1 || (!s.list && !s.listed && kGroups < 3 && tokens <= Many<kGroups>::kRows);
  s.box = kGroups == 1 ? (tokens + 7) / 8 * 8 : Many<kGroups>::kRows;
  s.stages = Many<kGroups>::kStages;
  while (kGroups == 1 && many_shared_bytes<1>(s.stages, s.box) > most) --s.stages;
  return s;
}
static_assert(many_shared_bytes<2>(6, 128) <= 232448 && many_shared_bytes<3>(5, 192) <= 232448 && many_shared_bytes<1>(8, 64) <= 232448);
static_assert(kPlanRows * sizeof(Row) + 2 * kPlanRows * sizeof(int) <= 5 * many_stage_bytes(192));

/// Words j and j + 1 of four lanes, two channels each -> four neighbouring channels a lane: from 8 (j + (q & 1)) + 2 (q & 2) on.
__device__ __forceinline__ void four_channels(const float (&x)[2], const float (&next)[2], int q, float (&out)[4]) {
  const bool odd = q & 1;
  const float a = __shfl_xor_sync(~0u, odd ? x[0] : next[0], 1), b = __shfl_xor_sync(~0u, odd ? x[1] : next[1], 1);
  out[0] = odd ? a : x[0], out[1] = odd ? b : x[1], out[2] = odd ? next[0] : a, out[3] = odd ? next[1] : b;
}

/// The sum over j of words (a butterfly), then over the four lanes.
template <int kN>
__device__ __forceinline__ float sum_of_words(float (&x)[kN]) {
#pragma unroll
  for (int step = 1; step < kN; step *= 2)
#pragma unroll
    for (int j = 0; j < kN; j += 2 * step) x[j] += x[j + step];
  x[0] += __shfl_xor_sync(~0u, x[0], 1);
  return x[0] + __shfl_xor_sync(~0u, x[0], 2);
}

/// Two values of Io, rounded.
template <class Io>
__device__ __forceinline__ std::uint32_t io_pair(float low, float high) {
  return std::is_same_v<Io, core::bfloat16> ? bf16_pair(low, high) : fp16_pair(low, high);
}
template <class Io>
__device__ __forceinline__ void round_pair(float& low, float& high) {
  const std::uint32_t pair = io_pair<Io>(low, high);
  if constexpr (std::is_same_v<Io, core::bfloat16>) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    low = __half2float(__ushort_as_half(static_cast<unsigned short>(pair))),
    high = __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
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

/// Words of a head, in place, with those kApart * 4 words further.
template <int kApart, class W>
__device__ __forceinline__ void turn_words(const W& y, int h, const float (&angle)[32]) {
#pragma unroll
  for (int j = 0; j < kApart; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float a = y(j, h, e), b = y(j + kApart, h, e), c = angle[4 * j + e], s = angle[4 * j + 2 + e];
      y(j, h, e) = a * c - b * s, y(j + kApart, h, e) = b * c + a * s;
    }
}

/// One head of K: rounding, norm, rotary.
template <class Io, int kHeadDim, class W>
__device__ __forceinline__ void finish_k(const Problem& p, int layer, const int (&position)[2], int q, const W& y, const float* norm,
                                         float eps) {
  constexpr int kHead = kHeadDim / 8;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float angle[32] = {};  // or what is not loaded would be taken for alive since the tile before
    load_angles<kHeadDim>(p, layer, position[h], q, angle);
#pragma unroll
    for (int j = 0; j < kHead; ++j) round_pair<Io>(y(j, h, 0), y(j, h, 1));
    float chunk[kHead / 2];
#pragma unroll
    for (int j = 0; j < kHead / 2; ++j) {
      const float x[4] = {y(j, h, 0), y(j, h, 1), y(j + kHead / 2, h, 0), y(j + kHead / 2, h, 1)};
      chunk[j] = chunk_squares(x);
    }
    const float factor = norm_factor(sum_of_words(chunk), kHeadDim, eps);
#pragma unroll
    for (int j = 0; j < kHead; ++j) {
      const float2 w = *reinterpret_cast<const float2*>(norm + 8 * j + 2 * q);
      y(j, h, 0) = y(j, h, 0) * factor * w.x, y(j, h, 1) = y(j, h, 1) * factor * w.y;
      if (p.round_after_norm) round_pair<Io>(y(j, h, 0), y(j, h, 1));
    }
    if (!p.is_neox_style) {
#pragma unroll
      for (int j = 0; j < kHead; ++j)
        if (4 * j + q < p.rotary_dim / 2) {
          const float c = angle[2 * j], s = angle[2 * j + 1], a = y(j, h, 0), b = y(j, h, 1);
          y(j, h, 0) = a * c - b * s, y(j, h, 1) = b * c + a * s;
        }
    } else if (p.rotary_dim == 128) {
      if constexpr (kHeadDim == 128) turn_words<8>(y, h, angle);
    } else if (p.rotary_dim == 64) {
      turn_words<4>(y, h, angle);
    } else if (p.rotary_dim == 32) {
      turn_words<2>(y, h, angle);
    } else {
      turn_words<1>(y, h, angle);
    }
  }
}

/// kWords * 8 channels from `channel` on of one head of K or V, of two rows, into the pool.
template <class Io, int kWords, class W>
__device__ __forceinline__ void store_words(const Problem& p, const Head& head, int channel, const std::int64_t (&slot)[2], int q,
                                            const W& y) {
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  const LayerPool& pool = p.target[head.is_v][head.layer].pool;
  const DType dtype = head.is_v ? p.v_dtype : p.k_dtype;
  const bool wide = head.is_v ? p.v_wide : p.k_wide, odd = q & 1;
  if (wide && dtype == kType) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const to = static_cast<std::uint16_t*>(pool.data) + pool_offset(pool, slot[h], head.index) + channel + 8 * odd + 2 * (q & 2);
#pragma unroll
      for (int j = 0; j < kWords; j += 2) {
        const std::uint32_t a = io_pair<Io>(y(j, h, 0), y(j, h, 1)), b = io_pair<Io>(y(j + 1, h, 0), y(j + 1, h, 1));
        const std::uint32_t other = __shfl_xor_sync(~0u, odd ? a : b, 1);
        if (slot[h] >= 0) *reinterpret_cast<uint2*>(to + 8 * j) = make_uint2(odd ? other : a, odd ? b : other);
      }
    }
    return;
  }
  const float scale = scale_of(p, head);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t offset = pool_offset(pool, slot[h], head.index);
#pragma unroll
    for (int j = 0; j < kWords; j += 2) {
      float x[2] = {y(j, h, 0), y(j, h, 1)}, next[2] = {y(j + 1, h, 0), y(j + 1, h, 1)}, out[4];
      round_pair<Io>(x[0], x[1]), round_pair<Io>(next[0], next[1]);
      four_channels(x, next, q, out);
      if (slot[h] >= 0) store_channels(pool, dtype, wide, offset, channel + 8 * (j + odd) + 2 * (q & 2), scale, out);
    }
  }
}

/// A quarter of a head of V, number v of all layers.
template <class Io, class W>
__device__ __forceinline__ void finish_quarter(const Problem& p, const std::int64_t (&slot)[2], int v, int q, const W& y) {
  const Head head{v / 4 / p.heads, v / 4 % p.heads, true};
  const int channel = 32 * (v % 4);
  if (p.bias.data) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = (p.heads + head.index) * 128 + channel + 8 * j + 2 * q + e;
        const float b = value_at(p.bias.data, p.bias.dtype, (p.first_layer + head.layer) * p.bias_layer + column * p.bias.stride);
        y(j, 0, e) += b, y(j, 1, e) += b;
      }
  }
  store_words<Io, 4>(p, head, channel, slot, q, y);
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
  if (!first.is_v)
    finish_k<Io, kHeadDim>(p, p.first_layer + first.layer, position, q, Words<0>{d}, norms + first.layer * kHeadDim, eps[first.layer]);
  store_words<Io, kHeadDim / 8>(p, first, 0, slot, q, Words<0>{d});
  if constexpr (kHeads == 2) {
    if (!last.is_v)
      finish_k<Io, kHeadDim>(p, p.first_layer + last.layer, position, q, Words<8>{d}, norms + last.layer * kHeadDim, eps[last.layer]);
    store_words<Io, kHeadDim / 8>(p, last, 0, slot, q, Words<8>{d});
  }
}

/// The same for the product of target features (features.cuh), where there are no heads: the rounded result and its squares.
template <class Io, int kBlocks>
__device__ __forceinline__ void finish_features(const Context& c, int row, bool valid, int tile, int q, float (&y)[8 * kBlocks][2]) {
  const std::int64_t at = row;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {  // of 64 columns
    float word[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float &a = y[8 * block + j][0], &b = y[8 * block + j][1];
      a = rounded<Io>(a), b = rounded<Io>(b);
      word[j] = fmaf(b, b, a * a);
    }
    const float squares = sum_of_words(word);
    if (valid && q == 0) c.squares[at * (c.hidden / 64) + kBlocks * tile + block] = squares;
  }
  const LayerPool to{c.raw, 0, 0, 1};
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
#pragma unroll
  for (int j = 0; j < 8 * kBlocks; j += 2) {
    float out[4];
    four_channels(y[j], y[j + 1], q, out);
    if (valid) store_channels(to, kType, true, at * c.hidden + tile * 64 * kBlocks, 8 * (j + (q & 1)) + 2 * (q & 2), 1.0f, out);
  }
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

/// Target features: norms the rows of `loads` stages where they lie, by kWarps warps.
template <class Io, int kWarps, class Tail>
__device__ __forceinline__ void norm_stages(const Context& c, Tail& tail, unsigned char* memory, int stages, std::uint32_t stage_bytes,
                                            int loads, int k_begin, int depth, int count, int thread) {
  const int warp = thread / 32, lane = thread % 32, piece = thread % 8;
  for (int r = 4 * warp; r < count; r += 4 * kWarps)  // a warp norms four neighbouring rows, and needs their factors only
    for (int i = r; i < min(r + 4, count); ++i) {
      const float factor = row_factor(c, i, lane);
      if (lane == 0) tail.factor[i] = factor;
    }
  __syncwarp();
  float next[8];
  const auto weights_of = [&](int k) {
#pragma unroll
    for (int e = 0; e < 8; ++e) next[e] = value_at(c.norm.data, c.norm.dtype, ((k_begin + k) * kDepth + piece * 8 + e) * c.norm.stride);
  };
  weights_of(0);
  int stage = 0, k = 0;
  std::uint32_t parity = 0;
  for (int i = 0; i < loads; ++i) {
    float norm[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) norm[e] = next[e];
    if (++k == depth) k = 0;
    weights_of(k);
    ptx::barrier_wait(&tail.landed[stage], parity);
    for (int r = thread / 8; r < count; r += 4 * kWarps) {
      auto* const at = reinterpret_cast<uint4*>(memory + stage * stage_bytes + r * 128 + ((piece ^ (r % 8)) << 4));
      *at = normed_piece<Io>(*at, tail.factor[r], norm);
    }
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&tail.full[stage]);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}
template <int kHeadDim>
__device__ __forceinline__ void fetch_norms(const Problem& p, float* norm, float* eps, int thread, int threads) {
  for (int i = thread; i < p.layers * kHeadDim; i += threads)
    norm[i] = value_at(p.norm.data, p.norm.dtype, (p.first_layer + i / kHeadDim) * p.norm_layer + (i % kHeadDim) * p.norm.stride);
  if (thread < p.layers) eps[thread] = static_cast<const float*>(p.eps.data)[(p.first_layer + thread) * p.eps.stride];
}

/// kHeadDim 0: the product of target features, into `context`.
template <class Io, int kHeadDim, int kGroups>
__global__ void __launch_bounds__(Many<kGroups>::kThreads, 1)
    many_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p,
              const __grid_constant__ ManyShape shape, const __grid_constant__ Context context) {
  using M = Many<kGroups>;
  constexpr int kThreads = M::kThreads, kRows = M::kRows;
  constexpr bool kMayLie = kGroups < 3 && kHeadDim > 0, kAlwaysLies = kGroups == 1;
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const int stages = kGroups == 1 ? shape.stages : M::kStages;
  const std::uint32_t tile_bytes = kGroups == 1 ? shape.box * kDepth * 2 : static_cast<std::uint32_t>(M::kTileBytes),
                      stage_bytes = static_cast<std::uint32_t>(kStageBytes) + tile_bytes;
  auto& tail = *reinterpret_cast<typename M::Tail*>(memory + stages * stage_bytes);
  const int thread = threadIdx.x, group = thread / 128;
  const bool lies = kAlwaysLies || (kMayLie && shape.as_they_lie), raw = kAlwaysLies && context.raw;
  if (thread == 0) prefetch_map(weights), prefetch_map(rows);
  int count = p.rows.tokens;
  if (!lies) {
    ptx::wait_for_previous();
    if constexpr (kHeadDim > 0) fetch_norms<kHeadDim>(p, tail.norm, tail.eps, thread, kThreads);
    if (shape.list) {
      count = *shape.list_count;
    } else if constexpr (!kAlwaysLies) {  // in the ring's memory
      auto* const list = reinterpret_cast<Row*>(memory);
      count = plan_rows<kThreads, (kPlanRows + kThreads - 1) / kThreads, 2 * kPlanRows>(
          p.rows, list, reinterpret_cast<int*>(list + kPlanRows), tail.warp_count, blockIdx.x == 0);
      for (int i = thread; i < count; i += kThreads)
        tail.slot[i] = list[i].slot, tail.position[i] = list[i].position, tail.row[i] = static_cast<std::uint16_t>(list[i].row);
      ptx::fence_async();
    }
  }
  const bool dense = lies || shape.listed || count == p.rows.tokens;  // rows lie one behind the other
  if (thread == 0) {
    for (int i = 0; i < stages; ++i) {
      ptx::barrier_init(&tail.full[i], raw ? 3 : dense ? 1 : 129), ptx::barrier_init(&tail.empty[i], 4 * kGroups);
      if constexpr (kAlwaysLies) ptx::barrier_init(&tail.landed[i], 1);
    }
    ptx::barrier_init(&tail.planned, 96);
    ptx::fence_barriers();
  }
  const int stages_of_row = p.hidden / kDepth, weight_row = p.first_layer * 2 * p.heads * kHeadDim;
  const int ahead = raw ? min(stages, stages_of_row) : 0;  // stages whose weights are asked for before the rows are there
  if constexpr (kAlwaysLies)
    if (thread == 0)
      for (int k = 0; k < ahead; ++k) {
        ptx::barrier_expect(&tail.landed[k], stage_bytes);
        tile_load(memory + k * stage_bytes + tile_bytes, weights, k * kDepth, weight_row + static_cast<int>(blockIdx.x) * kColumns,
                  &tail.landed[k], ptx::evict_first());
      }
  if (lies) ptx::wait_for_previous();
  __syncthreads();
  trace(kStart);

  const int row_tiles = (count + kRows - 1) / kRows, tiles = row_tiles * shape.head_tiles;
  struct Tile {
    int row_tile, head_tile;
  };
  // Tile t of the launch: groups of kGroupTiles row tiles, in a group the columns outside.
  const auto tile_at = [&](int t) {
    if constexpr (kAlwaysLies) return Tile{0, t};
    const int group_size = kGroupTiles * shape.head_tiles, g = t / group_size, rest = t - g * group_size;
    const int in_group = min(row_tiles - g * kGroupTiles, kGroupTiles), column = rest / in_group;
    return Tile{g * kGroupTiles + rest - column * in_group, column};
  };

  if (group == 0) {
    if constexpr (kGroups == 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    const std::uint64_t keep = ptx::evict_last(), of_weights = lies ? ptx::evict_first() : keep;
    const int piece = thread % 8, first_row = thread / 8;
    const int row_begin = shape.listed || raw ? 0 : static_cast<int>(p.rows.first);
    int stage = 0;
    std::uint32_t parity = 1;
    if (dense) {
      if (thread == 0) {
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
          const Tile tile = tile_at(t);
          for (int k = 0; k < stages_of_row; ++k) {
            unsigned char* const a = memory + stage * stage_bytes;
            std::uint64_t* const full = raw ? &tail.landed[stage] : &tail.full[stage];
            if (k >= ahead || t != static_cast<int>(blockIdx.x)) {
              ptx::barrier_wait(&tail.empty[stage], parity);
              ptx::barrier_expect(full, stage_bytes);
              tile_load(a + tile_bytes, weights, k * kDepth, weight_row + tile.head_tile * kColumns, full, of_weights);
            }
            tile_load(a, rows, k * kDepth, row_begin + tile.row_tile * kRows, full, keep);
            if (++stage == stages) stage = 0, parity ^= 1;
          }
        }
        trace(kAsked);
      } else if (lies && thread >= 32) {
        if constexpr (kMayLie) {
          fetch_norms<kHeadDim>(p, tail.norm, tail.eps, thread - 32, 96);
          if (thread < 64)
            plan_beside<kHeadDim, kRows>(p, tail, blockIdx.x == 0, static_cast<int>(blockIdx.x) * (kColumns / kHeadDim), thread - 32);
          ptx::barrier_arrive(&tail.planned);
          if constexpr (kAlwaysLies)
            if (raw) {
              const int mine = (tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
              norm_stages<Io, 3>(context, tail, memory, stages, stage_bytes, mine * stages_of_row, 0, stages_of_row, count, thread - 32);
            }
        }
      }
    } else if constexpr (!kAlwaysLies) {
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = tile_at(t);
        __syncwarp();  // a warp copies rows of its own, and keeps a list of them
        if (piece == 0)
#pragma unroll
          for (int j = 0; j < kRows / 16; ++j) {  // a row beyond the last: any, nobody looks at its result
            const int i = min(tile.row_tile * kRows + first_row + 16 * j, count - 1);
            tail.fetched[first_row + 16 * j] = shape.list ? shape.list[i].row : tail.row[i];
          }
        __syncwarp();
        const int stride = static_cast<int>(p.ctx_stride);
        const auto* base = static_cast<const std::uint16_t*>(p.ctx) + p.rows.first * p.ctx_stride + piece * 8;
        for (int k = 0; k < stages_of_row; ++k, base += kDepth) {
          unsigned char* const a = memory + stage * stage_bytes + first_row * 128 + ((piece ^ (first_row % 8)) << 4);
          ptx::barrier_wait(&tail.empty[stage], parity);
          if (thread == 0) {
            ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(kStageBytes));
            tile_load(memory + stage * stage_bytes + tile_bytes, weights, k * kDepth, weight_row + tile.head_tile * kColumns,
                      &tail.full[stage], keep);
          }
#pragma unroll 4
          for (int j = 0; j < kRows / 16; ++j)
            ptx::copy_async(a + j * 16 * 128, base + static_cast<std::int64_t>(tail.fetched[first_row + 16 * j]) * stride);
          ptx::copy_async_arrive(&tail.full[stage]);
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      }
      ptx::copy_async_commit(), ptx::copy_async_wait<0>();  // nobody leaves before its copies have come
    }
  } else {
    if constexpr (kGroups == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    const int side = group - 1, lane = thread % 32, warp = thread / 32 % 4;
    int stage = 0, before = 0;
    std::uint32_t parity = 0;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      float d[64], sum[64];
#pragma unroll
      for (int j = 0; j < 64; ++j) sum[j] = 0, d[j] = 0;  // d: or the compiler takes it for alive from the tile before
      int k = 0;
#pragma unroll 1
      for (int run = 0; run < shape.runs.count; ++run) {
        const int end = shape.runs.begin(run + 1);
        for (bool first = true; k < end; ++k, first = false) {
          const unsigned char* const m = memory + stage * stage_bytes;
          ptx::barrier_wait(&tail.full[stage], parity);
          if (!dense) ptx::fence_async();  // rows that threads have copied, for the tensor cores
          if (k == 0) trace(kFirstStage);
          const std::uint64_t a = tile_descriptor(m + side * kRowTileBytes), b = tile_descriptor(m + tile_bytes);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) product<Io>(d, a + 2 * s, b + 2 * s, !first || s > 0);
          product_commit();
          if (!first) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == stages) stage = 0, parity ^= 1;
        }
        trace(kLastStage);
        product_wait(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
#pragma unroll
        for (int j = 0; j < 64; ++j) sum[j] += d[j];
      }
      __syncwarp();
      trace(kSummed);
      if (kMayLie && lies) ptx::barrier_wait(&tail.planned, 0);  // what was found out meanwhile
      trace(kPlanThere);
      // Asked for again, here, so that nothing that follows from them is kept in registers while the products run.
      int lane_here;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      const int q = lane_here % 4;
      const Tile tile = tile_at(t);
      const int first_of_warp = tile.row_tile * kRows + side * 64 + 16 * warp;
      if (first_of_warp >= count) continue;
      int at[2], position[2];
      std::int64_t slot[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        at[h] = first_of_warp + lane_here / 4 + 8 * h;
        const int i = min(at[h], count - 1);
        if (shape.list)
          slot[h] = shape.list[i].slot, position[h] = shape.list[i].position;
        else
          slot[h] = tail.slot[i], position[h] = tail.position[i];
        if (at[h] >= count) slot[h] = -1;
      }
      if (kHeadDim > 0 && !__any_sync(~0u, slot[0] >= 0 || slot[1] >= 0)) continue;
      if constexpr (kHeadDim == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float y[16][2];
#pragma unroll
          for (int j = 0; j < 16; ++j) y[j][0] = sum[4 * j + 2 * h], y[j][1] = sum[4 * j + 2 * h + 1];
          finish_features<Io, 2>(context, at[h], at[h] < count, tile.head_tile, q, y);
        }
      } else {
        finish_part<Io, kHeadDim>(p, slot, position, tile.head_tile, q, sum, tail.norm, tail.eps);
      }
      trace(kFinished);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
