"""The pictures of docs/assets have only words that the program has, and load nothing from a network."""

from __future__ import annotations

import ast
import html
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"
SCREENS = ("dashboard.svg", "group.svg", "status.svg", "swarm.svg")  # docs/make_pictures.py
# The demo's folders, the names of its tiny models, and its task's vocabulary.
WORDS_OF_DEMO = {"home", "demo", "tiny", "arithmetic", "ftis", "node"}
MIN_LETTERS = 4
TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")
WORD = re.compile(rf"(?<![A-Za-z0-9_])[a-z]{{{MIN_LETTERS},}}(?:_[a-z]+)*(?![A-Za-z0-9_])")


@pytest.mark.parametrize("name", SCREENS)
def test_every_word_of_a_picture_is_in_the_program(name: str) -> None:
    stale = words_of((ASSETS / name).read_text(encoding="utf-8")) - words_of_the_program() - WORDS_OF_DEMO
    assert not stale, f"{name} has words that the program no longer has; run `make pictures`: {sorted(stale)}"


def test_a_word_that_the_program_does_not_have_is_found() -> None:
    picture = '<text x="1">groups of&#160;a frobnicated_peer</text>'
    assert words_of(picture) - words_of_the_program() == {"frobnicated_peer"}


@pytest.mark.parametrize("picture", sorted(ASSETS.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_loads_nothing_from_a_network(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert not re.findall(r"(?:url\(|href=|src=)[\"']?https?:", text)


def words_of(svg: str) -> set[str]:
    """Return the lower-case words of a picture's text."""
    return {word for text in TEXT.findall(svg) for word in WORD.findall(html.unescape(text))}


@cache
def words_of_the_program() -> set[str]:
    """Return the words in the package's string constants, f-strings and TOML files."""
    return {
        word
        for file in (ROOT / "ftis_node").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in WORD.findall(node.value)
    } | {
        word for file in (ROOT / "ftis_node").rglob("*.toml") for word in WORD.findall(file.read_text(encoding="utf-8"))
    }
