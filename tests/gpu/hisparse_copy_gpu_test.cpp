// Rows on their way on the GPU as on the CPU: replays of plans, on a side stream too, paged transfers, staging and windows.
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>

#include "hisparse_gpu.hpp"
#include "specstate/hisparse.hpp"
#include "specstate/hisparse_steps.hpp"

using namespace specstate;
using namespace specstate::hisparse;
using namespace specstate::gpu_test;

namespace {

/// Plans of many rows, most of them short or empty, some beyond the real ones.
TEST(HisparseCopyGpu, ReplayOfManyRows) {
  SPECSTATE_NEEDS_GPU();
  Random random(21);
  for (const i64 B : {1, 3, 64, 255, 512, 513, 1100}) {
    if (small() && B > 3) break;
    constexpr i64 M = 4, kItem = 48;
    const i64 rows = B * M;
    Pinned host(rows * kItem);
    Pair<u8> first({rows, kItem}), second({rows, kItem});
    std::vector<i64> from(at(rows));
    std::vector<i32> to(at(rows)), n(at(B));
    for (i64& x : from) x = random.pick(0, rows - 1);
    std::iota(to.begin(), to.end(), 0);
    std::shuffle(to.begin(), to.end(), random);
    for (i32& x : n) x = static_cast<i32>(random.one_in(3) ? random.pick(0, M) : 0);
    Pair<i64> src({B, M}, from);
    Pair<i32> dst({B, M}, to), count({B}, n), real({1}, {static_cast<i32>(random.one_in(2) ? B : random.pick(0, B))});
    const auto call = [&](Where where, Stream stream) {
      KvBuffers layers[2];
      layers[0].host_cache = layers[1].host_cache = host.rows(rows, kItem, where);
      layers[0].device_buffer = first.view(where), layers[1].device_buffer = second.view(where);
      ReplayPlanParams p;
      p.miss_src = src.view(where), p.miss_dst = dst.view(where), p.miss_count = count.view(where), p.num_real_reqs = real.view(where);
      p.followers = layers, p.num_followers = 2, p.sm_budget = B % 3;
      replay_plan(p, stream);
    };
    on_both(call, {&first, &second}, {}, 1);
    ASSERT_FALSE(HasFailure()) << B << " rows";
  }
}

TEST(HisparseCopyGpu, PageableHostMemoryIsRefused) {
  SPECSTATE_NEEDS_GPU();
  std::vector<u8> pageable(1 << 16);
  Pair<u8> pool({64, 16});
  Pair<i64> src({1, 1}, {0});
  Pair<i32> dst({1, 1}, {0}), count({1}, {1});
  ReplayPlanParams p;
  p.miss_src = src.view(Where::kDevice), p.miss_dst = dst.view(Where::kDevice), p.miss_count = count.view(Where::kDevice);
  KvBuffers b;
  b.host_cache = TensorView(pageable.data(), DType::kUInt8, {64, 16});
  b.device_buffer = pool.view(Where::kDevice);
  p.followers = &b, p.num_followers = 1;
  try {
    replay_plan(p);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kValue);
    EXPECT_STREQ(e.what(), "replay_plan: host_cache: expected pinned host memory, got pageable host memory.");
  }
}

/// What the program has pinned afterwards is as good as what was allocated pinned.
TEST(HisparseCopyGpu, RegisteredHostMemoryIsReadInPlace) {
  SPECSTATE_NEEDS_GPU();
  constexpr i64 kRows = 64, kItem = 576, kBytes = kRows * kItem, kPages = (kBytes + 4095) / 4096 * 4096;
  u8* const memory = static_cast<u8*>(std::aligned_alloc(4096, kPages));
  for (i64 i = 0; i < kBytes; ++i) memory[i] = static_cast<u8>(i * 31 + i / 577);
  SPECSTATE_GPU(cudaHostRegister(memory, kPages, cudaHostRegisterDefault));
  Pair<u8> pool({kRows, kItem});
  Pair<i64> src({1, 3}, {63, 0, 17});
  Pair<i32> dst({1, 3}, {2, 40, 5}), count({1}, {3});
  const auto call = [&](Where where, Stream stream) {
    ReplayPlanParams p;
    p.miss_src = src.view(where), p.miss_dst = dst.view(where), p.miss_count = count.view(where);
    KvBuffers b;
    b.host_cache = TensorView(memory, DType::kUInt8, {kRows, kItem}, {DeviceType::kCpu, 0, where == Where::kDevice});
    b.device_buffer = pool.view(where);
    p.followers = &b, p.num_followers = 1;
    replay_plan(p, stream);
  };
  on_both(call, {&pool}, {}, 1);
  SPECSTATE_GPU(cudaHostUnregister(memory));
  std::free(memory);
}

// ------------------------------------------------------------------------------------------------------------- streams

/// The followers' copies on a side stream, ordered by an event; and the same without the event, which the comparison must notice.
void side_stream(bool with_event, bool& same) {
  constexpr i64 kHot = 64, kItem = 576, kLength = 400, kTop = 48;
  Random random(3);
  Pinned host(kLength * kItem);
  Pair<u8> anchor({kHot, kItem}), follower({kHot, kItem});
  Pair<i64> host_locs({1, kLength}), ids({1}, {0}), src({1, kTop}, std::vector<i64>(kTop, 0));
  std::vector<i64> rows(kLength);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), random);
  host_locs.set(rows);
  Pair<i32> tokens({1, 1, kTop}), out({1, 1, kTop}), lens({1, 1}, {kLength}), dst({1, kTop}, std::vector<i32>(kTop, 0)), count({1}, {0});
  std::vector<i32> t(kTop);
  std::iota(t.begin(), t.end(), 100);
  tokens.set(t);
  const SwapShape shape{1, kHot, 0, kLength};
  Bytes memory(at(swap_state_bytes(shape)));
  SwapState state[2] = {swap_state_view(shape, memory.host()), swap_state_view(shape, memory.device(), {DeviceType::kCuda, 0})};
  for (i64 i = 0; i < kHot; ++i) state[0].slot_locs.as<i32>()[i] = static_cast<i32>(kHot - 1 - i);
  memory.upload();
  for (const SwapState& s : state) reset_swap_state(s);
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const OwnStream main, side;
  cudaEvent_t swapped;
  SPECSTATE_GPU(cudaEventCreateWithFlags(&swapped, cudaEventDisableTiming));
  // The main stream is busy for a while before the swap.
  SPECSTATE_GPU(cudaLaunchHostFunc(
      main.native(), [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }, nullptr));
  const auto swap = [&](Where where, Stream stream) {
    SwapInParams p;
    p.top_k_tokens = tokens.view(where), p.seq_lens = lens.view(where), p.req_pool_indices = ids.view(where),
    p.host_cache_locs = host_locs.view(where);
    p.buffers.host_cache = host.rows(kLength, kItem, where), p.buffers.device_buffer = anchor.view(where);
    p.state = state[where == Where::kDevice], p.top_k_device_locs = out.view(where);
    p.plan = {src.view(where), dst.view(where), count.view(where)};
    swap_in(p, stream);
  };
  const auto follow = [&](Where where, Stream stream) {
    ReplayPlanParams p;
    p.miss_src = src.view(where), p.miss_dst = dst.view(where), p.miss_count = count.view(where);
    KvBuffers b;
    b.host_cache = host.rows(kLength, kItem, where), b.device_buffer = follower.view(where);
    p.followers = &b, p.num_followers = 1;
    replay_plan(p, stream);
  };
  swap(Where::kDevice, main);
  if (with_event) {
    SPECSTATE_GPU(cudaEventRecord(swapped, main.native()));
    SPECSTATE_GPU(cudaStreamWaitEvent(side.native(), swapped, 0));
  }
  follow(Where::kDevice, side);
  ASSERT_TRUE(side.synchronize());
  ASSERT_TRUE(main.synchronize());
  swap(Where::kHost, {});
  follow(Where::kHost, {});
  EXPECT_EQ(anchor.difference(), "");
  same = follower.difference().empty();
  cudaEventDestroy(swapped);
}

TEST(HisparseCopyGpu, FollowersOnASideStream) {
  SPECSTATE_NEEDS_GPU();
  bool same = false;
  side_stream(true, same);
  EXPECT_TRUE(same);
  side_stream(false, same);
  EXPECT_FALSE(same) << "the comparison does not notice a follower that ran before its plan was there";
}

/// One replay on a side stream for all followers, each awaited by itself on the main stream, which then reads its rows.
TEST(HisparseCopyGpu, FollowersAreAwaitedOneByOne) {
  SPECSTATE_NEEDS_GPU();
  Random random(8);
  const OwnStream main, side;
  cudaEvent_t begun;
  SPECSTATE_GPU(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
  constexpr i64 kLayers = 3, M = 5;
  for (const i64 B : {0, 3, 40, 1030}) {
    if (small() && B > 3) break;
    for (const bool skip : {false, true})
      for (const bool two : {false, true}) {
        if (skip && (two || B != 3)) continue;
        const i64 rows = std::max<i64>(B * M, 1), item = two ? 64 : 576;
        Pinned host(rows * item);
        std::vector<std::unique_ptr<Pair<u8>>> pools, seen;
        for (i64 i = 0; i < (two ? 2 : 1) * kLayers; ++i)
          for (auto* list : {&pools, &seen}) list->push_back(std::make_unique<Pair<u8>>(std::initializer_list<i64>{rows, item}));
        Pair<i64> src({std::max<i64>(B, 1), M});
        Pair<i32> dst({std::max<i64>(B, 1), M}), count({std::max<i64>(B, 1)}), real({1}), arrived({2 * kLayers}, {0, -7, 0, -7, 0, -7});
        for (int round = 0; round < (small() ? 2 : 3); ++round) {
          std::vector<i64> from(src.size() / 8);
          std::vector<i32> to(dst.size() / 4), n(count.size() / 4);
          for (i64& x : from) x = random.pick(0, rows - 1);
          std::iota(to.begin(), to.end(), 0);
          std::shuffle(to.begin(), to.end(), random);
          for (i32& x : to) x = x < rows ? x : -1;
          for (i32& x : n) x = static_cast<i32>(random.pick(0, M));
          src.set(from), dst.set(to), count.set(n), real.set({static_cast<i32>(random.one_in(2) ? B : random.pick(0, B))});
          const auto replay = [&](Where where, Stream stream) {
            KvBuffers layers[kLayers];
            for (i64 l = 0; l < kLayers; ++l) {
              layers[l].host_cache = host.rows(rows, item, where), layers[l].device_buffer = pools[at(l)]->view(where);
              if (two)
                layers[l].host_cache_v = host.rows(rows, item, where), layers[l].device_buffer_v = pools[at(kLayers + l)]->view(where);
            }
            ReplayPlanParams p;
            const auto first = [&](TensorView t) {
              t.sizes[0] = B;
              return t;
            };
            p.miss_src = first(src.view(where)), p.miss_dst = first(dst.view(where)), p.miss_count = first(count.view(where));
            p.num_real_reqs = real.view(where), p.followers = layers, p.num_followers = kLayers, p.skip_io = skip,
            p.sm_budget = 4 * (round % 2);
            p.arrived = arrived.view(where), p.arrived.sizes[0] = kLayers, p.arrived.strides[0] = 2;
            replay_plan(p, stream);
          };
          const auto follow = [&](Where where, i64 l, Stream stream) {
            AwaitFollowerParams p;
            p.arrived = arrived.view(where), p.arrived.sizes[0] = kLayers, p.arrived.strides[0] = 2, p.follower = l;
            await_follower(p, stream);
            for (i64 i = l; i < static_cast<i64>(pools.size()); i += kLayers) {
              const TensorView t = pools[at(i)]->view(where), u = seen[at(i)]->view(where);
              if (where == Where::kHost)
                std::memcpy(u.data, t.data, pools[at(i)]->size());
              else
                SPECSTATE_GPU(cudaMemcpyAsync(u.data, t.data, pools[at(i)]->size(), cudaMemcpyDeviceToDevice, main.native()));
            }
          };
          SPECSTATE_GPU(cudaEventRecord(begun, main.native()));
          SPECSTATE_GPU(cudaStreamWaitEvent(side.native(), begun, 0));
          if (!small() && round == 1 && B == 40)  // the main stream has to wait for long
            SPECSTATE_GPU(cudaLaunchHostFunc(
                side.native(), [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }, nullptr));
          replay(Where::kDevice, side);
          for (i64 l = 0; l < kLayers; ++l) follow(Where::kDevice, l, main);
          ASSERT_TRUE(main.synchronize());
          ASSERT_TRUE(side.synchronize());
          replay(Where::kHost, {});
          for (i64 l = 0; l < kLayers; ++l) follow(Where::kHost, l, {});
          for (const auto& list : {&pools, &seen})
            for (const auto& pool : *list) ASSERT_EQ(pool->difference(), "") << B << " rows, round " << round;
          ASSERT_EQ(arrived.difference(), "");
        }
      }
  }
  cudaEventDestroy(begun);
}

// ------------------------------------------------------------------------------------------------------------ transfers

TEST(HisparseCopyGpu, PagedTransfersBothWays) {
  SPECSTATE_NEEDS_GPU();
  Random random(5);
  constexpr i64 kLayers = 3, kHostPages = 7, kDevicePages = 5;
  std::vector<std::unique_ptr<Pinned>> host;
  std::vector<std::unique_ptr<Pair<u8>>> device;
  for (i64 l = 0; l < kLayers; ++l) {
    host.push_back(std::make_unique<Pinned>(kHostPages * kPage, static_cast<unsigned>(l)));
    device.push_back(std::make_unique<Pair<u8>>(std::initializer_list<i64>{kDevicePages * kPage}));
    for (std::size_t i = 0; i < device.back()->size(); ++i) static_cast<u8*>(device.back()->host())[i] = static_cast<u8>(random() >> 3);
    device.back()->upload();
  }
  for (int round = 0; round < (small() ? 4 : 20); ++round) {
    const i64 n = random.pick(0, small() ? 40 : 300);
    std::vector<i64> from(at(n)), to(at(kDevicePages * 64));
    for (i64& x : from) x = random.pick(0, kHostPages * 64 - 1);
    std::iota(to.begin(), to.end(), 0);
    std::shuffle(to.begin(), to.end(), random);
    to.resize(at(n));
    Pair<i64> src({n}), dst({n});
    if (n > 0) src.set(from), dst.set(to);
    const auto call = [&](Where where, bool pointers) {
      std::vector<TensorView> a, b;
      Pair<i64> pa({kLayers}), pb({kLayers});
      for (i64 l = 0; l < kLayers; ++l) {
        a.emplace_back(host[at(l)]->data(), DType::kUInt8, std::initializer_list<i64>{kHostPages * kPage},
                       Device{DeviceType::kCpu, 0, where == Where::kDevice});
        b.push_back(device[at(l)]->view(where));
        pa.values()[l] = reinterpret_cast<i64>(a.back().data), pb.values()[l] = reinterpret_cast<i64>(b.back().data);
      }
      pa.upload(), pb.upload();
      if (pointers) {
        TransferPagedPointersParams p;
        p.src_ptrs = pa.view(where), p.dst_ptrs = pb.view(where), p.src_indices = src.view(where), p.dst_indices = dst.view(where);
        transfer_paged_pointers(p);
        cudaDeviceSynchronize();
      } else {
        TransferPagedParams p;
        p.src = a.data(), p.dst = b.data(), p.num_layers = kLayers, p.src_indices = src.view(where), p.dst_indices = dst.view(where);
        p.sm_budget = round % 3;
        transfer_paged(p);
      }
    };
    call(Where::kHost, round % 2);
    call(Where::kDevice, round % 2);
    SPECSTATE_GPU(cudaDeviceSynchronize());
    const Seen seen({device[0].get(), device[1].get(), device[2].get()});
    for (auto& d : device) ASSERT_EQ(seen.difference(*d), "") << "round " << round;
  }
  // Device to host: a backup.
  Pair<i64> src({3}, {5, 64, 200}), dst({3}, {1, 130, 63});
  std::vector<TensorView> a{device[0]->view(Where::kDevice)},
      b{TensorView(host[0]->data(), DType::kUInt8, {kHostPages * kPage}, {DeviceType::kCpu, 0, true})};
  std::vector<u8> want(host[0]->data(), host[0]->data() + kHostPages * kPage);
  std::vector<TensorView> ca{device[0]->view(Where::kHost)}, cb{TensorView(want.data(), DType::kUInt8, {kHostPages * kPage})};
  for (const Where where : {Where::kHost, Where::kDevice}) {
    TransferPagedParams p;
    p.src = where == Where::kHost ? ca.data() : a.data(), p.dst = where == Where::kHost ? cb.data() : b.data(), p.num_layers = 1;
    p.src_indices = src.view(where), p.dst_indices = dst.view(where);
    transfer_paged(p);
  }
  SPECSTATE_GPU(cudaDeviceSynchronize());
  EXPECT_EQ(std::memcmp(want.data(), host[0]->data(), want.size()), 0);
}

// ------------------------------------------------------------------------------------------------- staging, windows

/// Several groups of layers with rows of different sizes; windows are opened and accepted, lengths and counts live on the GPU only.
void window_world(unsigned seed, int rounds) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed * 77 + 3);
  const i64 R = random.pick(1, 5), H = random.pick(1, 30), P = random.pick(1, 8), L = random.pick(P + 4, 80), W = H + P,
            G = random.pick(1, 3);
  const bool paged = random.one_in(4);
  i64 host_rows = R * (L + 8) + 5, device_rows = R * W + 3;
  if (paged) host_rows = (host_rows + 63) / 64 * 64, device_rows = (device_rows + 63) / 64 * 64;
  std::vector<std::unique_ptr<Pinned>> host;          // of the GPU
  std::vector<std::unique_ptr<Bytes>> plain, device;  // host rows of the CPU; device rows of both
  std::vector<std::vector<KvBuffers>> layers[2];
  std::vector<WindowGroup> groups[2];
  std::vector<i32> rows(at(device_rows));
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), random);
  Pair<i32> locs({R, W}, std::vector<i32>(rows.begin(), rows.begin() + R * W));
  if (random.one_in(3)) locs.values()[random.pick(0, R - 1) * W + random.pick(0, H - 1)] = -1, locs.upload();
  std::vector<const Bytes*> all{&locs};
  struct Group {
    std::unique_ptr<Pair<i32>> tokens, stamps, clock, hints;
  };
  std::vector<Group> own;
  for (i64 g = 0; g < G; ++g) {
    Group x;
    x.tokens = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, W}, std::vector<i32>(at(R * W), -1));
    for (i64 i = 0; i < R * W; ++i)
      if (i % W < H && random.one_in(3)) x.tokens->values()[i] = static_cast<i32>(random.pick(0, L - 1));
    x.tokens->upload();
    x.stamps = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, H}, std::vector<i32>(at(R * H), 3));
    x.clock = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R}, std::vector<i32>(at(R), 9));
    x.hints = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, L}, std::vector<i32>(at(R * L), -1));
    for (Bytes* b : std::initializer_list<Bytes*>{x.tokens.get(), x.stamps.get(), x.clock.get(), x.hints.get()}) all.push_back(b);
    own.push_back(std::move(x));
    const i64 n = random.pick(1, 3);
    for (int where = 0; where < 2; ++where) layers[where].emplace_back();
    for (i64 l = 0; l < n; ++l) {
      const bool two = !paged && random.one_in(3);
      const i64 item = paged ? 584 : std::vector<i64>{16, 576, 1152, 24, 3}[random() % 5];
      KvBuffers b[2];
      for (int pair = 0; pair < 1 + two; ++pair) {
        const i64 hb = paged ? host_rows / 64 * kPage : host_rows * item, db = paged ? device_rows / 64 * kPage : device_rows * item;
        host.push_back(std::make_unique<Pinned>(hb, seed + static_cast<unsigned>(host.size())));
        plain.push_back(std::make_unique<Bytes>(at(hb)));
        std::memcpy(plain.back()->host(), host.back()->data(), at(hb));
        device.push_back(std::make_unique<Bytes>(at(db)));
        for (i64 i = 0; i < db; ++i) static_cast<u8*>(device.back()->host())[i] = static_cast<u8>(random() >> 5);
        device.back()->upload();
        all.push_back(device.back().get());
        for (int where = 0; where < 2; ++where) {
          void *h = where ? static_cast<void*>(host.back()->data()) : plain.back()->host(),
               *d = where ? device.back()->device() : device.back()->host();
          const Device cpu{DeviceType::kCpu, 0, where == 1}, dev{where ? DeviceType::kCuda : DeviceType::kCpu, 0};
          const TensorView hv = paged ? TensorView(h, DType::kUInt8, {hb}, cpu) : TensorView(h, DType::kUInt8, {host_rows, item}, cpu);
          const TensorView dv = paged ? TensorView(d, DType::kUInt8, {db}, dev) : TensorView(d, DType::kUInt8, {device_rows, item}, dev);
          (pair ? b[where].host_cache_v : b[where].host_cache) = hv;
          (pair ? b[where].device_buffer_v : b[where].device_buffer) = dv;
        }
      }
      for (int where = 0; where < 2; ++where) layers[where].back().push_back(b[where]);
    }
  }
  for (int where = 0; where < 2; ++where)
    for (i64 g = 0; g < G; ++g) {
      const Where w = where ? Where::kDevice : Where::kHost;
      const Group& x = own[at(g)];
      groups[where].push_back({{x.tokens->view(w), locs.view(w), x.stamps->view(w), x.hints->view(w), x.clock->view(w)},
                               layers[where][at(g)].data(),
                               static_cast<i64>(layers[where][at(g)].size())});
    }
  const i64 page = random.pick(1, 7), pages = (L + page - 1) / page;
  std::vector<i64> reserved(at(host_rows / page));
  std::iota(reserved.begin(), reserved.end(), 0);
  std::shuffle(reserved.begin(), reserved.end(), random);
  reserved.resize(at(R * pages));
  Pair<i64> reserve({R, pages}, reserved), committed({R, L}, std::vector<i64>(at(R * L), -1));
  Pair<i32> lengths({R}, std::vector<i32>(at(R), 0));
  for (Bytes* b : std::initializer_list<Bytes*>{&committed, &lengths}) all.push_back(b);
  const i64 B = R + 1;  // the last row is padding at least
  Pair<i64> requests({B});
  Pair<i32> width({B}), taken({B}), real({1}), out({B, P});
  all.push_back(&out);
  const auto same = [&](const char* when, int which) {
    const Seen seen(all);
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(seen.difference(*all[i]), "") << "array " << i << ", " << when << ' ' << which;
    for (std::size_t i = 0; i < host.size(); ++i)
      ASSERT_EQ(std::memcmp(host[i]->data(), plain[i]->host(), plain[i]->size()), 0) << "host pool " << i << ", " << when << ' ' << which;
  };
  const OwnStream stream;
  const i64 budget = random.one_in(2) ? 0 : random.pick(1, 9);
  const auto step = [&](Where where, Stream to) {
    const int i = where == Where::kDevice;
    OpenWindowParams open;
    open.groups = groups[i].data(), open.num_groups = G, open.requests = requests.view(where), open.widths = width.view(where);
    open.num_real_reqs = real.view(where), open.lengths = lengths.view(where), open.locs = out.view(where);
    open_window(open, to);
    AcceptWindowParams p;
    p.groups = groups[i].data(), p.num_groups = G, p.layout = paged ? RowLayout::kDsv4Paged : RowLayout::kLinear;
    p.requests = open.requests, p.widths = open.widths, p.accepted = taken.view(where), p.num_real_reqs = open.num_real_reqs;
    p.lengths = open.lengths, p.reserved_rows = reserve.view(where), p.page_size = page, p.host_cache_locs = committed.view(where);
    p.sm_budget = budget;
    accept_window(p, to);
  };
  std::unique_ptr<Captured> graph;
  for (int round = 0; round < rounds; ++round) {
    std::vector<i64> ids(at(R));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    const i64 n = random.pick(0, R);
    std::vector<i32> widths(at(B), 99), accepted(at(B), 99);
    for (i64 b = 0; b < n; ++b) {
      widths[at(b)] = static_cast<i32>(random.pick(0, std::min(P, L - lengths.values()[ids[at(b)]])));
      accepted[at(b)] = static_cast<i32>(random.pick(0, widths[at(b)]));
    }
    ids.push_back(-5);
    requests.set(ids), width.set(widths), taken.set(accepted), real.set({static_cast<i32>(n)});
    if (round == 0) {
      step(Where::kDevice, stream);
      graph = std::make_unique<Captured>(stream, [&](Stream to) { step(Where::kDevice, to); });
    } else {
      ASSERT_TRUE(graph->launch());
    }
    step(Where::kHost, {});
    ASSERT_NO_FATAL_FAILURE(same("round", round));
  }
  // A row whose request, length, width or count is none is left alone; its neighbour is served. The last: one request twice.
  const i64 n = std::min<i64>(R, 2);
  for (int fault = 0; fault < 4; ++fault) {
    std::vector<i64> ids(at(B), 0);
    std::vector<i32> widths(at(B), 0), accepted(at(B), 0);
    if (fault == 0) ids[0] = R + 7;
    if (fault == 1) widths[0] = static_cast<i32>(P + 1);
    if (fault == 2) accepted[0] = 1;
    if (n == 2) ids[1] = fault == 3 ? 0 : 1;
    requests.set(ids), width.set(widths), taken.set(accepted), real.set({static_cast<i32>(n)});
    std::fill_n(out.values(), B * P, -1);
    ASSERT_TRUE(graph->launch());
    ASSERT_NO_FATAL_FAILURE(same("fault", fault));
  }
  // Rows by index, any direction: to the host, back, inside the device buffer; in all layers of a group that have rows of one size.
  std::vector<TensorView> hosts[2], devices[2];
  for (int i = 0; i < 2; ++i)
    for (const KvBuffers& b : layers[i][0])
      if (b.host_cache.sizes[b.host_cache.ndim - 1] == layers[i][0][0].host_cache.sizes[b.host_cache.ndim - 1])
        hosts[i].push_back(b.host_cache), devices[i].push_back(b.device_buffer);
  for (int direction = 0; direction < 3; ++direction) {
    const i64 most = direction == 0 ? host_rows : device_rows, sources = direction == 1 ? host_rows : device_rows;
    const i64 count = random.pick(0, direction == 2 ? device_rows / 2 : std::min<i64>(most, 60)), budget = random.pick(0, 3);
    std::vector<i32> from(at(count)), to(at(most));
    std::iota(to.begin(), to.end(), 0);
    std::shuffle(to.begin(), to.end(), random);
    for (i64 i = 0; i < count; ++i)
      from[at(i)] = direction == 2 ? to[to.size() - 1 - at(i)] : static_cast<i32>(random.pick(-1, sources - 1));
    to.resize(at(count));
    Pair<i32> src({count}), dst({count});
    if (count > 0) src.set(from), dst.set(to);
    for (const Where where : {Where::kHost, Where::kDevice}) {
      const int i = where == Where::kDevice;
      CopyRowsParams p;
      p.src = direction == 1 ? hosts[i].data() : devices[i].data(), p.dst = direction == 0 ? hosts[i].data() : devices[i].data();
      p.num_layers = static_cast<i64>(hosts[i].size()), p.layout = paged ? RowLayout::kDsv4Paged : RowLayout::kLinear;
      p.src_rows = src.view(where), p.dst_rows = dst.view(where), p.sm_budget = budget;
      copy_rows(p, stream);
    }
    ASSERT_NO_FATAL_FAILURE(same("direction", direction));
  }
}

/// Two requests with one and two positions to accept, each array on both sides.
struct SmallWindow {
  static constexpr i64 R = 2, H = 4, P = 2, L = 8, W = H + P, kItem = 8, kHostRows = 16, kDeviceRows = 12;
  Pair<i32> tokens, locs, stamps, clock, hints, lengths, widths, taken, narrow;
  Pair<i64> requests, pages, committed;
  Pair<u8> device;
  Pinned host{kHostRows * kItem, 5};
  KvBuffers layer[2];
  WindowGroup group[2];

  SmallWindow()
      : tokens({R, W}, std::vector<i32>(R * W, -1)),
        locs({R, W}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}),
        stamps({R, H}, std::vector<i32>(R * H, 3)),
        clock({R}, {9, 9}),
        hints({R, L}, std::vector<i32>(R * L, -1)),
        lengths({R}, {0, 0}),
        widths({R}, {1, 2}),
        taken({R}, {1, 2}),
        narrow({R, L}, std::vector<i32>(R * L, -1)),
        requests({R}, {0, 1}),
        pages({R, L}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}),
        committed({R, L}, std::vector<i64>(R * L, -1)),
        device({kDeviceRows, kItem}) {
    std::iota(device.values(), device.values() + kDeviceRows * kItem, u8{1});
    device.upload();
  }
  std::vector<Bytes*> arrays() {
    return {&tokens, &locs, &stamps, &clock, &hints, &lengths, &widths, &taken, &narrow, &requests, &pages, &committed, &device};
  }
  AcceptWindowParams params(Where w) {
    const int i = w == Where::kDevice;
    layer[i] = {host.rows(kHostRows, kItem, w), device.view(w), {}, {}};
    group[i] = {{tokens.view(w), locs.view(w), stamps.view(w), hints.view(w), clock.view(w)}, &layer[i], 1};
    AcceptWindowParams p;
    p.groups = &group[i], p.num_groups = 1, p.requests = requests.view(w), p.widths = widths.view(w), p.accepted = taken.view(w);
    p.lengths = lengths.view(w), p.reserved_rows = pages.view(w), p.page_size = 1, p.host_cache_locs = committed.view(w);
    return p;
  }
};

/// What the host can see is refused with the CPU's text, before anything is written.
TEST(HisparseCopyGpu, WindowsAreRefusedAsOnTheCpu) {
  SPECSTATE_NEEDS_GPU();
  SmallWindow x;
  std::vector<std::vector<u8>> before;
  for (Bytes* b : x.arrays()) before.emplace_back(static_cast<u8*>(b->host()), static_cast<u8*>(b->host()) + b->size());
  const std::vector<u8> rows(x.host.data(), x.host.data() + SmallWindow::kHostRows * SmallWindow::kItem);
  const auto refused = [&](const std::string& expected, const std::function<void(AcceptWindowParams&, WindowGroup&)>& change) {
    for (const Where where : {Where::kHost, Where::kDevice}) {
      AcceptWindowParams p = x.params(where);
      change(p, x.group[where == Where::kDevice]);
      std::string text = "no error";
      try {
        accept_window(p);
      } catch (const Error& e) {
        text = e.what();
      }
      EXPECT_EQ(text, "accept_window: " + expected) << (where == Where::kHost ? "on the CPU" : "on a GPU");
    }
    int i = 0;
    for (Bytes* b : x.arrays()) {
      EXPECT_EQ(b->difference(), "") << "array " << i << ", " << expected;
      EXPECT_EQ(std::memcmp(b->host(), before[at(i)].data(), b->size()), 0) << "array " << i << ", " << expected;
      ++i;
    }
    EXPECT_EQ(std::memcmp(x.host.data(), rows.data(), rows.size()), 0) << expected;
  };
  using P = AcceptWindowParams;
  using G = WindowGroup;
  refused("groups: expected 1 entries, got a null pointer.", [](P& p, G&) { p.groups = nullptr; });
  refused("num_groups: expected 1 or more, got 0.", [](P& p, G&) { p.num_groups = 0; });
  refused("num_groups: expected 0 or more, got -1.", [](P& p, G&) { p.num_groups = -1; });
  refused("groups[0].layers: expected 1 entries, got a null pointer.", [](P&, G& g) { g.layers = nullptr; });
  refused("groups[0].num_layers: expected 0 or more, got -1.", [](P&, G& g) { g.num_layers = -1; });
  refused("layout: expected kLinear (0) or kDsv4Paged (1), got 7.", [](P& p, G&) { p.layout = static_cast<RowLayout>(7); });
  refused("page_size: expected >= 1, got 0.", [](P& p, G&) { p.page_size = 0; });
  refused("sm_budget: expected 0 (any number) or more SMs, got -1.", [](P& p, G&) { p.sm_budget = -1; });
  refused("lengths: expected a data pointer that is a multiple of 4 bytes, got remainder 2.",
          [](P& p, G&) { p.lengths.data = static_cast<u8*>(p.lengths.data) + 2; });
  refused("lengths: expected memory for shape (2,), got a null pointer.", [](P& p, G&) { p.lengths.data = nullptr; });
  refused("groups[0].state.clock: expected memory for shape (2,), got a null pointer.", [](P&, G& g) { g.state.clock.data = nullptr; });
  refused("layers[0].host_cache: expected memory for shape (16, 8), got a null pointer.",
          [&](P&, G& g) { x.layer[g.layers == &x.layer[1]].host_cache.data = nullptr; });
  refused("layers[0].device_buffer: expected sizes of 0 or more, got shape (-1, 8).",
          [&](P&, G& g) { x.layer[g.layers == &x.layer[1]].device_buffer.sizes[0] = -1; });
  refused("layers[0].host_cache: expected elements and bytes that 64 bits can count, got shape (4611686018427387904, 8).",
          [&](P&, G& g) { x.layer[g.layers == &x.layer[1]].host_cache.sizes[0] = i64{1} << 62; });
  refused("lengths: expected elements that do not share memory, got stride 0 for shape (2,).", [](P& p, G&) { p.lengths.strides[0] = 0; });
  refused("host_cache_locs: expected memory of its own, got memory that overlaps requests.",
          [](P& p, G&) { p.requests.data = static_cast<u8*>(p.host_cache_locs.data) + 8; });
}

/// Pages whose rows 64 bits cannot name, rows beyond the pool, and rows beyond what the table of committed rows can hold: such a position does not stand, its
/// neighbours do.
TEST(HisparseCopyGpu, RowsThatNobodyHasDoNotStand) {
  SPECSTATE_NEEDS_GPU();
  struct Case {
    i64 page_size, entry, row;  // of request 0; -1: none
    bool layers, wide;
  };
  constexpr i64 kBit = 1;
  const Case cases[] = {
      {4, kBit << 62, -1, true, true},
      {4, (kBit << 62) + 1, -1, true, true},
      {4, kBit << 61, -1, true, true},
      {4, INT64_MAX, -1, true, true},
      {4, INT64_MIN, -1, true, true},
      {4, -1, -1, true, true},
      {4, 4, -1, true, true},
      {4, 3, 12, true, true},
      {4, 3, 12, true, false},
      {INT64_MAX, 1, -1, true, true},
      {1, (kBit << 32) + 3, -1, true, false},
      {1, kBit << 31, -1, false, false},
      {1, (kBit << 32) + 3, -1, false, false},
      {1, INT32_MAX, INT32_MAX, false, false},
      {1, kBit << 40, kBit << 40, false, true},
      {4, INT64_MAX / 4, -1, false, true},
      {4, INT64_MAX / 4 - 1, (INT64_MAX / 4 - 1) * 4, false, true},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << "pages of " << c.page_size << ", entry " << c.entry << (c.layers ? "" : ", no layers")
                                      << (c.wide ? "" : ", int32"));
    SmallWindow x;
    std::vector<i64> entries(SmallWindow::R * SmallWindow::L, 2);  // of pages; one row a page: rows 2 and 3 of request 1
    entries[SmallWindow::L] = 2, entries[SmallWindow::L + 1] = 3;
    const i64 columns = std::max<i64>(1, (SmallWindow::L + std::min<i64>(c.page_size, 8) - 1) / std::min<i64>(c.page_size, 8));
    const i64 base = c.page_size == 1 ? 2 : c.page_size == 4 ? 8 : 0;  // row of position 0 of request 1
    if (c.page_size == INT64_MAX) entries.assign(entries.size(), 0);
    entries[0] = c.entry;
    x.pages.set(entries);
    AcceptWindowParams p = x.params(Where::kDevice);
    p.page_size = c.page_size, p.reserved_rows.sizes[1] = columns;
    if (!c.wide) p.host_cache_locs = x.narrow.view(Where::kDevice);
    if (!c.layers) x.group[1].num_layers = 0;
    std::vector<u8> rows(x.host.data(), x.host.data() + SmallWindow::kHostRows * SmallWindow::kItem);
    const auto* const tails = static_cast<const u8*>(x.device.host());
    const auto brought = [&](i64 host_row, i64 r, i64 position) {  // as the call should do
      if (c.layers) std::memcpy(&rows[at(host_row * 8)], tails + 8 * (r * SmallWindow::W + SmallWindow::H + position), 8);
      const i64 to = r * SmallWindow::L + position;
      c.wide ? static_cast<void>(x.committed.values()[to] = host_row)
             : static_cast<void>(x.narrow.values()[to] = static_cast<i32>(host_row));
      x.tokens.values()[r * SmallWindow::W + position] = static_cast<i32>(position);
      x.stamps.values()[r * SmallWindow::H + position] = 2 * 9 + 1,
                                             x.hints.values()[r * SmallWindow::L + position] = static_cast<i32>(position);
    };
    const std::vector<u8> pool(tails, tails + x.device.size());
    accept_window(p);
    SPECSTATE_GPU(cudaDeviceSynchronize());
    if (c.row >= 0) brought(c.row, 0, 0);
    brought(base, 1, 0), brought(base + 1, 1, 1);
    if (c.layers)  // rows that move into the slots of their own numbers
      for (const auto& [r, position] : {std::pair{i64{0}, i64{0}}, {1, 0}, {1, 1}})
        if (r == 1 || c.row >= 0)
          std::memcpy(static_cast<u8*>(x.device.host()) + 8 * (r * SmallWindow::W + position),
                      &pool[at(8 * (r * SmallWindow::W + SmallWindow::H + position))], 8);
    x.lengths.values()[0] = 1, x.lengths.values()[1] = 2;
    int i = 0;
    for (Bytes* b : x.arrays()) EXPECT_EQ(b->difference(), "") << "array " << i++;
    EXPECT_EQ(std::memcmp(x.host.data(), rows.data(), rows.size()), 0);
  }
}

TEST(HisparseCopyGpu, WindowsAndStagingEqualTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 2u : 30u) && !HasFailure(); ++seed) window_world(seed, small() ? 4 : 8);
}

}  // namespace
