"""Acceptance against the oracle: greedy chains, rejection sampling, verify lengths."""

import math

import accept as oracle
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specstate.accept as accept


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_greedy_against_oracle(dtype):
    rng = np.random.default_rng(1)
    for b, w in [(1, 1), (3, 2), (5, 8), (0, 4), (64, 5)]:
        candidates = rng.integers(0, 3, (b, w)).astype(dtype)
        target = rng.integers(0, 3, (b, w)).astype(dtype)
        lens, tokens = accept.verify_greedy(candidates, target)
        if b:
            want_lens, want_tokens = oracle.verify_greedy(candidates, target)
            np.testing.assert_array_equal(lens, want_lens)
            np.testing.assert_array_equal(tokens, want_tokens)
        assert tokens.dtype == dtype and lens.dtype == np.int32


def test_greedy_takes_strides_and_read_only_inputs():
    base = np.arange(40, dtype=np.int64).reshape(4, 10) % 3
    candidates, target = base[:, ::2], base[::-1, 1::2]
    candidates.flags.writeable = False
    lens, tokens = accept.verify_greedy(candidates, target)
    want_lens, want_tokens = oracle.verify_greedy(candidates.copy(), target.copy())
    np.testing.assert_array_equal(lens, want_lens)
    np.testing.assert_array_equal(tokens, want_tokens)


def test_greedy_errors_name_the_argument_and_write_nothing():
    c = np.zeros((2, 3), np.int32)
    lens, out = np.full(2, 77, np.int32), np.full((2, 3), 77, np.int32)
    for args, text in [
        ((c, c[:, :2]), "verify_greedy: target_argmax: expected shape [b=2, W=3], got (2, 2)."),
        ((c.astype(np.float32), c), "verify_greedy: candidates: expected dtype int32 or int64, got float32."),
        ((c, c.astype(np.int64)), "verify_greedy: target_argmax: expected dtype int32 as candidates, got int64."),
        ((c[:, :0], c[:, :0]), "verify_greedy: candidates: expected at least one column (the last emitted token), got shape (2, 0)."),
        ((c, c, {"verify_lens": np.array([1, 4])}), "verify_greedy: verify_lens: expected lengths in 1..3, got 4 at row 1."),
        ((c, c, {"verify_lens": np.array([0, 3])}), "verify_greedy: verify_lens: expected lengths in 1..3, got 0 at row 0."),
        ((out, c), "verify_greedy: out[1]: expected memory of its own, got memory that overlaps candidates."),
    ]:
        *args, kwargs = args if isinstance(args[-1], dict) else (*args, {})
        with pytest.raises(ValueError) as e:
            accept.verify_greedy(*args, out=(lens, out), **kwargs)
        assert str(e.value) == text
    lens.flags.writeable = False
    with pytest.raises(ValueError, match=r"out\[0\]: expected a writable array"):
        accept.verify_greedy(c, c, out=(lens, out))
    assert (lens == 77).all() and (out == 77).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_the_cap_rule_is_the_window_cut_to_its_length(data):
    """verify_lens gives what a window of that width would; the bonus is re-read from the row where the cut is."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    b, w, vocab = 4, data.draw(st.integers(1, 6)), 3
    candidates, target = rng.integers(0, 2, (2, b, w))
    verify_lens = rng.integers(1, w + 1, b).astype(data.draw(st.sampled_from([np.int32, np.int64])))
    q, p = rng.dirichlet(np.ones(vocab), (b, w - 1)), rng.dirichlet(np.ones(vocab), (b, w))
    u = rng.random((b, w))
    full, _ = oracle.verify_greedy(candidates, target)
    lens, tokens = accept.verify_greedy(candidates, target, verify_lens=verify_lens)
    np.testing.assert_array_equal(lens, np.minimum(full, verify_lens))
    lens2, tokens2 = accept.verify_rejection(candidates, q, p, u, verify_lens=verify_lens)
    for r, n in enumerate(verify_lens):
        cut = slice(r, r + 1), slice(0, n)
        want_lens, want = oracle.verify_greedy(candidates[cut], target[cut])
        assert lens[r] == want_lens[0] and tokens[r].tolist() == want[0].tolist() + [0] * (w - n)
        uniforms = np.append(u[r, : n - 1], u[r, -1])[None]
        want_lens, want = oracle.verify_rejection(candidates[cut], q[r : r + 1, : n - 1], p[cut], uniforms)
        assert lens2[r] == want_lens[0] and tokens2[r].tolist() == want[0].tolist() + [0] * (w - n)


def spoiled(rng, probs):
    """Zeros, and rows that are not normalised."""
    probs = np.where(rng.random(probs.shape) < 0.2, 0, probs) * rng.uniform(0.5, 2, probs.shape[:-1] + (1,))
    probs[..., 0] += 1e-3
    return probs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_rejection_against_the_oracle(data):
    """Equal to the last token: both compute in float64, sums in id order."""
    draw = lambda *values: data.draw(st.sampled_from(values))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    b, w, vocab = draw(1, 2, 7), draw(1, 2, 3, 8), draw(1, 2, 5, 33)
    kind = draw(np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
    p = spoiled(rng, rng.dirichlet(np.ones(vocab), (b, w))).astype(kind)
    q = spoiled(rng, rng.dirichlet(np.ones(vocab), (b, w - 1))).astype(kind) if draw(True, False) else None
    if q is not None and draw(True, False):  # some proposals certain to stand
        q = np.where(rng.random((b, w - 1, 1)) < 0.5, p[:, : w - 1], q).astype(kind)
    u = rng.random((b, w)).astype(draw(np.float32, np.float64))
    u[rng.random((b, w)) < 0.1] = 0
    candidates = rng.integers(-1, vocab + 1, (b, w)).astype(draw(np.int32, np.int64))
    f8 = lambda x: None if x is None else x.astype(np.float64)
    want_lens, want = oracle.verify_rejection(candidates, f8(q), f8(p), f8(u))
    if draw(True, False):
        from draft_kv_cases import strided

        candidates, p, u = (strided(rng, x) for x in (candidates, p, u))
        q = None if q is None else strided(rng, q)
    out = np.full(b, -7, np.int32), np.full((b, w), -7, candidates.dtype)
    lens, tokens = accept.verify_rejection(candidates, q, p, u, out=out)
    assert lens is out[0] and tokens is out[1]
    np.testing.assert_array_equal(lens, want_lens)
    np.testing.assert_array_equal(tokens, want)


def test_rejection_edges():
    one = lambda **k: [float(k.get(c, 0)) for c in "abcd"]
    a8 = lambda x: np.array(x, np.float64)
    verify = lambda c, q, p, u: accept.verify_rejection(np.array(c), None if q is None else a8(q), a8(p), a8(u))
    p, q = [[one(b=0.5, c=0.5), one(a=1)]], [[one(a=0.5, b=0.5)]]
    for u in (0.0, 0.25, 1 - 2.0**-24):  # p(a) = 0 never stands; the residual has mass at c only
        lens, out = verify([[3, 0]], q, p, [[u, u]])
        assert lens[0] == 1 and out[0].tolist() == [2, 0]
    assert verify([[3, 1]], q, p, [[0.5, 0.0]])[1][0].tolist() == [1, 0]
    assert verify([[3, 2]], q, p, [[0.99, 0.5]])[0][0] == 2  # q = 0 < p
    assert verify([[3, 0]], [[one(a=1)]], [[one(a=0.5, b=0.5), one(a=1)]], [[0.5, 0]])[0][0] == 1  # u q == p
    same = [[one(a=1)]]
    assert verify([[3, 0]], same, [[one(a=1), one(b=1)]], [[1.0, 0.5]])[1][0].tolist() == [0, 0]  # no residual: p
    # Point mass: p without the proposal is what is left.
    lens, out = verify([[3, 1]], None, [[one(a=0.5, b=0.5), one(a=1)]], [[0.75, 0.99]])
    assert lens[0] == 1 and out[0, 0] == 0
    # A draw at the very end of the mass stays inside it.
    assert verify([[0]], None, [[one(a=0.25, b=0.25, c=0.5)]], [[1 - 2.0**-53]])[1][0, 0] == 2
    assert verify([[0]], None, [[one(a=0.25, b=0.25, c=0.5)]], [[1.0]])[1][0, 0] == 2


def test_no_rows_and_no_proposals():
    lens, out = accept.verify_rejection(np.zeros((0, 3), int), None, np.zeros((0, 3, 5)), np.zeros((0, 3)))
    assert lens.shape == (0,) and out.shape == (0, 3)
    lens, out = accept.verify_rejection(np.array([[4]]), np.zeros((1, 0, 5)), np.eye(5)[[[2]]], np.full((1, 1), 0.3))
    assert lens.tolist() == [1] and out.tolist() == [[2]]


def rejection_call(**changes):
    case = {
        "candidates": np.array([[0, 1, 2], [0, 2, 1]], np.int32),
        "draft_probs": np.full((2, 2, 4), 0.25),
        "target_probs": np.full((2, 3, 4), 0.25),
        "uniforms": np.full((2, 3), 0.5),
        "out": (np.full(2, 77, np.int32), np.full((2, 3), 77, np.int32)),
    }
    case |= changes
    return case


OUT = rejection_call()["out"]


def put(a, at, value):
    a[at] = value
    return a


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"candidates": np.zeros(3, np.int32)}, "candidates: expected shape [b, W], got (3,)."),
        ({"candidates": np.zeros((2, 3))}, "candidates: expected dtype int32 or int64, got float64."),
        ({"candidates": np.zeros((2, 0), np.int32)}, "candidates: expected at least one column (the last emitted token), got shape (2, 0)."),
        ({"target_probs": np.ones((2, 2, 4))}, "target_probs: expected shape [b=2, W=3, V], got (2, 2, 4)."),
        ({"target_probs": np.ones((2, 3, 0))}, "target_probs: expected at least one id, got shape (2, 3, 0)."),
        ({"target_probs": np.ones((2, 3, 4), int)}, "target_probs: expected dtype float32 or float64 or bfloat16 or float16, got int64."),
        ({"draft_probs": np.ones((2, 3, 4))}, "draft_probs: expected shape [b=2, 2, V=4], got (2, 3, 4)."),
        ({"draft_probs": np.ones((2, 2, 5))}, "draft_probs: expected shape [b=2, 2, V=4], got (2, 2, 5)."),
        ({"uniforms": np.full((2, 2), 0.5)}, "uniforms: expected shape [b=2, W=3], got (2, 2)."),
        ({"uniforms": np.full((2, 3), -0.5)}, "uniforms: expected numbers in [0, 1], got -0.5 at [0, 0]."),
        ({"uniforms": np.full((2, 3), np.nan)}, "uniforms: expected numbers in [0, 1], got nan at [0, 0]."),
        ({"uniforms": np.full((2, 3), np.nextafter(np.float32(1), np.float32(2)))}, "uniforms: expected numbers in [0, 1], got 1.0000001 at [0, 0]."),
        ({"uniforms": np.full((2, 3), -1e-50)}, "uniforms: expected numbers in [0, 1], got -1e-50 at [0, 0]."),
        ({"uniforms": np.full((2, 3), 1.5, np.float32)}, "uniforms: expected numbers in [0, 1], got 1.5 at [0, 0]."),
        ({"verify_lens": np.array([3, 4])}, "verify_lens: expected lengths in 1..3, got 4 at row 1."),
        ({"verify_lens": np.array([3.0, 3.0])}, "verify_lens: expected dtype int32 or int64, got float64."),
        ({"out": (OUT[0].astype(np.int64), OUT[1])}, "out[0]: expected dtype int32, got int64."),
        ({"out": (OUT[0], OUT[1].astype(np.int64))}, "out[1]: expected dtype int32 as candidates, got int64."),
        ({"out": (OUT[0], np.broadcast_to(OUT[1][:1], (2, 3)).view())}, None),
        ({"target_probs": np.concatenate([np.full((2, 2, 4), 0.25), np.zeros((2, 1, 4))], 1), "uniforms": np.zeros((2, 3))}, "target_probs: expected rows with mass, got none in row [0, 2]."),
        # An infinite test, an infinite draw, a sum that overflows, an infinite draft (in the test and in the residual).
        ({"target_probs": np.full((2, 3, 4), np.inf)}, "target_probs: expected finite mass, got infinite mass in row [0, 0]."),
        ({"target_probs": put(np.full((2, 3, 4), 0.25), (0, 2, 3), np.inf), "uniforms": np.zeros((2, 3))}, "target_probs: expected finite mass, got infinite mass in row [0, 2]."),
        ({"target_probs": put(np.full((2, 3, 4), 0.25), (1, 2), 1e308), "uniforms": np.zeros((2, 3))}, "target_probs: expected finite mass, got infinite mass in row [1, 2]."),
        ({"draft_probs": put(np.full((2, 2, 4), 0.25), (0, 0, 1), np.inf)}, "draft_probs: expected finite mass, got infinite mass in row [0, 0]."),
        ({"draft_probs": put(np.full((2, 2, 4), 1.0), (0, 0, 3), np.inf)}, "draft_probs: expected finite mass, got infinite mass in row [0, 0]."),
    ],
)  # fmt: skip
def test_rejection_errors_name_the_argument_and_write_nothing(changes, text):
    case = rejection_call(**changes)
    before = [x.copy() for x in case["out"]]
    with pytest.raises(ValueError) as e:
        accept.verify_rejection(**case)
    assert text is None or str(e.value) == "verify_rejection: " + text
    for x, y in zip(case["out"], before):
        np.testing.assert_array_equal(x, y)


# ---- losslessness, by statistics
TRIALS = 200_000


def test_emitted_tokens_have_the_targets_distribution():
    """The first and the second emitted token against p, the acceptance rate against sum min(p, q)."""
    rng = np.random.default_rng(11)
    for vocab in (5, 8):
        p, q = oracle.trial_table(rng, vocab, 4)
        first, second, lens = oracle.emitted_p_values(accept.verify_rejection, rng, p, q, TRIALS)
        assert first > 1e-4 and second > 1e-4, (first, second)
        want = float(np.minimum(p[0], q[0]).sum())
        assert abs((lens > 1).mean() - want) < 5 * math.sqrt(0.25 / TRIALS)
        point = [3, 2, 4]
        by_mass = lambda c, q, p, u: accept.verify_rejection(c, None, p, u)
        first, second, lens = oracle.emitted_p_values(by_mass, rng, p, None, TRIALS, point=point)
        assert first > 1e-4 and second > 1e-4, (first, second)
        assert abs((lens > 1).mean() - p[0, 3]) < 5 * math.sqrt(0.25 / TRIALS)


def test_the_statistics_see_wrong_rules():
    """What looks plausible and is not lossless: the oracle's wrong rules, and our own rule with wrong inputs."""
    rng = np.random.default_rng(17)
    tables = [oracle.trial_table(rng, 6, 4) for _ in range(2)]
    for name, rule in oracle.wrong_rules().items():
        low = min(min(oracle.emitted_p_values(rule, rng, p, q, 4000)[:2]) for p, q in tables)
        assert low < 1e-6, (name, low)
    verify, n = accept.verify_rejection, 50_000
    looks_ahead = lambda c, q, p, u: np.where(
        u[:, 0] * np.take_along_axis(q[:, 0], c[:, 1:2], 1)[:, 0] < np.take_along_axis(p[:, 0], c[:, 1:2], 1)[:, 0], 4, 1
    )
    for name, rule in {
        "q of another temperature": lambda c, q, p, u: verify(c, q**2 / (q**2).sum(-1, keepdims=True), p, u),
        "point mass although proposals were sampled": lambda c, q, p, u: verify(c, np.ones_like(q), p, u),
        "a length that looks at the test's outcome": lambda c, q, p, u: verify(c, q, p, u, verify_lens=looks_ahead(c, q, p, u)),
        "a length that looks at the proposal": lambda c, q, p, u: verify(c, q, p, u, verify_lens=np.where(c[:, 1] == 2, 1, 4)),
    }.items():
        low = min(min(oracle.emitted_p_values(rule, rng, p, q, n)[:2]) for p, q in tables)
        assert low < 1e-6, (name, low)


def test_lengths_that_do_not_look_ahead_stay_lossless():
    rng = np.random.default_rng(19)
    p, q = oracle.trial_table(rng, 6, 4)
    for lens in (lambda n: rng.integers(1, 5, n), lambda n: np.full(n, 2)):
        rule = lambda c, q, p, u: accept.verify_rejection(c, q, p, u, verify_lens=lens(len(c)))
        first, second, _ = oracle.emitted_p_values(rule, rng, p, q, TRIALS)
        assert first > 1e-4 and second > 1e-4, (first, second)


# ---- adversarial drafters in a toy model
def toy(seed):
    """A deterministic target: logits of a token and its position."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(7, 0.5), (64,))
    return lambda token, position: table[(token % 7 * 9 + position) % 64]


DRAFTERS = {
    "right": lambda true, rng: true,
    "all wrong": lambda true, rng: [(t + 1) % 7 for t in true],
    "random": lambda true, rng: list(rng.integers(0, 7, len(true))),
    "right, then wrong": lambda true, rng: [*true[:2], *[(t + 1) % 7 for t in true[2:]]],
    "mask ids": lambda true, rng: [99] * len(true),
    "no proposal": lambda true, rng: [-1] * len(true),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("sampled", [False, True])
def test_any_drafter_emits_what_plain_decoding_emits(drafter, width, sampled):
    """Greedy, and fixed-seed sampling in the point-mass form: the token of a position is the inverse CDF of its own uniform."""
    target, rng = toy(3), np.random.default_rng(5)
    uniforms = rng.random(80)

    def choose(token, position):
        p = target(token, position)
        return oracle.draw(p, uniforms[position]) if sampled else int(p.argmax())

    plain = [0]
    for position in range(70):
        plain.append(choose(plain[-1], position))
    tokens = [0]
    while len(tokens) < 60:
        n = len(tokens) - 1
        window = [tokens[-1], *DRAFTERS[drafter](plain[n + 1 : n + width], rng)]
        rows = [choose(max(t, 0), n + j) for j, t in enumerate(window)]
        lens, out = accept.verify_greedy(np.array([window]), np.array([rows]))
        assert drafter != "right" or lens[0] == width
        tokens += out[0, : lens[0]].tolist()
    assert tokens[:60] == plain[:60]


# ---- verify lengths
def naive_plan(c, probes=None, speeds=None, lagged=None, caps=None):
    """The rule in its plainest form."""
    b, G = c.shape
    caps = [G + 1] * b if caps is None else [min(G + 1, n) for n in caps]
    if probes is None:
        return list(caps)

    def ranked(conf):
        entries = []
        for r in range(b):
            for k in range(caps[r] - 1):
                s = math.prod(1.0 if conf is None or x < 0 else float(x) for x in ([] if conf is None else conf[r, : k + 1]))
                if s >= 1e-6:
                    entries.append((-s, k, r))
        return sorted(entries)

    def speed(t):
        at = 0
        while at + 1 < len(probes) and probes[at + 1] <= t:
            at += 1
        return float(speeds[at])

    old = ranked(lagged)
    rates, tokens = [], float(b)
    for m in range(len(old) + 1):
        tokens += -old[m - 1][0] if m else 0
        rates.append(tokens * speed(b + m))
    lens = [1] * b
    for _, _, r in ranked(c)[: rates.index(max(rates))]:
        lens[r] += 1
    return lens


def plan_case(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    b, G = draw(1, 2, 5), draw(1, 3, 7)
    kind = draw(np.float32, np.float64)
    c, lagged = (rng.choice([0, 0.25, 0.5, 0.9, 1], (b, G)) if draw(True, False) else rng.random((b, G)) for _ in range(2))
    lagged = np.where(rng.random((b, 1)) < 0.2, -1, lagged)
    n = draw(1, 3, 6)
    probes = np.sort(rng.choice(b * (G + 1) + 6, n, replace=False))
    speeds = np.sort(rng.uniform(1, 100, n))[::-1]
    return rng, c.astype(kind), probes, speeds.astype(kind), (lagged.astype(kind) if draw(True, False) else None), (
        rng.integers(1, G + 3, b) if draw(True, False) else None
    )  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_plan_against_the_naive_rule(data):
    _, c, probes, speeds, lagged, caps = plan_case(data)
    got = accept.plan_verify_lengths(c, probes, speeds, lagged_confidences=lagged, max_lens=caps)
    assert got.dtype == np.int32 and got.tolist() == naive_plan(c, probes, speeds, lagged, caps)
    assert accept.plan_verify_lengths(c, max_lens=caps).tolist() == naive_plan(c, caps=caps)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_plan_never_looks_ahead(data):
    """Whether proposal k of a row is verified does not depend on that row's confidences after k."""
    rng, c, probes, speeds, lagged, caps = plan_case(data)
    plan = lambda c: accept.plan_verify_lengths(c, probes, speeds, lagged_confidences=lagged, max_lens=caps)
    before = plan(c)
    for r in range(c.shape[0]):
        for k in range(c.shape[1]):
            changed = c.copy()
            changed[r, k + 1 :] = rng.choice([0, 0.5, 1], c.shape[1] - k - 1)
            assert (plan(changed)[r] - 1 > k) == (before[r] - 1 > k)


def test_a_budget_of_this_steps_confidences_would_look_ahead():
    """The same property fails if the budget is made of them: the test above can fail."""
    probes, speeds = np.array([1, 2, 3]), np.array([10.0, 8.0, 7.9])
    plan = lambda c: accept.plan_verify_lengths(c, probes, speeds, lagged_confidences=c)[0]
    assert plan(np.array([[0.2, 1.0]])) == 3 and plan(np.array([[0.2, 0.0]])) == 1  # proposal 0, by the confidence of proposal 1


def test_plan_examples():
    plan = accept.plan_verify_lengths
    half = np.full((2, 3), 0.5)
    assert plan(half).tolist() == [4, 4]
    # One more token costs nothing until 4 tokens: the budget is 2 entries; ties to the lower proposal, then the lower row.
    assert plan(half, np.array([0, 5]), np.array([10.0, 0.1])).tolist() == [2, 2]
    assert plan(half, np.array([0, 4]), np.array([10.0, 0.1])).tolist() == [2, 1]
    # The global optimum lies behind a step of the staircase.
    sure = np.ones((1, 7))
    assert plan(sure, np.array([1, 2, 8]), np.array([10.0, 4.0, 3.9])).tolist() == [8]
    # 1 * 10 == 1.25 * 8: the smaller budget.
    quarter = np.full((1, 1), 0.25)
    assert plan(quarter, np.array([1, 2]), np.array([10.0, 8.0]), lagged_confidences=quarter).tolist() == [1]
    # A new request counts as certain; a known bad one does not.
    lagged = np.array([[-1.0] * 3, [0.0] * 3])
    assert plan(half, np.array([2, 3, 4, 5, 6]), np.array([10, 9, 8, 7, 1.0]), lagged_confidences=lagged).tolist() == [3, 2]
    assert plan(half, max_lens=np.array([1, 9])).tolist() == [1, 4]
    assert plan(np.zeros((2, 0)), np.array([1]), np.array([1.0])).tolist() == [1, 1]
    assert plan(np.zeros((0, 4))).tolist() == []
    out = np.full(2, -9, np.int32)
    assert plan(half, out=out) is out and out.tolist() == [4, 4]


@pytest.mark.parametrize(
    "args, kwargs, text",
    [
        ((np.zeros(3),), {}, "confidences: expected shape [b, G], got (3,)."),
        ((np.zeros((2, 3), int),), {}, "confidences: expected dtype float32 or float64, got int64."),
        ((np.full((2, 3), 1.5),), {}, "confidences: expected numbers in [0, 1], got 1.5 at [0, 0]."),
        ((np.full((2, 3), np.nan),), {}, "confidences: expected numbers in [0, 1], got nan at [0, 0]."),
        ((np.zeros((2, 3)), np.array([1])), {}, "steps_per_second: expected a tensor, got none."),
        ((np.zeros((2, 3)), None, np.array([1.0])), {}, "probe_tokens: expected a tensor, got none."),
        ((np.zeros((2, 3)), np.array([], int), np.array([])), {}, "probe_tokens: expected at least one probe, got shape (0,)."),
        ((np.zeros((2, 3)), np.array([2, 2]), np.array([1.0, 1])), {}, "probe_tokens: expected ascending counts, got 2 at 1."),
        ((np.zeros((2, 3)), np.array([1, 2]), np.array([1.0, 0])), {}, "steps_per_second: expected finite numbers > 0, got 0 at 1."),
        ((np.zeros((2, 3)), np.array([1, 2]), np.array([1.0])), {}, "steps_per_second: expected shape [n=2], got (1,)."),
        ((np.zeros((2, 3)),), {"lagged_confidences": np.full((2, 3), 2.0)}, "lagged_confidences: expected numbers up to 1 (below 0: unknown), got 2 at [0, 0]."),
        ((np.zeros((2, 3)),), {"lagged_confidences": np.zeros((2, 2))}, "lagged_confidences: expected shape [b=2, G=3], got (2, 2)."),
        ((np.zeros((2, 3)),), {"max_lens": np.array([0, 1])}, "max_lens: expected lengths >= 1, got 0 at row 0."),
    ],
)  # fmt: skip
def test_plan_errors(args, kwargs, text):
    out = np.full(2, 77, np.int32)
    with pytest.raises(ValueError) as e:
        accept.plan_verify_lengths(*args, **kwargs, out=out)
    assert str(e.value) == "plan_verify_lengths: " + text
    assert (out == 77).all()


def test_infinite_mass_that_decides_nothing_is_not_looked_at():
    case = rejection_call(uniforms=np.array([[1, 0, 0.5], [1, 0, 0.5]]), draft_probs=np.full((2, 2, 4), 0.5), verify_lens=np.array([1, 2]))
    case["target_probs"][0, 1:] = case["target_probs"][1, 2:] = np.inf
    accept_lens, _ = accept.verify_rejection(**case)
    assert accept_lens.tolist() == [1, 1]


def test_plan_names_its_result():
    with pytest.raises(ValueError, match=r"plan_verify_lengths: out: expected shape \[b=2\], got \(3,\)\."):
        accept.plan_verify_lengths(np.zeros((2, 3)), out=np.zeros(3, np.int32))
