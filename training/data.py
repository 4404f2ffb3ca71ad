"""The corpus as token tensors: training windows, held-out blocks."""
import json
import os

import numpy as np
import torch

from corpus import BLOCK, DOMAINS, split
from model import BOS, EOS


class Corpus:
    def __init__(self, folder, device):
        self.device = device
        with open(os.path.join(folder, "manifest.json")) as f:
            self.manifest = json.load(f)
        tokens, self.segments, self.held_out, offset = [], [], [], 0
        for domain in DOMAINS:
            data = np.fromfile(os.path.join(folder, domain + ".bin"), np.uint8).astype(np.int16)
            data[data == 4] = EOS
            for start, end, held in split(len(data)):
                (self.held_out if held else self.segments).append((domain, offset + start, offset + end))
            tokens.append(data)
            offset += len(data)
        self.tokens = torch.tensor(np.concatenate(tokens), device=device)
        self.train_bytes = sum(e - s for _, s, e in self.segments)
        self._starts = {}

    def _start_table(self, length):
        """Every start of a training window of `length` bytes that touches no held-out byte."""
        if length not in self._starts:
            runs = [torch.arange(s, e - length + 1, device=self.device) for _, s, e in self.segments if e - s >= length]
            self._starts[length] = torch.cat(runs)
        return self._starts[length]

    def windows(self, starts, length):
        """[BOS] + the first length - 1 bytes as inputs, the length bytes as labels."""
        text = self.tokens[starts[:, None] + torch.arange(length, device=self.device)].long()
        return torch.cat([torch.full_like(text[:, :1], BOS), text[:, :-1]], 1), text

    def sample(self, batch, length, generator=None):
        table = self._start_table(length)
        pick = torch.randint(len(table), (batch,), device=self.device, generator=generator)
        return self.windows(table[pick], length)

    def held_out_windows(self, context):
        """Held-out blocks behind `context` bytes of the text before them: (domains, inputs, labels), labels of the block only.

        The context is training text when context > 0; only the block's own bytes are scored.
        """
        chosen = [(d, s, e) for d, s, e in self.held_out if self._contiguous(d, s - context)]
        starts = torch.tensor([s - context for _, s, _ in chosen], device=self.device)
        return [d for d, _, _ in chosen], *self.windows(starts, context + BLOCK)

    def _contiguous(self, domain, start):
        first = min(s for d, s, _ in self.segments if d == domain)
        return start >= first
