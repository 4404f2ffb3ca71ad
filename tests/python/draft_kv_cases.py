"""Random draft-KV problems, and the storage types of the library beside those of the oracle."""

import draft_kv as oracle
import ml_dtypes
import numpy as np

DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def strided(rng, array):
    """The same values in memory with gaps, sometimes with the axes laid out in another order."""
    order = rng.permutation(array.ndim)
    wide = np.zeros([array.shape[a] * 2 + 1 for a in order], array.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in order)].transpose(np.argsort(order))
    view[...] = array
    return view


class Problem:
    """One call of materialize_into_pool with `io` features; `kwargs` are the keyword arguments of the call."""

    def __init__(self, rng, io="fp32", L=2, T=6, hidden=24, N=2, D=8, R=8, slots=32, window=None, bias=False, table=64, weight=None):
        dtype = DTYPES[io]
        self.io, self.L, self.N, self.D, self.R, self.slots = io, L, N, D, R, slots
        rounded = lambda x: x.astype(np.float32).astype(dtype)
        self.hidden = rounded(rng.standard_normal((T, hidden)))
        self.weight = (rng.standard_normal((L, 2 * N * D, hidden)) / np.sqrt(hidden)).astype(np.float32).astype(DTYPES[weight or io])
        self.norm = rounded(1 + 0.3 * rng.standard_normal((L, D)))
        self.eps = rng.choice(np.array([1e-6, 1e-5, 1e-2], np.float32), L)
        self.rope = oracle.RopeTable(R, 1e4, table).rows.astype(np.float32)
        self.positions = rng.integers(0, table, T)
        self.loc = rng.permutation(slots)[:T]
        self.kwargs = {}
        if bias:
            self.kwargs["kv_bias"] = rounded(rng.standard_normal((L, 2 * N * D)))
        if window:
            self.loc = self.loc.reshape(-1, window)
            self.kwargs["commit_lens"] = rng.integers(0, window + 1, T // window)

    def args(self):
        return [self.hidden, self.weight, self.norm, self.eps, self.rope, self.positions, self.loc]

    def pools(self, dtype=None, fill=0x5A):
        """Two poisoned pools."""
        dtype = DTYPES[self.io] if dtype is None else np.dtype(dtype)
        shape = (self.L, self.slots, self.N, self.D)
        return [np.full(np.prod(shape) * dtype.itemsize, fill, np.uint8).view(dtype).reshape(shape) for _ in range(2)]

    def written(self):
        """Row indices that reach the pool."""
        keep = self.loc.reshape(-1) >= 0
        if "commit_lens" in self.kwargs:
            width = self.loc.shape[1]
            keep &= (np.arange(width)[None] < self.kwargs["commit_lens"][:, None]).reshape(-1)
        return np.flatnonzero(keep)

    def oracle(self, pool_io=None, **extra):
        """The oracle's pools in float64, NaN where nothing was written. K also before its last rounding."""
        kwargs = {**self.kwargs, **extra}
        kwargs["neox"] = kwargs.pop("is_neox_style", True)
        if "kv_bias" in kwargs:
            kwargs["kv_bias"] = kwargs["kv_bias"].astype(np.float64)
        k, v = np.full((2, self.L, self.slots, self.N, self.D), np.nan)
        f8 = lambda x: np.asarray(x).astype(np.float64)
        oracle.materialize_into_pool(
            f8(self.hidden), f8(self.weight), f8(self.norm), f8(self.eps), f8(self.rope), self.positions, self.loc, k, v,
            io=self.io, pool_io=pool_io, **kwargs,
        )  # fmt: skip
        return k, v


def raw(array):
    """The bytes of an array, for comparisons to the bit."""
    return np.ascontiguousarray(array).view(np.uint8)


def rotary_pairs(values, rotary_dim, neox=True):
    """For each channel the larger magnitude of it and the channel that it is rotated with: a rotation may cancel in one of them."""
    half, size = rotary_dim // 2, np.abs(values)
    low = slice(0, half) if neox else slice(0, rotary_dim, 2)
    high = slice(half, rotary_dim) if neox else slice(1, rotary_dim, 2)
    larger = np.maximum(size[..., low], size[..., high])
    size[..., low] = size[..., high] = larger
    return size


def units(got, want, io, size=None):
    """Distance in units of the last place of the storage type at magnitude `size` (the values' own by default); float32's are taken
    as 2^-20 of the head's largest value."""
    got, want = got.astype(np.float64), np.asarray(want, np.float64)
    if io == "fp32":
        return np.abs(got - want) / (np.abs(want).max(-1, keepdims=True) * 2.0**-20 + 1e-30)
    bits, smallest = {"bf16": (8, -126), "fp16": (11, -14)}[io]
    _, e = np.frexp(np.maximum(np.abs(want), np.abs(got)) if size is None else size)
    return np.abs(got - want) / np.ldexp(1.0, np.maximum(e - 1, smallest) - (bits - 1))


class FeatureProblem(Problem):
    """A problem of target features: `hidden` is [T, features]. `context(run)` reads what stands between norm and projection: with the identity
    as V's weights, V is the context."""

    def __init__(self, rng, features, hidden, io="fp32", **shape):
        super().__init__(rng, io=io, hidden=hidden, **shape)
        rounded = lambda x: x.astype(np.float32).astype(DTYPES[io])
        self.hidden = rounded(rng.standard_normal((self.hidden.shape[0], features)))
        self.kwargs |= {
            "fc_weight": rounded(rng.standard_normal((hidden, features)) / np.sqrt(features)),
            "hidden_norm_weight": rounded(1 + 0.3 * rng.standard_normal(hidden)),
            "hidden_norm_eps": 1e-5,
        }

    def context(self, run):
        p = self.__class__.__new__(self.__class__)
        p.__dict__.update(self.__dict__)
        hidden, width = self.weight.shape[2], self.N * self.D
        out = np.zeros((self.hidden.shape[0], hidden), self.hidden.dtype)
        for begin in range(0, hidden, width):
            p.weight = self.weight.copy()
            p.weight[:, width:] = np.eye(width, hidden, begin, dtype=np.float32)
            v = run(p)[1]
            out[:, begin : begin + width] = v[0][p.loc.reshape(-1)].reshape(len(out), -1)[:, : hidden - begin]
        return out

    def exact_context(self):
        fc, w = (self.kwargs[name].astype(np.float64) for name in ("fc_weight", "hidden_norm_weight"))
        x = oracle.ROUND[self.io](self.hidden.astype(np.float64) @ fc.T)
        return oracle.ROUND[self.io](x / np.sqrt((x * x).mean(-1, keepdims=True) + self.kwargs["hidden_norm_eps"]) * w)

    def projection_of(self, context):
        """The problem behind the context."""
        p = Problem.__new__(Problem)
        p.__dict__.update(self.__dict__)
        p.hidden = context
        p.kwargs = {k: v for k, v in self.kwargs.items() if k not in ("fc_weight", "hidden_norm_weight", "hidden_norm_eps")}
        return p
