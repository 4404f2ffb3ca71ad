#!/usr/bin/env python3
"""Hit rates of the HiSparse replacement policy beside exact LRU and Belady's optimum, on synthetic traces and on recorded ones.

    tools/hisparse_policies.py [--trace NAME=LOG ...] [--hot N,N,..] [--json FILE]

A trace is a list of calls; a call is the tokens that its steps select, in the order (step, k). A LOG is what the CPU engine leaves at the level debug, a trace a
layer and slot:

    SPECSTATE_LOG_LEVEL=debug SPECSTATE_LOG_DEST=LOG specstate generate --mode dflash ...

Counted are distinct tokens of a call: hits / (hits + misses).
The first two keep what the call itself wants (its rows must be valid at once). Policies:

  calls    ours: last call of use; a row loaded by a call is older than one it hit; ties by slot (src/hisparse/SEMANTICS.md)
  lru      exact LRU of single accesses
  belady   after each call keeps what is wanted again soonest: no policy misses less
"""

import argparse
import json
import pathlib
import re
import sys

try:
    import numpy as np
except ModuleNotFoundError:  # --help needs none
    np = None


def distinct(tokens):
    """Distinct tokens by first occurrence."""
    _, first = np.unique(tokens, return_index=True)
    return tokens[np.sort(first)]


class Calls:
    def __init__(self, hot):
        self.token = np.full(hot, -1, np.int64)
        self.stamp = np.zeros(hot, np.int64)
        self.slot = {}
        self.clock = 0

    def call(self, wanted, _):
        self.clock += 1
        hit = np.array([self.slot[t] for t in wanted if t in self.slot], np.int64)
        misses = [t for t in wanted if t not in self.slot]
        key = np.where(self.token < 0, 0, np.maximum(1, self.stamp))
        key[hit] = np.iinfo(np.int64).max
        free = len(key) - len(hit)
        victims = np.sort(np.argsort(key, kind="stable")[: min(len(misses), free)])
        self.stamp[hit] = 2 * self.clock + 1
        for slot, t in zip(victims.tolist(), misses):
            if self.token[slot] >= 0:
                del self.slot[int(self.token[slot])]
            self.token[slot], self.stamp[slot], self.slot[t] = t, 2 * self.clock, slot
        return len(hit)


class Lru:
    def __init__(self, hot):
        self.hot, self.held = hot, {}  # in the order of use

    def call(self, wanted, tokens):
        hits = sum(t in self.held for t in wanted)
        keep = set(wanted)
        for t in wanted:
            if t not in self.held:
                if len(self.held) >= self.hot:
                    old = next((o for o in self.held if o not in keep), None)
                    if old is None:
                        continue
                    del self.held[old]
                self.held[t] = None
        for t in tokens:  # the last access of each token decides
            if t in self.held:
                self.held[t] = self.held.pop(t)
        return hits


class Belady:
    def __init__(self, hot, calls):
        self.hot, self.held = hot, {}
        self.uses = {}
        for i, wanted in enumerate(calls):
            for t in wanted:
                self.uses.setdefault(t, []).append(i)
        self.at = dict.fromkeys(self.uses, 0)

    def call(self, wanted, _):
        hits = sum(t in self.held for t in wanted)
        for t in wanted:
            self.at[t] += 1
            uses = self.uses[t]
            self.held[t] = uses[self.at[t]] if self.at[t] < len(uses) else 1 << 60
        if len(self.held) > self.hot:
            self.held = dict(sorted(self.held.items(), key=lambda item: item[1])[: self.hot])
        return hits


def rates(traces, hot):
    """Of all traces together; the first fifth of each fills the buffer."""
    hits, total = {}, 0
    for trace in traces:
        wanted, tokens = [distinct(c).tolist() for c in trace], [c.tolist() for c in trace]
        warm = len(trace) // 5
        total += sum(map(len, wanted[warm:]))
        for name, policy in {"calls": Calls(hot), "lru": Lru(hot), "belady": Belady(hot, wanted)}.items():
            hits[name] = hits.get(name, 0) + sum([policy.call(w, t) for w, t in zip(wanted, tokens)][warm:])
    return {name: round(h / max(1, total), 4) for name, h in hits.items()}


def synthetic(kind, calls=160, steps=4, top_k=512, context=32768, seed=1):
    """drift: the selection of a step keeps most of the one before, the rest is drawn by popularity and recency; scan: a hot set and a sweep
    that is wanted once; uniform: no locality at all."""
    rng = np.random.default_rng(seed)
    popularity = rng.permutation(context)
    trace, current, sweep = [], rng.choice(context, top_k, replace=False), 0
    for _ in range(calls):
        rows = []
        for _ in range(steps):
            if kind == "uniform":
                current = rng.choice(4 * top_k * steps, top_k, replace=False)
            elif kind == "scan":
                hot = popularity[: top_k * 3 // 4]
                new = (sweep + np.arange(top_k - len(hot))) % context
                sweep += len(new)
                current = np.concatenate([hot, new])
            else:
                stay = rng.random(top_k) > {"drift": 0.08, "drift fast": 0.3}[kind]
                zipf = popularity[np.minimum(rng.zipf(1.2, top_k * 4) - 1, context - 1)]
                pool = np.setdiff1d(zipf, current[stay])
                fill = rng.permutation(pool)[: top_k - stay.sum()]
                rest = rng.choice(context, top_k - stay.sum() - len(fill), replace=False)
                current = np.concatenate([current[stay], fill, rest])
            rows.append(rng.permutation(current))
        trace.append(np.concatenate(rows).astype(np.int64))
    return trace


def recorded(log):
    """The traces of a log."""
    traces = {}
    for layer, slot, tokens in re.findall(r"debug: layer (\d+) of slot (\d+) selects((?: \d+)+)$", log, re.M):
        traces.setdefault((int(layer), int(slot)), []).append(np.array(tokens.split(), np.int64))
    return [traces[key] for key in sorted(traces)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=LOG")
    parser.add_argument("--hot", default="96,192,384", help="slots to try with these traces")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if np is None:
        raise SystemExit("hisparse_policies: this Python has no numpy: use .venv/bin/python (make build)")
    results = []
    for kind in ("drift", "drift fast", "scan", "uniform"):
        for hot in (1024, 2048, 4096):
            results.append({"trace": f"synthetic, {kind}", "steps": 4, "top_k": 512, "hot": hot, **rates([synthetic(kind)], hot)})
            print(results[-1])
    for given in options.trace:
        name, _, file = given.partition("=")
        traces = recorded(pathlib.Path(file).read_text())
        if not traces:
            raise SystemExit(f"hisparse_policies: {file} has no line of a layer's selection")
        for hot in map(int, options.hot.split(",")):
            results.append({"trace": name, "hot": hot, **rates(traces, hot)})
            print(results[-1])
    if options.json:
        options.json.write_text(json.dumps({"policies": ["calls", "lru", "belady"], "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
