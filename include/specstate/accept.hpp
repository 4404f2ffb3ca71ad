#pragma once
// Acceptance: how many proposed tokens of a verify stand, which token follows them, and how long the next verify should be.
#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::accept {

/// Greedy acceptance of a chain (Leviathan et al. 2023, the deterministic case).
/// `a` = the number of leading j with candidates[r, j+1] == target_argmax[r, j]; accept_lens[r] = a + 1 (the bonus token counts);
/// out_tokens[r] = the a accepted proposals, then target_argmax[r, a], then zeros. A negative proposal (a placeholder) never stands.
struct VerifyGreedyParams {
  TensorView candidates;     ///< [b, W] int32 or int64; column 0 is the last emitted token, columns 1.. the proposals
  TensorView target_argmax;  ///< [b, W] same dtype; row j is the target's choice after candidates[:, :j+1]
  TensorView verify_lens;    ///< [b] int32 or int64 in 1..W, optional: row r is judged as if its window were that wide (the cap rule)
  TensorView accept_lens;    ///< out [b] int32, values 1..W
  TensorView out_tokens;     ///< out [b, W] same dtype as candidates
};
/// Throws Error(kValue) naming the argument before anything is written. b = 0 does nothing. Thread-safe. CPU and CUDA; on CUDA a row
/// whose verify length is outside 1..W gets accept_lens 0 and zeros.
SPECSTATE_API void verify_greedy(const VerifyGreedyParams& params, Stream stream = {});

/// Lossless rejection sampling of a chain (Leviathan et al. 2023; Chen et al. 2023): the emitted tokens have exactly the target's
/// distribution, whatever was proposed. Proposal d = candidates[r, j+1] stands iff uniforms[r, j] * q(d) < p(d), strictly, with
/// p = target_probs[r, j] and q = draft_probs[r, j]; at the first that falls the final token is drawn from max(p - q, 0), or from p
/// where that has no mass; if all stand it is drawn from the last row of p. Draws are by inverse CDF in id order with
/// uniforms[r, W-1], so an id without mass is never returned. Everything is computed in float64, sums in one fixed order.
struct VerifyRejectionParams {
  TensorView candidates;    ///< [b, W] int32 or int64; ids outside [0, V) never stand
  TensorView draft_probs;   ///< [b, W-1, V] float32, float64, bfloat16 or float16; not given: each proposal has all the mass of its row
  TensorView target_probs;  ///< [b, W, V] any of the four; need not be normalised exactly. NaN or negative mass counts as 0
  TensorView uniforms;      ///< [b, W] float32 or float64 in [0, 1]; column j < W-1 tests proposal j+1, the last one draws
  TensorView verify_lens;   ///< [b] int32 or int64 in 1..W, optional: only so many columns and rows of p exist for row r
  TensorView accept_lens;   ///< out [b] int32, values 1..W
  TensorView out_tokens;    ///< out [b, W] same dtype as candidates: accepted proposals, the drawn token, zeros
};
/// Throws Error(kValue) naming the argument before anything is written, also for a row of p without any mass that is to be drawn
/// from, and for infinite mass where it would decide. b = 0 does nothing. Thread-safe. CPU and CUDA; on CUDA a row that the CPU would
/// refuse for what it holds gets accept_lens 0 and zeros, but infinite mass is not noticed there.
SPECSTATE_API void verify_rejection(const VerifyRejectionParams& params, Stream stream = {});

/// Confidence-scheduled verify lengths (DSpark's scheduler, DeepSeek 2026). confidences[r, k] is the drafter's estimate that proposal
/// k+1 stands if those before it did; S[r, k] = the product of the first k+1. Two steps that never look ahead:
///  1. how many proposals m the whole batch verifies: the global argmax of (b + sum of the m largest lagged S) * speed(b + m), the
///     smallest m on ties, where S comes from *lagged* confidences (earlier steps), because a budget that knew this step's later
///     confidences would condition a cut on the token being cut;
///  2. which: the m largest S of this step, ties to the lower k, then the lower r; they are a prefix in every row.
/// verify_lens[r] = 1 + the row's share of m. S below 1e-6 is never chosen.
struct PlanVerifyLengthsParams {
  TensorView confidences;  ///< [b, G] float32 or float64 in [0, 1]
  TensorView
      lagged_confidences;       ///< [b, G] same dtype, optional; an entry < 0 is unknown (a new request) and counts as 1, as does no array
  TensorView probe_tokens;      ///< [n] int32 or int64, ascending; speed(t) is that of the last probe <= t (of the first below it)
  TensorView steps_per_second;  ///< [n] float32 or float64, > 0, measured. Neither of the two given: everything is verified
  TensorView max_lens;          ///< [b] int32 or int64 >= 1, optional: cap of verify_lens[r] (tokens left, for instance)
  TensorView out;               ///< verify_lens [b] int32, values 1..G+1
};
/// Throws Error(kValue) naming the argument before anything is written. b = 0 does nothing. Thread-safe. CPU and CUDA; on CUDA at most
/// 16384 proposals in all, a row of max_lens < 1 gets verify_lens 0, confidences outside [0, 1] count as 1, and a table that is not
/// ascending and positive gives some plan within the bounds.
SPECSTATE_API void plan_verify_lengths(const PlanVerifyLengthsParams& params, Stream stream = {});

}  // namespace specstate::accept
