// The small kernels around a step: conv windows into their pools (the commit of verified windows, decode's own advance), the counts of
// deferred folds, zeros where there is no request.
#include <algorithm>
#include <type_traits>

#include "kda/cuda/backend.hpp"
#include "kda/cuda/device.cuh"

namespace specstate::kda::cuda {

namespace {

constexpr int kThreads = 256;

/// Block (channels, request, 0: the slot or 1: its track slot). Rows and slots outside are skipped.
__global__ void __launch_bounds__(kThreads) rollback_kernel(const __grid_constant__ RollbackCall a) {
  wait_for_predecessor();
  launch_successor();
  const std::int64_t n = blockIdx.y;
  const bool track = blockIdx.z == 1;
  const std::int64_t slot = index(track ? a.track_slots : a.slots, n), step = index(track ? a.track_steps : a.steps_of, n);
  const std::int64_t row = a.rows ? index(a.rows, n) : n;
  if (slot < 0 || slot >= a.slot_count || step < 0 || step >= a.steps || row < 0 || row >= a.row_count) return;
  const std::int64_t channel = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  const auto copy = [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Quad<T> x[3];
    load_window(a.windows, at(a.windows, row, step, channel), a.windows.stride[2], a.windows.stride[3], x);
    store_window<false>(a.pool, at(a.pool, slot, channel), a.pool.stride[1], a.pool.stride[2], x[0], x[1], x[2]);
  };
  if (channel + 4 <= a.channels) {
    a.pool.bf16 ? copy(static_cast<bfloat16*>(nullptr)) : copy(static_cast<float*>(nullptr));
  } else {
    for (std::int64_t c = channel; c < a.channels; ++c)
      for (int t = 0; t < 3; ++t) store(a.pool, at(a.pool, slot, c, t), load(a.windows, at(a.windows, row, step, c, t)));
  }
}

/// After a decode: the last three inputs of each request. Block (channels, request, q or k or v). It follows the kernel that reads the
/// windows, because the CTAs of several value heads and rows read one head's.
__global__ void __launch_bounds__(kThreads) advance_kernel(const __grid_constant__ VerifyCall a) {
  wait_for_predecessor();
  launch_successor();
  const Channel& c = blockIdx.z == 0 ? a.q : blockIdx.z == 1 ? a.k : a.v;
  const std::int64_t dim = blockIdx.z == 2 ? a.V : a.K, heads = blockIdx.z == 2 ? a.HV : a.H, r = blockIdx.y, each = a.T / a.N;
  const std::int64_t slot = index(a.slots, r), begin = a.cu ? index(a.cu, r) : r * each, end = a.cu ? index(a.cu, r + 1) : begin + each;
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= heads * dim || slot <= a.null_slot || slot < 0 || slot >= a.pool || begin < 0 || begin >= end || end > a.T) return;
  float x[3];
  for (int t = 0; t < 3; ++t) {
    const std::int64_t input = end - begin + t;  // 0 to 2 are the window, 3 + i is token i
    x[t] = input < 3 ? load(c.window, at(c.window, slot, channel, input))
                     : load(c.x, at(c.x, begin + input - 3, channel / dim) + channel % dim);
  }
  for (int t = 0; t < 3; ++t) store(c.window, at(c.window, slot, channel, t), x[t]);
}

__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ VerifyCall a) {
  wait_for_predecessor();
  launch_successor();
  const std::int64_t head = blockIdx.x;
  if (threadIdx.x < a.V) store(a.out, at(a.out, head / a.HV, head % a.HV, threadIdx.x), 0.0f);
}

/// A thread a (layer, request).
__global__ void __launch_bounds__(kThreads) defer_kernel(const __grid_constant__ DeferCall a) {
  wait_for_predecessor();
  launch_successor();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.N * a.layers) return;
  const std::int64_t slot = index(a.slots, i % a.N), accept = index(a.accept, i % a.N);
  if (slot <= a.null_slot || slot < 0 || slot >= a.slot_count || accept <= 0) return;
  at(a.pending, i / a.N, slot) = static_cast<std::int32_t>(accept);
}

__global__ void __launch_bounds__(kThreads) settle_kernel(const __grid_constant__ FoldCall a) {
  wait_for_predecessor();
  launch_successor();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.N * a.layers) return;
  const std::int64_t layer = i / a.N, slot = index(a.slots, i % a.N), tokens = accepted(a, layer, i % a.N, slot);
  if (tokens > 0 && tokens <= a.L) at(a.pending, layer, slot) = 0;
}

}  // namespace

void settle_pending(const FoldCall& a, Stream stream) {
  const unsigned grid = specstate::cuda::blocks_for(a.N * a.layers, kThreads);
  specstate::cuda::launch(settle_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, a);
}

void run(const DeferArgs& a, Stream stream) {
  if (a.N == 0 || a.layers == 0) return;
  const unsigned grid = specstate::cuda::blocks_for(a.N * a.layers, kThreads);
  specstate::cuda::launch(defer_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream,
                          static_cast<const DeferCall&>(a));
}

void clear(const VerifyCall& a, Stream stream) {
  const unsigned grid = specstate::cuda::blocks_for(a.T * a.HV, 1);
  specstate::cuda::launch(clear_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, a);
}

void rollback(const RollbackCall& a, Stream stream) {
  const dim3 grid(specstate::cuda::blocks_for(a.channels, 4 * kThreads), static_cast<unsigned>(a.N), a.track_slots ? 2 : 1);
  specstate::cuda::launch(rollback_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, a);
}

void advance_windows(const VerifyCall& a, Stream stream) {
  const dim3 grid(specstate::cuda::blocks_for(std::max(a.H * a.K, a.HV * a.V), kThreads), static_cast<unsigned>(a.N), 3);
  specstate::cuda::launch(advance_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, a);
}

}  // namespace specstate::kda::cuda
