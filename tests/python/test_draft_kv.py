"""materialize_into_pool and fused_norm_rope_stacked against the oracle, and what must hold to the bit."""

import draft_kv as oracle
import ml_dtypes
import numpy as np
import pytest
from draft_kv_cases import DTYPES, FP8, FeatureProblem, Problem, raw, rotary_pairs, strided, units
from hypothesis import given, settings
from hypothesis import strategies as st

import specstate.draft_kv as draft_kv


def run(p, pools, **extra):
    draft_kv.materialize_into_pool(*p.args(), *pools, **{**p.kwargs, **extra})
    return pools


def assert_pools(p, got, want, io, neox):
    """V within one unit (ours and the oracle's sums differ in their last float32 bits), K within two of its rotary pair: one from the
    projection that it is made of, one of its own. Slots that were not named keep every bit of their poison."""
    slots = p.loc.reshape(-1)[p.written()]
    others = np.setdiff1d(np.arange(p.slots), slots)
    poison = p.pools(got[0].dtype)[0]
    for name, pool, reference in zip("kv", got, want):
        np.testing.assert_array_equal(raw(pool[:, others]), raw(poison[:, others]))
        if len(slots):
            reference = reference[:, slots]
            distance = units(pool[:, slots], reference, io, rotary_pairs(reference, p.R, neox) if name == "k" else None)
            assert distance.max() <= {"k": 2, "v": 1}[name], distance.max()
            if io != "fp32":  # most of them agree to the bit
                assert (distance == 0).mean() > {"k": 0.7, "v": 0.97}[name], (distance == 0).mean()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_against_the_oracle(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    D = draw(2, 6, 8, 16, 46, 64, 80)
    window = draw(None, 1, 3, 8)
    T = (window or 1) * draw(0, 1, 2, 5)
    p = Problem(
        rng, io=draw("fp32", "bf16", "fp16"), L=draw(1, 2, 5), T=T, hidden=draw(1, 5, 24, 33, 64), N=draw(1, 2, 3), D=D,
        R=2 * data.draw(st.integers(1, D // 2)), slots=T + draw(0, 3, 40), window=window, bias=draw(False, True),
    )  # fmt: skip
    p.loc = np.where(rng.random(p.loc.shape) < 0.2, -rng.integers(1, 9, p.loc.shape), p.loc)
    extra = {"is_neox_style": draw(True, False), "round_after_norm": draw(True, False)}
    want = p.oracle(**extra)
    index = draw(np.int32, np.int64)
    p.positions, p.loc = p.positions.astype(index), p.loc.astype(draw(np.int32, np.int64))
    if "commit_lens" in p.kwargs:
        p.kwargs["commit_lens"] = p.kwargs["commit_lens"].astype(index)
        if draw(True, False):
            p.positions = p.positions.reshape(p.loc.shape)
    pools = p.pools()
    if draw(True, False):
        for name in ("hidden", "weight", "norm", "eps", "rope", "positions", "loc"):
            setattr(p, name, strided(rng, getattr(p, name)))
        p.kwargs = {name: strided(rng, value) for name, value in p.kwargs.items()}
        pools = [strided(rng, pool) for pool in pools]
    form = draw("one", "list", "packed")
    targets = pools if form == "one" else [list(pool) for pool in pools]
    if form == "packed":
        bias = p.kwargs.pop("kv_bias", None)
        p.weight = draft_kv.KvProjection(p.weight, bias)
    run(p, targets, **extra)
    if T:
        assert_pools(p, pools, want, p.io, extra["is_neox_style"])


@pytest.mark.parametrize("io", ["fp32", "bf16", "fp16"])
def test_v_is_the_rounding_of_our_own_float32_product(io):
    """In float32 the pool shows the product itself: V in any storage type is exactly its rounding."""
    rng = np.random.default_rng(5)
    p = Problem(rng, io=io, T=9, hidden=65, D=16, N=3, bias=True)
    _, v = run(p, p.pools())
    f = lambda x: x.astype(np.float32)
    exact = p.pools(np.float32)
    draft_kv.materialize_into_pool(
        f(p.hidden), f(p.weight), f(p.norm), p.eps, p.rope, p.positions, p.loc, *exact, kv_bias=f(p.kwargs["kv_bias"])
    )
    np.testing.assert_array_equal(v[:, p.loc], exact[1][:, p.loc].astype(DTYPES[io]))


def test_mixed_types_round_to_the_features_type():
    rng = np.random.default_rng(6)
    p = Problem(rng, io="fp32", weight="bf16", T=8)
    k, v = run(p, p.pools())
    want = p.oracle()
    assert units(k[:, p.loc], want[0][:, p.loc], "fp32").max() < 2
    assert units(v[:, p.loc], want[1][:, p.loc], "fp32").max() < 2
    # A pool of another type holds those values rounded once more.
    for pool in (np.float16, ml_dtypes.bfloat16):
        narrow = run(p, p.pools(pool))
        np.testing.assert_array_equal(narrow[0][:, p.loc], k[:, p.loc].astype(pool))
        np.testing.assert_array_equal(narrow[1][:, p.loc], v[:, p.loc].astype(pool))


@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize("pool", [FP8, np.dtype(np.uint8)])
@pytest.mark.parametrize("kind", ["none", "number", "0d", "layer"])
def test_fp8_pools(io, pool, kind):
    """value / scale in float32, then e4m3, saturating; exact given the values of a pool that is not fp8."""
    rng = np.random.default_rng(7)
    p = Problem(rng, io=io, L=3, T=10, D=16)
    p.norm[0, :4] *= 900  # beyond 448
    k, v = run(p, p.pools())
    numbers = {"none": [1, 1, 1], "number": [0.5] * 3, "0d": [3.0] * 3, "layer": [0.25, 1.7, 8.0]}[kind]
    scale = {"none": None, "number": 0.5, "0d": np.float32(3.0) * np.ones(()), "layer": np.array([0.25, 1.7, 8.0], np.float32)}[kind]
    got = run(p, p.pools(pool), k_scale=scale, v_scale=scale)
    for target, source in zip(got, (k, v)):
        for l in range(3):
            quotient = source[l, p.loc].astype(np.float32) / np.float32(numbers[l])
            np.testing.assert_array_equal(target[l, p.loc].view(np.uint8), oracle.e4m3_encode(quotient))
    decoded = oracle.e4m3_decode(got[0][:, p.loc].view(np.uint8))
    assert np.abs(decoded).max() == 448 and not np.isnan(decoded).any()


def test_fp8_keeps_nan_and_saturates_infinity():
    rng = np.random.default_rng(8)
    p = Problem(rng, io="fp32", L=1, T=2)
    p.hidden[0], p.weight[0, 16:, 0] = np.nan, 1e38
    p.hidden[1, 0] = 1e30
    _, v = run(p, p.pools(FP8))
    codes = v[0, p.loc].view(np.uint8)
    assert (codes[0] & 0x7F == 0x7F).all() and (codes[1] == 0x7E).all()


@pytest.mark.parametrize("io", ["fp32", "bf16"])
def test_incremental_equals_one_shot_bit_for_bit(io):
    """Any way to cut the rows into calls, any order, with any neighbours, leaves the same bytes."""
    rng = np.random.default_rng(9)
    p = Problem(rng, io=io, L=3, T=300, hidden=72, D=16, slots=300)
    want = run(p, p.pools())
    for pieces in (1, 7, 64, 299):
        got = p.pools()
        order = rng.permutation(300)
        for begin in range(0, 300, pieces):
            rows = order[begin : begin + pieces]
            draft_kv.materialize_into_pool(p.hidden[rows], p.weight, p.norm, p.eps, p.rope, p.positions[rows], p.loc[rows], *got)
            if pieces == 1 and begin > 40:
                break
        done = p.loc[order[: begin + pieces]]
        for a, b in zip(got, want):
            np.testing.assert_array_equal(raw(a[:, done]), raw(b[:, done]))


def test_rejected_rows_have_no_say():
    """NaN features, absurd positions and slots of rows that are not written change nothing and are not checked."""
    rng = np.random.default_rng(10)
    p = Problem(rng, io="bf16", T=32, window=8)
    p.kwargs["commit_lens"] = np.array([3, 0, 8, 1])
    want = run(p, p.pools())
    rejected = np.setdiff1d(np.arange(32), p.written())
    p.hidden[rejected] = np.nan
    p.positions[rejected] = np.iinfo(np.int64).max
    p.loc.reshape(-1)[rejected] = 10**12
    got = run(p, p.pools())
    np.testing.assert_array_equal(raw(got), raw(want))


def test_of_rows_with_one_slot_the_last_stands():
    rng = np.random.default_rng(11)
    p = Problem(rng, T=400, slots=7, hidden=8)
    p.loc = rng.integers(0, 7, 400)
    got = run(p, p.pools())
    for slot in range(7):
        last = np.flatnonzero(p.loc == slot)[-1]
        alone = p.pools()
        draft_kv.materialize_into_pool(
            p.hidden[[last]], p.weight, p.norm, p.eps, p.rope, p.positions[[last]], p.loc[[last]], *alone
        )
        np.testing.assert_array_equal(raw(got[0][:, slot]), raw(alone[0][:, slot]))
        np.testing.assert_array_equal(raw(got[1][:, slot]), raw(alone[1][:, slot]))


def test_v_may_be_wider_than_k_and_of_another_type():
    rng = np.random.default_rng(12)
    L, T, H, N, D, Dv = 2, 5, 16, 2, 8, 12
    p = Problem(rng, L=L, T=T, hidden=H, N=N, D=D)
    k, v = run(p, p.pools())
    extra = rng.standard_normal((L, N, Dv - D, H)).astype(np.float32)
    v_rows = p.weight[:, N * D :].reshape(L, N, D, H)
    p.weight = np.concatenate([p.weight[:, : N * D], np.concatenate([v_rows, extra], 2).reshape(L, N * Dv, H)], 1)
    wide = np.full((L, p.slots, N, Dv), np.nan, np.float16)
    k2 = p.pools()[0]
    run(p, [k2, wide])
    np.testing.assert_array_equal(raw(k2), raw(k))
    np.testing.assert_array_equal(wide[:, p.loc, :, :D], v[:, p.loc].astype(np.float16))


def test_a_rotary_table_for_each_layer():
    rng = np.random.default_rng(13)
    p = Problem(rng, L=2, T=6)
    tables = np.stack([oracle.RopeTable(8, base, 64).rows.astype(np.float32) for base in (1e4, 1e6)])
    own = p.pools()
    p.rope = tables
    run(p, own)
    for l in range(2):
        p.rope = tables[l]
        one = run(p, p.pools())
        np.testing.assert_array_equal(raw(own[0][l]), raw(one[0][l]))


@pytest.mark.parametrize("io", ["fp32", "bf16", "fp16"])
def test_target_features_are_projected_and_normed_in_front(io):
    """What stands between is the context, to the bit; and it is the oracle's but for the last bits of our sums."""
    p = FeatureProblem(np.random.default_rng(21), features=70, hidden=24, io=io, T=40, window=4, slots=64)
    everything = {**p.kwargs, "commit_lens": np.full(10, 4)}
    committed, p.kwargs = p.kwargs, everything
    context = p.context(lambda q: run(q, q.pools()))
    assert units(context, p.exact_context(), io).max() <= 1.5
    p.kwargs = committed
    want = run(p.projection_of(context), p.pools())
    np.testing.assert_array_equal(raw(run(p, p.pools())), raw(want))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"hidden_norm_weight": None}, "hidden_norm_weight: expected a tensor, got none"),
        ({"fc_weight": None}, r"hidden_norm_weight: expected none without fc_weight|ctx_hidden|kv_weight"),
        ({"fc_weight": np.zeros((23, 70), np.float32), "hidden_norm_weight": np.zeros(23, np.float32)}, r"kv_weight: expected shape \[L, N\*D \+ N\*Dv, hidden=23\]"),
        ({"fc_weight": np.zeros((24, 71), np.float32)}, r"fc_weight: expected shape \[hidden, features=70\]"),
        ({"hidden_norm_weight": np.zeros(25, np.float32)}, r"hidden_norm_weight: expected shape \[hidden=24\]"),
        ({"hidden_norm_eps": -1.0}, "hidden_norm_eps: expected a finite number >= 0"),
    ],
)
def test_errors_of_target_features(change, text):
    p = FeatureProblem(np.random.default_rng(22), features=70, hidden=24, T=4)
    p.kwargs |= change
    pools = p.pools()
    with pytest.raises(ValueError, match=text):
        run(p, pools)
    np.testing.assert_array_equal(raw(pools), raw(p.pools()))


def test_an_empty_call_does_nothing():
    p = Problem(np.random.default_rng(14), T=0)
    got = run(p, p.pools())
    np.testing.assert_array_equal(raw(got), raw(p.pools()))
    p = Problem(np.random.default_rng(14), T=4)
    p.loc = np.full(4, -1)
    np.testing.assert_array_equal(raw(run(p, p.pools())), raw(p.pools()))


def test_without_slots_row_i_goes_to_slot_i():
    p = Problem(np.random.default_rng(14), T=4)
    p.loc = None
    got = run(p, p.pools())
    p.loc = np.arange(4)
    np.testing.assert_array_equal(raw(got), raw(run(p, p.pools())))


def test_takes_read_only_inputs_and_refuses_read_only_pools():
    p = Problem(np.random.default_rng(15))
    for a in p.args():
        a.flags.writeable = False
    k, v = run(p, p.pools())
    k.flags.writeable = False
    with pytest.raises(ValueError, match="k_pool: expected a writable array"):
        run(p, [k, v])
    with pytest.raises(TypeError, match="materialize_into_pool: v_pool: expected an array that supports DLPack, got str"):
        run(p, [v, "pool"])


def broken(change):
    p = Problem(np.random.default_rng(16), io="fp32", L=2, T=6, hidden=24, N=2, D=8, R=8, slots=32, table=64)
    pools = p.pools()
    p.pool_list = pools
    change(p)
    return p


def put(name, value):
    return lambda p: setattr(p, name, value(p))


def kwarg(name, value):
    return lambda p: p.kwargs.__setitem__(name, value)


def poke(name, index, value):
    return lambda p: getattr(p, name).__setitem__(index, value)


OP = "materialize_into_pool: "
ERRORS = [
    (put("hidden", lambda p: p.hidden[0]), "ctx_hidden: expected shape [T, hidden], got (24,)."),
    (put("hidden", lambda p: p.hidden.astype(np.float64)), "ctx_hidden: expected dtype float32 or bfloat16 or float16, got float64."),
    (put("hidden", lambda p: p.hidden[:, :20]), "kv_weight: expected shape [L, N*D + N*Dv, hidden=20], got (2, 32, 24)."),
    (put("weight", lambda p: p.weight.astype(np.int8)), "kv_weight: expected dtype float32 or bfloat16 or float16, got int8."),
    (put("weight", lambda p: p.weight[:0]), "kv_weight: expected at least one layer, got shape (0, 32, 24)."),
    (put("weight", lambda p: p.weight[:, :31]), "kv_weight: expected N*D + N*Dv = 32 rows a layer, got 31."),
    (kwarg("kv_bias", np.zeros((2, 31), np.float32)), "kv_bias: expected shape [L=2, N*D + N*Dv=32], got (2, 31)."),
    (put("pool_list", lambda p: [x[:, :, :0] for x in p.pool_list]), "k_pool: expected at least one head, got 0."),
    (put("pool_list", lambda p: [p.pool_list[0], p.pool_list[1][..., :0]]), "v_pool: expected at least one channel, got 0."),
    (put("norm", lambda p: p.norm[:1]), "k_norm_weight: expected shape [L=2, D], got (1, 8)."),
    (put("eps", lambda p: p.eps.astype(np.float64)), "eps: expected dtype float32, got float64."),
    (put("eps", lambda p: p.eps[:1]), "eps: expected shape [L=2], got (1,)."),
    (put("eps", lambda p: np.array([1e-6, -1], np.float32)), "eps: expected finite numbers >= 0, got -1 at layer 1."),
    (put("rope", lambda p: p.rope[0]), "cos_sin_cache: expected shape [P, R], got (8,)."),
    (put("rope", lambda p: p.rope[None]), "cos_sin_cache: expected shape [L=2, P, R], got (1, 64, 8)."),
    (put("rope", lambda p: p.rope[:, :7]), "cos_sin_cache: expected an even rotary width of 2..8, got shape (64, 7)."),
    (put("rope", lambda p: np.tile(p.rope, 2)), "cos_sin_cache: expected an even rotary width of 2..8, got shape (64, 16)."),
    (put("rope", lambda p: p.rope[:, :0]), "cos_sin_cache: expected an even rotary width of 2..8, got shape (64, 0)."),
    (put("loc", lambda p: p.loc[:5]), "slot_mapping: expected shape [T=6], got (5,)."),
    (put("loc", lambda p: p.loc.astype(np.float32)), "slot_mapping: expected dtype int32 or int64, got float32."),
    (put("loc", lambda p: np.zeros((2, 2), int)), "slot_mapping: expected shape [b, W] with b * W = 6 rows of ctx_hidden, got (2, 2)."),
    (put("positions", lambda p: p.positions[:5]), "positions: expected shape [T=6], got (5,)."),
    (put("positions", lambda p: np.tile(p.positions, (3, 1))), "positions: expected shape [T=6], got (3, 6)."),
    (kwarg("commit_lens", np.array([1, 1])), "slot_mapping: expected shape [b, W], got (6,)."),
    (poke("loc", 3, 32), "slot_mapping: expected slots below 32, got 32 at row 3."),
    (poke("positions", 4, 64), "positions: expected rows of cos_sin_cache, 0..63, got 64 at row 4."),
    (poke("positions", 4, -1), "positions: expected rows of cos_sin_cache, 0..63, got -1 at row 4."),
    (kwarg("k_scale", 0.5), "k_scale: expected 1 for a pool of float32, got 0.5."),
    (kwarg("v_scale", np.ones(3, np.float32)), "v_scale: expected a number or shape [L=2], got (3,)."),
    (kwarg("v_scale", np.array([1, 0], np.float32)), "v_scale: expected a finite float32 > 0, got 0."),
    (kwarg("k_scale", np.ones(2, np.int32)), "k_scale: expected dtype float32 or float64, got int32."),
    (put("pool_list", lambda p: [p.pool_list[0][:1], p.pool_list[1]]), "k_pool: expected shape [2, slots, N, D=8], got (1, 32, 2, 8)."),
    (put("pool_list", lambda p: [p.pool_list[0][0], p.pool_list[1]]), "k_pool: expected one tensor [L, slots, N, D] or one [slots, N, D] for each of 2 layers, got shape (32, 2, 8)."),
    (put("pool_list", lambda p: [[], p.pool_list[1]]), "k_pool: expected a tensor, got none."),
    (put("pool_list", lambda p: [p.pool_list[0], list(p.pool_list[1]) * 2]), "v_pool: expected one tensor [L, slots, N, D] or one [slots, N, D] for each of 2 layers, got 4 tensors."),
    (put("pool_list", lambda p: [[p.pool_list[0][0]] * 2, p.pool_list[1]]), "k_pool: expected a tensor of its own for each layer, got memory that overlaps another layer's."),
    (put("pool_list", lambda p: [[p.pool_list[0][0], np.zeros((32, 2, 8), np.float16)], p.pool_list[1]]), "k_pool: expected dtype float32, got float16."),
    (put("pool_list", lambda p: [p.pool_list[0], p.pool_list[0]]), "v_pool: expected memory of its own, got memory that overlaps k_pool."),
    (put("pool_list", lambda p: [np.zeros((2, 32, 2, 8), np.int32), p.pool_list[1]]), "k_pool: expected dtype float32 or bfloat16 or float16 or float8_e4m3fn or uint8, got int32."),
    (put("pool_list", lambda p: [p.pool_list[0], p.pool_list[1][:, :31]]), "v_pool: expected shape [2, slots=32, N=2, Dv], got (2, 31, 2, 8)."),
    (put("hidden", lambda p: p.pool_list[0].reshape(-1)[: 6 * 24].reshape(6, 24)), "k_pool: expected memory of its own, got memory that overlaps ctx_hidden."),
    (put("weight", lambda p: draft_kv.KvProjection(p.weight[:, :, :20])), "ctx_hidden: expected shape [T, hidden=20], got (6, 24)."),
    (put("weight", lambda p: draft_kv.KvProjection(p.weight[:, :30])), "projection: expected N*D + N*Dv = 32 rows a layer, got 30."),
]  # fmt: skip


@pytest.mark.parametrize("change, text", ERRORS, ids=range(len(ERRORS)))
def test_errors_name_the_argument_and_write_nothing(change, text):
    p = broken(change)
    before = [raw(x).copy() for x in p.pool_list] if not any(isinstance(x, list) for x in p.pool_list) else None
    with pytest.raises(ValueError) as e:
        run(p, p.pool_list)
    assert str(e.value) == OP + text
    if before:
        for x, y in zip(p.pool_list, before):
            np.testing.assert_array_equal(raw(x), y)


def test_commit_length_errors():
    p = Problem(np.random.default_rng(17), T=6, window=3)
    for lens, text in [
        ([1, 4], "commit_lens: expected lengths in 0..3, got 4 at row 1."),
        ([-1, 2], "commit_lens: expected lengths in 0..3, got -1 at row 0."),
        ([1, 2, 3], "commit_lens: expected shape [b=2], got (3,)."),
    ]:
        pools = p.pools()
        with pytest.raises(ValueError) as e:
            run(p, pools, commit_lens=np.array(lens))
        assert str(e.value) == OP + text
        np.testing.assert_array_equal(raw(pools), raw(p.pools()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_fused_norm_rope_against_the_oracle(data):
    """The oracle projects with an identity, so that its projection is `kv` itself."""
    draw = lambda *values: data.draw(st.sampled_from(values))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    io, L, T, N, D = draw("fp32", "bf16", "fp16"), draw(1, 3), draw(1, 2, 7), draw(1, 3), draw(2, 6, 16, 46)
    R = 2 * data.draw(st.integers(1, D // 2))
    dtype = DTYPES[io]
    width = 2 * N * D
    kv = rng.standard_normal((T, L, width)).astype(np.float32).astype(dtype)
    norm = rng.standard_normal((L, D)).astype(np.float32).astype(dtype)
    eps = rng.choice(np.array([1e-6, 1e-2], np.float32), L)
    table = oracle.RopeTable(R, 1e4, 40).rows.astype(np.float32)
    positions = rng.integers(0, 40, T).astype(draw(np.int32, np.int64))
    k_out = v_out = None
    if draw(True, False):
        kv, norm, table = (strided(rng, x) for x in (kv, norm, table))
        k_out, v_out = (strided(rng, np.full((L, T, N, D), 7, dtype)) for _ in range(2))
    k, v = draft_kv.fused_norm_rope_stacked(kv, norm, eps, table, positions, N, D, R, k_out, v_out)
    assert k.dtype == dtype and k.shape == (L, T, N, D) and (k_out is None or k is k_out)
    for l in range(L):
        f8 = lambda x: np.asarray(x).astype(np.float64)
        want_k, want_v = oracle.materialize_arrays(
            f8(kv[:, l]), np.eye(width)[None], f8(norm[[l]]), f8(eps[[l]]), f8(table), positions, N, D, R, io
        )
        np.testing.assert_array_equal(f8(v[l]), want_v[0])
        assert units(k[l], want_k[0], io, rotary_pairs(want_k[0], R)).max() <= 1


def test_fused_norm_rope_equals_the_one_pass_form():
    """The same rows by both ways: one formula."""
    rng = np.random.default_rng(18)
    p = Problem(rng, io="bf16", L=3, T=9, D=16, R=4, hidden=40)
    k, v = run(p, p.pools())
    wide = p.pools(np.float32)
    f = lambda x: x.astype(np.float32)
    draft_kv.materialize_into_pool(f(p.hidden), f(p.weight), f(p.norm), p.eps, p.rope, p.positions, p.loc, *wide)
    eye = np.stack([np.concatenate([np.zeros((32, 32)), np.eye(32)])] * 1).astype(np.float32)  # K columns as V: unrotated
    projected = []
    for l in range(3):
        kv = np.concatenate([p.weight[l, :32], p.weight[l, :32]])[None]
        _, columns = p.pools(np.float32)[0][:1], np.zeros((1, p.slots, 2, 16), np.float32)
        scratch = np.zeros_like(columns)
        draft_kv.materialize_into_pool(f(p.hidden), f(kv), f(p.norm[[l]]), p.eps[[l]], p.rope, p.positions, p.loc, scratch, columns)
        projected.append(np.concatenate([columns[0, p.loc].reshape(9, 32), wide[1][l, p.loc].reshape(9, 32)], 1))
    stacked = np.stack(projected, 1).astype(DTYPES["bf16"])
    k2, v2 = draft_kv.fused_norm_rope_stacked(stacked, p.norm, p.eps, p.rope, p.positions, 2, 16, 4)
    np.testing.assert_array_equal(raw(k2), raw(k[:, p.loc]))
    np.testing.assert_array_equal(raw(v2), raw(v[:, p.loc]))


def fused_case(T=3, L=2, N=2, D=8, R=4):
    rng = np.random.default_rng(19)
    return {
        "kv": rng.standard_normal((T, L, 2 * N * D)).astype(np.float32),
        "k_norm_weight": np.ones((L, D), np.float32),
        "eps": np.full(L, 1e-6, np.float32),
        "cos_sin_cache": oracle.RopeTable(R, 1e4, 16).rows.astype(np.float32),
        "positions": np.arange(T),
        "num_kv_heads": N,
        "head_dim": D,
        "rotary_dim": R,
        "k_out": np.full((L, T, N, D), 7, np.float32),
        "v_out": np.full((L, T, N, D), 7, np.float32),
    }


Z = np.zeros
FUSED_ERRORS = [  # in the order in which they are looked at: each case also has every later fault
    ("kv", Z((3, 32), np.float32), "Invalid stacked fused KV projection shape: got (3, 32), expected 3D [total_ctx, n_layers, kv_size*2]."),
    ("kv", Z((3, 2, 30), np.float32), "Invalid fused KV projection shape: got (3, 2, 30), expected trailing dim 32."),
    ("rotary_dim", 10, "Invalid fused KV rotary/head dim pair: rotary_dim=10, head_dim=8."),
    ("k_norm_weight", Z((2, 7), np.float32), "Invalid stacked k_norm_weight shape for fused KV materialization: got (2, 7), expected (2, 8)."),
    ("eps", Z(3, np.float32), "Invalid stacked eps shape for fused KV materialization: got (3,), expected (2,)."),
    ("k_out", Z((2, 3, 2, 7), np.float32), "Invalid k_out shape for fused KV materialization: got (2, 3, 2, 7), expected (2, 3, 2, 8)."),
    ("k_out", Z((2, 3, 2, 8), np.float16), "Invalid k_out device/dtype for fused KV materialization: got device=cpu, dtype=float16, expected device=cpu, dtype=float32."),
    ("v_out", Z((2, 3, 2, 7), np.float32), "Invalid v_out shape for fused KV materialization: got (2, 3, 2, 7), expected (2, 3, 2, 8)."),
    ("v_out", Z((2, 3, 2, 8), np.float16), "Invalid v_out device/dtype for fused KV materialization: got device=cpu, dtype=float16, expected device=cpu, dtype=float32."),
    ("cos_sin_cache", Z((16, 8), np.float32), "fused_norm_rope_stacked: cos_sin_cache: expected shape [P, 4], got (16, 8)."),
    ("positions", Z(4, np.int64), "fused_norm_rope_stacked: positions: expected shape [3], got (4,)."),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(FUSED_ERRORS)))
def test_fused_norm_rope_texts_in_order(at):
    case = fused_case()
    for name, value, _ in reversed(FUSED_ERRORS[at:]):
        case[name] = value
    with pytest.raises(ValueError) as e:
        draft_kv.fused_norm_rope_stacked(**case)
    assert str(e.value) == FUSED_ERRORS[at][2]


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("rotary_dim", 0, "Invalid fused KV rotary/head dim pair: rotary_dim=0, head_dim=8."),
        ("rotary_dim", 3, "Invalid fused KV rotary/head dim pair: rotary_dim=3, head_dim=8."),
        ("positions", np.array([0, 16, 1]), "fused_norm_rope_stacked: positions: expected rows of cos_sin_cache, 0..15, got 16 at row 1."),
        ("positions", np.array([0, 1, -1]), "fused_norm_rope_stacked: positions: expected rows of cos_sin_cache, 0..15, got -1 at row 2."),
        ("positions", np.zeros(3), "fused_norm_rope_stacked: positions: expected dtype int32 or int64, got float64."),
        ("kv", np.zeros((3, 2, 32)), "Invalid k_out device/dtype for fused KV materialization: got device=cpu, dtype=float32, expected device=cpu, dtype=float64."),
        ("num_kv_heads", 0, "fused_norm_rope_stacked: num_kv_heads: expected at least 1, got 0."),
        ("head_dim", 0, "fused_norm_rope_stacked: head_dim: expected at least 1, got 0."),
    ],
)  # fmt: skip
def test_fused_norm_rope_other_errors(name, value, text):
    case = fused_case()
    case[name] = value
    with pytest.raises(ValueError) as e:
        draft_kv.fused_norm_rope_stacked(**case)
    assert str(e.value) == text
    assert (case["k_out"] == 7).all() and (case["v_out"] == 7).all()


def test_fused_norm_rope_of_no_tokens():
    """Two empty arrays, before anything but the rank is looked at."""
    case = fused_case() | {"kv": Z((0, 2, 32), np.float32), "k_out": None, "v_out": None, "eps": Z(9, np.float32), "rotary_dim": 99}
    k, v = draft_kv.fused_norm_rope_stacked(**case)
    assert k.shape == v.shape == (2, 0, 2, 8)


def test_nothing_to_project():
    """Neither features nor heads: an error, not a division by zero."""
    f = np.float32
    rest = (np.ones((1, 4), f), np.ones(1, f), np.ones((6, 4), f), np.arange(4, dtype=np.int32), None)
    for features, rows, heads, name in ((8, 0, 0, "k_pool"), (0, 8, 1, "ctx_hidden")):
        pools = np.zeros((1, 9, heads, 4), f), np.zeros((1, 9, heads, 4), f)
        with pytest.raises(ValueError, match=f"materialize_into_pool: {name}: expected at least one"):
            draft_kv.materialize_into_pool(np.ones((4, features), f), np.ones((1, rows, features), f), *rest, *pools)
        with pytest.raises(ValueError, match="kv_weight: expected at least one row and one feature"):
            draft_kv.KvProjection(np.ones((1, rows, features), f))
