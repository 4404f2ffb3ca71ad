// The multi-step swaps of swap.cu where its form does not fit (above some 10 000 occurrences or slots the lists and tables of a row are more than
// the shared memory of one CTA) or gains nothing (many requests, a small budget of SMs): the same answers, also one launch.
//
// Memory. The slot tables of the request (tokens, rows, ages: 12 bytes a slot) are read whole into shared memory by every CTA, because a
// look-up there costs 30 ns and one in a cold L2 700. The occurrences are divided: CTA c owns a slice of the [S, K] selection. What is found
// out is shared through distributed shared memory: a hash table of the missing tokens, cut into one part a CTA; the set of hit columns; the
// set of occurrences that were the first to ask for a missing token.
//
// The way of a call, with everything that is far away started as early as it can be:
//   lengths, tokens, request -> hints and slot tables -> resident: done. Else the host row, and the token goes into the hash table, where
//   its smallest occurrence stays (barrier 1) -> who is first is pushed to all CTAs (barrier 2) -> the number of a miss is a rank in that
//   set, so every CTA knows all of them; CTA c moves the misses c, c + CTAs, ... and asks the link for the first rows at once -> while
//   those are on their way every CTA chooses the victims (a histogram of the keys, a threshold, one compaction: the same work in each, so
//   nothing is exchanged) -> tables, plan, answers -> the rows land in the victims' places, the rest of the rows follow.
// A call without a miss ends behind barrier 1. Nothing is stored to global memory before barrier 2: a barrier of a cluster waits for stores.
//
// Loads into shared memory are asynchronous (cp.async): as many as wanted are under way without registers and without unrolled code,
// which matters in a kernel that runs through most of its code once.
#include <algorithm>
#include <string>

#include "cuda/launch.hpp"
#include "hisparse/cuda/missing.cuh"
#include "hisparse/cuda/rows.cuh"
#include "hisparse/cuda/swap.hpp"

namespace specstate::hisparse::cuda {
namespace {

constexpr u32 kThreads = 512, kWarps = kThreads / 32;
// While these choose the victims, the others wait for the first rows.
constexpr u32 kPolicyThreads = 256, kPolicyWarps = kPolicyThreads / 32;
constexpr u32 kTaken = 0xFFFFFFFFu;  // key of a slot that cannot be a victim
constexpr u32 kBinBits = 11, kBins = 1u << kBinBits;
constexpr u32 kMostTailMap = 2048;
using Group = Flight<uint4, 4, 2>;  // rows that a warp has under way
constexpr u32 kGroup = 4, kEarlyRows = kGroup * (kWarps - kPolicyWarps);

/// Sizes and places in shared memory, the same for all CTAs of a launch.
struct Plan {
  SlicePlan slices;
  u32 columns_words, hot_words, tail_mask, scratch_words;
  u32 lens, seen, hits, victims, victims_before, bins, tail_key, tail_column, tokens, locs, ages, scratch, scratch_before, shared, bytes;
};

template <class Args>
constexpr bool kNative = false;
template <>
constexpr bool kNative<SwapInArgs> = true;

struct Shared {                           // the fixed part
  u32 low, high, eligible, bucket, rest;  // choice of victims
  u32 missed;                             // some token of my slice was
  u32 victims, spare;                     // misses that got a hot slot, a row of the scratch
  u32 next;                               // row to move
  u32 warp_sum[kPolicyWarps];
};

/// True for the whole block. (A barrier.)
__device__ __forceinline__ bool any(bool mine) { return __syncthreads_or(mine) != 0; }

/// The request's stamps of this call.
struct Now {
  u32 call;                // native: its number; sglang's: its epoch
  u32 epoch_mask, origin;  // sglang's
  bool restart;            // native
};

template <class Args, bool kTables>
struct Swap : Slices {
  const Args& x;
  const CopyGeometry& copy;
  const Plan& plan;
  Shared& s;
  i64 b, r;
  Now now;

  __device__ __forceinline__ u32 occurrences() const { return static_cast<u32>(x.steps * x.top_k); }
  __device__ __forceinline__ u32 hot() const { return static_cast<u32>(x.hot); }
  __device__ __forceinline__ u32 mine() const { return Slices::mine(occurrences()); }
  __device__ __forceinline__ u32 step_of(u32 occurrence) const { return plan.slices.by_step(occurrence); }
  __device__ __forceinline__ u32 first_step() const { return step_of(min(occurrence(0), occurrences())); }
  __device__ __forceinline__ void answer(u32 occurrence, std::int32_t loc) const {
    const u32 step = step_of(occurrence);
    x.out(b, step, occurrence - step * static_cast<u32>(x.top_k)) = loc;
  }
  __device__ __forceinline__ std::int32_t slot_token(u32 c) const {
    if constexpr (kTables) return at<std::int32_t>(plan.tokens)[c];
    return x.slot_tokens(r, c);
  }
  __device__ __forceinline__ std::int32_t slot_loc(u32 c) const {
    if constexpr (kTables) return at<std::int32_t>(plan.locs)[c];
    return x.slot_locs(r, c);
  }
  __device__ __forceinline__ const std::int32_t* age_of(u32 c) const {
    if constexpr (kNative<Args>)
      return &x.stamps(r, c);
    else
      return &x.policy(r + 1, c);
  }
  __device__ __forceinline__ static void set_bit(u32* set, u32 bit) { atomicOr(set + (bit >> 5), 1u << (bit & 31u)); }
  __device__ __forceinline__ static bool has_bit(const u32* set, u32 bit) { return set[bit >> 5] >> (bit & 31u) & 1u; }

  __device__ __forceinline__ void clear() const {
    Slices::clear();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < plan.columns_words; i += kThreads) words(plan.seen)[i] = 0;
    if (plan.tail_mask)
#pragma unroll 1
      for (u32 i = threadIdx.x; i <= plan.tail_mask; i += kThreads) words(plan.tail_key)[i] = words(plan.tail_column)[i] = kEmpty;
    if (threadIdx.x == 0) {
      s.low = kTaken;
      s.high = s.eligible = s.missed = s.victims = s.spare = 0;
      s.next = kEarlyRows;
    }
  }

  __device__ void padding(std::int32_t sentinel) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < mine(); i += kThreads) answer(occurrence(i), sentinel);
    if (rank != 0 || threadIdx.x != 0) return;
    if (x.plan.src) x.plan.count(b) = 0;
    if constexpr (kNative<Args>) {
      if (x.unique_misses) x.unique_misses(b) = 0;
      if (x.unique_hits) x.unique_hits(b) = 0;
    }
  }

  // ---------------------------------------------------------------------------------------------------------- fetching

  /// My slice of the selection, and the lengths of its steps.
  __device__ __forceinline__ void fetch_selection() const {
    const u32 n = mine(), first = first_step(), last = n ? step_of(occurrence(n - 1)) : first;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += kThreads) {
      const u32 o = occurrence(i), step = step_of(o);
      async_word(token() + i, &x.tokens(b, step, o - step * static_cast<u32>(x.top_k)));
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; first + i <= last && n; i += kThreads)
      at<std::int32_t>(plan.lens)[i] = static_cast<std::int32_t>(min(max(load_wide(x.seq_lens, b, first + i), i64{0}), i64{INT32_MAX}));
    ptx::copy_async_commit();
  }

  __device__ __forceinline__ void fetch_tables() const {
    if constexpr (kTables) {
      const u32 W = static_cast<u32>(x.hot + x.tail);
#pragma unroll 1
      for (u32 c = threadIdx.x; c < W; c += kThreads) {
        async_word(at<std::int32_t>(plan.tokens) + c, &x.slot_tokens(r, c));
        async_word(at<std::int32_t>(plan.locs) + c, &x.slot_locs(r, c));
        if (c < hot()) async_word(at<std::int32_t>(plan.ages) + c, age_of(c));
      }
    }
    ptx::copy_async_commit();
  }

  /// Where each token of my slice was put last: the hint itself, or (int16) the word that it lies in, into code().
  __device__ __forceinline__ void fetch_hints() const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < mine(); i += kThreads) {
      const std::int32_t t = token()[i];
      if constexpr (kNative<Args>) {
        if (t < 0 || t >= x.context) continue;
        const i64 where = r * x.token_slots.s0 + t * x.token_slots.s1;
        if (x.token_slots.bytes == 4)
          async_word(code() + i, static_cast<const std::int32_t*>(x.token_slots.data) + where);
        else
          code()[i] = static_cast<u32>(static_cast<const std::int16_t*>(x.token_slots.data)[where]);
      } else {
        if (t < 0) continue;
        const i64 e0 = x.index(r, 0, layout::bank_place(0, static_cast<u32>(t), x.hash_size)),
                  e1 = x.index(r, 1, layout::bank_place(1, static_cast<u32>(t), x.hash_size));
        const i64 e = layout::entry_token(e0) == static_cast<u32>(t) ? e0 : e1;
        code()[i] = e >= 0 && layout::entry_token(e) == static_cast<u32>(t) && layout::entry_slot(e) < x.hot
                        ? static_cast<u32>(layout::entry_slot(e))
                        : kEmpty;
      }
    }
  }

  /// Looks at the columns that this thread fetched: true if one has a row outside the pool. Puts the tail into its map.
  __device__ __forceinline__ bool judge_tables() const {
    const u32 W = static_cast<u32>(x.hot + x.tail);
    bool bad = false;
#pragma unroll 1
    for (u32 c = threadIdx.x; c < W; c += kThreads) {
      const std::int32_t loc = slot_loc(c);
      bad |= loc >= copy.device_rows;
      if (c < hot() || plan.tail_mask == 0) continue;
      const std::int32_t t = slot_token(c);
      if (t < 0 || loc < 0) continue;
      u32 p = static_cast<u32>(t) & plan.tail_mask;
#pragma unroll 1
      for (u32 old; (old = atomicCAS(words(plan.tail_key) + p, kEmpty, static_cast<u32>(t))) != kEmpty && old != static_cast<u32>(t);)
        p = (p + 1) & plan.tail_mask;
      atomicMin(words(plan.tail_column) + p, c);
    }
#pragma unroll 1
    for (u32 c = threadIdx.x; c < x.scratch; c += kThreads) bad |= x.scratch_locs(r, c) >= copy.device_rows;
    return bad;
  }

  // ---------------------------------------------------------------------------------------------------------- resolve

  /// The first tail column with a row that holds t, or kEmpty.
  __device__ __forceinline__ u32 in_tail(std::int32_t t) const {
    if (plan.tail_mask == 0) {
#pragma unroll 1
      for (u32 c = hot(); c < x.hot + x.tail; ++c)
        if (slot_token(c) == t && slot_loc(c) >= 0) return c;
      return kEmpty;
    }
#pragma unroll 1
    for (u32 p = static_cast<u32>(t) & plan.tail_mask;; p = (p + 1) & plan.tail_mask) {
      const u32 key = words(plan.tail_key)[p];
      if (key == static_cast<u32>(t)) return words(plan.tail_column)[p];
      if (key == kEmpty) return kEmpty;
    }
  }
  /// The column that holds the token t of step length n, or kEmpty; h is what the hint says.
  __device__ __forceinline__ u32 column_of(std::int32_t t, std::int32_t n, u32 h) const {
    if (x.tail > 0 && n - t <= x.tail)
      if (const u32 c = in_tail(t); c != kEmpty) return c;
    if (!kNative<Args> && t < x.hot && slot_token(t) == t) return t;
    return h < hot() && slot_token(h) == t ? h : kEmpty;
  }

  /// Afterwards place() is kEmpty where code() is the answer, else the place of a missing token in the table; code() is its host row.
  __device__ __forceinline__ void resolve() const {
    const u32 n = mine(), first = first_step();
    u32 candidates = 0;  // bit k: the k-th occurrence of this thread
#pragma unroll 1
    for (u32 i = threadIdx.x, k = 0; i < n; i += kThreads, ++k) {
      const std::int32_t t = token()[i], length = at<std::int32_t>(plan.lens)[step_of(occurrence(i)) - first];
      const u32 h = code()[i];
      std::int32_t loc = -1;
      if (t >= 0 && t < length) {
        const u32 column = column_of(t, length, kNative<Args> && t >= x.context ? kEmpty : h);
        if (column != kEmpty) {
          set_bit(words(plan.seen), column);
          loc = max(slot_loc(column), -1);
        } else {
          candidates |= 1u << k;
          if (t < x.context) {  // the host row: low word into code(), high word into place()
            const u32* row = wide_at(x.host_locs, r, t);
            async_word(code() + i, row);
            if (x.host_locs.bytes == 8) async_word(place() + i, row + 1);
            continue;
          }
        }
      }
      code()[i] = static_cast<u32>(loc);
      place()[i] = kEmpty;
    }
    async_wait();
    cluster_wait();  // all parts of the table are empty, all tokens in their places
#pragma unroll 1
    for (; candidates != 0; candidates &= candidates - 1) {
      const u32 i = threadIdx.x + (__ffs(candidates) - 1) * kThreads;
      const std::int32_t t = token()[i];
      const u32 low = code()[i], high = x.host_locs.bytes == 8 ? place()[i] : static_cast<u32>(static_cast<std::int32_t>(low) >> 31);
      const bool on_host = high == 0 && low < copy.host_rows;
      code()[i] = on_host ? low : kEmpty;
      place()[i] = kEmpty;
      if (!on_host && kNative<Args>) continue;  // sglang's index may have lost a resident token that has no host row
      const u32 p = home(t);
      place()[i] = finish_insert(p, try_insert(p, occurrence(i)), t, occurrence(i));
      s.missed = 1;
    }
  }

  /// sglang's state: a token that its index has lost may still sit in a slot. Every slot asks whether it is missed.
  __device__ __forceinline__ void ask_slots() const {
#pragma unroll 1
    for (u32 c = rank * kThreads + threadIdx.x; c < hot(); c += plan.slices.cluster * kThreads) {
      const std::int32_t t = slot_token(c);
      if (t < 0 || static_cast<u32>(t) == c) continue;
      const u32 p = find(t, [&](u32 slot, std::int32_t token) { return slot_token(slot) == token; });
      if (p != kEmpty) make_resident(p, c);
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (u32 i = threadIdx.x; i >> plan.slices.part_bits == 0; i += kThreads) {  // what was found is hit
      const u32 value = words(plan.slices.table)[i];
      if (value != kEmpty && (value & kResident)) set_bit(words(plan.seen), value & ~kResident);
    }
    cluster_arrive();
    cluster_wait();
  }

  __device__ __forceinline__ bool any_missed() const {
    return any(threadIdx.x < plan.slices.cluster && *ptx::in_block(&s.missed, threadIdx.x) != 0);
  }
  /// The distinct hits of all CTAs.
  __device__ __forceinline__ void gather_hits() const {
#pragma unroll 1
    for (u32 w = threadIdx.x; w < plan.columns_words; w += kThreads) {
      u32 all = 0;
#pragma unroll 1
      for (u32 c = 0; c < plan.slices.cluster; ++c) all |= *ptx::in_block(words(plan.seen) + w, c);
      words(plan.hits)[w] = all;
    }
  }

  /// Which of my occurrences were the first to miss their token, to all CTAs. place() becomes that first occurrence.
  __device__ __forceinline__ void find_first() const {
    const u32 n = mine();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < plan.slices.slice; i += kThreads) {
      bool first = false;
      const u32 p = i < n ? place()[i] : kEmpty;
      if (p != kEmpty) {
        u32 value = *entry(p);
        if constexpr (!kNative<Args>) {
          std::int32_t loc = -1;
          const bool resident = value & kResident;
          if (resident) loc = max(slot_loc(value & ~kResident), -1);
          if (resident || code()[i] == kEmpty) {  // or nowhere at all
            value = kEmpty;
            code()[i] = static_cast<u32>(loc);
          }
        }
        place()[i] = value;
        first = value == occurrence(i);
      }
      push_first(occurrence(i), first);
    }
  }

  // ---------------------------------------------------------------------------------------------------------- victims

  __device__ __forceinline__ u32 slot_of(u32 ring) const {
    if constexpr (kNative<Args>) return ring;
    const u32 c = now.origin + ring;
    return c >= hot() ? c - hot() : c;
  }
  /// The key of ring position p, or kTaken.
  __device__ __forceinline__ u32 key(u32 p) const {
    if (p >= hot()) return kTaken;
    const u32 c = slot_of(p);
    if (has_bit(words(plan.hits), c) || slot_loc(c) < 0) return kTaken;
    if (slot_token(c) < 0) return 0;
    u32 age;
    if constexpr (kTables)
      age = words(plan.ages)[c];
    else
      age = static_cast<u32>(*age_of(c));
    if constexpr (kNative<Args>) return now.restart ? 1u : min(max(age, 1u), kTaken - 1);
    return now.epoch_mask - ((now.call - age) & now.epoch_mask) + 1;
  }
  /// The same once measure() has looked at all.
  __device__ __forceinline__ u32 known_key(u32 p) const {
    if constexpr (kTables) return p < hot() ? words(plan.ages)[slot_of(p)] : kTaken;
    return key(p);
  }
  __device__ __forceinline__ static void policy_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kPolicyThreads) : "memory"); }
  __device__ __forceinline__ void measure() const {
    u32 low = kTaken, high = 0, count = 0;
#pragma unroll 1
    for (u32 p = threadIdx.x; p < hot(); p += kPolicyThreads) {
      const u32 k = key(p);
      if constexpr (kTables) words(plan.ages)[slot_of(p)] = k;
      if (k == kTaken) continue;
      low = min(low, k);
      high = max(high, k);
      ++count;
    }
    low = __reduce_min_sync(kFull, low);
    high = __reduce_max_sync(kFull, high);
    count = __reduce_add_sync(kFull, count);
    if (lane_id() == 0) {
      atomicMin(&s.low, low);
      atomicMax(&s.high, high);
      atomicAdd(&s.eligible, count);
    }
  }

  /// The min(wanted, eligible) smallest keys, ties in ring order, as a set with ranks. Returns how many.
  __device__ __forceinline__ u32 choose_victims(u32 wanted) const {
    const u32 warp = threadIdx.x / 32;
    u32* const bins = words(plan.bins);
    measure();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < kBins; i += kPolicyThreads) bins[i] = 0;
    policy_barrier();
    const u32 eligible = s.eligible, n = min(wanted, eligible);
    u32 low = kTaken, rest = 0;  // take all keys below low, and `rest` of those equal to it
    if (n < eligible) {
      low = s.low;
      u32 high = s.high;
      rest = n;
#pragma unroll 1
      for (u32 shift = 1; shift > 0;) {
        const u32 range = high - low, width = 32 - __clz(range);
        shift = width > kBinBits ? width - kBinBits : 0;
#pragma unroll 1
        for (u32 w = warp; w < plan.hot_words; w += kPolicyWarps) {
          const u32 k = known_key(w * 32 + lane_id());
          const bool in = k != kTaken && k - low <= range;
          const u32 bin = in ? (k - low) >> shift : kBins;
          const u32 same = __match_any_sync(kFull, bin);  // few distinct ages: one addition for all lanes of one
          if (in && (same & below(lane_id())) == 0) atomicAdd(bins + bin, __popc(same));
        }
        policy_barrier();
        constexpr u32 kEach = kBins / kPolicyThreads;
        const u32 first = threadIdx.x * kEach;
        u32 sum = 0, total;
        for (u32 i = 0; i < kEach; ++i) sum += bins[first + i];
        u32 before = warp_sum_before(sum, total);
        if (lane_id() == 0) s.warp_sum[warp] = total;
        policy_barrier();
        before += __reduce_add_sync(kFull, lane_id() < warp ? s.warp_sum[lane_id()] : 0);
        if (before < rest && rest <= before + sum) {
          u32 i = first;
          for (; before + bins[i] < rest; ++i) before += bins[i];
          s.bucket = i;
          s.rest = rest - before;
        }
        policy_barrier();
        low += s.bucket << shift;
        rest = s.rest;
        high = low + min(high - low, (1u << shift) - 1);
        if (shift == 0) break;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < kBins; i += kPolicyThreads) bins[i] = 0;
        policy_barrier();
      }
    }
    u32 *const victims = words(plan.victims), *const equal = words(plan.victims_before);
#pragma unroll 1
    for (u32 w = warp; w < plan.hot_words; w += kPolicyWarps) {
      const u32 k = known_key(w * 32 + lane_id());
      const u32 less = __ballot_sync(kFull, k < low), same = __ballot_sync(kFull, k == low && k != kTaken);
      if (lane_id() == 0) {
        victims[w] = less;
        equal[w] = same;
      }
    }
    policy_barrier();
    if (warp == 0) {
      const u32 each = (plan.hot_words + 31) / 32, first = min(lane_id() * each, plan.hot_words), last = min(first + each, plan.hot_words);
      u32 sum = 0, total;
#pragma unroll 1
      for (u32 w = first; w < last; ++w) sum += __popc(equal[w]);
      u32 before = warp_sum_before(sum, total);
#pragma unroll 1
      for (u32 w = first; w < last; ++w) {
        const u32 have = __popc(equal[w]), take = before < rest ? min(rest - before, have) : 0;
        before += have;
        victims[w] |= take == have ? equal[w] : equal[w] & below(nth_bit(equal[w], take));
      }
      __syncwarp();
      rank_words(victims, equal, plan.hot_words);
    }
    if (warp == 1 && plan.scratch_words > 0 && wanted > n) {  // overflow: the rows of the scratch that exist
#pragma unroll 1
      for (u32 w = 0; w < plan.scratch_words; ++w) {
        const u32 c = w * 32 + lane_id();
        const u32 word = __ballot_sync(kFull, c < x.scratch && x.scratch_locs(r, c) >= 0);
        if (lane_id() == 0) words(plan.scratch)[w] = word;
      }
      __syncwarp();
      rank_words(words(plan.scratch), words(plan.scratch_before), plan.scratch_words);
    }
    policy_barrier();
    return n;
  }

  /// The hot slot that miss u < victims takes.
  __device__ __forceinline__ u32 victim(u32 u) const {
    return slot_of(select_bit(words(plan.victims), words(plan.victims_before), plan.hot_words, u));
  }
  __device__ __forceinline__ std::int32_t spare_row(u32 u) const {
    return x.scratch_locs(r, select_bit(words(plan.scratch), words(plan.scratch_before), plan.scratch_words, u));
  }

  // ------------------------------------------------------------------------------------- sglang's index, kept for its kernel

  __device__ __forceinline__ bool live(i64 e) const {
    if (e < 0 || layout::entry_slot(e) >= x.hot) return false;
    const auto* token = reinterpret_cast<const volatile std::int32_t*>(&x.slot_tokens(r, layout::entry_slot(e)));
    return static_cast<u32>(*token) == layout::entry_token(e);
  }
  __device__ __forceinline__ unsigned long long* index_at(int bank, u32 token) const {
    return reinterpret_cast<unsigned long long*>(&x.index(r, bank, layout::bank_place(bank, token, x.hash_size)));
  }
  __device__ __forceinline__ void index_erase(u32 slot, std::int32_t token) const {
    const auto e = static_cast<unsigned long long>(layout::index_entry(slot, static_cast<u32>(token)));
#pragma unroll 1
    for (int bank = 0; bank < 2; ++bank)
      if (atomicCAS(index_at(bank, static_cast<u32>(token)), e, static_cast<unsigned long long>(layout::kIndexDeleted)) == e) return;
  }
  __device__ __forceinline__ bool index_insert(u32 slot, std::int32_t token) const {
    i64 e = layout::index_entry(slot, static_cast<u32>(token));
#pragma unroll 1
    for (int bank = 0; bank < 2; ++bank) {
      unsigned long long* const place = index_at(bank, layout::entry_token(e));
      for (i64 there = static_cast<i64>(*reinterpret_cast<volatile unsigned long long*>(place));
           !live(there) || layout::entry_token(there) == layout::entry_token(e);) {
        const auto old = static_cast<i64>(atomicCAS(place, static_cast<unsigned long long>(there), static_cast<unsigned long long>(e)));
        if (old == there) return true;
        there = old;
      }
    }
#pragma unroll 1
    for (int kick = 0, bank = 0; kick < 64; ++kick, bank ^= 1) {
      e = static_cast<i64>(atomicExch(index_at(bank, layout::entry_token(e)), static_cast<unsigned long long>(e)));
      if (!live(e)) return true;
    }
    return false;
  }

  // ---------------------------------------------------------------------------------------------------------- commit
  // CTA c serves the misses c, c + CTAs, ...: the j-th of them has its host row in sources()[j] and its device row in targets()[j],
  // where the hash table was (it has done its work at barrier 2).

  __device__ __forceinline__ u32* sources() const { return words(plan.slices.table); }
  __device__ __forceinline__ std::int32_t* targets() const { return at<std::int32_t>(plan.slices.targets); }
  __device__ __forceinline__ u32 number(u32 j) const { return j * plan.slices.cluster + rank; }

  __device__ __forceinline__ void commit(u32 misses, u32 victims, u32 spare) const {
#pragma unroll 1
    for (u32 j = threadIdx.x; number(j) < misses; j += kPolicyThreads) {
      const u32 u = number(j);
      std::int32_t loc = -1;
      if (u < victims) {
        const u32 slot = victim(u);
        const std::int32_t t = token_of(first_of(u));
        loc = slot_loc(slot);
        if constexpr (kNative<Args>) {
          x.stamps(r, slot) = layout::load_stamp(static_cast<std::int32_t>(now.call));
          x.token_slots.store(r, t, slot);
        } else {
          x.policy(r + 1, slot) = static_cast<std::int32_t>(now.call);
          if (slot_token(slot) >= 0) index_erase(slot, slot_token(slot));
        }
        x.slot_tokens(r, slot) = t;
      } else if (u - victims < spare) {
        loc = spare_row(u - victims);
      }
      targets()[j] = loc;
      if (x.plan.src && loc >= 0) {
        x.plan.src(b, u) = sources()[j];
        x.plan.dst(b, u) = loc;
      }
    }
  }

  /// By `threads` threads, of which this is number `me`.
  __device__ __forceinline__ void answer_hits(u32 me, u32 threads) const {
#pragma unroll 1
    for (u32 i = me; i < mine(); i += threads)
      if (place()[i] == kEmpty) answer(occurrence(i), static_cast<std::int32_t>(code()[i]));
  }
  __device__ __forceinline__ void answer_misses(u32 me, u32 threads) const {
#pragma unroll 1
    for (u32 i = me; i < mine(); i += threads) {
      if (place()[i] == kEmpty) continue;
      const u32 u = number_of(place()[i]);
      answer(occurrence(i), u < s.victims ? slot_loc(victim(u)) : u - s.victims < s.spare ? spare_row(u - s.victims) : -1);
    }
  }

  __device__ __forceinline__ void index_loaded() const {
    auto& generation = x.scratch_state(0, layout::counter_column(layout::Counter::kGeneration, x.counter_requests, r));
#pragma unroll 1
    for (u32 j = threadIdx.x; number(j) < s.victims; j += kPolicyThreads)
      if (!index_insert(victim(number(j)), token_of(first_of(number(j))))) atomicOr(reinterpret_cast<u32*>(&generation), layout::kDegraded);
  }

  /// What is left of the state once the misses are in: stamps of the hits, counters.
  /// By `threads` threads (whole warps), of which this is number `me`.
  __device__ __forceinline__ void finish(u32 misses, u32 me, u32 threads) const {
#pragma unroll 1
    for (u32 c = rank * threads + me; c < hot(); c += plan.slices.cluster * threads) {
      const bool hit = has_bit(words(plan.hits), c);
      if constexpr (kNative<Args>) {
        if (hit)
          x.stamps(r, c) = layout::hit_stamp(static_cast<std::int32_t>(now.call));
        else if (now.restart && !(misses > 0 && has_bit(words(plan.victims), c)))
          x.stamps(r, c) = 0;  // once in 2^30 calls the order of use is forgotten
      } else if (hit) {
        x.policy(r + 1, c) = static_cast<std::int32_t>(now.call);
      }
    }
    if (rank != 0 || me >= 32) return;
    u32 found = 0;
#pragma unroll 1
    for (u32 w = lane_id(); w < plan.columns_words; w += 32) found += __popc(words(plan.hits)[w]);
    found = __reduce_add_sync(kFull, found);
    if (lane_id() != 0) return;
    if (x.plan.src) x.plan.count(b) = static_cast<std::int32_t>(s.victims + s.spare);
    if constexpr (kNative<Args>) {
      x.clock(r) = static_cast<std::int32_t>(now.call);
      if (x.unique_misses) x.unique_misses(b) = static_cast<std::int32_t>(misses);
      if (x.unique_hits) x.unique_hits(b) = static_cast<std::int32_t>(found);
    } else {
      x.policy(0, r) = static_cast<std::int32_t>(layout::PolicyWord(x.hot).pack((now.origin + s.victims) % hot(), now.call));
      const auto counter = [&](layout::Counter bank) -> std::int32_t& {
        return x.scratch_state(0, layout::counter_column(bank, x.counter_requests, r));
      };
      counter(layout::Counter::kPublishedMisses) = static_cast<std::int32_t>(misses);
      counter(layout::Counter::kRunningMisses) = 0;
      counter(layout::Counter::kRunningHits) = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------- a row

  __device__ __forceinline__ bool read_clock() {
    if constexpr (kNative<Args>) {
      const std::int32_t c = x.clock(r);
      now.restart = c == layout::kMaxClock;
      now.call = now.restart ? 1u : static_cast<u32>(c) + 1;
      return c >= 0 && c <= layout::kMaxClock;
    } else {
      const layout::PolicyWord word(x.hot);
      const u32 control = static_cast<u32>(x.policy(0, r));
      now.call = word.next_epoch(control);
      now.epoch_mask = word.epoch_mask();
      now.origin = word.cursor(control) % hot();
      return true;
    }
  }

  __device__ __forceinline__ void row(i64 batch_row, i64 real) {
    b = batch_row;
    if (b >= real) {
      padding(kNative<Args> ? -1 : 0);
      return;
    }
    fetch_selection();
    r = load_wide(x.requests, b, 0);
    bool bad = r < 0 || r >= x.request_slots;
    if (!bad) {
      fetch_tables();
#pragma unroll 1
      for (i64 other = threadIdx.x; other < real; other += kThreads) bad |= other != b && load_wide(x.requests, other, 0) == r;
      bad |= !read_clock();
      clear();
      ptx::copy_async_wait<1>();  // the tokens
      fetch_hints();
      __syncthreads();  // the tail's map is clear
      async_wait();
      bad |= judge_tables();
    }
    if (any(bad)) {
      async_wait();
      padding(-1);
      return;
    }
    cluster_arrive();
    resolve();
    cluster_arrive();
    cluster_wait();  // 1
    const bool missed = any_missed();
    if constexpr (!kNative<Args>)
      if (missed) ask_slots();
    gather_hits();
    if constexpr (!kNative<Args>)
      if (rank == 0 && threadIdx.x == 0) {  // before the index can be found full
        auto& generation = x.scratch_state(0, layout::counter_column(layout::Counter::kGeneration, x.counter_requests, r));
        generation = static_cast<std::int32_t>(layout::next_generation(static_cast<u32>(generation)));
      }
    u32 misses = 0;
    const u32 warp = threadIdx.x / 32;
    if (missed) {
      find_first();
      cluster_arrive();
      cluster_wait();  // 2
      if (warp == 0) rank_first();
      __syncthreads();
      misses = Slices::misses();
    }
    if (misses == 0) {
      if (!missed) __syncthreads();  // the hits are gathered
      answer_hits(threadIdx.x, kThreads);
      finish(0, threadIdx.x, kThreads);
      return;
    }
#pragma unroll 1
    for (u32 j = threadIdx.x; number(j) < misses; j += kThreads) sources()[j] = host_row_of(first_of(number(j)));
    __syncthreads();
    const u32 moves = misses > rank ? (misses - rank + plan.slices.cluster - 1) / plan.slices.cluster : 0;  // of this CTA
    const u32 pieces = static_cast<u32>(copy.item) / 16;
    const bool fast = copy.vec == 16 && copy.item <= Group::kCover && copy.pairs == 1 && !copy.paged && !copy.skip;
    const auto source = [&](u32 j) { return lane_id() < kGroup && j < moves ? host_at(copy, 0, sources()[j]) : nullptr; };
    const auto target = [&](u32 j) {
      return lane_id() < kGroup && j < moves && targets()[j] >= 0 ? device_at(copy, 0, targets()[j]) : nullptr;
    };
    const u32 early = (warp - kPolicyWarps) * kGroup + lane_id();
    Group group;
    if (warp < kPolicyWarps) {
      const u32 victims = choose_victims(misses);
      const u32 spare =
          plan.scratch_words > 0 && misses > victims ? min(misses - victims, words(plan.scratch_before)[plan.scratch_words]) : 0;
      if constexpr (!kTables) {  // the keys were read from where the next lines write
        cluster_arrive();
        cluster_wait();
      }
      commit(misses, victims, spare);
      if (threadIdx.x == 0) {
        s.victims = victims;
        s.spare = spare;
      }
    } else {
      if (fast) group.load(source(early), pieces);
      answer_hits(threadIdx.x - kPolicyThreads, kThreads - kPolicyThreads);
      if constexpr (!kTables) {
        cluster_arrive();
        cluster_wait();
      }
    }
    __syncthreads();
    if constexpr (!kNative<Args>) {
      cluster_arrive();  // all slots hold their new tokens
      cluster_wait();
    }
    if (warp < kPolicyWarps) {
      if constexpr (!kNative<Args>) index_loaded();
    } else {
      if (fast) group.store(source(early), target(early), pieces);
      answer_misses(threadIdx.x - kPolicyThreads, kThreads - kPolicyThreads);
      finish(misses, threadIdx.x - kPolicyThreads, kThreads - kPolicyThreads);
    }
    ptx::let_next_start();
    // The rest of the rows, to whichever warp is free.
    const u32 step = fast ? kGroup : 32;
    if (copy.skip) return;
#pragma unroll 1
    for (;;) {
      u32 first = 0;
      if (lane_id() == 0) first = atomicAdd(&s.next, step);
      first = __shfl_sync(kFull, first, 0);
      if (!fast) first -= kEarlyRows;
      if (first >= moves) break;
      const u32 j = first + lane_id();
      if (fast) {
        const std::byte* const from = source(j);
        Group group;
        group.load(from, pieces);
        group.store(from, target(j), pieces);
      } else {
        move_pool_rows(copy, j < moves ? sources()[j] : 0, j < moves ? targets()[j] : -1, min(32u, moves - first));
      }
    }
  }
};

template <class Args, bool kTables>
__global__ void __launch_bounds__(kThreads, 1)
    swap_kernel(const __grid_constant__ Args x, const __grid_constant__ CopyGeometry copy, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) std::byte memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  ptx::wait_for_previous();
  i64 real = x.batch;
  if (x.num_real) real = min(max(static_cast<i64>(*x.num_real), i64{0}), x.batch);
  Swap<Args, kTables> swap{{plan.slices, memory, ptx::cluster_rank()}, x, copy, plan, s, 0, 0, {}};
  const u32 clusters = gridDim.x / plan.slices.cluster;
  for (i64 b = blockIdx.x / plan.slices.cluster; b < x.batch; b += clusters) {
    swap.row(b, real);
    cluster_leave();  // nobody reads what the next row will clear, or a CTA that is gone
  }
}

// -------------------------------------------------------------------------------------------------------------- launch

template <class Args>
Plan make_plan(const Args& x, const CopyGeometry& copy, u32 cluster, bool tables) {
  Plan p{};
  const u32 O = static_cast<u32>(x.steps * x.top_k), W = static_cast<u32>(x.hot + x.tail), H = static_cast<u32>(x.hot);
  Carve take;
  p.shared = take(sizeof(Shared) / 4);
  p.slices = plan_slices(take, cluster, O, kNative<Args> ? x.context : O, static_cast<u32>(x.top_k));
  p.columns_words = (W + 31) / 32;
  p.hot_words = (H + 31) / 32;
  if (x.tail > 0 && x.tail <= kMostTailMap) {
    p.tail_mask = 1;
    while (p.tail_mask + 1 < 2 * static_cast<u32>(x.tail)) p.tail_mask = 2 * p.tail_mask + 1;
  }
  p.scratch_words = static_cast<u32>((x.scratch + 31) / 32);
  p.lens = take(static_cast<u32>(std::min<i64>(x.steps, x.top_k > 0 ? p.slices.slice / x.top_k + 2 : 1)));
  p.seen = take(p.columns_words);
  p.hits = take(p.columns_words);
  p.victims = take(p.hot_words);
  p.victims_before = take(p.hot_words + 1);
  p.bins = take(kBins);
  p.tail_key = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.tail_column = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.scratch = take(p.scratch_words);
  p.scratch_before = take(p.scratch_words + 1);
  if (tables) {
    p.tokens = take(W);
    p.locs = take(W);
    p.ages = take(H);
  }
  p.bytes = take.bytes;
  return p;
}

template <class Args>
void run_swap(const Args& x, Stream stream) {
  const CopyGeometry copy = geometry(x.copy);
  const u32 most = static_cast<u32>(specstate::cuda::device_info().shared_bytes - 1024);
  u32 cluster = cluster_for(x.batch, x.sm_budget);
  Plan plan = make_plan(x, copy, cluster, true);
  while (plan.bytes > most && cluster < 8) plan = make_plan(x, copy, cluster *= 2, true);
  const bool tables = plan.bytes <= most;
  if (!tables) plan = make_plan(x, copy, cluster, false);
  if (plan.bytes > most) too_large(x.op, x.hot, x.steps * x.top_k);
  specstate::cuda::Launch shape;
  shape.grid = clusters_for(x.batch, cluster, x.sm_budget) * cluster;
  shape.block = kThreads;
  shape.shared = plan.bytes;
  shape.cluster = cluster;
  shape.overlap = true;
  specstate::cuda::launch(tables ? &swap_kernel<Args, true> : &swap_kernel<Args, false>, shape, stream, x, copy, plan);
}

}  // namespace

void run_large(const SwapInArgs& args, Stream stream) { run_swap(args, stream); }
void run_large(const SpecSwapArgs& args, Stream stream) { run_swap(args, stream); }

}  // namespace specstate::hisparse::cuda
