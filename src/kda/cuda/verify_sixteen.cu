// The forms of sixteen.cuh: bfloat16 activations, float32 states, K = V = 128; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/sixteen.cuh"

namespace specstate::kda::cuda {

SpreadKernel verify_sixteen(int warps) { return warps == 8 ? sixteen::form<8>() : sixteen::form<16>(); }

}  // namespace specstate::kda::cuda
