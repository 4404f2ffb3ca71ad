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
  Integers reserved, host_locs;    // [R, L]
  Strided2<std::int32_t> locs;     // [B, W] or null
  std::int64_t batch, request_slots, context, hot, tail, locs_width;
  std::int64_t host_rows, device_rows;  // that exist in every layer
  const char* op;
};

namespace cpu {
void run(const CopyRowsArgs& args, const std::vector<CopyRowsLayer>& layers);
void run(const WindowArgs& args, const std::vector<WindowTables>& groups, const std::vector<WindowLayer>& layers);
}  // namespace cpu
}  // namespace specstate::hisparse
