"""`ftis-node docs --serve`: the pages over HTTP on 127.0.0.1.

It serves the site that `make site` built. Without a site, it serves the Markdown pages as plain HTML at the same paths.
"""

from __future__ import annotations

import html
import os
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import typer

from ftis_node import documentation
from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Container

    from markdown_it import MarkdownIt

HOST = "127.0.0.1"
PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
pre, table { display: block; overflow-x: auto; } pre { padding: .7rem; background: #8881; }
code { font-size: .9em; } td, th { border: 1px solid #8886; padding: .2rem .5rem; text-align: left; }
table { border-collapse: collapse; } img { max-width: 100%; } nav a { margin-right: .8rem; white-space: nowrap; }
</style></head><body><nav>$links</nav><hr><main>$body</main></body></html>
""")


class QuietHandler(SimpleHTTPRequestHandler):
    """Handler that serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve_pages(pages: dict[str, Path], name: str, anchor: str, port: int) -> None:
    """Serve the pages until ctrl-C. Raises UsageError if the port is not free."""
    with tempfile.TemporaryDirectory(prefix="ftis-docs-") as folder:
        root = documentation.site_folder() or render_pages(pages, Path(folder))
        try:
            server = ThreadingHTTPServer((HOST, port), partial(QuietHandler, directory=str(root)))
        except OSError as error:
            raise UsageError(f"cannot listen on {HOST}:{port} ({error.strerror}): choose another --port") from None
        address = f"http://{HOST}:{port}/docs/{name}.html" + (f"#{anchor}" if anchor else "")
        with server, suppress(KeyboardInterrupt):
            typer.echo(f"the documentation is at {address} (ctrl-C ends it)")
            server.serve_forever()


def render_pages(pages: dict[str, Path], root: Path) -> Path:
    """Write each page as HTML to `root/docs`, with the pictures of the package. Return `root`."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    titles = {name: documentation.title_of(path.read_text(encoding="utf-8")) for name, path in pages.items()}
    for name, path in pages.items():
        target = root / "docs" / f"{name}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * name.count("/")
        links = " ".join(f'<a href="{up}{other}.html">{html.escape(title)}</a>' for other, title in titles.items())
        body = _body(parser, path.read_text(encoding="utf-8"), name, pages)
        target.write_text(PAGE.substitute(title=html.escape(titles[name]), links=links, body=body), encoding="utf-8")
    pictures = documentation.folder() / "assets"
    if pictures.is_dir():
        shutil.copytree(pictures, root / "docs/assets")
    return root


def _body(parser: MarkdownIt, source: str, name: str, pages: Container[str]) -> str:
    """Return a page as HTML: headings have their anchors, and links between pages point to HTML files."""
    tokens = parser.parse(source)
    anchors = iter(documentation.sections(source))
    for token in tokens:
        if token.type == "heading_open":
            token.attrSet("id", next(anchors, ""))
        for part in token.children or []:
            target, mark, anchor = str(part.attrGet("href") or "").partition("#")
            page = os.path.normpath(os.path.join(os.path.dirname(name), target.removesuffix(".md")))
            if part.type == "link_open" and target.endswith(".md") and page in pages:
                part.attrSet("href", f"{target.removesuffix('.md')}.html{mark}{anchor}")
            elif part.type == "link_open" and target and ":" not in target:  # a file that is not in the package
                del part.attrs["href"]
    rendered: str = parser.renderer.render(tokens, parser.options, {})
    return rendered
