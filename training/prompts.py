#!/usr/bin/env python3
"""Cuts the held-out prompts out of the held-out blocks: python3 training/prompts.py --corpus build/corpus --out models/specstate-bytes/prompts

54 prompts, each from a block of its own and starting at the start of a line: most of 64 to 400 bytes, eight of 1 to 2 KB,
three of 3 to 3.7 KB, named NN-domain.txt.
"""
import argparse
import os
import random

from corpus import DOMAINS, split

PLAN = {"kjv": [2, 5, 27], "jargon": [1, 2, 12], "devil": [0, 1, 4]}   # long, medium, short


def cut(block, length, rng, earliest):
    """`length` bytes (or a few less, to end between characters) from a line start at or after `earliest`."""
    starts = [i + 1 for i in range(earliest, len(block) - 1) if block[i:i + 1] == b"\n" and block[i + 1:i + 2] not in (b"\n", b"\x04")]
    starts = [s for s in starts if s + length <= len(block) and b"\x04" not in block[s:s + length]]
    start = rng.choice(starts) if length < 2500 else starts[0]
    piece = block[start:start + length]
    while True:
        try:
            piece.decode("utf-8")
            return piece
        except UnicodeDecodeError:
            piece = piece[:-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    rng, number = random.Random(7), 0
    for domain in DOMAINS:
        data = open(os.path.join(args.corpus, domain + ".bin"), "rb").read()
        blocks = [data[s:e] for s, e, held in split(len(data)) if held]
        rng.shuffle(blocks)
        long, medium, short = PLAN[domain]
        lengths = [rng.randint(3000, 3700) for _ in range(long)] + [rng.randint(1024, 2048) for _ in range(medium)]
        lengths += [rng.randint(64, 400) for _ in range(short)]
        for i, length in enumerate(sorted(lengths)):
            done = False
            while not done:
                block = blocks.pop()
                try:
                    piece, done = cut(block, length, rng, 0), True
                except (IndexError, ValueError):
                    continue      # no line start that leaves room (one very long paragraph, or an end of text)
            with open(os.path.join(args.out, f"{number:02d}-{domain}.txt"), "wb") as f:
                f.write(piece)
            number += 1


if __name__ == "__main__":
    main()
