// Forms of heads.cuh: bfloat16 activations, float32 states, K = V = 128; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/plain.cuh"

namespace specstate::kda::cuda {

HeadsKernel verify_heads(bool frozen, int warps) {
  return !frozen ? plain::form<16, false>() : warps == 8 ? plain::form<8, true>() : plain::form<16, true>();
}

}  // namespace specstate::kda::cuda
