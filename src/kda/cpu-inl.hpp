// What KDA's CPU form is made of, on Highway vectors: activation functions, rows of memory, conv windows, sums. Include after hwy/highway.h, inside
// the per-target part of a file. The head of cpu.cpp says in which order sums run.
#if defined(SPECSTATE_KDA_CPU_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef SPECSTATE_KDA_CPU_INL_HPP
#undef SPECSTATE_KDA_CPU_INL_HPP
#else
#define SPECSTATE_KDA_CPU_INL_HPP
#endif

#include <algorithm>
#include <cstring>

#include "cpu/vector-inl.hpp"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kda/layout.hpp"

HWY_BEFORE_NAMESPACE();
namespace specstate::kda::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kLanes = 16;
using D = hn::CappedTag<float, 16>;
using D4 = hn::CappedTag<float, 4>;
using V = hn::Vec<D>;
constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr std::int64_t kParts = kLanes / kWidth;  // vectors of 16 lanes

// ---- scalars and vectors of the activation functions -------------------------------------------------------------------------

HWY_INLINE V exp_of(V x) { return specstate::cpu::HWY_NAMESPACE::exp(D(), x); }
HWY_INLINE V sigmoid(V x) { return specstate::cpu::HWY_NAMESPACE::sigmoid(D(), x); }
/// Beyond 80 softplus(x) is x in float32, whatever the threshold.
HWY_INLINE V softplus(V x, float beta, float threshold) {
  const D d;
  const V y = hn::Mul(x, hn::Set(d, beta));
  const V soft = hn::Div(hn::Log1p(d, exp_of(hn::Min(y, hn::Set(d, 90.0f)))), hn::Set(d, beta));
  return hn::IfThenElse(hn::Or(hn::Gt(y, hn::Set(d, std::min(threshold, 80.0f))), hn::IsNaN(x)), x, soft);
}
HWY_INLINE V round_bf16(V x) {
  const D d;
  const hn::RebindToUnsigned<D> du;
  const auto u = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto nearest = hn::Add(u, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(u, hn::Set(du, 0x400000u));
  const auto nan = hn::RebindMask(du, hn::IsNaN(x));
  return hn::BitCast(d, hn::And(hn::IfThenElse(nan, quiet, nearest), hn::Set(du, 0xFFFF0000u)));
}

// ---- storage -----------------------------------------------------------------------------------------------------------------

using D16 = hn::Rebind<std::uint16_t, D>;

HWY_INLINE V from_bf16(hn::Vec<D16> x) {
  const hn::RebindToUnsigned<D> du;
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(du, x)));
}
HWY_INLINE hn::Vec<D16> to_bf16(V x) {
  const hn::RebindToUnsigned<D> du;
  return hn::TruncateTo(D16(), hn::ShiftRight<16>(hn::BitCast(du, round_bf16(x))));
}

/// n floats (a multiple of 16) from dense storage.
void read_row(const char* from, bool bf16, std::int64_t n, float* HWY_RESTRICT to) {
  if (!bf16) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * 4);
    return;
  }
  const auto* p = reinterpret_cast<const std::uint16_t*>(from);
  for (std::int64_t c = 0; c < n; c += kWidth) hn::StoreU(from_bf16(hn::LoadU(D16(), p + c)), D(), to + c);
}
void write_row(const float* HWY_RESTRICT from, std::int64_t n, char* to, bool bf16) {
  if (!bf16) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * 4);
    return;
  }
  auto* p = reinterpret_cast<std::uint16_t*>(to);
  for (std::int64_t c = 0; c < n; c += kWidth) hn::StoreU(to_bf16(hn::LoadU(D(), from + c)), D16(), p + c);
}

/// A conv window of D channels: rows[0..2] are its three inputs, oldest first. Strides: channel, tap.
void read_window(const Array& a, std::int64_t offset, std::int64_t channel, std::int64_t tap, std::int64_t n, float* HWY_RESTRICT rows) {
  if (channel == 1) {
    for (int t = 0; t < 3; ++t) read_row(address(a, offset + t * tap), a.bf16, n, rows + t * n);
    return;
  }
  if (channel == 3 && tap == 1) {
    const D d;
    for (std::int64_t c = 0; c < n; c += kWidth) {
      V x[3];
      if (a.bf16) {
        hn::Vec<D16> y[3];
        hn::LoadInterleaved3(D16(), reinterpret_cast<const std::uint16_t*>(address(a, offset + 3 * c)), y[0], y[1], y[2]);
        for (int t = 0; t < 3; ++t) x[t] = from_bf16(y[t]);
      } else {
        hn::LoadInterleaved3(d, reinterpret_cast<const float*>(address(a, offset + 3 * c)), x[0], x[1], x[2]);
      }
      for (int t = 0; t < 3; ++t) hn::StoreU(x[t], d, rows + t * n + c);
    }
    return;
  }
  for (std::int64_t c = 0; c < n; ++c)
    for (int t = 0; t < 3; ++t) rows[t * n + c] = load(a, offset + c * channel + t * tap);
}
void write_window(const float* const rows[3], std::int64_t n, const Array& a, std::int64_t offset, std::int64_t channel, std::int64_t tap) {
  const D d;
  if (channel == 1) {
    for (int t = 0; t < 3; ++t) write_row(rows[t], n, address(a, offset + t * tap), a.bf16);
  } else if (channel == 3 && tap == 1) {
    for (std::int64_t c = 0; c < n; c += kWidth) {
      const V x0 = hn::LoadU(d, rows[0] + c), x1 = hn::LoadU(d, rows[1] + c), x2 = hn::LoadU(d, rows[2] + c);
      char* to = address(a, offset + 3 * c);
      if (a.bf16)
        hn::StoreInterleaved3(to_bf16(x0), to_bf16(x1), to_bf16(x2), D16(), reinterpret_cast<std::uint16_t*>(to));
      else
        hn::StoreInterleaved3(x0, x1, x2, d, reinterpret_cast<float*>(to));
    }
  } else {
    for (std::int64_t c = 0; c < n; ++c)
      for (int t = 0; t < 3; ++t) store(a, offset + c * channel + t * tap, rows[t][c]);
  }
}
/// The four taps of D channels, one row a tap.
void read_taps(const Array& a, std::int64_t first, std::int64_t n, float* HWY_RESTRICT taps) {
  const D d;
  if (a.stride[0] == 4 && a.stride[1] == 1) {
    for (std::int64_t c = 0; c < n; c += kWidth) {
      V w0, w1, w2, w3;
      hn::LoadInterleaved4(d, static_cast<const float*>(a.data) + (first + c) * 4, w0, w1, w2, w3);
      hn::StoreU(w0, d, taps + c), hn::StoreU(w1, d, taps + n + c), hn::StoreU(w2, d, taps + 2 * n + c),
          hn::StoreU(w3, d, taps + 3 * n + c);
    }
    return;
  }
  for (std::int64_t c = 0; c < n; ++c)
    for (int t = 0; t < 4; ++t) taps[t * n + c] = load(a, at(a, first + c, t));
}

// ---- sums --------------------------------------------------------------------------------------------------------------------

#if HWY_TARGET == HWY_SCALAR
/// The sums of four times 16 running lanes, pairing lanes 8, 4, 2 and 1 apart.
HWY_INLINE void sums4(D, const V (&x)[4][kParts], float* to) {
  for (int i = 0; i < 4; ++i) {
    float y[4];
    for (int l = 0; l < 4; ++l) y[l] = hn::GetLane(hn::Add(hn::Add(x[i][l], x[i][l + 8]), hn::Add(x[i][l + 4], x[i][l + 12])));
    to[i] = (y[0] + y[2]) + (y[1] + y[3]);
  }
}
#else
/// 16 running lanes -> 4, pairing lanes 8 and then 4 apart.
template <class DV, class VV = hn::Vec<DV> >
HWY_INLINE auto fold16(DV d, const VV (&x)[kParts]) {
  if constexpr (kWidth == 16) {
    const hn::Half<DV> d8;
    const hn::Half<hn::Half<DV> > d4;
    const auto y = hn::Add(hn::LowerHalf(d8, x[0]), hn::UpperHalf(d8, x[0]));
    return hn::Add(hn::LowerHalf(d4, y), hn::UpperHalf(d4, y));
  } else if constexpr (kWidth == 8) {
    const hn::Half<DV> d4;
    const auto y = hn::Add(x[0], x[1]);
    return hn::Add(hn::LowerHalf(d4, y), hn::UpperHalf(d4, y));
  } else {
    return hn::Add(hn::Add(x[0], x[2]), hn::Add(x[1], x[3]));
  }
}
/// The sums of four times 16 running lanes; the last two steps pair lanes 2 and then 1 apart.
HWY_INLINE void sums4(D d, const V (&x)[4][kParts], float* to) {
  const auto a = fold16(d, x[0]), b = fold16(d, x[1]), c = fold16(d, x[2]), e = fold16(d, x[3]);
  const D4 d4;
  const auto ab = hn::Add(hn::ConcatLowerLower(d4, b, a), hn::ConcatUpperUpper(d4, b, a));
  const auto ce = hn::Add(hn::ConcatLowerLower(d4, e, c), hn::ConcatUpperUpper(d4, e, c));
  hn::StoreU(hn::Add(hn::ConcatEven(d4, ce, ab), hn::ConcatOdd(d4, ce, ab)), d4, to);
}
#endif
/// x . y over n channels.
float dot(const float* HWY_RESTRICT x, const float* HWY_RESTRICT y, std::int64_t n) {
  const D d;
  V acc[4][kParts];
  for (std::int64_t h = 0; h < kParts; ++h) {
    V sum = hn::Zero(d);
    for (std::int64_t c = h * kWidth; c < n; c += kLanes) sum = hn::MulAdd(hn::LoadU(d, x + c), hn::LoadU(d, y + c), sum);
    acc[0][h] = acc[1][h] = acc[2][h] = acc[3][h] = sum;
  }
  float sums[4];
  sums4(d, acc, sums);
  return sums[0];
}

}  // namespace
}  // namespace specstate::kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // SPECSTATE_KDA_CPU_INL_HPP
