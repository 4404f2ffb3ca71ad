"""Our functions can be called as sglang's are: names, order, kinds and defaults equal the record of its wheel."""

import ast
import importlib
import inspect
import json
import pathlib
import re
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
