// A long life of the native state on the GPU beside the same on the CPU. A program of its own, so that it runs beside the other tests.
#include "hisparse_gpu.hpp"
#include "specstate/hisparse.hpp"

using namespace specstate;
using namespace specstate::hisparse;
using namespace specstate::gpu_test;

namespace {

/// A million random steps of a small world, all state compared now and then. HISPARSE_SOAK_STEPS sets another number.
TEST(HisparseSoakGpu, AMillionSteps) {
  SPECSTATE_NEEDS_GPU();
  const char* given = std::getenv("HISPARSE_SOAK_STEPS");
  const i64 steps = given ? std::atoll(given) : small() ? 4 : 1000000, every = small() ? 2 : 20000;
  constexpr i64 R = 3, H = 24, P = 4, L = 96, kItem = 48, S = 2, K = 10, kSets = 512;
  Random random(77);
  Pinned host(R * L * kItem);
  Pair<u8> device({R * (H + P), kItem});
  Pair<i64> host_locs({R, L}), ids({kSets, R});
  Pair<i32> tokens({kSets, R, S, K}), lens({kSets, R, S}), out({R, S, K}), real({kSets});
  std::vector<i64> rows(R * L), id(kSets * R);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), random);
  host_locs.set(rows);
  std::vector<i32> t(kSets * R * S * K), n(kSets * R * S), r(kSets);
  for (i64 set = 0; set < kSets; ++set) {
    std::iota(id.begin() + set * R, id.begin() + (set + 1) * R, 0);
    std::shuffle(id.begin() + set * R, id.begin() + (set + 1) * R, random);
    r[at(set)] = static_cast<i32>(random.pick(0, R));
    const i64 first = random.pick(0, L - 1);
    for (i64 i = 0; i < R * S * K; ++i)
      t[at(set * R * S * K + i)] = static_cast<i32>(random.one_in(8) ? random.pick(-2, L + 2) : (first + random.pick(0, 30)) % L);
    for (i64 i = 0; i < R * S; ++i) n[at(set * R * S + i)] = static_cast<i32>(random.pick(L / 2, L));
  }
  tokens.set(t), lens.set(n), ids.set(id), real.set(r);
  const SwapShape shape{R, H, P, L};
  Bytes memory(at(swap_state_bytes(shape)));
  SwapState state[2] = {swap_state_view(shape, memory.host()), swap_state_view(shape, memory.device(), {DeviceType::kCuda, 0})};
  for (i64 i = 0; i < R * (H + P); ++i) state[0].slot_locs.as<i32>()[i] = static_cast<i32>((i * 5) % (R * (H + P)));
  memory.upload();
  for (const SwapState& s : state) reset_swap_state(s);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const OwnStream stream;
  SwapInParams p[2];
  for (const Where where : {Where::kHost, Where::kDevice}) {
    SwapInParams& q = p[where == Where::kDevice];
    q.host_cache_locs = host_locs.view(where), q.buffers.host_cache = host.rows(R * L, kItem, where),
    q.buffers.device_buffer = device.view(where);
    q.state = state[where == Where::kDevice], q.top_k_device_locs = out.view(where);
    if (small()) q.sm_budget = 2;
  }
  for (i64 step = 0; step < steps; ++step) {
    const i64 set = (step * 131 + step / kSets) % kSets;
    for (const Where where : {Where::kHost, Where::kDevice}) {
      SwapInParams& q = p[where == Where::kDevice];
      q.top_k_tokens = tokens.view(where)[set], q.seq_lens = lens.view(where)[set], q.req_pool_indices = ids.view(where)[set];
      q.num_real_reqs = real.view(where)[set];
      swap_in(q, stream);
    }
    if ((step + 1) % every && step + 1 < steps) continue;
    ASSERT_TRUE(stream.synchronize());
    ASSERT_EQ(memory.difference(), "") << "step " << step;
    ASSERT_EQ(device.difference(), "") << "step " << step;
    ASSERT_EQ(out.difference(), "") << "step " << step;
  }
}

}  // namespace
