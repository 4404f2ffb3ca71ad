"""KDA against the float64 oracle, and its bitwise invariants."""

import kda as oracle
import numpy as np
import pytest
from kda_cases import BF16, F32, act, buffers, call, case, fed_oracle, oracle_rings, same, ulps, used_channels

import specstate.kda as kda


def close(mine, want, of_largest):
    """Untouched (NaN) in the same places, elsewhere within a share of the largest element."""
    assert np.array_equal(np.isnan(mine), np.isnan(want))
    live = ~np.isnan(want)
    if live.any():
        assert np.abs(mine[live] - want[live]).max() <= of_largest * np.abs(want[live]).max()


SHAPES = [
    dict(),
    dict(lower=None),
    dict(H=2, HV=4),
    dict(scalar_gate=True),
    dict(scalar_gate=True, lower=None, H=1, HV=3),
    dict(K=128, V=128, onorm=False),
    dict(K=128, V=64, width=8),
    dict(K=64, V=128, width=1),
    dict(lens=[1, 0, 35, 7, 16], N=5),
    dict(N=4, pad=(1, 3)),
]
ids = [",".join(f"{k}={v}" for k, v in s.items()) or "plain" for s in SHAPES]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_verify_against_oracle(shape, dtype):
    p = case(1, **shape)
    a = act(p, dtype)
    rings, snapshots, conv = buffers(a)
    out = call(a, rings=rings, **conv)
    out2 = call(a, snapshots=snapshots)
    assert same(out, out2)

    want_snap, want_conv, want_rings = oracle.bufs(p)
    oracle.verify(p, rings=want_rings, conv_snap=want_conv, quant=dtype == BF16)
    got = oracle_rings(rings)
    # (a) the convolution
    for x in "qkv":
        assert np.array_equal(np.asarray(conv[f"conv_{x}"], np.float64), want_conv[x], equal_nan=True)
    for name, pair in (("rawk", (rings.rawk, want_rings["rawk"])), ("rawv", (rings.rawv, want_rings["rawv"]))):
        mine, want = pair[0], pair[1].astype(dtype)
        assert np.array_equal(np.isnan(mine.astype(F32)), np.isnan(want.astype(F32))), name
        live = ~np.isnan(want.astype(F32))
        if dtype == BF16:
            off = ulps(mine[live], want[live])
            assert off.max(initial=0) <= 1 and (off > 0).mean() < 1e-3, name
        else:
            assert np.abs(mine[live] - want[live]).max() <= 2e-6 * np.abs(want[live]).max(), name
    for name in ("g", "beta"):
        assert np.array_equal(np.isnan(got[name]), np.isnan(want_rings[name])), name
        np.testing.assert_allclose(got[name], want_rings[name], rtol=2e-6, atol=0)
    # (b) the recurrence and the norm, the oracle fed with the q, k, v that were used
    want, want_snap = fed_oracle(p, *used_channels(a), quant=dtype == BF16)
    if dtype == BF16:
        off = ulps(out, want.astype(BF16))
        assert off.max(initial=0) <= 1 and (off > 0).mean() <= 1e-3
    else:
        assert np.abs(out - want).max() <= 3e-6 * np.abs(want).max()
    close(snapshots, want_snap, 3e-6)
    # end to end
    want_snap = oracle.bufs(p)[0]
    want = oracle.verify(p, ssm_snap=want_snap, quant=dtype == BF16)
    close(snapshots, want_snap, 2e-3 if dtype == BF16 else 3e-6)
    if dtype == BF16:
        assert (ulps(out, want.astype(BF16)) > 2).mean() <= 0.02
    else:
        assert np.abs(out - want).max() <= 3e-6 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_fold_equals_snapshot_bit_for_bit(shape, dtype):
    a = act(case(2, **shape), dtype)
    rings, snapshots, _ = buffers(a)
    call(a, rings=rings)
    call(a, snapshots=snapshots)
    lens = np.diff(a["cu_seqlens"])
    for n in sorted({0, 1, int(lens.max()) // 2, int(lens.max())}):
        state, accept = a["state"].copy(), np.minimum(n, lens)
        kda.fold(state, rings, a["slots"], accept)
        touched = np.zeros(len(state), bool)
        for i, s in enumerate(a["slots"]):
            if s >= 0:
                touched[s] = True
                assert same(state[s], snapshots[a["rows"][i], accept[i] - 1] if accept[i] > 0 else a["state"][s])
        assert same(state[~touched], a["state"][~touched])
