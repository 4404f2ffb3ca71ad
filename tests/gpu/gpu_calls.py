"""The calls of tests/python/calls.py on the GPU, and calls that nobody should make.

    gpu_calls.py SEED CALLS        random calls, wrong and garbled; an exception or a result, and the GPU alive after each

Run under compute-sanitizer by tools/gpu_test.py: garbled ids and lengths must not lead outside an array. What a draft-KV call finds in its
ids is an error of the next call (`raise_pending_error`); it is claimed here right after the call that left it.
"""

import sys

import conftest  # noqa: F401  (paths)
import numpy as np
import torch
from calls import CALLS, leaves, operation, replace

import specstate
from specstate._supports import OPERATIONS

HOST = ("host_cache", "host_cache_k", "host_cache_v")  # pinned memory in a CUDA call
EXPECTED = (ValueError, TypeError, NotImplementedError, RuntimeError)
NAMES = [n for n in CALLS if n != "transfer_cache_dsv4_mla"]  # its arguments hold addresses


def tensors(arguments):
    """[(path, tensor)] of a call, those inside tuples too."""
    found = [((n, None), x) for n, x in arguments.items()] + [((n, i), part) for n, x in arguments.items() if isinstance(x, tuple) for i, part in enumerate(x)]
    return [(path, x) for path, x in found if isinstance(x, torch.Tensor)]


def on_gpu(name, **sizes):
    """The call's arguments as torch tensors where a CUDA call has them. Nothing waits: a wait takes a turn of all programs on a GPU."""
    arguments = CALLS[name](**sizes)
    for path, x in leaves(arguments):
        pinned = torch.from_numpy(np.ascontiguousarray(x)).pin_memory()
        arguments = replace(arguments, path, pinned if path[0] in HOST else pinned.cuda(non_blocking=True))
    return arguments


def results(arguments):
    """{path: copy in the host's memory} of a call's tensors, with one wait, of the current stream."""
    copies = {path: x.to("cpu", non_blocking=True) for path, x in tensors(arguments)}
    torch.cuda.current_stream().synchronize()
    return {path: x.clone() for path, x in copies.items()}


def stepped(rng, x):
    big = x.new_zeros(tuple(2 * n for n in x.shape))
    view = big[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def columns_first(rng, x):
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.ndim > 1 else x


def wrong_dtype(rng, x):
    return x.to([torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool][int(rng.integers(9))])


def other_device(rng, x):
    return x.cpu() if x.is_cuda else x.cuda() if rng.random() < 0.5 else x.clone()  # pageable


def cut(rng, x):
    axis = int(rng.integers(x.ndim)) if x.ndim else 0
    return x.narrow(axis, 0, x.shape[axis] - 1) if x.ndim and x.shape[axis] else x


def grown(rng, x):
    return torch.cat([x, x]) if x.ndim else x


def deep(rng, x):
    return x.reshape((1,) * int(rng.integers(5, 12)) + tuple(x.shape))


def without_elements(rng, x):
    return x[..., :0] if x.ndim else x


def nothing(rng, x):
    return None


def garbled(rng, x):
    """Numbers that point anywhere, in a quarter of the places."""
    if x.is_floating_point() or x.dtype == torch.uint8 or x.dtype == torch.bool:
        return x
    x, info = x.clone(), torch.iinfo(x.dtype)
    choices = [info.min, info.max, -1, -2, 0, 1, 2, 63, 64, 4096, info.max // 2, int(rng.integers(info.min, info.max))]
    flat = x.reshape(-1) if x.is_contiguous() else x.contiguous().view(-1)
    for i in range(flat.numel()):
        if rng.random() < 0.25:
            flat[i] = choices[int(rng.integers(len(choices)))]
    return flat.view(x.shape)


MUTATIONS = [stepped, columns_first, wrong_dtype, other_device, cut, grown, deep, without_elements, nothing, garbled, garbled, garbled, garbled, garbled]


def main(seed, calls):
    rng = np.random.default_rng(seed)
    taken = refused = pending = 0
    anywhere = torch.zeros(1, device="cuda")
    for i in range(calls):
        name = NAMES[i % len(NAMES)]
        arguments = on_gpu(name)
        done = []
        for _ in range(int(rng.integers(1, 4))):
            paths = tensors(arguments)
            if not paths:
                break
            path, x = paths[int(rng.integers(len(paths)))]
            mutate = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
            arguments = replace(arguments, path, mutate(rng, x))
            done.append(f"{mutate.__name__} {'.'.join(map(str, path))}")
        can, why = specstate.supports(name, **arguments)
        try:
            operation(name)(**arguments)
            taken += 1
            if not can:
                raise SystemExit(f"{name}: supports refuses what the call takes: {why} ({done})")
        except EXPECTED as error:
            refused += 1
            if can:
                raise SystemExit(f"{name}: supports says yes, the call {error!r} ({done})") from error
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise SystemExit(f"{name}: the GPU faulted: {error} ({done})") from error
        try:
            specstate.draft_kv.raise_pending_error(anywhere)
        except ValueError as error:
            if name not in OPERATIONS["draft_kv"] or "in an earlier call on this GPU" not in str(error):
                raise SystemExit(f"{name}: left an error that is not its own: {error} ({done})") from error
            pending += 1
    print(taken, refused, pending)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
