#pragma once
// A request's slot tables, in the shared memory of each CTA of a swap (swap.cu): cleared places, the copies (bulk copies: no instructions), the map of the
// tail's tokens, and what makes the whole row invalid. Copies, map and a look through the tables are the movers', who have nothing to bring yet. A call whose
// tables shared memory does not hold (kOrdinary false) reads them where they are.
#include "hisparse/cuda/swap_row.cuh"

namespace specstate::hisparse::cuda::swap {

// ---------------------------------------------------------------------------------------------------------- resolve
template <class Form>
__device__ __forceinline__ void Swap<Form>::fill(u32* p, u32 n, u32 value) {  // n in whole fours
#pragma unroll 1
  for (u32 i = threadIdx.x * 4; i < n; i += kThreads * 4) *reinterpret_cast<uint4*>(p + i) = make_uint4(value, value, value, value);
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::clear() const {
  fill(words(f.zeros), f.zero_words, 0);
  fill(words(f.ones), f.one_words, kEmpty);
  if (threadIdx.x == kResolvers) {
    s().lists = s().high = s().taken = s().followed = s().bad = s().loud = 0;
    s().low = kTaken;
  }
}

template <class Form>
__device__ __forceinline__ const std::int32_t* Swap<Form>::ages() const {
  if constexpr (kOrdinary)
    return f.ages + i64{f.age_row} * r;
  else if constexpr (kNative<Args>)
    return &x.stamps(r, 0);
  else
    return &x.policy(r + 1, 0);
}

template <class Form>
__device__ __forceinline__ i64 Swap<Form>::ages_step() const {
  if constexpr (kNative<Args>)
    return x.stamps.s1;
  else
    return x.policy.s1;
}

/// The request's tables into shared memory.
template <class Form>
__device__ __forceinline__ void Swap<Form>::stage() const {
  if constexpr (!kOrdinary) return;
  if (f.flags & kBulk) {
    const u32 table = threadIdx.x / 32 - kResolvers / 32;  // one warp each
    if (table >= 3 || lane_id() != 0) return;
    const u32 bytes = 4 * (table == 2 ? hot() : columns());
    ptx::barrier_expect(&s().staged[table], bytes);
    const u32 to = table == 0 ? f.tokens_at : table == 1 ? f.locs_at : f.ages_at;
    const std::int32_t* const from = table == 0   ? f.slot_tokens + i64{f.slot_row} * r
                                     : table == 1 ? f.slot_locs + i64{f.loc_row} * r
                                                  : ages();
    ptx::bulk_load(words(to), from, bytes, &s().staged[table]);
    return;
  }
  const i64 step = ages_step();
#pragma unroll 1
  for (u32 c = threadIdx.x - kResolvers; c < columns(); c += kThreads - kResolvers) {
    async_word(words(f.tokens_at) + c, &x.slot_tokens(r, c));
    async_word(words(f.locs_at) + c, &x.slot_locs(r, c));
    if (c < hot()) async_word(words(f.ages_at) + c, ages() + c * step);
  }
}

/// Every thread that is to read it.
template <class Form>
__device__ __forceinline__ void Swap<Form>::await_table(int table) const {
  if constexpr (!kOrdinary) return;
  if (f.flags & kBulk) ptx::barrier_wait(&s().staged[table], phase);
}

/// Where there are no bulk copies: the movers, whose copies it are, before the others may go on.
template <class Form>
__device__ __forceinline__ void Swap<Form>::await_copies() const {
  if (!kOrdinary || (f.flags & kBulk)) return;
  async_wait();
  ptx::barrier_of(4, kThreads - kResolvers);
}

template <class Form>
__device__ __forceinline__ auto Swap<Form>::ask_tail() const -> Tail {
  const u32 c = hot() + threadIdx.x - kResolvers;
  const bool some = plan.tail_mask != 0 && c < columns();
  if constexpr (kOrdinary) {
    const u32 at = min(c, columns() - 1);  // a thread that has none reads the last
    return {f.slot_tokens[i64{f.slot_row} * r + i64{f.slot_step} * at], f.slot_locs[i64{f.loc_row} * r + i64{f.loc_step} * at]};
  }
  const auto* const none = reinterpret_cast<const std::int32_t*>(&no_tokens);
  return {*(some ? &x.slot_tokens(r, c) : none), *(some ? &x.slot_locs(r, c) : none)};
}

template <class Form>
__device__ __forceinline__ void Swap<Form>::map_tail(const Tail& first) const {
  if (plan.tail_mask == 0) return;
#pragma unroll 1
  for (u32 c = hot() + threadIdx.x - kResolvers; c < columns(); c += kThreads - kResolvers) {
    const bool begin = c == hot() + threadIdx.x - kResolvers;
    const std::int32_t t = begin ? first.token : x.slot_tokens(r, c), loc = begin ? first.loc : x.slot_locs(r, c);
    if (t < 0 || loc < 0) continue;
    u32 p = static_cast<u32>(t) & plan.tail_mask;
#pragma unroll 1
    for (u32 old; (old = atomicCAS(words(plan.tail_key) + p, kEmpty, static_cast<u32>(t))) != kEmpty && old != static_cast<u32>(t);)
      p = (p + 1) & plan.tail_mask;
    atomicMin(words(plan.tail_column) + p, c);
  }
}

/// The first tail column with a row that holds t, or kEmpty.
template <class Form>
__device__ __forceinline__ u32 Swap<Form>::in_tail(std::int32_t t) const {
  if (plan.tail_mask == 0) {
#pragma unroll 1
    for (u32 c = hot(); c < columns(); ++c)
      if (slot_token(c) == t && slot_loc(c) >= 0) return c;
    return kEmpty;
  }
#pragma unroll 1
  for (u32 p = static_cast<u32>(t) & plan.tail_mask;; p = (p + 1) & plan.tail_mask) {
    const u32 key = words(plan.tail_key)[p];
    if (key == static_cast<u32>(t)) return words(plan.tail_column)[p];
    if (key == kEmpty) return kEmpty;
  }
}

/// A row outside the pool, in the table (by the warps that will bring rows; four words at a time) or in my share of the scratch (by the others;
/// all of it if there is as little as they can look at at once: then all CTAs say the same).
template <class Form>
__device__ __forceinline__ bool Swap<Form>::bad_table() const {
  std::int32_t most = -1;
  const u32 first = threadIdx.x - kResolvers;
  if constexpr (kOrdinary) {
    const u32 fours = columns() & ~3u;
#pragma unroll 4
    for (u32 c = 4 * first; c < fours; c += 4 * (kThreads - kResolvers)) {
      const int4 v = *at<int4>(f.locs_at + 4 * c);
      most = max(max(max(most, v.x), max(v.y, v.z)), v.w);
    }
    if (fours + first < columns()) most = max(most, slot_loc(fours + first));
  } else {
#pragma unroll 1
    for (u32 c = rank * (kThreads - kResolvers) + first; c < columns(); c += plan.cluster * (kThreads - kResolvers))
      most = max(most, slot_loc(c));
  }
  return most >= copy.device_rows;
}

/// The first of a thread's rows of the scratch, -1 if it has none.
template <class Form>
__device__ __forceinline__ std::int32_t Swap<Form>::ask_scratch() const {
  const u32 n = spare_rows(), c = n <= kResolvers ? threadIdx.x : rank * kResolvers + threadIdx.x;
  return c < n ? x.scratch_locs(r, c) : -1;
}

template <class Form>
__device__ __forceinline__ bool Swap<Form>::bad_scratch(std::int32_t first) const {
  bool bad = first >= copy.device_rows;
  const u32 n = spare_rows();
  if (n <= kResolvers) return bad;
#pragma unroll 1
  for (u32 c = (plan.cluster + rank) * kResolvers + threadIdx.x; c < n; c += plan.cluster * kResolvers)
    bad |= x.scratch_locs(r, c) >= copy.device_rows;
  return bad;
}

/// Another row of the batch that has my request; by the warps that will bring rows.
template <class Form>
__device__ __forceinline__ bool Swap<Form>::twice(Wide first, int width, i64 real) const {
  bool bad = false;
  i64 other = threadIdx.x - kResolvers;
  if constexpr (kOrdinary) {
    bad = other < real && other != b && first.value(width) == r;
    other += kThreads - kResolvers;
  }
#pragma unroll 1
  for (; other < real; other += kThreads - kResolvers)
    if (other != b) bad |= load_wide(x.requests, other, 0) == r;
  return bad;
}

}  // namespace specstate::hisparse::cuda::swap
