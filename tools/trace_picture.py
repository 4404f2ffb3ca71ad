#!/usr/bin/env python3
"""A picture of one step on a GPU: `tools/trace_picture.py TRACE.json > docs/step.svg`, from `specstate generate --device cuda --trace TRACE.json`.

One lane a kind of operation, time to the right, the sum of each lane beside its name.
"""

import argparse
import collections
import html
import json

COLOURS = {"model": "#8a8f98", "kda": "#3b6fb6", "hisparse": "#c8553d", "draft": "#5a9367", "accept": "#8e5ea2", "step": "#b8860b"}
WIDTH, LANE, LEFT, TOP = 1000, 30, 170, 34


def picture(events):
    total = max(e["ts"] + e["dur"] for e in events)
    sums = collections.Counter()
    for e in events:
        sums[e["cat"]] += e["dur"]
    lanes = [c for c in COLOURS if c in sums] + sorted(set(sums) - set(COLOURS))
    x = lambda us: LEFT + us / total * (WIDTH - LEFT - 10)  # noqa: E731
    height = TOP + LANE * len(lanes) + 24
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
           f'<text x="{LEFT}" y="18">one step, operation by operation: {total:.0f} µs (events between the operations; everything was enqueued before the first)</text>']  # fmt: skip
    for i, lane in enumerate(lanes):
        y = TOP + LANE * i
        out.append(f'<text x="6" y="{y + 17}">{html.escape(lane)}  {sums[lane]:.0f} µs, {100 * sums[lane] / total:.0f} %</text>')
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y + LANE - 3}" y2="{y + LANE - 3}" stroke="#ddd"/>')
        for e in (e for e in events if e["cat"] == lane):
            width = max(0.6, x(e["ts"] + e["dur"]) - x(e["ts"]) - 0.4)
            out.append(f'<rect x="{x(e["ts"]):.1f}" y="{y + 2}" width="{width:.1f}" height="{LANE - 8}" fill="{COLOURS.get(lane, "#555")}"><title>{html.escape(e["name"])}: '
                       f'{e["dur"]:.1f} µs</title></rect>')  # fmt: skip
    step = next(s for s in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if total / s <= 12)
    out += [f'<text x="{x(t):.0f}" y="{height - 6}" fill="#666">{t}</text>' for t in range(0, int(total) + 1, step)]
    return "\n".join([*out, "</svg>"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=argparse.FileType(), help="what --trace has written")
    print(picture(json.load(parser.parse_args().trace)["traceEvents"]))
