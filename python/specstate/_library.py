"""Loads the shared library at the first operation and hands out its exported functions."""

import logging  # noqa: F401  (tvm-ffi imports it: what it does at a fork is registered before what we do)
import os
import pathlib
import sys
import threading

from ._arguments import CONVERSION, kind_of, noted, refusal

_module, _loading = None, threading.RLock()
_NAME = "libspecstate_ffi.so"


class _ArgumentError(ValueError):
    """An array that the binding cannot take, under the binding's name for it."""


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
    return _module if _module is not None else _load()


def _load():
    """Once; other threads that make their first call meanwhile wait."""
    global _module
    with _loading:
        if _module is not None:
            return _module
        import tvm_ffi

        tvm_ffi.register_error("NotImplementedError", NotImplementedError)  # else it would arrive as a RuntimeError
        tvm_ffi.register_error("SpecstateArgument", _ArgumentError)
        path = _folder() / _NAME
        try:
            module = tvm_ffi.load_module(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            named = " (from SPECSTATE_LIBRARY_PATH)" if os.environ.get("SPECSTATE_LIBRARY_PATH") else ""
            raise ImportError(f"specstate: {path}{named} does not load: {str(error).strip().splitlines()[-1]}") from None
        _exported(module, "at_once")
        _module = module  # last: who sees it finds everything else there
        return module


def _new_lock():
    global _loading
    _loading = threading.RLock()


# A fork waits until nobody loads: in the child that thread would be gone, and the locks of the modules that it was importing would stay held.
os.register_at_fork(before=lambda: _loading.acquire(), after_in_parent=lambda: _loading.release(), after_in_child=_new_lock)


def _exported(module, name):
    f = getattr(module, name)
    f.release_gil = False  # the export does it
    _exports[name] = f
    return f


_exports, _functions = {}, {}


def export(name):
    """The exported C++ function `name`."""
    f = _exports.get(name)
    return f if f is not None else _exported(library(), name)


def function(name):
    """The exported C++ function `name`; an array that its framework cannot hand over is an error that names the argument."""
    f = _functions.get(name)
    if f is None:
        f = _functions[name] = _naming(export(name))
    return f


def _naming(f):
    def call(*arguments):
        try:
            return f(*arguments)
        except RecursionError:  # not a question of one argument
            raise
        except CONVERSION as error:
            wrong = _wrong(arguments)
            if wrong is None:
                raise
            raise refusal(ValueError, wrong) from error
        except Exception as error:  # not about an argument, or an object's own
            noted(error, _inside(error, arguments))
            raise

    return call


def look(name, t):
    """Refuses a tensor that no export can take, under this name."""
    try:
        export("look")(name, t)
    except _ArgumentError as error:
        raise refusal(ValueError, str(error)) from None


def not_handed_over(x, error):
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return f"an array that can be handed over by DLPack, got {kind_of(x)}: {said}."


def _parts(arguments):
    return (part for given in arguments for part in (given if isinstance(given, (tuple, list)) else (given,)))


def _inside(error, arguments):
    """The name of the argument in whose own method the exception was raised, or None."""
    given, traceback = {id(x) for x in _parts(arguments)}, error.__traceback__
    while traceback is not None:
        code, values = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        x = values.get(code.co_varnames[0]) if code.co_argcount else None
        if x is not None and id(x) in given:
            return _name_of(x)
        traceback = traceback.tb_next
    return None


def _wrong(arguments):
    """What is wrong with the first argument that cannot become a tensor of the library, or None."""
    import tvm_ffi

    for x in _parts(arguments):
        if hasattr(x, "__dlpack__"):
            try:
                export("look")(_name_of(x), x if isinstance(x, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(x))
            except _ArgumentError as error:
                return str(error)
            except CONVERSION as error:
                return f"{_name_of(x)}: expected {not_handed_over(x, error)}"
    return None


def _name_of(x):
    """What the caller calls an argument: its name in the outermost of our frames that was given it."""
    found, frame = "an argument", sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "specstate":
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if frame.f_globals["__name__"] != __name__ else ():
            value = frame.f_locals.get(name)
            if value is x:
                found = name
            elif isinstance(value, (tuple, list)) and any(part is x for part in value):
                i = next(i for i, part in enumerate(value) if part is x)
                found = f"{name}.{value._fields[i]}" if hasattr(value, "_fields") else name
        frame = frame.f_back
    return found


def at_once(name, arguments):
    """The quick way of a call: the export `name` on a tuple of tensors of known types (`_arrays`), numbers, flags and None, a CUDA stream or None last.
    False if some argument needs a word first; then nothing has happened, and the long way converts it or says what is wrong."""
    f = _exports.get(name) or export(name)
    return _exports["at_once"](f, id(arguments))


def version():
    return str(function("version")())
