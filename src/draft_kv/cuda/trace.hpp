#pragma once
// A kernel's clock, for stand-alone programs: with SPECSTATE_DRAFT_KV_TRACE defined, thread 0 of a block and the first thread that multiplies leave the cycle at which
// they passed a point, and when (globaltimer, ns) the block began and ended. In the library: nothing.
namespace specstate::draft_kv::cuda {

enum TracePoint { kStart, kAsked, kFirstStage, kLastStage, kSummed, kPlanThere, kFinished, kTracePoints };
#ifdef SPECSTATE_DRAFT_KV_TRACE
static __device__ unsigned long long trace_of[132][kTracePoints + 2];
__device__ __forceinline__ void trace(TracePoint point) {
  if (threadIdx.x != (point == kStart || point == kAsked ? 0 : 128)) return;
  trace_of[blockIdx.x][point] = clock64();
  if (point == kStart || point == kFinished)
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(trace_of[blockIdx.x][point == kStart ? kTracePoints : kTracePoints + 1]));
}
#else
__device__ __forceinline__ void trace(TracePoint) {}
#endif

}  // namespace specstate::draft_kv::cuda
