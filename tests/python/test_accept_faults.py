"""Faults that people met in the acceptance step of serving systems, by kind; each name ends in the id of the case list."""

import accept as oracle
import numpy as np
import pytest

import specstate.accept as accept


@pytest.mark.parametrize("window", [[7, 5, -1, 9], [7, -1, 5, 9], [7, 5, 9, -1], [7, -1, -1, -1]])
@pytest.mark.parametrize("rule", ["greedy", "q", "point mass"])
def test_placeholder_proposals_never_stand_pad_16(window, rule):
    """-1 is no index into a row and no token; what takes its place is a real id, and nothing after it stands."""
    rng, vocab = np.random.default_rng(1), 10
    first = window[1:].index(-1)
    probs = np.full((1, 4, vocab), 1e-3)
    for j, d in enumerate(window[1:]):
        probs[0, j, max(d, 3)] = 1  # all others stand
    if rule == "greedy":
        argmax = np.array([[d if d >= 0 else 3 for d in window[1:]] + [6]])
        lens, out = accept.verify_greedy(np.array([window]), argmax)
        lens2, out2 = accept.verify_greedy(np.array([window]), np.array([window[1:] + [6]]))  # even where the target says -1 too
        assert lens2[0] == first + 1
    else:
        q = None if rule == "point mass" else rng.dirichlet(np.ones(vocab), (1, 3))
        lens, out = accept.verify_rejection(np.array([window]), q, probs, np.array([[0.0, 0, 0, 0.4]]))
    assert lens[0] == first + 1
    assert out[0, : first].tolist() == window[1 : first + 1]
    assert 0 <= out[0, first] < vocab and (out[0, first + 1 :] == 0).all()


@pytest.mark.parametrize("vocab", [8193, 10_000, 151_936])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_drawn_id_is_in_the_vocabulary_and_has_mass_pad_17(vocab, dtype):
    """All target mass in the first tile of any tiling, rejection forced, any uniform."""
    rng = np.random.default_rng(2)
    p = np.zeros((3, 1, vocab), dtype)
    p[:, :, :700] = rng.dirichlet(np.ones(700), (3, 1))
    p = np.concatenate([p, p], 1)
    q = np.zeros((3, 1, vocab), dtype)
    q[:, :, vocab - 1] = 1
    for u in (0.0, 0.5, float(np.nextafter(dtype(1), dtype(0)))):
        lens, out = accept.verify_rejection(np.array([[0, vocab - 1]] * 3), q, p, np.full((3, 2), u, dtype))
        assert (lens == 1).all() and (out[:, 0] < 700).all()
        assert (np.take_along_axis(p[:, 0], out[:, :1], 1) > 0).all()


def test_ids_beyond_the_vocabulary_never_stand_pad_17():
    p = np.full((1, 2, 5), 0.2)
    for d in (5, 8192, 2**31 - 1):
        lens, out = accept.verify_rejection(np.array([[0, d]]), None, p, np.array([[0.0, 0.9]]))
        assert lens[0] == 1 and 0 <= out[0, 0] < 5


@pytest.mark.parametrize("row", [0, 1])
def test_rows_of_nan_num_14(row):
    """One NaN has no mass; a row of nothing but NaN that is needed is an error, never an id outside."""
    p = np.full((1, 2, 4), 0.25)
    p[0, row, 1] = np.nan
    for u in np.linspace(0, 0.999, 7):
        lens, out = accept.verify_rejection(np.array([[0, 1]]), None, p, np.array([[0.1, u]]))
        assert lens[0] >= 1 and 0 <= out[0, lens[0] - 1] < 4
        assert row != lens[0] - 1 or out[0, lens[0] - 1] != 1
    p[0, row] = np.nan
    candidates = np.array([[0, 1]])
    if row == 0:  # the proposal falls, and nothing can be drawn
        with pytest.raises(ValueError, match=r"target_probs: expected rows with mass, got none in row \[0, 0\]"):
            accept.verify_rejection(candidates, None, p, np.full((1, 2), 0.1))
    else:
        with pytest.raises(ValueError, match=r"got none in row \[0, 1\]"):
            accept.verify_rejection(candidates, None, p, np.full((1, 2), 0.1))
        lens, _ = accept.verify_rejection(candidates, None, p, np.full((1, 2), 0.9))  # falls before that row is needed
        assert lens[0] == 1


def test_nan_proposal_probabilities_count_as_none_num_14():
    p, q = np.array([[[0.5, 0.5, 0], [1, 0, 0]]]), np.array([[[np.nan, np.nan, np.nan]]])
    lens, out = accept.verify_rejection(np.array([[2, 1]]), q, p, np.array([[0.9, 0.2]]))
    assert lens[0] == 2 and out[0].tolist() == [1, 0]
    lens, out = accept.verify_rejection(np.array([[2, 2]]), q, p, np.array([[0.9, 0.7]]))
    assert lens[0] == 1 and out[0, 0] == 1


def test_one_request_without_a_draft_does_not_touch_the_others_val_11():
    """A row whose context is too long for the drafter proposes nothing (-1, or length 1); token 0 is a token like any other."""
    target = np.array([[1, 2, 3], [0, 0, 0]])
    for window, kwargs in (([9, -1, -1], {}), ([9, 0, 0], {"verify_lens": np.array([3, 1])})):
        lens, out = accept.verify_greedy(np.array([[9, 1, 2], window]), target, **kwargs)
        assert lens.tolist() == [3, 1] and out.tolist() == [[1, 2, 3], [0, 0, 0]]
    lens, _ = accept.verify_greedy(np.array([[9, 1, 2], [9, 0, 0]]), target)
    assert lens.tolist() == [3, 3]


def test_stale_output_rows_are_overwritten_gra_08():
    """Every lane of every row is written on every call, whatever an earlier and larger call left there."""
    lens, out = np.full(4, 123456, np.int32), np.full((4, 6), 123456)
    accept.verify_greedy(np.full((4, 6), 1), np.full((4, 6), 2), out=(lens, out))
    assert lens.tolist() == [1] * 4 and out.tolist() == [[2, 0, 0, 0, 0, 0]] * 4
    p = np.zeros((4, 6, 3))
    p[..., 2] = 1
    out[...], lens[...] = 123456, 123456
    accept.verify_rejection(np.full((4, 6), 1), None, p, np.zeros((4, 6)), out=(lens, out))
    assert lens.tolist() == [1] * 4 and out.tolist() == [[2, 0, 0, 0, 0, 0]] * 4


def test_results_do_not_depend_on_the_batch_con_09():
    """Equal inputs give equal decisions wherever the row stands: ranks that hold the same bits agree."""
    rng = np.random.default_rng(4)
    p, q = rng.dirichlet(np.ones(50), (40, 5)), rng.dirichlet(np.ones(50), (40, 4))
    q[::2] = p[::2, :4]
    candidates, u = rng.integers(0, 50, (40, 5)), rng.random((40, 5))
    lens, out = accept.verify_rejection(candidates, q, p, u)
    order = rng.permutation(40)
    lens2, out2 = accept.verify_rejection(candidates[order], q[order], p[order], u[order])
    np.testing.assert_array_equal(lens2, lens[order])
    np.testing.assert_array_equal(out2, out[order])
    for r in range(0, 40, 7):
        one = slice(r, r + 1)
        lens1, out1 = accept.verify_rejection(candidates[one], q[one], p[one], u[one])
        assert lens1[0] == lens[r] and out1[0].tolist() == out[r].tolist()


def test_zero_residual_falls_back_to_the_target():
    """p == q and a uniform of exactly 1: elsewhere this gave the last id of the vocabulary."""
    p = np.array([[[0.0, 1, 0, 0], [0.25] * 4]])
    lens, out = accept.verify_rejection(np.array([[0, 1]]), p[:, :1], p, np.ones((1, 2)))
    assert lens[0] == 1 and out[0, 0] == 1
    assert oracle.verify_rejection([[0, 1]], p[:, :1], p, [[1.0, 1.0]])[1][0, 0] == 1
