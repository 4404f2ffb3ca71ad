"""Runs every rule over the tree: `make lint`. The rules are tested, each with a planted fault, in tests/python/test_lint.py."""

import pathlib
import sys

import docs
import headers
import layers
import names
import style
import tree

RULES = {
    "layers": layers.check,
    "names": names.check,
    "headers": headers.check,
    "local paths": tree.local_paths,
    "version": tree.version,
    "rooms": tree.rooms,
    "pointers": tree.pointers,
    "docs": docs.check,
    "environment": docs.environment,
    "style": style.check,
}


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    failed = 0
    for name, rule in RULES.items():
        found = rule(root)
        failed += bool(found)
        print(f"{'FAILED' if found else 'ok':6} {name}")
        for line in found:
            print("    " + line)
    print(f"{len(RULES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
