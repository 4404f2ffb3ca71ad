"""The examples on a GPU, with torch and with CuPy, say what they say on the CPU."""

import os
import pathlib
import subprocess
import sys

import conftest
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

STEP = [
    "accepted 3 tokens: 11 13 19; states are equal bit for bit",
    "would fold take float32 counts? no: fold: accept: expected dtype int32 or int64, got float32.",
]


@pytest.mark.parametrize("arrays", ["torch", "cupy"])
def test_speculative_step(arrays):
    pytest.importorskip(arrays, reason=f"needs-{arrays}: {arrays} is no requirement")
    path = os.pathsep.join([str(conftest.ROOT / "python"), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, str(pathlib.Path(conftest.ROOT) / "examples" / "speculative_step.py"), "--arrays", arrays], capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=path), timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == STEP
