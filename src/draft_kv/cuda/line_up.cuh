#pragma once
// Calls of which some rows are rejected: those that stand are copied one behind another into the workspace, so that the product after it (pair_rows.cuh) asks for them by tensor map.
//
// A product that gathers them itself by 16-byte copies takes 700 ns a stage where rows that lie take 515. This launch costs little of its own: the product's blocks fit beside these
// (128 threads of 32 registers and 3 KB of shared memory a multiprocessor), and their first weights are on their way meanwhile.
// Every block finds the list by itself and copies its part of it. Of several rows that name one slot only the last is written: of each row of the list, one warp looks at those after it.
#include "draft_kv/cuda/rows.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kLinedRows = 512, kLineThreads = 128;

/// The rows of up to kLinedRows that stand, in order: row i of `to` ([.., pieces] of 16 bytes), and list[i]: its slot (-1: a later row has it) and position. `ctx_pieces`: of 16 bytes,
/// from row to row. `pieces` 0: nothing is copied, and list[i] is about row i, whether it stands (slot -1: not).
static __global__ void __launch_bounds__(kLineThreads, 16)
    line_up(const __grid_constant__ Rows x, const uint4* ctx, std::int64_t ctx_pieces, int pieces, Row* list, int* count, uint4* to) {
  constexpr int kEach = kLinedRows / kLineThreads, kWords = kLinedRows / 32;
  __shared__ unsigned kept[kWords];
  __shared__ std::uint32_t low[kLinedRows];  // of each row's slot
  __shared__ std::uint16_t row[kLinedRows];  // of the launch: the list
  ptx::wait_for_previous();
  ptx::let_next_start();  // not before: what the next one reads before its own wait was written by nobody that is still running
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const bool first = blockIdx.x == 0;
  std::int64_t slot[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) slot[e] = read_row(x, thread + e * kLineThreads, first).slot;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = thread + e * kLineThreads;
    low[i] = static_cast<std::uint32_t>(slot[e]);
    const bool stands = pieces > 0 ? slot[e] >= 0 : i < x.tokens;
    if (const unsigned bits = __ballot_sync(~0u, stands); lane == 0) kept[i / 32] = bits;
  }
  __syncthreads();
  int before = lane < kWords ? __popc(kept[lane]) : 0;
  const int own = before;
#pragma unroll
  for (int step = 1; step < kWords; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  const int rows = __shfl_sync(~0u, before, kWords - 1);
  for (int word = warp; word < kWords; word += kLineThreads / 32) {
    const int at = __shfl_sync(~0u, before - own, word);
    const unsigned bits = kept[word];
    if (bits >> lane & 1) row[at + __popc(bits & ((1u << lane) - 1))] = static_cast<std::uint16_t>(32 * word + lane);
  }
  __syncthreads();
  if (first && thread == 0) *count = rows;
  // 128 pieces of a row a warp at a time.
  constexpr int kAtOnce = 4;
  const int of_row = (pieces + 32 * kAtOnce - 1) / (32 * kAtOnce), warps = static_cast<int>(gridDim.x) * (kLineThreads / 32);
  const int me = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int unit = me; unit < rows * of_row; unit += warps) {
    const int i = unit / of_row, begin = (unit - i * of_row) * 32 * kAtOnce + lane;
    const uint4* const from = ctx + (x.first + row[i]) * ctx_pieces + begin;
    uint4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (begin + 32 * j < pieces) v[j] = ptx::load_uncached(from + 32 * j);
    uint4* const there = to + static_cast<std::int64_t>(i) * pieces + begin;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (begin + 32 * j < pieces) there[32 * j] = v[j];
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

}  // namespace specstate::draft_kv::cuda
