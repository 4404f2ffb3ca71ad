"""Every operation of the package with CUDA tensors: its results are the CPU's; and calls that nobody should make."""

import os
import pathlib
import subprocess
import sys

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import gpu_calls  # noqa: E402
import torch  # noqa: E402
from calls import CALLS, leaves, operation  # noqa: E402


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_the_gpu_gives_what_the_cpu_gives(name):
    cpu, gpu = CALLS[name](), gpu_calls.on_gpu(name)
    operation(name)(**cpu)
    operation(name)(**gpu)
    torch.cuda.synchronize()
    results = dict(gpu_calls.tensors(gpu))
    for path, want in leaves(cpu):
        got = results[path].cpu().numpy()
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=str(path))
        else:
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want, err_msg=str(path))


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_a_call_can_be_captured(name, replayed):
    arguments = gpu_calls.on_gpu(name)
    replay = replayed(lambda: operation(name)(**arguments))
    replay()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calls_that_nobody_should_make(seed):
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(conftest.ROOT / "python"), str(here), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-X", "faulthandler", str(here / "gpu_calls.py"), str(seed), "400"], capture_output=True, text=True, timeout=300,
                          env=dict(os.environ, PYTHONPATH=path))  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    taken, refused = map(int, done.stdout.split())
    assert taken > 30 and refused > 30
