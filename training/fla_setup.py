"""Import this before anything from `fla`.

flash-linear-attention autotunes each of its dozen kernels over up to a hundred configurations at first use, which costs
minutes of compilation: more than the training itself. Head sizes here are fixed and small, so one sensible
configuration per kernel is taken instead. Set SPECSTATE_FULL_AUTOTUNE=1 to let it search.
"""
import os

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")   # plain Triton kernels only

from triton.runtime.autotuner import Autotuner   # noqa: E402


def _cost(config):
    """Lower is better: 4 warps, 2 stages, block sizes of 64."""
    blocks = sum(abs(v - 64) for k, v in config.kwargs.items() if k in ("BK", "BV", "BT", "BS") and isinstance(v, int))
    return (abs(config.num_warps - 4), abs(config.num_stages - 2), blocks)


if os.environ.get("SPECSTATE_FULL_AUTOTUNE") != "1":
    _init = Autotuner.__init__

    def _one_choice(self, fn, arg_names, configs, *args, **kwargs):
        _init(self, fn, arg_names, [min(configs, key=_cost)] if configs else configs, *args, **kwargs)

    Autotuner.__init__ = _one_choice
