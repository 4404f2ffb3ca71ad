#!/usr/bin/env python3
"""Writes the type stubs of the package into FOLDER, from the signatures of its modules and the rules below. The wheel carries them."""

import argparse
import importlib
import inspect
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

HEAD = '''from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

class Array(Protocol):
    """Anything that speaks DLPack: torch.Tensor, numpy.ndarray, cupy.ndarray, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

'''

INTEGERS = set(
    "item_size_bytes num_top_k hot_buffer_size page_size block_size num_blocks sparse_block_size max_cache_len num_k_heads null_block_id "
    "null_slot cache_steps num_kv_heads head_dim rotary_dim hot context occurrences max_position_hint tokens request count layer position "
    "j round window tail scratch top_k device_rows host_rows first_layer".split()
)
NUMBERS = set("softplus_beta softplus_threshold lower_bound scale onorm_eps".split())
OTHERS = {
    "stream": "Any", "device": "Any", "rotary_emb": "Any", "layers": "Sequence[Any]", "layout": 'Literal["linear", "dsv4"]',
    "state": "Array", "rings": "Rings | Sequence[Array]", "write_layer_kv": "Callable[[int, Any, Any], None]", "source": 'Literal["staged", "host"]',
    "strict_sglang": "bool", "function_name": "str", "k_scale": "float | Array", "v_scale": "float | Array",
    "conv_pools": "Array | Sequence[Array]", "intermediate_windows": "Array | Sequence[Array]", "k_pool": "Array | Sequence[Array]",
    "v_pool": "Array | Sequence[Array]", "anchor_of": "Sequence[int | None]",
}  # fmt: skip
BUFFERS = ("host_cache", "device_buffer", "host_cache_v", "device_buffer_v")
# Where a name means something else in one function.
SPECIAL = {
    **{(f, "state"): "SwapState | Sequence[Array]" for f in ("swap_in", "reset_swap_state")},
    **{(f, n): "Array | Sequence[Array]" for f in ("replay_plan", "Coordinator.__init__") for n in BUFFERS},
    **{("Coordinator.__init__", n): "Sequence[Array | None]" for n in BUFFERS[2:]},
    **{(f"Coordinator.{f}", "requests"): "Sequence[int]" for f in ("begin_step", "end_step")}, ("Coordinator.end_step", "accepted"): "Sequence[int]",
    ("transfer_paged", "src"): "Array | Sequence[Array]", ("transfer_paged", "dst"): "Array | Sequence[Array]",
    ("load_cache_to_device_buffer_spec_mla", "state"): "HiSparseSpecState | Sequence[Array]", ("materialize_into_pool", "kv_weight"): "Array | KvProjection",
    **{where: "Array | None" for where in (("materialize_into_pool", "slot_mapping"), ("verify_rejection", "draft_probs"), ("copy_cache_planned_mla", "num_real_reqs"))},
    ("verify_greedy", "out"): "Sequence[Array]", ("verify_rejection", "out"): "Sequence[Array]", ("supports", "arguments"): "Any",
    ("Coordinator.__init__", "requests"): "int", ("Coordinator.prepare_verify", "requests"): "Sequence[int]",
    ("Coordinator.prepare_verify", "widths"): "Sequence[int]", ("Coordinator.accept", "requests"): "Sequence[int]",
    ("Coordinator.accept", "accepted"): "Sequence[int]",
}  # fmt: skip
RETURNS = {
    "supports": "tuple[bool, str]", "verify_greedy": "tuple[Any, Any]", "verify_rejection": "tuple[Any, Any]", "plan_verify_lengths": "Any",
    "fused_norm_rope_stacked": "tuple[Any, Any]", "new_swap_state": "SwapState", "new_spec_state": "HiSparseSpecState", "swap_in": "Any",
    "swap_in_single": "Any", "verify": "Any", "decode": "Any", "fold": "Any", "fused_kda_decode_mtp_dspark": "Any",
    "fused_sigmoid_gating_delta_rule_update": "Any", "cutedsl_fused_sigmoid_gating_kda_update": "Any", "Coordinator.can_admit": "bool",
    "Coordinator.host_row": "int", "Coordinator.host_pages": "list[int]", "Coordinator.prepare_verify": "Any", "Coordinator.swap": "Any", "Coordinator.plan_rounds": "tuple[int, Any]",
    "Coordinator.state": "str", "Coordinator.length": "int", "Coordinator.stats": "dict[str, int]", "Coordinator.tables": "tuple[Any, Any]", "Coordinator.open_step": "Any",
    "materialize_workspace_bytes": "int", "defer_fold": "Any",
}  # fmt: skip
# What instances and classes have beside their functions.
ATTRIBUTES = {
    "Coordinator": "    STATES: tuple[str, ...]\n",
    "FusedKVMaterializeHelper": "    n_layers: int\n    num_kv_heads: int\n    head_dim: int\n    kv_size: int\n    rotary_dim: int\n"
    "    is_neox_style: bool\n    max_position_hint: int | None\n    device: Any\n    rotary_emb: Any\n",
}


def kind(where, p):
    name = p.name
    if (where, name) in SPECIAL:
        t = SPECIAL[where, name]
    elif name in OTHERS:
        t = OTHERS[name]
    elif isinstance(p.default, bool):
        t = "bool"
    elif name in INTEGERS or isinstance(p.default, int):
        t = "int"
    elif name in NUMBERS or isinstance(p.default, float):
        t = "float"
    else:
        t = "Array"
    return t + " | None" if p.default is None and t != "Any" else t


def definition(where, f, indent=""):
    parts, star = [], False
    for p in inspect.signature(f).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            star = True
            parts.append("*")
        if p.name == "self":
            parts.append("self")
            continue
        mark = "**" if p.kind is p.VAR_KEYWORD else ""
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parts.append(f"{mark}{p.name}: {kind(where, p)}{default}")
        if p.kind is p.POSITIONAL_ONLY:
            parts.append("/")
    lines = "".join(f"\n{indent}    {part}," for part in parts if part != "self")
    own = f"\n{indent}    self," if "self" in parts else ""
    if len(parts) - ("self" in parts) == 0:
        own, lines = "self" if "self" in parts else "", ""
    end = f"\n{indent}" if own.startswith("\n") or lines else ""
    return f"{indent}def {f.__name__}({own}{lines}{end}) -> {RETURNS.get(where, 'None')}: ...\n"


def class_stub(name, c):
    if hasattr(c, "_fields"):
        fields = "".join(f'    {field}: Any\n    """{getattr(c, field).__doc__}"""\n' for field in c._fields)
        return f'class {name}(NamedTuple):\n    """{c.__doc__}"""\n\n{fields}'
    text = f"class {name}:\n" + ATTRIBUTES.get(name, "")
    for member, f in vars(c).items():
        if member.startswith("_") and member != "__init__":
            continue
        if isinstance(f, property):
            text += f"    @property\n    def {member}(self) -> int: ...\n"
        elif inspect.isfunction(f):
            text += definition(f"{name}.{member}", f, "    ")
    return text


def stub(module):
    m = importlib.import_module(f"specstate.{module}")
    text = HEAD + f"__all__ = {sorted(m.__all__)!r}\n"
    for name, x in vars(m).items():
        if name not in m.__all__:
            continue
        if inspect.isclass(x):
            text += "\n" + class_stub(name, x)
        elif inspect.isfunction(x):
            text += "\n" + definition(name, x)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for module in ("accept", "draft_kv", "hisparse", "kda"):
        (folder / f"{module}.pyi").write_text(stub(module))


if __name__ == "__main__":
    main()
