"""Numbers, flags and groups of arrays among the arguments of a call: the value, or an error that names function and argument."""

import re
import sys
from operator import index


def _asked():
    """The public function or class that the user called: the outermost of our frames that is one. Walked for errors alone."""
    found, frame = "", sys._getframe(1)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).partition(".")[0] == "specstate":
        public, code = frame.f_globals.get("__all__", ()), frame.f_code
        if code.co_varnames[:1] == ("self",):
            owners = [c.__name__ for c in type(frame.f_locals.get("self")).__mro__ if c.__module__ == module and c.__name__ in public]
            found = owners[0] if owners else found
        elif code.co_name in public:
            found = code.co_name
        frame = frame.f_back
    return found


def refusal(kind, text):
    """The exception `kind` with `text` ("argument: expected ..., got ...") behind the name of the function that was called."""
    asked = _asked()
    return kind(f"{asked}: {text}" if asked else text)


# What a conversion says of an object that it cannot convert. Anything else is not about the argument (a signal handler's exception, a KeyError
# inside an object's own method): it passes unchanged, with a note.
CONVERSION = (TypeError, ValueError, OverflowError, AttributeError, BufferError, RuntimeError)  # RuntimeError has NotImplementedError below it


def noted(error, name=None):
    """Adds to an exception that passes through us which call, and which argument, was being read (Python 3.11 has notes)."""
    asked = _asked() or "a call"
    if hasattr(error, "add_note") and not any(note.startswith("specstate: ") for note in getattr(error, "__notes__", ())):
        error.add_note(f"specstate: while reading {asked}: {name}" if name else f"specstate: inside {asked}")


def describe(kind, **fields):
    """Documents the fields of a NamedTuple, in `help` and in the stubs."""
    for name, text in fields.items():
        getattr(kind, name).__doc__ = text
    kind.__doc__ += "\n\n" + "\n".join(f"{name}: {text}" for name, text in fields.items())


def shown(x):
    """A number as an error says it; Python itself refuses to write integers of more than 4300 digits."""
    return f"one of {x.bit_length()} bits" if isinstance(x, int) and x.bit_length() > 256 else repr(x)


def kind_of(x):
    """What an error says of an argument of the wrong kind."""
    text = f"{type(x).__name__} {shown(x)}" if isinstance(x, (bool, int, float, complex, str, bytes)) else type(x).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def integer(name, x):
    """An integer of 64 bits."""
    try:
        value = int(index(x))
    except CONVERSION:
        raise refusal(TypeError, f"{name}: expected an integer, got {kind_of(x)}.") from None
    except Exception as error:
        noted(error, name)
        raise
    if not -(2**63) <= value < 2**63:
        raise refusal(ValueError, f"{name}: expected an integer of 64 bits, got {shown(value)}.")
    return value


def size(name, x):
    """An integer >= 0."""
    value = integer(name, x)
    if value < 0:
        raise refusal(ValueError, f"{name}: expected at least 0, got {value}.")
    return value


def integers(name, xs):
    """A sequence of integers, as a list."""
    try:
        parts = None if isinstance(xs, (str, bytes, dict)) else iter(xs)
    except TypeError:  # arrays without dimensions among what has __iter__
        parts = None
    if parts is None:
        raise refusal(TypeError, f"{name}: expected a sequence of integers, got {kind_of(xs)}.")
    return [integer(name, x) for x in parts]


def number(name, x):
    """A float, from a number of any kind (a 0-d array too)."""
    if type(x) is float:
        return x
    if (hasattr(x, "__float__") or hasattr(x, "__index__")) and not isinstance(x, (str, bytes)):
        try:
            return float(x)
        except CONVERSION:
            pass
        except Exception as error:
            noted(error, name)
            raise
    raise refusal(TypeError, f"{name}: expected a number, got {kind_of(x)}.")


def optional_number(name, x):
    return None if x is None else number(name, x)


def flag(name, x):
    """A bool; an int counts as one, as everywhere in Python."""
    if x is True or x is False:
        return x
    if isinstance(x, int) or type(x).__name__ in ("bool", "bool_"):  # NumPy's are no ints
        return bool(x)
    raise refusal(TypeError, f"{name}: expected a bool, got {kind_of(x)}.")


def group(name, xs, kind):
    """The arrays of a NamedTuple `kind`, from one or from as many in a tuple or list."""
    if type(xs) is kind:
        return xs
    if isinstance(xs, (tuple, list)) and len(xs) == len(kind._fields):
        return xs
    expected = f"{name}: expected a {kind.__name__} of {len(kind._fields)} arrays, or as many in a tuple or list"
    if isinstance(xs, (tuple, list)):
        raise refusal(ValueError, f"{expected}, got {type(xs).__name__} of {len(xs)}.")
    raise refusal(TypeError, f"{expected}, got {kind_of(xs)}.")


def rename(error, names):
    """Of a call that calls the library's arguments otherwise: `names` has the library's names and the call's. The error stays what it is, with its cause
    and notes."""
    text = re.sub(r"(?<![\w.])(" + "|".join(names) + r")\b", lambda found: names[found[0]], str(error))
    if text != str(error):
        error.args = (text,)
