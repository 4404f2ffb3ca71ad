// The single-step swap with exact LRU: one CTA decides for a batch row, its cluster moves the rows with it.
//
// Deciding is short (some thousand look-ups) and serial (who is hit -> how many can be evicted, who misses -> which victim), so it stays in
// one CTA, where a barrier costs 50 cycles and not 900. What it costs is instructions, 32 warps of them on one SM; so each step is one
// short loop. The other CTAs of a cluster (small batches only) wait for their list and move rows.
//
//   selection, request, length -> the request's tables into shared memory (bulk copies), meanwhile the asked tokens into a hash table, where
//   the smallest occurrence of each stays ->
//   every LRU position asks the table for its slot's token: a hit puts its position into the entry -> first occurrences that nobody hit and
//   that have a host row miss -> ranks in that set and in the set of the positions that can be evicted: miss u takes the position of rank u ->
//   (host row, device row) into the list of CTA u mod cluster -> tables, answers and the new order (a position's place is its rank in one
//   set or the other), while the last warps already move.
//
// The order of the results is that of positions and occurrences, never that of arrival; so they equal the CPU's.
#include <algorithm>

#include "cuda/launch.hpp"
#include "hisparse/cuda/missing.cuh"
#include "hisparse/cuda/rows.cuh"
#include "hisparse/cuda/single.hpp"

namespace specstate::hisparse::cuda {
namespace {

constexpr u32 kThreads = 1024, kWarps = kThreads / 32;
constexpr u32 kFirst =
    0x80000000u;          // in an entry: nobody holds the token; its smallest occurrence is in the low bits. Else an LRU position
constexpr u32 kTake = 4;  // rows that a warp takes at once

/// Sizes and places in shared memory, the same for all CTAs of a launch.
struct Plan {
  u32 cluster, cluster_bits;
  u32 hot_words, asked_words;                                         // of a set, multiples of 128
  u32 shift, mask;                                                    // of the hash table
  bool bulk;                                                          // tables can be copied in bulk
  u32 out_step, host_step, token_step, lru_step, src_step, dst_step;  // bytes
  u32 key, value, token, source, place, tokens, locs, lru, named, evictable, evictable_before, again, first, first_before, bytes;
};
struct Shared {
  u64 staged;  // barrier: the tables are here
  u32 moves, next;
  u32 misses, evictable;
  std::int32_t newest_loc;
};
struct Move {
  u32 src;
  std::int32_t dst;
};

/// before[w] = set bits of words 0..w-1; n is a multiple of 128. One warp.
__device__ __forceinline__ u32 rank_sets(u32* words, const u32* more, u32* before, u32 n) {
  u32 carry = 0;
#pragma unroll 1
  for (u32 base = 4 * lane_id(); base < n; base += 128) {
    uint4 w = *reinterpret_cast<const uint4*>(words + base);
    if (more != nullptr) {
      const uint4 a = *reinterpret_cast<const uint4*>(more + base);
      w = {w.x | a.x, w.y | a.y, w.z | a.z, w.w | a.w};
      *reinterpret_cast<uint4*>(words + base) = w;
    }
    const u32 x = __popc(w.x), y = x + __popc(w.y), z = y + __popc(w.z);
    u32 total;
    const u32 sum = carry + warp_sum_before(z + __popc(w.w), total);
    *reinterpret_cast<uint4*>(before + base) = {sum, sum + x, sum + y, sum + z};
    carry += total;
  }
  return carry;
}

/// Token i of a selection of blocks. Out of line, since most selections are none.
__device__ __noinline__ std::int32_t of_block(const SwapInSingleArgs& x, i64 b, u32 i) {
  const u32 n = static_cast<u32>(x.block), entry = i / n;
  const i64 block = x.selection(b, entry), token = block * n + (i - entry * n);
  return block < 0 || token > INT32_MAX ? -1 : static_cast<std::int32_t>(token);
}

/// Element i of a row, by a step in bytes.
template <class T>
__device__ __forceinline__ T& element(const void* row, u32 step, u32 i) {
  return *reinterpret_cast<T*>(reinterpret_cast<u64>(row) + static_cast<u64>(step) * i);
}

/// Lru: the type of lru_slots.
template <class Lru>
struct Single {
  const SwapInSingleArgs& x;
  const CopyGeometry& copy;
  const Plan& plan;
  u32 memory;  // address of the shared memory; opaque, or the compiler would work it out from registers of the cluster everywhere anew
  u32 rank, parity;

  template <class T>
  __device__ __forceinline__ T* at(u32 offset) const {
    return static_cast<T*>(__cvta_shared_to_generic(memory + offset));
  }
  __device__ __forceinline__ u32* words(u32 offset) const { return at<u32>(offset); }
  __device__ __forceinline__ std::int32_t* token() const { return at<std::int32_t>(plan.token); }
  __device__ __forceinline__ Shared& s() const { return *at<Shared>(0); }
  __device__ __forceinline__ u32 hot() const { return static_cast<u32>(x.hot); }
  __device__ __forceinline__ u32 asked() const { return static_cast<u32>(x.top_k); }
  __device__ __forceinline__ std::int32_t loc_of(u32 slot) const { return at<std::int32_t>(plan.locs)[slot]; }
  __device__ __forceinline__ u32 slot_at(u32 p) const { return static_cast<u32>(static_cast<std::int32_t>(at<Lru>(plan.lru)[p])); }
  __device__ __forceinline__ u32 home(std::int32_t t) const { return static_cast<u32>(t) * 2654435769u >> plan.shift; }
  __device__ __forceinline__ std::int32_t selected(i64 b, u32 i) const { return x.block == 1 ? x.selection(b, i) : of_block(x, b, i); }
  __device__ __forceinline__ u32 number_of(u32 o) const { return rank_of(words(plan.first), words(plan.first_before), o); }
  __device__ __forceinline__ bool is_first(u32 o) const { return words(plan.first)[o >> 5] >> (o & 31u) & 1u; }
  /// By the number of a miss: the LRU position that it takes. They lie where the keys were.
  __device__ __forceinline__ u32* victims() const { return words(plan.key); }
  /// What this CTA moves. They lie where the values were.
  __device__ __forceinline__ Move* moves() const { return at<Move>(plan.value); }

  __device__ __forceinline__ void padding(i64 b) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < asked(); i += kThreads) x.out(b, i) = -1;
    if (threadIdx.x == 0 && x.plan.src) x.plan.count(b) = 0;
  }
  /// The other CTAs are ready behind the wait.
  __device__ __forceinline__ void nothing_to_move() const {
    if (plan.cluster == 1) return;
    cluster_wait();
    if (threadIdx.x > 0 && threadIdx.x < plan.cluster) ptx::in_block(&s(), threadIdx.x)->moves = 0;
    cluster_arrive();
  }

  /// Rows of this CTA's list, a few at a time to whichever warp comes.
  __device__ __forceinline__ void move() const {
    if (copy.skip) return;
    const bool two = copy.pairs == 2;
    const u32 work = s().moves << two;
#pragma unroll 1
    for (;;) {
      u32 first = 0;
      if (lane_id() == 0) first = atomicAdd(&s().next, kTake);
      first = __shfl_sync(kFull, first, 0);
      if (first >= work) break;
      const u32 count = min(kTake, work - first), w = first + min(lane_id(), count - 1);
      const Move m = moves()[w >> two];
      Way way{};
      if (lane_id() < count && m.dst >= 0) way = way_of(copy.pair[two ? w & 1u : 0], copy.paged, m.src, m.dst);
      go_ways(copy.vec, copy.item, way, count);
    }
  }

  __device__ __forceinline__ void stage(i64 r) const {
    constexpr u32 kLruBytes = sizeof(Lru);
    if (plan.bulk) {
      if (threadIdx.x == kThreads - 32) {
        ptx::barrier_expect(&s().staged, hot() * (8 + kLruBytes));
        ptx::bulk_load(words(plan.lru), static_cast<const Lru*>(x.lru.data) + r * x.lru.s0, hot() * kLruBytes, &s().staged);
        ptx::bulk_load(words(plan.tokens), &x.slot_tokens(r, 0), 4 * hot(), &s().staged);
        ptx::bulk_load(words(plan.locs), &x.slot_locs(r, 0), 4 * hot(), &s().staged);
      }
      return;
    }
#pragma unroll 1
    for (u32 c = threadIdx.x; c < hot(); c += kThreads) {
      async_word(words(plan.tokens) + c, &x.slot_tokens(r, c));
      async_word(words(plan.locs) + c, &x.slot_locs(r, c));
      at<Lru>(plan.lru)[c] = static_cast<const Lru*>(x.lru.data)[r * x.lru.s0 + c * x.lru.s1];
    }
  }

  /// Returns whether the tables have been asked for. The last phase of the cluster's barrier is arrived at and not waited for.
  __device__ __forceinline__ bool lead(i64 b, i64 real, i64 r, i64 seq, i64 other) const {
    const u32 H = hot(), K = asked(), warp = threadIdx.x / 32;
    bool bad = r < 0 || r >= x.request_slots;
    const bool staged = !bad, full = seq > H;
    if (!bad) {
      stage(r);
      if (threadIdx.x == kThreads - 32) async_word(&s().newest_loc, &x.slot_locs(r, H));
    }
#pragma unroll 1
    for (i64 o = threadIdx.x; o < real; o += kThreads) {
      bad |= o != b && other == r;
      if (o + kThreads < real) other = load_wide(x.requests, o + kThreads, 0);
    }
    const u32 newest = static_cast<u32>(min(seq - 1, i64{0x80000000}));  // as no token is negative
    const void* const host_row = static_cast<const i64*>(x.host_locs.data) + (staged ? r * x.host_locs.s0 : 0);
    const u32 host_end = staged ? static_cast<u32>(min(x.context, i64{INT32_MAX})) : 0;
    if (full)
#pragma unroll 1
      for (u32 i = threadIdx.x; i < K; i += kThreads) {
        const std::int32_t t = token()[i];
        u32 h = kEmpty;
        if (static_cast<u32>(t) < newest) {
          h = home(t);
#pragma unroll 1
          for (u32 old; (old = atomicCAS(words(plan.key) + h, kEmpty, static_cast<u32>(t))) != kEmpty && old != static_cast<u32>(t);)
            h = (h + 1) & plan.mask;
          atomicMin(words(plan.value) + h, kFirst | i);
        }
        words(plan.place)[i] = h;
      }
    if (staged && plan.bulk) ptx::barrier_wait(&s().staged, parity);
    async_wait();
    __syncthreads();
    bad |= staged && s().newest_loc >= copy.device_rows;
    if (!full) {
      if (staged)
#pragma unroll 1
        for (u32 c = threadIdx.x; c < H; c += kThreads) bad |= loc_of(c) >= copy.device_rows;
      bad = __syncthreads_or(bad);
      nothing_to_move();
      if (bad) {
        padding(b);
        return staged;
      }
#pragma unroll 1
      for (u32 i = threadIdx.x; i < K; i += kThreads) {
        const std::int32_t t = token()[i];
        x.out(b, i) = t >= 0 && t < seq && (x.block > 1 || i < seq) ? max(loc_of(t), -1) : -1;
      }
      if (threadIdx.x == 0 && x.plan.src) x.plan.count(b) = 0;
      return staged;
    }
    // Every LRU position asks for the token of its slot.
    if (staged) {
      u32 wrong = 0, highest = 0;
#pragma unroll 1
      for (u32 p = threadIdx.x; p - lane_id() < H; p += kThreads) {
        bool can = false;
        if (p < H) {
          const u32 named = slot_at(p), slot = min(named, H - 1);
          highest = max(highest, static_cast<u32>(loc_of(p)));
          // The list is a permutation if it names slots only, and every slot.
          wrong |= named ^ slot;
          at<std::uint8_t>(plan.named)[slot] = 1;
          const u32 t = words(plan.tokens)[slot];
          u32 h = home(static_cast<std::int32_t>(t)), key = words(plan.key)[h];
#pragma unroll 1
          for (; key != t && key != kEmpty; key = words(plan.key)[h]) h = (h + 1) & plan.mask;
          can = key == kEmpty;
          if (!can) {
            const u32 old = atomicMin(words(plan.value) + h, p);
            if (old < kFirst) {  // a damaged table: the older slot is the hit
              const u32 loser = max(old, p);
              atomicOr(words(plan.again) + (loser >> 5), 1u << (loser & 31u));
            }
          }
        }
        const u32 word = __ballot_sync(kFull, can);
        if (lane_id() == 0) words(plan.evictable)[p >> 5] = word;
      }
      bad |= wrong != 0 || static_cast<i64>(highest) >= copy.device_rows || highest > INT32_MAX;
    }
    __syncthreads();
    if (staged)
#pragma unroll 1
      for (u32 i = threadIdx.x; i < (H + 3) / 4; i += kThreads)
        bad |= words(plan.named)[i] != (H - 4 * i >= 4 ? 0x01010101u : 0x01010101u & below(8 * (H & 3u)));
        // Who misses first.
#pragma unroll 1
    for (u32 i = threadIdx.x; i - lane_id() < K; i += kThreads) {
      bool first = false;
      if (i < K) {
        const u32 h = words(plan.place)[i];
        if (h != kEmpty) {
          const u32 value = words(plan.value)[h];
          words(plan.place)[i] = value;
          if (value == (kFirst | i)) {
            const u32 t = static_cast<u32>(token()[i]);
            if (t < host_end) {
              const u64 source = static_cast<u64>(element<const i64>(host_row, plan.host_step, t));
              words(plan.source)[i] = static_cast<u32>(source);
              first = source < static_cast<u64>(copy.host_rows);
            }
          }
        }
      }
      const u32 word = __ballot_sync(kFull, first);
      if (lane_id() == 0) words(plan.first)[i >> 5] = word;
    }
    bad = __syncthreads_or(bad);
    if (bad) {
      nothing_to_move();
      padding(b);
      return staged;
    }
    if (warp == 0) {
      const u32 n = rank_sets(words(plan.first), nullptr, words(plan.first_before), plan.asked_words);
      if (lane_id() == 0) s().misses = n;
    } else if (warp == 1) {
      const u32 n = rank_sets(words(plan.evictable), words(plan.again), words(plan.evictable_before), plan.hot_words);
      if (lane_id() == 0) s().evictable = n;
    }
    __syncthreads();
    const u32 misses = s().misses, evictable = s().evictable;
    if (misses == 0)
      nothing_to_move();
    else {
#pragma unroll 1
      for (u32 w = warp; w < plan.hot_words; w += kWarps) {
        const u32 before = words(plan.evictable_before)[w], word = words(plan.evictable)[w];
        if (before >= misses) break;
        const u32 u = before + __popc(word & below(lane_id()));
        if ((word >> lane_id() & 1u) != 0 && u < misses) victims()[u] = w * 32 + lane_id();
      }
      if (plan.cluster > 1) cluster_wait();
      __syncthreads();
      if (threadIdx.x < plan.cluster)
        ptx::in_block(&s(), threadIdx.x)->moves = (misses + plan.cluster - 1 - threadIdx.x) >> plan.cluster_bits;
#pragma unroll 1
      for (u32 i = threadIdx.x; i < K; i += kThreads) {
        if (!is_first(i)) continue;
        const u32 u = number_of(i), p = victims()[u];
        words(plan.place)[i] = p;
        *ptx::in_block(moves() + (u >> plan.cluster_bits), u & (plan.cluster - 1)) = {words(plan.source)[i], loc_of(slot_at(p))};
      }
      __syncthreads();
      if (plan.cluster > 1) cluster_arrive();
    }
    ptx::let_next_start();
    // The last warps move at once, as many as there are rows for; the others write first.
    const u32 rows = ((misses + plan.cluster - 1) >> plan.cluster_bits) * static_cast<u32>(copy.pairs);
    const u32 movers = copy.skip ? 0 : min(kWarps / 2, (rows + kTake - 1) / kTake), writers = kThreads - 32 * movers;
    if (threadIdx.x >= writers) return staged;
    const void* const out_row = &x.out(b, 0);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < K; i += writers) {
      const std::int32_t t = token()[i];
      const bool first = is_first(i);
      u32 p = words(plan.place)[i];
      std::int32_t loc = -1;
      if (p >= kFirst && p != kEmpty) p = is_first(p & ~kFirst) ? victims()[number_of(p & ~kFirst)] : kEmpty;
      if (p != kEmpty) {
        const u32 slot = slot_at(p);
        loc = loc_of(slot);
        if (first) {
          const u32 u = number_of(i);
          element<std::int32_t>(&x.slot_tokens(r, 0), plan.token_step, slot) = t;
          if (x.plan.src) {
            element<i64>(&x.plan.src(b, 0), plan.src_step, u) = words(plan.source)[i];
            element<std::int32_t>(&x.plan.dst(b, 0), plan.dst_step, u) = loc;
          }
        }
      } else if (t >= 0 && static_cast<u32>(t) == newest)
        loc = max(s().newest_loc, -1);
      element<std::int32_t>(out_row, plan.out_step, i) = loc;
    }
    const void* const lru_row = static_cast<const Lru*>(x.lru.data) + r * x.lru.s0;
    if (evictable < H || misses > 0)
#pragma unroll 1
      for (u32 w = warp; w * 32 < H; w += writers / 32) {
        const u32 word = words(plan.evictable)[w], p = w * 32 + lane_id(),
                  before = words(plan.evictable_before)[w] + __popc(word & below(lane_id()));
        const bool can = word >> lane_id() & 1u;
        const u32 place = can ? before + (before < misses ? evictable : 0) - misses : evictable + (p - before);
        if (p < H) element<Lru>(lru_row, plan.lru_step, place) = at<Lru>(plan.lru)[p];
      }
    if (threadIdx.x == 0 && x.plan.src) x.plan.count(b) = static_cast<std::int32_t>(misses);
    return staged;
  }
};

template <class Lru>
__global__ void __launch_bounds__(kThreads, 1) single_kernel(const __grid_constant__ SwapInSingleArgs x,
                                                             const __grid_constant__ CopyGeometry copy, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) std::byte memory[];
  u32 base = ptx::shared(memory);
  asm volatile("" : "+r"(base));
  Single<Lru> single{x, copy, plan, base, ptx::cluster_rank(), 0};
  if (threadIdx.x == 0) {
    ptx::barrier_init(&single.s().staged, 1);
    ptx::fence_barriers();
  }
  __syncthreads();
  ptx::wait_for_previous();
  const u32 clusters = gridDim.x >> plan.cluster_bits, K = single.asked();
#pragma unroll 1
  for (i64 b = blockIdx.x >> plan.cluster_bits; b < x.batch; b += clusters) {
    if (single.rank == 0) {
      // All that hangs on nothing is under way together.
      const i64 r = load_wide(x.requests, b, 0), seq = load_wide(x.seq_lens, b, 0);
      const i64 other = load_wide(x.requests, min(static_cast<i64>(threadIdx.x), x.batch - 1), 0);
      const std::int32_t given = x.num_real != nullptr ? *x.num_real : INT32_MAX;
      const u32 i0 = threadIdx.x, i1 = i0 + kThreads;
      std::int32_t t0 = -1, t1 = -1;
      if (K > 0) t0 = single.selected(b, min(i0, K - 1)), t1 = single.selected(b, min(i1, K - 1));
        // The values lie behind the keys.
#pragma unroll 1
      for (u32 i = threadIdx.x; i < (plan.mask + 1) / 2; i += kThreads)
        single.template at<uint4>(plan.key)[i] = {kEmpty, kEmpty, kEmpty, kEmpty};
#pragma unroll 1
      for (u32 i = threadIdx.x; i < (single.hot() + 3) / 4; i += kThreads) single.words(plan.named)[i] = 0;
#pragma unroll 1
      for (u32 i = threadIdx.x; i < plan.hot_words; i += kThreads) single.words(plan.evictable)[i] = single.words(plan.again)[i] = 0;
#pragma unroll 1
      for (u32 i = threadIdx.x; i < plan.asked_words; i += kThreads) single.words(plan.first)[i] = 0;
      if (threadIdx.x == 0) single.s().next = single.s().moves = 0;
      if (i0 < K) single.token()[i0] = t0;
      if (i1 < K) single.token()[i1] = t1;
#pragma unroll 1
      for (u32 i = i1 + kThreads; i < K; i += kThreads) single.token()[i] = single.selected(b, i);
      const i64 real = min(max(static_cast<i64>(given), i64{0}), x.batch);
      if (b >= real) {
        single.padding(b);
        continue;
      }
      __syncthreads();  // all is clear
      if (plan.cluster > 1) cluster_arrive_quietly();
      if (single.lead(b, real, r, seq, other)) single.parity ^= 1;
    } else {
      if (b >= (x.num_real != nullptr ? static_cast<i64>(*x.num_real) : x.batch)) break;
      if (threadIdx.x == 0) single.s().next = 0;
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    single.move();
    if (single.rank == 0 && plan.cluster > 1) cluster_wait();
    __syncthreads();  // all are done with this memory
  }
}

Plan make_plan(const SwapInSingleArgs& x, u32 cluster, u32 entries) {
  Plan p{};
  Carve take;
  const u32 H = static_cast<u32>(x.hot), K = static_cast<u32>(x.top_k);
  p.cluster = cluster;
  while ((1u << p.cluster_bits) < cluster) ++p.cluster_bits;
  p.hot_words = (H + 4095) / 4096 * 128;
  p.asked_words = (K + 4095) / 4096 * 128;
  u32 bits = 6;
  while ((u64{1} << bits) < entries * static_cast<u64>(K)) ++bits;
  p.shift = 32 - bits;
  p.mask = (1u << bits) - 1;
  const auto step = [](i64 s1, i64 bytes) { return static_cast<u32>(s1 * bytes); };
  p.out_step = step(x.out.s1, 4), p.host_step = step(x.host_locs.s1, 8), p.token_step = step(x.slot_tokens.s1, 4);
  p.lru_step = step(x.lru.s1, x.lru.bytes), p.src_step = step(x.plan.src.s1, 8), p.dst_step = step(x.plan.dst.s1, 4);
  take(sizeof(Shared) / 4);
  p.key = take(1u << bits);
  p.value = take(1u << bits);
  p.token = take(K);
  p.source = take(K);
  p.place = take(K);
  p.tokens = take(H);
  p.locs = take(H);
  p.lru = take((static_cast<u32>(x.lru.bytes) * H + 3) / 4);
  p.named = take((H + 3) / 4);
  p.evictable = take(p.hot_words);
  p.evictable_before = take(p.hot_words);
  p.again = take(p.hot_words);
  p.first = take(p.asked_words);
  p.first_before = take(p.asked_words);
  p.bytes = take.bytes;
  const auto aligned = [](const void* p, i64 pitch) { return (reinterpret_cast<u64>(p) | static_cast<u64>(pitch)) % 16 == 0; };
  p.bulk = specstate::cuda::device_info().major >= 9 && x.hot % 8 == 0 && x.slot_tokens.s1 == 1 && x.slot_locs.s1 == 1 && x.lru.s1 == 1 &&
           aligned(x.slot_tokens.data, 4 * x.slot_tokens.s0) && aligned(x.slot_locs.data, 4 * x.slot_locs.s0) &&
           aligned(x.lru.data, x.lru.bytes * x.lru.s0);
  return p;
}
/// Steps of rows fit into 32 bits of bytes; sizes into shared memory, whatever else.
bool small(const SwapInSingleArgs& x) {
  constexpr i64 most = INT32_MAX / 8;
  for (const i64 step : {x.out.s1, x.host_locs.s1, x.slot_tokens.s1, x.lru.s1, x.plan.src.s1, x.plan.dst.s1})
    if (step < 0 || step > most) return false;
  return x.hot <= 32768 && x.top_k <= 32768;
}

}  // namespace

void run(const SwapInSingleArgs& x, Stream stream) {
  if (x.batch == 0) return;
  const CopyGeometry copy = geometry(x.copy);
  check_rows(x.op, copy);
  // One SM asks the link for less than it can carry; a few batch rows do together.
  u32 cluster = x.batch <= 2 ? 8 : x.batch <= 4 ? 4 : x.batch <= 8 ? 2 : 1;
  while (x.sm_budget > 0 && cluster > x.sm_budget) cluster /= 2;
  const u32 most = static_cast<u32>(specstate::cuda::device_info().shared_bytes - 1024);
  for (const u32 entries : {4u, 2u}) {  // of the hash table, an asked token
    if (!small(x)) break;
    Plan plan = make_plan(x, cluster, entries);
    if (plan.bytes > most) continue;
    specstate::cuda::Launch shape;
    shape.grid = clusters_for(x.batch, cluster, x.sm_budget) * cluster;
    shape.block = kThreads;
    shape.shared = plan.bytes;
    shape.cluster = cluster;
    shape.overlap = true;
    specstate::cuda::launch(x.lru.bytes == 2 ? &single_kernel<std::int16_t> : &single_kernel<std::int32_t>, shape, stream, x, copy, plan);
    return;
  }
  run_single_large(x, copy, stream);
}

}  // namespace specstate::hisparse::cuda
