"""Links, anchors and paths on the pages exist, the index links every page, and shown code equals the files."""

import re
from pathlib import Path

from ftis_node import errors
from ftis_node.documentation import sections
from tests.documented.pages import PAGES, ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SOURCE_PATH = re.compile(r"`((?:ftis_node|tests|bench|proto|deploy|examples)/[\w./-]*)`")
TROUBLESHOOTING = ROOT / "docs/operate/troubleshooting.md"


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _code() -> str:
    """Return the sources of the package, with string literals of several lines joined."""
    sources = "\n".join(path.read_text() for path in (ROOT / "ftis_node").rglob("*.py"))
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", sources)


def _has_target(page: Path, link: str) -> bool:
    if re.match(r"https?:", link):
        return True
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in sections(target.read_text()))


def test_links_and_anchors_exist():
    links = [(page, link) for page in PAGES for link in LINK.findall(_prose(page))]
    broken = [f"{page.name}: {link}" for page, link in links if not _has_target(page, link)]
    assert not broken, "\n".join(broken)
    assert not _has_target(ROOT / "docs/train/tasks.md", "#no-such-heading")


def test_the_index_links_every_page():
    index = ROOT / "docs/index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert {*PAGES[1:]} - {index} <= linked
    assert "docs/index.md#get-started" in LINK.findall(PAGES[0].read_text())


def test_shown_code_equals_the_file():
    pages = [page.read_text() for page in PAGES]
    shown = [one for page in pages for one in re.findall(r"<!-- same: (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL)]
    assert len(shown) >= 4
    for path, code in shown:
        assert code == (ROOT / path).read_text(), path


def test_every_path_on_a_page_exists():
    named = [(page, path) for page in PAGES for path in SOURCE_PATH.findall(page.read_text())]
    assert len(named) > 100
    assert not [(page.name, path) for page, path in named if not (ROOT / path).exists()]


def test_pages_have_no_path_of_a_machine():
    paths = [
        f"{page.name}: {path}"
        for page in PAGES
        for path in re.findall(r"/(?:root|work|tmp|Users)/\S*", page.read_text())
    ]
    assert not paths, "\n".join(paths)


def test_troubleshooting_has_every_error_and_exit_code():
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.FtisError)]
    shown = {
        int(code): set(filter(None, names.strip().split(", ")))
        for code, names in re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)
    }
    assert set(shown) == {one.exit_code for one in classes} | {0, 130}
    for code, names in shown.items():
        assert names == {one.__name__ for one in classes if one.exit_code == code}


def test_the_messages_of_troubleshooting_are_in_the_code():
    code = _code()
    messages = re.findall(r"^\| `([^`]+)` \|", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)
    assert len(messages) > 25
    for message in messages:
        for part in re.split(r"\.\.\.|:PATH", message):
            text = part.strip(" ;:,()")
            assert text in code, f"{message}: {text!r} is not in the code"
