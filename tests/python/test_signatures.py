"""Our functions can be called as sglang's are: names, order, kinds and defaults equal the record of its wheel."""

import ast
import importlib
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import specstate

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "tests" / "python" / "sglang_signatures.json").read_text())
ENTRIES = [(module, name) for module, entries in RECORD["modules"].items() for name in entries]


def ours(f):
    """The parameters as the record has them, without `self` apart."""
    return [
        {
            "name": p.name,
            "kind": p.kind.name.lower(),
            "default": None if p.default is p.empty else repr(p.default),
        }
        for p in inspect.signature(f).parameters.values()
    ]


def compare(where, f, recorded):
    mine = ours(f)
    theirs = [dict(p, default=None if p["default"] is None else repr(ast.literal_eval(p["default"]))) for p in recorded]
    assert mine[: len(theirs)] == theirs, where
    for extra in mine[len(theirs) :]:
        assert extra["kind"] == "keyword_only" and extra["default"] is not None, f"{where}: {extra} is no optional keyword"


@pytest.mark.parametrize(("module", "name"), ENTRIES)
def test_signature(module, name):
    entry = RECORD["modules"][module][name]
    f = getattr(importlib.import_module(f"specstate.{module}"), name)
    if "fields" in entry:
        assert list(f._fields) == entry["fields"]
    elif "methods" in entry:
        for method, recorded in entry["methods"].items():
            compare(f"{name}.{method}", getattr(f, method), recorded)
    else:
        compare(name, f, entry["parameters"])


def test_the_record_is_complete():
    """The functions of the interface's table, and everything public of 0.5.23's hisparse module."""
    assert RECORD["sglang"] == "0.5.23"
    assert {n for _, n in ENTRIES} == {
        "HiSparseSpecState", "load_cache_to_device_buffer_spec_mla", "load_cache_to_device_buffer_mla",
        "load_cache_to_device_buffer_dsv4_mla", "load_blocks_to_device_buffer_mha", "copy_cache_planned_mla", "transfer_cache_dsv4_mla",
        "commit_gdn_replayssm_fold_all_layers", "fused_kda_decode_mtp_dspark", "commit_kda_replayssm_spec", "commit_kda_replayssm_spec_all_layers",
        "fused_sigmoid_gating_delta_rule_update", "cutedsl_fused_sigmoid_gating_kda_update", "FusedKVMaterializeHelper",
        "fused_norm_rope_stacked",
    }  # fmt: skip


def test_a_difference_is_seen():
    recorded = RECORD["modules"]["hisparse"]["copy_cache_planned_mla"]["parameters"]

    def renamed(*, miss_source, **more): ...

    def positional(miss_src): ...

    for wrong in (renamed, positional):
        with pytest.raises(AssertionError):
            compare("wrong", wrong, recorded)


def test_recorder(tmp_path):
    """The recorder reads kinds and defaults right, from source text alone."""
    source = "import torch_is_not_there\ndef f(a, b=1, *, c, d=None): ...\nclass S(NamedTuple):\n    x: int\n    y: int\n"
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from record_sglang_signatures import record
    finally:
        sys.path.pop(0)
    got = record(source, "f.py", None)
    kinds = [(p["name"], p["kind"], p["default"]) for p in got["f"]["parameters"]]
    assert kinds == [("a", "positional_or_keyword", None), ("b", "positional_or_keyword", "1"), ("c", "keyword_only", None), ("d", "keyword_only", "None")]
    assert got["S"]["fields"] == ["x", "y"]


# ------------------------------------------------------------------------------------------------- import and docstrings

FRESH = """
import sys, time
start = time.perf_counter()
import specstate
took = time.perf_counter() - start
heavy = [m for m in ("torch", "numpy", "tvm_ffi", "ml_dtypes", "cupy") if m in sys.modules]
print(took, *heavy)
maps = open("/proc/self/maps").read()
assert "libspecstate" not in maps, "a library is loaded"
"""


def test_import_is_light():
    """Under 50 ms, neither torch nor NumPy, no library loaded; the best of five, since others use the machine too."""
    times = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT / "python")
        assert done.returncode == 0, done.stderr
        took, *heavy = done.stdout.split()
        assert not heavy
        times.append(float(took))
    assert min(times) < 0.05, times


def test_a_family_imports_neither_torch_nor_numpy():
    code = "import sys, specstate\nfor m in specstate.__all__: getattr(specstate, m)\nassert not {'torch', 'numpy'} & set(sys.modules)\nassert 'libspecstate.so' not in open('/proc/self/maps').read()"
    code = code.replace("for m in specstate.__all__", "for m in set(specstate.__all__) - {'__version__'}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "python")
    assert done.returncode == 0, done.stderr


def public(module):
    m = importlib.import_module(f"specstate.{module}")
    return {n: f for n, f in vars(m).items() if not n.startswith("_") and getattr(f, "__module__", "") == m.__name__ and callable(f)}


def test_only_what_is_public_shows():
    for module in ("accept", "draft_kv", "hisparse", "kda", "sglang"):
        m = importlib.import_module(f"specstate.{module}")
        assert dir(m) == sorted(m.__all__) and all(hasattr(m, name) for name in m.__all__)
        if module != "sglang":
            assert set(m.__all__) == set(public(module))


def test_fields_tell_shape_and_dtype():
    from specstate import hisparse, kda

    for kind in (kda.Rings, hisparse.SwapState, hisparse.HiSparseSpecState):
        for field in kind._fields:
            text = getattr(kind, field).__doc__
            assert re.match(r"\[[^]]+\] (act|int\d+|float32)", text) and text in kind.__doc__


def test_submodules_load_lazily():
    code = "import specstate, sys; assert 'specstate.sglang' not in sys.modules; specstate.sglang.installed(); specstate.supports"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "python")


def documented():
    for module in ("accept", "draft_kv", "hisparse", "kda"):
        for name, f in public(module).items():
            if inspect.isclass(f):
                assert f.__doc__, name
                for method, g in vars(f).items():
                    if not method.startswith("_") and inspect.isfunction(g):
                        yield f"{module}.{name}.{method}", g, f.__doc__
                if not hasattr(f, "_fields"):
                    yield f"{module}.{name}", f.__init__, f.__doc__ + (f.__init__.__doc__ or "")
            else:
                yield f"{module}.{name}", f, ""
    yield "supports", specstate.supports, ""


def told(f, more=""):
    """What a reader finds: the docstring, those that it points to by `name`, and the module's."""
    module = sys.modules[f.__module__]
    text, seen, queue = "", set(), [(f.__doc__ or "") + more]
    while queue:
        text += "\n" + (now := queue.pop())
        for name in re.findall(r"`(\w+)`", now):
            if name not in seen and getattr(getattr(module, name, None), "__module__", "") == module.__name__:
                seen.add(name)
                queue.append(getattr(module, name).__doc__ or "")
    return text + (module.__doc__ or "")


def test_every_public_function_tells_its_arguments():
    missing = []
    for where, f, more in documented():
        if not f.__doc__ and not more:
            missing.append(f"{where}: no docstring")
        text = told(f, more)
        for name in set(inspect.signature(f).parameters) - {"self"}:
            if not re.search(rf"\b{name}\b", text) and f"{name.rsplit('_', 1)[0]}_*" not in text:
                missing.append(f"{where}: {name}")
    assert not missing, "\n".join(missing)


def test_type_stubs(tmp_path):
    """Every public name has a stub with the parameters of the function itself, in order; the package says that it is typed."""
    assert (pathlib.Path(specstate.__file__).parent / "py.typed").exists()
    subprocess.run([sys.executable, ROOT / "tools" / "write_stubs.py", tmp_path], check=True)
    for module in ("accept", "draft_kv", "hisparse", "kda"):
        tree = ast.parse((tmp_path / f"{module}.pyi").read_text())
        nodes = {n.name: n for n in tree.body if hasattr(n, "name")}
        for name, f in public(module).items():
            if inspect.isfunction(f):
                a = nodes[name].args
                assert [x.arg for x in (*a.args, *a.kwonlyargs)] == list(inspect.signature(f).parameters)
                assert all(x.annotation for x in (*a.args, *a.kwonlyargs))
            else:
                assert isinstance(nodes[name], ast.ClassDef)


USER = """
from typing import Any

import specstate
import specstate.sglang
from specstate import accept, draft_kv, hisparse, kda


def main(a: Any, array: hisparse.Array, rings: kda.Rings) -> None:
    lens, tokens = accept.verify_greedy(a, a)
    verdict: tuple[bool, str] = specstate.supports("verify_greedy", candidates=a, target_argmax=a)
    version: str = specstate.__version__
    kda.fold(a, rings, a, accept=a)
    kda.fold(array, (array, array, array, array), array, accept=array)
    c = hisparse.Coordinator([a], [a], requests=1, hot=2, window=2, context=8, anchor_of=[None, 0], host_cache_v=[None])
    c.accept([0], [1])
    c.begin_step([0])
    c.end_step([0], [1])
    done: dict[str, list[str]] = specstate.sglang.install(only=["kda"], strict=True)
    specstate.sglang.uninstall()
    hisparse.swap_in(array, a, a, a, a, a, hisparse.new_swap_state(array, 4, 8), out=a)
    draft_kv.materialize_into_pool(a, draft_kv.KvProjection(a), a, a, a, a, None, a, a, hidden_norm_eps=1e-5)
    print(lens, tokens, verdict, version, done, c.STATES, specstate.sglang.installed())
"""


def test_a_users_program_is_typed(tmp_path):
    """mypy --strict has nothing to say of it."""
    shutil.copytree(ROOT / "python" / "specstate", tmp_path / "packages" / "specstate", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, ROOT / "tools" / "write_stubs.py", tmp_path / "packages" / "specstate"], check=True)
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}", tmp_path / "user.py"], capture_output=True, text=True,
                          env=dict(os.environ, MYPYPATH=str(tmp_path / "packages")))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_has_no_stub_is_annotated():
    from specstate import sglang

    for f in (specstate.supports, sglang.install, sglang.uninstall, sglang.installed, sglang.plugin):
        signature = inspect.signature(f)
        assert signature.return_annotation is not signature.empty, f
        assert all(p.annotation is not p.empty for p in signature.parameters.values()), f
