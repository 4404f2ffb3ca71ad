#pragma once
// What the CTAs of a swap (swap.cu) tell each other, while rows of the host are on their way and close the SM's way out: nothing is published by a fence, which
// would wait for all of them. A box to each peer is a bulk copy, counted by a barrier in the receiver's shared memory. First: which columns were hit, how many
// occurrences miss, is the row bad. Then all claims are in, and each tells which of its occurrences were the first of their tokens. From then on all know
// the same and do the same. A call without a miss needs neither, only that everybody says so (say(), somebody_misses()).
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

// ------------------------------------------------------------------------------------------- what the CTAs tell each other
/// Once all of this CTA is clear, behind a barrier of the block: who passes cluster_wait() sees that. One warp publishes for all, since that
/// waits for all loads of the SM.
template <class Form>
__device__ __forceinline__ void Swap<Form>::arrive_in_cluster() const {
  if (threadIdx.x / 32 == kWarps - 1)
    cluster_arrive();
  else
    cluster_arrive_quietly();
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::remote_barrier(u64* barrier, u32 cta) {
  return remote(ptx::shared(barrier), cta);
}

/// `bytes` at `offset` to the same place in all other CTAs, by the thinking warps behind their barrier: each asks for one or two copies.
template <class Form>
__device__ __forceinline__ void Swap<Form>::tell(u32 offset, u32 bytes, u64* barrier) const {
  const u32 c = threadIdx.x / 32 + kPolicyWarps * lane_id();
  if (c >= plan.cluster || c == rank) return;
  const u32 here = ptx::shared(memory + offset), there = remote_barrier(barrier, c);
  remote_expect(there, bytes);
  remote_copy(remote(here, c), here, bytes, there);
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::listen(u64* barrier, u32 parity) const {
  if (plan.cluster > 1) ptx::barrier_wait(barrier, parity);  // (at the scope of the cluster it would wait for all loads of the SM)
}

/// The thinking warps of the whole cluster (not the barrier of the cluster: that one is of all warps).
template <class Form>
__device__ __forceinline__ void Swap<Form>::meet() {
  policy_barrier();
  if (threadIdx.x < plan.cluster) remote_arrive(remote_barrier(&s().met, threadIdx.x));
  cluster_barrier_wait(&s().met, met_phase);
  met_phase ^= 1;
}

/// By one warp, once this CTA's lists are complete.
template <class Form>
__device__ __forceinline__ void Swap<Form>::say() const {
  if (lane_id() >= cluster() || lane_id() == rank) return;
  if (s().lists == 0)
    remote_expect(remote_barrier(&s().quiet, lane_id()), 0);
  else
    remote_or(remote(ptx::shared(&s().loud), lane_id()), 1);
}

template <class Form>
__device__ __forceinline__ bool Swap<Form>::somebody_misses() const {
  if (s().lists != 0) return true;
  if (cluster() == 1) return false;
#pragma unroll 1
  for (u32 loud = 0;;) {
    if (__any_sync(kFull, ptx::barrier_passed(&s().quiet, 0))) return false;
    if (lane_id() == 0) loud = atomicOr(&s().loud, 0u);
    if (__shfl_sync(kFull, loud, 0) != 0) return true;
  }
}

/// The bytes become bits of my box: 16 columns a thread.
template <class Form>
__device__ __forceinline__ void Swap<Form>::pack_hits() const {
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

/// Behind the boxes, by the thinking warps: what was hit, and who was first. False: nothing to move, all is done.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::learn() const {
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
  for (u32 j = my_entry(); j < all; j += kPolicyThreads) {
    const u32 e = j < moves_ ? j : back(j - moves_), o = number()[e];
    u32 v = served()[e];
    if (!kNative<Args> && v >= kNowhere) {
      answer(o, v >= kInSlot ? max(slot_loc(kInSlot + kLastSlot - v), -1) : -1);
      target()[e] = -1;
      v = kAnswered;
    } else {
      v = kMayBeOne && cluster() == 1 ? words(plan.claims)[2 * v] : remote_load(claim_at(v));
      if (v == o) set_bit(my_first(), index(o));
    }
    served()[e] = v;
  }
  ptx::fence_async();
  policy_barrier();
  tell(plan.firsts + rank * (plan.slice / 8), plan.slice / 8, &s().ranked);
  return true;
}

/// The set of first occurrences in their order, and ranks. Returns the number of misses.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::rank_first() const {
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

/// The sum of the values of the thinking threads before this one, and of all. Two of them in a row need different places for the sums of warps.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::sum_before(u32 value, u32& total, u32 place) const {
  const u32 warp = threadIdx.x / 32, before = warp_sum_before(value, total);
  if (lane_id() == 0) s().warp_sum[place + warp] = total;
  policy_barrier();
  const u32 sums = lane_id() < kPolicyWarps ? s().warp_sum[place + lane_id()] : 0;
  total = __reduce_add_sync(kFull, sums);
  return before + __reduce_add_sync(kFull, lane_id() < warp ? sums : 0);
}

}  // namespace specstate::hisparse::cuda::swap
