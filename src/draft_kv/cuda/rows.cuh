#pragma once
// Which rows of a call reach the pool: compaction on the device, so that rejected rows never enter a product.
//
// A block reads the slots, commit lengths and positions of up to kPlanRows rows and leaves a list of the rows that are written. Rows that
// cannot be (slot beyond the pool, position outside the table) raise the flag and are left out. Of rows that name one slot only the last
// stays: a hash table of the slots remembers the greatest row of each.
#include "cuda/ptx.cuh"
#include "draft_kv/cuda/problem.hpp"

namespace specstate::draft_kv::cuda {

namespace ptx = specstate::cuda::ptx;

/// A row of the list: the row of ctx_hidden, where it goes and by which angles it is turned.
struct alignas(16) Row {
  std::int64_t slot;
  int row, position;
};

__device__ __forceinline__ std::int64_t index_at(const Indices& x, std::int64_t i, std::int64_t width) {
  const std::int64_t at = x.outer ? i / width * x.outer + i % width * x.inner : i * x.inner;
  return x.wide ? static_cast<const std::int64_t*>(x.data)[at] : static_cast<const int*>(x.data)[at];
}

/// Row `i` of this launch, or slot -1.
__device__ __forceinline__ Row read_row(const Rows& x, int i, bool raise) {
  Row none{-1, 0, 0};
  if (i >= x.tokens) return none;
  const std::int64_t at = x.first + i;
  // All three at once: they come from memory that nobody has touched yet.
  const std::int64_t slot = x.slots.data ? index_at(x.slots, at, x.width) : at;
  const std::int64_t position = index_at(x.positions, at, x.width);
  const std::int64_t commit = x.commit.data ? index_at(x.commit, at / x.width, 1) : 1;
  if (!is_written(slot, x.commit.data ? at % x.width : 0, commit)) return none;
  if (slot >= x.pool_slots || position < 0 || position >= x.table) {
    if (raise) x.flag[slot >= x.pool_slots ? kSlotFlag : kPositionFlag] = 1;
    return none;
  }
  return {slot, i, static_cast<int>(position)};
}

/// By kThreads threads of a block that call themselves 0, 1, .. and meet at `sync`, for at most kThreads * kEach rows: the list in row order and its length.
/// `bucket` holds kBuckets ints, a power of two of at least twice the rows. Ends with a barrier.
template <int kThreads, int kEach, int kBuckets, class Sync>
__device__ int plan_rows(const Rows& x, Row* list, int* bucket, int* warp_count, bool raise, int thread, Sync sync) {
  Row mine[kEach];
  for (int i = thread; i < kBuckets; i += kThreads) bucket[i] = -1;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = thread * kEach + e;
    mine[e] = read_row(x, i, raise);
  }
  // While the table fills, `list` holds every row's slot at its own place, for the others to compare.
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (thread * kEach + e < x.tokens) list[thread * kEach + e] = mine[e];
  sync();
  int place[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    place[e] = -1;
    if (mine[e].slot < 0) continue;
    const int i = thread * kEach + e;
    std::uint32_t h = static_cast<std::uint32_t>((static_cast<std::uint64_t>(mine[e].slot) * 0x9E3779B97F4A7C15ull) >> 40);
    for (;; ++h) {
      h &= kBuckets - 1;
      const int other = atomicCAS(&bucket[h], -1, i);
      if (other < 0) break;
      if (list[other].slot == mine[e].slot) {
        atomicMax(&bucket[h], i);
        break;
      }
    }
    place[e] = static_cast<int>(h);
  }
  sync();
  int kept = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (place[e] >= 0 && bucket[place[e]] != thread * kEach + e) place[e] = -1;
    kept += place[e] >= 0;
  }
  int before = kept;  // inclusive sum over the warp
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (thread % 32 >= d) before += other;
  }
  if (thread % 32 == 31) warp_count[thread / 32] = before;
  sync();
  int at = before - kept, total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < thread / 32) at += warp_count[w];
    total += warp_count[w];
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (place[e] >= 0) list[at++] = mine[e];
  sync();
  return total;
}

/// The same by all threads of the block.
template <int kThreads, int kEach, int kBuckets>
__device__ int plan_rows(const Rows& x, Row* list, int* bucket, int* warp_count, bool raise) {
  return plan_rows<kThreads, kEach, kBuckets>(x, list, bucket, warp_count, raise, threadIdx.x, [] { __syncthreads(); });
}

/// Longer launches than a block of the product plans for itself: one block plans up to kListRows rows into `list`, `count`. A thread has every 1024th row; slots stay in shared memory for
/// rows that name one slot to find each other.
inline constexpr int kListRows = 8192, kPlanThreads = 1024;
inline constexpr std::size_t kPlanBytes = kListRows * (sizeof(std::int64_t) + 2 * sizeof(int));
static __global__ void __launch_bounds__(kPlanThreads, 1) plan_kernel(const __grid_constant__ Rows x, Row* list, int* count) {
  constexpr int kEach = kListRows / kPlanThreads, kWarps = kPlanThreads / 32;
  extern __shared__ __align__(16) unsigned char plan_memory[];
  auto* const slots = reinterpret_cast<std::int64_t*>(plan_memory);  // [kListRows]
  auto* const bucket = reinterpret_cast<int*>(slots + kListRows);    // [2 kListRows], of which as many as twice the rows are used
  __shared__ int kept_of[kEach * kWarps];
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, each = (x.tokens + kPlanThreads - 1) / kPlanThreads;
  int buckets = 2 * kPlanThreads;
  while (buckets < 2 * x.tokens) buckets *= 2;
  for (int i = thread; i < buckets; i += kPlanThreads) bucket[i] = -1;
  Row mine[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) mine[e] = read_row(x, e * kPlanThreads + thread, true);
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (e < each) slots[e * kPlanThreads + thread] = mine[e].slot;
  __syncthreads();
  int place[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    place[e] = -1;
    if (mine[e].slot < 0) continue;
    const int i = e * kPlanThreads + thread;
    std::uint32_t h = static_cast<std::uint32_t>((static_cast<std::uint64_t>(mine[e].slot) * 0x9E3779B97F4A7C15ull) >> 40);
    for (;; ++h) {
      h &= buckets - 1;
      const int other = atomicCAS(&bucket[h], -1, i);
      if (other < 0) break;
      if (slots[other] == mine[e].slot) {
        atomicMax(&bucket[h], i);
        break;
      }
    }
    place[e] = static_cast<int>(h);
  }
  __syncthreads();
  unsigned kept[kEach];  // of the warp's rows
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    kept[e] = __ballot_sync(~0u, place[e] >= 0 && bucket[place[e]] == e * kPlanThreads + thread);
    if (lane == 0) kept_of[e * kWarps + warp] = __popc(kept[e]);
  }
  __syncthreads();
  if (warp == 0) {  // counts -> where a warp's rows begin
    int before = 0;
    for (int e = 0; e < kEach; ++e) {
      int n = kept_of[e * kWarps + lane], sum = n;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      kept_of[e * kWarps + lane] = before + sum - n;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) *count = before;
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (kept[e] >> lane & 1) list[kept_of[e * kWarps + warp] + __popc(kept[e] & ((1u << lane) - 1))] = mine[e];
}

}  // namespace specstate::draft_kv::cuda
