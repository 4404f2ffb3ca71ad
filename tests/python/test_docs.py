"""The code blocks of the documentation that are marked `run` do run, and print what the `text` block behind them says."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("SPECSTATE_LIBRARY_PATH", ROOT / "build" / "release" / "lib")).parent
BLOCK = re.compile(r"^```(\w+) run\n(.*?)^```\n(?:\n*```text\n(.*?)^```\n)?", re.M | re.S)


def blocks(root):
    found = []
    for path in [*sorted(root.glob("*.md")), *sorted((root / "python").glob("*.md")), *sorted((root / "docs").rglob("*.md"))]:
        for match in BLOCK.finditer(path.read_text()):
            found.append((path.relative_to(root).as_posix(), *match.groups()))
    return found


def execute(language, code, folder):
    if language == "cpp":
        source, program = folder / "block.cpp", folder / "block"
        source.write_text(code)
        compiled = subprocess.run(["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "include", "-I", BUILD / "include", source, "-o", program,
                                   "-L", BUILD / "lib", "-lspecstate", f"-Wl,-rpath,{BUILD / 'lib'}"], capture_output=True, text=True)
        assert compiled.returncode == 0, compiled.stderr
        command = [program]
    elif language == "python":
        command = [sys.executable, "-c", code]
    else:
        command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300,
                          env=dict(os.environ, PYTHONPATH=str(ROOT / "python")))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name, language, code, output", blocks(ROOT), ids=lambda value: value if value in ("cpp", "python", "sh") else None)
def test_block(name, language, code, output, tmp_path):
    printed = execute(language, code, tmp_path)
    if output is not None:
        assert printed == output, name


def test_the_readme_has_a_block_of_each_kind():
    assert {b[1] for b in blocks(ROOT) if b[0] == "README.md"} == {"cpp", "python", "sh"}


def test_a_wrong_block_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.md").write_text("```python run\nprint(1)\n```\n\n```text\n2\n```\n\n```sh run\nfalse\n```\n")
    (_, language, code, output), (_, shell, broken, none) = blocks(tmp_path)
    assert execute(language, code, tmp_path) != output and none is None
    with pytest.raises(AssertionError):
        execute(shell, broken, tmp_path)


def test_the_table_of_sglangs_tests_is_the_evidences():
    done = subprocess.run([sys.executable, ROOT / "tools" / "sglang_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
