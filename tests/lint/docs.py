"""Links of the documentation resolve."""

import re

from tree import matching, text

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
        for link in LINK.findall(content):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name) if name else path
            if not target.exists():
                found.append(f"{relative}: link to {link}, which is not there")
            elif anchor and target.suffix == ".md" and anchor not in anchors(text(target) or ""):
                found.append(f"{relative}: link to {link}, which has no such heading")
    return found
