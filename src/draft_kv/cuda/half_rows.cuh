#pragma once
// Rows that line_up has lined up, where there are probably no more than 128 of them, of heads of 128: every multiprocessor reads weights all the time, in one round.
//
// What bounds it: up to 128 rows the weights (176 MB of 6 layers x 2 x 8 heads of 128 over 7168 features: 39 us), then the tensor cores. A cluster of two blocks owns a place
// (deal.hpp: a head of K and one or two quarters of V: 160 or 192 columns, whichever makes fewer rounds), in two halves of 80 or 96 columns, and
//   up to 128 rows   block r has half r of the columns, of all rows: weights come to one multiprocessor only, rows to both by multicast (each block asks for every other 64 of them);
//   more             block r has all columns, of rows 128 r on of every 256: rows come to one only, weights to both by multicast (block r asks for half r).
// Which rows are written, and how many of them are multiplied, the launch before says (line_up.cuh). Half r of the first stages' weights is asked for before that is known.
//
// A group of four warps multiplies 64 rows by one half of the columns, whole sums, and finishes them where they are, in registers. A half has the K channels whose rotary partners
// it has, too: `cut` channels of every 2 cut (32, but 16 where 64 channels are turned as split halves). So all that the halves tell each other of a head are sums of squares: 16 bytes a
// lane, from warp to warp, in the order of sums_of_words().
//
// Of the last group of warps, one thread asks for weights, one for rows (a stage's barrier counts both; one thread that asks for all takes 500 ns a stage), and two warps look up beside
// the products where rows go and what finishing them wants.
// The code is kept small: what is behind the products is instructions that nobody has used yet.
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/few_rows.cuh"
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

inline constexpr int kHalfTile = 128;  // rows of a block

template <int kQuarters>
struct Halves {
  static constexpr int kWarps = 16, kThreads = 32 * (kWarps + 4), kPlanners = 64;
  // Of 96 registers a thread each; those that are left of a multiprocessor's are a block of line_up's.
  static constexpr int kRegisters = 112, kFewRegisters = 32;
  static constexpr int kHalf = 16 * kQuarters, kSums = kHalf / 2;  // columns of a half; registers of a thread
  static constexpr int kNarrow = kHalf - 64;                       // of V, beside a head of K
  static constexpr std::uint32_t kHalfBytes = kHalf * kDepth * 2, kRowBytes = kHalfTile * kDepth * 2;
  // Memory: kWeights halves for either half of the columns, then kRowSlots tiles of rows. A ring of one half and all rows has kRowSlots stages. One of both halves has
  // kWideStages: the weights of the last are where the last two tiles of rows would be.
  static constexpr int kWeights = 4, kRowSlots = kQuarters == 5 ? 8 : 7, kWideStages = 5;
  static constexpr std::uint32_t kRows = 2 * kWeights * kHalfBytes;

  struct Tail {
    float4 squares[kWarps][32];  // of the other half, from its warp
    std::int64_t slot[kHalfTile];
    int position[kHalfTile];
    float norm[128], bias[2 * kHalf], eps;
    int count;  // of rows that are multiplied
    std::uint64_t full[kRowSlots], empty[kRowSlots], told[kWarps], planned, taken;
  };
  static constexpr std::size_t kShared = kRows + kRowSlots * kRowBytes + sizeof(Tail);
  static_assert(kShared <= 228288 && kHalfBytes % 1024 == 0 && kRowSlots <= 2 * kWeights && kRowSlots - 2 >= kWideStages &&
                kWideStages == kWeights + 1);

  /// Where the weights of half `half` of stage `at` are, in a ring of one half (of block `half`), or of both.
  __device__ static std::uint32_t weights_at(bool one_half, int half, int at) {
    if (at < kWeights) return (half * kWeights + at) * kHalfBytes;
    return one_half ? ((1 - half) * kWeights + at - kWeights) * kHalfBytes : kRows + (kRowSlots - 2 + half) * kRowBytes;
  }
};

struct HalvesShape {
  LayerPlaces deal;
  Runs runs;
  const Row* list;  // row i of ctx is row i of this list (slot -1: not written)
  const int* list_count;
  bool as_they_lie;  // row i of ctx is row i of the launch
  int cut;           // channels of a head's K that lie beside each other in a half
};
/// Channels of K that a half has side by side.
constexpr int half_cut(bool is_neox_style, int rotary_dim) { return is_neox_style && rotary_dim == 64 ? 16 : 32; }

/// barrier_wait for what another block of the cluster has sent.
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
/// 16 columns of a row into a pool that takes no pieces of Io: lane q has words q and 4 + q.
template <class Io>
__device__ __noinline__ void store_words_any(const LayerPool& pool, DType dtype, bool wide, std::int64_t offset, float scale, bool stands,
                                             int q, std::uint32_t word, std::uint32_t next_word) {
  float x[2], next[2], out[4];
  from_io_pair<Io>(word, x[0], x[1]), from_io_pair<Io>(next_word, next[0], next[1]);
  four_channels(x, next, q, out);
  const int channel = 8 * (q & 1) + 2 * (q & 2);
  if (stands)
    store_four_here(pool.data, dtype, wide, offset + channel * pool.channel_stride, pool.channel_stride, scale,
                    make_float4(out[0], out[1], out[2], out[3]));
}

/// A box of four dimensions.
__device__ __forceinline__ void tile_load(void* to, const CUtensorMap& map, int c0, int c1, int c2, int c3, std::uint64_t* barrier,
                                          std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], "
      "%7;" ::"r"(ptx::shared(to)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(ptx::shared(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tile_load_to_all(void* to, const CUtensorMap& map, int c0, int c1, int c2, int c3, std::uint64_t* barrier,
                                                 std::uint16_t blocks, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4, %5}], [%6], %7, %8;" ::"r"(ptx::shared(to)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(ptx::shared(barrier)), "h"(blocks), "l"(policy)
      : "memory");
}

/// `heads`: boxes of half of a head's K ([depth, cut, 2, rows / (2 cut)]); `narrow`, `columns`: of kNarrow and kHalf rows of weights; `rows`, `tiles`: of 64 and 128 rows of ctx.
template <class Io, int kQuarters>
__global__ void __launch_bounds__(Halves<kQuarters>::kThreads, 1)
    half_rows(const __grid_constant__ CUtensorMap heads, const __grid_constant__ CUtensorMap narrow,
              const __grid_constant__ CUtensorMap columns, const __grid_constant__ CUtensorMap rows,
              const __grid_constant__ CUtensorMap tiles, const __grid_constant__ Problem p, const __grid_constant__ HalvesShape shape) {
  using F = Halves<kQuarters>;
  constexpr int kSums = F::kSums;
  extern __shared__ __align__(1024) unsigned char half_memory[];
  unsigned char* const memory = half_memory;  // swizzled tiles lie at multiples of 1024 bytes
  auto& tail = *reinterpret_cast<typename F::Tail*>(memory + F::kRows + F::kRowSlots * F::kRowBytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int cluster = blockIdx.x / 2, rank = static_cast<int>(ptx::cluster_rank());
  const int stages = p.hidden / kDepth, first_weight = p.first_layer * 2 * p.heads * 128;
  const bool lies = shape.as_they_lie, asks = warp == F::kWarps;
  trace(kEntry, thread == 0);
  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  const std::uint16_t both = 3;
  // Half `half` of a place's columns of a stage: here, or in both blocks. What does not change from stage to stage is found out before.
  struct Half {
    bool has_k;
    int half, head, row;  // head: in units of 2 cut rows of weights; row: of what lies side by side
  };
  const auto half_of = [&](const LayerPlaces::Place& place, int half) {
    const int column = first_weight + place.wide;
    return place.head >= 0 ? Half{true, half, column / (2 * shape.cut), first_weight + place.narrow + half * F::kNarrow}
                           : Half{false, half, 0, column + half * F::kHalf};
  };
  const auto load_half = [&](const Half& h, unsigned char* to, int feature, std::uint64_t* full, auto to_all) {
    if constexpr (decltype(to_all)::value) {
      if (h.has_k) {
        tile_load_to_all(to, heads, feature, 0, h.half, h.head, full, both, once);
        tile_load_to_all(to + 64 * kDepth * 2, narrow, feature, h.row, full, both, once);
      } else {
        tile_load_to_all(to, columns, feature, h.row, full, both, once);
      }
    } else if (h.has_k) {
      tile_load(to, heads, feature, 0, h.half, h.head, full, once);
      tile_load(to + 64 * kDepth * 2, narrow, feature, h.row, full, once);
    } else {
      tile_load(to, columns, feature, h.row, full, once);
    }
  };
  constexpr std::false_type here{};
  constexpr std::true_type to_both{};
  const int ahead =
      cluster < shape.deal.used
          ? min(F::kWeights, stages)
          : 0;  // stages of which half `rank` of the weights is asked for before all else: line_up has let this launch start, which had waited itself
  if (asks) {
    if (lane == 0) {
      prefetch_map(heads), prefetch_map(narrow), prefetch_map(columns), prefetch_map(rows), prefetch_map(tiles);
      for (int i = 0; i < F::kRowSlots; ++i) ptx::barrier_init(&tail.full[i], 2);  // weights, rows
      for (int i = 0; i < F::kWarps; ++i) ptx::barrier_init(&tail.told[i], 1);
      ptx::barrier_init(&tail.planned, F::kPlanners);
      ptx::fence_barriers();
      if (ptx::shared(memory) % 1024) __trap();
      if (ahead > 0) {
        const Half half = half_of(shape.deal[cluster], rank);
#pragma unroll 1
        for (int k = 0; k < ahead; ++k) {
          ptx::barrier_expect(&tail.full[k], F::kHalfBytes);
          load_half(half, memory + F::weights_at(true, rank, k), k * kDepth, &tail.full[k], here);
        }
      }
      trace(kStart, true);
    }
    __syncwarp();
  } else if (
      warp <
      F::kWarps) {  // Arguments come from memory the first time, 64 bytes at a time and one after another: here every warp asks for others.
    constexpr int kHead = (offsetof(Problem, target) + 63) / 64;
    static_assert(kHead <= F::kWarps - 2);
    if (warp < kHead) asm volatile("" ::"r"(reinterpret_cast<const int*>(&p)[16 * warp]));
    if (warp >= F::kWarps - 2 && cluster < shape.deal.used) {
      const LayerPlaces::Place place = shape.deal[cluster];
      const LayerPool& pool = p.target[warp % 2][place.v / 4 / p.heads].pool;
      asm volatile("" ::"l"(pool.data), "l"(pool.slot_stride), "l"(pool.head_stride), "l"(pool.channel_stride));
    }
  }
  if (!lies) ptx::wait_for_previous();  // (else before what wants the list, or writes)
  ptx::let_next_start();
  const int count = lies ? p.rows.tokens : __ldcg(shape.list_count);
  const bool by_columns = count <= kHalfTile;
  const int groups = by_columns ? (count + 63) / 64 : F::kWarps / 4;
  const int items = shape.deal.used * ((count + 2 * kHalfTile - 1) / (2 * kHalfTile)), clusters = static_cast<int>(gridDim.x / 2);
  if (asks && lane == 0) {
    for (int i = 0; i < F::kRowSlots; ++i) ptx::barrier_init(&tail.empty[i], max(1, 8 * groups));
    ptx::barrier_init(&tail.taken, max(1, 128 * groups));
    tail.count = count;
    ptx::fence_barriers();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // (a whole barrier of the cluster would wait for a fence of the GPU)
  __syncthreads();
  ptx::cluster_wait();
  trace(kBarriers, thread == 0);

  // Item i: all places of the first 256 rows, then of the next. The last rows' tiles end with the last row (some rows are then made twice, and finished once).
  if (warp >= F::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F::kFewRegisters));
    const auto first_row = [&](int tile) { return by_columns ? 0 : min(2 * kHalfTile * tile + kHalfTile * rank, count - kHalfTile); };
    if (warp < F::kWarps + 2) {
      if (lane == 0) {
        int at = 0;
        std::uint32_t parity = 1;
        const auto each_stage = [&](int stages_of_ring, int from, auto ask) {
#pragma unroll 1
          for (int k = from; k < stages; ++k) {
            ptx::barrier_wait(&tail.empty[at], parity);
            ask(k);
            if (++at == stages_of_ring) at = 0, parity ^= 1;
          }
        };
        const int depth = by_columns ? F::kRowSlots : F::kWideStages;
        if (asks) at = ahead == depth ? 0 : ahead;
#pragma unroll 1
        for (int item = cluster; item < items; item += clusters) {
          const LayerPlaces::Place place = shape.deal[item % shape.deal.used];
          const int there = item == cluster ? ahead : 0;  // stages of which half `rank` is asked for
          if (asks) {
            const Half half = half_of(place, rank);
            if (by_columns)
              each_stage(F::kRowSlots, there, [&](int k) {
                ptx::barrier_expect(&tail.full[at], F::kHalfBytes);
                load_half(half, memory + F::weights_at(true, rank, at), k * kDepth, &tail.full[at], here);
              });
            else
              each_stage(F::kWideStages, there, [&](int k) {
                ptx::barrier_expect(&tail.full[at], 2 * F::kHalfBytes);
                load_half(half, memory + F::weights_at(false, rank, at), k * kDepth, &tail.full[at], to_both);
              });
          } else {
            const int row = (lies ? static_cast<int>(p.rows.first) : 0) + first_row(item / shape.deal.used);
            if (by_columns) {
              each_stage(F::kRowSlots, 0, [&](int k) {
                ptx::barrier_expect(&tail.full[at], groups * (F::kRowBytes / 2));
                unsigned char* const to = memory + F::kRows + at * F::kRowBytes;
                if (k % 2 == rank)
                  tile_load_to_all(to, rows, k * kDepth, row, &tail.full[at], both, keep);
                else if (groups > 1)
                  tile_load_to_all(to + F::kRowBytes / 2, rows, k * kDepth, row + 64, &tail.full[at], both, keep);
              });
            } else {
              const Half other = half_of(place, 1 - rank);
              each_stage(F::kWideStages, 0, [&](int k) {
                ptx::barrier_expect(&tail.full[at], F::kRowBytes + (k < there ? F::kHalfBytes : 0));
                if (k < there) load_half(other, memory + F::weights_at(false, 1 - rank, at), k * kDepth, &tail.full[at], here);
                tile_load(memory + F::kRows + at * F::kRowBytes, tiles, k * kDepth, row, &tail.full[at], keep);
              });
            }
          }
        }
        trace(kAsked, asks);
        if (cluster < items) {
          for (int i = 0; i < depth; ++i) {  // nobody leaves before the other block has arrived at all of its barriers
            ptx::barrier_wait(&tail.empty[at], parity);
            if (++at == depth) at = 0, parity ^= 1;
          }
        } else if (asks) {
          for (int i = 0; i < ahead; ++i) {  // nothing is written: what is on its way has to come before the block ends
            ptx::barrier_arrive(&tail.full[i]);
            ptx::barrier_wait(&tail.full[i], 0);
          }
        }
      }
    } else {  // Where rows go, and what finishing them wants.
      ptx::wait_for_previous();
      const int planner = thread - 32 * (F::kWarps + 2);
      std::uint32_t taken = 1;
#pragma unroll 1
      for (int item = cluster; item < items; item += clusters, taken ^= 1) {
        const LayerPlaces::Place place = shape.deal[item % shape.deal.used];
        const int tile = item / shape.deal.used, layer = place.v / 4 / p.heads;
        const int from = by_columns ? 0 : 2 * kHalfTile * tile + kHalfTile * rank, first = first_row(tile);
        const bool has_k = place.head >= 0;
        ptx::barrier_wait(&tail.taken, taken);  // nobody finishes the item before any more
#pragma unroll 1
        for (int i = planner; i < kHalfTile; i += F::kPlanners) {
          uint4 row = make_uint4(~0u, ~0u, 0, 0);
          if (first + i >= from && first + i < count) row = __ldcg(reinterpret_cast<const uint4*>(shape.list + first + i));
          tail.slot[i] = reinterpret_cast<const Row&>(row).slot, tail.position[i] = reinterpret_cast<const Row&>(row).position;
          if (has_k) tail.norm[i] = value_at(p.norm.data, p.norm.dtype, (p.first_layer + layer) * p.norm_layer + i * p.norm.stride);
        }
        if (has_k && planner == 0) tail.eps = static_cast<const float*>(p.eps.data)[(p.first_layer + layer) * p.eps.stride];
        if (p.bias.data)
#pragma unroll 1
          for (int c = planner; c < 2 * F::kHalf; c += F::kPlanners) {
            const int h = c / F::kHalf, in_half = c - h * F::kHalf, v = 32 * (place.v % (4 * p.heads));
            const int column = !has_k         ? 128 * p.heads + v + c
                               : in_half < 64 ? 128 * (place.head % (2 * p.heads)) + in_half / shape.cut * 2 * shape.cut + h * shape.cut +
                                                    in_half % shape.cut
                                              : 128 * p.heads + v + h * F::kNarrow + in_half - 64;
            tail.bias[c] = has_k || c < 32 * place.count
                               ? value_at(p.bias.data, p.bias.dtype, (p.first_layer + layer) * p.bias_layer + column * p.bias.stride)
                               : 0.0f;
          }
        ptx::barrier_arrive(&tail.planned);
        ptx::barrier_wait(&tail.planned, taken ^ 1);
#pragma unroll 1
        for (int i = planner; i < 4 * kHalfTile; i += F::kPlanners) {  // angles and pages on their way
          const std::int64_t slot = tail.slot[i / 4];
          if (slot < 0) continue;
          if (has_k && 32 * (i % 4) < p.rotary_dim)
            prefetch_l2(p.table + (p.first_layer + layer) * p.table_layer + tail.position[i / 4] * p.table_row + 32 * (i % 4));
          if (i % 4 > 1 || (i % 4 == 0 && !has_k)) continue;
          const LayerPool& pool = p.target[i % 4][layer].pool;
          const DType dtype = i % 4 ? p.v_dtype : p.k_dtype;
          const int bytes = dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
          prefetch_l2(static_cast<const unsigned char*>(pool.data) + pool_offset(pool, slot, 0) * bytes);
        }
        __syncwarp();
        trace(kPlanThere, planner == 0);
      }
    }
    ptx::wait_for_previous();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F::kRegisters));
  if (warp / 4 >= groups) {
    ptx::wait_for_previous();
    return;
  }
  // What is known of a block stays in shared memory while the products run, and of a thread in its number: the sums need all registers.
  const auto in_columns = [&] { return tail.count <= kHalfTile; };
  const auto rank_here = [] {
    int r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
  };
  const auto thread_here = [] {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
  };
  const auto items_here = [&] { return shape.deal.used * ((tail.count + 2 * kHalfTile - 1) / (2 * kHalfTile)); };
  // Which half of the columns, and of the rows.
  const auto half_here = [&] { return in_columns() ? rank_here() : thread_here() / 128 % 2; };
  const auto side_here = [&] { return in_columns() ? thread_here() / 128 : thread_here() / 256; };
  std::uint32_t parity = 0, pass = 0;  // pass: bit 0 of items, bit 1 of those with a head of K
  int at = 0;
  const int depth = by_columns ? F::kRowSlots : F::kWideStages;
  const std::uint32_t release_at = address_in_block(ptx::shared(tail.empty), lane % 2);
  const std::uint32_t side_rows = ptx::shared(memory) + F::kRows + side_here() * static_cast<std::uint32_t>(kRowTileBytes);
  const std::uint32_t weights = ptx::shared(memory) + F::weights_at(by_columns, half_here(), 0),
                      later_weights =
                          ptx::shared(memory) + F::weights_at(by_columns, half_here(), F::kWeights) - F::kWeights * F::kHalfBytes;
#pragma unroll 1
  for (int item = cluster; item < items_here(); item += gridDim.x / 2, pass ^= 1) {
    float d[kSums], sum[kSums];
#pragma unroll
    for (int j = 0; j < kSums; ++j) d[j] = sum[j] = 0;       // d: or it is taken for alive from the item before
    const auto multiply = [&](float(&y)[kSums], bool add) {  // by the stage that is next
      ptx::barrier_wait_at(ptx::shared(tail.full) + 8 * at, parity);
      const std::uint64_t a = tile_descriptor_at(side_rows + at * F::kRowBytes),
                          b = tile_descriptor_at((at < F::kWeights ? weights : later_weights) + at * F::kHalfBytes);
      product_fence();
#pragma unroll
      for (int t = 0; t < kDepth / 16; ++t) product_of<Io, F::kHalf>(y, a + 2 * t, b + 2 * t, add || t > 0);
      product_commit();
      if (++at == depth) at = 0, parity ^= 1;
    };
    const auto release = [&](int newer) {  // the stage before so many newer ones, to both blocks
      const int stage = at - 1 - newer;
      if (threadIdx.x % 32 < 2) release_in_block(release_at + 8 * (stage < 0 ? stage + depth : stage));
    };
    const auto sum_run = [&](float(&y)[kSums], int run) {
      multiply(y, false);
#pragma unroll 1
      for (int k = shape.runs.length(run); k > 1; --k) {
        multiply(y, true);
        product_wait_all_but_one(), release(1);
      }
      product_wait_for(y), release(0);
    };
#pragma unroll 1
    for (int run = 0; run < shape.runs.count; ++run) {
      sum_run(d, run);
#pragma unroll
      for (int j = 0; j < kSums; ++j) sum[j] += d[j];
    }
    __syncwarp();
    trace(kSummed, thread == 0);
    ptx::wait_for_previous();
    ptx::barrier_wait(&tail.planned, pass & 1);
    // Asked for again, here, so that nothing that follows from them is kept in registers while the products run.
    int item_here = item;
    asm volatile("" : "+r"(item_here));
    const int half = half_here(), warp_here = thread_here() / 32, lane_here = thread_here() % 32;
    const LayerPlaces::Place place = shape.deal[item_here % shape.deal.used];
    const int q = lane_here % 4, layer = place.v / 4 / p.heads, unit = 64 * side_here() + 16 * (warp_here % 4) + lane_here / 4;
    const bool has_k = place.head >= 0;
    if (p.bias.data) {
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const float2 b = *reinterpret_cast<const float2*>(tail.bias + half * F::kHalf + 8 * j + 2 * q);
        sum[4 * j] += b.x, sum[4 * j + 1] += b.y, sum[4 * j + 2] += b.x, sum[4 * j + 3] += b.y;
      }
    }
    std::int64_t slot[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) slot[h] = tail.slot[unit + 8 * h];
    const int cut = shape.cut;
    // The first channel of word 0 <= j < 8 of K, and, of a lane, two from 2 q on.
    const auto channel_of = [&](int j) { return half * cut + (cut == 32 ? j / 4 * 64 + j % 4 * 8 : j / 2 * 32 + j % 2 * 8); };
    if (has_k) {
      const auto y = [&](int j, int h, int e) -> float& { return sum[4 * j + 2 * h + e]; };
      const bool neox = p.is_neox_style;
      const int turned = p.rotary_dim / 2;
      // Split halves: words j and j + apart are partners, for j < pairs.
      const int apart = p.rotary_dim == 128 ? 4 : p.rotary_dim == 16 ? 1 : 2, pairs = p.rotary_dim >= 64 || half == 0 ? apart : 0;
      float angle[2][16] = {};  // or what is not loaded would be taken for alive since the item before
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* const from = p.table + (p.first_layer + layer) * p.table_layer + tail.position[unit + 8 * h] * p.table_row;
        if (neox) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (j < pairs) {
              const float2 c = __ldg(reinterpret_cast<const float2*>(from + channel_of(j) + 2 * q)),
                           s = __ldg(reinterpret_cast<const float2*>(from + turned + channel_of(j) + 2 * q));
              angle[h][4 * j] = c.x, angle[h][4 * j + 1] = c.y, angle[h][4 * j + 2] = s.x, angle[h][4 * j + 3] = s.y;
            }
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j)
            if (const int i = channel_of(j) / 2 + q; i < turned)
              angle[h][2 * j] = __ldg(from + i), angle[h][2 * j + 1] = __ldg(from + turned + i);
        }
      }
      float squares[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float chunk[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          round_pair<Io>(y(j, h, 0), y(j, h, 1)), round_pair<Io>(y(j + 4, h, 0), y(j + 4, h, 1));
          const float x[4] = {y(j, h, 0), y(j, h, 1), y(j + 4, h, 0), y(j + 4, h, 1)};
          chunk[j] = chunk_squares(x);
        }
        squares[h][0] = chunk[0] + chunk[1], squares[h][1] = chunk[2] + chunk[3];
      }
      const int other_warp = in_columns() ? warp_here : warp_here ^ 4, other_block = in_columns() ? 1 - rank_here() : rank_here();
      if (lane_here == 0) ptx::barrier_expect(&tail.told[warp_here], sizeof tail.squares[0]);
      send(address_in_block(&tail.squares[other_warp][lane_here], other_block), squares[0][0], squares[0][1], squares[1][0], squares[1][1],
           address_in_block(&tail.told[other_warp], other_block));
      barrier_wait_cluster(&tail.told[warp_here], pass >> 1);
      pass ^= 2;
      const float4 o = tail.squares[warp_here][lane_here];
      const float other[2][2] = {{o.x, o.y}, {o.z, o.w}};
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        factor[h] = cut == 32 ? (squares[h][0] + squares[h][1]) + (other[h][0] + other[h][1])
                              : (squares[h][0] + other[h][0]) + (squares[h][1] + other[h][1]);
#pragma unroll
      for (int far = 1; far < 4; far *= 2)
#pragma unroll
        for (int h = 0; h < 2; ++h) factor[h] += __shfl_xor_sync(~0u, factor[h], far);
#pragma unroll
      for (int h = 0; h < 2; ++h) factor[h] = norm_factor(factor[h], 128, tail.eps);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 w = *reinterpret_cast<const float2*>(tail.norm + channel_of(j) + 2 * q);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          y(j, h, 0) = y(j, h, 0) * factor[h] * w.x, y(j, h, 1) = y(j, h, 1) * factor[h] * w.y;
          if (p.round_after_norm) round_pair<Io>(y(j, h, 0), y(j, h, 1));
        }
      }
      const auto turn = [&](float& a, float& b, float c, float s) {
        const float first = a * c - b * s, second = b * c + a * s;
        a = first, b = second;
      };
      const auto turn_words = [&](auto words_apart) {
        constexpr int kApart = decltype(words_apart)::value;
        if (pairs > 0)
#pragma unroll
          for (int j = 0; j < kApart; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int e = 0; e < 2; ++e) turn(y(j, h, e), y(j + kApart, h, e), angle[h][4 * j + e], angle[h][4 * j + 2 + e]);
      };
      if (!neox) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (channel_of(j) / 2 + q < turned) {
#pragma unroll
            for (int h = 0; h < 2; ++h) turn(y(j, h, 0), y(j, h, 1), angle[h][2 * j], angle[h][2 * j + 1]);
          }
      } else if (apart == 4) {
        turn_words(std::integral_constant<int, 4>{});
      } else if (apart == 2) {
        turn_words(std::integral_constant<int, 2>{});
      } else {
        turn_words(std::integral_constant<int, 1>{});
      }
    }
    // Into the pool, 16 columns of a row at a time.
    constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
    const int v = 32 * (place.v % (4 * p.heads)) + half * (has_k ? F::kNarrow : F::kHalf) - (has_k ? 64 : 0),
              columns_here = has_k ? F::kHalf : 32 * place.count - half * F::kHalf;
    const bool odd = q & 1;
    if (p.k_wide && p.v_wide && p.k_dtype == kType && p.v_dtype == kType) {
      const LayerPool &k_pool = p.target[0][layer].pool, &v_pool = p.target[1][layer].pool;
      std::uint16_t *k_row[2], *v_row[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_piece = 8 * odd + 2 * (q & 2);
        k_row[h] =
            static_cast<std::uint16_t*>(k_pool.data) + pool_offset(k_pool, slot[h], has_k ? place.head % (2 * p.heads) : 0) + in_piece;
        v_row[h] = static_cast<std::uint16_t*>(v_pool.data) + slot[h] * v_pool.slot_stride + in_piece;
      }
#pragma unroll
      for (int j = 0; j < kSums / 4; j += 2) {
        const bool of_k = has_k && j < 8;
        const int column = v + 8 * j;
        const std::int64_t in_row = of_k ? channel_of(j) : column / 128 * v_pool.head_stride + column % 128;
        if (8 * j < columns_here)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const std::uint32_t a = io_pair<Io>(sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]),
                                b = io_pair<Io>(sum[4 * j + 4 + 2 * h], sum[4 * j + 5 + 2 * h]),
                                other = __shfl_xor_sync(~0u, odd ? a : b, 1);
            if (slot[h] >= 0)
              *reinterpret_cast<uint2*>((of_k ? k_row[h] : v_row[h]) + in_row) = make_uint2(odd ? other : a, odd ? b : other);
          }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kSums / 4; j += 2) {
        const bool of_v = !has_k || j >= 8;
        const int column = v + 8 * j;
        const LayerPool& pool = p.target[of_v][layer].pool;
        const std::int64_t in_row = (of_v ? column / 128 : place.head % (2 * p.heads)) * pool.head_stride +
                                    (of_v ? column % 128 : channel_of(j)) * pool.channel_stride;
        if (8 * j < columns_here)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            store_words_any<Io>(pool, of_v ? p.v_dtype : p.k_dtype, of_v ? p.v_wide : p.k_wide, slot[h] * pool.slot_stride + in_row,
                                scale_of(p, Head{layer, 0, of_v}), slot[h] >= 0, q, io_pair<Io>(sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]),
                                io_pair<Io>(sum[4 * j + 4 + 2 * h], sum[4 * j + 5 + 2 * h]));
      }
    }
    __syncwarp();
    ptx::barrier_arrive(&tail.taken);
    trace(kFinished, thread == 0);
  }
}

}  // namespace specstate::draft_kv::cuda
