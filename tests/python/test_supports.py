"""`specstate.supports`: the answer and the text of the call itself, without running it."""

import ctypes
import mmap

import numpy as np
import pytest

import specstate
from calls import ALL_CALLS, CALLS, operation
from specstate import accept, draft_kv, hisparse, kda
from specstate._supports import OPERATIONS


CASES = {name: CALLS[name] for name in ("verify_greedy", "swap_in", "decode", "verify", "materialize_into_pool")}


def flat(arguments):
    for x in arguments.values():
        yield from x if isinstance(x, tuple) else [x]


@pytest.mark.parametrize("name", CASES)
def test_yes_and_nothing_is_written(name):
    arguments = CASES[name]()
    before = [np.array(x) for x in flat(arguments)]
    assert specstate.supports(name, **arguments) == (True, "")
    for was, now in zip(before, flat(arguments), strict=True):
        np.testing.assert_array_equal(was, now)
    operation(name)(**arguments)  # and the call itself is taken, and does write
    assert any((was != now).any() for was, now in zip(before, flat(arguments), strict=True))


def break_dtype(arguments):
    name, x = next((n, x) for n, x in arguments.items() if isinstance(x, np.ndarray))
    return {**arguments, name: x.astype(np.complex64)}


def break_shape(arguments):
    name, x = next((n, x) for n, x in arguments.items() if isinstance(x, np.ndarray))
    return {**arguments, name: x[..., None]}


def break_strides(arguments):
    name, x = next((n, x) for n, x in arguments.items() if isinstance(x, np.ndarray))
    return {**arguments, name: x.astype(object)}


@pytest.mark.parametrize("break_it", [break_dtype, break_shape, break_strides])
@pytest.mark.parametrize("name", CASES)
def test_no_with_the_text_of_the_call(name, break_it):
    arguments = break_it(CASES[name]())
    module = next(m for m, names in OPERATIONS.items() if name in names)
    with pytest.raises((ValueError, TypeError)) as raised:
        operation(name)(**arguments)
    assert specstate.supports(f"{module}.{name}", **arguments) == (False, str(raised.value))


def test_contents_are_not_read():
    """Ids outside and lengths that do not fit are errors of the call, not of its shapes; even unreadable memory is not touched."""
    arguments = dict(CALLS["decode"](), slots=np.array([0, 99], np.int32))
    with pytest.raises(ValueError, match="slots below pool=2"):
        kda.decode(**arguments)
    assert specstate.supports("decode", **arguments) == (True, "")

    class Unmapped:  # a page that faults when it is touched
        def __init__(self, like):
            self.__array_interface__ = {**like.__array_interface__, "data": (4096, False), "strides": None}

    for name in CASES:
        hollow = {
            k: np.asarray(Unmapped(x)) if isinstance(x, np.ndarray) and k not in ("k_pool", "v_pool", "device_buffer", "out", "state", "cs_q") else x
            for k, x in CASES[name]().items()
        }
        taken, why = specstate.supports(name, **hollow)
        assert taken or "overlaps" in why, (name, why)


def test_sglangs_texts():
    one_step = dict(
        top_k_tokens=np.zeros((1, 1, 8), np.int32), device_buffer_tokens=np.zeros((1, 36), np.int32), host_cache_locs=np.zeros((1, 64), np.int64),
        device_buffer_locs=np.zeros((1, 36), np.int32), host_cache=np.zeros((64, 16), np.uint8), device_buffer=np.zeros((36, 16), np.uint8),
        top_k_device_locs=np.zeros((1, 1, 8), np.int32), req_pool_indices=np.zeros(1, np.int64), seq_lens=np.zeros(1, np.int32),
        state=hisparse.new_spec_state(np.zeros((1, 4), np.int32), 32, 8), num_real_reqs=np.ones(1, np.int32),
    )  # fmt: skip
    name = "load_cache_to_device_buffer_spec_mla"
    assert specstate.supports(name, **one_step) == (False, "HiSparse speculative swap requires 2-4 steps, got 1.")
    assert specstate.supports(name, **one_step, strict_sglang=False) == (True, "")


def test_missing_and_unknown_arguments():
    taken, why = specstate.supports("verify_greedy", candidates=np.zeros((1, 1), np.int32))
    assert not taken and "target_argmax" in why
    taken, why = specstate.supports("verify_greedy", **CALLS["verify_greedy"](), candidate=1)
    assert not taken and "candidate" in why


def test_unknown_function():
    for name in ("verifi", "kda.swap_in", "kda.Coordinator", "Rings", ""):
        with pytest.raises(ValueError, match="supports: function_name: expected one of .*verify_greedy.*, got"):
            specstate.supports(name)


def test_a_function_itself_instead_of_its_name():
    for f in (accept.verify_greedy, specstate.accept.verify_greedy):
        assert specstate.supports(f, **CALLS["verify_greedy"]()) == (True, "")
    assert "kv_weight" in specstate.supports(specstate.draft_kv.KvProjection)[1]
    for f in (len, specstate.supports, specstate.kda.Rings, None):
        with pytest.raises(ValueError, match="supports: function_name: expected one of .*verify_greedy.*, got"):
            specstate.supports(f)


def test_everything_public_is_known():
    """Whatever a family's `__all__` has can be asked about, but for the tuples of arrays, which take anything."""
    for module, names in OPERATIONS.items():
        m = getattr(specstate, module)
        assert set(names) == {n for n in m.__all__ if not hasattr(getattr(m, n), "_fields")}


def test_helpers_and_classes():
    """Taken or refused with the text of the call; nothing of the caller's is written."""
    host, device = np.full((64, 8), 7, np.uint8), np.full((64, 8), 9, np.uint8)
    locs, weight = np.arange(12, dtype=np.int32).reshape(2, 6), np.ones((1, 4, 8), np.float32)
    for name, good, bad in (
        ("Coordinator", dict(host_cache=[host], device_buffer=[device], requests=2, hot=8, window=2, context=20), dict(hot=0)),
        ("new_swap_state", dict(slot_locs=locs, hot=4, context=9), dict(hot=9)),
        ("new_spec_state", dict(scratch_locs=locs, hot=4, occurrences=8), dict(hot=-1)),
        ("KvProjection", dict(kv_weight=weight), dict(kv_weight=weight[0])),
        ("materialize_workspace_bytes", dict(ctx_hidden=weight[0]), dict(ctx_hidden=weight)),
        ("FusedKVMaterializeHelper", None, dict(layers=[object()], rotary_emb=None, num_kv_heads=1, head_dim=8, device="cpu")),
    ):
        if good is not None:
            assert specstate.supports(name, **good) == (True, "")
        bad = {**(good or {}), **bad}
        with pytest.raises((ValueError, TypeError)) as raised:
            operation(name)(**bad)
        assert specstate.supports(name, **bad) == (False, str(raised.value))
    assert (host == 7).all() and (device == 9).all()


def unreadable(shape, dtype):
    """An array over memory that ends the process when it is read or written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    array = np.frombuffer(pages, np.uint8)[:size].view(dtype).reshape(shape)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(pages)), 0) == 0  # PROT_NONE
    return array


def test_a_helper_is_not_made_to_say_what_it_takes():
    """Weights and rotary tables in memory that nobody may touch; a table that would have to grow does not."""

    class Rotary:
        rotary_dim, is_neox_style = 8, True
        cos_sin_cache = unreadable((16, 8), np.float32)
        grown = 0

        def _ensure_cos_sin_cache_length(self, last):
            Rotary.grown += 1

    class Attention:
        num_kv_heads, head_dim, q_size, kv_size = 2, 8, 8, 16

        def __init__(self, hidden=24, dtype=np.float32, rows=40):
            self.rotary_emb = Rotary()
            self.rotary_emb.cos_sin_cache = unreadable((16, 8), np.float32)
            self.qkv_proj, self.k_norm = type("Q", (), {})(), type("K", (), {})()
            self.qkv_proj.weight = unreadable((rows, hidden), dtype)
            self.k_norm.weight, self.k_norm.variance_epsilon = unreadable((8,), np.float32), 1e-6

    class Layer:
        def __init__(self, **options):
            self.self_attn = Attention(**options)

    def asked(*layers, **more):
        arguments = dict(layers=list(layers), rotary_emb=Rotary(), num_kv_heads=2, head_dim=8, device="cpu", **more)
        return specstate.supports("FusedKVMaterializeHelper", **arguments)

    assert asked(Layer(), Layer()) == (True, "")
    assert asked(Layer(), max_position_hint=1000) == (True, "") and Rotary.grown == 0
    assert specstate.supports("KvProjection", kv_weight=unreadable((2, 32, 24), np.float32)) == (True, "")
    for wrong, text in (
        (dict(hidden=16), "qkv_proj.weight: expected 24 columns, as at layer 0, got (40, 16) at layer 1."),
        (dict(rows=39), "qkv_proj.weight: expected shape [>= q_size + 2 * kv_size = 40, hidden], got (39, 24) at layer 1."),
        (dict(dtype=np.int32), "FusedKVMaterializeHelper: qkv_proj.weight: expected dtype float32 or bfloat16 or float16, got int32 at layer 1."),
    ):
        taken, why = asked(Layer(), Layer(**wrong))
        assert not taken and why.endswith(text), why


class Calling:
    """An array whose export calls the library, as a finalizer or another framework may: that call runs."""

    def __init__(self, array, error=None):
        self.array, self.error, self.shape, self.dtype = array, error, array.shape, array.dtype
        self.written = []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        other = CALLS["verify_greedy"]()
        accept.verify_greedy(**other)
        self.written.append(other["out"][0].tolist())
        if self.error:
            raise self.error
        return self.array.__dlpack__(**options)


def test_calls_in_between_run():
    arguments = CALLS["verify_greedy"]()
    arguments["candidates"] = calling = Calling(arguments["candidates"])
    before = arguments["out"][0].copy()
    assert specstate.supports("verify_greedy", **arguments) == (True, "")
    assert calling.written == [[1, 1]] and (arguments["out"][0] == before).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, KeyError])
def test_an_interrupted_question_leaves_nothing_behind(error):
    arguments = CALLS["verify_greedy"]()
    arguments["candidates"] = Calling(arguments["candidates"], error)
    with pytest.raises(error):
        specstate.supports("verify_greedy", **arguments)
    mine = CALLS["verify_greedy"]()
    accept.verify_greedy(**mine)
    assert mine["out"][0].tolist() == [1, 1]


def test_interrupts_at_any_time():
    """Ctrl-C between any two lines of `supports`: the next call runs."""
    import sys

    asked = CALLS["verify_greedy"]()
    specstate.supports("verify_greedy", **asked)
    lines = 0
    for stop in range(1, 400):
        seen = 0

        def interrupt(frame, event, argument):
            nonlocal seen
            if "specstate" in frame.f_code.co_filename:
                seen += 1
                if seen == stop:
                    raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            specstate.supports("verify_greedy", **asked)
        except KeyboardInterrupt:
            lines += 1
        finally:
            sys.settrace(before)
        mine = CALLS["verify_greedy"]()
        accept.verify_greedy(**mine)
        assert mine["out"][0].tolist() == [1, 1], stop
        if seen < stop:
            break
    assert lines > 10


def test_every_kind_of_error_has_its_python_exception():
    """tvm-ffi knows no NotImplementedError by itself: it would arrive as a RuntimeError, and nobody would fall back."""
    import tvm_ffi

    specstate._library.library()
    for kind in (ValueError, NotImplementedError, RuntimeError, MemoryError):
        assert tvm_ffi.core.ERROR_NAME_TO_TYPE[kind.__name__] is kind


@pytest.mark.parametrize("scale", [2.0, float("nan"), -1.0, 0.0, np.float32(3), 1.0, 1])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_numbers_are_checked(name, scale):
    arguments = {**CALLS["materialize_into_pool"](), name: scale}
    answer = specstate.supports("materialize_into_pool", **arguments)
    try:
        draft_kv.materialize_into_pool(**arguments)
    except ValueError as error:
        assert answer == (False, str(error)) and name in str(error)
    else:
        assert answer == (True, "") and scale == 1


@pytest.mark.parametrize("sizes", [{"num_kv_heads": 2**40}, {"num_kv_heads": 2**62}, {"head_dim": 2**40}, {"head_dim": -1}, {"num_kv_heads": 0}])
def test_sizes_are_checked_before_results_are_allocated(sizes):
    arguments = {**ALL_CALLS["fused_norm_rope_stacked"](), **sizes}
    arguments.pop("k_out"), arguments.pop("v_out")
    with pytest.raises(ValueError) as raised:
        draft_kv.fused_norm_rope_stacked(**arguments)
    assert specstate.supports("fused_norm_rope_stacked", **arguments) == (False, str(raised.value))
