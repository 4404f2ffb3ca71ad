#!/usr/bin/env python3
"""Exits 0 if the running Python has every package of a requirements file in the wanted range. Reads metadata only: no network."""

import argparse
import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("file", type=argparse.FileType(encoding="utf-8"), help="one requirement a line, comments behind #")
problems = []
for line in parser.parse_args().file:
    line = line.split("#")[0].strip()
    if not line:
        continue
    wanted = Requirement(line)
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        problems.append(f"{wanted.name} is missing, expected {wanted}")
        continue
    if not wanted.specifier.contains(version, prereleases=True):
        problems.append(f"{wanted.name} is {version}, expected {wanted}")
print("\n".join(problems), end="\n" if problems else "")
sys.exit(bool(problems))
