"""`ftis-node docs`: the pages that came with the package."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ftis_node import documentation
from ftis_node.errors import MachineError, UsageError


def docs(
    page: Annotated[
        str, typer.Argument(help="A page, or a section: operate/troubleshooting, operate/deploy#kubernetes.")
    ] = documentation.INDEX,
    listed: Annotated[bool, typer.Option("--list", help="List the pages.")] = False,
) -> None:
    """Print a page of the documentation that came with this version, as Markdown into a pipe."""
    pages = documentation.find_pages()
    if not pages:
        raise MachineError(f"this package was built without its pages: {documentation.folder()} has none")
    if listed:
        width = max(map(len, pages))
        for known, path in pages.items():
            typer.echo(f"{known:<{width}}  {documentation.title_of(path.read_text(encoding='utf-8'))}")
        return
    name, anchor = _find(page, pages)
    source = pages[name].read_text(encoding="utf-8")
    _print(documentation.sections(source)[anchor] if anchor else source)


def _find(page: str, pages: dict[str, Path]) -> tuple[str, str]:
    """Return a page's name and anchor. `troubleshooting` and a path below docs/ are valid names, too."""
    name, _, anchor = page.strip().lower().partition("#")
    name = name.removeprefix("docs/").removesuffix(".md").strip("/")
    same = [known for known in pages if known == name] or [known for known in pages if known.endswith(f"/{name}")]
    if len(same) != 1:
        hint = _hint(name, [*pages, *(known.rpartition("/")[2] for known in pages)])
        raise UsageError(f"no page {page!r}{hint or '; ftis-node docs --list lists all'}")
    if anchor:
        anchors = documentation.sections(pages[same[0]].read_text(encoding="utf-8"))
        if anchor not in anchors:
            raise UsageError(f"{same[0]} has no section {anchor!r}{_hint(anchor, anchors)}")
    return same[0], anchor


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]} ?" if close else ""


def _print(source: str) -> None:
    if not sys.stdout.isatty():
        typer.echo(source.rstrip("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(source, hyperlinks=False))
