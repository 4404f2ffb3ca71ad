"""Random calls, wrong and garbled: programs of their own, so that a crash is a failure. All of them run at the same time, while the tests wait."""

import concurrent.futures
import os
import subprocess
import sys

import conftest
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

SEEDS = (1, 2)
PROGRAMS = {
    "of CPU tensors from threads": ("python/binding_robustness.py", "4", "250", "torch"),  # what tests/python/test_binding_robustness.py does, with torch tensors
    "that nobody should make": ("gpu/gpu_calls.py", "250"),
}


@pytest.fixture(scope="module")
def said(gpu):
    """said(kind, seed): the numbers that the program ends with."""
    tests = conftest.ROOT / "tests"
    path = os.pathsep.join([str(conftest.ROOT / "python"), str(tests / "python"), str(tests / "gpu"), *filter(None, sys.path)])

    def run(kind, seed):
        program, *arguments = PROGRAMS[kind]
        return subprocess.run([sys.executable, "-X", "faulthandler", str(tests / program), str(seed), *arguments], capture_output=True, text=True, timeout=300,
                              env=dict(os.environ, PYTHONPATH=path, SPECSTATE_NUM_THREADS="2"))  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = {(kind, seed): pool.submit(run, kind, seed) for kind in PROGRAMS for seed in SEEDS}

        def wait(kind, seed):
            done = running[kind, seed].result()
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            return map(int, done.stdout.split())

        yield wait


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_of_cpu_tensors_from_threads(said, seed):
    taken, refused, compared = said("of CPU tensors from threads", seed)
    assert taken + refused == 1000 and refused > 250 and compared > 150


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_that_nobody_should_make(said, seed):
    taken, refused, _ = said("that nobody should make", seed)
    assert taken > 30 and refused > 30 and taken + refused == 250
