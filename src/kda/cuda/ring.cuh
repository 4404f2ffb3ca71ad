#pragma once
// Verify in ring mode from a frozen state: heads of 128 x 128, bfloat16 activations, float32 states, the strides that serving has, chains.
//
// Within a block of 8 tokens the state S0 stays as it was. With D_t the product of the block's decays up to token t, and R_tj the part of it
// after token j (always an ordered product, never a quotient, so an unbounded gate cannot overflow it),
//     P_t = S0 . (D_t k_t) - v_t,   Q_t = S0 . (D_t q_t),   L_tj = k_t . R_tj k_j,   A_tj = q_t . R_tj k_j,
//     T = (1 + beta L)^-1 beta,     u = -T P,               o = Q - (A T) P,         S_n = S0 D_n + sum_j u_j (R_nj k_j)^T.
// P and Q of all tokens are one product of S0 with 16 columns; what tokens do to each other is two triangles of 8 x 8.
//
// A CTA takes a head and then the next; two CTAs share a multiprocessor, so that one has its state on the way while the other works.
// Eight warps work, one more directs:
//   stage      inputs (the three before the block too) and gates, as they are in memory; asked for while the block before is worked on
//   tokens     warps for q, k, v and the gates; a lane has four channels and walks along the tokens. Convolution, SiLU, rounding; records
//              and windows leave from registers
//   operands   a warp a token: a column of the triangles; D_t k_t and D_t q_t with their norms, cut in two parts of 11 bits, in the order
//              in which tensor cores want them
//   state      tensor cores, 3 x TF32: S0 and the operands in two parts each, without the product of the two small ones. The channels are
//              summed in four quarters that are added in a fixed tree. The director inverts the triangle meanwhile
//   output     a warp a token; the sum of squares in units of 16 rows in a fixed tree, as in verify.cuh
// The state arrives by two bulk copies, 64 bytes apart from where they would follow each other: lanes that read two rows at a time take one
// of either half, and meet no bank twice. It is free, and the next head's on its way, as soon as the tensor cores are through.
#include "cuda/ptx.cuh"
#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"

namespace specstate::kda::cuda {

namespace ring {

namespace ptx = specstate::cuda::ptx;

constexpr int kDim = 128, kTokens = 8;  // channels and rows of a head; tokens of a block

/// What the warps need to know of a head: addresses of its first token, of its value rows.
struct Head {
  const bfloat16 *x[3], *window[3];  // q, k, v
  bfloat16* windows[3];              // null: not written
  const float* taps[3];
  const float *bias, *state;
  const bfloat16 *g, *gate;
  bfloat16 *out, *rawk, *rawv;
  float *ring_g, *ring_beta;
  std::int64_t beta;  // offset of the first token's logit
  float amplitude;
  int tokens;  // 0: there are no more heads
};

constexpr int kWorkers = 8, kAllWarps = kWorkers + 1;
constexpr int kHalf = kDim / 2;               // rows of a bulk copy
constexpr int kTiles = kDim / 8 / kWorkers;   // of 8 rows, of a warp
constexpr int kOwn = kTokens * 4 / kWorkers;  // tokens of a warp in the step "tokens"

struct Shared {
  alignas(128) float state_[kDim * kDim + 16];
  alignas(16) bfloat16 xq[kTokens + 3][kDim];
  alignas(16) bfloat16 xk[kTokens + 3][kDim];
  alignas(16) bfloat16 xv[kTokens + 3][kDim];
  alignas(16) bfloat16 g[kTokens][kDim];
  alignas(16) bfloat16 gate[2][kTokens][kDim];
  alignas(16) float keys[2][kTokens][kDim];  // k, q; then P and Q, [16][kDim]
  alignas(16) float decay[kTokens][kDim];    // then the columns' ends R_nj k_j
  alignas(16) bfloat16 v[kTokens][kDim + 8];
  float4 operand[2][16][32];        // large and small parts; then u [8][kDim]
  alignas(16) float product[kDim];  // D_n
  alignas(16) float triangle[2][kTokens][kTokens], of_out[kTokens][kTokens], of_u[kTokens][kTokens];
  float beta[kTokens], fk[kTokens], fq[kTokens];
  alignas(16) float shares[2][kTokens][8];
  Head head[3];
  std::uint64_t tokens_here, state_here;

  __device__ float* row(int r) { return state_ + r * kDim + (r >= kHalf ? 16 : 0); }
  __device__ bfloat16* inputs(int kind) { return kind == 0 ? xq[0] : kind == 1 ? xk[0] : xv[0]; }
  /// Rows from r (four, if r is a multiple of four) of column c: P of 8 tokens, Q of 8 tokens. The order keeps banks apart.
  __device__ float* sums(int c, int r) { return keys[0][0] + c * kDim + (r ^ (c % kTokens * 4)); }
  __device__ float* u(int t) { return reinterpret_cast<float*>(operand) + t * kDim; }
  __device__ float* end(int j, int d) { return decay[j] + (d ^ ((j & 1) << 4 | (j & 2))); }  // two channels
};

__device__ __forceinline__ void row_of_four(const float* row, float (&x)[4]) { unpack(*reinterpret_cast<const Quad<float>*>(row), x); }
__device__ __forceinline__ void row_of_eight(const float* row, float (&x)[8]) {
  const float4 y = *reinterpret_cast<const float4*>(row), z = *reinterpret_cast<const float4*>(row + 4);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
}

/// All warps.
__device__ __forceinline__ void sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kAllWarps) : "memory"); }

// ---- the director ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void describe(const VerifyCall& a, const Item& it, float a_log, Head& to) {
  const bool keys = it.hv % static_cast<int>(a.HV / a.H) == 0;  // what all value heads of a key head have in common is written once
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const Channel& x = c == 0 ? a.q : c == 1 ? a.k : a.v;
    const int head = c == 2 ? it.hv : it.h, first = head * kDim;
    to.x[c] = static_cast<const bfloat16*>(x.x.data) + at(x.x, it.begin, head);
    to.window[c] = static_cast<const bfloat16*>(x.window.data) + at(x.window, it.slot, first);
    to.windows[c] =
        x.windows && it.row >= 0 && (c == 2 || keys) ? static_cast<bfloat16*>(x.windows.data) + at(x.windows, it.row, 0, first) : nullptr;
    to.taps[c] = static_cast<const float*>(x.weight.data) + static_cast<std::int64_t>(first) * 4;
  }
  to.bias = static_cast<const float*>(a.dt_bias.data) + at(a.dt_bias, it.hv);
  to.state = static_cast<const float*>(a.state.data) + at(a.state, it.slot, it.hv);
  to.g = static_cast<const bfloat16*>(a.g.data) + at(a.g, it.begin, it.hv);
  to.gate = a.gate ? static_cast<const bfloat16*>(a.gate.data) + at(a.gate, it.begin, it.hv) : nullptr;
  to.out = static_cast<bfloat16*>(a.out.data) + at(a.out, it.begin, it.hv);
  to.rawk = a.rawk && keys ? static_cast<bfloat16*>(a.rawk.data) + at(a.rawk, it.slot, it.h) : nullptr;
  to.rawv = a.rawv ? static_cast<bfloat16*>(a.rawv.data) + at(a.rawv, it.slot, it.hv) : nullptr;
  to.ring_g = a.ring_g ? static_cast<float*>(a.ring_g.data) + at(a.ring_g, it.slot, it.hv) : nullptr;
  to.ring_beta = a.ring_beta ? static_cast<float*>(a.ring_beta.data) + at(a.ring_beta, it.slot, it.hv) : nullptr;
  to.beta = at(a.beta, it.begin, it.hv);
  to.amplitude = amplitude_of(a_log);
  to.tokens = it.tokens;
}

/// The CTA's heads in turn, 32 at once: their indices come in one round trip. Gives rows of padding their zeros.
struct Heads {
  std::int64_t next, stride;
  Item it = {};
  float a_log = 0;
  unsigned todo = 0;

  __device__ __forceinline__ void pop(const VerifyCall& a, Head& to, int lane) {
    while (!todo && next < a.N * a.HV) {
      const std::int64_t mine = next + lane * stride;
      it = item_of(a, mine);
      if (mine < a.N * a.HV) a_log = load(a.a_log, at(a.a_log, it.hv));
      next += 32 * stride;
      todo = __ballot_sync(kAll, it.tokens > 0 && !it.padding);
      for (unsigned dead = __ballot_sync(kAll, it.tokens > 0 && it.padding); dead; dead &= dead - 1) {
        const int from = __ffs(static_cast<int>(dead)) - 1;
        const int begin = __shfl_sync(kAll, it.begin, from), n = __shfl_sync(kAll, it.tokens, from), hv = __shfl_sync(kAll, it.hv, from);
        clear_out(a, begin, static_cast<std::int64_t>(begin) + n, hv, 0, kDim, lane, 32);
      }
    }
    const int from = __ffs(static_cast<int>(todo)) - 1;
    todo &= todo - 1;
    if (from < 0) {
      if (lane == 0) to.tokens = 0;
    } else if (lane == from) {
      describe(a, it, a_log, to);
    }
    __syncwarp();
  }
};

/// Before the kernels before this one are done: what they may still write is asked for into L2 alone, where they will overwrite it.
__device__ __forceinline__ void prefetch(const VerifyCall& a, std::int64_t head, int lane) {
#if __CUDA_ARCH__ >= 900
  const Item it = item_of<true>(a, head);
  if (it.tokens == 0 || it.padding) return;
  const auto ask = [](const void* p, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
  };
  if (lane == 0) ask(static_cast<const float*>(a.state.data) + at(a.state, it.slot, it.hv), kDim * kDim * 4);
  if (lane >= 1 && lane <= 9 && a.q.weight) {
    const int c = (lane - 1) / 3, tap = (lane - 1) % 3;
    const Channel& x = c == 0 ? a.q : c == 1 ? a.k : a.v;
    const int first = (c == 2 ? it.hv : it.h) * kDim;
    ask(static_cast<const bfloat16*>(x.window.data) + at(x.window, it.slot, first, tap), kDim * 2);
    if (tap == 0) ask(static_cast<const float*>(x.weight.data) + static_cast<std::int64_t>(first) * 4, kDim * 16);
  }
#endif
}

__device__ __forceinline__ void request_state(const Head& head, Shared& s, int lane) {
  if (head.tokens == 0) return;
  ptx::fence_async();  // of what advanced the state for the last block but one of a head; after a barrier of all who did
  if (lane == 0) {
    ptx::barrier_expect(&s.state_here, kDim * kDim * 4);
    ptx::bulk_load(s.row(0), head.state, kHalf * kDim * 4, &s.state_here);
    ptx::bulk_load(s.row(kHalf), head.state + kHalf * kDim, kHalf * kDim * 4, &s.state_here);
  }
  __syncwarp();
}

/// T and A T, each negated, from the triangles; a lane a column.
__device__ __forceinline__ void solve(Shared& s, int n, int lane) {
  const int j = lane % kTokens;
  float x[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= n) break;
    float sum = 0, out = 0, l[kTokens], m[kTokens];
    row_of_eight(s.triangle[0][t], l), row_of_eight(s.triangle[1][t], m);
#pragma unroll
    for (int i = 0; i < t; ++i) {
      sum = fmaf(l[i], x[i], sum);
      out = fmaf(m[i], x[i], out);
    }
    x[t] = s.beta[t] * fmaf(-s.fk[t], sum, t == j ? 1.0f : 0.0f);
    out = fmaf(m[t], x[t], out);
    if (lane < kTokens) s.of_u[t][j] = -x[t], s.of_out[t][j] = -s.fq[t] * out;
  }
}

// ---- the workers ------------------------------------------------------------------------------------------------------------

/// Asks for the inputs of tokens [first, first + n) in 16-byte pieces, half a warp a row.
__device__ __forceinline__ void request_tokens(const VerifyCall& a, const Head& head, Shared& s, int first, int n, int turn) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / 16 % 16, e = thread % 16 * 8;
  const bool conv = static_cast<bool>(a.q.weight);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < 3) {
      const Channel& x = c == 0 ? a.q : c == 1 ? a.k : a.v;
      const bool past = first + row < 3;
      if (row < n + 3 && (conv || row >= 3))
        ptx::copy_async(s.inputs(c) + row * kDim + e,
                        past ? head.window[c] + row * x.window.stride[2] + e : head.x[c] + (first - 3 + row) * x.x.stride[0] + e);
    } else {
      const int t = row % 8;
      if (row < 8 && t < n) ptx::copy_async(s.g[t] + e, head.g + (first + t) * a.g.stride[0] + e);
      if (row >= 8 && t < n && a.gate) ptx::copy_async(s.gate[turn & 1][t] + e, head.gate + (first + t) * a.gate.stride[0] + e);
    }
  }
  arrive_with_copies(&s.tokens_here);
}

/// A lane's taps (q, k, v) or bias (gates), straight from memory and ahead of their use.
__device__ __forceinline__ void load_taps(const Head& head, bool conv, int kind, int lane, float (&taps)[4][4]) {
  if (head.tokens == 0) return;
  if (kind == 3) {
    unpack(*reinterpret_cast<const Quad<float>*>(head.bias + lane * 4), taps[0]);
  } else if (conv) {
#pragma unroll
    for (int e = 0; e < 4; ++e) unpack(*reinterpret_cast<const Quad<float>*>(head.taps[kind] + (lane * 4 + e) * 4), taps[e]);
  }
}

/// Convolution, SiLU and rounding of some tokens of q, k or v.
__device__ __forceinline__ void convolve(const VerifyCall& a, const Head& head, Shared& s, int kind, int t0, int first, int n, int lane,
                                         const float (&taps)[4][4]) {
  const int d = lane * 4;
  const Array& written = kind == 0 ? a.q.windows : kind == 1 ? a.k.windows : a.v.windows;
  const std::int64_t tap = written.stride[3], step = written.stride[1], entry = kind == 1 ? a.rawk.stride[2] : a.rawv.stride[2];
  const bool conv = static_cast<bool>(a.q.weight);
  const bfloat16* x = s.inputs(kind) + t0 * kDim + d;
  bfloat16* windows = head.windows[kind];
  bfloat16* ring = kind == 0 ? nullptr : kind == 1 ? head.rawk : head.rawv;
  if (windows) windows += (first + t0) * step + d;
  if (ring) ring += (first + t0) * entry + d;
  Quad<bfloat16> in[4];
#pragma unroll
  for (int i = 0; i < 3; ++i) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(x + i * kDim);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int t = t0 + i;
    if (t >= n) break;
    in[3] = *reinterpret_cast<const Quad<bfloat16>*>(x + (i + 3) * kDim);
    Quad<bfloat16> raw = in[3];
    if (conv) {
      float z[4][4], y[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) unpack(in[w], z[w]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        y[e] = fmaf(z[3][e], taps[e][3], fmaf(z[2][e], taps[e][2], fmaf(z[1][e], taps[e][1], z[0][e] * taps[e][0])));
        y[e] *= quick_sigmoid(y[e]);
      }
      pack(y, raw);
      if (windows) {
        *reinterpret_cast<Quad<bfloat16>*>(windows) = in[1];
        *reinterpret_cast<Quad<bfloat16>*>(windows + tap) = in[2];
        *reinterpret_cast<Quad<bfloat16>*>(windows + 2 * tap) = in[3];
      }
    }
    if (kind == 2) {
      *reinterpret_cast<Quad<bfloat16>*>(s.v[t] + d) = raw;
    } else {
      float y[4];
      unpack(raw, y);
      *reinterpret_cast<float4*>(s.keys[1 - kind][t] + d) = make_float4(y[0], y[1], y[2], y[3]);
    }
    if (ring && first + t < a.L) *reinterpret_cast<Quad<bfloat16>*>(ring) = raw;
    if (windows) windows += step;
    if (ring) ring += entry;
#pragma unroll
    for (int w = 0; w < 3; ++w) in[w] = in[w + 1];
  }
}

/// Decays of some tokens.
__device__ __forceinline__ void gates(const VerifyCall& a, const Head& head, Shared& s, int t0, int first, int n, int lane,
                                      const float (&bias)[4]) {
  const int d = lane * 4;
  const float amplitude = head.amplitude;
  float* ring = head.ring_g;
  if (ring) ring += (first + t0) * a.ring_g.stride[2] + d;
#pragma unroll 2
  for (int i = 0; i < kOwn; ++i) {
    const int t = t0 + i;
    if (t >= n) break;
    float x[4];
    unpack(*reinterpret_cast<const Quad<bfloat16>*>(s.g[t] + d), x);
    if (a.safe_gate) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = a.lower_bound * sigmoid(amplitude * (x[e] + bias[e]));
    } else {
      const float inverse_beta = 1.0f / a.softplus_beta, threshold = fminf(a.softplus_threshold, 80.0f);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float z = x[e] + bias[e], y = z * a.softplus_beta;
        x[e] = -(amplitude * (y > threshold || z != z ? z : softplus(y) * inverse_beta));
      }
    }
    if (ring && first + t < a.L) *reinterpret_cast<float4*>(ring) = make_float4(x[0], x[1], x[2], x[3]);
    if (ring) ring += a.ring_g.stride[2];
    *reinterpret_cast<float4*>(s.decay[t] + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
  }
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
__device__ __forceinline__ void column(const VerifyCall& a, Shared& s, int j, int n, int lane, float (&x)[4]) {
  const int d = lane * 4;
  float y[4], z[4], sums[16] = {};
  row_of_four(s.keys[0][j] + d, x);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {  // row t = j + i of the column
    const int t = j + i;
    if (t >= n) break;
    if (i > 0) {
      row_of_four(s.decay[t] + d, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= y[e];
    }
    row_of_four(s.keys[0][t] + d, y), row_of_four(s.keys[1][t] + d, z);
    sums[i] = dot4(x, y), sums[8 + i] = dot4(x, z);
  }
  const float sum = transposed_sums(sums, lane);  // lane 2 i: of k's row j + i, lane 16 + 2 i: of q's
  const float kk = __shfl_sync(kAll, sum, 0), fk = a.l2norm ? inverse_norm(kk) : 1.0f;
  const int t = j + lane / 2 % 8;
  if (lane % 2 == 0 && t < n) s.triangle[lane / 16][t][j] = sum * fk;
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] *= fk;
}

/// The larger part of x: what tensor cores take of a float, rounded.
__device__ __forceinline__ float large_part(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xFFFFE000u); }

/// D_t k_t and D_t q_t with their norms.
__device__ __forceinline__ void operands(const VerifyCall& a, Shared& s, int t, int n, int lane) {
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
    float large[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) large[e] = large_part(x[e]);
    const int step = lane / 4 * 2 + h, to = t * 4 + lane % 4;
    s.operand[0][step][to] = make_float4(large[0], large[1], large[2], large[3]);
    s.operand[1][step][to] = make_float4(x[0] - large[0], x[1] - large[1], x[2] - large[2], x[3] - large[3]);
  }
}

/// D += A B with A [16, 8] and B [8, 8] in TF32.
__device__ __forceinline__ void multiply(float (&d)[4], const float4& a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)), "r"(__float_as_uint(a.w)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ float truncated(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }

/// P and Q of the warp's tiles of 8 rows. Lane (g, t) of a tile: row g of S0 in its reads; token g, rows 2 t and 2 t + 1 of the sums. The
/// tile's row r is the head's 4 tile + r / 2 of the lower or upper half.
__device__ __forceinline__ void multiply_state(Shared& s, int warp, int lane) {
  const int tile0 = warp * kTiles, g = lane / 4, t = lane % 4;
  const float* from[kTiles];
  float total[kTiles][4], pair[kTiles][4];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) from[j] = s.row(4 * (tile0 + j) + g / 2 + (g & 1) * kHalf) + 4 * t;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    float main[kTiles][4], cross[kTiles][4];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int row = 4 * (tile0 + j) + t;
#pragma unroll
      for (int e = 0; e < 4; ++e) main[j][e] = cross[j][e] = 0;
      if (chunk == 0) main[j][0] = -core::to_float(s.v[g][row]), main[j][1] = -core::to_float(s.v[g][row + kHalf]);
    }
#pragma unroll
    for (int i = 2 * chunk; i < 2 * chunk + 2; ++i) {
      float4 x[kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) x[j] = *reinterpret_cast<const float4*>(from[j] + 16 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 large = s.operand[0][2 * i + h][lane], small = s.operand[1][2 * i + h][lane];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const float b0 = h ? x[j].z : x[j].x, b1 = h ? x[j].w : x[j].y, large0 = truncated(b0), large1 = truncated(b1);
          multiply(cross[j], small, large0, large1);
          multiply(main[j], large, large0, large1);
          multiply(cross[j], large, b0 - large0, b1 - large1);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // (0 + 1) + (2 + 3)
        const float sum = main[j][e] + cross[j][e];
        pair[j][e] = chunk % 2 ? pair[j][e] + sum : sum;
        if (chunk == 1) total[j][e] = pair[j][e];
        if (chunk == 3) total[j][e] += pair[j][e];
      }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = g + e / 2 * kTokens, row = 4 * (tile0 + j) + t + e % 2 * kHalf;
      *s.sums(c, row) = total[j][e];
    }
}

/// Four rows of token t's output before the norm; and of u, where the state is to move on. The sum of squares of each 16 rows is put aside.
__device__ __forceinline__ void outputs(const VerifyCall& a, Shared& s, int t, int turn, bool moves, int lane, float (&o)[4]) {
  const int d = lane * 4;
  float f[kTokens], p[4];
  row_of_four(s.sums(kTokens + t, d), o), row_of_eight(s.of_out[t], f);
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (j > t) break;
    row_of_four(s.sums(j, d), p);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = fmaf(f[j], p[e], o[e]);
  }
  if (moves) {
    float u[4] = {};
#pragma unroll 1
    for (int j = 0; j <= t; ++j) {
      row_of_four(s.sums(j, d), p);
      const float h = s.of_u[t][j];
#pragma unroll
      for (int e = 0; e < 4; ++e) u[e] = fmaf(h, p[e], u[e]);
    }
    *reinterpret_cast<float4*>(s.u(t) + d) = make_float4(u[0], u[1], u[2], u[3]);
  }
  if (!a.gate) return;
  if (a.round_before_norm) round_bf16(o);
  float sum = dot4(o, o);
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  if (lane % 4 == 0) s.shares[turn & 1][t][d / 16] = sum;
}

/// The gated norm, and the store.
__device__ __forceinline__ void finish(const VerifyCall& a, const Head& head, Shared& s, int first, int t, int turn, int lane,
                                       const float (&weight)[4], float (&o)[4]) {
  const int d = lane * 4;
  if (a.gate) {
    const float4 x = *reinterpret_cast<const float4*>(s.shares[turn & 1][t]),
                 y = *reinterpret_cast<const float4*>(s.shares[turn & 1][t] + 4);
    const float sum = ((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w)), r = rsqrtf(sum * (1.0f / kDim) + a.norm_eps);
    float g[4];
    unpack(*reinterpret_cast<const Quad<bfloat16>*>(s.gate[turn & 1][t] + d), g);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = o[e] * r * weight[e] * quick_sigmoid(g[e]);
  }
  Quad<bfloat16> y;
  pack(o, y);
  *reinterpret_cast<Quad<bfloat16>*>(head.out + (first + t) * a.out.stride[0] + d) = y;
}

/// S_n = S0 D_n + sum_j u_j (R_nj k_j)^T: 16 rows a warp. Lane (g, t): rows g and g + 8, four channels at a time.
__device__ __forceinline__ void advance_state(Shared& s, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, row = 8 * warp + g / 2 + (g & 1) * kHalf;
  const auto parts = [](const float4& x, float4& large, float4& small) {
    large = make_float4(large_part(x.x), large_part(x.y), large_part(x.z), large_part(x.w));
    small = make_float4(x.x - large.x, x.y - large.y, x.z - large.z, x.w - large.w);
  };
  float4 large, small;
  parts(make_float4(s.u(t)[row], s.u(t)[row + 4], s.u(t + 4)[row], s.u(t + 4)[row + 4]), large, small);
#pragma unroll 2
  for (int i = 0; i < kDim / 16; ++i) {
    float4* const low = reinterpret_cast<float4*>(s.row(row) + 16 * i + 4 * t);
    float4* const high = reinterpret_cast<float4*>(s.row(row + 4) + 16 * i + 4 * t);
    const float4 d = *reinterpret_cast<const float4*>(s.product + 16 * i + 4 * t), x = *low, y = *high;
    float z[2][4] = {{x.x * d.x, x.y * d.y, y.x * d.x, y.y * d.y}, {x.z * d.z, x.w * d.w, y.z * d.z, y.w * d.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = 16 * i + 4 * (g / 2) + 2 * h;
      const float b0 = s.end(t, channel)[g & 1], b1 = s.end(t + 4, channel)[g & 1];
      const float large0 = large_part(b0), large1 = large_part(b1);
      multiply(z[h], small, large0, large1);
      multiply(z[h], large, b0 - large0, b1 - large1);
      multiply(z[h], large, large0, large1);
    }
    *low = make_float4(z[0][0], z[0][1], z[1][0], z[1][1]), *high = make_float4(z[0][2], z[0][3], z[1][2], z[1][3]);
  }
  ptx::fence_async();  // before the next head's state comes to the same place
}

/// Grid: CTAs that take heads in turns.
__global__ void __launch_bounds__(32 * kAllWarps, 2) kernel(const __grid_constant__ VerifyCall a, int, int) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t start = blockIdx.x, stride = gridDim.x;
  const bool director = warp == kWorkers;
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.tokens_here, 32 * kWorkers);
    ptx::barrier_init(&s.state_here, 1);
    ptx::fence_barriers();
  }
  if (director) prefetch(a, start, lane);
  __syncwarp();
  wait_for_predecessor();
  launch_successor();

  float weight[4] = {};
  if (a.gate) load_values<true>(a.norm_weight, lane * 4, weight);
  Heads heads = {start, stride};
  if (director) heads.pop(a, s.head[0], lane);
  sync();
  const Head* head = &s.head[0];
  int tokens = head->tokens, number = 0, first = 0;
  const int kind = warp * 4 / kWorkers, t0 = warp % (kWorkers / 4) * kOwn;
  const bool conv = static_cast<bool>(a.q.weight);
  float taps[4][4];
  if (!director && tokens > 0) {
    request_tokens(a, *head, s, 0, min(tokens, kTokens), 0);
    load_taps(*head, conv, kind, lane, taps);
  }
  sync();  // the states of all CTAs at once take four microseconds: behind them the tokens would wait
  if (director) {
    request_state(*head, s, lane);
    heads.pop(a, s.head[1], lane);
  }
  for (int turn = 0; tokens > 0; ++turn) {  // a turn is a block of a head's tokens
    const int n = min(kTokens, tokens - first);
    const bool last = first + n == tokens;
    const Head& next = s.head[(number + 1) % 3];
    if (director) {
      const float logit = lane < n ? load(a.beta, head->beta + (first + lane) * a.beta.stride[0]) : 0.0f;
      if (first == 0) heads.pop(a, s.head[(number + 2) % 3], lane);
      if (lane < n) {
        const float beta = sigmoid(logit);
        s.beta[lane] = beta;
        if (head->ring_beta && first + lane < a.L) head->ring_beta[(first + lane) * a.ring_beta.stride[2]] = beta;
      }
    } else {
      ptx::barrier_wait(&s.tokens_here, turn & 1);
      if (kind < 3)
        convolve(a, *head, s, kind, t0, first, n, lane, taps);
      else
        gates(a, *head, s, t0, first, n, lane, taps[0]);
    }
    sync();
    float end[4];
    if (!director) {
      const int after = last ? 0 : first + n, left = (last ? next.tokens : tokens) - after;
      if (left > 0) request_tokens(a, last ? next : *head, s, after, min(left, kTokens), turn + 1);
      if (warp < n) column(a, s, warp, n, lane, end);
      if (warp < n) operands(a, s, warp, n, lane);
    }
    sync();
    if (director) {
      solve(s, n, lane);
    } else {
      if (!last && warp < n) {
        *reinterpret_cast<float2*>(s.end(warp, lane * 4)) = make_float2(end[0], end[1]);
        *reinterpret_cast<float2*>(s.end(warp, lane * 4 + 2)) = make_float2(end[2], end[3]);
      }
      if (first == 0) ptx::barrier_wait(&s.state_here, number & 1);
      multiply_state(s, warp, lane);
    }
    sync();
    if (director && last) request_state(next, s, lane);
    if (!director && last) load_taps(next, conv, kind, lane, taps);
    float o[4] = {};
    if (warp < n && !director) outputs(a, s, warp, turn, !last, lane, o);
    __syncwarp();
    if (warp < n && !director) finish(a, *head, s, first, warp, turn, lane, weight, o);
    if (!last) {
      sync();
      if (!director) advance_state(s, warp, lane);
      first += n;
    } else {
      head = &next, tokens = head->tokens, first = 0, ++number;
    }
    sync();
  }
  // Tokens that belong to no request.
  const std::int64_t end = a.cu ? index(a.cu, a.N) : a.T;
  if (end >= 0)
    for (std::int64_t i = start; i < (a.T - end) * a.HV; i += stride)
      clear_out(a, end + i / a.HV, end + i / a.HV + 1, static_cast<int>(i % a.HV), 0, kDim, static_cast<int>(threadIdx.x), 32 * kAllWarps);
#endif
}

}  // namespace ring

}  // namespace specstate::kda::cuda
