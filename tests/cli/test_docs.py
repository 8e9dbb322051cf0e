"""`ftis-node docs` finds, prints and opens the pages of a checkout and of an installed package."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftis_node import documentation
from ftis_node.cli.app import run
from ftis_node.cli.commands import docs
from tests.documented.pages import PAGES, ROOT

PAGE = (ROOT / "docs/operate/troubleshooting.md").read_text()
PACKAGE_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def test_the_list_has_every_page_and_begins_as_the_index(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(names) == sorted(map(str, pages))
    assert names[:3] == ["index", "get-started/install", "get-started/quickstart"]


@pytest.mark.parametrize("name", ["operate/troubleshooting", "troubleshooting", "docs/operate/troubleshooting.md"])
def test_a_page_is_printed_unchanged_into_a_pipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", name]) == 0
    assert capsys.readouterr().out == PAGE.rstrip("\n") + "\n"


def test_one_section_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "troubleshooting#exit-codes"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## Exit codes\n") and out.strip() in PAGE
    assert out.count("\n## ") == 0 and "| 130 |" in out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("operate/trubleshooting", "no page 'operate/trubleshooting'; did you mean operate/troubleshooting ?"),
        ("trubleshooting", "no page 'trubleshooting'; did you mean operate/troubleshooting ?"),
        ("zzz", "no page 'zzz'; ftis-node docs --list lists all"),
        ("shooting", "no page 'shooting'; did you mean operate/troubleshooting ?"),
        (
            "troubleshooting#exit-kodes",
            "operate/troubleshooting has no section 'exit-kodes'; did you mean exit-codes ?",
        ),
        ("../../README", "no page '../../README'; ftis-node docs --list lists all"),
    ],
)
def test_an_unknown_page_is_a_one_line_error_with_a_suggestion(
    name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["docs", name]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"ftis-node: {line}\n" and captured.out == ""


def test_a_package_without_pages_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documentation, "PACKAGE", tmp_path / "ftis_node")
    assert run(["docs"]) == 3
    assert capsys.readouterr().err.startswith("ftis-node: this package was built without its pages: ")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package built as for a wheel after `make site`; the site has one page."""
    folder = tmp_path_factory.mktemp("package")
    source, page = folder / "source", folder / "source/build/site/docs/operate/troubleshooting.html"
    shutil.copytree(ROOT / "ftis_node", source / "ftis_node", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", source / "docs")
    for name in PACKAGE_FILES:
        shutil.copy(ROOT / name, source / name)
    page.parent.mkdir(parents=True)
    page.write_text("<!doctype html><title>the site's page</title>")
    (source / "build/site/index.html").write_text("<!doctype html><title>the site</title>")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder / "lib")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    assert not (folder / "lib/ftis_node/_docs/conf.py").exists()
    return folder / "lib"


def _command(package: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """Return the arguments of a process that runs the package's `docs` outside the repository, without a display."""
    hidden = {name: value for name, value in os.environ.items() if name not in docs.DISPLAYS}
    return {
        "args": [sys.executable, "-m", "ftis_node", "docs", *arguments],
        "cwd": package,
        "env": {**hidden, "PYTHONPATH": str(package), "PYTHONUNBUFFERED": "1", **variables},
    }


def _in_terminal(package: Path, *arguments: str, **variables: str) -> str:
    """Run the command in a terminal of 100 columns and return its output."""
    leader, follower = pty.openpty()
    shown = {"TERM": "xterm", "COLUMNS": "100", "PAGER": "cat", **variables}
    process = subprocess.Popen(
        **_command(package, *arguments, **shown), stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    out = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(leader, 65536):
            out += piece
    os.close(leader)
    assert process.wait(timeout=60) == 0, out.decode()
    return out.decode().replace("\r\n", "\n")


def test_an_installed_package_contains_its_pages(package: Path) -> None:
    done = subprocess.run(**_command(package, "troubleshooting"), check=True, capture_output=True, text=True)
    assert done.stdout == PAGE.rstrip("\n") + "\n"


def test_links_in_a_terminal_are_names_of_pages(package: Path) -> None:
    out = re.sub(r"\x1b\[[0-9;]*m", "", _in_terminal(package))
    assert "Install (get-started/install)" in out and "](" not in out


def test_a_browser_opens_the_page_of_the_site_only_with_a_display(package: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    assert "Exit codes" in _in_terminal(package, "troubleshooting", BROWSER=f"{browser} %s")
    assert not (tmp_path / "opened").exists()
    out = _in_terminal(package, "troubleshooting#exit-codes", BROWSER=f"{browser} %s", DISPLAY=":0")
    site = package / "ftis_node/_docs/site"
    assert out == f"{site.as_uri()}/docs/operate/troubleshooting.html#exit-codes\n"
    assert (tmp_path / "opened").read_text() == out


def test_a_site_older_than_the_pages_is_not_packaged(package: Path) -> None:
    source = package.parent / "source"
    os.utime(source / "build/site/index.html", (0, 0))
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(package.parent / "other")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    assert (package.parent / "other/ftis_node/_docs/index.md").is_file()
    assert not (package.parent / "other/ftis_node/_docs/site").exists()
