#pragma once
// Up to 64 rows: the weights are read once, and everything else hides behind that.
//
// What bounds it: 84 MB of weights for 5 layers of 2 x 8 heads of 128 channels over 4096 features, 20 us of the memory's time. So every multiprocessor must read, all the
// time, and equally much: a block that has a neighbour in its pair of multiprocessors gets less than one that has none.
// A cluster of two blocks owns 128 to 192 columns (an H200 holds 66 clusters of two, all of its multiprocessors): block r of it sums the runs of half r of the features
// (problem.hpp). What comes then is shared, too: of every 16 rows block 0 finishes the first 8, block 1 the others. Each sends the other what it has of its rows: block 1 every
// run as it is complete, block 0 the sum of its runs, so both add all runs in rising order. A head of K is whole, for its norm, and stands first; what is left are quarters of
// heads of V (deal.hpp).
//   warp 7        asks for stages of 64 features: weights, and the rows, as they lie, before anybody knows which of them are written;
//   warp 4        finds that out meanwhile;
//   warps 0 - 3   multiply, 16 rows each, leave the rounded sums of 8 in shared memory, and finish quarters of V;
//   warps 4 - 7   finish heads of K, up to eight rows at once, whose angles wait in registers.
//
// Target features take two launches of this kernel, and their norm (normalize_rows) between:
//   kHeadDim 0    the product of fc: up to 128 columns a cluster; in halves: each block sends one sum. The result, and its squares for the norm.
//   kEarly        the projection: its weights, slots and positions were there before fc began, so it asks for them while fc and the norm still run.
#include "draft_kv/cuda/deal.hpp"
#include "draft_kv/cuda/finish_rows.cuh"

namespace specstate::draft_kv::cuda {

struct FewShape {
  Runs runs;
  LayerPlaces deal{};  // heads of 128
  int places = 0;      // of columns: cluster c does c, c + clusters, ..
  int stages = 0;      // of the ring; 0: as many as there is room for
  int prefetched = 4;  // stages whose weights go to L2 before the kernel before this one is done
  // What the first loads need lies side by side.
  int box = 0;  // rows of a stage: those of the launch, a multiple of 8; rows beyond the launch's are nobody's and not loaded
  int tokens = 0, first_row = 0, first_weight = 0;
  int wide = 128;  // columns of the first product's box
  int parts = 0;   // that block 1 sends: its runs, or (fc) their sum
};

/// kNarrowed: columns of a place beside the 128 of a head.
template <int kHeadDim, int kNarrowed = kHeadDim == 128 ? 32 : 0>
struct Few {
  static constexpr int kRows = 64, kMine = kRows / 2;  // rows, and those that a block finishes
  static constexpr int kThreads = 256;
  static constexpr int kWide = 128, kNarrow = kNarrowed;  // columns of a place: two products
  static constexpr int kSums = (kWide + kNarrow) / 2;     // registers of a thread: half of them of rows of either block
  static constexpr int kHalf = kSums / 2;
  static constexpr bool kInHalves = kHeadDim == 0;            // problem.hpp: each block adds up its runs
  static constexpr int kPart = 32 * kHalf * 4;                // bytes of a warp's 8 rows of one sum; their roundings take its place
  static constexpr int kStride = (kWide + kNarrow) * 2 + 16;  // bytes of a row of rounded sums (finish_rows.cuh)
  static constexpr int kStages = kHeadDim ? 10 : 20;          // more of them do not read faster
  static_assert(8 * kStride <= kPart && kStages <= 32);
  static constexpr int kBuckets = kNarrow == 64 ? kRows : 2 * kRows;  // the smaller one: a fourth stage fits beside 64 rows of 8 runs

  struct Tail {
    std::int64_t slot[kMine];
    Row list[kRows];
    int position[kMine], bucket[kBuckets];
    std::uint64_t full[kStages], empty[kStages], planned, sums, taken, left;
    int warp_count[1];
  };
  SPECSTATE_HD static constexpr std::uint32_t stage_bytes(const FewShape& s) {
    return static_cast<std::uint32_t>(s.wide + kNarrow + s.box) * (kDepth * 2);
  }
  SPECSTATE_HD static constexpr std::uint32_t unit_bytes(const FewShape& s) { return static_cast<std::uint32_t>(s.parts * kPart); }
  SPECSTATE_HD static constexpr std::size_t shared_bytes(const FewShape& s) {
    // The product reads 128 columns of weights, whatever their box.
    return 1024 + s.stages * stage_bytes(s) + (kWide - s.wide) * (kDepth * 2) +
           static_cast<std::size_t>((s.box + 15) / 16) * unit_bytes(s) + sizeof(Tail);
  }
  /// For so many rows. No stages: these rows and runs do not fit.
  static constexpr FewShape fitted(FewShape s, int tokens, std::size_t most) {
    s.tokens = tokens, s.box = (tokens + 7) / 8 * 8, s.parts = kInHalves ? 1 : s.runs.count / 2;
    if (s.stages == 0) s.stages = kStages;
    while (s.stages > 0 && (tokens > kRows || shared_bytes(s) > most)) --s.stages;
    if (s.stages < 3) s.stages = 0;
    return s;
  }
};

/// 16 bytes into another block's shared memory, counted by a barrier of that block.
__device__ __forceinline__ void send(std::uint32_t to, float a, float b, float c, float d, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b),
               "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
/// Reads an argument of the kernel, so that its line of 64 bytes is there when it is wanted. (Somebody must want the value, or it is not read.)
__device__ __forceinline__ void read_early(std::int64_t argument) {
  asm volatile("{\n.reg .pred never;\nsetp.eq.s64 never, %0, -1234567;\n@never nanosleep.u32 1;\n}\n" ::"l"(argument));
}
/// A box on its way to L2: harmless before earlier work of the stream is done.
__device__ __forceinline__ void tile_prefetch(const CUtensorMap& map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(c0), "r"(c1) : "memory");
}

/// Which of the launch's rows block `rank` finishes are written, and where: by one warp.
template <class F, int kHeadDim, class Tail>
__device__ __forceinline__ void plan_half(const Problem& p, Tail& tail, int rank, bool raise, int number, int lane) {
  for (int i = lane; i < F::kMine; i += 32) tail.slot[i] = -1, tail.position[i] = 0;
  const int count =
      plan_rows<32, F::kRows / 32, F::kBuckets>(p.rows, tail.list, tail.bucket, tail.warp_count, raise, lane, [] { __syncwarp(); });
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

/// `context`: of fc.
template <class Io, int kHeadDim, bool kEarly, int kNarrowed = kHeadDim == 128 ? 32 : 0>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Few<kHeadDim, kNarrowed>::kThreads, 1)
    few_rows(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quarters,
             const __grid_constant__ CUtensorMap rows, const __grid_constant__ FewShape shape, const __grid_constant__ Problem p,
             const __grid_constant__ Context context) {
  using F = Few<kHeadDim, kNarrowed>;
  constexpr int kSums = F::kSums, kHalf = F::kHalf, kStride = F::kStride, kPart = F::kPart;
  constexpr int kLaunch = kEarly ? 2 : 0;
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 128) prefetch_map(weights);
  if (thread == 160 && kHeadDim > 0) prefetch_map(quarters);
  if (thread == 192) prefetch_map(rows);
  trace(kEntry, thread == 224, kLaunch);
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, rank = static_cast<int>(ptx::cluster_rank());
  const auto place_of = [&](int i) {
    LayerPlaces::Place place{-1, 0, 0, i * shape.wide, -1};
    if constexpr (kHeadDim == 128) place = shape.deal[i];
    if constexpr (kHeadDim == 64) place.head = 2 * i;
    place.wide += shape.first_weight, place.narrow += place.narrow >= 0 ? shape.first_weight : 0;
    return place;
  };
  const int parts = kHeadDim == 0 ? kSlices / 2 : static_cast<int>(static_cast<unsigned>(shape.runs.count) / 2);  // runs of a block
  const int first_run = rank * parts, k_begin = shape.runs.begin(first_run);
  // The first stages' weights on their way to L2 before anything else, also before the kernel before this one is done: every instruction in front of it is one that the memory
  // waits for.
  if (thread == 224 && cluster < shape.places) {
    const int wide = place_of(cluster).wide;
#pragma unroll 1
    for (int k = 0; k < shape.prefetched; ++k) tile_prefetch(weights, (k_begin + k) * kDepth, wide);
    trace(kPrefetched, true, kLaunch);
  }
  // A line of arguments that nobody has read yet takes 2 us behind the requests for weights: what the last steps read is read now, by warps that wait. (And the cluster's size is
  // known when this is compiled: a barrier of the cluster would read it from a line of its own.)
  if constexpr (kHeadDim == 0) {
    if (thread < 32) read_early(shape.parts), read_early(context.hidden), read_early(reinterpret_cast<std::int64_t>(context.bias.data));
  } else {
    if (thread < 128) {
      for (int line = thread / 32; line < static_cast<int>(offsetof(Problem, target) + 63) / 64; line += 4)
        read_early(reinterpret_cast<const int*>(&p)[16 * line]);
    } else if (thread >= 160 && thread < 224 && cluster < shape.places) {
      const auto place = place_of(cluster);
      const bool of_v = thread >= 192;
      const LayerPool& pool =
          p.target[of_v][of_v && kHeadDim == 128 ? place.v / (4 * p.heads) : head_of(max(place.head, 0), p.heads).layer].pool;
      read_early(pool.slot_stride), read_early(pool.channel_stride);
    }
  }
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const auto tile_bytes = static_cast<std::uint32_t>(shape.box * kDepth * 2), stage_bytes = F::stage_bytes(shape),
             unit_bytes = F::unit_bytes(shape);
  const int stages = shape.stages, tokens = shape.tokens;
  unsigned char* const units = memory + stages * stage_bytes;
  auto& tail = *reinterpret_cast<typename F::Tail*>(units + (shape.box + 15) / 16 * unit_bytes);
  const int depth = shape.runs.begin(first_run + parts) - k_begin;

  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  const auto load_weights = [&](const LayerPlaces::Place& place, unsigned char* stage, int k, std::uint64_t* full) {
    ptx::barrier_expect(full, tokens * (kDepth * 2) + (shape.wide + (place.narrow >= 0 ? F::kNarrow : 0)) * (kDepth * 2));
    tile_load(stage + tile_bytes, weights, (k_begin + k) * kDepth, place.wide, full, once);
    if (F::kNarrow > 0 && place.narrow >= 0)
      tile_load(stage + tile_bytes + F::kWide * kDepth * 2, quarters, (k_begin + k) * kDepth, place.narrow, full, once);
  };
  const auto load_rows = [&](unsigned char* stage, int k, std::uint64_t* full) {
    tile_load(stage, rows, (k_begin + k) * kDepth, shape.first_row, full, keep);
  };
  const int ahead = min(stages, depth);
  const int warps_with_rows = (tokens - 8 * rank + 15) / 16;  // of this block's half
  if (thread == 224) {
#pragma unroll
    for (int k = 0; k < F::kStages; ++k)
      if (k < stages) ptx::barrier_init(&tail.full[k], 1);
    ptx::fence_barriers();
    if (cluster < shape.places) {
      const LayerPlaces::Place place = place_of(cluster);
      // One stage after the other: asked for by several warps at once they come at once, too, the first of them 3 us later.
      if (kEarly)
#pragma unroll 1
        for (int k = 0; k < ahead; ++k) load_weights(place, memory + k * stage_bytes, k, &tail.full[k]);
      ptx::wait_for_previous();
#pragma unroll 1
      for (int k = 0; k < ahead; ++k) {
        if (!kEarly) load_weights(place, memory + k * stage_bytes, k, &tail.full[k]);
        load_rows(memory + k * stage_bytes, k, &tail.full[k]);
      }
      trace(kStart, true, kLaunch);
    }
  } else if (thread == 0) {
    for (int k = 0; k < stages; ++k) {
      ptx::barrier_init(&tail.empty[k], 4);
    }
    ptx::barrier_init(&tail.planned, 32), ptx::barrier_init(&tail.sums, 1);
    ptx::barrier_init(&tail.taken, kHeadDim > 0 ? 7 : 4), ptx::barrier_init(&tail.left, max(warps_with_rows, 1));
    ptx::fence_barriers();
  }
  __syncthreads();
  const auto plan = [&] {
    if constexpr (kHeadDim > 0)
      if (thread / 32 == 4) {
        plan_half<F, kHeadDim>(p, tail, rank, cluster == 0 && rank == 0, cluster < shape.places ? place_of(cluster).head : -1, lane);
        ptx::barrier_arrive(&tail.planned);
      }
  };
  if (kEarly) plan();
  ptx::wait_for_previous();
  ptx::let_next_start();
  ptx::cluster_arrive_relaxed();
  if (!kEarly) plan();
  if (thread >= 224) {
    if (lane == 0) {
      int stage = 0, first = ahead;
      std::uint32_t parity = 1;
      for (int i = cluster; i < shape.places; i += clusters, first = 0) {
        const LayerPlaces::Place place = place_of(i);
        if (first > 0 && (stage = first) == stages) stage = 0, parity = 0;
#pragma unroll 1
        for (int k = first; k < depth; ++k) {
          ptx::barrier_wait(&tail.empty[stage], parity);
          load_weights(place, memory + stage * stage_bytes, k, &tail.full[stage]);
          load_rows(memory + stage * stage_bytes, k, &tail.full[stage]);
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      }
      trace(kAsked, true, kLaunch);
    }
    __syncwarp();
    ptx::cluster_wait();
  }
  const bool multiplies = thread < 128;
  const int warp = thread / 32 % 4;                     // of those who multiply, or of the others
  const int others = shape.places <= clusters ? 4 : 3;  // that finish, too: who asks for stages has time for it where there is one place
  const bool has_rows = multiplies && warp < warps_with_rows;            // to finish, in this block
  const bool sends = multiplies && 16 * warp + 8 * (1 - rank) < tokens;  // the other block has some of this warp
  const bool receives = warps_with_rows > 0;
  if (!multiplies && warp < 3) ptx::cluster_wait();
  if (!multiplies && (kHeadDim == 0 || warp >= others)) return;

  int stage = 0, before = 0, pass = 0;
  std::uint32_t parity = 0;
  for (int i = cluster; i < shape.places; i += clusters, ++pass) {
    float d[kSums], sum[kSums];  // sum: of block 0's runs (fc: of either's)
    unsigned char* const unit = units + warp * unit_bytes;
    if (multiplies) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) d[j] = sum[j] = 0;
      const int sent = kHeadDim == 0 ? shape.wide / 16 : kHalf / 4;  // pieces of 16 bytes a lane
      if (receives && thread == 0)
        ptx::barrier_expect(&tail.sums, static_cast<std::uint32_t>(warps_with_rows * 512 * sent * (rank == 0 ? shape.parts : 1)));
      const std::uint32_t barrier = address_in_block(&tail.sums, 1 - rank), to = address_in_block(unit + lane * 16, 1 - rank);
      // The other block's rows: a unit has 32 lanes x kHalf floats of every part.
      const auto send_rows = [&](const float(&x)[kSums], int first, int part) {
#pragma unroll
        for (int j = 0; j < kSums; j += 8)
          if (kHeadDim > 0 || j / 8 < sent)
            send(to + part * kPart + j / 8 * 512, x[j + first], x[j + first + 1], x[j + first + 4], x[j + first + 5], barrier);
      };
#pragma unroll 1
      for (int run = 0; run < parts; ++run) {
        const int n = shape.runs.begin(first_run + run + 1) - shape.runs.begin(first_run + run);
#pragma unroll 1
        for (int k = 0; k < n; ++k) {
          const unsigned char* const m = memory + stage * stage_bytes;
          if (run == 0 && k == 0) trace(kBarriers, thread == 0, kLaunch);
          ptx::barrier_wait(&tail.full[stage], parity);
          if (run == 0 && k == 0) trace(kFirstStage, thread == 0, kLaunch);
          const std::uint64_t a = tile_descriptor(m), b = tile_descriptor(m + tile_bytes),
                              b2 = tile_descriptor(m + tile_bytes + F::kWide * kDepth * 2);
          product_fence();
#pragma unroll
          for (int s = 0; s < kDepth / 16; ++s) {
            product_of<Io, F::kWide>(d, a + 2 * s, b + 2 * s, k > 0 || s > 0);
            if constexpr (F::kNarrow > 0) product_of<Io, F::kNarrow>(d + 64, a + 2 * s, b2 + 2 * s, k > 0 || s > 0);
          }
          product_commit();
          if (k > 0) {
            product_wait_all_but_one();
            if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
          }
          before = stage;
          if (++stage == stages) stage = 0, parity ^= 1;
        }
        if (run == parts - 1) trace(kLastStage, thread == 0, kLaunch);
        product_wait_for(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        __syncwarp();
        if (run == 0) {  // before anything is sent
          if (pass == 0)
            ptx::cluster_wait();
          else if (tokens > 8 * (1 - rank))
            ptx::barrier_wait(&tail.taken, (pass - 1) & 1);
        }
        if (rank == 0 || F::kInHalves) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) sum[j] += d[j];
        } else {
          if (sends) send_rows(d, 0, run);
          if (has_rows && run < parts - 1)  // this block's rows wait here, behind the sum that block 0 will send
#pragma unroll
            for (int j = 0; j < kSums; j += 8)
              *reinterpret_cast<float4*>(unit + (run + 1) * kPart + j / 8 * 512 + lane * 16) = {d[j + 2], d[j + 3], d[j + 6], d[j + 7]};
        }
      }
      if (sends) {
        if (rank == 0)
          send_rows(sum, 2, 0);
        else if (F::kInHalves)
          send_rows(sum, 0, 0);
      }
      trace(kSummed, thread == 0, kLaunch);
    }
    if (!receives) continue;
    int lane_here;  // asked for again, here, so that nothing that follows from it is kept in registers while the products run
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
    const auto receive = [&](float(&mine)[kHalf]) {
      ptx::barrier_wait(&tail.sums, pass & 1);
      trace(kPlanThere, thread == 0, kLaunch);
      const auto* const from = reinterpret_cast<const float4*>(unit) + lane_here;
      const auto add = [&](int part) {
#pragma unroll
        for (int j = 0; j < kHalf; j += 4) {
          const float4 x = from[part * (kPart / 16) + j / 4 * 32];
          mine[j] += x.x, mine[j + 1] += x.y, mine[j + 2] += x.z, mine[j + 3] += x.w;
        }
      };
      if (rank == 0 || F::kInHalves) {  // a + b is b + a
#pragma unroll
        for (int j = 0; j < kHalf; ++j) mine[j] = rank == 0 ? sum[j / 2 * 4 + j % 2] : sum[j / 2 * 4 + j % 2 + 2];
      } else {
#pragma unroll
        for (int j = 0; j < kHalf; j += 4) {
          const float4 x = from[j / 4 * 32];
          mine[j] = x.x, mine[j + 1] = x.y, mine[j + 2] = x.z, mine[j + 3] = x.w;
        }
      }
#pragma unroll 1
      for (int part = rank == 0 || F::kInHalves ? 0 : 1; part < shape.parts; ++part) add(part);
      if (rank == 1 && !F::kInHalves)
#pragma unroll
        for (int j = 0; j < kHalf; ++j) mine[j] += d[j / 2 * 4 + j % 2 + 2];
    };
    const auto leave = [&](const float(&mine)[kHalf]) {
      __syncwarp();
      const std::uint32_t to = ptx::shared(unit) + lane_here % 8 * kStride + lane_here / 8 * 16;
#pragma unroll
      for (int j = 0; j < kHalf; j += 8)
        store_matrices(to + j * 8, io_pair<Io>(mine[j], mine[j + 1]), io_pair<Io>(mine[j + 2], mine[j + 3]),
                       io_pair<Io>(mine[j + 4], mine[j + 5]), io_pair<Io>(mine[j + 6], mine[j + 7]));
      __syncwarp();
    };
    const LayerPlaces::Place place = place_of(i);
    if constexpr (kHeadDim == 0) {
      if (has_rows) {
        float mine[kHalf];
        receive(mine);
        add_context_bias<kHalf / 2>(context, place.wide, lane_here % 4, mine);
        leave(mine);
        const int first = 16 * warp + 8 * rank;
        finish_feature_columns<Io, kStride>(context, unit, first, min(8, tokens - first), place.wide,
                                            min(shape.wide, context.hidden - place.wide));
      } else {
        ptx::barrier_wait(&tail.sums, pass & 1);
      }
    } else {
      const bool has_k = place.head >= 0;
      const auto address = [&](int row, int byte) { return units + row / 8 * unit_bytes + row % 8 * kStride + byte; };
      const auto ready = [&] {
        ptx::barrier_wait(&tail.left, pass & 1);
        trace(kLeft, thread == 128, kLaunch);
      };
      if (has_rows) {
        float mine[kHalf];
        receive(mine);
        if (p.bias.data) {
          constexpr int kQuarter = kHeadDim / 32;  // columns of V come in pieces of 32
#pragma unroll
          for (int j = 0; j < kHalf / 8; ++j) {
            const bool of_k = has_k && j < 4;
            const int quarter = of_k ? 0 : place.v + j - (has_k ? 4 : 0);
            const Head h = of_k ? head_of(place.head + j / kQuarter, p.heads) : Head{quarter / 4 / p.heads, quarter / 4 % p.heads, true};
            if (of_k || quarter < place.v + place.count)
              add_bias_of_8<4>(p, h.layer, ((h.is_v ? p.heads : 0) + h.index) * kHeadDim + 32 * (of_k ? j % kQuarter : quarter % 4),
                               lane_here % 4, mine + 8 * j);
          }
        }
        leave(mine);
        if (lane_here == 0) ptx::barrier_arrive(&tail.left);
      } else if (multiplies) {
        ptx::barrier_wait(&tail.sums, pass & 1);
      }
      ptx::barrier_wait(&tail.planned, 0);
      const int mine = 8 * warps_with_rows;  // rows
      if (has_k && !multiplies) {
        const auto word = [&](int row, int byte) { return *reinterpret_cast<const uint2*>(address(row, byte)); };
        if (mine <= 8)
          finish_rows<Io, kHeadDim, 1>(p, word, place.head, tail.slot, tail.position, 2 * warp, 2 * others, mine, ready);
        else if (mine <= 16)
          finish_rows<Io, kHeadDim, 2>(p, word, place.head, tail.slot, tail.position, 4 * warp, 4 * others, mine, ready);
        else
          finish_rows<Io, kHeadDim, 4>(p, word, place.head, tail.slot, tail.position, 8 * warp, 8 * others, mine, ready);
      } else if constexpr (kHeadDim == 128) {  // quarters of V: beside a head of K by those who multiply
        finish_quarters<Io>(
            p, [&](int row, int byte) { return *reinterpret_cast<const uint4*>(address(row, (has_k ? 256 : 0) + byte)); }, place.v,
            place.count, tail.slot, mine, has_k || !multiplies ? warp : others + warp, has_k ? 4 : 4 + others, ready);
      }
    }
    __syncwarp();
    if (i + clusters < shape.places && lane == 0) release_in_block(address_in_block(&tail.taken, 1 - rank));
    trace(kFinished, thread == 128 || (kHeadDim == 0 && thread == 0), kLaunch);
  }
}

}  // namespace specstate::draft_kv::cuda
