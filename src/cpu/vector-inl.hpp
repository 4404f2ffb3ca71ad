// exp and sigmoid on Highway vectors, for kernels of every family. Include after hwy/highway.h, inside the per-target part of a file
// (`HWY_BEFORE_NAMESPACE` is done here); the functions land in specstate::cpu::HWY_NAMESPACE.
//
// A lane's result depends on that lane alone, so a padded tail has the bits of the body.
#if defined(SPECSTATE_CPU_VECTOR_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef SPECSTATE_CPU_VECTOR_INL_HPP
#undef SPECSTATE_CPU_VECTOR_INL_HPP
#else
#define SPECSTATE_CPU_VECTOR_INL_HPP
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace specstate::cpu::HWY_NAMESPACE {

/// e^x, within 1.01 units in the last place (over every third float; subnormal results likewise); overflow gives +inf, NaN stays NaN.
/// x = m ln 2 + r with ln 2 in two parts, the first short enough for an exact m * high; e^r = 1 + (r + r^2 q(r)), q of degree 4 by
/// a minimax fit on |r| <= ln 2 / 2 (relative error 0.05 * 2^-24); 2^m in two factors so that subnormals round once.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V exp(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;
  const V clamped = hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 89.0f));
  const auto m = hn::NearestInt(hn::Mul(clamped, hn::Set(d, 0x1.715476p+0f)));
  const V mf = hn::ConvertTo(d, m);
  V r = hn::NegMulAdd(mf, hn::Set(d, 0x1.62e4p-1f), clamped);
  r = hn::NegMulAdd(mf, hn::Set(d, 0x1.7f7d1cp-20f), r);
  V q = hn::Set(d, 0x1.6a2434p-10f);
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.1239e2p-7f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.5558f2p-5f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.555492p-3f));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.fffffcp-2f));
  const V e = hn::Add(hn::Set(d, 1.0f), hn::MulAdd(hn::Mul(r, r), q, r));
  const auto half = hn::ShiftRight<1>(m);
  const auto bias = hn::Set(di, 127);
  const V low = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V high = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(m, half), bias)));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Mul(hn::Mul(e, low), high));
}

/// 1 / (1 + e^-x) without cancellation on either side.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V sigmoid(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const V one = hn::Set(d, 1.0f);
  const V e = exp(d, hn::Neg(hn::Abs(x)));
  return hn::Div(hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, e), hn::Add(one, e));
}

}  // namespace specstate::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
