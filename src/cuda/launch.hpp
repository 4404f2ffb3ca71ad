#pragma once
// What every CUDA call of the library goes through: the error check, the device, the launch. For .cu files; nothing here allocates,
// synchronises or may not be captured in a graph.
#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>

#include "specstate/error.hpp"
#include "specstate/stream.hpp"

namespace specstate::cuda {

/// Error(kCuda): "{what}: {name of the error}: {its text}". Clears the error for calls that come after.
[[noreturn]] void throw_cuda(cudaError_t error, const char* what);

#define SPECSTATE_CUDA_CHECK(call)                                                               \
  do {                                                                                           \
    if (const cudaError_t specstate_error = (call); specstate_error != cudaSuccess) [[unlikely]] \
      ::specstate::cuda::throw_cuda(specstate_error, #call);                                     \
  } while (0)

inline cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// What a launch needs to know of a GPU; read once a process.
struct DeviceInfo {
  int index = 0;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int shared_bytes = 0;  // most dynamic shared memory of a block
  int shared_bytes_multiprocessor = 0;
  int l2_bytes = 0;
};
/// Of the current device (core::on_backend has made it the tensors' one).
const DeviceInfo& device_info();

/// Refuses a kernel that needs Hopper's instructions (bulk copies, mbarriers, wgmma) where they are not.
inline void require_sm90(const char* op) {
  if (const DeviceInfo& d = device_info(); d.major < 9)
    throw Error(ErrorKind::kNotImplemented, std::string(op) + ": expected a GPU of compute capability 9.0 or newer, got " +
                                                std::to_string(d.major) + "." + std::to_string(d.minor) + ".");
}

/// Lets `kernel` have this much dynamic shared memory on the current device; asks the driver only where it has not been asked before
/// (half a microsecond a call).
void allow_shared(const void* kernel, std::size_t bytes);

/// Shape of a launch.
struct Launch {
  dim3 grid = 1, block = 1;
  std::size_t shared = 0;  // bytes of dynamic shared memory
  unsigned cluster = 1;    // blocks of a cluster along x (sm_90 and later)
  /// Programmatic dependent launch: the kernel may start while the one before it in the stream drains. Every thread of it must then call
  /// ptx::wait_for_previous() before it reads what earlier work wrote, and before it writes anything at all.
  bool overlap = false;
};

/// Enqueues kernel(args...); throws if the launch itself is refused. A grid of 0 blocks is no launch.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& shape, Stream stream, Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  if (shape.shared > 0)  // beside the static part of a kernel even a little may reach beyond the 48 KiB that need no asking
    allow_shared(reinterpret_cast<const void*>(kernel), shape.shared);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid, config.blockDim = shape.block, config.dynamicSmemBytes = shape.shared, config.stream = native(stream);
  config.attrs = attributes;
  if (shape.overlap && device_info().major >= 9) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = shape.cluster, a.val.clusterDim.y = a.val.clusterDim.z = 1;
  }
  SPECSTATE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

/// The dynamic shared memory of a block, as float4 name[]. (An emulation of the GPU has its own, see tests/emulation.)
#ifndef SPECSTATE_DYNAMIC_SHARED
#define SPECSTATE_DYNAMIC_SHARED(name) extern __shared__ float4 name[]
#endif

/// How many blocks of `size` cover `n`; throws for more than a grid holds along x.
inline unsigned blocks_for(long long n, long long size) {
  const long long blocks = (n + size - 1) / size;
  if (blocks > 0x7FFFFFFFll) throw Error(ErrorKind::kNotImplemented, "more blocks than a CUDA grid holds");
  return static_cast<unsigned>(blocks);
}

}  // namespace specstate::cuda
