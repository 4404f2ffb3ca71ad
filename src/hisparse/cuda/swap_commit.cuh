#pragma once
// What a swap writes (swap.cu): its clock, the tables, answers and plan entries of what each CTA claimed, stamps of what was hit, counters.
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

template <class Form>
__device__ __forceinline__ auto Swap<Form>::ask_clock() const -> Clock {
  if constexpr (kOrdinary && kNative<Args>) return {f.clock[i64{f.clock_row} * r], 0};
  if constexpr (kNative<Args>)
    return {x.clock(r), 0};
  else
    return {x.policy(0, r), counter(layout::Counter::kGeneration)};
}

/// False: it is none.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::read_clock(const Clock& asked) {
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
template <class Form>
__device__ __forceinline__ void Swap<Form>::decide() {
  make_keys();
  policy_barrier();
  u32 misses;
  const u32 victims = choose_victims(misses);
  const u32 spare = plan.scratch_words > 0 && misses > victims ? min(misses - victims, words(plan.scratch_before)[plan.scratch_words]) : 0;
  if constexpr (!kOrdinary) meet();  // nobody looks at the tables any more
  commit(victims, spare);
  ptx::barrier_arrive(&s().placed);
  answer_again(victims, spare);
  if (!alone()) stamp_hits(true);
  if (rank == 0 && threadIdx.x / 32 == kPolicyWarps - 1) finish(misses, victims, spare);
}

// ---------------------------------------------------------------------------------------------------------- commit
/// Tables, plan and answers of what this CTA claimed; target() becomes its device row.
template <class Form>
__device__ __forceinline__ void Swap<Form>::commit(u32 victims, u32 spare) const {
#pragma unroll 1
  for (u32 e = my_entry(); e < moves(); e += kPolicyThreads) {
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
      x.plan.src(b, u) = host_row_at(e);
      x.plan.dst(b, u) = loc;
    }
  }
}

/// The other occurrences of missing tokens.
template <class Form>
__device__ __forceinline__ void Swap<Form>::answer_again(u32 victims, u32 spare) const {
#pragma unroll 1
  for (u32 j = my_entry(); j < again(); j += kPolicyThreads) {
    const u32 e = back(j), first = served()[e];
    if (!kNative<Args> && first == kAnswered) continue;
    const u32 u = number_of(first);
    answer(number()[e], u < victims ? slot_loc(victim(u)) : u - victims < spare ? spare_row(u - victims) : -1);
  }
}

/// The stamps of what this CTA saw hit. Other CTAs may still be reading them: the age of a hit column is of no account.
template <class Form>
__device__ __forceinline__ void Swap<Form>::stamp_mine(u32 first, u32 threads) const {
  if constexpr (kBytes) {
    std::int32_t* const stamps = const_cast<std::int32_t*>(ages());
    const std::int32_t stamp = layout::hit_stamp(static_cast<std::int32_t>(now.call));
    const i64 step = ages_step();
#pragma unroll 8
    for (u32 c = first; c < hot(); c += threads)
      if (hit_bytes()[c] != 0) stamps[c * step] = stamp;
  }
}

/// Stamps of the hits in my share of the columns; with `restart` (once in 2^30 calls the order of use is forgotten) of all that is not loaded.
template <class Form>
__device__ __forceinline__ void Swap<Form>::stamp_hits(bool some_victims) const {
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
template <class Form>
__device__ __forceinline__ void Swap<Form>::finish(u32 misses, u32 victims, u32 spare) const {
  u32 found = 0;
  if (kNative<Args> && !alone()) {
#pragma unroll 4
    for (u32 w = lane_id(); w < plan.columns_words; w += 32) found += __popc(words(plan.hits)[w]);
    found = __reduce_add_sync(kFull, found);
  }
  if (lane_id() != 0) return;
  if (x.plan.src) x.plan.count(b) = static_cast<std::int32_t>(victims + spare);
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

template <class Form>
__device__ void Swap<Form>::padding(std::int32_t sentinel, u32 threads) const {
#pragma unroll 1
  for (u32 i = threadIdx.x; occurrence(i) < occurrences(); i += threads) answer(occurrence(i), sentinel);
  if (rank != 0 || threadIdx.x != 0) return;
  if (x.plan.src) x.plan.count(b) = 0;
  if constexpr (kNative<Args>) {
    if (x.unique_misses) x.unique_misses(b) = 0;
    if (x.unique_hits) x.unique_hits(b) = 0;
  }
}

}  // namespace specstate::hisparse::cuda::swap
