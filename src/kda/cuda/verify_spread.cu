// The form of spread.cuh: bfloat16 activations, float32 states, K = V = 128, a block of tokens; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/spread.cuh"

namespace specstate::kda::cuda {

SpreadKernel verify_spread() { return {spread::kernel, spread::kThreads}; }

}  // namespace specstate::kda::cuda
