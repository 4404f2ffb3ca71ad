#pragma once
// Resident or not: from the selection to the answers of what is resident and the lists of what is missing (swap.cu). A round is what all resolving warps look
// up at once, kDeep occurrences a thread. The chain is: token and length -> hint (where the token was put last; sglang's state: its index) -> does that slot
// hold it -> if not its host row, and a claim. Each link is a latency of cold memory, so each is asked for by all before any is judged, without branches
// in between, and nothing named ask...() waits for what it asks for.
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

template <class Form>
__device__ __forceinline__ auto Swap<Form>::begin(i64 batch_row) -> Begin {
  b = batch_row;
  Begin a;
  if constexpr (kOrdinary) {
    const auto* const ids = static_cast<const std::byte*>(f.requests);
    const std::int32_t row = factor(static_cast<u32>(b));
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

template <class Form>
__device__ __forceinline__ Wide Swap<Form>::ask_length(bool some, u32 step) const {
  if constexpr (kOrdinary)
    return ask_wide(reinterpret_cast<const u32*>(lengths + i64{f.length_step} * factor(step)), f.flags & kWideLengths ? 8 : 4);
  return ask_wide(some ? wide_at(x.seq_lens, b, step) : reinterpret_cast<const u32*>(&no_tokens), x.seq_lens.bytes);
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::ask(u32 round, Asked (&a)[kDeep]) const {
  if constexpr (kQuads) {
    const u32 o = occurrence(turn(round, 0));
    const bool some = o < occurrences();
    const u32 step = some ? step_of(o) : 0, place = some ? o - step * top_k() : 0;  // one that has none reads the first
    [[maybe_unused]] const int4 t = *reinterpret_cast<const int4*>(selection + i64{f.token_step} * factor(step) + place);
    const Wide length = ask_length(some, step);
    a[0] = {t.x, length, some}, a[1] = {t.y, length, some}, a[2] = {t.z, length, some}, a[3] = {t.w, length, some};
  } else {
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) {
      const u32 o = occurrence(turn(round, q));
      const bool some = threadIdx.x < kResolvers && o < occurrences();
      const u32 step = some ? step_of(o) : 0, place = some ? o - step * top_k() : 0;
      if constexpr (kOrdinary)
        a[q].token = selection[i64{f.token_step} * factor(step) + i64{f.token_place} * factor(place)];
      else
        a[q].token = *(some ? &x.tokens(b, step, place) : reinterpret_cast<const std::int32_t*>(&no_tokens));
      a[q].length = ask_length(some, step);
      a[q].some = some;
    }
  }
}

/// Where the host row of token t stands, if there can be one; what row_of_host() makes of what stands there: kEmpty if there is none.
template <class Form>
__device__ __forceinline__ const u32* Swap<Form>::host_of(std::int32_t t) const {
  if constexpr (kOrdinary)
    return reinterpret_cast<const u32*>(hosts + i64{f.host_bytes} * factor(static_cast<u32>(t) < context() ? static_cast<u32>(t) : 0));
  else
    return static_cast<u32>(t) < context() ? wide_at(x.host_locs, r, t) : reinterpret_cast<const u32*>(&no_tokens);
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::row_of_host(const Wide& h, std::int32_t t) const {
  const i64 row = h.value(host_width());
  return static_cast<u32>(t) < context() && row >= 0 && row < copy.host_rows ? static_cast<u32>(row) : kEmpty;
}

/// Where token t was put last, kEmpty nowhere.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::hint(std::int32_t t) const {
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

template <class Form>
__device__ __forceinline__ void Swap<Form>::look(u32 round, const Asked (&asked)[kDeep], Look& l) const {
#pragma unroll
  for (u32 q = 0; q < kDeep; ++q) {
    l.length[q] = clamp(asked[q].length.value(kOrdinary ? (f.flags & kWideLengths ? 8 : 4) : x.seq_lens.bytes));
    const std::int32_t t = l.token[q] = asked[q].some && asked[q].token < l.length[q] ? asked[q].token : -1;
    l.hint[q] = kEmpty;
    if (kNative<Args> ? t >= 0 && static_cast<u32>(t) < context() : t >= static_cast<std::int32_t>(hot())) l.hint[q] = hint(t);
  }
  if constexpr (kAhead)  // while the hints are on their way
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) {
      Claim& c = l.claim[q] = prepare(turn(round, q), l.token[q]);
      asm volatile("" : "+l"(c.host), "+r"(c.place), "+r"(c.entry), "+r"(c.number));
    }
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::note_hit(u32 column) const {
  if constexpr (kBytes)
    hit_bytes()[column] = 1;
  else
    set_bit(seen(rank), column);
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::answer_found(u32 round, const Found& found) const {
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
template <class Form>
__device__ __forceinline__ void Swap<Form>::resolve(Look& l, Found& found) const {
#pragma unroll 1
  for (u32 round = 0; round < plan.slice; round += kDeep * kResolvers) {
    std::int32_t(&token_)[kDeep] = l.token, (&n)[kDeep] = l.length;
    u32(&h)[kDeep] = l.hint;
    Asked asked[kDeep];
    const bool more = round + kDeep * kResolvers < plan.slice;
    if (more) ask(round + kDeep * kResolvers, asked);
    // A token that has no hint is in no hot slot; outside the window of the tail it is missing: it is listed before the tables are here.
    bool misses[kDeep], ahead[kDeep];
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q)
      misses[q] = ahead[q] = kAhead && token_[q] >= 0 && h[q] == kEmpty && static_cast<u32>(n[q] - token_[q]) > tail();
    if constexpr (kAhead) list(round, token_, misses, l.claim);
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
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) columns_[q] = token_[q] >= 0 && h[q] < hot() && holds[q] == token_[q] ? h[q] : kEmpty;
    if (in_window)  // the tail comes first
#pragma unroll
      for (u32 q = 0; q < kDeep; ++q)
        if (token_[q] >= 0 && static_cast<u32>(n[q] - token_[q]) <= tail())
          if (const u32 column = in_tail(token_[q]); column != kEmpty) columns_[q] = column;
    bool others[kDeep];
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) {
      others[q] = token_[q] >= 0 && !ahead[q] && columns_[q] == kEmpty;
      if (columns_[q] != kEmpty) note_hit(columns_[q]);
    }
    list(round, token_, others, l.claim);
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) misses[q] |= others[q];
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) found.column[q] = columns_[q], found.miss[q] = misses[q];
    if (more || !kLate) answer_found(round, found);
    if (more) look(round + kDeep * kResolvers, asked, l);
    found.round = round;
  }
}

}  // namespace specstate::hisparse::cuda::swap
