// The emulated GPU: fibers for a block's threads, and what src/runtime/cuda/gpu.cu, src/cuda/device.cu and cuBLASLt are to a real one.
#include <setjmp.h>
#include <ucontext.h>

#include <vector>

#include "cuda/cublaslt.hpp"
#include "cuda/launch.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/cuda/run.hpp"

__thread dim3 blockIdx, blockDim, gridDim;

namespace emulation {

__thread float4* dynamic_shared;
__thread std::uint64_t exchange[1024];

namespace {

/// A fiber lives as long as the program: it runs a thread of one block after the other. Switching by _setjmp asks nothing of the kernel.
struct Fiber {
  jmp_buf at;
  ucontext_t birth;
  std::vector<char> stack;
  bool born = false, done = false;
};
struct Barrier {
  int arrived = 0;
  unsigned passed = 0;
};
// Each thread of the program has a GPU of its own: so ranks are threads.
thread_local std::vector<Fiber> fibers(1024);
__thread jmp_buf outside;
__thread unsigned count, current;
__thread int alive;
__thread Barrier block_barrier, warp_barrier[32];
__thread const std::function<void()>* body;

void entry();
[[noreturn]] void resume(Fiber& f) {
  if (f.born) _longjmp(f.at, 1);
  f.born = true;
  f.stack.resize(std::size_t{1} << 16);
  getcontext(&f.birth);
  f.birth.uc_stack.ss_sp = f.stack.data(), f.birth.uc_stack.ss_size = f.stack.size(), f.birth.uc_link = nullptr;
  makecontext(&f.birth, entry, 0);
  setcontext(&f.birth);
  std::abort();
}

/// On with the next fiber that has not ended, or with whoever launched the kernel.
void leave(Fiber& self) {
  if (_setjmp(self.at) != 0) return;
  if (alive == 0) _longjmp(outside, 1);
  do current = (current + 1) % count;
  while (fibers[current].done);
  resume(fibers[current]);
}

void wait(Barrier& barrier, int expected) {
  const unsigned before = barrier.passed;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
  while (barrier.passed == before) leave(fibers[current]);
}

void entry() {
  for (;;) {
    (*body)();
    Fiber& self = fibers[current];
    self.done = true;
    // Threads that ended are not waited for.
    if (--alive > 0 && block_barrier.arrived == alive) block_barrier.arrived = 0, ++block_barrier.passed;
    leave(self);
  }
}

}  // namespace

unsigned thread() { return current; }
void sync_block() { wait(block_barrier, alive); }
void sync_warp() { wait(warp_barrier[current / 32], 32); }

void run(const dim3& grid, const dim3& block, std::size_t shared, const std::function<void()>& thread_body) {
  std::vector<float4> memory(shared / sizeof(float4) + 1);
  body = &thread_body, count = block.x;
  blockDim = block, gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        memory.assign(memory.size(), {NAN, NAN, NAN, NAN});
        dynamic_shared = memory.data(), blockIdx = dim3(x, y, z), alive = static_cast<int>(count), current = 0;
        block_barrier = {};
        for (Barrier& b : warp_barrier) b = {};
        for (unsigned t = 0; t < count; ++t) fibers[t].done = false;
        if (_setjmp(outside) == 0) resume(fibers[0]);
      }
}

}  // namespace emulation

namespace specstate::cuda {

[[noreturn]] void throw_cuda(cudaError_t, const char* what) { throw Error(ErrorKind::kCuda, what); }
const DeviceInfo& device_info() {
  static const DeviceInfo info{0, 9, 0, 132, 227 << 10, 228 << 10, 50 << 20};
  return info;
}
bool CublasLt::here() { return false; }
struct CublasLt::Plan {};
CublasLt::CublasLt(void*, std::int64_t) { throw Error(ErrorKind::kCuda, "cuBLASLt is not emulated"); }
CublasLt::~CublasLt() = default;
void CublasLt::product(const float*, std::int64_t, std::int64_t, const float*, std::int64_t, std::int64_t, float*, std::int64_t, bool,
                       Stream) {}

void allow_shared(const void*, std::size_t) {}  // shared memory is the host's here

}  // namespace specstate::cuda

namespace specstate::runtime::cuda {

Device gpu() { return {}; }
/// Work cannot be captured where it is done at once: capturing notes it, launching does it.
namespace {
thread_local std::vector<std::function<void()>> captured;
}
Graph::Graph(const Queue&, const std::function<void()>& enqueue) : exec_(reinterpret_cast<cudaGraphExec_t>(captured.size())) {
  captured.push_back(enqueue);
}
Graph::~Graph() = default;
void Graph::launch(const Queue&) const { captured[reinterpret_cast<std::size_t>(exec_)](); }

Report decode(const Checkpoint& model, const std::vector<std::vector<int>>& prompts, const GenerateOptions& options, Mode mode,
              const Callbacks& callbacks, States* states, const std::vector<std::vector<int>>& known) {
  return run(model, prompts, options, mode, callbacks, states, nullptr, known);
}

}  // namespace specstate::runtime::cuda
