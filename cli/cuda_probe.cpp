#include "cuda_probe.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>

namespace specstate::cli {

namespace {

// The few entry points of the driver's stable C ABI that are needed here.
using Result = int;
using Device = int;
using Handle = void*;
using Address = unsigned long long;

struct Driver {
  Result (*init)(unsigned);
  Result (*version)(int*);
  Result (*count)(int*);
  Result (*device)(Device*, int);
  Result (*name)(char*, int, Device);
  Result (*attribute)(int*, int, Device);
  Result (*memory)(std::size_t*, Device);
  Result (*retain)(Handle*, Device);
  Result (*release)(Device);
  Result (*current)(Handle);
  Result (*host_alloc)(void**, std::size_t, unsigned);
  Result (*host_free)(void*);
  Result (*alloc)(Address*, std::size_t);
  Result (*free)(Address);
  Result (*to_device)(Address, const void*, std::size_t, Handle);
  Result (*to_host)(void*, Address, std::size_t, Handle);
  Result (*synchronize)();
};

constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76;

template <class F>
bool load(void* library, F& f, const char* symbol) {
  f = reinterpret_cast<F>(dlsym(library, symbol));
  return f != nullptr;
}

bool load_all(void* l, Driver& d) {
  return load(l, d.init, "cuInit") && load(l, d.version, "cuDriverGetVersion") && load(l, d.count, "cuDeviceGetCount") &&
         load(l, d.device, "cuDeviceGet") && load(l, d.name, "cuDeviceGetName") && load(l, d.attribute, "cuDeviceGetAttribute") &&
         load(l, d.memory, "cuDeviceTotalMem_v2") && load(l, d.retain, "cuDevicePrimaryCtxRetain") &&
         load(l, d.release, "cuDevicePrimaryCtxRelease_v2") && load(l, d.current, "cuCtxSetCurrent") &&
         load(l, d.host_alloc, "cuMemHostAlloc") && load(l, d.host_free, "cuMemFreeHost") && load(l, d.alloc, "cuMemAlloc_v2") &&
         load(l, d.free, "cuMemFree_v2") && load(l, d.to_device, "cuMemcpyHtoDAsync_v2") && load(l, d.to_host, "cuMemcpyDtoHAsync_v2") &&
         load(l, d.synchronize, "cuCtxSynchronize");
}

/// Best of several copies between pinned memory and the device.
void measure_link(const Driver& d, Device device, std::size_t bytes, GpuReport& gpu) {
  Handle context = nullptr;
  if (d.retain(&context, device) != 0) {
    gpu.problem = "no context on this device";
    return;
  }
  void* host = nullptr;
  Address memory = 0;
  if (d.current(context) != 0)
    gpu.problem = "the context of this device cannot be made current";
  else if (d.host_alloc(&host, bytes, 0) != 0)
    gpu.problem = std::to_string(bytes) + " bytes of pinned memory could not be had";
  else if (d.alloc(&memory, bytes) != 0)
    gpu.problem = std::to_string(bytes) + " bytes of device memory could not be had";
  if (gpu.problem.empty()) {
    std::memset(host, 1, bytes);
    const auto best = [&](auto copy) {
      double seconds = 1e30;
      for (int round = 0; round < 6; ++round) {
        d.synchronize();
        const auto begin = std::chrono::steady_clock::now();
        if (copy() != 0 || d.synchronize() != 0) return 0.0;
        seconds = std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      }
      return static_cast<double>(bytes) / seconds / 1e9;
    };
    gpu.pinned_to_device_gbps = best([&] { return d.to_device(memory, host, bytes, nullptr); });
    gpu.device_to_pinned_gbps = best([&] { return d.to_host(host, memory, bytes, nullptr); });
  }
  if (memory) d.free(memory);
  if (host) d.host_free(host);
  d.current(nullptr);  // whoever comes next begins on the first GPU, not in what is left of this one's context
  d.release(device);
}

}  // namespace

CudaReport probe_cuda(std::size_t copy_bytes) {
  CudaReport report;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    report.problem = "no NVIDIA driver (libcuda.so.1) on this machine";
    return report;
  }
  report.driver_found = true;
  Driver d{};
  if (!load_all(library, d)) {
    report.problem = "the NVIDIA driver is too old: an entry point is missing";
    return report;
  }
  if (const Result r = d.init(0); r != 0) {
    report.problem = "the NVIDIA driver does not start (error " + std::to_string(r) + "): no GPU, or not visible to this process";
    return report;
  }
  d.version(&report.driver_version);
  int count = 0;
  d.count(&count);
  if (count == 0) report.problem = "the driver sees no GPU";
  for (int i = 0; i < count; ++i) {
    GpuReport gpu;
    Device device = 0;
    if (d.device(&device, i) != 0) continue;
    char name[256] = "";
    d.name(name, sizeof(name) - 1, device);
    gpu.name = name;
    d.attribute(&gpu.major, kMajor, device);
    d.attribute(&gpu.minor, kMinor, device);
    d.attribute(&gpu.multiprocessors, kMultiprocessors, device);
    std::size_t bytes = 0;
    d.memory(&bytes, device);
    gpu.memory_gib = static_cast<double>(bytes) / (1 << 30);
    if (copy_bytes > 0) measure_link(d, device, copy_bytes, gpu);
    report.devices.push_back(gpu);
  }
  return report;
}

}  // namespace specstate::cli
