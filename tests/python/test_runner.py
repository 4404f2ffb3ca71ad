"""tools/run_tests.py: what it counts, and which skips it refuses."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("run_tests", ROOT / "tools" / "run_tests.py")
run_tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_tests)
import gpu_evidence  # noqa: E402  (beside it)
import gpu_test  # noqa: E402


def report(*cases):
    return "<testsuites><testsuite>" + "".join(f'<testcase classname="A" name="t{i}">{c}</testcase>' for i, c in enumerate(cases)) + "</testsuite></testsuites>"


def result_of(tmp_path, text, status=0, timeout=60):
    """What the runner makes of a process that writes `text` as its report and ends with `status`."""
    (tmp_path / "text").write_text(text)
    code = f"import shutil, sys; shutil.copy({str(tmp_path / 'text')!r}, sys.argv[1]); sys.exit({status})"
    return run_tests.run_one("cpp/x", [sys.executable, "-c", code, "{report}"], tmp_path, timeout, dict(os.environ))


def test_the_age_of_the_recorded_benchmarks_is_said(tmp_path):
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    now = gpu_evidence.digest("kda")
    rows = [{"case": f"kda/fold/n={i}", "source_digest": digest} for i, digest in enumerate([now, now, "0" * 16])]
    (folder / "h200.json").write_text(json.dumps({"results": rows}))
    assert run_tests.bench_ages(tmp_path) == ["bench: h200: 1 of 3 recorded rows are of OLDER sources than these: kda 1 of 3"]
    (folder / "h200.json").write_text(json.dumps({"results": rows[:2]}))
    assert run_tests.bench_ages(tmp_path) == ["bench: h200: all 2 recorded rows are of these sources"]


GOOGLETEST_SKIP = '<skipped message="/src/tests/cpp/kda_test.cpp:208&#x0A;needs-isa: AVX2"><![CDATA[..]]></skipped>'


def test_counts(tmp_path):
    result = result_of(tmp_path, report("", '<failure message="x"/>', GOOGLETEST_SKIP, '<skipped message="needs-torch: no torch"/>'), 1)
    assert (result.passed, result.failed) == (1, 1)
    assert result.skips == [("A.t2", "needs-isa: AVX2"), ("A.t3", "needs-torch: no torch")]
    assert run_tests.refused_skips([result], {"needs-isa": 1, "needs-torch": 1}) == []


def test_a_file_that_skips_as_a_whole(tmp_path):
    text = """<skipped message="collection skipped">('x.py', 12, 'Skipped: needs-torch: no torch')</skipped>"""
    result = result_of(tmp_path, report(text), 5)
    assert result.failed == 0 and result.skips == [("A.t0", "needs-torch: no torch")]


@pytest.mark.parametrize("message", ["", "later", "needs-models: gone"])
def test_a_skip_without_a_reason_that_is_allowed_is_refused(tmp_path, message):
    result = result_of(tmp_path, report("", f'<skipped message="{message}"/>'))
    assert len(run_tests.refused_skips([result], run_tests.SKIP_LIMITS)) == 1


@pytest.mark.parametrize("text, status", [(report(""), 1), (report(), 0), ("<testsuites>", 0)])
def test_a_crash_no_test_and_a_broken_report_are_failures(tmp_path, text, status):
    assert result_of(tmp_path, text, status).failed == 1


def test_what_is_said_of_gpu_tests_where_there_is_no_gpu(tmp_path):
    assert "nothing is recorded" in gpu_evidence.said(tmp_path)[0]
    for folder in ("cmake", "src/kda", "src/accept", "tests/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("cmake/flags.cmake", "src/kda/cuda.cu", "src/accept/cuda.cu"):
        (tmp_path / file).write_text("one\n")
    entry = {"device": "NVIDIA H200", "driver": "580", "date": "2026-11-30", "passed": 4, "failed": 0, "skipped": 1}
    (tmp_path / "tests/gpu/evidence.json").write_text(json.dumps({
        "kda": {**entry, "source_digest": gpu_evidence.digest("kda", tmp_path), "sanitizers": {"memcheck": "clean", "racecheck": "2 errors"}},
        "accept": {**entry, "source_digest": gpu_evidence.digest("accept", tmp_path), "sanitizers": {"memcheck": "clean"}}}))  # fmt: skip
    (tmp_path / "src/kda/cuda.cu").write_text("two\n")
    _, accept, kda, last = gpu_evidence.said(tmp_path)
    assert accept.split(None, 1)[1] == "accept          of these sources, 2026-11-30, NVIDIA H200: 4 passed, 0 failed, 1 skipped; 1 tool clean"
    assert kda.split(None, 1)[1] == "kda             of OLDER sources, 2026-11-30, NVIDIA H200: 4 passed, 0 failed, 1 skipped; racecheck: 2 errors"
    assert last == ("gpu: evidence of these sources: accept; of OLDER sources: kda; "
                    "MISSING: binding, draft_kv, engine, hisparse, sglang, two_gpus, lossless matrix, soak")  # fmt: skip
    assert set(gpu_evidence.FAMILIES) == {*gpu_test.FAMILIES, "binding", "sglang", "two_gpus"}


def test_a_run_on_one_gpu_keeps_what_two_have_said(tmp_path):
    names = [p.stem for p in (ROOT / "tests" / "gpu").glob("test_*.py") if "needs-two-gpus" in p.read_text()]
    assert sorted(names) == sorted(gpu_test.TWO_GPUS) and set(names) < set(gpu_test.APART)

    def run_on(gpus, digest):
        results = {name: result_of(tmp_path, report("")) for name in ("test_kda_gpu", *names)}
        for name in names if gpus < 2 else []:
            results[name] = result_of(tmp_path, report('<skipped message="needs-two-gpus: torch sees 1"/>'))
        families = gpu_test.evidence_of(results, dict.fromkeys(("kda", "two_gpus"), digest), {"device": "NVIDIA H200"})
        gpu_test.save(tmp_path / "evidence.json", gpu_test.seen(families))
        evidence = gpu_test.known(tmp_path / "evidence.json")
        return families["two_gpus"]["skips"], {name: (e["source_digest"], e["passed"]) for name, e in evidence.items()}

    assert run_on(1, "old") == ({"needs-two-gpus": 2}, {"kda": ("old", 1)})
    assert run_on(2, "old") == ({}, {"kda": ("old", 1), "two_gpus": ("old", 2)})
    assert run_on(1, "new") == ({"needs-two-gpus": 2}, {"kda": ("new", 1), "two_gpus": ("old", 2)})


def test_what_is_said_of_long_runs(tmp_path):
    matrix, fuzz = run_tests.of_long_runs()
    assert matrix.startswith("cpu: lossless matrix of ") and matrix.endswith(" runs, 0 not lossless")
    assert fuzz.startswith("fuzz: 0 crashes in the recorded runs of 7 targets, ")
    assert run_tests.of_long_runs(tmp_path) == []


def test_the_page_says_what_is_recorded_of_a_gpu():
    page = (ROOT / "docs" / "testing.md").read_text()
    assert gpu_evidence.placed(page, gpu_evidence.render()) == page, "run tools/gpu_evidence.py"
    evidence, matrix, soak = gpu_evidence.read(ROOT)
    assert matrix["source_digest"] in page and soak["source_digest"] in page and all(e["source_digest"] in page for e in evidence.values())
    for name in {x.partition(":")[0] for e in evidence.values() for x in e.get("not_passed", [])}:
        assert name in page


def test_a_time_out_is_a_failure(tmp_path):
    result = run_tests.run_one("cpp/x", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 1, dict(os.environ))
    assert result.failed == 1 and "limit of 1 s" in result.log.read_text()


def test_who_runs_too_long_takes_its_children_along(tmp_path):
    """As compute-sanitizer with the program under it."""
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])"
    assert run_tests.run_within(None, [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert run_tests.run_within(2, [sys.executable, "-c", parent, str(tmp_path / "pid")]) is None
    gone(tmp_path / "pid")


def test_who_is_ended_takes_all_along(tmp_path):
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    runner = f"import signal, sys, run_tests; signal.signal(signal.SIGTERM, run_tests.end_with_all); run_tests.run_within(60, [sys.executable, '-c', {child!r}, sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", runner, str(tmp_path / "pid")], env=dict(os.environ, PYTHONPATH=str(ROOT / "tools")))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143
    gone(tmp_path / "pid")


def gone(pid_file):
    stat = pathlib.Path("/proc", pid_file.read_text(), "stat")
    for _ in range(100):  # its new parent reaps it
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")
