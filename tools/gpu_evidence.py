#!/usr/bin/env python3
"""Writes what is recorded of runs on a GPU into docs/testing.md: tests and tools, the lossless matrix, the soak. `--check` only says whether it is there.

Recorded are tests/gpu/evidence.json (tools/gpu_test.py), tests/evidence/lossless_matrix_cuda.json (tools/lossless_matrix.py) and engine_soak.json
(tools/gpu_soak.py), each with the digest of its sources; at the end of `make test`, `said` tells which of them are of the sources at hand.
"""

import argparse
import json
import pathlib
import re
import sys

from gpu_soak import line as soak_line
from source_digest import digest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAMILIES = ("accept", "binding", "draft_kv", "engine", "hisparse", "kda", "sglang", "two_gpus")  # of tests/gpu/evidence.json
NAMES = {"sglang": "sglang's own tests of our functions", "two_gpus": "what needs two GPUs: ranks, every call on each"}
BEGIN, END = "<!-- recorded on a GPU -->", "<!-- end of recorded -->"


def read(root):
    """(evidence by family, matrix, soak), what is missing is empty."""

    def of(path):
        try:
            return json.loads((root / path).read_text())
        except (OSError, ValueError):
            return {}

    return of("tests/gpu/evidence.json"), of("tests/evidence/lossless_matrix_cuda.json"), of("tests/evidence/engine_soak.json")


def tools_of(e):
    """'4 tools clean' or what they said instead."""
    bad = sorted(f"{tool}: {found}" for tool, found in e["sanitizers"].items() if found != "clean")
    return "; ".join(bad) if bad else f"{len(e['sanitizers'])} {'tool' if len(e['sanitizers']) == 1 else 'tools'} clean" if e["sanitizers"] else "no tool"


def said(root=ROOT):
    """What is known of a GPU where there is none, a line each; the last says what of it is of these sources. Old evidence is no failure."""
    evidence, matrix, soak = read(root)
    if not evidence:
        return ["gpu: not run here (no GPU), and nothing is recorded; run `make gpu-test` on a machine that has one"]
    entries = [(family, "binding" if family == "sglang" else family, e, f"{e['passed']} passed, {e['failed']} failed, {e['skipped']} skipped; {tools_of(e)}")
               for family, e in sorted(evidence.items())]  # fmt: skip
    if matrix:
        entries.append(("lossless matrix", "engine", matrix, f"{matrix['runs']} runs, {matrix['not_lossless']} not lossless"))
    if soak:
        entries.append(("soak", "engine", soak, f"{soak['seconds']:.0f} s"))
    lines, of = ["gpu: not run here (no GPU); recorded:"], {"these": [], "OLDER": []}
    for name, family, e, what in entries:
        state = "these" if e["source_digest"] == digest(family, root) else "OLDER"
        of[state].append(name)
        lines.append(f"gpu:   {name:15} of {state} sources, {e['date']}, {e['device']}: {what}")
    missing = [*sorted(set(FAMILIES) - set(evidence)), *([] if matrix else ["lossless matrix"]), *([] if soak else ["soak"])]
    return [*lines, "gpu: evidence of these sources: " + (", ".join(of["these"]) or "none") + (f"; of OLDER sources: {', '.join(of['OLDER'])}" if of["OLDER"] else "; nothing older")
            + (f"; MISSING: {', '.join(missing)}" if missing else "; nothing missing")]  # fmt: skip


def render(root=ROOT):
    evidence, matrix, soak = read(root)
    total = [sum(e[k] for e in evidence.values()) for k in ("passed", "failed", "skipped")]
    lines = ["The recorded run: %d passed, %d failed, %d skipped or not applicable. A run of a tool counts as a test; `make test` says which rows are of the sources at hand." % tuple(total), "",
             "| | device, date | sources | passed | failed | skipped | compute-sanitizer |", "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for family, e in sorted(evidence.items()):
        lines.append(f"| {NAMES.get(family, f'`{family}`')} | {str(e['devices']) + ' x ' if e.get('devices', 1) > 1 else ''}{e['device']}, {e['date']} | {e['source_digest']} | {e['passed']} | {e['failed']} | {e['skipped']} | {tools_of(e) if family not in NAMES else ''} |")
    bad = [x for _, e in sorted(evidence.items()) for x in e.get("not_passed", [])]
    skips = {}
    for e in evidence.values():
        for code, n in e.get("skips", {}).items():
            skips[code] = skips.get(code, 0) + n
    lines.append("")
    if any(e["failed"] for e in evidence.values()):
        lines += ["What counts as failed:", *(f"- {x}" for x in bad or ["(the record does not name it)"]), ""]
    if skips:
        lines += ["Skipped: " + ", ".join(f"{n} {code}" for code, n in sorted(skips.items())) + ".", ""]
    if matrix:
        lines += [f"Lossless matrix on an {matrix['device']}, {matrix['date']}, sources {matrix['source_digest']}: {matrix['runs']} runs of {len(matrix['prompts'])} prompts, "
                  f"{matrix['not_lossless']} not lossless.", ""]  # fmt: skip
    if soak:
        lines += ["The engine decodes without a pause, requests coming and going, and its memory is watched (`tools/gpu_soak.py`). " + soak_line(soak)
                  + (" An hour of it was not run." if soak["seconds"] < 3600 else ""), ""]  # fmt: skip
    return "\n".join(lines).rstrip()


def placed(text, block):
    if BEGIN not in text or END not in text:
        raise SystemExit(f"gpu_evidence: docs/testing.md has no {BEGIN} .. {END}")
    return re.sub(f"{BEGIN}\n.*?{END}", lambda _: f"{BEGIN}\n{block}\n{END}", text, flags=re.S)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    check = parser.parse_args().check
    path = ROOT / "docs" / "testing.md"
    before = path.read_text()
    after = placed(before, render())
    if check:
        return "docs/testing.md does not say what is recorded: run tools/gpu_evidence.py" if before != after else 0
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
