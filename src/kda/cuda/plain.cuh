#pragma once
// The kernel of heads.cuh: what its warps do when.
#include "kda/cuda/frozen.cuh"
#include "kda/cuda/sequence.cuh"

namespace specstate::kda::cuda::plain {

/// The warp that directs. `finder` has the CTA's first heads. A head is found while the one before it is worked on.
template <class M>
__device__ __forceinline__ void direct(const HeadsCall& a, M& s, Finder& finder, int lane) {
  // Of the next turn's tokens: asked for, and looked at when there is nothing else to do.
  const char* logits = nullptr;
  float* ring = nullptr;
  std::uint16_t half = 0;
  float whole = 0;
  const auto ask = [&](const Head& head, int first, int n) {
    logits = lane < n ? head.place[kLogit] : nullptr;
    const std::int64_t at = (first + lane) * a.logit_token;
    if (logits && a.logit_bf16) half = reinterpret_cast<const std::uint16_t*>(logits)[at];
    if (logits && !a.logit_bf16) whole = reinterpret_cast<const float*>(logits)[at];
    ring = logits && first + lane < a.L ? head.at<float>(kRingBeta) : nullptr;
    if (ring) ring += (first + lane) * a.ring_beta_step;
  };
  const auto betas = [&](int turn) {
    const float beta = sigmoid(a.logit_bf16 ? __uint_as_float(static_cast<std::uint32_t>(half) << 16) : whole);
    if (logits) s.beta[turn & 1][lane] = beta;
    if (ring) *ring = beta;
  };
  finder.go_on(a, s);
  finder.peek(s.first);
  ptx::barrier_arrive(&s.found);
  finder.pop(a, s, s.head[0]);
  const Head* head = &s.head[0];
  int number = 0, first = 0;
  ask(*head, 0, min(kTokens, head->tokens));
  betas(0);
  ptx::barrier_arrive(&s.first_here);
  request_state(*head, s, lane);  // by now the workers have asked for the tokens, which would wait behind the states of all CTAs
#pragma unroll 1
  for (int turn = 0; head->tokens > 0; ++turn) {
    if (first == 0) finder.go_on(a, s), finder.pop(a, s, s.head[(number + 1) % 3]);
    const int n = min(kTokens, head->tokens - first);
    const bool last = first + n == head->tokens;
    const Head& next = last ? s.head[(number + 1) % 3] : *head;
    take<kStageRead>(s, turn);
    first = last ? 0 : first + n;
    const int left = min(kTokens, next.tokens - first);
    if (left > 0) request_tokens(a, next, s, first, left, turn + 1, lane);
    arrive_with_copies(&s.tokens_here);
    ask(next, first, left);
    take<kStateRead>(s, turn);
    if (last) request_state(next, s, lane), ++number;
    betas(turn + 1);
    ptx::barrier_arrive(&s.tokens_here);
    head = &next;
  }
}

template <class M>
__device__ __forceinline__ void work(const HeadsCall& a, M& s, int warp, int lane) {
  constexpr int kWorkers = M::kWorkers;
  if (a.gate && static_cast<int>(threadIdx.x) < kDim)
    s.weight[threadIdx.x] = a.weight_bf16 ? core::to_float(static_cast<const bfloat16*>(a.weight)[threadIdx.x])
                                          : static_cast<const float*>(a.weight)[threadIdx.x];
  ptx::barrier_wait(&s.found, 0);
  request_first(a, s);
  ptx::barrier_wait(&s.first_here, 0);
  const Head* head = &s.head[0];
  int first = 0, phases = 0;  // bit 0: of turns; bit 1: of states that have come
#pragma unroll 1
  while (head->tokens > 0) {  // a turn is a block of a head's tokens
    const int n = min(kTokens, head->tokens - first);
    const bool last = M::kFrozen || first + n == head->tokens;
    // What depends on these is found anew in every turn, so that it takes no registers from one turn to the next.
    asm volatile("" : "+r"(warp), "+r"(lane));
    if (M::kFrozen) warp &= kWorkers - 1, lane &= 31;
    prepare(a, *head, s, warp, first, n, lane);
    leave<kStageRead>(s);
    sync_workers<M>();
    if constexpr (M::kFrozen) {
      // Columns' later rows go to 8 warps. Of the others, or of the same ones, four take the columns' earlier rows and four two tokens' operands each.
      const int other = kWorkers == 8 ? warp : warp - 8;
      if (warp < n && n > kTokens / 2) column<true>(a, s, warp, lane);
      if (0 <= other && other < min(n, kTokens / 2)) column<false>(a, s, other, lane);
      if (const int t = 2 * other - kTokens; 0 <= t && t < n) operands(a, s, t, lane);
      sync_workers<M>();
      ptx::barrier_wait(&s.state_here, phases >> 1);
      multiply_state(s, warp, lane);
      leave<kStateRead>(s);
      sync_workers<M>();
      if (warp < kDim / 32) outputs(s, warp * 32 + lane, n, phases & 1);
    } else {
      if (warp < n) scalars(a, s, warp, lane);
      sync_workers<M>();
      walk(a, *head, s, first, n, last, phases & 1, phases >> 1, lane);
    }
    sync_workers<M>();
    if (warp < n) finish(a, *head, s, first, warp, phases & 1, lane);
    sync_workers<M>();
    first += n;
    if (last) {
      phases ^= head->place[kState] ? 2 : 0;
      head = head == &s.head[2] ? &s.head[0] : head + 1, first = 0;
    }
    ptx::barrier_wait(&s.tokens_here, phases & 1);
    phases ^= 1;
  }
  if (!M::kFrozen) stores_done(lane);
}

/// Grid: CTAs that take heads in turns; kWorkers + 2 warps.
template <class M>
__global__ void __launch_bounds__(M::kThreads, M::kEach) kernel(const __grid_constant__ HeadsCall a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  constexpr int kWorkers = M::kWorkers, kThreads = M::kThreads;
  M& s = *reinterpret_cast<M*>(memory);
  const int warp = warp_of_block(), lane = static_cast<int>(threadIdx.x) % 32;
  Finder finder{.lane = lane};
  if (warp == kWorkers) {
    wait_for_predecessor();
    finder.fill(a);
  }
  // The parameters: a first read of 64 bytes is a miss, so the warps take them all at the same time.
  constexpr int kLine = 8, kWords = sizeof(HeadsCall) / 8, kLines = (kWords + kLine - 1) / kLine;
  constexpr int kFirst = offsetof(HeadsCall, places) / 8, kPlaceWords = sizeof(s.places) / 8;
#pragma unroll
  for (int line = 0; line < kLines; line += kThreads / 32)
    if (const int i = (line + warp) * kLine + lane; lane < kLine && i < kWords) {
      const std::uint64_t word = reinterpret_cast<const std::uint64_t*>(&a)[i];
      if (kFirst <= i && i < kFirst + kPlaceWords) reinterpret_cast<std::uint64_t*>(&s.places)[i - kFirst] = word;
      asm volatile("" ::"l"(word));
    }
  if (threadIdx.x == 0) {
    ptx::barrier_init(&s.found, 32);
    ptx::barrier_init(&s.first_here, 32 * kWorkers + 32);
    ptx::barrier_init(&s.tokens_here, 64);  // the director's copies, and the rest of what it does
    ptx::barrier_init(&s.stage_read, 32 * kWorkers);
    ptx::barrier_init(&s.state_here, 1);
    ptx::barrier_init(&s.alone, 1);
    ptx::fence_barriers();
  }
  __syncthreads();
  if (warp == kWorkers + 1) scout(a, s, lane);
  if (warp != kWorkers) wait_for_predecessor();
  if (threadIdx.x == 0) ptx::barrier_arrive(&s.alone);
  launch_successor();
  if (warp == kWorkers)
    direct(a, s, finder, lane);
  else if (warp < kWorkers)
    work(a, s, warp, lane);
  // Tokens that belong to no request.
  const int behind = a.cu ? ask<false>(a.cu, a.N).value(a.cu) : a.T;
  if (behind >= 0)
    for (std::int64_t t = behind + blockIdx.x; t < a.T; t += gridDim.x)
      for (int hv = 0; hv < a.HV; ++hv) clear<M>(a, s, t, t + 1, hv, static_cast<int>(threadIdx.x), kThreads);
#endif
}

template <int kWorkers, bool kFrozen>
HeadsKernel form() {
  using M = Shared<kWorkers, kFrozen>;
  return {kernel<M>, sizeof(M), M::kThreads, M::kEach};
}

}  // namespace specstate::kda::cuda::plain
