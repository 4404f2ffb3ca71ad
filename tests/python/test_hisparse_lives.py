"""Stateful property test: hypothesis drives a Coordinator through admissions, prefills, verifies, acceptances and ends, and a plain
dictionary of bytes says what every answer must be."""

import hisparse as oracle
import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import specstate.hisparse as hisparse

LAYERS = 3  # 7 and 9 are anchors, 8 follows 7
FIRST = 7
ITEM = (4, 10, 16)


class Lives(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32 - 1), hot=st.integers(4, 12), window=st.integers(1, 5), page=st.sampled_from([1, 3, 4]), scratch=st.sampled_from([0, 20]))
    def start(self, seed, hot, window, page, scratch):
        self.rng = np.random.default_rng(seed)
        self.requests, self.hot, self.window, self.context = 3, hot, window, 40
        self.rows = 2 * (hot + 2 * window + scratch) + 1  # for two of the three requests
        self.host_rows = 70
        self.hosts = [self.rng.integers(0, 256, (self.host_rows, n), dtype=np.uint8) for n in ITEM]
        self.devices = [self.rng.integers(0, 256, (self.rows, n), dtype=np.uint8) for n in ITEM]
        self.c = hisparse.Coordinator(
            self.hosts, self.devices, requests=3, hot=hot, window=window, scratch=scratch, context=self.context, page_size=page, top_k=4,
            first_layer=FIRST, anchor_of=[7, 7, 9],
        )
        self.page = page
        self.content = [None] * 3  # per live request: [layer][position] -> bytes
        self.width = [0] * 3
        self.owed = 0  # rounds of layer 7 that layer 8 has yet to follow

    def length(self, r):
        return len(self.content[r][0]) - self.width[r]

    def live(self, verifying=None):
        return [r for r in range(3) if self.content[r] is not None and (verifying is None or (self.width[r] > 0) == verifying)]

    def attempt(self, call, *arguments):
        before = (self.c.free_device_rows, self.c.free_host_rows, *[x.copy() for x in self.c.tables(FIRST)])
        try:
            call(*arguments)
            return True
        except RuntimeError as e:
            assert "HiSparse" in str(e) and "failed to allocate" in str(e)
            for a, b in zip(before, (self.c.free_device_rows, self.c.free_host_rows, *self.c.tables(FIRST))):
                np.testing.assert_array_equal(a, b)
            return False

    @rule(r=st.integers(0, 2), tokens=st.integers(0, 30))
    def admit(self, r, tokens):
        if self.content[r] is None:
            fits = self.c.can_admit(tokens)
            assert self.attempt(self.c.admit, r, tokens) == fits
            if fits:
                self.content[r] = [[] for _ in range(LAYERS)]

    @precondition(lambda self: self.live(False))
    @rule(data=st.data(), direct=st.booleans())
    def prefill(self, data, direct):
        r = data.draw(st.sampled_from(self.live(False)))
        n = data.draw(st.integers(0, min(9, self.context - self.length(r))))
        if not self.attempt(self.c.reserve, r, n):
            return
        for layer in range(LAYERS):
            rows = self.rng.integers(0, 256, (n, ITEM[layer]), dtype=np.uint8)
            start = len(self.content[r][layer])
            if direct:
                for i in range(n):
                    self.hosts[layer][self.c.host_row(r, start + i)] = rows[i]
            else:
                self.c.stage(FIRST + layer, r, start, rows)
            self.content[r][layer] += list(rows)
        self.c.append(r, n, source="host" if direct else "staged")

    @precondition(lambda self: self.live(False))
    @rule(data=st.data())
    def verify(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.live(False)), unique=True))
        ids = [r for r in ids if self.length(r) < self.context]
        widths = [data.draw(st.integers(1, min(self.window, self.context - self.length(r)))) for r in ids]
        out = np.full((len(ids), self.window), 99, np.int32)
        if not self.attempt(lambda: self.c.prepare_verify(ids, widths, out=out)):
            return
        for b, r in enumerate(ids):
            self.width[r] = widths[b]
            assert (out[b, : widths[b]] >= 0).all() and (out[b, widths[b] :] == -1).all()
            for layer in range(LAYERS):
                for j in range(widths[b]):
                    row = self.rng.integers(0, 256, ITEM[layer], dtype=np.uint8)
                    if self.rng.integers(2):
                        self.devices[layer][out[b, j]] = row
                    else:
                        self.c.write(FIRST + layer, r, j, row)
                    self.content[r][layer].append(row)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), later=st.booleans())
    def swap(self, data, later):
        ids = np.array(self.live(), np.int64)
        steps, k = self.window, 4
        lens = np.array([[min(self.length(r) + s + 1, self.length(r) + self.width[r]) for s in range(steps)] for r in ids])
        tokens = np.array([[[data.draw(st.integers(-1, 41)) for _ in range(k)] for _ in range(steps)] for _ in ids], np.int32)
        for layer in (0, 2):
            rounds, round_of = self.c.plan_rounds(FIRST + layer, tokens, lens, ids)
            outs = []
            for n in range(rounds):
                out = self.c.swap(FIRST + layer, np.where(round_of[:, :, None] == n, tokens, -1).astype(np.int32), lens, ids, round=n)
                self.look(layer, ids, tokens, lens, round_of == n, out)
                outs.append(out)
            if layer == 0 and later:  # other things happen first, another swap among them
                self.owed = rounds
            elif layer == 0:
                for n in range(rounds):
                    self.c.follow(FIRST + 1, round=n)
                    self.look(1, ids, tokens, lens, round_of == n, outs[n])
                self.owed = 0
        assert self.c.stats()["unserved"] == 0

    @precondition(lambda self: self.owed)
    @rule()
    def follow(self):
        """Requests may have ended, been accepted or opened a window since the swap: `conserved_and_true` then looks at all rows."""
        first = self.c.tables(FIRST)[0]
        rounds, self.owed = self.owed, 0
        for n in range(rounds):
            self.c.follow(FIRST + 1, round=n)
        np.testing.assert_array_equal(first, self.c.tables(FIRST)[0])

    def look(self, layer, ids, tokens, lens, mine, out):
        visible = (tokens >= 0) & (tokens < lens[:, :, None]) & mine[:, :, None]
        assert ((out >= 0) == visible).all()
        for b, s, k in np.argwhere(visible):
            np.testing.assert_array_equal(self.devices[layer][out[b, s, k]], self.content[ids[b]][layer][tokens[b, s, k]])

    @precondition(lambda self: self.live(True))
    @rule(data=st.data())
    def accept(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.live(True)), unique=True))
        counts = [data.draw(st.integers(0, self.width[r])) for r in ids]
        self.c.accept(ids, counts)
        for r, n in zip(ids, counts):
            keep = self.length(r) + n
            self.content[r] = [rows[:keep] for rows in self.content[r]]
            self.width[r] = 0

    @rule(r=st.integers(0, 2), how=st.sampled_from(["finish", "abort", "retract"]))
    def end(self, r, how):
        if self.content[r] is None:
            return self.c.abort(r)
        if how == "retract":
            keep = self.length(r)
            self.content[r] = [rows[:keep] for rows in self.content[r]]
            self.width[r] = 0
            self.c.retract(r)
            if self.attempt(self.c.resume, r):
                return
            how = "abort"
        getattr(self.c, how)(r)
        self.content[r], self.width[r] = None, 0

    @invariant()
    def conserved_and_true(self):
        if not hasattr(self, "c"):
            return
        owned = []
        pages = set()
        for layer in (0, 2):
            tokens, locs = self.c.tables(FIRST + layer)
            for r in range(3):
                if self.content[r] is None:
                    assert (tokens[r] == -1).all() and (locs[r] == -1).all()
                    continue
                held = tokens[r][tokens[r] >= 0]
                assert np.unique(held).size == held.size
                assert held.size == 0 or held.max() < self.length(r) + self.width[r]
                for token, loc in zip(tokens[r], locs[r]):
                    if token >= 0 and (token < self.length(r) or self.width[r]):
                        for member in (0, 1) if layer == 0 else (2,):
                            want = self.content[r][member][token]
                            if token >= self.length(r) or member != 1 or not self.owed:
                                np.testing.assert_array_equal(self.devices[member][loc], want)
                if layer == 0:
                    owned += locs[r][locs[r] >= 0].tolist()
        assert len(set(owned)) == len(owned)
        for r in self.live():
            assert self.c.length(r) == self.length(r)
            for p in range(self.length(r)):
                row = self.c.host_row(r, p)
                assert row not in pages
                pages.add(row)
                for layer in range(LAYERS):
                    np.testing.assert_array_equal(self.hosts[layer][row], self.content[r][layer][p])
        per_request = (self.rows - 1) // 2
        assert self.c.free_device_rows == self.rows - per_request * len(self.live())
        assert len(pages) <= self.host_rows // self.page * self.page - self.c.free_host_rows

    def teardown(self):
        if hasattr(self, "c"):
            for r in range(3):
                self.c.abort(r)
            assert self.c.free_device_rows == self.rows
            assert self.c.free_host_rows == self.host_rows // self.page * self.page


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_a_life_in_dsv4_pages():
    """Prefill, verify, acceptance and swap where rows are two records of a page."""
    rng = np.random.default_rng(0)
    host = rng.integers(0, 256, (2, oracle.DSV4_PAGE_BYTES), dtype=np.uint8)
    device = rng.integers(0, 256, (1, oracle.DSV4_PAGE_BYTES), dtype=np.uint8)
    padding = oracle.dsv4_padding(host), oracle.dsv4_padding(device)
    c = hisparse.Coordinator([host], [device], requests=2, hot=8, window=2, context=60, page_size=5, layout="dsv4")
    rows = list(rng.integers(0, 256, (30, oracle.DSV4_ITEM_BYTES), dtype=np.uint8))
    c.admit(1, 30)
    c.stage(0, 1, 0, np.stack(rows))
    c.append(1, 30)
    for accepted in (2, 0, 1, 2):
        c.prepare_verify([1], [2])
        for j, row in enumerate(rng.integers(0, 256, (2, oracle.DSV4_ITEM_BYTES), dtype=np.uint8)):
            c.write(0, 1, j, row)
            rows.append(row)
        n = len(rows)
        tokens = np.array([[n - 1, n - 2, 0, 17, 29]], np.int32)
        out = c.swap(0, tokens, np.array([n]), np.array([1]))
        np.testing.assert_array_equal(oracle.dsv4_rows(device)[out[0]], [rows[t] for t in tokens[0]])
        c.accept([1], [accepted])
        del rows[n - 2 + accepted :]
        for p, row in enumerate(rows):
            np.testing.assert_array_equal(oracle.dsv4_read(host, c.host_row(1, p)), row)
    for was, now in zip(padding, (host, device)):
        np.testing.assert_array_equal(was, oracle.dsv4_padding(now))
