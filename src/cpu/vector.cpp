#include "cpu/vector.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/vector.cpp"
#include "cpu/simd.hpp"
//
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace specstate::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using core::bfloat16;

constexpr std::int64_t kChains = 32;
using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
constexpr int kVecs = kChains / kLanes;

HWY_INLINE V load(const float* p) { return hn::LoadU(D(), p); }
HWY_INLINE V load(const bfloat16* p) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)))));
}

/// The n < kChains last elements, padded.
template <class T>
struct Tail {
  HWY_ALIGN T x[kChains];
  Tail(const T* p, std::int64_t n, T pad = T{}) { std::fill(std::copy_n(p, n, x), x + kChains, pad); }
};

/// Lanes added (or compared) in halves: i + i+8, i + i+4, i + i+2, i + i+1.
template <class DV, class F>
HWY_INLINE float fold_lanes(DV d, hn::Vec<DV> v, F f) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(DV()) > 4) {
    const hn::Half<DV> half;
    return fold_lanes(half, f(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), f);
  } else {
    v = f(v, hn::Shuffle1032(v));
    v = f(v, hn::Shuffle2301(v));
  }
#endif
  return hn::GetLane(v);
}

struct Chains {
  V c[kVecs];
  HWY_INLINE explicit Chains(V start) {
    for (int v = 0; v < kVecs; ++v) c[v] = start;
  }
  template <class F>
  HWY_INLINE float fold(F f) {
    for (int half = kVecs / 2; half > 0; half /= 2)
      for (int v = 0; v < half; ++v) c[v] = f(c[v], c[v + half]);
    return fold_lanes(D(), c[0], f);
  }
  HWY_INLINE float sum() {
    return fold([](auto a, auto b) HWY_ATTR { return hn::Add(a, b); });
  }
};

template <class T>
HWY_INLINE float dot_of(const float* a, const T* b, std::int64_t n) {
  Chains acc(hn::Zero(D()));
  const auto step = [&](const float* pa, const T* pb) HWY_ATTR {
    for (int v = 0; v < kVecs; ++v) acc.c[v] = hn::MulAdd(load(pa + v * kLanes), load(pb + v * kLanes), acc.c[v]);
  };
  std::int64_t i = 0;
  for (; i + kChains <= n; i += kChains) step(a + i, b + i);
  if (i < n) step(Tail(a + i, n - i).x, Tail(b + i, n - i).x);
  return acc.sum();
}
float dot_float(const float* a, const float* b, std::int64_t n) { return dot_of(a, b, n); }
float dot_bfloat16(const float* a, const bfloat16* b, std::int64_t n) { return dot_of(a, b, n); }

/// y = f(x...) element by element.
template <class F, class... T>
HWY_INLINE void map(std::int64_t n, float* y, F f, const T*... x) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(f(load(x + i)...), D(), y + i);
  if (i < n) {
    HWY_ALIGN float out[kLanes];
    hn::Store(f(load(Tail(x + i, n - i).x)...), D(), out);
    std::copy_n(out, n - i, y + i);
  }
}

template <class T>
HWY_INLINE void axpy_of(float a, const T* x, float* y, std::int64_t n) {
  const V scale = hn::Set(D(), a);
  map(
      n, y, [&](V xv, V yv) HWY_ATTR { return hn::MulAdd(scale, xv, yv); }, x, y);
}
void axpy_float(float a, const float* x, float* y, std::int64_t n) { axpy_of(a, x, y, n); }
void axpy_bfloat16(float a, const bfloat16* x, float* y, std::int64_t n) { axpy_of(a, x, y, n); }

void exp_row(const float* x, float* y, std::int64_t n) {
  map(
      n, y, [](V v) HWY_ATTR { return exp(D(), v); }, x);
}
void sigmoid_row(const float* x, float* y, std::int64_t n) {
  map(
      n, y, [](V v) HWY_ATTR { return sigmoid(D(), v); }, x);
}
void silu_row(const float* x, float* y, std::int64_t n) {
  map(
      n, y, [](V v) HWY_ATTR { return hn::Mul(v, sigmoid(D(), v)); }, x);
}
void swiglu_row(const float* gate, const float* up, float* y, std::int64_t n) {
  map(
      n, y, [](V g, V u) HWY_ATTR { return hn::Mul(hn::Mul(g, sigmoid(D(), g)), u); }, gate, up);
}

void rms_norm_row(const float* x, const float* w, float eps, float* y, std::int64_t n) {
  const V s = hn::Set(D(), 1.0f / std::sqrt(dot_of(x, x, n) / static_cast<float>(n) + eps));
  if (w)
    map(
        n, y, [&](V xv, V wv) HWY_ATTR { return hn::Mul(hn::Mul(xv, s), wv); }, x, w);
  else
    map(
        n, y, [&](V xv) HWY_ATTR { return hn::Mul(xv, s); }, x);
}

// Plain loops, of which the compiler makes vectors for each instruction set. No sum and no fused step: the same bits everywhere.
void to_float_row(const bfloat16* HWY_RESTRICT x, float* HWY_RESTRICT y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = core::to_float(x[i]);
}

void to_bfloat16_row(const float* HWY_RESTRICT x, bfloat16* HWY_RESTRICT y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = core::from_float<bfloat16>(x[i]);
}

void round_to_bfloat16_row(float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = core::to_float(core::from_float<bfloat16>(x[i]));
}

void rotate_halves_row(float* HWY_RESTRICT low, float* HWY_RESTRICT high, const float* HWY_RESTRICT cosine, const float* HWY_RESTRICT sine,
                       std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) rotate(low[i], high[i], cosine[i], sine[i]);
}

void layer_norm_row(const float* x, const float* w, const float* b, float eps, float* y, std::int64_t n) {
  Chains acc(hn::Zero(D()));
  const auto step = [&](const float* p) HWY_ATTR {
    for (int v = 0; v < kVecs; ++v) acc.c[v] = hn::Add(acc.c[v], load(p + v * kLanes));
  };
  std::int64_t i = 0;
  for (; i + kChains <= n; i += kChains) step(x + i);
  if (i < n) step(Tail(x + i, n - i).x);
  const V mean = hn::Set(D(), acc.sum() / static_cast<float>(n));
  map(
      n, y, [&](V v) HWY_ATTR { return hn::Sub(v, mean); }, x);
  const V s = hn::Set(D(), 1.0f / std::sqrt(dot_of(y, y, n) / static_cast<float>(n) + eps));
  map(
      n, y, [&](V v, V wv, V bv) HWY_ATTR { return hn::Add(hn::Mul(hn::Mul(v, s), wv), bv); }, y, w, b);
}

void softmax_row(float* x, std::int64_t n) {
  const V lowest = hn::Set(D(), -INFINITY);
  Chains most(lowest);
  const auto compare = [&](const float* p) HWY_ATTR {
    for (int v = 0; v < kVecs; ++v) most.c[v] = hn::Max(most.c[v], load(p + v * kLanes));
  };
  std::int64_t i = 0;
  for (; i + kChains <= n; i += kChains) compare(x + i);
  if (i < n) compare(Tail(x + i, n - i, -INFINITY).x);
  const V max = hn::Set(D(), most.fold([](auto a, auto b) HWY_ATTR { return hn::Max(a, b); }));

  Chains acc(hn::Zero(D()));
  const auto raise = [&](float* p) HWY_ATTR {
    for (int v = 0; v < kVecs; ++v) {
      const V e = exp(D(), hn::Sub(load(p + v * kLanes), max));
      hn::StoreU(e, D(), p + v * kLanes);
      acc.c[v] = hn::Add(acc.c[v], e);
    }
  };
  for (i = 0; i + kChains <= n; i += kChains) raise(x + i);
  if (i < n) {
    Tail tail(x + i, n - i, -INFINITY);
    raise(tail.x);
    std::copy_n(tail.x, n - i, x + i);
  }
  const V inverse = hn::Set(D(), 1.0f / acc.sum());
  map(
      n, x, [&](V v) HWY_ATTR { return hn::Mul(v, inverse); }, x);
}

}  // namespace specstate::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace specstate::cpu {

HWY_EXPORT(dot_float);
HWY_EXPORT(dot_bfloat16);
HWY_EXPORT(axpy_float);
HWY_EXPORT(axpy_bfloat16);
HWY_EXPORT(exp_row);
HWY_EXPORT(sigmoid_row);
HWY_EXPORT(silu_row);
HWY_EXPORT(swiglu_row);
HWY_EXPORT(rms_norm_row);
HWY_EXPORT(layer_norm_row);
HWY_EXPORT(softmax_row);
HWY_EXPORT(to_float_row);
HWY_EXPORT(to_bfloat16_row);
HWY_EXPORT(round_to_bfloat16_row);
HWY_EXPORT(rotate_halves_row);

float dot(const float* a, const float* b, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(dot_float)(a, b, n); }
float dot(const float* a, const core::bfloat16* b, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(dot_bfloat16)(a, b, n); }
void axpy(float a, const float* x, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(axpy_float)(a, x, y, n); }
void axpy(float a, const core::bfloat16* x, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(axpy_bfloat16)(a, x, y, n); }
void exp(const float* x, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(exp_row)(x, y, n); }
void sigmoid(const float* x, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(sigmoid_row)(x, y, n); }
void silu(const float* x, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(silu_row)(x, y, n); }
void swiglu(const float* gate, const float* up, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(swiglu_row)(gate, up, y, n); }
void rms_norm(const float* x, const float* w, float eps, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(rms_norm_row)(x, w, eps, y, n); }
void layer_norm(const float* x, const float* w, const float* b, float eps, float* y, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(layer_norm_row)(x, w, b, eps, y, n);
}
void softmax(float* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(softmax_row)(x, n); }

void to_float(const core::bfloat16* x, float* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(to_float_row)(x, y, n); }
void to_bfloat16(const float* x, core::bfloat16* y, std::int64_t n) { HWY_DYNAMIC_DISPATCH(to_bfloat16_row)(x, y, n); }
void round_to_bfloat16(float* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(round_to_bfloat16_row)(x, n); }
void rotate_halves(float* low, float* high, const float* cosine, const float* sine, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(rotate_halves_row)(low, high, cosine, sine, n);
}

}  // namespace specstate::cpu
#endif
