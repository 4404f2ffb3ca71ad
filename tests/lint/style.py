"""clang-format (Debian 12's, version 14) would change nothing."""

import concurrent.futures
import shutil
import subprocess

from tree import matching


def check(root):
    tool = shutil.which("clang-format-14") or shutil.which("clang-format")
    if tool is None:
        return ["clang-format is not installed (tools/bootstrap test)"]
    paths = [str(path) for path, _ in matching(root, ".hpp", ".cpp", ".cu", ".cuh")]
    chunks = [paths[i::2] for i in range(2) if paths[i::2]]
    run = lambda chunk: subprocess.run([tool, "--dry-run", f"--style=file:{root}/.clang-format", *chunk], capture_output=True, text=True).stderr
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lines = [line for part in pool.map(run, chunks) for line in part.splitlines() if "clang-format-violations" in line]
    bad = {}
    for line in lines:
        name, number = line.split(":")[:2]
        bad.setdefault(name, number)
    return [f"{name.removeprefix(str(root) + '/')}:{number}: not formatted (make format)" for name, number in sorted(bad.items())]
