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

FoldKernel fold_stream(const Form& f) { return f.state_bf16 ? fold_stream_kernel<bfloat16> : fold_stream_kernel<float>; }
std::size_t fold_stream_bytes(bool state_bf16) { return state_bf16 ? sizeof(StreamShared<bfloat16>) : sizeof(StreamShared<float>); }

}  // namespace specstate::kda::cuda
