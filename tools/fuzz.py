#!/usr/bin/env python3
"""Runs the libFuzzer targets of build/fuzz, each from its seed corpus, and ends with `N passed, N failed, N skipped`.

    tools/fuzz.py --seconds 30            a smoke run, as in .ci/run
    tools/fuzz.py --seconds 300 --record  a long one, recorded in tests/fuzz/evidence.json

A target passes if it ran for its time without a crash, a hang, a leak or a sanitizer report. What broke it is kept in
build/fuzz/found/TARGET; replay it with build/fuzz/tests/TARGET FILE.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import source_digest

ROOT = pathlib.Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "tests" / "fuzz" / "evidence.json"


def digest_of(target):
    """The digest of what a target reaches: a family's sources, or the engine's and the command line's; and the target itself."""
    family = target.removesuffix("_fuzz")
    paths = source_digest.sources(family if family in source_digest.OPERATIONS else "engine")
    paths = [p for p in paths if p.suffix != ".safetensors"]
    if family == "arguments":
        paths += sorted((ROOT / "cli").glob("*.cpp"))
    return source_digest.digest_of([*paths, ROOT / "tests" / "fuzz" / f"{target}.cpp", ROOT / "tests" / "fuzz" / "fuzz.hpp"])


def run(binary, seconds, seed, runs):
    target = binary.name
    found = ROOT / "build" / "fuzz" / "found" / target
    found.mkdir(parents=True, exist_ok=True)
    for old in found.iterdir():
        old.unlink()
    corpus = ROOT / "tests" / "fuzz" / "corpus" / target
    with tempfile.TemporaryDirectory() as grown:
        command = [str(binary), f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=3000", "-print_final_stats=1", "-use_value_profile=1", "-len_control=0", "-max_len=600", f"-seed={seed}", f"-runs={runs}",
                   f"-artifact_prefix={found}/", grown, *([str(corpus)] if corpus.is_dir() else [])]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              env=dict(os.environ, ASAN_OPTIONS="detect_leaks=1", UBSAN_OPTIONS="print_stacktrace=1"), cwd=grown)
    executions = re.findall(r"stat::number_of_executed_units:\s*(\d+)", done.stdout)
    coverage = re.findall(r"cov: (\d+)", done.stdout)
    return target, done.returncode, int(executions[-1]) if executions else 0, int(coverage[-1]) if coverage else 0, sorted(found.iterdir()), done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="0: another one every time; a fixed one and --runs repeat a run")
    parser.add_argument("--runs", type=int, default=-1, help="at most so many executions of each target")
    parser.add_argument("--match", default="")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--record", action="store_true", help="write tests/fuzz/evidence.json")
    parser.add_argument("--summary", type=pathlib.Path)
    args = parser.parse_args()
    binaries = [b for b in sorted((ROOT / "build" / "fuzz" / "tests").glob("*_fuzz")) if args.match in b.name]
    if not binaries:
        print("fuzz: no target in build/fuzz/tests (cmake --preset fuzz && cmake --build build/fuzz)", file=sys.stderr)
        return 1
    evidence = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    passed = failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run, b, args.seconds, args.seed, args.runs) for b in binaries]):
            target, status, executions, coverage, crashes, output = future.result()
            good = status == 0 and executions > 0 and not crashes
            passed, failed = passed + good, failed + (not good)
            print(f"{'ok' if good else 'FAILED':6} {target:24} {executions} executions, {coverage} edges, {len(crashes)} crashes", flush=True)
            if not good:
                print("\n".join("    " + line for line in output.splitlines()[-60:]), flush=True)
            evidence[target] = {"seconds": args.seconds, "executions": executions, "edges": coverage, "crashes": len(crashes),
                                "source_digest": digest_of(target), "date": datetime.date.today().isoformat()}
    if args.record:
        EVIDENCE.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    if args.summary:
        args.summary.write_text(json.dumps({"passed": passed, "failed": failed, "skipped": 0}))
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
