#pragma once
// Ring mode from a frozen state: for all tokens of a request (8 at most here; 16 in spread.cuh and sixteen.cuh) the state S0 stays as it was. With
// D_t the product of the decays up to token t, and R_tj the part of it after token j (always an ordered product, never a quotient, so an unbounded
// gate cannot overflow it),
//     P_t = S0 . (D_t k_t),   Q_t = S0 . (D_t q_t),   L_tj = k_t . R_tj k_j,   A_tj = q_t . R_tj k_j,
//     u_t = beta_t (v_t - P_t - sum_{j<t} L_tj u_j),   o_t = Q_t + sum_{j<=t} A_tj u_j.
// P and Q of all tokens are one product of S0 with 16 columns; what tokens do to each other is two triangles of 8 x 8.
//   operands   a warp half a column of the triangles; a warp two tokens: D_t k_t and D_t q_t with their norms, in the order in which tensor cores
//              want them
//   state      tensor cores, 3 x TF32: S0 and the operands in two parts each, without the product of the two small ones. The channels are
//              summed in quarters, these in pairs. A warp has 16 rows; of 16 warps two share them, half the channels each
//   rows       a thread has a row: u of its tokens one after the other, each added to the sums of the later ones, and o
// Lanes that read two rows of the state at a time take one of either half: those lie 64 bytes apart, and no bank is met twice.
#include "kda/cuda/heads.cuh"

namespace specstate::kda::cuda::plain {

/// A step of 8 channels of the operands: a lane's four.
template <class M>
__device__ __forceinline__ float4& operand(M& s, int step, int lane) {
  return reinterpret_cast<float4*>(s.operand)[step * 32 + lane];
}
/// Sums over the warp (quarter_sums: over 8 lanes each, a quarter of a head's channels) of 8 values: value lane % 8 ends in the lanes of that remainder.
/// Neighbours first; whatever is summed over channels is summed in this order.
template <int kLeft = kTokens>
__device__ __forceinline__ float quarter_sums(float (&x)[kTokens], int lane) {
  if constexpr (kLeft == 1) {
    return x[0];
  } else {
    constexpr int kDistance = kTokens / kLeft;
    const bool high = lane & kDistance;
#pragma unroll
    for (int i = 0; i < kLeft / 2; ++i) {
      const float keep = high ? x[2 * i + 1] : x[2 * i], give = high ? x[2 * i] : x[2 * i + 1];
      x[i] = keep + __shfl_xor_sync(kAll, give, kDistance);
    }
    return quarter_sums<kLeft / 2>(x, lane);
  }
}
__device__ __forceinline__ float transposed_sums(float (&x)[kTokens], int lane) {
  float sum = quarter_sums(x, lane);
  sum += __shfl_xor_sync(kAll, sum, 8);
  return sum + __shfl_xor_sync(kAll, sum, 16);
}

/// A lane's part of column j of the triangles: its rows below 4, or the others, of k and then of q. Rows of k, q and decays are kPitch apart, from the lane's four channels on. x ends as
/// R_nj k_j for n = 8 (with kLower). Rows that are no token's are worked on too, and go nowhere that is read. Loads come first, and no branch between them.
template <bool kLower, int kPitch, class Key>
__device__ __forceinline__ void column_terms(const Key* keys, const Key* queries, const float* decays, int j, float (&x)[4],
                                             float (&sums)[kTokens]) {
  constexpr int kRows = kTokens / 2, kFirst = kLower ? kRows : 0;
  float before[3][4], decay[kRows][4], k[kRows][4], q[kRows][4];
  row_of_four(keys + j * kPitch, x);
  if (kLower)
#pragma unroll
    for (int i = 0; i < 3; ++i) row_of_four(decays + (1 + i) * kPitch, before[i]);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    row_of_four(decays + (kFirst + i) * kPitch, decay[i]), row_of_four(keys + (kFirst + i) * kPitch, k[i]),
        row_of_four(queries + (kFirst + i) * kPitch, q[i]);
  if (kLower)
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (1 + i > j)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] *= before[i][e];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (kFirst + i > j)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= decay[i][e];
    sums[i] = dot4(x, k[i]), sums[kRows + i] = dot4(x, q[i]);
  }
}
/// Column j, without norms: its rows below 4, or the others; the norm of k_j, where row j is among them.
template <bool kLower, class M>
__device__ __forceinline__ void column(const HeadsCall& a, M& s, int j, int lane) {
  constexpr int kRows = kTokens / 2;
  float x[4], sums[kTokens];
  column_terms<kLower, kDim>(s.keys[0][0] + lane * 4, s.keys[1][0] + lane * 4, s.decay[0] + lane * 4, j, x, sums);
  const float sum = transposed_sums(sums, lane);
  const int t = (kLower ? kRows : 0) + lane % kRows;
  if (lane < kTokens) s.triangle[lane / kRows][t][j] = sum;
  if (lane < kRows && t == j) s.fk[j] = a.l2norm ? inverse_norm(sum) : 1.0f;
}

/// D_t k_t and D_t q_t, and the norm of q_t, of tokens t and t + 1 (t is even; what is behind the last token goes nowhere that is read).
template <class M>
__device__ __forceinline__ void operands(const HeadsCall& a, M& s, int t, int lane) {
  const int d = lane * 4;
  float product[4], k[2][4], q[2][4], y[kTokens - 1][4], last[4], sums[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) row_of_four(s.keys[0][t + i] + d, k[i]), row_of_four(s.keys[1][t + i] + d, q[i]);
#pragma unroll
  for (int i = 0; i < kTokens - 1; ++i) row_of_four(s.decay[i] + d, y[i]);
  row_of_four(s.decay[t + 1] + d, last);
#pragma unroll
  for (int e = 0; e < 4; ++e) product[e] = y[0][e];
#pragma unroll
  for (int i = 1; i < kTokens - 1; ++i)
    if (i <= t)
#pragma unroll
      for (int e = 0; e < 4; ++e) product[e] *= y[i][e];
#pragma unroll
  for (int i = 0; i < 2; ++i) sums[i] = dot4(q[i], q[i]);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(kAll, sums[i], distance);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i > 0)
#pragma unroll
      for (int e = 0; e < 4; ++e) product[e] *= last[e];
    if (lane == 0) s.fq[t + i] = a.l2norm ? inverse_norm(sums[i]) * a.scale : a.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      operand(s, lane / 4 * 2 + h, (t + i) * 4 + lane % 4) =
          make_float4(k[i][2 * h] * product[2 * h], q[i][2 * h] * product[2 * h], k[i][2 * h + 1] * product[2 * h + 1],
                      q[i][2 * h + 1] * product[2 * h + 1]);
  }
}

/// The larger part of x: what tensor cores take of a float.
__device__ __forceinline__ float truncated(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }

/// D = C + A B with A [16, 8] and B [8, 8] in TF32, which ignores what is smaller; without C: from zeros.
__device__ __forceinline__ void multiply(float (&d)[4], const float4& a, float b0, float b1, bool first = false) {
  const float c[4] = {first ? 0 : d[0], first ? 0 : d[1], first ? 0 : d[2], first ? 0 : d[3]};
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)), "r"(__float_as_uint(a.w)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/// P and Q of tiles of 8 rows, over kQuarters quarters of the channels. rows: the lane's row of the first tile, from its four channels on (lane % 4);
/// the next tile is `pitch` on. operands: the lane's. Lane (g, t) reads row g of S0, and ends with token g: rows 2 t and 2 t + 1 of P and of Q.
template <int kTiles, int kQuarters>
__device__ __forceinline__ void product(const float* rows, int pitch, const float4* operands, float (&total)[kTiles][4]) {
  float pair[kTiles][4];
#pragma unroll
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    float main[kTiles][4], cross[kTiles][4];
#pragma unroll
    for (int i = 2 * quarter; i < 2 * quarter + 2; ++i) {
      float4 x[kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) x[j] = *reinterpret_cast<const float4*>(rows + j * pitch + 16 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool first = i == 2 * quarter && h == 0;
        const float4 y = operands[(2 * i + h) * 32], large = make_float4(truncated(y.x), truncated(y.y), truncated(y.z), truncated(y.w)),
                     small = make_float4(y.x - large.x, y.y - large.y, y.z - large.z, y.w - large.w);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const float b0 = h ? x[j].z : x[j].x, b1 = h ? x[j].w : x[j].y, large0 = truncated(b0), large1 = truncated(b1);
          multiply(cross[j], small, large0, large1, first);
          multiply(main[j], large, large0, large1, first);
          multiply(cross[j], large, b0 - large0, b1 - large1);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = main[j][e] + cross[j][e];
        pair[j][e] = quarter % 2 ? pair[j][e] + sum : sum;
        if (quarter % 2) total[j][e] = quarter > 1 ? total[j][e] + pair[j][e] : pair[j][e];
      }
  }
}
/// Of a warp's two tiles: over all channels, or half of them. A tile's row r is the head's 4 tile + r / 2 of the lower or upper half.
template <class M>
__device__ __forceinline__ void multiply_state(M& s, int warp, int lane) {
  constexpr bool kShared = M::kWorkers == 16;
  const int tile0 = warp % 8 * 2, half = kShared ? warp / 8 : 0, g = lane / 4, t = lane % 4;
  float total[2][4];
  product<2, kShared ? 2 : 4>(s.row(4 * tile0 + g / 2 + (g & 1) * kHalf) + 4 * t + half * kHalf, 4 * kDim, &operand(s, half * 8, lane),
                              total);
  float* const to = kShared && half ? s.halves : s.keys[0][0];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float* const at =
        to + (s.sums(g, 4 * (tile0 + j) + t) - s.keys[0][0]);  // of P, lower half; the others are as far from it in every lane
#pragma unroll
    for (int e = 0; e < 4; ++e) at[e / 2 * kTokens * kDim + e % 2 * kHalf] = total[j][e];
  }
}

/// A row along the tokens: o_t in the place of Q_t. 128 threads.
template <class M>
__device__ __forceinline__ void outputs(M& s, int row, int n, int turn) {
  float p[kTokens], q[kTokens], beta[kTokens], fk[kTokens], fq[kTokens], l[kTokens], m[kTokens], u[kTokens], v[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) p[t] = *s.sums(t, row), q[t] = *s.sums(kTokens + t, row), v[t] = core::to_float(s.v[t][row]);
  if constexpr (M::kWorkers == 16)
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      p[t] += s.halves[s.sums(t, row) - s.keys[0][0]], q[t] += s.halves[s.sums(kTokens + t, row) - s.keys[0][0]];
  row_of_eight(s.beta[turn & 1], beta), row_of_eight(s.fk, fk), row_of_eight(s.fq, fq);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {  // u: with the norm of its key; P and Q have none yet
    if (t >= n) break;
    row_of_eight(s.triangle[0][t], l), row_of_eight(s.triangle[1][t], m);
    float sum = 0, out = 0;
#pragma unroll
    for (int j = 0; j < t; ++j) sum = fmaf(l[j], u[j], sum), out = fmaf(m[j], u[j], out);
    u[t] = beta[t] * fmaf(-fk[t], p[t] + sum, v[t]) * fk[t];
    *s.sums(kTokens + t, row) = fq[t] * (q[t] + fmaf(m[t], u[t], out));
  }
}

}  // namespace specstate::kda::cuda::plain
