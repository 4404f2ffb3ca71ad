"""The binding on a GPU: zero-copy tensors, the stream of the framework, errors, no context before the first call."""

import os
import subprocess
import sys

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import torch  # noqa: E402

import specstate  # noqa: E402
from specstate import accept  # noqa: E402


def case(b=5, w=7, seed=0, device="cuda"):
    rng = np.random.default_rng(seed)
    c, t = (torch.from_numpy(rng.integers(0, 3, (b, w))) for _ in range(2))
    return c.to(device), t.to(device)


def equal(c, t, got):
    for mine, cpu in zip(got, accept.verify_greedy(c.cpu(), t.cpu()), strict=True):
        assert mine.is_cuda and mine.dtype == cpu.dtype
        torch.testing.assert_close(mine.cpu(), cpu, rtol=0, atol=0)


def test_a_call_on_the_gpu_equals_the_cpu():
    c, t = case()
    equal(c, t, accept.verify_greedy(c, t))


def test_the_current_stream_is_taken():
    """The call must wait for what its stream does before it: a long sleep, then the inputs."""
    c, t = case()
    late_c, late_t = torch.zeros_like(c), torch.zeros_like(t)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late_c.copy_(c), late_t.copy_(t)
        got = accept.verify_greedy(late_c, late_t)
    stream.synchronize()
    equal(c, t, got)


@pytest.mark.parametrize("kind", ["object", "handle", "protocol"])
def test_a_given_stream_is_taken(kind):
    c, t = case()
    late_c, late_t = torch.zeros_like(c), torch.zeros_like(t)
    out = torch.zeros(5, dtype=torch.int32, device="cuda"), torch.zeros_like(c)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late_c.copy_(c), late_t.copy_(t)

    class Protocol:
        def __cuda_stream__(self):
            return 0, stream.cuda_stream

    given = {"object": stream, "handle": stream.cuda_stream, "protocol": Protocol()}[kind]
    accept.verify_greedy(late_c, late_t, out=out, stream=given)
    stream.synchronize()
    equal(c, t, out)


def test_a_graph_replays_with_new_inputs(replayed):
    c, t = case()
    out = torch.zeros(5, dtype=torch.int32, device="cuda"), torch.zeros_like(c)
    replay = replayed(lambda: accept.verify_greedy(c, t, out=out))
    for seed in range(1, 4):
        new_c, new_t = case(seed=seed)
        c.copy_(new_c), t.copy_(new_t)
        out[0].fill_(-9), out[1].fill_(-9)
        replay()
        equal(c, t, out)


def test_cupy_arrays_and_their_stream():
    cupy = pytest.importorskip("cupy", reason="needs-cupy: cupy is no requirement")
    c, t = case()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        lens, tokens = accept.verify_greedy(cupy.asarray(c), cupy.asarray(t))
        stream.synchronize()
    assert isinstance(lens, cupy.ndarray)
    equal(c, t, (torch.as_tensor(lens, device="cuda"), torch.as_tensor(tokens, device="cuda")))


def test_errors_name_the_argument():
    c, t = case()
    out = torch.full((5,), 77, dtype=torch.int32, device="cuda"), torch.full_like(c, 77)
    for arguments, text in [
        ((c, t[:, :3]), r"target_argmax: expected shape \[b=5, W=7\], got \(5, 3\)"),
        ((c, t.cpu()), "target_argmax: expected device cuda:0 .*, got cpu"),
        ((c.float(), t), "candidates: expected dtype int32 or int64, got float32"),
    ]:
        with pytest.raises(ValueError, match=text):
            accept.verify_greedy(*arguments, out=out)
    assert specstate.supports("verify_greedy", candidates=c, target_argmax=t, out=out) == (True, "")
    torch.cuda.synchronize()
    assert (out[0] == 77).all() and (out[1] == 77).all()


def test_calls_of_many_tensors_cross_at_once(monkeypatch):
    """torch's tensors go the quick way of `_library.at_once`, on its current stream; what that cannot take goes the long one, with its texts."""
    import gpu_calls
    from calls import operation

    from specstate import _library

    accept.verify_greedy(*case())  # torch is known from here on
    real, answers = _library._exports["at_once"], []
    monkeypatch.setitem(_library._exports, "at_once", lambda f, address: answers.append(real(f, address)) or answers[-1])
    for name in ("verify", "decode", "fold", "fused_kda_decode_mtp_dspark", "fused_sigmoid_gating_delta_rule_update", "load_cache_to_device_buffer_mla",
                 "load_cache_to_device_buffer_spec_mla"):  # fmt: skip
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call = gpu_calls.on_gpu(name)
            answers.clear()  # making the arguments calls too
            operation(name)(**call)
        stream.synchronize()
        assert answers == [True], name
        answers.clear()
        with pytest.raises(TypeError, match="stream: expected an int or a CUDA stream object, got str 'none'"):
            operation(name)(**call, stream="none")
        assert answers == [False], name


def test_what_is_not_implemented_says_so():
    """An error of the kind keeps it on the way to Python: a caller (the sglang plugin) falls back on it."""
    many = torch.zeros(20000, 2, device="cuda")
    table = torch.ones(1, dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")
    with pytest.raises(NotImplementedError, match="at most 16384 proposals on CUDA, got 40000"):
        accept.plan_verify_lengths(many, *table)


def test_no_context_before_the_first_cuda_call():
    """Importing the package and calling it on the CPU leaves the GPU alone: no context, no memory on it."""
    code = """
import ctypes, numpy as np, specstate
from specstate import accept
accept.verify_greedy(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32))
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
flags, active = ctypes.c_uint(), ctypes.c_int(9)
assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print("active", active.value)
"""
    path = os.pathsep.join([str(conftest.ROOT / "python"), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path))
    assert done.stdout.strip() == "active 0", done.stdout + done.stderr


def test_a_gpu_that_is_hidden_is_an_error_not_a_crash():
    code = """
import ctypes, specstate
from specstate._library import library
library()
print("loaded")
"""
    path = os.pathsep.join([str(conftest.ROOT / "python"), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path, CUDA_VISIBLE_DEVICES=""))
    assert done.stdout.strip() == "loaded", done.stderr
