// What `specstate doctor` and `specstate bench` ask the driver leaves the calling thread as it was: no GPU's context is current afterwards.
#include <cuda.h>
#include <dlfcn.h>

#include "../../cli/cuda_probe.hpp"
#include "gpu_test.hpp"

using namespace specstate;
using namespace specstate::gpu_test;

namespace {

TEST(ProbeGpu, LeavesNoContextCurrent) {
  if (small()) {  // a tool has contexts of its own, and nothing of ours runs on the GPU here
    SPECSTATE_NEEDS_GPU();
    SPECSTATE_GPU(cudaFree(nullptr));
    return;
  }
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) GTEST_SKIP() << "needs-gpu: no NVIDIA driver";
  // Before the CUDA runtime has any: this test is the first of its process to ask for a GPU.
  const cli::CudaReport report = cli::probe_cuda(1 << 20);
  if (report.devices.empty()) GTEST_SKIP() << "needs-gpu: the driver sees no GPU";
  for (const auto& gpu : report.devices) {
    EXPECT_EQ(gpu.problem, "");
    EXPECT_GT(gpu.pinned_to_device_gbps, 0);
    EXPECT_GT(gpu.device_to_pinned_gbps, 0);
  }
  const auto current = reinterpret_cast<CUresult (*)(CUcontext*)>(dlsym(library, "cuCtxGetCurrent"));
  ASSERT_NE(current, nullptr);
  CUcontext context = nullptr;
  ASSERT_EQ(current(&context), CUDA_SUCCESS);
  EXPECT_EQ(context, nullptr);
  // So whoever comes next begins on the first GPU.
  int device = -1;
  SPECSTATE_GPU(cudaFree(nullptr));
  SPECSTATE_GPU(cudaGetDevice(&device));
  EXPECT_EQ(device, 0);
}

}  // namespace
