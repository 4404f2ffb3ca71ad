#pragma once
// Ring mode from a frozen state (see frozen.cuh) where there are fewer heads than multiprocessors: what a lone head costs is latency, so it is
// spread over a cluster of four CTAs. Each has a quarter of the CHANNELS, for everything that is a sum over channels: convolution, gates, triangles,
// operands, the product with the state. What it has then are parts of the sums: those of P and Q it sends to the CTA that has their rows, those of
// the triangles to all. Each CTA goes on with its quarter of the value ROWS; the output norm's sums of squares are the last exchange.
//   warps 0-7    a pair a kind of input (q, k, v, gates), a thread four channels of a token, straight from memory; then two tiles of 8 rows of the
//                state each; the first four add up P and Q
//   warps 8-10   find the head and ask for what its slot has: the first for the windows, the others for the state; then the triangles
//   warps 11, 12 operands; then the first is what rows go through, from u to the output, a lane a row. The other begins as a scout, which brings the
//                state into L2 while kernels before this one still run
// Latency is instructions here, some five cycles each: so strides are 32 bits of bytes, and whatever needs no index waits for none. Tokens are asked for
// where they are if all requests have as many, before cu_seqlens may say otherwise; who asks for them does not wait for indices, because a warp's
// loads come back in turn. Sums are in the order of frozen.cuh, hence bits are equal. A head has at most one block of tokens.
#include "kda/cuda/frozen.cuh"

namespace specstate::kda::cuda::spread {

namespace ptx = specstate::cuda::ptx;
using plain::column_terms, plain::kDim, plain::kTokens, plain::multiply, plain::quarter_sums, plain::row_of_eight, plain::row_of_four,
    plain::truncated;

constexpr int kParts = SpreadCall::kParts, kChannels = kDim / kParts, kQuads = kChannels / 4, kTiles = kChannels / 8;
constexpr int kProduct = 8, kTriangles = 3, kLast = kProduct + kTriangles, kWarps = kLast + 2, kThreads = 32 * kWarps;
constexpr int kTriangle = 2 * kTokens * kTokens,
              kSent = 64 + 32 + kTokens;  // a part of the triangles in memory, and sent: without the upper right

/// What the indices say of a head. tokens 0: nothing to do.
struct Found {
  int slot, row, begin, tokens, behind;
  bool padding;
};

struct Shared {
  alignas(16) float state[kDim][kChannels + 4];
  alignas(16) bfloat16 window[3][3][kChannels];
  alignas(16) float keys[2][kTokens][kChannels];  // k, q
  alignas(16) float decay[kTokens][kChannels];
  alignas(16) float v[kTokens][kChannels];
  float4 operand[2][4][32];         // D_t k_t and D_t q_t for tensor cores: the larger part, the rest
  float4 sums[kParts][kTiles][32];  // P and Q of this CTA's rows as tensor cores leave them, over each quarter of the channels
  float triangles[kParts][kTriangle + kTokens];
  alignas(16) float triangle[2][kTokens][kTokens];
  alignas(16) float beta[kTokens], fk[kTokens], fq[kTokens];
  alignas(16) float rows[2 * kTokens][kChannels + 8];  // P and Q
  alignas(16) float o[kTokens][kChannels];
  float squares[kParts][kTokens];
  Found found;
  std::uint64_t windows_here, state_here, triangles_here, sums_here, squares_here, alone;
};

/// A place of shared memory in CTA `rank` of the cluster.
__device__ __forceinline__ std::uint32_t there(const void* p, unsigned rank) {
  std::uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(ptx::shared(p)), "r"(rank));
  return r;
}
/// Sends to a place there; a barrier there counts the bytes.
__device__ __forceinline__ void send(std::uint32_t to, float x, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send(std::uint32_t to, const float (&x)[4], std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3]), "r"(barrier)
               : "memory");
}
/// The four parts of a sum over channels.
__device__ __forceinline__ float sum_of(float a, float b, float c, float d) { return (a + b) + (c + d); }

/// `i` strides on, in bytes.
__device__ __forceinline__ const char* along(const char* p, int i, int stride) { return p + static_cast<std::int64_t>(i) * stride; }
__device__ __forceinline__ char* along(char* p, int i, int stride) { return p + static_cast<std::int64_t>(i) * stride; }
template <class T>
__device__ __forceinline__ const T& at(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

/// A request's indices: all are asked for before the first is looked at. See item.cuh.
struct Indices {
  Coming of[SpreadCall::kIndices];

  template <bool kEarly>
  __device__ __forceinline__ void ask(const SpreadCall& a, int request) {
#pragma unroll
    for (int i = 0; i < SpreadCall::kIndices; ++i) {
      const SpreadCall::Index& x = a.index[i];
      of[i] = {request * x.without_step + x.without, 0};
      const int* const p = reinterpret_cast<const int*>(along(reinterpret_cast<const char*>(x.data), request, x.step));
      if (x.data) of[i].low = kEarly ? __ldcg(p) : *p;
      if (x.wide) of[i].high = kEarly ? __ldcg(p + 1) : p[1];
    }
  }
  __device__ __forceinline__ int value(const SpreadCall& a, int i) const {
    return a.index[i].wide && of[i].high != of[i].low >> 31 ? of[i].high >> 31 ^ 0x7FFFFFFF : of[i].low;
  }
  __device__ __forceinline__ Found found(const SpreadCall& a) const {
    Found f = {
        value(a, SpreadCall::kSlot), value(a, SpreadCall::kRow), value(a, SpreadCall::kBegin), 0, value(a, SpreadCall::kBehind), false};
    const int end = value(a, SpreadCall::kEnd);
    f.tokens = 0 <= f.begin && f.begin <= end && end <= a.T ? end - f.begin : 0;
    f.padding = f.slot <= a.null_slot || f.slot >= a.pool || f.row < 0 || f.row >= a.row_count || f.tokens > a.steps;
    return f;
  }
};

__device__ __forceinline__ void clear_quarter(const SpreadCall& a, int begin, int end, int hv, int rank) {
  char* const to = along(a.out, hv, a.out_head) + (rank * kChannels + static_cast<int>(threadIdx.x) % kChannels) * 2;
  for (int t = begin + static_cast<int>(threadIdx.x) / kChannels; t < end; t += kThreads / kChannels)
    *reinterpret_cast<bfloat16*>(along(to, t, a.out_token)) = bfloat16{};
}

/// What kernels before this one may still write is asked for into L2 alone.
__device__ __forceinline__ void scout(const SpreadCall& a, Shared& s, int request, int hv, int h, int rank, int lane) {
  Indices indices;
  indices.ask<true>(a, request);
  const Found f = indices.found(a);
  if (f.tokens == 0 || f.padding || ptx::barrier_passed(&s.alone, 0)) return;
  const auto ask = [](const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); };
  const char* const state = along(along(a.state, f.slot, a.state_slot), hv, a.state_head) + rank * kChannels * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) ask(state + (i * 32 + lane) * kDim * 4);
  const SpreadCall::Channel& c = a.channels[lane % 4 % 3];
  const int of = lane % 4 % 3 < 2 ? h : hv;
  if (a.conv && lane % 4 < 3) {
    if (lane / 4 < 3)
      ask(along(along(along(c.window, f.slot, c.window_slot), of, c.window_head), lane / 4, c.window_tap) + rank * kChannels * 2);
    if (lane / 4 >= 4) ask(along(c.taps, of, c.taps_head) + rank * kChannels * 16 + lane / 4 % 4 * 128);
  }
}

/// 16 bytes that nobody reads again soon.
__device__ __forceinline__ void copy_once(void* to, const void* from, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(ptx::shared(to)), "l"(from), "l"(policy) : "memory");
}

__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ SpreadCall a) {
#if __CUDA_ARCH__ >= 900
  __shared__ Shared s;
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32, rank = static_cast<int>(ptx::cluster_rank());
  const int hv = static_cast<int>(blockIdx.x) / kParts, request = static_cast<int>(blockIdx.y), h = quotient(hv, a.by_group);
  {  // The parameters: a first read of 64 bytes is a miss, so the warps take them all at the same time.
    constexpr int kWords = sizeof(SpreadCall) / 8;
    if (const int i = (lane * kWarps + warp) * 8; i < kWords) asm volatile("" ::"l"(reinterpret_cast<const std::uint64_t*>(&a)[i]));
  }
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.windows_here, 3 * 32), ptx::barrier_init(&s.state_here, 2 * 32);
    ptx::barrier_init(&s.triangles_here, 1), ptx::barrier_init(&s.sums_here, 1), ptx::barrier_init(&s.squares_here, 1);
    ptx::barrier_init(&s.alone, 1);
    ptx::fence_barriers();
    ptx::barrier_expect(&s.triangles_here, kParts * kSent * 4);
    ptx::barrier_expect(&s.sums_here, sizeof(s.sums));
    ptx::barrier_expect(&s.squares_here, sizeof(s.squares));
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  if (warp == kWarps - 1) scout(a, s, request, hv, h, rank, lane);
  wait_for_predecessor();
  if (threadIdx.x == 0) ptx::barrier_arrive(&s.alone);
  launch_successor();

  const int quad = lane % kQuads, t = (warp & 1) * 4 + lane / kQuads, kind = warp / 2, d = rank * kChannels + quad * 4;
  const int guess = request * a.each;
  const SpreadCall::Channel& c = a.channels[warp < 6 ? kind : 0];
  const int of = kind < 2 ? h : hv;
  // Of warps 0 to 5: inputs and taps; of 6 and 7: gate and bias; of the last: output gates of tokens t and t + 4, weight.
  Quad<bfloat16> in[4] = {};
  Quad<float> taps[4] = {};
  unsigned a_log = 0, logit = 0;  // bits, not yet widened: to look at a load's result is to wait for it
  const auto ask_tokens = [&](int begin, int n) {
    if (warp < 6) {
      const char* const x = along(along(c.x + d * 2, of, c.x_head), begin + t, c.x_token);
      if (t < n) in[3] = at<Quad<bfloat16>>(x);
      if (a.conv)
#pragma unroll
        for (int i = 0; i < 3; ++i)
          if (t < n && t - 3 + i >= 0) in[i] = at<Quad<bfloat16>>(along(x, i - 3, c.x_token));
    } else if (warp < kProduct) {
      if (t < n) in[3] = at<Quad<bfloat16>>(along(along(a.g + d * 2, hv, a.g_head), begin + t, a.g_token));
    } else if (warp == kLast) {
      const char* const gate = along(along(a.gate + d * 2, hv, a.gate_head), begin + lane / kQuads, a.gate_token);
      if (a.gate && lane / kQuads < n) in[0] = at<Quad<bfloat16>>(gate);
      if (a.gate && lane / kQuads + 4 < n) in[1] = at<Quad<bfloat16>>(along(gate, 4, a.gate_token));
      const char* const p = along(along(a.logit, hv, a.logit_head), begin + lane, a.logit_token);
      if (lane < min(n, kTokens)) logit = a.logit_bf16 ? at<std::uint16_t>(p) : at<unsigned>(p);
    }
  };
  ask_tokens(guess, a.each);
  if (warp < 6) {
    const char* const from = along(c.taps + d * 16, of, c.taps_head);
    if (a.conv)
#pragma unroll
      for (int e = 0; e < 4; ++e) taps[e] = at<Quad<float>>(from + e * 16);
  } else if (warp < kProduct) {
    taps[0] = at<Quad<float>>(along(a.bias + d * 4, hv, a.bias_head));
    const char* const p = along(a.a_log, hv, a.a_log_head);
    a_log = a.a_log_bf16 ? at<std::uint16_t>(p) : at<unsigned>(p);
  } else if (warp == kLast && a.gate) {
    if (a.weight_bf16)
      in[2] = at<Quad<bfloat16>>(a.weight + d * 2);
    else
      taps[0] = at<Quad<float>>(a.weight + d * 4);
  }
  if (kProduct <= warp && warp < kLast) {  // what the slot has
    Indices indices;
    indices.ask<false>(a, request);
    const int of = warp == kProduct ? lane / 12 : 2, tap = lane / 4 % 3,
              piece = lane % 4;  // windows: the first warp q's and k's, the second v's
    const SpreadCall::Channel& c = a.channels[min(of, 2)];
    const char* window = along(along(c.window + (rank * kChannels + piece * 8) * 2, of < 2 ? h : hv, c.window_head), tap, c.window_tap);
    const int row = (warp - kProduct - 1) * (kDim / 2) + lane / 8, at = lane % 8 * 4;  // state: the second and the third a half
    const char* state = along(a.state + (row * kDim + rank * kChannels + at) * 4, hv, a.state_head);
    int window_slot = c.window_slot;
    asm volatile("" : "+l"(window), "+l"(state), "+r"(window_slot));
    const int slot = indices.value(a, SpreadCall::kSlot);
    const bool good = a.null_slot < slot && slot < a.pool;  // whatever the others say
    if (good && a.conv && lane < (warp == kProduct ? 24 : warp == kProduct + 1 ? 12 : 0))
      ptx::copy_async(s.window[of][tap] + piece * 8, along(window, slot, window_slot));
    if (warp < kLast - 1) ptx::copy_async_arrive(&s.windows_here);
    if (warp > kProduct) {
      const std::uint64_t policy = ptx::evict_first();
      const char* const from = along(state, slot, a.state_slot);
      if (good)
#pragma unroll
        for (int i = 0; i < kDim / 2; i += 4) copy_once(&s.state[row + i][at], from + i * kDim * 4, policy);
      ptx::copy_async_arrive(&s.state_here);
    } else {
      if (lane == 0) s.found = indices.found(a);
      ptx::barrier_arrive(&s.windows_here);
    }
  }
  float x[4], beta = 0;  // warps 6 and 7: log decays; the last: a token's beta
  const auto open_gates = [&] {
    if (kind == 3) {
      float bias[4];
      unpack(taps[0], bias), unpack(in[3], x);
      plain::log_decays(a, amplitude_of(__uint_as_float(a.a_log_bf16 ? a_log << 16 : a_log)), bias, x);
      *reinterpret_cast<float4*>(s.decay[t] + quad * 4) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
    } else if (warp == kLast && lane < kTokens) {
      s.beta[lane] = beta = sigmoid(__uint_as_float(a.logit_bf16 ? logit << 16 : logit));
    }
  };
  open_gates();
  ptx::cluster_wait();  // every CTA of the cluster is there to be sent to
  ptx::barrier_wait(&s.windows_here, 0);
  const Found it = s.found;
  if (it.tokens > 0 && !it.padding) {
    const int n = it.tokens;
    if (warp < 6 && a.conv)
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (t + i < 3) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(s.window[kind][t + i] + quad * 4);
    if (it.begin != guess || n > a.each) ask_tokens(it.begin, n), open_gates();
    // Tokens: each thread four channels of its own.
    Quad<bfloat16> raw = {};  // warps 0 to 5
    float y[4];
    if (warp < 6) {
      raw = a.conv ? plain::convolved(in, taps) : in[3];
      if (t >= n) raw = {};
      unpack(raw, y);
      put4((kind == 2 ? s.v[t] : s.keys[1 - kind][t]) + quad * 4, y, 1.0f);
    } else if (warp == kLast && rank == 0 && lane < min(n, a.L) && a.ring_beta) {
      *reinterpret_cast<float*>(along(along(along(a.ring_beta, it.slot, a.ring_beta_slot), hv, a.ring_beta_head), lane, a.ring_beta_step)) =
          beta;
    }
    __syncthreads();

    const float *const k = s.keys[0][0] + quad * 4, *const q = s.keys[1][0] + quad * 4, *const decays = s.decay[0] + quad * 4;
    const bool lower = warp < kProduct + 2;  // of the triangles' warps
    const int column = (lower ? warp - kProduct : 0) * 4 + lane / kQuads, row = (lower ? kTokens / 2 : 0) + quad % 4,
              entry = (quad / 4 * kTokens + row) * kTokens + column;
    if (kProduct <= warp && warp < kLast) {
      float end[4], sums[kTokens];
      if (lower)
        column_terms<true, kChannels>(k, q, decays, column, end, sums);
      else
        column_terms<false, kChannels>(k, q, decays, column, end, sums);
      const float sum = quarter_sums(sums, lane);
#pragma unroll
      for (int to = 0; to < kParts; ++to) send(there(&s.triangles[rank][entry], to), sum, there(&s.triangles_here, to));
    }
    if (warp >= kLast) {
      float product[4], key[4], query[4], y[kTokens][4];
      row_of_four(k + t * kChannels, key), row_of_four(q + t * kChannels, query);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) row_of_four(decays + i * kChannels, y[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) product[e] = y[0][e];
#pragma unroll
      for (int i = 1; i < kTokens; ++i)
        if (i <= t)
#pragma unroll
          for (int e = 0; e < 4; ++e) product[e] *= y[i][e];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 x = make_float4(key[2 * i] * product[2 * i], query[2 * i] * product[2 * i], key[2 * i + 1] * product[2 * i + 1],
                                     query[2 * i + 1] * product[2 * i + 1]),
                     large = make_float4(truncated(x.x), truncated(x.y), truncated(x.z), truncated(x.w));
        s.operand[0][quad / 4 * 2 + i][t * 4 + quad % 4] = large;
        s.operand[1][quad / 4 * 2 + i][t * 4 + quad % 4] = make_float4(x.x - large.x, x.y - large.y, x.z - large.z, x.w - large.w);
      }
    }
    if (warp < 2) {  // q's norm
      float sum = dot4(y, y);
#pragma unroll
      for (int distance = 1; distance < kQuads; distance *= 2) sum += __shfl_xor_sync(kAll, sum, distance);
      if (quad < kParts) send(there(&s.triangles[rank][kTriangle + t], quad), sum, there(&s.triangles_here, quad));
    }
    float large[2][4][2], small[2][4][2];
    if (warp < kProduct) {
      ptx::barrier_wait(&s.state_here, 0);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x[4];
          row_of_four(&s.state[warp * 16 + j * 8 + lane / 4][i * 16 + lane % 4 * 4], x);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            large[j][2 * i + e / 2][e % 2] = truncated(x[e]), small[j][2 * i + e / 2][e % 2] = x[e] - truncated(x[e]);
        }
    }
    if (warp < kProduct || warp >= kLast) ptx::barrier_of(1, 32 * (kProduct + 2));
    if (warp < kProduct) {
      const std::uint32_t to = there(&s.sums[rank][warp % 2 * 2][lane], warp / 2), there_too = there(&s.sums_here, warp / 2);
      float main[2][4], cross[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 y = s.operand[0][i][lane], z = s.operand[1][i][lane];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          multiply(cross[j], z, large[j][i][0], large[j][i][1], i == 0);
          multiply(main[j], y, large[j][i][0], large[j][i][1], i == 0);
          multiply(cross[j], y, small[j][i][0], small[j][i][1]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float sum[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = main[j][e] + cross[j][e];
        send(to + j * 32 * 16, sum, there_too);
      }
      // While they are on their way: windows and records.
      if (t < n && warp >= 6) {
        if (a.ring_g && t < a.L)
          *reinterpret_cast<float4*>(along(along(along(a.ring_g + d * 4, it.slot, a.ring_g_slot), hv, a.ring_g_head), t, a.ring_g_step)) =
              make_float4(x[0], x[1], x[2], x[3]);
      } else if (t < n && (kind == 2 || hv == h * static_cast<int>(a.by_group.by))) {  // a key head's, once
        if (c.windows) {
          char* const to = along(along(along(c.windows + d * 2, it.row, c.windows_row), of, c.windows_head), t, c.windows_step);
#pragma unroll
          for (int w = 0; w < 3; ++w) *reinterpret_cast<Quad<bfloat16>*>(along(to, w, c.windows_tap)) = in[w + 1];
        }
        if (c.raw && t < a.L)
          *reinterpret_cast<Quad<bfloat16>*>(along(along(along(c.raw + d * 2, it.slot, c.raw_slot), of, c.raw_head), t, c.raw_step)) = raw;
      }
      if (warp < kTiles) {
        ptx::barrier_wait(&s.sums_here, 0);
        float x[kParts][4];
#pragma unroll
        for (int i = 0; i < kParts; ++i) row_of_four(reinterpret_cast<const float*>(&s.sums[i][warp][lane]), x[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s.rows[e / 2 * kTokens + lane / 4][warp * 8 + lane % 4 * 2 + e % 2] = sum_of(x[0][e], x[1][e], x[2][e], x[3][e]);
      }
    }
    float betas[kTokens], fk[kTokens], fq[kTokens], l[kTokens][kTokens], m[kTokens][kTokens], v[kTokens], weight[4], gates[2][4];
    if (warp == kLast) {  // whatever does not need sums
      row_of_eight(s.beta, betas);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) v[i] = s.v[i][lane];
      if (a.weight_bf16)
        unpack(in[2], weight);
      else
        unpack(taps[0], weight);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unpack(in[i], gates[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) gates[i][e] = quick_sigmoid(gates[i][e]);
      }
    }
    if (kProduct <= warp && warp <= kLast) {
      ptx::barrier_wait(&s.triangles_here, 0);
      const auto sum_at = [&](int e) { return sum_of(s.triangles[0][e], s.triangles[1][e], s.triangles[2][e], s.triangles[3][e]); };
      if (warp < kLast) {
        const float sum = sum_at(entry);
        (&s.triangle[0][0][0])[entry] = sum;
        if (quad < 4 && row == column) s.fk[row] = a.l2norm ? inverse_norm(sum) : 1.0f;
      } else if (lane < kTokens) {
        s.fq[lane] = a.l2norm ? inverse_norm(sum_at(kTriangle + lane)) * a.scale : a.scale;
      }
      ptx::barrier_of(3, 32 * (kTriangles + 1));
    }
    if (warp == kLast) {
      row_of_eight(s.fk, fk), row_of_eight(s.fq, fq);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) row_of_eight(s.triangle[0][i], l[i]), row_of_eight(s.triangle[1][i], m[i]);
    }
    if (warp < kTiles || warp == kLast) ptx::barrier_of(2, 32 * (kTiles + 1));
    if (warp == kLast) {
      float p[kTokens], r[kTokens], u[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) p[i] = s.rows[i][lane], r[i] = s.rows[kTokens + i][lane];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        float sum = 0, out = 0;
#pragma unroll
        for (int j = 0; j < i; ++j) sum = fmaf(l[i][j], u[j], sum), out = fmaf(m[i][j], u[j], out);
        u[i] = betas[i] * fmaf(-fk[i], p[i] + sum, v[i]) * fk[i];
        s.o[i][lane] = fq[i] * (r[i] + fmaf(m[i][i], u[i], out));
      }
      __syncwarp();
      const int t0 = lane / kQuads;
      float o[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) row_of_four(s.o[t0 + 4 * i] + quad * 4, o[i]);
      if (a.gate) {
        float sum[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (a.round_before_norm) round_bf16(o[i]);
          sum[i] = dot4(o[i], o[i]);
        }
#pragma unroll
        for (int distance = 1; distance < kQuads; distance *= 2)
#pragma unroll
          for (int i = 0; i < 2; ++i) sum[i] += __shfl_xor_sync(kAll, sum[i], distance);
        if (quad < kParts) {
          const std::uint32_t to = there(&s.squares[rank][t0], quad), there_too = there(&s.squares_here, quad);
          send(to, sum[0], there_too), send(to + 4 * 4, sum[1], there_too);
        }
        ptx::barrier_wait(&s.squares_here, 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = t0 + 4 * i;
          const float norm =
              rsqrtf(sum_of(s.squares[0][at], s.squares[1][at], s.squares[2][at], s.squares[3][at]) * (1.0f / kDim) + a.norm_eps);
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][e] = o[i][e] * norm * weight[e] * gates[i][e];
        }
      }
      char* const to = along(along(a.out + d * 2, hv, a.out_head), it.begin + t0, a.out_token);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Quad<bfloat16> y;
        pack(o[i], y);
        if (t0 + 4 * i < n) *reinterpret_cast<Quad<bfloat16>*>(along(to, 4 * i, a.out_token)) = y;
      }
    }
  } else {
    ptx::barrier_wait(&s.state_here, 0);  // it may have been asked for
    if (it.tokens > 0) clear_quarter(a, it.begin, it.begin + it.tokens, hv, rank);
  }
  // Tokens that belong to no request.
  if (request == 0 && it.behind >= 0 && it.behind < a.T) clear_quarter(a, it.behind, a.T, hv, rank);
#endif
}

}  // namespace specstate::kda::cuda::spread
