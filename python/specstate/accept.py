"""Acceptance: how many proposed tokens stand, which token follows them, and how long the next verify should be.

`stream=` is a CUDA stream (an int, or an object with `cuda_stream`, `ptr` or `__cuda_stream__`), by default the framework's current
one; CPU calls ignore it. No call reads device memory on the host: a row that the CPU would refuse for what it holds is a padding row on
CUDA (accept_lens 0, tokens 0; a verify length of 0 where max_lens is below 1).

An argument of the wrong kind raises TypeError, a wrong dtype, shape, device or value ValueError, what the CUDA form lacks
NotImplementedError; the text begins with the function and names the argument, and nothing is written then.
"""

from ._arguments import kind_of, refusal, rename
from ._arrays import array_in, array_out, empty_like, shape_of
from ._library import at_once, function
from ._stream import stream_handle

__all__ = ["plan_verify_lengths", "verify_greedy", "verify_rejection"]


def __dir__():
    return sorted(__all__)


_OUT = {"accept_lens": "out[0]", "out_tokens": "out[1]"}  # the library's names: this module's


def _results(candidates, out):
    if out is not None:
        if not isinstance(out, (tuple, list)):
            raise refusal(TypeError, f"out: expected a pair (accept_lens, out_tokens), got {kind_of(out)}.")
        if len(out) != 2:
            raise refusal(ValueError, f"out: expected a pair (accept_lens, out_tokens), got {type(out).__name__} of {len(out)}.")
        return tuple(out)
    shape = shape_of("candidates", candidates)
    return empty_like(candidates, shape[:1], "int32"), empty_like(candidates, shape)


def verify_greedy(candidates, target_argmax, *, verify_lens=None, out=None, stream=None):
    """Greedy acceptance of a chain (Leviathan et al. 2023, the deterministic case).

    candidates [b, W] int32 or int64: column 0 the last emitted token, columns 1.. the proposals (negative: no proposal).
    target_argmax [b, W], same dtype: row j is the target's choice after ``candidates[:, :j+1]``.
    verify_lens [b] int32 or int64 in 1..W: row r is judged as if its window were that wide.
    out: optional pair (accept_lens [b] int32, out_tokens [b, W] of candidates' dtype).

    Returns (accept_lens, out_tokens): accept_lens counts the bonus token (1..W); out_tokens holds the accepted proposals, the
    bonus token, then zeros.
    """
    accept_lens, out_tokens = _results(candidates, out)
    try:
        if at_once("accept_verify_greedy", (candidates, target_argmax, verify_lens, accept_lens, out_tokens, stream)):
            return accept_lens, out_tokens
        function("accept_verify_greedy")(
            array_in("candidates", candidates),
            array_in("target_argmax", target_argmax),
            array_in("verify_lens", verify_lens),
            array_out("out[0]", accept_lens),
            array_out("out[1]", out_tokens),
            stream_handle(stream, candidates),
        )
    except ValueError as error:
        rename(error, _OUT)
        raise
    return accept_lens, out_tokens


def verify_rejection(candidates, draft_probs, target_probs, uniforms, *, verify_lens=None, out=None, stream=None):
    """Lossless rejection sampling of a chain (Leviathan et al. 2023; Chen et al. 2023).

    candidates [b, W] int32 or int64: column 0 the last emitted token, columns 1.. the proposals; ids outside [0, V) never stand.
    draft_probs [b, W-1, V]: the distribution each proposal was drawn from; None: a point mass at the proposal.
    target_probs [b, W, V]: row j is the target's distribution after ``candidates[:, :j+1]``. Both float32, float64, bfloat16
    or float16, not necessarily normalised; NaN and negative numbers count as 0, an infinite sum is an error (on CUDA: not noticed).
    uniforms [b, W] float32 or float64 in [0, 1]: column j < W-1 tests proposal j+1, the last column is for the final draw.
    verify_lens [b] int32 or int64 in 1..W: only so many columns (and rows of target_probs) exist for row r.
    out: optional pair (accept_lens [b] int32, out_tokens [b, W] of candidates' dtype).

    Proposal d stands iff ``u * q(d) < p(d)``; the first that falls is replaced by a draw from max(p - q, 0) (from p where that
    is zero); if all stand, one more token is drawn from the last row of p. Draws are by inverse CDF in id order, in float64.
    Returns (accept_lens, out_tokens): accept_lens counts the token that was drawn last (1..W); out_tokens holds the accepted proposals, that
    token, then zeros.
    """
    accept_lens, out_tokens = _results(candidates, out)
    try:
        if at_once("accept_verify_rejection", (candidates, draft_probs, target_probs, uniforms, verify_lens, accept_lens, out_tokens, stream)):
            return accept_lens, out_tokens
        function("accept_verify_rejection")(
            array_in("candidates", candidates),
            array_in("draft_probs", draft_probs),
            array_in("target_probs", target_probs),
            array_in("uniforms", uniforms),
            array_in("verify_lens", verify_lens),
            array_out("out[0]", accept_lens),
            array_out("out[1]", out_tokens),
            stream_handle(stream, candidates),
        )
    except ValueError as error:
        rename(error, _OUT)
        raise
    return accept_lens, out_tokens


def plan_verify_lengths(
    confidences, probe_tokens=None, steps_per_second=None, *, lagged_confidences=None, max_lens=None, out=None, stream=None
):
    """Confidence-scheduled verify lengths (DSpark's scheduler, DeepSeek 2026), which never look ahead.

    confidences [b, G] float32 or float64 in [0, 1]: the drafter's estimate that proposal k+1 stands if those before it did.
    probe_tokens [n] int32 or int64, ascending, and steps_per_second [n] float32 or float64, > 0: the measured speed of a
    verify of that many tokens; between probes the lower one counts. Neither given: everything is verified.
    lagged_confidences [b, G]: those of an earlier step, which alone decide how many tokens the batch verifies; an entry < 0
    (a new request) and no array at all count as 1.
    max_lens [b] int32 or int64 >= 1: caps, for instance the tokens a request may still emit.
    out: optional verify_lens [b] int32.

    Returns verify_lens [b] int32 in 1..G+1: how wide the verify window of each row should be. The budget maximises (expected
    tokens) * (steps per second); it goes to the highest survival products, ties to the earlier proposal, then the lower row.
    """
    if out is None:
        out = empty_like(confidences, shape_of("confidences", confidences)[:1], "int32")
    if at_once("accept_plan_verify_lengths", (confidences, lagged_confidences, probe_tokens, steps_per_second, max_lens, out, stream)):
        return out
    function("accept_plan_verify_lengths")(
        array_in("confidences", confidences),
        array_in("lagged_confidences", lagged_confidences),
        array_in("probe_tokens", probe_tokens),
        array_in("steps_per_second", steps_per_second),
        array_in("max_lens", max_lens),
        array_out("out", out),
        stream_handle(stream, confidences),
    )
    return out
