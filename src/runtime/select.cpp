#include "runtime/select.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/numeric.hpp"

namespace specstate::runtime {

namespace {

/// Orders floats as unsigned integers.
std::uint32_t ordered(float x) {
  const std::uint32_t u = core::bits_of(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Buckets by sign, exponent and the highest mantissa bits: one counting pass leaves a short list to sort by the rest.
constexpr int kShift = 20;

}  // namespace

std::int64_t select_top_k(const float* scores, std::int64_t n, std::int64_t k, std::int32_t* positions,
                          std::vector<std::uint64_t>& candidates) {
  if (n <= k) {
    std::iota(positions, positions + n, 0);
    return n;
  }
  std::uint32_t count[1u << (32 - kShift)] = {};
  for (std::int64_t p = 0; p < n; ++p) ++count[ordered(scores[p]) >> kShift];
  std::int64_t above = 0;  // scores in better buckets
  std::uint32_t bucket = (1u << (32 - kShift)) - 1;
  while (above + count[bucket] < k) above += count[bucket--];

  // Of the bucket that the k-th score lies in, the best by (score, lower position).
  candidates.clear();
  for (std::int64_t p = 0; p < n; ++p) {
    const std::uint32_t u = ordered(scores[p]);
    if (u >> kShift == bucket) candidates.push_back(static_cast<std::uint64_t>(u) << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(p)));
  }
  const auto last = candidates.begin() + (k - above - 1);
  std::nth_element(candidates.begin(), last, candidates.end(), std::greater<>());
  const std::uint64_t limit = *last;  // keys are distinct: exactly k are not below it
  std::int64_t m = 0;
  for (std::int64_t p = 0; p < n; ++p) {
    const std::uint64_t key = static_cast<std::uint64_t>(ordered(scores[p])) << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(p));
    if (key >= limit) positions[m++] = static_cast<std::int32_t>(p);
  }
  return m;
}

}  // namespace specstate::runtime
