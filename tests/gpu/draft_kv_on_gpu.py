"""Draft-KV problems on the GPU, and how far what it leaves may be from the oracle."""

import draft_kv as oracle
import ml_dtypes
import numpy as np
import torch
from draft_kv_cases import FP8, raw, units

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


# What float32 explains. A product: its sum in float32 is within 2^-22 of the sum of |x w| of the exact one (tensor cores truncate, in runs of a
# few hundred: measured some 2^-25). K behind its rounded projection: norm and rotary are half a dozen float32 roundings, 2^-21 of the rotary pair.
OF_SUM, OF_PAIR = 2.0**-22, 2.0**-21
# And how many elements may fall to the other side of their rounding: float16's units are eight times finer than bfloat16's.
SHARE = {"bf16": 0.001, "fp16": 0.008}


def explained(got, exact, error, io):
    """Every element is the storage rounding of a number within `error` of the exact one: where that is no more than half a unit, at most one unit
    in the last place from the rounding of the exact one. All but one in a thousand (bfloat16) are that rounding itself; three elements of a
    small array may differ."""
    got, r = np.asarray(got).astype(np.float64), oracle.ROUND[io]
    outside = (got < r(exact - error)) | (got > r(exact + error))
    assert not outside.any(), (int(outside.sum()), float(np.abs(got - exact)[outside].max()))
    if io != "fp32":
        off = got != r(exact)
        assert off.sum() <= max(3, SHARE[io] * off.size), f"{off.sum()} of {off.size} elements are not the rounding of the exact value"


def exact_projection(p):
    """[L, T, columns] in float64, and the sums of the products' magnitudes (with the bias's)."""
    x, w = p.hidden.astype(np.float64), p.weight.astype(np.float64)
    exact, size = np.einsum("th,loh->lto", x, w, optimize=True), np.einsum("th,loh->lto", abs(x), abs(w), optimize=True)
    if "kv_bias" in p.kwargs:
        bias = p.kwargs["kv_bias"].astype(np.float64)[:, None]
        exact, size = exact + bias, size + abs(bias) + abs(exact)
    return exact, size


def exact_keys(p, projection, neox=True, rounded=False):
    """K [L, T, N, D] in float64 of rounded projections, before its last rounding, and the magnitudes of rotary pairs."""
    y = projection / np.sqrt((projection**2).mean(-1, keepdims=True) + p.eps.astype(np.float64)[:, None, None, None])
    y = y * p.norm.astype(np.float64)[:, None, None, :]
    if rounded:
        y = oracle.ROUND[p.io](y)
    half = p.R // 2
    c, s = (p.rope.astype(np.float64)[p.positions][None, :, None, part] for part in (slice(0, half), slice(half, p.R)))
    low, high = (slice(0, half), slice(half, p.R)) if neox else (slice(0, p.R, 2), slice(1, p.R, 2))
    k, size = y.copy(), np.abs(y)
    k[..., low], k[..., high] = y[..., low] * c - y[..., high] * s, y[..., high] * c + y[..., low] * s
    size[..., low] = size[..., high] = np.hypot(y[..., low], y[..., high])
    return k, size


def assert_pools(p, pools, neox=True, rounded=False):
    """Pools of a call whose V weights are its K weights, so that V shows the rounded projections that K was made of: those against the exact
    product, K against the exact norm and rotary of them; everything else is poison."""
    rows = p.written()
    slots = p.loc.reshape(-1)[rows]
    others = np.setdiff1d(np.arange(p.slots), slots)
    for pool, poison in zip(pools, p.pools(pools[0].dtype)):
        np.testing.assert_array_equal(raw(pool[:, others]), raw(poison[:, others]))
    if not len(rows):
        return
    shape = (p.L, len(p.hidden), p.N, p.D)
    exact, size = (x[:, :, : p.N * p.D].reshape(shape)[:, rows] for x in exact_projection(p))
    k, v = (pool[:, slots] for pool in pools)
    explained(v, exact, OF_SUM * size, p.io)
    q = p.__class__.__new__(p.__class__)
    q.__dict__.update(p.__dict__)
    q.positions = p.positions[rows]
    exact, size = exact_keys(q, v.astype(np.float64), neox, rounded)
    if rounded and p.io != "fp32":  # a normed value that fell to the other side of its rounding: rare, and one unit of its pair
        off = np.asarray(k).astype(np.float64) != oracle.ROUND[p.io](exact)
        assert off.sum() <= max(3, SHARE[p.io] * off.size) and units(k, exact, p.io, size).max() <= 2
    else:
        explained(k, exact, OF_PAIR * size, p.io)


def keys_as_values(p):
    """The problem with K's weights (and biases) for V, too."""
    width = p.N * p.D
    p.weight = p.weight.copy()
    p.weight[:, width:] = p.weight[:, :width]
    if "kv_bias" in p.kwargs:
        p.kwargs["kv_bias"][:, width:] = p.kwargs["kv_bias"][:, :width]
    return p
