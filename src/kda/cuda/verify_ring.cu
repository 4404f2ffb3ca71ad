// Ring mode from a frozen state; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/ring.cuh"

namespace specstate::kda::cuda {

VerifyKernel verify_ring() {
  return {ring::kernel, [](int) { return sizeof(ring::Shared); }, 32 * ring::kAllWarps};
}

}  // namespace specstate::kda::cuda
