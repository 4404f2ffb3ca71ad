// The current GPU, what it is, and what goes wrong with it. The promises of core/dispatch.hpp are kept here.
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "core/dispatch.hpp"
#include "cuda/launch.hpp"

namespace specstate {

namespace cuda {

void throw_cuda(cudaError_t error, const char* what) {
  cudaGetLastError();  // else the next call that asks for it would report this one
  std::string text = std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver) text += " (or there is no NVIDIA driver)";
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
    text += " (this build has code for compute capability " SPECSTATE_CUDA "; SPECSTATE_CUDA_ARCHITECTURES of CMake names others)";
  throw Error(ErrorKind::kCuda, text + ".");
}

const DeviceInfo& device_info() {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceInfo, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> once;
  int index = 0;
  SPECSTATE_CUDA_CHECK(cudaGetDevice(&index));
  if (index >= kMaxDevices)
    throw Error(ErrorKind::kCuda, "device_info: expected at most 64 GPUs, got number " + std::to_string(index) + ".");
  std::call_once(once[index], [index] {
    DeviceInfo d;
    d.index = index;
    const auto read = [&](int& value, cudaDeviceAttr attribute) { SPECSTATE_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, index)); };
    read(d.major, cudaDevAttrComputeCapabilityMajor);
    read(d.minor, cudaDevAttrComputeCapabilityMinor);
    read(d.multiprocessors, cudaDevAttrMultiProcessorCount);
    read(d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(d.shared_bytes_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    read(d.l2_bytes, cudaDevAttrL2CacheSize);
    known[index] = d;
  });
  return known[index];
}

void allow_shared(const void* kernel, std::size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::size_t> allowed;
  const int device = device_info().index;
  const std::lock_guard lock(mutex);
  std::size_t& known = allowed[{kernel, device}];
  if (known >= bytes) return;
  SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  known = bytes;
}

}  // namespace cuda

namespace core {

CudaScope::CudaScope(const Device& device) : now_(device.index) {
  SPECSTATE_CUDA_CHECK(cudaGetDevice(&before_));
  if (now_ != before_) SPECSTATE_CUDA_CHECK(cudaSetDevice(now_));
}

CudaScope::~CudaScope() {
  if (now_ != before_) cudaSetDevice(before_);
}

bool driver_says_pinned(const void* p) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, p) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

}  // namespace core

}  // namespace specstate
