// MaterializeArgs -> which kernel, and its launches.
//
//   few_rows   up to 64 rows, target features and their projection, too: bound by reading the weights
//   many_rows  up to 128, as they lie
//   pair_rows  65 to 256 rows, and those that stand of 257 to 512 of at most 4096 features (heads of 128)
//   half_rows  those that stand of 129 to 256, and of up to 512 of more features (heads of 128)
//   bulk_rows  more of them, bound by the tensor cores
//   line_up    before the last three (line_up_many before the last) where some are rejected: copies those that stand one behind another
//   other_heads heads that their epilogues do not know: the product of target features and a kernel behind it
//   any_rows   dtypes, strides and widths that the tensor cores do not take
// The first four add in one order and give the same bits, so any split of the rows into calls does, too.
#include <algorithm>
#include <array>
#include <atomic>
#include <random>

#include "core/match.hpp"
#include "cuda/launch.hpp"
#include "draft_kv/cuda/any_rows.cuh"
#include "draft_kv/cuda/bulk_rows.cuh"
#include "draft_kv/cuda/features.cuh"
#include "draft_kv/cuda/few_rows.cuh"
#include "draft_kv/cuda/flags.hpp"
#include "draft_kv/cuda/half_rows.cuh"
#include "draft_kv/cuda/line_up.cuh"
#include "draft_kv/cuda/other_heads.cuh"
#include "draft_kv/cuda/pair_rows.cuh"

namespace specstate::draft_kv::cuda {

using specstate::cuda::blocks_for;
using specstate::cuda::device_info;
using specstate::cuda::Launch;
using specstate::cuda::launch;

namespace {

constexpr int kDevices = 64;
constexpr std::int64_t kContextRows = 2048;  // rows of one round where target features come in front: bounds the workspace

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

CUtensorMap tensor_map(const void* data, DType dtype, cuuint32_t dims, const cuuint64_t* sizes, const cuuint64_t* strides,
                       const cuuint32_t* box, bool once) {
  CUtensorMap map;
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = tensor_map_encoder()(
      &map, type, dims, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      once ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw Error(ErrorKind::kCuda, "cuTensorMapEncodeTiled: error " + std::to_string(result) + ".");
  return map;
}
/// Rows of 16-bit values in global memory; a box is 64 of them of `box_rows` rows, swizzled. `once`: nobody else will read what lies beside it.
CUtensorMap tile_map(const void* data, DType dtype, std::int64_t rows, std::int64_t width, std::int64_t row_stride, int box_rows,
                     bool once) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(rows > 1 ? row_stride : width) * 2};
  const cuuint32_t box[] = {kDepth, static_cast<cuuint32_t>(box_rows)};
  return tensor_map(data, dtype, 2, sizes, strides, box, once);
}
/// Weights [.., rows, depth].
CUtensorMap weight_map(const TensorView& w, int box_rows, bool once) {
  return tile_map(w.data, w.dtype, (w.ndim == 3 ? w.sizes[0] : 1) * w.size(-2), w.size(-1), w.stride(-2), box_rows, once);
}

/// The same rows seen as [rows / (2 cut), 2, cut]: a box has every other `cut` of 128 rows.
CUtensorMap half_heads_map(const TensorView& w, int cut) {
  const auto rows = static_cast<cuuint64_t>((w.ndim == 3 ? w.sizes[0] : 1) * w.size(-2)), apart = static_cast<cuuint64_t>(cut);
  const auto bytes = static_cast<cuuint64_t>(w.stride(-2)) * 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(w.size(-1)), apart, 2, rows / (2 * apart)};
  const cuuint64_t strides[] = {bytes, apart * bytes, 2 * apart * bytes};
  const cuuint32_t box[] = {kDepth, static_cast<cuuint32_t>(cut), 1, static_cast<cuuint32_t>(64 / cut)};
  return tensor_map(w.data, w.dtype, 4, sizes, strides, box, false);
}

bool aligned(const void* p, std::int64_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) == 0; }

/// May the tensor cores multiply these? Rows of 16-byte pieces, whole stages in every slice, weight rows in runs of 32 and whole tiles.
bool rows_fit(const TensorView& x, DType io) {
  // Pieces of a launch's rows are counted in 32 bits.
  const std::int64_t rows = std::clamp<std::int64_t>(x.sizes[0], 1, kListRows);
  return x.dtype == io && x.strides[1] == 1 && x.strides[0] % 8 == 0 && x.strides[0] / 8 <= std::int64_t{UINT32_MAX} / rows &&
         (x.sizes[0] == 1 || x.strides[0] >= x.sizes[1]) && aligned(x.data, 16);
}
bool weights_fit(const TensorView& w, DType io) {
  const std::int64_t depth = w.size(-1), layers = w.ndim == 3 ? w.sizes[0] : 1;
  return w.dtype == io && depth % kDepth == 0 && depth / kDepth >= kSlices && depth <= (1 << 20) && w.stride(-1) == 1 &&
         w.stride(-2) % 8 == 0 && w.stride(-2) >= depth && (layers == 1 || w.strides[0] == w.sizes[1] * w.strides[1]) &&
         aligned(w.data, 16);
}

/// What multiplies, and what comes then: the tensor cores with an epilogue for these heads, or with one for any, or neither.
enum class Form { kFast, kOtherHeads, kAny };

bool products_fit(DType io, const TensorView& ctx, const TensorView& kv_weight, const TensorView& fc_weight) {
  return (io == DType::kBFloat16 || io == DType::kFloat16) && rows_fit(ctx, io) && weights_fit(kv_weight, io) &&
         (!fc_weight.given() || (weights_fit(fc_weight, io) && fc_weight.sizes[0] % kColumns == 0));
}
/// Heads that the epilogues of the products know.
bool usual_heads(const NormRope& nr, std::int64_t v_head_dim) {
  const TensorView& table = nr.cos_sin_cache;
  const int d = table.ndim - 2, rotary = static_cast<int>(nr.rotary_dim);
  const bool power_of_two = (rotary & (rotary - 1)) == 0;
  return (nr.head_dim == 64 || nr.head_dim == 128) && v_head_dim == nr.head_dim && table.dtype == DType::kFloat32 &&
         table.strides[d + 1] == 1 && table.strides[d] % 4 == 0 && (d == 0 || table.strides[0] % 4 == 0) && aligned(table.data, 16) &&
         (!nr.is_neox_style || (rotary >= 16 && power_of_two));
}
constexpr std::int64_t kWidestHead = 4096;  // of other_heads, whose warps keep one each in shared memory
Form form_of(const NormRope& nr, std::int64_t v_head_dim, const TensorView& ctx, const TensorView& kv_weight, const TensorView& fc_weight) {
  if (!products_fit(nr.io, ctx, kv_weight, fc_weight)) return Form::kAny;
  if (usual_heads(nr, v_head_dim)) return Form::kFast;
  const std::int64_t columns = kv_weight.sizes[1];
  return columns % 16 == 0 && columns <= (1 << 20) && std::max(nr.head_dim, v_head_dim) <= kWidestHead ? Form::kOtherHeads : Form::kAny;
}

/// Of other heads so many rows and layers are projected at a time, which bounds the workspace.
struct Rounds {
  std::int64_t rows, layers, columns;
  std::int64_t bytes() const { return rows * layers * columns * 2; }
};
Rounds rounds_of(std::int64_t tokens, std::int64_t layers, std::int64_t columns) {
  tokens = std::max<std::int64_t>(tokens, 1), layers = std::max<std::int64_t>(layers, 1), columns = std::max<std::int64_t>(columns, 1);
  const bool few = tokens <= kFewRows;
  const std::int64_t most = few ? std::int64_t{2} << 20 : std::int64_t{12} << 20, of_layer = columns * 2;
  const std::int64_t at_once = std::clamp<std::int64_t>(most / (std::min<std::int64_t>(tokens, kTileRows) * of_layer), 1,
                                                        std::min<std::int64_t>(layers, kMaxLayers));
  std::int64_t rows = std::clamp<std::int64_t>(most / (at_once * of_layer), 1, kContextRows);
  if (rows > kTileRows) rows -= rows % kTileRows;
  return {std::min(rows, tokens), at_once, columns};
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
  const bool wide = t.dtype == DType::kInt64;
  if (t.ndim < 2) return {t.data, wide, false, 0, t.strides[0]};
  // Windows back to back are one dimension: no row then divides by the width to find its place. The stride of a dimension of one entry has no say.
  const std::int64_t windows = t.sizes[0], width = t.sizes[1], outer = t.strides[0], inner = t.strides[1];
  if (windows == 1 || outer == width * inner) return {t.data, wide, false, 0, inner};
  if (width == 1) return {t.data, wide, false, 0, outer};
  return {t.data, wide, true, outer, inner};
}

/// Elements of a tensor of one dimension (or of none), or of the last one of two.
Values values(const TensorView& t) {
  if (!t.given()) return {};
  return {t.data, t.dtype, t.ndim == 0 ? 0 : t.strides[t.ndim - 1]};
}

constexpr std::int64_t kLinedBytes = 64 << 20;  // of rows that are lined up in one round: bounds the workspace
/// The most rows of a round where some are rejected, a multiple of 256.
std::int64_t lined_at_once(std::int64_t hidden) {
  return std::clamp(kLinedBytes / (2 * std::max<std::int64_t>(hidden, 1)) / (2 * kTileRows) * (2 * kTileRows), std::int64_t{2 * kTileRows},
                    std::int64_t{kListRows});
}

/// Does few_rows take so many rows of so many features? Of target features everything is then done as they lie.
bool few_takes(int tokens, std::int64_t hidden) {
  const FewShape shape{Runs::of(static_cast<int>(hidden))};
  return Few<128>::fitted(shape, tokens, static_cast<std::size_t>(device_info().shared_bytes)).stages > 0;
}

/// What a call's launches share: the parts of the workspace.
struct Means {
  Row* list;
  int* count;
  float* parts;
  unsigned long long* part_flags;
  std::uint16_t* lined;      // rows that stand, one behind another
  Context context;           // raw null where the caller gives the projection's features itself
  std::uint16_t* projected;  // of other heads
};

void launch_plan(const Rows& rows, const Means& m, Stream stream) {
  const unsigned blocks = device_info().major >= 9 ? kPlanBlocks : 1;
  launch(plan_kernel, {.grid = blocks, .block = kPlanThreads, .shared = kPlanBytes, .cluster = blocks, .overlap = true}, stream, rows,
         m.list, m.count);
}

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

/// many_rows; `rows` is what its tensor map of ctx covers.
template <class Io, int kHeadDim, int kGroups>
void launch_many(const Problem& p, const TensorView& weight, std::int64_t rows, Stream stream) {
  const auto most = static_cast<std::size_t>(device_info().shared_bytes);
  const auto blocks = static_cast<unsigned>(device_info().multiprocessors);
  const ManyShape shape = many_shape<kGroups>({p.layers * 2 * p.heads * kHeadDim / kColumns, Runs::of(p.hidden)}, p.rows.tokens, most);
  const auto tiles = static_cast<unsigned>(shape.head_tiles);
  launch(many_rows<Io, kHeadDim, kGroups>,
         {.grid = blocks_for(tiles, blocks_for(tiles, blocks)),
          .block = Many<kGroups>::kThreads,
          .shared = many_shared_bytes<kGroups>(shape.stages, shape.box),
          .overlap = true},
         stream, weight_map(weight, kColumns, true), tile_map(p.ctx, weight.dtype, rows, p.hidden, p.ctx_stride, shape.box, false), p,
         shape);
}

/// 64 random bits, not 0, others each time.
unsigned long long launch_number() {
  static std::atomic<unsigned long long> next{std::uint64_t{std::random_device{}()} << 32 | std::random_device{}()};
  unsigned long long x = next.fetch_add(0x9E3779B97F4A7C15ull);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull, x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return (x ^ x >> 31) | 1;
}
/// Are rows of such a launch lined up first?
bool lined(const Rows& rows) { return rows.commit.data && rows.tokens > kTileRows; }
/// So that row i of ctx is row i of the list; a call's first launch does it for all.
void line_up_for(Problem& p, const Means& m, Stream stream) {
  const bool many = p.rows.tokens > kLinedMore;
  if (p.first_layer == 0)
    launch(many                         ? line_up_many
           : p.rows.tokens > kLinedRows ? line_up<kLinedMore>
                                        : line_up<kLinedRows>,
           {.grid = static_cast<unsigned>(device_info().multiprocessors),
            .block = static_cast<unsigned>(many ? kLineManyThreads : kLineThreads),
            .overlap = true},
           stream, p.rows, static_cast<const uint4*>(p.ctx), p.ctx_stride / 8, p.hidden / 8, m.list, m.count,
           reinterpret_cast<uint4*>(m.lined));
  p.ctx = m.lined, p.ctx_stride = p.hidden;
}

/// The projection of more than 128 rows by bulk_rows; `rows` is what its tensor map of ctx covers. `listed`: row i of ctx is row i of the list that is there.
template <class Io, int kHeadDim>
void launch_bulk(Problem p, const TensorView& weight, std::int64_t rows, bool listed, const Means& m, Stream stream) {
  using B = Bulk<kHeadDim>;
  constexpr int kShortCall = 1024;
  const bool lines_up = !listed && lined(p.rows);
  if (lines_up) line_up_for(p, m, stream), rows = p.rows.tokens;
  BulkShape shape{B::places(p.layers, p.heads), Runs::of(p.hidden), nullptr, nullptr, m.parts, m.part_flags, launch_number()};
  if (listed || lines_up) shape.list = m.list, shape.list_count = m.count;
  const auto kernel = bulk_rows<Io, kHeadDim>;
  const unsigned clusters = std::min(clusters_at_once<2>(kernel, B::kThreads), static_cast<unsigned>(kMostBlocks / 2));
  const unsigned tiles = blocks_for(p.rows.tokens, 2 * B::kRows) * static_cast<unsigned>(shape.deal.slots);  // of two blocks each
  launch(kernel,
         {.grid = 2 * std::min(clusters, tiles * kMostParts),
          .block = B::kThreads,
          .shared = B::kShared,
          .cluster = 2,
          // Not behind rounds of many tiles: blocks that come in one by one as those before leave take more time.
          .overlap = p.rows.tokens <= kShortCall || (lines_up && p.first_layer == 0)},
         stream, weight_map(weight, kColumns, false), weight_map(weight, 32, false),
         tile_map(p.ctx, weight.dtype, rows, p.hidden, p.ctx_stride, B::kRows, false), p, shape);
}

/// Does pair_rows take so many rows? What it hands on between blocks for more than 4096 features takes longer than many_rows with up to 128 rows.
bool pair_takes(const MaterializeArgs& a, int tokens) {
  const std::int64_t hidden = a.kv_weight.sizes[2];
  return a.norm_rope.head_dim == 128 && !a.fc_weight.given() && hidden <= kPairHidden &&
         tokens > (hidden <= kPairSplitHidden ? 64 : kTileRows) && tokens <= (a.commit_lens.given() ? kLinedRows : 256);
}
/// half_rows, of the rows that line_up leaves.
template <class Io, int kQuarters>
void launch_halves_of(Problem p, const TensorView& weight, const LayerPlaces& deal, const Means& m, Stream stream) {
  using F = Halves<kQuarters>;
  line_up_for(p, m, stream);
  const HalvesShape shape{deal, Runs::of(p.hidden), m.list, m.count, false, half_cut(p.is_neox_style, p.rotary_dim)};
  const auto kernel = half_rows<Io, kQuarters>;
  const auto clusters = clusters_at_once<2>(kernel, F::kThreads);
  const auto rows_map = [&](int box) { return tile_map(p.ctx, weight.dtype, p.rows.tokens, p.hidden, p.hidden, box, false); };
  launch(kernel,
         {.grid = 2 * std::min(clusters, static_cast<unsigned>(deal.used)),
          .block = F::kThreads,
          .shared = F::kShared,
          .cluster = 2,
          .overlap = true},
         stream, half_heads_map(weight, shape.cut), weight_map(weight, F::kNarrow, false), weight_map(weight, F::kHalf, false),
         rows_map(kHalfTile / 2), rows_map(kHalfTile), p, shape);
}
template <class Io, int kQuarters>
void launch_pairs_of(Problem p, const TensorView& weight, std::int64_t rows, const LayerPlaces& deal, const Means& m, Stream stream) {
  using F = Pair<kQuarters>;
  const auto kernel = pair_rows<Io, kQuarters>;
  PairShape shape{deal, Runs::of(p.hidden), m.parts, std::min(p.rows.tokens, F::kRows), nullptr, nullptr};
  if (lined(p.rows)) {  // how many stand, only the GPU knows
    line_up_for(p, m, stream);
    shape.list = m.list, shape.list_count = m.count, rows = p.rows.tokens;
  }
  const auto clusters = clusters_at_once<2>(kernel, F::kThreads);
  launch(kernel,
         {.grid = 2 * std::min({clusters, static_cast<unsigned>(deal.used), static_cast<unsigned>(kPairClusters)}),
          .block = F::kThreads,
          .shared = F::kShared,
          .cluster = 2,
          .overlap = true},
         stream, weight_map(weight, kColumns, false), weight_map(weight, F::kNarrow, false),
         tile_map(p.ctx, weight.dtype, rows, p.hidden, p.ctx_stride, shape.box, false), p, shape);
}
template <class Io>
void launch_pairs(const Problem& p, const TensorView& weight, std::int64_t rows, const Means& m, Stream stream) {
  const auto deal = LayerPlaces::of_pairs(p.layers, p.heads, device_info().multiprocessors / 2);
  if (lined(p.rows) && (p.rows.tokens <= 2 * kHalfTile || p.hidden > kPairSplitHidden))
    deal.width == 5 ? launch_halves_of<Io, 5>(p, weight, deal, m, stream) : launch_halves_of<Io, 6>(p, weight, deal, m, stream);
  else
    deal.width == 5 ? launch_pairs_of<Io, 5>(p, weight, rows, deal, m, stream) : launch_pairs_of<Io, 6>(p, weight, rows, deal, m, stream);
}

/// few_rows; `rows` is what its tensor map of ctx covers.
template <class Io, int kHeadDim, bool kEarly, int kNarrow = kHeadDim == 128 ? 32 : 0>
void launch_few_of(const Problem& p, const TensorView& weight, std::int64_t rows, const Runs& runs, const LayerPlaces& deal,
                   const Context& context, Stream stream) {
  using F = Few<kHeadDim, kNarrow>;
  const auto kernel = few_rows<Io, kHeadDim, kEarly, kNarrow>;
  const auto clusters = clusters_at_once<2>(kernel, F::kThreads);
  FewShape shape{runs};
  if constexpr (kHeadDim == 128) {
    shape.deal = deal, shape.places = deal.used;
  } else if constexpr (kHeadDim == 64) {
    shape.places = p.layers * p.heads;
  } else {  // as many columns a cluster as make the fewest rounds
    const unsigned columns = static_cast<unsigned>(context.hidden), of_16 = columns / 16;
    const unsigned rounds = blocks_for(columns, F::kWide * clusters);
    shape.wide = 16 * static_cast<int>(blocks_for(of_16, rounds * clusters));
    shape.places = static_cast<int>(blocks_for(columns, shape.wide));
  }
  shape = F::fitted(shape, p.rows.tokens, static_cast<std::size_t>(device_info().shared_bytes));
  shape.first_row = kEarly ? 0 : static_cast<int>(p.rows.first), shape.first_weight = p.first_layer * 2 * p.heads * kHeadDim;
  const Launch how{.grid = 2 * std::min(clusters, static_cast<unsigned>(shape.places)),
                   .block = F::kThreads,
                   .shared = F::shared_bytes(shape),
                   .cluster = 2,
                   .overlap = true};
  launch(kernel, how, stream, weight_map(weight, shape.wide, true), weight_map(weight, std::max(kNarrow, 32), true),
         tile_map(p.ctx, weight.dtype, rows, weight.size(-1), p.ctx_stride, shape.tokens, false), shape, p, context);
}
/// All of a call of up to 64 rows, as they lie.
template <class Io, int kHeadDim>
void launch_few(const MaterializeArgs& a, Problem p, const Means& m, Stream stream) {
  if (m.context.raw) {
    if (p.first_layer == 0) {
      const int features = static_cast<int>(a.ctx_hidden.sizes[1]);
      launch_few_of<Io, 0, false>(p, a.fc_weight, a.tokens, Runs(kSlices, features / kDepth), {}, m.context, stream);
      launch(normalize_rows<Io, 4>, {.grid = static_cast<unsigned>(p.rows.tokens), .block = kNormalizeThreads, .overlap = true}, stream,
             m.context, nullptr);
    }
    p.ctx = m.context.raw, p.ctx_stride = p.hidden;
  }
  const Runs runs = Runs::of(p.hidden);
  LayerPlaces deal;
  const auto launch_of = [&](auto narrow) {
    constexpr int kNarrow = decltype(narrow)::value;
    m.context.raw ? launch_few_of<Io, kHeadDim, true, kNarrow>(p, a.kv_weight, p.rows.tokens, runs, deal, m.context, stream)
                  : launch_few_of<Io, kHeadDim, false, kNarrow>(p, a.kv_weight, a.tokens, runs, deal, {}, stream);
  };
  if constexpr (kHeadDim == 128) {
    const int pairs = device_info().multiprocessors / 2;
    deal = LayerPlaces::of(p.layers, p.heads, pairs);
    const FewShape widest = Few<128, 64>::fitted(FewShape{runs}, p.rows.tokens, static_cast<std::size_t>(device_info().shared_bytes));
    if (deal.width == 6 && widest.stages == 0) deal = {p.layers, p.heads, 5};  // these fit, or few_takes() had said no
    if (m.context.raw && runs.count > 4 && p.rows.tokens > 32 && deal.width == 6) deal = {p.layers, p.heads, 5};  // 210 us instead of 219
    const auto blocks_columns = deal.width * blocks_for(deal.used, pairs) / 2;  // in quarters; of many_rows: whole heads
    if (m.context.raw || runs.count <= 4 || blocks_columns < 4 * blocks_for(p.layers * 2 * p.heads, 2 * pairs))
      return deal.width == 6 ? launch_of(std::integral_constant<int, 64>{}) : launch_of(std::integral_constant<int, 32>{});
  } else if (m.context.raw || runs.count <= 4) {
    return launch_of(std::integral_constant<int, 0>{});
  }
  launch_many<Io, kHeadDim, 1>(p, a.kv_weight, a.tokens, stream);
}
/// Groups of warps of many_features that make the fewest rounds of tiles, weighed by what a stage takes (cycles).
int feature_groups(std::int64_t tokens, std::int64_t hidden) {
  const auto cost = [&](int groups, int cycles) {
    return static_cast<std::int64_t>(blocks_for(blocks_for(tokens, 64 * groups) * (hidden / kColumns), device_info().multiprocessors / 2)) *
           cycles;
  };
  return cost(2, 580) <= cost(3, 800) ? 2 : 3;
}
/// The product of more rows than few_rows takes, of those of the list, into context.raw; `rows` is what its tensor map of ctx covers. `compact`: row i of ctx is row i of the list.
template <class Io, int kGroups>
void launch_product(Problem p, const TensorView& weight, std::int64_t rows, bool compact, const Context& context, const Means& m,
                    Stream stream) {
  using M = ManyFeatures<kGroups>;
  p.hidden = static_cast<int>(weight.size(-1));
  const ManyFeaturesShape of{static_cast<int>(blocks_for(context.hidden, kColumns)), m.list, m.count, Runs(kSlices, p.hidden / kDepth),
                             compact};
  const auto clusters = clusters_at_once<2>(many_features<Io, kGroups>, M::kThreads);
  const unsigned tiles = blocks_for(p.rows.tokens, M::kRows) * static_cast<unsigned>(of.column_tiles);
  launch(many_features<Io, kGroups>,
         {.grid = 2 * std::min(clusters, tiles), .block = M::kThreads, .shared = M::kShared, .cluster = 2, .overlap = true}, stream,
         weight_map(weight, kColumns, false), tile_map(p.ctx, weight.dtype, rows, p.hidden, p.ctx_stride, M::kRows, false), p, of, context);
}
/// Rows of a launch of long calls of target features: of the tiles of 192 rows that fit the workspace, as many as make the fewest rounds of tiles a row in both products.
std::int64_t features_at_once(const MaterializeArgs& a) {
  const std::int64_t hidden = a.fc_weight.sizes[0], features = a.fc_weight.sizes[1], columns = a.kv_weight.sizes[0] * a.kv_weight.sizes[1];
  std::int64_t best = kContextRows;
  double least = 1e30;
  for (std::int64_t rows = 192; rows <= kContextRows; rows += 192) {
    const auto rounds = [&](std::int64_t n, int at_once) { return blocks_for(rows / 192 * (n / kColumns), at_once); };
    const int blocks = device_info().multiprocessors;
    const double cost = (static_cast<double>(rounds(hidden, blocks / 2)) * static_cast<double>(features) / 2 +
                         static_cast<double>(rounds(columns, blocks)) * static_cast<double>(hidden)) /
                        static_cast<double>(rows);
    if (cost <= least) least = cost, best = rows;
  }
  return best;
}

template <class Io, int kHeadDim>
void launch_fast(const MaterializeArgs& a, Problem p, const Means& m, Stream stream) {
  const bool raw = m.context.raw != nullptr;
  if (few_takes(p.rows.tokens, p.hidden)) return launch_few<Io, kHeadDim>(a, p, m, stream);
  if constexpr (kHeadDim == 128)
    if (pair_takes(a, p.rows.tokens)) return launch_pairs<Io>(p, a.kv_weight, a.tokens, m, stream);
  if (!raw && p.rows.tokens <= Many<2>::kRows)  // as they lie
    return launch_many<Io, kHeadDim, 2>(p, a.kv_weight, a.tokens, stream);
  if (raw) {
    if (p.first_layer == 0) {
      launch_plan(p.rows, m, stream);
      if (!p.rows.commit.data && feature_groups(p.rows.tokens, m.context.hidden) == 3)
        launch_product<Io, 3>(p, a.fc_weight, a.tokens, false, m.context, m, stream);
      else
        launch_product<Io, 2>(p, a.fc_weight, a.tokens, false, m.context, m, stream);
      launch(normalize_rows<Io, 0>, {.grid = static_cast<unsigned>(p.rows.tokens), .block = kNormalizeThreads, .overlap = true}, stream,
             m.context, m.count);
    }
    p.ctx = m.context.raw, p.ctx_stride = p.hidden;
  }
  launch_bulk<Io, kHeadDim>(p, a.kv_weight, raw ? p.rows.tokens : a.tokens, raw, m, stream);
}

/// Some layers of some rows of other heads.
template <class Io>
void launch_other(const MaterializeArgs& a, Problem p, const Means& m, Stream stream) {
  const bool few = p.rows.tokens <= kFewRows, raw = m.context.raw != nullptr;
  const auto product = [&](const Problem& of, const TensorView& weight, std::int64_t rows, bool compact, const Context& context) {
    few ? launch_few_of<Io, 0, false>(of, weight, rows, Runs(kSlices, static_cast<int>(weight.size(-1) / kDepth)), {}, context, stream)
        : launch_product<Io, 2>(of, weight, rows, compact, context, m, stream);
  };
  if (p.first_layer == 0) {
    if (!few) launch_plan(p.rows, m, stream);
    if (raw) {
      product(p, a.fc_weight, a.tokens, false, m.context);
      launch(normalize_rows<Io, 0>, {.grid = static_cast<unsigned>(p.rows.tokens), .block = kNormalizeThreads, .overlap = true}, stream,
             m.context, few ? nullptr : m.count);
    }
  }
  const std::int64_t columns = a.kv_weight.sizes[1];
  const auto slice = [&](const TensorView& t) {  // of these layers
    TensorView of = t;
    of.data = static_cast<char*>(t.data) + p.first_layer * t.strides[0] * size_of(t.dtype), of.sizes[0] = p.layers;
    return of;
  };
  Context projected{m.projected, nullptr, {}, 0, static_cast<int>(p.layers * columns)};
  if (a.kv_bias.given())
    projected.bias = values(slice(a.kv_bias)), projected.bias_layer = a.kv_bias.strides[0],
    projected.layer_columns = static_cast<int>(columns);
  Problem of = p;
  if (raw) of.ctx = m.context.raw, of.ctx_stride = p.hidden, of.rows.first = 0;
  product(of, slice(a.kv_weight), raw ? p.rows.tokens : a.tokens, raw && !few, projected);
  const std::int64_t widest = std::max(a.norm_rope.head_dim, a.v_head_dim);
  const std::int64_t heads = std::int64_t{2} * p.heads * p.layers * p.rows.tokens;
  launch(finish_heads<Io>,
         {.grid = static_cast<unsigned>(
              std::min<std::int64_t>((heads + kOtherWarps - 1) / kOtherWarps, std::int64_t{32} * device_info().multiprocessors)),
          .block = kOtherThreads,
          .shared = static_cast<std::size_t>(kOtherWarps * widest) * sizeof(float),
          .overlap = true},
         stream, p, OtherShape{m.projected, few ? nullptr : m.list, m.count, any_norm_rope(a.norm_rope), static_cast<int>(a.v_head_dim)});
}

void launch_any(const MaterializeArgs& a, const Problem& p, const Means& m, Stream stream) {
  const std::size_t shared = sizeof(AnyShared) + kAnyRows * std::max(a.norm_rope.head_dim, a.v_head_dim) * sizeof(float);
  if (shared > static_cast<std::size_t>(device_info().shared_bytes))
    core::throw_not_implemented("materialize_into_pool: heads of " + std::to_string(std::max(a.norm_rope.head_dim, a.v_head_dim)) +
                                " channels are more than the CUDA kernel holds.");
  AnyShape shape{a.ctx_hidden, a.kv_weight, a.kv_bias, any_norm_rope(a.norm_rope), static_cast<int>(a.v_head_dim), nullptr, nullptr, false};
  const unsigned row_tiles = blocks_for(p.rows.tokens, kAnyRows);
  if (p.rows.tokens > 4 * kAnyThreads || m.context.raw) {
    if (p.first_layer == 0) launch_plan(p.rows, m, stream);
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

/// Of bytes, and of rows.
std::int64_t round_up(std::int64_t n) { return (n + 255) / 256 * 256; }

/// The parts of a workspace: a list of rows, its length, what blocks of bulk_rows and pair_rows hand on, rows that are lined up, and rows of context with their sums of squares.
struct Parts {
  std::int64_t count, flags, sums, lined, squares, raw, end;
};
/// `item`: bytes of a value of context, 0 where there is none. `other`: of other heads, whose projection lies at `sums`.
Parts parts(std::int64_t tokens, std::int64_t hidden, std::int64_t item, const Rounds* other) {
  const std::int64_t rows = other ? std::min(tokens, other->rows) : std::min(tokens, item > 0 ? kContextRows : std::int64_t{kListRows});
  if (other) {
    Parts p{};
    p.count = round_up(rows * static_cast<std::int64_t>(sizeof(Row))), p.flags = p.sums = p.count + 256;
    p.lined = p.squares = p.sums + round_up(other->bytes());
    p.raw = p.squares + (item > 0 ? round_up(rows * (hidden + 15) / 16 * 4) : 0);
    p.end = p.raw + rows * hidden * item;
    return p;
  }
  const bool bulk = item == 0 && tokens > 64, listed = bulk || item > 0;
  constexpr std::int64_t kSums = std::max(kPartBlocks * kPartBytes, pair_bytes(Runs::of(kPairSplitHidden).count));
  Parts p{};
  p.count = listed ? round_up(rows * static_cast<std::int64_t>(sizeof(Row))) : 0;
  p.flags = p.count + (listed ? 256 : 0);
  p.sums = p.flags + (bulk ? round_up(kPartBlocks * kPartFlags * static_cast<std::int64_t>(sizeof(unsigned long long))) : 0);
  p.lined = p.sums + (bulk ? kSums : 0);
  p.squares = p.lined + (bulk && tokens > kTileRows ? round_up(std::min(tokens, lined_at_once(hidden)) * hidden * 2) : 0);
  p.raw = p.squares + (item > 0 ? round_up(rows * (hidden + 15) / 16 * 4) : 0);
  p.end = p.raw + rows * hidden * item;
  return p;
}

}  // namespace

std::int64_t workspace_bytes(std::int64_t tokens, std::int64_t hidden, std::int64_t item) {
  return parts(tokens, hidden, item, nullptr).end;
}
std::int64_t workspace_bytes(const NormRope& nr, std::int64_t v_head_dim, const TensorView& ctx, const TensorView& kv_weight,
                             const TensorView& fc_weight) {
  const bool other = form_of(nr, v_head_dim, ctx, kv_weight, fc_weight) == Form::kOtherHeads;
  const Rounds rounds = rounds_of(ctx.sizes[0], kv_weight.sizes[0], kv_weight.sizes[1]);
  const auto bytes = [&](const Rounds* of) {
    return parts(ctx.sizes[0], kv_weight.sizes[2], fc_weight.given() ? size_of(nr.io) : 0, of).end;
  };
  return std::max(bytes(nullptr), other ? bytes(&rounds) : 0);  // a GPU that is no Hopper takes any_rows' layout
}

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
  const Form form = device_info().major == 9 ? form_of(nr, a.v_head_dim, a.ctx_hidden, a.kv_weight, a.fc_weight) : Form::kAny;
  const bool fast = form == Form::kFast, other = form == Form::kOtherHeads, with_context = a.fc_weight.given();
  const Rounds rounds = rounds_of(a.tokens, a.layers, a.kv_weight.sizes[1]);
  constexpr std::int64_t kMostBlocksAcross = 65535;  // of any_rows: a head each; of any_features
  if (form == Form::kAny && (2 * a.heads > kMostBlocksAcross || (with_context && hidden > kMostBlocksAcross * kAnyColumns)))
    core::throw_not_implemented("materialize_into_pool: " + std::to_string(a.heads) + " heads and " + std::to_string(hidden) +
                                " features are more than a CUDA grid holds.");
  const std::int64_t layers_at_once = other  ? rounds.layers
                                      : fast ? kMaxLayers
                                             : std::min<std::int64_t>(kMaxLayers, kMostBlocksAcross / (2 * a.heads));
  Means m{};
  const Parts at = parts(a.tokens, hidden, with_context ? size_of(nr.io) : 0, other ? &rounds : nullptr);
  char* const workspace = static_cast<char*>(a.workspace);
  m.list = reinterpret_cast<Row*>(workspace), m.count = reinterpret_cast<int*>(workspace + at.count);
  m.projected = reinterpret_cast<std::uint16_t*>(workspace + at.sums);
  if (!with_context) {
    m.parts = reinterpret_cast<float*>(workspace + at.sums), m.part_flags = reinterpret_cast<unsigned long long*>(workspace + at.flags);
    m.lined = reinterpret_cast<std::uint16_t*>(workspace + at.lined);
  }
  if (with_context)
    m.context = {reinterpret_cast<std::uint16_t*>(workspace + at.raw), reinterpret_cast<float*>(workspace + at.squares),
                 values(a.hidden_norm_weight), a.hidden_norm_eps, p.hidden};
  // A launch names at most kMaxLayers layers and plans a bounded number of rows. Rows go in order, so of two that name one slot the last stands.
  std::int64_t round = kListRows;
  if (other) {
    round = rounds.rows;
  } else if (with_context) {
    round = fast && a.tokens > kContextRows && !a.commit_lens.given() ? features_at_once(a) : kContextRows;
  } else if (fast && a.commit_lens.given()) {  // rounds of one length: each reads all weights
    const std::int64_t most = lined_at_once(hidden), n = (a.tokens + most - 1) / most;
    round = round_up((a.tokens + n - 1) / n);
  }
  for (std::int64_t first = 0; first < a.tokens; first += round) {
    p.rows.first = first, p.rows.tokens = static_cast<int>(std::min(a.tokens - first, round));
    for (std::int64_t layer = 0; layer < a.layers; layer += layers_at_once) {
      p.first_layer = static_cast<int>(layer), p.layers = static_cast<int>(std::min(a.layers - layer, layers_at_once));
      for (int l = 0; l < p.layers; ++l)
        p.target[0][l] = {a.k[layer + l], a.k_scale[layer + l]}, p.target[1][l] = {a.v[layer + l], a.v_scale[layer + l]};
      if (form == Form::kAny)
        launch_any(a, p, m, stream);
      else if (other)
        nr.io == DType::kBFloat16 ? launch_other<core::bfloat16>(a, p, m, stream) : launch_other<core::float16>(a, p, m, stream);
      else if (nr.io == DType::kBFloat16)
        nr.head_dim == 128 ? launch_fast<core::bfloat16, 128>(a, p, m, stream) : launch_fast<core::bfloat16, 64>(a, p, m, stream);
      else
        nr.head_dim == 128 ? launch_fast<core::float16, 128>(a, p, m, stream) : launch_fast<core::float16, 64>(a, p, m, stream);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
