// Swaps of every size on the GPU equal the CPU's: many requests, every row missing, clusters of every size, the largest calls and pools.
#include "hisparse_gpu.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/hisparse_steps.hpp"

using namespace specstate;
using namespace specstate::hisparse;
using namespace specstate::gpu_test;

namespace {

// -------------------------------------------------------------------------------------------------------------- sizes

enum class Asked {
  kMixed,     // three of four tokens among the first ones, the others anywhere
  kNew,       // nothing that was asked for before, each token once: with steps * top_k = hot the whole hot buffer is replaced
  kRepeated,  // the same new tokens in every step, each time in another order
  kFew,       // a window of verify: most tokens occur in most steps, one of a hundred is another one
};

/// sglang's published shape at `requests` requests, against the CPU.
void published_shape(i64 requests, i64 steps, i64 top_k, i64 hot, i64 item, int calls, Asked asked = Asked::kMixed) {
  SCOPED_TRACE(::testing::Message() << requests << " requests, hot " << hot << ", " << steps << " x " << top_k);
  Random random(9);
  const i64 L = 3 * hot, W = hot + 64, host_rows = 4096;
  Pinned host(host_rows * item);
  Pair<u8> device({requests * W, item}), follower[2] = {Pair<u8>({requests * W, item}), Pair<u8>({requests * W, item})};
  Pair<i64> host_locs({requests, L}), ids({requests}), miss_src({requests, steps * top_k});
  Pair<i32> miss_dst({requests, steps * top_k}), miss_count({requests});
  Pair<i32> tokens({requests, steps, top_k}), out({requests, steps, top_k}), lens({requests, steps}), misses({requests});
  std::vector<i64> rows(at(requests * L)), all(at(requests));
  for (i64& r : rows) r = random.pick(0, host_rows - 1);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  host_locs.set(rows), ids.set(all), lens.set(std::vector<i32>(at(requests * steps), static_cast<i32>(L)));
  std::vector<i32> locs(at(requests * W));
  std::iota(locs.begin(), locs.end(), 0);
  std::shuffle(locs.begin(), locs.end(), random);
  const SwapShape shape{requests, hot, 64, L};
  Bytes memory(at(swap_state_bytes(shape)));
  SwapState state[2] = {swap_state_view(shape, memory.host()), swap_state_view(shape, memory.device(), {DeviceType::kCuda, 0})};
  std::memcpy(state[0].slot_locs.data, locs.data(), locs.size() * 4);
  memory.upload();
  reset_swap_state(state[0]);
  reset_swap_state(state[1]);
  for (int call = 0; call < calls; ++call) {
    std::vector<i32> t(at(requests * steps * top_k));
    const bool few = asked == Asked::kFew;
    for (i32& x : t) x = static_cast<i32>(random.one_in(few ? 100 : 4) ? random.pick(0, L - 1) : random.pick(0, few ? hot / 2 : hot));
    const i64 fresh = asked == Asked::kNew ? steps * top_k : asked == Asked::kRepeated ? top_k : 0;
    for (i64 begin = 0; fresh > 0 && begin < requests * steps * top_k; begin += fresh) {
      const auto first = t.begin() + begin;
      std::iota(first, first + fresh, static_cast<i32>(call * fresh));
      std::shuffle(first, first + fresh, random);
    }
    tokens.set(t);
    for (int turn = 0; turn < (few ? 2 : 1); ++turn) {  // the second misses nothing
      const bool followed = random.one_in(2);           // followers begin while the swap is at work
      for (const Where where : {Where::kDevice, Where::kHost}) {
        std::vector<KvBuffers> followers(2);
        for (int i = 0; i < 2; ++i)
          followers[at(i)].host_cache = host.rows(host_rows, item, where), followers[at(i)].device_buffer = follower[i].view(where);
        SwapInParams p;
        p.top_k_tokens = tokens.view(where), p.seq_lens = lens.view(where), p.req_pool_indices = ids.view(where);
        p.host_cache_locs = host_locs.view(where), p.buffers.host_cache = host.rows(host_rows, item, where),
        p.buffers.device_buffer = device.view(where);
        p.state = state[where == Where::kDevice], p.top_k_device_locs = out.view(where), p.unique_misses = misses.view(where);
        if (followed) {
          p.plan = {miss_src.view(where), miss_dst.view(where), miss_count.view(where)};
          p.followers = followers.data(), p.num_followers = 2;
        }
        swap_in(p);
      }
      const std::vector<const Bytes*> all{&out, &misses, &device, &memory, &miss_count, &follower[0], &follower[1]};
      const Seen seen(all);
      for (const Bytes* b : all) ASSERT_EQ(seen.difference(*b), "") << call << "." << turn;
    }
  }
}

TEST(HisparseSizesGpu, ManyRequestsAndTheLargestCalls) {
  SPECSTATE_NEEDS_GPU();
  if (small()) return published_shape(3, 4, 64, 128, 576, 1);
  published_shape(256, 4, 256, 512, 64, 3);
  published_shape(40, 4, 2048, 4096, 576, 2);
  published_shape(2, 32, 2048, 16384, 64, 2);  // 65536 occurrences
  published_shape(1, 8, 8192, 65536, 16, 2);   // tables that no shared memory holds
  published_shape(2, 65536, 1, 5000, 16, 2);
}

TEST(HisparseSizesGpu, EveryRowMissing) {
  SPECSTATE_NEEDS_GPU();
  for (const Asked asked : {Asked::kNew, Asked::kRepeated}) {
    if (small()) {
      published_shape(2, 2, 64, 128, 576, 1, asked);
      continue;
    }
    for (const i64 requests : {1, 8, 20, 40}) published_shape(requests, 2, 2048, 4096, 576, 3, asked);
    published_shape(3, 8, 1024, 8192, 1152, 3, asked);
    published_shape(2, 4, 333, 1400, 640, 3, asked);
  }
}

/// A batch row has 16, 8, 6, 4, 3, 2 or 1 CTAs, as many as fit for all.
TEST(HisparseSizesGpu, ClustersOfEverySize) {
  SPECSTATE_NEEDS_GPU();
  if (small()) return published_shape(3, 8, 64, 128, 576, 1, Asked::kFew);
  for (const i64 requests : {5, 12, 18, 26, 32, 64, 70}) published_shape(requests, 8, 2048, 4096, 576, 2, Asked::kFew);
  published_shape(18, 3, 2000, 4096, 1152, 2, Asked::kFew);
  published_shape(35, 4, 2047, 4096, 576, 2, Asked::kFew);
  published_shape(66, 8, 2048, 4096, 576, 2, Asked::kMixed);
}

/// Pools of more than 2^31 bytes, and rows beyond 2^31 / 576.
TEST(HisparseSizesGpu, LargePools) {
  SPECSTATE_NEEDS_GPU();
  if (small()) GTEST_SKIP() << "needs-time: four gigabytes under a sanitizer";
  constexpr i64 kItem = 576, kRows = (i64{1} << 32) / kItem + 1000;
  void *host = nullptr, *device = nullptr;
  SPECSTATE_GPU(cudaMallocHost(&host, kRows * kItem));
  SPECSTATE_GPU(cudaMalloc(&device, kRows * kItem));
  const std::vector<i64> src{0, (i64{1} << 31) / kItem + 5, kRows - 1, kRows - 777};
  const std::vector<i32> dst{static_cast<i32>(kRows - 1), 3, static_cast<i32>((i64{1} << 31) / kItem + 1), static_cast<i32>(kRows - 500)};
  for (i64 r : src)
    for (i64 j = 0; j < kItem; ++j) static_cast<u8*>(host)[r * kItem + j] = static_cast<u8>(r * 7 + j);
  Pair<i64> s({1, 4}, src);
  Pair<i32> d({1, 4}, dst), n({1}, {4});
  ReplayPlanParams p;
  p.miss_src = s.view(Where::kDevice), p.miss_dst = d.view(Where::kDevice), p.miss_count = n.view(Where::kDevice);
  KvBuffers b;
  b.host_cache = TensorView(host, DType::kUInt8, {kRows, kItem}, {DeviceType::kCpu, 0, true});
  b.device_buffer = TensorView(device, DType::kUInt8, {kRows, kItem}, {DeviceType::kCuda, 0});
  p.followers = &b, p.num_followers = 1;
  replay_plan(p);
  std::vector<u8> row(kItem);
  for (int i = 0; i < 4; ++i) {
    SPECSTATE_GPU(cudaMemcpy(row.data(), static_cast<u8*>(device) + dst[at(i)] * kItem, kItem, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(row.data(), static_cast<u8*>(host) + src[at(i)] * kItem, kItem), 0) << i;
  }
  // A swap with such rows on both sides.
  const SwapShape shape{1, 4, 0, 16};
  Bytes memory(at(swap_state_bytes(shape)));
  SwapState cpu = swap_state_view(shape, memory.host()), state = swap_state_view(shape, memory.device(), {DeviceType::kCuda, 0});
  std::memcpy(cpu.slot_locs.data, dst.data(), 16);
  memory.upload();
  reset_swap_state(state);
  std::vector<i64> locs(16, kRows - 1);
  locs[2] = src[1], locs[9] = src[3];
  Pair<i64> host_locs({1, 16}, locs), ids({1}, {0});
  Pair<i32> tokens({1, 1, 2}, {9, 2}), lens({1, 1}, {16}), out({1, 1, 2});
  SwapInParams q;
  q.top_k_tokens = tokens.view(Where::kDevice), q.seq_lens = lens.view(Where::kDevice), q.req_pool_indices = ids.view(Where::kDevice);
  q.host_cache_locs = host_locs.view(Where::kDevice), q.buffers = b, q.state = state, q.top_k_device_locs = out.view(Where::kDevice);
  swap_in(q);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const std::vector<i32> want{dst[0], dst[1]};
  std::memcpy(out.host(), want.data(), 8);
  EXPECT_EQ(out.difference(), "");
  for (int i = 0; i < 2; ++i) {
    SPECSTATE_GPU(cudaMemcpy(row.data(), static_cast<u8*>(device) + dst[at(i)] * kItem, kItem, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(row.data(), static_cast<u8*>(host) + src[i == 0 ? 3 : 1] * kItem, kItem), 0) << i;
  }
  // Rows by index to the host and back.
  Pair<i64> from({2}, {dst[2], dst[3]}), to({2}, {kRows - 2, 7}), back({2}, {11, kRows - 3});
  for (const bool up : {true, false}) {
    CopyRowsParams c;
    c.src = up ? &b.device_buffer : &b.host_cache, c.dst = up ? &b.host_cache : &b.device_buffer, c.num_layers = 1;
    c.src_rows = (up ? from : to).view(Where::kDevice), c.dst_rows = (up ? to : back).view(Where::kDevice);
    copy_rows(c);
  }
  SPECSTATE_GPU(cudaDeviceSynchronize());
  for (int i = 0; i < 2; ++i) {
    const u8* const want = static_cast<u8*>(host) + src[at(2 + i)] * kItem;
    SPECSTATE_GPU(cudaMemcpy(row.data(), static_cast<u8*>(device) + back.values()[i] * kItem, kItem, cudaMemcpyDeviceToHost));
    EXPECT_EQ(std::memcmp(row.data(), want, kItem), 0) << i;
    EXPECT_EQ(std::memcmp(static_cast<u8*>(host) + to.values()[i] * kItem, want, kItem), 0) << i;
  }
  cudaFree(device);
  cudaFreeHost(host);
}

}  // namespace
