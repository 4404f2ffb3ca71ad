#!/usr/bin/env python3
"""Makes the embedded model from nothing: corpus, prompts, target, drafters, rounding, measurements, golden vectors and their checks.

    python3 training/make.py --out build/model              # an NVIDIA GPU: about ten minutes
    python3 training/make.py --out build/tiny --plan tiny   # every stage with a few steps, on any CPU: about a minute

Each stage is a script of this folder that can be run alone; this one says in which order. What it does not know (--seed, --lr, ...) goes to
train.py. OUT gets the checkpoint, prompts/, golden/, train_log.jsonl and metrics.json.
"""
import argparse
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def run(script, *arguments):
    command = [sys.executable, os.path.join(HERE, script), *arguments]
    print("$ python3", os.path.relpath(command[1]), *arguments, flush=True)
    begin = time.time()
    subprocess.run(command, check=True)
    print(f"# {script}: {time.time() - begin:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--corpus", default="build/corpus", help="made here unless its manifest.json is there (default: build/corpus)")
    parser.add_argument("--debs", help="folder with the corpus' .deb files, for a machine without network")
    parser.add_argument("--plan", default="full", help="full, smoke or tiny: PLAN of train.py")
    args, more = parser.parse_known_args()
    out, corpus, prompts = args.out, args.corpus, os.path.join(args.out, "prompts")
    os.makedirs(out, exist_ok=True)
    if not os.path.exists(os.path.join(corpus, "manifest.json")):
        run("corpus.py", "--out", corpus, *(["--debs", args.debs] if args.debs else []))
    run("prompts.py", "--corpus", corpus, "--out", prompts)
    run("train.py", "--corpus", corpus, "--out", out, "--plan", args.plan, "--log", os.path.join(out, "train_log.jsonl"),
        "--metrics", os.path.join(out, "metrics.json"), *more)
    run("golden.py", out)
    run("golden.py", out, "--check")
    run("check_reference.py", out)


if __name__ == "__main__":
    main()
