"""Loads the shared library at the first operation and hands out its exported functions."""

import os
import pathlib

_module = None


def _folder():
    override = os.environ.get("SPECSTATE_LIBRARY_PATH")
    if override:
        return pathlib.Path(override)
    here = pathlib.Path(__file__).resolve().parent
    for folder in (here / "lib", here.parents[1] / "build" / "release" / "lib"):
        if (folder / "libspecstate_ffi.so").exists():
            return folder
    raise ImportError(
        "specstate: libspecstate_ffi.so was not found beside the package or in build/release/lib; "
        "build it with `make build`, or name its folder in SPECSTATE_LIBRARY_PATH"
    )


def library():
    """The loaded module; attribute access gives exported functions."""
    global _module
    if _module is None:
        import tvm_ffi

        tvm_ffi.register_error("NotImplementedError", NotImplementedError)  # else it would arrive as a RuntimeError
        _module = tvm_ffi.load_module(str(_folder() / "libspecstate_ffi.so"))
    return _module


_functions = {}


def function(name):
    """The exported C++ function `name`."""
    f = _functions.get(name)
    if f is None:
        f = _functions[name] = getattr(library(), name)
    return f


def version():
    return str(function("version")())
