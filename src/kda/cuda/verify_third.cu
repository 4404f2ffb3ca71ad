// The form of third.cuh: bfloat16 activations, float32 states, K = V = 128, a block of tokens; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/third.cuh"

namespace specstate::kda::cuda {

ThirdKernel verify_third(bool fold) { return {fold ? third::kernel<true> : third::kernel<false>, third::kThreads, sizeof(third::Shared)}; }

}  // namespace specstate::kda::cuda
