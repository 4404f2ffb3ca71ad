"""KDA and GDN: recurrent state, verified several tokens at a time and committed by replay.

``verify`` runs the proposed tokens of each request and leaves the state alone; it records per token either what the update needs
(``rings``, about 1 kB a token and head) or the whole state (``snapshots``, 64 kB). ``fold`` replays the accepted tokens from the
rings into the state (``defer_fold`` leaves that to the next verify), ``rollback_conv_windows`` commits the convolution's windows. ``decode`` runs certain tokens in place.

Sizes: N requests, T tokens of all requests, H key heads, HV value heads (a multiple of H), K and V channels of a head (64 or 128),
L ring length, C = H*K or HV*V convolution channels. "act" is bfloat16 or float32, one for a whole call. On the CPU everything is
deterministic bit for bit: ring output equals snapshot output, ``fold(accept=n)`` equals snapshot ``n-1``, a verify of W tokens
equals W decodes, and a request's result does not depend on the others in the call. Sources: Kimi Delta Attention (arXiv:2510.26692),
Gated DeltaNet (arXiv:2412.06464), for the rings the ReplaySSM scheme of sglang. `out=` is where the output goes;
`stream=` is a CUDA stream (an int, or an object with `cuda_stream`, `ptr` or `__cuda_stream__`), by default the framework's current
one; CPU calls ignore it.

An argument of the wrong kind raises TypeError, a wrong dtype, shape, device or value ValueError, what the CUDA form lacks
NotImplementedError; the text begins with the function and names the argument, and nothing is written then.
Under sglang's names the texts are sglang's where it has one.
"""

from math import prod
from typing import Any, NamedTuple

from ._arguments import describe, flag, group, integer, number, optional_number, refusal, rename
from ._arrays import array_in, array_out, empty_like, shape_of, tensor
from ._library import at_once, function
from ._stream import stream_handle

__all__ = [
    "Rings",
    "commit_gdn_replayssm_fold_all_layers",
    "commit_kda_replayssm_spec",
    "commit_kda_replayssm_spec_all_layers",
    "cutedsl_fused_sigmoid_gating_kda_update",
    "decode",
    "defer_fold",
    "fold",
    "fused_kda_decode_mtp_dspark",
    "fused_sigmoid_gating_delta_rule_update",
    "rollback_conv_windows",
    "verify",
]


def __dir__():
    return sorted(__all__)


class Rings(NamedTuple):
    """The records of verified tokens; entry i of a slot is token i of its latest verify. Sizes as in the module's text; a leading layer
    dimension for a fold of all layers at once. A tuple or list of four arrays in this order does too."""

    rawv: Any
    rawk: Any
    g: Any
    beta: Any


describe(
    Rings,
    rawv="[slots, HV, L, V] act (bfloat16 or float32): v after convolution and SiLU",
    rawk="[slots, H, L, K] act: k after convolution and SiLU, before the norm",
    g="[slots, HV, L, K] float32, or [slots, HV, L] for GDN: log decay",
    beta="[slots, HV, L] float32: sigmoid(beta)",
)


def _step(in_place, x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias, state, slots, cu_seqlens, onorm_gate,
          onorm_weight, onorm_eps, out, lower_bound, softplus_beta, softplus_threshold, scale, l2norm, round_before_norm, null_slot,
          state_name="state", slots_name="slots"):  # fmt: skip
    pool = array_out if in_place else array_in
    return (
        array_in("x_q", x_q), array_in("x_k", x_k), array_in("x_v", x_v),
        array_in("w_q", w_q), array_in("w_k", w_k), array_in("w_v", w_v),
        pool("cs_q", cs_q), pool("cs_k", cs_k), pool("cs_v", cs_v),
        array_in("g", g), array_in("beta", beta), array_in("A_log", A_log), array_in("dt_bias", dt_bias),
        pool(state_name, state), array_in(slots_name, slots), array_in("cu_seqlens", cu_seqlens),
        array_in("onorm_gate", onorm_gate), array_in("onorm_weight", onorm_weight), optional_number("onorm_eps", onorm_eps), array_out("out", out),
        optional_number("lower_bound", lower_bound), number("softplus_beta", softplus_beta), number("softplus_threshold", softplus_threshold),
        optional_number("scale", scale), flag("l2norm", l2norm), flag("round_before_norm", round_before_norm), integer("null_slot", null_slot),
    )  # fmt: skip


_NO_RINGS = (None,) * 4


def _result(out, name, like):
    """`out`, or a new array like `like`; where that is missing the check of the call says so."""
    return empty_like(like, shape_of(name, like)) if out is None and hasattr(like, "shape") else out


def verify(x_q, x_k, x_v, g, beta, A_log, dt_bias, state, slots, cu_seqlens=None, *, w_q=None, w_k=None, w_v=None, cs_q=None, cs_k=None,
           cs_v=None, rings=None, snapshots=None, conv_q=None, conv_k=None, conv_v=None, rows=None, parents=None, onorm_gate=None,
           onorm_weight=None, onorm_eps=None, lower_bound=None, softplus_beta=1.0, softplus_threshold=20.0, scale=None, l2norm=True,
           round_before_norm=False, exact=False, update_state=False, null_from_zero=False, null_slot=-1, pending=None, out=None,
           stream=None):  # fmt: skip
    """Verify T proposed tokens of N requests; writes no pool.

    x_q, x_k [T, H, K], x_v [T, HV, V] act: raw projections; without w_* they are convolved and activated already. Every [T, ...]
        tensor may carry a leading dimension of 1 if x_q does.
    g [T, HV, K] or [T, HV*K] raw gate (KDA), or [T, HV] (GDN); beta [T, HV] logits; A_log [HV]; dt_bias [HV*K] or
        [HV, K] (KDA), or [HV] (GDN).
    state [pool, HV, V, K] float32 or bfloat16, dense inside a slot; slots [N], <= null_slot is padding (its output is 0).
    cu_seqlens [N+1]: request r owns tokens cu_seqlens[r] to cu_seqlens[r+1] - 1; None: T / N tokens each.
    w_q, w_k, w_v [C, 4] float32 taps, newest last; cs_q, cs_k, cs_v [pool, C, 3] act: the inputs before the first token.
    rings: `Rings` (tokens beyond L are not recorded); snapshots [rows, steps, HV, V, K]: the state after each token.
    conv_q, conv_k, conv_v [rows, steps, C, 3] act: the window after each token. rows [N]: row of a request, default its number.
    parents [N, tokens]: a tree; index of each token's parent within its request, < 0 for the request's own state.
    onorm_gate [T, HV, V], onorm_weight [V], onorm_eps: gated RMS norm of the output.
    lower_bound: the safe gate lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); None: -exp(A_log) * softplus(g + dt_bias).
    softplus_beta, softplus_threshold: softplus(x) = log(1 + exp(beta * x)) / beta, and x where beta * x > threshold.
    scale: of q, default K ** -0.5. l2norm: q and k are normalised. round_before_norm: the output is rounded to act before its norm too.
    exact: on CUDA, outputs with rings equal those with snapshots bit for bit (on the CPU they always do).
    update_state also stores the state after each request's last token; null_from_zero runs padding rows from a zero state.
    pending [>= pool] int32: a deferred fold (`defer_fold`). The tokens that it counts for a slot are folded from the rings into the state
        before the slot's new tokens are verified, bit for bit as by `fold` before this call; the counts of the call's slots become 0.

    Returns out [T, HV, V] act.
    """
    out = _result(out, "x_v", x_v)
    ring = _NO_RINGS if rings is None else group("rings", rings, Rings)
    if at_once("kda_verify", (
        x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias, state, slots, cu_seqlens, onorm_gate, onorm_weight, onorm_eps, out,
        lower_bound, softplus_beta, softplus_threshold, scale, l2norm, round_before_norm, null_slot, *ring, snapshots, conv_q, conv_k, conv_v, rows,
        parents, pending, exact, update_state, null_from_zero, False, stream,
    )):  # fmt: skip
        return out
    update_state, pending = flag("update_state", update_state), array_out("pending", pending)
    writes_state = update_state or pending is not None
    function("kda_verify")(
        *_step(False, x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias,
               array_out("state", state) if writes_state else state, slots, cu_seqlens, onorm_gate, onorm_weight, onorm_eps, out,
               lower_bound, softplus_beta, softplus_threshold, scale, l2norm, round_before_norm, null_slot),
        *(array_out("rings." + name, x) for name, x in zip(Rings._fields, ring, strict=True)), array_out("snapshots", snapshots),
        array_out("conv_q", conv_q), array_out("conv_k", conv_k), array_out("conv_v", conv_v), array_in("rows", rows), array_in("parents", parents),
        pending, flag("exact", exact), update_state, flag("null_from_zero", null_from_zero), False, stream_handle(stream, x_q),
    )  # fmt: skip
    return out


def decode(x_q, x_k, x_v, g, beta, A_log, dt_bias, state, slots, cu_seqlens=None, *, w_q=None, w_k=None, w_v=None, cs_q=None,
           cs_k=None, cs_v=None, onorm_gate=None, onorm_weight=None, onorm_eps=None, lower_bound=None, softplus_beta=1.0,
           softplus_threshold=20.0, scale=None, l2norm=True, round_before_norm=False, null_slot=-1, out=None,
           stream=None):  # fmt: skip
    """Tokens that are certain, one or any number a request (a prefill), in place: state and cs_* are advanced.

    x_q, x_k [T, H, K], x_v [T, HV, V] act: raw projections, or without w_* convolved and activated ones; g [T, HV, K] or [T, HV*K] (KDA) or
        [T, HV] (GDN) and beta [T, HV]: logits; A_log [HV]; dt_bias [HV*K] or [HV, K] (KDA) or [HV] (GDN).
    state [pool, HV, V, K] float32 or bfloat16, advanced; slots [N], <= null_slot is padding (its output is 0). cu_seqlens [N+1]: request r owns
        tokens cu_seqlens[r] to cu_seqlens[r+1] - 1; None: T / N tokens each.
    w_q, w_k, w_v [C, 4] float32 taps, newest last; cs_q, cs_k, cs_v [pool, C, 3] act: the inputs before the first token, advanced.
    onorm_gate [T, HV, V], onorm_weight [V], onorm_eps: gated RMS norm of the output.
    lower_bound: the safe gate lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); None: -exp(A_log) * softplus(g + dt_bias), where
        softplus(x) = log(1 + exp(softplus_beta * x)) / softplus_beta, and x where softplus_beta * x > softplus_threshold.
    scale: of q, default K ** -0.5. l2norm: q and k are normalised. round_before_norm: the output is rounded to act before its norm too.

    Returns out [T, HV, V] act.
    """
    out = _result(out, "x_v", x_v)
    if at_once("kda_decode", (
        x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias, state, slots, cu_seqlens, onorm_gate, onorm_weight, onorm_eps, out,
        lower_bound, softplus_beta, softplus_threshold, scale, l2norm, round_before_norm, null_slot, stream,
    )):  # fmt: skip
        return out
    function("kda_decode")(
        *_step(True, x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias, state, slots, cu_seqlens, onorm_gate,
               onorm_weight, onorm_eps, out, lower_bound, softplus_beta, softplus_threshold, scale, l2norm, round_before_norm,
               null_slot),
        stream_handle(stream, x_q),
    )  # fmt: skip
    return out


def fold(state, rings, slots, accept=None, *, track=None, track_step=None, pending=None, l2norm=True, null_slot=-1, stream=None):
    """Replay the accepted tokens of each request from the rings into its state, in place.

    state [pool, HV, V, K] and `Rings`; or all layers in one call: state and every ring with a leading layer dimension.
    slots [N], <= null_slot is skipped; accept [N], tokens to commit with the bonus token, <= 0 is skipped, > L a ValueError.
    track, track_step [N] (both or none): after token track_step[n] the state is also stored in slot track[n].
    pending [>= pool] int32, or [layers, >= pool] with layers, in the place of accept: commits what `defer_fold` counted there for the slots
        (the flush of a deferred fold); their counts become 0.
    l2norm: k is normalised, as it was in the verify.
    An accepted entry that no verify recorded is refused. Returns state.
    """
    rings = group("rings", rings, Rings)
    if accept is None and pending is None:
        raise refusal(ValueError, "accept: expected accepted counts [N], or pending= with those that defer_fold left there, got neither.")
    _fold(0, state, rings, slots, accept, track, track_step, l2norm, null_slot, 0, 0, stream,
          ("state", "rings.rawv", "rings.rawk", "rings.g", "rings.beta", "slots", "accept", "track", "track_step", "l2norm",
           "null_slot"), pending)  # fmt: skip
    return state


def defer_fold(pending, slots, accept, *, null_slot=-1, stream=None):
    """Accepted tokens that the next verify will fold: ``pending[slots[n]] = accept[n]``, in the place of `fold`.

    pending [slots] int32, or [layers, slots]: hand each layer's verify its own row. slots [N], <= null_slot is skipped; accept [N], tokens to
    commit with the bonus token, <= 0 is skipped. It spares one of the three passes over the state in a step. Before anything else reads a
    slot's state (decode, a prefill, a copy for a prefix cache) comes a flush: `fold` with pending. A slot that gets a new owner has its count
    set to 0 with its state. A slot whose tokens still wait is refused (on a GPU: they are lost). Returns pending.
    """
    function("kda_defer_fold")(
        array_out("pending", pending), array_in("slots", slots), array_in("accept", accept), integer("null_slot", null_slot), stream_handle(stream, pending)
    )
    return pending


def _fold(form, state, rings, slots, accept, track, track_step, l2norm, null_slot, max_cache_len, num_k_heads, stream, names, pending=None):
    """`names`: of the arrays, of l2norm and of null_slot."""
    arrays = (state, *rings, slots, accept, track, track_step)
    if at_once("kda_fold", (*arrays, pending, l2norm, null_slot, max_cache_len, num_k_heads, form, stream)):
        return
    arrays = [array_out(names[0], state), *(array_in(name, x) for name, x in zip(names[1:-2], arrays[1:], strict=True)), array_out("pending", pending)]
    numbers = flag(names[-2], l2norm), integer(names[-1], null_slot), integer("max_cache_len", max_cache_len), integer("num_k_heads", num_k_heads)
    function("kda_fold")(*arrays, *numbers, form, stream_handle(stream, state))


def rollback_conv_windows(conv_pools, intermediate_windows, slots, last_correct_step, *, rows=None, track_slots=None, track_steps=None,
                          stream=None):  # fmt: skip
    """Commit the convolution's windows: ``pool[slots[n]] = windows[rows[n], last_correct_step[n]]`` for each pool.

    conv_pools: a sequence of pools [pool, C, 3], one such pool, or an array with a leading dimension of pools; any strides.
    intermediate_windows: likewise, [rows, steps, C, 3] each, what `verify` wrote.
    slots, last_correct_step [N] (accepted tokens - 1): a negative one is skipped. rows [N]: row of a request, default its number.
    track_slots, track_steps [N], both or none: a second copy, for a prefix cache.
    """
    pools, windows = _each("conv_pools", conv_pools, 3), _each("intermediate_windows", intermediate_windows, 4)
    if len(pools) != len(windows):
        raise ValueError(
            f"rollback_conv_windows: intermediate_windows: expected one for each of the {len(pools)} conv_pools, got {len(windows)}."
        )
    function("kda_rollback_conv_windows")(
        [tensor("conv_pools", array_out("conv_pools", x)) for x in pools],
        [tensor("intermediate_windows", array_in("intermediate_windows", x)) for x in windows],
        array_in("slots", slots), array_in("last_correct_step", last_correct_step), array_in("rows", rows),
        array_in("track_slots", track_slots), array_in("track_steps", track_steps),
        stream_handle(stream, pools[0] if pools else slots),
    )  # fmt: skip


def _each(name, x, ndim):
    """A sequence of arrays of `ndim` dimensions, from one, from several, or from an array of them."""
    if isinstance(x, (tuple, list)) and all(hasattr(item, "shape") for item in x):
        return list(x)
    shape = shape_of(name, x)
    if len(shape) <= ndim:
        return [x]
    if not hasattr(x, "__getitem__"):
        raise refusal(TypeError, f"{name}: expected a sequence of arrays, got {type(x).__name__} of shape {shape}, which has no parts.")
    return [x[i] for i in range(shape[0])]


# ---- the names that sglang calls -------------------------------------------------------------------------------------------------


def fused_kda_decode_mtp_dspark(*, x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias, recurrent_state,
                                intermediate_ssm, intermediate_state_indices, intermediate_conv_q, intermediate_conv_k,
                                intermediate_conv_v, ssm_state_indices, cu_seqlens, lower_bound, scale=None, replayssm_rawv=None,
                                replayssm_rawk=None, replayssm_g=None, replayssm_beta=None, onorm_gate=None, onorm_weight=None,
                                onorm_eps=None, exact=False, pending=None, out=None, stream=None):  # fmt: skip
    """sglang's fused verify: a chain of 1 + num_spec tokens a request, safe gate, head dims of 128; `verify` with its checks and texts.

    x_q, x_k, x_v, g, onorm_gate [1, T, H, 128]; beta [1, T, H]; w_* [H*128, 4]; cs_* [pool, H*128, 3], read only;
    recurrent_state [pool, H, V=128, K=128] float32, read only; ssm_state_indices [N], < 0 is padding; cu_seqlens [N+1].
    intermediate_ssm [rows, >= T/N, H, 128, 128]: snapshots, not written if the four replayssm_* rings are given (layouts as in `Rings`).
    intermediate_conv_* [rows, >= T/N, H*128, 3]; intermediate_state_indices [>= N]: each request's row of the intermediates.
    A_log [H], dt_bias [H*128] or [H, 128]: the safe gate lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); scale: of q, default 128 ** -0.5;
    onorm_gate, onorm_weight [128], onorm_eps: gated RMS norm of the output.
    exact: bitwise parity of the two modes' outputs on CUDA too (the CPU always has it). pending [>= pool] int32: a deferred fold (`defer_fold`):
    the tokens that it counts for a slot are folded from the rings into recurrent_state, which is written then, before the slot's new tokens.

    Returns out [1, T, H, 128] of x_v's dtype. A request shorter than T/N writes only its own tokens' entries.
    """
    out = _result(out, "x_v", x_v)
    rings = (("replayssm_rawv", replayssm_rawv), ("replayssm_rawk", replayssm_rawk), ("replayssm_g", replayssm_g),
             ("replayssm_beta", replayssm_beta))  # fmt: skip
    in_rings = all(x is not None for _, x in rings)
    if at_once("kda_verify", (
        x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias, recurrent_state, ssm_state_indices, cu_seqlens, onorm_gate, onorm_weight,
        onorm_eps, out, lower_bound, 1.0, 20.0, scale, True, False, -1, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta,
        None if in_rings else intermediate_ssm, intermediate_conv_q, intermediate_conv_k, intermediate_conv_v, intermediate_state_indices, None, pending,
        exact, False, False, True, stream,
    )):  # fmt: skip
        return out
    pending = array_out("pending", pending)
    function("kda_verify")(
        *_step(False, x_q, x_k, x_v, w_q, w_k, w_v, cs_q, cs_k, cs_v, g, beta, A_log, dt_bias,
               recurrent_state if pending is None else array_out("recurrent_state", recurrent_state), ssm_state_indices, cu_seqlens, onorm_gate, onorm_weight, onorm_eps, out, lower_bound, 1.0, 20.0, scale, True, False, -1,
               state_name="recurrent_state", slots_name="ssm_state_indices"),
        *(array_out(name, x) for name, x in rings),
        None if in_rings else array_out("intermediate_ssm", intermediate_ssm),
        array_out("intermediate_conv_q", intermediate_conv_q), array_out("intermediate_conv_k", intermediate_conv_k),
        array_out("intermediate_conv_v", intermediate_conv_v),
        array_in("intermediate_state_indices", intermediate_state_indices), None, pending, flag("exact", exact), False, False, True,
        stream_handle(stream, x_q),
    )  # fmt: skip
    return out


_COMMIT_NAMES = ("checkpoint_state", "rawv_cache", "rawk_cache", "gk_cache", "beta_cache", "ssm_state_indices", "accept_lens",
                 "mamba_track_indices", "mamba_steps_to_track", "use_qk_l2norm_in_kernel", "null_block_id")  # fmt: skip


def commit_kda_replayssm_spec(checkpoint_state, rawv_cache, rawk_cache, gk_cache, beta_cache, ssm_state_indices, accept_lens,
                              max_cache_len, num_k_heads, mamba_track_indices=None, mamba_steps_to_track=None,
                              use_qk_l2norm_in_kernel=True, null_block_id=0, *, stream=None):  # fmt: skip
    """`fold` of one layer under sglang's name: checkpoint_state [pool, HV, V, K] in place; rawv_cache, rawk_cache, gk_cache and
    beta_cache as in `Rings`.

    ssm_state_indices, accept_lens, mamba_track_indices, mamba_steps_to_track [N] and use_qk_l2norm_in_kernel are the slots, accept, track,
    track_step and l2norm of `fold`. max_cache_len must be the rings' L and num_k_heads the heads of rawk_cache. Slots <= null_block_id are skipped.
    """
    _fold(1, checkpoint_state, (rawv_cache, rawk_cache, gk_cache, beta_cache), ssm_state_indices, accept_lens, mamba_track_indices,
          mamba_steps_to_track, use_qk_l2norm_in_kernel, null_block_id, max_cache_len, num_k_heads, stream, _COMMIT_NAMES)  # fmt: skip


def commit_kda_replayssm_spec_all_layers(checkpoint_state, rawv_cache, rawk_cache, gk_cache, beta_cache, ssm_state_indices, accept_lens,
                                         max_cache_len, num_k_heads, mamba_track_indices=None, mamba_steps_to_track=None,
                                         use_qk_l2norm_in_kernel=True, null_block_id=0, *, stream=None):  # fmt: skip
    """As `commit_kda_replayssm_spec`, with a leading layer dimension on state and rings: all layers in one call."""
    _fold(2, checkpoint_state, (rawv_cache, rawk_cache, gk_cache, beta_cache), ssm_state_indices, accept_lens, mamba_track_indices,
          mamba_steps_to_track, use_qk_l2norm_in_kernel, null_block_id, max_cache_len, num_k_heads, stream, _COMMIT_NAMES)  # fmt: skip


def commit_gdn_replayssm_fold_all_layers(checkpoint_state, rawv_cache, rawk_cache, g_cache, beta_cache, ssm_state_indices, accept_lens,
                                         max_cache_len, num_k_heads, mamba_track_indices=None, mamba_steps_to_track=None,
                                         use_qk_l2norm_in_kernel=True, null_block_id=-1, *, stream=None):  # fmt: skip
    """As `commit_kda_replayssm_spec_all_layers`, for GDN: g_cache [layers, slots, HV, L], one decay a head. Slots <= null_block_id are skipped."""
    try:
        _fold(2, checkpoint_state, (rawv_cache, rawk_cache, g_cache, beta_cache), ssm_state_indices, accept_lens, mamba_track_indices,
              mamba_steps_to_track, use_qk_l2norm_in_kernel, null_block_id, max_cache_len, num_k_heads, stream,
              ("checkpoint_state", "rawv_cache", "rawk_cache", "g_cache", *_COMMIT_NAMES[4:]))  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        rename(error, {"commit_kda_replayssm_spec_all_layers": "commit_gdn_replayssm_fold_all_layers", "gk_cache": "g_cache"})
        raise


def fused_sigmoid_gating_delta_rule_update(A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source,
                                           initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
                                           is_kda=False, lower_bound=None, disable_state_update=False,
                                           intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None,
                                           retrieve_parent_token=None, cache_ring=False, replayssm_rawv=None, replayssm_rawk=None,
                                           replayssm_g=None, replayssm_beta=None, match_cutedsl_decode=False, *, out=None,
                                           stream=None):  # fmt: skip
    """The recurrence alone (q, k, v convolved and activated already), decode and verify, KDA and GDN.

    q, k [B, T, H, K], v [B, T, HV, V]; a [.., HV*K] or [.., HV, K] (is_kda) or [.., HV]; b [.., HV] logits. Requests: the B rows, or
    with cu_seqlens [N+1] the spans of one row. initial_state_source [pool, HV, V, K], advanced in place unless disable_state_update;
    initial_state_indices [N], < 0: from a zero state, which is not stored. intermediate_states_buffer [rows, steps, HV, V, K] gets the
    state after each token (row intermediate_state_indices[n]); retrieve_parent_token [N, T] makes a tree of them; cache_ring records
    into the replayssm_* rings. A_log [HV], dt_bias [HV*K] or [HV, K] (is_kda) or [HV]: the safe gate lower_bound * sigmoid(exp(A_log) * (a + dt_bias)),
    without lower_bound -exp(A_log) * softplus(a + dt_bias) with softplus_beta and softplus_threshold; scale: of q, default K ** -0.5;
    use_qk_l2norm_in_kernel: q and k are normalised. cache_steps and match_cutedsl_decode change nothing here: the buffer's shape says the first, and there
    is one arithmetic. Returns [B, T, HV, V] in v's dtype.
    """
    return _gating_update(**locals())


_GATING_READ = ("A_log", "a", "dt_bias", "q", "k", "v", "b", "initial_state_source", "initial_state_indices", "cu_seqlens",
                "intermediate_state_indices", "retrieve_parent_token")  # fmt: skip
_GATING_WRITTEN = ("intermediate_states_buffer", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta", "out")


def _gating_update(*, A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale,
                   use_qk_l2norm_in_kernel, cu_seqlens, is_kda=True, lower_bound=None, disable_state_update=False,
                   intermediate_states_buffer=None, intermediate_state_indices=None, retrieve_parent_token=None, cache_ring=False,
                   replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None, out, stream, one_token=False,
                   **_):  # fmt: skip
    """Both neighbours, by name; what else the caller has changes nothing."""
    out = _result(out, "v", v)
    if at_once("kda_gating_update", (
        A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale, use_qk_l2norm_in_kernel,
        cu_seqlens, is_kda, lower_bound, disable_state_update, intermediate_states_buffer, intermediate_state_indices, retrieve_parent_token, cache_ring,
        replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta, out, one_token, stream,
    )):  # fmt: skip
        return out
    disable_state_update = flag("disable_state_update", disable_state_update)
    read = (A_log, a, dt_bias, q, k, v, b, initial_state_source, initial_state_indices, cu_seqlens, intermediate_state_indices, retrieve_parent_token)
    written = (intermediate_states_buffer, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta, out)
    if not disable_state_update:
        array_out("initial_state_source", initial_state_source)
    read = [array_in(name, x) for name, x in zip(_GATING_READ, read, strict=True)]
    written = [array_out(name, x) for name, x in zip(_GATING_WRITTEN, written, strict=True)]
    A_log, a, dt_bias, q, k, v, b, initial_state_source, initial_state_indices, cu_seqlens, intermediate_state_indices, retrieve_parent_token = read
    intermediate_states_buffer, *rings, given_out = written
    function("kda_gating_update")(
        A_log, a, dt_bias, number("softplus_beta", softplus_beta), number("softplus_threshold", softplus_threshold), q, k, v, b,
        initial_state_source, initial_state_indices, optional_number("scale", scale),
        flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel), cu_seqlens, flag("is_kda", is_kda),
        optional_number("lower_bound", lower_bound), disable_state_update, intermediate_states_buffer, intermediate_state_indices,
        retrieve_parent_token, flag("cache_ring", cache_ring), *rings, given_out, one_token, stream_handle(stream, q),
    )  # fmt: skip
    return out


def cutedsl_fused_sigmoid_gating_kda_update(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens=None,
                                            scale=None, use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, *,
                                            out=None, stream=None):  # fmt: skip
    """One KDA token a request with the softplus gate, state updated in place.

    q, k [N, 1, H, K], v [N, 1, HV, V], or [1, N, H, K] and [1, N, HV, V] for N > 1; a [N, HV*K], [N, HV, K] or with q's leading
    dimensions; b [N, HV] or with them; initial_state_source [pool, HV, V, K] or flat; initial_state_indices [N], < 0: output 0, no
    state read or written. cu_seqlens [N+1]: one token a request. A_log, dt_bias, softplus_beta, softplus_threshold and scale as in
    `verify`; use_qk_l2norm_in_kernel: q and k are normalised. Returns v's shape.
    """
    arguments = locals()
    shapes = {}
    for name, x, heads in (("q", q, "H, K"), ("k", k, "H, K"), ("v", v, "HV, V")):
        shapes[name] = shape_of(name, x)
        if len(shapes[name]) != 4:
            raise ValueError(
                f"cutedsl_fused_sigmoid_gating_kda_update: {name}: expected shape [N, 1, {heads}] or [1, N, {heads}], got {shapes[name]}."
            )
    n, (h_v, d_v), d_k = shapes["q"][0] * shapes["q"][1], shapes["v"][-2:], shapes["q"][-1]
    if 0 in (h_v, d_v, d_k):
        raise ValueError(f"cutedsl_fused_sigmoid_gating_kda_update: v: expected heads and channels, got q {shapes['q']} and v {shapes['v']}.")
    varlen = shapes["q"][0] == 1 and shapes["q"][1] > 1
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("a", a), ("initial_state_source", initial_state_source)):
        shapes[name] = shape_of(name, x)
    if prod(shapes["A_log"]) != h_v:
        raise ValueError(f"Unexpected A_log shape: {A_log.shape}; expected numel={h_v}")
    if prod(shapes["dt_bias"]) != h_v * d_k:
        raise ValueError(f"Unexpected dt_bias shape: {dt_bias.shape}; expected numel={h_v * d_k}")
    full = (1, n, h_v, d_k) if varlen else (n, 1, h_v, d_k)
    if shapes["a"] not in ((n, h_v * d_k), (n, h_v, d_k), full):
        raise ValueError(f"Unexpected a shape for {'varlen' if varlen else 'dense'}: {a.shape}")
    shape, slot = shapes["initial_state_source"], h_v * d_v * d_k
    if not (shape[1:] == (h_v, d_v, d_k) if len(shape) == 4 else len(shape) == 1 and shape[0] % slot == 0):
        raise ValueError(f"Unexpected initial_state_source shape: {initial_state_source.shape}")
    return _gating_update(**arguments, one_token=True)
