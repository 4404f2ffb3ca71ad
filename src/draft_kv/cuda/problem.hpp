#pragma once
// One launch of a materialization as plain data: what crosses from run.cu to the kernels.
#include <cstdint>

#include "draft_kv/args.hpp"
#include "draft_kv/cuda/flags.hpp"

namespace specstate::draft_kv::cuda {

/// Layers that one launch can name; more are done in several launches.
inline constexpr int kMaxLayers = 32;
/// Columns of the projection that one tile covers: one head of 128 channels, or two of 64.
inline constexpr int kColumns = 128;
/// Values of the summed dimension that a stage holds.
inline constexpr int kDepth = 64;
/// The one summation order: the features are cut into runs of whole stages, each is summed by the tensor cores in rising order from zero, and the runs' sums are
/// added in rising order in float32. The tensor cores truncate, and truncation adds up along a run: of a projection it has at most 1024 values.
struct Runs {
  int count, stages, longer;  // the first `longer` have one stage more

  SPECSTATE_HD constexpr Runs(int runs, int all) : count(runs), stages(all / runs), longer(all % runs) {}
  /// The runs of a projection of `hidden` features.
  SPECSTATE_HD static constexpr Runs of(int hidden) { return {4 * ((hidden + 4095) / 4096), hidden / kDepth}; }
  SPECSTATE_HD constexpr int begin(int run) const { return run * stages + (run < longer ? run : longer); }
  SPECSTATE_HD constexpr int length(int run) const { return stages + (run < longer); }
};

/// The runs of the product that makes features (features.cuh): there are so many that the sums of the first and of the second half of them are made apart, each in
/// rising order, and then added.
inline constexpr int kSlices = 8;

/// A vector of floats of any of the storage types, or one that is not there (data null).
struct Values {
  const void* data;
  DType dtype;
  std::int64_t stride;  // elements
};

/// Integers of either width.
struct Indices {
  const void* data;
  bool wide;                  // int64
  bool windows;               // [b, W] whose windows do not follow each other at one stride: they may also lie in one place (outer 0)
  std::int64_t outer, inner;  // element strides of [b, W]; of [T] the inner one
};

/// Which rows are written: everything that the CPU's check reads on the host.
struct Rows {
  Indices slots, positions, commit;  // slots.data null: row i to slot i; commit.data null: all columns
  std::int64_t first;                // row of the call at which this launch begins
  int tokens;                        // rows of this launch
  std::int64_t width;                // W
  std::int64_t pool_slots, table;
  int* flag;  // [kFlags], raised by a row that should be written and cannot be
};

/// Where K and V of a layer go, and by what they are divided.
struct Target {
  LayerPool pool;
  float scale;  // where `scales` of the problem is null
};

struct Problem {
  Rows rows;
  const void* ctx;                      // [T, hidden] of Io
  std::int64_t ctx_stride;              // elements
  int hidden;                           // a multiple of kDepth
  int heads;                            // N
  int layers;                           // of this launch
  int first_layer;                      // their place in the tensors below
  Values bias, norm;                    // [L, C], [L, D]: stride of the inner dimension
  std::int64_t bias_layer, norm_layer;  // element strides of layers
  Values eps, k_scale, v_scale;         // [L]
  const float* table;                   // [P, R] or [L, P, R], a row dense
  std::int64_t table_row, table_layer;  // elements
  int rotary_dim;
  bool is_neox_style, round_after_norm;
  DType k_dtype, v_dtype;
  bool k_wide, v_wide;           // rows of a head may be written in pieces of 8 channels
  Target target[2][kMaxLayers];  // K, V
};

}  // namespace specstate::draft_kv::cuda
