#pragma once
// One row of a pool as bytes, in either layout (CPU).
#include <cstring>

#include "hisparse/args.hpp"
#include "hisparse/layout.hpp"

namespace specstate::hisparse::cpu {

/// A row is one span, or the value and the scale record of a DSv4 page.
struct RowSpans {
  std::byte* at[2];
  std::int64_t bytes[2];
  int count;
};
inline RowSpans row_spans(const RowBuffer& b, bool paged, std::int64_t item_bytes, std::int64_t row) {
  if (!paged) return {{b.base + layout::linear_offset(row, b.pitch), nullptr}, {item_bytes, 0}, 1};
  return {
      {b.base + layout::paged_value_offset(row), b.base + layout::paged_scale_offset(row)}, {layout::kValueBytes, layout::kScaleBytes}, 2};
}
inline void copy_row(const RowSpans& from, const RowSpans& to) {
  for (int i = 0; i < from.count; ++i) std::memcpy(to.at[i], from.at[i], static_cast<std::size_t>(from.bytes[i]));
}
/// From a row's bytes back to back.
inline void unpack_row(const void* from, const RowSpans& to) {
  const auto* p = static_cast<const std::byte*>(from);
  for (int i = 0; i < to.count; p += to.bytes[i++]) std::memcpy(to.at[i], p, static_cast<std::size_t>(to.bytes[i]));
}

}  // namespace specstate::hisparse::cpu
