"""Random calls, several threads: run by test_binding_robustness.py in a process of its own, so that a crash is a failure.

Usage: binding_robustness.py SEED THREADS CALLS [torch]. Prints one line of counts; a wrong answer ends it with a traceback. With "torch" the
arrays cross as torch tensors over the same memory, where torch can have them.
"""

import sys
import threading

import numpy as np
from calls import CALLS, leaves, operation, replace

import specstate

EXPECTED = (ValueError, TypeError, NotImplementedError, RuntimeError)


# Views that hold the same numbers: the call gives the same result, or refuses.
def stepped(rng, x):
    big = np.zeros(tuple(2 * n for n in x.shape), x.dtype)
    view = big[tuple(slice(None, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def backwards(rng, x):
    if x.ndim == 0:
        return x
    axis = int(rng.integers(x.ndim))
    return np.flip(np.flip(x, axis).copy(), axis)


def columns_first(rng, x):
    return np.asfortranarray(x)


def far_apart(rng, x):
    """A huge stride over each dimension of one element, which nothing can step over."""
    x = x.copy()
    strides = tuple(2**40 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True))
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


def offset(rng, x):
    """On an odd address, as far as the dtype allows it."""
    raw = np.zeros(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % x.itemsize + x.itemsize * int(rng.integers(1, 4))
    view = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(rng, x):
    x = x.copy()
    x.flags.writeable = False
    return x


SAME = [stepped, backwards, columns_first, far_apart, offset, read_only]


# Other things: the call refuses, or does something that it can.
def wrong_dtype(rng, x):
    return x.astype(rng.choice(["int8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64", "bool"]))


def swapped_bytes(rng, x):
    return x.astype(x.dtype.newbyteorder(">"))


def objects(rng, x):
    return x.astype(object)


def dates(rng, x):
    return np.zeros(x.shape, "datetime64[s]")


def records(rng, x):
    return np.zeros(x.shape, [("a", "i4"), ("b", "f4")])


def without_elements(rng, x):
    return x[..., :0] if x.ndim else x.reshape(1)[:0]


def scalar_array(rng, x):
    return x.reshape(-1)[:1].reshape(()) if x.size else x


def deep(rng, x):
    return x.reshape((1,) * int(rng.integers(5, 12)) + x.shape)


def cut(rng, x):
    if x.ndim == 0:
        return x
    axis = int(rng.integers(x.ndim))
    return np.take(x, range(x.shape[axis] - 1), axis) if x.shape[axis] else x


def grown(rng, x):
    return np.concatenate([x, x]) if x.ndim else x


def nothing(rng, x):
    return None


def no_array(rng, x):
    return rng.choice(np.array([1, 2.5, "x", [1], {}, object, ...], object))


def extreme_numbers(rng, x):
    x = x.copy()
    if x.size and x.dtype.kind in "iu":
        x.reshape(-1)[int(rng.integers(x.size))] = rng.choice([np.iinfo(x.dtype).min, np.iinfo(x.dtype).max])
    elif x.size and x.dtype.kind == "f":
        x.reshape(-1)[int(rng.integers(x.size))] = rng.choice([np.nan, np.inf, -np.inf, np.finfo(x.dtype).max])
    return x


OTHER = [
    wrong_dtype, swapped_bytes, objects, dates, records, without_elements, scalar_array, deep, cut, grown, nothing, no_array, extreme_numbers,
]  # fmt: skip


def copy(arguments):
    for path, x in leaves(arguments):
        arguments = replace(arguments, path, x.copy())
    return arguments


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def as_torch(arguments):
    """The arguments with torch tensors over the arrays' memory in place of the arrays."""
    import torch

    def tensor(x):
        try:
            return torch.from_numpy(x) if x.flags.writeable else x
        except (TypeError, ValueError):  # dtypes, byte orders and strides that torch does not have
            return x

    for path, x in leaves(arguments):
        arguments = replace(arguments, path, tensor(x) if isinstance(x, np.ndarray) else x)
    return arguments


def one_call(rng, name, expected, counts, crossing):
    arguments = CALLS[name]()
    keeps = rng.random() < 0.5
    untouched = leaves(arguments)
    for _ in range(min(int(rng.integers(1, 4)), len(untouched))):  # of several wrong ones `supports` and the call find the same
        path, x = untouched.pop(int(rng.integers(len(untouched))))
        mutate = (SAME if keeps else OTHER)[int(rng.integers(len(SAME if keeps else OTHER)))]
        arguments = replace(arguments, path, mutate(rng, x))
    before = [(path, x.copy()) for path, x in leaves(arguments) if isinstance(x, np.ndarray)]
    crossed = crossing(arguments)
    taken, why = specstate.supports(name, **crossed)
    now = dict(leaves(arguments))
    for path, x in before:
        assert same(x, now[path]) or x.dtype.hasobject, f"{name}: supports wrote {path}"
    try:
        operation(name)(**crossed)
    except EXPECTED as error:
        counts["refused"] += 1
        assert taken or why == str(error), f"{name}: supports says {why!r}, the call {error!r}"
        for path, x in before:
            assert same(x, now[path]) or x.dtype.hasobject, f"{name}: {path} was written by a refused call: {error}"
        return
    assert taken, f"{name}: supports refuses what the call takes: {why}"
    counts["taken"] += 1
    if keeps:
        for path, x in expected[name]:
            assert same(np.ascontiguousarray(now[path]).reshape(x.shape), x), f"{name}: {path} differs for a view of the same numbers"
        counts["compared"] += 1


def main(seed, threads, calls, crossing=lambda x: x):
    expected = {}
    for name, make in CALLS.items():
        arguments = make()
        operation(name)(**arguments)
        expected[name] = leaves(copy(arguments))
    counts = [dict(taken=0, refused=0, compared=0) for _ in range(threads)]
    failures = []

    def work(i):
        rng = np.random.default_rng((seed, i))
        names = list(CALLS)
        try:
            for _ in range(calls):
                one_call(rng, names[int(rng.integers(len(names)))], expected, counts[i], crossing)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if failures:
        raise failures[0]
    print(*(sum(c[k] for c in counts) for k in ("taken", "refused", "compared")))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *[as_torch] * (sys.argv[4:] == ["torch"]))
