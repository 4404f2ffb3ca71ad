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

/// kEarly: before the kernels before this one are done. Such a value may be overtaken, so it must not stay in L1.
template <bool kEarly>
__device__ __forceinline__ std::int64_t index_of(const Index& a, std::int64_t i) {
  if constexpr (!kEarly) return index(a, i);
  const std::int64_t at = i * a.stride[0];
  return a.wide ? __ldcg(static_cast<const long long*>(a.data) + at) : __ldcg(static_cast<const int*>(a.data) + at);
}

/// `head` counts heads of all requests; past the last one: no tokens.
template <bool kEarly = false>
__device__ __forceinline__ Item item_of(const VerifyCall& a, std::int64_t head) {
  Item it = {-1, -1, 0, 0, 0, 0, false};
  if (head >= a.N * a.HV) return it;
  // Sizes within an int: see run() of backend.cu.
  const int HV = static_cast<int>(a.HV), request = static_cast<int>(head) / HV;
  it.hv = static_cast<int>(head) % HV, it.h = it.hv / (HV / static_cast<int>(a.H));
  std::int64_t slot = index_of<kEarly>(a.slots, request), begin = 0, end = 0, row = request;
  if (a.cu) begin = index_of<kEarly>(a.cu, request), end = index_of<kEarly>(a.cu, request + 1);
  if (a.rows) row = index_of<kEarly>(a.rows, request);
  if (!a.cu) {
    const int each = static_cast<int>(a.T) / static_cast<int>(a.N);
    begin = static_cast<std::int64_t>(request) * each, end = begin + each;
  }
  const bool null = slot <= a.null_slot, inside = 0 <= begin && begin <= end && end <= a.T;
  it.padding = null ? !a.null_from_zero : slot < 0 || slot >= a.pool;
  if (!(a.snapshots || a.q.windows) || (null && !(a.null_from_zero && a.snapshots)) || (a.null_from_zero && row < 0))
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
