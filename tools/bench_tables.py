#!/usr/bin/env python3
"""Writes the tables of docs/performance.md, docs/compatibility.md and docs/decisions from bench/results/*.json; `--check` only says whether the pages are up to date,
and which rows were measured from older sources than those at hand.

A table stands between two markers and names the results file and a family (or one operation of it), the file's ceilings, `sglang` (where sglang is faster),
`glance` (the calls that a deployment is sized by, below), `shares` (of what a whole step is made, and the memory of its state), `targets` (met and missed), or the
engine's `rates` and those of its `ranks` (from docs/decisions/0013-measured.json):
    <!-- bench cpu matmul/product -->
    <!-- /bench -->
With two keys it has the values of one down and those of the other across, of the cases that have the values behind them:
    <!-- bench h200 draft_kv/materialize hidden tokens committed=1 -->
where a key without a value stands for cases that have no such key. Keys that are the same in all cases stand in the line above the table, those that few cases have in the column "with". A dagger stands behind the time of a row whose sources have changed
since (its `source_digest` is not today's), and behind the date where that is so of all rows. Daggers are as of the day that the page was written; `--check` looks afresh.
"""

import argparse
import collections
import json
import pathlib
import re
import sys

import source_digest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- bench (\w+) ([\w/]+)((?: [\w=.]+)*) -->\n)(.*?)(<!-- /bench -->)", re.S)


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
    rows, old = recorded["results"], older(recorded)
    if not old:
        return f"bench: {path.stem}: all {len(rows)} recorded rows are of these sources"
    families = collections.Counter(r["case"].split("/")[0] for r in rows)
    by_family = collections.Counter(case.split("/")[0] for case in old)
    return (f"bench: {path.stem}: {len(old)} of {len(rows)} recorded rows are of OLDER sources than these: "
            + ", ".join(f"{f} {n} of {families[f]}" for f, n in sorted(by_family.items())))


def keys_of(r):
    """operation and the rest of a case's name."""
    return {"operation": r["case"].split("/")[1], **dict(pair.split("=", 1) for pair in r["case"].rsplit("/", 1)[1].split(","))}


def sort_key(keys):
    return [(0, int(v), "") if v.isdigit() else (1, 0, v) for v in keys]


def thinned(cases, varied):
    """Of a sweep (one key alone takes more than 24 values) the first, the last, and those nearest to and farthest from their floor; and what to say of that."""
    said = []
    for name in varied:
        sweeps = {}
        for keys, r in cases:
            sweeps.setdefault(tuple(keys.get(n, "") for n in varied if n != name), []).append((keys, r))
        for sweep in sweeps.values():
            if len(sweep) <= 24 or not all(r["floor_us"] for _, r in sweep):
                continue
            by_share = sorted(sweep, key=lambda case: case[1]["floor_us"] / case[1]["ours_us"])
            kept = {id(r) for _, r in (sweep[0], sweep[-1], by_share[0], by_share[-1])} | {id(r) for _, r in sweep if r["peers"]}
            dropped = {id(r) for _, r in sweep} - kept
            cases = [case for case in cases if id(case[1]) not in dropped]
            said.append(f"of {len(sweep)} values of {name} the first, the last, the worst and the best")
    return cases, said


def ours_beside(r, peer):
    """Our time that a peer's is compared with: sglang's kernels run in turns with ours in one process (bench/peers), the others beside ours in the benchmark itself."""
    return r.get("ours_beside_peers_us", r["ours_us"]) if peer.startswith("sglang") else r["ours_us"]


def results_table(recorded, prefix, aged=frozenset()):
    results = [r for r in recorded["results"] if r["case"].startswith(prefix + "/")]
    if not results:
        return "Not measured yet.\n"
    every = [keys_of(r) for r in results]
    names = sorted({k for keys in every for k in keys}, key=lambda name: (name != "operation", name))
    varied = [n for n in names if len({keys.get(n) for keys in every}) > 1]
    same = [f"{n} {every[0][n]}" for n in names if n not in varied and n != "operation"]
    if rare := [n for n in varied if sum(n in keys for keys in every) < len(every) / 4]:
        varied = [n for n in varied if n not in rare] + ["with"]
        for keys in every:
            keys["with"] = ", ".join(f"{n} {keys[n]}" for n in rare if n in keys)
    peers = sorted({p for r in results for p in r["peers"]})
    all_aged = all(r["case"] in aged for r in results)
    cases = sorted(zip(every, results), key=lambda pair: sort_key([pair[0].get(n, "") for n in varied]))
    cases, said = thinned(cases, varied)
    time = lambda r: number(r["ours_us"]) + (OLDER if r["case"] in aged and not all_aged else "")  # noqa: E731
    caption = f"{recorded['device']}, {', '.join(sorted({r['date'] for r in results}))}{OLDER if all_aged else ''}; microseconds" + "".join(f"; {s}" for s in same + said) + ".\n\n"
    bare = [case for case in cases if not case[1]["floor_us"] and not case[1]["peers"]]
    grid = ""
    if len(bare) > 40:  # ours alone: a column for each value of the last key
        cases = [case for case in cases if case[1]["floor_us"] or case[1]["peers"]]
        lines, columns = {}, sorted({keys.get(varied[-1], "") for keys, _ in bare}, key=lambda value: sort_key([value]))
        for keys, r in bare:
            lines.setdefault(tuple(keys.get(n, "") for n in varied[:-1]), {})[keys.get(varied[-1], "")] = time(r)
        grid = "\nOurs alone:\n\n" + table([*varied[:-1], *(f"{varied[-1]} {value}" for value in columns)], [[*line, *(cells.get(value, "") for value in columns)] for line, cells in lines.items()])
    rows = []
    for keys, r in cases:
        ours, floor = r["ours_us"], r["floor_us"]
        row = [keys.get(n, "") for n in varied] + [time(r), number(floor) if floor else "", f"{floor / ours:.2f}" if floor else ""]
        row += [f"{number(r['peers'][p])} ({r['peers'][p] / ours_beside(r, p):.2f}x){BEFORE if p in r.get('peers_before', []) else ''}" if p in r["peers"] else "" for p in peers]
        rows.append(row)
    return caption + table([*varied, "ours", "floor", "floor / ours", *(f"{p} (x ours)" for p in peers)], rows) + grid


def grid_table(recorded, prefix, down, across, *given):
    """Ours, the floor and each peer in lines of their own, and ours beside a peer where that is another measurement (`ours_beside`)."""
    given = dict(pair.split("=") for pair in given)
    cells, columns = {}, set()
    for r in recorded["results"]:
        keys = keys_of(r)
        if not r["case"].startswith(prefix + "/") or any(keys.get(k, "") != value for k, value in given.items()):
            continue
        columns.add(keys[across])
        beside = [(f"ours in turns with {p}", us) for p in r["peers"] if (us := ours_beside(r, p)) != r["ours_us"]]
        for what, us in [("ours", r["ours_us"]), ("floor", r["floor_us"]), *r["peers"].items(), *beside]:
            if us:
                cells.setdefault((keys[down], what), {})[keys[across]] = number(us)
    columns = sorted(columns, key=lambda value: sort_key([value]))
    lines = sorted(cells, key=lambda line: (sort_key([line[0]]), {"ours": 0, "floor": 1}.get(line[1], 2), line[1]))
    return f"{recorded['device']}, {recorded['date']}; microseconds.\n\n" + table([down, f"{across}:", *columns], [[*line, *(cells[line].get(c, "") for c in columns)] for line in lines])


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
            kinds.setdefault(kind, []).append((min(theirs) / ours_beside(r, "sglang"), shape.split(","), r["date"], any(n in r.get("peers_before", []) for n in r["peers"] if n.startswith("sglang"))))
    rows = []
    for kind, cells in sorted(kinds.items()):
        same = set.intersection(*(set(shape) for _, shape, _, _ in cells)) if len(cells) > 1 else set()
        cells = sorted((ratio, ", ".join(pair.replace("=", " ") for pair in shape if pair not in same), before) for ratio, shape, _, before in cells)
        said = [f"{ratio:.2f} ({shape})" + (BEFORE if before else "") for ratio, shape, before in cells]
        slower = sum(ratio < 1 for ratio, _, _ in cells)
        rows.append([f"`{kind}`", str(len(cells)), f"{slower}: {'; '.join(said[:slower])}" if slower else "none", said[0], said[-1]])
    dates = ", ".join(sorted({date for cells in kinds.values() for _, _, date, _ in cells}))
    return f"{recorded['device']}, {dates}; sglang's time divided by ours.\n\n" + table(["kind of call", "cells", "sglang faster in", "worst", "best"], rows)


SWAP = "bytes=576,{}hot=4096,misses={{}},requests=*,steps=4,top_k=2048"
GLANCE = {  # what is counted: {a call in words: its cases, * where the count stands}
    "requests": {
        "HiSparse swap of 4 steps, nothing missing": "hisparse/swap/" + SWAP.format("").format(0),
        "the same, 782 rows missing a request": "hisparse/swap/" + SWAP.format("").format(782),
        "the same inside sglang's state": "hisparse/spec_swap/" + SWAP.format("").format(782),
        "the swap with three followers": "hisparse/swap_and_followers/" + SWAP.format("followers=3,").format(782),
        "KDA verify of 8 tokens, 12 heads, rings": "kda/verify_ring/heads=12,requests=*,tokens=8",
        "the same, snapshots": "kda/verify_snapshot/heads=12,requests=*,tokens=8",
        "KDA fold of 4 accepted tokens, 12 heads": "kda/fold/accepted=4,heads=12,requests=*",
        "KDA decode of one token, 12 heads": "kda/decode/heads=12,requests=*,tokens=1",
        "greedy acceptance, windows of 8": "accept/verify_greedy/requests=*,window=8",
        "rejection sampling, 151 936 ids, windows of 8": "accept/verify_rejection/requests=*,vocab=151936,window=8",
        "one step of the whole model below, 131 072 positions": "step/all/context=131072,requests=*",
    },
    "tokens": {
        "draft KV of Qwen3-8B's drafter, from features": "draft_kv/materialize/committed=1,head_dim=128,hidden=4096,kv_heads=8,layers=5,tokens=*",
        "the same, from the target's features": "draft_kv/from_features/committed=1,features=20480,head_dim=128,hidden=4096,kv_heads=8,layers=5,tokens=*",
    },
}  # fmt: skip


def glance_table(recorded):
    """Few calls, a column a number of requests (or tokens): ours, in brackets how many times as long sglang's fastest form of the same call takes beside it."""
    tables = []
    for counted, calls in GLANCE.items():
        rows, counts = {}, set()
        for call, pattern in calls.items():
            before, after = pattern.split("*")
            rows[call] = {}
            for r in recorded["results"]:
                n = r["case"].removeprefix(before).removesuffix(after)
                if before + n + after != r["case"] or not n.isdigit():
                    continue
                theirs = [(us, name in r.get("peers_before", [])) for name, us in r["peers"].items() if name.startswith("sglang") and "," not in name]  # no ", four single steps"
                rows[call][int(n)] = number(r["ours_us"]) + (f" ({min(theirs)[0] / ours_beside(r, 'sglang'):.2f}x{BEFORE if min(theirs)[1] else ''})" if theirs else "")
                counts.add(int(n))
        tables.append(table([f"call; {counted}:", *map(str, sorted(counts))], [[call, *(cells.get(n, "") for n in sorted(counts))] for call, cells in rows.items()]))
    return f"{recorded['device']}, {recorded['date']}; microseconds.\n\n" + "\n".join(tables)


PARTS = {"swap_and_follow": "swaps and followers", "kda_verify": "KDA verify", "kda_commit": "KDA commit", "draft_kv": "draft KV", "windows": "windows", "accept": "acceptance"}


def shares_table(recorded):
    """A row a size of step and a side: its time, the time of each kind of operation alone in hundredths of that, and the bytes of its state."""
    steps = {tuple(r["case"].split("/")[1:]): r for r in recorded["results"] if r["case"].startswith("step/")}
    rows = []
    for shape in sorted({shape for _, shape in steps}, key=lambda shape: int(shape.rpartition("=")[2])):
        whole = steps["all", shape]
        theirs = next((name for name in whole["peers"] if name.startswith("sglang")), None)
        for side, us, state in [("ours", lambda r: r["ours_us"], whole.get("state_bytes"))] + [(theirs, lambda r: r["peers"].get(theirs), whole.get("peer_state_bytes"))] * bool(theirs):
            share = [f"{100 * us(r) / us(whole):.0f} %" if (r := steps.get((part, shape))) and us(r) else "" for part in PARTS]
            rows.append([shape.replace("=", " ").replace(",", ", "), side, number(us(whole)), *share, f"{state / 1e6:,.0f}".replace(",", " ") if state else ""])
    return f"{recorded['device']}, {recorded['date']}.\n\n" + table(["", "", "a step, µs", *PARTS.values(), "state on the GPU, MB"], rows)


def of_floor(r):
    return r["ours_us"] / r["floor_us"]


def of_peer(word):
    return lambda r: r["ours_us"] / min(us for name, us in r["peers"].items() if word in name)


def heads_from_384(keys):
    return int(keys["heads"]) * int(keys["requests"]) >= 384  # 32 requests of 12


def swaps(operation, misses, requests):
    return f"hisparse/{operation}/bytes=576,(context=16384,)?{'followers=3,' if 'followers' in operation else ''}hot=4096,misses={misses},requests=({requests}),steps=4,top_k=2048"


TARGETS = [  # of what; at most (at least, where it begins with >); what counts: microseconds, or a ratio; of which cases (and of their keys)
    ("HiSparse swap, 782 misses, 1 request: µs", "16", None, swaps("swap", 782, "1"), None),
    ("the same from 8 requests on: of the bare gather", "1.08", of_floor, swaps("swap", 782, "8|16|32|64|128|256"), None),
    ("HiSparse swap, no miss, up to 16 requests: µs", "6.5", None, swaps("swap", 0, "1|8|16"), None),
    ("the same of 64 requests: µs", "9", None, swaps("swap", 0, "64"), None),
    ("HiSparse layer and three followers, 1 request: of the bare gather", "1.2", of_floor, swaps("swap_and_followers", 782, "1"), None),
    ("the same from 8 requests on: of the bare gather", "1.1", of_floor, swaps("swap_and_followers", 782, "8|16|32|64|128"), None),
    ("KDA ring verify, 1 request of 12 heads, 8 tokens: µs", "6", None, "kda/verify_ring/heads=12,requests=1,tokens=8", None),
    ("KDA ring verify from 384 heads on: of the rate of a plain read and write", ">0.85", lambda r: 1 / of_floor(r), "kda/verify_ring/.*", heads_from_384),
    ("KDA snapshot verify: of the rate of a plain write", ">0.9", lambda r: 1 / of_floor(r), "kda/verify_snapshot/.*", None),
    ("KDA fold: of the rate of a plain read and write", ">0.9", lambda r: 1 / of_floor(r), "kda/fold/.*", None),
    ("draft KV up to 64 tokens: of the floor", "1.15", of_floor, "draft_kv/materialize/.*", lambda keys: int(keys["tokens"]) <= 64),
    ("draft KV from 256 tokens on: of cuBLASLt's bare product", "1.1", of_peer("cuBLASLt"), "draft_kv/materialize/.*", lambda keys: int(keys["tokens"]) >= 256),
    ("the step, 1 and 8 requests: of sglang's", "0.5", of_peer("sglang"), "step/all/.*", lambda keys: keys["requests"] in ("1", "8")),
    ("its KDA, 32 and 64 requests: of sglang's", "0.5", of_peer("sglang"), "step/kda_verify_and_commit/.*", lambda keys: keys["requests"] in ("32", "64")),
    ("its draft KV, 32 and 64 requests: of sglang's", "0.5", of_peer("sglang"), "step/draft_kv/.*", lambda keys: keys["requests"] in ("32", "64")),
    ("its swaps, 32 and 64 requests: of the bare gathers", "1.08", of_floor, "step/swap/.*", lambda keys: keys["requests"] in ("32", "64")),
]  # fmt: skip


def telling(cells):
    """Of the keys that vary those that no other one says already."""
    kept = [n for n in cells[0] if len({keys.get(n) for keys in cells}) > 1]
    for n in list(kept):
        if any(len({(keys.get(m), keys.get(n)) for keys in cells}) == len({keys.get(m) for keys in cells}) for m in kept if m != n):
            kept.remove(n)
    return kept


def targets_table(recorded):
    """A row a target: how many cells it is met in, and what the worst of the others have."""
    results = {r["case"]: r for r in recorded["results"]}
    for case, verify in list(results.items()):  # one number of two
        if commit := case.startswith("step/kda_verify/") and results.get(case.replace("verify", "commit")):
            sums = {p: us + commit["peers"][p] for p, us in verify["peers"].items() if p in commit["peers"]}
            results[case.replace("verify", "verify_and_commit")] = {"ours_us": verify["ours_us"] + commit["ours_us"], "floor_us": 0, "peers": sums}
    rows = []
    for what, limit, measure, pattern, wanted in TARGETS:
        cells = []
        for case, r in results.items():
            keys = keys_of({"case": case})
            if re.fullmatch(pattern, case) and (not wanted or wanted(keys)) and (measure is None or r["floor_us"] or r["peers"]):
                cells.append((r["ours_us"] if measure is None else measure(r), keys))
        if not cells:
            continue
        bound, least = float(limit.lstrip(">")), limit.startswith(">")
        said = number if measure is None else "{:.3f}".format
        missed = sorted(((value, keys) for value, keys in cells if (value < bound if least else value > bound)), key=lambda cell: cell[0], reverse=not least)
        varied = telling([keys for _, keys in cells])
        texts = [said(value) + (f" ({', '.join(f'{n} {keys[n]}' for n in varied if n in keys)})" if varied else "") for value, keys in missed]
        if len(texts) > 5:
            texts = [*texts[:3], f"{len(texts) - 4} more", f"by least {texts[-1]}"]
        rows.append([what, ("≥ " if least else "≤ ") + limit.lstrip(">"), f"{len(cells) - len(missed)} of {len(cells)}", "; ".join(texts)])
    return f"{recorded['device']}, {recorded['date']}.\n\n" + table(["target", "", "met in", "missed in"], rows)


MODES = {"plain": "plain", "dflash": "DFlash", "dspark": "DSpark"}


def engine_record(name, digest):
    """What is recorded of the engine under a name, and a caption."""
    m = json.loads((ROOT / "docs" / "decisions" / "0013-measured.json").read_text())[name]
    return m["rows"], f"{m['date']}{'' if m[digest] == source_digest.digest('engine') else OLDER}; tokens a second.\n\n"


def rates_table(recorded):
    rows, caption = engine_record("rates of the engine with a second stream", "source_digest")
    cells = {}
    for r in rows:
        cells.setdefault((r["requests"], not r["deterministic"]), {})[r["mode"]] = number(r["tokens_per_second"])
    lines = [[str(n), "cuBLASLt's" if library else "row-invariant (`--deterministic`)", *(cells[n, library].get(mode, "") for mode in MODES)] for n, library in sorted(cells)]
    return f"{recorded['device']}, {caption}" + table(["requests", "products", *MODES.values()], lines)


def ranks_table(_):
    """One card, two, and the ratio."""
    rows, caption = engine_record("ranks", "engine_source_digest")
    rate = {(r["mode"], r["requests"], r["ranks"]): r["tokens_per_second"] for r in rows}
    counts = sorted({n for _, n, _ in rate})
    cell = lambda mode, n: f"{number(rate[mode, n, 1])}, {number(rate[mode, n, 2])} ({rate[mode, n, 2] / rate[mode, n, 1]:.2f})"  # noqa: E731
    return f"Two NVIDIA H200, {caption}" + table(["mode", *(f"{n} requests" if n > 1 else "1 request" for n in counts)], [[word, *(cell(mode, n) for n in counts)] for mode, word in MODES.items()])


SPECIAL = {"rates": rates_table, "ranks": ranks_table, "targets": targets_table, "ceilings": ceilings_table, "glance": glance_table, "sglang": sglang_table, "shares": shares_table}


def render(page, root=None):
    root, aged = root or ROOT, {}

    def fill(match):
        path = root / "bench" / "results" / f"{match[2]}.json"
        if not path.is_file():
            return f"{match[1]}Not measured yet.\n{match[6]}"
        recorded = json.loads(path.read_text())
        if match[2] not in aged:
            aged[match[2]] = older(recorded)
        if match[4]:
            content = grid_table(recorded, match[3], *match[4].split())
        else:
            content = SPECIAL[match[3]](recorded) if match[3] in SPECIAL else results_table(recorded, match[3], aged[match[2]])
        return f"{match[1]}{content}{match[6]}"

    return BLOCK.sub(fill, page)


def undated(page):
    """Without daggers: sources change every day, and a page is not false for having been written yesterday."""
    return page.replace(OLDER, "")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page differs from the recorded results")
    options = parser.parse_args(arguments)
    pages = {page: page.read_text() for page in (ROOT / "docs" / "performance.md", ROOT / "docs" / "compatibility.md", *sorted((ROOT / "docs").glob("decisions/*.md")))}
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
        if text != pages[page]:
            page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
