#pragma once
// The frame of verify and decode where everything is as serving has it: heads of 128 x 128, bfloat16 activations, float32 states, chains,
// strides that copies of 16 bytes can follow. What a head's rows of the state go through is in sequence.cuh (the one recurrence) and
// frozen.cuh (ring mode's faster form); all around it is here.
//
// A CTA takes a head and then the next. kWorkers warps work, one more directs: it finds the heads, asks for their tokens and states, and does
// what little is left (betas, the rows of padding). With 8 workers two CTAs share a multiprocessor, so that one has its state on the way while
// the other works. A turn is a block of 8 tokens of a head:
//   stage      inputs (the three before the block too), gates, taps, as they are in memory; asked for while the block before is worked on
//   tokens     a warp a token (of 16 warps two share one); a lane has four channels. Convolution, SiLU, rounding, gates; records and windows
//              leave from registers
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
__device__ __forceinline__ const int* address_of(const ShortIndex& a, int i) { return a.data + i * a.step; }
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
  alignas(16)
      bfloat16 stage[3 * (kTokens + 3) + 3 * kTokens][kDim];  // q, k, v with the three before them; decay gates; two turns' output gates
  float4 taps[3 * kDim];                                      // of q, k and v's channels, see place_of_taps
  alignas(16) float bias[kDim], weight[kDim];
  alignas(16) float keys[2][kTokens][kDim];  // k, q; frozen: then P, Q and o
  alignas(16) float decay[kTokens][kDim];
  alignas(16) bfloat16 v[kTokens][kDim + 8];
  alignas(16) float operand[kFrozen ? 16 * 32 * 4 : kTokens * kDim];    // D_t k_t and D_t q_t; or o
  alignas(16) float halves[kFrozen && kWorkers == 16 ? 16 * kDim : 4];  // P and Q over the second half of the channels
  alignas(16) float triangle[2][kTokens][kTokens];
  alignas(16) float beta[2][kTokens], fk[kTokens], fq[kTokens], kq[kTokens];
  decltype(HeadsCall::places) places;
  Head head[3];
  Item first;  // the CTA's first head, before its places are known
  std::uint64_t found, first_here, tokens_here, stage_read, state_here, alone;

  __device__ float* base(int r) { return state_ + (r >= kHalf ? 16 : 0); }
  __device__ float* row(int r) { return base(r) + r * kDim; }
  __device__ bfloat16* inputs(int kind) { return stage[kind * (kTokens + 3)]; }
  __device__ bfloat16* g(int t) { return stage[3 * (kTokens + 3) + t]; }
  __device__ bfloat16* gate(int turn, int t) { return stage[3 * (kTokens + 3) + kTokens * (1 + (turn & 1)) + t]; }
  /// Row r (four, if it is a multiple of four) of column c of P and u of 8 tokens, and of Q and o. The order keeps banks apart.
  __device__ float* sums(int c, int r) { return keys[0][0] + c * kDim + (r ^ (c % kTokens * 4)); }
  /// The same of o of token t.
  __device__ float* result(int t, int r) { return kFrozen ? sums(kTokens + t, r) : operand + t * kDim + r; }
};

__device__ __forceinline__ void row_of_four(const float* row, float (&x)[4]) { unpack(*reinterpret_cast<const Quad<float>*>(row), x); }
__device__ __forceinline__ void row_of_four(const bfloat16* row, float (&x)[4]) {
  unpack(*reinterpret_cast<const Quad<bfloat16>*>(row), x);
}
__device__ __forceinline__ void row_of_eight(const float* row, float (&x)[8]) {
  const float4 y = *reinterpret_cast<const float4*>(row), z = *reinterpret_cast<const float4*>(row + 4);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
}

/// A barrier of the workers.
template <class M>
__device__ __forceinline__ void sync_workers() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * M::kWorkers) : "memory");
}
/// What workers leave to the director in every turn: that they have read this turn's tokens from the stage; the state. Over barriers at which workers
/// only arrive; that of the recurrence's stage lies in memory, since racecheck now and then loses an arrival at the other kind between the workers' own.
enum { kStageRead = 2, kStateRead = 3 };
template <int kWhat, class M>
__device__ __forceinline__ void leave(M& s) {
  if constexpr (kWhat == kStageRead && !M::kFrozen)
    ptx::barrier_arrive(&s.stage_read);
  else
    asm volatile("bar.arrive %0, %1;" ::"n"(kWhat), "n"(32 * M::kWorkers + 32) : "memory");
}
template <int kWhat, class M>
__device__ __forceinline__ void take(M& s, int turn) {
  if constexpr (kWhat == kStageRead && !M::kFrozen)
    ptx::barrier_wait(&s.stage_read, turn & 1);
  else
    asm volatile("bar.sync %0, %1;" ::"n"(kWhat), "n"(32 * M::kWorkers + 32) : "memory");
}

// ---- the director ----------------------------------------------------------------------------------------------------------

/// Zeros for tokens [begin, end) of a head, by `threads` threads.
template <class M>
__device__ __forceinline__ void clear(const HeadsCall& a, const M& s, std::int64_t begin, std::int64_t end, int hv, int thread,
                                      int threads) {
  bfloat16* const out = reinterpret_cast<bfloat16*>(s.places.of[kOut].base) + hv * a.out_head;
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
  unsigned next = blockIdx.x;  // so many heads are within an int, and what is asked for beyond them within 32 bits
  int lane;
  Item it = {};
  float a_log = 0;
  unsigned todo = 0, dead = 0;

  /// Heads from `next` on. kEarly: before the kernels before this one are done.
  template <bool kEarly>
  __device__ __forceinline__ void find(const HeadsCall& a) {
    it = item_of<kEarly>(a, next + static_cast<unsigned>(lane) * gridDim.x);
    if (it.tokens < a.fewest) it.tokens = 0;
    todo = __ballot_sync(kAll, it.tokens > 0 && !it.padding);
    dead = __ballot_sync(kAll, it.tokens > 0 && it.padding);
  }
  /// The same with their amplitudes, asked for with the indices and looked at (widened) after them.
  __device__ __forceinline__ void fill(const HeadsCall& a) {
    Item at;
    place_of(a, min(next + static_cast<unsigned>(lane) * gridDim.x, static_cast<unsigned>(a.N * a.HV) - 1), at);
    const std::int64_t of = at.hv * a.a_log_head;
    unsigned bits = a.a_log_bf16 ? static_cast<const std::uint16_t*>(a.a_log)[of] : static_cast<const unsigned*>(a.a_log)[of];
    find<false>(a);
    asm volatile("" : "+r"(bits), "+r"(it.tokens));
    a_log = __uint_as_float(a.a_log_bf16 ? bits << 16 : bits);
    next += 32 * gridDim.x;
  }

  /// The lane's place in the head that lane `from` has found.
  template <class M>
  __device__ __forceinline__ char* place(const HeadsCall& a, const M& s, int from) const {
    constexpr int q = 0, k = 1, v = 2;
    const Place mine = s.places.of[min(lane, kPlaces - 1)];
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

  /// Until there is a head, or no more. Gives rows of padding on the way their zeros.
  template <class M>
  __device__ __forceinline__ void go_on(const HeadsCall& a, M& s) {
    while (!todo) {
      for (; dead; dead &= dead - 1) {
        const int from = __ffs(static_cast<int>(dead)) - 1;
        const int begin = __shfl_sync(kAll, it.begin, from), n = __shfl_sync(kAll, it.tokens, from), hv = __shfl_sync(kAll, it.hv, from);
        clear<M>(a, s, begin, begin + n, hv, lane, 32);
      }
      if (next >= static_cast<unsigned>(a.N * a.HV)) break;
      fill(a);
    }
  }
  /// The head to come; no tokens: there is none.
  __device__ __forceinline__ void peek(Item& to) const {
    if (todo ? (todo & -todo) >> lane == 1 : lane == 0) {
      to = it;
      if (!todo) to.tokens = 0;
    }
  }
  /// That head into `to`.
  template <class M>
  __device__ __forceinline__ void pop(const HeadsCall& a, const M& s, Head& to) {
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
    for (int tap = 0; tap < 3; ++tap) ask(p + tap * a.places.rows[kRowsWindow + lane - kWindow] * 2, kDim * 2);
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
      rows(s.inputs(c), n + 3, x + (first - 3) * a.places.rows[kRowsX + c], a.places.rows[kRowsX + c]);
    } else {
      rows(s.inputs(c) + 3 * kDim, n, x, a.places.rows[kRowsX + c]);
      if (a.conv)
#pragma unroll
        for (int row = half; row < 3; row += 2)
          ptx::copy_async(s.inputs(c) + row * kDim + e, window + row * a.places.rows[kRowsWindow + c] + e, window != nullptr);
    }
  }
  rows(s.g(0), n, head.at<bfloat16>(kG) + first * a.places.rows[kRowsG], a.places.rows[kRowsG]);
  if (a.gate) rows(s.gate(turn, 0), n, head.at<bfloat16>(kGate) + first * a.places.rows[kRowsGate], a.places.rows[kRowsGate]);
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

/// What the director's request_tokens asks for, of the first head of the CTA: nothing can hide it, so all workers ask, half a warp 256 bytes.
template <class M>
__device__ __forceinline__ void request_first(const HeadsCall& a, M& s) {
  constexpr int kHalves = 2 * M::kWorkers, kBefore = 3, kEach = kTokens + kBefore;
  const int half = static_cast<int>(threadIdx.x) / 16, e = static_cast<int>(threadIdx.x) % 16 * 8;
  const Item it = s.first;
  const int n = min(kTokens, it.tokens);
  const auto place = [&](int i, int first, int kind) {  // kind 0 and 1: of a key head
    const Place& p = s.places.of[i];
    return p.base ? p.base + (first * p.first + (kind < 2 ? it.h : it.hv) * p.head) + e * 2 : nullptr;
  };
#pragma unroll
  for (int i = 0; i < 4 * kTokens; i += kHalves) {  // q, k, v and decay gates
    const int kind = (half + i) / kTokens, t = (half + i) % kTokens;
    if (t < n)
      ptx::copy_async(s.stage[kind * kEach + (kind < 3 ? kBefore : 0) + t] + e,
                      place(kind < 3 ? kX + kind : kG, it.begin, kind) + t * s.places.rows[kRowsX + kind] * 2);
  }
#pragma unroll
  for (int i = 0; i < 3 * kBefore + kTokens; i += kHalves) {  // windows, output gates
    const int row = half + i, kind = row / kBefore, w = row % kBefore, t = row - 3 * kBefore;
    if (kind < 3 ? a.conv : a.gate && t < n) {
      const char* const from = kind >= 3 ? place(kGate, it.begin, kind) : it.slot >= 0 ? place(kWindow + kind, it.slot, kind) : nullptr;
      ptx::copy_async((kind < 3 ? s.stage[kind * kEach + w] : s.gate(0, t)) + e,
                      from + (kind < 3 ? w : t) * s.places.rows[kind < 3 ? kRowsWindow + kind : kRowsGate] * 2, from != nullptr);
    }
  }
#pragma unroll
  for (int i = 0; i < 3 * kTokens + 2; i += kHalves) {  // taps, bias
    const int row = half + i, kind = row / kTokens, piece = row % kTokens, channel = piece * 16 + e / 8;
    if (kind < 3 && a.conv) ptx::copy_async(s.taps + kind * kDim + place_of_taps(channel), place(kTaps + kind, 0, kind) + piece * 256);
    if (kind == 3 && piece < 2) ptx::copy_async(s.bias + channel * 4, place(kBias, 0, kind) + piece * 256);
  }
  arrive_with_copies(&s.first_here);
}

/// The inputs of token t's convolution.
template <class M>
__device__ __forceinline__ void load_inputs(M& s, int kind, int t, int lane, Quad<bfloat16> (&in)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(s.inputs(kind) + (t + i) * kDim + lane * 4);
}
/// Convolution, SiLU and rounding of four channels: their inputs, oldest first, and their taps.
__device__ __forceinline__ Quad<bfloat16> convolved(const Quad<bfloat16> (&in)[4], const Quad<float> (&taps)[4]) {
  float w[4][4], z[4][4], y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) unpack(taps[e], w[e]), unpack(in[e], z[e]);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    y[e] = fmaf(z[3][e], w[e][3], fmaf(z[2][e], w[e][2], fmaf(z[1][e], w[e][1], z[0][e] * w[e][0])));
    y[e] *= quick_sigmoid(y[e]);
  }
  Quad<bfloat16> raw;
  pack(y, raw);
  return raw;
}
/// Gates of four channels become the logarithms of their decays. Call: HeadsCall, or what has its parameters of a gate.
template <class Call>
__device__ __forceinline__ void log_decays(const Call& a, float amplitude, const float (&bias)[4], float (&x)[4]) {
  if (a.safe_gate) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = a.lower_bound * sigmoid(amplitude * (x[e] + bias[e]));
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float z = x[e] + bias[e], y = z * a.softplus_beta, soft = softplus(y) * a.inverse_beta;
      x[e] = -(amplitude * (y > a.softplus_threshold || z != z ? z : soft));
    }
  }
}

/// Convolution, SiLU and rounding of token t of q, k or v.
template <int kKind, class M>
__device__ __forceinline__ void convolve(const HeadsCall& a, const Head& head, M& s, int t, int first, int lane,
                                         const Quad<bfloat16> (&in)[4]) {
  const int d = lane * 4;
  Quad<bfloat16> raw = in[3];
  if (a.conv) {
    Quad<float> taps[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) taps[e] = *reinterpret_cast<const Quad<float>*>(s.taps + kKind * kDim + place_of_taps(d + e));
    raw = convolved(in, taps);
  }
  if (kKind == 2) {
    *reinterpret_cast<Quad<bfloat16>*>(s.v[t] + d) = raw;
  } else {
    float y[4];
    unpack(raw, y);
    *reinterpret_cast<float4*>(s.keys[1 - kKind][t] + d) = make_float4(y[0], y[1], y[2], y[3]);
  }
  if (bfloat16* windows = head.at<bfloat16>(kWindows + kKind)) {
    windows += (first + t) * a.windows_step[kKind] + d;
#pragma unroll
    for (int w = 0; w < 3; ++w) *reinterpret_cast<Quad<bfloat16>*>(windows + w * a.windows_tap[kKind]) = in[w + 1];
  }
  if (kKind > 0)
    if (bfloat16* const ring = head.at<bfloat16>(kKind == 1 ? kRawK : kRawV); ring && first + t < a.L)
      *reinterpret_cast<Quad<bfloat16>*>(ring + (first + t) * (kKind == 1 ? a.rawk_step : a.rawv_step) + d) = raw;
}

/// Decays of token t.
template <class M>
__device__ __forceinline__ void gates(const HeadsCall& a, const Head& head, M& s, int t, int first, int lane) {
  const int d = lane * 4;
  const float amplitude = head.amplitude;
  float bias[4], x[4];
  row_of_four(s.bias + d, bias);
  unpack(*reinterpret_cast<const Quad<bfloat16>*>(s.g(t) + d), x);
  log_decays(a, amplitude, bias, x);
  if (float* const ring = head.at<float>(kRingG); ring && first + t < a.L)
    *reinterpret_cast<float4*>(ring + (first + t) * a.ring_g_step + d) = make_float4(x[0], x[1], x[2], x[3]);
  *reinterpret_cast<float4*>(s.decay[t] + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
}

/// All that is done to token t of the block before tokens meet; of 16 warps two share a token.
template <class M>
__device__ __forceinline__ void prepare(const HeadsCall& a, const Head& head, M& s, int warp, int first, int n, int lane) {
  const int t = warp % kTokens;
  if (t >= n) return;
  const bool keys = M::kWorkers == 8 || warp < 8, rest = M::kWorkers == 8 || warp >= 8;
  Quad<bfloat16> in[3][4];
  if (keys) load_inputs(s, 0, t, lane, in[0]), load_inputs(s, 1, t, lane, in[1]);
  if (rest) load_inputs(s, 2, t, lane, in[2]);
  if (keys) convolve<0>(a, head, s, t, first, lane, in[0]), convolve<1>(a, head, s, t, first, lane, in[1]);
  if (rest) convolve<2>(a, head, s, t, first, lane, in[2]), gates(a, head, s, t, first, lane);
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
    unpack(*reinterpret_cast<const Quad<bfloat16>*>(s.gate(turn, t) + d), g);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = o[e] * r * weight[e] * quick_sigmoid(g[e]);
  }
  Quad<bfloat16> y;
  pack(o, y);
  *reinterpret_cast<Quad<bfloat16>*>(head.at<bfloat16>(kOut) + (first + t) * a.out_token + d) = y;
}

}  // namespace specstate::kda::cuda::plain
