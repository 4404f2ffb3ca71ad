"""The drop-in on a GPU: `specstate.sglang.install` in sglang's own modules (0.5.23, from its unpacked wheel), CUDA tensors, and sglang's
own functions beside ours: the same results before and after, and sglang's own in use where ours does not cover a call."""

import ast
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import sys
import types

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


BACKEND = "sglang.srt.layers.attention.linear.kda_backend"


def backend_of_0_5_23(monkeypatch):
    """sglang's KDA backend as far as the fused verify goes: its own predicate and its own call, out of its own file; the rest of that module would
    import a whole server."""
    names = ("_can_run_dspark_cutedsl_mtp", "_run_dspark_cutedsl_mtp")
    source = ast.parse((pathlib.Path(os.environ["SGLANG_WHEEL"]) / (BACKEND.replace(".", "/") + ".py")).read_text())
    owner = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "KDAAttnBackend")
    owner.body = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name in names]
    owner.bases = []
    assert len(owner.body) == 2
    modules = {}
    for name in ("sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.layers.attention.linear", BACKEND, "sglang.kernels.ops.attention.kda_decode_mtp", "cutlass"):
        modules[name] = types.ModuleType(name)
        modules[name].__path__, modules[name].__spec__ = [], importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, modules[name])
    vars(modules[BACKEND]).update(torch=torch, importlib=importlib, is_cuda=lambda: True, Optional=object, RadixLinearAttention=object)
    source.body = [ast.parse("from __future__ import annotations").body[0], owner]
    exec(compile(source, BACKEND, "exec"), vars(modules[BACKEND]))  # noqa: S102

    def fused_kda_decode_mtp_dspark(**_):
        raise AssertionError("sglang's own kernel is for Blackwell")

    modules["sglang.kernels.ops.attention.kda_decode_mtp"].fused_kda_decode_mtp_dspark = fused_kda_decode_mtp_dspark
    backend = modules[BACKEND].KDAAttnBackend()
    backend.kernel_dispatcher = types.SimpleNamespace(verify_backend=types.SimpleNamespace(is_nv_cutedsl=lambda: True))
    return backend


def test_the_dispatch_to_the_fused_verify_opens_on_hopper(monkeypatch, caplog):
    """sglang's predicate says no on Hopper and yes once ours is installed, its call then runs our kernel, and the result is that of `kda.verify`."""
    from specstate import kda

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs-gpu: of compute capability 9, where the dispatch is opened")
    backend = backend_of_0_5_23(monkeypatch)
    H, D, T, C, pool = HEADS, 128, N * W, HEADS * 128, 5
    g = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape, dtype=torch.float32: torch.randn(*shape, device="cuda", generator=g).to(dtype)  # noqa: E731
    act = torch.bfloat16
    layer = types.SimpleNamespace(
        bias=None, lower_bound=-5.0, head_q_dim=D, head_k_dim=D, head_v_dim=D, num_q_heads=H, num_k_heads=H, num_v_heads=H, q_dim=C, k_dim=C, v_dim=C,
        conv_weights=normal(3 * C, 4), A_log=normal(1, 1, H, 1), dt_bias=normal(C),
    )  # fmt: skip
    snapshots, windows = torch.zeros(N, W, H, D, D, device="cuda"), torch.zeros(N, W, 3, 3 * C, device="cuda", dtype=act)
    asked = dict(layer=layer, mixed_qkv=normal(T, 3 * C, dtype=act), a=normal(T, C, dtype=act), b=normal(1, T, H, dtype=act), conv_states=normal(pool, 3, 3 * C, dtype=act),
                 ssm_states=normal(pool, H, D, D), intermediate_state_cache=snapshots, intermediate_conv_window_cache=windows, replayssm_rawv=None)  # fmt: skip
    predicate = dict(asked, draft_token_num=W, ragged_layout=None, retrieve_parent_token=None)
    assert backend._can_run_dspark_cutedsl_mtp(**predicate) is False
    with caplog.at_level(logging.INFO, "specstate.sglang"):
        drop_in.install(only="kda")
        assert backend._can_run_dspark_cutedsl_mtp(**predicate) is True
        assert backend._can_run_dspark_cutedsl_mtp(**{**predicate, "draft_token_num": 9}) is False  # the rest of its contract stays
    assert "sglang's dispatch is open on Hopper" in caplog.text
    i32 = lambda x: torch.tensor(x, device="cuda", dtype=torch.int32)  # noqa: E731
    slots, starts = i32([3, 0, 4]), torch.arange(0, T + 1, W, device="cuda", dtype=torch.int32)
    with caplog.at_level(logging.INFO, "specstate.sglang"):
        out = backend._run_dspark_cutedsl_mtp(**asked, intermediate_state_indices=i32([2, 1, 0]), cache_indices=slots, query_start_loc=starts)
    assert "fused_kda_decode_mtp_dspark: specstate's is in use: it covers the call on the GPU" in caplog.text
    drop_in.uninstall()
    assert backend._can_run_dspark_cutedsl_mtp(**predicate) is False

    parts = lambda x: [p.contiguous().cpu() for p in x.split([C, C, C], dim=-1)]  # noqa: E731
    x_q, x_k, x_v = (p.view(T, H, D) for p in parts(asked["mixed_qkv"]))
    w_q, w_k, w_v = (p.contiguous().cpu() for p in layer.conv_weights.split([C, C, C]))
    cs_q, cs_k, cs_v = (p.transpose(1, 2).contiguous() for p in parts(asked["conv_states"]))
    want_states, want_windows = torch.zeros(N, W, H, D, D), [torch.zeros(N, W, C, 3, dtype=act) for _ in range(3)]
    want = kda.verify(x_q, x_k, x_v, asked["a"].cpu().view(T, H, D), asked["b"].cpu().view(T, H), layer.A_log.cpu().view(H), layer.dt_bias.cpu(),
                      asked["ssm_states"].cpu(), slots.cpu(), starts.cpu(), w_q=w_q, w_k=w_k, w_v=w_v, cs_q=cs_q, cs_k=cs_k, cs_v=cs_v, snapshots=want_states,
                      conv_q=want_windows[0], conv_k=want_windows[1], conv_v=want_windows[2], rows=i32([2, 1, 0]).cpu(), lower_bound=-5.0)  # fmt: skip
    # an activation that rounds to the neighbouring bfloat16 on the other machine moves the state by as much
    torch.testing.assert_close(out.cpu().view_as(want), want, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(snapshots.cpu(), want_states, rtol=1e-2, atol=1e-2)
    for got, expected in zip(parts(windows), want_windows, strict=True):
        torch.testing.assert_close(got.transpose(2, 3), expected, rtol=0, atol=0)
