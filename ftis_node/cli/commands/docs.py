"""`ftis-node docs`: the pages that came with the package."""

from __future__ import annotations

import difflib
import os
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node import documentation
from ftis_node.cli import completion
from ftis_node.errors import MachineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from pathlib import Path

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def docs(
    page: Annotated[
        str,
        typer.Argument(
            help="A page, or a section: operate/troubleshooting, operate/deploy#kubernetes.",
            autocompletion=completion.page_names,
        ),
    ] = documentation.INDEX,
    listed: Annotated[bool, typer.Option("--list", help="List the pages.")] = False,
) -> None:
    """Show the documentation that came with this version.

    Opens the page in a browser if there is one and the site was built. Otherwise prints it: as Markdown into a pipe, by
    pages in a terminal.
    """
    pages = documentation.find_pages()
    if not pages:
        raise MachineError(f"this package was built without its pages: {documentation.folder()} has none")
    if listed:
        _list(pages)
        return
    name, anchor = _find(page, pages)
    if not _opened(name, anchor):
        source = pages[name].read_text(encoding="utf-8")
        _print(documentation.sections(source)[anchor] if anchor else source, name, pages)


def _list(pages: dict[str, Path]) -> None:
    width = max(map(len, pages))
    for name, path in pages.items():
        typer.echo(f"{name:<{width}}  {documentation.title_of(path.read_text(encoding='utf-8'))}")


def _find(page: str, pages: dict[str, Path]) -> tuple[str, str]:
    """Return a page's name and anchor. `troubleshooting` and a path below docs/ are valid names, too."""
    name, _, anchor = page.strip().lower().partition("#")
    name = name.removeprefix("docs/").removesuffix(".md").strip("/")
    same = [known for known in pages if known == name] or [known for known in pages if known.endswith(f"/{name}")]
    if len(same) != 1:
        last_parts = {known.rpartition("/")[2]: known for known in pages}
        close = _closest(name, [*pages, *last_parts])
        hint = _hint(last_parts.get(close, close)) or "; ftis-node docs --list lists all"
        raise UsageError(f"no page {page!r}{hint}")
    if anchor:
        anchors = documentation.sections(pages[same[0]].read_text(encoding="utf-8"))
        if anchor not in anchors:
            raise UsageError(f"{same[0]} has no section {anchor!r}{_hint(_closest(anchor, anchors))}")
    return same[0], anchor


def _closest(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def _hint(close: str) -> str:
    return f"; did you mean {close} ?" if close else ""


def _opened(name: str, anchor: str) -> bool:
    """Open the page of the built site in a browser. Return False without a site, a screen or a browser."""
    site = documentation.site_folder()
    has_screen = sys.platform == "darwin" or any(map(os.environ.get, DISPLAYS))
    if site is None or not has_screen or not sys.stdout.isatty():
        return False
    import webbrowser

    address = (site / "docs" / f"{name}.html").as_uri() + (f"#{anchor}" if anchor else "")
    typer.echo(address)
    return webbrowser.open(address)


def _print(source: str, name: str, pages: Container[str]) -> None:
    """Print Markdown as it is, or drawn and by pages in a terminal."""
    if not sys.stdout.isatty():
        typer.echo(source.rstrip("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-R")  # makes the pager keep colors
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(_with_page_names(source, name, pages), hyperlinks=False))


def _with_page_names(source: str, name: str, pages: Container[str]) -> str:
    """Return a page in which links to other pages show the name for `ftis-node docs`."""

    def named(link: re.Match[str]) -> str:
        target, mark, anchor = link[2].partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(name), target.removesuffix(".md")))
        return f"{link[1]} ({path}{mark}{anchor})" if path in pages else link[1]

    return documentation.LINK.sub(named, source)
