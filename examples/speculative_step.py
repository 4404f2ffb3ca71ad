"""One speculative step of a KDA layer: four proposals are verified, the target accepts some, the state advances over exactly those.

    python examples/speculative_step.py [--arrays numpy|torch|cupy]  # where specstate is installed
    PYTHONPATH=python .venv/bin/python examples/speculative_step.py [--arrays ...]  # in a checkout, after `make build`

The arrays go in without copies, whichever library made them; results are of the kind of the first argument.
"""

import argparse

import specstate
from specstate import accept, kda

TOKENS, HEADS, DIM = 4, 1, 64


def numpy_arrays():
    import numpy as np

    random = np.random.default_rng(1)
    return (lambda *shape: random.standard_normal(shape).astype(np.float32)), (lambda x: np.array(x, np.int32)), np.array_equal


def torch_arrays():
    import torch

    device = "cuda" if torch.cuda.is_available() and specstate.supports("verify_greedy", **on_gpu(torch))[0] else "cpu"
    random = torch.Generator().manual_seed(1)
    return (
        lambda *shape: torch.randn(shape, generator=random).to(device),
        lambda x: torch.tensor(x, dtype=torch.int32, device=device),
        torch.equal,
    )


def on_gpu(torch):
    ids = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    return {"candidates": ids, "target_argmax": ids}


def cupy_arrays():
    import cupy

    random = cupy.random.RandomState(1)
    return (lambda *shape: random.standard_normal(shape, dtype=cupy.float32)), (lambda x: cupy.array(x, cupy.int32)), cupy.array_equal


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", choices=["numpy", "torch", "cupy"], default="numpy")
    arrays = parser.parse_args().arrays
    try:
        normal, ids, equal = {"numpy": numpy_arrays, "torch": torch_arrays, "cupy": cupy_arrays}[arrays]()
    except ModuleNotFoundError as error:
        parser.exit(1, f"speculative_step.py: --arrays {arrays} needs {error.name}, which is not installed in this Python\n")

    step = dict(
        x_q=normal(TOKENS, HEADS, DIM), x_k=normal(TOKENS, HEADS, DIM), x_v=normal(TOKENS, HEADS, DIM), g=normal(TOKENS, HEADS, DIM),
        beta=normal(TOKENS, HEADS), A_log=normal(HEADS), dt_bias=normal(HEADS * DIM), slots=ids([0]),
    )  # fmt: skip
    state = normal(1, HEADS, DIM, DIM)
    plain = state + 0
    rings = kda.Rings(
        rawv=normal(1, HEADS, TOKENS, DIM), rawk=normal(1, HEADS, TOKENS, DIM), g=normal(1, HEADS, TOKENS, DIM), beta=normal(1, HEADS, TOKENS)
    )

    # Verify leaves the state alone and records in the rings what its update would need.
    kda.verify(**step, state=state, cu_seqlens=ids([0, TOKENS]), rings=rings)
    # Two proposals stand, and the target adds one token: three to commit.
    accepted, tokens = accept.verify_greedy(ids([[7, 11, 13, 17]]), ids([[11, 13, 19, 23]]))
    kda.fold(state, rings, step["slots"], accepted)

    # The same three tokens decoded one after the other.
    kda.decode(**step, state=plain, cu_seqlens=ids([0, 3]))
    print(f"accepted {int(accepted[0])} tokens: {' '.join(str(int(t)) for t in tokens[0][:3])}; "
          f"states are {'equal bit for bit' if equal(state, plain) else 'different'}")

    # Would a call be taken? Nothing runs, nothing is read.
    taken, why = specstate.supports("fold", state=state, rings=rings, slots=step["slots"], accept=normal(1))
    print(f"would fold take float32 counts? {'yes' if taken else 'no: ' + why}")


if __name__ == "__main__":
    main()
