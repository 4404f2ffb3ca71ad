#!/usr/bin/env python3
"""What a call costs before any work: `specstate.kda.decode` of 19 tensors and no token, in microseconds of this thread's own time.

With NumPy, and with torch where it is installed. Beside it what tvm-ffi alone takes to hand over the same tensors: the floor of any binding on it.
"""

import argparse
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))


def arguments(array, heads=2, dim=128, pool=4):
    def f(*shape):
        return array(np.zeros(shape, np.float32))

    def i(n):
        return array(np.zeros(n, np.int32))

    channels = heads * dim
    return {
        **{name: f(0, heads, dim) for name in ("x_q", "x_k", "x_v", "g", "onorm_gate", "out")},
        **{name: f(channels, 4) for name in ("w_q", "w_k", "w_v")},
        **{name: f(pool, channels, 3) for name in ("cs_q", "cs_k", "cs_v")},
        "beta": f(0, heads), "A_log": f(heads), "dt_bias": f(channels), "state": f(pool, heads, dim, dim), "slots": i(0), "cu_seqlens": i(1),
        "onorm_weight": f(dim), "onorm_eps": 1e-6,
    }  # fmt: skip


def load():
    """NumPy, tvm-ffi and the package: only now, so that --help needs none of them."""
    global np, tvm_ffi
    try:
        import numpy as np
        import tvm_ffi

        from specstate import kda
    except ModuleNotFoundError as error:
        raise SystemExit(f"binding_overhead: this Python has no {error.name}: use .venv/bin/python (make build)") from None
    return kda


def per_call(f, calls):
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(calls):
            f()
        best = min(best, (time.thread_time() - start) / calls * 1e6)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", nargs="?", type=int, default=20000, help="calls of one measurement; the best of five counts")
    calls = parser.parse_args().calls
    kda = load()
    makers = {"numpy": lambda x: x}
    try:
        import torch

        makers["torch"] = torch.from_numpy
    except ImportError:
        pass
    nop = tvm_ffi.get_global_func("testing.nop")
    for name, array in makers.items():
        call = arguments(array)
        tensors = [x for x in call.values() if hasattr(x, "shape")]
        kda.decode(**call)
        print(f"{name}: {per_call(lambda: kda.decode(**call), calls):.1f} us for {len(tensors)} tensors, "
              f"of which handing them over {per_call(lambda: nop(*tensors), calls):.1f} us")


if __name__ == "__main__":
    main()
