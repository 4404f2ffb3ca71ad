#pragma once
// The few instructions of the PTX ISA that C++ has no word for, one function each. Names say what they do, the instruction stands beside it.
// Sizes are bytes; an `address` is one in shared memory (ptx::shared). Where an instruction needs sm_90 and the code is for an older GPU, the
// function traps: a kernel that uses it compiles for every GPU, and its launch is refused there (cuda::require_sm90). Waiting for the
// previous kernel and clusters of one block are the exceptions: there they do what an older GPU does anyway.
#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define SPECSTATE_SM90_OR(instruction, older) older
#else
#define SPECSTATE_SM90_OR(instruction, older) instruction
#endif
#define SPECSTATE_SM90(instruction) SPECSTATE_SM90_OR(instruction, __trap())

namespace specstate::cuda::ptx {

/// The 32-bit shared-memory address that the instructions below take.
__device__ __forceinline__ std::uint32_t shared(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

// ---------------------------------------------------------------------------------------------- loads and stores of 16 bytes

/// Read once, by this block alone, not written by this kernel: passes by L1. (sm_80)
__device__ __forceinline__ uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
/// The same where this kernel (or one beside it) may write the bytes: never from the read-only path. (sm_80)
__device__ __forceinline__ uint4 load_uncached(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
/// Written once and not read again soon. (sm_80)
__device__ __forceinline__ void store_streaming(void* p, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/// L2 policies for the calls that take one: drop first, keep longest.
__device__ __forceinline__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t evict_last() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// -------------------------------------------------------------------------------------- copies by threads into shared memory

/// 16 bytes from global to shared memory without registers; `valid` false: zeros instead, nothing is read. (sm_80)
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
/// The same of the first `bytes` (0 to 16); the others become zeros.
__device__ __forceinline__ void copy_async_part(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until at most `kPending` of this thread's newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// This thread arrives at `barrier` (as one of its arrivals) when all its copies so far have come: it waits for none of them. (sm_80)
__device__ __forceinline__ void copy_async_arrive(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared(barrier)) : "memory");
}

/// The barrier of `threads` threads of the block that all name the same `id`, 1 to 15 (0 is __syncthreads').
__device__ __forceinline__ void barrier_of(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// --------------------------------------------------------------------------------------- mbarriers: phases of a pipeline stage

/// One thread; then fence_barriers() and a barrier of the block before anybody else uses it.
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  SPECSTATE_SM90(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals) : "memory"));
}
__device__ __forceinline__ void fence_barriers() { SPECSTATE_SM90(asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory")); }
/// By address.
__device__ __forceinline__ void barrier_arrive_at(std::uint32_t barrier) {
  SPECSTATE_SM90(asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"));
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) { barrier_arrive_at(shared(barrier)); }
/// Arrives, and lets the phase also wait for `bytes` of bulk copies.
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  SPECSTATE_SM90(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes) : "memory"));
}
/// Until the phase of this parity (0, 1, 0, ...) is complete; by address.
__device__ __forceinline__ void barrier_wait_at(std::uint32_t barrier, std::uint32_t parity) {
  SPECSTATE_SM90(
      asm volatile("{\n"
                   ".reg .pred done;\n"
                   "again:\n"
                   "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                   "@!done bra again;\n"
                   "}\n" ::"r"(barrier),
                   "r"(parity)
                   : "memory"));
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) { barrier_wait_at(shared(barrier), parity); }
/// Whether it is complete.
__device__ __forceinline__ bool barrier_passed(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  SPECSTATE_SM90(
      asm volatile("{\n"
                   ".reg .pred done;\n"
                   "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                   "selp.u32 %0, 1, 0, done;\n"
                   "}\n"
                   : "=r"(done)
                   : "r"(shared(barrier)), "r"(parity)
                   : "memory"));
  return done != 0;
}
/// Between stores of threads to shared memory and a bulk copy (or tensor cores) that reads it: in each writing thread, before the
/// barrier of the block.
__device__ __forceinline__ void fence_async() { SPECSTATE_SM90(asm volatile("fence.proxy.async.shared::cta;" ::: "memory")); }

// --------------------------------------------------------------- bulk copies: one thread asks, the copy engine of the SM works
// Addresses and sizes are multiples of 16.

/// Global -> shared; `barrier` counts the bytes (barrier_expect).
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  SPECSTATE_SM90(asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(to)),
                              "l"(from), "r"(bytes), "r"(shared(barrier))
                              : "memory"));
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier, std::uint64_t policy) {
  SPECSTATE_SM90(asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared(to)),
      "l"(from), "r"(bytes), "r"(shared(barrier)), "l"(policy)
      : "memory"));
}
/// Shared -> global; fence_async() and a barrier come before it, bulk_commit() and bulk_wait...() after it.
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  SPECSTATE_SM90(asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared(from)), "r"(bytes)
                              : "memory"));
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes, std::uint64_t policy) {
  SPECSTATE_SM90(asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(shared(from)),
                              "r"(bytes), "l"(policy)
                              : "memory"));
}
__device__ __forceinline__ void bulk_commit() { SPECSTATE_SM90(asm volatile("cp.async.bulk.commit_group;" ::: "memory")); }
/// Until all but the newest `kPending` groups of this thread are done: have been read (their shared memory is free again) ...
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  SPECSTATE_SM90(asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"));
}
/// ... or are written, too.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  SPECSTATE_SM90(asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"));
}

// ------------------------------------------------------------------------------------------------ programmatic dependent launch

/// Until all earlier work of the stream is done and visible. No-op in a launch without `overlap`. Every thread of every block calls it,
/// those with nothing to do too: a kernel counts as done only then for the one after it.
__device__ __forceinline__ void wait_for_previous() { SPECSTATE_SM90_OR(asm volatile("griddepcontrol.wait;" ::: "memory"), (void)0); }
/// The next kernel of the stream may be started (once all blocks have said so or ended).
__device__ __forceinline__ void let_next_start() {
  SPECSTATE_SM90_OR(asm volatile("griddepcontrol.launch_dependents;" ::: "memory"), (void)0);
}

// ----------------------------------------------------------------------------------------------------------------- clusters

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank = 0;
  SPECSTATE_SM90_OR(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)), (void)0);
  return rank;
}
/// All threads of the cluster; what each wrote to any block's shared memory is seen by all.
__device__ __forceinline__ void cluster_sync() {
  SPECSTATE_SM90_OR(asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                                     : "memory"),
                    __syncthreads());
}
/// The two halves of a cluster_sync(): what must be reached by all before anybody passes the wait costs nothing if there is work between.
__device__ __forceinline__ void cluster_arrive() {
  SPECSTATE_SM90_OR(asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"), (void)0);
}
/// The first half after which nothing but barrier_init's work (fence_barriers) is visible to the others: it waits for none of this thread's other accesses.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  SPECSTATE_SM90_OR(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"), (void)0);
}
__device__ __forceinline__ void cluster_wait() {
  SPECSTATE_SM90_OR(asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"), __syncthreads());
}
/// `p` of this block's shared memory -> the same place in block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(T* p, std::uint32_t rank) {
  std::uint64_t address = reinterpret_cast<std::uint64_t>(p);
  SPECSTATE_SM90_OR(asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<std::uint64_t>(p)), "r"(rank)), (void)0);
  return reinterpret_cast<T*>(address);
}

}  // namespace specstate::cuda::ptx
