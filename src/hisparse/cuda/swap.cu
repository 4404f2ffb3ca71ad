// Both multi-step swaps, one launch: a cluster of CTAs resolves one batch row, chooses the victims and moves the rows.
//
// What the time goes into, and hence the shape. A warp's scattered access costs a cycle a lane wherever it goes, a barrier of a cluster
// that publishes 500 to 900, an access to a peer's shared memory 1 300 when every thread makes one. So each CTA has the request's slot
// tables in its own shared memory (bulk copies: no instructions), the occurrences are dealt to the CTAs 32 at a time, and the CTAs talk to
// each other exactly once: each sends every other one box with what it saw hit and the tokens that it misses (bulk copies too; a
// barrier in the receiver's shared memory counts their bytes). From then on all of them know the same and do the same:
//
//   tokens, lengths, request -> hints, and the slot tables into shared memory -> resident: answered. Else the host row, and the token goes
//   into the list in my box -> the boxes cross -> a hash table of all missing tokens, where the smallest occurrence of each stays ->
//   a CTA moves the rows that its own occurrences asked for first, and asks the link for them now -> while those are on their way half of
//   the warps number the misses (ranks in the set of first occurrences), choose the victims (a histogram of the keys, a threshold, one
//   compaction), write tables, plan and answers -> the rows land in the victims' places, the rest of the rows follow.
//
// A call without a miss ends behind the boxes. Nobody writes a table before all have sent their boxes, hence have read the tables.
#include <algorithm>
#include <string>

#include "cuda/launch.hpp"
#include "hisparse/cuda/missing.cuh"
#include "hisparse/cuda/rows.cuh"
#include "hisparse/cuda/swap.hpp"

namespace specstate::hisparse::cuda {
namespace {

constexpr u32 kThreads = 512;

constexpr u32 kWarps = kThreads / 32;
// While these choose the victims, the others bring the first rows.
constexpr u32 kPolicyThreads = 256, kPolicyWarps = kPolicyThreads / 32;
constexpr u32 kTaken = 0xFFFFFFFFu;  // key of a slot that cannot be a victim
constexpr u32 kBinBits = 11, kBins = 1u << kBinBits;
constexpr u32 kMostTailMap = 2048;
constexpr u32 kMostOccurrences = 32768;       // a number fits into 15 bits
constexpr u32 kDeep = 2;                      // occurrences that a thread looks up at once
constexpr u32 kBatch = 4;                     // slots that a thread looks at at once
constexpr std::int32_t kMissing = INT32_MIN;  // no answer yet
constexpr u32 kNoHostRow = 0x80000000u;       // in a token of a list
constexpr u32 kGroup = 4;                     // rows that a warp has under way
using Group = Flight<uint4, kGroup, 2>;
constexpr u32 kEarlyRows = kGroup * (kWarps - kPolicyWarps);

/// Sizes and places in shared memory, the same for all CTAs of a launch.
struct Plan {
  u32 cluster, cluster_bits;  // CTAs of a batch row, a power of two
  u32 slice, words;           // occurrences of a CTA, a multiple of 32; words of a set of all occurrences
  u32 columns_words, hot_words, tail_mask, scratch_words, table_bits;
  bool bulk, eager;  // tables can be copied in bulk; host rows are read before they are known to be needed
  Divider by_step;
  u32 box, box_bytes, box_token, box_occurrence;  // one a CTA; inside it: the tokens and numbers of what it misses
  u32 table, tokens, locs, ages, code, row, target, list, first, first_before, hits, victims, victims_before, bins, tail_key, tail_column,
      scratch, scratch_before, bytes;
};

template <class Args>
constexpr bool kNative = false;
template <>
constexpr bool kNative<SwapInArgs> = true;

struct Shared {            // the fixed part
  u64 told, staged;        // barriers: all CTAs have sent their lists, the tables are here
  u32 moves, again, next;  // rows of this CTA; occurrences of what is moved anyway; the next row that no warp has taken
  u32 count;               // of my list
  u32 low, high;           // range of the keys
  u32 bucket, rest;        // of the n-th smallest key
  u32 warp_sum[kWarps];
};

/// What every CTA tells every other one: this, the set of the columns that it saw hit, its list.
struct Head {
  u32 count, bad, unused[2];
};

struct Now {
  u32 call;                // native: its number; sglang's: its epoch
  u32 epoch_mask, origin;  // sglang's
  bool restart;            // native
};

template <class Args>
struct Swap {
  const Args& x;
  const CopyGeometry& copy;
  const Plan& plan;
  std::byte* memory;
  u32 rank, parity;
  i64 b, r;
  Now now;

  template <class T>
  __device__ __forceinline__ T* at(u32 offset) const {
    return reinterpret_cast<T*>(memory + offset);
  }
  __device__ __forceinline__ u32* words(u32 offset) const { return at<u32>(offset); }
  __device__ __forceinline__ Shared& s() const { return *at<Shared>(0); }
  __device__ __forceinline__ u32 box(u32 c) const { return plan.box + c * plan.box_bytes; }
  __device__ __forceinline__ const Head& head(u32 c) const { return *at<Head>(box(c)); }
  __device__ __forceinline__ u32* seen(u32 c) const { return words(box(c) + sizeof(Head)); }
  __device__ __forceinline__ u32* box_token(u32 c) const { return words(box(c) + plan.box_token); }
  __device__ __forceinline__ std::uint16_t* box_occurrence(u32 c) const { return at<std::uint16_t>(box(c) + plan.box_occurrence); }
  __device__ __forceinline__ std::int32_t* code() const { return at<std::int32_t>(plan.code); }
  __device__ __forceinline__ u32* row_of() const { return words(plan.row); }
  __device__ __forceinline__ std::uint16_t* list() const { return at<std::uint16_t>(plan.list); }

  __device__ __forceinline__ u32 occurrences() const { return static_cast<u32>(x.steps * x.top_k); }
  __device__ __forceinline__ u32 hot() const { return static_cast<u32>(x.hot); }
  __device__ __forceinline__ u32 columns() const { return static_cast<u32>(x.hot + x.tail); }
  /// Number of the i-th occurrence that is mine (they are dealt 32 at a time); those below occurrences() come first.
  __device__ __forceinline__ u32 occurrence(u32 i) const { return ((i >> 5 << plan.cluster_bits) + rank) << 5 | (i & 31u); }
  __device__ __forceinline__ u32 index(u32 occurrence) const { return occurrence >> (5 + plan.cluster_bits) << 5 | (occurrence & 31u); }
  __device__ __forceinline__ void answer(u32 occurrence, std::int32_t loc) const {
    const u32 step = plan.by_step(occurrence);
    x.out(b, step, occurrence - step * static_cast<u32>(x.top_k)) = loc;
  }
  __device__ __forceinline__ std::int32_t slot_token(u32 c) const { return at<std::int32_t>(plan.tokens)[c]; }
  __device__ __forceinline__ std::int32_t slot_loc(u32 c) const { return at<std::int32_t>(plan.locs)[c]; }
  __device__ __forceinline__ static void set_bit(u32* set, u32 bit) { atomicOr(set + (bit >> 5), 1u << (bit & 31u)); }
  __device__ __forceinline__ static bool has_bit(const u32* set, u32 bit) { return set[bit >> 5] >> (bit & 31u) & 1u; }

  __device__ void padding(std::int32_t sentinel) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; occurrence(i) < occurrences(); i += kThreads) answer(occurrence(i), sentinel);
    if (rank != 0 || threadIdx.x != 0) return;
    if (x.plan.src) x.plan.count(b) = 0;
    if constexpr (kNative<Args>) {
      if (x.unique_misses) x.unique_misses(b) = 0;
      if (x.unique_hits) x.unique_hits(b) = 0;
    }
  }

  // ---------------------------------------------------------------------------------------------------------- resolve

  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < plan.columns_words; i += kThreads) seen(rank)[i] = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < plan.words; i += kThreads) words(plan.first)[i] = 0;
    if (plan.tail_mask)
#pragma unroll 1
      for (u32 i = threadIdx.x; i <= plan.tail_mask; i += kThreads) words(plan.tail_key)[i] = words(plan.tail_column)[i] = kEmpty;
    if (threadIdx.x == 0) {
      s().moves = s().again = s().count = s().high = 0;
      s().low = kTaken;
      s().next = kEarlyRows;
    }
  }

  __device__ __forceinline__ const std::int32_t* ages() const {
    if constexpr (kNative<Args>)
      return &x.stamps(r, 0);
    else
      return &x.policy(r + 1, 0);
  }
  /// The request's tables into shared memory.
  __device__ __forceinline__ void stage() const {
    if (plan.bulk) {
      if (threadIdx.x == 0) {
        ptx::barrier_expect(&s().staged, 4 * (2 * columns() + hot()));
        ptx::bulk_load(words(plan.tokens), &x.slot_tokens(r, 0), 4 * columns(), &s().staged);
        ptx::bulk_load(words(plan.locs), &x.slot_locs(r, 0), 4 * columns(), &s().staged);
        ptx::bulk_load(words(plan.ages), ages(), 4 * hot(), &s().staged);
      }
      return;
    }
    i64 step = 1;
    if constexpr (kNative<Args>)
      step = x.stamps.s1;
    else
      step = x.policy.s1;
#pragma unroll 1
    for (u32 c = threadIdx.x; c < columns(); c += kThreads) {
      async_word(words(plan.tokens) + c, &x.slot_tokens(r, c));
      async_word(words(plan.locs) + c, &x.slot_locs(r, c));
      if (c < hot()) async_word(words(plan.ages) + c, ages() + c * step);
    }
  }
  /// Every thread, before the block's barrier that follows.
  __device__ __forceinline__ void await_tables() const {
    if (plan.bulk)
      ptx::barrier_wait(&s().staged, parity);
    else
      async_wait();
  }

  struct Asked {
    std::int32_t token;
    i64 length;
  };
  __device__ __forceinline__ Asked ask(u32 i) const {
    const u32 o = occurrence(i);
    if (o >= occurrences()) return {-1, 0};
    const u32 step = plan.by_step(o);
    return {x.tokens(b, step, o - step * static_cast<u32>(x.top_k)), load_wide(x.seq_lens, b, step)};
  }
  /// Where token t was put last, kEmpty nowhere.
  __device__ __forceinline__ u32 hint(std::int32_t t) const {
    if constexpr (kNative<Args>) {
      const i64 where = r * x.token_slots.s0 + t * x.token_slots.s1;
      return x.token_slots.bytes == 4 ? static_cast<const u32*>(x.token_slots.data)[where]
                                      : static_cast<u32>(static_cast<const std::int16_t*>(x.token_slots.data)[where]);
    } else {
      const i64 e0 = x.index(r, 0, layout::bank_place(0, static_cast<u32>(t), x.hash_size)),
                e1 = x.index(r, 1, layout::bank_place(1, static_cast<u32>(t), x.hash_size));
      const i64 e = layout::entry_token(e0) == static_cast<u32>(t) ? e0 : e1;
      return e >= 0 && layout::entry_token(e) == static_cast<u32>(t) && layout::entry_slot(e) < x.hot
                 ? static_cast<u32>(layout::entry_slot(e))
                 : kEmpty;
    }
  }

  __device__ __forceinline__ void map_tail() const {
    if (plan.tail_mask == 0) return;
#pragma unroll 1
    for (u32 c = hot() + threadIdx.x; c < columns(); c += kThreads) {
      const std::int32_t t = x.slot_tokens(r, c), loc = x.slot_locs(r, c);
      if (t < 0 || loc < 0) continue;
      u32 p = static_cast<u32>(t) & plan.tail_mask;
#pragma unroll 1
      for (u32 old; (old = atomicCAS(words(plan.tail_key) + p, kEmpty, static_cast<u32>(t))) != kEmpty && old != static_cast<u32>(t);)
        p = (p + 1) & plan.tail_mask;
      atomicMin(words(plan.tail_column) + p, c);
    }
  }
  /// The first tail column with a row that holds t, or kEmpty.
  __device__ __forceinline__ u32 in_tail(std::int32_t t) const {
    if (plan.tail_mask == 0) {
#pragma unroll 1
      for (u32 c = hot(); c < columns(); ++c)
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
  /// A row outside the pool, in my share of the table or of the scratch.
  __device__ __forceinline__ bool bad_tables() const {
    bool bad = false;
#pragma unroll 1
    for (u32 c = rank * kThreads + threadIdx.x; c < columns(); c += plan.cluster * kThreads) bad |= slot_loc(c) >= copy.device_rows;
#pragma unroll 1
    for (u32 c = rank * kThreads + threadIdx.x; c < x.scratch; c += plan.cluster * kThreads)
      bad |= x.scratch_locs(r, c) >= copy.device_rows;
    return bad;
  }

  /// Answers what is resident into code(), sets the columns in seen(rank), puts the rest into my list. Returns whether the tables are bad.
  __device__ __forceinline__ bool resolve(const Asked (&begin)[kDeep]) const {
    Asked asked[kDeep];
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) asked[q] = begin[q];
    bool bad = false;
#pragma unroll 1
    for (u32 round = 0; round < plan.slice; round += kDeep * kThreads) {
      const u32 base = round + threadIdx.x;
      u32 h[kDeep];
      std::int32_t length[kDeep];
      i64 source[kDeep];
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        const std::int32_t t = asked[q].token;
        length[q] = static_cast<std::int32_t>(min(max(asked[q].length, i64{0}), i64{INT32_MAX}));
        const bool known = t >= 0 && t < length[q] && (t < x.context || !kNative<Args>);
        h[q] = kEmpty;
        source[q] = -1;
        if (known) h[q] = hint(t);
        if (plan.eager && known && t < x.context) source[q] = load_wide(x.host_locs, r, t);
      }
      if (round == 0) {
        await_tables();
        __syncthreads();  // the tables and the tail's map are complete
        bad = bad_tables();
      }
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        const u32 i = base + q * kThreads;
        const std::int32_t t = asked[q].token;
        const bool asks = t >= 0 && t < length[q];
        u32 column = kEmpty;
        if (asks && x.tail > 0 && length[q] - t <= x.tail) column = in_tail(t);
        if (asks && column == kEmpty) {
          if (!kNative<Args> && t < x.hot && slot_token(t) == t)
            column = t;
          else if (h[q] < hot() && slot_token(h[q]) == t)
            column = h[q];
        }
        std::int32_t loc = -1;
        bool misses = false;
        if (column != kEmpty) {
          set_bit(seen(rank), column);
          loc = max(slot_loc(column), -1);
        } else if (asks) {
          if (!plan.eager && t < x.context) source[q] = load_wide(x.host_locs, r, t);
          const bool on_host = source[q] >= 0 && source[q] < copy.host_rows;
          misses = on_host || !kNative<Args>;  // sglang's index may have lost a resident token that has no host row
          if (!on_host) source[q] = kEmpty;
        }
        const u32 all = __ballot_sync(kFull, misses);
        if (all != 0) {
          u32 e = 0;
          if (lane_id() == 0) e = atomicAdd(&s().count, __popc(all));
          e = __shfl_sync(kFull, e, 0) + __popc(all & below(lane_id()));
          if (misses) {
            const u32 row = static_cast<u32>(source[q]);
            box_token(rank)[e] = static_cast<u32>(t) | (row == kEmpty ? kNoHostRow : 0);
            box_occurrence(rank)[e] = static_cast<std::uint16_t>(occurrence(i));
            row_of()[e] = row;
            loc = kMissing;
          }
        }
        if (i < plan.slice) code()[i] = loc;
      }
      if (round + kDeep * kThreads < plan.slice)
#pragma unroll
        for (u32 q = 0; q < kDeep; ++q) asked[q] = ask(base + (kDeep + q) * kThreads);
    }
    return bad;
  }

  /// My box to all others, theirs to me. Behind a barrier of the block, by all.
  __device__ __forceinline__ void tell() const {
    if (plan.cluster == 1) return;
    if (threadIdx.x < 32) {
      ptx::fence_async();
      __syncwarp();
      const u32 count = head(rank).count, first = box(rank), tokens = plan.box_token + (count + 3) / 4 * 16, numbers = (count + 7) / 8 * 16;
      if (lane_id() < plan.cluster && lane_id() != rank) {
        const u32 bar = ptx::shared(&s().told), there = remote(bar, lane_id());
        asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "r"(tokens + numbers)
                     : "memory");
        send(first, tokens, there);
        if (numbers > 0) send(first + plan.box_occurrence, numbers, there);
      }
    }
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::
            "r"(ptx::shared(&s().told)),
        "r"(parity)
        : "memory");
  }
  static __device__ __forceinline__ u32 remote(u32 address, u32 cta) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
    return there;
  }
  __device__ __forceinline__ void send(u32 offset, u32 bytes, u32 barrier) const {
    const u32 here = ptx::shared(memory + offset);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(remote(here, lane_id())),
        "r"(here), "r"(bytes), "r"(barrier)
        : "memory");
  }

  // -------------------------------------------------------------------------- who was first, the same in every CTA of the cluster
  // A hash table of the missing tokens: its entries are number of the smallest occurrence << 16 | place in the lists.

  __device__ __forceinline__ u32 listed(u32 place) const {  // a token with its flag
    const u32 c = place >> 16 - plan.cluster_bits;
    return box_token(c)[place & below(16 - plan.cluster_bits)];
  }
  __device__ __forceinline__ u32 home(u32 t, u32 bits) const { return t * 2654435769u >> (32 - bits); }
  __device__ __forceinline__ void insert_all(u32 bits) const {
    const u32 warp = threadIdx.x / 32, c = warp & (plan.cluster - 1), mask = below(bits);
    u32* const table = words(plan.table);
#pragma unroll 1
    for (u32 e = (warp >> plan.cluster_bits) * 32 + lane_id(); e < head(c).count; e += ((kWarps - 1 - c) >> plan.cluster_bits) * 32 + 32) {
      const u32 t = box_token(c)[e] & ~kNoHostRow;
      const u32 mine = static_cast<u32>(box_occurrence(c)[e]) << 16 | c << (16 - plan.cluster_bits) | e;
      for (u32 p = home(t, bits);; p = (p + 1) & mask) {
        const u32 found = atomicCAS(table + p, kEmpty, mine);
        if (found == kEmpty) break;
        if ((listed(found & 0xFFFFu) & ~kNoHostRow) == t) {
          atomicMin(table + p, mine);
          break;
        }
      }
    }
  }
  /// The place of t, kEmpty if nobody asks. (A table that is full of others is walked once.)
  __device__ __forceinline__ u32 find(u32 t, u32 bits) const {
    const u32 mask = below(bits), begin = home(t, bits);
    u32 p = begin;
    do {
      const u32 value = *reinterpret_cast<volatile u32*>(words(plan.table) + p);
      if (value == kEmpty) return kEmpty;
      const u32 holds = value & kResident ? static_cast<u32>(slot_token(value & ~kResident)) : listed(value & 0xFFFFu) & ~kNoHostRow;
      if (holds == t) return p;
      p = (p + 1) & mask;
    } while (p != begin);
    return kEmpty;
  }
  /// sglang's state: a token that its index has lost may still sit in a slot. Every slot asks whether it is missed; the smallest wins.
  __device__ __forceinline__ void ask_slots(u32 bits) const {
#pragma unroll 1
    for (u32 c = threadIdx.x; c < hot(); c += kThreads) {
      const std::int32_t t = slot_token(c);
      if (t < 0 || static_cast<u32>(t) == c) continue;
      const u32 p = find(static_cast<u32>(t), bits);
      if (p == kEmpty) continue;
      u32* const entry = words(plan.table) + p;
      u32 value = *reinterpret_cast<volatile u32*>(entry);
      while ((value & kResident) == 0 || (value & ~kResident) > c) {
        const u32 old = atomicCAS(entry, value, kResident | c);
        if (old == value) break;
        value = old;
      }
    }
  }
  /// The set of first occurrences; what of my list I serve, and what of it is served as another occurrence.
  __device__ __forceinline__ void find_first(u32 bits) const {
#pragma unroll 1
    for (u32 p = threadIdx.x; p >> bits == 0; p += kThreads) {
      const u32 value = words(plan.table)[p];
      if (value == kEmpty) continue;
      if (!kNative<Args> && (value & kResident))
        set_bit(words(plan.hits), value & ~kResident);
      else if (kNative<Args> || !(listed(value & 0xFFFFu) & kNoHostRow))
        set_bit(words(plan.first), value >> 16);
    }
    const u32 count = head(rank).count;
#pragma unroll 1
    for (u32 base = threadIdx.x & ~31u; base < count; base += kThreads) {
      const u32 e = base + lane_id();
      bool first = false, again = false;
      if (e < count) {
        const u32 t = box_token(rank)[e], o = box_occurrence(rank)[e];
        const u32 value = words(plan.table)[find(t & ~kNoHostRow, bits)];
        if (!kNative<Args> && (value & kResident)) {
          code()[index(o)] = max(slot_loc(value & ~kResident), -1);
        } else if (t & kNoHostRow) {
          code()[index(o)] = -1;
        } else {
          first = value >> 16 == o;
          again = !first;
          if (again) row_of()[e] = value >> 16;  // the occurrence that is served
        }
      }
      append(first, &s().moves, e, false);
      append(again, &s().again, e, true);
    }
  }
  __device__ __forceinline__ void append(bool mine, u32* count, u32 e, bool from_end) const {
    const u32 all = __ballot_sync(kFull, mine);
    if (all == 0) return;
    u32 j = 0;
    if (lane_id() == 0) j = atomicAdd(count, __popc(all));
    j = __shfl_sync(kFull, j, 0) + __popc(all & below(lane_id()));
    if (mine) list()[from_end ? plan.slice - 1 - j : j] = static_cast<std::uint16_t>(e);
  }
  __device__ __forceinline__ u32 number_of(u32 o) const { return rank_of(words(plan.first), words(plan.first_before), o); }
  /// Ranks of the first occurrences. Returns the number of misses.
  __device__ __forceinline__ u32 rank_first() const {
    const u32 *const set = words(plan.first), warp = threadIdx.x / 32;
    u32 all = 0;
#pragma unroll 1
    for (u32 base = 0; base < plan.words; base += kPolicyThreads) {
      const u32 w = base + threadIdx.x, count = w < plan.words ? __popc(set[w]) : 0;
      u32 total;
      u32 before = warp_sum_before(count, total);
      if (lane_id() == 0) s().warp_sum[kPolicyWarps + warp] = total;
      policy_barrier();
      const u32 sums = lane_id() < kPolicyWarps ? s().warp_sum[kPolicyWarps + lane_id()] : 0;
      before += all + __reduce_add_sync(kFull, lane_id() < warp ? sums : 0);
      all += __reduce_add_sync(kFull, sums);
      if (w < plan.words) words(plan.first_before)[w] = before;
      policy_barrier();
    }
    return all;
  }

  // ---------------------------------------------------------------------------------------------------------- victims

  __device__ __forceinline__ u32 slot_of(u32 ring) const {
    if constexpr (kNative<Args>) return ring;
    const u32 c = now.origin + ring;
    return c >= hot() ? c - hot() : c;
  }
  __device__ __forceinline__ static void policy_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kPolicyThreads) : "memory"); }

  /// The key of every slot takes the place of its age; s().low and high become a range that holds all of candidates.
  __device__ __forceinline__ void make_keys() const {
    u32 low = kTaken, high = 0;
#pragma unroll 1
    for (u32 base = threadIdx.x; base < hot(); base += kBatch * kPolicyThreads) {
      u32 k[kBatch];
#pragma unroll
      for (u32 q = 0; q < kBatch; ++q) {
        const u32 c = base + q * kPolicyThreads < hot() ? base + q * kPolicyThreads : base;
        u32 age = words(plan.ages)[c];
        if constexpr (kNative<Args>)
          age = now.restart ? 1u : min(max(age, 1u), kTaken - 1);
        else
          age = now.epoch_mask - ((now.call - age) & now.epoch_mask) + 1;
        k[q] = slot_loc(c) < 0 || has_bit(words(plan.hits), c) ? kTaken : slot_token(c) < 0 ? 0 : age;
      }
#pragma unroll
      for (u32 q = 0; q < kBatch; ++q) {
        const u32 c = base + q * kPolicyThreads;
        if (c >= hot()) continue;
        words(plan.ages)[c] = k[q];
        low = min(low, k[q]);
        high = max(high, k[q] == kTaken ? 0 : k[q]);
      }
    }
    low = __reduce_min_sync(kFull, low);
    high = __reduce_max_sync(kFull, high);
    if (lane_id() == 0) {
      atomicMin(&s().low, low);
      atomicMax(&s().high, high);
    }
#pragma unroll
    for (u32 i = threadIdx.x * 4; i < kBins; i += kPolicyThreads * 4)
      *reinterpret_cast<uint4*>(words(plan.bins) + i) = make_uint4(0, 0, 0, 0);
  }
  /// Keys of ring positions (w + q * kPolicyWarps) * 32 + lane.
  __device__ __forceinline__ void keys(u32 w, u32 (&k)[kBatch]) const {
#pragma unroll
    for (u32 q = 0; q < kBatch; ++q) {
      const u32 p = (w + q * kPolicyWarps) * 32 + lane_id();
      k[q] = words(plan.ages)[slot_of(min(p, hot() - 1))];
      if (p >= hot()) k[q] = kTaken;
    }
  }

  /// The min(wanted, candidates) smallest keys, ties in ring order, as a set with ranks. Returns how many.
  __device__ __forceinline__ u32 choose_victims(u32 wanted) const {
    const u32 warp = threadIdx.x / 32;
    u32* const bins = words(plan.bins);
    u32 low = s().low, high = s().high, rest = wanted, n = wanted;  // take all keys below low, and `rest` of those equal to it
    bool begin = true;
#pragma unroll 1
    for (u32 shift = 1; shift > 0; begin = false) {
      const u32 range = high - low, width = 32 - __clz(range);
      shift = width > kBinBits ? width - kBinBits : 0;
      if (low > high) shift = 0;  // no slot has a row
#pragma unroll 1
      for (u32 w = warp; w < plan.hot_words; w += kBatch * kPolicyWarps) {
        u32 k[kBatch];
        keys(w, k);
#pragma unroll
        for (u32 q = 0; q < kBatch; ++q)
          if (k[q] != kTaken && k[q] - low <= range) atomicAdd(bins + ((k[q] - low) >> shift), 1u);
      }
      policy_barrier();
      constexpr u32 kEach = kBins / kPolicyThreads;
      u32 bin[kEach], sum = 0, total;
#pragma unroll
      for (u32 i = 0; i < kEach; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(bins + threadIdx.x * kEach + i);
        bin[i] = v.x, bin[i + 1] = v.y, bin[i + 2] = v.z, bin[i + 3] = v.w;
      }
#pragma unroll
      for (u32 i = 0; i < kEach; ++i) sum += bin[i];
      u32 before = warp_sum_before(sum, total);
      if (lane_id() == 0) s().warp_sum[warp] = total;
      policy_barrier();
      const u32 sums = lane_id() < kPolicyWarps ? s().warp_sum[lane_id()] : 0;
      if (begin) {
        const u32 candidates = __reduce_add_sync(kFull, sums);
        if (candidates <= wanted) {
          n = candidates;
          low = kTaken;
          rest = 0;
          break;
        }
      }
      before += __reduce_add_sync(kFull, lane_id() < warp ? sums : 0);
      if (before < rest && rest <= before + sum) {
        u32 bucket = 0;
#pragma unroll
        for (u32 i = 0; i + 1 < kEach; ++i)
          if (bucket == i && before + bin[i] < rest) {
            before += bin[i];
            bucket = i + 1;
          }
        s().bucket = threadIdx.x * kEach + bucket;
        s().rest = rest - before;
      }
      if (shift > 0)
#pragma unroll
        for (u32 i = 0; i < kEach; i += 4) *reinterpret_cast<uint4*>(bins + threadIdx.x * kEach + i) = make_uint4(0, 0, 0, 0);
      policy_barrier();
      low += s().bucket << shift;
      rest = s().rest;
      high = low + min(high - low, (1u << shift) - 1);
    }
    u32 *const victims = words(plan.victims), *const equal = words(plan.victims_before);
#pragma unroll 1
    for (u32 w = warp; w < plan.hot_words; w += kBatch * kPolicyWarps) {
      u32 k[kBatch];
      keys(w, k);
#pragma unroll
      for (u32 q = 0; q < kBatch; ++q) {
        const u32 less = __ballot_sync(kFull, k[q] < low), same = __ballot_sync(kFull, k[q] == low && k[q] != kTaken);
        if (lane_id() == 0 && w + q * kPolicyWarps < plan.hot_words) {
          victims[w + q * kPolicyWarps] = less;
          equal[w + q * kPolicyWarps] = same;
        }
      }
    }
    policy_barrier();
    if (warp == 0) {
      u32 before = 0, rank_ = 0;
#pragma unroll 1
      for (u32 base = 0; base < plan.hot_words; base += 32) {
        const u32 w = base + lane_id();
        const u32 same = w < plan.hot_words ? equal[w] : 0, less = w < plan.hot_words ? victims[w] : 0, have = __popc(same);
        u32 total;
        const u32 here = before + warp_sum_before(have, total);
        before += total;
        const u32 take = here < rest ? min(rest - here, have) : 0;
        const u32 word = less | (take == have ? same : same & below(nth_bit(same, take)));
        const u32 r_ = rank_ + warp_sum_before(__popc(word), total);
        rank_ += total;
        if (w < plan.hot_words) {
          victims[w] = word;
          equal[w] = r_;
        }
      }
      if (lane_id() == 0) equal[plan.hot_words] = rank_;
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
  // list()[j] is the j-th entry of my list that this CTA serves; row_of() its host row. target its device row after commit().

  __device__ __forceinline__ void answer_hits(u32 me, u32 threads) const {
#pragma unroll 1
    for (u32 i = me; occurrence(i) < occurrences(); i += threads)
      if (const std::int32_t loc = code()[i]; loc != kMissing) answer(occurrence(i), loc);
  }
  __device__ __forceinline__ void answer_again(u32 victims, u32 spare) const {
#pragma unroll 1
    for (u32 j = threadIdx.x; j < s().again; j += kPolicyThreads) {
      const u32 e = list()[plan.slice - 1 - j], u = number_of(row_of()[e]);
      answer(box_occurrence(rank)[e], u < victims ? slot_loc(victim(u)) : u - victims < spare ? spare_row(u - victims) : -1);
    }
  }
  __device__ __forceinline__ void commit(u32 victims, u32 spare) const {
#pragma unroll 1
    for (u32 j = threadIdx.x; j < s().moves; j += kPolicyThreads) {
      const u32 e = list()[j], o = box_occurrence(rank)[e], u = number_of(o);
      const auto t = static_cast<std::int32_t>(box_token(rank)[e]);
      std::int32_t loc = -1;
      if (u < victims) {
        const u32 slot = victim(u);
        loc = slot_loc(slot);
        if constexpr (kNative<Args>) {
          x.stamps(r, slot) = layout::load_stamp(static_cast<std::int32_t>(now.call));
          x.token_slots.store(r, t, slot);
        } else {
          x.policy(r + 1, slot) = static_cast<std::int32_t>(now.call);
          if (const std::int32_t old = slot_token(slot); old >= 0) index_erase(slot, old);
        }
        x.slot_tokens(r, slot) = t;
      } else if (u - victims < spare) {
        loc = spare_row(u - victims);
      }
      if constexpr (!kNative<Args>) words(plan.table)[j] = static_cast<u32>(t);  // for index_loaded()
      at<std::int32_t>(plan.target)[e] = loc;                                    // (one CTA: where the token was)
      answer(o, loc);
      if (x.plan.src && loc >= 0) {
        x.plan.src(b, u) = row_of()[e];
        x.plan.dst(b, u) = loc;
      }
    }
  }
  __device__ __forceinline__ void index_loaded(u32 victims) const {
    auto& generation = x.scratch_state(0, layout::counter_column(layout::Counter::kGeneration, x.counter_requests, r));
#pragma unroll 1
    for (u32 j = threadIdx.x; j < s().moves; j += kPolicyThreads) {
      const u32 u = number_of(box_occurrence(rank)[list()[j]]);
      if (u < victims && !index_insert(victim(u), static_cast<std::int32_t>(words(plan.table)[j])))
        atomicOr(reinterpret_cast<u32*>(&generation), layout::kDegraded);
    }
  }

  /// Stamps of the hits in my share of the columns; with `restart` (once in 2^30 calls the order of use is forgotten) of all that is not loaded.
  __device__ __forceinline__ void stamp_hits(u32 me, u32 threads, bool some_victims) const {
#pragma unroll 1
    for (u32 c = rank * threads + me; c < hot(); c += plan.cluster * threads) {
      const bool hit = has_bit(words(plan.hits), c);
      if constexpr (kNative<Args>) {
        if (hit)
          x.stamps(r, c) = layout::hit_stamp(static_cast<std::int32_t>(now.call));
        else if (now.restart && !(some_victims && has_bit(words(plan.victims), c)))
          x.stamps(r, c) = 0;
      } else if (hit) {
        x.policy(r + 1, c) = static_cast<std::int32_t>(now.call);
      }
    }
  }
  /// Counters and clock, by one warp of CTA 0.
  __device__ __forceinline__ void finish(u32 misses, u32 victims, u32 spare) const {
    u32 found = 0;
#pragma unroll 4
    for (u32 w = lane_id(); w < plan.columns_words; w += 32) found += __popc(words(plan.hits)[w]);
    found = __reduce_add_sync(kFull, found);
    if (lane_id() != 0) return;
    if (x.plan.src) x.plan.count(b) = static_cast<std::int32_t>(victims + spare);
    if constexpr (kNative<Args>) {
      x.clock(r) = static_cast<std::int32_t>(now.call);
      if (x.unique_misses) x.unique_misses(b) = static_cast<std::int32_t>(misses);
      if (x.unique_hits) x.unique_hits(b) = static_cast<std::int32_t>(found);
    } else {
      x.policy(0, r) = static_cast<std::int32_t>(layout::PolicyWord(x.hot).pack((now.origin + victims) % hot(), now.call));
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
      now.restart = false;
      now.call = word.next_epoch(control);
      now.epoch_mask = word.epoch_mask();
      now.origin = word.cursor(control) % hot();
      return true;
    }
  }

  __device__ __forceinline__ void row(i64 batch_row) {
    b = batch_row;
    r = load_wide(x.requests, b, 0);
    i64 real = x.batch;
    if (x.num_real) real = *x.num_real;
    Asked asked[kDeep];
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) asked[q] = ask(q * kThreads + threadIdx.x);
    clear();
    real = min(max(real, i64{0}), x.batch);
    if (b >= real || r < 0 || r >= x.request_slots) {
      padding(b >= real && !kNative<Args> ? 0 : -1);
      return;
    }
    stage();
    bool bad = !read_clock();
    __syncthreads();  // everything is clear
    map_tail();
#pragma unroll 1
    for (i64 other = threadIdx.x; other < real; other += kThreads) bad |= other != b && load_wide(x.requests, other, 0) == r;
    bad |= resolve(asked);
    ptx::fence_async();
    bad = __syncthreads_or(bad) != 0;
    if (threadIdx.x == 0) *at<Head>(box(rank)) = {s().count, bad, {}};
    __syncthreads();
    tell();
    parity ^= 1;
    u32 count = lane_id() < plan.cluster ? head(lane_id()).count : 0;
    bad = __any_sync(kFull, lane_id() < plan.cluster && head(lane_id()).bad != 0);
    count = __reduce_add_sync(kFull, count);
    if (bad) {
      padding(-1);
      return;
    }
#pragma unroll 1
    for (u32 w = threadIdx.x; w < plan.columns_words; w += kThreads) {
      u32 all = 0;
#pragma unroll 8
      for (u32 c = 0; c < plan.cluster; ++c) all |= seen(c)[w];
      words(plan.hits)[w] = all;
    }
    if constexpr (!kNative<Args>)
      if (rank == 0 && threadIdx.x == 0) {  // before the index can be found full
        auto& generation = x.scratch_state(0, layout::counter_column(layout::Counter::kGeneration, x.counter_requests, r));
        generation = static_cast<std::int32_t>(layout::next_generation(static_cast<u32>(generation)));
      }
    if (count == 0) {
      answer_hits(threadIdx.x, kThreads);
      __syncthreads();
      stamp_hits(threadIdx.x, kThreads, false);
      if (rank == 0 && threadIdx.x < 32) finish(0, 0, 0);
      return;
    }
    const u32 bits = min(max(32 - __clz(2 * count - 1), 8), plan.table_bits);
#pragma unroll 1
    for (u32 p = threadIdx.x * 4; p >> bits == 0; p += kThreads * 4)
      *reinterpret_cast<uint4*>(words(plan.table) + p) = make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
    __syncthreads();
    insert_all(bits);
    __syncthreads();
    if constexpr (!kNative<Args>) {
      ask_slots(bits);
      __syncthreads();
    }
    find_first(bits);
    __syncthreads();
    const u32 warp = threadIdx.x / 32, moves = s().moves;
    const bool mover = warp >= kPolicyWarps;
    const u32 pieces = static_cast<u32>(copy.item) / 16;
    const bool fast = copy.vec == 16 && copy.item <= Group::kCover && copy.pairs == 1 && !copy.paged && !copy.skip;
    const auto source = [&](u32 j) { return lane_id() < kGroup && j < moves ? host_at(copy, 0, row_of()[list()[j]]) : nullptr; };
    const auto target = [&](u32 j) {
      if (lane_id() >= kGroup || j >= moves) return static_cast<std::byte*>(nullptr);
      const auto loc = at<std::int32_t>(plan.target)[list()[j]];
      return loc >= 0 ? device_at(copy, 0, loc) : nullptr;
    };
    const u32 early = (warp - kPolicyWarps) * kGroup + lane_id();
    Group group;
    if (mover) {
      if (fast) group.load(source(early), pieces);
      if constexpr (!kNative<Args>) {
        cluster_arrive_quietly();
        cluster_wait();
      }
    } else {
      make_keys();
      const u32 misses = rank_first();
      answer_hits(threadIdx.x, kPolicyThreads);
      const u32 victims = choose_victims(misses);
      const u32 spare =
          plan.scratch_words > 0 && misses > victims ? min(misses - victims, words(plan.scratch_before)[plan.scratch_words]) : 0;
      commit(victims, spare);
      answer_again(victims, spare);
      stamp_hits(threadIdx.x, kPolicyThreads, true);
      if (rank == 0 && warp == kPolicyWarps - 1) finish(misses, victims, spare);
      if constexpr (!kNative<Args>) {
        cluster_arrive();  // all slots hold their new tokens
        cluster_wait();
        index_loaded(victims);
      }
    }
    __syncthreads();
    if (copy.skip) return;
    if (fast && mover) group.store(source(early), target(early), pieces);
    // The rest of the rows, to whichever warp is free.
    const u32 step = fast ? kGroup : 32;
#pragma unroll 1
    for (;;) {
      u32 first = 0;
      if (lane_id() == 0) first = atomicAdd(&s().next, step);
      first = __shfl_sync(kFull, first, 0);
      if (!fast) first -= kEarlyRows;
      if (first >= moves) break;
      const u32 j = first + lane_id();
      if (fast) {
        const std::byte* const from = source(j);
        Group more;
        more.load(from, pieces);
        more.store(from, target(j), pieces);
      } else {
        const bool some = j < moves;
        move_pool_rows(copy, some ? row_of()[list()[j]] : 0, some ? at<std::int32_t>(plan.target)[list()[j]] : -1, min(32u, moves - first));
      }
    }
  }
};

template <class Args>
__global__ void __launch_bounds__(kThreads, 1)
    swap_kernel(const __grid_constant__ Args x, const __grid_constant__ CopyGeometry copy, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) std::byte memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.told, max(plan.cluster - 1, 1u));
    ptx::barrier_init(&s.staged, 1);
    ptx::fence_barriers();
  }
  ptx::wait_for_previous();
  ptx::let_next_start();
  cluster_leave();  // the barriers of all CTAs are ready
  Swap<Args> swap{x, copy, plan, memory, ptx::cluster_rank(), 0, 0, 0, {}};
  const u32 clusters = gridDim.x >> plan.cluster_bits;
  for (i64 b = blockIdx.x >> plan.cluster_bits; b < x.batch; b += clusters) {
    swap.row(b);
    ptx::fence_async();  // the next row's tables come where this one's were
    __syncthreads();
    cluster_leave();  // nobody reads what the next row will clear, or a CTA that is gone
  }
}

// -------------------------------------------------------------------------------------------------------------- launch

template <class Args>
Plan make_plan(const Args& x, u32 cluster) {
  Plan p{};
  const u32 O = static_cast<u32>(x.steps * x.top_k), W = static_cast<u32>(x.hot + x.tail), H = static_cast<u32>(x.hot);
  p.cluster = cluster;
  while ((1u << p.cluster_bits) < cluster) ++p.cluster_bits;
  p.slice = std::max<u32>(32, (O + 32 * cluster - 1) / (32 * cluster) * 32);
  p.words = p.slice * cluster / 32;
  p.columns_words = (W + 31) / 32;
  p.hot_words = (H + 31) / 32;
  p.scratch_words = static_cast<u32>((x.scratch + 31) / 32);
  if (x.tail > 0 && x.tail <= kMostTailMap) {
    p.tail_mask = 1;
    while (p.tail_mask + 1 < 2 * static_cast<u32>(x.tail)) p.tail_mask = 2 * p.tail_mask + 1;
  }
  p.table_bits = 8;
  while ((1u << p.table_bits) < O) ++p.table_bits;
  p.eager = cluster >= 8;
  p.by_step = Divider(static_cast<u32>(x.top_k));
  const auto aligned = [](const void* base, i64 row, i64 step) {
    return reinterpret_cast<std::uintptr_t>(base) % 16 == 0 && row % 4 == 0 && step == 1;
  };
  p.bulk = W % 4 == 0 && H % 4 == 0 && aligned(x.slot_tokens.data, x.slot_tokens.s0, x.slot_tokens.s1) &&
           aligned(x.slot_locs.data, x.slot_locs.s0, x.slot_locs.s1);
  if constexpr (kNative<Args>)
    p.bulk = p.bulk && aligned(x.stamps.data, x.stamps.s0, x.stamps.s1);
  else
    p.bulk = p.bulk && aligned(x.policy.data, x.policy.s0, x.policy.s1);
  Carve take;
  take((sizeof(Shared) + 3) / 4);
  Carve box;
  box(sizeof(Head) / 4);
  box(p.columns_words);
  p.box_token = box(p.slice);
  p.box_occurrence = box(p.slice / 2);
  p.box_bytes = box.bytes;
  p.box = take(box.bytes / 4 * cluster);
  p.table = take(1u << p.table_bits);
  p.tokens = take(W);
  p.locs = take(W);
  p.ages = take(H);
  p.code = take(p.slice);
  p.row = take(p.slice);
  p.target = cluster == 1 ? p.box + p.box_token : take(p.slice);
  p.list = take(p.slice / 2);
  p.first = take(p.words);
  p.first_before = take(p.words + 1);
  p.hits = take(p.columns_words);
  p.victims = take(p.hot_words);
  p.victims_before = take(p.hot_words + 1);
  p.bins = take(kBins);
  p.tail_key = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.tail_column = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.scratch = take(p.scratch_words);
  p.scratch_before = take(p.scratch_words + 1);
  p.bytes = take.bytes;
  return p;
}

/// Whether four clusters of 16 CTAs fit on the GPU at once (asked once; 8 is what every GPU promises).
template <class Args>
bool wide_clusters() {
  static const bool fit = [] {
    const int most = specstate::cuda::device_info().shared_bytes - 1024;
    SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(&swap_kernel<Args>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(&swap_kernel<Args>, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 16, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = 64, config.blockDim = kThreads, config.dynamicSmemBytes = static_cast<std::size_t>(most);
    config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0;
    SPECSTATE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, &swap_kernel<Args>, &config));
    return clusters >= 4;
  }();
  return fit;
}

template <class Args>
void run_swap(const Args& x, Stream stream) {
  if (x.batch == 0) return;
  const CopyGeometry copy = geometry(x.copy);
  check_rows(x.op, copy);
  u32 cluster = cluster_for(x.batch, x.sm_budget);
  // With fewer CTAs a row, or fewer clusters than rows, the other form is as fast.
  if (cluster < 4 || clusters_for(x.batch, cluster, x.sm_budget) < x.batch) return run_large(x, stream);
  if (x.steps * x.top_k > kMostOccurrences) return run_large(x, stream);
  if constexpr (kNative<Args>)
    if (x.batch <= 4 && x.steps * x.top_k > 4096 && (x.sm_budget == 0 || 16 * x.batch <= x.sm_budget) && wide_clusters<Args>())
      cluster = 16;
  const u32 most = static_cast<u32>(specstate::cuda::device_info().shared_bytes - 1024);
  Plan plan = make_plan(x, cluster);
  while (plan.bytes > most && cluster < 8) plan = make_plan(x, cluster *= 2);
  if (plan.bytes > most) return run_large(x, stream);
  specstate::cuda::Launch shape;
  shape.grid = specstate::cuda::blocks_for(x.batch, 1) * cluster;
  shape.block = kThreads;
  shape.shared = plan.bytes;
  shape.cluster = cluster;
  shape.overlap = true;
  specstate::cuda::launch(&swap_kernel<Args>, shape, stream, x, copy, plan);
}

}  // namespace

void run(const SwapInArgs& args, Stream stream) { run_swap(args, stream); }
void run(const SpecSwapArgs& args, Stream stream) { run_swap(args, stream); }

}  // namespace specstate::hisparse::cuda
