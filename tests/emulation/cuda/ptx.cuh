#pragma once
// What the engine's kernels use of src/cuda/ptx.cuh: kernels of the emulated GPU never overlap.
namespace specstate::cuda::ptx {
inline void wait_for_previous() {}
inline void let_next_start() {}
}  // namespace specstate::cuda::ptx
