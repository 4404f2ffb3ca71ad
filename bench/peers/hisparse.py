"""HiSparse beside sglang's own kernels: the speculative swap, alone, of four layers and with three followers, the single-step swap, once and for all
four steps, the replay of followers.

The layout of sglang's speculative benchmark (4 steps of 2048 positions over 4096 hot slots, 782 distinct misses), but each request has
host rows of its own. Both start from the same state before every call (restored by copies whose time is taken away).
"""

import peers
import torch
from peers import SGLANG, case, working

from specstate import hisparse as ours

TOP_K, HOT, PAGE = 2048, 4096, 64


def selection(requests, steps, misses_of_step, fresh):
    """[B, S, K] positions: hits of the 4096 resident ones, rolled by 137 a step; `fresh` is where the misses begin."""
    rows = []
    for step in range(steps):
        misses = torch.arange(misses_of_step) + fresh + step * misses_of_step
        if step >= 2 and misses_of_step:  # steps 2 and 3 repeat one position of steps 0 and 1
            misses[0] = fresh + (step - 2) * misses_of_step
        rows.append(torch.cat([torch.roll(torch.arange(HOT), -137 * step)[: TOP_K - misses_of_step], misses]))
    return torch.stack(rows).to(torch.int32).repeat(requests, 1, 1)


class World:
    def __init__(self, requests, steps, item, misses_of_step, context=6144):
        B, self.item = requests, item
        generator = torch.Generator().manual_seed(1)
        self.host = torch.randint(0, 256, (B * context, item), dtype=torch.uint8, generator=generator).pin_memory()
        self.device = torch.zeros((B * (HOT + PAGE) + B * 4096, item), dtype=torch.uint8, device="cuda")
        order = torch.randperm(B * context, generator=generator).view(B, context)
        self.host_locs = order.to(torch.int64).cuda()
        self.slot_locs = torch.arange(B * (HOT + PAGE), dtype=torch.int32).view(B, -1).cuda()
        tokens = torch.full((B, HOT + PAGE), -1, dtype=torch.int32)
        tokens[:, :HOT] = torch.arange(HOT)
        self.tokens0, self.tokens = tokens.cuda(), tokens.cuda()
        self.top_k = selection(B, steps, misses_of_step, HOT + 100).cuda()
        self.out = torch.empty((B, steps, TOP_K), dtype=torch.int32, device="cuda")
        self.ids = torch.arange(B, device="cuda", dtype=torch.int64)
        self.lens = torch.full((B * steps,), context, dtype=torch.int32, device="cuda")
        self.real = torch.tensor([B], dtype=torch.int32, device="cuda")
        M = steps * TOP_K
        self.plan = {"miss_src": torch.empty((B, M), dtype=torch.int64, device="cuda"), "miss_dst": torch.empty((B, M), dtype=torch.int32, device="cuda"),
                     "miss_count": torch.empty(B, dtype=torch.int32, device="cuda")}  # fmt: skip
        hash_size = 1 << (2 * HOT - 1).bit_length()
        index = torch.full((B, 2, hash_size), -1, dtype=torch.int64)
        resident = torch.arange(HOT, dtype=torch.int64)
        index[:, 0, (resident * 2654435761) & (hash_size - 1)] = (resident << 32) | resident
        self.index0, self.index = index.cuda(), index.cuda()
        self.policy = torch.zeros((B + 1, HOT), dtype=torch.int32, device="cuda")
        scratch = min(M, max(1024, M - HOT))
        self.scratch = (B * (HOT + PAGE) + torch.arange(B * scratch, dtype=torch.int32)).view(B, -1).cuda()
        self.scratch_state0 = torch.full((B + 1, max(4 * B, 5 * M)), -1, dtype=torch.int32, device="cuda")
        self.scratch_state0[0] = 0
        self.scratch_state = self.scratch_state0.clone()
        self.scratch0, self.slot_locs0 = self.scratch.clone(), self.slot_locs.clone()
        self.lru0 = torch.arange(HOT, dtype=torch.int16, device="cuda").repeat(B, 1)
        self.lru = self.lru0.clone()

    def spec(self, state_type):
        state = state_type(self.index, self.policy, self.scratch, self.scratch_state)
        return dict(top_k_tokens=self.top_k, device_buffer_tokens=self.tokens, host_cache_locs=self.host_locs, device_buffer_locs=self.slot_locs,
                    host_cache=self.host, device_buffer=self.device, top_k_device_locs=self.out, req_pool_indices=self.ids, seq_lens=self.lens,
                    state=state, num_real_reqs=self.real, **self.plan)  # fmt: skip

    def single(self, step, out):
        """One step by the single-step swap."""
        return dict(top_k_tokens=self.top_k[:, step].contiguous(), device_buffer_tokens=self.tokens, host_cache_locs=self.host_locs, device_buffer_locs=self.slot_locs0,
                    host_cache=self.host, device_buffer=self.device, top_k_device_locs=out, req_pool_indices=self.ids, seq_lens=self.lens[: len(self.ids)], lru_slots=self.lru,
                    item_size_bytes=self.item, num_top_k=TOP_K, hot_buffer_size=HOT, page_size=PAGE, block_size=1024, num_real_reqs=self.real)  # fmt: skip

    def restore_single(self, _):
        self.tokens.copy_(self.tokens0), self.lru.copy_(self.lru0)

    def restore(self, _):
        self.tokens.copy_(self.tokens0), self.index.copy_(self.index0), self.policy.zero_()
        self.scratch.copy_(self.scratch0), self.slot_locs.copy_(self.slot_locs0), self.scratch_state.copy_(self.scratch_state0)


def measure(timer, report, options):
    from sglang.kernels.ops.kvcache import hisparse as theirs

    shapes = [(1, 576, 196), (8, 576, 196)] if timer.quick else [(b, 576, m) for b in (1, 8, 16, 64) for m in (196, 0)] + [(8, 656, 196), (8, 1152, 196)]
    for requests, item, misses in shapes:
        w = World(requests, 4, item, misses)
        unique = 4 * misses - (2 if misses else 0)
        name = case("hisparse", "spec_swap", bytes=item, hot=HOT, misses=unique, requests=requests, steps=4, top_k=TOP_K)
        if not options.wanted(name):
            continue
        mine, peer = w.spec(ours.HiSparseSpecState), w.spec(theirs.HiSparseSpecState)
        calls = {"ours": lambda _: ours.load_cache_to_device_buffer_spec_mla(**mine), SGLANG: lambda _: theirs.load_cache_to_device_buffer_spec_mla(**peer)}
        calls = working({who: checked(w, unique, call) for who, call in calls.items()}, name) and working(calls, name)
        report(name, timer.cold_us(calls, w.restore))
        if w.plan["miss_count"].tolist() != [unique] * requests:
            raise RuntimeError(f"{name}: the timed calls did not miss as they should")
        if misses:
            replay = dict(w.plan, num_real_reqs=w.real, host_cache=w.host, device_buffer=w.device, item_size_bytes=item)
            keys = dict(bytes=item, hot=HOT, misses=unique, requests=requests, steps=4, top_k=TOP_K)
            follow = {"ours": lambda _: [ours.copy_cache_planned_mla(**replay, num_blocks=8) for _ in range(3)],
                      SGLANG: lambda _: [theirs.copy_cache_planned_mla(**replay, num_blocks=8) for _ in range(3)]}  # fmt: skip
            follow = working(follow, "replay")
            report(case("hisparse", "follower_replay", followers=3, **keys), timer.cold_us(follow))
            if item == 576:
                report(case("hisparse", "swap_and_followers", followers=3, **keys), timer.cold_us({who: both(calls[who], follow[who]) for who in calls if who in follow}, w.restore))
                report(case("hisparse", "swap", **keys), timer.cold_us(working({SGLANG + ", four single steps": single_steps(w, theirs)}, "single steps"), w.restore_single))
    for requests, misses in [(1, 410)] if timer.quick else [(1, 410), (1, 2), (10, 410), (100, 2), (100, 410)]:
        item = 512
        name = case("hisparse", "single_swap", bytes=item, hot=HOT, misses=misses, requests=requests, steps=1, top_k=TOP_K)
        if not options.wanted(name):
            continue
        w = World(requests, 1, item, misses)
        call = w.single(0, w.out[:, 0].contiguous()) | w.plan
        calls = {"ours": lambda _: ours.load_cache_to_device_buffer_mla(**call), SGLANG: lambda _: theirs.load_cache_to_device_buffer_mla(**call)}
        report(name, timer.cold_us(working(calls, name), w.restore_single))


def both(first, then):
    return lambda repeat: (first(repeat), then(repeat))


def single_steps(w, ops):
    """The steps of a verify by one call of the single-step swap each, as engines do without the speculative one."""
    out = torch.empty_like(w.out[:, 0].contiguous())
    steps = [w.single(step, out) | w.plan for step in range(w.top_k.shape[1])]

    def call(_):
        for step in steps:
            ops.load_cache_to_device_buffer_mla(**step)

    w.restore_single(0), call(0)
    check(w, w.top_k[:, -1:], out.unsqueeze(1))
    return call


def checked(w, unique, call):
    """`call` from the initial state, and then: so many misses, and every missed position's bytes at the row that was returned."""

    def run(repeat):
        w.restore(0)
        call(repeat)
        torch.cuda.synchronize()
        if w.plan["miss_count"].tolist() != [unique] * w.top_k.shape[0]:
            raise RuntimeError(f"expected {unique} misses a request, got {w.plan['miss_count'].tolist()}")
        check(w, w.top_k, w.out)

    return run


def check(w, tokens, out):
    """The bytes of every position that missed are the host's."""
    missed = tokens >= HOT
    if not missed.any():
        return
    b = torch.arange(tokens.shape[0], device="cuda").view(-1, 1, 1).expand_as(tokens)[missed]
    want = w.host[w.host_locs[b, tokens[missed].long()].cpu()]
    got = w.device[out[missed].long()].cpu()
    if not torch.equal(want, got):
        raise RuntimeError("hisparse: bytes differ from the host's")


if __name__ == "__main__":
    peers.main(measure)
