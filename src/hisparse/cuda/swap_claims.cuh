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

/// Compare-and-swap of the entry at place p; what was there. (One CTA alone, as with a small budget of SMs, has no peers to go to: 100 cycles.)
template <class Form>
__device__ __forceinline__ u64 Swap<Form>::swap_entry(u32 p, u64 expected, u64 value) const {
  if (kMayBeOne && cluster() == 1) return atomicCAS(reinterpret_cast<unsigned long long*>(words(plan.claims)) + p, expected, value);
  return remote_cas(claim_at(p), expected, value);
}
/// A claim whose home p was not free, `found` was there: the token's place; `mine`: nobody had asked for it before.
/// All that a claim writes has come back as a value, hence is done, when this returns: so no fence is needed before others are told, and a fence would wait
/// for rows of the host.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::claim(u32 p, u64 asks, u64 found, bool& mine) const {
#pragma unroll 1
  while (found != kNobody && found >> 32 != asks >> 32) {
    p = next_place(p);
    found = swap_entry(p, kNobody, asks);
  }
  mine = found == kNobody;
#pragma unroll 1
  while (!mine && found > asks) {
    const u64 old = swap_entry(p, found, asks);
    if (old == found) break;
    found = old;
  }
  return p;
}

/// Token t is the i-th of my occurrences. Addresses are worked out here, before it is known whether it misses.
template <class Form>
__device__ __forceinline__ auto Swap<Form>::prepare(u32 i, std::int32_t t) const -> Claim {
  const u32 place = home(static_cast<u32>(t));
  return {host_of(t), place, claim_at(place), occurrence(i)};
}

/// Claims the missing ones of a round's tokens and puts them into my lists: what is mine in front, the others behind. What has no host row does not miss
/// (native; sglang's index may have lost a resident token that has none). The first rows of the list are asked for here, as bulk copies into the stash, for
/// which nobody waits: the link brings a row of loads earlier than one of these, but the movers hear of a row a thousand cycles after it is listed.
template <class Form>
__device__ __forceinline__ void Swap<Form>::list(u32 round, const std::int32_t (&tokens)[kDeep], bool (&misses)[kDeep],
                                                 Claim (&claims)[kDeep]) const {
  bool some = false;
#pragma unroll
  for (u32 q = 0; q < kDeep; ++q) some |= misses[q];
  if (!__any_sync(kFull, some)) return;
  if constexpr (!kAhead)
#pragma unroll
    for (u32 q = 0; q < kDeep; ++q) claims[q] = prepare(turn(round, q), misses[q] ? tokens[q] : 0);
  Wide host[kDeep];
  u64 found[kDeep];
#pragma unroll
  for (u32 q = 0; q < kDeep; ++q) host[q] = ask_wide(misses[q] ? claims[q].host : host_of(0), host_width());
#pragma unroll
  for (u32 q = 0; q < kDeep; ++q)  // (the claim of a token without a row comes to nothing: nobody finds a row)
    if (const u32 t = static_cast<u32>(tokens[q]); misses[q] && t < context()) {
      const u64 asks = u64{t} << 32 | claims[q].number;
      found[q] = kMayBeOne ? swap_entry(claims[q].place, kNobody, asks) : remote_cas(claims[q].entry, kNobody, asks);
    }
  u32 place[kDeep], row[kDeep], counts = 0;
  bool mine[kDeep];
#pragma unroll
  for (u32 q = 0; q < kDeep; ++q) {
    mine[q] = false, place[q] = kNowhere, row[q] = kEmpty;
    if (const u32 t = static_cast<u32>(tokens[q]); misses[q] && t < context()) {
      u32 p = claims[q].place;
      mine[q] = true;
      if (found[q] != kNobody) p = claim(p, u64{t} << 32 | claims[q].number, found[q], mine[q]);
      row[q] = row_of_host(host[q], tokens[q]);
      if (row[q] != kEmpty)
        place[q] = p;
      else
        mine[q] = false;
    }
    if (kNative<Args> && row[q] == kEmpty) misses[q] = false;
    counts += static_cast<u32>(__popc(__ballot_sync(kFull, misses[q] && mine[q]))) |
              static_cast<u32>(__popc(__ballot_sync(kFull, misses[q] && !mine[q]))) << 16;
  }
  u32 before = warp_add(&s().lists, counts);
#pragma unroll
  for (u32 q = 0; q < kDeep; ++q) {
    const u32 front = __ballot_sync(kFull, misses[q] && mine[q]), rear = __ballot_sync(kFull, misses[q] && !mine[q]),
              lanes = below(lane_id());
    const u32 e = mine[q] ? (before & 0xFFFFu) + __popc(front & lanes) : back((before >> 16) + __popc(rear & lanes));
    before += static_cast<u32>(__popc(front)) | static_cast<u32>(__popc(rear)) << 16;
    if (!misses[q]) continue;
    if (mine[q]) {
      if (e < first_rows()) {
        const u32 item = static_cast<u32>(copy.item);
        ptx::barrier_expect(&s().firsts, item);
        ptx::bulk_load(stashed(e), copy.pair[0].host + layout::linear_offset(row[q], copy.pair[0].host_pitch), item, &s().firsts);
      }
      if (e < plan.rows_kept) atomicExch(row_of() + e, row[q]);  // from here on a mover may take it
    }
    if (plan.tokens_kept) token()[e] = static_cast<u32>(tokens[q]);
    served()[e] = place[q];
    number()[e] = static_cast<std::uint16_t>(claims[q].number);
    if constexpr (!kNative<Args>) set_bit(words(plan.filter), filter_bit(static_cast<u32>(tokens[q])));
  }
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
  return row_of_host(ask_wide(host_of(t), host_width()), t);
}

}  // namespace specstate::hisparse::cuda::swap
