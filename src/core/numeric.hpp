#pragma once
// Storage types and their conversions, usable on host and device: round to nearest, ties to even.
#include <cstdint>
#include <cstring>

#include "specstate/tensor.hpp"

#if defined(__CUDACC__)
#define SPECSTATE_HD __host__ __device__
#else
#define SPECSTATE_HD
#endif

namespace specstate::core {

SPECSTATE_HD inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
SPECSTATE_HD inline float from_bits(std::uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

struct bfloat16 {
  std::uint16_t bits;
};
struct float16 {
  std::uint16_t bits;
};
struct float8_e4m3fn {
  std::uint8_t bits;
};

SPECSTATE_HD inline float to_float(float x) { return x; }
SPECSTATE_HD inline float to_float(bfloat16 x) { return from_bits(static_cast<std::uint32_t>(x.bits) << 16); }
SPECSTATE_HD inline float to_float(float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exp = (x.bits >> 10) & 0x1Fu, man = x.bits & 0x3FFu;
  if (exp == 31) return from_bits(sign | 0x7F800000u | (man << 13));
  if (exp == 0) {
    const float v = static_cast<float>(man) * (1.0f / 16777216.0f);
    return sign ? -v : v;
  }
  return from_bits(sign | ((exp + 112u) << 23) | (man << 13));
}
SPECSTATE_HD inline float to_float(float8_e4m3fn x) {
  const std::uint32_t exp = (x.bits >> 3) & 0xFu, man = x.bits & 7u;
  if (exp == 15 && man == 7) return from_bits(0x7FC00000u | (static_cast<std::uint32_t>(x.bits & 0x80u) << 24));
  const float v = exp == 0 ? static_cast<float>(man) * (1.0f / 512.0f) : from_bits(((exp + 120u) << 23) | (man << 20));
  return x.bits & 0x80u ? -v : v;
}

template <class T>
SPECSTATE_HD inline T from_float(float x);
template <>
SPECSTATE_HD inline float from_float<float>(float x) {
  return x;
}
template <>
SPECSTATE_HD inline bfloat16 from_float<bfloat16>(float x) {
  // Without a branch, so that loops over it become vectors.
  const std::uint32_t u = bits_of(x), nearest = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
  return {static_cast<std::uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : nearest)};  // NaN stays NaN
}
template <>
SPECSTATE_HD inline float16 from_float<float16>(float x) {
  const std::uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return {static_cast<std::uint16_t>(sign | 0x7E00u)};
  if (a >= 0x477FF000u) return {static_cast<std::uint16_t>(sign | 0x7C00u)};  // rounds to infinity
  if (a < 0x38800000u) {                                                      // subnormal: add 0.5 to let the FPU round
    const float m = from_bits(a) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (bits_of(m) - 0x3F000000u))};
  }
  const std::uint32_t r = a + 0xFFFu + ((a >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((r - 0x38000000u) >> 13))};
}
/// Saturates at +-448; NaN stays NaN.
template <>
SPECSTATE_HD inline float8_e4m3fn from_float<float8_e4m3fn>(float x) {
  const std::uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return {static_cast<std::uint8_t>(sign | 0x7Fu)};
  if (a >= 0x43E00000u) return {static_cast<std::uint8_t>(sign | 0x7Eu)};  // >= 448
  if (a < 0x3C800000u) {                                                   // below 2^-6: subnormal, unit 2^-9
    const float m = from_bits(a) + 16384.0f;                               // ulp of 2^14 is 2^-9
    return {static_cast<std::uint8_t>(sign | (bits_of(m) - 0x46800000u))};
  }
  const std::uint32_t r = a + 0x7FFFFu + ((a >> 20) & 1u);
  return {static_cast<std::uint8_t>(sign | ((r - 0x3C000000u) >> 20))};
}

/// Calls `f` with a null pointer of the storage type, e.g. `visit_float(dtype, [&](auto* tag) { using T = std::remove_pointer_t<decltype(tag)>; })`.
template <class F>
auto visit_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16: return f(static_cast<bfloat16*>(nullptr));
    case DType::kFloat16: return f(static_cast<float16*>(nullptr));
    case DType::kFloat8E4M3FN: return f(static_cast<float8_e4m3fn*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

}  // namespace specstate::core
