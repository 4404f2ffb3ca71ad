"""HiSparse: sparse attention over a KV cache in host memory with a small hot buffer of device rows.

The library's own operations (`swap_in`, `swap_in_single`, `replay_plan`, `await_follower`, `transfer_paged`) and, under sglang's names and
signatures (0.5.23), the calls that work inside sglang's own state tensors. Words used below: B batch rows, R request slots,
S steps, K top-k, H hot slots, P tail slots, L positions a request can have, Nh host rows, Nd device rows. A "token" is a position
inside its request, a "loc" a row of a pool. Idea and state are those of HiSparse (sglang, LMSYS 2026-04-10). On the CPU backend host and
device buffers are both CPU memory; on a GPU host caches are pinned.

host_cache [Nh, ...] and device_buffer [Nd, ...] hold rows of the same number of bytes, of any dtype; host_cache_v and device_buffer_v
are a second pair, moved by the same plan. `layout` says how rows lie: "linear", or "dsv4" for pages of 64 rows in 37440 bytes; under
sglang's names item_size_bytes says how long a row is. A miss plan is miss_src [>=B, >=S*K] int64 host rows, miss_dst (same) int32
device rows and miss_count [>=B] int32: what was copied, for a layer that shares the selection. num_real_reqs [1] int32: rows from
there on are padding. skip_io moves no bytes. sm_budget (CUDA) bounds the SMs that a call occupies beside other work, 0 for as many as help; what of a
call it bounds stands with each function, results do not depend on it, and calls on the CPU ignore it. `out=` is where the result goes;
`stream=` is a CUDA stream (an int, or an object with `cuda_stream`, `ptr` or `__cuda_stream__`), by default the framework's current
one; CPU calls ignore it.

An argument of the wrong kind raises TypeError, a wrong dtype, shape, device or value ValueError, what the CUDA form lacks
NotImplementedError; the text begins with the function and names the argument, and nothing is written then.
Under sglang's names the texts are sglang's where it has one, and RuntimeErrors where its C++ side checks. What exactly a call does is in
`src/hisparse/SEMANTICS.md` of the sources, which a wheel holds too: in the folder that `python -m specstate --doc-dir` names.
"""

from typing import Any, NamedTuple

from ._arguments import describe, flag, group, integer, integers, kind_of, refusal, rename, size
from ._arrays import array_in, array_out, dtype_of, empty_like, is_cuda, shape_of, tensor, undispatched
from ._library import at_once, function
from ._stream import stream_handle

__all__ = [
    "Coordinator",
    "HiSparseSpecState",
    "SwapState",
    "await_follower",
    "copy_cache_planned_mla",
    "load_blocks_to_device_buffer_mha",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "load_cache_to_device_buffer_spec_mla",
    "new_spec_state",
    "new_swap_state",
    "replay_plan",
    "reset_swap_state",
    "swap_in",
    "swap_in_single",
    "transfer_cache_dsv4_mla",
    "transfer_paged",
]

def __dir__():
    return sorted(__all__)


_LAYOUTS = {"linear": False, "dsv4": True}


def _paged(layout):
    try:
        return _LAYOUTS[layout]
    except (KeyError, TypeError):
        raise refusal(ValueError, f"layout: expected 'linear' or 'dsv4', got {layout!r}.") from None


_OUT = {"top_k_device_locs": "out"}  # the library's name: this module's
_INFER = -(2**63)  # kInfer of the C++ interface: take the size from the tensors


def _positions(n):
    """How many are allocated: none of a number that no call takes."""
    return n if n < 2**31 else 0


def _hint(op, name, value, high=None):
    value = integer(name, value)
    if value < 1 or (high is not None and value > high):
        raise ValueError(f"{op}: {name}: expected {'at least 1' if high is None else f'1 to {high}'}, got {value}.")


# ------------------------------------------------------------------------------------------------------------ native


class SwapState(NamedTuple):
    """Native swap state of one layer, or of an anchor and its followers (R request slots, H hot slots, P tail slots, L positions). Every row
    that a request owns can be a hit. A tuple or list of the five arrays in this order does too."""

    slot_tokens: Any
    slot_locs: Any
    slot_stamps: Any
    token_slots: Any
    clock: Any


describe(
    SwapState,
    slot_tokens="[R, H+P] int32: the token of each slot, -1 empty; columns H.. are the tail (drafts)",
    slot_locs="[R, H+P] int32: the device row of each slot, -1 none; yours to fill",
    slot_stamps="[R, H] int32: when a hot slot was last used",
    token_slots="[R, L] int16, or int32 beyond 32767 slots: where a token was last seen; a hint",
    clock="[R] int32: number of the last call",
)


def _below(n, name):
    if n >= 2**31:
        raise refusal(ValueError, f"{name}: expected below 2^31, got {n}.")
    return n


def new_swap_state(slot_locs, hot, context):
    """An empty SwapState around `slot_locs` [R, H+P] int32, for `hot` = H slots (1 to H+P) and `context` = L positions."""
    requests, width = shape_of("slot_locs", slot_locs, 2)
    hot, context = integer("hot", hot), _below(size("context", context), "context")
    if not 1 <= hot <= width:
        raise refusal(ValueError, f"hot: expected 1 to the {width} columns of slot_locs, got {hot}.")
    if dtype_of(slot_locs) != "int32":
        raise refusal(ValueError, f"slot_locs: expected dtype int32, got {dtype_of(slot_locs)}.")
    state = SwapState(
        empty_like(slot_locs, (requests, width), "int32"),
        slot_locs,
        empty_like(slot_locs, (requests, hot), "int32"),
        empty_like(slot_locs, (requests, context), "int16" if hot <= 32767 else "int32"),
        empty_like(slot_locs, (requests,), "int32"),
    )
    reset_swap_state(state)
    return state


def _state(state):
    tokens, locs, stamps, hints, clock = group("state", state, SwapState)
    return (
        array_out("state.slot_tokens", tokens),
        array_in("state.slot_locs", locs),
        array_out("state.slot_stamps", stamps),
        array_out("state.token_slots", hints),
        array_out("state.clock", clock),
    )


def reset_swap_state(state, requests=None, *, stream=None):
    """Makes request slots empty (all of them if `requests` [n] is None, n at most the number of slots); for a new occupant of a slot. The
    state's members and `requests` share no memory."""
    arrays = _state(state)
    function("hisparse_reset_swap_state")(*arrays, array_in("requests", requests), stream_handle(stream, arrays[0]))


def swap_in(
    top_k_tokens,
    seq_lens,
    req_pool_indices,
    host_cache_locs,
    host_cache,
    device_buffer,
    state,
    *,
    host_cache_v=None,
    device_buffer_v=None,
    scratch_locs=None,
    num_real_reqs=None,
    miss_src=None,
    miss_dst=None,
    miss_count=None,
    unique_misses=None,
    unique_hits=None,
    layout="linear",
    skip_io=False,
    sm_budget=0,
    follower_host_cache=None,
    follower_device_buffer=None,
    follower_host_cache_v=None,
    follower_device_buffer_v=None,
    out=None,
    stream=None,
):
    """Swap-in of any number of steps with the native state.

    top_k_tokens [B, S, K] int32; seq_lens [B, S] int32 or int64; req_pool_indices [B]; host_cache_locs [R, L] int64 or int32 (< 0: no
    host row); host_cache [Nh, ...] and device_buffer [Nd, ...] of any dtype with rows of the same number of bytes, and a second pair
    for a V cache; state: SwapState. num_real_reqs [1] int32: rows from there on are padding.
    miss_src [>=B, >=S*K] int64, miss_dst (same) int32, miss_count [>=B] int32: the copies, for `replay_plan`.
    unique_misses, unique_hits [>=B] int32: counts. scratch_locs [R, C] int32: rows for misses that find no hot slot (not needed if S*K <= H).
    follower_host_cache [Nh', ...], follower_device_buffer [Nd', ...] (both or neither), follower_host_cache_v, follower_device_buffer_v (likewise): a tensor
    or a list of them, layers in lockstep that get the same rows of their own pools, as by `replay_plan` of the plan (which must be given) behind this
    call; Nh' >= Nh, Nd' >= Nd, rows of a size of their own. On a GPU their rows are asked for while this layer's are on their way.
    sm_budget: of the whole call, its followers' copies too; where the tables of a request need the shared memory of more SMs, it takes those.
    Returns the device rows [B, S, K] int32; -1 for tokens outside 0..seq_len-1, without a host row, or for which no row was left.
    """
    if out is None:
        out = empty_like(top_k_tokens, shape_of("top_k_tokens", top_k_tokens), "int32")
    paged = _paged(layout)
    layers = (follower_host_cache, follower_device_buffer, follower_host_cache_v, follower_device_buffer_v)
    followers = layers if all(x is None for x in layers) else _layers("swap_in", *layers, before="follower_")
    try:
        if followers is layers and at_once("hisparse_swap_in", (
            top_k_tokens, seq_lens, req_pool_indices, num_real_reqs, host_cache_locs, host_cache, device_buffer, host_cache_v, device_buffer_v,
            *group("state", state, SwapState), scratch_locs, paged, out, miss_src, miss_dst, miss_count, unique_misses, unique_hits, skip_io, sm_budget,
            *followers, stream,
        )):  # fmt: skip
            return out
        function("hisparse_swap_in")(
            array_in("top_k_tokens", top_k_tokens),
            array_in("seq_lens", seq_lens),
            array_in("req_pool_indices", req_pool_indices),
            array_in("num_real_reqs", num_real_reqs),
            array_in("host_cache_locs", host_cache_locs),
            array_in("host_cache", host_cache),
            array_out("device_buffer", device_buffer),
            array_in("host_cache_v", host_cache_v),
            array_out("device_buffer_v", device_buffer_v),
            *_state(state),
            array_in("scratch_locs", scratch_locs),
            paged,
            array_out("out", out),
            array_out("miss_src", miss_src),
            array_out("miss_dst", miss_dst),
            array_out("miss_count", miss_count),
            array_out("unique_misses", unique_misses),
            array_out("unique_hits", unique_hits),
            flag("skip_io", skip_io),
            integer("sm_budget", sm_budget),
            *followers,
            stream_handle(stream, top_k_tokens),
        )
    except ValueError as error:
        rename(error, _OUT)
        raise
    return out


def swap_in_single(
    top_k_tokens,
    device_buffer_tokens,
    host_cache_locs,
    device_buffer_locs,
    host_cache,
    device_buffer,
    req_pool_indices,
    seq_lens,
    lru_slots,
    *,
    host_cache_v=None,
    device_buffer_v=None,
    num_real_reqs=None,
    miss_src=None,
    miss_dst=None,
    miss_count=None,
    sparse_block_size=1,
    layout="linear",
    skip_io=False,
    sm_budget=0,
    out=None,
    stream=None,
):
    """Swap-in of one step with exact LRU, in sglang's single-step state.

    top_k_tokens [B, K] int32, or with sparse_block_size n > 1 [B, K / n]: blocks of n tokens. device_buffer_tokens, device_buffer_locs
    [R, >=H+1] int32, column H the newest token; host_cache_locs [R, L] int64 (< 0: no host row); host_cache [Nh, ...] and device_buffer
    [Nd, ...] of rows of the same number of bytes, and a second pair that the same resolve moves; req_pool_indices, seq_lens [B] int32 or
    int64; lru_slots [R, H] int16, or int32 beyond 32767 slots: a permutation, oldest first. The tables and lru_slots are advanced in place.
    miss_src [>=B, >=K] int64, miss_dst (same) int32, miss_count [>=B] int32: the copies, for `replay_plan`.
    sm_budget: of the whole call; where the tables of a request need the shared memory of more SMs, it takes those.
    Returns the device rows [B, K] int32; -1 for tokens outside 0..seq_len-1 or without a host row. seq_len <= H: slot t holds token t.
    """
    if out is None:
        rows, entries = shape_of("top_k_tokens", top_k_tokens, 2)
        out = empty_like(top_k_tokens, (rows, _positions(entries * size("sparse_block_size", sparse_block_size))), "int32")
    arguments = dict(locals(), paged=_paged(layout), top_k_device_locs=array_out("out", out))
    try:
        _single("swap_in_single", **arguments)
    except ValueError as error:
        rename(error, _OUT)
        raise
    return out


def _single(
    op, *, top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer, top_k_device_locs,
    req_pool_indices, seq_lens, lru_slots, paged=False, item_size_bytes=_INFER, num_top_k=_INFER, hot_buffer_size=_INFER, host_cache_v=None,
    device_buffer_v=None, num_real_reqs=None, miss_src=None, miss_dst=None, miss_count=None, sparse_block_size=1, block_size=1, skip_io=False,
    sm_budget=0, stream=None, **_,
):  # fmt: skip
    """The arguments of a single step, by name; what else the caller has (`page_size`) changes nothing."""
    _hint(op, "block_size", block_size, 1024)
    sglangs = op.startswith("load_")  # its names keep its one row stride of both plan tensors
    if at_once("hisparse_swap_in_single", (
        top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer, host_cache_v, device_buffer_v,
        top_k_device_locs, req_pool_indices, seq_lens, lru_slots, item_size_bytes, num_top_k, hot_buffer_size, num_real_reqs, paged, miss_src, miss_dst,
        miss_count, sparse_block_size, skip_io, sm_budget, sglangs, op, stream,
    )):  # fmt: skip
        return
    function("hisparse_swap_in_single")(
        array_in("top_k_tokens", top_k_tokens), array_out("device_buffer_tokens", device_buffer_tokens),
        array_in("host_cache_locs", host_cache_locs), array_in("device_buffer_locs", device_buffer_locs), array_in("host_cache", host_cache),
        array_out("device_buffer", device_buffer), array_in("host_cache_v", host_cache_v), array_out("device_buffer_v", device_buffer_v),
        array_out("top_k_device_locs", top_k_device_locs), array_in("req_pool_indices", req_pool_indices), array_in("seq_lens", seq_lens),
        array_out("lru_slots", lru_slots), integer("item_size_bytes", item_size_bytes), integer("num_top_k", num_top_k),
        integer("hot_buffer_size", hot_buffer_size), array_in("num_real_reqs", num_real_reqs), paged, array_out("miss_src", miss_src),
        array_out("miss_dst", miss_dst), array_out("miss_count", miss_count), integer("sparse_block_size", sparse_block_size), flag("skip_io", skip_io),
        integer("sm_budget", sm_budget), sglangs, op, stream_handle(stream, top_k_tokens),
    )  # fmt: skip


def _list(name, x, array):
    """A tensor for each layer, from one or from a list."""
    items = list(x) if isinstance(x, (list, tuple)) else [x]
    if any(item is None for item in items):
        raise refusal(ValueError, f"{name}: expected a tensor for every layer, got none.")
    return [tensor(name, array(name, item)) for item in items]


def _layers(op, host_cache, device_buffer, host_cache_v, device_buffer_v, before=""):
    """The layers that a plan is replayed on, as a list for each kind of buffer."""
    given = {
        "host_cache": (host_cache, array_in), "device_buffer": (device_buffer, array_out),
        "host_cache_v": (host_cache_v, array_in), "device_buffer_v": (device_buffer_v, array_out),
    }  # fmt: skip
    lists = {name: _list(before + name, x, array) for name, (x, array) in given.items() if x is not None}  # what is given first, then what is missing
    for name in ("host_cache", "device_buffer"):
        if name not in lists:
            raise refusal(ValueError, f"{before}{name}: expected a tensor for every layer, got none.")
    hosts, devices, hosts_v, devices_v = (lists.get(name, []) for name in given)
    for name, x, n in [("device_buffer", devices, len(hosts)), ("host_cache_v", hosts_v, len(hosts)), ("device_buffer_v", devices_v, len(hosts_v))]:
        if len(x) != n and not (name == "host_cache_v" and not x):
            raise ValueError(f"{op}: {before}{name}: expected {n} layers, got {len(x)}.")
    return hosts, devices, hosts_v, devices_v


def replay_plan(
    miss_src,
    miss_dst,
    miss_count,
    host_cache,
    device_buffer,
    *,
    host_cache_v=None,
    device_buffer_v=None,
    num_real_reqs=None,
    layout="linear",
    skip_io=False,
    sm_budget=0,
    arrived=None,
    stream=None,
):
    """Replays rows 0..num_real_reqs-1 of a recorded miss plan on one follower layer, or on many (lists of buffers). Copies only.

    miss_src [>=B, M] int64 host rows, miss_dst (same) int32 device rows, miss_count [B] int32 (0 to M), as a swap wrote them; num_real_reqs [1]
    int32, None: all rows. host_cache [Nh, ...], device_buffer [Nd, ...]: rows of the same number of bytes, which may differ from layer to layer;
    host_cache_v, device_buffer_v: second pairs. A pair with a negative miss_dst is skipped; any other row outside, a negative miss_src with them, is a ValueError (on CUDA: skipped).
    arrived [one element a follower] int32, zeros before the first use: rows come one follower behind the other, and `await_follower` waits for one's, once before
    the next replay; on the CPU a sign that was not awaited is a ValueError. sm_budget: of the copies, which have those SMs to themselves. Returns None.
    """
    _replay("replay_plan", **dict(locals(), paged=_paged(layout)))


def _replay(
    op, *, miss_src, miss_dst, miss_count, num_real_reqs, host_cache, device_buffer, host_cache_v=None, device_buffer_v=None,
    item_size_bytes=_INFER, paged=False, skip_io=False, sm_budget=0, arrived=None, stream=None, **_,
):  # fmt: skip
    layers = _layers(op, host_cache, device_buffer, host_cache_v, device_buffer_v)
    function("hisparse_replay_plan")(
        array_in("miss_src", miss_src),
        array_in("miss_dst", miss_dst),
        array_in("miss_count", miss_count),
        array_in("num_real_reqs", num_real_reqs),
        *layers,
        integer("item_size_bytes", item_size_bytes),
        paged,
        flag("skip_io", skip_io),
        integer("sm_budget", sm_budget),
        op.startswith("copy_"),  # sglang's name keeps its one row stride of both plan tensors
        array_out("arrived", arrived),
        op,
        stream_handle(stream, miss_src),
    )


def await_follower(arrived, follower, *, stream=None):
    """What comes behind this in `stream` finds the rows of follower `follower` there, of a `replay_plan` that was given `arrived` [followers] int32.

    That replay may be in another stream and has been called before; each of its followers is awaited once before the next one. On a GPU one warp waits, so
    kernels of both streams must be able to run at the same time (within one CUDA graph: on branches of their own). A sign that does not come within 20
    seconds is a trap: the wait gives up, CUDA reports a launch failure at the next call, and the process can use that GPU no more. On the CPU, where
    calls are done when they return, a follower that has not arrived, or a sign that no replay has set, is a ValueError.
    """
    function("hisparse_await_follower")(array_out("arrived", arrived), integer("follower", follower), stream_handle(stream, arrived))


def transfer_paged(src, dst, src_indices, dst_indices, *, sm_budget=0, stream=None):
    """Copies DSv4 rows: for every layer, row src_indices[i] of src[layer] goes to row dst_indices[i] of dst[layer].

    src, dst: one buffer of whole 37440-byte pages (64 rows), dense, or a list, one a layer; src_indices, dst_indices [N] int32 or int64, of one
    dtype. A destination named twice, or that is also a source, is undefined. sm_budget: of the copies.
    """
    src, dst = _list("src", src, array_in), _list("dst", dst, array_out)
    if len(src) != len(dst):
        raise ValueError(f"transfer_paged: dst: expected {len(src)} layers, got {len(dst)}.")
    function("hisparse_transfer_paged")(
        src, dst, array_in("src_indices", src_indices), array_in("dst_indices", dst_indices), integer("sm_budget", sm_budget),
        stream_handle(stream, src_indices),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ sglang's names


class HiSparseSpecState(NamedTuple):
    """State of sglang's speculative swap (H hot slots, R request slots, C scratch rows, Z hash size). A tuple or list of the four arrays in
    this order does too."""

    cache_index: Any
    cache_policy: Any
    scratch_locs: Any
    scratch_state: Any


describe(
    HiSparseSpecState,
    cache_index="[R, 2, Z] int64: two hash banks of slot << 32 | token",
    cache_policy="[R+1, H] int32: row 0 the packed clocks, row r+1 the epochs of request r's slots",
    scratch_locs="[R, C] int32: device rows that misses may land in when no hot slot is free",
    scratch_state="[R+1, >=max(4R, 5*S*K)] int32: counters (row 0; [0, r] is the last call's distinct misses) and workspace",
)


def new_spec_state(scratch_locs, hot, occurrences):
    """A fresh HiSparseSpecState around `scratch_locs` [R, C] int32: nothing indexed, all counters 0. occurrences = S * K."""
    requests = shape_of("scratch_locs", scratch_locs, 2)[0]
    if dtype_of(scratch_locs) != "int32":
        raise refusal(ValueError, f"scratch_locs: expected dtype int32, got {dtype_of(scratch_locs)}.")
    hot, occurrences = _below(size("hot", hot), "hot"), _below(size("occurrences", occurrences), "occurrences")
    index = empty_like(scratch_locs, (requests, 2, 1 << max(1, (2 * hot - 1).bit_length())), "int64")
    policy = empty_like(scratch_locs, (requests + 1, hot), "int32")
    columns = max(4 * requests, 5 * occurrences)
    workspace = empty_like(scratch_locs, (requests + 1, columns + columns % 2), "int32")
    index[...] = -1
    policy[...] = 0
    workspace[...] = -1
    workspace[0] = 0
    return HiSparseSpecState(index, policy, scratch_locs, workspace)


def load_cache_to_device_buffer_spec_mla(
    *,
    top_k_tokens,
    device_buffer_tokens,
    host_cache_locs,
    device_buffer_locs,
    host_cache,
    device_buffer,
    top_k_device_locs,
    req_pool_indices,
    seq_lens,
    state,
    num_real_reqs,
    miss_src=None,
    miss_dst=None,
    miss_count=None,
    strict_sglang=None,
    sm_budget=0,
    stream=None,
):
    """Resolves all speculative steps and swaps the distinct misses in, inside sglang's state tensors.

    top_k_tokens, top_k_device_locs [B, S, K] int32; device_buffer_tokens, device_buffer_locs [R, H+P] int32; host_cache_locs [R, L]
    int64; req_pool_indices [B] int64; seq_lens [B*S] int32; state: HiSparseSpecState; num_real_reqs [1] int32.
    Padded rows give 0. state.scratch_state[0, r] publishes all distinct misses, miss_count those that were served.
    strict_sglang: None keeps the documented contract (2 to 4 steps), True also the limits of sglang's compiled kernel, False lifts
    both. Errors carry sglang's texts: ValueError, and RuntimeError where sglang's C++ side checks. sm_budget: of the whole call; where the tables
    of a request need the shared memory of more SMs, it takes those.
    """
    limits = 0 if strict_sglang is None else 1 if flag("strict_sglang", strict_sglang) else 2
    cache_index, cache_policy, scratch_locs, scratch_state = group("state", state, HiSparseSpecState)
    if at_once("hisparse_swap_in_spec", (
        top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer, top_k_device_locs, req_pool_indices,
        seq_lens, cache_index, cache_policy, scratch_locs, scratch_state, num_real_reqs, miss_src, miss_dst, miss_count, limits, sm_budget, stream,
    )):  # fmt: skip
        return
    function("hisparse_swap_in_spec")(
        array_in("top_k_tokens", top_k_tokens), array_out("device_buffer_tokens", device_buffer_tokens),
        array_in("host_cache_locs", host_cache_locs), array_out("device_buffer_locs", device_buffer_locs), array_in("host_cache", host_cache),
        array_out("device_buffer", device_buffer), array_out("top_k_device_locs", top_k_device_locs),
        array_in("req_pool_indices", req_pool_indices), array_in("seq_lens", seq_lens), array_out("state.cache_index", cache_index),
        array_out("state.cache_policy", cache_policy), array_out("state.scratch_locs", scratch_locs),
        array_out("state.scratch_state", scratch_state), array_in("num_real_reqs", num_real_reqs), array_out("miss_src", miss_src),
        array_out("miss_dst", miss_dst), array_out("miss_count", miss_count), limits, integer("sm_budget", sm_budget),
        stream_handle(stream, top_k_tokens),
    )  # fmt: skip


def load_cache_to_device_buffer_mla(
    top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer, top_k_device_locs, req_pool_indices,
    seq_lens, lru_slots, item_size_bytes, num_top_k, hot_buffer_size, page_size=1, block_size=256, num_real_reqs=None, miss_src=None,
    miss_dst=None, miss_count=None, skip_io=False, *, sm_budget=0, stream=None,
):  # fmt: skip
    """Single-step swap-in with exact LRU over linear buffers.

    top_k_tokens, top_k_device_locs [B, K] int32; device_buffer_tokens, device_buffer_locs [R, >=H+1] int32, column H the newest
    token; host_cache_locs [R, L] int64; lru_slots [R, H] int16, oldest first; req_pool_indices, seq_lens [B] int32 or int64.
    num_top_k = K, hot_buffer_size = H. seq_len <= H: slot t holds token t. Padded rows and invalid tokens give -1. page_size is accepted and ignored, block_size (1 to
    1024) is a hint. skip_io moves no bytes. sm_budget: as in `swap_in_single`.
    """
    _single("load_cache_to_device_buffer_mla", **locals())


def load_cache_to_device_buffer_dsv4_mla(
    top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer, top_k_device_locs, req_pool_indices,
    seq_lens, lru_slots, item_size_bytes, num_top_k, hot_buffer_size, page_size=1, block_size=256, num_real_reqs=None, miss_src=None,
    miss_dst=None, miss_count=None, skip_io=False, *, sm_budget=0, stream=None,
):  # fmt: skip
    """`load_cache_to_device_buffer_mla` over buffers of DSv4 pages (64 rows of 576 + 8 bytes in 37440 bytes); positions are compressed ones."""
    _single("load_cache_to_device_buffer_dsv4_mla", **dict(locals(), paged=True))


def load_blocks_to_device_buffer_mha(
    top_k_blocks, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache_k, host_cache_v, device_buffer_k, device_buffer_v,
    top_k_device_locs, req_pool_indices, seq_lens, lru_slots, item_size_bytes, hot_buffer_size, sparse_block_size, page_size=1, block_size=256,
    num_real_reqs=None, skip_io=False, *, sm_budget=0, stream=None,
):  # fmt: skip
    """Single-step swap-in of blocks of sparse_block_size tokens with one K and one V row a token.

    top_k_blocks [B, n] int32; top_k_device_locs [B, >= n * sparse_block_size] int32; host_cache_k and host_cache_v [Nh, ...], device_buffer_k and
    device_buffer_v [Nd, ...], host rows item_size_bytes apart; the rest, sm_budget too, as `load_cache_to_device_buffer_mla`.
    """
    op = "load_blocks_to_device_buffer_mha"
    arguments = locals()
    _hint(op, "sparse_block_size", sparse_block_size)
    blocks = shape_of("top_k_blocks", top_k_blocks, 2)[1]
    tokens = blocks * sparse_block_size
    if integer("hot_buffer_size", hot_buffer_size) < tokens:
        raise ValueError(f"hot_buffer_size ({hot_buffer_size}) must be >= selected tokens ({tokens})")
    k_stride, v_stride = _row_pitch("host_cache_k", host_cache_k), _row_pitch("host_cache_v", host_cache_v)
    if not k_stride == v_stride == integer("item_size_bytes", item_size_bytes):
        raise ValueError(
            f"K/V token strides must equal item_size_bytes: k_stride={k_stride}, v_stride={v_stride}, item_size_bytes={item_size_bytes}"
        )
    _single(
        **arguments, top_k_tokens=array_in("top_k_blocks", top_k_blocks), host_cache=array_in("host_cache_k", host_cache_k),
        device_buffer=array_out("device_buffer_k", device_buffer_k), num_top_k=blocks,
    )  # fmt: skip


def _row_pitch(name, x):
    """Bytes from one row to the next."""
    if not shape_of(name, x):
        raise refusal(ValueError, f"{name}: expected at least one dimension, got shape ().")
    if hasattr(x, "element_size"):  # torch
        with undispatched(x):
            return x.stride(0) * x.element_size()
    if hasattr(x, "strides") and hasattr(x, "nbytes"):  # NumPy, CuPy
        return x.strides[0]
    t = tensor(name, array_in(name, x))
    return t.strides[0] * t.dtype.itemsize


def copy_cache_planned_mla(
    *, miss_src, miss_dst, miss_count, num_real_reqs, host_cache, device_buffer, item_size_bytes, num_blocks=4, block_size=1024,
    is_dsv4_layout=False, skip_io=False, sm_budget=0, stream=None,
):  # fmt: skip
    """Replays rows 0..num_real_reqs-1 (None: all) of a recorded miss plan for a shared-index layer.

    is_dsv4_layout: the buffers hold DSv4 pages. num_blocks (>= 1) and block_size (1 to 1024) are hints. sm_budget: of the copies.
    """
    op = "copy_cache_planned_mla"
    arguments = dict(locals(), paged=flag("is_dsv4_layout", is_dsv4_layout))
    _hint(op, "num_blocks", num_blocks)
    _hint(op, "block_size", block_size, 1024)
    _replay(**arguments)


def transfer_cache_dsv4_mla(src_ptrs, dst_ptrs, src_indices, dst_indices, block_size=1024, *, sm_budget=0, stream=None):
    """Copies DSv4 rows between buffers given by address: src_ptrs, dst_ptrs [layers] uint64; src_indices, dst_indices [N] int64.

    Addresses cannot be checked beyond being non-zero, indices beyond being >= 0. N = 0 does nothing. block_size (1 to 1024) is a hint.
    sm_budget: of the copies.
    """
    _hint("transfer_cache_dsv4_mla", "block_size", block_size, 1024)
    function("hisparse_transfer_paged_pointers")(
        array_in("src_ptrs", src_ptrs),
        array_in("dst_ptrs", dst_ptrs),
        array_in("src_indices", src_indices),
        array_in("dst_indices", dst_indices),
        integer("sm_budget", sm_budget),
        stream_handle(stream, src_indices),
    )


# ------------------------------------------------------------------------------------------------------- Coordinator


def _sequence(name, xs):
    if not isinstance(xs, (list, tuple)) and not getattr(xs, "shape", ()):
        raise refusal(TypeError, f"{name}: expected a sequence with an integer or None for each layer, got {kind_of(xs)}.")
    return xs


class Coordinator:
    """The life of requests around the swap: admission, staging to the host, verify windows, acceptance, followers, freeing.

    host_cache, device_buffer: one array a local layer, [Nh, ...] and [Nd, ...]; host_cache_v, device_buffer_v: second pairs (lists with
    None where a layer has one pair). The coordinator keeps them alive. requests: request slots; hot: hot slots a request (at least
    top_k); window: most positions of a verify window; tail: ring of tail slots (0: 2 * window); scratch: rows a request for calls that
    want more than `hot` rows at once; context: most positions of a request; page_size: rows by which host rows are taken and hot slots
    grow; device_rows, host_rows: size of the pools (0: whole buffers); first_layer: global id of local layer 0; anchor_of: per local layer the
    global id of the layer whose selection it uses (None: its own), a preceding anchor.

    A step: ``prepare_verify`` -> per layer ``write`` (or write the returned device rows), ``swap`` at an anchor or ``follow`` at a
    follower -> ``accept``. Errors are raised before anything changes: TypeError for an argument of the wrong kind, ValueError for misuse, RuntimeError when a pool has
    no rows left.
    Calls of several threads take turns; in which order is theirs.

    Device buffers on the CPU or all on one GPU, with pinned host caches. On a GPU the tables lie in its memory (allocated here), every
    call enqueues its work on `stream` (default: the framework's current one) and returns without waiting, and S * K of a swap is at most
    hot + scratch. A step whose accepted counts only the GPU has: ``begin_step`` on the host; ``open_step``, swaps, followers, attention and
    ``close_step``, which can be captured in a CUDA graph and replayed with other contents; ``end_step`` whenever the host has read the
    counts. The calls of one Coordinator are ordered by the caller: on one stream, or by events. sm_budget: of each swap and
    of each copy for followers.
    """

    STATES = ("free", "active", "verifying", "retracted")
    _NAMES = {"top_k_device_locs": "out", "round_of": "out", "locs": "out", "req_pool_indices": "requests"}

    def __init__(
        self,
        host_cache,
        device_buffer,
        *,
        requests,
        hot,
        window,
        context,
        host_cache_v=None,
        device_buffer_v=None,
        tail=0,
        scratch=0,
        top_k=0,
        page_size=64,
        device_rows=0,
        host_rows=0,
        layout="linear",
        first_layer=0,
        anchor_of=None,
        sm_budget=0,
        stream=None,
    ):
        hosts, devices = _list("host_cache", host_cache, array_in), _list("device_buffer", device_buffer, array_out)
        if len(hosts) != len(devices):
            raise ValueError(f"Coordinator: device_buffer: expected {len(hosts)} layers, got {len(devices)}.")
        for name, x in (("host_cache", host_cache), ("host_cache_v", host_cache_v)):
            for item in x if isinstance(x, (list, tuple)) else [x]:
                array_out(name, item)  # backups write it
        second = []
        for name, given in (("host_cache_v", host_cache_v), ("device_buffer_v", device_buffer_v)):
            if not isinstance(given, (list, tuple, type(None))):
                raise refusal(TypeError, f"{name}: expected a list with an array or None for each layer, got {kind_of(given)}.")
            if given is not None and len(given) != len(hosts):
                raise ValueError(f"Coordinator: {name}: expected {len(hosts)} layers, got {len(given)}.")
            second.append([None if x is None else tensor(name, array_out(name, x)) for x in given or []])
        sizes = dict(requests=requests, hot=hot, window=window, tail=tail, scratch=scratch, context=context, top_k=top_k, page_size=page_size,
                     device_rows=device_rows, host_rows=host_rows, sm_budget=sm_budget, first_layer=first_layer)  # fmt: skip
        sizes = {name: integer(name, x) for name, x in sizes.items()}
        self._like = device_buffer[0] if isinstance(device_buffer, (list, tuple)) and device_buffer else device_buffer
        self._window = sizes["window"]
        self._shape = (sizes["requests"], sizes["hot"] + (sizes["tail"] or 2 * sizes["window"]))
        anchors = [sizes["first_layer"] + i if a is None else a for i, a in enumerate(_sequence("anchor_of", [] if anchor_of is None else anchor_of))]
        rest = list(sizes.values()), _paged(layout), integers("anchor_of", anchors)
        tables = None
        if is_cuda(self._like):
            tables = tensor("tables", empty_like(self._like, (int(function("hisparse_coordinator_table_bytes")(*rest, len(hosts))),), "uint8"))
        self._handle = function("hisparse_coordinator_new")(hosts, devices, *second, *rest, tables, stream_handle(stream, self._like))

    def __getattr__(self, name):
        if name in ("_handle", "_like", "_window", "_shape"):
            raise refusal(TypeError, "self: expected a Coordinator that was made, got one whose __init__ has not run.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _call(self, name, *arguments, **numbers):
        """The export `name`: handle, integers by name, then the rest."""
        numbers = [integer(n, x) for n, x in numbers.items()]
        try:
            return function("hisparse_coordinator_" + name)(self._handle, *numbers, *arguments)
        except ValueError as error:
            rename(error, self._NAMES)
            raise

    def _stream(self, stream):
        return stream_handle(stream, self._like)

    # admission
    def can_admit(self, tokens):
        """Would `admit` of so many positions (tokens) succeed?"""
        return bool(self._call("can_admit", tokens=tokens))

    def admit(self, request, tokens, *, stream=None):
        """Takes the free request slot with its device rows and host rows for `tokens` positions. Its length is 0."""
        self._call("admit", self._stream(stream), request=request, tokens=tokens)

    def reserve(self, request, count, *, stream=None):
        """Host rows for `count` more positions."""
        self._call("reserve", self._stream(stream), request=request, count=count)

    def stage(self, layer, request, position, rows, rows_v=None, *, stream=None):
        """Writes rows [count, ...] of one layer to the host rows of position, position+1, ...; visible after `append`; rows_v for a second pair."""
        self._call("stage", array_in("rows", rows), array_in("rows_v", rows_v), self._stream(stream), layer=layer, request=request, position=position)

    def append(self, request, count, *, source="staged", stream=None):
        """Commits `count` positions that every layer has staged (source="staged") or that others wrote to the host rows (source="host")."""
        if not isinstance(source, str) or source not in ("staged", "host"):
            raise ValueError(f"Coordinator: source: expected 'staged' or 'host', got {source!r}.")
        self._call("append", source == "host", self._stream(stream), request=request, count=count)

    def host_row(self, request, position):
        """Host row of a committed or reserved position."""
        return int(self._call("host_row", request=request, position=position))

    def host_pages(self, request):
        """The host pages of a request, in order: position p has host row ``pages[p // page_size] * page_size + p % page_size``."""
        return [int(p) for p in self._call("host_pages", request=request)]

    # a step
    def prepare_verify(self, requests, widths, *, out=None, stream=None):
        """Opens a window of widths[i] positions at the end of each request. Returns their device rows [B, max width] int32, -1 beyond a width."""
        requests, widths = integers("requests", requests), integers("widths", widths)
        if out is None:
            width = max(widths, default=0)
            out = empty_like(self._like, (len(requests), width if 0 <= width <= self._window else 0), "int32")  # others are refused
        self._call("prepare_verify", requests, widths, array_out("out", out), self._stream(stream))
        return out

    def write(self, layer, request, j, row, row_v=None, *, stream=None):
        """Copies a row (and row_v of a second pair) into window position j of one layer."""
        self._call("write", array_in("row", row), array_in("row_v", row_v), self._stream(stream), layer=layer, request=request, j=j)

    def swap(
        self, layer, top_k_tokens, seq_lens, requests, *, num_real_reqs=None, unique_misses=None, unique_hits=None, skip_io=False, round=0,
        out=None, stream=None,
    ):  # fmt: skip
        """Swap of an anchor layer: top_k_tokens [B, S, K] or [B, K] int32, seq_lens [B, S] or [B], requests [B] -> device rows (as
        `swap_in`); round: which of `plan_rounds`."""
        if out is None:
            out = empty_like(top_k_tokens, shape_of("top_k_tokens", top_k_tokens), "int32")
        self._call(
            "swap", array_in("top_k_tokens", top_k_tokens), array_in("seq_lens", seq_lens), array_in("requests", requests),
            array_in("num_real_reqs", num_real_reqs), array_out("out", out), array_out("unique_misses", unique_misses),
            array_out("unique_hits", unique_hits), flag("skip_io", skip_io), self._stream(stream), layer=layer, round=round,
        )
        return out

    def follow(self, layer, *, round=0, stream=None):
        """The copies of its anchor's swap (of that round, in order, once each) for a follower layer; the anchor's device rows are then valid
        in it too. They stay owed whatever becomes of other requests; what is still owed at the anchor's next swap is copied then."""
        self._call("follow", self._stream(stream), layer=layer, round=round)

    def follow_all(self, anchor, *, round=0, stream=None):
        """`follow` of that round for all followers of an anchor layer, in one launch."""
        self._call("follow_all", self._stream(stream), anchor=anchor, round=round)

    def plan_rounds(self, layer, top_k_tokens, seq_lens, requests, *, out=None):
        """Cuts the steps into rounds whose positions fit a request's rows at once: (number of rounds, round of each step [B, S] int32).
        top_k_tokens, seq_lens and requests as in `swap`."""
        if out is None:
            shape = shape_of("top_k_tokens", top_k_tokens)
            out = empty_like(top_k_tokens, shape[:2] if len(shape) == 3 else (*shape[:1], 1), "int32")
        rounds = self._call(
            "plan_rounds", array_in("top_k_tokens", top_k_tokens), array_in("seq_lens", seq_lens), array_in("requests", requests),
            array_out("out", out), layer=layer,
        )
        return int(rounds), out

    def accept(self, requests, accepted, *, stream=None):
        """Ends the windows: the first accepted[i] rows are backed up to the host and committed, the others forgotten (0: all rejected)."""
        self._call("accept", integers("requests", requests), integers("accepted", accepted), self._stream(stream))

    # a step whose counts are where the tables are
    def begin_step(self, requests, *, stream=None):
        """Host rows and hot slots for `window` positions beyond every one that each request may have when all its steps are done. Several
        steps of a request may be under way."""
        self._call("begin_step", integers("requests", requests), self._stream(stream))

    def open_step(self, requests, widths, *, num_real_reqs=None, out=None, stream=None):
        """Opens windows of widths [B] at the lengths of requests [B] (int32 or int64 arrays). out [B, >= 1] int32: their device rows."""
        self._call("open_step", array_in("requests", requests), array_in("widths", widths), array_in("num_real_reqs", num_real_reqs), array_out("out", out), self._stream(stream))
        return out

    def close_step(self, requests, widths, accepted, *, num_real_reqs=None, stream=None):
        """Ends the windows of widths [B]: the first accepted [B] (int32 or int64, 0 to width) rows are backed up and committed, the others forgotten."""
        self._call("close_step", array_in("requests", requests), array_in("widths", widths), array_in("num_real_reqs", num_real_reqs), array_in("accepted", accepted), self._stream(stream))

    def end_step(self, requests, accepted):
        """Tells the host what the earliest step of each request that has not ended accepted. Enqueues nothing."""
        self._call("end_step", integers("requests", requests), integers("accepted", accepted))

    # end
    def finish(self, request, *, stream=None):
        """Frees everything of a request."""
        self._call("finish", self._stream(stream), request=request)

    def abort(self, request, *, stream=None):
        """Frees everything of a request in any state, any number of times."""
        self._call("abort", self._stream(stream), request=request)

    def retract(self, request, *, stream=None):
        """Gives the device rows back and keeps the host rows; an open window is lost."""
        self._call("retract", self._stream(stream), request=request)

    def resume(self, request, *, stream=None):
        """Device rows again for a retracted request."""
        self._call("resume", self._stream(stream), request=request)

    # looking
    def state(self, request):
        """"free", "active", "verifying" or "retracted"."""
        return self.STATES[self._call("request", request=request)[0]]

    def length(self, request):
        """Committed positions."""
        return int(self._call("request", request=request)[1])

    @property
    def max_length(self):
        """Most positions that a request may ever have; device rows do not bound it."""
        return int(self._call("totals")[0])

    @property
    def free_device_rows(self):
        """Device rows that belong to no request."""
        return int(self._call("totals")[1])

    @property
    def free_host_rows(self):
        """Host rows that belong to no request."""
        return int(self._call("totals")[2])

    def stats(self):
        """Totals since construction: swaps, unique_hits, unique_misses, unserved, bytes_to_device, bytes_to_host. On a GPU only swaps (padded
        rows too) and bytes_to_host: the rest is in the arrays that swaps are given."""
        names = ("swaps", "unique_hits", "unique_misses", "unserved", "bytes_to_device", "bytes_to_host")
        return dict(zip(names, (int(n) for n in list(self._call("totals"))[3:])))

    def tables(self, layer, *, stream=None):
        """Copies of (slot_tokens, slot_locs) [R, H+P] of the layer's group: which position each slot holds, and its device row."""
        out = (empty_like(self._like, self._shape, "int32"), empty_like(self._like, self._shape, "int32"))
        self._call("tables", *out, self._stream(stream), layer=layer)
        return out
