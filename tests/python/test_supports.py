"""`specstate.supports`: the answer and the text of the call itself, without running it."""

import inspect

import numpy as np
import pytest

import specstate
from specstate import accept, hisparse, kda
from specstate._supports import OPERATIONS


def greedy(b=2, w=4):
    return {
        "candidates": np.zeros((b, w), np.int32),
        "target_argmax": np.zeros((b, w), np.int32),
        "out": (np.full(b, -7, np.int32), np.full((b, w), -7, np.int32)),
    }


def swap(b=2, s=3, k=8, hot=32, tail=4, context=64):
    rng = np.random.default_rng(0)
    locs = np.arange(b * (hot + tail), dtype=np.int32).reshape(b, -1)
    return {
        "top_k_tokens": rng.integers(0, context, (b, s, k)).astype(np.int32),
        "seq_lens": np.full((b, s), context, np.int32),
        "req_pool_indices": np.arange(b, dtype=np.int64),
        "host_cache_locs": np.arange(b * context, dtype=np.int64).reshape(b, context),
        "host_cache": rng.integers(0, 255, (b * context, 16)).astype(np.uint8),
        "device_buffer": np.zeros((b * (hot + tail), 16), np.uint8),
        "state": hisparse.new_swap_state(locs, hot, context),
    }


def step(n=2, t=4, h=1, d=64):
    rng = np.random.default_rng(1)
    r = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "x_q": r(t, h, d), "x_k": r(t, h, d), "x_v": r(t, h, d), "g": r(t, h, d), "beta": r(t, h), "A_log": r(h), "dt_bias": r(h * d),
        "state": r(n, h, d, d), "slots": np.arange(n, dtype=np.int32), "cu_seqlens": np.array([0, 2, 4], np.int32), "out": r(t, h, d),
    }  # fmt: skip


def materialize():
    rng = np.random.default_rng(2)
    r = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "ctx_hidden": r(3, 16), "kv_weight": r(2, 16, 16), "k_norm_weight": r(2, 8), "eps": np.full(2, 1e-6, np.float32),
        "cos_sin_cache": r(10, 8), "positions": np.arange(3), "slot_mapping": np.arange(3), "k_pool": r(2, 4, 1, 8), "v_pool": r(2, 4, 1, 8),
    }  # fmt: skip


CASES = {"verify_greedy": greedy, "swap_in": swap, "decode": step, "verify": step, "materialize_into_pool": materialize}


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
    module = next(m for m, names in OPERATIONS.items() if name in names)
    getattr(getattr(specstate, module), name)(**arguments)  # and the call itself is taken, and does write
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
        getattr(getattr(specstate, module), name)(**arguments)
    assert specstate.supports(f"{module}.{name}", **arguments) == (False, str(raised.value))


def test_contents_are_not_read():
    """Ids outside and lengths that do not fit are errors of the call, not of its shapes; even unreadable memory is not touched."""
    arguments = dict(step(), slots=np.array([0, 99], np.int32))
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
    taken, why = specstate.supports("verify_greedy", **greedy(), candidate=1)
    assert not taken and "candidate" in why


def test_unknown_function():
    for name in ("verifi", "kda.swap_in", "Coordinator", ""):
        with pytest.raises(ValueError, match="supports: function_name: expected one of .*verify_greedy.*, got"):
            specstate.supports(name)


def test_every_operation_is_known():
    """A new function of a family is listed, or is one of the helpers named here."""
    helpers = {"new_swap_state", "new_spec_state"}
    for module, names in OPERATIONS.items():
        m = getattr(specstate, module)
        functions = {n for n, f in vars(m).items() if inspect.isfunction(f) and f.__module__ == m.__name__ and not n.startswith("_")}
        assert functions - helpers == set(names)


def test_other_threads_run():
    import threading

    got = []

    def other():
        a = greedy()
        accept.verify_greedy(**a)
        got.append(a["out"][0])

    check_only = specstate._library.function("check_only")
    check_only(True)
    try:
        t = threading.Thread(target=other)
        t.start()
        t.join()
        mine = greedy()
        accept.verify_greedy(**mine)
    finally:
        check_only(False)
    assert got[0].tolist() == [4, 4] and mine["out"][0].tolist() == [-7, -7]
