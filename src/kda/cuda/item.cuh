#pragma once
// One unit of a verify's work, found from the indices in device memory. What only their contents can tell is judged here.
#include "kda/cuda/device.cuh"

namespace specstate::kda::cuda {

/// One (request, value head).
struct Item {
  int slot, row, begin;  // slot -1: from zeros; row -1: no snapshots and windows
  int tokens, hv, h;
  bool padding;
};

/// An index on its way from memory. To widen a 32-bit one is to wait for it: so all that an item needs are asked for before the first is
/// looked at, and their misses are one.
struct Coming {
  int low, high;

  /// What does not fit becomes an end of the range, which is no slot, row or token of any tensor.
  template <class Indices>
  __device__ __forceinline__ int value(const Indices& a) const {
    return a.wide && high != low >> 31 ? high >> 31 ^ 0x7FFFFFFF : low;
  }
};
__device__ __forceinline__ const int* address_of(const Index& a, std::int64_t i) {
  return static_cast<const int*>(a.data) + (i * a.stride[0] << (a.wide ? 1 : 0));
}
/// kEarly: before the kernels before this one are done. Such a value may be overtaken, so it must not stay in L1.
template <bool kEarly, class Indices, class I>
__device__ __forceinline__ Coming ask(const Indices& a, I i) {
  Coming c = {0, 0};
  if (a) {
    const int *const p = address_of(a, i), *const high = p + (a.wide ? 1 : 0);
    c.low = kEarly ? __ldcg(p) : *p, c.high = kEarly ? __ldcg(high) : *high;
  }
  return c;
}

__device__ __forceinline__ bool keeps_rows(const VerifyCall& a) { return a.snapshots || a.q.windows; }

/// Which request a head belongs to, which value head and which key head it is. Sizes within an int: see run() of backend.cu.
template <class Call>
__device__ __forceinline__ int place_of(const Call& a, std::int64_t head, Item& it) {
  const int HV = static_cast<int>(a.HV), request = static_cast<int>(head) / HV;
  it.hv = static_cast<int>(head) % HV, it.h = it.hv / (HV / static_cast<int>(a.H));
  return request;
}
template <class Call>
__device__ __forceinline__ int tokens_each(const Call& a) {
  return static_cast<int>(a.T) / static_cast<int>(a.N);
}

/// `head` counts heads of all requests; past the last one: no tokens. Call: VerifyCall, or what has its indices and sizes.
template <bool kEarly = false, class Call>
__device__ __forceinline__ Item item_of(const Call& a, std::int64_t head) {
  Item it = {-1, -1, 0, 0, 0, 0, false};
  if (head >= a.N * a.HV) return it;
  const int request = place_of(a, head, it);
  const Coming slot_of = ask<kEarly>(a.slots, request), begin_of = ask<kEarly>(a.cu, request), end_of = ask<kEarly>(a.cu, request + 1),
               row_of = ask<kEarly>(a.rows, request);
  const int each = a.cu ? 0 : tokens_each(a), slot = slot_of.value(a.slots);
  const int begin = a.cu ? begin_of.value(a.cu) : request * each, end = a.cu ? end_of.value(a.cu) : begin + each;
  const int row = a.rows ? row_of.value(a.rows) : request;
  const bool null = slot <= a.null_slot, inside = 0 <= begin && begin <= end && end <= a.T;
  it.padding = null ? !a.null_from_zero : slot < 0 || slot >= a.pool;
  if (!keeps_rows(a) || (null && !(a.null_from_zero && a.snapshots)) || (a.null_from_zero && row < 0))
    it.row = -1;
  else
    it.padding |= row < 0 || row >= a.row_count, it.row = row;
  it.slot = null || it.padding ? -1 : slot;
  if (it.padding) it.row = -1;
  it.begin = inside ? begin : 0, it.tokens = inside ? end - begin : 0;
  it.padding |= it.tokens > a.steps || (a.parents && it.tokens > a.columns);
  return it;
}

/// Zeros for tokens [begin, end) of value rows [v0, v0 + rows), by `threads` threads.
__device__ __noinline__ inline void clear_out(const VerifyCall& a, std::int64_t begin, std::int64_t end, int hv, int v0, int rows,
                                              int thread, int threads) {
  for (std::int64_t i = thread; i < (end - begin) * rows; i += threads)
    store(a.out, at(a.out, begin + i / rows, hv, v0 + static_cast<int>(i % rows)), 0.0f);
}

}  // namespace specstate::kda::cuda
