"""Arrays of any framework, in and out, without copies.

`inputs` and `outputs` turn an argument into something that the library takes by DLPack; `empty_like` makes a result of the
kind of an argument, allocated by that argument's framework.
"""

import sys

from ._library import function

# NumPy cannot export these by DLPack: they cross as integers of the same size under their own name.
_ML_DTYPES = {"bfloat16": ("uint16", "bfloat16"), "float8_e4m3fn": ("uint8", "float8_e4m3fn")}


def _numpy():
    return sys.modules.get("numpy")


class _Alias:
    """A writable alias of a read-only NumPy array, for inputs only: NumPy refuses to export those."""

    def __init__(self, array):
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def _kind(x):
    return type(x).__module__.partition(".")[0]


def _from_numpy(np, x):
    name = x.dtype.name
    if name in _ML_DTYPES:
        import tvm_ffi

        raw, dtype = _ML_DTYPES[name]
        return function("reinterpret")(tvm_ffi.from_dlpack(_writable(np, x.view(raw))), tvm_ffi.dtype(dtype))
    return _writable(np, x)


def _writable(np, x):
    return x if x.flags.writeable else np.asarray(_Alias(x))


_exportable = set()


def _check_dtype(name, dtype):
    if dtype.byteorder == ">":
        raise ValueError(f"{name}: expected native byte order, got {dtype.str}.")
    if dtype.kind not in "biufc" and dtype.name not in _ML_DTYPES:
        raise ValueError(f"{name}: expected a dtype of numbers, got {dtype}.")
    _exportable.add(dtype)


def array_in(name, x):
    """An input argument (None stays None)."""
    if x is None or _kind(x) == "torch":
        return x
    np = _numpy()
    if np is not None and isinstance(x, np.ndarray):
        if x.dtype not in _exportable:
            _check_dtype(name, x.dtype)
        return _from_numpy(np, x)
    if hasattr(x, "__dlpack__") or hasattr(x, "__tvm_ffi_object__"):
        return x
    raise TypeError(f"{name}: expected an array that supports DLPack, got {type(x).__name__}.")


def array_out(name, x):
    """An argument that the call writes: refused if it is read-only."""
    if x is None:
        return x
    np = _numpy()
    if np is not None and isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one.")
    if _kind(x) in ("jax", "jaxlib"):
        raise ValueError(f"{name}: expected a writable array, got an immutable JAX array.")
    return array_in(name, x)


def empty_like(like, shape, dtype=None):
    """An uninitialised array of `shape`, of the kind and device of `like`; `dtype` is a name, by default that of `like`."""
    kind = _kind(like)
    if kind == "torch":
        import torch

        return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)
    if kind == "cupy":
        import cupy

        return cupy.empty(shape, dtype=like.dtype if dtype is None else dtype)
    import numpy as np

    if dtype is None:
        dtype = like.dtype
    elif dtype in _ML_DTYPES:
        import ml_dtypes

        dtype = getattr(ml_dtypes, dtype)
    return np.empty(shape, dtype=dtype)
