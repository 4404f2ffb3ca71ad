"""What a call costs this thread before the GPU works: ours beside sglang's own wrapper, CUDA tensors, no request in the batch.

    python3 bench/peers/overhead.py --wheel FOLDER [--json FILE]

The speculative swap of 18 tensors with `num_real_reqs` of 0 (both launch their kernels); the same in sglang's place, as `specstate.sglang` installs it;
and of ours a decode without a token (19 tensors, no launch). Microseconds of this thread's own CPU time, the best of several rounds; the GPU is idle by then.
"""

import time

import hisparse as worlds
import peers
import torch
from peers import SGLANG, working

import specstate.sglang as drop_in
from specstate import hisparse, kda


def per_call(f, calls):
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(calls):
            f()
        best = min(best, (time.thread_time() - start) / calls * 1e6)
    return best


def measure(timer, report, options):
    from sglang.kernels.ops.kvcache import hisparse as theirs

    w = worlds.World(1, 4, 576, 196)
    w.real.zero_()
    mine, peer = w.spec(hisparse.HiSparseSpecState), w.spec(theirs.HiSparseSpecState)
    calls = working({"ours": lambda _: hisparse.load_cache_to_device_buffer_spec_mla(**mine),
                     SGLANG: lambda _: theirs.load_cache_to_device_buffer_spec_mla(**peer)}, "spec_swap")  # fmt: skip
    n = 100 if options.quick else 400  # less than what the driver queues
    times = {who: per_call(lambda c=c: c(0), n) for who, c in calls.items()}
    report("overhead/spec_swap/tensors=18", times)

    drop_in.install(only="load_cache_to_device_buffer_spec_mla")
    calls = working({"ours": lambda _: theirs.load_cache_to_device_buffer_spec_mla(**peer)}, "spec_swap")
    report("overhead/spec_swap_as_sglangs/tensors=18", {**times, **{who: per_call(lambda c=c: c(0), n) for who, c in calls.items()}})
    drop_in.uninstall()

    import tvm_ffi

    nop = tvm_ffi.get_global_func("testing.nop")
    for device in ("cuda", "cpu"):
        decode = decode_without_tokens(device)
        tensors = [x for x in decode.values() if isinstance(x, torch.Tensor)]
        calls = working({"ours": lambda _: kda.decode(**decode), "tvm-ffi's hand-over alone": lambda _: nop(*tensors)}, "decode")
        report(f"overhead/decode/device={device},tensors={len(tensors)}", {who: per_call(lambda c=c: c(0), 2000) for who, c in calls.items()})


def decode_without_tokens(device, heads=2, dim=128, pool=4):
    channels = heads * dim
    f = lambda *shape: torch.zeros(shape, device=device)  # noqa: E731
    i = lambda k: torch.zeros(k, dtype=torch.int32, device=device)  # noqa: E731
    return {
        **{name: f(0, heads, dim) for name in ("x_q", "x_k", "x_v", "g", "onorm_gate", "out")}, **{name: f(channels, 4) for name in ("w_q", "w_k", "w_v")},
        **{name: f(pool, channels, 3) for name in ("cs_q", "cs_k", "cs_v")}, "beta": f(0, heads), "A_log": f(heads), "dt_bias": f(channels),
        "state": f(pool, heads, dim, dim), "slots": i(0), "cu_seqlens": i(1), "onorm_weight": f(dim), "onorm_eps": 1e-6,
    }  # fmt: skip


if __name__ == "__main__":
    peers.main(measure)
