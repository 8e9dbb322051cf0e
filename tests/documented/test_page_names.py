"""Every page that a message, a help text, a setting, a metric, an alert or a deployment file names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from ftis_node.documentation import NAMED, as_links, find_pages, sections
from tests.documented import cli_reference
from tests.documented.configuration import render_reference as configuration
from tests.documented.metrics import metrics_table
from tests.documented.pages import PAGES, ROOT

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
