"""The recorded comparison of hit rates is complete, in favour of nobody, and about the policy that the library has."""

import importlib.util
import json
import os
import pathlib
import subprocess

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


def test_a_rate_of_the_embedded_model_comes_out_again(tmp_path):
    """The 11 held-out prompts of more than a thousand characters (another processor may round, and so choose, a little differently)."""
    prompts = [p for p in sorted((ROOT / "models" / "specstate-bytes" / "prompts").glob("*.txt")) if p.stat().st_size > 1000]
    command = [ROOT / "build" / "release" / "specstate", "generate", "--mode", "dflash", "--max-new-tokens", "400", *(x for p in prompts for x in ("--prompt-file", p))]
    log = tmp_path / "log"
    subprocess.run(command, env=dict(os.environ, SPECSTATE_LOG_LEVEL="debug", SPECSTATE_LOG_DEST=str(log)), check=True, capture_output=True)
    traces = policies.recorded(log.read_text())
    assert len(prompts) == 11 and len(traces) % 11 == 0 and all(64 <= len(call) <= 8 * 64 for trace in traces for call in trace)
    row = next(r for r in RECORDED if r["trace"] == "embedded model, dflash, 11 held-out prompts" and r["hot"] == 384)
    for name, rate in policies.rates(traces, 384).items():
        assert abs(rate - row[name]) < 0.02, name


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
