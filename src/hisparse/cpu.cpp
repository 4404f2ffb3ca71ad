// The CPU backend. A swap has three parts: resolve every row (reads only, so an error leaves everything as it was), commit the
// tables of every row, move the bytes of all misses of the batch. Rows are different requests and share nothing.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/match.hpp"
#include "cpu/parallel.hpp"
#include "hisparse/args.hpp"
#include "hisparse/layout.hpp"
#include "hisparse/rows.hpp"

namespace specstate::hisparse::cpu {

using specstate::cpu::parallel_for;

namespace {

/// token -> int32, linear probing; emptied by a new generation. Its memory is kept from call to call.
class TokenMap {
 public:
  /// Empty, with room for n tokens.
  void reset(std::int64_t n) {
    const std::size_t want = std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(8, 2 * n)));
    if (want > entries_.size()) {
      entries_.assign(want, Entry{0, 0, 0});
      generation_ = 0;
    }
    // A smaller table for a smaller call: probes stay in fewer cache lines. Older entries have older generations.
    mask_ = want - 1;
    shift_ = 64 - std::countr_zero(want);
    if (++generation_ == 0) {
      std::fill(entries_.begin(), entries_.end(), Entry{0, 0, 0});
      generation_ = 1;
    }
  }
  /// The value of `token`, or null.
  std::int32_t* find(std::int32_t token) {
    for (std::size_t at = place(token);; at = (at + 1) & mask_) {
      Entry& e = entries_[at];
      if (e.generation != generation_) return nullptr;
      if (e.token == token) return &e.value;
    }
  }
  /// The value of `token`; `fresh` says that it was put in just now, as `value`.
  std::int32_t& put(std::int32_t token, std::int32_t value, bool& fresh) {
    for (std::size_t at = place(token);; at = (at + 1) & mask_) {
      Entry& e = entries_[at];
      fresh = e.generation != generation_;
      if (fresh) e = {generation_, token, value};
      if (e.token == token) return e.value;
    }
  }

 private:
  struct Entry {
    std::uint32_t generation;
    std::int32_t token, value;
  };
  std::size_t place(std::int32_t token) const {
    return static_cast<std::size_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15u >> shift_);
  }
  std::vector<Entry> entries_;
  std::size_t mask_ = 0;
  int shift_ = 0;
  std::uint32_t generation_ = 0;
};

/// An occurrence that neither the tail nor a hot slot answered: first its token, then the number of its miss, -1 for none.
struct Absent {
  std::int32_t place, value;
};

/// What the resolve of one batch row found out; nothing of the caller's has been written yet.
struct RowPlan {
  std::int64_t request = -1;         // -1: padding
  std::vector<std::int32_t> answer;  // per occurrence: device row or -1; of a miss once it has a row
  std::vector<Absent> absent;        // the first `absents`
  std::int64_t absents = 0;
  std::vector<std::int32_t> miss_token;           // distinct misses by first occurrence
  std::vector<std::int64_t> miss_src;             // their host rows
  std::vector<std::int32_t> miss_dst, miss_slot;  // of the served ones; slot -1: a scratch row
  std::vector<std::int32_t> hit_slot;             // distinct hot slots that were hit
  std::vector<std::uint8_t> hit;                  // per hot slot
  std::vector<std::int32_t> lru;                  // single step: the new order, empty if it stays
  std::int64_t tail_hits = 0;                     // distinct tail slots that answered
  std::string error;

  void clear(std::int64_t hot) {
    answer.clear();
    miss_token.clear();
    miss_src.clear();
    miss_dst.clear();
    miss_slot.clear();
    hit_slot.clear();
    lru.clear();
    hit.assign(static_cast<std::size_t>(hot), 0);
    tail_hits = absents = 0;
    error.clear();
  }
  std::int64_t served() const { return static_cast<std::int64_t>(miss_dst.size()); }
};

/// Memory that calls of one thread reuse.
std::vector<RowPlan>& row_plans(std::int64_t n) {
  thread_local std::vector<RowPlan> plans;
  if (plans.size() < static_cast<std::size_t>(n)) plans.resize(static_cast<std::size_t>(n));
  return plans;
}
struct Scratchpad {
  TokenMap hot, tail, misses;
  std::vector<std::uint32_t> keys;
  std::vector<std::int32_t> lru, free_slots, slots, state;
};
Scratchpad& scratchpad() {
  thread_local Scratchpad s;
  return s;
}

[[noreturn]] void refuse(const char* op, const std::string& name, const std::string& expected, const std::string& got) {
  core::throw_value(std::string(op) + ": " + name + ": expected " + expected + ", got " + got + ".");
}
std::string refusal(const char* op, const std::string& name, const std::string& expected, const std::string& got) {
  return std::string(op) + ": " + name + ": expected " + expected + ", got " + got + ".";
}

template <class F>
void each_row(std::int64_t n, F&& body) {
  parallel_for(n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) body(b);
  });
}

std::int64_t real_rows(const std::int32_t* num_real, std::int64_t batch) {
  return num_real ? std::clamp<std::int64_t>(*num_real, 0, batch) : batch;
}

/// Request ids of the real rows: inside, and each once.
void place_requests(const char* op, const Integers& requests, std::int64_t real, std::int64_t slots, std::vector<RowPlan>& plans) {
  TokenMap& seen = scratchpad().misses;
  seen.reset(real);
  for (std::int64_t b = 0; b < real; ++b) {
    const std::int64_t r = requests(b);
    if (r < 0 || r >= slots)
      refuse(op, "req_pool_indices", fmt::format("request ids in 0..{}", slots - 1), fmt::format("{} at [{}]", r, b));
    bool fresh;
    seen.put(static_cast<std::int32_t>(r), static_cast<std::int32_t>(b), fresh);
    if (!fresh) refuse(op, "req_pool_indices", "each request once in a batch", fmt::format("{} again at [{}]", r, b));
    plans[static_cast<std::size_t>(b)].request = r;
  }
}

void throw_first_error(const std::vector<RowPlan>& plans, std::int64_t real) {
  for (std::int64_t b = 0; b < real; ++b)
    if (!plans[static_cast<std::size_t>(b)].error.empty()) core::throw_value(plans[static_cast<std::size_t>(b)].error);
}

// ------------------------------------------------------------------------------------------------------------- copying

void move_row(const CopyArgs& c, std::int64_t src, std::int64_t dst) {
  for (int i = 0; i < c.pairs; ++i)
    copy_row(row_spans(c.host[i], c.paged, c.item_bytes, src), row_spans(c.device[i], c.paged, c.item_bytes, dst));
}

struct Move {
  std::int64_t src, dst;
};

/// Rows of one linear pair. The host rows are scattered and no hardware prefetcher sees them coming, so each one is asked for eight rows
/// before its turn.
void move_linear(const RowBuffer& host, const RowBuffer& device, std::int64_t bytes, const Move* moves, std::int64_t n) {
  constexpr std::int64_t kAhead = 8, kLine = 64;
  const std::int64_t lines = std::min<std::int64_t>(bytes, 16 * kLine);
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const std::byte* soon = host.base + layout::linear_offset(moves[i + kAhead].src, host.pitch);
      for (std::int64_t at = 0; at < lines; at += kLine) __builtin_prefetch(soon + at);
    }
    std::memcpy(device.base + layout::linear_offset(moves[i].dst, device.pitch),
                host.base + layout::linear_offset(moves[i].src, host.pitch), static_cast<std::size_t>(bytes));
  }
}

void move_all(const CopyArgs& c, const std::vector<Move>& moves) {
  const std::int64_t grain = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, c.item_bytes * c.pairs));
  parallel_for(static_cast<std::int64_t>(moves.size()), grain, [&](std::int64_t begin, std::int64_t end) {
    if (c.paged)
      for (std::int64_t i = begin; i < end; ++i)
        move_row(c, moves[static_cast<std::size_t>(i)].src, moves[static_cast<std::size_t>(i)].dst);
    else
      for (int i = 0; i < c.pairs; ++i) move_linear(c.host[i], c.device[i], c.item_bytes, moves.data() + begin, end - begin);
  });
}

void move_misses(const CopyArgs& c, const std::vector<RowPlan>& plans, std::int64_t real) {
  if (c.skip_io) return;
  thread_local std::vector<Move> moves;
  moves.clear();
  for (std::int64_t b = 0; b < real; ++b) {
    const RowPlan& p = plans[static_cast<std::size_t>(b)];
    for (std::size_t u = 0; u < p.miss_dst.size(); ++u) moves.push_back({p.miss_src[u], p.miss_dst[u]});
  }
  move_all(c, moves);
}

// ------------------------------------------------------------------------------------------- resolve of several steps

/// Calls f(pointer, stride) with the stride as a constant where it is 1, so that the loop inside can be vectorised.
template <class T, class F>
void unit_or_strided(const Strided1<T>& v, F&& f) {
  if (v.s0 == 1)
    f(v.data, std::integral_constant<std::int64_t, 1>{});
  else
    f(v.data, v.s0);
}

/// A number that the compiler knows nothing of, so that it makes no branch of it.
inline std::int32_t opaque(std::int32_t x) {
  asm("" : "+r"(x));
  return x;
}

/// Resolves all occurrences of batch row b. `find_hot(token, is_hit)` gives the hot slot that holds a token, or any slot and is_hit 0.
template <class FindHot>
void resolve(const SwapCommon& x, std::int64_t b, RowPlan& p, FindHot find_hot) {
  const std::int64_t r = p.request;
  const Strided1<std::int32_t> tokens = x.slot_tokens.row(r), locs = x.slot_locs.row(r);
  const std::int64_t device_rows = x.copy.device_rows(), host_rows = x.copy.host_rows();
  std::int32_t largest = -1;
  unit_or_strided(locs, [&](const std::int32_t* v, auto step) {
    for (std::int64_t s = 0; s < x.hot + x.tail; ++s) largest = std::max(largest, v[s * step]);
  });
  for (std::int64_t s = 0; largest >= device_rows; ++s)
    if (locs(s) >= device_rows) {
      p.error = refusal(x.op, x.locs_name, fmt::format("device rows below {}", device_rows), fmt::format("{} at [{}, {}]", locs(s), r, s));
      return;
    }
  for (std::int64_t c = 0; c < x.scratch; ++c)
    if (x.scratch_locs(r, c) >= device_rows) {
      p.error = refusal(x.op, x.scratch_name, fmt::format("device rows below {}", device_rows),
                        fmt::format("{} at [{}, {}]", x.scratch_locs(r, c), r, c));
      return;
    }
  Scratchpad& pad = scratchpad();
  std::int64_t in_tail = 0;
  for (std::int64_t s = x.hot; s < x.hot + x.tail; ++s) in_tail += tokens(s) >= 0 && locs(s) >= 0;
  pad.tail.reset(in_tail);
  bool fresh;
  for (std::int64_t s = x.hot; s < x.hot + x.tail; ++s)
    if (tokens(s) >= 0 && locs(s) >= 0) pad.tail.put(tokens(s), static_cast<std::int32_t>(s), fresh);

  // Two passes. Hits and misses come at random, so the first one takes no branch on them: it lists what no slot holds. The second one
  // numbers these, and its lookups overlap.
  const std::int64_t top_k = x.top_k, occurrences = x.steps * top_k;  // a local: `hit` holds bytes, which may be any memory to the compiler
  pad.slots.assign(static_cast<std::size_t>(x.tail), 0);
  p.absent.resize(static_cast<std::size_t>(occurrences) + 1);
  p.answer.resize(static_cast<std::size_t>(occurrences));
  p.hit_slot.resize(static_cast<std::size_t>(std::min(x.hot, occurrences) + 1));
  std::int32_t *answer = p.answer.data(), *hit_slot = p.hit_slot.data();
  std::uint8_t* const hit = p.hit.data();
  Absent* const absent = p.absent.data();
  std::int64_t hits = 0, absents = 0;
  std::int32_t at = 0;
  for (std::int64_t s = 0; s < x.steps; ++s) {
    const std::int64_t seq =
        std::max<std::int64_t>(x.seq_lens(b, s), 0);  // nothing is visible below 0, and the tail's start stays in 64 bits
    const std::int64_t tail_start = in_tail > 0 ? seq - x.tail : std::numeric_limits<std::int64_t>::max();
    const Strided1<const std::int32_t> wanted{&x.tokens(b, s, 0), x.tokens.s2};
    for (std::int64_t k = 0; k < top_k; ++k, ++answer, ++at) {
      const std::int32_t t = wanted(k);
      *answer = -1;
      if (t < 0 || t >= seq) continue;
      if (t >= tail_start) {
        if (const std::int32_t* column = pad.tail.find(t)) {
          *answer = locs(*column);
          std::int32_t& seen = pad.slots[static_cast<std::size_t>(*column - x.hot)];
          p.tail_hits += seen == 0;
          seen = 1;
          continue;
        }
      }
      std::int32_t is_hit;
      const std::int64_t slot = find_hot(t, is_hit);
      is_hit = opaque(is_hit);
      *answer = std::max(locs(slot), -1) | (is_hit - 1);
      hit_slot[hits] = static_cast<std::int32_t>(slot);  // kept if it is the first hit
      hits += is_hit & ~hit[slot];
      hit[slot] |= static_cast<std::uint8_t>(is_hit);
      absent[absents] = {at, t};
      absents += 1 - is_hit;
    }
  }
  p.hit_slot.resize(static_cast<std::size_t>(hits));

  p.absents = absents;
  pad.misses.reset(std::min(absents, x.context));
  for (std::int64_t i = 0; i < absents; ++i) {
    const std::int32_t t = absent[i].value;
    const std::int64_t src = t < x.context ? x.host_locs(r, t) : -1;
    absent[i].value = -1;
    if (src < 0) continue;
    if (src >= host_rows) {
      p.error = refusal(x.op, "host_cache_locs", fmt::format("host rows below {}", host_rows), fmt::format("{} at [{}, {}]", src, r, t));
      return;
    }
    absent[i].value = pad.misses.put(t, static_cast<std::int32_t>(p.miss_token.size()), fresh);
    if (fresh) {
      p.miss_token.push_back(t);
      p.miss_src.push_back(src);
    }
  }
}

constexpr std::uint32_t kTaken = std::numeric_limits<std::uint32_t>::max();

/// The n slots (1 <= n <= those not kTaken) with the smallest keys in [low, high], ties by the ring position counted from `origin`, listed in
/// ring order. This is the whole replacement policy: an exact selection by histograms, so that every backend finds the same victims.
void oldest_slots(const std::vector<std::uint32_t>& keys, std::uint32_t low, std::uint32_t high, std::int64_t n, std::int64_t origin,
                  std::vector<std::int32_t>& out) {
  out.resize(static_cast<std::size_t>(n) + 1);
  std::int32_t* next = out.data();
  for (int shift = 1; shift > 0;) {  // narrow [low, high] down to the n-th smallest key; n becomes its rank among equals
    constexpr int kBits = 11;
    std::int32_t histogram[1 << kBits] = {};
    const std::uint32_t range = high - low;
    shift = std::max(0, static_cast<int>(std::bit_width(range)) - kBits);
    for (const std::uint32_t key : keys)
      if (key - low <= range) ++histogram[(key - low) >> shift];
    std::uint32_t bucket = 0;
    for (; histogram[bucket] < n; ++bucket) n -= histogram[bucket];
    low += bucket << shift;
    high = low + std::min(high - low, (std::uint32_t{1} << shift) - 1);
  }
  const auto hot = static_cast<std::int64_t>(keys.size());
  const auto take = [&](std::int64_t first, std::int64_t last) {  // chosen slots come at random: no branch on them
    for (std::int64_t slot = first; slot < last; ++slot) {
      const std::uint32_t key = keys[static_cast<std::size_t>(slot)];
      const std::int32_t equal = opaque((key == low) & (n > 0));
      n -= equal;
      *next = static_cast<std::int32_t>(slot);
      next += opaque(key < low) + equal;
    }
  };
  take(origin, hot);
  take(0, origin);
  out.pop_back();
}

/// Gives the misses their rows: victims in order, then scratch rows. `key(slot)` orders the hot slots that may be taken.
template <class Key>
void assign(const SwapCommon& x, RowPlan& p, std::int64_t origin, Key&& key) {
  const auto misses = static_cast<std::int64_t>(p.miss_token.size());
  if (misses == 0) return;
  Scratchpad& pad = scratchpad();
  pad.keys.resize(static_cast<std::size_t>(x.hot));
  const Strided1<std::int32_t> locs = x.slot_locs.row(p.request);
  std::int64_t eligible = 0;
  std::uint32_t low = kTaken, high = 0;
  for (std::int64_t s = 0; s < x.hot; ++s) {
    const bool free = !p.hit[static_cast<std::size_t>(s)] && locs(s) >= 0;
    const std::uint32_t k = free ? key(s) : kTaken;
    pad.keys[static_cast<std::size_t>(s)] = k;
    low = std::min(low, k);
    high = std::max(high, free ? k : 0);
    eligible += free;
  }
  if (eligible > 0) oldest_slots(pad.keys, low, high, std::min(misses, eligible), origin, p.miss_slot);
  for (const std::int32_t slot : p.miss_slot) p.miss_dst.push_back(locs(slot));
  for (std::int64_t c = 0; c < x.scratch && p.served() < misses; ++c)
    if (x.scratch_locs(p.request, c) >= 0) {
      p.miss_slot.push_back(-1);
      p.miss_dst.push_back(x.scratch_locs(p.request, c));
    }
  for (std::int64_t i = 0; i < p.absents; ++i)
    if (const auto [place, u] = p.absent[static_cast<std::size_t>(i)]; u >= 0 && u < p.served())
      p.answer[static_cast<std::size_t>(place)] = p.miss_dst[static_cast<std::size_t>(u)];
}

void publish_plan(const PlanArgs& plan, std::int64_t b, const RowPlan& p) {
  if (!plan.src) return;
  for (std::int64_t u = 0; u < p.served(); ++u) {
    plan.src(b, u) = p.miss_src[static_cast<std::size_t>(u)];
    plan.dst(b, u) = p.miss_dst[static_cast<std::size_t>(u)];
  }
  plan.count(b) = static_cast<std::int32_t>(p.served());
}

/// Outputs and plan of a real row.
void publish(const SwapCommon& x, std::int64_t b, const RowPlan& p) {
  const std::int32_t* answer = p.answer.data();
  for (std::int64_t s = 0; s < x.steps; ++s)
    unit_or_strided(Strided1<std::int32_t>{&x.out(b, s, 0), x.out.s2}, [&](std::int32_t* out, auto step) {
      for (std::int64_t k = 0; k < x.top_k; ++k) out[k * step] = *answer++;
    });
  publish_plan(x.plan, b, p);
}

void publish_padding(const SwapCommon& x, std::int64_t b, std::int32_t sentinel) {
  for (std::int64_t s = 0; s < x.steps; ++s)
    for (std::int64_t k = 0; k < x.top_k; ++k) x.out(b, s, k) = sentinel;
  if (x.plan.src) x.plan.count(b) = 0;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------- swap_in

void run(const SwapInArgs& x, Stream) {
  const std::int64_t real = real_rows(x.num_real, x.batch);
  std::vector<RowPlan>& plans = row_plans(real);
  place_requests(x.op, x.requests, real, x.request_slots, plans);

  each_row(real, [&](std::int64_t b) {
    RowPlan& p = plans[static_cast<std::size_t>(b)];
    p.clear(x.hot);
    const std::int64_t r = p.request;
    if (x.clock(r) < 0 || x.clock(r) > layout::kMaxClock) {
      p.error = refusal(x.op, "state.clock", "a state that reset_swap_state has prepared", fmt::format("{} at [{}]", x.clock(r), r));
      return;
    }
    const Strided1<std::int32_t> tokens = x.slot_tokens.row(r), stamps = x.stamps.row(r);
    const auto resolve_by = [&](const auto* hints) {
      hints += r * x.token_slots.s0;
      const auto hot = static_cast<std::uint64_t>(x.hot);
      resolve(x, b, p, [=, context = x.context, step = x.token_slots.s1](std::int32_t t, std::int32_t& is_hit) -> std::int64_t {
        is_hit = 0;
        if (t >= context) return 0;
        const std::int64_t hint = hints[t * step], slot = static_cast<std::uint64_t>(hint) < hot ? hint : 0;
        is_hit = (hint == slot) & (tokens(slot) == t);  // the slot itself must confirm it
        return slot;
      });
    };
    if (x.token_slots.bytes == 2)
      resolve_by(static_cast<const std::int16_t*>(x.token_slots.data));
    else
      resolve_by(static_cast<const std::int32_t*>(x.token_slots.data));
    if (!p.error.empty()) return;
    const bool restart = x.clock(r) == layout::kMaxClock;
    assign(x, p, 0, [&](std::int64_t s) {
      if (tokens(s) < 0) return 0u;
      return restart ? 1u : std::clamp(static_cast<std::uint32_t>(stamps(s)), 1u, kTaken - 1);
    });
  });
  throw_first_error(plans, real);

  each_row(real, [&](std::int64_t b) {
    const RowPlan& p = plans[static_cast<std::size_t>(b)];
    const std::int64_t r = p.request;
    if (x.clock(r) == layout::kMaxClock) {  // once in 2^30 calls the order of use is forgotten
      x.clock(r) = 0;
      for (std::int64_t s = 0; s < x.hot; ++s) x.stamps(r, s) = 0;
    }
    const std::int32_t now = ++x.clock(r);
    for (const std::int32_t slot : p.hit_slot) x.stamps(r, slot) = layout::hit_stamp(now);
    for (std::int64_t u = 0; u < p.served(); ++u) {
      const std::int32_t slot = p.miss_slot[static_cast<std::size_t>(u)], t = p.miss_token[static_cast<std::size_t>(u)];
      if (slot < 0) continue;
      x.slot_tokens(r, slot) = t;
      x.stamps(r, slot) = layout::load_stamp(now);
      x.token_slots.store(r, t, slot);
    }
    publish(x, b, p);
    if (x.unique_misses) x.unique_misses(b) = static_cast<std::int32_t>(p.miss_token.size());
    if (x.unique_hits) x.unique_hits(b) = static_cast<std::int32_t>(static_cast<std::int64_t>(p.hit_slot.size()) + p.tail_hits);
  });
  for (std::int64_t b = real; b < x.batch; ++b) {
    publish_padding(x, b, -1);
    if (x.unique_misses) x.unique_misses(b) = 0;
    if (x.unique_hits) x.unique_hits(b) = 0;
  }
  move_misses(x.copy, plans, real);
}

void reset(const SwapState& s, const TensorView& requests) {
  const std::int64_t slots = s.slot_tokens.sizes[0];
  const std::int64_t n = requests.given() ? requests.sizes[0] : slots;
  auto request = [&](std::int64_t i) { return requests.given() ? core::load_index(requests, i) : i; };
  for (std::int64_t i = 0; i < n; ++i)
    if (request(i) < 0 || request(i) >= slots)
      refuse("reset_swap_state", "requests", fmt::format("request ids in 0..{}", slots - 1), fmt::format("{} at [{}]", request(i), i));
  const Integers hints{s.token_slots.data, s.token_slots.strides[0], s.token_slots.strides[1],
                       static_cast<int>(size_of(s.token_slots.dtype))};
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t r = request(i);
    for (std::int64_t c = 0; c < s.slot_tokens.sizes[1]; ++c)
      s.slot_tokens.as<std::int32_t>()[r * s.slot_tokens.strides[0] + c * s.slot_tokens.strides[1]] = -1;
    for (std::int64_t c = 0; c < s.slot_stamps.sizes[1]; ++c)
      s.slot_stamps.as<std::int32_t>()[r * s.slot_stamps.strides[0] + c * s.slot_stamps.strides[1]] = 0;
    for (std::int64_t t = 0; t < s.token_slots.sizes[1]; ++t) hints.store(r, t, -1);
    s.clock.as<std::int32_t>()[r * s.clock.strides[0]] = 0;
  }
}

// ------------------------------------------------------------------------------------------------- sglang's spec swap

namespace {

/// Two-bank cuckoo index of sglang's kernel. We never read a position out of it; it is kept so that the kernel could go on from here.
class SpecIndex {
 public:
  SpecIndex(const SpecSwapArgs& x, std::int64_t r) : x_(x), r_(r) {}

  void erase(std::int64_t slot, std::int32_t token) {
    const std::int64_t entry = layout::index_entry(slot, static_cast<std::uint32_t>(token));
    for (int bank = 0; bank < 2; ++bank) {
      std::int64_t& at = place(bank, static_cast<std::uint32_t>(token));
      if (at == entry) {
        at = layout::kIndexDeleted;
        return;
      }
    }
  }
  /// False if the entry that was displaced last found no place.
  bool insert(std::int64_t slot, std::int32_t token) {
    std::int64_t entry = layout::index_entry(slot, static_cast<std::uint32_t>(token));
    for (int bank = 0; bank < 2; ++bank) {
      std::int64_t& at = place(bank, layout::entry_token(entry));
      if (!live(at) || layout::entry_token(at) == layout::entry_token(entry)) {
        at = entry;
        return true;
      }
    }
    for (int kick = 0, bank = 0; kick < 64; ++kick, bank ^= 1) {
      std::swap(entry, place(bank, layout::entry_token(entry)));
      if (!live(entry)) return true;
    }
    return false;
  }

 private:
  std::int64_t& place(int bank, std::uint32_t token) const { return x_.index(r_, bank, layout::bank_place(bank, token, x_.hash_size)); }
  /// An entry that its slot does not confirm is stale or damaged, and free.
  bool live(std::int64_t entry) const {
    if (entry < 0 || layout::entry_slot(entry) >= x_.hot) return false;
    return static_cast<std::uint32_t>(x_.slot_tokens(r_, layout::entry_slot(entry))) == layout::entry_token(entry);
  }
  const SpecSwapArgs& x_;
  std::int64_t r_;
};

}  // namespace

void run(const SpecSwapArgs& x, Stream) {
  const std::int64_t real = real_rows(x.num_real, x.batch);
  std::vector<RowPlan>& plans = row_plans(real);
  place_requests(x.op, x.requests, real, x.request_slots, plans);
  const layout::PolicyWord word(x.hot);
  auto control = [&](std::int64_t r) { return static_cast<std::uint32_t>(x.policy(0, r)); };
  auto cursor = [&](std::int64_t r) { return static_cast<std::int64_t>(word.cursor(control(r))) % x.hot; };

  each_row(real, [&](std::int64_t b) {
    RowPlan& p = plans[static_cast<std::size_t>(b)];
    p.clear(x.hot);
    const std::int64_t r = p.request;
    const Strided1<std::int32_t> tokens = x.slot_tokens.row(r), stamps = x.policy.row(r + 1);
    // Residency is what the table says, not the index. Slot t holding token t, the state after a prefill, needs no map.
    TokenMap& hot = scratchpad().hot;
    std::int64_t moved = 0;
    for (std::int64_t s = 0; s < x.hot; ++s) moved += tokens(s) >= 0 && tokens(s) != s;
    hot.reset(moved);
    bool fresh;
    for (std::int64_t s = 0; s < x.hot; ++s)
      if (tokens(s) >= 0 && tokens(s) != s) hot.put(tokens(s), static_cast<std::int32_t>(s), fresh);
    resolve(x, b, p, [&](std::int32_t t, std::int32_t& is_hit) -> std::int64_t {
      is_hit = t < x.hot && tokens(t) == t;
      if (is_hit) return t;
      const std::int32_t* slot = moved > 0 ? hot.find(t) : nullptr;
      is_hit = slot != nullptr;
      return slot ? *slot : 0;
    });
    if (!p.error.empty()) return;
    const std::uint32_t now = word.next_epoch(control(r)), mask = word.epoch_mask();
    assign(x, p, cursor(r), [&](std::int64_t s) {
      if (tokens(s) < 0) return 0u;
      const std::uint32_t age = (now - static_cast<std::uint32_t>(stamps(s))) & mask;  // epochs wrap
      return mask - age + 1;
    });
  });
  throw_first_error(plans, real);

  each_row(real, [&](std::int64_t b) {
    const RowPlan& p = plans[static_cast<std::size_t>(b)];
    const std::int64_t r = p.request;
    const std::uint32_t now = word.next_epoch(control(r));
    SpecIndex index(x, r);
    std::uint32_t degraded = 0;
    std::int64_t loaded = 0;
    for (const std::int32_t slot : p.hit_slot) x.policy(r + 1, slot) = static_cast<std::int32_t>(now);
    for (const std::int32_t slot : p.miss_slot) {
      if (slot < 0) continue;
      ++loaded;
      if (x.slot_tokens(r, slot) >= 0) index.erase(slot, x.slot_tokens(r, slot));
      x.slot_tokens(r, slot) = -1;
    }
    for (std::int64_t u = 0; u < p.served(); ++u) {
      const std::int32_t slot = p.miss_slot[static_cast<std::size_t>(u)], t = p.miss_token[static_cast<std::size_t>(u)];
      if (slot < 0) continue;
      x.slot_tokens(r, slot) = t;
      x.policy(r + 1, slot) = static_cast<std::int32_t>(now);
      if (!index.insert(slot, t)) degraded = layout::kDegraded;
    }
    x.policy(0, r) = static_cast<std::int32_t>(word.pack(static_cast<std::uint32_t>((cursor(r) + loaded) % x.hot), now));
    auto counter = [&](layout::Counter bank) -> std::int32_t& {
      return x.scratch_state(0, layout::counter_column(bank, x.counter_requests, r));
    };
    counter(layout::Counter::kPublishedMisses) = static_cast<std::int32_t>(p.miss_token.size());
    counter(layout::Counter::kRunningMisses) = 0;
    counter(layout::Counter::kRunningHits) = 0;
    const auto generation = static_cast<std::uint32_t>(counter(layout::Counter::kGeneration));
    counter(layout::Counter::kGeneration) = static_cast<std::int32_t>(layout::next_generation(generation) | degraded);
    publish(x, b, p);
  });
  for (std::int64_t b = real; b < x.batch; ++b) publish_padding(x, b, 0);
  move_misses(x.copy, plans, real);
}

// ---------------------------------------------------------------------------------------------------------- single step

namespace {

std::int64_t selected_token(const SwapInSingleArgs& x, std::int64_t b, std::int64_t i) {
  if (x.block == 1) return x.selection(b, i);
  const std::int64_t block = x.selection(b, i / x.block);
  const std::int64_t token = block * x.block + i % x.block;
  return block < 0 || token > std::numeric_limits<std::int32_t>::max() ? -1 : token;  // the tables hold int32
}

void resolve_single(const SwapInSingleArgs& x, std::int64_t b, RowPlan& p) {
  const std::int64_t r = p.request, seq = x.seq_lens(b), K = x.top_k, H = x.hot;
  const Strided1<std::int32_t> tokens = x.slot_tokens.row(r), locs = x.slot_locs.row(r);
  const std::int64_t device_rows = x.copy.device_rows(), host_rows = x.copy.host_rows();
  for (std::int64_t s = 0; s <= H; ++s)
    if (locs(s) >= device_rows || (locs(s) < 0 && seq > H && s < H)) {
      p.error = refusal(x.op, "device_buffer_locs", fmt::format("device rows in 0..{}", device_rows - 1),
                        fmt::format("{} at [{}, {}]", locs(s), r, s));
      return;
    }
  if (seq <= H) {  // short: slot t holds token t
    for (std::int64_t i = 0; i < K; ++i) {
      const std::int64_t t = selected_token(x, b, i);
      const bool shown = t >= 0 && t < seq && (x.block > 1 || i < seq);
      p.answer.push_back(shown ? std::max(locs(t), -1) : -1);
    }
    return;
  }

  Scratchpad& pad = scratchpad();
  const std::int64_t newest = seq - 1;
  // The asked tokens, each once; the value becomes the hot slot that holds it.
  TokenMap& asked = pad.hot;
  asked.reset(K);
  bool fresh;
  constexpr std::int32_t kAbsent = -1, kNowhere = -2;
  for (std::int64_t i = 0; i < K; ++i)
    if (const std::int64_t t = selected_token(x, b, i); t >= 0 && t < newest) asked.put(static_cast<std::int32_t>(t), kAbsent, fresh);
  pad.slots.clear();       // hits, oldest first
  pad.free_slots.clear();  // the rest, oldest first
  pad.state.assign(static_cast<std::size_t>(H), 0);
  for (std::int64_t i = 0; i < H; ++i) {
    const std::int64_t slot = x.lru(r, i);
    if (slot < 0 || slot >= H || pad.state[static_cast<std::size_t>(slot)]++) {
      p.error = refusal(x.op, "lru_slots", fmt::format("a permutation of 0..{}", H - 1), fmt::format("{} at [{}, {}]", slot, r, i));
      return;
    }
    std::int32_t* value = tokens(slot) >= 0 ? asked.find(tokens(slot)) : nullptr;
    if (value && *value == kAbsent) {
      *value = static_cast<std::int32_t>(slot);
      pad.slots.push_back(static_cast<std::int32_t>(slot));
    } else {
      pad.free_slots.push_back(static_cast<std::int32_t>(slot));
    }
  }
  for (std::int64_t i = 0; i < K; ++i) {
    const std::int64_t t = selected_token(x, b, i);
    if (t == newest) {
      p.answer.push_back(std::max(locs(H), -1));
      continue;
    }
    std::int32_t* slot = t >= 0 && t < newest ? asked.find(static_cast<std::int32_t>(t)) : nullptr;
    if (slot && *slot == kAbsent) {
      const std::int64_t src = t < x.context ? x.host_locs(r, t) : -1;
      if (src >= host_rows) {
        p.error = refusal(x.op, "host_cache_locs", fmt::format("host rows below {}", host_rows), fmt::format("{} at [{}, {}]", src, r, t));
        return;
      }
      *slot = kNowhere;
      if (src >= 0) {
        *slot = pad.free_slots[p.miss_slot.size()];
        p.miss_token.push_back(static_cast<std::int32_t>(t));
        p.miss_src.push_back(src);
        p.miss_slot.push_back(*slot);
        p.miss_dst.push_back(locs(*slot));
      }
    }
    p.answer.push_back(slot && *slot >= 0 ? locs(*slot) : -1);
  }
  p.lru.assign(pad.free_slots.begin() + static_cast<std::ptrdiff_t>(p.miss_slot.size()), pad.free_slots.end());
  p.lru.insert(p.lru.end(), p.miss_slot.begin(), p.miss_slot.end());
  p.lru.insert(p.lru.end(), pad.slots.begin(), pad.slots.end());
}

}  // namespace

void run(const SwapInSingleArgs& x, Stream) {
  const std::int64_t real = real_rows(x.num_real, x.batch);
  std::vector<RowPlan>& plans = row_plans(real);
  place_requests(x.op, x.requests, real, x.request_slots, plans);
  each_row(real, [&](std::int64_t b) {
    plans[static_cast<std::size_t>(b)].clear(0);
    resolve_single(x, b, plans[static_cast<std::size_t>(b)]);
  });
  throw_first_error(plans, real);

  for (std::int64_t b = 0; b < x.batch; ++b) {
    if (b >= real) {
      for (std::int64_t i = 0; i < x.top_k; ++i) x.out(b, i) = -1;
      if (x.plan.src) x.plan.count(b) = 0;
      continue;
    }
    const RowPlan& p = plans[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < x.top_k; ++i) x.out(b, i) = p.answer[static_cast<std::size_t>(i)];
    for (std::size_t u = 0; u < p.miss_slot.size(); ++u) x.slot_tokens(p.request, p.miss_slot[u]) = p.miss_token[u];
    for (std::size_t i = 0; i < p.lru.size(); ++i) x.lru.store(p.request, static_cast<std::int64_t>(i), p.lru[i]);
    publish_plan(x.plan, b, p);
  }
  move_misses(x.copy, plans, real);
}

// ------------------------------------------------------------------------------------------------- replay and transfer

namespace {
constexpr std::int32_t kAwaited = 0, kArrived = 1;  // what a follower's sign is
}  // namespace

void run(const SwapInArgs& x, const CopyArgs* followers, std::int64_t num_followers, Stream stream) {
  run(x, stream);
  run(plan_of(x), followers, num_followers, stream);
}

void run(const ReplayPlanArgs& x, const CopyArgs* followers, std::int64_t num_followers, Stream) {
  const std::int64_t real = real_rows(x.num_real, x.batch);
  thread_local std::vector<Move> moves;
  moves.clear();
  std::int64_t host_rows = INT64_MAX, device_rows = INT64_MAX;
  for (std::int64_t f = 0; f < num_followers; ++f) {
    host_rows = std::min(host_rows, followers[f].host_rows());
    device_rows = std::min(device_rows, followers[f].device_rows());
  }
  if (x.arrived)
    for (std::int64_t f = 0; f < num_followers; ++f)
      if (x.arrived(f) != kAwaited)
        refuse(x.op, "arrived", "0, a sign that was awaited since the last replay", fmt::format("{} at [{}]", x.arrived(f), f));
  for (std::int64_t b = 0; b < real; ++b) {
    const std::int64_t n = x.count(b);
    if (n < 0 || n > x.capacity) refuse(x.op, "miss_count", fmt::format("counts in 0..{}", x.capacity), fmt::format("{} at [{}]", n, b));
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t src = x.src(b, i), dst = x.dst(b, i);
      if (dst < 0) continue;
      if (dst >= device_rows)
        refuse(x.op, "miss_dst", fmt::format("device rows below {}", device_rows), fmt::format("{} at [{}, {}]", dst, b, i));
      if (src < 0 || src >= host_rows)
        refuse(x.op, "miss_src", fmt::format("host rows in 0..{}", host_rows - 1), fmt::format("{} at [{}, {}]", src, b, i));
      moves.push_back({src, dst});
    }
  }
  for (std::int64_t f = 0; f < num_followers; ++f)
    if (!followers[f].skip_io) move_all(followers[f], moves);
  if (x.arrived)
    for (std::int64_t f = 0; f < num_followers; ++f) x.arrived(f) = kArrived;
}

void run(const AwaitFollowerArgs& x, Stream) {
  if (*x.arrived != kArrived) refuse(x.op, "arrived", "a follower whose rows were copied and not awaited yet", std::to_string(*x.arrived));
  *x.arrived = kAwaited;
}

void run(const TransferArgs& x, const TransferLayer* layers, std::int64_t num_layers, Stream) {
  std::int64_t src_rows = INT64_MAX, dst_rows = INT64_MAX;  // that exist in every layer whose rows are known
  for (std::int64_t l = 0; l < num_layers; ++l) {
    if (layers[l].src_rows >= 0) src_rows = std::min(src_rows, layers[l].src_rows);
    if (layers[l].dst_rows >= 0) dst_rows = std::min(dst_rows, layers[l].dst_rows);
  }
  const auto judge = [&](const char* name, std::int64_t row, std::int64_t rows, std::int64_t i) {
    if (row < 0 || row >= rows)
      refuse(x.op, name, rows == INT64_MAX ? "rows >= 0" : fmt::format("rows in 0..{}", rows - 1), fmt::format("{} at [{}]", row, i));
  };
  thread_local std::vector<Move> moves;  // each index is read once: what was judged is what moves
  moves.clear();
  for (std::int64_t i = 0; i < x.count && num_layers > 0; ++i) {
    const Move& m = moves.emplace_back(Move{x.src(i), x.dst(i)});
    judge("src_indices", m.src, src_rows, i);
    judge("dst_indices", m.dst, dst_rows, i);
  }
  for (std::int64_t l = 0; l < num_layers; ++l) {
    CopyArgs c;
    c.pairs = 1;
    c.paged = true;
    c.item_bytes = layout::kPagedRowBytes;
    c.host[0].base = const_cast<std::byte*>(layers[l].src);
    c.device[0].base = layers[l].dst;
    move_all(c, moves);
  }
}

}  // namespace specstate::hisparse::cpu
