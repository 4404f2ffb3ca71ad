#pragma once
// A step is some hundred small kernels, each of which reads what the one before it wrote. So they take turns by programmatic dependent launch: a kernel
// is on the multiprocessors, with its arguments and its weights, before its turn comes, and what is left between two kernels is the wait itself.
#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"

namespace specstate::runtime::cuda {

/// Every thread of every kernel calls it, before it reads what an earlier kernel wrote and before it writes anything. Before it stands at most what
/// never changes during a run: weights.
__device__ inline void my_turn() {
  specstate::cuda::ptx::let_next_start();
  specstate::cuda::ptx::wait_for_previous();
}

/// As cuda::launch, for kernels that call my_turn.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), specstate::cuda::Launch shape, Stream stream, Arguments&&... arguments) {
  shape.overlap = true;
  specstate::cuda::launch(kernel, shape, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace specstate::runtime::cuda
