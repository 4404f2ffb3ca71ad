#pragma once
// From a checked device to a backend.
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

/// The last line of every operation: `cpu` runs for CPU tensors, unless the caller only asked whether it would.
template <class Cpu>
void on_backend(const char* op, const Device& device, Cpu&& cpu) {
  if (device.type == DeviceType::kCuda) no_cuda(op);
  if (!CheckOnly::active()) cpu();
}

}  // namespace specstate::core
