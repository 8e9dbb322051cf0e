"""`ftis-node docs --serve`: the pages over HTTP on 127.0.0.1.

It serves the site that `make site` built. Without a site, it serves the folder of the pages, each as plain HTML.
"""

from __future__ import annotations

import html
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from string import Template
from typing import TYPE_CHECKING, Any

import typer

from ftis_node import documentation
from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

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


class PagesHandler(SimpleHTTPRequestHandler):
    """Handler that serves the files of a folder, and its `pages` as HTML. Links between pages work as they are."""

    def __init__(self, *connection: Any, pages: dict[str, Path], directory: str) -> None:
        self._pages = pages
        super().__init__(*connection, directory=directory)

    def do_GET(self) -> None:
        name = self.path.strip("/").removesuffix(".md") or documentation.INDEX
        if name not in self._pages:
            super().do_GET()
            return
        page = as_html(self._pages, name).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def serve_pages(pages: dict[str, Path], name: str, anchor: str, port: int) -> None:
    """Serve the pages until ctrl-C. Raises UsageError if the port is not free."""
    site = documentation.site_folder()
    root, file = (site, f"docs/{name}.html") if site else (documentation.folder(), f"{name}.md")
    handler = partial(PagesHandler, pages={} if site else pages, directory=str(root))
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise UsageError(f"cannot listen on {HOST}:{port} ({error.strerror}): choose another --port") from None
    address = f"http://{HOST}:{port}/{file}" + (f"#{anchor}" if anchor else "")
    with server, suppress(KeyboardInterrupt):
        typer.echo(f"the documentation is at {address} (ctrl-C ends it)")
        server.serve_forever()


def as_html(pages: dict[str, Path], name: str) -> str:
    """Return a page as HTML below links to all pages. Its headings have the anchors of `documentation.sections`."""
    from markdown_it import MarkdownIt

    sources = {page: path.read_text(encoding="utf-8") for page, path in pages.items()}
    titles = {page: html.escape(documentation.title_of(source)) for page, source in sources.items()}
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(sources[name])
    anchors = iter(documentation.sections(sources[name]))
    for token in tokens:
        if token.type == "heading_open":
            token.attrSet("id", next(anchors, ""))
    links = " ".join(f'<a href="/{page}.md">{title}</a>' for page, title in titles.items())
    return PAGE.substitute(title=titles[name], links=links, body=parser.renderer.render(tokens, parser.options, {}))
