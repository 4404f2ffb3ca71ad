"""Every operation of the package with CUDA tensors: its results are the CPU's, also by threads and in a graph."""

import threading

import conftest
import numpy as np
import pytest

if conftest.missing():
    pytest.skip(conftest.missing(), allow_module_level=True)

import gpu_calls  # noqa: E402
import torch  # noqa: E402
from calls import CALLS, leaves, operation, replace  # noqa: E402

import specstate  # noqa: E402


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_the_gpu_gives_what_the_cpu_gives(name):
    cpu, gpu = CALLS[name](), gpu_calls.on_gpu(name)
    operation(name)(**gpu)
    operation(name)(**cpu)
    results = gpu_calls.results(gpu)
    for path, want in leaves(cpu):
        got = results[path].numpy()
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=str(path))
        else:
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want, err_msg=str(path))


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_cupy_arrays_give_what_the_cpu_gives(name):
    cupy = pytest.importorskip("cupy", reason="needs-cupy: cupy is no requirement")
    cpu = CALLS[name]()
    gpu = dict(cpu)
    for path, x in leaves(cpu):
        if path[0] in gpu_calls.HOST:  # pinned memory is a NumPy array
            t = torch.from_numpy(np.ascontiguousarray(x)).pin_memory()
            gpu = replace(gpu, path, t.numpy())
        else:
            gpu = replace(gpu, path, cupy.asarray(x))
    operation(name)(**cpu)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        assert specstate.supports(name, **gpu) == (True, "")
        operation(name)(**gpu)
        stream.synchronize()
    for (argument, i), want in leaves(cpu):
        got = cupy.asnumpy(gpu[argument] if i is None else gpu[argument][i])
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=argument)
        else:
            np.testing.assert_array_equal(got, want, err_msg=argument)


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_a_call_can_be_captured(name, replayed):
    arguments = gpu_calls.on_gpu(name)
    replay = replayed(lambda: operation(name)(**arguments))
    replay()


def test_threads_with_their_own_streams():
    """Every operation from four threads at once, each on a stream and on tensors of its own: what one thread alone gets."""
    want = {}
    for name in gpu_calls.NAMES:
        call = gpu_calls.on_gpu(name)
        operation(name)(**call)
        want[name] = gpu_calls.results(call)
    problems = []

    def work(number):
        try:
            stream = torch.cuda.Stream()
            for turn in range(2):
                for i in range(len(gpu_calls.NAMES)):
                    name = gpu_calls.NAMES[(i + 5 * number + turn) % len(gpu_calls.NAMES)]
                    with torch.cuda.stream(stream):
                        call = gpu_calls.on_gpu(name)
                        with pytest.raises((ValueError, TypeError)):  # errors of one thread are no others'
                            operation(name)(**{**call, "stream": "none"})
                        operation(name)(**call)
                        got = gpu_calls.results(call)
                    for path, x in got.items():
                        torch.testing.assert_close(x, want[name][path], rtol=0, atol=0, msg=f"{name} {path}")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems, problems[0]


def test_arrays_on_two_devices_are_refused():
    """Each array of each call on the CPU while the others are on the GPU: the call names the devices, and `supports` says the same."""
    wrong = []
    for name in gpu_calls.NAMES:
        call = gpu_calls.on_gpu(name)
        for path, x in gpu_calls.tensors(call)[1:]:  # where the first array is, the call is
            if path[0] in gpu_calls.HOST:
                continue
            mixed = replace(call, path, x.cpu())
            can, why = specstate.supports(name, **mixed)
            try:
                operation(name)(**mixed)
                wrong.append((name, path, "was taken"))
            except (ValueError, TypeError) as error:
                if can or str(error) != why or not ("cpu" in why or "pageable" in why):
                    wrong.append((name, path, why, str(error)))
    assert not wrong, wrong


@pytest.mark.parametrize("name", gpu_calls.NAMES)
def test_supports_says_yes_of_cuda_arrays(name):
    call = gpu_calls.on_gpu(name)
    before = gpu_calls.results(call)
    assert specstate.supports(name, **call) == (True, "")
    for path, x in gpu_calls.results(call).items():
        torch.testing.assert_close(x, before[path], rtol=0, atol=0)
