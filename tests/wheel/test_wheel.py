"""The wheel in a clean environment: run by .ci/run after `make wheel` (it needs dist/*.whl, and the network or a pip cache)."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()


def run(*command, **more):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPECSTATE_LIBRARY_PATH", "LD_LIBRARY_PATH")}
    environment.update(more.pop("env", {}))
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, timeout=300, **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def wheel():
    (path,) = (ROOT / "dist").glob("specstate-*.whl")
    return path


@pytest.fixture(scope="session")
def clean(wheel, tmp_path_factory):
    """A virtual environment with the wheel, NumPy and what it requires: nothing of the checkout."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[numpy]")
    return folder / "bin"


def test_contents(wheel):
    assert re.fullmatch(rf"specstate-{re.escape(VERSION)}-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        third = [n for n in names if "/doc/specstate/third_party/" in n]
        texts = {n: z.read(n).decode() for n in third}
    have = {n.removeprefix("specstate/") for n in names if n.startswith("specstate/")}
    wanted = {
        "__init__.py", "__main__.py", "py.typed", "kda.py", "kda.pyi", "hisparse.pyi", "sglang/__init__.py", "sglang/pytest_plugin.py",
        "lib/libspecstate.so", "lib/libspecstate.so.0", "lib/libspecstate_ffi.so", "lib/libtbb.so.12", "lib/libhwy.so.1", "bin/specstate",
        "include/specstate/kda.hpp", "include/specstate/supports.hpp", "include/specstate/version.hpp",
        "lib/cmake/specstate/specstate-config.cmake", "lib/pkgconfig/specstate.pc", "share/doc/specstate/LICENSE",
        "share/doc/specstate/README.md", "share/doc/specstate/docs/environment.md", "share/doc/specstate/src/hisparse/SEMANTICS.md",
    }  # fmt: skip
    assert wanted <= have, wanted - have
    assert any(n.endswith(".safetensors") for n in have)
    assert not [n for n in names if "__pycache__" in n or n.endswith(".pyc")]
    assert {pathlib.Path(n).stem for n in third} - {"cudart"} == {"libtbb", "libhwy", "libfmt", "nlohmann-json3", "libcli11"}
    assert all("icense" in t for t in texts.values())
    assert any(n.endswith("dist-info/licenses/LICENSE") or n.endswith("dist-info/LICENSE") for n in names)


def test_needs_nothing_else(clean):
    """Of shared libraries the wheel asks for those inside it, and for what every Linux of its tag has."""
    package = pathlib.Path(run(clean / "python", "-m", "specstate", "--lib-dir").strip()).parent
    system = re.compile(r"lib(c|m|gcc_s|stdc\+\+|pthread|dl|rt)\.so\.\d+|ld-linux.*")
    inside = {p.name for p in (package / "lib").iterdir()} | {"libtvm_ffi.so"}  # the binding's host process has that loaded
    for binary in [*(package / "lib").glob("*.so.*"), package / "lib/libspecstate_ffi.so", package / "bin/specstate"]:
        dynamic = run("readelf", "-d", binary)
        for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
            assert needed in inside or system.fullmatch(needed), (binary.name, needed)
        for paths in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic):
            assert all(p.startswith("$ORIGIN") for p in paths.split(":")), (binary.name, paths)


def test_tag_and_long_description(wheel):
    """The tag asks for no more than the symbols do; nothing in the description points into the repository."""
    sys.path.insert(0, str(ROOT / "tools"))
    import build_wheel

    assert f"-manylinux_2_{build_wheel.least_glibc_of_wheel(wheel)}_" in wheel.name
    with zipfile.ZipFile(wheel) as z:
        text = z.read(next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    assert "manylinux_2_" in text and not re.findall(r"\]\((?!https?://)", text)


USE = """
import sys
import specstate
assert "numpy" not in sys.modules
import numpy as np
from specstate import accept, draft_kv, hisparse, kda
assert specstate.__version__ == sys.argv[1]
f = lambda *s: np.random.default_rng(0).standard_normal(s).astype(np.float32)
lens, tokens = accept.verify_greedy(np.array([[5, 1, 2, 3]], np.int32), np.array([[1, 2, 9, 4]], np.int32))
assert lens.tolist() == [3] and tokens.tolist() == [[1, 2, 9, 0]]
locs = np.arange(6, dtype=np.int32)[None]
state = hisparse.new_swap_state(locs, 4, 8)
host, device = np.arange(8, dtype=np.uint8)[:, None].repeat(16, 1), np.zeros((6, 16), np.uint8)
rows = hisparse.swap_in(np.array([[[3, 5]]], np.int32), np.array([[8]], np.int32), np.zeros(1, np.int64), np.arange(8)[None], host, device, state)
assert device[rows[0, 0]].tolist() == [[3] * 16, [5] * 16]
s = f(1, 1, 64, 64)
kda.decode(f(1, 1, 64), f(1, 1, 64), f(1, 1, 64), f(1, 1, 64), f(1, 1), f(1), f(64), s, np.zeros(1, np.int32))
assert (s != f(1, 1, 64, 64)).any()
k, v = np.zeros((1, 2, 1, 8), np.float32), np.zeros((1, 2, 1, 8), np.float32)
draft_kv.materialize_into_pool(f(1, 16), f(1, 16, 16), f(1, 8), np.full(1, 1e-6, np.float32), f(4, 8), np.zeros(1, int), np.ones(1, int), k, v)
assert k[0, 1].any() and not k[0, 0].any()
assert specstate.supports("decode", x_q=1)[0] is False
print("good")
"""


def test_one_operation_of_each_family(clean, tmp_path):
    assert run(clean / "python", "-c", USE, VERSION, cwd=tmp_path) == "good\n"


@pytest.mark.parametrize("version", ["0.1.11", "0.1.9"])  # sglang 0.5.23 pins the first; the second is the oldest that the wheel asks for
def test_an_older_tvm_ffi(clean, version, tmp_path):
    run(clean / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", tmp_path / "older", f"apache-tvm-ffi=={version}")
    environment = {"PYTHONPATH": str(tmp_path / "older")}
    code = "import importlib.metadata, tvm_ffi; print(importlib.metadata.version('apache-tvm-ffi'), tvm_ffi.__file__)"
    got, _, place = run(clean / "python", "-c", code, cwd=tmp_path, env=environment).strip().partition(" ")
    assert got == version and place.startswith(str(tmp_path))
    assert run(clean / "python", "-c", USE, VERSION, cwd=tmp_path, env=environment) == "good\n"


def test_command_line(clean, tmp_path):
    assert run(clean / "python", "-m", "specstate", "--version", cwd=tmp_path).strip() == VERSION
    for option in ("--cmake-dir", "--doc-dir"):
        assert run(clean / "specstate", option, cwd=tmp_path) == run(clean / "python", "-m", "specstate", option, cwd=tmp_path)
    text = run(clean / "specstate", "generate", "--prompt", "It was the", "--max-new-tokens", "8", "--mode", "dflash", cwd=tmp_path)
    assert text.strip()
    assert "specstate" in run(clean / "specstate", "doctor", cwd=tmp_path)


def test_entry_point(clean, tmp_path):
    code = (
        "from importlib.metadata import entry_points; (e,) = entry_points(group='sglang.srt.plugins'); e.load()();"
        "import sys; assert 'sglang' not in sys.modules; print(e.name)"
    )
    assert run(clean / "python", "-c", code, cwd=tmp_path) == "specstate\n"


WANTED = f"specstate {VERSION} accepted 3: 1 2 9"


def test_cxx_by_find_package(clean, tmp_path):
    folder = run(clean / "python", "-m", "specstate", "--cmake-dir").strip()
    run("cmake", "-G", "Ninja", "-S", ROOT / "tests" / "consumer", "-B", tmp_path, f"-Dspecstate_DIR={folder}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "consumer").splitlines()[0] == WANTED


def test_cxx_by_pkg_config(clean, tmp_path):
    python = clean / "python"
    environment = {"PKG_CONFIG_PATH": run(python, "-m", "specstate", "--pkg-config-dir").strip()}
    flags = run("pkg-config", "--cflags", "--libs", "specstate", env=environment).split()
    library = run(python, "-m", "specstate", "--lib-dir").strip()
    run("c++", "-std=c++20", ROOT / "tests/consumer/main.cpp", "-o", tmp_path / "consumer", *flags, f"-Wl,-rpath,{library}")
    assert run(tmp_path / "consumer").splitlines()[0] == WANTED
