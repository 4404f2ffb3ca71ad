"""Draft KV beside sglang's FusedKVMaterializeHelper with its pool writes, and beside the bare matrix product (torch, cuBLAS); the launch
function beside sglang's Triton kernel of that name."""

import types

import peers
import torch
from peers import SGLANG, case, working

from specstate import draft_kv as ours


def stacked(timer, report, options):
    from sglang.kernels.ops.speculative.fused_kv_materialize import _fused_norm_rope_stacked

    layers, heads, dim = 5, 8, 128
    bf = dict(device="cuda", dtype=torch.bfloat16)
    norm, table = torch.rand(layers, dim, **bf) + 0.5, torch.randn(40960, dim, device="cuda")
    eps = torch.full((layers,), 1e-6, device="cuda")
    for tokens in [256] if timer.quick else [16, 256, 1024, 8192]:
        name = case("draft_kv", "fused_norm_rope_stacked", head_dim=dim, kv_heads=heads, layers=layers, tokens=tokens)
        if not options.wanted(name):
            continue
        kv = torch.randn(tokens, layers, 2 * heads * dim, **bf)
        positions = torch.arange(tokens, device="cuda", dtype=torch.int64) * 7 % 40960
        k, v = (torch.empty(layers, tokens, heads, dim, **bf) for _ in range(2))
        arguments = (kv, norm, eps, table, positions, heads, dim, dim, k, v)
        calls = {"ours": lambda _: ours.fused_norm_rope_stacked(*arguments), SGLANG: lambda _: _fused_norm_rope_stacked(*arguments)}
        report(name, timer.cold_us(working(calls, name)))


def measure(timer, report, options):
    stacked(timer, report, options)
    from sglang.kernels.ops.kvcache.kvcache import store_cache
    from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

    heads, dim, kv = 8, 128, 1024
    some = [(1, 16, 7), (32, 16, 7), (1, 1024, 1024)]  # windows, rows, committed
    models = [  # hidden, layers, features, steps of the projection, steps from target features
        (4096, 5, 5 * 4096, [(1, 1, 1), (1, 16, 16), (1, 16, 7), (1, 64, 64), (1, 256, 256), (32, 16, 7), (1, 1024, 1024), (256, 16, 7), (1, 8192, 8192), (1, 16384, 16384)],
         [(1, 1, 1), (1, 16, 7), (1, 64, 64), (32, 16, 7), (256, 16, 7), (1, 8192, 8192), (1, 16384, 16384)]),  # Qwen3-8B
        (2560, 5, 5 * 2560, some, [*some[:2], (1, 16384, 16384)]),  # Qwen3-4B
        (7168, 6, 6 * 7168, some, some[:2]),  # like K3
    ]  # fmt: skip
    if timer.quick:
        models = [(2560, 5, 5 * 2560, some[:1], some[:1])]
    bf = dict(device="cuda", dtype=torch.bfloat16)
    slots = 20000
    table = torch.randn(40960, dim, device="cuda")
    rope = types.SimpleNamespace(rotary_dim=dim, is_neox_style=True, cos_sin_cache=table)
    for hidden, layers, features, steps, chain in models:
        torch.manual_seed(1)
        weight = torch.randn(layers, 2 * kv, hidden, **bf) * hidden**-0.5
        fc, hidden_norm = torch.randn(hidden, features, **bf) * features**-0.5, torch.rand(hidden, **bf) + 0.5
        norm, eps = torch.rand(layers, dim, **bf) + 0.5, torch.full((layers,), 1e-6, device="cuda")
        modules = [types.SimpleNamespace(self_attn=types.SimpleNamespace(
            num_kv_heads=heads, head_dim=dim, rotary_emb=rope, q_size=0, kv_size=kv, qkv_proj=types.SimpleNamespace(weight=weight[i]),
            k_norm=types.SimpleNamespace(weight=norm[i], variance_epsilon=1e-6))) for i in range(layers)]  # fmt: skip
        helper = FusedKVMaterializeHelper(modules, rope, heads, dim, torch.device("cuda", 0), max_position_hint=40960)
        k_pool, v_pool = (torch.zeros(layers, slots, heads, dim, **bf) for _ in range(2))
        for operation, (b, width, commit) in [("materialize", s) for s in steps] + [("from_features", s) for s in chain]:
            tokens, from_features = b * width, operation == "from_features"
            keys = dict(committed="1" if commit == width else commit / width, head_dim=dim, hidden=hidden, kv_heads=heads, layers=layers, tokens=tokens)
            name = case("draft_kv", operation, **keys, **({"features": features} if from_features else {}))
            if not options.wanted(name):
                continue
            x = torch.randn(tokens, features if from_features else hidden, **bf)
            positions = torch.arange(tokens, device="cuda", dtype=torch.int64) % 40000
            mapping = (torch.randperm(slots - 1, device="cuda")[:tokens] + 1).to(torch.int64)
            lens = torch.full((b,), commit, device="cuda", dtype=torch.int64) if commit < width else None
            # sglang computes every row of a window and masks the store: here the rejected ones go to slot 0, its sink.
            everywhere = mapping if lens is None else torch.where(torch.arange(tokens, device="cuda") % width < commit, mapping, 0)

            def write(layer, k, v, everywhere=everywhere, k_pool=k_pool, v_pool=v_pool):
                store_cache(k.view(-1, kv), v.view(-1, kv), k_pool[layer].view(slots, kv), v_pool[layer].view(slots, kv), everywhere)

            more = dict(fc_weight=fc, hidden_norm_weight=hidden_norm) if from_features else {}
            slot = mapping if lens is None else mapping.view(b, width)

            def theirs(_, x=x, positions=positions, write=write, from_features=from_features, helper=helper, fc=fc, hidden_norm=hidden_norm):
                if from_features:
                    x = torch.nn.functional.rms_norm(torch.nn.functional.linear(x, fc), hidden_norm.shape, hidden_norm, 1e-6)
                helper.materialize(x, positions, write)

            arguments = (x, weight, norm, eps, table, positions, slot, k_pool, v_pool)
            peer = SGLANG + " behind torch's linear and rms_norm" if from_features else SGLANG
            calls = {"ours": lambda _: ours.materialize_into_pool(*arguments, commit_lens=lens, **more), peer: theirs}
            report(name, timer.cold_us(working(calls, name)))


if __name__ == "__main__":
    peers.main(measure)
