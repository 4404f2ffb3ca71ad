#pragma once
// One batch row of a multi-step swap (swap.cu), as one CTA of its cluster sees it: what the thread knows, small ways to what the CTAs share, and
// the table of contents. Each part stands in the file that its heading names.
#include "hisparse/cuda/swap_shape.cuh"

namespace specstate::hisparse::cuda::swap {

template <class Form>
struct Swap {
  using Args = typename Form::Args;
  static constexpr u32 kDeep = Form::kDeep;
  static constexpr bool kOrdinary = Form::kOrdinary, kRows = Form::kRows;
  static constexpr bool kQuads = kOrdinary && kDeep == 4;     // a thread has four occurrences in a row: one load, one store
  static constexpr bool kBytes = kNative<Args> && kOrdinary;  // hits: a byte a column, see note_hit()
  static constexpr bool kAhead =
      kNative<Args> && kOrdinary && !kRows && kDeep <= 2;              // what has no hint is listed before the tables are here
  static constexpr bool kLate = kNative<Args> && kOrdinary && !kRows;  // the last round is answered behind the hand-over
  static constexpr bool kMayBeOne = kRows || kDeep == 4;               // there can be clusters of one CTA

  const Front& f;
  const Args& x;
  const CopyGeometry& copy;
  const Plan& plan;
  const Followed& followed;
  std::byte* memory;
  u32 rank;
  u32 phase, busy_phase, met_phase;  // of the barriers: a row; a row with something to move; a meeting
  i64 b, r;
  Now now;
  // Of the batch row and its request, in an ordinary call.
  const std::int32_t* selection;
  std::int32_t* answers;
  const std::byte *hints, *hosts, *lengths;

  // ----------------------------------------------------------------------------------------------------- shared memory

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
  __device__ __forceinline__ std::uint8_t* hit_bytes() const { return at<std::uint8_t>(plan.hit_bytes); }
  // My lists of what is missing: what I claimed, from the front; what others did (or nobody can), from the back.
  __device__ __forceinline__ u32 moves() const { return s().lists & 0xFFFFu; }
  __device__ __forceinline__ u32 again() const { return s().lists >> 16; }
  __device__ __forceinline__ u32 back(u32 j) const { return plan.slice - 1 - j; }
  /// So many of them are asked for by who lists them; the movers bring the others.
  __device__ __forceinline__ u32 first_rows() const { return kAhead ? plan.first_rows : 0; }
  __device__ __forceinline__ u32* token() const { return words(plan.token); }
  __device__ __forceinline__ std::int32_t* target() const { return at<std::int32_t>(plan.target); }  // (native: takes the place of served)
  __device__ __forceinline__ u32* row_of() const { return words(plan.row); }
  __device__ __forceinline__ u32* served() const { return words(plan.served); }
  __device__ __forceinline__ std::uint16_t* number() const { return at<std::uint16_t>(plan.number); }
  __device__ __forceinline__ static void set_bit(u32* set, u32 bit) { atomicOr(set + (bit >> 5), 1u << (bit & 31u)); }
  __device__ __forceinline__ static bool has_bit(const u32* set, u32 bit) { return set[bit >> 5] >> (bit & 31u) & 1u; }

  // -------------------------------------------------------------------------------------------- the call, and its state

  __device__ __forceinline__ u32 occurrences() const { return kOrdinary ? f.occurrences : static_cast<u32>(x.steps * x.top_k); }
  __device__ __forceinline__ u32 hot() const { return kOrdinary ? f.hot : static_cast<u32>(x.hot); }
  __device__ __forceinline__ u32 columns() const { return kOrdinary ? f.columns : static_cast<u32>(x.hot + x.tail); }
  __device__ __forceinline__ u32 top_k() const { return kOrdinary ? f.top_k : static_cast<u32>(x.top_k); }
  __device__ __forceinline__ u32 tail() const { return kOrdinary ? f.tail : plan.tail; }
  __device__ __forceinline__ u32 context() const { return kOrdinary ? f.context : plan.context; }
  __device__ __forceinline__ u32 cluster() const { return kOrdinary ? f.cluster : plan.cluster; }
  __device__ __forceinline__ u32 step_of(u32 o) const { return kOrdinary ? static_cast<u32>(o * f.by_step >> 40) : plan.by_step(o); }
  __device__ __forceinline__ u32 spare_rows() const { return kOrdinary ? f.scratch : static_cast<u32>(x.scratch); }
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
  __device__ __forceinline__ int host_width() const { return kOrdinary ? (f.flags & kWideHosts ? 8 : 4) : x.host_locs.bytes; }
  __device__ __forceinline__ u32 filter_bit(u32 t) const { return (t * 2654435769u >> 9) & plan.filter_mask; }
  __device__ __forceinline__ u32 number_of(u32 o) const { return rank_of(words(plan.first), words(plan.first_before), o); }

  // ---------------------------------------------------------------------------------------------------- kinds of calls

  /// A call that decides by itself what it can: all CTAs see whatever makes the row invalid, each stamps the hits that it sees, and a call without a miss
  /// needs nothing but that all say so.
  __device__ __forceinline__ bool alone() const { return kBytes && !kRows && (f.flags & kAlone) != 0 && !now.restart; }

  // ------------------------------------------------------------------------------------ who meets whom within this CTA

  __device__ __forceinline__ static void resolvers_barrier() { ptx::barrier_of(5, kResolvers); }
  /// Arrives at a barrier of the whole block at which only the resolving warps wait.
  __device__ __forceinline__ static void arrive_at(int id) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(kThreads) : "memory");
  }
  /// A thinking thread's first of a list: neighbours lie with different warps, since where a warp looks up places at random each of its lanes is a cycle.
  __device__ __forceinline__ static u32 my_entry() { return (threadIdx.x & 31u) * kPolicyWarps | threadIdx.x / 32; }
  __device__ __forceinline__ static void policy_barrier() { ptx::barrier_of(1, kPolicyThreads); }

  // --------------------------------------------------------------------------------------------------- swap_tables.cuh

  /// The first of a thread's columns of the tail.
  struct Tail {
    std::int32_t token, loc;
  };
  __device__ static void fill(u32* p, u32 n, u32 value);
  __device__ void clear() const;
  __device__ const std::int32_t* ages() const;
  __device__ i64 ages_step() const;
  __device__ void stage() const;
  __device__ void await_table(int table) const;
  __device__ void await_copies() const;
  __device__ Tail ask_tail() const;
  __device__ void map_tail(const Tail& first) const;
  __device__ u32 in_tail(std::int32_t t) const;
  __device__ bool bad_table() const;
  __device__ std::int32_t ask_scratch() const;
  __device__ bool bad_scratch(std::int32_t first) const;
  __device__ bool twice(Wide first, int width, i64 real) const;

  // -------------------------------------------------------------------------------------------------- swap_resolve.cuh

  /// What is read first of an occurrence; nothing here waits for it.
  struct Asked {
    std::int32_t token;
    Wide length;
    bool some;
  };
  /// Of an occurrence, should it miss: where its token's row of the host stands, its token's place in the table of claims, its number.
  struct Claim {
    const u32* host;
    u32 place, entry, number;  // entry: the place's address
  };
  /// What is read next of occurrences, by their tokens; nothing here waits for it.
  struct Look {
    std::int32_t token[kDeep], length[kDeep];  // token -1: none
    u32 hint[kDeep];
    Claim claim[kDeep];  // kAhead
  };
  /// What a round has found: columns, kEmpty none; what is missing is answered later.
  struct Found {
    u32 column[kDeep];
    bool miss[kDeep];
    u32 round;
  };
  /// What is read first of a row; nothing here waits for it.
  struct Begin {
    Wide request, other;
    std::int32_t real;
    Asked asked[kDeep];
  };
  __device__ Begin begin(i64 batch_row);
  __device__ Wide ask_length(bool some, u32 step) const;
  __device__ void ask(u32 round, Asked (&a)[kDeep]) const;
  __device__ const u32* host_of(std::int32_t t) const;
  __device__ u32 row_of_host(const Wide& h, std::int32_t t) const;
  __device__ u32 hint(std::int32_t t) const;
  __device__ void look(u32 round, const Asked (&asked)[kDeep], Look& l) const;
  __device__ void note_hit(u32 column) const;
  __device__ void answer_found(u32 round, const Found& found) const;
  __device__ void resolve(Look& l, Found& found) const;
  __device__ __forceinline__ static std::int32_t clamp(i64 n) { return static_cast<std::int32_t>(min(max(n, i64{0}), i64{INT32_MAX})); }

  // --------------------------------------------------------------------------------------------------- swap_claims.cuh

  __device__ u32 claim_at(u32 p) const;
  __device__ u32 home(u32 t) const;
  __device__ u32 next_place(u32 p) const;
  static constexpr u64 kNobody = ~u64{0};  // has an entry
  __device__ u64 swap_entry(u32 p, u64 expected, u64 value) const;
  __device__ Claim prepare(u32 i, std::int32_t t) const;
  __device__ u32 claim(u32 p, u64 asks, u64 found, bool& mine) const;
  __device__ void list(u32 round, const std::int32_t (&tokens)[kDeep], bool (&misses)[kDeep], Claim (&claims)[kDeep]) const;
  __device__ u32 token_at(u32 e) const;
  __device__ u32 host_row_at(u32 e) const;

  // ---------------------------------------------------------------------------------------------------- swap_agree.cuh

  __device__ void arrive_in_cluster() const;
  __device__ static u32 remote_barrier(u64* barrier, u32 cta);
  __device__ void tell(u32 offset, u32 bytes, u64* barrier) const;
  __device__ void listen(u64* barrier, u32 parity) const;
  __device__ void meet();
  __device__ void say() const;
  __device__ bool somebody_misses() const;
  __device__ void pack_hits() const;
  __device__ bool learn() const;
  __device__ u32 rank_first() const;
  __device__ u32 sum_before(u32 value, u32& total, u32 place) const;

  // -------------------------------------------------------------------------------------------------- swap_victims.cuh

  __device__ u32 slot_of(u32 ring) const;
  __device__ u32 key_of(u32 age, std::int32_t token, std::int32_t loc, bool hit) const;
  __device__ u32 key_at(u32 c) const;
  __device__ void make_keys() const;
  __device__ void keys(u32 w, u32 (&k)[kBatch]) const;
  __device__ u32 choose_victims(u32& wanted) const;
  __device__ u32 victim(u32 u) const;
  __device__ std::int32_t spare_row(u32 u) const;

  // --------------------------------------------------------------------------------------------------- swap_commit.cuh

  struct Clock {
    std::int32_t clock, generation;
  };
  __device__ Clock ask_clock() const;
  __device__ bool read_clock(const Clock& asked);
  __device__ void decide();
  __device__ void commit(u32 victims, u32 spare) const;
  __device__ void answer_again(u32 victims, u32 spare) const;
  __device__ void stamp_mine(u32 first, u32 threads) const;
  __device__ void stamp_hits(bool some_victims) const;
  __device__ void finish(u32 misses, u32 victims, u32 spare) const;
  __device__ void padding(std::int32_t sentinel, u32 threads) const;

  // --------------------------------------------------------------------------------------------------- swap_sglang.cuh

  __device__ void ask_slots() const;
  __device__ bool live(i64 e) const;
  __device__ unsigned long long* index_at(int bank, u32 token) const;
  __device__ i64 index_look(int bank, u32 token) const;
  __device__ void index_erase(int bank, u32 slot, std::int32_t token) const;
  __device__ bool index_insert(u32 slot, std::int32_t token, i64 first, i64 second) const;
  __device__ void index_loaded() const;

  // ---------------------------------------------------------------------------------------------------- swap_bring.cuh

  __device__ u32 at_once() const;
  __device__ std::byte* stashed(u32 e) const;
  __device__ void take(u32 first, u32 n, u32 row, u32& taken) const;
  __device__ void bring_early(u32& taken) const;
  __device__ void bring(u32 taken);
  __device__ void await_first(u32& taken) const;
  __device__ void bring_rest();
  __device__ void bring_followers() const;
  __device__ u32 next_rows() const;
  __device__ void move_straight(u32 first);

  // ----------------------------------------------------------------------------------------------------------- swap.cu

  __device__ bool move(const Tail& tail, Wide other, int width, i64 real, const Clock& clock, u32 page);
  __device__ bool quiet(const Found& found, bool& late) const;
  __device__ bool serve(Look& l, std::int32_t spare, const Clock& clock);
  __device__ void row(const Begin& begin);
};

}  // namespace specstate::hisparse::cuda::swap
