"""sglang's own kernels, from its wheel, without the rest of sglang: the peers of our benchmarks and the counterpart of its tests.

    import sglang_wheel
    sglang_wheel.use("FOLDER")            # the wheel, unpacked; nothing of it is copied into this project
    from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_spec_mla

`use` puts empty packages in the place of `sglang`, `sglang.srt` and `sglang.srt.utils`, whose `__init__` would import a whole server.
Kernels of the wheel that are compiled at first use (CUDA, by nvcc) are taken from `FOLDER/prebuilt/NAME.so` where `build_sglang.py` has
made them, so that no time on a GPU machine goes into a compiler.
"""

import importlib.machinery
import pathlib
import sys
import types


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


def use(folder):
    root = pathlib.Path(folder).resolve() / "sglang"
    if not (root / "kernels").is_dir():
        raise FileNotFoundError(f"sglang_wheel: expected the unpacked wheel of sglang, got {folder}")
    import torch

    _package("sglang", root)
    _package("sglang.srt", root / "srt")
    utils = _package("sglang.srt.utils", root / "srt" / "utils")
    _package("sglang.kernels", root / "kernels")
    for name in ("ops", "ops.attention", "ops.attention.fla", "ops.attention.linear", "ops.kvcache", "ops.mamba", "ops.speculative"):
        _package("sglang.kernels." + name, root / "kernels" / name.replace(".", "/"))
    common = types.ModuleType("sglang.srt.utils.common")
    small = types.ModuleType("sglang.utils")
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    answers = {
        "is_cuda": True, "is_cuda_alike": True, "is_hip": False, "is_npu": False, "is_xpu": False, "is_musa": False, "is_cpu": False,
        "cpu_has_amx_support": False, "is_in_ci": False, "is_hopper": major == 9, "is_sm90_supported": major == 9,
        "is_sm100_supported": major == 10, "is_blackwell": major >= 10, "is_gfx95_supported": False, "get_device": "cuda",
        "get_cuda_version": tuple(int(x) for x in torch.version.cuda.split(".")), "get_device_capability": (major, minor),
        "is_flashinfer_available": False, "is_sm120_supported": major == 12, "get_device_sm": 10 * major + minor,
    }  # fmt: skip
    for module in (utils, common, small):
        for name, answer in answers.items():
            setattr(module, name, lambda *_, answer=answer: answer)
        module.device_context = lambda device: torch.cuda.device(device)
        module.cdiv = lambda a, b: -(-a // b)
        module.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()
    sys.modules["sglang.srt.utils.common"] = utils.common = common
    sys.modules["sglang.utils"] = sys.modules["sglang"].utils = small
    custom_op = types.ModuleType("sglang.srt.utils.custom_op")
    custom_op.register_custom_op = lambda f=None, **_: f if f is not None else (lambda g: g)
    sys.modules["sglang.srt.utils.custom_op"] = utils.custom_op = custom_op

    import sglang.kernels.jit.utils as jit

    compiled = jit.load_jit

    def load_jit(*arguments, **options):
        prebuilt = root.parent / "prebuilt" / (prebuilt_name(*arguments) + ".so")
        if prebuilt.exists():
            import tvm_ffi

            return tvm_ffi.load_module(str(prebuilt))
        return compiled(*arguments, **options)

    jit.load_jit = load_jit
    return root


def prebuilt_name(*arguments):
    return "-".join("".join(c if c.isalnum() else "_" for c in str(a)) for a in arguments)
