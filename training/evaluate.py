"""Measurements on held-out text: bits per byte, index quality, accepted lengths. Used by train.py."""
import os

import torch

from data import BLOCK
from decode import Decoder, continue_text, emittable
from export import load

BUCKETS = [(0, 256), (256, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]


@torch.no_grad()
def held_out_bits(target, corpus, context, args, sparse=True, dtype=None, batch=8):
    """Bits per byte of the held-out blocks, each behind `context` bytes of the text before it: per domain, overall, per position bucket."""
    was_training = target.training
    target.eval()
    domains, inputs, labels = corpus.held_out_windows(context)
    dtype = dtype or args.dtype
    bits = []
    for x, y in zip(inputs.split(batch), labels.split(batch)):
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits, _, _ = target(x, sparse, fused=args.fused, dtype=dtype)
        logp = logits[:, context:].float().log_softmax(-1)
        bits.append(-logp.gather(-1, y[:, context:, None]).squeeze(-1) / 0.6931472)
    bits = torch.cat(bits)
    result = {"domain": {}, "position": {}}
    for domain in dict.fromkeys(domains):
        rows = torch.tensor([d == domain for d in domains], device=bits.device)
        result["domain"][domain] = float(bits[rows].mean())
    result["domain"]["all"] = float(bits.mean())
    for low, high in BUCKETS:
        if context <= low and high <= context + BLOCK:
            result["position"][f"{low}-{high}"] = float(bits[:, low - context:high - context].mean())
    target.train(was_training)
    return result


@torch.no_grad()
def index_quality(target, corpus, context, args, rows=64):
    """Share of dense attention mass that the selected positions hold, per sparse-MLA layer, in the last 1024 rows."""
    _, inputs, _ = corpus.held_out_windows(context)
    x, T, result = inputs[:8], inputs.shape[1], {}
    at = torch.linspace(T - 1024, T - 1, rows, device=x.device).long()
    hidden = target.model.embed_tokens(x).float()
    future = torch.arange(T, device=x.device)[None] > at[:, None]
    mask = None
    for i, layer in enumerate(target.model.layers):
        h = layer.input_layernorm(hidden)
        m = layer.self_attn
        if layer.is_kda:
            y = m(h, args.fused)
        else:
            if layer.is_anchor:
                selected = m.select(h)
                mask = torch.zeros(selected.shape, device=x.device).masked_fill_(~selected, float("-inf")).unsqueeze(1)
            y, (q, k) = m(h, mask)
            p = (torch.einsum("brhd,bthd->bhrt", q[:, at], k) * m.scale).masked_fill(future, float("-inf")).softmax(-1)
            result[str(i)] = float((p * selected[:, None, at]).sum(-1).mean())
        hidden = hidden + y
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return result


def read_prompts(folder, count):
    names = sorted(os.listdir(folder))[:count]
    return names, [[256] + list(open(os.path.join(folder, n), "rb").read()) for n in names]


@torch.no_grad()
def accepted_chains(target, drafter, tokens, features, prompt_length):
    """Accepted drafts of each step over tokens [T], whose part after the prompt the target itself wrote.

    Every position is drafted as if a step started there; the chain of steps is then walked. Exact for greedy text and
    for the point-mass rule on sampled text (accept while the draft equals what the target drew).
    """
    T, gamma = len(tokens), drafter.block if drafter.is_dspark else drafter.block - 1
    position = torch.arange(T, device=tokens.device)[None]
    context = drafter.context(features, position)
    proposals, confidences = [], []
    for n in torch.arange(prompt_length, T - 1, device=tokens.device).split(128):
        rows = drafter.rows(tokens[n][None], n[None], context, position, target.model.embed_tokens.weight, torch.float32)[0]
        if not drafter.is_dspark:
            proposals.append(emittable(rows[:, 1:] @ target.lm_head.weight.T).argmax(-1))
            continue
        base, previous, chosen = rows @ target.lm_head.weight.T, tokens[n], []
        tau = torch.tensor(drafter.config["confidence_temperatures"], device=tokens.device)
        c = []
        for k in range(gamma):
            c.append(torch.sigmoid(drafter.confidence_logit(rows[:, k], previous) / tau[k]))
            previous = emittable(base[:, k] + drafter.markov_bias(previous)).argmax(-1)
            chosen.append(previous)
        proposals.append(torch.stack(chosen, -1))
        confidences.append(torch.stack(c, -1))
    proposals = torch.cat(proposals).tolist()
    text, n, chain, looping = tokens.tolist(), prompt_length, [], []
    while n < T - 1 - gamma:               # only steps whose whole block lies inside the text
        looping.append(in_loop(text, n))
        a = 0
        while a < gamma and proposals[n - prompt_length][a] == text[n + 1 + a]:
            a += 1
        chain.append(a)
        n += a + 1
    return chain, looping


def in_loop(text, n, match=32, period=128):
    """Whether the last `match` tokens before n repeat an earlier run no more than `period` tokens back."""
    return any(text[n - match:n] == text[n - match - p:n - p] for p in range(1, min(period, n - match) + 1))


def teacher_features(target, drafter, tokens, args):
    _, kept, _ = target(tokens[None], True, fused=args.fused, features=drafter.layer_ids, dtype=torch.float32, want_logits=False)
    return torch.cat([kept[i] for i in drafter.layer_ids], -1)


def prompt_lookup_chain(tokens, prompt_length, gamma=7, order=4):
    """The n-gram baseline: propose what followed the latest earlier occurrence of the last `order` tokens."""
    text, latest, n, chain = list(tokens), {}, prompt_length, []
    seen = order - 1
    while n < len(text) - 1 - gamma:
        while seen < n:                     # index contexts that end before the last token
            latest[tuple(text[seen - order + 1:seen + 1])] = seen
            seen += 1
        hit, a = latest.get(tuple(text[n - order + 1:n + 1])), 0
        if hit is not None:
            while a < gamma and hit + 1 + a <= n and text[hit + 1 + a] == text[n + 1 + a]:
                a += 1
        chain.append(a)
        n += a + 1
    return chain


@torch.no_grad()
def acceptance(args, prompts_folder, count, new_tokens):
    target = load(args.out, "target", args.device)
    drafters = {kind: load(args.out, kind, args.device) for kind in ("dflash", "dspark")}
    names, prompts = read_prompts(prompts_folder, count)
    lengths = torch.tensor([len(p) for p in prompts], device=args.device)
    longest = int(lengths.max())
    padded = torch.zeros(len(prompts), longest, dtype=torch.long, device=args.device)
    for i, p in enumerate(prompts):
        padded[i, :len(p)] = torch.tensor(p, device=args.device)
    decoder = Decoder(target, len(prompts), longest + new_tokens, graph=args.device == "cuda")
    report = {}
    for label, temperature in (("greedy", 0.0), ("t1", 1.0)):
        text = continue_text(decoder, padded, lengths, longest + new_tokens, torch.full((len(prompts),), temperature, device=args.device), 11)
        chains, by_loop, by_length = {}, {}, {}
        for i, name in enumerate(names):
            domain = name.split("-")[1].split(".")[0]
            tokens = text[i, :len(prompts[i]) + new_tokens]
            features = teacher_features(target, drafters["dflash"], tokens, args)      # both drafters read the same layers
            for kind, drafter in drafters.items():
                chain, looping = accepted_chains(target, drafter, tokens, features, len(prompts[i]))
                chains.setdefault((kind, domain), []).extend(chain)
                size = "prompts under 1 KB" if len(prompts[i]) < 1000 else "prompts of 1 to 2 KB" if len(prompts[i]) < 2500 else "prompts of 3 KB and more"
                by_length.setdefault((kind, size), []).extend(chain)
                for a, loop in zip(chain, looping):
                    by_loop.setdefault((kind, "inside a loop" if loop else "outside loops"), []).append(a)
            chains.setdefault(("ngram", domain), []).extend(prompt_lookup_chain(tokens.tolist(), len(prompts[i])))
        for (kind, domain), chain in chains.items():
            report.setdefault(label, {}).setdefault(kind, {})[domain] = round(sum(chain) / max(1, len(chain)), 3)
        for (kind, part), chain in [*by_length.items(), *by_loop.items()]:
            report[label][kind][part] = {"mean": round(sum(chain) / max(1, len(chain)), 3), "steps": len(chain)}
        for kind in ("dflash", "dspark", "ngram"):
            joined = [a for (k, _), chain in chains.items() if k == kind for a in chain]
            report[label][kind]["all"] = round(sum(joined) / max(1, len(joined)), 3)
            report[label][kind]["histogram"] = [joined.count(a) for a in range(8)]
        report.setdefault("samples", {})[label] = {names[i]: bytes(t for t in text[i, len(prompts[i]):len(prompts[i]) + 160].tolist() if t < 256).decode("latin-1")
                                                   for i in (0, len(names) // 2, len(names) - 1)}
    return report


def all_bits(target, corpus, args, dtype):
    result = {}
    for context, sparse in ((0, True), (0, False), (4096, True), (4096, False)):
        label = f"context {context}, {'top-' + str(target.config['index_topk']) if sparse else 'dense'}"
        result[label] = held_out_bits(target, corpus, context, args, sparse=sparse, dtype=dtype, batch=4)
    return result


@torch.no_grad()
def measure(args, corpus, prompts_folder, count, new_tokens):
    """Everything that the model card states, on exactly the stored weights, in fp32 activations; accepted lengths over the first `count`
    prompts (None: all)."""
    torch.set_float32_matmul_precision("highest")
    target = load(args.out, "target", args.device)
    result = {"parameters": {"target": sum(p.numel() for p in target.parameters())}}
    for kind in ("dflash", "dspark"):
        result["parameters"][kind] = sum(p.numel() for p in load(args.out, kind).parameters())
    if args.device == "cuda":
        result["bits"] = all_bits(target, corpus, args, torch.float32)
        result["index_mass"] = {str(c): index_quality(target, corpus, c, args) for c in (0, 4096)}
    del target
    result["accepted"] = acceptance(args, prompts_folder, count, new_tokens)
    torch.set_float32_matmul_precision("high")
    return result
