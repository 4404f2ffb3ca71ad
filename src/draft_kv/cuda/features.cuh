#pragma once
// In front of the projection, where the caller gives target features: ctx = rms(fc x) * w.
//
// The norm needs whole rows, which no block of the product has. So the product leaves its rounded result and, for every block of 64 columns, the sum of
// squares of each row; whoever reads the result next takes the row's factor from those sums (few rows: the projection's kernel, when it fetches its rows; many rows: a
// kernel in between). Rows are those of the compacted list, in its order. Summation order as everywhere (problem.hpp).
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

/// A block a row of the list, in place.
inline constexpr int kNormalizeThreads = 256;
template <class Io>
__global__ void __launch_bounds__(kNormalizeThreads) normalize_rows(const Context c, const int* count) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  if (static_cast<int>(blockIdx.x) >= *count) return;
  const float factor = row_factor(c, blockIdx.x, threadIdx.x % 32);
  auto* const row = reinterpret_cast<uint4*>(c.raw + static_cast<std::int64_t>(blockIdx.x) * c.hidden);
  for (int piece = threadIdx.x; piece < c.hidden / 8; piece += kNormalizeThreads)
    row[piece] = normed_piece<Io>(c, row[piece], factor, piece * 8);
}

// ------------------------------------------------------------------------------------------------------------------- few rows
// As few_rows: a cluster of kSlices blocks owns a run of columns (in blocks of 64) and block r of it sums slice r of the features. But that slice of the rows
// is long (20480 features / 8) and does not stay in shared memory: it streams with the weights, so all columns of a cluster are done at once, up to kFeatureBlocks
// blocks a pass. A stage of the ring is 64 features of the rows (the first part of the memory) and of every block (the second).
//   warp 3        asks for the weights by tensor map, from before the rows are known;
//   warps 0 - 2   fetch the rows, which may lie anywhere, by 16-byte asynchronous copies;
//   warps 4 - 15  multiply: three groups of four, each two blocks of columns. A stage's products take less than half of the time in which the memory
//                 brings one, so they are waited for at once and the stage is given back.
// After a pass the memory of the weights takes the slices' sums of the rows that this block finishes, and all warps add and store.

inline constexpr int kFewRowsOfBlock = kFewRows / kSlices;
inline constexpr std::size_t kSumBytes = std::size_t{kSlices} * kFewRowsOfBlock * kColumns * 4;
inline constexpr int kFeatureThreads = 512, kFeatureBlocks = 5, kFeatureMostStages = 8;
struct FeatureShape {
  int features;  // a multiple of kDepth
  int blocks;    // of 64 columns in a pass
  int stages;    // of the ring
};
struct FeatureTail {
  Row list[kFewRows + 1];
  int bucket[2 * kFewRows], warp_count[kFeatureThreads / 32];
  std::uint64_t full[kFeatureMostStages], empty[kFeatureMostStages];
};
constexpr std::size_t feature_weight_bytes(int blocks) { return blocks * kStageBytes / 2; }
/// An odd number of blocks: the last product reads beyond the last stage what nobody looks at.
constexpr std::size_t feature_ring_bytes(const FeatureShape& s) {
  return s.stages * (kRowTileBytes + feature_weight_bytes(s.blocks)) + s.blocks % 2 * kStageBytes / 2;
}
constexpr std::size_t feature_shared_bytes(const FeatureShape& s) { return 1024 + feature_ring_bytes(s) + sizeof(FeatureTail); }
/// The ring for so many blocks of columns, dealt out to `clusters`; the sums must fit into it.
constexpr FeatureShape feature_shape(int features, int all, int clusters, std::size_t shared) {
  const int most = (all + clusters - 1) / clusters, passes = (most + kFeatureBlocks - 1) / kFeatureBlocks;
  FeatureShape s{features, (most + passes - 1) / passes, kFeatureMostStages};
  while (feature_shared_bytes(s) > shared) --s.stages;
  return s;
}
static_assert(feature_shape(20480, 64, 15, 232448).stages == 4 && feature_shape(20480, 64, 15, 232448).blocks == 5);
static_assert((kFeatureBlocks + 1) / 2 * kSumBytes <= 4 * feature_weight_bytes(kFeatureBlocks) && kSumBytes <= 4 * feature_weight_bytes(1));

/// Stages of row copies under way. Not more: a stage is told of when this many further ones have been asked for, and the ring must have come round for each.
inline constexpr int kFeatureLag = 1;
/// The rows' part of a pass, by the warps that fetch: `copy(k, stage)` asks for the rows of a stage, each of which is told of once it is there.
template <class Copy>
__device__ __forceinline__ void fetch_rows(int depth, int stages, int stage, std::uint32_t parity, std::uint64_t* full,
                                           std::uint64_t* empty, Copy copy) {
  int oldest = stage, under_way = 0;
  const auto arrived = [&] {  // the copies of this warp
    ptx::fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&full[oldest]);
    if (++oldest == stages) oldest = 0;
  };
  for (int k = 0; k < depth; ++k) {
    ptx::barrier_wait(&empty[stage], parity ^ 1);
    copy(k, stage);
    ptx::copy_async_commit();
    if (under_way == kFeatureLag) {
      ptx::copy_async_wait<kFeatureLag>();
      arrived();
    } else {
      ++under_way;
    }
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  ptx::copy_async_wait<0>();
  for (; under_way > 0; --under_way) arrived();
}

__device__ __forceinline__ void store_in_block(std::uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

/// One row of a tile of two blocks of columns (the second may be missing), by a warp: adds the slices, rounds, stores, and leaves the sums of squares.
template <class Io>
__device__ __forceinline__ void finish_features_row(const Context& c, const float4* received, int slice_stride, std::int64_t row, int block,
                                                    int blocks, int lane) {
  float sum[4];
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    const float4 part = received[s * slice_stride + lane];
    if (s == 0)
      sum[0] = part.x, sum[1] = part.y, sum[2] = part.z, sum[3] = part.w;
    else
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float x = rounded<Io>(sum[2 * half]), y = rounded<Io>(sum[2 * half + 1]);
    float squares = fmaf(y, y, x * x);
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      constexpr int kOrder[5] = {4, 8, 16, 1, 2};  // as many_rows has its columns
      squares += __shfl_xor_sync(~0u, squares, kOrder[i]);
    }
    if (half >= blocks) break;
    reinterpret_cast<std::uint32_t*>(c.raw + row * c.hidden + (block + half) * 64)[lane] =
        std::is_same_v<Io, core::bfloat16> ? bf16_pair(x, y) : fp16_pair(x, y);
    if (lane == 0) c.squares[row * (c.hidden / 64) + block + half] = squares;
  }
}

/// The features [T, features] by p.ctx, p.ctx_stride; boxes of 64 weight rows.
template <class Io>
__global__ void __launch_bounds__(kFeatureThreads, 1)
    few_features(const __grid_constant__ CUtensorMap weights, const __grid_constant__ Problem p, const Context c,
                 const FeatureShape shape) {
  extern __shared__ unsigned char shared_memory[];
  auto* const memory = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(shared_memory) + 1023) & ~std::uintptr_t{1023});
  auto& tail = *reinterpret_cast<FeatureTail*>(memory + feature_ring_bytes(shape));
  const int stages = shape.stages, weight_bytes = static_cast<int>(feature_weight_bytes(shape.blocks));
  unsigned char* const ring = memory + stages * kRowTileBytes;  // of the weights
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32, lane = thread % 32;
  const int rank = static_cast<int>(ptx::cluster_rank()), cluster = blockIdx.x / kSlices, clusters = gridDim.x / kSlices;
  const int all = c.hidden / 64;
  const int begin = static_cast<int>(static_cast<std::int64_t>(cluster) * all / clusters);
  const int end = static_cast<int>(static_cast<std::int64_t>(cluster + 1) * all / clusters);
  const int k_begin = slice_begin(rank, shape.features / kDepth), depth = slice_begin(rank + 1, shape.features / kDepth) - k_begin;

  ptx::wait_for_previous();
  ptx::let_next_start();  // its blocks come in as these leave, ask for their weights and wait
  const std::uint64_t policy = ptx::evict_first();
  int stage = 0;
  std::uint32_t parity = 0;
  const auto advance = [&](int n) {
    for (stage += n; stage >= stages; stage -= stages) parity ^= 1;
  };
  const auto load = [&](int block, int blocks, int k) {
    unsigned char* const to = ring + stage * weight_bytes;
    ptx::barrier_expect(&tail.full[stage], static_cast<std::uint32_t>(blocks * kStageBytes / 2));
    for (int b = 0; b < blocks; ++b)
      tile_load(to + b * (kStageBytes / 2), weights, (k_begin + k) * kDepth, (block + b) * 64, &tail.full[stage], policy);
  };
  for (int i = thread; i < p.rows.tokens * depth; i += kFeatureThreads)  // the rows on their way to L2 before the weights fill the queues
    prefetch_l2(static_cast<const std::uint16_t*>(p.ctx) + (p.rows.first + i / depth) * p.ctx_stride + (k_begin + i % depth) * kDepth);
  const int ahead = min(depth, stages);
  if (thread == 96) {
    for (int i = 0; i < stages; ++i) ptx::barrier_init(&tail.full[i], 4), ptx::barrier_init(&tail.empty[i], 12);
    ptx::fence_barriers();
    for (int k = 0; k < ahead; ++k, advance(1)) load(begin, min(end - begin, shape.blocks), k);
    stage = 0, parity = 0;
  }
  const int count = plan_rows<kFeatureThreads, 1, 2 * kFewRows>(p.rows, tail.list, tail.bucket, tail.warp_count, false);
  const int share = (count + kSlices - 1) / kSlices, mine = min(max(count - rank * share, 0), share);
  auto* const received = reinterpret_cast<float4*>(ring);

  float d[64];
  for (int block = begin; block < end; block += shape.blocks) {
    const int blocks = min(end - block, shape.blocks), tiles = (blocks + 1) / 2, tile = group - 1;
    const int first = stage;
    const std::uint32_t first_parity = parity;  // everybody counts the stages, whoever uses them
    if (warp == 3) {
      if (lane == 0) {
        const int done = block == begin ? ahead : 0;
        advance(done);
        for (int k = done; k < depth; ++k, advance(1)) {
          ptx::barrier_wait(&tail.empty[stage], parity ^ 1);
          load(block, blocks, k);
        }
      }
    } else if (group == 0) {
      const int piece = thread % 8;
      const std::uint16_t* from[6];
      int to[6];
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        const int r = thread / 8 + 12 * j;
        to[j] = r * 128 + ((piece ^ (r % 8)) << 4);
        from[j] = r < count ? static_cast<const std::uint16_t*>(p.ctx) + (p.rows.first + tail.list[r].row) * p.ctx_stride +
                                  k_begin * kDepth + piece * 8
                            : nullptr;
      }
      fetch_rows(depth, stages, stage, parity, tail.full, tail.empty, [&](int k, int s) {
#pragma unroll
        for (int j = 0; j < 6; ++j)
          if (from[j]) ptx::copy_async(memory + s * kRowTileBytes + to[j], from[j] + k * kDepth);
      });
    } else {  // a group without a tile multiplies rubbish, in step with the others
      for (int k = 0; k < depth; ++k, advance(1)) {
        ptx::barrier_wait(&tail.full[stage], parity);
        const std::uint64_t x = tile_descriptor(memory + stage * kRowTileBytes),
                            w = tile_descriptor(ring + stage * weight_bytes + (tile < tiles ? tile : 0) * kStageBytes);
        product_fence();
#pragma unroll
        for (int s = 0; s < kDepth / 16; ++s) product<Io>(d, x + 2 * s, w + 2 * s, k > 0 || s > 0);
        product_commit();
        product_wait(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[stage]);
      }
    }
    stage = first, parity = first_parity;
    advance(depth);
    __syncwarp();
    ptx::cluster_sync();  // everything that the rings held is used: they may be written
    if (group > 0 && tile < tiles)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = 16 * (warp % 4) + lane / 4 + 8 * half;
        if (r < count) {
          const std::uint32_t to =
              address_in_block(received + ((tile * kSlices + rank) * kFewRowsOfBlock + r % share) * 32 + lane % 4, r / share);
#pragma unroll
          for (int w = 0; w < 8; ++w)
            store_in_block(to + w * 64, d[4 * w + 2 * half], d[4 * w + 2 * half + 1], d[4 * (w + 8) + 2 * half],
                           d[4 * (w + 8) + 2 * half + 1]);
        }
      }
    ptx::cluster_sync();
    for (int job = warp; job < tiles * mine; job += kFeatureThreads / 32) {
      const int t = job / mine, r = job % mine;
      finish_features_row<Io>(c, received + (t * kSlices * kFewRowsOfBlock + r) * 32, kFewRowsOfBlock * 32, rank * share + r, block + 2 * t,
                              blocks - 2 * t, lane);
    }
    if (block + shape.blocks < end) {
      ptx::fence_async();
      ptx::cluster_sync();  // the sums are read: the ring may be filled again
    }
  }
}

}  // namespace specstate::draft_kv::cuda
