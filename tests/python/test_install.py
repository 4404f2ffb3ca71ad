"""What `cmake --install` gives: found by CMake and by pkg-config, and complete."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WANTED = ["accepted 3: 1 2 9", "verify_greedy: out_tokens: expected shape [b=1, W=4], got (1, 3)."]


def run(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    build = os.environ.get("SPECSTATE_LIBRARY_PATH")
    run("cmake", "--install", pathlib.Path(build).parent if build else ROOT / "build" / "release", "--prefix", folder)
    return folder


def check(output):
    version = (ROOT / "VERSION").read_text().strip()
    assert output.splitlines()[0] == f"specstate {version} {WANTED[0]}"
    assert output.splitlines()[1] == WANTED[1]


def test_find_package(prefix, tmp_path):
    run("cmake", "-G", "Ninja", "-S", ROOT / "tests" / "consumer", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    check(run(tmp_path / "consumer"))


def test_pkg_config(prefix, tmp_path):
    environment = dict(os.environ, PKG_CONFIG_PATH=str(next(prefix.rglob("specstate.pc")).parent))
    flags = run("pkg-config", "--cflags", "--libs", "specstate", env=environment).split()
    run("c++", "-std=c++20", ROOT / "tests/consumer/main.cpp", "-o", tmp_path / "consumer", *flags)
    library = next(prefix.rglob("libspecstate.so")).parent
    check(run(tmp_path / "consumer", env=dict(os.environ, LD_LIBRARY_PATH=str(library))))


def test_add_subdirectory_configures_the_library_alone(tmp_path):
    run("cmake", "-G", "Ninja", "-S", ROOT / "tests" / "consumer", "-B", tmp_path, f"-DSPECSTATE_SOURCE={ROOT}")
    targets = run("cmake", "--build", tmp_path, "--target", "help")
    assert "libspecstate.so" in targets
    for unwanted in ("_test:", "specstate_ffi", "specstate_cli", "_fuzz:"):
        assert unwanted not in targets


def test_everything_is_installed(prefix):
    names = {p.relative_to(prefix).as_posix() for p in prefix.rglob("*") if p.is_file()}
    public = {p.name.removesuffix(".in") for p in (ROOT / "include" / "specstate").iterdir()}
    assert {f"include/specstate/{name}" for name in public} <= names
    assert "bin/specstate" in names and "share/doc/specstate/LICENSE" in names
    for path in (ROOT / "models").rglob("*.safetensors"):
        assert f"share/specstate/{path.relative_to(ROOT)}" in names


@pytest.mark.parametrize("cuda, status", [("ON", 1), ("AUTO", 0), ("OFF", 0)])
def test_cuda_where_no_nvcc_is(tmp_path, cuda, status):
    """AUTO builds for the CPU; ON says what is missing."""
    done = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, f"-DSPECSTATE_CUDA={cuda}", "-DSPECSTATE_NVCC=FALSE", "-DSPECSTATE_CLI=OFF"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    if status:
        assert "SPECSTATE_CUDA: expected nvcc in PATH" in " ".join(done.stderr.split())
    assert "CUDA backend:" not in done.stdout
