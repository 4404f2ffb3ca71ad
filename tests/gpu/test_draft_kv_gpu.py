"""materialize_into_pool, the helper and the launch function on a GPU: the CPU's cases against the same oracle, and what must hold to
the bit between any two ways to make the same rows."""

import conftest
import ml_dtypes
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import draft_kv as oracle  # noqa: E402
import torch  # noqa: E402
from draft_kv_cases import DTYPES, FP8, Problem, raw, rotary_pairs, units  # noqa: E402
from draft_kv_on_gpu import assert_pools, cpu, gpu, keys_as_values, run  # noqa: E402

import specstate.draft_kv as draft_kv  # noqa: E402

FAST = dict(hidden=512, D=128, R=128)
SHAPES = [
    dict(io="bf16", L=2, T=1, N=2, **FAST),
    dict(io="bf16", L=2, T=64, N=2, **FAST),
    dict(io="bf16", L=1, T=65, N=1, **FAST),
    dict(io="bf16", L=2, T=200, N=2, **FAST),
    dict(io="fp16", L=2, T=33, N=2, **FAST),
    dict(io="bf16", L=3, T=40, N=1, hidden=640, D=64, R=64),
    dict(io="bf16", L=3, T=150, N=3, hidden=576, D=64, R=32),
    dict(io="bf16", L=2, T=20, N=2, hidden=512, D=128, R=64),
    dict(io="bf16", L=2, T=130, N=2, hidden=512, D=128, R=32),
    dict(io="bf16", L=1, T=70, N=2, hidden=512, D=64, R=16),
    dict(io="bf16", L=40, T=3, N=1, hidden=512, D=64, R=64),  # more layers than a launch names
    dict(io="bf16", L=2, T=40, N=4, hidden=512, D=256, R=64),  # heads that no epilogue knows
    dict(io="fp16", L=3, T=150, N=3, hidden=576, D=96, R=96),
    dict(io="bf16", L=1, T=300, N=2, hidden=640, D=128, R=48),
    dict(io="fp32", L=2, T=37, N=2, hidden=33, D=46, R=20),
    dict(io="bf16", L=2, T=17, N=3, hidden=24, D=8, R=6),
    dict(io="fp16", L=2, T=9, N=1, hidden=5, D=80, R=80),
    dict(io="fp32", L=2, T=5, N=2, hidden=512, D=128, R=128, weight="bf16"),
]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("variant", ["plain", "bias", "window", "rounded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_oracle(shape, variant, neox):
    rng = np.random.default_rng(1)
    shape = dict(shape)
    if variant == "window":
        shape["T"] = (shape["T"] + 3) // 4 * 4
    p = Problem(rng, slots=shape["T"] + 40, bias=variant == "bias", window=4 if variant == "window" else None, **shape)
    p.loc = np.where(rng.random(p.loc.shape) < 0.2, -3, p.loc)
    extra = {"is_neox_style": neox, "round_after_norm": variant == "rounded"}
    assert_pools(p, run(keys_as_values(p), **extra), neox, variant == "rounded")


def test_strides_and_index_types():
    from draft_kv_cases import strided

    for index in (np.int32, np.int64):
        rng = np.random.default_rng(3)
        p = Problem(rng, io="bf16", L=2, T=24, hidden=512, D=64, R=64, slots=60, window=8)
        want = run(p)
        p.positions, p.loc = p.positions.astype(index), p.loc.astype(index)
        p.kwargs["commit_lens"] = p.kwargs["commit_lens"].astype(index)
        for name in ("positions", "loc", "eps", "norm"):
            setattr(p, name, strided(rng, getattr(p, name)))
        p.kwargs = {name: strided(rng, x) for name, x in p.kwargs.items()}
        pools = [strided(rng, x) for x in p.pools()]
        got = run(p, pools)
        for a, b in zip(got, want):
            np.testing.assert_array_equal(raw(a), raw(b))


@pytest.mark.parametrize("hidden", [512, 4096, 7168])
def test_widths_that_are_served(hidden):
    """Tens of thousands of elements each: all but one in a thousand are the rounding of the exact value, in both kernels."""
    p = keys_as_values(Problem(np.random.default_rng(5), io="bf16", L=1, T=160, hidden=hidden, N=4, D=128, R=128, slots=160))
    assert_pools(p, run(p))
    p.hidden, p.positions, p.loc = p.hidden[:64], p.positions[:64], p.loc[:64]
    assert_pools(p, run(p))


@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_pages(page):
    """Slots by a table of pages in any order."""
    rng = np.random.default_rng(6)
    T, pages = 200, 200 // page + 3
    p = keys_as_values(Problem(rng, io="bf16", L=2, T=T, hidden=512, N=2, D=128, R=128, slots=pages * page))
    table = rng.permutation(pages)
    position = np.arange(T)
    p.loc = table[position // page] * page + position % page
    assert_pools(p, run(p))


@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize("pool", [FP8, np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float16)])
def test_pools_of_another_type_hold_the_same_values_rounded_once_more(io, pool):
    for T in (10, 100):
        rng = np.random.default_rng(7)
        p = Problem(rng, io=io, L=3, T=T, hidden=512, D=64, R=64, N=1, slots=T + 4)
        p.norm[0, :4] *= 900  # beyond 448
        k, v = run(p)
        fp8 = pool.itemsize == 1
        for scale in (None, 0.5, np.array([0.25, 1.7, 8.0], np.float32)) if fp8 else (None,):
            got = run(p, p.pools(pool), k_scale=scale, v_scale=scale)
            numbers = np.broadcast_to(np.float32(1 if scale is None else scale), (3,))
            for target, source in zip(got, (k, v)):
                for l in range(3):
                    value = source[l, p.loc].astype(np.float32) / numbers[l]
                    if fp8:
                        np.testing.assert_array_equal(target[l, p.loc].view(np.uint8), oracle.e4m3_encode(value))
                    else:
                        np.testing.assert_array_equal(target[l, p.loc], value.astype(pool))


def test_fp8_keeps_nan_and_saturates_infinity():
    p = Problem(np.random.default_rng(8), io="bf16", L=1, T=2, hidden=512, D=64, R=64, N=1)
    p.hidden[0], p.weight[0, 64:, 0] = np.nan, 1e38
    p.hidden[1, 0] = 1e30
    codes = run(p, p.pools(FP8))[1][0, p.loc].view(np.uint8)
    assert (codes[0] & 0x7F == 0x7F).all() and (codes[1] & 0x7F == 0x7E).all()


@pytest.mark.parametrize("shape", [dict(io="bf16", hidden=1024, D=128, R=128), dict(io="bf16", hidden=576, D=64, R=32), dict(io="fp32", hidden=72, D=16, R=16)], ids=str)
def test_incremental_equals_one_shot_bit_for_bit(shape):
    """Any way to cut the rows into calls, whichever kernel takes them, leaves the same bytes."""
    rng = np.random.default_rng(9)
    p = Problem(rng, L=2, T=1500, slots=1500, **shape)
    want = run(p)
    inputs = [gpu(x) for x in p.args()]
    for pieces in (1, 7, 64, 65, 129, 1100):
        pools = [gpu(x) for x in p.pools()]
        order = torch.from_numpy(rng.permutation(1500)).cuda()
        for begin in range(0, 1500, pieces):
            rows = order[begin : begin + pieces]
            draft_kv.materialize_into_pool(inputs[0][rows], *inputs[1:5], inputs[5][rows], inputs[6][rows], *pools)
            if pieces < 64 and begin > 20 * pieces:
                break
        done = p.loc[order[: begin + pieces].cpu().numpy()]
        for a, b in zip(pools, want):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)[:, done]), raw(b[:, done]))


def test_a_hundred_runs_are_equal():
    p = Problem(np.random.default_rng(9), io="bf16", L=2, T=60, hidden=1024, D=128, R=128, slots=64)
    inputs, pools = [gpu(x) for x in p.args()], [gpu(x) for x in p.pools()]
    draft_kv.materialize_into_pool(*inputs, *pools)
    want = [x.clone() for x in pools]
    busy, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(100):
        for x in pools:
            x.view(torch.uint8).fill_(i)
        with torch.cuda.stream(side):
            busy @ busy
        draft_kv.materialize_into_pool(*inputs, *pools)
        for a, b in zip(pools, want):
            assert torch.equal(a[:, p.loc].view(torch.int16), b[:, p.loc].view(torch.int16))


@pytest.mark.parametrize("T", [32, 320, 2000, 9000])
def test_rejected_rows_have_no_say(T):
    rng = np.random.default_rng(10)
    p = Problem(rng, io="bf16", T=T, window=8, hidden=512, D=64, R=64, slots=T)
    p.kwargs["commit_lens"] = rng.integers(0, 9, T // 8)
    want = run(p)
    rejected = np.setdiff1d(np.arange(T), p.written())
    p.hidden[rejected] = np.nan
    p.positions[rejected] = np.iinfo(np.int64).max
    p.loc.reshape(-1)[rejected] = 10**12
    for a, b in zip(run(p), want):
        np.testing.assert_array_equal(raw(a), raw(b))


@pytest.mark.parametrize("T", [60, 400, 5000])
def test_of_rows_with_one_slot_the_last_stands(T):
    rng = np.random.default_rng(11)
    p = Problem(rng, io="bf16", T=T, slots=7, hidden=512, D=64, R=64)
    p.loc = rng.integers(0, 7, T)
    got = run(p)
    last = np.array([np.flatnonzero(p.loc == slot)[-1] for slot in range(7)])
    p.hidden, p.positions, p.loc = p.hidden[last], p.positions[last], p.loc[last]
    for a, b in zip(got, run(p)):
        np.testing.assert_array_equal(raw(a), raw(b))


@pytest.mark.parametrize("T", [200, 520, 1040, 9000])
@pytest.mark.parametrize("D", [64, 128])
def test_of_committed_rows_with_one_slot_the_last_stands(T, D):
    """Also across the rounds in which long calls are done."""
    rng = np.random.default_rng(15)
    p = Problem(rng, io="bf16", T=T, window=8, slots=T, hidden=512, D=D, R=64)
    p.kwargs["commit_lens"] = rng.integers(0, 9, T // 8)
    p.loc[:] = rng.permutation(T // 3 + 1)[np.arange(T).reshape(p.loc.shape) % (T // 3 + 1)]
    got, rows = run(p), p.written()
    slots = p.loc.reshape(-1)[rows]
    last = np.array([rows[np.flatnonzero(slots == slot)[-1]] for slot in np.unique(slots)])
    p.loc.reshape(-1)[np.setdiff1d(np.arange(T), last)] = -1
    for a, b in zip(got, run(p)):
        np.testing.assert_array_equal(raw(a), raw(b))


def test_more_features_than_wide_places_hold():
    """20 544 features of 24 rows: places of 192 columns would have no room for a stage beside the sums of 24 runs."""
    L, N, D, H, T = 6, 8, 128, 20544, 24
    torch.manual_seed(1)
    make = lambda *shape: torch.randn(*shape, device="cuda").to(torch.bfloat16)
    x, weight, norm = make(T, H), make(L, 2 * N * D, H), make(L, D)
    eps, table = torch.full((L,), 1e-6, device="cuda"), torch.rand(64, D, device="cuda")
    at = torch.arange(T, device="cuda")
    pools = [torch.zeros(L, T, N, D, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    draft_kv.materialize_into_pool(x, weight, norm, eps, table, at, at, *pools[:2])
    for rows in (slice(0, 8), slice(8, 24)):
        draft_kv.materialize_into_pool(x[rows], weight, norm, eps, table, at[rows], at[rows], *pools[2:])
    assert bool(pools[0].any()) and torch.equal(pools[0], pools[2]) and torch.equal(pools[1], pools[3])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_v_may_be_wider_than_k(dtype):
    rng = np.random.default_rng(12)
    L, T, H, N, D, Dv = 2, 5, 512, 2, 64, 80
    p = Problem(rng, io=dtype, L=L, T=T, hidden=H, N=N, D=D, R=D)
    p.weight = (rng.standard_normal((L, N * D + N * Dv, H)) / 20).astype(np.float32).astype(DTYPES[dtype])
    k, v = p.pools()[0], np.zeros((L, p.slots, N, Dv), DTYPES[dtype])
    gk, gv = run(p, [k, v])
    draft_kv.materialize_into_pool(*p.args(), k, v)  # the CPU
    assert units(gk[:, p.loc], k[:, p.loc], dtype, rotary_pairs(k[:, p.loc].astype(np.float64), D)).max() <= 2
    if dtype == "fp32":  # the CPU's chain
        np.testing.assert_array_equal(raw(gv), raw(v))
    assert units(gv[:, p.loc], v[:, p.loc], dtype, abs(v[:, p.loc].astype(np.float64))).max() <= 1


@pytest.mark.parametrize("shape", [dict(io="bf16", hidden=512, D=128, R=128), dict(io="fp32", hidden=24, D=8, R=8)], ids=str)
def test_rows_that_cannot_be_written_are_left_out_and_reported_once(shape):
    """A position at, behind and before the ends of the table, and a slot behind the pool: their neighbours are right."""
    for T in (8, 80):
        p = Problem(np.random.default_rng(13), T=T, slots=T + 8, table=64, **shape)
        p.positions[:4], p.loc[5] = (63, 64, -1, 2**31 - 1), 10**11
        bad = [1, 2, 3, 5]
        pools = [gpu(x) for x in p.pools()]
        inputs = [gpu(x) for x in p.args()]
        draft_kv.materialize_into_pool(*inputs, *pools)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="positions: expected rows of cos_sin_cache, got one outside in an earlier call"):
            draft_kv.materialize_into_pool(*inputs, *pools)
        draft_kv.raise_pending_error(pools[0])
        good = np.setdiff1d(np.arange(T), bad)
        q = Problem.__new__(Problem)
        q.__dict__.update(p.__dict__)
        q.hidden, q.positions, q.loc = p.hidden[good], p.positions[good], p.loc[good]
        for a, b in zip(pools, run(q)):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b))


def test_scales_on_the_gpu_and_numbers():
    p = Problem(np.random.default_rng(14), io="bf16", L=2, T=9, hidden=512, D=64, R=64)
    want = run(p, p.pools(FP8), k_scale=np.array([2.0, 2.0], np.float32), v_scale=np.array(2.0, np.float64))
    got = run(p, p.pools(FP8), k_scale=2.0, v_scale=2.0)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(raw(a), raw(b))
    with pytest.raises(ValueError, match="k_scale: expected 1 for a pool of bfloat16, got 2"):
        run(p, k_scale=2.0)


@pytest.mark.parametrize("T", [16, 256, 3000])
def test_a_graph_replays_with_new_inputs(replayed, T):
    rng = np.random.default_rng(15)
    make = lambda: Problem(rng, io="bf16", L=2, T=T, hidden=512, D=128, R=128, slots=T + 30, window=8)
    p = make()
    inputs, pools = [gpu(x) for x in p.args()], [gpu(x) for x in p.pools()]
    commit = gpu(p.kwargs["commit_lens"])
    replay = replayed(lambda: draft_kv.materialize_into_pool(*inputs, *pools, commit_lens=commit))
    for _ in range(3):
        p = make()
        for old, new in zip([*inputs, commit, *pools], [*p.args(), p.kwargs["commit_lens"], *p.pools()]):
            old.copy_(gpu(new))
        replay()
        for a, b in zip(pools, run(p)):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b))


def test_slots_beyond_two_to_the_31_elements():
    """int32 and int64 slot ids of a pool whose element offsets do not fit 32 bits."""
    slots = 2_200_000
    p = Problem(np.random.default_rng(16), io="bf16", L=1, T=4, N=8, hidden=512, D=128, R=128)
    p.loc = np.array([slots - 1, 0, 2**21 + 5, 1_111_111])
    k, v = (torch.full((1, slots, 8, 128), 3.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for index in (torch.int32, torch.int64):
        for T in (4, 100):
            k.fill_(3.0), v.fill_(3.0)
            args = [gpu(x) for x in p.args()]
            args[6] = args[6].to(index)
            if T > 4:  # the other kernel: the same rows, and many that are skipped
                args[0] = torch.cat([args[0], torch.full((T - 4, 512), float("nan"), dtype=torch.bfloat16, device="cuda")])
                args[5], args[6] = torch.cat([args[5], torch.zeros(T - 4, dtype=args[5].dtype, device="cuda")]), torch.cat([args[6], torch.full((T - 4,), -1, dtype=index, device="cuda")])
            draft_kv.materialize_into_pool(*args, k, v)
            small = Problem.__new__(Problem)
            small.__dict__.update(p.__dict__)
            small.loc, small.slots = np.arange(4), 4
            for a, b in zip((k, v), run(small)):
                assert torch.equal(a[0, p.loc].cpu(), gpu(b[0]).cpu())
                assert int((a != 3.0).any(-1).any(-1).sum()) == 4


def test_a_long_call_takes_one_bounded_workspace():
    rng = np.random.default_rng(17)
    draft_kv._workspaces.clear()
    for T in (2000, 20000):
        p = Problem(rng, io="bf16", L=1, T=T, N=1, hidden=512, D=64, R=64, slots=T, table=64)
        inputs, pools = [gpu(x) for x in p.args()], [gpu(x) for x in p.pools()]
        draft_kv.materialize_into_pool(*inputs, *pools)
        for begin in range(0, T, 64):  # no call of these needs one
            rows = slice(begin, begin + 64)
            again = [x.clone() for x in pools]
            draft_kv.materialize_into_pool(inputs[0][rows], *inputs[1:5], inputs[5][rows], inputs[6][rows], *again)
            assert all(torch.equal(a, b) for a, b in zip(pools, again))
    assert [w.shape[0] for w in draft_kv._workspaces.values()] == [8192 * 16 + 256 + 108 * 64 + 72 * 3 * 49_152 + 8192 * 512 * 2]


class Layer:
    def __init__(self, p, l, rotary):
        q_size, kv = 3 * p.D, p.N * p.D
        self.self_attn = self
        self.num_kv_heads, self.head_dim, self.q_size, self.kv_size, self.rotary_emb = p.N, p.D, q_size, kv, rotary
        weight = torch.zeros((q_size + 2 * kv, p.hidden.shape[1]), dtype=torch.bfloat16, device="cuda")
        weight[q_size:] = gpu(p.weight[l])
        self.qkv_proj = type("", (), {"weight": weight})()
        self.k_norm = type("", (), {"weight": gpu(p.norm[l]), "variance_epsilon": float(p.eps[l])})()


@pytest.mark.parametrize("T", [5, 300])
def test_the_helper_makes_the_rows_of_the_one_call(T, replayed):
    p = Problem(np.random.default_rng(18), io="bf16", L=3, T=T, N=2, hidden=512, D=128, R=128, slots=T, table=128)
    p.loc = np.arange(T)
    want = run(p)
    rotary = type("", (), {"cos_sin_cache": gpu(p.rope), "rotary_dim": 128, "is_neox_style": True})()
    layers = [Layer(p, l, rotary) for l in range(3)]
    hidden, positions = gpu(p.hidden), gpu(p.positions)
    for hint in (None, 100):
        helper = draft_kv.FusedKVMaterializeHelper(layers, rotary, 2, 128, "cuda", hint)
        got = {}
        helper.materialize(hidden, positions, lambda l, k, v: got.__setitem__(l, (k.clone(), v.clone())))
        assert list(got) == [0, 1, 2]
        for l in range(3):
            for a, b in zip(got[l], want):
                np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b[l]))
    # In a graph, with weights that change in place.
    replay = replayed(lambda: helper.materialize(hidden, positions, lambda l, k, v: got.__setitem__(l, (k, v))))
    p.weight = (p.weight.astype(np.float32) * 0.5 + 0.01).astype(p.weight.dtype)
    for l in range(3):
        layers[l].qkv_proj.weight[3 * p.D :] = gpu(p.weight[l])
    helper.refresh_weights()
    replay()
    for l in range(3):
        for a, b in zip(got[l], run(p)):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b[l]))
    # A position outside: at once without a hint, at the next call with one.
    positions[0] = 128
    with pytest.raises(RuntimeError, match="max_position=128, cache_len=128"):
        draft_kv.FusedKVMaterializeHelper(layers, rotary, 2, 128, "cuda").materialize(hidden, positions, lambda *_: None)
    helper.materialize(hidden, positions, lambda *_: None)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="positions"):
        helper.materialize(hidden, positions, lambda *_: None)


@pytest.mark.parametrize("io", ["bf16", "fp32"])
def test_the_helper_follows_its_weights_and_takes_what_sglang_takes(io):
    """Counted writes, new tensors, writes behind torch's back; biases; features of another type; positions of two dimensions; no tokens."""
    p = Problem(np.random.default_rng(19), io="bf16", L=2, T=12, N=2, hidden=512, D=64, R=64, slots=12, table=128, bias=True)
    p.loc = np.arange(12)
    rotary = type("", (), {"cos_sin_cache": gpu(p.rope), "rotary_dim": 64, "is_neox_style": True})()
    layers = [Layer(p, l, rotary) for l in range(2)]
    for l, layer in enumerate(layers):
        layer.qkv_proj.bias = torch.cat([torch.zeros(3 * 64, dtype=torch.bfloat16, device="cuda"), gpu(p.kwargs["kv_bias"][l])])
    helper = draft_kv.FusedKVMaterializeHelper(layers, rotary, 2, 64, "cuda", 100)
    hidden, positions = gpu(p.hidden).to(torch.float32 if io == "fp32" else torch.bfloat16), gpu(p.positions).reshape(3, 4)

    def check():
        got = []
        helper.materialize(hidden, positions, lambda l, k, v: got.append((l, k, v)))
        assert [x[0] for x in got] == [0, 1]
        for l, *kv in got:
            for a, b in zip(kv, run(p)):
                np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b[l]))

    check()
    layers[1].qkv_proj.weight[3 * 64 :] *= 0.5  # counted
    p.weight[1] = (p.weight[1].astype(np.float32) * 0.5).astype(p.weight.dtype)
    check()
    layers[0].qkv_proj.weight = layers[0].qkv_proj.weight * 2  # another tensor
    p.weight[0] = (p.weight[0].astype(np.float32) * 2).astype(p.weight.dtype)
    check()
    layers[0].k_norm.weight.data.mul_(2)  # not counted
    p.norm[0] = (p.norm[0].astype(np.float32) * 2).astype(p.norm.dtype)
    helper.refresh_weights()
    check()
    helper.materialize(hidden[:0], positions.reshape(-1)[:0], lambda *_: pytest.fail("called for no tokens"))


def test_an_empty_call_and_packed_weights():
    p = Problem(np.random.default_rng(20), io="bf16", T=6, hidden=512, D=64, R=64, bias=True)
    want = run(p)
    bias = p.kwargs.pop("kv_bias")
    packed = draft_kv.KvProjection(gpu(p.weight), gpu(bias))
    pools = [gpu(x) for x in p.pools()]
    inputs = [gpu(x) for x in p.args()]
    inputs[1] = packed
    draft_kv.materialize_into_pool(*inputs, *pools)
    for a, b in zip(pools, want):
        np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b))
    before = [x.clone() for x in pools]
    draft_kv.materialize_into_pool(inputs[0][:0], packed, *inputs[2:5], inputs[5][:0], inputs[6][:0], *pools)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(pools, before))
    with pytest.raises(ValueError, match="either packed or plain weights, got both"):
        draft_kv.materialize_into_pool(*inputs, *pools, kv_bias=gpu(bias))
