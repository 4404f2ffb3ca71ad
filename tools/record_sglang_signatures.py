#!/usr/bin/env python3
"""Records the signatures of the functions that we answer to, from an sglang wheel or its unpacked folder:

    pip download --no-deps --dest /tmp/sglang sglang==0.5.23
    tools/record_sglang_signatures.py /tmp/sglang/sglang-0.5.23-*.whl

The sources are parsed, never imported. Writes tests/python/sglang_signatures.json, which the tests compare with ours.
"""

import argparse
import ast
import json
import pathlib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Our module -> (sglang's file, the names to record; None: every public function and class of the file).
FILES = {
    "hisparse": [("sglang/kernels/ops/kvcache/hisparse.py", None)],
    "kda": [
        ("sglang/kernels/ops/attention/kda_decode_mtp.py", ["fused_kda_decode_mtp_dspark"]),
        (
            "sglang/kernels/ops/attention/linear/kda_replayssm_spec_decode.py",
            ["commit_kda_replayssm_spec", "commit_kda_replayssm_spec_all_layers"],
        ),
        ("sglang/kernels/ops/attention/linear/gdn_replayssm_spec_fold.py", ["commit_gdn_replayssm_fold_all_layers"]),
        ("sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py", ["fused_sigmoid_gating_delta_rule_update"]),
        ("sglang/kernels/ops/attention/cutedsl_kda.py", ["cutedsl_fused_sigmoid_gating_kda_update"]),
    ],
    "draft_kv": [
        ("sglang/kernels/ops/speculative/fused_kv_materialize.py", ["_fused_norm_rope_stacked", "FusedKVMaterializeHelper"])
    ],
}


def parameters(f):
    """[name, kind, default] of each parameter; a default is its source text, None where there is none."""
    a = f.args
    positional = [(x.arg, "positional_only") for x in a.posonlyargs] + [(x.arg, "positional_or_keyword") for x in a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    found = [{"name": n, "kind": k, "default": d} for (n, k), d in zip(positional, defaults, strict=True)]
    assert not a.vararg and not a.kwarg, f"{f.name} takes *args or **kwargs"
    for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append({"name": x.arg, "kind": "keyword_only", "default": None if d is None else ast.unparse(d)})
    return found


def record(source, path, names):
    entries = {}
    for node in ast.parse(source, path).body:
        name = getattr(node, "name", None)
        if name is None or (name.startswith("_") if names is None else name not in names):
            continue
        entry = {"file": path, "sglang_name": name}
        if isinstance(node, ast.FunctionDef):
            entry["parameters"] = parameters(node)
        elif any(ast.unparse(base) == "NamedTuple" for base in node.bases):
            entry["fields"] = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]
        else:
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and (m.name == "__init__" or m.name[0] != "_")]
            entry["methods"] = {m.name: parameters(m) for m in methods}
        entries[name.lstrip("_")] = entry
    missing = {n.lstrip("_") for n in names or []} - set(entries)
    assert not missing, f"{path}: not found: {missing}"
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "tests" / "python" / "sglang_signatures.json")
    args = parser.parse_args()
    if args.wheel.is_dir():
        version = next(args.wheel.glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist")
        read = lambda path: (args.wheel / path).read_text()
    else:
        version = args.wheel.name.split("-")[1]
        archive = zipfile.ZipFile(args.wheel)
        read = lambda path: archive.read(path).decode()
    modules = {}
    for module, files in FILES.items():
        modules[module] = {}
        for path, names in files:
            modules[module].update(record(read(path), path, names))
    args.output.write_text(json.dumps({"sglang": version, "modules": modules}, indent=1) + "\n")
    print(f"{sum(map(len, modules.values()))} signatures of sglang {version} in {args.output}")


if __name__ == "__main__":
    main()
