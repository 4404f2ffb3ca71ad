"""sglang's own kernels, from its wheel, without the rest of sglang: the peers of our benchmarks and the counterpart of its tests.

    pip download --no-deps sglang==0.5.23, unpacked into FOLDER (never into this repository)
    import sglang_wheel
    sglang_wheel.use("FOLDER")
    from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_spec_mla

`use` puts empty packages in the place of those whose `__init__` would import a whole server. sglang compiles its CUDA kernels at first
use; where FOLDER/prebuilt has a module already (named by `name_of` of what load_jit is asked for), that one is loaded, so that no time
on a GPU machine goes into a compiler.
"""

import functools
import importlib.machinery
import pathlib
import sys
import types

VERSION = "0.5.23"
PACKAGES = ("kernels", "kernels.jit", "kernels.ops", "kernels.ops.attention", "kernels.ops.attention.fla", "kernels.ops.attention.linear",
            "kernels.ops.kvcache", "kernels.ops.mamba", "kernels.ops.memory", "kernels.ops.speculative", "srt")  # fmt: skip


def name_of(arguments):
    return "-".join("".join(c if c.isalnum() else "_" for c in (str(a).lower() if isinstance(a, bool) else str(a))) for a in arguments)


def _package(name, path):
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _module(name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


def use(folder):
    root = pathlib.Path(folder).resolve()
    if not (root / "sglang" / "kernels").is_dir():
        raise FileNotFoundError(f"sglang_wheel: expected the unpacked wheel of sglang, got {folder}")
    import torch

    _package("sglang", root / "sglang")
    for name in PACKAGES:
        _package("sglang." + name, root / "sglang" / name.replace(".", "/"))
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    answers = {
        "is_cuda": True, "is_cuda_alike": True, "is_hip": False, "is_npu": False, "is_xpu": False, "is_musa": False, "is_cpu": False,
        "cpu_has_amx_support": False, "is_in_ci": False, "is_hopper": major == 9, "is_sm90_supported": major == 9,
        "is_sm100_supported": major == 10, "is_sm120_supported": major == 12, "is_blackwell": major >= 10, "is_gfx95_supported": False,
        "get_device": "cuda", "get_device_sm": 10 * major + minor, "is_flashinfer_available": False,
        "get_device_core_count": torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0,
        "get_cuda_version": tuple(int(x) for x in (torch.version.cuda or "0.0").split(".")), "get_device_capability": (major, minor),
    }  # fmt: skip
    functions = {name: (lambda *_, answer=answer: answer) for name, answer in answers.items()}
    functions["cdiv"] = lambda a, b: -(-a // b)
    functions["next_power_of_2"] = lambda n: 1 << max(0, n - 1).bit_length()
    functions["device_context"] = torch.cuda.device
    functions["torch_release"] = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:3] if x.isdigit())
    _package("sglang.srt.utils", root / "sglang" / "srt" / "utils").__dict__.update(functions)
    _module("sglang.srt.utils.common", **functions)
    _module("sglang.srt.utils.custom_op", register_custom_op=lambda f=None, **_: f if f is not None else (lambda g: g))
    _module("sglang.utils", **functions)

    if not (root / "prebuilt").is_dir():
        return root  # sglang's own loader

    def load_jit(*arguments, **_):
        import tvm_ffi

        library = root / "prebuilt" / (name_of(arguments) + ".so")
        if not library.exists():
            raise FileNotFoundError(f"sglang_wheel: {library.name} is not in {library.parent}")
        return tvm_ffi.load_module(str(library))

    _module("sglang.kernels.jit.utils", load_jit=load_jit, cache_once=functools.cache, is_arch_support_pdl=lambda: major >= 9,
            make_cpp_args=lambda *a: [str(x).lower() if isinstance(x, bool) else str(x) for x in a], is_hip_runtime=lambda: False,
            is_musa_runtime=lambda: False, get_jit_cuda_arch=lambda: types.SimpleNamespace(major=major, minor=minor),
            device_guard=lambda t: torch.cuda.device(t.device))  # fmt: skip
    return root


def trim(source, target):
    """The part of an unpacked wheel that `use` needs, a few hundred KB, for a machine that it must be carried to."""
    import shutil

    source, target = pathlib.Path(source), pathlib.Path(target)
    files = ["kvcache/hisparse", "kvcache/kvcache", "mamba/causal_conv1d_triton", "attention/linear/fused_sigmoid_gating_recurrent",
             "attention/linear/kda_replayssm_spec_decode", "attention/linear/fused_kda_conv_recurrent_verify", "attention/fla/fused_norm_gate",
             "speculative/fused_kv_materialize", "mamba/mamba_state_scatter_triton", "attention/fla/*", "attention/linear/fused_gdn_gating",
             "attention/linear/gdn_replayssm_spec_fold", "memory/ptr_table"]  # fmt: skip
    ops = source / "sglang" / "kernels" / "ops"
    backend = source / "sglang" / "srt" / "layers" / "attention" / "linear" / "kda_backend.py"  # who calls the fused verify, for a test of its dispatch
    for path in {path for name in files for path in ops.glob(name + ".py")} | {backend}:
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    (target / "prebuilt").mkdir(parents=True, exist_ok=True)
    for library in (source / "prebuilt").glob("*.so"):
        shutil.copy2(library, target / "prebuilt")
