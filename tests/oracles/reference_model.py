#!/usr/bin/env python3
"""Independent float64 NumPy reference of the embedded model: target, DFlash drafter, DSpark drafter.

Written from docs/model.md alone; it shares no code with training/ or src/. Needs NumPy and nothing else (it reads
and writes safetensors itself). Slow and plain on purpose: one function per formula, one pass over the tokens.

    target = Target("models/specstate-bytes")
    run = target.prefill([256] + list(b"In the beginning"))
    run.logits            [T, V]            run.hidden[i]    [T, d]   residual stream after layer i
    run.rows[i]           [T, C+Dr]         bf16-rounded cached rows of sparse-MLA layer i
    run.index_keys[i]     [T, Di]           bf16-rounded index keys of anchor i
    run.index_scores[i]   list of [t+1]     scores of row t over positions 0..t
    run.selected[i]       list of arrays    ascending positions that row t of layer i attends to
    run.state[i], run.conv[i]               KDA state [H, Dv, Dk] and last three convolution inputs [3, 3*H*D] after the last token

    drafter = Drafter("models/specstate-bytes/dspark", target)
    context = drafter.context(drafter.features(run))          per layer K, V [T, kv_heads, D]
    out = drafter.propose(last_token, context)                out.tokens, out.base_logits, out.logits, out.confidence

Everything is float64 except the two places where the engine's caches hold bfloat16 (MLA rows and index keys).
Weights are the stored bf16/fp32 values, taken exactly.
"""
import json
import os
from types import SimpleNamespace

import numpy as np


# ------------------------------------------------------------------------------------------------ safetensors

def bf16_to_f64(raw):
    return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def round_bf16(x):
    """Nearest-even rounding of each value to bfloat16, returned as float64.

    The value is rounded to fp32 first, as an fp32 engine would hold it.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bf16_to_f64(bits.astype(np.uint16))


def read_safetensors(path):
    """{name: array}; BF16 and F32 become float64, integers stay."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    header.pop("__metadata__", None)
    kinds = {"BF16": np.uint16, "F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        x = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            x = bf16_to_f64(x)
        tensors[name] = x.astype(np.float64) if x.dtype.kind == "f" else x
    return tensors


def write_safetensors(path, tensors, metadata=None):
    """Floating arrays are stored as F32, integers as I32, names in the given order."""
    header, blobs, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name, x in tensors.items():
        x = np.asarray(x)
        kind, dtype = ("F32", np.float32) if x.dtype.kind == "f" else ("I32", np.int32)
        blob = np.ascontiguousarray(x, dtype=dtype).tobytes()
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + b"".join(blobs))


# ------------------------------------------------------------------------------------------------ small formulas

def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - np.max(x, -1, keepdims=True))
    return e / np.sum(e, -1, keepdims=True)


def top_k(scores, k):
    """Ascending positions of the k best scores, ties to the lower position."""
    return np.sort(np.argsort(-scores, kind="stable")[:k])


def forbid(logits, eos):
    """Ids >= 256 other than EOS are never emitted and never proposed."""
    out = np.array(logits)
    out[..., 256:eos] = -np.inf
    out[..., eos + 1:] = -np.inf
    return out


# ------------------------------------------------------------------------------------------------ target

class Target:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json")) as f:
            self.config = json.load(f)
        self.w = read_safetensors(os.path.join(folder, "model.safetensors"))
        self.eps = self.config["rms_norm_eps"]
        self.kda_layers = {i - 1 for i in self.config["linear_attn_config"]["kda_layers"]}
        self.anchors = self.config["index_anchor_layers"]
        self.depth = self.config["num_hidden_layers"]
        self.eos = self.config["eos_token_id"]
        self.embed, self.head = self.w["model.embed_tokens.weight"], self.w["lm_head.weight"]

    def prefill(self, tokens):
        run = SimpleNamespace(tokens=list(tokens), hidden=[], rows={}, index_keys={}, index_scores={}, selected={},
                              state={}, conv={}, mixer={})
        x = self.embed[np.asarray(tokens)]
        for i in range(self.depth):
            layer = f"model.layers.{i}."
            h = rms(x, self.w[layer + "input_layernorm.weight"], self.eps)
            mixed = self.kda(i, h, run) if i in self.kda_layers else self.mla(i, h, run)
            run.mixer[i] = mixed
            x = x + mixed
            h = rms(x, self.w[layer + "post_attention_layernorm.weight"], self.eps)
            x = x + self.mlp(layer + "mlp.", h)
            run.hidden.append(x)
        run.logits = rms(x, self.w["model.norm.weight"], self.eps) @ self.head.T
        return run

    def mlp(self, name, h):
        gate, up = h @ self.w[name + "gate_proj.weight"].T, h @ self.w[name + "up_proj.weight"].T
        return (silu(gate) * up) @ self.w[name + "down_proj.weight"].T

    def kda(self, i, h, run):
        name, w, lin = f"model.layers.{i}.self_attn.", self.w, self.config["linear_attn_config"]
        H, D, T = lin["num_heads"], lin["head_dim"], len(h)
        width = lin["short_conv_kernel_size"]
        streams, inputs = [], []
        for s in "qkv":
            p = h @ w[f"{name}{s}_proj.weight"].T
            inputs.append(p)
            padded = np.concatenate([np.zeros((width - 1, H * D)), p])
            taps = w[f"{name}{s}_conv1d.weight"]
            y = sum(padded[j:j + T] * taps[:, j] for j in range(width))
            streams.append(silu(y).reshape(T, H, D))
        q, k, v = streams
        q = q / np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6) * D ** -0.5
        k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
        g = (h @ w[name + "f_a_proj.weight"].T) @ w[name + "f_b_proj.weight"].T
        gate_in = np.exp(w[name + "A_log"])[:, None] * (g + w[name + "dt_bias"]).reshape(T, H, D)
        decay = np.exp(lin["gate_lower_bound"] * sigmoid(gate_in))
        beta = sigmoid(h @ w[name + "b_proj.weight"].T)
        S, o = np.zeros((H, D, D)), np.zeros((T, H, D))
        for t in range(T):
            S = S * decay[t][:, None, :]
            u = (v[t] - np.einsum("hvk,hk->hv", S, k[t])) * beta[t][:, None]
            S = S + u[:, :, None] * k[t][:, None, :]
            o[t] = np.einsum("hvk,hk->hv", S, q[t])
        run.state[i] = S
        tail = np.concatenate(inputs, 1)
        run.conv[i] = np.concatenate([np.zeros((width - 1, 3 * H * D)), tail])[-(width - 1):]
        gate = (h @ w[name + "g_a_proj.weight"].T) @ w[name + "g_b_proj.weight"].T
        o = rms(o, w[name + "o_norm.weight"], self.eps) * sigmoid(gate).reshape(T, H, D)
        return o.reshape(T, H * D) @ w[name + "o_proj.weight"].T

    def mla(self, i, h, run):
        name, w, c = f"model.layers.{i}.self_attn.", self.w, self.config
        H, C, Dn, Dr, Dv = (c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"])
        T = len(h)
        q = (h @ w[name + "q_proj.weight"].T).reshape(T, H, Dn + Dr)
        a = h @ w[name + "kv_a_proj_with_mqa.weight"].T
        row = np.concatenate([rms(a[:, :C], w[name + "kv_a_layernorm.weight"], self.eps), a[:, C:]], -1)
        run.rows[i] = rows = round_bf16(row)
        b = w[name + "kv_b_proj.weight"].reshape(H, Dn + Dv, C)
        k_nope = np.einsum("hnc,tc->thn", b[:, :Dn], rows[:, :C])
        value = np.einsum("hvc,tc->thv", b[:, Dn:], rows[:, :C])
        if i in self.anchors:
            run.selected[i] = self.select(i, h, run)
        else:
            run.selected[i] = run.selected[max(x for x in self.anchors if x < i)]
        o = np.zeros((T, H, Dv))
        for t in range(T):
            at = run.selected[i][t]
            score = np.einsum("hn,phn->hp", q[t, :, :Dn], k_nope[at]) + q[t, :, Dn:] @ rows[at, C:].T
            o[t] = np.einsum("hp,phv->hv", softmax(score * (Dn + Dr) ** -0.5), value[at])
        return o.reshape(T, H * Dv) @ w[name + "o_proj.weight"].T

    def select(self, i, h, run):
        name, w, c = f"model.layers.{i}.self_attn.indexer.", self.w, self.config
        Hi, Di, T = c["index_n_heads"], c["index_head_dim"], len(h)
        k = h @ w[name + "wk.weight"].T
        centred = k - np.mean(k, -1, keepdims=True)
        k = centred / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + 1e-6) * w[name + "k_norm.weight"] + w[name + "k_norm.bias"]
        run.index_keys[i] = keys = round_bf16(k)
        q = (h @ w[name + "wq_b.weight"].T).reshape(T, Hi, Di)
        weight = h @ w[name + "weights_proj.weight"].T * Hi ** -0.5 * Di ** -0.5
        run.index_scores[i], chosen = [], []
        for t in range(T):
            score = weight[t] @ np.maximum(q[t] @ keys[:t + 1].T, 0.0)
            run.index_scores[i].append(score)
            chosen.append(top_k(score, c["index_topk"]))
        return chosen

    def next_token(self, logits):
        """Greedy choice of one row of logits, lowest id on ties."""
        return int(np.argmax(forbid(logits, self.eos)))


# ------------------------------------------------------------------------------------------------ drafters

def rope(x, position, rotary_dim, theta):
    """x [rows, heads, D] at integer positions [rows]; pairs (i, i + R/2), the rest untouched."""
    half = rotary_dim // 2
    angle = np.asarray(position, np.float64)[:, None, None] * theta ** (-2.0 * np.arange(half) / rotary_dim)
    a, b = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), x[..., rotary_dim:]], -1)


class Drafter:
    def __init__(self, folder, target):
        with open(os.path.join(folder, "config.json")) as f:
            self.config = c = json.load(f)
        self.w, self.target, self.eps = read_safetensors(os.path.join(folder, "model.safetensors")), target, c["rms_norm_eps"]
        self.is_dspark = c["architectures"][0] == "DSparkDraftModel"
        self.heads, self.kv_heads, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.rotary = int(self.dim * c["partial_rotary_factor"])

    def features(self, run):
        """[T, F*d]: the target's hidden states after the feature layers, side by side."""
        return np.concatenate([run.hidden[i] for i in self.config["dflash_config"]["target_layer_ids"]], -1)

    def keys_values(self, i, x, position):
        name = f"layers.{i}.self_attn."
        k = (x @ self.w[name + "k_proj.weight"].T).reshape(-1, self.kv_heads, self.dim)
        k = rope(rms(k, self.w[name + "k_norm.weight"], self.eps), position, self.rotary, self.config["rope_theta"])
        return k, (x @ self.w[name + "v_proj.weight"].T).reshape(-1, self.kv_heads, self.dim)

    def context(self, features, first_position=0):
        """Per layer (K, V), each [T, kv_heads, D], of committed tokens at first_position, first_position + 1, ..."""
        ctx = rms(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.eps)
        position = first_position + np.arange(len(features))
        return [self.keys_values(i, ctx, position) for i in range(self.config["num_hidden_layers"])]

    def rows(self, last_token, context, first_position=0):
        """Final-norm hidden rows [block, d] of one block behind the given context."""
        c, w = self.config, self.w
        known = len(context[0][0])
        n, size, group = first_position + known, c["block_size"], self.heads // self.kv_heads
        position = n + np.arange(size)
        x = self.target.embed[[last_token] + [c["dflash_config"]["mask_token_id"]] * (size - 1)]
        key_position = np.concatenate([first_position + np.arange(known), position])
        visible = key_position[None, :] > position[:, None] - c["sliding_window"]
        for i in range(c["num_hidden_layers"]):
            name = f"layers.{i}."
            h = rms(x, w[name + "input_layernorm.weight"], self.eps)
            q = (h @ w[name + "self_attn.q_proj.weight"].T).reshape(size, self.heads, self.dim)
            q = rope(rms(q, w[name + "self_attn.q_norm.weight"], self.eps), position, self.rotary, c["rope_theta"])
            k, v = (np.concatenate(pair) for pair in zip(context[i], self.keys_values(i, h, position)))
            o = np.zeros((size, self.heads, self.dim))
            for head in range(self.heads):
                score = np.where(visible, q[:, head] @ k[:, head // group].T * self.dim ** -0.5, -np.inf)
                o[:, head] = softmax(score) @ v[:, head // group]
            x = x + o.reshape(size, -1) @ w[name + "self_attn.o_proj.weight"].T
            h = rms(x, w[name + "post_attention_layernorm.weight"], self.eps)
            gate, up = h @ w[name + "mlp.gate_proj.weight"].T, h @ w[name + "mlp.up_proj.weight"].T
            x = x + (silu(gate) * up) @ w[name + "mlp.down_proj.weight"].T
        return rms(x, w["norm.weight"], self.eps)

    def propose(self, last_token, context, first_position=0):
        """Greedy proposals of one block. base_logits hold one line per proposal, before any Markov correction."""
        rows, eos = self.rows(last_token, context, first_position), self.target.eos
        if not self.is_dspark:
            base = rows[1:] @ self.target.head.T
            return SimpleNamespace(rows=rows, base_logits=base, logits=base, confidence=None,
                                   tokens=[int(np.argmax(forbid(line, eos))) for line in base])
        base, logits, confidence, tokens, previous = rows @ self.target.head.T, [], [], [], last_token
        for k, tau in enumerate(self.config["confidence_temperatures"]):
            e = self.w["markov.embed.weight"][previous]
            logits.append(base[k] + self.w["markov.proj.weight"] @ e)
            raw = self.w["confidence.weight"][0] @ np.concatenate([rows[k], e]) + self.w["confidence.bias"][0]
            confidence.append(sigmoid(raw / tau))
            previous = int(np.argmax(forbid(logits[-1], eos)))
            tokens.append(previous)
        return SimpleNamespace(rows=rows, base_logits=base, logits=np.array(logits), confidence=np.array(confidence), tokens=tokens)


# ------------------------------------------------------------------------------------------------ decoding

def generate(target, prompt, count):
    """Plain greedy decoding by prefilling again for every token: O(T^2) tokens, for tests of a few dozen."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target.next_token(target.prefill(tokens).logits[-1]))
        if tokens[-1] == target.eos:
            break
    return tokens[len(prompt):]


def accepted_lengths(target, drafter, prompt, continuation):
    """Accepted drafts of every greedy speculative step over an already known greedy continuation.

    One prefill suffices: under greedy decoding the committed tokens are the continuation itself, whatever the drafter does.
    """
    tokens = list(prompt) + list(continuation)
    run = target.prefill(tokens)
    features, n, out = drafter.features(run), len(prompt), []
    context = drafter.context(features)
    while n + 1 < len(tokens):
        upto = [(k[:n], v[:n]) for k, v in context]
        proposal = drafter.propose(tokens[n], upto).tokens
        room = len(tokens) - n - 1                       # the last step is cut by the length limit
        a = 0
        while a < min(len(proposal), room) and proposal[a] == tokens[n + 1 + a]:
            a += 1
        out.append(a)
        n += a + 1
    return out


if __name__ == "__main__":
    import sys
    import time
    folder = sys.argv[1] if len(sys.argv) > 1 else "models/specstate-bytes"
    begin = time.time()
    model = Target(folder)
    result = model.prefill([256] + list(b"In the beginning God created the heaven and the earth. " * 4)[:200])
    print(f"{len(result.tokens)} tokens in {time.time() - begin:.1f} s; greedy next byte {bytes([model.next_token(result.logits[-1])])!r}")
    for part in ("dflash", "dspark"):
        draft = Drafter(os.path.join(folder, part), model)
        out = draft.propose(model.next_token(result.logits[-1]), draft.context(draft.features(result)))
        print(part, out.tokens, out.confidence)
