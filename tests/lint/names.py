"""Names of files, types, constants, members and macros."""

import re

from tree import matching, text

STORAGE_TYPES = {"bfloat16", "float16", "float8_e4m3fn"}  # named as the dtypes are
TYPE = re.compile(r"^[ \t]*(?:template\s*<[^;{}]*>\s*)?(?:class|struct|enum class|enum)\s+(?:alignas\([^)]*\)\s+)?(?:SPECSTATE_\w+\s+)?(\w+)\s*(?:final\s*)?(?::[^:;{]*)?\{", re.M)
MACRO = re.compile(r"^\s*#\s*define\s+(\w+)", re.M)
CONSTANT = re.compile(r"^(?:inline |static )*constexpr\s+(?:static )?[\w:<>*\s]+?[ &*](\w+)(?:\[[^\]]*\])*\s*(?:=|\{)", re.M)  # at namespace level: not indented
FUNCTION = re.compile(r"^(?:SPECSTATE_API |SPECSTATE_HD |__device__ |__global__ |__host__ |__forceinline__ |inline |constexpr |static |\[\[\w+\]\] )*[\w:<>,]+[ &*]+(\w+)\([^;{}]*\)(?: const)?(?: noexcept)?\s*[;{]", re.M)


def check(root):
    found = []
    for path, relative in matching(root, ".hpp", ".cpp", ".cu", ".cuh", ".py", ".h"):
        if str(relative).startswith("tests/emulation/") and path.suffix == ".h":
            continue  # CUDA's own names
        if not re.fullmatch(r"[a-z0-9_]+(-inl)?", path.stem):
            found.append(f"{relative}: file names are snake_case")
        if path.suffix == ".py":
            continue
        content = re.sub(r"//[^\n]*|__(?:launch_bounds|cluster_dims)__\s*\([^()]*\)\s*", "", text(path) or "")
        for name in TYPE.findall(content):
            if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) and name not in STORAGE_TYPES:
                found.append(f"{relative}: type {name} is not PascalCase")
        for name in MACRO.findall(content):
            if not name.startswith(("SPECSTATE_", "HWY_")) and name != "main":
                found.append(f"{relative}: macro {name} does not start with SPECSTATE_")
        for name in CONSTANT.findall(content):
            if not re.fullmatch(r"k[A-Z0-9]\w*", name):
                found.append(f"{relative}: constant {name} is not kConstant")
        for name in FUNCTION.findall(content):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) and not name.startswith(("operator", "HWY_", "TEST", "RC_GTEST", "Py")) and name not in ("LLVMFuzzerTestOneInput", "LLVMFuzzerInitialize", "INSTANTIATE_TEST_SUITE_P"):
                found.append(f"{relative}: function {name} is not snake_case")
    return found
