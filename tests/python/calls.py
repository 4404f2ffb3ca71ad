"""One valid call of each operation, small; shared by the tests that ask about calls, mutate them or time them."""

import numpy as np

from specstate import hisparse, kda


def _random(seed):
    rng = np.random.default_rng(seed)
    return rng, lambda *shape: rng.standard_normal(shape).astype(np.float32)


def verify_greedy(b=2, w=4):
    return {
        "candidates": np.arange(b * w, dtype=np.int32).reshape(b, w) % 3,
        "target_argmax": np.arange(b * w, dtype=np.int32).reshape(b, w) % 2,
        "verify_lens": np.full(b, w, np.int32),
        "out": (np.full(b, -7, np.int32), np.full((b, w), -7, np.int32)),
    }


def verify_rejection(b=2, w=3, v=5):
    rng, _ = _random(3)
    p = rng.random((2, b, w, v)).astype(np.float32)
    return {
        "candidates": rng.integers(0, v, (b, w)).astype(np.int32), "draft_probs": p[0, :, 1:].copy(), "target_probs": p[1].copy(),
        "uniforms": rng.random((b, w)).astype(np.float32), "out": (np.full(b, -7, np.int32), np.full((b, w), -7, np.int32)),
    }  # fmt: skip


def plan_verify_lengths(b=2, g=3):
    rng, _ = _random(4)
    return {
        "confidences": rng.random((b, g)).astype(np.float32), "probe_tokens": np.array([1, 4, 8], np.int32),
        "steps_per_second": np.array([100.0, 90.0, 70.0]), "max_lens": np.full(b, 3, np.int32), "out": np.full(b, -7, np.int32),
    }  # fmt: skip


def swap_in(b=2, s=3, k=8, hot=32, tail=4, context=64):
    rng, _ = _random(0)
    locs = np.arange(b * (hot + tail), dtype=np.int32).reshape(b, -1)
    return {
        "top_k_tokens": rng.integers(0, context, (b, s, k)).astype(np.int32), "seq_lens": np.full((b, s), context, np.int32),
        "req_pool_indices": np.arange(b, dtype=np.int64), "host_cache_locs": np.arange(b * context, dtype=np.int64).reshape(b, context),
        "host_cache": rng.integers(0, 255, (b * context, 16)).astype(np.uint8), "device_buffer": np.zeros((b * (hot + tail), 16), np.uint8),
        "state": hisparse.new_swap_state(locs, hot, context), "num_real_reqs": np.array([b], np.int32),
        "miss_src": np.full((b, s * k), -7, np.int64), "miss_dst": np.full((b, s * k), -7, np.int32), "miss_count": np.full(b, -7, np.int32),
        "out": np.full((b, s, k), -7, np.int32),
    }  # fmt: skip


def load_cache_to_device_buffer_spec_mla(b=2, s=2, k=4, hot=16, tail=4, context=32):
    rng, _ = _random(5)
    return {
        "top_k_tokens": rng.integers(0, context, (b, s, k)).astype(np.int32), "device_buffer_tokens": np.full((b, hot + tail), -1, np.int32),
        "host_cache_locs": np.arange(b * context, dtype=np.int64).reshape(b, context),
        "device_buffer_locs": np.arange(b * (hot + tail), dtype=np.int32).reshape(b, -1),
        "host_cache": rng.integers(0, 255, (b * context, 16)).astype(np.uint8), "device_buffer": np.zeros((b * (hot + tail + 4), 16), np.uint8),
        "top_k_device_locs": np.full((b, s, k), -7, np.int32), "req_pool_indices": np.arange(b, dtype=np.int64),
        "seq_lens": np.full(b * s, context, np.int32), "num_real_reqs": np.array([b], np.int32),
        "state": hisparse.new_spec_state(np.arange(4 * b, dtype=np.int32).reshape(b, 4) + b * (hot + tail), hot, s * k),
    }  # fmt: skip


def load_cache_to_device_buffer_mla(b=2, k=4, hot=8, context=32):
    rng, _ = _random(6)
    return {
        "top_k_tokens": np.stack([rng.permutation(context)[:k] for _ in range(b)]).astype(np.int32),
        "device_buffer_tokens": np.full((b, hot + 1), -1, np.int32),
        "host_cache_locs": np.arange(b * context, dtype=np.int64).reshape(b, context),
        "device_buffer_locs": np.arange(b * (hot + 1), dtype=np.int32).reshape(b, -1),
        "host_cache": rng.integers(0, 255, (b * context, 16)).astype(np.uint8), "device_buffer": np.zeros((b * (hot + 1), 16), np.uint8),
        "top_k_device_locs": np.full((b, k), -7, np.int32), "req_pool_indices": np.arange(b, dtype=np.int64),
        "seq_lens": np.full(b, context, np.int32), "lru_slots": np.tile(np.arange(hot, dtype=np.int16), (b, 1)), "item_size_bytes": 16,
        "num_top_k": k, "hot_buffer_size": hot,
    }  # fmt: skip


def copy_cache_planned_mla(b=2, k=3, rows=16):
    rng, _ = _random(7)
    return {
        "miss_src": rng.integers(0, rows, (b, k)), "miss_dst": rng.permutation(rows)[: b * k].reshape(b, k).astype(np.int32),
        "miss_count": np.array([k, k - 1], np.int32), "num_real_reqs": np.array([b], np.int32),
        "host_cache": rng.integers(0, 255, (rows, 16)).astype(np.uint8), "device_buffer": np.zeros((rows, 16), np.uint8), "item_size_bytes": 16,
    }  # fmt: skip


def decode(n=2, t=4, h=1, d=64):
    _, r = _random(1)
    return {
        "x_q": r(t, h, d), "x_k": r(t, h, d), "x_v": r(t, h, d), "g": r(t, h, d), "beta": r(t, h), "A_log": r(h), "dt_bias": r(h * d),
        "state": r(n, h, d, d), "slots": np.arange(n, dtype=np.int32), "cu_seqlens": np.array([0, 2, 4], np.int32), "out": r(t, h, d),
    }  # fmt: skip


def verify(n=2, t=4, h=1, d=64, ring=3):
    r = _random(8)[1]
    rings = kda.Rings(r(n, h, ring, d), r(n, h, ring, d), r(n, h, ring, d), r(n, h, ring))
    return {**decode(n, t, h, d), "rings": rings, "rows": np.arange(n, dtype=np.int64), "pending": np.zeros(n, np.int32)}


def fold(n=2, h=1, d=64, ring=3):
    call = verify(n, 4, h, d, ring)
    kda.verify(**call)
    return {"state": call["state"], "rings": call["rings"], "slots": call["slots"], "accept": np.array([2, 1], np.int32)}


def defer_fold(n=2):
    return {"pending": np.zeros((2, n), np.int32), "slots": np.arange(n, dtype=np.int64), "accept": np.array([2, 1], np.int32)}


def rollback_conv_windows(n=2, c=8, steps=3):
    _, r = _random(9)
    return {
        "conv_pools": r(n, c, 3), "intermediate_windows": r(n, steps, c, 3), "slots": np.arange(n, dtype=np.int64),
        "last_correct_step": np.array([0, 2], np.int64),
    }  # fmt: skip


def materialize_into_pool():
    _, r = _random(2)
    return {
        "ctx_hidden": r(3, 16), "kv_weight": r(2, 16, 16), "k_norm_weight": r(2, 8), "eps": np.full(2, 1e-6, np.float32),
        "cos_sin_cache": r(10, 8), "positions": np.arange(3), "slot_mapping": np.arange(3), "k_pool": r(2, 4, 1, 8), "v_pool": r(2, 4, 1, 8),
    }  # fmt: skip


def fused_norm_rope_stacked(t=3, layers=2, n=1, d=8):
    _, r = _random(10)
    return {
        "kv": r(t, layers, 2 * n * d), "k_norm_weight": r(layers, d), "eps": np.full(layers, 1e-6, np.float32), "cos_sin_cache": r(10, d),
        "positions": np.arange(t), "num_kv_heads": n, "head_dim": d, "rotary_dim": d, "k_out": r(layers, t, n, d), "v_out": r(layers, t, n, d),
    }  # fmt: skip


def reset_swap_state():
    return {"state": swap_in()["state"], "requests": np.array([0], np.int32)}


def swap_in_single():
    call = load_cache_to_device_buffer_mla()
    out = call.pop("top_k_device_locs")
    return {**{k: x for k, x in call.items() if isinstance(x, np.ndarray)}, "out": out}


def load_blocks_to_device_buffer_mha(size=2):
    call = load_cache_to_device_buffer_mla()
    hosts, devices = call.pop("host_cache"), call.pop("device_buffer")
    tokens = call.pop("top_k_tokens")
    call.pop("num_top_k")
    return {
        **call, "top_k_blocks": np.ascontiguousarray(tokens[:, :2] // size), "host_cache_k": hosts, "host_cache_v": hosts[::-1].copy(),
        "device_buffer_k": devices, "device_buffer_v": devices.copy(), "sparse_block_size": size,
    }  # fmt: skip


def replay_plan():
    call = copy_cache_planned_mla()
    del call["item_size_bytes"]
    return call


def commit_kda_replayssm_spec():
    call = fold()
    rings = dict(zip(("rawv_cache", "rawk_cache", "gk_cache", "beta_cache"), call["rings"], strict=True))
    return {
        "checkpoint_state": call["state"], **rings, "ssm_state_indices": call["slots"], "accept_lens": call["accept"], "max_cache_len": 3,
        "num_k_heads": 1, "null_block_id": -1,
    }  # fmt: skip


def commit_kda_replayssm_spec_all_layers():
    call = commit_kda_replayssm_spec()
    layered = ("checkpoint_state", "rawv_cache", "rawk_cache", "gk_cache", "beta_cache")
    return {k: np.stack([x, x]) if k in layered else x for k, x in call.items()}


def commit_gdn_replayssm_fold_all_layers():
    call = commit_kda_replayssm_spec_all_layers()
    return {("g_cache" if k == "gk_cache" else k): x[..., 0].copy() if k == "gk_cache" else x for k, x in call.items()}


def fused_kda_decode_mtp_dspark(n=2, w=2, h=1, d=128):
    _, r = _random(11)
    t = n * w
    wide = {k: r(1, t, h, d) for k in ("x_q", "x_k", "x_v", "g", "onorm_gate", "out")}
    taps = {"w_" + k: r(h * d, 4) for k in "qkv"}
    windows = {"cs_" + k: r(n, h * d, 3) for k in "qkv"}
    after = {"intermediate_conv_" + k: r(n, w, h * d, 3) for k in "qkv"}
    return {
        **wide, **taps, **windows, **after, "beta": r(1, t, h), "A_log": r(h), "dt_bias": r(h * d), "recurrent_state": r(n, h, d, d),
        "intermediate_ssm": r(n, w, h, d, d), "intermediate_state_indices": np.arange(n, dtype=np.int32),
        "ssm_state_indices": np.arange(n, dtype=np.int32), "cu_seqlens": np.arange(0, t + 1, w, dtype=np.int32), "lower_bound": -5.0,
        "onorm_weight": r(d), "onorm_eps": 1e-5,
    }  # fmt: skip


def fused_sigmoid_gating_delta_rule_update(n=2, t=4, h=1, d=64):
    _, r = _random(12)
    return {
        "A_log": r(h), "a": r(1, t, h * d), "dt_bias": r(h * d), "softplus_beta": 1.0, "softplus_threshold": 20.0, "q": r(1, t, h, d),
        "k": r(1, t, h, d), "v": r(1, t, h, d), "b": r(1, t, h), "initial_state_source": r(n, h, d, d),
        "initial_state_indices": np.arange(n, dtype=np.int32), "cu_seqlens": np.array([0, 2, 4], np.int32), "is_kda": True, "out": r(1, t, h, d),
    }  # fmt: skip


def cutedsl_fused_sigmoid_gating_kda_update(n=2, h=1, d=64):
    _, r = _random(13)
    return {
        "A_log": r(h), "dt_bias": r(h * d), "q": r(n, 1, h, d), "k": r(n, 1, h, d), "v": r(n, 1, h, d), "a": r(n, h * d), "b": r(n, h),
        "initial_state_source": r(n, h, d, d), "initial_state_indices": np.arange(n, dtype=np.int32), "out": r(n, 1, h, d),
    }  # fmt: skip


def transfer_paged():
    rng, _ = _random(14)
    pages = rng.integers(0, 255, (2, 1, 37440)).astype(np.uint8)
    return {"src": pages[0], "dst": pages[1], "src_indices": np.array([1, 5]), "dst_indices": np.array([0, 63])}


def load_cache_to_device_buffer_dsv4_mla():
    call = load_cache_to_device_buffer_mla()
    return {**call, "host_cache": np.ones((1, 37440), np.uint8), "device_buffer": np.zeros((1, 37440), np.uint8), "item_size_bytes": 584}


_PAGES = np.zeros((2, 37440), np.uint8)  # outlive the calls that know only their addresses


def transfer_cache_dsv4_mla():
    at = [np.array([page.ctypes.data], np.uint64) for page in _PAGES]
    return {"src_ptrs": at[0], "dst_ptrs": at[1], "src_indices": np.array([1, 5]), "dst_indices": np.array([0, 63])}


def await_follower():  # one that has arrived
    return {"arrived": np.array([0, 1], np.int32), "follower": 1}


def raise_pending_error():
    return {"like": np.zeros(1, np.float32)}


# What may be mutated at random.
CALLS = {
    f.__name__: f
    for f in (
        verify_greedy, verify_rejection, plan_verify_lengths, swap_in, load_cache_to_device_buffer_spec_mla, load_cache_to_device_buffer_mla,
        copy_cache_planned_mla, decode, verify, fold, defer_fold, rollback_conv_windows, materialize_into_pool, fused_norm_rope_stacked, reset_swap_state,
        swap_in_single, load_blocks_to_device_buffer_mha, replay_plan, commit_kda_replayssm_spec, commit_kda_replayssm_spec_all_layers,
        commit_gdn_replayssm_fold_all_layers,
        fused_kda_decode_mtp_dspark, fused_sigmoid_gating_delta_rule_update, cutedsl_fused_sigmoid_gating_kda_update, transfer_paged,
        load_cache_to_device_buffer_dsv4_mla,
    )
}  # fmt: skip
# And what takes addresses on trust, waits, or writes nothing.
ALL_CALLS = {f.__name__: f for f in (*CALLS.values(), transfer_cache_dsv4_mla, await_follower, raise_pending_error)}


def operation(name):
    """The function itself."""
    import specstate
    from specstate._supports import OPERATIONS

    return getattr(getattr(specstate, next(m for m, names in OPERATIONS.items() if name in names)), name)


def leaves(arguments):
    """[(path, array)]: the arrays of a call, those inside tuples too."""
    found = []
    for name, x in arguments.items():
        if isinstance(x, tuple):
            found += [((name, i), part) for i, part in enumerate(x)]
        elif isinstance(x, np.ndarray):
            found.append(((name, None), x))
    return found


def replace(arguments, path, value):
    name, i = path
    if i is None:
        return {**arguments, name: value}
    parts = list(arguments[name])
    parts[i] = value
    whole = arguments[name]
    return {**arguments, name: type(whole)(*parts) if hasattr(whole, "_fields") else tuple(parts)}
