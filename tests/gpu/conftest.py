"""GPU tests of the Python package: torch tensors on a GPU against the same call on the CPU. Without one every test skips."""

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
