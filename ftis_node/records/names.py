"""Names that peers choose: what a reader sees of them, and when two look alike. The names of roles and codecs."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Literal

Role = Literal["full", "generator", "learner", "exchange"]
Codec = Literal["exact", "lossless", "lossy"]

INVISIBLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)  # Unicode's default-ignorable characters, a blank pattern of Braille, and a blank note
LOOKALIKES: Final = str.maketrans(
    "АВЕЗКМНОРСТУХЅІЈԌԚԜҮӀаеорсухѕіјһԁԛԝӏгпвкмнт" + "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧαεικνορτυχγωςϳ" + "0ıł1løđ",
    "ABE3KMHOPCTYXSIJGQWYIaeopcyxsijhdqwirnbkmht" + "ABEZHIKMNOPTYXaeikvoptuxywcj" + "oiiiiod",
)  # letters of Cyrillic, Greek and Latin, and digits, that look like a letter of ASCII
SEEN: Final = frozenset("LNPS")  # letters, numbers, punctuation, symbols


def visible_name(text: str) -> str:
    """Return a name without invisible characters; "" if no letter, number or symbol is left."""
    name = INVISIBLE.sub("", text)
    return name.strip() if any(unicodedata.category(mark)[0] in SEEN for mark in name) else ""


def folded_name(name: str) -> str:
    """Return the form in which names that look alike are equal.

    They may differ by case, width, style, accents, spaces, punctuation, and by letters that look alike. A name without
    letters and digits keeps its marks.
    """
    parts = unicodedata.normalize("NFKD", visible_name(name))
    alike = parts.translate(LOOKALIKES).casefold().translate(LOOKALIKES)
    return "".join(filter(str.isalnum, alike)) or "".join(parts.split())
