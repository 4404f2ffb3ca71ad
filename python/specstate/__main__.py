"""``python -m specstate``: where a C++ build finds the library of this package. `command` is the console script ``specstate``."""

import os
import pathlib
import sys

_FOLDERS = {
    "--cmake-dir": "lib/cmake/specstate",
    "--include-dir": "include",
    "--lib-dir": "lib",
    "--pkg-config-dir": "lib/pkgconfig",
}
_USAGE = f"usage: python -m specstate {' | '.join(_FOLDERS)} | --version"


def _inside(relative):
    path = pathlib.Path(__file__).resolve().parent / relative
    if not path.exists():
        sys.exit(f"specstate: {path} is not there: this is no installed wheel; build with CMake, see README.md")
    return path


def main(arguments):
    if len(arguments) == 1 and arguments[0] in _FOLDERS:
        print(_inside(_FOLDERS[arguments[0]]))
    elif arguments == ["--version"]:
        from ._library import version

        print(version())
    else:
        print(_USAGE, file=sys.stdout if arguments in (["--help"], ["-h"]) else sys.stderr)
        return 0 if arguments in (["--help"], ["-h"]) else 2
    return 0


def command():
    """Becomes the command line `specstate` of the wheel."""
    program = _inside("bin/specstate")
    os.execv(program, ["specstate", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
