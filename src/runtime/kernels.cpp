#include "runtime/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels.cpp"
#include "cpu/simd.hpp"
//
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/vector-inl.hpp"

#ifndef SPECSTATE_RUNTIME_KERNELS_ONCE
#define SPECSTATE_RUNTIME_KERNELS_ONCE
namespace specstate::runtime {
/// Rows in scratch memory are padded with zeros to this many floats, so that no kernel needs a tail.
constexpr std::int64_t kPad = 16;
constexpr std::int64_t padded(std::int64_t n) { return (n + kPad - 1) / kPad * kPad; }
}  // namespace specstate::runtime
#endif

HWY_BEFORE_NAMESPACE();
namespace specstate::runtime::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kPad>;
using V = hn::Vec<D>;
using DU32 = hn::RebindToUnsigned<D>;
using DU16 = hn::Rebind<std::uint16_t, D>;

HWY_INLINE std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(D())); }

HWY_INLINE V load_bf16(const std::uint16_t* p) { return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(DU32(), hn::LoadU(DU16(), p)))); }

HWY_INLINE float sum_of(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

/// x[0..n) with zeros behind it: the tail takes the same operations as the body.
HWY_INLINE V load_tail(const float* x, std::int64_t left) {
  HWY_ALIGN float t[kPad] = {};
  for (std::int64_t i = 0; i < left; ++i) t[i] = x[i];
  return hn::Load(D(), t);
}
HWY_INLINE void store_tail(V v, float* y, std::int64_t left) {
  HWY_ALIGN float t[kPad];
  hn::Store(v, D(), t);
  for (std::int64_t i = 0; i < left; ++i) y[i] = t[i];
}

// Lanes are positions: a score is one chain over dim, whatever the vector width. `kBlocks` blocks hide the latency of the chain.
template <int kBlocks>
HWY_INLINE void score_blocks(const std::uint16_t* keys, std::int64_t dim, const float* q, const float* weights, std::int64_t heads,
                             float* scores) {
  const D tag;
  constexpr int kVecs = static_cast<int>(kKeyBlock / hn::MaxLanes(D()));
  constexpr int N = static_cast<int>(hn::MaxLanes(D()));
  V total[kBlocks * kVecs];
  for (V& t : total) t = hn::Zero(tag);
  for (std::int64_t h = 0; h < heads; ++h) {
    V acc[kBlocks * kVecs];
    for (V& a : acc) a = hn::Zero(tag);
    for (std::int64_t i = 0; i < dim; ++i) {
      const V b = hn::Set(tag, q[h * dim + i]);
#pragma GCC unroll 16
      for (int k = 0; k < kBlocks; ++k)
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v)
          acc[k * kVecs + v] = hn::MulAdd(b, load_bf16(keys + (k * dim + i) * kKeyBlock + v * N), acc[k * kVecs + v]);
    }
    const V w = hn::Set(tag, weights[h]);
    for (int k = 0; k < kBlocks * kVecs; ++k) total[k] = hn::MulAdd(w, hn::Max(acc[k], hn::Zero(tag)), total[k]);
  }
  for (int k = 0; k < kBlocks * kVecs; ++k) hn::StoreU(hn::Add(total[k], hn::Zero(tag)), tag, scores + k * N);
}

void index_scores_of(const std::uint16_t* keys, std::int64_t n, std::int64_t dim, const float* q, const float* weights, std::int64_t heads,
                     float* scores) {
  std::int64_t blocks = (n + kKeyBlock - 1) / kKeyBlock;
  for (; blocks >= 4; blocks -= 4, keys += 4 * dim * kKeyBlock, scores += 4 * kKeyBlock)
    score_blocks<4>(keys, dim, q, weights, heads, scores);
  for (; blocks > 0; --blocks, keys += dim * kKeyBlock, scores += kKeyBlock) score_blocks<1>(keys, dim, q, weights, heads, scores);
}

/// s[0..n) -> exp(s - max), padding beyond n becomes 0; returns the sum.
HWY_INLINE float exp_in_place(float* s, std::int64_t n) {
  const D tag;
  const std::int64_t whole = padded(n);
  for (std::int64_t i = n; i < whole; ++i) s[i] = -std::numeric_limits<float>::infinity();
  V top = hn::Set(tag, -std::numeric_limits<float>::infinity());
  for (std::int64_t i = 0; i < whole; i += lanes()) top = hn::Max(top, hn::LoadU(tag, s + i));
  const V peak = hn::Set(tag, hn::GetLane(hn::MaxOfLanes(tag, top)));
  V sum = hn::Zero(tag);
  for (std::int64_t i = 0; i < whole; i += lanes()) {
    const V e = cpu::HWY_NAMESPACE::exp(tag, hn::Sub(hn::LoadU(tag, s + i), peak));
    hn::StoreU(e, tag, s + i);
    sum = hn::Add(sum, e);
  }
  return sum_of(sum);
}

HWY_INLINE float dot(const float* a, const float* b, std::int64_t n) {
  const D tag;
  V acc = hn::Zero(tag);
  for (std::int64_t i = 0; i < n; i += lanes()) acc = hn::MulAdd(hn::LoadU(tag, a + i), hn::LoadU(tag, b + i), acc);
  return sum_of(acc);
}

HWY_INLINE void widen(const std::uint16_t* x, std::int64_t n, float* out) {
  const D tag;
  const std::int64_t body = n / lanes() * lanes();
  for (std::int64_t i = 0; i < body; i += lanes()) hn::StoreU(load_bf16(x + i), tag, out + i);
  for (std::int64_t i = body; i < n; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x[i]) << 16;
    __builtin_memcpy(out + i, &bits, 4);
  }
}

void latent_attention_of(const std::uint16_t* const* rows, std::int64_t n, std::int64_t width, std::int64_t value_width, const float* q,
                         std::int64_t heads, float* out, float* scratch) {
  const D tag;
  const std::int64_t pitch = padded(width);
  float* kv = scratch;               // [n][pitch]
  float* query = kv + n * pitch;     // [pitch]
  float* score = query + pitch;      // [padded(n)]
  float* value = score + padded(n);  // [pitch]
  for (std::int64_t p = 0; p < n; ++p) {
    widen(rows[p], width, kv + p * pitch);
    for (std::int64_t i = width; i < pitch; ++i) kv[p * pitch + i] = 0.0f;
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < pitch; ++i) query[i] = i < width ? q[h * width + i] : 0.0f;
    for (std::int64_t p = 0; p < n; ++p) score[p] = dot(query, kv + p * pitch, pitch);
    const float sum = exp_in_place(score, n);
    const V inverse = hn::Set(tag, 1.0f / sum);
    for (std::int64_t i = 0; i < value_width; i += lanes()) {
      V acc = hn::Zero(tag);
      for (std::int64_t p = 0; p < n; ++p) acc = hn::MulAdd(hn::Set(tag, score[p]), hn::LoadU(tag, kv + p * pitch + i), acc);
      hn::StoreU(hn::Mul(acc, inverse), tag, value + i);
    }
    for (std::int64_t i = 0; i < value_width; ++i) out[h * value_width + i] = value[i];
  }
}

// Scores of up to kQueries queries at once: a key vector is loaded for all of them, lanes are keys, a score is one chain over dim.
template <int kQueries>
HWY_INLINE void block_scores(const float* q, std::int64_t q_stride, const float* k, std::int64_t n, std::int64_t dim, float* scores,
                             std::int64_t pitch) {
  const D tag;
  const std::int64_t N = lanes();
  for (std::int64_t p = 0; p < n; p += kKeyBlock, k += dim * kKeyBlock)
    for (std::int64_t v = 0; v < kKeyBlock; v += N) {
      V acc[kQueries];
      for (V& a : acc) a = hn::Zero(tag);
      for (std::int64_t c = 0; c < dim; ++c) {
        const V key = hn::LoadU(tag, k + c * kKeyBlock + v);
#pragma GCC unroll 8
        for (int i = 0; i < kQueries; ++i) acc[i] = hn::MulAdd(hn::Set(tag, q[i * q_stride + c]), key, acc[i]);
      }
      for (int i = 0; i < kQueries; ++i) hn::StoreU(acc[i], tag, scores + i * pitch + p + v);
    }
}

/// out[i] += sum of weights[i][p] v[p], p rising from the first key that any of the queries sees; a key unseen has weight 0.
template <int kQueries>
HWY_INLINE void block_values(const float* weights, std::int64_t pitch, const float* v, std::int64_t n, std::int64_t dim,
                             const float* inverse, float* out, std::int64_t out_stride) {
  const D tag;
  const std::int64_t N = lanes(), body = dim / N * N;
  for (std::int64_t c = 0; c < dim; c += N) {
    V acc[kQueries];
    for (V& a : acc) a = hn::Zero(tag);
    for (std::int64_t p = 0; p < n; ++p) {
      const V value = c < body ? hn::LoadU(tag, v + p * dim + c) : load_tail(v + p * dim + c, dim - body);
#pragma GCC unroll 8
      for (int i = 0; i < kQueries; ++i) acc[i] = hn::MulAdd(hn::Set(tag, weights[i * pitch + p]), value, acc[i]);
    }
    for (int i = 0; i < kQueries; ++i) {
      const V y = hn::Mul(acc[i], hn::Set(tag, inverse[i]));
      if (c < body)
        hn::StoreU(y, tag, out + i * out_stride + c);
      else
        store_tail(y, out + i * out_stride + c, dim - body);
    }
  }
}

void block_attention_of(const float* q, std::int64_t q_stride, std::int64_t nq, const float* k, const float* v, std::int64_t n,
                        const std::int64_t* first, std::int64_t dim, float* out, std::int64_t out_stride, float* scratch) {
  constexpr int kQueries = 8;
  const std::int64_t pitch = padded(n);
  float inverse[kQueries];
  const auto group = [&](auto count, std::int64_t at) HWY_ATTR {
    constexpr int Q = decltype(count)::value;
    block_scores<Q>(q + at * q_stride, q_stride, k, n, dim, scratch, pitch);
    for (int i = 0; i < Q; ++i) {
      std::fill_n(scratch + i * pitch, first[at + i], -std::numeric_limits<float>::infinity());
      inverse[i] = 1.0f / exp_in_place(scratch + i * pitch, n);
    }
    block_values<Q>(scratch, pitch, v, n, dim, inverse, out + at * out_stride, out_stride);
  };
  std::int64_t at = 0;
  for (; at + kQueries <= nq; at += kQueries) group(std::integral_constant<int, kQueries>(), at);
  for (; at < nq; ++at) group(std::integral_constant<int, 1>(), at);
}

}  // namespace specstate::runtime::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace specstate::runtime {

HWY_EXPORT(index_scores_of);
HWY_EXPORT(latent_attention_of);
HWY_EXPORT(block_attention_of);

void index_scores(const std::uint16_t* keys, std::int64_t n, std::int64_t dim, const float* q, const float* weights, std::int64_t heads,
                  float* scores) {
  HWY_DYNAMIC_DISPATCH(index_scores_of)(keys, n, dim, q, weights, heads, scores);
}
std::int64_t latent_scratch(std::int64_t n, std::int64_t width) { return (n + 2) * padded(width) + padded(n); }
void latent_attention(const std::uint16_t* const* rows, std::int64_t n, std::int64_t width, std::int64_t value_width, const float* q,
                      std::int64_t heads, float* out, float* scratch) {
  HWY_DYNAMIC_DISPATCH(latent_attention_of)(rows, n, width, value_width, q, heads, out, scratch);
}
std::int64_t block_scratch(std::int64_t nq, std::int64_t n) { return std::min<std::int64_t>(nq, 8) * padded(n); }
void block_attention(const float* q, std::int64_t q_stride, std::int64_t nq, const float* k, const float* v, std::int64_t n,
                     const std::int64_t* first, std::int64_t dim, float* out, std::int64_t out_stride, float* scratch) {
  HWY_DYNAMIC_DISPATCH(block_attention_of)(q, q_stride, nq, k, v, n, first, dim, out, out_stride, scratch);
}

}  // namespace specstate::runtime
#endif
