#pragma once
// More than 128 rows: a matrix product bound by the tensor cores, whose epilogue costs them next to nothing.
//
// A persistent block makes tiles of 128 rows x 128 columns, as work.hpp says. Its warps have one of three jobs:
//   groups 1 and 2     multiply 64 rows each, add up the runs, and leave the rounded tile in shared memory;
//   warp 0 (or 0, 1)   fill the ring of stages (64 features): weights and rows by tensor map; rows that do not lie one behind the other by 16-byte copies that arrive at
//                      the stage's barrier by themselves, so nobody waits for them but who multiplies;
//   the other warps    finish the tile before (norm, rotary, pool) out of shared memory while the next is multiplied.
// A block's last tile has no next one: there each warp that multiplied finishes its own rows. The finishing code is a loop over pairs of rows, 16 lanes a row.
//
// What bounds it: products of 64 x 128 read 6 KB of shared memory in the 64 cycles that they take; with what the copy engine writes a stage asks for 80 KB, 640 cycles at 128 bytes a
// cycle, where the tensor cores need 512 (600 to 620 are measured).
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

struct Bulk {
  static constexpr int kThreads = 384, kRows = kTileRows;
  static constexpr std::size_t kRowBytes = std::size_t{kRows} * kDepth * 2, kUnitBytes = 16 * 256, kOutBytes = 8 * kUnitBytes;
  static constexpr std::size_t kStage = kRowBytes + kStageBytes;
  static constexpr int kStages = 6;
  static constexpr int kLoaders = 64, kUnits = 8;  // threads; parts of 16 rows, those of a warp

  struct Tail {
    std::int64_t slot[kRows];  // of the tile that is finished: where its rows go, and by which angles they are turned
    int position[kRows];
    std::uint64_t full[kStages], empty[kStages], left[2], taken, placed;
    std::uint16_t row[kRows];  // of ctx, where the block made its list itself
  };
  static constexpr std::size_t kShared = 1024 + kStages * kStage + kOutBytes + sizeof(Tail);
};
static_assert(Bulk::kShared <= 232448);

inline constexpr int kDealtRows = 128 * kDealtTiles;  // the most that may be dealt (work.hpp); a block makes their list itself
/// Places in the workspace for the sums of a tile that is handed on, one for each block, and then for those of a first half that the block itself takes up again (Runs::in_halves). And a flag for each warp that hands on. A flag is up when it holds the number of the launch, 64
/// random bits; who takes the sums lowers it. So nobody has to clear flags first, whatever the caller's workspace holds, and a captured launch may be repeated.
inline constexpr std::size_t kPartBytes = 2 * 128 * 64 * sizeof(float);
inline constexpr int kPartBlocks = 144, kPartFlags = 8;  // no GPU of this architecture has more multiprocessors

struct BulkShape {
  int head_tiles;   // of the launch
  const Row* list;  // what is written, made by plan_kernel; or null: up to kDealtRows rows, listed here
  const int* list_count;
  Runs runs;
  float* parts;                      // [kPartBlocks][kPartBytes]
  unsigned long long* part_flags;    // [kPartBlocks][kPartFlags], or null: whole tiles
  unsigned long long launch_number;  // not 0
  bool listed = false;               // row i of ctx is row i of the list
  bool gather = false;               // for measurements: even where rows lie one behind the other
};
static_assert(kDealtRows * sizeof(Row) + 2 * kDealtRows * sizeof(int) + 48 <= Bulk::kStages * Bulk::kStage);

__device__ __forceinline__ void raise_part(unsigned long long* flag, unsigned long long number) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(number) : "memory");
}
__device__ __forceinline__ void wait_for_part(const unsigned long long* flag, unsigned long long number) {
  unsigned long long is;
  do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(is) : "l"(flag) : "memory");
  while (is != number);
}

/// The sums of 16 rows x 128 columns of a warp, as the tensor cores leave them, with their bias, rounded, into shared memory: rows of 256 bytes, the 16-byte piece i of row r
/// at i ^ (r % 8).
template <class Io, int kHeadDim>
__device__ __forceinline__ void leave_rows(const Problem& p, unsigned char* unit, int head_tile, int lane, float (&d)[64]) {
  if (p.bias.data) {
    constexpr int kHeads = kColumns / kHeadDim;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const Head head = head_of(head_tile * kHeads + j / (kHeadDim / 8), p.heads);
      const int column = ((head.is_v ? p.heads : 0) + head.index) * kHeadDim + 8 * (j % (kHeadDim / 8)) + 2 * (lane % 4);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float b = value_at(p.bias.data, p.bias.dtype, (p.first_layer + head.layer) * p.bias_layer + (column + e) * p.bias.stride);
        d[4 * j + e] += b, d[4 * j + 2 + e] += b;
      }
    }
  }
  const int row = lane % 16;
  const std::uint32_t to = ptx::shared(unit) + row * 256;
#pragma unroll
  for (int j = 0; j < 16; j += 2)
    store_matrices(to + (((j + lane / 16) ^ (row % 8)) << 4), io_pair<Io>(d[4 * j], d[4 * j + 1]), io_pair<Io>(d[4 * j + 2], d[4 * j + 3]),
                   io_pair<Io>(d[4 * j + 4], d[4 * j + 5]), io_pair<Io>(d[4 * j + 6], d[4 * j + 7]));
}

/// Eight bytes of such a row.
__device__ __forceinline__ uint2 row_word(const unsigned char* unit, int row, int byte) {
  return *reinterpret_cast<const uint2*>(unit + row * 256 + ((byte & 15) | ((byte >> 4 ^ (row % 8)) << 4)));
}

/// The sums of a block's 128 x 128 tile, from and to a place in the workspace, by the 256 threads that multiply.
__device__ __forceinline__ float4* part_of(float* parts, int block, int thread) {
  return reinterpret_cast<float4*>(parts) + block * (kPartBytes / 16) + thread;
}
__device__ __forceinline__ void store_part(float4* to, const float (&sum)[64]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) __stcg(to + j * 256, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
}
/// sum = part + sum
__device__ __forceinline__ void add_part(const float4* from, float (&sum)[64]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float4 x = __ldcg(from + j * 256);
    sum[4 * j] = x.x + sum[4 * j], sum[4 * j + 1] = x.y + sum[4 * j + 1];
    sum[4 * j + 2] = x.z + sum[4 * j + 2], sum[4 * j + 3] = x.w + sum[4 * j + 3];
  }
}

__device__ __forceinline__ void prefetch_tile(const CUtensorMap& map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(c0), "r"(c1) : "memory");
}
template <class Io, int kHeadDim>
__global__ void __launch_bounds__(Bulk::kThreads, 1)
    bulk_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p,
              const BulkShape shape) {
  using B = Bulk;
  constexpr int kRows = B::kRows, kStages = B::kStages, kUnits = B::kUnits;
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  unsigned char* const out = memory + kStages * B::kStage;
  auto& tail = *reinterpret_cast<B::Tail*>(out + B::kOutBytes);
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4;
  const int runs = shape.runs.count, weight_row = p.first_layer * 2 * p.heads * kHeadDim, block = static_cast<int>(blockIdx.x);
  const auto work_of = [&](int count) {
    return Work::of((count + kRows - 1) / kRows, shape.head_tiles, runs, block, static_cast<int>(gridDim.x), shape.part_flags ? runs : 0);
  };
  if (thread == 0) {
    prefetch_map(weights), prefetch_map(rows);
    // The first weights on their way to L2 while the list is made: this block's, if all rows are written, else another's.
    if (const Work guess = work_of(p.rows.tokens); guess.pieces > 0) {
      const Piece piece = guess.piece(0);
      for (int k = 0; k < kStages; ++k)
        prefetch_tile(weights, (shape.runs.begin(piece.begin) + k) * kDepth, weight_row + piece.head_tile * kColumns);
    }
  }
  ptx::wait_for_previous();
  int count;
  const bool listed_here = !shape.list;
  auto* const list_here = reinterpret_cast<Row*>(memory);  // in the ring's memory
  if (listed_here) {
    auto* const bucket = reinterpret_cast<int*>(list_here + kDealtRows);
    count = plan_rows<B::kThreads, (kDealtRows + B::kThreads - 1) / B::kThreads, 2 * kDealtRows>(p.rows, list_here, bucket,
                                                                                                 bucket + 2 * kDealtRows, block == 0);
  } else {
    count = *shape.list_count;
  }
  const bool dense = !shape.gather && (shape.listed || count == p.rows.tokens);  // rows lie one behind the other
  const int finishers = dense ? 3 : 2;
  const Work work = work_of(count);
  const int pieces = work.pieces, has_head = work.handed_on;
  if (listed_here) {  // all pieces of a block are of one tile of rows
    if (thread < kRows && pieces > 0) {
      const int row_tile = work.piece(0).row_tile, at = first_row_of(row_tile, count) + thread;
      const Row row = list_here[min(at, count - 1)];
      tail.slot[thread] = at >= row_tile * kRows && at < count ? row.slot : -1, tail.position[thread] = row.position,
      tail.row[thread] = static_cast<std::uint16_t>(row.row);
    }
    ptx::fence_async();
  }
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) ptx::barrier_init(&tail.full[i], dense ? 1 : 1 + B::kLoaders), ptx::barrier_init(&tail.empty[i], 8);
    ptx::barrier_init(&tail.left[0], 128), ptx::barrier_init(&tail.left[1], 128);
    ptx::barrier_init(&tail.taken, 32 * finishers), ptx::barrier_init(&tail.placed, 32 * finishers);
    ptx::fence_barriers();
  }
  __syncthreads();

  const auto finish = [&](const Piece& piece, int unit, auto ready) {
    const int row = 16 * unit;
    finish_rows<Io, kHeadDim, 4>(
        p, [&](int r, int byte) { return row_word(out + unit * B::kUnitBytes, r, byte); }, piece.head_tile * (kColumns / kHeadDim),
        tail.slot + row, tail.position + row, 0, 8, 16, ready);
  };

  if (group == 0) {
    if (warp < 4 - finishers) {
      const std::uint64_t keep = ptx::evict_last();
      int stage = 0;
      std::uint32_t parity = 1;
      if (dense) {
        if (thread == 0) {
          const int row_begin = shape.listed ? 0 : static_cast<int>(p.rows.first);
          for (int i = 0; i < pieces; ++i) {
            const Piece piece = work.piece(i);
            const int end = shape.runs.begin(piece.end);
            for (int k = shape.runs.begin(piece.begin); k < end; ++k) {
              unsigned char* const a = memory + stage * B::kStage;
              ptx::barrier_wait(&tail.empty[stage], parity);
              ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(B::kStage));
              tile_load(a + B::kRowBytes, weights, k * kDepth, weight_row + piece.head_tile * kColumns, &tail.full[stage], keep);
              tile_load(a, rows, k * kDepth, row_begin + first_row_of(piece.row_tile, count), &tail.full[stage], keep);
              if (++stage == kStages) stage = 0, parity ^= 1;
            }
          }
        }
      } else {
        const int place = thread % 8, first_row = thread / 8;  // and every eighth row from there
        const auto* const ctx = static_cast<const std::uint16_t*>(p.ctx) + p.rows.first * p.ctx_stride + place * 8;
        for (int i = 0; i < pieces; ++i) {
          const Piece piece = work.piece(i);
          std::uint32_t from[kRows / 8];  // in pieces; a row beyond the last: any, nobody looks at its result
#pragma unroll
          for (int j = 0; j < kRows / 8; ++j) {
            const int r = first_row + 8 * j, at = min(first_row_of(piece.row_tile, count) + r, count - 1);
            const int row = shape.listed ? at : listed_here ? tail.row[r] : shape.list[at].row;
            from[j] = static_cast<std::uint32_t>(row * (p.ctx_stride / 8));
          }
          const int begin = shape.runs.begin(piece.begin), end = shape.runs.begin(piece.end);
          const auto* column = reinterpret_cast<const uint4*>(ctx) + begin * (kDepth / 8);
#pragma unroll 1
          for (int k = begin; k < end; ++k, column += kDepth / 8) {
            unsigned char* const a = memory + stage * B::kStage;
            ptx::barrier_wait(&tail.empty[stage], parity);
            if (thread == 0) {
              ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(B::kStage - B::kRowBytes));
              tile_load(a + B::kRowBytes, weights, k * kDepth, weight_row + piece.head_tile * kColumns, &tail.full[stage], keep);
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
      std::uint32_t parity = 0;
#pragma unroll 1
      for (int i = has_head; i < pieces; ++i, parity ^= 1) {
        const Piece piece = work.piece(i);
        const int first = warp - (4 - finishers);
        {  // where the rows of this warp's units go; their angles on their way to L2
          __syncwarp();
          const Head head = head_of(piece.head_tile * (kColumns / kHeadDim), p.heads);
          const float* const angles = p.table + (p.first_layer + head.layer) * p.table_layer;
          for (int unit = first; unit < kUnits; unit += finishers) {
            const int r = 16 * unit + thread % 16, at = first_row_of(piece.row_tile, count) + r;
            const bool here = !listed_here && at >= piece.row_tile * kRows && at < count;
            if (!listed_here && thread % 32 < 16)
              tail.slot[r] = here ? shape.list[at].slot : -1, tail.position[r] = here ? shape.list[at].position : 0;
            __syncwarp();
            if (!head.is_v)
              for (int column = thread % 32 / 16 * 32; column < p.rotary_dim; column += 64)
                prefetch_l2(angles + tail.position[r] * p.table_row + column);
          }
          __syncwarp();
        }
        if (i + 1 == pieces) {
          ptx::barrier_arrive(&tail.placed);
          break;
        }
        SPECSTATE_BULK_MARK(i, 4, 96);
#pragma unroll 1
        for (int unit = first; unit < kUnits; unit += finishers)
          finish(piece, unit, [&] { ptx::barrier_wait(&tail.left[unit / (kUnits / 2)], parity); });
        SPECSTATE_BULK_MARK(i, 5, 96);
        __syncwarp();
        ptx::barrier_arrive(&tail.taken);
      }
    }
  } else {
    const int side = group - 1, lane = thread % 32;
    int stage = 0, before = 0;
    std::uint32_t parity = 0, taken = 1;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
      SPECSTATE_BULK_MARK(i, 0, 128);
      float d[64], sum[64];
#pragma unroll
      for (int j = 0; j < 64; ++j) sum[j] = 0, d[j] = 0;  // d: or the compiler takes it for alive from the tile before
      int k, run, run_end;
      {
        const Piece piece = work.piece(i);
        run = piece.begin, run_end = piece.end, k = shape.runs.begin(run);
      }
      const auto add_handed_on = [&] {
        unsigned long long* const flag = shape.part_flags + (block - work.row_tiles) * kPartFlags + 4 * side + warp;
        wait_for_part(flag, shape.launch_number);
        add_part(part_of(shape.parts, block - work.row_tiles, thread - 128), sum);
        __syncwarp();
        if (lane == 0) *flag = 0;
      };
      if (run > 0) add_handed_on();
#pragma unroll 1
      for (; run < run_end; ++run) {
        const int end = shape.runs.begin(run + 1);
        for (bool first = true; k < end; ++k, first = false) {
          const unsigned char* const m = memory + stage * B::kStage;
          ptx::barrier_wait(&tail.full[stage], parity);
          if (!dense)
            ptx::fence_async();  // the copies of others, which their barrier made visible to this thread, before what the tensor cores read
          if (first) SPECSTATE_BULK_MARK(i, 1, 128);
          const std::uint64_t a = tile_descriptor(m + side * kRowTileBytes), b = tile_descriptor(m + B::kRowBytes);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) product<Io>(d, a + 2 * s, b + 2 * s, !first || s > 0);
          product_commit();
          if (!first) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
        product_wait(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
#pragma unroll
        for (int j = 0; j < 64; ++j) sum[j] += d[j];
      }
      __syncwarp();
      SPECSTATE_BULK_MARK(i, 2, 128);
      if (run_end < runs) {  // for the set after this one
        store_part(part_of(shape.parts, block, thread - 128), sum);
        __syncwarp();
        if (lane == 0) raise_part(shape.part_flags + block * kPartFlags + 4 * side + warp, shape.launch_number);
        continue;
      }
      if (i > has_head) ptx::barrier_wait(&tail.taken, taken);
      taken ^= 1;
      const Piece piece = work.piece(i);
      const int unit = 4 * side + warp;
      int lane_here;  // asked for again, so that nothing that follows from it is kept in registers while the products run
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      leave_rows<Io, kHeadDim>(p, out + unit * B::kUnitBytes, piece.head_tile, lane_here, sum);
      __syncwarp();
      SPECSTATE_BULK_MARK(i, 3, 128);
      if (i + 1 < pieces) {
        ptx::barrier_arrive(&tail.left[side]);
      } else {
        ptx::barrier_wait(&tail.placed, 0);
        finish(piece, unit, [] {});
        __syncwarp();
      }
      SPECSTATE_BULK_MARK(i, 6, 128);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
