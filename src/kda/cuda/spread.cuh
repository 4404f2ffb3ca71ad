#pragma once
// Ring mode from a frozen state (see frozen.cuh) where there are fewer heads than multiprocessors: what a lone head costs is latency, so it is
// spread over a cluster of four CTAs. Each has a quarter of the CHANNELS, for everything that is a sum over channels: convolution, gates, triangles,
// operands, the product with the state. What it has then are parts of the sums: those of P and Q it sends to the CTA that has their rows, those of
// the triangles to all. Each CTA goes on with its quarter of the value ROWS; the output norm's sums of squares are the last exchange.
//   product     8 warps: a pair a kind of input (q, k, v, gates), a thread four channels of one token or two in a row, straight from memory; then two
//               tiles of 8 rows of the state each; some of them add up P and Q
//   triangles   3 warps (10 of 16 tokens): the first three find the head and ask for what its slot has, one for the windows, two for the state;
//               then four columns of four rows each; the first ones finish four tokens each, a lane four rows
//   last        2 warps: operands; then the first is what rows go through for u, a lane a row. The other begins as a scout, which brings the state
//               into L2 while kernels before this one still run
// Latency is instructions here, some five cycles each: so strides are 32 bits of bytes, and whatever needs no index waits for none. Tokens are asked for
// where they are if all requests have as many, before cu_seqlens may say otherwise; who asks for them does not wait for indices, because a warp's
// loads come back in turn. Sums are in the order of frozen.cuh, hence bits are equal. A head has at most one block of 8 or 16 tokens.
#include "kda/cuda/frozen.cuh"
#include "kda/cuda/narrow.cuh"

namespace specstate::kda::cuda::spread {

namespace ptx = specstate::cuda::ptx;
using namespace narrow;
using plain::kDim, plain::multiply, plain::quarter_sums, plain::row_of_four, plain::truncated;

constexpr int kParts = SpreadCall::kParts, kChannels = kDim / kParts, kQuads = kChannels / 4, kTiles = kChannels / 8;
constexpr int kProduct = 8, kFour = 4;  // warps of the product; tokens or rows that are taken at once

template <int kTokens_>
struct Shared {
  static constexpr int kTokens = kTokens_, kGroups = kTokens / 8, kFours = kTokens / kFour;
  // Warps: the triangles have a part a warp, four columns of four rows. Of 16 tokens the first of them finish four each; 8 tokens the last warp finishes
  // alone, which spares a barrier.
  static constexpr bool kApart = kTokens > 8;
  static constexpr int kTriangles = kFours * (kFours + 1) / 2, kLast = kProduct + kTriangles, kWarps = kLast + 2, kThreads = 32 * kWarps;
  static constexpr int kSent = 32 * kTriangles + kTokens;  // parts of a triangle, norms of q

  alignas(16) float state[kDim][kChannels + 4];
  alignas(16) bfloat16 window[3][3][kChannels];
  alignas(16) float keys[2][kTokens][kChannels];  // k, q
  alignas(16) float decay[kTokens][kChannels];
  alignas(16) float v[kTokens][kChannels];
  float4 operand[2][kGroups][4][32];         // D_t k_t and D_t q_t for tensor cores: the larger part, the rest
  float4 sums[kParts][kGroups][kTiles][32];  // P and Q of this CTA's rows as tensor cores leave them, over each quarter of the channels
  float triangles[kParts][kSent];
  alignas(16) float lower[kTokens][kTokens], upper[kTokens][kTokens];  // L, a column a row; A
  alignas(16) float beta[kTokens], fk[kTokens], fq[kTokens];
  alignas(16) float rows[2][kTokens][kChannels + 8];  // P and then u, Q
  float squares[kParts][kTokens];
  Found found;
  std::uint64_t windows_here, state_here, triangles_here, sums_here, squares_here, u_here, alone;
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

template <class M>
__device__ __forceinline__ void clear_quarter(const SpreadCall& a, int begin, int end, int hv, int rank) {
  char* const to = along(a.out, hv, a.out_head) + (rank * kChannels + static_cast<int>(threadIdx.x) % kChannels) * 2;
  for (int t = begin + static_cast<int>(threadIdx.x) / kChannels; t < end; t += M::kThreads / kChannels)
    *reinterpret_cast<bfloat16*>(along(to, t, a.out_token)) = bfloat16{};
}

/// What kernels before this one may still write is asked for into L2 alone.
template <class M>
__device__ __forceinline__ void scout(const SpreadCall& a, M& s, int request, int hv, int h, int rank, int lane) {
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

template <class M>
__global__ void __launch_bounds__(M::kThreads, 1) kernel(const __grid_constant__ SpreadCall a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  constexpr int kTokens = M::kTokens, kWarps = M::kWarps, kTriangles = M::kTriangles, kLast = M::kLast, kOwn = kTokens / 8,
                kFinish = kTokens / kFour;
  M& s = *reinterpret_cast<M*>(memory);
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32, rank = static_cast<int>(ptx::cluster_rank());
  const int hv = static_cast<int>(blockIdx.x) / kParts, request = static_cast<int>(blockIdx.y), h = quotient(hv, a.by_group);
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.windows_here, 3 * 32), ptx::barrier_init(&s.state_here, 2 * 32);
    ptx::barrier_init(&s.triangles_here, 1), ptx::barrier_init(&s.sums_here, 1), ptx::barrier_init(&s.squares_here, 1);
    ptx::barrier_init(&s.u_here, 32), ptx::barrier_init(&s.alone, 1);
    ptx::fence_barriers();
    ptx::barrier_expect(&s.triangles_here, kParts * M::kSent * 4);
    ptx::barrier_expect(&s.sums_here, sizeof(s.sums));
    ptx::barrier_expect(&s.squares_here, sizeof(s.squares));
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  if (warp == kWarps - 1) scout(a, s, request, hv, h, rank, lane);
  wait_for_predecessor();
  if (threadIdx.x == 0) ptx::barrier_arrive(&s.alone);
  launch_successor();

  const int quad = lane % kQuads, four = lane / kQuads, kind = warp / 2, d = rank * kChannels + quad * 4,
            t0 = ((warp & 1) * 4 + four) * kOwn;
  const int guess = request * a.each;
  const SpreadCall::Channel& c = a.channels[warp < 6 ? kind : 0];
  const int of = kind < 2 ? h : hv;
  // Of warps 0 to 5: inputs and taps; of 6 and 7: gate and bias; of those that finish: output gate, weight.
  Quad<bfloat16> in[kOwn + 3] = {};
  Quad<float> taps[4] = {};
  unsigned a_log = 0, logit = 0;  // bits, not yet widened: to look at a load's result is to wait for it
  const bool finishes = M::kApart && kProduct <= warp && warp < kProduct + kFinish;
  const int t_out = (warp - kProduct) * kFour + four;
  const auto ask_gate = [&](int begin, int n) {
    if (finishes && a.gate && t_out < n)
      in[0] = at<Quad<bfloat16>>(along(along(a.gate + d * 2, hv, a.gate_head), begin + t_out, a.gate_token));
  };
  const auto ask_weight = [&] {
    if (!a.gate) return;
    if (a.weight_bf16)
      in[2] = at<Quad<bfloat16>>(a.weight + d * 2);
    else
      taps[0] = at<Quad<float>>(a.weight + d * 4);
  };
  const auto ask_tokens = [&](int begin, int n) {
    if (warp < 6) {
      const char* const x = along(along(c.x + d * 2, of, c.x_head), begin + t0, c.x_token);
#pragma unroll
      for (int i = 0; i < kOwn + 3; ++i)
        if (const int t = t0 + i - 3; t < n && (i >= 3 || (a.conv && t >= 0))) in[i] = at<Quad<bfloat16>>(along(x, i - 3, c.x_token));
    } else if (warp < kProduct) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (t0 + i < n) in[3 + i] = at<Quad<bfloat16>>(along(along(a.g + d * 2, hv, a.g_head), begin + t0 + i, a.g_token));
    } else if (warp == kLast) {
      if (!M::kApart && a.gate) {
        const char* const gate = along(along(a.gate + d * 2, hv, a.gate_head), begin + four, a.gate_token);
        if (four < n) in[0] = at<Quad<bfloat16>>(gate);
        if (four + 4 < n) in[1] = at<Quad<bfloat16>>(along(gate, 4, a.gate_token));
      }
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
  } else if (!M::kApart && warp == kLast) {
    ask_weight();
  }
  if (kProduct <= warp && warp < kProduct + 3) {  // what the slot has
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
    if (warp < kProduct + 2) ptx::copy_async_arrive(&s.windows_here);
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
  ask_gate(guess, a.each);  // behind the indices: a warp's loads come back in turn
  if (finishes) ask_weight();
  float x[kOwn][4], beta = 0;  // warps 6 and 7: log decays; the last: a token's beta
  const auto open_gates = [&] {
    if (kind == 3) {
      float bias[4];
      unpack(taps[0], bias);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        unpack(in[3 + i], x[i]);
        plain::log_decays(a, amplitude_of(__uint_as_float(a.a_log_bf16 ? a_log << 16 : a_log)), bias, x[i]);
        *reinterpret_cast<float4*>(s.decay[t0 + i] + quad * 4) =
            make_float4(exp_of(x[i][0]), exp_of(x[i][1]), exp_of(x[i][2]), exp_of(x[i][3]));
      }
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
        if (t0 + i < 3) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(s.window[kind][t0 + i] + quad * 4);
    if (it.begin != guess || n > a.each) ask_tokens(it.begin, n), ask_gate(it.begin, n), open_gates();
    // Tokens: each thread four channels of its own.
    Quad<bfloat16> raw[kOwn] = {};  // warps 0 to 5
    float squares[kOwn];
    if (warp < 6) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const Quad<bfloat16> inputs[4] = {in[i], in[i + 1], in[i + 2], in[i + 3]};
        float y[4];
        raw[i] = a.conv ? plain::convolved(inputs, taps) : in[i + 3];
        if (t0 + i >= n) raw[i] = {};
        unpack(raw[i], y);
        put4((kind == 2 ? s.v[t0 + i] : s.keys[1 - kind][t0 + i]) + quad * 4, y, 1.0f);
        squares[i] = dot4(y, y);
      }
    } else if (warp == kLast && rank == 0 && lane < min(n, a.L) && a.ring_beta) {
      *reinterpret_cast<float*>(along(along(along(a.ring_beta, it.slot, a.ring_beta_slot), hv, a.ring_beta_head), lane, a.ring_beta_step)) =
          beta;
    }
    __syncthreads();

    const float *const k = s.keys[0][0] + quad * 4, *const q = s.keys[1][0] + quad * 4, *const decays = s.decay[0] + quad * 4;
    // Of a triangles' warp: columns [4 block, 4 block + 4), rows [4 group, 4 group + 4). The last group of all blocks, then the one before, ...
    int block = warp - kProduct, group = M::kFours - 1;
#pragma unroll
    for (int i = M::kFours; i > 1; --i)
      if (block >= i && group == i - 1) block -= i, --group;
    const int column = block * kFour + four, row = group * kFour + quad % kFour, which = quad / kFour,
              entry = (warp - kProduct) * 32 + lane;
    if (kProduct <= warp && warp < kLast) {
      float z[4], before[3][4], decay[kFour][4], key[kFour][4], query[kFour][4], sums[2 * kFour];
      row_of_four(k + column * kChannels, z);
      if (!M::kApart)
#pragma unroll
        for (int i = 0; i < 3; ++i) row_of_four(decays + (1 + i) * kChannels, before[i]);
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        const int at = (group * kFour + i) * kChannels;
        row_of_four(decays + at, decay[i]), row_of_four(k + at, key[i]), row_of_four(q + at, query[i]);
      }
      if constexpr (M::kApart) {
#pragma unroll 3
        for (int i = block * kFour + 1; i < group * kFour; ++i) {
          float y[4];
          row_of_four(decays + i * kChannels, y);
#pragma unroll
          for (int e = 0; e < 4; ++e) z[e] *= i > column ? y[e] : 1.0f;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 3; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) z[e] *= group > 0 && 1 + i > column ? before[i][e] : 1.0f;
      }
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) z[e] *= group * kFour + i > column ? decay[i][e] : 1.0f;
        sums[i] = dot4(z, key[i]), sums[kFour + i] = dot4(z, query[i]);
      }
      const float sum = quarter_sums(sums, lane);
#pragma unroll
      for (int to = 0; to < kParts; ++to) send(there(&s.triangles[rank][entry], to), sum, there(&s.triangles_here, to));
    }
    if (warp >= kLast) {
      float product[4];
#pragma unroll
      for (int b = 0; b < M::kGroups; ++b) {
        const int t = 8 * b + (warp & 1) * 4 + four;
        float key[4], query[4], y[8][4];
        row_of_four(k + t * kChannels, key), row_of_four(q + t * kChannels, query);
        // The product of the decays up to token t; of a later block behind that of the blocks before.
        if (b > 0) {
#pragma unroll
          for (int e = 0; e < 4; ++e) product[e] = 1.0f;
#pragma unroll 4
          for (int i = 0; i < 8 * b; ++i) {
            row_of_four(decays + i * kChannels, y[0]);
#pragma unroll
            for (int e = 0; e < 4; ++e) product[e] *= y[0][e];
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) row_of_four(decays + (8 * b + i) * kChannels, y[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) product[e] = b > 0 ? product[e] * y[0][e] : y[0][e];
#pragma unroll
        for (int i = 1; i < 8; ++i)
          if (8 * b + i <= t)
#pragma unroll
            for (int e = 0; e < 4; ++e) product[e] *= y[i][e];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 x = make_float4(key[2 * i] * product[2 * i], query[2 * i] * product[2 * i], key[2 * i + 1] * product[2 * i + 1],
                                       query[2 * i + 1] * product[2 * i + 1]),
                       large = make_float4(truncated(x.x), truncated(x.y), truncated(x.z), truncated(x.w));
          s.operand[0][b][quad / 4 * 2 + i][t % 8 * 4 + quad % 4] = large;
          s.operand[1][b][quad / 4 * 2 + i][t % 8 * 4 + quad % 4] = make_float4(x.x - large.x, x.y - large.y, x.z - large.z, x.w - large.w);
        }
      }
    }
    if (warp < 2) {  // q's norm
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int distance = 1; distance < kQuads; distance *= 2) squares[i] += __shfl_xor_sync(kAll, squares[i], distance);
        if (quad < kParts) send(there(&s.triangles[rank][32 * kTriangles + t0 + i], quad), squares[i], there(&s.triangles_here, quad));
      }
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
      const std::uint32_t there_too = there(&s.sums_here, warp / 2);
#pragma unroll
      for (int b = 0; b < M::kGroups; ++b) {
        const std::uint32_t to = there(&s.sums[rank][b][warp % 2 * 2][lane], warp / 2);
        float main[2][4], cross[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 y = s.operand[0][b][i][lane], z = s.operand[1][b][i][lane];
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
      }
      // While they are on their way: windows and records.
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int t = t0 + i;
        if (t < n && warp >= 6) {
          if (a.ring_g && t < a.L)
            *reinterpret_cast<float4*>(along(along(along(a.ring_g + d * 4, it.slot, a.ring_g_slot), hv, a.ring_g_head), t, a.ring_g_step)) =
                make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
        } else if (t < n && (kind == 2 || hv == h * static_cast<int>(a.by_group.by))) {  // a key head's, once
          if (c.windows) {
            char* const to = along(along(along(c.windows + d * 2, it.row, c.windows_row), of, c.windows_head), t, c.windows_step);
#pragma unroll
            for (int w = 0; w < 3; ++w) *reinterpret_cast<Quad<bfloat16>*>(along(to, w, c.windows_tap)) = in[i + w + 1];
          }
          if (c.raw && t < a.L)
            *reinterpret_cast<Quad<bfloat16>*>(along(along(along(c.raw + d * 2, it.slot, c.raw_slot), of, c.raw_head), t, c.raw_step)) =
                raw[i];
        }
      }
      if (warp < kTiles * M::kGroups) {
        const int tile = warp % kTiles, b = warp / kTiles;
        ptx::barrier_wait(&s.sums_here, 0);
        float x[kParts][4];
#pragma unroll
        for (int i = 0; i < kParts; ++i) row_of_four(reinterpret_cast<const float*>(&s.sums[i][b][tile][lane]), x[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s.rows[e / 2][8 * b + lane / 4][tile * 8 + lane % 4 * 2 + e % 2] = sum_of(x[0][e], x[1][e], x[2][e], x[3][e]);
      }
    }
    float betas[kTokens], fk[kTokens], v[kTokens], weight[4], gates[2][4];
    const auto row_of = [](const float* from, float(&x)[kTokens]) {
#pragma unroll
      for (int i = 0; i < kTokens; i += 4) {
        float y[4];
        row_of_four(from + i, y);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i + e] = y[e];
      }
    };
    if (warp == kLast) {  // whatever does not need sums
      row_of(s.beta, betas);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) v[i] = s.v[i][lane];
    }
    if (M::kApart ? finishes : warp == kLast) {
      if (a.weight_bf16)
        unpack(in[2], weight);
      else
        unpack(taps[0], weight);
#pragma unroll
      for (int i = 0; i < (M::kApart ? 1 : 2); ++i) {
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
        if (which == 0)
          s.lower[column][row] = sum;
        else
          s.upper[row][column] = sum;
        if (which == 0 && row == column) s.fk[row] = a.l2norm ? inverse_norm(sum) : 1.0f;
      } else if (lane < kTokens) {
        s.fq[lane] = a.l2norm ? inverse_norm(sum_at(32 * kTriangles + lane)) * a.scale : a.scale;
      }
      ptx::barrier_of(3, 32 * (kTriangles + 1));
    }
    constexpr int kHeld = M::kApart ? 1 : kTokens;  // rows of the triangles in registers
    float fq[kTokens], l[kHeld][kTokens], m[kHeld][kTokens];
    if (warp == kLast) {
      row_of(s.fk, fk);
      if constexpr (!M::kApart) {
        row_of(s.fq, fq);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) row_of(s.lower[i], l[i]), row_of(s.upper[i], m[i]);
      }
    }
    if (warp < kTiles * M::kGroups || warp == kLast || finishes)
      ptx::barrier_of(2, 32 * (kTiles * M::kGroups + 1 + (M::kApart ? kFinish : 0)));
    // A row's u along the tokens, each added to the sums of the later ones. A lane a row.
    if (warp == kLast) {
      float p[kTokens], sum[kTokens] = {}, u[kTokens], r[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) p[i] = s.rows[0][i][lane], r[i] = M::kApart ? 0 : s.rows[1][i][lane];
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        u[j] = betas[j] * fmaf(-fk[j], p[j] + sum[j], v[j]) * fk[j];
        float(&later)[kTokens] = l[j % kHeld];
        if (M::kApart) row_of(s.lower[j], later);
#pragma unroll
        for (int i = j + 1; i < kTokens; ++i) sum[i] = fmaf(later[i], u[j], sum[i]);
        if constexpr (M::kApart) {
          s.rows[0][j][lane] = u[j];
        } else {
          float out = 0;
#pragma unroll
          for (int i = 0; i <= j; ++i) out = fmaf(m[j][i], u[i], out);
          s.rows[0][j][lane] = fq[j] * (r[j] + out);
        }
      }
    }
    if constexpr (M::kApart) {
      if (warp == kLast) ptx::barrier_arrive(&s.u_here);
      if (finishes) ptx::barrier_wait(&s.u_here, 0);
    } else {
      __syncwarp();
    }
    if (M::kApart ? finishes : warp == kLast) {  // four rows of a token a lane, or of two
      constexpr int kEach = M::kApart ? 1 : 2;
      const int t_first = M::kApart ? t_out : four;
      float o[kEach][4];
      if constexpr (M::kApart) {
        float out[4] = {}, r[4];
        row_of_four(s.rows[1][t_out] + quad * 4, r);
#pragma unroll
        for (int i = 0; i < kTokens; i += 4) {
          float w[4];
          row_of_four(&s.upper[t_out][i], w);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float u[4];
            row_of_four(s.rows[0][i + j] + quad * 4, u);
            if (i + j <= t_out)
#pragma unroll
              for (int e = 0; e < 4; ++e) out[e] = fmaf(w[j], u[e], out[e]);
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) o[0][e] = s.fq[t_out] * (r[e] + out[e]);
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) row_of_four(s.rows[0][four + 4 * i] + quad * 4, o[i]);
      }
      if (a.gate) {
        float sum[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (a.round_before_norm) round_bf16(o[i]);
          sum[i] = dot4(o[i], o[i]);
        }
#pragma unroll
        for (int distance = 1; distance < kQuads; distance *= 2)
#pragma unroll
          for (int i = 0; i < kEach; ++i) sum[i] += __shfl_xor_sync(kAll, sum[i], distance);
        if (quad < kParts) {
          const std::uint32_t to = there(&s.squares[rank][t_first], quad), there_too = there(&s.squares_here, quad);
#pragma unroll
          for (int i = 0; i < kEach; ++i) send(to + 4 * 4 * i, sum[i], there_too);
        }
        ptx::barrier_wait(&s.squares_here, 0);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const int at = t_first + 4 * i;
          const float norm =
              rsqrtf(sum_of(s.squares[0][at], s.squares[1][at], s.squares[2][at], s.squares[3][at]) * (1.0f / kDim) + a.norm_eps);
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][e] = o[i][e] * norm * weight[e] * gates[i][e];
        }
      }
      char* const to = along(along(a.out + d * 2, hv, a.out_head), it.begin + t_first, a.out_token);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        Quad<bfloat16> y;
        pack(o[i], y);
        if (t_first + 4 * i < n) *reinterpret_cast<Quad<bfloat16>*>(along(to, 4 * i, a.out_token)) = y;
      }
    }
  } else {
    ptx::barrier_wait(&s.state_here, 0);  // it may have been asked for
    if (it.tokens > 0) clear_quarter<M>(a, it.begin, it.begin + it.tokens, hv, rank);
  }
  // Tokens that belong to no request.
  if (request == 0 && it.behind >= 0 && it.behind < a.T) clear_quarter<M>(a, it.behind, a.T, hv, rank);
#endif
}

template <int kTokens>
SpreadKernel form() {
  using M = Shared<kTokens>;
  return {kernel<M>, sizeof(M), M::kThreads};
}

}  // namespace specstate::kda::cuda::spread
