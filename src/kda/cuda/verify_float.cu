// float32 activations, any strides, trees; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/verify.cuh"

namespace specstate::kda::cuda {

VerifyKernel verify_float(const Form& f) {
  if (f.state_bf16) {
    if (f.K == 128) return f.rows == 8 ? verify_form<float, bfloat16, 128, 8, false>() : verify_form<float, bfloat16, 128, 4, false>();
    return f.rows == 8 ? verify_form<float, bfloat16, 64, 8, false>() : verify_form<float, bfloat16, 64, 4, false>();
  }
  if (f.K == 128) return f.rows == 8 ? verify_form<float, float, 128, 8, false>() : verify_form<float, float, 128, 4, false>();
  return f.rows == 8 ? verify_form<float, float, 64, 8, false>() : verify_form<float, float, 64, 4, false>();
}

}  // namespace specstate::kda::cuda
