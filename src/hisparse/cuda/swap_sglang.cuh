#pragma once
// What only sglang's state asks of a swap (swap.cu): its index is a cuckoo hash of two banks that may have lost a token which a slot still holds (ask_slots), and that
// its own kernel will look into, so it is kept (index_loaded).
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

/// sglang's state: a token that its index has lost may still sit in a slot. Every slot asks whether this CTA misses its token; the smallest
/// one wins. By all who resolve; a set of hashes leaves out nearly all slots.
template <class Form>
__device__ __forceinline__ void Swap<Form>::ask_slots() const {
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

// ------------------------------------------------------------------------------------- sglang's index, kept for its kernel
/// Whether slot and entry agree. What the slots held before this call is here; only what it puts into a victim is not.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::live(i64 e) const {
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

template <class Form>
__device__ __forceinline__ unsigned long long* Swap<Form>::index_at(int bank, u32 token) const {
  return reinterpret_cast<unsigned long long*>(&x.index(r, bank, layout::bank_place(bank, token, x.hash_size)));
}

template <class Form>
__device__ __forceinline__ i64 Swap<Form>::index_look(int bank, u32 token) const {
  return static_cast<i64>(*reinterpret_cast<volatile unsigned long long*>(index_at(bank, token)));
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::index_erase(int bank, u32 slot, std::int32_t token) const {
  const auto e = static_cast<unsigned long long>(layout::index_entry(slot, static_cast<u32>(token)));
  atomicCAS(index_at(bank, static_cast<u32>(token)), e, static_cast<unsigned long long>(layout::kIndexDeleted));
}

/// `first`, `second`: what the banks have in its places.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::index_insert(u32 slot, std::int32_t token, i64 first, i64 second) const {
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

/// sglang's index and slots, by the warps that resolve and do not think: what is loaded comes, what was evicted goes. A slot has its token
/// before the index can name it: the exchange has come back by then. So an entry that its slot does not confirm is free, whatever other
/// CTAs are at. The first of what is done for a token comes back together: each is a way through the queue of rows.
template <class Form>
__device__ __forceinline__ void Swap<Form>::index_loaded() const {
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

}  // namespace specstate::hisparse::cuda::swap
