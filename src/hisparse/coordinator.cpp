// The tables and free lists of the request life cycle. Device rows belong to a request from admission to its end, so growth never fails;
// growing only gives more of its hot slots their rows. Host rows are taken by pages as a request gets longer.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <new>
#include <stdexcept>
#include <string>

#include "core/dispatch.hpp"
#include "core/match.hpp"
#include "hisparse/check.hpp"
#include "hisparse/rows.hpp"
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
  std::int64_t hot_rows = 0;         // hot slots that have a row
  std::vector<std::int32_t> rows;    // device rows it owns: hot, tail, scratch
  std::vector<std::int64_t> pages;   // host pages it owns
  std::vector<std::int64_t> staged;  // [layers] positions below which a layer's host rows are written
};

/// What an anchor's swap recorded for its followers.
struct Plan {
  std::vector<std::int64_t> src, requests;  // requests: [real]
  std::vector<std::int32_t> dst, count;
  std::int64_t batch = 0, capacity = 0;
};

/// An anchor with its followers: one selection, one residency.
struct Group {
  std::int64_t anchor = 0;           // local layer
  std::vector<std::int64_t> layers;  // local, the anchor first
  std::vector<std::byte> memory;
  SwapState state;
  std::vector<Plan> plans;  // by round; the first `rounds` stand
  std::int64_t rounds = 0;
};

}  // namespace

struct Coordinator::Impl {
  CoordinatorConfig config;
  std::int64_t layers = 0, columns = 0, per_request = 0;  // device rows: hot + tail; + scratch
  std::vector<KvBuffers> buffers;
  core::Checker known{"Coordinator"};  // knows all buffers: a call's checker is a copy, so what the call writes lies apart from them
  std::deque<LayerNames> names;        // [layers]
  std::vector<CopyArgs> rows;          // [layers]
  std::vector<std::int64_t> followed;  // [layers] rounds of its anchor that a follower has copied
  std::vector<std::int64_t> group_of;  // [layers]
  std::vector<Group> groups;
  std::vector<std::int32_t> slot_locs;     // [R, H+P], one table for all layers
  std::vector<std::int32_t> scratch_locs;  // [R, C]
  std::vector<std::int64_t> host_locs;     // [R, L], committed positions only
  std::vector<std::int32_t> free_device;   // last in, first out
  std::vector<std::int64_t> free_pages;
  std::vector<Request> requests;
  CoordinatorStats stats;
  Plan spare;                              // what the next swap records into
  std::vector<std::int32_t> misses, hits;  // [B] of a swap

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
  std::int64_t tail_column(std::int64_t position) const { return config.hot + position % config.tail; }
  std::int64_t loc(std::int64_t r, std::int64_t column) const { return slot_locs[at(r * columns + column)]; }
  static std::int32_t& token(Group& g, std::int64_t r, std::int64_t column) {
    return g.state.slot_tokens.as<std::int32_t>()[r * g.state.slot_tokens.strides[0] + column];
  }
  std::int64_t missing_pages(const Request& q, std::int64_t positions) const {
    return std::max<std::int64_t>(0, ceil_div(positions, config.page_size) - static_cast<std::int64_t>(q.pages.size()));
  }
  void need_pages(std::int64_t pages) const {
    if (pages > static_cast<std::int64_t>(free_pages.size()))
      throw_runtime(fmt::format("HiSparse failed to allocate {} KV slots.", pages * config.page_size));
  }
  void need_device_rows() const {
    const auto free = static_cast<std::int64_t>(free_device.size());
    if (free < columns) throw_runtime(fmt::format("HiSparse failed to allocate {} KV slots.", columns));
    if (free < per_request) throw_runtime(fmt::format("HiSparse spec failed to allocate {} scratch slots.", config.scratch));
  }
  void take_pages(Request& q, std::int64_t positions) {
    for (std::int64_t n = missing_pages(q, positions); n > 0; --n) {
      q.pages.push_back(free_pages.back());
      free_pages.pop_back();
    }
  }
  /// Gives hot slots their rows for a request of `positions`, and initialises their markers in every group.
  void grow(std::int64_t r, std::int64_t positions) {
    Request& q = requests[at(r)];
    const std::int64_t want = std::min(config.hot, ceil_div(positions, config.page_size) * config.page_size);
    for (; q.hot_rows < want; ++q.hot_rows) {
      slot_locs[at(r * columns + q.hot_rows)] = q.rows[at(q.hot_rows)];
      for (Group& g : groups) {
        token(g, r, q.hot_rows) = -1;
        g.state.slot_stamps.as<std::int32_t>()[r * config.hot + q.hot_rows] = 0;
      }
    }
  }
  void take_device_rows(std::int64_t r) {
    Request& q = requests[at(r)];
    for (std::int64_t i = 0; i < per_request; ++i) {
      q.rows.push_back(free_device.back());
      free_device.pop_back();
    }
    for (std::int64_t i = 0; i < config.tail; ++i) slot_locs[at(r * columns + config.hot + i)] = q.rows[at(config.hot + i)];
    for (std::int64_t i = 0; i < config.scratch; ++i) scratch_locs[at(r * config.scratch + i)] = q.rows[at(columns + i)];
  }
  void drop_device_rows(std::int64_t r) {
    Request& q = requests[at(r)];
    while (!q.rows.empty()) {
      free_device.push_back(q.rows.back());
      q.rows.pop_back();
    }
    q.hot_rows = 0;
    std::fill_n(slot_locs.begin() + r * columns, columns, -1);
    std::fill_n(scratch_locs.begin() + r * config.scratch, config.scratch, -1);
    std::int64_t id = r;
    for (Group& g : groups) {
      reset_swap_state(g.state, TensorView(&id, DType::kInt64, {1}));
      // Its rows may soon be another's: nothing is copied there any more. The other requests' copies stay owed.
      for (std::int64_t round = 0; round < g.rounds; ++round) {
        Plan& p = g.plans[at(round)];
        for (std::size_t b = 0; b < p.requests.size(); ++b)
          if (p.requests[b] == r) p.count[b] = 0;
      }
    }
  }
  /// The copies that follower `l` owes for the rounds before `end`, in order. Slots that an anchor's swap filled stay filled until another
  /// swap of that anchor takes them, and host rows stand until the request ends: they are as good as at the time of the swap.
  void catch_up(Group& g, std::int64_t l, std::int64_t end) {
    for (; followed[at(l)] < end; ++followed[at(l)]) {
      Plan& plan = g.plans[at(followed[at(l)])];
      ReplayPlanParams p;
      p.miss_src = TensorView(plan.src.data(), DType::kInt64, {plan.batch, plan.capacity});
      p.miss_dst = TensorView(plan.dst.data(), DType::kInt32, {plan.batch, plan.capacity});
      p.miss_count = TensorView(plan.count.data(), DType::kInt32, {plan.batch});
      p.followers = &buffers[at(l)];
      p.num_followers = 1;
      p.layout = config.layout;
      replay_plan(p);
      for (std::int32_t n : plan.count) stats.bytes_to_device += n * rows[at(l)].pairs * rows[at(l)].item_bytes;
    }
  }
  void make_resident(Group& g, std::int64_t r, std::int64_t position) {
    token(g, r, position) = static_cast<std::int32_t>(position);
    const SwapState& s = g.state;
    s.slot_stamps.as<std::int32_t>()[r * config.hot + position] = layout::hit_stamp(s.clock.as<std::int32_t>()[r]);
    if (s.token_slots.dtype == DType::kInt16)
      s.token_slots.as<std::int16_t>()[r * config.context + position] = static_cast<std::int16_t>(position);
    else
      s.token_slots.as<std::int32_t>()[r * config.context + position] = static_cast<std::int32_t>(position);
  }
  bool slot_free(Group& g, std::int64_t r, std::int64_t position) const {
    return position < requests[at(r)].hot_rows && token(g, r, position) < 0;
  }
  /// Positions [first, last), committed, go from the host into the hot slots of their number.
  void load_identity(std::int64_t r, std::int64_t first, std::int64_t last) {
    for (Group& g : groups)
      for (std::int64_t p = first; p < std::min(last, config.hot); ++p) {
        if (!slot_free(g, r, p)) continue;
        for (const std::int64_t l : g.layers)
          for (int i = 0; i < rows[at(l)].pairs; ++i)
            cpu::copy_row(host_spans(l, i, host_locs[at(r * config.context + p)]), device_spans(l, i, loc(r, p)));
        make_resident(g, r, p);
      }
  }
  cpu::RowSpans host_spans(std::int64_t l, int pair, std::int64_t row) const {
    return cpu::row_spans(rows[at(l)].host[pair], rows[at(l)].paged, rows[at(l)].item_bytes, row);
  }
  cpu::RowSpans device_spans(std::int64_t l, int pair, std::int64_t row) const {
    return cpu::row_spans(rows[at(l)].device[pair], rows[at(l)].paged, rows[at(l)].item_bytes, row);
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
  void first_pair(const void* rows, const char* name) const {
    if (rows == nullptr) refuse(name, "memory", "a null pointer");
  }
  void second_pair(std::int64_t l, const void* rows_v, const char* name) const {
    if ((rows[at(l)].pairs == 2) != (rows_v != nullptr))
      refuse(name, rows[at(l)].pairs == 2 ? "a row of the second pair" : "none: the layer has one pair", rows_v ? "one" : "none");
  }
};

Coordinator::Coordinator(const CoordinatorConfig& given, std::span<const KvBuffers> layers) : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  m.config = given;
  CoordinatorConfig& c = m.config;
  m.layers = static_cast<std::int64_t>(layers.size());
  if (c.requests < 1 || m.layers < 1 || c.page_size < 1) throw_value("Invalid HiSparse speculative page size or request/layer count.");
  require(c.hot >= 1, "hot", c.hot, ">= 1");
  require(c.top_k <= c.hot, "hot", c.hot, "at least top_k={} slots", c.top_k);
  require(c.window >= 1, "window", c.window, ">= 1");
  require(c.scratch >= 0, "scratch", c.scratch, ">= 0");
  require(c.context >= 1, "context", c.context, ">= 1");
  for (const auto& [name, n] : {std::pair{"hot", c.hot},
                                {"window", c.window},
                                {"tail", c.tail},
                                {"scratch", c.scratch},
                                {"context", c.context},
                                {"requests", c.requests},
                                {"page_size", c.page_size}})
    require(n < (std::int64_t{1} << 31), name, n, "below 2^31");
  if (c.tail == 0) c.tail = 2 * c.window;
  if (c.tail < c.window)
    throw_value(fmt::format("HiSparse spec needs {} verify slots, but the extra page has only {} usable slots.", c.window, c.tail));
  m.columns = c.hot + c.tail;
  m.per_request = m.columns + c.scratch;
  m.buffers.assign(layers.begin(), layers.end());
  std::int64_t device_rows = INT64_MAX, host_rows = INT64_MAX;
  core::Checker check("Coordinator");
  for (std::int64_t l = 0; l < m.layers; ++l) {
    const KvBuffers& k = layers[at(l)];
    const LayerNames& names = m.names.emplace_back(fmt::format("layers[{}].", l));
    m.rows.push_back(check_buffers(check, names, k, c.layout));
    if (k.device_buffer.device.type == DeviceType::kCuda) core::no_cuda("Coordinator");
    const TensorView* const buffers[4] = {&k.host_cache, &k.device_buffer, &k.host_cache_v, &k.device_buffer_v};
    for (int i = 0; i < 4; ++i) m.known.arg(names[i], *buffers[i]).same_device();
    device_rows = std::min(device_rows, m.rows.back().device_rows());
    host_rows = std::min(host_rows, m.rows.back().host_rows());
  }
  check.outputs_apart();
  if (c.device_rows == 0) c.device_rows = device_rows;
  if (c.host_rows == 0) c.host_rows = host_rows;
  require(c.device_rows >= 0 && c.device_rows <= std::min<std::int64_t>(device_rows, INT32_MAX), "device_rows", c.device_rows, "0..{}",
          std::min<std::int64_t>(device_rows, INT32_MAX));
  require(c.host_rows >= 0 && c.host_rows <= host_rows, "host_rows", c.host_rows, "0..{}", host_rows);
  for (std::int64_t i = c.device_rows; i-- > 0;) m.free_device.push_back(static_cast<std::int32_t>(i));
  for (std::int64_t p = c.host_rows / c.page_size; p-- > 0;) m.free_pages.push_back(p);

  if (!c.anchor_of.empty())
    require(static_cast<std::int64_t>(c.anchor_of.size()) == m.layers, "anchor_of", static_cast<std::int64_t>(c.anchor_of.size()),
            "{} entries", m.layers);
  m.group_of.resize(at(m.layers));
  m.followed.assign(at(m.layers), 0);
  for (std::int64_t l = 0; l < m.layers; ++l) {
    const std::int64_t anchor = c.anchor_of.empty() ? l : c.anchor_of[at(l)] - c.first_layer;
    if (anchor == l) {
      m.group_of[at(l)] = static_cast<std::int64_t>(m.groups.size());
      m.groups.emplace_back();
      m.groups.back().anchor = l;
    } else {
      if (anchor < 0 || anchor > l || m.groups[at(m.group_of[at(anchor)])].anchor != anchor)
        throw_value("A shared-index layer must have a preceding anchor.");
      m.group_of[at(l)] = m.group_of[at(anchor)];
    }
    m.groups[at(m.group_of[at(l)])].layers.push_back(l);
  }

  // About the bytes of the tables; they may be asked for in sizes that no memory has.
  const auto request_bytes =
      static_cast<std::int64_t>(m.groups.size()) * (12 * m.columns + 4 * c.context) + 4 * m.per_request + 8 * c.context;
  const auto too_large = [&] {
    refuse("requests", fmt::format("tables that fit the memory (about {} bytes a request: hot, tail, scratch, context)", request_bytes),
           std::to_string(c.requests));
  };
  if (request_bytes > INT64_MAX / c.requests) too_large();
  try {
    m.slot_locs.assign(at(c.requests * m.columns), -1);
    m.scratch_locs.assign(at(c.requests * c.scratch), -1);
    m.host_locs.assign(at(c.requests * c.context), -1);
    m.requests.resize(at(c.requests));
    const SwapShape shape{c.requests, c.hot, c.tail, c.context};
    for (Group& g : m.groups) {
      g.memory.resize(at(swap_state_bytes(shape) + layout::kBlockAlign));
      const auto address = reinterpret_cast<std::uintptr_t>(g.memory.data());
      g.state = swap_state_view(shape, g.memory.data() + (layout::kBlockAlign - address % layout::kBlockAlign) % layout::kBlockAlign);
      g.state.slot_locs = TensorView(m.slot_locs.data(), DType::kInt32, {c.requests, m.columns});
      reset_swap_state(g.state);
    }
  } catch (const std::bad_alloc&) {
    too_large();
  } catch (const std::length_error&) {
    too_large();
  }
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

void Coordinator::admit(std::int64_t request, std::int64_t tokens) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kFree});
  require(tokens >= 0 && tokens <= max_length(), "tokens", tokens, "0..{}", max_length());
  m.need_device_rows();
  m.need_pages(ceil_div(tokens, m.config.page_size));
  q.state = RequestState::kActive;
  q.staged.assign(at(m.layers), 0);
  m.take_device_rows(request);
  m.take_pages(q, tokens);
  m.grow(request, tokens);
}

void Coordinator::reserve(std::int64_t request, std::int64_t count) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kActive});
  require(count >= 0 && count <= m.config.context - q.length, "count", count, "0..{}", m.config.context - q.length);
  m.need_pages(m.missing_pages(q, q.length + count));
  m.take_pages(q, q.length + count);
  m.grow(request, q.length + count);
}

void Coordinator::stage(std::int64_t layer, std::int64_t request, std::int64_t position, std::int64_t count, const void* rows,
                        std::int64_t pitch, const void* rows_v, std::int64_t pitch_v) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Request& q = m.in_state(request, {RequestState::kActive});
  const std::int64_t reserved = std::min(m.config.context, static_cast<std::int64_t>(q.pages.size()) * m.config.page_size);
  require(position >= q.length && position <= q.staged[at(l)], "position", position, "{}..{}, the positions that come next", q.length,
          q.staged[at(l)]);
  require(count >= 0 && count <= reserved - position, "count", count, "at most {} reserved positions", reserved - position);
  if (count > 0) m.first_pair(rows, "rows");
  if (count > 0) m.second_pair(l, rows_v, "rows_v");
  for (const std::int64_t bytes : {pitch, rows_v ? pitch_v : pitch})
    require(count <= 1 || bytes == 0 || bytes >= m.rows[at(l)].item_bytes, "pitch", bytes, "at least the {} bytes of a row, or 0",
            m.rows[at(l)].item_bytes);
  const void* const from[2] = {rows, rows_v};
  const std::int64_t step[2] = {pitch, pitch_v};
  for (int i = 0; i < m.rows[at(l)].pairs; ++i)
    for (std::int64_t k = 0; k < count; ++k)
      cpu::unpack_row(static_cast<const std::byte*>(from[i]) + k * step[i], m.host_spans(l, i, m.page_row(q, position + k)));
  q.staged[at(l)] = position + count;
  m.stats.bytes_to_host += count * m.rows[at(l)].pairs * m.rows[at(l)].item_bytes;
}

void Coordinator::stage(std::int64_t layer, std::int64_t request, std::int64_t position, const TensorView& rows, const TensorView& rows_v) {
  const Impl& m = *impl_;
  core::Checker check("Coordinator");
  const std::int64_t item = m.rows[at(m.local(layer))].item_bytes;
  for (const auto& [name, t] : {std::pair{"rows", &rows}, std::pair{"rows_v", &rows_v}}) {
    if (!t->given()) continue;
    check.require(t->ndim >= 1 && t->device.type == DeviceType::kCpu, name, "a CPU tensor [count, ...]", shape_text(*t));
    check.require(t->sizes[0] == 0 || t->numel() / t->sizes[0] * size_of(t->dtype) == item, name, fmt::format("rows of {} bytes", item),
                  "shape " + shape_text(*t));
    check.require(t->sizes[0] == rows.sizes[0], name, fmt::format("{} rows", rows.sizes[0]), shape_text(*t));
    check.arg(name, *t).inner_contiguous(t->ndim - 1);
    m.apart(check, name, *t, layer, {0, 2});
  }
  check.arg("rows", rows).required();
  stage(layer, request, position, rows.sizes[0], rows.data, rows.strides[0] * size_of(rows.dtype), rows_v.given() ? rows_v.data : nullptr,
        rows_v.given() ? rows_v.strides[0] * size_of(rows_v.dtype) : 0);
}

void Coordinator::append(std::int64_t request, std::int64_t count, Source source) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kActive});
  const std::int64_t reserved = std::min(m.config.context, static_cast<std::int64_t>(q.pages.size()) * m.config.page_size);
  require(count >= 0 && count <= reserved - q.length, "count", count, "at most {} reserved positions", reserved - q.length);
  const std::int64_t first = q.length, last = first + count;
  if (source == Source::kStaged)
    for (std::int64_t l = 0; l < m.layers; ++l)
      require(q.staged[at(l)] >= last, "count", count, "positions that layer {} has staged (up to {})", l + m.config.first_layer,
              q.staged[at(l)]);
  m.grow(request, last);
  for (std::int64_t p = first; p < last; ++p) m.host_locs[at(request * m.config.context + p)] = m.page_row(q, p);
  // The tail is a ring over positions: what these push out of it must not stay findable.
  for (std::int64_t p = std::max(first, last - m.config.tail); p < last; ++p)
    for (Group& g : m.groups) Impl::token(g, request, m.tail_column(p)) = -1;
  q.length = last;
  for (std::int64_t& staged : q.staged) staged = std::max(staged, last);
  if (source == Source::kStaged || last <= m.config.hot) m.load_identity(request, first, last);
}

std::span<const std::int64_t> Coordinator::host_pages(std::int64_t request) const {
  return impl_->requests[at(impl_->slot_id(request))].pages;
}

std::int64_t Coordinator::host_row(std::int64_t request, std::int64_t position) const {
  const Impl& m = *impl_;
  const Request& q = m.in_state(request, {RequestState::kActive, RequestState::kVerifying, RequestState::kRetracted});
  const std::int64_t reserved = std::min(m.config.context, static_cast<std::int64_t>(q.pages.size()) * m.config.page_size);
  require(position >= 0 && position < reserved, "position", position, "below the {} reserved positions", reserved);
  return m.page_row(q, position);
}

// ----------------------------------------------------------------------------------------------------------------- a step

void Coordinator::prepare_verify(std::span<const std::int64_t> ids, std::span<const std::int64_t> widths, const TensorView& locs) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  const auto batch = static_cast<std::int64_t>(ids.size());
  if (widths.size() != ids.size())
    throw_value(fmt::format("HiSparse verify slot mismatch: expected {}, got {}.", ids.size(), widths.size()));
  m.distinct(ids);
  std::int64_t pages = 0, widest = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const Request& q = m.in_state(ids[at(b)], {RequestState::kActive});
    const std::int64_t w = widths[at(b)];
    require(w >= 1, "widths", w, ">= 1");
    if (w > c.window)
      throw_value(fmt::format("HiSparse spec needs {} verify slots, but the extra page has only {} usable slots.", w, c.window));
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
    const std::int64_t r = ids[at(b)];
    Request& q = m.requests[at(r)];
    q.state = RequestState::kVerifying;
    q.width = widths[at(b)];
    m.take_pages(q, q.length + q.width);
    m.grow(r, q.length + q.width);
    for (std::int64_t p = q.length; p < q.length + q.width; ++p)
      for (Group& g : m.groups) Impl::token(g, r, m.tail_column(p)) = static_cast<std::int32_t>(p);
    if (!locs.given()) continue;
    for (std::int64_t j = 0; j < locs.sizes[1]; ++j)
      locs.as<std::int32_t>()[b * locs.strides[0] + j * locs.strides[1]] =
          j < q.width ? static_cast<std::int32_t>(m.loc(r, m.tail_column(q.length + j))) : -1;
  }
}

std::int64_t Coordinator::verify_loc(std::int64_t request, std::int64_t j) const {
  const Impl& m = *impl_;
  const Request& q = m.in_state(request, {RequestState::kVerifying});
  require(j >= 0 && j < q.width, "j", j, "0..{}", q.width - 1);
  return m.loc(request, m.tail_column(q.length + j));
}

void Coordinator::write(std::int64_t layer, std::int64_t request, std::int64_t j, const void* row, const void* row_v) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer), where = verify_loc(request, j);
  m.first_pair(row, "row");
  m.second_pair(l, row_v, "row_v");
  const void* const from[2] = {row, row_v};
  for (int i = 0; i < m.rows[at(l)].pairs; ++i) cpu::unpack_row(from[i], m.device_spans(l, i, where));
}

void Coordinator::write(std::int64_t layer, std::int64_t request, std::int64_t j, const TensorView& row, const TensorView& row_v) {
  const Impl& m = *impl_;
  core::Checker check("Coordinator");
  const std::int64_t item = m.rows[at(m.local(layer))].item_bytes;
  for (const auto& [name, t] : {std::pair{"row", &row}, std::pair{"row_v", &row_v}}) {
    if (!t->given()) continue;
    check.require(t->device.type == DeviceType::kCpu && t->numel() * size_of(t->dtype) == item, name, fmt::format("{} bytes", item),
                  "shape " + shape_text(*t));
    check.arg(name, *t).inner_contiguous(t->ndim);
    m.apart(check, name, *t, layer, {1, 3});
  }
  check.arg("row", row).required();
  write(layer, request, j, row.data, row_v.given() ? row_v.data : nullptr);
}

namespace {

/// A selection of one step, [B, K], as three dimensions.
SwapInParams three_dimensional(const SwapInParams& params) {
  SwapInParams p = params;
  if (p.top_k_tokens.ndim != 2 && p.top_k_tokens.ndim != 3) throw_value("HiSparse top-k must be two- or three-dimensional.");
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
Integers lengths(const TensorView& t) { return {t.data, t.strides[0], t.strides[1], static_cast<int>(size_of(t.dtype))}; }

}  // namespace

void Coordinator::swap(std::int64_t layer, const SwapInParams& params, std::int64_t round) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  const std::int64_t l = m.local(layer);
  Group& g = m.groups[at(m.group_of[at(l)])];
  if (g.anchor != l) refuse("layer", "an anchor layer", fmt::format("{}, a follower of {}", layer, g.anchor + c.first_layer));
  require(round == 0 || round == g.rounds, "round", round, "0 or the next one, {}", g.rounds);
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
  p.host_cache_locs = host_cache_locs();
  p.buffers = m.buffers[at(l)];
  p.state = g.state;
  p.scratch_locs = TensorView(m.scratch_locs.data(), DType::kInt32, {c.requests, c.scratch});
  p.layout = c.layout;
  const std::int64_t batch = B, occurrences = S * K;
  const std::int64_t real = num_real ? std::clamp<std::int64_t>(*num_real, 0, batch) : batch;
  Plan& plan = m.spare;
  std::vector<std::int32_t>&misses = m.misses, &hits = m.hits;
  misses.resize(at(batch));
  hits.resize(at(batch));
  plan.src.resize(at(batch * occurrences));
  plan.dst.resize(at(batch * occurrences));
  plan.count.resize(at(batch));
  plan.requests.resize(at(real));
  plan.batch = batch;
  plan.capacity = occurrences;
  p.plan = {TensorView(plan.src.data(), DType::kInt64, {batch, occurrences}),
            TensorView(plan.dst.data(), DType::kInt32, {batch, occurrences}), TensorView(plan.count.data(), DType::kInt32, {batch})};
  const TensorView given_misses = p.unique_misses, given_hits = p.unique_hits;
  p.unique_misses = TensorView(misses.data(), DType::kInt32, {batch});
  p.unique_hits = TensorView(hits.data(), DType::kInt32, {batch});
  // Rows of a request that holds none would all be -1; that is a mistake of the caller.
  const Integers lens = lengths(p.seq_lens);
  for (std::int64_t b = 0; b < real; ++b) {
    const std::int64_t r = plan.requests[at(b)] = core::load_index(p.req_pool_indices, b);
    const Request& q = m.in_state(r, {RequestState::kActive, RequestState::kVerifying});
    for (std::int64_t s = 0; s < S; ++s)
      require(lens(b, s) <= q.length + q.width, "seq_lens", lens(b, s), "at most {}, the end of the window", q.length + q.width);
  }
  swap_in(p);
  for (const auto& [out, from] : {std::pair{&given_misses, &misses}, std::pair{&given_hits, &hits}})
    if (out->given())
      for (std::int64_t b = 0; b < batch; ++b) out->as<std::int32_t>()[b * out->strides[0]] = (*from)[at(b)];

  m.stats.swaps += real;
  for (std::int64_t b = 0; b < batch; ++b) {
    m.stats.unique_hits += hits[at(b)];
    m.stats.unique_misses += misses[at(b)];
    m.stats.unserved += misses[at(b)] - plan.count[at(b)];
    if (!p.skip_io) m.stats.bytes_to_device += plan.count[at(b)] * m.rows[at(l)].pairs * m.rows[at(l)].item_bytes;
  }
  if (round == 0)  // a follower that did not follow the last rounds must not miss what they brought: it may be a hit from now on
    for (const std::int64_t follower : g.layers) {
      if (follower != l) m.catch_up(g, follower, g.rounds);
      m.followed[at(follower)] = 0;
    }
  g.rounds = round + 1;
  if (g.rounds > static_cast<std::int64_t>(g.plans.size())) g.plans.emplace_back();
  std::swap(g.plans[at(round)], plan);
}

void Coordinator::follow(std::int64_t layer, std::int64_t round) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  Group& g = m.groups[at(m.group_of[at(l)])];
  if (g.anchor == l) refuse("layer", "a follower layer", fmt::format("{}, an anchor", layer));
  if (round != m.followed[at(l)] || round >= g.rounds)
    refuse("round", fmt::format("a swap of anchor {} that layer {} has yet to follow", g.anchor + m.config.first_layer, layer),
           round >= g.rounds ? fmt::format("none for round {}", round) : fmt::format("round {}, not {}", round, m.followed[at(l)]));
  m.catch_up(g, l, round + 1);
}

std::int64_t Coordinator::plan_rounds(std::int64_t layer, const SwapInParams& params, const TensorView& round_of) const {
  const Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  const Group& g = m.groups[at(m.group_of[at(l)])];
  const SwapInParams p = three_dimensional(params);
  core::Checker check = m.known;
  core::Sym B("B"), S("S"), K("K");
  check_selection(check, p, B, S, K);
  check.arg("round_of", round_of).required().dtype(DType::kInt32).shape({B, S}).same_device().written();
  check.outputs_apart();
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
  const Integers lens = lengths(p.seq_lens);
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
        if (Impl::token(const_cast<Group&>(g), r, m.tail_column(t)) == t || m.host_locs[at(r * m.config.context + t)] < 0) continue;
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

void Coordinator::accept(std::span<const std::int64_t> ids, std::span<const std::int64_t> accepted) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  if (accepted.size() != ids.size())
    throw_value(fmt::format("HiSparse verify slot mismatch: expected {}, got {}.", ids.size(), accepted.size()));
  m.distinct(ids);
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const Request& q = m.in_state(ids[b], {RequestState::kVerifying});
    if (accepted[b] < 0 || accepted[b] > q.width) throw_value("HiSparse accept_indices point outside verify_cache_locs.");
  }
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const std::int64_t r = ids[b];
    Request& q = m.requests[at(r)];
    for (std::int64_t p = q.length; p < q.length + accepted[b]; ++p) {
      const std::int64_t from = m.loc(r, m.tail_column(p)), to = m.page_row(q, p);
      for (std::int64_t l = 0; l < m.layers; ++l)
        for (int i = 0; i < m.rows[at(l)].pairs; ++i) {
          cpu::copy_row(m.device_spans(l, i, from), m.host_spans(l, i, to));
          m.stats.bytes_to_host += m.rows[at(l)].item_bytes;
        }
      m.host_locs[at(r * c.context + p)] = to;
      // Where nothing was evicted yet, the slot of the same number is free: the position moves there and stays for good.
      for (Group& g : m.groups) {
        if (p >= c.hot || !m.slot_free(g, r, p)) continue;
        for (const std::int64_t l : g.layers)
          for (int i = 0; i < m.rows[at(l)].pairs; ++i) cpu::copy_row(m.device_spans(l, i, from), m.device_spans(l, i, m.loc(r, p)));
        m.make_resident(g, r, p);
        Impl::token(g, r, m.tail_column(p)) = -1;
      }
    }
    for (std::int64_t p = q.length + accepted[b]; p < q.length + q.width; ++p)
      for (Group& g : m.groups) Impl::token(g, r, m.tail_column(p)) = -1;
    q.length += accepted[b];
    q.width = 0;
    q.state = RequestState::kActive;
    for (std::int64_t& staged : q.staged) staged = q.length;
  }
}

// -------------------------------------------------------------------------------------------------------------------- end

void Coordinator::finish(std::int64_t request) {
  impl_->in_state(request, {RequestState::kActive, RequestState::kVerifying, RequestState::kRetracted});
  abort(request);
}

void Coordinator::abort(std::int64_t request) {
  Impl& m = *impl_;
  Request& q = m.requests[at(m.slot_id(request))];
  if (q.state == RequestState::kFree) return;
  if (q.state != RequestState::kRetracted) m.drop_device_rows(request);
  while (!q.pages.empty()) {
    m.free_pages.push_back(q.pages.back());
    q.pages.pop_back();
  }
  std::fill_n(m.host_locs.begin() + request * m.config.context, m.config.context, -1);
  q = Request{};
}

void Coordinator::retract(std::int64_t request) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kActive, RequestState::kVerifying});
  m.drop_device_rows(request);
  q.state = RequestState::kRetracted;
  q.width = 0;
}

void Coordinator::resume(std::int64_t request) {
  Impl& m = *impl_;
  Request& q = m.in_state(request, {RequestState::kRetracted});
  m.need_device_rows();
  q.state = RequestState::kActive;
  m.take_device_rows(request);
  m.grow(request, q.length);
  if (q.length <= m.config.hot) m.load_identity(request, 0, q.length);
}

// ---------------------------------------------------------------------------------------------------------------- looking

RequestState Coordinator::state(std::int64_t request) const { return impl_->requests[at(impl_->slot_id(request))].state; }
std::int64_t Coordinator::length(std::int64_t request) const { return impl_->requests[at(impl_->slot_id(request))].length; }
std::int64_t Coordinator::free_device_rows() const { return static_cast<std::int64_t>(impl_->free_device.size()); }
std::int64_t Coordinator::free_host_rows() const { return static_cast<std::int64_t>(impl_->free_pages.size()) * impl_->config.page_size; }
const CoordinatorStats& Coordinator::stats() const { return impl_->stats; }

SwapState Coordinator::tables(std::int64_t layer) const {
  const Impl& m = *impl_;
  return m.groups[at(m.group_of[at(m.local(layer))])].state;
}

TensorView Coordinator::host_cache_locs() const {
  const CoordinatorConfig& c = impl_->config;
  return TensorView(impl_->host_locs.data(), DType::kInt64, {c.requests, c.context});
}

}  // namespace specstate::hisparse
