"""Faults that people met in recurrent state under speculation, by kind, as small inputs.

What only a GPU can show (streams, capture) is not here; where a graph fault has a CPU form, that form is tested. One-shot clears,
generations of slots and pinned snapshots (lifecycle) belong to an engine's bookkeeping, not to these functions.
"""

import mmap

import kda as oracle
import numpy as np
import pytest
from kda_cases import BF16, F32, PER_TOKEN, act, buffers, call, case, decode_steps, fed_oracle, same, strided, subset, used_channels

import specstate.kda as kda


def pools_of(a):
    return {k: a[k].copy() for k in ("state", "cs_q", "cs_k", "cs_v")}


def commit(pools, rings, conv, a, accept):
    """What an engine does after acceptance."""
    kda.fold(pools["state"], rings, a["slots"], accept)
    kda.rollback_conv_windows([pools["cs_q"], pools["cs_k"], pools["cs_v"]], [conv["conv_q"], conv["conv_k"], conv["conv_v"]],
                              a["slots"], np.asarray(accept) - 1, rows=a["rows"])  # fmt: skip


def rounds(a, plan, pools=None, L=8):
    """Runs verify + commit for a plan of (tokens, accepted) for one request over a's stream; returns (pools, tokens consumed)."""
    pools = pools or pools_of(a)
    at = 0
    for tokens, accept in plan:
        b, _ = subset(a, [0])
        b |= {k: a[k][at : at + tokens] for k in PER_TOKEN if k in a}
        b |= pools | dict(cu_seqlens=np.array([0, tokens], np.int32))
        rings, _, conv = buffers(b, L=L, steps=L)
        call(b, rings=rings, **conv)
        commit(pools, rings, conv, b, np.array([accept]))
        at += accept
    return pools, at


def one(seed, width, dtype=F32, **kw):
    kw.setdefault("H", 1)
    return act(case(seed, N=1, width=width, **kw), dtype)


def equal_to_decode(a, pools, count):
    _, after = decode_steps(a, count)
    slot = a["slots"][0]
    for k, x in pools.items():
        assert same(x[slot], after[-1][k][slot] if count else a[k][slot]), k


# ---- validation


def test_val_14_state_indices_that_are_a_column_of_a_table():
    a = act(case(1, N=4), F32)
    want = call(a)
    table = np.full((4, 5), 1, np.int32)
    table[:, 0] = a["slots"]
    assert table[:, 0].strides[0] == 20
    assert same(call(dict(a, slots=table[:, 0])), want)
    assert not same(call(dict(a, slots=table.reshape(-1)[:4].copy())), want)  # what stride 1 would have read


def test_val_17_one_leftover_prompt_token_without_any_speculation():
    a = one(2, 1)
    pools, _ = rounds(a, [(1, 1)])
    equal_to_decode(a, pools, 1)


# ---- rollback


def test_rol_01_a_step_without_drafts_between_two_with_them():
    a = one(3, 12)
    pools, count = rounds(a, [(4, 3), (1, 1), (4, 1)])
    assert count == 5
    equal_to_decode(a, pools, 5)


@pytest.mark.parametrize("accept", [1, 2, 3, 4])
def test_rol_02_windows_roll_back_with_the_state(accept):
    a = one(4, 12, BF16)
    pools, count = rounds(a, [(4, accept), (4, 2)])
    equal_to_decode(a, pools, count)
    half = pools_of(a)
    b, _ = subset(a, [0], take=4)
    rings, _, _ = buffers(b)
    call(b, rings=rings)
    kda.fold(half["state"], rings, b["slots"], np.array([accept]))  # the state alone: the windows are then wrong
    assert not same(half["cs_q"][b["slots"][0]], decode_steps(a, accept)[1][-1]["cs_q"][b["slots"][0]])


@pytest.mark.parametrize("accept", [4, 5, 6])
def test_rol_04_more_accepted_than_the_convolution_remembers(accept):
    a = one(5, 8)
    pools, _ = rounds(a, [(6, accept)])
    equal_to_decode(a, pools, accept)


def test_rol_07_accepted_counts_and_columns_out_of_range_are_refused():
    a = act(case(6, N=2, width=5), F32)
    rings, snapshots, conv = buffers(a)
    call(a, rings=rings, **conv)
    pools = pools_of(a)
    before = {k: v.copy() for k, v in pools.items()}
    with pytest.raises(ValueError, match="accept: expected at most L=5 tokens, got 6 at 1"):
        kda.fold(pools["state"], rings, a["slots"], np.array([1, 6]))
    with pytest.raises(ValueError, match="last_correct_step: expected steps below 5, or < 0 to skip, got 5 at 1"):
        kda.rollback_conv_windows(pools["cs_q"], conv["conv_q"], a["slots"], np.array([0, 5]))
    assert all(same(pools[k], before[k]) for k in pools)
    kda.fold(pools["state"], rings, np.array([-1, -1]), np.array([6, 99]))  # an invalid slot is not looked up
    assert same(pools["state"], before["state"])


def test_rol_08_rounds_of_changing_length_with_partial_acceptance():
    a = one(7, 16)
    plan = [(4, 1), (2, 1), (1, 0), (3, 2), (4, 4), (1, 1)]
    for upto in range(1, len(plan) + 1):
        pools, count = rounds(a, plan[:upto], L=4)
        equal_to_decode(a, pools, count)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 65])
def test_rol_10_verify_never_moves_the_pool_whatever_its_length(width):
    a = one(8, width)
    before = pools_of(a)
    rings, snapshots, conv = buffers(a)
    call(a, rings=rings, snapshots=snapshots, **conv)
    assert all(same(a[k], before[k]) for k in before)
    kda.fold(a["state"], rings, a["slots"], np.array([0]))  # all rejected
    assert same(a["state"], before["state"])
    kda.fold(a["state"], rings, a["slots"], np.array([width]))
    equal_to_decode(dict(a, **before), {"state": a["state"]}, width)


def test_rol_11_a_snapshot_inside_a_verify_window_holds_no_rejected_token():
    a = one(9, 8)
    b, _ = subset(a, [0], take=6)
    rings, _, conv = buffers(b)
    call(b, rings=rings, **conv)
    state, track = a["state"].copy(), (a["slots"] + 1) % 4
    cs = [a[f"cs_{x}"].copy() for x in "qkv"]
    accept, boundary = np.array([4]), np.array([2])
    kda.fold(state, rings, a["slots"], accept, track=track, track_step=boundary)
    kda.rollback_conv_windows(cs, list(conv.values()), a["slots"], accept - 1, track_slots=track, track_steps=boundary)
    _, after = decode_steps(a, 4)
    assert same(state[track[0]], after[2]["state"][a["slots"][0]]) and same(state[a["slots"][0]], after[3]["state"][a["slots"][0]])
    for x, pool in zip("qkv", cs):
        assert same(pool[track[0]], after[2][f"cs_{x}"][a["slots"][0]])
    # request B starts from the snapshot and goes on as a fresh prefill of the shared prefix would
    c, _ = subset(a, [0])
    c |= {k: a[k][3:8] for k in PER_TOKEN} | {f"cs_{x}": p for x, p in zip("qkv", cs)}
    c |= dict(state=state, slots=track, cu_seqlens=np.array([0, 5]))
    assert same(call(c), call(a)[3:8])


def test_rol_12_the_window_after_migration_is_the_last_three_accepted_inputs():
    a = one(10, 6, BF16)
    _, _, conv = buffers(a)
    call(a, **conv)
    pool = np.full_like(a["cs_q"], np.nan)
    kda.rollback_conv_windows(pool, conv["conv_q"], np.array([3]), np.array([2]))  # accepted = 3, into another slot
    want = np.stack([a["x_q"][i].reshape(-1) for i in range(3)], -1)
    assert same(pool[3], want) and np.isnan(pool[:3].astype(F32)).all()


@pytest.mark.parametrize("fill", [np.nan, 0.0])
def test_rol_14_a_commit_without_a_record_is_refused(fill):
    a = one(11, 4)
    rings, _, _ = buffers(a)
    for x in rings:
        x[...] = fill
    state = a["state"].copy()
    with pytest.raises(ValueError, match="expected recorded values for the accepted tokens .verify in ring mode comes first., got"):
        kda.fold(state, rings, a["slots"], np.array([2]))
    assert same(state, a["state"])
    b, _ = subset(a, [0], take=2)
    call(b, rings=rings)  # two tokens recorded, three accepted
    with pytest.raises(ValueError, match="recorded"):
        kda.fold(state, rings, a["slots"], np.array([3]))
    kda.fold(state, rings, a["slots"], np.array([2]))
    equal_to_decode(a, {"state": state}, 2)


def test_rol_15_a_track_step_beyond_the_accepted_ones_takes_no_snapshot():
    a = one(12, 8)
    rings, _, _ = buffers(a)
    call(a, rings=rings)
    state = a["state"].copy()
    free = (a["slots"] + 1) % 4
    kda.fold(state, rings, a["slots"], np.array([3]), track=free, track_step=np.array([6]))
    assert same(state[free[0]], a["state"][free[0]])
    equal_to_decode(a, {"state": state}, 3)


# ---- padding


def test_pad_04_one_sentinel_and_slot_0_is_a_slot():
    a = act(case(13, N=8, width=2), F32)
    a["slots"] = np.array([4, 9, 2, -1, -1, -1, -1, -1], np.int32)
    rings, snapshots, _ = buffers(a)
    out = call(a, rings=rings, snapshots=snapshots)
    assert (out[6:] == 0).all() and (out[:6] != 0).any() and np.isnan(snapshots[a["rows"][3:]]).all()
    assert same(call(dict(a, slots=np.array([4, 9, 2, 0, 0, 0, 0, 0])), null_slot=0), out)


def test_pad_04_errors_slot_0_as_padding_without_saying_so():
    a = act(case(13, N=8, width=2), F32)
    with pytest.raises(ValueError, match="slots: expected each slot at most once"):
        call(dict(a, slots=np.array([4, 9, 2, 0, 0, 0, 0, 0])), rings=buffers(a)[0])


def test_pad_06_stale_slots_behind_the_real_rows():
    a = act(case(14, N=4, width=3), F32)
    rings, _, conv = buffers(a)
    call(a, rings=rings, **conv)
    pools = pools_of(a)
    before = {k: v.copy() for k, v in pools.items()}
    real = dict(a, cu_seqlens=np.array([0, 3, 6, 6, 6], np.int32), **pools)  # two rows left; the index buffer still names four
    rings2, _, conv2 = buffers(a)
    out = call(real, rings=rings2, **conv2)
    assert (out[6:] == 0).all()
    commit(pools, rings2, conv2, a, np.array([3, 2, 0, 0]))
    for r in (2, 3):
        slot = a["slots"][r]
        assert all(same(pools[k][slot], before[k][slot]) for k in pools)
        assert all(np.isnan(x[slot]).all() for x in rings2)


def test_pad_08_minus_one_is_not_the_last_slot_and_the_pool_is_written_itself():
    a = act(case(15, N=2, width=1, pool_extra=3), F32)
    assert len(a["state"]) == 5
    pools = pools_of(a)
    a["slots"] = np.array([-1, 3], np.int32)
    call_ = {k: v for k, v in a.items() if k not in ("rows", "cu_seqlens")} | pools
    kda.decode(**call_)
    for k, x in pools.items():
        changed = [i for i in range(5) if not same(x[i], a[k][i])]
        assert changed == [3], k


def test_pad_10_empty_rows_that_name_live_slots_again():
    a = act(case(16, N=4, lens=[4, 4, 0, 0]), F32)
    a["slots"] = np.array([1, 2, 1, 2], np.int32)
    rings, _, _ = buffers(a, L=4)
    out = call(a, rings=rings)
    b, _ = subset(a, [0, 1])
    assert same(out, call(b))
    state = a["state"].copy()
    kda.fold(state, rings, a["slots"], np.array([4, 4, 0, 0]))
    two = a["state"].copy()
    kda.fold(two, rings, a["slots"][:2], np.array([4, 4]))
    assert same(state, two)
    pools = pools_of(a)
    in_place = {k: v for k, v in a.items() if k != "rows"} | pools
    kda.decode(**in_place)
    assert same(pools["state"], state)


def test_pad_12_placeholder_tokens_of_a_short_row_are_not_committed():
    a = one(17, 4)
    pools, _ = rounds(a, [(4, 1)])
    equal_to_decode(a, pools, 1)


# ---- numeric


@pytest.mark.parametrize("a_log,gate", [(100.0, -200.0), (88.8, 50.0), (100.0, 0.0), (-200.0, 3.0)])
@pytest.mark.parametrize("lower", [None, -5.0])
def test_num_01_a_huge_amplitude_gives_no_nan(a_log, gate, lower):
    a = one(18, 2, lower=lower)
    a["A_log"][...], a["g"][...], a["dt_bias"][...] = a_log, gate, 0
    rings, snapshots, _ = buffers(a)
    out = call(a, rings=rings, snapshots=snapshots)
    assert np.isfinite(out).all() and np.isfinite(snapshots).all()
    ld = rings.g[a["slots"][0]]
    assert not np.isnan(ld).any() and (ld <= 0).all()
    state = a["state"].copy()
    kda.fold(state, rings, a["slots"], np.array([2]))
    assert same(state[a["slots"][0]], snapshots[0, 1])


@pytest.mark.parametrize("log_decay", [-27.6, -6.0, -5.5, -1000.0])
def test_num_02_and_06_tiny_decays_over_many_tokens(log_decay):
    p = case(19, N=1, width=64, lower=None, H=1)
    p["A_log"][...], p["dt_bias"][...] = 0, 0
    p["g"] = np.full_like(p["g"], -log_decay)  # softplus(x) = x beyond 20, nearly so here
    if log_decay == -1000.0:
        p["g"][...] = 0.1
        p["g"][30] = 1000
    a = act(p, F32)
    p["g"] = a["g"].astype(np.float64)
    _, snapshots, _ = buffers(a)
    out = call(a, snapshots=snapshots)
    want, want_snap = fed_oracle(p, *used_channels(a), quant=False)
    assert np.isfinite(out).all() and np.abs(out - want).max() <= 3e-6 * np.abs(want).max()
    assert np.abs(snapshots - want_snap).max() <= 3e-6 * np.abs(want_snap).max()


def test_num_05_a_later_gate_changes_no_earlier_output():
    a = one(20, 5)
    b = dict(a, g=a["g"].copy())
    b["g"][4] += 3
    x, y = call(a), call(b)
    assert same(x[:4], y[:4]) and not same(x[4], y[4])


def test_num_07_positive_log_gates_in_a_ring_act_as_they_stand():
    a = one(21, 8)
    rings, _, _ = buffers(a)
    call(a, rings=rings)
    for g in (5.0, 0.0):
        rings.g[...] = g
        state, want = a["state"].copy(), a["state"].astype(np.float64)
        kda.fold(state, rings, a["slots"], np.array([8]))
        oracle.fold(want, {k: np.asarray(v, np.float64) for k, v in rings._asdict().items()}, a["slots"], [8])
        assert np.abs(state - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_num_09_a_thousand_rounds_of_rejected_drafts(dtype):
    a = one(22, 1001, dtype)
    pools, count = rounds(a, [(2, 1)] * 1000, L=2)
    assert count == 1000
    equal_to_decode(a, pools, 1000)


def test_num_10_a_bfloat16_pool_has_the_same_rounding_points_on_both_ways():
    a = one(23, 4, BF16)
    a["state"] = a["state"].astype(BF16)
    pools, _ = rounds(a, [(4, 4)])
    equal_to_decode(a, pools, 4)


def test_num_11_two_thousand_commits_stay_equal_to_the_recurrent_update():
    a = one(24, 2000, BF16)
    pools, count = rounds(a, [(16, 16)] * 125, L=16)
    assert count == 2000
    equal_to_decode(a, pools, 2000)


# ---- lifecycle


def test_lif_05_a_track_step_left_over_from_a_prefill_is_ignored():
    a = one(25, 5)
    rings, _, conv = buffers(a)
    call(a, rings=rings, **conv)
    state, free = a["state"].copy(), (a["slots"] + 1) % 4
    kda.fold(state, rings, a["slots"], np.array([5]), track=free, track_step=np.array([512]))
    assert same(state[free[0]], a["state"][free[0]])


def test_lif_05_errors_a_track_step_beyond_the_windows():
    a = one(25, 5)
    conv = buffers(a)[2]
    with pytest.raises(ValueError, match="track_steps: expected steps below 5"):
        kda.rollback_conv_windows(a["cs_q"], conv["conv_q"], a["slots"], np.array([4]), track_slots=(a["slots"] + 1) % 4, track_steps=np.array([512]))


# ---- overflow: virtual memory that is never touched costs nothing


def reserve(count, dtype):
    dtype = np.dtype(dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return np.frombuffer(memory, np.uint8).view(dtype)


@pytest.mark.parametrize("index", [np.int32, np.int64], ids=str)
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
def test_ovf_07_a_slot_beyond_2_to_the_31_elements(index, state_dtype):
    a = one(26, 1, H=8, K=128, V=128)
    slots, pitch, far = 16400, 8 * 128 * 128, 16390
    assert far * pitch > 2**31
    big = reserve(slots * pitch, state_dtype).reshape(slots, 8, 128, 128)
    near = a["state"][:4].astype(state_dtype)
    big[far] = near[1]
    windows = {k: np.zeros((slots, *a[k].shape[1:]), F32) for k in ("cs_q", "cs_k", "cs_v")}
    for k in windows:
        windows[k][far] = a[k][1]
    small = {k: v for k, v in a.items() if k not in ("rows", "cu_seqlens")} | {k: a[k].copy() for k in windows} | dict(state=near.copy())
    small["slots"] = np.array([1], index)
    large = small | windows | dict(state=big, slots=np.array([far], index))
    assert same(kda.decode(**large), kda.decode(**small))
    assert same(big[far], small["state"][1]) and not same(big[far], near[1])
    wrapped = (far * pitch) % 2**31  # where a 32-bit product would have landed
    flat = big.reshape(-1)
    assert not flat[wrapped : wrapped + pitch].any() and not big[far - 1].any() and not big[far + 1].any()


def test_ovf_05_and_06_token_and_snapshot_offsets_beyond_32_bits():
    a = one(27, 2)
    want_snap = buffers(a)[1]
    want = call(a, snapshots=want_snap)
    pitch = 2**31 + 12345  # elements from one token to the next
    line = reserve(pitch + 4096, F32)
    far = np.lib.stride_tricks.as_strided(line, a["x_q"].shape, (pitch * 4, 64 * 4, 4))
    far[...] = a["x_q"]
    rows, step = 4, 2**30 + 4096
    scratch = reserve(rows * step, F32)
    snapshots = np.lib.stride_tricks.as_strided(scratch, (rows, 2, 1, 64, 64), (step * 4, 64 * 64 * 4, 64 * 64 * 4, 256, 4))
    assert same(call(dict(a, x_q=far, rows=np.array([3]), state=a["state"]), snapshots=snapshots), want)
    assert same(np.ascontiguousarray(snapshots[3]), want_snap[0])
    assert not snapshots[0].any()


# ---- dtype, aliasing, alignment, modes


def test_dty_02_the_state_is_stored_value_major():
    p = case(28, N=1, width=3, H=1)
    for zero in (True, False):
        if zero:
            p["state"][...] = 0
        else:
            p["state"] = case(29, N=1, width=3, H=1)["state"]
        a = act(p, F32)
        _, snapshots, _ = buffers(a)
        call(a, snapshots=snapshots)
        _, want = fed_oracle(p, *used_channels(a), quant=False)
        got = snapshots[0, -1]
        assert np.abs(got - want[0, -1]).max() <= 3e-6 * np.abs(want).max()
        assert np.abs(got.swapaxes(1, 2) - want[0, -1]).max() > 1e-2 * np.abs(want).max()


def test_ali_06_exactly_the_named_slots_change():
    slots = np.array([7, 3, 11, 0, 19, 5, 23, 1], np.int32)
    a = act(case(30, N=8, width=1, H=16, pool_extra=16), F32)
    assert len(a["state"]) == 24
    a["slots"] = slots
    pools = pools_of(a)
    kda.decode(**({k: v for k, v in a.items() if k not in ("rows", "cu_seqlens")} | pools))
    for k, x in pools.items():
        assert sorted(i for i in range(24) if not same(x[i], a[k][i])) == sorted(slots.tolist()), k


def test_gra_04_a_first_prompt_as_long_as_a_verify_is_what_the_caller_says():
    a = one(31, 3)
    for k in ("state", "cs_q", "cs_k", "cs_v"):
        a[k][a["slots"][0]] = 0
    prefilled = pools_of(a)
    kda.decode(**({k: v for k, v in a.items() if k != "rows"} | prefilled))
    verified, _ = rounds(a, [(3, 3)])
    slot = a["slots"][0]
    assert all(same(prefilled[k][slot], verified[k][slot]) and prefilled[k][slot].astype(F32).any() for k in prefilled)


def test_gra_03_and_05_one_set_of_buffers_for_changing_batches():
    """The CPU form of replays: the same arrays, new contents each time, equal to fresh calls."""
    a = act(case(32, N=4, width=3, pool_extra=4), F32)
    rings, _, conv = buffers(a)
    slots, accept = a["slots"].copy(), np.zeros(4, np.int64)
    held = dict(a, slots=slots)
    for live in (3, 1, 4):
        fresh = {k: v.copy() for k, v in pools_of(a).items()}
        slots[:live], slots[live:] = np.roll(a["slots"], live)[:live], -1
        accept[:] = [(live + i) % 4 for i in range(4)]
        out = call(held, rings=rings, **conv)
        want_rings, _, want_conv = buffers(a)
        assert same(out, call(dict(a, slots=slots.copy()), rings=want_rings, **want_conv)) and (out[live * 3 :] == 0).all()
        mine, want = pools_of(a), fresh
        commit(mine, rings, conv, held, accept)
        commit(want, want_rings, want_conv, dict(a, slots=slots.copy()), accept.copy())
        assert all(same(mine[k], want[k]) for k in mine)


def test_aln_05_nothing_is_read_beyond_a_row():
    a = act(case(33, N=2, width=2, H=1), F32)
    want = call(a)
    b = dict(a)
    for k in ("g", "x_q", "x_k", "x_v", "onorm_gate"):
        b[k], buffer = strided(a[k], pitch=64 + 16)
        gaps = buffer.reshape(-1, 80)[:, 64:]
        gaps[...] = 1e4 if k == "g" else np.nan
    assert same(call(b), want)
    for k in (60, 96, 100, 127):
        with pytest.raises(ValueError, match=f"head dimension K of 64 or 128, got {k}"):
            call(dict(a, x_q=np.zeros((4, 1, k), F32), x_k=np.zeros((4, 1, k), F32)))


# ---- more that broke in the wild


@pytest.mark.parametrize("lower", [-5.0, None])
def test_verify_and_commit_use_one_gate(lower):
    """A fold with the other gate formula drifts while outputs look right; here the ring carries the gate itself."""
    a = one(34, 6, lower=lower)
    pools, _ = rounds(a, [(6, 5)])
    equal_to_decode(a, pools, 5)
    other, _ = rounds(dict(a, lower_bound=None if lower else -5.0), [(6, 5)])
    assert not same(other["state"], pools["state"])


def test_the_safe_gate_is_a_sigmoid_and_not_a_clamped_softplus():
    p = case(35, N=1, width=4, H=1)
    rings, _, _ = buffers(act(p, F32))
    a = act(p, F32)
    call(a, rings=rings)
    x = p["g"] + p["dt_bias"]
    amplitude = np.exp(p["A_log"])[:, None]
    got = rings.g[a["slots"][0]].swapaxes(0, 1)
    np.testing.assert_allclose(got, -5 * oracle.sigmoid(amplitude * x), rtol=2e-6)
    assert np.abs(got - np.maximum(-amplitude * oracle.softplus(x), -5)).max() > 0.1


def test_skipped_rounding_of_q_k_v_would_show():
    p = case(36, N=1, width=6)
    a = act(p, BF16)
    _, snapshots, _ = buffers(a)
    call(a, snapshots=snapshots)
    rounded, raw = oracle.bufs(p)[0], oracle.bufs(p)[0]
    oracle.verify(p, ssm_snap=rounded)
    oracle.verify(p, ssm_snap=raw, mat_conv=False)
    assert np.abs(snapshots - rounded).max() < 0.05 * np.abs(snapshots - raw).max()


def test_a_second_commit_of_the_same_record_is_a_second_replay():
    """Committing twice is not idempotent: the record is of tokens, not of a target state. Documented in SEMANTICS.md."""
    a = one(37, 3)
    rings, _, _ = buffers(a)
    call(a, rings=rings)
    once, twice = a["state"].copy(), a["state"].copy()
    kda.fold(once, rings, a["slots"], np.array([3]))
    for _ in range(2):
        kda.fold(twice, rings, a["slots"], np.array([3]))
    assert not same(once, twice)
    kda.fold(once, rings, a["slots"], np.array([3]))
    assert same(once, twice)


@pytest.mark.parametrize("where", ["x_q", "x_k", "x_v", "g", "beta", "state"])
def test_a_nan_stays_in_its_request(where):
    a = act(case(38, N=3, width=3), F32)
    want = call(a)
    b = dict(a, **{where: a[where].copy()})
    if where == "state":
        b[where][a["slots"][1]] = np.nan
    else:
        b[where][4] = np.nan
    got = call(b)
    assert same(got[:3], want[:3]) and same(got[6:], want[6:])
    assert np.isnan(got[5]).any()
