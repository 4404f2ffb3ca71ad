"""The CUDA stream of a call: the given one, else the framework's current stream; 0 for CPU tensors."""

import sys
from operator import index

from ._arguments import CONVERSION, kind_of, noted, refusal, shown
from ._arrays import undispatched

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
            device = like.get_device()  # -1: a CPU
            return current(device) if device >= 0 else 0
        # While another thread imports a framework for the first time its module is there before its classes.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, getattr(torch, "Tensor", ())):
            with undispatched(like):
                current, device = _of_torch(torch), like.get_device()
            if type(like).__module__.partition(".")[0] == "torch":  # not every class that a program derives
                _current_of[type(like)] = current
            return current(device) if device >= 0 else 0
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(like, getattr(cupy, "ndarray", ())):
            return cupy.cuda.get_current_stream().ptr
        return 0
    try:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            handle = (protocol() if callable(protocol) else protocol)[1]
        else:
            handle = stream if hasattr(stream, "__index__") else getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
        handle = int(index(handle))
    except (*CONVERSION, LookupError):  # what an object of another kind says
        raise refusal(TypeError, f"stream: expected an int or a CUDA stream object, got {kind_of(stream)}.") from None
    except Exception as error:
        noted(error, "stream")
        raise
    if not 0 <= handle < 2**63:
        raise refusal(ValueError, f"stream: expected a handle of 64 bits, got {shown(handle)}.")
    return handle
