// Forms of the fold; see backend.hpp. Activations come through the rings, whose dtype the kernel reads at run time.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/fold.cuh"

namespace specstate::kda::cuda {

namespace {

template <class S, int K>
FoldKernel of_rows(int rows) {
  return rows == 8 ? fold_kernel<S, K, 8> : rows == 4 ? fold_kernel<S, K, 4> : fold_kernel<S, K, 2>;
}

}  // namespace

FoldKernel fold_form(const Form& f) {
  if (f.state_bf16) return f.K == 128 ? of_rows<bfloat16, 128>(f.rows) : of_rows<bfloat16, 64>(f.rows);
  return f.K == 128 ? of_rows<float, 128>(f.rows) : of_rows<float, 64>(f.rows);
}

FoldRowsKernel fold_rows(bool state_bf16, int rows) {
  if (state_bf16) return rows == 2 ? fold_rows_kernel<bfloat16, 2> : fold_rows_kernel<bfloat16, 4>;
  return rows == 2 ? fold_rows_kernel<float, 2> : fold_rows_kernel<float, 4>;
}

}  // namespace specstate::kda::cuda
