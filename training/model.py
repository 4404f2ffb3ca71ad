"""The target and the two drafters in PyTorch, exactly as docs/model.md states them.

Module and parameter names are the tensor names of the checkpoint, so export is a plain state_dict. The KDA
recurrence runs through flash-linear-attention's Triton kernels on a GPU and through a plain loop elsewhere (slow,
for tests). Everything between a projection's bf16 output and the residual stream is ordinary PyTorch.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, BOS, EOS, MASK = 264, 256, 257, 258


def target_config():
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_hidden_layers": 8,
        "num_attention_heads": 3,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "model_max_length": 8192,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
        "linear_attn_config": {
            "num_heads": 3,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 3, 5, 6, 7],   # 1-based, as published
            "full_attn_layers": [4, 8],
        },
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 64,
        "index_anchor_layers": [3],             # 0-based; layer 7 follows layer 3
    }


def drafter_config(kind):
    config = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 352,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0 if kind == "dflash" else 0.5,
        "max_position_embeddings": 8448,        # 8192 plus the block and slack
        "vocab_size": VOCAB,
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 512,
        "is_causal": False,
        "block_size": 8 if kind == "dflash" else 7,
        "num_target_layers": 8,
        "torch_dtype": "bfloat16",
        "dflash_config": {"target_layer_ids": [1, 4, 6], "mask_token_id": MASK},
    }
    if kind == "dspark":
        config.update(markov_rank=32, markov_head_type="vanilla", confidence_temperatures=[1.0] * 7)
    return config


# Stored and used in fp32; everything else is bf16 in the checkpoint.
FP32_NAMES = ("_conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "k_norm.bias", "confidence.bias")


def is_fp32(name):
    return name.endswith(FP32_NAMES) or name.endswith("indexer.k_norm.weight")


def rms(x, weight, eps):
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def round_bf16(x):
    """bf16 rounding with a straight-through gradient: what the caches do to a row."""
    return x + (x.detach().to(torch.bfloat16).to(x.dtype) - x.detach())


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return rms(x, self.weight, self.eps)


class Conv(nn.Module):
    """Only holds the taps [channels, 4], last tap = newest input."""

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))


class MLP(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(dim, inner), linear(dim, inner), linear(inner, dim)

    def forward(self, h):
        gate, up = F.linear(h, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def kda_loop(q, k, v, log_decay, beta):
    """The recurrence, one token at a time. q, k [B,T,H,K] already normalised (q scaled), state [B,H,V,K]."""
    state = q.new_zeros(*q.shape[:1], q.shape[2], v.shape[3], q.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp().unsqueeze(-2)
        u = (v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1)) * beta[:, t].unsqueeze(-1)
        state = state + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        out.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1)


class KDA(nn.Module):
    RANK = 24   # of the decay gate and of the output gate; readers take it from the tensors' shapes

    def __init__(self, config):
        super().__init__()
        d, lin = config["hidden_size"], config["linear_attn_config"]
        self.heads, self.head_dim, self.eps = lin["num_heads"], lin["head_dim"], config["rms_norm_eps"]
        self.lower_bound = lin["gate_lower_bound"]
        inner, width = self.heads * self.head_dim, lin["short_conv_kernel_size"]
        self.q_proj, self.k_proj, self.v_proj = linear(d, inner), linear(d, inner), linear(d, inner)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = Conv(inner, width), Conv(inner, width), Conv(inner, width)
        self.f_a_proj, self.f_b_proj = linear(d, self.RANK), linear(self.RANK, inner)
        self.g_a_proj, self.g_b_proj = linear(d, self.RANK), linear(self.RANK, inner)
        self.b_proj, self.o_proj = linear(d, self.heads), linear(inner, d)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.o_norm = Norm(self.head_dim, self.eps)

    def project(self, h):
        """One matmul for everything that reads h: pre-convolution q|k|v, raw decay gate, output gate, beta logits."""
        inner = self.heads * self.head_dim
        weight = torch.cat([m.weight for m in (self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj, self.b_proj)])
        qkv, f, g, b = F.linear(h, weight).split([3 * inner, self.RANK, self.RANK, self.heads], -1)
        return qkv, self.f_b_proj(f), self.g_b_proj(g), b

    def taps(self):
        return torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])

    def log_decay(self, g):
        g = g.float().unflatten(-1, (self.heads, self.head_dim))
        bias = self.dt_bias.view(self.heads, self.head_dim)
        return self.lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * (g + bias))

    def finish(self, o, gate):
        """Per-head norm, output gate, output projection. o [..., H, V]"""
        o = self.o_norm(o) * torch.sigmoid(gate.float().unflatten(-1, (self.heads, self.head_dim)))
        return self.o_proj(o.flatten(-2).to(gate.dtype))

    def forward(self, h, fused):
        qkv, f, gate, b = self.project(h)
        heads = lambda x: x.unflatten(-1, (self.heads, self.head_dim))
        if fused:
            from fla.modules.causal_conv1d.ops import causal_conv1d
            from fla.modules.norm.fused_norm_gate import rms_norm_gated
            from fla.ops.kda import chunk_kda
            qkv, _ = causal_conv1d(qkv.contiguous(), self.taps(), activation="silu")
            q, k, v = (heads(x) for x in qkv.chunk(3, -1))
            o, _ = chunk_kda(q, k, v, heads(f), b.float().sigmoid(), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                             safe_gate=True, lower_bound=self.lower_bound, A_log=self.A_log, dt_bias=self.dt_bias)
            o = rms_norm_gated(o, heads(gate), self.o_norm.weight, None, activation="sigmoid", eps=self.eps)
            return self.o_proj(o.flatten(-2))
        taps, T = self.taps(), qkv.shape[1]
        padded = F.pad(qkv.float(), (0, 0, 3, 0))
        qkv = F.silu(sum(padded[:, i:i + T] * taps[:, i] for i in range(4)))
        q, k, v = (heads(x) for x in qkv.chunk(3, -1))
        q, k = unit(q) * self.head_dim ** -0.5, unit(k)
        return self.finish(kda_loop(q, k, v, self.log_decay(f), b.float().sigmoid()), gate)


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Indexer(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config["hidden_size"]
        self.heads, self.dim = config["index_n_heads"], config["index_head_dim"]
        self.wq_b, self.wk, self.weights_proj = linear(d, self.heads * self.dim), linear(d, self.dim), linear(d, self.heads)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)

    def query(self, h):
        q = self.wq_b(h).unflatten(-1, (self.heads, self.dim))
        return q, self.weights_proj(h).float() * (self.heads * self.dim) ** -0.5

    def key(self, h):
        return round_bf16(self.k_norm(self.wk(h).float()))

    def scores(self, h_query, keys):
        """[B, rows, positions]; keys [B, positions, dim]."""
        q, w = self.query(h_query)
        keys = keys.to(q.dtype).transpose(1, 2)
        return sum(w[..., i:i + 1] * F.relu(q[..., i, :] @ keys).float() for i in range(self.heads))


def prefer_low(scores):
    """Exact ties (all-zero ReLU sums, in practice) go to the lower position: a slope far under any real difference."""
    return scores - 1e-12 * torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float32)


class MLA(nn.Module):
    def __init__(self, config, anchor):
        super().__init__()
        d, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.rank, self.nope = config["kv_lora_rank"], config["qk_nope_head_dim"]
        self.rope, self.v_dim = config["qk_rope_head_dim"], config["v_head_dim"]
        self.q_proj = linear(d, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(d, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, config["rms_norm_eps"])
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.v_dim))
        self.o_proj = linear(self.heads * self.v_dim, d)
        if anchor:
            self.indexer = Indexer(config)
        self.topk, self.scale = config["index_topk"], (self.nope + self.rope) ** -0.5

    def queries(self, h):
        return self.q_proj(h).unflatten(-1, (self.heads, self.nope + self.rope))

    def rows(self, h):
        """The cached row [c, kr], bf16-rounded values."""
        c, kr = self.kv_a_proj_with_mqa(h).split([self.rank, self.rope], -1)
        return round_bf16(torch.cat([self.kv_a_layernorm(c), kr.float()], -1))

    def keys_values(self, rows, dtype):
        c, kr = rows.to(dtype).split([self.rank, self.rope], -1)
        k, v = self.kv_b_proj(c).unflatten(-1, (self.heads, self.nope + self.v_dim)).split([self.nope, self.v_dim], -1)
        return torch.cat([k, kr.unsqueeze(-2).expand(*k.shape[:-1], self.rope)], -1), v

    def select(self, h, chunk=2048):
        """Boolean [B, T, T]: the top-k positions of every row by index score."""
        T = h.shape[1]
        keys, position, out = self.indexer.key(h), torch.arange(T, device=h.device), []
        for start in range(0, T, chunk):
            scores = prefer_low(self.indexer.scores(h[:, start:start + chunk], keys))
            future = position[None, :] > position[start:start + chunk, None]
            scores = scores.masked_fill(future, float("-inf"))
            worst = scores.topk(min(self.topk, T), -1, sorted=False).values.amin(-1, keepdim=True)
            out.append((scores >= worst) & ~future)
        return torch.cat(out, 1)

    def forward(self, h, mask):
        """mask: None for dense causal, else an additive [B,1,T,T] mask. Returns the output and (q, k) for the indexer loss."""
        q, (k, v) = self.queries(h), self.keys_values(self.rows(h), h.dtype)
        swap = lambda x: x.transpose(1, 2)
        pad = self.v_dim - q.shape[-1]      # equal widths let the fused attention kernels run
        out = F.scaled_dot_product_attention(swap(F.pad(q, (0, pad))), swap(F.pad(k, (0, pad))), swap(v),
                                             attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return self.o_proj(swap(out).flatten(-2)), (q, k)


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        self.is_kda = index + 1 in config["linear_attn_config"]["kda_layers"]
        self.is_anchor = index in config["index_anchor_layers"]
        self.input_layernorm, self.post_attention_layernorm = Norm(d, eps), Norm(d, eps)
        self.self_attn = KDA(config) if self.is_kda else MLA(config, self.is_anchor)
        self.mlp = MLP(d, config["intermediate_size"])


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])


class Target(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = linear(config["hidden_size"], config["vocab_size"])
        self.dropout = 0.0
        self.reset()

    @torch.no_grad()
    def reset(self):
        depth = len(self.model.layers)
        for name, p in self.named_parameters():
            if name.endswith("_conv1d.weight"):
                nn.init.normal_(p, std=0.1)
                p[:, -1] += 1.0                                  # starts close to "this token only"
            elif name.endswith("A_log"):
                p.zero_()
            elif name.endswith("dt_bias"):
                # |log decay| of the channels spread evenly in the logarithm from 1/2000 to 1/3 a byte
                rate = torch.exp(torch.empty_like(p).uniform_(-7.6, -1.1))
                p.copy_(torch.logit(rate / -self.config["linear_attn_config"]["gate_lower_bound"]))
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(p, std=0.2)
            elif p.dim() == 2:
                std = p.shape[1] ** -0.5 * 0.7
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * depth) ** 0.5
                nn.init.normal_(p, std=std)

    def forward(self, tokens, sparse, fused=True, features=(), kl_rows=None, dtype=torch.bfloat16, want_logits=True):
        """tokens [B,T] -> (logits, {layer: hidden}, indexer loss or None)."""
        x = self.model.embed_tokens(tokens).float()
        kept, mask, kl, anchor_h, attention = {}, None, None, None, []
        for i, layer in enumerate(self.model.layers):
            h = layer.input_layernorm(x).to(dtype)
            if layer.is_kda:
                y = layer.self_attn(h, fused)
            else:
                if layer.is_anchor:
                    anchor, anchor_h = layer.self_attn, h.detach()
                    if sparse:
                        with torch.no_grad():
                            selected = anchor.select(h)
                            mask = torch.zeros(selected.shape, dtype=dtype, device=h.device).masked_fill_(~selected, float("-inf")).unsqueeze(1)
                y, (q, k) = layer.self_attn(h, mask)
                if kl_rows is not None:
                    attention.append((layer.self_attn, q.detach(), k.detach()))
            x = x + F.dropout(y, self.dropout, self.training).float()
            y = layer.mlp(layer.post_attention_layernorm(x).to(dtype))
            x = x + F.dropout(y, self.dropout, self.training).float()
            if i in features:
                kept[i] = x
        if kl_rows is not None:
            kl = indexer_loss(anchor, anchor_h, attention, kl_rows)
        logits = self.lm_head(self.model.norm(x).to(dtype)) if want_logits else None
        return logits, kept, kl


def indexer_loss(anchor, h, attention, rows):
    """KL(mean attention of all sparse-MLA layers and heads || softmax of index scores) on a few query rows.

    The attention is the dense one of the current weights, so the indexer also learns about positions that the
    selection leaves out today; follower layers count too, since they live on the anchor's choice. Only the indexer's
    own weights receive a gradient (its input is detached), as in DeepSeek-V3.2's recipe.
    """
    future = torch.arange(h.shape[1], device=h.device)[None, :] > rows[:, None]
    with torch.no_grad():
        p = 0
        for mla, q, k in attention:
            s = torch.einsum("brhd,bthd->bhrt", q[:, rows], k).float() * mla.scale
            p = p + s.masked_fill(future, float("-inf")).softmax(-1).mean(1) / len(attention)
    scores = anchor.indexer.scores(h[:, rows], anchor.indexer.key(h)).masked_fill(future, float("-inf"))
    log_q = scores.log_softmax(-1).masked_fill(future, 0.0)
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1).mean()


# ---------------------------------------------------------------------------------------------------- drafters

def rope(x, position, rotary_dim, theta):
    """Neox rotary on the first rotary_dim values. x [..., heads, D], position [...]."""
    half = rotary_dim // 2
    freq = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position.float()[..., None, None] * freq
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half].float(), x[..., half:rotary_dim].float(), x[..., rotary_dim:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class DraftAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.rotary, self.theta = int(self.dim * config["partial_rotary_factor"]), config["rope_theta"]
        self.q_proj, self.o_proj = linear(d, self.heads * self.dim), linear(self.heads * self.dim, d)
        self.k_proj, self.v_proj = linear(d, self.kv_heads * self.dim), linear(d, self.kv_heads * self.dim)
        self.q_norm, self.k_norm = Norm(self.dim, eps), Norm(self.dim, eps)

    def keys_values(self, x, position):
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))).to(x.dtype)
        return rope(k, position, self.rotary, self.theta), self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))

    def queries(self, x, position):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))).to(x.dtype)
        return rope(q, position, self.rotary, self.theta)


class DraftLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(d, eps), Norm(d, eps)
        self.self_attn, self.mlp = DraftAttention(config), MLP(d, config["intermediate_size"])


class Markov(nn.Module):
    """logits_k += proj . embed[previous token]; both tables [V, r]."""

    def __init__(self, vocab, rank):
        super().__init__()
        self.embed = nn.Embedding(vocab, rank)
        self.proj = linear(rank, vocab)


class Drafter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, d, eps = config, config["hidden_size"], config["rms_norm_eps"]
        self.is_dspark = config["architectures"][0] == "DSparkDraftModel"
        self.block, self.window = config["block_size"], config["sliding_window"]
        self.layer_ids = config["dflash_config"]["target_layer_ids"]
        self.fc, self.hidden_norm = linear(len(self.layer_ids) * d, d), Norm(d, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(d, eps)
        if self.is_dspark:
            self.markov = Markov(config["vocab_size"], config["markov_rank"])
            self.confidence = nn.Linear(d + config["markov_rank"], 1)
        self.reset()

    @torch.no_grad()
    def reset(self):
        depth = len(self.layers)
        for name, p in self.named_parameters():
            if name == "markov.embed.weight":
                nn.init.normal_(p, std=0.3)
            elif name == "markov.proj.weight":
                nn.init.normal_(p, std=0.05)
            elif name.startswith("confidence"):
                nn.init.normal_(p, std=0.05)
            elif p.dim() == 2:
                std = p.shape[1] ** -0.5 * 0.7
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * depth) ** 0.5
                nn.init.normal_(p, std=std)

    def context(self, features, position):
        """features [B,T,F*d] -> per layer (K, V) [B,T,kv_heads,D]. All layers share one context vector."""
        ctx = self.hidden_norm(self.fc(features)).to(features.dtype)
        return [layer.self_attn.keys_values(ctx, position) for layer in self.layers]

    def rows(self, anchors, position, context, context_position, embed, dtype=torch.bfloat16):
        """Hidden rows of blocks after the final norm.

        anchors [B,A] last tokens, position [B,A] = n of each block, context K/V of the whole sequence at
        context_position [B,T]. A block sees context positions < n and its own rows, both within the window.
        """
        B, A = anchors.shape
        ids = torch.full((B, A, self.block), MASK, device=anchors.device)
        ids[:, :, 0] = anchors
        x = F.embedding(ids, embed).float()                                            # [B,A,b,d]
        pos = position[..., None] + torch.arange(self.block, device=anchors.device)
        low = context_position[:, None, None, :] > pos[..., None] - self.window
        visible = (low & (context_position[:, None, None, :] < position[..., None, None])).flatten(1, 2)   # [B,A*b,T]
        own = torch.arange(A * self.block, device=anchors.device) // self.block
        own = (own[:, None] == own[None, :]).expand(B, -1, -1)
        mask = torch.cat([visible, own], -1)
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf")).unsqueeze(1)
        swap = lambda t: t.transpose(1, 2)
        for layer, (ctx_k, ctx_v) in zip(self.layers, context):
            attn = layer.self_attn
            h = layer.input_layernorm(x).to(dtype)
            k, v = attn.keys_values(h, pos)
            k, v = torch.cat([ctx_k, k.flatten(1, 2)], 1), torch.cat([ctx_v, v.flatten(1, 2)], 1)
            grow = lambda t: swap(t).expand(-1, attn.heads // attn.kv_heads * attn.kv_heads, -1, -1) if attn.kv_heads == 1 else swap(t).repeat_interleave(attn.heads // attn.kv_heads, 1)
            out = F.scaled_dot_product_attention(swap(attn.queries(h, pos).flatten(1, 2)), grow(k), grow(v),
                                                 attn_mask=mask, scale=attn.dim ** -0.5)
            x = x + attn.o_proj(swap(out).flatten(-2)).float().unflatten(1, (A, self.block))
            x = x + layer.mlp(layer.post_attention_layernorm(x).to(dtype)).float()
        return self.norm(x).to(dtype)

    def markov_bias(self, previous):
        return self.markov.proj(self.markov.embed(previous)).float()

    def confidence_logit(self, rows, previous):
        return self.confidence(torch.cat([rows.float(), self.markov.embed(previous).float()], -1)).squeeze(-1)
