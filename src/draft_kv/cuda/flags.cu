#include <array>
#include <atomic>
#include <mutex>

#include "core/match.hpp"
#include "cuda/launch.hpp"
#include "draft_kv/args.hpp"
#include "draft_kv/cuda/flags.hpp"

namespace specstate::draft_kv::cuda {

namespace {

struct Flags {
  std::once_flag once;
  int* host = nullptr;
  int* device = nullptr;
};

Flags& flags() {
  static std::array<Flags, 64> all;  // device_info knows no more GPUs
  Flags& f = all[specstate::cuda::device_info().index];
  std::call_once(f.once, [&] {
    // Also while a graph is being captured: this is no work of the stream.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    SPECSTATE_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    void *host = nullptr, *device = nullptr;
    cudaError_t error = cudaHostAlloc(&host, kFlags * sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable);
    if (error == cudaSuccess) error = cudaHostGetDevicePointer(&device, host, 0);
    cudaThreadExchangeStreamCaptureMode(&mode);
    SPECSTATE_CUDA_CHECK(error);
    f.host = static_cast<int*>(host), f.device = static_cast<int*>(device);
    for (int i = 0; i < kFlags; ++i) f.host[i] = 0;
  });
  return f;
}

}  // namespace

int* device_flags() { return flags().device; }

/// Reads and clears at once, so that of several threads one reports a row, and what a kernel raises meanwhile is not lost.
void raise_flags() {
  Flags& f = flags();
  bool raised[kFlags];
  for (int i = 0; i < kFlags; ++i) {
    std::atomic_ref<int> word(f.host[i]);
    raised[i] = word.load(std::memory_order_relaxed) != 0 && word.exchange(0) != 0;
  }
  if (!raised[kSlotFlag] && !raised[kPositionFlag]) return;
  core::throw_value(std::string("draft_kv: ") +
                    (raised[kPositionFlag] ? "positions: expected rows of cos_sin_cache" : "slot_mapping: expected slots of the pool") +
                    ", got one outside in an earlier call on this GPU (its row was not written).");
}

}  // namespace specstate::draft_kv::cuda
