"""hisparse.Coordinator over torch tensors on a GPU: lives equal the CPU's; a step without the host, in a CUDA graph; followers on a side stream."""

import random

import pytest

torch = pytest.importorskip("torch", reason="needs-torch")

from specstate import hisparse  # noqa: E402

FIRST, ANCHORS, ANCHOR_OF = 4, (4, 6), [4, 4, 6]
REQUESTS, HOT, WINDOW, TOP_K, CONTEXT, ITEM = 3, 24, 4, 6, 80, 576
W = HOT + 2 * WINDOW


class Twins:
    """The same coordinator over CPU tensors and over a GPU's; everything is told to both."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        bytes_of = lambda n: torch.randint(0, 256, (n, ITEM), dtype=torch.uint8, generator=generator)  # noqa: E731
        self.hosts, self.pools, self.c = [[], []], [[], []], []
        for _ in ANCHOR_OF:
            host, pool = bytes_of(REQUESTS * CONTEXT), bytes_of(REQUESTS * W)
            self.hosts[0].append(host), self.hosts[1].append(host.clone().pin_memory())
            self.pools[0].append(pool), self.pools[1].append(pool.cuda())
        for hosts, pools in zip(self.hosts, self.pools):
            self.c.append(hisparse.Coordinator(hosts, pools, requests=REQUESTS, hot=HOT, window=WINDOW, context=CONTEXT, top_k=TOP_K, page_size=8,
                                               first_layer=FIRST, anchor_of=ANCHOR_OF, sm_budget=seed % 3))  # fmt: skip
        self.length = [0] * REQUESTS
        self.generator = generator

    def rows(self, n):
        rows = torch.randint(0, 256, (n, ITEM), dtype=torch.uint8, generator=self.generator)
        return rows, rows.cuda()

    def prefill(self, r, n):
        for c in self.c:
            c.reserve(r, n)
        for layer in range(len(ANCHOR_OF)):
            for c, rows in zip(self.c, self.rows(n)):
                c.stage(FIRST + layer, r, self.length[r], rows)
        for c in self.c:
            c.append(r, n)
        self.length[r] += n

    def write(self, r, width):
        for layer in range(len(ANCHOR_OF)):
            for j in range(width):
                for c, row in zip(self.c, self.rows(1)):
                    c.write(FIRST + layer, r, j, row[0])

    def select(self, ids, widths):
        tokens = torch.tensor([[[self.random.randint(-1, self.length[r] + w) for _ in range(TOP_K)] for _ in range(WINDOW)] for r, w in zip(ids, widths)], dtype=torch.int32)
        lens = torch.tensor([[self.length[r] + min(w, s + 1) for s in range(WINDOW)] for r, w in zip(ids, widths)], dtype=torch.int32)
        return tokens, lens

    def check(self):
        torch.cuda.synchronize()
        for a, b in zip(self.pools[0] + self.hosts[0], self.pools[1] + self.hosts[1]):
            assert torch.equal(a, b.cpu())
        for layer in ANCHORS:
            for a, b in zip(self.c[0].tables(layer), self.c[1].tables(layer)):
                assert torch.equal(a, b.cpu())
        for r in range(REQUESTS):
            assert self.c[0].length(r) == self.c[1].length(r) and self.c[0].state(r) == self.c[1].state(r)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lives_with_counts_that_the_host_knows(seed):
    t = Twins(seed)
    side = torch.cuda.Stream()
    for r in range(REQUESTS):
        for c in t.c:
            c.admit(r, 20)
        t.prefill(r, t.random.randint(0, 30))
    for _ in range(12):
        ids = t.random.sample(range(REQUESTS), t.random.randint(1, REQUESTS))
        widths = [t.random.randint(1, min(WINDOW, CONTEXT - t.length[r])) if t.length[r] < CONTEXT else 0 for r in ids]
        ids, widths = zip(*[(r, w) for r, w in zip(ids, widths) if w] or [((), ())])
        if not ids:
            break
        a, b = (c.prepare_verify(ids, widths) for c in t.c)
        assert torch.equal(a, b.cpu())
        for r, w in zip(ids, widths):
            t.write(r, w)
        tokens, lens = t.select(ids, widths)
        requests = torch.tensor(ids)
        for layer in ANCHORS:
            a = t.c[0].swap(layer, tokens, lens, requests)
            b = t.c[1].swap(layer, tokens.cuda(), lens.cuda(), requests.cuda())
            assert torch.equal(a, b.cpu())
        t.c[0].follow(FIRST + 1)
        side.wait_stream(torch.cuda.current_stream())
        t.c[1].follow(FIRST + 1, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        accepted = [t.random.randint(0, w) for w in widths]
        for c in t.c:
            c.accept(ids, accepted)
        for r, n in zip(ids, accepted):
            t.length[r] += n
        t.check()
    for c in t.c:
        c.retract(0), c.resume(0), c.finish(1), c.abort(2)
    t.check()


def test_a_step_in_a_graph():
    """Windows, swaps, followers and acceptance in one captured graph; the host is told what was accepted one step late."""
    t = Twins(9)
    for r in range(REQUESTS):
        for c in t.c:
            c.admit(r, 0)
        t.prefill(r, 10 + 9 * r)
    arrays = dict(requests=torch.zeros(REQUESTS + 1, dtype=torch.int64), widths=torch.zeros(REQUESTS + 1, dtype=torch.int32), accepted=torch.zeros(REQUESTS + 1, dtype=torch.int32),
                  real=torch.zeros(1, dtype=torch.int32), locs=torch.zeros((REQUESTS + 1, WINDOW), dtype=torch.int32), tokens=torch.zeros((REQUESTS, WINDOW, TOP_K), dtype=torch.int32),
                  lens=torch.zeros((REQUESTS, WINDOW), dtype=torch.int32), out0=torch.zeros((REQUESTS, WINDOW, TOP_K), dtype=torch.int32),
                  out1=torch.zeros((REQUESTS, WINDOW, TOP_K), dtype=torch.int32))  # fmt: skip
    both = [arrays, {name: x.cuda() for name, x in arrays.items()}]

    def step(c, x):
        c.open_step(x["requests"], x["widths"], num_real_reqs=x["real"], out=x["locs"])
        for i, layer in enumerate(ANCHORS):
            c.swap(layer, x["tokens"], x["lens"], x["requests"][:REQUESTS], num_real_reqs=x["real"], out=x[f"out{i}"])
        c.follow_all(FIRST)
        c.close_step(x["requests"], x["widths"], x["accepted"], num_real_reqs=x["real"])

    graph, untold = None, []
    for _ in range(15):
        ids = t.random.sample(range(REQUESTS), t.random.randint(1, REQUESTS))
        ids = [r for r in ids if t.length[r] + WINDOW <= CONTEXT]
        widths = [t.random.randint(0, WINDOW) for _ in ids]
        accepted = [t.random.randint(0, w) for w in widths]
        for c in t.c:
            c.begin_step(ids)
        for r, w in zip(ids, widths):
            t.write(r, w)
        n = len(ids)
        if n:
            tokens, lens = t.select(ids, widths)
            arrays["tokens"][:n], arrays["lens"][:n] = tokens, lens
        for name, values in (("requests", ids), ("widths", widths), ("accepted", accepted)):
            arrays[name][:n] = torch.tensor(values, dtype=arrays[name].dtype)
        arrays["real"][0] = n
        for name, x in arrays.items():
            both[1][name].copy_(x)
        torch.cuda.synchronize()
        step(t.c[0], both[0])
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(t.c[1], both[1])
        graph.replay()
        torch.cuda.synchronize()
        for name in ("locs", "out0", "out1"):
            assert torch.equal(both[0][name], both[1][name].cpu()), name
        for r, k in zip(ids, accepted):
            t.length[r] += k
        untold.append((ids, accepted))
        if len(untold) > 1:
            for c in t.c:
                c.end_step(*untold[0])
            untold.pop(0)
        t.check()
    for c in t.c:
        c.end_step(*untold[0])
    assert [t.c[1].length(r) for r in range(REQUESTS)] == t.length
    t.check()
