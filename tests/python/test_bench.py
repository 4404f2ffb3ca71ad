"""The benchmark command, its records, and the page made of them."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = ROOT / "build" / "release" / "specstate"
sys.path.insert(0, str(ROOT / "tools"))
import bench_tables  # noqa: E402
import source_digest  # noqa: E402

CASE = re.compile(r"[a-z0-9_]+/[a-z0-9_]+/[a-z0-9_]+=[^=,/]+(,[a-z0-9_]+=[^=,/]+)*")


def bench(*arguments, **more):
    return subprocess.run([COMMAND, "bench", *arguments], capture_output=True, text=True, timeout=120, **more)


def check_schema(report):
    assert report["device"] and re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    assert report["results"]
    for r in report["results"]:
        assert CASE.fullmatch(r["case"]), r["case"]
        keys = [pair.split("=")[0] for pair in r["case"].split("/")[2].split(",")]
        assert keys == sorted(keys) and len(set(keys)) == len(keys), r["case"]
        assert r["ours_us"] > 0 and r["floor_us"] >= 0 and (r["floor"] or r["floor_us"] == 0)
        assert all(us > 0 for us in r["peers"].values())
        assert re.fullmatch(r"[0-9a-f]{16}", r["source_digest"]) and r["command"]


def test_quick_bench_measures_and_names_its_sources():
    done = bench("matmul", "--device", "cpu", "--quick", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check_schema(report)
    assert "cut_off" not in report
    assert {r["case"].split("/")[0] for r in report["results"]} == {"matmul"}
    assert {r["source_digest"] for r in report["results"]} == {source_digest.digest("matmul")}
    (ceilings,) = report["ceilings"].values()
    assert all(value > 0 for value in ceilings.values())
    assert {r["command"] for r in report["results"]} == {"specstate bench matmul --device cpu --quick"}  # what ran, not what would have been recorded


def test_columns_stand_under_their_names():
    """Names of cases are of any length."""
    lines = bench("draft_kv", "--quick").stdout.splitlines()
    head = next(line for line in lines if line.startswith("case "))
    rows = [line for line in lines if line.startswith("draft_kv/")]
    assert rows and max(len(row.split()[0]) for row in rows) > 64
    ends = [head.index(name) + len(name) for name in (" us", "floor us", "floor/us")]
    for row in rows:
        ours, floor, share = (float(row[:end].split()[-1]) for end in ends)
        assert row[: ends[0]].split()[0] == row.split()[0] and share == pytest.approx(floor / ours, abs=0.006)


def test_help_names_the_families_of_each_device():
    said = bench("--help").stdout
    cpu, gpu = re.search(r"--device cpu: ([\w, ]+); with --device cuda, which needs a GPU: ([\w, ]+);", said).groups()
    assert f"expected {cpu}, or all with --device cpu" in bench("nonsense").stderr
    assert gpu.split(", ") == sorted(p.stem for p in (ROOT / "bench" / "gpu").glob("*.cpp") if "add_gpu_family" in p.read_text())
    assert "--device TEXT=cpu" in said and "floor/us: the share" in said


def test_what_was_measured_before_the_time_is_over_counts():
    cut = bench("matmul", "--quick", "--seconds", "0.001", "--json", "-")
    report = json.loads(cut.stdout)
    assert len(report["results"]) == 1 and report["cut_off"] == {"matmul": 0.001} and "was not measured" in cut.stderr


def test_bad_usage_is_one_line_and_status_2():
    for seconds in ("0", "-1", "nan", "inf", "text"):
        done = bench("matmul", "--quick", "--seconds", seconds)
        assert done.returncode == 2 and f"--seconds: expected a number of seconds from 0.001 to 1000000, got '{seconds}'" in done.stderr
    for arguments in (["nonsense"], ["matmul", "--device", "tpu"], ["matmul", "--quick", "--record"], []):
        done = bench(*arguments)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and not done.stdout, arguments
    assert "expected" in bench("nonsense").stderr and "'nonsense'" in bench("nonsense").stderr


def test_recording_needs_a_checkout(tmp_path):
    done = bench("matmul", "--record", cwd=tmp_path)
    assert done.returncode == 1 and "checkout" in done.stderr and not list(tmp_path.iterdir())


def test_recording_needs_a_checkout_of_these_sources(tmp_path):
    built = json.loads((COMMAND.parent / "source_digests.json").read_text())
    script = tmp_path / "tools" / "source_digest.py"
    script.parent.mkdir()
    for digests, got in (("", "none from"), (json.dumps(dict(built, matmul="0" * 16)), "with 0000000000000000.")):
        script.write_text(f"print({digests!r})")
        done = bench("matmul", "--record", "--seconds", "0.001", cwd=tmp_path)
        assert done.returncode == 1 and "--record: expected" in done.stderr and got in done.stderr and str(tmp_path) in done.stderr
        assert not done.stdout and not (tmp_path / "bench").exists()
    script.write_text(f"print({json.dumps(dict(built, kda='0' * 16))!r})")  # another family's sources have no say
    done = bench("matmul", "--record", "--seconds", "0.001", cwd=tmp_path)
    assert done.returncode == 0 or "--record: expected" not in done.stderr, done.stderr


def test_recorded_results_have_the_schema_and_the_page_is_made_of_them():
    files = list((ROOT / "bench" / "results").glob("*.json"))
    assert files
    for path in files:
        check_schema(json.loads(path.read_text()))
        names = [r["case"] for r in json.loads(path.read_text())["results"]]
        assert len(set(names)) == len(names)
    for name in ("performance.md", "compatibility.md"):
        page = (ROOT / "docs" / name).read_text()
        assert bench_tables.BLOCK.search(page)
        assert bench_tables.undated(bench_tables.render(page)) == bench_tables.undated(page), "run tools/bench_tables.py"


def test_tables_pivot_keys_and_peers(tmp_path, monkeypatch):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(bench_tables.source_digest, "digest", lambda family: {"a": "new"}[family])
    result = lambda case, us, peers: {"case": case, "ours_us": us, "floor_us": us / 2, "floor": "f", "peers": peers, "date": "2026-01-02", "source_digest": "new"}
    recorded = {"device": "D", "date": "2026-01-02", "results": [result("a/b/n=10,x=q", 1234.5, {"P": 2469.0}), result("a/b/n=9,x=q", 2.0, {}), result("a/c/n=1", 1, {})]}
    (tmp_path / "bench" / "results" / "cpu.json").write_text(json.dumps(recorded))
    page = bench_tables.render("before\n<!-- bench cpu a/b -->\nold\n<!-- /bench -->\nafter <!-- bench h200 a/b -->\n<!-- /bench -->", tmp_path)
    assert page == (
        "before\n<!-- bench cpu a/b -->\nD, 2026-01-02; microseconds; x q.\n\n"
        "| n | ours | floor | floor / ours | P (x ours) |\n| --- | --- | --- | --- | --- |\n"
        "| 9 | 2.00 | 1.00 | 0.50 |  |\n| 10 | 1 234 | 617.2 | 0.50 | 2 469 (2.00x) |\n<!-- /bench -->\n"
        "after <!-- bench h200 a/b -->\nNot measured yet.\n<!-- /bench -->"
    )
    assert bench_tables.render(page, tmp_path) == page
    family = bench_tables.render("<!-- bench cpu a -->\n<!-- /bench -->", tmp_path)  # every operation of a family
    assert "| operation | n | x | ours |" in family and "| b | 9 | q | 2.00 |" in family and "| c | 1 |  | 1.00 |" in family


def test_tables_stay_short():
    """What few cases have is a column; of a sweep the ends and the extremes; times without floor or peers a grid."""
    result = lambda case, us, floor: {"case": case, "ours_us": us, "floor_us": floor, "peers": {}, "date": "2026-01-02"}  # noqa: E731
    sweep = [result(f"a/b/k=1,n={n}", 10.0, 9.0 + (n == 7) - (n == 9)) for n in range(1, 31)]
    said = bench_tables.results_table({"device": "D", "results": [*sweep, result("a/b/k=1,mode=x,n=2", 5.0, 1.0)]}, "a/b")
    assert said == (
        "D, 2026-01-02; microseconds; k 1; of 30 values of n the first, the last, the worst and the best.\n\n| n | with | ours | floor | floor / ours |\n| --- | --- | --- | --- | --- |\n"
        "| 1 |  | 10.0 | 9.00 | 0.90 |\n| 2 | mode x | 5.00 | 1.00 | 0.20 |\n| 7 |  | 10.0 | 10.0 | 1.00 |\n| 9 |  | 10.0 | 8.00 | 0.80 |\n| 30 |  | 10.0 | 9.00 | 0.90 |\n"
    )
    grid = [result(f"a/b/m={m},n={n}", 1.0 * m * n, 0) for m in range(1, 22) for n in (1, 2)]
    said = bench_tables.results_table({"device": "D", "results": [*grid, result("a/b/m=1,n=3", 3.0, 2.0)]}, "a/b")
    assert "| 1 | 3 | 3.00 | 2.00 | 0.67 |\n\nOurs alone:\n\n| m | n 1 | n 2 |\n| --- | --- | --- |\n| 1 | 1.00 | 2.00 |\n" in said and said.endswith("| 21 | 21.0 | 42.0 |\n")


def test_every_call_at_a_glance_was_measured():
    recorded = json.loads((ROOT / "bench" / "results" / "h200.json").read_text())
    said = bench_tables.glance_table(recorded)
    for call in [call for calls in bench_tables.GLANCE.values() for call in calls]:
        (row,) = [line for line in said.splitlines() if line.startswith(f"| {call} |")]
        assert len([cell for cell in row.split("|")[2:-1] if cell.strip()]) >= 3, call
    case = next(r for r in recorded["results"] if r["case"] == "kda/fold/accepted=4,heads=12,requests=1")
    assert bench_tables.number(case["ours_us"]) + f" ({case['peers']['sglang 0.5.23'] / case['ours_beside_peers_us']:.2f}x" in said


def test_what_a_step_is_made_of():
    result = lambda part, n, us, peers, **more: {"case": f"step/{part}/context=64,requests={n}", "ours_us": us, "peers": peers, **more}  # noqa: E731
    recorded = {"device": "D", "date": "2026-01-02", "results": [
        result("all", 16, 8.0, {}, state_bytes=3e6),
        result("all", 2, 100.0, {"sglang 1": 400.0}, state_bytes=1.2e9, peer_state_bytes=2e9),
        result("kda_verify", 2, 40.0, {"sglang 1": 300.0}),
        result("windows", 2, 5.0, {}),
    ]}  # fmt: skip
    first, *rows = bench_tables.shares_table(recorded).splitlines()[2:]
    assert first.split(" | ")[2:] == ["a step, µs", "swaps and followers", "KDA verify", "KDA commit", "draft KV", "windows", "acceptance", "state on the GPU, MB |"]
    assert rows[1:] == [
        "| context 64, requests 2 | ours | 100.0 |  | 40 % |  |  | 5 % |  | 1 200 |",
        "| context 64, requests 2 | sglang 1 | 400.0 |  | 75 % |  |  |  |  | 2 000 |",
        "| context 64, requests 16 | ours | 8.00 |  |  |  |  |  |  | 3 |",
    ]


def test_targets_met_and_missed():
    result = lambda case, us, floor, **peers: {"case": case, "ours_us": us, "floor_us": floor, "peers": peers}  # noqa: E731
    swap = "bytes=576,hot=4096,misses=782,requests={},steps=4,top_k=2048"
    recorded = {"device": "D", "date": "2026-01-02", "results": [
        result("hisparse/swap/" + swap.format(1), 16.04, 12.0), result("hisparse/swap/" + swap.format(8), 108.0, 100.0), result("hisparse/swap/" + swap.format(64), 109.0, 100.0),
        result("kda/fold/accepted=1,heads=2", 10.0, 9.1), result("kda/fold/accepted=1,heads=3", 10.0, 8.9),
        result("draft_kv/materialize/hidden=1,layers=7,tokens=255", 9.0, 1.0), *(result(f"draft_kv/materialize/hidden={n},layers={n + n % 2},tokens=256", 11.0 + n, 1.0, **{"cuBLASLt, x": 10.0}) for n in range(8)),
        result("step/kda_verify/requests=32", 3.0, 0, sglang=8.0), result("step/kda_commit/requests=32", 2.0, 0, sglang=2.0)]}  # fmt: skip
    rows = {cells[1]: cells[2:5] for line in bench_tables.targets_table(recorded).splitlines()[4:] for cells in [[cell.strip() for cell in line.split("|")]]}
    assert rows == {
        "HiSparse swap, 782 misses, 1 request: µs": ["≤ 16", "0 of 1", "16.0"],
        "the same from 8 requests on: of the bare gather": ["≤ 1.08", "1 of 2", "1.090 (requests 64)"],
        "KDA fold: of the rate of a plain read and write": ["≥ 0.9", "1 of 2", "0.890 (heads 3)"],
        "draft KV from 256 tokens on: of cuBLASLt's bare product": ["≤ 1.1", "1 of 8", "1.800 (hidden 7); 1.700 (hidden 6); 1.600 (hidden 5); 3 more; by least 1.200 (hidden 1)"],
        "its KDA, 32 and 64 requests: of sglang's": ["≤ 0.5", "1 of 1", ""],
    }
    measured = bench_tables.targets_table(json.loads((ROOT / "bench" / "results" / "h200.json").read_text()))
    assert all(f"| {what} |" in measured for what, *_ in bench_tables.TARGETS), "a target whose cases nobody measures"


def test_two_keys_make_a_grid(tmp_path):
    results = [{"case": f"a/b/m={m},n={n},x=1", "ours_us": 1.0 * m * n, "floor_us": m == 9, "peers": {"P": 3.0} if n == 10 else {}, "source_digest": "", "date": "2026-01-02"} for m in (10, 9) for n in (2, 10)]
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "cpu.json").write_text(json.dumps({"device": "D", "date": "2026-01-02", "results": [*results, {**results[0], "case": "matmul/b/m=10,n=2,x=2"}]}))
    page = bench_tables.render("<!-- bench cpu a/b m n x=1 -->\nold\n<!-- /bench -->", tmp_path)
    assert page == (
        "<!-- bench cpu a/b m n x=1 -->\nD, 2026-01-02; microseconds.\n\n| m | n: | 2 | 10 |\n| --- | --- | --- | --- |\n"
        "| 9 | ours | 18.0 | 90.0 |\n| 9 | floor | 1.00 | 1.00 |\n| 9 | P |  | 3.00 |\n| 10 | ours | 20.0 | 100.0 |\n| 10 | P |  | 3.00 |\n<!-- /bench -->"
    )
    # A key without a value: only cases that do not have it. Ours beside sglang is a line of its own where it is another measurement.
    beside = {**results[0], "case": "a/b/m=7,n=2,x=1", "ours_beside_peers_us": 21.0, "peers": {"sglang": 30.0}}
    recorded = {"device": "D", "date": "2026-01-02", "results": [beside, {**results[0], "case": "a/b/m=7,n=2,x=1,y=5"}]}
    assert bench_tables.grid_table(recorded, "a/b", "m", "n", "x=1", "y=").endswith("| 7 | ours | 20.0 |\n| 7 | ours in turns with sglang | 21.0 |\n| 7 | sglang | 30.0 |\n")


def test_rates_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_tables, "ROOT", tmp_path)
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    row = lambda mode, n, rate, **more: {"mode": mode, "requests": n, "tokens_per_second": rate, **more}  # noqa: E731
    now = source_digest.digest("engine")
    (tmp_path / "docs" / "decisions" / "0013-measured.json").write_text(json.dumps({
        "rates of the engine with a second stream": {"date": "2026-01-02", "source_digest": now, "rows": [
            row("plain", 16, 5000.4, deterministic=True), row("dspark", 1, 70.0, deterministic=False), row("plain", 1, 60.0, deterministic=True)]},
        "ranks": {"date": "2026-01-03", "engine_source_digest": "0", "rows": [row(mode, n, 100.0 * n * ranks, ranks=ranks) for mode in bench_tables.MODES for n in (1, 16) for ranks in (1, 2)]}}))  # fmt: skip
    assert bench_tables.rates_table({"device": "D"}) == (
        "D, 2026-01-02; tokens a second.\n\n| requests | products | plain | DFlash | DSpark |\n| --- | --- | --- | --- | --- |\n"
        "| 1 | row-invariant (`--deterministic`) | 60.0 |  |  |\n| 1 | cuBLASLt's |  |  | 70.0 |\n| 16 | row-invariant (`--deterministic`) | 5 000 |  |  |\n"
    )
    ranks = bench_tables.ranks_table({})
    assert ranks.startswith("Two NVIDIA H200, 2026-01-03 †; tokens a second.") and "| DFlash | 100.0, 200.0 (2.00) | 1 600, 3 200 (2.00) |\n" in ranks


def test_where_sglang_is_faster(tmp_path):
    result = lambda case, us, peers, **more: {"case": case, "ours_us": us, "floor_us": 0, "floor": "", "peers": peers, "date": "2026-01-02", **more}  # noqa: E731
    recorded = {"device": "D", "date": "2026-01-02", "results": [
        result("a/b/n=1,x=q", 1.0, {"sglang 1 chain": 9.0, "sglang 1 fused": 3.0, "other": 0.1}, ours_beside_peers_us=4.0),  # the fastest form; ours beside it
        result("a/b/n=2,x=q", 2.0, {"sglang 1": 1.0}),
        result("a/b/n=3,x=q", 2.0, {"sglang 1": 3.0}),
        result("a/c/n=1", 2.0, {"sglang 1": 2.0}),  # equal is not faster
        result("a/d/n=1", 2.0, {"other": 1.0}),
        result("overhead/e/n=1", 2.0, {"sglang 1": 1.0}),
    ]}  # fmt: skip
    assert bench_tables.sglang_table(recorded) == (
        "D, 2026-01-02; sglang's time divided by ours.\n\n"
        "| kind of call | cells | sglang faster in | worst | best |\n| --- | --- | --- | --- | --- |\n"
        "| `a/b` | 3 | 2: 0.50 (n 2); 0.75 (n 1) | 0.50 (n 2) | 1.50 (n 3) |\n| `a/c` | 1 | none | 1.00 (n 1) | 1.00 (n 1) |\n"
    )


def test_rows_of_older_sources_are_marked_and_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_tables.source_digest, "digest", lambda family: {"a": "new", "binding": "new"}[family])
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    result = lambda case, digest: {"case": case, "ours_us": 2.0, "floor_us": 0, "floor": "", "peers": {}, "date": "2026-01-02", "source_digest": digest}  # noqa: E731
    recorded = {"device": "D", "date": "2026-01-02", "results": [result("a/b/n=1", "new"), result("a/b/n=2", "old"), result("overhead/c/n=1", "new"), result("a/d/n=1", "old")]}
    (folder / "cpu.json").write_text(json.dumps(recorded))
    blocks = "".join(f"<!-- bench cpu {name} -->\n<!-- /bench -->\n" for name in ("a/b", "a/d", "overhead"))
    page = bench_tables.render(blocks, tmp_path)
    assert "| 1 | 2.00 |" in page and "| 2 | 2.00 † |" in page and page.count("†") == 2  # one row of a/b, the whole of a/d, nothing of overhead
    assert page.index("2026-01-02 †; microseconds; n 1") > page.index("bench cpu a/d")
    assert "†" not in bench_tables.undated(page) and bench_tables.render(page, tmp_path) == page

    monkeypatch.setattr(bench_tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "compatibility.md").write_text("")
    (tmp_path / "docs" / "performance.md").write_text(bench_tables.undated(page))  # written when all was new: not false
    assert bench_tables.main(["--check"]) == 0
    assert capsys.readouterr().out == "bench: cpu: 2 of 4 recorded rows are of OLDER sources than these: a 2 of 3\n  a/b/n=2\n  a/d/n=1\n"
    (tmp_path / "docs" / "performance.md").write_text(page.replace("2.00", "1.00"))
    assert bench_tables.main(["--check"]) == 1 and "run tools/bench_tables.py" in capsys.readouterr().err


@pytest.mark.parametrize("changed,families", [
    ("src/cpu/matmul.cpp", {"hisparse", "kda", "draft_kv", "accept", "matmul", "step", "engine", "two_gpus"}),
    ("src/accept/cpu.cpp", {"accept", "step", "engine", "two_gpus"}),
    ("include/specstate/accept.hpp", {"accept", "step", "engine", "two_gpus"}),
    ("cmake/flags.cmake", set(source_digest.FAMILIES)),
    ("README.md", set()),
])
def test_digest_follows_the_sources_of_the_family_alone(tmp_path, changed, families):
    for name in ("src", "include", "cmake"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    before = {f: source_digest.digest(f, tmp_path) for f in source_digest.FAMILIES}
    with open(tmp_path / changed, "a") as file:
        file.write("\n")
    assert {f for f in before if source_digest.digest(f, tmp_path) != before[f]} == families


def test_digest_command_prints_what_the_function_says():
    tool = [sys.executable, ROOT / "tools" / "source_digest.py"]
    assert subprocess.check_output([*tool, "matmul"], text=True).strip() == source_digest.digest("matmul")
    everything = json.loads(subprocess.check_output([*tool, "--all"], text=True))
    assert everything == {f: source_digest.digest(f) for f in source_digest.FAMILIES}
    assert subprocess.run(tool, capture_output=True).returncode == 2


def test_a_gpu_run_is_recorded_with_its_peers(tmp_path):
    import gpu_bench

    (tmp_path / "bench" / "results").mkdir(parents=True)
    entry = {"floor_us": 1.0, "floor": "f", "source_digest": "0" * 16, "date": "2026-11-30", "command": "c"}
    run = lambda us: {"device": "NVIDIA H200", "date": "2026-11-30", "ceilings": {"read_gbs": 4486.04, "launch_us": 2.96},  # noqa: E731
                      "results": [{"case": "kda/fold/heads=12", "ours_us": us, "peers": {}, **entry}]}  # fmt: skip
    peers = {"kda/fold/heads=12": {"ours_us": 2.1, "peers": {"sglang": 8.0}}, "kda/verify/heads=1": {"ours_us": 3.0, "peers": {"sglang": 6.0}},
             "kda/verify/heads=2": {"ours_us": None, "peers": {"sglang": 6.0}}}  # fmt: skip
    path = gpu_bench.record(gpu_bench.with_peers(run(4.0), {}), tmp_path)
    assert path == gpu_bench.record(gpu_bench.with_peers(run(2.0), peers), tmp_path) and path.name == "h200.json"
    fold, verify = json.loads(path.read_text())["results"]
    assert (fold["ours_us"], fold["peers"], fold["ours_beside_peers_us"]) == (2.0, {"sglang": 8.0}, 2.1)
    assert (verify["case"], verify["ours_us"], verify["peers"]) == ("kda/verify/heads=1", 3.0, {"sglang": 6.0})
    page = bench_tables.render("<!-- bench h200 ceilings -->\n<!-- /bench -->\n<!-- bench h200 kda/fold -->\n<!-- /bench -->", tmp_path)
    assert "| read | 4486.0 | GB/s |" in page and "| 2.00 | 1.00 | 0.50 | 8.00 (3.81x) |" in page  # 8.0 / 2.1: of the turns
