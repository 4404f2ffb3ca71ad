"""What a HiSparse call writes is checked before use: dtype, shape, and memory apart from everything else that it was given."""

import numpy as np
import pytest

import specstate.hisparse as hisparse

as_strided = np.lib.stride_tricks.as_strided
i32 = np.int32
PAGE = 37440


def buffers(layers=2, rows=64):
    return [np.zeros((rows, 4), np.float32) for _ in range(layers)]


def content(layer, request, n=20):
    return (1000 * (layer + 1) + 100 * request + np.arange(n, dtype=np.float32))[:, None] * np.ones((1, 4), np.float32)


def coordinator(hosts, devices, lengths=(20, 20)):
    """Layer 1 follows layer 0; two requests whose rows say layer, request and position."""
    c = hisparse.Coordinator(hosts, devices, requests=3, hot=8, window=4, context=64, page_size=4, anchor_of=[0, 0])
    for r, n in enumerate(lengths):
        c.admit(r, n)
        for layer in range(2):
            c.stage(layer, r, 0, content(layer, r, n))
        c.append(r, n)
    return c


def tokens(*positions):
    return np.array([positions], i32)


TOKENS, LENS, R0 = tokens(12, 13, 14, 15), np.array([20], i32), np.array([0], i32)


def swap_bad(hosts, devices):
    long = np.zeros(8, i32)
    return {
        "misses short": (dict(unique_misses=long[:0]), "unique_misses: expected shape [B >= 1], got (0,)."),
        "misses int8": (dict(unique_misses=np.zeros(1, np.int8)), "unique_misses: expected dtype int32, got int8."),
        "hits float64": (dict(unique_hits=np.zeros(1)), "unique_hits: expected dtype int32, got float64."),
        "hits 2-D": (dict(unique_hits=np.zeros((1, 1), i32)), "unique_hits: expected shape [B >= 1], got (1, 1)."),
        "misses stride 0": (dict(unique_misses=as_strided(long, (2,), (0,))), "unique_misses: expected elements that do not share memory, got stride 0 for shape (2,)."),
        "both one": (dict(unique_misses=long, unique_hits=long), "unique_hits: expected memory of its own, got memory that overlaps unique_misses."),
        "misses are out": (dict(out=long[:4].reshape(1, 4), unique_misses=long[:1]), "unique_misses: expected memory of its own, got memory that overlaps out."),
        "misses are lengths": (dict(seq_lens=long[:1], unique_misses=long[:1]), "unique_misses: expected memory of its own, got memory that overlaps seq_lens."),
        "hits are requests": (dict(requests=long[:1], unique_hits=long[:1]), "unique_hits: expected memory of its own, got memory that overlaps requests."),
        "hits are the count": (dict(num_real_reqs=long[:1], unique_hits=long[:1]), "unique_hits: expected memory of its own, got memory that overlaps num_real_reqs."),
        "misses in another layer": (dict(unique_misses=devices[1].view(i32)[0, :1]), "unique_misses: expected memory of its own, got memory that overlaps layers[1].device_buffer."),
        "out in a host cache": (dict(out=hosts[1].view(i32)[:1]), "out: expected memory of its own, got memory that overlaps layers[1].host_cache."),
        "out dtype": (dict(out=np.zeros((1, 4), np.int64)), "out: expected dtype int32, got int64."),
        "lengths uint8": (dict(seq_lens=np.zeros(1, np.uint8)), "seq_lens: expected dtype int32 or int64, got uint8."),
        "lengths shape": (dict(seq_lens=np.zeros(2, i32)), "seq_lens: expected shape [B=1, S=1], got (2, 1)."),
        "requests dtype": (dict(requests=np.zeros(1, np.int16)), "requests: expected dtype int32 or int64, got int16."),
        "requests shape": (dict(requests=np.zeros(0, i32)), "requests: expected shape [B=1], got (0,)."),
        "count dtype": (dict(num_real_reqs=np.ones(1, np.int64)), "num_real_reqs: expected dtype int32, got int64."),
        "count empty": (dict(num_real_reqs=np.ones(0, i32)), "num_real_reqs: expected shape [1], got (0,)."),
        "tokens dtype": (dict(top_k_tokens=TOKENS.astype(np.int64), out=np.zeros((1, 4), i32)), "top_k_tokens: expected dtype int32, got int64."),
    }  # fmt: skip


@pytest.mark.parametrize("case", swap_bad(buffers(), buffers()))
def test_every_tensor_of_a_swap_is_checked_before_anything_is_written(case):
    hosts, devices = buffers(), buffers()
    c = coordinator(hosts, devices)
    changed, text = swap_bad(hosts, devices)[case]
    arguments = dict(top_k_tokens=TOKENS, seq_lens=LENS, requests=R0) | changed
    before = [x.copy() for x in (*hosts, *devices, *c.tables(0), *arguments.values())], c.stats()
    with pytest.raises(ValueError) as e:
        c.swap(0, **arguments)
    assert str(e.value) == f"Coordinator: {text}"
    for was, now in zip(before[0], (*hosts, *devices, *c.tables(0), *arguments.values())):
        np.testing.assert_array_equal(was, now)
    assert before[1] == c.stats()


def test_counts_of_a_swap_may_be_longer_and_strided():
    c = coordinator(buffers(), buffers())
    counts = np.full((5, 2), -7, i32)
    c.swap(0, tokens(12, 13, 1, 12), LENS, R0, unique_misses=counts[:, 0], unique_hits=counts[:, 1])
    np.testing.assert_array_equal(counts, [[2, 1]] + [[-7, -7]] * 4)


def test_other_outputs_of_the_coordinator():
    hosts, devices = buffers(), buffers()
    c = coordinator(hosts, devices)
    where = "expected memory of its own, got memory that overlaps "
    with pytest.raises(ValueError, match=r"^Coordinator: out: " + where + r"layers\[1\]\.host_cache\.$"):
        c.prepare_verify([0], [2], out=hosts[1].view(i32)[:1])
    with pytest.raises(ValueError, match=r"^Coordinator: out: expected shape \[1, W >= 2\], got \(1, 1\)\.$"):
        c.prepare_verify([0], [2], out=np.zeros((1, 1), i32))
    with pytest.raises(ValueError, match=r"^Coordinator: out: " + where + r"seq_lens\.$"):
        c.plan_rounds(0, TOKENS, LENS, R0, out=LENS.reshape(1, 1))
    c.reserve(0, 4)
    with pytest.raises(ValueError, match=r"^Coordinator: rows: " + where + r"layers\[0\]\.host_cache\.$"):
        c.stage(0, 0, 20, hosts[0][:4])
    c.prepare_verify([0], [2])
    with pytest.raises(ValueError, match=r"^Coordinator: row: " + where + r"layers\[1\]\.device_buffer\.$"):
        c.write(1, 0, 0, devices[1][3])


def layers_bad():
    h, d = buffers(), buffers()
    flat = np.zeros(256, np.float32)
    return {
        "one device": (h, [d[0], d[0]], "layers[1].device_buffer", "that overlaps layers[0].device_buffer"),
        "one host": ([h[0], h[0]], d, "layers[1].host_cache", "that overlaps layers[0].host_cache"),
        "host is a device": ([h[0], d[0]], d, "layers[1].host_cache", "that overlaps layers[0].device_buffer"),
        "device is a host": (h, [d[0], h[0][8:]], "layers[1].device_buffer", "that overlaps layers[0].host_cache"),
        "one host row": ([as_strided(flat, (64, 4), (0, 4)), h[1]], d, "layers[0].host_cache", "stride 0"),
        "one device row": (h, [d[0], as_strided(flat, (64, 4), (4, 4))], "layers[1].device_buffer", "stride 1"),
    }  # fmt: skip


@pytest.mark.parametrize("case", layers_bad())
def test_layers_of_a_coordinator_share_no_memory(case):
    hosts, devices, name, got = layers_bad()[case]
    with pytest.raises(ValueError) as e:
        hisparse.Coordinator(hosts, devices, requests=2, hot=8, window=2, context=64)
    assert str(e.value).startswith(f"Coordinator: {name}: expected ") and got in str(e.value)


def test_layers_may_be_woven_into_one_array():
    host, device = np.zeros((64, 2, 4), np.float32), np.zeros((64, 2, 4), np.float32)
    c = coordinator([host[:, 0], host[:, 1]], [device[:, 0], device[:, 1]])
    rows = c.swap(0, TOKENS, LENS, R0)
    c.follow(1)
    for layer in range(2):
        np.testing.assert_array_equal(device[rows[0], layer], content(layer, 0)[12:16])


@pytest.mark.parametrize("name", ["requests", "hot", "window", "tail", "scratch", "context", "page_size"])
def test_absurd_sizes_are_named(name):
    sizes = dict(requests=2, hot=8, window=2, context=64)
    for n in (2**31, 2**63 - 1):
        with pytest.raises(ValueError, match=rf"^Coordinator: {name}: expected below 2\^31, got {n}\.$"):
            hisparse.Coordinator(buffers(), buffers(), **(sizes | {name: n}))


def test_tables_that_no_memory_holds_are_named():
    for sizes in (dict(requests=2**31 - 1, hot=2**31 - 1, context=2**31 - 1), dict(requests=2**31 - 1, hot=2**24, context=2**24)):
        with pytest.raises(ValueError, match=r"^Coordinator: requests: expected tables that fit the memory .* got 2147483647\.$"):
            hisparse.Coordinator(buffers(), buffers(), window=2, **sizes)


# ----------------------------------------------------------------------------------------------------------- followers


@pytest.mark.parametrize("event", ["abort", "finish", "retract", "accept", "prepare_verify", "admit"])
def test_what_happens_to_another_request_takes_no_copy_from_a_follower(event):
    """The follower gets its bytes, at once or after a further swap that finds everything resident."""
    for again in (False, True):
        hosts, devices = buffers(), buffers()
        c = coordinator(hosts, devices)
        if event == "accept":
            c.prepare_verify([1], [2])
        rows = c.swap(0, TOKENS, LENS, R0)
        {"accept": lambda: c.accept([1], [1]), "prepare_verify": lambda: c.prepare_verify([1], [2]), "admit": lambda: c.admit(2, 4)}.get(
            event, lambda: getattr(c, event)(1)
        )()
        if again:
            misses = np.full(1, -1, i32)
            np.testing.assert_array_equal(rows, c.swap(0, TOKENS, LENS, R0, unique_misses=misses))
            assert misses[0] == 0
        c.follow(1)
        for layer in range(2):
            np.testing.assert_array_equal(devices[layer][rows[0]], content(layer, 0)[12:16])
        with pytest.raises(ValueError, match="that layer 1 has yet to follow"):
            c.follow(1)


@pytest.mark.parametrize("event", ["accept", "prepare_verify"])
def test_a_windows_begin_or_end_leaves_its_own_requests_copies(event):
    hosts, devices = buffers(), buffers()
    c = coordinator(hosts, devices)
    if event == "accept":
        c.prepare_verify([0], [2])
    rows = c.swap(0, TOKENS, LENS, R0)
    c.accept([0], [1]) if event == "accept" else c.prepare_verify([0], [2])
    c.swap(0, TOKENS, LENS, R0)
    c.follow(1)
    np.testing.assert_array_equal(devices[1][rows[0]], content(1, 0)[12:16])


def test_an_ended_requests_copies_touch_nobodys_rows():
    hosts, devices = buffers(), buffers()
    c = coordinator(hosts, devices)
    rows = c.swap(0, np.concatenate([TOKENS, TOKENS]), np.array([20, 20], i32), np.array([0, 1], i32))
    c.abort(1)
    devices[1][rows[1]] = -5  # somebody else's now
    c.follow(1)
    np.testing.assert_array_equal(devices[1][rows[0]], content(1, 0)[12:16])
    assert (devices[1][rows[1]] == -5).all()


def test_rounds_are_followed_once_and_in_order():
    c = coordinator(buffers(), buffers())
    c.swap(0, TOKENS, LENS, R0)
    with pytest.raises(ValueError, match=r"round: expected 0 or the next one, 1, got 2\."):
        c.swap(0, TOKENS, LENS, R0, round=2)
    c.swap(0, tokens(16, 17, 18, 19), LENS, R0, round=1)
    with pytest.raises(ValueError, match=r"has yet to follow, got round 1, not 0\."):
        c.follow(1, round=1)
    c.follow(1)
    c.follow(1, round=1)


# --------------------------------------------------------------------------------------------------------------- copies


def test_transfer_keeps_dst_apart():
    def refused(text, src, dst, src_indices, dst_indices):
        before = [x.copy() for x in (*np.atleast_1d(src), *np.atleast_1d(dst))]
        with pytest.raises(ValueError, match="^transfer_paged: " + text):
            hisparse.transfer_paged(src, dst, src_indices, dst_indices)
        for was, now in zip(before, (*np.atleast_1d(src), *np.atleast_1d(dst))):
            np.testing.assert_array_equal(was, now)

    at, memory, source = np.array([0, 0], i32), np.zeros(2 * PAGE, np.uint8), np.full(PAGE, 7, np.uint8)
    where = r"expected memory of its own, got memory that overlaps "
    index = memory[:8].view(i32)
    refused(r"dst\[0\]: " + where + "dst_indices", source, memory[:PAGE], at, index)
    refused(r"dst\[0\]: " + where + "src_indices", source, memory[:PAGE], index, at)
    refused(r"dst\[0\]: " + where + r"src\[0\]", memory[:PAGE], memory[576 : 576 + PAGE], at, at)
    refused(r"dst\[0\]: expected elements that do not share memory", source, as_strided(memory, (2, PAGE), (0, 1)), at, at)
    with pytest.raises(ValueError, match=r"^transfer_paged: dst\[1\]: " + where + r"dst\[0\]"):
        hisparse.transfer_paged([source, source], [memory[:PAGE], memory[:PAGE]], at, at)
    with pytest.raises(ValueError, match=r"overlaps src\[1\]|overlaps dst\[0\]"):
        hisparse.transfer_paged([source, memory[:PAGE]], [memory[:PAGE], memory[PAGE:]], at, at)


def test_transfer_within_one_buffer():
    pool = np.random.default_rng(0).integers(0, 256, 2 * PAGE, dtype=np.uint8)
    want = pool[:576].copy()
    hisparse.transfer_paged(pool, pool, np.array([0]), np.array([65]))
    np.testing.assert_array_equal(pool[PAGE + 576 : PAGE + 1152], want)


def test_reset_keeps_the_state_apart():
    def fresh():
        return hisparse.new_swap_state(np.arange(24, dtype=i32).reshape(2, 12), 8, 30)

    def refused(text, state, requests=None):
        before = [x.copy() for x in state]
        with pytest.raises(ValueError, match="^reset_swap_state: " + text):
            hisparse.reset_swap_state(state, requests)
        for was, now in zip(before, state):
            np.testing.assert_array_equal(was, now)

    where = "expected memory of its own, got memory that overlaps "
    s = fresh()
    refused("state.clock: " + where + "state.slot_locs", s._replace(clock=s.slot_locs[0, :2]))
    refused("state.slot_stamps: " + where + "state.slot_tokens", s._replace(slot_stamps=s.slot_tokens[:, :8]))
    refused("state.slot_tokens: expected elements that do not share", s._replace(slot_tokens=as_strided(np.full(12, 5, i32), (2, 12), (0, 4))))
    refused("state.clock: " + where + "requests", s, s.clock)
    refused("state.slot_tokens: " + where + "requests", s, s.slot_tokens[0, :1])


def test_out_is_called_out():
    state = hisparse.new_swap_state(np.arange(12, dtype=i32).reshape(1, 12), 8, 30)
    host, device = np.zeros((32, 4), np.float32), np.zeros((32, 4), np.float32)
    locs = np.arange(30).reshape(1, 30)
    with pytest.raises(ValueError, match="^swap_in: out: expected dtype int32, got int64"):
        hisparse.swap_in(np.zeros((1, 1, 4), i32), np.ones((1, 1), i32), R0, locs, host, device, state, out=np.zeros((1, 1, 4), np.int64))
    with pytest.raises(ValueError, match="^swap_in_single: out: expected dtype int32, got int64"):
        hisparse.swap_in_single(
            np.zeros((1, 4), i32), np.full((1, 12), -1, i32), locs, state.slot_locs, host, device, R0, np.ones(1, i32),
            np.arange(8, dtype=np.int16).reshape(1, 8), out=np.zeros((1, 4), np.int64),
        )  # fmt: skip
