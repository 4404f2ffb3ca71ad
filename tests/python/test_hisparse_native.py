"""The library's own swap from Python: results judged by the oracle's rules, strides, layouts, and other frameworks' arrays."""

import hisparse as oracle
import numpy as np
import pytest

import specstate.hisparse as hisparse


def native(w):
    """The oracle's world as a native state: same tokens, same rows."""
    state = hisparse.new_swap_state(w.device_buffer_locs, w.hot, w.host_cache_locs.shape[1])
    state.slot_tokens[...] = w.device_buffer_tokens
    for r, row in enumerate(w.device_buffer_tokens[:, : w.hot]):
        for slot, t in enumerate(row):
            if t >= 0:
                state.token_slots[r, t] = slot
    return state


def run(w, c, state, **kwargs):
    B, S, _ = c.top_k_tokens.shape
    hisparse.swap_in(
        c.top_k_tokens, c.seq_lens.reshape(B, S), c.req_pool_indices, w.host_cache_locs, w.host_cache, w.device_buffer, state,
        scratch_locs=w.scratch_locs, num_real_reqs=c.num_real_reqs, miss_src=c.miss_src, miss_dst=c.miss_dst, miss_count=c.miss_count,
        out=c.top_k_device_locs, **kwargs,
    )


def test_native_state_obeys_the_same_rules():
    """The checker of the speculative swap, with the one difference of padded rows translated."""
    over = 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        hot, steps, top_k = int(rng.choice([1, 3, 8, 33])), int(rng.integers(1, 9)), int(rng.choice([1, 5, 12]))
        tail = int(rng.choice([0, 4, 8]))
        w = oracle.make_world(
            rng, requests=min(hot, 3), hot=hot, tail=tail, context=90, item=int(rng.choice([1, 12, 576])),
            scratch=int(rng.choice([0, max(1, steps * top_k - hot)])), steps=steps, top_k=top_k,
            resident=str(rng.choice(["identity", "random", "empty", "full"])), unbacked=float(rng.choice([0, 0.2])),
        )
        state = native(w)
        for _ in range(6):
            c = oracle.make_spec_call(rng, w, steps=steps, top_k=top_k, padded=int(rng.integers(0, 3)), tail_tokens=int(rng.integers(0, tail + 1)), hit_share=float(rng.random()))
            state.slot_tokens[:, hot:] = w.device_buffer_tokens[:, hot:]  # the call's tail
            oracle.poison_resident(w, rng, 0)
            w0, c0 = w.copy(), c.copy()
            unique, hits = np.full(len(c.top_k_tokens), -9, np.int32), np.full(len(c.top_k_tokens), -9, np.int32)
            run(w, c, state, unique_misses=unique, unique_hits=hits)
            assert (c.top_k_device_locs[c.real :] == -1).all()
            assert (c.miss_count[c.real :] == 0).all() and (unique[c.real :] == 0).all() and (hits[c.real :] == 0).all()
            c.top_k_device_locs[c.real :] = 0
            w.device_buffer_tokens[...] = state.slot_tokens
            w.scratch_state[0, c.req_pool_indices[: c.real]] = unique[: c.real]
            stats = oracle.check_spec_swap(w0, c0, oracle.After(w, c))
            for b, (misses, slots, _) in enumerate(stats):
                assert unique[b] == misses and hits[b] >= slots
                over += misses + slots > hot
    assert over > 30


def test_one_step_at_a_time_serves_the_same_tokens():
    """Splitting a verify into single steps answers every position with the same bytes."""
    rng = np.random.default_rng(1)
    w = oracle.make_world(rng, requests=2, hot=48, tail=4, context=200, item=16, steps=4, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=2, steps=4, top_k=8)
    w2 = w.copy()
    state, state2 = native(w), native(w2)
    run(w, c, state)
    for s in range(4):
        out = hisparse.swap_in(
            np.ascontiguousarray(c.top_k_tokens[:, s : s + 1]), c.seq_lens.reshape(2, 4)[:, s : s + 1], c.req_pool_indices, w2.host_cache_locs,
            w2.host_cache, w2.device_buffer, state2,
        )
        together = c.top_k_device_locs[:, s : s + 1]
        np.testing.assert_array_equal(out >= 0, together >= 0)
        np.testing.assert_array_equal(w.device_buffer[together[together >= 0]], w2.device_buffer[out[out >= 0]])


def test_batch_order_and_company_do_not_matter():
    rng = np.random.default_rng(2)
    w = oracle.make_world(rng, requests=4, hot=32, tail=4, context=200, item=16, steps=3, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=4, steps=3, top_k=8)
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        wi, ci = w.copy(), c.copy()
        for name in ("top_k_tokens", "req_pool_indices", "top_k_device_locs"):
            setattr(ci, name, getattr(c, name)[order].copy())
        ci.seq_lens = c.seq_lens.reshape(4, 3)[order].reshape(-1).copy()
        state = native(wi)
        run(wi, ci, state)
        back = np.argsort(order)
        results.append((ci.top_k_device_locs[back], ci.miss_count[back], wi.device_buffer, *state))
    for a, b in zip(*results):
        np.testing.assert_array_equal(a, b)


def test_keys_and_values_by_one_resolve():
    rng = np.random.default_rng(3)
    w = oracle.make_world(rng, requests=2, hot=16, tail=2, context=90, item=24, steps=2, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=2, steps=2, top_k=8)
    host_v, device_v, twin = w.host_cache ^ 85, w.device_buffer ^ 85, w.device_buffer ^ 51
    run(w, c, native(w), host_cache_v=host_v, device_buffer_v=device_v)
    np.testing.assert_array_equal(w.device_buffer ^ 85, device_v)
    again = np.zeros_like(twin)
    hisparse.replay_plan(c.miss_src, c.miss_dst, c.miss_count, w.host_cache ^ 51, twin, host_cache_v=host_v, device_buffer_v=again)
    np.testing.assert_array_equal(twin, w.device_buffer ^ 51)
    used = np.unique(np.concatenate([c.miss_dst[b, : c.miss_count[b]] for b in range(2)]))
    np.testing.assert_array_equal(again[used], device_v[used])
    with pytest.raises(ValueError, match=r"swap_in: device_buffer_v: expected a tensor, got none\."):
        run(w, c, native(w), host_cache_v=host_v)


def test_followers_in_the_same_call():
    """As replay_plan behind it; layers, plan and rows are checked before anything is written."""
    rng = np.random.default_rng(5)
    w = oracle.make_world(rng, requests=2, hot=16, tail=2, context=90, item=24, steps=2, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=2, steps=2, top_k=8)
    hosts = [w.host_cache ^ 51, w.host_cache ^ 17]
    want, got = [w.device_buffer ^ 51, w.device_buffer ^ 17], [w.device_buffer ^ 51, w.device_buffer ^ 17]
    w2, c2 = w.copy(), c.copy()
    run(w2, c2, native(w2))
    hisparse.replay_plan(c2.miss_src, c2.miss_dst, c2.miss_count, hosts, want, num_real_reqs=c2.num_real_reqs)
    assert c2.miss_count.sum() > 0
    first, state = (w.copy(), c.copy()), native(w)
    for layers, text in [
        ((hosts, got[:1]), r"swap_in: follower_device_buffer: expected 2 layers, got 1\."),
        ((hosts, None), r"follower_device_buffer: expected a tensor for every layer, got none\."),
        ((hosts[0], got[0][:-1]), r"swap_in: follower_device_buffer: expected at least the \d+ rows of device_buffer, got \d+\."),
        (([hosts[0], hosts[1][:-1]], got), r"swap_in: follower_host_cache\[1\]: expected at least the \d+ rows of host_cache, got \d+\."),
        ((hosts, [got[0], got[0]]), r"swap_in: follower_device_buffer\[1\]: expected memory of its own, got memory that overlaps follower_device_buffer\[0\]"),
        ((hosts[0], w.device_buffer), r"swap_in: follower_device_buffer: expected memory of its own, got memory that overlaps device_buffer"),
    ]:
        with pytest.raises(ValueError, match=text):
            run(w, c, state, follower_host_cache=layers[0], follower_device_buffer=layers[1])
    for short, text in [  # of a second pair
        ({"follower_host_cache_v": hosts[0][:-1], "follower_device_buffer_v": got[1]}, r"follower_host_cache_v: expected at least the \d+ rows of host_cache, got"),
        ({"follower_host_cache_v": hosts[1], "follower_device_buffer_v": got[1][:-1]}, r"follower_device_buffer_v: expected at least the \d+ rows of device_buffer, got"),
    ]:
        with pytest.raises(ValueError, match="swap_in: " + text):
            run(w, c, state, follower_host_cache=hosts[0], follower_device_buffer=got[0], **short)
    with pytest.raises(ValueError, match=r"swap_in: miss_src: expected a plan for the followers, got none\."):
        hisparse.swap_in(
            c.top_k_tokens, c.seq_lens.reshape(2, 2), c.req_pool_indices, w.host_cache_locs, w.host_cache, w.device_buffer, state,
            follower_host_cache=hosts, follower_device_buffer=got,
        )
    np.testing.assert_array_equal(w.device_buffer, first[0].device_buffer)
    np.testing.assert_array_equal(c.top_k_device_locs, first[1].top_k_device_locs)
    run(w, c, state, follower_host_cache=[*hosts, w.host_cache], follower_device_buffer=[*got, w.device_buffer])  # the layer itself may be named, too
    np.testing.assert_array_equal(w.device_buffer, w2.device_buffer)
    np.testing.assert_array_equal(c.top_k_device_locs, c2.top_k_device_locs)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


def test_paged_layout_and_skip_io():
    rng = np.random.default_rng(4)
    w = oracle.make_world(rng, requests=2, hot=16, tail=2, context=90, steps=2, top_k=8, dsv4=True, scratch=2)
    c = oracle.make_spec_call(rng, w, batch=2, steps=2, top_k=8, bad_share=0)
    before, state = w.device_buffer.copy(), native(w)
    timed, timed_call = native(w), c.copy()
    run(w, timed_call, timed, layout="dsv4", skip_io=True)
    np.testing.assert_array_equal(w.device_buffer, before)
    run(w, c, state, layout="dsv4")
    np.testing.assert_array_equal(timed_call.top_k_device_locs, c.top_k_device_locs)
    for a, b in zip(timed, state):
        np.testing.assert_array_equal(a, b)
    host, device = oracle.dsv4_rows(w.host_cache), oracle.dsv4_rows(w.device_buffer)
    for b in range(2):
        n = int(c.miss_count[b])
        assert n > 0
        np.testing.assert_array_equal(device[c.miss_dst[b, :n]], host[c.miss_src[b, :n]])
    np.testing.assert_array_equal(oracle.dsv4_padding(w.device_buffer), oracle.dsv4_padding(before))
    with pytest.raises(ValueError, match="layout: expected 'linear' or 'dsv4', got 'pages'"):
        run(w, c, state, layout="pages")


def test_reset_one_request():
    rng = np.random.default_rng(5)
    w = oracle.make_world(rng, requests=3, hot=8, tail=2, context=40, item=8, steps=2, top_k=4, resident="full")
    state = native(w)
    run(w, oracle.make_spec_call(rng, w, batch=3, steps=2, top_k=4), state)
    kept = [x[[0, 2]].copy() for x in state]
    hisparse.reset_swap_state(state, np.array([1], np.int32))
    for a, b in zip(state, kept):
        np.testing.assert_array_equal(a[[0, 2]], b)
    assert (state.slot_tokens[1] == -1).all() and (state.token_slots[1] == -1).all() and state.clock[1] == 0
    for bad in ([3], [-1], [0, 7]):
        with pytest.raises(ValueError, match=r"reset_swap_state: requests: expected request ids in 0\.\.2"):
            hisparse.reset_swap_state(state, np.array(bad))
    with pytest.raises(ValueError, match=r"reset_swap_state: requests: expected at most R=3 request ids, got \(1099511627776,\)"):
        hisparse.reset_swap_state(state, np.broadcast_to(np.array([0], np.int32), 1 << 40))
    np.testing.assert_array_equal(state.slot_tokens[0], kept[0][0])


def test_stale_hints_are_harmless():
    """token_slots only hints: garbage in it costs nothing but copies that the slots do not confirm as hits."""
    rng = np.random.default_rng(6)
    w = oracle.make_world(rng, requests=1, hot=8, tail=0, context=40, item=8, steps=1, top_k=6, resident="full")
    state = native(w)
    held = w.device_buffer_tokens[0, :8]
    away = np.setdiff1d(np.arange(40), held)
    state.token_slots[0, away] = rng.integers(-5, 12, away.size)
    tokens = np.concatenate([held[:2], away[:4]]).astype(np.int32).reshape(1, 1, 6)
    misses = np.zeros(1, np.int32)
    out = hisparse.swap_in(tokens, np.array([[40]]), np.array([0]), w.host_cache_locs, w.host_cache, w.device_buffer, state, unique_misses=misses)
    assert misses[0] == 4
    np.testing.assert_array_equal(out[0, 0, :2], w.device_buffer_locs[0, :2])
    np.testing.assert_array_equal(w.device_buffer[out[0, 0, 2:]], w.host_cache[w.host_cache_locs[0, tokens[0, 0, 2:]]])


def test_unprepared_state_is_refused():
    rng = np.random.default_rng(7)
    w = oracle.make_world(rng, requests=1, hot=8, tail=0, context=40, item=8, steps=1, top_k=6)
    state = native(w)
    state.clock[0] = -7
    with pytest.raises(ValueError, match=r"swap_in: state\.clock: expected a state that reset_swap_state has prepared, got -7 at \[0\]"):
        run(w, oracle.make_spec_call(rng, w, batch=1, steps=1, top_k=6), state)


def test_torch_tensors_zero_copy():
    torch = pytest.importorskip("torch", reason="needs-torch: torch is not installed")
    rng = np.random.default_rng(8)
    w = oracle.make_world(rng, requests=2, hot=16, tail=2, context=90, item=32, steps=2, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=2, steps=2, top_k=8)
    w2 = w.copy()
    state = hisparse.HiSparseSpecState(*(torch.from_numpy(getattr(w, k)) for k in ("cache_index", "cache_policy", "scratch_locs", "scratch_state")))
    host = torch.from_numpy(w.host_cache).view(torch.bfloat16)
    hisparse.load_cache_to_device_buffer_spec_mla(
        **{k: torch.from_numpy(getattr(w, k)) for k in ("device_buffer_tokens", "host_cache_locs", "device_buffer_locs")},
        host_cache=host, device_buffer=torch.from_numpy(w.device_buffer).view(torch.bfloat16), state=state,
        **{k: torch.from_numpy(getattr(c, k)) for k in ("top_k_tokens", "top_k_device_locs", "req_pool_indices", "seq_lens", "num_real_reqs", "miss_src", "miss_dst", "miss_count")},
    )
    c0 = c.copy()
    c0.top_k_device_locs[:] = 123456
    oracle.check_spec_swap(w2, c0, oracle.After(w, c))
    native_state = hisparse.new_swap_state(torch.from_numpy(w2.device_buffer_locs), 16, 90)
    assert all(isinstance(x, torch.Tensor) for x in native_state)
    out = hisparse.swap_in(
        torch.from_numpy(c.top_k_tokens), torch.from_numpy(c.seq_lens).view(2, 2), torch.from_numpy(c.req_pool_indices),
        torch.from_numpy(w2.host_cache_locs), torch.from_numpy(w2.host_cache), torch.from_numpy(w2.device_buffer), native_state,
    )
    assert isinstance(out, torch.Tensor) and out.dtype == torch.int32 and (out >= 0).any()
    fresh = hisparse.new_spec_state(torch.zeros((2, 3), dtype=torch.int32), 16, 16)
    assert [tuple(x.shape) for x in fresh] == [(2, 2, 32), (3, 16), (2, 3), (3, 80)]
