#pragma once
// Acceptance: how many proposed tokens of a verify stand, and which token follows them.
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::accept {

/// Greedy acceptance of a chain (Leviathan et al. 2023, the deterministic case).
/// `a` = the number of leading j with candidates[r, j+1] == target_argmax[r, j]; accept_lens[r] = a + 1 (the bonus token counts);
/// out_tokens[r] = the a accepted proposals, then target_argmax[r, a], then zeros.
struct VerifyGreedyParams {
  TensorView candidates;     ///< [b, W] int32 or int64; column 0 is the last emitted token, columns 1.. the proposals
  TensorView target_argmax;  ///< [b, W] same dtype; row j is the target's choice after candidates[:, :j+1]
  TensorView accept_lens;    ///< out [b] int32, values 1..W
  TensorView out_tokens;     ///< out [b, W] same dtype as candidates
};
/// Throws Error(kValue) naming the argument before anything is written. b = 0 does nothing. Thread-safe.
SPECSTATE_API void verify_greedy(const VerifyGreedyParams& params, Stream stream = {});

}  // namespace specstate::accept
