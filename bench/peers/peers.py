"""How peers are timed: as ours are in bench/gpu/gpu.hpp. Ours and the peer's in turns, in one process, on the same tensors.

A script of this folder measures one family: `python3 bench/peers/kda.py --wheel FOLDER [--quick] [--json FILE]`. Its report has a case
(named as `specstate bench` names it) -> {"ours_us": .., "peers": {"sglang 0.5.23": ..}}.
"""

import argparse
import json
import pathlib
import statistics
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(pathlib.Path(__file__).resolve().parent)]
import sglang_wheel  # noqa: E402

SGLANG = "sglang " + sglang_wheel.VERSION


class Timer:
    """Medians of graph replays with a cold L2: a graph of (before, a read of four times the L2, call), many times over, less the same
    graph without the call."""

    def __init__(self, quick=False):
        self.quick = quick
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.memory = torch.ones(4 * l2 // 4, dtype=torch.float32, device="cuda")
        self.sink = torch.empty((), device="cuda")
        self.stream = torch.cuda.Stream()

    def _graph(self, repeats, before, call):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(repeats):
                if before:
                    before(i)
                torch.sum(self.memory, dim=0, out=self.sink)
                if call:
                    call(i)
        return graph

    def _us(self, graph):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            begin.record()
            graph.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def cold_us(self, calls, before=None):
        """calls: name -> call(repeat). Returns name -> microseconds."""
        with torch.cuda.stream(self.stream):
            for call in calls.values():  # compile and set up outside of a capture
                for _ in range(2):
                    if before:
                        before(0)
                    call(0)
        torch.cuda.synchronize()
        longest = max(self._us(g) for g in [self._graph(1, before, c) for c in calls.values()] for _ in range(2))
        repeats = 2 if self.quick else max(4, min(24, int(2000 / longest)))
        rest, graphs = self._graph(repeats, before, None), {n: self._graph(repeats, before, c) for n, c in calls.items()}
        samples = {n: [] for n in calls}
        for turn in range(4 if self.quick else 22 if longest < 500 else 8):  # what disturbs a call is microseconds
            alone = self._us(rest)
            for n, g in graphs.items():
                us = (self._us(g) - alone) / repeats
                if turn:
                    samples[n].append(us)
        return {n: statistics.median(s) for n, s in samples.items()}


def case(family, operation, **keys):
    return f"{family}/{operation}/" + ",".join(f"{k}={keys[k]}" for k in sorted(keys))


def working(calls, name):
    """Those that can be called here; the others are named with their reason."""
    good = {}
    for who, call in calls.items():
        try:
            call(0)
            torch.cuda.synchronize()
            good[who] = call
        except (TypeError, ValueError, AssertionError, NotImplementedError, RuntimeError, ImportError) as error:
            print(f"{name}: {who}: not measured: {type(error).__name__}: {error}", flush=True)
    return good


def main(measure):
    """measure(timer, report): report(case, {"ours": us, peer: us, ...})"""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", required=True, help="the unpacked wheel of sglang, its kernels compiled")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--resume", action="store_true", help="go on with the report of --json: what it has is not measured again")
    options = parser.parse_args()
    sglang_wheel.use(options.wheel)
    written = pathlib.Path(options.json) if options.json else None
    results = json.loads(written.read_text()) if options.resume and written and written.exists() else {}
    options.wanted = lambda name: options.only in name and name not in results

    def report(name, times, **more):
        """`more`: other numbers of the peer, which go beside the result by their names."""
        results[name] = {"ours_us": times.get("ours"), "peers": {k: round(v, 3) for k, v in times.items() if k != "ours"}, **more}
        text = "   ".join(f"{k} {v:.2f}" + (f" ({v / times['ours']:.2f}x)" if k != "ours" and times.get("ours") else "") for k, v in times.items())
        print(f"{name:84} {text}", flush=True)
        if written:
            written.write_text(json.dumps(results, indent=1))

    with torch.inference_mode():
        measure(Timer(options.quick), report, options)
