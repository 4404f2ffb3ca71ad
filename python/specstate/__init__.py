"""specstate: the state of speculative decoding, proposed, verified, committed and rolled back.

Three kinds of state: sparse KV in host memory (`specstate.hisparse`), recurrent KDA state (`specstate.kda`) and a drafter's
KV (`specstate.draft_kv`), with acceptance (`specstate.accept`) between them. Tensor arguments take any object that speaks
DLPack, zero-copy. Where the tensors live decides the backend; an operation without CUDA code raises NotImplementedError for tensors
on a GPU. `specstate.sglang` puts these functions in the place of sglang's.

A call that cannot be done raises before anything is written, and the text begins with the function and names the argument: TypeError for an
argument of the wrong kind (no array, no number), ValueError for a wrong dtype, shape, device or value, NotImplementedError for what
this build or the CUDA form lacks. `supports` asks beforehand. NumPy has no bfloat16 of its own: `ml_dtypes`' is taken (`specstate[numpy]`).
`python -m specstate --doc-dir` names the folder of the documentation that an installed wheel holds.

Importing this package imports neither torch nor NumPy and loads no library: the first operation does.
"""

from importlib import import_module as _import_module

_MODULES = ("accept", "draft_kv", "hisparse", "kda", "sglang")

__all__ = ["__version__", "accept", "draft_kv", "hisparse", "kda", "sglang", "supports"]

TYPE_CHECKING = False  # what type checkers take as true; `typing` itself is too slow to import for it
if TYPE_CHECKING:
    from . import accept, draft_kv, hisparse, kda, sglang
    from ._supports import supports

    __version__: str
else:

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
