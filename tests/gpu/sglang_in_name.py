"""A pytest plugin: sglang in name only, so that sglang's own kernel tests run where sglang is not installed, against our functions.

    PYTHONPATH=python:tests/gpu python3 -m pytest -p sglang_in_name tests/gpu/sglang/test_hisparse.py

Every module `sglang...` exists. Those that specstate.sglang knows hold our functions; sglang's test helpers are the few lines that a test
needs; anything else is a placeholder, and a test that calls it is skipped as not applicable. Guards that limit a test to Blackwell are
lifted: the device says 10.0, because ours is no Blackwell kernel. The test files are sglang's and are never part of this repository.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import unittest

import pytest
import torch

from specstate import draft_kv, hisparse, kda
from specstate.sglang import _TARGETS, _uncovered



def _covered(target, ours):
    """`ours`, where `specstate.sglang` would take the call; other heads stay with sglang."""
    if not target.heads:
        return ours

    @functools.wraps(ours)
    def call(*args, **kwargs):
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
}  # fmt: skip


class _Placeholder:
    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        pytest.skip(f"not-applicable: {self.__name__} is none of the functions that are replaced")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("register_"):
            return lambda *args, **kwargs: None
        return _Placeholder(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name == "sglang" or name.startswith("sglang."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name == "cutlass":  # asked for by guards alone
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        vars(module).update(OURS.get(module.__name__, {}))
        vars(module).update(HELPERS.get(module.__name__, {}))


def pytest_configure(config):
    sys.meta_path.insert(0, _Finder())
    torch.cuda.get_device_capability = lambda *_: (10, 0)
