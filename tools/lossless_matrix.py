#!/usr/bin/env python3
"""Runs `specstate generate --check-lossless` over the whole matrix and records it: 50 held-out prompts, both speculative modes, greedy and
fixed-seed sampling, natural acceptance and every forced accepted length. `tools/lossless_matrix.py [--device cuda] [--record]`

A cell is one call: all prompts, decoded speculatively and plainly, tokens and committed state compared prompt by prompt. On a GPU the state is
compared after every step, requests start at different steps, some are dropped, at most 16 run at once, and there are more cells: at most 1, 2, ... 15
requests at once, by turns in one of the modes and at one of the temperatures.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import subprocess
import sys

from source_digest import digest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "specstate-bytes"
PROMPTS, WINDOW, MOST = 50, 8, 16
MODES, TEMPERATURES = ("dflash", "dspark"), (0, 0.8)


def evidence_of(device):
    return ROOT / "tests" / "evidence" / ("lossless_matrix.json" if device == "cpu" else f"lossless_matrix_{device}.json")


def cells_of(device):
    """(mode, temperature, forced accepted length or 0, most requests at once)"""
    cells = [(m, t, f, MOST if device == "cuda" else PROMPTS) for m in MODES for t in TEMPERATURES for f in range(WINDOW + 1)]
    if device == "cuda":
        cells += [(MODES[n % 2], TEMPERATURES[n // 2 % 2], 0, n) for n in range(1, MOST)]
    return cells


def run_cell(command, device, prompts, cell, tokens):
    mode, temperature, force, batch = cell
    call = [command, "generate", "--model", str(MODEL), "--mode", mode, "--temperature", str(temperature), "--seed", "7", "--max-new-tokens", str(tokens),
            "--check-lossless", "--json", "-", "--device", device]
    if force:
        call += ["--force-accept", str(force)]
    starts = drops = []
    if device == "cuda":
        starts = [i if force == 1 else i // 2 for i in range(len(prompts))]
        drops = [start + 3 + i % 7 if i % 8 == 5 else -1 for i, start in enumerate(starts)]
        call += ["--max-batch", str(batch), "--chunk", "1024", "--start-steps", ",".join(map(str, starts)), "--drop-steps", ",".join(map(str, drops))]
    head = " ".join(call)
    for prompt in prompts:
        call += ["--prompt-file", str(prompt)]
    lib = os.pathsep.join(filter(None, [str(pathlib.Path(command).resolve().parent / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
    result = subprocess.run(call, capture_output=True, text=True, env=dict(os.environ, LD_LIBRARY_PATH=lib))
    if result.returncode not in (0, 3):
        raise SystemExit(f"{head} ...: {result.stderr.strip()}")
    report = json.loads(result.stdout)
    found = {"mode": mode, "temperature": temperature, "force_accept": force, "prompts": len(report["requests"]),
             "lossless": sum(r["lossless"] for r in report["requests"]), "steps": report["steps"],
             "committed_tokens": report["committed_tokens"], "mean_accepted_length": round(report["mean_accepted_length"], 3),
             "accepted_lengths": report["accepted_lengths"], "hit_rate": round(report["hisparse"]["hit_rate"], 4),
             "misses": report["hisparse"]["misses"]}
    if device == "cuda":
        found |= {"at_once": batch, "dropped": sum(r["finish"] == "dropped" for r in report["requests"])}
    return found


def key_of(cell):
    return cell["mode"], cell["temperature"], cell["force_accept"], cell.get("at_once")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build" / "release" / "specstate"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--record", nargs="?", const="", help=f"write {evidence_of('cpu').relative_to(ROOT)}, with --device cuda {evidence_of('cuda').name}; or the named file")
    parser.add_argument("--resume", action="store_true", help="cells that the recorded file has already, of the same sources, are not run again")
    options = parser.parse_args()
    prompts = sorted((MODEL / "prompts").glob("*.txt"))
    if len(prompts) < PROMPTS:
        raise SystemExit(f"expected {PROMPTS} held-out prompts, found {len(prompts)}")
    prompts = sorted(sorted(prompts, key=lambda p: p.stat().st_size)[:PROMPTS])
    path = None if options.record is None else pathlib.Path(options.record) if options.record else evidence_of(options.device)
    head = {"source_digest": built_digest(), "date": datetime.date.today().isoformat(), "tokens": options.tokens, "prompts": [p.name for p in prompts]}
    if options.device == "cuda":
        head = {"device": gpu_name(), **head}
    known = {}  # cells by their keys
    if options.resume and path and path.exists():
        before = json.loads(path.read_text())
        if all(before[k] == head[k] for k in head if k != "date"):
            known = {key_of(cell): cell for cell in before["cells"]}

    def key(cell):
        return (*cell[:3], cell[3] if options.device == "cuda" else None)

    def record():
        """(the cells that are known, in their order; runs that were not lossless), kept in the file."""
        cells = [known[key(cell)] for cell in wanted if key(cell) in known]
        failed = sum(c["prompts"] - c["lossless"] for c in cells)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**head, "runs": sum(c["prompts"] for c in cells), "not_lossless": failed, "cells": cells}, indent=1) + "\n")
        return cells, failed

    wanted = cells_of(options.device)
    slowest_first = sorted((cell for cell in wanted if key(cell) not in known), key=lambda cell: (cell[2] or 5) * cell[3])  # by tokens a step (some 5 if not forced)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run_cell, options.command, options.device, prompts, cell, options.tokens) for cell in slowest_first]):
            cell = future.result()
            known[key_of(cell)] = cell
            record()
            at_once = f", {cell['at_once']} at once, {cell['dropped']} dropped" if "at_once" in cell else ""
            print(f"{cell['mode']:7} temperature {cell['temperature']:<4} forced {cell['force_accept'] or '-'}{at_once}: {cell['lossless']}/{cell['prompts']} lossless, "
                  f"{cell['mean_accepted_length']} tokens a step", flush=True)
    cells, failed = record()
    print(f"{sum(c['prompts'] for c in cells)} runs, {failed} not lossless")
    return 1 if failed else 0


def built_digest():
    """Of the sources that are here; a bare machine has what was built from them instead (tools/gpu_test.py --pack)."""
    if (ROOT / "src" / "runtime").exists():
        return digest("engine")
    return json.loads((ROOT / "build" / "release" / "source_digests.json").read_text())["engine"]


def gpu_name():
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise SystemExit("no NVIDIA GPU on this machine (nvidia-smi names none)") from None


if __name__ == "__main__":
    sys.exit(main())
