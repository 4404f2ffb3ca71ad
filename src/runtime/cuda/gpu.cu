// What only a real GPU has: the device itself, and graphs. (tests/emulation puts something else in the place of this one file.)
#include "core/dispatch.hpp"
#include "cuda/launch.hpp"
#include "cuda/nccl.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/run.hpp"
#include "runtime/ranks.hpp"

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

namespace {

/// Processes of one host, NCCL between their GPUs.
class Cards final : public Group {
 public:
  explicit Cards(Ranks& ranks) : Group(ranks.rank(), ranks.size()), ranks_(ranks), nccl_(common_id(ranks), ranks.rank(), ranks.size()) {}
  void all_gather(const void* from, void* to, std::int64_t bytes, Stream stream) override { nccl_.all_gather(from, to, bytes, stream); }
  void* share(std::int64_t bytes) override {
    constexpr std::int64_t kPage = std::int64_t{2} << 20;
    void* const p = ranks_.map(shared_, bytes);
    shared_ += (bytes + kPage - 1) / kPage * kPage;
    return p;
  }
  void unshare(void* address, std::int64_t bytes) noexcept override { Ranks::unmap(address, bytes); }
  void beat() override { ranks_.beat(); }
  void abort() noexcept override { nccl_.abort(); }

 private:
  static specstate::cuda::Nccl::Id common_id(Ranks& ranks) {
    ranks.beat();
    specstate::cuda::Nccl::Id id{};
    if (const std::string why = specstate::cuda::Nccl::missing(); !why.empty())
      throw Error(ErrorKind::kCuda, "--tensor-parallel: expected NCCL, got none: " + why + ".");
    if (ranks.rank() == 0) id = specstate::cuda::Nccl::make_id();
    ranks.from_first(&id, sizeof id);
    return id;
  }
  Ranks& ranks_;
  specstate::cuda::Nccl nccl_;
  std::int64_t shared_ = 0;
};

}  // namespace

Report decode(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
              const Callbacks& callbacks, States* states, const std::vector<std::vector<int>>& known) {
  const bool one = !options.ranks || options.ranks->size() == 1;
  if (!one) {
    int cards = 0;
    SPECSTATE_CUDA_CHECK(cudaGetDeviceCount(&cards));
    if (cards < options.ranks->size())
      throw Error(ErrorKind::kCuda, "--tensor-parallel: expected " + std::to_string(options.ranks->size()) + " GPUs (one a rank), got " +
                                        std::to_string(cards) + ".");
  }
  const core::CudaScope scope({DeviceType::kCuda, one ? 0 : options.ranks->rank(), false});
  if (one) return run(model, prompts, options, mode, callbacks, states, nullptr, known);
  Cards cards(*options.ranks);
  return run(model, prompts, options, mode, callbacks, states, &cards, known);
}

}  // namespace specstate::runtime::cuda
