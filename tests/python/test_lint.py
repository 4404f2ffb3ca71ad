"""The rules of tests/lint hold on this tree, and each of them finds a fault that is planted."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "lint"))

import docs  # noqa: E402
import headers  # noqa: E402
import layers  # noqa: E402
import names  # noqa: E402
import style  # noqa: E402
import tree  # noqa: E402

RULES = [layers.check, names.check, headers.check, tree.local_paths, tree.version, docs.check, docs.environment, tree.pointers, tree.rooms, style.check]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.__module__}-{rule.__name__}")
def test_tree_is_clean(rule):
    assert rule(ROOT) == []


PLANTED = [
    (layers.check, "src/kda/cpu.cpp", '#include "hisparse/args.hpp"\n', "families never include each other"),
    (layers.check, "src/core/match.cpp", '#include "cpu/parallel.hpp"\n', "core stands below cpu"),
    (layers.check, "src/cpu/matmul.cpp", '#include "runtime/model.hpp"\n', "cpu stands below runtime"),
    (layers.check, "src/kda/api.cpp", '#include "runtime/model.hpp"\n', "kda stands below runtime"),
    (layers.check, "include/specstate/kda.hpp", '#include "../../src/core/match.hpp"\n', "include stands below core"),
    (layers.check, "include/specstate/kda.hpp", "#include <cuda_runtime.h>\n", "the standard library alone"),
    (layers.check, "include/specstate/kda.hpp", "#include <fmt/format.h>\n", "the standard library alone"),
    (layers.check, "include/specstate/version.hpp.in", "#include <dlpack/dlpack.h>\n", "the standard library alone"),
    (layers.check, "cli/generate.cpp", "#include <CLI/CLI.hpp>\n", "cli/main.cpp alone"),
    (layers.check, "src/core/match.hpp", "#include <fmt/format.h>\n", ".cpp files alone"),
    (layers.check, "src/kda/cuda.cu", "#include <fmt/format.h>\n", ".cpp files alone"),
    (layers.check, "src/kda/cpu.cpp", "#include <tbb/parallel_for.h>\n", "cpu/parallel.hpp"),
    (layers.check, "src/kda/check.cpp", '#include "cuda/launch.hpp"\n', "a check never sees CUDA"),
    (layers.check, "src/kda/cpu.cpp", '#include "kda/check.hpp"\n', "a backend never sees parameters"),
    (layers.check, "src/kda/cuda.cu", '#include "kda/check.hpp"\n', "a backend never sees parameters"),
    (layers.check, "src/kda/cuda/fold.cuh", '#include "kda/check.hpp"\n', "a backend never sees parameters"),
    (layers.check, "src/kda/cpu.cpp", "#include <cuda_runtime.h>\n", "CUDA is for .cu files"),
    (layers.check, "src/cuda/ptx.cuh", '#include "kda/args.hpp"\n', "cuda stands below kda"),
    (layers.check, "tests/oracles/kda.py", "import numpy\nfrom specstate import kda\n", "may not import specstate"),
    (names.check, "src/kda/CpuCode.cpp", "", "file names are snake_case"),
    (names.check, "src/kda/cpu.cpp", "struct gate_args {\n};\n", "type gate_args"),
    (names.check, "src/kda/cpu.cpp", "enum class mode : int { kRing };\n", "type mode"),
    (names.check, "src/kda/cpu.cpp", "#define MAX_HEADS 4\n", "macro MAX_HEADS"),
    (names.check, "src/kda/cpu.cpp", "inline constexpr int max_heads = 4;\n", "constant max_heads"),
    (names.check, "include/specstate/kda.hpp", "SPECSTATE_API void verifyRing(const VerifyParams& p);\n", "function verifyRing"),
    (names.check, "src/kda/cuda.cu", "__device__ __forceinline__ float decayOf(float x) { return x; }\n", "function decayOf"),
    (names.check, "src/kda/cuda.cu", "__global__ void __launch_bounds__(128) decayAll(float* x) {\n}\n", "function decayAll"),
    (headers.check, "include/specstate/kda.hpp", "inline std::string name() { return {}; }\n", "does not compile alone"),
    (headers.check, "include/specstate/kda.hpp", "struct Twice {};\n", "does not compile alone"),  # no include guard
    (tree.local_paths, "docs/build.md", "see /" + "home/me/specstate\n", "absolute path"),
    (tree.local_paths, "tools/x.py", "p = '/" + "root/x'\n", "absolute path"),
    (tree.version, "python/specstate/__init__.py", '__version__ = "3.2.1"\n', "repeats the version"),
    (tree.version, "CHANGELOG.md", "# Changelog\n", "has no section for 3.2.1"),
    (tree.version, "VERSION", "v3\n", "expected MAJOR.MINOR.PATCH"),
    (tree.rooms, "src/rooftop/x.cpp", "", "src/rooftop/: has no line"),
    (tree.rooms, "HACKING.md", "| room | what |\n| --- | --- |\n| `src/cellar/` | wine |\n", "src/cellar/, which is not there"),
    (tree.rooms, "src/kda/cpu.cpp", "", "src/kda/SEMANTICS.md: is missing"),
    (tree.pointers, "HACKING.md", "`src/core/match.hpp`: `vanished` does it\n", "says that src/core/match.hpp has vanished"),
    (tree.pointers, "HACKING.md", "`src/cuda/ptx.cuh`: `vanished` does it\n", "names src/cuda/ptx.cuh"),
    (tree.pointers, "HACKING.md", "look into `src/core/gone.hpp`\n", "names src/core/gone.hpp"),
    (docs.check, "docs/a.md", "#One : two\n", "no heading"),
    (docs.check, "docs/a.md", "[gone](c.md)\n", "which is not there"),
    (docs.check, "docs/a.md", "# One\n[gone](#two)\n", "no such heading"),
    (docs.check, "docs/decisions/0001-other.md", "# 0001: Other\n", "has the number of 0001-one.md"),
    (docs.check, "docs/decisions/0002-two.md", "# 0002: Two\n", "has no line in docs/decisions/README.md"),
    (docs.check, "docs/decisions/0001-one.md", "# One\n", "its heading does not begin with its number"),
    (docs.environment, "src/core/env.cpp", 'x = {{"SPECSTATE_NEW", "new", "none"}};\n', "differs from src/core/env.cpp"),
    (docs.environment, "docs/environment.md", "# Environment variables\n", "differs from src/core/env.cpp"),
    (docs.environment, "python/specstate/x.py", 'os.environ.get("SPECSTATE_SECRET")\n', "SPECSTATE_SECRET has no line"),
    (docs.environment, "src/core/log.cpp", 'std::getenv("SPECSTATE_SECRET")\n', "SPECSTATE_SECRET has no line"),
    (style.check, "src/kda/cpu.cpp", "int  f( ){return 1 ;}\n", "not formatted"),
]


@pytest.mark.parametrize("rule, name, content, wanted", PLANTED, ids=[f"{p[0].__module__}-{i}" for i, p in enumerate(PLANTED)])
def test_planted_fault_is_found(rule, name, content, wanted, tmp_path):
    clean = {"VERSION": "3.2.1\n", "CHANGELOG.md": "# Changelog\n\n## 3.2.1\n", "docs/a.md": "# One\n[one](#one) [two](b.md)\n", "docs/b.md": "# B\n", "docs/decisions/0001-one.md": "# 0001: One\n", "docs/decisions/README.md": "[0001](0001-one.md)\n",
             "HACKING.md": "| room | what |\n| --- | --- |\n| `src/core/` | core |\n| `docs/` | |\n| `include/specstate/` | |\n", "src/core/match.hpp": "#pragma once\n",
             "include/specstate/tensor.hpp": "#pragma once\n", ".clang-format": (ROOT / ".clang-format").read_text(),
             "src/core/env.cpp": "", "docs/environment.md": ""}

    (tmp_path / "src" / "core").mkdir(parents=True)
    (tmp_path / "src/core/env.cpp").write_text("")
    clean["docs/environment.md"] = docs.environment_docs.render(tmp_path)

    def build(folder, extra):
        for path, text in {**clean, **extra}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    assert rule(build(tmp_path / "clean", {})) == []
    found = rule(build(tmp_path / "planted", {name: content}))
    assert any(wanted in line for line in found), found
