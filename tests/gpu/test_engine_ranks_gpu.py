"""`specstate generate --tensor-parallel` on two GPUs: the tokens and states of one, one copy of the host's rows, and every way in which a rank can go."""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = ROOT / "build" / "release" / "specstate"
PROMPTS = sorted((ROOT / "models" / "specstate-bytes" / "prompts").glob("*.txt"))


def nccl_folders():
    """torch brings the library in a folder that no loader looks into."""
    spec = importlib.util.find_spec("nvidia")
    return [str(folder) for place in (spec.submodule_search_locations if spec else []) if (folder := pathlib.Path(place) / "nccl" / "lib").is_dir()]


def environment():
    folders = [str(ROOT / "build" / "release" / "lib"), *nccl_folders(), os.environ.get("LD_LIBRARY_PATH")]
    return dict(os.environ, LD_LIBRARY_PATH=os.pathsep.join(filter(None, folders)), NCCL_NVLS_ENABLE="0")


@pytest.fixture(autouse=True, scope="module")
def two_gpus(gpu):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs-two-gpus: torch sees {torch.cuda.device_count()}")
    if not nccl_folders():
        pytest.skip("needs-nccl: no libnccl.so.2 beside torch")


def call(*args, status=0):
    result = subprocess.run([COMMAND, "generate", *map(str, args), "--device", "cuda"], capture_output=True, timeout=120, env=environment())
    assert result.returncode == status, result.stderr.decode(errors="replace")
    return result


def generate(*args, ranks, status=0):
    return json.loads(call(*args, "--tensor-parallel", ranks, "--json", "-", status=status).stdout)


def on_one_and_two(*arguments):
    """Both at the same time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda ranks: generate(*arguments, ranks=ranks), (1, 2)))


def files(prompts):
    return [x for p in prompts for x in ("--prompt-file", p)]


@pytest.mark.parametrize("mode", ["plain", "dflash", "dspark"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_tokens_and_states_are_those_of_one_card(mode, temperature):
    arguments = (*files(PROMPTS[:5]), "--mode", mode, "--temperature", temperature, "--seed", 4, "--max-new-tokens", 48, "--deterministic",
                 "--start-steps", "0,3,1", "--drop-steps", "-1,-1,-1,5")
    one, two = on_one_and_two(*arguments)
    for key in ("tokens", "text", "finish", "state_digest", "steps"):
        assert [r[key] for r in one["requests"]] == [r[key] for r in two["requests"]], key
    assert one["accepted_lengths"] == two["accepted_lengths"] and one["kda"] == two["kda"] and one["hisparse"] == two["hisparse"]
    assert two["gpu"]["ranks"] == 2
    assert abs(two["gpu"]["pinned_bytes"] - one["gpu"]["pinned_bytes"]) < 1024, "the host's rows are there once"


def test_lossless_after_every_step():
    for force in ((), ("--force-accept", 3)):
        report = generate(*files(PROMPTS[5:9]), "--mode", "dspark", "--max-new-tokens", 32, "--check-lossless", *force, ranks=2)
        assert report["lossless"] is True and report["mean_accepted_length"] > (2.5 if force else 1)


def test_small_hot_buffers_read_the_common_rows():
    prompt = sorted(PROMPTS, key=lambda p: p.stat().st_size)[-3]
    arguments = (*files([prompt]), "--mode", "dflash", "--max-new-tokens", 32, "--deterministic", "--hot-slots", 64, "--chunk", 300)
    one, two = on_one_and_two(*arguments)
    assert one["tokens"] == two["tokens"] and one["requests"][0]["state_digest"] == two["requests"][0]["state_digest"]
    assert two["hisparse"]["misses"] == one["hisparse"]["misses"] > 0


def test_the_librarys_products_and_auto():
    """Split products of cuBLASLt need not have one card's bits; the ranks must still agree, or this would hang."""
    report = generate("--prompt", "In the beginning", "--max-new-tokens", 120, ranks=2)
    assert len(report["tokens"]) == 120 and report["note"].startswith("auto: ")
    assert report["gpu"]["products"] == "cuBLASLt"


def children(pid):
    return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_run(rank):
    arguments = ["generate", "--prompt", "In the beginning", "--max-new-tokens", "8000", "--mode", "plain", "--deterministic", "--device", "cuda"]
    p = subprocess.Popen([COMMAND, *arguments, "--tensor-parallel", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    first = p.stdout.read(64)  # it decodes
    ranks = children(p.pid)
    assert len(ranks) == 2
    os.kill(ranks[rank], signal.SIGKILL)
    begin = time.monotonic()
    rest, errors = p.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert p.returncode == 1
    assert errors.decode() == f"specstate: rank {rank} of 2 was ended by signal 9 (Killed).\n"
    assert not any(pathlib.Path(f"/proc/{r}").exists() for r in ranks)
    # What was written is the beginning of the right text.
    good = subprocess.run([COMMAND, *arguments], capture_output=True, timeout=120, env=environment()).stdout
    assert good.startswith(first + rest) and len(first) == 64


def test_ranks_do_not_outlive_the_command():
    p = subprocess.Popen([COMMAND, "generate", "--prompt", "a", "--max-new-tokens", "8000", "--mode", "plain", "--device", "cuda", "--tensor-parallel", "2"],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
    p.stdout.read(16)
    ranks = children(p.pid)
    p.kill()
    p.wait()
    for _ in range(200):
        if not any(pathlib.Path(f"/proc/{r}").exists() for r in ranks):
            return
        time.sleep(0.1)
    raise AssertionError(f"{ranks} still run")


def test_more_ranks_than_gpus():
    import torch

    if torch.cuda.device_count() >= 3:
        pytest.skip("needs-fewer-gpus: the embedded model splits for at most three")
    assert b"--tensor-parallel: expected 3 GPUs (one a rank), got 2." in call("--prompt", "a", "--tensor-parallel", 3, status=1).stderr
