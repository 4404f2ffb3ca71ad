#pragma once
// Many rows: a matrix product with the epilogue inside.
//
// A persistent block makes tiles of 128 rows x 256 columns (what is left over for the last round: 128 x 128). Warps 0 - 3 fill a ring of stages (64 features): the weights by
// tensor map; the rows by tensor map, too, where every row of the launch is written, else, since they may lie anywhere (compaction), by 16-byte asynchronous copies. Warps
// 4 - 7 and 8 - 11 multiply 64 rows each and then finish them where they are, in registers: four lanes hold a row's head, so norm and rotary
// need two shuffles and no shared memory. Meanwhile the ring fills for the next tile.
//
// The sums of the runs (problem.hpp) are what a tile is short of room for: 128 x 256 accumulators are half of the register file. Those of the first 128 columns
// fill what is left of it; those of the others are parked in shared memory between runs, which costs the ring its fourth stage and nothing else: while one group of warps adds,
// the other one has the tensor cores.
// Weights or rows by multicast to clusters of 2 or 4 were slower in every form (1500 to 2000 cycles a stage instead of 1024).
#include "draft_kv/cuda/few_rows.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kManyThreads = 384;
inline constexpr int kManyRows = 128;
inline constexpr int kManyStages = 3;
inline constexpr int kManyLag = 1;      // stages of row copies under way; a consumer holds one until it has the next
inline constexpr int kPlanRows = 1024;  // planned by every block itself; longer calls bring a list
inline constexpr int kGroupTiles = 16;  // row tiles that are done together, so that their rows and the weights stay in L2
inline constexpr int kNorms = 768;      // norm weights of a launch: layers x channels

struct ManyShape {
  int head_tiles;   // of the launch
  const Row* list;  // made by plan_kernel, or null: planned here
  const int* list_count;
  Runs runs;
  bool listed;  // row i of ctx is row i of the list
};

inline constexpr std::size_t kManyStageBytes = 2 * kStageBytes + std::size_t{kManyRows} * kDepth * 2;
struct ManyTail {
  float4 parked[2][16][128];  // of each group: the sums of its second 128 columns
  std::int64_t slot[kPlanRows];
  int position[kPlanRows];
  std::uint16_t row[kPlanRows];
  float norm[kNorms], eps[kMaxLayers];
  std::uint64_t full[kManyStages], empty[kManyStages];
  int warp_count[kManyThreads / 32];
  // What the launch turns out to be: here, because the multiplying warps have no registers to spare.
  int count, row_tiles, column_tiles, whole, tiles;
};
inline constexpr std::size_t kManySharedBytes = 1024 + kManyStages * kManyStageBytes + sizeof(ManyTail);
static_assert(kManySharedBytes <= 232448 && kPlanRows * sizeof(Row) + 2 * kPlanRows * sizeof(int) <= kManyStages * kManyStageBytes);

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
  float angles[2][32] = {};  // or what is not loaded would be taken for alive since the tile before
#pragma unroll
  for (int h = 0; h < 2; ++h) load_angles<kHeadDim>(p, layer, position[h], q, angles[h]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float(&angle)[32] = angles[h];
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

/// One head of K or V of two rows into the pool.
template <class Io, int kHeadDim, class W>
__device__ __forceinline__ void store_head(const Problem& p, const Head& head, const std::int64_t (&slot)[2], int q, const W& y) {
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  const LayerPool& pool = p.target[head.is_v][head.layer].pool;
  const DType dtype = head.is_v ? p.v_dtype : p.k_dtype;
  const bool wide = head.is_v ? p.v_wide : p.k_wide, odd = q & 1;
  if (wide && dtype == kType) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const to = static_cast<std::uint16_t*>(pool.data) + pool_offset(pool, slot[h], head.index) + 8 * odd + 2 * (q & 2);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 2) {
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
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      float x[2] = {y(j, h, 0), y(j, h, 1)}, next[2] = {y(j + 1, h, 0), y(j + 1, h, 1)}, out[4];
      round_pair<Io>(x[0], x[1]), round_pair<Io>(next[0], next[1]);
      four_channels(x, next, q, out);
      if (slot[h] >= 0) store_channels(pool, dtype, wide, offset, 8 * (j + odd) + 2 * (q & 2), scale, out);
    }
  }
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
  store_head<Io, kHeadDim>(p, first, slot, q, Words<0>{d});
  if constexpr (kHeads == 2) {
    if (!last.is_v)
      finish_k<Io, kHeadDim>(p, p.first_layer + last.layer, position, q, Words<8>{d}, norms + last.layer * kHeadDim, eps[last.layer]);
    store_head<Io, kHeadDim>(p, last, slot, q, Words<8>{d});
  }
}

/// The same for the product of target features (features.cuh), where there are no heads: the rounded result and its squares.
template <class Io>
__device__ __forceinline__ void finish_features(const Context& c, int row, bool valid, int tile, int q, float (&y)[16][2]) {
  const std::int64_t at = row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // blocks of 64 columns
    float word[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float &a = y[8 * half + j][0], &b = y[8 * half + j][1];
      a = rounded<Io>(a), b = rounded<Io>(b);
      word[j] = fmaf(b, b, a * a);
    }
    const float squares = sum_of_words(word);
    if (valid && q == 0) c.squares[at * (c.hidden / 64) + 2 * tile + half] = squares;
  }
  const LayerPool to{c.raw, 0, 0, 1};
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float out[4];
    four_channels(y[j], y[j + 1], q, out);
    if (valid) store_channels(to, kType, true, at * c.hidden + tile * kColumns, 8 * (j + (q & 1)) + 2 * (q & 2), 1.0f, out);
  }
}

/// kHeadDim 0: the product of target features, into `context`.
template <class Io, int kHeadDim>
__global__ void __launch_bounds__(kManyThreads, 1)
    many_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p,
              const ManyShape shape, const Context context) {
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  auto& tail = *reinterpret_cast<ManyTail*>(memory + kManyStages * kManyStageBytes);
  const int thread = threadIdx.x, group = thread / 128;
  if (thread == 0) prefetch_map(weights), prefetch_map(rows);
  ptx::wait_for_previous();
  if constexpr (kHeadDim > 0) {
    for (int i = thread; i < p.layers * kHeadDim; i += kManyThreads)
      tail.norm[i] = value_at(p.norm.data, p.norm.dtype, (p.first_layer + i / kHeadDim) * p.norm_layer + (i % kHeadDim) * p.norm.stride);
    if (thread < p.layers) tail.eps[thread] = static_cast<const float*>(p.eps.data)[(p.first_layer + thread) * p.eps.stride];
  }
  int count;
  if (shape.list) {
    count = *shape.list_count;
  } else {  // in the ring's memory
    auto* const list = reinterpret_cast<Row*>(memory);
    count = plan_rows<kManyThreads, (kPlanRows + kManyThreads - 1) / kManyThreads, 2 * kPlanRows>(
        p.rows, list, reinterpret_cast<int*>(list + kPlanRows), tail.warp_count, blockIdx.x == 0);
    for (int i = thread; i < count; i += kManyThreads)
      tail.slot[i] = list[i].slot, tail.position[i] = list[i].position, tail.row[i] = static_cast<std::uint16_t>(list[i].row);
    ptx::fence_async();
  }
  const bool dense = shape.listed || count == p.rows.tokens;  // rows lie one behind the other
  if (thread == 0) {
    for (int i = 0; i < kManyStages; ++i) ptx::barrier_init(&tail.full[i], dense ? 1 : 129), ptx::barrier_init(&tail.empty[i], 8);
    ptx::fence_barriers();
    // Whole tiles, and what is left for a last round that would be less than half full: in halves.
    const int blocks = static_cast<int>(gridDim.x), row_tiles = (count + kManyRows - 1) / kManyRows,
              column_tiles = (shape.head_tiles + 1) / 2;
    const int all = row_tiles * column_tiles, left = all % blocks, whole = 2 * left <= blocks ? all - left : all;
    tail.count = count, tail.row_tiles = row_tiles, tail.column_tiles = column_tiles, tail.whole = whole,
    tail.tiles = whole + 2 * (all - whole);
  }
  __syncthreads();

  struct Tile {
    int row_tile, head_tile, parts;
  };
  // Tile t of the launch: groups of kGroupTiles row tiles, in a group the columns outside.
  const auto tile_at = [&](int t) {
    const int column_tiles = tail.column_tiles, group_size = kGroupTiles * column_tiles, whole = tail.whole;
    const int w = t < whole ? t : whole + (t - whole) / 2, g = w / group_size, rest = w - g * group_size;
    const int in_group = min(tail.row_tiles - g * kGroupTiles, kGroupTiles), column = rest / in_group;
    Tile tile{g * kGroupTiles + rest - column * in_group, 2 * column, 2};
    if (t >= whole) tile.head_tile += (t - whole) % 2, tile.parts = 1;
    tile.parts = min(tile.parts, shape.head_tiles - tile.head_tile);  // 0: beyond the last of an odd number
    return tile;
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const std::uint64_t keep = ptx::evict_last();
    const int piece = thread % 8, first_row = thread / 8;
    const int stages_of_row = p.hidden / kDepth;
    const int weight_row = p.first_layer * 2 * p.heads * kHeadDim, row_begin = shape.listed ? 0 : static_cast<int>(p.rows.first);
    int stage = 0, under_way = 0, oldest = 0;
    std::uint32_t parity = 1;
    const auto load_weights = [&](unsigned char* to, int k, const Tile& tile, std::uint64_t* full) {
      for (int part = 0; part < tile.parts; ++part)
        tile_load(to + part * kStageBytes, weights, k * kDepth, weight_row + (tile.head_tile + part) * kColumns, full, keep);
    };
    for (int t = blockIdx.x; t < tail.tiles; t += gridDim.x) {
      const Tile tile = tile_at(t);
      if (tile.parts <= 0) continue;
      if (dense) {
        if (thread == 0)
          for (int k = 0; k < stages_of_row; ++k) {
            unsigned char* const a = memory + stage * kManyStageBytes;
            std::uint64_t* const full = &tail.full[stage];
            ptx::barrier_wait(&tail.empty[stage], parity);
            ptx::barrier_expect(full, static_cast<std::uint32_t>(tile.parts * kStageBytes + kManyRows * kDepth * 2));
            tile_load(a, rows, k * kDepth, row_begin + tile.row_tile * kManyRows, full, keep);
            load_weights(a + kManyRows * kDepth * 2, k, tile, full);
            if (++stage == kManyStages) stage = 0, parity ^= 1;
          }
        continue;
      }
      const std::uint16_t* from[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // a row beyond the last: any, nobody looks at its result
        const int i = min(tile.row_tile * kManyRows + first_row + 16 * j, count - 1), row = shape.list ? shape.list[i].row : tail.row[i];
        from[j] = static_cast<const std::uint16_t*>(p.ctx) + (p.rows.first + row) * p.ctx_stride + piece * 8;
      }
      for (int k = 0; k < stages_of_row; ++k) {
        unsigned char* const a = memory + stage * kManyStageBytes + first_row * 128 + ((piece ^ (first_row % 8)) << 4);
        ptx::barrier_wait(&tail.empty[stage], parity);
        if (thread == 0) {
          ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(tile.parts * kStageBytes));
          load_weights(memory + stage * kManyStageBytes + kManyRows * kDepth * 2, k, tile, &tail.full[stage]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          ptx::copy_async(a + j * 16 * 128, from[j]);
          from[j] += kDepth;
        }
        ptx::copy_async_commit();
        if (under_way == kManyLag) {
          ptx::copy_async_wait<kManyLag>();
          ptx::fence_async();
          ptx::barrier_arrive(&tail.full[oldest]);
          if (++oldest == kManyStages) oldest = 0;
        } else {
          ++under_way;
        }
        if (++stage == kManyStages) stage = 0, parity ^= 1;
      }
    }
    if (!dense) {
      ptx::copy_async_wait<0>();
      ptx::fence_async();
      for (; under_way > 0; --under_way) {
        ptx::barrier_arrive(&tail.full[oldest]);
        if (++oldest == kManyStages) oldest = 0;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int side = group - 1, lane = thread % 32, warp = thread / 32 % 4;
    float4* const parked = &tail.parked[side][0][thread % 128];  // [16], 128 apart
    int stage = 0, before = 0;
    std::uint32_t parity = 0;
    for (int t = blockIdx.x; t < tail.tiles; t += gridDim.x) {
      const Tile tile = tile_at(t);
      if (tile.parts <= 0) continue;
      float d[128], sum[64];
#pragma unroll
      for (int j = 0; j < 64; ++j) sum[j] = 0, d[j] = 0, d[64 + j] = 0;  // d: or the compiler takes it for alive from the tile before
      int k = 0;
      // Stages up to `end`, from zero.
      const auto multiply = [&](auto& accumulators, int end) {
        for (bool first = true; k < end; ++k, first = false) {
          const unsigned char* const m = memory + stage * kManyStageBytes;
          ptx::barrier_wait(&tail.full[stage], parity);
          const std::uint64_t a = tile_descriptor(m + side * kRowTileBytes), b = tile_descriptor(m + kManyRows * kDepth * 2);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) product<Io>(accumulators, a + 2 * s, b + 2 * s, !first || s > 0);
          product_commit();
          if (!first) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == kManyStages) stage = 0, parity ^= 1;
        }
        product_wait(accumulators);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
      };
      if (tile.parts == 2) {
#pragma unroll 1
        for (int run = 0; run < shape.runs.count; ++run) {
          multiply(d, shape.runs.begin(run + 1));
#pragma unroll
          for (int j = 0; j < 64; ++j) sum[j] += d[j];
          if (run == 0) {
#pragma unroll
            for (int i = 0; i < 16; ++i) parked[i * 128] = make_float4(d[64 + 4 * i], d[65 + 4 * i], d[66 + 4 * i], d[67 + 4 * i]);
          } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
              float4 x = parked[i * 128];
              x.x += d[64 + 4 * i], x.y += d[65 + 4 * i], x.z += d[66 + 4 * i], x.w += d[67 + 4 * i];
              parked[i * 128] = x;
              if (i % 4 == 3) asm volatile("" ::: "memory");
            }
          }
        }
      } else {
        auto& half = reinterpret_cast<float(&)[64]>(d);
#pragma unroll 1
        for (int run = 0; run < shape.runs.count; ++run) {
          multiply(half, shape.runs.begin(run + 1));
#pragma unroll
          for (int j = 0; j < 64; ++j) sum[j] += half[j];
        }
      }
      // Asked for again, here, so that nothing that follows from it is kept in registers while the products run.
      int lane_here;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      const int q = lane_here % 4;
      int at[2], position[2];
      std::int64_t slot[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        at[h] = tile.row_tile * kManyRows + side * 64 + 16 * warp + lane_here / 4 + 8 * h;
        const int i = min(at[h], tail.count - 1);
        if (shape.list)
          slot[h] = shape.list[i].slot, position[h] = shape.list[i].position;
        else
          slot[h] = tail.slot[i], position[h] = tail.position[i];
        if (at[h] >= tail.count) slot[h] = -1;
      }
#pragma unroll 1
      for (int part = 0; part < tile.parts; ++part) {  // what is finished now stands in `sum`, so that the code stands once
        if (part == 1) {
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const float4 x = parked[i * 128];
            sum[4 * i] = x.x, sum[4 * i + 1] = x.y, sum[4 * i + 2] = x.z, sum[4 * i + 3] = x.w;
          }
        }
        if constexpr (kHeadDim == 0) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float y[16][2];
#pragma unroll
            for (int j = 0; j < 16; ++j) y[j][0] = sum[4 * j + 2 * h], y[j][1] = sum[4 * j + 2 * h + 1];
            finish_features<Io>(context, at[h], at[h] < tail.count, tile.head_tile + part, q, y);
          }
        } else {
          finish_part<Io, kHeadDim>(p, slot, position, tile.head_tile + part, q, sum, tail.norm, tail.eps);
        }
      }
    }
  }
}

}  // namespace specstate::draft_kv::cuda
