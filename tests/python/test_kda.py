"""KDA against the float64 oracle, and its bitwise invariants."""

import os
import pathlib
import subprocess
import sys

import kda as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import (
    BF16,
    F32,
    PER_TOKEN,
    act,
    buffers,
    call,
    case,
    decode_steps,
    fed_oracle,
    oracle_rings,
    poison,
    same,
    strided,
    subset,
    ulps,
    used_channels,
)

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


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [dict(), dict(lower=None), dict(H=1, HV=3), dict(scalar_gate=True), dict(onorm=False), dict(K=128, V=64, width=6)], ids=str)
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_verify_of_many_tokens_equals_single_decodes(shape, dtype, state_dtype):
    a = act(case(3, **shape), dtype)
    a["state"] = a["state"].astype(state_dtype)
    _, snapshots, conv = buffers(a, state_dtype=state_dtype)
    out = call(a, snapshots=snapshots, **conv)
    width = int(np.diff(a["cu_seqlens"])[0])
    outs, after = decode_steps(a, width)
    for i in range(width):
        assert same(outs[i], out[a["cu_seqlens"][:-1] + i])
        for n, slot in enumerate(a["slots"]):
            row = a["rows"][n]
            assert same(after[i]["state"][slot], snapshots[row, i])
            for x in "qkv":
                assert same(after[i][f"cs_{x}"][slot], conv[f"conv_{x}"][row, i])
    # the same tokens as one prefill in place
    pools = {k: a[k].copy() for k in ("state", "cs_q", "cs_k", "cs_v")}
    in_place = {k: v for k, v in a.items() if k != "rows"} | pools
    assert same(kda.decode(**in_place), out)
    assert all(same(pools[k], after[-1][k]) for k in pools)


@pytest.mark.parametrize("mode", ["rings", "snapshots", "deferred"])
@pytest.mark.parametrize("dtype,state_dtype", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
def test_rollout_of_random_acceptance_equals_plain_decode(mode, dtype, state_dtype):
    rng = np.random.default_rng(4)
    n, total, widest = 3, 60, 6
    base = case(4, N=n, width=total + widest, H=1, HV=2)
    a = act(base, dtype)
    a["state"] = a["state"].astype(state_dtype)
    stream = {k: a[k].reshape(n, total + widest, *a[k].shape[1:]) for k in PER_TOKEN}
    want, after = decode_steps(a, total)
    pools = {k: a[k].copy() for k in ("state", "cs_q", "cs_k", "cs_v")}
    position = np.zeros(n, int)
    held, pending = buffers(a, L=widest)[0], np.zeros(len(a["state"]), np.int32)  # of a deferred fold
    while (position < total).any():
        lens = np.minimum(rng.integers(1, widest + 1, n), np.maximum(total - position, 1))
        lens[position >= total] = 0  # a finished request is an empty row
        accept = np.where(lens > 0, [rng.integers(1, m + 1) if m else 0 for m in lens], 0)
        cu = np.concatenate([[0], np.cumsum(lens)])
        now = {}
        for k in PER_TOKEN:
            parts = []
            for r in range(n):
                x = stream[k][r, position[r] : position[r] + lens[r]].copy()
                x[accept[r] :] = rng.standard_normal(x[accept[r] :].shape).astype(dtype)  # rejected drafts
                parts.append(x)
            now[k] = np.concatenate(parts)
        b = dict(a, **now, **pools, cu_seqlens=cu.astype(np.int32))
        rings, snapshots, conv = buffers(b, L=widest, steps=widest, state_dtype=state_dtype)
        out = call(b, **{"rings": dict(rings=rings), "snapshots": dict(snapshots=snapshots), "deferred": dict(rings=held, pending=pending)}[mode], **conv)
        if mode == "rings":
            kda.fold(pools["state"], rings, a["slots"], accept)
        elif mode == "deferred":
            kda.defer_fold(pending, a["slots"], accept)
            if rng.integers(4) == 0:  # a flush now and then
                kda.fold(pools["state"], held, a["slots"][:2], pending=pending)
        else:
            for r in range(n):
                if accept[r]:
                    pools["state"][a["slots"][r]] = snapshots[a["rows"][r], accept[r] - 1]
        kda.rollback_conv_windows([pools["cs_q"], pools["cs_k"], pools["cs_v"]], [conv["conv_q"], conv["conv_k"], conv["conv_v"]],
                                  a["slots"], accept - 1, rows=a["rows"])  # fmt: skip
        for r in range(n):
            for i in range(accept[r]):
                assert same(out[cu[r] + i], want[position[r] + i][r])
            position[r] += accept[r]
            if accept[r]:
                for k, pool in pools.items():
                    if k != "state" or pending[a["slots"][r]] == 0:
                        assert same(pool[a["slots"][r]], after[position[r] - 1][k][a["slots"][r]]), k
    if mode == "deferred":
        kda.fold(pools["state"], held, a["slots"], pending=pending)
        assert (pending == 0).all() and all(same(pools["state"][s], after[position[r] - 1]["state"][s]) for r, s in enumerate(a["slots"]))


def test_a_row_depends_neither_on_its_place_nor_on_the_others():
    a = act(case(5, N=5, lens=[3, 17, 1, 0, 6], pad=(2,)), BF16)
    rings, snapshots, conv = buffers(a)
    out = call(a, rings=rings, snapshots=snapshots, **conv)
    for order in ([4, 2, 0, 3, 1], [1], [0], [4, 0], [3, 2]):
        b, pick = subset(a, order)
        rings2, snapshots2, conv2 = buffers(b, L=rings.rawv.shape[2], steps=snapshots.shape[1])
        assert same(call(b, rings=rings2, snapshots=snapshots2, **conv2), out[pick])
        for i, r in enumerate(order):
            if a["slots"][r] < 0:
                continue
            assert same(snapshots2[i], snapshots[a["rows"][r]])
            assert all(same(conv2[k][i], conv[k][a["rows"][r]]) for k in conv)
            assert all(same(x[a["slots"][r]], y[a["slots"][r]]) for x, y in zip(rings2, rings))


def test_later_tokens_change_nothing_before_them():
    a = act(case(6, width=20), F32)
    rings, _, _ = buffers(a)
    out = call(a, rings=rings)
    for cut in (1, 7, 16, 19):
        b = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in a.items()}
        late = np.concatenate([np.arange(s + cut, e) for s, e in zip(a["cu_seqlens"], a["cu_seqlens"][1:])])
        for k in PER_TOKEN:
            b[k][late] = np.nan if k != "g" else 3
        rings2, _, _ = buffers(b)
        out2 = call(b, rings=rings2)
        early = np.setdiff1d(np.arange(len(out)), late)
        assert same(out[early], out2[early]) and not same(out[late], out2[late])
        s1, s2 = a["state"].copy(), a["state"].copy()
        kda.fold(s1, rings, a["slots"], np.full(3, cut))
        kda.fold(s2, rings2, a["slots"], np.full(3, cut))
        assert same(s1, s2)


def test_verify_writes_no_input_and_touches_only_its_own_entries():
    a = act(case(7, N=4, lens=[2, 0, 5, 3], pad=(3,)), F32)
    for v in a.values():
        if isinstance(v, np.ndarray):
            v.flags.writeable = False  # inputs may be read-only
    before = {k: v.copy() for k, v in a.items() if isinstance(v, np.ndarray)}
    rings, snapshots, conv = buffers(a, L=8, steps=7)
    out = np.full_like(a["x_v"], np.nan)
    assert call(a, rings=rings, snapshots=snapshots, out=out, **conv) is out
    assert all(same(a[k], before[k]) for k in before)
    assert np.isfinite(out).all() and (out[7:] == 0).all() and (out[:7] != 0).any()
    lens = np.diff(a["cu_seqlens"])
    for x in rings:
        live = np.zeros(x.shape[0], bool)
        for r in range(3):
            live[a["slots"][r]] = True
            entry = np.moveaxis(x[a["slots"][r]], 1, 0)
            assert np.isfinite(entry[: lens[r]]).all() and np.isnan(entry[lens[r] :]).all()
        assert np.isnan(x[~live]).all()
    for x in (snapshots, *conv.values()):
        for r in range(4):
            n = lens[r] if a["slots"][r] >= 0 else 0
            assert np.isfinite(x[a["rows"][r], :n]).all() and np.isnan(x[a["rows"][r], n:]).all()


def test_tokens_of_no_request_and_empty_calls_give_zeros():
    a = act(case(8), F32)
    short = dict(a, slots=a["slots"][:1], rows=a["rows"][:1], cu_seqlens=np.array([0, 2], np.int64))
    out = call(short, out=np.full_like(a["x_v"], np.nan))
    assert (out[2:] == 0).all() and (out[:2] != 0).any()
    none = dict(a, slots=a["slots"][:0], rows=a["rows"][:0], cu_seqlens=np.zeros(1, np.int32))
    assert (call(none, out=np.full_like(a["x_v"], np.nan)) == 0).all()


@pytest.mark.parametrize("index", [np.int32, np.int64], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_strided_pools_and_views_equal_dense_ones(dtype, index):
    """One fused projection, one envelope a slot for state and windows, tap-major windows, indices that are columns of tables."""
    p = case(9, N=3, width=5, K=128, V=128)
    a = act(p, dtype)
    rings, snapshots, conv = buffers(a, L=6)
    out = call(a, rings=rings, snapshots=snapshots, **conv)

    b, (t, h, d) = dict(a), a["x_q"].shape
    fused = np.full((1, t, 3 * h * d + 24), np.nan, dtype)
    for i, x in enumerate("qkv"):
        view = fused[0, :, i * h * d : (i + 1) * h * d].reshape(t, h, d)
        assert np.shares_memory(view, fused)
        view[...] = a[f"x_{x}"]
        b[f"x_{x}"] = view
    b["beta"] = np.concatenate([a["beta"], a["beta"]], 1)[:, :h]
    pool, hd = a["state"].shape[0], h * d
    envelope_bytes = h * d * d * 4 + 3 * 3 * hd * dtype.itemsize + 16
    envelope = np.full((pool, envelope_bytes), 255, np.uint8)  # 255 is NaN in either dtype
    state = np.lib.stride_tricks.as_strided(envelope.view(F32)[:, : h * d * d], (pool, h, d, d), (envelope_bytes, d * d * 4, d * 4, 4))
    state[...] = a["state"]
    windows = envelope[:, h * d * d * 4 : h * d * d * 4 + 9 * hd * dtype.itemsize]
    windows = np.lib.stride_tricks.as_strided(windows.view(dtype), (pool, 3, 3 * hd), (envelope_bytes, 3 * hd * dtype.itemsize, dtype.itemsize))
    for i, x in enumerate("qkv"):
        b[f"cs_{x}"] = windows[:, :, i * hd : (i + 1) * hd].swapaxes(1, 2)
        b[f"cs_{x}"][...] = a[f"cs_{x}"]
    b["state"] = state
    table = np.full((len(a["slots"]), 5), 99, index)
    table[:, 0], table[:, 3] = a["slots"], a["rows"]
    b["slots"], b["rows"] = table[:, 0], table[:, 3]
    b["cu_seqlens"] = np.repeat(a["cu_seqlens"], 2).astype(index)[::2]
    scratch = np.full((3, 5, 3, 3 * hd), np.nan, dtype)
    conv2 = {f"conv_{x}": scratch[..., i * hd : (i + 1) * hd].swapaxes(2, 3) for i, x in enumerate("qkv")}
    ring_memory = [strided(x, pitch=int(np.prod(x.shape[1:])) + 40) for x in rings]
    for view, buffer in ring_memory:
        buffer[...] = np.nan
    rings2 = kda.Rings(*(view for view, _ in ring_memory))
    snapshots2, _ = strided(np.full_like(snapshots, np.nan), pitch=snapshots[0].size + 4)
    out2 = call(b, rings=rings2, snapshots=snapshots2, **conv2)
    assert same(out2, out)
    assert same(np.ascontiguousarray(snapshots2), snapshots)
    assert all(same(np.ascontiguousarray(conv2[k]), conv[k]) for k in conv)
    assert all(same(np.ascontiguousarray(x), y) for x, y in zip(rings2, rings))
    assert np.isnan(fused[..., 3 * h * d :].astype(F32)).all()

    accept = np.array([1, 5, 3], index)
    dense = a["state"].copy()
    kda.fold(dense, rings, a["slots"], accept)
    kda.fold(state, rings2, b["slots"], np.repeat(accept, 3)[::3])
    assert same(np.ascontiguousarray(state), dense)
    pools, pools2 = [a[f"cs_{x}"].copy() for x in "qkv"], [b[f"cs_{x}"] for x in "qkv"]
    kda.rollback_conv_windows(pools, list(conv.values()), a["slots"], accept - 1, rows=a["rows"])
    kda.rollback_conv_windows(pools2, list(conv2.values()), b["slots"], accept - 1, rows=b["rows"])
    assert all(same(np.ascontiguousarray(x), y) for x, y in zip(pools2, pools))
    assert (envelope[:, -16:] == 255).all()  # nothing beside the views was written


def test_windows_that_hold_each_input_once():
    """Step stride = tap stride: entry (step, tap) is input step - 2 + tap, so one line of inputs serves all."""
    a = act(case(10, width=6), BF16)
    _, _, conv = buffers(a)
    out = call(a, **conv)
    lines = {}
    for k, x in conv.items():
        line = np.full((x.shape[0], x.shape[1] + 2, x.shape[2]), np.nan, BF16)
        lines[k] = np.lib.stride_tricks.as_strided(line, x.shape, (line.strides[0], line.strides[1], 2, line.strides[1]))
    assert same(call(a, **lines), out)
    assert all(same(np.ascontiguousarray(lines[k]), conv[k]) for k in conv)


@pytest.mark.parametrize("offset", [0, 4, 8, 1])
def test_snapshots_beyond_the_caches_at_any_alignment(offset):
    a = act(case(10, N=3, H=6, width=5, K=128, V=128), BF16)
    rings, want, _ = buffers(a)
    assert want.nbytes > 4 << 20  # streamed where they lie on 16 bytes
    memory = poison((want.size + 32,), F32)
    start = -memory.ctypes.data // 4 % 16 + offset
    snapshots = memory[start : start + want.size].reshape(want.shape)
    call(a, rings=rings, snapshots=snapshots)
    assert np.isnan(memory[:start]).all() and np.isnan(memory[start + want.size :]).all()
    for n in range(1, 6):
        state = a["state"].copy()
        kda.fold(state, rings, a["slots"], np.full(3, n))
        assert all(same(state[s], np.ascontiguousarray(snapshots[r, n - 1])) for s, r in zip(a["slots"], a["rows"]))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tree_paths_equal_chains(dtype):
    parents = [[-1, 0, 0, 1, 1, 2, -1], [-1, 0, 1, 2, 3], [-1, -1, -1, 2]]
    p = case(11, N=3, lens=[7, 5, 4])
    a = act(p, dtype)
    table = np.full((3, 8), 7, np.int32)  # what is beyond a request's tokens is not read
    for r, row in enumerate(parents):
        table[r, : len(row)] = row
    table[:, 0] = [0, 5, -1]  # the first token has no parent, whatever is written
    rings, snapshots, conv = buffers(a)
    out = call(a, rings=rings, snapshots=snapshots, parents=table, **conv)
    for r, row in enumerate(parents):
        for leaf in range(len(row)):
            path = [leaf]
            while path[0] > 0 and row[path[0]] >= 0:
                path.insert(0, row[path[0]])
            pick = a["cu_seqlens"][r] + np.array(path)
            b, _ = subset(a, [r])
            b |= {k: a[k][pick] for k in PER_TOKEN}
            b["cu_seqlens"] = np.array([0, len(path)])
            _, snapshots2, conv2 = buffers(b)
            assert same(call(b, snapshots=snapshots2, **conv2), out[pick])
            assert same(snapshots2[0, -1], snapshots[a["rows"][r], leaf])
            assert all(same(conv2[k][0, -1], conv[k][a["rows"][r], leaf]) for k in conv)
    want_snap, want_conv, _ = oracle.bufs(p)
    want = oracle.verify(p, ssm_snap=want_snap, conv_snap=want_conv, parents=parents, quant=dtype == BF16)
    if dtype == F32:
        assert np.abs(out - want).max() <= 3e-6 * np.abs(want).max()
        close(snapshots, want_snap, 3e-6)
    else:
        close(snapshots, want_snap, 2e-3)
    for x in "qkv":
        assert np.array_equal(conv[f"conv_{x}"].astype(float), want_conv[x], equal_nan=True)


def test_grouped_heads_equal_repeated_ones_and_a_scalar_gate_equals_a_broadcast_one():
    a = act(case(12, H=2, HV=6, lower=None), BF16)
    _, snapshots, _ = buffers(a)
    out = call(a, snapshots=snapshots)
    b = dict(a)
    for x in "qk":
        heads = a[f"x_{x}"].shape[1]
        b[f"x_{x}"] = np.repeat(a[f"x_{x}"], 3, 1)
        for name in (f"w_{x}", f"cs_{x}"):
            axis = a[name].ndim - 2
            split = a[name].reshape(*a[name].shape[:axis], heads, -1, a[name].shape[-1])
            b[name] = np.repeat(split, 3, axis).reshape(*a[name].shape[:axis], -1, a[name].shape[-1])
    _, snapshots2, _ = buffers(b)
    assert same(call(b, snapshots=snapshots2), out) and same(snapshots, snapshots2)

    for lower in (-5.0, None):
        a = act(case(13, scalar_gate=True, lower=lower), F32)
        rings, snapshots, _ = buffers(a)
        out = call(a, rings=rings, snapshots=snapshots)
        b = dict(a, g=np.repeat(a["g"][..., None], 64, 2), dt_bias=np.repeat(a["dt_bias"], 64))
        rings2, snapshots2, _ = buffers(b)
        assert same(call(b, rings=rings2, snapshots=snapshots2), out) and same(snapshots, snapshots2)
        assert same(np.ascontiguousarray(rings2.g[..., 5]), rings.g)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("index", [np.int32, np.int64], ids=str)
def test_all_layers_equal_a_loop_and_track_snapshots(state_dtype, index):
    calls = [act(case(20 + i, N=4, width=5, pool_extra=6, H=1, HV=2), F32) for i in range(3)]
    slots = calls[0]["slots"]
    layers = []
    for a in calls:
        a["slots"] = slots
        a["state"] = a["state"].astype(state_dtype)
        rings, _, _ = buffers(a, L=7)
        call(a, rings=rings)
        layers.append(rings)
    rings = kda.Rings(*(np.stack(x) for x in zip(*layers)))
    state = np.stack([a["state"] for a in calls])
    free = np.setdiff1d(np.arange(state.shape[1]), slots)
    accept = np.array([5, 3, 0, 2], index)
    track, step = np.array([free[0], -1, free[1], free[2]], index), np.array([2, 0, 0, 4], index)  # the last is not accepted
    loop = state.copy()
    for i in range(3):
        kda.fold(loop[i], layers[i], slots, accept, track=track, track_step=step)
    together = state.copy()
    assert kda.fold(together, rings, slots, accept, track=track, track_step=step) is together
    assert same(together, loop)
    for i in range(3):
        ref = state[i].copy()
        kda.fold(ref, layers[i], slots[:1], np.array([3], index))
        assert same(together[i, free[0]], ref[slots[0]])
        full = state[i].copy()
        kda.fold(full, layers[i], slots, accept)
        assert all(same(together[i, s], full[s]) for s in slots)
        assert all(same(together[i, f], state[i, f]) for f in free[1:])


@pytest.mark.parametrize("shape", [dict(), dict(lower=None), dict(H=1, HV=3), dict(scalar_gate=True, H=2, HV=4), dict(K=128, V=128, width=9), dict(K=128, V=64), dict(K=64, V=128)], ids=str)
@pytest.mark.parametrize("dtype,state_dtype", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
def test_deferred_fold_is_a_fold_before_the_verify(shape, dtype, state_dtype):
    a = act(case(31, **dict(dict(N=5, width=6, lens=None, pad=(2,)), **shape)), dtype)
    a["state"] = a["state"].astype(state_dtype)
    longest = int(np.diff(a["cu_seqlens"]).max())
    rings = buffers(a, L=longest + 2)[0]
    call(a, rings=rings)
    slots = a["slots"]
    accept = np.array([longest, 1, 3, 0, 2])
    pending = np.full(len(a["state"]) + 3, 7, np.int32)  # of slots that no request names: not looked at
    pending[slots[slots >= 0]] = 0
    assert kda.defer_fold(pending, slots, accept) is pending
    counted = pending.copy()
    b = act(case(32, **dict(dict(N=5, width=6, pad=(2,)), **shape)), dtype)
    b |= {k: a[k] for k in ("slots", "rows", "A_log", "dt_bias", *(k for k in a if k.startswith(("w_", "cs_"))))}
    b["cu_seqlens"] = a["cu_seqlens"].copy()
    b["cu_seqlens"][2:] -= a["cu_seqlens"][2] - a["cu_seqlens"][1]  # request 1 has no tokens this time, and what waits for it goes on waiting
    now = {}
    for deferred in (False, True):
        mine, state = kda.Rings(*(x.copy() for x in rings)), a["state"].copy()
        _, _, conv = buffers(b, steps=longest)
        if deferred:
            out = call(dict(b, state=state), rings=mine, pending=pending, **conv)
        else:
            kda.fold(state, mine, slots, np.where(np.arange(5) == 1, 0, accept))
            out = call(dict(b, state=state), rings=mine, **conv)
        now[deferred] = dict(out=out, state=state, **mine._asdict(), **conv)
    for name, x in now[False].items():
        assert same(x, now[True][name]), name
    counted[slots[[0, 3, 4]]] = 0
    assert same(pending, counted)
    flushed, state = a["state"].copy(), a["state"].copy()
    kda.fold(flushed, rings, slots[1:2], pending=pending)
    kda.fold(state, rings, slots[1:2], accept[1:2])
    assert same(flushed, state) and pending[slots[1]] == 0


def test_flush_of_all_layers_and_tracks():
    calls = [act(case(40 + i, N=3, width=5, pool_extra=4, H=1, HV=2), F32) for i in range(2)]
    slots = calls[0]["slots"]
    layers = []
    for a in calls:
        a["slots"] = slots
        layers.append(buffers(a)[0])
        call(a, rings=layers[-1])
    rings, state = kda.Rings(*(np.stack(x) for x in zip(*layers))), np.stack([a["state"] for a in calls])
    free = np.setdiff1d(np.arange(state.shape[1]), slots)
    pending = np.zeros((2, state.shape[1]), np.int32)
    kda.defer_fold(pending, slots, np.array([4, 2, 5]))
    # the first layer has verified again: its tokens are in its state
    first = dict(calls[0], state=state[0])
    kda.fold(state[0], layers[0], slots[:1], pending=pending[0])
    assert pending[0, slots[0]] == 0 and pending[1, slots[0]] == 4
    assert same(first["state"], state[0])
    track, step = np.array([-1, free[0], free[1]]), np.array([0, 1, 2])
    want = state.copy()
    kda.fold(want[0], layers[0], slots[1:], np.array([2, 5]), track=track[1:], track_step=step[1:])
    kda.fold(want[1], layers[1], slots, np.array([4, 2, 5]), track=track, track_step=step)
    kda.fold(state, rings, slots, pending=pending, track=track, track_step=step)
    assert same(state, want) and (pending == 0).all()


def test_deferred_fold_errors():
    a = act(case(33, N=2, width=3), F32)
    rings, snapshots, _ = buffers(a, L=4)
    pool = len(a["state"])
    pending = np.zeros(pool, np.int32)
    s0, s1 = a["slots"]

    def refused(text, f):
        before = {k: v.copy() for k, v in dict(rings._asdict(), state=a["state"], pending=pending).items()}
        with pytest.raises(ValueError, match=text):
            f()
        assert all(same(v, dict(rings._asdict(), state=a["state"], pending=pending)[k]) for k, v in before.items())

    refused("verify: pending: expected rings with it, which hold the pending tokens, got none", lambda: call(a, snapshots=snapshots, pending=pending))
    refused("verify: pending: expected dtype int32, got int64", lambda: call(a, rings=rings, pending=pending.astype(np.int64)))
    refused("verify: pending: expected shape", lambda: call(a, rings=rings, pending=pending[:-1]))
    pending[s1] = 1
    refused(f"rings.beta: expected recorded values .* got nan in slot {s1}, entry 0", lambda: call(a, rings=rings, pending=pending))
    pending[s1] = 0
    call(a, rings=rings, pending=pending)
    for n in (-1, 5):
        pending[s0] = n
        refused(f"verify: pending: expected counts from 0 to L=4, got {n} for slot {s0}", lambda: call(a, rings=rings, pending=pending))
        refused(f"fold: pending: expected counts from 0 to L=4, got {n} for slot {s0}", lambda: kda.fold(a["state"], rings, a["slots"], pending=pending))
    pending[s0] = 2
    refused(f"defer_fold: pending: expected 0 for the slots of the call .* got 2 for slot {s0}", lambda: kda.defer_fold(pending, a["slots"], np.array([1, 1])))
    kda.defer_fold(pending, a["slots"], np.array([0, 1]))
    assert pending[s0] == 2 and pending[s1] == 1
    refused("fold: accept: expected none where pending says how many tokens, got both", lambda: kda.fold(a["state"], rings, a["slots"], np.array([1, 1]), pending=pending))
    refused("fold: accept: ", lambda: kda.fold(a["state"], rings, a["slots"]))
    refused("defer_fold: slots: expected each slot at most once", lambda: kda.defer_fold(pending * 0, np.array([1, 1]), np.array([1, 1])))
    refused(f"defer_fold: slots: expected slots below {pool}", lambda: kda.defer_fold(pending, np.array([pool]), np.array([1])))
    refused("verify: pending: expected memory of its own, got memory that overlaps state", lambda: call(a, rings=rings, pending=a["state"].reshape(-1).view(np.int32)[:pool]))
    read_only = a["state"].view()
    read_only.flags.writeable = False
    refused("state: expected a writable array", lambda: call(dict(a, state=read_only), rings=rings, pending=pending))


def test_null_slot_says_what_padding_is():
    a = act(case(14, N=3), F32)
    a["slots"] = np.array([0, 2, 1], np.int32)
    rings, _, _ = buffers(a)
    out = call(a, rings=rings)
    rings0, _, _ = buffers(a)
    out0 = call(a, rings=rings0, null_slot=0)
    assert (out0[:4] == 0).all() and same(out0[4:], out[4:]) and np.isnan(rings0.rawv[0]).all()
    state, accept = a["state"].copy(), np.full(3, 2)
    kda.fold(state, rings, a["slots"], accept, null_slot=0)
    assert same(state[0], a["state"][0]) and not same(state[1], a["state"][1])
    kda.fold(state, rings, a["slots"][:1], accept[:1])
    assert not same(state[0], a["state"][0])


def test_gate_is_monotone_and_finite_and_zero_inputs_only_decay():
    x = np.array([-1e4, -100, -1, 0, 1, 100, 1e4], F32)
    for lower in (-5.0, None):
        a = act(case(15, N=1, width=len(x), lower=lower, onorm=False), F32)
        for k in ("x_q", "x_k", "x_v", "cs_q", "cs_k", "cs_v"):
            a[k] = np.zeros_like(a[k])
        a["A_log"], a["dt_bias"] = np.zeros_like(a["A_log"]), np.zeros_like(a["dt_bias"])
        a["g"] = np.broadcast_to(x[:, None, None], a["g"].shape).copy()
        rings, snapshots, _ = buffers(a)
        out = call(a, rings=rings, snapshots=snapshots)
        assert (out == 0).all()
        ld = rings.g[a["slots"][0], 0, :, 0]
        assert np.isfinite(ld).all() and (ld <= 0).all() and (np.diff(ld) <= 0).all()
        if lower:
            assert ld[3] == lower / 2
        one = a["state"][a["slots"][0]]
        for i in range(len(x)):
            one = one * np.exp(ld[i].astype(np.float64)).astype(F32)
            np.testing.assert_allclose(snapshots[0, i], one, rtol=1e-6, atol=1e-37)


def test_a_state_without_writes_never_grows():
    a = act(case(16, N=1, width=64), F32)
    a["x_v"], a["cs_v"] = np.zeros_like(a["x_v"]), np.zeros_like(a["cs_v"])
    _, snapshots, _ = buffers(a)
    call(a, snapshots=snapshots)
    norms = [np.linalg.norm(a["state"][a["slots"][0], 0])] + [np.linalg.norm(s[0]) for s in snapshots[0]]
    assert all(b <= x * (1 + 1e-6) for x, b in zip(norms, norms[1:]))


def test_rounding_of_the_output_before_its_norm_is_a_switch():
    p = case(17)
    a = act(p, BF16)
    out = call(a, round_before_norm=True)
    fed = used_channels(a)
    gate, weight, eps = p["onorm"]
    bare, _ = fed_oracle(dict(p, onorm=None), *fed, quant=True)
    want = oracle.bf16(oracle.gated_rmsnorm(bare, gate, weight, eps)).astype(BF16)
    off = ulps(out, want)
    assert off.max() <= 1 and (off > 0).mean() <= 1e-2  # an edge of the first rounding moves the second
    assert not same(out, call(a))
    b = act(p, F32)
    assert same(call(b, round_before_norm=True), call(b))  # float32: nothing to round


def test_scale_norm_and_leading_dimension():
    p = case(18, onorm=False)
    a = act(p, F32)
    out = call(a)
    lead = dict(a, **{k: a[k][None] for k in ("x_q", "x_k", "x_v", "g", "beta")})
    assert same(call(lead), out[None])
    assert same(call(dict(a, g=a["g"].reshape(len(out), -1), dt_bias=a["dt_bias"].reshape(-1))), out)
    assert np.abs(call(dict(a, scale=0.5)) - out * (0.5 * 8)).max() <= 1e-6 * np.abs(out).max() * 4
    raw = call(a, l2norm=False)
    q, k, v = used_channels(a)
    state = p["state"][p["slots"][0]]
    ld, beta = oracle.log_decay(p["g"], p["A_log"], p["dt_bias"], -5.0), oracle.sigmoid(p["beta"])
    for i in range(2):
        state = np.stack([oracle.kda_step(state[h], q[i, h], k[i, h], v[i, h], ld[i, h], beta[i, h])[0] for h in range(2)])
        want = np.einsum("hvk,hk->hv", state, q[i] * 64**-0.5)
        assert np.abs(raw[i] - want).max() <= 3e-6 * np.abs(want).max()


def test_rollback_of_conv_windows():
    rng = np.random.default_rng(0)
    pool, windows = rng.standard_normal((6, 10, 3)).astype(F32), rng.standard_normal((4, 5, 10, 3)).astype(F32)
    slots, step, rows = np.array([2, -1, 5, 0]), np.array([4, 1, -1, 0]), np.array([3, 0, 1, 2])
    want = pool.copy()
    oracle.conv_commit(want, windows, slots, step, rows)
    got = pool.copy()
    kda.rollback_conv_windows(got, windows, slots, step, rows=rows)
    assert same(got, want)
    oracle.conv_commit(want, windows, [1, -1, 3, 4], [0, 0, 4, -1], rows)
    got = pool.copy()
    kda.rollback_conv_windows(got, windows, slots, step, rows=rows, track_slots=np.array([1, -1, 3, 4]), track_steps=np.array([0, 0, 4, -1]))
    assert same(got, want)
    # several pools: a list of one dtype each, or one array with a leading dimension
    pools, all_windows = np.stack([pool, pool * 2]), np.stack([windows, windows * 2])
    kda.rollback_conv_windows(pools, all_windows, slots, step)
    one = [pool.astype(BF16), pool.copy()]
    kda.rollback_conv_windows(one, (windows.astype(BF16), windows), slots, step)
    assert same(one[1], pools[0]) and same(one[0], pools[0].astype(BF16)) and same(pools[1], pools[0] * 2)


def test_results_do_not_depend_on_the_thread_count():
    script = (
        "import sys, hashlib; sys.path[:0] = sys.argv[1:]\n"
        "from kda_cases import *\n"
        "h = hashlib.sha256()\n"
        "for dtype in (F32, BF16):\n"
        "    a = act(case(19, N=5, lens=[1, 9, 33, 0, 4], H=2, HV=4, K=128), dtype)\n"
        "    rings, snapshots, conv = buffers(a)\n"
        "    h.update(call(a, rings=rings, snapshots=snapshots, **conv).tobytes())\n"
        "    state = a['state'].copy()\n"
        "    kda.fold(state, rings, a['slots'], np.diff(a['cu_seqlens']))\n"
        "    for x in (*rings, snapshots, *conv.values(), state): h.update(x.tobytes())\n"
        "print(h.hexdigest())\n"
    )
    here = pathlib.Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[1] / "python"), str(here.parent / "oracles")]
    digests = set()
    for threads in ("1", "2", "5"):
        env = dict(os.environ, SPECSTATE_NUM_THREADS=threads)
        digests.add(subprocess.run([sys.executable, "-c", script, *paths], env=env, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1 and len(digests.pop()) == 65


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_calls_against_oracle(data):
    draw = data.draw
    heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3]))
    n = draw(st.integers(1, 5))
    lens = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 17]), min_size=n, max_size=n))
    if sum(lens) == 0:
        lens[0] = 1
    pad = tuple(i for i in range(n) if draw(st.integers(0, 4)) == 0)
    dtype = draw(st.sampled_from([F32, BF16]))
    p = case(draw(st.integers(0, 10**6)), N=n, lens=lens, pad=pad, H=heads, HV=heads * group, K=draw(st.sampled_from([64, 128])),
             V=draw(st.sampled_from([64, 128])), lower=draw(st.sampled_from([-5.0, -1.0, None])), onorm=draw(st.booleans()),
             scalar_gate=draw(st.booleans()))  # fmt: skip
    p["scale"] = draw(st.sampled_from([None, 0.25]))
    a = act(p, dtype)
    parents = None
    if draw(st.booleans()):
        parents = [[-1] + [draw(st.integers(-1, i - 1)) for i in range(1, m)] for m in lens]
        table = np.full((n, max(lens)), 9, np.int64)
        for r, row in enumerate(parents):
            table[r, : lens[r]] = row[: lens[r]]
    rings, snapshots, conv = buffers(a, L=draw(st.sampled_from([None, 3])))
    tree = {} if parents is None else {"parents": table}
    out = call(a, rings=rings, snapshots=snapshots, **conv, **tree)
    fed = used_channels(a) if parents is None else None
    want_snap, want_conv, _ = oracle.bufs(p)
    want = oracle.verify(p, ssm_snap=want_snap, conv_snap=want_conv, parents=parents, quant=dtype == BF16)
    for x in "qkv":
        assert np.array_equal(np.asarray(conv[f"conv_{x}"], np.float64), want_conv[x], equal_nan=True)
    if fed is not None:
        want, want_snap = fed_oracle(p, *fed, quant=dtype == BF16)
        limit = 3e-6
    else:
        limit = 2e-3 if dtype == BF16 else 3e-6
    close(snapshots, want_snap, limit)
    if dtype == F32:
        assert np.abs(out - want).max() <= 3e-6 * np.abs(want).max() + 1e-30
    else:
        off = ulps(out, want.astype(BF16))
        assert (off > (1 if fed is not None else 2)).mean() <= (1e-3 if fed is not None else 0.02)
    if parents is None:
        room = rings.rawv.shape[2]
        accept = np.array([draw(st.integers(0, min(m, room))) for m in lens])
        state = a["state"].copy()
        kda.fold(state, rings, a["slots"], accept)
        for r, s in enumerate(a["slots"]):
            if s >= 0:
                assert same(state[s], snapshots[a["rows"][r], accept[r] - 1] if accept[r] else a["state"][s])


def test_arrays_that_need_no_word_give_the_same():
    """The short way through the binding, for types that it takes as they are (torch, CuPy, tvm-ffi)."""
    import tvm_ffi
    from calls import CALLS, leaves, operation

    for name in ("decode", "verify"):
        plain, wrapped = CALLS[name](), CALLS[name]()
        as_ffi = lambda x: tvm_ffi.from_dlpack(x) if isinstance(x, np.ndarray) else x  # noqa: E731
        arguments = {k: type(v)(*map(as_ffi, v)) if isinstance(v, tuple) else as_ffi(v) for k, v in wrapped.items()}
        operation(name)(**plain)
        for _ in range(2 if name == "verify" else 1):
            operation(name)(**arguments)
        for (path, want), (_, got) in zip(leaves(plain), leaves(wrapped), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"{name} {path}")


def test_a_track_slot_is_nobodys_in_the_call():
    a = act(case(20, N=2, width=3, pool_extra=2, H=1), F32)
    rings, _, _ = buffers(a)
    call(a, rings=rings)
    state, (one, other) = a["state"].copy(), a["slots"]
    with pytest.raises(ValueError, match=rf"fold: track: expected slots that are no request's of the call, got {other} at 0"):
        kda.fold(state, rings, a["slots"], np.array([2, 0]), track=np.array([other, -1]), track_step=np.array([0, 0]))
    assert same(state, a["state"])
    free = np.setdiff1d(np.arange(len(state)), a["slots"])[0]
    kda.fold(state, rings, a["slots"], np.array([2, 0]), track=np.array([free, other]), track_step=np.array([0, 0]))  # the second takes none
    assert same(state[other], a["state"][other]) and not same(state[free], a["state"][free])


@pytest.mark.parametrize("gate", [dict(lower_bound=-5.0), dict(lower_bound=None)], ids=["safe", "softplus"])
def test_every_record_that_verify_wrote_can_be_folded(gate):
    """A token without key whose gates closed to nothing is recorded as zeros, but not as the zeros of untouched memory."""
    H, D, slot = 2, 64, np.zeros(1, np.int32)
    z = lambda *s: np.zeros(s, F32)  # noqa: E731
    state = np.random.default_rng(0).standard_normal((1, H, D, D)).astype(F32)
    rings = kda.Rings(z(1, H, 2, D), z(1, H, 2, D), z(1, H, 2, D), z(1, H, 2))
    with pytest.raises(ValueError, match="only zeros in slot 0, entry 0"):
        kda.fold(state.copy(), rings, slot, np.array([1]))
    token = dict(x_q=z(1, H, D), x_k=z(1, H, D), x_v=z(1, H, D) + 1, g=z(1, H, D) - 200, beta=z(1, H) - 200)
    kda.verify(**token, A_log=z(H), dt_bias=z(H, D), state=state, slots=slot, rings=rings, **gate)
    assert not rings.g.any() and not rings.beta.any() and not rings.rawk.any()
    folded = state.copy()
    kda.fold(folded, rings, slot, np.array([1]))
    assert same(folded, state)
