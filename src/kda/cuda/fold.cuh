#pragma once
// Fold: replays a request's accepted tokens from the rings into its state. One CTA a (layer, request, value head, part of its rows);
// the state is read once and written once, k's norm and the decays are recomputed from the records, and the recurrence is the
// `advance` of verify, so the folded state has the bits of the snapshot that verify would have stored.
#include "kda/cuda/recurrence.cuh"

namespace specstate::kda::cuda {

constexpr int kFoldBlock = 8;  // tokens whose operands are in shared memory at once: requests rarely have more accepted

template <class S, int K, int R>
__global__ void __launch_bounds__(kThreads, R == 8 ? 2 : 3) fold_kernel(const __grid_constant__ FoldCall a, int parts) {
  constexpr int kRows = kRowUnit * R;
  constexpr bool kRound = sizeof(S) == 2;
  extern __shared__ __align__(128) char memory[];
  S* const staged = reinterpret_cast<S*>(memory);
  float* const keys = reinterpret_cast<float*>(memory + static_cast<std::size_t>(kRows) * K * sizeof(S));
  float *const decays = keys + kFoldBlock * K, *const values = decays + kFoldBlock * K, *const betas = values + kFoldBlock * kRows,
               *const factors = betas + kFoldBlock;
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32, d = lane * 4;

  unsigned rest = blockIdx.x;
  const int v0 = static_cast<int>(rest % static_cast<unsigned>(parts)) * kRows;
  rest /= static_cast<unsigned>(parts);
  const std::int64_t hv = rest % static_cast<unsigned>(a.HV), h = hv / (a.HV / a.H);
  rest /= static_cast<unsigned>(a.HV);
  const std::int64_t request = rest % static_cast<unsigned>(a.N), layer = rest / static_cast<unsigned>(a.N);
  wait_for_predecessor();
  const std::int64_t slot = uniform(index(a.slots, request)), accept = uniform(accepted(a, layer, request, slot));
  launch_successor();
  if (slot <= a.null_slot || slot < 0 || slot >= a.pool || accept <= 0 || accept > a.L) return;
  const int tokens = static_cast<int>(accept);
  S* const home = static_cast<S*>(a.state.data) + at(a.state, layer, slot, hv) + v0 * K;
  fetch_rows<K, R>(home, staged);
  S* track = nullptr;
  int track_step = -1;
  if (a.track) {
    const std::int64_t to = uniform(index(a.track, request)), step = uniform(index(a.track_step, request));
    if (to > a.null_slot && to >= 0 && to < a.pool && step >= 0 && step < accept)
      track = static_cast<S*>(a.state.data) + at(a.state, layer, to, hv) + v0 * K, track_step = static_cast<int>(step);
  }

  Rows<K, R> x;
  const int l = lane & 15, row = group_row<R>() + row_of<R>(l);
  for (int first = 0; first < tokens; first += kFoldBlock) {
    const int n = min(kFoldBlock, tokens - first);
    for (int t = warp; t < n; t += kWarps) {
      float k[4] = {}, g[4] = {}, v[4];
      if (d < K) load_values<false>(a.rawk, at(a.rawk, layer, slot, h, first + t) + d, k);
      if (d < kRows) {
        load_values<false>(a.rawv, at(a.rawv, layer, slot, hv, first + t) + v0 + d, v);
        *reinterpret_cast<float4*>(values + t * kRows + d) = make_float4(v[0], v[1], v[2], v[3]);
      }
      const std::int64_t ring = at(a.ring_g, layer, slot, hv, first + t);
      if (a.scalar_gate)
        g[0] = g[1] = g[2] = g[3] = load(a.ring_g, ring);
      else if (d < K)
        load_values<false>(a.ring_g, ring + d, g);
      float sum[1] = {dot4(k, k)};
      warp_sums(sum);
      if (lane == 0) {
        betas[t] = load(a.ring_beta, at(a.ring_beta, layer, slot, hv, first + t));
        factors[t] = a.l2norm ? inverse_norm(sum[0]) : 1.0f;
      }
      if (d < K) {
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] = exp_of(g[e]);
        put4(keys + t * K + d, k, 1.0f);
        put4(decays + t * K + d, g, 1.0f);
      }
    }
    __syncthreads();
    if (first == 0) {
      wait_copies();
      __syncwarp();
      load_rows<K, R>(x, staged, lane);
    }
    for (int t = 0; t < n; ++t) {
      const Step step = {keys + t * K, nullptr, decays + t * K, values[t * kRows + row], betas[t], factors[t], 0, 0};
      advance<K, R, false, kRound>(x, step, lane, true);
      if (first + t == track_step) store_rows(x, track, staged, true, lane);
    }
    if (first + kFoldBlock < tokens) __syncthreads();
  }
  store_rows(x, home, staged, true, lane);
  stores_done(lane);
}

// ---- the stream ----------------------------------------------------------------------------------------------------------------
// Many heads of 128 x 128: one CTA a multiprocessor, three stages of a state and its first 8 records. One warp asks for the next heads'
// bytes as stages become free; 16 warps of 8 value rows each replay and hand their rows back to the copy engine, which reads them from the
// stage while the next head is worked on. Reads and writes never wait for the arithmetic.

constexpr int kStreamWarps = 16, kStreamThreads = 32 * (kStreamWarps + 1), kStreamStages = 3, kStreamRows = 4;

template <class S>
struct StreamStage {
  alignas(128) S state[128 * 128];
  bfloat16 k[kFoldBlock][128], v[kFoldBlock][128];
  float g[kFoldBlock][128];  // becomes decay
  float beta[kFoldBlock];
  std::int64_t slot, track;  // of the state; track -1: none
  int layer, hv, tokens, track_step;
};

template <class S>
struct StreamShared {
  StreamStage<S> stage[kStreamStages];
  float k[2][kFoldBlock][128], fk[2][kFoldBlock];
  std::uint64_t full[kStreamStages], empty[kStreamStages];
};

template <class S>
__device__ __forceinline__ void stream_producer(const FoldCall& a, StreamShared<S>& s, int lane) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = specstate::cuda::ptx;
  const std::int64_t items = a.layers * a.N * a.HV;
  int use = 0;
  for (std::int64_t first = blockIdx.x; first < items; first += 32 * static_cast<std::int64_t>(gridDim.x)) {
    // 32 of the CTA's items at once: their indices come in one round trip
    const std::int64_t item = first + lane * static_cast<std::int64_t>(gridDim.x), request = item / a.HV % a.N;
    std::int64_t slot = -1, accept = 0, track = -1, step = -1;
    if (item < items) {
      slot = index(a.slots, request), accept = accepted(a, item / (a.HV * a.N), request, slot);
      if (a.track) track = index(a.track, request), step = index(a.track_step, request);
    }
    const bool live = slot > a.null_slot && slot >= 0 && slot < a.pool && accept > 0 && accept <= a.L;
    if (!(track > a.null_slot && track >= 0 && track < a.pool && step >= 0 && step < accept)) track = -1;
    for (unsigned todo = __ballot_sync(kAll, live); todo; todo &= todo - 1) {
      const int from = __ffs(static_cast<int>(todo)) - 1, at_stage = use % kStreamStages;
      StreamStage<S>& stage = s.stage[at_stage];
      if (use >= kStreamStages) ptx::barrier_wait(s.empty + at_stage, (use / kStreamStages - 1) & 1);
      ++use;
      if (lane == from) {
        const int hv = static_cast<int>(item % a.HV), n = min(static_cast<int>(accept), kFoldBlock);
        const std::int64_t layer = item / (a.HV * a.N), h = hv / (a.HV / a.H);
        stage.slot = slot, stage.track = track, stage.layer = static_cast<int>(layer), stage.hv = hv;
        stage.tokens = static_cast<int>(accept), stage.track_step = static_cast<int>(step);
        const std::uint32_t beta = static_cast<std::uint32_t>(n + 3) / 4 * 16;
        ptx::barrier_expect(s.full + at_stage, static_cast<std::uint32_t>(sizeof stage.state) + n * 1024 + beta);
        ptx::bulk_load(stage.state, static_cast<const S*>(a.state.data) + at(a.state, layer, slot, hv), sizeof stage.state,
                       s.full + at_stage);
        ptx::bulk_load(stage.k, static_cast<const bfloat16*>(a.rawk.data) + at(a.rawk, layer, slot, h), n * 256, s.full + at_stage);
        ptx::bulk_load(stage.v, static_cast<const bfloat16*>(a.rawv.data) + at(a.rawv, layer, slot, hv), n * 256, s.full + at_stage);
        ptx::bulk_load(stage.g, static_cast<const float*>(a.ring_g.data) + at(a.ring_g, layer, slot, hv), n * 512, s.full + at_stage);
        ptx::bulk_load(stage.beta, static_cast<const float*>(a.ring_beta.data) + at(a.ring_beta, layer, slot, hv), beta, s.full + at_stage);
      }
      __syncwarp();
    }
  }
  const int at_stage = use % kStreamStages;
  if (use >= kStreamStages) ptx::barrier_wait(s.empty + at_stage, (use / kStreamStages - 1) & 1);
  if (lane == 0) {
    s.stage[at_stage].tokens = 0;  // the end
    ptx::barrier_arrive(s.full + at_stage);
  }
#endif
}

__device__ __forceinline__ void stream_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kStreamWarps) : "memory"); }

template <class S>
__global__ void __launch_bounds__(kStreamThreads, 1) fold_stream_kernel(const __grid_constant__ FoldCall a, int) {
#if __CUDA_ARCH__ >= 900
  namespace ptx = specstate::cuda::ptx;
  constexpr int K = 128, R = kStreamRows;
  constexpr bool kRound = sizeof(S) == 2;
  extern __shared__ __align__(128) char memory[];
  StreamShared<S>& s = *reinterpret_cast<StreamShared<S>*>(memory);
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32, d = lane * 4;
  if (threadIdx.x < kStreamStages) {
    ptx::barrier_init(s.full + threadIdx.x, 1);
    ptx::barrier_init(s.empty + threadIdx.x, kStreamWarps);
  }
  ptx::fence_barriers();
  __syncthreads();
  wait_for_predecessor();
  launch_successor();
  if (warp == kStreamWarps) return stream_producer(a, s, lane);

  const int l = lane & 15, row = group_row<R>() + row_of<R>(l);
  for (int use = 0;; ++use) {
    StreamStage<S>& stage = s.stage[use % kStreamStages];
    ptx::barrier_wait(s.full + use % kStreamStages, (use / kStreamStages) & 1);
    const int tokens = uniform(stage.tokens), hv = uniform(stage.hv), track_step = uniform(stage.track_step);
    if (tokens == 0) break;
    const std::int64_t layer = uniform(stage.layer), slot = uniform(stage.slot), track = uniform(stage.track);
    float(&keys)[kFoldBlock][128] = s.k[use & 1];
    float(&factors)[kFoldBlock] = s.fk[use & 1];
    Rows<K, R> x;
    load_rows<K, R>(x, stage.state, lane);
    for (int first = 0; first < tokens; first += kFoldBlock) {
      const int n = min(kFoldBlock, tokens - first);
      if (first > 0) {  // more records than a stage holds: rare, so without a pipeline
        stream_barrier();
        for (int i = static_cast<int>(threadIdx.x); i < n * K; i += 32 * kStreamWarps) {
          const int t = i / K, e = i % K;
          stage.k[t][e] = static_cast<const bfloat16*>(a.rawk.data)[at(a.rawk, layer, slot, hv / (a.HV / a.H), first + t, e)];
          stage.v[t][e] = static_cast<const bfloat16*>(a.rawv.data)[at(a.rawv, layer, slot, hv, first + t, e)];
          stage.g[t][e] = static_cast<const float*>(a.ring_g.data)[at(a.ring_g, layer, slot, hv, first + t, e)];
          if (e == 0) stage.beta[t] = static_cast<const float*>(a.ring_beta.data)[at(a.ring_beta, layer, slot, hv, first + t)];
        }
        stream_barrier();
      }
      if (warp < n) {
        float k[4], g[4];
        unpack(*reinterpret_cast<const Quad<bfloat16>*>(stage.k[warp] + d), k);
        unpack(*reinterpret_cast<const Quad<float>*>(stage.g[warp] + d), g);
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] = exp_of(g[e]);
        put4(keys[warp] + d, k, 1.0f), put4(stage.g[warp] + d, g, 1.0f);
        float sum[1] = {dot4(k, k)};
        warp_sums(sum);
        if (lane == 0) factors[warp] = a.l2norm ? inverse_norm(sum[0]) : 1.0f;
      }
      stream_barrier();
#pragma unroll 1
      for (int t = 0; t < n; ++t) {
        const Step step = {keys[t], nullptr, stage.g[t], core::to_float(stage.v[t][row]), stage.beta[t], factors[t], 0, 0};
        advance<K, R, false, kRound>(x, step, lane, true);
        if (first + t == track_step && track >= 0)
          scatter_rows(x, static_cast<S*>(a.state.data) + at(a.state, layer, track, hv), true, lane);
      }
    }
    __syncwarp();
    scatter_rows(x, stage.state, true, lane);
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_store(static_cast<S*>(a.state.data) + at(a.state, layer, slot, hv) + warp * 2 * R * K, stage.state + warp * 2 * R * K,
                      2 * R * K * sizeof(S));
      ptx::bulk_commit();
      ptx::bulk_wait_read<1>();  // the item before this one has left its stage
      if (use > 0) ptx::barrier_arrive(s.empty + (use - 1) % kStreamStages);
    }
    __syncwarp();
  }
  stores_done(lane);
#endif
}

/// Dynamic shared memory of a CTA.
inline std::size_t fold_bytes(int rows_of_lane, int K, int state_size) {
  const std::size_t rows = kRowUnit * rows_of_lane;
  return rows * K * state_size + kFoldBlock * (2 * K + rows + 2) * sizeof(float);
}

}  // namespace specstate::kda::cuda
