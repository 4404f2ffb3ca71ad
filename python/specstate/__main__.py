"""The command line: ``python -m specstate`` and the console script ``specstate`` are the same. Options that name folders of this package are
answered here, everything else is the program's."""

import os
import pathlib
import sys

_FOLDERS = {
    "--cmake-dir": ("lib/cmake/specstate", "of the CMake package: -Dspecstate_DIR=..."),
    "--include-dir": ("include", "of the C++ headers"),
    "--lib-dir": ("lib", "of the shared libraries"),
    "--pkg-config-dir": ("lib/pkgconfig", "for PKG_CONFIG_PATH"),
    "--doc-dir": ("share/doc/specstate", "of the documentation"),
}


def _inside(relative):
    path = pathlib.Path(__file__).resolve().parent / relative
    if not path.exists():
        sys.exit(f"specstate: {path} is not there: this is no installed wheel; build with CMake, see README.md")
    return path


def _program():
    """The program of the wheel, or of the build beside the checkout."""
    here = pathlib.Path(__file__).resolve().parent
    for path in (here / "bin" / "specstate", here.parents[1] / "build" / "release" / "specstate"):
        if path.is_file():
            return path
    return _inside("bin/specstate")


def main(arguments):
    """Prints a folder, or becomes the program."""
    if arguments and arguments[0] in _FOLDERS:
        if arguments[1:]:
            sys.exit(f"specstate: {arguments[0]}: expected no more arguments, got {' '.join(arguments[1:])}")
        print(_inside(_FOLDERS[arguments[0]][0]))
        return
    if arguments in (["--help"], ["-h"]):
        print("Folders of the installed Python package (specstate OPTION, or python -m specstate OPTION):")
        for option, (_, what) in _FOLDERS.items():
            print(f"  {option:<18}{what}")
        print(flush=True)
    program = _program()
    os.execv(program, ["specstate", *arguments])


def command():
    main(sys.argv[1:])


if __name__ == "__main__":
    command()
