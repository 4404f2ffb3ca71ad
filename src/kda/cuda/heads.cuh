#pragma once
// The frame of verify and decode where everything is as serving has it: heads of 128 x 128, bfloat16 activations, float32 states, chains,
// strides that copies of 16 bytes can follow. What a head's rows of the state go through is in sequence.cuh (the one recurrence) and
// frozen.cuh (ring mode's faster form); all around it is here.
//
// A CTA takes a head and then the next. kWorkers warps work, one more directs: it finds the heads, asks for their tokens and states, and does
// what little is left (betas, the rows of padding). With 8 workers two CTAs share a multiprocessor, so that one has its state on the way while
// the other works. A turn is a block of 8 tokens of a head:
//   stage      inputs (the three before the block too), gates, taps, as they are in memory; asked for while the block before is worked on
//   tokens     warps for q, k, v and the gates; a lane has four channels and walks along the tokens. Convolution, SiLU, rounding; records
//              and windows leave from registers
//   state      by two bulk copies, which land 64 bytes apart from where they would follow each other (see frozen.cuh)
//   output     a warp a token; the sum of squares in units of 16 rows in a fixed tree, as in verify.cuh
// Who waits for whom: the workers for each other by a barrier of theirs. For them the director waits at two more, at which they arrive and go
// on (the stage is read, the state is read); they for it at mbarriers, at which it arrives with all its lanes: a turn begins when its tokens are
// there and the director has passed both barriers of the turn before.
// The first head is what nothing hides. Its indices are asked for before anything else, its tokens by all workers, its state behind them: the
// states of all CTAs take memory as long as all else together. One more warp, the scout, finds the first head too while kernels before this
// one still run, and if they do, has its state, window and taps brought into L2: where those kernels overwrite it, too.
#include "cuda/ptx.cuh"
#include "kda/cuda/backend.hpp"
#include "kda/cuda/item.cuh"
#include "kda/cuda/recurrence.cuh"

namespace specstate::kda::cuda {

// See item_of.
__device__ __forceinline__ bool keeps_rows(const HeadsCall& a) { return a.windows || a.snapshots; }
__device__ __forceinline__ int tokens_each(const HeadsCall& a) { return a.each; }
__device__ __forceinline__ int quotient(int x, const Divisor& d) {
  const unsigned q = __umulhi(static_cast<unsigned>(x), d.inverse);
  return static_cast<int>(static_cast<unsigned>(x) - q * d.by >= d.by ? q + 1 : q);
}
__device__ __forceinline__ int place_of(const HeadsCall& a, std::int64_t head, Item& it) {
  const int request = quotient(static_cast<int>(head), a.by_heads);
  it.hv = static_cast<int>(head) - request * a.HV, it.h = quotient(it.hv, a.by_group);
  return request;
}

}  // namespace specstate::kda::cuda

namespace specstate::kda::cuda::plain {

namespace ptx = specstate::cuda::ptx;

constexpr int kDim = 128, kHalf = kDim / 2, kTokens = 8;  // channels and rows of a head; tokens of a block

/// What the warps need to know of a head.
struct Head {
  char* place[kPlaces];  // of its first token; null: not there, or not this head's to write
  float amplitude;
  int tokens;  // 0: there are no more heads

  template <class T>
  __device__ T* at(int i) const {
    return reinterpret_cast<T*>(place[i]);
  }
};

/// A CTA's shared memory. kFrozen: with what frozen.cuh needs.
template <int kWorkers_, bool kFrozen_>
struct Shared {
  static constexpr int kWorkers = kWorkers_, kThreads = 32 * kWorkers + 64, kEach = kWorkers == 8 ? 2 : 1;  // of a multiprocessor
  static constexpr bool kFrozen = kFrozen_;

  alignas(128) float state_[kDim * kDim + 16];
  alignas(16) bfloat16 xq[kTokens + 3][kDim];
  alignas(16) bfloat16 xk[kTokens + 3][kDim];
  alignas(16) bfloat16 xv[kTokens + 3][kDim];
  alignas(16) bfloat16 g[kTokens][kDim];
  alignas(16) bfloat16 gate[2][kTokens][kDim];
  float4 taps[3 * kDim];  // of q, k and v's channels, see place_of_taps
  alignas(16) float bias[kDim], weight[kDim];
  alignas(16) float keys[2][kTokens][kDim];  // k, q; frozen: then o, u
  alignas(16) float decay[kTokens][kDim];    // frozen: then the columns' ends R_nj k_j
  alignas(16) bfloat16 v[kTokens][kDim + 8];
  alignas(16) float operand[kFrozen ? 16 * 32 * 4 : kTokens * kDim];    // D_t k_t and D_t q_t; or o
  alignas(16) float halves[kFrozen && kWorkers == 16 ? 16 * kDim : 4];  // sums over half the channels
  alignas(16) float product[kFrozen ? kDim : 4];                        // D_n
  alignas(16) float triangle[2][kTokens][kTokens];
  float beta[2][kTokens], fk[kTokens], fq[kTokens], kq[kTokens];
  Place places[kPlaces];
  Head head[3];
  std::uint64_t found, first_here, tokens_here, state_here, alone;

  __device__ float* base(int r) { return state_ + (r >= kHalf ? 16 : 0); }
  __device__ float* row(int r) { return base(r) + r * kDim; }
  __device__ bfloat16* inputs(int kind) { return kind == 0 ? xq[0] : kind == 1 ? xk[0] : xv[0]; }
  /// Row r (four, if it is a multiple of four) of o of token t; frozen: or of u of token t - 8. The order keeps banks apart.
  __device__ float* result(int t, int r) { return kFrozen ? keys[0][0] + t * kDim + (r ^ (t % kTokens * 4)) : operand + t * kDim + r; }
};

__device__ __forceinline__ void row_of_four(const float* row, float (&x)[4]) { unpack(*reinterpret_cast<const Quad<float>*>(row), x); }
__device__ __forceinline__ void row_of_eight(const float* row, float (&x)[8]) {
  const float4 y = *reinterpret_cast<const float4*>(row), z = *reinterpret_cast<const float4*>(row + 4);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
}

/// A barrier of the workers.
template <class M>
__device__ __forceinline__ void sync_workers() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * M::kWorkers) : "memory");
}
/// What workers leave to the director: that they have read this turn's tokens from the stage; the state.
enum { kStageRead = 2, kStateRead = 3 };
template <int kWhat, class M>
__device__ __forceinline__ void leave(M&) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kWhat), "n"(32 * M::kWorkers + 32) : "memory");
}
template <int kWhat, class M>
__device__ __forceinline__ void take(M&) {
  asm volatile("bar.sync %0, %1;" ::"n"(kWhat), "n"(32 * M::kWorkers + 32) : "memory");
}

// ---- the director ----------------------------------------------------------------------------------------------------------

/// Zeros for tokens [begin, end) of a head, by `threads` threads.
template <class M>
__device__ __forceinline__ void clear(const HeadsCall& a, const M& s, std::int64_t begin, std::int64_t end, int hv, int thread,
                                      int threads) {
  bfloat16* const out = reinterpret_cast<bfloat16*>(s.places[kOut].base) + hv * a.out_head;
#pragma unroll 1
  for (std::int64_t t = begin; t < end; ++t)
#pragma unroll 1
    for (int v = thread; v < kDim; v += threads) out[t * a.out_token + v] = bfloat16{};
}

/// Where a channel's taps are: lanes that read four channels each meet no bank twice.
__device__ __forceinline__ int place_of_taps(int channel) { return channel ^ (channel >> 3 & 3); }

/// One of the places?
template <int... kThese>
__device__ __forceinline__ bool is(int place) {
  return (((1u << kThese) | ...) >> place & 1) != 0;
}

/// The CTA's heads in turn, 32 at once: their indices come in one round trip. A lane knows one place of heads.
struct Finder {
  std::int64_t next = blockIdx.x;
  int lane;
  Item it = {};
  float a_log = 0;
  unsigned todo = 0, dead = 0;

  /// Heads from `next` on. kEarly: before the kernels before this one are done.
  template <bool kEarly>
  __device__ __forceinline__ void find(const HeadsCall& a) {
    const std::int64_t own = next + lane * std::int64_t{gridDim.x};
    it = item_of<kEarly>(a, own);
    todo = __ballot_sync(kAll, it.tokens > 0 && !it.padding);
    dead = __ballot_sync(kAll, it.tokens > 0 && it.padding);
  }
  /// The same with their amplitudes, asked for with the indices and looked at (widened) after them.
  __device__ __forceinline__ void fill(const HeadsCall& a) {
    const std::int64_t own = min(next + lane * std::int64_t{gridDim.x}, std::int64_t{a.N} * a.HV - 1);
    Item at;
    place_of(a, own, at);
    const std::int64_t of = at.hv * a.a_log_head;
    std::uint16_t half = 0;
    float whole = 0;
    if (a.a_log_bf16)
      half = static_cast<const std::uint16_t*>(a.a_log)[of];
    else
      whole = static_cast<const float*>(a.a_log)[of];
    find<false>(a);
    a_log = a.a_log_bf16 ? __uint_as_float(static_cast<std::uint32_t>(half) << 16) : whole;
    next += 32 * std::int64_t{gridDim.x};
  }

  /// The lane's place in the head that lane `from` has found.
  template <class M>
  __device__ __forceinline__ char* place(const HeadsCall& a, const M& s, int from) const {
    constexpr int q = 0, k = 1, v = 2;
    const Place mine = s.places[min(lane, kPlaces - 1)];
    const int slot = __shfl_sync(kAll, it.slot, from), row = __shfl_sync(kAll, it.row, from), begin = __shfl_sync(kAll, it.begin, from),
              hv = __shfl_sync(kAll, it.hv, from), h = __shfl_sync(kAll, it.h, from);
    const bool of_slot = is<kWindow + q, kWindow + k, kWindow + v, kState, kRawK, kRawV, kRingG, kRingBeta>(lane),
               of_row = is<kWindows + q, kWindows + k, kWindows + v, kSnapshots>(lane),
               of_key = is<kX + q, kX + k, kWindow + q, kWindow + k, kWindows + q, kWindows + k, kTaps + q, kTaps + k, kRawK>(lane);
    bool there = mine.base && !(of_slot && slot < 0) && !(of_row && row < 0);
    // What all value heads of a key head have in common is written once.
    if (is<kWindows + q, kWindows + k, kRawK>(lane)) there &= hv == h * static_cast<int>(a.by_group.by);
    return there ? mine.base + ((of_slot ? slot : of_row ? row : begin) * mine.first + (of_key ? h : hv) * mine.head) : nullptr;
  }

  /// The next head into `to`. Gives rows of padding on the way their zeros.
  template <class M>
  __device__ __forceinline__ void pop(const HeadsCall& a, M& s, Head& to) {
    while (!todo) {
      for (; dead; dead &= dead - 1) {
        const int from = __ffs(static_cast<int>(dead)) - 1;
        const int begin = __shfl_sync(kAll, it.begin, from), n = __shfl_sync(kAll, it.tokens, from), hv = __shfl_sync(kAll, it.hv, from);
        clear<M>(a, s, begin, begin + n, hv, lane, 32);
      }
      if (next >= std::int64_t{a.N} * a.HV) break;
      fill(a);
    }
    const int from = __ffs(static_cast<int>(todo)) - 1;
    if (from >= 0) {
      char* const p = place(a, s, from);
      if (lane < kPlaces) to.place[lane] = p;
      if (lane == from) to.amplitude = amplitude_of(a_log), to.tokens = it.tokens;
    } else if (lane == 0) {
      to.tokens = 0;
    }
    todo &= todo - 1;
    __syncwarp();
  }
};

/// The scout's part: what the kernels before this one may still write is asked for into L2 alone.
template <class M>
__device__ __forceinline__ void scout(const HeadsCall& a, M& s, int lane) {
#if __CUDA_ARCH__ >= 900
  Finder finder{.lane = lane};
  finder.find<true>(a);
  if (!finder.todo || ptx::barrier_passed(&s.alone, 0)) return;
  const char* const p = finder.place(a, s, __ffs(static_cast<int>(finder.todo)) - 1);
  const auto ask = [](const char* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  };
  if (p && lane >= kWindow && lane < kWindow + 3) {
#pragma unroll 1
    for (int tap = 0; tap < 3; ++tap) ask(p + tap * a.window_tap[lane - kWindow] * 2, kDim * 2);
  }
  if (p && lane >= kTaps && lane < kTaps + 3) ask(p, kDim * 16);
  if (p && lane == kState) ask(p, kDim * kDim * 4);
#endif
}

template <class M>
__device__ __forceinline__ void request_state(const Head& head, M& s, int lane) {
  const char* const from = head.place[kState];
  if (head.tokens > 0 && from && lane == 0) {
    ptx::barrier_expect(&s.state_here, kDim * kDim * 4);
    ptx::bulk_load(s.row(0), from, kHalf * kDim * 4, &s.state_here);
    ptx::bulk_load(s.row(kHalf), from + kHalf * kDim * 4, kHalf * kDim * 4, &s.state_here);
  }
  __syncwarp();
}

/// Asks for the inputs of tokens [first, first + n) in 16-byte pieces, half a warp a row; with a head's first ones for its taps and bias.
template <class M>
__device__ __forceinline__ void request_tokens(const HeadsCall& a, const Head& head, M& s, int first, int n, int turn, int lane) {
  const int half = lane / 16, e = lane % 16 * 8;
  const auto rows = [&](bfloat16* to, int count, const bfloat16* from, std::int64_t pitch) {  // rows half, half + 2, ...
    from += half * pitch + e, to += half * kDim + e;
#pragma unroll
    for (int i = 0; i < (kTokens + 3 + 1) / 2; ++i) {
      if (half + 2 * i < count) ptx::copy_async(to, from);
      from += 2 * pitch, to += 2 * kDim;
    }
  };
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const bfloat16 *const window = head.at<bfloat16>(kWindow + c), *const x = head.at<bfloat16>(kX + c);
    if (first > 0) {
      rows(s.inputs(c), n + 3, x + (first - 3) * a.x_token[c], a.x_token[c]);
    } else {
      rows(s.inputs(c) + 3 * kDim, n, x, a.x_token[c]);
      if (a.conv)
#pragma unroll
        for (int row = half; row < 3; row += 2)
          ptx::copy_async(s.inputs(c) + row * kDim + e, window + row * a.window_tap[c] + e, window != nullptr);
    }
  }
  rows(s.g[0], n, head.at<bfloat16>(kG) + first * a.g_token, a.g_token);
  if (a.gate) rows(s.gate[turn & 1][0], n, head.at<bfloat16>(kGate) + first * a.gate_token, a.gate_token);
  if (first == 0) {
    if (a.conv)
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        const float* const taps = head.at<float>(kTaps + c);
#pragma unroll
        for (int channel = lane; channel < kDim; channel += 32)
          ptx::copy_async(s.taps + c * kDim + place_of_taps(channel), taps + channel * 4);
      }
    ptx::copy_async(s.bias + lane * 4, head.at<float>(kBias) + lane * 4);
  }
}

// ---- the workers ------------------------------------------------------------------------------------------------------------

/// What the director's request_tokens asks for, of the first head of the CTA: nothing can hide it, so all workers ask, half a warp a row.
template <class M>
__device__ __forceinline__ void request_first(const HeadsCall& a, const Head& head, M& s, int n) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, e = thread % 16 * 8, t = row % kTokens;
  if (row < 2 * kTokens) {
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const bfloat16 *const window = head.at<bfloat16>(kWindow + c), *const x = head.at<bfloat16>(kX + c);
      if (row < n + 3 && (row >= 3 || a.conv))
        ptx::copy_async(s.inputs(c) + row * kDim + e, row < 3 ? window + row * a.window_tap[c] + e : x + (row - 3) * a.x_token[c] + e,
                        row >= 3 || window != nullptr);
    }
    if (row < kTokens && t < n) ptx::copy_async(s.g[t] + e, head.at<bfloat16>(kG) + t * a.g_token + e);
    if (row >= kTokens && t < n && a.gate) ptx::copy_async(s.gate[0][t] + e, head.at<bfloat16>(kGate) + t * a.gate_token + e);
  }
#pragma unroll
  for (int i = thread; i < 3 * kDim; i += 32 * M::kWorkers)
    if (a.conv) ptx::copy_async(s.taps + i / kDim * kDim + place_of_taps(i % kDim), head.at<float>(kTaps + i / kDim) + i % kDim * 4);
  if (thread >= kDim && thread < kDim + 32) ptx::copy_async(s.bias + (thread - kDim) * 4, head.at<float>(kBias) + (thread - kDim) * 4);
  arrive_with_copies(&s.first_here);
}

/// Convolution, SiLU and rounding of kOwn tokens of q, k or v. Tokens from n on are worked on too, and go nowhere that is read.
template <int kOwn, class M>
__device__ __forceinline__ void convolve(const HeadsCall& a, const Head& head, M& s, int kind, int t0, int first, int n, int lane) {
  const int d = lane * 4;
  const std::int64_t tap = a.windows_tap[kind], step = a.windows_step[kind], entry = kind == 1 ? a.rawk_step : a.rawv_step;
  const bfloat16* const x = s.inputs(kind) + t0 * kDim + d;
  bfloat16* windows = head.at<bfloat16>(kWindows + kind);
  bfloat16* ring = kind == 0 ? nullptr : head.at<bfloat16>(kind == 1 ? kRawK : kRawV);
  windows = windows ? windows + (first + t0) * step + d : nullptr;
  ring = ring ? ring + (first + t0) * entry + d : nullptr;
  Quad<bfloat16> in[kOwn + 3], raw[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn + 3; ++i) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(x + i * kDim);
  if (a.conv) {
    float taps[4][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) unpack(*reinterpret_cast<const Quad<float>*>(s.taps + kind * kDim + place_of_taps(d + e)), taps[e]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float z[4][4], y[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) unpack(in[i + w], z[w]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        y[e] = fmaf(z[3][e], taps[e][3], fmaf(z[2][e], taps[e][2], fmaf(z[1][e], taps[e][1], z[0][e] * taps[e][0])));
        y[e] *= quick_sigmoid(y[e]);
      }
      pack(y, raw[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) raw[i] = in[i + 3];
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int t = t0 + i;
    if (kind == 2) {
      *reinterpret_cast<Quad<bfloat16>*>(s.v[t] + d) = raw[i];
    } else {
      float y[4];
      unpack(raw[i], y);
      *reinterpret_cast<float4*>(s.keys[1 - kind][t] + d) = make_float4(y[0], y[1], y[2], y[3]);
    }
    if (t < n) {
      if (windows) {
        *reinterpret_cast<Quad<bfloat16>*>(windows) = in[i + 1];
        *reinterpret_cast<Quad<bfloat16>*>(windows + tap) = in[i + 2];
        *reinterpret_cast<Quad<bfloat16>*>(windows + 2 * tap) = in[i + 3];
      }
      if (ring && first + t < a.L) *reinterpret_cast<Quad<bfloat16>*>(ring) = raw[i];
    }
    windows = windows ? windows + step : nullptr;
    ring = ring ? ring + entry : nullptr;
  }
}

/// Decays of kOwn tokens, as above.
template <int kOwn, class M>
__device__ __forceinline__ void gates(const HeadsCall& a, const Head& head, M& s, int t0, int first, int n, int lane) {
  const int d = lane * 4;
  const float amplitude = head.amplitude;
  float bias[4];
  row_of_four(s.bias + d, bias);
  float* ring = head.at<float>(kRingG);
  ring = ring ? ring + (first + t0) * a.ring_g_step + d : nullptr;
#pragma unroll 2
  for (int i = 0; i < kOwn; ++i) {
    const int t = t0 + i;
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
    if (ring && t < n && first + t < a.L) *reinterpret_cast<float4*>(ring) = make_float4(x[0], x[1], x[2], x[3]);
    ring = ring ? ring + a.ring_g_step : nullptr;
    *reinterpret_cast<float4*>(s.decay[t] + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
  }
}

/// Token t's output: its rounding, the gated norm (squares of 16 rows in turn, and these sums in a tree), the store.
template <class M>
__device__ __forceinline__ void finish(const HeadsCall& a, const Head& head, M& s, int first, int t, int turn, int lane) {
  const int d = lane * 4;
  float o[4];
  row_of_four(s.result(t, d), o);
  if (a.gate) {
    if (a.round_before_norm) round_bf16(o);
    float sum = dot4(o, o);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(kAll, sum, distance);
    const float r = rsqrtf(sum * (1.0f / kDim) + a.norm_eps);
    float g[4], weight[4];
    row_of_four(s.weight + d, weight);
    unpack(*reinterpret_cast<const Quad<bfloat16>*>(s.gate[turn & 1][t] + d), g);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = o[e] * r * weight[e] * quick_sigmoid(g[e]);
  }
  Quad<bfloat16> y;
  pack(o, y);
  *reinterpret_cast<Quad<bfloat16>*>(head.at<bfloat16>(kOut) + (first + t) * a.out_token + d) = y;
}

}  // namespace specstate::kda::cuda::plain
