"""The recorded comparison of hit rates is complete, in favour of nobody, and about the policy that the library has."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from specstate import hisparse

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "tests" / "evidence" / "hisparse_policies.json").read_text())["results"]
spec = importlib.util.spec_from_file_location("hisparse_policies", ROOT / "tools" / "hisparse_policies.py")
policies = importlib.util.module_from_spec(spec)
spec.loader.exec_module(policies)


def test_the_record_has_both_kinds_of_traces_and_ours_is_never_below_lru():
    kinds = {r["trace"].split(",")[0] for r in RECORDED}
    assert "synthetic" in kinds and any("embedded" in k for k in kinds) and len(RECORDED) >= 12
    for r in RECORDED:
        assert r["lru"] <= r["calls"] <= r["belady"] and r["belady"] > 0, r


def test_a_recorded_rate_comes_out_again():
    row = next(r for r in RECORDED if r["trace"] == "synthetic, scan" and r["hot"] == 1024)
    assert policies.rates([policies.synthetic("scan")], 1024) == {name: row[name] for name in ("calls", "lru", "belady")}


@pytest.mark.parametrize("kind", ["drift", "drift fast", "scan", "uniform"])
def test_the_models_hits_are_the_librarys(kind):
    """Hits of every call of a trace, by the model that the comparison counts with and by `swap_in`."""
    steps, top_k, context, hot = 3, 24, 600, 96
    trace = policies.synthetic(kind, calls=40, steps=steps, top_k=top_k, context=context, seed=3)
    model = policies.Calls(hot)
    state = hisparse.new_swap_state(np.arange(hot, dtype=np.int32).reshape(1, hot), hot, context)
    host, device, locs = np.zeros((context, 8), np.uint8), np.zeros((hot, 8), np.uint8), np.arange(context).reshape(1, context)
    lens, request = np.full((1, steps), context, np.int32), np.zeros(1, np.int64)
    misses, hits = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for tokens in trace:
        wanted = policies.distinct(tokens)
        hisparse.swap_in(tokens.astype(np.int32).reshape(1, steps, top_k), lens, request, locs, host, device, state, unique_misses=misses, unique_hits=hits)
        assert (hits[0], misses[0]) == (expected := model.call(wanted.tolist(), None), len(wanted) - expected)
