// The single-step swap for tables beyond one CTA's shared memory: a cluster of CTAs decides together, one launch.
//
// The asked tokens go into the cluster's hash table, then every LRU position asks the table for the token of its slot: position p is a hit or
// can be evicted. Two sets over all positions and all asked tokens, pushed to every CTA, say the rest: miss u (rank among the asked) takes
// the evictable position of rank u, and a position's new place in the order is its rank in one set or the other. Rows are moved round
// robin by all warps of the cluster. Chunks of 32 positions are dealt to the CTAs in turn, tokens in slices.
#include <algorithm>
#include <string>

#include "cuda/launch.hpp"
#include "hisparse/cuda/missing.cuh"
#include "hisparse/cuda/single.hpp"

namespace specstate::hisparse::cuda {
namespace {

constexpr int kThreads = 512;

struct Plan {
  SlicePlan slices;
  u32 hot_words, my_words;  // chunks of 32 positions: all, and those of one CTA
  u32 seen, evictable, evictable_before, slot, asks, tokens, locs, bytes;
};

__device__ __forceinline__ bool any(bool mine) { return __syncthreads_or(mine) != 0; }

template <bool kTables>
struct Single : Slices {
  const SwapInSingleArgs& x;
  const CopyGeometry& copy;
  const Plan& plan;
  i64 b, r;

  __device__ __forceinline__ u32 hot() const { return static_cast<u32>(x.hot); }
  __device__ __forceinline__ u32 asked() const { return static_cast<u32>(x.top_k); }
  __device__ __forceinline__ std::int32_t slot_token(u32 c) const {
    if constexpr (kTables) return at<std::int32_t>(plan.tokens)[c];
    return x.slot_tokens(r, c);
  }
  __device__ __forceinline__ std::int32_t slot_loc(u32 c) const {
    if constexpr (kTables) return at<std::int32_t>(plan.locs)[c];
    return x.slot_locs(r, c);
  }
  __device__ __forceinline__ std::int32_t selected(u32 i) const {
    if (x.block == 1) return x.selection(b, i);
    const i64 block = x.selection(b, i / static_cast<u32>(x.block)), token = block * x.block + i % static_cast<u32>(x.block);
    return block < 0 || token > INT32_MAX ? -1 : static_cast<std::int32_t>(token);
  }
  /// Position of the j-th one that is mine, and whose and which one position p is.
  __device__ __forceinline__ u32 position(u32 j) const { return ((j >> 5) * plan.slices.cluster + rank) * 32 + (j & 31u); }
  __device__ __forceinline__ u32 slot_at(u32 p) const {
    const u32 chunk = p >> 5, turn = chunk / plan.slices.cluster;
    return *ptx::in_block(words(plan.slot) + turn * 32 + (p & 31u), chunk - turn * plan.slices.cluster);
  }

  __device__ void padding() const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < mine(asked()); i += blockDim.x) x.out(b, occurrence(i)) = -1;
    if (rank == 0 && threadIdx.x == 0 && x.plan.src) x.plan.count(b) = 0;
  }

  __device__ void row(i64 batch_row, i64 real) {
    b = batch_row;
    const u32 T = blockDim.x, warps = T / 32, warp = threadIdx.x / 32, H = hot(), K = asked(), positions = plan.my_words * 32;
    clear();
#pragma unroll 1
    for (u32 w = threadIdx.x; w < plan.hot_words; w += T) words(plan.seen)[w] = words(plan.evictable)[w] = 0;
    if (b >= real) {
      padding();
      return;
    }
    r = x.requests(b);
    bool bad = r < 0 || r >= x.request_slots;
    i64 seq = 0;
    if (!bad) {
      seq = x.seq_lens(b);
#pragma unroll 1
      for (i64 other = threadIdx.x; other < real; other += T) bad |= other != b && x.requests(other) == r;
      if constexpr (kTables) {
#pragma unroll 1
        for (u32 c = threadIdx.x; c <= H; c += T) {
          if (c < H) async_word(at<std::int32_t>(plan.tokens) + c, &x.slot_tokens(r, c));
          async_word(at<std::int32_t>(plan.locs) + c, &x.slot_locs(r, c));
        }
      }
#pragma unroll 1
      for (u32 i = threadIdx.x; i < mine(K); i += T) {
        token()[i] = selected(occurrence(i));
        place()[i] = kEmpty;
      }
      __syncthreads();  // the set of slots is clear
      if (seq > H)
#pragma unroll 1
        for (u32 j = threadIdx.x; j < positions; j += T) {
          const u32 p = position(j);
          if (p >= H) continue;
          const i64 slot = x.lru(r, p);
          if (slot < 0 || slot >= H) {
            bad = true;
            continue;
          }
          words(plan.slot)[j] = static_cast<u32>(slot);
          const u32 bit = 1u << (slot & 31);
          bad |= (atomicOr(words(plan.seen) + (slot >> 5), bit) & bit) != 0;
        }
      async_wait();
#pragma unroll 1
      for (u32 c = threadIdx.x; c <= H; c += T) {
        const std::int32_t loc = slot_loc(c);
        bad |= loc >= copy.device_rows || (loc < 0 && seq > H && c < H);
      }
    }
    bad = any(bad);
    // The lists of the CTAs must be one permutation: judged together, before anything is written.
    if (threadIdx.x == 0) *words(plan.asks) = bad;
    cluster_arrive();
    cluster_wait();
    u32 found = 0;
#pragma unroll 1
    for (u32 w = threadIdx.x; w < plan.hot_words && seq > H; w += T) {
      u32 all = 0;
#pragma unroll 1
      for (u32 c = 0; c < plan.slices.cluster; ++c) all |= *ptx::in_block(words(plan.seen) + w, c);
      const u32 whole = w * 32 + 32 <= H ? kFull : below(H & 31u);
      found |= all ^ whole;
    }
    if (any(found != 0 || (threadIdx.x < plan.slices.cluster && *ptx::in_block(words(plan.asks), threadIdx.x) != 0))) {
      padding();
      return;
    }
    if (seq <= H) {  // short: slot t holds token t
#pragma unroll 1
      for (u32 i = threadIdx.x; i < mine(K); i += T) {
        const u32 o = occurrence(i);
        const std::int32_t t = token()[i];
        x.out(b, o) = t >= 0 && t < seq && (x.block > 1 || o < seq) ? max(slot_loc(t), -1) : -1;
      }
      if (rank == 0 && threadIdx.x == 0 && x.plan.src) x.plan.count(b) = 0;
      return;
    }
    const i64 newest = seq - 1;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < mine(K); i += T) {
      const std::int32_t t = token()[i];
      if (t < 0 || t >= newest) continue;
      i64 src = t < x.context ? x.host_locs(r, t) : -1;
      if (src >= copy.host_rows) src = -1;
      code()[i] = src < 0 ? kEmpty : static_cast<u32>(src);
      const u32 p = home(t);
      place()[i] = finish_insert(p, try_insert(p, occurrence(i)), t, occurrence(i));
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (u32 j = threadIdx.x; j < positions; j += T) {
      const u32 p = position(j);
      u32 asks = kEmpty;
      if (p < H) {
        const std::int32_t t = slot_token(words(plan.slot)[j]);
        if (t >= 0) asks = find(t, [&](u32 resident, std::int32_t token) { return slot_token(slot_at(resident)) == token; });
        if (asks != kEmpty) make_resident(asks, p);
      }
      words(plan.asks)[j] = asks;
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (u32 j = threadIdx.x; j < positions; j += T) {
      const u32 p = position(j), asks = words(plan.asks)[j];
      const bool hit = asks != kEmpty && *entry(asks) == (kResident | p);
      const u32 word = __ballot_sync(kFull, p < H && !hit);
      if (lane_id() < plan.slices.cluster && p >> 5 < plan.hot_words) *ptx::in_block(words(plan.evictable) + (p >> 5), lane_id()) = word;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < plan.slices.slice; i += T) {
      bool first = false;
      if (i < mine(K) && place()[i] != kEmpty) {
        const u32 value = *entry(place()[i]);
        place()[i] = value;
        first = value == occurrence(i) && code()[i] != kEmpty;
      }
      push_first(occurrence(i), first);
    }
    cluster_arrive();
    cluster_wait();
    if (warp == 0) rank_first();
    if (warp == 1) rank_words(words(plan.evictable), words(plan.evictable_before), plan.hot_words);
    __syncthreads();
    const u32 misses = Slices::misses(), evictable = words(plan.evictable_before)[plan.hot_words], hits = H - evictable;
    const auto victim = [&](u32 u) { return slot_at(select_bit(words(plan.evictable), words(plan.evictable_before), plan.hot_words, u)); };
    const auto is_first = [&](u32 o) { return (words(plan.slices.first)[o >> 5] >> (o & 31u) & 1u) != 0; };
    // Answers.
#pragma unroll 1
    for (u32 i = threadIdx.x; i < mine(K); i += T) {
      const std::int32_t t = token()[i];
      const u32 value = place()[i];
      std::int32_t loc = -1;
      if (t == newest)
        loc = max(slot_loc(H), -1);
      else if (value != kEmpty && (value & kResident))
        loc = slot_loc(slot_at(value & ~kResident));
      else if (value != kEmpty && is_first(value))
        loc = slot_loc(victim(number_of(value)));
      x.out(b, occurrence(i)) = loc;
    }
    // The order, the tables, the plan.
    if (hits > 0 || misses > 0)
#pragma unroll 1
      for (u32 j = threadIdx.x; j < positions; j += T) {
        const u32 p = position(j);
        if (p >= H) continue;
        const u32 before = rank_of(words(plan.evictable), words(plan.evictable_before), p);
        const bool can = words(plan.evictable)[p >> 5] >> (p & 31u) & 1u;
        const u32 place = !can ? evictable + (p - before) : before < misses ? evictable - misses + before : before - misses;
        x.lru.store(r, place, words(plan.slot)[j]);
      }
#pragma unroll 1
    for (u32 u = rank * T + threadIdx.x; u < misses; u += plan.slices.cluster * T) {
      const u32 slot = victim(u), o = first_of(u);
      x.slot_tokens(r, slot) = token_of(o);
      if (x.plan.src) {
        x.plan.src(b, u) = host_row_of(o);
        x.plan.dst(b, u) = slot_loc(slot);
      }
    }
    if (rank == 0 && threadIdx.x == 0 && x.plan.src) x.plan.count(b) = static_cast<std::int32_t>(misses);
    ptx::let_next_start();
    if (copy.skip) return;
    const u32 all = plan.slices.cluster * warps, me = rank * warps + warp;
    const u32 moves = misses > me ? (misses - me + all - 1) / all : 0;
#pragma unroll 1
    for (u32 k = 0; k < moves; k += 32) {
      const u32 u = me + (k + lane_id()) * all, count = min(32u, moves - k);
      const bool some = lane_id() < count;
      const u32 src = some ? host_row_of(first_of(u)) : 0;
      const std::int32_t dst = some ? slot_loc(victim(u)) : -1;
      move_pool_rows(copy, src, dst, count);
    }
  }
};

template <bool kTables>
__global__ void __launch_bounds__(kThreads, 1) single_kernel(const __grid_constant__ SwapInSingleArgs x,
                                                             const __grid_constant__ CopyGeometry copy, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) std::byte memory[];
  ptx::wait_for_previous();
  i64 real = x.batch;
  if (x.num_real) real = min(max(static_cast<i64>(*x.num_real), i64{0}), x.batch);
  Single<kTables> single{{plan.slices, memory, ptx::cluster_rank()}, x, copy, plan, 0, 0};
  const u32 clusters = gridDim.x / plan.slices.cluster;
  for (i64 b = blockIdx.x / plan.slices.cluster; b < x.batch; b += clusters) {
    single.row(b, real);
    cluster_leave();  // nobody reads what the next row will clear, or a CTA that is gone
  }
}

Plan make_plan(const SwapInSingleArgs& x, const CopyGeometry& copy, u32 cluster, bool tables) {
  Plan p{};
  Carve take;
  const u32 H = static_cast<u32>(x.hot);
  p.slices = plan_slices(take, cluster, x.top_k, x.top_k, 1);
  p.hot_words = (H + 31) / 32;
  p.my_words = (p.hot_words + cluster - 1) / cluster;
  p.seen = take(p.hot_words);
  p.evictable = take(p.hot_words);
  p.evictable_before = take(p.hot_words + 1);
  p.slot = take(p.my_words * 32);
  p.asks = take(p.my_words * 32);
  if (tables) {
    p.tokens = take(H);
    p.locs = take(H + 1);
  }
  p.bytes = take.bytes;
  return p;
}

}  // namespace

void run_single_large(const SwapInSingleArgs& x, const CopyGeometry& copy, Stream stream) {
  const u32 most = static_cast<u32>(specstate::cuda::device_info().shared_bytes - 1024);
  u32 cluster = cluster_for(x.batch, x.sm_budget);
  Plan plan = make_plan(x, copy, cluster, true);
  while (plan.bytes > most && cluster < 8) plan = make_plan(x, copy, cluster *= 2, true);
  const bool tables = plan.bytes <= most;
  if (!tables) plan = make_plan(x, copy, cluster, false);
  if (plan.bytes > most) too_large(x.op, x.hot, x.top_k);
  specstate::cuda::Launch shape;
  shape.grid = clusters_for(x.batch, cluster, x.sm_budget) * cluster;
  shape.block = kThreads;
  shape.shared = plan.bytes;
  shape.cluster = cluster;
  shape.overlap = true;
  specstate::cuda::launch(tables ? &single_kernel<true> : &single_kernel<false>, shape, stream, x, copy, plan);
}

}  // namespace specstate::hisparse::cuda
