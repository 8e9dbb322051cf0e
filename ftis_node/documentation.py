"""The pages that came with the package.

Messages, help and settings name a page by the command that shows it: `ftis-node docs operate/resources`. A page's name
is its path without `.md`. A wheel has the pages in `ftis_node/_docs`, an editable checkout in `docs/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

INDEX: Final = "index"
HEADING = re.compile(r"^(#{1,6}) (.+)$", flags=re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]*)\)")
PACKAGE = Path(__file__).parent


def folder() -> Path:
    """Return the folder of the pages; it is missing if a package was built without them."""
    shipped = PACKAGE / "_docs"
    return shipped if shipped.is_dir() else PACKAGE.parent / "docs"


def find_pages() -> dict[str, Path]:
    """Return the pages by name, in the order of the index; tables of results do not count."""
    root = folder()
    found = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.md"))}
    found = {name: path for name, path in found.items() if not name.startswith("results/")}
    index = found[INDEX].read_text(encoding="utf-8") if INDEX in found else ""
    order = [INDEX, *(target.removesuffix(".md") for _, target in LINK.findall(index))]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def title_of(source: str) -> str:
    found = HEADING.search(source)
    return found[2] if found else ""


def sections(source: str) -> dict[str, str]:
    """Return a page's sections by anchor, each with the sections below it. Anchors are as GitHub makes them."""
    blank = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), source)
    headings = list(HEADING.finditer(blank))
    found: dict[str, str] = {}
    for position, heading in enumerate(headings):
        following = (later.start() for later in headings[position + 1 :] if len(later[1]) <= len(heading[1]))
        anchor = base = slug(heading[2])
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{base}-{number}"
        found[anchor] = source[heading.start() : next(following, len(source))]
    return found


def slug(heading: str) -> str:
    text = LINK.sub(r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
