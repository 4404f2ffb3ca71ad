#!/usr/bin/env python3
"""Builds the training corpus from three public-domain texts in Debian packages.

    python3 training/corpus.py --out build/corpus            # downloads the packages with apt-get
    python3 training/corpus.py --out build/corpus --debs DIR # uses .deb files that are already in DIR

Output: `<domain>.bin` per domain (plain bytes, 0x04 stands for end-of-text) and `manifest.json` with sizes and
SHA-256. Nothing is installed on the system: packages are unpacked with dpkg-deb into a scratch folder, and the
King James text is dumped by running the unpacked `bible` program (it has its own compressed format).

Held out: of every 20 blocks of 4096 bytes, block 10. See `split`.
"""
import argparse
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile

PACKAGES = ["bible-kjv", "bible-kjv-text", "dict-jargon", "dict-devil"]
DOMAINS = ["kjv", "jargon", "devil"]
EOT = "\x04"          # becomes the EOS id (257); no source text contains it
BLOCK = 4096
HELD_OUT_EVERY = 20
HELD_OUT_AT = 10

# What the shipped checkpoint was trained on. A different package version shows up here first.
EXPECTED_SHA256 = {
    "kjv": "20518b120e912be9ecdc96655d91a498d56d6a469d132c80f765caa60d63b8a5",
    "jargon": "9be57949012c8e7a5c100e2819cd84b06ea9c5c5d2406dc01e266979a98ba69a",
    "devil": "2b670afb30e0aa88b18a17a1835df8ac62b1e80197b2d824b98d0bcc0e5f0791",
}


def split(size):
    """[(start, end, held_out)] covering [0, size): maximal runs of training blocks and single held-out blocks."""
    runs = []
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        held = (start // BLOCK) % HELD_OUT_EVERY == HELD_OUT_AT and end - start == BLOCK
        if runs and not held and not runs[-1][2]:
            runs[-1] = (runs[-1][0], end, False)
        else:
            runs.append((start, end, held))
    return runs


def fold(text):
    """Typographic quotes and dashes to ASCII; a byte model gains nothing from spelling them in three bytes."""
    table = {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "\u00a0": " "}
    return text.translate({ord(k): v for k, v in table.items()})


def kjv(root):
    """One verse a line, a heading line per chapter, end-of-text after each of the 66 books."""
    raw = subprocess.run(
        [f"{root}/usr/bin/bible", "-l990", "-p", f"{root}/usr/lib", "-d", "bible.data"],
        input="gen1:1-rev22:21\n", capture_output=True, text=True, check=True,
    ).stdout
    # The program greets with Genesis 1:1 before it reads the request; the text proper is the second heading.
    lines = raw[raw.rindex("\nGenesis 1\n"):].split("\n")
    out, book = [], None
    for line in lines:
        line = line.rstrip()
        heading = re.fullmatch(r"((?:[1-3] )?[A-Z][A-Za-z ]*?) (\d+)", line)
        verse = re.fullmatch(r" +\d+ (.*)", line)
        if heading:
            if book is not None:
                out.append(EOT if heading.group(1) != book else "\n")
            book = heading.group(1)
            out.append(line + "\n\n")
        elif verse:
            out.append(verse.group(1) + "\n")
        elif line and not line.startswith("bible("):
            raise SystemExit(f"unexpected line from bible: {line!r}")
    return "".join(out) + EOT


def dictd(path, first):
    """Body of a dictd database, from the headword `first` on."""
    text = fold(gzip.open(path).read().decode("utf-8"))
    text = text[text.index(first):]
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" + EOT


def build(root):
    return {
        "kjv": kjv(root),
        "jargon": dictd(f"{root}/usr/share/dictd/jargon.dict.dz", "/dev/null\n"),
        "devil": dictd(f"{root}/usr/share/dictd/devil.dict.dz", "ABASEMENT"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--debs", help="folder with the .deb files; without it they are fetched with apt-get download")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        debs = os.path.abspath(args.debs) if args.debs else scratch
        if not args.debs:
            subprocess.run(["apt-get", "download", *PACKAGES], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        names = sorted(n for n in os.listdir(debs) if n.endswith(".deb") and n.split("_")[0] in PACKAGES)
        if len(names) != len(PACKAGES):
            raise SystemExit(f"need exactly one .deb of each of {PACKAGES}, found {names}")
        root = os.path.join(scratch, "root")
        for name in names:
            subprocess.run(["dpkg-deb", "-x", os.path.join(debs, name), root], check=True)
        texts = build(root)
    os.makedirs(args.out, exist_ok=True)
    manifest = {"packages": names, "domains": {}}
    for domain, text in texts.items():
        data = text.encode("utf-8")
        with open(os.path.join(args.out, domain + ".bin"), "wb") as f:
            f.write(data)
        digest = hashlib.sha256(data).hexdigest()
        held = sum(e - s for s, e, h in split(len(data)) if h)
        manifest["domains"][domain] = {"bytes": len(data), "held_out_bytes": held, "sha256": digest}
        if EXPECTED_SHA256[domain] not in (None, digest):
            print(f"warning: {domain} differs from the text of the shipped checkpoint", file=sys.stderr)
    with open(os.path.join(args.out, "manifest.json"), "w") as f:
        json.dump(manifest, f, indent=1)
    print(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    main()
