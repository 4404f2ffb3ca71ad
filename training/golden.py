#!/usr/bin/env python3
"""Golden vectors of the shipped checkpoint, computed by the float64 NumPy reference.

    python3 training/golden.py models/specstate-bytes            # writes golden/*.safetensors
    python3 training/golden.py models/specstate-bytes --check    # recomputes and compares, exit status 1 on a difference

Files (F32 values rounded from float64, I32 integers):
    target.safetensors   a prompt of about 160 bytes
        tokens [T]; logits [32, V] of the last 32 rows; hidden.{i} [8, d] after layer i, last 8 rows
        rows.{i} [T, C+Dr] cached MLA rows; index_keys.{i} [T, Di]; of the last 8 rows: index_scores.{i} [8, T] (-inf
        where causal), selected.{i} [8, k]; selection_margin.{i} [8] = score gap between the last chosen and the first left out
        state.{i} [H, Dv, Dk] after the last token for the first and the last KDA layer; conv.{i} [3, 3*H*D] for all KDA layers
        greedy [N] the greedy continuation; greedy_margin [N] = logit gap between the best and the second best token
    dflash.safetensors, dspark.safetensors   one block behind the same prompt, last token = greedy[0]
        k.{i}, v.{i} [48, kv_heads, D] context K and V of the last 48 positions; rows [block, d] after the final norm;
        base_logits and logits [proposals, V] (before and after the Markov correction); tokens; confidence (DSpark);
        accepted: accepted drafts of every greedy step over `greedy`
    long.safetensors     a prompt of about 2 KB: tokens; logits [4, V]; hidden [8, d] after every layer, last row; selected.{i} [4, k];
        selection_margin.{i} [4]
A consumer in fp32 should treat an argmax or a selection as undecided where the margin is under its own error.
"""
import argparse
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "oracles"))
import reference_model as ref   # noqa: E402

SHORT, LONG, NEW_TOKENS = "05-kjv.txt", "31-kjv.txt", 48


def prompt(folder, name):
    with open(os.path.join(folder, "prompts", name), "rb") as f:
        return [256] + list(f.read())


def margins(target, run, layer, rows):
    out = []
    for t in rows:
        order = np.sort(run.index_scores[layer][t])[::-1]
        k = target.config["index_topk"]
        out.append(order[k - 1] - order[k] if len(order) > k else np.inf)
    return np.array(out)


def greedy_margins(target, tokens, count):
    """Over prompt + continuation: gap between the best and the second best emittable token of every emitted one."""
    logits = ref.forbid(target.prefill(tokens).logits[-count - 1:-1], target.eos)
    ordered = np.sort(logits, -1)
    return ordered[:, -1] - ordered[:, -2]


def build(folder):
    target = ref.Target(folder)
    tokens = prompt(folder, SHORT)
    run, T = target.prefill(tokens), len(tokens)
    last = range(T - 8, T)
    greedy = ref.generate(target, tokens, NEW_TOKENS)
    files = {"target": {"tokens": np.array(tokens), "logits": run.logits[-32:],
                        "greedy": np.array(greedy), "greedy_margin": greedy_margins(target, tokens + greedy, len(greedy))}}
    out = files["target"]
    for i in range(target.depth):
        out[f"hidden.{i}"] = run.hidden[i][-8:]
    for i, rows in run.rows.items():
        out[f"rows.{i}"] = rows
        out[f"selected.{i}"] = np.array([run.selected[i][t] for t in last])
    for i in target.anchors:
        out[f"index_keys.{i}"] = run.index_keys[i]
        out[f"index_scores.{i}"] = np.array([np.pad(run.index_scores[i][t], (0, T - t - 1), constant_values=-np.inf) for t in last])
        out[f"selection_margin.{i}"] = margins(target, run, i, last)
    for i in (min(run.state), max(run.state)):
        out[f"state.{i}"] = run.state[i]
    for i, window in run.conv.items():
        out[f"conv.{i}"] = window
    for part in ("dflash", "dspark"):
        drafter = ref.Drafter(os.path.join(folder, part), target)
        context = drafter.context(drafter.features(run))
        block = drafter.propose(greedy[0], context)
        out = files[part] = {"last_token": np.array([greedy[0]]), "rows": block.rows, "base_logits": block.base_logits,
                             "logits": block.logits, "tokens": np.array(block.tokens)}
        if block.confidence is not None:
            out["confidence"] = block.confidence
        for i, (k, v) in enumerate(context):
            out[f"k.{i}"], out[f"v.{i}"] = k[-48:], v[-48:]
        out["accepted"] = np.array(ref.accepted_lengths(target, drafter, tokens, greedy))
    tokens = prompt(folder, LONG)
    run, T = target.prefill(tokens), len(tokens)
    out = files["long"] = {"tokens": np.array(tokens), "logits": run.logits[-4:], "hidden": np.stack([h[-1] for h in run.hidden])}
    for i in run.rows:
        out[f"selected.{i}"] = np.array([run.selected[i][t] for t in range(T - 4, T)])
    for i in target.anchors:
        out[f"selection_margin.{i}"] = margins(target, run, i, range(T - 4, T))
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    golden, worst = os.path.join(args.folder, "golden"), 0.0
    os.makedirs(golden, exist_ok=True)
    for name, tensors in build(args.folder).items():
        path = os.path.join(golden, name + ".safetensors")
        if not args.check:
            ref.write_safetensors(path, tensors, {"made_by": "training/golden.py, float64 NumPy reference"})
            print(f"{path}: {os.path.getsize(path)} bytes, {len(tensors)} tensors")
            continue
        stored = ref.read_safetensors(path)
        if set(stored) != set(tensors):
            raise SystemExit(f"{name}: tensor names differ: {sorted(set(stored) ^ set(tensors))}")
        for key, x in tensors.items():
            y = stored[key]
            if x.shape != y.shape:
                raise SystemExit(f"{name}.{key}: shape {x.shape} against {y.shape}")
            if x.dtype.kind != "f":
                if not np.array_equal(x, y):
                    raise SystemExit(f"{name}.{key}: integers differ")
                continue
            finite = np.isfinite(x)
            if not np.array_equal(finite, np.isfinite(y)):
                raise SystemExit(f"{name}.{key}: infinities differ")
            scale = np.max(np.abs(x[finite]), initial=1e-30)
            error = np.max(np.abs(x[finite] - y[finite]), initial=0.0) / scale
            worst = max(worst, error)
            if error > 1e-6:
                raise SystemExit(f"{name}.{key}: relative difference {error:.1e}")
    if args.check:
        print(f"golden vectors agree, largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
