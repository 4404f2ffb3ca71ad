#include "runtime/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace specstate::runtime {

void forbid(float* logits, int vocab, int eos) {
  for (int i = 256; i < vocab; ++i)
    if (i != eos) logits[i] = -std::numeric_limits<float>::infinity();
}

int argmax(const float* logits, int vocab) {
  int best = 0;
  for (int i = 1; i < vocab; ++i)
    if (logits[i] > logits[best]) best = i;
  return best;
}

void probabilities(const float* logits, int vocab, double temperature, double* out) {
  const double top = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int i = 0; i < vocab; ++i) sum += out[i] = std::exp((logits[i] - top) / temperature);
  for (int i = 0; i < vocab; ++i) out[i] /= sum;
}

int inverse_cdf(const double* p, int vocab, double u) {
  double sum = 0;
  int last = 0;
  for (int i = 0; i < vocab; ++i) {
    if (!(p[i] > 0)) continue;
    sum += p[i];
    last = i;
    if (sum > u) return i;
  }
  return last;  // the sum was rounded below u
}

}  // namespace specstate::runtime
