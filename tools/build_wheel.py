#!/usr/bin/env python3
"""Builds dist/specstate-*.whl from the checkout, with what is installed (no network), and tags it for the oldest system whose C and C++ libraries
have every symbol that it asks for (the rule of manylinux: PEP 600).

Its objects are compiled in build/wheel with the command lines of build/release, so that ccache, where it is installed, gives them back.
"""

import argparse
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Symbol versions of GCC's libraries -> the least manylinux_2_x that promises them (the policies of auditwheel).
GCC = {
    "GLIBCXX": {(3, 4, 28): 31, (3, 4, 29): 34, (3, 4, 30): 35, (3, 4, 32): 38, (3, 4, 33): 39},
    "CXXABI": {(1, 3, 12): 31, (1, 3, 13): 34, (1, 3, 14): 38, (1, 3, 15): 39},
    "GCC": {(7, 0, 0): 31, (12, 0, 0): 35, (13, 0, 0): 38, (14, 0, 0): 39},
}


def needed_versions(path):
    """(library family, version) of every symbol version that an ELF file asks other libraries for."""
    text = subprocess.run(["readelf", "--version-info", "--wide", path], capture_output=True, text=True, check=True).stdout
    asked = "".join(re.findall(r"Version needs section.*?(?:\n\n|\Z)", text, re.S))
    return {(family, tuple(map(int, version.split(".")))) for family, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\b", asked)}


def least_glibc(versions):
    """The x of manylinux_2_x for a set of `needed_versions`."""
    least = 17
    for family, version in versions:
        if family == "GLIBC":
            least = max(least, version[1])
            continue
        promised = [x for known, x in GCC[family].items() if known >= version]
        if not promised:
            sys.exit(f"build_wheel: {family}_{'.'.join(map(str, version))} is newer than the table of this script: add it")
        least = max(least, min(promised))
    return least


def least_glibc_of_wheel(wheel):
    versions = set()
    with zipfile.ZipFile(wheel) as z, tempfile.TemporaryDirectory() as folder:
        for name in z.namelist():
            data = z.read(name)
            if data[:4] == b"\x7fELF":
                path = pathlib.Path(folder) / "elf"
                path.write_bytes(data)
                versions |= needed_versions(path)
    return least_glibc(versions)


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
    argparse.ArgumentParser(description=__doc__).parse_args()
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
    tag = f"manylinux_2_{least_glibc_of_wheel(built)}_{platform.machine()}"
    subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, built], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = dist.glob("specstate-*.whl")
    print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
