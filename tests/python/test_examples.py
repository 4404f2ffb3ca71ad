"""The examples run and say what they should."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from test_sglang import write_tree

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("SPECSTATE_LIBRARY_PATH", ROOT / "build" / "release" / "lib")).parent
STEP = [
    "accepted 3 tokens: 11 13 19; states are equal bit for bit",
    "would fold take float32 counts? no: fold: accept: expected dtype int32 or int64, got float32.",
]


def run(*command, path=()):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [ROOT / "python", *path])), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("arrays", ["numpy", "torch", "cupy"])
def test_speculative_step(arrays):
    if importlib.util.find_spec(arrays) is None:
        pytest.skip({"torch": "needs-torch: torch is not installed", "cupy": "needs-cupy: CuPy is not installed"}[arrays])
    assert run(sys.executable, ROOT / "examples" / "speculative_step.py", "--arrays", arrays)[0] == STEP


SPARSE = ["12 rows selected, 3 copied from the host, all right; 22 positions committed"]


@pytest.mark.parametrize("name, printed", [("speculative_step", STEP), ("sparse_step", SPARSE)])
def test_cpp(name, printed, tmp_path):
    source = ROOT / "examples" / "cpp" / f"{name}.cpp"
    program = tmp_path / name
    run("c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "include", "-I", BUILD / "include", source, "-o", program,
        "-L", BUILD / "lib", "-lspecstate", f"-Wl,-rpath,{BUILD / 'lib'}")  # fmt: skip
    assert run(program)[0] == printed


def test_sglang(tmp_path):
    if importlib.util.find_spec("sglang") is None:
        write_tree(tmp_path)  # a package laid out like it
    printed, log = run(sys.executable, ROOT / "examples" / "sglang_drop_in.py", path=[tmp_path])
    assert printed == ["rows that arrived: [48, 0, 16, 0]"]
    assert "copy_cache_planned_mla: specstate's is in use: it covers the call on the CPU" in log


@pytest.mark.parametrize("name, missing", [("speculative_step", "numpy"), ("sglang_drop_in", "numpy"), ("sglang_drop_in", "sglang")])
def test_what_is_missing_is_one_line(name, missing, tmp_path):
    """No traceback where a library is not installed."""
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv = ['x']; runpy.run_path({str(ROOT / 'examples' / name)!r} + '.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(ROOT / "python")))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and missing in done.stderr, done.stderr
