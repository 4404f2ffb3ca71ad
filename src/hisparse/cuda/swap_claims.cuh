#pragma once
// Who brings a missing token (swap.cu): a hash table that lies over the shared memory of the cluster. Place p lies in CTA p >> kPlaceBits; an entry is
// token << 32 | its smallest occurrence, all ones if empty. Who was first to claim a token lists its row, from the front of its CTA's lists, where the movers
// take it; who came later notes where to find the answer, from the back.
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

// The table of claims: place p lies in CTA p >> kPlaceBits. An entry is token << 32 | its smallest occurrence, all ones if empty.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::claim_at(u32 p) const {
  return remote(ptx::shared(words(plan.claims) + 2 * (p & below(kPlaceBits))), p >> kPlaceBits);
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::home(u32 t) const {
  const u64 at = u64{t * 2654435769u} * cluster();
  return static_cast<u32>(at >> 32) << kPlaceBits | __umulhi(static_cast<u32>(at), plan.part);
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::next_place(u32 p) const {
  if ((++p & below(kPlaceBits)) != plan.part) return p;
  const u32 cta = (p >> kPlaceBits) + 1;
  return cta == plan.cluster ? 0 : cta << kPlaceBits;
}

/// The place of token t, where occurrence o is noted; `mine`: nobody had asked for t before. All that it writes has come back as a value,
/// hence is done, when it returns: so no fence is needed before others are told, and a fence would wait for rows of the host.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::claim(u32 t, u32 o, bool& mine) const {
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

/// A place for each lane of the warp that has something: in the list of what is mine or in the other one.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::place_in_lists(bool some, bool mine) const {
  const u32 front = __ballot_sync(kFull, some && mine), rear = __ballot_sync(kFull, some && !mine);
  u32 before = 0;
  if (lane_id() == 0 && (front | rear) != 0)
    before = atomicAdd(&s().lists, static_cast<u32>(__popc(front)) | static_cast<u32>(__popc(rear)) << 16);
  before = __shfl_sync(kFull, before, 0);
  return mine ? (before & 0xFFFFu) + __popc(front & below(lane_id())) : back((before >> 16) + __popc(rear & below(lane_id())));
}

/// Of an entry of the lists that has a token; of one that is mine.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::token_at(u32 e) const {
  if (!kNative<Args> || plan.tokens_kept) return token()[e];
  const u32 o = number()[e], step = plan.by_step(o), place = o - step * static_cast<u32>(x.top_k);
  if constexpr (kOrdinary) return static_cast<u32>(selection[i64{plan.token_step} * step + i64{plan.token_place} * place]);
  return static_cast<u32>(x.tokens(b, step, place));
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::host_row_at(u32 e) const {
  if (e < plan.rows_kept) return row_of()[e];
  const auto t = static_cast<std::int32_t>(token_at(e));
  return row_of_host(ask_host(t), t);
}

}  // namespace specstate::hisparse::cuda::swap
