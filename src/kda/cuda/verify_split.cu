// Forms that are cut among CTAs; see backend.hpp.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/verify.cuh"

namespace specstate::kda::cuda {

VerifyKernel verify_split(const Form& f) {
  if (f.frozen) {
    switch (f.rows) {
      case 1: return verify_form<bfloat16, float, 128, 1, true, true>();
      case 2: return verify_form<bfloat16, float, 128, 2, true, true>();
      case 4: return verify_form<bfloat16, float, 128, 4, true, true>();
      default: return verify_form<bfloat16, float, 128, 8, true, true>();
    }
  }
  switch (f.rows) {
    case 1: return verify_form<bfloat16, float, 128, 1, true, false>();
    case 2: return verify_form<bfloat16, float, 128, 2, true, false>();
    case 4: return verify_form<bfloat16, float, 128, 4, true, false>();
    default: return verify_form<bfloat16, float, 128, 8, true, false>();
  }
}

}  // namespace specstate::kda::cuda
