"""The package around its functions: where it finds the library, its command line, the wheel's tag, and the texts that travel along."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import build_wheel  # noqa: E402


def python(*arguments, **environment):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=str(ROOT / "python"), **environment))  # fmt: skip


def test_a_folder_without_the_library_is_named():
    done = python("-c", "import specstate; specstate.__version__", SPECSTATE_LIBRARY_PATH="/nope")
    assert done.stderr.splitlines()[-1] == "ImportError: specstate: SPECSTATE_LIBRARY_PATH: expected a folder that holds libspecstate_ffi.so, got '/nope'"


def test_a_library_that_does_not_load_is_named(tmp_path):
    (tmp_path / "libspecstate_ffi.so").write_text("no library")
    done = python("-c", "import specstate; specstate.__version__", SPECSTATE_LIBRARY_PATH=str(tmp_path))
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: specstate: {tmp_path}/libspecstate_ffi.so (from SPECSTATE_LIBRARY_PATH) does not load: "), done.stderr


@pytest.mark.parametrize("value", ["true", "off", "kda,hisparce"])
def test_the_plugins_variable_says_what_it_takes(value):
    done = python("-c", "import specstate; specstate.sglang.plugin()", SPECSTATE_SGLANG=value)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"ValueError: specstate: SPECSTATE_SGLANG: expected 1 \(everything\), 0 \(nothing\), or names with commas between among .*kda.*, got "
                        + re.escape(repr(value)) + r"\.", last), done.stderr  # fmt: skip


def test_both_command_lines_are_one(tmp_path):
    """`python -m specstate` is the program, with the package's folders beside it; so is the console script."""
    script = tmp_path / "specstate"
    script.write_text("from specstate.__main__ import command\ncommand()\n")
    for call in (("-m", "specstate"), (script,)):
        version = python(*call, "--version")
        assert version.stdout.strip() == (ROOT / "VERSION").read_text().strip(), version.stderr
        told = python(*call, "--help")
        assert told.returncode == 0 and all(word in told.stdout for word in ("--cmake-dir", "--doc-dir", "generate", "doctor"))
        assert "--prompt" in python(*call, "generate", "--help").stdout
        folder = python(*call, "--lib-dir")  # in a checkout there is none
        assert folder.returncode == 1 and "this is no installed wheel" in folder.stderr
        assert "expected no more arguments, got x" in python(*call, "--lib-dir", "x").stderr


def test_the_tag_is_what_the_symbols_need():
    assert build_wheel.least_glibc({("GLIBC", (2, 34)), ("GLIBC", (2, 2, 5)), ("GLIBCXX", (3, 4, 29))}) == 34
    assert build_wheel.least_glibc({("GLIBC", (2, 17)), ("GLIBCXX", (3, 4, 30))}) == 35  # an older glibc with GCC 12's libstdc++ is rarer
    assert build_wheel.least_glibc({("GLIBC", (2, 36)), ("CXXABI", (1, 3, 9))}) == 36
    with pytest.raises(SystemExit, match="GLIBCXX_3.4.99 is newer than the table"):
        build_wheel.least_glibc({("GLIBCXX", (3, 4, 99))})
    library = pathlib.Path(os.environ.get("SPECSTATE_LIBRARY_PATH", ROOT / "build" / "release" / "lib")) / "libspecstate.so"
    needed = build_wheel.needed_versions(library)
    assert max(v for family, v in needed if family == "GLIBC") >= (2, 17) and any(family == "GLIBCXX" for family, _ in needed)


def test_the_long_description_points_nowhere_in_the_repository():
    readme = re.search(r'^readme = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    text = (ROOT / readme).read_text()
    assert not re.findall(r"\]\((?!https?://)", text)
    for path in re.findall(r"`((?:docs|src)/[\w/.]+\.md)`", text):
        assert (ROOT / path).exists(), path


def test_the_texts_that_docstrings_name_are_in_the_wheel():
    rules = (ROOT / "cmake" / "wheel.cmake").read_text()
    assert "src/${family}/SEMANTICS.md" in rules and "install(DIRECTORY docs examples" in rules
    for source in (ROOT / "python" / "specstate").rglob("*.py"):
        for path in re.findall(r"`((?:docs|src|tests|bench|examples|include)/[\w/.<>]+)`", source.read_text()):
            assert path.startswith("docs/") or re.fullmatch(r"src/\w+/SEMANTICS.md", path), f"{source.name}: {path}"
            assert (ROOT / path).exists(), path
