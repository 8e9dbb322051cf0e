"""The site builds strictly and without a network, loads nothing from other hosts, and links every page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.documented.pages import PAGES, ROOT

pytest.importorskip("sphinx", reason="Sphinx is not installed: `pip install -e .[docs]`")

OFFLINE_SPHINX = """
import socket, sys
def refuse(*arguments):
    raise OSError("the build must not use the network")
socket.socket.connect = socket.getaddrinfo = refuse
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
OUTSIDE = re.compile(r"(?:https?:)?//")
CSS_ASSET = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")
SCRIPT_ADDRESS = re.compile(r"""["'`](?:https?:)?//[^"'`]+""")
NAMESPACES = {'"http://www.w3.org/2000/svg', '"http://www.w3.org/1999/xlink'}  # names that no browser fetches
NOT_LINKED = {"search.html"}  # only the search form opens it


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make site` does, in a process that cannot connect to anything."""
    options = ["-b", "html", "-c", str(ROOT / "docs"), "-d", str(out / "cache"), "-W", "-n", "--keep-going", "--quiet"]
    command = [sys.executable, "-c", OFFLINE_SPHINX, *options, str(source), str(out / "site")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@dataclass
class Page(HTMLParser):
    """A built page: the files that a browser loads for it, the targets of its links, and its anchors."""

    source: str
    assets: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        for name in ("src", "srcset", "data", "poster", "action"):
            if name in values:
                self.assets.append(values[name])
        if "href" in values:
            (self.links if tag == "a" else self.assets).append(values["href"])
        self.assets += CSS_ASSET.findall(values.get("style", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_is_built(site: Path) -> None:
    missing = [page for page in PAGES if not (site / page.relative_to(ROOT).with_suffix(".html")).exists()]
    assert len(PAGES) > 30 and not missing


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    loaded = [(path.name, asset) for path, page in pages.items() for asset in page.assets]
    loaded += [(path.name, asset) for path in site.rglob("*.css") for asset in CSS_ASSET.findall(path.read_text())]
    assert len(loaded) > 100
    assert not [one for one in loaded if OUTSIDE.match(one[1])]
    scripts = [(path.name, one) for path in site.rglob("*.js") for one in SCRIPT_ADDRESS.findall(path.read_text())]
    assert not [one for one in scripts if one[1] not in NAMESPACES]


def test_every_page_is_reachable_and_every_link_has_a_target(site: Path, pages: dict[Path, Page]) -> None:
    reached, waiting, broken = set(), [site / "docs/index.html"], []
    while waiting:
        path = waiting.pop()
        if path in reached or path not in pages:
            continue
        reached.add(path)
        for link, target, anchor in _links(path, pages[path]):
            if not target.exists() or (target in pages and anchor and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
            waiting.append(target)
    assert not broken, "\n".join(broken)
    assert {path.relative_to(site).as_posix() for path in set(pages) - reached} == {*NOT_LINKED, "index.html"}
    assert 'url=docs/index.html"' in (site / "index.html").read_text()


def _links(path: Path, page: Page) -> Iterator[tuple[str, Path, str]]:
    """Yield each link within the site with its target file and anchor."""
    for link in page.links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            yield link, target, unquote(parts.fragment)


def test_the_search_index_has_words_of_pages_and_needs_no_server(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")  # a script, because a file:// page can load no other files
    assert "docs/operate/troubleshooting" in index and '"bootstrap"' in index


@pytest.mark.parametrize(
    "text",
    ["[a page](none.md)", "[an anchor](index.md#none)", "[a file](none.csv)", "```{toctree}\nnone\n```"],
)
def test_a_broken_link_fails_the_build(tmp_path: Path, text: str) -> None:
    (tmp_path / "source/docs").mkdir(parents=True)
    (tmp_path / "source/docs/index.md").write_text(f"# Index\n\n{text}\n")
    done = build(tmp_path / "source", tmp_path)
    assert done.returncode != 0 and "WARNING" in done.stderr, done.stdout + done.stderr
