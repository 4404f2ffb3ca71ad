// MaterializeArgs -> which kernel, and its launches.
//
//   few_rows   up to kFewTokens rows: bound by reading the weights
//   many_rows  the rest: bound by the tensor cores
//   any_rows   shapes, dtypes and strides that those two do not take
// The first two add in one order and give the same bits, so any split of the rows into calls does, too.
#include <algorithm>
#include <array>
#include <atomic>

#include "core/match.hpp"
#include "cuda/launch.hpp"
#include "draft_kv/cuda/any_rows.cuh"
#include "draft_kv/cuda/features.cuh"
#include "draft_kv/cuda/flags.hpp"

namespace specstate::draft_kv::cuda {

using specstate::cuda::blocks_for;
using specstate::cuda::device_info;
using specstate::cuda::Launch;
using specstate::cuda::launch;

namespace {

constexpr int kDevices = 64;
constexpr int kFewTokens = 128;  // measured: decision 0010

using Encode = decltype(&cuTensorMapEncodeTiled);
Encode tensor_map_encoder() {
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    SPECSTATE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) throw Error(ErrorKind::kCuda, "cuTensorMapEncodeTiled: not found in this driver.");
    return reinterpret_cast<Encode>(f);
  }();
  return encode;
}

/// Rows of 16-bit values in global memory; a box is 64 of them of `box_rows` rows, swizzled. `once`: nobody else will read what lies beside it.
CUtensorMap tile_map(const void* data, DType dtype, std::int64_t rows, std::int64_t width, std::int64_t row_stride, int box_rows,
                     bool once) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(rows > 1 ? row_stride : width) * 2};
  const cuuint32_t box[2] = {kDepth, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = tensor_map_encoder()(
      &map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      once ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw Error(ErrorKind::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(result) + ".");
  return map;
}
/// Weights [.., rows, depth].
CUtensorMap weight_map(const TensorView& w, int box_rows, bool once) {
  return tile_map(w.data, w.dtype, (w.ndim == 3 ? w.sizes[0] : 1) * w.size(-2), w.size(-1), w.stride(-2), box_rows, once);
}

bool aligned(const void* p, std::int64_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) == 0; }

/// May the tensor cores multiply these? Rows of 16-byte pieces, whole stages in every slice, weight rows in runs of 32 and whole tiles.
bool rows_fit(const TensorView& x, DType io) {
  return x.dtype == io && x.strides[1] == 1 && x.strides[0] % 8 == 0 && (x.sizes[0] == 1 || x.strides[0] >= x.sizes[1]) &&
         aligned(x.data, 16);
}
bool weights_fit(const TensorView& w, DType io) {
  const std::int64_t depth = w.size(-1), layers = w.ndim == 3 ? w.sizes[0] : 1;
  return w.dtype == io && depth % kDepth == 0 && depth / kDepth >= kSlices && depth <= (1 << 20) && w.stride(-1) == 1 &&
         w.stride(-2) % 8 == 0 && w.stride(-2) >= depth && (layers == 1 || w.strides[0] == w.sizes[1] * w.strides[1]) &&
         aligned(w.data, 16);
}

/// Do the tensor-core kernels take the call?
bool has_fast_form(const MaterializeArgs& a) {
  const NormRope& nr = a.norm_rope;
  const TensorView& table = nr.cos_sin_cache;
  const int d = table.ndim - 2, rotary = static_cast<int>(nr.rotary_dim);
  const bool power_of_two = (rotary & (rotary - 1)) == 0;
  return device_info().major == 9 && (nr.io == DType::kBFloat16 || nr.io == DType::kFloat16) && rows_fit(a.ctx_hidden, nr.io) &&
         weights_fit(a.kv_weight, nr.io) &&
         (!a.fc_weight.given() || (weights_fit(a.fc_weight, nr.io) && a.fc_weight.sizes[0] % kColumns == 0)) &&
         (nr.head_dim == 64 || nr.head_dim == 128) && a.v_head_dim == nr.head_dim && table.dtype == DType::kFloat32 &&
         table.strides[d + 1] == 1 && table.strides[d] % 4 == 0 && (d == 0 || table.strides[0] % 4 == 0) && aligned(table.data, 16) &&
         (!nr.is_neox_style || (rotary >= 16 && power_of_two));
}

/// May a head of every layer be written in pieces of 8 channels?
bool wide_pools(const std::vector<LayerPool>& pools, DType dtype) {
  const std::int64_t piece = 8 * size_of(dtype) > 16 ? 16 : 8 * size_of(dtype), item = size_of(dtype);
  return std::all_of(pools.begin(), pools.end(), [&](const LayerPool& p) {
    return p.channel_stride == 1 && p.slot_stride * item % piece == 0 && p.head_stride * item % piece == 0 && aligned(p.data, piece);
  });
}

Indices indices(const TensorView& t) {
  if (!t.given()) return {};
  return {t.data, t.dtype == DType::kInt64, t.ndim == 2 ? t.strides[0] : 0, t.strides[t.ndim - 1]};
}

/// Elements of a tensor of one dimension (or of none), or of the last one of two.
Values values(const TensorView& t) {
  if (!t.given()) return {};
  return {t.data, t.dtype, t.ndim == 0 ? 0 : t.strides[t.ndim - 1]};
}

/// Ring and rows as the shared memory allows; stages 0: does not fit. `raw`: the kernel norms target features, which are few and stay.
template <int kGroups>
FewShape few_shape(int tokens, int hidden, bool raw) {
  const Runs runs = Runs::of(hidden);
  FewShape shape{0, 0, runs, 0, static_cast<int>(blocks_for(tokens, kGroups * kFewRows)), false, raw};
  shape.rows = static_cast<int>(blocks_for(blocks_for(tokens, shape.row_tiles), 8)) * 8;
  for (int b = 0, each = runs.count / kFewBlocks; b < kFewBlocks; ++b)
    shape.depth = std::max(shape.depth, runs.begin((b + 1) * each) - runs.begin(b * each));
  const auto fit = [&] {
    shape.stages = kFewStages;
    while (shape.stages > 0 && few_shared_bytes<kGroups>(shape) > static_cast<std::size_t>(device_info().shared_bytes)) --shape.stages;
    return shape.stages >= 3;
  };
  shape.resident = shape.row_tiles == 1;
  if (!fit() && !raw) shape.resident = false, fit();
  if (shape.stages < 3 || (raw && shape.row_tiles > 1)) shape.stages = 0;
  return shape;
}

/// Does few_rows take so many rows? (many_rows takes fewer layers a launch.)
bool few_takes(int tokens, int hidden, bool raw) {
  if (tokens <= kFewMost<1>) return few_shape<1>(tokens, hidden, raw).stages > 0;
  return tokens <= kFewTokens && !raw && few_shape<2>(tokens, hidden, false).stages > 0;
}

/// What a call's launches share: the parts of the workspace.
struct Means {
  Row* list;
  int* count;
  Context context;  // raw null where the caller gives the projection's features itself
};

/// Clusters of kBlocks blocks that this GPU holds at once, one block a multiprocessor: their number depends on how its multiprocessors are grouped.
template <int kBlocks, class Kernel>
unsigned clusters_at_once(Kernel kernel, int threads) {
  static std::array<std::atomic<int>, kDevices> known;
  std::atomic<int>& n = known[device_info().index];
  if (n == 0) {
    const int shared = device_info().shared_bytes;
    SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kBlocks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = kBlocks, config.blockDim = threads, config.dynamicSmemBytes = shared, config.attrs = &cluster, config.numAttrs = 1;
    int found = 0;
    SPECSTATE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
    n = std::max(found, 1);
  }
  return static_cast<unsigned>(n.load());
}

template <class Io, int kHeadDim, int kGroups>
void launch_few(const Problem& p, const TensorView& weight, std::int64_t rows, const FewShape& shape, const Context& context,
                Stream stream) {
  const unsigned clusters = clusters_at_once<kFewBlocks>(few_rows<Io, kHeadDim, kGroups>, kFewThreads<kGroups>);
  const unsigned tiles = static_cast<unsigned>(p.layers * 2 * p.heads * kHeadDim / kColumns);
  launch(few_rows<Io, kHeadDim, kGroups>,
         {.grid = std::min(clusters, tiles) * kFewBlocks,
          .block = kFewThreads<kGroups>,
          .shared = few_shared_bytes<kGroups>(shape),
          .cluster = kFewBlocks,
          .overlap = true},
         stream, weight_map(weight, Columns<kHeadDim>::kWide, true),
         tile_map(p.ctx, weight.dtype, rows, p.hidden, p.ctx_stride, shape.rows, false), p, shape, context);
}

/// One product of many rows; `rows` is what its tensor map of ctx covers.
template <class Io, int kHeadDim>
void launch_many(const Problem& p, const TensorView& weight, std::int64_t rows, const ManyShape& shape, const Context& context,
                 Stream stream) {
  const unsigned tiles = blocks_for(p.rows.tokens, kManyRows) * blocks_for(shape.head_tiles, 2);
  launch(many_rows<Io, kHeadDim>,
         {.grid = std::min<unsigned>(device_info().multiprocessors, 2 * tiles),
          .block = kManyThreads,
          .shared = kManySharedBytes,
          .overlap = true},
         stream, weight_map(weight, kColumns, false), tile_map(p.ctx, weight.dtype, rows, p.hidden, p.ctx_stride, kManyRows, false), p,
         shape, context);
}

template <class Io>
void launch_few_features(const MaterializeArgs& a, const Problem& p, const Means& m, Stream stream) {
  const auto most = static_cast<std::size_t>(device_info().shared_bytes);
  const int all = m.context.hidden / 64;
  const int clusters = std::min(static_cast<int>(clusters_at_once<kSlices>(few_features<Io>, kFeatureThreads)), all);
  const FeatureShape shape = feature_shape(static_cast<int>(a.ctx_hidden.sizes[1]), all, clusters, most);
  launch(few_features<Io>,
         {.grid = static_cast<unsigned>(clusters) * kSlices,
          .block = kFeatureThreads,
          .shared = feature_shared_bytes(shape),
          .cluster = kSlices,
          .overlap = true},
         stream, weight_map(a.fc_weight, 64, true), p, m.context, shape);
}

template <class Io, int kHeadDim>
void launch_fast(const MaterializeArgs& a, Problem p, const Means& m, Stream stream) {
  const int features = static_cast<int>(a.ctx_hidden.sizes[1]);
  const bool raw = m.context.raw != nullptr;
  if (few_takes(p.rows.tokens, p.hidden, raw)) {
    if (raw && p.first_layer == 0) launch_few_features<Io>(a, p, m, stream);
    if (p.rows.tokens <= kFewMost<1>)
      launch_few<Io, kHeadDim, 1>(p, a.kv_weight, a.tokens, few_shape<1>(p.rows.tokens, p.hidden, raw), m.context, stream);
    else
      launch_few<Io, kHeadDim, 2>(p, a.kv_weight, a.tokens, few_shape<2>(p.rows.tokens, p.hidden, false), m.context, stream);
    return;
  }
  ManyShape shape{p.layers * 2 * p.heads * kHeadDim / kColumns, nullptr, nullptr, Runs::of(p.hidden), false};
  if (p.rows.tokens > kPlanRows || raw) {
    if (p.first_layer == 0)
      launch(plan_kernel, {.block = kPlanThreads, .shared = 2 * kListRows * sizeof(int), .overlap = true}, stream, p.rows, m.list, m.count);
    shape.list = m.list, shape.list_count = m.count;
  }
  if (raw) {
    if (p.first_layer == 0) {
      Problem fc = p;
      fc.hidden = features;
      launch_many<Io, 0>(fc, a.fc_weight, a.tokens, {m.context.hidden / kColumns, m.list, m.count, Runs(kSlices, features / kDepth), false},
                         m.context, stream);
      launch(normalize_rows<Io>, {.grid = static_cast<unsigned>(p.rows.tokens), .block = kNormalizeThreads, .overlap = true}, stream,
             m.context, m.count);
    }
    p.ctx = m.context.raw, p.ctx_stride = p.hidden, shape.listed = true;
  }
  launch_many<Io, kHeadDim>(p, a.kv_weight, m.context.raw ? p.rows.tokens : a.tokens, shape, Context{}, stream);
}

void launch_any(const MaterializeArgs& a, const Problem& p, const Means& m, Stream stream) {
  const std::size_t shared = sizeof(AnyShared) + kAnyRows * std::max(a.norm_rope.head_dim, a.v_head_dim) * sizeof(float);
  if (shared > static_cast<std::size_t>(device_info().shared_bytes))
    core::throw_not_implemented("materialize_into_pool: heads of " + std::to_string(std::max(a.norm_rope.head_dim, a.v_head_dim)) +
                                " channels are more than the CUDA kernel holds.");
  AnyShape shape{a.ctx_hidden, a.kv_weight, a.kv_bias, any_norm_rope(a.norm_rope), static_cast<int>(a.v_head_dim), nullptr, nullptr, false};
  const unsigned row_tiles = blocks_for(p.rows.tokens, kAnyRows);
  if (p.rows.tokens > 4 * kAnyThreads || m.context.raw) {
    if (p.first_layer == 0)
      launch(plan_kernel, {.block = kPlanThreads, .shared = 2 * kListRows * sizeof(int), .overlap = true}, stream, p.rows, m.list, m.count);
    shape.list = m.list, shape.list_count = m.count;
  }
  if (m.context.raw) {
    const std::int64_t hidden = m.context.hidden;
    const TensorView context(m.context.raw, a.norm_rope.io, {p.rows.tokens, hidden});
    if (p.first_layer == 0) {
      launch(any_features, {.grid = dim3(row_tiles, blocks_for(hidden, kAnyColumns)), .block = kAnyThreads, .overlap = true}, stream,
             p.rows.first, a.ctx_hidden, a.fc_weight, context, m.list, m.count);
      launch(any_normalize, {.grid = static_cast<unsigned>(p.rows.tokens), .block = kAnyThreads, .overlap = true}, stream, context,
             m.context.norm, m.context.eps, m.count);
    }
    shape.ctx = context, shape.listed = true;
  }
  launch(any_rows,
         {.grid = dim3(row_tiles, static_cast<unsigned>(p.layers * 2 * p.heads)), .block = kAnyThreads, .shared = shared, .overlap = true},
         stream, p, shape);
}

constexpr std::int64_t kContextRows = 2048;  // rows of one round where target features come in front: bounds the workspace

/// Rows of one round. Of few tokens from target features, rounds that few_features and few_rows take: two of them read fc twice in less time than one tile
/// of rows of many_rows takes, which leaves most multiprocessors idle.
std::int64_t rows_of_round(std::int64_t tokens, std::int64_t hidden, bool fast, bool with_context) {
  if (!with_context) return kListRows;
  for (const int rows : {kFewRows, kFewRows / 2})
    if (fast && tokens <= 2 * rows && few_takes(rows, static_cast<int>(hidden), true)) return rows;
  return kContextRows;
}

std::int64_t round_up(std::int64_t n) { return (n + 255) / 256 * 256; }

/// The parts of a workspace: a list of rows, its length, and rows of context with their sums of squares.
struct Parts {
  std::int64_t count, squares, raw, end;
};
/// `item`: bytes of a value of context, 0 where there is none.
Parts parts(std::int64_t tokens, std::int64_t hidden, std::int64_t item) {
  const std::int64_t rows = std::min(tokens, item > 0 ? kContextRows : std::int64_t{kListRows});
  const bool listed = tokens > kPlanRows || item > 0;
  Parts p{};
  p.count = listed ? round_up(rows * static_cast<std::int64_t>(sizeof(Row))) : 0;
  p.squares = p.count + (listed ? 256 : 0);
  p.raw = p.squares + (item > 0 ? round_up(rows * (hidden + 63) / 64 * 4) : 0);
  p.end = p.raw + rows * hidden * item;
  return p;
}

}  // namespace

std::int64_t workspace_bytes(std::int64_t tokens, std::int64_t hidden, std::int64_t item) { return parts(tokens, hidden, item).end; }

void run(const MaterializeArgs& a, Stream stream) {
  raise_flags();
  if (a.tokens == 0) return;
  const NormRope& nr = a.norm_rope;
  const TensorView& table = nr.cos_sin_cache;
  const int d = table.ndim - 2;
  const std::int64_t hidden = a.kv_weight.sizes[2];
  Problem p{};
  p.rows.slots = indices(a.slot_mapping), p.rows.positions = indices(a.positions), p.rows.commit = indices(a.commit_lens);
  p.rows.width = a.window, p.rows.pool_slots = a.slots, p.rows.table = table.sizes[d], p.rows.flag = device_flags();
  p.ctx = a.ctx_hidden.data, p.ctx_stride = a.ctx_hidden.strides[0];
  p.hidden = static_cast<int>(std::min<std::int64_t>(hidden, 1 << 30)), p.heads = static_cast<int>(a.heads);
  p.norm = values(nr.k_norm_weight), p.norm_layer = nr.k_norm_weight.strides[0];
  p.bias = values(a.kv_bias), p.bias_layer = a.kv_bias.given() ? a.kv_bias.strides[0] : 0;
  p.eps = values(nr.eps), p.k_scale = values(a.k_scale_values), p.v_scale = values(a.v_scale_values);
  p.table = table.as<float>(), p.table_row = table.strides[d], p.table_layer = d ? table.strides[0] : 0;
  p.rotary_dim = static_cast<int>(nr.rotary_dim);
  p.is_neox_style = nr.is_neox_style, p.round_after_norm = nr.round_after_norm;
  p.k_dtype = a.k_dtype, p.v_dtype = a.v_dtype;
  p.k_wide = wide_pools(a.k, a.k_dtype), p.v_wide = wide_pools(a.v, a.v_dtype);
  p.norm_pairs = size_of(p.norm.dtype) == 2 && p.norm.stride == 1 && p.norm_layer % 2 == 0 && aligned(p.norm.data, 4);
  const bool fast = has_fast_form(a), with_context = a.fc_weight.given();
  Means m{};
  const Parts at = parts(a.tokens, hidden, with_context ? size_of(nr.io) : 0);
  char* const workspace = static_cast<char*>(a.workspace);
  m.list = reinterpret_cast<Row*>(workspace), m.count = reinterpret_cast<int*>(workspace + at.count);
  if (with_context)
    m.context = {reinterpret_cast<std::uint16_t*>(workspace + at.raw), reinterpret_cast<float*>(workspace + at.squares),
                 values(a.hidden_norm_weight), a.hidden_norm_eps, p.hidden};
  // A launch names at most kMaxLayers layers and plans a bounded number of rows. Rows go in order, so of two that name one slot the last stands.
  const std::int64_t round = rows_of_round(a.tokens, p.hidden, fast, with_context);
  for (std::int64_t first = 0; first < a.tokens; first += round) {
    p.rows.first = first, p.rows.tokens = static_cast<int>(std::min(a.tokens - first, round));
    const std::int64_t most = fast && !few_takes(p.rows.tokens, p.hidden, with_context) ? kNorms / nr.head_dim : kMaxLayers;
    for (std::int64_t layer = 0; layer < a.layers; layer += most) {
      p.first_layer = static_cast<int>(layer), p.layers = static_cast<int>(std::min(a.layers - layer, most));
      for (int l = 0; l < p.layers; ++l)
        p.target[0][l] = {a.k[layer + l], a.k_scale[layer + l]}, p.target[1][l] = {a.v[layer + l], a.v_scale[layer + l]};
      if (!fast)
        launch_any(a, p, m, stream);
      else if (nr.io == DType::kBFloat16)
        nr.head_dim == 128 ? launch_fast<core::bfloat16, 128>(a, p, m, stream) : launch_fast<core::bfloat16, 64>(a, p, m, stream);
      else
        nr.head_dim == 128 ? launch_fast<core::float16, 128>(a, p, m, stream) : launch_fast<core::float16, 64>(a, p, m, stream);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
