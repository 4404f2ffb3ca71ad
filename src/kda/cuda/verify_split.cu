// Forms that are cut among CTAs; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/verify.cuh"

namespace specstate::kda::cuda {

VerifyKernel verify_split(const Form& f) {
  switch (f.rows) {
    case 1: return verify_form<bfloat16, float, 128, 1, true>();
    case 2: return verify_form<bfloat16, float, 128, 2, true>();
    case 4: return verify_form<bfloat16, float, 128, 4, true>();
    default: return verify_form<bfloat16, float, 128, 8, true>();
  }
}

}  // namespace specstate::kda::cuda
