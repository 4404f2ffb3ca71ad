#pragma once
// GPUs as the driver sees them, without a CUDA toolkit: libcuda is opened at run time.
#include <cstddef>
#include <string>
#include <vector>

namespace specstate::cli {

struct GpuReport {
  std::string name;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  double memory_gib = 0;
  double pinned_to_device_gbps = 0, device_to_pinned_gbps = 0;  // measured, 10^9 bytes a second; 0: could not be measured
  std::string problem;                                          // why something above is missing
};

struct CudaReport {
  bool driver_found = false;
  int driver_version = 0;  // 13000 is 13.0
  std::string problem;
  std::vector<GpuReport> devices;
};

/// `copy_bytes`: of each copy that is measured, 0: none is.
CudaReport probe_cuda(std::size_t copy_bytes = std::size_t{256} << 20);

}  // namespace specstate::cli
