"""Numbers, flags and groups of arrays among the arguments of a call: the value, or an error that names the argument."""

import re
from operator import index


def kind_of(x):
    """What an error says of an argument of the wrong kind."""
    shown = f"{type(x).__name__} {x!r}" if isinstance(x, (bool, int, float, complex, str, bytes)) else type(x).__name__
    return shown if len(shown) <= 60 else shown[:57] + "..."


def integer(name, x):
    """An integer of 64 bits."""
    try:
        value = int(index(x))
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {kind_of(x)}.") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {value}.")
    return value


def size(name, x):
    """An integer >= 0."""
    value = integer(name, x)
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}.")
    return value


def integers(name, xs):
    """A sequence of integers, as a list."""
    if isinstance(xs, (str, bytes, dict)) or not hasattr(xs, "__iter__"):
        raise TypeError(f"{name}: expected a sequence of integers, got {kind_of(xs)}.")
    return [integer(name, x) for x in xs]


def number(name, x):
    """A float, from a number of any kind (a 0-d array too)."""
    if type(x) is float:
        return x
    if (hasattr(x, "__float__") or hasattr(x, "__index__")) and not isinstance(x, (str, bytes)):
        try:
            return float(x)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise TypeError(f"{name}: expected a number, got {kind_of(x)}.")


def optional_number(name, x):
    return None if x is None else number(name, x)


def flag(name, x):
    """A bool; an int counts as one, as everywhere in Python."""
    if x is True or x is False:
        return x
    if isinstance(x, int) or type(x).__name__ in ("bool", "bool_"):  # NumPy's are no ints
        return bool(x)
    raise TypeError(f"{name}: expected a bool, got {kind_of(x)}.")


def group(op, name, xs, kind):
    """The arrays of a NamedTuple `kind`, from one or from as many in a tuple or list."""
    if type(xs) is kind:
        return xs
    if isinstance(xs, (tuple, list)) and len(xs) == len(kind._fields):
        return xs
    got = f"{type(xs).__name__} of {len(xs)}" if isinstance(xs, (tuple, list)) else kind_of(xs)
    raise ValueError(f"{op}: {name}: expected a {kind.__name__} of {len(kind._fields)} arrays, got {got}.")


def renamed(error, names):
    """The error of a call that calls the library's arguments otherwise: `names` has the library's names and the call's."""
    pattern = r"(?<![\w.])(" + "|".join(names) + r")\b"
    return type(error)(re.sub(pattern, lambda found: names[found[0]], str(error)))
