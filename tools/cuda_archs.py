#!/usr/bin/env python3
"""Do the CUDA sources compile for other GPUs than the one they are tuned for?

    tools/cuda_archs.py [--archs 80 100 120] [--jobs N] [--only NAME]

Compiles every .cu file of a configured build (build/release/compile_commands.json) for each architecture with the build's own flags, but
quickly (ptxas -O1) and for nothing but the verdict. Needs nvcc, no GPU. The last line is `N passed, N failed`.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "build" / "release" / "compile_commands.json"


def command_for(entry, arch, output):
    """The build's command with another architecture, as a cubin."""
    words = shlex.split(entry["command"])
    at = next(i for i, w in enumerate(words) if w.endswith("nvcc"))  # behind a launcher such as ccache
    kept, skip = [], False
    for word in words[at:]:
        if skip:
            skip = False
        elif word in ("-gencode", "-o", "-c", "-MF", "-MT"):
            skip = word != "-c"
        elif not word.startswith(("-gencode=", "--generate-code", "-MD", "-lineinfo")):
            kept.append(word)
    return [*kept, "-cubin", "-Xptxas", "-O1", f"-arch=sm_{arch}", "-o", output]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", default=["80", "100", "120"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="files whose path contains this")
    options = parser.parse_args()
    try:
        entries = json.loads(COMMANDS.read_text())
    except OSError:
        print(f"cuda_archs: {COMMANDS} is not there: build first (cmake --preset release)", file=sys.stderr)
        return 1
    entries = [e for e in entries if e["file"].endswith(".cu") and "/src/" in e["file"] and options.only in e["file"]]
    if not entries:
        print("cuda_archs: no CUDA source in this build (it was made without nvcc)", file=sys.stderr)
        return 1

    def compiled(task):
        entry, arch = task
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command_for(entry, arch, os.path.join(folder, "out.cubin")), cwd=entry["directory"], capture_output=True, text=True)
        return done, time.monotonic() - start

    tasks = [(e, arch) for arch in options.archs for e in entries]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for (entry, arch), (done, seconds) in zip(tasks, pool.map(compiled, tasks)):
            failed += done.returncode != 0
            print(f"{'ok' if done.returncode == 0 else 'FAILED':6} sm_{arch:5} {os.path.relpath(entry['file'], ROOT):36} {seconds:.1f} s", flush=True)
            if done.returncode != 0:
                print("\n".join("    " + line for line in (done.stdout + done.stderr).splitlines()[-20:]))
    print(f"{len(tasks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
