"""Read the rows of text and their styles from an SVG screenshot of the terminal."""

from __future__ import annotations

import html
import re
from collections import defaultdict

STYLE = re.compile(r"\.\S+-(r\d+) \{([^}]*)\}")
PIECE = re.compile(r'<text class="\S+-(r\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')


def rows_of(svg: str) -> list[str]:
    """Return one string per row: its pieces from left to right, each after its color and weight in braces."""
    styles = {name: re.sub(r"\s", "", style) for name, style in STYLE.findall(svg)}
    rows: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for name, left, top, text in PIECE.findall(svg):
        content = html.unescape(text).replace("\xa0", " ")
        rows[float(top)].append((float(left), f"{{{styles.get(name, '')}}}{content}"))
    return ["".join(piece for _, piece in sorted(rows[top])) for top in sorted(rows)]


def text_of_rows(svg: str) -> str:
    """Return the rows without styles, as lines."""
    return "\n".join(re.sub(r"\{[^}]*\}", "", row) for row in rows_of(svg))
