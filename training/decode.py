"""Token-by-token decoding of the target for a batch of sequences, each at its own position.

Used to sample on-policy text for the drafters and to make greedy continuations for the acceptance figures. All
shapes are static, so on a GPU one step is a captured graph.
"""
import torch
import torch.nn.functional as F

from model import EOS, prefer_low, unit


class Decoder:
    def __init__(self, target, batch, capacity, graph=True):
        self.target, self.batch, self.capacity = target, batch, capacity
        device = self.device = target.lm_head.weight.device
        zeros = lambda *shape: torch.zeros(batch, *shape, device=device)
        self.position = torch.zeros(batch, dtype=torch.long, device=device)
        self.token = torch.zeros(batch, dtype=torch.long, device=device)
        self.slots = torch.arange(capacity, device=device)
        self.state, self.conv, self.rows, self.keys = {}, {}, {}, {}
        for i, layer in enumerate(target.model.layers):
            m = layer.self_attn
            if layer.is_kda:
                self.state[i] = zeros(m.heads, m.head_dim, m.head_dim)
                self.conv[i] = zeros(3, 3 * m.heads * m.head_dim)
            else:
                self.rows[i] = zeros(capacity, m.rank + m.rope)
                if layer.is_anchor:
                    self.keys[i] = zeros(capacity, m.indexer.dim)
        self.graph = None
        if graph and device.type == "cuda":
            self._capture()

    def reset(self):
        for group in (self.state, self.conv, self.rows, self.keys):
            for t in group.values():
                t.zero_()
        self.position.zero_()

    def _capture(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._step()
        self.reset()

    @torch.no_grad()
    def step(self, token):
        """Consumes one token per sequence; logits [B,V] for the next one."""
        self.token.copy_(token)
        if self.graph is not None:
            self.graph.replay()
            return self.logits
        return self._step()

    @torch.no_grad()
    def _step(self):
        x = self.target.model.embed_tokens(self.token).float()
        index, B = None, self.batch
        for i, layer in enumerate(self.target.model.layers):
            h, m = layer.input_layernorm(x), layer.self_attn
            if layer.is_kda:
                y = self._kda(i, m, h)
            else:
                at = self.position.view(B, 1, 1)
                self.rows[i].scatter_(1, at.expand(-1, -1, m.rank + m.rope), m.rows(h).unsqueeze(1))
                if layer.is_anchor:
                    self.keys[i].scatter_(1, at.expand(-1, -1, m.indexer.dim), m.indexer.key(h).unsqueeze(1))
                    scores = prefer_low(m.indexer.scores(h.unsqueeze(1), self.keys[i])[:, 0])
                    scores = scores.masked_fill(self.slots[None] > self.position[:, None], float("-inf"))
                    index = scores.topk(min(m.topk, self.capacity), -1).indices
                    invalid = index > self.position[:, None]
                rows = self.rows[i].gather(1, index.unsqueeze(-1).expand(-1, -1, m.rank + m.rope))
                k, v = m.keys_values(rows, rows.dtype)
                s = torch.einsum("bhd,bphd->bhp", m.queries(h), k) * m.scale
                p = s.masked_fill(invalid[:, None], float("-inf")).softmax(-1)
                y = m.o_proj(torch.einsum("bhp,bphd->bhd", p, v).flatten(-2))
            x = x + y
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.position.add_(1)
        return self.target.lm_head(self.target.model.norm(x))

    def _kda(self, i, m, h):
        qkv, f, gate, b = m.project(h)
        history, taps = self.conv[i], m.taps()
        y = F.silu(sum(history[:, j] * taps[:, j] for j in range(3)) + qkv * taps[:, 3])
        history.copy_(torch.cat([history[:, 1:], qkv.unsqueeze(1)], 1))
        q, k, v = (t.unflatten(-1, (m.heads, m.head_dim)).flatten(0, 1) for t in y.chunk(3, -1))
        q, k = unit(q) * m.head_dim ** -0.5, unit(k)
        S = self.state[i].view(-1, m.head_dim, m.head_dim)
        S.mul_(m.log_decay(f).exp().flatten(0, 1).unsqueeze(1))
        u = (v.unsqueeze(-1) - torch.bmm(S, k.unsqueeze(-1))) * b.sigmoid().flatten().view(-1, 1, 1)
        S.baddbmm_(u, k.unsqueeze(1))
        o = torch.bmm(S, q.unsqueeze(-1)).view(-1, m.heads, m.head_dim)
        return m.finish(o, gate)


def emittable(logits):
    """Ids from 256 on are never emitted, except EOS."""
    out = logits.clone()
    out[..., 256:EOS] = float("-inf")
    out[..., EOS + 1:] = float("-inf")
    return out


@torch.no_grad()
def continue_text(decoder, prompts, lengths, total, temperature, seed):
    """Extends prompts [B, P] (first lengths[b] tokens count) to `total` tokens each. temperature [B], 0 = greedy.

    Returns [B, total] including the prompt. Everything stays on the device: no synchronisation per step.
    """
    decoder.reset()
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    out = torch.zeros(len(prompts), total, dtype=torch.long, device=prompts.device)
    out[:, :prompts.shape[1]] = prompts[:, :total]
    greedy = (temperature == 0).unsqueeze(-1)
    scale = temperature.clamp(min=1e-5).unsqueeze(-1)
    for t in range(total - 1):
        logits = emittable(decoder.step(out[:, t]))
        noise = -torch.empty_like(logits).exponential_(generator=generator).clamp_(min=1e-20).log()
        choice = torch.where(greedy, logits, logits / scale + noise).argmax(-1)
        out[:, t + 1] = torch.where(t + 1 < lengths, out[:, t + 1], choice)
    return out
