"""What the rules share: the files of a tree, and rules about the tree itself."""

import functools
import pathlib
import re
import subprocess

FAMILIES = ("hisparse", "kda", "draft_kv", "accept")


@functools.lru_cache
def files(root):
    """Every file that git tracks or would track; in a folder that is no checkout, every file."""
    try:
        listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True).stdout
        paths = [root / name.decode() for name in listed.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in root.rglob("*") if not {"build", ".venv", ".git"} & set(p.relative_to(root).parts)]
    return sorted({p for p in paths if p.is_file() and not p.is_symlink()})


def matching(root, *suffixes, under=""):
    for path in files(root):
        relative = path.relative_to(root).as_posix()
        if path.suffix in suffixes and relative.startswith(under):
            yield path, relative


def text(path):
    """The text of a file, or None for a binary one."""
    data = path.read_bytes()
    return None if b"\0" in data else data.decode("utf-8", errors="replace")


LOCAL_PATH = re.compile(r"(?<![\w.$}])/(?:work|root|home|Users)/\w")


def local_paths(root):
    """No absolute path of somebody's machine in the tree."""
    found = []
    for path in files(root):
        content = text(path) or ""
        if path.name == "tree.py" and path.parent.name == "lint":
            continue
        for number, line in enumerate(content.splitlines(), 1):
            if LOCAL_PATH.search(line):
                found.append(f"{path.relative_to(root)}:{number}: an absolute path of one machine: {line.strip()[:80]}")
    return found


def version(root):
    """VERSION is the single source of the version; the changelog knows it."""
    number = (root / "VERSION").read_text().strip()
    found = [] if re.fullmatch(r"\d+\.\d+\.\d+", number) else [f"VERSION: expected MAJOR.MINOR.PATCH, got {number!r}"]
    for path, relative in matching(root, ".py", ".cpp", ".hpp", ".in", ".txt", ".cmake", ".toml", ".json"):
        content = text(path) or ""
        if re.search(rf"(?<![\w.]){re.escape(number)}(?![\w.])", content) and not relative.startswith(("tests/", "models/", "training/", "bench/results/")):
            found.append(f"{relative}: repeats the version {number}; read it from VERSION")
    if f"## {number}" not in (root / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md: has no section for {number}")
    return found


FAMILY_FILES = ("SEMANTICS.md", "args.hpp", "check.cpp", "api.cpp", "cpu.cpp")


def rooms(root):
    """HACKING's table and the folders are the same; every family has the same files."""
    table = re.findall(r"^\| (`.*?) \|", (root / "HACKING.md").read_text(), re.M)
    named = set()
    for cell in table:
        for room in re.findall(r"`([\w./<>*-]+/)`", cell):
            named |= {room.replace("<family>", f) for f in FAMILIES} if "<family>" in room else {room}
    found = [f"HACKING.md: its table names {room}, which is not there" for room in sorted(named) if not (root / room).is_dir()]
    relatives = [p.relative_to(root) for p in files(root)]
    folders = {r.parts[0] + "/" for r in relatives if len(r.parts) > 1 and not r.parts[0].startswith(".")}
    folders |= {"/".join(r.parts[:2]) + "/" for r in relatives if len(r.parts) > 2 and r.parts[0] in ("src", "tests", "python")}
    for folder in sorted(folders):
        if not any(room.startswith(folder) or folder.startswith(room) for room in named):
            found.append(f"{folder}: has no line in HACKING.md's table")
    for family in FAMILIES:
        if (root / "src" / family).is_dir():
            found += [f"src/{family}/{name}: is missing; every family has it" for name in FAMILY_FILES
                      if not (root / "src" / family / name).is_file()]
    return found


def pointers(root):
    """In HACKING.md, names behind `file`: are in that file, and every file that it names is there."""
    content = (root / "HACKING.md").read_text()
    found = []
    for name in re.findall(r"`((?:\.ci|[a-z_]+)/[\w./-]+\.\w+)`", content):
        if not (root / name).is_file():
            found.append(f"HACKING.md: names {name}, which is not there")
    for name, rest in re.findall(r"`([\w./-]+\.(?:[ch]pp|cuh?))`: ([^\n|;]*)", content):
        source = (text(root / name) or "") if (root / name).is_file() else ""
        for symbol in re.findall(r"`(\w+)`", rest):
            if not re.search(rf"\b{symbol}\b", source):
                found.append(f"HACKING.md: says that {name} has {symbol}")
    return found
