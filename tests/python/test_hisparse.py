"""HiSparse against the oracle: sglang's names inside sglang's state, and the library's own operations."""

import hisparse as oracle
import numpy as np
import pytest

import specstate.hisparse as hisparse

STATE = ("cache_index", "cache_policy", "scratch_locs", "scratch_state")


def spec_state(w):
    return hisparse.HiSparseSpecState(*(getattr(w, name) for name in STATE))


def run_spec(w, c, strict=False):
    hisparse.load_cache_to_device_buffer_spec_mla(
        top_k_tokens=c.top_k_tokens,
        device_buffer_tokens=w.device_buffer_tokens,
        host_cache_locs=w.host_cache_locs,
        device_buffer_locs=w.device_buffer_locs,
        host_cache=w.host_cache,
        device_buffer=w.device_buffer,
        top_k_device_locs=c.top_k_device_locs,
        req_pool_indices=c.req_pool_indices,
        seq_lens=c.seq_lens,
        state=spec_state(w),
        num_real_reqs=c.num_real_reqs,
        miss_src=c.miss_src,
        miss_dst=c.miss_dst,
        miss_count=c.miss_count,
        strict_sglang=strict,
    )


def checked_spec(w, c, **kwargs):
    w0, c0 = w.copy(), c.copy()
    run_spec(w, c)
    return oracle.check_spec_swap(w0, c0, oracle.After(w, c), **kwargs)


def run_single(w, c, **kwargs):
    call = hisparse.load_cache_to_device_buffer_dsv4_mla if w.dsv4 else hisparse.load_cache_to_device_buffer_mla
    call(
        c.top_k_tokens,
        w.device_buffer_tokens,
        w.host_cache_locs,
        w.device_buffer_locs,
        w.host_cache,
        w.device_buffer,
        c.top_k_device_locs,
        c.req_pool_indices,
        c.seq_lens,
        w.lru_slots,
        584 if w.dsv4 else w.host_cache.strides[0],
        c.top_k_tokens.shape[1],
        w.hot,
        num_real_reqs=c.num_real_reqs,
        miss_src=c.miss_src,
        miss_dst=c.miss_dst,
        miss_count=c.miss_count,
        **kwargs,
    )


def checked_single(w, c, **kwargs):
    w0, c0 = w.copy(), c.copy()
    run_single(w, c, **kwargs)
    oracle.check_single_step(w0, c0, oracle.After(w, c), skip_io=kwargs.get("skip_io", False))


# ------------------------------------------------------------------------------------------------------- speculative


def spec_world(rng):
    hot = int(rng.choice([1, 2, 3, 5, 8, 16, 33, 64]))
    steps, top_k = int(rng.integers(1, 9)), int(rng.choice([1, 3, 8, 13]))
    tail = int(rng.choice([0, 1, 4, 8]))
    scratch = int(rng.choice([0, 1, max(1, steps * top_k - hot), steps * top_k]))
    item, dtype = [(16, np.uint8), (1, np.uint8), (7, np.uint8), (132, np.uint8), (656, np.float32), (24, np.int64)][int(rng.integers(0, 6))]
    w = oracle.make_world(
        rng,
        requests=int(rng.integers(1, min(hot, 4) + 1)),
        hot=hot,
        tail=tail,
        context=int(rng.integers(40, 120)),
        item=item,
        dtype=dtype,
        scratch=scratch,
        steps=steps,
        top_k=top_k,
        resident=str(rng.choice(["identity", "random", "empty", "full"])),
        unbacked=float(rng.choice([0.0, 0.2])),
        share_host=bool(rng.integers(0, 4) == 0),
    )
    return w, steps, top_k, tail


def test_spec_sequences_against_the_oracle():
    seen = dict(union=0, over=0, overflow=0, unserved=0, tail=0, padded=0, noplan=0)
    for seed in range(160):
        rng = np.random.default_rng(seed)
        w, steps, top_k, tail = spec_world(rng)
        scratch = w.scratch_locs.shape[1]
        for _ in range(8):
            plan = bool(rng.integers(0, 2))
            c = oracle.make_spec_call(
                rng, w, steps=steps, top_k=top_k, padded=int(rng.integers(0, 3)), tail_tokens=int(rng.integers(0, tail + 1)),
                hit_share=float(rng.random()), plan=plan, plan_extra=(1, 2),
            )
            if rng.random() < 0.2:
                oracle.poison_resident(w, rng, 0)
            stats = checked_spec(w, c)
            seen["padded"] += c.real < len(c.top_k_tokens)
            seen["noplan"] += not plan
            for b, (unique, hits, tails) in enumerate(stats):
                seen["union" if unique + hits <= w.hot else "over"] += 1
                seen["overflow"] += unique > scratch
                seen["unserved"] += unique > scratch + w.hot - hits
                seen["tail"] += tails > 0
                if plan:  # only served misses are counted, so a replay never reads garbage
                    n = int(c.miss_count[b])
                    assert n == min(unique, w.hot - hits + scratch)
                    assert (c.miss_dst[b, :n] >= 0).all()
            if rng.random() < 0.1:
                oracle.reset_request(w, rng, 0)
    assert all(n > 20 for n in seen.values()), seen


def test_spec_keeps_the_index_valid_for_sglangs_kernel():
    """Every resident token can be found through the two hash banks, as sglang's lookup does."""
    rng = np.random.default_rng(5)
    w = oracle.make_world(rng, requests=2, hot=24, tail=4, context=200, item=8, steps=3, top_k=8, resident="random")
    for _ in range(60):
        checked_spec(w, oracle.make_spec_call(rng, w, steps=3, top_k=8))
        size = w.cache_index.shape[2]
        for r in range(2):
            assert w.scratch_state[0, 3 * 2 + r] > 0  # a generation was spent, not degraded
            for slot, t in enumerate(w.device_buffer_tokens[r, :24]):
                if t >= 0:
                    entry = slot << 32 | int(t)
                    assert entry in (w.cache_index[r, 0, oracle.bank0(t, size)], w.cache_index[r, 1, oracle.bank1(t, size)])


def test_spec_survives_a_damaged_index():
    for seed in range(40):
        rng = np.random.default_rng(900 + seed)
        w, steps, top_k, tail = spec_world(rng)
        for _ in range(4):
            damage = int(rng.integers(0, 3))
            if damage == 0:
                w.cache_index[:] = -1
            elif damage == 1:
                w.cache_index[:] = rng.integers(-(2**62), 2**62, w.cache_index.shape)
            else:  # stale: entries of tokens that moved
                w.cache_index[:] = rng.permutation(w.cache_index.reshape(-1)).reshape(w.cache_index.shape)
            c = oracle.make_spec_call(rng, w, steps=steps, top_k=top_k, tail_tokens=min(1, tail))
            checked_spec(w, c)  # not even extra copies: residency is what the token table says
            for r in range(w.scratch_locs.shape[0]):
                held = w.device_buffer_tokens[r, : w.hot]
                held = held[held >= 0]
                assert np.unique(held).size == held.size


def test_spec_epoch_and_generation_wrap():
    for hot in (1, 5, 16, 4096):
        rng = np.random.default_rng(hot)
        w = oracle.make_world(rng, requests=1, hot=hot, tail=2, context=60, item=8, steps=2, top_k=4, resident="random")
        bits = max(0, (hot - 1).bit_length())
        epoch_bits = min(23, 32 - bits)
        w.cache_policy[0, 0] = np.uint32(((1 << epoch_bits) - 2) << bits & 0xFFFFFFFF).astype(np.int32)
        w.cache_policy[1] = rng.integers(0, 1 << epoch_bits, hot)
        w.scratch_state[0, 3] = 2**31 - 2
        generations = []
        for _ in range(6):
            checked_spec(w, oracle.make_spec_call(rng, w, steps=2, top_k=4))
            generations.append(int(w.scratch_state[0, 3]))
        assert generations == [2**31 - 1, 1, 2, 3, 4, 5]
        assert (np.uint32(w.cache_policy[0, 0]) >> np.uint32(bits)) & ((1 << epoch_bits) - 1) == 5


def test_spec_second_call_is_all_hits_and_reads_no_host_row():
    rng = np.random.default_rng(8)
    w = oracle.make_world(rng, requests=3, hot=64, tail=4, context=300, item=32, steps=4, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=3, steps=4, top_k=8)
    checked_spec(w, c)
    again = c.copy()
    w.host_cache[:] = 0xEE
    again.top_k_device_locs[:] = 123456
    checked_spec(w, again)
    assert (w.scratch_state[0, :3] == 0).all() and (again.miss_count == 0).all()
    np.testing.assert_array_equal(again.top_k_device_locs, c.top_k_device_locs)


def test_spec_order_of_steps_and_positions_does_not_matter():
    rng = np.random.default_rng(9)
    w = oracle.make_world(rng, requests=2, hot=32, tail=4, context=200, item=16, steps=3, top_k=8, resident="full")
    c = oracle.make_spec_call(rng, w, batch=2, steps=3, top_k=8, seq=150)
    c.seq_lens[:] = 150
    w2, c2 = w.copy(), c.copy()
    order = rng.permutation(8)
    c2.top_k_tokens[:] = c.top_k_tokens[:, ::-1][:, :, order]
    checked_spec(w, c)
    checked_spec(w2, c2)
    np.testing.assert_array_equal(c.miss_count, c2.miss_count)
    for b in range(2):
        n = int(c.miss_count[b])
        assert set(c.miss_src[b, :n]) == set(c2.miss_src[b, :n])
    for r in range(2):  # exact LRU at the granularity of calls: the same tokens are evicted
        assert set(w.device_buffer_tokens[r]) == set(w2.device_buffer_tokens[r])


def test_spec_full_overflow():
    """Twice as many distinct misses as hot slots, with exactly the scratch rows that are needed: every answer is distinct."""
    rng = np.random.default_rng(10)
    hot, steps, top_k = 32, 4, 16
    w = oracle.make_world(rng, requests=2, hot=hot, tail=4, context=200, item=24, steps=steps, top_k=top_k, scratch=steps * top_k - hot, resident="full")
    c = oracle.make_spec_call(rng, w, batch=2, steps=steps, top_k=top_k, seq=196, bad_share=0)
    for b in range(2):
        away = np.setdiff1d(np.arange(150), w.device_buffer_tokens[c.req_pool_indices[b], :hot])
        c.top_k_tokens[b] = rng.permutation(away)[: steps * top_k].reshape(steps, top_k)
    stats = checked_spec(w, c)
    for b in range(2):
        assert stats[b][0] == steps * top_k == np.unique(c.top_k_device_locs[b]).size == c.miss_count[b]


def test_spec_tail_columns_cost_no_copies():
    rng = np.random.default_rng(11)
    w = oracle.make_world(rng, requests=1, hot=16, tail=64, context=200, item=576, steps=4, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=1, steps=4, top_k=8, seq=150, bad_share=0)
    oracle.set_tail(w, rng, 0, [149, 150, 151, 152], columns=[0, 7, 31, 63])
    w.host_cache_locs[0, 149:] = -1
    c.top_k_tokens[0] = [[149, 150, 151, 152, 149, 150, 151, 152]] * 4
    c.seq_lens[:] = [150, 151, 152, 153]
    stats = checked_spec(w, c)
    assert stats == [(0, 0, 2 + 4 + 6 + 8)] and c.miss_count[0] == 0
    assert (c.top_k_device_locs[0, 0] == [w.device_buffer_locs[0, 16], -1, -1, -1] * 2).all()


def test_spec_strided_arguments():
    """Every stride is honoured, rows of the caches included."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        w = oracle.make_world(rng, requests=3, hot=16, tail=4, context=90, item=24, steps=3, top_k=8)
        c = oracle.make_spec_call(rng, w, batch=2, steps=3, top_k=8, padded=1, tail_tokens=1)
        wide, wide_call = w.copy(), c.copy()
        for obj, names in ((wide, ("device_buffer_tokens", "device_buffer_locs", "host_cache_locs") + STATE), (wide_call, ("top_k_tokens", "req_pool_indices", "seq_lens", "top_k_device_locs"))):
            for name in names:
                a = getattr(obj, name)
                base = np.full(tuple(2 * n for n in a.shape), 55, a.dtype)
                view = base[tuple(slice(None, None, 2) for _ in a.shape)]
                view[...] = a
                setattr(obj, name, view)
        for name in ("miss_src", "miss_dst"):
            a = getattr(wide_call, name)
            view = np.full((2 * a.shape[0], a.shape[1]), 55, a.dtype)[::2]
            view[...] = a
            setattr(wide_call, name, view)
        for name in ("host_cache", "device_buffer"):
            a = getattr(wide, name)
            view = np.full((a.shape[0], 40), 55, np.uint8)[:, 5:29]
            view[...] = a
            setattr(wide, name, view)
        run_spec(w, c)
        run_spec(wide, wide_call)
        for a, b, names in ((w, wide, ("device_buffer_tokens", "device_buffer_locs", "device_buffer") + STATE), (c, wide_call, ("top_k_device_locs", "miss_src", "miss_dst", "miss_count"))):
            for name in names:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        for base in (wide.host_cache.base, wide.device_buffer.base):
            assert (base[:, :5] == 55).all() and (base[:, 29:] == 55).all()


# ------------------------------------------------------------------------------------------------------- single step


def test_single_sequences_against_the_oracle():
    seen = dict(short=0, long=0, misses=0, padded=0)
    for seed in range(160):
        rng = np.random.default_rng(seed)
        dsv4 = bool(rng.integers(0, 4) == 0)
        hot = int(rng.choice([1, 4, 6, 16, 33]))
        top_k = int(rng.integers(1, hot + 1))
        w = oracle.make_world(
            rng, requests=int(rng.integers(1, 5)), hot=hot, tail=int(rng.integers(1, 4)), context=int(rng.integers(2, 90)),
            item=int(rng.choice([1, 8, 132, 576])), mode="single", dsv4=dsv4, resident=str(rng.choice(["random", "full", "empty"])),
            unbacked=float(rng.choice([0, 0.2])),
        )
        for _ in range(8):
            c = oracle.make_single_call(
                rng, w, top_k=top_k, padded=int(rng.integers(0, 3)), plan=bool(rng.integers(0, 2)), hit_share=float(rng.random()),
                bad_share=float(rng.choice([0, 0.2])), unique=bool(rng.integers(0, 2)), index_dtype=[np.int32, np.int64][int(rng.integers(0, 2))],
                seq_dtype=[np.int32, np.int64][int(rng.integers(0, 2))], plan_extra=(1, 2),
            )
            checked_single(w, c, skip_io=bool(rng.random() < 0.1), block_size=int(rng.choice([32, 960, 1024])))
            seen["padded"] += c.real < len(c.top_k_tokens)
            for b in range(c.real):
                seen["short" if c.seq_lens[b] <= hot else "long"] += 1
                seen["misses"] += c.miss_count is not None and int(c.miss_count[b]) > 0
            if rng.random() < 0.1:
                oracle.reset_request(w, rng, 0)
    assert all(n > 50 for n in seen.values()), seen


def test_single_blocks_with_keys_and_values():
    """Block selection equals token selection of the blocks' tokens, and both caches move by the same plan."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        size, hot, tail = int(rng.choice([2, 4, 8])), 16, 2
        w = oracle.make_world(rng, requests=2, hot=hot, tail=tail, context=64, item=12, mode="single", resident="random")
        c = oracle.make_single_call(rng, w, top_k=hot // size, padded=1, plan=False, seq_dtype=np.int32)
        c.top_k_tokens[:] = rng.integers(-1, 64 // size + 1, c.top_k_tokens.shape)
        host_v, device_v = w.host_cache ^ 85, w.device_buffer ^ 85
        out = np.full((len(c.top_k_tokens), hot + 3), 77, np.int32)
        twin, twin_call = w.copy(), c.copy()
        tokens = np.where(c.top_k_tokens[:, :, None] < 0, -1, c.top_k_tokens[:, :, None] * size + np.arange(size)).reshape(len(out), -1)
        twin_call.top_k_tokens = tokens.astype(np.int32)
        twin_call.top_k_device_locs = np.full(tokens.shape, 77, np.int32)
        hisparse.load_blocks_to_device_buffer_mha(
            c.top_k_tokens, w.device_buffer_tokens, w.host_cache_locs, w.device_buffer_locs, w.host_cache, host_v, w.device_buffer,
            device_v, out, c.req_pool_indices, c.seq_lens, w.lru_slots, 12, hot, size, num_real_reqs=c.num_real_reqs,
        )
        oracle.swap_single_step(twin, twin_call)
        for b in range(c.real):
            if c.seq_lens[b] <= hot:  # sglang's short path: blocks look at the token only, tokens also at the column
                twin_call.top_k_device_locs[b] = [twin.device_buffer_locs[c.req_pool_indices[b], t] if 0 <= t < c.seq_lens[b] else -1 for t in tokens[b]]
        np.testing.assert_array_equal(out[:, : tokens.shape[1]], twin_call.top_k_device_locs)
        assert (out[:, tokens.shape[1] :] == 77).all()
        np.testing.assert_array_equal(w.lru_slots, twin.lru_slots)
        np.testing.assert_array_equal(w.device_buffer, twin.device_buffer)
        np.testing.assert_array_equal(w.device_buffer ^ 85, device_v)


def test_single_many_slots_need_wide_lru():
    rng = np.random.default_rng(0)
    hot = 40000
    w = oracle.make_world(rng, requests=1, hot=hot, tail=1, context=50000, item=4, mode="single", resident="full")
    w.lru_slots = rng.permutation(hot).astype(np.int32)[None]
    c = oracle.make_single_call(rng, w, batch=1, top_k=2048, seq=50000)
    w0, c0 = w.copy(), c.copy()
    out = hisparse.swap_in_single(
        c.top_k_tokens, w.device_buffer_tokens, w.host_cache_locs, w.device_buffer_locs, w.host_cache, w.device_buffer,
        c.req_pool_indices, c.seq_lens, w.lru_slots, miss_src=c.miss_src, miss_dst=c.miss_dst, miss_count=c.miss_count,
    )
    c.top_k_device_locs = out
    oracle.check_single_step(w0, c0, oracle.After(w, c))
    assert int(c.miss_count[0]) > 100


# ------------------------------------------------------------------------------------------------ replay and transfer


def test_replay_on_many_followers_is_exact_and_idempotent():
    rng = np.random.default_rng(4)
    w = oracle.make_world(rng, requests=3, hot=12, tail=4, context=70, item=16, steps=2, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=2, steps=2, top_k=8, padded=1, plan_extra=(1, 3))
    masks = (85, 170, 51)
    hosts, twins = [w.host_cache ^ m for m in masks], [w.device_buffer ^ m for m in masks]
    run_spec(w, c)
    assert c.miss_count[:2].sum() > 0 and c.miss_count[2] == 0
    for _ in range(2):
        hisparse.replay_plan(c.miss_src, c.miss_dst, c.miss_count, hosts, twins, num_real_reqs=c.num_real_reqs)
        for m, twin in zip(masks, twins):
            np.testing.assert_array_equal(twin, w.device_buffer ^ m)
    poison = np.zeros_like(hosts[0])
    hisparse.copy_cache_planned_mla(
        miss_src=c.miss_src, miss_dst=c.miss_dst, miss_count=c.miss_count, num_real_reqs=np.zeros(1, np.int32), host_cache=poison,
        device_buffer=twins[0], item_size_bytes=16,
    )
    hisparse.copy_cache_planned_mla(
        miss_src=c.miss_src, miss_dst=c.miss_dst, miss_count=c.miss_count[:3], num_real_reqs=None, host_cache=poison,
        device_buffer=twins[0], item_size_bytes=16, skip_io=True,
    )
    np.testing.assert_array_equal(twins[0], w.device_buffer ^ 85)
    hisparse.copy_cache_planned_mla(  # None: all rows
        miss_src=c.miss_src, miss_dst=c.miss_dst, miss_count=c.miss_count[:3], num_real_reqs=None, host_cache=hosts[1],
        device_buffer=twins[1], item_size_bytes=16,
    )
    np.testing.assert_array_equal(twins[1], w.device_buffer ^ 170)


def test_replay_paged():
    rng = np.random.default_rng(6)
    w = oracle.make_world(rng, requests=2, hot=6, tail=1, context=70, mode="single", dsv4=True, resident="full")
    c = oracle.make_single_call(rng, w, top_k=6, batch=2, seq=70)
    host2, device2 = w.host_cache ^ 85, w.device_buffer ^ 85
    run_single(w, c)
    hisparse.copy_cache_planned_mla(
        miss_src=c.miss_src, miss_dst=c.miss_dst, miss_count=c.miss_count, num_real_reqs=c.num_real_reqs, host_cache=host2,
        device_buffer=device2, item_size_bytes=584, is_dsv4_layout=True,
    )
    np.testing.assert_array_equal(device2, w.device_buffer ^ 85)


def test_transfer_paged():
    rng = np.random.default_rng(9)
    src = [rng.integers(0, 256, (3, oracle.DSV4_PAGE_BYTES), dtype=np.uint8) for _ in range(2)]
    dst = [rng.integers(0, 256, (2, oracle.DSV4_PAGE_BYTES), dtype=np.uint8) for _ in range(2)]
    si, di = np.array([0, 70, 191, 64], np.int64), np.array([127, 3, 64, 0], np.int64)
    want = [d.copy() for d in dst]
    oracle.transfer_dsv4(src, want, si, di)
    by_pointer = [d.copy() for d in dst]
    hisparse.transfer_paged(src, dst, si, di)
    hisparse.transfer_cache_dsv4_mla(
        np.array([a.ctypes.data for a in src], np.uint64), np.array([a.ctypes.data for a in by_pointer], np.uint64), si, di
    )
    for a, b, c in zip(want, dst, by_pointer):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    hisparse.transfer_paged(src[0], dst[0], si[:0], di[:0])
    with pytest.raises(ValueError, match=r"dst_indices: expected rows in 0\.\.127, got 128 at \[3\]"):
        hisparse.transfer_paged(src, dst, si, np.array([127, 3, 64, 128]))
    np.testing.assert_array_equal(dst[0], want[0])
