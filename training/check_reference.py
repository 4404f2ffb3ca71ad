#!/usr/bin/env python3
"""Compares the PyTorch model with the independent NumPy reference on the stored weights.

    python3 training/check_reference.py models/specstate-bytes [--device cuda] [--length 200]

Prints the relative error of every layer's hidden state, of the logits and of both drafters' rows. The plain path
runs in fp32; on a GPU the fused path (bf16, flash-linear-attention) is compared as well, at bf16 accuracy.
"""
import argparse
import os
import sys

import numpy as np
import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "oracles"))
import reference_model as ref   # noqa: E402
from export import load         # noqa: E402


def error(a, b):
    a = a.detach().double().cpu().numpy()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--text", help="file whose first bytes are used; default: pseudo-random letters")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.text:
        data = list(open(args.text, "rb").read()[:args.length])
    else:
        data = [int(x) for x in np.random.default_rng(1).integers(32, 127, args.length)]
    tokens = [256] + data
    oracle = ref.Target(args.folder)
    run = oracle.prefill(tokens)
    target = load(args.folder, "target", args.device)
    x = torch.tensor([tokens], device=args.device)
    worst = 0.0
    modes = [("fp32 loop", False, torch.float32)] + ([("bf16 fused", True, torch.bfloat16)] if args.device == "cuda" else [])
    for label, fused, dtype in modes:
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits, hidden, _ = target(x, sparse=True, fused=fused, features=range(8), dtype=dtype)
        errors = [error(hidden[i][0], run.hidden[i]) for i in range(8)] + [error(logits[0], run.logits)]
        print(label, "hidden", " ".join(f"{e:.1e}" for e in errors[:-1]), f"logits {errors[-1]:.1e}")
        if dtype is torch.float32:
            worst = max(worst, *errors)
    for part in ("dflash", "dspark"):
        draft, drafter = ref.Drafter(os.path.join(args.folder, part), oracle), load(args.folder, part, args.device)
        n = len(tokens) - 1
        feats = draft.features(run)
        expect = draft.propose(tokens[n], draft.context(feats[:n]))
        f = torch.tensor(feats[None], dtype=torch.float32, device=args.device)
        position = torch.arange(n + 1, device=args.device)[None]
        context = drafter.context(f, position)
        # the sequence is one token longer than the context: the mask has to hide position n and beyond
        rows = drafter.rows(x[:, n:], position[:, n:], context, position, target.model.embed_tokens.weight, torch.float32)[0, 0]
        e = error(rows, expect.rows)
        worst = max(worst, e)
        print(part, f"rows {e:.1e}")
        if drafter.is_dspark:
            previous = torch.tensor([tokens[n]] + expect.tokens[:-1], device=args.device)
            bias = rows @ target.lm_head.weight.T + drafter.markov_bias(previous)
            tau = torch.tensor(drafter.config["confidence_temperatures"], device=args.device)
            c = torch.sigmoid(drafter.confidence_logit(rows, previous) / tau)
            print(part, f"logits {error(bias, expect.logits):.1e} confidence {error(c, expect.confidence):.1e}")
    if worst > 1e-3:
        raise SystemExit(f"disagreement: {worst:.1e}")


if __name__ == "__main__":
    main()
