"""Who may include whom, as HACKING.md says."""

import re

from tree import FAMILIES, matching, text

_BASE = {"include", "core", "cpu", "cuda"}
ALLOWED = {
    "include": {"include"},
    "core": {"include", "core"},
    "cpu": {"include", "core", "cpu"},
    "cuda": {"include", "core", "cuda"},
    **{family: _BASE | {family} for family in FAMILIES},
    "runtime": _BASE | set(FAMILIES) | {"runtime"},
}
_ALL = _BASE | set(FAMILIES) | {"runtime"}
ALLOWED |= {"python": _ALL | {"python"}, "bench": _ALL | {"bench"}, "cli": _ALL | {"cli", "bench"}, "tests": _ALL | {"tests", "cli", "bench"}}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.M)


def layer_of(relative):
    parts = relative.split("/")
    return parts[1] if parts[0] == "src" and len(parts) > 2 else parts[0]


def target_layer(root, path, name):
    """The layer that an include in quotes (or of specstate/) reaches, None if it is not ours."""
    if name.startswith("specstate/"):
        return "include"
    head = name.split("/")[0]
    if "/" in name and head in ALLOWED and head != "include":
        return head
    beside = (path.parent / name).resolve()
    if beside.is_file() and root.resolve() in beside.parents:
        return layer_of(beside.relative_to(root.resolve()).as_posix())
    return None


def includes(path):
    return INCLUDE.findall(text(path) or "")


def check(root):
    found = []
    for path, relative in matching(root, ".hpp", ".cpp", ".cu", ".cuh", ".h", ".in"):
        layer = layer_of(relative)
        if layer not in ALLOWED or (path.suffix == ".in" and not path.stem.endswith(".hpp")):
            continue
        for kind, name in includes(path):
            def refuse(why):
                found.append(f"{relative}: may not include {name}: {why}")
            target = target_layer(root, path, name)
            if target is not None and target not in ALLOWED[layer]:
                refuse("families never include each other" if {layer, target} <= set(FAMILIES) else f"{layer} stands below {target} or beside it")
            if layer == "include" and kind == "<" and ("/" in name or name.endswith(".h")) and not name.startswith("specstate/"):
                refuse("public headers know the standard library alone")
            if name.startswith("CLI/") and relative != "cli/main.cpp":
                refuse("CLI11 costs 9 s a translation unit; cli/main.cpp alone has it")
            if name.startswith("fmt/") and path.suffix != ".cpp":
                refuse("{fmt} does not compile under nvcc; .cpp files alone have it")
            if name.startswith("tbb/") and not relative.startswith(("src/cpu/", "tests/")):
                refuse("threads come through cpu/parallel.hpp")
            if name.startswith(("cuda/", "cuda_runtime", "cuda.h")) and path.suffix == ".cpp" and relative.startswith("src/"):
                refuse("CUDA is for .cu files: a .cpp is built without it, too")
            if path.name in ("check.cpp", "check.hpp", "api.cpp") and name.startswith("cuda"):
                refuse("a check never sees CUDA")
            backend = path.name == "cpu.cpp" or path.suffix in (".cu", ".cuh") or relative.startswith(f"src/{layer}/cuda/")
            if layer in FAMILIES and backend and name.endswith("check.hpp"):
                refuse("a backend never sees parameters")
    for path, relative in matching(root, ".py", under="tests/oracles/"):
        if re.search(r"^\s*(import|from)\s+specstate\b", text(path) or "", re.M):
            found.append(f"{relative}: an oracle may not import specstate: it would test the library against itself")
    return found
