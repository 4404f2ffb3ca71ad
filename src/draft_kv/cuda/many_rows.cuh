#pragma once
// Many rows: a matrix product with the epilogue inside.
//
// A persistent block makes tiles of 128 rows x 128 columns. Warps 0 - 3 fill a ring of stages (64 features): the weights by tensor map, the rows, which may lie
// anywhere (compaction), by 16-byte asynchronous copies. Warps 4 - 7 and 8 - 11 multiply 64 rows each and then finish them where they are, in registers:
// four lanes hold a row's head, so norm and rotary need two shuffles and no shared memory. While one group finishes, the other one has the tensor cores, and
// the ring fills for the next tile. The slices' sums are added in registers (see problem.hpp), which is why a group has 64 x 128 and not more.
#include "draft_kv/cuda/few_rows.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kManyThreads = 384;
inline constexpr int kManyRows = 128;
inline constexpr int kManyStages = 6;
inline constexpr int kManyLag = 3;      // stages of row copies under way
inline constexpr int kPlanRows = 1024;  // planned by every block itself; longer calls bring a list
inline constexpr int kGroupTiles = 16;  // row tiles that are done together, so that their rows and the weights stay in L2

struct ManyShape {
  int head_tiles;   // of the launch
  const Row* list;  // made by plan_kernel, or null: planned here
  const int* list_count;
};

struct ManyTail {
  float norm[2][kColumns], bias[2][kColumns];
  Row list[kPlanRows];
  int bucket[2 * kPlanRows], warp_count[kManyThreads / 32];
  std::uint64_t full[kManyStages], empty[kManyStages];
};
inline constexpr std::size_t kManyStageBytes = kStageBytes + std::size_t{kManyRows} * kDepth * 2;
inline constexpr std::size_t kManySharedBytes = 1024 + kManyStages * kManyStageBytes + sizeof(ManyTail);

/// Words of a head whose partners are kApart words further, in place: y[jh][jl][e] are words jl + 4 q + 16 jh of the lane with place q.
template <int kApart, int kHeadDim>
__device__ __forceinline__ void turn_words(float (&y)[4][8], const float* angles, int half, int q) {
#pragma unroll
  for (int jh = 0; jh < 4; ++jh) {
    if constexpr (kApart >= 16) {  // the partner is this lane's
      constexpr int kStep = kApart / 16;
      const int in_head = jh % (kHeadDim / 32);
      if (in_head / kStep != 0) continue;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const int f = 8 * q + 32 * (in_head % kStep) + i;
        const float4 c = *reinterpret_cast<const float4*>(angles + f), s = *reinterpret_cast<const float4*>(angles + half + f);
        const float cs[4] = {c.x, c.y, c.z, c.w}, sn[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float a = y[jh][i + e], b = y[jh + kStep][i + e];
          y[jh][i + e] = a * cs[e] - b * sn[e];
          y[jh + kStep][i + e] = b * cs[e] + a * sn[e];
        }
      }
    } else {  // another lane's of the four; only the first 2 * kApart words of a head are turned
      if (jh % (kHeadDim / 32) != 0) continue;
      constexpr int kLanes = kApart / 4;
      const bool first = q < kLanes, turned = q < 2 * kLanes;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float other = __shfl_xor_sync(~0u, y[jh][i], kLanes);
        if (turned) {
          const int f = 8 * (q & (kLanes - 1)) + i;
          const float c = angles[f], s = angles[half + f];
          y[jh][i] = first ? y[jh][i] * c - other * s : y[jh][i] * c + other * s;
        }
      }
    }
  }
}

/// One row of a tile by four lanes; y as above, the sums. `norm` and `bias` are the tile's, in the order of its columns.
template <class Io, int kHeadDim>
__device__ __forceinline__ void finish_four(const Problem& p, const Row& row, bool valid, int tile, int q, float (&y)[4][8],
                                            const float* norm, const float* bias) {
  constexpr int kHeads = kColumns / kHeadDim, kRuns = kHeadDim / 32;
#pragma unroll
  for (int jh = 0; jh < 4; ++jh)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (p.bias.data) y[jh][i] += bias[32 * jh + 8 * q + i];
      y[jh][i] = rounded<Io>(y[jh][i]);
    }
#pragma unroll
  for (int sub = 0; sub < kHeads; ++sub) {
    const Head head = head_of(tile * kHeads + sub, p.heads);
    if (head.is_v) continue;
    float run[kRuns / 2];
#pragma unroll
    for (int jh = 0; jh < kRuns / 2; ++jh) {
      float chunk[4];
#pragma unroll
      for (int jl = 0; jl < 4; ++jl) {
        const auto& a = y[sub * kRuns + jh];
        const auto& b = y[sub * kRuns + jh + kRuns / 2];
        const float x[4] = {a[2 * jl], a[2 * jl + 1], b[2 * jl], b[2 * jl + 1]};
        chunk[jl] = chunk_squares(x);
      }
      run[jh] = (chunk[0] + chunk[1]) + (chunk[2] + chunk[3]);
    }
    float squares = run[0];
    if constexpr (kRuns == 4) squares += run[1];
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    const int layer = p.first_layer + head.layer;
    const float s = norm_factor(squares, kHeadDim, static_cast<const float*>(p.eps.data)[layer * p.eps.stride]);
#pragma unroll
    for (int jh = sub * kRuns; jh < (sub + 1) * kRuns; ++jh)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        y[jh][i] = y[jh][i] * s * norm[32 * jh + 8 * q + i];
        if (p.round_after_norm) y[jh][i] = rounded<Io>(y[jh][i]);
      }
  }
  // The rotary of the whole tile, then V as it was: a tile with K and V (heads of 64) is turned under a mask of its own.
  const Head first = head_of(tile * kHeads, p.heads), last = head_of(tile * kHeads + kHeads - 1, p.heads);
  const int half = p.rotary_dim / 2;
  if (!first.is_v || !last.is_v) {
    float v[kHeads == 2 ? 2 : 1][8];
    if constexpr (kHeads == 2) {
#pragma unroll
      for (int jh = 0; jh < 2; ++jh)
#pragma unroll
        for (int i = 0; i < 8; ++i) v[jh][i] = first.is_v ? y[jh][i] : y[2 + jh][i];
    }
    const int layer = p.first_layer + (first.is_v ? last.layer : first.layer);
    const float* angles = p.table + layer * p.table_layer + row.position * p.table_row;
    if (!p.is_neox_style) {
#pragma unroll
      for (int jh = 0; jh < 4; ++jh)
#pragma unroll
        for (int jl = 0; jl < 4; ++jl) {
          const int f = 16 * (jh % kRuns) + 4 * q + jl;
          if (f < half) {
            const float c = angles[f], s = angles[half + f], a = y[jh][2 * jl], b = y[jh][2 * jl + 1];
            y[jh][2 * jl] = a * c - b * s;
            y[jh][2 * jl + 1] = b * c + a * s;
          }
        }
    } else if (p.rotary_dim == 128) {
      if constexpr (kHeadDim == 128) turn_words<32, kHeadDim>(y, angles, half, q);
    } else if (p.rotary_dim == 64) {
      turn_words<16, kHeadDim>(y, angles, half, q);
    } else if (p.rotary_dim == 32) {
      turn_words<8, kHeadDim>(y, angles, half, q);
    } else {
      turn_words<4, kHeadDim>(y, angles, half, q);
    }
    if constexpr (kHeads == 2) {
      if (first.is_v != last.is_v) {
#pragma unroll
        for (int jh = 0; jh < 2; ++jh)
#pragma unroll
          for (int i = 0; i < 8; ++i) (first.is_v ? y[jh][i] : y[2 + jh][i]) = v[jh][i];
      }
    }
  }
  if (!valid) return;
#pragma unroll
  for (int sub = 0; sub < kHeads; ++sub) {
    const Head head = head_of(tile * kHeads + sub, p.heads);
    const LayerPool& pool = p.target[head.is_v][head.layer].pool;
    const std::int64_t offset = pool_offset(pool, row.slot, head.index);
    const float scale = scale_of(p, head);
#pragma unroll
    for (int jh = 0; jh < kRuns; ++jh) {
      float out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = head.is_v ? y[sub * kRuns + jh][i] : rounded<Io>(y[sub * kRuns + jh][i]);
      store_channels(pool, head.is_v ? p.v_dtype : p.k_dtype, head.is_v ? p.v_wide : p.k_wide, offset, 32 * jh + 8 * q, scale, out);
    }
  }
}

template <class Io, int kHeadDim>
__global__ void __launch_bounds__(kManyThreads, 1)
    many_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ Problem p, const ManyShape shape) {
  extern __shared__ unsigned char shared_memory[];
  auto* const memory = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(shared_memory) + 1023) & ~std::uintptr_t{1023});
  auto& tail = *reinterpret_cast<ManyTail*>(memory + kManyStages * kManyStageBytes);
  const int thread = threadIdx.x, group = thread / 128;
  if (thread == 0) {
    for (int i = 0; i < kManyStages; ++i) ptx::barrier_init(&tail.full[i], 129), ptx::barrier_init(&tail.empty[i], 8);
    ptx::fence_barriers();
    prefetch_map(weights);
  }
  ptx::wait_for_previous();
  const Row* list = shape.list;
  int count;
  if (list) {
    count = *shape.list_count;
    __syncthreads();
  } else {
    list = tail.list;
    count = plan_rows<kManyThreads, (kPlanRows + kManyThreads - 1) / kManyThreads, 2 * kPlanRows>(p.rows, tail.list, tail.bucket,
                                                                                                  tail.warp_count, blockIdx.x == 0);
  }

  const int row_tiles = (count + kManyRows - 1) / kManyRows;
  const int tiles = row_tiles * shape.head_tiles, stages_of_row = p.hidden / kDepth;
  // Tile t of the launch: groups of kGroupTiles row tiles, in a group the columns outside.
  const auto place_of = [&](int t, int& row_tile, int& head_tile) {
    const int group_size = kGroupTiles * shape.head_tiles, g = t / group_size, rest = t % group_size;
    const int rows = min(row_tiles - g * kGroupTiles, kGroupTiles);
    head_tile = rest / rows;
    row_tile = g * kGroupTiles + rest % rows;
  };

  int i = 0;  // stage of the ring, counted through all tiles
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const int piece = thread % 8, first_row = thread / 8;
    const int weight_row = p.first_layer * 2 * p.heads * kHeadDim;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      int row_tile, head_tile;
      place_of(t, row_tile, head_tile);
      const std::uint16_t* from[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int r = row_tile * kManyRows + first_row + 16 * j;
        from[j] = r < count ? static_cast<const std::uint16_t*>(p.ctx) + (p.rows.first + list[r].row) * p.ctx_stride + piece * 8 : nullptr;
      }
      for (int k = 0; k < stages_of_row; ++k, ++i) {
        const int stage = i % kManyStages;
        unsigned char* const w = memory + stage * kManyStageBytes;
        unsigned char* const a = w + kStageBytes;
        ptx::barrier_wait(&tail.empty[stage], (i / kManyStages + 1) & 1);
        if (thread == 0) {
          ptx::barrier_expect(&tail.full[stage], kStageBytes);
          tile_load(w, weights, k * kDepth, 0, 0, 0, (weight_row + head_tile * kColumns) / 32, &tail.full[stage], ptx::evict_last());
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int r = first_row + 16 * j;
          ptx::copy_async(a + r * 128 + ((piece ^ (r % 8)) << 4), from[j] ? from[j] + k * kDepth : p.ctx, from[j] != nullptr);
        }
        ptx::copy_async_commit();
        if (i >= kManyLag) {
          ptx::copy_async_wait<kManyLag>();
          ptx::fence_async();
          ptx::barrier_arrive(&tail.full[(i - kManyLag) % kManyStages]);
        }
      }
    }
    ptx::copy_async_wait<0>();
    ptx::fence_async();
    for (int j = max(i - kManyLag, 0); j < i; ++j) ptx::barrier_arrive(&tail.full[j % kManyStages]);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int side = group - 1, lane = thread % 32, warp = thread / 32 % 4, q = lane % 4;
    const auto release = [&](int stage) {
      if (lane == 0) ptx::barrier_arrive(&tail.empty[stage]);
    };
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      int row_tile, head_tile;
      place_of(t, row_tile, head_tile);
      float d[64], sum[64];
      int k = 0;
#pragma unroll 1
      for (int slice = 0; slice < kSlices; ++slice) {
        const int end = slice_begin(slice + 1, stages_of_row);
        for (bool first = true; k < end; ++k, ++i, first = false) {
          const int stage = i % kManyStages;
          const unsigned char* const w = memory + stage * kManyStageBytes;
          ptx::barrier_wait(&tail.full[stage], (i / kManyStages) & 1);
          const std::uint64_t a = tile_descriptor(w + kStageBytes + side * kRowTileBytes), b = tile_descriptor(w);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) product<Io>(d, a + 2 * s, b + 2 * s, !first || s > 0);
          product_commit();
          if (!first) {
            product_wait_all_but_one();
            release((i - 1) % kManyStages);
          }
        }
        product_wait(d);
        release((i - 1) % kManyStages);
        if (slice == 0) {
#pragma unroll
          for (int j = 0; j < 64; ++j) sum[j] = d[j];
        } else {
#pragma unroll
          for (int j = 0; j < 64; ++j) sum[j] += d[j];
        }
      }
      // The tile's norm weights and biases, one column a thread.
      {
        const int column = thread % 128;
        const Head head = head_of(head_tile * (kColumns / kHeadDim) + column / kHeadDim, p.heads);
        const int layer = p.first_layer + head.layer;
        named_barrier(2 + side, 128);  // the one before is read
        if (!head.is_v)
          tail.norm[side][column] = value_at(p.norm.data, p.norm.dtype, layer * p.norm_layer + (column % kHeadDim) * p.norm.stride);
        if (p.bias.data)
          tail.bias[side][column] = value_at(
              p.bias.data, p.bias.dtype,
              layer * p.bias_layer + ((head.is_v ? p.heads + head.index : head.index) * kHeadDim + column % kHeadDim) * p.bias.stride);
        named_barrier(2 + side, 128);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row_tile * kManyRows + side * 64 + 16 * warp + lane / 4 + 8 * half;
        const bool valid = r < count;
        float y[4][8];
#pragma unroll
        for (int jh = 0; jh < 4; ++jh)
#pragma unroll
          for (int jl = 0; jl < 4; ++jl)
#pragma unroll
            for (int e = 0; e < 2; ++e) y[jh][2 * jl + e] = sum[4 * (jl + 4 * jh) + 2 * half + e];
        finish_four<Io, kHeadDim>(p, valid ? list[r] : Row{0, 0, 0}, valid, head_tile, q, y, tail.norm[side], tail.bias[side]);
      }
    }
  }
}

}  // namespace specstate::draft_kv::cuda
