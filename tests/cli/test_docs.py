"""`ftis-node docs` finds and prints pages."""

import pytest

from ftis_node import documentation
from ftis_node.cli.app import run
from tests.documented.pages import PAGES, ROOT

PAGE = (ROOT / "docs/operate/troubleshooting.md").read_text()


def test_the_list_has_every_page_and_begins_as_the_index(capsys):
    assert run(["docs", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(names) == sorted(map(str, pages))
    assert names[:3] == ["index", "get-started/install", "get-started/quickstart"]


@pytest.mark.parametrize("name", ["troubleshooting", "docs/operate/troubleshooting.md"])
def test_a_page_is_printed_unchanged_into_a_pipe(name, capsys):
    assert (run(["docs", name]), capsys.readouterr().out) == (0, PAGE.rstrip("\n") + "\n")


def test_one_section_is_printed(capsys):
    assert run(["docs", "troubleshooting#exit-codes"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## Exit codes\n") and out.strip() in PAGE
    assert out.count("\n## ") == 0 and "| 130 |" in out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("operate/trubleshooting", "no page 'operate/trubleshooting'; did you mean operate/troubleshooting ?"),
        ("zzz", "no page 'zzz'; ftis-node docs --list lists all"),
        (
            "troubleshooting#exit-kodes",
            "operate/troubleshooting has no section 'exit-kodes'; did you mean exit-codes ?",
        ),
        ("../../README", "no page '../../README'; ftis-node docs --list lists all"),
    ],
)
def test_an_unknown_page_is_a_one_line_error_with_a_suggestion(name, line, capsys):
    assert run(["docs", name]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"ftis-node: {line}\n" and captured.out == ""


def test_a_package_without_pages_is_a_one_line_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(documentation, "PACKAGE", tmp_path / "ftis_node")
    assert run(["docs"]) == 3
    assert capsys.readouterr().err.startswith("ftis-node: this package was built without its pages: ")
