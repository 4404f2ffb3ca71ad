#pragma once
// Small parts of the HiSparse kernels: cluster barriers and remote shared memory, bit sets with ranks, counting in a block.
#include <cstdint>

#include "cuda/ptx.cuh"
#include "hisparse/args.hpp"

namespace specstate::hisparse::cuda {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

namespace ptx = specstate::cuda::ptx;

constexpr u32 kFull = 0xFFFFFFFFu;

// ------------------------------------------------------------------------------------------------------------ clusters

/// What this thread wrote, here or in a peer, is visible to whoever waits. Arrive and wait are apart, so that work fits between them.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// As far as anybody has come, nothing of what it wrote: does not wait for stores.
__device__ __forceinline__ void cluster_arrive_quietly() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
/// All are past their last look at a peer's shared memory. Orders nothing else, so it does not wait for stores.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same through the shared memory of a peer, by some warps only. Addresses are those of ptx::shared().
__device__ __forceinline__ u32 remote(u32 address, u32 cta) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}
__device__ __forceinline__ u64 remote_cas(u32 address, u64 expected, u64 value) {
  u64 old;
  asm volatile("atom.relaxed.cluster.shared::cluster.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "r"(address), "l"(expected), "l"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ u32 remote_load(u32 address) {
  u32 value;
  asm volatile("ld.relaxed.cluster.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
/// Publishes nothing but itself.
__device__ __forceinline__ void remote_or(u32 address, u32 bits) {
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
/// What this thread knows of is visible to whoever waits.
__device__ __forceinline__ void remote_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Publishes nothing but that `bytes` of copies are to come.
__device__ __forceinline__ void remote_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void remote_copy(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void cluster_barrier_wait(u64* barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(
          ptx::shared(barrier)),
      "r"(phase)
      : "memory");
}

/// Several arrivals at a barrier of this CTA.
__device__ __forceinline__ void barrier_arrive(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::shared(barrier)), "r"(arrivals) : "memory");
}

// --------------------------------------------------------------------------------------------- 4 bytes to shared memory

/// Asynchronous, without a register on the way.
__device__ __forceinline__ void async_word(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(ptx::shared(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Integers of 4 or 8 bytes without a branch a width.
__device__ __forceinline__ const u32* wide_at(const Integers& v, i64 i, i64 j) {
  return static_cast<const u32*>(v.data) + ((i * v.s0 + j * v.s1) << (v.bytes == 8));
}
__device__ __forceinline__ i64 load_wide(const Integers& v, i64 i, i64 j) {
  const u32* p = wide_at(v, i, j);
  const auto low = static_cast<std::int32_t>(p[0]);
  return v.bytes == 8 ? static_cast<i64>(static_cast<u64>(p[1]) << 32 | static_cast<u32>(low)) : low;
}

/// An integer of 4 or 8 bytes that is asked for and not waited for: one load, whatever it is.
struct Wide {
  u32 low, high;
  __device__ __forceinline__ i64 value(int bytes) const {
    return bytes == 8 ? static_cast<i64>(static_cast<u64>(high) << 32 | low) : static_cast<std::int32_t>(low);
  }
};
__device__ __forceinline__ Wide ask_wide(const u32* p, int bytes) {
  Wide w;
  // (Without the moves both registers would live on from one round of a loop to the next, and be spilled.)
  asm volatile(
      "{\n.reg .pred wide;\nsetp.eq.s32 wide, %3, 8;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n@wide ld.global.v2.u32 {%0, %1}, [%2];\n@!wide "
      "ld.global.u32 %0, [%2];\n}\n"
      : "=&r"(w.low), "=&r"(w.high)
      : "l"(p), "r"(bytes));
  return w;
}

/// `n` as a factor of a stride of 32 bits: one multiplication, since the compiler does not know that it is not negative.
__device__ __forceinline__ std::int32_t factor(u32 n) {
  asm("" : "+r"(n));
  return static_cast<std::int32_t>(n);
}

// ------------------------------------------------------------------------------------------------- bit sets with ranks

__device__ __forceinline__ u32 lane_id() { return threadIdx.x & 31u; }
__device__ __forceinline__ u32 below(u32 bit) { return (1u << bit) - 1u; }

/// Adds to a word of shared memory once for the warp; what was there, for all lanes. (Where the compiler knows that all lanes would add to the same word, it
/// adds them up first, also where there is but one: a dozen instructions, two of them slow.)
__device__ __forceinline__ u32 warp_add(u32* p, u32 value) {
  u32 lane = lane_id(), old = 0;
  asm("" : "+r"(lane));
  if (lane_id() == 0) old = atomicAdd(p + lane, value);
  return __shfl_sync(kFull, old, 0);
}

__device__ __forceinline__ u32 warp_sum_before(u32 value, u32& total) {
  u32 sum = value;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u32 other = __shfl_up_sync(kFull, sum, d);
    if (lane_id() >= static_cast<u32>(d)) sum += other;
  }
  total = __shfl_sync(kFull, sum, 31);
  return sum - value;
}

/// before[w] = set bits of words 0..w-1, before[n] = all. One warp.
__device__ inline void rank_words(const u32* words, u32* before, u32 n) {
  const u32 each = (n + 31) / 32, first = min(lane_id() * each, n), last = min(first + each, n);
  u32 sum = 0, total;
#pragma unroll 1
  for (u32 w = first; w < last; ++w) sum += __popc(words[w]);
  u32 rank = warp_sum_before(sum, total);
#pragma unroll 1
  for (u32 w = first; w < last; ++w) {
    before[w] = rank;
    rank += __popc(words[w]);
  }
  if (lane_id() == 0) before[n] = total;
}

/// Set bits before `bit`.
__device__ __forceinline__ u32 rank_of(const u32* words, const u32* before, u32 bit) {
  return before[bit >> 5] + __popc(words[bit >> 5] & below(bit & 31u));
}

/// The n-th (from 0) set bit of a word that has so many.
__device__ __forceinline__ u32 nth_bit(u32 word, u32 n) {
  u32 at = 0;
#pragma unroll
  for (u32 half = 16; half > 0; half >>= 1) {
    const u32 low = __popc((word >> at) & below(half));
    if (n >= low) {
      n -= low;
      at += half;
    }
  }
  return at;
}

/// The bit of rank `rank`, which exists.
__device__ __forceinline__ u32 select_bit(const u32* words, const u32* before, u32 n, u32 rank) {
  u32 w = 0;
  for (u32 step = n > 1 ? 1u << (31 - __clz(n - 1)) : 0; step > 0; step >>= 1)
    if (w + step < n && before[w + step] <= rank) w += step;
  return w * 32 + nth_bit(words[w], rank - before[w]);
}

}  // namespace specstate::hisparse::cuda
