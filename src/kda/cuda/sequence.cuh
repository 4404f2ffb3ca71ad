#pragma once
// The one recurrence for the frame of heads.cuh: exact ring mode, snapshots, decode. A warp holds its rows of the state in registers and goes
// along the tokens alone; rows leave through their place in shared memory.
#include "kda/cuda/heads.cuh"

namespace specstate::kda::cuda::plain {

/// Norms and k.q of a token.
template <class M>
__device__ __forceinline__ void scalars(const HeadsCall& a, M& s, int t, int lane) {
  float k[4], q[4];
  row_of_four(s.keys[0][t] + lane * 4, k), row_of_four(s.keys[1][t] + lane * 4, q);
  float sums[3] = {dot4(k, k), dot4(q, q), dot4(k, q)};
  warp_sums(sums);
  const float fk = a.l2norm ? inverse_norm(sums[0]) : 1.0f, fq = a.l2norm ? inverse_norm(sums[1]) * a.scale : a.scale;
  if (lane == 0) s.fk[t] = fk, s.fq[t] = fq, s.kq[t] = sums[2] * fk * fq;
}

/// The warp's rows along the n tokens of a block. `states_before`: how many states the CTA has had before this one.
template <class M>
__device__ __forceinline__ void walk(const HeadsCall& a, const Head& head, M& s, int first, int n, bool last, int turn, int states_before,
                                     int lane) {
  constexpr int kRows = kDim / (2 * M::kWorkers), kCopies = 16 / kRows;
  const int l = lane & 15, row = group_row<kRows>() + row_of<kRows>(l);
  float* const mine = s.base(group_row<kRows>());
  float *const home = head.at<float>(kState), *snapshot = head.at<float>(kSnapshots);
  const bool updates = a.update_state && home, states = updates || snapshot;
  if (snapshot) snapshot += first * a.snapshots_step;
  Rows<kDim, kRows> x;
  if (first == 0 && home) ptx::barrier_wait(&s.state_here, states_before & 1);
  if (first > 0 || home)
    load_rows<kDim, kRows>(x, mine, lane);
  else
    clear_rows(x);
  if (last && !states) leave<kStateRead>(s);  // every lane: what it has read is read
#pragma unroll 1
  for (int t = 0; t < n; ++t) {
    const Step step = {s.keys[0][t], s.keys[1][t], s.decay[t], core::to_float(s.v[t][row]), s.beta[turn & 1][t], s.fk[t], s.fq[t], s.kq[t]};
    const float y = advance<kDim, kRows, true, false>(x, step, lane, states || !last || t + 1 < n);
    if (l % kCopies == 1) *s.result(t, row) = y;
    if (snapshot) {
      store_rows(x, snapshot, mine, true, lane);
      snapshot += a.snapshots_step;
    }
  }
  if (!last) {  // registers are for the tokens of the next block
    stores_read(lane);
    scatter_rows(x, mine, true, lane);
    ptx::fence_async();
    leave<kStateRead>(s);  // the director counts turns
  } else if (states) {
    if (updates) store_rows(x, home, mine, true, lane);
    stores_read(lane);
    leave<kStateRead>(s);
  }
}

}  // namespace specstate::kda::cuda::plain
