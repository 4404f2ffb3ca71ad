#pragma once
// Rows of the host (swap.cu). Those that fit into the stash are asked for before anybody knows where they go, by the movers, which do nothing else; when that is
// known they go from there to their places (bulk copies), and all warps bring what did not fit.
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

// The rows that fit into the stash are asked for before anybody knows where they go. A warp takes a few of them at once and notes them
// in a set: lane l has rows 32 * l to 32 * l + 31.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::at_once() const {
  return copy.item <= Group::kCover ? kGroup : 2;
}

template <class Form>
__device__ __forceinline__ std::byte* Swap<Form>::stashed(u32 e) const {
  return memory + plan.stash + e * plan.stash_pitch;
}

/// Lane l brings the host row of entry first + l, for l < n.
template <class Form>
__device__ __forceinline__ void Swap<Form>::take(u32 first, u32 n, u32 row, u32& taken) const {
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

/// While others are resolving: whatever they have found. (Whoever takes what is there, and not a full group, comes back at another time than the others:
/// movers that all waited for four rows each asked in waves, between which the link rested.)
template <class Form>
__device__ __forceinline__ void Swap<Form>::bring_early(u32& taken) const {
#pragma unroll 1
  for (;;) {
    const bool last = ptx::barrier_passed(&s().resolved, phase);
    u32 first = 0;
    if (lane_id() == 0) first = atomicOr(&s().taken, 0u);
    first = __shfl_sync(kFull, first, 0);
    const u32 e = first_rows() + first + lane_id();
    const u32 row = lane_id() < at_once() && e < plan.stash_rows ? atomicOr(row_of() + e, 0u) : kEmpty;
    const u32 n = __ffs(~__ballot_sync(kFull, row != kEmpty)) - 1;
    if (n > 0) {
      bool won = false;
      if (lane_id() == 0) won = atomicCAS(&s().taken, first, first + n) == first;
      if (__shfl_sync(kFull, won, 0)) take(first_rows() + first, n, row, taken);
    } else if (__all_sync(kFull, last)) {
      return;
    } else {
      __nanosleep(40);
    }
  }
}

/// Until it is known where rows go: into the stash. Then what lies there goes to its place.
template <class Form>
__device__ __forceinline__ void Swap<Form>::bring(u32 taken) {
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
  if constexpr (kAhead) await_first(taken);
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

/// The first rows are one mover's. Nobody leaves before they have come, whatever becomes of them.
template <class Form>
__device__ __forceinline__ void Swap<Form>::await_first(u32& taken) const {
  const u32 n = min(first_rows(), moves());
  if (threadIdx.x / 32 != kResolvers / 32 || n == 0) return;
  if (lane_id() == 0) {
    if (n < kFirst) barrier_arrive(&s().firsts, kFirst - n);
    taken |= below(n);
  }
  ptx::barrier_wait(&s().firsts, 0);
}

/// The others, by all warps.
template <class Form>
__device__ __forceinline__ void Swap<Form>::bring_rest() {
#pragma unroll 1
  for (u32 first; (first = next_rows()) < moves();) move_straight(first);
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::next_rows() const {
  return first_rows() + warp_add(&s().taken, at_once());
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::move_straight(u32 first) {
  const u32 e = first + lane_id(), n = min(at_once(), moves() - first);
  move_pool_rows(copy, lane_id() < n ? host_row_at(e) : 0, lane_id() < n ? target()[e] : -1, n);
}

/// Rows of the followers, behind my own: they come from the same rows of their caches on the host and go to the same places. So the link is asked for them before
/// the last of mine have come. By all warps.
template <class Form>
__device__ __forceinline__ void Swap<Form>::bring_followers() const {
  const u32 streams = static_cast<u32>(followed.count), all = moves() * streams;
#pragma unroll 1
  for (u32 first; (first = warp_add(&s().followed, kGroup)) < all;) {
    const u32 w = first + lane_id(), n = min(kGroup, all - first);
    Way way{};
    if (lane_id() < n) {
      const u32 e = w / streams;
      const i64 src = host_row_at(e), dst = target()[e];
      if (dst >= 0 && dst < followed.device_rows && src < followed.host_rows)
        way = way_of(followed.at[w - e * streams], followed.paged, src, dst);
    }
    go_ways(followed.vec, followed.item, way, n);
  }
}

}  // namespace specstate::hisparse::cuda::swap
