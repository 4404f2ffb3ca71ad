// Swaps on the GPU equal the CPU's, to the last byte of every table and pool, call after call on states that live on: the native state, sglang's,
// the single step and the replay of its plan, and rows that only their contents show to be wrong.
#include "hisparse_gpu.hpp"
#include "specstate/hisparse.hpp"

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

  /// `requests`: how many, 0: a few; `hot` slots and bytes of a `row`, 0: as many as fall.
  World(unsigned seed, bool large, bool native, bool single, i64 requests = 0, i64 hot = 0, i64 row = 0)
      : random(seed * 2654435761u + 17), R(random.pick(1, large ? 6 : 5)), H(large ? random.pick(300, 4200) : random.pick(1, 80)) {
    if (requests > 0) R = requests;
    if (hot > 0) H = hot;
    P = single ? random.pick(1, 6) : random.pick(0, large ? 70 : 6);
    if (single && seed % 2 == 0) H = (H + 7) / 8 * 8, P = 8;  // tables that bulk copies can take
    if (!single && seed % 2 == 0) H = (H + 3) / 4 * 4, P = (P + 3) / 4 * 4;
    L = large ? random.pick(H + 100, 20000) : random.pick(4, 200);
    C = single ? 0 : random.pick(0, 1) * random.pick(0, large ? 500 : 40);
    if (!native && !single) H = std::max(H, R);
    constexpr i64 kItems[] = {16, 512, 576, 656, 1152, 1600, 2048, 4096, 1, 3, 8, 20, 584, 132, 24, 1000};
    item = kItems[random() % (large ? 8 : 16)];
    paged = (native || single) && random.one_in(5);
    two = !paged && (native || single) && random.one_in(3);
    if (row > 0) item = row;
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
  std::string difference() const {
    std::vector<const Bytes*> all;
    for (const auto& [name, array] : arrays) all.push_back(array);
    const Seen seen(all);
    for (const auto& [name, array] : arrays)
      if (const std::string d = seen.difference(*array); !d.empty()) return std::string(name) + ": " + d;
    return {};
  }
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
    poison();
    fill_tables(w);
  }
  void poison() {
    for (Bytes* b : std::initializer_list<Bytes*>{&out, &miss_dst, &miss_count, &misses, &hits, &miss_src}) {
      std::memset(b->host(), Bytes::kPoison, b->size());
      b->upload();
    }
  }
  /// What the caller does between calls: host rows are written and change places, tail columns get tokens, hot slots are emptied.
  void fill_tables(World& w) {
    Random& random = w.random;
    const std::vector<i64> ids(requests.values(), requests.values() + real);
    for (int i = 0; i < 3; ++i) {
      i64* const locs = w.host_locs->values() + random.pick(0, w.R - 1) * w.L;
      std::swap(locs[random.pick(0, w.L - 1)], locs[random.pick(0, w.L - 1)]);
    }
    for (const auto& host : w.host)
      for (int i = 0; i < 64; ++i) host->data()[random.pick(0, w.bytes(w.host_rows) - 1)] ^= 0x5A;
    w.host_locs->upload();
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
    std::vector<std::pair<const char*, const Bytes*>> compared(w.arrays.begin(), w.arrays.end());
    compared.emplace_back("out", &out);
    if (counts) compared.emplace_back("unique_misses", &misses), compared.emplace_back("unique_hits", &hits);
    if (plan) compared.emplace_back("miss_count", &miss_count);
    std::vector<const Bytes*> all;
    for (const auto& [name, array] : compared) all.push_back(array);
    if (plan) all.push_back(&miss_src), all.push_back(&miss_dst);
    const Seen seen(all);
    for (const auto& [name, array] : compared)
      if (const std::string d = seen.difference(*array); !d.empty()) return std::string(name) + ": " + d;
    for (i64 b = 0; plan && b < real; ++b) {  // beyond the count a plan is unspecified
      const i64 n = miss_count.values()[b], from = b * S * K;
      if (std::memcmp(seen.of(miss_src) + from * 8, miss_src.values() + from, at(n * 8)) != 0)
        return "miss_src of row " + std::to_string(b);
      if (std::memcmp(seen.of(miss_dst) + from * 4, miss_dst.values() + from, at(n * 4)) != 0)
        return "miss_dst of row " + std::to_string(b);
    }
    return {};
  }
};

/// One shape after another on a state that lives on; each is called once, captured, and replayed with other contents. It is so many launches, of at
/// most `budget` blocks each (0: any number).
template <class Call>
::testing::AssertionResult run_shapes(World& w, Selection& s, int replays, bool inside_lens, bool counts, std::size_t launches, i64 budget,
                                      Call&& call) {
  static const OwnStream stream;
  s.draw(w, inside_lens);
  const auto check = [&](const char* how) -> ::testing::AssertionResult {
    call(Where::kHost, Stream{});  // while the GPU works
    const std::string d = s.difference(w, counts);
    if (d.empty()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << how << ": " << d << " (R " << w.R << ", H " << w.H << ", P " << w.P << ", L " << w.L << ", C "
                                         << w.C << ", item " << w.item << ", paged " << w.paged << ", two " << w.two << ", B " << s.B
                                         << ", S " << s.S << ", K " << s.K << ")";
  };
  call(Where::kDevice, stream);
  if (const auto same = check("plain call"); !same) return same;
  if (replays == 0) return ::testing::AssertionSuccess();
  const Captured graph(stream, [&](Stream to) { call(Where::kDevice, to); });
  const std::vector<i64> blocks = graph.blocks();
  if (blocks.size() != launches || (budget > 0 && *std::max_element(blocks.begin(), blocks.end()) > budget))
    return ::testing::AssertionFailure() << "expected " << launches << " launches within " << budget << " SMs, got " << blocks.size()
                                         << ", the first of " << (blocks.empty() ? 0 : blocks[0]) << " blocks";
  for (int i = 0; i < replays; ++i) {
    if (w.random.one_in(3))
      s.poison();  // the same selection again: what it misses has no row to come to
    else
      s.draw(w, inside_lens);
    if (const auto launched = graph.launch(); !launched) return launched;
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
    ASSERT_EQ(w.difference(), "") << "after reset";
  }
  if (seed % 7 == 0) {  // the clock restarts in mid-life
    for (i64 r = 0; r < w.R; ++r) state.clock.values()[r] = static_cast<i32>((1 << 30) - 1 - w.random.pick(0, 3));
    state.clock.upload();
  }
  for (int i = 0; i < shapes; ++i) {
    Selection s(w.random.pick(1, w.R + 2), w.random.pick(1, large ? 5 : 8), large ? w.random.pick(100, 2048) : w.random.pick(1, 40),
                !w.random.one_in(4));
    const bool wide = w.random.one_in(2), skip = w.random.one_in(8);
    const bool count_hits = w.random.one_in(2);  // without them a call that misses nothing exchanges less
    // (Tables of a large world, here and below, may need the shared memory of more CTAs than the budget says.)
    ASSERT_TRUE(run_shapes(w, s, replays, false, true, 1, large ? 0 : i % 4, [&](Where where, Stream stream) {
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
      p.unique_misses = s.misses.view(where);
      if (count_hits) p.unique_hits = s.hits.view(where);
      p.skip_io = skip, p.sm_budget = i % 4;
      swap_in(p, stream);
    }));
  }
  if (w.R > 1) {                                                                             // one request starts anew
    Pair<i32> one({2}, {static_cast<i32>(w.R - 1), seed % 2 ? -4 : static_cast<i32>(w.R)});  // ids outside are ignored on the GPU
    Pair<i32> valid({1}, {static_cast<i32>(w.R - 1)});
    reset_swap_state(state.view(w, Where::kHost), valid.view(Where::kHost));
    reset_swap_state(state.view(w, Where::kDevice), one.view(Where::kDevice));
    ASSERT_EQ(w.difference(), "") << "after the reset of one request";
  }
}

TEST(HisparseSwapGpu, NativeSwapEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 2u : 150u) && !HasFailure(); ++seed)
    native_world(seed, false, small() ? 2 : 5, small() ? seed % 2 : 4);
  for (unsigned seed = 1; seed <= (small() ? 0u : 5u) && !HasFailure(); ++seed) native_world(1000 + seed, true, 2, 3);
}

// ------------------------------------------------------------------------------------------------------- sglang's state

void sglang_world(unsigned seed, bool large, int shapes, int replays, i64 requests = 0) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", large " << large << ", requests " << requests);
  World w(seed, large, false, false, requests, 0, requests > 0 ? 24 : 0);
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
    Selection s(requests > 0 ? requests : w.random.pick(1, w.R + 2), w.random.pick(1, large ? 5 : 8),
                large ? w.random.pick(100, 2048) : w.random.pick(1, 40), !w.random.one_in(4));
    ASSERT_TRUE(run_shapes(w, s, replays, false, false, 1, large ? 0 : i % 4, [&](Where where, Stream stream) {
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

TEST(HisparseSwapGpu, SglangsStateEqualsTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 2u : 120u) && !HasFailure(); ++seed)
    sglang_world(seed, false, small() ? 2 : 4, small() ? seed % 2 : 4);
  for (unsigned seed = 1; seed <= (small() ? 0u : 4u) && !HasFailure(); ++seed) sglang_world(1000 + seed, true, 2, 2);
}

TEST(HisparseSwapGpu, SglangsStateOfManyRequests) {
  SPECSTATE_NEEDS_GPU();
  sglang_world(2001, false, small() ? 1 : 2, small() ? 1 : 2, small() ? 20 : 256);
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
    ASSERT_TRUE(run_shapes(w, s, replays, false, false, s.plan ? 2 : 1, large ? 0 : i % 4, [&](Where where, Stream stream) {
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
      r.followers = layers.data(), r.num_followers = 3, r.layout = w.layout(), r.sm_budget = i % 4;
      replay_plan(r, stream);
    }));
  }
}

TEST(HisparseSwapGpu, SingleStepAndReplayEqualTheCpu) {
  SPECSTATE_NEEDS_GPU();
  for (unsigned seed = 1; seed <= (small() ? 3u : 150u) && !HasFailure(); ++seed)
    single_world(seed, false, small() ? 2 : 4, small() ? 1 : 4);
  for (unsigned seed = 1; seed <= (small() ? 0u : 4u) && !HasFailure(); ++seed) single_world(1000 + seed, true, 2, 2);
  // So many requests that one block serves each.
  for (unsigned seed = 1; seed <= (small() ? 1u : 4u) && !HasFailure(); ++seed) single_world(2000 + seed, false, 2, 2, 50);
  if (!small()) single_world(3000, true, 2, 2, 1, 17000);  // tables beyond one block's shared memory
}

// -------------------------------------------------------------------------------------------- what only contents can tell

/// A row whose ids point outside is padding: -1, count 0, nothing written; its neighbour is served.
TEST(HisparseSwapGpu, BadIdsAreInvalidRows) {
  SPECSTATE_NEEDS_GPU();
  World w(31, false, true, false);
  NativeState state(w);
  for (const Where where : {Where::kHost, Where::kDevice}) reset_swap_state(state.view(w, where));
  SPECSTATE_GPU(cudaDeviceSynchronize());
  const auto call = [&](Selection& s, bool count_hits) {
    SwapInParams p;
    const Where where = Where::kDevice;
    p.top_k_tokens = s.tokens.view(where), p.seq_lens = s.lens.view(where), p.req_pool_indices = s.requests.view(where);
    p.host_cache_locs = w.host_locs->view(where), p.buffers = w.buffers(where), p.layout = w.layout();
    p.state = state.view(w, where), p.scratch_locs = w.scratch->view(where), p.top_k_device_locs = s.out.view(where),
    p.plan = s.plan_view(where);
    p.unique_misses = s.misses.view(where);
    if (count_hits) p.unique_hits = s.hits.view(where);
    p.sm_budget = small() ? 2 : 0;
    swap_in(p);
  };
  const i64 S = 2, K = 8;
  for (const std::vector<i64>& ids :
       {std::vector<i64>{-1}, std::vector<i64>{w.R}, std::vector<i64>{i64{1} << 40}, std::vector<i64>{0, 0}}) {
    Selection s(static_cast<i64>(ids.size()), S, K, true);
    s.requests.set(ids);
    s.lens.set(std::vector<i64>(ids.size() * 2, w.L));
    s.tokens.set(std::vector<i32>(ids.size() * 16, 1));
    for (const bool count_hits : {true, false}) {
      s.poison();
      call(s, count_hits);
      std::fill_n(s.out.values(), ids.size() * 16, -1);
      for (Pair<i32>* p : {&s.miss_count, &s.misses}) std::fill_n(p->values(), ids.size(), 0);
      if (count_hits) std::fill_n(s.hits.values(), ids.size(), 0);
      EXPECT_EQ(s.difference(w, true), "") << "request " << ids[0] << ", hits counted " << count_hits;
    }
  }
  {  // a device row outside the pool, in a table
    Selection s(1, S, K, true);
    s.requests.set({0});
    s.lens.set({w.L, w.L});
    s.tokens.set(std::vector<i32>(16, 1));
    w.slot_locs->values()[w.H - 1] = static_cast<i32>(w.device_rows);
    w.slot_locs->upload();
    for (const bool count_hits : {true, false}) {
      s.poison();
      call(s, count_hits);
      std::fill_n(s.out.values(), 16, -1);
      for (Pair<i32>* p : {&s.miss_count, &s.misses}) std::fill_n(p->values(), 1, 0);
      if (count_hits) std::fill_n(s.hits.values(), 1, 0);
      EXPECT_EQ(s.difference(w, true), "") << "hits counted " << count_hits;
    }
  }
}

/// A batch of a bad row, a good one and the bad request's row once more where that is what is bad: nothing of the bad one changes, the good one
/// is served.
TEST(HisparseSwapGpu, BadSingleStepRowsAreInvalid) {
  SPECSTATE_NEEDS_GPU();
  enum Kind { kSlotTwice, kSlotOutside, kRowOutside, kNoRow, kRequestOutside, kRequestTwice, kKinds };
  for (unsigned seed = 1; seed <= (small() ? 1u : 12u) && !HasFailure(); ++seed)
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
      call(Where::kHost, 1, 1);
      for (i64 i = 0; i < K; ++i) out.values()[i] = -1, out.values()[2 * K + i] = B == 3 ? -1 : 77;
      w.arrays.emplace_back("out", &out);
      EXPECT_EQ(w.difference(), "");
    }
}

}  // namespace
