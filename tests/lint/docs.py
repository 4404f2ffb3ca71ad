"""Links of the documentation resolve; the table of environment variables is true."""

import pathlib
import re
import sys

from tree import matching, text

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import environment_docs  # noqa: E402

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def anchors(content):
    """GitHub's anchors of a file's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", content), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        found.add(slug)
    return found


def check(root):
    found = []
    for path, relative in matching(root, ".md"):
        content = FENCE.sub("", text(path) or "")
        for line in re.findall(r"^#+[^#\s].*$", content, re.M):
            found.append(f"{relative}: {line!r} is no heading without a space (formatted as C++?)")
        for link in LINK.findall(content):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name) if name else path
            if not target.exists():
                found.append(f"{relative}: link to {link}, which is not there")
            elif anchor and target.suffix == ".md" and anchor not in anchors(text(target) or ""):
                found.append(f"{relative}: link to {link}, which has no such heading")
    index = root / "docs" / "decisions" / "README.md"
    numbers, index = {}, text(index) if index.is_file() else ""
    for path in sorted((root / "docs" / "decisions").glob("0*.md")):
        if not (text(path) or "").startswith(f"# {path.name[:4]}: "):
            found.append(f"docs/decisions/{path.name}: its heading does not begin with its number ('# {path.name[:4]}: ..')")
        if f"]({path.name})" not in index:
            found.append(f"docs/decisions/{path.name}: has no line in docs/decisions/README.md")
        other = numbers.setdefault(path.name[:4], path.name)
        if other != path.name:
            found.append(f"docs/decisions/{path.name}: has the number of {other}")
    return found


def environment(root):
    """docs/environment.md is what tools/environment_docs.py makes, and every variable that the sources name is in it."""
    page = root / "docs" / "environment.md"
    content = page.read_text() if page.is_file() else ""
    found = [] if content == environment_docs.render(root) else ["docs/environment.md: differs from src/core/env.cpp (tools/environment_docs.py)"]
    for path, relative in matching(root, ".cpp", ".hpp", ".py"):
        if not relative.startswith(("src/", "cli/", "python/", "bench/")):
            continue
        for name in re.findall(r"""(?:getenv\(|environ(?:\.get\(|\[)|get\()\s*["'](SPECSTATE_\w+)["']""", text(path) or ""):
            if f"`{name}`" not in content:
                found.append(f"{relative}: {name} has no line in docs/environment.md")
    return found
