#pragma once
// Up to 64 rows: the weights are read once, and everything else hides behind that.
//
// What bounds it: 84 MB of weights for 5 layers of 2 x 8 heads of 128 channels over 4096 features, 20 us of the memory's time. So every multiprocessor must read, all the
// time, and equally much: a block that has a neighbour in its pair of multiprocessors gets less than one that has none.
// A cluster of two blocks owns 160 columns (an H200 holds 66 clusters of two, all of its multiprocessors): block r of it sums the runs of half r of the features
// (problem.hpp). What comes then is shared, too: of every 16 rows block 0 finishes the first 8, block 1 the others. Each sends the other what it has of its rows: block 1 every
// run as it is complete, block 0 the sum of its runs, so both add all runs in rising order (features: both their sums). A head of K is whole, for its norm, and stands first; what is left are quarters of
// heads of V.
//   warp 7        asks for stages of 64 features: weights, and the rows, as they lie, before anybody knows which of them are written;
//   warp 4        finds that out meanwhile;
//   warps 0 - 3   multiply, 16 rows each, and leave the rounded sums of 8 in shared memory;
//   all           finish those, a warp four rows at once.
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/finish_rows.cuh"

namespace specstate::draft_kv::cuda {

struct FewShape {
  int places;  // of columns: cluster c does c, c + clusters, ..
  Runs runs;
  Places deal{};       // heads of 128
  int stages = 0;      // of the ring; 0: as many as there is room for
  int prefetched = 4;  // stages whose weights go to L2 before the kernel before this one is done
  // Few::shape fills these in: what the first loads need lies side by side.
  int box = 0;  // rows of a stage: those of the launch, a multiple of 8; rows beyond the launch's are nobody's and not loaded
  int tokens = 0, first_row = 0, first_weight = 0, heads = 0;
  // Of features: the weights that are wanted next, 128 rows a tile, go to L2 when all of this launch's are asked for: so many stages of either half of their features.
  int next_tiles = 0, next_row = 0, next_half = 0, next_stages = 0;
};

/// kFeatures: of target features (few_features.cuh).
template <int kHeadDim, bool kFeatures = false>
struct Few {
  static constexpr int kRows = 64, kMine = kRows / 2;  // rows, and those that a block finishes
  static constexpr int kThreads = 256;
  static constexpr int kWide = kHeadDim ? 128 : 64, kNarrow = kHeadDim == 128 ? 32 : 0;  // columns of a place: two products
  static constexpr int kSums = (kWide + kNarrow) / 2;  // registers of a thread: half of them of rows of either block
  static constexpr int kHalf = kSums / 2;
  static constexpr int kRuns = kHeadDim ? 2 : 4;              // of a block
  static constexpr bool kInHalves = kHeadDim == 0;            // problem.hpp: each block adds up its runs
  static constexpr int kSent = kInHalves ? 1 : kRuns;         // parts that block 1 sends
  static constexpr int kStride = (kWide + kNarrow) * 2 + 16;  // bytes of a row of rounded sums (finish_rows.cuh)
  static constexpr int kUnit = kSent * 32 * kHalf * 4;        // bytes that a warp receives; its 8 rounded rows take their place
  static constexpr std::size_t kWeightBytes = std::size_t{kWide + kNarrow} * kDepth * 2;
  static constexpr int kStages = kHeadDim ? 6 : 20;  // more of them do not read faster
  static_assert(8 * kStride <= kUnit / kSent);

  struct Tail {
    std::int64_t slot[kMine];
    Row list[kRows];
    int position[kMine], bucket[2 * kRows];
    std::uint64_t full[kStages], empty[kStages], landed[kStages], planned, factors, sums, taken, left;
    float factor[kRows];
    alignas(16) float norm[kFeatures && kHeadDim ? 32 * kDepth : 1];  // the hidden norm's weights
    int warp_count[1];
  };
  SPECSTATE_HD static constexpr std::size_t sum_bytes(int rows) { return static_cast<std::size_t>((rows + 15) / 16) * kUnit; }
  SPECSTATE_HD static constexpr std::size_t stage_bytes(int box) { return kWeightBytes + static_cast<std::size_t>(box) * kDepth * 2; }
  SPECSTATE_HD static constexpr std::size_t shared_bytes(int stages, int box) {
    return 1024 + stages * stage_bytes(box) + sum_bytes(box) + sizeof(Tail);
  }
  static constexpr FewShape shape(FewShape s, const Problem& p, bool raw, std::size_t most) {
    s.tokens = p.rows.tokens, s.box = (s.tokens + 7) / 8 * 8, s.first_row = raw ? 0 : static_cast<int>(p.rows.first);
    s.first_weight = p.first_layer * 2 * p.heads * kHeadDim, s.heads = p.heads;
    if (s.stages == 0) s.stages = kStages;
    while (shared_bytes(s.stages, s.box) > most) --s.stages;
    return s;  // at least 3 stages of a projection (norm_stages_of)
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

/// Which of the launch's rows block `rank` finishes are written, and where: by one warp.
template <int kHeadDim, class Tail>
__device__ __forceinline__ void plan_half(const Problem& p, Tail& tail, int rank, bool raise, int number, int lane) {
  using F = Few<kHeadDim>;
  for (int i = lane; i < F::kMine; i += 32) tail.slot[i] = -1, tail.position[i] = 0;
  const int count =
      plan_rows<32, F::kRows / 32, 2 * F::kRows>(p.rows, tail.list, tail.bucket, tail.warp_count, raise, lane, [] { __syncwarp(); });
  const Head head = head_of(max(number, 0), p.heads);
  for (int i = lane; i < count; i += 32) {
    const Row row = tail.list[i];
    if (row.row / 8 % 2 != rank) continue;
    const int at = row.row / 16 * 8 + row.row % 8;
    tail.slot[at] = row.slot, tail.position[at] = row.position;
  }
  if (number < 0 || 32 * lane >= kHeadDim) return;
  const auto on_its_way = [&](const Values& v, std::int64_t at) {
    prefetch_l2(static_cast<const unsigned char*>(v.data) + (at + 32 * lane * v.stride) * size_of_value(v.dtype));
  };
  const int layer = p.first_layer + head.layer;
  if (p.bias.data) on_its_way(p.bias, layer * p.bias_layer + ((head.is_v ? p.heads : 0) + head.index) * kHeadDim * p.bias.stride);
}

/// The bias of kWords * 8 columns from `column` of a layer on.
template <int kWords>
__device__ __forceinline__ void add_bias_of_8(const Problem& p, int layer, int column, int q, float* d) {
#pragma unroll
  for (int j = 0; j < kWords; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      d[2 * j + e] +=
          value_at(p.bias.data, p.bias.dtype, (p.first_layer + layer) * p.bias_layer + (column + 8 * j + 2 * q + e) * p.bias.stride);
}

template <class Io, int kHeadDim>
__global__ void __launch_bounds__(Few<kHeadDim>::kThreads, 1)
    few_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quarters,
             const __grid_constant__ CUtensorMap rows, const __grid_constant__ FewShape shape, const __grid_constant__ Problem p) {
  using F = Few<kHeadDim>;
  constexpr int kSums = F::kSums, kHalf = F::kHalf, kRuns = F::kRuns, kStride = F::kStride, kUnit = F::kUnit, kQuarters = 5;
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 128) prefetch_map(weights);
  if (thread == 160 && kHeadDim > 0) prefetch_map(quarters);
  if (thread == 192) prefetch_map(rows);
  trace(kEntry, thread == 224);
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, rank = static_cast<int>(ptx::cluster_rank());
  const Places& deal = shape.deal;
  const int first_run = rank * kRuns, k_begin = shape.runs.begin(first_run);
  // The first stages' weights on their way to L2 before anything else, also before the kernel before this one is done: every instruction in front of it is one that the memory
  // waits for.
  if (thread == 224 && cluster < shape.places) {
    int wide;
    if constexpr (kHeadDim != 128) {
      wide = shape.first_weight + cluster * F::kWide;
    } else {
      const bool k = cluster < deal.k_heads;
      const int n = k ? 4 * cluster : deal.v_begin(cluster), layer_width = 4 * shape.heads;
      wide = shape.first_weight + 32 * (n + (k ? deal.by_heads(cluster) : deal.by_quarters(n) + 1) * layer_width);
    }
#pragma unroll 1
    for (int k = 0; k < shape.prefetched; ++k) tile_prefetch(weights, (k_begin + k) * kDepth, wide);
  }
  trace(kPrefetched, thread == 224);
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const auto tile_bytes = static_cast<std::uint32_t>(shape.box * kDepth * 2),
             stage_bytes = tile_bytes + static_cast<std::uint32_t>(F::kWeightBytes);
  const int stages = shape.stages;
  unsigned char* const units = memory + stages * stage_bytes;
  auto& tail = *reinterpret_cast<typename F::Tail*>(units + F::sum_bytes(shape.box));
  const int tokens = shape.tokens;
  const int depth = shape.runs.begin(first_run + kRuns) - k_begin;

  // A place's rows of weights: of the first product, or quarter by quarter where they do not lie side by side.
  struct Columns {
    int wide;                // -1: quarter by quarter
    int quarter[kQuarters];  // -1: none
    int boxes;
    __device__ __forceinline__ void load(unsigned char* to, const CUtensorMap& weights, const CUtensorMap& quarters, int feature,
                                         std::uint64_t* full, std::uint64_t policy) const {
      if (wide >= 0) tile_load(to, weights, feature, wide, full, policy);
#pragma unroll
      for (int i = 0; i < kQuarters; ++i)
        if (quarter[i] >= 0 && (i == 4 || wide < 0)) tile_load(to + i * 32 * kDepth * 2, quarters, feature, quarter[i], full, policy);
    }
  };
  const auto columns_of = [&](int place) {
    Columns c{};
    if constexpr (kHeadDim == 64) {
      c.wide = shape.first_weight + place * 128, c.boxes = 4, c.quarter[4] = -1;
    } else {
      const int v = deal.v_begin(place), count = deal.v_count(place), k = place < deal.k_heads ? 4 : 0, layer_width = 4 * shape.heads;
      const int layer = deal.by_quarters(v);
      c.boxes = k + count;
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {  // quarters of V lie one behind the other but where K of the next layer comes between
        const int n = v + i - k, above = n >= (layer + 1) * layer_width;
        c.quarter[i] = i < c.boxes ? shape.first_weight + 32 * (n + (layer + above + 1) * layer_width) : -1;
      }
      if (k) {
        const int first = shape.first_weight + 32 * (4 * place + deal.by_heads(place) * layer_width);
#pragma unroll
        for (int i = 0; i < 4; ++i) c.quarter[i] = first + 32 * i;
      }
      c.wide = c.boxes >= 4 && c.quarter[3] == c.quarter[0] + 96 ? c.quarter[0] : -1;
    }
    return c;
  };

  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  const int ahead = min(stages, depth);
  const int warps_with_rows = (tokens - 8 * rank + 15) / 16;  // of this block's half
  static_assert(F::kStages <= 32);
  if (thread >= 224) {
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < F::kStages; ++k)
        if (k < stages) ptx::barrier_init(&tail.full[k], 1);
      ptx::fence_barriers();
    }
    if (lane == 0 && cluster < shape.places) {
      const Columns c = columns_of(cluster);
      const std::uint32_t bytes = tokens * (kDepth * 2) + c.boxes * (32 * kDepth * 2);
      trace(kBarriers, true);
      ptx::wait_for_previous();
#pragma unroll 1
      for (int k = 0; k < ahead; ++k) {
        unsigned char* const to = memory + k * stage_bytes;
        ptx::barrier_expect(&tail.full[k], bytes);
        c.load(to + tile_bytes, weights, quarters, (k_begin + k) * kDepth, &tail.full[k], once);
        tile_load(to, rows, (k_begin + k) * kDepth, shape.first_row, &tail.full[k], keep);
      }
      trace(kStart, true);
    }
    __syncwarp();
  } else if (thread < 32) {
    if (lane == 0) {
      for (int k = 0; k < stages; ++k) {
        ptx::barrier_init(&tail.empty[k], 4);
      }
      ptx::barrier_init(&tail.planned, 32), ptx::barrier_init(&tail.sums, 1), ptx::barrier_init(&tail.taken, 7),
          ptx::barrier_init(&tail.left, max(warps_with_rows, 1));
      ptx::fence_barriers();
    }
  }
  __syncthreads();
  ptx::wait_for_previous();
  ptx::let_next_start();
  ptx::cluster_arrive_relaxed();

  if (thread >= 224) {
    if (lane == 0) {
      int stage = 0, first = ahead;
      std::uint32_t parity = 1;
      for (int place = cluster; place < shape.places; place += clusters, first = 0) {
        const Columns c = columns_of(place);
        const std::uint32_t bytes = tokens * (kDepth * 2) + c.boxes * (32 * kDepth * 2);
        if (first > 0 && (stage = first) == stages) stage = 0, parity = 0;
#pragma unroll 1
        for (int k = first; k < depth; ++k) {
          unsigned char* const to = memory + stage * stage_bytes;
          ptx::barrier_wait(&tail.empty[stage], parity);
          ptx::barrier_expect(&tail.full[stage], bytes);
          c.load(to + tile_bytes, weights, quarters, (k_begin + k) * kDepth, &tail.full[stage], once);
          tile_load(to, rows, (k_begin + k) * kDepth, shape.first_row, &tail.full[stage], keep);
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      }
      trace(kAsked, true);
    }
    __syncwarp();
    ptx::cluster_wait();
  }
  const bool multiplies = thread < 128;
  const int warp = thread / 32 % 4;  // of those who multiply, or of the others
  // Of all who finish: those who multiply come last, and who asks for stages has time for it where there is one place.
  const int worker = multiplies ? 3 + warp : thread < 224 ? warp : 7, workers = shape.places <= clusters ? 8 : 7;
  const bool has_rows = multiplies && warp < warps_with_rows;            // to finish, in this block
  const bool sends = multiplies && 16 * warp + 8 * (1 - rank) < tokens;  // the other block has some of this warp
  const bool receives = warps_with_rows > 0;
  if (!multiplies && worker < 7) {
    if (warp == 0) {
      const int first_head = kHeadDim == 64 ? 2 * cluster : cluster < deal.k_heads ? cluster + cluster / p.heads * p.heads : -1;
      plan_half<kHeadDim>(p, tail, rank, cluster == 0 && rank == 0, first_head, lane);
      ptx::barrier_arrive(&tail.planned);
    }
    ptx::cluster_wait();
  }
  if (worker >= workers) return;

  int stage = 0, before = 0, pass = 0;
  std::uint32_t parity = 0;
  for (int place = cluster; place < shape.places; place += clusters, ++pass) {
    float d[kSums], sum[kSums];  // block 0: the sum of its runs; block 1: its own rows' runs, one behind the other
    if (multiplies) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) d[j] = 0;
#pragma unroll
      for (int j = 0; j < kSums; ++j) sum[j] = 0;
      if (receives && thread == 0)
        ptx::barrier_expect(&tail.sums, static_cast<std::uint32_t>(warps_with_rows * (kUnit / kRuns) * (rank == 0 ? kRuns : 1)));
      const auto reach = [&](int run) {  // before anything is sent
        if (pass == 0 && run == 0)
          ptx::cluster_wait();
        else if (pass > 0 && run == 0 && tokens > 8 * (1 - rank))
          barrier_wait_cluster(&tail.taken, (pass - 1) & 1);
      };
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const int n = shape.runs.begin(first_run + run + 1) - shape.runs.begin(first_run + run);
#pragma unroll 1
        for (int k = 0; k < n; ++k) {
          const unsigned char* const m = memory + stage * stage_bytes;
          ptx::barrier_wait(&tail.full[stage], parity);
          if (run == 0 && k == 0) trace(kFirstStage, thread == 0);
          const std::uint64_t a = tile_descriptor(m), b = tile_descriptor(m + tile_bytes),
                              b2 = tile_descriptor(m + tile_bytes + F::kWide * kDepth * 2);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) {
            product<Io>(*reinterpret_cast<float(*)[64]>(d), a + 2 * s, b + 2 * s, k > 0 || s > 0);
            if constexpr (kHeadDim == 128) product_of<Io, 32>(d + 64, a + 2 * s, b2 + 2 * s, k > 0 || s > 0);
          }
          product_commit();
          if (k > 0) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == stages) stage = 0, parity ^= 1;
        }
        if (run == kRuns - 1) trace(kLastStage, thread == 0);
        product_wait_for(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        __syncwarp();
        reach(run);
        // The other block's rows, a run as it is complete or the sum of all; a unit has 32 lanes x kHalf floats of every run.
        const std::uint32_t barrier = address_in_block(&tail.sums, 1 - rank),
                            to = address_in_block(units + warp * kUnit + (rank == 0 ? 0 : run) * (kUnit / kRuns) + lane * 16, 1 - rank);
        if (rank == 0) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) sum[j] += d[j];
          if (sends && run == kRuns - 1)
#pragma unroll
            for (int j = 0; j < kSums; j += 8) send(to + j / 8 * 512, sum[j + 2], sum[j + 3], sum[j + 6], sum[j + 7], barrier);
        } else {
          if (sends)
#pragma unroll
            for (int j = 0; j < kSums; j += 8) send(to + j / 8 * 512, d[j], d[j + 1], d[j + 4], d[j + 5], barrier);
          if (run < kRuns - 1)
#pragma unroll
            for (int j = 0; j < kHalf; ++j) sum[run * kHalf + j] = d[j / 2 * 4 + 2 + j % 2];
        }
      }
      trace(kSummed, thread == 0);
    }
    if (!receives) continue;
    int lane_here;  // asked for again, here, so that nothing that follows from it is kept in registers while the products run
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
    const auto receive = [&](float(&mine)[kHalf]) {
      barrier_wait_cluster(&tail.sums, pass & 1);
      trace(kPlanThere, thread == 0);
      const auto* const from = reinterpret_cast<const float4*>(units + warp * kUnit) + lane_here;
#pragma unroll
      for (int j = 0; j < kHalf; j += 4) {
        if (rank == 0) {
#pragma unroll
          for (int e = 0; e < 4; ++e) mine[j + e] = sum[(j + e) / 2 * 4 + (j + e) % 2];
#pragma unroll
          for (int run = 0; run < kRuns; ++run) {
            const float4 y = from[(run * (kHalf / 4) + j / 4) * 32];
            mine[j] += y.x, mine[j + 1] += y.y, mine[j + 2] += y.z, mine[j + 3] += y.w;
          }
        } else {
          const float4 y = from[j / 4 * 32];
          mine[j] = y.x, mine[j + 1] = y.y, mine[j + 2] = y.z, mine[j + 3] = y.w;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int run = 0; run < kRuns - 1; ++run) mine[j + e] += sum[run * kHalf + j + e];
            mine[j + e] += d[(j + e) / 2 * 4 + 2 + (j + e) % 2];
          }
        }
      }
    };
    const auto leave = [&](const float(&mine)[kHalf]) {
      __syncwarp();
      const std::uint32_t to = ptx::shared(units + warp * kUnit) + lane_here % 8 * kStride + lane_here / 8 * 16;
#pragma unroll
      for (int j = 0; j < kHalf; j += 8)
        store_matrices(to + j * 8, io_pair<Io>(mine[j], mine[j + 1]), io_pair<Io>(mine[j + 2], mine[j + 3]),
                       io_pair<Io>(mine[j + 4], mine[j + 5]), io_pair<Io>(mine[j + 6], mine[j + 7]));
      __syncwarp();
    };
    const int v = deal.v_begin(place), count = deal.v_count(place);
    const bool has_k = kHeadDim == 64 || place < deal.k_heads;
    const int head = kHeadDim == 64 ? 2 * place : place + deal.by_heads(place) * p.heads;
    const auto ready = [&] {
      if (has_rows) {
        float mine[kHalf];
        receive(mine);
        if (p.bias.data) {
          constexpr int kQuarter = kHeadDim / 32;  // columns of V come in pieces of 32
#pragma unroll
          for (int j = 0; j < kHalf / 8; ++j) {
            const bool of_k = has_k && j < 4;
            const int quarter = of_k ? 0 : v + j - (has_k ? 4 : 0);
            const Head h = of_k ? head_of(head + j / kQuarter, p.heads) : Head{quarter / 4 / p.heads, quarter / 4 % p.heads, true};
            if (of_k || quarter < v + count)
              add_bias_of_8<4>(p, h.layer, ((h.is_v ? p.heads : 0) + h.index) * kHeadDim + 32 * (of_k ? j % kQuarter : quarter % 4),
                               lane_here % 4, mine + 8 * j);
          }
        }
        leave(mine);
        if (lane_here == 0) ptx::barrier_arrive(&tail.left);
      } else if (multiplies) {
        barrier_wait_cluster(&tail.sums, pass & 1);
      }
      ptx::barrier_wait(&tail.left, pass & 1);
      trace(kLeft, thread == 128);
    };
    const auto address = [&](int row, int byte) { return units + row / 8 * kUnit + row % 8 * kStride + byte; };
    ptx::barrier_wait(&tail.planned, 0);
    if (!has_k)
      ready();
    else
      finish_rows<Io, kHeadDim, 2>(
          p, [&](int row, int byte) { return *reinterpret_cast<const uint2*>(address(row, byte)); }, head, tail.slot, tail.position,
          4 * worker, 4 * workers, 8 * warps_with_rows, ready);
    if constexpr (kHeadDim == 128)
      finish_quarters<Io>(
          p, [&](int row, int byte) { return *reinterpret_cast<const uint4*>(address(row, (has_k ? 256 : 0) + byte)); }, v, count,
          tail.slot, 8 * warps_with_rows, worker, workers);
    __syncwarp();
    if (place + clusters < shape.places && lane == 0) arrive_in_block(address_in_block(&tail.taken, 1 - rank));
    trace(kFinished, thread == 128);
  }
}

}  // namespace specstate::draft_kv::cuda
