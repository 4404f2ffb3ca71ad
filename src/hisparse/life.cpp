// The tables of a Coordinator on the CPU.
#include "hisparse/life.hpp"

#include <algorithm>

#include "hisparse/layout.hpp"
#include "hisparse/rows.hpp"

namespace specstate::hisparse::cpu {

namespace {
RowSpans host_spans(const WindowLayer& l, int pair, std::int64_t row) {
  return row_spans(l.copy.host[pair], l.copy.paged, l.copy.item_bytes, row);
}
RowSpans device_spans(const WindowLayer& l, int pair, std::int64_t row) {
  return row_spans(l.copy.device[pair], l.copy.paged, l.copy.item_bytes, row);
}
const WindowLayer& layer_of(const Life& life, std::int64_t layer) { return life.layers[static_cast<std::size_t>(layer)]; }
std::int64_t tail_column(const WindowArgs& a, std::int64_t p) { return a.hot + p % a.tail; }
}  // namespace

void put(std::int32_t* to, std::span<const std::int32_t> values, Stream) { std::copy(values.begin(), values.end(), to); }

void give_rows(const Life& life, std::int64_t r, std::int64_t column, std::span<const std::int32_t> rows, Stream) {
  for (const std::int32_t row : rows) {
    life.groups[0].slot_locs(r, column) = row;
    for (const WindowTables& g : life.groups) {
      if (column >= life.window.hot) break;
      g.slot_tokens(r, column) = -1;
      g.stamps(r, column) = 0;
    }
    ++column;
  }
}

void drop(const Life& life, std::int64_t r, std::int64_t n, bool whole, Stream) {
  const WindowArgs& a = life.window;
  for (const std::int64_t end = r + n; r < end; ++r) {
    std::fill_n(&life.groups[0].slot_locs(r, 0), a.hot + a.tail, -1);
    if (life.scratch_rows > 0) std::fill_n(&life.scratch(r, 0), life.scratch_rows, -1);
    for (const WindowTables& g : life.groups) {
      std::fill_n(&g.slot_tokens(r, 0), a.hot + a.tail, -1);
      std::fill_n(&g.stamps(r, 0), a.hot, 0);
      for (std::int64_t t = 0; t < a.context; ++t) g.hints.store(r, t, -1);
      g.clock(r) = 0;
    }
    if (!whole) continue;
    for (std::int64_t t = 0; t < a.context; ++t) a.host_locs.store(r, t, -1);
    std::fill_n(&life.pages(r, 0), life.page_entries, -1);
    a.lengths(r) = 0;
  }
}

void stage(const Life& life, std::int64_t layer, std::int64_t r, std::int64_t first, std::int64_t n, const GivenRows& rows, Stream) {
  const WindowLayer& l = layer_of(life, layer);
  for (int i = 0; i < l.copy.pairs; ++i)
    for (std::int64_t k = 0; k < n; ++k)
      unpack_row(rows.from[i] + k * rows.pitch[i], host_spans(l, i, life.window.reserved_row(r, first + k)));
}

void write(const Life& life, std::int64_t layer, std::int64_t r, std::int64_t j, const GivenRows& row, Stream) {
  const WindowLayer& l = layer_of(life, layer);
  const std::int64_t where = life.groups[0].slot_locs(r, tail_column(life.window, life.window.lengths(r) + j));
  for (int i = 0; i < l.copy.pairs; ++i) unpack_row(row.from[i], device_spans(l, i, where));
}

void load(const Life& life, std::int64_t r, std::int64_t first, std::int64_t last, Stream) {
  const WindowArgs& a = life.window;
  for (std::int64_t p = first; p < std::min(last, a.hot); ++p) {
    const auto free = [&](const WindowTables& g) { return g.slot_locs(r, p) >= 0 && g.slot_tokens(r, p) < 0; };
    for (const WindowLayer& l : life.layers)
      for (int i = 0; i < l.copy.pairs; ++i)
        if (const WindowTables& g = life.groups[static_cast<std::size_t>(l.group)]; free(g))
          copy_row(host_spans(l, i, a.host_locs(r, p)), device_spans(l, i, g.slot_locs(r, p)));
    for (const WindowTables& g : life.groups)
      if (free(g)) {
        g.slot_tokens(r, p) = static_cast<std::int32_t>(p);
        g.stamps(r, p) = layout::hit_stamp(g.clock(r));
        g.hints.store(r, p, p);
      }
  }
}

void commit(const Life& life, std::int64_t r, std::int64_t first, std::int64_t last, Stream) {
  const WindowArgs& a = life.window;
  for (std::int64_t p = first; p < last; ++p) {
    a.host_locs.store(r, p, a.reserved_row(r, p));
    // The tail is a ring over positions: what these push out of it must not stay findable.
    if (p >= last - a.tail)
      for (const WindowTables& g : life.groups) g.slot_tokens(r, tail_column(a, p)) = -1;
  }
  a.lengths(r) = static_cast<std::int32_t>(last);
}

}  // namespace specstate::hisparse::cpu
