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
  extern __shared__ __align__(16) char memory[];
  S* const staged = reinterpret_cast<S*>(memory);
  float* const keys = reinterpret_cast<float*>(memory + static_cast<std::size_t>(kRows) * K * sizeof(S));
  float *const decays = keys + kFoldBlock * K, *const values = decays + kFoldBlock * K, *const betas = values + kFoldBlock * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, d = lane * 4;

  unsigned rest = blockIdx.x;
  const int v0 = static_cast<int>(rest % static_cast<unsigned>(parts)) * kRows;
  rest /= static_cast<unsigned>(parts);
  const std::int64_t hv = rest % static_cast<unsigned>(a.HV), h = hv / (a.HV / a.H);
  rest /= static_cast<unsigned>(a.HV);
  const std::int64_t request = rest % static_cast<unsigned>(a.N), layer = rest / static_cast<unsigned>(a.N);
  wait_for_predecessor();
  const std::int64_t slot = index(a.slots, request), accept = index(a.accept, request);
  launch_successor();
  if (slot <= a.null_slot || slot < 0 || slot >= a.pool || accept <= 0 || accept > a.L) return;
  const int tokens = static_cast<int>(accept);
  S* const home = static_cast<S*>(a.state.data) + at(a.state, layer, slot, hv) + v0 * K;
  fetch_rows<K, R>(home, staged);
  S* track = nullptr;
  int track_step = -1;
  if (a.track) {
    const std::int64_t to = index(a.track, request), step = index(a.track_step, request);
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
      if (lane == 0) betas[t] = load(a.ring_beta, at(a.ring_beta, layer, slot, hv, first + t));
      float sum[1] = {dot4(k, k)};
      warp_sums(sum);
      if (d < K) {
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] = expf(g[e]);
        put4(keys + t * K + d, k, a.l2norm ? inverse_norm(sum[0]) : 1.0f);
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
      const Step step = {keys + t * K, nullptr, decays + t * K, values[t * kRows + row], betas[t], 0};
      advance<K, R, false, kRound>(x, step, lane, true);
      if (first + t == track_step) store_rows(x, track, staged, true, lane);
    }
    if (first + kFoldBlock < tokens) __syncthreads();
  }
  store_rows(x, home, staged, true, lane);
  stores_done(lane);
}

/// Dynamic shared memory of a CTA.
inline std::size_t fold_bytes(int rows_of_lane, int K, int state_size) {
  const std::size_t rows = kRowUnit * rows_of_lane;
  return rows * K * state_size + kFoldBlock * (2 * K + rows + 1) * sizeof(float);
}

}  // namespace specstate::kda::cuda
