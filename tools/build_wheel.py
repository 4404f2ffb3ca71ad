#!/usr/bin/env python3
"""Builds dist/specstate-*.whl from the checkout, with what is installed (no network), and tags it for this C library and processor.

Its objects are compiled in build/wheel with the command lines of build/release, so that ccache, where it is installed, gives them back.
"""

import os
import pathlib
import platform
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def build(command, log):
    """Runs it into the log, and shows how far the compiler is: in place on a terminal, else a line every tenth of the way."""
    # c++ as CMake would choose by itself; scikit-build-core would name g++, which ccache takes for another compiler.
    environment = {"CXX": "c++", "CCACHE_BASEDIR": str(ROOT), **os.environ, "PYTHONUNBUFFERED": "1"}
    start, tenth = time.monotonic(), -1
    with open(log, "w") as out, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                                 env=environment, text=True, errors="replace") as process:  # fmt: skip
        for line in process.stdout:
            out.write(line)
            step = re.search(r"\[(\d+)/(\d+)\] (?:Building|Linking)", line)
            if not step:
                continue
            done, total = int(step[1]), int(step[2])
            said = f"build_wheel: {done} of {total} files, {time.monotonic() - start:.0f} s"
            if sys.stdout.isatty():
                print(f"\r{said}", end="\n" if done == total else "", flush=True)
            elif done == total or done * 10 // total > tenth:
                tenth = done * 10 // total
                print(said, flush=True)
    return process.returncode


def main():
    dist = ROOT / "dist"
    for old in dist.glob("specstate-*.whl"):
        old.unlink()
    (ROOT / "build").mkdir(exist_ok=True)
    log = ROOT / "build" / "wheel.log"
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--wheel-dir", dist, ROOT]
    print(f"build_wheel: configures and compiles in build/wheel; the log is {log.relative_to(ROOT)}", flush=True)
    if build([str(part) for part in pip], log):
        print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
        sys.exit(f"build_wheel: failed; all of it is in {log}")
    (built,) = dist.glob("specstate-*.whl")
    # Beyond glibc, libstdc++ and libgcc everything is inside: tests/wheel checks it.
    glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
    tag = f"manylinux_{glibc}_{platform.machine()}"
    subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, built], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = dist.glob("specstate-*.whl")
    print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
