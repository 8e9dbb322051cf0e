"""Names that peers choose: what a reader sees of them, and when two look alike."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

INVISIBLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)  # Unicode's default-ignorable characters, and a blank pattern of Braille
SEEN: Final = frozenset("LNPS")  # letters, numbers, punctuation, symbols


def visible_name(text: str) -> str:
    """Return a name without invisible characters; "" if no letter, number or symbol is left."""
    name = INVISIBLE.sub("", text)
    return name.strip() if any(unicodedata.category(mark)[0] in SEEN for mark in name) else ""


def folded_name(name: str) -> str:
    """Return the form in which names that differ only by case, width, style or spaces are equal."""
    return "".join(unicodedata.normalize("NFKC", visible_name(name)).casefold().split())
