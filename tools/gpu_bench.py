#!/usr/bin/env python3
"""The benchmarks on a GPU, beside sglang's own kernels, in one run.

    tools/gpu_bench.py [--wheel FOLDER] [--peer-reports FOLDER] [--only FAMILY] [--quick] [--out FILE]      on a machine with an NVIDIA GPU
    tools/gpu_bench.py --record FILE        takes such a run into bench/results/<device>.json and docs/performance.md

Ours, the floors and the machine's ceilings come from `specstate bench FAMILY --device cuda`; the peers from bench/peers/<family>.py, which
measures them and ours in turns (needs torch, and the unpacked wheel of sglang 0.5.23 in FOLDER; see bench/peers/sglang_wheel.py).
Without --wheel no peers are measured; what --peer-seconds cut off is gone on with by a second run with the same --peer-reports. Without --out the run is recorded at once.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from run_tests import end_with_all, run_within  # noqa: E402

BUILD = ROOT / "build" / "release"
FAMILIES = ("accept", "draft_kv", "hisparse", "kda", "step")
PEERS = ("hisparse", "kda", "draft_kv", "step")
EARLIER = " (of an earlier run)"


def with_peers(report, peers):
    """Adds measured peers to the cases of a report. A case that only the peers' script has comes in with its time of ours."""
    cases = {r["case"]: r for r in report["results"]}
    digests = json.loads((BUILD / "source_digests.json").read_text()) if (BUILD / "source_digests.json").exists() else {}
    for name, measured in peers.items():
        if not measured["ours_us"] and name not in cases:
            continue
        family = name.split("/")[0]
        r = cases.setdefault(name, {"case": name, "ours_us": round(measured["ours_us"] or 0, 3), "floor_us": 0, "floor": "", "peers": {},
                                    "source_digest": digests.get(family, "unknown"), "date": report["date"], "command": f"bench/peers/{family}.py"})  # fmt: skip
        r["peers"].update(measured["peers"])
        r.update({k: v for k, v in measured.items() if k not in ("ours_us", "peers")})
        if measured["ours_us"]:
            r["ours_beside_peers_us"] = round(measured["ours_us"], 3)
    report["results"] = sorted(cases.values(), key=lambda r: r["case"])
    return report


def record(report, root=ROOT):
    """Into bench/results/<device>.json: a case that was measured again replaces its older self. A peer that was not stays, named in `peers_before`, with the
    time of ours in turns with it; so does the floor of a case that only the peers' script has measured, which says so."""
    path = root / "bench" / "results" / (report["device"].split()[-1].lower() + ".json")
    old = json.loads(path.read_text()) if path.exists() else {"device": report["device"], "ceilings": {}, "results": []}
    before = {r["case"]: r for r in old["results"]}
    for r in report["results"]:
        last = before.get(r["case"], {"peers": {}})
        if kept := {p: us for p, us in last["peers"].items() if p not in r["peers"]}:
            r["peers"], r["peers_before"] = kept | r["peers"], sorted(kept)
            r |= {k: last[k] for k in ["ours_beside_peers_us"] if k in last and k not in r}
        if not r["floor_us"] and last.get("floor_us"):
            r["floor_us"], r["floor"] = last["floor_us"], last["floor"].removesuffix(EARLIER) + EARLIER
    cases = before | {r["case"]: r for r in report["results"]}
    merged = {"device": report["device"], "date": report["date"], "ceilings": {**old["ceilings"], **report["ceilings"]}, "results": [cases[c] for c in sorted(cases)]}
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return path


def environment():
    lib = str(BUILD / "lib")
    return dict(os.environ, SPECSTATE_LIBRARY_PATH=lib, PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")])),
                LD_LIBRARY_PATH=os.pathsep.join(filter(None, [lib, os.environ.get("LD_LIBRARY_PATH")])))  # fmt: skip


def measure(options):
    """Yields what is known after each part."""
    with tempfile.TemporaryDirectory() as folder:
        report, quick = None, ["--quick"] if options.quick else []
        limit = ["--seconds", str(options.seconds)] if options.seconds else []
        for family in [options.only] if options.only else FAMILIES:  # one that fails takes no other with it
            ours = pathlib.Path(folder) / f"{family}-ours.json"
            run_within(None, [str(BUILD / "specstate"), "bench", family, "--device", "cuda", "--json", str(ours), *quick, *limit], env=environment())
            if not ours.exists():
                print(f"gpu_bench: {family} was not measured", file=sys.stderr)
                continue
            fresh = json.loads(ours.read_text())
            before = report or {"results": []}
            report = {**fresh, "results": before["results"] + fresh["results"]}
            if cut_off := before.get("cut_off", {}) | fresh.get("cut_off", {}):
                report["cut_off"] = cut_off  # families that --seconds ended
            yield report
        if report is None:
            sys.exit("gpu_bench: nothing was measured")
        for family in PEERS:
            if not options.wheel or options.only not in ("", family):
                continue
            theirs = (options.peer_reports or pathlib.Path(folder)) / f"{family}.json"
            theirs.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, str(ROOT / "bench" / "peers" / f"{family}.py"), "--wheel", options.wheel, "--json", str(theirs), "--resume", *quick]
            status = run_within(options.peer_seconds, command, env=environment())
            if status != 0:
                print(f"gpu_bench: peers of {family} " + ("ran past --peer-seconds" if status is None else f"ended with status {status}"), file=sys.stderr)
            if theirs.exists():
                report = with_peers(report, json.loads(theirs.read_text()))
                yield report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, help="no further case of a family is begun after so long")
    parser.add_argument("--peer-seconds", type=float, help="most for the peers of one family; what was measured by then counts")
    parser.add_argument("--peer-reports", type=pathlib.Path, metavar="FOLDER", help="where peers' reports are kept; one that is there already is gone on with")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, end_with_all)
    for report in [json.loads(options.record.read_text())] if options.record else measure(options):
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.out:
        return 0
    if options.quick:
        parser.error("expected full measurements to record, got --quick (name --out)")
    print(record(report))
    import bench_tables

    return bench_tables.main([])


if __name__ == "__main__":
    sys.exit(main())
