#pragma once
// From a checked device to a backend.
#include "core/float_env.hpp"
#include "core/match.hpp"
#include "specstate/supports.hpp"
#include "specstate/tensor.hpp"

namespace specstate::core {

/// True where this build has CUDA kernels.
constexpr bool cuda_built() {
#if defined(SPECSTATE_CUDA)
  return true;
#else
  return false;
#endif
}

/// The one refusal of a CUDA call in a build (or an operation) without CUDA code.
[[noreturn]] inline void no_cuda(const char* op) {
  throw_not_implemented(std::string(op) + ": this build of specstate has no CUDA kernel for this operation; give it CPU tensors.");
}

/// Makes a GPU the current one of this thread while it lives. Throws Error(kCuda). (In src/cuda/device.cu.)
class CudaScope {
 public:
  explicit CudaScope(const Device& device);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

 private:
  int before_ = 0, now_ = 0;
};

/// Is this host memory that a kernel may read and write? Frameworks export pinned arrays as plain CPU memory, so a CUDA build asks
/// the driver.
bool driver_says_pinned(const void* p);  // src/cuda/device.cu
inline bool pinned(const TensorView& t) {
  if (t.device.type != DeviceType::kCpu || t.device.pinned) return t.device.pinned;
  if constexpr (cuda_built()) return driver_says_pinned(t.data);
  return false;
}

/// The last line of every operation: `cpu` runs for CPU tensors, unless the caller only asked whether it would.
template <class Cpu>
void on_backend(const char* op, const Device& device, Cpu&& cpu) {
  if (device.type == DeviceType::kCuda) no_cuda(op);
  if (CheckOnly::active()) return;
  const DefaultFloatEnv env;
  cpu();
}

/// The same for an operation with a CUDA form: `cuda` runs for CUDA tensors, with their GPU the current one. A build without CUDA
/// never instantiates `cuda`, so the backend's function need not exist there.
template <class Cpu, class Cuda>
void on_backend(const char* op, const Device& device, Cpu&& cpu, Cuda&& cuda) {
  if (device.type == DeviceType::kCpu) return on_backend(op, device, cpu);
  if constexpr (cuda_built()) {
    if (CheckOnly::active()) return;
    const CudaScope scope(device);
    cuda();
  } else {
    no_cuda(op);
  }
}

}  // namespace specstate::core
