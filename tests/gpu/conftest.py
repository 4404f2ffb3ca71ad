"""GPU tests of the Python package: torch tensors on a GPU against the same call on the CPU. Without one every test skips."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(ROOT / "tests" / "oracles"))
sys.path.insert(0, str(ROOT / "tests" / "python"))


def missing():
    """Why no GPU test can run here; None if they can."""
    try:
        import torch
    except ImportError:
        return "needs-torch: the GPU tests of the package make their tensors with torch"
    return None if torch.cuda.is_available() else "needs-gpu: torch sees no GPU"


def device_memory():
    """Bytes that this program holds of the first GPU, as the driver says (NVML); where it says nothing of programs, what is not free there,
    and then what other programs take counts too."""
    import ctypes

    import torch

    class Process(ctypes.Structure):
        _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint))

    try:
        nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)) == 0:
            found, n = (Process * 256)(), ctypes.c_uint(256)
            if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(n), found) == 0:
                for p in found[: n.value]:
                    if p.pid == os.getpid() and p.used < 1 << 48:
                        return p.used
    except (OSError, AttributeError):
        pass
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(autouse=True, scope="session")
def gpu():
    why = missing()
    if why:
        pytest.skip(why)
    import torch

    return torch.device("cuda", 0)


@pytest.fixture
def replayed(gpu):
    """replayed(call): captures `call()` in a CUDA graph and returns a function that replays it and waits.

    Inputs are changed in place between replays, so that what was read at capture time shows."""
    import torch

    def capture(call):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # first calls set things up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay():
            graph.replay()
            torch.cuda.synchronize()

        return replay

    return capture
