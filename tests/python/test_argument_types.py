"""An argument of the wrong kind: whichever function, whichever argument, the error names it and says what was expected and what came."""

import inspect
import re
import types

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi
from calls import ALL_CALLS, CALLS, leaves, operation, replace

import specstate
from specstate import draft_kv, hisparse, kda
from specstate._supports import OPERATIONS

class Plain:
    """An array that has what DLPack asks for and no more."""

    def __init__(self, x):
        self.x, self.dtype = x, x.dtype

    @property
    def shape(self):
        return self.x.shape

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


WRONG = [object(), "x", 1.5j, {}, [object()]]
WORDS = [np.array("x"), np.array(["x", "y"])]  # whose comparisons and iterations raise
# Accepted and ignored, for the sake of sglang's signatures.
IGNORED = {"page_size", "cache_steps", "match_cutedsl_decode", "device"}

MAY_BE_NONE = {("verify_rejection", "draft_probs"), ("copy_cache_planned_mla", "num_real_reqs"), ("materialize_into_pool", "slot_mapping")}


def refuses(call, name, shown=None):
    """`call` raises, and the text names `name`."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    text = str(raised.value)
    assert re.match(r"[A-Za-z]\w+: ", text) or "HiSparse" in text or "peculative" in text, text  # the function, or a text of sglang's
    assert re.search(rf"\b{shown or name}\b", text) and "expected" in text and "got" in text, f"{name}: {text}"


def parameters(f):
    return [p for p in inspect.signature(f).parameters.values() if p.name not in IGNORED | {"self"} and p.kind is not p.VAR_KEYWORD]


def test_every_operation_has_a_call():
    made = {"Coordinator", "FusedKVMaterializeHelper", "KvProjection", "materialize_workspace_bytes", "new_spec_state", "new_swap_state"}  # below
    assert set(ALL_CALLS) | made == {n for names in OPERATIONS.values() for n in names}


@pytest.mark.parametrize("name", ALL_CALLS)
def test_operations(name):
    f, make = operation(name), ALL_CALLS[name]
    f(**make())  # it is a valid call
    for p in parameters(f):
        for wrong in WRONG:
            refuses(lambda: f(**{**make(), p.name: wrong}), p.name)
        if p.default is not p.empty or (name, p.name) in MAY_BE_NONE:
            continue
        # None stands for "not given". Some of sglang's texts spell a name with spaces.
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            f(**{**make(), p.name: None})
        assert p.name in str(raised.value).lower().replace(" ", "_").replace("a_log", "A_log"), f"{p.name}: {raised.value}"


def test_numbers_and_flags():
    """What is a number or an integer of another library is taken; half an integer, a word and a number as a flag are not."""
    mla, call = hisparse.load_cache_to_device_buffer_mla, ALL_CALLS["load_cache_to_device_buffer_mla"]
    mla(**{**call(), "item_size_bytes": np.int32(16), "hot_buffer_size": np.array(8)})
    for name in ("item_size_bytes", "num_top_k", "hot_buffer_size", "block_size"):
        refuses(lambda: mla(**{**call(), name: 16.0}), name)
        refuses(lambda: mla(**{**call(), name: 2**64}), name)
    kda.verify(**ALL_CALLS["verify"](), lower_bound=np.float32(-5), scale=1, l2norm=np.True_)
    for name in ("lower_bound", "onorm_eps", "scale", "softplus_beta"):
        refuses(lambda: kda.verify(**{**ALL_CALLS["verify"](), name: "-5"}), name)
    for name in ("l2norm", "exact", "update_state", "round_before_norm", "null_from_zero"):
        refuses(lambda: kda.verify(**{**ALL_CALLS["verify"](), name: 0.5}), name)
    for name in ("k_scale", "v_scale"):
        refuses(lambda: draft_kv.materialize_into_pool(**{**ALL_CALLS["materialize_into_pool"](), name: "1"}), name)


def test_groups():
    """rings, state and out: too few, too many, none, or something else."""
    call = ALL_CALLS["fold"]
    for rings in (None, call()["rings"][:3], (*call()["rings"], None), call()["state"], 5):
        refuses(lambda: kda.fold(**{**call(), "rings": rings}), "rings")
    for name, key in (("swap_in", "state"), ("reset_swap_state", "state"), ("load_cache_to_device_buffer_spec_mla", "state")):
        for state in (None, ALL_CALLS[name]()[key][:3], np.zeros(4)):
            refuses(lambda: operation(name)(**{**ALL_CALLS[name](), key: state}), key)
    for name in ("verify_greedy", "verify_rejection"):
        make = ALL_CALLS[name]
        for out in (make()["out"][:1], (*make()["out"], None), make()["out"][1], 5):
            refuses(lambda: operation(name)(**{**make(), "out": out}), "out")


def test_helpers_and_supports():
    locs = np.arange(12, dtype=np.int32).reshape(2, 6)
    for f, good in (
        (hisparse.new_swap_state, dict(slot_locs=locs, hot=4, context=9)),
        (hisparse.new_spec_state, dict(scratch_locs=locs, hot=4, occurrences=8)),
        (draft_kv.KvProjection, dict(kv_weight=np.ones((1, 4, 8), np.float32), kv_bias=None)),
    ):
        f(**good)
        for p in parameters(f):
            for wrong in [*WRONG, *([-1] if isinstance(good[p.name], int) else [])]:
                refuses(lambda: f(**{**good, p.name: wrong}), p.name)
    for wrong in [*WRONG, 5, None]:
        refuses(lambda: specstate.supports(wrong), "function_name")


def test_install():
    from specstate import sglang

    for wrong in [*WRONG, *WORDS, 5]:
        refuses(lambda: sglang.install(only=wrong), "only")
    for wrong in [*WRONG, *WORDS]:
        refuses(lambda: sglang.install(only="kda", strict=wrong), "strict")


COORDINATOR = dict(host_cache=[np.zeros((64, 8), np.uint8)], device_buffer=[np.zeros((64, 8), np.uint8)], requests=2, hot=8, window=2, context=20)
INTEGERS = {"tokens", "request", "count", "position", "layer", "anchor", "j", "round"}


def test_coordinator():
    for p in parameters(hisparse.Coordinator):
        for wrong in WRONG + WORDS:
            refuses(lambda: hisparse.Coordinator(**{**COORDINATOR, p.name: wrong}), p.name)
    c = hisparse.Coordinator(**COORDINATOR)
    ids = np.zeros((1, 1), np.int32)
    good = dict(requests=[0], widths=[1], accepted=[1], source="staged", skip_io=False, rows=ids, row=ids, top_k_tokens=ids, seq_lens=ids[0])
    for name, f in inspect.getmembers(c, inspect.ismethod):
        if name.startswith("_"):
            continue
        filled = {p.name: 0 if p.name in INTEGERS else good.get(p.name) for p in parameters(f)}
        if name in ("swap", "plan_rounds", "open_step", "close_step"):
            filled["requests"] = ids[0]
        if name in ("open_step", "close_step"):
            filled |= {key: ids[0] for key in ("widths", "accepted") if key in filled}
        for p in parameters(f):
            for wrong in WRONG + WORDS:
                refuses(lambda: f(**{**filled, p.name: wrong}), p.name)


class Stream:
    """Not one: it raises whatever it is asked for."""

    @property
    def cuda_stream(self):
        raise RuntimeError("no stream")


def test_streams():
    """An integer of any library or an object with a handle; what else is there is refused by name, whatever it says itself."""
    ids = np.ones((2, 4), np.int32)
    for good in (0, np.int64(0), True, types.SimpleNamespace(ptr=7), types.SimpleNamespace(__cuda_stream__=lambda: (0, 7)), types.SimpleNamespace(__cuda_stream__=(0, 7))):
        specstate.accept.verify_greedy(ids, ids, stream=good)
    for wrong in (
        "0", 1.5, Stream(), types.SimpleNamespace(cuda_stream="x"), types.SimpleNamespace(__cuda_stream__=lambda: 3), types.SimpleNamespace(__cuda_stream__=(0,)),
    ):  # fmt: skip
        refuses(lambda: specstate.accept.verify_greedy(ids, ids, stream=wrong), "stream")


def test_sizes_that_no_call_takes():
    """Refused by name before anything of that size is asked of the framework."""
    locs, single = np.zeros((1, 4), np.int32), {**CALLS["swap_in_single"](), "out": None}
    for wrong in (2**31, 2**40, 2**62, -1):
        refuses(lambda: hisparse.new_swap_state(locs, 2, wrong), "context")
        refuses(lambda: hisparse.new_spec_state(locs, wrong, 4), "hot")
        refuses(lambda: hisparse.new_spec_state(locs, 2, wrong), "occurrences")
        with pytest.raises(ValueError, match="sparse_block_size: expected|must be >= selected tokens"):  # sglang's text
            hisparse.swap_in_single(**{**single, "sparse_block_size": wrong})


def test_a_packed_projection_has_its_bias():
    call = CALLS["materialize_into_pool"]()
    packed = draft_kv.KvProjection(call["kv_weight"])
    refuses(lambda: draft_kv.materialize_into_pool(**{**call, "kv_weight": packed, "kv_bias": np.zeros((2, 16), np.float32)}), "kv_bias")


class OddShape(Plain):
    @property
    def shape(self):
        return (2, "x")


class OddDevice(Plain):
    def __dlpack_device__(self):
        return ("a", None)


def test_shapes_and_devices_that_are_none():
    ids = np.ones((2, 4), np.int32)
    refuses(lambda: specstate.accept.verify_greedy(OddShape(ids), ids), "candidates")
    refuses(lambda: draft_kv.KvProjection(OddDevice(ids)), "kv_weight")


def test_integers_of_a_coordinator():
    """Far outside, on either side: refused by name, and nothing of that size is allocated first."""
    far = (-1, -(2**63), 2**63 - 1, 2**40)
    for name in ("requests", "hot", "window", "context", "tail", "scratch", "top_k", "page_size", "device_rows", "host_rows", "first_layer"):
        for wrong in far:
            refuses(lambda: hisparse.Coordinator(**{**COORDINATOR, name: wrong}), "hot" if name == "top_k" and wrong > 0 else name)
    c = hisparse.Coordinator(**COORDINATOR)
    c.admit(0, 4)
    row, ids = np.zeros((1, 8), np.uint8), np.zeros((1, 1), np.int32)
    for wrong in far:
        refuses(lambda: c.admit(1, wrong), "tokens")
        refuses(lambda: c.admit(wrong, 1), "request")
        refuses(lambda: c.reserve(0, wrong), "count")
        refuses(lambda: c.append(0, wrong), "count")
        refuses(lambda: c.append(0, wrong, source="host"), "count")
        refuses(lambda: c.stage(0, 0, wrong, row), "position")
        refuses(lambda: c.stage(wrong, 0, 0, row), "layer")
        refuses(lambda: c.host_row(0, wrong), "position")
        refuses(lambda: c.prepare_verify([0], [wrong]), "widths")
        refuses(lambda: c.prepare_verify([wrong], [1]), "request")
        refuses(lambda: c.swap(0, ids, ids[0], ids[0], round=wrong), "round")
        refuses(lambda: c.tables(wrong), "layer")
    assert c.length(0) == 0 and c.state(1) == "free"
    c.append(0, 4, source="host")
    c.prepare_verify([0], [1])
    for wrong in far:
        refuses(lambda: c.accept([0], [wrong]), "accepted")
        refuses(lambda: c.write(0, 0, wrong, row[0]), "j")


def test_shapes_are_checked_before_contents():
    """What the arguments hold is looked at after all of them fit, so the call says what `supports` says."""
    plan, sampled, pools = CALLS["plan_verify_lengths"](), CALLS["verify_rejection"](), CALLS["materialize_into_pool"]()
    for name, call, argument in (
        ("plan_verify_lengths", {**plan, "confidences": plan["confidences"] + 2, "out": np.zeros(3, np.int32)}, "out"),
        ("plan_verify_lengths", {**plan, "max_lens": -plan["max_lens"], "out": np.zeros(2, np.int64)}, "out"),
        ("verify_rejection", {**sampled, "uniforms": sampled["uniforms"] - 2, "verify_lens": np.ones(3, np.int32)}, "verify_lens"),
        ("materialize_into_pool", {**pools, "eps": -pools["eps"], "positions": np.arange(4)}, "positions"),
        ("materialize_into_pool", {**pools, "k_scale": np.zeros(2, np.float32), "v_pool": pools["v_pool"][..., :0]}, "v_pool"),
        ("fused_norm_rope_stacked", {**CALLS["fused_norm_rope_stacked"](), "eps": np.full(2, np.nan, np.float32), "positions": np.arange(4)}, "positions"),
        ("verify_greedy", {**CALLS["verify_greedy"](), "verify_lens": np.full(2, 9, np.int32), "out": (np.zeros(2, np.int32), np.zeros(2, np.int32))}, "out"),
    ):
        refuses(lambda: operation(name)(**call), argument)
        with pytest.raises(ValueError) as raised:
            operation(name)(**call)
        assert specstate.supports(name, **call) == (False, str(raised.value))


def helper_arguments(own_rotary=False):
    r = np.random.default_rng(0).standard_normal
    rotary, own = (types.SimpleNamespace(rotary_dim=8, is_neox_style=True, cos_sin_cache=np.ones((16, 8), np.float32)) for _ in range(2))
    attention = types.SimpleNamespace(
        num_kv_heads=1, head_dim=8, q_size=8, kv_size=8, rotary_emb=own if own_rotary else rotary,
        qkv_proj=types.SimpleNamespace(weight=r((24, 12)).astype(np.float32), bias=None),
        k_norm=types.SimpleNamespace(weight=np.ones(8, np.float32), variance_epsilon=1e-6),
    )  # fmt: skip
    return dict(layers=[types.SimpleNamespace(self_attn=attention)], rotary_emb=rotary, num_kv_heads=1, head_dim=8, device="cpu")


def test_materialize_helper():
    good = helper_arguments()
    for name in ("layers", "num_kv_heads", "head_dim", "max_position_hint"):
        for wrong in WRONG:
            refuses(lambda: draft_kv.FusedKVMaterializeHelper(**{**good, name: wrong}), name)
    helper = draft_kv.FusedKVMaterializeHelper(**good)
    call = dict(ctx_hidden=np.ones((3, 12), np.float32), positions=np.arange(3), write_layer_kv=lambda *_: None)
    helper.materialize(**call)
    for name in call:
        for wrong in WRONG:
            refuses(lambda: helper.materialize(**{**call, name: wrong}), name)


@pytest.mark.parametrize("own_rotary", [False, True])
@pytest.mark.parametrize("path", [
    "num_kv_heads", "head_dim", "q_size", "kv_size", "rotary_emb.rotary_dim", "rotary_emb.is_neox_style", "rotary_emb.cos_sin_cache", "qkv_proj.weight",
    "qkv_proj.bias", "k_norm.weight", "k_norm.variance_epsilon",
])  # fmt: skip
def test_what_a_helpers_layers_hold(path, own_rotary):
    """Whatever attribute of a layer is of the wrong kind, the error names it."""
    for wrong in [*WRONG, 1.5, float("nan"), np.zeros(3), np.zeros((24, 12), np.int32), np.zeros((2, 3, 4), np.float32)]:
        if path == "k_norm.variance_epsilon" and isinstance(wrong, float) and wrong == 1.5:
            continue
        call = helper_arguments(own_rotary)
        *owners, last = path.split(".")
        owner = call["layers"][0].self_attn
        for name in owners:
            owner = getattr(owner, name)
        setattr(owner, last, wrong)

        def used():
            draft_kv.FusedKVMaterializeHelper(**call).materialize(np.ones((3, 12), np.float32), np.arange(3), lambda *_: None)

        refuses(used, last, f"({last}|rotary_emb)")


def test_arrays_that_dlpack_cannot_say():
    """Fields of structured arrays that step by parts of an element, long doubles; streams of more than 64 bits."""
    field = np.zeros((2, 3), [("a", "i4"), ("b", "i1")])["a"]
    for odd in (field, np.zeros((2, 3), np.longdouble), np.zeros((2, 3), np.clongdouble)):
        call = dict(candidates=odd, target_argmax=np.zeros((2, 3), np.int32))
        with pytest.raises(ValueError, match="^verify_greedy: candidates: expected .*, got ") as raised:
            specstate.accept.verify_greedy(**call, out=(np.zeros(2, np.int32), np.zeros((2, 3), np.int32)))
        assert specstate.supports("verify_greedy", **call, out=(np.zeros(2, np.int32), np.zeros((2, 3), np.int32))) == (False, str(raised.value))
    whole = np.zeros((2, 3), [("a", "i4"), ("b", "i4")])["a"]
    specstate.accept.verify_greedy(whole, whole.copy())
    for stream in (2**70, -1):
        with pytest.raises(ValueError, match=f"^verify_greedy: stream: expected a handle of 64 bits, got {stream}"):
            specstate.accept.verify_greedy(whole, whole.copy(), stream=stream)


class Unwilling:
    """An array whose framework will not hand it over."""

    shape, dtype, ndim = (2, 3), np.dtype("int32"), 2

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        raise BufferError("not this one.")


class Capsule(Unwilling):
    def __dlpack__(self, **_):
        return "no capsule"


def not_handed_over():
    yield Unwilling(), "got Unwilling: not this one."
    yield Capsule(), "got Capsule: "
    yield np.zeros((2, 3), ml_dtypes.float8_e5m2), "got ndarray: "
    try:
        import torch
    except ImportError:
        return
    yield torch.zeros(2, 3).to_sparse(), "got Tensor: "
    yield torch.zeros(2, 3, device="meta"), "got Tensor: "
    yield torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8), "got Tensor: "


def test_arrays_that_cannot_be_handed_over():
    """The text names the argument, wherever it stands, and so does `supports`."""
    ids = np.zeros((2, 3), np.int32)
    for wrong, got in not_handed_over():
        verify, pools = CALLS["verify"](), CALLS["materialize_into_pool"]()
        for name, call, argument in (
            ("verify_greedy", dict(candidates=ids, target_argmax=wrong, out=(ids[:, 0].copy(), ids.copy())), "target_argmax"),
            ("verify", {**verify, "rings": kda.Rings(*verify["rings"])._replace(g=wrong)}, "rings.g"),
            ("materialize_into_pool", {**pools, "v_pool": [wrong] * 2}, "v_pool"),
            ("materialize_into_pool", {**pools, "positions": wrong}, "positions"),
            ("rollback_conv_windows", {**CALLS["rollback_conv_windows"](), "conv_pools": [wrong]}, "conv_pools"),
            ("transfer_paged", {**CALLS["transfer_paged"](), "dst": wrong}, "dst"),
        ):
            with pytest.raises(ValueError) as raised:
                operation(name)(**call)
            assert str(raised.value).startswith(f"{name}: {argument}: expected an array that can be handed over by DLPack, {got}"), str(raised.value)
            assert specstate.supports(name, **call) == (False, str(raised.value))


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_no_call_takes_have_the_callers_name(name):
    """Complex numbers and nine dimensions are refused before the operation sees them, under the name that the caller knows: of NumPy's arrays and of
    any framework's, at once and on the long way."""
    operation(name)(**CALLS[name]())
    for path, x in leaves(CALLS[name]()):
        for wrong in (x.astype(np.complex64), x.reshape((1,) * 9 + x.shape)):
            for given in (wrong, tvm_ffi.from_dlpack(wrong)):
                call = replace(CALLS[name](), path, given)
                whole = call[path[0]]
                called = path[0] if path[1] is None else f"{path[0]}.{whole._fields[path[1]]}" if hasattr(whole, "_fields") else ""
                can, why = specstate.supports(name, **call)
                with pytest.raises((ValueError, RuntimeError, TypeError)) as raised:
                    operation(name)(**call)
                assert not can and str(raised.value) == why
                pitch = name == "load_blocks_to_device_buffer_mha" and path[0].startswith("host_cache")  # sglang's text comes first
                assert pitch or re.match(rf"{name}: {called}.*expected .*got ", why) or why.startswith(f"Unexpected {called} shape"), (path, why)


def test_what_only_looks_like_an_array():
    masked = np.ma.array(np.zeros((2, 3), np.int32), mask=[[0, 1, 0]] * 2)
    ids = np.zeros((2, 3), np.int32)
    for wrong, kind, text in (
        (masked, ValueError, "expected an array without a mask, got MaskedArray."),
        (np.ndarray, TypeError, "expected an array that supports DLPack, got type."),
        (memoryview(b"ab"), TypeError, "expected an array that supports DLPack, got memoryview."),
    ):
        for name, call, argument in (
            ("verify_greedy", dict(candidates=wrong, target_argmax=ids), "candidates"),
            ("fused_norm_rope_stacked", {**CALLS["fused_norm_rope_stacked"](), "kv": wrong, "k_out": None, "v_out": None}, "kv"),
        ):
            with pytest.raises(kind, match=re.escape(f"{name}: {argument}: {text}")):
                operation(name)(**call)


def test_the_text_begins_with_the_function_that_was_called():
    ids = np.zeros((2, 3), np.int32)
    nine = np.zeros((1,) * 9, np.int32)  # refused by the binding, which knows no function
    c = hisparse.Coordinator(**COORDINATOR)
    for call, text in (
        (lambda: specstate.accept.verify_greedy([1], ids), "verify_greedy: candidates: expected an array that supports DLPack, got list."),
        (lambda: specstate.accept.verify_greedy(ids, nine), "verify_greedy: target_argmax: expected at most 8 dimensions, got 9."),
        (lambda: hisparse.swap_in(*[ids] * 6, state=5), "swap_in: state: expected a SwapState of 5 arrays, or as many in a tuple or list, got int 5."),
        (lambda: hisparse.new_swap_state(ids, 9, 16), "new_swap_state: hot: expected 1 to the 3 columns of slot_locs, got 9."),
        (lambda: hisparse.new_swap_state(ids.astype(np.int64), 2, 16), "new_swap_state: slot_locs: expected dtype int32, got int64."),
        (lambda: c.admit("x", 3), "Coordinator: request: expected an integer, got str 'x'."),
        (lambda: c.accept([0], [1, 2]), "Coordinator: accepted: expected one for each of 1 requests, got 2."),
        (lambda: hisparse.Coordinator(**COORDINATOR, anchor_of=["x"]), "Coordinator: anchor_of: expected an integer, got str 'x'."),
        (lambda: kda.fold(ids, (ids,) * 4, ids), "fold: accept: expected accepted counts [N], or pending= with those that defer_fold left there, got neither."),
        (lambda: draft_kv.FusedKVMaterializeHelper([object()], None, 1, 8, "cpu"), "FusedKVMaterializeHelper: layers: expected layers with self_attn, got object without it at layer 0."),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert str(raised.value) == text


def test_anchor_of_may_be_none_a_layer():
    two = {**COORDINATOR, "host_cache": COORDINATOR["host_cache"] * 2, "device_buffer": [np.zeros((64, 8), np.uint8) for _ in range(2)]}
    two["host_cache"] = [np.zeros((64, 8), np.uint8) for _ in range(2)]
    c = hisparse.Coordinator(**two, first_layer=4, anchor_of=[None, 4])
    c.admit(0, 4)
    c.append(0, 4, source="host")
    c.swap(4, np.zeros((1, 1), np.int32), np.array([4], np.int32), np.zeros(1, np.int32))
    c.follow(5)  # layer 5 follows layer 4
    with pytest.raises(ValueError, match="layer: expected a follower"):
        c.follow(4)
