"""Target features on a GPU: fc and the hidden norm in front of the projection. What stands between them is the oracle's but for the last bits of
our sums; the whole is what its parts are, to the bit; and any cut into calls, whichever kernels take them, leaves the same bytes."""

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import draft_kv as oracle  # noqa: E402
import torch  # noqa: E402
from draft_kv_cases import FeatureProblem, raw  # noqa: E402
from draft_kv_on_gpu import OF_SUM, cpu, gpu, run  # noqa: E402

import specstate.draft_kv as draft_kv  # noqa: E402

SHAPES = [
    dict(io="bf16", features=1280, hidden=512, D=128, R=128, N=2, L=2),
    dict(io="bf16", features=2048, hidden=1152, D=64, R=32, N=3, L=1),  # more columns than clusters, of unequal share
    dict(io="fp16", features=640, hidden=640, D=64, R=64, N=2, L=2),
    dict(io="bf16", features=576, hidden=2560, D=128, R=64, N=1, L=1),
    dict(io="bf16", features=1280, hidden=576, D=64, R=64, N=2, L=1),  # 576 columns are no whole tiles of 128: any_features and any_rows
    dict(io="bf16", features=1280, hidden=512, D=192, R=64, N=2, L=2),  # heads that no epilogue knows
    dict(io="fp32", features=90, hidden=40, D=16, R=16, N=1, L=2),
    dict(io="bf16", features=70, hidden=33, D=46, R=20, N=2, L=1),
]


def problem(seed, T, **shape):
    p = FeatureProblem(np.random.default_rng(seed), T=T, slots=T + 9, **shape)
    return p


def some_rows(p, rows):
    q = FeatureProblem.__new__(FeatureProblem)
    q.__dict__.update(p.__dict__)
    q.hidden, q.positions, q.loc = p.hidden[rows], p.positions[rows], p.loc[rows]
    return q


def assert_context(p, context, of_sum=OF_SUM):
    """Every element is what the norm makes of a value that fc's product explains: the storage rounding of a float32 sum within `of_sum` of the sum of
    |x w|. The norm's factor moves with the row's few values that fell to the other side of their rounding."""
    x, fc = p.hidden.astype(np.float64), p.kwargs["fc_weight"].astype(np.float64)
    r, exact, size = oracle.ROUND[p.io], x @ fc.T, of_sum * (abs(x) @ abs(fc).T)
    low, high, weight = r(exact - size), r(exact + size), p.kwargs["hidden_norm_weight"].astype(np.float64)
    factor_of = lambda x: 1 / np.sqrt((x**2).mean(-1, keepdims=True) + p.kwargs["hidden_norm_eps"])
    factor = factor_of(r(exact)) * weight
    most, least = np.maximum(abs(low), abs(high)), np.where(low * high < 0, 0, np.minimum(abs(low), abs(high)))
    ends = np.array([x * f * (1 + e) * weight for x in (low, high) for f in (factor_of(most), factor_of(least)) for e in (-(2.0**-20), 2.0**-20)])
    ends = ends.min(0), ends.max(0)
    got = context.astype(np.float64)
    outside = (got < r(ends[0])) | (got > r(ends[1]))
    assert not outside.any(), (int(outside.sum()), got[outside][:4], ends[0][outside][:4], ends[1][outside][:4])
    if p.io != "fp32":
        off = got != r(r(exact) * factor)
        print(f"{p.io}, {x.shape[1]} features: {off.mean():.5f} of the context's elements are not the exact ones")
        assert off.sum() <= max(5, {"bf16": 0.004, "fp16": 0.03}[p.io] * off.size), off.mean()


@pytest.mark.parametrize("T", [1, 64, 65, 700])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_context_and_what_is_made_of_it(shape, T):
    p = problem(1, T, **shape)
    context = p.context(run)
    assert_context(p, context)
    if shape["hidden"] == 576:
        return  # the projection alone is for the tensor cores, whose order of sums is another
    want = run(p.projection_of(context))
    for a, b in zip(run(p), want):
        np.testing.assert_array_equal(raw(a), raw(b))


WIDE = dict(io="bf16", features=576, hidden=7168, D=128, R=128, N=1, L=1)  # of which few_rows norms no 64 rows


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4], SHAPES[5], WIDE], ids=str)
def test_any_cut_into_calls_leaves_the_same_bytes(shape):
    """Also across the rounds in which long calls are done."""
    p = problem(2, 2500, **shape)
    want = run(p)
    inputs, kwargs = [gpu(x) for x in p.args()], {name: gpu(x) for name, x in p.kwargs.items()}
    for pieces in (1, 30, 64, 65, 128, 700):
        pools = [gpu(x) for x in p.pools()]
        order = torch.from_numpy(np.random.default_rng(pieces).permutation(2500)).cuda()
        done = 0
        for begin in range(0, 2500, pieces):
            rows = order[begin : begin + pieces]
            draft_kv.materialize_into_pool(inputs[0][rows], *inputs[1:5], inputs[5][rows], inputs[6][rows], *pools, **kwargs)
            done = begin + len(rows)
            if pieces < 700 and begin > 12 * pieces:
                break
        slots = p.loc[order[:done].cpu().numpy()]
        for a, b in zip(pools, want):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)[:, slots]), raw(b[:, slots]))


@pytest.mark.parametrize("T", [48, 160, 2400])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=str)
def test_rejected_rows_have_no_say_and_nothing_else_is_written(shape, T):
    rng = np.random.default_rng(3)
    p = problem(3, T, window=8, **shape)
    p.loc = np.where(rng.random(p.loc.shape) < 0.1, -1, p.loc)
    got = run(p)
    rejected, slots = np.setdiff1d(np.arange(T), p.written()), p.loc.reshape(-1)[p.written()]
    q = some_rows(p, slice(None))
    q.hidden, q.positions, q.loc = p.hidden.copy(), p.positions.copy(), p.loc.copy()
    q.hidden[rejected], q.positions[rejected] = np.nan, np.iinfo(np.int64).max
    poison = p.pools()
    for a, b, c in zip(run(q), got, poison):
        np.testing.assert_array_equal(raw(a), raw(b))
        others = np.setdiff1d(np.arange(p.slots), slots)
        np.testing.assert_array_equal(raw(a[:, others]), raw(c[:, others]))
    # Compacted by hand: the same rows in a call of their own.
    alone = some_rows(p, slice(None))
    alone.hidden, alone.positions, alone.loc = p.hidden[p.written()], p.positions[p.written()], slots
    alone.kwargs = {k: v for k, v in p.kwargs.items() if k != "commit_lens"}
    for a, b in zip(run(alone), got):
        np.testing.assert_array_equal(raw(a[:, slots]), raw(b[:, slots]))


@pytest.mark.parametrize("T", [16, 256, 3000])
def test_a_graph_replays_with_new_inputs(replayed, T):
    shape = dict(io="bf16", features=1280, hidden=512, D=128, R=128, N=2, L=2, window=8)
    p = problem(4, T, **shape)
    inputs, pools, kwargs = [gpu(x) for x in p.args()], [gpu(x) for x in p.pools()], {name: gpu(x) for name, x in p.kwargs.items()}
    replay = replayed(lambda: draft_kv.materialize_into_pool(*inputs, *pools, **kwargs))
    for seed in range(5, 8):
        p = problem(seed, T, **shape)
        for old, new in zip([*inputs, *pools, *(kwargs[n] for n in p.kwargs if n != "hidden_norm_eps")],
                            [*p.args(), *p.pools(), *(p.kwargs[n] for n in p.kwargs if n != "hidden_norm_eps")]):  # fmt: skip
            old.copy_(gpu(new))
        for w in draft_kv._workspaces.values():  # what it holds does not matter
            w.fill_(0xFF)
        replay()
        for a, b in zip(pools, run(p)):
            np.testing.assert_array_equal(raw(cpu(a, b.dtype)), raw(b))


def test_the_width_that_is_served():
    """Qwen3-8B's fc: 20480 features. Float32 sums of so many products; the share of context elements that are not the exact rounding."""
    p = problem(5, 96, io="bf16", features=20480, hidden=512, D=128, R=128, N=2, L=1)
    context = p.context(run)
    assert_context(p, context, 2 * OF_SUM)  # runs of 2560 values
    few = some_rows(p, slice(0, 40)).context(run)
    np.testing.assert_array_equal(raw(few), raw(context[:40]))


def test_the_workspace_is_the_callers_and_does_not_grow_with_the_tokens():
    p = problem(6, 40, io="bf16", features=640, hidden=512, D=64, R=64, N=2, L=1)
    fc = gpu(p.kwargs["fc_weight"])
    sizes = [draft_kv.materialize_workspace_bytes(torch.empty(T, 640, dtype=torch.bfloat16, device="cuda"), fc) for T in (1, 2048, 20_000)]
    assert 0 < sizes[0] < 4096 and sizes[1] == sizes[2] < 2048 * (512 * 2 + 128) + 65536
    needed = draft_kv.materialize_workspace_bytes(gpu(p.hidden), fc)
    zone = torch.full((needed + 512,), 0xA5, dtype=torch.uint8, device="cuda")
    draft_kv._workspaces.clear()
    for a, b in zip(run(p, workspace=zone[256 : 256 + needed]), run(p)):
        np.testing.assert_array_equal(raw(a), raw(b))
    assert bool((zone[:256] == 0xA5).all()) and bool((zone[256 + needed :] == 0xA5).all())
    for bad, got in ((zone[: needed - 1], f"{needed - 1} bytes"), (zone[8 : 8 + needed], "another"), (zone[: needed * 1].cpu(), "cpu")):
        with pytest.raises(ValueError, match="workspace: expected .*" + got):
            run(p, workspace=bad)
