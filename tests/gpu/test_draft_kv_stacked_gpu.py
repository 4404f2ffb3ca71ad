"""fused_norm_rope_stacked on a GPU: the oracle's K within one unit, V bit for bit, and the bytes of the one-pass form."""

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import draft_kv as oracle  # noqa: E402
import torch  # noqa: E402
from draft_kv_cases import DTYPES, Problem, raw, rotary_pairs, strided, units  # noqa: E402
from draft_kv_on_gpu import cpu, gpu, run  # noqa: E402

import specstate.draft_kv as draft_kv  # noqa: E402

SHAPES = [  # io, T, L, N, D, R
    ("bf16", 1, 5, 8, 128, 128),
    ("bf16", 300, 5, 8, 128, 128),
    ("fp16", 33, 2, 3, 64, 64),
    ("fp32", 33, 3, 1, 128, 128),
    ("bf16", 40, 2, 2, 128, 64),
    ("bf16", 40, 2, 2, 128, 96),
    ("fp16", 7, 1, 3, 96, 32),
    ("bf16", 19, 2, 5, 80, 80),
    ("bf16", 19, 2, 5, 80, 48),
    ("bf16", 5, 2, 1, 256, 256),
    ("fp32", 5, 2, 3, 512, 128),
    ("bf16", 9, 3, 2, 16, 16),
    ("bf16", 11, 2, 3, 46, 20),
    ("fp32", 11, 2, 3, 6, 4),
    ("fp16", 70, 1, 1, 128, 40),
]


def case(rng, io, T, L, N, D, R, table=64):
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32).astype(DTYPES[io])
    return [draw((T, L, 2 * N * D)), draw((L, D)), rng.choice(np.array([1e-6, 1e-2], np.float32), L),
            oracle.RopeTable(R, 1e4, table).rows.astype(np.float32), rng.integers(0, table, T), N, D, R]  # fmt: skip


def on_gpu(arguments, k_out=None, v_out=None):
    k, v = draft_kv.fused_norm_rope_stacked(*(gpu(x) for x in arguments), k_out, v_out)
    torch.cuda.synchronize()
    draft_kv.raise_pending_error(k)
    dtype = arguments[0].dtype
    return cpu(k, dtype), cpu(v, dtype)


def assert_right(arguments, k, v, io):
    kv, norm, eps, table, positions, N, D, R = arguments
    f8 = lambda x: np.asarray(x).astype(np.float64)
    for l in range(kv.shape[1]):
        want_k, want_v = oracle.materialize_arrays(f8(kv[:, l]), np.eye(2 * N * D)[None], f8(norm[[l]]), f8(eps[[l]]), f8(table), positions, N, D, R, io)
        np.testing.assert_array_equal(f8(v[l]), want_v[0])
        off = units(k[l], want_k[0], io, rotary_pairs(want_k[0], R))
        assert off.max() <= 1, off.max()
        if io != "fp32":  # float32 in between: all but a few are the rounding of the exact value
            assert (off != 0).sum() <= max(2, 0.001 * off.size), (off != 0).mean()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["dense", "strided", "float32 norm"])
def test_against_the_oracle(shape, variant):
    rng = np.random.default_rng(1)
    io, T, L, N, D, R = shape
    arguments = case(rng, *shape)
    if variant == "float32 norm":
        arguments[1] = arguments[1].astype(np.float32)
    outs = [None, None]
    if variant == "strided":
        arguments[:5] = [strided(rng, x) for x in arguments[:5]]
        outs = [gpu(strided(rng, np.full((L, T, N, D), 7, DTYPES[io]))) for _ in range(2)]
    assert_right(arguments, *on_gpu(arguments, *outs), io)


def test_views_of_larger_arrays_keep_their_surroundings():
    """kv inside a wider projection, the results inside pools: in 16-byte pieces, and nothing beside them is written."""
    rng = np.random.default_rng(2)
    arguments = case(rng, "bf16", 50, 3, 2, 128, 128)
    kv = arguments[0]
    wide = np.full((50, 5, 640), 9, kv.dtype)
    wide[:, 1:4, 64:576] = kv
    poison = torch.full((2, 3, 60, 3, 136), 5.0, dtype=torch.bfloat16, device="cuda")
    k, v = (poison[i][:, 4:54, 1:, 8:] for i in range(2))
    k, v = draft_kv.fused_norm_rope_stacked(gpu(wide)[:, 1:4, 64:576], *(gpu(x) for x in arguments[1:]), k, v)
    want = on_gpu(arguments)
    for a, b in zip((k, v), want):
        np.testing.assert_array_equal(raw(cpu(a.contiguous(), kv.dtype)), raw(b))
    k.fill_(5.0), v.fill_(5.0)
    assert bool((poison == 5.0).all())


@pytest.mark.parametrize("shape", [("bf16", 64, 64), ("bf16", 128, 128), ("bf16", 128, 32), ("fp16", 128, 64)], ids=str)
def test_the_bytes_of_the_one_pass_form(shape):
    """Of weights that are an identity the projection is the features, and both ways end in the same pool bytes."""
    io, D, R = shape
    N, T = 512 // D, 90
    p = Problem(np.random.default_rng(3), io=io, L=1, T=T, N=N, D=D, R=R, hidden=512, slots=T)
    p.weight = np.concatenate([np.eye(512), np.eye(512)])[None].astype(np.float32).astype(DTYPES[io])
    p.loc = np.arange(T)
    want = run(p)
    kv = np.concatenate([p.hidden, p.hidden], 1)[:, None]
    for a, b in zip(on_gpu([kv, p.norm, p.eps, p.rope, p.positions, N, D, R]), want):
        np.testing.assert_array_equal(raw(a), raw(b))


def test_no_row_depends_on_the_others_and_graphs_replay(replayed):
    rng = np.random.default_rng(4)
    shape = ("bf16", 130, 2, 2, 128, 128)
    arguments = case(rng, *shape)
    inputs = [gpu(x) for x in arguments]
    k, v = (torch.full((2, 130, 2, 128), 3.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    replay = replayed(lambda: draft_kv.fused_norm_rope_stacked(*inputs, k, v))
    for _ in range(3):
        arguments = case(rng, *shape)
        for old, new in zip(inputs[:5], arguments[:5]):
            old.copy_(gpu(new))
        k.fill_(3.0), v.fill_(3.0)
        replay()
        for a, b in zip((k, v), on_gpu(arguments)):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b))
        some = rng.permutation(130)[:17]
        part = on_gpu([arguments[0][some], *arguments[1:4], arguments[4][some], *arguments[5:]])
        for a, b in zip((k, v), part):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)[:, some]), raw(b))


@pytest.mark.parametrize("D", [128, 46])
def test_positions_outside_leave_their_rows_and_are_reported_once(D):
    arguments = case(np.random.default_rng(5), "bf16", 6, 2, 2, D, D if D == 128 else 20)
    arguments[4] = np.array([0, 64, 1, -1, 2**40, 63])
    k, v = (torch.full((2, 6, 2, D), 3.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    inputs = [gpu(x) for x in arguments]
    draft_kv.fused_norm_rope_stacked(*inputs, k, v)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="positions: expected rows of cos_sin_cache, got one outside in an earlier call"):
        draft_kv.raise_pending_error(k)
    draft_kv.raise_pending_error(k)
    bad, good = [1, 3, 4], [0, 2, 5]
    assert bool((k[:, bad] == 3.0).all()) and bool((v[:, bad] == 3.0).all())
    want = on_gpu([arguments[0][good], *arguments[1:4], arguments[4][good], *arguments[5:]])
    for a, b in zip((k, v), want):
        np.testing.assert_array_equal(raw(cpu(a[:, good], b.dtype)), raw(b))


def test_more_values_than_32_bits_count():
    T, L, N, D = 220_000, 5, 8, 128
    kv = torch.zeros(T, L, 2 * N * D, dtype=torch.bfloat16, device="cuda")
    assert kv.numel() > 2**31
    rows = [0, 1, 109_226, T - 2, T - 1]
    arguments = case(np.random.default_rng(6), "bf16", len(rows), L, N, D, D)
    kv[rows] = gpu(arguments[0])
    positions = torch.zeros(T, dtype=torch.int64, device="cuda")
    positions[rows] = gpu(arguments[4])
    k, v = draft_kv.fused_norm_rope_stacked(kv, *(gpu(x) for x in arguments[1:4]), positions, N, D, D)
    for a, b in zip((k, v), on_gpu(arguments)):
        np.testing.assert_array_equal(raw(cpu(a[:, rows], b.dtype)), raw(b))
    assert not bool(v[:, 2:109_226].any()) and not bool(k[:, 109_227:-2].any())


def test_an_empty_call():
    arguments = [gpu(x) for x in case(np.random.default_rng(7), "bf16", 2, 3, 2, 64, 64)]
    k, v = draft_kv.fused_norm_rope_stacked(arguments[0][:0], *arguments[1:4], arguments[4][:0], *arguments[5:])
    assert k.shape == v.shape == (3, 0, 2, 64) and k.is_cuda and k.dtype == torch.bfloat16
