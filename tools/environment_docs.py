#!/usr/bin/env python3
"""Writes docs/environment.md from the table of src/core/env.cpp; the lint rule `environment` holds the two together."""

import argparse
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROW = re.compile(r'\{"(SPECSTATE_\w+)",\s*"((?:[^"\\]|\\.)*)",\s*"((?:[^"\\]|\\.)*)"\}')


def render(root=ROOT):
    rows = ROW.findall((root / "src/core/env.cpp").read_text())
    lines = [
        "# Environment variables",
        "",
        "The C++ library reads them once, when its thread pool starts: at the first call on the CPU with work for several threads. Then it also warns of a `SPECSTATE_` variable that is not in this table; a process",
        "whose calls all run on a GPU is told nothing. The Python package reads `SPECSTATE_LIBRARY_PATH` when it loads the library, `SPECSTATE_SGLANG` when sglang loads its plugins, and says at once what is wrong with them.",
        "Made by `tools/environment_docs.py` from the table in `src/core/env.cpp`: edit that one.",
        "",
        "| variable | meaning | default |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{name}` | {meaning} | {fallback} |" for name, meaning, fallback in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (ROOT / "docs" / "environment.md").write_text(render())
