// bfloat16 activations with a bfloat16 state or heads of 64; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/verify.cuh"

namespace specstate::kda::cuda {

VerifyKernel verify_plain(const Form& f) {
  if (!f.act_bf16) return {};
  if (f.state_bf16 && f.K == 128 && f.rows == 8) return verify_form<bfloat16, bfloat16, 128, 8, true>();
  if (f.state_bf16 && f.K == 64 && f.rows == 4) return verify_form<bfloat16, bfloat16, 64, 4, true>();
  if (!f.state_bf16 && f.K == 64 && f.rows == 4) return verify_form<bfloat16, float, 64, 4, true>();
  return {};
}

}  // namespace specstate::kda::cuda
