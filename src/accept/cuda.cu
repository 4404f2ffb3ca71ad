// Acceptance on the GPU. Everything here is a few microseconds of work on tensors that the step before left in L2, so each call is one
// launch, and what it decides equals the CPU's to the bit. A row that the CPU would refuse for what it holds (a length outside 1..W) is
// a padding row here: its length is 0, its tokens are 0.
#include "accept/args.hpp"
#include "accept/layout.hpp"
#include "cuda/launch.hpp"
#include "cuda/ptx.cuh"

namespace specstate::accept::cuda {

namespace ptx = specstate::cuda::ptx;
using specstate::cuda::blocks_for;
using specstate::cuda::launch;

namespace {

constexpr int kWarp = 32, kWarps = 4;

/// A warp a row. Lane i looks at columns i, i + 32, ...: a ballot finds the first proposal that falls, then the row is written whole.
template <class Token>
__global__ void __launch_bounds__(kWarp* kWarps) greedy(const VerifyGreedyArgs x) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (r >= x.batch) return;
  const Token* c = static_cast<const Token*>(x.candidates) + r * x.candidates_stride[0];
  const Token* t = static_cast<const Token*>(x.target_argmax) + r * x.target_stride[0];
  Token* o = static_cast<Token*>(x.out_tokens) + r * x.out_stride[0];
  const std::int64_t width = x.verify_lens.given() ? index_at(x.verify_lens, r * x.verify_lens.strides[0]) : x.width;
  const bool padding = width < 1 || width > x.width;

  std::int64_t a = padding ? -1 : width - 1;  // proposals that stand
  for (std::int64_t begin = 0; begin + 1 < width && !padding; begin += kWarp) {
    const std::int64_t j = begin + lane;
    bool falls = false;
    if (j + 1 < width) {
      const Token proposal = c[(j + 1) * x.candidates_stride[1]];
      falls = proposal < 0 || proposal != t[j * x.target_stride[1]];
    }
    if (const unsigned fallen = __ballot_sync(~0u, falls)) {
      a = begin + __ffs(static_cast<int>(fallen)) - 1;
      break;
    }
  }
  for (std::int64_t j = lane; j < x.width; j += kWarp) {
    Token token = 0;
    if (j < a) token = c[(j + 1) * x.candidates_stride[1]];
    if (j == a) token = t[a * x.target_stride[1]];
    o[j * x.out_stride[1]] = token;
  }
  if (lane == 0) x.accept_lens[r * x.accept_stride] = static_cast<std::int32_t>(a + 1);
}

}  // namespace

void run(const VerifyGreedyArgs& args, Stream stream) {
  launch(args.is_int64 ? greedy<std::int64_t> : greedy<std::int32_t>,
         {.grid = blocks_for(args.batch, kWarps), .block = kWarp * kWarps, .overlap = true}, stream, args);
}

}  // namespace specstate::accept::cuda
