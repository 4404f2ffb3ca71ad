#pragma once
// What the forms that take a SpreadCall have in common: addresses by strides in 32 bits of bytes, and a request's indices.
#include "cuda/ptx.cuh"
#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"

namespace specstate::kda::cuda::narrow {

namespace ptx = specstate::cuda::ptx;

/// What the indices say of a head. tokens 0: nothing to do.
struct Found {
  int slot, row, begin, tokens, behind;
  bool padding;
};

/// `i` strides on, in bytes.
__device__ __forceinline__ const char* along(const char* p, int i, int stride) { return p + static_cast<std::int64_t>(i) * stride; }
__device__ __forceinline__ char* along(char* p, int i, int stride) { return p + static_cast<std::int64_t>(i) * stride; }
template <class T>
__device__ __forceinline__ const T& at(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

/// A request's indices: all are asked for before the first is looked at. See item.cuh.
struct Indices {
  Coming of[SpreadCall::kIndices];

  template <bool kEarly>
  __device__ __forceinline__ void ask(const SpreadCall& a, int request) {
#pragma unroll
    for (int i = 0; i < SpreadCall::kIndices; ++i) {
      const SpreadCall::Index& x = a.index[i];
      of[i] = {request * x.without_step + x.without, 0};
      const int* const p = reinterpret_cast<const int*>(along(reinterpret_cast<const char*>(x.data), request, x.step));
      if (x.data) of[i].low = kEarly ? __ldcg(p) : *p;
      if (x.wide) of[i].high = kEarly ? __ldcg(p + 1) : p[1];
    }
  }
  __device__ __forceinline__ int value(const SpreadCall& a, int i) const {
    return a.index[i].wide && of[i].high != of[i].low >> 31 ? of[i].high >> 31 ^ 0x7FFFFFFF : of[i].low;
  }
  __device__ __forceinline__ Found found(const SpreadCall& a) const {
    Found f = {
        value(a, SpreadCall::kSlot), value(a, SpreadCall::kRow), value(a, SpreadCall::kBegin), 0, value(a, SpreadCall::kBehind), false};
    const int end = value(a, SpreadCall::kEnd);
    f.tokens = 0 <= f.begin && f.begin <= end && end <= a.T ? end - f.begin : 0;
    f.padding = f.slot <= a.null_slot || f.slot >= a.pool || f.row < 0 || f.row >= a.row_count || f.tokens > a.steps;
    return f;
  }
};

/// 16 bytes that nobody reads again soon.
__device__ __forceinline__ void copy_once(void* to, const void* from, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(ptx::shared(to)), "l"(from), "l"(policy) : "memory");
}

}  // namespace specstate::kda::cuda::narrow
