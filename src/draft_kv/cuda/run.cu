// MaterializeArgs -> which kernel, and its launches.
//
//   few_rows   up to 64 rows: bound by reading the weights
//   many_rows  the rest: bound by the tensor cores
//   any_rows   shapes, dtypes and strides that those two do not take
// The first two add in one order and give the same bits, so any split of the rows into calls does, too.
#include <algorithm>
#include <array>
#include <atomic>

#include "core/match.hpp"
#include "cuda/launch.hpp"
#include "draft_kv/cuda/any_rows.cuh"
#include "draft_kv/cuda/flags.hpp"
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

using specstate::cuda::blocks_for;
using specstate::cuda::device_info;
using specstate::cuda::launch;

namespace {

constexpr int kDevices = 64;

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

/// Weights [.., rows, depth] with the bit fields of a row's number exchanged (finish.cuh): a box is 64 features of 32 * `runs` rows. `once`: nobody
/// else will read what lies beside it.
CUtensorMap weight_map(const TensorView& w, int runs, bool once) {
  const std::int64_t rows = (w.ndim == 3 ? w.sizes[0] : 1) * w.size(-2);
  CUtensorMap map;
  const cuuint64_t pitch = static_cast<cuuint64_t>(w.stride(-2)) * 2;
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(w.size(-1)), 2, 4, 4, static_cast<cuuint64_t>(rows / 32)};
  const cuuint64_t strides[4] = {pitch, 8 * pitch, 2 * pitch, 32 * pitch};
  const cuuint32_t box[5] = {kDepth, 2, 4, 4, static_cast<cuuint32_t>(runs)}, steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      tensor_map_encoder()(&map, w.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
                           w.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           once ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw Error(ErrorKind::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(result) + ".");
  return map;
}

bool aligned(const void* p, std::int64_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) == 0; }

/// May the tensor cores multiply these? Rows of 16-byte pieces, whole stages in every slice, weight rows in runs of 32 and whole tiles.
bool rows_fit(const TensorView& x, DType io) { return x.dtype == io && x.strides[1] == 1 && x.strides[0] % 8 == 0 && aligned(x.data, 16); }
bool weights_fit(const TensorView& w, DType io) {
  const std::int64_t depth = w.size(-1), layers = w.ndim == 3 ? w.sizes[0] : 1;
  return w.dtype == io && depth % kDepth == 0 && depth / kDepth >= kSlices && depth < (1 << 24) && w.stride(-1) == 1 &&
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
         weights_fit(a.kv_weight, nr.io) && (nr.head_dim == 64 || nr.head_dim == 128) && a.v_head_dim == nr.head_dim &&
         table.dtype == DType::kFloat32 && table.strides[d + 1] == 1 && table.strides[d] % 4 == 0 &&
         (d == 0 || table.strides[0] % 4 == 0) && aligned(table.data, 16) && (!nr.is_neox_style || (rotary >= 16 && power_of_two));
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

int few_depth(std::int64_t hidden) {
  const int stages = static_cast<int>(hidden / kDepth);
  int depth = 0;
  for (int s = 0; s < kSlices; ++s) depth = std::max(depth, slice_begin(s + 1, stages) - slice_begin(s, stages));
  return depth;
}

/// Ring and buffers as the shared memory allows; stages 0: does not fit.
FewShape few_shape(std::int64_t hidden) {
  FewShape shape{16, 2, few_depth(hidden)};
  const auto fit = [&] {
    shape.stages = 16;
    while (shape.stages > 0 && few_shared_bytes(shape) > static_cast<std::size_t>(device_info().shared_bytes)) --shape.stages;
    return shape.stages;
  };
  if (fit() < 4) shape.buffers = 1, fit();
  if (shape.stages < 2) shape.stages = 0;
  return shape;
}

/// The list of written rows of a launch that does not plan for itself.
struct List {
  Row* rows;
  int* count;
};

/// Clusters of kSlices blocks that this GPU holds at once, one block a multiprocessor: their number depends on how its multiprocessors are grouped.
template <class Kernel>
unsigned clusters_at_once(Kernel kernel, std::size_t shared, int threads) {
  static std::array<std::atomic<int>, kDevices> known;
  std::atomic<int>& n = known[device_info().index];
  if (n == 0) {
    SPECSTATE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kSlices, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = kSlices, config.blockDim = threads, config.dynamicSmemBytes = shared, config.attrs = &cluster, config.numAttrs = 1;
    int found = 0;
    SPECSTATE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
    n = std::max(found, 1);
  }
  return static_cast<unsigned>(n.load());
}

void launch_plan(const Problem& p, const List& list, Stream stream) {
  if (p.first_layer == 0)
    launch(plan_kernel, {.block = kPlanThreads, .shared = 2 * kListRows * sizeof(int), .overlap = true}, stream, p.rows, list.rows,
           list.count);
}

template <class Io, int kHeadDim>
void launch_fast(const MaterializeArgs& a, const Problem& p, const List& list, Stream stream) {
  const int head_tiles = p.layers * 2 * p.heads * kHeadDim / kColumns;
  const FewShape few = few_shape(p.hidden);
  if (p.rows.tokens <= kFewRows && few.stages > 0) {
    const unsigned clusters = clusters_at_once(few_rows<Io, kHeadDim>, few_shared_bytes(few), kFewThreads);
    launch(few_rows<Io, kHeadDim>,
           {.grid = std::min<unsigned>(clusters, head_tiles) * kSlices,
            .block = kFewThreads,
            .shared = few_shared_bytes(few),
            .cluster = kSlices,
            .overlap = true},
           stream, weight_map(a.kv_weight, 2, true), p, few);
    return;
  }
  ManyShape shape{head_tiles, nullptr, nullptr};
  if (p.rows.tokens > kPlanRows) {
    launch_plan(p, list, stream);
    shape.list = list.rows, shape.list_count = list.count;
  }
  const unsigned tiles = blocks_for(p.rows.tokens, kManyRows) * head_tiles;
  launch(many_rows<Io, kHeadDim>,
         {.grid = std::min<unsigned>(device_info().multiprocessors, tiles),
          .block = kManyThreads,
          .shared = kManySharedBytes,
          .overlap = true},
         stream, weight_map(a.kv_weight, 4, false), p, shape);
}

void launch_any(const MaterializeArgs& a, const Problem& p, const List& list, Stream stream) {
  const std::size_t shared = sizeof(AnyShared) + kAnyRows * std::max(a.norm_rope.head_dim, a.v_head_dim) * sizeof(float);
  if (shared > static_cast<std::size_t>(device_info().shared_bytes))
    core::throw_not_implemented("materialize_into_pool: heads of " + std::to_string(std::max(a.norm_rope.head_dim, a.v_head_dim)) +
                                " channels are more than the CUDA kernel holds.");
  AnyShape shape{a.ctx_hidden, a.kv_weight, a.kv_bias, any_norm_rope(a.norm_rope), static_cast<int>(a.v_head_dim), nullptr, nullptr};
  if (p.rows.tokens > 4 * kAnyThreads) {
    launch_plan(p, list, stream);
    shape.list = list.rows, shape.list_count = list.count;
  }
  launch(any_rows,
         {.grid = dim3(blocks_for(p.rows.tokens, kAnyRows), static_cast<unsigned>(p.layers * 2 * p.heads)),
          .block = kAnyThreads,
          .shared = shared,
          .overlap = true},
         stream, p, shape);
}

}  // namespace

std::int64_t workspace_bytes(std::int64_t tokens) { return tokens > kPlanRows ? kListRows * sizeof(Row) + sizeof(Row) : 0; }

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
  auto* const rows = static_cast<Row*>(a.workspace);
  const List list{rows, reinterpret_cast<int*>(rows + kListRows)};
  const bool fast = has_fast_form(a);
  // A launch names at most kMaxLayers layers and plans a bounded number of rows. Rows go in order, so of two that name one slot the last stands.
  for (std::int64_t first = 0; first < a.tokens; first += kListRows) {
    p.rows.first = first, p.rows.tokens = static_cast<int>(std::min<std::int64_t>(a.tokens - first, kListRows));
    for (std::int64_t layer = 0; layer < a.layers; layer += kMaxLayers) {
      p.first_layer = static_cast<int>(layer), p.layers = static_cast<int>(std::min<std::int64_t>(a.layers - layer, kMaxLayers));
      for (int l = 0; l < p.layers; ++l)
        p.target[0][l] = {a.k[layer + l], a.k_scale[layer + l]}, p.target[1][l] = {a.v[layer + l], a.v_scale[layer + l]};
      if (!fast)
        launch_any(a, p, list, stream);
      else if (nr.io == DType::kBFloat16)
        nr.head_dim == 128 ? launch_fast<core::bfloat16, 128>(a, p, list, stream) : launch_fast<core::bfloat16, 64>(a, p, list, stream);
      else
        nr.head_dim == 128 ? launch_fast<core::float16, 128>(a, p, list, stream) : launch_fast<core::float16, 64>(a, p, list, stream);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
