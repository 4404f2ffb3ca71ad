#pragma once
// A GPU made of fibers, for the engine's own kernels (src/runtime/cuda/): enough of the CUDA runtime to compile them as C++ and run them on a CPU, so
// that a machine without a GPU tests the whole loop of the GPU engine. Blocks run one after the other; a block's threads are fibers that switch at barriers and warp
// operations. Device and pinned memory are host memory, so the families take their CPU backends. Shared memory starts as NaNs, never as zeros.
// It finds wrong arithmetic, wrong indices and missing conditions; it cannot find races, because only one fiber runs at a time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

using std::isnan;
using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define __global__
#define __device__
#define __shared__ static thread_local  // a GPU is a thread's
#define __launch_bounds__(...)
#define SPECSTATE_DYNAMIC_SHARED(name) float4* name = emulation::dynamic_shared

namespace emulation {
extern __thread float4* dynamic_shared;
extern __thread std::uint64_t exchange[1024];  // a word for each thread
unsigned thread();
void sync_block();
void sync_warp();
void run(const dim3& grid, const dim3& block, std::size_t shared, const std::function<void()>& thread);
struct ThreadIdx {
  struct X {
    operator unsigned() const { return thread(); }
  } x;
};
}  // namespace emulation

inline const emulation::ThreadIdx threadIdx;
extern __thread dim3 blockIdx, blockDim, gridDim;

inline void __syncthreads() { emulation::sync_block(); }
inline void __syncwarp() { emulation::sync_warp(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const unsigned t = emulation::thread();
  std::memcpy(&emulation::exchange[t], &value, sizeof value);
  emulation::sync_warp();
  std::memcpy(&value, &emulation::exchange[t ^ static_cast<unsigned>(mask)], sizeof value);
  emulation::sync_warp();
  return value;
}
template <class T>
T atomicAdd(T* p, T v) {
  const T before = *p;
  *p += v;
  return before;
}
template <class To, class From>
To emulated_cast(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(std::uint32_t x) { return emulated_cast<float>(x); }
inline float __int_as_float(int x) { return emulated_cast<float>(x); }
inline std::uint32_t __float_as_uint(float x) { return emulated_cast<std::uint32_t>(x); }

// ---- the runtime's functions: everything is done when it is called -------------------------------------------------------------------------

using cudaError_t = int;
using cudaStream_t = void*;
using cudaEvent_t = void*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;
enum { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDefault };
enum { cudaHostAllocMapped = 1, cudaHostAllocPortable = 2, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Parameters...), Arguments&&... arguments) {
  emulation::run(c->gridDim, c->blockDim, c->dynamicSmemBytes, [&] { kernel(static_cast<Parameters>(arguments)...); });
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, int, int) {
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
enum { cudaHostRegisterMapped = 2, cudaHostRegisterPortable = 1 };
inline cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
inline cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaMemset(void* p, int value, std::size_t bytes) { return std::memset(p, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* p, int value, std::size_t bytes, cudaStream_t) { return cudaMemset(p, value, bytes); }
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMemoryAllocation"; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return *s = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*)(void*), void*) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return *e = nullptr, cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 0, cudaSuccess; }
