#pragma once
// Which rows of a call reach the pool: compaction on the device, so that rejected rows never enter a product.
//
// A block reads the slots, commit lengths and positions of some rows and leaves a list of the rows that are written. Rows that
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

/// Row i of a list that the launch before has left.
__device__ __forceinline__ Row lined_row(const Row* list, int i) {
  const uint4 x = __ldcg(reinterpret_cast<const uint4*>(list + i));
  return {static_cast<std::int64_t>(x.y) << 32 | x.x, static_cast<int>(x.z), static_cast<int>(x.w)};
}

/// i / width: rows and windows are counted in 32 bits but for calls of 2^32 rows and more.
__device__ __forceinline__ std::int64_t window_of(std::int64_t i, std::int64_t width) {
  if (((i | width) >> 32) == 0) return static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(width);
  return i / width;
}
__device__ __forceinline__ std::int64_t index_at(const Indices& x, std::int64_t i, std::int64_t width) {
  std::int64_t at = i * x.inner;
  if (x.windows) {
    const std::int64_t window = window_of(i, width);
    at = window * x.outer + (i - window * width) * x.inner;
  }
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
  const std::int64_t window = x.commit.data ? window_of(at, x.width) : at;
  const std::int64_t commit = x.commit.data ? index_at(x.commit, window, 1) : 1;
  if (!is_written(slot, x.commit.data ? at - window * x.width : 0, commit)) return none;
  if (slot >= x.pool_slots || position < 0 || position >= x.table) {
    if (raise) x.flag[slot >= x.pool_slots ? kSlotFlag : kPositionFlag] = 1;
    return none;
  }
  return {slot, i, static_cast<int>(position)};
}

/// Entries `at` of `x`, all asked for before any is waited for.
template <int kN>
__device__ __forceinline__ void indices_at(const Indices& x, const std::int64_t (&at)[kN], std::int64_t width, std::int64_t (&to)[kN]) {
  std::int64_t place[kN];
#pragma unroll
  for (int e = 0; e < kN; ++e) place[e] = at[e] * x.inner;
  if (x.windows) {
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const std::int64_t window = window_of(at[e], width);
      place[e] = window * x.outer + (at[e] - window * width) * x.inner;
    }
  }
  if (x.wide) {
#pragma unroll
    for (int e = 0; e < kN; ++e) to[e] = static_cast<const std::int64_t*>(x.data)[place[e]];
  } else {
    int narrow[kN];
#pragma unroll
    for (int e = 0; e < kN; ++e) narrow[e] = static_cast<const int*>(x.data)[place[e]];
#pragma unroll
    for (int e = 0; e < kN; ++e) to[e] = narrow[e];
  }
}
/// read_row's slots of rows begin, begin + step, ..
template <int kN>
__device__ __forceinline__ void read_slots(const Rows& x, int begin, int step, bool raise, std::int64_t (&slot)[kN]) {
  std::int64_t at[kN], position[kN], commit[kN], column[kN];
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    at[e] = x.first + min(begin + e * step, x.tokens - 1);  // (there is one)
    slot[e] = at[e], commit[e] = 1, column[e] = 0;
  }
  if (x.slots.data) indices_at(x.slots, at, x.width, slot);
  indices_at(x.positions, at, x.width, position);
  if (x.commit.data) {
    std::int64_t window[kN];
#pragma unroll
    for (int e = 0; e < kN; ++e) window[e] = window_of(at[e], x.width), column[e] = at[e] - window[e] * x.width;
    indices_at(x.commit, window, 1, commit);
  }
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    if (begin + e * step >= x.tokens || !is_written(slot[e], column[e], commit[e])) {
      slot[e] = -1;
    } else if (slot[e] >= x.pool_slots || position[e] < 0 || position[e] >= x.table) {
      if (raise) x.flag[slot[e] >= x.pool_slots ? kSlotFlag : kPositionFlag] = 1;
      slot[e] = -1;
    }
  }
}

/// By kThreads threads of a block that call themselves 0, 1, .. and meet at `sync`, for at most kThreads * kEach rows: the list in row order and its length.
/// `bucket` holds kBuckets ints, a power of two, as many as rows or (quicker) twice as many. Ends with a barrier.
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

/// Which rows of a launch are written, a bit each in `kept`, by kThreads threads that meet at `sync`. `slots` [tokens] and `bucket` (a power of two of at least twice as many) are
/// scratch. Of `parts` callers, each knows of the slots whose hash is its own.
template <int kThreads, class Sync>
__device__ __forceinline__ void mark_rows(const Rows& x, std::int64_t* slots, int* bucket, unsigned* kept, bool raise, int thread,
                                          Sync sync, unsigned part = 0, unsigned parts = 1) {
  int buckets = 64;
  while (buckets < 2 * x.tokens) buckets *= 2;
  const auto hash_of = [&](std::int64_t slot) {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(slot) * 0x9E3779B97F4A7C15ull) >> 40);
  };
  for (int i = thread; i < buckets; i += kThreads) bucket[i] = -1;
#pragma unroll 8
  for (int i = thread; i < x.tokens; i += kThreads) {
    const std::int64_t slot = read_row(x, i, raise).slot;
    slots[i] = slot >= 0 && hash_of(slot) % parts == part ? slot : -1;
  }
  sync();
  const auto place_of = [&](std::int64_t slot) { return hash_of(slot) / parts & (buckets - 1); };
  for (int i = thread; i < x.tokens; i += kThreads) {
    const std::int64_t slot = slots[i];
    if (slot < 0) continue;
    for (std::uint32_t h = place_of(slot);; h = (h + 1) & (buckets - 1)) {
      const int other = atomicCAS(&bucket[h], -1, i);
      if (other < 0) break;
      if (slots[other] == slot) {
        atomicMax(&bucket[h], i);
        break;
      }
    }
  }
  sync();
  for (int first = thread / 32 * 32; first < x.tokens; first += kThreads) {
    const int i = first + thread % 32;
    const std::int64_t slot = i < x.tokens ? slots[i] : -1;
    bool last = false;
    if (slot >= 0) {
      std::uint32_t h = place_of(slot);
      while (slots[bucket[h]] != slot) h = (h + 1) & (buckets - 1);
      last = bucket[h] == i;
    }
    const unsigned bits = __ballot_sync(~0u, last);
    if (thread % 32 == 0) kept[first / 32] = bits;
  }
  sync();
}

/// The bit of a slot in a filter of kFilterWords words: most slots that are not in it are told by one look.
inline constexpr int kFilterWords = 256;
__device__ __forceinline__ std::uint32_t filter_bit(std::int64_t slot) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(slot) * 0x9E3779B97F4A7C15ull) >> 51);
}

/// Where the kTile rows from `first` on go and by which angles they are turned; slot -1: those before `from` or beyond the last, and what is not written. A later row takes a slot
/// away, so every one of the `rows` after them is looked at: each tile finds out by itself, without a list of all, whatever the number of rows. `read(i, raise)` gives row i, `slot_at(i)` only the slot that it names. By `threads`
/// threads that meet at `sync`; `bucket` has kBuckets places, a power of two of at least 2 kTile. `filter`: kFilterWords words or null; with it most rows behind need one look.
template <int kTile, int kBuckets, int kEach, class Slot, class Read, class Sync>
__device__ __forceinline__ void mark_tile(Slot slot_at, Read read, int rows, int first, int from, std::int64_t* slots, int* positions,
                                          int* bucket, int thread, int threads, Sync sync, std::uint32_t* filter = nullptr) {
  const auto place_of = [](std::int64_t slot) {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(slot) * 0x9E3779B97F4A7C15ull) >> 40) & (kBuckets - 1);
  };
  for (int i = thread; i < kBuckets; i += threads) bucket[i] = -1;
  for (int i = thread; filter && i < kFilterWords; i += threads) filter[i] = 0;
  Row mine[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int r = thread + e * threads;
    mine[e] = r < kTile && first + r >= from && first + r < rows ? read(first + r, true) : Row{-1, 0, 0};
  }
  sync();  // nobody looks at the tile before any more
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (const int r = thread + e * threads; r < kTile) slots[r] = mine[e].slot, positions[r] = mine[e].position;
  sync();
#pragma unroll 1
  for (int r = thread; r < kTile; r += threads) {
    const std::int64_t slot = slots[r];
    if (slot < 0) continue;
    if (filter) atomicOr(&filter[filter_bit(slot) / 32], 1u << filter_bit(slot) % 32);
    for (std::uint32_t h = place_of(slot);; h = (h + 1) & (kBuckets - 1)) {
      const int other = atomicCAS(&bucket[h], -1, r);
      if (other < 0) break;
      if (slots[other] == slot) {
        atomicMax(&bucket[h], r);
        break;
      }
    }
  }
  sync();
  constexpr int kBatch = 16;
#pragma unroll 1
  for (int i = first + kTile + thread; i < rows; i += kBatch * threads) {
    std::int64_t slot[kBatch];
#pragma unroll
    for (int e = 0; e < kBatch; ++e) slot[e] = i + e * threads < rows ? slot_at(i + e * threads) : -1;
    unsigned named = 0;  // by rows of the tile, too, as far as one look tells
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      if (slot[e] < 0) continue;
      const bool may = filter ? filter[filter_bit(slot[e]) / 32] >> filter_bit(slot[e]) % 32 & 1 : bucket[place_of(slot[e])] >= 0;
      named |= static_cast<unsigned>(may) << e;
    }
#pragma unroll 1
    for (; named; named &= named - 1) {
      const int at = i + (__ffs(static_cast<int>(named)) - 1) * threads;
      const std::int64_t its = slot_at(at);
      for (std::uint32_t h = place_of(its);; h = (h + 1) & (kBuckets - 1)) {
        const int other = bucket[h];
        if (other < 0) break;
        if (slots[other & (kTile - 1)] == its) {
          if (read(at, false).slot >= 0) atomicOr(&bucket[h], kTile);  // it is itself written
          break;
        }
      }
    }
  }
  sync();
  unsigned lost = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int r = thread + e * threads;
    const std::int64_t slot = r < kTile ? slots[r] : -1;
    if (slot < 0) continue;
    std::uint32_t h = place_of(slot);
    while (slots[bucket[h] & (kTile - 1)] != slot) h = (h + 1) & (kBuckets - 1);
    if (bucket[h] != r) lost |= 1u << e;
  }
  sync();
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (lost >> e & 1) slots[thread + e * threads] = -1;
  sync();
}

/// Longer launches than a block of the product plans for itself: a cluster of blocks (kPlanBlocks, or one), each of which knows of its part of the slots, makes the list of up
/// to kListRows rows.
inline constexpr int kListRows = 8192, kPlanThreads = 1024, kPlanBlocks = 8;
inline constexpr std::size_t kPlanBytes = kListRows * (sizeof(std::int64_t) + 2 * sizeof(int));
static __global__ void __launch_bounds__(kPlanThreads, 1) plan_kernel(const __grid_constant__ Rows x, Row* list, int* count) {
  extern __shared__ __align__(16) unsigned char plan_memory[];
  auto* const slots = reinterpret_cast<std::int64_t*>(plan_memory);
  __shared__ unsigned kept[kListRows / 32], all[kListRows / 32];
  __shared__ int before[kListRows / 32], of_warp[kListRows / 1024];
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, words = (x.tokens + 31) / 32;
  const unsigned part = blockIdx.x, parts = gridDim.x;
  mark_rows<kPlanThreads>(
      x, slots, reinterpret_cast<int*>(slots + kListRows), kept, part == 0, thread, [] { __syncthreads(); }, part, parts);
  ptx::cluster_sync();
  int sum = 0;
  if (thread < kListRows / 32) {  // a word of the list each
    unsigned bits = 0;
    if (thread < words)
      for (unsigned other = 0; other < parts; ++other) bits |= *ptx::in_block(&kept[thread], other);
    all[thread] = bits, sum = __popc(bits);
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    before[thread] = sum - __popc(bits);
    if (lane == 31) of_warp[warp] = sum;
  }
  ptx::cluster_arrive();  // nobody leaves while others read its words
  __syncthreads();
  int rows = 0;
  for (int w = 0; w < kListRows / 1024; ++w) rows += of_warp[w];
  for (int word = static_cast<int>(part) * (kPlanThreads / 32) + warp; word < words;
       word += static_cast<int>(parts) * (kPlanThreads / 32)) {
    int at = before[word];
    for (int w = 0; w < word / 32; ++w) at += of_warp[w];
    if (all[word] >> lane & 1) list[at + __popc(all[word] & ((1u << lane) - 1))] = read_row(x, 32 * word + lane, false);
  }
  if (part == 0 && thread == 0) *count = rows;
  ptx::cluster_wait();
}

}  // namespace specstate::draft_kv::cuda
