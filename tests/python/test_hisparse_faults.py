"""Faults that people met in systems of this kind, by kind (identifiers of the collection in the project's design notes)."""

import hisparse as oracle
import numpy as np
import pytest
from test_hisparse import checked_single, run_single, run_spec

import specstate
import specstate.hisparse as hisparse


def single_world(rng, hot, top_k, context, item=16, requests=1, **kwargs):
    return oracle.make_world(rng, requests=requests, hot=hot, tail=1, context=context, item=item, mode="single", **kwargs)


def coordinator(layers=1, item=8, device_rows=64, host_rows=200, **kwargs):
    hosts = [np.full((host_rows, item), 0xAA, np.uint8) for _ in range(layers)]
    devices = [np.full((device_rows, item), 0xBB, np.uint8) for _ in range(layers)]
    config = dict(requests=4, hot=8, window=4, context=host_rows, page_size=1)
    config.update(kwargs)
    return hisparse.Coordinator(hosts, devices, **config), hosts, devices


def prefill(c, request, tokens, layers=1, item=8, seed=0):
    rows = np.random.default_rng(seed).integers(0, 256, (layers, tokens, item), dtype=np.uint8)
    c.admit(request, tokens)
    for layer in range(layers):
        c.stage(layer, request, 0, rows[layer])
    c.append(request, tokens)
    return rows


# -------------------------------------------------------------------------------------------------------- validation


def test_val_18_global_layer_ids_under_pipeline_parallelism():
    c, hosts, _ = coordinator(layers=10, first_layer=20)
    c.admit(0, 1)
    for layer in range(20, 30):
        c.stage(layer, 0, 0, np.full((1, 8), layer, np.uint8))
    c.append(0, 1)
    where = c.host_row(0, 0)
    assert [int(h[where, 0]) for h in hosts] == list(range(20, 30))
    for layer in (5, 30, 0, 9):
        with pytest.raises(ValueError, match=rf"Coordinator: layer: expected 20\.\.29, got {layer}\."):
            c.stage(layer, 0, 1, np.zeros((0, 8), np.uint8))


def test_val_20_length_is_not_bounded_by_device_rows():
    c, _, _ = coordinator(device_rows=100, host_rows=200, hot=8, requests=1)
    prefill(c, 0, 150)
    assert c.max_length == 200
    for _ in range(10):
        c.prepare_verify([0], [1])
        c.accept([0], [1])
    assert c.length(0) == 160


def test_val_22_unsupported_combinations_fail_at_construction():
    for change, text in [
        (dict(window=4, tail=3), "Coordinator: tail: expected at least window=4 slots, got 3."),
        (dict(page_size=0), "Coordinator: page_size: expected >= 1, got 0."),
        (dict(top_k=9), "Coordinator: hot: expected at least top_k=9 slots, got 8."),
        (dict(anchor_of=[1]), "Coordinator: anchor_of: expected a preceding anchor layer for layer 0, got 1."),
    ]:
        with pytest.raises(ValueError) as e:
            coordinator(**change)
        assert str(e.value) == text


# ---------------------------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("layout", ["spec", "native", "native dsv4"])
def test_rol_17_drafts_resolve_to_the_extra_page_in_every_layout(layout):
    rng = np.random.default_rng(17)
    dsv4 = layout.endswith("dsv4")
    w = oracle.make_world(rng, requests=1, hot=16, tail=8, context=100, item=16, steps=4, top_k=6, dsv4=dsv4)
    seq = 60
    oracle.set_tail(w, rng, 0, [seq, seq + 1, seq + 2, seq + 3], columns=[0, 1, 2, 3])
    w.host_cache_locs[0, seq:] = -1
    tokens = np.array([[[seq, -1, -1, -1, 3, 4], [seq, seq + 1, -1, -1, 3, 4], [seq, seq + 1, seq + 2, -1, 3, 4], [seq, seq + 1, seq + 2, seq + 3, 3, 4]]], np.int32)
    lens, out = np.array([[seq + 1, seq + 2, seq + 3, seq + 4]], np.int32), np.full((1, 4, 6), 123456, np.int32)
    count, plan = np.zeros(1, np.int32), (np.zeros((1, 24), np.int64), np.zeros((1, 24), np.int32))
    if layout == "spec":
        hisparse.load_cache_to_device_buffer_spec_mla(
            top_k_tokens=tokens, device_buffer_tokens=w.device_buffer_tokens, host_cache_locs=w.host_cache_locs, device_buffer_locs=w.device_buffer_locs,
            host_cache=w.host_cache, device_buffer=w.device_buffer, top_k_device_locs=out, req_pool_indices=np.zeros(1, np.int64), seq_lens=lens.reshape(-1),
            state=hisparse.HiSparseSpecState(w.cache_index, w.cache_policy, w.scratch_locs, w.scratch_state), num_real_reqs=np.ones(1, np.int32),
            miss_src=plan[0], miss_dst=plan[1], miss_count=count,
        )
    else:
        state = hisparse.new_swap_state(w.device_buffer_locs, 16, 100)
        state.slot_tokens[...] = w.device_buffer_tokens
        hisparse.swap_in(
            tokens, lens, np.zeros(1, np.int64), w.host_cache_locs, w.host_cache, w.device_buffer, state, layout="dsv4" if dsv4 else "linear",
            miss_src=plan[0], miss_dst=plan[1], miss_count=count, out=out,
        )
    for s in range(4):
        np.testing.assert_array_equal(out[0, s, : s + 1], w.device_buffer_locs[0, 16 : 16 + s + 1])
    drafts = set(w.host_cache_locs[0, :seq])
    assert set(plan[0][0, : count[0]]) <= drafts and count[0] <= 2


def test_rol_18_growth_initialises_every_table():
    """Grow past the first page, look drafts up in the grown part, accept some, reject some."""
    c, _, devices = coordinator(device_rows=40, hot=16, window=3, page_size=4, requests=1)
    prefill(c, 0, 4)
    tokens, locs = c.tables(0)
    assert (locs[0, :4] >= 0).all() and (locs[0, 4:16] == -1).all()
    content = {}
    for step, accepted in enumerate([3, 0, 1, 2, 3, 0, 3, 3, 1]):
        n = c.length(0)
        rows = c.prepare_verify([0], [3])[0]
        for j in range(3):
            devices[0][rows[j]] = 100 + step * 10 + j
            content[n + j] = 100 + step * 10 + j
        out = c.swap(0, np.array([[n, n + 1, n + 2]], np.int32), np.array([n + 3]), np.array([0]))
        np.testing.assert_array_equal(out[0], rows)
        c.accept([0], [accepted])
        tokens, locs = c.tables(0)
        assert (locs[0, : min(16, n + 3)] >= 0).all()
        assert tokens.max() < c.length(0) and (tokens[0][locs[0] < 0] == -1).all()
        held = tokens[0][tokens[0] >= 0]
        assert np.unique(held).size == held.size
        for t, loc in zip(tokens[0], locs[0]):
            if t >= 4:
                assert devices[0][loc, 0] == content[int(t)]
    assert c.length(0) == 4 + 16


# ----------------------------------------------------------------------------------------------------------- padding


def test_pad_01_no_output_keeps_an_old_value():
    rng = np.random.default_rng(1)
    w = single_world(rng, hot=8, top_k=8, context=40, requests=4, resident="identity")
    c = oracle.make_single_call(rng, w, batch=1, top_k=8, seq=5)
    c.top_k_tokens[0] = [0, 1, 2, 3, 4, 5, 6, 7]
    checked_single(w, c)
    assert (c.top_k_device_locs[0, 5:] == -1).all() and not (c.top_k_device_locs == 123456).any()
    c = oracle.make_single_call(rng, w, batch=2, top_k=8, padded=2)
    checked_single(w, c)
    assert (c.top_k_device_locs[2:] == -1).all() and not (c.top_k_device_locs == 123456).any()
    w = oracle.make_world(rng, requests=4, hot=8, tail=1, context=40, item=8, steps=2, top_k=8)
    c = oracle.make_spec_call(rng, w, batch=2, steps=2, top_k=8, padded=2)
    run_spec(w, c)
    assert not (c.top_k_device_locs == 123456).any() and (c.top_k_device_locs[2:] == 0).all()


# ------------------------------------------------------------------------------------------------ rows of other bytes

# Beside rows of 8 float32: another width, another dtype, one flat pool.
OTHER_ROWS = {
    "wider": (lambda x: np.ones((len(x), 16), np.float32), 64),
    "narrower": (lambda x: np.ones((len(x), 4), np.float32), 16),
    "half": (lambda x: x.astype(np.float16), 16),
    "double": (lambda x: x.astype(np.float64), 64),
    "flat": (lambda x: x.reshape(-1), 4),
}
PAIR = ("host_cache", "device_buffer", "host_cache_v", "device_buffer_v")


def mismatches():
    """(buffers, argument, bytes of a row, bytes of its rows): each buffer beside three right ones. The first says how long a row is."""
    for kind, (other, got) in OTHER_ROWS.items():
        for broken in PAIR:
            for second in (False, True):
                if broken.endswith("_v") and not second:
                    continue
                buffers = {name: np.full((64, 8), i, np.float32) for i, name in enumerate(PAIR[: 4 if second else 2])}
                buffers[broken] = other(buffers[broken])
                first = broken == "host_cache"
                yield pytest.param(buffers, "device_buffer" if first else broken, got if first else 32, 32 if first else got,
                                   id=f"{kind}-{broken}-{len(buffers)}")  # fmt: skip


def refused_untouched(call, arguments, text, asked=None):
    held = [x for value in arguments.values() for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, np.ndarray)]
    before = [x.copy() for x in held]
    with pytest.raises(ValueError) as refusal:
        call(**arguments)
    assert str(refusal.value) == text
    if asked:
        assert specstate.supports(asked, **arguments) == (False, text)
    for was, x in zip(before, held):
        np.testing.assert_array_equal(was, x)


@pytest.mark.parametrize("buffers, name, want, got", list(mismatches()))
def test_rows_of_other_bytes_are_refused(buffers, name, want, got):
    text = f"{name}: expected rows of {want} bytes, got rows of {got} bytes."
    locs = np.arange(20, dtype=np.int32)[None]
    tables = dict(req_pool_indices=np.array([0]), host_cache_locs=np.arange(40)[None], out=np.full((1, 1, 4), -7, np.int32))
    swap = dict(tables, top_k_tokens=np.array([[[3, 5, 7, 9]]], np.int32), seq_lens=np.array([[40]]), state=hisparse.new_swap_state(locs, 16, 40))
    for skip_io in (False, True):
        refused_untouched(hisparse.swap_in, dict(swap, **buffers, skip_io=skip_io), "swap_in: " + text, "swap_in")
    single = dict(
        tables, top_k_tokens=swap["top_k_tokens"][0], seq_lens=np.array([40]), out=tables["out"][0], device_buffer_tokens=np.full((1, 20), -1, np.int32),
        device_buffer_locs=locs, lru_slots=np.arange(16, dtype=np.int16)[None],
    )  # fmt: skip
    refused_untouched(hisparse.swap_in_single, dict(single, **buffers), "swap_in_single: " + text, "swap_in_single")
    plan = dict(miss_src=np.array([[3, 5]]), miss_dst=np.array([[0, 1]], np.int32), miss_count=np.array([2], np.int32))
    refused_untouched(hisparse.replay_plan, dict(plan, **buffers), "replay_plan: " + text, "replay_plan")
    right = {n: np.full((64, 8), 9, np.float32) for n in buffers}
    layers = {n: [right[n], x] for n, x in buffers.items()}
    refused_untouched(hisparse.replay_plan, dict(plan, **layers), "replay_plan: " + text.replace(name, f"{name}[1]", 1), "replay_plan")
    life = dict(layers, requests=1, hot=8, window=4, context=40)
    refused_untouched(hisparse.Coordinator, life, f"Coordinator: layers[1].{text}")


def test_rows_of_the_same_bytes_are_taken_whatever_their_type():
    plan = (np.array([[3, 5]]), np.array([[0, 1]], np.int32), np.array([2], np.int32))
    host, device = np.arange(512, dtype=np.float32).reshape(64, 8), np.zeros((64, 2, 16), np.uint8)
    hisparse.replay_plan(*plan, host, device)
    np.testing.assert_array_equal(device[:2].reshape(2, 32).view(np.float32), host[[3, 5]])
    flat, ids = np.arange(64, dtype=np.int32), np.zeros(64, np.float32)  # rows of one element
    hisparse.replay_plan(*plan, flat, ids)
    np.testing.assert_array_equal(ids[:2].view(np.int32), [3, 5])


def test_sglangs_names_take_flat_pools():
    host, device = np.arange(512, dtype=np.float32), np.zeros((64, 8), np.float32)
    hisparse.copy_cache_planned_mla(
        miss_src=np.array([[3, 5]]), miss_dst=np.array([[0, 1]], np.int32), miss_count=np.array([2], np.int32), num_real_reqs=None,
        host_cache=host, device_buffer=device, item_size_bytes=32,
    )  # fmt: skip
    np.testing.assert_array_equal(device[:2], host.reshape(64, 8)[[3, 5]])


# --------------------------------------------------------------------------------------------------------- lifecycle


def test_lif_01_retract_and_resume():
    c, hosts, devices = coordinator(device_rows=16 + 2, hot=8, requests=2)
    rows = prefill(c, 0, 20)
    assert not c.can_admit(1)
    with pytest.raises(RuntimeError, match=r"HiSparse failed to allocate 16 KV slots\. 2 of 18 device rows are free\.$"):
        c.admit(1, 1)
    free = c.free_host_rows
    c.retract(0)
    assert c.state(0) == "retracted" and c.free_device_rows == 18 and c.free_host_rows == free
    prefill(c, 1, 5, seed=1)
    with pytest.raises(RuntimeError, match="HiSparse failed to allocate 16 KV slots."):
        c.resume(0)
    c.finish(1)
    c.resume(0)
    out = c.swap(0, np.array([[0, 7, 19]], np.int32), np.array([20]), np.array([0]))
    np.testing.assert_array_equal(devices[0][out[0]], rows[0, [0, 7, 19]])
    c.finish(0)
    assert c.free_device_rows == 18 and c.free_host_rows == 200


def test_lif_02_abort_is_idempotent_and_frees_at_once():
    c, _, _ = coordinator(device_rows=4 * 16, host_rows=40)
    for r in range(3):
        c.admit(r, 10)  # staging has begun, nothing committed
    c.abort(1)
    c.abort(1)
    c.abort(3)  # never started
    for r in (1, 3):
        prefill(c, r, 10, seed=r)
    assert c.free_host_rows == 0 and c.free_device_rows == 0
    for r in range(4):
        c.abort(r)
        c.abort(r)
    assert c.free_host_rows == 40 and c.free_device_rows == 64
    prefill(c, 0, 40)
    c.finish(0)
    c.abort(0)
    with pytest.raises(ValueError, match="expected request 0 to be active or verifying or retracted, got free"):
        c.finish(0)


def test_lif_03_a_batch_beyond_the_tables_is_refused():
    c, _, _ = coordinator(requests=2)
    prefill(c, 0, 3)
    before = (c.free_device_rows, c.free_host_rows)
    with pytest.raises(ValueError, match=r"Coordinator: request: expected 0\.\.1, got 2\."):
        c.prepare_verify([0, 2], [1, 1])
    with pytest.raises(ValueError, match="Coordinator: requests: expected each request once, got request 0 again"):
        c.prepare_verify([0, 0], [1, 1])
    with pytest.raises(ValueError, match=r"Coordinator: request: expected 0\.\.1, got 9\."):
        c.swap(0, np.zeros((1, 1), np.int32), np.array([1]), np.array([9]))
    assert (c.free_device_rows, c.free_host_rows) == before and c.state(0) == "active"


# ---------------------------------------------------------------------------------------------------------- overflow


def test_ovf_01_row_offsets_beyond_31_bits():
    """Rows whose byte offset does not fit 32 bits, in a sparse mapping so that no such memory is really used."""
    import mmap

    rows, item = 3_728_300, 576
    host = np.frombuffer(mmap.mmap(-1, rows * item), np.uint8).reshape(rows, item)
    device = np.frombuffer(mmap.mmap(-1, rows * item), np.uint8).reshape(rows, item)
    wanted = np.array([3_728_270, 3_728_271, 3_728_299], np.int64)
    content = np.random.default_rng(0).integers(0, 256, (3, item), dtype=np.uint8)
    host[wanted] = content
    locs = np.array([[3_728_299, 3_728_270, 3_728_271, 0]], np.int32)
    tokens = np.array([[10, 11, 12]], np.int32)
    host_locs = np.full((1, 20), -1, np.int64)
    host_locs[0, 10:13] = wanted
    out = np.zeros((1, 3), np.int32)
    hisparse.load_cache_to_device_buffer_mla(
        tokens, np.full((1, 4), -1, np.int32), host_locs, locs, host, device, out, np.zeros(1, np.int64), np.array([20]),
        np.arange(3, dtype=np.int16)[None], item, 3, 3,
    )
    np.testing.assert_array_equal(out, locs[:, :3])
    np.testing.assert_array_equal(device[locs[0, :3]], content)
    assert not device[[0, 1, 2, 3_728_298 - 40]].any()
    second = np.frombuffer(mmap.mmap(-1, rows * item), np.uint8).reshape(rows, item)
    hisparse.replay_plan(wanted[None], locs[:, :3].copy(), np.array([3], np.int32), host, second)
    np.testing.assert_array_equal(second[locs[0, :3]], content)


def test_ovf_01_request_offsets_beyond_31_bits():
    """Table rows that lie more than 2^31 bytes apart."""
    import mmap

    pitch = 300_000_007  # elements, no power of two
    raw = np.frombuffer(mmap.mmap(-1, (2 * pitch + 64) * 4), np.int32)
    locs = np.lib.stride_tricks.as_strided(raw, (3, 5), (pitch * 4, 4))
    locs[...] = np.arange(15, dtype=np.int32).reshape(3, 5)
    host = np.arange(40, dtype=np.uint8).reshape(10, 4)
    device = np.zeros((15, 4), np.uint8)
    tokens = np.full((3, 5), -1, np.int32)
    out = np.zeros((1, 2), np.int32)
    hisparse.load_cache_to_device_buffer_mla(
        np.array([[3, 7]], np.int32), tokens, np.arange(10)[None].repeat(3, 0), locs, host, device, out, np.array([2]), np.array([9]),
        np.arange(4, dtype=np.int16)[None].repeat(3, 0), 4, 2, 4,
    )
    np.testing.assert_array_equal(out, [[10, 11]])
    np.testing.assert_array_equal(device[[10, 11]], host[[3, 7]])


def test_ovf_02_host_rows_run_out_by_name_and_without_a_trace():
    c, hosts, devices = coordinator(host_rows=100, device_rows=64, requests=2, window=1)
    for r in range(2):
        prefill(c, r, 45, seed=r)
    for step in range(5):
        c.prepare_verify([0, 1], [1, 1])
        c.accept([0, 1], [1, 1])
    before = [x.copy() for x in c.tables(0)]
    with pytest.raises(RuntimeError, match="HiSparse failed to allocate 2 KV slots."):
        c.prepare_verify([0, 1], [1, 1])
    assert [c.length(r) for r in range(2)] == [50, 50] and [c.state(r) for r in range(2)] == ["active"] * 2
    for a, b in zip(before, c.tables(0)):
        np.testing.assert_array_equal(a, b)
    c.finish(1)
    for step in range(5):
        c.prepare_verify([0], [1])
        c.accept([0], [1])
    c.finish(0)
    assert c.free_host_rows == 100 and c.free_device_rows == 64


def test_ovf_03_admission_budgets_the_whole_buffer_up_front():
    c, _, _ = coordinator(device_rows=2 * (8 + 8), requests=3)
    for r in range(2):
        c.admit(r, 1)
    before = (c.free_device_rows, c.free_host_rows)
    assert not c.can_admit(1)
    with pytest.raises(RuntimeError, match="HiSparse failed to allocate 16 KV slots."):
        c.admit(2, 1)
    assert (c.free_device_rows, c.free_host_rows) == before == (0, 198)
    for r in range(2):  # what was admitted can grow to the end
        for _ in range(20):
            c.prepare_verify([r], [4])
            c.accept([r], [4])


def test_ovf_04_many_long_requests_stay_inside_the_pools():
    c, hosts, devices = coordinator(host_rows=4 * 3632, device_rows=4 * 24, requests=4, context=3632, hot=16, page_size=16, item=4)
    contents = [prefill(c, r, 3600, item=4, seed=r) for r in range(4)]
    rows = [c.host_row(r, p) for r in range(4) for p in (0, 1, 2047, 3599)]
    assert len(set(rows)) == 16 and 0 <= min(rows) and max(rows) < 4 * 3632
    out = c.swap(0, np.array([[3599, 1]] * 4, np.int32), np.array([3600] * 4), np.arange(4))
    assert np.unique(out).size == 8 and 0 <= out.min() and out.max() < 96
    for r in range(4):
        np.testing.assert_array_equal(devices[0][out[r]], contents[r][0, [3599, 1]])
    with pytest.raises(ValueError, match="Coordinator: position: expected 0 or more, below the 3600 reserved positions, got 3600."):
        c.host_row(0, 3600)


# ------------------------------------------------------------------------------------------- concurrency, dtype, places


def test_con_01_03_calls_return_when_all_bytes_are_in_place():
    """The CPU backend's stream contract: a call is complete when it returns, so alternating map updates and swaps are always exact."""
    rng = np.random.default_rng(3)
    w = single_world(rng, hot=64, top_k=32, context=2000, item=4096, requests=2, resident="empty")
    for i in range(200):
        c = oracle.make_single_call(rng, w, batch=2, top_k=32, seq=1999, plan=False)
        run_single(w, c)
        for b in range(2):
            t, loc = c.top_k_tokens[b], c.top_k_device_locs[b]
            keep = t < 1998
            assert (w.device_buffer[loc[keep]] == w.host_cache[w.host_cache_locs[c.req_pool_indices[b], t[keep]]]).all()
        w.host_cache_locs[c.req_pool_indices[0]] = rng.permutation(w.host_cache_locs[c.req_pool_indices[0]])
        w.device_buffer_tokens[c.req_pool_indices[0]] = -1


def test_con_06_an_empty_rank_decides_like_the_others():
    """No ready request: every call of the step is legal and does nothing."""
    c, _, devices = coordinator()
    before = devices[0].copy()
    assert c.prepare_verify([], []).shape == (0, 0)
    assert c.swap(0, np.zeros((0, 2, 4), np.int32), np.zeros((0, 2), np.int64), np.zeros(0, np.int64)).shape == (0, 2, 4)
    c.accept([], [])
    np.testing.assert_array_equal(before, devices[0])


def test_dty_11_index_dtypes_are_refused_before_anything_moves():
    page = np.zeros((1, oracle.DSV4_PAGE_BYTES), np.uint8)
    for bad in (np.zeros(2, np.float32), np.zeros(2, np.uint32), np.zeros((2, 1), np.int64)):
        with pytest.raises(ValueError, match="dst_indices: expected"):
            hisparse.transfer_paged(page, page.copy(), np.arange(2), bad)


def test_ali_01_layers_of_one_slab():
    layers, hot, tokens = 3, 8, [1, 9, 17, 30]
    slab_d, slab_h = np.zeros((layers, hot + 2, 8), np.int64), np.zeros((layers, 40, 8), np.int64)
    for layer in range(layers):
        slab_h[layer] = (1000 * layer + np.arange(40))[:, None]
    locs = np.arange(hot + 1, dtype=np.int32)[::-1][None].copy()
    outs = []
    for layer in range(layers):
        out = np.zeros((1, 4), np.int32)
        hisparse.load_cache_to_device_buffer_mla(
            np.array([tokens], np.int32), np.full((1, hot + 1), -1, np.int32), np.arange(40)[None], locs, slab_h[layer], slab_d[layer], out,
            np.zeros(1, np.int64), np.array([32]), np.arange(hot, dtype=np.int16)[None], 64, 4, hot,
        )
        outs.append(out)
    for layer in range(layers):
        np.testing.assert_array_equal(slab_d[layer, outs[layer][0]], (1000 * layer + np.array(tokens))[:, None].repeat(8, 1))


def test_ali_02_host_ids_address_the_host_and_device_ids_the_device():
    c, hosts, devices = coordinator(device_rows=90, host_rows=60, requests=3, page_size=4, hot=8)
    contents = {}
    for r in (2, 0, 1):
        contents[r] = prefill(c, r, 14, seed=r)
        if r == 0:
            c.finish(2)  # holes in both pools, so that ids match nowhere
            contents[2] = prefill(c, 2, 14, seed=9)
    for r in range(3):
        for p in range(14):
            np.testing.assert_array_equal(hosts[0][c.host_row(r, p)], contents[r][0, p])
        out = c.swap(0, np.array([[0, 5, 9, 13]], np.int32), np.array([14]), np.array([r]))
        np.testing.assert_array_equal(devices[0][out[0]], contents[r][0, [0, 5, 9, 13]])


def test_ali_03_an_evicted_position_is_fetched_again_and_never_row_0():
    rng = np.random.default_rng(3)
    w = oracle.make_world(rng, requests=2, hot=4, tail=0, context=30, item=8, steps=2, top_k=2, resident="full")
    zero = np.argwhere(w.device_buffer_locs == 0)
    if not zero.size:
        w.device_buffer_locs[1, 0], w.device_buffer[0] = 0, w.host_cache[w.host_cache_locs[1, w.device_buffer_tokens[1, 0]]]
    r = 0 if (w.device_buffer_locs[1] == 0).any() else 1
    t = int(w.device_buffer_tokens[r, 2])
    w.device_buffer_tokens[r, 2] = -1  # cleared
    c = oracle.make_spec_call(rng, w, batch=1, steps=2, top_k=2, bad_share=0)
    c.req_pool_indices[0], c.seq_lens[:], c.top_k_tokens[:] = r, 30, t
    w0, c0 = w.copy(), c.copy()
    run_spec(w, c)
    oracle.check_spec_swap(w0, c0, oracle.After(w, c))
    assert c.miss_count[0] == 1 and (c.top_k_device_locs[0] != 0).all()


# --------------------------------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize("item", [1, 3, 132, 584, 656])
def test_aln_03_any_item_size_at_any_address(item):
    rng = np.random.default_rng(item)
    w = single_world(rng, hot=8, top_k=6, context=40, item=item)
    c = oracle.make_single_call(rng, w, batch=1, top_k=6, seq=39)
    for name in ("host_cache", "device_buffer"):
        a = getattr(w, name)
        raw = np.zeros(a.size + 1, np.uint8)[1:]  # odd address
        raw[...] = a.reshape(-1)
        setattr(w, name, raw.reshape(a.shape))
    checked_single(w, c)


def test_aln_04_block_sizes_and_odd_shapes():
    for top_k in (1, 31, 33, 512):
        for hot in (top_k, top_k + 1, 2 * top_k, 4096 + 33):
            results = []
            for block in (64, 256, 960, 1024):
                rng = np.random.default_rng(top_k * 7 + hot)
                w = single_world(rng, hot=hot, top_k=top_k, context=hot + 700, item=4)
                c = oracle.make_single_call(rng, w, batch=1, top_k=top_k, seq=hot + 700)
                w0, c0 = w.copy(), c.copy()
                run_single(w, c, block_size=block)
                if block == 64:
                    oracle.check_single_step(w0, c0, oracle.After(w, c))
                np.testing.assert_array_equal(np.sort(w.lru_slots[0]), np.arange(hot))
                results.append((w.lru_slots.copy(), c.top_k_device_locs.copy(), c.miss_count.copy()))
            for other in results[1:]:
                for a, b in zip(results[0], other):
                    np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------- a refused call changes nothing


def owing_coordinator():
    """Request 0 with a follower that owes a swap's copies, 1 in a window, 2 retracted, 3 free."""
    c, hosts, devices = coordinator(layers=2, anchor_of=[0, 0], page_size=4, context=40, device_rows=64, scratch=0)
    for r in (0, 1, 2):
        prefill(c, r, 20, layers=2, seed=r)
    c.prepare_verify([1], [2])
    c.retract(2)
    c.swap(0, np.array([[1, 9, 13]], np.int32), np.array([16]), np.array([0]))
    return c, hosts, devices


def everything(c, hosts, devices):
    tables = [x.tobytes() for x in c.tables(0)]
    lives = [(c.state(r), c.length(r), c.host_pages(r)) for r in range(4)]
    return tables, lives, c.free_device_rows, c.free_host_rows, c.stats(), [x.tobytes() for x in (*hosts, *devices)]


def picked(n, seq, requests, **more):
    return dict(layer=0, top_k_tokens=np.tile(np.array([[1, 9, 13]], np.int32), (n, 1)), seq_lens=np.array(seq), requests=np.array(requests), **more)


def read_only(shape):
    x = np.zeros(shape, np.int32)
    x.flags.writeable = False
    return x


REFUSED_CALLS = {
    "swap beyond the window": ("swap", lambda h, d: picked(1, [21], [0])),
    "swap of no request": ("swap", lambda h, d: picked(1, [16], [7])),
    "swap of a free request": ("swap", lambda h, d: picked(1, [16], [3])),
    "swap of a retracted request": ("swap", lambda h, d: picked(1, [16], [2])),
    "swap twice": ("swap", lambda h, d: picked(2, [16, 16], [0, 0])),
    "swap of the second row": ("swap", lambda h, d: picked(2, [16, 99], [0, 1])),
    "swap of the next round": ("swap", lambda h, d: picked(1, [21], [0], round=1)),
    "swap of a later round": ("swap", lambda h, d: picked(1, [16], [0], round=2)),
    "swap at a follower": ("swap", lambda h, d: picked(1, [16], [0]) | dict(layer=1)),
    "swap of another dtype": ("swap", lambda h, d: picked(1, [16.0], [0])),
    "swap into another shape": ("swap", lambda h, d: picked(1, [16], [0], out=np.zeros((1, 2), np.int32))),
    "swap into a host cache": ("swap", lambda h, d: picked(1, [16], [0], out=h[0].reshape(-1)[:12].view(np.int32)[None])),
    "swap into what cannot be written": ("swap", lambda h, d: picked(1, [16], [0], out=read_only((1, 3)))),
    "counts too short": ("swap", lambda h, d: picked(2, [16, 16], [0, 1], unique_misses=np.zeros(1, np.int32))),
    "follow out of order": ("follow", lambda h, d: dict(layer=1, round=1)),
    "follow an anchor": ("follow", lambda h, d: dict(layer=0)),
    "follow_all of no round": ("follow_all", lambda h, d: dict(anchor=0, round=1)),
    "admit one that lives": ("admit", lambda h, d: dict(request=0, tokens=4)),
    "admit too much": ("admit", lambda h, d: dict(request=3, tokens=41)),
    "reserve too much": ("reserve", lambda h, d: dict(request=0, count=21)),
    "stage what was staged": ("stage", lambda h, d: dict(layer=0, request=0, position=3, rows=np.zeros((1, 8), np.uint8))),
    "stage beyond the pages": ("stage", lambda h, d: dict(layer=0, request=0, position=20, rows=np.zeros((1, 8), np.uint8))),
    "append what is not staged": ("append", lambda h, d: dict(request=0, count=1)),
    "prepare twice": ("prepare_verify", lambda h, d: dict(requests=[0, 0], widths=[1, 1])),
    "prepare an open one": ("prepare_verify", lambda h, d: dict(requests=[0, 1], widths=[1, 1])),
    "prepare into a short array": ("prepare_verify", lambda h, d: dict(requests=[0], widths=[2], out=np.zeros((1, 1), np.int32))),
    "prepare too wide": ("prepare_verify", lambda h, d: dict(requests=[0], widths=[5])),
    "write beyond the window": ("write", lambda h, d: dict(layer=0, request=1, j=2, row=np.zeros(8, np.uint8))),
    "write a row of another size": ("write", lambda h, d: dict(layer=0, request=1, j=0, row=np.zeros(7, np.uint8))),
    "accept more than the window": ("accept", lambda h, d: dict(requests=[1], accepted=[3])),
    "accept without a window": ("accept", lambda h, d: dict(requests=[1, 0], accepted=[1, 1])),
    "begin a step in a window": ("begin_step", lambda h, d: dict(requests=[0, 1])),
    "end a step that was not begun": ("end_step", lambda h, d: dict(requests=[1], accepted=[1])),
    "open a step of a request twice": ("open_step", lambda h, d: dict(requests=np.array([0, 0]), widths=np.array([1, 1]))),
    "close a step with too many": ("close_step", lambda h, d: dict(requests=np.array([0, 1]), widths=np.array([1, 1]), accepted=np.array([1, 2]))),
    "finish a free one": ("finish", lambda h, d: dict(request=3)),
    "retract a free one": ("retract", lambda h, d: dict(request=3)),
    "resume a live one": ("resume", lambda h, d: dict(request=0)),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_refused_call_changes_nothing(name):
    c, hosts, devices = owing_coordinator()
    method, arguments = REFUSED_CALLS[name]
    arguments, before = arguments(hosts, devices), everything(c, hosts, devices)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        getattr(c, method)(**arguments)
    assert everything(c, hosts, devices) == before
    c.follow(1)  # the copies are owed as before
    twin, twin_hosts, twin_devices = owing_coordinator()
    twin.follow(1)
    assert everything(c, hosts, devices) == everything(twin, twin_hosts, twin_devices)


def test_second_pairs_of_another_number_of_layers():
    hosts, devices = ([np.zeros((64, 8), np.uint8) for _ in range(2)] for _ in range(2))
    sizes = dict(requests=2, hot=8, window=2, context=20, page_size=4)
    for name, other in (("host_cache_v", "device_buffer_v"), ("device_buffer_v", "host_cache_v")):
        for n in (0, 1, 3):
            second = {name: [None] * n, other: [None, None]}
            with pytest.raises(ValueError, match=rf"Coordinator: {name}: expected 2 layers, got {n}\."):
                hisparse.Coordinator(hosts, devices, **sizes, **second)
    hisparse.Coordinator(hosts, devices, **sizes, host_cache_v=[None, None])


def test_numbers_of_layers_at_the_ends_of_the_integers():
    for first in (-1, 2**31, 2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=rf"Coordinator: first_layer: expected 0\.\.2147483647, got {first}\."):
            coordinator(first_layer=first)
    for anchor in (-(2**63), 2**63 - 1, -1):
        with pytest.raises(ValueError, match=rf"Coordinator: anchor_of: expected a preceding anchor layer for layer 2, got {anchor}\."):
            coordinator(layers=2, first_layer=1, anchor_of=[1, anchor])
