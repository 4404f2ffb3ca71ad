#pragma once
// What a Coordinator knows, and the small steps that its calls are made of: tables and free lists of the request life cycle. Device rows belong to a
// request from admission to its end, so growth never fails; growing only gives more of its hot slots their rows. Host rows are taken by pages as a
// request gets longer. The calls: `coordinator.cpp` (the life of a request, windows, steps) and `coordinator_swap.cpp` (swaps, followers, rounds).
#include <algorithm>
#include <deque>
#include <string>

#include "core/dispatch.hpp"
#include "core/match.hpp"
#include "hisparse/check.hpp"
#include "hisparse/layout.hpp"
#include "hisparse/life.hpp"
#include "specstate/hisparse_coordinator.hpp"

namespace specstate::hisparse {

namespace coordinator {

using core::throw_runtime;
using core::throw_value;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// "Coordinator: {name}: expected {expected}, got {got}."
[[noreturn]] inline void refuse(const char* name, const std::string& expected, const std::string& got) {
  core::Checker("Coordinator").fail(name, expected, got);
}
[[noreturn]] inline void refuse(const char* name, const std::string& expected, std::int64_t got) {
  refuse(name, expected, std::to_string(got));
}
inline const char* name_of(RequestState s) {
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

}  // namespace coordinator
using namespace coordinator;

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
  /// About the bytes of the tables; they may be asked for in sizes that no memory has, or 64 bits.
  std::int64_t request_bytes() const {
    return static_cast<std::int64_t>(groups.size()) * (12 * columns + 4 * config.context + 12 * most_selected) + 4 * per_request +
           12 * config.context + 64;
  }
  [[noreturn]] void too_large() const;
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
  std::int64_t local(std::int64_t layer) const;
  std::int64_t slot_id(std::int64_t r) const;
  const Request& in_state(std::int64_t r, std::initializer_list<RequestState> allowed) const;
  Request& in_state(std::int64_t r, std::initializer_list<RequestState> allowed) {
    return const_cast<Request&>(std::as_const(*this).in_state(r, allowed));
  }
  void distinct(std::span<const std::int64_t> ids) const;

  // ------------------------------------------------------------------------------------------------------ small parts
  std::int64_t page_row(const Request& q, std::int64_t position) const {
    return q.pages[at(position / config.page_size)] * config.page_size + position % config.page_size;
  }
  std::int64_t missing_pages(const Request& q, std::int64_t positions) const {
    return std::max<std::int64_t>(0, ceil_div(positions, config.page_size) - static_cast<std::int64_t>(q.pages.size()));
  }
  void need_pages(std::int64_t pages) const;
  void need_device_rows() const;
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
  void apart(const core::Checker& check, const char* name, const TensorView& t, std::int64_t layer, std::initializer_list<int> into) const;
  /// Every accepted row went to the host in every layer.
  void count_backups(std::int64_t accepted) {
    for (const WindowLayer& l : life.layers) stats.bytes_to_host += accepted * l.copy.pairs * l.copy.item_bytes;
  }
  void outcome_known(std::int64_t r) const;
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

}  // namespace specstate::hisparse
