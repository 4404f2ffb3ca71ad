"""Exceptions that are not about an argument pass unchanged, with a note; those that a conversion raises name the argument."""

import sys

import numpy as np
import pytest
from calls import CALLS, operation

import specstate
from specstate import accept, draft_kv, hisparse


class Timeout(Exception):
    """What a program's signal handler raises."""


class Array:
    """A DLPack exporter that fails at one of its methods."""

    def __init__(self, x, error, at="__dlpack__"):
        self.x, self.error, self.at = x, error, at

    def _at(self, name):
        if name == self.at:
            raise self.error

    @property
    def shape(self):
        self._at("shape")
        return self.x.shape

    @property
    def dtype(self):
        return self.x.dtype

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        self._at("__dlpack__")
        return self.x.__dlpack__(**options)


class Number:
    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error

    __float__ = __index__


def passes(error, note, call):
    with pytest.raises(type(error)) as raised:
        call()
    assert raised.value is error
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == [note]


FOREIGN = [Timeout, KeyError, ZeroDivisionError, MemoryError]
locs = np.arange(12, dtype=np.int32).reshape(2, 6)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_about_an_argument_passes(kind):
    greedy = CALLS["verify_greedy"]()
    error = kind("over")
    wrong = {**greedy, "target_argmax": Array(greedy["target_argmax"], error)}
    passes(error, "specstate: while reading verify_greedy: target_argmax", lambda: accept.verify_greedy(**wrong))
    error = kind("over")
    wrong = {**greedy, "out": None, "candidates": Array(greedy["candidates"], error, "shape")}
    passes(error, "specstate: while reading verify_greedy: candidates", lambda: accept.verify_greedy(**wrong))
    error = kind("over")
    passes(error, "specstate: while reading new_swap_state: hot", lambda: hisparse.new_swap_state(locs, Number(error), 9))
    error = kind("over")
    call = {**CALLS["materialize_into_pool"](), "k_scale": Number(error)}
    passes(error, "specstate: while reading materialize_into_pool: k_scale", lambda: draft_kv.materialize_into_pool(**call))
    error = kind("over")
    call = {**CALLS["materialize_into_pool"](), "stream": Number(error)}
    if not issubclass(kind, LookupError):  # a `__cuda_stream__` too short is no stream
        passes(error, "specstate: while reading materialize_into_pool: stream", lambda: draft_kv.materialize_into_pool(**call))
    error = kind("over")
    rows = Array(np.zeros((4, 8), np.uint8), error)
    passes(error, "specstate: while reading Coordinator: host_cache",
           lambda: hisparse.Coordinator([rows], [np.zeros((64, 8), np.uint8)], requests=2, hot=8, window=2, context=20))  # fmt: skip


def test_supports_lets_the_same_pass():
    greedy = CALLS["verify_greedy"]()
    error = Timeout("over")
    wrong = {**greedy, "target_argmax": Array(greedy["target_argmax"], error)}
    passes(error, "specstate: while reading verify_greedy: target_argmax", lambda: specstate.supports("verify_greedy", **wrong))


@pytest.mark.parametrize("kind", [TypeError, ValueError, OverflowError, AttributeError, BufferError, RuntimeError, NotImplementedError])
def test_what_exporters_raise_names_the_argument(kind):
    greedy = CALLS["verify_greedy"]()
    wrong = {**greedy, "target_argmax": Array(greedy["target_argmax"], kind("not mine"))}
    with pytest.raises(ValueError, match="^verify_greedy: target_argmax: expected an array that can be handed over by DLPack, got Array: not mine") as raised:
        accept.verify_greedy(**wrong)
    assert isinstance(raised.value.__cause__, kind)
    with pytest.raises(TypeError, match="^new_swap_state: hot: expected an integer, got Number"):
        hisparse.new_swap_state(locs, Number(kind("not mine")), 9)


def test_an_exception_inside_the_work_says_which_call():
    """As a signal handler's, which Python runs while an exporter is asked."""
    import signal

    class Slow(Array):
        def __dlpack__(self, **options):
            signal.raise_signal(signal.SIGUSR1)
            return self.x.__dlpack__(**options)

    error = Timeout("over")

    def over(*_):
        raise error

    before = signal.signal(signal.SIGUSR1, over)
    try:
        greedy = CALLS["verify_greedy"]()
        wrong = {**greedy, "target_argmax": Slow(greedy["target_argmax"], None)}
        passes(error, "specstate: while reading verify_greedy: target_argmax", lambda: operation("verify_greedy")(**wrong))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_objects_that_were_never_made():
    call = {**CALLS["materialize_into_pool"](), "kv_bias": None, "kv_weight": draft_kv.KvProjection.__new__(draft_kv.KvProjection)}
    with pytest.raises(ValueError, match="^materialize_into_pool: kv_weight: expected a KvProjection that was made from weights, got one"):
        draft_kv.materialize_into_pool(**call)
    empty = hisparse.Coordinator.__new__(hisparse.Coordinator)
    for ask in (lambda: empty.stats(), lambda: empty.admit(0, 1), lambda: empty.prepare_verify([0], [1])):
        with pytest.raises(TypeError, match="^Coordinator: self: expected a Coordinator that was made, got one"):
            ask()
    with pytest.raises(AttributeError, match="'Coordinator' object has no attribute 'nothing'"):
        empty.nothing  # noqa: B018
