// The calls around the swap: admission, windows, steps whose counts are elsewhere, the end of a request.
#include "hisparse/coordinator.hpp"

#include <fmt/format.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace specstate::hisparse {

// ---------------------------------------------------------------------------------------------------------------- checks

std::int64_t Coordinator::Impl::local(std::int64_t layer) const {
  if (layer < config.first_layer || layer >= config.first_layer + layers)
    refuse("layer", fmt::format("{}..{}", config.first_layer, config.first_layer + layers - 1), layer);
  return layer - config.first_layer;
}

std::int64_t Coordinator::Impl::slot_id(std::int64_t r) const {
  if (r < 0 || r >= config.requests) refuse("request", fmt::format("0..{}", config.requests - 1), r);
  return r;
}

const Request& Coordinator::Impl::in_state(std::int64_t r, std::initializer_list<RequestState> allowed) const {
  const Request& q = requests[at(slot_id(r))];
  if (std::find(allowed.begin(), allowed.end(), q.state) == allowed.end()) {
    std::string expected;
    for (RequestState s : allowed) expected += (expected.empty() ? "" : " or ") + std::string(name_of(s));
    refuse("request", fmt::format("request {} to be {}", r, expected), name_of(q.state));
  }
  return q;
}

void Coordinator::Impl::distinct(std::span<const std::int64_t> ids) const {
  std::vector<std::int64_t> sorted(ids.begin(), ids.end());
  std::sort(sorted.begin(), sorted.end());
  if (auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    refuse("requests", "each request once", fmt::format("request {} again", *twice));
}

void Coordinator::Impl::need_pages(std::int64_t pages) const {
  if (pages > static_cast<std::int64_t>(free_pages.size()))
    throw_runtime(fmt::format("HiSparse failed to allocate {} KV slots. {} of {} host rows are free.", pages * config.page_size,
                              static_cast<std::int64_t>(free_pages.size()) * config.page_size,
                              config.host_rows / config.page_size * config.page_size));
}

void Coordinator::Impl::need_device_rows() const {
  const auto free = static_cast<std::int64_t>(free_device.size());
  const auto refuse = [&](std::string text) {
    throw_runtime(fmt::format("{} {} of {} device rows are free.", text, free, config.device_rows));
  };
  if (free < columns) refuse(fmt::format("HiSparse failed to allocate {} KV slots.", columns));
  if (free < per_request) refuse(fmt::format("HiSparse spec failed to allocate {} scratch slots.", config.scratch));
}

void Coordinator::Impl::apart(const core::Checker& check, const char* name, const TensorView& t, std::int64_t layer,
                              std::initializer_list<int> into) const {
  const std::int64_t l = local(layer);
  const KvBuffers& k = buffers[at(l)];
  const TensorView* const all[4] = {&k.host_cache, &k.device_buffer, &k.host_cache_v, &k.device_buffer_v};
  for (const int i : into)
    check.require(!core::may_overlap(t, *all[i]), name, "memory of its own",
                  fmt::format("memory that overlaps {}", static_cast<const char* const*>(names[at(l)])[i]));
}

void Coordinator::Impl::outcome_known(std::int64_t r) const {
  if (requests[at(r)].ahead > 0)
    refuse("request", fmt::format("request {} with no step under way", r), fmt::format("{} to end", requests[at(r)].ahead));
}

// ---------------------------------------------------------------------------------------------------------------- set-up

namespace {
constexpr std::int64_t kMostLayers = 1 << 20;
bool fits(std::int64_t n, std::int64_t most) { return n >= 0 && n <= most; }
}  // namespace

void Coordinator::Impl::set_up(const CoordinatorConfig& given, std::int64_t local_layers, bool gpu) {
  config = given;
  layers = local_layers;
  device.type = gpu ? DeviceType::kCuda : DeviceType::kCpu;
  CoordinatorConfig& c = config;
  if (layers < 1) refuse("host_cache", "at least one layer", layers);
  if (layers > kMostLayers) refuse("host_cache", fmt::format("at most {} layers", kMostLayers), layers);
  if (c.requests < 1) refuse("requests", ">= 1", c.requests);
  if (c.page_size < 1) refuse("page_size", ">= 1", c.page_size);
  if (!fits(c.first_layer, INT32_MAX)) refuse("first_layer", fmt::format("0..{}", INT32_MAX), c.first_layer);
  if (c.hot < 1) refuse("hot", ">= 1", c.hot);
  if (c.top_k < 0) refuse("top_k", ">= 0", c.top_k);
  if (c.top_k > c.hot) refuse("hot", fmt::format("at least top_k={} slots", c.top_k), c.hot);
  if (c.window < 1) refuse("window", ">= 1", c.window);
  if (c.scratch < 0) refuse("scratch", ">= 0", c.scratch);
  if (c.context < 1) refuse("context", ">= 1", c.context);
  if (c.sm_budget < 0) refuse("sm_budget", "0 (any number) or more SMs", c.sm_budget);
  for (const auto& [name, n] : {std::pair{"hot", c.hot},
                                {"window", c.window},
                                {"tail", c.tail},
                                {"scratch", c.scratch},
                                {"context", c.context},
                                {"requests", c.requests},
                                {"page_size", c.page_size}})
    if (n >= (std::int64_t{1} << 31)) refuse(name, "below 2^31", n);
  if (c.tail == 0) c.tail = 2 * c.window;
  if (c.tail < c.window) refuse("tail", fmt::format("at least window={} slots", c.window), c.tail);
  columns = c.hot + c.tail;
  per_request = columns + c.scratch;
  if (!c.anchor_of.empty() && static_cast<std::int64_t>(c.anchor_of.size()) != layers)
    refuse("anchor_of", fmt::format("{} entries", layers), static_cast<std::int64_t>(c.anchor_of.size()));
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
  if (gpu && static_cast<std::int64_t>(groups.size()) < layers && c.top_k < 1)
    refuse("top_k", ">= 1 on a GPU, where the plans of followers have a fixed size", c.top_k);
  if (gpu)
    most_selected =
        c.top_k > 0 ? std::min(kMaxOccurrences, c.window > kMaxOccurrences / c.top_k ? kMaxOccurrences : c.window * c.top_k) : 0;
  if (request_bytes() > INT64_MAX / 2 / c.requests) too_large();
}

void Coordinator::Impl::too_large() const {
  refuse("requests", fmt::format("tables that fit the memory (about {} bytes a request: hot, tail, scratch, context)", request_bytes()),
         std::to_string(config.requests));
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
      if (i % 2 == 0 || !m.on_gpu()) m.known.arg(names[i ^ 1], *buffers[i]).as_bytes().same_device();
    device_rows = std::min(device_rows, rows.device_rows());
    host_rows = std::min(host_rows, rows.host_rows());
  }
  m.device = check.device();
  if (c.device_rows == 0) c.device_rows = device_rows;
  if (c.host_rows == 0) c.host_rows = host_rows;
  if (!fits(c.device_rows, std::min<std::int64_t>(device_rows, INT32_MAX)))
    refuse("device_rows", fmt::format("0..{}", std::min<std::int64_t>(device_rows, INT32_MAX)), c.device_rows);
  if (!fits(c.host_rows, host_rows)) refuse("host_rows", fmt::format("0..{}", host_rows), c.host_rows);
  const std::int64_t most_host_rows = m.on_gpu() ? INT32_MAX : INT32_MAX * c.page_size;
  if (c.host_rows > most_host_rows) refuse("host_rows", fmt::format("at most {}", most_host_rows), c.host_rows);
  for (std::int64_t i = c.device_rows; i-- > 0;) m.free_device.push_back(static_cast<std::int32_t>(i));
  for (std::int64_t p = c.host_rows / c.page_size; p-- > 0;) m.free_pages.push_back(p);

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
    m.too_large();
  } catch (const std::length_error&) {
    m.too_large();
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
  if (tokens < 0 || tokens > max_length()) refuse("tokens", fmt::format("0..{}", max_length()), tokens);
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
  if (count < 0 || count > m.config.context - q.length) refuse("count", fmt::format("0..{}", m.config.context - q.length), count);
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
  if (position < q.length || position > q.staged[at(l)])
    refuse("position", fmt::format("{}..{}, the positions that come next", q.length, q.staged[at(l)]), position);
  if (count < 0 || count > reserved - position) refuse("count", fmt::format("0 to the {} reserved positions", reserved - position), count);
  if (count > 0) m.first_pair(rows, "rows");
  if (count > 0) m.second_pair(l, rows_v, "rows_v");
  for (const std::int64_t bytes : {pitch, rows_v ? pitch_v : pitch})
    if (count > 1 && bytes != 0 && bytes < m.rows(l).item_bytes)
      refuse("pitch", fmt::format("at least the {} bytes of a row, or 0", m.rows(l).item_bytes), bytes);
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
    check.arg(name, *t).as_bytes();
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
  if (count < 0 || count > reserved - q.length) refuse("count", fmt::format("0 to the {} reserved positions", reserved - q.length), count);
  const std::int64_t first = q.length, last = first + count;
  if (source == Source::kStaged)
    for (std::int64_t l = 0; l < m.layers; ++l)
      if (q.staged[at(l)] < last)
        refuse("count", fmt::format("positions that layer {} has staged (up to {})", l + m.config.first_layer, q.staged[at(l)]), count);
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
  if (position < 0 || position >= reserved)
    refuse("position", fmt::format("0 or more, below the {} reserved positions", reserved), position);
  return m.page_row(q, position);
}

// ----------------------------------------------------------------------------------------------------------------- a step

void Coordinator::prepare_verify(std::span<const std::int64_t> ids, std::span<const std::int64_t> widths, const TensorView& locs,
                                 Stream stream) {
  Impl& m = *impl_;
  const CoordinatorConfig& c = m.config;
  const auto batch = static_cast<std::int64_t>(ids.size());
  if (widths.size() != ids.size())
    refuse("widths", fmt::format("one for each of {} requests", ids.size()), static_cast<std::int64_t>(widths.size()));
  m.distinct(ids);
  std::int64_t pages = 0, widest = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const Request& q = m.in_state(ids[at(b)], {RequestState::kActive});
    const std::int64_t w = widths[at(b)];
    if (w < 1) refuse("widths", ">= 1", w);
    if (w > c.window) refuse("widths", fmt::format("at most window={}", c.window), w);
    if (w > c.context - q.length) refuse("widths", fmt::format("at most {} positions that the context has left", c.context - q.length), w);
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
  if (j < 0 || j >= q.width) refuse("j", fmt::format("0..{}", q.width - 1), j);
  return q.rows[at(m.config.hot + (q.length + j) % m.config.tail)];
}

void Coordinator::write(std::int64_t layer, std::int64_t request, std::int64_t j, const void* row, const void* row_v, Stream stream) {
  Impl& m = *impl_;
  const std::int64_t l = m.local(layer);
  const Request& q = m.in_state(request, {RequestState::kVerifying});
  const std::int64_t width = q.ahead > 0 ? m.config.window : q.width;
  if (j < 0 || j >= width) refuse("j", fmt::format("0..{}", width - 1), j);
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
    check.arg(name, *t).as_bytes();
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
  check_count(check, "requests", s.requests);
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
  if (accepted.size() != ids.size())
    refuse("accepted", fmt::format("one for each of {} requests", ids.size()), static_cast<std::int64_t>(accepted.size()));
  m.distinct(ids);
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const Request& q = m.in_state(ids[b], {RequestState::kVerifying});
    if (q.ahead == 0) refuse("request", fmt::format("request {} to be in a step", ids[b]), "a window of prepare_verify");
    const std::int64_t most = std::min(m.config.window, m.config.context - q.length);
    if (accepted[b] < 0 || accepted[b] > most) refuse("accepted", fmt::format("0 to {} positions", most), accepted[b]);
  }
  for (std::size_t b = 0; b < ids.size(); ++b) {
    Request& q = m.requests[at(ids[b])];
    q.length += accepted[b];
    if (--q.ahead == 0) q.state = RequestState::kActive;
    for (std::int64_t& staged : q.staged) staged = q.length;
    m.count_backups(accepted[b]);
  }
}

void Coordinator::accept(std::span<const std::int64_t> ids, std::span<const std::int64_t> accepted, Stream stream) {
  Impl& m = *impl_;
  if (accepted.size() != ids.size())
    refuse("accepted", fmt::format("one for each of {} requests", ids.size()), static_cast<std::int64_t>(accepted.size()));
  m.distinct(ids);
  std::vector<std::int64_t> widths;
  for (std::size_t b = 0; b < ids.size(); ++b) {
    const Request& q = m.in_state(ids[b], {RequestState::kVerifying});
    m.outcome_known(ids[b]);
    if (accepted[b] < 0 || accepted[b] > q.width) refuse("accepted", fmt::format("0 to the window's {} positions", q.width), accepted[b]);
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
