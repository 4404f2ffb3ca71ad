"""Draft KV: keys and values of a block drafter, computed from the target's features, straight into a paged pool."""

from ._arrays import array_in, array_out, empty_like
from ._library import function
from ._stream import stream_handle


class KvProjection:
    """The K and V projection of all layers, packed once: pass it to `materialize_into_pool` in place of `kv_weight`.

    kv_weight [L, 2*KV, hidden] float32, bfloat16 or float16, K rows then V rows; kv_bias [L, 2*KV] or None. A copy: after the
    weights change, make a new one. Calls give the same bits with it and with the plain weights.
    """

    def __init__(self, kv_weight, kv_bias=None):
        self._packed = function("draft_kv_pack")(array_in("kv_weight", kv_weight), array_in("kv_bias", kv_bias))


def _pools(name, pool):
    """A pool argument as a list of writable arrays: one for all layers, or one a layer."""
    return [array_out(name, p) for p in (pool if isinstance(pool, (list, tuple)) else [pool])]


def _scale(name, scale):
    """A scale as (array, number), one of them None."""
    if scale is None or isinstance(scale, (int, float)):
        return None, None if scale is None else float(scale)
    return array_in(name, scale), None


def materialize_into_pool(
    ctx_hidden,
    kv_weight,
    k_norm_weight,
    eps,
    cos_sin_cache,
    positions,
    slot_mapping,
    k_pool,
    v_pool,
    *,
    kv_bias=None,
    commit_lens=None,
    k_scale=None,
    v_scale=None,
    is_neox_style=True,
    round_after_norm=False,
    stream=None,
):
    """Features to keys and values of all draft layers, in one pass into a paged pool. Returns None.

    ctx_hidden [T, hidden] float32, bfloat16 or float16.
    kv_weight [L, 2*KV, hidden] (a layer's K rows, head-major, then its V rows), or a `KvProjection`; kv_bias [L, 2*KV].
    k_norm_weight [L, D]; eps [L] float32.
    cos_sin_cache [P, R], or [L, P, R] for a table a layer: R/2 cosines, then R/2 sines; R even, at most D.
    positions [T] int32 or int64: rows of cos_sin_cache.
    slot_mapping [T], or [b, W] with b*W = T; int32 or int64; < 0 skips the row.
    commit_lens [b] int32 or int64 in 0..W, with slot_mapping [b, W]: row (r, j) is written iff j < commit_lens[r]. Rows that are
    not written cost nothing and need no valid position.
    k_pool, v_pool: [L, slots, N, D], or a list of L arrays [slots, N, D], any strides; float32, bfloat16, float16,
    float8_e4m3fn, or uint8 holding float8_e4m3fn codes. V may have another width than K.
    k_scale, v_scale: a number, 0-d or [L]; an fp8 pool holds value / scale, saturated at +-448. Only 1 for other pools.
    is_neox_style: rotary pairs (i, i + R/2), else (2i, 2i + 1). round_after_norm: K is rounded between norm and rotary too.

    V is the float32 projection rounded once to ctx_hidden's dtype, K is rounded so before the norm and after the rotary, then both
    to the pool's dtype. A row's bits never depend on the other rows. Where two rows name one slot, the last one stands.
    Raises ValueError naming the argument before anything is written.
    """
    packed = isinstance(kv_weight, KvProjection)
    _materialize(
        ctx_hidden,
        kv_weight._packed if packed else None,
        None if packed else kv_weight,
        k_norm_weight,
        eps,
        cos_sin_cache,
        positions,
        slot_mapping,
        _pools("k_pool", k_pool),
        _pools("v_pool", v_pool),
        kv_bias=kv_bias,
        commit_lens=commit_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        is_neox_style=is_neox_style,
        round_after_norm=round_after_norm,
        stream=stream,
    )


def _materialize(
    ctx_hidden,
    packed,
    kv_weight,
    k_norm_weight,
    eps,
    cos_sin_cache,
    positions,
    slot_mapping,
    k_pool,
    v_pool,
    *,
    kv_bias=None,
    commit_lens=None,
    k_scale=None,
    v_scale=None,
    is_neox_style=True,
    round_after_norm=False,
    round_to_weight_dtype=False,
    stream=None,
):
    function("draft_kv_materialize_into_pool")(
        array_in("ctx_hidden", ctx_hidden),
        packed,
        array_in("kv_weight", kv_weight),
        array_in("k_norm_weight", k_norm_weight),
        array_in("eps", eps),
        array_in("cos_sin_cache", cos_sin_cache),
        array_in("positions", positions),
        array_in("slot_mapping", slot_mapping),
        k_pool,
        v_pool,
        array_in("kv_bias", kv_bias),
        array_in("commit_lens", commit_lens),
        *_scale("k_scale", k_scale),
        *_scale("v_scale", v_scale),
        bool(is_neox_style),
        bool(round_after_norm),
        round_to_weight_dtype,
        stream_handle(stream, ctx_hidden),
    )


def fused_norm_rope_stacked(
    kv, k_norm_weight, eps, cos_sin_cache, positions, num_kv_heads, head_dim, rotary_dim, k_out=None, v_out=None, *, stream=None
):
    """RMSNorm per K head, rotary (split halves), and V as it is, of a projection made elsewhere (sglang's
    `_fused_norm_rope_stacked`).

    kv [T, L, 2*N*D] float32, bfloat16 or float16; k_norm_weight [L, D]; eps [L] float32; cos_sin_cache [P, rotary_dim];
    positions [T] int32 or int64. Returns (k, v), each [L, T, N, D] of kv's dtype, k_out and v_out where given; T = 0 returns two
    empty arrays. Raises ValueError, with sglang's texts where sglang checks; nothing is written then.
    """
    n_layers, tokens = (kv.shape[1], kv.shape[0]) if len(kv.shape) == 3 else (0, 0)
    shape = (n_layers, tokens, max(num_kv_heads, 0), max(head_dim, 0))
    k = empty_like(kv, shape) if k_out is None or tokens == 0 else k_out
    v = empty_like(kv, shape) if v_out is None or tokens == 0 else v_out
    function("draft_kv_fused_norm_rope_stacked")(
        array_in("kv", kv),
        array_in("k_norm_weight", k_norm_weight),
        array_in("eps", eps),
        array_in("cos_sin_cache", cos_sin_cache),
        array_in("positions", positions),
        num_kv_heads,
        head_dim,
        rotary_dim,
        array_out("k_out", k),
        array_out("v_out", v),
        stream_handle(stream, kv),
    )
    return k, v
