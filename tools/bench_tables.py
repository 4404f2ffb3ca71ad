#!/usr/bin/env python3
"""Writes the tables of docs/performance.md and docs/compatibility.md from bench/results/*.json; `--check` only says whether the pages are up to date,
and which rows were measured from older sources than those at hand.

A table stands between two markers and names the results file and a family (or one operation of it), the file's ceilings, or `sglang`, where sglang is faster:
    <!-- bench cpu matmul/product -->
    <!-- /bench -->
Keys that are the same in all cases stand in the line above the table. A dagger stands behind the time of a row whose sources have changed
since (its `source_digest` is not today's), and behind the date where that is so of all rows. Daggers are as of the day that the page was written; `--check` looks afresh.
"""

import argparse
import json
import pathlib
import re
import sys

import source_digest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- bench (\w+) ([\w/]+) -->\n)(.*?)(<!-- /bench -->)", re.S)


def number(us):
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}".replace(",", " ")


def table(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


OLDER = " †"
BEFORE = " ‡"


def older(recorded):
    """The cases that were measured from other sources than those at hand."""
    families = {r["case"].split("/")[0] for r in recorded["results"]}
    now = {f: source_digest.digest({"overhead": "binding"}.get(f, f)) for f in families}
    return {r["case"] for r in recorded["results"] if r.get("source_digest") != now[r["case"].split("/")[0]]}


def age_line(path):
    recorded = json.loads(path.read_text())
    return f"bench: {path.stem}: {len(older(recorded))} of {len(recorded['results'])} recorded rows are of older sources than these"


def sort_key(keys):
    return [(0, int(v), "") if v.isdigit() else (1, 0, v) for v in keys]


def results_table(recorded, prefix, aged=frozenset()):
    results = [r for r in recorded["results"] if r["case"].startswith(prefix + "/")]
    if not results:
        return "Not measured yet.\n"
    keys_of = [{"operation": r["case"].split("/")[1], **dict(pair.split("=", 1) for pair in r["case"].rsplit("/", 1)[1].split(","))} for r in results]
    names = sorted({k for keys in keys_of for k in keys}, key=lambda name: (name != "operation", name))
    varied = [n for n in names if len({keys.get(n) for keys in keys_of}) > 1]
    same = [f"{n} {keys_of[0][n]}" for n in names if n not in varied and n != "operation"]
    peers = sorted({p for r in results for p in r["peers"]})
    all_aged = all(r["case"] in aged for r in results)
    rows = []
    for keys, r in sorted(zip(keys_of, results), key=lambda pair: sort_key([pair[0].get(n, "") for n in varied])):
        ours, floor = r["ours_us"], r["floor_us"]
        row = [keys.get(n, "") for n in varied] + [number(ours) + (OLDER if r["case"] in aged and not all_aged else ""), number(floor) if floor else "", f"{floor / ours:.2f}" if floor else ""]
        row += [f"{number(r['peers'][p])} ({r['peers'][p] / ours:.2f}x){BEFORE if p in r.get('peers_before', []) else ''}" if p in r["peers"] else "" for p in peers]
        rows.append(row)
    caption = f"{recorded['device']}, {', '.join(sorted({r['date'] for r in results}))}{OLDER if all_aged else ''}; microseconds" + "".join(f"; {s}" for s in same) + ".\n\n"
    return caption + table([*varied, "ours", "floor", "floor / ours", *(f"{p} (x ours)" for p in peers)], rows)


def ceilings_table(recorded):
    columns = {"fma_gflops": "FMA, GFLOP/s", "read_l3_gbs": "read from L3, GB/s", "read_memory_gbs": "read from memory, GB/s", "memcpy_gbs": "memcpy, GB/s"}
    ceilings = recorded["ceilings"]
    if not all(isinstance(c, dict) for c in ceilings.values()):  # of a GPU: numbers with their unit in the name
        rows = [[name.rpartition("_")[0].replace("_", " "), f"{ceilings[name]:.1f}", {"gbs": "GB/s", "us": "µs"}[name.rpartition("_")[2]]] for name in sorted(ceilings)]
        return f"{recorded['device']}, {recorded['date']}.\n\n" + table(["what", "measured", ""], rows)
    rows = [[name.removeprefix("threads="), *(f"{ceilings[name][c]:.1f}" for c in columns)] for name in sorted(ceilings)]
    return f"{recorded['device']}, {recorded['date']}.\n\n" + table(["threads", *columns.values()], rows)


def sglang_table(recorded):
    """A row a kind of call: the cells where sglang's fastest form beats ours, and the worst and the best cell for us."""
    kinds = {}
    for r in recorded["results"]:
        theirs = [us for name, us in r["peers"].items() if name.startswith("sglang")]
        if theirs and not r["case"].startswith("overhead/"):
            kind, _, shape = r["case"].rpartition("/")
            kinds.setdefault(kind, []).append((min(theirs) / r.get("ours_beside_peers_us", r["ours_us"]), shape.split(","), r["date"], any(n in r.get("peers_before", []) for n in r["peers"] if n.startswith("sglang"))))
    rows = []
    for kind, cells in sorted(kinds.items()):
        same = set.intersection(*(set(shape) for _, shape, _, _ in cells)) if len(cells) > 1 else set()
        cells = sorted((ratio, ", ".join(pair.replace("=", " ") for pair in shape if pair not in same), before) for ratio, shape, _, before in cells)
        said = [f"{ratio:.2f} ({shape})" + (BEFORE if before else "") for ratio, shape, before in cells]
        slower = sum(ratio < 1 for ratio, _, _ in cells)
        rows.append([f"`{kind}`", str(len(cells)), f"{slower}: {'; '.join(said[:slower])}" if slower else "none", said[0], said[-1]])
    dates = ", ".join(sorted({date for cells in kinds.values() for _, _, date, _ in cells}))
    return f"{recorded['device']}, {dates}; sglang's time divided by ours.\n\n" + table(["kind of call", "cells", "sglang faster in", "worst", "best"], rows)


SPECIAL = {"ceilings": ceilings_table, "sglang": sglang_table}


def render(page, root=None):
    root, aged = root or ROOT, {}

    def fill(match):
        path = root / "bench" / "results" / f"{match[2]}.json"
        if not path.is_file():
            return f"{match[1]}Not measured yet.\n{match[5]}"
        recorded = json.loads(path.read_text())
        if match[2] not in aged:
            aged[match[2]] = older(recorded)
        content = SPECIAL[match[3]](recorded) if match[3] in SPECIAL else results_table(recorded, match[3], aged[match[2]])
        return f"{match[1]}{content}{match[5]}"

    return BLOCK.sub(fill, page)


def undated(page):
    """Without daggers: sources change every day, and a page is not false for having been written yesterday."""
    return page.replace(OLDER, "")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page differs from the recorded results")
    options = parser.parse_args(arguments)
    pages = {page: page.read_text() for page in (ROOT / "docs" / "performance.md", ROOT / "docs" / "compatibility.md")}
    rendered = {page: render(text) for page, text in pages.items()}
    if options.check:
        for path in sorted((ROOT / "bench" / "results").glob("*.json")):
            recorded = json.loads(path.read_text())
            print("\n".join([age_line(path), *(f"  {case}" for case in sorted(older(recorded)))]))
        stale = [page for page, text in pages.items() if undated(rendered[page]) != undated(text)]
        for page in stale:
            print(f"{page.relative_to(ROOT)} differs from bench/results; run tools/bench_tables.py", file=sys.stderr)
        return 1 if stale else 0
    for page, text in rendered.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
