"""What a call leaves on the GPU: nothing. (A file of its own: such tests need a GPU that tells programs apart.)"""

import gc
import sys

import conftest
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import gpu_calls  # noqa: E402
import torch  # noqa: E402
from calls import operation, replace  # noqa: E402

from specstate import accept  # noqa: E402


def test_device_memory_is_all_the_callers():
    """With `out=` a call takes no memory of the GPU."""
    c, t = (torch.randint(0, 3, (64, 16), device="cuda") for _ in range(2))
    out = torch.zeros(64, dtype=torch.int32, device="cuda"), torch.zeros_like(c)
    accept.verify_greedy(c, t, out=out)
    torch.cuda.synchronize()

    def used():
        before = conftest.device_memory(), torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(200):
            accept.verify_greedy(c, t, out=out)
        torch.cuda.synchronize()
        return conftest.device_memory() - before[0], torch.cuda.memory_stats()["allocation.all.allocated"] - before[1]

    # the driver counts every program on this GPU: what others take comes and goes, what a call takes is there in each round
    assert (0, 0) in [used() for _ in range(8)]


def test_nothing_is_left_behind():
    """Neither memory of the GPU, nor pinned memory, nor references to arrays, after calls that are taken and calls that are refused."""
    calls = {name: gpu_calls.on_gpu(name) for name in gpu_calls.NAMES}

    def turn():
        for name, call in calls.items():
            operation(name)(**call)
            path, x = gpu_calls.tensors(call)[0]
            with pytest.raises((ValueError, TypeError)):
                operation(name)(**replace(call, path, x[..., None].to(torch.complex64)))
        torch.cuda.synchronize()
        gc.collect()

    def held():
        counts = [sys.getrefcount(x) for call in calls.values() for _, x in gpu_calls.tensors(call)]
        pinned = torch.cuda.host_memory_stats()["active_bytes.current"] if hasattr(torch.cuda, "host_memory_stats") else 0
        return torch.cuda.memory_allocated(), pinned, counts

    for _ in range(3):
        turn()
    before, of_device = held(), conftest.device_memory()
    for _ in range(8):
        turn()
    assert held() == before
    assert conftest.device_memory() <= of_device
