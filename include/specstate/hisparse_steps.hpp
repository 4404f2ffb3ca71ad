#pragma once
// The steps of a request's life that move rows or tables, as operations on tensors: staging rows into the host pool, opening the window of a
// verify, accepting what stood. They are what `hisparse::Coordinator` does, for an engine that keeps lengths and accepted counts on the GPU:
// nothing here reads a tensor on the host, so a decode step of
//   open_window -> swap_in per layer -> attention, acceptance -> accept_window
// needs no synchronisation and can be one CUDA graph.
//
// Words as in hisparse.hpp. A window is the positions length .. length + width - 1 of a request; position p lives in tail column H + p mod P.
// "Reserved" is the host row that an engine has set aside for a position, before the position counts; both tables may be one tensor.
//
// Errors: kValue naming the argument before anything is written. Ids that only contents can tell: on the CPU an error too, on a GPU such a
// row is left alone.
#include "specstate/hisparse.hpp"

namespace specstate::hisparse {

/// For every layer l and entry i: row src_rows[i] of src[l] is copied to row dst_rows[i] of dst[l]; an entry with a negative row is skipped.
/// A dst is the src of its layer, whole, or lies apart from everything else. Any direction: device to pinned host memory (staging, backup), host to device (preload), device to device (promotion). Two entries
/// with one destination, or a destination that is also a source of the same buffer, are undefined.
struct CopyRowsParams {
  const TensorView* src = nullptr;  ///< num_layers tensors [N, ...] with dense rows, or DSv4 pages
  const TensorView* dst = nullptr;  ///< the same; rows of as many bytes
  std::int64_t num_layers = 0;
  TensorView src_rows;  ///< [n] int32 or int64
  TensorView dst_rows;  ///< [n] int32 or int64
  RowLayout layout = RowLayout::kLinear;
  std::int64_t sm_budget = 0;  ///< CUDA: most SMs that the copies may occupy, 0: as many as help
};
SPECSTATE_API void copy_rows(const CopyRowsParams& params, Stream stream = {});

/// Layers that use one selection: their swap state and their buffers.
struct WindowGroup {
  SwapState state;
  const KvBuffers* layers = nullptr;
  std::int64_t num_layers = 0;
};

/// Puts the window's positions into the tail columns of every group: what the verify writes to `locs` is found by the swaps from then on.
struct OpenWindowParams {
  const WindowGroup* groups = nullptr;  ///< layers are not looked at
  std::int64_t num_groups = 0;
  TensorView requests;       ///< [B] int32 or int64, distinct
  TensorView widths;         ///< [B] int32, 0 to P positions
  TensorView num_real_reqs;  ///< [1] int32, optional
  TensorView lengths;        ///< [R] int32, committed positions
  TensorView locs;           ///< optional out [B, >=1] int32: device rows of the window in the first group, -1 beyond a request's width
};
SPECSTATE_API void open_window(const OpenWindowParams& params, Stream stream = {});

/// Ends the window. The first accepted[b] positions are committed: their rows are copied from the tail to their reserved host rows in every
/// layer, host_cache_locs names them, lengths grows; a position below H whose own hot slot is free moves there for good. The others are forgotten.
struct AcceptWindowParams {
  const WindowGroup* groups = nullptr;
  std::int64_t num_groups = 0;
  RowLayout layout = RowLayout::kLinear;
  TensorView requests;       ///< [B] int32 or int64, distinct
  TensorView widths;         ///< [B] int32, as they were opened
  TensorView accepted;       ///< [B] int32, 0 to width
  TensorView num_real_reqs;  ///< [1] int32, optional
  TensorView lengths;        ///< in/out [R] int32
  /// [R, ceil(L / page_size)] int32 or int64: the pages of host rows that are set aside, < 0 none. Position p has row entry[p / page_size] *
  /// page_size + p % page_size.
  TensorView reserved_rows;
  std::int64_t page_size = 1;
  TensorView host_cache_locs;  ///< in/out [R, L] int32 or int64
  std::int64_t sm_budget = 0;  ///< CUDA: most SMs that the call may occupy beside other work, 0: as many as help
};
SPECSTATE_API void accept_window(const AcceptWindowParams& params, Stream stream = {});

}  // namespace specstate::hisparse
