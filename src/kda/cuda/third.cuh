#pragma once
// Ring mode from a frozen state (see frozen.cuh) of requests of a block of tokens at most, where there are more heads than multiprocessors: a head is a
// CTA, and three CTAs share a multiprocessor, so that whatever one head waits for another computes: a call of 32 requests of 12 heads is in flight as a
// whole. 75 KiB of shared memory a head, of which 64 are its state.
//   tokens     come by asynchronous copies, half a warp a row, where they are if all requests have as many; cu_seqlens may say otherwise later. One warp
//              finds the head (all CTAs ask for the same few lines of indices) and asks for the windows of its slot
//   each       a warp two tokens, of q and k or of v and gates, a lane four channels: convolution, gates, records
//   meeting    a warp half a column of the triangles, then the other half, or the operands of two tokens
//   rows       a warp has 16 rows of the state from the bulk copies that bring them to the output, and waits for no other warp: the product on tensor
//              cores; then a lane has a row, half the warp P and u, the other half Q and o, to which each token's u goes from the first; then a lane
//              has four rows of a token. Warps meet once more, for the norm's sums of squares
// The rows of the last three warps lie where tokens, keys, queries and decays lie before: they are asked for when tokens have met. P, Q and o lie on
// used-up rows of their warp.
// What memory is asked for in turn decides the time (decision 0012): a multiprocessor's first CTA asks for its states when it has found its head, the
// second when its tokens are here, the third when they are prepared. Windows, a sixth of all bytes, leave by bulk copies from where their tokens came,
// behind the states: stores of the warps that prepare tokens hold these up for thousands of cycles. Until tokens are asked for the call is read from
// shared memory: parameters are cold, and instructions that name them wait for one line of 64 bytes after the other.
// Sums are in the order of frozen.cuh, hence bits are equal.
//
// kFold: what waits of a deferred fold (SEMANTICS.md) is folded here, so that states move twice in a step and not three times. States arrive before they are
// multiplied anyway: a warp folds its rows, 8 at a time, through `advance` in registers, hence to the fold's bits; puts them where they were, from where a
// bulk copy takes them to memory; and multiplies them while it does. Records (8 KiB) lie in the place of the second 8 rows of two warps, which come
// from memory when the first 8 have been used and take their place. The finder asks for the count by adding kReader to it: so the last of a request's heads
// knows that all have read it, and sets it to 0. New records go where the old ones are in memory, so these are here first.
#include "kda/cuda/frozen.cuh"
#include "kda/cuda/narrow.cuh"

namespace specstate::kda::cuda::third {

namespace ptx = specstate::cuda::ptx;
using narrow::along, narrow::at, narrow::Found, narrow::Indices;
using plain::column_terms, plain::kDim, plain::kTokens, plain::multiply, plain::place_of_taps, plain::row_of_eight, plain::row_of_four,
    plain::transposed_sums, plain::truncated;

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kDim / kWarps, kPiece = kRows / 2 * kDim, kHalf = kDim / 2 * kDim + 16;
constexpr int kEarly = kWarps - 3;             // warps whose rows are not asked for late
constexpr int kFinder = 3;                     // the warp that finds the head
constexpr int kConv = 4;                       // inputs of a token's convolution
constexpr int kPitch = kTokens + 4;            // of P and Q's rows
constexpr int kParked = kEarly - 2;            // kFold: this warp's and the next one's second 8 rows have no place of their own
enum When { kFound, kTokensHere, kPrepared };  // its states are asked for

struct Shared {
  // Pieces of 8 rows: the first of each warp, then the second of each, 64 bytes further, so that reads of rows of both meet no bank twice.
  alignas(128) float state[2 * kHalf - 16];
  alignas(16) float operand[16 * 32 * 4];  // D_t k_t and D_t q_t; before: taps
  alignas(16) bfloat16 v[kTokens][kDim];
  alignas(16) float triangle[kTokens][2][kTokens];  // by column
  alignas(16) float beta[kTokens], fk[kTokens], fq[kTokens];
  alignas(16) float squares[kTokens][kWarps];
  Found found;
  std::uint64_t rows_here[kWarps], windows_here;

  __device__ float* piece(int warp, int half) { return state + half * kHalf + warp * kPiece; }
  __device__ float* key(int t) { return piece(kEarly, 1) + t * kDim; }
  __device__ float* query(int t) { return key(kTokens + t); }
  __device__ float* decay(int t) { return key(2 * kTokens + t); }
  /// Tokens of q, k and v as they come, the three before them first; gates.
  __device__ bfloat16* stage(int kind) { return reinterpret_cast<bfloat16*>(piece(kEarly, 0)) + kind * (kTokens + kConv - 1) * kDim; }
  /// Tokens that wait: log decays, then decays; keys; values.
  __device__ float* old_decay(int t) { return piece(kParked, 1) + t * kDim; }
  __device__ bfloat16* old_key(int t) { return reinterpret_cast<bfloat16*>(piece(kParked + 1, 1)) + t * kDim; }
  __device__ bfloat16* old_v(int t) { return old_key(kTokens + t); }
  __device__ float* old_beta() { return reinterpret_cast<float*>(stage(4)); }  // behind the stage
  /// What lies between the two halves of the state.
  struct Between {
    std::uint64_t records_here, windows_read;
    int waiting;
    alignas(16) float fk[kTokens];  // their keys' norms
  };
  static_assert(sizeof(Between) <= 64);
  __device__ Between& between() { return *reinterpret_cast<Between*>(state + kDim / 2 * kDim); }
  __device__ float4* taps() { return reinterpret_cast<float4*>(operand); }
};
static_assert(sizeof(Shared) <= 228 * 1024 / 3 - 1024);

__device__ __forceinline__ void clear(const SpreadCall& a, int begin, int end, int hv) {
  char* const to = along(a.out, hv, a.out_head) + static_cast<int>(threadIdx.x) % kDim * 2;
  for (int t = begin + static_cast<int>(threadIdx.x) / kDim; t < end; t += kThreads / kDim)
    *reinterpret_cast<bfloat16*>(along(to, t, a.out_token)) = bfloat16{};
}

__device__ __forceinline__ void renew(int& warp, int& lane) {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  warp = uniform(thread / 32), lane = thread % 32;
}

template <bool kFold>
__device__ __forceinline__ bool is_parked(int warp) {
  return kFold && (warp == kParked || warp == kParked + 1);
}
__device__ __forceinline__ void prefetch(const char* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// This warp's 16 rows of the state.
template <bool kFold>
__device__ __forceinline__ void request_rows(const char* state, Shared& s, int warp, int lane) {
  if (lane == 0) {
    const char* const from = state + warp * (kRows * kDim * 4);
    const bool parked = is_parked<kFold>(warp);
    ptx::barrier_expect(&s.rows_here[warp], (parked ? 1 : 2) * kPiece * 4);
    ptx::bulk_load(s.piece(warp, 0), from, kPiece * 4, &s.rows_here[warp]);
    if (parked)
      prefetch(from + kPiece * 4, kPiece * 4);
    else
      ptx::bulk_load(s.piece(warp, 1), from + kPiece * 4, kPiece * 4, &s.rows_here[warp]);
  }
  __syncwarp();
}

/// The n records of a slot, those too that do not wait: how many do is still under way.
__device__ __forceinline__ void ask_records(const SpreadCall& a, Shared& s, int slot, int hv, int n) {
  std::uint64_t& here = s.between().records_here;
  const SpreadCall::Channel &k = a.channels[1], &v = a.channels[2];
  ptx::barrier_expect(&here, n * (kDim * 8));
  if (!n) return;
  ptx::bulk_load(s.old_key(0), along(along(k.raw, slot, k.raw_slot), hv, k.raw_head), n * (kDim * 2), &here);
  ptx::bulk_load(s.old_v(0), along(along(v.raw, slot, v.raw_slot), hv, v.raw_head), n * (kDim * 2), &here);
  ptx::bulk_load(s.old_decay(0), along(along(a.ring_g, slot, a.ring_g_slot), hv, a.ring_g_head), n * (kDim * 4), &here);
}

/// The windows of this warp's two tokens, from where the tokens came.
__device__ __forceinline__ void store_windows(const SpreadCall& a, Shared& s, const Found& it, int warp, int lane, int h, int hv, int n) {
  const int t = warp % 4 * 2 + lane / 3 % 2, w = lane % 3, kind = warp < 4 ? lane / 6 : 2 + lane / 6;
  const SpreadCall::Channel& x = a.channels[min(kind, 2)];
  if (kind < (warp < 4 ? 2 : 3) && t < n && x.windows && (kind == 2 || hv == h * static_cast<int>(a.by_group.by)))
    ptx::bulk_store(along(along(along(along(x.windows, it.row, x.windows_row), kind < 2 ? h : hv, x.windows_head), t, x.windows_step), w,
                          x.windows_tap),
                    s.stage(kind) + (t + 1 + w) * kDim, kDim * 2);
  ptx::bulk_commit();
}

/// kFold: all windows, by the warps whose rows come to where the tokens came; the others have rows to fold. Until they are read.
__device__ __forceinline__ void store_all_windows(const SpreadCall& a, Shared& s, const Found& it, int warp, int lane, int hv, int n) {
  static_assert(kTokens * 9 <= 32 * (kWarps - kEarly));
  const int i = (warp - kEarly) * 32 + lane, t = i / 9, kind = i % 9 / 3, w = i % 3;
  const SpreadCall::Channel& x = a.channels[kind];
  if (t < n && x.windows)
    ptx::bulk_store(along(along(along(along(x.windows, it.row, x.windows_row), hv, x.windows_head), t, x.windows_step), w, x.windows_tap),
                    s.stage(kind) + (t + 1 + w) * kDim, kDim * 2);
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
  ptx::barrier_arrive(&s.between().windows_read);
  ptx::barrier_wait(&s.between().windows_read, 0);
}

/// Half of column j of the triangles; see frozen.cuh.
template <bool kLower>
__device__ __forceinline__ void column(const SpreadCall& a, Shared& s, int j, int lane) {
  constexpr int kHalfRows = kTokens / 2;
  float x[4], sums[kTokens];
  column_terms<kLower, kDim>(s.key(0) + lane * 4, s.query(0) + lane * 4, s.decay(0) + lane * 4, j, x, sums);
  const float sum = transposed_sums(sums, lane);
  const int t = (kLower ? kHalfRows : 0) + lane % kHalfRows;
  if (lane < kTokens) s.triangle[j][lane / kHalfRows][t] = sum;
  if (lane < kHalfRows && t == j) s.fk[j] = a.l2norm ? inverse_norm(sum) : 1.0f;
}

/// Of tokens t and t + 1; see frozen.cuh.
__device__ __forceinline__ void operands(const SpreadCall& a, Shared& s, int t, bool few, int lane) {
  const int d = lane * 4;
  float product[4], k[2][4], q[2][4], y[kTokens - 1][4], last[4], sums[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) row_of_four(s.key(t + i) + d, k[i]), row_of_four(s.query(t + i) + d, q[i]);
#pragma unroll
  for (int i = 0; i < kTokens - 1; ++i) row_of_four(s.decay(i) + d, y[i]);
  row_of_four(s.decay(t + 1) + d, last);
#pragma unroll
  for (int e = 0; e < 4; ++e) product[e] = y[0][e];
#pragma unroll
  for (int i = 1; i < kTokens - 1; ++i)
    if (i <= t)
#pragma unroll
      for (int e = 0; e < 4; ++e) product[e] *= y[i][e];
#pragma unroll
  for (int i = 0; i < 2; ++i) sums[i] = dot4(q[i], q[i]);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(kAll, sums[i], distance);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i > 0)
#pragma unroll
      for (int e = 0; e < 4; ++e) product[e] *= last[e];
    if (lane == 0) s.fq[t + i] = a.l2norm ? inverse_norm(sums[i]) * a.scale : a.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = (lane / 4 * 2 + h) * 32 + (t + i) * 4 + lane % 4;
      const float k0 = k[i][2 * h] * product[2 * h], q0 = q[i][2 * h] * product[2 * h], k1 = k[i][2 * h + 1] * product[2 * h + 1],
                  q1 = q[i][2 * h + 1] * product[2 * h + 1];
      if (few)
        reinterpret_cast<float2*>(s.operand)[at] = make_float2(k0, k1), reinterpret_cast<float2*>(s.operand)[at + 16] = make_float2(q0, q1);
      else
        reinterpret_cast<float4*>(s.operand)[at] = make_float4(k0, q0, k1, q1);
    }
  }
}

/// P and Q of this warp's rows, in the place of the rows: [P, Q][row][token], rows kPitch apart.
/// kFold: the copies that take the rows to memory have read them before.
template <bool kFold>
__device__ __forceinline__ void multiply_rows(Shared& s, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  float total[2][4];
  plain::product<2, 4>(s.piece(warp, g & 1) + g / 2 * kDim + 4 * t, 4 * kDim, reinterpret_cast<const float4*>(s.operand) + lane, total);
  if (kFold) ptx::bulk_wait_read<0>();
  __syncwarp();
  float* const to = s.piece(warp, 0) + t * kPitch + g;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) to[(e / 2 * kRows + e % 2 * 8 + 4 * j) * kPitch] = total[j][e];
  __syncwarp();
}
/// The same of four tokens at most: the rows are what has 16 rows, and columns are tokens of P and then of Q.
__device__ __forceinline__ void multiply_rows_few(Shared& s, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  float total[4], pair[4];
  const float* const from = s.piece(warp, g & 1) + g / 2 * kDim + 4 * t;  // row g; row g + 8 is four rows on
  const float2* const operands = reinterpret_cast<const float2*>(s.operand) + lane;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    float main[4], cross[4];
#pragma unroll
    for (int i = 2 * quarter; i < 2 * quarter + 2; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(from + 16 * i), z = *reinterpret_cast<const float4*>(from + 4 * kDim + 16 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool first = i == 2 * quarter && h == 0;
        const float4 rows = h ? make_float4(x.z, z.z, x.w, z.w) : make_float4(x.x, z.x, x.y, z.y),
                     large = make_float4(truncated(rows.x), truncated(rows.y), truncated(rows.z), truncated(rows.w)),
                     small = make_float4(rows.x - large.x, rows.y - large.y, rows.z - large.z, rows.w - large.w);
        const float2 y = operands[(2 * i + h) * 32];
        const float large0 = truncated(y.x), large1 = truncated(y.y);
        multiply(cross, large, y.x - large0, y.y - large1, first);
        multiply(main, large, large0, large1, first);
        multiply(cross, small, large0, large1);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float sum = main[e] + cross[e];
      pair[e] = quarter % 2 ? pair[e] + sum : sum;
      if (quarter % 2) total[e] = quarter > 1 ? total[e] + pair[e] : pair[e];
    }
  }
  __syncwarp();
#pragma unroll
  for (int e = 0; e < 2; ++e)
    *reinterpret_cast<float2*>(s.piece(warp, 0) + (t / 2 * kRows + (g & 1) * 8 + g / 2 + 4 * e) * kPitch + t % 2 * 2) =
        make_float2(total[2 * e], total[2 * e + 1]);
  __syncwarp();
}

/// Folds what waits into 8 of this warp's rows of the state, which go to memory. The second 8 rows of warps kParked and kParked + 1, in whose place the
/// records are, come from memory and take the place of the first, when these are multiplied. Gives their place.
__device__ __forceinline__ float* fold_rows(char* state, Shared& s, float beta, int warp, int half, int lane) {
  constexpr int R = kPiece / kDim / 2;
  const int l = lane & 15, first = lane / 16 * R, waiting = s.between().waiting;
  const bool parked = half && is_parked<true>(warp);
  float* const to = s.piece(warp, parked ? 0 : half);
  if (!waiting && !parked) return to;
  const auto row_at = [&](int i) { return (first + (i ^ row_of<R>(l))) * kDim + 4 * l; };
  char* const home = state + (warp * kRows + half * (kRows / 2)) * (kDim * 4);
  const bfloat16* const v = s.old_v(0) + warp * kRows + half * (kRows / 2) + first + row_of<R>(l);
  Rows<kDim, R> x;
  const auto load = [&](const float* from, auto global) {
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4* const p = reinterpret_cast<const float4*>(from + row_at(i) + 64 * j);
        const float4 y = global ? __ldcg(p) : *p;  // from L2: a bulk copy overwrites it
        x.s[i][4 * j] = y.x, x.s[i][4 * j + 1] = y.y, x.s[i][4 * j + 2] = y.z, x.s[i][4 * j + 3] = y.w;
      }
  };
  if (parked)
    load(reinterpret_cast<const float*>(home), std::true_type());
  else
    load(to, std::false_type());
#pragma unroll 1
  for (int t = 0; t < waiting; ++t) {
    const StepOf<bfloat16> step = {
        s.old_key(t), nullptr, s.old_decay(t), core::to_float(v[t * kDim]), __shfl_sync(kAll, beta, t), s.between().fk[t], 0, 0};
    advance<kDim, R, false, false>(x, step, lane, true);
  }
  if (parked) {
    ptx::bulk_wait_read<0>();
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      *reinterpret_cast<float4*>(to + row_at(i) + 64 * j) =
          make_float4(x.s[i][4 * j], x.s[i][4 * j + 1], x.s[i][4 * j + 2], x.s[i][4 * j + 3]);
  ptx::fence_async();
  __syncwarp();
  if (lane == 0 && waiting) {
    ptx::bulk_store(home, to, kPiece * 4);
    ptx::bulk_commit();
  }
  return to;
}

/// Folds what waits into this warp's rows, 8 at a time, and multiplies them as multiply_rows().
__device__ __forceinline__ void fold_and_multiply(char* state, Shared& s, float beta, int warp, int lane) {
  const bool parks = is_parked<true>(warp);
  float before[4] = {}, total[1][4];
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const float* const to = fold_rows(state, s, beta, warp, half, lane);
    if (parks) {
      if (half)
#pragma unroll
        for (int e = 0; e < 4; ++e) before[e] = total[0][e];
      plain::product<1, 4>(to + lane / 4 * kDim + lane % 4 * 4, 0, reinterpret_cast<const float4*>(s.operand) + lane, total);
    }
  }
  if (!parks) return multiply_rows<true>(s, warp, lane);
  ptx::bulk_wait_read<0>();
  __syncwarp();
  float* const to = s.piece(warp, 0) + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) to[(e / 2 * kRows + e % 2) * kPitch] = before[e], to[(e / 2 * kRows + 8 + e % 2) * kPitch] = total[0][e];
  __syncwarp();
}

template <bool kFold>
__global__ void __launch_bounds__(kThreads, 3) kernel(const __grid_constant__ SpreadCall a, unsigned multiprocessors, const Waiting waits) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  int warp, lane;
  renew(warp, lane);
  {  // The call: instructions that name a parameter miss 64 bytes at a time, one after the other; so all come at once, to where v will be.
    constexpr int kWords = sizeof(SpreadCall) / 8;
    static_assert(kWords <= 10 * 8 && sizeof(SpreadCall) % 8 == 0 && sizeof(SpreadCall) <= sizeof(s.v));
    const int word = lane < 8 ? warp * 8 + lane : (warp + 8) * 8 + lane - 8;
    if (lane < (warp < 2 ? 16 : 8) && word < kWords)
      reinterpret_cast<std::uint64_t*>(s.v)[word] = reinterpret_cast<const std::uint64_t*>(&a)[word];
  }
  if (lane == 0) {
    ptx::barrier_init(&s.rows_here[warp], 1);
    if (warp == 0) ptx::barrier_init(&s.windows_here, 32);
    if (kFold && warp == 1)
      ptx::barrier_init(&s.between().records_here, 2), ptx::barrier_init(&s.between().windows_read, 32 * (kWarps - kEarly));
    ptx::fence_barriers();
  }
  __syncthreads();
  wait_for_predecessor();
  launch_successor();
  const SpreadCall& quick = *reinterpret_cast<const SpreadCall*>(s.v);  // until tokens are asked for
  const int hv = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y), h = quotient(hv, quick.by_group);
  const unsigned number = blockIdx.y * gridDim.x + blockIdx.x;  // CTAs are dealt one a multiprocessor, and then the next
  const When when = number < multiprocessors                                        ? kFound
                    : 2 * multiprocessors <= number && number < 3 * multiprocessors ? kPrepared
                                                                                    : kTokensHere;
  const int d = lane * 4, each = quick.each, guess = request * each;
  Quad<bfloat16> gate = {};
  unsigned logit = 0;                            // bits, not yet widened: to look at a load's result is to wait for it
  const int mine = warp * kRows + lane % 4 * 4;  // at the end: four rows of token lane / 4
  // q and k by the first four warps, v and gates by the others, half a warp a row.
  const auto ask_tokens = [&](const SpreadCall& a, int begin, int n) {
    const int i = warp % 4 * 2 + lane / 16, e = lane % 16;
    const auto ask = [&](int kind, const char* from, int head, int head_stride, int token_stride) {
      ptx::copy_async(s.stage(kind) + (i + (kind < 3 ? kConv - 1 : 0)) * kDim + e * 8,
                      along(along(from + e * 16, head, head_stride), begin + i, token_stride));
    };
    if (i < n) {
      if (warp < 4) {
        ask(0, a.channels[0].x, h, a.channels[0].x_head, a.channels[0].x_token);
        ask(1, a.channels[1].x, h, a.channels[1].x_head, a.channels[1].x_token);
      } else {
        ask(2, a.channels[2].x, hv, a.channels[2].x_head, a.channels[2].x_token);
        ask(3, a.g, hv, a.g_head, a.g_token);
      }
    }
    if (a.gate && lane / 4 < n) gate = at<Quad<bfloat16>>(along(along(a.gate + mine * 2, hv, a.gate_head), begin + lane / 4, a.gate_token));
    if (warp == 2 && lane < min(n, kTokens)) {
      const char* const p = along(along(a.logit, hv, a.logit_head), begin + lane, a.logit_token);
      logit = a.logit_bf16 ? at<std::uint16_t>(p) : at<unsigned>(p);
    }
  };
  Quad<float> bias = {};
  unsigned a_log = 0;
  const auto ask = [&](const SpreadCall& a) {
    ask_tokens(a, guess, each);
    if (a.conv) {
      const int channel = static_cast<int>(threadIdx.x) % kDim;
      float4* const to = s.taps() + place_of_taps(channel);
      const auto ask_taps = [&](int c) {
        ptx::copy_async(to + c * kDim, along(a.channels[c].taps + channel * 16, c < 2 ? h : hv, a.channels[c].taps_head));
      };
      if (warp < 4)
        ask_taps(0), ask_taps(2);
      else
        ask_taps(1);
    }
    if (warp >= 4) {
      bias = at<Quad<float>>(along(a.bias + d * 4, hv, a.bias_head));
      const char* const p = along(a.a_log, hv, a.a_log_head);
      a_log = a.a_log_bf16 ? at<std::uint16_t>(p) : at<unsigned>(p);
    }
    ptx::copy_async_commit();
  };
  int old = 0;  // kFold, the finder: the count of waiting tokens and their betas
  float old_beta = 0;
  if (warp != kFinder) {
    ask(quick);
  } else {  // on a branch of its own: where it met the others, it would wait for indices before it asks for its tokens
    Indices indices;
    indices.ask<false>(quick, request);
    ask(quick);
    const Found f = indices.found(a);
    const int slot = f.slot;
    const bool good = a.null_slot < slot && slot < a.pool;
    if (lane == 0) s.found = f;
    if (kFold && f.tokens > 0 && !f.padding) {
      if (lane == 0) old = atomicAdd(waits.counts + slot * waits.step, kReader);
      if (lane < a.L)
        old_beta = at<float>(along(along(along(a.ring_beta, slot, a.ring_beta_slot), hv, a.ring_beta_head), lane, a.ring_beta_step));
      if (lane == 0) ask_records(a, s, slot, hv, a.L);
      __syncwarp();
    }
    if (a.conv && good)
#pragma unroll
      for (int i = 0; i < (3 * (kConv - 1) + 1) / 2; ++i) {  // half a warp a row
        const int row = 2 * i + lane / 16, kind = row / (kConv - 1), w = row % (kConv - 1), e = lane % 16;
        const SpreadCall::Channel& x = a.channels[min(kind, 2)];
        if (kind < 3)
          ptx::copy_async(s.stage(kind) + w * kDim + e * 8,
                          along(along(along(x.window + e * 16, slot, x.window_slot), kind < 2 ? h : hv, x.window_head), w, x.window_tap));
      }
    ptx::copy_async_arrive(&s.windows_here);
    if (when == kFound && f.tokens > 0 && !f.padding) {
      const char* const from = along(along(a.state, slot, a.state_slot), hv, a.state_head);
      if (lane < kEarly) ptx::barrier_expect(&s.rows_here[lane], (is_parked<kFold>(lane) ? 1 : 2) * kPiece * 4);
      __syncwarp();
      if (lane % 2 && is_parked<kFold>(lane / 2))
        prefetch(from + lane * (kPiece * 4), kPiece * 4);
      else if (lane < 2 * kEarly)
        ptx::bulk_load(s.piece(lane / 2, lane % 2), from + lane * (kPiece * 4), kPiece * 4, &s.rows_here[lane / 2]);
      __syncwarp();
    }
  }
  if (warp == kFinder)
    ptx::copy_async_commit(), ptx::copy_async_wait<1>();
  else
    ptx::copy_async_wait<0>();
  ptx::fence_async();
  __syncthreads();
  const Found it = s.found;
  if (it.behind >= 0 && it.behind < a.T && request == 0) clear(a, it.behind, a.T, hv);  // tokens that belong to no request
  if (it.tokens <= 0 || it.padding) {
    if (it.tokens > 0) clear(a, it.begin, it.begin + it.tokens, hv);
    ptx::barrier_wait(&s.windows_here, 0);  // they may have been asked for
    return;
  }
  const int n = it.tokens, slot = it.slot;
  if (kFold && warp == kFinder) {
    if (lane < kTokens) s.old_beta()[lane] = old_beta;
    __syncwarp();
    if (lane == 0) {
      const int n = old << 12 >> 12, waiting = 0 <= n && n <= a.L ? n : 0, readers = (old - n) / kReader + 1;
      static_assert(kReader == 1 << 20);
      s.between().waiting = waiting;
      ptx::barrier_arrive(&s.between().records_here);  // the betas are read, too
      if (readers == static_cast<int>(gridDim.x))
        atomicSub(waits.counts + slot * waits.step, readers * kReader + waiting);  // all its heads have read it
    }
    __syncwarp();
  }
  const auto records_read = [&] {  // before they are overwritten in memory
    if (kFold) ptx::barrier_wait(&s.between().records_here, 0);
  };
  const char* const state = along(along(a.state, slot, a.state_slot), hv, a.state_head);
  if (when == kTokensHere && warp < kEarly) request_rows<kFold>(state, s, warp, lane);
  if (it.begin != guess || n > each) {
    ask_tokens(a, it.begin, n);
    ptx::copy_async_commit(), ptx::copy_async_wait<0>();
    __syncthreads();
  }

  // Tokens, each by itself.
  const bool first_of_group = hv == h * static_cast<int>(a.by_group.by);
  const float4* tap[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) tap[e] = s.taps() + d + (e ^ (lane / 2 & 3));  // place_of_taps
  const int t = warp % 4 * 2;  // this warp's tokens: t and t + 1; of q and k, or of v and gates
  const bool of_keys = warp < 4;
  if (a.conv && t < kConv - 1) ptx::barrier_wait(&s.windows_here, 0);
  Quad<bfloat16> in[2][kConv + 1];
  const auto load = [&](int kind, Quad<bfloat16>(&in)[kConv + 1]) {
    const bfloat16* const row = s.stage(kind) + t * kDim + d;
#pragma unroll
    for (int i = 0; i < kConv + 1; ++i) in[i] = *reinterpret_cast<const Quad<bfloat16>*>(row + i * kDim);
  };
  const auto prepare = [&](auto kind_, const Quad<bfloat16>(&in)[kConv + 1]) {
    constexpr int kind = decltype(kind_)::value;
    const SpreadCall::Channel& x = a.channels[kind];
    Quad<bfloat16> raw[2] = {in[kConv - 1], in[kConv]};
    if (a.conv) {
      Quad<float> taps[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) taps[e] = *reinterpret_cast<const Quad<float>*>(tap[e] + kind * kDim);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Quad<bfloat16> inputs[kConv] = {in[i], in[i + 1], in[i + 2], in[i + 3]};
        raw[i] = plain::convolved(inputs, taps);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (kind == 2) {
        *reinterpret_cast<Quad<bfloat16>*>(s.v[t + i] + d) = raw[i];
      } else {
        float y[4];
        unpack(raw[i], y);
        *reinterpret_cast<float4*>((kind ? s.key(t + i) : s.query(t + i)) + d) = make_float4(y[0], y[1], y[2], y[3]);
      }
    if (kind == 1) records_read();
    if (kind > 0 && x.raw && (kind == 2 || first_of_group)) {
      char* to = along(along(along(x.raw + d * 2, slot, x.raw_slot), kind < 2 ? h : hv, x.raw_head), t, x.raw_step);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (t + i < min(n, a.L)) *reinterpret_cast<Quad<bfloat16>*>(to) = raw[i];
        to += x.raw_step;
      }
    }
  };
  if (t < n) {
    if (of_keys) {
      load(1, in[1]), load(0, in[0]);
      prepare(std::integral_constant<int, 1>(), in[1]), prepare(std::integral_constant<int, 0>(), in[0]);
    } else {
      load(2, in[0]);
      const float amplitude = amplitude_of(__uint_as_float(a.a_log_bf16 ? a_log << 16 : a_log));
      float b[4];
      unpack(bias, b);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[4];
        unpack(*reinterpret_cast<const Quad<bfloat16>*>(s.stage(3) + (t + i) * kDim + d), x);
        plain::log_decays(a, amplitude, b, x);
        if (i == 0) records_read();
        *reinterpret_cast<float4*>(s.decay(t + i) + d) = make_float4(exp_of(x[0]), exp_of(x[1]), exp_of(x[2]), exp_of(x[3]));
        if (a.ring_g && t + i < min(n, a.L))
          *reinterpret_cast<float4*>(along(along(along(a.ring_g + d * 4, slot, a.ring_g_slot), hv, a.ring_g_head), t + i, a.ring_g_step)) =
              make_float4(x[0], x[1], x[2], x[3]);
      }
      prepare(std::integral_constant<int, 2>(), in[0]);
    }
  }
  if (warp == 2 && lane < n) {
    const float beta = sigmoid(__uint_as_float(a.logit_bf16 ? logit << 16 : logit));
    s.beta[lane] = beta;
    records_read();
    if (lane < a.L && a.ring_beta)
      *reinterpret_cast<float*>(along(along(along(a.ring_beta, slot, a.ring_beta_slot), hv, a.ring_beta_head), lane, a.ring_beta_step)) =
          beta;
  }
  records_read();
  if (kFold && warp < s.between().waiting) {
    float k[4], g[4];
    row_of_four(s.old_decay(warp) + d, g), plain::row_of_four(s.old_key(warp) + d, k);
    *reinterpret_cast<float4*>(s.old_decay(warp) + d) = make_float4(exp_of(g[0]), exp_of(g[1]), exp_of(g[2]), exp_of(g[3]));
    float sum[1] = {dot4(k, k)};
    warp_sums(sum);
    if (lane == 0) s.between().fk[warp] = a.l2norm ? inverse_norm(sum[0]) : 1.0f;
  }
  __syncthreads();
  if (when == kPrepared && warp < kEarly) request_rows<kFold>(state, s, warp, lane);
  if (kFold) old_beta = s.old_beta()[lane % kTokens];

  // Tokens meet.
  if (warp < n && n > kTokens / 2) column<true>(a, s, warp, lane);
  if (warp < kTokens / 2) {
    if (warp < n) column<false>(a, s, warp, lane);
  } else if (const int t0 = 2 * warp - kTokens; t0 < n) {
    operands(a, s, t0, !kFold && n <= kTokens / 2, lane);
  }
  ptx::fence_async();
  if (!kFold && a.conv && t < n) store_windows(a, s, it, warp, lane, h, hv, n);
  ptx::bulk_wait_read<0>();
  __syncthreads();
  if (kFold && a.conv && warp >= kEarly) store_all_windows(a, s, it, warp, lane, hv, n);
  if (warp >= kEarly) request_rows<kFold>(state, s, warp, lane);
  renew(warp, lane);  // what depends on these is found anew, so that it takes no registers from the beginning on
  ptx::barrier_wait(&s.rows_here[warp], 0);
  if (kFold)
    fold_and_multiply(along(along(a.state, s.found.slot, a.state_slot), static_cast<int>(blockIdx.x), a.state_head), s, old_beta, warp,
                      lane);
  else if (n > kTokens / 2)
    multiply_rows<false>(s, warp, lane);
  else
    multiply_rows_few(s, warp, lane);

  // Rows along the tokens.
  renew(warp, lane);
  const Found found = s.found;
  const int mine_rows = warp * kRows + lane % 4 * 4;
  float* const sums = s.piece(warp, 0);
  float* const out = sums + 2 * kRows * kPitch;  // [token][row]
  Quad<float> weight = {};
  if (a.gate) {
    if (a.weight_bf16) {
      const Quad<bfloat16> w = at<Quad<bfloat16>>(a.weight + mine_rows * 2);
      weight.w[0] = w.w[0], weight.w[1] = w.w[1];
    } else {
      weight = at<Quad<float>>(a.weight + mine_rows * 4);
    }
  }
  {
    const int row = lane % kRows, which = lane / kRows;
    float start[kTokens], sum[kTokens] = {}, beta[kTokens], fk[kTokens], v[kTokens];
    row_of_eight(sums + lane * kPitch, start);
    row_of_eight(s.beta, beta), row_of_eight(s.fk, fk);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) v[i] = core::to_float(s.v[i][warp * kRows + row]);
    const auto along_tokens = [&](auto count) {  // no branch between tokens: what is behind the last one goes nowhere that is read
#pragma unroll
      for (int j = 0; j < count; ++j) {
        float c[kTokens];
        row_of_eight(s.triangle[j][which], c);
        const float x = beta[j] * fmaf(-fk[j], start[j] + sum[j], v[j]), u = __shfl_sync(kAll, x * fk[j], row);
#pragma unroll
        for (int i = j; i < count; ++i) sum[i] = fmaf(c[i], u, sum[i]);
      }
    };
    if (found.tokens > kTokens / 2)
      along_tokens(std::integral_constant<int, kTokens>());
    else
      along_tokens(std::integral_constant<int, kTokens / 2>());
    float fq[kTokens];
    row_of_eight(s.fq, fq);
    if (which)
#pragma unroll
      for (int i = 0; i < kTokens; ++i) out[i * kRows + row] = fq[i] * (start[i] + sum[i]);
  }
  __syncwarp();
  const int its_token = lane / 4;
  float o[4];
  row_of_four(out + lane * 4, o);
  if (a.gate) {
    float g[4], w[4];
    unpack(gate, g);
    if (a.weight_bf16)
      unpack(Quad<bfloat16>{{weight.w[0], weight.w[1]}}, w);
    else
      unpack(weight, w);
    if (a.round_before_norm) round_bf16(o);
    float sum = dot4(o, o);
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    if (lane % 4 == 0) s.squares[its_token][warp] = sum;
#pragma unroll
    for (int e = 0; e < 4; ++e) g[e] = quick_sigmoid(g[e]);
    __syncthreads();
    float x[kWarps];
    row_of_eight(s.squares[its_token], x);
    const float r = rsqrtf((((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))) * (1.0f / kDim) + a.norm_eps);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[e] = o[e] * r * w[e] * g[e];
  }
  if (its_token < found.tokens) {
    Quad<bfloat16> y;
    pack(o, y);
    *reinterpret_cast<Quad<bfloat16>*>(along(along(a.out + mine_rows * 2, hv, a.out_head), found.begin + its_token, a.out_token)) = y;
  }
#endif
}

}  // namespace specstate::kda::cuda::third
