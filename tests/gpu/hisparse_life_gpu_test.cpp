// The life of requests over a GPU equals that over the CPU: two Coordinators are told the same, and every table, every row of every pool and every
// answer is the same to the last bit. Nothing but the test waits for the GPU.
#include "hisparse_gpu.hpp"
#include "specstate/hisparse_coordinator.hpp"

using namespace specstate;
using namespace specstate::hisparse;
using namespace specstate::gpu_test;

namespace {

constexpr i64 kFirst = 20;

/// A host pool: pinned for the GPU, and plain with the same bytes for the CPU.
struct HostPool {
  u8* pinned = nullptr;
  std::vector<u8> plain;
  explicit HostPool(i64 bytes, Random& random) : plain(at(bytes)) {
    for (u8& x : plain) x = static_cast<u8>(random() >> 7);
    pinned = Arena<true>::get().take(plain.size());
    if (!pinned) throw std::bad_alloc();
    std::memcpy(pinned, plain.data(), plain.size());
  }
  HostPool(const HostPool&) = delete;
  ~HostPool() { Arena<true>::get().give(pinned, plain.size()); }
};

struct Event {
  cudaEvent_t event = nullptr;
  Event() { cudaEventCreateWithFlags(&event, cudaEventDisableTiming); }
  ~Event() { cudaEventDestroy(event); }
  void order(const OwnStream& first, const OwnStream& then) const {
    cudaEventRecord(event, first.native());
    cudaStreamWaitEvent(then.native(), event, 0);
  }
};

struct Lives {
  Random random;
  CoordinatorConfig config;
  bool paged;
  i64 W, B, host_rows, device_rows;
  std::vector<i64> item;  // [layers]
  std::vector<bool> two;
  std::vector<std::unique_ptr<HostPool>> hosts;
  std::vector<std::unique_ptr<Bytes>> pools;
  std::vector<KvBuffers> buffers[2];
  std::unique_ptr<Bytes> tables;
  std::unique_ptr<Coordinator> c[2];  // by Where
  OwnStream main, side;
  Event swapped, followed;
  struct Model {
    RequestState state = RequestState::kFree;
    i64 length = 0, known = 0, width = 0;  // length as it is, and as the host was told
    std::vector<i64> untold = {};
  };
  std::vector<Model> model;
  // Arrays of a step, of one shape, so that it can be captured.
  i64 S, K;
  std::unique_ptr<Pair<i64>> requests;
  std::unique_ptr<Pair<i32>> widths, taken, real, locs, lens, tokens, misses, hits;
  std::vector<std::unique_ptr<Pair<i32>>> outs;  // [anchors]
  static constexpr i64 kArena = 1 << 20, kRows = 4 * 6 * 2 * 32 * 37 + 16 * 1152;
  std::unique_ptr<Pair<u8>> arena;  // random bytes, of which rows are given
  i64 rows_at = 0;
  std::unique_ptr<Captured> graph;

  static CoordinatorConfig draw(Random& r) {
    CoordinatorConfig c;
    c.requests = r.pick(1, 4), c.top_k = r.pick(1, 12), c.hot = c.top_k + r.pick(0, 30), c.window = r.pick(1, 6);
    c.tail = r.one_in(2) ? 0 : c.window + r.pick(0, 3);
    c.scratch = c.window * c.top_k;
    c.context = r.pick(30, 120), c.page_size = r.pick(1, 9), c.first_layer = kFirst, c.anchor_of = {20, 20, 22, 22, 22, 25};
    c.sm_budget = r.pick(0, 3);
    return c;
  }
  explicit Lives(unsigned seed) : random(seed * 7919 + 11), config(draw(random)), paged(random.one_in(4)), model(at(config.requests)) {
    if (paged) config.layout = RowLayout::kDsv4Paged;
    const i64 R = config.requests, tail = config.tail ? config.tail : 2 * config.window;
    W = config.hot + tail;
    B = R + 1;
    host_rows = R * config.context + 40, device_rows = std::max<i64>(1, R - random.pick(0, 1)) * (W + config.scratch) + 3;
    if (paged) host_rows = (host_rows + 63) / 64 * 64, device_rows = (device_rows + 63) / 64 * 64;
    constexpr i64 kItems[] = {16, 576, 24, 5, 132, 1152};
    for (std::size_t l = 0; l < config.anchor_of.size(); ++l) {
      item.push_back(paged ? 584 : kItems[random() % 6]);
      two.push_back(!paged && l % 3 == 2);
      KvBuffers b[2];
      for (int pair = 0; pair < 1 + two.back(); ++pair) {
        const i64 host_bytes = paged ? host_rows / 64 * kPage : host_rows * item.back(),
                  bytes = paged ? device_rows / 64 * kPage : device_rows * item.back();
        hosts.push_back(std::make_unique<HostPool>(host_bytes, random));
        pools.push_back(std::make_unique<Bytes>(at(bytes)));
        for (i64 i = 0; i < bytes; ++i) static_cast<u8*>(pools.back()->host())[i] = static_cast<u8>(random() >> 5);
        pools.back()->upload();
        for (int w = 0; w < 2; ++w) {
          void *h = w ? hosts.back()->pinned : hosts.back()->plain.data(), *d = w ? pools.back()->device() : pools.back()->host();
          const Device cpu{DeviceType::kCpu, 0, w == 1}, dev{w ? DeviceType::kCuda : DeviceType::kCpu, 0};
          (pair ? b[w].host_cache_v : b[w].host_cache) =
              paged ? TensorView(h, DType::kUInt8, {host_bytes}, cpu) : TensorView(h, DType::kUInt8, {host_rows, item.back()}, cpu);
          (pair ? b[w].device_buffer_v : b[w].device_buffer) =
              paged ? TensorView(d, DType::kUInt8, {bytes}, dev) : TensorView(d, DType::kUInt8, {device_rows, item.back()}, dev);
        }
      }
      for (int w = 0; w < 2; ++w) buffers[w].push_back(b[w]);
    }
    const i64 bytes = Coordinator::table_bytes(config, static_cast<i64>(item.size()));
    tables = std::make_unique<Bytes>(at(bytes));
    c[0] = std::make_unique<Coordinator>(config, buffers[0]);
    CoordinatorConfig there = config;
    there.tables = TensorView(tables->device(), DType::kUInt8, {bytes}, {DeviceType::kCuda, 0});
    c[1] = std::make_unique<Coordinator>(there, buffers[1], main);
    S = random.pick(1, config.window), K = config.top_k;
    requests = std::make_unique<Pair<i64>>(std::initializer_list<i64>{B});
    for (auto* p : {&widths, &taken, &misses, &hits}) *p = std::make_unique<Pair<i32>>(std::initializer_list<i64>{B});
    real = std::make_unique<Pair<i32>>(std::initializer_list<i64>{1});
    locs = std::make_unique<Pair<i32>>(std::initializer_list<i64>{B, config.window + 1});
    lens = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, S});
    tokens = std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, S, K});
    for (int i = 0; i < 3; ++i) outs.push_back(std::make_unique<Pair<i32>>(std::initializer_list<i64>{R, S, K}));
    arena = std::make_unique<Pair<u8>>(std::initializer_list<i64>{kArena});
    for (i64 i = 0; i < kArena; ++i) arena->values()[i] = static_cast<u8>(random() >> 9);
    arena->upload();
  }
  static constexpr Where kBoth[2] = {Where::kHost, Where::kDevice};
  Stream stream(Where w) const { return w == Where::kHost ? Stream{} : Stream(main); }
  Coordinator& of(Where w) { return *c[w == Where::kDevice]; }

  /// The same call on both. Both refuse for want of rows, or neither does.
  template <class Call>
  bool both(Call&& call) {
    int refused = 0;
    for (const Where w : kBoth) try {
        call(of(w), w, stream(w));
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kRuntime) << e.what();
        ++refused;
      }
    EXPECT_NE(refused, 1);
    return refused == 0;
  }
  std::vector<i64> in_state(RequestState s) {
    std::vector<i64> ids;
    for (i64 r = 0; r < config.requests; ++r)
      if (model[at(r)].state == s) ids.push_back(r);
    std::shuffle(ids.begin(), ids.end(), random);
    return ids;
  }
  /// Rows to come are others, and lie otherwise.
  void fresh() { rows_at = random.pick(0, (kArena - kRows) / 16) * 16 + (random.one_in(3) ? random.pick(0, 15) : 0); }
  /// n of the rows that are given to layer l for request r.
  TensorView given(Where w, i64 l, i64 r, i64 n, bool second) const {
    if (second && !two[at(l)]) return {};
    const TensorView t = arena->view(w);
    return TensorView(t.as<u8>() + rows_at + ((r * 6 + l) * 2 + second) * 32 * 37, DType::kUInt8, {n, item[at(l)]}, t.device);
  }

  // ------------------------------------------------------------------------------------------------------------ operations
  void prefill(i64 r) {
    Model& q = model[at(r)];
    const i64 n = random.pick(0, std::min<i64>(16, config.context - q.length));
    if (!both([&](Coordinator& x, Where, Stream s) { x.reserve(r, n, s); })) return;
    const auto source = random.one_in(3) ? Coordinator::Source::kHost : Coordinator::Source::kStaged;
    for (i64 l = 0; l < static_cast<i64>(item.size()) && source == Coordinator::Source::kStaged; ++l) {
      fresh();
      both([&](Coordinator& x, Where w, Stream s) {
        x.stage(kFirst + l, r, q.length, given(w, l, r, n, false), given(w, l, r, n, true), s);
      });
    }
    both([&](Coordinator& x, Where, Stream s) { x.append(r, n, source, s); });
    q.length = q.known = q.length + n;
  }
  void write_window(i64 r, i64 width) {
    for (i64 l = 0; l < static_cast<i64>(item.size()); ++l) {
      fresh();
      for (i64 j = 0; j < width; ++j)
        both([&](Coordinator& x, Where w, Stream s) {
          const auto row = [&](bool second) {
            TensorView t = given(w, l, r, 16, second);
            if (t.given()) t = t[j];
            return t;
          };
          x.write(kFirst + l, r, j, row(false), row(true), s);
        });
    }
  }
  /// What the queries of the batch rows (requests with their ends) select.
  void select(const std::vector<i64>& ids) {
    std::vector<i64> all(ids);
    for (i64 r = 0; static_cast<i64>(all.size()) < config.requests; ++r)
      if (std::find(all.begin(), all.end(), r) == all.end()) all.push_back(r);
    all.push_back(-7);
    requests->set(all);
    real->set({static_cast<i32>(ids.size())});
    std::vector<i32> n(at(config.requests * S), 1), t(at(config.requests * S * K), 0);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      const Model& q = model[at(ids[b])];
      for (i64 s = 0; s < S; ++s) {
        const i64 end = q.width ? std::min(q.length + q.width, q.length + s + 1) : q.length;
        n[b * at(S) + at(s)] = static_cast<i32>(end);
        for (i64 k = 0; k < K; ++k)
          t[(b * at(S) + at(s)) * at(K) + at(k)] = static_cast<i32>(random.one_in(8)   ? random.pick(-2, end + 2)
                                                                    : random.one_in(3) ? random.pick(0, end)
                                                                                       : random.pick(std::max<i64>(0, end - 30), end));
      }
    }
    lens->set(n), tokens->set(t);
    for (auto& o : outs) std::memset(o->host(), Bytes::kPoison, o->size()), o->upload();
  }
  void swap(Coordinator& x, Where w, int anchor, Stream s) {
    SwapInParams p;
    p.top_k_tokens = tokens->view(w), p.seq_lens = lens->view(w), p.top_k_device_locs = outs[at(anchor)]->view(w);
    p.req_pool_indices = requests->view(w), p.req_pool_indices.sizes[0] = config.requests;
    p.num_real_reqs = real->view(w), p.unique_misses = misses->view(w), p.unique_hits = hits->view(w);
    x.swap(kFirst + (anchor == 0 ? 0 : anchor == 1 ? 2 : 5), p, 0, s);
  }
  /// Swaps of all anchors by plain calls; followers on the side stream, all at once, one by one, later, or never.
  void swap_all(const std::vector<i64>& ids) {
    if (ids.empty()) return;
    select(ids);
    for (int anchor = 0; anchor < 3; ++anchor) {
      const int how = static_cast<int>(random() % 4);
      both([&](Coordinator& x, Where w, Stream s) {
        swap(x, w, anchor, s);
        if (anchor == 2 || how == 3) return;
        const Stream beside = w == Where::kHost ? Stream{} : Stream(side);
        if (w == Where::kDevice) swapped.order(main, side);
        if (how == 0) {
          x.follow_all(kFirst + (anchor ? 2 : 0), 0, beside);
        } else {
          x.follow(kFirst + (anchor ? 3 : 1), 0, beside);
          if (anchor && how == 1) x.follow(kFirst + 4, 0, beside);
        }
        if (w == Where::kDevice) followed.order(side, main);
      });
      compare_answers(anchor);
    }
  }
  void compare_answers(int anchor) { ASSERT_EQ(outs[at(anchor)]->difference(), "") << "anchor " << anchor; }
  void verify() {
    std::vector<i64> ids, w;
    for (const i64 r : in_state(RequestState::kActive))
      if (model[at(r)].length < config.context && !random.one_in(4))
        ids.push_back(r), w.push_back(random.pick(1, std::min(config.window, config.context - model[at(r)].length)));
    const i64 n = static_cast<i64>(ids.size());
    std::vector<i32> poison(at(B * (config.window + 1)), 77);
    locs->set(poison);
    if (!both([&](Coordinator& x, Where where, Stream s) {
          TensorView v = locs->view(where);
          v.sizes[0] = n;
          x.prepare_verify(ids, w, v, s);
        }))
      return;
    ASSERT_EQ(locs->difference(), "");
    for (i64 b = 0; b < n; ++b) {
      Model& q = model[at(ids[at(b)])];
      q.state = RequestState::kVerifying, q.width = w[at(b)];
      ASSERT_EQ(c[1]->verify_loc(ids[at(b)], 0), c[0]->verify_loc(ids[at(b)], 0));
      write_window(ids[at(b)], q.width);
    }
    std::vector<i64> readers = in_state(RequestState::kVerifying);
    for (const i64 r : in_state(RequestState::kActive))
      if (random.one_in(2)) readers.push_back(r);
    std::erase_if(readers, [&](i64 r) { return !model[at(r)].untold.empty(); });
    swap_all(readers);
  }
  void accept() {
    std::vector<i64> ids, n;
    for (const i64 r : in_state(RequestState::kVerifying))
      if (model[at(r)].width > 0 && !random.one_in(4)) ids.push_back(r), n.push_back(random.pick(0, model[at(r)].width));
    both([&](Coordinator& x, Where, Stream s) { x.accept(ids, n, s); });
    for (std::size_t b = 0; b < ids.size(); ++b) {
      Model& q = model[at(ids[b])];
      q.length = q.known = q.length + n[b], q.width = 0, q.state = RequestState::kActive;
    }
  }
  /// A step whose counts only the GPU has, captured once and replayed with everything changed; the host is told up to two steps later.
  void step() {
    std::vector<i64> ids;
    for (i64 r = 0; r < config.requests; ++r) {
      const Model& q = model[at(r)];
      if ((q.state == RequestState::kActive || !q.untold.empty()) && q.untold.size() < 3 && q.length < config.context && !random.one_in(4))
        ids.push_back(r);
    }
    std::shuffle(ids.begin(), ids.end(), random);
    if (!both([&](Coordinator& x, Where, Stream s) { x.begin_step(ids, s); })) return;
    std::vector<i32> w(at(B), 88), t(at(B), 88);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      Model& q = model[at(ids[b])];
      q.state = RequestState::kVerifying;
      q.width = random.pick(0, std::min(config.window, config.context - q.length));
      w[b] = static_cast<i32>(q.width), t[b] = static_cast<i32>(random.pick(0, q.width));
      write_window(ids[b], q.width);
    }
    select(ids);
    widths->set(w), taken->set(t);
    const auto whole = [&](Coordinator& x, Where where, Stream s) {
      const StepBatch batch{requests->view(where), widths->view(where), real->view(where)};
      x.open_step(batch, locs->view(where), s);
      for (int anchor = 0; anchor < 3; ++anchor) {
        swap(x, where, anchor, s);
        if (anchor < 2) x.follow_all(kFirst + (anchor ? 2 : 0), 0, s);
      }
      x.close_step(batch, taken->view(where), s);
    };
    if (!graph) graph = std::make_unique<Captured>(main, [&](Stream s) { whole(*c[1], Where::kDevice, s); });
    ASSERT_TRUE(graph->launch());
    whole(*c[0], Where::kHost, {});
    const Seen seen({locs.get(), outs[0].get(), outs[1].get(), outs[2].get()});
    ASSERT_EQ(seen.difference(*locs), "");
    for (int anchor = 0; anchor < 3; ++anchor) ASSERT_EQ(seen.difference(*outs[at(anchor)]), "") << "anchor " << anchor;
    for (std::size_t b = 0; b < ids.size(); ++b) {
      Model& q = model[at(ids[b])];
      q.length += t[b], q.width = 0;
      q.untold.push_back(t[b]);
    }
    tell(false);
  }
  void tell(bool everything) {
    for (i64 r = 0; r < config.requests; ++r) {
      Model& q = model[at(r)];
      while (!q.untold.empty() && (everything || q.untold.size() > 2 || random.one_in(2))) {
        const std::vector<i64> id{r}, n{q.untold.front()};
        both([&](Coordinator& x, Where, Stream) { x.end_step(id, n); });
        q.known += n[0];
        q.untold.erase(q.untold.begin());
        if (q.untold.empty()) q.state = RequestState::kActive;
      }
    }
  }

  void act(unsigned op) {
    const i64 r = random.pick(0, config.requests - 1);
    Model& q = model[at(r)];
    switch (op % 16) {
      case 0:
      case 1:
        if (q.state == RequestState::kFree) {
          const i64 n = random.pick(0, config.context / 2);
          if (both([&](Coordinator& x, Where, Stream s) { x.admit(r, n, s); })) q = Model{RequestState::kActive};
        }
        break;
      case 2:
      case 3:
      case 4:
        if (q.state == RequestState::kActive) prefill(r);
        break;
      case 5:
      case 6: verify(); break;
      case 7:
      case 8: accept(); break;
      case 9:
      case 10:
      case 11:
      case 12: step(); break;
      case 13:
        if (q.state != RequestState::kFree && random.one_in(3)) {
          both([&](Coordinator& x, Where, Stream s) { x.abort(r, s); });
          q = Model{};
        }
        break;
      case 14:
        if ((q.state == RequestState::kActive || q.state == RequestState::kVerifying) && q.untold.empty()) {
          both([&](Coordinator& x, Where, Stream s) { x.retract(r, s); });
          q.state = RequestState::kRetracted, q.width = 0;
        } else if (q.state == RequestState::kRetracted) {
          if (both([&](Coordinator& x, Where, Stream s) { x.resume(r, s); })) q.state = RequestState::kActive;
        }
        break;
      default: tell(true); break;
    }
  }
  std::string difference(const TensorView& cpu, const TensorView& gpu, const Seen& seen) const {
    const i64 n = cpu.numel();
    const u8* const there = seen.of(*tables) + (gpu.as<u8>() - static_cast<u8*>(tables->device()));
    const auto read = [](const void* p, DType d, i64 i) -> i64 {
      if (d == DType::kInt64) return static_cast<const i64*>(p)[i];
      if (d == DType::kInt32) return static_cast<const i32*>(p)[i];
      return static_cast<const std::int16_t*>(p)[i];
    };
    for (i64 i = 0; i < n; ++i)
      if (const i64 a = read(cpu.data, cpu.dtype, i), b = read(there, gpu.dtype, i); a != b)
        return "entry " + std::to_string(i) + " is " + std::to_string(b) + ", on the CPU " + std::to_string(a);
    return {};
  }
  void check() {
    std::vector<const Bytes*> all{tables.get()};
    for (const auto& pool : pools) all.push_back(pool.get());
    const Seen seen(all);
    for (const i64 layer : {20, 22, 25}) {
      const SwapState a = c[0]->tables(layer), b = c[1]->tables(layer);
      ASSERT_EQ(difference(a.slot_tokens, b.slot_tokens, seen), "") << "slot_tokens of " << layer;
      ASSERT_EQ(difference(a.slot_locs, b.slot_locs, seen), "") << "slot_locs of " << layer;
      ASSERT_EQ(difference(a.slot_stamps, b.slot_stamps, seen), "") << "slot_stamps of " << layer;
      ASSERT_EQ(difference(a.token_slots, b.token_slots, seen), "") << "token_slots of " << layer;
      ASSERT_EQ(difference(a.clock, b.clock, seen), "") << "clock of " << layer;
    }
    ASSERT_EQ(difference(c[0]->host_cache_locs(), c[1]->host_cache_locs(), seen), "");
    ASSERT_EQ(difference(c[0]->lengths(), c[1]->lengths(), seen), "");
    for (i64 r = 0; r < config.requests; ++r) {
      ASSERT_EQ(c[1]->state(r), model[at(r)].state);
      ASSERT_EQ(c[1]->length(r), model[at(r)].known);
      ASSERT_EQ(c[0]->lengths().as<i32>()[r], model[at(r)].length);
    }
    ASSERT_EQ(c[0]->free_device_rows(), c[1]->free_device_rows());
    ASSERT_EQ(c[0]->free_host_rows(), c[1]->free_host_rows());
    ASSERT_EQ(c[0]->stats().bytes_to_host, c[1]->stats().bytes_to_host);
    for (std::size_t i = 0; i < pools.size(); ++i) ASSERT_EQ(seen.difference(*pools[i]), "") << "device pool " << i;
    for (std::size_t i = 0; i < hosts.size(); ++i)
      ASSERT_EQ(std::memcmp(hosts[i]->pinned, hosts[i]->plain.data(), hosts[i]->plain.size()), 0) << "host pool " << i;
    std::memset(tables->host(), 0, tables->size());
    const std::string zones = seen.difference(*tables);
    ASSERT_EQ(zones.find("red zone"), std::string::npos) << zones;
  }
};

TEST(HisparseLifeGpu, LivesEqualTheCpus) {
  SPECSTATE_NEEDS_GPU();
  if (small()) {  // one of each: every call of a swap is slow where a tool watches
    Lives lives(2);
    for (const unsigned op : {0u, 0u, 0u, 0u, 2u, 2u, 2u, 9u, 15u, 5u, 7u, 14u, 14u, 9u, 13u}) {
      lives.act(op);
      if (!HasFailure()) lives.check();
    }
    return;
  }
  for (unsigned seed = 1; seed <= 14 && !HasFailure(); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Lives lives(seed);
    for (int i = 0; i < 160 && !HasFailure(); ++i) {
      SCOPED_TRACE(::testing::Message() << "act " << i);
      lives.act(lives.random());
      if (i % 16 == 0 && !HasFailure()) lives.check();
    }
    if (!HasFailure()) lives.check();
  }
}

/// What only a GPU refuses, and what its tables need.
TEST(HisparseLifeGpu, Refusals) {
  SPECSTATE_NEEDS_GPU();
  const auto text = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  Bytes device(64 * 16), tables(1 << 16);
  void* pinned = nullptr;
  SPECSTATE_GPU(cudaMallocHost(&pinned, 64 * 16));
  KvBuffers layer;
  layer.host_cache = TensorView(pinned, DType::kUInt8, {64, 16}, {DeviceType::kCpu, 0, true});
  layer.device_buffer = TensorView(device.device(), DType::kUInt8, {64, 16}, {DeviceType::kCuda, 0});
  const std::vector<KvBuffers> layers{layer};
  CoordinatorConfig config;
  config.requests = 2, config.hot = 8, config.window = 2, config.context = 32, config.top_k = 4, config.page_size = 4;
  EXPECT_EQ(text([&] { Coordinator c(config, layers); }), "Coordinator: tables: expected a tensor, got none.");
  const i64 bytes = Coordinator::table_bytes(config, 1);
  config.tables = TensorView(tables.device(), DType::kUInt8, {bytes - 1}, {DeviceType::kCuda, 0});
  EXPECT_EQ(text([&] { Coordinator c(config, layers); }),
            "Coordinator: tables: expected table_bytes(): " + std::to_string(bytes) + " bytes, got " + std::to_string(bytes - 1) + ".");
  config.tables = TensorView(tables.device(), DType::kUInt8, {bytes}, {DeviceType::kCuda, 0});
  const OwnStream stream;
  Coordinator c(config, layers, stream);
  c.admit(0, 0, stream);
  const std::vector<i64> id{0}, one{1};
  c.begin_step(id, stream);
  EXPECT_EQ(text([&] { c.prepare_verify(id, one, {}, stream); }), "Coordinator: request: expected request 0 to be active, got verifying.");
  EXPECT_EQ(text([&] { c.retract(0, stream); }), "Coordinator: request: expected request 0 with no step under way, got 1 to end.");
  EXPECT_EQ(text([&] { c.accept(id, one, stream); }), "Coordinator: request: expected request 0 with no step under way, got 1 to end.");
  std::vector<u8> row(16);
  EXPECT_EQ(text([&] { c.write(0, 0, 0, TensorView(row.data(), DType::kUInt8, {16}), {}, stream); }),
            "Coordinator: row: expected memory of cuda:0, got cpu.");
  Pair<i32> tokens({1, 4, 4}), lens({1, 4}), ids({1}), rounds({1, 4});
  SwapInParams p;
  p.top_k_tokens = tokens.view(Where::kDevice), p.seq_lens = lens.view(Where::kDevice), p.req_pool_indices = ids.view(Where::kDevice);
  EXPECT_EQ(text([&] { c.plan_rounds(0, p, rounds.view(Where::kDevice)); }),
            "Coordinator: top_k_tokens: expected at most hot + scratch = 8 positions a row on a GPU, got 16.");
  ASSERT_TRUE(stream.synchronize());
  cudaFreeHost(pinned);
}

}  // namespace
