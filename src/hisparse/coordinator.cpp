// The tables and free lists of the request life cycle. Device rows belong to a request from admission to its end, so growth never fails;
// growing only gives more of its hot slots their rows. Host rows are taken by pages as a request gets longer.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <stdexcept>
#include <string>

#include "core/dispatch.hpp"
#include "core/match.hpp"
#include "hisparse/check.hpp"
#include "hisparse/layout.hpp"
#include "hisparse/life.hpp"
#include "specstate/hisparse_coordinator.hpp"

namespace specstate::hisparse {

namespace {

using core::throw_runtime;
using core::throw_value;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& got) {
  throw_value(fmt::format("Coordinator: {}: expected {}, got {}.", name, expected, got));
}
/// `expected` is a format; its text is made only if it is needed.
template <class... Args>
void require(bool ok, const char* name, std::int64_t got, fmt::format_string<Args...> expected, Args&&... args) {
  if (!ok) refuse(name, fmt::format(expected, std::forward<Args>(args)...), std::to_string(got));
}
const char* name_of(RequestState s) {
  switch (s) {
    case RequestState::kFree: return "free";
    case RequestState::kActive: return "active";
    case RequestState::kVerifying: return "verifying";
    case RequestState::kRetracted: return "retracted";
  }
  return "?";
}

struct Request {
  RequestState state = RequestState::kFree;
  std::int64_t length = 0;           // committed positions
  std::int64_t width = 0;            // of the open window
  std::int64_t ahead = 0;            // steps begun whose outcome is not known here
  std::int64_t hot_rows = 0;         // hot slots that have a row
  std::vector<std::int32_t> rows;    // device rows it owns: hot, tail, scratch
  std::vector<std::int64_t> pages;   // host pages it owns
  std::vector<std::int64_t> staged;  // [layers] positions below which a layer's host rows are written
};

/// What an anchor's swap recorded for its followers: on the CPU in vectors that grow, on a GPU in the coordinator's block.
struct Plan {
  std::vector<std::int64_t> src;
  std::vector<std::int32_t> dst, count;
  MissPlan view;  // of the swap that it holds: [B, S * K], [B]
};

/// An anchor with its followers: one selection, one residency.
struct Group {
  std::int64_t anchor = 0;           // local layer
  std::vector<std::int64_t> layers;  // local, the anchor first
  SwapState state;
  MissPlan block;           // on a GPU: [R, most positions of a swap], where there are followers
  std::vector<Plan> plans;  // by round; the first `rounds` stand
  std::int64_t rounds = 0;
};

/// Hands out places in one block, each on a line of its own. Without a block it only counts.
struct Carver {
  std::byte* base = nullptr;
  std::int64_t used = 0;
  Device device = {};
  TensorView operator()(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView t(base ? base + used : nullptr, dtype, shape, device);
    used += layout::align_up(t.numel() * size_of(dtype));
    return t;
  }
};

Integers integers(const TensorView& t) {
  return {t.data, t.ndim > 0 ? t.strides[0] : 0, t.ndim > 1 ? t.strides[1] : 0, static_cast<int>(size_of(t.dtype))};
}
Strided2<std::int32_t> table(const TensorView& t) { return {t.as<std::int32_t>(), t.strides[0], t.strides[1]}; }

}  // namespace

struct Coordinator::Impl {
  CoordinatorConfig config;
  Device device;                                          // of the device buffers and of all tables
  std::int64_t layers = 0, columns = 0, per_request = 0;  // device rows: hot + tail; + scratch
  std::int64_t most_selected = 0;                         // positions of a request in one swap that has followers, on a GPU
  std::vector<KvBuffers> buffers;
  core::Checker known{"Coordinator"};  // knows all buffers: a call's checker is a copy, so what the call writes lies apart from them
  std::deque<LayerNames> names;        // [layers]
  std::vector<std::int64_t> followed;  // [layers] rounds of its anchor that a follower was asked to copy
  std::vector<std::int64_t> copied;    // [layers] and those that it has: perhaps more, where a request ended before
  std::vector<Group> groups;
  std::unique_ptr<std::byte[]> memory;                                                   // of the tables, on the CPU
  Life life;                                                                             // the tables, as both backends see them
  TensorView slot_locs, scratch_locs, host_locs, pages, lengths, ids, widths, accepted;  // [R, H+P], [R, C], [R, L], [R, ...], [R] each
  std::vector<std::int32_t> free_device;                                                 // last in, first out
  std::vector<std::int64_t> free_pages;
  std::vector<Request> requests;
  CoordinatorStats stats;
  Plan spare;                              // what the next swap records into, on the CPU
  std::vector<std::int32_t> misses, hits;  // [B] of a swap, on the CPU

  bool on_gpu() const { return device.type == DeviceType::kCuda; }
  template <class Cpu, class Cuda>
  void on_backend(Cpu&& cpu, Cuda&& cuda) const {
    core::on_backend("Coordinator", device, std::forward<Cpu>(cpu), std::forward<Cuda>(cuda));
  }
  /// Everything that needs no buffers.
  void set_up(const CoordinatorConfig& given, std::int64_t local_layers, bool gpu);
  /// Places of all tables.
  void carve(Carver& take) {
    const CoordinatorConfig& c = config;
    const std::int64_t R = c.requests, page_entries = ceil_div(c.context, c.page_size);
    for (Group& g : groups) {
      g.state.slot_tokens = take(DType::kInt32, {R, columns});
      g.state.slot_stamps = take(DType::kInt32, {R, c.hot});
      g.state.token_slots = take(c.hot <= layout::kMaxShortSlots ? DType::kInt16 : DType::kInt32, {R, c.context});
      g.state.clock = take(DType::kInt32, {R});
      if (on_gpu() && g.layers.size() > 1)
        g.block = {take(DType::kInt64, {R, most_selected}), take(DType::kInt32, {R, most_selected}), take(DType::kInt32, {R})};
    }
    slot_locs = take(DType::kInt32, {R, columns});
    scratch_locs = take(DType::kInt32, {R, c.scratch});
    host_locs = take(on_gpu() ? DType::kInt32 : DType::kInt64, {R, c.context});
    pages = take(DType::kInt32, {R, page_entries});
    for (TensorView* t : {&lengths, &ids, &widths, &accepted}) *t = take(DType::kInt32, {R});
  }
  /// What the backends are told of the tables, once they have their places.
  void describe() {
    const CoordinatorConfig& c = config;
    WindowArgs& w = life.window;
    w.op = "Coordinator";
    w.lengths = {lengths.as<std::int32_t>(), 1};
    w.reserved = integers(pages);
    w.host_locs = integers(host_locs);
    w.request_slots = c.requests, w.context = c.context, w.hot = c.hot, w.tail = c.tail, w.page = c.page_size;
    w.host_rows = c.host_rows, w.device_rows = c.device_rows;
    life.pages = table(pages);
    life.scratch = table(scratch_locs);
    life.scratch_rows = c.scratch;
    life.page_entries = pages.sizes[1];
    for (Group& g : groups) {
      g.state.slot_locs = slot_locs;
      const SwapState& t = g.state;
      life.groups.push_back(
          {table(t.slot_tokens), table(slot_locs), table(t.slot_stamps), integers(t.token_slots), {t.clock.as<std::int32_t>(), 1}});
    }
  }
  const CopyArgs& rows(std::int64_t l) const { return life.layers[at(l)].copy; }
  Group& group(std::int64_t l) { return groups[at(life.layers[at(l)].group)]; }
  const Group& group(std::int64_t l) const { return groups[at(life.layers[at(l)].group)]; }

  // ---------------------------------------------------------------------------------------------------------- checks
  std::int64_t local(std::int64_t layer) const {
    require(layer >= config.first_layer && layer < config.first_layer + layers, "layer", layer, "{}..{}", config.first_layer,
            config.first_layer + layers - 1);
    return layer - config.first_layer;
  }
  std::int64_t slot_id(std::int64_t r) const {
    require(r >= 0 && r < config.requests, "request", r, "0..{}", config.requests - 1);
    return r;
  }
  const Request& in_state(std::int64_t r, std::initializer_list<RequestState> allowed) const {
    const Request& q = requests[at(slot_id(r))];
    if (std::find(allowed.begin(), allowed.end(), q.state) == allowed.end()) {
      std::string expected;
      for (RequestState s : allowed) expected += (expected.empty() ? "" : " or ") + std::string(name_of(s));
      refuse("request", fmt::format("request {} to be {}", r, expected), name_of(q.state));
    }
    return q;
  }
  Request& in_state(std::int64_t r, std::initializer_list<RequestState> allowed) {
    return const_cast<Request&>(std::as_const(*this).in_state(r, allowed));
  }
  void distinct(std::span<const std::int64_t> ids) const {
    std::vector<std::int64_t> sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());
    if (auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
      refuse("requests", "each request once", fmt::format("request {} again", *twice));
  }

  // ------------------------------------------------------------------------------------------------------ small parts
  std::int64_t page_row(const Request& q, std::int64_t position) const {
    return q.pages[at(position / config.page_size)] * config.page_size + position % config.page_size;
  }
  std::int64_t missing_pages(const Request& q, std::int64_t positions) const {
    return std::max<std::int64_t>(0, ceil_div(positions, config.page_size) - static_cast<std::int64_t>(q.pages.size()));
  }
  void need_pages(std::int64_t pages) const {
    if (pages > static_cast<std::int64_t>(free_pages.size()))
      throw_runtime(fmt::format("HiSparse failed to allocate {} KV slots. {} of {} host rows are free.", pages * config.page_size,
                                static_cast<std::int64_t>(free_pages.size()) * config.page_size,
                                config.host_rows / config.page_size * config.page_size));
  }
  void need_device_rows() const {
    const auto free = static_cast<std::int64_t>(free_device.size());
    const auto refuse = [&](std::string text) {
      throw_runtime(fmt::format("{} {} of {} device rows are free.", text, free, config.device_rows));
    };
    if (free < columns) refuse(fmt::format("HiSparse failed to allocate {} KV slots.", columns));
    if (free < per_request) refuse(fmt::format("HiSparse spec failed to allocate {} scratch slots.", config.scratch));
  }
  void take_pages(std::int64_t r, std::int64_t positions, Stream stream) {
    Request& q = requests[at(r)];
    std::vector<std::int32_t> fresh;
    const auto first = static_cast<std::int64_t>(q.pages.size());
    for (std::int64_t n = missing_pages(q, positions); n > 0; --n) {
      q.pages.push_back(free_pages.back());
      fresh.push_back(static_cast<std::int32_t>(free_pages.back()));
      free_pages.pop_back();
    }
    if (!fresh.empty()) put(&life.pages(r, first), fresh, stream);
  }
  void put(std::int32_t* to, std::span<const std::int32_t> values, Stream stream) const {
    on_backend([&] { cpu::put(to, values, stream); }, [&] { cuda::put(to, values, stream); });
  }
  void give_rows(std::int64_t r, std::int64_t column, std::int64_t n, Stream stream) const {
    const std::span<const std::int32_t> some(requests[at(r)].rows.data() + column, at(n));
    on_backend([&] { cpu::give_rows(life, r, column, some, stream); }, [&] { cuda::give_rows(life, r, column, some, stream); });
  }
  /// Gives hot slots their rows for a request of `positions`, and initialises their markers in every group.
  void grow(std::int64_t r, std::int64_t positions, Stream stream) {
    Request& q = requests[at(r)];
    const std::int64_t want = std::min(config.hot, ceil_div(positions, config.page_size) * config.page_size);
    if (want <= q.hot_rows) return;
    give_rows(r, q.hot_rows, want - q.hot_rows, stream);
    q.hot_rows = want;
  }
  void take_device_rows(std::int64_t r, Stream stream) {
    Request& q = requests[at(r)];
    for (std::int64_t i = 0; i < per_request; ++i) {
      q.rows.push_back(free_device.back());
      free_device.pop_back();
    }
    give_rows(r, config.hot, config.tail, stream);
    if (config.scratch > 0) put(&life.scratch(r, 0), std::span(q.rows).subspan(at(columns)), stream);
  }
  /// `whole`: host rows and the length too.
  void drop(std::int64_t r, bool whole, Stream stream) {
    Request& q = requests[at(r)];
    if (!q.rows.empty()) settle(stream);  // its rows may soon be another's: what followers owe is copied while they are its own
    while (!q.rows.empty()) {
      free_device.push_back(q.rows.back());
      q.rows.pop_back();
    }
    q.hot_rows = 0;
    on_backend([&] { cpu::drop(life, r, 1, whole, stream); }, [&] { cuda::drop(life, r, 1, whole, stream); });
  }
  /// The copies that follower `l` owes for the rounds before `end`, in order. Slots that an anchor's swap filled stay filled until another
  /// swap of that anchor takes them, and host rows stand until the request ends: they are as good as at the time of the swap.
  void catch_up(Group& g, std::int64_t l, std::int64_t end, Stream stream) {
    for (; copied[at(l)] < end; ++copied[at(l)]) replay(g.plans[at(copied[at(l)])], {&l, 1}, stream);
  }
  void settle(Stream stream) {
    for (Group& g : groups)
      for (const std::int64_t l : g.layers)
        if (l != g.anchor) catch_up(g, l, g.rounds, stream);
  }
  void replay(const Plan& plan, std::span<const std::int64_t> followers, Stream stream) {
    std::vector<KvBuffers> to;
    for (const std::int64_t l : followers) to.push_back(buffers[at(l)]);
    ReplayPlanParams p;
    p.miss_src = plan.view.miss_src;
    p.miss_dst = plan.view.miss_dst;
    p.miss_count = plan.view.miss_count;
    p.followers = to.data();
    p.num_followers = static_cast<std::int64_t>(to.size());
    p.layout = config.layout;
    p.sm_budget = config.sm_budget;
    replay_plan(p, stream);
    for (const std::int64_t l : followers)
      for (const std::int32_t n : plan.count) stats.bytes_to_device += n * rows(l).pairs * rows(l).item_bytes;
  }
  /// Positions [first, last), committed, go from the host into the hot slots of their number.
  void load(std::int64_t r, std::int64_t first, std::int64_t last, Stream stream) const {
    on_backend([&] { cpu::load(life, r, first, last, stream); }, [&] { cuda::load(life, r, first, last, stream); });
  }
  /// Opens windows, or ends them if `taken` is given; the arrays are where the tables are.
  void window(const Integers& batch, std::int64_t n, const std::int32_t* num_real, const Integers& width, const Integers& taken,
              const TensorView& locs, Stream stream) const {
    WindowArgs a = life.window;
    a.requests = batch;
    a.batch = n;
    a.num_real = num_real;
    a.widths = width;
    a.accepted = taken;
    if (locs.given()) a.locs = table(locs), a.locs_width = locs.sizes[1];
    on_backend([&] { cpu::run(a, life.groups, life.layers); }, [&] { cuda::run(a, life.groups, life.layers, stream); });
  }
  /// Numbers that the host knows, where the tables are.
  Integers bring(std::span<const std::int64_t> numbers, const TensorView& room, Stream stream) const {
    if (!on_gpu()) return {numbers.data(), 1, 0, 8};
    const std::vector<std::int32_t> narrow(numbers.begin(), numbers.end());
    put(room.as<std::int32_t>(), narrow, stream);
    return integers(room);
  }
  /// Rows that are copied into a layer's buffers (by number, as in its names) come from elsewhere.
  void apart(const core::Checker& check, const char* name, const TensorView& t, std::int64_t layer, std::initializer_list<int> into) const {
    const std::int64_t l = local(layer);
    const KvBuffers& k = buffers[at(l)];
    const TensorView* const all[4] = {&k.host_cache, &k.device_buffer, &k.host_cache_v, &k.device_buffer_v};
    for (const int i : into)
      check.require(!core::may_overlap(t, *all[i]), name, "memory of its own",
                    fmt::format("memory that overlaps {}", static_cast<const char* const*>(names[at(l)])[i]));
  }
  /// Every accepted row went to the host in every layer.
  void count_backups(std::int64_t accepted) {
    for (const WindowLayer& l : life.layers) stats.bytes_to_host += accepted * l.copy.pairs * l.copy.item_bytes;
  }
  void outcome_known(std::int64_t r) const {
    if (requests[at(r)].ahead > 0)
      refuse("request", fmt::format("request {} with no step under way", r), fmt::format("{} to end", requests[at(r)].ahead));
  }
  void beside_tables(const core::Checker& check, const char* name, const TensorView& t) const {
    check.require(t.device.type == device.type && t.device.index == device.index, name, "memory of " + specstate::name_of(device),
                  specstate::name_of(t.device));
  }
  void first_pair(const void* rows, const char* name) const {
    if (rows == nullptr) refuse(name, "memory", "a null pointer");
  }
  void second_pair(std::int64_t l, const void* rows_v, const char* name) const {
    if ((rows(l).pairs == 2) != (rows_v != nullptr))
      refuse(name, rows(l).pairs == 2 ? "a row of the second pair" : "none: the layer has one pair", rows_v ? "one" : "none");
  }
};

namespace {
bool fits(std::int64_t n, std::int64_t most) { return n >= 0 && n <= most; }
}  // namespace

void Coordinator::Impl::set_up(const CoordinatorConfig& given, std::int64_t local_layers, bool gpu) {
  config = given;
  layers = local_layers;
  device.type = gpu ? DeviceType::kCuda : DeviceType::kCpu;
  CoordinatorConfig& c = config;
  require(layers >= 1, "host_cache", layers, "at least one layer");
  require(c.requests >= 1, "requests", c.requests, ">= 1");
  require(c.page_size >= 1, "page_size", c.page_size, ">= 1");
  require(fits(c.first_layer, INT32_MAX), "first_layer", c.first_layer, "0..{}", INT32_MAX);
  require(c.hot >= 1, "hot", c.hot, ">= 1");
  require(c.top_k >= 0, "top_k", c.top_k, ">= 0");
  require(c.top_k <= c.hot, "hot", c.hot, "at least top_k={} slots", c.top_k);
  require(c.window >= 1, "window", c.window, ">= 1");
  require(c.scratch >= 0, "scratch", c.scratch, ">= 0");
  require(c.context >= 1, "context", c.context, ">= 1");
  require(c.sm_budget >= 0, "sm_budget", c.sm_budget, "0 (any number) or more SMs");
  for (const auto& [name, n] : {std::pair{"hot", c.hot},
                                {"window", c.window},
                                {"tail", c.tail},
                                {"scratch", c.scratch},
                                {"context", c.context},
                                {"requests", c.requests},
                                {"page_size", c.page_size}})
    require(n < (std::int64_t{1} << 31), name, n, "below 2^31");
  if (c.tail == 0) c.tail = 2 * c.window;
  require(c.tail >= c.window, "tail", c.tail, "at least window={} slots", c.window);
  columns = c.hot + c.tail;
  per_request = columns + c.scratch;
  if (!c.anchor_of.empty())
    require(static_cast<std::int64_t>(c.anchor_of.size()) == layers, "anchor_of", static_cast<std::int64_t>(c.anchor_of.size()),
            "{} entries", layers);
  life.layers.resize(at(layers));
  followed.assign(at(layers), 0);
  copied.assign(at(layers), 0);
  for (std::int64_t l = 0; l < layers; ++l) {
    const std::int64_t anchor = c.anchor_of.empty() ? l : fits(c.anchor_of[at(l)], INT64_MAX) ? c.anchor_of[at(l)] - c.first_layer : -1;
    if (anchor == l) {
      life.layers[at(l)].group = static_cast<std::int64_t>(groups.size());
      groups.emplace_back();
      groups.back().anchor = l;
    } else {
      if (anchor < 0 || anchor > l || group(anchor).anchor != anchor)
        refuse("anchor_of", fmt::format("a preceding anchor layer for layer {}", c.first_layer + l), std::to_string(c.anchor_of[at(l)]));
      life.layers[at(l)].group = life.layers[at(anchor)].group;
    }
    group(l).layers.push_back(l);
  }
  if (!gpu) return;
  if (static_cast<std::int64_t>(groups.size()) < layers)
    require(c.top_k >= 1, "top_k", c.top_k, ">= 1 on a GPU, where the plans of followers have a fixed size");
  most_selected = c.top_k > 0 ? std::min(kMaxOccurrences, c.window > kMaxOccurrences / c.top_k ? kMaxOccurrences : c.window * c.top_k) : 0;
}

std::int64_t Coordinator::table_bytes(const CoordinatorConfig& config, std::int64_t layers) {
  Impl m;
  m.set_up(config, layers, true);
  Carver sizes;
  m.carve(sizes);
  return sizes.used;
}

Coordinator::Coordinator(const CoordinatorConfig& given, std::span<const KvBuffers> layers, Stream stream)
    : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  m.set_up(given, static_cast<std::int64_t>(layers.size()), !layers.empty() && layers[0].device_buffer.device.type == DeviceType::kCuda);
  CoordinatorConfig& c = m.config;
  m.buffers.assign(layers.begin(), layers.end());
  std::int64_t device_rows = INT64_MAX, host_rows = INT64_MAX;
  core::Checker check("Coordinator");
  for (std::int64_t l = 0; l < m.layers; ++l) {
    const KvBuffers& k = layers[at(l)];
    const LayerNames& names = m.names.emplace_back(fmt::format("layers[{}].", l));
    CopyArgs& rows = m.life.layers[at(l)].copy;
    rows = check_buffers(check, names, k, c.layout);
    const TensorView* const buffers[4] = {&k.device_buffer, &k.host_cache, &k.device_buffer_v, &k.host_cache_v};
    for (const int i : {0, 1, 2, 3})  // what calls write lies where the tables are: on a GPU apart from host memory anyway
      if (i % 2 == 0 || !m.on_gpu()) m.known.arg(names[i ^ 1], *buffers[i]).same_device();
    device_rows = std::min(device_rows, rows.device_rows());
    host_rows = std::min(host_rows, rows.host_rows());
  }
  m.device = check.device();
  if (c.device_rows == 0) c.device_rows = device_rows;
  if (c.host_rows == 0) c.host_rows = host_rows;
  require(fits(c.device_rows, std::min<std::int64_t>(device_rows, INT32_MAX)), "device_rows", c.device_rows, "0..{}",
          std::min<std::int64_t>(device_rows, INT32_MAX));
  require(fits(c.host_rows, host_rows), "host_rows", c.host_rows, "0..{}", host_rows);
  const std::int64_t most_host_rows = m.on_gpu() ? INT32_MAX : INT32_MAX * c.page_size;
  require(c.host_rows <= most_host_rows, "host_rows", c.host_rows, "at most {}", most_host_rows);
  for (std::int64_t i = c.device_rows; i-- > 0;) m.free_device.push_back(static_cast<std::int32_t>(i));
  for (std::int64_t p = c.host_rows / c.page_size; p-- > 0;) m.free_pages.push_back(p);

  // About the bytes of the tables; they may be asked for in sizes that no memory has.
  const auto request_bytes =
      static_cast<std::int64_t>(m.groups.size()) * (12 * m.columns + 4 * c.context) + 4 * m.per_request + 12 * c.context + 64;
  const auto too_large = [&] {
    refuse("requests", fmt::format("tables that fit the memory (about {} bytes a request: hot, tail, scratch, context)", request_bytes),
           std::to_string(c.requests));
  };
  if (request_bytes > INT64_MAX / c.requests) too_large();
  Carver place{.device = m.device};
  try {
    m.requests.resize(at(c.requests));
    m.carve(place);
    if (m.on_gpu()) {
      check.arg("tables", c.tables)
          .required()
          .dtype(DType::kUInt8)
          .same_device()
          .inner_contiguous(c.tables.ndim)
          .aligned(layout::kBlockAlign);
      check.require(c.tables.numel() >= place.used, "tables", fmt::format("table_bytes(): {} bytes", place.used),
                    std::to_string(c.tables.numel()));
      check.arg("tables", c.tables).written();
      place.base = c.tables.as<std::byte>();
    } else {
      m.memory.reset(new std::byte[at(place.used + layout::kBlockAlign)]);
      place.base = m.memory.get();
      place.base += (layout::kBlockAlign - reinterpret_cast<std::uintptr_t>(place.base) % layout::kBlockAlign) % layout::kBlockAlign;
    }
  } catch (const std::bad_alloc&) {
    too_large();
  } catch (const std::length_error&) {
    too_large();
  }
  check.outputs_apart();
  place.used = 0;
  m.carve(place);
  m.describe();
  m.on_backend([&] { cpu::drop(m.life, 0, c.requests, true, stream); }, [&] { cuda::drop(m.life, 0, c.requests, true, stream); });
}

Coordinator::~Coordinator() = default;

// -------------------------------------------------------------------------------------------------------------- admission

std::int64_t Coordinator::max_length() const {
  const CoordinatorConfig& c = impl_->config;
  return std::min(c.context, c.host_rows / c.page_size * c.page_size);
}

bool Coordinator::can_admit(std::int64_t tokens) const {
  const Impl& m = *impl_;
  return tokens >= 0 && tokens <= max_length() && static_cast<std::int64_t>(m.free_device.size()) >= m.per_request &&
         static_cast<std::int64_t>(m.free_pages.size()) >= ceil_div(tokens, m.config.page_size);
}

void Coordinator::admit(std::int64_t request, std::int64_t tokens, Stream stream) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kFree});
  require(tokens >= 0 && tokens <= max_length(), "tokens", tokens, "0..{}", max_length());
  m.need_device_rows();
  m.need_pages(ceil_div(tokens, m.config.page_size));
  q.state = RequestState::kActive;
  q.staged.assign(at(m.layers), 0);
  m.take_device_rows(request, stream);
  m.take_pages(request, tokens, stream);
  m.grow(request, tokens, stream);
}

void Coordinator::reserve(std::int64_t request, std::int64_t count, Stream stream) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kActive});
  require(count >= 0 && count <= m.config.context - q.length, "count", count, "0..{}", m.config.context - q.length);
  m.need_pages(m.missing_pages(q, q.length + count));
  m.take_pages(request, q.length + count, stream);
  m.grow(request, q.length + count, stream);
}

void Coordinator::stage(std::int64_t layer, std::int64_t request, std::int64_t position, std::int64_t count, const void* rows,
                        std::int64_t pitch, const void* rows_v, std::int64_t pitch_v, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Request& q = m.in_state(request, {RequestState::kActive});
  const std::int64_t reserved = std::min(m.config.context, static_cast<std::int64_t>(q.pages.size()) * m.config.page_size);
  require(position >= q.length && position <= q.staged[at(l)], "position", position, "{}..{}, the positions that come next", q.length,
          q.staged[at(l)]);
  require(count >= 0 && count <= reserved - position, "count", count, "0 to the {} reserved positions", reserved - position);
  if (count > 0) m.first_pair(rows, "rows");
  if (count > 0) m.second_pair(l, rows_v, "rows_v");
  for (const std::int64_t bytes : {pitch, rows_v ? pitch_v : pitch})
    require(count <= 1 || bytes == 0 || bytes >= m.rows(l).item_bytes, "pitch", bytes, "at least the {} bytes of a row, or 0",
            m.rows(l).item_bytes);
  const GivenRows from{{static_cast<const std::byte*>(rows), static_cast<const std::byte*>(rows_v)}, {pitch, pitch_v}};
  m.on_backend([&] { cpu::stage(m.life, l, request, position, count, from, stream); },
               [&] { cuda::stage(m.life, l, request, position, count, from, stream); });
  q.staged[at(l)] = position + count;
  m.stats.bytes_to_host += count * m.rows(l).pairs * m.rows(l).item_bytes;
}

void Coordinator::stage(std::int64_t layer, std::int64_t request, std::int64_t position, const TensorView& rows, const TensorView& rows_v,
                        Stream stream) {
  const Impl& m = *impl_;
  core::Checker check("Coordinator");
  const std::int64_t item = m.rows(m.local(layer)).item_bytes;
  for (const auto& [name, t] : {std::pair{"rows", &rows}, std::pair{"rows_v", &rows_v}}) {
    if (!t->given()) continue;
    m.beside_tables(check, name, *t);
    check.require(t->ndim >= 1, name, "a tensor [count, ...]", shape_text(*t));
    check.require(t->sizes[0] == 0 || t->numel() / t->sizes[0] * size_of(t->dtype) == item, name, fmt::format("rows of {} bytes", item),
                  "shape " + shape_text(*t));
    check.require(t->sizes[0] == rows.sizes[0], name, fmt::format("{} rows", rows.sizes[0]), shape_text(*t));
    check.arg(name, *t).inner_contiguous(t->ndim - 1);
    m.apart(check, name, *t, layer, {0, 2});
  }
  check.arg("rows", rows).required();
  stage(layer, request, position, rows.sizes[0], rows.data, rows.strides[0] * size_of(rows.dtype), rows_v.given() ? rows_v.data : nullptr,
        rows_v.given() ? rows_v.strides[0] * size_of(rows_v.dtype) : 0, stream);
}

void Coordinator::append(std::int64_t request, std::int64_t count, Source source, Stream stream) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kActive});
  const std::int64_t reserved = std::min(m.config.context, static_cast<std::int64_t>(q.pages.size()) * m.config.page_size);
  require(count >= 0 && count <= reserved - q.length, "count", count, "0 to the {} reserved positions", reserved - q.length);
  const std::int64_t first = q.length, last = first + count;
  if (source == Source::kStaged)
    for (std::int64_t l = 0; l < m.layers; ++l)
      require(q.staged[at(l)] >= last, "count", count, "positions that layer {} has staged (up to {})", l + m.config.first_layer,
              q.staged[at(l)]);
  m.grow(request, last, stream);
  m.on_backend([&] { cpu::commit(m.life, request, first, last, stream); }, [&] { cuda::commit(m.life, request, first, last, stream); });
  q.length = last;
  for (std::int64_t& staged : q.staged) staged = std::max(staged, last);
  if (source == Source::kStaged || last <= m.config.hot) m.load(request, first, last, stream);
}

std::span<const std::int64_t> Coordinator::host_pages(std::int64_t request) const {
  return impl_->requests[at(impl_->slot_id(request))].pages;
}

std::int64_t Coordinator::host_row(std::int64_t request, std::int64_t position) const {
  const Impl& m = *impl_;
  const Request& q = m.in_state(request, {RequestState::kActive, RequestState::kVerifying, RequestState::kRetracted});
  const std::int64_t reserved = std::min(m.config.context, static_cast<std::int64_t>(q.pages.size()) * m.config.page_size);
  require(position >= 0 && position < reserved, "position", position, "0 or more, below the {} reserved positions", reserved);
  return m.page_row(q, position);
}

// ----------------------------------------------------------------------------------------------------------------- a step

void Coordinator::prepare_verify(std::span<const std::int64_t> ids, std::span<const std::int64_t> widths, const TensorView& locs,
                                 Stream stream) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  const auto batch = static_cast<std::int64_t>(ids.size());
  require(widths.size() == ids.size(), "widths", static_cast<std::int64_t>(widths.size()), "one for each of {} requests", ids.size());
  m.distinct(ids);
  std::int64_t pages = 0, widest = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const Request& q = m.in_state(ids[at(b)], {RequestState::kActive});
    const std::int64_t w = widths[at(b)];
    require(w >= 1, "widths", w, ">= 1");
    require(w <= c.window, "widths", w, "at most window={}", c.window);
    require(w <= c.context - q.length, "widths", w, "at most {} positions that the context has left", c.context - q.length);
    pages += m.missing_pages(q, q.length + w);
    widest = std::max(widest, w);
  }
  m.need_pages(pages);
  if (locs.given()) {
    core::Checker check = m.known;
    check.arg("locs", locs).dtype(DType::kInt32).shape({core::Dim(batch), core::Dim::at_least(widest, "W")}).same_device().written();
    check.outputs_apart();
  }

  for (std::int64_t b = 0; b < batch; ++b) {
    Request& q = m.requests[at(ids[at(b)])];
    q.state = RequestState::kVerifying;
    q.width = widths[at(b)];
    m.take_pages(ids[at(b)], q.length + q.width, stream);
    m.grow(ids[at(b)], q.length + q.width, stream);
  }
  m.window(m.bring(ids, m.ids, stream), batch, nullptr, m.bring(widths, m.widths, stream), {}, locs, stream);
}

std::int64_t Coordinator::verify_loc(std::int64_t request, std::int64_t j) const {
  const Impl& m = *impl_;
  const Request& q = m.in_state(request, {RequestState::kVerifying});
  m.outcome_known(request);
  require(j >= 0 && j < q.width, "j", j, "0..{}", q.width - 1);
  return q.rows[at(m.config.hot + (q.length + j) % m.config.tail)];
}

void Coordinator::write(std::int64_t layer, std::int64_t request, std::int64_t j, const void* row, const void* row_v, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  const Request& q = m.in_state(request, {RequestState::kVerifying});
  const std::int64_t width = q.ahead > 0 ? m.config.window : q.width;
  require(j >= 0 && j < width, "j", j, "0..{}", width - 1);
  m.first_pair(row, "row");
  m.second_pair(l, row_v, "row_v");
  const GivenRows from{{static_cast<const std::byte*>(row), static_cast<const std::byte*>(row_v)}, {0, 0}};
  m.on_backend([&] { cpu::write(m.life, l, request, j, from, stream); }, [&] { cuda::write(m.life, l, request, j, from, stream); });
}

void Coordinator::write(std::int64_t layer, std::int64_t request, std::int64_t j, const TensorView& row, const TensorView& row_v,
                        Stream stream) {
  const Impl& m = *impl_;
  core::Checker check("Coordinator");
  const std::int64_t item = m.rows(m.local(layer)).item_bytes;
  for (const auto& [name, t] : {std::pair{"row", &row}, std::pair{"row_v", &row_v}}) {
    if (!t->given()) continue;
    m.beside_tables(check, name, *t);
    check.require(t->numel() * size_of(t->dtype) == item, name, fmt::format("{} bytes", item), "shape " + shape_text(*t));
    check.arg(name, *t).inner_contiguous(t->ndim);
    m.apart(check, name, *t, layer, {1, 3});
  }
  check.arg("row", row).required();
  write(layer, request, j, row.data, row_v.given() ? row_v.data : nullptr, stream);
}

// ------------------------------------------------------------------------------------- steps whose counts are elsewhere

void Coordinator::begin_step(std::span<const std::int64_t> ids, Stream stream) {
  Impl& m = *impl_;
  m.distinct(ids);
  const auto end = [&](const Request& q) { return std::min(m.config.context, q.length + (q.ahead + 1) * m.config.window); };
  std::int64_t pages = 0;
  for (const std::int64_t r : ids) {
    const Request& q = m.in_state(r, {RequestState::kActive, RequestState::kVerifying});
    if (q.state == RequestState::kVerifying && q.ahead == 0)
      refuse("request", fmt::format("request {} to be active", r), "a window of prepare_verify");
    pages += m.missing_pages(q, end(q));
  }
  m.need_pages(pages);
  m.settle(stream);  // a captured swap does not know what is owed when it is replayed
  for (const std::int64_t r : ids) {
    Request& q = m.requests[at(r)];
    m.take_pages(r, end(q), stream);
    m.grow(r, end(q), stream);
    q.state = RequestState::kVerifying;
    ++q.ahead;
  }
}

namespace {
core::Sym check_step(core::Checker& check, const StepBatch& s, const std::int32_t** num_real) {
  core::Sym B("B");
  check.arg("requests", s.requests).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
  check.arg("widths", s.widths).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
  *num_real = check_num_real(check, s.num_real_reqs);
  return B;
}
}  // namespace

void Coordinator::open_step(const StepBatch& batch, const TensorView& locs, Stream stream) {
  Impl& m = *impl_;
  core::Checker check = m.known;
  const std::int32_t* num_real = nullptr;
  const core::Sym B = check_step(check, batch, &num_real);
  check.arg("locs", locs).dtype(DType::kInt32).shape({core::Dim(B.value()), core::Dim::at_least(1, "W")}).same_device().written();
  check.outputs_apart();
  m.window(integers(batch.requests), B, num_real, integers(batch.widths), {}, locs, stream);
}

void Coordinator::close_step(const StepBatch& batch, const TensorView& accepted, Stream stream) {
  Impl& m = *impl_;
  core::Checker check = m.known;
  const std::int32_t* num_real = nullptr;
  const core::Sym B = check_step(check, batch, &num_real);
  check.arg("accepted", accepted).required().dtype({DType::kInt32, DType::kInt64}).shape({core::Dim(B.value())}).same_device();
  m.window(integers(batch.requests), B, num_real, integers(batch.widths), integers(accepted), {}, stream);
}

void Coordinator::end_step(std::span<const std::int64_t> ids, std::span<const std::int64_t> accepted) {
  Impl& m = *impl_;
  require(accepted.size() == ids.size(), "accepted", static_cast<std::int64_t>(accepted.size()), "one for each of {} requests", ids.size());
  m.distinct(ids);
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const Request& q = m.in_state(ids[b], {RequestState::kVerifying});
    if (q.ahead == 0) refuse("request", fmt::format("request {} to be in a step", ids[b]), "a window of prepare_verify");
    const std::int64_t most = std::min(m.config.window, m.config.context - q.length);
    require(accepted[b] >= 0 && accepted[b] <= most, "accepted", accepted[b], "0 to {} positions", most);
  }
  for (std::size_t b = 0; b < ids.size(); ++b) {
    Request& q = m.requests[at(ids[b])];
    q.length += accepted[b];
    if (--q.ahead == 0) q.state = RequestState::kActive;
    for (std::int64_t& staged : q.staged) staged = q.length;
    m.count_backups(accepted[b]);
  }
}

namespace {

/// A selection of one step, [B, K], as three dimensions.
SwapInParams three_dimensional(const SwapInParams& params) {
  SwapInParams p = params;
  if (p.top_k_tokens.ndim != 2 && p.top_k_tokens.ndim != 3)
    refuse("top_k_tokens", "shape [B, S, K] or [B, K]",
           p.top_k_tokens.given() ? fmt::format("{} dimensions", p.top_k_tokens.ndim) : "none");
  if (p.top_k_tokens.ndim == 3) return p;
  auto add_step = [](TensorView& t, int ndim) {
    if (t.ndim != ndim) return;  // swap_in says what is wrong
    for (int i = t.ndim++; i > 1; --i) t.sizes[i] = t.sizes[i - 1], t.strides[i] = t.strides[i - 1];
    t.sizes[1] = t.strides[1] = 1;
  };
  add_step(p.top_k_tokens, 2);
  add_step(p.top_k_device_locs, 2);
  add_step(p.seq_lens, 1);
  return p;
}

/// What `swap` and `plan_rounds` ask of a selection.
void check_selection(core::Checker& check, const SwapInParams& p, core::Sym& B, core::Sym& S, core::Sym& K) {
  check.arg("top_k_tokens", p.top_k_tokens).dtype(DType::kInt32).shape({B, S, K}).same_device();
  check.arg("seq_lens", p.seq_lens).required().dtype({DType::kInt32, DType::kInt64}).shape({B, S}).same_device();
  check.arg("req_pool_indices", p.req_pool_indices).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
}
}  // namespace

void Coordinator::swap(std::int64_t layer, const SwapInParams& params, std::int64_t round, Stream stream) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  const std::int64_t l = m.local(layer);
  Group& g = m.group(l);
  if (g.anchor != l) refuse("layer", "an anchor layer", fmt::format("{}, a follower of {}", layer, g.anchor + c.first_layer));
  require(round == 0 || round == g.rounds, "round", round, "0 or the next one, {}", g.rounds);
  if (m.on_gpu()) require(round == 0, "round", round, "0 on a GPU");
  SwapInParams p = three_dimensional(params);
  core::Checker check = m.known;
  core::Sym B("B"), S("S"), K("K");
  check_selection(check, p, B, S, K);
  check_occurrences(S, K);
  const std::int32_t* const num_real = check_num_real(check, p.num_real_reqs);
  check.arg("top_k_device_locs", p.top_k_device_locs).required().dtype(DType::kInt32).shape({B, S, K}).same_device().written();
  for (const auto& [name, t] : {std::pair{"unique_misses", &p.unique_misses}, std::pair{"unique_hits", &p.unique_hits}})
    check.arg(name, *t).dtype(DType::kInt32).shape({core::Dim::at_least(B, "B")}).same_device().written();
  check.outputs_apart();
  p.host_cache_locs = m.host_locs;
  p.buffers = m.buffers[at(l)];
  p.state = g.state;
  p.scratch_locs = m.scratch_locs;
  p.layout = c.layout;
  if (p.sm_budget == 0) p.sm_budget = c.sm_budget;
  const std::int64_t batch = B, occurrences = S * K;
  const bool planned = g.layers.size() > 1;
  if (planned && m.on_gpu()) {
    require(batch <= c.requests, "top_k_tokens", batch, "at most requests={} rows where layers follow", c.requests);
    require(occurrences <= m.most_selected, "top_k_tokens", occurrences, "at most window * top_k = {} positions a row", m.most_selected);
  }
  // Nothing changes until the call is known to be taken.
  const auto owed = [&] {
    if (round > 0) return;  // a follower that did not follow the last rounds must not miss what they brought: it may be a hit from now on
    for (const std::int64_t follower : g.layers) {
      if (follower != l) m.catch_up(g, follower, g.rounds, stream);
      m.followed[at(follower)] = m.copied[at(follower)] = 0;
    }
    g.rounds = 0;
  };
  const auto run = [&](const SwapInArgs& args) { m.on_backend([&] { cpu::run(args, stream); }, [&] { cuda::run(args, stream); }); };
  if (m.on_gpu()) {
    if (planned) {
      const auto part = [&](TensorView t) {  // the corner that this swap fills
        t.sizes[0] = batch;
        if (t.ndim == 2) t.sizes[1] = occurrences;
        return t;
      };
      p.plan = {part(g.block.miss_src), part(g.block.miss_dst), part(g.block.miss_count)};
    }
    const SwapInArgs args = hisparse::check(p);
    owed();
    if (planned) {
      g.plans.resize(1);
      g.plans[0].view = p.plan;
    }
    run(args);
    m.stats.swaps += batch;
    g.rounds = 1;
    return;
  }
  const std::int64_t real = num_real ? std::clamp<std::int64_t>(*num_real, 0, batch) : batch;
  Plan& plan = m.spare;
  std::vector<std::int32_t>&misses = m.misses, &hits = m.hits;
  misses.resize(at(batch));
  hits.resize(at(batch));
  plan.src.resize(at(batch * occurrences));
  plan.dst.resize(at(batch * occurrences));
  plan.count.resize(at(batch));
  plan.view =
      p.plan = {TensorView(plan.src.data(), DType::kInt64, {batch, occurrences}),
                TensorView(plan.dst.data(), DType::kInt32, {batch, occurrences}), TensorView(plan.count.data(), DType::kInt32, {batch})};
  const TensorView given_misses = p.unique_misses, given_hits = p.unique_hits;
  p.unique_misses = TensorView(misses.data(), DType::kInt32, {batch});
  p.unique_hits = TensorView(hits.data(), DType::kInt32, {batch});
  // Rows of a request that holds none would all be -1; that is a mistake of the caller.
  const Integers lens = integers(p.seq_lens);
  std::vector<std::int64_t> ids;
  for (std::int64_t b = 0; b < real; ++b) {
    ids.push_back(core::load_index(p.req_pool_indices, b));
    const Request& q = m.in_state(ids.back(), {RequestState::kActive, RequestState::kVerifying});
    const std::int64_t end = q.length + q.width + q.ahead * c.window;
    for (std::int64_t s = 0; s < S; ++s) require(lens(b, s) <= end, "seq_lens", lens(b, s), "at most {}, the end of the window", end);
  }
  m.distinct(ids);
  const SwapInArgs args = hisparse::check(p);
  owed();
  run(args);
  for (const auto& [out, from] : {std::pair{&given_misses, &misses}, std::pair{&given_hits, &hits}})
    if (out->given())
      for (std::int64_t b = 0; b < batch; ++b) out->as<std::int32_t>()[b * out->strides[0]] = (*from)[at(b)];

  m.stats.swaps += real;
  for (std::int64_t b = 0; b < batch; ++b) {
    m.stats.unique_hits += hits[at(b)];
    m.stats.unique_misses += misses[at(b)];
    m.stats.unserved += misses[at(b)] - plan.count[at(b)];
    if (!p.skip_io) m.stats.bytes_to_device += plan.count[at(b)] * m.rows(l).pairs * m.rows(l).item_bytes;
  }
  g.rounds = round + 1;
  if (g.rounds > static_cast<std::int64_t>(g.plans.size())) g.plans.emplace_back();
  std::swap(g.plans[at(round)], plan);
}

void Coordinator::follow(std::int64_t layer, std::int64_t round, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Group& g = m.group(l);
  if (g.anchor == l) refuse("layer", "a follower layer", fmt::format("{}, an anchor", layer));
  if (round != m.followed[at(l)] || round >= g.rounds)
    refuse("round", fmt::format("a swap of anchor {} that layer {} has yet to follow", g.anchor + m.config.first_layer, layer),
           round >= g.rounds ? fmt::format("none for round {}", round) : fmt::format("round {}, not {}", round, m.followed[at(l)]));
  m.catch_up(g, l, round + 1, stream);
  ++m.followed[at(l)];
}

void Coordinator::follow_all(std::int64_t layer, std::int64_t round, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Group& g = m.group(l);
  if (g.anchor != l) refuse("layer", "an anchor layer", fmt::format("{}, a follower of {}", layer, g.anchor + m.config.first_layer));
  require(round >= 0 && round < g.rounds, "round", round, "a swap of anchor {}: below {}", layer, g.rounds);
  std::vector<std::int64_t> owing;
  for (const std::int64_t f : g.layers) {
    if (f == l) continue;
    require(m.followed[at(f)] == round, "round", round, "{}, which layer {} has yet to follow", m.followed[at(f)],
            f + m.config.first_layer);
    if (m.copied[at(f)] == round) owing.push_back(f);
  }
  if (!owing.empty()) m.replay(g.plans[at(round)], owing, stream);
  for (const std::int64_t f : g.layers)
    if (f != l) m.followed[at(f)] = round + 1, m.copied[at(f)] = std::max(m.copied[at(f)], round + 1);
}

std::int64_t Coordinator::plan_rounds(std::int64_t layer, const SwapInParams& params, const TensorView& round_of) const {
  const Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  const Group& g = m.group(l);
  const SwapInParams p = three_dimensional(params);
  core::Checker check = m.known;
  core::Sym B("B"), S("S"), K("K");
  check_selection(check, p, B, S, K);
  check.arg("round_of", round_of).required().dtype(DType::kInt32).shape({B, S}).same_device().written();
  check.outputs_apart();
  if (m.on_gpu()) {
    // What a selection wants is not read by the host: it must fit in any case, and then there is one round.
    require(S == 0 || K <= (m.config.hot + m.config.scratch) / S, "top_k_tokens", S * K,
            "at most hot + scratch = {} positions a row on a GPU", m.config.hot + m.config.scratch);
    return 1;
  }
  for (std::int64_t b = 0; b < B; ++b)
    m.in_state(core::load_index(p.req_pool_indices, b), {RequestState::kActive, RequestState::kVerifying});
  const auto set_round = [&](std::int64_t b, std::int64_t s, std::int32_t round) {
    round_of.as<std::int32_t>()[b * round_of.strides[0] + s * round_of.strides[1]] = round;
  };
  if (S == 0 || K <= (m.config.hot + m.config.scratch) / S) {
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t s = 0; s < S; ++s) set_round(b, s, 0);
    return 1;
  }
  const Integers lens = integers(p.seq_lens);
  const std::int32_t* tokens = p.top_k_tokens.as<const std::int32_t>();
  std::int64_t rounds = 1;
  std::vector<std::int32_t> held, wanted, both;
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t r = core::load_index(p.req_pool_indices, b);
    const std::int64_t room = m.requests[at(r)].hot_rows + m.config.scratch;
    std::int32_t round = 0;
    held.clear();
    for (std::int64_t s = 0; s < S; ++s) {
      wanted.clear();
      for (std::int64_t k = 0; k < K; ++k) {
        const std::int32_t t = tokens[b * p.top_k_tokens.strides[0] + s * p.top_k_tokens.strides[1] + k * p.top_k_tokens.strides[2]];
        if (t < 0 || t >= lens(b, s) || t >= m.config.context) continue;
        // The tail answers without a hot slot; what is neither committed nor there has no row at all.
        if (table(g.state.slot_tokens)(r, m.config.hot + t % m.config.tail) == t || m.life.window.host_locs(r, t) < 0) continue;
        wanted.push_back(t);
      }
      if (!std::is_sorted(wanted.begin(), wanted.end())) std::sort(wanted.begin(), wanted.end());
      wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
      both.clear();
      std::set_union(held.begin(), held.end(), wanted.begin(), wanted.end(), std::back_inserter(both));
      if (s > 0 && static_cast<std::int64_t>(both.size()) > room) {
        ++round;
        held = wanted;
      } else {
        held.swap(both);
      }
      set_round(b, s, round);
    }
    rounds = std::max<std::int64_t>(rounds, round + 1);
  }
  return rounds;
}

void Coordinator::accept(std::span<const std::int64_t> ids, std::span<const std::int64_t> accepted, Stream stream) {
  Impl& m = *impl_;
  require(accepted.size() == ids.size(), "accepted", static_cast<std::int64_t>(accepted.size()), "one for each of {} requests", ids.size());
  m.distinct(ids);
  std::vector<std::int64_t> widths;
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const Request& q = m.in_state(ids[b], {RequestState::kVerifying});
    m.outcome_known(ids[b]);
    require(accepted[b] >= 0 && accepted[b] <= q.width, "accepted", accepted[b], "0 to the window's {} positions", q.width);
    widths.push_back(q.width);
  }
  m.window(m.bring(ids, m.ids, stream), static_cast<std::int64_t>(ids.size()), nullptr, m.bring(widths, m.widths, stream),
           m.bring(accepted, m.accepted, stream), {}, stream);
  for (std::size_t b = 0; b < ids.size(); ++b) {
    Request& q = m.requests[at(ids[b])];
    q.length += accepted[b];
    q.width = 0;
    q.state = RequestState::kActive;
    for (std::int64_t& staged : q.staged) staged = q.length;
    m.count_backups(accepted[b]);
  }
}

// -------------------------------------------------------------------------------------------------------------------- end

void Coordinator::finish(std::int64_t request, Stream stream) {
  impl_->in_state(request, {RequestState::kActive, RequestState::kVerifying, RequestState::kRetracted});
  abort(request, stream);
}

void Coordinator::abort(std::int64_t request, Stream stream) {
  Impl& m = *impl_;
  Request& q = m.requests[at(m.slot_id(request))];
  if (q.state == RequestState::kFree) return;
  m.drop(request, true, stream);
  while (!q.pages.empty()) {
    m.free_pages.push_back(q.pages.back());
    q.pages.pop_back();
  }
  q = Request{};
}

void Coordinator::retract(std::int64_t request, Stream stream) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kActive, RequestState::kVerifying});
  m.outcome_known(request);
  m.drop(request, false, stream);
  q.state = RequestState::kRetracted;
  q.width = 0;
}

void Coordinator::resume(std::int64_t request, Stream stream) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kRetracted});
  m.need_device_rows();
  q.state = RequestState::kActive;
  m.take_device_rows(request, stream);
  m.grow(request, q.length, stream);
  if (q.length <= m.config.hot) m.load(request, 0, q.length, stream);
}

// ---------------------------------------------------------------------------------------------------------------- looking

RequestState Coordinator::state(std::int64_t request) const { return impl_->requests[at(impl_->slot_id(request))].state; }
std::int64_t Coordinator::length(std::int64_t request) const { return impl_->requests[at(impl_->slot_id(request))].length; }
std::int64_t Coordinator::free_device_rows() const { return static_cast<std::int64_t>(impl_->free_device.size()); }
std::int64_t Coordinator::free_host_rows() const { return static_cast<std::int64_t>(impl_->free_pages.size()) * impl_->config.page_size; }
const CoordinatorStats& Coordinator::stats() const { return impl_->stats; }

SwapState Coordinator::tables(std::int64_t layer) const { return impl_->group(impl_->local(layer)).state; }
TensorView Coordinator::host_cache_locs() const { return impl_->host_locs; }
TensorView Coordinator::lengths() const { return impl_->lengths; }

void Coordinator::copy_tables(std::int64_t layer, const TensorView& tokens, const TensorView& locs, Stream stream) const {
  const Impl& m = *impl_;
  const SwapState s = tables(layer);
  core::Checker check = m.known;
  for (const auto& [name, to] : {std::pair{"tokens", &tokens}, std::pair{"locs", &locs}})
    check.arg(name, *to).required().dtype(DType::kInt32).shape({m.config.requests, m.columns}).same_device().inner_contiguous(2).written();
  check.outputs_apart();
  for (const auto& [to, from] : {std::pair{&tokens, &s.slot_tokens}, std::pair{&locs, &s.slot_locs}}) {
    const std::int64_t bytes = from->numel() * 4;
    m.on_backend([&] { std::memcpy(to->data, from->data, at(bytes)); }, [&] { cuda::copy_table(to->data, from->data, bytes, stream); });
  }
}

}  // namespace specstate::hisparse
