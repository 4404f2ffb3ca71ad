#!/usr/bin/env python3
"""Generates on the GPU without a pause for so many seconds, requests coming and going, and records how the memory of both sides grows:
`tools/gpu_soak.py --seconds 3600 [--record]`. The generating is engine_gpu_test's MemoryDoesNotGrow; its own limits hold.

tests/evidence/engine_soak.json keeps the last record; tools/gpu_evidence.py writes its line into docs/testing.md.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from lossless_matrix import built_digest, gpu_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "tests" / "evidence" / "engine_soak.json"


def measure(seconds):
    with tempfile.TemporaryDirectory() as folder:
        said = pathlib.Path(folder) / "soak.json"
        lib = os.pathsep.join(filter(None, [str(ROOT / "build" / "release" / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
        program = ROOT / "build" / "release" / "gpu-tests" / "engine_gpu_test"
        result = subprocess.run([program, "--gtest_brief=1", "--gtest_filter=*MemoryDoesNotGrow"],
                                env=dict(os.environ, LD_LIBRARY_PATH=lib, ENGINE_SOAK_SECONDS=str(seconds), ENGINE_SOAK_JSON=str(said)))
        if result.returncode or not said.exists():
            raise SystemExit(f"{program.name} ended with {result.returncode}")
        return json.loads(said.read_text())


def line(e):
    def rate(kind):
        return f"{e[kind + '_bytes_per_hour'] / 2**20:+.2f} MiB an hour (standard error {e[kind + '_standard_error'] / 2**20:.2f})"

    return (f"Recorded on an {e['device']}, {e['date']}, sources {e['source_digest']}: {e['seconds']:.0f} s, {e['runs']} runs of 24 requests, {e['tokens'] / 1e6:.1f} million tokens. "
            f"Device memory of {e['device_is_of']}: {e['device_bytes'][0] / 2**20:.0f} MiB after the first runs, {e['device_bytes'][1] / 2**20:.0f} at the end, {rate('device')}; "
            f"host: {e['host_bytes'][0] / 2**20:.0f} MiB, {e['host_bytes'][1] / 2**20:.0f} at the end, {rate('host')}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--record", nargs="?", const=str(EVIDENCE), help=f"write {EVIDENCE.relative_to(ROOT)}, or the named file")
    options = parser.parse_args()
    evidence = {"device": gpu_name(), "date": datetime.date.today().isoformat(), "source_digest": built_digest(), **measure(options.seconds)}
    print(line(evidence))
    if options.record:
        pathlib.Path(options.record).write_text(json.dumps(evidence, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
