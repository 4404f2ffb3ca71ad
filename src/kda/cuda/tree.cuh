#pragma once
// Verify of trees in ring mode from a frozen state: the state is read once and never changed, whatever the branches, and no node needs a
// snapshot of its parent. Along the path from the root to node t, D_t is the product of the decays, R_tj that of the nodes after ancestor j:
//     u_t = beta_t (v_t - S0.(D_t k_t) - sum_j (k_t . R_tj k_j) u_j),   o_t = S0.(D_t q_t) + sum_j (q_t . R_tj k_j) u_j,
// j over t's ancestors (and, for o, t itself): the triangle of a chain, masked. Products are taken in the order of the path, never divided.
//
// One CTA a (request, value head), for any strides, head dims and dtypes of activations, states of float32:
//   tokens     a warp a node and a piece (q, k, v, gates); a lane has four channels, which come from memory as they are: the three inputs
//              before a node are its ancestors'. Records and windows leave from registers
//   paths      a warp a node walks up to the root: k_t and q_t take on one decay after the other, and meet each ancestor's key on the way.
//              A second walk leaves D_t k_t and D_t q_t in their place, when no node needs k any more
//   rows       16 lanes hold V / 16 rows of the state, as in recurrence.cuh: all nodes' sums in two multiply-adds an element and node
//   updates    a thread a row, node after node; then the outputs, which need the updates alone, a thread a row and node
//   output     a warp a node: the norm, its sum of squares in units of 16 rows in a fixed tree
#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"
#include "kda/cuda/recurrence.cuh"

namespace specstate::kda::cuda {

namespace tree {

/// Offsets into a CTA's shared memory.
template <class Act, int K, int V>
struct Shared {
  char* base;
  int nodes;  // a multiple of 4

  static constexpr int kOfNode = 4 * (3 * K + 2 * V) + static_cast<int>(sizeof(Act)) * V + 8 + 4 * 4;
  static __host__ __device__ int rounded(int nodes) { return (nodes + 3) / 4 * 4; }
  static std::size_t bytes(int nodes) {
    const int n = rounded(nodes);
    return static_cast<std::size_t>(n) * kOfNode + static_cast<std::size_t>(n) * n * 8;
  }
  __device__ float* k() const { return reinterpret_cast<float*>(base); }  // [nodes, K]; then D_t k_t
  __device__ float* q() const { return k() + nodes * K; }                 // [nodes, K]; then D_t q_t
  __device__ float* decay() const { return k() + 2 * nodes * K; }         // [nodes, K]
  __device__ float* u() const { return k() + 3 * nodes * K; }             // [nodes, V]: S0.(D_t k_t), then u_t / |k_t|
  __device__ float* o() const { return u() + nodes * V; }                 // [nodes, V]: S0.(D_t q_t), then o_t
  __device__ float* triangle() const { return o() + nodes * V; }          // [2, nodes, nodes] of k and of q; without norms
  __device__ std::uint64_t* above() const { return reinterpret_cast<std::uint64_t*>(triangle() + 2 * nodes * nodes); }  // [nodes] ancestors
  __device__ int* parent() const { return reinterpret_cast<int*>(above() + nodes); }                                    // [nodes]
  __device__ float* beta() const { return reinterpret_cast<float*>(parent() + nodes); }                                 // [nodes]
  __device__ float* fk() const { return beta() + nodes; }                                                               // [nodes] 1 / |k|
  __device__ float* fq() const { return beta() + 2 * nodes; }                       // [nodes] scale / |q|
  __device__ Act* v() const { return reinterpret_cast<Act*>(beta() + 3 * nodes); }  // [nodes, V]
};

/// Parents and ancestors; false: some parent does not come before its child.
template <class M>
__device__ __forceinline__ bool read_parents(const VerifyCall& a, std::int64_t request, int n, const M& s) {
  bool bad = false;
  for (int t = static_cast<int>(threadIdx.x); t < n; t += kThreads) {
    const std::int64_t p = t == 0 ? -1 : index(a.parents, request, t);
    bad |= p >= t;
    s.parent()[t] = p < 0 ? -1 : static_cast<int>(p);
  }
  if (__syncthreads_or(bad)) return false;
  for (int t = static_cast<int>(threadIdx.x); t < n; t += kThreads) {
    std::uint64_t mask = 0;
    for (int p = s.parent()[t]; p >= 0; p = s.parent()[p]) mask |= std::uint64_t{1} << p;
    s.above()[t] = mask;
  }
  __syncthreads();
  return true;
}

/// Convolution, SiLU and rounding of node t for q, k or v (c), four channels from d on.
template <class Act, int K, int V, class M>
__device__ __forceinline__ void convolve(const VerifyCall& a, const Item& it, const M& s, int c, int t, int d) {
  const int dim = c == 2 ? V : K, head = c == 2 ? it.hv : it.h;
  if (d >= dim) return;
  const Channel& x = c == 0 ? a.q : c == 1 ? a.k : a.v;
  // What all value heads of a key head have in common is written once.
  const bool writes = c == 2 || it.hv % static_cast<int>(a.HV / a.H) == 0;
  const std::int64_t channel = static_cast<std::int64_t>(head) * dim + d;
  const auto input = [&](int node) { return load_quad<Act, false>(x.x, at(x.x, it.begin + node, head) + d); };
  Quad<Act> in[4] = {};
  in[3] = input(t);
  float y[4];
  if (x.weight) {
    Quad<Act> past[3] = {};
    if (it.slot >= 0) load_window(x.window, at(x.window, it.slot, channel), x.window.stride[1], x.window.stride[2], past);
    int node = s.parent()[t], behind = 2;
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      if (node >= 0) {
        in[i] = input(node), node = s.parent()[node];
      } else {
        in[i] = behind == 2 ? past[2] : behind == 1 ? past[1] : past[0];
        --behind;
      }
    }
    float z[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack(in[i], z[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float taps[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) taps[i] = load(x.weight, at(x.weight, channel + e, i));
      y[e] = fmaf(z[3][e], taps[3], fmaf(z[2][e], taps[2], fmaf(z[1][e], taps[1], z[0][e] * taps[0])));
      y[e] *= sizeof(Act) == 2 ? quick_sigmoid(y[e]) : sigmoid(y[e]);
    }
    if constexpr (sizeof(Act) == 2) round_bf16(y);
    if (writes && x.windows && it.row >= 0)
      store_window<false>(x.windows, at(x.windows, it.row, t, channel), x.windows.stride[2], x.windows.stride[3], in[1], in[2], in[3]);
  } else {
    unpack(in[3], y);
  }
  Quad<Act> raw;
  pack(y, raw);
  if (c == 2)
    *reinterpret_cast<Quad<Act>*>(s.v() + t * V + d) = raw;
  else
    put4((c == 0 ? s.q() : s.k()) + t * K + d, y, 1.0f);
  const Array& ring = c == 1 ? a.rawk : a.rawv;
  if (writes && c > 0 && ring && it.slot >= 0 && t < a.L) store_quad<false>(ring, at(ring, it.slot, head, t) + d, raw);
}

/// Decay and beta of node t.
template <int K, class M>
__device__ __forceinline__ void gates(const VerifyCall& a, const Item& it, const M& s, int t, int lane) {
  const bool records = a.rawk && it.slot >= 0 && t < a.L;
  const int d = lane * 4;
  if (d < K) {
    float x[4], bias[4];
    const std::int64_t g = at(a.g, it.begin + t, it.hv), b = at(a.dt_bias, it.hv);
    if (a.scalar_gate) {
      x[0] = x[1] = x[2] = x[3] = load(a.g, g), bias[0] = bias[1] = bias[2] = bias[3] = load(a.dt_bias, b);
    } else {
      load_values<false>(a.g, g + d, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) bias[e] = load(a.dt_bias, b + (d + e) * a.dt_bias.stride[1]);
    }
    const Gate gate = {a.safe_gate,
                       a.lower_bound,
                       a.softplus_beta,
                       1.0f / a.softplus_beta,
                       fminf(a.softplus_threshold, 80.0f),
                       amplitude_of(load(a.a_log, at(a.a_log, it.hv)))};
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = gate.log_decay(x[e] + bias[e]);
    if (records) {
      const std::int64_t to = at(a.ring_g, it.slot, it.hv, t);
      if (!a.scalar_gate) {
        Quad<float> raw;
        pack(x, raw);
        store_quad<false>(a.ring_g, to + d, raw);
      } else if (lane == 0) {
        store(a.ring_g, to, x[0]);
      }
    }
    *reinterpret_cast<float4*>(s.decay() + t * K + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
  }
  if (lane == 0) {
    const float b = sigmoid(load(a.beta, at(a.beta, it.begin + t, it.hv)));
    s.beta()[t] = b;
    if (records) store(a.ring_beta, at(a.ring_beta, it.slot, it.hv, t), b);
  }
}

__device__ __forceinline__ void row_of_four(const float* row, int d, bool active, float (&x)[4]) {
  if (active) unpack(*reinterpret_cast<const Quad<float>*>(row + d), x);
}

/// Norms and row t of both triangles.
template <int K, class M>
__device__ __forceinline__ void walk(const VerifyCall& a, const M& s, int t, int lane) {
  const int d = lane * 4;
  const bool active = d < K;
  float k[4] = {}, q[4] = {}, y[4] = {};
  row_of_four(s.k() + t * K, d, active, k), row_of_four(s.q() + t * K, d, active, q);
  float own[3] = {dot4(k, k), dot4(q, q), dot4(k, q)};
  warp_sums(own);
  float* const of_k = s.triangle() + t * s.nodes;
  float* const of_q = of_k + s.nodes * s.nodes;
  if (lane == 0) {
    s.fk()[t] = a.l2norm ? inverse_norm(own[0]) : 1.0f, s.fq()[t] = a.l2norm ? inverse_norm(own[1]) * a.scale : a.scale;
    of_q[t] = own[2];
  }
  for (int below = t, j = s.parent()[t]; j >= 0; below = j, j = s.parent()[j]) {
    row_of_four(s.decay() + below * K, d, active, y);
#pragma unroll
    for (int e = 0; e < 4; ++e) k[e] *= y[e], q[e] *= y[e];
    row_of_four(s.k() + j * K, d, active, y);
    float sums[2] = {dot4(k, y), dot4(q, y)};
    warp_sums(sums);
    if (lane == 0) of_k[j] = sums[0], of_q[j] = sums[1];
  }
}

/// D_t k_t and D_t q_t in the place of k_t and q_t.
template <int K, class M>
__device__ __forceinline__ void scale(const M& s, int t, int lane) {
  const int d = lane * 4;
  if (d >= K) return;
  float k[4], q[4], y[4];
  row_of_four(s.k() + t * K, d, true, k), row_of_four(s.q() + t * K, d, true, q);
  for (int j = t; j >= 0; j = s.parent()[j]) {
    row_of_four(s.decay() + j * K, d, true, y);
#pragma unroll
    for (int e = 0; e < 4; ++e) k[e] *= y[e], q[e] *= y[e];
  }
  put4(s.k() + t * K + d, k, 1.0f), put4(s.q() + t * K + d, q, 1.0f);
}

template <class Act, int K, int V>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ VerifyCall a, int nodes, int) {
  extern __shared__ __align__(128) char memory[];
  using M = Shared<Act, K, V>;
  constexpr int R = V / kRowUnit;
  const M s = {memory, M::rounded(nodes)};
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_block(), lane = thread % 32, d = lane * 4;
  wait_for_predecessor();
  launch_successor();

  const std::int64_t head = blockIdx.x, end = a.cu ? index(a.cu, a.N) : a.T;
  if (end >= 0)  // tokens that belong to no request
    for (std::int64_t i = head; i < (a.T - end) * a.HV; i += gridDim.x)
      clear_out(a, end + i / a.HV, end + i / a.HV + 1, static_cast<int>(i % a.HV), 0, V, thread, kThreads);
  const Item it = item_of(a, head);
  const int n = it.tokens;
  if (n == 0) return;
  if (it.padding || n > nodes || !read_parents(a, head / a.HV, n, s))
    return clear_out(a, it.begin, static_cast<std::int64_t>(it.begin) + n, it.hv, 0, V, thread, kThreads);

  Rows<K, R> x;
  clear_rows(x);
  if (it.slot >= 0) load_rows<K, R>(x, static_cast<const float*>(a.state.data) + at(a.state, it.slot, it.hv), lane);

#pragma unroll 1
  for (int i = warp; i < 4 * n; i += kWarps)
    if (i % 4 < 3)
      convolve<Act, K, V>(a, it, s, i % 4, i / 4, d);
    else
      gates<K>(a, it, s, i / 4, lane);
  __syncthreads();
#pragma unroll 1
  for (int t = warp; t < n; t += kWarps) walk<K>(a, s, t, lane);
  __syncthreads();
#pragma unroll 1
  for (int t = warp; t < n; t += kWarps) scale<K>(s, t, lane);
  __syncthreads();

  {
    constexpr int C = K / 16;
    const int l = lane & 15;
    float* const sums = (lane & 1 ? s.o() : s.u()) + group_row<R>() + row_of<R>(l);
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      float p[R], r[R], k[C], q[C];
      channels<K>(s.k() + t * K, l, k), channels<K>(s.q() + t * K, l, q);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        p[i] = 0, r[i] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) p[i] = fmaf(x.s[i][c], k[c], p[i]), r[i] = fmaf(x.s[i][c], q[c], r[i]);
      }
      sums[t * V] = row_sums<R, true>(p, r, lane);  // the same from all lanes that have it
    }
  }
  __syncthreads();
  const auto with_ancestors = [&](float sum, const float* triangle, std::uint64_t nodes_above, int row) {
    for (std::uint64_t left = nodes_above; left; left &= left - 1) {
      const int j = __ffsll(static_cast<long long>(left)) - 1;
      sum = fmaf(triangle[j], s.u()[j * V + row], sum);
    }
    return sum;
  };
  if (thread < V) {
#pragma unroll 1
    for (int t = 0; t < n; ++t) {
      float* const u = s.u() + t * V + thread;
      const float sum = with_ancestors(*u, s.triangle() + t * s.nodes, s.above()[t], thread) * s.fk()[t];
      *u = (core::to_float(s.v()[t * V + thread]) - sum) * s.beta()[t] * s.fk()[t];
    }
  }
  __syncthreads();
  for (int i = thread; i < n * V; i += kThreads) {
    const int t = i / V;
    const float* const triangle = s.triangle() + (s.nodes + t) * s.nodes;
    s.o()[i] = with_ancestors(s.o()[i], triangle, s.above()[t] | std::uint64_t{1} << t, i % V) * s.fq()[t];
  }
  __syncthreads();

  float weight[4] = {};
  if (a.gate && d < V)
#pragma unroll
    for (int e = 0; e < 4; ++e) weight[e] = load(a.norm_weight, at(a.norm_weight, d + e));
#pragma unroll 1
  for (int t = warp; t < n; t += kWarps) {
    float o[4] = {};
    row_of_four(s.o() + t * V, d, d < V, o);
    if (a.gate) {
      if (a.round_before_norm && sizeof(Act) == 2) round_bf16(o);
      float sum = dot4(o, o);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(kAll, sum, distance);
      if (d < V) {
        const float r = rsqrtf(sum * (1.0f / V) + a.norm_eps);
        float g[4];
        load_values<false>(a.gate, at(a.gate, it.begin + t, it.hv) + d, g);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = o[e] * r * weight[e] * sigmoid(g[e]);
      }
    }
    if (d < V) {
      Quad<Act> y;
      pack(o, y);
      store_quad<false>(a.out, at(a.out, it.begin + t, it.hv) + d, y);
    }
  }
}

template <class Act, int K, int V>
VerifyKernel form() {
  return {kernel<Act, K, V>, Shared<Act, K, V>::bytes};
}

}  // namespace tree

}  // namespace specstate::kda::cuda
