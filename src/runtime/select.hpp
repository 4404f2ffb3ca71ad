#pragma once
// The indexer's choice: the k best of n scores.
#include <cstdint>
#include <vector>

namespace specstate::runtime {

/// Writes the positions of the min(k, n) best scores in ascending order and returns how many. Ties go to the lower position.
/// Scores are compared by their bits in the usual total order (a NaN compares as larger than infinity or smaller than -infinity),
/// so the choice is defined for any input. `candidates` is working memory.
std::int64_t select_top_k(const float* scores, std::int64_t n, std::int64_t k, std::int32_t* positions,
                          std::vector<std::uint64_t>& candidates);

}  // namespace specstate::runtime
