"""A pytest plugin: sglang in name only, so that sglang's own kernel tests run where sglang is not installed, against our functions.

    PYTHONPATH=python:tests/gpu SGLANG_WHEEL=FOLDER python3 -m pytest -p sglang_in_name tests/gpu/of_sglang/test_hisparse.py

Every module `sglang...` exists. Those that specstate.sglang knows hold our functions. With SGLANG_WHEEL (an unpacked wheel of sglang,
bench/peers/sglang_wheel.py) sglang's other kernels are its own: the tests compare ours with them. sglang's test helpers are the few lines
that a test needs; anything else is a placeholder. A test that calls it, or that passes without a call of ours, is skipped as not
applicable. Guards that limit a test to Blackwell are lifted: the device says 10.0, because ours is no Blackwell kernel. The test files are sglang's and are never part of this repository.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import pathlib
import sys
import types
import unittest

import pytest
import torch

from specstate import draft_kv, hisparse, kda
from specstate.sglang import _TARGETS, _uncovered

WHEEL = os.environ.get("SGLANG_WHEEL")
_called = []  # functions of ours that the running test has called


def _covered(target, ours):
    """`ours`, where `specstate.sglang` would take the call; other heads stay with sglang."""
    if isinstance(ours, type):
        return ours

    @functools.wraps(ours)
    def call(*args, **kwargs):
        _called.append(target.name)
        bound = inspect.signature(ours).bind(*args, **kwargs).arguments
        for name in target.heads:
            if why := _uncovered(bound.get(name), name):
                pytest.skip(f"not-applicable: sglang's own stays in use: {why}")
        return ours(*args, **kwargs)

    return call


OURS = {}
for _target in _TARGETS:
    for _module in _target.modules:
        _f = getattr({"hisparse": hisparse, "kda": kda, "draft_kv": draft_kv}[_target.family], _target.name)
        OURS.setdefault(_module, {})[_target.attribute or _target.name] = _covered(_target, _f)
        if _target.family == "hisparse":
            OURS[_module]["HiSparseSpecState"] = hisparse.HiSparseSpecState

HELPERS = {
    "sglang.test.test_utils": {"CustomTestCase": unittest.TestCase},
    "sglang.srt.utils": {"is_cuda": lambda: True, "is_hip": lambda: False, "is_npu": lambda: False, "is_xpu": lambda: False, "get_device": lambda: "cuda",
                         "get_device_sm": lambda: 100},
    "sglang.srt.utils.common": {"get_device": lambda: "cuda"},
    "sglang.kernels.ops.attention.kda_packed_decode": {"covered": lambda *_, **__: False},  # its kernel would have to be compiled: Triton's then
}  # fmt: skip


# Tests that no kernel can pass by right, and tests of others' functions that take minutes to compile; by the beginning of their name.
NOT_APPLICABLE = {
    "test_kda_target_verify.py::": "its dt_bias has HV elements where sglang's kernel reads HV*K: what it computes with lies behind the tensor",
    "test_kda_kernels.py::TestKDAGateChunkCumsum": "it calls none of the functions that are replaced",
    "test_kda_kernels.py::TestKDAChunk": "it calls none of the functions that are replaced",
}


class _Placeholder:
    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        pytest.skip(f"not-applicable: {self.__name__} is none of the functions that are replaced")

    def __mro_entries__(self, bases):
        return ()

    def __add__(self, other):
        return self()

    __radd__ = __mul__ = __rmul__ = __sub__ = __floordiv__ = __add__

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self.__name__}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("register_"):
            return lambda *args, **kwargs: None
        return _Placeholder(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name == "cutlass":  # asked for by guards alone
            return importlib.machinery.ModuleSpec(name, self)
        if name != "sglang" and not name.startswith("sglang."):
            return None
        if WHEEL and name.startswith("sglang.kernels.") and name not in OURS:
            if real := importlib.machinery.PathFinder.find_spec(name, path):
                return real
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        moved = spec.name.replace(".attention.fla.", ".attention.linear.")
        if WHEEL and moved != spec.name and spec.name not in OURS:  # 0.5.23 has moved it
            return importlib.import_module(moved)
        return _Module(spec.name)

    def exec_module(self, module):
        vars(module).update(OURS.get(module.__name__, {}))
        vars(module).update(HELPERS.get(module.__name__, {}))


def pytest_collection_modifyitems(items):
    for item in items:
        name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
        for begin, why in NOT_APPLICABLE.items():
            if name.startswith(begin):
                item.add_marker(pytest.mark.skip(reason="not-applicable: " + why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    _called.clear()
    result = yield
    if not _called:
        pytest.skip("not-applicable: it calls none of the functions that are replaced")
    return result


def pytest_configure(config):
    if WHEEL:
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))
        import sglang_wheel

        sglang_wheel.use(WHEEL)
        import triton

        triton.runtime.driver.active.get_current_target()  # Triton looks at the device before the guards are lifted
    sys.meta_path.insert(0, _Finder())
    for name, helpers in HELPERS.items():
        if name in sys.modules:
            vars(sys.modules[name]).update(helpers)
    torch.cuda.get_device_capability = lambda *_: (10, 0)
