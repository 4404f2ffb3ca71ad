#!/usr/bin/env python3
"""Runs `specstate generate --check-lossless` over the whole matrix and records it: 50 held-out prompts, both speculative modes, greedy and
fixed-seed sampling, natural acceptance and every forced accepted length. `tools/lossless_matrix.py [--record]`

A cell is one call: all prompts as a batch, decoded speculatively and plainly, tokens and committed state compared prompt by prompt.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

from source_digest import digest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "specstate-bytes"
EVIDENCE = ROOT / "tests" / "evidence" / "lossless_matrix.json"
PROMPTS = 50
WINDOW = 8


def run_cell(command, prompts, mode, temperature, force, tokens):
    call = [command, "generate", "--model", str(MODEL), "--mode", mode, "--temperature", str(temperature), "--seed", "7", "--max-new-tokens", str(tokens),
            "--check-lossless", "--json", "-"]
    if force:
        call += ["--force-accept", str(force)]
    head = " ".join(call)
    for prompt in prompts:
        call += ["--prompt-file", str(prompt)]
    result = subprocess.run(call, capture_output=True, text=True)
    if result.returncode not in (0, 3):
        raise SystemExit(f"{head} ...: {result.stderr.strip()}")
    report = json.loads(result.stdout)
    return {"mode": mode, "temperature": temperature, "force_accept": force, "prompts": len(report["requests"]),
            "lossless": sum(r["lossless"] for r in report["requests"]), "steps": report["steps"],
            "committed_tokens": report["committed_tokens"], "mean_accepted_length": round(report["mean_accepted_length"], 3),
            "accepted_lengths": report["accepted_lengths"], "hit_rate": round(report["hisparse"]["hit_rate"], 4),
            "misses": report["hisparse"]["misses"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build" / "release" / "specstate"))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--record", action="store_true", help=f"write {EVIDENCE.relative_to(ROOT)}")
    options = parser.parse_args()
    prompts = sorted((MODEL / "prompts").glob("*.txt"))
    if len(prompts) < PROMPTS:
        raise SystemExit(f"expected {PROMPTS} held-out prompts, found {len(prompts)}")
    prompts = sorted(sorted(prompts, key=lambda p: p.stat().st_size)[:PROMPTS])
    cells = []
    for mode in ("dflash", "dspark"):
        for temperature in (0, 0.8):
            for force in range(WINDOW + 1):
                cell = run_cell(options.command, prompts, mode, temperature, force, options.tokens)
                cells.append(cell)
                print(f"{mode:7} temperature {temperature:<4} forced {force or '-'}: {cell['lossless']}/{cell['prompts']} lossless, "
                      f"{cell['mean_accepted_length']} tokens a step", flush=True)
    failed = sum(c["prompts"] - c["lossless"] for c in cells)
    print(f"{sum(c['prompts'] for c in cells)} runs, {failed} not lossless")
    if options.record:
        EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
        evidence = {"source_digest": digest("engine"), "date": datetime.date.today().isoformat(), "tokens": options.tokens,
                    "prompts": [p.name for p in prompts], "runs": sum(c["prompts"] for c in cells), "not_lossless": failed, "cells": cells}
        EVIDENCE.write_text(json.dumps(evidence, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
