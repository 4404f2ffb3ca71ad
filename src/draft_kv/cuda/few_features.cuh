#pragma once
// Up to 64 tokens of target features: the product of fc (kHeadDim 0), then the projection, which norms fc's rows as it fetches them. few_rows once more, with the same sums, in pairs
// of blocks that share what comes after them:
//   kHeadDim 0      64 columns a cluster; the rounded result, and its squares for the norm. When all of its stages are asked for, the projection's first weights go to L2.
//   kHeadDim > 0    Weights are asked for before fc has ended, and slots and positions looked up. Warps 4 - 6 norm the rows of every third stage where they lie, between their arrival and
//                   the products. Warps 0 - 3 multiply and finish quarters of V, warps 4 - 7 finish heads of K.
// (A kernel of its own: few_rows with these parts in it was 2 us slower, see decision 0010.)
#include "draft_kv/cuda/few_rows.cuh"

namespace specstate::draft_kv::cuda {

/// Target features: the factors of rows first, first + kStep, .., by a warp. Sums as row_factor has them.
template <int kStep, int kRows, class Tail>
__device__ __forceinline__ void row_factors(const Context& c, Tail& tail, int rows, int first, int lane) {
  constexpr int kEach = (kRows + kStep - 1) / kStep;
  const int blocks = c.hidden / 64;
  float squares[kEach] = {};
#pragma unroll 2
  for (int b = lane; b < blocks; b += 32)
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares[i] += c.squares[static_cast<std::int64_t>(min(first + i * kStep, rows - 1)) * blocks + b];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i * kStep >= rows) break;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares[i] += __shfl_xor_sync(~0u, squares[i], d);
    if (lane == i) tail.factor[first + i * kStep] = norm_factor(squares[i], c.hidden, c.eps);
  }
}
/// Norms the rows of every third stage where they lie, from number `first` on, by a warp.
template <class Io, class Tail>
__device__ __forceinline__ void norm_stages_of(Tail& tail, unsigned char* memory, int stages, std::uint32_t stage_bytes, int first,
                                               int begin, int end, int rows, int lane) {
  const int piece = lane % 8;
  int stage = first % stages;
  std::uint32_t parity = first / stages & 1;
#pragma unroll 1
  for (int k = first; k < end; k += 3) {
    const auto* const from = reinterpret_cast<const float4*>(tail.norm + (k - begin) * kDepth + piece * 8);
    const float4 low = from[0], high = from[1];
    const float norm[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    ptx::barrier_wait(&tail.landed[stage], parity);
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int r0 = lane / 8; r0 < rows; r0 += 4 * kAtOnce) {
      uint4 x[kAtOnce];
      float factor[kAtOnce];
      const auto at = [&](int i) {
        const int r = r0 + 4 * i;
        return reinterpret_cast<uint4*>(memory + stage * stage_bytes + r * 128 + ((piece ^ (r % 8)) << 4));
      };
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (r0 + 4 * i < rows) x[i] = *at(i), factor[i] = tail.factor[r0 + 4 * i];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (r0 + 4 * i < rows) *at(i) = normed_piece<Io>(x[i], factor[i], norm);
    }
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&tail.full[stage]);
    if ((stage += 3) >= stages) stage -= stages, parity ^= 1;
  }
}

template <class Io, int kHeadDim>
__global__ void __launch_bounds__(Few<kHeadDim, true>::kThreads, 1)
    few_features(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap quarters,
                 const __grid_constant__ CUtensorMap rows, const __grid_constant__ FewShape shape, const __grid_constant__ Problem p,
                 const __grid_constant__ Context context) {
  using F = Few<kHeadDim, true>;
  constexpr bool raw = kHeadDim > 0;  // the rows are those of fc, still to be normed
  constexpr int kSums = F::kSums, kHalf = F::kHalf, kRuns = F::kRuns, kStride = F::kStride, kUnit = F::kUnit;
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 128) prefetch_map(weights);
  if (thread == 160 && kHeadDim > 0) prefetch_map(quarters);
  if (thread == 192) prefetch_map(rows);
  trace(kEntry, thread == 224);
  if (raw && thread < 224) asm volatile("" ::"l"(context.squares), "l"(context.norm.data), "r"(context.hidden), "f"(context.eps));
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
    trace(kPrefetched, true);
  }
  extern __shared__ unsigned char shared_memory[];
  unsigned char* const memory = shared_memory + (-ptx::shared(shared_memory) & 1023);
  const auto tile_bytes = static_cast<std::uint32_t>(shape.box * kDepth * 2),
             stage_bytes = tile_bytes + static_cast<std::uint32_t>(F::kWeightBytes);
  const int stages = shape.stages;
  unsigned char* const units = memory + stages * stage_bytes;
  auto& tail = *reinterpret_cast<typename F::Tail*>(units + F::sum_bytes(shape.box));
  const int tokens = shape.tokens;
  const int depth = shape.runs.begin(first_run + kRuns) - k_begin;

  // A place's rows of weights. Quarters of V lie one behind the other but where K of the next layer comes between.
  const auto row_of_quarter = [&](int n) { return shape.first_weight + 32 * (n + (deal.by_quarters(n) + 1) * 4 * shape.heads); };
  struct Columns {
    int wide, fifth;  // of the first product, -1: quarter by quarter; of the second
    int v, boxes;     // quarters, from which of V on
  };
  const auto columns_of = [&](int place) {
    if constexpr (kHeadDim == 0) return Columns{place * F::kWide, 0, 0, 2};
    if constexpr (kHeadDim == 64) return Columns{shape.first_weight + place * 128, 0, 0, 4};
    const int v = deal.v_begin(place), count = deal.v_count(place), first = row_of_quarter(v);
    if (place < deal.k_heads)
      return Columns{shape.first_weight + 32 * (4 * place + deal.by_heads(place) * 4 * shape.heads), first, v, 4 + count};
    return Columns{count >= 4 && row_of_quarter(v + 3) == first + 96 ? first : -1, row_of_quarter(v + 4), v, count};
  };
  const auto load = [&](const Columns& c, unsigned char* to, int feature, std::uint64_t* full, std::uint64_t policy) {
    if (c.wide >= 0)
      tile_load(to, weights, feature, c.wide, full, policy);
    else
#pragma unroll 1
      for (int i = 0; i < min(c.boxes, 4); ++i)
        tile_load(to + i * 32 * kDepth * 2, quarters, feature, row_of_quarter(c.v + i), full, policy);
    if (c.boxes == 5) tile_load(to + 128 * kDepth * 2, quarters, feature, c.fifth, full, policy);
  };

  const std::uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
  const int ahead = min(stages, depth);
  std::uint64_t* const arrived = raw ? tail.landed : tail.full;
  const int warps_with_rows = (tokens - 8 * rank + 15) / 16;  // of this block's half
  if (thread == 224) {
#pragma unroll
    for (int k = 0; k < F::kStages; ++k)
      if (k < stages) ptx::barrier_init(&arrived[k], 1);
    ptx::fence_barriers();
    if (cluster < shape.places) {
      const Columns c = columns_of(cluster);
      const std::uint32_t bytes = tokens * (kDepth * 2) + c.boxes * (32 * kDepth * 2);
      // One stage after the other: asked for by several warps at once they come at once, too, the first of them 3 us later. Weights of target features' projection were made
      // before few_rows<0> began, and so before this kernel did.
      if (raw)
#pragma unroll 1
        for (int k = 0; k < ahead; ++k) {
          ptx::barrier_expect(&arrived[k], bytes);
          load(c, memory + k * stage_bytes + tile_bytes, (k_begin + k) * kDepth, &arrived[k], once);
        }
      ptx::wait_for_previous();
#pragma unroll 1
      for (int k = 0; k < ahead; ++k) {
        unsigned char* const to = memory + k * stage_bytes;
        if (!raw) {
          ptx::barrier_expect(&arrived[k], bytes);
          load(c, to + tile_bytes, (k_begin + k) * kDepth, &arrived[k], once);
        }
        tile_load(to, rows, (k_begin + k) * kDepth, shape.first_row, &arrived[k], keep);
      }
      trace(kStart, true);
    }
  } else if (thread == 0) {
    for (int k = 0; k < stages; ++k) {
      ptx::barrier_init(&tail.empty[k], 4);
      if (raw) ptx::barrier_init(&tail.full[k], 1);
    }
    ptx::barrier_init(&tail.planned, 32), ptx::barrier_init(&tail.factors, 224), ptx::barrier_init(&tail.sums, 1);
    ptx::barrier_init(&tail.taken, kHeadDim > 0 ? 7 : 4), ptx::barrier_init(&tail.left, max(warps_with_rows, 1));
    ptx::fence_barriers();
  }
  if (raw)  // the norm's weights of this block's features
    for (int i = thread; thread < 224 && i < depth * kDepth; i += 224)
      tail.norm[i] = value_at(context.norm.data, context.norm.dtype, (k_begin * kDepth + i) * context.norm.stride);
  __syncthreads();
  if constexpr (kHeadDim > 0)
    if (thread / 32 == 4) {
      if (!raw) ptx::wait_for_previous();  // of target features slots and positions, too, were there before few_rows<0> began
      const int first_head = kHeadDim == 64 ? 2 * cluster : cluster < deal.k_heads ? cluster + cluster / p.heads * p.heads : -1;
      plan_half<kHeadDim>(p, tail, rank, cluster == 0 && rank == 0, first_head, lane);
      ptx::barrier_arrive(&tail.planned);
    }
  ptx::wait_for_previous();
  ptx::let_next_start();
  ptx::cluster_arrive_relaxed();
  if (raw && thread < 224) {
    row_factors<7, F::kRows>(context, tail, tokens, thread / 32, lane);
    ptx::barrier_arrive(&tail.factors);
  }

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
          ptx::barrier_expect(&arrived[stage], bytes);
          load(c, to + tile_bytes, (k_begin + k) * kDepth, &arrived[stage], once);
          tile_load(to, rows, (k_begin + k) * kDepth, shape.first_row, &arrived[stage], keep);
          if (++stage == stages) stage = 0, parity ^= 1;
        }
      }
      if constexpr (kHeadDim == 0)
        for (int i = blockIdx.x; i < 2 * shape.next_stages * shape.next_tiles; i += gridDim.x) {
          const int at = i / shape.next_tiles;
          tile_prefetch(quarters, (at / 2 + at % 2 * shape.next_half) * kDepth, shape.next_row + i % shape.next_tiles * 128);
        }
      trace(kAsked, true);
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
  if constexpr (kHeadDim > 0) {
    if (!multiplies && warp < 3) ptx::cluster_wait();
    if (!multiplies && warp >= others) return;
  } else if (!multiplies) {
    if (warp < 3) ptx::cluster_wait();
    return;
  }

  int stage = 0, before = 0, pass = 0;
  std::uint32_t parity = 0;
  for (int place = cluster; place < shape.places; place += clusters, ++pass) {
    float d[kSums], sum[kSums];  // the sum of runs; of block 1 (not in halves) its own rows' first run
    if (multiplies) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) d[j] = sum[j] = 0;
      if (receives && thread == 0)
        ptx::barrier_expect(&tail.sums, static_cast<std::uint32_t>(warps_with_rows * (kUnit / F::kSent) * (rank == 0 ? F::kSent : 1)));
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
        if (run == kRuns - 1) trace(kLastStage, thread == 0);
        product_wait_for(d);
        if (lane == 0) ptx::barrier_arrive(&tail.empty[before]);
        __syncwarp();
        reach(run);
        // The other block's rows, a run as it is complete or the sum of all; a unit has 32 lanes x kHalf floats of every part.
        const std::uint32_t barrier = address_in_block(&tail.sums, 1 - rank),
                            to = address_in_block(
                                units + warp * kUnit + (rank == 0 || F::kInHalves ? 0 : run) * (kUnit / F::kSent) + lane * 16, 1 - rank);
        const auto send_rows = [&](const float(&x)[kSums], int first) {
#pragma unroll
          for (int j = 0; j < kSums; j += 8)
            send(to + j / 8 * 512, x[j + first], x[j + first + 1], x[j + first + 4], x[j + first + 5], barrier);
        };
        if (rank == 0 || F::kInHalves) {
#pragma unroll
          for (int j = 0; j < kSums; ++j) sum[j] += d[j];
        } else if (run == 0) {
#pragma unroll
          for (int j = 0; j < kHalf; ++j) sum[j] = d[j / 2 * 4 + 2 + j % 2];
        }
        if (sends) {
          if (rank == 0) {
            if (run == kRuns - 1) send_rows(sum, 2);
          } else if (!F::kInHalves) {
            send_rows(d, 0);
          } else if (run == kRuns - 1) {
            send_rows(sum, 0);
          }
        }
      }
      trace(kSummed, thread == 0);
    } else if (raw && warp < 3) {
      if (pass == 0) ptx::barrier_wait(&tail.factors, 0);
      const int begin = pass * depth;
      norm_stages_of<Io>(tail, memory, stages, stage_bytes, begin + (warp + 3 - begin % 3) % 3, begin, begin + depth, tokens, lane);
    }
    if (!receives) continue;
    int lane_here;  // asked for again, here, so that nothing that follows from it is kept in registers while the products run
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_here));
    const auto receive = [&](float(&mine)[kHalf]) {
      ptx::barrier_wait(&tail.sums, pass & 1);
      trace(kPlanThere, thread == 0);
      const auto* const from = reinterpret_cast<const float4*>(units + warp * kUnit) + lane_here;
      static_assert(F::kInHalves || kRuns == 2);
#pragma unroll
      for (int j = 0; j < kHalf; j += 4) {
        const float4 first = from[j / 4 * 32];
        const float of_other[4] = {first.x, first.y, first.z, first.w};
        float second[4] = {};
        if (rank == 0 && !F::kInHalves) {
          const float4 x = from[(kHalf / 4 + j / 4) * 32];
          second[0] = x.x, second[1] = x.y, second[2] = x.z, second[3] = x.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = (j + e) / 2 * 4 + (j + e) % 2;
          if (rank == 0)
            mine[j + e] = F::kInHalves ? sum[at] + of_other[e] : sum[at] + of_other[e] + second[e];
          else
            mine[j + e] = F::kInHalves ? of_other[e] + sum[at + 2] : of_other[e] + sum[j + e] + d[at + 2];
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
    if constexpr (kHeadDim == 0) {
      if (has_rows) {
        float mine[kHalf];
        receive(mine), leave(mine);
        const int first = 16 * warp + 8 * rank;
        finish_feature_block<Io, kStride>(context, units + warp * kUnit, first, min(8, tokens - first), place);
      } else {
        ptx::barrier_wait(&tail.sums, pass & 1);
      }
    } else {
      const int v = deal.v_begin(place), count = deal.v_count(place);
      const bool has_k = kHeadDim == 64 || place < deal.k_heads;
      const int head = kHeadDim == 64 ? 2 * place : place + deal.by_heads(place) * p.heads;
      const auto address = [&](int row, int byte) { return units + row / 8 * kUnit + row % 8 * kStride + byte; };
      const auto ready = [&] {
        ptx::barrier_wait(&tail.left, pass & 1);
        trace(kLeft, thread == 128);
      };
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
        ptx::barrier_wait(&tail.sums, pass & 1);
      }
      ptx::barrier_wait(&tail.planned, 0);
      const int mine = 8 * warps_with_rows;  // rows
      if (has_k && !multiplies) {
        const auto word = [&](int row, int byte) { return *reinterpret_cast<const uint2*>(address(row, byte)); };
        if (mine <= 8)
          finish_rows<Io, kHeadDim, 1>(p, word, head, tail.slot, tail.position, 2 * warp, 2 * others, mine, ready);
        else
          finish_rows<Io, kHeadDim, 4>(p, word, head, tail.slot, tail.position, 8 * warp, 8 * others, mine, ready);
      } else if constexpr (kHeadDim == 128) {  // quarters of V: beside a head of K by those who multiply
        ready();
        finish_quarters<Io>(
            p, [&](int row, int byte) { return *reinterpret_cast<const uint4*>(address(row, (has_k ? 256 : 0) + byte)); }, v, count,
            tail.slot, mine, has_k || !multiplies ? warp : others + warp, has_k ? 4 : 4 + others);
      }
    }
    __syncwarp();
    if (place + clusters < shape.places && lane == 0) arrive_in_block(address_in_block(&tail.taken, 1 - rank));
    trace(kFinished, thread == 128 || (kHeadDim == 0 && thread == 0));
  }
}

}  // namespace specstate::draft_kv::cuda
