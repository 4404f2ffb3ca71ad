#!/usr/bin/env python3
"""Writes checkpoints in the layout of docs/model.md, and reads them back.

    python3 training/export.py --random --out models/specstate-bytes    # untrained weights, for plumbing tests only
"""
import argparse
import json
import os

import torch
from safetensors.torch import load_file, save_file

from model import Drafter, Target, drafter_config, is_fp32, target_config

PARTS = {"target": "", "dflash": "dflash", "dspark": "dspark"}


def rounded(state):
    """The state as it is stored: one rounding to bf16 except where the contract says fp32."""
    return {k: v.detach().float().cpu().contiguous() if is_fp32(k) else v.detach().to(torch.bfloat16).cpu().contiguous()
            for k, v in state.items()}




def save(out, part, config, state):
    folder = os.path.join(out, PARTS[part])
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")
    save_file(rounded(state), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def load(out, part, device="cpu"):
    """Model with the stored (rounded) weights held in fp32, in evaluation mode."""
    folder = os.path.join(out, PARTS[part])
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    model = Target(config) if part == "target" else Drafter(config)
    state = {k: v.float() for k, v in load_file(os.path.join(folder, "model.safetensors")).items()}
    model.load_state_dict(state)
    return model.to(device).eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--random", action="store_true", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    save(args.out, "target", target_config(), Target(target_config()).state_dict())
    for kind in ("dflash", "dspark"):
        save(args.out, kind, drafter_config(kind), Drafter(drafter_config(kind)).state_dict())


if __name__ == "__main__":
    main()
