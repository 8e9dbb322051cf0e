"""Sphinx settings of the documentation site: `make site`.

The source folder is the repository, so that links from pages to CONTRIBUTING.md lead somewhere. The pages are plain
Markdown without directives. The navigation is made from the lists of docs/index.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
project = "ftis-node"
author = "ftis-node contributors"
root_doc = "docs/index"
extensions = ["myst_parser"]
include_patterns = [
    "docs/**.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "tests/chaos/README.md",
    "tests/conformance/README.md",
]
exclude_patterns = [  # folders that Sphinx need not search
    *(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in {"docs", "tests"}),
    *(f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.name not in {"chaos", "conformance"}),
]
myst_heading_anchors = 4
highlight_language = "none"  # of indented blocks: commands, their output, drawings
html_theme = "furo"
html_title = "ftis-node"
html_show_sourcelink = False
html_copy_source = False
html_use_index = False
html_permalinks_icon = "#"

LINKED_ONLY = ("docs/results/", "tests/")  # one page links to each of these: the navigation does not show them
HEADING = re.compile(r"^## (.+)$")
PAGE_LINK = re.compile(r"\]\(([\w./-]+)\.md\)")


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append one hidden toctree for each group of links in the index; give the tables of results a title."""
    if docname == root_doc:
        source[0] += "".join(toctree(caption, pages) for caption, pages in groups(source[0]))
    elif docname.startswith(LINKED_ONLY):
        title = "" if source[0].startswith("# ") else f"# {docname.rpartition('/')[2]}\n\n"
        source[0] = f"---\norphan: true\n---\n{title}{source[0]}"


def add_start(app: Sphinx, error: Exception | None) -> None:
    """Write an index.html in the site's top folder that leads to the index of the pages."""
    if error is None:
        start = f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><a href="{root_doc}.html">{project}</a>'
        (app.outdir / "index.html").write_text(f"<!doctype html><title>{project}</title>{start}\n")


def groups(index: str) -> list[tuple[str, list[str]]]:
    """Return the headings of the index with the pages that are linked below each."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in index.splitlines():
        if heading := HEADING.match(line):
            found.append((heading[1], []))
        found[-1][1].extend(PAGE_LINK.findall(line))
    return [(caption, pages) for caption, pages in found if pages]


def toctree(caption: str, pages: list[str]) -> str:
    """Return the directive in MyST's form."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_start)
