#pragma once
// Ring mode from a frozen state: within a block of 8 tokens the state S0 stays as it was. With D_t the product of the block's decays up to
// token t, and R_tj the part of it after token j (always an ordered product, never a quotient, so an unbounded gate cannot overflow it),
//     P_t = S0 . (D_t k_t) - v_t,   Q_t = S0 . (D_t q_t),   L_tj = k_t . R_tj k_j,   A_tj = q_t . R_tj k_j,
//     u_t = -beta_t (P_t + sum_{j<t} L_tj u_j),   o_t = Q_t + sum_{j<=t} A_tj u_j,   S_n = S0 D_n + sum_j u_j (R_nj k_j)^T.
// P and Q of all tokens are one product of S0 with 16 columns; what tokens do to each other is two triangles of 8 x 8.
//   operands   a warp a token: a column of the triangles; D_t k_t and D_t q_t with their norms, in the order in which tensor cores
//              want them
//   state      tensor cores, 3 x TF32: S0 and the operands in two parts each, without the product of the two small ones. The channels are
//              summed in four quarters that are added in a fixed tree. A warp has 16 rows; of 16 warps two share them, half the channels
//              each, and the sums of 8 rows change hands
//   tokens     in the registers that the product leaves: a lane has one token of its rows, and u goes from each token's lanes to the later
//              ones'
// Lanes that read two rows of the state at a time take one of either half: those lie 64 bytes apart, and no bank is met twice.
#include "kda/cuda/heads.cuh"

namespace specstate::kda::cuda::plain {

/// A step of 8 channels of the operands: a lane's four.
template <class M>
__device__ __forceinline__ float4& operand(M& s, int step, int lane) {
  return reinterpret_cast<float4*>(s.operand)[step * 32 + lane];
}
/// Two channels from d of the column's end.
template <class M>
__device__ __forceinline__ float* end_of(M& s, int j, int d) {
  return s.decay[j] + (d ^ ((j & 1) << 4 | (j & 2)));
}

/// Sums over the warp of 16 values: value lane / 2 ends in lanes 2 i and 2 i + 1.
template <int kHalf = 8>
__device__ __forceinline__ float transposed_sums(float (&x)[16], int lane) {
  constexpr int kDistance = 2 * kHalf;
  const bool high = lane & kDistance;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float keep = high ? x[i + kHalf] : x[i], give = high ? x[i] : x[i + kHalf];
    x[i] = keep + __shfl_xor_sync(kAll, give, kDistance);
  }
  if constexpr (kHalf > 1)
    return transposed_sums<kHalf / 2>(x, lane);
  else
    return x[0] + __shfl_xor_sync(kAll, x[0], 1);
}

/// Column j of the triangles, with the norm of k_j; x ends as R_nj k_j with it.
template <class M>
__device__ __forceinline__ void column(const HeadsCall& a, M& s, int j, int n, int lane, float (&x)[4]) {
  const int d = lane * 4;
  float y[2][4], z[2][4], decay[2][4], sums[16] = {};
  row_of_four(s.keys[0][j] + d, x);
  row_of_four(s.keys[0][j] + d, y[0]), row_of_four(s.keys[1][j] + d, z[0]);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {  // row t = j + i of the column; the next one's numbers on their way
    const int t = j + i;
    if (t >= n) break;
    if (i + 1 < kTokens) {
      const int after = t + 1 < kTokens ? t + 1 : t;
      row_of_four(s.decay[after] + d, decay[(i + 1) % 2]), row_of_four(s.keys[0][after] + d, y[(i + 1) % 2]);
      row_of_four(s.keys[1][after] + d, z[(i + 1) % 2]);
    }
    if (i > 0)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= decay[i % 2][e];
    sums[i] = dot4(x, y[i % 2]), sums[8 + i] = dot4(x, z[i % 2]);
  }
  const float sum = transposed_sums(sums, lane);  // lane 2 i: of k's row j + i, lane 16 + 2 i: of q's
  const float kk = __shfl_sync(kAll, sum, 0), fk = a.l2norm ? inverse_norm(kk) : 1.0f;
  const int t = j + lane / 2 % 8;
  if (lane % 2 == 0 && t < n) s.triangle[lane / 16][t][j] = sum * fk;
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] *= fk;
}

/// D_t k_t and D_t q_t with their norms.
template <class M>
__device__ __forceinline__ void operands(const HeadsCall& a, M& s, int t, int n, int lane) {
  const int d = lane * 4;
  float product[4] = {1, 1, 1, 1}, k[4], q[4], y[4];
#pragma unroll 4
  for (int i = 0; i <= t; ++i) {
    row_of_four(s.decay[i] + d, y);
#pragma unroll
    for (int e = 0; e < 4; ++e) product[e] *= y[e];
  }
  row_of_four(s.keys[0][t] + d, k), row_of_four(s.keys[1][t] + d, q);
  float sums[2] = {dot4(k, k), dot4(q, q)};
  warp_sums(sums);
  const float fk = a.l2norm ? inverse_norm(sums[0]) : 1.0f, fq = a.l2norm ? inverse_norm(sums[1]) * a.scale : a.scale;
  if (lane == 0) s.fk[t] = fk, s.fq[t] = fq;
  if (t == n - 1) *reinterpret_cast<float4*>(s.product + d) = make_float4(product[0], product[1], product[2], product[3]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float x[4] = {k[2 * h] * product[2 * h] * fk, q[2 * h] * product[2 * h] * fq, k[2 * h + 1] * product[2 * h + 1] * fk,
                        q[2 * h + 1] * product[2 * h + 1] * fq};
    operand(s, lane / 4 * 2 + h, t * 4 + lane % 4) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

/// The larger part of x: what tensor cores take of a float.
__device__ __forceinline__ float truncated(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }

/// D += A B with A [16, 8] and B [8, 8] in TF32.
__device__ __forceinline__ void multiply(float (&d)[4], const float4& a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)), "r"(__float_as_uint(a.w)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/// The tiles of 8 rows that a warp ends with. Lane (g, t) has their token g: rows 2 t and 2 t + 1 of P in [0] and [1], of Q in [2] and [3].
template <class M>
struct Sums {
  static constexpr int kTiles = kDim / 8 / M::kWorkers;
  float x[kTiles][4];
};
/// Row r of a tile is the head's 4 tile + r / 2 of the lower or upper half. This one's: of tile j, row 2 t.
template <class M>
__device__ __forceinline__ int row_of_tile(int warp, int j, int lane) {
  const int tile = M::kWorkers == 8 ? warp * 2 + j : warp % 8 * 2 + warp / 8;
  return 4 * tile + lane % 4;
}

/// P and Q of two tiles, over all channels or half of them. In its reads lane (g, t) has row g of S0.
template <class M>
__device__ __forceinline__ void multiply_state(M& s, int warp, int lane, Sums<M>& sums) {
  constexpr bool kShared = M::kWorkers == 16;
  constexpr int kChunks = kShared ? 2 : 4;
  const int tile0 = warp % 8 * 2, half = kShared ? warp / 8 : 0, g = lane / 4, t = lane % 4;
  float total[2][4], pair[2][4];
  const float* const from = s.row(4 * tile0 + g / 2 + (g & 1) * kHalf) + 4 * t + half * kHalf;
  const float4* const operands = &operand(s, half * 8, lane);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    float main[2][4], cross[2][2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = 4 * (tile0 + j) + t;
#pragma unroll
      for (int e = 0; e < 4; ++e) main[j][e] = cross[0][j][e] = cross[1][j][e] = 0;
      if (chunk == 0 && half == 0) main[j][0] = -core::to_float(s.v[g][row]), main[j][1] = -core::to_float(s.v[g][row + kHalf]);
    }
#pragma unroll
    for (int i = 2 * chunk; i < 2 * chunk + 2; ++i) {
      float4 x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) x[j] = *reinterpret_cast<const float4*>(from + j * 4 * kDim + 16 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 y = operands[(2 * i + h) * 32], large = make_float4(truncated(y.x), truncated(y.y), truncated(y.z), truncated(y.w)),
                     small = make_float4(y.x - large.x, y.y - large.y, y.z - large.z, y.w - large.w);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float b0 = h ? x[j].z : x[j].x, b1 = h ? x[j].w : x[j].y, large0 = truncated(b0), large1 = truncated(b1);
          multiply(cross[0][j], small, large0, large1);
          multiply(main[j], large, large0, large1);
          multiply(cross[1][j], large, b0 - large0, b1 - large1);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // (0 + 1) + (2 + 3)
        const float sum = main[j][e] + (cross[0][j][e] + cross[1][j][e]);
        pair[j][e] = chunk % 2 ? pair[j][e] + sum : sum;
        if (chunk == 1) total[j][e] = pair[j][e];
        if (chunk == 3) total[j][e] += pair[j][e];
      }
  }
  if constexpr (kShared) {  // the warp keeps one tile and gives the other away
    const bool upper = half != 0;
    float4* const halves = reinterpret_cast<float4*>(s.halves);
    halves[warp * 32 + lane] = upper ? make_float4(total[0][0], total[0][1], total[0][2], total[0][3])
                                     : make_float4(total[1][0], total[1][1], total[1][2], total[1][3]);
    ptx::barrier_of(4 + warp % 8, 64);
    const float4 other = halves[(warp ^ 8) * 32 + lane];
    const float rest[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.x[0][e] = (upper ? total[1][e] : total[0][e]) + rest[e];
  } else {
#pragma unroll
    for (int j = 0; j < Sums<M>::kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.x[j][e] = total[j][e];
  }
}

/// o of the warp's tiles from P and Q; and u, where the state is to move on.
template <class M>
__device__ __forceinline__ void outputs(M& s, int warp, int n, int turn, bool moves, int lane, Sums<M>& sums) {
  constexpr int kTiles = Sums<M>::kTiles;
  const int g = lane / 4, t = lane % 4;
  const float fk = s.fk[g], fq = s.fq[g], beta = -s.beta[turn & 1][g];
  float l[kTokens], m[kTokens];
  row_of_eight(s.triangle[0][g], l), row_of_eight(s.triangle[1][g], m);
#pragma unroll
  for (int j = 0; j < kTokens; ++j) l[j] *= fk, m[j] *= fq;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (j >= n) break;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float u = __shfl_sync(kAll, beta * sums.x[i][e], 4 * j + t);
        if (g > j) sums.x[i][e] = fmaf(l[j], u, sums.x[i][e]);
        if (g >= j) sums.x[i][2 + e] = fmaf(m[j], u, sums.x[i][2 + e]);
      }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = row_of_tile<M>(warp, i, lane) + e * kHalf;
      if (g < n) *s.result(g, row) = sums.x[i][2 + e];
      if (moves) *s.result(kTokens + g, row) = beta * sums.x[i][e];
    }
}

/// Column j's end, when nobody reads the decays any more.
template <class M>
__device__ __forceinline__ void keep_end(M& s, int j, int lane, const float (&x)[4]) {
  *reinterpret_cast<float2*>(end_of(s, j, lane * 4)) = make_float2(x[0], x[1]);
  *reinterpret_cast<float2*>(end_of(s, j, lane * 4 + 2)) = make_float2(x[2], x[3]);
}

/// S_n = S0 D_n + sum_j u_j (R_nj k_j)^T: 16 rows a warp. Lane (g, t): rows g and g + 8, four channels at a time.
template <class M>
__device__ __forceinline__ void advance_state(M& s, int warp, int lane) {
  if (warp >= kDim / 16) return;
  const int g = lane / 4, t = lane % 4, row = 8 * warp + g / 2 + (g & 1) * kHalf;
  const auto parts = [](const float4& x, float4& large, float4& small) {
    large = make_float4(truncated(x.x), truncated(x.y), truncated(x.z), truncated(x.w));
    small = make_float4(x.x - large.x, x.y - large.y, x.z - large.z, x.w - large.w);
  };
  float4 large, small;
  const int u = kTokens + t;
  parts(make_float4(*s.result(u, row), *s.result(u, row + 4), *s.result(u + 4, row), *s.result(u + 4, row + 4)), large, small);
#pragma unroll 2
  for (int i = 0; i < kDim / 16; ++i) {
    float4* const low = reinterpret_cast<float4*>(s.row(row) + 16 * i + 4 * t);
    float4* const high = reinterpret_cast<float4*>(s.row(row + 4) + 16 * i + 4 * t);
    const float4 d = *reinterpret_cast<const float4*>(s.product + 16 * i + 4 * t), x = *low, y = *high;
    float z[2][4] = {{x.x * d.x, x.y * d.y, y.x * d.x, y.y * d.y}, {x.z * d.z, x.w * d.w, y.z * d.z, y.w * d.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = 16 * i + 4 * (g / 2) + 2 * h;
      const float b0 = end_of(s, t, channel)[g & 1], b1 = end_of(s, t + 4, channel)[g & 1];
      const float large0 = truncated(b0), large1 = truncated(b1);
      multiply(z[h], small, large0, large1);
      multiply(z[h], large, b0 - large0, b1 - large1);
      multiply(z[h], large, large0, large1);
    }
    *low = make_float4(z[0][0], z[0][1], z[1][0], z[1][1]), *high = make_float4(z[0][2], z[0][3], z[1][2], z[1][3]);
  }
  ptx::fence_async();  // before the next head's state comes to the same place
}

}  // namespace specstate::kda::cuda::plain
