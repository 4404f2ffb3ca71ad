#!/usr/bin/env python3
"""Writes what came of sglang's own kernel tests (tests/gpu/evidence.json, "sglang") into docs/compatibility.md; `--check` says whether it is there.

One row a test function: its cases passed, failed or not applicable, with the reasons.
"""

import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- sglang's tests -->", "<!-- end of sglang's tests -->"


def render(evidence):
    tests = {}
    for case, result in sorted(evidence["tests"].items()):
        file, _, name = case.partition("::")
        state, _, why = result.partition(": ")
        function = re.sub(r"\[.*", "", name)
        if state == "not applicable":  # a file's tests of other functions are one row
            function = function if "none of the functions" not in why else ""
        tests.setdefault((file, function), {}).setdefault((state, why if function else "functions that are not replaced"), []).append(case)
    count = {s: sum(r.startswith(s) for r in evidence["tests"].values()) for s in ("passed", "failed", "not applicable")}
    lines = [
        f"Recorded on an {evidence['device']}, {evidence['date']}: {count['passed']} passed, {count['failed']} failed, {count['not applicable']} not applicable.",
        "",
        "| file | test | result |",
        "| --- | --- | --- |",
    ]
    for (file, function), results in tests.items():
        said = []
        for (state, why), cases in results.items():
            many = f"{len(cases)} " if len(cases) > 1 or len(results) > 1 else ""
            said.append(f"{many}{state}" + (f": {why}" if why else ""))
        lines.append(f"| `{file}` | {f'`{function}`' if function else 'the others'} | {'; '.join(said).replace('|', '/')} |")
    return "\n".join(lines)


def placed(text, table):
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not tail:
        raise SystemExit(f"sglang_table: docs/compatibility.md has no {BEGIN} .. {END}")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    check = parser.parse_args().check
    path = ROOT / "docs" / "compatibility.md"
    evidence = json.loads((ROOT / "tests" / "gpu" / "evidence.json").read_text())["sglang"]
    before = path.read_text()
    after = placed(before, render(evidence))
    if check:
        return "docs/compatibility.md does not say what tests/gpu/evidence.json says: run tools/sglang_table.py" if before != after else 0
    path.write_text(after)


if __name__ == "__main__":
    sys.exit(main())
