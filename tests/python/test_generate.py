"""`specstate generate` and `specstate doctor` as a user calls them: the embedded model, real prompts, exit statuses, reports."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = ROOT / "build" / "release" / "specstate"
MODEL = ROOT / "models" / "specstate-bytes"
PROMPTS = sorted((MODEL / "prompts").glob("*.txt"))


def call(*args, status=0, **kwargs):
    result = subprocess.run([COMMAND, *map(str, args)], capture_output=True, timeout=300, **kwargs)
    assert result.returncode == status, result.stderr.decode(errors="replace")
    return result


def generate(*args, status=0):
    return json.loads(call("generate", *args, "--json", "-", status=status).stdout)


def same(a, b):
    keys = ("tokens", "text", "finish", "state_digest")
    return [[r[k] for k in keys] for r in a["requests"]] == [[r[k] for k in keys] for r in b["requests"]]


def domains():
    """One short prompt of every domain, and a long one."""
    by_domain = {}
    for p in PROMPTS:
        by_domain.setdefault(p.stem.split("-")[1], []).append(p)
    chosen = [min(group, key=lambda p: p.stat().st_size) for group in by_domain.values()]
    return [*chosen, sorted(PROMPTS, key=lambda p: p.stat().st_size)[-4]]


def batch_of(prompts):
    return [x for p in prompts for x in ("--prompt-file", p)]


# ------------------------------------------------------------------------------------------------ lossless

@pytest.mark.parametrize("mode", ["dflash", "dspark"])
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("force", [None, 1, 2, 4, 7, 8])
def test_lossless(mode, temperature, force):
    forced = ["--force-accept", force] if force else []
    report = generate(*batch_of(domains()), "--mode", mode, "--temperature", temperature, "--seed", 3, "--max-new-tokens", 48,
                      "--check-lossless", *forced)
    assert report["lossless"] is True
    assert all(r["lossless"] for r in report["requests"])
    assert report["hisparse"]["misses"] > 0 and report["hisparse"]["host_bytes_copied"] == report["hisparse"]["misses"] * 2 * 160
    if force:
        # Every step but the last ones commits exactly so many.
        assert report["accepted_lengths"][force] >= report["steps"] - 2 * len(report["requests"])


def test_auto_is_lossless_and_says_why():
    report = generate(*batch_of(domains()), "--max-new-tokens", 64, "--check-lossless")
    assert report["lossless"] is True
    assert report["mode"] == "auto" and report["mostly"] in ("plain", "dflash", "dspark") and report["note"].startswith("auto: ")
    assert report["costs"]["plain_seconds"] > 0 and report["costs"]["dspark_draft_seconds"] > 0 and report["costs"]["verify_seconds"][8] > 0
    assert same(report, generate(*batch_of(domains()), "--max-new-tokens", 64, "--mode", "plain"))


def test_the_recorded_matrix_is_complete_and_lossless():
    evidence = json.loads((ROOT / "tests" / "evidence" / "lossless_matrix.json").read_text())
    assert len(evidence["prompts"]) == 50 and evidence["not_lossless"] == 0
    cells = {(c["mode"], c["temperature"], c["force_accept"]): c for c in evidence["cells"]}
    assert set(cells) == {(m, t, f) for m in ("dflash", "dspark") for t in (0, 0.8) for f in range(9)}
    assert all(c["prompts"] == c["lossless"] == 50 for c in cells.values())
    for (_, _, force), cell in cells.items():
        if force:
            assert cell["accepted_lengths"][force] >= 0.9 * (cell["steps"] - 100)


def test_the_matrix_recorded_on_a_gpu_is_complete_and_lossless():
    evidence = json.loads((ROOT / "tests" / "evidence" / "lossless_matrix_cuda.json").read_text())
    assert len(evidence["prompts"]) == 50 and evidence["not_lossless"] == 0 and evidence["device"]
    cells = {(c["mode"], c["temperature"], c["force_accept"], c["at_once"]): c for c in evidence["cells"]}
    kinds = [(m, t) for m in ("dflash", "dspark") for t in (0, 0.8)]
    assert set(cells) >= {(m, t, f, 16) for m, t in kinds for f in range(9)} and {n for *_, n in cells} == set(range(1, 17)) and len(cells) == 51
    for (_, _, force, _), cell in cells.items():
        assert cell["prompts"] == cell["lossless"] == 50
        if force:
            assert cell["accepted_lengths"][force] >= 0.8 * (cell["steps"] - 100)
    assert sum(c["dropped"] > 0 for c in cells.values()) > 40


def test_speculation_accepts_several_tokens_on_real_text():
    for mode in ("dflash", "dspark"):
        report = generate(*batch_of(PROMPTS[::9]), "--mode", mode, "--max-new-tokens", 96)
        assert report["mode"] == mode
        assert report["mean_accepted_length"] > 2.0
        assert report["committed_tokens"] == sum(len(r["tokens"]) - 1 for r in report["requests"])


# ------------------------------------------------------------------------------------------------ what must not matter

@pytest.mark.parametrize("mode", ["plain", "dflash", "dspark"])
def test_residency_never_changes_a_bit(mode):
    prompt = max(PROMPTS, key=lambda p: p.stat().st_size)
    reports = [generate("--prompt-file", prompt, "--mode", mode, "--max-new-tokens", 64, "--hot-slots", h) for h in (64, 96, 4096)]
    assert same(reports[0], reports[1]) and same(reports[0], reports[2])
    misses = [r["hisparse"]["misses"] for r in reports]
    assert misses[0] > misses[1] > misses[2] == 0  # what fits was resident from the prefill on


@pytest.mark.parametrize("mode", ["plain", "dspark"])
def test_the_prefill_chunk_never_changes_a_bit(mode):
    prompt = sorted(PROMPTS, key=lambda p: p.stat().st_size)[len(PROMPTS) // 2]
    reports = [generate("--prompt-file", prompt, "--mode", mode, "--max-new-tokens", 32, "--chunk", c) for c in (1, 64, 100, 5000)]
    assert all(same(reports[0], r) for r in reports[1:])


@pytest.mark.parametrize("mode", ["plain", "dflash", "dspark"])
def test_a_request_does_not_depend_on_its_batch(mode):
    prompts = domains()
    options = ("--mode", mode, "--temperature", 1, "--seed", 5, "--max-new-tokens", 40)
    together = generate(*batch_of(prompts), *options)
    for prompt, request in zip(prompts, together["requests"]):
        alone = generate("--prompt-file", prompt, *options)["requests"][0]
        assert alone["tokens"] == request["tokens"] and alone["state_digest"] == request["state_digest"]


def test_the_thread_count_never_changes_a_bit():
    reports = []
    for threads in ("1", "3"):
        env = {**os.environ, "SPECSTATE_NUM_THREADS": threads}
        out = call("generate", *batch_of(domains()[:2]), "--mode", "dflash", "--max-new-tokens", 40, "--json", "-", env=env).stdout
        reports.append(json.loads(out))
    assert same(*reports)


# ------------------------------------------------------------------------------------------------ ends

@pytest.mark.parametrize("mode", ["plain", "dflash", "dspark", "auto"])
def test_max_new_tokens(mode):
    longest = generate("--prompt", "In the beginning", "--mode", "plain", "--max-new-tokens", 12)["tokens"]
    for n in (1, 2, 3, 9):
        report = generate("--prompt", "In the beginning", "--mode", mode, "--max-new-tokens", n)
        assert report["tokens"] == longest[:n]
        assert report["requests"][0]["finish"] == "length"


@pytest.mark.parametrize("mode", ["plain", "dflash", "dspark"])
def test_a_stop_token_inside_a_step(mode, tmp_path):
    tokens = generate("--prompt", "In the beginning", "--mode", "plain", "--max-new-tokens", 40)["tokens"]
    stop = tokens.index(tokens[20])  # the first place of a byte that comes up in mid-run
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = tokens[stop]
    (model / "config.json").write_text(json.dumps(config))
    report = generate("--prompt", "In the beginning", "--model", model, "--mode", mode, "--max-new-tokens", 40, "--check-lossless")
    assert report["tokens"] == tokens[: stop + 1] and report["requests"][0]["finish"] == "eos"
    assert report["lossless"] is True


@pytest.mark.parametrize("mode", ["plain", "dflash"])
def test_the_end_of_the_context(mode, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["model_max_length"] = 80
    (model / "config.json").write_text(json.dumps(config))
    report = generate("--prompt", "x" * 70, "--model", model, "--mode", mode, "--max-new-tokens", 40, "--check-lossless")
    assert len(report["tokens"]) == 9 and report["requests"][0]["finish"] == "context" and report["lossless"] is True
    both = call("generate", "--prompt", "x" * 70, "--prompt", "x", "--model", model, "--mode", mode, "--max-new-tokens", 40).stderr.decode()
    assert "1 of 2 prompts at the limit of --max-new-tokens, 1 of 2 prompts because the model's context of 80 positions is full" in both  # and not a word less than was asked for
    error = call("generate", "--prompt", "x" * 79, "--model", model, status=1).stderr.decode()
    assert "prompt 1: expected at most 78 bytes" in error and "got 79" in error


# ------------------------------------------------------------------------------------------------ the command

def test_text_goes_to_stdout_and_the_report_to_stderr(tmp_path):
    json_file = tmp_path / "report.json"
    result = call("generate", "--prompt", "In the beginning", "--mode", "dspark", "--max-new-tokens", 32, "--json", json_file)
    report = json.loads(json_file.read_text())
    assert result.stdout == bytes(report["tokens"]) + b"\n"
    assert report["text"].encode() == bytes(report["tokens"])
    assert b"dspark" in result.stderr and b"hisparse" in result.stderr and b"\r" not in result.stderr
    for key in ("text", "tokens", "mode", "steps", "committed_tokens", "mean_accepted_length", "tokens_per_second"):
        assert key in report
    assert set(report["hisparse"]) >= {"hits", "misses", "hit_rate", "host_bytes_copied", "hot_slots", "top_k"}
    assert set(report["kda"]) >= {"state_bytes", "ring_bytes", "snapshot_bytes_avoided"}
    assert set(report["draft_kv"]) >= {"tokens_materialized", "bytes_written"}
    assert report["hisparse"]["hot_slots"] == 96 and report["hisparse"]["top_k"] == 64


def test_bytes_come_out_as_they_are():
    """At a high temperature the text is no UTF-8; stdout has the bytes, JSON replaces them in `text` and is exact in `tokens`."""
    args = ("--prompt", "x", "--mode", "plain", "--temperature", 30, "--seed", 1, "--max-new-tokens", 60)
    report = generate(*args)
    data = bytes(t for t in report["tokens"] if t < 256)
    with pytest.raises(UnicodeDecodeError):
        data.decode()
    assert call("generate", *args).stdout == data + b"\n"


def test_sampled_proposals_run():
    report = generate("--prompt", "In the beginning", "--mode", "dspark", "--proposal", "sampled", "--temperature", 0.7, "--max-new-tokens", 64)
    assert len(report["tokens"]) == 64 and report["mean_accepted_length"] > 1


USAGE = [
    ([], "expected one of the subcommands"),
    (["frobnicate"], "expected one of the subcommands generate, bench and doctor, got 'frobnicate'"),
    (["plan"], "got 'plan'"),
    (["--frob"], "expected a known option, got '--frob'"),
    (["generate"], "expected --prompt TEXT or --prompt-file FILE, got neither"),
    (["generate", "--prompt", "a", "--frob"], "expected a known option, got '--frob'"),
    (["generate", "--prompt", "a", "--mode", "medusa"], "--mode: expected one of auto, plain, dflash, dspark, got 'medusa'"),
    (["generate", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: expected an integer from 1 to 1073741824, got '0'"),
    (["generate", "--prompt", "a", "--max-new-tokens", "many"], "--max-new-tokens: expected an integer from 1 to 1073741824, got 'many'"),
    (["generate", "--prompt", "a", "--temperature", "-1"], "--temperature: expected a number from 0 (greedy) to 1000000, got '-1'"),
    (["generate", "--prompt", "a", "--temperature", "nan"], "--temperature: expected a number from 0 (greedy) to 1000000, got 'nan'"),
    (["generate", "--prompt", "a", "--seed", "-3"], "--seed: expected an integer of 0 or more, got '-3'"),
    (["generate", "--prompt", "a", "--device", "tpu"], "--device: expected one of cpu, cuda, got 'tpu'"),
    (["generate", "--prompt", "a", "--tensor-parallel", "0"], "--tensor-parallel: expected an integer from 1 to 64, got '0'"),
    (["generate", "--prompt", "a", "--tensor-parallel", "two"], "--tensor-parallel: expected an integer from 1 to 64, got 'two'"),
    (["generate", "--prompt", "a", "--tensor-parallel", "2"], "--tensor-parallel: expected --device cuda, got cpu"),
    (["generate", "--prompt", "a", "--device", "cuda", "--tensor-parallel", "4"], "--tensor-parallel: expected an integer from 1 to 3 (a head of each kind of this model a rank), got '4'"),
    (["generate", "--prompt", "a", "--force-accept", "2"], "--force-accept: expected --mode dflash or dspark, got auto"),
    (["generate", "--prompt", "a", "--proposal", "sampled"], "--proposal sampled: expected --temperature above 0"),
    (["generate", "--prompt", "a", "--hot-slots", "3"], "--hot-slots: expected an integer from 64 (what this model selects at once) to 1048576, got '3'"),
    (["doctor", "--frob"], "expected a known option, got '--frob'"),
]


@pytest.mark.parametrize("args,text", USAGE, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_bad_usage_is_one_line_and_status_2(args, text):
    result = call(*args, status=2)
    assert text in result.stderr.decode() and result.stderr.count(b"\n") == 1 and result.stdout == b""


def test_help():
    assert b"generate" in call("--help").stdout
    for command in ("generate", "bench", "doctor"):
        assert b"--json" in call(command, "--help").stdout
    text = call("generate", "--help").stdout.decode()
    option = lambda name: next(line for line in text.splitlines() if line.strip().startswith(f"--{name} "))  # noqa: E731
    assert all(mode in option("mode") for mode in ("auto", "plain", "dflash", "dspark"))
    assert all(device in option("device") for device in ("cpu", "cuda"))


def test_failures_are_one_line_and_status_1(tmp_path):
    def error(*args):
        result = call("generate", *args, status=1)
        assert result.stderr.count(b"\n") == 1 and result.stdout == b""
        return result.stderr.decode()

    assert "found no config.json" in error("--prompt", "a", "--model", tmp_path)
    assert "No such file" in error("--prompt-file", tmp_path / "nothing")
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it: reading it would never end
    assert "fifo: expected a regular file." in error("--prompt-file", tmp_path / "fifo")
    # The parent reads the configuration before it makes processes.
    assert "config.json" in error("--prompt", "a", "--model", tmp_path, "--device", "cuda", "--tensor-parallel", "2")
    # Known before the work, so no text comes first.
    assert "--json: cannot create" in error("--prompt", "a", "--json", tmp_path / "nothing" / "report.json")
    assert "--json: cannot create" in error("--prompt", "a", "--json", tmp_path)
    assert "--device cuda" in error("--prompt", "a", "--device", "cuda")
    assert "prompt 1: expected at most 8190 bytes" in error("--prompt-file", _file(tmp_path, b"x" * 9000))

    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "is the file truncated?" in error("--prompt", "a", "--model", model)
    (model / "model.safetensors").write_bytes(b"")
    assert "expected at least 8 bytes" in error("--prompt", "a", "--model", model)
    (model / "model.safetensors").write_bytes(weights)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 193}))
    assert "tensor 'model.embed_tokens.weight': expected bfloat16 [264, 193], got bfloat16 [264, 192]" in error("--prompt", "a", "--model", model)
    (model / "config.json").write_text(json.dumps(config))
    shutil.rmtree(model / "dflash")
    assert "mode: expected a drafter that the model folder has, got dflash" in error("--prompt", "a", "--model", model, "--mode", "dflash")


def _file(folder, content):
    path = folder / "prompt"
    path.write_bytes(content)
    return path


def test_doctor():
    report = json.loads(call("doctor", "--json", "-").stdout)
    assert report["model"]["usable"] is True and "drafter dflash, drafter dspark" in report["model"]["state"]
    assert report["cpu"]["threads"] >= 1 and report["cpu"]["simd"]
    assert isinstance(report["gpu"]["devices"], list) and isinstance(report["missing"], list)
    assert bool(report["gpu"]["devices"]) != bool(report["gpu"]["problem"])
    text = call("doctor").stdout.decode()
    assert report["cpu"]["simd"] in text and "model" in text
    assert "AVX3" not in text  # Highway's name of what everyone else calls AVX-512


def test_doctor_tells_the_compilers_apart():
    build = json.loads(call("doctor", "--json", "-").stdout)["build"]
    lines = {line[:14].strip(): line[14:] for line in call("doctor").stdout.decode().splitlines()}
    assert re.fullmatch(r"(g\+\+|.*[Cc]lang) .*\d", build["compiler"]) and lines["specstate"].endswith(f"C++ by {build['compiler']}")
    assert ("CUDA" in lines) == build["cuda"] == bool(build["cuda_toolkit"]) == bool(build["cuda_targets"])
    if build["cuda"]:
        commands = (COMMAND.parent / "compile_commands.json").read_text()
        assert {t for t in build["cuda_targets"].split(", ")} == set(re.findall(r"code=(sm_\w+)", commands))
        major = build["cuda_toolkit"].split(".")[0]
        assert re.fullmatch(r"1\d\.\d+\.\d+", build["cuda_toolkit"]) and build["driver_needed"].startswith(f"a driver for CUDA {major}")
        assert lines["CUDA"] == f"kernels for {build['cuda_targets']} by toolkit {build['cuda_toolkit']}; needs {build['driver_needed']}"


@pytest.mark.parametrize("args", [("doctor",), ("doctor", "--json", "-"), ("generate", "--prompt", "a", "--max-new-tokens", 2)])
def test_lost_output_is_a_failure(args):
    with open("/dev/full", "wb") as full:
        result = subprocess.run([COMMAND, *map(str, args)], stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert result.returncode == 1 and b"cannot write" in result.stderr


@pytest.mark.parametrize("args", [("doctor", "--model"), ("doctor", "--json"), ("generate", "--prompt", "a", "--model"), ("bench", "kda", "--json")])
def test_empty_names_are_bad_usage(args):
    result = call(*args, "", status=2)
    assert result.stderr.count(b"\n") == 1 and b"expected a name, got ''" in result.stderr and result.stdout == b""


def test_doctor_names_a_broken_model(tmp_path):
    result = call("doctor", "--model", tmp_path, status=1)
    assert b"found no config.json" in result.stdout


@pytest.mark.parametrize(
    "option, values, lowest",
    [("--start-steps", "0,2147483647", 0), ("--start-steps", "-1", 0), ("--start-steps", "1.5", 0), ("--drop-steps", "-2", -1), ("--drop-steps", "1048577", -1)],
)
def test_steps_have_bounds(option, values, lowest):
    """Waiting for a step that never comes would wait for ever."""
    wrong = values.rpartition(",")[2]
    error = call("generate", "--prompt", "a", f"{option}={values}", status=2).stderr.decode()
    assert option in error and f"expected integers from {lowest} to 1048576, got '{wrong}'" in error
    assert generate("--prompt", "ab", "--max-new-tokens", 2, f"{option}={max(lowest, 0)}")["requests"]
