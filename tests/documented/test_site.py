"""The site builds strictly and without a network, has every page, and loads nothing from other hosts."""

import re
import subprocess
import sys
from html.parser import HTMLParser

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
LOADED = {"src", "srcset", "data", "poster", "action"}


class Page(HTMLParser):
    """A built page: `assets` are the addresses that a browser loads for it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.assets: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in LOADED or (name == "href" and tag != "a"):
                self.assets.append(value or "")
            elif name == "style":
                self.assets += CSS_ASSET.findall(value or "")


def test_the_site_has_every_page_and_loads_nothing_from_another_host(tmp_path):
    site = tmp_path / "site"
    options = ["-b", "html", "-c", str(ROOT / "docs"), "-d", str(tmp_path / "cache"), "-W", "-n", "--keep-going"]
    command = [sys.executable, "-c", OFFLINE_SPHINX, *options, "--quiet", str(ROOT), str(site)]  # as `make site`
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [page for page in PAGES if not (site / page.relative_to(ROOT).with_suffix(".html")).exists()]
    loaded = [(path.name, asset) for path in site.rglob("*.html") for asset in Page(path.read_text()).assets]
    loaded += [(path.name, asset) for path in site.rglob("*.css") for asset in CSS_ASSET.findall(path.read_text())]
    assert len(loaded) > 100 and not [one for one in loaded if OUTSIDE.match(one[1])]
    scripts = [(path.name, one) for path in site.rglob("*.js") for one in SCRIPT_ADDRESS.findall(path.read_text())]
    assert not [one for one in scripts if one[1] not in NAMESPACES]
