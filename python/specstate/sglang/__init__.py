"""Drop-in for sglang: its functions replaced by ours, wherever they were imported, and put back.

    import specstate.sglang
    specstate.sglang.install()              # or install(only="hisparse"), install(only=["kda", "transfer_cache_dsv4_mla"])
    specstate.sglang.uninstall()

In a server set ``SPECSTATE_SGLANG=1`` (or ``SPECSTATE_SGLANG=hisparse,kda,draft_kv``): the entry point `plugin` in sglang's plugin
group then installs in every process; without the variable it does nothing. The modules of sglang 0.5.23 and those of the trees of
summer 2026 are known.

A call that this build cannot run (a GPU tensor without a CUDA kernel for it, head dimensions or dtypes that our kernels do not have)
goes to sglang's own function; the logger ``specstate.sglang`` says once for each function which of the two is in use, and why.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import types
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

from .._arguments import flag, kind_of, refusal

__all__ = ["install", "installed", "plugin", "uninstall"]

def __dir__():
    return sorted(__all__)


_log = logging.getLogger(__name__)


class _Target(NamedTuple):
    family: str
    name: str  # ours, in specstate.<family>
    modules: tuple  # where sglang has it, the newest tree first
    probe: str  # the argument that says where the call runs
    attribute: str = ""  # sglang's name where it differs
    heads: tuple = ()  # arguments whose last dimensions are head dimensions


_HISPARSE = ("sglang.kernels.ops.kvcache.hisparse", "sglang.jit_kernel.hisparse")
_FOLD = (
    "sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode",
    "sglang.kernels.ops.attention.fla.kda_replayssm_spec_decode",
)
_GDN_FOLD = (
    "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_fold",
    "sglang.kernels.ops.attention.fla.gdn_replayssm_spec_fold",
)
_MATERIALIZE = ("sglang.kernels.ops.speculative.fused_kv_materialize", "sglang.jit_kernel.fused_kv_materialize")

_TARGETS = (
    *(
        _Target("hisparse", "load_" + name, _HISPARSE, probe)
        for name, probe in (
            ("cache_to_device_buffer_spec_mla", "top_k_tokens"),
            ("cache_to_device_buffer_mla", "top_k_tokens"),
            ("cache_to_device_buffer_dsv4_mla", "top_k_tokens"),
            ("blocks_to_device_buffer_mha", "top_k_blocks"),
        )
    ),
    _Target("hisparse", "copy_cache_planned_mla", _HISPARSE, "miss_src"),
    _Target("hisparse", "transfer_cache_dsv4_mla", _HISPARSE, "src_indices"),
    _Target(
        "kda",
        "fused_kda_decode_mtp_dspark",
        ("sglang.kernels.ops.attention.kda_decode_mtp", "sglang.kernels.ops.kimi_k3.kda_decode_mtp"),
        "x_q",
    ),
    _Target("kda", "commit_kda_replayssm_spec", _FOLD, "checkpoint_state", heads=("rawv_cache", "rawk_cache")),
    _Target("kda", "commit_kda_replayssm_spec_all_layers", _FOLD, "checkpoint_state", heads=("rawv_cache", "rawk_cache")),
    # Its records come from the function below, whose arithmetic it repeats.
    _Target("kda", "commit_gdn_replayssm_fold_all_layers", _GDN_FOLD, "checkpoint_state", heads=("rawv_cache", "rawk_cache")),
    _Target(
        "kda",
        "fused_sigmoid_gating_delta_rule_update",
        (
            "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
            "sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent",
        ),
        "q",
        heads=("q", "v"),
    ),
    _Target(
        "kda",
        "cutedsl_fused_sigmoid_gating_kda_update",
        ("sglang.kernels.ops.attention.cutedsl_kda", "sglang.jit_kernel.cutedsl_kda"),
        "q",
        heads=("q", "v"),
    ),
    _Target("draft_kv", "FusedKVMaterializeHelper", _MATERIALIZE, "layers"),
    _Target("draft_kv", "fused_norm_rope_stacked", _MATERIALIZE, "kv", attribute="_fused_norm_rope_stacked"),
)
_FAMILIES = ("hisparse", "kda", "draft_kv")
# The backend that would call the fused KDA verify, but demands Blackwell for it.
_KDA_BACKEND = ("sglang.srt.layers.attention.linear.kda_backend", "KDAAttnBackend", "_can_run_dspark_cutedsl_mtp")

_swaps = []  # (original, replacement) in the order of installation
_predicates = []  # (class, attribute, original)
_changing = threading.RLock()  # installing and uninstalling, one at a time


# ----------------------------------------------------------------------------------------------------------- one call


def _cuda_built():
    from .._library import function

    return bool(function("cuda_built")())


def _on_gpu(x):
    return bool(getattr(x, "is_cuda", False)) or type(x).__module__.partition(".")[0] == "cupy"


def _argument(f, name):
    """A reader of argument `name` from a call's (args, kwargs); None where it was not given."""
    parameter = inspect.signature(f).parameters[name]
    index = -1 if parameter.kind is parameter.KEYWORD_ONLY else list(inspect.signature(f).parameters).index(name)

    def read(args, kwargs):
        if name in kwargs:
            return kwargs[name]
        return args[index] if 0 <= index < len(args) else None

    return read


def _dtype(x):
    return str(getattr(x, "dtype", "")).rpartition(".")[2]


def _uncovered(x, name):
    """Why our kernels do not take a call with this array of heads; None if they may."""
    shape = getattr(x, "shape", ())
    if not isinstance(shape, tuple) or not shape:
        return None  # no array of heads: refused by name
    if shape[-1] not in (64, 128):
        return f"head dimension {shape[-1]} of {name} is not 64 or 128"
    if _dtype(x) not in ("bfloat16", "float32"):
        return f"dtype {_dtype(x)} of {name} is not bfloat16 or float32"
    return None


def _replacement(target, ours, original, options):
    """A function in the place of sglang's: ours, or sglang's own where ours does not cover the call."""
    probe = _argument(ours, target.probe)
    heads = [(name, _argument(ours, name)) for name in target.heads]
    cuda_is_missing = not _cuda_built()
    said, said_ours = set(), []

    def say(which, why):
        if (which, why) not in said:
            said.add((which, why))
            _log.info("%s: %s is in use: %s", target.name, which, why)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        nonlocal cuda_is_missing
        if cuda_is_missing and _on_gpu(probe(args, kwargs)):
            say("sglang's own for GPU tensors", "this build of specstate has no CUDA kernel for it")
            return original(*args, **kwargs)
        for name, read in heads:
            why = _uncovered(read(args, kwargs), name)
            if why is not None:
                say("sglang's own", why)
                return original(*args, **kwargs)
        kwargs.update(options)
        try:
            result = ours(*args, **kwargs)
        except NotImplementedError as refusal:  # raised by the checks: nothing is written yet
            if not _on_gpu(probe(args, kwargs)):
                raise
            cuda_is_missing = "no CUDA kernel for this operation" in str(refusal)  # else it is this call that is refused
            say("sglang's own for GPU tensors", str(refusal))
            return original(*args, **{name: x for name, x in kwargs.items() if name not in options})
        if not said_ours:
            said_ours.append(True)
            say("specstate's", f"it covers the call on {'the GPU' if _on_gpu(probe(args, kwargs)) else 'the CPU'}")
        return result

    replacement.__specstate__ = target.name
    return replacement


def _replacement_class(target, ours, original):
    """A class in the place of sglang's; where the weights are out of our reach its instances are sglang's own."""

    class Replacement(ours):
        __specstate__ = target.name
        __wrapped__ = original

        def __new__(cls, layers, *args, **kwargs):
            try:
                weights = [layer.self_attn.qkv_proj.weight for layer in layers]
            except (AttributeError, TypeError):
                weights = []  # no layers: refused by name
            if any(map(_on_gpu, weights)) and not _cuda_built():
                _log.info("%s: sglang's own is in use: this build of specstate has no CUDA kernel for it", target.name)
                return original(layers, *args, **kwargs)
            _log.info("%s: specstate's is in use: the weights are where it has kernels", target.name)
            return super().__new__(cls)

    Replacement.__name__ = Replacement.__qualname__ = original.__name__
    return Replacement


# ------------------------------------------------------------------------------------------------------- installation


def _swap(old, new):
    """Every module attribute that is `old` becomes `new`; returns the names of the modules."""
    changed = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        try:
            attributes = list(vars(module).items())
        except Exception:  # a module of a class that shows none: it has not imported anything by that name
            continue
        for attribute, value in attributes:
            if value is old:
                setattr(module, attribute, new)
                changed.append(name)
    return changed


def _chosen(only):
    if only is None:
        return _TARGETS
    try:
        names = [n.strip() for n in only.split(",")] if isinstance(only, str) else list(only)
    except TypeError:
        raise refusal(TypeError, f"only: expected a name, a sequence of names or None, got {kind_of(only)}.") from None
    known = {*_FAMILIES, *(t.name for t in _TARGETS)}
    wrong = [repr(name) for name in names if not isinstance(name, str) or name not in known] or ([] if names else ["none of them"])
    if wrong:
        raise ValueError(f"install: only: expected families or functions among {', '.join(sorted(known))} (None: all), got {wrong[0]}.")
    return tuple(t for t in _TARGETS if t.family in names or t.name in names)


def _find(target):
    """(module, sglang's function) in the newest tree that has it, or (None, why not, the exception that is behind it or None)."""
    why, cause = "no module of sglang has it", None
    for path in target.modules:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if path != error.name and not path.startswith(f"{error.name}."):
                why, cause = f"{path} does not import: {error}", error
            continue
        except Exception as error:  # sglang's module fails where its own requirements are missing: it cannot call it either
            why, cause = f"{path} does not import: {error}", error
            continue
        found = getattr(module, target.attribute or target.name, None)
        if found is not None:
            return path, found, None
    return None, why, cause


def install(only: "str | Iterable[str] | None" = None, strict: bool = False) -> "dict[str, list[str]]":
    """Replaces sglang's functions by ours, also in modules that imported them before. Returns {function: modules changed}.

    only: a family ("hisparse", "kda", "draft_kv"), a function, a list of them, or names with commas between; None: everything.
    strict: keep the limits of sglang's compiled kernels, with their texts; otherwise what ours can do more is allowed.

    Functions that this tree of sglang lacks are left out, with a log line; ImportError if sglang is not installed, has none of
    them, or does not import (what is missing is the cause of the error); ValueError for an unknown name. A second call replaces the first; one that fails leaves the first in place.
    """
    targets, strict = _chosen(only), flag("strict", strict)
    try:
        found = importlib.util.find_spec("sglang")
    except ValueError:  # a module without a spec, which somebody put there
        found = None
    if found is None:
        raise ImportError("specstate.sglang: sglang is not installed in this Python; there is nothing to replace")
    with _changing:
        return _install(targets, strict)


def _install(targets, strict):
    own = {id(replacement): original for original, replacement in _swaps}  # what an earlier call put there
    plan, failed = [], None
    for target in targets:
        where, original, cause = _find(target)
        if where is None:
            _log.info("%s: not replaced: %s", target.name, original)
            failed = failed or (cause and (original, cause))
            continue
        original = own.get(id(original), original)
        ours = getattr(importlib.import_module(f"specstate.{target.family}"), target.name)
        if isinstance(ours, type):
            replacement = _replacement_class(target, ours, original)
        else:
            options = {"strict_sglang": strict} if target.name == "load_cache_to_device_buffer_spec_mla" else {}
            replacement = _replacement(target, ours, original, options)
        plan.append((target.name, original, replacement))
    if not plan:
        if failed:  # sglang is there, but something that it needs is not
            raise ImportError(f"specstate.sglang: none of the functions can be replaced; {failed[0]}") from failed[1]
        looked = sorted({m for t in targets for m in t.modules})
        raise ImportError(f"specstate.sglang: this sglang has none of the functions; looked in {', '.join(looked)}")
    _cuda_built()  # the library loads, or nothing changes
    before, was_open = list(_swaps), bool(_predicates)
    uninstall()
    try:
        return _put(plan)
    except BaseException:  # a module may refuse to be changed
        uninstall()
        for swap in before:
            _swaps.append(swap)
            _swap(*swap)
        if was_open:
            _open_dispatch()
        raise


def _put(plan):
    done = {}
    for name, original, replacement in plan:
        _swaps.append((original, replacement))  # first: what is half done can be undone
        done[name] = _swap(original, replacement)
        _log.info("%s: replaced in %s", name, ", ".join(done[name]))
    if "fused_kda_decode_mtp_dspark" in done:
        _open_dispatch()
    return done


def uninstall() -> None:
    """Puts sglang's own functions back, everywhere. Does nothing if nothing is installed."""
    with _changing:
        while _predicates:
            owner, attribute, original = _predicates.pop()
            setattr(owner, attribute, original)
        while _swaps:
            original, replacement = _swaps.pop()
            _swap(replacement, original)


def installed() -> "list[str]":
    """Names of the functions that are replaced now."""
    return [replacement.__specstate__ for _, replacement in _swaps]


# ---------------------------------------------------------------------------------------------- the dispatch on Hopper


class _Fields:
    """`base` with some attributes replaced."""

    def __init__(self, base, **fields):
        self.__dict__.update(fields)
        self._base = base

    def __getattr__(self, name):
        return getattr(self._base, name)


def _open_dispatch():
    """sglang's KDA backend takes the fused verify on compute capability 10 only. Ours has kernels for 9 and above: the backend's own
    predicate is asked again, with the capability of its one device comparison lifted; everything else in it stays as it is."""
    if not _cuda_built():
        _log.info("fused_kda_decode_mtp_dspark: sglang's dispatch stays as it is: this build of specstate has no CUDA kernel for it")
        return
    path, owner_name, attribute = _KDA_BACKEND
    try:
        owner = getattr(importlib.import_module(path), owner_name)
        original = owner.__dict__[attribute]
    except Exception as error:
        _log.info("fused_kda_decode_mtp_dspark: sglang's dispatch stays as it is: %s", error)
        return
    lifted = []

    def predicate(*args, **kwargs):
        if original(*args, **kwargs):
            return True
        torch = original.__globals__["torch"]
        if torch.cuda.get_device_capability()[0] != 9:
            return False
        if not lifted:
            shown = _Fields(torch, cuda=_Fields(torch.cuda, get_device_capability=lambda *_: (10, 0)))
            again = types.FunctionType(
                original.__code__, {**original.__globals__, "torch": shown}, attribute, original.__defaults__, original.__closure__
            )
            again.__kwdefaults__ = original.__kwdefaults__
            lifted.append(again)
            _log.info("fused_kda_decode_mtp_dspark: sglang's dispatch is open on Hopper: specstate has the kernel")
        return lifted[0](*args, **kwargs)

    setattr(owner, attribute, functools.wraps(original)(predicate))
    _predicates.append((owner, attribute, original))


def plugin() -> None:
    """Entry point of sglang's plugin group: installs what SPECSTATE_SGLANG names: "1" everything, "0" or nothing: nothing, else families
    and functions with commas between."""
    wanted = os.environ.get("SPECSTATE_SGLANG", "").strip()
    if wanted in ("", "0"):
        return
    try:
        _chosen(None if wanted == "1" else wanted)
    except ValueError as error:
        known = str(error).partition("among ")[2].partition(" (None")[0]
        raise ValueError(
            f"specstate: SPECSTATE_SGLANG: expected 1 (everything), 0 (nothing), or names with commas between among {known}, got {wanted!r}."
        ) from None
    install(None if wanted == "1" else wanted)
