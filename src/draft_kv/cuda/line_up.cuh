#pragma once
// Calls of which some rows are rejected: those that stand are copied one behind another into the workspace, so that the product after it (pair_rows.cuh, half_rows.cuh, bulk_rows.cuh) asks for
// them by tensor map.
//
// A product that gathers them itself by 16-byte copies takes 700 ns a stage where rows that lie take 515.
// Every block finds the list by itself and copies its part of it. Of several rows that name one slot only the last is written, and the others' slots are -1 in the list.
//   line_up        up to 1024 rows. Up to 512 it costs little of its own in front of half_rows, whose blocks fit beside these (128 threads of 32 registers and 3 KB of shared memory a
//                  multiprocessor) and ask for their first weights meanwhile. Of each row of the list, one warp looks at those after it.
//   line_up_many   up to kListRows, in front of bulk_rows, which leaves no room beside it. Each thread looks whether its rows take a slot from those that the block copies.
#include "draft_kv/cuda/rows.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kLinedRows = 512, kLinedMore = 1024, kLineThreads = 128, kLineManyThreads = 1024;

/// The numbers of those rows of which a bit is in `kept`, in order, by all threads of the block; returns how many there are. Ends with a barrier.
template <int kThreads, int kWords>
__device__ __forceinline__ int number_rows(const unsigned* kept, std::uint16_t* row) {
  constexpr int kEach = (kWords + 31) / 32;  // words a lane counts
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (const int word = lane * kEach + e; word < kWords) own += __popc(kept[word]);
  int before = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  const int rows = __shfl_sync(~0u, before, 31);
  for (int word = warp; word < kWords; word += kThreads / 32) {
    int at = __shfl_sync(~0u, before - own, word / kEach);
    for (int w = word / kEach * kEach; w < word; ++w) at += __popc(kept[w]);
    const unsigned bits = kept[word];
    if (bits >> lane & 1) row[at + __popc(bits & ((1u << lane) - 1))] = static_cast<std::uint16_t>(32 * word + lane);
  }
  __syncthreads();
  return rows;
}

/// What the warps of a launch copy: 128 pieces (of 16 bytes) of a row at a time.
struct LinedUnits {
  static constexpr int kAtOnce = 4;
  const uint4* ctx;  // of the launch's first row
  std::int64_t ctx_pieces;
  int pieces, of_row;
  uint4* to;

  __device__ LinedUnits(const uint4* from, std::int64_t from_pieces, int of, uint4* there)
      : ctx(from), ctx_pieces(from_pieces), pieces(of), of_row((of + 32 * kAtOnce - 1) / (32 * kAtOnce)), to(there) {}
  __device__ __forceinline__ void load(int unit, const std::uint16_t* row, int lane, uint4 (&v)[kAtOnce]) const {
    const int i = unit / of_row, begin = (unit - i * of_row) * 32 * kAtOnce + lane;
    const uint4* const from = ctx + row[i] * ctx_pieces + begin;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (begin + 32 * j < pieces) v[j] = ptx::load_uncached(from + 32 * j);
  }
  __device__ __forceinline__ void store(int unit, int lane, const uint4 (&v)[kAtOnce]) const {
    const int i = unit / of_row, begin = (unit - i * of_row) * 32 * kAtOnce + lane;
    uint4* const there = to + static_cast<std::int64_t>(i) * pieces + begin;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (begin + 32 * j < pieces) there[32 * j] = v[j];
  }
};

/// The rows of up to kMost that stand, in order: row i of `to` ([.., pieces] of 16 bytes), and list[i]: its slot (-1: a later row has it) and position. `ctx_pieces`: of 16 bytes,
/// from row to row. `pieces` 0: nothing is copied, and list[i] is about row i, whether it stands (slot -1: not).
template <int kMost>
__global__ void __launch_bounds__(kLineThreads, kMost == kLinedRows ? 16 : 8)
    line_up(const __grid_constant__ Rows x, const uint4* ctx, std::int64_t ctx_pieces, int pieces, Row* list, int* count, uint4* to) {
  constexpr int kEach = kMost / kLineThreads, kWords = kMost / 32, kBatch = 4;
  __shared__ unsigned kept[kWords];
  __shared__ std::uint32_t low[kMost];  // of each row's slot
  __shared__ std::uint16_t row[kMost];  // of the launch: the list
  ptx::wait_for_previous();
  ptx::let_next_start();  // not before: what the next one reads before its own wait was written by nobody that is still running
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const bool first = blockIdx.x == 0;
#pragma unroll
  for (int begin = 0; begin < kEach; begin += kBatch) {
    std::int64_t slot[kBatch];
    if constexpr (kMost == kLinedRows) {  // in few registers
#pragma unroll
      for (int e = 0; e < kBatch; ++e) slot[e] = read_row(x, thread + e * kLineThreads, first).slot;
    } else {
      read_slots(x, thread + begin * kLineThreads, kLineThreads, first, slot);
    }
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const int i = thread + (begin + e) * kLineThreads;
      low[i] = static_cast<std::uint32_t>(slot[e]);
      const bool stands = pieces > 0 ? slot[e] >= 0 : i < x.tokens;
      if (const unsigned bits = __ballot_sync(~0u, stands); lane == 0) kept[i / 32] = bits;
    }
  }
  __syncthreads();
  const int rows = number_rows<kLineThreads, kWords>(kept, row);
  if (first && thread == 0) *count = rows;
  const LinedUnits units(ctx + x.first * ctx_pieces, ctx_pieces, pieces, to);
  const int warps = static_cast<int>(gridDim.x) * (kLineThreads / 32);
  const int me = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int unit = me; unit < rows * units.of_row; unit += warps) {
    uint4 v[LinedUnits::kAtOnce];
    units.load(unit, row, lane, v), units.store(unit, lane, v);
  }
#pragma unroll 1
  for (int i = me; i < rows; i += warps) {
    Row own_row = read_row(x, row[i], false);
    bool taken = false;
    for (int j = i + 1 + lane; j < rows; j += 32)
      if (low[row[j]] == static_cast<std::uint32_t>(own_row.slot)) taken = taken || read_row(x, row[j], false).slot == own_row.slot;
    if (__any_sync(~0u, taken)) own_row.slot = -1;
    if (lane == 0) list[i] = own_row;
  }
}

/// The same of up to kListRows; always copies.
static __global__ void __launch_bounds__(kLineManyThreads, 1)
    line_up_many(const __grid_constant__ Rows x, const uint4* ctx, std::int64_t ctx_pieces, int pieces, Row* list, int* count, uint4* to) {
  constexpr int kThreads = kLineManyThreads, kEach = kListRows / kThreads, kBatch = 4, kOwn = 64;
  __shared__ unsigned kept[kListRows / 32];
  __shared__ std::uint16_t row[kListRows];  // of the launch: the list
  __shared__ Row own[kOwn];                 // of the list, that this block writes
  __shared__ std::uint32_t filter[kFilterWords], lost[kOwn];
  static_assert(kListRows <= 1 << 16 && kFilterWords <= kThreads && kEach % kBatch == 0);
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const bool first = blockIdx.x == 0;
  std::int64_t slot[kEach];
#pragma unroll
  for (int e = 0; e < kEach; e += kBatch) {
    std::int64_t some[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) some[j] = -1;
    if (e * kThreads < x.tokens) read_slots(x, thread + e * kThreads, kThreads, first, some);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = thread + (e + j) * kThreads;
      slot[e + j] = some[j];
      if (const unsigned bits = __ballot_sync(~0u, some[j] >= 0); lane == 0) kept[i / 32] = bits;
    }
  }
  __syncthreads();
  const int rows = number_rows<kThreads, kListRows / 32>(kept, row);
  if (first && thread == 0) *count = rows;
  const LinedUnits units(ctx + x.first * ctx_pieces, ctx_pieces, pieces, to);
  const int blocks = static_cast<int>(gridDim.x), me = static_cast<int>(blockIdx.x), all = rows * units.of_row;
  int unit = me + warp * blocks;
  uint4 v[LinedUnits::kAtOnce];
  if (unit < all) units.load(unit, row, lane, v);  // they come while the list is made
#pragma unroll 1
  for (int begin = me; begin < rows; begin += kOwn * blocks) {
    const int i = begin + thread * blocks;
    const bool mine = thread < kOwn && i < rows;
    if (thread < kFilterWords) filter[thread] = 0;
    __syncthreads();
    if (thread < kOwn) {
      const Row it = mine ? read_row(x, row[i], false) : Row{-1, 0, 0};
      own[thread] = it, lost[thread] = 0;
      if (mine) atomicOr(&filter[filter_bit(it.slot) / 32], 1u << filter_bit(it.slot) % 32);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (slot[e] < 0 || !(filter[filter_bit(slot[e]) / 32] >> filter_bit(slot[e]) % 32 & 1)) continue;
#pragma unroll 1
      for (int k = 0; k < kOwn; ++k)
        if (own[k].slot == slot[e] && own[k].row < thread + e * kThreads) atomicOr(&lost[k], 1u);
    }
    __syncthreads();
    if (mine) {
      Row it = own[thread];
      if (lost[thread]) it.slot = -1;
      list[i] = it;
    }
  }
#pragma unroll 1
  while (unit < all) {
    units.store(unit, lane, v);
    if ((unit += blocks * (kThreads / 32)) < all) units.load(unit, row, lane, v);
  }
}

}  // namespace specstate::draft_kv::cuda
