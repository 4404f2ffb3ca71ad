"""KDA beside what sglang 0.5.23 runs on Hopper: its fused Triton verify and gated norm, the three-kernel chain, and the fold."""

import peers
import torch
from peers import SGLANG, case, working

from specstate import kda as ours

D = 128
SHAPES = [(12, 1, 8), (12, 8, 8), (12, 32, 8), (12, 128, 8), (32, 16, 4), (32, 64, 4), (32, 64, 8), (96, 8, 8)]


class Layer:
    def __init__(self, heads, requests, tokens, ring):
        H, N, W = self.H, self.N, self.W = heads, requests, tokens
        T, C = N * W, H * D
        torch.manual_seed(1)
        bf = dict(device="cuda", dtype=torch.bfloat16)
        f32 = dict(device="cuda", dtype=torch.float32)
        self.x = torch.randn(T, 3 * C, **bf)
        self.a, self.b, self.gate = torch.randn(T, C, **bf), torch.randn(T, H, **bf), torch.randn(T, C, **bf)
        self.w, self.A_log, self.dt = torch.randn(3 * C, 4, **f32) * 0.3, torch.randn(H, **f32) * 0.5, torch.randn(C, **f32)
        self.norm_weight = torch.randn(D, **f32)
        self.state = torch.randn(N, H, D, D, **f32) * 0.5
        self.conv = torch.randn(N, 3, 3 * C, **bf)  # channels are contiguous, as sglang keeps them
        self.windows = torch.empty(N, W, 3, 3 * C, **bf)
        self.slots = torch.arange(N, device="cuda", dtype=torch.int32)
        self.cu = torch.arange(0, T + 1, W, device="cuda", dtype=torch.int32)
        self.out = torch.empty(T, H, D, **bf)
        self.snapshots = None if ring else torch.empty(N, W, H, D, D, **f32)
        self.rings = (torch.empty(N, H, W, D, **bf), torch.empty(N, H, W, D, **bf), torch.empty(N, H, W, D, **f32), torch.empty(N, H, W, **f32)) if ring else None

    def ours(self):
        H, N, W, C = self.H, self.N, self.W, self.H * D
        parts = lambda t: [t[..., i * C : (i + 1) * C] for i in range(3)]  # noqa: E731
        x_q, x_k, x_v = (p.unflatten(-1, (H, D)) for p in parts(self.x))
        w_q, w_k, w_v = (self.w[i * C : (i + 1) * C] for i in range(3))
        cs = [p.transpose(-1, -2) for p in parts(self.conv)]
        win = [p.transpose(-1, -2) for p in parts(self.windows)]
        return dict(x_q=x_q, x_k=x_k, x_v=x_v, w_q=w_q, w_k=w_k, w_v=w_v, cs_q=cs[0], cs_k=cs[1], cs_v=cs[2], g=self.a.unflatten(-1, (H, D)), beta=self.b, A_log=self.A_log,
                    dt_bias=self.dt.view(H, D), state=self.state, slots=self.slots, cu_seqlens=self.cu, onorm_gate=self.gate.unflatten(-1, (H, D)), onorm_weight=self.norm_weight,
                    onorm_eps=1e-5, lower_bound=-5.0, out=self.out, conv_q=win[0], conv_k=win[1], conv_v=win[2], rings=self.rings, snapshots=self.snapshots)  # fmt: skip

    def ring_arguments(self):
        if self.rings is None:
            return {}
        rawv, rawk, g, beta = self.rings
        return dict(cache_ring=True, replayssm_rawv=rawv, replayssm_rawk=rawk, replayssm_g=g, replayssm_beta=beta)

    def norm(self, o):
        from sglang.kernels.ops.attention.fla.fused_norm_gate import layer_norm_gated_fwd

        return layer_norm_gated_fwd(o.reshape(-1, D), self.gate.reshape(-1, D), self.norm_weight, None, "sigmoid", 1e-5, is_rms_norm=True)[0]

    def fused(self):
        from sglang.kernels.ops.attention.linear.fused_kda_conv_recurrent_verify import fused_kda_conv_gating_verify

        return self.norm(fused_kda_conv_gating_verify(
            mixed_qkv=self.x, conv_weight=self.w, conv_bias=None, conv_state=self.conv.transpose(-1, -2), conv_state_indices=self.slots,
            intermediate_conv_window=self.windows.transpose(-1, -2), intermediate_state_indices=self.slots, a=self.a, b=self.b, A_log=self.A_log, dt_bias=self.dt,
            ssm_states=self.state, cache_indices=self.slots, intermediate_states_buffer=self.snapshots, scale=D**-0.5, T=self.W, num_q_heads=self.H,
            num_v_heads=self.H, head_k_dim=D, head_v_dim=D, lower_bound=-5.0, **self.ring_arguments()))  # fmt: skip

    def chain(self):
        from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

        T, C = self.N * self.W, self.H * D
        y = causal_conv1d_update(self.x.view(self.N, self.W, -1).transpose(1, 2), self.conv.transpose(-1, -2), self.w, None, activation="silu",
                                 conv_state_indices=self.slots, intermediate_conv_window=self.windows.transpose(-1, -2), intermediate_state_indices=self.slots)  # fmt: skip
        q, k, v = (t.unflatten(-1, (self.H, D)).unsqueeze(0) for t in y.transpose(1, 2).reshape(T, -1).split([C, C, C], dim=-1))
        return self.norm(fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log, a=self.a, dt_bias=self.dt, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v, b=self.b, initial_state_source=self.state,
            initial_state_indices=self.slots, use_qk_l2norm_in_kernel=True, cu_seqlens=self.cu, is_kda=True, lower_bound=-5.0, disable_state_update=True,
            intermediate_states_buffer=self.snapshots, intermediate_state_indices=self.slots, cache_steps=self.W, **self.ring_arguments()))  # fmt: skip


def measure(timer, report, options):
    for heads, requests, tokens in SHAPES[:1] if timer.quick else SHAPES:
        for mode in ("ring", "snapshot"):
            name = case("kda", f"verify_{mode}", heads=heads, requests=requests, tokens=tokens)
            if not options.wanted(name) or (mode == "snapshot" and (heads, tokens) != (12, 8)):  # every other pair takes Triton seconds to compile
                continue
            x = Layer(heads, requests, tokens, mode == "ring")
            arguments = x.ours()
            calls = {"ours": lambda _: ours.verify(**arguments), f"{SGLANG} fused": lambda _: x.fused(), f"{SGLANG} chain": lambda _: x.chain()}
            report(name, timer.cold_us(working(calls, name)))
            if mode == "ring" and tokens == 8:
                from sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode import commit_kda_replayssm_spec as theirs

                accept = torch.full((requests,), tokens // 2, device="cuda", dtype=torch.int32)
                rawv, rawk, g, beta = x.rings
                saved = x.state.clone()
                fold = dict(state=x.state, rings=x.rings, slots=x.slots, accept=accept)
                calls = {"ours": lambda _: ours.fold(**fold),
                         SGLANG: lambda _: theirs(x.state, rawk, rawv, g, beta, x.slots, accept, max_cache_len=tokens, num_k_heads=heads, null_block_id=-1)}  # fmt: skip
                report(case("kda", "fold", accepted=tokens // 2, heads=heads, requests=requests), timer.cold_us(working(calls, "fold"), lambda _: x.state.copy_(saved)))


if __name__ == "__main__":
    peers.main(measure)
