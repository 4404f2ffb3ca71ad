#pragma once
// Up to 64 rows (128 in two groups): the weights are read once, and everything else hides behind that.
//
// What bounds it: 84 MB of weights for 5 layers of 2 x 8 heads of 128 channels over 4096 features, 20 us of the memory's time. So every multiprocessor must read, all the
// time, and equally much: a block that has a neighbour in its pair of multiprocessors gets less than one that has none.
// A cluster of two blocks owns 160 columns (an H200 holds 66 clusters of two, all of its multiprocessors): block r of it sums the runs of half r of the features
// (problem.hpp). Then block 0 sends the sum of its runs to block 1, which adds its own in rising order, and finishes the rows. A head of K is whole, for its norm, and
// stands first; what is left are quarters of heads of V.
//   thread 0      asks for stages of 64 features: weights, and the rows, as they lie, before anybody knows which of them are written;
//   warp 1        of block 1 finds that out meanwhile, and sends what the epilogue wants on its way to L2;
//   warps 1 - 3   norm the rows of a stage of target features where they lie, between their arrival and the products;
//   4 or 8 warps  multiply, 64 rows a group of four, leave the rounded sums in shared memory, and finish them, four rows a warp at a time.
// kHeadDim 0 makes features, 64 columns a cluster: the rounded result, and its squares for the norm.
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/finish_rows.cuh"

namespace specstate::draft_kv::cuda {

struct FewShape {
  int places;  // of columns: cluster c does c, c + clusters, ..
  Runs runs;
  Places deal{};       // heads of 128
  int box = 0;         // rows of a stage: those of the launch, a multiple of 8
  int stages = 0;      // of the ring; 0: as many as there is room for
  int prefetched = 4;  // stages whose weights go to L2 before the kernel before this one is done
};

template <int kHeadDim, int kGroups>
struct Few {
  static constexpr int kThreads = 128 * (kGroups + 1), kRows = 64 * kGroups;
  static constexpr int kWide = kHeadDim ? 128 : 64, kNarrow = kHeadDim == 128 ? 32 : 0;  // columns of a place: two products
  static constexpr int kSums = (kWide + kNarrow) / 2;                                    // registers of a thread
  static constexpr int kRuns = kHeadDim ? 2 : 4;                                         // of a block
  static constexpr int kKept = kRuns - 2;                                                // of its runs, that the second block keeps apart
  static constexpr int kStride = (kWide + kNarrow) * 2 + 16;                             // bytes of a row of rounded sums (finish_rows.cuh)
  static constexpr std::size_t kWeightBytes = std::size_t{kWide + kNarrow} * kDepth * 2;
  static constexpr int kStages = kHeadDim ? 6 : 20;  // more of them do not read faster

  struct Tail {
    std::int64_t slot[kRows];
    Row list[kRows];
    int position[kRows], bucket[2 * kRows];
    std::uint64_t full[kStages], empty[kStages], landed[kStages], planned, sums, taken, left;
    float factor[kRows];
    int warp_count[1];
  };
  /// What block 0 sends: of every warp that has rows, its sums.
  SPECSTATE_HD static constexpr std::size_t sum_bytes(int rows) { return static_cast<std::size_t>((rows + 15) / 16) * 32 * kSums * 4; }
  SPECSTATE_HD static constexpr std::size_t stage_bytes(int box) { return kWeightBytes + static_cast<std::size_t>(box) * kDepth * 2; }
  SPECSTATE_HD static constexpr std::size_t shared_bytes(int stages, int box) {
    return 1024 + stages * stage_bytes(box) + sum_bytes(box) + sizeof(Tail);
  }
  static constexpr FewShape shape(FewShape s, int tokens, std::size_t most) {
    s.box = (tokens + 7) / 8 * 8;
    if (s.stages == 0) s.stages = kStages;
    while (shared_bytes(s.stages, s.box) > most) --s.stages;
    return s;
  }
};

/// 16 bytes into another block's shared memory, counted by a barrier of that block.
__device__ __forceinline__ void send(std::uint32_t to, float a, float b, float c, float d, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b),
               "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void arrive_in_block(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// barrier_wait for what another block of the cluster has done.
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
/// A box on its way to L2: harmless before earlier work of the stream is done.
__device__ __forceinline__ void tile_prefetch(const CUtensorMap& map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(c0), "r"(c1) : "memory");
}

template <class Io, int kHeadDim, int kGroups>
__global__ void __launch_bounds__(Few<kHeadDim, kGroups>::kThreads, 1)
    few_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quarters,
             const __grid_constant__ CUtensorMap rows, const __grid_constant__ Problem p, const __grid_constant__ FewShape shape,
             const __grid_constant__ Context context) {
  using F = Few<kHeadDim, kGroups>;
  constexpr int kSums = F::kSums, kRuns = F::kRuns, kStride = F::kStride, kQuarters = 5;
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const auto tile_bytes = static_cast<std::uint32_t>(shape.box * kDepth * 2),
             stage_bytes = tile_bytes + static_cast<std::uint32_t>(F::kWeightBytes);
  const int stages = shape.stages;
  auto* const received = reinterpret_cast<float4*>(memory + stages * stage_bytes);
  auto& tail = *reinterpret_cast<typename F::Tail*>(memory + stages * stage_bytes + F::sum_bytes(shape.box));
  const int thread = threadIdx.x, lane = thread % 32, cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  const int rank = static_cast<int>(ptx::cluster_rank()), tokens = p.rows.tokens;
  const bool raw = kHeadDim > 0 && context.raw;
  const Places& deal = shape.deal;
  const int first_run = rank * kRuns, k_begin = shape.runs.begin(first_run), depth = shape.runs.begin(first_run + kRuns) - k_begin;

  // A place's rows of weights: of the first product, or quarter by quarter where they do not lie side by side.
  struct Columns {
    int wide;                // -1: quarter by quarter
    int quarter[kQuarters];  // -1: none
    int boxes;
    __device__ __forceinline__ void load(unsigned char* to, const CUtensorMap& weights, const CUtensorMap& quarters, int feature,
                                         std::uint64_t* full, std::uint64_t policy) const {
      if (wide >= 0) tile_load(to, weights, feature, wide, full, policy);
      if constexpr (kHeadDim > 0)
#pragma unroll
        for (int i = 0; i < kQuarters; ++i)
          if (quarter[i] >= 0 && (i == 4 || wide < 0)) tile_load(to + i * 32 * kDepth * 2, quarters, feature, quarter[i], full, policy);
    }
  };
  const int first_weight = p.first_layer * 2 * p.heads * kHeadDim;
  const auto columns_of = [&](int place) {
    Columns c{};
    if constexpr (kHeadDim == 0) {
      c.wide = place * F::kWide, c.boxes = 2;
    } else if constexpr (kHeadDim == 64) {
      c.wide = first_weight + place * 128, c.boxes = 4, c.quarter[4] = -1;
    } else {
      const int v = deal.v_begin(place), count = deal.v_count(place), k = place < deal.k_heads ? 4 : 0, layer_width = 4 * p.heads;
      const int layer = deal.by_quarters(v);
      c.boxes = k + count;
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {  // quarters of V lie one behind the other but where K of the next layer comes between
        const int n = v + i - k, above = n >= (layer + 1) * layer_width;
        c.quarter[i] = i < c.boxes ? first_weight + 32 * (n + (layer + above + 1) * layer_width) : -1;
      }
      if (k) {
        const int first = first_weight + 32 * (4 * place + deal.by_heads(place) * layer_width);
#pragma unroll
        for (int i = 0; i < 4; ++i) c.quarter[i] = first + 32 * i;
      }
      c.wide = c.boxes >= 4 && c.quarter[3] == c.quarter[0] + 96 ? c.quarter[0] : -1;
    }
    return c;
  };

  // The first loads before anything else: every instruction in front of them is one that the memory waits for.
  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  const int row_begin = raw ? 0 : static_cast<int>(p.rows.first), ahead = min(stages, depth);
  std::uint64_t* const arrived = raw ? tail.landed : tail.full;
  static_assert(F::kStages <= 32);
  if (thread < 32) {
    if (lane < stages) ptx::barrier_init(&arrived[lane], 1);
    ptx::fence_barriers();
  } else if (thread < 64) {
    if (lane < stages) ptx::barrier_init(&tail.empty[lane], 4 * kGroups);
    if (raw && lane < stages) ptx::barrier_init(&tail.full[lane], 3);
    if (lane == 0)
      ptx::barrier_init(&tail.planned, 32), ptx::barrier_init(&tail.sums, 1), ptx::barrier_init(&tail.taken, 4 * kGroups),
          ptx::barrier_init(&tail.left, (tokens + 15) / 16);
    ptx::fence_barriers();
  }
  __syncthreads();
  if (thread == 0) {
    if (cluster < shape.places) {
      const Columns c = columns_of(cluster);
      const std::uint32_t bytes = tile_bytes + c.boxes * (32 * kDepth * 2);
      // Weights of target features' projection were made before few_rows<0> began, and so before this kernel did. Others may be the work of the kernel that still runs:
      // they may come as far as L2.
      if (raw)
#pragma unroll 1
        for (int k = 0; k < ahead; ++k) {
          ptx::barrier_expect(&arrived[k], bytes);
          c.load(memory + k * stage_bytes + tile_bytes, weights, quarters, (k_begin + k) * kDepth, &arrived[k], once);
        }
      else if (c.wide >= 0)
#pragma unroll 1
        for (int k = 0; k < min(ahead, shape.prefetched); ++k) tile_prefetch(weights, (k_begin + k) * kDepth, c.wide);
      ptx::wait_for_previous();
#pragma unroll 1
      for (int k = 0; k < ahead; ++k) {
        unsigned char* const to = memory + k * stage_bytes;
        if (!raw) {
          ptx::barrier_expect(&arrived[k], bytes);
          c.load(to + tile_bytes, weights, quarters, (k_begin + k) * kDepth, &arrived[k], once);
        }
        tile_load(to, rows, (k_begin + k) * kDepth, row_begin, &arrived[k], keep);
      }
    }
  }
  ptx::wait_for_previous();
  ptx::let_next_start();
  ptx::cluster_arrive_relaxed();
  trace(kStart);

  if (thread < 128) {
    if constexpr (kGroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      int stage = 0, first = ahead;
      std::uint32_t parity = 1;
      for (int place = cluster; place < shape.places; place += clusters, first = 0) {
        const Columns c = columns_of(place);
        const std::uint32_t bytes = tile_bytes + c.boxes * (32 * kDepth * 2);
        if (first > 0 && (stage = first) == stages) stage = 0, parity = 0;
#pragma unroll 1
        for (int k = first; k < depth; ++k) {
          unsigned char* const to = memory + stage * stage_bytes;
          ptx::barrier_wait(&tail.empty[stage], parity);
          ptx::barrier_expect(&arrived[stage], bytes);
          c.load(to + tile_bytes, weights, quarters, (k_begin + k) * kDepth, &arrived[stage], once);
          tile_load(to, rows, (k_begin + k) * kDepth, row_begin, &arrived[stage], keep);
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      }
      trace(kAsked);
    } else if (kHeadDim > 0 && thread >= 32) {
      if constexpr (kHeadDim > 0) {
        if (rank == 1 && thread < 64) {
          const int first_head = kHeadDim == 64 ? 2 * cluster : cluster < deal.k_heads ? cluster + cluster / p.heads * p.heads : -1;
          plan_beside<kHeadDim, F::kRows>(p, tail, cluster == 0, first_head, lane);
          ptx::barrier_arrive(&tail.planned);
        }
        if (raw) {
          const int mine = (shape.places - cluster + clusters - 1) / clusters;
          norm_stages<Io, 3>(context, tail, memory, stages, stage_bytes, mine * depth, k_begin, depth, tokens, thread - 32);
        }
      }
    }
    ptx::cluster_wait();
  } else {
    if constexpr (kGroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int side = thread / 128 - 1, warp = thread / 32 - 4;  // of all that multiply
    const bool has_rows = 16 * warp < tokens;
    int stage = 0, before = 0, pass = 0;
    std::uint32_t parity = 0;
    for (int place = cluster; place < shape.places; place += clusters, ++pass) {
      float d[kSums], sum[kSums], kept[F::kKept + 1][kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) d[j] = sum[j] = 0;
      if (rank == 1 && thread == 128) ptx::barrier_expect(&tail.sums, static_cast<std::uint32_t>(F::sum_bytes(tokens)));
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const int n = shape.runs.begin(first_run + run + 1) - shape.runs.begin(first_run + run);
#pragma unroll 1
        for (int k = 0; k < n; ++k) {
          const unsigned char* const m = memory + stage * stage_bytes;
          ptx::barrier_wait(&tail.full[stage], parity);
          if (run == 0 && k == 0) trace(kFirstStage);
          const std::uint64_t a = tile_descriptor(m + side * kRowTileBytes), b = tile_descriptor(m + tile_bytes),
                              b2 = tile_descriptor(m + tile_bytes + F::kWide * kDepth * 2);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) {
            if constexpr (kHeadDim > 0) {
              product<Io>(*reinterpret_cast<float(*)[64]>(d), a + 2 * s, b + 2 * s, k > 0 || s > 0);
              if constexpr (kHeadDim == 128) product_of<Io, 32>(d + 64, a + 2 * s, b2 + 2 * s, k > 0 || s > 0);
            } else {
              product_of<Io, 64>(d, a + 2 * s, b + 2 * s, k > 0 || s > 0);
            }
          }
          product_commit();
          if (k > 0) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == stages) stage = 0, parity ^= 1;
        }
        if (run == kRuns - 1) trace(kLastStage);
        product_wait_for(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        // The second block keeps its runs apart: they are added to the sum of the first block's, which comes later.
        if (rank == 0 || run == 0) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) sum[j] += d[j];
        } else if (run < kRuns - 1) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) kept[run - 1][j] = d[j];
        }
      }
      __syncwarp();
      float4* const mine = received + warp * (kSums / 4) * 32 + lane;
      if (rank == 0) {
        if (pass == 0)
          ptx::cluster_wait();
        else
          barrier_wait_cluster(&tail.taken, (pass - 1) & 1);
        if (!has_rows) continue;
        const std::uint32_t to = address_in_block(mine, 1), barrier = address_in_block(&tail.sums, 1);
#pragma unroll
        for (int j = 0; j < kSums; j += 4) send(to + j / 4 * 512, sum[j], sum[j + 1], sum[j + 2], sum[j + 3], barrier);
        trace(kFinished);
        continue;
      }
      if (pass == 0) ptx::cluster_wait();
      trace(kSummed);
      int lane_here;  // asked for again, here, so that nothing that follows from it is kept in registers while the products run
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
      constexpr int kUnit = kSums * 128;  // bytes that a warp receives; its 16 rounded rows take their place
      const auto receive = [&] {
        barrier_wait_cluster(&tail.sums, pass & 1);
        trace(kPlanThere);
#pragma unroll
        for (int j = 0; j < kSums; j += 4) {
          const float4 x = mine[j / 4 * 32];
          const float first[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sum[j + e] = first[e] + sum[j + e];
#pragma unroll
            for (int run = 0; run < F::kKept; ++run) sum[j + e] += kept[run][j + e];
            sum[j + e] += d[j + e];
          }
        }
      };
      auto* const units = reinterpret_cast<unsigned char*>(received);
      const auto leave = [&] {
        __syncwarp();
        leave_words<Io, kStride, kSums / 4>(units + warp * kUnit, lane_here, sum);
        __syncwarp();
      };
      if constexpr (kHeadDim == 0) {
        if (has_rows) {
          receive(), leave();
          finish_feature_block<Io, kStride>(context, units + warp * kUnit, 16 * warp, min(16, tokens - 16 * warp), place);
        } else {
          barrier_wait_cluster(&tail.sums, pass & 1);
        }
      } else {
        const int v = deal.v_begin(place), count = deal.v_count(place);
        const bool has_k = kHeadDim == 64 || place < deal.k_heads;
        const int head = kHeadDim == 64 ? 2 * place : place + deal.by_heads(place) * p.heads;
        const auto ready = [&] {
          if (has_rows) {
            receive();
            if (p.bias.data) {
              constexpr int kQuarter = kHeadDim / 32;  // columns of V come in pieces of 32
#pragma unroll
              for (int j = 0; j < kSums / 16; ++j) {
                const bool of_k = has_k && j < 4;
                const int quarter = of_k ? 0 : v + j - (has_k ? 4 : 0);
                const Head h = of_k ? head_of(head + j / kQuarter, p.heads) : Head{quarter / 4 / p.heads, quarter / 4 % p.heads, true};
                if (of_k || quarter < v + count)
                  add_bias<4>(p, h.layer, ((h.is_v ? p.heads : 0) + h.index) * kHeadDim + 32 * (of_k ? j % kQuarter : quarter % 4),
                              lane_here % 4, sum + 16 * j);
              }
            }
            leave();
            if (lane_here == 0) ptx::barrier_arrive(&tail.left);
          }
          ptx::barrier_wait(&tail.left, pass & 1);
        };
        const auto address = [&](int row, int byte) { return units + row / 16 * kUnit + row % 16 * kStride + byte; };
        ptx::barrier_wait(&tail.planned, 0);
        if (!has_k)
          ready();
        else
          finish_rows<Io, kHeadDim, 2>(
              p, [&](int row, int byte) { return *reinterpret_cast<const uint2*>(address(row, byte)); }, head, tail.slot, tail.position,
              4 * warp, 16 * kGroups, tokens, ready);
        if constexpr (kHeadDim == 128)
          finish_quarters<Io>(
              p, [&](int row, int byte) { return *reinterpret_cast<const uint4*>(address(row, (has_k ? 256 : 0) + byte)); }, v, count,
              tail.slot, tokens, warp, 4 * kGroups);
      }
      __syncwarp();
      if (place + clusters < shape.places && lane == 0) arrive_in_block(address_in_block(&tail.taken, 0));
      trace(kFinished);
    }
  }
}

}  // namespace specstate::draft_kv::cuda
