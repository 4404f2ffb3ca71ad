// What only a real GPU has: the device itself, and graphs. (tests/emulation puts something else in the place of this one file.)
#include "core/dispatch.hpp"
#include "cuda/launch.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/run.hpp"

namespace specstate::runtime::cuda {

Device gpu() {
  int index = 0;
  SPECSTATE_CUDA_CHECK(cudaGetDevice(&index));
  return {DeviceType::kCuda, index, false};
}

Graph::Graph(const Queue& queue, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  SPECSTATE_CUDA_CHECK(cudaStreamBeginCapture(queue.native(), cudaStreamCaptureModeThreadLocal));
  try {
    enqueue();
  } catch (...) {
    if (cudaStreamEndCapture(queue.native(), &graph) == cudaSuccess) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    throw;
  }
  SPECSTATE_CUDA_CHECK(cudaStreamEndCapture(queue.native(), &graph));
  const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
  (void)cudaGraphDestroy(graph);
  SPECSTATE_CUDA_CHECK(error);
}
Graph::~Graph() { (void)cudaGraphExecDestroy(exec_); }
void Graph::launch(const Queue& queue) const { SPECSTATE_CUDA_CHECK(cudaGraphLaunch(exec_, queue.native())); }

Report decode(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
              const Callbacks& callbacks, States* states) {
  const core::CudaScope scope({DeviceType::kCuda, 0, false});
  return run(model, prompts, options, mode, callbacks, states);
}

}  // namespace specstate::runtime::cuda
