#pragma once
// Verify and decode: convolution, gates, recurrence and output norm of one (request, value head) by one CTA, or by a cluster of CTAs
// that cut the head's value rows among them. CTAs stay and take one head after another.
//
// What moves: the head's state once (64 KiB at K = V = 128), and per token some 4 KiB of activations, windows and records. All of it comes
// by bulk copies into shared memory, asked for as soon as the place is free, so that the next head's (or block's) bytes are on their way
// while this one is worked on; a warp asks for the rows of the state that it alone will read. Tokens are worked on in blocks of 8:
//   stage      raw inputs (the three before the block too), gates, taps as they are in memory
//   tokens     two warps each for q, k, v and the gates (of 64 channels: two tokens a warp); a lane owns four channels. Convolution, SiLU,
//              rounding; records and windows leave from registers, fp32 rows for the recurrence stay in shared memory, not normalised
//   scalars    a warp a token: k.k, q.q, k.q. The norms are factors of a row's sums, so no vector is scaled by them
//   rows       `advance` of recurrence.cuh token by token with the state in registers; o goes to shared memory
//   output     a warp a token; the sum of squares is taken in units of 16 rows that are added in a fixed tree, so that it has the same bits
//              however a head is cut; a cluster pushes its units to all its CTAs before one barrier
// The code of each step is a loop, not a straight line: unrolled, it did not fit the instruction caches and ran four times slower.
#include <cooperative_groups.h>

#include <type_traits>

#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"
#include "kda/cuda/recurrence.cuh"

namespace specstate::kda::cuda {

constexpr int kBlock = 8;     // tokens of a chain whose operands are in shared memory at once
constexpr int kMaxTree = 64;  // nodes of a tree, all in one block: ancestors are a 64-bit mask

static_assert(sizeof(Item) <= 48);

/// Where things are in a CTA's shared memory. Everything is an offset from the base that costs no register.
template <class Act, class S, int K, int R, bool kPlain>
struct Shared {
  static constexpr int kRows = kRowUnit * R;
  using Raw = std::conditional_t<kPlain, bfloat16, float>;  // of the gates in the stage
  char* base;
  int block;  // a multiple of 4

  static constexpr int kState = kRows * K * static_cast<int>(sizeof(S));
  static constexpr int kFixed = 16 * (K + K + kRows) + 4 * K + 128;  // taps, bias, barriers and the next item
  static constexpr int kAct = static_cast<int>(sizeof(Act)) * (2 * K + kRows);
  static constexpr int kOfToken = 4 * (3 * K + 2 * kRows + 16 + 4) + kAct + static_cast<int>(sizeof(Act)) * kRows +
                                  static_cast<int>(sizeof(Raw)) * (K + 2 * kRows) + (kPlain ? 0 : 12);

  static __host__ __device__ int rounded(int block) { return kPlain ? kBlock : (block + 3) / 4 * 4; }
  static __host__ __device__ std::size_t bytes(int block) {
    const int b = rounded(block);
    return static_cast<std::size_t>(kState + kFixed + 3 * kAct) + static_cast<std::size_t>(b) * kOfToken;
  }

  __device__ S* state() const { return reinterpret_cast<S*>(base); }                                         // [rows, K]
  __device__ std::uint64_t* barriers() const { return reinterpret_cast<std::uint64_t*>(base + kState); }     // tokens, then one a warp
  __device__ Item* next() const { return reinterpret_cast<Item*>(base + kState + 80); }                      // what comes after this item
  __device__ float* taps(int c) const { return reinterpret_cast<float*>(base + kState + 128) + c * 4 * K; }  // [K or rows, 4]
  __device__ float* bias() const { return taps(2) + 4 * kRows; }                                             // [K]
  __device__ float* k() const { return bias() + K; }                                                         // [block, K]
  __device__ float* q() const { return k() + block * K; }                                                    // [block, K]
  __device__ float* decay() const { return k() + 2 * block * K; }                                            // [block, K]
  __device__ float* u() const { return k() + 3 * block * K; }                                                // [block, rows] (trees)
  __device__ float* o() const { return u() + block * kRows; }                                                // [block, rows]
  __device__ float* units() const { return o() + block * kRows; }                     // [2, block, 8] sums of squares of 16 rows
  __device__ float* beta() const { return units() + 16 * block; }                     // [block]
  __device__ float* fk() const { return units() + 17 * block; }                       // [block] 1 / |k|
  __device__ float* fq() const { return units() + 18 * block; }                       // [block] scale / |q|
  __device__ float* kq() const { return units() + 19 * block; }                       // [block] k . q, normalised
  __device__ Act* v() const { return reinterpret_cast<Act*>(units() + 20 * block); }  // [block, rows]
  /// Input i of the block (three before its first token, then its tokens) of q, k or v.
  __device__ Act* x(int c) const { return v() + block * kRows + c * (block + 3) * K; }          // [block + 3, K or rows]
  __device__ Raw* raw_g() const { return reinterpret_cast<Raw*>(x(2) + (block + 3) * kRows); }  // [block, K]
  __device__ Raw* raw_gate() const { return raw_g() + block * K; }                              // [block, rows]
  __device__ Raw* gate() const { return raw_gate() + block * kRows; }                           // [block, rows] the same, until the output
  __device__ std::uint64_t* above() const { return reinterpret_cast<std::uint64_t*>(gate() + block * kRows); }  // [block] (trees)
  __device__ int* parent() const { return reinterpret_cast<int*>(above() + block); }                            // [block] (trees)
};

__device__ __forceinline__ Item uniform(Item it) {
  it.slot = uniform(it.slot), it.row = uniform(it.row), it.begin = uniform(it.begin);
  it.tokens = uniform(it.tokens), it.hv = uniform(it.hv), it.h = uniform(it.h), it.padding = uniform(static_cast<int>(it.padding)) != 0;
  return it;
}

__device__ __forceinline__ const Channel& channel_of(const VerifyCall& a, int c) { return c == 0 ? a.q : c == 1 ? a.k : a.v; }

/// Asks for the raw inputs of tokens [first, first + n) in 16-byte pieces: half a warp a row. The whole CTA, which arrives at the barrier of
/// the tokens when they have.
template <class M, int K>
__device__ __forceinline__ void request_tokens(const VerifyCall& a, const Item& it, const M& s, int v0, int first, int n) {
  constexpr int kRows = M::kRows;
  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, e = thread % 16 * 8;
  const bool conv = static_cast<bool>(a.q.weight), past = first + row < 3;  // past: a row of the window
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const Channel& x = channel_of(a, c);
    const int dim = c == 2 ? kRows : K, head = c == 2 ? it.hv : it.h, d = c == 2 ? v0 : 0;
    if (row < n + 3 && e < dim && (conv || row >= 3)) {
      const bfloat16* from = static_cast<const bfloat16*>(x.x.data);
      if (past)
        from = static_cast<const bfloat16*>(x.window.data) +
               at(x.window, it.slot < 0 ? 0 : it.slot, head * (c == 2 ? static_cast<int>(a.V) : K) + d, row);
      else
        from += at(x.x, it.begin + (first - 3), head) + d + row * x.x.stride[0];
      copy_async_or_zero(s.x(c) + row * dim + e, from + e, !past || it.slot >= 0);
    }
    if (conv) {
      const int channel = c == 1 ? thread - 128 : thread;
      if (channel >= 0 && channel < dim)
        copy_async<16>(s.taps(c) + 4 * channel,
                       static_cast<const float*>(x.weight.data) +
                           (static_cast<std::int64_t>(head) * (c == 2 ? static_cast<int>(a.V) : K) + d + channel) * 4);
    }
  }
  const int token = row % 8;
  const bool second = row >= 8;
  if (token < n && e < (second ? kRows : K) && (!second || a.gate)) {
    const Array& from = second ? a.gate : a.g;
    copy_async<16>((second ? s.raw_gate() + token * kRows : s.raw_g() + token * K) + e,
                   static_cast<const bfloat16*>(from.data) + at(from, it.begin + first + token, it.hv) + (second ? v0 : 0) + e);
  }
  if (thread >= 128 && thread < 128 + K / 4)
    copy_async<16>(s.bias() + (thread - 128) * 4, static_cast<const float*>(a.dt_bias.data) + at(a.dt_bias, it.hv) + (thread - 128) * 4);
  arrive_with_copies(s.barriers());
}

/// Asks for four float32 values that are `stride` apart, where they need not be converted for what is to hold them.
__device__ __forceinline__ void copy_four(float* to, const Array& from, std::int64_t offset, std::int64_t stride = 1) {
  const float* const p = static_cast<const float*>(from.data) + offset;
  if (from.vec && stride == 1) {
    copy_async<16>(to, p);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) copy_async<4>(to + e, p + e * stride);
  }
}
__device__ __forceinline__ void copy_four(bfloat16* to, const Array& from, std::int64_t offset, std::int64_t stride = 1) {
  const bfloat16* const p = static_cast<const bfloat16*>(from.data) + offset;
  Quad<bfloat16> q = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) set_element(q, e, bits(p[e * stride]));
  *reinterpret_cast<Quad<bfloat16>*>(to) = q;
}
/// The same of values of either storage type.
template <class Raw>
__device__ __forceinline__ void copy_values(Raw* to, const Array& from, std::int64_t offset, std::int64_t stride = 1) {
  if (from.bf16 == (sizeof(Raw) == 2)) return copy_four(to, from, offset, stride);
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e] = core::from_float<Raw>(load(from, offset + e * stride));
}

/// The same for any strides and dtypes, a thread four channels; the whole CTA, which waits for it at once. float32 goes past the registers, so that
/// all of it is one wait: element by element it was fifteen, two thirds of a small verify's time.
template <class M, class Act, int K>
__device__ __forceinline__ void copy_tokens(const VerifyCall& a, const Item& it, const M& s, int v0, int first, int n) {
  constexpr int kRows = M::kRows;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int c = 0; c < 3; ++c) {
    const Channel& x = channel_of(a, c);
    const int fours = (c == 2 ? kRows : K) / 4, head = c == 2 ? it.hv : it.h, d = c == 2 ? v0 : 0;
    const std::int64_t channel = (c == 2 ? it.hv * a.V + v0 : it.h * static_cast<std::int64_t>(K));
#pragma unroll 1
    for (int i = thread; i < (n + 3) * fours; i += kThreads) {
      const int row = i / fours, input = first + row, e = i % fours * 4;
      Act* const to = s.x(c) + i * 4;
      if (input >= 3)
        copy_four(to, x.x, at(x.x, it.begin + input - 3, head) + d + e);
      else if (x.weight && it.slot >= 0)
        copy_four(to, x.window, at(x.window, it.slot, channel + e, input), x.window.stride[1]);
      else
        *reinterpret_cast<Quad<Act>*>(to) = {};
    }
    if (x.weight)
#pragma unroll 1
      for (int i = thread; i < 4 * fours; i += kThreads)
        copy_values(s.taps(c) + 4 * i, x.weight, at(x.weight, channel + i), x.weight.stride[1]);
  }
#pragma unroll 1
  for (int i = thread; i < n * (K / 4); i += kThreads) {
    const int t = i / (K / 4), e = i % (K / 4) * 4;
    if (a.scalar_gate)
      copy_values(s.raw_g() + i * 4, a.g, at(a.g, it.begin + first + t, it.hv), 0);
    else
      copy_values(s.raw_g() + i * 4, a.g, at(a.g, it.begin + first + t, it.hv, e), a.g.stride[2]);
  }
  if (a.gate)
#pragma unroll 1
    for (int i = thread; i < n * (kRows / 4); i += kThreads)
      copy_values(s.raw_gate() + i * 4, a.gate, at(a.gate, it.begin + first + i / (kRows / 4), it.hv, v0 + i % (kRows / 4) * 4),
                  a.gate.stride[2]);
  for (int i = thread; i < K / 4; i += kThreads)
    copy_values(s.bias() + i * 4, a.dt_bias, a.scalar_gate ? at(a.dt_bias, it.hv) : at(a.dt_bias, it.hv, i * 4),
                a.scalar_gate ? 0 : a.dt_bias.stride[1]);
  wait_copies();
  __syncthreads();
}

/// Convolution, SiLU and rounding of token t of the block for q, k or v (c); a lane has four channels.
template <class Act, int K, bool kPlain, class M>
__device__ __forceinline__ void convolve(const VerifyCall& a, const Item& it, const M& s, int c, int v0, int first, int t, int lane) {
  const int dim = c == 2 ? M::kRows : K, d = lane * 4;
  if (d >= dim) return;
  const Channel& channel = channel_of(a, c);
  const Act* const x = s.x(c) + d;
  // What all CTAs of a key head have in common is written by one of them.
  const bool writes = c == 2 || (v0 == 0 && it.hv % static_cast<int>(a.HV / a.H) == 0);
  const int head = c == 2 ? it.hv : it.h;
  Quad<Act> in[4];
  if (!kPlain && a.parents) {  // the three inputs before a node are its ancestors'
    int node = s.parent()[t], past = 0;
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      in[i] = *reinterpret_cast<const Quad<Act>*>(x + (node >= 0 ? node + 3 : 2 - past) * dim);
      if (node >= 0)
        node = s.parent()[node];
      else
        ++past;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) in[i] = *reinterpret_cast<const Quad<Act>*>(x + (t + i) * dim);
  }
  in[3] = *reinterpret_cast<const Quad<Act>*>(x + (t + 3) * dim);
  float y[4];
  if (channel.weight) {
    float z[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack(in[i], z[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float taps[4];
      unpack(*reinterpret_cast<const Quad<float>*>(s.taps(c) + (d + e) * 4), taps);
      y[e] = fmaf(z[3][e], taps[3], fmaf(z[2][e], taps[2], fmaf(z[1][e], taps[1], z[0][e] * taps[0])));
      y[e] *= sizeof(Act) == 2 ? quick_sigmoid(y[e]) : sigmoid(y[e]);
    }
    if constexpr (sizeof(Act) == 2) round_bf16(y);
    if (writes && channel.windows && it.row >= 0) {
      const Array& w = channel.windows;
      const std::int64_t to = at(w, it.row, first + t, head * (c == 2 ? static_cast<int>(a.V) : K) + (c == 2 ? v0 : 0) + d);
      if constexpr (kPlain) {
        Act* const p = static_cast<Act*>(w.data) + to;
#pragma unroll
        for (int i = 0; i < 3; ++i) *reinterpret_cast<Quad<Act>*>(p + i * w.stride[3]) = in[i + 1];
      } else {
        store_window<false>(w, to, w.stride[2], w.stride[3], in[1], in[2], in[3]);
      }
    }
  } else {
    unpack(in[3], y);
  }
  Quad<Act> raw;
  pack(y, raw);
  if (c == 2)
    *reinterpret_cast<Quad<Act>*>(s.v() + t * dim + d) = raw;
  else
    *reinterpret_cast<float4*>((c == 0 ? s.q() : s.k()) + t * dim + d) = make_float4(y[0], y[1], y[2], y[3]);
  const Array& ring = c == 1 ? a.rawk : a.rawv;
  if (writes && c > 0 && ring && it.slot >= 0 && first + t < a.L)
    store_quad<kPlain>(ring, at(ring, it.slot, head, first + t) + (c == 2 ? v0 : 0) + d, raw);
}

/// Decay, beta and the norm's gate (put aside, so that the stage is free) of token t of the block; a lane has four channels.
template <int K, bool kPlain, class M>
__device__ __forceinline__ void gates(const VerifyCall& a, const Item& it, const M& s, int v0, int first, int t, float amplitude,
                                      float logit, int lane) {
  using Four = Quad<typename M::Raw>;
  const bool records = a.rawk && it.slot >= 0 && v0 == 0 && first + t < a.L;
  const int d = lane * 4;
  if (a.gate && d < M::kRows)
    *reinterpret_cast<Four*>(s.gate() + t * M::kRows + d) = *reinterpret_cast<const Four*>(s.raw_gate() + t * M::kRows + d);
  if (d < K) {
    float x[4], bias[4];
    unpack(*reinterpret_cast<const Four*>(s.raw_g() + t * K + d), x);
    unpack(*reinterpret_cast<const Quad<float>*>(s.bias() + d), bias);
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
    if (records) {
      if (!a.scalar_gate) {
        Quad<float> raw;
        pack(x, raw);
        const std::int64_t to = at(a.ring_g, it.slot, it.hv, first + t);
        store_quad<kPlain>(a.ring_g, to + d, raw);
      } else if (lane == 0) {
        store(a.ring_g, at(a.ring_g, it.slot, it.hv, first + t), x[0]);
      }
    }
    *reinterpret_cast<float4*>(s.decay() + t * K + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
  }
  if (lane == 0) {
    const float b = sigmoid(logit);
    s.beta()[t] = b;
    if (records) store(a.ring_beta, at(a.ring_beta, it.slot, it.hv, first + t), b);
  }
}

__device__ __forceinline__ void row_of_four(const float* row, int d, bool active, float (&x)[4]) {
  if (active) unpack(*reinterpret_cast<const Quad<float>*>(row + d), x);
}

/// Norms and k.q of the block's tokens.
template <int K, class M>
__device__ __forceinline__ void scalars(const VerifyCall& a, const M& s, int n, int warp, int lane) {
#pragma unroll 1
  for (int t = warp; t < n; t += kWarps) {
    float k[4] = {}, q[4] = {};
    row_of_four(s.k() + t * K, lane * 4, lane * 4 < K, k), row_of_four(s.q() + t * K, lane * 4, lane * 4 < K, q);
    float sums[3] = {dot4(k, k), dot4(q, q), dot4(k, q)};
    warp_sums(sums);
    const float fk = a.l2norm ? inverse_norm(sums[0]) : 1.0f, fq = a.l2norm ? inverse_norm(sums[1]) * a.scale : a.scale;
    if (lane == 0) s.fk()[t] = fk, s.fq()[t] = fq, s.kq()[t] = sums[2] * fk * fq;
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

/// Gated norm and the store of n tokens from `first` on; `parts` CTAs (a cluster, if more than one) share the head's rows. `turn`: two
/// places for the shares take turns, so that a fast neighbour does not overwrite what a slow one still reads.
template <class Act, bool kPlain, class M>
__device__ __forceinline__ void finish(const VerifyCall& a, const Item& it, const M& s, int v0, int n, int first, int parts, int turn,
                                       int warp, int lane) {
  constexpr int kRows = M::kRows;
  const int d = lane * 4;
  const bool active = d < kRows;
  float* const shares = s.units() + (turn & 1) * s.block * 8;
  const auto values = [&](int t, float(&o)[4]) {
    if (active) unpack(*reinterpret_cast<const Quad<float>*>(s.o() + t * kRows + d), o);
    if (a.gate && a.round_before_norm && sizeof(Act) == 2) round_bf16(o);
  };
  if (a.gate) {
#pragma unroll 1
    for (int t = warp; t < n; t += kWarps) {
      float o[4] = {};
      values(t, o);
      float sum = dot4(o, o);
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      if (active && lane % 4 == 0) {
        const int at = t * 8 + (v0 + d) / 16;
        if (parts == 1) {
          shares[at] = sum;
        } else {
#if __CUDA_ARCH__ >= 900
          const auto cluster = cooperative_groups::this_cluster();
#pragma unroll 1
          for (int p = 0; p < parts; ++p) cluster.map_shared_rank(shares, p)[at] = sum;
#endif
        }
      }
    }
    if (parts == 1) {
      __syncwarp();  // a warp reads the tokens that it wrote
    } else {
#if __CUDA_ARCH__ >= 900
      specstate::cuda::ptx::cluster_sync();
#endif
    }
  }
  if (!active) return;
  float weight[4];
  if (a.gate) load_values<kPlain>(a.norm_weight, v0 + d, weight);
#pragma unroll 1
  for (int t = warp; t < n; t += kWarps) {
    float o[4];
    values(t, o);
    if (a.gate) {
      const float4 x = *reinterpret_cast<const float4*>(shares + t * 8), y = *reinterpret_cast<const float4*>(shares + t * 8 + 4);
      float sum = (x.x + x.y) + (x.z + x.w);
      if (a.V == 128) sum += (y.x + y.y) + (y.z + y.w);
      const float r = rsqrtf(sum * (1.0f / static_cast<float>(a.V)) + a.norm_eps);
      float g[4];
      unpack(*reinterpret_cast<const Quad<typename M::Raw>*>(s.gate() + t * kRows + d), g);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = o[e] * r * weight[e] * (kPlain ? quick_sigmoid(g[e]) : sigmoid(g[e]));
    }
    Quad<Act> y;
    pack(o, y);
    store_quad<kPlain>(a.out, at(a.out, it.begin + first + t, it.hv) + v0 + d, y);
  }
}

/// A launch's arguments are in no cache yet, and code that meets them one after the other waits for each line of 64 bytes: so every warp asks for some
/// while the kernels before this one end.
__device__ __forceinline__ void ask_for(const VerifyCall& a, int warp) {
  constexpr int kLines = static_cast<int>(sizeof(VerifyCall) / 64);
  unsigned x = 0;
#pragma unroll
  for (int i = 0; i < kLines; i += kWarps)
    x |= *reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(&a) + 64 * min(i + warp, kLines - 1));
  if (x == 0x5A17C0DEu) __nanosleep(1);  // whatever they are: a use that keeps the loads
}

/// Grid: CTAs (clusters of `parts`) that take heads in turns. kPlain: chains, windows with the channels of a tap dense (as serving keeps
/// them), a gate a channel, and rows that bulk copies can move.
template <class Act, class S, int K, int R, bool kPlain>
__global__ void __launch_bounds__(kThreads, kPlain ? 2 : 1) verify_kernel(const __grid_constant__ VerifyCall a, int block, int parts) {
  extern __shared__ __align__(128) char memory[];
  using M = Shared<Act, S, K, R, kPlain>;
  constexpr int kRows = kRowUnit * R;
  constexpr bool kRound = sizeof(S) == 2;
#if __CUDA_ARCH__ >= 900
  constexpr bool kBulk = kPlain;
#else
  constexpr bool kBulk = false;
#endif
  const bool tree = !kPlain && a.parents;
  const M s = {memory, M::rounded(block)};
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32;
  const int v0 = static_cast<int>(blockIdx.x) % parts * kRows;
  const std::int64_t stride = gridDim.x / static_cast<unsigned>(parts);
  std::int64_t head = blockIdx.x / static_cast<unsigned>(parts);
  const bool states = a.snapshots || a.update_state;
#if __CUDA_ARCH__ >= 900
  if (parts > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // met before the first push to a neighbour
  if (kBulk) {
    if (threadIdx.x <= kWarps) specstate::cuda::ptx::barrier_init(s.barriers() + threadIdx.x, threadIdx.x == 0 ? kThreads : 1);
    specstate::cuda::ptx::fence_barriers();
    __syncthreads();
  }
#endif
  ask_for(a, warp);
  wait_for_predecessor();
  launch_successor();

  S* const staged = s.state();
  const auto home_of = [&](const Item& it) {
    return it.slot < 0 ? nullptr : static_cast<S*>(a.state.data) + at(a.state, it.slot, it.hv) + v0 * K;
  };
  const auto live = [&](const Item& it) { return it.tokens > 0 && !it.padding && (!tree || it.tokens <= s.block); };
  const auto settle = [&](const Item& it) {
    clear_out(a, it.begin, std::int64_t{it.begin} + it.tokens, it.hv, v0, kRows, static_cast<int>(threadIdx.x), kThreads);
  };
  const auto request_state = [&](const Item& it) {
    if (!live(it) || it.slot < 0) return;
    if constexpr (kBulk)
      bulk_rows<K, R>(home_of(it), staged, s.barriers() + 1 + warp, lane);
    else
      fetch_rows<K, R>(home_of(it), staged);
  };
  [[maybe_unused]] std::uint32_t tokens_phase = 0, state_phase = 0;
  int turn = 0;

  // Turn by turn: a block of tokens (none before the first one) up to where its stage is free, the request for the block after it, the rest.
  Item it = uniform(item_of(a, head));
  int first = 0;
  bool working = false;
  for (;;) {
    int n = 0, after = 0;
    bool last = true;
    Item then = it;
    if (working) {
      n = min(s.block, it.tokens - first), last = first + n == it.tokens, after = first + n;
      if (warp == kWarps - 1 && last) *s.next() = item_of(a, head + stride);
      // Two scalars come straight from memory: asked for before the wait.
      const auto logit_of = [&](int t) { return load(a.beta, at(a.beta, it.begin + first + t, it.hv)); };
      constexpr int kTogether = 128 / (K > kRows ? K : kRows), kLanes = 32 / kTogether;  // tokens of a warp; lanes of one
      const int rounds = (n + kTogether - 1) / kTogether, part = lane / kLanes, l = lane % kLanes,
                own = kTogether * ((warp - 3 * rounds) & (kWarps - 1)) + part;
      const float logit = own < n ? logit_of(own) : 0.0f, a_log = load(a.a_log, at(a.a_log, it.hv));
      if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
        specstate::cuda::ptx::barrier_wait(s.barriers(), tokens_phase & 1);
        ++tokens_phase;
#endif
      } else {
        copy_tokens<M, Act, K>(a, it, s, v0, first, n);
      }
      // Four pieces of work a token; the warps take them in turns, of two tokens at once where a head has 64 channels.
#pragma unroll 1
      for (int piece = 0; piece < 4; ++piece)
#pragma unroll 1
        for (int t = kTogether * ((warp - piece * rounds) & (kWarps - 1)) + part; t < n; t += kTogether * kWarps)
          if (piece < 3)
            convolve<Act, K, kPlain>(a, it, s, piece, v0, first, t, l);
          else
            gates<K, kPlain>(a, it, s, v0, first, t, amplitude_of(a_log), t == own ? logit : logit_of(t), l);
      __syncthreads();
      if (last) {
        head += stride;
        then = uniform(*s.next());  // found by one warp while this head was worked on
        after = 0;
      }
    }
    if (last) {  // padding and heads without tokens need no turn
      for (; head < a.N * a.HV && !live(then); head += stride, then = uniform(item_of(a, head))) settle(then);
      if (head >= a.N * a.HV) then.tokens = 0;
    }
    if (!working && then.tokens > 0) request_state(then);
    if (kBulk && then.tokens > 0) request_tokens<M, K>(a, then, s, v0, after, min(s.block, then.tokens - after));

    if (working) {
      scalars<K>(a, s, n, warp, lane);
      __syncthreads();

      Rows<K, R> x;
      if (first > 0) {
        load_rows<K, R>(x, staged, lane);
      } else if (it.slot >= 0) {
        if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
          specstate::cuda::ptx::barrier_wait(s.barriers() + 1 + warp, state_phase & 1);
          ++state_phase;
#endif
        } else {
          wait_copies();
          __syncwarp();
        }
        load_rows<K, R>(x, staged, lane);
      } else {
        clear_rows(x);
      }
      __syncwarp();
      if (last && !states && !tree) request_state(then);

      constexpr int kCopies = 16 / R;
      const int l = lane & 15, row = group_row<R>() + row_of<R>(l);
#pragma unroll 1
      for (int t = 0; t < n; ++t) {
        if (tree && s.parent()[t] != t - 1) {  // back to the state before the tree, then along the path
          if (it.slot >= 0)
            load_rows<K, R>(x, staged, lane);
          else
            clear_rows(x);
          for (std::uint64_t path = s.above()[t]; path; path &= path - 1) {
            const int i = __ffsll(static_cast<long long>(path)) - 1;
            replay<K, R, kRound>(x, s.decay() + i * K, s.k() + i * K, s.fk()[i], s.u() + i * kRows + group_row<R>(), lane);
          }
        }
        const Step step = {s.k() + t * K, s.q() + t * K, s.decay() + t * K, core::to_float(s.v()[t * kRows + row]),
                           s.beta()[t],   s.fk()[t],     s.fq()[t],         s.kq()[t]};
        const float y = advance<K, R, true, kRound>(x, step, lane, states || first + t + 1 < it.tokens);
        if (l % kCopies == 1) s.o()[t * kRows + row] = y;
        if (tree && l % kCopies == 0) s.u()[t * kRows + row] = y;
        if (tree) __syncwarp();
        if (a.snapshots && it.row >= 0) {
          S* const to = static_cast<S*>(a.snapshots.data) + at(a.snapshots, it.row, first + t, it.hv) + v0 * K;
          if (tree)  // the state before the tree must stay in its place
            scatter_rows(x, to, a.snapshots.vec, lane);
          else
            store_rows(x, to, staged, a.snapshots.vec, lane);
        }
      }
      if (!last) {  // registers are for the tokens of the next block
        stores_read(lane);
        scatter_rows(x, staged, true, lane);
        __syncwarp();
      } else if (states || tree) {
        if (a.update_state && it.slot >= 0) store_rows(x, home_of(it), staged, true, lane);
        stores_read(lane);
        request_state(then);
      }
      __syncthreads();
#if __CUDA_ARCH__ >= 900
      if (parts > 1 && turn == 0) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
      finish<Act, kPlain>(a, it, s, v0, n, first, parts, turn++, warp, lane);
    }
    if (then.tokens == 0) break;
    it = then, first = after, working = true;
    __syncthreads();
    if (tree && !read_tree(a, head / a.HV, it.tokens, s)) {
      settle(it);
      head += stride, it = uniform(item_of(a, head)), working = false;
    }
  }
  // Tokens that belong to no request.
  const std::int64_t end = a.cu ? index(a.cu, a.N) : a.T;
  if (end >= 0)
    for (std::int64_t i = blockIdx.x / static_cast<unsigned>(parts); i < (a.T - end) * a.HV; i += stride)
      clear_out(a, end + i / a.HV, end + i / a.HV + 1, static_cast<int>(i % a.HV), v0, kRows, static_cast<int>(threadIdx.x), kThreads);
  if (states) stores_done(lane);
}

template <class Act, class S, int K, int R, bool kPlain>
VerifyKernel verify_form() {
  return {verify_kernel<Act, S, K, R, kPlain>, Shared<Act, S, K, R, kPlain>::bytes, kThreads};
}

}  // namespace specstate::kda::cuda
