// The forms of spread.cuh: bfloat16 activations, float32 states, K = V = 128, a block of tokens; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/spread.cuh"

namespace specstate::kda::cuda {

SpreadKernel verify_spread(int block) { return block == 8 ? spread::form<8>() : spread::form<16>(); }

}  // namespace specstate::kda::cuda
