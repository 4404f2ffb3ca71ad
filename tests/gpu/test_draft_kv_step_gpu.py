"""The end of a verify step in one CUDA graph: acceptance decides on the GPU which rows stand, and those rows become draft KV. Nothing reads the
lengths on the host, and every replay follows the logits of its own step."""

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import torch  # noqa: E402
from draft_kv_cases import FeatureProblem, Problem, raw  # noqa: E402
from draft_kv_on_gpu import cpu, gpu, run  # noqa: E402

import specstate.accept as accept  # noqa: E402
import specstate.draft_kv as draft_kv  # noqa: E402

W, V = 8, 33


def step(rng, b):
    """Proposals that stand for a while, and what both ways of acceptance look at."""
    choice = rng.integers(0, V, (b, W))
    candidates = np.concatenate([rng.integers(0, V, (b, 1)), np.where(rng.random((b, W - 1)) < 0.7, choice[:, :-1], (choice[:, :-1] + 1) % V)], 1)
    target = rng.random((b, W, V)).astype(np.float32) ** 8
    np.put_along_axis(target, choice[..., None], 4.0, 2)
    return candidates, choice, target / target.sum(-1, keepdims=True), rng.random((b, W)).astype(np.float32)


@pytest.mark.parametrize("how", ["greedy", "rejection"])
@pytest.mark.parametrize("from_features", [False, True])
@pytest.mark.parametrize("b", [1, 5, 40, 200])
def test_accepted_rows_become_draft_kv_without_leaving_the_device(replayed, b, from_features, how):
    rng = np.random.default_rng(b)
    shape = dict(io="bf16", L=2, T=b * W, hidden=512, N=2, D=128, R=128, slots=b * W + 16, window=W, table=4096)
    make = lambda: FeatureProblem(rng, features=640, **shape) if from_features else Problem(rng, **shape)
    p = make()
    inputs, pools = [gpu(x) for x in p.args()], [gpu(x) for x in p.pools()]
    kwargs = {name: gpu(x) for name, x in p.kwargs.items() if name != "commit_lens"}
    drawn = [gpu(x) for x in step(rng, b)]
    lens, tokens = torch.full((b,), -7, dtype=torch.int32, device="cuda"), torch.full((b, W), -7, dtype=torch.int64, device="cuda")

    def call():
        candidates, choice, target, uniforms = drawn
        if how == "greedy":
            accept.verify_greedy(candidates, choice, out=(lens, tokens))
        else:
            accept.verify_rejection(candidates, None, target, uniforms, out=(lens, tokens))
        draft_kv.materialize_into_pool(*inputs, *pools, commit_lens=lens, **kwargs)

    replay = replayed(call)
    seen = set()
    for _ in range(6 if b == 1 else 3):
        p, fresh = make(), step(rng, b)
        for old, new in zip([*drawn, *inputs, *pools], [*fresh, *p.args(), *p.pools()]):
            old.copy_(gpu(new))
        for name in kwargs:
            if name != "hidden_norm_eps":
                kwargs[name].copy_(gpu(p.kwargs[name]))
        replay()
        want = accept.verify_greedy(*fresh[:2]) if how == "greedy" else accept.verify_rejection(fresh[0], None, *fresh[2:])
        np.testing.assert_array_equal(lens.cpu().numpy(), want[0])
        seen.update(want[0].tolist())
        p.kwargs["commit_lens"] = want[0]
        for a, x in zip(pools, run(p)):
            np.testing.assert_array_equal(raw(cpu(a, x.dtype)), raw(x))
        draft_kv.raise_pending_error(pools[0])
    assert len(seen) > (2 if b > 1 else 1)
