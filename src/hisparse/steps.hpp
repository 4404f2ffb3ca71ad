#pragma once
// What crosses from steps.cpp to a backend.
#include <vector>

#include "hisparse/args.hpp"

namespace specstate::hisparse {

struct CopyRowsArgs {
  Integers src, dst;  // [n]
  std::int64_t count;
  bool paged;
  std::int64_t item_bytes;
  std::int64_t sm_budget;  // 0: no limit
};
/// One layer: from, to.
struct CopyRowsLayer {
  RowBuffer src, dst;
};

struct WindowTables {
  Strided2<std::int32_t> slot_tokens, slot_locs, stamps;
  Integers hints;
  Strided1<std::int32_t> clock;
};
struct WindowLayer {
  CopyArgs copy;
  std::int64_t group;
};
struct WindowArgs {
  Integers requests, widths, accepted;  // [B]; accepted null: the window is opened
  const std::int32_t* num_real;
  Strided1<std::int32_t> lengths;  // [R]
  Integers reserved;               // [R, ceil(L / page)]
  Integers host_locs;              // [R, L]
  Strided2<std::int32_t> locs;     // [B, W] or null
  std::int64_t batch, request_slots, context, hot, tail, locs_width;
  std::int64_t page;                    // rows of an entry of `reserved`
  std::int64_t host_rows, device_rows;  // that exist in every layer
  const char* op;
  std::int64_t sm_budget = 0;
  std::int64_t most_entry = INT64_MAX;  // of `reserved`: a page beyond it has no rows that 64 bits can name
  /// The host row that is set aside for a position; < 0: none.
  SPECSTATE_HD std::int64_t reserved_row(std::int64_t r, std::int64_t p) const {
    const std::int64_t entry = reserved(r, p / page);
    return entry < 0 || entry > most_entry ? -1 : entry * page + p % page;
  }
};

namespace cpu {
void run(const CopyRowsArgs& args, const std::vector<CopyRowsLayer>& layers);
void run(const WindowArgs& args, const std::vector<WindowTables>& groups, const std::vector<WindowLayer>& layers);
}  // namespace cpu
namespace cuda {
void run(const CopyRowsArgs& args, const std::vector<CopyRowsLayer>& layers, Stream stream);
void run(const WindowArgs& args, const std::vector<WindowTables>& groups, const std::vector<WindowLayer>& layers, Stream stream);
}  // namespace cuda
}  // namespace specstate::hisparse
