"""Links, anchors, paths and shown code on the pages exist, and so does every page that a message or a file names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from ftis_node import errors
from ftis_node.documentation import find_pages, sections
from tests.documented import cli_reference
from tests.documented.configuration import render_reference as configuration
from tests.documented.metrics import metrics_table
from tests.documented.pages import NAMED, PAGES, ROOT, as_links

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


REPOSITORY_PATH = re.compile(r"docs/[a-z-]+/[a-z-]+\.md")
TEXT_FILES = frozenset(".json .toml .yaml .yml .service .env .html .j2 .py".split())


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in TEXT_FILES]


def _strings(path: Path) -> Iterator[str]:
    """Yield the strings of a Python file except docstrings."""
    if not REPOSITORY_PATH.search(source := path.read_text()):
        return
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def test_every_named_page_and_section_exists():
    pages = {name: set(sections(path.read_text())) for name, path in find_pages().items()}
    named = [
        (str(path.relative_to(ROOT)), found[1], (found[2] or "").removeprefix("#"))
        for path in [*_files("ftis_node", "deploy"), *PAGES]
        for found in NAMED.finditer(re.sub(r"\s*\n\s*(?:# )?", " ", path.read_text()))
    ]
    assert len(named) > 40
    broken = [one for one in named if one[1] not in pages or (one[2] and one[2] not in pages[one[1]])]
    assert not broken, broken


def test_messages_name_no_path_of_the_repository():
    """A user of the package has no `docs/`. Comments and docstrings may name it."""
    named = [
        f"{path.name}: {text}"
        for path in _files("ftis_node", "deploy")
        for text in (_strings(path) if path.suffix == ".py" else path.read_text().splitlines())
        if REPOSITORY_PATH.search(text) and "python -m" not in text
    ]
    assert not named, "\n".join(named)


def test_generated_pages_link_the_named_pages():
    for page in (configuration(), metrics_table(), cli_reference.render()):
        assert not REPOSITORY_PATH.search(page) and not NAMED.search(page)
        for target in re.findall(r"\]\(\.\./([^)#]+)", page):
            assert (ROOT / "docs" / target).is_file(), target


def test_every_alert_names_its_page():
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"]
    for rule in [rule for group in groups for rule in group["rules"]]:
        assert NAMED.fullmatch(rule["annotations"]["runbook"]), rule["alert"]


def test_the_name_of_a_page_becomes_a_link():
    assert as_links("see ftis-node docs operate/deploy#backup.") == "see [operate/deploy](../operate/deploy.md#backup)."
    assert as_links("`ftis-node docs train/roles`") == "[train/roles](../train/roles.md)"
    assert as_links("ftis-node docs shows pages") == "ftis-node docs shows pages"


def test_anchors_are_those_of_github():
    page = "# A b\n## C, d!\n```\n## none\n```\n### C, d!\n## [E](f.md) `g_h`\nend"
    assert list(sections(page)) == ["a-b", "c-d", "c-d-1", "e-g_h"]
    assert sections(page)["c-d"].endswith("### C, d!\n") and sections(page)["e-g_h"].endswith("end")
