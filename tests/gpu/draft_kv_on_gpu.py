"""Draft-KV problems on the GPU, and how far what it leaves may be from the oracle."""

import ml_dtypes
import numpy as np
import torch
from draft_kv_cases import FP8, raw, rotary_pairs, units

import specstate.draft_kv as draft_kv

CODES = {np.dtype(ml_dtypes.bfloat16): torch.bfloat16, FP8: torch.float8_e4m3fn}


def gpu(x):
    """A torch tensor on the GPU with the values and the strides of a NumPy array."""
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype in CODES:
        return gpu(x.view({1: np.uint8, 2: np.uint16}[x.itemsize])).view(CODES[x.dtype])
    dense = np.lib.stride_tricks.as_strided(x, (x.size and 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides)) // x.itemsize,), (x.itemsize,))
    return torch.from_numpy(dense.copy()).cuda().as_strided(x.shape, [s // x.itemsize for s in x.strides])


def cpu(x, dtype):
    """Back as NumPy, in the storage type `dtype`."""
    x = x.cpu()
    if x.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        x = x.view(torch.uint8 if x.element_size() == 1 else torch.uint16)
    return x.numpy().view(dtype) if x.numpy().dtype != dtype else x.numpy()


def run(p, pools=None, **extra):
    """The pools that the call leaves, as NumPy arrays."""
    pools = p.pools() if pools is None else pools
    targets = [gpu(x) for x in pools]
    kwargs = {name: gpu(value) for name, value in {**p.kwargs, **extra}.items()}
    draft_kv.materialize_into_pool(*(gpu(x) for x in p.args()), *targets, **kwargs)
    torch.cuda.synchronize()
    draft_kv.raise_pending_error(targets[0])
    return [cpu(t, x.dtype) for t, x in zip(targets, pools)]


def distances(got, want, io, rotary=None, neox=True):
    """In units of the storage type at the value's own magnitude (of K: its rotary pair's), but not below 1/64 of the head's largest: there a
    value is what is left of a sum that cancelled, and the float32 sum is what it is."""
    size = np.abs(want) if rotary is None else rotary_pairs(want, rotary, neox)
    size = np.maximum(size, np.abs(want).max(-1, keepdims=True) / 64)
    return units(got, want, io, size)


def assert_pools(p, got, want, io, neox=True):
    """V within one unit, K within two (one of the projection that it is made of, one of its own); everything else is poison."""
    slots = p.loc.reshape(-1)[p.written()]
    others = np.setdiff1d(np.arange(p.slots), slots)
    poison = p.pools(got[0].dtype)[0]
    for name, pool, reference in zip("kv", got, want):
        np.testing.assert_array_equal(raw(pool[:, others]), raw(poison[:, others]))
        if not len(slots):
            continue
        reference = reference[:, slots]
        off = distances(pool[:, slots], reference, io, p.R if name == "k" else None, neox)
        assert off.max() <= 2 if name == "k" or io == "fp32" else 1, (name, off.max())
        if io != "fp32" and name == "v":
            assert (off != 0).mean() <= 0.005, (off != 0).mean()
