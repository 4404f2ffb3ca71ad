#!/usr/bin/env python3
"""Runs every test of this machine and sums over all runners; the last line is `N passed, N failed, N skipped`.

C++ tests are the GoogleTest binaries BUILD/tests/*_test, Python tests the files tests/python/test_*.py (the lint rules are among
them). CUDA tests (BUILD/gpu-tests/*_gpu_test, tests/gpu/test_*.py) run where a GPU is; where none is, the last lines say what is recorded of
them, and what of it is of these sources (tools/gpu_evidence.py). Each runs in its own process, one a core, and leaves a JUnit report and a log in BUILD/test-results. A crash, a
time-out and a binary without a test count as failures. A skip must start with a reason code of SKIP_LIMITS, and stay within its limit:
a test that silently stopped running is a failure too.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Reason code -> how many tests may be skipped for it. A skip message reads "code: what is missing".
SKIP_LIMITS = {
    "needs-gpu": 4,
    "needs-memory": 2,  # of the GPU: the largest pools
    "needs-cupy": 2,  # CuPy is no requirement of the project
    "needs-isa": 8,  # the processor lacks an instruction set
    "needs-no-sglang": 1,  # what is said where sglang is missing
    "needs-time": 1,  # what takes too long under a sanitizer
    "needs-wheel": 1,  # sglang's wheel is carried to a GPU machine, never installed by us
    "needs-torch": 8,  # torch is no requirement of the project
    "needs-two-gpus": 14,  # the engine's ranks, and what a process keeps of each
    "needs-nccl": 13,  # likewise: no requirement of the project
    "needs-fewer-gpus": 1,  # the embedded model's heads split for at most three
    "needs-models": 0,  # the embedded model is part of every checkout
}


class Result:
    def __init__(self, name):
        self.name, self.passed, self.failed, self.skips, self.seconds, self.log = name, 0, 0, [], 0.0, None
        self.failures = []  # what failed, each with why


def read_junit(path, result):
    """Adds the test cases of a JUnit file (GoogleTest and pytest both write it)."""
    for case in ET.parse(path).getroot().iter("testcase"):
        skipped = case.find("skipped")
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            result.failed += 1
            why = (bad.get("message") or bad.text or "").strip().splitlines()
            result.failures.append(f"{case.get('classname', '')}.{case.get('name', '')}" + (f": {why[0][:160]}" if why else ""))
        elif skipped is not None:
            message = skipped.get("message") or skipped.text or ""
            if message == "collection skipped":  # a whole pytest file
                message = (skipped.text or "").rpartition("Skipped: ")[2].rstrip("')\"")
            message = re.sub(r"^\S+:\d+\n", "", message)  # GoogleTest puts the place in front
            result.skips.append((case.get("classname", "") + "." + case.get("name", ""), message))
        elif case.get("status") == "notrun":  # a DISABLED_ GoogleTest
            result.skips.append((case.get("classname", "") + "." + case.get("name", ""), "disabled"))
        else:
            result.passed += 1


def run_within(seconds, command, **options):
    """subprocess.Popen and its exit status, or None where the time ran out: then it is gone with everything that it started (a program under
    compute-sanitizer would otherwise live on and share the GPU with what is measured next)."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    RUNNING.add(process.pid)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    finally:
        RUNNING.discard(process.pid)


RUNNING = set()


def end_with_all(*_):
    """A handler of SIGTERM: what run_within has started ends, too."""
    for pid in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(143)


def run_one(name, command, results, timeout, environment):
    result = Result(name)
    report = results / (name.replace("/", "-") + ".xml")
    result.log = report.with_suffix(".log")
    report.unlink(missing_ok=True)
    start = time.monotonic()
    note = ""
    with open(result.log, "wb") as log:
        status = run_within(timeout, [part.replace("{report}", str(report)) for part in command], cwd=ROOT, stdin=subprocess.DEVNULL,
                            stdout=log, stderr=subprocess.STDOUT, env=environment)  # fmt: skip
    if status is None:
        status, note = 1, f"ran past its limit of {timeout} s"
    result.seconds = time.monotonic() - start
    if report.exists():
        try:
            read_junit(report, result)
        except ET.ParseError:
            note = note or "left a broken report"
    total = result.passed + result.failed + len(result.skips)
    if status == 5 and result.skips:  # pytest: all of the file is skipped
        status = 0
    if status != 0 and result.failed == 0:
        result.failed += 1
        note = note or f"ended with status {status} without a failed test (crash, leak or sanitizer report)"
    elif total == 0:
        result.failed += 1
        note = "ran no test"
    if note:
        result.failures.append(f"{name}: {note}")
        with open(result.log, "a", encoding="utf-8") as log:
            log.write(f"\nrun_tests: {name} {note}\n")
    return result


def refused_skips(results, limits):
    """Texts of the skips that no limit allows."""
    counts, problems = {}, []
    for result in results:
        for test, message in result.skips:
            code = message.strip().split(":")[0].strip()
            if code not in limits:
                problems.append(f"{result.name}: {test} was skipped without a known reason code: {message.strip()[:100]!r}")
            else:
                counts[code] = counts.get(code, 0) + 1
    problems += [f"{n} tests were skipped as {c!r}, at most {limits[c]} may be" for c, n in sorted(counts.items()) if n > limits[c]]
    return problems


def gpu_here():
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def of_long_runs(root=ROOT):
    """What is recorded of the CPU's matrix and of the fuzzers, which run longer than `make test`, and whether it is of these sources."""
    import fuzz
    from source_digest import digest

    lines = []
    with contextlib.suppress(OSError, ValueError):
        matrix = json.loads((root / "tests" / "evidence" / "lossless_matrix.json").read_text())
        state = "these" if matrix["source_digest"] == digest("engine", root) else "OLDER"
        lines.append(f"cpu: lossless matrix of {state} sources, {matrix['date']}: {matrix['runs']} runs, {matrix['not_lossless']} not lossless")
    with contextlib.suppress(OSError, ValueError):
        targets = json.loads((root / "tests" / "fuzz" / "evidence.json").read_text())
        old = [target for target, e in sorted(targets.items()) if e["source_digest"] != fuzz.digest_of(target)]
        lines.append(f"fuzz: {sum(e['crashes'] for e in targets.values())} crashes in the recorded runs of {len(targets)} targets, "
                     + (f"of OLDER sources: {', '.join(old)}" if old else "all of these sources"))
    return lines


def bench_ages(root=ROOT):
    """How many of the numbers in docs/performance.md are of older sources; `tools/bench_tables.py --check` lists them."""
    from bench_tables import age_line

    return [age_line(path) for path in sorted((root / "bench" / "results").glob("*.json"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--only", choices=["cpp", "python", "gpu"], action="append", help="this runner alone")
    parser.add_argument("--match", default="", help="only files whose name contains this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one file")
    parser.add_argument("--max-skips", type=int, default=16, help="skips in all, beside the limit of each reason code")
    parser.add_argument("--summary", type=pathlib.Path, help="also write the sums as JSON here")
    args = parser.parse_args()
    build = args.build.resolve()
    runners = args.only or ["cpp", "python", *(["gpu"] if gpu_here() else [])]
    folder = build / "test-results"
    folder.mkdir(parents=True, exist_ok=True)

    tasks = []
    if "python" in runners:
        for path in sorted((ROOT / "tests" / "python").glob("test_*.py")):
            tasks.append(("python/" + path.stem, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5",
                                                  "--junitxml={report}", str(path.relative_to(ROOT))]))
    if "cpp" in runners:
        for path in sorted((build / "tests").glob("*_test")):
            tasks.append(("cpp/" + path.name, [str(path), "--gtest_output=xml:{report}", "--gtest_brief=1"]))
    if "gpu" in runners:
        for path in sorted((build / "gpu-tests").glob("*_gpu_test")):
            tasks.append(("gpu/" + path.name, [str(path), "--gtest_output=xml:{report}", "--gtest_brief=1"]))
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
            tasks.append(("gpu/" + path.stem, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={report}", str(path)]))
    tasks = [t for t in tasks if args.match in t[0]]
    if not tasks:
        print(f"run_tests: found no test in {build / 'tests'} and tests/python", file=sys.stderr)
        return 1
    # The longest of the last run first, so that no core idles at the end.
    times_file = folder / "seconds.json"
    try:
        seconds = json.loads(times_file.read_text())
    except (OSError, ValueError):
        seconds = {}
    tasks.sort(key=lambda t: -seconds.get(t[0], 1e9))

    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    environment.setdefault("RC_PARAMS", "seed=20261130")  # rapidcheck: the same cases every time; RC_PARAMS=seed=N draws others
    if args.build != parser.get_default("build"):
        environment["SPECSTATE_LIBRARY_PATH"] = str(build / "lib")
    start = time.monotonic()
    results = []
    with concurrent.futures.ThreadPoolExecutor(max(1, args.jobs)) as pool:
        for future in concurrent.futures.as_completed(
                [pool.submit(run_one, name, command, folder, args.timeout, environment) for name, command in tasks]):
            r = future.result()
            results.append(r)
            state = "FAILED" if r.failed else "ok"
            skips = f", {len(r.skips)} skipped" if r.skips else ""
            failed = f", {r.failed} failed" if r.failed else ""
            print(f"{state:6} {r.name:32} {r.passed} passed{failed}{skips}  {r.seconds:.1f} s", flush=True)
            if r.failed:
                print("\n".join("    " + line for line in r.log.read_text(errors="replace").splitlines()[-80:]), flush=True)
    times_file.write_text(json.dumps({**seconds, **{r.name: round(r.seconds, 1) for r in results}}, indent=0, sort_keys=True))

    problems = refused_skips(results, SKIP_LIMITS)
    for r in results:
        for test, message in r.skips:
            print(f"skipped: {r.name}: {test}: {message.strip()}")
    skipped = sum(len(r.skips) for r in results)
    if skipped > args.max_skips:
        problems.append(f"{skipped} tests were skipped in all, at most {args.max_skips} may be")
    for problem in problems:
        print("FAILED " + problem)
    for runner in runners:
        mine = [r for r in results if r.name.startswith(runner + "/")]
        print(f"{runner}: {sum(r.passed for r in mine)} passed, {sum(r.failed for r in mine)} failed, "
              f"{sum(len(r.skips) for r in mine)} skipped in {sum(r.seconds for r in mine):.0f} s of {len(mine)} processes")
    if args.only is None and "gpu" not in runners:
        from gpu_evidence import said

        print("\n".join(said()))
    if args.only is None:
        print("\n".join(of_long_runs() + bench_ages()))
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results) + len(problems)
    if args.summary:
        args.summary.write_text(json.dumps({"passed": passed, "failed": failed, "skipped": skipped, "seconds": time.monotonic() - start}))
    print(f"took {time.monotonic() - start:.0f} s")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
