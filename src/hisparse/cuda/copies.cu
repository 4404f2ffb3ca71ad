// Copies without policy: the recorded plan of a swap on all follower layers in one launch, DSv4 rows by index; and the reset of a state.
//
// The link is the limit, not the SMs: 32 blocks keep more rows in flight than it can carry, whatever the batch. Work is the list of
// (miss, follower, pair), dealt to the warps round robin over all batch rows, so that one request with many misses is no tail. Each lane finds
// one transfer (a search in the running counts of the batch rows), then the warp moves them four at a time. (Followers that are given with the swap come in the swap's own launch
// if they can, see swap_bring.cuh.)
//
// Followers that are awaited one by one (`arrived`) come one behind the other: a warp brings its rows of the first, says so and goes on with the second, and waits for
// nobody. The last warp to say so sets the follower's sign, which await_kernel takes. So a layer waits for its own rows alone, and the copies of all of
// them are one launch, whose multiprocessors nobody takes between two followers.
//
// A call with a budget runs beside other kernels. There a block is as large as a multiprocessor, so that it has one to itself: two blocks on one brought
// rows half as fast, and what else lies there waits behind its requests to the host. And it starts when the work before it is done, not before: blocks
// that only wait for the call before them would take as many multiprocessors again from what runs beside.
#include <algorithm>

#include "cuda/launch.hpp"
#include "hisparse/cuda/rows.cuh"

namespace specstate::hisparse::cuda {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kReplayBlocks = 32;
constexpr int kAloneThreads = 1024;  // of 64 registers: all that a multiprocessor has
constexpr int kMostStreams = 64;     // pairs of buffers in one launch

struct Work : Streams<kMostStreams> {
  int rounds, each, first;  // rounds of so many streams: all in one, or a follower's; number of the first follower
};

constexpr std::int32_t kArrived = INT32_MIN;  // all rows of a follower are there

/// This warp's rows of a follower are there.
__device__ __forceinline__ void tell(std::int32_t* arrived, u32 warps) {
  __threadfence();
  __syncwarp();
  if (lane_id() != 0) return;
  std::int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  if (before == static_cast<std::int32_t>(warps) - 1)
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(arrived), "r"(kArrived) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
constexpr u64 kPatience = 20'000'000'000;  // an await without a replay: an error is better than a GPU that hangs

/// One warp. It lets no other kernel start before the rows are there: blocks that wait for it could take the multiprocessors that the copies need.
__global__ void __launch_bounds__(32) await_kernel(std::int32_t* arrived) {
  if (threadIdx.x == 0) {
    const u64 begin = nanoseconds();
    std::int32_t n;
#pragma unroll 1
    for (;;) {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(n) : "l"(arrived) : "memory");
      if (n == kArrived) break;
      if (nanoseconds() - begin > kPatience) __trap();
      __nanosleep(50);
    }
  }
  ptx::wait_for_previous();
  if (threadIdx.x == 0) *arrived = 0;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) replay_kernel(const __grid_constant__ ReplayPlanArgs x, const __grid_constant__ Work to) {
  __shared__ u32 before[kThreads + 1];
  __shared__ u32 warp_sum[32];
  ptx::wait_for_previous();
  if (x.sm_budget == 0) ptx::let_next_start();
  const auto count = [&](i64 b) { return b >= x.batch ? i64{0} : static_cast<i64>(x.count(b)); };
  i64 mine_now = count(threadIdx.x);  // under way together with the number of real rows
  i64 real = x.batch;
  if (x.num_real) real = min(max(static_cast<i64>(*x.num_real), i64{0}), x.batch);
  const u32 warp = threadIdx.x / 32, warps = gridDim.x * (kThreads / 32), me = warp * gridDim.x + blockIdx.x;
  const u32 each = static_cast<u32>(to.each);
  u32 widest = kThreads / 2;  // step of a search over the rows that there can be
  while (widest > 0 && widest >= x.batch) widest >>= 1;
  for (i64 first = 0; first == 0 || first < real; first += kThreads) {
    const i64 b = first + threadIdx.x;
    const u32 mine = b < real ? static_cast<u32>(min(max(mine_now, i64{0}), x.capacity)) : 0;
    mine_now = count(b + kThreads);
    u32 total;
    u32 sum = warp_sum_before(mine, total);
    if (lane_id() == 0) warp_sum[warp] = total;
    __syncthreads();
    sum += __reduce_add_sync(kFull, lane_id() < warp ? warp_sum[lane_id()] : 0);
    before[threadIdx.x] = sum;
    if (threadIdx.x == kThreads - 1) before[kThreads] = sum + mine;
    __syncthreads();
#pragma unroll 1
    for (int round = 0; round < to.rounds; ++round) {
      const u64 work = static_cast<u64>(before[kThreads]) * each;
      for (u64 start = me; start < work; start += 32ull * warps) {
        const u64 w = start + static_cast<u64>(lane_id()) * warps;
        Way way{};
        if (w < work) {
          const u32 miss = w >> 32 == 0 ? static_cast<u32>(w) / each : static_cast<u32>(w / each);  // (64 bits: hundreds of cycles)
          const u32 stream = round * each + static_cast<u32>(w - static_cast<u64>(miss) * each);
          u32 row = 0;
          for (u32 step = widest; step > 0; step >>= 1)
            if (before[row + step] <= miss) row += step;
          const i64 src = x.src(first + row, miss - before[row]), dst = x.dst(first + row, miss - before[row]);
          if (dst >= 0 && dst < to.device_rows && src >= 0 && src < to.host_rows) way = way_of(to.at[stream], to.paged, src, dst);
        }
        go_ways(to.vec, to.item, way, static_cast<u32>(min(u64{32}, (work - start + warps - 1) / warps)));
      }
      if (x.arrived && first + kThreads >= real) tell(&x.arrived(to.first + round), warps);
    }
    __syncthreads();
  }
}

struct Layers {
  TransferLayer at[kMostStreams];  // rows < 0: unknown
  Integers src_ptrs, dst_ptrs;     // instead, if given
  i64 count;
};

__global__ void __launch_bounds__(kThreads) transfer_kernel(const __grid_constant__ TransferArgs x, const __grid_constant__ Layers layers) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  const u64 warps = gridDim.x * (kThreads / 32), work = static_cast<u64>(x.count) * static_cast<u64>(layers.count);
  for (u64 start = (threadIdx.x / 32) * gridDim.x + blockIdx.x; start < work; start += 32 * warps) {
    const u64 w = start + lane_id() * warps;
    Way way{};
    if (w < work) {
      const i64 i = static_cast<i64>(w / static_cast<u64>(layers.count)), l = static_cast<i64>(w) - i * layers.count;
      const i64 src = x.src(i), dst = x.dst(i);
      TransferLayer layer;
      if (layers.src_ptrs.data)
        layer = {reinterpret_cast<const std::byte*>(layers.src_ptrs(l)), reinterpret_cast<std::byte*>(layers.dst_ptrs(l)), -1, -1};
      else
        layer = layers.at[l];
      const bool inside =
          src >= 0 && dst >= 0 && (layer.src_rows < 0 || src < layer.src_rows) && (layer.dst_rows < 0 || dst < layer.dst_rows);
      if (inside && layer.src != nullptr && layer.dst != nullptr) way = way_between(true, layer.src, 0, src, layer.dst, 0, dst);
    }
    const u64 all = reinterpret_cast<u64>(way.from) | reinterpret_cast<u64>(way.to);
    const int vec = __all_sync(kFull, all % 16 == 0) ? 16 : __all_sync(kFull, all % 8 == 0) ? 8 : 1;
    go_ways(vec, layout::kValueBytes, way, static_cast<u32>(min(u64{32}, (work - start + warps - 1) / warps)));
  }
}

struct ResetArgs {
  Integers requests;  // null: all
  Strided2<std::int32_t> tokens, stamps;
  Integers hints;
  Strided1<std::int32_t> clock;
  i64 count, slots, columns, hot, context;
};

/// Block (x, y): request x, every gridDim.y-th block of its columns.
__global__ void reset_kernel(const __grid_constant__ ResetArgs x) {
  ptx::wait_for_previous();
  const i64 first = blockIdx.y * static_cast<i64>(blockDim.x) + threadIdx.x, step = gridDim.y * static_cast<i64>(blockDim.x);
  for (i64 i = blockIdx.x; i < x.count; i += gridDim.x) {
    const i64 r = x.requests.data ? x.requests(i) : i;
    if (r < 0 || r >= x.slots) continue;
    for (i64 c = first; c < x.columns; c += step) x.tokens(r, c) = -1;
    for (i64 c = first; c < x.hot; c += step) x.stamps(r, c) = 0;
    for (i64 t = first; t < x.context; t += step) x.hints.store(r, t, -1);
    if (first == 0) x.clock(r) = 0;
  }
}

}  // namespace

void run(const ReplayPlanArgs& x, const CopyArgs* followers, std::int64_t num_followers, Stream stream) {
  if (x.batch == 0 && !x.arrived) return;
  for (i64 f = 0; f < num_followers;) {  // as many layers a launch as have rows of one kind
    const int pairs = followers[f].skip_io ? 0 : followers[f].pairs;
    Work to{};
    rows_of(to, followers, num_followers);
    to.first = static_cast<int>(f);
    while (f < num_followers && (!x.arrived || followers[f].pairs == followers[to.first].pairs) &&
           join(to, geometry(followers[f]), f == to.first))
      ++f;
    if (to.count == 0 && !x.arrived) continue;
    to.rounds = x.arrived ? static_cast<int>(f) - to.first : 1;
    to.each = x.arrived ? pairs : to.count;
    specstate::cuda::Launch shape;
    shape.grid = copy_blocks(kReplayBlocks, 1, kReplayBlocks, x.sm_budget);  // how many rows there are, only the GPU knows
    const bool alone = x.sm_budget > 0;
    shape.block = alone ? kAloneThreads : kThreads;
    shape.overlap = !alone || x.batch > 32;
    specstate::cuda::launch(alone ? &replay_kernel<kAloneThreads> : &replay_kernel<kThreads>, shape, stream, x, to);
  }
}
void run(const AwaitFollowerArgs& x, Stream stream) {
  specstate::cuda::Launch shape;
  shape.block = 32;
  shape.overlap = true;
  specstate::cuda::launch(&await_kernel, shape, stream, x.arrived);
}

void run(const TransferArgs& x, const TransferLayer* layers, std::int64_t num_layers, Stream stream) {
  if (x.count == 0) return;
  specstate::cuda::Launch shape;
  shape.block = kThreads;
  shape.overlap = true;
  const auto go = [&](const Layers& l) {
    shape.grid = copy_blocks(x.count * l.count, 64, 64, x.sm_budget);
    specstate::cuda::launch(&transfer_kernel, shape, stream, x, l);
  };
  if (x.src_ptrs.data) {
    Layers l{};
    l.src_ptrs = x.src_ptrs;
    l.dst_ptrs = x.dst_ptrs;
    l.count = x.pointer_layers;
    if (l.count > 0) go(l);
    return;
  }
  for (i64 first = 0; first < num_layers; first += kMostStreams) {
    Layers l{};
    l.count = std::min<i64>(kMostStreams, num_layers - first);
    std::copy_n(layers + first, l.count, l.at);
    go(l);
  }
}

void reset(const SwapState& s, const TensorView& requests, Stream stream) {
  ResetArgs x{};
  const auto table = [](const TensorView& t) { return Strided2<std::int32_t>{t.as<std::int32_t>(), t.strides[0], t.strides[1]}; };
  if (requests.given()) x.requests = {requests.data, requests.strides[0], 0, static_cast<int>(size_of(requests.dtype))};
  x.tokens = table(s.slot_tokens);
  x.stamps = table(s.slot_stamps);
  x.hints = {s.token_slots.data, s.token_slots.strides[0], s.token_slots.strides[1], static_cast<int>(size_of(s.token_slots.dtype))};
  x.clock = {s.clock.as<std::int32_t>(), s.clock.strides[0]};
  x.slots = s.slot_tokens.sizes[0];
  x.count = requests.given() ? requests.sizes[0] : x.slots;
  x.columns = s.slot_tokens.sizes[1];
  x.hot = s.slot_stamps.sizes[1];
  x.context = s.token_slots.sizes[1];
  if (x.count == 0) return;
  specstate::cuda::Launch shape;
  shape.grid = dim3(static_cast<unsigned>(std::min<i64>(x.count, 1024)), static_cast<unsigned>(std::clamp<i64>(x.context / 2048, 1, 32)));
  shape.block = 256;
  shape.overlap = true;
  specstate::cuda::launch(&reset_kernel, shape, stream, x);
}

}  // namespace specstate::hisparse::cuda
