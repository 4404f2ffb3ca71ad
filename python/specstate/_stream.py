"""The CUDA stream of a call: the given one, else the framework's current stream; 0 for CPU tensors."""

import sys

from ._arguments import kind_of, refusal, shown

_current_of = {}  # a torch class -> index of a GPU -> its current stream


def _of_torch(torch):
    """The raw handle without a Stream object, where torch gives it (1 us less a call)."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw if raw is not None else lambda index: torch.cuda.current_stream(index).cuda_stream


def stream_handle(stream, like):
    """An integer `cudaStream_t`. `stream` is an int or an object with `cuda_stream`, `ptr` or `__cuda_stream__`."""
    if stream is None:
        current = _current_of.get(type(like))
        if current is not None:
            index = like.get_device()  # -1: a CPU
            return current(index) if index >= 0 else 0
        # While another thread imports a framework for the first time its module is there before its classes.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, getattr(torch, "Tensor", ())):
            _current_of[type(like)] = _of_torch(torch)
            return stream_handle(None, like)
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(like, getattr(cupy, "ndarray", ())):
            return cupy.cuda.get_current_stream().ptr
        return 0
    handle = stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        handle = (protocol() if callable(protocol) else protocol)[1]
    elif not isinstance(stream, int):
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    if not isinstance(handle, int):
        raise refusal(TypeError, f"stream: expected an int or a CUDA stream object, got {kind_of(stream)}.")
    if not 0 <= handle < 2**63:
        raise refusal(ValueError, f"stream: expected a handle of 64 bits, got {shown(handle)}.")
    return handle
