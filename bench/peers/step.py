"""The state operations of one speculative step at scale, made of sglang's kernels: the sequence, sizes and selections of bench/gpu/step.cpp.

Its speculative swap takes at most 4 steps and 8192 occurrences, so a verify of 8 tokens is two swaps, and each follower replays two plans. The
better of its two KDA verifies is taken for each batch. It has no kernel of its own wheel for windows and backups: that part is left out here.
A graph holds 20 steps, followers' copies run on a second stream. Ours is measured by `specstate bench step --device cuda` in the same job.
"""

import types

import peers
import torch
from kda import Layer
from peers import SGLANG, case

STEPS, ACCEPTED, REPEATS, VARIANTS = 8, 4, 20, 4
KDA_LAYERS, HEADS, D = 69, 12, 128
SPARSE_LAYERS, GROUP, TOP_K, HOT, ROW = 24, 4, 2048, 4096, 576
ANCHORS, MISSES, CORE, PAGE = SPARSE_LAYERS // GROUP, 100, 2300, 64
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_HIDDEN, DRAFT_WINDOW = 6, 8, 7168, 4096
HALF = STEPS // 2


class Sparse:
    def __init__(self, B, context, pool):
        from sglang.kernels.ops.kvcache import hisparse

        self.ops, self.B = hisparse, B
        host_rows, columns, scratch = pool.numel() // ROW // SPARSE_LAYERS, HOT + PAGE, HALF * TOP_K - HOT
        self.host = [pool[i * host_rows * ROW : (i + 1) * host_rows * ROW].view(host_rows, ROW) for i in range(SPARSE_LAYERS)]
        self.device = [torch.zeros(B * (columns + scratch), ROW, dtype=torch.uint8, device="cuda") for _ in range(SPARSE_LAYERS)]
        i32, i64 = dict(dtype=torch.int32, device="cuda"), dict(dtype=torch.int64, device="cuda")
        self.locs = torch.randint(0, host_rows, (B, context), **i64)
        self.variants = []
        for variant in range(VARIANTS):
            rows = []
            for repeat in range(REPEATS):
                fresh = torch.arange(MISSES) + 2 * HOT + (variant * REPEATS + repeat) * MISSES
                for step in range(STEPS):
                    mine = fresh[MISSES * step // STEPS : MISSES * (step + 1) // STEPS]
                    core = (torch.arange(TOP_K - len(mine)) + 137 * step + 31 * repeat) % CORE
                    rows.append(torch.cat([mine, core])[torch.randperm(TOP_K)])
            # [repeats, halves, B, 4, top_k], each half dense
            self.variants.append(torch.stack(rows).view(REPEATS, 2, 1, HALF, TOP_K).repeat(1, 1, B, 1, 1).to(torch.int32).cuda())
        self.top_k, self.replays = self.variants[0].clone(), 0
        self.lens, self.real, self.ids = torch.full((B * HALF,), context, **i32), torch.tensor([B], **i32), torch.arange(B, **i64)
        self.out = torch.empty(B, HALF, TOP_K, **i32)
        hash_size = 1 << (2 * HOT - 1).bit_length()
        resident = torch.arange(HOT, **i64)
        self.anchors = []
        for _ in range(ANCHORS):
            index = torch.full((B, 2, hash_size), -1, **i64)
            index[:, 0, (resident * 2654435761) & (hash_size - 1)] = (resident << 32) | resident
            tokens = torch.full((B, columns), -1, **i32)
            tokens[:, :HOT] = torch.arange(HOT)
            spare = (B * columns + torch.arange(B * scratch, **i32)).view(B, -1)
            work = torch.full((B + 1, max(4 * B, 5 * HALF * TOP_K)), -1, **i32)
            work[0] = 0
            plans = [dict(miss_src=torch.empty(B, HALF * TOP_K, **i64), miss_dst=torch.empty(B, HALF * TOP_K, **i32), miss_count=torch.zeros(B, **i32)) for _ in range(2)]
            state = hisparse.HiSparseSpecState(index, torch.zeros(B + 1, HOT, **i32), spare, work)
            self.anchors.append((tokens, torch.arange(B * columns, **i32).view(B, -1), state, plans))

    def bytes(self):
        states = sum(t.nbytes for tokens, locs, state, _ in self.anchors for t in (tokens, locs, *state))
        return states + self.locs.nbytes + sum(d.nbytes for d in self.device)

    def next(self):
        """What the next graph selects."""
        self.replays += 1
        self.top_k.copy_(self.variants[self.replays % VARIANTS])

    def swap(self, anchor, repeat):
        tokens, locs, state, plans = self.anchors[anchor]
        for half in range(2):
            self.ops.load_cache_to_device_buffer_spec_mla(
                top_k_tokens=self.top_k[repeat, half], device_buffer_tokens=tokens, host_cache_locs=self.locs, device_buffer_locs=locs,
                host_cache=self.host[anchor * GROUP], device_buffer=self.device[anchor * GROUP], top_k_device_locs=self.out, req_pool_indices=self.ids, seq_lens=self.lens,
                state=state, num_real_reqs=self.real, **plans[half])  # fmt: skip

    def follow(self, anchor):
        """All followers in turn, and an event behind each."""
        there = []
        for layer in range(anchor * GROUP + 1, (anchor + 1) * GROUP):
            for plan in self.anchors[anchor][3]:
                self.ops.copy_cache_planned_mla(**plan, num_real_reqs=self.real, host_cache=self.host[layer], device_buffer=self.device[layer], item_size_bytes=ROW, num_blocks=8)
            there.append(torch.cuda.current_stream().record_event())
        return there


class Kda:
    def __init__(self, B):
        from sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode import commit_kda_replayssm_spec_all_layers
        from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify

        self.commit_ops = commit_kda_replayssm_spec_all_layers, scatter_mamba_states_after_mtp_verify
        f32, bf = dict(device="cuda", dtype=torch.float32), dict(device="cuda", dtype=torch.bfloat16)
        C = HEADS * D
        self.layer = Layer(HEADS, B, STEPS, True)
        # Activations are the work of the layer before, so one set serves all layers; weights are each layer's own.
        self.weights = [(torch.randn(3 * C, 4, **f32) * 0.3, torch.randn(HEADS, **f32) * 0.5, torch.randn(C, **f32), torch.randn(D, **f32)) for _ in range(KDA_LAYERS)]
        self.state = torch.randn(KDA_LAYERS, B, HEADS, D, D, **f32)
        self.conv, self.windows = torch.randn(KDA_LAYERS, B, 3, 3 * C, **bf), torch.randn(KDA_LAYERS, B, STEPS, 3, 3 * C, **bf)
        ring = (KDA_LAYERS, B, HEADS, STEPS, D)
        self.rings = torch.zeros(ring, **bf), torch.zeros(ring, **bf), torch.zeros(ring, **f32), torch.zeros(ring[:-1], **f32)
        self.accept = torch.full((B,), ACCEPTED, device="cuda", dtype=torch.int32)
        self.last = (self.accept - 1).to(torch.int64)
        self.slots = self.layer.slots.to(torch.int64)
        # Its scatter wants a slot's [channels, 3] dense, its verify takes any strides: as many bytes in the other order, counted once.
        self.scattered = torch.zeros(KDA_LAYERS, B, 3 * C, 3, **bf), torch.zeros(KDA_LAYERS, B, STEPS, 3 * C, 3, **bf)

    def bytes(self):
        return sum(t.nbytes for t in (self.state, self.conv, self.windows, *self.rings))

    def verify(self, layer, how):
        x = self.layer
        x.w, x.A_log, x.dt, x.norm_weight = self.weights[layer]
        x.state, x.conv, x.windows, x.rings = self.state[layer], self.conv[layer], self.windows[layer], tuple(r[layer] for r in self.rings)
        getattr(x, how)()

    def commit(self, begin=0, end=KDA_LAYERS):
        fold, scatter = self.commit_ops
        state, rawv, rawk, g, beta, conv, windows = (t[begin:end] for t in (self.state, *self.rings, *self.scattered))
        fold(state, rawv, rawk, g, beta, self.layer.slots, self.accept, max_cache_len=STEPS, num_k_heads=HEADS, null_block_id=-1)
        pools = types.SimpleNamespace(temporal=torch.empty(0, device="cuda"), intermediate_ssm=None, conv=[conv], intermediate_conv_window=[windows])
        scatter(pools, self.slots, self.last, None, None)


class Draft:
    def __init__(self, B):
        from sglang.kernels.ops.kvcache.kvcache import store_cache
        from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

        bf, kv, rows = dict(device="cuda", dtype=torch.bfloat16), DRAFT_HEADS * D, B * (DRAFT_WINDOW + 16)
        weight, norm = torch.randn(DRAFT_LAYERS, 2 * kv, DRAFT_HIDDEN, **bf) * DRAFT_HIDDEN**-0.5, torch.rand(DRAFT_LAYERS, D, **bf) + 0.5
        rope = types.SimpleNamespace(rotary_dim=D, is_neox_style=True, cos_sin_cache=torch.randn(40960, D, device="cuda"))
        modules = [types.SimpleNamespace(self_attn=types.SimpleNamespace(
            num_kv_heads=DRAFT_HEADS, head_dim=D, rotary_emb=rope, q_size=0, kv_size=kv, qkv_proj=types.SimpleNamespace(weight=weight[i]),
            k_norm=types.SimpleNamespace(weight=norm[i], variance_epsilon=1e-6))) for i in range(DRAFT_LAYERS)]  # fmt: skip
        self.helper = FusedKVMaterializeHelper(modules, rope, DRAFT_HEADS, D, torch.device("cuda", 0), max_position_hint=40960)
        self.pools = torch.zeros(2, DRAFT_LAYERS, rows, kv, **bf)
        self.x = torch.randn(B * ACCEPTED, DRAFT_HIDDEN, **bf)  # only what was committed, which an engine would have to know on the host
        self.positions = torch.arange(B * ACCEPTED, device="cuda", dtype=torch.int64)
        mapping = torch.arange(B * ACCEPTED, device="cuda", dtype=torch.int64)
        k_pool, v_pool = self.pools
        self.write = lambda layer, k, v: store_cache(k.view(-1, kv), v.view(-1, kv), k_pool[layer], v_pool[layer], mapping)

    def bytes(self):
        return self.pools.nbytes

    def materialize(self):
        self.helper.materialize(self.x, self.positions, self.write)


def steps(parts, sparse, kda, draft, how, side, apart):
    """Enqueues 20 steps. `apart`: as ours, a layer waits for its own rows alone, and what follows an acceptance is on two streams."""
    main = torch.cuda.current_stream()
    for repeat in range(REPEATS):
        sparse_layer = 0
        for layer in range(KDA_LAYERS + SPARSE_LAYERS):
            if layer % 4 != 3 and layer != KDA_LAYERS + SPARSE_LAYERS - 1:
                if "kda_verify" in parts:
                    kda.verify(layer - sparse_layer, how)
                continue
            anchor, place = divmod(sparse_layer, GROUP)
            sparse_layer += 1
            if place == 0:
                if "swap" in parts:
                    sparse.swap(anchor, repeat)
                if "follow" in parts:
                    side.wait_stream(main)
                    with torch.cuda.stream(side):
                        there = sparse.follow(anchor)
            elif "follow" in parts and (apart or place == 1):
                main.wait_event(there[place - 1 if apart else -1])
        beside = apart and "draft_kv" in parts and "kda_commit" in parts
        if beside:
            side.wait_stream(main)
        if "draft_kv" in parts:
            with torch.cuda.stream(side if beside else main):
                draft.materialize()
        if "kda_commit" in parts:
            kda.commit()
        if beside:
            main.wait_stream(side)


class Turns:
    """A graph of 20 steps and its times."""

    def __init__(self, graph, stream, sparse):
        self.graph, self.stream, self.sparse, self.samples = graph, stream, sparse, []
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(self, rounds, unmeasured=0):
        for turn in range(-unmeasured, rounds):
            with torch.cuda.stream(self.stream):
                self.sparse.next()
                self.begin.record(), self.graph.replay(), self.end.record()
            self.end.synchronize()
            if turn >= 0:
                self.samples.append(self.begin.elapsed_time(self.end) * 1e3 / REPEATS)
        return self.us()

    def us(self):
        return min(self.samples)  # as ours: other work only ever adds


def measure(timer, report, options):
    pool = torch.zeros(1 << 30, dtype=torch.uint8).pin_memory()
    side, stream = torch.cuda.Stream(), torch.cuda.Stream()
    parts = {"all": ("swap", "follow", "kda_verify", "kda_commit", "draft_kv"), "swap": ("swap",), "swap_and_follow": ("swap", "follow"),
             "kda_verify": ("kda_verify",), "kda_commit": ("kda_commit",), "draft_kv": ("draft_kv",)}  # fmt: skip
    for requests, context in [(1, 32768)] if timer.quick else [(1, 131072), (8, 131072), (32, 131072), (64, 32768)]:
        wanted = {part: bits for part, bits in parts.items() if options.wanted(case("step", part, context=context, requests=requests))}
        if not wanted:
            continue
        worlds = Sparse(requests, context, pool), Kda(requests), Draft(requests)
        how = "fused" if requests == 1 else "chain"  # measured: docs/decisions/0012-forms.json
        with torch.cuda.stream(stream):
            for _ in range(2):
                worlds[0].next()
                steps(parts["all"], *worlds, how, side, False)
        torch.cuda.synchronize()
        for part, bits in wanted.items():
            more = {"peer_state_bytes": sum(w.bytes() for w in worlds)} if part == "all" else {}
            # The better order of both counts: both have a few rounds, that one has more.
            orders = {}
            for apart in (False, True) if "follow" in bits else (False,):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    steps(bits, *worlds, how, side, apart)
                orders[apart] = Turns(graph, stream, worlds[0])
                orders[apart].run(1 if timer.quick else 2, 2 if "swap" in bits else 1)  # two reach the steady state of misses
            best = min(orders, key=lambda apart: orders[apart].us())
            if not timer.quick:
                orders[best].run(2 if requests > 8 else 4)
            print(f"step: {part}: requests={requests}: in turn, apart: {[turns.us() for turns in orders.values()]}", flush=True)
            report(case("step", part, context=context, requests=requests), {SGLANG: orders[best].us()}, **more)
            del graph, orders
        misses = sum(plan["miss_count"].float().mean().item() for _, _, _, plans in worlds[0].anchors for plan in plans) / ANCHORS
        print(f"step: requests={requests}: sglang misses {misses:.1f} rows a request and anchor; state {sum(w.bytes() for w in worlds)} bytes", flush=True)
        del worlds
        torch.cuda.empty_cache()


if __name__ == "__main__":
    peers.main(measure)
