"""specstate: the state of speculative decoding, proposed, verified, committed and rolled back.

Three kinds of state: sparse KV in host memory (`specstate.hisparse`), recurrent KDA state (`specstate.kda`) and a drafter's
KV (`specstate.draft_kv`), with acceptance (`specstate.accept`) between them. Tensor arguments take any object that speaks
DLPack, zero-copy. Where the tensors live decides the backend; an operation without CUDA code raises NotImplementedError for tensors
on a GPU.

Importing this package imports neither torch nor NumPy and loads no library: the first operation does.
"""

from importlib import import_module as _import_module

_MODULES = ("accept", "draft_kv", "hisparse", "kda")

__all__ = ["__version__", "supports", *_MODULES]

TYPE_CHECKING = False  # what type checkers take as true; `typing` itself is too slow to import for it
if TYPE_CHECKING:
    from . import accept, draft_kv, hisparse, kda
    from ._supports import supports

    __version__: str


def __getattr__(name):
    if name in _MODULES:
        return _import_module("." + name, __name__)
    if name == "supports":
        return _import_module("._supports", __name__).supports
    if name == "__version__":
        from ._library import version

        return version()
    raise AttributeError(f"module 'specstate' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
