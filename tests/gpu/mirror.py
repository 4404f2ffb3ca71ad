"""The CPU's KDA tests with every call run on another memory: a GPU's, or (to test this file where there is none) the host's own.

The tests' NumPy arrays are mirrored: every memory that a call's arrays look into goes to the device as it is (views of one memory stay views of
one memory, poison included), the call runs there, and all of it comes back."""

import ctypes
import functools

import kda_cases
import numpy as np

FUNCTIONS = ("verify", "decode", "fold", "defer_fold", "rollback_conv_windows", "fused_kda_decode_mtp_dspark", "commit_kda_replayssm_spec", "commit_kda_replayssm_spec_all_layers",
             "fused_sigmoid_gating_delta_rule_update", "cutedsl_fused_sigmoid_gating_kda_update")  # fmt: skip

# Of tests/python, by the beginnings of their names: what does not depend on the host (error texts, threads, what a check reads of indices).
TAKEN = {
    "test_kda": "verify_against_oracle fold_equals_snapshot verify_of_many a_row_depends later_tokens verify_writes_no_input tokens_of_no_request strided_pools "
                "windows_that_hold tree_paths grouped_heads all_layers null_slot gate_is_monotone a_state_without rounding_of scale_norm rollback_of deferred_fold_is flush_of random_calls snapshots_beyond",
    "test_kda_faults": "val_14 val_17 rol_01 rol_02 rol_04 rol_08 rol_11 rol_12 rol_15 pad_04 pad_06 pad_08 pad_10 pad_12 num_01 num_02 num_05 num_07 num_10 lif_05 dty_02 "
                       "ali_06 gra_04 gra_03 aln_05 verify_and_commit the_safe_gate skipped_rounding a_second_commit a_nan_stays",
    "test_kda_names": "fused_op_is_verify fused_ring_mode commit_is_fold cutedsl_update gating_update",
}  # fmt: skip


def taken(modules):
    """{name: test} of TAKEN in these modules."""
    return {name: getattr(module, name) for module in modules for name in dir(module)
            if "errors" not in name and name.startswith(tuple("test_" + n for n in TAKEN[module.__name__].split()))}  # fmt: skip


class Torch:
    """Memory of a GPU."""

    def __init__(self):
        import torch

        self.torch = torch
        self.dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
        self.kind = torch.Tensor

    def memory(self, host):
        return self.torch.from_numpy(host).cuda()

    def view(self, buffer, x, offset):
        return buffer.view(self.dtypes[x.dtype.name]).as_strided(x.shape, [s // x.itemsize for s in x.strides], offset // x.itemsize)

    def back(self, buffer):
        return buffer.cpu().numpy()  # after the call, which was on the same stream

    def array(self, t):
        return t.view(self.torch.int16).cpu().numpy().view(kda_cases.BF16) if t.dtype == self.torch.bfloat16 else t.cpu().numpy()


class Host:
    """Copies in the host's memory."""

    kind = np.ndarray

    def memory(self, host):
        raw = np.zeros(len(host) + 64, np.uint8)
        buffer = raw[-raw.ctypes.data % 64 :][: len(host)]
        buffer[:] = host
        return buffer

    def view(self, buffer, x, offset):
        return np.ndarray(x.shape, x.dtype, buffer, offset, x.strides)

    def back(self, buffer):
        return buffer

    def array(self, x):
        return x


def owner_of(x):
    while getattr(x, "base", None) is not None:
        x = x.base
    return x


class Mirror:
    """The memories behind a call's arrays, one after another in one memory on the device: a copy there and a copy back for a call."""

    def __init__(self, device, arguments):
        self.device, self.places, self.given = device, {}, []  # given: (device's array, array) of every argument
        size = 0

        def find(x):
            nonlocal size
            if isinstance(x, np.ndarray):
                owner = owner_of(x)
                if id(owner) not in self.places:
                    self.places[id(owner)] = (owner, size)
                    size += (owner.nbytes + 255) // 256 * 256
            elif isinstance(x, (list, tuple)):
                for part in x:
                    find(part)

        find(arguments)
        packed = np.zeros(size + 256, np.uint8)
        for owner, at in self.places.values():
            packed[at : at + owner.nbytes] = self.bytes_of(owner)
        self.buffer = device.memory(packed)

    @staticmethod
    def bytes_of(owner):
        """An owner's memory is dense."""
        return np.frombuffer((ctypes.c_char * owner.nbytes).from_address(owner.__array_interface__["data"][0]), np.uint8) if owner.nbytes else np.zeros(0, np.uint8)

    def __call__(self, x):
        if isinstance(x, np.ndarray):
            owner, at = self.places[id(owner_of(x))]
            offset = x.__array_interface__["data"][0] - owner.__array_interface__["data"][0] if x.size else 0
            there = self.device.view(self.buffer, x, at + offset)
            self.given.append((there, x))
            return there
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(self, x))
        return type(x)(map(self, x)) if isinstance(x, (list, tuple)) else x

    def back(self):
        packed = self.device.back(self.buffer)
        for owner, at in self.places.values():
            if owner.flags.writeable and owner.nbytes:
                ctypes.memmove(owner.__array_interface__["data"][0], packed.ctypes.data + at, owner.nbytes)


def mirrored(function, device, exact):
    """`function` of specstate.kda on the device. `exact`: its ring mode by the recurrence, unless the call says otherwise."""

    @functools.wraps(function)
    def call(*args, **kw):
        if exact and function.__name__ in ("verify", "fused_kda_decode_mtp_dspark"):
            kw.setdefault("exact", True)
        mirror = Mirror(device, (args, tuple(kw.values())))
        result = function(*map(mirror, args), **{k: mirror(v) for k, v in kw.items()})
        mirror.back()
        same = [x for there, x in mirror.given if there is result]  # in place, or `out`
        return same[0] if same else device.array(result) if isinstance(result, device.kind) else result

    return call
