// What a step decides on the device: which requests take part, which ids follow from logits, what was emitted, what is left.
#include <algorithm>

#include "runtime/cuda/math.cuh"
#include "runtime/cuda/ops.hpp"
#include "runtime/cuda/turn.cuh"
#include "runtime/digest.hpp"
#include "runtime/sampler.hpp"

namespace specstate::runtime::cuda {

using specstate::cuda::blocks_for;

namespace {

using i64 = std::int64_t;
using i32 = std::int32_t;
constexpr int kThreads = 256;

// ---- ids from logits -------------------------------------------------------------------------------------------------------------------

/// Working memory of a row: V logits, V probabilities.
struct Vocabulary {
  double* p;
  float* logits;
};
__device__ Vocabulary vocabulary(i64 V) {
  SPECSTATE_DYNAMIC_SHARED(memory);
  double* p = reinterpret_cast<double*>(memory);
  return {p, reinterpret_cast<float*>(p + V)};
}
std::size_t vocabulary_bytes(i64 V) { return static_cast<std::size_t>(V) * 12; }

/// Ids >= 256 other than EOS are never emitted.
__device__ float allowed(float logit, i64 id, int eos) { return id < 256 || id == eos ? logit : -INFINITY; }

/// The best id of v.logits, the lowest on ties; everyone gets it.
__device__ int best_of(const Vocabulary& v, i64 V) {
  __shared__ float values[kThreads];
  __shared__ int ids[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  float value = -INFINITY;
  int id = 0x7FFFFFFF;
  for (i64 i = t; i < V; i += kThreads)
    if (v.logits[i] > value) value = v.logits[i], id = static_cast<int>(i);
  values[t] = value, ids[t] = id;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half && (values[t + half] > values[t] || (values[t + half] == values[t] && ids[t + half] < ids[t])))
      values[t] = values[t + half], ids[t] = ids[t + half];
  }
  __syncthreads();
  const int best = ids[0];
  __syncthreads();
  return best < V ? best : 0;
}

/// v.p = softmax(v.logits / temperature), its sum over rising ids as in sampler.cpp; an id by inverse CDF, valid in thread 0.
__device__ int draw(const Vocabulary& v, const Choice& c, double u) {
  __shared__ double sum;
  const int t = static_cast<int>(threadIdx.x);
  const double top = v.logits[best_of(v, c.V)];
  for (i64 i = t; i < c.V; i += kThreads) v.p[i] = exp((v.logits[i] - top) / c.temperature);
  __syncthreads();
  if (t == 0) {
    double s = 0;
    for (i64 i = 0; i < c.V; ++i) s += v.p[i];
    sum = s;
  }
  __syncthreads();
  for (i64 i = t; i < c.V; i += kThreads) v.p[i] /= sum;
  __syncthreads();
  int last = 0;
  if (t == 0) {
    double s = 0;
    for (i64 i = 0; i < c.V; ++i) {
      if (!(v.p[i] > 0)) continue;
      s += v.p[i];
      last = static_cast<int>(i);
      if (s > u) break;
    }
  }
  return last;
}

// A block a window row.
__global__ void __launch_bounds__(kThreads)
    choose_rows(Rows rows, const float* logits, Choice c, const std::uint64_t* keys, i64* out, double* probabilities, double* uniforms) {
  my_turn();
  const i64 row = blockIdx.x, b = row / rows.width, j = row % rows.width;
  const int t = static_cast<int>(threadIdx.x);
  const Vocabulary v = vocabulary(c.V);
  const bool real = b < *rows.real;
  const std::uint64_t key = real ? keys[rows.requests[b]] : 0, position = real ? static_cast<std::uint64_t>(rows.positions[row]) + 1 : 0;
  for (i64 i = t; i < c.V; i += kThreads) v.logits[i] = real ? allowed(logits[row * c.V + i], i, c.eos) : 0.0f;
  __syncthreads();
  if (c.temperature <= 0) {
    const int id = best_of(v, c.V);
    if (t == 0) out[row] = id;
    return;
  }
  const int id = draw(v, c, uniform(c.seed, key, position, Draw::kToken));
  if (t == 0) out[row] = id;
  if (!probabilities) return;
  for (i64 i = t; i < c.V; i += kThreads) probabilities[row * c.V + i] = v.p[i];
  // The final draw has a number of its own; the window's first position names it.
  if (t == 0)
    uniforms[row] = j + 1 < rows.width ? uniform(c.seed, key, position, Draw::kAcceptance)
                                       : uniform(c.seed, key, position - static_cast<std::uint64_t>(j), Draw::kToken);
}

// A block a request: its proposals one after the other, because DSpark's each correct the next. DFlash's do not: there a block has one proposal.
__global__ void __launch_bounds__(kThreads) propose_rows(Rows rows, i64 block, i64 skip, const float* logits, Choice c,
                                                         const std::uint64_t* keys, Markov markov, i64* candidates, double* probabilities) {
  __shared__ i64 token;
  my_turn();
  const i64 b = blockIdx.x, rank = markov.proj.k, G = block - skip, first = markov.embed ? 0 : blockIdx.y,
            end = markov.embed ? G : first + 1;
  const int t = static_cast<int>(threadIdx.x);
  const Vocabulary v = vocabulary(c.V);
  candidates += b * rows.width;
  if (b >= *rows.real) {
    for (i64 k = first + t; k < end && k + 1 < rows.width; k += kThreads) candidates[k + 1] = 0;
    return;
  }
  if (t == 0) token = candidates[0];
  for (i64 k = first; k < end; ++k) {
    __syncthreads();
    const float* before = markov.embed ? markov.embed + token * rank : nullptr;
    for (i64 i = t; i < c.V; i += kThreads) {
      float x = logits[(b * block + skip + k) * c.V + i];
      if (before) {
        const std::uint32_t* w = markov.proj.words + i / 16 * ((rank + 1) / 2 * 16) + i % 16;
        float bias = 0;
        for (i64 r = 0; r < rank; ++r)
          bias = fmaf(before[r], __uint_as_float(r % 2 ? w[r / 2 * 16] & 0xFFFF0000u : w[r / 2 * 16] << 16), bias);
        x += bias;
      }
      v.logits[i] = allowed(x, i, c.eos);
    }
    __syncthreads();
    int id;
    if (probabilities) {
      id = draw(
          v, c,
          uniform(c.seed, keys[rows.requests[b]], static_cast<std::uint64_t>(rows.positions[b * rows.width] + 1 + k), Draw::kProposal));
      for (i64 i = t; i < c.V; i += kThreads) probabilities[(b * G + k) * c.V + i] = v.p[i];
    } else {
      id = best_of(v, c.V);
    }
    if (t == 0) {
      token = id;
      if (k + 1 < rows.width) candidates[k + 1] = id;
    }
  }
}

// ---- the step ----------------------------------------------------------------------------------------------------------------------------

// One block: a batch is small, and its order must be one.
__global__ void __launch_bounds__(kThreads) begin_step(Step s, Tables tables, i64 context) {
  __shared__ i32 real, of_round[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  my_turn();
  if (t == 0) real = 0;
  for (i64 first = 0; first < s.batch; first += kThreads) {
    const i32 r = first + t < s.batch ? s.slots[first + t] : -1;
    of_round[t] = r >= 0 && tables.left[r] > 0 ? r : -1;
    __syncthreads();
    if (t == 0)
      for (i64 i = 0; i < min(i64{kThreads}, s.batch - first); ++i)
        if (of_round[i] >= 0) s.requests[real++] = of_round[i];
    __syncthreads();
  }
  if (t == 0) *s.real = real;
  for (i64 b = t; b < s.batch; b += kThreads) {
    const bool in = b < real;
    if (!in) s.requests[b] = 0;
    const i32 r = s.requests[b];
    s.kda_slots[b] = in ? r : -1;
    s.widths[b] = in ? static_cast<i32>(s.width) : 0;
    s.caps[b] = in ? min(static_cast<i32>(s.width), tables.left[r]) : 1;
    for (i64 j = 0; j < s.width; ++j) {
      const i32 p = in ? tables.lengths[r] + static_cast<i32>(j) : 0;
      s.positions[b * s.width + j] = p;
      s.ends[b * s.width + j] = in ? p + 1 : 0;
      s.pool_rows[b * s.width + j] = in ? r * context + p : -1;
      s.candidates[b * s.width + j] = in && j == 0 ? tables.last[r] : 0;
    }
  }
}

// A thread a proposal. It reads plain decoding's tokens backwards from their end: that many are left.
__global__ void __launch_bounds__(kThreads) force_proposals(Step s, Tables tables, Forced forced) {
  my_turn();
  const i64 i = i64{blockIdx.x} * kThreads + threadIdx.x, b = i / s.width, k = i % s.width;
  if (b >= *s.real || k >= forced.length || k + 1 >= s.caps[b]) return;
  const i32 r = s.requests[b], truth = forced.known[forced.ends[r] - tables.left[r] + k];
  s.candidates[b * s.width + k + 1] = k + 1 < forced.length ? truth : (truth + 1) % 256;
}

__global__ void __launch_bounds__(kThreads) emit_step(Step s, Tables tables, int eos, Emitted e, Swaps swaps) {
  my_turn();
  const int t = static_cast<int>(threadIdx.x);
  const i64 entry = *e.written % e.entries;
  for (i64 b = t; b < e.batch; b += kThreads) {
    i32 taken = 0;
    if (b < *s.real) {
      const i32 r = s.requests[b];
      i32 left = tables.left[r], last = tables.last[r];
      const i32 n = s.accept[b];
      while (taken < n && left > 0) {
        i32 some[4];  // read together
#pragma unroll
        for (int u = 0; u < 4; ++u) some[u] = taken + u < n ? static_cast<i32>(s.out[b * s.width + taken + u]) : 0;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          if (taken >= n || left <= 0) break;
          last = some[u];
          e.tokens[(entry * e.batch + b) * e.width + taken] = last;
          ++taken, --left;
          if (last == eos) left = 0;
        }
      }
      tables.left[r] = left, tables.last[r] = last;
      e.request[entry * e.batch + b] = r;
    }
    e.count[entry * e.batch + b] = taken;
    if (b < s.batch) s.accepted[b] = taken, s.last_step[b] = taken - 1;
  }
  for (i64 a = t; a < swaps.anchors; a += kThreads)
    for (i64 b = 0; b < *s.real; ++b)
      swaps.totals[2 * a] += swaps.hits[a * swaps.most + b], swaps.totals[2 * a + 1] += swaps.misses[a * swaps.most + b];
  __syncthreads();
  if (t == 0) e.fault[entry] = *tables.fault, *e.written += 1;
}

__global__ void __launch_bounds__(kThreads)
    digest_words(const std::uint32_t* base, i64 step, i64 count, const i32* lengths, std::uint64_t salt, std::uint64_t* digest) {
  my_turn();
  const i64 r = blockIdx.y, n = lengths ? lengths[r] * count : count;
  std::uint64_t sum = 0;
  for (i64 i = i64{blockIdx.x} * kThreads + threadIdx.x; i < n; i += i64{gridDim.x} * kThreads)
    sum += mix64(mix64(salt + static_cast<std::uint64_t>(i)) ^ base[r * step + i]);
  if (sum) atomicAdd(reinterpret_cast<unsigned long long*>(digest + r), static_cast<unsigned long long>(sum));
}

}  // namespace

void choose(const Rows& rows, const float* logits, const Choice& choice, const std::uint64_t* keys, i64* out, double* probabilities,
            double* uniforms, Stream stream) {
  launch(choose_rows, {static_cast<unsigned>(rows.count()), kThreads, vocabulary_bytes(choice.V)}, stream, rows, logits, choice, keys, out,
         probabilities, uniforms);
}
void propose(const Rows& rows, i64 block, i64 skip, const float* logits, const Choice& choice, const std::uint64_t* keys,
             const Markov& markov, i64* candidates, double* probabilities, Stream stream) {
  const dim3 grid(static_cast<unsigned>(rows.batch), markov.embed ? 1 : static_cast<unsigned>(block - skip));
  launch(propose_rows, {grid, kThreads, vocabulary_bytes(choice.V)}, stream, rows, block, skip, logits, choice, keys, markov, candidates,
         probabilities);
}
void begin(const Step& step, const Tables& tables, i64 context, Stream stream) {
  launch(begin_step, {1, kThreads}, stream, step, tables, context);
}
void force(const Step& step, const Tables& tables, const Forced& forced, Stream stream) {
  launch(force_proposals, {blocks_for(step.batch * step.width, kThreads), kThreads}, stream, step, tables, forced);
}
void emit(const Step& step, const Tables& tables, int eos, const Emitted& emitted, const Swaps& swaps, Stream stream) {
  launch(emit_step, {1, kThreads}, stream, step, tables, eos, emitted, swaps);
}
void add_digest(const void* base, i64 step, i64 count, const i32* lengths, i64 requests, std::uint64_t salt, std::uint64_t* digest,
                Stream stream) {
  launch(digest_words, {dim3(32, static_cast<unsigned>(requests)), kThreads}, stream, static_cast<const std::uint32_t*>(base), step, count,
         lengths, salt, digest);
}

}  // namespace specstate::runtime::cuda
