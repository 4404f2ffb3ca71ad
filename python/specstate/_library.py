"""Loads the shared library at the first operation and hands out its exported functions."""

import os
import pathlib

from ._arguments import refusal

_module = None
_NAME = "libspecstate_ffi.so"


class _ArgumentError(ValueError):
    """An array that the binding cannot take: it knows the argument; the function's name is ours to add."""

    def __new__(cls, text):
        return refusal(ValueError, text)


def _folder():
    override = os.environ.get("SPECSTATE_LIBRARY_PATH")
    if override:
        if not (pathlib.Path(override) / _NAME).is_file():
            raise ImportError(f"specstate: SPECSTATE_LIBRARY_PATH: expected a folder that holds {_NAME}, got {override!r}")
        return pathlib.Path(override)
    here = pathlib.Path(__file__).resolve().parent
    for folder in (here / "lib", here.parents[1] / "build" / "release" / "lib"):
        if (folder / _NAME).exists():
            return folder
    raise ImportError(
        f"specstate: {_NAME} was not found beside the package or in build/release/lib; "
        "build it with `make build`, or name its folder in SPECSTATE_LIBRARY_PATH"
    )


def library():
    """The loaded module; attribute access gives exported functions."""
    global _module
    if _module is None:
        import tvm_ffi

        tvm_ffi.register_error("NotImplementedError", NotImplementedError)  # else it would arrive as a RuntimeError
        tvm_ffi.register_error("SpecstateArgument", _ArgumentError)
        path = _folder() / _NAME
        try:
            module = tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            named = " (from SPECSTATE_LIBRARY_PATH)" if os.environ.get("SPECSTATE_LIBRARY_PATH") else ""
            raise ImportError(f"specstate: {path}{named} does not load: {str(error).strip().splitlines()[-1]}") from None
        _module = module
        function("at_once")
    return _module


_functions = {}


def function(name):
    """The exported C++ function `name`."""
    f = _functions.get(name)
    if f is None:
        f = getattr(library(), name)
        f.release_gil = False  # the export does it
        _functions[name] = f
    return f


def at_once(name, arguments):
    """The quick way of a call: the export `name` on a tuple of tensors of known types (`_arrays`), numbers, flags and None, a CUDA stream or None last.
    False if some argument needs a word first; then nothing has happened, and the long way converts it or says what is wrong."""
    f = _functions.get(name) or function(name)
    return _functions["at_once"](f, id(arguments))


def version():
    return str(function("version")())
