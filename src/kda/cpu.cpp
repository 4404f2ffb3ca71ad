// KDA on the CPU. Verify, decode and fold share one recurrence (`recur`): the same instructions for a token whichever of them runs it.
//
// Row-invariance: every sum over a head's channels is taken in 16 running lanes (channel c belongs to lane c mod 16) that are added in
// one fixed tree, on every vector width; head dims are multiples of 16, so there are no tails. A value row of the state depends only
// on its own past and on the tokens' k, q, decay, so the state is walked in blocks of 8 rows that stay in L1 for all tokens.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kda/cpu.cpp"
#include "cpu/simd.hpp"
//
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "hwy/cache_control.h"
#include "kda/cpu-inl.hpp"
//
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cpu/parallel.hpp"
#include "kda/args.hpp"
#include "kda/layout.hpp"

#ifndef SPECSTATE_KDA_CPU_PLAN
#define SPECSTATE_KDA_CPU_PLAN
namespace specstate::kda::cpu {

constexpr std::int64_t kBlock = 16;  // tokens of a chain that one walk over the state serves
constexpr std::int64_t kRows = 8;    // value rows that stay in L1: two groups of 4, so that one's sums overlap the other's multiplies
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;  // of snapshots: more than stay in a core's cache until they are committed

/// What every item of a call needs.
struct Plan {
  std::int64_t K, V, G;  // G value heads read one key head
  std::int64_t block;    // most tokens of one walk
  bool blocks, tree;     // some request takes several walks; trees keep one state a node
  bool stream = false;   // see Walk

  Plan(std::int64_t longest, bool is_tree, std::int64_t key_dim, std::int64_t value_dim, std::int64_t group)
      : K(key_dim), V(value_dim), G(group), block(is_tree ? longest : std::min(longest, kBlock)), blocks(longest > block), tree(is_tree) {}
};

/// One item's scratch, cut from one block of floats; without a block it only counts.
struct Scratch {
  float *q, *k, *decay, *v, *beta, *kq, *o, *u;  // as in Tokens
  float *in_q, *in_k, *in_v;                     // raw inputs behind the three before them; in_v and taps_v for each value head
  float *taps_q, *taps_k, *taps_v;
  std::int32_t (*ancestor)[3];
  float* kept;   // states between walks, one for each value head
  float* small;  // rows of the state in L1
  std::int64_t floats = 0;

  Scratch(float* base, const Plan& p, bool fold) {
    const auto take = [&](std::int64_t n) {
      float* x = base ? base + floats : nullptr;
      floats += (n + 15) / 16 * 16;
      return x;
    };
    const std::int64_t B = p.block, K = p.K, V = p.V, G = p.G;
    k = take(B * K), decay = take(B * K), v = take(B * V), beta = take(B), u = take(B * kRows);
    kept = take(p.blocks ? G * V * K : 0), small = take((p.tree ? B + 1 : 1) * kRows * K);
    if (fold) return;
    q = take(B * K), kq = take(B), o = take(B * V);
    in_q = take((B + 3) * K), in_k = take((B + 3) * K), in_v = take(G * (B + 3) * V);
    taps_q = take(4 * K), taps_k = take(4 * K), taps_v = take(G * 4 * V);
    ancestor = reinterpret_cast<std::int32_t(*)[3]>(take(B * 3));
  }
};

}  // namespace specstate::kda::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace specstate::kda::cpu::HWY_NAMESPACE {
namespace {

// ---- the recurrence ----------------------------------------------------------------------------------------------------------

/// The tokens of one walk over the state of one value head.
struct Tokens {
  std::int64_t n;
  const std::int32_t* parent;  // null: a chain
  const float *k, *q, *decay;  // [n, K], normalised
  const float* v;              // [n, V]
  const float *beta, *kq;      // [n]; kq = k . q
  float* o;                    // [n, V] out; null: states only (a fold)
  float* u;                    // [n, kRows] scratch
};

/// A state in memory; `row` gives the address of its value row.
struct Place {
  char* data = nullptr;
  bool bf16 = false;
  explicit operator bool() const { return data != nullptr; }
  char* row(std::int64_t v, std::int64_t K) const { return data + v * K * (bf16 ? 2 : 4); }
};
HWY_INLINE Place place_at(const Array& a, std::int64_t offset) { return {address(a, offset), a.bf16}; }

struct Walk {
  std::int64_t K, V;
  bool round;                   // a bfloat16 pool: the state is rounded after every token
  Place from;                   // the state before the first token; none: zeros
  Place snapshots;              // of token 0, or none
  bool stream;                  // snapshots past the caches: there are more of them than these hold
  std::int64_t snapshot_pitch;  // bytes from one token's snapshot to the next
  Place track;                  // where the state after token track_step goes, or none
  std::int64_t track_step;
  Place last;    // where the state after the last token goes, or none
  float* small;  // [tree ? n : 1, kRows, K] scratch
};

/// One token, four value rows: S <- (S + u_before k_before) * decay; p = S . k, r = S . q. kFirst: there is no token before.
template <bool kFirst, bool kOut>
HWY_INLINE void step(const Walk& w, const float* from, float* to, const float* k_before, const float* u_before, const float* decay,
                     const float* k, const float* q, float* p, float* r) {
  const D d;
  const std::int64_t K = w.K;
  V ps[4][kParts], rs[4][kParts];
  const V u0 = kFirst ? hn::Zero(d) : hn::Set(d, u_before[0]), u1 = kFirst ? hn::Zero(d) : hn::Set(d, u_before[1]);
  const V u2 = kFirst ? hn::Zero(d) : hn::Set(d, u_before[2]), u3 = kFirst ? hn::Zero(d) : hn::Set(d, u_before[3]);
  for (std::int64_t h = 0; h < kParts; ++h) {
    V p0 = hn::Zero(d), p1 = p0, p2 = p0, p3 = p0, r0 = p0, r1 = p0, r2 = p0, r3 = p0;
    for (std::int64_t c = h * kWidth; c < K; c += kLanes) {
      V s0 = hn::LoadU(d, from + c), s1 = hn::LoadU(d, from + K + c), s2 = hn::LoadU(d, from + 2 * K + c),
        s3 = hn::LoadU(d, from + 3 * K + c);
      if constexpr (!kFirst) {
        const V kb = hn::LoadU(d, k_before + c);
        s0 = hn::MulAdd(u0, kb, s0), s1 = hn::MulAdd(u1, kb, s1), s2 = hn::MulAdd(u2, kb, s2), s3 = hn::MulAdd(u3, kb, s3);
        if (w.round) s0 = round_bf16(s0), s1 = round_bf16(s1), s2 = round_bf16(s2), s3 = round_bf16(s3);
      }
      const V dd = hn::LoadU(d, decay + c), kk = hn::LoadU(d, k + c);
      s0 = hn::Mul(s0, dd), s1 = hn::Mul(s1, dd), s2 = hn::Mul(s2, dd), s3 = hn::Mul(s3, dd);
      hn::StoreU(s0, d, to + c), hn::StoreU(s1, d, to + K + c), hn::StoreU(s2, d, to + 2 * K + c), hn::StoreU(s3, d, to + 3 * K + c);
      p0 = hn::MulAdd(s0, kk, p0), p1 = hn::MulAdd(s1, kk, p1), p2 = hn::MulAdd(s2, kk, p2), p3 = hn::MulAdd(s3, kk, p3);
      if constexpr (kOut) {
        const V qq = hn::LoadU(d, q + c);
        r0 = hn::MulAdd(s0, qq, r0), r1 = hn::MulAdd(s1, qq, r1), r2 = hn::MulAdd(s2, qq, r2), r3 = hn::MulAdd(s3, qq, r3);
      }
    }
    ps[0][h] = p0, ps[1][h] = p1, ps[2][h] = p2, ps[3][h] = p3;
    rs[0][h] = r0, rs[1][h] = r1, rs[2][h] = r2, rs[3][h] = r3;
  }
  sums4(d, ps, p);
  if constexpr (kOut) sums4(d, rs, r);
}

/// Past the caches to memory; `to` is a multiple of 16 bytes.
HWY_INLINE void stream_row(const float* HWY_RESTRICT from, std::int64_t n, float* HWY_RESTRICT to) {
  const D d;
  const D4 d4;
  if (reinterpret_cast<std::uintptr_t>(to) % (sizeof(float) * kWidth) == 0) {
    for (std::int64_t c = 0; c < n; c += kWidth) hn::Stream(hn::LoadU(d, from + c), d, to + c);
  } else {
    for (std::int64_t c = 0; c < n; c += static_cast<std::int64_t>(hn::MaxLanes(d4))) hn::Stream(hn::LoadU(d4, from + c), d4, to + c);
  }
}

/// The completed state after a token, kRows value rows: S + u k, stored.
HWY_INLINE void complete(const Walk& w, const float* from, const float* u, const float* k, Place to, std::int64_t v0, bool stream = false) {
  const D d;
  float row[128];
  for (std::int64_t i = 0; i < kRows; ++i) {
    const V ui = hn::Set(d, u[i]);
    const float* s = from + i * w.K;
    for (std::int64_t c = 0; c < w.K; c += kWidth) {
      V x = hn::MulAdd(ui, hn::LoadU(d, k + c), hn::LoadU(d, s + c));
      if (w.round) x = round_bf16(x);
      hn::StoreU(x, d, row + c);
    }
    char* out = to.row(v0 + i, w.K);
    if (stream)
      stream_row(row, w.K, reinterpret_cast<float*>(out));
    else
      write_row(row, w.K, out, to.bf16);
  }
}

/// S *= decay; u = (v - S k) * beta; S += u k; o = S q, written as r + u (k . q) with r = (decayed S) q, so that one pass a token over
/// the rows does it all: a token's rank-1 update is applied when the next token reads the row.
template <bool kOut>
void recur(const Walk& w, const Tokens& x) {
  const D4 d4;
  const std::int64_t K = w.K;
  for (std::int64_t v0 = 0; v0 < w.V; v0 += kRows) {
    const float* start = w.small;
    if (!w.from)
      std::fill(w.small, w.small + kRows * K, 0.0f);
    else if (w.from.bf16)
      read_row(w.from.row(v0, K), true, kRows * K, w.small);
    else
      start = reinterpret_cast<const float*>(w.from.row(v0, K));
    if (w.from && v0 + kRows < w.V)  // the next rows come from memory while these are worked on
      for (const char *line = w.from.row(v0 + kRows, K), *end = w.from.row(v0 + 2 * kRows, K); line < end; line += 64) hwy::Prefetch(line);
    // A tree's first node must not overwrite the start that other roots read: node i lives in place i + 1.
    float* const nodes = x.parent ? w.small + kRows * K : w.small;
    const std::int64_t node_pitch = x.parent ? kRows * K : 0;
    for (std::int64_t i = 0; i < x.n; ++i) {
      const std::int64_t before = x.parent ? x.parent[i] : i - 1;
      const float* from = before < 0 ? start : nodes + before * node_pitch;
      float* to = nodes + i * node_pitch;
      for (std::int64_t g = 0; g < kRows; g += 4) {
        alignas(16) float p[4], r[4];
        const float* const k = x.k + i * K;
        const float* const q = kOut ? x.q + i * K : nullptr;
        if (before < 0)
          step<true, kOut>(w, from + g * K, to + g * K, nullptr, nullptr, x.decay + i * K, k, q, p, r);
        else
          step<false, kOut>(w, from + g * K, to + g * K, x.k + before * K, x.u + before * kRows + g, x.decay + i * K, k, q, p, r);
        for (std::size_t l = 0; l < 4; l += hn::MaxLanes(d4)) {
          const auto v = hn::LoadU(d4, x.v + i * w.V + v0 + g + l);
          const auto u = hn::Mul(hn::Sub(v, hn::LoadU(d4, p + l)), hn::Set(d4, x.beta[i]));
          hn::StoreU(u, d4, x.u + i * kRows + g + l);
          if constexpr (kOut) hn::StoreU(hn::MulAdd(u, hn::Set(d4, x.kq[i]), hn::LoadU(d4, r + l)), d4, x.o + i * w.V + v0 + g + l);
        }
      }
      const float* const u = x.u + i * kRows;
      if (w.snapshots) complete(w, to, u, x.k + i * K, {w.snapshots.data + i * w.snapshot_pitch, w.snapshots.bf16}, v0, w.stream);
      if (w.track && i == w.track_step) complete(w, to, u, x.k + i * K, w.track, v0);
    }
    if (w.last) complete(w, nodes + (x.n - 1) * node_pitch, x.u + (x.n - 1) * kRows, x.k + (x.n - 1) * K, w.last, v0);
  }
}

// ---- what comes before the recurrence ----------------------------------------------------------------------------------------

/// y[i] = round(silu(conv)) of every token; `ancestor[i]` names the three inputs before token i in `inputs`.
void conv_silu(const float* HWY_RESTRICT inputs, const float* HWY_RESTRICT taps, const std::int32_t (*ancestor)[3], std::int64_t n,
               std::int64_t channels, bool round, float* HWY_RESTRICT y) {
  const D d;
  for (std::int64_t i = 0; i < n; ++i) {
    const float* x[4];
    for (int t = 0; t < 3; ++t) x[t] = inputs + ancestor[i][t] * channels;
    x[3] = inputs + (i + 3) * channels;
    for (std::int64_t c = 0; c < channels; c += kWidth) {
      V s = hn::Mul(hn::LoadU(d, x[0] + c), hn::LoadU(d, taps + c));
      for (int t = 1; t < 4; ++t) s = hn::MulAdd(hn::LoadU(d, x[t] + c), hn::LoadU(d, taps + t * channels + c), s);
      s = hn::Mul(s, sigmoid(s));
      hn::StoreU(round ? round_bf16(s) : s, d, y + i * channels + c);
    }
  }
}

/// k <- k / sqrt(k . k + 1e-6), in place: the one form of the norm, for verify and fold.
HWY_INLINE float inverse_norm(const float* x, std::int64_t n) { return 1.0f / std::sqrt(dot(x, x, n) + 1e-6f); }

HWY_INLINE void scale_row(float* x, float factor, std::int64_t n) {
  const D d;
  for (std::int64_t c = 0; c < n; c += kWidth) hn::StoreU(hn::Mul(hn::LoadU(d, x + c), hn::Set(d, factor)), d, x + c);
}

HWY_INLINE float first_lane(V x) { return hn::GetLane(x); }

HWY_INLINE V log_decay(const VerifyArgs& a, float amplitude, V x) {
  const D d;
  if (a.safe_gate) return hn::Mul(hn::Set(d, a.lower_bound), sigmoid(hn::Mul(hn::Set(d, amplitude), x)));
  return hn::Neg(hn::Mul(hn::Set(d, amplitude), softplus(x, a.softplus_beta, a.softplus_threshold)));
}

/// exp(a_log), kept finite so that it times a vanished softplus is 0 and not NaN.
HWY_INLINE float amplitude_of(float a_log) {
  const double a = std::exp(static_cast<double>(a_log));
  return a > std::numeric_limits<float>::max() ? std::numeric_limits<float>::max() : static_cast<float>(a);
}

/// Log decays -> decays in place; a scalar gate (one log decay, in ld[0]) becomes K of them.
HWY_INLINE void to_decay(bool scalar, std::int64_t K, float* ld) {
  const D d;
  const V one = hn::Set(d, ld[0]);
  for (std::int64_t c = 0; c < K; c += kWidth) hn::StoreU(exp_of(scalar ? one : hn::LoadU(d, ld + c)), d, ld + c);
}

/// Raw inputs of the block behind the three before it, then q, k or v of the recurrence.
void fill_channels(const Channel& c, const Request& r, std::int64_t head, std::int64_t first, std::int64_t n, std::int64_t channels,
                   const std::int32_t (*ancestor)[3], float* inputs, const float* taps, float* y) {
  for (std::int64_t i = 0; i < n; ++i) {
    float* to = c.weight ? inputs + (i + 3) * channels : y + i * channels;
    read_row(address(c.x, at(c.x, r.begin + first + i, head)), c.x.bf16, channels, to);
  }
  if (!c.weight) return;
  conv_silu(inputs, taps, ancestor, n, channels, c.x.bf16, y);
  if (c.windows && r.row >= 0)
    for (std::int64_t i = 0; i < n; ++i) {
      const float* rows[3] = {inputs + ancestor[i][1] * channels, inputs + ancestor[i][2] * channels, inputs + (i + 3) * channels};
      write_window(rows, channels, c.windows, at(c.windows, r.row, first + i, head * channels), c.windows.stride[2], c.windows.stride[3]);
    }
}

void start_channels(const Channel& c, const Request& r, std::int64_t head, std::int64_t channels, float* inputs, float* taps) {
  if (!c.weight) return;
  read_taps(c.weight, head * channels, channels, taps);
  if (r.slot < 0)
    std::fill(inputs, inputs + 3 * channels, 0.0f);
  else
    read_window(c.window, at(c.window, r.slot, head * channels), c.window.stride[1], c.window.stride[2], channels, inputs);
}

/// After a block: its last three inputs go to the front, and at a request's end into the pool if that is advanced in place.
void end_channels(const Channel& c, const Request& r, std::int64_t head, std::int64_t n, std::int64_t channels, bool to_pool,
                  float* inputs) {
  if (!c.weight) return;
  if (to_pool && r.slot >= 0) {
    const float* rows[3] = {inputs + n * channels, inputs + (n + 1) * channels, inputs + (n + 2) * channels};
    write_window(rows, channels, c.window, at(c.window, r.slot, head * channels), c.window.stride[1], c.window.stride[2]);
  }
  std::memmove(inputs, inputs + n * channels, static_cast<std::size_t>(3 * channels) * 4);
}

/// The outputs of n tokens of one value head: optional gated RMS norm, rounding, storage.
void output(const VerifyArgs& a, std::int64_t token, std::int64_t head, std::int64_t n, float* o) {
  const D d;
  const std::int64_t channels = a.V;
  float gate[128], weight[128];
  for (std::int64_t c = 0; a.gate && c < channels; ++c) weight[c] = load(a.norm_weight, at(a.norm_weight, c));
  for (std::int64_t i = 0; i < n; ++i, o += channels) {
    if (a.gate) {
      if (a.round_before_norm && a.out.bf16)
        for (std::int64_t c = 0; c < channels; c += kWidth) hn::StoreU(round_bf16(hn::LoadU(d, o + c)), d, o + c);
      const V r = hn::Set(d, 1.0f / std::sqrt(dot(o, o, channels) * (1.0f / static_cast<float>(channels)) + a.norm_eps));
      read_row(address(a.gate, at(a.gate, token + i, head)), a.gate.bf16, channels, gate);
      for (std::int64_t c = 0; c < channels; c += kWidth) {
        const V y = hn::Mul(hn::Mul(hn::LoadU(d, o + c), r), hn::LoadU(d, weight + c));
        hn::StoreU(hn::Mul(y, sigmoid(hn::LoadU(d, gate + c))), d, o + c);
      }
    }
    write_row(o, channels, address(a.out, at(a.out, token + i, head)), a.out.bf16);
  }
}

/// beta and decay of n tokens of one value head, and what the rings record of them.
void gates(const VerifyArgs& a, const Request& r, std::int64_t hv, std::int64_t first, std::int64_t n, const Scratch& x) {
  const D d;
  const std::int64_t K = a.K;
  const float amplitude = amplitude_of(load(a.a_log, at(a.a_log, hv)));
  float bias[128];
  for (std::int64_t c = 0; c < (a.scalar_gate ? 1 : K); ++c) bias[c] = load(a.dt_bias, at(a.dt_bias, hv, c));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t token = r.begin + first + i, g = at(a.g, token, hv);
    float* ld = x.decay + i * K;
    if (a.scalar_gate) {
      ld[0] = first_lane(log_decay(a, amplitude, hn::Set(d, load(a.g, g) + bias[0])));
    } else {
      read_row(address(a.g, g), a.g.bf16, K, ld);
      for (std::int64_t c = 0; c < K; c += kWidth)
        hn::StoreU(log_decay(a, amplitude, hn::Add(hn::LoadU(d, ld + c), hn::LoadU(d, bias + c))), d, ld + c);
    }
    x.beta[i] = first_lane(sigmoid(hn::Set(d, load(a.beta, at(a.beta, token, hv)))));
    if (a.rawk && r.slot >= 0 && first + i < a.L) {
      store(a.ring_beta, at(a.ring_beta, r.slot, hv, first + i), x.beta[i]);
      if (a.scalar_gate)
        store(a.ring_g, at(a.ring_g, r.slot, hv, first + i), ld[0]);
      else
        write_row(ld, K, address(a.ring_g, at(a.ring_g, r.slot, hv, first + i)), false);
    }
    to_decay(a.scalar_gate, K, ld);
  }
}

/// n rows of q, k or v as they were used, into their ring.
void record(const VerifyArgs& a, const Array& ring, const Request& r, std::int64_t head, std::int64_t first, std::int64_t n,
            std::int64_t channels, const float* x) {
  if (!ring || r.slot < 0) return;
  for (std::int64_t i = 0; i < n && first + i < a.L; ++i)
    write_row(x + i * channels, channels, address(ring, at(ring, r.slot, head, first + i)), ring.bf16);
}

/// Item = (request, key head), with the value heads that read it.
void verify_item(const VerifyArgs& a, const Plan& plan, const Request& r, std::int64_t h, float* scratch) {
  const std::int64_t K = a.K, VD = a.V, B = plan.block, G = plan.G;
  const Scratch x(scratch, plan, false);
  start_channels(a.q, r, h, K, x.in_q, x.taps_q);
  start_channels(a.k, r, h, K, x.in_k, x.taps_k);
  for (std::int64_t j = 0; j < G; ++j) start_channels(a.v, r, h * G + j, VD, x.in_v + j * (B + 3) * VD, x.taps_v + j * 4 * VD);
  const std::int32_t* parents = a.parents_of.empty() ? nullptr : a.parents_of.data() + r.begin;

  for (std::int64_t first = 0; first < r.tokens; first += B) {
    const std::int64_t n = std::min(B, r.tokens - first);
    const bool end = first + n == r.tokens;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t before = parents ? parents[i] : i - 1;
      for (std::int32_t t = 0; t < 3; ++t)
        x.ancestor[i][t] = before < 0 ? t : t < 2 ? x.ancestor[before][t + 1] : static_cast<std::int32_t>(before + 3);
    }
    fill_channels(a.q, r, h, first, n, K, x.ancestor, x.in_q, x.taps_q, x.q);
    fill_channels(a.k, r, h, first, n, K, x.ancestor, x.in_k, x.taps_k, x.k);
    record(a, a.rawk, r, h, first, n, K, x.k);
    for (std::int64_t i = 0; i < n; ++i) {
      float *q = x.q + i * K, *k = x.k + i * K;
      if (a.l2norm) scale_row(k, inverse_norm(k, K), K);
      scale_row(q, a.l2norm ? inverse_norm(q, K) * a.scale : a.scale, K);
      x.kq[i] = dot(k, q, K);
    }
    for (std::int64_t j = 0; j < G; ++j) {
      const std::int64_t hv = h * G + j;
      float* inputs = x.in_v + j * (B + 3) * VD;
      fill_channels(a.v, r, hv, first, n, VD, x.ancestor, inputs, x.taps_v + j * 4 * VD, x.v);
      record(a, a.rawv, r, hv, first, n, VD, x.v);
      gates(a, r, hv, first, n, x);
      const Place kept = {reinterpret_cast<char*>(x.kept + j * VD * K), false};
      Walk w{};
      w.K = K, w.V = VD, w.round = a.state.bf16, w.small = x.small;
      if (first > 0)
        w.from = kept;
      else if (r.slot >= 0)
        w.from = place_at(a.state, at(a.state, r.slot, hv));
      if (a.snapshots && r.row >= 0) {
        w.snapshots = place_at(a.snapshots, at(a.snapshots, r.row, first, hv));
        w.snapshot_pitch = a.snapshots.stride[1] * (a.snapshots.bf16 ? 2 : 4);
        w.stream = plan.stream && reinterpret_cast<std::uintptr_t>(w.snapshots.data) % 16 == 0 && w.snapshot_pitch % 16 == 0;
      }
      if (!end)
        w.last = kept;
      else if (a.update_state && r.slot >= 0)
        w.last = place_at(a.state, at(a.state, r.slot, hv));
      recur<true>(w, {n, parents, x.k, x.q, x.decay, x.v, x.beta, x.kq, x.o, x.u});
      output(a, r.begin + first, hv, n, x.o);
      end_channels(a.v, r, hv, n, VD, end && a.update_windows, inputs);
    }
    end_channels(a.q, r, h, n, K, end && a.update_windows, x.in_q);
    end_channels(a.k, r, h, n, K, end && a.update_windows, x.in_k);
  }
}

/// Item = (request of a layer, key head).
void fold_item(const FoldCall& a, const Plan& plan, const FoldRequest& r, std::int64_t h, float* scratch) {
  const std::int64_t layer = r.layer, K = a.K, VD = a.V, B = plan.block, G = plan.G;
  const Scratch x(scratch, plan, true);
  for (std::int64_t first = 0; first < r.tokens; first += B) {
    const std::int64_t n = std::min(B, r.tokens - first);
    const bool end = first + n == r.tokens;
    for (std::int64_t i = 0; i < n; ++i) {
      float* k = x.k + i * K;
      read_row(address(a.rawk, at(a.rawk, layer, r.slot, h, first + i)), a.rawk.bf16, K, k);
      if (a.l2norm) scale_row(k, inverse_norm(k, K), K);
    }
    for (std::int64_t j = 0; j < G; ++j) {
      const std::int64_t hv = h * G + j;
      for (std::int64_t i = 0; i < n; ++i) {
        read_row(address(a.rawv, at(a.rawv, layer, r.slot, hv, first + i)), a.rawv.bf16, VD, x.v + i * VD);
        x.beta[i] = load(a.ring_beta, at(a.ring_beta, layer, r.slot, hv, first + i));
        float* ld = x.decay + i * K;
        const std::int64_t g = at(a.ring_g, layer, r.slot, hv, first + i);
        if (a.scalar_gate)
          ld[0] = load(a.ring_g, g);
        else
          read_row(address(a.ring_g, g), false, K, ld);
        to_decay(a.scalar_gate, K, ld);
      }
      const Place state = place_at(a.state, at(a.state, layer, r.slot, hv));
      const Place kept = {reinterpret_cast<char*>(x.kept + j * VD * K), false};
      Walk w{};
      w.K = K, w.V = VD, w.round = a.state.bf16, w.small = x.small;
      w.from = first > 0 ? kept : state;
      w.last = end ? state : kept;
      if (r.track >= 0 && r.track_step >= first && r.track_step < first + n)
        w.track = place_at(a.state, at(a.state, layer, r.track, hv)), w.track_step = r.track_step - first;
      recur<false>(w, {n, nullptr, x.k, nullptr, x.decay, x.v, x.beta, nullptr, nullptr, x.u});
    }
  }
}

void fold_items(const FoldArgs& a, const Plan& plan, std::int64_t begin, std::int64_t end, float* scratch) {
  for (std::int64_t item = begin; item < end; ++item)
    fold_item(a, plan, a.requests[static_cast<std::size_t>(item / a.H)], item % a.H, scratch);
}

/// A key head's pending records are folded before its verify overwrites them.
void verify_items(const VerifyArgs& a, const Plan& plan, const Plan& pending, std::int64_t begin, std::int64_t end, float* scratch) {
  for (std::int64_t item = begin; item < end; ++item) {
    const Request& r = a.requests[static_cast<std::size_t>(item / a.H)];
    if (r.tokens == 0 || (r.slot < 0 && !a.null_from_zero)) continue;
    if (r.pending > 0) fold_item(a.deferred, pending, {0, r.slot, r.pending, -1, -1}, item % a.H, scratch);
    verify_item(a, plan, r, item % a.H, scratch);
  }
  if (plan.stream) hwy::FlushStream();
}

}  // namespace
}  // namespace specstate::kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace specstate::kda::cpu {
HWY_EXPORT(verify_items);
HWY_EXPORT(fold_items);

namespace {

/// Scratch that a thread keeps: fresh pages a call would cost more than a small verify.
float* scratch(std::int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> kept;
  thread_local std::int64_t size = 0;
  if (size < floats) {
    kept.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>((floats * 4 + 63) / 64 * 64))));
    size = kept ? floats : 0;
    if (!kept) throw std::bad_alloc();
  }
  return kept.get();
}

/// Items that are worth waking another thread for: about 8 microseconds.
std::int64_t grain(const Plan& p, std::int64_t longest) { return std::max<std::int64_t>(1, 65536 / (p.K * p.V * p.G * longest)); }

}  // namespace

void run(const VerifyArgs& a, Stream) {
  const auto clear = [&](std::int64_t begin, std::int64_t tokens) {
    for (std::int64_t t = begin; t < begin + tokens; ++t)
      for (std::int64_t h = 0; h < a.HV; ++h)
        std::memset(address(a.out, at(a.out, t, h)), 0, static_cast<std::size_t>(a.V * (a.out.bf16 ? 2 : 4)));
  };
  std::int64_t longest = 0, longest_pending = 1;
  for (const Request& r : a.requests) {
    longest_pending = std::max(longest_pending, r.pending);
    if (r.slot < 0 && !a.null_from_zero)
      clear(r.begin, r.tokens);
    else
      longest = std::max(longest, r.tokens);
  }
  clear(a.tokens_end, a.T - a.tokens_end);
  if (longest == 0) return;
  Plan plan(longest, !a.parents_of.empty(), a.K, a.V, a.HV / a.H);
  const Plan pending(longest_pending, false, a.K, a.V, a.HV / a.H);
  const std::int64_t floats = std::max(Scratch(nullptr, plan, false).floats, Scratch(nullptr, pending, true).floats);
  plan.stream = a.snapshots && !a.snapshots.bf16 && a.tokens_end * a.HV * a.V * a.K * 4 > kStreamBytes;
  specstate::cpu::parallel_for(static_cast<std::int64_t>(a.requests.size()) * a.H, grain(plan, longest),
                               [&](std::int64_t begin, std::int64_t end) {
                                 HWY_DYNAMIC_DISPATCH(verify_items)(a, plan, pending, begin, end, scratch(floats));
                               });
  for (const Request& r : a.requests)
    if (r.pending > 0) at(a.deferred.pending, 0, r.slot) = 0;
}

void run(const FoldArgs& a, Stream) {
  std::int64_t longest = 0;
  for (const FoldRequest& r : a.requests) longest = std::max(longest, r.tokens);
  if (longest == 0) return;
  const Plan plan(longest, false, a.K, a.V, a.HV / a.H);
  const std::int64_t floats = Scratch(nullptr, plan, true).floats;
  specstate::cpu::parallel_for(static_cast<std::int64_t>(a.requests.size()) * a.H, grain(plan, longest),
                               [&](std::int64_t begin, std::int64_t end) {
                                 HWY_DYNAMIC_DISPATCH(fold_items)(a, plan, begin, end, scratch(floats));
                               });
  if (a.pending)
    for (const FoldRequest& r : a.requests) at(a.pending, r.layer, r.slot) = 0;
}

void run(const DeferArgs& a, Stream) {
  for (std::int64_t layer = 0; layer < a.layers; ++layer)
    for (const Deferral& r : a.requests) at(a.pending, layer, r.slot) = static_cast<std::int32_t>(r.accept);
}

void run(std::span<const RollbackArgs> pools, Stream) {
  for (const RollbackArgs& a : pools)
    for (const WindowCopy& c : a.copies)
      for (std::int64_t channel = 0; channel < a.channels; ++channel)
        for (std::int64_t tap = 0; tap < 3; ++tap)
          store(a.pool, at(a.pool, c.slot, channel, tap), load(a.windows, at(a.windows, c.row, c.step, channel, tap)));
}

}  // namespace specstate::kda::cpu
#endif  // HWY_ONCE
