#pragma once
// Verify and decode: convolution, gates, recurrence and output norm of one (request, value head) in one CTA, or in a cluster of CTAs
// that cut the head's value rows among them.
//
// What moves: the head's state once (64 KiB at K = V = 128), and per token some 4 KiB of activations, windows and records. The state's
// copy into shared memory is started as soon as the slot is known and runs under all that comes before the recurrence:
//   tokens    a warp takes two tokens' q and k, or their v, gates and beta; a lane four channels. Convolution, SiLU, rounding, norm, log
//             decay; records and windows leave from registers; what the recurrence needs goes to shared memory as fp32.
//   rows      `advance` of recurrence.cuh token by token with the state in registers; o goes to shared memory.
//   output    a warp takes a token; the sum of squares is taken in units of 16 rows that are added in a fixed tree, so that it has the
//             same bits however a head is cut; a cluster pushes its units to all its CTAs before one barrier.
// Requests of more tokens than a block are worked on block by block, the state staying in registers.
//
// kFrozen is the faster form for ring mode: the state stays as it was before the first token and all of P = S0 [D_t k_t | D_t q_t] is
// computed in two multiply-adds an element and token instead of four, with no dependence between tokens; what the tokens do to each
// other is a triangle of W x W dot products (D_t the product of decays, R_tj the part of it between two tokens):
//     u_t = beta_t (v_t - S0.(D_t k_t) - sum_{j<t} (k_t . R_tj k_j) u_j),   o_t = S0.(D_t q_t) + sum_{j<=t} (q_t . R_tj k_j) u_j.
// R_tj is always an ordered product, never a quotient, so an unbounded gate cannot overflow it.
#include <cooperative_groups.h>

#include "kda/cuda/backend.hpp"
#include "kda/cuda/recurrence.cuh"

namespace specstate::kda::cuda {

constexpr int kChunk = 2;      // tokens of a warp's unit
constexpr int kMaxBlock = 16;  // tokens whose operands are in shared memory at once
constexpr int kMaxTree = 64;   // nodes of a tree: ancestors are a 64-bit mask

/// Where things are in a CTA's shared memory, for `block` tokens. Everything is an offset from the base that costs no register.
template <int K, int R, class S, bool kTree, bool kFrozen>
struct Shared {
  static constexpr int kRows = kRowUnit * R;
  char* base;
  int block;

  static constexpr int kState = kRows * K * static_cast<int>(sizeof(S));
  /// Bytes of the parts that grow with the block, by token, each a multiple of 16 for a block of a multiple of 4.
  static constexpr int kOfToken = 4 * (3 * K + 2 * kRows + 16 + (kTree || kFrozen ? kRows : 0) + 2) + (kTree ? 12 : 0);

  static __host__ __device__ int rounded(int block) { return (block + 3) / 4 * 4; }
  static __host__ __device__ std::size_t bytes(int block) {
    const int b = rounded(block);
    return static_cast<std::size_t>(kState) + static_cast<std::size_t>(b) * kOfToken + (kFrozen ? 8 * static_cast<std::size_t>(b) * b : 0);
  }

  __device__ S* state() const { return reinterpret_cast<S*>(base); }               // [rows, K]
  __device__ float* k() const { return reinterpret_cast<float*>(base + kState); }  // [block, K]
  __device__ float* q() const { return k() + block * K; }                          // [block, K]
  __device__ float* decay() const { return k() + 2 * block * K; }                  // [block, K]
  __device__ float* v() const { return k() + 3 * block * K; }                      // [block, rows]; o takes v's place
  __device__ float* gate() const { return v() + block * kRows; }                   // [block, rows] sigmoid of the norm's gate
  __device__ float* units() const { return v() + 2 * block * kRows; }              // [2, block, 8] sums of squares of 16 rows
  __device__ float* beta() const { return units() + 16 * block; }                  // [block]
  __device__ float* kq() const { return units() + 17 * block; }                    // [block] k . q
  __device__ float* u() const { return units() + 18 * block; }                     // [block, rows] (trees, frozen)
  __device__ float* triangle() const { return u() + block * kRows; }               // [2, block, block] (frozen)
  __device__ std::uint64_t* above() const { return reinterpret_cast<std::uint64_t*>(u() + block * kRows); }  // [block] ancestors (trees)
  __device__ int* parent() const { return reinterpret_cast<int*>(above() + block); }                         // [block] (trees)
};

/// One (request, value head, part of its rows).
struct Item {
  std::int64_t slot, row, begin;  // slot -1: from zeros; row -1: no snapshots and windows
  int tokens, hv, h, v0;          // v0: first value row of this CTA
  bool padding;
  bool keys;  // writes what all CTAs of the key head have in common
};

__device__ __forceinline__ Item item_of(const VerifyCall& a, std::int64_t request, int hv, int v0) {
  Item it;
  const int group = static_cast<int>(a.HV / a.H);
  it.hv = hv, it.h = hv / group, it.v0 = v0;
  it.keys = v0 == 0 && hv % group == 0;
  const std::int64_t slot = index(a.slots, request), each = a.T / a.N;
  std::int64_t begin = request * each, end = begin + each;
  if (a.cu) begin = index(a.cu, request), end = index(a.cu, request + 1);
  const bool null = slot <= a.null_slot;
  const bool inside = 0 <= begin && begin <= end && end <= a.T;
  it.begin = begin, it.tokens = inside ? static_cast<int>(end - begin) : 0;
  it.slot = null ? -1 : slot, it.row = -1;
  it.padding = null ? !a.null_from_zero : slot < 0 || slot >= a.pool;
  if ((a.snapshots || a.q.windows) && (!null || (a.null_from_zero && a.snapshots))) {
    it.row = a.rows ? index(a.rows, request) : request;
    const bool none = a.null_from_zero && it.row < 0;
    if (none) it.row = -1;
    it.padding |= !none && (it.row < 0 || it.row >= a.row_count);
  }
  it.padding |= it.tokens > a.steps || (a.parents && it.tokens > a.columns);
  return it;
}

/// Zeros for tokens [begin, end) of the CTA's value rows.
template <class Act, bool kVec>
__device__ __forceinline__ void clear_out(const VerifyCall& a, std::int64_t begin, std::int64_t end, int hv, int v0, int rows) {
  const int quads = rows / 4;
  for (std::int64_t i = threadIdx.x; i < (end - begin) * quads; i += kThreads)
    store_quad<kVec>(a.out, at(a.out, begin + i / quads, hv) + v0 + i % quads * 4, Quad<Act>{});
}

/// What the convolution of up to kChunk tokens and four channels reads: loaded before anything is written, so that all loads of a
/// unit are on their way together.
template <class Act>
struct Inputs {
  Quad<Act> x[kChunk][4];  // oldest first
  float taps[4][4];        // [channel, tap]
};

/// Tokens first + [0, count) of the request, channels d to d + 3 of a head of `dim`.
template <class Act, bool kPlain, class M>
__device__ __forceinline__ void read_inputs(const Channel& c, const Item& it, const M& s, bool tree, int head, int dim, int d, int first,
                                            int count, Inputs<Act>& in) {
  const std::int64_t row = it.begin + first;
  if (!c.weight) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j)
      if (j < count) in.x[j][3] = load_quad<Act, kPlain>(c.x, at(c.x, row + j, head) + d);
    return;
  }
  const std::int64_t channel = static_cast<std::int64_t>(head) * dim + d;
  Quad<Act> window[3] = {};
  if ((tree || first < 3) && it.slot >= 0)
    load_window<Act, kPlain>(c.window, at(c.window, it.slot, channel), c.window.stride[1], c.window.stride[2], window);
  // Input i of a request: 0 to 2 are its window, 3 + t is token t.
  const auto input = [&](int i) {
    return i == 0 ? window[0] : i == 1 ? window[1] : i == 2 ? window[2] : load_quad<Act, kPlain>(c.x, at(c.x, it.begin + i - 3, head) + d);
  };
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j >= count) break;
    if (tree) {  // the three inputs before a node are its ancestors'
      int node = s.parent()[first + j], past = 0;
#pragma unroll
      for (int t = 2; t >= 0; --t) {
        in.x[j][t] = input(node >= 0 ? node + 3 : 2 - past);
        if (node >= 0)
          node = s.parent()[node];
        else
          ++past;
      }
    } else {
#pragma unroll
      for (int t = 0; t < 3; ++t) in.x[j][t] = j == 0 ? input(first + t) : in.x[j - 1][t + 1];
    }
    in.x[j][3] = input(first + j + 3);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (kPlain || c.weight.vec) {
      unpack(load_quad<float, true>(c.weight, (channel + e) * 4), in.taps[e]);
    } else {
#pragma unroll
      for (int t = 0; t < 4; ++t) in.taps[e][t] = load(c.weight, at(c.weight, channel + e, t));
    }
  }
}

/// q, k or v as the recurrence uses them; the windows after each token are written.
template <bool kPlain, class Act>
__device__ __forceinline__ void convolve(const Channel& c, const Item& it, bool writes, int head, int dim, int d, int first, int count,
                                         const Inputs<Act>& in, float (&y)[kChunk][4]) {
  const std::int64_t channel = static_cast<std::int64_t>(head) * dim + d;
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j >= count) break;
    if (!c.weight) {
      unpack(in.x[j][3], y[j]);
      continue;
    }
    float tap[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      unpack(in.x[j][t], tap);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[j][e] = t == 0 ? tap[e] * in.taps[e][0] : fmaf(tap[e], in.taps[e][t], y[j][e]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) y[j][e] *= sigmoid(y[j][e]);
    if constexpr (sizeof(Act) == 2) round_bf16(y[j]);
    if (writes && c.windows && it.row >= 0)
      store_window<kPlain>(c.windows, at(c.windows, it.row, first + j, channel), c.windows.stride[2], c.windows.stride[3], in.x[j][1],
                           in.x[j][2], in.x[j][3]);
  }
}

/// q and k of tokens first + [0, count) of the request, at `place` of the block.
template <class Act, int K, bool kPlain, class M>
__device__ __forceinline__ void keys_unit(const VerifyCall& a, const Item& it, const M& s, int first, int place, int count, int lane) {
  const bool active = lane * 4 < K, tree = !kPlain && a.parents;
  const int d = lane * 4;
  float q[kChunk][4] = {}, k[kChunk][4] = {}, sums[3 * kChunk];
  if (active) {
    Inputs<Act> in_q, in_k;
    read_inputs<Act, kPlain>(a.q, it, s, tree, it.h, K, d, first, count, in_q);
    read_inputs<Act, kPlain>(a.k, it, s, tree, it.h, K, d, first, count, in_k);
    convolve<kPlain>(a.q, it, it.keys, it.h, K, d, first, count, in_q, q);
    convolve<kPlain>(a.k, it, it.keys, it.h, K, d, first, count, in_k, k);
    if (a.rawk && it.keys && it.slot >= 0) {
#pragma unroll
      for (int j = 0; j < kChunk; ++j)
        if (j < count && first + j < a.L) {
          Quad<Act> raw;
          pack(k[j], raw);
          store_quad<kPlain>(a.rawk, at(a.rawk, it.slot, it.h, first + j) + d, raw);
        }
    }
  }
#pragma unroll
  for (int j = 0; j < kChunk; ++j) sums[3 * j] = dot4(q[j], q[j]), sums[3 * j + 1] = dot4(k[j], k[j]), sums[3 * j + 2] = dot4(q[j], k[j]);
  warp_sums(sums);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j >= count) break;
    const float fk = a.l2norm ? inverse_norm(sums[3 * j + 1]) : 1.0f, fq = a.l2norm ? inverse_norm(sums[3 * j]) * a.scale : a.scale;
    if (active) put4(s.q() + (place + j) * K + d, q[j], fq), put4(s.k() + (place + j) * K + d, k[j], fk);
    if (lane == 0) s.kq()[place + j] = sums[3 * j + 2] * fk * fq;
  }
}

/// v, the norm's gate, decay and beta of the same tokens.
template <class Act, int K, bool kPlain, class M>
__device__ __forceinline__ void values_unit(const VerifyCall& a, const Item& it, const M& s, int rows, int first, int place, int count,
                                            int lane) {
  const int d = lane * 4;
  const bool has_rows = d < rows, has_keys = d < K, recorded = a.rawk && it.slot >= 0, shared = recorded && it.v0 == 0;
  Inputs<Act> in;
  float norm_gate[kChunk][4] = {}, ld[kChunk][4] = {}, bias[4] = {}, beta[kChunk] = {};
  if (has_rows) read_inputs<Act, kPlain>(a.v, it, s, !kPlain && a.parents, it.hv, static_cast<int>(a.V), it.v0 + d, first, count, in);
  const float a_log = load(a.a_log, at(a.a_log, it.hv));
  if (a.scalar_gate)
    bias[0] = bias[1] = bias[2] = bias[3] = load(a.dt_bias, at(a.dt_bias, it.hv));
  else if (has_keys)
    load_values<kPlain>(a.dt_bias, at(a.dt_bias, it.hv) + d, bias);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j >= count) break;
    const std::int64_t token = it.begin + first + j;
    if (a.gate && has_rows) load_values<kPlain>(a.gate, at(a.gate, token, it.hv) + it.v0 + d, norm_gate[j]);
    if (a.scalar_gate)
      ld[j][0] = ld[j][1] = ld[j][2] = ld[j][3] = load(a.g, at(a.g, token, it.hv));
    else if (has_keys)
      load_values<kPlain>(a.g, at(a.g, token, it.hv) + d, ld[j]);
    beta[j] = load(a.beta, at(a.beta, token, it.hv));
  }

  const Gate gate = {a.safe_gate, a.lower_bound, a.softplus_beta, a.softplus_threshold, amplitude_of(a_log)};
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j >= count) break;
    const bool in_ring = shared && first + j < a.L;
    if (has_keys) {
#pragma unroll
      for (int e = 0; e < 4; ++e) ld[j][e] = gate.log_decay(ld[j][e] + bias[e]);
      if (in_ring && !a.scalar_gate) {
        Quad<float> raw;
        pack(ld[j], raw);
        store_quad<kPlain>(a.ring_g, at(a.ring_g, it.slot, it.hv, first + j) + d, raw);
      }
      if (in_ring && a.scalar_gate && lane == 0) store(a.ring_g, at(a.ring_g, it.slot, it.hv, first + j), ld[j][0]);
#pragma unroll
      for (int e = 0; e < 4; ++e) ld[j][e] = expf(ld[j][e]);
      put4(s.decay() + (place + j) * K + d, ld[j], 1.0f);
    }
    if (lane == 0) {
      const float b = sigmoid(beta[j]);
      s.beta()[place + j] = b;
      if (in_ring) store(a.ring_beta, at(a.ring_beta, it.slot, it.hv, first + j), b);
    }
  }
  if (!has_rows) return;
  float v[kChunk][4];
  convolve<kPlain>(a.v, it, true, it.hv, static_cast<int>(a.V), it.v0 + d, first, count, in, v);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j >= count) break;
    put4(s.v() + (place + j) * rows + d, v[j], 1.0f);
    if (recorded && first + j < a.L) {
      Quad<Act> raw;
      pack(v[j], raw);
      store_quad<kPlain>(a.rawv, at(a.rawv, it.slot, it.hv, first + j) + it.v0 + d, raw);
    }
    if (a.gate) {
#pragma unroll
      for (int e = 0; e < 4; ++e) norm_gate[j][e] = sigmoid(norm_gate[j][e]);
      put4(s.gate() + (place + j) * rows + d, norm_gate[j], 1.0f);
    }
  }
}

/// Parents and ancestor masks of a tree; false: some parent does not come before its child.
template <class M>
__device__ __forceinline__ bool read_tree(const VerifyCall& a, std::int64_t request, int tokens, const M& s) {
  bool bad = false;
  for (int t = static_cast<int>(threadIdx.x); t < tokens; t += kThreads) {
    const std::int64_t p = t == 0 ? -1 : index(a.parents, request, t);
    bad |= p >= t;
    s.parent()[t] = p < 0 ? -1 : static_cast<int>(p);
  }
  if (__syncthreads_or(bad)) return false;
  for (int t = static_cast<int>(threadIdx.x); t < tokens; t += kThreads) {
    std::uint64_t mask = 0;
    for (int p = s.parent()[t]; p >= 0; p = s.parent()[p]) mask |= std::uint64_t{1} << p;
    s.above()[t] = mask;
  }
  __syncthreads();
  return true;
}

/// Frozen form, after the tokens: the triangles, then decays into k and q. A warp takes column j: x = R_tj k_j for t = j, j+1, ...
template <int K, class M>
__device__ __forceinline__ void triangles(const M& s, int n, int block) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, d = lane * 4;
  for (int turn = 0; turn < 2; ++turn) {
    const int j = turn == 0 ? warp : 2 * kWarps - 1 - warp;  // long and short columns together
    if (j >= n) continue;
    float x[4] = {};
    if (d < K) unpack(*reinterpret_cast<const Quad<float>*>(s.k() + j * K + d), x);
    for (int t = j + 1; t < n; ++t) {
      float sums[2] = {};
      if (d < K) {
        float y[4], z[4];
        unpack(*reinterpret_cast<const Quad<float>*>(s.decay() + t * K + d), y);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] *= y[e];
        unpack(*reinterpret_cast<const Quad<float>*>(s.k() + t * K + d), y);
        unpack(*reinterpret_cast<const Quad<float>*>(s.q() + t * K + d), z);
        sums[0] = dot4(x, y), sums[1] = dot4(x, z);
      }
      warp_sums(sums);
      if (lane < 2) s.triangle()[(lane * block + t) * block + j] = lane == 0 ? sums[0] : sums[1];
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < 2 * K; c += kThreads) {
    float* x = c < K ? s.k() + c : s.q() + c - K;
    float product = 1;
#pragma unroll 4
    for (int t = 0; t < n; ++t) {
      product *= s.decay()[t * K + c % K];
      x[t * K] *= product;
    }
  }
  __syncthreads();
}

/// The frozen pass over the rows: o of n tokens into s.v().
template <int K, int R, class M>
__device__ __forceinline__ void frozen_rows(const Rows<K, R>& x, const M& s, int n, int block, int rows, int lane) {
  constexpr int C = K / 16, kCopies = 16 / R;
  const int l = lane & 15, row = group_row<R>() + row_of<R>(l);
  const float* const mine = s.triangle() + (lane & 1) * block * block;
  for (int t = 0; t < n; ++t) {
    float p[R], r[R];
    {
      float k[C], q[C];
      channels<K>(s.k() + t * K, l, k);
      channels<K>(s.q() + t * K, l, q);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        p[i] = 0, r[i] = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          p[i] = fmaf(x.s[i][c], k[c], p[i]);
          r[i] = fmaf(x.s[i][c], q[c], r[i]);
        }
      }
    }
    float sum = row_sums<R, true>(p, r, lane);
    float others = 0;
    for (int j = 0; j < t; ++j) others = fmaf(mine[t * block + j], s.u()[j * rows + row], others);
    sum += others;
    const float u = (s.v()[t * rows + row] - sum) * s.beta()[t];  // of even lanes
    const float neighbour = __shfl_xor_sync(kAll, u, 1);
    if (l % kCopies == 0) s.u()[t * rows + row] = u;
    if (l % kCopies == 1) s.v()[t * rows + row] = fmaf(neighbour, s.kq()[t], sum);
    __syncwarp();
  }
}

/// Gated norm and the store of n tokens from `first` on; `parts` CTAs (a cluster, if more than one) share the head's rows.
template <class Act, bool kPlain, class M>
__device__ __forceinline__ void finish(const VerifyCall& a, const Item& it, const M& s, int n, int first, int block, int rows, int parts) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, d = lane * 4;
  const bool active = d < rows;
  const int units = static_cast<int>(a.V) / 16;
  float* const shares = s.units() + (first / block % 2) * block * 8;
  const auto values = [&](int t, float(&o)[4]) {
    if (active) unpack(*reinterpret_cast<const Quad<float>*>(s.v() + t * rows + d), o);
    if (a.round_before_norm && sizeof(Act) == 2) round_bf16(o);
  };
  if (a.gate) {
    for (int t = warp; t < n; t += kWarps) {
      float o[4] = {};
      values(t, o);
      float sum = dot4(o, o);
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      if (active && lane % 4 == 0) {
        const int at = t * 8 + (it.v0 + d) / 16;
        if (parts == 1) {
          shares[at] = sum;
        } else {
#if __CUDA_ARCH__ >= 900
          const auto cluster = cooperative_groups::this_cluster();
          for (int p = 0; p < parts; ++p) cluster.map_shared_rank(shares, p)[at] = sum;
#endif
        }
      }
    }
    if (parts == 1) {
      __syncwarp();  // a warp reads the tokens that it wrote
    } else {
#if __CUDA_ARCH__ >= 900
      cooperative_groups::this_cluster().sync();
#endif
    }
  }
  float weight[4];
  if (a.gate && active) load_values<kPlain>(a.norm_weight, it.v0 + d, weight);
  for (int t = warp; t < n; t += kWarps) {
    float o[4] = {};
    if (!active) break;
    if (a.gate)
      values(t, o);
    else
      unpack(*reinterpret_cast<const Quad<float>*>(s.v() + t * rows + d), o);
    if (a.gate) {
      const float4 x = *reinterpret_cast<const float4*>(shares + t * 8), y = *reinterpret_cast<const float4*>(shares + t * 8 + 4);
      float sum = (x.x + x.y) + (x.z + x.w);
      if (units == 8) sum += (y.x + y.y) + (y.z + y.w);
      const float r = rsqrtf(sum * (1.0f / static_cast<float>(a.V)) + a.norm_eps);
      float g[4];
      unpack(*reinterpret_cast<const Quad<float>*>(s.gate() + t * rows + d), g);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = o[e] * r * weight[e] * g[e];
    }
    Quad<Act> y;
    pack(o, y);
    store_quad<kPlain>(a.out, at(a.out, it.begin + first + t, it.hv) + it.v0 + d, y);
  }
}

/// Grid: (request, value head, part of its rows), parts of a head next to each other. kPlain: chains, and every quad of every tensor may be
/// accessed as a whole; kFrozen only with it.
template <class Act, class S, int K, int R, bool kPlain, bool kFrozen>
__global__ void __launch_bounds__(kThreads, 2) verify_kernel(const __grid_constant__ VerifyCall a, int block, int parts) {
  extern __shared__ __align__(16) char memory[];
  using Memory = Shared<K, R, S, !kPlain, kFrozen>;
  constexpr int kRows = kRowUnit * R;
  constexpr bool kRound = sizeof(S) == 2;
  const bool tree = !kPlain && a.parents;
  const Memory s = {memory, Memory::rounded(block)};
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned part = blockIdx.x % static_cast<unsigned>(parts), head = blockIdx.x / static_cast<unsigned>(parts);
  const std::int64_t request = head / static_cast<unsigned>(a.HV);
#if __CUDA_ARCH__ >= 900
  if (parts > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // met before the first push to a neighbour
#endif
  wait_for_predecessor();
  Item it = item_of(a, request, static_cast<int>(head % static_cast<unsigned>(a.HV)), static_cast<int>(part) * kRows);
  launch_successor();
  if (request == a.N - 1) {
    const std::int64_t end = a.cu ? index(a.cu, a.N) : a.T;
    if (end >= 0 && end < a.T) clear_out<Act, kPlain>(a, end, a.T, it.hv, it.v0, kRows);
  }
  if (it.tokens == 0) return;
  if (tree) it.padding |= it.tokens > block || !read_tree(a, request, it.padding ? 0 : it.tokens, s);
  if (it.padding) {
    clear_out<Act, kPlain>(a, it.begin, it.begin + it.tokens, it.hv, it.v0, kRows);
    return;
  }
  S* const home = it.slot < 0 ? nullptr : static_cast<S*>(a.state.data) + at(a.state, it.slot, it.hv) + it.v0 * K;
  S* const staged = s.state();
  if (home) fetch_rows<K, R>(home, staged);

  for (int first = 0; first < it.tokens; first += block) {
    const int n = min(block, it.tokens - first);
    const int chunks = (n + kChunk - 1) / kChunk;
    for (int unit = warp; unit < 2 * chunks; unit += kWarps) {
      const int place = unit / 2 * kChunk, count = min(kChunk, n - place);
      // A warp has one or two units: addresses are not worth registers that outlive a unit.
      asm volatile("" : "+l"(it.slot), "+l"(it.row), "+l"(it.begin), "+r"(it.hv), "+r"(it.h));
      if (unit % 2 == 0)
        keys_unit<Act, K, kPlain>(a, it, s, first + place, place, count, lane);
      else
        values_unit<Act, K, kPlain>(a, it, s, kRows, first + place, place, count, lane);
    }
    __syncthreads();
    if (kFrozen) triangles<K>(s, n, block);
    Rows<K, R> x;
    if (home || first > 0) {
      wait_copies();
      __syncwarp();
      load_rows<K, R>(x, staged, lane);
    } else {
      clear_rows(x);
    }
    if constexpr (kFrozen) {
      frozen_rows<K, R>(x, s, n, block, kRows, lane);
    } else {
      constexpr int kCopies = 16 / R;
      const int l = lane & 15, row = group_row<R>() + row_of<R>(l);
      const bool states = a.snapshots || a.update_state;
      for (int t = 0; t < n; ++t) {
        if (tree && s.parent()[t] != t - 1) {  // back to the state before the tree, then along the path
          if (home)
            load_rows<K, R>(x, staged, lane);
          else
            clear_rows(x);
          for (std::uint64_t path = s.above()[t]; path; path &= path - 1) {
            const int i = __ffsll(static_cast<long long>(path)) - 1;
            replay<K, R, kRound>(x, s.decay() + i * K, s.k() + i * K, s.u() + i * kRows + group_row<R>(), lane);
          }
        }
        const Step step = {s.k() + t * K, s.q() + t * K, s.decay() + t * K, s.v()[t * kRows + row], s.beta()[t], s.kq()[t]};
        const float y = advance<K, R, true, kRound>(x, step, lane, states || first + t + 1 < it.tokens);
        __syncwarp();
        if (l % kCopies == 1) s.v()[t * kRows + row] = y;
        if (tree && l % kCopies == 0) s.u()[t * kRows + row] = y;
        if (tree) __syncwarp();
        if (a.snapshots && it.row >= 0) {
          if (tree)  // the state before the tree must stay in its place
            scatter_rows(x, static_cast<S*>(a.snapshots.data) + at(a.snapshots, it.row, first + t, it.hv) + it.v0 * K, a.snapshots.vec,
                         lane);
          else
            store_rows(x, static_cast<S*>(a.snapshots.data) + at(a.snapshots, it.row, first + t, it.hv) + it.v0 * K, staged,
                       a.snapshots.vec, lane);
        }
      }
    }
    if constexpr (!kFrozen) {
      if (first + n < it.tokens) {  // registers are for the tokens of the next block
        stores_read(lane);
        scatter_rows(x, staged, true, lane);
      } else if (a.update_state && home) {
        store_rows(x, home, staged, true, lane);
      }
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (parts > 1 && first == 0) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
    finish<Act, kPlain>(a, it, s, n, first, block, kRows, parts);
    if (first + block < it.tokens) __syncthreads();
  }
  if constexpr (!kFrozen) stores_done(lane);
}

template <class Act, class S, int K, int R, bool kPlain, bool kFrozen>
VerifyKernel verify_form() {
  return {verify_kernel<Act, S, K, R, kPlain, kFrozen>, Shared<K, R, S, !kPlain, kFrozen>::bytes};
}

}  // namespace specstate::kda::cuda
