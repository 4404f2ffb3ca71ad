// The HiSparse swaps on a GPU, beside a bare gather of as many rows: sglang's published configuration (4 steps of 2048 positions over 4096 hot
// slots, 782 distinct misses a request) at 1 to 256 requests, and one axis at a time around it. Every request has host rows of its own; a
// call is measured from the same state again and again, which a copy on the device puts back.
#include "specstate/hisparse.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "bench/gpu/gpu.hpp"
#include "specstate/error.hpp"
#include "specstate/hisparse_steps.hpp"

namespace specstate::bench {

namespace {

using namespace hisparse;
using i64 = std::int64_t;
using i32 = std::int32_t;

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }
constexpr Device kGpu{DeviceType::kCuda, 0, false};
constexpr i64 kDsv4Page = 37440;              // bytes
constexpr i64 kFollowers = 3, kApart = 1024;  // whose rows of the host begin so many rows, or pages, apart

struct Case {
  i64 requests = 1, steps = 4, top_k = 2048, hot = 4096, bytes = 576, misses = 782, context = 65536;
  bool identity = true;   // slot t holds token t, the state after a prefill
  bool one_host = false;  // all requests share their host rows, as in sglang's benchmark
  bool ordered = false;   // each step: first what is resident, then what misses, as in sglang's benchmark; otherwise in random order
  i64 pairs = 1;          // 2: K and V
  bool paged = false;     // DSv4 pages; a row has 584 bytes then
  i64 sm_budget = 0;
  int rounds = 21;  // of the measurement
};

/// Device memory with the content that a measured call starts from.
class Restored {
 public:
  explicit Restored(std::size_t bytes) : now_(bytes), pristine_(bytes) {}
  template <class T>
  void set(const std::vector<T>& values) {
    pristine_.set(values);
  }
  void restore(cudaStream_t stream) const {
    cudaMemcpyAsync(now_.data(), pristine_.data(), now_.bytes(), cudaMemcpyDeviceToDevice, stream);
  }
  TensorView view(DType dtype, std::initializer_list<i64> shape) const { return now_.view(dtype, shape); }
  void* data() const { return now_.data(); }

 private:
  GpuArray now_, pristine_;
};

/// 512 MiB of pinned memory for all cases.
GpuArray& host_pool() {
  static GpuArray pool(std::size_t{512} << 20, GpuArray::Place::kPinned);
  return pool;
}

struct World {
  Case c;
  i64 host_rows, device_rows, W;
  std::vector<std::unique_ptr<GpuArray>> memory;
  TensorView tokens, out, lens, ids, host_locs, device[2], host[2], plan_src, plan_dst, plan_count, unique;
  std::vector<i32> resident;  // token of each slot

  template <class T>
  TensorView array(DType dtype, std::initializer_list<i64> shape, const std::vector<T>& values = {}) {
    i64 n = 1;
    for (const i64 s : shape) n *= s;
    memory.push_back(std::make_unique<GpuArray>(at(std::max<i64>(n, 1)) * sizeof(T)));
    if (!values.empty()) memory.back()->set(values);
    return memory.back()->view(dtype, shape);
  }
  explicit World(const Case& given) : c(given), W(given.hot + 64) {
    std::mt19937 random(1);
    const i64 B = c.requests, S = c.steps, K = c.top_k, L = c.context;
    // Rows as they lie, or whole pages of 64.
    const i64 row = c.paged ? kDsv4Page : c.bytes, each = c.paged ? 64 : 1,
              all_units = static_cast<i64>(host_pool().bytes()) / row / c.pairs;
    const i64 units = all_units - kFollowers * kApart;
    host_rows = units * each;
    device_rows = (B * W + each - 1) / each * each;
    for (i64 i = 0; i < c.pairs; ++i) {
      host[i] = TensorView(host_pool().data<std::byte>() + i * all_units * row, DType::kUInt8, {units, row}, {DeviceType::kCpu, 0, true});
      device[i] = array<std::uint8_t>(DType::kUInt8, {device_rows / each, row});
    }
    std::vector<i64> rows(at(B * L)), all(at(B));
    for (i64& r : rows) r = static_cast<i64>(random()) % host_rows;
    for (i64 b = 1; b < B && c.one_host; ++b) std::copy_n(rows.begin(), L, rows.begin() + b * L);
    std::iota(all.begin(), all.end(), 0);
    host_locs = array(DType::kInt64, {B, L}, rows), ids = array(DType::kInt64, {B}, all);
    lens = array(DType::kInt32, {B, S}, std::vector<i32>(at(B * S), static_cast<i32>(L)));
    std::vector<i32> order(at(L));
    std::iota(order.begin(), order.end(), 0);
    if (!c.identity) std::shuffle(order.begin(), order.end(), random);
    resident.assign(order.begin(), order.begin() + c.hot);
    std::vector<i32> others(order.begin() + c.hot, order.end()), t;
    std::shuffle(others.begin(), others.end(), random);
    const i64 fresh = c.misses / S;
    for (i64 b = 0; b < B; ++b) {
      const i64 skip = (b * 997) % (static_cast<i64>(others.size()) - c.misses + 1);
      for (i64 s = 0; s < S; ++s) {
        std::vector<i32> row;
        const i64 mine = s + 1 < S ? fresh : c.misses - fresh * (S - 1);
        for (i64 i = 0; i < K - mine; ++i) row.push_back(resident[at((i + 137 * s) % c.hot)]);
        for (i64 i = 0; i < mine; ++i) row.push_back(others[at(skip + s * fresh + i)]);
        if (!c.ordered) std::shuffle(row.begin(), row.end(), random);
        t.insert(t.end(), row.begin(), row.end());
      }
    }
    tokens = array(DType::kInt32, {B, S, K}, t), out = array<i32>(DType::kInt32, {B, S, K});
    plan_src = array<i64>(DType::kInt64, {B, S * K}), plan_dst = array<i32>(DType::kInt32, {B, S * K});
    plan_count = array<i32>(DType::kInt32, {B}), unique = array<i32>(DType::kInt32, {B});
  }
  KvBuffers buffers() const {
    KvBuffers b;
    b.host_cache = host[0], b.device_buffer = device[0];
    if (c.pairs == 2) b.host_cache_v = host[1], b.device_buffer_v = device[1];
    return b;
  }
  /// Followers have caches and pools of their own: rows that several of them read from one place would cross the link fewer times.
  std::vector<KvBuffers> followers() {
    std::vector<KvBuffers> all;
    for (i64 f = 0; f < kFollowers; ++f) {
      KvBuffers b = buffers();
      for (TensorView* cache : {&b.host_cache, &b.host_cache_v})
        if (cache->data) cache->data = static_cast<std::byte*>(cache->data) + (f + 1) * kApart * cache->sizes[1];
      for (TensorView* pool : {&b.device_buffer, &b.device_buffer_v})
        if (pool->data) *pool = array<std::uint8_t>(DType::kUInt8, {pool->sizes[0], pool->sizes[1]});
      all.push_back(b);
    }
    return all;
  }
  RowLayout layout() const { return c.paged ? RowLayout::kDsv4Paged : RowLayout::kLinear; }
  MissPlan plan() const { return {plan_src, plan_dst, plan_count}; }
  void expect_misses(const TensorView& counts) const {
    std::vector<i32> n(at(c.requests));
    cudaMemcpy(n.data(), counts.data, n.size() * 4, cudaMemcpyDeviceToHost);
    if (!std::all_of(n.begin(), n.end(), [&](i32 x) { return x == c.misses; }))
      throw Error(ErrorKind::kInternal, "internal error: the benchmark's calls do not miss as they should");
  }
  Report::Keys keys() const {
    Report::Keys k{{"bytes", std::to_string(c.bytes)},       {"hot", std::to_string(c.hot)},     {"misses", std::to_string(c.misses)},
                   {"requests", std::to_string(c.requests)}, {"steps", std::to_string(c.steps)}, {"top_k", std::to_string(c.top_k)}};
    if (c.context != Case{}.context) k["context"] = std::to_string(c.context);
    if (!c.identity) k["residency"] = "shuffled";
    if (c.one_host) k["host_rows"] = "shared";
    if (c.ordered) k["order"] = "misses_last";
    if (c.pairs == 2) k["pairs"] = "2";
    if (c.paged) k["layout"] = "dsv4";
    if (c.sm_budget) k["sm_budget"] = std::to_string(c.sm_budget);
    return k;
  }
};

constexpr const char* kFloor = "bare gather of as many scattered rows, measured";
void floor_of(Gpu& gpu, const Case& c, i64 layers, Result& r) {
  r.floor_us = c.misses > 0 ? gpu.host_gather_us(layers * c.pairs * c.requests * c.misses, c.bytes) : gpu.launch_us();
  r.floor = c.misses > 0 ? kFloor : "an empty kernel, measured";
}

enum class Parts { kSwap, kFollowers, kAll };
/// The native state and, where asked, its followers and sglang's state.
void swaps(Report& report, Gpu& gpu, const Case& c, Parts parts = Parts::kSwap) {
  World w(c);
  const i64 B = c.requests, S = c.steps, K = c.top_k, W = w.W;
  const SwapShape shape{B, c.hot, W - c.hot, c.context};
  struct alignas(64) Line {  // the alignment that a state asks for
    std::byte at[64];
  };
  std::vector<Line> block(at(swap_state_bytes(shape)) / sizeof(Line));
  SwapState host = swap_state_view(shape, block.data());
  reset_swap_state(host);
  for (i64 b = 0; b < B; ++b)
    for (i64 s = 0; s < W; ++s) {
      host.slot_locs.as<i32>()[b * W + s] = static_cast<i32>(b * W + s);
      if (s >= c.hot) continue;
      host.slot_tokens.as<i32>()[b * W + s] = w.resident[at(s)];
      host.slot_stamps.as<i32>()[b * c.hot + s] = static_cast<i32>(2 + (s * 7919) % 12);  // some calls ago, as in a life of calls
      host.clock.as<i32>()[b] = 7;
      const i64 t = b * c.context + w.resident[at(s)];
      if (host.token_slots.dtype == DType::kInt16)
        host.token_slots.as<std::int16_t>()[t] = static_cast<std::int16_t>(s);
      else
        host.token_slots.as<i32>()[t] = static_cast<i32>(s);
    }
  Restored state(block.size() * sizeof(Line));
  state.set(block);
  SwapInParams p;
  p.state = swap_state_view(shape, state.data(), kGpu);
  p.top_k_tokens = w.tokens, p.top_k_device_locs = w.out, p.seq_lens = w.lens, p.req_pool_indices = w.ids;
  p.host_cache_locs = w.host_locs, p.buffers = w.buffers(), p.layout = w.layout(), p.unique_misses = w.unique, p.sm_budget = c.sm_budget;
  const auto restore = [&](Stream s, int) { state.restore(static_cast<cudaStream_t>(s.handle)); };
  Result r;
  floor_of(gpu, c, 1, r);
  r.ours_us = gpu.cold_us([&](Stream s, int) { swap_in(p, s); }, restore, c.rounds);
  w.expect_misses(w.unique);
  report.add("swap", w.keys(), r);
  if (parts == Parts::kSwap) return;

  p.plan = w.plan();
  const std::vector<KvBuffers> followers = w.followers();
  ReplayPlanParams replay;
  replay.miss_src = w.plan_src, replay.miss_dst = w.plan_dst, replay.miss_count = w.plan_count;
  replay.followers = followers.data(), replay.num_followers = kFollowers, replay.layout = w.layout();
  replay.sm_budget = c.sm_budget;
  Report::Keys with_followers = w.keys();
  with_followers["followers"] = "3";
  floor_of(gpu, c, 4, r);
  SwapInParams both = p;
  both.followers = followers.data(), both.num_followers = kFollowers;
  r.ours_us = gpu.cold_us([&](Stream s, int) { swap_in(both, s); }, restore);
  report.add("swap_and_followers", with_followers, r);
  r.ours_us = gpu.cold_us(
      [&](Stream s, int) {
        swap_in(p, s);
        replay_plan(replay, s);
      },
      restore);
  with_followers["calls"] = "2";
  report.add("swap_and_followers", with_followers, r);
  with_followers.erase("calls");
  floor_of(gpu, c, 3, r);
  r.ours_us = gpu.cold_us([&](Stream s, int) { replay_plan(replay, s); });
  report.add("follower_replay", with_followers, r);

  if (parts != Parts::kAll) return;
  i64 hash = 1;
  while (hash < 2 * c.hot) hash *= 2;
  const i64 columns = std::max(4 * B, 5 * S * K);
  Restored index(at(B * 2 * hash * 8)), policy(at((B + 1) * c.hot * 4)), slots(at(B * W * 4));
  std::vector<i64> entries(at(B * 2 * hash), -1);
  for (i64 b = 0; b < B; ++b)
    for (i64 s = 0; s < c.hot; ++s) {
      const i64 t = w.resident[at(s)];
      i64* const bank = entries.data() + b * 2 * hash;
      i64& first = bank[static_cast<std::uint32_t>(t) * 2654435761u & static_cast<std::uint32_t>(hash - 1)];
      if (first == -1) first = s << 32 | t;  // those that find their place taken are found by our kernel all the same
    }
  index.set(entries);
  policy.set(std::vector<i32>(at((B + 1) * c.hot), 0));
  std::vector<i32> held(at(B * W), -1), locs(at(B * W));
  std::iota(locs.begin(), locs.end(), 0);
  for (i64 b = 0; b < B; ++b) std::copy(w.resident.begin(), w.resident.end(), held.begin() + b * W);
  slots.set(held);
  SpecSwapParams x;
  x.top_k_tokens = w.tokens, x.top_k_device_locs = w.out, x.req_pool_indices = w.ids, x.host_cache_locs = w.host_locs,
  x.buffers = w.buffers();
  x.seq_lens = w.lens, x.seq_lens.ndim = 1, x.seq_lens.sizes[0] = B * S, x.seq_lens.strides[0] = 1;
  x.device_buffer_tokens = slots.view(DType::kInt32, {B, W}), x.device_buffer_locs = w.array(DType::kInt32, {B, W}, locs);
  x.cache_index = index.view(DType::kInt64, {B, 2, hash}), x.cache_policy = policy.view(DType::kInt32, {B + 1, c.hot});
  x.scratch_locs = w.array(DType::kInt32, {B, 64}, std::vector<i32>(at(B * 64), -1));
  x.scratch_state = w.array(DType::kInt32, {B + 1, columns}, std::vector<i32>(at((B + 1) * columns), 0));
  x.num_real_reqs = w.array(DType::kInt32, {1}, std::vector<i32>{static_cast<i32>(B)});
  x.limits = SpecSwapParams::Limits::kNone;
  floor_of(gpu, c, 1, r);
  r.ours_us = gpu.cold_us([&](Stream s, int) { swap_in_spec(x, s); },
                          [&](Stream s, int) {
                            for (const Restored* a : {&index, &policy, &slots}) a->restore(static_cast<cudaStream_t>(s.handle));
                          });
  report.add("spec_swap", w.keys(), r);
  // Four layers that all are anchors; one after the other they want other rows of the same state.
  Report::Keys four = w.keys();
  four["layers"] = "4";
  floor_of(gpu, c, 4, r);
  const auto again = [&](Stream s, int) {
    for (const Restored* a : {&index, &policy, &slots}) a->restore(static_cast<cudaStream_t>(s.handle));
  };
  std::vector<std::unique_ptr<Restored>> others;
  std::vector<SpecSwapParams> layers(4, x);
  for (std::size_t l = 1; l < layers.size(); ++l) {
    others.push_back(std::make_unique<Restored>(at(B * 2 * hash * 8))), others.back()->set(entries);
    layers[l].cache_index = others.back()->view(DType::kInt64, {B, 2, hash});
    others.push_back(std::make_unique<Restored>(at((B + 1) * c.hot * 4))), others.back()->set(std::vector<i32>(at((B + 1) * c.hot), 0));
    layers[l].cache_policy = others.back()->view(DType::kInt32, {B + 1, c.hot});
    others.push_back(std::make_unique<Restored>(at(B * W * 4))), others.back()->set(held);
    layers[l].device_buffer_tokens = others.back()->view(DType::kInt32, {B, W});
  }
  r.ours_us = gpu.cold_us(
      [&](Stream s, int) {
        for (const SpecSwapParams& l : layers) swap_in_spec(l, s);
      },
      [&](Stream s, int i) {
        again(s, i);
        for (const auto& a : others) a->restore(static_cast<cudaStream_t>(s.handle));
      });
  report.add("spec_swap", four, r);
}

void single(Report& report, Gpu& gpu, Case c) {
  c.steps = 1;
  World w(c);
  const i64 B = c.requests, W = w.W;
  std::vector<i32> held(at(B * W), -1), locs(at(B * W));
  std::vector<std::int16_t> order(at(B * c.hot));
  std::iota(locs.begin(), locs.end(), 0);
  for (i64 b = 0; b < B; ++b) {
    std::copy(w.resident.begin(), w.resident.end(), held.begin() + b * W);
    std::iota(order.begin() + b * c.hot, order.begin() + (b + 1) * c.hot, std::int16_t{0});
  }
  Restored slots(at(B * W * 4)), lru(at(B * c.hot * 2));
  slots.set(held), lru.set(order);
  SwapInSingleParams p;
  const auto flat = [](TensorView v) {
    v.ndim = 2, v.sizes[1] = v.sizes[2], v.strides[1] = 1;
    return v;
  };
  p.top_k_tokens = flat(w.tokens), p.top_k_device_locs = flat(w.out), p.req_pool_indices = w.ids, p.host_cache_locs = w.host_locs;
  p.seq_lens = w.array(DType::kInt32, {B}, std::vector<i32>(at(B), static_cast<i32>(c.context))), p.buffers = w.buffers(),
  p.layout = w.layout();
  p.device_buffer_tokens = slots.view(DType::kInt32, {B, W}), p.device_buffer_locs = w.array(DType::kInt32, {B, W}, locs);
  p.lru_slots = lru.view(DType::kInt16, {B, c.hot});
  Result r;
  floor_of(gpu, c, 1, r);
  r.ours_us = gpu.cold_us([&](Stream s, int) { swap_in_single(p, s); },
                          [&](Stream s, int) {
                            for (const Restored* a : {&slots, &lru}) a->restore(static_cast<cudaStream_t>(s.handle));
                          });
  report.add("single_swap", w.keys(), r);
}

/// Rows of DSv4 pages by index, from the host to the GPU in every layer.
void transfer(Report& report, Gpu& gpu, i64 rows, i64 layers) {
  const i64 pages = static_cast<i64>(host_pool().bytes()) / kDsv4Page / layers, there = (rows + 63) / 64;
  std::vector<std::unique_ptr<GpuArray>> memory;
  std::vector<TensorView> src, dst;
  for (i64 l = 0; l < layers; ++l) {
    src.emplace_back(host_pool().data<std::byte>() + l * pages * kDsv4Page, DType::kUInt8, std::initializer_list<i64>{pages, kDsv4Page},
                     Device{DeviceType::kCpu, 0, true});
    memory.push_back(std::make_unique<GpuArray>(at(there * kDsv4Page)));
    dst.push_back(memory.back()->view(DType::kUInt8, {there, kDsv4Page}));
  }
  std::mt19937 random(1);
  std::vector<i64> from(at(rows)), to(at(rows));
  for (i64& f : from) f = static_cast<i64>(random()) % (pages * 64);
  std::iota(to.begin(), to.end(), 0);
  std::shuffle(to.begin(), to.end(), random);
  const auto index = [&](const std::vector<i64>& v) {
    memory.push_back(std::make_unique<GpuArray>(v.size() * sizeof(i64)));
    memory.back()->set(v);
    return memory.back()->view(DType::kInt64, {rows});
  };
  TransferPagedParams p;
  p.src = src.data(), p.dst = dst.data(), p.num_layers = layers, p.src_indices = index(from), p.dst_indices = index(to);
  Result r;
  r.floor_us = gpu.host_gather_us(rows * layers, 584);
  r.floor = kFloor;
  r.ours_us = gpu.cold_us([&](Stream s, int) { transfer_paged(p, s); });
  report.add("transfer_paged", {{"bytes", "584"}, {"layers", std::to_string(layers)}, {"rows", std::to_string(rows)}}, r);
}

/// The window of a verify: four groups of an anchor and three followers, four positions a request, three of them accepted.
void windows(Report& report, Gpu& gpu, i64 requests) {
  constexpr i64 kGroups = 4, kLayers = 16, kBytes = 576, kHot = 4096, kTail = 64, kWidth = 4, kAccepted = 3;
  const i64 B = requests, L = 8192, W = kHot + kTail, host_rows = static_cast<i64>(host_pool().bytes()) / kLayers / kBytes;
  std::vector<std::unique_ptr<GpuArray>> memory;
  const auto array = [&](DType dtype, std::initializer_list<i64> shape, const auto& values) {
    memory.push_back(std::make_unique<GpuArray>(values.size() * sizeof(values[0])));
    memory.back()->set(values);
    return memory.back()->view(dtype, shape);
  };
  std::vector<i32> locs(at(B * W)), reserved(at(B * L));
  std::iota(locs.begin(), locs.end(), 0);
  std::mt19937 random(1);
  for (i32& r : reserved) r = static_cast<i32>(random() % static_cast<unsigned>(host_rows));
  std::vector<i64> ids(at(B));
  std::iota(ids.begin(), ids.end(), 0);
  const TensorView slot_locs = array(DType::kInt32, {B, W}, locs);
  std::vector<KvBuffers> layers(at(kLayers));
  for (i64 l = 0; l < kLayers; ++l) {
    memory.push_back(std::make_unique<GpuArray>(at(B * W * kBytes)));
    layers[at(l)].device_buffer = memory.back()->view(DType::kUInt8, {B * W, kBytes});
    layers[at(l)].host_cache =
        TensorView(host_pool().data<std::byte>() + l * host_rows * kBytes, DType::kUInt8, {host_rows, kBytes}, {DeviceType::kCpu, 0, true});
  }
  std::vector<WindowGroup> groups(at(kGroups));
  for (i64 g = 0; g < kGroups; ++g)
    groups[at(g)] = {
        {array(DType::kInt32, {B, W}, std::vector<i32>(at(B * W), -1)), slot_locs,
         array(DType::kInt32, {B, kHot}, std::vector<i32>(at(B * kHot), 0)),
         array(DType::kInt16, {B, L}, std::vector<std::int16_t>(at(B * L), -1)), array(DType::kInt32, {B}, std::vector<i32>(at(B), 7))},
        layers.data() + g * (kLayers / kGroups),
        kLayers / kGroups};
  Restored lengths(at(B) * 4);
  lengths.set(std::vector<i32>(at(B), 6000));
  OpenWindowParams open;
  open.groups = groups.data(), open.num_groups = kGroups, open.requests = array(DType::kInt64, {B}, ids);
  open.widths = array(DType::kInt32, {B}, std::vector<i32>(at(B), kWidth)), open.lengths = lengths.view(DType::kInt32, {B});
  AcceptWindowParams accept;
  accept.groups = open.groups, accept.num_groups = kGroups, accept.requests = open.requests, accept.widths = open.widths;
  accept.accepted = array(DType::kInt32, {B}, std::vector<i32>(at(B), kAccepted)), accept.lengths = open.lengths;
  accept.reserved_rows = array(DType::kInt32, {B, L}, reserved);
  accept.host_cache_locs = array(DType::kInt32, {B, L}, std::vector<i32>(at(B * L), -1));
  const auto restore = [&](Stream s, int) { lengths.restore(static_cast<cudaStream_t>(s.handle)); };
  const Report::Keys keys{{"bytes", std::to_string(kBytes)},       {"groups", std::to_string(kGroups)}, {"layers", std::to_string(kLayers)},
                          {"accepted", std::to_string(kAccepted)}, {"requests", std::to_string(B)},     {"width", std::to_string(kWidth)}};
  Result r;
  r.floor_us = gpu.launch_us();
  r.floor = "an empty kernel, measured";
  r.ours_us = gpu.cold_us([&](Stream s, int) { open_window(open, s); }, restore);
  report.add("open_window", keys, r);
  r.floor_us = static_cast<double>(B * kAccepted * kLayers * kBytes) / gpu.device_to_host_gbs() * 1e-3;
  r.floor = "the accepted rows' bytes by the copy engine's measured rate to the host";
  r.ours_us = gpu.cold_us([&](Stream s, int) { accept_window(accept, s); }, restore);
  report.add("accept_window", keys, r);
}

void run(Report& report) {
  Gpu gpu(report);
  if (report.quick()) {
    Case c;
    c.requests = 2, c.steps = 2, c.top_k = 64, c.hot = 128, c.misses = 16, c.context = 1024;
    swaps(report, gpu, c, Parts::kAll);
    single(report, gpu, c);
    windows(report, gpu, 2);
    transfer(report, gpu, 64, 1);
    c.bytes = 584, c.paged = true;
    swaps(report, gpu, c, Parts::kFollowers);
    single(report, gpu, c);
    return;
  }
  for (const i64 requests : {1, 8, 64}) windows(report, gpu, requests);
  for (const i64 requests : {1, 2, 4, 8, 16, 32, 64}) swaps(report, gpu, {requests}, Parts::kAll);
  for (const i64 requests : {128, 256}) {
    Case c{requests};
    c.context = 16384;
    swaps(report, gpu, c, requests == 128 ? Parts::kFollowers : Parts::kSwap);
  }
  for (const i64 requests : {1, 8, 16, 64}) {
    Case c{requests};
    c.misses = 0;
    swaps(report, gpu, c);
  }
  for (const i64 requests : {1, 8}) {
    Case c{requests};
    c.ordered = true;
    swaps(report, gpu, c);
  }
  // One axis at a time around 8 requests.
  const auto vary = [&](auto&& change, Parts parts = Parts::kSwap) {
    Case c{8};
    change(c);
    swaps(report, gpu, c, parts);
  };
  for (const i64 misses : {8, 200, 1800}) vary([&](Case& c) { c.misses = misses; });
  vary([&](Case& c) { c.steps = 2, c.misses = 4096; });  // all missing
  for (const i64 steps : {1, 2, 3, 5, 6, 7, 8}) vary([&](Case& c) { c.steps = steps; });
  vary([&](Case& c) { c.identity = false; });
  vary([&](Case& c) { c.one_host = true; });
  for (const i64 hot : {6144, 8192, 16384}) vary([&](Case& c) { c.hot = hot; });
  for (const i64 context : {16384, 262144, 1048576}) vary([&](Case& c) { c.context = context; });
  for (const i64 budget : {4, 8, 16, 32}) vary([&](Case& c) { c.sm_budget = budget; }, Parts::kFollowers);
  for (i64 bytes = 512; bytes <= 1600; bytes += 16)
    if (bytes != 576) vary([&](Case& c) { c.bytes = bytes, c.rounds = 7; });
  for (const i64 hot : {4096, 8192})
    for (const i64 requests : {1, 10, 100})
      for (const i64 misses : {410, 2}) {
        Case c{requests};
        c.bytes = 512, c.hot = hot, c.misses = misses, c.context = 16384;
        single(report, gpu, c);
      }
  // The other kinds of rows: DSv4 pages, K and V.
  for (const i64 requests : {1, 8})
    for (const bool paged : {true, false}) {
      Case c{requests};
      c.paged = paged, c.pairs = paged ? 1 : 2, c.bytes = paged ? 584 : 512;
      swaps(report, gpu, c, Parts::kFollowers);
      c.misses = 410, c.context = 16384;
      single(report, gpu, c);
    }
  for (const i64 layers : {1, 4})
    for (const i64 rows : {64, 782, 6256}) transfer(report, gpu, rows, layers);
}

const bool registered = add_gpu_family("hisparse", run);

}  // namespace

}  // namespace specstate::bench
