#pragma once
// The tables of a Coordinator, and everything that is done with them, on either backend: coordinator.cpp decides, these do. On a GPU each is
// enqueued and nothing is waited for.
#include <span>

#include "hisparse/steps.hpp"

namespace specstate::hisparse {

struct Life {
  WindowArgs window{};               // tables and sizes, no batch
  std::vector<WindowTables> groups;  // slot_locs is one table for all
  std::vector<WindowLayer> layers;   // by their numbers
  Strided2<std::int32_t> pages;      // [R, ceil(L / page)], what window.reserved reads
  Strided2<std::int32_t> scratch;    // [R, C]
  std::int64_t scratch_rows = 0, page_entries = 0;
};

/// Rows that a caller has: each dense, the first pair and perhaps a second.
struct GivenRows {
  const std::byte* from[2];
  std::int64_t pitch[2];
};

// For each backend:
//   put        values go to adjacent entries of a table
//   give_rows  slots [column, column + rows) of a request get device rows; hot ones are empty, then
//   drop       takes the device rows of requests [r, r + n) and empties their state; `whole`: host rows and length too
//   stage      rows to the reserved host rows of positions [first, first + n) of one layer
//   write      one row to the tail slot of the position that is j beyond the request's length
//   load       committed positions [first, last) whose slot of the same number is free go there, in every layer
//   commit     positions [first, last) have their host rows, and are the request's last ones
#define SPECSTATE_HISPARSE_LIFE                                                                                               \
  void put(std::int32_t* to, std::span<const std::int32_t> values, Stream stream);                                            \
  void give_rows(const Life& life, std::int64_t r, std::int64_t column, std::span<const std::int32_t> rows, Stream stream);   \
  void drop(const Life& life, std::int64_t r, std::int64_t n, bool whole, Stream stream);                                     \
  void stage(const Life& life, std::int64_t layer, std::int64_t r, std::int64_t first, std::int64_t n, const GivenRows& rows, \
             Stream stream);                                                                                                  \
  void write(const Life& life, std::int64_t layer, std::int64_t r, std::int64_t j, const GivenRows& row, Stream stream);      \
  void load(const Life& life, std::int64_t r, std::int64_t first, std::int64_t last, Stream stream);                          \
  void commit(const Life& life, std::int64_t r, std::int64_t first, std::int64_t last, Stream stream);
namespace cpu {
SPECSTATE_HISPARSE_LIFE
}
namespace cuda {
SPECSTATE_HISPARSE_LIFE
/// Dense int32 tables from one place on the GPU to another.
void copy_table(void* to, const void* from, std::int64_t bytes, Stream stream);
}  // namespace cuda
#undef SPECSTATE_HISPARSE_LIFE

}  // namespace specstate::hisparse
