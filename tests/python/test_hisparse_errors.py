"""Every refusal of the HiSparse calls: exact text, exception type, and nothing written."""

import inspect

import hisparse as oracle
import numpy as np
import pytest

import specstate.hisparse as hisparse


def spec_arguments(seed=0, steps=2, top_k=4, hot=8, requests=2, scratch=3):
    rng = np.random.default_rng(seed)
    w = oracle.make_world(rng, requests=requests, hot=hot, tail=2, context=40, item=8, steps=steps, top_k=top_k, scratch=scratch, resident="random")
    c = oracle.make_spec_call(rng, w, batch=requests, steps=steps, top_k=top_k, bad_share=0, seq=39)
    names = ("device_buffer_tokens", "host_cache_locs", "device_buffer_locs", "host_cache", "device_buffer")
    a = {name: getattr(w, name) for name in names}
    for name in ("top_k_tokens", "top_k_device_locs", "req_pool_indices", "seq_lens", "num_real_reqs", "miss_src", "miss_dst", "miss_count"):
        a[name] = getattr(c, name)
    a["state"] = hisparse.HiSparseSpecState(w.cache_index, w.cache_policy, w.scratch_locs, w.scratch_state)
    return a


def arrays(arguments):
    flat = {}
    for name, x in arguments.items():
        if isinstance(x, hisparse.HiSparseSpecState):
            flat.update({f"state.{k}": v for k, v in x._asdict().items()})
        elif isinstance(x, np.ndarray):
            flat[name] = x
        elif isinstance(x, list):
            flat.update({f"{name}{i}": v for i, v in enumerate(x)})
    return flat


def refused(call, arguments, text, kind=ValueError):
    before = {k: v.copy() for k, v in arrays(arguments).items() if v.size < 1 << 24}
    with pytest.raises(Exception) as e:
        call(**arguments)
    assert type(e.value) is kind, repr(e.value)
    assert str(e.value) == text
    for name, was in before.items():
        np.testing.assert_array_equal(was, arrays(arguments)[name], err_msg=name)


SPEC = hisparse.load_cache_to_device_buffer_spec_mla
SPEC_OP = "load_cache_to_device_buffer_spec_mla: "


def state_with(a, **changes):
    return a["state"]._replace(**{k: f(getattr(a["state"], k)) for k, f in changes.items()})


def wide(shape, dtype=np.int32):
    return np.zeros(shape, dtype)


SPEC_CASES = {
    # sglang's Python wrapper
    "ndim": (lambda a: dict(top_k_tokens=a["top_k_tokens"][0]), "speculative top_k_tokens must have shape [batch, steps, top_k].", ValueError),
    "one step": (lambda a: dict(top_k_tokens=a["top_k_tokens"][:, :1]), "HiSparse speculative swap requires 2-4 steps, got 1.", ValueError),
    "five steps": (lambda a: dict(top_k_tokens=wide((2, 5, 4))), "HiSparse speculative swap requires 2-4 steps, got 5.", ValueError),
    "no steps": (lambda a: dict(top_k_tokens=wide((2, 0, 4))), "HiSparse speculative swap requires 2-4 steps, got 0.", ValueError),
    "plan without dst": (lambda a: dict(miss_dst=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "plan without count": (lambda a: dict(miss_count=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "plan without src": (lambda a: dict(miss_src=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "only count": (lambda a: dict(miss_src=None, miss_dst=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "src dtype": (lambda a: dict(miss_src=a["miss_src"].astype(np.int32)), "miss_src must be int64 and miss_dst must be int32.", ValueError),
    "dst dtype": (lambda a: dict(miss_dst=a["miss_dst"].astype(np.int64)), "miss_src must be int64 and miss_dst must be int32.", ValueError),
    "count dtype": (lambda a: dict(miss_count=a["miss_count"].astype(np.int64)), "miss_count must be int32.", ValueError),
    "src rows": (lambda a: dict(miss_src=a["miss_src"][:1]), "speculative miss_src/miss_dst must have shape [batch, >= steps * top_k] (capacity 8).", ValueError),
    "dst columns": (lambda a: dict(miss_dst=a["miss_dst"][:, :7]), "speculative miss_src/miss_dst must have shape [batch, >= steps * top_k] (capacity 8).", ValueError),
    "src ndim": (lambda a: dict(miss_src=a["miss_src"][0]), "speculative miss_src/miss_dst must have shape [batch, >= steps * top_k] (capacity 8).", ValueError),
    "count rows": (lambda a: dict(miss_count=a["miss_count"][:1]), "speculative miss_count must have shape [batch].", ValueError),
    "count ndim": (lambda a: dict(miss_count=a["miss_count"][None]), "speculative miss_count must have shape [batch].", ValueError),
    "plan strides": (lambda a: dict(miss_src=wide((2, 9), np.int64)[:, :8]), "miss_src/miss_dst row strides must match.", ValueError),
    # the one limit of every mode
    "65536": (lambda a: dict(top_k_tokens=np.broadcast_to(np.int32(0), (2, 2, 32769)), miss_src=None, miss_dst=None, miss_count=None), "HiSparse speculative swap supports at most 65536 occurrences.", ValueError),
    # sglang's C++ side
    "output ndim": (lambda a: dict(top_k_device_locs=a["top_k_device_locs"][0]), "speculative output must have shape [batch, steps, top_k].", RuntimeError),
    "index ndim": (lambda a: dict(state=state_with(a, cache_index=lambda x: x[:, 0])), "speculative cache_index must have shape [num_requests, 2, hash_size].", RuntimeError),
    "index banks": (lambda a: dict(state=state_with(a, cache_index=lambda x: x[:, :1])), "speculative cache_index must have shape [num_requests, 2, hash_size].", RuntimeError),
    "hash size": (lambda a: dict(state=state_with(a, cache_index=lambda x: x[:, :, :15])), "ring hash capacity must be a power of two.", RuntimeError),
    "hash size 0": (lambda a: dict(state=state_with(a, cache_index=lambda x: x[:, :, :0])), "ring hash capacity must be a power of two.", RuntimeError),
    "scratch ndim": (lambda a: dict(state=state_with(a, scratch_locs=lambda x: x[0])), "speculative scratch_locs must have shape [num_requests, scratch_capacity].", RuntimeError),
    "index rows": (lambda a: dict(state=state_with(a, cache_index=lambda x: x[:1])), "speculative cache_index request capacity is smaller than scratch_locs.", RuntimeError),
    "policy ndim": (lambda a: dict(state=state_with(a, cache_policy=lambda x: x[0])), "speculative cache_policy must contain one CLOCK control row and one reference-epoch row per request.", RuntimeError),
    "policy rows": (lambda a: dict(state=state_with(a, cache_policy=lambda x: x[:2])), "speculative cache_policy must contain one CLOCK control row and one reference-epoch row per request.", RuntimeError),
    "state ndim": (lambda a: dict(state=state_with(a, scratch_state=lambda x: x[0])), "speculative scratch_state must contain one counter row and one miss-metadata row per request.", RuntimeError),
    "state rows": (lambda a: dict(state=state_with(a, scratch_state=lambda x: x[:2])), "speculative scratch_state must contain one counter row and one miss-metadata row per request.", RuntimeError),
    "state columns": (lambda a: dict(state=state_with(a, scratch_state=lambda x: x[:, :39])), "speculative scratch_state must contain one counter row and one miss-metadata row per request.", RuntimeError),
    "state stride": (lambda a: dict(state=state_with(a, scratch_state=lambda x: wide((3, 41)))), "speculative scratch metadata stride must be 64-bit aligned.", RuntimeError),
    "host table width": (lambda a: dict(host_cache_locs=np.broadcast_to(np.int64(-1), (2, 2**31 + 1))), "speculative packed ring metadata supports sequence lengths up to 2147483648, got 2147483649", RuntimeError),
    # what sglang leaves unchecked
    "requests": (lambda a: dict(state=state_with(a, cache_policy=lambda x: wide((3, 1)))), "HiSparse spec request capacity must not exceed device_buffer_size.", ValueError),
    "token dtype": (lambda a: dict(top_k_tokens=a["top_k_tokens"].astype(np.int64)), SPEC_OP + "top_k_tokens: expected dtype int32, got int64.", ValueError),
    "output shape": (lambda a: dict(top_k_device_locs=wide((2, 2, 5))), SPEC_OP + "top_k_device_locs: expected shape [B=2, S=2, K=4], got (2, 2, 5).", ValueError),
    "output dtype": (lambda a: dict(top_k_device_locs=wide((2, 2, 4), np.int64)), SPEC_OP + "top_k_device_locs: expected dtype int32, got int64.", ValueError),
    "output is a table": (lambda a: dict(top_k_device_locs=a["device_buffer_locs"].reshape(-1)[:16].reshape(2, 2, 4)), SPEC_OP + "top_k_device_locs: expected memory of its own, got memory that overlaps device_buffer_locs.", ValueError),
    "output is state": (lambda a: dict(top_k_device_locs=a["state"].scratch_state[1:].reshape(-1)[:16].reshape(2, 2, 4)), SPEC_OP + "state.scratch_state: expected memory of its own, got memory that overlaps top_k_device_locs.", ValueError),
    "device is host": (lambda a: dict(device_buffer=a["host_cache"]), SPEC_OP + "device_buffer: expected memory of its own, got memory that overlaps host_cache.", ValueError),
    "no state": (lambda a: dict(state=None), SPEC_OP + "state: expected a HiSparseSpecState of 4 arrays, or as many in a tuple or list, got NoneType.", TypeError),
    "short state": (lambda a: dict(state=tuple(a["state"])[:3]), SPEC_OP + "state: expected a HiSparseSpecState of 4 arrays, or as many in a tuple or list, got tuple of 3.", ValueError),
    "output overlap": (lambda a: dict(top_k_device_locs=a["top_k_tokens"]), SPEC_OP + "top_k_device_locs: expected memory of its own, got memory that overlaps top_k_tokens.", ValueError),
    "index dtype": (lambda a: dict(state=state_with(a, cache_index=lambda x: x.astype(np.int32))), SPEC_OP + "state.cache_index: expected dtype int64, got int32.", ValueError),
    "policy dtype": (lambda a: dict(state=state_with(a, cache_policy=lambda x: x.astype(np.int64))), SPEC_OP + "state.cache_policy: expected dtype int32, got int64.", ValueError),
    "scratch dtype": (lambda a: dict(state=state_with(a, scratch_locs=lambda x: x.astype(np.int64))), SPEC_OP + "state.scratch_locs: expected dtype int32, got int64.", ValueError),
    "state dtype": (lambda a: dict(state=state_with(a, scratch_state=lambda x: x.astype(np.int64))), SPEC_OP + "state.scratch_state: expected dtype int32, got int64.", ValueError),
    "host locs dtype": (lambda a: dict(host_cache_locs=a["host_cache_locs"].astype(np.int32)), SPEC_OP + "host_cache_locs: expected dtype int64, got int32.", ValueError),
    "tokens dtype": (lambda a: dict(device_buffer_tokens=a["device_buffer_tokens"].astype(np.int64)), SPEC_OP + "device_buffer_tokens: expected dtype int32, got int64.", ValueError),
    "tokens width": (lambda a: dict(device_buffer_tokens=a["device_buffer_tokens"][:, :7], device_buffer_locs=a["device_buffer_locs"][:, :7]), SPEC_OP + "device_buffer_tokens: expected at least 8 columns (the width of cache_policy), got (2, 7).", ValueError),
    "locs width": (lambda a: dict(device_buffer_locs=a["device_buffer_locs"][:, :9]), SPEC_OP + "device_buffer_locs: expected shape [R, H+P=10], got (2, 9).", ValueError),
    "requests dtype": (lambda a: dict(req_pool_indices=a["req_pool_indices"].astype(np.int32)), SPEC_OP + "req_pool_indices: expected dtype int64, got int32.", ValueError),
    "requests shape": (lambda a: dict(req_pool_indices=a["req_pool_indices"][:1]), SPEC_OP + "req_pool_indices: expected shape [B=2], got (1,).", ValueError),
    "lens shape": (lambda a: dict(seq_lens=a["seq_lens"][:2]), SPEC_OP + "seq_lens: expected shape [B*S=4], got (2,).", ValueError),
    "lens dtype": (lambda a: dict(seq_lens=a["seq_lens"].astype(np.int64)), SPEC_OP + "seq_lens: expected dtype int32, got int64.", ValueError),
    "real shape": (lambda a: dict(num_real_reqs=wide((0,))), SPEC_OP + "num_real_reqs: expected shape [1], got (0,).", ValueError),
    "real dtype": (lambda a: dict(num_real_reqs=wide((1,), np.int64)), SPEC_OP + "num_real_reqs: expected dtype int32, got int64.", ValueError),
    "no real": (lambda a: dict(num_real_reqs=None), SPEC_OP + "num_real_reqs: expected a tensor, got none.", ValueError),
    "item size": (lambda a: dict(device_buffer=wide((31, 12), np.uint8)), SPEC_OP + "device_buffer: expected rows of 8 bytes, got rows of 12 bytes.", ValueError),
    "host inner stride": (lambda a: dict(host_cache=wide((85, 16), np.uint8)[:, ::2]), SPEC_OP + "host_cache: expected a dense last dimension, got strides (16, 2) for shape (85, 8).", ValueError),
    "device inner stride": (lambda a: dict(device_buffer=wide((31, 16), np.uint8)[:, ::2]), SPEC_OP + "device_buffer: expected a dense last dimension, got strides (16, 2) for shape (31, 8).", ValueError),
    # ids that point outside
    "request outside": (lambda a: dict(req_pool_indices=np.array([0, 2])), SPEC_OP + "req_pool_indices: expected request ids in 0..1, got 2 at [1].", ValueError),
    "request negative": (lambda a: dict(req_pool_indices=np.array([-1, 0])), SPEC_OP + "req_pool_indices: expected request ids in 0..1, got -1 at [0].", ValueError),
    "request twice": (lambda a: dict(req_pool_indices=np.array([1, 1])), SPEC_OP + "req_pool_indices: expected each request once in a batch, got 1 again at [1].", ValueError),
}


@pytest.mark.parametrize("name", SPEC_CASES)
def test_spec_refusals(name):
    change, text, kind = SPEC_CASES[name]
    a = spec_arguments()
    a.update(change(a))
    refused(SPEC, a, text, kind)


def test_spec_ids_inside_the_tables():
    for name, index in (("device_buffer_locs", (1, 3)), ("device_buffer_locs", (0, 9))):
        a = spec_arguments()
        rows = len(a["device_buffer"])
        a[name] = a[name].copy()
        a[name][index] = rows
        refused(SPEC, a, SPEC_OP + f"{name}: expected device rows below {rows}, got {rows} at [{index[0]}, {index[1]}].")
    a = spec_arguments()
    rows = len(a["device_buffer"])
    a["state"].scratch_locs[1, 2] = rows + 5
    refused(SPEC, a, SPEC_OP + f"state.scratch_locs: expected device rows below {rows}, got {rows + 5} at [1, 2].")
    a = spec_arguments()
    r = int(a["req_pool_indices"][1])
    rows = len(a["host_cache"])
    away = int(np.setdiff1d(np.arange(30), a["device_buffer_tokens"][r])[0])
    a["top_k_tokens"][1, 1, 2] = away
    a["host_cache_locs"][r, away] = rows
    refused(SPEC, a, SPEC_OP + f"host_cache_locs: expected host rows below {rows}, got {rows} at [{r}, {away}].")


@pytest.mark.parametrize("host_row", [2**60, -1, -(2**60)])
def test_spec_wild_ids_of_padded_rows_and_hits_do_not_matter(host_row):
    a = spec_arguments()
    a["num_real_reqs"] = np.array([1], np.int32)
    a["req_pool_indices"][1] = 10**12
    r = int(a["req_pool_indices"][0])
    held = a["device_buffer_tokens"][r, :8]
    a["host_cache_locs"][r, held[held >= 0]] = host_row  # resident: the host row is not looked at
    a["top_k_tokens"][0] = held[held >= 0][0]
    SPEC(**a)
    assert (a["top_k_device_locs"][0] == a["device_buffer_locs"][r, np.flatnonzero(held == a["top_k_tokens"][0, 0, 0])[0]]).all()
    assert (a["top_k_device_locs"][1] == 0).all() and a["miss_count"].tolist() == [0, 0]


@pytest.mark.parametrize("real", [-3, 0, 1, 2, 7])
def test_num_real_reqs_is_clamped(real):
    a = spec_arguments()
    a["num_real_reqs"] = np.array([real], np.int32)
    SPEC(**a)
    for b in range(2):
        assert (b < real) == (a["top_k_device_locs"][b] != 0).any()


def strict_arguments(**kwargs):
    return dict(spec_arguments(**kwargs), strict_sglang=True)


def test_strict_enforces_the_limits_of_sglangs_kernel():
    assert list(inspect.signature(SPEC).parameters)[-3:] == ["strict_sglang", "sm_budget", "stream"]
    ok = strict_arguments(steps=2, top_k=1024, hot=2048, requests=1, scratch=8)
    SPEC(**ok)
    refused(SPEC, strict_arguments(top_k=1023, hot=2048, requests=1), "HiSparse speculative swap requires top_k >= 1024.")
    refused(SPEC, strict_arguments(steps=4, top_k=2049, hot=4096, requests=1), "HiSparse speculative swap supports at most 8192 occurrences.")
    refused(SPEC, strict_arguments(top_k=1024, hot=1, requests=1), "speculative hot buffer must contain at least two slots.")
    refused(SPEC, strict_arguments(top_k=1024, hot=32769, requests=1), "speculative CLOCK cursor requires hot_buffer_size <= 32768.")
    refused(SPEC, strict_arguments(top_k=1024, hot=2047, requests=1), "HiSparse hot_size must be a power of two >= 1024, got 2047.")
    refused(SPEC, strict_arguments(top_k=1024, hot=2048, requests=1, scratch=0), "speculative scratch_locs must have shape [num_requests, scratch_capacity].")
    refused(SPEC, strict_arguments(steps=5, top_k=1024, hot=2048, requests=1), "HiSparse speculative swap requires 2-4 steps, got 5.")


def test_step_range_is_lifted_only_by_strict_false():
    for steps in (1, 5, 8):
        a = spec_arguments(steps=steps)
        refused(SPEC, a, f"HiSparse speculative swap requires 2-4 steps, got {steps}.")
        refused(SPEC, dict(a, strict_sglang=None), f"HiSparse speculative swap requires 2-4 steps, got {steps}.")
        SPEC(**dict(a, strict_sglang=False))
    a = spec_arguments()
    refused(SPEC, dict(a, top_k_tokens=np.zeros((2, 0, 4), np.int32), strict_sglang=False), "HiSparse speculative swap requires 2-4 steps, got 0.")
    a = spec_arguments(steps=4, top_k=16384, hot=8, requests=1)  # exactly 65536 occurrences
    SPEC(**dict(a, strict_sglang=False))


def test_read_only_outputs_are_refused():
    for name in ("top_k_device_locs", "device_buffer", "device_buffer_tokens", "miss_src"):
        a = spec_arguments()
        a[name].flags.writeable = False
        refused(SPEC, a, SPEC_OP + f"{name}: expected a writable array, got a read-only one.")
    a = spec_arguments()
    for name in ("top_k_tokens", "host_cache", "host_cache_locs", "req_pool_indices", "seq_lens", "num_real_reqs"):
        a[name].flags.writeable = False
    SPEC(**a)


def test_empty_batch_does_nothing():
    a = spec_arguments()
    for name in ("top_k_tokens", "top_k_device_locs", "req_pool_indices", "seq_lens"):
        a[name] = a[name][:0]
    before = {k: v.copy() for k, v in arrays(a).items()}
    SPEC(**a)
    for name, was in before.items():
        np.testing.assert_array_equal(was, arrays(a)[name])


# ------------------------------------------------------------------------------------------------------- single step

SINGLE = hisparse.load_cache_to_device_buffer_mla
SINGLE_OP = "load_cache_to_device_buffer_mla: "


def single_arguments(seed=0, dsv4=False):
    rng = np.random.default_rng(seed)
    w = oracle.make_world(rng, requests=2, hot=8, tail=1, context=40, item=8, mode="single", resident="full", dsv4=dsv4)
    c = oracle.make_single_call(rng, w, batch=2, top_k=4, seq=39)
    names = ("device_buffer_tokens", "host_cache_locs", "device_buffer_locs", "host_cache", "device_buffer", "lru_slots")
    a = {name: getattr(w, name) for name in names}
    for name in ("top_k_tokens", "top_k_device_locs", "req_pool_indices", "seq_lens", "num_real_reqs", "miss_src", "miss_dst", "miss_count"):
        a[name] = getattr(c, name)
    return dict(a, item_size_bytes=584 if dsv4 else 8, num_top_k=4, hot_buffer_size=8)


SINGLE_CASES = {
    "output is a table": (lambda a: dict(top_k_device_locs=a["device_buffer_tokens"][:, :4]), SINGLE_OP + "top_k_device_locs: expected memory of its own, got memory that overlaps device_buffer_tokens.", ValueError),
    "plan is the output": (lambda a: dict(miss_dst=a["top_k_device_locs"]), SINGLE_OP + "miss_dst: expected memory of its own, got memory that overlaps top_k_device_locs.", ValueError),
    "device is host": (lambda a: dict(device_buffer=a["host_cache"]), SINGLE_OP + "device_buffer: expected memory of its own, got memory that overlaps host_cache.", ValueError),
    "hot below top-k": (lambda a: dict(hot_buffer_size=3), "hot_buffer_size (3) must be >= num_top_k (4)", ValueError),
    "plan without src": (lambda a: dict(miss_src=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "only dst": (lambda a: dict(miss_src=None, miss_count=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "only src": (lambda a: dict(miss_dst=None, miss_count=None), "miss_src, miss_dst, and miss_count must be provided together.", ValueError),
    "src dtype": (lambda a: dict(miss_src=a["miss_src"].astype(np.int32)), "miss_src must be int64 and miss_dst must be int32.", ValueError),
    "count dtype": (lambda a: dict(miss_count=a["miss_count"].astype(np.int64)), "miss_count must be int32.", ValueError),
    "plan strides": (lambda a: dict(miss_src=wide((2, 9), np.int64)[:, :4]), "load_cache_to_device_buffer: miss_src/miss_dst row strides differ", ValueError),
    "plan columns": (lambda a: dict(miss_src=a["miss_src"][:, :3]), SINGLE_OP + "miss_src: expected shape [B >= 2, M >= 4], got (2, 3).", ValueError),
    "plan count": (lambda a: dict(miss_count=a["miss_count"][:1]), SINGLE_OP + "miss_count: expected shape [B >= 2], got (1,).", ValueError),
    "top-k width": (lambda a: dict(num_top_k=3), SINGLE_OP + "top_k_tokens: expected shape [B, 3], got (2, 4).", ValueError),
    "lru width": (lambda a: dict(hot_buffer_size=7), SINGLE_OP + "lru_slots: expected shape [R, 7], got (2, 8).", ValueError),
    "lru dtype": (lambda a: dict(lru_slots=a["lru_slots"].astype(np.int64)), SINGLE_OP + "lru_slots: expected dtype int16 or int32, got int64.", ValueError),
    "no newest column": (lambda a: dict(device_buffer_tokens=a["device_buffer_tokens"][:, :8]), SINGLE_OP + "device_buffer_tokens: expected shape [R, H+P >= 9], got (2, 8).", ValueError),
    "locs width": (lambda a: dict(device_buffer_locs=a["device_buffer_locs"][:, :8]), SINGLE_OP + "device_buffer_locs: expected shape [R, H+P >= 9], got (2, 8).", ValueError),
    "host locs dtype": (lambda a: dict(host_cache_locs=a["host_cache_locs"].astype(np.int32)), SINGLE_OP + "host_cache_locs: expected dtype int64, got int32.", ValueError),
    "item size": (lambda a: dict(item_size_bytes=7), SINGLE_OP + "host_cache: expected rows of 7 bytes, got rows of 8 bytes.", ValueError),
    "item size -1": (lambda a: dict(item_size_bytes=-1), SINGLE_OP + "item_size_bytes: expected >= 1, got -1.", ValueError),
    "top-k -1": (lambda a: dict(num_top_k=-1), SINGLE_OP + "num_top_k: expected >= 0, got -1.", ValueError),
    "hot -1": (lambda a: dict(hot_buffer_size=-1), "hot_buffer_size (-1) must be >= num_top_k (4)", ValueError),
    "block size kind": (lambda a: dict(block_size=2.5), SINGLE_OP + "block_size: expected an integer, got float 2.5.", TypeError),
    "item size 0": (lambda a: dict(item_size_bytes=0), SINGLE_OP + "item_size_bytes: expected >= 1, got 0.", ValueError),
    "block size": (lambda a: dict(block_size=1025), SINGLE_OP + "block_size: expected 1 to 1024, got 1025.", ValueError),
    "block size 0": (lambda a: dict(block_size=0), SINGLE_OP + "block_size: expected 1 to 1024, got 0.", ValueError),
    "output shape": (lambda a: dict(top_k_device_locs=wide((2, 5))), SINGLE_OP + "top_k_device_locs: expected shape [B=2, 4], got (2, 5).", ValueError),
    "request outside": (lambda a: dict(req_pool_indices=np.array([0, 9])), SINGLE_OP + "req_pool_indices: expected request ids in 0..1, got 9 at [1].", ValueError),
    "request twice": (lambda a: dict(req_pool_indices=np.array([0, 0])), SINGLE_OP + "req_pool_indices: expected each request once in a batch, got 0 again at [1].", ValueError),
}


@pytest.mark.parametrize("name", SINGLE_CASES)
def test_single_refusals(name):
    change, text, kind = SINGLE_CASES[name]
    a = single_arguments()
    a.update(change(a))
    refused(SINGLE, a, text, kind)


def test_integers_of_any_kind():
    a = single_arguments()
    for name in ("item_size_bytes", "num_top_k", "hot_buffer_size"):
        a[name] = np.int64(a[name])
    SINGLE(**a, block_size=np.int32(64), page_size=np.int64(64))


def test_single_ids_inside_the_tables():
    a = single_arguments()
    a["lru_slots"][1, 3] = 8
    refused(SINGLE, a, SINGLE_OP + "lru_slots: expected a permutation of 0..7, got 8 at [1, 3].")
    a = single_arguments()
    a["lru_slots"][0, 5] = a["lru_slots"][0, 2]
    refused(SINGLE, a, SINGLE_OP + f"lru_slots: expected a permutation of 0..7, got {a['lru_slots'][0, 2]} at [0, 5].")
    for bad in (-1, 10**6):
        a = single_arguments()
        a["device_buffer_locs"][0, 4] = bad
        refused(SINGLE, a, SINGLE_OP + f"device_buffer_locs: expected device rows in 0..{len(a['device_buffer']) - 1}, got {bad} at [0, 4].")
    a = single_arguments()
    r = int(a["req_pool_indices"][1])
    away = int(np.setdiff1d(np.arange(30), a["device_buffer_tokens"][r])[0])
    a["top_k_tokens"][1, 2] = away
    a["host_cache_locs"][r, away] = 10**9
    refused(SINGLE, a, SINGLE_OP + f"host_cache_locs: expected host rows below {len(a['host_cache'])}, got {10**9} at [{r}, {away}].")


def test_dsv4_refusals():
    call, op = hisparse.load_cache_to_device_buffer_dsv4_mla, "load_cache_to_device_buffer_dsv4_mla: "
    a = single_arguments(dsv4=True)
    call(**a)
    refused(call, dict(a, item_size_bytes=576), op + "item_size_bytes: expected 584 for the DSv4 layout, got 576.")
    refused(call, dict(a, host_cache=a["host_cache"][:, :-1].copy()), op + "host_cache: expected whole DSv4 pages of 37440 bytes, got 74878 bytes.")
    refused(call, dict(a, device_buffer=a["device_buffer"][:, ::2]), op + "device_buffer: expected the last 2 dimensions dense row-major, got strides (37440, 2) for shape (1, 18720).")
    with pytest.raises(ValueError) as e:
        hisparse.swap_in_single(
            *(a[k] for k in ("top_k_tokens", "device_buffer_tokens", "host_cache_locs", "device_buffer_locs", "host_cache", "device_buffer", "req_pool_indices", "seq_lens", "lru_slots")),
            host_cache_v=a["host_cache"], device_buffer_v=a["device_buffer"].copy(), layout="dsv4",
        )
    assert str(e.value) == "DSv4 page-padded layout is K-only (MLA)."


def test_blocks_refusals():
    a = single_arguments()
    a = dict(
        top_k_blocks=a["top_k_tokens"], device_buffer_tokens=a["device_buffer_tokens"], host_cache_locs=a["host_cache_locs"],
        device_buffer_locs=a["device_buffer_locs"], host_cache_k=a["host_cache"], host_cache_v=a["host_cache"].copy(),
        device_buffer_k=a["device_buffer"], device_buffer_v=a["device_buffer"].copy(), top_k_device_locs=wide((2, 8)),
        req_pool_indices=a["req_pool_indices"], seq_lens=a["seq_lens"], lru_slots=a["lru_slots"], item_size_bytes=8, hot_buffer_size=8,
        sparse_block_size=2,
    )
    call, op = hisparse.load_blocks_to_device_buffer_mha, "load_blocks_to_device_buffer_mha: "
    call(**a)
    refused(call, dict(a, sparse_block_size=3), "hot_buffer_size (8) must be >= selected tokens (12)")
    refused(call, dict(a, item_size_bytes=16), "K/V token strides must equal item_size_bytes: k_stride=8, v_stride=8, item_size_bytes=16")
    refused(call, dict(a, top_k_device_locs=wide((2, 7))), op + "top_k_device_locs: expected shape [B=2, K >= 8], got (2, 7).")
    refused(call, dict(a, sparse_block_size=0), op + "sparse_block_size: expected at least 1, got 0.")


# ------------------------------------------------------------------------------------------------------------- replay

REPLAY = hisparse.copy_cache_planned_mla
REPLAY_OP = "copy_cache_planned_mla: "


def replay_arguments():
    rng = np.random.default_rng(0)
    return dict(
        miss_src=np.array([[0, 3, 9], [4, 5, 9]], np.int64), miss_dst=np.array([[2, 1, 9], [0, -1, 9]], np.int32),
        miss_count=np.array([2, 2], np.int32), num_real_reqs=np.array([2], np.int32),
        host_cache=rng.integers(0, 256, (6, 8), dtype=np.uint8), device_buffer=rng.integers(0, 256, (3, 8), dtype=np.uint8), item_size_bytes=8,
    )


REPLAY_CASES = {
    "device is host": (lambda a: dict(device_buffer=a["host_cache"]), REPLAY_OP + "device_buffer: expected memory of its own, got memory that overlaps host_cache.", ValueError),
    "src dtype": (lambda a: dict(miss_src=a["miss_src"].astype(np.int32)), "miss_src must be int64 and miss_dst must be int32.", ValueError),
    "count dtype": (lambda a: dict(miss_count=a["miss_count"].astype(np.int64)), "miss_count must be int32.", ValueError),
    "strides": (lambda a: dict(miss_src=wide((2, 5), np.int64)[:, :3]), "copy_cache_planned: miss_src/miss_dst row strides differ", RuntimeError),
    "blocks": (lambda a: dict(num_blocks=0), REPLAY_OP + "num_blocks: expected at least 1, got 0.", ValueError),
    "block size": (lambda a: dict(block_size=2048), REPLAY_OP + "block_size: expected 1 to 1024, got 2048.", ValueError),
    "ndim": (lambda a: dict(miss_dst=a["miss_dst"][0]), REPLAY_OP + "miss_dst: expected 2 dimensions, got shape (3,).", ValueError),
    "item": (lambda a: dict(item_size_bytes=5), REPLAY_OP + "host_cache: expected rows of 5 bytes, got rows of 8 bytes.", ValueError),
    "count": (lambda a: dict(miss_count=np.array([2, 4], np.int32)), REPLAY_OP + "miss_count: expected counts in 0..3, got 4 at [1].", ValueError),
    "negative count": (lambda a: dict(miss_count=np.array([-1, 2], np.int32)), REPLAY_OP + "miss_count: expected counts in 0..3, got -1 at [0].", ValueError),
    "src": (lambda a: dict(miss_src=a["miss_src"] + 3), REPLAY_OP + "miss_src: expected host rows in 0..5, got 6 at [0, 1].", ValueError),
    "dst": (lambda a: dict(miss_dst=a["miss_dst"] + 2), REPLAY_OP + "miss_dst: expected device rows below 3, got 4 at [0, 0].", ValueError),
}


@pytest.mark.parametrize("name", REPLAY_CASES)
def test_replay_refusals(name):
    change, text, kind = REPLAY_CASES[name]
    a = replay_arguments()
    a.update(change(a))
    refused(REPLAY, a, text, kind)


def test_replay_skips_blank_entries_and_never_reads_past_the_count():
    a = replay_arguments()
    want = a["device_buffer"].copy()
    want[2], want[1], want[0] = a["host_cache"][0], a["host_cache"][3], a["host_cache"][4]
    REPLAY(**a)
    np.testing.assert_array_equal(a["device_buffer"], want)


def test_follower_lists():
    a = replay_arguments()
    plan = (a["miss_src"], a["miss_dst"], a["miss_count"])
    with pytest.raises(ValueError, match=r"replay_plan: device_buffer: expected 2 layers, got 1\."):
        hisparse.replay_plan(*plan, [a["host_cache"]] * 2, [a["device_buffer"]])
    good = a["device_buffer"].copy()
    with pytest.raises(ValueError, match=r"replay_plan: miss_src: expected host rows in 0\.\.3, got 4 at \[1, 0\]"):
        hisparse.replay_plan(*plan, [a["host_cache"], a["host_cache"][:4]], [good, a["device_buffer"]])
    np.testing.assert_array_equal(good, a["device_buffer"])  # not even the first layer


# ------------------------------------------------------------------------------------------------------------ transfer


def test_transfer_refusals():
    page = np.zeros((1, oracle.DSV4_PAGE_BYTES), np.uint8)
    ptr = np.array([page.ctypes.data], np.uint64)
    i = np.array([0, 5])
    call, op = hisparse.transfer_cache_dsv4_mla, "transfer_cache_dsv4_mla: "
    for arguments, text in [
        ((ptr.astype(np.uint32), ptr, i, i), op + "src_ptrs: expected dtype uint64 or int64, got uint32."),
        ((ptr, ptr.repeat(2), i, i), op + "dst_ptrs: expected shape [num_layers=1], got (2,)."),
        ((ptr, ptr, i.astype(np.int32), i), op + "src_indices: expected dtype int64, got int32."),
        ((ptr, ptr, i, i[:1]), op + "dst_indices: expected shape [num_items=2], got (1,)."),
        ((ptr, ptr, i, -i), op + "dst_indices: expected rows >= 0, got -5 at [1]."),
        ((ptr * 0, ptr, i, i), op + "src_ptrs: expected addresses, got 0 at [0]."),
    ]:
        with pytest.raises(ValueError) as e:
            call(*arguments)
        assert str(e.value) == text
    call(ptr * 0, ptr * 0, i[:0], i[:0])  # nothing to do
    with pytest.raises(ValueError, match=op + "block_size: expected 1 to 1024, got 0"):
        call(ptr, ptr, i, i, 0)
    with pytest.raises(ValueError, match=r"transfer_paged: src\[0\]: expected whole DSv4 pages of 37440 bytes, got 37439 bytes\."):
        hisparse.transfer_paged(page[0, 1:], page, i, i)


def test_followers_are_awaited_once():
    a = replay_arguments()
    plan = {k: a[k] for k in ("miss_src", "miss_dst", "miss_count")}
    pools, arrived = [np.zeros((3, 8), np.uint8) for _ in range(2)], np.zeros(2, np.int32)
    for _ in range(2):
        hisparse.replay_plan(**plan, host_cache=[a["host_cache"]] * 2, device_buffer=pools, arrived=arrived)
        for follower in (1, 0):
            hisparse.await_follower(arrived, follower)
            with pytest.raises(ValueError, match=r"await_follower: arrived: expected a follower whose rows were copied and not awaited yet, got 0\."):
                hisparse.await_follower(arrived, follower)
    assert not arrived.any() and (pools[1][2] == a["host_cache"][0]).all()
    with pytest.raises(ValueError, match=r"await_follower: follower: expected 0 to 1, got 2\."):
        hisparse.await_follower(arrived, 2)
    with pytest.raises(ValueError, match=r"replay_plan: arrived: expected shape \[2\], got \(3,\)\."):
        hisparse.replay_plan(**plan, host_cache=[a["host_cache"]] * 2, device_buffer=pools, arrived=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"await_follower: arrived: expected the sign of at least one follower, got shape \(0,\)\."):
        hisparse.await_follower(arrived[:0], 0)


@pytest.mark.parametrize("sign", [1, -1, 7])
def test_signs_are_what_a_replay_sets(sign):
    """A replay over a sign that was not awaited moves nothing; a wait takes nothing but what a replay sets."""
    a = replay_arguments()
    plan = {k: a[k] for k in ("miss_src", "miss_dst", "miss_count")}
    pools, arrived = [np.zeros((3, 8), np.uint8) for _ in range(2)], np.array([0, sign], np.int32)
    with pytest.raises(ValueError, match=rf"replay_plan: arrived: expected 0, a sign that was awaited since the last replay, got {sign} at \[1\]\."):
        hisparse.replay_plan(**plan, host_cache=[a["host_cache"]] * 2, device_buffer=pools, arrived=arrived)
    assert not np.any(pools) and arrived.tolist() == [0, sign]
    if sign != 1:
        with pytest.raises(ValueError, match=rf"await_follower: arrived: .*not awaited yet, got {sign}\."):
            hisparse.await_follower(arrived, 1)
        assert arrived.tolist() == [0, sign]
        return
    hisparse.await_follower(arrived, 1)
    hisparse.replay_plan(**plan, host_cache=[a["host_cache"]] * 2, device_buffer=pools, arrived=arrived)
    assert arrived.tolist() == [1, 1] and (pools[1][2] == a["host_cache"][0]).all()


def test_plans_without_rows_of_their_own():
    """A plan of 2^40 rows or pairs that all lie in one place would be walked for hours."""
    a = replay_arguments()
    pools = dict(host_cache=a["host_cache"], device_buffer=a["device_buffer"])
    long = lambda x, shape: np.lib.stride_tricks.as_strided(x, shape, (0,) * len(shape))  # noqa: E731
    src, dst, count = np.zeros(1, np.int64), np.zeros(1, np.int32), np.ones(1, np.int32)
    for shape, what in (((1 << 40, 1), "rows"), ((1, 1 << 40), "pairs")):
        with pytest.raises(ValueError, match=rf"replay_plan: miss_dst: expected {what} of their own \(miss_src has none\), got stride 0 for shape"):
            hisparse.replay_plan(long(src, shape), long(dst, shape), long(count, shape[:1]), **pools)
    # What rows share may be broadcast as long as something is theirs.
    hisparse.replay_plan(np.broadcast_to(a["miss_src"][0], (2, 3)), a["miss_dst"], np.broadcast_to(count, 2), **pools)
    assert (a["device_buffer"][[0, 2]] == a["host_cache"][0]).all()


def at_odd_address(x):
    memory = np.zeros(x.nbytes + x.itemsize, np.uint8)
    odd = memory[(1 - memory.ctypes.data) % x.itemsize :][: x.nbytes].view(x.dtype).reshape(x.shape)
    odd[...] = x
    return odd


@pytest.mark.parametrize("name", ["miss_src", "miss_dst", "miss_count", "num_real_reqs"])
def test_numbers_at_odd_addresses(name):
    """Numbers are read as what they are; rows of a pool may lie anywhere."""
    a = replay_arguments()
    size = a[name].itemsize
    with pytest.raises(ValueError, match=rf"copy_cache_planned_mla: {name}: expected a data pointer that is a multiple of {size} bytes, got remainder 1\."):
        hisparse.copy_cache_planned_mla(**dict(a, **{name: at_odd_address(a[name])}))
    host = at_odd_address(a["host_cache"].view(np.int64))
    hisparse.replay_plan(a["miss_src"], a["miss_dst"], a["miss_count"], host, a["device_buffer"].view(np.int64))
    assert (a["device_buffer"][2] == a["host_cache"][0]).all()


def test_negative_rows_of_a_plan():
    a = replay_arguments()
    plan = {k: a[k].copy() for k in ("miss_src", "miss_dst", "miss_count")}
    plan["miss_src"][0, 0] = -1
    pool = np.zeros((3, 8), np.uint8)
    with pytest.raises(ValueError, match=r"replay_plan: miss_src: expected host rows in 0\.\.\d+, got -1 at \[0, 0\]\."):
        hisparse.replay_plan(**plan, host_cache=a["host_cache"], device_buffer=pool)
    plan["miss_dst"][0, 0] = -1
    hisparse.replay_plan(**plan, host_cache=a["host_cache"], device_buffer=pool)
    assert not pool[2].any()


def test_a_layer_of_a_replay_may_be_named_twice():
    """As in sglang's benchmark. Any other two layers are apart: rows of one would lie under those of the other."""
    host, device = np.arange(64, dtype=np.uint8).reshape(8, 8), np.zeros((8, 8), np.uint8)
    plan = dict(miss_src=np.array([[3]]), miss_dst=np.array([[5]], np.int32), miss_count=np.ones(1, np.int32))
    hisparse.replay_plan(**plan, host_cache=[host] * 3, device_buffer=[device] * 3)
    np.testing.assert_array_equal(device[5], host[3])
    with pytest.raises(ValueError, match=r"device_buffer\[1\]: expected memory of its own, got memory that overlaps host_cache\[[01]\]"):
        hisparse.replay_plan(**plan, host_cache=[host] * 2, device_buffer=[device, host])
    before = device.copy()
    for hosts, devices, text in (
        ([host, host + 1], [device, device], r"device_buffer\[1\]: expected memory of its own, got memory that overlaps device_buffer\[0\]"),
        ([host, host], [device[:7], device[1:]], r"device_buffer\[1\]: expected memory of its own, got memory that overlaps device_buffer\[0\]"),
        ([host, device], [device, device.copy()], r"device_buffer\[0\]: expected memory of its own, got memory that overlaps host_cache\[1\]"),
    ):
        with pytest.raises(ValueError, match=text):
            hisparse.replay_plan(**plan, host_cache=hosts, device_buffer=devices)
        np.testing.assert_array_equal(device, before)
    hisparse.replay_plan(**plan, host_cache=[host, host], device_buffer=[device, device.copy()])  # hosts are only read
