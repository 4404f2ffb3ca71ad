#pragma once
// Few rows (up to 64): the weights are read once, everything else hides behind that.
//
// What bounds it: 84 MB of weights for 5 layers of 2 x 8 heads of 128 channels over 4096 features, 20 us of the memory's time. So all SMs must stream all
// the time, and little else may cost anything.
// A cluster of kSlices blocks owns a run of columns. Block r of it sums slice r of the features (see problem.hpp), so a block needs only its slice of the
// rows: 64 x hidden / 8, kept in shared memory. An H200 holds 15 such clusters, which 80 heads do not divide into; K heads must stay whole for
// their norm, but columns of V may go anywhere: columns are dealt out in halves of a tile (64), K tiles first, so that a cluster has 10 or 11 of 160.
//   warp 8       asks for the weights: boxes of 64 rows x 64 features, a ring of stages, from before the rows are known;
//   warps 0 - 3  multiply: the rows are the 64 rows of the tensor cores (those beyond the last hold rubbish that nobody reads). A tile's sums go to
//                the blocks of the cluster, to each the rows that it finishes: 16-byte stores into the other block's memory, counted by a barrier there;
//   warps 4 - 7  finish: add the slices in rising order, one row a warp, two (or four) channels and their partners a lane; epilogue; store.
// While a tile is finished the next one is multiplied: there is a buffer for each of two tiles (`buffers`), and "free" barriers, on which every
// finishing warp of the cluster arrives.
#include "draft_kv/cuda/finish.cuh"
#include "draft_kv/cuda/tensor_core.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kFewRows = 64;
inline constexpr int kFewThreads = 288;
inline constexpr int kFewRowsOfBlock = kFewRows / kSlices;

/// What the launch decides.
struct FewShape {
  int stages;   // of the ring
  int buffers;  // tiles whose sums can be under way
  int depth;    // most stages of a slice
};

inline constexpr std::size_t kStageBytes = std::size_t{kColumns} * kDepth * 2;
inline constexpr std::size_t kRowTileBytes = std::size_t{kFewRows} * kDepth * 2;
inline constexpr std::size_t kSumBytes = std::size_t{kSlices} * kFewRowsOfBlock * kColumns * 4;
struct FewTail {
  Row list[kFewRows + 1];
  int bucket[2 * kFewRows], warp_count[kFewThreads / 32];
  std::uint64_t full[16], empty[16], sums[4], free[4];
};
constexpr std::size_t few_shared_bytes(const FewShape& s) {
  return 1024 + s.depth * kRowTileBytes + s.stages * kStageBytes + s.buffers * kSumBytes + sizeof(FewTail);
}

__device__ __forceinline__ std::uint32_t address_in_block(const void* p, std::uint32_t rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(ptx::shared(p)), "r"(rank));
  return address;
}
/// 16 bytes into another block's shared memory, counted by a barrier of that block.
__device__ __forceinline__ void send(std::uint32_t to, float a, float b, float c, float d, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b),
               "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void arrive_in_block(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// barrier_wait for what other blocks of the cluster have sent.
__device__ __forceinline__ void barrier_wait_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(ptx::shared(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/// What the epilogue of a row's chunk needs besides the sum: fetched while the sum is still under way. The chunk's two words are channels
/// channel[i] + {0, 1} of block[i].
struct Side {
  Block block[2];
  int channel[2];
  float bias[4], norm[4], cosine[2], sine[2], eps, scale[2];
};
template <int kHeadDim>
__device__ __forceinline__ Side side_of(const Problem& p, const Columns<kHeadDim>& columns, const Row& row, int t, int lane) {
  constexpr int kLanes = kHeadDim / 4;  // chunks, so lanes, of a head
  const int w = lane % kLanes, half = p.rotary_dim / 2;
  Side side{};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Block b = side.block[i] = columns.block(t, kHeadDim == 128 ? i : lane / kLanes, p.heads);
    side.channel[i] = 2 * w + (kHeadDim == 128 ? b.channel : 32 * i);
    if (!b.here) continue;
    side.scale[i] = scale_of(p, {b.layer, b.index, b.is_v});
    const int layer = p.first_layer + b.layer;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = ((b.is_v ? p.heads : 0) + b.index) * kHeadDim + side.channel[i] + e;
      if (p.bias.data) side.bias[2 * i + e] = value_at(p.bias.data, p.bias.dtype, layer * p.bias_layer + column * p.bias.stride);
      if (!b.is_v) side.norm[2 * i + e] = value_at(p.norm.data, p.norm.dtype, layer * p.norm_layer + (side.channel[i] + e) * p.norm.stride);
    }
  }
  if (side.block[0].is_v || !side.block[0].here) return side;
  const int layer = p.first_layer + side.block[0].layer;
  side.eps = static_cast<const float*>(p.eps.data)[layer * p.eps.stride];
  const float* angles = p.table + layer * p.table_layer + row.position * p.table_row;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int f = p.is_neox_style ? 2 * (w & (p.rotary_dim / 4 - 1)) + i : w + i * kLanes;
    if (f < half) side.cosine[i] = angles[f], side.sine[i] = angles[half + f];
  }
  return side;
}

/// One row of a tile, by a warp: lane `lane` has the finished sum of chunk `lane`, word w and its partner half a head further (of V: the same
/// word of the other block). A head of 64 has 16 lanes.
template <class Io, int kHeadDim>
__device__ __forceinline__ void finish_row(const Problem& p, const Row& row, int lane, const Side& side, const float (&sum)[4]) {
  constexpr int kLanes = kHeadDim / 4;
  const int w = lane % kLanes;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = rounded<Io>(p.bias.data ? sum[i] + side.bias[i] : sum[i]);
  // Heads of 64: K and V may share a warp, so all lanes take part in what crosses lanes.
  float squares = chunk_squares(x);
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  if constexpr (kHeadDim == 128) squares += __shfl_xor_sync(~0u, squares, 16);
  squares += __shfl_xor_sync(~0u, squares, 4);
  squares += __shfl_xor_sync(~0u, squares, 8);
  const float s = norm_factor(squares, kHeadDim, side.eps);
  float y[4], z[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = x[i] * s * side.norm[i];
    if (p.round_after_norm) y[i] = rounded<Io>(y[i]);
    z[i] = y[i];
  }
  const int apart = p.rotary_dim / 4;  // words between partners
  if (!p.is_neox_style) {              // partners are the two channels of a word
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (w + i * kLanes < p.rotary_dim / 2) {
        z[2 * i] = y[2 * i] * side.cosine[i] - y[2 * i + 1] * side.sine[i];
        z[2 * i + 1] = y[2 * i + 1] * side.cosine[i] + y[2 * i] * side.sine[i];
      }
  } else if (apart == kLanes) {  // those of a chunk
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      z[e] = y[e] * side.cosine[e] - y[2 + e] * side.sine[e];
      z[2 + e] = y[2 + e] * side.cosine[e] + y[e] * side.sine[e];
    }
  } else {  // those of another lane
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float other = __shfl_xor_sync(~0u, y[e], apart);
      if (w < 2 * apart) z[e] = w < apart ? y[e] * side.cosine[e] - other * side.sine[e] : y[e] * side.cosine[e] + other * side.sine[e];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Block& b = side.block[i];
    if (!b.here) continue;
    const LayerPool& pool = p.target[b.is_v][b.layer].pool;
    const float out[2] = {b.is_v ? x[2 * i] : rounded<Io>(z[2 * i]), b.is_v ? x[2 * i + 1] : rounded<Io>(z[2 * i + 1])};
    store_channels(pool, b.is_v ? p.v_dtype : p.k_dtype, b.is_v ? p.v_wide : p.k_wide, pool_offset(pool, row.slot, b.index),
                   side.channel[i], side.scale[i], out);
  }
}

template <class Io, int kHeadDim>
__global__ void __launch_bounds__(kFewThreads, 1)
    few_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ Problem p, const FewShape shape) {
  extern __shared__ unsigned char shared_memory[];
  auto* memory = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(shared_memory) + 1023) & ~std::uintptr_t{1023});
  unsigned char* const row_tiles = memory;
  unsigned char* const ring = row_tiles + shape.depth * kRowTileBytes;
  auto* const received = reinterpret_cast<float4*>(ring + shape.stages * kStageBytes);
  auto& tail = *reinterpret_cast<FewTail*>(ring + shape.stages * kStageBytes + shape.buffers * kSumBytes);

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rank = static_cast<int>(ptx::cluster_rank()), cluster = blockIdx.x / kSlices, clusters = gridDim.x / kSlices;
  const Columns<kHeadDim> columns(p.layers, p.heads, cluster, clusters);
  const int tiles = columns.tiles();
  const int stages_of_row = p.hidden / kDepth;
  const int k_begin = slice_begin(rank, stages_of_row), depth = slice_begin(rank + 1, stages_of_row) - k_begin;
  const int loads = tiles * depth;

  ptx::wait_for_previous();
  // The loads, in their order; everything that takes a division is done once a tile.
  struct {
    int tile = 0, k = 0, stage = 0, rows[2] = {};
    std::uint32_t bytes = 0;
  } next;
  const std::uint64_t policy = ptx::evict_first();
  const auto load = [&] {
    if (next.k == 0) {
      next.bytes = 0;
      for (int half = 0; half < 2; ++half) {
        const Block b = columns.block(next.tile, half, p.heads);
        next.rows[half] = b.here ? ((p.first_layer + b.layer) * 2 * p.heads * kHeadDim + column_of<kHeadDim>(b, p.heads)) / 32 : -1;
        next.bytes += b.here ? kStageBytes / 2 : 0;
      }
    }
    unsigned char* const to = ring + next.stage * kStageBytes;
    std::uint64_t* const full = &tail.full[next.stage];
    ptx::barrier_expect(full, next.bytes);
    tile_load(to, weights, (k_begin + next.k) * kDepth, 0, 0, 0, next.rows[0], full, policy);
    if (next.rows[1] >= 0) tile_load(to + kStageBytes / 2, weights, (k_begin + next.k) * kDepth, 0, 0, 0, next.rows[1], full, policy);
    if (++next.k == depth) next.k = 0, ++next.tile;
    if (++next.stage == shape.stages) next.stage = 0;
  };
  if (thread == kFewThreads - 32) {
    for (int i = 0; i < shape.stages; ++i) ptx::barrier_init(&tail.full[i], 1), ptx::barrier_init(&tail.empty[i], 4);
    ptx::fence_barriers();
    for (int i = 0; i < min(loads, shape.stages); ++i) load();
  }
  const int count = plan_rows<kFewThreads, 1, 2 * kFewRows>(p.rows, tail.list, tail.bucket, tail.warp_count, blockIdx.x == 0);
  // A block finishes rows rank * share .. of the list; those without rows have no part in the exchange.
  const int share = (count + kSlices - 1) / kSlices, mine = min(max(count - rank * share, 0), share);
  const int finishing = count > 0 ? (count + share - 1) / share : 0;
  if (thread == 0) {
    for (int i = 0; i < shape.buffers; ++i) ptx::barrier_init(&tail.sums[i], 1), ptx::barrier_init(&tail.free[i], max(4 * finishing, 1));
    ptx::fence_barriers();
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

  if (warp < 8) {  // the slice of the rows
    for (int r = warp; r < count; r += 8) {
      const auto* from = static_cast<const std::uint16_t*>(p.ctx) + (p.rows.first + tail.list[r].row) * p.ctx_stride + k_begin * kDepth;
      for (int piece = lane; piece < depth * 8; piece += 32)
        ptx::copy_async(row_tiles + (piece / 8) * kRowTileBytes + r * 128 + (((piece % 8) ^ (r % 8)) << 4), from + piece * 8);
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    ptx::fence_async();
    named_barrier(1, 256);
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

  if (warp == 8) {
    if (lane == 0) {
      std::uint32_t parity = 0;
      for (int i = shape.stages; i < loads; ++i) {
        ptx::barrier_wait(&tail.empty[next.stage], parity);
        if (next.stage == shape.stages - 1) parity ^= 1;
        load();
      }
    }
  } else if (warp < 4) {
    float d[64];
    int stage = 0, before = 0;
    std::uint32_t parity = 0;
    for (int u = 0; u < tiles; ++u) {
      for (int k = 0; k < depth; ++k) {
        ptx::barrier_wait(&tail.full[stage], parity);
        const std::uint64_t a = tile_descriptor(row_tiles + k * kRowTileBytes), b = tile_descriptor(ring + stage * kStageBytes);
        product_fence();
#pragma unroll
        for (int s = 0; s < kDepth / 16; ++s) product<Io>(d, a + 2 * s, b + 2 * s, k > 0 || s > 0);
        product_commit();
        if (k > 0) {
          product_wait_all_but_one();
          if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        }
        before = stage;
        if (++stage == shape.stages) stage = 0, parity ^= 1;
      }
      product_wait(d);
      if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
      const int buffer = u % shape.buffers;
      if (u >= shape.buffers && finishing > 0) barrier_wait_cluster(&tail.free[buffer], (u / shape.buffers + 1) & 1);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int r = 16 * warp + lane / 4 + 8 * side;
        if (r < count) {
          const std::uint32_t to_rank = r / share;
          const int place = ((buffer * kSlices + rank) * kFewRowsOfBlock + r % share) * 32 + lane % 4;
          const std::uint32_t to = address_in_block(received + place, to_rank), barrier = address_in_block(&tail.sums[buffer], to_rank);
#pragma unroll
          for (int c = 0; c < 8; ++c) {  // chunk c of this lane: word jl + 4 q + 16 jh of the tile and its partner
            const int j = kHeadDim == 128 ? c : c / 4 * 8 + c % 4, partner = j + kHeadDim / 16;
            send(to + c * 64, d[4 * j + 2 * side], d[4 * j + 2 * side + 1], d[4 * partner + 2 * side], d[4 * partner + 2 * side + 1],
                 barrier);
          }
        }
      }
    }
  } else if (mine > 0) {
    const int finisher = warp - 4;
    const std::uint32_t bytes = static_cast<std::uint32_t>(mine) * kSlices * kColumns * 4;
    if (finisher == 0 && lane == 0)
      for (int b = 0; b < min(shape.buffers, tiles); ++b) ptx::barrier_expect(&tail.sums[b], bytes);
    const int place = ((lane & 3) + 4 * (lane >> 4)) * 4 + ((lane >> 2) & 3);  // of chunk `lane`, as it was sent
    constexpr int kEach = kFewRowsOfBlock / 4;                                 // rows of a warp
    for (int u = 0; u < tiles; ++u) {
      const int buffer = u % shape.buffers;
      Side side[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (finisher + 4 * j < mine) side[j] = side_of<kHeadDim>(p, columns, tail.list[rank * share + finisher + 4 * j], u, lane);
      barrier_wait_cluster(&tail.sums[buffer], (u / shape.buffers) & 1);
      if (finisher == 0 && lane == 0 && u + shape.buffers < tiles) ptx::barrier_expect(&tail.sums[buffer], bytes);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int r = finisher + 4 * j;
        if (r >= mine) break;
        float sum[4];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          const float4 part = received[((buffer * kSlices + s) * kFewRowsOfBlock + r) * 32 + place];
          if (s == 0)
            sum[0] = part.x, sum[1] = part.y, sum[2] = part.z, sum[3] = part.w;
          else
            sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
        }
        finish_row<Io, kHeadDim>(p, tail.list[rank * share + r], lane, side[j], sum);
      }
      __syncwarp();
      if (lane < kSlices) arrive_in_block(address_in_block(&tail.free[buffer], lane));
    }
  }
  ptx::cluster_sync();  // nobody leaves while others may still send to it
}

}  // namespace specstate::draft_kv::cuda
