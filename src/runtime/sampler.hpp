#pragma once
// From a row of logits to a token. Deterministic: a token depends on its row, and when sampling on (seed, request, position) alone, so
// plain and speculative decoding draw the same token at the same place.
#include <cstdint>
#include <span>

#include "runtime/digest.hpp"

namespace specstate::runtime {

/// What a uniform number is drawn for; each purpose has its own sequence.
enum class Draw : std::uint64_t { kToken = 1, kProposal = 2, kAcceptance = 3 };

/// In [0, 1), with 53 random bits.
constexpr double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t position, Draw purpose) {
  const std::uint64_t h = mix64(mix64(mix64(mix64(seed) ^ request) ^ position) ^ static_cast<std::uint64_t>(purpose));
  return static_cast<double>(h >> 11) * 0x1p-53;
}

/// Ids >= 256 other than EOS are never emitted and never proposed: their logits become -inf.
void forbid(float* logits, int vocab, int eos);
/// The best id, the lowest on ties.
int argmax(const float* logits, int vocab);
/// softmax(logits / temperature), in double; the sum is over ids in rising order.
void probabilities(const float* logits, int vocab, double temperature, double* out);
/// The first id whose cumulated probability exceeds u; ids without mass are never returned.
int inverse_cdf(const double* probabilities, int vocab, double u);

}  // namespace specstate::runtime
