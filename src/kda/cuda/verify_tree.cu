// Trees from a frozen state; see backend.hpp.
#include "kda/cuda/tree.cuh"

namespace specstate::kda::cuda {

namespace {

template <class Act>
VerifyKernel of_heads(int K, int V) {
  if (K == 128) return V == 128 ? tree::form<Act, 128, 128>() : tree::form<Act, 128, 64>();
  return V == 128 ? tree::form<Act, 64, 128>() : tree::form<Act, 64, 64>();
}

}  // namespace

VerifyKernel verify_tree(const Form& f) {
  const int V = f.rows * kRowUnit;
  return f.act_bf16 ? of_heads<bfloat16>(f.K, V) : of_heads<float>(f.K, V);
}

}  // namespace specstate::kda::cuda
