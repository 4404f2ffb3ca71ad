#pragma once
// Operations on one dense row of fp32 values (some read bf16), deterministic and with the same bits at every length's body and tail.
//
// A sum runs in 32 interleaved chains, whatever the vector width: element i goes by one multiply-add to chain i mod 32; then chains are
// added in halves (c + c+16, c + c+8, ..., c + c+1). Outputs may be the very same array as an input, never one that is shifted.
#include <cstdint>

#include "core/numeric.hpp"

namespace specstate::cpu {

float dot(const float* a, const float* b, std::int64_t n);
float dot(const float* a, const core::bfloat16* b, std::int64_t n);

/// y = fma(a, x, y)
void axpy(float a, const float* x, float* y, std::int64_t n);
void axpy(float a, const core::bfloat16* x, float* y, std::int64_t n);

/// e^x within 1.01 units in the last place.
void exp(const float* x, float* y, std::int64_t n);
/// 1 / (1 + e^-x) within 2.5 units in the last place.
void sigmoid(const float* x, float* y, std::int64_t n);
/// x sigmoid(x)
void silu(const float* x, float* y, std::int64_t n);
/// silu(gate) * up
void swiglu(const float* gate, const float* up, float* y, std::int64_t n);

/// y = (x * s) * w, s = 1 / sqrt(dot(x, x) / n + eps); w [n], or nullptr for none.
void rms_norm(const float* x, const float* w, float eps, float* y, std::int64_t n);
/// y = ((x - mean) * s) * w + b, s = 1 / sqrt(variance + eps), the variance as the mean of (x - mean)^2. y must not be x.
void layer_norm(const float* x, const float* w, const float* b, float eps, float* y, std::int64_t n);
/// x = e^(x - max) / sum in place, n >= 1; -inf gives 0; at least one entry must be finite.
void softmax(float* x, std::int64_t n);

void to_float(const core::bfloat16* x, float* y, std::int64_t n);
/// Round to nearest, ties to even.
void to_bfloat16(const float* x, core::bfloat16* y, std::int64_t n);
/// The same, and back: x = bfloat16(x).
void round_to_bfloat16(float* x, std::int64_t n);
/// A rotation by an angle, each product and sum rounded.
inline void rotate(float& low, float& high, float cosine, float sine) {
  const float a = low, b = high;
  low = a * cosine - b * sine;
  high = b * cosine + a * sine;
}
/// The rotary of split halves: n of them.
void rotate_halves(float* low, float* high, const float* cosine, const float* sine, std::int64_t n);

}  // namespace specstate::cpu
