#!/usr/bin/env python3
"""What the indexer's choice does and how it moves, on the long held-out prompts, with the NumPy reference.

    python3 training/selection_stats.py models/specstate-bytes 31-kjv 47-jargon

Prints per prompt: the overlap of consecutive selections, the union over windows of 8 rows, the misses per token of a
least-recently-used buffer of several sizes (all over the last 1000 rows), and bits per byte (from byte 300 on) with the
64 chosen positions, with the last 64, with 64 random ones, and with the 64 that the indexer ranks lowest.
"""
import os
import sys
from collections import OrderedDict

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "oracles"))
import reference_model as ref   # noqa: E402


class Ablated(ref.Target):
    mode = "chosen"

    def select(self, i, h, run):
        chosen, k = super().select(i, h, run), self.config["index_topk"]
        rng = np.random.default_rng(0)
        if self.mode == "last":
            return [np.arange(max(0, t + 1 - k), t + 1) for t in range(len(h))]
        if self.mode == "random":
            return [np.sort(rng.choice(t + 1, min(k, t + 1), replace=False)) for t in range(len(h))]
        if self.mode == "lowest":
            return [np.sort(np.argsort(s, kind="stable")[:k]) for s in run.index_scores[i]]
        return chosen


def misses(selections, size, first):
    buffer, count = OrderedDict(), 0
    for t, chosen in enumerate(selections):
        for p in chosen:
            if p == t:
                continue
            if p in buffer:
                buffer.move_to_end(p)
            else:
                count += t >= first
                buffer[p] = True
        while len(buffer) > size:
            buffer.popitem(last=False)
    return count / (len(selections) - first)


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    target = Ablated(folder)
    for name in names:
        with open(os.path.join(folder, "prompts", name + ".txt"), "rb") as f:
            tokens = [256] + list(f.read())
        bits = {}
        for target.mode in ("last", "random", "lowest", "chosen"):
            run = target.prefill(tokens)
            top = run.logits - np.max(run.logits, -1, keepdims=True)
            logp = top - np.log(np.sum(np.exp(top), -1, keepdims=True))
            bits[target.mode] = round(float(-np.mean([logp[t, tokens[t + 1]] for t in range(300, len(tokens) - 1)]) / np.log(2)), 4)
        chosen = [set(s.tolist()) for s in run.selected[target.anchors[0]]]
        first = max(100, len(tokens) - 1000)
        overlap = np.mean([len(chosen[t] & chosen[t - 1]) / len(chosen[t]) for t in range(first, len(tokens))])
        unions = [len(set().union(*chosen[t:t + 8])) for t in range(first, len(tokens) - 8, 8)]
        lru = {size: round(misses(run.selected[target.anchors[0]], size, first), 1) for size in (96, 128, 256, 512)}
        print(f"{name}: {len(tokens)} tokens, overlap {overlap:.2f}, union of 8 rows {np.mean(unions):.0f} (most {max(unions)}), misses per token {lru}, bits {bits}", flush=True)


if __name__ == "__main__":
    main()
