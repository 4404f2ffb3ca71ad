"""`specstate.supports`: would a call be taken?"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

from ._library import export, function


def _operations(module):
    """What can be asked about: all of a module that takes arguments which can be refused, so not its tuples of arrays."""
    names = vars(import_module("." + module, __package__))
    return tuple(n for n in names["__all__"] if not (isinstance(names[n], type) and issubclass(names[n], tuple)))


OPERATIONS = {module: _operations(module) for module in ("accept", "draft_kv", "hisparse", "kda")}
_MODULE_OF = {name: module for module, names in OPERATIONS.items() for name in names}


def _check(name):
    """In place of the export `name`: its checks alone. The request is part of this one native call; no state says "only check"."""
    return partial(function("check"), export(name))


_asked = {}  # module -> its functions, with the same code, that call checks instead of exports


def _rebound(f, names):
    copy = FunctionType(f.__code__, names, f.__name__, f.__defaults__, f.__closure__)
    copy.__kwdefaults__ = f.__kwdefaults__
    return copy


def _checks_of(module):
    checks = _asked.get(module)
    if checks is None:
        own = vars(import_module("." + module, __package__))
        checks = {**own, "function": _check, "at_once": lambda name, arguments: False, "_checking": True}
        for name, f in own.items():
            if isinstance(f, FunctionType) and f.__globals__ is own:
                checks[name] = _rebound(f, checks)
        _asked[module] = checks
    return checks


def _called(checks, name):
    """What is called in the place of `name`: of a class one whose methods only check."""
    f = checks[name]
    if not isinstance(f, type):
        return f
    return type(name, (f,), {"__module__": f.__module__, **{n: _rebound(m, checks) for n, m in vars(f).items() if isinstance(m, FunctionType)}})


def _ours(f):
    """The name of a function or class of ours, or None."""
    module, _, family = getattr(f, "__module__", None).rpartition(".") if isinstance(f, (FunctionType, type)) else ("", "", "")
    known = module == __package__ and f.__name__ in OPERATIONS.get(family, ()) and getattr(sys.modules[f.__module__], f.__name__) is f
    return f"{family}.{f.__name__}" if known else None


def supports(function_name: "str | Callable[..., Any]", /, **arguments: Any) -> tuple[bool, str]:
    """Would ``function_name(**arguments)`` be taken? Returns (True, "") or (False, the text of the error that the call would raise).

    function_name: "verify", "kda.verify" or "specstate.kda.verify", or the function itself; any function of `specstate.accept`, `draft_kv`, `hisparse` and
    `kda`, and their classes `Coordinator`, `KvProjection` and `FusedKVMaterializeHelper` (the tuples of arrays take anything). arguments:
    those of the call, by name; a result that it would allocate is allocated and dropped.

    Runs the call's own checks on shapes, dtypes, devices, strides, overlaps and numbers, and nothing else: no element of an array is
    read or written, so errors of contents (ids outside, lengths that do not fit) are not foreseen. Of a class the checks of making one are run:
    nothing is packed or copied. A name that is none of ours raises ValueError.
    """
    if (given := _ours(function_name)) is not None:
        function_name = given
    path = function_name.removeprefix("specstate.").rpartition(".") if isinstance(function_name, str) else ("", "", None)
    module = _MODULE_OF.get(path[2])
    if module is None or path[0] not in ("", module):
        raise ValueError(f"supports: function_name: expected one of {', '.join(sorted(_MODULE_OF))}, got {function_name!r}.")
    try:
        _called(_checks_of(module), path[2])(**arguments)
    except (ValueError, NotImplementedError, RuntimeError, TypeError, MemoryError) as error:
        return False, str(error)
    return True, ""
