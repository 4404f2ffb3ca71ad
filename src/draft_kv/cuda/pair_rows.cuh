#pragma once
// 65 to some hundred rows of calls whose weights are many: every multiprocessor reads weights all the time, in one round.
//
// What bounds it: up to 128 rows the weights (176 MB of 6 layers x 2 x 8 heads of 128 over 7168 features: 39 us), then the tensor cores. A tile of 128 rows keeps up with the memory
// only if all multiprocessors have one, and 12 288 columns are 77 tiles of 160. So a cluster of two blocks owns a place (deal.hpp: a head of K, which its norm wants whole, and one or
// two quarters of V: 160 or 192 columns, whichever makes fewer rounds), and of every 256 rows
//   up to 128      the two share the features: block r sums the runs of half r (problem.hpp). What comes then is shared, too, as in few_rows: of every 16 rows block 0 finishes the
//                  first 8, block 1 the others. All runs have to be added in rising order, so block 1 leaves each of its runs apart, and block 0 the sum of its own: in the workspace
//                  (from L2 and back), each thread for the one of its number in the other block.
//   129 to 256     the two share the rows, and the weights come to both through L2.
// How many rows there are is known before where they lie; else line_up has copied them one behind another, and left their list and number.
//
// Warps:
//   groups 1 and 2   multiply 64 rows each and add up the runs; then each warp finishes the K of its rows;
//   warp 0           fills the ring of stages (64 features) by tensor map;
//   warps 2, 3       find out beside the products which rows are written and where they go (mark_tile).
// All warps of group 0 finish quarters of V at the end. The rounded tile takes the place of the ring.
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/few_rows.cuh"
#include "draft_kv/cuda/finish_eight.cuh"
#include "draft_kv/cuda/many_rows.cuh"
#include "draft_kv/cuda/work.hpp"

namespace specstate::draft_kv::cuda {

inline constexpr int kPairHidden = 8192;                // features, at most
inline constexpr int kPairSplitHidden = 4096;           // where two blocks may share the features: bounds the workspace
inline constexpr int kPairClusters = 72;                // no GPU of this architecture holds more
inline constexpr std::size_t kPairPart = 256 * 48 * 4;  // bytes of a half of a run: of 8 of every 16 rows

/// What a block does of an item (a place, and 256 rows).
struct PairShare {
  int item, row, from, rows;  // first row of the tile (so that it ends with the last), first one that is finished, first beyond
  int begin, end;             // runs
  bool splits;                // the features
  LayerPlaces::Place place;
};

template <int kQuarters>
struct Pair {
  static constexpr int kThreads = 384, kRows = kTileRows, kWide = 32 * kQuarters, kNarrow = kWide - 128;
  static constexpr int kSums = kWide / 2, kHalf = kSums / 2;  // registers of a thread; of the rows of either half
  static constexpr int kStride = 2 * kWide + 16;              // bytes of a row of rounded sums (finish_eight.cuh)
  static constexpr std::uint32_t kRowBytes = kRows * kDepth * 2, kStage = kRowBytes + kWide * kDepth * 2;
  static constexpr int kStages = kQuarters == 5 ? 6 : 5, kMarkers = 64, kBuckets = 2 * kRows;
  static constexpr int kRegisters = kQuarters == 5 ? 192 : 224, kFewRegisters = (168 * kThreads - 256 * kRegisters) / 128;

  struct Tail {
    std::int64_t slot[kRows], to[kRows];  // of the tile's rows; of those that this block finishes
    int position[kRows], by[kRows];
    float bias[kWide];
    alignas(16) float norm[128];
    float eps;
    PairShare share;
    int items;
    std::uint64_t full[kStages], empty[kStages], marked, placed, done, left;
    int bucket[kBuckets];
  };
  static constexpr std::size_t kShared = kStages * kStage + sizeof(Tail);
  static_assert(kShared <= 232448 && kRows * kStride <= kStages * kStage && kHalf * 256 * 4 <= kPairPart);
};

struct PairShape {
  LayerPlaces deal;
  Runs runs;
  float* parts;           // [kPairClusters][runs - 1][kPairPart]
  int box;                // rows of ctx's box
  const Row* list;        // of the rows that line_up has lined up (slot -1: not written); null: row i of ctx is row i of the launch
  const int* list_count;  // and their number
};
constexpr std::size_t pair_bytes(int runs) { return kPairClusters * static_cast<std::size_t>(runs - 1) * kPairPart; }

/// One of the two halves of a warp's rows: x[4 j + 2 kWhich ..] of every 8 columns j. Pairs, as they lie in the registers of a sum: there are no others to move them to.
template <int kWhich, int kSums>
__device__ __forceinline__ void store_half(float2* to, const float (&x)[kSums]) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j)
    asm volatile("st.global.cg.v2.f32 [%0], {%1, %2};" ::"l"(to + j * 256), "f"(x[4 * j + 2 * kWhich]), "f"(x[4 * j + 2 * kWhich + 1])
                 : "memory");
}
template <int kWhich, int kSums>
__device__ __forceinline__ void take_half(float (&to)[kSums / 2], const float (&x)[kSums]) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) to[2 * j] = x[4 * j + 2 * kWhich], to[2 * j + 1] = x[4 * j + 2 * kWhich + 1];
}
template <int kHalf>
__device__ __forceinline__ void load_half(float (&to)[kHalf], const float2* from) {
#pragma unroll
  for (int j = 0; j < kHalf / 2; ++j)
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(to[2 * j]), "=f"(to[2 * j + 1]) : "l"(from + j * 256) : "memory");
}
template <int kN>
__device__ __forceinline__ void add(float (&to)[kN], const float (&x)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) to[j] += x[j];
}

template <class Io, int kQuarters>
__global__ void __launch_bounds__(Pair<kQuarters>::kThreads, 1)
    pair_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quarters,
              const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p, const __grid_constant__ PairShape shape) {
  using F = Pair<kQuarters>;
  constexpr int kHeadDim = 128, kRows = F::kRows, kStages = F::kStages, kSums = F::kSums, kHalf = F::kHalf, kStride = F::kStride;
  extern __shared__ __align__(1024) unsigned char pair_memory[];
  unsigned char* const memory = pair_memory;  // swizzled tiles lie at multiples of 1024 bytes; at the end the rounded rows
  auto& tail = *reinterpret_cast<typename F::Tail*>(memory + kStages * F::kStage);
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  const int cluster = blockIdx.x / 2, rank = static_cast<int>(ptx::cluster_rank());
  const int all_runs = shape.runs.count, half_runs = all_runs / 2, first_weight = p.first_layer * 2 * p.heads * kHeadDim;
  const bool lies = !shape.list;
  trace(kEntry, thread == 32);
  // What of the weights this block needs first, on its way to L2, where they share the features.
  if (thread == 32 && lies && p.rows.tokens <= kRows) {
    const LayerPlaces::Place place = shape.deal[cluster];
#pragma unroll 1
    for (int k = 0; k < 4; ++k) tile_prefetch(weights, (shape.runs.begin(rank * half_runs) + k) * kDepth, first_weight + place.wide);
    trace(kPrefetched, true);
  }
  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  const auto weight_bytes = [&](const LayerPlaces::Place& place) {
    return static_cast<std::uint32_t>((128 + (place.narrow >= 0 ? F::kNarrow : 0)) * kDepth * 2);
  };
  const auto load_weights = [&](const LayerPlaces::Place& place, int stage, int k) {
    unsigned char* const to = memory + stage * F::kStage + F::kRowBytes;
    tile_load(to, weights, k * kDepth, first_weight + place.wide, &tail.full[stage], once);
    if (place.narrow >= 0) tile_load(to + 128 * kDepth * 2, quarters, k * kDepth, first_weight + place.narrow, &tail.full[stage], once);
  };
  const std::uint32_t box_bytes = static_cast<std::uint32_t>(shape.box * kDepth * 2);
  int count = p.rows.tokens;
  const int row_begin = lies ? static_cast<int>(p.rows.first) : 0;
  const auto share_of = [&](int first) {
    PairShare s{};
    const int n = min(count - first, 2 * kRows);
    s.splits = n <= kRows, s.rows = first + n;
    s.row = s.from = first + (s.splits ? 0 : rank * kRows);
    if (!s.splits && rank > 0) s.row = s.rows - kRows;
    s.begin = s.splits && rank > 0 ? half_runs : 0, s.end = s.splits && rank == 0 ? half_runs : all_runs;
    return s;
  };
  int ahead = 0;  // stages whose weights (and rows, as they lie) are asked for before all else
  if (thread == 0) {
    prefetch_map(weights), prefetch_map(quarters), prefetch_map(rows);
    for (int i = 0; i < kStages; ++i) ptx::barrier_init(&tail.full[i], 1), ptx::barrier_init(&tail.empty[i], 8);
    ptx::barrier_init(&tail.marked, F::kMarkers), ptx::barrier_init(&tail.placed, F::kMarkers);
    ptx::barrier_init(&tail.done, 256), ptx::barrier_init(&tail.left, 256);
    ptx::fence_barriers();
    ptx::wait_for_previous();
    if (!lies) count = __ldcg(shape.list_count);
    if (count > 0) {
      const LayerPlaces::Place place = shape.deal[cluster];
      const PairShare s = share_of(0);
      const int begin = shape.runs.begin(s.begin);
      ahead = min(kStages, shape.runs.begin(all_runs) - shape.runs.begin(half_runs));
      for (int k = 0; k < ahead; ++k) {
        ptx::barrier_expect(&tail.full[k], weight_bytes(place) + box_bytes);
        load_weights(place, k, begin + k);
        tile_load(memory + k * F::kStage, rows, (begin + k) * kDepth, row_begin + s.row, &tail.full[k], keep);
      }
    }
    trace(kStart, true);
  }
  ptx::wait_for_previous();
  ptx::let_next_start();
  if (!lies) count = __ldcg(shape.list_count);
  if (count == 0) return;  // both blocks
  __syncthreads();
  trace(kBarriers, thread == 128);
  const int items = shape.deal.used * ((count + 2 * kRows - 1) / (2 * kRows));
  // Item i: all places of the first 256 rows, then of the next. What is about an item stays in shared memory: the sums need all registers.
  const auto begin_item = [&](int item) {
    PairShare s = share_of(item / shape.deal.used * 2 * kRows);
    s.item = item, s.place = shape.deal[item % shape.deal.used];
    tail.share = s, tail.items = items;
  };
  if (thread == 64) begin_item(cluster);
  __syncthreads();
  const PairShare& s = tail.share;
  constexpr DType kType = std::is_same_v<Io, core::bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  const auto finish_v = [&](int of, int warps, int lane_here) {
    const unsigned char* const from = memory + (s.place.head >= 0 ? 256 : 0);
    const int finished = s.splits ? kRows / 2 : kRows;
    if (p.v_wide && p.v_dtype == kType) {
      const int layer = s.place.v / 4 / p.heads, quarter = s.place.v - layer * 4 * p.heads;
#pragma unroll 1
      for (int n = 0; n < s.place.count; ++n)
        finish_usual_v<kStride>(p.target[1][layer].pool, (quarter + n) / 4, (quarter + n) % 4, from + 64 * n, tail.to, 8 * of, finished,
                                8 * warps, lane_here, [](int) {});
    } else {
      finish_quarters<Io>(
          p, [&](int r, int byte) { return *reinterpret_cast<const uint4*>(from + r * kStride + byte); }, s.place.v, s.place.count, tail.to,
          finished, of, warps);
    }
  };
  // All threads of both blocks.
  const auto next_item = [&] {
    const int item = s.item + static_cast<int>(gridDim.x / 2);
    if (item >= tail.items) return false;
    ptx::fence_async();
    ptx::cluster_sync();
    if (threadIdx.x == 64) begin_item(item);
    ptx::cluster_sync();
    return true;
  };
  if (cluster >= items) return;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F::kFewRegisters));
    int stage = 0;
    std::uint32_t parity = 1, marks = 0, pass = 0;
    do {
      const LayerPlaces::Place place = s.place;
      const int begin = shape.runs.begin(s.begin), end = shape.runs.begin(s.end);
      if (warp < 2) {
        if (thread == 0) {
          if ((stage += ahead) >= kStages) stage -= kStages, parity ^= 1;
#pragma unroll 1
          for (int k = begin + ahead; k < end; ++k) {
            ptx::barrier_wait(&tail.empty[stage], parity);
            ptx::barrier_expect(&tail.full[stage], weight_bytes(place) + box_bytes);
            load_weights(place, stage, k);
            tile_load(memory + stage * F::kStage, rows, k * kDepth, row_begin + s.row, &tail.full[stage], keep);
            if (++stage == kStages) stage = 0, parity ^= 1;
          }
          trace(kAsked, true);
        }
        ahead = 0;
        __syncwarp();
      } else {
        const int marker = thread - 64;
        const bool has_k = place.head >= 0;
        const int layer = has_k ? head_of(place.head, p.heads).layer : place.v / 4 / p.heads;
        if (has_k) {
          for (int i = marker; i < kHeadDim; i += F::kMarkers)
            tail.norm[i] = value_at(p.norm.data, p.norm.dtype, (p.first_layer + layer) * p.norm_layer + i * p.norm.stride);
          if (marker == 0) tail.eps = static_cast<const float*>(p.eps.data)[(p.first_layer + layer) * p.eps.stride];
        }
        const auto meet = [&] {
          ptx::barrier_arrive(&tail.marked);
          ptx::barrier_wait(&tail.marked, marks);
          marks ^= 1;
        };
        if (lies) {
          mark_tile<kRows, F::kBuckets, kRows / F::kMarkers>(
              [&](int i) {
                const std::int64_t at = p.rows.first + i;
                return p.rows.slots.data ? index_at(p.rows.slots, at, p.rows.width) : at;
              },
              [&](int i, bool raise) { return read_row(p.rows, i, raise); }, count, s.row, s.from, tail.slot, tail.position, tail.bucket,
              marker, F::kMarkers, meet);
        } else {
          for (int r = marker; r < kRows; r += F::kMarkers) {
            Row row{-1, 0, 0};
            if (s.row + r >= s.from && s.row + r < count) row = lined_row(shape.list, s.row + r);
            tail.slot[r] = row.slot, tail.position[r] = row.position;
          }
          meet();
          meet();
        }
        for (int i = marker; i < kRows; i += F::kMarkers) {  // row i of those that this block finishes
          const int r = s.splits ? i % (kRows / 2) / 8 * 16 + 8 * rank + i % 8 : i;
          tail.to[i] = s.row + r < s.rows ? tail.slot[r] : -1, tail.by[i] = tail.position[r];
        }
        if (p.bias.data)
          for (int i = marker; i < F::kWide; i += F::kMarkers) {
            const bool of_k = has_k && i < 128;
            const int quarter = place.v + i / 32 - (has_k ? 4 : 0);
            const Head h = of_k ? head_of(place.head, p.heads) : Head{quarter / 4 / p.heads, quarter / 4 % p.heads, true};
            if (of_k || quarter < place.v + place.count)
              tail.bias[i] =
                  value_at(p.bias.data, p.bias.dtype,
                           (p.first_layer + h.layer) * p.bias_layer +
                               (((h.is_v ? p.heads : 0) + h.index) * kHeadDim + (of_k ? i : quarter % 4 * 32 + i % 32)) * p.bias.stride);
            else
              tail.bias[i] = 0;
          }
        ptx::barrier_arrive(&tail.placed);
        ptx::barrier_wait(&tail.placed, pass);
        // Angles, arguments and pages on their way.
        const float* const angles = p.table + (p.first_layer + layer) * p.table_layer;
        const int finished = s.splits ? kRows / 2 : kRows;
        for (int i = marker; i < finished; i += F::kMarkers) {
          const std::int64_t slot = tail.to[i];
          if (slot < 0) continue;
          if (has_k)
            for (int column = 0; column < p.rotary_dim; column += 32) prefetch_l2(angles + tail.by[i] * p.table_row + column);
          for (int v = has_k ? 0 : 1; v < 2; ++v) {
            const LayerPool& pool = p.target[v][layer].pool;
            const DType dtype = v ? p.v_dtype : p.k_dtype;
            const int bytes = dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
            prefetch_l2(static_cast<const unsigned char*>(pool.data) + pool_offset(pool, slot, 0) * bytes);
          }
        }
        __syncwarp();
      }
      if (s.splits) ptx::cluster_arrive(), ptx::cluster_wait();
      ptx::barrier_wait(&tail.placed, pass);
      ptx::barrier_wait(&tail.left, pass);
      trace(kLeft, thread == 64);
      finish_v(warp, place.head >= 0 ? 4 : 12, lane);
      __syncwarp();
      pass ^= 1;
    } while (next_item());
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F::kRegisters));
    const int side = group - 1, unit = 4 * side + warp;
    const std::uint32_t ring = ptx::shared(memory), full = ptx::shared(tail.full), empty = ptx::shared(tail.empty);
    int stage = 0;
    std::uint32_t parity = 0, pass = 0;
    do {
      float d[kSums], sum[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) asm volatile("" : "=f"(d[j]), "=f"(sum[j]));  // or they are taken for alive from the item before
      // [of block 0's sum, block 1's runs, the runs but the first and last that it keeps for itself]
      const auto part = [&](int i) {
        std::uint32_t thread_here,
            block_here;  // asked for again, so that nothing that follows from it is kept in registers while the products run
        asm volatile("mov.u32 %0, %%tid.x;\nmov.u32 %1, %%ctaid.x;" : "=r"(thread_here), "=r"(block_here));
        return reinterpret_cast<float2*>(shape.parts) +
               (block_here / 2 * (shape.runs.count - 1) + i) * static_cast<std::uint32_t>(kPairPart / 8) + thread_here - 128;
      };
      const auto multiply = [&](float(&x)[kSums], bool add) {  // by the stage that is next
        const std::uint32_t m = ring + stage * F::kStage;
        ptx::barrier_wait_at(full + 8 * stage, parity);
        const std::uint64_t a = tile_descriptor_at(m + side * static_cast<std::uint32_t>(kRowTileBytes)),
                            b = tile_descriptor_at(m + F::kRowBytes);
        product_fence();
#pragma unroll
        for (int t = 0; t < kDepth / 16; ++t) product_of<Io, F::kWide>(x, a + 2 * t, b + 2 * t, add || t > 0);
        product_commit();
        if (++stage == kStages) stage = 0, parity ^= 1;
      };
      const auto release = [&](int newer) {  // the stage before so many newer ones
        const int at = stage - 1 - newer;
        if (lane == 0) ptx::barrier_arrive_at(empty + 8 * (at < 0 ? at + kStages : at));
      };
      const auto sum_run = [&](float(&x)[kSums], int run) {
        multiply(x, false);
#pragma unroll 1
        for (int k = shape.runs.begin(run) + 1, end = shape.runs.begin(run + 1); k < end; ++k) {
          multiply(x, true);
          product_wait_all_but_one(), release(1);
        }
        product_wait_for(x), release(0);
      };
      sum_run(sum, s.begin);  // the first one where the sums are
      if (s.begin > 0) store_half<0>(part(1), sum);
#pragma unroll 1
      for (int run = s.begin + 1; run < s.end; ++run) {
        sum_run(d, run);
        if (s.begin == 0) {
          add(sum, d);
        } else {
          store_half<0>(part(1 + run - half_runs), d);
          if (run + 1 < all_runs) store_half<1>(part(run), d);
        }
      }
      __syncwarp();
      trace(kLastStage, thread == 128);
      int lane_here;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      float mine[kHalf];
      if (s.splits) {
        float other[kHalf];
        if (rank == 0) {
          store_half<1>(part(0), sum);
          take_half<0>(mine, sum);
          ptx::cluster_arrive(), ptx::cluster_wait();  // the other block is done with its products, and this one with the ring
#pragma unroll 1
          for (int run = 0; run < half_runs; run += 2) {
            float next[kHalf];
            load_half(other, part(1 + run)), load_half(next, part(2 + run));
            add(mine, other), add(mine, next);
          }
        } else {
          float own[kHalf];
          ptx::cluster_arrive(), ptx::cluster_wait();
          load_half(mine, part(0));
          take_half<1>(own, sum), add(mine, own);
#pragma unroll 1
          for (int run = half_runs + 1; run + 1 < all_runs; ++run) {
            load_half(other, part(run));
            add(mine, other);
          }
          take_half<1>(own, d), add(mine, own);
        }
#pragma unroll
        for (int j = 0; j < kSums; ++j) asm volatile("" : "=f"(sum[j]));  // not alive here
      } else {
        take_half<0>(mine, sum);
        ptx::barrier_arrive(&tail.done);
        ptx::barrier_wait(&tail.done, pass);  // (such items come first)
      }
      trace(kSummed, thread == 128);
      ptx::barrier_wait(&tail.placed, pass);
      const int each = s.splits ? 8 : 16, first = each * unit;  // rows of those that this block finishes
#pragma unroll 1
      for (int row = first;; row += 8) {
        if (p.bias.data) {
#pragma unroll
          for (int j = 0; j < kHalf; j += 2) {
            const float2 x = *reinterpret_cast<const float2*>(tail.bias + 4 * j + lane_here % 4 * 2);
            mine[j] += x.x, mine[j + 1] += x.y;
          }
        }
        const std::uint32_t to = ring + (row + lane_here % 8) * kStride + lane_here / 8 * 16;
#pragma unroll
        for (int j = 0; j < kHalf; j += 8)
          store_matrices(to + j * 8, io_pair<Io>(mine[j], mine[j + 1]), io_pair<Io>(mine[j + 2], mine[j + 3]),
                         io_pair<Io>(mine[j + 4], mine[j + 5]), io_pair<Io>(mine[j + 6], mine[j + 7]));
        if (row + 8 == first + each) break;
        take_half<1>(mine, sum);
      }
      __syncwarp();
      ptx::barrier_arrive(&tail.left);
      if (s.place.head >= 0) {
        const Head head = head_of(s.place.head, p.heads);
        if (has_usual_k<Io>(p)) {
          finish_usual_k<Io, kStride>(p, head, memory, tail.to, tail.by, first, first + each, 4, lane_here, [](int) {});
        } else {
#pragma unroll 1
          for (int row = first; row < first + each; row += 4)
            finish_eight<Io, kHeadDim, kStride, 1>(p, head, memory + row * kStride, tail.to + row, tail.by + row, tail.norm, tail.eps,
                                                   lane_here);
        }
      } else {
        ptx::barrier_wait(&tail.left, pass);
        finish_v(4 + unit, 12, lane_here);
      }
      __syncwarp();
      trace(kFinished, thread == 128);
      pass ^= 1;
    } while (next_item());
  }
}

}  // namespace specstate::draft_kv::cuda
