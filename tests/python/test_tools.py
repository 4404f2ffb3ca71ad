"""Every tool says what it is for, and does nothing while it says so."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = sorted(p for p in (ROOT / "tools").iterdir() if p.is_file())


def state():
    """When anything was written that a tool might write."""
    written = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("**/*.json"), *(ROOT / "bench").rglob("*.json"), ROOT / "build" / "wheel.log", ROOT / "dist"]
    return {p: p.stat().st_mtime_ns for p in written if p.exists()}


@pytest.mark.parametrize("tool", TOOLS, ids=lambda p: p.name)
def test_help(tool, tmp_path):
    before = state()
    done = subprocess.run([*([sys.executable] if tool.suffix == ".py" else []), tool, "--help"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = next(line for line in tool.read_text().splitlines()[1:] if line.strip()).strip("#\" ").split(":")[0]
    assert " ".join(said.split()[:6]) in " ".join(done.stdout.split()), done.stdout
    assert state() == before and not list(tmp_path.iterdir())
