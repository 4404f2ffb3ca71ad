"""FusedKVMaterializeHelper: what it reads, its checks in their order, growth of the rotary table, the callback."""

import inspect
from types import SimpleNamespace as Bag

import draft_kv as oracle
import ml_dtypes
import numpy as np
import pytest
from draft_kv_cases import raw, rotary_pairs, units

import specstate.draft_kv as draft_kv
from specstate.draft_kv import FusedKVMaterializeHelper, fused_norm_rope_stacked

BF16 = ml_dtypes.bfloat16


class Rope:
    """A rotary object that grows, as the oracle's does."""

    def __init__(self, rotary_dim=8, length=64, grows=True):
        self.table = oracle.RopeTable(rotary_dim, 1e4, length)
        self.rotary_dim, self.is_neox_style, self.calls = rotary_dim, True, []
        self.cos_sin_cache = self.table.rows.astype(np.float32)
        if grows:
            self._ensure_cos_sin_cache_length = self.grow

    def grow(self, max_position):
        self.calls.append(max_position)
        self.table.ensure(max_position)
        self.cos_sin_cache = self.table.rows.astype(np.float32)


def make_layers(n=3, N=2, D=8, hidden=24, dtype=BF16, rope=None, bias=False, q_heads=4):
    rng = np.random.default_rng(3)
    f = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32).astype(dtype)
    q = q_heads * D
    return [
        Bag(
            self_attn=Bag(
                num_kv_heads=N, head_dim=D, q_size=q, kv_size=N * D, rotary_emb=rope or Rope(),
                qkv_proj=Bag(weight=f(q + 2 * N * D, hidden), bias=f(q + 2 * N * D) if bias else None),
                k_norm=Bag(weight=(1 + f(D)).astype(dtype), variance_epsilon=[1e-6, 1e-5, 1e-2][i % 3]),
            )
        )
        for i in range(n)
    ]  # fmt: skip


def collect(helper, hidden, positions):
    got = []
    helper.materialize(hidden, positions, lambda l, k, v: got.append((l, k, v)))
    assert [l for l, _, _ in got] == list(range(len(got)))
    return [k for _, k, _ in got], [v for _, _, v in got]


def oracle_of(layers, hidden, positions, rope, io="bf16"):
    f8 = lambda x: np.asarray(x).astype(np.float64)
    attn = [layer.self_attn for layer in layers]
    w = np.stack([f8(a.qkv_proj.weight[a.q_size :]) for a in attn])
    bias = None if attn[0].qkv_proj.bias is None else np.stack([f8(a.qkv_proj.bias[a.q_size :]) for a in attn])
    return oracle.materialize_arrays(
        f8(hidden), w, np.stack([f8(a.k_norm.weight) for a in attn]), [a.k_norm.variance_epsilon for a in attn],
        f8(rope.cos_sin_cache), np.asarray(positions).reshape(-1), attn[0].num_kv_heads, attn[0].head_dim, rope.rotary_dim, io, kv_bias=bias,
    )  # fmt: skip


def test_signatures_are_those_of_sglang_0_5_23():
    names = lambda f: [(p.name, p.default, p.kind) for p in inspect.signature(f).parameters.values()]
    plain, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    required = lambda *args: [(a, empty, plain) for a in args]
    assert names(FusedKVMaterializeHelper.__init__) == required(
        "self", "layers", "rotary_emb", "num_kv_heads", "head_dim", "device"
    ) + [("max_position_hint", None, plain)]
    assert names(FusedKVMaterializeHelper.materialize) == required("self", "ctx_hidden", "positions", "write_layer_kv")
    assert names(fused_norm_rope_stacked) == required(
        "kv", "k_norm_weight", "eps", "cos_sin_cache", "positions", "num_kv_heads", "head_dim", "rotary_dim"
    ) + [("k_out", None, plain), ("v_out", None, plain), ("stream", None, inspect.Parameter.KEYWORD_ONLY)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("hidden_dtype", [BF16, np.float32])
def test_against_the_oracle(bias, rotary_dim, hidden_dtype):
    """Features of another type are rounded to the weights' type, and so is everything that comes out."""
    rope = Rope(rotary_dim)
    layers = make_layers(rope=rope, bias=bias)
    helper = FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    rng = np.random.default_rng(4)
    hidden = rng.standard_normal((5, 24)).astype(np.float32).astype(hidden_dtype)
    positions = np.array([3, 0, 63, 7, 7])
    k, v = collect(helper, hidden, positions)
    want_k, want_v = oracle_of(layers, hidden, positions, rope)
    for l in range(3):
        assert k[l].shape == v[l].shape == (5, 2, 8) and k[l].dtype == v[l].dtype == BF16
        assert type(k[l]) is np.ndarray and k[l].flags.c_contiguous
        assert units(k[l], want_k[l], "bf16", rotary_pairs(want_k[l], rotary_dim)).max() <= 2
        assert units(v[l], want_v[l], "bf16").max() <= 1
    kept = [x.copy() for x in k]
    collect(helper, hidden[::-1], positions)
    np.testing.assert_array_equal(raw(k), raw(kept))  # an earlier call's arrays belong to the caller


def test_float32_and_equality_with_the_one_pass_form():
    rope = Rope()
    layers = make_layers(dtype=np.float32, rope=rope)
    helper = FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    hidden = np.random.default_rng(5).standard_normal((7, 24)).astype(np.float32)
    positions = np.arange(7) * 9
    k, v = collect(helper, hidden, positions)
    pools = np.zeros((2, 3, 16, 2, 8), np.float32)
    attn = [layer.self_attn for layer in layers]
    draft_kv.materialize_into_pool(
        hidden, np.stack([a.qkv_proj.weight[a.q_size :] for a in attn]), np.stack([a.k_norm.weight for a in attn]),
        np.array([a.k_norm.variance_epsilon for a in attn], np.float32), rope.cos_sin_cache, positions, np.arange(7) * 2, *pools,
    )  # fmt: skip
    np.testing.assert_array_equal(raw(np.stack(k)), raw(pools[0][:, :14:2]))
    np.testing.assert_array_equal(raw(np.stack(v)), raw(pools[1][:, :14:2]))


def test_positions_of_any_shape_and_integer_type():
    rope = Rope()
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    hidden = np.random.default_rng(6).standard_normal((6, 24)).astype(BF16)
    flat = np.array([5, 1, 9, 2, 0, 33])
    want = raw(collect(helper, hidden, flat))
    for positions in (flat.reshape(2, 3), flat.astype(np.int32), flat.astype(np.int16), flat.astype(np.uint8), np.repeat(flat, 2)[::2]):
        np.testing.assert_array_equal(raw(collect(helper, hidden, positions)), want)
    for shape, n in (((3, 6), 18), ((5,), 5)):
        with pytest.raises(ValueError) as e:
            helper.materialize(hidden, np.zeros(shape, int), print)
        assert str(e.value) == (
            f"positions must match ctx_hidden token count for fused KV materialization: positions={n}, total_ctx=6."
        )
    with pytest.raises(ValueError, match="positions: expected dtype int32 or int64, got float64"):
        helper.materialize(hidden, flat.astype(float), print)


def test_no_tokens_no_callback():
    rope = Rope()
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    helper.materialize(np.zeros((0, 24), BF16), np.zeros(17, int), print)  # before positions are counted, as sglang does
    for wrong in (object(), "x", [1], 5, None, np.zeros(0), np.zeros(0, complex), np.zeros(0, bool), np.array(["x"]), np.array([object()])):
        for tokens in (0, 1):
            with pytest.raises((TypeError, ValueError), match="^FusedKVMaterializeHelper: positions: expected "):
                helper.materialize(np.zeros((tokens, 24), BF16), wrong, print)
    with pytest.raises(TypeError, match="^FusedKVMaterializeHelper: write_layer_kv: expected a function, got NoneType"):
        helper.materialize(np.zeros((0, 24), BF16), np.zeros(0, int), None)
    assert rope.calls == []


def test_rotary_table_grows_only_when_it_must():
    rope = Rope(length=100)
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    hidden = np.random.default_rng(7).standard_normal((2, 24)).astype(BF16)
    first = raw(collect(helper, hidden, np.array([0, 99])))
    assert rope.calls == []
    old = rope.cos_sin_cache.copy()
    collect(helper, hidden, np.array([100, 3]))
    assert rope.calls == [100] and len(rope.cos_sin_cache) == 128
    np.testing.assert_array_equal(rope.cos_sin_cache[:100], old)
    collect(helper, hidden, np.array([127, 128]))
    assert rope.calls == [100, 128] and len(rope.cos_sin_cache) == 256
    np.testing.assert_array_equal(raw(collect(helper, hidden, np.array([0, 99]))), first)


def test_position_hint_reserves_and_positions_are_checked_all_the_same():
    rope = Rope(length=10)
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu", max_position_hint=300)
    assert helper.max_position_hint == 299 and rope.calls == [299] and len(rope.cos_sin_cache) == 384
    hidden = np.zeros((2, 24), BF16)
    collect(helper, hidden, np.array([299, 383]))
    seen = []
    with pytest.raises(RuntimeError) as e:
        helper.materialize(hidden, np.array([1, 384]), lambda *a: seen.append(a))
    assert str(e.value) == "RoPE cos/sin cache is too short for fused KV materialization: max_position=384, cache_len=384."
    assert seen == [] and rope.calls == [299]
    assert FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu", 0).max_position_hint == 0


def test_table_that_cannot_grow():
    rope = Rope(length=64, grows=False)
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    hidden = np.zeros((2, 24), BF16)
    text = "RoPE cos/sin cache is too short for fused KV materialization: max_position={}, cache_len=64."
    with pytest.raises(RuntimeError) as e:
        helper.materialize(hidden, np.array([1, 64]), None)
    assert str(e.value) == text.format(64)
    with pytest.raises(RuntimeError) as e:
        FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu", max_position_hint=101)
    assert str(e.value) == text.format(100)
    with pytest.raises(ValueError, match="positions: expected positions >= 0, got -3."):
        helper.materialize(hidden, np.array([1, -3]), None)


def test_constructor_texts_in_order():
    """Each case also has every fault that is looked at later."""
    wrong = Rope(4)
    interleaved = Rope(8)
    interleaved.is_neox_style = False
    far = Rope(8, grows=False)

    def build(layers, rope=None, N=2, D=8, hint=None):
        return lambda: FusedKVMaterializeHelper(layers, rope or far, N, D, "cpu", hint)

    def spoiled(**attributes):
        layers = make_layers(rope=far)
        for name, value in attributes.items():
            setattr(layers[1].self_attn, name, value)
        return layers

    pair = "Invalid fused KV rotary/head dim pair: rotary_dim={}, head_dim={}."
    later = {"num_kv_heads": 1, "head_dim": 4, "rotary_emb": wrong}
    odd, none = Rope(8), Rope(8)
    odd.rotary_dim, none.rotary_dim = 7, 0
    for call, kind, text in [
        (build(spoiled(**later), interleaved, D=2), NotImplementedError, "Only neox-style RoPE is supported."),
        (build(spoiled(**later), D=6, hint=999), ValueError, pair.format(8, 6)),
        (build(spoiled(**later), none), ValueError, pair.format(0, 8)),
        (build(spoiled(**later), odd), ValueError, pair.format(7, 8)),
        (build(spoiled(**later), hint=999), ValueError, "num_kv_heads mismatch across layers for fused KV path: expected 2, got 1 at layer 1."),
        (build(spoiled(head_dim=4, rotary_emb=wrong), hint=999), ValueError, "head_dim mismatch across layers for fused KV path: expected 8, got 4 at layer 1."),
        (build(spoiled(rotary_emb=wrong), hint=999), ValueError, "RoPE config mismatch across layers for fused KV path: expected (rotary_dim=8, neox=True), got (rotary_dim=4, neox=True) at layer 1."),
        (build(spoiled(rotary_emb=interleaved)), ValueError, "RoPE config mismatch across layers for fused KV path: expected (rotary_dim=8, neox=True), got (rotary_dim=8, neox=False) at layer 1."),
        (build(make_layers(rope=far), hint=999), RuntimeError, "RoPE cos/sin cache is too short for fused KV materialization: max_position=998, cache_len=64."),
        (build([]), ValueError, "FusedKVMaterializeHelper: layers: expected at least one layer, got none."),
        (build(spoiled(kv_size=8)), ValueError, "FusedKVMaterializeHelper: kv_size: expected num_kv_heads * head_dim = 16, got 8 at layer 1."),
        (build(spoiled(q_size=33)), ValueError, "FusedKVMaterializeHelper: qkv_proj.weight: expected shape [>= q_size + 2 * kv_size = 65, hidden], got (64, 24) at layer 1."),
        (build(spoiled(k_norm=Bag(weight=np.ones(4, BF16), variance_epsilon=1e-6))), ValueError, "FusedKVMaterializeHelper: k_norm.weight: expected shape (8,), got (4,) at layer 1."),
        (build(spoiled(qkv_proj=Bag(weight=np.ones((64, 24), np.int8)))), ValueError, "FusedKVMaterializeHelper: qkv_proj.weight: expected dtype float32 or bfloat16 or float16, got int8 at layer 1."),
    ]:  # fmt: skip
        with pytest.raises(kind) as e:
            call()
        assert str(e.value) == text


def test_defaults_of_a_bare_rotary_object():
    """rotary_dim is head_dim and the style neox where the object does not say."""
    rope = Rope(8)
    bare = Bag(cos_sin_cache=rope.cos_sin_cache)
    layers = make_layers(rope=bare)
    hidden = np.random.default_rng(8).standard_normal((3, 24)).astype(BF16)
    got = collect(FusedKVMaterializeHelper(layers, bare, 2, 8, "cpu"), hidden, np.arange(3))
    want = collect(FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu"), hidden, np.arange(3))
    np.testing.assert_array_equal(raw(got), raw(want))


class Counted(np.ndarray):
    """An array that says how often it was written, as torch's tensors do."""

    _version = 0


def test_counted_writes_and_new_tensors_are_packed_by_the_next_call():
    rope = Rope()
    layers = make_layers(rope=rope)
    for layer in layers:
        layer.self_attn.k_norm.weight = layer.self_attn.k_norm.weight.view(Counted)
    helper = FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    hidden, positions = np.random.default_rng(9).standard_normal((3, 24)).astype(BF16), np.arange(3)
    before = collect(helper, hidden, positions)
    fresh = lambda: collect(FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu"), hidden, positions)
    layers[1].self_attn.qkv_proj.weight = (layers[1].self_attn.qkv_proj.weight.astype(np.float32) * 2).astype(BF16)
    np.testing.assert_array_equal(raw(collect(helper, hidden, positions)), raw(fresh()))
    layers[2].self_attn.k_norm.weight *= np.asarray(2, BF16)
    np.testing.assert_array_equal(raw(collect(helper, hidden, positions)[0][:2]), raw(fresh()[0][:2]))
    layers[2].self_attn.k_norm.weight._version += 1
    after = collect(helper, hidden, positions)
    np.testing.assert_array_equal(raw(after), raw(fresh()))
    assert (np.asarray(after[0][2], np.float32) != np.asarray(before[0][2], np.float32)).any()


def test_refresh_weights_packs_again():
    rope = Rope()
    layers = make_layers(rope=rope)
    helper = FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    hidden = np.random.default_rng(9).standard_normal((3, 24)).astype(BF16)
    before = raw(collect(helper, hidden, np.arange(3)))
    layers[1].self_attn.qkv_proj.weight[...] *= 2
    layers[2].self_attn.k_norm.weight[...] *= 2
    layers[2].self_attn.k_norm.variance_epsilon = 0.5
    np.testing.assert_array_equal(raw(collect(helper, hidden, np.arange(3))), before)  # a copy
    helper.refresh_weights()
    fresh = collect(FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu"), hidden, np.arange(3))
    got = collect(helper, hidden, np.arange(3))
    np.testing.assert_array_equal(raw(got), raw(fresh))
    assert not np.array_equal(raw(got), before)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda a: setattr(a.qkv_proj, "weight", a.qkv_proj.weight[:, :23]), "qkv_proj.weight: expected 24 columns, as at layer 0, got (64, 23) at layer 1."),
        (lambda a: setattr(a.qkv_proj, "weight", a.qkv_proj.weight[:60]), "qkv_proj.weight: expected shape [>= q_size + 2 * kv_size = 64, hidden], got (60, 24) at layer 1."),
        (lambda a: setattr(a.k_norm, "weight", np.ones(1, BF16)), "k_norm.weight: expected shape (8,), got (1,) at layer 1."),
        (lambda a: setattr(a.k_norm, "weight", np.ones(8, np.int32)), "k_norm.weight: expected dtype float32 or bfloat16 or float16, got int32 at layer 1."),
        (lambda a: setattr(a.k_norm, "variance_epsilon", -1.0), "k_norm.variance_epsilon: expected a finite number >= 0, got -1.0 at layer 1."),
        (lambda a: setattr(a.k_norm, "variance_epsilon", float("nan")), "k_norm.variance_epsilon: expected a finite number >= 0, got nan at layer 1."),
        (lambda a: setattr(a, "kv_size", 8), "kv_size: expected num_kv_heads * head_dim = 16, got 8 at layer 1."),
    ],
)  # fmt: skip
def test_a_refresh_checks_all_layers_before_anything_is_handed_over(change, text):
    rope = Rope()
    layers = make_layers(rope=rope)
    helper = FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    hidden = np.random.default_rng(9).standard_normal((3, 24)).astype(BF16)
    before = raw(collect(helper, hidden, np.arange(3)))
    change(layers[1].self_attn)
    with pytest.raises(ValueError) as e:
        helper.refresh_weights()
    assert str(e.value) == "FusedKVMaterializeHelper: " + text
    with pytest.raises(ValueError) as e:
        FusedKVMaterializeHelper(layers, rope, 2, 8, "cpu")
    assert str(e.value) == "FusedKVMaterializeHelper: " + text
    called = []
    try:  # a new tensor is seen by the call itself
        helper.materialize(hidden, np.arange(3), lambda *given: called.append(given))
    except ValueError as error:
        assert str(error) == "FusedKVMaterializeHelper: " + text and not called
    else:
        np.testing.assert_array_equal(raw(([k for _, k, _ in called], [v for _, _, v in called])), before)


def test_any_split_of_the_tokens_gives_the_same_bytes():
    rope = Rope()
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    hidden = np.random.default_rng(10).standard_normal((20, 24)).astype(BF16)
    positions = np.random.default_rng(11).integers(0, 64, 20)
    k, v = collect(helper, hidden, positions)
    for cut in (1, 7, 19):
        parts = [collect(helper, hidden[s], positions[s]) for s in (slice(0, cut), slice(cut, 20))]
        for l in range(3):
            np.testing.assert_array_equal(raw(k[l]), raw(np.concatenate([p[0][l] for p in parts])))
            np.testing.assert_array_equal(raw(v[l]), raw(np.concatenate([p[1][l] for p in parts])))


def test_a_failing_callback_stops_and_leaves_the_helper_usable():
    rope = Rope()
    helper = FusedKVMaterializeHelper(make_layers(rope=rope), rope, 2, 8, "cpu")
    hidden = np.ones((2, 24), BF16)

    def write(l, k, v):
        if l == 1:
            raise KeyError("no room")

    with pytest.raises(KeyError, match="no room"):
        helper.materialize(hidden, np.arange(2), write)
    assert len(collect(helper, hidden, np.arange(2))[0]) == 3
