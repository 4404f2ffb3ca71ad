"""Draft KV against the oracle."""

import draft_kv as oracle
import numpy as np

import specstate.draft_kv as draft_kv


def test_one_pass_into_the_pool():
    rng = np.random.default_rng(0)
    L, T, H, N, D, R = 3, 6, 24, 2, 8, 4
    w = rng.standard_normal((L, 2 * N * D, H)).astype(np.float32)
    x = rng.standard_normal((T, H)).astype(np.float32)
    kn = rng.standard_normal((L, D)).astype(np.float32)
    eps = np.array([1e-6, 1e-5, 1e-2], np.float32)
    table = oracle.RopeTable(R, 1e4, 32).rows.astype(np.float32)
    pos, loc = np.array([0, 5, 5, 31, 2, 9]), np.array([[3, 7, -1], [0, 15, 2]])
    k, v = np.full((2, L, 16, N, D), np.nan, np.float32)
    want_k, want_v = np.full((2, L, 16, N, D), np.nan)
    commit = np.array([3, 2])
    draft_kv.materialize_into_pool(x, w, kn, eps, table, pos, loc, k, v, commit_lens=commit)
    oracle.materialize_into_pool(x, w, kn, eps, table.astype(float), pos, loc, want_k, want_v, commit_lens=commit, io="fp32")
    np.testing.assert_allclose(k, want_k, atol=1e-5)
    np.testing.assert_allclose(v, want_v, atol=1e-5)
    packed_k, packed_v = np.full_like(k, np.nan), np.full_like(v, np.nan)
    draft_kv.materialize_into_pool(
        x, draft_kv.KvProjection(w), kn, eps, table, pos, loc, [*packed_k], [*packed_v], commit_lens=commit
    )
    np.testing.assert_array_equal(packed_k, k)
    np.testing.assert_array_equal(packed_v, v)
