"""KDA on a GPU through the tests of the CPU: the float64 oracle with its tolerances, the bitwise invariants, the public faults.

Their NumPy arrays are mirrored: every memory that a call's arrays look into goes to the GPU as it is (views of one memory stay views of one
memory, poison included), the call runs there, and all of it comes back. Calls are exact unless a test says otherwise; what the faster
ring form may do is tested against the oracle too."""

import ctypes
import functools

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import kda_cases  # noqa: E402
import test_kda  # noqa: E402
import test_kda_faults  # noqa: E402
import test_kda_names  # noqa: E402
import torch  # noqa: E402

import specstate.kda as kda  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
FUNCTIONS = ("verify", "decode", "fold", "rollback_conv_windows", "fused_kda_decode_mtp_dspark", "commit_kda_replayssm_spec", "commit_kda_replayssm_spec_all_layers",
             "fused_sigmoid_gating_delta_rule_update", "cutedsl_fused_sigmoid_gating_kda_update")  # fmt: skip


class Mirror:
    """The memory behind a call's arrays, on the GPU."""

    def __init__(self):
        self.memory = {}
        self.given = []  # (tensor, array) of every argument

    def tensor(self, x):
        owner = x
        while getattr(owner, "base", None) is not None:
            owner = owner.base
        low, high = np.lib.array_utils.byte_bounds(owner)
        if id(owner) not in self.memory:
            host = np.frombuffer((ctypes.c_char * max(high - low, 1)).from_address(low), np.uint8) if high > low else np.zeros(0, np.uint8)
            buffer = torch.zeros(-(-(high - low) // 16) * 16 + 16, dtype=torch.uint8, device="cuda")
            buffer[: len(host)] = torch.from_numpy(host.copy()).cuda()
            self.memory[id(owner)] = (owner, host, buffer)
        buffer = self.memory[id(owner)][2]
        offset = x.__array_interface__["data"][0] - low if x.size else 0
        flat = buffer.view(DTYPES[x.dtype.name])
        tensor = flat.as_strided(x.shape, [s // x.itemsize for s in x.strides], offset // x.itemsize)
        self.given.append((tensor, x))
        return tensor

    def back(self):
        for owner, host, buffer in self.memory.values():
            if owner.flags.writeable and len(host):
                ctypes.memmove(host.ctypes.data, buffer[: len(host)].cpu().numpy().ctypes.data, len(host))

    def mirrored(self, x):
        if isinstance(x, np.ndarray):
            return self.tensor(x)
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(self.mirrored, x))
        return type(x)(map(self.mirrored, x)) if isinstance(x, (list, tuple)) else x


def array(t):
    """A result that the call made, as the test's kind of array."""
    return t.view(torch.int16).cpu().numpy().view(kda_cases.BF16) if t.dtype == torch.bfloat16 else t.cpu().numpy()


def on_gpu(function, exact):
    @functools.wraps(function)
    def call(*args, **kw):
        if exact and function.__name__ in ("verify", "fused_kda_decode_mtp_dspark"):
            kw.setdefault("exact", True)
        mirror = Mirror()
        result = function(*map(mirror.mirrored, args), **{k: mirror.mirrored(v) for k, v in kw.items()})
        torch.cuda.synchronize()
        mirror.back()
        same = [x for tensor, x in mirror.given if tensor is result]  # in place, or `out`
        return same[0] if same else array(result) if isinstance(result, torch.Tensor) else result

    return call


@pytest.fixture(autouse=True)
def calls_run_on_the_gpu(request, monkeypatch):
    exact = "fast" not in request.node.name
    for name in FUNCTIONS:
        monkeypatch.setattr(kda, name, on_gpu(getattr(kda, name), exact))


@pytest.mark.parametrize("dtype", [kda_cases.F32, kda_cases.BF16], ids=str)
@pytest.mark.parametrize("shape", test_kda.SHAPES + [dict(K=128, V=128), dict(K=128, V=128, lens=[16, 3, 9], N=3)], ids=str)
def test_fast_ring_form_against_oracle(shape, dtype):
    """Section 4 (b) for the form without `exact`: outputs from the q, k, v that were used, within one unit in a thousandth of the elements."""
    p = kda_cases.case(1, **shape)
    a = kda_cases.act(p, dtype)
    a |= {x: np.ascontiguousarray(a[x].swapaxes(1, 2)).swapaxes(1, 2) for x in ("cs_q", "cs_k", "cs_v")}
    rings, _, conv = kda_cases.buffers(a)
    conv = {k: np.full((*v.shape[:2], 3, v.shape[2]), np.nan, v.dtype).swapaxes(2, 3) for k, v in conv.items()}
    out = kda_cases.call(a, rings=rings, **conv)
    want, _ = kda_cases.fed_oracle(p, *kda_cases.used_channels(a), quant=dtype == kda_cases.BF16)
    if dtype == kda_cases.BF16:
        off = kda_cases.ulps(out, want.astype(kda_cases.BF16))
        assert off.max(initial=0) <= 1 and (off > 0).mean() <= 1e-3
    else:
        assert np.abs(out - want).max() <= 3e-6 * np.abs(want).max()


_taken = {
    test_kda: "verify_against_oracle fold_equals_snapshot verify_of_many rollout a_row_depends later_tokens verify_writes_no_input tokens_of_no_request strided_pools "
              "windows_that_hold tree_paths grouped_heads all_layers null_slot gate_is_monotone a_state_without rounding_of scale_norm rollback_of",
    test_kda_faults: "val_14 val_17 rol_01 rol_02 rol_04 rol_08 rol_10 rol_11 rol_12 rol_15 pad_04 pad_06 pad_08 pad_10 pad_12 num_01 num_02 num_05 num_07 num_10 lif_05 dty_02 "
                     "ali_06 gra_04 gra_03 aln_05 verify_and_commit the_safe_gate skipped_rounding a_second_commit a_nan_stays",
    test_kda_names: "fused_op_is_verify fused_ring_mode commit_is_fold cutedsl_update gating_update",
}  # fmt: skip
for _module, _names in _taken.items():
    for _name in dir(_module):
        if _name.startswith("test_") and any(_name.startswith("test_" + n) for n in _names.split()) and "errors" not in _name:
            globals()[_name] = getattr(_module, _name)
