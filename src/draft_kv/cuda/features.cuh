#pragma once
// In front of the projection, where the caller gives target features: ctx = rms(fc x) * w.
//
// The norm needs whole rows, which no block of the product has. So the product leaves its rounded result and, for every block of 64 columns, the sum of
// squares of each row; whoever reads the result next takes the row's factor from those sums (few rows: the projection's kernel, when it fetches its rows; many rows: a
// kernel in between). Rows are those of the compacted list, in its order. Summation order as everywhere (problem.hpp).
#include "draft_kv/cuda/many_rows.cuh"

namespace specstate::draft_kv::cuda {

/// A block a row of the list, in place.
inline constexpr int kNormalizeThreads = 256;
template <class Io>
__global__ void __launch_bounds__(kNormalizeThreads) normalize_rows(const Context c, const int* count) {
  ptx::wait_for_previous();
  ptx::let_next_start();
  if (static_cast<int>(blockIdx.x) >= *count) return;
  const float factor = row_factor(c, blockIdx.x, threadIdx.x % 32);
  auto* const row = reinterpret_cast<uint4*>(c.raw + static_cast<std::int64_t>(blockIdx.x) * c.hidden);
  for (int piece = threadIdx.x; piece < c.hidden / 8; piece += kNormalizeThreads)
    row[piece] = normed_piece<Io>(c, row[piece], factor, piece * 8);
}

}  // namespace specstate::draft_kv::cuda
