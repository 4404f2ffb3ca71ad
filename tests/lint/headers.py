"""Each public header compiles alone, with the standard library and its neighbours only."""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import tempfile

COMMAND = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c++"]


def check(root):
    with tempfile.TemporaryDirectory() as folder:
        generated = pathlib.Path(folder) / "specstate"
        generated.mkdir()
        for template in (root / "include" / "specstate").glob("*.hpp.in"):
            (generated / template.stem).write_text(re.sub(r"@\w*VERSION_(MAJOR|MINOR|PATCH)@", "0", re.sub(r"@PROJECT_VERSION@", "0.0.0", template.read_text())))

        def compile_alone(name):
            source = f"#include <specstate/{name}>\n#include <specstate/{name}>\n"
            done = subprocess.run([*COMMAND, "-I", str(root / "include"), "-I", folder, "-"], input=source, capture_output=True, text=True)
            return [] if done.returncode == 0 else [f"include/specstate/{name}: does not compile alone: {done.stderr.strip().splitlines()[0]}"]

        names = sorted({p.name for p in (root / "include" / "specstate").glob("*.hpp")} | {p.name for p in generated.iterdir()})
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return [line for lines in pool.map(compile_alone, names) for line in lines]
