#!/usr/bin/env python3
"""Builds dist/specstate-*.whl from the checkout, with what is installed (no network), and tags it for this C library and processor."""

import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    dist = ROOT / "dist"
    for old in dist.glob("specstate-*.whl"):
        old.unlink()
    (ROOT / "build").mkdir(exist_ok=True)
    log = ROOT / "build" / "wheel.log"
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--wheel-dir", dist, ROOT]
    with open(log, "wb") as out:
        if subprocess.run(pip, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode:
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
