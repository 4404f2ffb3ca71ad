"""What `cmake --install` gives: found by CMake and by pkg-config, and complete."""

import os
import pathlib
import re
import subprocess
import sys

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


def test_several_gpus_in_one_build(tmp_path):
    """The definition that names them stays one: CMake cuts a list at its semicolons."""
    (tmp_path / "toy").mkdir()
    lines = (ROOT / "CMakeLists.txt").read_text().splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if line.startswith("include(cmake/flags.cmake)"))
    end = next(i for i in range(begin, len(lines)) if lines[i].startswith("configure_file"))
    (tmp_path / "toy" / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(toy LANGUAGES CXX)\nset(CMAKE_EXPORT_COMPILE_COMMANDS ON)\nset(SPECSTATE_WITH_CUDA ON)\n"
        f'set(SPECSTATE_CUDA_ARCHITECTURES "80;90a")\n'
        + "".join(lines[begin:end]).replace("include(cmake/", f"include({ROOT}/cmake/")
        + "add_executable(toy toy.cpp)\ntarget_link_libraries(toy specstate_flags)\n"
    )
    (tmp_path / "toy" / "toy.cpp").write_text("#include <cstdio>\nint main() { std::puts(SPECSTATE_CUDA); }\n")
    run("cmake", "-G", "Ninja", "-S", tmp_path / "toy", "-B", tmp_path / "build")
    run("cmake", "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "toy") == "80, 90a\n"


def test_the_wheels_build_shows_how_far_it_is(tmp_path, capsys):
    sys.path.insert(0, str(ROOT / "tools"))
    import build_wheel

    said = "import sys\nprint('configuring')\nfor i in range(1, 41): print(f'  [{i}/40] Building CXX object x{i}.o')\nsys.exit(3)"
    assert build_wheel.build([sys.executable, "-c", said], tmp_path / "log") == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and all(re.fullmatch(r"build_wheel: \d+ of 40 files, \d+ s", line) for line in lines) and " 40 of 40 " in lines[-1]
    assert len((tmp_path / "log").read_text().splitlines()) == 41
    asked = "import os; print(os.environ['CXX'], os.environ['CCACHE_BASEDIR'])"
    build_wheel.build([sys.executable, "-c", asked], tmp_path / "log")
    assert (tmp_path / "log").read_text().split()[1] == str(ROOT) or "CCACHE_BASEDIR" in os.environ


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
