"""What a process keeps of a GPU (attributes of kernels, how many clusters fit, flags) it keeps of each: every call on the first GPU, then on the second,
in one process, gives the same."""

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import torch  # noqa: E402

if torch.cuda.device_count() < 2:
    pytest.skip(f"needs-two-gpus: torch sees {torch.cuda.device_count()}", allow_module_level=True)

import gpu_calls  # noqa: E402
from calls import operation, replace  # noqa: E402
from draft_kv_cases import FeatureProblem, Problem, raw  # noqa: E402
from draft_kv_on_gpu import run  # noqa: E402


def on_each(call):
    """call() with one GPU after the other current; what it returns, {name: tensor}, is the same."""
    with torch.cuda.device(0):
        want = call()
    with torch.cuda.device(1):
        got = call()
    assert want and want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0, equal_nan=True, msg=str(name))


def of_call(name, change=lambda arguments: arguments, **sizes):
    arguments = change(gpu_calls.on_gpu(name, **sizes))
    operation(name)(**arguments)
    return gpu_calls.results(arguments)


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_every_operation(name):
    on_each(lambda: of_call(name))


@pytest.mark.parametrize("requests", [1, 8, 40])
def test_swaps_of_all_sizes(requests):
    """Clusters of 16 CTAs and fewer."""
    on_each(lambda: of_call("swap_in", b=requests, s=4, k=2048, hot=4096, tail=64, context=6144))
    on_each(lambda: of_call("load_cache_to_device_buffer_spec_mla", b=requests, s=4, k=2048, hot=4096, tail=64, context=6144))
    on_each(lambda: of_call("load_cache_to_device_buffer_mla", b=requests, k=2048, hot=4096, context=6144))
    on_each(lambda: of_call("copy_cache_planned_mla", b=requests, k=64, rows=8192))


@pytest.mark.parametrize("requests,heads,tokens", [(1, 2, 1), (2, 12, 8), (2, 2, 16), (8, 12, 4), (32, 12, 8), (3, 96, 8)])
def test_kda_of_all_forms(requests, heads, tokens):
    def half(arguments):
        arguments["cu_seqlens"] = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32).cuda()
        for path, x in gpu_calls.tensors(arguments):
            if path[0] in ("x_q", "x_k", "x_v", "g", "beta", "out") or path in (("rings", 0), ("rings", 1)):
                arguments = replace(arguments, path, x.bfloat16())
        return arguments

    sizes = dict(n=requests, t=requests * tokens, h=heads, d=128)
    on_each(lambda: of_call("verify", half, ring=tokens, **sizes))
    on_each(lambda: of_call("decode", half, **sizes))


@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 128, 200, 300, 1100])
def test_draft_kv_of_all_forms(tokens):
    shape = dict(io="bf16", hidden=512, D=128, R=128, N=2, L=2, slots=tokens + 9)
    for p in (Problem(np.random.default_rng(1), T=tokens, **shape), FeatureProblem(np.random.default_rng(2), T=tokens, features=1280, **shape)):
        on_each(lambda p=p: {name: torch.from_numpy(raw(pool).copy()) for name, pool in zip("kv", run(p))})
