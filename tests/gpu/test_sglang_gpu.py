"""The drop-in on a GPU: `specstate.sglang.install` in sglang's own modules (0.5.23, from its unpacked wheel), CUDA tensors, and sglang's
own functions beside ours: the same results before and after, and sglang's own in use where ours does not cover a call."""

import logging
import os
import sys

import conftest
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)
if not os.environ.get("SGLANG_WHEEL"):
    pytest.skip("needs-wheel: SGLANG_WHEEL names no unpacked wheel of sglang 0.5.23", allow_module_level=True)

import torch  # noqa: E402

sys.path.insert(0, str(conftest.ROOT / "bench" / "peers"))
import sglang_wheel  # noqa: E402

import specstate.sglang as drop_in  # noqa: E402

HEADS, DIM, N, W = 4, 64, 3, 4


@pytest.fixture(scope="module", autouse=True)
def sglang():
    sglang_wheel.use(os.environ["SGLANG_WHEEL"])
    yield
    drop_in.uninstall()


def gating(dim_v=DIM, is_kda=True):
    g = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=g)  # noqa: E731
    channels = (HEADS, DIM) if is_kda else (HEADS,)
    return dict(
        A_log=normal(HEADS), a=normal(1, N * W, *channels), dt_bias=normal(HEADS * DIM if is_kda else HEADS), softplus_beta=1.0, softplus_threshold=20.0,
        q=normal(1, N * W, HEADS, DIM), k=normal(1, N * W, HEADS, DIM), v=normal(1, N * W, HEADS, dim_v), b=normal(1, N * W, HEADS),
        initial_state_source=normal(N, HEADS, dim_v, DIM), initial_state_indices=torch.arange(N, device="cuda", dtype=torch.int32),
        use_qk_l2norm_in_kernel=True, cu_seqlens=torch.arange(0, N * W + 1, W, device="cuda", dtype=torch.int32), is_kda=is_kda,
    )  # fmt: skip


@pytest.mark.parametrize("is_kda", [True, False])
def test_the_replaced_function_gives_what_sglang_gives(is_kda, caplog):
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as module

    before, after = gating(is_kda=is_kda), gating(is_kda=is_kda)
    want = module.fused_sigmoid_gating_delta_rule_update(**before)
    with caplog.at_level(logging.INFO, "specstate.sglang"):
        assert "fused_sigmoid_gating_delta_rule_update" in drop_in.install()
        got = module.fused_sigmoid_gating_delta_rule_update(**after)
    drop_in.uninstall()
    torch.testing.assert_close(got, want.view_as(got), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(after["initial_state_source"], before["initial_state_source"], rtol=1e-3, atol=1e-4)
    assert "fused_sigmoid_gating_delta_rule_update: specstate's is in use: it covers the call on the GPU" in caplog.text


def test_heads_that_ours_does_not_have_stay_with_sglang(caplog):
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as module

    want = module.fused_sigmoid_gating_delta_rule_update(**gating(dim_v=32))
    with caplog.at_level(logging.INFO, "specstate.sglang"):
        drop_in.install(only="kda")
        got = module.fused_sigmoid_gating_delta_rule_update(**gating(dim_v=32))
        covered = module.fused_sigmoid_gating_delta_rule_update(**gating())  # one call that stays behind takes no other with it
    drop_in.uninstall()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert covered.shape == (1, N * W, HEADS, DIM)
    assert "sglang's own is in use: head dimension 32 of v is not 64 or 128" in caplog.text and "specstate's is in use" in caplog.text


def test_a_module_that_imported_the_function_before(monkeypatch):
    from sglang.kernels.ops.kvcache import hisparse

    user = type(sys)("user_of_sglang")
    user.copy = hisparse.copy_cache_planned_mla
    monkeypatch.setitem(sys.modules, "user_of_sglang", user)
    drop_in.install(only="hisparse")
    host = torch.arange(64, dtype=torch.uint8).reshape(4, 16).pin_memory()
    device = torch.zeros(4, 16, dtype=torch.uint8, device="cuda")
    i = lambda x, t: torch.tensor(x, dtype=t, device="cuda")  # noqa: E731
    assert user.copy is hisparse.copy_cache_planned_mla and user.copy.__specstate__ == "copy_cache_planned_mla"
    user.copy(miss_src=i([[3, 1]], torch.int64), miss_dst=i([[0, 2]], torch.int32), miss_count=i([2], torch.int32), num_real_reqs=i([1], torch.int32),
              host_cache=host, device_buffer=device, item_size_bytes=16)  # fmt: skip
    drop_in.uninstall()
    assert device[:, 0].tolist() == [48, 0, 16, 0] and not hasattr(user.copy, "__specstate__")
