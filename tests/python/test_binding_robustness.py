"""The binding under calls that nobody should make: an exception or the right result, never a crash, never a leak."""

import gc
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tvm_ffi
from calls import CALLS, leaves, operation, replace

import specstate
from specstate import accept

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_from_threads(seed, arrays):
    pytest.importorskip(arrays, reason=f"needs-{arrays}: {arrays} is no requirement")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [ROOT / "python", HERE, *filter(None, sys.path)])), SPECSTATE_NUM_THREADS="2")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", HERE / "binding_robustness.py", str(seed), "4", "250", arrays],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr[-4000:]}"
    taken, refused, compared = map(int, done.stdout.split())
    assert taken + refused == 1000 and refused > 250 and compared > 150


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_daemon_threads_end_with_the_interpreter(arrays):
    """Threads that call without pause while the program ends: it ends, and well."""
    pytest.importorskip(arrays, reason=f"needs-{arrays}: {arrays} is no requirement")
    code = """
import sys, threading
from binding_robustness import as_torch
import tvm_ffi
from calls import CALLS, leaves, operation, replace

import specstate
def work(name, begun):
    arguments = CALLS[name]()
    arguments = as_torch(arguments) if sys.argv[1] == "torch" else arguments
    while True:
        operation(name)(**arguments)
        begun.set()
begun = [threading.Event() for _ in range(4)]
for name, event in zip(["load_cache_to_device_buffer_spec_mla", "verify", "verify_greedy", "swap_in"], begun):
    threading.Thread(target=work, args=(name, event), daemon=True).start()
for event in begun:
    event.wait()
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [ROOT / "python", HERE, *filter(None, sys.path)])))
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code, arrays], capture_output=True, text=True, env=environment, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


class Plain:
    """An array that has what DLPack asks for and no more, as those of frameworks that nobody here knows."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


@pytest.mark.parametrize("kind", [Plain, tvm_ffi.from_dlpack])
@pytest.mark.parametrize("name", [n for n in CALLS if n != "transfer_cache_dsv4_mla"])  # its arguments hold addresses
def test_arrays_of_any_framework(name, kind):
    want, call = CALLS[name](), CALLS[name]()
    crossing = call
    for path, x in leaves(call):
        crossing = replace(crossing, path, kind(x))
    operation(name)(**want)
    assert specstate.supports(name, **crossing) == (True, "")
    operation(name)(**crossing)
    for (path, x), (_, y) in zip(leaves(want), leaves(call), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def rss():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_kept():
    """20 000 calls, a third of them refused, some through aliases of read-only and ml_dtypes arrays: neither objects nor memory stay."""
    import ml_dtypes

    good = CALLS["verify_greedy"]()
    fixed = {**good, "candidates": good["candidates"].copy()}
    fixed["candidates"].flags.writeable = False
    bad = {**good, "target_argmax": good["target_argmax"].astype(np.float32)}
    sampled = CALLS["verify_rejection"]()
    sampled["target_probs"] = sampled["target_probs"].astype(ml_dtypes.bfloat16)
    sampled["draft_probs"] = sampled["draft_probs"].astype(ml_dtypes.bfloat16)
    greedy, rejection = operation("verify_greedy"), operation("verify_rejection")

    def calls(n):
        for _ in range(n):
            greedy(**good)
            greedy(**fixed)
            rejection(**sampled)
            for wrong in (bad, {**good, "candidates": None}):
                with pytest.raises((ValueError, TypeError)):
                    greedy(**wrong)

    calls(400)  # caches fill
    gc.collect()
    objects, memory = len(gc.get_objects()), rss()
    references = [sys.getrefcount(x) for x in (good["candidates"], fixed["candidates"], sampled["target_probs"])]
    calls(4000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
    assert rss() - memory < 8 * 2**20
    assert references == [sys.getrefcount(x) for x in (good["candidates"], fixed["candidates"], sampled["target_probs"])]


FORKS = """
import os, signal, sys, threading
import numpy as np
from specstate import draft_kv
rng = np.random.default_rng(0)
f = lambda *shape: rng.standard_normal(shape).astype(np.float32)
a = dict(ctx_hidden=f(256, 256), kv_weight=f(4, 512, 256), k_norm_weight=f(4, 64), eps=np.full(4, 1e-6, np.float32), cos_sin_cache=f(300, 64),
         positions=np.arange(256), slot_mapping=np.arange(256))
def work():
    pools = [np.zeros((4, 256, 4, 64), np.float32) for _ in range(2)]
    draft_kv.materialize_into_pool(**a, k_pool=pools[0], v_pool=pools[1])
    return [p.tobytes() for p in pools]
want, stop = work(), False
def busy():
    while not stop:
        work()
threads = [threading.Thread(target=busy) for _ in range(2)]
for t in threads:
    t.start()
failed = 0
for _ in range(8):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if work() == want and work() == want else 7)
    failed += os.waitpid(child, 0)[1] != 0
stop = True
for t in threads:
    t.join()
sys.exit(failed)
"""


def test_children_of_a_fork_while_threads_compute():
    """A child has the caller's thread only: it computes with that, the same bits, and waits for nobody."""
    env = dict(os.environ, PYTHONPATH=str(ROOT / "python"), SPECSTATE_NUM_THREADS="4")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], env=env, check=True, timeout=200)


FIRST_CALLS = """
import sys, threading, types
sys.path[:0] = sys.argv[1:]
import numpy as np
from specstate import accept
sys.setswitchinterval(1e-6)
a, begin, failed = np.ones((2, 4), np.int32), threading.Barrier(8), []

def call():
    begin.wait()
    try:
        out = np.zeros(2, np.int32), np.zeros((2, 4), np.int32)
        accept.verify_greedy(a, a.copy(), out=out)
        assert out[0].tolist() == [4, 4]
    except BaseException as error:
        failed.append(repr(error))

threads = [threading.Thread(target=call) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
# frameworks that another thread is only beginning to import
sys.modules["torch"], sys.modules["cupy"] = types.ModuleType("torch"), types.ModuleType("cupy")
begin = threading.Barrier(1)
call()
sys.exit("; ".join(failed) or 0)
"""


def test_first_calls_of_many_threads():
    """Whoever comes while another thread loads the library waits; a half imported framework is none."""
    for _ in range(12):
        done = subprocess.run([sys.executable, "-c", FIRST_CALLS, str(ROOT / "python")], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


FORK_WHILE_LOADING = """
import os, signal, sys, threading, time
sys.path[:0] = sys.argv[1:]
sys.modules["torch"] = None  # tvm-ffi would import it, and Python reports what registers for forks while one waits (docs/compatibility.md)
import numpy as np
from specstate import accept
a = np.ones((2, 4), np.int32)

class Slow:
    begun = threading.Event()
    def find_spec(self, name, path=None, target=None):
        if name == "tvm_ffi":
            self.begun.set()
            time.sleep(0.3)

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=accept.verify_greedy, args=(a, a))
thread.start()
Slow.begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if accept.verify_greedy(a, a)[0].tolist() == [4, 4] else 7)
thread.join()
sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def test_children_of_a_fork_while_another_thread_loads():
    """The child of a fork finds no import that a thread which it does not have was in the middle of."""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK_WHILE_LOADING, str(ROOT / "python")], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


ONE_COORDINATOR = """
import random, sys, threading
sys.path[:0] = sys.argv[1:]
import numpy as np
from specstate import hisparse
sys.setswitchinterval(1e-5)
buffers = [[np.zeros((4096, 8), np.uint8)] for _ in range(2)]
c = hisparse.Coordinator(*buffers, requests=8, hot=8, window=4, context=400)
tokens, lens = np.array([[[1, 2, 3]]], np.int32), np.array([[5]], np.int32)
failed = []

def work(seed):
    draw = random.Random(seed)
    for _ in range(3000):
        q, n = draw.randrange(8), draw.randrange(1, 4)
        call = draw.choice([
            lambda: c.admit(q, 30 * n), lambda: c.append(q, 9 * n, source="host"), lambda: c.prepare_verify([q], [n]), lambda: c.accept([q], [n - 1]),
            lambda: c.abort(q), lambda: c.swap(0, tokens, lens, np.array([q], np.int32)), lambda: c.reserve(q, 20 * n), lambda: c.retract(q),
            lambda: c.resume(q), lambda: c.host_pages(q), lambda: c.tables(0), lambda: c.stats(),
        ])
        try:
            call()
        except (ValueError, RuntimeError):
            pass
        except BaseException as error:
            failed.append(error)

threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for t in threads: t.start()
for t in threads: t.join()
for q in range(8): c.abort(q)
assert not failed and (c.free_device_rows, c.free_host_rows) == (4096, 4096), (failed, c.free_device_rows, c.free_host_rows)
"""


def test_threads_that_share_a_coordinator():
    """Its calls take turns: nothing crashes, and no row is lost."""
    for _ in range(3):
        subprocess.run([sys.executable, "-X", "faulthandler", "-c", ONE_COORDINATOR, str(ROOT / "python")], check=True, timeout=120)


def test_calls_inside_of_calls_end():
    """An array whose `__dlpack__` makes such a call again, without end."""

    class Nested:
        shape, dtype = (2, 4), np.dtype(np.int32)
        calls = 0

        def __dlpack__(self, **_):
            Nested.calls += 1
            return accept.verify_greedy(Nested(), Nested())

        def __dlpack_device__(self):
            return (1, 0)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        with pytest.raises((RecursionError, ValueError)):
            accept.verify_greedy(Nested(), Nested())
    finally:
        sys.setrecursionlimit(limit)
    assert Nested.calls < 1000


def test_arrays_of_derived_classes():
    """A result is of the framework of the class that the argument's class derives from."""
    torch = pytest.importorskip("torch", reason="needs-torch: torch is no requirement")

    class Weight(torch.Tensor):
        pass

    x = torch.ones(2, 4, dtype=torch.int32)
    for given in (x.as_subclass(Weight), torch.nn.Parameter(x, requires_grad=False)):
        lengths, tokens = accept.verify_greedy(given, x)
        assert isinstance(lengths, torch.Tensor) and isinstance(tokens, torch.Tensor)
        assert lengths.tolist() == [4, 4]
