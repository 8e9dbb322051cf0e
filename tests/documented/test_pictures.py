"""The pictures of docs/assets have only words that the program has, and load nothing from a network."""

import html
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"
SCREENS = ("dashboard.svg", "group.svg", "status.svg", "swarm.svg")  # docs/make_pictures.py
# The demo's folders, the names of its tiny models, and its task's vocabulary.
WORDS_OF_DEMO = {"home", "demo", "tiny", "arithmetic", "ftis", "node"}
MIN_LETTERS = 4
TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")
WORD = re.compile(rf"(?<![A-Za-z0-9_])[a-z]{{{MIN_LETTERS},}}(?:_[a-z]+)*(?![A-Za-z0-9_])")


def test_every_word_of_a_picture_is_in_the_program():
    for name in SCREENS:
        stale = words_of((ASSETS / name).read_text(encoding="utf-8")) - words_of_the_program() - WORDS_OF_DEMO
        assert not stale, f"{name} has words that the program no longer has; run `make pictures`: {sorted(stale)}"
    assert words_of('<text x="1">groups of&#160;a frobnicated_peer</text>') - words_of_the_program() == {
        "frobnicated_peer"
    }


def test_no_picture_loads_anything_from_a_network():
    for picture in ASSETS.glob("*.svg"):
        assert not re.findall(r"(?:url\(|href=|src=)[\"']?https?:", picture.read_text(encoding="utf-8")), picture.name


def words_of(svg: str) -> set[str]:
    return {word for text in TEXT.findall(svg) for word in WORD.findall(html.unescape(text))}


@cache
def words_of_the_program() -> set[str]:
    files = [path for suffix in ("py", "toml") for path in (ROOT / "ftis_node").rglob(f"*.{suffix}")]
    return {word for file in files for word in WORD.findall(file.read_text(encoding="utf-8"))}
