// The small kernels around a step: conv windows into their pools (the commit of verified windows, decode's own advance), the counts of
// deferred folds, zeros where there is no request.
#include <algorithm>
#include <type_traits>

#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"

namespace specstate::kda::cuda {

namespace {

constexpr int kThreads = 256;

/// Requests of one launch: a dimension of blocks.
constexpr std::int64_t kSlice = 65535;

/// Block (channels, request from `first` on, pool: first for all slots, then for all track slots). Rows and slots outside are skipped.
__global__ void __launch_bounds__(kThreads) rollback_kernel(const __grid_constant__ RollbackPools pools, std::int64_t first) {
  const RollbackCall& a = pools.each;
  const bool track = static_cast<int>(blockIdx.z) >= pools.count;
  const int number = static_cast<int>(blockIdx.z) - (track ? pools.count : 0);
  Array pool = a.pool, windows = a.windows;
  pool.data = pools.at[number].pool, windows.data = pools.at[number].windows;
  wait_for_predecessor();
  launch_successor();
  const std::int64_t n = first + blockIdx.y;
  const Index slots = track ? a.track_slots : a.slots, steps = track ? a.track_steps : a.steps_of;
  const Coming slot_of = ask<false>(slots, n), step_of = ask<false>(steps, n), row_of = ask<false>(a.rows, n);
  const std::int64_t slot = slot_of.value(slots), step = step_of.value(steps), row = a.rows ? row_of.value(a.rows) : n;
  if (slot < 0 || slot >= a.slot_count || step < 0 || step >= a.steps || row < 0 || row >= a.row_count) return;
  const std::int64_t channel = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  const auto copy = [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Quad<T> x[3];
    load_window(windows, at(windows, row, step, channel), windows.stride[2], windows.stride[3], x);
    store_window<false>(pool, at(pool, slot, channel), pool.stride[1], pool.stride[2], x[0], x[1], x[2]);
  };
  if (channel + 4 <= a.channels) {
    pool.bf16 ? copy(static_cast<bfloat16*>(nullptr)) : copy(static_cast<float*>(nullptr));
  } else {
    for (std::int64_t c = channel; c < a.channels; ++c)
      for (int t = 0; t < 3; ++t) store(pool, at(pool, slot, c, t), load(windows, at(windows, row, step, c, t)));
  }
}

/// After a decode: the last three inputs of each request. Block (channels, request from `first` on, q or k or v). It follows the kernel that reads the
/// windows, because the CTAs of several value heads and rows read one head's.
__global__ void __launch_bounds__(kThreads) advance_kernel(const __grid_constant__ VerifyCall a, std::int64_t first) {
  wait_for_predecessor();
  launch_successor();
  const Channel& c = blockIdx.z == 0 ? a.q : blockIdx.z == 1 ? a.k : a.v;
  const std::int64_t dim = blockIdx.z == 2 ? a.V : a.K, heads = blockIdx.z == 2 ? a.HV : a.H, r = first + blockIdx.y, each = a.T / a.N;
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

void rollback(const RollbackPools& a, Stream stream) {
  for (std::int64_t first = 0; first < a.each.N; first += kSlice) {
    const dim3 grid(specstate::cuda::blocks_for(a.each.channels, 4 * kThreads), static_cast<unsigned>(std::min(a.each.N - first, kSlice)),
                    static_cast<unsigned>(a.count * (a.each.track_slots ? 2 : 1)));
    specstate::cuda::launch(rollback_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, a, first);
  }
}

void advance_windows(const VerifyCall& a, Stream stream) {
  for (std::int64_t first = 0; first < a.N; first += kSlice) {
    const dim3 grid(specstate::cuda::blocks_for(std::max(a.H * a.K, a.HV * a.V), kThreads),
                    static_cast<unsigned>(std::min(a.N - first, kSlice)), 3);
    specstate::cuda::launch(advance_kernel, {.grid = grid, .block = kThreads, .overlap = forced().overlap}, stream, a, first);
  }
}

}  // namespace specstate::kda::cuda
