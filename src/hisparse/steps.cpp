// Staging, opening and accepting a window: checks, dispatch and the CPU form. A row moves only after every id was judged.
#include "hisparse/steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <string>
#include <tuple>

#include "core/dispatch.hpp"
#include "core/match.hpp"
#include "hisparse/check.hpp"
#include "hisparse/layout.hpp"
#include "hisparse/rows.hpp"
#include "specstate/hisparse_steps.hpp"

namespace specstate::hisparse {

using core::Checker;
using core::Dim;
using core::Sym;
using core::throw_value;

namespace {

/// `name` stays in its place: the checker points to it.
RowBuffer row_buffer(Checker& check, const std::string& name, const TensorView& t, bool paged, std::int64_t& item) {
  check.arg(name.c_str(), t).required().as_bytes();
  check.require(t.ndim >= 1, name, "at least one dimension", "shape ()");
  // Either end may be host memory: pinned, where the other is on a GPU.
  if (check.device().type == DeviceType::kCpu || t.device.type == DeviceType::kCuda)
    check.arg(name.c_str(), t).as_bytes().same_device();
  else
    check.require(core::pinned(t), name, "pinned host memory", "pageable host memory");
  const std::int64_t bytes = t.numel() * size_of(t.dtype);
  if (paged) {
    check.arg(name.c_str(), t).inner_contiguous(t.ndim);
    if (bytes % layout::kPageBytes != 0) check.fail(name, "whole DSv4 pages of 37440 bytes", std::to_string(bytes) + " bytes");
    item = layout::kPagedRowBytes;
    return {t.as<std::byte>(), 0, bytes / layout::kPageBytes * layout::kPageRows};
  }
  std::int64_t inner = size_of(t.dtype);
  for (int i = 1; i < t.ndim; ++i) inner *= t.sizes[i];
  if (item < 0) item = inner;
  if (inner != item || inner < 1)
    check.fail(name, item > 0 ? fmt::format("rows of {} bytes", item) : "rows of at least one byte",
               fmt::format("rows of {} bytes", inner));
  check_item(check, name.c_str(), item);
  check.arg(name.c_str(), t).inner_contiguous(t.ndim - 1);
  return {t.as<std::byte>(), t.strides[0] * size_of(t.dtype), t.sizes[0]};
}

/// The tables of all groups, of one shape: R, H, P, L. `names` outlives the checker's use of them.
std::vector<WindowTables> check_groups(Checker& check, const WindowGroup* groups, std::int64_t n, WindowArgs& a,
                                       std::deque<std::string>& names) {
  check.array("groups", groups, "num_groups", n);
  if (n < 1) check.fail("num_groups", "1 or more", std::to_string(n));
  Sym R("R"), L("L"), H("H"), W("H+P");
  std::vector<WindowTables> tables;
  for (std::int64_t i = 0; i < n; ++i) {
    const SwapState& s = groups[i].state;
    const std::string at = fmt::format("groups[{}].state.", i);
    const auto arg = [&](const char* name, const TensorView& t, std::initializer_list<DType> dtypes, std::initializer_list<Dim> shape) {
      return check.arg(names.emplace_back(at + name).c_str(), t).required().dtype(dtypes).shape(shape).same_device();
    };
    arg("slot_tokens", s.slot_tokens, {DType::kInt32}, {R, W}).written();
    arg("slot_locs", s.slot_locs, {DType::kInt32}, {R, W});
    arg("slot_stamps", s.slot_stamps, {DType::kInt32}, {R, H}).written();
    if (H < 1 || H > W) check.fail(at + "slot_stamps", fmt::format("1 to {} hot slots", W.value()), shape_text(s.slot_stamps));
    arg("token_slots", s.token_slots, {DType::kInt16, DType::kInt32}, {R, L}).written();
    if (s.token_slots.dtype == DType::kInt16)
      check.require(H <= layout::kMaxShortSlots, at + "token_slots", "dtype int32 for more than 32767 hot slots", "int16");
    arg("clock", s.clock, {DType::kInt32}, {R});
    tables.push_back({table(s.slot_tokens),
                      table(s.slot_locs),
                      table(s.slot_stamps),
                      integers(s.token_slots),
                      {s.clock.as<std::int32_t>(), s.clock.strides[0]}});
  }
  a.request_slots = R;
  a.context = L;
  a.hot = H;
  a.tail = W - H;
  return tables;
}

template <class Params>
void check_batch(Checker& check, const Params& p, WindowArgs& a) {
  Sym B("B");
  check.arg("requests", p.requests).required().dtype({DType::kInt32, DType::kInt64}).shape({B}).same_device();
  check_count(check, "requests", p.requests);
  check.arg("widths", p.widths).required().dtype(DType::kInt32).shape({B}).same_device();
  check.arg("lengths", p.lengths).required().dtype(DType::kInt32).shape({Dim(a.request_slots)}).same_device().written();
  a.num_real = check_num_real(check, p.num_real_reqs);
  a.requests = integers(p.requests);
  a.widths = integers(p.widths);
  a.lengths = {p.lengths.template as<std::int32_t>(), p.lengths.strides[0]};
  a.batch = B;
}

}  // namespace

void copy_rows(const CopyRowsParams& p, Stream stream) {
  Checker check("copy_rows");
  Sym n("n");
  check.arg("src_rows", p.src_rows).required().dtype({DType::kInt32, DType::kInt64}).shape({n}).same_device();
  check.arg("dst_rows", p.dst_rows).required().dtype({DType::kInt32, DType::kInt64}).shape({n}).same_device();
  check_count(check, "src_rows", p.src_rows);
  std::vector<CopyRowsLayer> layers;
  CopyRowsArgs a{integers(p.src_rows), integers(p.dst_rows), n, check_paged(check, p.layout), -1, check_sm_budget(check, p.sm_budget)};
  check.array("src", p.src, "num_layers", p.num_layers);
  check.array("dst", p.dst, "num_layers", p.num_layers);
  std::deque<std::string> names;
  for (std::int64_t l = 0; l < p.num_layers; ++l) {
    const std::string &from = names.emplace_back(fmt::format("src[{}]", l)), &to = names.emplace_back(fmt::format("dst[{}]", l));
    const bool within = same_view(p.src[l], p.dst[l]);  // rows move inside one buffer: that is one argument
    const RowBuffer src = row_buffer(check, within ? to : from, p.src[l], a.paged, a.item_bytes);
    layers.push_back({src, row_buffer(check, to, p.dst[l], a.paged, a.item_bytes)});
    check.arg(to.c_str(), p.dst[l]).as_bytes().written();
  }
  check.outputs_apart();
  core::on_backend(
      check.op(), p.src_rows.device, [&] { cpu::run(a, layers); }, [&] { cuda::run(a, layers, stream); });
}

void open_window(const OpenWindowParams& p, Stream stream) {
  Checker check("open_window");
  WindowArgs a{};
  a.op = check.op();
  std::deque<std::string> names;
  const std::vector<WindowTables> groups = check_groups(check, p.groups, p.num_groups, a, names);
  check_batch(check, p, a);
  check.arg("locs", p.locs).dtype(DType::kInt32).shape({Dim(a.batch), Dim::at_least(1, "W")}).same_device().written();
  if (p.locs.given()) a.locs = table(p.locs), a.locs_width = p.locs.sizes[1];
  check.outputs_apart();
  core::on_backend(
      a.op, p.requests.device, [&] { cpu::run(a, groups, {}); }, [&] { cuda::run(a, groups, {}, stream); });
}

void accept_window(const AcceptWindowParams& p, Stream stream) {
  Checker check("accept_window");
  WindowArgs a{};
  a.op = check.op();
  std::deque<std::string> names;
  const std::vector<WindowTables> groups = check_groups(check, p.groups, p.num_groups, a, names);
  check_batch(check, p, a);
  a.sm_budget = check_sm_budget(check, p.sm_budget);
  check.arg("accepted", p.accepted).required().dtype(DType::kInt32).shape({Dim(a.batch)}).same_device();
  // Both may be one table: then it is one argument.
  const char* const reserved = same_view(p.reserved_rows, p.host_cache_locs) ? "host_cache_locs" : "reserved_rows";
  check.require(p.page_size >= 1, "page_size", ">= 1", std::to_string(p.page_size));
  a.page = p.page_size;
  check_paged(check, p.layout);
  const std::int64_t pages = a.context / a.page + (a.context % a.page != 0);
  for (const auto& [name, t, columns] :
       {std::tuple{reserved, &p.reserved_rows, pages}, std::tuple{"host_cache_locs", &p.host_cache_locs, a.context}})
    check.arg(name, *t).required().dtype({DType::kInt32, DType::kInt64}).shape({Dim(a.request_slots), Dim(columns)}).same_device();
  check.arg("host_cache_locs", p.host_cache_locs).written();
  a.accepted = integers(p.accepted);
  a.reserved = integers(p.reserved_rows);
  a.host_locs = integers(p.host_cache_locs);
  a.most_entry = INT64_MAX / a.page - 1;
  a.host_rows = p.host_cache_locs.dtype == DType::kInt32 ? std::int64_t{INT32_MAX} + 1 : INT64_MAX;  // what the table can name
  a.device_rows = INT64_MAX;
  std::vector<WindowLayer> layers;
  std::deque<LayerNames> layer_names;
  for (std::int64_t g = 0; g < p.num_groups; ++g) {
    check.array(fmt::format("groups[{}].layers", g), p.groups[g].layers, fmt::format("groups[{}].num_layers", g), p.groups[g].num_layers);
    for (std::int64_t l = 0; l < p.groups[g].num_layers; ++l) {
      layer_names.emplace_back(fmt::format("layers[{}].", layers.size()));
      layers.push_back({check_buffers(check, layer_names.back(), p.groups[g].layers[l], p.layout), g});
      a.host_rows = std::min(a.host_rows, layers.back().copy.host_rows());
      a.device_rows = std::min(a.device_rows, layers.back().copy.device_rows());
    }
  }
  check.outputs_apart();
  core::on_backend(
      a.op, p.requests.device, [&] { cpu::run(a, groups, layers); }, [&] { cuda::run(a, groups, layers, stream); });
}

namespace cpu {

namespace {
[[noreturn]] void refuse(const char* op, const char* name, const std::string& expected, std::int64_t got, std::int64_t where) {
  throw_value(fmt::format("{}: {}: expected {}, got {} at [{}].", op, name, expected, got, where));
}
}  // namespace

void run(const CopyRowsArgs& a, const std::vector<CopyRowsLayer>& layers) {
  std::int64_t src_rows = INT64_MAX, dst_rows = INT64_MAX;
  for (const CopyRowsLayer& l : layers) src_rows = std::min(src_rows, l.src.rows), dst_rows = std::min(dst_rows, l.dst.rows);
  std::vector<std::pair<std::int64_t, std::int64_t>> moves;  // each index is read once: what was judged is what moves
  for (std::int64_t i = 0; i < a.count; ++i) {
    const std::int64_t src = a.src(i), dst = a.dst(i);
    if (src < 0 || dst < 0) continue;
    if (src >= src_rows) refuse("copy_rows", "src_rows", fmt::format("rows below {}", src_rows), src, i);
    if (dst >= dst_rows) refuse("copy_rows", "dst_rows", fmt::format("rows below {}", dst_rows), dst, i);
    moves.emplace_back(src, dst);
  }
  for (const CopyRowsLayer& l : layers)
    for (const auto& [src, dst] : moves)
      copy_row(row_spans(l.src, a.paged, a.item_bytes, src), row_spans(l.dst, a.paged, a.item_bytes, dst));
}

void run(const WindowArgs& a, const std::vector<WindowTables>& groups, const std::vector<WindowLayer>& layers) {
  const std::int64_t real = a.num_real ? std::clamp<std::int64_t>(*a.num_real, 0, a.batch) : a.batch;
  const bool accepts = a.accepted.data != nullptr;
  std::vector<std::int64_t> seen;
  for (std::int64_t b = 0; b < real; ++b) {
    const std::int64_t r = a.requests(b), width = a.widths(b);
    if (r < 0 || r >= a.request_slots) refuse(a.op, "requests", fmt::format("request ids in 0..{}", a.request_slots - 1), r, b);
    if (std::find(seen.begin(), seen.end(), r) != seen.end()) refuse(a.op, "requests", "each request once", r, b);
    seen.push_back(r);
    const std::int64_t length = a.lengths(r);
    if (length < 0 || length > a.context) refuse(a.op, "lengths", fmt::format("0..{}", a.context), length, r);
    const std::int64_t most = std::min(a.tail, a.context - length);
    if (width < 0 || width > most) refuse(a.op, "widths", fmt::format("0..{}", most), width, b);
    if (!accepts) continue;
    if (a.accepted(b) < 0 || a.accepted(b) > width) refuse(a.op, "accepted", fmt::format("0..{}", width), a.accepted(b), b);
    for (std::size_t g = 0; g < groups.size(); ++g)
      if (const std::int32_t clock = groups[g].clock(r); clock < 0 || clock > layout::kMaxClock)
        refuse(a.op, fmt::format("groups[{}].state.clock", g).c_str(), "a state that reset_swap_state has prepared", clock, r);
    for (std::int64_t p = length; p < length + a.accepted(b); ++p) {
      if (const std::int64_t entry = a.reserved(r, p / a.page); entry > a.most_entry)
        refuse(a.op, "reserved_rows", fmt::format("pages in 0..{}", a.most_entry), entry, p / a.page);
      if (const std::int64_t row = a.reserved_row(r, p); row < 0 || row >= a.host_rows)
        refuse(a.op, "reserved_rows", fmt::format("host rows in 0..{}", a.host_rows - 1), row, p);
      for (const WindowTables& g : groups)
        for (const std::int64_t c : {a.hot + p % a.tail, std::min(p, a.hot)})
          if (g.slot_locs(r, c) >= a.device_rows || (c >= a.hot && p % a.tail == c - a.hot && g.slot_locs(r, c) < 0))
            refuse(a.op, "slot_locs", fmt::format("device rows in 0..{}", a.device_rows - 1), g.slot_locs(r, c), r);
    }
  }
  for (std::int64_t b = 0; b < a.batch && a.locs; ++b)
    for (std::int64_t j = 0; j < a.locs_width; ++j) {
      const bool inside = b < real && j < a.widths(b);
      a.locs(b, j) = inside ? groups[0].slot_locs(a.requests(b), a.hot + (a.lengths(a.requests(b)) + j) % a.tail) : -1;
    }
  for (std::int64_t b = 0; b < real; ++b) {
    const std::int64_t r = a.requests(b), length = a.lengths(r), taken = accepts ? a.accepted(b) : 0;
    for (std::int64_t p = length; p < length + a.widths(b); ++p) {
      const std::int64_t column = a.hot + p % a.tail;
      if (!accepts) {
        for (const WindowTables& g : groups) g.slot_tokens(r, column) = static_cast<std::int32_t>(p);
        continue;
      }
      const bool stands = p < length + taken;
      const auto moves = [&](const WindowTables& g) { return stands && p < a.hot && g.slot_locs(r, p) >= 0 && g.slot_tokens(r, p) < 0; };
      for (const WindowLayer& l : layers) {
        if (!stands) continue;
        const WindowTables& g = groups[static_cast<std::size_t>(l.group)];
        for (int i = 0; i < l.copy.pairs; ++i) {
          const RowSpans from = row_spans(l.copy.device[i], l.copy.paged, l.copy.item_bytes, g.slot_locs(r, column));
          copy_row(from, row_spans(l.copy.host[i], l.copy.paged, l.copy.item_bytes, a.reserved_row(r, p)));
          if (moves(g)) copy_row(from, row_spans(l.copy.device[i], l.copy.paged, l.copy.item_bytes, g.slot_locs(r, p)));
        }
      }
      for (const WindowTables& g : groups) {
        if (!stands || moves(g)) {
          if (stands) {
            g.slot_tokens(r, p) = static_cast<std::int32_t>(p);
            g.stamps(r, p) = layout::hit_stamp(g.clock(r));
            g.hints.store(r, p, p);
          }
          g.slot_tokens(r, column) = -1;
        }
      }
      if (stands) a.host_locs.store(r, p, a.reserved_row(r, p));
    }
    if (accepts) a.lengths(r) = static_cast<std::int32_t>(length + taken);
  }
}

}  // namespace cpu

}  // namespace specstate::hisparse
