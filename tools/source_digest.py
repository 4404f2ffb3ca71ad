#!/usr/bin/env python3
"""Prints the digest of the sources that a result of a family depends on: `tools/source_digest.py kda`.

A recorded result (benchmark, GPU test, fuzzing run) carries the digest of its day; another digest today means that it is of older
sources. Families: hisparse, kda, draft_kv, accept, matmul, step (those four together), engine, binding, two_gpus (the last two together). Prints the first 16 hex digits of a SHA-256.
"""

import argparse
import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPERATIONS = ("hisparse", "kda", "draft_kv", "accept")
FAMILIES = (*OPERATIONS, "matmul", "step", "engine", "binding", "two_gpus")
SUFFIXES = {".hpp", ".in", ".cpp", ".cu", ".cuh", ".py"}


def sources(family, root=ROOT):
    """The files, sorted: the core, the backends' shared parts, and what belongs to the family alone."""
    if family == "two_gpus":
        return sorted({*sources("engine", root), *sources("binding", root)})
    folders = ["src/core", "src/cpu", "src/cuda", "include/specstate"]
    if family in OPERATIONS:
        folders.append(f"src/{family}")
    if family in ("step", "engine"):
        folders += [f"src/{name}" for name in OPERATIONS]
    if family == "engine":
        folders.append("src/runtime")
    if family == "binding":
        folders = ["src/core", "src/cuda", "include/specstate", "python/binding", "python/specstate"]
    others = {"engine": set(), "step": {"runtime"}}.get(family, {name for name in (*OPERATIONS, "runtime") if name != family})
    paths = [p for folder in folders for p in (root / folder).rglob("*") if p.suffix in SUFFIXES]
    paths.append(root / "cmake" / "flags.cmake")
    if family == "engine":
        paths += [p for p in (root / "models").rglob("*") if p.name in ("config.json", "model.safetensors")]
    return sorted(p for p in paths if not (p.parent == root / "include" / "specstate" and any(p.stem.startswith(name) for name in others)))


def digest_of(paths, root=ROOT):
    sha = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        sha.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return sha.hexdigest()[:16]


def digest(family, root=ROOT):
    return digest_of(sources(family, root), root)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", choices=FAMILIES)
    parser.add_argument("--all", action="store_true", help="every family, as a JSON object")
    options = parser.parse_args()
    if options.all == (options.family is not None):
        parser.error("expected a family or --all")
    print(json.dumps({family: digest(family) for family in FAMILIES}) if options.all else digest(options.family))
