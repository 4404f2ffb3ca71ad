#!/usr/bin/env python3
"""Every CUDA test, on a machine with an NVIDIA GPU, and the evidence of it in tests/gpu/evidence.json.

    tools/gpu_test.py [--only NAMES] [--no-sanitizers] [--evidence FILE]
    tools/gpu_test.py --pack FOLDER [--wheel UNPACKED]       what a bare GPU machine needs, copied from this checkout's build, and what the
                                          tests and benchmarks need of an unpacked wheel of sglang; there, in FOLDER: python3 tools/gpu_test.py

Runs the binaries build/release/gpu-tests/*_gpu_test and the files tests/gpu/test_*.py (the latter need torch), then each binary again
under compute-sanitizer's four tools on small shapes (GPU_TEST_SMALL=1), after each tool has found a planted fault. The tests come first, because programs
take turns on a GPU and one under a tool keeps it for long; with --share they use it at the same time (CUDA's multi-process service), but for
those that look at the GPU's memory. So do the tools, in a service of their own, if each finds its planted fault there too. What the service
itself has broken runs again without it. The longest come first, by tests/gpu/seconds.json, which a run leaves beside its evidence.
sglang's own kernel tests, where they lie in tests/gpu/of_sglang/ (they are sglang's, so they are carried and never committed), run against
our functions (tests/gpu/sglang_in_name.py); what came of each is in the evidence under "sglang" (tools/sglang_table.py writes it into
docs/compatibility.md). Kernels of sglang that its tests compare with come from an unpacked wheel in `wheel`, if there is one.
A family's evidence names the digest of the sources that the build was made from; `make test` says whether it is still theirs. The tests that need
two GPUs are a family of their own: on a machine with one they skip, and what a machine with two has said of them stays, with its sources and its date.
The last line is `N passed, N failed, N skipped`.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from run_tests import end_with_all, run_one, run_within  # noqa: E402

BUILD = ROOT / "build" / "release"
EVIDENCE = ROOT / "tests" / "gpu" / "evidence.json"
SECONDS = EVIDENCE.with_name("seconds.json")
FAMILIES = ("hisparse", "kda", "draft_kv", "accept", "engine")
turns = itertools.count()
TOOLS = ("racecheck", "initcheck", "memcheck", "synccheck")
PARTS = {"kda_gpu_test": 3, "draft_kv_gpu_test": 3, "gpu_calls.py": 2}  # so many processes, each with a part of the tests; racecheck, the slowest: one a test
TWO_GPUS = ("test_engine_ranks_gpu", "test_two_devices_gpu")  # they need two
APART = ("engine_gpu_test", "test_memory_gpu", *TWO_GPUS)  # they look at the memory of the GPU, kill who uses it, or need two


def family_of(name):
    """hisparse_swap_gpu_test -> hisparse, test_kda_gpu -> kda; what belongs to no family is the binding's."""
    if name in TWO_GPUS:
        return "two_gpus"
    name = name.removeprefix("test_")
    return next((f for f in FAMILIES if name.startswith(f)), "binding")


def environment(jobs):
    """The package of this tree; libraries that the machine lacks lie beside ours. Every program sees all GPUs, each time another one first, and has its
    share of the processors: threads of some fifty programs on all of them would wait for each other."""
    lib = str(BUILD / "lib")
    e = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", SPECSTATE_LIBRARY_PATH=lib)
    for variable in ("SPECSTATE_NUM_THREADS", "OMP_NUM_THREADS"):
        e.setdefault(variable, str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    gpus = visible_gpus()
    first = next(turns) % len(gpus)
    e["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
    e["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [lib, e.get("LD_LIBRARY_PATH")]))
    e["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), e.get("PYTHONPATH")]))
    return e


@contextlib.contextmanager
def shared(wanted, gpu=""):
    """The environment of programs that share one GPU, as CUDA_VISIBLE_DEVICES names it; empty where the service does not start."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not wanted or not control:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        e = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        said = subprocess.run([control, "-d"], env=dict(os.environ, **e, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})), capture_output=True, text=True)
        if said.returncode:
            print(f"gpu_test: the GPU is not shared: {(said.stdout + said.stderr).strip()}")
        try:
            yield {} if said.returncode else {**e, "CUDA_VISIBLE_DEVICES": "0"}  # the only one that the service has
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", env=dict(os.environ, **e), capture_output=True, text=True, timeout=10)


def visible_gpus():
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(len(gpu_names()))] or [""]


@functools.cache
def gpu_names():
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def run_theirs(path, results, timeout, e):
    """What came of each test of one of sglang's files: {file::Class.test: "passed", "failed: why" or "not applicable: why"}."""
    report = results / f"sglang-{path.stem}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sglang_in_name", f"--junitxml={report}", str(path)]
    e = dict(e)
    e["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "gpu"), e["PYTHONPATH"]])
    with open(report.with_suffix(".log"), "wb") as out:
        if run_within(timeout, command, stdout=out, stderr=subprocess.STDOUT, env=e) is None:
            return {path.name: "failed: ran past its limit"}
    return read_theirs(path.stem, report)


def read_theirs(stem, report):
    table = {}
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else []:
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        said = (bad if bad is not None else skip).get("message", "") if bad is not None or skip is not None else ""
        said = (said.splitlines() or [""])[0].removeprefix("Skipped: ").removeprefix("not-applicable: ")[:200]
        state = "failed" if bad is not None else "not applicable" if skip is not None else "passed"
        owner = (case.get("classname") or "").rpartition(stem)[2].lstrip(".")
        table[f"{stem}.py::{owner + '.' if owner else ''}{case.get('name')}"] = f"{state}: {said}" if said else state
    return table or {f"{stem}.py": "failed: no report"}


def of_theirs(table):
    """The evidence of a table; what is not applicable counts as skipped."""
    count = {k: sum(v.startswith(begin) for v in table.values()) for k, begin in (("passed", "passed"), ("failed", "failed"), ("skipped", "not applicable"))}
    bad = [f"{name}: {v}" for name, v in table.items() if v.startswith("failed")]
    return {"date": datetime.date.today().isoformat(), "sanitizers": {}, "tests": table, "not_passed": bad, "skips": {"not applicable": count["skipped"]}, **count}


def describe_gpu():
    found = gpu_names()
    if not found or ", " not in found[0]:
        return None
    name, driver = found[0].split(", ")
    return {"device": name, "driver": driver} | ({"devices": len(found)} if len(found) > 1 else {})


def sanitizer():
    return shutil.which("compute-sanitizer") or next((str(p) for p in [pathlib.Path("/usr/local/cuda/bin/compute-sanitizer")] if p.exists()), None)


def parts_of(tool, program):
    """[(name, arguments, environment)] of the processes that together are a run of the tool."""
    n = PARTS.get(program.name, 1)
    if program.suffix == ".py":
        return [(str(i + 1), [str(i + 1), str(150 // n)], {}) for i in range(n)]
    if tool != "racecheck":
        return [(str(i + 1), ["--gtest_brief=1"], {"GTEST_SHARD_INDEX": str(i), "GTEST_TOTAL_SHARDS": str(n)}) for i in range(n)]
    listed = subprocess.run([str(program), "--gtest_list_tests"], capture_output=True, text=True, env=environment(1)).stdout
    suite, names = "", []
    for line in listed.splitlines():
        word = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = word
        elif word:
            names.append(suite + word)
    if not names:
        sys.exit(f"gpu_test: {program} lists no test: {listed.strip()[:200]}")
    return [(name, ["--gtest_brief=1", f"--gtest_filter={name}"], {}) for name in names]


def sanitize(tool, program, part, results, timeout, e):
    """Errors that the tool reports in a part of the program's tests, None if it gave no verdict; the log; and the seconds."""
    name, arguments, variables = part
    log = results / f"{program.name}.{tool}.{name.replace('/', '-')}.log"
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "0", "--print-limit", "20", *([] if tool != "memcheck" else ["--leak-check", "no"])]
    command += [sys.executable, str(program)] if program.suffix == ".py" else [str(program)]
    start = time.monotonic()
    with open(log, "wb") as out:
        small = dict(e, GPU_TEST_SMALL="1", PYTORCH_NO_CUDA_MEMORY_CACHING="1", **variables)
        if run_within(timeout, command + arguments, stdout=out, stderr=subprocess.STDOUT, env=small) is None:
            out.write(b"\ngpu_test: ran past its limit\n")
    text = log.read_text(errors="replace")
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    failed = re.search(r"\[  FAILED  \]|ran past its limit|^Traceback|the GPU faulted|supports says", text, re.M)
    return (None if not found or failed else sum(map(int, found))), log, time.monotonic() - start


def pack(folder, wheel):
    """The parts of a checkout that a bare GPU machine needs, at their places."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = [BUILD / "specstate", BUILD / "source_digests.json", *sorted((BUILD / "gpu-tests").glob("*"))]
    ours += [p for p in [SECONDS] if p.exists()] + [ROOT / "tools" / n for n in ("gpu_test.py", "gpu_soak.py", "lossless_matrix.py", "run_tests.py", "source_digest.py")] + [p for d in ("gpu", "oracles") for p in sorted((ROOT / "tests" / d).glob("*.py"))]
    ours += [p for p in sorted((ROOT / "tests" / "python").glob("*.py")) if not p.name.startswith(("test_", "conftest")) or p.name.startswith(("test_kda", "test_torch", "test_draft_kv_helper"))]
    ours += sorted((ROOT / "tests" / "gpu" / "of_sglang").glob("*.py")) + sorted((ROOT / "bench" / "peers").glob("*.py")) + [ROOT / "tools" / "gpu_bench.py"] + sorted((ROOT / "examples").glob("*.py"))
    ours += [p for p in sorted((ROOT / "python" / "specstate").rglob("*")) if p.is_file() and "__pycache__" not in p.parts and "lib" not in p.parts]
    ours += [p for p in sorted((ROOT / "models").rglob("*")) if p.suffix in (".json", ".safetensors", ".txt") and p.parent.name != "golden"]
    for source in ours:
        to = folder / source.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to)
    lib = folder / BUILD.relative_to(ROOT) / "lib"
    lib.mkdir(parents=True, exist_ok=True)
    for source in (BUILD / "lib").glob("*.so*"):
        if re.fullmatch(r"libspecstate(\.so\.\d+|_ffi\.so)", source.name):
            shutil.copy2(source.resolve(), lib / source.name)
    linked = subprocess.run(["ldd", BUILD / "lib" / "libspecstate.so"], capture_output=True, text=True, check=True).stdout
    for name, path in re.findall(r"(lib(?:tbb|hwy)\S*) => (\S+)", linked):
        shutil.copy2(os.path.realpath(path), lib / name)
    if wheel:
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import sglang_wheel

        sglang_wheel.trim(wheel, folder / "wheel")
    (folder / "run.sh").write_text("""#!/bin/bash
# Everything this machine can tell, into out/: run on a machine with an NVIDIA GPU and torch.
cd "$(dirname "$0")" && mkdir -p out
if ls ./*.whl > /dev/null 2>&1; then  # packages that the machine lacks (apache-tvm-ffi)
  python3 -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target "$PWD/site" ./*.whl && export PYTHONPATH="$PWD/site"
fi
python3 tools/gpu_test.py --jobs 16 --evidence out/evidence.json
python3 tools/gpu_bench.py $([ -d wheel ] && echo --wheel wheel) --out out/bench.json
[ -d wheel ] && SPECSTATE_LIBRARY_PATH=build/release/lib LD_LIBRARY_PATH=build/release/lib python3 bench/peers/overhead.py --wheel wheel --json out/overhead.json
cp build/release/gpu-test-results/*.log out/
""")
    programs = [p for p in folder.rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\x7fELF"]
    subprocess.run(["strip", *map(str, programs)], check=True)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")


def evidence_of(results, digests, gpu):
    """The evidence of the families of these {name: Result of run_tests.py}, as yet without tools."""
    families = {}
    for name, r in sorted(results.items()):
        family = family_of(name)
        f = families.setdefault(family, {"source_digest": digests.get(family, "unknown"), **gpu, "date": datetime.date.today().isoformat(),
                                         "passed": 0, "failed": 0, "skipped": 0, "sanitizers": {}, "not_passed": [], "skips": {}})  # fmt: skip
        f["passed"] += r.passed
        f["failed"] += r.failed
        f["skipped"] += len(r.skips)
        f["not_passed"] += r.failures
        for _, message in r.skips:
            code = message.strip().partition(":")[0]
            f["skips"][code] = f["skips"].get(code, 0) + 1
    return families


def seen(families):
    """Without those of which every test was skipped: that is no news of them."""
    return {name: f for name, f in families.items() if f["passed"] + f["failed"]}


def known(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def save(path, news):
    """Into a file of evidence, or of the seconds that each program took: what is new replaces its older self, what is not there again stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known(path), **news}, indent=1, sort_keys=True) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=pathlib.Path)
    parser.add_argument("--wheel", type=pathlib.Path, default=ROOT / "wheel", help="the unpacked wheel of sglang 0.5.23, or what --pack has taken of it")
    parser.add_argument("--only", default="", help="files whose name contains one of these, separated by commas; leaves the evidence of other families alone")
    parser.add_argument("--no-sanitizers", action="store_true")
    parser.add_argument("--share", nargs="?", const="all", default="", choices=("tests", "all"), help="tests, or the tools too, use the GPU at the same time, where CUDA's multi-process service starts")
    parser.add_argument("--jobs", type=int, default=4, help="programs at a time; they take turns on the GPUs")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one program")
    parser.add_argument("--seconds", type=float, default=86400, help="for all of it: what has not ended by then has no verdict")
    parser.add_argument("--evidence", type=pathlib.Path, default=EVIDENCE)
    options = parser.parse_args()
    if options.pack:
        return pack(options.pack, options.wheel if options.wheel.exists() else None)
    gpu = describe_gpu()
    if gpu is None:
        print("gpu_test: this machine has no NVIDIA GPU (nvidia-smi found none); nothing was tested", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, end_with_all)
    end = time.monotonic() + options.seconds
    digests = json.loads((BUILD / "source_digests.json").read_text())
    results = BUILD / "gpu-test-results"
    results.mkdir(parents=True, exist_ok=True)

    def wanted(name):
        return any(part in name for part in options.only.split(","))

    programs = [p for p in sorted((BUILD / "gpu-tests").glob("*_gpu_test")) if wanted(p.name)]
    tasks = [(p.name, [str(p), "--gtest_output=xml:{report}", "--gtest_brief=1"]) for p in programs]
    tasks += [(p.stem, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={report}", str(p)])
              for p in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if wanted(p.stem)]
    if not tasks:
        print(f"gpu_test: found no test in {BUILD / 'gpu-tests'} and tests/gpu", file=sys.stderr)
        return 1
    wheel = options.wheel.exists() and {"SGLANG_WHEEL": str(options.wheel.resolve())} or {}
    theirs = [p for p in sorted((ROOT / "tests" / "gpu" / "of_sglang").glob("test_*.py")) if "sglang" in options.only.split(",") or wanted(p.name)]
    garbled_calls = ROOT / "tests" / "gpu" / "gpu_calls.py"  # of every family: nothing outside an array may be touched
    sanitized = [] if options.no_sanitizers or not programs else [("memcheck", garbled_calls)] + [(tool, p) for tool in TOOLS for p in programs]
    seconds, took = known(SECONDS), {}

    def longest_first(runs, name_of):
        """What nobody knows yet is long."""
        return sorted(runs, key=lambda run: -seconds.get(name_of(run), 1e9))

    tasks = longest_first(tasks, lambda task: task[0])
    with contextlib.ExitStack() as stack:
        gpus = visible_gpus()  # of several the tests have the first, the tools the last; what runs apart sees all
        service = stack.enter_context(shared(options.share, gpus[0]))
        of_tools, of_planted = (stack.enter_context(shared(options.share == "all", gpus[-1])) for _ in range(2))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(options.jobs))

        def left():
            return max(1, min(options.timeout, end - time.monotonic()))

        def in_service(name, run, failed):
            """run(environment), in the service if it may be; what that has broken (CUDA's errors name it) once more without."""
            e = environment(options.jobs) | wheel
            mine = {} if name in APART else service
            start = time.monotonic()
            r = run(e | mine)
            if mine and failed(r) and re.search(r"\bMPS\b", (results / f"{name}.log").read_text(errors="replace")):
                print(f"gpu_test: {name} was ended by the service, runs again without it")
                r = run(e)
            took[name] = round(time.monotonic() - start, 1)
            return r

        def run_test(name, command):
            return in_service(name, lambda e: run_one(name, command, results, left(), e), lambda r: r.failed)

        def run_table(path):
            return in_service(f"sglang-{path.stem}", lambda e: run_theirs(path, results, left(), e), lambda table: any(v.startswith("failed") for v in table.values()))

        def plant(tool, e):
            return sanitize(tool, BUILD / "gpu-tests" / "planted_fault", ("1", [tool], {}), results, min(60, left()), environment(options.jobs) | e)

        def find_planted():
            """(the tools' environment, what each found of its planted fault): in the service if all find theirs there."""
            for e in [of_planted, {}] if of_planted else [{}]:
                found = [plant(tool, e) for tool in TOOLS]
                if all(errors for errors, *_ in found):
                    break
            return (of_tools if e else {}), found

        def watch(tool, program, part):
            """A run without a verdict, where the service may be why, is done again without it."""
            mine, _ = planted.result()
            for e in [mine, {}] if mine else [{}]:
                errors, log, s = sanitize(tool, program, part, results, min(90, left()) if e else left(), environment(options.jobs) | e)
                if errors is not None or left() <= 1:
                    break
            took[f"{tool} {program.name} {part[0]}"] = round(s, 1)
            return errors, log, s

        planted = pool.submit(find_planted) if sanitized and sanitizer() else None  # beside the tests: known when the first run of a tool asks
        tests = {name: pool.submit(run_test, name, command) for name, command in tasks}
        tables = [pool.submit(run_table, path) for path in longest_first(theirs, lambda path: f"sglang-{path.stem}")]
        verdicts = {run: [] for run in sanitized}
        if planted:
            parts = [(run, part) for run in sanitized for part in parts_of(*run)]
            for run, part in longest_first(parts, lambda x: f"{x[0][0]} {x[0][1].name} {x[1][0]}"):
                verdicts[run].append(pool.submit(watch, *run, part))

        for name, future in sorted(tests.items()):
            r = future.result()
            print(f"{'FAILED' if r.failed else 'ok':6} {name:36} {r.passed} passed, {r.failed} failed, {len(r.skips)} skipped  {r.seconds:.1f} s", flush=True)
            for test, message in r.skips:
                print(f"skipped: {test}: {message.strip()}")
            if r.failed:
                print("\n".join("    " + line for line in r.log.read_text(errors="replace").splitlines()[-60:]), flush=True)
        families = evidence_of({name: future.result() for name, future in tests.items()}, digests, gpu)
        table = dict(sorted((name, result) for future in tables for name, result in future.result().items()))
        for name, result in table.items():
            print(f"sglang's {name}: {result}")
        if table:
            families["sglang"] = {"source_digest": digests.get("binding", "unknown"), **gpu, **of_theirs(table)}
        save(options.evidence, seen(families))  # what is known if the sanitizers are cut short
        save(options.evidence.with_name(SECONDS.name), took)

        if sanitized and not planted:
            print("FAILED sanitizers: compute-sanitizer is not on this machine")
            families[family_of(programs[0].name)]["failed"] += 1
        elif sanitized:
            mine, found = planted.result()
            print(f"the tools{' share the GPU' if mine else ' take turns on the GPU'}")
            blind = [tool for tool, (errors, *_) in zip(TOOLS, found) if not errors]
            for tool, (_, log, _) in zip(TOOLS, found):
                if tool in blind:
                    print(f"FAILED {tool} did not report the planted fault:\n" + log.read_text(errors="replace")[-1500:])
            for (tool, program), futures in verdicts.items():
                runs = [future.result() for future in futures]
                errors = None if any(e is None for e, *_ in runs) else sum(e for e, *_ in runs)
                good = errors == 0 and tool not in blind
                print(f"{'ok' if good else 'FAILED':6} {tool:10} {program.name:36} {'no verdict' if errors is None else errors} errors  "
                      f"{', '.join(f'{s:.1f}' for *_, s in runs)} s", flush=True)
                for reported, log, _ in runs:
                    if reported != 0:
                        print("\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-40:]))
                f = families.get(family_of(program.name))
                if f is None:  # garbled calls, where --only has left the binding out
                    continue
                f["failed"] += not good
                f["passed"] += good
                said = "clean" if good else f"{'blind' if tool in blind else 'no verdict' if errors is None else f'{errors} errors'} in {program.name}"
                before = f["sanitizers"].get(tool, "clean")
                f["sanitizers"][tool] = said if before == "clean" else before if said == "clean" else f"{before}, {said}"
                if not good:
                    f["not_passed"].append(f"{tool}: {said}")

    save(options.evidence, seen(families))
    save(options.evidence.with_name(SECONDS.name), took)
    for name in sorted(families.keys() - seen(families).keys()):
        print(f"gpu_test: every test of {name} was skipped ({', '.join(families[name]['skips'])}): its evidence stays as it was")
    total = [sum(f[k] for f in families.values()) for k in ("passed", "failed", "skipped")]
    print("%d passed, %d failed, %d skipped" % tuple(total))
    return 1 if total[1] else 0


if __name__ == "__main__":
    sys.exit(main())
