"""The functions that carry sglang's names: signatures, exact error texts, and their results."""

import inspect

import kda as oracle
import numpy as np
import pytest
from kda_cases import BF16, F32, act, buffers, call, case, same

import specstate.kda as kda

FUSED = (
    "x_q x_k x_v w_q w_k w_v cs_q cs_k cs_v g beta A_log dt_bias recurrent_state intermediate_ssm intermediate_state_indices "
    "intermediate_conv_q intermediate_conv_k intermediate_conv_v ssm_state_indices cu_seqlens lower_bound scale=None "
    "replayssm_rawv=None replayssm_rawk=None replayssm_g=None replayssm_beta=None onorm_gate=None onorm_weight=None onorm_eps=None"
)
COMMIT = (
    "checkpoint_state rawv_cache rawk_cache gk_cache beta_cache ssm_state_indices accept_lens max_cache_len num_k_heads "
    "mamba_track_indices=None mamba_steps_to_track=None use_qk_l2norm_in_kernel=True null_block_id=0"
)
GATING = (
    "A_log a dt_bias softplus_beta softplus_threshold q k v b initial_state_source initial_state_indices scale=None "
    "use_qk_l2norm_in_kernel=False cu_seqlens=None is_kda=False lower_bound=None disable_state_update=False "
    "intermediate_states_buffer=None intermediate_state_indices=None cache_steps=None retrieve_parent_token=None cache_ring=False "
    "replayssm_rawv=None replayssm_rawk=None replayssm_g=None replayssm_beta=None match_cutedsl_decode=False"
)
CUTEDSL = (
    "A_log dt_bias q k v a b initial_state_source initial_state_indices cu_seqlens=None scale=None use_qk_l2norm_in_kernel=True "
    "softplus_beta=1.0 softplus_threshold=20.0"
)


@pytest.mark.parametrize(
    "function,text,keyword_only,extras",
    [
        (kda.fused_kda_decode_mtp_dspark, FUSED, True, ["exact", "pending", "out", "stream"]),
        (kda.commit_kda_replayssm_spec, COMMIT, False, ["stream"]),
        (kda.commit_kda_replayssm_spec_all_layers, COMMIT, False, ["stream"]),
        (kda.commit_gdn_replayssm_fold_all_layers, COMMIT.replace("gk_cache", "g_cache").replace("null_block_id=0", "null_block_id=-1"), False, ["stream"]),
        (kda.fused_sigmoid_gating_delta_rule_update, GATING, False, ["out", "stream"]),
        (kda.cutedsl_fused_sigmoid_gating_kda_update, CUTEDSL, False, ["out", "stream"]),
    ],
)
def test_signatures_are_those_of_sglang_0_5_23(function, text, keyword_only, extras):
    parameters = list(inspect.signature(function).parameters.values())
    kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    want = text.split()
    got = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters[: len(want)]]
    assert got == want
    assert all(p.kind == kind for p in parameters[: len(want)])
    rest = parameters[len(want) :]
    assert [p.name for p in rest] == extras
    assert all(p.kind == inspect.Parameter.KEYWORD_ONLY and p.default is not p.empty for p in rest)


def fused_call(dtype=F32, rings=True, seed=1, **kw):
    """(arguments for the fused op, the same call for verify, its buffers)."""
    a = act(case(seed, K=128, V=128, **kw), dtype)
    ring, snapshots, conv = buffers(a, L=8)
    f = {k: a[k][None] for k in ("x_q", "x_k", "x_v", "g", "beta")}
    f |= {k: a[k] for k in ("w_q", "w_k", "w_v", "cs_q", "cs_k", "cs_v", "A_log", "cu_seqlens", "lower_bound", "scale")}
    f |= dict(dt_bias=a["dt_bias"].reshape(-1), recurrent_state=a["state"], ssm_state_indices=a["slots"])
    f |= dict(intermediate_state_indices=np.concatenate([a["rows"], [0, 0]]).astype(np.int32))  # may be longer than N
    f |= {f"intermediate_{k}": v for k, v in conv.items()}
    f["intermediate_ssm"] = None if rings else snapshots
    if rings:
        f |= {f"replayssm_{k}": v for k, v in ring._asdict().items()}
    f |= {k: a[k][None] if k == "onorm_gate" else a[k] for k in ("onorm_gate", "onorm_weight", "onorm_eps") if k in a}
    return f, a, ring, snapshots, conv


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kw", [dict(), dict(N=4, pad=(1,)), dict(width=1), dict(onorm=False, H=3)], ids=str)
def test_fused_op_is_verify(kw, dtype):
    f, a, ring, snapshots, conv = fused_call(dtype, **kw)
    out = kda.fused_kda_decode_mtp_dspark(**f)
    assert out.shape == f["x_v"].shape and out.dtype == dtype and out.flags.c_contiguous
    ring2, snapshots2, conv2 = buffers(a, L=8)
    assert same(out[0], call(a, rings=ring2, snapshots=snapshots2, **conv2))
    assert all(same(x, y) for x, y in zip(ring, ring2)) and all(same(conv[k], conv2[k]) for k in conv)
    f2, _, _, snapshots, conv = fused_call(dtype, rings=False, **kw)
    assert same(kda.fused_kda_decode_mtp_dspark(**f2, exact=True), out)
    assert same(snapshots, snapshots2) and all(same(conv[k], conv2[k]) for k in conv)


def test_fused_ring_mode_leaves_snapshots_alone_and_takes_out():
    f, a, _, snapshots, _ = fused_call()
    out = np.full_like(f["x_v"], np.nan)
    assert kda.fused_kda_decode_mtp_dspark(**dict(f, intermediate_ssm=snapshots), out=out) is out
    assert np.isnan(snapshots).all() and np.isfinite(out).all()
    # a row shorter than T/N processes its own tokens only
    f, a, ring, _, conv = fused_call()
    f["cu_seqlens"] = np.array([0, 4, 6, 6], np.int32)
    out = kda.fused_kda_decode_mtp_dspark(**f)
    assert (out[0, 6:] == 0).all()
    assert np.isnan(ring.rawv[a["slots"][1], :, 2:]).all() and np.isnan(ring.rawv[a["slots"][2]]).all()
    assert np.isnan(conv["conv_q"][a["rows"][1], 2:]).all() and np.isnan(conv["conv_q"][a["rows"][2]]).all()


D, H, N, W = 128, 2, 3, 4
T = N * W


def z(*shape, dtype=F32):
    return np.zeros(shape, dtype)


LAYOUT = f"expected ReplaySSM ring layouts [slots, H={H}, L>={W}, 128] / [slots, H, L]"
SCRATCH = f"expected intermediate SSM layout [scratch, >={W}, H, V=128, K=128]"
PLACED = "cp.async recurrent state requires fp32 contiguous [H, V, K] inner layout and 16-byte-aligned slot offsets"
NORM = "fused output norm requires onorm_gate, onorm_weight, and onorm_eps"
NO_RINGS = dict(replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None)


def strided_state(pitch, offset=0):
    buffer = np.zeros(8 * pitch + 8, F32)
    start = (-buffer.ctypes.data // 4) % 4 + offset  # `offset` elements beyond a 16-byte boundary
    return np.lib.stride_tricks.as_strided(buffer[start:], (6, H, D, D), (pitch * 4, D * D * 4, D * 4, 4))


EXACT = [
    (dict(x_q=z(1, T, H, 64)), "expected q/k shape (1, 12, 2, 128)"),
    (dict(x_k=z(1, T, H + 1, D)), "expected q/k shape (1, 12, 2, 128)"),
    (dict(x_k=z(T, H, D)), "expected q/k shape (1, 12, 2, 128)"),
    (dict(x_v=z(1, T - 1, H, D)), "expected v/g shape (1, 12, 2, 128)"),
    (dict(g=z(1, T, H * D)), "expected v/g shape (1, 12, 2, 128)"),
    (dict(beta=z(1, T, H, 1)), "expected beta shape (1, 12, 2)"),
    (dict(cu_seqlens=np.zeros(1, np.int32)), "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=12, N=0"),
    (dict(cu_seqlens=np.zeros(6, np.int32)), "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=12, N=5"),
    (dict(cu_seqlens=np.zeros(25, np.int32)), "DSpARK KDA MTP requires a fixed 1 + num_spec dense tokens per request; got T=12, N=24"),
    (dict(recurrent_state=z(6, H, D, 64)), "expected recurrent state layout [pool, H, V=128, K=128]"),
    (dict(recurrent_state=z(6, H + 1, D, D)), "expected recurrent state layout [pool, H, V=128, K=128]"),
    (dict(recurrent_state=z(6, H, D, D, dtype=BF16)), PLACED),
    (dict(recurrent_state=z(6, H, D, D).swapaxes(2, 3)), PLACED),
    (dict(recurrent_state=strided_state(H * D * D + 2)), PLACED),
    (dict(recurrent_state=strided_state(H * D * D + 4, offset=1)), PLACED),
    (dict(replayssm_g=None), "ReplaySSM requires all four replayssm_* rings"),
    (dict(NO_RINGS, replayssm_beta=z(6, H, 8)), "ReplaySSM requires all four replayssm_* rings"),
    (dict(replayssm_rawv=z(6, H, 3, D), replayssm_rawk=z(6, H, 3, D), replayssm_g=z(6, H, 3, D), replayssm_beta=z(6, H, 3)), LAYOUT),
    (dict(replayssm_rawk=z(6, H, 7, D)), LAYOUT),
    (dict(replayssm_g=z(6, H, 8)), LAYOUT),
    (dict(replayssm_beta=z(6, H, 8, 1)), LAYOUT),
    (dict(replayssm_g=z(6, H, 8, D, dtype=BF16)), "expected ReplaySSM ring dtypes rawv/rawk=bf16, g/beta=fp32"),
    (dict(replayssm_rawv=z(6, H, 8, D, dtype=BF16)), "expected ReplaySSM ring dtypes rawv/rawk=bf16, g/beta=fp32"),
    (dict(replayssm_beta=z(6, H, 8, dtype=np.float64)), "expected ReplaySSM ring dtypes rawv/rawk=bf16, g/beta=fp32"),
    (dict(NO_RINGS), SCRATCH),
    (dict(NO_RINGS, intermediate_ssm=z(3, 3, H, D, D)), SCRATCH),
    (dict(NO_RINGS, intermediate_ssm=z(3, W, H, D, 64)), SCRATCH),
    (dict(NO_RINGS, intermediate_ssm=z(3, W, H, D * D)), SCRATCH),
    (dict(onorm_gate=None), NORM),
    (dict(onorm_weight=None), NORM),
    (dict(onorm_eps=None), NORM),
    (dict(onorm_gate=z(1, T, D)), "expected output-norm gate shape (1, 12, 2, 128)"),
    (dict(onorm_weight=z(H, D)), "expected output-norm weight shape (128,)"),
    (dict(onorm_weight=z(D, dtype=BF16)), "expected output-norm gate=bf16 and weight=fp32"),
    (dict(onorm_gate=z(1, T, H, D, dtype=np.float16)), "expected output-norm gate=bf16 and weight=fp32"),
]
OP = "fused_kda_decode_mtp_dspark: "
OURS = [  # what sglang leaves unchecked, or dies of
    (dict(x_q=z(T)), "x_q: expected 4 dimensions, got shape (12,)."),
    (dict(x_q=None), "x_q: expected a tensor, got none."),
    (dict(x_v=None), "x_v: expected a tensor, got none."),
    (dict(cu_seqlens=None), "cu_seqlens: expected a tensor, got none."),
    (dict(recurrent_state=None), "recurrent_state: expected a tensor, got none."),
    (dict(w_k=None), "w_k: expected a tensor, got none."),
    (dict(ssm_state_indices=None), "ssm_state_indices: expected a tensor, got none."),
    (dict(intermediate_conv_v=None), "intermediate_conv_v: expected a tensor, got none."),
    (dict(x_q=z(1, T, H, D, dtype=np.float16)), "x_q: expected dtype bfloat16 or float32, got float16."),
    (dict(x_k=z(1, T, H, D, dtype=BF16)), "x_k: expected dtype float32, got bfloat16."),
    (dict(g=z(1, T, H, D, dtype=np.float64)), "g: expected dtype bfloat16 or float32, got float64."),
    (dict(beta=z(1, T, H, dtype=np.int32)), "beta: expected dtype bfloat16 or float32, got int32."),
    (dict(A_log=z(H, dtype=np.float64)), "A_log: expected dtype bfloat16 or float32, got float64."),
    (dict(A_log=z(H + 1)), "A_log: expected shape [HV=2], got (3,)."),
    (dict(dt_bias=z(H)), "dt_bias: expected shape [HV=2, K=128], got (2,)."),
    (dict(w_q=z(H * D, 3)), "w_q: expected shape [256, 4], got (256, 3)."),
    (dict(w_v=z(H * D, 4, dtype=BF16)), "w_v: expected dtype float32, got bfloat16."),
    (dict(cs_q=z(6, H * D, 4)), "cs_q: expected shape [pool >= 6, 256, 3], got (6, 256, 4)."),
    (dict(cs_v=z(5, H * D, 3)), "cs_v: expected shape [pool >= 6, 256, 3], got (5, 256, 3)."),
    (dict(cs_k=z(6, H * D, 3, dtype=BF16)), "cs_k: expected dtype float32, got bfloat16."),
    (dict(intermediate_conv_q=z(3, 3, H * D, 3)), "intermediate_conv_q: expected shape [scratch, steps >= 4, 256, 3], got (3, 3, 256, 3)."),
    (dict(intermediate_conv_k=z(3, W, H * D, 3, dtype=BF16)), "intermediate_conv_k: expected dtype float32, got bfloat16."),
    (dict(x_v=z(1, T, H, 2 * D)[..., ::2]), "x_v: expected a dense last dimension, got strides (512, 256, 2) for shape (12, 2, 128)."),
    (dict(onorm_gate=z(1, T, H, 2 * D)[..., ::2]),
     "onorm_gate: expected a dense last dimension, got strides (512, 256, 2) for shape (12, 2, 128)."),
    (dict(ssm_state_indices=np.zeros(3, np.int16)), "ssm_state_indices: expected dtype int32 or int64, got int16."),
    (dict(ssm_state_indices=np.zeros(2, np.int32)), "cu_seqlens: expected shape [3], got (4,)."),
    (dict(ssm_state_indices=np.array([0, 1, 6])), "ssm_state_indices: expected slots below pool=6, or <= -1 for padding, got 6 at 2."),
    (dict(ssm_state_indices=np.array([1, 2, 1])), "ssm_state_indices: expected each slot at most once where rings or the state are written, got 1 twice."),
    (dict(intermediate_state_indices=np.array([0, 1])), "intermediate_state_indices: expected shape [N >= 3], got (2,)."),
    (dict(intermediate_state_indices=np.array([0, 1, 3])), "intermediate_state_indices: expected rows below 3, got 3 at 2."),
    (dict(intermediate_state_indices=np.array([0, -1, 2])), "intermediate_state_indices: expected rows below 3, got -1 at 1."),
    (dict(intermediate_state_indices=np.array([0, 2, 2])),
     "intermediate_state_indices: expected each row of snapshots and conv windows at most once, got 2 twice."),
    (dict(cu_seqlens=np.array([1, 4, 8, 12])), "cu_seqlens: expected 0 as its first entry, got 1."),
    (dict(cu_seqlens=np.array([0, 4, 3, 12])), "cu_seqlens: expected entries that never decrease and stay within T=12, got 3 at 2."),
    (dict(cu_seqlens=np.array([0, 4, 8, 13])), "cu_seqlens: expected entries that never decrease and stay within T=12, got 13 at 3."),
    (dict(cu_seqlens=np.array([0, 2, 8, 12])), "intermediate_conv_q: expected at least 6 steps, the tokens of the longest request, got 4."),
    (dict(cu_seqlens=np.array([0, 2, 8, 12]), **{f"intermediate_conv_{x}": z(3, 6, H * D, 3) for x in "qkv"}),
     "cu_seqlens: expected at most T/N=4 tokens a request, got 6 for request 1."),
    (dict(lower_bound=None), "lower_bound: expected a finite float32 < 0, got none."),
    (dict(lower_bound=1.0), "lower_bound: expected a finite float32 < 0, got 1."),
    (dict(lower_bound=float("nan")), "lower_bound: expected a finite float32 < 0, got nan."),
    (dict(scale=0.0), "scale: expected a finite float32 > 0, got 0."),
    (dict(scale=float("inf")), "scale: expected a finite float32 > 0, got inf."),
    (dict(scale=1e300), "scale: expected a finite float32 > 0, got 1e+300."),
    (dict(scale=1e-50), "scale: expected a finite float32 > 0, got 1e-50."),
    (dict(lower_bound=-1e300), "lower_bound: expected a finite float32 < 0, got -1e+300."),
    (dict(onorm_eps=-1.0), "onorm_eps: expected a finite float32 >= 0, got -1."),
    (dict(replayssm_rawv=z(5, H, 8, D), replayssm_rawk=z(5, H, 8, D), replayssm_g=z(5, H, 8, D), replayssm_beta=z(5, H, 8)),
     "replayssm_rawv: expected at least pool=6 slots, got 5."),
    (dict(replayssm_rawk=z(5, H, 8, D)), "replayssm_rawk: expected shape [slots=6, H=2, L=8, K=128], got (5, 2, 8, 128)."),
]  # fmt: skip


@pytest.mark.parametrize("change,text", EXACT + [(c, OP + t) for c, t in OURS])
def test_fused_errors_are_exact_and_write_nothing(change, text):
    f, a, ring, snapshots, conv = fused_call()
    assert a["state"].shape[0] == 6
    f |= change
    out = np.full_like(a["x_v"], 77)[None]
    before = {k: v.copy() for k, v in f.items() if isinstance(v, np.ndarray)}
    with pytest.raises(ValueError) as e:
        kda.fused_kda_decode_mtp_dspark(**f, out=out)
    assert str(e.value) == text
    assert (out == 77).all() and all(same(f[k], before[k]) for k in before)


def test_fused_checks_come_in_sglangs_order():
    """Every later fault is present; the first one speaks."""
    faults = [dict(x_k=z(1, T, H, 64)), dict(x_v=z(1, T, 1, D)), dict(beta=z(1, T)), dict(cu_seqlens=np.zeros(6, np.int32)),
              dict(recurrent_state=z(6, H, 64, D)), dict(replayssm_g=None), dict(onorm_eps=None), dict(w_q=None)]  # fmt: skip
    texts = ["expected q/k shape", "expected v/g shape", "expected beta shape", "DSpARK KDA MTP", "expected recurrent state layout",
             "ReplaySSM requires all four", "fused output norm requires", "w_q: expected a tensor"]  # fmt: skip
    for i, text in enumerate(texts):
        f, *_ = fused_call()
        for change in faults[i:]:
            f |= change
        with pytest.raises(ValueError) as e:
            kda.fused_kda_decode_mtp_dspark(**f)
        assert text in str(e.value)


def test_outputs_may_not_share_memory_with_inputs_or_each_other():
    f, a, ring, _, conv = fused_call()
    for change, name in [
        (dict(out=f["x_v"]), "out: expected memory of its own, got memory that overlaps x_v."),
        (dict(replayssm_rawv=ring.rawk), "replayssm_rawk: expected memory of its own, got memory that overlaps replayssm_rawv."),
        (dict(intermediate_conv_k=conv["conv_q"]), "intermediate_conv_k: expected memory of its own, got memory that overlaps intermediate_conv_q."),
        (dict(out=f["x_q"]), "out: expected memory of its own, got memory that overlaps x_q."),
    ]:
        with pytest.raises(ValueError) as e:
            kda.fused_kda_decode_mtp_dspark(**dict(f, **change))
        assert str(e.value) == OP + name
    with pytest.raises(ValueError, match="^fused_kda_decode_mtp_dspark: replayssm_g: expected a writable array, got a read-only one.$"):
        kda.fused_kda_decode_mtp_dspark(**dict(f, replayssm_g=np.broadcast_to(ring.g[:1], ring.g.shape)))
    with pytest.raises(ValueError, match="intermediate_conv_q: expected elements that do not share memory"):
        kda.fused_kda_decode_mtp_dspark(**dict(f, intermediate_conv_q=np.lib.stride_tricks.as_strided(conv["conv_q"], conv["conv_q"].shape, (0, 3072, 12, 4))))
    assert np.isnan(ring.rawv).all()


# ---- commit -----------------------------------------------------------------------------------------------------------------------


def commit_call(layers=None, seed=3):
    a = act(case(seed, N=3, H=1, HV=2, width=4), BF16)
    ring, _, _ = buffers(a, L=8)
    call(a, rings=ring)
    stack = (lambda x: x) if layers is None else (lambda x: np.stack([x] * layers))
    return a, kda.Rings(*(stack(x) for x in ring)), stack(a["state"].copy())


@pytest.mark.parametrize("layers", [None, 3])
def test_commit_is_fold_with_null_0(layers):
    a, ring, state = commit_call(layers)
    a["slots"] = np.array([0, *a["slots"][1:]], np.int32)
    accept = np.array([2, 4, 1], np.int32)
    f = kda.commit_kda_replayssm_spec if layers is None else kda.commit_kda_replayssm_spec_all_layers
    for null in (0, -1):
        if null == -1:
            for x in ring:
                (x if layers is None else x.swapaxes(0, 1))[0] = (x if layers is None else x.swapaxes(0, 1))[int(a["slots"][1])]
        got, want = state.copy(), state.copy()
        assert f(got, *ring, a["slots"], accept, 8, 1, **({} if null == 0 else {"null_block_id": -1})) is None
        kda.fold(want, ring, a["slots"], accept, null_slot=null)
        assert same(got, want)
        assert same(got[..., 0, :, :, :], state[..., 0, :, :, :]) == (null == 0)


def test_the_commit_of_gdn_is_fold_with_one_decay_a_head():
    a, ring, state = commit_call(2)
    ring = ring._replace(g=ring.g[..., 0].copy())
    accept = np.array([2, 4, 1], np.int32)
    got, want = state.copy(), state.copy()
    assert kda.commit_gdn_replayssm_fold_all_layers(got, *ring, a["slots"], accept, 8, 1) is None
    kda.fold(want, ring, a["slots"], accept)
    assert same(got, want) and not same(got, state)
    with pytest.raises(ValueError, match=r"^commit_gdn_replayssm_fold_all_layers: g_cache: expected dtype float32, got float64\.$"):
        kda.commit_gdn_replayssm_fold_all_layers(got, *ring._replace(g=ring.g.astype(np.float64)), a["slots"], accept, 8, 1)


COMMIT_ERRORS = [
    (lambda k: k.update(max_cache_len=16), "max_cache_len: expected the rings' length 8, got 16."),
    (lambda k: k.update(num_k_heads=2), "num_k_heads: expected the rings' key heads 1, got 2."),
    (lambda k: k.update(accept_lens=np.array([1, 9, 1])), "accept_lens: expected at most L=8 tokens, got 9 at 1."),
    (lambda k: k.update(accept_lens=np.array([1, 2])), "accept_lens: expected shape [N=3], got (2,)."),
    (lambda k: k.update(ssm_state_indices=np.array([1, 2, 6])),
     "ssm_state_indices: expected slots below pool=6, or <= 0 to skip, got 6 at 2."),
    (lambda k: k.update(ssm_state_indices=np.array([3, 2, 3])),
     "ssm_state_indices: expected slots and track slots that are written at most once, got 3 twice."),
    (lambda k: k.update(mamba_track_indices=np.array([1, 2, 3])),
     "mamba_steps_to_track: expected to be given together with mamba_track_indices, got none."),
    (lambda k: k.update(mamba_steps_to_track=np.array([1, 2, 3])),
     "mamba_track_indices: expected to be given together with mamba_steps_to_track, got none."),
    (lambda k: k.update(mamba_track_indices=np.array([-1, 7, 0]), mamba_steps_to_track=np.zeros(3, int)),
     "mamba_track_indices: expected slots below pool=6, or <= 0 to skip, got 7 at 1."),
    (lambda k: k.update(mamba_track_indices=k["ssm_state_indices"][::-1].copy(), mamba_steps_to_track=np.zeros(3, int)),
     "ssm_state_indices: expected slots and track slots that are written at most once, got "),
    (lambda k: k.update(gk_cache=k["gk_cache"].astype(BF16)), "gk_cache: expected dtype float32, got bfloat16."),
    (lambda k: k.update(beta_cache=k["beta_cache"][:, :1]), "beta_cache: expected shape [slots=6, HV=2, L=8], got (6, 1, 8)."),
    (lambda k: k.update(rawk_cache=k["rawk_cache"].astype(F32)), "rawk_cache: expected dtype bfloat16, got float32."),
    (lambda k: k.update(checkpoint_state=k["checkpoint_state"][..., :32]), "checkpoint_state: expected a head dimension K of 64 or 128, got 32."),
    (lambda k: k.update(checkpoint_state=k["checkpoint_state"].swapaxes(2, 3)),
     "checkpoint_state: expected the last 3 dimensions dense row-major, got strides (8192, 4096, 1, 64) for shape (6, 2, 64, 64)."),
    (lambda k: k.update(checkpoint_state=k["checkpoint_state"][0]), "checkpoint_state: expected 4 dimensions, got shape (2, 64, 64)."),
]  # fmt: skip


@pytest.mark.parametrize("change,text", COMMIT_ERRORS, ids=range(len(COMMIT_ERRORS)))
def test_commit_errors_are_exact_and_write_nothing(change, text):
    a, ring, state = commit_call()
    k = dict(checkpoint_state=state, rawv_cache=ring.rawv, rawk_cache=ring.rawk, gk_cache=ring.g, beta_cache=ring.beta,
             ssm_state_indices=np.array([1, 2, 3]), accept_lens=np.array([2, 2, 2]), max_cache_len=8, num_k_heads=1)  # fmt: skip
    change(k)
    before = state.copy()
    with pytest.raises(ValueError) as e:
        kda.commit_kda_replayssm_spec(**k)
    full = "commit_kda_replayssm_spec: " + text
    assert str(e.value) == full or (text.endswith(" ") and str(e.value).startswith(full))
    assert same(state, before)


def test_rollback_errors():
    pool, windows = z(4, 6, 3), z(2, 5, 6, 3)
    ok = dict(conv_pools=[pool], intermediate_windows=[windows], slots=np.array([1, 2]), last_correct_step=np.array([0, 4]))
    op = "rollback_conv_windows: "
    for change, text in [
        (dict(slots=np.array([1, 4])), "slots: expected slots below pool=4, or < 0 to skip, got 4 at 1."),
        (dict(slots=np.array([1, 1])), "slots: expected slots and track slots that are written at most once, got 1 twice."),
        (dict(last_correct_step=np.array([0, 5])), "last_correct_step: expected steps below 5, or < 0 to skip, got 5 at 1."),
        (dict(rows=np.array([0, 2])), "rows: expected rows below 2, got 2 at 1."),
        (dict(track_slots=np.array([0, 3])), "track_steps: expected to be given together with track_slots, got none."),
        (dict(track_slots=np.array([0, 9]), track_steps=np.array([0, 0])), "track_slots: expected slots below pool=4, or < 0 to skip, got 9 at 1."),
        (dict(intermediate_windows=[windows, windows]), "intermediate_windows: expected one for each of the 1 conv_pools, got 2."),
        (dict(intermediate_windows=[z(2, 5, 6, 3, dtype=BF16)]), "intermediate_windows: expected dtype float32, got bfloat16."),
        (dict(intermediate_windows=[z(2, 5, 7, 3)]), "intermediate_windows: expected shape [rows, steps, C=6, 3], got (2, 5, 7, 3)."),
        (dict(conv_pools=[pool, pool], intermediate_windows=[windows, windows]),
         "conv_pools: expected memory of its own, got memory that overlaps another of them."),
        (dict(last_correct_step=np.array([0, 1]), conv_pools=[pool, z(4, 6, 3)], intermediate_windows=[windows, pool.reshape(2, 2, 6, 3)]),
         "conv_pools: expected memory of its own, got memory that overlaps intermediate_windows."),
        (dict(last_correct_step=np.array([0, 1]), conv_pools=[z(4, 6, 3), pool], intermediate_windows=[pool.reshape(2, 2, 6, 3), windows]),
         "conv_pools: expected memory of its own, got memory that overlaps intermediate_windows."),
        (dict(last_correct_step=np.array([-1, 0]), track_slots=np.array([-1, 1]), track_steps=np.array([0, 0])),
         "track_slots: expected slots that are no request's of the call, got 1 at 1."),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as e:
            kda.rollback_conv_windows(**dict(ok, **change))
        assert str(e.value) == op + text
    # the second pool's fault is found before the first pool is written
    pool[...] = 5
    with pytest.raises(ValueError):
        kda.rollback_conv_windows([pool, z(1, 6, 3)], [windows, windows], ok["slots"], ok["last_correct_step"])
    assert (pool == 5).all()


def test_verify_and_decode_errors():
    a = act(case(4, H=1, HV=2), F32)
    rings, snapshots, conv = buffers(a)
    bad_parents = np.array([[0, 0, 2, 0]] * 3)
    for change, text in [
        (dict(x_v=a["x_v"][:, :1].repeat(3, 1)[:, :, :], x_k=a["x_k"].repeat(2, 1), x_q=a["x_q"].repeat(2, 1)),
         "verify: x_v: expected a number of heads that is a multiple of H=2, got 3."),
        (dict(x_q=a["x_q"][..., :60], x_k=a["x_k"][..., :60]), "verify: x_q: expected a head dimension K of 64 or 128, got 60."),
        (dict(w_q=None), "verify: w_q: expected to be given together with cs_v, got none."),
        (dict(parents=bad_parents), "verify: parents: expected a parent before its child, got 2 for token 2 of request 0."),
        (dict(parents=bad_parents[:, :3]), "verify: parents: expected at least 4 columns, the tokens of the longest request, got 3."),
        (dict(snapshots=snapshots[:, :3]), "verify: snapshots: expected at least 4 steps, the tokens of the longest request, got 3."),
        (dict(conv, conv_v=conv["conv_v"][:, :2]), "verify: conv_v: expected at least 4 steps, the tokens of the longest request, got 2."),
        (dict(conv, w_q=None, w_k=None, w_v=None, cs_q=None, cs_k=None, cs_v=None), "verify: conv_q: expected the convolution's w_* and cs_* with it, got none."),
        (dict(rings=rings._replace(beta=None)), "verify: rings.beta: expected to be given together with rings.rawv, got none."),
        (dict(cu_seqlens=None, slots=a["slots"][:0]), "verify: slots: expected a number that divides T=12 where cu_seqlens is not given, got 0."),
        (dict(x_q=a["x_q"][None]), "verify: x_k: expected a leading dimension of 1, as x_q has, got shape (12, 1, 64)."),
        (dict(softplus_beta=0.0), "verify: softplus_beta: expected a finite float32 > 0, got 0."),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as e:
            call(a, **change)
        assert str(e.value) == text
    pools = {k: a[k] for k in ("state", "cs_q", "cs_k", "cs_v")}
    one = {k: v for k, v in a.items() if k not in ("rows", "cu_seqlens")}
    before = {k: v.copy() for k, v in pools.items()}
    for change, text in [
        (dict(slots=np.array([1, 2, 1])), "decode: slots: expected each slot at most once, got 1 twice."),
        (dict(slots=np.array([1, 2, 3, 4, 0])), "decode: slots: expected a number that divides T=12 where cu_seqlens is not given, got 5."),
        (dict(cs_k=a["cs_q"]), "decode: cs_q: expected memory of its own, got memory that overlaps cs_k."),
    ]:
        with pytest.raises(ValueError) as e:
            kda.decode(**dict(one, **change))
        assert str(e.value) == text
    assert all(same(pools[k], before[k]) for k in pools)
    frozen = a["state"].copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="^decode: state: expected a writable array, got a read-only one.$"):
        kda.decode(**dict(one, state=frozen))


# ---- the neighbours -----------------------------------------------------------------------------------------------------------------


def bare(seed, dtype, is_kda=True, lens=(1,) * 4, h=2, hv=4, k=64, v=64):
    """A call without convolution, as (arguments, the oracle's pieces)."""
    r = np.random.default_rng(seed)
    t, n = sum(lens), len(lens)
    f = lambda *s: r.standard_normal(s).astype(dtype)  # noqa: E731
    arguments = dict(
        A_log=(0.5 * r.standard_normal(hv)).astype(F32), a=f(t, hv * k if is_kda else hv), b=f(t, hv), q=f(1, t, h, k), k=f(1, t, h, k),
        v=f(1, t, hv, v), dt_bias=r.standard_normal(hv * k if is_kda else hv).astype(F32),
        initial_state_source=r.standard_normal((n + 3, hv, v, k)).astype(F32),
        initial_state_indices=(r.permutation(n + 2)[:n] + 1).astype(np.int32),
    )  # fmt: skip
    return arguments


def bare_oracle(x, lens, l2norm, lower=None, parents=None, softplus=(1.0, 20.0), scale=None):
    """(out [T, HV, V], states after each token) of the oracle's pieces; slot < 0 starts from zeros."""
    q, k, v = (np.asarray(x[n], np.float64).reshape(-1, *x[n].shape[-2:]) for n in "qkv")
    (t, h, kd), (hv, vd) = q.shape, v.shape[1:]
    gate = np.asarray(x["a"], np.float64).reshape(t, hv, -1)
    raw = gate + np.asarray(x["dt_bias"], np.float64).reshape(hv, -1)
    a = np.exp(np.asarray(x["A_log"], np.float64))[:, None]
    beta_sp, threshold = softplus
    ld = lower * oracle.sigmoid(a * raw) if lower else -a * oracle.softplus(beta_sp * raw, threshold) / beta_sp
    beta = oracle.sigmoid(np.asarray(x["b"], np.float64).reshape(t, hv))
    qn, kn = (oracle.l2norm(q), oracle.l2norm(k)) if l2norm else (q, k)
    qn = qn * (scale or kd**-0.5)
    out, states, at = np.zeros((t, hv, vd)), [], 0
    for n, m in enumerate(lens):
        slot = x["initial_state_indices"][n]
        start = x["initial_state_source"][slot].astype(np.float64) if slot >= 0 else np.zeros((hv, vd, kd))
        nodes = []
        for i in range(m):
            before = i - 1 if parents is None else parents[n][i]
            s = start if i == 0 or before < 0 else nodes[before]
            new = np.zeros_like(s)
            for j in range(hv):
                g = j * h // hv
                new[j], out[at + i, j], _ = oracle.kda_step(s[j], qn[at + i, g], kn[at + i, g], v[at + i, j], ld[at + i, j], beta[at + i, j])
            nodes.append(new)
        states.append(nodes)
        at += m
    return out, states


def near(mine, want, dtype=F32):
    limit = 2**-8 if dtype == BF16 else 3e-6
    assert np.abs(np.asarray(mine, np.float64) - want).max() <= limit * np.abs(want).max()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", ["dense", "varlen", "dense full", "varlen full", "heads"])
@pytest.mark.parametrize("flat", [False, True])
def test_cutedsl_update(form, dtype, flat):
    x = bare(1, dtype)
    x["initial_state_indices"][2] = -1
    n = 4
    want, states = bare_oracle(x, [1] * n, True)
    if form.startswith("dense"):
        for k in "qkv":
            x[k] = x[k].swapaxes(0, 1)
    if form == "heads":
        x["a"] = x["a"].reshape(n, 4, 64)
    if form.endswith("full"):
        lead = x["q"].shape[:2]
        x["a"], x["b"] = x["a"].reshape(*lead, 4, 64), x["b"].reshape(*lead, 4)
    x["A_log"] = x["A_log"].reshape(1, 1, 4, 1)
    before = x["initial_state_source"].copy()
    if flat:
        x["initial_state_source"] = x["initial_state_source"].reshape(-1)
    out = kda.cutedsl_fused_sigmoid_gating_kda_update(**x)
    assert out.shape == x["v"].shape and out.dtype == dtype
    rows = out.reshape(n, 4, 64)
    assert (rows[2] == 0).all()
    live = [0, 1, 3]
    near(rows[live], want[live], dtype)
    state = x["initial_state_source"].reshape(before.shape)
    for i in live:
        slot = x["initial_state_indices"][i]
        near(state[slot], states[i][0])
        before[slot] = state[slot]
    assert same(state, before)  # all other slots


def test_cutedsl_update_without_heads_or_arrays():
    with pytest.raises(ValueError, match="v: expected heads and channels"):
        kda.cutedsl_fused_sigmoid_gating_kda_update(
            A_log=np.zeros(0, F32), dt_bias=np.zeros(0, F32), q=np.zeros((2, 1, 0, 64), F32), k=np.zeros((2, 1, 0, 64), F32),
            v=np.zeros((2, 1, 0, 64), F32), a=np.zeros((2, 0), F32), b=np.zeros((2, 0), F32), initial_state_source=np.zeros(0, F32),
            initial_state_indices=np.zeros(2, np.int32),
        )
    for name in ("A_log", "dt_bias", "q", "k", "v", "a", "initial_state_source"):
        with pytest.raises(TypeError, match=f"^cutedsl_fused_sigmoid_gating_kda_update: {name}: expected an array"):
            kda.cutedsl_fused_sigmoid_gating_kda_update(**{**bare(1, F32), name: None})


def test_cutedsl_update_numbers_and_out():
    x = bare(2, F32)
    y = dict(x, initial_state_source=x["initial_state_source"].copy())
    want, _ = bare_oracle(x, [1] * 4, False, softplus=(0.5, 1.0), scale=0.3)
    out = np.full_like(x["v"], np.nan)
    assert kda.cutedsl_fused_sigmoid_gating_kda_update(**x, scale=0.3, use_qk_l2norm_in_kernel=False, softplus_beta=0.5,
                                                       softplus_threshold=1.0, out=out) is out  # fmt: skip
    near(out[0], want)
    cu = np.arange(5, dtype=np.int64)
    again = kda.cutedsl_fused_sigmoid_gating_kda_update(**y, scale=0.3, use_qk_l2norm_in_kernel=False, softplus_beta=0.5,
                                                        softplus_threshold=1.0, cu_seqlens=cu)  # fmt: skip
    assert same(again, out)


def test_cutedsl_errors():
    op = "cutedsl_fused_sigmoid_gating_kda_update: "
    for change, text in [
        (dict(A_log=z(3)), "Unexpected A_log shape: (3,); expected numel=4"),
        (dict(dt_bias=z(4)), "Unexpected dt_bias shape: (4,); expected numel=256"),
        (dict(a=z(4, 4, 32)), "Unexpected a shape for varlen: (4, 4, 32)"),
        (dict(initial_state_source=z(7, 4, 64, 32)), "Unexpected initial_state_source shape: (7, 4, 64, 32)"),
        (dict(initial_state_source=z(4 * 64 * 64 + 4)), "Unexpected initial_state_source shape: (16388,)"),
        (dict(scale=0.0), op + "scale: expected a finite float32 > 0, got 0."),
        (dict(b=z(4, 3)), op + "b: expected shape [T=4, HV=4], got (4, 3)."),
        (dict(initial_state_indices=np.array([1, 2, 3, 7])), op + "initial_state_indices: expected slots below pool=7, or <= -1 for padding, got 7 at 3."),
        (dict(initial_state_indices=np.array([1, 2, 3, 3])), op + "initial_state_indices: expected each slot at most once, got 3 twice."),
        (dict(q=z(1, 4, 2, 96), k=z(1, 4, 2, 96), a=z(4, 384), dt_bias=z(384), initial_state_source=z(7, 4, 64, 96)),
         op + "q: expected a head dimension K of 64 or 128, got 96."),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as e:
            kda.cutedsl_fused_sigmoid_gating_kda_update(**dict(bare(3, F32), **change))
        assert str(e.value) == text
    x = bare(3, F32)
    for k in "qkv":
        x[k] = x[k].swapaxes(0, 1)
    with pytest.raises(ValueError) as e:
        kda.cutedsl_fused_sigmoid_gating_kda_update(**dict(x, a=z(4, 100)))
    assert str(e.value) == "Unexpected a shape for dense: (4, 100)"
    with pytest.raises(ValueError) as e:
        kda.cutedsl_fused_sigmoid_gating_kda_update(**dict(x, q=x["q"][:, 0]))
    assert str(e.value) == op + "q: expected shape [N, 1, H, K] or [1, N, H, K], got (4, 2, 64)."


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("is_kda", [True, False])
@pytest.mark.parametrize("lower", [None, -4.0])
@pytest.mark.parametrize("cu", [True, False])
def test_gating_update(dtype, is_kda, lower, cu):
    lens = [3, 1, 0, 6] if cu else [3] * 4
    x = bare(4, dtype, is_kda, lens)
    x["initial_state_indices"][1] = -1
    want, states = bare_oracle(x, lens, True, lower)
    kw = dict(softplus_beta=1.0, softplus_threshold=20.0, is_kda=is_kda, lower_bound=lower, use_qk_l2norm_in_kernel=True)
    if cu:
        kw["cu_seqlens"] = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    else:
        for k in "qkv":
            x[k] = x[k].reshape(4, 3, *x[k].shape[2:])
        x["a"], x["b"] = x["a"].reshape(4, 3, -1), x["b"].reshape(4, 3, -1)
    start = x["initial_state_source"].copy()
    snap = np.full((5, 7, 4, 64, 64), np.nan, F32)
    rows = np.array([4, 2, 3, -1], np.int32)
    g = (7, 4, 5, 64) if is_kda else (7, 4, 5)
    rings = kda.Rings(*(np.full(s, np.nan, t) for s, t in (((7, 4, 5, 64), dtype), ((7, 2, 5, 64), dtype), (g, F32), ((7, 4, 5), F32))))
    ring_args = {f"replayssm_{k}": v for k, v in rings._asdict().items()}
    out = kda.fused_sigmoid_gating_delta_rule_update(**x, **kw, disable_state_update=True, intermediate_states_buffer=snap,
                                                     intermediate_state_indices=rows, cache_steps=3, cache_ring=True, **ring_args)  # fmt: skip
    assert out.shape == x["v"].shape and out.dtype == dtype and same(x["initial_state_source"], start)
    near(out.reshape(want.shape), want, dtype)
    for n, m in enumerate(lens):
        slot = x["initial_state_indices"][n]
        for i in range(7):
            if i < m and rows[n] >= 0:
                near(snap[rows[n], i], states[n][i])
        if rows[n] >= 0:
            assert np.isnan(snap[rows[n], m:]).all()
        if slot >= 0:
            assert np.isnan(rings.rawk[slot, :, min(m, 5) :].astype(F32)).all() and np.isfinite(rings.rawk[slot, :, : min(m, 5)].astype(F32)).all()
    assert np.isnan(snap[:2]).all() and np.isnan(rings.beta[0]).all()

    again = kda.fused_sigmoid_gating_delta_rule_update(**x, **kw)  # and now with the state written back
    assert same(again, out)
    folded = start.copy()
    accept = np.minimum(lens, 5)
    kda.fold(folded, rings, x["initial_state_indices"], accept)
    for n, m in enumerate(lens):
        slot = x["initial_state_indices"][n]
        if slot >= 0 and m:
            near(x["initial_state_source"][slot], states[n][-1])
            if m <= 5:
                assert same(folded[slot], x["initial_state_source"][slot])
            start[slot] = x["initial_state_source"][slot]
    assert same(start, x["initial_state_source"])


@pytest.mark.parametrize("is_kda", [True, False])
def test_gating_update_of_rows_with_spans(is_kda):
    """sglang's decode gives B rows of a token, and the spans of the tokens as if they were one row."""
    kw = dict(softplus_beta=1.0, softplus_threshold=20.0, is_kda=is_kda, use_qk_l2norm_in_kernel=True, cu_seqlens=np.array([0, 1, 4, 6]))
    one_row, rows = bare(4, F32, is_kda, [1, 3, 2]), bare(4, F32, is_kda, [1, 3, 2])
    want = kda.fused_sigmoid_gating_delta_rule_update(**one_row, **kw)
    for k in "qkv":
        rows[k] = rows[k].reshape(6, 1, *rows[k].shape[2:])
    got = kda.fused_sigmoid_gating_delta_rule_update(**rows, **kw)
    assert got.shape == rows["v"].shape and same(got.reshape(want.shape), want)
    assert same(rows["initial_state_source"], one_row["initial_state_source"])


def test_gating_update_of_a_tree():
    lens, parents = [5, 3], [[-1, 0, 0, 1, 2], [-1, 0, 0]]
    x = bare(5, F32, True, lens)
    want, states = bare_oracle(x, lens, False, None, parents)
    table = np.array([[-1, 0, 0, 1, 2], [-1, 0, 0, 9, 9]], np.int32)
    snap = np.full((2, 5, 4, 64, 64), np.nan, F32)
    out = kda.fused_sigmoid_gating_delta_rule_update(
        **x, softplus_beta=1.0, softplus_threshold=20.0, is_kda=True, cu_seqlens=np.array([0, 5, 8]), disable_state_update=True,
        intermediate_states_buffer=snap, retrieve_parent_token=table, match_cutedsl_decode=True)  # fmt: skip
    near(out[0], want)
    for n in range(2):
        for i in range(lens[n]):
            near(snap[n, i], states[n][i])


def test_gating_update_errors():
    op = "fused_sigmoid_gating_delta_rule_update: "
    for change, text in [
        (dict(scale=-1.0), "scale must be positive"),
        (dict(cache_ring=True), "cache_ring expects per-layer ring views"),
        (dict(cache_ring=True, replayssm_rawv=z(1, 7, 4, 5, 64), replayssm_rawk=z(7, 2, 5, 64), replayssm_g=z(7, 4, 5, 64), replayssm_beta=z(7, 4, 5)),
         "cache_ring expects per-layer ring views"),
        (dict(a=np.zeros((), F32)), op + "a: expected at least one dimension, got shape ()."),
        (dict(a=z(4, 4)), op + "a: expected HV*K=256 or (HV, K) last, got (4, 4)."),
        (dict(k=z(1, 4, 1, 64)), op + "k: expected shape [T=4, H=2, K=64], got (4, 1, 64)."),
        (dict(q=z(4, 2, 64)), op + "q: expected shape [B, T, H, K], got (4, 2, 64)."),
        (dict(cu_seqlens=None), op + "initial_state_indices: expected one entry for each of the B=1 rows of q, got 4."),
        (dict(q=np.lib.stride_tricks.as_strided(z(4000), (2, 2, 2, 64), (8000, 520, 256, 4)), cu_seqlens=None, initial_state_indices=np.array([1, 2])),
         op + "q: expected dimensions that can be read as one, got stride 2000 for shape (2, 2, 2, 64)."),
        (dict(initial_state_indices=np.array([1, 1, 2, 3])), op + "initial_state_indices: expected each slot at most once where rings or the state are written, got 1 twice."),
    ]:  # fmt: skip
        x = dict(bare(6, F32), softplus_beta=1.0, softplus_threshold=20.0, is_kda=True, cu_seqlens=np.arange(5))
        with pytest.raises(ValueError) as e:
            kda.fused_sigmoid_gating_delta_rule_update(**dict(x, **change))
        assert str(e.value) == text
