"""Arrays of any framework, in and out, without copies.

`array_in` and `array_out` turn an argument into something that the library takes by DLPack; `shape_of` reads the shape of an argument
that may be none; `empty_like` makes a result of the kind of an argument, allocated by that argument's framework.
"""

import sys
from contextlib import nullcontext
from operator import index

from ._arguments import CONVERSION, noted, refusal
from ._library import function, look, not_handed_over

# NumPy cannot export these by DLPack: they cross as integers of the same size under their own name.
_ML_DTYPES = {"bfloat16": ("uint16", "bfloat16"), "float8_e4m3fn": ("uint8", "float8_e4m3fn")}

_as_they_are = {type(None)}  # types that the binding takes without a word
_torch = set()  # torch's, which came before
_plain = set()  # NumPy dtypes that DLPack knows
_ndarray = None  # NumPy's class, once one came
_kept = []  # what the binding has the addresses of


def _kind(x):
    return type(x).__module__.partition(".")[0]


def _framework(x):
    """The framework whose array it is, also of a class that a program derived from that framework's."""
    roots = (c.__module__.partition(".")[0] for c in type(x).__mro__)
    return next((root for root in roots if root in ("torch", "cupy", "jax", "jaxlib", "numpy")), _kind(x))


def derived(x):
    """Is it a tensor of a class that a program derived from torch's? Its `__torch_function__` may say anything of it."""
    kind = type(x)
    if kind is _ndarray or kind in _torch:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ())) and _kind(x) != "torch"


_as_it_is = nullcontext()


def undispatched(x):
    """A context in which torch says of a tensor what is so, not what its class says."""
    return sys.modules["torch"]._C.DisableTorchFunctionSubclass() if derived(x) else _as_it_is


class _Alias:
    """A writable alias of a read-only NumPy array, for inputs only: NumPy refuses to export those."""

    def __init__(self, array):
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def _from_numpy(name, np, x):
    dtype = x.dtype
    if isinstance(x, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise refusal(ValueError, f"{name}: expected an array without a mask, got {type(x).__name__}.")
    if x.ndim > 8:
        raise refusal(ValueError, f"{name}: expected at most 8 dimensions, got {x.ndim}.")
    _whole_strides(name, x)
    if dtype.byteorder == ">":
        raise refusal(ValueError, f"{name}: expected native byte order, got {dtype.str}.")
    if dtype.name in _ML_DTYPES:
        import tvm_ffi

        raw, known = _ML_DTYPES[dtype.name]
        return function("reinterpret")(tvm_ffi.from_dlpack(_writable(np, x.view(raw))), tvm_ffi.dtype(known))
    if dtype.kind not in "biuf" or dtype.char == "g":  # long doubles have no DLPack type
        raise refusal(ValueError, f"{name}: expected a dtype of real numbers, got {dtype}.")
    _plain.add(dtype)
    return _writable(np, x)


def _whole_strides(name, x):
    """DLPack counts strides in elements: a field of a structured array may step by parts of one."""
    if x.itemsize and any(stride % x.itemsize for stride in x.strides):
        raise refusal(ValueError, f"{name}: expected strides that are multiples of the itemsize {x.itemsize}, got strides of {x.strides} bytes.")


def _writable(np, x):
    return x if x.flags.writeable else np.asarray(_Alias(x))


def _known(kind, signs=None):
    """A type of arrays that crosses at once from now on (`_library.at_once`), where its framework can show one that way."""
    table = getattr(kind, "__dlpack_c_exchange_api__", None)
    if table is not None:
        _kept.append((kind, table, signs))
        function("add_type")(id(kind), id(table), 0 if signs is None else id(signs))


def _signs(torch):
    """What says a tensor's bits, as a dict. Not `is_neg`, where there is a choice: it asks a derived class, and gives the GIL back."""
    return getattr(torch._C, "_get_tensor_metadata", None) or (lambda x: {"neg": True} if x.is_neg() else {})


def _from_torch(torch, name, x):
    try:
        negative = "neg" in _signs(torch)(x)
    except RuntimeError:  # of a tensor without memory, which the call refuses
        negative = False
    if negative:
        raise refusal(ValueError, f"{name}: expected a tensor whose memory holds its numbers, got one with torch's negative bit (hand over its resolve_neg()).")
    return x


def array_in(name, x):
    """An input argument (None stays None)."""
    global _ndarray
    kind = type(x)
    if kind in _as_they_are or (kind is _ndarray and x.dtype in _plain and x.flags.carray):
        return x
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # half imported by another thread they have no classes yet
    if np is not None and isinstance(x, getattr(np, "ndarray", ())):
        _ndarray = np.ndarray
        return _from_numpy(name, np, x)
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        if kind not in _torch and _kind(x) == "torch":  # not every class that a program derives (which tvm-ffi keeps alive, but we need not)
            _known(kind, _signs(torch))
            _torch.add(kind)
        return _from_torch(torch, name, x)
    if (hasattr(x, "__dlpack__") or hasattr(x, "__tvm_ffi_object__")) and not isinstance(x, type):
        if _kind(x) in ("cupy", "tvm_ffi"):
            _known(kind)
            _as_they_are.add(kind)
        return x
    raise refusal(TypeError, f"{name}: expected an array that supports DLPack, got {type(x).__name__}.")


def array_out(name, x):
    """An argument that the call writes: refused if it is read-only."""
    kind = type(x)
    if kind in _as_they_are or (kind is _ndarray and x.dtype in _plain and x.flags.carray):  # which is writable too
        return x
    np = sys.modules.get("numpy")
    if np is not None and isinstance(x, getattr(np, "ndarray", ())) and not x.flags.writeable:
        raise refusal(ValueError, f"{name}: expected a writable array, got a read-only one.")
    if _framework(x) in ("jax", "jaxlib"):
        raise refusal(ValueError, f"{name}: expected a writable array, got an immutable JAX array.")
    return array_in(name, x)


def tensor(name, x):
    """A list crosses the binding as tensors, so its entries (of `array_in`, `array_out`) are wrapped here."""
    import tvm_ffi

    try:
        t = x if isinstance(x, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(x)
    except RecursionError:  # not a question of the array
        raise
    except CONVERSION as error:
        raise refusal(ValueError, f"{name}: expected {not_handed_over(x, error)}") from error
    except Exception as error:
        noted(error, name)
        raise
    look(name, t)
    return t


def is_cuda(x):
    """Does the array live on a GPU?"""
    device = getattr(x, "__dlpack_device__", None)
    try:
        with undispatched(x):
            return device is not None and int(device()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
    except (*CONVERSION, LookupError):  # no array: its check says so
        return False


def shape_of(name, x, ndim=None):
    """The shape of an argument, as a tuple; of `ndim` dimensions if that is given."""
    try:
        with undispatched(x):
            shape, _ = tuple(map(index, x.shape)), x.dtype
    except (AttributeError, TypeError):
        raise refusal(TypeError, f"{name}: expected an array that supports DLPack, got {type(x).__name__}.") from None
    except CONVERSION as error:  # tvm-ffi's, of complex numbers
        raise refusal(ValueError, f"{name}: expected {not_handed_over(x, error)}") from error
    except Exception as error:
        noted(error, name)
        raise
    if ndim is not None and len(shape) != ndim:
        raise refusal(ValueError, f"{name}: expected {ndim} dimensions, got shape {shape}.")
    return shape


def dtype_of(x):
    """"bfloat16" of NumPy's bfloat16 and of torch.bfloat16."""
    with undispatched(x):
        return str(x.dtype).rpartition(".")[2]


def empty_like(like, shape, dtype=None):
    """An uninitialised array of `shape`, of the kind and device of `like`; `dtype` is a name, by default that of `like`."""
    kind = _framework(like)
    if kind == "torch":
        import torch

        with undispatched(like):
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
