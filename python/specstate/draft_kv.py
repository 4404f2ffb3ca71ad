"""Draft KV: keys and values of a block drafter, computed from the target's features, straight into a paged pool.

All layers in one product and one pass is the idea of sglang's fused KV materialization (DFlash, Z-Lab 2026). Sizes: T tokens, L draft
layers, N KV heads of D (K) and Dv (V) channels, P rows and R channels of the rotary table.

`stream=` is a CUDA stream (an int, or an object with `cuda_stream`, `ptr` or `__cuda_stream__`), by default the framework's current
one; CPU calls ignore it.

An argument of the wrong kind raises TypeError, a wrong dtype, shape, device or value ValueError, what the CUDA form lacks
NotImplementedError; the text begins with the function and names the argument, and nothing is written then.
Under sglang's names the texts are sglang's where it has one.
"""

from math import prod

from ._arguments import flag, integer, kind_of, number, refusal
from ._arrays import array_in, array_out, dtype_of, empty_like, is_cuda, shape_of, tensor, undispatched
from ._library import function
from ._stream import stream_handle

__all__ = [
    "FusedKVMaterializeHelper",
    "KvProjection",
    "fused_norm_rope_stacked",
    "materialize_into_pool",
    "materialize_workspace_bytes",
    "raise_pending_error",
]


def __dir__():
    return sorted(__all__)


_checking = False  # True where `specstate.supports` asks: nothing is packed, copied or grown, and no element is read


class KvProjection:
    """The K and V projection of all layers, packed once: pass it to `materialize_into_pool` in place of `kv_weight`.

    kv_weight [L, N*D + N*Dv, hidden] float32, bfloat16 or float16, a layer's K rows (head-major) before its V rows; kv_bias
    [L, N*D + N*Dv] or None. A copy: after the weights change, make a new one. Calls give the same bits with it and with the plain weights.
    """

    def __init__(self, kv_weight, kv_bias=None):
        self._packed = self._weight = self._bias = None
        if is_cuda(kv_weight):  # the kernels read weights as they are: a dense copy
            array_in("kv_weight", kv_weight), array_in("kv_bias", kv_bias)
            _check_projection(kv_weight, kv_bias)
            if not _checking:
                self._weight, self._bias = _dense_copy(kv_weight), None if kv_bias is None else _dense_copy(kv_bias)
        else:
            self._packed = _pack(kv_weight, kv_bias)


def _pack(kv_weight, kv_bias):
    return function("draft_kv_pack")(array_in("kv_weight", kv_weight), array_in("kv_bias", kv_bias))


def _check_projection(kv_weight, kv_bias):
    """What packing on the CPU checks."""

    def floats(name, x):
        if dtype_of(x) not in ("float32", "bfloat16", "float16"):
            raise refusal(ValueError, f"{name}: expected dtype float32 or bfloat16 or float16, got {dtype_of(x)}.")

    shape = shape_of("kv_weight", kv_weight, 3)
    floats("kv_weight", kv_weight)
    if 0 in shape:
        raise refusal(ValueError, f"kv_weight: expected at least one layer, one row and one feature, got shape {shape}.")
    if kv_bias is not None:
        if shape_of("kv_bias", kv_bias) != shape[:2]:
            raise refusal(ValueError, f"kv_bias: expected shape {shape[:2]}, got {shape_of('kv_bias', kv_bias)}.")
        floats("kv_bias", kv_bias)
        with undispatched(kv_weight), undispatched(kv_bias):
            there, got = tuple(kv_weight.__dlpack_device__()), tuple(kv_bias.__dlpack_device__())
        if there != got:
            raise refusal(ValueError, f"kv_bias: expected an array on the device of kv_weight, got one on another ({got}, not {there}).")


def _dense_copy(x):
    with undispatched(x):
        copy = empty_like(x, tuple(x.shape))
        copy[...] = x
    return copy


_workspaces = {}  # (kind, device, stream) -> array


def materialize_workspace_bytes(ctx_hidden, fc_weight=None):
    """Bytes of `workspace` that `materialize_into_pool` needs for these arguments and usual heads: 0 on the CPU, and bounded whatever the number of
    tokens. Usual: 64 or 128 channels, V as wide as K, a float32 table, its width at least 16 and a power of two. Others need up to 12 MiB more; the
    error of a workspace that is too small says how much."""
    shape_of("ctx_hidden", ctx_hidden, 2)
    return function("draft_kv_workspace_bytes")(array_in("ctx_hidden", ctx_hidden), array_in("fc_weight", fc_weight))


def _workspace(like, needed, stream):
    """What long CUDA calls and those from target features need, allocated by the framework at the first one and kept: calls of one stream follow
    each other."""
    with undispatched(like):
        key = (type(like).__module__, *(int(i) for i in like.__dlpack_device__()), stream)
    if key not in _workspaces or _workspaces[key].shape[0] < needed:
        _workspaces[key] = empty_like(like, (needed,), "uint8")
    return _workspaces[key]


def raise_pending_error(like):
    """Raises the ValueError of a row that an earlier CUDA call on the device of `like` could not write (its slot was beyond the pool
    or its position outside the rotary table), once. Does not wait: synchronise first for the calls made so far."""
    shape_of("like", like)  # there is one
    function("draft_kv_raise_pending_error")(array_in("like", like))


def _pools(name, pool):
    """A pool argument as a list of writable arrays: one for all layers, or one a layer."""
    return [array_out(name, p) for p in (pool if isinstance(pool, (list, tuple)) else [pool])]


def _scale(name, scale):
    """A scale as (array, number), one of them None. NumPy's scalars are numbers."""
    if scale is None or hasattr(scale, "__dlpack__"):
        return array_in(name, scale), None
    return None, number(name, scale)


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
    fc_weight=None,
    hidden_norm_weight=None,
    hidden_norm_eps=1e-6,
    workspace=None,
    stream=None,
):
    """Features to keys and values of all draft layers, in one pass into a paged pool. Returns None.

    ctx_hidden [T, hidden] float32, bfloat16 or float16.
    kv_weight [L, N*D + N*Dv, hidden] (a layer's K rows, head-major, then its V rows), or a `KvProjection`; kv_bias [L, N*D + N*Dv].
    k_norm_weight [L, D]; eps [L] float32.
    cos_sin_cache [P, R], or [L, P, R] for a table a layer: R/2 cosines, then R/2 sines; R even, at most D.
    positions [T] int32 or int64: rows of cos_sin_cache.
    slot_mapping [T], or [b, W] with b*W = T; int32 or int64; < 0 skips the row. None: row i goes to slot i.
    commit_lens [b] int32 or int64 in 0..W, with slot_mapping [b, W]: row (r, j) is written iff j < commit_lens[r]. Rows that are
    not written cost nothing and need no valid position.
    k_pool, v_pool: [L, slots, N, D], or a list of L arrays [slots, N, D], any strides; float32, bfloat16, float16,
    float8_e4m3fn, or uint8 holding float8_e4m3fn codes; v_pool with Dv.
    k_scale, v_scale: a number, 0-d or [L]; an fp8 pool holds value / scale, saturated at +-448. Only 1 for other pools.
    is_neox_style: rotary pairs (i, i + R/2), else (2i, 2i + 1). round_after_norm: K is rounded between norm and rotary too.
    fc_weight [hidden, features], hidden_norm_weight [hidden]: ctx_hidden is [T, features], the target's concatenated hidden states, and
    what is projected is rms(fc x) * w (hidden_norm_eps in its root), rounded to ctx_hidden's dtype before and after the norm.
    workspace: CUDA only, a dense array of `materialize_workspace_bytes` bytes on that GPU, 16-byte aligned; what it holds does not matter. By default
    one is kept for each stream: graphs that are captured on one stream and replayed at the same time on several need one each.

    V is the float32 projection rounded once to ctx_hidden's dtype, K is rounded so before the norm and after the rotary, then both
    to the pool's dtype. A row's bits never depend on the other rows. Where two rows name one slot, the last one stands.
    CUDA: slots and positions are checked on the GPU; a row that cannot be written is left out, and the next call (or `raise_pending_error`) raises.
    """
    arguments = dict(locals(), packed=None, k_pool=_pools("k_pool", k_pool), v_pool=_pools("v_pool", v_pool))
    if isinstance(kv_weight, KvProjection):
        if kv_bias is not None:
            raise refusal(ValueError, "kv_bias: expected none beside a KvProjection, which has its own: either packed or plain weights, got both.")
        if not hasattr(kv_weight, "_packed"):
            raise refusal(ValueError, "kv_weight: expected a KvProjection that was made from weights, got one whose __init__ has not run.")
        arguments.update(packed=kv_weight._packed, kv_bias=kv_weight._bias, kv_weight=kv_weight._weight)
    _materialize(**arguments)


def _materialize(
    ctx_hidden, packed, kv_weight, k_norm_weight, eps, cos_sin_cache, positions, slot_mapping, k_pool, v_pool, *, kv_bias=None, commit_lens=None,
    k_scale=None, v_scale=None, is_neox_style=True, round_after_norm=False, fc_weight=None, hidden_norm_weight=None, hidden_norm_eps=1e-6,
    round_to_weight_dtype=False, workspace=None, stream=None,
):  # fmt: skip
    stream = stream_handle(stream, ctx_hidden)
    arguments = (
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
        flag("is_neox_style", is_neox_style),
        flag("round_after_norm", round_after_norm),
        array_in("fc_weight", fc_weight),
        array_in("hidden_norm_weight", hidden_norm_weight),
        number("hidden_norm_eps", hidden_norm_eps),
        round_to_weight_dtype,
    )
    materialize = function("draft_kv_materialize_into_pool")
    if workspace is None and is_cuda(ctx_hidden) and (needed := materialize(*arguments, None, True, stream)):
        materialize(*arguments, _workspace(ctx_hidden, needed, stream), False, stream)
    elif workspace is not None or not is_cuda(ctx_hidden):
        materialize(*arguments, array_out("workspace", workspace), False, stream)


# What a layer must have.
_LAYER = tuple(
    "self_attn" + name
    for name in ("", ".num_kv_heads", ".head_dim", ".rotary_emb", ".q_size", ".kv_size", ".qkv_proj.weight", ".k_norm.weight", ".k_norm.variance_epsilon")
)


_WEIGHT = "qkv_proj.weight"
_POSITIONS = ("int32", "int64", "int8", "int16", "uint8", "uint16", "uint32")


def _rotation(rotary_emb, head_dim, at=""):
    """(rotary_dim, is_neox_style) of a rotary object."""
    return (
        integer(f"{at}rotary_emb.rotary_dim", getattr(rotary_emb, "rotary_dim", head_dim)),
        flag(f"{at}rotary_emb.is_neox_style", getattr(rotary_emb, "is_neox_style", True)),
    )


def _has(x, path):
    try:
        for name in path.split("."):
            x = getattr(x, name)
    except AttributeError:
        return False
    return True


class FusedKVMaterializeHelper:
    """K and V of all draft layers from one features array, handed to a callback layer by layer (sglang's class of this name).

    layers: objects with ``self_attn.{num_kv_heads, head_dim, rotary_emb, q_size, kv_size, qkv_proj.weight, k_norm.weight,
    k_norm.variance_epsilon}``; ``qkv_proj.weight`` [q_size + 2*kv_size, hidden], with an optional ``qkv_proj.bias``.
    rotary_emb: ``rotary_dim`` (default head_dim, even), ``is_neox_style`` (must be true), ``cos_sin_cache`` [P, rotary_dim] and,
    if it can grow, ``_ensure_cos_sin_cache_length(max_position)``. num_kv_heads, head_dim: those of every layer; device: kept for the
    caller, the weights say where the work is done. max_position_hint: tokens to reserve rotary rows for.

    The weights are packed here once, and again (on CUDA into the same memory) when a call finds that a layer has another tensor or that torch has
    counted a write to one of them. `refresh_weights` does it for writes that torch does not count (through ``.data``, by NumPy) and for graphs
    that were captured before. Nothing else is kept between calls. CUDA: all layers are made at once; with a position hint nothing waits for the GPU, a position outside
    the rotary table leaves its row unwritten and the next call raises.
    """

    def __init__(self, layers, rotary_emb, num_kv_heads, head_dim, device, max_position_hint=None):
        self.num_kv_heads = num_kv_heads = integer("num_kv_heads", num_kv_heads)
        self.head_dim = head_dim = integer("head_dim", head_dim)
        try:
            several = len(layers) >= 0 and not isinstance(layers, (str, bytes, dict))
        except TypeError:
            several = False
        if not several:
            raise refusal(TypeError, f"layers: expected a sequence of layers with self_attn, got {kind_of(layers)}.")
        for i, layer in enumerate(layers):
            for path in _LAYER:
                if not _has(layer, path):
                    raise refusal(TypeError, f"layers: expected layers with {path}, got {kind_of(layer)} without it at layer {i}.")
        self.rotary_emb = rotary_emb
        self.n_layers = len(layers)
        self.device = device
        self.kv_size = num_kv_heads * head_dim
        self.layer_out_dim = 2 * self.kv_size
        self.rotary_dim, self.is_neox_style = _rotation(rotary_emb, head_dim)
        if not self.is_neox_style:
            raise NotImplementedError("Only neox-style RoPE is supported.")
        if self.rotary_dim <= 0 or self.rotary_dim > head_dim or self.rotary_dim % 2 != 0:
            raise ValueError(
                f"Invalid fused KV rotary/head dim pair: rotary_dim={self.rotary_dim}, head_dim={head_dim}."
            )
        if not layers:
            raise ValueError("FusedKVMaterializeHelper: layers: expected at least one layer, got none.")
        self.max_position_hint = None if max_position_hint is None else max(integer("max_position_hint", max_position_hint) - 1, 0)
        self._layers = layers
        self._cuda = self._packed_from = None
        self.refresh_weights()
        if self.max_position_hint is not None:
            self._rope_table(0)

    def _check_layer(self, i, attn):
        for name in ("num_kv_heads", "head_dim"):
            expected, got = getattr(self, name), integer(f"layers[{i}].self_attn.{name}", getattr(attn, name))
            if got != expected:
                raise ValueError(
                    f"{name} mismatch across layers for fused KV path: expected {expected}, got {got} at layer {i}."
                )
        rotary_dim, is_neox = _rotation(attn.rotary_emb, self.head_dim, f"layers[{i}].self_attn.")
        if (rotary_dim, is_neox) != (self.rotary_dim, self.is_neox_style):
            raise ValueError(
                "RoPE config mismatch across layers for fused KV path: "
                f"expected (rotary_dim={self.rotary_dim}, neox={self.is_neox_style}), "
                f"got (rotary_dim={rotary_dim}, neox={is_neox}) at layer {i}."
            )

        # What sglang takes on trust: a layer that rotates by other angles, and weights of another shape.
        def refuse(name, expected, got):
            raise ValueError(f"FusedKVMaterializeHelper: {name}: expected {expected}, got {got} at layer {i}.")

        shared, own = (getattr(r, "cos_sin_cache", None) for r in (self.rotary_emb, attn.rotary_emb))
        # A table on a GPU is compared once: later checks may be made while a graph is captured, and wait for nothing.
        compared = not _checking and (self._packed_from is None or not is_cuda(own))
        if shared is not None and own is not None and own is not shared and compared:
            ours, theirs = shape_of("rotary_emb.cos_sin_cache", shared, 2), shape_of(f"layers[{i}].self_attn.rotary_emb.cos_sin_cache", own, 2)
            rows = min(ours[0], theirs[0])
            if ours[1] != theirs[1] or (own.dtype == shared.dtype and bool((shared[:rows] != own[:rows]).any())):
                refuse("rotary_emb", "one rotary table for all layers", "another table")
        q_size, kv_size = (integer(f"layers[{i}].self_attn.{name}", getattr(attn, name)) for name in ("q_size", "kv_size"))
        if q_size < 0:
            refuse("q_size", "at least 0", q_size)
        if kv_size != self.kv_size:
            refuse("kv_size", f"num_kv_heads * head_dim = {self.kv_size}", kv_size)
        weight, bias, norm = attn.qkv_proj.weight, getattr(attn.qkv_proj, "bias", None), attn.k_norm.weight
        rows, hidden = q_size + 2 * self.kv_size, shape_of(f"layers[0].self_attn.{_WEIGHT}", self._layers[0].self_attn.qkv_proj.weight)[-1:]
        for name, x, expected, fits in (
            (_WEIGHT, weight, f"shape [>= q_size + 2 * kv_size = {rows}, hidden]", lambda shape: len(shape) == 2 and shape[0] >= rows),
            (_WEIGHT, weight, f"{hidden[0] if hidden else 0} columns, as at layer 0", lambda shape: shape[-1:] == hidden),
            ("qkv_proj.bias", bias, f"shape [>= q_size + 2 * kv_size = {rows}]", lambda shape: len(shape) == 1 and shape[0] >= rows),
            ("k_norm.weight", norm, f"shape ({self.head_dim},)", lambda shape: shape == (self.head_dim,)),
        ):
            if x is None and name == "qkv_proj.bias":
                continue
            array_in(f"layers[{i}].self_attn.{name}", x)
            shape = shape_of(f"layers[{i}].self_attn.{name}", x)
            if not fits(shape):
                refuse(name, expected, shape)
            if dtype_of(x) not in ("float32", "bfloat16", "float16"):
                refuse(name, "dtype float32 or bfloat16 or float16", dtype_of(x))
        eps = number(f"layers[{i}].self_attn.k_norm.variance_epsilon", attn.k_norm.variance_epsilon)
        if not 0 <= eps < 3.4e38:  # a float32
            refuse("k_norm.variance_epsilon", "a finite number >= 0", eps)

    def _sources(self):
        """The layers' tensors, and torch's count of writes to each."""
        for layer in self._layers:
            attn = layer.self_attn
            for x in (attn.qkv_proj.weight, attn.k_norm.weight, getattr(attn.qkv_proj, "bias", None)):
                try:
                    yield x, getattr(x, "_version", 0)
                except RuntimeError:  # made under inference_mode: not counted
                    yield x, 0

    def _changed(self):
        return any(x is not before or n != count for (x, n), (before, count) in zip(self._sources(), self._packed_from))

    def refresh_weights(self):
        """Packs the layers' weights again: after writes that torch does not count, and before replays of graphs that were captured earlier."""
        for i, layer in enumerate(self._layers):  # all of them: a call that has handed over one layer must not fail at the next
            self._check_layer(i, layer.self_attn)
        if len(self._layers) != self.n_layers:
            raise ValueError(f"FusedKVMaterializeHelper: layers: expected {self.n_layers} layers, got {len(self._layers)}.")
        layers, packed_from = [], list(self._sources())
        for i, layer in enumerate(self._layers):
            attn = layer.self_attn
            kv = slice(attn.q_size, attn.q_size + 2 * self.kv_size)
            weight, norm, bias = (w.detach() if hasattr(w, "detach") else w for w, _ in packed_from[3 * i : 3 * i + 3])
            layers.append((weight[kv], None if bias is None else bias[kv], norm, float(attn.k_norm.variance_epsilon)))
        self._dtype = dtype_of(self._layers[0].self_attn.qkv_proj.weight)
        if is_cuda(layers[0][0]):
            if not _checking:
                self._refresh_cuda(layers)
            self._packed_from = packed_from
            return
        packed = []
        for weight, bias, norm, variance_epsilon in layers:
            projection = _pack(weight[None], None if bias is None else bias[None])
            if _checking:
                continue
            norm_copy, eps = empty_like(norm, (1, self.head_dim)), empty_like(norm, (1,), "float32")
            norm_copy[0] = norm
            eps[0] = variance_epsilon
            packed.append((projection, norm_copy, eps))
        self._packed, self._packed_from = packed, packed_from  # all layers or none

    def _refresh_cuda(self, layers):
        """One dense copy of all layers; later refreshes write into it, so graphs that were captured see the new weights."""
        weight, bias, norm, _ = layers[0]
        biased = any(b is not None for _, b, _, _ in layers)
        if self._cuda is None or (tuple(self._cuda[0].shape[1:]), self._cuda[0].dtype) != (tuple(weight.shape), weight.dtype) or biased != (self._cuda[1] is not None):
            n = len(layers)
            self._cuda = (
                empty_like(weight, (n, *weight.shape)),
                empty_like(weight, (n, weight.shape[0])) if biased else None,
                empty_like(norm, (n, self.head_dim)),
                empty_like(norm, (n,), "float32"),
            )
        for i, (weight, bias, norm, variance_epsilon) in enumerate(layers):
            self._cuda[0][i] = weight
            if biased:
                self._cuda[1][i] = 0 if bias is None else bias
            self._cuda[2][i] = norm
            self._cuda[3][i] = variance_epsilon

    def _rope_table(self, last):
        """The rotary table, grown if the rotary object can: to the hint where there is one, else to position `last`."""
        reserve = last if self.max_position_hint is None else self.max_position_hint
        table = getattr(self.rotary_emb, "cos_sin_cache", None)
        if table is not None:
            shape_of("rotary_emb.cos_sin_cache", table, 2)
        grow = getattr(self.rotary_emb, "_ensure_cos_sin_cache_length", None)
        if callable(grow) and (table is None or reserve >= table.shape[0]):
            if _checking:
                return table
            grow(reserve)
            table = self.rotary_emb.cos_sin_cache
        max_position, length = max(reserve, last), 0 if table is None else int(table.shape[0])
        if max_position >= length:
            raise RuntimeError(
                "RoPE cos/sin cache is too short for fused KV materialization: "
                f"max_position={max_position}, cache_len={length}."
            )
        return table

    def materialize(self, ctx_hidden, positions, write_layer_kv):
        """Calls ``write_layer_kv(layer, k, v)`` for every layer in order, k and v [T, num_kv_heads, head_dim] of the weights'
        dtype and of ctx_hidden's kind, new arrays for each call.

        ctx_hidden [T, hidden], rounded to the weights' dtype; T = 0 calls nothing, whatever the number of positions, but looks at the kinds of its arguments. positions: T integers of any shape, row-major.
        Raises ValueError and RuntimeError with sglang's texts; positions are checked with and without a position hint.
        """
        total_ctx = int(shape_of("ctx_hidden", ctx_hidden, 2)[0])
        count = prod(shape_of("positions", positions))
        if dtype_of(positions) not in _POSITIONS:
            raise refusal(ValueError, f"positions: expected dtype int32 or int64, got {dtype_of(positions)}.")
        for name, x in (("ctx_hidden", ctx_hidden), ("positions", positions)):  # they have memory
            tensor(name, array_in(name, x))
        if total_ctx == 0:
            if not callable(write_layer_kv):
                raise refusal(TypeError, f"write_layer_kv: expected a function, got {kind_of(write_layer_kv)}.")
            return
        if count != total_ctx:
            raise ValueError(
                "positions must match ctx_hidden token count for fused KV materialization: "
                f"positions={count}, total_ctx={total_ctx}."
            )
        if len(shape_of("positions", positions)) != 1:
            positions = positions.reshape(-1)
        if dtype_of(positions) in ("int8", "int16", "uint8", "uint16", "uint32"):
            narrow, positions = positions, empty_like(ctx_hidden, (total_ctx,), "int64")
            positions[...] = narrow
        if self._cuda is not None and self.max_position_hint is not None:
            table = self._rope_table(0)  # the kernel checks the positions: nothing waits for the GPU
        else:
            first = int(positions.min())
            if first < 0:
                raise ValueError(f"FusedKVMaterializeHelper: positions: expected positions >= 0, got {first}.")
            table = self._rope_table(int(positions.max()))
        if not callable(write_layer_kv):
            raise refusal(TypeError, f"write_layer_kv: expected a function, got {kind_of(write_layer_kv)}.")
        if self._changed():
            self.refresh_weights()
        shape = (total_ctx, self.num_kv_heads, self.head_dim)
        if self._cuda is not None:  # one pass over all layers
            weight, bias, norm, eps = self._cuda
            if dtype_of(ctx_hidden) in {"float32", "float16", "bfloat16"} - {self._dtype}:  # rounded here, for the tensor cores
                other, ctx_hidden = ctx_hidden, empty_like(ctx_hidden, tuple(ctx_hidden.shape), self._dtype)
                ctx_hidden[...] = other
            k, v = (empty_like(ctx_hidden, (self.n_layers, *shape), self._dtype) for _ in range(2))
            _materialize(ctx_hidden, None, weight, norm, eps, table, positions, None, [k], [v], kv_bias=bias, round_to_weight_dtype=True)
            for i in range(self.n_layers):
                write_layer_kv(i, k[i], v[i])
            return
        for i, (projection, norm, eps) in enumerate(self._packed):
            k, v = empty_like(ctx_hidden, shape, self._dtype), empty_like(ctx_hidden, shape, self._dtype)
            _materialize(ctx_hidden, projection, None, norm, eps, table, positions, None, [array_out("k", k)], [array_out("v", v)], round_to_weight_dtype=True)
            write_layer_kv(i, k, v)


def fused_norm_rope_stacked(
    kv, k_norm_weight, eps, cos_sin_cache, positions, num_kv_heads, head_dim, rotary_dim, k_out=None, v_out=None, *, stream=None
):
    """RMSNorm per K head, rotary (split halves), and V as it is, of a projection made elsewhere (sglang's
    `_fused_norm_rope_stacked`).

    N, D = num_kv_heads, head_dim; kv [T, L, 2*N*D] float32, bfloat16 or float16; k_norm_weight [L, D]; eps [L] float32; cos_sin_cache [P, rotary_dim];
    positions [T] int32 or int64. Returns (k, v), each [L, T, N, D] of kv's dtype, k_out and v_out where given; T = 0 returns two
    empty arrays. sglang's texts where sglang checks.
    """
    num_kv_heads, head_dim = integer("num_kv_heads", num_kv_heads), integer("head_dim", head_dim)
    kv_shape = shape_of("kv", kv)
    n_layers, tokens = (kv_shape[1], kv_shape[0]) if len(kv_shape) == 3 else (0, 0)
    shape = (n_layers, tokens, num_kv_heads, head_dim)
    if min(shape) < 0 or len(kv_shape) != 3 or kv_shape[2] != 2 * num_kv_heads * head_dim:
        shape = (0, 0, 0, 0)  # of sizes that the call refuses nothing is allocated
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
        integer("rotary_dim", rotary_dim),
        array_out("k_out", k),
        array_out("v_out", v),
        stream_handle(stream, kv),
    )
    return k, v
