#pragma once
// Few rows (up to 64, or 128): the weights are read once, everything else hides behind that.
//
// What bounds it: 84 MB of weights for 5 layers of 2 x 8 heads of 128 channels over 4096 features, 20 us of the memory's time. So all SMs must stream all
// the time, and little else may cost anything.
// A cluster of kFewBlocks blocks owns a run of columns; block r of it sums slice r of the features (see problem.hpp). An H200 holds 30 such clusters. K heads must stay whole
// for their norm, but columns of V may go anywhere: columns are dealt out in quarters of a head, K heads first.
//   the last warp    asks for stages of 64 features: the weights of up to 128 columns and, with the first tile, that slice of the rows, which stays (where it is too long
//                    it comes again with every tile: `resident`). Rows go to the tensor cores as they lie, those that are not written too: nobody reads their results;
//   4 or 8 warps     multiply, four of them 64 rows. A tile's sums go to the blocks of the cluster, to each the rows that it finishes: 16-byte stores into
//                    the other block's memory, counted by a barrier there;
//   8 warps finish:  plan which rows are written while the first tile is multiplied; then add the slices in rising order, a row a warp, two (or four) channels and
//                    their partners a lane; epilogue; store. Meanwhile the next tile is multiplied.
#include "draft_kv/cuda/finish.cuh"
#include "draft_kv/cuda/tensor_core.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kFewRows = 64;  // of a group of four warps
template <int kGroups>
inline constexpr int kFinishers = kGroups == 1 ? 8 : 7;  // warps: 16 in all leave 128 registers
template <int kGroups>
inline constexpr int kFewThreads = 32 * (4 * kGroups + kFinishers<kGroups> + 1);
template <int kGroups>
inline constexpr int kFewMost = kGroups == 1 ? 64 : 512;  // rows of a launch
inline constexpr int kFewStages = 16;                     // most of the ring
inline constexpr int kFewTiles = 4;                       // tiles of rows

/// What the launch decides.
struct FewShape {
  int stages;     // of the ring
  int depth;      // most stages of a slice
  Runs runs;      // of the sum, a multiple of kFewBlocks
  int rows;       // of a tile, a multiple of 8
  int row_tiles;  // with more than one all rows are streamed
  bool resident;  // the slice of the rows stays in shared memory
  bool early;     // the weights were there before the kernel before this one began: ask for them while it still runs
};

inline constexpr std::size_t kStageBytes = std::size_t{kColumns} * kDepth * 2;
inline constexpr std::size_t kRowTileBytes = std::size_t{kFewRows} * kDepth * 2;
template <int kGroups>
struct FewTail {
  Row list[kFewMost<kGroups> + 1];
  int bucket[2 * kFewMost<kGroups>], warp_count[8];
  int begin[kFewTiles + 1];        // of a tile of rows in the list
  short place[kFewMost<kGroups>];  // of a row in the list, or -1
  std::uint64_t full[kFewStages], empty[kFewStages], sums, free;
};
SPECSTATE_HD constexpr int few_share(int rows) { return (rows + kFewBlocks - 1) / kFewBlocks; }
SPECSTATE_HD constexpr std::size_t few_tile_bytes(const FewShape& s) { return static_cast<std::size_t>(s.rows) * kDepth * 2; }
SPECSTATE_HD constexpr std::size_t few_resident_bytes(const FewShape& s) { return s.resident ? s.depth * few_tile_bytes(s) : 0; }
SPECSTATE_HD constexpr std::size_t few_stage_bytes(const FewShape& s) { return kStageBytes + (s.resident ? 0 : few_tile_bytes(s)); }
/// The runs' sums of the rows that a block finishes; not less than what the tensor cores read beyond the last row.
SPECSTATE_HD constexpr std::size_t few_sum_bytes(const FewShape& s) {
  const std::size_t bytes = static_cast<std::size_t>(s.runs.count) * few_share(s.rows) * kColumns * 4;
  return bytes < kRowTileBytes ? kRowTileBytes : bytes;
}
template <int kGroups>
constexpr std::size_t few_shared_bytes(const FewShape& s) {
  return 1024 + few_resident_bytes(s) + s.stages * few_stage_bytes(s) + few_sum_bytes(s) + sizeof(FewTail<kGroups>);
}

__device__ __forceinline__ std::uint32_t address_in_block(const void* p, std::uint32_t rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(ptx::shared(p)), "r"(rank));
  return address;
}
/// 16 bytes into another block's shared memory, counted by a barrier of that block.
__device__ __forceinline__ void send(std::uint32_t to, float a, float b, float c, float d, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b),
               "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void arrive_in_block(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// barrier_wait for what other blocks of the cluster have sent.
__device__ __forceinline__ void barrier_wait_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(ptx::shared(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// What the epilogue of a chunk needs besides the sum: fetched while the sum is still under way. The chunk's two words are channels
/// channel[i] + {0, 1} of block[i].
struct Side {
  Block block[2];
  int channel[2];
  float bias[4], norm[4], eps, scale[2];
};
template <int kHeadDim>
__device__ __forceinline__ Side side_of(const Problem& p, const Columns<kHeadDim>& columns, int t, int lane) {
  constexpr int kLanes = kHeadDim / 4;  // chunks, so lanes, of a head
  const int w = lane % kLanes;
  Side side{};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Block b = side.block[i] = columns.block(t, kHeadDim == 128 ? 2 * i + w / 16 : lane / kLanes, p.heads);
    side.channel[i] = kHeadDim == 128 ? b.channel + 2 * (w % 16) : 2 * w + 32 * i;
    side.scale[i] = b.here ? scale_of(p, {b.layer, b.index, b.is_v}) : 1.0f;
    if (p.bias.data && b.here) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = ((b.is_v ? p.heads : 0) + b.index) * kHeadDim + side.channel[i] + e;
        side.bias[2 * i + e] = value_at(p.bias.data, p.bias.dtype, (p.first_layer + b.layer) * p.bias_layer + column * p.bias.stride);
      }
    }
  }
  if (side.block[0].is_v || !side.block[0].here) return side;
  // All loads before the first use.
  const int layer = p.first_layer + side.block[0].layer;
  const float eps = static_cast<const float*>(p.eps.data)[layer * p.eps.stride];
  if (p.norm_pairs) {
    const auto* norm = static_cast<const std::uint16_t*>(p.norm.data) + layer * p.norm_layer;
    const std::uint32_t n0 = *reinterpret_cast<const std::uint32_t*>(norm + side.channel[0]);
    const std::uint32_t n1 = *reinterpret_cast<const std::uint32_t*>(norm + side.channel[1]);
    side.norm[0] = from_pair(n0, p.norm.dtype, 0), side.norm[1] = from_pair(n0, p.norm.dtype, 1);
    side.norm[2] = from_pair(n1, p.norm.dtype, 0), side.norm[3] = from_pair(n1, p.norm.dtype, 1);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      side.norm[i] = value_at(p.norm.data, p.norm.dtype, layer * p.norm_layer + (side.channel[i / 2] + i % 2) * p.norm.stride);
  }
  side.eps = eps;
  return side;
}
/// Of a row: the angles of the chunk's channels.
struct Turn {
  float cosine[2], sine[2];
};
template <int kHeadDim>
__device__ __forceinline__ Turn turn_of(const Problem& p, const Side& side, int position, int lane) {
  constexpr int kLanes = kHeadDim / 4;
  if (side.block[0].is_v || !side.block[0].here) return {};
  const int w = lane % kLanes, half = p.rotary_dim / 2;
  const float* angles = p.table + (p.first_layer + side.block[0].layer) * p.table_layer + position * p.table_row;
  const int f0 = p.is_neox_style ? 2 * (w & (p.rotary_dim / 4 - 1)) : min(w, half - 1);
  const int f1 = p.is_neox_style ? f0 + 1 : min(w + kLanes, half - 1);
  return {{angles[f0], angles[f1]}, {angles[half + f0], angles[half + f1]}};
}

/// One row of a tile, by a warp: lane `lane` has the finished sum of chunk `lane`, word w and its partner half a head further (of V: the same
/// word of the other block). A head of 64 has 16 lanes.
template <class Io, int kHeadDim>
__device__ __forceinline__ void finish_row(const Problem& p, std::int64_t slot, int lane, const Side& side, const Turn& turn,
                                           const float (&sum)[4]) {
  constexpr int kLanes = kHeadDim / 4;
  const int w = lane % kLanes;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = rounded<Io>(p.bias.data ? sum[i] + side.bias[i] : sum[i]);
  float z[4] = {};
  if (kHeadDim == 64 || !side.block[0].is_v) {
    // Heads of 64: K and V may share a warp, so all lanes take part in what crosses lanes.
    float squares = chunk_squares(x);
    squares += __shfl_xor_sync(~0u, squares, 4);
    squares += __shfl_xor_sync(~0u, squares, 8);
    if constexpr (kHeadDim == 128) squares += __shfl_xor_sync(~0u, squares, 16);
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    const float s = norm_factor(squares, kHeadDim, side.eps);
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = x[i] * s * side.norm[i];
      if (p.round_after_norm) y[i] = rounded<Io>(y[i]);
      z[i] = y[i];
    }
    const int apart = p.rotary_dim / 4;  // words between partners
    if (!p.is_neox_style) {              // partners are the two channels of a word
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (w + i * kLanes < p.rotary_dim / 2) {
          z[2 * i] = y[2 * i] * turn.cosine[i] - y[2 * i + 1] * turn.sine[i];
          z[2 * i + 1] = y[2 * i + 1] * turn.cosine[i] + y[2 * i] * turn.sine[i];
        }
    } else if (apart == kLanes) {  // those of a chunk
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        z[e] = y[e] * turn.cosine[e] - y[2 + e] * turn.sine[e];
        z[2 + e] = y[2 + e] * turn.cosine[e] + y[e] * turn.sine[e];
      }
    } else {  // those of another lane
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float other = __shfl_xor_sync(~0u, y[e], apart);
        if (w < 2 * apart) z[e] = w < apart ? y[e] * turn.cosine[e] - other * turn.sine[e] : y[e] * turn.cosine[e] + other * turn.sine[e];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Block& b = side.block[i];
    if (!b.here) continue;
    const LayerPool& pool = p.target[b.is_v][b.layer].pool;
    const float out[2] = {b.is_v ? x[2 * i] : rounded<Io>(z[2 * i]), b.is_v ? x[2 * i + 1] : rounded<Io>(z[2 * i + 1])};
    store_channels(pool, b.is_v ? p.v_dtype : p.k_dtype, b.is_v ? p.v_wide : p.k_wide, pool_offset(pool, slot, b.index), side.channel[i],
                   side.scale[i], out);
  }
}

template <class Io, int kHeadDim, int kGroups>
__global__ void __launch_bounds__(kFewThreads<kGroups>, 1)
    few_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p,
             const FewShape shape, const Context context) {
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const auto tile_bytes = static_cast<std::uint32_t>(few_tile_bytes(shape)),
             stage_bytes = static_cast<std::uint32_t>(few_stage_bytes(shape));
  unsigned char* const row_tiles = memory;
  unsigned char* const ring = row_tiles + few_resident_bytes(shape);
  auto* const received = reinterpret_cast<float4*>(ring + shape.stages * stage_bytes);
  auto& tail = *reinterpret_cast<FewTail<kGroups>*>(ring + shape.stages * stage_bytes + few_sum_bytes(shape));

  constexpr int kFirstFinisher = 4 * kGroups, kFinish = kFinishers<kGroups>, kProducer = kFirstFinisher + kFinish;  // warps
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = static_cast<int>(ptx::cluster_rank()), cluster = blockIdx.x / kFewBlocks, clusters = gridDim.x / kFewBlocks;
  const Columns<kHeadDim> columns(p.layers, p.heads, cluster, clusters);
  const int tiles = columns.tiles() * shape.row_tiles;
  const int runs = shape.runs.count / kFewBlocks, first_run = rank * runs;
  const int k_begin = shape.runs.begin(first_run), depth = shape.runs.begin(first_run + runs) - k_begin;
  const int loads = tiles * depth;

  if (!shape.early) ptx::wait_for_previous();
  // The loads, in their order; everything that takes a division is done once a tile.
  constexpr int kInTile = Columns<kHeadDim>::kInTile;
  constexpr std::size_t kBlockBytes = kStageBytes / kInTile;
  struct {
    int tile = 0, row_tile = 0, k = 0, stage = 0, columns[kInTile] = {};
    std::uint32_t bytes = 0;
  } next;
  const std::uint64_t keep = ptx::evict_last(), once = shape.row_tiles > 1 ? keep : ptx::evict_first();
  const auto load = [&] {
    const bool with_rows = !context.raw && (next.tile == 0 || !shape.resident);
    if (next.k == 0) {
      next.bytes = with_rows ? tile_bytes : 0;
#pragma unroll
      for (int i = 0; i < kInTile; ++i) {
        const Block b = columns.block(next.tile, i, p.heads);
        next.columns[i] = b.here ? (p.first_layer + b.layer) * 2 * p.heads * kHeadDim + column_of<kHeadDim>(b, p.heads) : -1;
        next.bytes += b.here ? kBlockBytes : 0;
      }
    }
    unsigned char* const to = ring + next.stage * stage_bytes;
    std::uint64_t* const full = &tail.full[next.stage];
    const int feature = (k_begin + next.k) * kDepth;
    ptx::barrier_expect(full, next.bytes);
#pragma unroll
    for (int i = 0; i < kInTile; ++i)
      if (next.columns[i] >= 0) tile_load(to + i * kBlockBytes, weights, feature, next.columns[i], full, once);
    if (with_rows)
      tile_load(shape.resident ? row_tiles + next.k * tile_bytes : to + kStageBytes, rows, feature,
                static_cast<int>(p.rows.first) + next.row_tile * shape.rows, full, keep);
    if (++next.k == depth) {
      next.k = 0;
      if (++next.row_tile == shape.row_tiles) next.row_tile = 0, ++next.tile;
    }
    if (++next.stage == shape.stages) next.stage = 0;
  };
  if (thread == 32 * kProducer) {
    for (int i = 0; i < shape.stages; ++i) ptx::barrier_init(&tail.full[i], 1), ptx::barrier_init(&tail.empty[i], 4 * kGroups);
    ptx::barrier_init(&tail.sums, 1 + kFewBlocks * 4 * kGroups), ptx::barrier_init(&tail.free, kFinish * kFewBlocks);
    ptx::fence_barriers();
    for (int i = 0; i < min(loads, shape.stages); ++i) load();
  }
  if (shape.early) ptx::wait_for_previous();
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

  const auto math = [&] {
    const int group = warp / 4;
    float d[64];
    int stage = 0, before = 0, row_tile = 0;
    std::uint32_t parity = 0;
    for (int u = 0; u < tiles; ++u) {
      int k = 0;
#pragma unroll 1
      for (int run = first_run; run < first_run + runs; ++run) {
        const int end = shape.runs.begin(run + 1) - k_begin;
        for (bool first = true; k < end; ++k, first = false) {
          ptx::barrier_wait(&tail.full[stage], parity);
          const unsigned char* const w = ring + stage * stage_bytes;
          const std::uint64_t a = tile_descriptor((shape.resident ? row_tiles + k * tile_bytes : w + kStageBytes) + group * kRowTileBytes);
          const std::uint64_t b = tile_descriptor(w);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) product<Io>(d, a + 2 * s, b + 2 * s, !first || s > 0);
          product_commit();
          if (!first) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == shape.stages) stage = 0, parity ^= 1;
        }
        product_wait(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        __syncwarp();
        if (run == first_run) {
          if (u == 0)
            named_barrier(3, 32 * kProducer);  // the plan is there: the one point where all of them meet
          else
            barrier_wait_cluster(&tail.free, (u - 1) & 1);
        }
        const int begin = tail.begin[row_tile], share = few_share(tail.begin[row_tile + 1] - begin);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int row = 64 * group + 16 * (warp % 4) + lane / 4 + 8 * side;
          const int place = row < shape.rows ? tail.place[row_tile * shape.rows + row] - begin : -1;
          if (place >= 0) {
            const std::uint32_t to_rank = place / share;
            const std::uint32_t to = address_in_block(received + (run * share + place % share) * 32 + lane % 4, to_rank);
            const std::uint32_t barrier = address_in_block(&tail.sums, to_rank);
#pragma unroll
            for (int c = 0; c < 8; ++c) {  // chunk c of this lane: its word and the partner
              const int j = kHeadDim == 128 ? c : c / 4 * 8 + c % 4, partner = j + kHeadDim / 16;
              send(to + c * 64, d[4 * j + 2 * side], d[4 * j + 2 * side + 1], d[4 * partner + 2 * side], d[4 * partner + 2 * side + 1],
                   barrier);
            }
          }
        }
      }
      // The bytes alone would not hold back a block that finishes no rows.
      __syncwarp();
      if (lane < kFewBlocks) arrive_in_block(address_in_block(&tail.sums, lane));
      if (++row_tile == shape.row_tiles) row_tile = 0;
    }
  };

  if (warp == kProducer) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (lane == 0) {
      std::uint32_t parity = 0;
      for (int i = shape.stages; i < loads; ++i) {
        ptx::barrier_wait(&tail.empty[next.stage], parity);
        if (next.stage == shape.stages - 1) parity ^= 1;
        load();
      }
    }
  } else if (warp < kFirstFinisher) {
    if (context.raw) named_barrier(2, 32 * kProducer);  // the finishers make the rows
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    math();
  } else {
    const int finisher = warp - kFirstFinisher, at = thread - 32 * kFirstFinisher;
    const auto sync = [] { named_barrier(1, 32 * kFinish); };
    for (int i = at; i < kFewMost<kGroups>; i += 32 * kFinish) tail.place[i] = -1;
    constexpr int kPlanned = (kFewMost<kGroups> + 32 * kFinish - 1) / (32 * kFinish);  // rows of a thread
    const int count = plan_rows<32 * kFinish, kPlanned, 2 * kFewMost<kGroups>>(p.rows, tail.list, tail.bucket, tail.warp_count,
                                                                               blockIdx.x == 0, at, sync);
    if (at <= kFewTiles) tail.begin[at] = count;
    sync();
    for (int i = at; i < count; i += 32 * kFinish) {
      const int row = context.raw ? i : tail.list[i].row;
      tail.place[row] = static_cast<short>(i);
      atomicMin(&tail.begin[row / shape.rows], i);
    }
    sync();
    if (at == 0)  // tiles without rows
      for (int t = kFewTiles - 1; t >= 0; --t) tail.begin[t] = min(tail.begin[t], tail.begin[t + 1]);
    // What the epilogue will want, on its way to L2.
    const int share_of_all = few_share(count), first_of_all = min(rank * share_of_all, count),
              some = min(count - first_of_all, share_of_all);
    for (int i = at; i < some * ((p.rotary_dim + 31) / 32); i += 32 * kFinish)
      prefetch_l2(p.table + tail.list[first_of_all + i % some].position * p.table_row + i / some * 32);
    if (at < columns.k_tiles) {
      const int layer = p.first_layer + columns.block(at, 0, p.heads).layer;
      prefetch_l2(static_cast<const unsigned char*>(p.norm.data) + layer * p.norm_layer * size_of_value(p.norm.dtype));
      prefetch_l2(static_cast<const float*>(p.eps.data) + layer * p.eps.stride);
    }
    if (context.raw) {  // the norm of the target's features
      for (int r = finisher; r < count; r += kFinish) {
        const float factor = row_factor(context, r, lane);
        const auto* from = reinterpret_cast<const uint4*>(context.raw + static_cast<std::int64_t>(r) * p.hidden + k_begin * kDepth);
        for (int piece = lane; piece < depth * 8; piece += 32)
          *reinterpret_cast<uint4*>(row_tiles + (piece / 8) * tile_bytes + r * 128 + (((piece % 8) ^ (r % 8)) << 4)) =
              normed_piece<Io>(context, from[piece], factor, k_begin * kDepth + piece * 8);
      }
      ptx::fence_async();
    }
    sync();
    if (context.raw) named_barrier(2, 32 * kProducer);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

    constexpr int kEach = (kGroups * kFewRows / kFewBlocks + kFinish - 1) / kFinish;  // rows of a warp
    int row_tile = 0;
    Side side;
    for (int u = 0; u < tiles; ++u) {
      // A block finishes rows rank * share .. of a tile's part of the list.
      const int begin = tail.begin[row_tile], rows_here = tail.begin[row_tile + 1] - begin, share = few_share(rows_here);
      const int mine = min(max(rows_here - rank * share, 0), share), first = begin + rank * share;
      if (at == 0) ptx::barrier_expect(&tail.sums, static_cast<std::uint32_t>(mine * shape.runs.count) * kColumns * 4);
      if (row_tile == 0) side = side_of<kHeadDim>(p, columns, u / shape.row_tiles, lane);
      Turn turn[kEach];
      std::int64_t slot[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (finisher + kFinish * j < mine) {
          const Row row = tail.list[first + finisher + kFinish * j];
          slot[j] = row.slot, turn[j] = turn_of<kHeadDim>(p, side, row.position, lane);
        }
      if (u == 0) named_barrier(3, 32 * kProducer);  // those that multiply may look at the plan
      barrier_wait_cluster(&tail.sums, u & 1);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int r = finisher + kFinish * j;
        if (r >= mine) break;
        float4 sum = received[r * 32 + lane];
#pragma unroll 3
        for (int s = 1; s < shape.runs.count; ++s) {
          const float4 part = received[(s * share + r) * 32 + lane];
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        finish_row<Io, kHeadDim>(p, slot[j], lane, side, turn[j], {sum.x, sum.y, sum.z, sum.w});
      }
      __syncwarp();
      if (lane < kFewBlocks) arrive_in_block(address_in_block(&tail.free, lane));
      if (++row_tile == shape.row_tiles) row_tile = 0;
    }
  }
  ptx::cluster_sync();  // nobody leaves while others may still send to it
}

}  // namespace specstate::draft_kv::cuda
