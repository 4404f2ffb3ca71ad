#pragma once
// Which slots a swap's misses take (swap.cu), by the thinking warps of each CTA, all with the same result: the slots with the smallest keys (how long they were
// not used; empty ones first, hit ones never), ties in ring order, as a set of bits with ranks. A histogram of the keys is narrowed down until one key is left
// as the threshold (two rounds for keys that differ in 22 bits); then one compaction.
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

// ---------------------------------------------------------------------------------------------------------- victims
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::slot_of(u32 ring) const {
  if constexpr (kNative<Args>) return ring;
  const u32 c = now.origin + ring;
  return c >= hot() ? c - hot() : c;
}

template <class Form>
__device__ __forceinline__ u32 Swap<Form>::key_of(u32 age, std::int32_t token, std::int32_t loc, bool hit) const {
  if constexpr (kNative<Args>)
    age = now.restart ? 1u : min(max(age, 1u), kTaken - 1);
  else
    age = now.epoch_mask - ((now.call - age) & now.epoch_mask) + 1;
  return (loc < 0) | hit ? kTaken : token < 0 ? 0 : age;
}

/// Of slot c, where the tables are not here.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::key_at(u32 c) const {
  return key_of(static_cast<u32>(ages()[c * ages_step()]), slot_token(c), slot_loc(c), has_bit(words(plan.hits), c));
}

/// The key of every slot takes the place of its age (if the tables are here); s().low and high become a range that holds all of candidates.
template <class Form>
__device__ __forceinline__ void Swap<Form>::make_keys() const {
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
template <class Form>
__device__ __forceinline__ void Swap<Form>::keys(u32 w, u32 (&k)[kBatch]) const {
#pragma unroll
  for (u32 q = 0; q < kBatch; ++q) {
    const u32 p = (w + q * kPolicyWarps) * 32 + lane_id(), c = slot_of(min(p, hot() - 1));
    k[q] = kOrdinary ? words(plan.ages)[c] : key_at(c);
    if (p >= hot()) k[q] = kTaken;
  }
}

/// The min(misses, candidates) smallest keys, ties in ring order, as a set with ranks. Returns how many; counts the misses meanwhile.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::choose_victims(u32& wanted) const {
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
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::victim(u32 u) const {
  return slot_of(select_bit(words(plan.victims), words(plan.victims_before), plan.hot_words, u));
}

template <class Form>
__device__ __forceinline__ std::int32_t Swap<Form>::spare_row(u32 u) const {
  return x.scratch_locs(r, select_bit(words(plan.scratch), words(plan.scratch_before), plan.scratch_words, u));
}

}  // namespace specstate::hisparse::cuda::swap
