"""`specstate.sglang` against a small package laid out like sglang: what is replaced where, and put back."""

import importlib
import importlib.util
import inspect
import json
import logging
import pathlib
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import pytest

import specstate.sglang as drop_in

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "tests" / "python" / "sglang_signatures.json").read_text())["modules"]
PATHS = {name: e["file"].removesuffix(".py").replace("/", ".") for entries in RECORD.values() for name, e in entries.items()}
OLD = {
    "kda_replayssm_spec_decode": "sglang.kernels.ops.attention.fla.kda_replayssm_spec_decode",
    "fused_sigmoid_gating_recurrent": "sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent",
    "kda_decode_mtp": "sglang.kernels.ops.kimi_k3.kda_decode_mtp",
    "hisparse": "sglang.jit_kernel.hisparse",
}


def stub_function(entry):
    parts, star = [], False
    for p in entry["parameters"]:
        if p["kind"] == "keyword_only" and not star:
            star = True
            parts.append("*")
        parts.append(p["name"] + ("" if p["default"] is None else "=" + p["default"]))
    return f"def {entry['sglang_name']}({', '.join(parts)}):\n    return 'sglang'\n"


def write_tree(folder, rename=lambda path: path, leave_out=()):
    """The modules of the record, as functions that return "sglang"; and users that import them in both ways."""
    sources = {}
    for entries in RECORD.values():
        for name, entry in entries.items():
            if name in leave_out:
                continue
            if "parameters" in entry:
                text = stub_function(entry)
            elif "fields" in entry:
                text = f"import collections\n{name} = collections.namedtuple({name!r}, {entry['fields']})\n"
            else:
                text = f"class {name}:\n    def __init__(self, layers, *args, **kwargs):\n        self.kind = 'sglang'\n"
            path = rename(PATHS[name])
            sources[path] = sources.get(path, "") + text
    backend = """
        import torch
        class KDAAttnBackend:
            def _can_run_dspark_cutedsl_mtp(self, *, draft_token_num):
                if torch.cuda.get_device_capability()[0] != 10:
                    return False
                return 2 <= draft_token_num <= 8
    """
    sources["sglang.srt.layers.attention.linear.kda_backend"] = textwrap.dedent(backend)
    hisparse = rename("sglang.kernels.ops.kvcache.hisparse")
    sources["sglang.srt.user"] = (
        f"from {hisparse} import copy_cache_planned_mla, transfer_cache_dsv4_mla as transfer\nimport {hisparse} as whole\n"
        "def call(**kwargs):\n    return copy_cache_planned_mla(**kwargs)\n"
    )
    for path, text in sources.items():
        file = folder / (path.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for sub in {p.parent for p in folder.rglob("*.py")}:
        while sub != folder:
            (sub / "__init__.py").touch()
            sub = sub.parent


@pytest.fixture
def tree(tmp_path, monkeypatch):
    def make(**how):
        write_tree(tmp_path, **how)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    yield make
    drop_in.uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, "specstate.sglang")


def function(name):
    return getattr(importlib.import_module(PATHS[name]), drop_in_attribute(name))


def drop_in_attribute(name):
    return RECORD[next(m for m, e in RECORD.items() if name in e)][name]["sglang_name"]


REPLACED = sorted(set(PATHS) - {"HiSparseSpecState"})


def plan(k=3, rows=8, bytes_=16):
    rng = np.random.default_rng(0)
    return {
        "miss_src": np.arange(k, dtype=np.int64).reshape(1, k), "miss_dst": np.arange(k, dtype=np.int32)[None] + 2, "miss_count": np.array([k], np.int32),
        "num_real_reqs": np.ones(1, np.int32), "host_cache": rng.integers(0, 255, (rows, bytes_)).astype(np.uint8),
        "device_buffer": np.zeros((rows, bytes_), np.uint8), "item_size_bytes": bytes_,
    }  # fmt: skip


def test_everything_is_replaced_and_put_back(tree):
    tree()
    before = {name: function(name) for name in REPLACED}
    done = drop_in.install()
    assert sorted(done) == REPLACED == sorted(drop_in.installed())
    for name in REPLACED:
        now = function(name)
        assert now is not before[name] and now.__specstate__ == name
        assert inspect.signature(now) == inspect.signature(before[name])  # as sglang's, for whoever looks
    drop_in.uninstall()
    assert {name: function(name) for name in REPLACED} == before
    assert drop_in.installed() == []
    drop_in.uninstall()  # again: nothing to do


def test_a_call_works_where_it_was_imported_before(tree):
    tree()
    import sglang.srt.user as user

    assert user.call(**plan()) == "sglang"
    original = user.copy_cache_planned_mla
    done = drop_in.install(only="hisparse")
    assert set(done["copy_cache_planned_mla"]) == {PATHS["copy_cache_planned_mla"], "sglang.srt.user"}
    p = plan()
    assert user.call(**p) is None
    np.testing.assert_array_equal(p["device_buffer"][2:5], p["host_cache"][:3])
    assert user.transfer.__specstate__ == "transfer_cache_dsv4_mla"  # under another name too
    drop_in.uninstall()
    assert user.copy_cache_planned_mla is original and user.call(**plan()) == "sglang"


def test_who_imports_after_installation_is_put_back_too(tree):
    tree()
    drop_in.install()
    import sglang.srt.user as user

    assert user.call(**plan()) is None
    drop_in.uninstall()
    assert user.call(**plan()) == "sglang"


def test_only(tree):
    tree()
    assert set(drop_in.install(only="kda")) == {n for n in REPLACED if n in RECORD["kda"]}
    assert set(drop_in.install(only=["draft_kv", "transfer_cache_dsv4_mla"])) == {
        "FusedKVMaterializeHelper", "fused_norm_rope_stacked", "transfer_cache_dsv4_mla",
    }  # fmt: skip
    assert not hasattr(function("commit_kda_replayssm_spec"), "__specstate__")  # the second installation replaced the first
    assert set(drop_in.install("hisparse, kda")) == {n for n in REPLACED if n not in RECORD["draft_kv"]}
    with pytest.raises(ValueError, match="install: only: expected families or functions among .*hisparse.*, got 'hisparce'"):
        drop_in.install(only=["hisparce"])
    assert drop_in.installed()  # a refused call changes nothing


def spec_call(steps, k=4, hot=8):
    from specstate import hisparse

    return dict(
        top_k_tokens=np.zeros((1, steps, k), np.int32), device_buffer_tokens=np.full((1, hot + 2), -1, np.int32),
        host_cache_locs=np.arange(16, dtype=np.int64)[None], device_buffer_locs=np.arange(hot + 2, dtype=np.int32)[None],
        host_cache=np.ones((16, 16), np.uint8), device_buffer=np.zeros((16, 16), np.uint8),
        top_k_device_locs=np.full((1, steps, k), -7, np.int32), req_pool_indices=np.zeros(1, np.int64), seq_lens=np.full(steps, 9, np.int32),
        state=hisparse.new_spec_state(np.array([[12, 13]], np.int32), hot, steps * k), num_real_reqs=np.ones(1, np.int32),
    )  # fmt: skip


def test_strict_keeps_sglangs_limits(tree):
    tree()
    name = "load_cache_to_device_buffer_spec_mla"
    drop_in.install()
    for steps in (1, 2, 7):
        call = spec_call(steps)
        function(name)(**call)
        assert (call["top_k_device_locs"] >= 0).all()
    drop_in.install(strict=True)
    with pytest.raises(ValueError, match="^HiSparse speculative swap requires 2-4 steps, got 7.$"):
        function(name)(**spec_call(7))
    with pytest.raises(ValueError, match="^HiSparse speculative swap requires top_k >= 1024.$"):
        function(name)(**spec_call(2))


def test_older_trees(tree):
    tree(rename=lambda path: OLD.get(path.rpartition(".")[2], path))
    done = drop_in.install()
    assert sorted(done) == REPLACED
    assert OLD["hisparse"] in done["copy_cache_planned_mla"] and OLD["kda_decode_mtp"] in done["fused_kda_decode_mtp_dspark"]


def test_a_tree_that_lacks_a_function(tree, caplog):
    tree(leave_out=("copy_cache_planned_mla", "fused_kda_decode_mtp_dspark"))
    (pathlib.Path(sys.path[0]) / "sglang/srt/user.py").unlink()
    assert sorted(drop_in.install()) == [n for n in REPLACED if n not in ("copy_cache_planned_mla", "fused_kda_decode_mtp_dspark")]
    assert "copy_cache_planned_mla: not replaced: no module of sglang has it" in caplog.text
    with pytest.raises(ImportError, match="this sglang has none of the functions; looked in .*kda_decode_mtp"):
        drop_in.install(only=["fused_kda_decode_mtp_dspark"])


def test_a_failed_call_leaves_the_first_in_place(tree):
    tree(leave_out=("fused_kda_decode_mtp_dspark",))
    (pathlib.Path(sys.path[0]) / "sglang/srt/user.py").unlink()
    first = drop_in.install(only="hisparse")
    before = [function(name) for name in first]
    with pytest.raises(ImportError, match="has none of the functions"):
        drop_in.install(only="fused_kda_decode_mtp_dspark")
    assert sorted(drop_in.installed()) == sorted(first) and [function(name) for name in first] == before
    with pytest.raises(ValueError, match=r"install: only: expected families or functions among .* \(None: all\), got none of them\."):
        drop_in.install(only=[])
    assert sorted(drop_in.install(only="hisparse")) == sorted(first)  # the same again wraps sglang's own, not ours
    drop_in.uninstall()
    assert not any(hasattr(function(name), "__specstate__") for name in first)


def test_a_module_that_refuses_leaves_the_first_in_place(tree, monkeypatch):
    """Half of an installation is put back, and what was there before comes again."""
    tree()
    drop_in.install(only="load_cache_to_device_buffer_mla")
    held, before = function("load_cache_to_device_buffer_mla"), {name: function(name) for name in REPLACED}

    class Frozen(types.ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError("read-only module")

    odd = Frozen("odd")
    vars(odd)["f"] = before["copy_cache_planned_mla"]
    monkeypatch.setitem(sys.modules, "odd", odd)
    with pytest.raises(AttributeError, match="read-only module"):
        drop_in.install()
    assert drop_in.installed() == ["load_cache_to_device_buffer_mla"]
    assert {name: function(name) for name in REPLACED} == before and function("load_cache_to_device_buffer_mla") is held
    monkeypatch.delitem(sys.modules, "odd")
    assert sorted(drop_in.install()) == REPLACED
    drop_in.uninstall()
    assert not any(hasattr(function(name), "__specstate__") for name in REPLACED)


def test_threads_that_install_and_uninstall(tree):
    tree()
    drop_in.install()
    drop_in.uninstall()
    sglangs = {name: function(name) for name in REPLACED}
    failed = []

    def work(i):
        try:
            for k in range(10):
                drop_in.install(only="hisparse" if (i + k) % 2 else None)
                drop_in.uninstall()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and not drop_in.installed()
    assert {name: function(name) for name in REPLACED} == sglangs


def test_a_module_that_does_not_import(tree, caplog):
    tree()
    path = pathlib.Path(importlib.util.find_spec("sglang").origin).parent / "kernels/ops/attention/kda_decode_mtp.py"
    path.write_text("import a_module_that_is_not_there\n" + path.read_text())
    assert "fused_kda_decode_mtp_dspark" not in drop_in.install()
    why = "sglang.kernels.ops.attention.kda_decode_mtp does not import: No module named 'a_module_that_is_not_there'"
    assert f"not replaced: {why}" in caplog.text
    with pytest.raises(ImportError, match=f"none of the functions can be replaced; {why}") as raised:
        drop_in.install(only="fused_kda_decode_mtp_dspark")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError) and raised.value.__cause__.name == "a_module_that_is_not_there"


def test_without_sglang():
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("needs-no-sglang: sglang is installed here")
    with pytest.raises(ImportError, match="sglang is not installed in this Python"):
        drop_in.install()


class OnGpu:
    """An array that says it is on a GPU; nothing may read it."""

    is_cuda = True
    shape = (1, 4, 1, 128)
    dtype = "bfloat16"


def test_gpu_calls_go_to_sglang_while_there_is_no_cuda_kernel(tree, monkeypatch, caplog):
    tree()
    monkeypatch.setattr(drop_in, "_cuda_built", lambda: False)
    drop_in.install()
    for _ in range(3):
        assert function("copy_cache_planned_mla")(**{**plan(), "miss_src": OnGpu()}) == "sglang"
    line = "copy_cache_planned_mla: sglang's own for GPU tensors is in use: this build of specstate has no CUDA kernel for it"
    assert caplog.text.count(line) == 1  # said once
    p = plan()
    assert function("copy_cache_planned_mla")(**p) is None
    gating = [np.zeros(1)] * 3 + [1.0, 20.0] + [OnGpu()] * 4 + [np.zeros(1)] * 2
    assert function("fused_sigmoid_gating_delta_rule_update")(*gating) == "sglang"

    class Layer:
        class self_attn:
            class qkv_proj:
                weight = OnGpu()

    assert function("FusedKVMaterializeHelper")([Layer], None, 1, 128, "cuda").kind == "sglang"


def test_a_refusal_of_the_kernel_falls_back_before_anything_is_written(tree, monkeypatch, caplog):
    """With CUDA kernels in the build, a function that has none refuses the call, and sglang's own does it."""
    tree()
    monkeypatch.setattr(drop_in, "_cuda_built", lambda: True)
    from specstate import hisparse

    def refuse(**kwargs):
        raise NotImplementedError("no CUDA kernel for this operation")

    monkeypatch.setattr(hisparse, "copy_cache_planned_mla", _as(hisparse.copy_cache_planned_mla, refuse))
    drop_in.install()
    assert function("copy_cache_planned_mla")(**{**plan(), "miss_src": OnGpu()}) == "sglang"
    with pytest.raises(NotImplementedError):  # on the CPU there is nobody to fall back to
        function("copy_cache_planned_mla")(**plan())
    assert "sglang's own for GPU tensors is in use: no CUDA kernel for this operation" in caplog.text


def test_a_call_that_is_refused_takes_no_other_with_it(tree, monkeypatch, caplog):
    """A kernel that cannot do this call may do the next one: both are said, once each."""
    tree()
    monkeypatch.setattr(drop_in, "_cuda_built", lambda: True)
    from specstate import hisparse

    def refuse_large(**kwargs):
        if kwargs["item_size_bytes"] > 16:
            raise NotImplementedError("at most 16 bytes on CUDA")
        return "ours"

    monkeypatch.setattr(hisparse, "copy_cache_planned_mla", _as(hisparse.copy_cache_planned_mla, refuse_large))
    drop_in.install()
    call = {**plan(), "miss_src": OnGpu(), "item_size_bytes": 16}
    f = function("copy_cache_planned_mla")
    assert [f(**{**call, "item_size_bytes": n}) for n in (32, 16, 32, 16)] == ["sglang", "ours", "sglang", "ours"]
    assert caplog.text.count("sglang's own for GPU tensors is in use: at most 16 bytes on CUDA") == 1
    assert caplog.text.count("specstate's is in use") == 1


def _as(f, other):
    other.__signature__ = inspect.signature(f)
    return other


@pytest.mark.parametrize(("shape", "dtype", "why"), [((1, 4, 1, 256), np.float32, "head dimension 256"), ((1, 4, 1, 64), np.float16, "dtype float16")])
def test_heads_that_ours_does_not_have_stay_with_sglang(tree, caplog, shape, dtype, why):
    tree()
    drop_in.install()
    x = np.zeros(shape, dtype)
    assert function("fused_sigmoid_gating_delta_rule_update")(*[np.zeros(1)] * 3, 1.0, 20.0, x, x, x, *[np.zeros(1)] * 3) == "sglang"
    assert f"sglang's own is in use: {why}" in caplog.text


def test_errors_of_the_caller_are_errors(tree):
    tree()
    drop_in.install()
    with pytest.raises(ValueError, match="together|miss_dst"):
        function("copy_cache_planned_mla")(**{**plan(), "miss_dst": np.zeros((1, 3), np.float32)})


@pytest.mark.parametrize("wrong", [5, "x", None, object(), np.zeros(()), [object()]], ids=repr)
def test_nonsense_is_refused_by_name(tree, wrong):
    tree()
    drop_in.install()
    x = np.zeros((1, 4, 1, 64), np.float32)
    with pytest.raises((TypeError, ValueError), match=r"fused_sigmoid_gating_delta_rule_update: q: expected .*, got "):
        function("fused_sigmoid_gating_delta_rule_update")(*[np.zeros(1)] * 3, 1.0, 20.0, wrong, x, x, *[np.zeros(1)] * 3, is_kda=True)
    with pytest.raises(TypeError, match="FusedKVMaterializeHelper: layers: expected "):
        function("FusedKVMaterializeHelper")(wrong, None, 1, 8, "cpu")


def fake_torch(monkeypatch, capability):
    import types

    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(get_device_capability=lambda *_: capability)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(("capability", "before", "after"), [((9, 0), False, True), ((10, 0), True, True), ((8, 0), False, False)])
def test_the_dispatch_opens_on_hopper(tree, monkeypatch, capability, before, after):
    fake_torch(monkeypatch, capability)
    tree()
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

    asks = lambda n: KDAAttnBackend()._can_run_dspark_cutedsl_mtp(draft_token_num=n)  # noqa: E731
    original = KDAAttnBackend._can_run_dspark_cutedsl_mtp
    assert asks(4) is before
    monkeypatch.setattr(drop_in, "_cuda_built", lambda: False)
    drop_in.install()
    assert asks(4) is before  # no CUDA kernel in the build: nothing changes
    monkeypatch.setattr(drop_in, "_cuda_built", lambda: True)
    drop_in.install()
    assert asks(4) is after
    assert asks(9) is False  # the rest of the contract stays
    drop_in.uninstall()
    assert KDAAttnBackend._can_run_dspark_cutedsl_mtp is original and asks(4) is before


def test_the_plugin_does_nothing_unless_asked(tree, monkeypatch):
    tree()
    for value in (None, "", "0"):
        monkeypatch.delenv("SPECSTATE_SGLANG", raising=False)
        if value is not None:
            monkeypatch.setenv("SPECSTATE_SGLANG", value)
        drop_in.plugin()
        assert drop_in.installed() == [] and "sglang" not in sys.modules
    monkeypatch.setenv("SPECSTATE_SGLANG", "hisparse,draft_kv")
    drop_in.plugin()
    assert set(drop_in.installed()) == {n for n in REPLACED if n not in RECORD["kda"]}
    monkeypatch.setenv("SPECSTATE_SGLANG", "1")
    drop_in.plugin()
    assert sorted(drop_in.installed()) == REPLACED


def test_sglangs_tests_run_against_ours(tmp_path):
    """The pytest plugin replaces before a test module's `from .. import f`."""
    write_tree(tmp_path)
    test = tmp_path / "test_theirs.py"
    test.write_text(f"from {PATHS['copy_cache_planned_mla']} import copy_cache_planned_mla as f\n\n\ndef test_ours():\n    assert f.__specstate__\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "specstate.sglang.pytest_plugin", str(test)],
        capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert "specstate in the place of sglang" in done.stdout or "-q" in done.args


def environment(folder):
    import os

    return dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT / 'python'}", PYTHONDONTWRITEBYTECODE="1")


def test_what_stands_in_sys_modules(tree, monkeypatch):
    """A module without a spec is no sglang; modules that do not show their attributes are passed over."""
    import types

    class Closed(types.ModuleType):
        @property
        def __dict__(self):
            raise RuntimeError("closed")

        def __getattribute__(self, name):
            raise RuntimeError("closed")

    tree()
    monkeypatch.setitem(sys.modules, "a_closed_module", Closed("a_closed_module"))
    assert drop_in.install(only="hisparse")
    drop_in.uninstall()
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    with pytest.raises(ImportError, match="sglang is not installed in this Python"):
        drop_in.install()
    with pytest.raises(TypeError, match="^install: only: expected a name, a sequence of names or None, got int 5"):
        drop_in.install(only=5)
