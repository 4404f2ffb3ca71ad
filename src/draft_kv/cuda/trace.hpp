#pragma once
// A kernel's clock, for stand-alone programs: with SPECSTATE_DRAFT_KV_TRACE defined, one thread of a block leaves when (globaltimer, ns) it passed a point. In the library: nothing.
namespace specstate::draft_kv::cuda {

enum TracePoint {
  kEntry,
  kBarriers,
  kPrefetched,
  kStart,
  kAsked,
  kFirstStage,
  kLastStage,
  kSummed,
  kPlanThere,
  kLeft,
  kFinished,
  kTracePoints
};
#ifdef SPECSTATE_DRAFT_KV_TRACE
inline constexpr int kTraced = 3;  // launches of a call that are kept apart
static __device__ unsigned long long trace_of[kTraced][132][kTracePoints];
__device__ __forceinline__ void trace(TracePoint point, bool by_me, int launch = 0) {
  if (by_me) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(trace_of[launch][blockIdx.x][point])::"memory");
}
#else
__device__ __forceinline__ void trace(TracePoint, bool, int = 0) {}
#endif
/// By thread 0 what is about asking, by the first that multiplies what is about products.
__device__ __forceinline__ void trace(TracePoint point) { trace(point, threadIdx.x == (point == kStart || point == kAsked ? 0 : 128)); }

}  // namespace specstate::draft_kv::cuda
