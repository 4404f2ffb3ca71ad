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
  Pinned host((host_rows + 2) * item);  // followers have caches that begin some rows later
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
      const bool followed = random.one_in(2);
      const i64 layers = random.one_in(3) ? 9 : 2;  // 9 are more pairs than a swap brings itself
      for (const Where where : {Where::kDevice, Where::kHost}) {
        std::vector<KvBuffers> followers(at(layers));
        for (i64 i = 0; i < layers; ++i) {
          KvBuffers& f = followers[at(i)];
          f.host_cache = host.rows(host_rows, item, where), f.device_buffer = follower[i % 2].view(where);
          f.host_cache.data = static_cast<u8*>(f.host_cache.data) + (1 + i % 2) * item;
        }
        SwapInParams p;
        p.top_k_tokens = tokens.view(where), p.seq_lens = lens.view(where), p.req_pool_indices = ids.view(where);
        p.host_cache_locs = host_locs.view(where), p.buffers.host_cache = host.rows(host_rows, item, where),
        p.buffers.device_buffer = device.view(where);
        p.state = state[where == Where::kDevice], p.top_k_device_locs = out.view(where), p.unique_misses = misses.view(where);
        if (followed) {
          p.plan = {miss_src.view(where), miss_dst.view(where), miss_count.view(where)};
          p.followers = followers.data(), p.num_followers = layers;
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

/// Pools of 576-byte rows, more than 2^32 bytes on either side. Nothing is zeroed or filled but what `fill` is given.
struct LargePools {
  static constexpr i64 kItem = 576, kRows = (i64{1} << 32) / kItem + 1000, kBytes = kRows * kItem, kPages = kBytes / kPage;
  u8 *host = nullptr, *device = nullptr;
  KvBuffers linear, paged;

  LargePools() {
    EXPECT_EQ(cudaMallocHost(&host, kBytes), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&device, kBytes), cudaSuccess);
    const Device pinned{DeviceType::kCpu, 0, true}, gpu{DeviceType::kCuda, 0};
    linear.host_cache = TensorView(host, DType::kUInt8, {kRows, kItem}, pinned);
    linear.device_buffer = TensorView(device, DType::kUInt8, {kRows, kItem}, gpu);
    paged.host_cache = TensorView(host, DType::kUInt8, {kPages * kPage}, pinned);
    paged.device_buffer = TensorView(device, DType::kUInt8, {kPages * kPage}, gpu);
  }
  LargePools(const LargePools&) = delete;
  ~LargePools() { cudaFree(device), cudaFreeHost(host); }
  /// Of a DSv4 row only the values: they lie as far apart as the pools are large.
  static i64 offset(i64 row, bool pages = false) { return pages ? row / 64 * kPage + row % 64 * kItem : row * kItem; }
  void fill(i64 row, bool pages = false) const {
    for (i64 j = 0; j < kItem; ++j) host[offset(row, pages) + j] = static_cast<u8>(row * 7 + row / 251 + j + pages);
  }
  std::vector<u8> on_device(i64 row, bool pages = false) const {
    std::vector<u8> bytes(kItem);
    EXPECT_EQ(cudaMemcpy(bytes.data(), device + offset(row, pages), kItem, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }
  std::vector<u8> on_host(i64 row, bool pages = false) const { return {host + offset(row, pages), host + offset(row, pages) + kItem}; }
};

/// Rows beyond 2^31 / 576 and bytes beyond 2^32, through every operation that addresses them.
TEST(HisparseSizesGpu, LargePools) {
  SPECSTATE_NEEDS_GPU();
  if (small()) GTEST_SKIP() << "needs-time: four gigabytes under a sanitizer";
  constexpr Where kOn = Where::kDevice;
  constexpr i64 kRows = LargePools::kRows, kMiddle = (i64{1} << 31) / LargePools::kItem;
  const LargePools pools;
  ASSERT_TRUE(pools.host && pools.device);
  const std::vector<i64> src{0, kMiddle + 5, kRows - 1, kRows - 777};
  const std::vector<i32> dst{static_cast<i32>(kRows - 1), 3, static_cast<i32>(kMiddle + 1), static_cast<i32>(kRows - 500)};
  for (const i64 r : src) pools.fill(r);

  Pair<i64> s({1, 4}, src);
  Pair<i32> d({1, 4}, dst), n({1}, {4});
  ReplayPlanParams p;
  p.miss_src = s.view(kOn), p.miss_dst = d.view(kOn), p.miss_count = n.view(kOn);
  p.followers = &pools.linear, p.num_followers = 1;
  replay_plan(p);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(pools.on_device(dst[i]), pools.on_host(src[i])) << i;

  // A swap of each kind, two positions of 16, four places.
  constexpr i64 L = 16, H = 4;
  std::vector<i64> locs(L, src[0]);
  locs[2] = src[1], locs[9] = src[3];
  std::vector<i32> places(dst);
  places.push_back(41);  // of the tail
  Pair<i64> host_locs({1, L}, locs), ids({1}, {0});
  Pair<i32> tokens({1, 1, 2}, {9, 2}), lens({1, 1}, {L}), slot_locs({1, H + 1}, places);
  const auto served = [&](const char* what, const std::function<void(TensorView out)>& swap) {
    for (const i32 place : dst) SPECSTATE_GPU(cudaMemset(pools.device + LargePools::offset(place), 0xEE, LargePools::kItem));
    Pair<i32> out({1, 1, 2});
    swap(out.view(kOn));
    SPECSTATE_GPU(cudaDeviceSynchronize());
    const auto bytes = out.download();
    const i32* const at_places = reinterpret_cast<const i32*>(bytes.data());
    for (const int i : {0, 1}) {
      ASSERT_TRUE(std::count(dst.begin(), dst.end(), at_places[i])) << what << ": " << at_places[i];
      EXPECT_EQ(pools.on_device(at_places[i]), pools.on_host(src[i == 0 ? 3 : 1])) << what << ", " << i;
    }
    EXPECT_NE(at_places[0], at_places[1]) << what;
  };
  const SwapShape shape{1, H, 0, L};
  Bytes memory(at(swap_state_bytes(shape)));
  SwapState cpu = swap_state_view(shape, memory.host()), state = swap_state_view(shape, memory.device(), {DeviceType::kCuda, 0});
  std::memcpy(cpu.slot_locs.data, dst.data(), 16);
  memory.upload();
  reset_swap_state(state);
  served("swap_in", [&](TensorView out) {
    SwapInParams q;
    q.top_k_tokens = tokens.view(kOn), q.seq_lens = lens.view(kOn), q.req_pool_indices = ids.view(kOn),
    q.host_cache_locs = host_locs.view(kOn);
    q.buffers = pools.linear, q.state = state, q.top_k_device_locs = out;
    swap_in(q);
  });
  const auto flat = [](TensorView v) {
    v.ndim = 2, v.sizes[1] = v.sizes[2], v.strides[1] = 1;
    return v;
  };
  Pair<i32> held({1, H + 1}, std::vector<i32>(H + 1, -1));
  Pair<i16> order({1, H}, {0, 1, 2, 3});
  served("swap_in_single", [&](TensorView out) {
    SwapInSingleParams q;
    q.top_k_tokens = flat(tokens.view(kOn)), q.seq_lens = lens.view(kOn), q.seq_lens.ndim = 1, q.req_pool_indices = ids.view(kOn);
    q.host_cache_locs = host_locs.view(kOn), q.buffers = pools.linear, q.top_k_device_locs = flat(out);
    q.device_buffer_tokens = held.view(kOn), q.device_buffer_locs = slot_locs.view(kOn), q.lru_slots = order.view(kOn);
    swap_in_single(q);
  });
  held.upload();
  Pair<i64> index({1, 2, 2 * H}, std::vector<i64>(4 * H, -1));
  Pair<i32> policy({2, H}, std::vector<i32>(2 * H, 0)), scratch({1, 2}, {7, 8}), counters({2, 10}, std::vector<i32>(20, 0)), real({1}, {1});
  served("swap_in_spec", [&](TensorView out) {
    SpecSwapParams q;
    q.top_k_tokens = tokens.view(kOn), q.seq_lens = lens.view(kOn), q.seq_lens.ndim = 1, q.req_pool_indices = ids.view(kOn);
    q.num_real_reqs = real.view(kOn), q.host_cache_locs = host_locs.view(kOn), q.buffers = pools.linear, q.top_k_device_locs = out;
    q.device_buffer_tokens = held.view(kOn), q.device_buffer_locs = slot_locs.view(kOn);
    q.cache_index = index.view(kOn), q.cache_policy = policy.view(kOn), q.scratch_locs = scratch.view(kOn),
    q.scratch_state = counters.view(kOn);
    q.limits = SpecSwapParams::Limits::kNone;
    swap_in_spec(q);
  });

  // Rows by index to the host and back.
  Pair<i64> from({2}, {dst[2], dst[3]}), to({2}, {kRows - 2, 7}), back({2}, {11, kRows - 3});
  const std::vector<u8> went[2] = {pools.on_device(dst[2]), pools.on_device(dst[3])};
  for (const bool up : {true, false}) {
    CopyRowsParams c;
    c.src = up ? &pools.linear.device_buffer : &pools.linear.host_cache,
    c.dst = up ? &pools.linear.host_cache : &pools.linear.device_buffer;
    c.num_layers = 1, c.src_rows = (up ? from : to).view(kOn), c.dst_rows = (up ? to : back).view(kOn);
    copy_rows(c);
  }
  SPECSTATE_GPU(cudaDeviceSynchronize());
  for (const int i : {0, 1}) {
    EXPECT_EQ(pools.on_device(back.values()[i]), went[i]) << i;
    EXPECT_EQ(pools.on_host(to.values()[i]), went[i]) << i;
  }

  // A window whose device rows and reserved host rows lie far out.
  constexpr i64 P = 2;
  const SwapShape window{1, H, P, L};
  Bytes block(at(swap_state_bytes(window)));
  const SwapState before = swap_state_view(window, block.host());
  reset_swap_state(before);
  const std::vector<i32> rows{1, 2, 4, 5, static_cast<i32>(kMiddle + 9), static_cast<i32>(kRows - 11)};
  std::memcpy(before.slot_locs.data, rows.data(), rows.size() * 4);
  block.upload();
  const WindowGroup group{swap_state_view(window, block.device(), {DeviceType::kCuda, 0}), &pools.linear, 1};
  Pair<i32> widths({1}, {P}), lengths({1}, {H}), opened({1, P});  // beyond the hot slots: nothing moves
  Pair<i64> reserved({1, L}, std::vector<i64>(L, -1)), committed({1, L}, std::vector<i64>(L, -1));
  reserved.values()[H] = kMiddle + 77, reserved.values()[H + 1] = kRows - 5;
  reserved.upload();
  OpenWindowParams open;
  open.groups = &group, open.num_groups = 1, open.requests = ids.view(kOn), open.widths = widths.view(kOn),
  open.lengths = lengths.view(kOn);
  open.locs = opened.view(kOn);
  open_window(open);
  const auto tail = opened.download();
  std::vector<std::vector<u8>> written;
  for (i64 i = 0; i < P; ++i) {
    const i32 place = reinterpret_cast<const i32*>(tail.data())[i];
    ASSERT_TRUE(place == rows[4] || place == rows[5]) << place;
    written.emplace_back(LargePools::kItem, static_cast<u8>(0x31 + i));
    SPECSTATE_GPU(cudaMemcpy(pools.device + LargePools::offset(place), written.back().data(), LargePools::kItem, cudaMemcpyHostToDevice));
  }
  AcceptWindowParams accept;
  accept.groups = &group, accept.num_groups = 1, accept.requests = open.requests, accept.widths = open.widths,
  accept.accepted = widths.view(kOn);
  accept.lengths = open.lengths, accept.reserved_rows = reserved.view(kOn), accept.host_cache_locs = committed.view(kOn);
  accept_window(accept);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  for (i64 i = 0; i < P; ++i) EXPECT_EQ(pools.on_host(reserved.values()[H + i]), written[at(i)]) << i;

  // DSv4 pages.
  constexpr i64 kPagedRows = LargePools::kPages * 64;
  Pair<i64> there({2}, {kPagedRows - 1, kPagedRows / 2 + 70}), here({2}, {kPagedRows / 2 + 3, kPagedRows - 130});
  for (const int i : {0, 1}) pools.fill(there.values()[i], true);
  TransferPagedParams t;
  t.src = &pools.paged.host_cache, t.dst = &pools.paged.device_buffer, t.num_layers = 1, t.src_indices = there.view(kOn),
  t.dst_indices = here.view(kOn);
  transfer_paged(t);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  for (const int i : {0, 1}) EXPECT_EQ(pools.on_device(here.values()[i], true), pools.on_host(there.values()[i], true)) << i;
}

}  // namespace
