#pragma once
// In front of the projection, where the caller gives target features: ctx = rms(fc x) * w.
//
// The norm needs whole rows, which no block of the product has. So the product leaves its rounded result and, for every block of 64 columns, the sum of
// squares of each row; whoever reads the result next takes the row's factor from those sums (few rows: the projection's kernel, when it fetches its rows; many rows: a
// kernel in between). Rows are those of the compacted list, in its order. Summation order: problem.hpp.
#include "draft_kv/cuda/few_rows.cuh"
#include "draft_kv/cuda/many_rows.cuh"
#include "draft_kv/cuda/work.hpp"

namespace specstate::draft_kv::cuda {

/// The product of more rows than few_rows<0> takes. A tile has 64 kGroups rows x 128 columns, and a cluster of two blocks: each sums half of the runs. Then of every 16 rows block 0
/// finishes the first 8, block 1 the others, whose sums of the other block come through its shared memory. With whole tiles to a block 224 rows of 20 480 features would be 64 tiles
/// of 100 us on 132 multiprocessors.
///   warps 0 - 3    fill the ring: weights by tensor map, rows, where some are left out, by copies that arrive at the stage's barrier by themselves
///   groups 1, ..   multiply 64 rows each
/// Two groups, or, where many tiles follow each other, three, whose 192 x 128 tiles need a third less of the weights a product: of long calls the power limits the clock, and
/// what is moved costs power. There is no room then for all sums at once, they come in two steps.
template <int kGroups>
struct ManyFeatures {
  static constexpr int kThreads = 128 * (kGroups + 1), kRows = 64 * kGroups, kStages = kGroups == 2 ? 6 : 5, kLoaders = 128;
  static constexpr int kSteps = kGroups == 2 ? 1 : 2, kSent = 32 / kSteps;  // floats of a thread that one step sends
  static constexpr std::size_t kRowBytes = std::size_t{kRows} * kDepth * 2, kStage = kRowBytes + kStageBytes,
                               kSumBytes = std::size_t{128} * kSent * 4;  // of a group
  struct Tail {
    std::uint64_t full[kStages], empty[kStages], sums[kGroups], taken[kGroups];
  };
  static constexpr std::size_t kShared = 1024 + kStages * kStage + kGroups * kSumBytes + sizeof(Tail);
};
static_assert(ManyFeatures<2>::kShared <= 232448 && ManyFeatures<3>::kShared <= 232448);

struct ManyFeaturesShape {
  int column_tiles;
  const Row* list;  // made by plan_kernel
  const int* list_count;
  Runs runs;
  bool compact = false;  // row i of ctx is row i of the list
};
__device__ __forceinline__ std::uint64_t evict_normal() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// 128 columns of a row, as four lanes hold them: y[j] is word 4 j + q. The result, and its squares.
template <class Io>
__device__ __forceinline__ void finish_feature_row(const Context& c, int row, bool valid, int tile, int q, const float (&y)[32]) {
  const std::int64_t at = static_cast<std::int64_t>(row) * c.hidden + tile * kColumns;
  const bool odd = q & 1;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    if (tile * kColumns + 8 * j >= c.hidden) break;
    const std::uint32_t pair[2] = {io_pair<Io>(y[2 * j], y[2 * j + 1]), io_pair<Io>(y[2 * j + 2], y[2 * j + 3])};
    float word[1][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float a, b;
      from_io_pair<Io>(pair[i], a, b);
      word[0][i] = fmaf(b, b, a * a);
    }
    sums_of_words(word);
    const std::uint32_t other = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
    if (!valid) continue;
    if (q == 0 && c.squares) c.squares[at / 16 + j / 2] = word[0][0];
    *reinterpret_cast<uint2*>(c.raw + at + 8 * (j + odd) + 2 * (q & 2)) = make_uint2(odd ? other : pair[0], odd ? pair[1] : other);
  }
}

template <class Io, int kGroups>
__global__ void __launch_bounds__(ManyFeatures<kGroups>::kThreads, 1)
    many_features(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p,
                  const __grid_constant__ ManyFeaturesShape shape, const __grid_constant__ Context context) {
  using M = ManyFeatures<kGroups>;
  constexpr int kRows = M::kRows, kStages = M::kStages;
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  unsigned char* const received = memory + kStages * M::kStage;
  auto& tail = *reinterpret_cast<typename M::Tail*>(received + kGroups * M::kSumBytes);
  const int thread = threadIdx.x, group = thread / 128, rank = static_cast<int>(ptx::cluster_rank());
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  if (thread == 0) prefetch_map(weights), prefetch_map(rows);
  ptx::wait_for_previous();
  const int count = *shape.list_count;
  const bool dense = shape.compact || count == p.rows.tokens;  // rows lie one behind the other
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i)
      ptx::barrier_init(&tail.full[i], dense ? 1 : 1 + M::kLoaders), ptx::barrier_init(&tail.empty[i], 4 * kGroups);
    for (int i = 0; i < kGroups; ++i) ptx::barrier_init(&tail.sums[i], 1), ptx::barrier_init(&tail.taken[i], 4);
    ptx::fence_barriers();
  }
  ptx::cluster_sync();
  const int first_run = rank * (kSlices / 2), k_begin = shape.runs.begin(first_run), k_end = shape.runs.begin(first_run + kSlices / 2);
  const int row_tiles = (count + kRows - 1) / kRows, tiles = row_tiles * shape.column_tiles;
  struct Tile {
    int first_row, column_tile;
  };
  const auto tile_at =
      [&](int t) {  // groups of kGroupTiles row tiles, in a group the columns outside; the last tile ends with the last row (work.hpp)
        const int group_size = kGroupTiles * shape.column_tiles, g = t / group_size, rest = t - g * group_size;
        const int in_group = min(row_tiles - g * kGroupTiles, kGroupTiles), column = rest / in_group;
        return Tile{min((g * kGroupTiles + rest - column * in_group) * kRows, max(count - kRows, 0)), column};
      };

  if (group == 0) {
    if constexpr (kGroups == 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    const std::uint64_t keep = ptx::evict_last();
    const std::uint64_t of_weights = row_tiles <= 2 ? ptx::evict_first() : evict_normal();  // who else wants them comes at once, or soon
    int stage = 0;
    std::uint32_t parity = 1;
    if (dense) {
      if (thread == 0)
        for (int t = cluster; t < tiles; t += clusters) {
          const Tile tile = tile_at(t);
          for (int k = k_begin; k < k_end; ++k) {
            unsigned char* const a = memory + stage * M::kStage;
            ptx::barrier_wait(&tail.empty[stage], parity);
            ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(M::kStage));
            tile_load(a + M::kRowBytes, weights, k * kDepth, tile.column_tile * kColumns, &tail.full[stage], of_weights);
            tile_load(a, rows, k * kDepth, static_cast<int>(p.rows.first) + tile.first_row, &tail.full[stage], keep);
            if (++stage == kStages) stage = 0, parity ^= 1;
          }
        }
    } else {
      const int place = thread % 8, first_row = thread / 8;  // and every sixteenth row from there
      const auto* const ctx =
          reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.ctx) + p.rows.first * p.ctx_stride) + place;
      const auto stride = static_cast<std::uint32_t>(p.ctx_stride / 8);
      for (int t = cluster; t < tiles; t += clusters) {
        const Tile tile = tile_at(t);
        std::uint32_t from[kRows / 16];  // in pieces; -1: beyond the last row, where nobody looks at the result
#pragma unroll
        for (int j = 0; j < kRows / 16; ++j) {
          const int at = tile.first_row + first_row + 16 * j;
          from[j] = at < count ? static_cast<std::uint32_t>(shape.list[at].row) * stride : ~0u;
        }
#pragma unroll 1
        for (int k = k_begin; k < k_end; ++k) {
          unsigned char* const a = memory + stage * M::kStage;
          ptx::barrier_wait(&tail.empty[stage], parity);
          if (thread == 0) {
            ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(kStageBytes));
            tile_load(a + M::kRowBytes, weights, k * kDepth, tile.column_tile * kColumns, &tail.full[stage], of_weights);
          }
          unsigned char* const to = a + first_row * 128 + ((place ^ first_row % 8) << 4);
          const uint4* const column = ctx + k * (kDepth / 8);
#pragma unroll
          for (int j = 0; j < kRows / 16; ++j)
            if (from[j] != ~0u) ptx::copy_async(to + j * 2048, column + from[j]);
          ptx::copy_async_arrive(&tail.full[stage]);
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
      ptx::copy_async_commit(), ptx::copy_async_wait<0>();  // nobody leaves before its copies have come
    }
    return;
  }
  if constexpr (kGroups == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  const int side = group - 1, lane = thread % 32, warp = thread / 32 % 4;
  std::uint32_t step = 0;  // of all tiles
  StageProducts<Io, kColumns> products{ptx::shared(memory),
                                       M::kStage,
                                       side * static_cast<std::uint32_t>(kRowTileBytes),
                                       M::kRowBytes,
                                       ptx::shared(tail.full),
                                       ptx::shared(tail.empty),
                                       kStages,
                                       !dense};
  for (int t = cluster; t < tiles; t += clusters) {
    float d[64], sum[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) d[j] = sum[j] = 0;  // d: or the compiler takes it for alive from the tile before
    products.add_runs(sum, d, shape.runs, first_run, first_run + kSlices / 2);
    __syncwarp();
    unsigned char* const unit = received + side * M::kSumBytes + (warp * (M::kSent / 4) * 32 + lane) * 16;
    const std::uint32_t to = address_in_block(unit, 1 - rank), barrier = address_in_block(&tail.sums[side], 1 - rank);
    float mine[32];  // of row lane / 4 + 8 rank of the warp's 16
#pragma unroll
    for (int from = 0; from < 32; from += M::kSent, ++step) {
      if (thread % 128 == 0) ptx::barrier_expect(&tail.sums[side], M::kSumBytes);
      if (step > 0) ptx::barrier_wait(&tail.taken[side], (step - 1) & 1);
#pragma unroll
      for (int j = 0; j < M::kSent; j += 4) {
        const float* const x = sum + 2 * (from + j);
        if (rank == 0)
          send(to + j * 128, x[2], x[3], x[6], x[7], barrier);
        else
          send(to + j * 128, x[0], x[1], x[4], x[5], barrier);
      }
      ptx::barrier_wait(&tail.sums[side], step & 1);
#pragma unroll
      for (int j = 0; j < M::kSent; j += 4) {
        const float* const x = sum + 2 * (from + j);
        const float4 y = *reinterpret_cast<const float4*>(unit + j * 128);
        float* const z = mine + from + j;
        z[0] = (rank == 0 ? x[0] : x[2]) + y.x, z[1] = (rank == 0 ? x[1] : x[3]) + y.y;
        z[2] = (rank == 0 ? x[4] : x[6]) + y.z, z[3] = (rank == 0 ? x[5] : x[7]) + y.w;
      }
      __syncwarp();
      if ((t + clusters < tiles || from + M::kSent < 32) && lane == 0) release_in_block(address_in_block(&tail.taken[side], 1 - rank));
    }
    const Tile tile = tile_at(t);
    const int at = tile.first_row + side * 64 + 16 * warp + lane / 4 + 8 * rank;
    add_context_bias<16>(context, tile.column_tile * kColumns, lane % 4, mine);
    finish_feature_row<Io>(context, at, at < count, tile.column_tile, lane % 4, mine);
  }
}

/// A block a row, in place; `count`: how many there are, null: all. kKept: pieces of a thread whose weights are read before fc has ended; of many rows none, whose blocks follow each other.
inline constexpr int kNormalizeThreads = 256;
template <class Io, int kKept>
__global__ void __launch_bounds__(kNormalizeThreads) normalize_rows(const Context c, const int* count) {
  trace(kEntry, threadIdx.x == 0 && blockIdx.x < 132, 1);
  ptx::let_next_start();  // what comes next may ask for its weights while fc still runs
  // The norm's weights were there before fc.
  const int pieces = c.hidden / 8, lane = threadIdx.x % 32;
  float norm[kKept + 1][8];
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (const int piece = threadIdx.x + i * kNormalizeThreads; piece < pieces) {
#pragma unroll
      for (int e = 0; e < 8; ++e) norm[i][e] = value_at(c.norm.data, c.norm.dtype, (8 * piece + e) * c.norm.stride);
    }
  ptx::wait_for_previous();
  trace(kStart, threadIdx.x == 0 && blockIdx.x < 132, 1);
  if (count && static_cast<int>(blockIdx.x) >= *count) return;
  auto* const row = reinterpret_cast<uint4*>(c.raw + static_cast<std::int64_t>(blockIdx.x) * c.hidden);
  uint4 x[kKept + 1];
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (const int piece = threadIdx.x + i * kNormalizeThreads; piece < pieces) x[i] = row[piece];
  const float factor = row_factor(c, blockIdx.x, lane);
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (const int piece = threadIdx.x + i * kNormalizeThreads; piece < pieces) row[piece] = normed_piece<Io>(x[i], factor, norm[i]);
  for (int piece = threadIdx.x + kKept * kNormalizeThreads; piece < pieces; piece += kNormalizeThreads)
    row[piece] = normed_piece<Io>(c, row[piece], factor, piece * 8);
  trace(kFinished, threadIdx.x == 0 && blockIdx.x < 132, 1);
}

}  // namespace specstate::draft_kv::cuda
