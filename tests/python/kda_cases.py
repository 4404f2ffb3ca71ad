"""Cases for the KDA tests: a float64 case of the oracle as arrays for the library, and back."""

import kda as oracle
import ml_dtypes
import numpy as np

import specstate.kda as kda

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def act(p, dtype):
    """The oracle's case in the library's dtypes; `dtype` is the activation dtype. Values are kept exactly."""
    one = {k: v.astype(dtype) for k, v in p.items() if k.startswith(("x_", "cs_")) or k in ("g", "beta")}
    one |= {k: p[k].astype(F32) for k in ("w_q", "w_k", "w_v", "A_log", "dt_bias", "state")}
    if p["g"].shape[-1] == 1:  # GDN
        one["g"], one["dt_bias"] = one["g"][..., 0].copy(), one["dt_bias"][..., 0].copy()
    one["slots"], one["rows"] = p["slots"].astype(np.int32), p["rows"].astype(np.int32)
    one["cu_seqlens"] = p["cu"].astype(np.int32)
    one["lower_bound"], one["scale"] = p["lower_bound"], p["scale"]
    if p["onorm"] is not None:
        gate, weight, eps = p["onorm"]
        one |= dict(onorm_gate=gate.astype(dtype), onorm_weight=weight.astype(F32), onorm_eps=eps)
    return one


def exact(p):
    """The same case with every float rounded to what the library sees, as float64."""
    f = lambda x: np.asarray(x).astype(F32).astype(np.float64)  # noqa: E731
    q = {k: (f(v) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v) for k, v in p.items()}
    if p["onorm"] is not None:
        q["onorm"] = (f(p["onorm"][0]), f(p["onorm"][1]), p["onorm"][2])
    return q


def case(seed, **kw):
    """An oracle case with head dims that the library takes."""
    kw.setdefault("K", 64)
    kw.setdefault("V", 64)
    return exact(oracle.case(seed, **kw))


def poison(shape, dtype):
    return np.full(shape, np.nan, dtype)


def buffers(a, L=None, steps=None, state_dtype=F32):
    """(rings, snapshots, conv windows) for the call `a`, all poisoned."""
    n, pool = len(a["slots"]), a["state"].shape[0]
    (h, k), (hv, v) = a["x_q"].shape[-2:], a["x_v"].shape[-2:]
    dtype = a["x_q"].dtype
    longest = int(np.diff(a["cu_seqlens"]).max()) if n else 1
    L, steps = L or longest, steps or longest
    g = (pool, hv, L, k) if a["g"].ndim == a["x_q"].ndim else (pool, hv, L)
    rings = kda.Rings(poison((pool, hv, L, v), dtype), poison((pool, h, L, k), dtype), poison(g, F32), poison((pool, hv, L), F32))
    snapshots = poison((n, steps, hv, v, k), state_dtype)
    conv = {f"conv_{x}": poison((n, steps, c, 3), dtype) for x, c in (("q", h * k), ("k", h * k), ("v", hv * v))}
    return rings, snapshots, conv


def oracle_rings(rings):
    """The library's rings as the oracle wants them."""
    out = {name: np.asarray(x).astype(np.float64) for name, x in zip(("rawv", "rawk", "g", "beta"), rings)}
    if out["g"].ndim == 3:
        out["g"] = out["g"][..., None]
    return out


def call(a, **kw):
    """kda.verify of the call `a` (only what verify takes)."""
    args = dict(a)
    args |= kw
    return kda.verify(**args)


def same(a, b):
    """Bit for bit, NaN included."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def ulps(a, b):
    """Distance of two arrays of one dtype in units of the last place."""

    def ordered(x):
        kind = np.int16 if x.dtype == BF16 else np.int32
        i = x.view(kind).astype(np.int64)
        return np.where(i < 0, -(i & np.iinfo(kind).max), i)

    return np.abs(ordered(np.ascontiguousarray(a)) - ordered(np.ascontiguousarray(b)))


def used_channels(a):
    """q, k, v as the recurrence of the call `a` used them (after convolution, SiLU and rounding), [T, heads, D] float64.

    They are what a ring records: k and v directly, q by recording a call in which it plays the part of k."""
    lens, slots = np.diff(a["cu_seqlens"]), a["slots"]

    def recorded(call_, ring):
        rings = buffers(call_, L=int(lens.max()))[0]
        call(call_, rings=rings)
        per_request = [np.asarray(getattr(rings, ring)[s, :, :n], np.float64).swapaxes(0, 1) for s, n in zip(slots, lens)]
        return np.concatenate([x if s >= 0 else np.zeros_like(x) for x, s in zip(per_request, slots)])

    swapped = dict(a, x_k=a["x_q"], w_k=a["w_q"], cs_k=a["cs_q"])
    return recorded(swapped, "rawk"), recorded(a, "rawk"), recorded(a, "rawv")


def fed_oracle(p, q, k, v, quant, parents=None):
    """(out, snapshots) of the oracle's recurrence and norm for given q, k, v: no convolution, so no rounding edges of it."""
    hv, vd = v.shape[1:]
    group, kd = hv // k.shape[1], k.shape[2]
    rnd = oracle.bf16 if quant else np.asarray
    ld, beta = oracle.log_decay(p["g"], p["A_log"], p["dt_bias"], p["lower_bound"]), oracle.sigmoid(p["beta"])
    qn, kn = oracle.l2norm(q) * (p["scale"] or kd**-0.5), oracle.l2norm(k)
    out, snapshots = np.zeros(v.shape), np.full((len(p["slots"]), int(np.diff(p["cu"]).max()), hv, vd, kd), np.nan)
    for n, slot in enumerate(p["slots"]):
        for i in range(p["cu"][n + 1] - p["cu"][n]) if slot >= 0 else ():
            t, before = p["cu"][n] + i, i - 1 if parents is None else parents[n][i]
            s = p["state"][slot] if before < 0 else snapshots[p["rows"][n], before]
            for h in range(hv):
                snapshots[p["rows"][n], i, h], o, _ = oracle.kda_step(s[h], qn[t, h // group], kn[t, h // group], v[t, h], ld[t, h], beta[t, h])
                if p["onorm"] is not None:
                    gate, weight, eps = p["onorm"]
                    o = oracle.gated_rmsnorm(o, gate[t, h], weight, eps)
                out[t, h] = rnd(o)
    return out, snapshots


PER_TOKEN = ("x_q", "x_k", "x_v", "g", "beta", "onorm_gate")


def subset(a, requests, take=None):
    """The call `a` for some of its requests, in that order; `take` limits each one's tokens."""
    cu = a["cu_seqlens"]
    spans = [np.arange(cu[r], cu[r + 1])[:take] for r in requests]
    pick = np.concatenate([np.zeros(0, int), *spans])
    b = dict(a, **{k: a[k][pick] for k in PER_TOKEN if k in a})
    b["slots"], b["rows"] = a["slots"][requests], np.arange(len(requests), dtype=np.int32)
    b["cu_seqlens"] = np.concatenate([[0], np.cumsum([len(s) for s in spans])]).astype(np.int32)
    return b, pick


def decode_steps(a, count):
    """`count` single tokens of each request through kda.decode, on copies of the pools. Returns (outs [count][N, HV, V], pools after
    each step)."""
    pools = {k: a[k].copy() for k in ("state", "cs_q", "cs_k", "cs_v") if k in a}
    outs, after = [], []
    for i in range(count):
        at = a["cu_seqlens"][:-1] + i
        one = {k: v for k, v in a.items() if k not in ("rows", "cu_seqlens")}
        one |= {k: a[k][at] for k in PER_TOKEN if k in a}
        outs.append(kda.decode(**dict(one, **pools)))
        after.append({k: v.copy() for k, v in pools.items()})
    return outs, after


def strided(x, pitch=None, offset=0):
    """x with a first-dimension stride of `pitch` elements, in a poisoned buffer of its own; returns (view, buffer)."""
    inner = int(np.prod(x.shape[1:]))
    pitch = pitch or inner + 8
    buffer = np.full(offset + pitch * x.shape[0], np.nan if x.dtype.kind in "fV" else -7, x.dtype)
    steps = [pitch] + [int(np.prod(x.shape[d + 1 :])) for d in range(1, x.ndim)]
    view = np.lib.stride_tricks.as_strided(buffer[offset:], x.shape, [s * x.itemsize for s in steps])
    view[...] = x
    return view, buffer
