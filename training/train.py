#!/usr/bin/env python3
"""Trains the whole checkpoint: target, DFlash drafter, DSpark drafter; rounds and measures it. `make.py` runs it after the corpus and the
prompts are there, and what comes after it.

    python3 training/train.py --corpus build/corpus --out build/model --prompts models/specstate-bytes/prompts

Stages (each can be run alone with --stages; later stages read what earlier ones stored in --out):
    target   dense warm-up, then sparse top-k training at 1024, 4096 and 8192 bytes, then export
    text     on-policy text sampled from the stored target, for the drafters (kept in memory; rebuilt when needed)
    dflash   DFlash drafter on the target's features
    dspark   DSpark drafter, then its confidence temperatures
    measure  bits per byte and accepted lengths of exactly the stored weights -> --metrics
"""
import argparse
import json
import os
import time

import fla_setup   # noqa: F401  (before fla)
import torch
import torch.nn.functional as F

import evaluate
from data import Corpus
from decode import Decoder, continue_text
from export import load, save
from model import Drafter, Target, drafter_config, target_config

# (name, context, steps, sparse): every step is `tokens_per_step` bytes. measured: how many prompts (all), new_tokens: how far each is
# continued (256) for the accepted lengths.
PLAN = {
    "full": {
        "target": [("dense", 1024, 1000, False), ("sparse-1k", 1024, 900, True), ("sparse-4k", 4096, 300, True), ("sparse-8k", 8192, 50, True)],
        "tokens_per_step": 65536, "text": 8192, "text_length": 1024, "long": 96, "drafter_steps": 4500, "calibrate": 512,
    },
    "smoke": {
        "target": [("dense", 1024, 150, False), ("sparse-1k", 1024, 40, True), ("sparse-4k", 4096, 10, True), ("sparse-8k", 8192, 4, True)],
        "tokens_per_step": 65536, "text": 1024, "text_length": 1024, "long": 8, "drafter_steps": 60, "calibrate": 64,
    },
    "tiny": {   # every stage on a CPU
        "target": [("dense", 64, 2, False), ("sparse-1k", 128, 2, True)],
        "tokens_per_step": 256, "text": 4, "text_length": 96, "long": 0, "drafter_steps": 2, "calibrate": 4, "measured": 4, "new_tokens": 24,
    },
}


class Clock:
    def __init__(self, path):
        self.begin, self.path, self.events = time.time(), path, []

    def log(self, **event):
        event = {"t": round(time.time() - self.begin, 1), **{k: round(v, 5) if isinstance(v, float) else v for k, v in event.items()}}
        self.events.append(event)
        print(json.dumps(event), flush=True)
        if self.path:
            with open(self.path, "w") as f:
                f.write("\n".join(json.dumps(e) for e in self.events) + "\n")


class Averager:
    """Exponential moving average of the weights; the horizon grows with the steps so that early weights fade."""

    def __init__(self, model, horizon):
        self.live = list(model.parameters())
        self.mean = [p.detach().clone() for p in self.live]
        self.horizon, self.steps = horizon, 0

    @torch.no_grad()
    def update(self):
        self.steps += 1
        torch._foreach_lerp_(self.mean, self.live, 1.0 / min(self.horizon, 1 + self.steps / 5))

    @torch.no_grad()
    def swap(self):
        for p, m in zip(self.live, self.mean):
            p.data, m.data = m.data, p.data


def optimizer(model, lr, decay):
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "conv1d" not in n and "embed" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}],
                             lr=lr, betas=(0.9, 0.97), fused=next(model.parameters()).is_cuda)


def schedule(step, total, peak, warmup=100, floor=0.02):
    """Linear warm-up, then a cosine to `floor` of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    x = torch.pi * (step - warmup) / max(1, total - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + float(torch.cos(torch.tensor(x)))))


def train_target(args, plan, corpus, clock):
    torch.manual_seed(args.seed)
    config = target_config()
    target = Target(config).to(args.device)
    target.dropout = args.dropout
    opt, mean = optimizer(target, args.lr, 0.1), Averager(target, 300)
    total, done = sum(stage[2] for stage in plan["target"]), 0
    for name, context, steps, sparse in plan["target"]:
        batch = max(1, plan["tokens_per_step"] // context)
        target.train()
        running, begin = [], time.time()
        for step in range(steps):
            for group in opt.param_groups:
                group["lr"] = schedule(done, total, args.lr)
            inputs, labels = corpus.sample(batch, context)
            rows = torch.randperm(context, device=args.device)[:max(8, min(64, 65536 // context))].sort().values
            with torch.autocast(corpus.device, dtype=torch.bfloat16, enabled=args.bf16):
                logits, _, kl = target(inputs, sparse, fused=args.fused, kl_rows=rows, dtype=args.dtype)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            (loss + kl).backward()
            norm = torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            mean.update()
            done += 1
            running.append(torch.stack([loss.detach(), kl.detach(), norm.detach()]))
            if (step + 1) % 50 == 0 or step + 1 == steps or done in (1, 5, 20):
                ce, index_kl, norms = torch.stack(running).mean(0).tolist()
                running = []
                clock.log(stage=name, step=done, bits=ce / 0.6931472, index_kl=index_kl, grad_norm=norms,
                          ms=1000 * (time.time() - begin) / (step + 1), epochs=done * plan["tokens_per_step"] / corpus.train_bytes)
            if corpus.device == "cuda" and ((step + 1) % 300 == 0 or step + 1 == steps):
                mean.swap()
                bits = evaluate.held_out_bits(target, corpus, 0, args, sparse=sparse)
                clock.log(stage=name, step=done, held_out={k: round(v, 4) for k, v in bits["domain"].items()})
                mean.swap()
        target.train()
    mean.swap()
    save(args.out, "target", config, target.state_dict())
    if corpus.device == "cuda":
        stored = load(args.out, "target", args.device)
        clock.log(stage="stored", bits=evaluate.all_bits(stored, corpus, args, args.dtype))
    if corpus.device == "cuda":
        clock.log(peak_gb=torch.cuda.max_memory_allocated() / 1e9)


@torch.no_grad()
def target_outputs(target, tokens, layer_ids, args, batch):
    """Features (bf16) and logits (fp16) of every position, teacher-forced."""
    features, logits = [], []
    for part in tokens.split(batch):
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            out, kept, _ = target(part, True, fused=args.fused, features=layer_ids, dtype=args.dtype)
        features.append(torch.cat([kept[i] for i in layer_ids], -1).to(args.dtype))
        logits.append(out.half())
    return torch.cat(features), torch.cat(logits)


@torch.no_grad()
def on_policy(target, corpus, args, count, length, seed, held_out=False):
    """Text that starts with real prompts of random length and continues as the target writes it.

    Half of the sequences are greedy (what a drafter meets at temperature 0), the others sampled at 0.8 and 1.0.
    Returns the text, the prompt lengths and the end of the part worth drafting: a small model's greedy text falls into
    loops sooner or later, and a drafter should not spend its capacity on those.
    """
    generator = torch.Generator(device=args.device).manual_seed(seed)
    top = min(640, length // 2)
    if held_out:
        pick = torch.randint(len(corpus.held_out), (count,), device=args.device, generator=generator)
        starts = torch.tensor([s for _, s, _ in corpus.held_out], device=args.device)[pick]
        starts = starts + torch.randint(4096 - top, (count,), device=args.device, generator=generator)
        prompts = corpus.windows(starts, top)[0]
    else:
        prompts = corpus.sample(count, top, generator)[0]
    lengths = torch.randint(min(33, top - 1), top, (count,), device=args.device, generator=generator)
    choice = torch.arange(count, device=args.device) % 10
    temperature = torch.where(choice < 5, 0.0, torch.where(choice < 8, 0.8, 1.0)).float()
    if held_out:
        temperature = torch.ones_like(temperature)
    decoder = Decoder(target, count, length, graph=args.device == "cuda")
    text = continue_text(decoder, prompts, lengths, length, temperature, seed)
    return text, lengths, torch.where(temperature == 0, (lengths + 320).clamp(max=length), length)


def drafter_data(args, plan, corpus, clock):
    """[(tokens, features, logits, first, usual, last)] of on-policy text and of long corpus windows; the last three bound the anchors."""
    target = load(args.out, "target", args.device)
    ids = drafter_config("dflash")["dflash_config"]["target_layer_ids"]
    text, lengths, last = on_policy(target, corpus, args, plan["text"], plan["text_length"], args.seed + 1)
    clock.log(stage="text", sequences=len(text), sample=bytes(t for t in text[-1, 1:].tolist() if t < 256).decode("latin-1")[:700])
    everywhere = lambda x, value: torch.full((len(x),), value, device=args.device)
    pools = [(text, *target_outputs(target, text, ids, args, 64 if args.device == "cuda" else 4), everywhere(text, 1), lengths - 1, last)]
    if plan["long"]:
        # what the features look like deep into a context: slices of 1024 whose first half only serves as draft context
        tokens, _ = corpus.sample(plan["long"], 8192)
        features, logits = target_outputs(target, tokens, ids, args, 8)
        slices = [x.unfold(1, 1024, 512).movedim(-1, 2).flatten(0, 1) for x in (tokens, features, logits)]
        pools.append((*slices, everywhere(slices[0], 512), everywhere(slices[0], 512), everywhere(slices[0], 1024)))
    held, lengths, last = on_policy(target, corpus, args, plan["calibrate"], plan["text_length"], args.seed + 2, held_out=True)
    held_pool = (held, *target_outputs(target, held, ids, args, 64 if args.device == "cuda" else 4), everywhere(held, 1), lengths - 1, last)
    clock.log(stage="features", gb=sum(p[1].numel() * 2 for p in pools) / 1e9)
    return target, pools, held_pool


def draw_blocks(pool, batch, anchors, drafter, device, random_offset):
    """A batch of sequences with random anchors: (tokens, features, logits, n, position offset). Three anchors of four
    lie in the part that the target wrote itself, the others in its prompt too."""
    tokens, features, logits, first, usual, last = pool
    pick = torch.randint(len(tokens), (batch,), device=device)
    low = torch.where(torch.rand(batch, anchors, device=device) < 0.75, usual[pick, None], first[pick, None])
    high = last[pick, None] - drafter.block - 1
    n = low + (torch.rand(batch, anchors, device=device) * (high - low)).long()
    offset = torch.randint(0, 7168, (batch, 1), device=device) if random_offset else torch.zeros(batch, 1, dtype=torch.long, device=device)
    return tokens[pick], features[pick], logits[pick], n, offset


def block_rows(drafter, target, tokens, features, n, offset, args):
    position = offset + torch.arange(tokens.shape[1], device=tokens.device)
    with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
        context = drafter.context(features, position)
        return drafter.rows(tokens.gather(1, n), offset + n, context, position, target.model.embed_tokens.weight, args.dtype)


def at(x, index):
    """x [B,T,...] at index [B,A,k] -> [B,A,k,...]"""
    b = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    return x[b, index]


def dflash_loss(drafter, target, rows, tokens, logits, n, decay):
    k = torch.arange(drafter.block - 1, device=n.device)
    labels = at(tokens, n[..., None] + 1 + k)
    out = F.linear(rows[:, :, 1:].float(), target.lm_head.weight.float())
    weight = torch.exp(-k / decay)
    ce = F.cross_entropy(out.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    # the target's own distribution as a soft label halves the variance of the gradient
    p = at(logits, n[..., None] + k).float().softmax(-1)
    ce = 0.5 * ce - 0.5 * (p * out.log_softmax(-1)).sum(-1)
    hit = (out.argmax(-1) == labels).float()
    return (ce * weight).sum(-1).mean() / weight.sum(), {"accept": hit.cumprod(-1).sum(-1).mean()}


def dspark_terms(drafter, target, rows, tokens, logits, n):
    k = torch.arange(drafter.block, device=n.device)
    labels, previous = at(tokens, n[..., None] + 1 + k), at(tokens, n[..., None] + k)
    out = F.linear(rows.float(), target.lm_head.weight.float()) + drafter.markov_bias(previous)
    p, q = at(logits, n[..., None] + k).float().softmax(-1), out.softmax(-1)
    distance = (p - q).abs().sum(-1)
    return out, labels, previous, distance


def dspark_loss(drafter, target, rows, tokens, logits, n, decay):
    out, labels, previous, distance = dspark_terms(drafter, target, rows, tokens, logits, n)
    weight = torch.exp(-torch.arange(drafter.block, device=n.device) / decay)
    ce = F.cross_entropy(out.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    accept = (1 - distance / 2).detach()
    bce = F.binary_cross_entropy_with_logits(drafter.confidence_logit(rows, previous), accept, reduction="none")
    hit = (out.argmax(-1) == labels).float()
    loss = ((0.1 * ce + 0.9 * distance + bce) * weight).sum(-1).mean() / weight.sum()
    return loss, {"accept": hit.cumprod(-1).sum(-1).mean(), "overlap": accept.cumprod(-1).sum(-1).mean(), "bce": bce.mean().detach()}


def train_drafter(kind, args, plan, target, pools, held_pool, clock):
    torch.manual_seed(args.seed + (3 if kind == "dflash" else 4))
    config = drafter_config(kind)
    drafter = Drafter(config).to(args.device).train()
    opt, mean = optimizer(drafter, args.drafter_lr, 0.05), Averager(drafter, 300)
    loss_of = dflash_loss if kind == "dflash" else dspark_loss
    steps, running, begin = plan["drafter_steps"], [], time.time()
    batch, anchors = (64, 64) if args.device == "cuda" else (2, 3)
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = schedule(step, steps, args.drafter_lr)
        pool = pools[1] if len(pools) > 1 and step % 8 == 7 else pools[0]
        tokens, features, logits, n, offset = draw_blocks(pool, batch, anchors, drafter, args.device, True)
        rows = block_rows(drafter, target, tokens, features, n, offset, args)
        loss, extra = loss_of(drafter, target, rows, tokens, logits, n, 4.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        mean.update()
        running.append(torch.stack([loss.detach(), *extra.values()]))
        if (step + 1) % 250 == 0 or step + 1 == steps or step + 1 == 20:
            values = torch.stack(running).mean(0).tolist()
            running = []
            clock.log(stage=kind, step=step + 1, loss=values[0], ms=1000 * (time.time() - begin) / (step + 1), **dict(zip(extra, values[1:])))
    mean.swap()
    drafter.eval()
    save(args.out, kind, config, drafter.state_dict())
    if kind == "dspark":
        stored = load(args.out, kind, args.device)
        config["confidence_temperatures"], report = fit_temperatures(stored, target, held_pool, args)
        save(args.out, kind, config, stored.state_dict())
        clock.log(stage="temperatures", tau=config["confidence_temperatures"], **report)


@torch.no_grad()
def fit_temperatures(drafter, target, pool, args, blocks=40):
    """Sequential temperature scaling: left to right, each tau_k minimises the calibration error of the survival
    S_k = prod c_i against the exact survival prod (1 - L1/2) on held-out text at temperature 1."""
    confidence, accept = [], []
    size = 32 if args.device == "cuda" else 2
    for part in range(0, len(pool[0]), size):
        tokens, features, logits = (x[part:part + size] for x in pool[:3])
        n = torch.randint(min(320, tokens.shape[1] // 2), tokens.shape[1] - drafter.block - 1, (len(tokens), blocks), device=tokens.device)
        offset = torch.zeros(len(tokens), 1, dtype=torch.long, device=tokens.device)
        rows = block_rows(drafter, target, tokens, features, n, offset, args)
        _, _, previous, distance = dspark_terms(drafter, target, rows, tokens, logits, n)
        confidence.append(drafter.confidence_logit(rows, previous).flatten(0, 1))
        accept.append((1 - distance / 2).flatten(0, 1))
    logit, truth = torch.cat(confidence), torch.cat(accept).cumprod(-1)

    def calibration_error(predicted, actual, bins=15):
        index = (predicted * bins).long().clamp(max=bins - 1)
        total = torch.zeros(bins, device=predicted.device)
        return float(total.index_add(0, index, predicted - actual).abs().sum() / len(predicted))

    grid = [round(0.5 + 0.02 * i, 2) for i in range(101)]
    taus, survival, before, after = [], torch.ones_like(truth[:, 0]), [], []
    for k in range(truth.shape[1]):
        before.append(calibration_error(torch.sigmoid(logit[:, :k + 1]).prod(-1), truth[:, k]))
        errors = [calibration_error(survival * torch.sigmoid(logit[:, k] / tau), truth[:, k]) for tau in grid]
        taus.append(grid[min(range(len(grid)), key=errors.__getitem__)])
        survival = survival * torch.sigmoid(logit[:, k] / taus[-1])
        after.append(min(errors))
    return taus, {"error_before": [round(x, 4) for x in before], "error_after": [round(x, 4) for x in after]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--plan", choices=PLAN, default="full")
    parser.add_argument("--stages", default="target,text,dflash,dspark,measure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--drafter-lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--prompts", help="folder of held-out prompts; default: OUT/prompts")
    parser.add_argument("--log", help="file for the training log (JSON lines)")
    parser.add_argument("--metrics", help="file for the measurements (JSON)")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.fused = args.bf16 = args.device == "cuda"
    args.dtype = torch.bfloat16 if args.bf16 else torch.float32
    torch.set_float32_matmul_precision("high")
    plan, stages, clock = PLAN[args.plan], args.stages.split(","), Clock(args.log)
    corpus = Corpus(args.corpus, args.device)
    clock.log(device=torch.cuda.get_device_name() if args.fused else "cpu", torch=torch.__version__, plan=args.plan, seed=args.seed,
              train_bytes=corpus.train_bytes, lr=args.lr, dropout=args.dropout)
    if "target" in stages:
        train_target(args, plan, corpus, clock)
    if {"text", "dflash", "dspark"} & set(stages):
        target, pools, held_pool = drafter_data(args, plan, corpus, clock)
        for kind in ("dflash", "dspark"):
            if kind in stages:
                train_drafter(kind, args, plan, target, pools, held_pool, clock)
        del target, pools, held_pool
    if "measure" in stages:
        result = evaluate.measure(args, corpus, args.prompts or os.path.join(args.out, "prompts"), plan.get("measured"), plan.get("new_tokens", 256))
        result["seconds"] = round(time.time() - clock.begin)
        if args.metrics:
            with open(args.metrics, "w") as f:
                json.dump(result, f, indent=1)
        print(json.dumps(result), flush=True)
        clock.log(stage="done")


if __name__ == "__main__":
    main()
