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

  __device__ __forceinline__ std::int64_t value(const Index& a) const {
    return a.wide ? static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                                              static_cast<std::uint32_t>(low))
                  : low;
  }
};
/// kEarly: before the kernels before this one are done. Such a value may be overtaken, so it must not stay in L1.
template <bool kEarly>
__device__ __forceinline__ Coming ask(const Index& a, std::int64_t i) {
  const int* const p = static_cast<const int*>(a.data) + (i * a.stride[0] << (a.wide ? 1 : 0));
  Coming c = {0, 0};
  if (a) c.low = kEarly ? __ldcg(p) : *p;
  if (a && a.wide) c.high = kEarly ? __ldcg(p + 1) : p[1];
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
  const int each = a.cu ? 0 : tokens_each(a);
  const std::int64_t slot = slot_of.value(a.slots), begin = a.cu ? begin_of.value(a.cu) : static_cast<std::int64_t>(request) * each,
                     end = a.cu ? end_of.value(a.cu) : begin + each;
  std::int64_t row = a.rows ? row_of.value(a.rows) : request;
  const bool null = slot <= a.null_slot, inside = 0 <= begin && begin <= end && end <= a.T;
  it.padding = null ? !a.null_from_zero : slot < 0 || slot >= a.pool;
  if (!keeps_rows(a) || (null && !(a.null_from_zero && a.snapshots)) || (a.null_from_zero && row < 0))
    row = -1;
  else
    it.padding |= row < 0 || row >= a.row_count;
  it.slot = null || it.padding ? -1 : static_cast<int>(slot), it.row = it.padding ? -1 : static_cast<int>(row);
  it.begin = inside ? static_cast<int>(begin) : 0, it.tokens = inside ? static_cast<int>(end - begin) : 0;
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
