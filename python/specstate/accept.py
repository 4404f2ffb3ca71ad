"""Acceptance: how many proposed tokens stand, and which token follows them."""

from ._arrays import array_in, array_out, empty_like
from ._library import function
from ._stream import stream_handle


def verify_greedy(candidates, target_argmax, *, out=None, stream=None):
    """Greedy acceptance of a chain.

    candidates [b, W] int32 or int64: column 0 the last emitted token, columns 1.. the proposals.
    target_argmax [b, W], same dtype: row j is the target's choice after ``candidates[:, :j+1]``.
    out: optional pair (accept_lens [b] int32, out_tokens [b, W] of candidates' dtype).

    Returns (accept_lens, out_tokens): accept_lens counts the bonus token (1..W); out_tokens holds the accepted proposals, the
    bonus token, then zeros. Raises ValueError naming the argument; nothing is written then.
    """
    if out is None:
        shape = tuple(candidates.shape)
        out = (empty_like(candidates, shape[:1], "int32"), empty_like(candidates, shape))
    accept_lens, out_tokens = out
    function("accept_verify_greedy")(
        array_in("candidates", candidates),
        array_in("target_argmax", target_argmax),
        array_out("accept_lens", accept_lens),
        array_out("out_tokens", out_tokens),
        stream_handle(stream, candidates),
    )
    return accept_lens, out_tokens
