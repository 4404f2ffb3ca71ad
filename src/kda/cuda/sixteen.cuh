#pragma once
// Ring mode from a frozen state (see frozen.cuh) of requests of 16 tokens at most, for any number of heads: a head is a CTA, and three CTAs share a
// multiprocessor, so that whatever one head waits for another computes. One triangle of 16 x 16; the state is read once.
//   each       a pair of warps a kind of input (q, k, v, gates), a warp eight tokens in a row, a lane four channels, straight from memory, where tokens
//              are if all requests have as many; cu_seqlens may say otherwise later. One warp finds the head and asks for the windows of its slot.
//              Convolution, gates, records, windows
//   meeting    columns of the triangles, two at a time, four rows each: 20 parts; the warps that have fewer write the operands, a lane a channel
//   rows       a warp has 16 rows of the state from the copies that bring them to the output, and waits for no other warp: the product on tensor
//              cores; then a lane has a row, half the warp P and u, the other half Q and o, to which each token's u goes from the first; then a lane
//              has four rows of a token, and of the eighth after it. Warps meet once more, for the norm's sums of squares
// Three of the four quarters of a row's channels are in shared memory at a time: the last comes to the place of the first when that has been multiplied.
// P and Q lie in the second's place, o in the third's. Rows of the last four warps lie where keys, queries and decays lie before, so these are asked
// for when tokens have met. Strides are 32 bits of bytes. Sums are in the order of frozen.cuh, hence bits are equal to those of spread.cuh.
#include "kda/cuda/frozen.cuh"
#include "kda/cuda/narrow.cuh"

namespace specstate::kda::cuda::sixteen {

using namespace narrow;
using plain::convolved, plain::kDim, plain::log_decays, plain::multiply, plain::row_of_eight, plain::row_of_four, plain::transposed_sums,
    plain::truncated;

constexpr int kTokens = 16, kFour = 4;                    // kFour: rows of a column that are worked on at once
constexpr int kQuarter = kDim / 4, kHeld = 3 * kQuarter;  // channels

/// 8 warps, and three CTAs a multiprocessor; or 16, and one.
template <int kWarps_>
struct Shared {
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kEach = kWarps == 8 ? 3 : 1;
  static constexpr int kRows = kDim / kWarps, kOwn = 4 * kTokens / kWarps;  // rows of the state, tokens of a kind of input: a warp's
  static constexpr bool kTight = kWarps == 8;
  static constexpr int kEarly = kTight ? 4 : kWarps;  // warps whose rows are not asked for late
  static constexpr int kFinder = kWarps - 1, kQuads = kRows / 4, kOutputs = kTokens * kQuads / 32;

  // A row's 16-byte pieces: in odd rows halves of a quarter change places, so that reads of two rows meet no bank twice.
  alignas(128) float rows[kWarps][kRows][kHeld];
  alignas(16) float tokens[kTight ? 4 : 3 * kTokens * kDim];
  float4 operand[2][kDim / 8][32];  // D_t k_t and D_t q_t for tensor cores, 8 tokens each; before: the windows of the slot
  alignas(16) bfloat16 v[kTokens][kDim];
  alignas(16) float triangle[kTokens][2][kTokens];  // by column
  alignas(16) float beta[kTokens], fk[kTokens], fq[kTokens];
  alignas(16) float squares[kTokens][kWarps];
  Found found;
  std::uint64_t windows_here;

  __device__ float* key(int t) { return (kTight ? rows[kEarly % kWarps][0] : tokens) + t * kDim; }
  __device__ float* query(int t) { return key(kTokens + t); }
  __device__ float* decay(int t) { return key(2 * kTokens + t); }
  __device__ bfloat16* window(int kind, int tap) { return reinterpret_cast<bfloat16*>(operand) + (kind * 3 + tap) * kDim; }
  /// Of a warp's row: P of token c (four, if it is a multiple of four), or Q of token c - 16. The order keeps banks apart.
  __device__ float* sums(int warp, int row, int c) { return rows[warp][row] + kQuarter + (c / 4 ^ row % 8) * 4 + c % 4; }
  /// Of a token: o of a warp's row (four, if it is a multiple of four).
  __device__ float* result(int warp, int t, int row) {
    return rows[warp][t % kRows] + 2 * kQuarter + (t / kRows ^ t % (kQuarter / kRows)) * kRows + row;
  }
};
static_assert(sizeof(Shared<8>) <= 228 * 1024 / 3 - 1024);
static_assert(3 * kTokens * kDim <= 4 * 16 * kHeld);

template <class M>
__device__ __forceinline__ void clear(const SpreadCall& a, int begin, int end, int hv) {
  char* const to = along(a.out, hv, a.out_head) + static_cast<int>(threadIdx.x) % kDim * 2;
  for (int t = begin + static_cast<int>(threadIdx.x) / kDim; t < end; t += M::kThreads / kDim)
    *reinterpret_cast<bfloat16*>(along(to, t, a.out_token)) = bfloat16{};
}

/// What depends on these is found anew from here on, so that it takes no registers before.
__device__ __forceinline__ void renew(int& warp, int& lane) {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  warp = uniform(thread / 32), lane = thread % 32;
}
/// Not before what comes before it in the code: tokens one after the other need fewer registers.
__device__ __forceinline__ void in_turn(Quad<bfloat16>& x) { asm volatile("" : "+r"(x.w[0]), "+r"(x.w[1])::"memory"); }

/// Quarters of this warp's rows of the state, eight lanes 128 bytes of a row.
template <int kFirst, int kEnd, class M>
__device__ __forceinline__ void request_rows(const char* state, M& s, int warp, int lane) {
  const int row = lane / 8, piece = lane % 8;
  const char* const from = state + ((warp * M::kRows + row) * kDim + piece * 4) * 4;
  float* const to = s.rows[warp][row] + (piece ^ row % 2 * 4) * 4;
#pragma unroll
  for (int i = 0; i < M::kRows; i += 4)
#pragma unroll
    for (int quarter = kFirst; quarter < kEnd; ++quarter)
      ptx::copy_async(to + i * kHeld + quarter % 3 * kQuarter, from + (i * kDim + quarter * kQuarter) * 4);
  ptx::copy_async_commit();
}

/// Rows [4 first, 4 end) of columns 2 pair and 2 pair + 1 of the triangles, and the norms of their keys where those rows are among them.
template <class M>
__device__ __forceinline__ void columns(const SpreadCall& a, M& s, int pair, int first, int end, int lane) {
  const int j = 2 * pair;
  const float* keys = s.key(0) + lane * 4;
  const float* decays = s.decay(0) + lane * 4;
  float x[2][4];
  row_of_four(keys + j * kDim, x[0]), row_of_four(keys + (j + 1) * kDim, x[1]);
#pragma unroll 2
  for (int i = j + 1; i < kFour * first; ++i) {
    float y[4];
    row_of_four(decays + i * kDim, y);
#pragma unroll
    for (int c = 0; c < 2; ++c)
      if (i > j + c)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[c][e] *= y[e];
  }
  keys += first * kFour * kDim, decays += first * kFour * kDim;
#pragma unroll 1
  for (int group = first; group < end; ++group) {
    float sums[2][2 * kFour];
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      float decay[4], k[4], q[4];
      row_of_four(decays + i * kDim, decay), row_of_four(keys + i * kDim, k), row_of_four(keys + (kTokens + i) * kDim, q);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (kFour * group + i > j + c)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[c][e] *= decay[e];
        sums[c][i] = dot4(x[c], k), sums[c][kFour + i] = dot4(x[c], q);
      }
    }
    const int t = kFour * group + lane % kFour;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float sum = transposed_sums(sums[c], lane);
      if (lane < 2 * kFour) s.triangle[j + c][lane / kFour][t] = sum;
      if (lane < kFour && t == j + c) s.fk[j + c] = a.l2norm ? inverse_norm(sum) : 1.0f;
    }
    keys += kFour * kDim, decays += kFour * kDim;
  }
}

/// D_t k_t and D_t q_t of a channel, tokens [8 group, 8 group + 8) of n.
template <class M>
__device__ __forceinline__ void operands(M& s, int channel, int group, int n) {
  const float* from = s.key(0) + channel;
  float2* const to = reinterpret_cast<float2*>(&s.operand[group][channel / 16 * 2 + channel / 2 % 2][channel / 4 % 4]) + channel % 2;
  if (8 * group >= n) return;
  float product = 1.0f;
  if (group > 0) {
#pragma unroll
    for (int t = 0; t < 8; ++t) product *= from[(2 * kTokens + t) * kDim];
    from += 8 * kDim;
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    product *= from[(2 * kTokens + t) * kDim];
    to[t * 4 * 2] = make_float2(from[t * kDim] * product, from[(kTokens + t) * kDim] * product);
  }
}

/// P and Q of this warp's rows: one or two tiles of 8 rows, two groups of 8 tokens. Three quarters of the rows are there.
template <class M>
__device__ __forceinline__ void multiply_rows(const char* state, M& s, int warp, int lane) {
  constexpr int kTiles = M::kRows / 8;
  const int g = lane / 4, t = lane % 4;
  const float* const from = s.rows[warp][g] + 4 * t;
  const int swapped = g % 2 * 16;
  const float4* operands = &s.operand[0][0][lane];
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float pair[2][kTiles][4];
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      const float* const place = from + (half ? quarter ? 0 : 2 * kQuarter : quarter * kQuarter);
      float main[2][kTiles][4], cross[2][kTiles][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4 x[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) x[j] = *reinterpret_cast<const float4*>(place + j * 8 * kHeld + (16 * i ^ swapped));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool first = i == 0 && h == 0;
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            const float4 y = operands[(b * (kDim / 8) + 4 * quarter + 2 * i + h) * 32],
                         large = make_float4(truncated(y.x), truncated(y.y), truncated(y.z), truncated(y.w)),
                         small = make_float4(y.x - large.x, y.y - large.y, y.z - large.z, y.w - large.w);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
              const float b0 = h ? x[j].z : x[j].x, b1 = h ? x[j].w : x[j].y, large0 = truncated(b0), large1 = truncated(b1);
              multiply(cross[b][j], small, large0, large1, first);
              multiply(main[b][j], large, large0, large1, first);
              multiply(cross[b][j], large, b0 - large0, b1 - large1);
            }
          }
        }
      }
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float sum = main[b][j][e] + cross[b][j][e];
            pair[b][j][e] = quarter ? pair[b][j][e] + sum : sum;
          }
      __syncwarp();
      if (quarter == 0 && half == 0) request_rows<3, 4>(state, s, warp, lane);
      if (quarter == 0 && half == 1) {
        ptx::copy_async_wait<0>();
        __syncwarp();
      }
    }
    int at = lane;  // places are found anew, so that they take no registers before
    asm volatile("" : "+r"(at));
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& to = *s.sums(warp, 8 * j + at % 4 * 2 + e % 2, e / 2 * kTokens + 8 * b + at / 4);
          to = half ? to + pair[b][j][e] : pair[b][j][e];
        }
    operands += 8 * 32;
  }
  __syncwarp();
}

template <class M>
__global__ void __launch_bounds__(M::kThreads, M::kEach) kernel(const __grid_constant__ SpreadCall a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  constexpr int kWarps = M::kWarps, kRows = M::kRows, kOwn = M::kOwn, kEarly = M::kEarly, kFinder = M::kFinder, kQuads = M::kQuads,
                kOutputs = M::kOutputs, kKind = kWarps / 4;
  M& s = *reinterpret_cast<M*>(memory);
  int warp, lane;
  renew(warp, lane);
  {  // The parameters: a first read of 64 bytes is a miss, so warps take them all at the same time. What is read goes where nothing is yet.
    constexpr int kLines = (sizeof(SpreadCall) + 63) / 64;
    if (const int line = lane * kWarps + warp; line < kLines)
      reinterpret_cast<std::uint64_t*>(s.squares)[line] = reinterpret_cast<const std::uint64_t*>(&a)[line * 8];
  }
  if (warp == kFinder) {
    if (lane == 0) {
      ptx::barrier_init(&s.windows_here, 32);
      ptx::fence_barriers();
    }
    __syncwarp();
  }
  wait_for_predecessor();
  launch_successor();
  const int hv = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y), h = quotient(hv, a.by_group);

  // What is asked for first comes first: so the indices (by one warp, since all CTAs ask for the same few lines), then what needs none, then what the
  // slot has.
  Indices indices = {};
  if (warp == kFinder) indices.ask<false>(a, request);
  const int kind = warp / kKind, t0 = warp % kKind * kOwn, d = lane * 4, guess = request * a.each;
  const SpreadCall::Channel& c = a.channels[min(kind, 2)];
  const int of = kind < 2 ? h : hv;
  Quad<bfloat16> in[kOwn + 3] = {};
  Quad<float> taps[4] = {};       // or the gates' bias
  unsigned a_log = 0, logit = 0;  // bits, not yet widened: to look at a load's result is to wait for it
  const auto ask_tokens = [&](int begin, int n) {
    if (kind < 3) {
      const char* const x = along(along(c.x + d * 2, of, c.x_head), begin + t0, c.x_token);
#pragma unroll
      for (int i = 0; i < kOwn + 3; ++i)
        if (const int t = t0 + i - 3; t < n && (i >= 3 || (a.conv && t >= 0))) in[i] = at<Quad<bfloat16>>(along(x, i - 3, c.x_token));
    } else {
      const char* const g = along(along(a.g + d * 2, hv, a.g_head), begin + t0, a.g_token);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (t0 + i < n) in[3 + i] = at<Quad<bfloat16>>(along(g, i, a.g_token));
      const char* const p = along(along(a.logit, hv, a.logit_head), begin + lane, a.logit_token);
      if (warp == kFinder - 1 && lane < min(n, kTokens)) logit = a.logit_bf16 ? at<std::uint16_t>(p) : at<unsigned>(p);
    }
  };
  ask_tokens(guess, a.each);
  if (kind < 3) {
    const char* const from = along(c.taps + d * 16, of, c.taps_head);
    if (a.conv)
#pragma unroll
      for (int e = 0; e < 4; ++e) taps[e] = at<Quad<float>>(from + e * 16);
  } else {
    taps[0] = at<Quad<float>>(along(a.bias + d * 4, hv, a.bias_head));
    const char* const p = along(a.a_log, hv, a.a_log_head);
    a_log = a.a_log_bf16 ? at<std::uint16_t>(p) : at<unsigned>(p);
  }
  if (warp == kFinder) {
    const Found f = indices.found(a);
    if (lane == 0) s.found = f;
    if (a.conv && a.null_slot < f.slot && f.slot < a.pool)
#pragma unroll
      for (int i = 0; i < 5; ++i) {  // half a warp a row
        const int row = 2 * i + lane / 16, kind = row / 3, tap = row % 3, e = lane % 16;
        const SpreadCall::Channel& x = a.channels[min(kind, 2)];
        if (kind < 3)
          ptx::copy_async(
              s.window(kind, tap) + e * 8,
              along(along(along(x.window + e * 16, f.slot, x.window_slot), kind < 2 ? h : hv, x.window_head), tap, x.window_tap));
      }
    ptx::copy_async_arrive(&s.windows_here);
  }
  __syncthreads();
  const Found it = s.found;
  if (request == 0 && it.behind >= 0 && it.behind < a.T) clear<M>(a, it.behind, a.T, hv);  // tokens that belong to no request
  if (it.tokens == 0 || it.padding || it.tokens > kTokens) {
    if (it.padding) clear<M>(a, it.begin, it.begin + it.tokens, hv);
    ptx::barrier_wait(&s.windows_here, 0);  // they may have been asked for
    return;
  }
  const int n = it.tokens;
  const char* const state = along(along(a.state, it.slot, a.state_slot), hv, a.state_head);
  if (warp < kEarly) request_rows<0, 3>(state, s, warp, lane);
  if (it.begin != guess || n > a.each) ask_tokens(it.begin, n);

  // Tokens, each by itself.
  if (kind < 3) {
    if (a.conv && t0 == 0) {
      ptx::barrier_wait(&s.windows_here, 0);
#pragma unroll
      for (int i = 0; i < 3; ++i) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(s.window(kind, i) + d);
    }
    const bool mine = kind == 2 || hv == h * static_cast<int>(a.by_group.by);  // a key head's, once
    char* windows =
        mine && c.windows ? along(along(along(c.windows + d * 2, it.row, c.windows_row), of, c.windows_head), t0, c.windows_step) : nullptr;
    char* raw = mine && c.raw ? along(along(along(c.raw + d * 2, it.slot, c.raw_slot), of, c.raw_head), t0, c.raw_step) : nullptr;
    float squares[8] = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int t = t0 + i;
      if (t >= n) break;
      if (i > 1) in_turn(in[i + 3]);
      const Quad<bfloat16> inputs[4] = {in[i], in[i + 1], in[i + 2], in[i + 3]};
      const Quad<bfloat16> z = a.conv ? convolved(inputs, taps) : in[i + 3];
      if (kind == 2) {
        *reinterpret_cast<Quad<bfloat16>*>(s.v[t] + d) = z;
      } else {
        float y[4];
        unpack(z, y);
        put4((kind ? s.key(t) : s.query(t)) + d, y, 1.0f);
        squares[i] = dot4(y, y);
      }
      if (windows) {
        *reinterpret_cast<Quad<bfloat16>*>(windows) = in[i + 1];
        *reinterpret_cast<Quad<bfloat16>*>(windows + c.windows_tap) = in[i + 2];
        *reinterpret_cast<Quad<bfloat16>*>(along(windows, 2, c.windows_tap)) = in[i + 3];
        windows += c.windows_step;
      }
      if (raw) {
        if (t < a.L) *reinterpret_cast<Quad<bfloat16>*>(raw) = z;
        raw += c.raw_step;
      }
    }
    if (kind == 0) {  // q's norms
      const float sum = transposed_sums(squares, lane);
      if (lane < kOwn) s.fq[t0 + lane] = a.l2norm ? inverse_norm(sum) * a.scale : a.scale;
    }
  } else {
    float bias[4];
    unpack(taps[0], bias);
    const float amplitude = amplitude_of(__uint_as_float(a.a_log_bf16 ? a_log << 16 : a_log));
    char* ring = a.ring_g ? along(along(along(a.ring_g + d * 4, it.slot, a.ring_g_slot), hv, a.ring_g_head), t0, a.ring_g_step) : nullptr;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int t = t0 + i;
      if (t >= n) break;
      if (i > 1) in_turn(in[i + 3]);
      float x[4];
      unpack(in[3 + i], x);
      log_decays(a, amplitude, bias, x);
      *reinterpret_cast<float4*>(s.decay(t) + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
      if (ring) {
        if (t < a.L) *reinterpret_cast<float4*>(ring) = make_float4(x[0], x[1], x[2], x[3]);
        ring += a.ring_g_step;
      }
    }
    if (warp == kFinder - 1 && lane < n) {
      const float beta = sigmoid(__uint_as_float(a.logit_bf16 ? logit << 16 : logit));
      s.beta[lane] = beta;
      if (lane < a.L && a.ring_beta)
        *reinterpret_cast<float*>(
            along(along(along(a.ring_beta, it.slot, a.ring_beta_slot), hv, a.ring_beta_head), lane, a.ring_beta_step)) = beta;
    }
  }
  __syncthreads();

  // Tokens meet: the columns' 20 parts, three a warp of 8 at most, and two of 16.
  {
    const int groups = (n + kFour - 1) / kFour;
    int pair = warp, from = warp / 2, to = warp < 2 ? 3 : 4;
    if (kWarps == 16)
      pair = 0x7655443332221100ull >> 4 * warp & 15, from = 0x3332323213212020ull >> 4 * warp & 15, to = from + (warp < 4 ? 2 : 1);
    if (2 * pair < n) columns(a, s, pair, from, min(to, groups), lane);
    if (kWarps == 8 && warp >= 6 && groups == 4) columns(a, s, warp - 6, 3, 4, lane);
    if (warp >= kWarps - 8) operands(s, warp % 4 * 32 + lane, (warp - (kWarps - 8)) / 4, n);
  }
  __syncthreads();
  if (warp >= kEarly) request_rows<0, 3>(state, s, warp, lane);
  renew(warp, lane);
  ptx::copy_async_wait<0>();
  __syncwarp();
  multiply_rows(state, s, warp, lane);

  // Rows along the tokens.
  renew(warp, lane);
  const Found found = s.found;
  const int rows = warp * kRows + lane % kQuads * 4, token = lane / kQuads;  // at the end: four rows of this token, and the next turn's
  constexpr int kTurn = 32 / kQuads;
  Quad<bfloat16> gate[kOutputs] = {};
  Quad<float> weight = {};
  if (a.gate) {
    const char* const from = along(along(a.gate + rows * 2, hv, a.gate_head), found.begin + token, a.gate_token);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
      if (token + kTurn * i < found.tokens) gate[i] = at<Quad<bfloat16>>(along(from, kTurn * i, a.gate_token));
    if (a.weight_bf16) {
      const Quad<bfloat16> w = at<Quad<bfloat16>>(a.weight + rows * 2);
      weight.w[0] = w.w[0], weight.w[1] = w.w[1];
    } else {
      weight = at<Quad<float>>(a.weight + rows * 4);
    }
  }
  {
    const int row = lane % kRows, which = lane / kRows % 2;
    float start[kTokens], sum[kTokens] = {};
#pragma unroll
    for (int i = 0; i < kTokens; i += 4) {
      float x[4];
      row_of_four(s.sums(warp, row, which * kTokens + i), x);
#pragma unroll
      for (int e = 0; e < 4; ++e) start[i + e] = x[e];
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const float fk = s.fk[j], x = s.beta[j] * fmaf(-fk, start[j] + sum[j], core::to_float(s.v[j][warp * kRows + row])),
                  u = __shfl_sync(kAll, x * fk, row);
#pragma unroll
      for (int i = j / 4 * 4; i < kTokens; i += 4) {
        float column[4];
        row_of_four(s.triangle[j][which] + i, column);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (i + e >= j) sum[i + e] = fmaf(column[e], u, sum[i + e]);
      }
      if (lane / kRows == 1) *s.result(warp, j, row) = s.fq[j] * (start[j] + sum[j]);
    }
  }
  __syncwarp();
  float o[kOutputs][4];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) row_of_four(s.result(warp, token + kTurn * i, lane % kQuads * 4), o[i]);
  if (a.gate) {
    float g[kOutputs][4], w[4];
    if (a.weight_bf16)
      unpack(Quad<bfloat16>{{weight.w[0], weight.w[1]}}, w);
    else
      unpack(weight, w);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      if (a.round_before_norm) round_bf16(o[i]);
      float sum = dot4(o[i], o[i]);
      sum += __shfl_xor_sync(kAll, sum, 1);
      if (kQuads == 4) sum += __shfl_xor_sync(kAll, sum, 2);
      if (lane % kQuads == 0) s.squares[token + kTurn * i][warp] = sum;
      unpack(gate[i], g[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) g[i][e] = quick_sigmoid(g[i][e]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      float x[8];
      if constexpr (kWarps == 8) {
        row_of_eight(s.squares[token + kTurn * i], x);
      } else {
        float y[2][8];
        row_of_eight(s.squares[token + kTurn * i], y[0]), row_of_eight(s.squares[token + kTurn * i] + 8, y[1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = y[e / 4][e % 4 * 2] + y[e / 4][e % 4 * 2 + 1];
      }
      const float r = rsqrtf((((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))) * (1.0f / kDim) + a.norm_eps);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = o[i][e] * r * w[e] * g[i][e];
    }
  }
  char* const to = along(along(a.out + rows * 2, hv, a.out_head), found.begin + token, a.out_token);
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    Quad<bfloat16> y;
    pack(o[i], y);
    if (token + kTurn * i < found.tokens) *reinterpret_cast<Quad<bfloat16>*>(along(to, kTurn * i, a.out_token)) = y;
  }
#endif
}

template <int kWarps>
SpreadKernel form() {
  using M = Shared<kWarps>;
  return {kernel<M>, sizeof(M), M::kThreads};
}

}  // namespace specstate::kda::cuda::sixteen
