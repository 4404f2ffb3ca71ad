#pragma once
// Fold: replays a request's accepted tokens from the rings into its state. One CTA a (layer, request, value head, part of its rows);
// the state is read once and written once, k's norm and the decays are recomputed from the records, and the recurrence is the
// `advance` of verify, so the folded state has the bits of the snapshot that verify would have stored.
//
// Two forms. fold_rows_kernel for ordinary tensors of heads of 128: rows go straight into registers and back, CTAs are small and many, so that
// while some wait for memory others compute, and the hardware evens them out; at every size it comes nearest to the memory's rate.
// fold_kernel for everything else, through shared memory.
#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"
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

// ---- heads of 128, records in quads ----------------------------------------------------------------------------------------------
// Grid (parts of the value heads, requests, layers). All indices come in one round trip, all of the state and of the first 8 records in a
// second; a warp makes one record's operands for all.

template <class S, int R>
__global__ void __launch_bounds__(kThreads, R == 4 ? 3 : 4) fold_rows_kernel(const __grid_constant__ FoldRowsCall a) {
  constexpr int K = 128, kRows = kRowUnit * R, kParts = 128 / kRows;
  constexpr bool kRound = sizeof(S) == 2;
  __shared__ __align__(16) float keys[kFoldBlock][K], decays[kFoldBlock][K], values[kFoldBlock][kRows], betas[kFoldBlock],
      factors[kFoldBlock];
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32, d = lane * 4;
  const unsigned hv = blockIdx.x / kParts, v0 = blockIdx.x % kParts * kRows, h = hv / a.group, request = blockIdx.y, layer = blockIdx.z;
  // of slot 0; a slot's are that many slot strides further
  const auto place_of = [&](const FoldRowsCall::Place& p, unsigned head, unsigned bytes) {
    return p.base + layer * p.layer + head * p.head + bytes;
  };
  char* const states = place_of(a.state, hv, v0 * (K * sizeof(S)));
  const char *const rawk = place_of(a.rawk, h, d * 2), *const rawv = place_of(a.rawv, hv, (v0 + d) * 2),
                    *const ring_g = place_of(a.g, hv, d * 4), *const ring_beta = place_of(a.beta, hv, 0);
  wait_for_predecessor();
  const Coming slot_of = ask<false>(a.slots, request), accept_of = ask<false>(a.accept, request), track_of = ask<false>(a.track, request),
               step_of = ask<false>(a.track_step, request);
  launch_successor();
  const std::int64_t slot_id = slot_of.value(a.slots);
  if (slot_id <= a.null_slot || slot_id >= a.pool) return;
  const auto slot = static_cast<std::uint32_t>(slot_id);
  std::int64_t accept = accept_of.value(a.accept);
  if (a.pending.data) {
    accept = at(a.pending, layer, slot);
    if (a.cu && index(a.cu, request) >= index(a.cu, request + 1)) accept = 0;
  }
  if (accept <= 0 || accept > a.L) return;
  const int tokens = static_cast<int>(accept);
  S* const home = reinterpret_cast<S*>(states + slot * a.state.slot);
  const int l = lane & 15, row = group_row<R>() + row_of<R>(l);
  Quad<bfloat16> kq = {}, vq = {};
  Quad<float> gq = {};
  float beta = 0;
  const auto ask_record = [&](int t) {
    kq = *reinterpret_cast<const Quad<bfloat16>*>(rawk + slot * a.rawk.slot + t * (K * 2));
    if (d < kRows) vq = *reinterpret_cast<const Quad<bfloat16>*>(rawv + slot * a.rawv.slot + t * (K * 2));
    gq = *reinterpret_cast<const Quad<float>*>(ring_g + slot * a.g.slot + t * (K * 4));
    beta = *reinterpret_cast<const float*>(ring_beta + slot * a.beta.slot + t * 4);
  };
  if (warp < tokens) ask_record(warp);
  Rows<K, R> x;
  load_rows<K, R>(x, home, lane);
  int track_step = -1;
  S* track = nullptr;
  if (a.track) {
    const std::int64_t to = track_of.value(a.track), step = step_of.value(a.track_step);
    if (to > a.null_slot && to < a.pool && step >= 0 && step < accept)
      track = reinterpret_cast<S*>(states + static_cast<std::uint32_t>(to) * a.state.slot), track_step = static_cast<int>(step);
  }
#pragma unroll 1
  for (int first = 0; first < tokens; first += kFoldBlock) {
    const int n = min(kFoldBlock, tokens - first);
    if (first > 0) {
      __syncthreads();
      if (warp < n) ask_record(first + warp);
    }
    if (warp < n) {
      float k[4], g[4], v[4];
      unpack(kq, k), unpack(gq, g);
#pragma unroll
      for (int e = 0; e < 4; ++e) g[e] = exp_of(g[e]);
      put4(keys[warp] + d, k, 1.0f), put4(decays[warp] + d, g, 1.0f);
      if (d < kRows) unpack(vq, v), put4(values[warp] + d, v, 1.0f);
      float sum[1] = {dot4(k, k)};
      warp_sums(sum);
      if (lane == 0) betas[warp] = beta, factors[warp] = a.l2norm ? inverse_norm(sum[0]) : 1.0f;
    }
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      const Step step = {keys[t], nullptr, decays[t], values[t][row], betas[t], factors[t], 0, 0};
      advance<K, R, false, kRound>(x, step, lane, true);
      if (first + t == track_step) scatter_rows(x, track, true, lane);
    }
  }
  scatter_rows(x, home, true, lane);
}

/// Dynamic shared memory of a CTA.
inline std::size_t fold_bytes(int rows_of_lane, int K, int state_size) {
  const std::size_t rows = kRowUnit * rows_of_lane;
  return rows * K * state_size + kFoldBlock * (2 * K + rows + 2) * sizeof(float);
}

}  // namespace specstate::kda::cuda
