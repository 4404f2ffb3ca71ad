// HiSparse on the GPU equals the CPU, to the last byte of every table and pool, call after call on states that live on.
#include "hisparse_gpu.hpp"

#include <chrono>
#include <thread>

#include "specstate/hisparse.hpp"
#include "specstate/hisparse_steps.hpp"

using namespace specstate;
using namespace specstate::hisparse;
using namespace specstate::gpu_test;

namespace {

/// What all swaps share: pools, host rows, tables of R requests whose rows lie scattered.
struct World {
  Random random;
  i64 R, H, P, L, C, item;
  bool paged, two;
  i64 host_rows, device_rows;
  std::vector<std::unique_ptr<Pinned>> host;
  std::vector<std::unique_ptr<Pair<u8>>> device;
  std::unique_ptr<Pair<i64>> host_locs;
  std::unique_ptr<Pair<i32>> slot_tokens, slot_locs, scratch;
  std::vector<std::pair<const char*, Bytes*>> arrays;  // that must be equal after a call

  /// `requests`: how many, 0: a few; `hot` slots, 0: as many as fall.
  World(unsigned seed, bool large, bool native, bool single, i64 requests = 0, i64 hot = 0)
      : random(seed * 2654435761u + 17), R(random.pick(1, large ? 6 : 5)), H(large ? random.pick(300, 4200) : random.pick(1, 80)) {
    if (requests > 0) R = requests;
    if (hot > 0) H = hot;
    P = single ? random.pick(1, 6) : random.pick(0, large ? 70 : 6);
    if (single && seed % 2 == 0) H = (H + 7) / 8 * 8, P = 8;  // tables that bulk copies can take
    L = large ? random.pick(H + 100, 20000) : random.pick(4, 200);
    C = single ? 0 : random.pick(0, 1) * random.pick(0, large ? 500 : 40);
    if (!native && !single) H = std::max(H, R);
    constexpr i64 kItems[] = {16, 512, 576, 656, 1152, 1600, 2048, 4096, 1, 3, 8, 20, 584, 132, 24, 1000};
    item = kItems[random() % (large ? 8 : 16)];
    paged = (native || single) && random.one_in(5);
    two = !paged && (native || single) && random.one_in(3);
    if (paged) item = 584;
    host_rows = R * L + 3;
    device_rows = R * (H + P + C) + 2;
    if (paged) host_rows = (host_rows + 63) / 64 * 64, device_rows = (device_rows + 63) / 64 * 64;
    for (int i = 0; i < 1 + two; ++i) {
      host.push_back(std::make_unique<Pinned>(bytes(host_rows), seed + static_cast<unsigned>(i)));
      device.push_back(std::make_unique<Pair<u8>>(std::initializer_list<i64>{bytes(device_rows)}));
      fill(*device.back());
      arrays.emplace_back(i ? "device_buffer_v" : "device_buffer", device.back().get());
    }
    host_locs = std::make_unique<Pair<i64>>(std::initializer_list<i64>{R, L});
    std::vector<i64> places(at(host_rows));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random);
    places.resize(at(R * L));
    for (i64& h : places)
      if (random.one_in(16)) h = -1;
    host_locs->set(places);
    const i64 W = H + P;
    slot_tokens = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, W}, std::vector<i32>(at(R * W), -1));
    slot_locs = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, W});
    scratch = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, C});
    std::vector<i32> rows(at(device_rows));
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), random);
    std::vector<i32> slots(rows.begin(), rows.begin() + R * W), spare(rows.begin() + R * W, rows.begin() + R * (W + C));
    if (!single)
      for (i32& s : slots)
        if (random.one_in(16)) s = -1;
    for (i32& s : spare)
      if (random.one_in(8)) s = -1;
    slot_locs->set(slots);
    if (C > 0) scratch->set(spare);
    arrays.emplace_back("slot_tokens", slot_tokens.get());
    arrays.emplace_back("slot_locs", slot_locs.get());
  }
  i64 bytes(i64 rows) const { return paged ? rows / 64 * kPage : rows * item; }
  void fill(Pair<u8>& pool) {
    for (std::size_t i = 0; i < pool.size(); ++i) static_cast<u8*>(pool.host())[i] = static_cast<u8>(random() >> 9);
    pool.upload();
  }
  TensorView pool(Pair<u8>& p, Where where) const {
    TensorView v = p.view(where);
    if (paged) return v;
    v.ndim = 2, v.sizes[0] = v.sizes[0] / item, v.sizes[1] = item, v.strides[0] = item, v.strides[1] = 1;
    return v;
  }
  TensorView host_pool(int i, Where where) const {
    return paged ? TensorView(host[at(i)]->data(), DType::kUInt8, {bytes(host_rows)}, {DeviceType::kCpu, 0, where == Where::kDevice})
                 : host[at(i)]->rows(host_rows, item, where);
  }
  KvBuffers buffers(Where where) {
    KvBuffers b;
    b.host_cache = host_pool(0, where);
    b.device_buffer = pool(*device[0], where);
    if (two) b.host_cache_v = host_pool(1, where), b.device_buffer_v = pool(*device[1], where);
    return b;
  }
  RowLayout layout() const { return paged ? RowLayout::kDsv4Paged : RowLayout::kLinear; }
};

/// The arrays of one call, of a shape that stays so that a captured graph can be replayed with other contents.
struct Selection {
  i64 B, real, S, K;
  Pair<i32> tokens, out, miss_dst, miss_count, num_real, misses, hits, lens32;
  Pair<i64> miss_src, requests, lens;
  bool plan;
  Selection(i64 B, i64 S, i64 K, bool plan)
      : B(B),
        real(B),
        S(S),
        K(K),
        tokens({B, S, K}),
        out({B, S, K}),
        miss_dst({B, S * K}),
        miss_count({B}),
        num_real({1}),
        misses({B}),
        hits({B}),
        lens32({B * S}),
        miss_src({B, S * K}),
        requests({B}),
        lens({B, S}),
        plan(plan) {}

  void draw(World& w, bool inside_lens) {
    Random& random = w.random;
    real = std::min<i64>(random.pick(0, B), w.R);
    if (!random.one_in(4)) real = std::min(B, w.R);
    std::vector<i64> ids(at(w.R)), n(at(B * S));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(at(B));
    for (i64 b = real; b < B; ++b) ids[at(b)] = random.pick(-9, 9);
    requests.set(ids);
    num_real.set({static_cast<i32>(real)});
    const bool late = random.one_in(2);
    for (i64& x : n) x = late ? w.L - random.pick(0, 3) : random.pick(inside_lens ? 1 : -2, w.L);
    lens.set(n);
    lens32.set(std::vector<i32>(n.begin(), n.end()));
    std::vector<i32> t(at(B * S * K));
    const i64 mode = random.pick(0, 3), first = random.pick(0, w.L - 1), focus = random.pick(1, w.L);
    for (i32& x : t)
      x = static_cast<i32>(mode == 0 || random.one_in(10) ? random.pick(-3, w.L + 3)
                                                          : (first + random.pick(0, std::max<i64>(1, focus / (mode == 1 ? 8 : 1)))) % w.L);
    tokens.set(t);
    for (Bytes* b : std::initializer_list<Bytes*>{&out, &miss_dst, &miss_count, &misses, &hits, &miss_src}) {
      std::memset(b->host(), Bytes::kPoison, b->size());
      b->upload();
    }
    // What the caller does between calls: tail columns get tokens, hot slots are emptied.
    i32* slots = w.slot_tokens->values();
    for (i64 b = 0; b < real; ++b) {
      const i64 row = ids[at(b)] * (w.H + w.P);
      for (int i = 0; i < 3; ++i)
        if (w.P > 0 && random.one_in(2))
          slots[row + w.H + random.pick(0, w.P - 1)] = static_cast<i32>(random.pick(std::max<i64>(-1, w.L - w.P - 3), w.L));
      if (random.one_in(3)) slots[row + random.pick(0, w.H - 1)] = -1;
    }
    w.slot_tokens->upload();
  }
  MissPlan plan_view(Where where) {
    return plan ? MissPlan{miss_src.view(where), miss_dst.view(where), miss_count.view(where)} : MissPlan{};
  }
  std::string difference(const World& w, bool counts) {
    for (const auto& [name, array] : w.arrays)
      if (const std::string d = array->difference(); !d.empty()) return std::string(name) + ": " + d;
    if (const std::string d = out.difference(); !d.empty()) return "out: " + d;
    if (counts) {
      if (const std::string d = misses.difference(); !d.empty()) return "unique_misses: " + d;
      if (const std::string d = hits.difference(); !d.empty()) return "unique_hits: " + d;
    }
    if (!plan) return {};
    if (const std::string d = miss_count.difference(); !d.empty()) return "miss_count: " + d;
    const auto src = miss_src.download(), dst = miss_dst.download();  // beyond the count a plan is unspecified
    for (i64 b = 0; b < real; ++b) {
      const i64 n = miss_count.values()[b], from = b * S * K;
      if (std::memcmp(src.data() + from * 8, miss_src.values() + from, at(n * 8)) != 0) return "miss_src of row " + std::to_string(b);
      if (std::memcmp(dst.data() + from * 4, miss_dst.values() + from, at(n * 4)) != 0) return "miss_dst of row " + std::to_string(b);
    }
    return {};
  }
};

/// One shape after another on a state that lives on; each is called once, captured, and replayed with other contents.
template <class Call>
::testing::AssertionResult run_shapes(World& w, Selection& s, int replays, bool inside_lens, bool counts, Call&& call) {
  const OwnStream stream;
  s.draw(w, inside_lens);
  const auto check = [&](const char* how) -> ::testing::AssertionResult {
    if (const auto done = stream.synchronize(); !done) return done;
    const std::string d = s.difference(w, counts);
    if (d.empty()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << how << ": " << d << " (R " << w.R << ", H " << w.H << ", P " << w.P << ", L " << w.L << ", C "
                                         << w.C << ", item " << w.item << ", paged " << w.paged << ", two " << w.two << ", B " << s.B
                                         << ", S " << s.S << ", K " << s.K << ")";
  };
  call(Where::kHost, Stream{});
  call(Where::kDevice, stream);
  if (const auto same = check("plain call"); !same) return same;
  if (replays == 0) return ::testing::AssertionSuccess();
  const Captured graph(stream, [&](Stream to) { call(Where::kDevice, to); });
  for (int i = 0; i < replays; ++i) {
    s.draw(w, inside_lens);
    call(Where::kHost, Stream{});
    if (const auto done = graph.replay(); !done) return done;
    if (const auto same = check("replay"); !same) return same;
  }
  return ::testing::AssertionSuccess();
}

// ------------------------------------------------------------------------------------------------------ the native state

struct NativeState {
  bool narrow;
  Pair<i32> stamps, clock, hints32;
  Pair<i16> hints16;
  explicit NativeState(World& w)
      : narrow(!w.random.one_in(3)), stamps({w.R, w.H}), clock({w.R}), hints32({w.R, narrow ? 1 : w.L}), hints16({w.R, narrow ? w.L : 1}) {
    w.arrays.emplace_back("slot_stamps", &stamps);
    w.arrays.emplace_back("clock", &clock);
    w.arrays.emplace_back("token_slots", narrow ? static_cast<Bytes*>(&hints16) : &hints32);
  }
  SwapState view(World& w, Where where) {
    SwapState s;
    s.slot_tokens = w.slot_tokens->view(where), s.slot_locs = w.slot_locs->view(where);
    s.slot_stamps = stamps.view(where), s.clock = clock.view(where);
    s.token_slots = narrow ? hints16.view(where) : hints32.view(where);
    return s;
  }
};

void native_world(unsigned seed, bool large, int shapes, int replays) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", large " << large);
  World w(seed, large, true, false);
  NativeState state(w);
  {
    const OwnStream stream;
    reset_swap_state(state.view(w, Where::kHost));
    reset_swap_state(state.view(w, Where::kDevice), {}, stream);
    ASSERT_TRUE(stream.synchronize());
    for (const auto& [name, array] : w.arrays) ASSERT_EQ(array->difference(), "") << name << " after reset";
  }
  if (seed % 7 == 0) {  // the clock restarts in mid-life
    for (i64 r = 0; r < w.R; ++r) state.clock.values()[r] = static_cast<i32>((1 << 30) - 1 - w.random.pick(0, 3));
    state.clock.upload();
  }
  for (int i = 0; i < shapes; ++i) {
    Selection s(w.random.pick(1, w.R + 2), w.random.pick(1, large ? 5 : 8), large ? w.random.pick(100, 2048) : w.random.pick(1, 40),
                !w.random.one_in(4));
    const bool wide = w.random.one_in(2), skip = w.random.one_in(8);
    ASSERT_TRUE(run_shapes(w, s, replays, false, true, [&](Where where, Stream stream) {
      SwapInParams p;
      p.top_k_tokens = s.tokens.view(where);
      p.seq_lens = s.lens.view(where);
      if (!wide) {
        p.seq_lens = s.lens32.view(where);
        p.seq_lens.ndim = 2, p.seq_lens.sizes[0] = s.B, p.seq_lens.sizes[1] = s.S, p.seq_lens.strides[0] = s.S, p.seq_lens.strides[1] = 1;
      }
      p.req_pool_indices = s.requests.view(where), p.num_real_reqs = s.num_real.view(where);
      p.host_cache_locs = w.host_locs->view(where), p.buffers = w.buffers(where), p.layout = w.layout();
      p.state = state.view(w, where), p.scratch_locs = w.scratch->view(where);
      p.top_k_device_locs = s.out.view(where), p.plan = s.plan_view(where);
      p.unique_misses = s.misses.view(where), p.unique_hits = s.hits.view(where);
      p.skip_io = skip, p.sm_budget = i % 4;
      swap_in(p, stream);
    }));
  }
  if (w.R > 1) {                                                                             // one request starts anew
    Pair<i32> one({2}, {static_cast<i32>(w.R - 1), seed % 2 ? -4 : static_cast<i32>(w.R)});  // ids outside are ignored on the GPU
    Pair<i32> valid({1}, {static_cast<i32>(w.R - 1)});
    reset_swap_state(state.view(w, Where::kHost), valid.view(Where::kHost));
    reset_swap_state(state.view(w, Where::kDevice), one.view(Where::kDevice));
    SPECSTATE_GPU(cudaDeviceSynchronize());
    for (const auto& [name, array] : w.arrays) ASSERT_EQ(array->difference(), "") << name << " after the reset of one request";
  }
}

TEST(HisparseGpu, NativeSwapEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 2u : 150u) && !HasFailure(); ++seed)
    native_world(seed, false, small() ? 3 : 5, small() ? 1 : 4);
  for (unsigned seed = 1; seed <= (small() ? 0u : 5u) && !HasFailure(); ++seed) native_world(1000 + seed, true, 2, 3);
}

// ------------------------------------------------------------------------------------------------------- sglang's state

void sglang_world(unsigned seed, bool large, int shapes, int replays) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", large " << large);
  World w(seed, large, false, false);
  i64 Z = 1;
  while (Z < 2 * w.H) Z *= 2;
  const i64 most = large ? 5 * 2048 : 8 * 40, columns = 5 * most + 4 * w.R + (5 * most + 4 * w.R) % 2;
  Pair<i64> index({w.R, 2, Z}, std::vector<i64>(at(w.R * 2 * Z), -1));
  Pair<i32> policy({w.R + 1, w.H}, std::vector<i32>(at((w.R + 1) * w.H), 0));
  Pair<i32> counters({w.R + 1, columns}, std::vector<i32>(at((w.R + 1) * columns), 0));
  if (seed % 3 == 0) {  // after a prefill: slot t holds token t, and the index does not know
    for (i64 r = 0; r < w.R; ++r)
      for (i64 s = 0; s < std::min(w.H, w.L); ++s) w.slot_tokens->values()[r * (w.H + w.P) + s] = static_cast<i32>(s);
    w.slot_tokens->upload();
  }
  if (seed % 5 == 0) {  // foreign content
    for (i64 i = 0; i < w.R * 2 * Z; ++i)
      index.values()[i] = static_cast<i64>(w.random()) << 32 | (w.random() % static_cast<unsigned>(w.L));
    index.upload();
  }
  if (seed % 4 == 0) {  // epochs wrap
    int bits = 0;
    while ((i64{1} << bits) < w.H) ++bits;
    const int epoch_bits = std::min(23, 32 - bits);
    for (i64 r = 0; r < w.R; ++r)
      policy.values()[r] = static_cast<i32>(((1u << epoch_bits) - 3) << bits | static_cast<unsigned>(w.random.pick(0, w.H - 1)));
    policy.upload();
  }
  w.arrays.emplace_back("cache_policy", &policy);
  w.arrays.emplace_back("scratch_state", &counters);
  for (int i = 0; i < shapes; ++i) {
    Selection s(w.random.pick(1, w.R + 2), w.random.pick(1, large ? 5 : 8), large ? w.random.pick(100, 2048) : w.random.pick(1, 40),
                !w.random.one_in(4));
    ASSERT_TRUE(run_shapes(w, s, replays, false, false, [&](Where where, Stream stream) {
      SpecSwapParams p;
      p.top_k_tokens = s.tokens.view(where), p.seq_lens = s.lens32.view(where);
      p.req_pool_indices = s.requests.view(where), p.num_real_reqs = s.num_real.view(where);
      p.host_cache_locs = w.host_locs->view(where), p.buffers = w.buffers(where);
      p.device_buffer_tokens = w.slot_tokens->view(where), p.device_buffer_locs = w.slot_locs->view(where);
      p.cache_index = index.view(where), p.cache_policy = policy.view(where);
      p.scratch_locs = w.scratch->view(where), p.scratch_state = counters.view(where);
      p.top_k_device_locs = s.out.view(where), p.plan = s.plan_view(where);
      p.limits = SpecSwapParams::Limits::kNone, p.sm_budget = i % 4;
      swap_in_spec(p, stream);
    }));
    // The index is not a result (displacements have no order on a GPU), but sglang's kernel must find in it whatever was loaded.
    if (seed % 3 == 0 || seed % 5 == 0) continue;
    const auto bytes = index.download();
    const i64* entries = reinterpret_cast<const i64*>(bytes.data());
    for (i64 r = 0; r < w.R; ++r)
      for (i64 slot = 0; slot < w.H; ++slot) {
        const i32 t = w.slot_tokens->values()[r * (w.H + w.P) + slot];
        if (t < 0) continue;
        const i64 entry = slot << 32 | t;
        ASSERT_TRUE(std::find(entries + r * 2 * Z, entries + (r + 1) * 2 * Z, entry) != entries + (r + 1) * 2 * Z)
            << "slot " << slot << " of request " << r;
      }
  }
}

TEST(HisparseGpu, SglangsStateEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 3u : 120u) && !HasFailure(); ++seed)
    sglang_world(seed, false, small() ? 2 : 4, small() ? 1 : 4);
  for (unsigned seed = 1; seed <= (small() ? 0u : 4u) && !HasFailure(); ++seed) sglang_world(1000 + seed, true, 2, 2);
}

// --------------------------------------------------------------------------------------------------------- single step

void single_world(unsigned seed, bool large, int shapes, int replays, i64 requests = 0, i64 hot = 0) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", large " << large);
  World w(seed, large, false, true, requests, hot);
  Pair<i16> lru({w.R, w.H});
  std::vector<i16> order(at(w.R * w.H));
  for (i64 r = 0; r < w.R; ++r) {
    std::iota(order.begin() + r * w.H, order.begin() + (r + 1) * w.H, i16{0});
    std::shuffle(order.begin() + r * w.H, order.begin() + (r + 1) * w.H, w.random);
    for (i64 s = 0; s < w.H; ++s)
      if (w.random.one_in(2) && s < w.L) w.slot_tokens->values()[r * (w.H + w.P) + s] = static_cast<i32>(s);
    if (seed % 4 == 0 && w.H > 2) w.slot_tokens->values()[r * (w.H + w.P) + 2] = w.slot_tokens->values()[r * (w.H + w.P)];  // damaged
  }
  lru.set(order);
  w.slot_tokens->upload();
  w.arrays.emplace_back("lru_slots", &lru);
  std::vector<std::unique_ptr<Pair<u8>>> followers;
  for (int i = 0; i < 3; ++i) {
    followers.push_back(std::make_unique<Pair<u8>>(std::initializer_list<i64>{w.bytes(w.device_rows)}));
    w.fill(*followers.back());
    w.arrays.emplace_back("follower", followers.back().get());
  }
  for (int i = 0; i < shapes; ++i) {
    const i64 block = w.random.one_in(4) ? w.random.pick(1, 4) : 1, entries = w.random.pick(1, large ? 2048 : 60);
    const i64 K = std::min(entries * block, w.H / block * block);
    if (K == 0) continue;
    Selection s(w.random.pick(1, w.R + 2), 1, K, !w.random.one_in(4));
    ASSERT_TRUE(run_shapes(w, s, replays, false, false, [&](Where where, Stream stream) {
      SwapInSingleParams p;
      const auto flat = [&](TensorView v, i64 columns) {
        v.ndim = 2, v.sizes[1] = columns, v.strides[0] = K, v.strides[1] = 1;
        return v;
      };
      p.top_k_tokens = flat(s.tokens.view(where), K / block), p.top_k_device_locs = flat(s.out.view(where), K);
      p.seq_lens = s.lens.view(where), p.seq_lens.ndim = 1;
      p.req_pool_indices = s.requests.view(where), p.num_real_reqs = s.num_real.view(where);
      p.host_cache_locs = w.host_locs->view(where), p.buffers = w.buffers(where), p.layout = w.layout();
      p.device_buffer_tokens = w.slot_tokens->view(where), p.device_buffer_locs = w.slot_locs->view(where);
      p.lru_slots = lru.view(where), p.plan = s.plan_view(where), p.sparse_block_size = block, p.sm_budget = i % 4;
      swap_in_single(p, stream);
      if (!s.plan) return;
      ReplayPlanParams r;
      r.miss_src = p.plan.miss_src, r.miss_dst = p.plan.miss_dst, r.miss_count = p.plan.miss_count, r.num_real_reqs = p.num_real_reqs;
      std::vector<KvBuffers> layers(3);
      for (int l = 0; l < 3; ++l)
        layers[at(l)].host_cache = w.host_pool(0, where), layers[at(l)].device_buffer = w.pool(*followers[at(l)], where);
      r.followers = layers.data(), r.num_followers = 3, r.layout = w.layout(), r.sm_budget = i % 3;
      replay_plan(r, stream);
    }));
  }
}

TEST(HisparseGpu, SingleStepAndReplayEqualTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 3u : 150u) && !HasFailure(); ++seed)
    single_world(seed, false, small() ? 2 : 4, small() ? 1 : 4);
  for (unsigned seed = 1; seed <= (small() ? 0u : 4u) && !HasFailure(); ++seed) single_world(1000 + seed, true, 2, 2);
  // So many requests that one block serves each.
  for (unsigned seed = 1; seed <= (small() ? 1u : 4u) && !HasFailure(); ++seed) single_world(2000 + seed, false, 2, 2, 50);
  if (!small()) single_world(3000, true, 2, 2, 1, 17000);  // tables beyond one block's shared memory
}

/// Plans of many rows, most of them short or empty, some beyond the real ones.
TEST(HisparseGpu, ReplayOfManyRows) {
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

// ------------------------------------------------------------------------------------------------------------ transfers

TEST(HisparseGpu, PagedTransfersBothWays) {
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
    for (auto& d : device) ASSERT_EQ(d->difference(), "") << "round " << round;
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
  std::vector<Bytes*> all{&locs};
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
  const OwnStream stream;
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
    step(Where::kHost, {});
    if (round == 0) {
      step(Where::kDevice, stream);
      ASSERT_TRUE(stream.synchronize());
      graph = std::make_unique<Captured>(stream, [&](Stream to) { step(Where::kDevice, to); });
    } else {
      ASSERT_TRUE(graph->replay());
    }
    ASSERT_EQ(out.difference(), "") << "round " << round;
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i]->difference(), "") << "array " << i << ", round " << round;
    for (std::size_t i = 0; i < host.size(); ++i)
      ASSERT_EQ(std::memcmp(host[i]->data(), plain[i]->host(), plain[i]->size()), 0) << "host pool " << i << ", round " << round;
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
    ASSERT_TRUE(graph->replay());
    ASSERT_EQ(out.difference(), "") << "fault " << fault;
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i]->difference(), "") << "array " << i << ", fault " << fault;
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
    ASSERT_TRUE(stream.synchronize());
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i]->difference(), "") << "array " << i << ", direction " << direction;
    for (std::size_t i = 0; i < host.size(); ++i)
      ASSERT_EQ(std::memcmp(host[i]->data(), plain[i]->host(), plain[i]->size()), 0) << "host pool " << i << ", direction " << direction;
  }
}

TEST(HisparseGpu, WindowsAndStagingEqualTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 2u : 30u) && !HasFailure(); ++seed) window_world(seed, small() ? 4 : 8);
}

// -------------------------------------------------------------------------------------------- what only contents can tell

/// A row whose ids point outside is padding: -1, count 0, nothing written; its neighbour is served.
TEST(HisparseGpu, BadIdsAreInvalidRows) {
  SPECSTATE_NEEDS_GPU();
  World w(31, false, true, false);
  NativeState state(w);
  for (const Where where : {Where::kHost, Where::kDevice}) reset_swap_state(state.view(w, where));
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const auto call = [&](Selection& s) {
    SwapInParams p;
    const Where where = Where::kDevice;
    p.top_k_tokens = s.tokens.view(where), p.seq_lens = s.lens.view(where), p.req_pool_indices = s.requests.view(where);
    p.host_cache_locs = w.host_locs->view(where), p.buffers = w.buffers(where), p.layout = w.layout();
    p.state = state.view(w, where), p.scratch_locs = w.scratch->view(where), p.top_k_device_locs = s.out.view(where),
    p.plan = s.plan_view(where);
    p.unique_misses = s.misses.view(where), p.unique_hits = s.hits.view(where);
    swap_in(p);
  };
  const i64 S = 2, K = 8;
  for (const std::vector<i64>& ids :
       {std::vector<i64>{-1}, std::vector<i64>{w.R}, std::vector<i64>{i64{1} << 40}, std::vector<i64>{0, 0}}) {
    Selection s(static_cast<i64>(ids.size()), S, K, true);
    s.requests.set(ids);
    s.lens.set(std::vector<i64>(ids.size() * 2, w.L));
    s.tokens.set(std::vector<i32>(ids.size() * 16, 1));
    call(s);
    SPECSTATE_GPU(cudaDeviceSynchronize());
    std::fill_n(s.out.values(), ids.size() * 16, -1);
    for (Pair<i32>* p : {&s.miss_count, &s.misses, &s.hits}) std::fill_n(p->values(), ids.size(), 0);
    EXPECT_EQ(s.difference(w, true), "") << "request " << ids[0];
  }
  {  // a device row outside the pool, in a table
    Selection s(1, S, K, true);
    s.requests.set({0});
    s.lens.set({w.L, w.L});
    s.tokens.set(std::vector<i32>(16, 1));
    w.slot_locs->values()[w.H - 1] = static_cast<i32>(w.device_rows);
    w.slot_locs->upload();
    call(s);
    SPECSTATE_GPU(cudaDeviceSynchronize());
    std::fill_n(s.out.values(), 16, -1);
    for (Pair<i32>* p : {&s.miss_count, &s.misses, &s.hits}) std::fill_n(p->values(), 1, 0);
    EXPECT_EQ(s.difference(w, true), "");
  }
}

/// A batch of a bad row, a good one and the bad request's row once more where that is what is bad: nothing of the bad one changes, the good one
/// is served.
TEST(HisparseGpu, BadSingleStepRowsAreInvalid) {
  SPECSTATE_NEEDS_GPU();
  enum Kind { kSlotTwice, kSlotOutside, kRowOutside, kNoRow, kRequestOutside, kRequestTwice, kKinds };
  for (unsigned seed = 1; seed <= (small() ? 2u : 12u) && !HasFailure(); ++seed)
    for (int kind = 0; kind < kKinds; ++kind) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", kind " << kind);
      World w(4000 + seed, false, false, true, 3);
      if (w.H < 2 || w.L <= w.H) continue;
      Pair<i16> lru({w.R, w.H});
      std::vector<i16> order(at(w.R * w.H));
      for (i64 i = 0; i < w.R * w.H; ++i) order[at(i)] = static_cast<i16>(i % w.H);
      const i64 bad = 1, slot = w.random.pick(0, w.H - 2);
      if (kind == kSlotTwice) order[at(bad * w.H + slot)] = order[at(bad * w.H + slot + 1)];
      if (kind == kSlotOutside) order[at(bad * w.H + slot)] = static_cast<i16>(w.random.one_in(2) ? w.H : -1);
      if (kind == kRowOutside) w.slot_locs->values()[bad * (w.H + w.P) + slot] = static_cast<i32>(w.device_rows);
      if (kind == kNoRow) w.slot_locs->values()[bad * (w.H + w.P) + slot] = -1;
      w.slot_locs->upload();
      lru.set(order);
      w.arrays.emplace_back("lru_slots", &lru);
      const i64 K = std::min<i64>(w.H, 20), B = kind == kRequestTwice ? 3 : 2;
      std::vector<i32> tokens(at(3 * K));
      for (i32& t : tokens) t = static_cast<i32>(w.random.pick(0, w.L - 1));
      Pair<i32> asked({3, K}, tokens), out({3, K}, std::vector<i32>(at(3 * K), 77)), lens({3}, std::vector<i32>(3, static_cast<i32>(w.L)));
      Pair<i64> requests({3}, {kind == kRequestOutside ? w.R : bad, 2, bad});
      const auto call = [&](Where where, i64 first, i64 count) {
        SwapInSingleParams p;
        const auto rows = [&](TensorView v) {
          v.sizes[0] = count, v.data = v.as<std::byte>() + first * v.strides[0] * size_of(v.dtype);
          return v;
        };
        p.top_k_tokens = rows(asked.view(where)), p.top_k_device_locs = rows(out.view(where)), p.seq_lens = rows(lens.view(where));
        p.req_pool_indices = rows(requests.view(where)), p.host_cache_locs = w.host_locs->view(where), p.buffers = w.buffers(where);
        p.layout = w.layout(), p.device_buffer_tokens = w.slot_tokens->view(where), p.device_buffer_locs = w.slot_locs->view(where);
        p.lru_slots = lru.view(where);
        swap_in_single(p);
      };
      call(Where::kDevice, 0, B);
      SPECSTATE_GPU(cudaDeviceSynchronize());
      call(Where::kHost, 1, 1);
      for (i64 i = 0; i < K; ++i) out.values()[i] = -1, out.values()[2 * K + i] = B == 3 ? -1 : 77;
      EXPECT_EQ(out.difference(), "");
      for (const auto& [name, array] : w.arrays) EXPECT_EQ(array->difference(), "") << name;
    }
}

TEST(HisparseGpu, PageableHostMemoryIsRefused) {
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
  Pair<u8> device({requests * W, item});
  Pair<i64> host_locs({requests, L}), ids({requests});
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
    for (const Where where : {Where::kHost, Where::kDevice}) {
      SwapInParams p;
      p.top_k_tokens = tokens.view(where), p.seq_lens = lens.view(where), p.req_pool_indices = ids.view(where);
      p.host_cache_locs = host_locs.view(where), p.buffers.host_cache = host.rows(host_rows, item, where),
      p.buffers.device_buffer = device.view(where);
      p.state = state[where == Where::kDevice], p.top_k_device_locs = out.view(where), p.unique_misses = misses.view(where);
      swap_in(p);
    }
    SPECSTATE_GPU(cudaDeviceSynchronize());
    ASSERT_EQ(out.difference(), "") << call;
    ASSERT_EQ(misses.difference(), "") << call;
    ASSERT_EQ(device.difference(), "") << call;
    ASSERT_EQ(memory.difference(), "") << call;
  }
}

TEST(HisparseGpu, ManyRequestsAndTheLargestCalls) {
  SPECSTATE_NEEDS_GPU();
  if (small()) return published_shape(3, 4, 64, 128, 576, 1);
  published_shape(256, 4, 256, 512, 64, 3);
  published_shape(40, 4, 2048, 4096, 576, 2);
  published_shape(2, 32, 2048, 16384, 64, 2);  // 65536 occurrences
  published_shape(1, 8, 8192, 65536, 16, 2);   // tables that no shared memory holds
  published_shape(2, 65536, 1, 5000, 16, 2);
}

TEST(HisparseGpu, EveryRowMissing) {
  SPECSTATE_NEEDS_GPU();
  for (const Asked asked : {Asked::kNew, Asked::kRepeated}) {
    if (small()) {
      published_shape(2, 2, 64, 128, 576, 2, asked);
      continue;
    }
    for (const i64 requests : {1, 8, 20, 40}) published_shape(requests, 2, 2048, 4096, 576, 3, asked);
    published_shape(3, 8, 1024, 8192, 1152, 3, asked);
    published_shape(2, 4, 333, 1400, 640, 3, asked);
  }
}

/// A batch row has 16, 8, 6, 4, 3, 2 or 1 CTAs, as many as fit for all.
TEST(HisparseGpu, ClustersOfEverySize) {
  SPECSTATE_NEEDS_GPU();
  if (small()) return published_shape(3, 8, 64, 128, 576, 2, Asked::kFew);
  for (const i64 requests : {5, 12, 18, 26, 32, 64, 70}) published_shape(requests, 8, 2048, 4096, 576, 2, Asked::kFew);
  published_shape(18, 3, 2000, 4096, 1152, 2, Asked::kFew);
  published_shape(35, 4, 2047, 4096, 576, 2, Asked::kFew);
  published_shape(66, 8, 2048, 4096, 576, 2, Asked::kMixed);
}

/// Pools of more than 2^31 bytes, and rows beyond 2^31 / 576.
TEST(HisparseGpu, LargePools) {
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

TEST(HisparseGpu, FollowersOnASideStream) {
  SPECSTATE_NEEDS_GPU();
  bool same = false;
  side_stream(true, same);
  EXPECT_TRUE(same);
  side_stream(false, same);
  EXPECT_FALSE(same) << "the comparison does not notice a follower that ran before its plan was there";
}

}  // namespace
