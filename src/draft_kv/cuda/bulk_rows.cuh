#pragma once
// More than 128 rows: a matrix product bound by the tensor cores, whose epilogue costs them next to nothing.
//
// Blocks work in pairs (clusters of 2): both multiply by the same weights, which come to both at once, by multicast, and each has 128 rows of its own. So weights leave L2 once for two
// tiles: in long calls the power limits the clock, and what is moved costs power. A pair's blocks fill each other's rings, so whoever has used a stage says so to both.
//
// A persistent block makes tiles of 128 rows x 160 columns (work.hpp says which): a head of K, which its norm wants whole, and quarters of heads of V (deal.hpp); heads of 64:
// 128 columns in the order of heads. 160 columns cut the 2 x 40 heads of five layers into 64 places, so 256 rows are 128 tiles, one for each multiprocessor, and products of 64 x 160
// ask for less of the shared memory than 64 x 128. Its warps have one of three jobs:
//   groups 1 and 2     multiply 64 rows each, add up the runs, and leave the rounded tile in shared memory;
//   warp 0             fills the ring of stages (64 features) by tensor map;
//   the other warps    finish the tile before (norm, rotary, pool) out of shared memory while the next is multiplied.
// A block's last tile has no next one: there each warp that multiplied finishes its own 16 rows. Whoever finishes reads the rounded sums with eight lanes a row (finish_eight.cuh).
// Beside the products what counts is neither instructions nor latency: the tensor cores and the copy engine keep the shared memory so busy that all other accesses (loads, stores and
// exchanges between lanes, of shared and of global memory alike) get one wavefront of 128 bytes in some 14 cycles. So finishing moves 16 bytes a lane, keeps in registers what the rows
// share, and asks for nothing twice.
//
// Which rows are multiplied: all, as they lie, where there are no commit lengths: then the first stages are asked for before all else, by the warp that sets the barriers up. Which of
// several that name one slot stands, and so is written, the warps that finish find out beside the products, for the rows of their tile only (mark_tile), once for each tile of rows.
// Else launches before have lined up those that stand, or made them of target features, and left their list.
//
// Registers: a tile's first run is summed where its sums will be, so nothing is set to zero and the second begins while the first one ends.
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/finish_eight.cuh"
#include "draft_kv/cuda/finish_rows.cuh"
#include "draft_kv/cuda/many_rows.cuh"
#include "draft_kv/cuda/work.hpp"

namespace specstate::draft_kv::cuda {

#ifdef SPECSTATE_BULK_TRACE
static __device__ unsigned long long bulk_trace_of[132][16][8];
#define SPECSTATE_BULK_MARK(tile, what, who)                                                                  \
  do {                                                                                                        \
    if (threadIdx.x == (who) && (tile) < 16) {                                                                \
      bulk_trace_of[blockIdx.x][tile][what] = clock64();                                                      \
      if ((what) == 6) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(bulk_trace_of[blockIdx.x][tile][7])); \
    }                                                                                                         \
  } while (0)
#else
#define SPECSTATE_BULK_MARK(tile, what, who) (void)0
#endif

template <int kHeadDim>
struct Bulk {
  static constexpr int kThreads = 384, kRows = kTileRows;
  static constexpr int kQuarters = kHeadDim == 128 ? 5 : 4, kWide = 32 * kQuarters;  // columns of a tile
  static constexpr int kSums = kWide / 2;                                            // registers of a thread
  static constexpr int kStride = 2 * kWide + 16;                                     // bytes of a row of rounded sums (finish_rows.cuh)
  static constexpr std::size_t kQuarterBytes = 32 * kDepth * 2;
  static constexpr std::size_t kRowBytes = std::size_t{kRows} * kDepth * 2, kUnitBytes = 16 * kStride,
                               kOutBytes = 8 * kUnitBytes;  // a unit: 16 rows, those of a warp
  static constexpr std::size_t kStage = kRowBytes + kQuarters * kQuarterBytes;
  static constexpr int kStages = 5;
  static constexpr int kBuckets = 2 * kRows;  // of mark_tile()

  /// What a launch's columns are cut into; heads of 64: two a place.
  static constexpr Places places(int layers, int heads) { return Places::of_width(layers, heads, kHeadDim == 128 ? kQuarters : 8); }

  struct Tail {
    std::int64_t slot[kRows];  // of the tile that is finished: where its rows go, and by which angles they are turned
    int position[kRows], place;
    Work work;
    std::uint64_t full[kStages], empty[kStages], left[2], taken, placed, planned;
    union {
      int bucket[kBuckets];  // of the tile's slots, while it is found out which row stands; then
      struct {
        float norm[128], eps[2];
      } k;  // what the norm of its heads wants
    };
    std::uint32_t filter[kFilterWords], stand[kListRows / 32];  // as they lie: mark_tile's, and which rows stand
  };
  static constexpr std::size_t kShared = kStages * kStage + kOutBytes + sizeof(Tail);
  static_assert(kShared <= 232448);
};

/// Places in the workspace for what blocks hand on, and a flag for each warp that does. A flag is up when it holds the number of the launch, 64 random bits; who takes the sums
/// lowers it. So nobody has to clear flags first, whatever the caller's workspace holds, and a captured launch may be repeated.
inline constexpr std::size_t kPartBytes = 256 * Bulk<128>::kSums * sizeof(float);
inline constexpr int kMostBlocks = 144, kPartBlocks = kMostBlocks * 3 / 4,
                     kPartFlags = 8;  // no GPU of this architecture has more multiprocessors

struct BulkShape {
  Places deal;
  Runs runs;
  const Row* list;  // row i of ctx is row i of this list (slot -1: not written); or null: row i of the launch
  const int* list_count;
  float* parts;                      // [kPartBlocks][kPartBytes], or null: whole tiles only
  unsigned long long* part_flags;    // [kPartBlocks][kPartFlags]
  unsigned long long launch_number;  // not 0
};

__device__ __forceinline__ void raise_part(unsigned long long* flag, unsigned long long number) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(number) : "memory");
}
__device__ __forceinline__ void wait_for_part(const unsigned long long* flag, unsigned long long number) {
  unsigned long long is;
  do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(is) : "l"(flag) : "memory");
  while (is != number);
}

/// The sums of a block's tile, from and to a place in the workspace, by the 256 threads that multiply.
__device__ __forceinline__ float4* part_of(float* parts, int block, int thread) {
  return reinterpret_cast<float4*>(parts) + block * (kPartBytes / 16) + thread;
}
template <int kN>
__device__ __forceinline__ void store_part(float4* to, const float (&sum)[kN]) {
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) __stcg(to + j * 256, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
}
/// sum = part + sum
template <int kN>
__device__ __forceinline__ void add_part(const float4* from, float (&sum)[kN]) {
#pragma unroll
  for (int j = 0; j < kN / 4; ++j) {
    const float4 x = __ldcg(from + j * 256);
    sum[4 * j] = x.x + sum[4 * j], sum[4 * j + 1] = x.y + sum[4 * j + 1];
    sum[4 * j + 2] = x.z + sum[4 * j + 2], sum[4 * j + 3] = x.w + sum[4 * j + 3];
  }
}

__device__ __forceinline__ void prefetch_tile(const CUtensorMap& map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(c0), "r"(c1) : "memory");
}

template <class Io, int kHeadDim>
__global__ void __launch_bounds__(Bulk<kHeadDim>::kThreads, 1)
    bulk_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quarters,
              const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p, const __grid_constant__ BulkShape shape) {
  using B = Bulk<kHeadDim>;
  constexpr int kRows = B::kRows, kStages = B::kStages, kSums = B::kSums, kStride = B::kStride, kQuarters = B::kQuarters;
  extern __shared__ __align__(1024) unsigned char bulk_memory[];
  unsigned char* const memory = bulk_memory;  // swizzled tiles lie at multiples of 1024 bytes
  unsigned char* const out = memory + kStages * B::kStage;
  auto& tail = *reinterpret_cast<typename B::Tail*>(out + B::kOutBytes);
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  const int rank = static_cast<int>(ptx::cluster_rank()), block = static_cast<int>(blockIdx.x), cluster = block / 2,
            weight_row = p.first_layer * 2 * p.heads * kHeadDim;
  const Places& deal = shape.deal;
  SPECSTATE_BULK_MARK(15, 0, 128);
  {  // Arguments come from memory the first time, 64 bytes at a time and one after another: here every warp asks for others.
    constexpr int kHead = (offsetof(Problem, target) + 63) / 64, kShape = (sizeof(BulkShape) + 63) / 64;
    static_assert(kHead + kShape <= B::kThreads / 32);
    const int line = thread / 32;
    if (line < kHead)
      touch(reinterpret_cast<const int*>(&p)[16 * line]);
    else if (line < kHead + kShape)
      touch(reinterpret_cast<const int*>(&shape)[min(16 * (line - kHead), static_cast<int>(sizeof(BulkShape) / 4) - 1)]);
  }
  const bool lies = !shape.list;
  const auto work_of = [&](int count) {
    return Work::of((count + 2 * kRows - 1) / (2 * kRows), deal.slots, shape.runs.count, cluster, static_cast<int>(gridDim.x / 2),
                    shape.parts != nullptr);
  };
  const auto piece_of = [&](const Work& work, int i) {  // of the two row tiles this block's
    Piece piece = work.piece(i);
    piece.row_tile = 2 * piece.row_tile + rank;
    return piece;
  };
  // The row of weights where quarter i of a place begins; -1: it has no such quarter.
  const auto quarter_row = [&](int place, int i) {
    if constexpr (kHeadDim == 64) return weight_row + place * 128 + 32 * i;
    const int layer_width = 4 * p.heads;
    if (place < deal.k_heads) {
      if (i < 4) return weight_row + 32 * (4 * place + i + deal.by_heads(place) * layer_width);
      i -= 4;
    }
    const int n = deal.v_begin(place) + i;
    return n < deal.v_begin(place + 1) ? weight_row + 32 * (n + (deal.by_quarters(n) + 1) * layer_width) : -1;
  };
  constexpr int kFinishers = 3;  // warps
  // Few boxes a stage, all asked for by one thread: each takes it 130 cycles. What they are is found out by a lane each.
  struct Columns {
    int wide, quarter[kQuarters];  // rows of weights, -1: none; wide: those of the first four quarters, where they lie side by side
    std::uint32_t bytes;
  };
  const auto columns_of = [&](int place) {
    Columns c{};
    const int own = lane < kQuarters ? quarter_row(place, lane) : -1;
#pragma unroll
    for (int j = 0; j < kQuarters; ++j) {
      c.quarter[j] = __shfl_sync(~0u, own, j);
      c.bytes += c.quarter[j] >= 0 ? static_cast<std::uint32_t>(B::kQuarterBytes) : 0;
    }
    c.wide = c.quarter[3] == c.quarter[0] + 96 ? c.quarter[0] : -1;
    return c;
  };
  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  // Weights go to both blocks: of the five quarters block 0 asks for four where they lie side by side, else for three.
  const auto load_weights = [&](const Columns& c, unsigned char* to, int feature, std::uint64_t* full) {
    if (c.wide >= 0 && rank == 0) tile_load_to_all(to, weights, feature, c.wide, full, 3, once);
#pragma unroll
    for (int j = 0; j < kQuarters; ++j)
      if (c.quarter[j] >= 0 && (c.wide < 0 ? (j >= 3) == (rank == 1) : j >= 4 && rank == 1))
        tile_load_to_all(to + j * B::kQuarterBytes, quarters, feature, c.quarter[j], full, 3, once);
  };
  const auto load_stage = [&](const Columns& c, int stage, int k, int row) {
    unsigned char* const to = memory + stage * B::kStage;
    ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(B::kRowBytes) + c.bytes);
    load_weights(c, to + B::kRowBytes, k * kDepth, &tail.full[stage]);
    tile_load(to, rows, k * kDepth, row, &tail.full[stage], keep);
  };
  const int row_begin = lies ? static_cast<int>(p.rows.first) : 0;
  bool waited = false;
  int count = p.rows.tokens, ahead = 0;  // stages that are asked for before all else
  if (thread < 32) {
    if (lane == 0) {
      prefetch_map(weights), prefetch_map(quarters), prefetch_map(rows);
      for (int i = 0; i < kStages; ++i) ptx::barrier_init(&tail.full[i], 1), ptx::barrier_init(&tail.empty[i], 16);
      ptx::barrier_init(&tail.left[0], 128), ptx::barrier_init(&tail.left[1], 128);
      ptx::barrier_init(&tail.taken, 32 * kFinishers), ptx::barrier_init(&tail.placed, 32 * kFinishers);
      ptx::barrier_init(&tail.planned, 32 * kFinishers);
      ptx::fence_barriers();
      if (ptx::shared(memory) % 1024) __trap();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    SPECSTATE_BULK_MARK(15, 4, 0);
    if (lies) {
      const Work work = work_of(count);
      if (lane == 0) tail.work = work;
      if (work.pieces > 0) {
        const Piece piece = piece_of(work, 0);
        const Columns columns = columns_of(piece.place);
        const int begin = shape.runs.begin(piece.begin), row = row_begin + first_row_of(piece.row_tile, count);
        ahead = min(kStages, shape.runs.begin(piece.end) - begin);
        ptx::wait_for_previous();
        ptx::cluster_wait();  // the other block's barriers are there
        waited = true;
        if (lane == 0)
          for (int k = 0; k < ahead; ++k) load_stage(columns, k, begin + k, row);
        SPECSTATE_BULK_MARK(15, 5, 0);
      }
    }
    __syncwarp();
  } else {
    ptx::cluster_arrive_relaxed();
    if (thread < 64 && !lies) {
      // The first weights on their way to L2 while the kernel before ends: this block's, if all rows are written, else another's.
      if (const Work guess = work_of(p.rows.tokens); guess.pieces > 0 && lane < kQuarters) {
        const Piece piece = guess.piece(0);
        if (const int row = quarter_row(piece.place, lane); row >= 0)
          for (int k = 0; k < kStages; ++k) prefetch_tile(quarters, (shape.runs.begin(piece.begin) + k) * kDepth, row);
      }
      __syncwarp();
    }
  }
  ptx::wait_for_previous();
  ptx::let_next_start();
  SPECSTATE_BULK_MARK(15, 1, 128);
  if (!lies) count = *shape.list_count;
  SPECSTATE_BULK_MARK(15, 2, 128);
  if (!lies && thread == 32) tail.work = work_of(count);
  __syncwarp();
  if (!waited) ptx::cluster_wait();
  __syncthreads();
  SPECSTATE_BULK_MARK(15, 3, 128);
  const Work& work = tail.work;

  // The heads of a place that need a norm (heads of 64: two, else one or none), and the number of the first.
  const auto head_at = [&](int place, int n) {
    if constexpr (kHeadDim == 64) return head_of(2 * place + n, p.heads);
    const int layer = deal.by_heads(place);
    return Head{layer, place - layer * p.heads, false};
  };
  const auto has_heads = [&](int place) { return kHeadDim == 64 || place < deal.k_heads; };
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  const bool usual_k = kHeadDim == 128 && has_usual_k<Io>(p), usual_v = p.v_wide && p.v_dtype == kType;
  // Of rows begin .. end - 1 of the tile in `out` those of warp `who` of `all`: its heads, four rows at a time, and its quarters of V, eight at a time. ready(row): until they are there.
  const auto finish = [&](int place, int begin, int end, int who, int all, int lane_here, auto ready) {
    if (has_heads(place)) {
      const int n = lane_here % 8 / (kHeadDim / 16);
      const Head head = head_at(place, n);
      if (usual_k) {
        finish_usual_k<Io, kStride>(p, head, out, tail.slot, tail.position, begin + 4 * who, end, 4 * all, lane_here, ready);
      } else {
#pragma unroll 1
        for (int row = begin + 4 * who; row < end; row += 4 * all) {
          ready(row);
          finish_eight<Io, kHeadDim, kStride, 1>(p, head, out + row * kStride, tail.slot + row, tail.position + row,
                                                 tail.k.norm + kHeadDim * n, tail.k.eps[n], lane_here);
        }
      }
    }
    if constexpr (kHeadDim == 128) {
      const unsigned char* const from = out + (has_heads(place) ? 256 : 0);
      const int first = deal.v_begin(place), count = deal.v_begin(place + 1) - first;
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int v = first + n, layer = deal.by_quarters(v);
        const Head head{layer, v / 4 - layer * p.heads, true};
        if (usual_v) {
          finish_usual_v<kStride>(p.target[1][layer].pool, head.index, v % 4, from + 64 * n, tail.slot, begin + 8 * who, end, 8 * all,
                                  lane_here, ready);
        } else {
          const float scale = scale_of(p, head);
#pragma unroll 1
          for (int i = begin + 8 * who; i < end; i += 8 * all) {
            ready(i);
            const int row = i + lane_here / 4;
            const LayerPool& pool = p.target[1][layer].pool;
            const std::int64_t slot = tail.slot[row];
            if (slot < 0) continue;
            const uint4 x = *reinterpret_cast<const uint4*>(from + row * kStride + 64 * n + 16 * (lane_here % 4));
            const std::int64_t offset = pool_offset(pool, slot, head.index);
#pragma unroll 1
            for (int part = 0; part < 2; ++part) {
              float y[4];
              from_io_pair<Io>(part ? x.z : x.x, y[0], y[1]), from_io_pair<Io>(part ? x.w : x.y, y[2], y[3]);
              store_channels(pool, p.v_dtype, p.v_wide, offset, 32 * (v % 4) + 8 * (lane_here % 4) + 4 * part, scale, y);
            }
          }
        }
      }
    }
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    if (warp < 4 - kFinishers) {
      int stage = ahead < kStages ? ahead : 0;
      std::uint32_t parity = ahead < kStages;
      for (int i = 0; i < work.pieces; ++i, ahead = 0) {
        const Piece piece = piece_of(work, i);
        const Columns columns = columns_of(piece.place);
        const int end = shape.runs.begin(piece.end), row = row_begin + first_row_of(piece.row_tile, count);
        for (int k = shape.runs.begin(piece.begin) + ahead; lane == 0 && k < end; ++k) {
          ptx::barrier_wait(&tail.empty[stage], parity);
          load_stage(columns, stage, k, row);
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
        stage = __shfl_sync(~0u, stage, 0), parity = __shfl_sync(~0u, parity, 0);
      }
      for (int k = 0; k < kStages && work.pieces > 0; ++k) {  // nobody leaves before the other block has arrived at all of its barriers
        ptx::barrier_wait(&tail.empty[stage], parity);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    } else {
      std::uint32_t parity = 0, met = 0;
      int marked_tile = -1, angles_tile = -1, angles_layer = -1;  // of which tile of rows the marks are there, and the angles in L2
      const int thread_here = thread - 32 * (4 - kFinishers), threads_here = 32 * kFinishers, first = warp - (4 - kFinishers);
      static_assert(kListRows / kRows <= 64);
      std::uint64_t known = 0;  // tiles of rows of which tail.stand tells
      const auto meet = [&] {
        ptx::barrier_arrive(&tail.planned);
        ptx::barrier_wait(&tail.planned, met);
        met ^= 1;
      };
#pragma unroll 1
      for (int i = 0; i < work.pieces; ++i) {
        const Piece piece = piece_of(work, i);
        if (piece.end < shape.runs.count) continue;  // another block finishes it
        const int tile_row = first_row_of(piece.row_tile, count);
        const bool has_k = has_heads(piece.place), stages_norm = has_k && !usual_k;
        // As they lie: which rows of a tile stand is found out once, for the next tile of rows, too, so that it is known before its products end.
        const int after = lies && i + 1 < work.pieces ? piece_of(work, i + 1).row_tile : piece.row_tile;
        const bool looks_ahead = after != piece.row_tile && !(known >> after & 1);
        if (looks_ahead || marked_tile != piece.row_tile || stages_norm) {
          meet();  // nobody finishes the tile before any more
          // Where the tile's rows go.
          if (!lies) {
#pragma unroll 1
            for (int r = thread_here; marked_tile != piece.row_tile && r < kRows; r += threads_here) {
              const int at = tile_row + r;
              const Row row = at >= piece.row_tile * kRows && at < count ? shape.list[at] : Row{-1, 0, 0};
              tail.slot[r] = row.slot, tail.position[r] = row.position;
            }
            marked_tile = piece.row_tile;
          }
          const auto read = [&](int i, bool raise) { return read_row(p.rows, i, raise); };
#pragma unroll 1
          for (int pass = looks_ahead ? 0 : 1; lies && pass < 2; ++pass) {
            const int tile = pass ? piece.row_tile : after, first_row = first_row_of(tile, count);
            if (marked_tile == tile) continue;
            marked_tile = tile;
            if (known >> tile & 1) {
#pragma unroll 1
              for (int r = thread_here; r < kRows; r += threads_here) {
                const bool stands = tail.stand[4 * tile + r / 32] >> r % 32 & 1;
                const Row row = stands ? read(first_row + r, false) : Row{-1, 0, 0};
                tail.slot[r] = row.slot, tail.position[r] = row.position;
              }
              continue;
            }
            mark_tile<kRows, B::kBuckets, kRows / 64>(
                [&](int i) {
                  const std::int64_t at = p.rows.first + i;
                  return p.rows.slots.data ? index_at(p.rows.slots, at, p.rows.width) : at;
                },
                read, count, first_row, tile * kRows, tail.slot, tail.position, tail.bucket, thread_here, threads_here, meet, tail.filter);
            known |= 1ull << tile;
#pragma unroll 1
            for (int r = thread_here; r < kRows; r += threads_here)
              if (const unsigned bits = __ballot_sync(~0u, tail.slot[r] >= 0); lane == 0) tail.stand[4 * tile + r / 32] = bits;
            meet();
          }
          // What its heads want: weights of the norm here (the usual case reads them itself), angles on their way to L2, and, before a block's first, pages of the pool.
#pragma unroll 1
          for (int c = thread_here; stages_norm && c < 128; c += threads_here) {
            const Head head = head_at(piece.place, c / kHeadDim);
            const int layer = p.first_layer + head.layer;
            if (head.is_v) continue;
            tail.k.norm[c] = value_at(p.norm.data, p.norm.dtype, layer * p.norm_layer + c % kHeadDim * p.norm.stride);
            if (c % kHeadDim == 0) tail.k.eps[c / kHeadDim] = static_cast<const float*>(p.eps.data)[layer * p.eps.stride];
          }
          meet();
        }
        const int layer = has_k ? head_at(piece.place, 0).layer : deal.by_quarters(deal.v_begin(piece.place));
        const float* const angles = p.table + (p.first_layer + layer) * p.table_layer;
        touch(p.target[0][layer].pool), touch(p.target[1][layer].pool);  // arguments that nobody has read yet, where rows of this tile go
        const bool pages = i == 0 || i + 1 == work.pieces,
                   fresh = has_k && (angles_tile != piece.row_tile || (p.table_layer && angles_layer != layer));
        if (has_k) angles_tile = piece.row_tile, angles_layer = layer;
#pragma unroll 1
        for (int r = thread_here; (pages || fresh) && r < kRows; r += threads_here) {
          const std::int64_t slot = tail.slot[r];
          if (slot < 0) continue;
          if (has_k && fresh)
            for (int column = 0; column < p.rotary_dim; column += 32) prefetch_l2(angles + tail.position[r] * p.table_row + column);
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            if (!pages || (v == 0 && !has_k)) continue;
            const LayerPool& pool = p.target[v][layer].pool;
            const DType dtype = v ? p.v_dtype : p.k_dtype;
            const int bytes = dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
            prefetch_l2(static_cast<const unsigned char*>(pool.data) + pool_offset(pool, slot, 0) * bytes);
          }
        }
        __syncwarp();
        if (i + 1 == work.pieces) {
          if (thread_here == 0) tail.place = piece.place;
          ptx::barrier_arrive(&tail.placed);
          break;
        }
        SPECSTATE_BULK_MARK(i, 4, 96);
        int lane_here,
            seen =
                0;  // the lane again, or what follows from it is kept, in memory, from tile to tile; how many halves of the tile are there
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
        finish(piece.place, 0, kRows, first, kFinishers, lane_here, [&](int row) {
          for (; seen <= row / (kRows / 2); ++seen) ptx::barrier_wait(&tail.left[seen], parity);
        });
        SPECSTATE_BULK_MARK(i, 5, 96);
        __syncwarp();
        ptx::barrier_arrive(&tail.taken);
        parity ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    const int side = group - 1;
    StageProducts<Io, B::kWide, 2> products{ptx::shared(memory),
                                            B::kStage,
                                            side * static_cast<std::uint32_t>(kRowTileBytes),
                                            B::kRowBytes,
                                            ptx::shared(tail.full),
                                            ptx::shared(tail.empty),
                                            kStages,
                                            false};
    std::uint32_t taken = 1;
    bool finishes = false, left_one = false;
#pragma unroll 1
    for (int i = 0; i < work.pieces; ++i) {
      SPECSTATE_BULK_MARK(i, 0, 128);
      SPECSTATE_BULK_MARK(i, 1, 128);
      float d[kSums], sum[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) asm volatile("" : "=f"(d[j]), "=f"(sum[j]));  // or they are taken for alive from the tile before
      const auto [begin, run_end] = work.range(i);
      const bool more = begin + 1 < run_end;
      // The first run is summed where the sums are; the second begins while it ends.
      products.multiply(sum, false), products.next(), products.others(sum, shape.runs.length(begin));
      if (more) {
        products.multiply(d, false), product_wait_all_but_one(), products.release(), products.next();
        products.others(d, shape.runs.length(begin + 1));
      }
      product_wait_for(d), product_wait_for(sum), products.release();
      if (begin > 0) {  // what another block hands on
        const int part = 2 * work.taken() + rank;
        unsigned long long* const flag = shape.part_flags + part * kPartFlags + 4 * side + warp;
        wait_for_part(flag, shape.launch_number);
        add_part(part_of(shape.parts, part, thread - 128), sum);
        __syncwarp();
        if (lane == 0) *flag = 0;
      }
      if (more) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) sum[j] += d[j];
      }
      products.add_runs(sum, d, shape.runs, begin + 2, run_end);
      __syncwarp();
      SPECSTATE_BULK_MARK(i, 2, 128);
      if (run_end < shape.runs.count) {  // for the block after this one
        const int part = 2 * work.given() + rank;
        store_part(part_of(shape.parts, part, thread - 128), sum);
        __syncwarp();
        if (lane == 0) raise_part(shape.part_flags + part * kPartFlags + 4 * side + warp, shape.launch_number);
        continue;
      }
      if (left_one) ptx::barrier_wait(&tail.taken, taken);
      left_one = true, taken ^= 1;
      const int unit = 4 * side + warp;
      int lane_here;  // asked for again, so that nothing that follows from it is kept in registers while the products run
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      if (p.bias.data) {
        const Piece piece = piece_of(work, i);
#pragma unroll
        for (int j = 0; j < kQuarters; ++j) {  // of a quarter each lane has one column
          const int row = quarter_row(piece.place, j) - weight_row, layer_width = 2 * p.heads * kHeadDim, layer = row / layer_width;
          float own = 0;
          if (row >= 0)
            own = value_at(p.bias.data, p.bias.dtype,
                           (p.first_layer + layer) * p.bias_layer + (row - layer * layer_width + lane_here) * p.bias.stride);
#pragma unroll
          for (int word = 0; word < 8; ++word) {
            const float b = __shfl_sync(~0u, own, word / 2 * 8 + lane_here % 4 * 2 + word % 2);
            const int at = 16 * j + word / 2 * 4 + word % 2;
            sum[at] += b, sum[at + 2] += b;
          }
        }
      }
      leave_words<Io, kStride, B::kWide / 8>(out + unit * B::kUnitBytes, lane_here, sum);
      __syncwarp();
      SPECSTATE_BULK_MARK(i, 3, 128);
      finishes = i + 1 == work.pieces;
      if (!finishes) ptx::barrier_arrive(&tail.left[side]);
      SPECSTATE_BULK_MARK(i, 6, 128);
    }
    if (finishes) {  // behind the loop, or what only this wants would be kept in registers while the products run
      ptx::barrier_wait(&tail.placed, 0);
      SPECSTATE_BULK_MARK(13, 0, 128);
      int lane_here;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      const int row = 16 * (4 * side + warp);
      finish(tail.place, row, row + 16, 0, 1, lane_here, [](int) {});
      SPECSTATE_BULK_MARK(13, 3, 128);
      SPECSTATE_BULK_MARK(work.pieces - 1, 6, 128);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
