"""Faults that people met in the draft KV of serving systems, by kind; each name ends in the id of the case list."""

import draft_kv as oracle
import ml_dtypes
import numpy as np
import pytest
from draft_kv_cases import DTYPES, FP8, Problem, raw, rotary_pairs, strided, units
from test_draft_kv_helper import BF16, Rope, collect, make_layers

import specstate.draft_kv as draft_kv

RNG = np.random.default_rng


def run(p, pools, **extra):
    draft_kv.materialize_into_pool(*p.args(), *pools, **{**p.kwargs, **extra})
    return pools


def slots_of(table, positions, block):
    """Slot mapping as an engine makes it: entries <= 0 of the block table (null blocks, none) become -1."""
    blocks = np.asarray(table)[np.asarray(positions) // block]
    return np.where(blocks > 0, blocks * block + np.asarray(positions) % block, -1)


# ---- validation
@pytest.mark.parametrize("position, ok", [(63, True), (64, False), (65, False), (-1, False), (2**31 - 1, False)])
def test_position_beyond_the_rotary_table_val_01_val_03(position, ok):
    p = Problem(RNG(1), T=3, table=64)
    p.positions[1] = position
    pools = p.pools()
    if ok:
        run(p, pools)
        assert (raw(pools[0][:, p.loc[1]]) != 0x5A).any()
        return
    with pytest.raises(ValueError, match="positions: expected rows of cos_sin_cache, 0..63, got"):
        run(p, pools)
    np.testing.assert_array_equal(raw(pools), raw(p.pools()))


def test_a_row_beyond_the_table_can_be_left_out_val_02():
    p = Problem(RNG(2), T=2, table=32)
    p.positions[:] = 10, 40
    p.loc[1] = -1
    want = p.oracle(is_neox_style=True)
    k, _ = run(p, p.pools())
    assert units(k[:, p.loc[0]], want[0][:, p.loc[0]], "fp32").max() < 2


def test_partial_rotary_takes_its_width_from_the_table_val_04():
    p = Problem(RNG(3), io="bf16", T=4, hidden=32, D=128, R=64, N=1)
    k, _ = run(p, p.pools())
    p.positions = p.positions * 0
    at_zero, _ = run(p, p.pools())
    np.testing.assert_array_equal(raw(k[:, p.loc, :, 64:]), raw(at_zero[:, p.loc, :, 64:]))
    assert (k[:, p.loc, :, :64] != at_zero[:, p.loc, :, :64]).any()


def test_layers_with_different_rotary_tables_are_refused_or_honoured_val_06():
    rope, other = Rope(), Rope()
    other.cos_sin_cache = oracle.RopeTable(8, 1e6, 64).rows.astype(np.float32)
    layers = make_layers(rope=rope)
    layers[1].self_attn.rotary_emb = other
    with pytest.raises(ValueError, match="rotary_emb: expected one rotary table for all layers, got another table at layer 1"):
        draft_kv.FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    # The one-pass form takes a table a layer: test_draft_kv.py, test_a_rotary_table_for_each_layer.


def test_more_features_than_slots_val_08():
    p = Problem(RNG(4), T=10)
    p.loc = p.loc[:7]
    pools = p.pools()
    with pytest.raises(ValueError, match=r"slot_mapping: expected shape \[T=10\], got \(7,\)"):
        run(p, pools)
    np.testing.assert_array_equal(raw(pools), raw(p.pools()))


def test_multimodal_positions_are_never_flattened_val_10_ali_10():
    p = Problem(RNG(5), T=6)
    p.positions = np.tile(p.positions, (3, 1))
    with pytest.raises(ValueError, match=r"positions: expected shape \[T=6\], got \(3, 6\)"):
        run(p, p.pools())


def test_slots_are_used_verbatim_whatever_the_positions_ali_10():
    p = Problem(RNG(6), T=6)
    p.positions[:] = 5  # repeated
    k, v = run(p, p.pools())
    want = p.oracle()
    assert units(k[:, p.loc], want[0][:, p.loc], "fp32").max() < 2


def test_block_geometry_is_never_guessed_from_a_view_val_12():
    """Slots are rows of the pool, whatever block size an engine thinks in; one beyond it is refused."""
    p = Problem(RNG(7), T=2, slots=64)
    p.loc[1] = 75849
    with pytest.raises(ValueError, match="slot_mapping: expected slots below 64, got 75849 at row 1"):
        run(p, p.pools())
    pages = np.zeros((p.L, 4, 16, p.N, p.D), np.float32)
    with pytest.raises(ValueError, match="k_pool"):
        p.loc[1] = 0
        run(p, [pages, pages.copy()])


@pytest.mark.parametrize("missing", range(9))
def test_every_argument_left_out_val_13(missing):
    p = Problem(RNG(8), T=4, window=2, bias=True)
    args = [*p.args(), *p.pools()]
    args[missing] = None
    name = ["ctx_hidden", "kv_weight", "k_norm_weight", "eps", "cos_sin_cache", "positions", "slot_mapping", "k_pool", "v_pool"][missing]
    with pytest.raises(ValueError, match=f"{name}: expected a tensor, got none"):  # the slots may be left out, but not with commit_lens
        draft_kv.materialize_into_pool(*args, **p.kwargs)


# ---- padding
def test_dummy_requests_leave_slot_0_alone_pad_13():
    p = Problem(RNG(9), T=4, slots=8)
    k, v = p.pools()
    p.loc = np.array([0, 1, 2, 3])
    run(p, [k, v])
    before = raw(k).copy()
    p.loc = np.full(4, -1)
    p.hidden = p.hidden * 0
    run(p, [k, v])
    np.testing.assert_array_equal(raw(k), before)


def test_stale_rows_of_a_padded_batch_write_nothing_pad_14():
    """Eight rows captured, three real: the rest repeats live slots, with a commit length of 0."""
    p = Problem(RNG(10), T=8, slots=8, window=1)
    p.loc = np.array([0, 1, 2, 0, 1, 2, 0, 1])[:, None]
    p.kwargs["commit_lens"] = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    got = run(p, p.pools())
    real = p.pools()
    draft_kv.materialize_into_pool(p.hidden[:3], p.weight, p.norm, p.eps, p.rope, p.positions[:3], np.arange(3), *real)
    np.testing.assert_array_equal(raw(got), raw(real))


def test_null_blocks_of_a_sliding_window_pad_15_ali_07():
    """Positions whose block is the null block, or not allocated, are skipped; block 0 keeps its bytes."""
    for table, positions in (([0, 0, 7, 8], np.arange(64)), ([5, 9, 0, 0], np.arange(32, 40)), ([5, 9, -1, 0], np.arange(30, 40))):
        p = Problem(RNG(11), io="bf16", L=1, T=len(positions), slots=160, table=64)
        p.positions, p.loc = positions, slots_of(table, positions, 16)
        k, _ = run(p, p.pools())
        named = np.unique(p.loc[p.loc >= 0])
        untouched = np.setdiff1d(np.arange(160), named)
        np.testing.assert_array_equal(raw(k[:, untouched]), raw(p.pools()[0][:, untouched]))
        assert (raw(k[:, :16]) == 0x5A).all() and len(named) == {64: 32, 8: 0, 10: 2}[len(positions)]


# ---- numeric
@pytest.mark.parametrize("rebase", [0, 10_000])
def test_positions_are_applied_as_given_num_15(rebase):
    """Absolute or rebased is the caller's choice; the angle between two rows depends on their distance alone."""
    p = Problem(RNG(12), L=1, N=1, T=2, D=16, R=16, hidden=16, table=10_100)
    p.rope = oracle.RopeTable(16, 1e4, 10_100, fp32=False).rows.astype(np.float32)
    p.positions[:] = rebase + 40, rebase + 3
    k, _ = run(p, p.pools())
    a, b = k[0, p.loc, 0].astype(np.float64)
    p.positions[:] = 37, 0
    k0, _ = run(p, p.pools())
    a0, b0 = k0[0, p.loc, 0].astype(np.float64)
    assert abs(a @ b - a0 @ b0) < 1e-4
    want = p.oracle()
    assert units(k0[:, p.loc], want[0][:, p.loc], "fp32").max() < 2


def test_tree_rows_take_the_position_of_their_depth_num_16():
    """Siblings may share a position: rows are rotated by what they are given, not by their place."""
    p = Problem(RNG(13), io="bf16", T=5, table=128)
    p.positions = 100 + np.array([0, 1, 1, 2, 2])
    p.hidden[2], p.hidden[4] = p.hidden[1], p.hidden[3]
    k, v = run(p, p.pools())
    np.testing.assert_array_equal(raw(k[:, p.loc[[1, 3]]]), raw(k[:, p.loc[[2, 4]]]))


# ---- lifecycle
def test_a_second_request_on_a_slot_lif_09():
    p = Problem(RNG(14), io="bf16", T=50, slots=64)
    pools = run(p, p.pools())
    q = Problem(RNG(15), io="bf16", T=10, slots=64)
    q.loc = p.loc[:10]
    fresh = run(q, q.pools())
    run(q, pools)
    np.testing.assert_array_equal(raw(pools[0][:, q.loc]), raw(fresh[0][:, q.loc]))


def test_no_request_ever_finds_anothers_rows_lif_15():
    """500 steps of random admission, growth and finish over one pool: every live row is its own request's, to the bit."""
    rng = RNG(16)
    p = Problem(rng, L=1, N=1, D=4, R=4, hidden=4, T=1, slots=256, table=64)
    pools = p.pools(np.float32, 0)
    free, live, names = list(rng.permutation(256)), {}, iter(range(10**6))
    for _ in range(500):
        if len(live) < 16 and len(free) > 24:
            live[next(names)] = []
        rows, slots, positions = [], [], []
        for held in live.values():
            for _ in range(int(rng.integers(0, 4))):
                if not free or len(held) >= 60:
                    break
                slot = free.pop()
                features = rng.standard_normal(4).astype(np.float32)
                held.append((slot, features))
                rows.append(features), slots.append(slot), positions.append(len(held) - 1)
        if rows:
            draft_kv.materialize_into_pool(
                np.array(rows), p.weight, p.norm, p.eps, p.rope, np.array(positions), np.array(slots), *pools
            )
        for name in [n for n in live if rng.random() < 0.05]:
            free.extend(slot for slot, _ in live.pop(name))
    held = [pair for rows in live.values() for pair in rows]
    positions = [i for rows in live.values() for i in range(len(rows))]
    want = p.pools(np.float32, 0)
    draft_kv.materialize_into_pool(
        np.array([f for _, f in held]), p.weight, p.norm, p.eps, p.rope, np.array(positions), np.array([s for s, _ in held]), *want
    )
    slots = [s for s, _ in held]
    assert len(slots) > 50
    np.testing.assert_array_equal(raw(pools[0][:, slots]), raw(want[0][:, slots]))
    np.testing.assert_array_equal(raw(pools[1][:, slots]), raw(want[1][:, slots]))


def test_chunks_are_rotated_by_their_own_positions_con_12():
    """Twenty chunks through one positions buffer that is rewritten between the calls."""
    p = Problem(RNG(17), io="bf16", T=80, table=128, slots=80)
    want = run(p, p.pools())
    got, buffer, slots = p.pools(), np.zeros(4, np.int64), np.zeros(4, np.int64)
    for begin in range(0, 80, 4):
        buffer[:], slots[:] = p.positions[begin : begin + 4], p.loc[begin : begin + 4]
        draft_kv.materialize_into_pool(p.hidden[begin : begin + 4], p.weight, p.norm, p.eps, p.rope, buffer, slots, *got)
        buffer[:], slots[:] = -1, -1
    np.testing.assert_array_equal(raw(got), raw(want))


# ---- overflow
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_slot_times_stride_beyond_32_bits_ovf_08(index):
    """Slot 2 200 000 of rows of 1024 bytes lies 2.2 GB into the pool (virtual memory; two pages are touched)."""
    p = Problem(RNG(18), io="bf16", L=1, N=8, D=128, R=128, hidden=8, T=2, slots=2)
    scale = 2.0
    want = run(p, p.pools(FP8), k_scale=scale, v_scale=scale)
    big = [np.zeros((1, 2_200_001, 8, 128), np.uint8) for _ in range(2)]
    small, p.loc = p.loc, np.array([2_200_000, 3], index)
    run(p, big, k_scale=scale, v_scale=scale)
    for a, b in zip(big, want):
        np.testing.assert_array_equal(a[:, p.loc], b[:, small].view(np.uint8))
        assert not a[:, 2_200_000 * 1024 % 2**31 // 1024].any() and not a[:, :3].any()


@pytest.mark.parametrize("seq", [31, 32, 33, 63])
def test_window_that_runs_past_its_blocks_ovf_11(seq):
    """Rows behind the last allocated block are skipped; nothing before the pool's base is touched."""
    arena = np.full((1, 3 * 96, 2, 8), 0x5A5A, np.uint16).view(BF16)
    pool = arena[:, 96:192]
    p = Problem(RNG(19), io="bf16", L=1, T=6, slots=96, table=128)
    p.positions = seq + np.arange(6)
    p.loc = slots_of([1, 2, -1, -1], p.positions, 32)
    other = p.pools()[1]
    run(p, [pool, other])
    touched = (raw(arena).reshape(3 * 96, -1) != 0x5A).any(1)
    assert set(np.flatnonzero(touched)) <= {96 + s for s in p.loc if s >= 0}


# ---- dtype
@pytest.mark.parametrize("pool", [np.float16, np.float32, BF16, FP8])
def test_each_pool_type_gets_its_own_encoding_dty_03_dty_04(pool):
    p = Problem(RNG(20), io="bf16", L=1, N=1, D=2, R=2, hidden=1, T=1, slots=1)
    p.hidden[:], p.weight[:], p.loc[:] = 1, 0.1621, 0
    _, v = run(p, p.pools(pool))
    want = np.float32(BF16(0.1621)) if pool is not FP8 else oracle.round_e4m3(float(BF16(0.1621)))
    assert float(v[0, 0, 0, 0]) == pytest.approx(float(want), rel=1e-3)


@pytest.mark.parametrize("pool", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, np.float64, np.int8])
def test_other_pool_types_are_refused_dty_03_dty_06(pool):
    p = Problem(RNG(21))
    with pytest.raises((ValueError, TypeError, BufferError)):
        run(p, p.pools(pool))


def test_one_is_one_in_fp8_dty_06():
    """1.0 with scale 1 is code 0x38 (OCP e4m3fn; the other bias would read back 2.0)."""
    p = Problem(RNG(22), L=1, N=1, D=2, R=2, hidden=1, T=1, slots=1)
    p.hidden[:], p.weight[:], p.norm[:], p.positions[:], p.loc[:], p.eps[:] = 1, 1, 1, 0, 0, 0
    k, v = run(p, p.pools(np.uint8))
    assert (v == 0x38).all() and (k == 0x38).all()


def test_pools_of_3_and_4_dimensions_strided_or_not_dty_07():
    p = Problem(RNG(23), io="bf16", L=3, T=5)
    want = run(p, p.pools())
    for form in (lambda x: [*x], lambda x: x, lambda x: strided(RNG(24), x), lambda x: [strided(RNG(l), y) for l, y in enumerate(x)]):
        got = [form(pool) for pool in p.pools()]
        run(p, got)
        np.testing.assert_array_equal(raw(np.stack(list(got[0]))), raw(want[0]))
        np.testing.assert_array_equal(raw(np.stack(list(got[1]))), raw(want[1]))


def test_k_and_v_interleaved_in_one_block_dty_08():
    p = Problem(RNG(25), io="bf16", L=2, T=5)
    want = run(p, p.pools())
    packed = np.concatenate(p.pools(), -1)
    run(p, [packed[..., :8], packed[..., 8:]])
    np.testing.assert_array_equal(raw(packed), raw(np.concatenate(want, -1)))


def test_scales_are_applied_once_or_refused_dty_09():
    p = Problem(RNG(26), L=2, T=5, N=2)
    results = [
        raw(run(p, p.pools(FP8), k_scale=s, v_scale=s))
        for s in (0.5, np.float32(0.5), np.full((), 0.5, np.float32), np.full(2, 0.5, np.float32), np.full((), 0.5))
    ]
    k, _ = run(p, p.pools())
    np.testing.assert_array_equal(
        results[0].reshape(2, 2, p.slots, 2, 8)[0][:, p.loc], oracle.e4m3_encode(k[:, p.loc] / np.float32(0.5))
    )
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    for shape in ((2, 2), (2, 2, 1)):  # a scale for each head is not ours
        with pytest.raises(ValueError, match="k_scale: expected a number or shape"):
            run(p, p.pools(FP8), k_scale=np.full(shape, 0.5, np.float32))


# ---- aliasing
def test_two_groups_of_pools_in_one_block_ali_08():
    """Rows of 256 and of 512 bytes in pages of one size: no group ever reaches into the other's pages; ids above 65535 are exact."""
    page, pages = 4096, 6
    block = np.full((pages, page), 0x5A, np.uint8)
    a, b = Problem(RNG(27), io="bf16", L=1, N=1, D=128, R=64, T=4), Problem(RNG(28), io="bf16", L=1, N=2, D=128, R=64, T=4)
    views = [block.view(BF16).reshape(1, -1, n, 128) for n in (1, 2)]
    a.slots, b.slots = views[0].shape[1], views[1].shape[1]
    a.loc = np.array([1 * 16, 1 * 16 + 15, 3 * 16, 3 * 16 + 7])
    b.loc = np.array([2 * 8, 2 * 8 + 7, 4 * 8, 4 * 8 + 3])
    run(a, [views[0], np.zeros_like(views[0])])
    run(b, [views[1], np.zeros_like(views[1])])
    np.testing.assert_array_equal(raw(views[0][:, a.loc]), raw(run(a, a.pools())[0][:, a.loc]))
    np.testing.assert_array_equal(raw(views[1][:, b.loc]), raw(run(b, b.pools())[0][:, b.loc]))
    assert (block[[0, 5]] == 0x5A).all()
    far = Problem(RNG(29), io="bf16", L=1, N=1, D=2, R=2, T=1, slots=70_000)
    far.loc[:] = 65_536
    k, _ = run(far, far.pools())
    assert np.flatnonzero((raw(k).reshape(70_000, -1) != 0x5A).any(1)).tolist() == [65_536]


def test_draft_pool_then_target_pool_then_draft_pool_ali_11():
    p = Problem(RNG(30), io="bf16", T=4)
    projection = draft_kv.KvProjection(p.weight)
    p.weight = projection
    draft, target = p.pools(), p.pools()
    run(p, draft)
    once = raw(draft).copy()
    p.loc = (p.loc + 3) % p.slots
    run(p, target)
    np.testing.assert_array_equal(raw(draft), once)
    p.loc = (p.loc - 3) % p.slots
    run(p, draft)
    np.testing.assert_array_equal(raw(draft), once)


# ---- graph capture and alignment, as a CPU can show them
def test_a_smaller_batch_in_the_same_buffers_gra_06_gra_08():
    """Step one with 8 requests, step two with 5 in the same arrays: the stale tail writes nothing."""
    p = Problem(RNG(31), T=32, window=4, slots=64)
    p.kwargs["commit_lens"][:] = 4
    run(p, p.pools())
    p.kwargs["commit_lens"][5:] = 0
    got, want = run(p, p.pools()), p.pools()
    n = 20
    draft_kv.materialize_into_pool(p.hidden[:n], p.weight, p.norm, p.eps, p.rope, p.positions[:n], p.loc.reshape(-1)[:n], *want)
    np.testing.assert_array_equal(raw(got), raw(want))


@pytest.mark.parametrize("D", [46, 80, 96, 100, 128, 192])
@pytest.mark.parametrize("pool", ["bf16", "fp8"])
def test_odd_head_dims_and_unaligned_rows_aln_06(D, pool):
    p = Problem(RNG(32), io="bf16", L=1, N=3, D=D, R=D - D % 4, hidden=16, T=18, slots=18)
    dtype = FP8 if pool == "fp8" else DTYPES[pool]
    k, v = run(p, p.pools(dtype))
    size = dtype.itemsize
    # The same pools one element past an aligned address.
    memory = [np.full(k.nbytes + size, 0x5A, np.uint8) for _ in range(2)]
    odd = [m[size:].view(dtype).reshape(k.shape) for m in memory]
    run(p, odd)
    np.testing.assert_array_equal(raw(odd), raw([k, v]))
    assert all((m[:size] == 0x5A).all() for m in memory)
    if pool == "bf16":
        want = p.oracle()[0][:, p.loc]
        assert units(k[:, p.loc], want, "bf16", rotary_pairs(want, p.R)).max() <= 2


def test_helper_of_a_quantised_layer_is_refused_by_dtype():
    """Quantised weights sliced as if they were plain ones gave garbage elsewhere."""
    rope = Rope()
    layers = make_layers(rope=rope, dtype=BF16)
    layers[2].self_attn.qkv_proj.weight = layers[2].self_attn.qkv_proj.weight.astype(FP8)
    with pytest.raises(ValueError, match="qkv_proj.weight: expected dtype float32 or bfloat16 or float16, got float8_e4m3fn at layer 2"):
        draft_kv.FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    assert len(collect(draft_kv.FusedKVMaterializeHelper(layers[:2], rope, 2, 8, "cpu"), np.ones((1, 24), BF16), np.zeros(1, int))[0]) == 2
