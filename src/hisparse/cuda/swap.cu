// The multi-step swaps, one launch: a cluster of CTAs resolves one batch row, chooses the victims and moves the rows.
//
// What the time goes into, and hence the shape. A row of the host is two microseconds away and the link brings a hundred rows in one more, so
// the link must be asked as early as can be, and for each missing token once; where a row goes can be settled while it travels. A warp's
// scattered access costs a cycle a lane wherever it goes, so each CTA has the request's slot tables in its own shared memory (bulk copies:
// no instructions). The occurrences are dealt to the CTAs 32 at a time:
//
//   tokens, lengths, request -> hints, and the slot tables into shared memory -> resident or not. If not the host row, and the token is
//   claimed in a hash table that lies over the shared memory of the cluster; there the smallest occurrence of each token stays. Who was
//   first to claim a token lists its row; four warps of each CTA (movers) do nothing but ask the link for what is listed, while the others
//   are still resolving, and put the rows into a stash in shared memory -> half of the others (the thinking warps) tell all CTAs which
//   columns were hit (one box to each peer: a bulk copy, counted by a barrier in the receiver's shared memory) -> now all claims are in: each
//   CTA looks up the smallest occurrences of its tokens, and tells all which of its own occurrences these are -> all know the same and do
//   the same: the misses are numbered (ranks in the set of first occurrences), the victims chosen (a histogram of the keys, a threshold, one
//   compaction); each CTA writes tables, plan and answers of the tokens that it claimed -> the stash goes where the victims were (bulk
//   copies), rows that did not fit follow.
//
// Sixteen rows a CTA are on their way at once, not more: requests for host rows queue in front of everything else that an SM asks for, its peers'
// memory included, and with twice as many the thinking took longer than the rows.
//
// A call without a miss needs no boxes: each CTA sees whatever makes the row invalid (the movers look through the whole table meanwhile) and stamps
// what it saw hit, and all that it must hear is that nobody misses anything, one arrival from each peer. Answers and stamps are written while that is on
// its way. (Where hits are counted, once in 2^30 calls, and in sglang's state it ends behind the boxes.) Nobody writes anything else in a table before all
// have sent theirs, hence have read the tables. Very large tables stay in global memory (kOrdinary false): then the CTAs also meet between the choice of
// the victims and the writing.
//
// Arguments are cold memory: a line of 64 bytes is 80 cycles of all warps. What is read first lies in front, in the order of its use (Front).
//
// The movers copy the tables, map the tail and look for what makes the row invalid; then they meet nobody before the end: an entry is handed over by
// an exchange of its row, taken by a compare-and-swap of the count of rows taken, and where it goes is told by a barrier that counts (an mbarrier). The
// others meet at a barrier of their own.
#include <algorithm>
#include <bit>
#include <string>

#include "cuda/launch.hpp"
#include "hisparse/cuda/missing.cuh"
#include "hisparse/cuda/rows.cuh"

namespace specstate::hisparse::cuda {
namespace {

constexpr u32 kPolicyThreads = 256, kPolicyWarps = kPolicyThreads / 32;  // these do the thinking
constexpr u32 kResolvers = 512;                                          // these and as many others resolve
constexpr u32 kThreads = kResolvers + 32 * 4, kWarps = kThreads / 32;    // the last warps bring rows
constexpr u32 kTaken = 0xFFFFFFFFu;                                      // key of a slot that cannot be a victim
constexpr u32 kBinBits = 11, kBins = 1u << kBinBits;
constexpr u32 kMostTailMap = 2048;
constexpr i64 kMostOccurrences = 65536;  // a number fits into 16 bits
constexpr u32 kBatch = 4;                // slots that a thread looks at at once
constexpr u32 kGroup = 4;                // rows that a warp has under way; two if they are large
constexpr u32 kMostStash = 256;
constexpr u32 kClusters[] = {16, 8, 6, 4, 3, 2, 1}, kMostCluster = 16;
constexpr u32 kPlaceBits = 20;  // of a place in one CTA's part of the table of claims
using Group = Flight<uint4, kGroup, 2>;
using Pair = Flight<uint4, 2, 4>;
// What served() says of an occurrence in a list: its token's place in the table of claims, later the token's first occurrence; or
constexpr u32 kNowhere = 0x3FFFFFFFu;                       // sglang's state: no host row
constexpr u32 kInSlot = 0x40000000u, kLastSlot = 0xFFFFFu;  // sglang's state: kInSlot + kLastSlot - slot, found in spite of its index
constexpr u32 kAnswered = 0xFFFFFFFFu;
constexpr std::int32_t kPending = INT32_MIN;  // of a count that is to come, see publishes()

/// Sizes and places in shared memory, the same for all CTAs of a launch.
struct Plan {
  u32 cluster;       // CTAs of a batch row
  u32 slice, words;  // occurrences of a CTA, a multiple of 128; words of a set of all occurrences
  u32 part;          // entries of the table of claims that a CTA has, a multiple of 4
  u32 rows_kept;     // of the lists' rows of the host; the others are read again when it is their turn
  bool tokens_kept;  // so are tokens
  bool next_early;   // the next kernel finds room beside this one
  u32 columns_words, hot_words, tail_mask, scratch_words, filter_mask;
  u32 stash_rows, stash_pitch;  // that fit into what is left; bytes of one
  u32 context, tail;
  // Ordinary calls: strides of the selection and the answers in elements (step, place).
  std::int32_t token_step, token_place, out_step, out_place;
  bool bulk;                    // tables can be copied in bulk
  layout::PolicyWord clock{1};  // sglang's
  Divider by_step, by_cluster;
  u32 hit_bytes, zeros, zero_words, ones, one_words;
  u32 box, box_bytes, firsts;              // one a CTA each: what it saw hit; which of its occurrences were first
  u32 claims;                              // their table
  u32 token, target, row, served, number;  // the lists
  u32 tokens, locs, ages;                  // the slot tables
  u32 first, first_before, hits, victims, victims_before, bins, tail_key, tail_column, scratch, scratch_before, filter, stash, bytes;
};

/// What an ordinary call reads first, in the order of its use: the arguments of a launch are cold, and each line of 64 bytes of them is a miss that all
/// warps wait for. (The first line has 48 bytes for it.)
struct Front {
  const void *requests, *lengths;
  const std::int32_t *tokens, *real;                  // real: of requests, if it is not given
  std::int32_t request_bytes, length_row, token_row;  // bytes, bytes, elements
  u32 flags;                                          // kWideRequests ...
  u64 by_step;                                        // Divider
  u32 top_k, occurrences;
  std::int32_t length_step, token_step, token_place;
  u32 batch, cluster, cluster_shift, cluster_inverse;  // cluster: odd * 2^shift; the inverse of the odd factor modulo 2^32
  u32 zeros, zero_words, ones, one_words;              // what is cleared, in fours of words
  u32 hot, columns, slots;
  // Of the request.
  const std::byte *hints, *hosts;
  const std::int32_t *slot_tokens, *slot_locs, *ages, *clock;
  std::int32_t* out;
  std::int32_t hint_row, host_row, slot_row, loc_row, age_row, clock_row, out_row;  // bytes (hints, hosts), elements
  std::int32_t hint_bytes, host_bytes;
  u32 tokens_at, locs_at, ages_at, context, tail;
  u32 scratch;
  std::int32_t slot_step, loc_step;
};
/// Its flags. kAlone: see alone(); kEarly: Plan's next_early; kPublish: see publishes().
constexpr u32 kWideRequests = 1, kWideLengths = 2, kGivenReal = 4, kBulk = 8, kWideHosts = 16, kWideHints = 32, kAlone = 64, kEarly = 128,
              kPublish = 256;

template <class Args>
constexpr bool kNative = false;
template <>
constexpr bool kNative<SwapInArgs> = true;

struct Shared {             // the fixed part
  u64 told, ranked;         // barriers: all CTAs have told what they saw hit, which occurrences were first
  u64 staged[3];            // the tables are here: tokens, rows, ages
  u64 placed, met;          // it is known where the rows go; the thinking warps of all CTAs have come here
  u64 resolved;             // the lists are complete
  u64 quiet;                // all others miss nothing
  u32 lists;                // lengths of mine: moves() | again() << 16
  u32 taken;                // so many rows have a warp that brings them
  u32 bad;                  // something that makes the row invalid
  u32 busy;                 // there is something to move
  u32 loud;                 // somebody else misses something
  u32 low, high;            // range of the keys
  u32 bucket, bucket_rest;  // of the n-th smallest key
  u32 warp_sum[kWarps];
};

/// What every CTA tells every other one: this, and the set of the columns that it saw hit.
struct Head {
  u32 count, bad, unused[2];
};

struct Now {
  u32 call;                            // native: its number; sglang's: its epoch
  u32 epoch_mask, origin, generation;  // sglang's
  bool restart;                        // native
};

/// What a thread reads that has no tokens to read: a load without a predicate.
__device__ const int4 no_tokens = {-1, -1, -1, -1};

template <class Args, u32 kDeep, bool kOrdinary, bool kRows>
struct Swap {
  const Front& f;
  const Args& x;
  const CopyGeometry& copy;
  const Plan& plan;
  std::byte* memory;
  u32 rank;
  u32 phase, busy_phase, met_phase;  // of the barriers: a row; a row with something to move; a meeting
  i64 b, r;
  Now now;
  // Of the batch row and its request, in an ordinary call.
  const std::int32_t* selection;
  std::int32_t* answers;
  const std::byte *hints, *hosts, *lengths;

  template <class T>
  __device__ __forceinline__ T* at(u32 offset) const {
    return reinterpret_cast<T*>(memory + offset);
  }
  __device__ __forceinline__ u32* words(u32 offset) const { return at<u32>(offset); }
  __device__ __forceinline__ Shared& s() const { return *at<Shared>(0); }
  __device__ __forceinline__ Head& head(u32 c) const { return *at<Head>(plan.box + c * plan.box_bytes); }
  __device__ __forceinline__ u32* seen(u32 c) const {
    return words(plan.box + (kOrdinary ? c * plan.box_bytes + static_cast<u32>(sizeof(Head)) : plan.cluster * plan.box_bytes));
  }
  __device__ __forceinline__ u32* my_first() const { return words(plan.firsts) + rank * (plan.slice / 32); }
  /// Native, ordinary calls: a byte a column, plain stores (an atomic on bits goes two lanes a cycle).
  static constexpr bool kBytes = kNative<Args> && kOrdinary;
  static constexpr bool kAhead = kNative<Args> && kOrdinary && !kRows && kDeep <= 2;
  static constexpr bool kLate = kNative<Args> && kOrdinary && !kRows;  // the last round is answered behind the hand-over
  __device__ __forceinline__ std::uint8_t* hit_bytes() const { return at<std::uint8_t>(plan.hit_bytes); }
  __device__ __forceinline__ void note_hit(u32 column) const {
    if constexpr (kBytes)
      hit_bytes()[column] = 1;
    else
      set_bit(seen(rank), column);
  }
  /// The bytes become bits of my box: 16 columns a thread.
  __device__ __forceinline__ void pack_hits() const {
    if constexpr (kBytes) {
#pragma unroll 1
      for (u32 c = 16 * threadIdx.x; c < columns(); c += 16 * kPolicyThreads) {
        const uint4 v = *reinterpret_cast<const uint4*>(hit_bytes() + c);
        const auto four = [](u32 bytes) { return bytes * 0x10204080u >> 28; };
        reinterpret_cast<std::uint16_t*>(seen(rank))[c / 16] =
            static_cast<std::uint16_t>(four(v.x) | four(v.y) << 4 | four(v.z) << 8 | four(v.w) << 12);
      }
    }
  }
  // My lists of what is missing: what I claimed, from the front; what others did (or nobody can), from the back.
  __device__ __forceinline__ u32 moves() const { return s().lists & 0xFFFFu; }
  __device__ __forceinline__ u32 again() const { return s().lists >> 16; }
  __device__ __forceinline__ u32 back(u32 j) const { return plan.slice - 1 - j; }
  __device__ __forceinline__ u32* token() const { return words(plan.token); }
  __device__ __forceinline__ std::int32_t* target() const { return at<std::int32_t>(plan.target); }  // (native: takes the place of served)
  __device__ __forceinline__ u32* row_of() const { return words(plan.row); }
  __device__ __forceinline__ u32* served() const { return words(plan.served); }
  __device__ __forceinline__ std::uint16_t* number() const { return at<std::uint16_t>(plan.number); }

  __device__ __forceinline__ u32 occurrences() const { return kOrdinary ? f.occurrences : static_cast<u32>(x.steps * x.top_k); }
  __device__ __forceinline__ u32 hot() const { return kOrdinary ? f.hot : static_cast<u32>(x.hot); }
  __device__ __forceinline__ u32 columns() const { return kOrdinary ? f.columns : static_cast<u32>(x.hot + x.tail); }
  __device__ __forceinline__ u32 top_k() const { return kOrdinary ? f.top_k : static_cast<u32>(x.top_k); }
  __device__ __forceinline__ u32 tail() const { return kOrdinary ? f.tail : plan.tail; }
  __device__ __forceinline__ u32 context() const { return kOrdinary ? f.context : plan.context; }
  __device__ __forceinline__ u32 cluster() const { return kOrdinary ? f.cluster : plan.cluster; }
  __device__ __forceinline__ u32 step_of(u32 o) const { return kOrdinary ? static_cast<u32>(o * f.by_step >> 40) : plan.by_step(o); }
  // The occurrences are dealt to the CTAs 32 at a time, a round to each CTA in turn; whose turn is first differs from round to round. What misses often
  // lies together, and in the same place of each step: dealt in large pieces, two SMs had all rows. Dealt in smaller ones, several CTAs read each line of
  // the selection, and each CTA four times as many lines: 900 cycles more before the hints are asked for.
  __device__ __forceinline__ u32 first_turn(u32 round) const { return __umulhi(round * 2654435769u, cluster()); }
  /// Number of the i-th occurrence that is mine; those below occurrences() come first.
  __device__ __forceinline__ u32 occurrence(u32 i) const {
    const u32 round = i >> 5, turn = rank - first_turn(round);
    return (round * cluster() + min(turn, turn + cluster())) << 5 | (i & 31u);
  }
  __device__ __forceinline__ u32 index(u32 occurrence) const { return plan.by_cluster(occurrence >> 5) << 5 | (occurrence & 31u); }
  /// The q-th of a thread's occurrences of a round, as such an i.
  static constexpr bool kQuads = kOrdinary && kDeep == 4;  // four in a row: one load, one store
  __device__ __forceinline__ static u32 turn(u32 round, u32 q) {
    return round + (kQuads ? 4 * threadIdx.x + q : q * kResolvers + threadIdx.x);
  }
  __device__ __forceinline__ void answer(u32 occurrence, std::int32_t loc) const {
    const u32 step = step_of(occurrence), place = occurrence - step * top_k();
    if constexpr (kOrdinary)
      answers[i64{plan.out_step} * step + i64{plan.out_place} * place] = loc;
    else
      x.out(b, step, place) = loc;
  }
  __device__ __forceinline__ std::int32_t slot_token(u32 c) const {
    if constexpr (kOrdinary) return at<std::int32_t>(f.tokens_at)[c];
    return x.slot_tokens(r, c);
  }
  __device__ __forceinline__ std::int32_t slot_loc(u32 c) const {
    if constexpr (kOrdinary) return at<std::int32_t>(f.locs_at)[c];
    return x.slot_locs(r, c);
  }
  /// sglang's.
  __device__ __forceinline__ std::int32_t& counter(layout::Counter bank) const {
    return x.scratch_state(0, layout::counter_column(bank, x.counter_requests, r));
  }
  __device__ __forceinline__ static void set_bit(u32* set, u32 bit) { atomicOr(set + (bit >> 5), 1u << (bit & 31u)); }
  __device__ __forceinline__ static bool has_bit(const u32* set, u32 bit) { return set[bit >> 5] >> (bit & 31u) & 1u; }
  __device__ __forceinline__ static void resolvers_barrier() { ptx::barrier_of(5, kResolvers); }
  /// Arrives at a barrier of the whole block at which only the resolving warps wait.
  __device__ __forceinline__ static void arrive_at(int id) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(kThreads) : "memory");
  }
  __device__ __forceinline__ static void policy_barrier() { ptx::barrier_of(1, kPolicyThreads); }

  __device__ void padding(std::int32_t sentinel, u32 threads) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; occurrence(i) < occurrences(); i += threads) answer(occurrence(i), sentinel);
    if (rank != 0 || threadIdx.x != 0) return;
    if (x.plan.src) x.plan.count(b) = 0;
    if (publishes()) __threadfence();
    if constexpr (kNative<Args>) {
      if (x.unique_misses) x.unique_misses(b) = 0;
      if (x.unique_hits) x.unique_hits(b) = 0;
    }
  }

  // ---------------------------------------------------------------------------------------------------------- resolve

  __device__ __forceinline__ static void fill(u32* p, u32 n, u32 value) {  // n in whole fours
#pragma unroll 1
    for (u32 i = threadIdx.x * 4; i < n; i += kThreads * 4) *reinterpret_cast<uint4*>(p + i) = make_uint4(value, value, value, value);
  }
  __device__ __forceinline__ void clear() const {
    fill(words(f.zeros), f.zero_words, 0);
    fill(words(f.ones), f.one_words, kEmpty);
    if (threadIdx.x == kResolvers) {
      s().lists = s().high = s().taken = s().bad = s().loud = 0;
      s().low = kTaken;
    }
  }

  __device__ __forceinline__ const std::int32_t* ages() const {
    if constexpr (kOrdinary)
      return f.ages + i64{f.age_row} * r;
    else if constexpr (kNative<Args>)
      return &x.stamps(r, 0);
    else
      return &x.policy(r + 1, 0);
  }
  __device__ __forceinline__ i64 ages_step() const {
    if constexpr (kNative<Args>)
      return x.stamps.s1;
    else
      return x.policy.s1;
  }
  /// The request's tables into shared memory.
  __device__ __forceinline__ void stage() const {
    if constexpr (!kOrdinary) return;
    if (f.flags & kBulk) {
      const u32 table = threadIdx.x / 32 - kResolvers / 32;  // one warp each
      if (table >= 3 || lane_id() != 0) return;
      const u32 bytes = 4 * (table == 2 ? hot() : columns());
      ptx::barrier_expect(&s().staged[table], bytes);
      const u32 to = table == 0 ? f.tokens_at : table == 1 ? f.locs_at : f.ages_at;
      const std::int32_t* const from = table == 0   ? f.slot_tokens + i64{f.slot_row} * r
                                       : table == 1 ? f.slot_locs + i64{f.loc_row} * r
                                                    : ages();
      ptx::bulk_load(words(to), from, bytes, &s().staged[table]);
      return;
    }
    const i64 step = ages_step();
#pragma unroll 1
    for (u32 c = threadIdx.x - kResolvers; c < columns(); c += kThreads - kResolvers) {
      async_word(words(f.tokens_at) + c, &x.slot_tokens(r, c));
      async_word(words(f.locs_at) + c, &x.slot_locs(r, c));
      if (c < hot()) async_word(words(f.ages_at) + c, ages() + c * step);
    }
  }
  /// Every thread that is to read it.
  __device__ __forceinline__ void await_table(int table) const {
    if constexpr (!kOrdinary) return;
    if (f.flags & kBulk) ptx::barrier_wait(&s().staged[table], phase);
  }
  /// Where there are no bulk copies: the movers, whose copies it are, before the others may go on.
  __device__ __forceinline__ void await_copies() const {
    if (!kOrdinary || (f.flags & kBulk)) return;
    async_wait();
    ptx::barrier_of(4, kThreads - kResolvers);
  }

  __device__ __forceinline__ static std::int32_t clamp(i64 n) { return static_cast<std::int32_t>(min(max(n, i64{0}), i64{INT32_MAX})); }
  /// What is read first of an occurrence; nothing here waits for it.
  struct Asked {
    std::int32_t token;
    Wide length;
    bool some;
  };
  __device__ __forceinline__ Wide ask_length(bool some, u32 step) const {
    if constexpr (kOrdinary)
      return ask_wide(reinterpret_cast<const u32*>(lengths + i64{f.length_step} * step), f.flags & kWideLengths ? 8 : 4);
    return ask_wide(some ? wide_at(x.seq_lens, b, step) : reinterpret_cast<const u32*>(&no_tokens), x.seq_lens.bytes);
  }
  __device__ __forceinline__ void ask(u32 round, Asked (&a)[kDeep]) const {
    if constexpr (kQuads) {
      const u32 o = occurrence(turn(round, 0));
      const bool some = o < occurrences();
      const u32 step = some ? step_of(o) : 0, place = some ? o - step * top_k() : 0;  // one that has none reads the first
      [[maybe_unused]] const int4 t = *reinterpret_cast<const int4*>(selection + i64{f.token_step} * step + place);
      const Wide length = ask_length(some, step);
      a[0] = {t.x, length, some}, a[1] = {t.y, length, some}, a[2] = {t.z, length, some}, a[3] = {t.w, length, some};
    } else {
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        const u32 o = occurrence(turn(round, q));
        const bool some = threadIdx.x < kResolvers && o < occurrences();
        const u32 step = some ? step_of(o) : 0, place = some ? o - step * top_k() : 0;
        if constexpr (kOrdinary)
          a[q].token = selection[i64{f.token_step} * step + i64{f.token_place} * place];
        else
          a[q].token = *(some ? &x.tokens(b, step, place) : reinterpret_cast<const std::int32_t*>(&no_tokens));
        a[q].length = ask_length(some, step);
        a[q].some = some;
      }
    }
  }
  __device__ __forceinline__ int host_width() const { return kOrdinary ? (f.flags & kWideHosts ? 8 : 4) : x.host_locs.bytes; }
  /// The host row of token t, if there can be one; what row_of_host() makes of it: kEmpty if there is none.
  __device__ __forceinline__ Wide ask_host(std::int32_t t) const {
    if constexpr (kOrdinary)
      return ask_wide(reinterpret_cast<const u32*>(hosts + i64{f.host_bytes} * (static_cast<u32>(t) < context() ? t : 0)), host_width());
    return ask_wide(static_cast<u32>(t) < context() ? wide_at(x.host_locs, r, t) : reinterpret_cast<const u32*>(&no_tokens), host_width());
  }
  __device__ __forceinline__ u32 row_of_host(const Wide& h, std::int32_t t) const {
    const i64 row = h.value(host_width());
    return static_cast<u32>(t) < context() && row >= 0 && row < copy.host_rows ? static_cast<u32>(row) : kEmpty;
  }
  /// Where token t was put last, kEmpty nowhere.
  __device__ __forceinline__ u32 hint(std::int32_t t) const {
    if constexpr (kNative<Args>) {
      const std::byte* p;
      if constexpr (kOrdinary)
        p = hints + i64{f.hint_bytes} * t;
      else
        p = static_cast<const std::byte*>(x.token_slots.data) + (r * x.token_slots.s0 + t * x.token_slots.s1) * x.token_slots.bytes;
      return (kOrdinary ? (f.flags & kWideHints) != 0 : x.token_slots.bytes == 4)
                 ? *reinterpret_cast<const u32*>(p)
                 : static_cast<u32>(*reinterpret_cast<const std::int16_t*>(p));
    } else {
      const i64 e0 = x.index(r, 0, layout::bank_place(0, static_cast<u32>(t), x.hash_size)),
                e1 = x.index(r, 1, layout::bank_place(1, static_cast<u32>(t), x.hash_size));
      const i64 e = layout::entry_token(e0) == static_cast<u32>(t) ? e0 : e1;
      return e >= 0 && layout::entry_token(e) == static_cast<u32>(t) && layout::entry_slot(e) < x.hot
                 ? static_cast<u32>(layout::entry_slot(e))
                 : kEmpty;
    }
  }

  /// The first of a thread's columns of the tail.
  struct Tail {
    std::int32_t token, loc;
  };
  __device__ __forceinline__ Tail ask_tail() const {
    const u32 c = hot() + threadIdx.x - kResolvers;
    const bool some = plan.tail_mask != 0 && c < columns();
    if constexpr (kOrdinary) {
      const u32 at = min(c, columns() - 1);  // a thread that has none reads the last
      return {f.slot_tokens[i64{f.slot_row} * r + i64{f.slot_step} * at], f.slot_locs[i64{f.loc_row} * r + i64{f.loc_step} * at]};
    }
    const auto* const none = reinterpret_cast<const std::int32_t*>(&no_tokens);
    return {*(some ? &x.slot_tokens(r, c) : none), *(some ? &x.slot_locs(r, c) : none)};
  }
  __device__ __forceinline__ void map_tail(const Tail& first) const {
    if (plan.tail_mask == 0) return;
#pragma unroll 1
    for (u32 c = hot() + threadIdx.x - kResolvers; c < columns(); c += kThreads - kResolvers) {
      const bool begin = c == hot() + threadIdx.x - kResolvers;
      const std::int32_t t = begin ? first.token : x.slot_tokens(r, c), loc = begin ? first.loc : x.slot_locs(r, c);
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
  /// A row outside the pool, in the table (by the warps that will bring rows; four words at a time) or in my share of the scratch (by the others;
  /// all of it if there is as little as they can look at at once: then all CTAs say the same).
  __device__ __forceinline__ bool bad_table() const {
    bool bad = false;
    if constexpr (kOrdinary) {
#pragma unroll 4
      for (u32 c = 4 * (threadIdx.x - kResolvers); c < columns(); c += 4 * (kThreads - kResolvers)) {
        const int4 v = *at<int4>(f.locs_at + 4 * c);
        bad |= v.x >= copy.device_rows;
        bad |= c + 1 < columns() && v.y >= copy.device_rows;
        bad |= c + 2 < columns() && v.z >= copy.device_rows;
        bad |= c + 3 < columns() && v.w >= copy.device_rows;
      }
    } else {
#pragma unroll 1
      for (u32 c = rank * (kThreads - kResolvers) + threadIdx.x - kResolvers; c < columns(); c += plan.cluster * (kThreads - kResolvers))
        bad |= slot_loc(c) >= copy.device_rows;
    }
    return bad;
  }
  /// The first of a thread's rows of the scratch, -1 if it has none.
  __device__ __forceinline__ u32 spare_rows() const { return kOrdinary ? f.scratch : static_cast<u32>(x.scratch); }
  __device__ __forceinline__ std::int32_t ask_scratch() const {
    const u32 n = spare_rows(), c = n <= kResolvers ? threadIdx.x : rank * kResolvers + threadIdx.x;
    return c < n ? x.scratch_locs(r, c) : -1;
  }
  __device__ __forceinline__ bool bad_scratch(std::int32_t first) const {
    bool bad = first >= copy.device_rows;
    const u32 n = spare_rows();
    if (n <= kResolvers) return bad;
#pragma unroll 1
    for (u32 c = (plan.cluster + rank) * kResolvers + threadIdx.x; c < n; c += plan.cluster * kResolvers)
      bad |= x.scratch_locs(r, c) >= copy.device_rows;
    return bad;
  }

  // The table of claims: place p lies in CTA p >> kPlaceBits. An entry is token << 32 | its smallest occurrence, all ones if empty.
  __device__ __forceinline__ u32 claim_at(u32 p) const {
    return remote(ptx::shared(words(plan.claims) + 2 * (p & below(kPlaceBits))), p >> kPlaceBits);
  }
  __device__ __forceinline__ u32 home(u32 t) const {
    const u64 at = u64{t * 2654435769u} * cluster();
    return static_cast<u32>(at >> 32) << kPlaceBits | __umulhi(static_cast<u32>(at), plan.part);
  }
  __device__ __forceinline__ u32 next_place(u32 p) const {
    if ((++p & below(kPlaceBits)) != plan.part) return p;
    const u32 cta = (p >> kPlaceBits) + 1;
    return cta == plan.cluster ? 0 : cta << kPlaceBits;
  }
  /// The place of token t, where occurrence o is noted; `mine`: nobody had asked for t before. All that it writes has come back as a value,
  /// hence is done, when it returns: so no fence is needed before others are told, and a fence would wait for rows of the host.
  __device__ __forceinline__ u32 claim(u32 t, u32 o, bool& mine) const {
    constexpr u64 kNobody = ~u64{0};
    const u64 asks = u64{t} << 32 | o;
    u32 p = home(t);
    u64 found;
#pragma unroll 1
    while ((found = remote_cas(claim_at(p), kNobody, asks)) != kNobody && found >> 32 != t) p = next_place(p);
    mine = found == kNobody;
#pragma unroll 1
    while (!mine && found > asks) {
      const u64 old = remote_cas(claim_at(p), found, asks);
      if (old == found) break;
      found = old;
    }
    return p;
  }
  /// Of an entry of the lists that has a token; of one that is mine.
  __device__ __forceinline__ u32 token_at(u32 e) const {
    if (!kNative<Args> || plan.tokens_kept) return token()[e];
    const u32 o = number()[e], step = plan.by_step(o), place = o - step * static_cast<u32>(x.top_k);
    if constexpr (kOrdinary) return static_cast<u32>(selection[i64{plan.token_step} * step + i64{plan.token_place} * place]);
    return static_cast<u32>(x.tokens(b, step, place));
  }
  __device__ __forceinline__ u32 host_row_at(u32 e) const {
    if (e < plan.rows_kept) return row_of()[e];
    const auto t = static_cast<std::int32_t>(token_at(e));
    return row_of_host(ask_host(t), t);
  }
  /// A place for each lane of the warp that has something: in the list of what is mine or in the other one.
  __device__ __forceinline__ u32 place_in_lists(bool some, bool mine) const {
    const u32 front = __ballot_sync(kFull, some && mine), rear = __ballot_sync(kFull, some && !mine);
    u32 before = 0;
    if (lane_id() == 0 && (front | rear) != 0)
      before = atomicAdd(&s().lists, static_cast<u32>(__popc(front)) | static_cast<u32>(__popc(rear)) << 16);
    before = __shfl_sync(kFull, before, 0);
    return mine ? (before & 0xFFFFu) + __popc(front & below(lane_id())) : back((before >> 16) + __popc(rear & below(lane_id())));
  }
  __device__ __forceinline__ u32 filter_bit(u32 t) const { return (t * 2654435769u >> 9) & plan.filter_mask; }

  /// What is read next of occurrences, by their tokens; nothing here waits for it.
  struct Look {
    std::int32_t token[kDeep], length[kDeep];  // token -1: none
    u32 hint[kDeep];
  };
  __device__ __forceinline__ void look(const Asked (&asked)[kDeep], Look& l) const {
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) {
      l.length[q] = clamp(asked[q].length.value(kOrdinary ? (f.flags & kWideLengths ? 8 : 4) : x.seq_lens.bytes));
      const std::int32_t t = l.token[q] = asked[q].some && asked[q].token < l.length[q] ? asked[q].token : -1;
      l.hint[q] = kEmpty;
      if (kNative<Args> ? t >= 0 && static_cast<u32>(t) < context() : t >= static_cast<std::int32_t>(hot())) l.hint[q] = hint(t);
    }
  }
  /// What a round has found: columns, kEmpty none; what is missing is answered later.
  struct Found {
    u32 column[kDeep];
    bool miss[kDeep];
    u32 round;
  };
  __device__ __forceinline__ void answer_found(u32 round, const Found& found) const {
    await_table(1);
    std::int32_t locs[kDeep];
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) {
      const std::int32_t loc = slot_loc(min(found.column[q], columns() - 1));
      locs[q] = found.column[q] != kEmpty ? max(loc, -1) : -1;
    }
    if constexpr (kQuads) {
      const u32 o = occurrence(turn(round, 0)), step = step_of(o);
      std::int32_t* const to = answers + i64{plan.out_step} * step + (o - step * top_k());
      if (o >= occurrences()) {
      } else if (found.miss[0] | found.miss[1] | found.miss[2] | found.miss[3]) {
#pragma unroll
        for (u32 q = 0; q < kDeep; ++q)
          if (!found.miss[q]) to[q] = locs[q];
      } else {
        *reinterpret_cast<int4*>(to) = make_int4(locs[0], locs[1], locs[2], locs[3]);
      }
    } else {
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q)
        if (const u32 o = occurrence(turn(round, q)); !found.miss[q] && o < occurrences()) answer(o, locs[q]);
    }
  }
  /// Finds what is resident and notes its columns, claims the rest and puts it into my lists. Answers what was found, that of the last round excepted.
  __device__ __forceinline__ void resolve(Look& l, Found& found) const {
#pragma unroll 1
    for (u32 round = 0; round < plan.slice; round += kDeep * kResolvers) {
      std::int32_t(&token_)[kDeep] = l.token, (&n)[kDeep] = l.length;
      u32(&h)[kDeep] = l.hint;
      Asked asked[kDeep];
      const bool more = round + kDeep * kResolvers < plan.slice;
      if (more) ask(round + kDeep * kResolvers, asked);
      // A token that has no hint is in no hot slot; outside the window of the tail it is missing: its host row is asked for before the tables are here.
      Wide asked_row[kDeep];
      bool ahead[kDeep];
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        ahead[q] = kAhead && token_[q] >= 0 && h[q] == kEmpty && static_cast<u32>(n[q] - token_[q]) > tail();
        if constexpr (kAhead) asked_row[q] = ask_host(ahead[q] ? token_[q] : 0);
      }
      if (round == 0) {
        await_table(0);
        if (tail() > kMostTailMap) await_table(1);
        ptx::barrier_of(3, kThreads);  // the tokens of the slots and the tail's map are complete
      }
      // Look-ups of all before the first is judged, without branches: their latencies then come together.
      bool in_window = false;
      std::int32_t holds[kDeep];
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        const std::int32_t t = token_[q];
        in_window |= t >= 0 && static_cast<u32>(n[q] - t) <= tail();  // (t < n)
        if constexpr (!kNative<Args>)                                 // sglang's state: most often in the slot of its own number
          if (t >= 0 && static_cast<u32>(t) < hot()) h[q] = slot_token(t) == t ? static_cast<u32>(t) : hint(t);
        holds[q] = slot_token(min(h[q], hot() - 1));
      }
      u32 columns_[kDeep];
      bool misses[kDeep];
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) columns_[q] = token_[q] >= 0 && h[q] < hot() && holds[q] == token_[q] ? h[q] : kEmpty;
      if (in_window)  // the tail comes first
#pragma unroll
        for (u32 q = 0; q < kDeep; ++q)
          if (token_[q] >= 0 && static_cast<u32>(n[q] - token_[q]) <= tail())
            if (const u32 column = in_tail(token_[q]); column != kEmpty) columns_[q] = column;
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        misses[q] = token_[q] >= 0 && columns_[q] == kEmpty;
        if (misses[q] && !ahead[q]) asked_row[q] = ask_host(token_[q]);
        if (columns_[q] != kEmpty) note_hit(columns_[q]);
      }
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) {
        if (!__any_sync(kFull, misses[q])) continue;
        const u32 o = occurrence(turn(round, q)), t = static_cast<u32>(token_[q]);
        bool mine = false;
        u32 place = kNowhere, row = kEmpty;
        if (misses[q]) {  // (the claim of a token without a row comes to nothing: nobody finds a row)
          if (t < context()) place = claim(t, o, mine);
          row = row_of_host(asked_row[q], token_[q]);
          if (row == kEmpty) {
            mine = false;
            place = kNowhere;
            if (kNative<Args>) misses[q] = false;  // (sglang's index may have lost a resident token that has no host row)
          }
        }
        const u32 e = place_in_lists(misses[q], mine);
        if (!misses[q]) continue;
        if (plan.tokens_kept) token()[e] = t;
        served()[e] = place;
        number()[e] = static_cast<std::uint16_t>(o);
        if (mine && e < plan.rows_kept) atomicExch(row_of() + e, row);  // from here on a mover may take it
        if constexpr (!kNative<Args>) set_bit(words(plan.filter), filter_bit(t));
      }
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q) found.column[q] = columns_[q], found.miss[q] = misses[q];
      if (more || !kLate) answer_found(round, found);
      if (more) look(asked, l);
      found.round = round;
    }
  }

  /// sglang's state: a token that its index has lost may still sit in a slot. Every slot asks whether this CTA misses its token; the smallest
  /// one wins. By all who resolve; a set of hashes leaves out nearly all slots.
  __device__ __forceinline__ void ask_slots() const {
    const u32 moves_ = moves(), all = moves_ + again();
    if (all == 0) return;
#pragma unroll 1
    for (u32 base = 4 * (threadIdx.x & ~31u); base < hot(); base += 8 * kResolvers) {
      std::int32_t t[8];
      u32 maybe = 0;
      const auto column = [&](u32 q, u32 lane) { return base + 4 * lane + q % 4 + q / 4 * 4 * kResolvers; };
#pragma unroll
      for (u32 q = 0; q < 8; ++q) t[q] = slot_token(min(column(q, lane_id()), hot() - 1));
#pragma unroll
      for (u32 q = 0; q < 8; ++q) {  // (without branches: latencies come together)
        const u32 c = column(q, lane_id()), bit = filter_bit(static_cast<u32>(t[q])), word = words(plan.filter)[bit >> 5];
        maybe |= (static_cast<u32>((c < hot()) & (t[q] >= 0) & (static_cast<u32>(t[q]) != c)) & word >> (bit & 31u)) << q;
      }
#pragma unroll 1
      for (u32 lanes = __ballot_sync(kFull, maybe != 0); lanes != 0; lanes &= lanes - 1) {
        const u32 lane = __ffs(lanes) - 1;
#pragma unroll 1
        for (u32 which = __shfl_sync(kFull, maybe, lane); which != 0; which &= which - 1) {
          const u32 q = __ffs(which) - 1, c = column(q, lane), wanted = static_cast<u32>(slot_token(c));
#pragma unroll 1
          for (u32 j = lane_id(); j < all; j += 32) {
            const u32 e = j < moves_ ? j : back(j - moves_);
            if (token()[e] == wanted) atomicMax(served() + e, kInSlot + kLastSlot - c);
          }
        }
      }
    }
    resolvers_barrier();
    if (threadIdx.x >= kPolicyThreads) return;
#pragma unroll 1
    for (u32 j = threadIdx.x; j < all; j += kPolicyThreads) {
      const u32 v = served()[j < moves_ ? j : back(j - moves_)];
      if (v < kInSlot) continue;
      set_bit(seen(rank), kInSlot + kLastSlot - v);
      ptx::fence_async();  // (by few: it waits for what is under way)
    }
  }

  // ------------------------------------------------------------------------------------------- what the CTAs tell each other

  /// Once all of this CTA is clear, behind a barrier of the block: who passes cluster_wait() sees that. One warp publishes for all, since that
  /// waits for all loads of the SM.
  __device__ __forceinline__ void arrive_in_cluster() const {
    if (threadIdx.x / 32 == kWarps - 1)
      cluster_arrive();
    else
      cluster_arrive_quietly();
  }
  /// `bytes` at `offset` to the same place in all other CTAs, by the thinking warps behind their barrier: each asks for one or two copies.
  __device__ __forceinline__ void tell(u32 offset, u32 bytes, u64* barrier) const {
    const u32 c = threadIdx.x / 32 + kPolicyWarps * lane_id();
    if (c >= plan.cluster || c == rank) return;
    const u32 here = ptx::shared(memory + offset), there = remote_barrier(barrier, c);
    remote_expect(there, bytes);
    remote_copy(remote(here, c), here, bytes, there);
  }
  __device__ __forceinline__ void listen(u64* barrier, u32 parity) const {
    if (plan.cluster > 1) ptx::barrier_wait(barrier, parity);  // (at the scope of the cluster it would wait for all loads of the SM)
  }
  static __device__ __forceinline__ u32 remote_barrier(u64* barrier, u32 cta) { return remote(ptx::shared(barrier), cta); }
  /// The thinking warps of the whole cluster (not the barrier of the cluster: that one is of all warps).
  __device__ __forceinline__ void meet() {
    policy_barrier();
    if (threadIdx.x < plan.cluster) remote_arrive(remote_barrier(&s().met, threadIdx.x));
    cluster_barrier_wait(&s().met, met_phase);
    met_phase ^= 1;
  }

  /// A call that decides by itself what it can: all CTAs see whatever makes the row invalid, each stamps the hits that it sees, and a call without a miss
  /// needs nothing but that all say so.
  __device__ __forceinline__ bool alone() const { return kBytes && !kRows && (f.flags & kAlone) != 0 && !now.restart; }
  /// By one warp, once this CTA's lists are complete.
  __device__ __forceinline__ void say() const {
    if (lane_id() >= cluster() || lane_id() == rank) return;
    if (s().lists == 0)
      remote_expect(remote_barrier(&s().quiet, lane_id()), 0);
    else
      remote_or(remote(ptx::shared(&s().loud), lane_id()), 1);
  }
  __device__ __forceinline__ bool somebody_misses() const {
    if (s().lists != 0) return true;
    if (cluster() == 1) return false;
#pragma unroll 1
    for (u32 loud = 0;;) {
      if (__any_sync(kFull, ptx::barrier_passed(&s().quiet, 0))) return false;
      if (lane_id() == 0) loud = atomicOr(&s().loud, 0u);
      if (__shfl_sync(kFull, loud, 0) != 0) return true;
    }
  }
  /// The stamps of what this CTA saw hit. Other CTAs may still be reading them: the age of a hit column is of no account.
  __device__ __forceinline__ void stamp_mine(u32 first, u32 threads) const {
    if constexpr (kBytes) {
      std::int32_t* const stamps = const_cast<std::int32_t*>(ages());
      const std::int32_t stamp = layout::hit_stamp(static_cast<std::int32_t>(now.call));
      const i64 step = ages_step();
#pragma unroll 8
      for (u32 c = first; c < hot(); c += threads)
        if (hit_bytes()[c] != 0) stamps[c * step] = stamp;
    }
  }

  /// Behind the boxes, by the thinking warps: what was hit, and who was first. False: nothing to move, all is done.
  __device__ __forceinline__ bool learn() const {
    listen(&s().told, phase);
    u32 count = lane_id() < plan.cluster ? head(lane_id()).count : 0;
    const bool bad = __any_sync(kFull, lane_id() < plan.cluster && head(lane_id()).bad != 0);
    count = __reduce_add_sync(kFull, count);
    if (bad) {
      padding(-1, kPolicyThreads);
      return false;
    }
#pragma unroll 1
    for (u32 w = threadIdx.x; w < plan.columns_words; w += kPolicyThreads) {
      u32 all = 0;
#pragma unroll 4
      for (u32 c = 0; c < plan.cluster; ++c) all |= kOrdinary ? seen(c)[w] : *ptx::in_block(seen(rank) + w, c);
      words(plan.hits)[w] = all;
    }
    if constexpr (!kNative<Args>)
      if (rank == 0 && threadIdx.x == 0)  // before the index can be found full
        counter(layout::Counter::kGeneration) = static_cast<std::int32_t>(now.generation);
    if (count == 0) {
      policy_barrier();
      stamp_hits(false);
      if (rank == 0 && threadIdx.x < 32) finish(0, 0, 0);
      return false;
    }
    const u32 moves_ = moves(), all = moves_ + again();
#pragma unroll 1
    for (u32 j = threadIdx.x; j < all; j += kPolicyThreads) {
      const u32 e = j < moves_ ? j : back(j - moves_), o = number()[e];
      u32 v = served()[e];
      if (!kNative<Args> && v >= kNowhere) {
        answer(o, v >= kInSlot ? max(slot_loc(kInSlot + kLastSlot - v), -1) : -1);
        target()[e] = -1;
        v = kAnswered;
      } else {
        v = remote_load(claim_at(v));
        if (v == o) set_bit(my_first(), index(o));
      }
      served()[e] = v;
    }
    ptx::fence_async();
    policy_barrier();
    tell(plan.firsts + rank * (plan.slice / 8), plan.slice / 8, &s().ranked);
    return true;
  }
  __device__ __forceinline__ u32 number_of(u32 o) const { return rank_of(words(plan.first), words(plan.first_before), o); }
  /// The sum of the values of the thinking threads before this one, and of all. Two of them in a row need different places for the sums of warps.
  __device__ __forceinline__ u32 sum_before(u32 value, u32& total, u32 place) const {
    const u32 warp = threadIdx.x / 32, before = warp_sum_before(value, total);
    if (lane_id() == 0) s().warp_sum[place + warp] = total;
    policy_barrier();
    const u32 sums = lane_id() < kPolicyWarps ? s().warp_sum[place + lane_id()] : 0;
    total = __reduce_add_sync(kFull, sums);
    return before + __reduce_add_sync(kFull, lane_id() < warp ? sums : 0);
  }
  /// The set of first occurrences in their order, and ranks. Returns the number of misses.
  __device__ __forceinline__ u32 rank_first() const {
    u32 all = 0;
#pragma unroll 1
    for (u32 base = 0; base < plan.words; base += kPolicyThreads) {
      const u32 w = base + threadIdx.x;
      u32 word = 0;
      if (w < plan.words) {
        const u32 round = plan.by_cluster(w), cta = w - round * plan.cluster + first_turn(round);
        word = words(plan.firsts)[min(cta, cta - plan.cluster) * (plan.slice / 32) + round];
      }
      u32 total;
      const u32 before = all + sum_before(__popc(word), total, kPolicyWarps);
      all += total;
      if (w < plan.words) {
        words(plan.first)[w] = word;
        words(plan.first_before)[w] = before;
      }
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
  __device__ __forceinline__ u32 key_of(u32 age, std::int32_t token, std::int32_t loc, bool hit) const {
    if constexpr (kNative<Args>)
      age = now.restart ? 1u : min(max(age, 1u), kTaken - 1);
    else
      age = now.epoch_mask - ((now.call - age) & now.epoch_mask) + 1;
    return (loc < 0) | hit ? kTaken : token < 0 ? 0 : age;
  }
  // A plan that the next kernel replays while this one is still at work: the count of a row is first negative, kPending + the CTAs whose entries are
  // there; the last one writes how many there are. Nothing is published by a fence, which would wait for rows of the host: an exchange has come back.
  __device__ __forceinline__ bool publishes() const { return kBytes && !kRows && (f.flags & kPublish) != 0; }
  __device__ __forceinline__ void publish_begin() const {
    if (rank == 0) {
      *reinterpret_cast<volatile std::int32_t*>(&x.plan.count(b)) = kPending;
      __threadfence();
    }
    ptx::let_next_start();
  }
  __device__ __forceinline__ void publish_end(std::int32_t n) const {
    if (atomicAdd(&x.plan.count(b), 1) == kPending + static_cast<std::int32_t>(cluster()) - 1)
      *reinterpret_cast<volatile std::int32_t*>(&x.plan.count(b)) = n;
  }
  /// Of slot c, where the tables are not here.
  __device__ __forceinline__ u32 key_at(u32 c) const {
    return key_of(static_cast<u32>(ages()[c * ages_step()]), slot_token(c), slot_loc(c), has_bit(words(plan.hits), c));
  }
  /// The key of every slot takes the place of its age (if the tables are here); s().low and high become a range that holds all of candidates.
  __device__ __forceinline__ void make_keys() const {
    u32 low = kTaken, high = 0;
    const auto note = [&](u32 k) {
      low = min(low, k);
      high = max(high, k == kTaken ? 0 : k);
    };
    if constexpr (kOrdinary) {  // four slots a thread: with words as such, what is looked up costs more than what is done with it
#pragma unroll 2
      for (u32 c = 4 * threadIdx.x; c < hot(); c += 4 * kPolicyThreads) {
        uint4& ages = *at<uint4>(plan.ages + 4 * c);
        const uint4 age = ages;
        const int4 token = *at<int4>(plan.tokens + 4 * c), loc = *at<int4>(plan.locs + 4 * c);
        const u32 hit = words(plan.hits)[c >> 5] >> (c & 31u);
        uint4 k;
        k.x = key_of(age.x, token.x, loc.x, hit & 1u);
        k.y = c + 1 < hot() ? key_of(age.y, token.y, loc.y, hit & 2u) : kTaken;
        k.z = c + 2 < hot() ? key_of(age.z, token.z, loc.z, hit & 4u) : kTaken;
        k.w = c + 3 < hot() ? key_of(age.w, token.w, loc.w, hit & 8u) : kTaken;
        ages = k;
        note(k.x), note(k.y), note(k.z), note(k.w);
      }
    } else {
#pragma unroll 1
      for (u32 c = threadIdx.x; c < hot(); c += kPolicyThreads) note(key_at(c));
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
      const u32 p = (w + q * kPolicyWarps) * 32 + lane_id(), c = slot_of(min(p, hot() - 1));
      k[q] = kOrdinary ? words(plan.ages)[c] : key_at(c);
      if (p >= hot()) k[q] = kTaken;
    }
  }

  /// The min(misses, candidates) smallest keys, ties in ring order, as a set with ranks. Returns how many; counts the misses meanwhile.
  __device__ __forceinline__ u32 choose_victims(u32& wanted) const {
    const u32 warp = threadIdx.x / 32;
    u32* const bins = words(plan.bins);
    u32 low = s().low, high = s().high, rest = 0, n = 0;  // take all keys below low, and `rest` of those equal to it
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
      if (begin) {
        listen(&s().ranked, busy_phase);
        rest = n = wanted = rank_first();
      } else {
        policy_barrier();
      }
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
        if (candidates <= wanted || wanted == 0) {
          n = min(candidates, wanted);
          low = wanted == 0 ? 0 : kTaken;
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
        s().bucket_rest = rest - before;
      }
      if (shift > 0)
#pragma unroll
        for (u32 i = 0; i < kEach; i += 4) *reinterpret_cast<uint4*>(bins + threadIdx.x * kEach + i) = make_uint4(0, 0, 0, 0);
      policy_barrier();
      low += s().bucket << shift;
      rest = s().bucket_rest;
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
    u32 before = 0, rank_ = 0;
#pragma unroll 1
    for (u32 base = 0; base < plan.hot_words; base += kPolicyThreads) {
      const u32 w = base + threadIdx.x;
      const u32 same = w < plan.hot_words ? equal[w] : 0, less = w < plan.hot_words ? victims[w] : 0, have = __popc(same);
      u32 total;
      const u32 here = before + sum_before(have, total, 0);
      before += total;
      const u32 take = here < rest ? min(rest - here, have) : 0;
      const u32 word = less | (take == have ? same : same & below(nth_bit(same, take)));
      const u32 r_ = rank_ + sum_before(__popc(word), total, kPolicyWarps);
      rank_ += total;
      if (w < plan.hot_words) {
        victims[w] = word;
        equal[w] = r_;
      }
    }
    if (threadIdx.x == 0) equal[plan.hot_words] = rank_;
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

  /// Whether slot and entry agree. What the slots held before this call is here; only what it puts into a victim is not.
  __device__ __forceinline__ bool live(i64 e) const {
    if (e < 0 || layout::entry_slot(e) >= x.hot) return false;
    if constexpr (kOrdinary) {
      const u32 slot = static_cast<u32>(layout::entry_slot(e)), ring = slot >= now.origin ? slot - now.origin : slot + hot() - now.origin;
      const bool same = static_cast<u32>(slot_token(slot)) == layout::entry_token(e);
      if (!has_bit(words(plan.victims), ring)) return same;
      if (same) return false;  // leaves
    }
    const auto* token = reinterpret_cast<const volatile std::int32_t*>(&x.slot_tokens(r, layout::entry_slot(e)));
    return static_cast<u32>(*token) == layout::entry_token(e);
  }
  __device__ __forceinline__ unsigned long long* index_at(int bank, u32 token) const {
    return reinterpret_cast<unsigned long long*>(&x.index(r, bank, layout::bank_place(bank, token, x.hash_size)));
  }
  __device__ __forceinline__ i64 index_look(int bank, u32 token) const {
    return static_cast<i64>(*reinterpret_cast<volatile unsigned long long*>(index_at(bank, token)));
  }
  __device__ __forceinline__ void index_erase(int bank, u32 slot, std::int32_t token) const {
    const auto e = static_cast<unsigned long long>(layout::index_entry(slot, static_cast<u32>(token)));
    atomicCAS(index_at(bank, static_cast<u32>(token)), e, static_cast<unsigned long long>(layout::kIndexDeleted));
  }
  /// `first`, `second`: what the banks have in its places.
  __device__ __forceinline__ bool index_insert(u32 slot, std::int32_t token, i64 first, i64 second) const {
    i64 e = layout::index_entry(slot, static_cast<u32>(token));
#pragma unroll 1
    for (int bank = 0; bank < 2; ++bank) {
      i64 there = bank == 0 ? first : second;
      while (!live(there) || layout::entry_token(there) == layout::entry_token(e)) {
        const auto old = static_cast<i64>(
            atomicCAS(index_at(bank, layout::entry_token(e)), static_cast<unsigned long long>(there), static_cast<unsigned long long>(e)));
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

  /// Tables, plan and answers of what this CTA claimed; target() becomes its device row.
  __device__ __forceinline__ void commit(u32 victims, u32 spare) const {
    u64 back = 0;
#pragma unroll 1
    for (u32 e = threadIdx.x; e < moves(); e += kPolicyThreads) {
      const u32 first = served()[e];
      if (!kNative<Args> && first == kAnswered) continue;
      const u32 u = number_of(first);
      const auto t = static_cast<std::int32_t>(token_at(e));
      std::int32_t loc = -1;
      if (u < victims) {
        const u32 slot = victim(u);
        loc = slot_loc(slot);
        if constexpr (kNative<Args>) {
          x.stamps(r, slot) = layout::load_stamp(static_cast<std::int32_t>(now.call));
          x.token_slots.store(r, t, slot);
          x.slot_tokens(r, slot) = t;
        } else {
          x.policy(r + 1, slot) = static_cast<std::int32_t>(now.call);
        }
      } else if (u - victims < spare) {
        loc = spare_row(u - victims);
      }
      target()[e] = loc;
      answer(number()[e], loc);
      if (x.plan.src && loc >= 0) {
        if (publishes()) {
          back |= atomicExch(reinterpret_cast<unsigned long long*>(&x.plan.src(b, u)), u64{host_row_at(e)});
          back |= static_cast<u32>(atomicExch(&x.plan.dst(b, u), loc));
        } else {
          x.plan.src(b, u) = host_row_at(e);
          x.plan.dst(b, u) = loc;
        }
      }
    }
    asm volatile("" ::"l"(back) : "memory");
  }
  /// The other occurrences of missing tokens.
  __device__ __forceinline__ void answer_again(u32 victims, u32 spare) const {
#pragma unroll 1
    for (u32 j = threadIdx.x; j < again(); j += kPolicyThreads) {
      const u32 e = back(j), first = served()[e];
      if (!kNative<Args> && first == kAnswered) continue;
      const u32 u = number_of(first);
      answer(number()[e], u < victims ? slot_loc(victim(u)) : u - victims < spare ? spare_row(u - victims) : -1);
    }
  }
  /// sglang's index and slots, by the warps that resolve and do not think: what is loaded comes, what was evicted goes. A slot has its token
  /// before the index can name it: the exchange has come back by then. So an entry that its slot does not confirm is free, whatever other
  /// CTAs are at. The first of what is done for a token comes back together: each is a way through the queue of rows.
  __device__ __forceinline__ void index_loaded() const {
    constexpr u32 kOthers = kResolvers - kPolicyThreads;
    const u32 victims = words(plan.victims_before)[plan.hot_words];
#pragma unroll 1
    for (u32 i = threadIdx.x - kPolicyThreads; (i & ~(kOthers - 1)) < moves(); i += kOthers) {
      const u32 e = i & ~(kOthers - 1) | (i & 31u) * (kOthers / 32) | i % kOthers / 32;  // a few for each warp: the slowest decides
      if (e >= moves()) continue;
      const u32 first = served()[e];
      if (first == kAnswered) continue;
      const u32 u = number_of(first);
      if (u >= victims) continue;
      const u32 slot = victim(u);
      const auto t = static_cast<std::int32_t>(token()[e]), old = slot_token(slot);
      const std::int32_t before = atomicExch(&x.slot_tokens(r, slot), t);
      const i64 there[2] = {index_look(0, static_cast<u32>(t)), index_look(1, static_cast<u32>(t))};
      if (old >= 0) index_erase(0, slot, old), index_erase(1, slot, old);
      if (before != t && !index_insert(slot, t, there[0], there[1]))  // (it differs; asked so that it is here)
        atomicOr(reinterpret_cast<u32*>(&counter(layout::Counter::kGeneration)), layout::kDegraded);
    }
  }

  /// Stamps of the hits in my share of the columns; with `restart` (once in 2^30 calls the order of use is forgotten) of all that is not loaded.
  __device__ __forceinline__ void stamp_hits(bool some_victims) const {
#pragma unroll 1
    for (u32 c = rank * kPolicyThreads + threadIdx.x; c < hot(); c += plan.cluster * kPolicyThreads) {
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
    if (kNative<Args> && !alone()) {
#pragma unroll 4
      for (u32 w = lane_id(); w < plan.columns_words; w += 32) found += __popc(words(plan.hits)[w]);
      found = __reduce_add_sync(kFull, found);
    }
    if (lane_id() != 0) return;
    if (x.plan.src && (misses == 0 || !publishes())) x.plan.count(b) = static_cast<std::int32_t>(victims + spare);
    if constexpr (kNative<Args>) {
      x.clock(r) = static_cast<std::int32_t>(now.call);
      if (x.unique_misses) x.unique_misses(b) = static_cast<std::int32_t>(misses);
      if (x.unique_hits) x.unique_hits(b) = static_cast<std::int32_t>(found);
    } else {
      x.policy(0, r) = static_cast<std::int32_t>(plan.clock.pack(slot_of(victims), now.call));
      counter(layout::Counter::kPublishedMisses) = static_cast<std::int32_t>(misses);
      counter(layout::Counter::kRunningMisses) = 0;
      counter(layout::Counter::kRunningHits) = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------- a row

  struct Clock {
    std::int32_t clock, generation;
  };
  __device__ __forceinline__ Clock ask_clock() const {
    if constexpr (kOrdinary && kNative<Args>) return {f.clock[i64{f.clock_row} * r], 0};
    if constexpr (kNative<Args>)
      return {x.clock(r), 0};
    else
      return {x.policy(0, r), counter(layout::Counter::kGeneration)};
  }
  /// False: it is none.
  __device__ __forceinline__ bool read_clock(const Clock& asked) {
    const std::int32_t clock = asked.clock;
    if constexpr (kNative<Args>) {
      now.restart = clock == layout::kMaxClock;
      now.call = now.restart ? 1u : static_cast<u32>(clock) + 1;
      return clock >= 0 && clock <= layout::kMaxClock;
    } else {
      const u32 control = static_cast<u32>(clock);
      now.restart = false;
      now.call = plan.clock.next_epoch(control);
      now.epoch_mask = plan.clock.epoch_mask();
      now.origin = 0;
      now.origin = slot_of(plan.clock.cursor(control));  // (less than twice the slots)
      now.generation = layout::next_generation(static_cast<u32>(asked.generation));
      return true;
    }
  }

  /// The victims, tables, plan and answers of what was missed, by the thinking warps.
  __device__ __forceinline__ void decide() {
    make_keys();
    policy_barrier();
    u32 misses;
    const u32 victims = choose_victims(misses);
    const u32 spare =
        plan.scratch_words > 0 && misses > victims ? min(misses - victims, words(plan.scratch_before)[plan.scratch_words]) : 0;
    if constexpr (!kOrdinary) meet();  // nobody looks at the tables any more
    commit(victims, spare);
    ptx::barrier_arrive(&s().placed);
    if (publishes()) {
      policy_barrier();
      if (threadIdx.x == 0) publish_end(static_cast<std::int32_t>(victims + spare));
    }
    answer_again(victims, spare);
    if (!alone()) stamp_hits(true);
    if (rank == 0 && threadIdx.x / 32 == kPolicyWarps - 1) finish(misses, victims, spare);
  }

  // The rows that fit into the stash are asked for before anybody knows where they go. A warp takes a few of them at once and notes them
  // in a set: lane l has rows 32 * l to 32 * l + 31.
  __device__ __forceinline__ u32 at_once() const { return copy.item <= Group::kCover ? kGroup : 2; }
  __device__ __forceinline__ std::byte* stashed(u32 e) const { return memory + plan.stash + e * plan.stash_pitch; }
  /// Lane l brings the host row of entry first + l, for l < n.
  __device__ __forceinline__ void take(u32 first, u32 n, u32 row, u32& taken) const {
    const std::byte* const from = lane_id() < n ? host_at(copy, 0, row) : nullptr;
    const u32 item = static_cast<u32>(copy.item), low = max(first, 32 * lane_id()), high = min(first + n, 32 * lane_id() + 32);
    if (low < high) taken |= below(high - low) << (low & 31u);
    uint2 scale{};
    if (copy.paged)
      scale = load_once(reinterpret_cast<const uint2*>(from ? copy.pair[0].host + layout::paged_scale_offset(row)
                                                            : reinterpret_cast<const std::byte*>(&nothing)));
    if (copy.item <= Group::kCover) {
      Group group;
      group.load(from, item / 16);
      group.keep(from, ptx::shared(stashed(first)), item, plan.stash_pitch);
    } else {
      Pair group;
      group.load(from, item / 16);
      group.keep(from, ptx::shared(stashed(first)), item, plan.stash_pitch);
    }
    if (copy.paged && from) *reinterpret_cast<uint2*>(stashed(first + lane_id()) + item) = scale;
  }
  /// While others are resolving: whatever they have found.
  __device__ __forceinline__ void bring_early(u32& taken) const {
#pragma unroll 1
    for (;;) {
      const bool last = ptx::barrier_passed(&s().resolved, phase);
      u32 first = 0;
      if (lane_id() == 0) first = atomicOr(&s().taken, 0u);
      first = __shfl_sync(kFull, first, 0);
      const u32 e = first + lane_id();
      const u32 row = lane_id() < at_once() && e < plan.stash_rows ? atomicOr(row_of() + e, 0u) : kEmpty;
      const u32 n = __ffs(~__ballot_sync(kFull, row != kEmpty)) - 1;
      if (n > 0) {
        bool won = false;
        if (lane_id() == 0) won = atomicCAS(&s().taken, first, first + n) == first;
        if (__shfl_sync(kFull, won, 0)) {
          take(first, n, row, taken);
        }
      } else if (__all_sync(kFull, last)) {
        return;
      } else {
        __nanosleep(40);
      }
    }
  }
  __device__ __forceinline__ u32 next_rows() const {
    u32 first = 0;
    if (lane_id() == 0) first = atomicAdd(&s().taken, at_once());
    return __shfl_sync(kFull, first, 0);
  }
  __device__ __forceinline__ void move_straight(u32 first) {
    const u32 e = first + lane_id(), n = min(at_once(), moves() - first);
    move_pool_rows(copy, lane_id() < n ? host_row_at(e) : 0, lane_id() < n ? target()[e] : -1, n);
  }
  /// Until it is known where rows go: into the stash. Then what lies there goes to its place.
  __device__ __forceinline__ void bring(u32 taken) {
    const u32 moves_ = moves(), item = static_cast<u32>(copy.item);
    u32 held = kEmpty;
#pragma unroll 1
    while (plan.stash_rows > 0 && held == kEmpty && !__any_sync(kFull, ptx::barrier_passed(&s().placed, phase))) {
      const u32 first = next_rows();
      if (first >= moves_) break;
      const u32 n = min(at_once(), moves_ - first);
      if (first + n <= plan.stash_rows)
        take(first, n, lane_id() < n ? row_of()[first + lane_id()] : 0, taken);
      else
        held = first;
    }
    ptx::fence_async();
    ptx::barrier_wait(&s().placed, phase);
    if (s().busy == 0) return;
    __syncwarp();
#pragma unroll 1
    for (u32 base = 0; base < plan.stash_rows; base += 32) {
      const u32 e = base + lane_id();
      if (__shfl_sync(kFull, taken, base / 32) >> lane_id() & 1u)
        if (const std::int32_t loc = target()[e]; loc >= 0) {
          ptx::bulk_store(device_at(copy, 0, loc), stashed(e), item);
          if (copy.paged)
            *reinterpret_cast<uint2*>(copy.pair[0].device + layout::paged_scale_offset(loc)) = *reinterpret_cast<uint2*>(stashed(e) + item);
        }
    }
    ptx::bulk_commit();
    if (held != kEmpty) move_straight(held);
  }
  /// The others, by all warps.
  __device__ __forceinline__ void bring_rest() {
#pragma unroll 1
    for (u32 first; (first = next_rows()) < moves();) move_straight(first);
  }

  /// What is read first of a row; nothing here waits for it.
  struct Begin {
    Wide request, other;
    std::int32_t real;
    Asked asked[kDeep];
  };
  __device__ __forceinline__ Begin begin(i64 batch_row) {
    b = batch_row;
    Begin a;
    if constexpr (kOrdinary) {
      const auto* const ids = static_cast<const std::byte*>(f.requests);
      const auto row = static_cast<std::int32_t>(b);
      const int width = f.flags & kWideRequests ? 8 : 4;
      a.request = ask_wide(reinterpret_cast<const u32*>(ids + i64{f.request_bytes} * row), width);
      a.real = *f.real;
      selection = f.tokens + i64{f.token_row} * row;  // (where lists of tokens do not fit, they are read again by whoever needs them)
      if (threadIdx.x >= kResolvers) {                // they look for another row with the same request
        const auto other = static_cast<std::int32_t>(threadIdx.x - kResolvers);
        a.other = ask_wide(
            reinterpret_cast<const u32*>(ids + i64{f.request_bytes} * (other < static_cast<std::int32_t>(f.batch) ? other : row)), width);
        return a;
      }
      lengths = static_cast<const std::byte*>(f.lengths) + i64{f.length_row} * row;
    } else {
      a.request = ask_wide(wide_at(x.requests, b, 0), x.requests.bytes);
      a.real = *(x.num_real ? x.num_real : reinterpret_cast<const std::int32_t*>(&no_tokens));
      a.other = a.request;
      selection = &x.tokens(b, 0, 0);
    }
    ask(0, a.asked);
    return a;
  }
  /// Another row of the batch that has my request; by the warps that will bring rows.
  __device__ __forceinline__ bool twice(Wide first, int width, i64 real) const {
    bool bad = false;
    i64 other = threadIdx.x - kResolvers;
    if constexpr (kOrdinary) {
      bad = other < real && other != b && first.value(width) == r;
      other += kThreads - kResolvers;
    }
#pragma unroll 1
    for (; other < real; other += kThreads - kResolvers)
      if (other != b) bad |= load_wide(x.requests, other, 0) == r;
    return bad;
  }
  __device__ __forceinline__ void row(const Begin& begin) {
    clear();
    __syncthreads();  // everything is clear, all barriers are ready
    arrive_in_cluster();
    const int width = kOrdinary ? (f.flags & kWideRequests ? 8 : 4) : x.requests.bytes;
    r = begin.request.value(width);
    const i64 batch = kOrdinary ? i64{f.batch} : x.batch;
    const i64 real = (kOrdinary ? (f.flags & kGivenReal) != 0 : x.num_real != nullptr) ? min(max(i64{begin.real}, i64{0}), batch) : batch;
    answers = kOrdinary ? f.out + b * f.out_row : &x.out(b, 0, 0);
    if (b >= real || r < 0 || r >= (kOrdinary ? i64{f.slots} : x.request_slots)) {
      cluster_wait();
      padding(b >= real && !kNative<Args> ? 0 : -1, kThreads);
      return;
    }
    if constexpr (kOrdinary) {
      if constexpr (kNative<Args>) hints = f.hints + r * f.hint_row;
      hosts = f.hosts + r * f.host_row;
    } else {
      if constexpr (kNative<Args>) hints = static_cast<const std::byte*>(x.token_slots.data) + r * x.token_slots.s0 * x.token_slots.bytes;
      hosts = static_cast<const std::byte*>(x.host_locs.data) + r * x.host_locs.s0 * x.host_locs.bytes;
    }
    asm("" : "+l"(hints), "+l"(hosts));  // in registers, not from their factors for each token
    __builtin_assume(__isGlobal(hints)), __builtin_assume(__isGlobal(hosts));
    const bool mover = threadIdx.x >= kResolvers;
    Look l;
    Tail tail;
    u32 page = 0;
    std::int32_t spare = -1;
    if (mover) {
      stage();
      tail = ask_tail();
      if (threadIdx.x == kThreads - 1)
        page = *reinterpret_cast<const volatile u32*>(hosts);  // its page's address will be known when it is needed
      // Arguments that are read next: cold lines of 64 bytes.
      asm volatile("" ::"l"(copy.pair[0].host), "l"(copy.pair[0].host_pitch), "l"(copy.host_rows), "l"(copy.item), "r"(plan.slice),
                   "r"(plan.context), "r"(plan.box), "r"(plan.bins), "r"(plan.stash), "l"(&nothing));
    } else {
      look(begin.asked, l);
      spare = ask_scratch();
    }
    if (publishes()) {
      if (threadIdx.x == kResolvers) publish_begin();
    } else if (kOrdinary ? (f.flags & kEarly) != 0 : plan.next_early) {
      ptx::let_next_start();
    }
    const Clock clock = ask_clock();
    cluster_wait();  // all parts of the table of claims are empty
    bool busy;
    if (mover) {  // these meet nobody between the second barrier and the end: their rows may be on their way for long
      map_tail(tail);
      bool bad = twice(begin.other, width, real);
      await_copies();
      arrive_at(3);
      await_table(1);
      bad |= bad_table();
      if (bad) atomicOr(&s().bad, 1u);
      asm volatile("" ::"r"(page));
      arrive_at(2);
      u32 taken = 0;
      bring_early(taken);
      if constexpr (kLate) {
        (void)read_clock(clock);
        if (alone() && s().bad == 0 && !somebody_misses()) return;
      }
      bring(taken);
      busy = s().busy != 0;
    } else {
      Found found;
      resolve(l, found);
      bool bad = !read_clock(clock);
      if (kLate && !alone()) answer_found(found.round, found);
      bad |= bad_scratch(spare);
      if (bad) atomicOr(&s().bad, 1u);
      ptx::fence_async();
      ptx::barrier_of(2, kThreads);
      if (threadIdx.x == kResolvers - 1) ptx::barrier_arrive(&s().resolved);
      if constexpr (!kNative<Args>) ask_slots();
      bool late = kLate && alone() && s().bad == 0;
      if (alone() && s().bad == 0) {
        if (threadIdx.x / 32 == 0) say();
        const bool mine = s().lists == 0;
        if (mine || threadIdx.x >= kPolicyThreads) {
          answer_found(found.round, found);
          late = false;
        }
        if (mine)
          stamp_mine(threadIdx.x, kResolvers);
        else if (threadIdx.x >= kPolicyThreads)
          stamp_mine(threadIdx.x - kPolicyThreads, kResolvers - kPolicyThreads);
        if (rank == 0 && threadIdx.x == 32) {
          if (x.plan.src && !publishes()) x.plan.count(b) = 0;
          if constexpr (kNative<Args>)
            if (x.unique_misses) x.unique_misses(b) = 0;
        }
        if (!somebody_misses()) {
          if (publishes() && rank == 0 && threadIdx.x == 32) x.plan.count(b) = 0;
          if constexpr (kNative<Args>)
            if (rank == 0 && threadIdx.x == 0)
              const_cast<std::int32_t*>(f.clock)[i64{f.clock_row} * r] = static_cast<std::int32_t>(now.call);
          await_table(2);  // no copy comes here once this CTA is gone
          return;
        }
      }
      if (threadIdx.x >= kPolicyThreads) {
        ptx::barrier_wait(&s().placed, phase);
        busy = s().busy != 0;
        if constexpr (!kNative<Args>)
          if (busy) index_loaded();
      } else {
        pack_hits();
        if (threadIdx.x == 0) head(rank) = {moves() + again(), s().bad, {}};
        ptx::fence_async();
        await_table(2);
        policy_barrier();
        tell(plan.box + rank * plan.box_bytes, kOrdinary ? plan.box_bytes : sizeof(Head), &s().told);
        if (late) answer_found(found.round, found);
        busy = learn();
        if (threadIdx.x == 0) s().busy = busy;
        if (!busy) ptx::let_next_start();  // nothing to move: all are about to leave
        if (busy)
          decide();
        else
          ptx::barrier_arrive(&s().placed);
        ptx::barrier_wait(&s().placed, phase);
      }
    }
    phase ^= 1;
    busy_phase ^= busy;
    if (!busy || copy.skip) return;
    bring_rest();
    ptx::bulk_wait_read<0>();
  }
};

/// kRows: a cluster serves several rows, one after the other. Most launches have a cluster for each; their kernel is one without a loop, since the
/// compiler moves what all rounds of a loop share to its front, and that was hundreds of cycles before the first load.
template <class Args, u32 kDeep, bool kOrdinary, bool kRows>
__global__ void __launch_bounds__(kThreads, 1) swap_kernel(const __grid_constant__ Front f, const __grid_constant__ Args x,
                                                           const __grid_constant__ CopyGeometry copy, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) std::byte dynamic[];
  std::byte* memory = dynamic;
  asm("" : "+l"(memory));  // in a register: as an address of its own it is made anew from the number of the CTA (S2R) for each access
  __builtin_assume(__isShared(memory));
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const u32 cluster = kOrdinary ? f.cluster : plan.cluster;
  if (threadIdx.x == kResolvers) {
    for (u64& staged : s.staged) ptx::barrier_init(&staged, 1);  // by who uses it first
    ptx::barrier_init(&s.told, max(cluster - 1, 1u));
    ptx::barrier_init(&s.ranked, max(cluster - 1, 1u));
    ptx::barrier_init(&s.quiet, max(cluster - 1, 1u));
    ptx::barrier_init(&s.placed, kPolicyThreads);
    ptx::barrier_init(&s.resolved, 1);
    ptx::barrier_init(&s.met, cluster);
    ptx::fence_barriers();
    ptx::fence_async();
  }
  Swap<Args, kDeep, kOrdinary, kRows> swap{f,       x,       copy,    plan,    memory, ptx::cluster_rank(), 0, 0, 0, 0, 0, {},
                                           nullptr, nullptr, nullptr, nullptr, nullptr};
  ptx::wait_for_previous();
#pragma unroll 1
  for (i64 b = (blockIdx.x - swap.rank >> f.cluster_shift) * f.cluster_inverse;;) {  // an exact division
    swap.row(swap.begin(b));
    if (!kRows || (b += gridDim.x / cluster) >= x.batch) break;
    ptx::fence_async();  // the next row's tables come where this one's were
    __syncthreads();
    cluster_leave();  // nobody reads what the next row will clear
  }
  cluster_leave();  // or a CTA that is gone
}

// -------------------------------------------------------------------------------------------------------------- launch

/// `spare`: as little memory as does it.
template <class Args>
Plan make_plan(const Args& x, u32 cluster, bool ordinary, bool spare) {
  Plan p{};
  const u32 O = static_cast<u32>(x.steps * x.top_k), W = static_cast<u32>(x.hot + x.tail), H = static_cast<u32>(x.hot);
  p.cluster = cluster;
  p.slice = std::max<u32>(128, (O + 128 * cluster - 1) / (128 * cluster) * 128);
  p.words = p.slice * cluster / 32;
  p.clock = layout::PolicyWord(x.hot);
  p.columns_words = (W + 31) / 32;
  p.hot_words = (H + 31) / 32;
  p.scratch_words = static_cast<u32>((x.scratch + 31) / 32);
  if (x.tail > 0 && x.tail <= kMostTailMap) {
    p.tail_mask = 3;
    while (p.tail_mask + 1 < 2 * static_cast<u32>(x.tail)) p.tail_mask = 2 * p.tail_mask + 1;
  }
  // Twice as many entries as there can be tokens with a host row, or a quarter more: chains of a full table are long.
  const i64 most = std::min<i64>(O, x.context);
  p.part = static_cast<u32>((spare ? most + most / 4 : 2 * most) / (4 * cluster) + 4) * 4;
  p.tokens_kept = !kNative<Args> || !spare;
  p.rows_kept = spare ? std::min(p.slice, kMostStash) : p.slice;
  p.by_step = Divider(static_cast<u32>(x.top_k));
  p.by_cluster = Divider(cluster);
  p.context = static_cast<u32>(std::min<i64>(x.context, i64{1} << 31));
  p.tail = static_cast<u32>(x.tail);
  p.token_step = static_cast<std::int32_t>(x.tokens.s1), p.token_place = static_cast<std::int32_t>(x.tokens.s2);
  p.out_step = static_cast<std::int32_t>(x.out.s1), p.out_place = static_cast<std::int32_t>(x.out.s2);
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
  take(sizeof(Shared) / 4);
  p.box_bytes = static_cast<u32>(sizeof(Head)) + (ordinary ? (p.columns_words + 3) / 4 * 16 : 0);
  const u32 zeros = take.bytes;
  p.hit_bytes = take(kNative<Args> && ordinary ? (W + 15) / 16 * 4 : 0);
  p.box = take(p.box_bytes / 4 * cluster + (ordinary ? 0 : (p.columns_words + 3) / 4 * 4));
  p.firsts = take(p.words);
  if constexpr (!kNative<Args>) {
    p.filter_mask = 4095;
    while (p.filter_mask + 1 < 32 * p.slice) p.filter_mask = 2 * p.filter_mask + 1;
    p.filter = take((p.filter_mask + 1) / 32);
  }
  const u32 ones = take.bytes;
  p.claims = take(2 * p.part);
  p.tail_key = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.tail_column = take(p.tail_mask ? p.tail_mask + 1 : 0);
  p.zeros = zeros, p.zero_words = (ones - zeros) / 4;
  p.ones = ones;  // to the rows that fit into the stash, see add_stash()
  const u32 rows = take.bytes;
  p.one_words = (rows - ones) / 4;
  p.row = take(p.rows_kept);
  p.token = take(p.tokens_kept ? p.slice : 0);
  p.served = take(p.slice);
  p.target = kNative<Args> ? p.served : take(p.slice);
  p.number = take(p.slice / 2);
  if (ordinary) {
    p.tokens = take(W);
    p.locs = take(W);
    p.ages = take(H);
  }
  p.first = take(p.words);
  p.first_before = take(p.words);
  p.hits = take(p.columns_words);
  p.victims = take(p.hot_words);
  p.victims_before = take(p.hot_words + 1);
  p.bins = take(kBins);
  p.scratch = take(p.scratch_words);
  p.scratch_before = take(p.scratch_words + 1);
  p.stash = take.bytes;
  p.bytes = take.bytes;
  return p;
}
/// What is left becomes the stash.
void add_stash(Plan& p, const CopyGeometry& copy, u32 most) {
  if (copy.vec != 16 || copy.item > Pair::kCover || copy.pairs != 1 || copy.skip) return;
  p.stash_pitch = static_cast<u32>(copy.item) + (copy.paged ? 16 : 0);
  p.stash_rows = std::min({p.slice, kMostStash, (most - p.bytes) / p.stash_pitch});
  p.bytes += p.stash_rows * p.stash_pitch;
  p.one_words += (p.stash_rows + 3) & ~3u;
}
template <class Args>
Front make_front(const Args& x, const Plan& p, bool ordinary, bool publish) {
  Front f{};
  f.cluster_shift = static_cast<u32>(std::countr_zero(p.cluster));
  const u32 odd = p.cluster >> f.cluster_shift;
  f.cluster_inverse = 1;
  for (int i = 0; i < 5; ++i) f.cluster_inverse *= 2 - odd * f.cluster_inverse;  // (each round doubles the bits that are right)
  f.zeros = p.zeros, f.zero_words = p.zero_words, f.ones = p.ones, f.one_words = p.one_words;
  if (!ordinary) return f;
  const auto narrow = [](i64 n) { return static_cast<std::int32_t>(n); };
  f.requests = x.requests.data, f.lengths = x.seq_lens.data, f.tokens = x.tokens.data;
  f.real = x.num_real ? x.num_real : static_cast<const std::int32_t*>(x.requests.data);
  f.request_bytes = narrow(x.requests.s0 * x.requests.bytes);
  f.length_row = narrow(x.seq_lens.s0 * x.seq_lens.bytes), f.length_step = narrow(x.seq_lens.s1 * x.seq_lens.bytes);
  f.token_row = narrow(x.tokens.s0), f.token_step = narrow(x.tokens.s1), f.token_place = narrow(x.tokens.s2);
  f.by_step = Divider(static_cast<u32>(x.top_k)).factor;
  f.top_k = static_cast<u32>(x.top_k), f.occurrences = static_cast<u32>(x.steps * x.top_k);
  f.batch = static_cast<u32>(x.batch), f.cluster = p.cluster, f.slots = static_cast<u32>(x.request_slots);
  f.hot = static_cast<u32>(x.hot), f.columns = static_cast<u32>(x.hot + x.tail), f.tail = p.tail, f.context = p.context;
  f.scratch = static_cast<u32>(x.scratch);
  f.hosts = static_cast<const std::byte*>(x.host_locs.data);
  f.slot_tokens = x.slot_tokens.data, f.slot_locs = x.slot_locs.data, f.out = x.out.data;
  f.host_row = narrow(x.host_locs.s0 * x.host_locs.bytes), f.host_bytes = narrow(x.host_locs.s1 * x.host_locs.bytes);
  f.slot_step = narrow(x.slot_tokens.s1), f.loc_step = narrow(x.slot_locs.s1);
  f.slot_row = narrow(x.slot_tokens.s0), f.loc_row = narrow(x.slot_locs.s0), f.out_row = narrow(x.out.s0);
  f.tokens_at = p.tokens, f.locs_at = p.locs, f.ages_at = p.ages;
  f.flags = (x.requests.bytes == 8 ? kWideRequests : 0) | (x.seq_lens.bytes == 8 ? kWideLengths : 0) | (x.num_real ? kGivenReal : 0) |
            (p.bulk ? kBulk : 0) | (x.host_locs.bytes == 8 ? kWideHosts : 0) | (p.next_early ? kEarly : 0);
  if constexpr (kNative<Args>) {
    f.hints = static_cast<const std::byte*>(x.token_slots.data);
    f.hint_row = narrow(x.token_slots.s0 * x.token_slots.bytes), f.hint_bytes = narrow(x.token_slots.s1 * x.token_slots.bytes);
    f.ages = x.stamps.data, f.age_row = narrow(x.stamps.s0), f.clock = x.clock.data, f.clock_row = narrow(x.clock.s0);
    if (x.token_slots.bytes == 4) f.flags |= kWideHints;
    if (!x.unique_hits && x.scratch <= kResolvers) f.flags |= kAlone;
    if (publish) f.flags |= kPublish;
  } else {
    f.ages = &x.policy(1, 0), f.age_row = narrow(x.policy.s0), f.clock = x.policy.data, f.clock_row = narrow(x.policy.s1);
  }
  return f;
}

/// Few steps and strides of 32 bits (and tables that fit into shared memory, see below).
template <class Args>
bool is_ordinary(const Args& x) {
  const auto narrow = [](auto... strides) { return ((-(i64{1} << 28) < strides && strides < (i64{1} << 28)) && ...); };
  bool yes =
      narrow(x.batch, x.request_slots, x.requests.s0, x.seq_lens.s0, x.seq_lens.s1, x.tokens.s0, x.tokens.s1, x.tokens.s2, x.out.s0,
             x.out.s1, x.out.s2, x.host_locs.s0, x.host_locs.s1, x.slot_tokens.s0, x.slot_tokens.s1, x.slot_locs.s0, x.slot_locs.s1) &&
      x.context > 0 && x.hot > 0;
  if constexpr (kNative<Args>)
    yes = yes && narrow(x.token_slots.s0, x.token_slots.s1, x.stamps.s0, x.clock.s0);
  else
    yes = yes && narrow(x.policy.s0, x.policy.s1);
  return yes;
}

/// By the occurrences that one thread has; `quads`: four in a row can be read and answered at once; `rows`: clusters serve several rows.
template <class Args>
auto kernel_for(u32 slice, bool ordinary, bool quads, bool rows) {
  if (!ordinary) return &swap_kernel<Args, 4, false, true>;
  if (rows) return quads ? &swap_kernel<Args, 4, true, true> : &swap_kernel<Args, 2, true, true>;
  if (slice <= kResolvers) return &swap_kernel<Args, 1, true, false>;
  return slice <= 2 * kResolvers || !quads ? &swap_kernel<Args, 2, true, false> : &swap_kernel<Args, 4, true, false>;
}
/// How many clusters of so many CTAs fit on the GPU at once (asked once).
template <class Args>
i64 clusters_at_once(u32 cluster) {
  struct Fit {
    i64 clusters[kMostCluster + 1] = {};
  };
  static const Fit fit = [] {
    const int most = specstate::cuda::device_info().shared_bytes - 1024;
    for (const auto kernel : {kernel_for<Args>(1, true, true, false), kernel_for<Args>(2 * kResolvers, true, true, false),
                              kernel_for<Args>(4 * kResolvers, true, true, false), kernel_for<Args>(1, true, true, true),
                              kernel_for<Args>(1, true, false, true), kernel_for<Args>(1, false, true, true)}) {
      SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    }
    Fit f;
    for (const u32 size : kClusters) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = size, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = size, config.blockDim = kThreads, config.dynamicSmemBytes = static_cast<std::size_t>(most);
      config.attrs = &attribute, config.numAttrs = 1;
      int clusters = 0;
      SPECSTATE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel_for<Args>(1, true, true, false), &config));
      f.clusters[size] = clusters;
    }
    return f;
  }();
  return fit.clusters[cluster];
}
/// CTAs a batch row: as many as fit beside each other for all rows, since look-ups are latency; of a small call, no more than have work.
template <class Args>
const u32* cluster_of(const Args& x) {
  const auto at_once = [&](u32 cluster) {
    const i64 most = clusters_at_once<Args>(cluster);
    return x.sm_budget > 0 ? std::min(most, x.sm_budget / cluster) : most;
  };
  const u32* size = x.steps * x.top_k > 4096 ? kClusters : kClusters + 1;
  while (*size > 1 && x.batch > at_once(*size)) ++size;
  return size;
}

/// `publish`: the plan, while the call is at work, if it can be. Whether it is.
template <class Args>
bool run_swap(const Args& x, Stream stream, bool publish = false) {
  if (x.batch == 0) return false;
  const CopyGeometry copy = geometry(x.copy);
  check_rows(x.op, copy);
  if (x.steps * x.top_k > kMostOccurrences) too_large(x.op, x.hot, x.steps * x.top_k);
  const u32 most = static_cast<u32>(specstate::cuda::device_info().shared_bytes - 1024);
  // As many CTAs as fit, more if one has not enough memory, tables in global memory if there is no room for them.
  const u32* const wanted = cluster_of(x);
  const u32* size = wanted;
  bool ordinary = is_ordinary(x), spare = false;
  Plan plan = make_plan(x, *size, ordinary, spare);
  while (plan.bytes > most) {
    if (!spare) {
      spare = true;
    } else if (size != kClusters && clusters_at_once<Args>(size[-1]) > 0) {
      --size;
      spare = false;
    } else if (ordinary) {
      ordinary = spare = false;
      size = wanted;
    } else {
      too_large(x.op, x.hot, x.steps * x.top_k);
    }
    plan = make_plan(x, *size, ordinary, spare);
  }
  const u32 cluster = *size;
  const auto fours = [](const auto& v) {
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.s0 % 4 == 0 && v.s1 % 4 == 0 && v.s2 == 1;
  };
  const bool quads = x.top_k % 4 == 0 && fours(x.tokens) && fours(x.out);
  add_stash(plan, copy, most);
  specstate::cuda::Launch shape;
  shape.grid = clusters_for(x.batch, cluster, x.sm_budget) * cluster;
  // Blocks of the next kernel that came early would crowd on the few multiprocessors that this one leaves.
  plan.next_early = shape.grid.x + 32 <= static_cast<unsigned>(specstate::cuda::device_info().multiprocessors);
  shape.block = kThreads;
  shape.shared = plan.bytes;
  shape.cluster = cluster;
  shape.overlap = true;
  const bool rows = shape.grid.x < x.batch * cluster;
  publish = publish && plan.next_early && ordinary && !rows;
  specstate::cuda::launch(kernel_for<Args>(plan.slice, ordinary, quads, rows), shape, stream, make_front(x, plan, ordinary, publish), x,
                          copy, plan);
  return publish;
}

}  // namespace

void run(const SwapInArgs& args, const CopyArgs* followers, std::int64_t num_followers, Stream stream) {
  ReplayPlanArgs replay = plan_of(args);
  replay.early = run_swap(args, stream, true);
  run(replay, followers, num_followers, stream);
}
void run(const SwapInArgs& args, Stream stream) { run_swap(args, stream); }
void run(const SpecSwapArgs& args, Stream stream) { run_swap(args, stream); }

}  // namespace specstate::hisparse::cuda
