#pragma once
// More than 128 rows: a matrix product bound by the tensor cores, whose epilogue costs them next to nothing.
//
// A persistent block makes tiles of 128 rows x 160 columns (work.hpp says which): a head of K, which its norm wants whole, and quarters of heads of V (deal.hpp); heads of 64:
// 128 columns in the order of heads. 160 columns cut the 2 x 40 heads of five layers into 64 places, so 256 rows are 128 tiles, one for each multiprocessor, and products of 64 x 160
// ask for less of the shared memory than 64 x 128. Its warps have one of three jobs:
//   groups 1 and 2     multiply 64 rows each, add up the runs, and leave the rounded tile in shared memory;
//   warp 0 (or 0, 1)   fill the ring of stages (64 features): weights and rows by tensor map; rows that do not lie one behind the other by 16-byte copies that arrive at
//                      the stage's barrier by themselves, so nobody waits for them but who multiplies;
//   the other warps    finish the tile before (norm, rotary, pool) out of shared memory while the next is multiplied.
// A block's last tile has no next one: there each warp that multiplied finishes its own rows. The finishing code is a loop over pairs of rows, 16 lanes a row.
//
// Which rows are multiplied: all, as they lie, where there are no commit lengths: then one warp finds out, beside the products, which of them are written. Else the block makes the
// list of up to kMarkedRows rows itself, before; longer calls bring a list.
#include "draft_kv/cuda/deal.hpp"
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

inline constexpr int kMarkedRows = 1024;  // of which a block can find out by itself which are written

template <int kHeadDim>
struct Bulk {
  static constexpr int kThreads = 384, kRows = kTileRows;
  static constexpr int kQuarters = kHeadDim == 128 ? 5 : 4, kWide = 32 * kQuarters;  // columns of a tile
  static constexpr int kSums = kWide / 2;                                            // registers of a thread
  static constexpr int kStride = 2 * kWide + 16;                                     // bytes of a row of rounded sums (finish_rows.cuh)
  static constexpr std::size_t kQuarterBytes = 32 * kDepth * 2;
  static constexpr std::size_t kRowBytes = std::size_t{kRows} * kDepth * 2, kUnitBytes = 16 * kStride, kOutBytes = 8 * kUnitBytes;
  static constexpr std::size_t kStage = kRowBytes + kQuarters * kQuarterBytes;
  static constexpr int kStages = 5;
  static constexpr int kLoaders = 64, kUnits = 8;  // threads; parts of 16 rows, those of a warp

  /// What a launch's columns are cut into; heads of 64: two a place.
  static constexpr Places places(int layers, int heads) { return Places::of_width(layers, heads, kHeadDim == 128 ? kQuarters : 8); }

  struct Tail {
    std::int64_t slot[kRows];  // of the tile that is finished: where its rows go, and by which angles they are turned
    int position[kRows];
    std::uint64_t full[kStages], empty[kStages], left[2], taken, placed, planned;
    unsigned kept[kMarkedRows / 32];  // rows of the launch that are written, a bit each
    std::uint16_t row[kMarkedRows];   // of ctx: the list, where the block made it itself
  };
  static constexpr std::size_t kShared = 1024 + kStages * kStage + kOutBytes + sizeof(Tail);
  static_assert(kShared <= 232448);
  static_assert(kMarkedRows * 8 + 2 * kMarkedRows * 4 <= kOutBytes && kMarkedRows * 8 + 2 * kMarkedRows * 4 <= kStages * kStage);
};

/// Places in the workspace for what blocks hand on, and a flag for each warp that does. A flag is up when it holds the number of the launch, 64 random bits; who takes the sums
/// lowers it. So nobody has to clear flags first, whatever the caller's workspace holds, and a captured launch may be repeated.
inline constexpr std::size_t kPartBytes = 256 * Bulk<128>::kSums * sizeof(float);
inline constexpr int kMostBlocks = 144, kPartBlocks = kMostBlocks * 3 / 4,
                     kPartFlags = 8;  // no GPU of this architecture has more multiprocessors

struct BulkShape {
  Places deal;
  Runs runs;
  const Row* list;  // what is written, made by plan_kernel; or null: up to kMarkedRows rows, found out here
  const int* list_count;
  float* parts;                      // [kPartBlocks][kPartBytes], or null: whole tiles only
  unsigned long long* part_flags;    // [kPartBlocks][kPartFlags]
  unsigned long long launch_number;  // not 0
  bool as_they_lie = false;          // row i of the launch is row i of its tiles
  bool listed = false;               // row i of ctx is row i of the list
  bool gather = false;               // for measurements: even where rows lie one behind the other
};

__device__ __forceinline__ void touch(int argument) { asm volatile("" ::"r"(argument)); }
__device__ __forceinline__ void touch(const LayerPool& pool) {
  asm volatile("" ::"l"(pool.data), "l"(pool.slot_stride), "l"(pool.head_stride), "l"(pool.channel_stride));
}
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
  constexpr int kRows = B::kRows, kStages = B::kStages, kUnits = B::kUnits, kSums = B::kSums, kStride = B::kStride,
                kQuarters = B::kQuarters;
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  unsigned char* const out = memory + kStages * B::kStage;
  auto& tail = *reinterpret_cast<typename B::Tail*>(out + B::kOutBytes);
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  const int block = static_cast<int>(blockIdx.x), weight_row = p.first_layer * 2 * p.heads * kHeadDim;
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
  const bool lies = shape.as_they_lie, marked = !shape.list;
  const auto work_of = [&](int count) {
    return Work::of((count + kRows - 1) / kRows, deal.slots, shape.runs.count, block, static_cast<int>(gridDim.x), shape.parts != nullptr);
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
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) ptx::barrier_init(&tail.empty[i], 8);
    ptx::barrier_init(&tail.left[0], 128), ptx::barrier_init(&tail.left[1], 128), ptx::barrier_init(&tail.planned, 32);
    ptx::fence_barriers();
  } else if (thread >= 32 && thread < 64) {
    // The first weights on their way to L2 while the list is made: this block's, if all rows are written, else another's.
    if (const Work guess = work_of(p.rows.tokens); guess.pieces > 0 && lane < kQuarters) {
      const Piece piece = guess.piece(0);
      if (const int row = quarter_row(piece.place, lane); row >= 0)
        for (int k = 0; k < kStages; ++k) prefetch_tile(quarters, (shape.runs.begin(piece.begin) + k) * kDepth, row);
    }
  } else if (thread == 64) {
    prefetch_map(weights), prefetch_map(quarters), prefetch_map(rows);
  }
  ptx::wait_for_previous();
  ptx::let_next_start();
  SPECSTATE_BULK_MARK(15, 1, 128);
  int count = p.rows.tokens;
  if (!lies) {
    if (marked) {
      auto* const slots = reinterpret_cast<std::int64_t*>(memory);  // in the ring's memory
      mark_rows<B::kThreads>(p.rows, slots, reinterpret_cast<int*>(slots + kMarkedRows), tail.kept, block == 0, thread,
                             [] { __syncthreads(); });
      int before = 32 * lane < count ? __popc(tail.kept[lane]) : 0;
      const int own = before;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
      }
      const int all = __shfl_sync(~0u, before, 31);
      for (int word = thread / 32; 32 * word < count; word += B::kThreads / 32) {
        const int at = __shfl_sync(~0u, before - own, word);
        const unsigned bits = tail.kept[word];
        if (bits >> lane & 1) tail.row[at + __popc(bits & ((1u << lane) - 1))] = static_cast<std::uint16_t>(32 * word + lane);
      }
      count = all;
      ptx::fence_async();
    } else {
      count = *shape.list_count;
    }
  }
  SPECSTATE_BULK_MARK(15, 2, 128);
  const bool dense = (lies || shape.listed || count == p.rows.tokens) && !shape.gather;  // rows lie one behind the other
  const int finishers = dense ? 3 : 2;
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) ptx::barrier_init(&tail.full[i], dense ? 1 : 1 + B::kLoaders);
    ptx::barrier_init(&tail.taken, 32 * finishers), ptx::barrier_init(&tail.placed, 32 * finishers);
    ptx::fence_barriers();
  }
  __syncthreads();
  SPECSTATE_BULK_MARK(15, 3, 128);
  const Work work = work_of(count);
  const int pieces = work.pieces, runs = shape.runs.count;

  // 16 rows of the tile in `out`.
  const auto finish = [&](int place, int unit, auto batch, auto ready) {
    const unsigned char* const from = out + unit * B::kUnitBytes;
    const int row = 16 * unit;
    const bool has_k = kHeadDim == 64 || place < deal.k_heads;
    if (has_k)
      finish_rows<Io, kHeadDim, decltype(batch)::value>(
          p, [&](int r, int byte) { return *reinterpret_cast<const uint2*>(from + r * kStride + byte); },
          kHeadDim == 64 ? 2 * place : place + deal.by_heads(place) * p.heads, tail.slot + row, tail.position + row, 0,
          2 * decltype(batch)::value, 16, ready);
    else
      ready();
    if constexpr (kHeadDim == 128)
      finish_quarters<Io>(
          p, [&](int r, int byte) { return *reinterpret_cast<const uint4*>(from + r * kStride + (has_k ? 256 : 0) + byte); },
          deal.v_begin(place), deal.v_count(place), tail.slot + row, 16, 0, 1);
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    if (warp < 4 - finishers) {
      const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
      int stage = 0;
      std::uint32_t parity = 1;
      // Few boxes, all asked for by one thread: each takes it 130 cycles.
      struct Columns {
        int wide, quarter[kQuarters];  // rows of weights, -1: none; wide: those of the first four quarters, where they lie side by side
        std::uint32_t bytes;
      };
      const auto columns_of = [&](int place) {
        Columns c{};
#pragma unroll
        for (int j = 0; j < kQuarters; ++j) c.quarter[j] = quarter_row(place, j), c.bytes += c.quarter[j] >= 0 ? B::kQuarterBytes : 0;
        c.wide = c.quarter[3] == c.quarter[0] + 96 ? c.quarter[0] : -1;
        return c;
      };
      const auto load_weights = [&](const Columns& c, unsigned char* to, int feature, std::uint64_t* full) {
        if (c.wide >= 0) tile_load(to, weights, feature, c.wide, full, once);
#pragma unroll
        for (int j = 0; j < kQuarters; ++j)
          if (c.quarter[j] >= 0 && (j >= 4 || c.wide < 0))
            tile_load(to + j * B::kQuarterBytes, quarters, feature, c.quarter[j], full, once);
      };
      if (dense) {
        const int row_begin = shape.listed ? 0 : static_cast<int>(p.rows.first);
        for (int i = 0; thread == 0 && i < pieces; ++i) {
          const Piece piece = work.piece(i);
          const Columns columns = columns_of(piece.place);
          const int end = shape.runs.begin(piece.end), row = row_begin + first_row_of(piece.row_tile, count);
          for (int k = shape.runs.begin(piece.begin); k < end; ++k) {
            unsigned char* const a = memory + stage * B::kStage;
            ptx::barrier_wait(&tail.empty[stage], parity);
            ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(B::kRowBytes) + columns.bytes);
            load_weights(columns, a + B::kRowBytes, k * kDepth, &tail.full[stage]);
            tile_load(a, rows, k * kDepth, row, &tail.full[stage], keep);
            if (++stage == kStages) stage = 0, parity ^= 1;
          }
        }
      } else {
        const int place = thread % 8, first_row = thread / 8;  // and every eighth row from there
        const auto* const ctx = static_cast<const std::uint16_t*>(p.ctx) + p.rows.first * p.ctx_stride + place * 8;
        for (int i = 0; i < pieces; ++i) {
          const Piece piece = work.piece(i);
          const int begin = shape.runs.begin(piece.begin), end = shape.runs.begin(piece.end);
          const Columns columns = columns_of(piece.place);
          std::uint32_t from[kRows / 8];  // in pieces; a row beyond the last: any, nobody looks at its result
#pragma unroll
          for (int j = 0; j < kRows / 8; ++j) {
            const int at = min(first_row_of(piece.row_tile, count) + first_row + 8 * j, count - 1);
            const int row = marked ? (lies ? at : tail.row[at]) : shape.list[at].row;
            from[j] = static_cast<std::uint32_t>(row * (p.ctx_stride / 8));
          }
          const auto* column = reinterpret_cast<const uint4*>(ctx) + begin * (kDepth / 8);
#pragma unroll 1
          for (int k = begin; k < end; ++k, column += kDepth / 8) {
            unsigned char* const a = memory + stage * B::kStage;
            ptx::barrier_wait(&tail.empty[stage], parity);
            if (thread == 0) {
              ptx::barrier_expect(&tail.full[stage], columns.bytes);
              load_weights(columns, a + B::kRowBytes, k * kDepth, &tail.full[stage]);
            }
            unsigned char* const to = a + first_row * 128 + ((place ^ first_row) << 4);
#pragma unroll
            for (int j = 0; j < kRows / 8; ++j) ptx::copy_async(to + j * 1024, column + from[j]);
            ptx::copy_async_arrive(&tail.full[stage]);
            if (++stage == kStages) stage = 0, parity ^= 1;
          }
        }
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
      }
    } else {
      if (lies) {
        if (warp == 1) {  // in the memory of the first tile that is left
          auto* const slots = reinterpret_cast<std::int64_t*>(out);
          mark_rows<32>(p.rows, slots, reinterpret_cast<int*>(slots + kMarkedRows), tail.kept, block == 0, lane, [] { __syncwarp(); });
        }
        if (warp == 1) ptx::barrier_arrive(&tail.planned);
        ptx::barrier_wait(&tail.planned, 0);
      }
      std::uint32_t parity = 0;
#pragma unroll 1
      for (int i = 0; i < pieces; ++i, parity ^= 1) {
        const Piece piece = work.piece(i);
        const int first = warp - (4 - finishers);
        {  // where the rows of this warp's units go; their angles on their way to L2
          __syncwarp();
          const bool has_k = kHeadDim == 64 || piece.place < deal.k_heads;
          const int layer = kHeadDim == 64 ? head_of(2 * piece.place, p.heads).layer
                                           : (has_k ? deal.by_heads(piece.place) : deal.by_quarters(deal.v_begin(piece.place)));
          const float* const angles = p.table + (p.first_layer + layer) * p.table_layer;
          if (has_k && first == 0) {
            const std::int64_t norm = (p.first_layer + layer) * p.norm_layer + 32 * lane * p.norm.stride;
            if (32 * lane < kHeadDim) prefetch_l2(static_cast<const unsigned char*>(p.norm.data) + norm * size_of_value(p.norm.dtype));
            if (lane == 31) prefetch_l2(static_cast<const float*>(p.eps.data) + (p.first_layer + layer) * p.eps.stride);
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {  // two units at a time
            const int unit = first + finishers * (2 * j + lane / 16);
            const int r = 16 * unit + lane % 16, at = first_row_of(piece.row_tile, count) + r;
            const bool here = unit < kUnits && at >= piece.row_tile * kRows && at < count;
            Row row{-1, 0, 0};
            if (here) {
              if (!marked)
                row = shape.list[at];
              else if (!lies)
                row = read_row(p.rows, tail.row[at], false);
              else if (tail.kept[at / 32] >> (at % 32) & 1)
                row = read_row(p.rows, at, false);
            }
            if (unit < kUnits) tail.slot[r] = row.slot, tail.position[r] = row.position;
            if (has_k && row.slot >= 0)
              for (int column = 0; column < p.rotary_dim; column += 32) prefetch_l2(angles + row.position * p.table_row + column);
          }
          for (int v = 0; v < 2; ++v)  // where they go
            if (lane == 0) touch(p.target[v][layer].pool);
          __syncwarp();
        }
        if (i + 1 == pieces) {
          ptx::barrier_arrive(&tail.placed);
          break;
        }
        SPECSTATE_BULK_MARK(i, 4, 96);
#pragma unroll 1
        for (int unit = first; unit < kUnits; unit += finishers)
          finish(piece.place, unit, std::integral_constant<int, 2>{}, [&] { ptx::barrier_wait(&tail.left[unit / (kUnits / 2)], parity); });
        SPECSTATE_BULK_MARK(i, 5, 96);
        __syncwarp();
        ptx::barrier_arrive(&tail.taken);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    const int side = group - 1;
    int stage = 0, before = 0;
    std::uint32_t parity = 0, taken = 1;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
      SPECSTATE_BULK_MARK(i, 0, 128);
      float d[kSums], sum[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) sum[j] = 0, d[j] = 0;  // d: or the compiler takes it for alive from the tile before
      int k, run, run_end;
      bool takes;  // up what another block hands on
      {
        const Piece piece = work.piece(i);
        run = piece.begin, run_end = piece.end, k = shape.runs.begin(run), takes = run > 0;
      }
#pragma unroll 1
      for (; run < run_end; ++run) {
        const int end = shape.runs.begin(run + 1);
        for (bool first = true; k < end; ++k, first = false) {
          const unsigned char* const m = memory + stage * B::kStage;
          ptx::barrier_wait(&tail.full[stage], parity);
          if (!dense)
            ptx::fence_async();  // the copies of others, which their barrier made visible to this thread, before what the tensor cores read
          if (first && run == 0) SPECSTATE_BULK_MARK(i, 1, 128);
          const std::uint64_t a = tile_descriptor(m + side * kRowTileBytes), b = tile_descriptor(m + B::kRowBytes);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) product_of<Io, B::kWide>(d, a + 2 * s, b + 2 * s, !first || s > 0);
          product_commit();
          if (!first) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
        product_wait_for(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        if (takes && run + 1 == run_end) {
          unsigned long long* const flag = shape.part_flags + (work.part() - 1) * kPartFlags + 4 * side + warp;
          wait_for_part(flag, shape.launch_number);
          add_part(part_of(shape.parts, work.part() - 1, thread - 128), sum);
          __syncwarp();
          if (lane == 0) *flag = 0;
        }
#pragma unroll
        for (int j = 0; j < kSums; ++j) sum[j] += d[j];
      }
      __syncwarp();
      SPECSTATE_BULK_MARK(i, 2, 128);
      if (run_end < runs) {  // for the block after this one; the last piece
        store_part(part_of(shape.parts, work.part(), thread - 128), sum);
        __syncwarp();
        if (lane == 0) raise_part(shape.part_flags + work.part() * kPartFlags + 4 * side + warp, shape.launch_number);
        break;
      }
      if (i > 0)
        ptx::barrier_wait(&tail.taken, taken);
      else if (lies)
        ptx::barrier_wait(&tail.planned, 0);
      taken ^= 1;
      const Piece piece = work.piece(i);
      const int unit = 4 * side + warp;
      int lane_here;  // asked for again, so that nothing that follows from it is kept in registers while the products run
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      if (p.bias.data) {
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
      if (i + 1 < pieces) {
        ptx::barrier_arrive(&tail.left[side]);
      } else {
        ptx::barrier_wait(&tail.placed, 0);
        finish(piece.place, unit, std::integral_constant<int, 4>{}, [] {});
        __syncwarp();
      }
      SPECSTATE_BULK_MARK(i, 6, 128);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
