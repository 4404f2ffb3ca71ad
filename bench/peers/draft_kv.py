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
        if options.only not in name:
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

    models = {"Qwen3-8B": (4096, 5, 8, 128), "Qwen3-4B": (2560, 5, 8, 128)}
    sizes = [16] if timer.quick else [1, 16, 64, 256, 1024, 8192]
    bf = dict(device="cuda", dtype=torch.bfloat16)
    for hidden, layers, heads, dim in models.values():
        kv = heads * dim
        torch.manual_seed(1)
        weight = torch.randn(layers, 2 * kv, hidden, **bf) * hidden**-0.5
        norm = torch.rand(layers, dim, **bf) + 0.5
        eps = torch.full((layers,), 1e-6, device="cuda")
        table = torch.randn(40960, dim, device="cuda")
        rope = types.SimpleNamespace(rotary_dim=dim, is_neox_style=True, cos_sin_cache=table)
        modules = [types.SimpleNamespace(self_attn=types.SimpleNamespace(
            num_kv_heads=heads, head_dim=dim, rotary_emb=rope, q_size=0, kv_size=kv, qkv_proj=types.SimpleNamespace(weight=weight[i]),
            k_norm=types.SimpleNamespace(weight=norm[i], variance_epsilon=1e-6))) for i in range(layers)]  # fmt: skip
        helper = FusedKVMaterializeHelper(modules, rope, heads, dim, torch.device("cuda", 0), max_position_hint=40960)
        slots = 20000
        k_pool, v_pool = (torch.zeros(layers, slots, heads, dim, **bf) for _ in range(2))
        flat = helper.flat_kv_weight_t
        for tokens in sizes:
            name = case("draft_kv", "materialize", committed=1, head_dim=dim, hidden=hidden, kv_heads=heads, layers=layers, tokens=tokens)
            if options.only not in name:
                continue
            x = torch.randn(tokens, hidden, **bf)
            positions = torch.arange(tokens, device="cuda", dtype=torch.int64) % 40000
            mapping = (torch.randperm(slots - 1, device="cuda")[:tokens] + 1).to(torch.int64)
            product = torch.empty(tokens, layers * 2 * kv, **bf)

            def write(layer, k, v, mapping=mapping):
                store_cache(k.view(-1, kv), v.view(-1, kv), k_pool[layer].view(slots, kv), v_pool[layer].view(slots, kv), mapping)

            arguments = (x, weight, norm, eps, table, positions, mapping, k_pool, v_pool)
            calls = {"ours": lambda _: ours.materialize_into_pool(*arguments), SGLANG: lambda _: helper.materialize(x, positions, write),
                     "its matrix product alone": lambda _: torch.mm(x, flat, out=product)}  # fmt: skip
            report(name, timer.cold_us(working(calls, name)))


if __name__ == "__main__":
    peers.main(measure)
