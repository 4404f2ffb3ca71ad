"""Acceptance against the oracle."""

import accept as oracle
import numpy as np
import pytest

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
        ((c, c.astype(np.int64)), "verify_greedy: target_argmax: expected dtype int32, got int64."),
    ]:
        with pytest.raises(ValueError) as e:
            accept.verify_greedy(*args, out=(lens, out))
        assert str(e.value) == text
    lens.flags.writeable = False
    with pytest.raises(ValueError, match="accept_lens: expected a writable array"):
        accept.verify_greedy(c, c, out=(lens, out))
    assert (lens == 77).all() and (out == 77).all()
