"""Rows of `peers --json`: the one peer that a user's text names, and the names to show.

A user names a peer by its full id, by the beginning or end of its id, or by its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.records.names import folded_name
from ftis_node.telemetry.terminal_text import clipped

PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
MIN_PART = 4
MAX_SHOWN = 3
ID_TAIL = 4  # characters of the id after a name that is not unique


def find_peer(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the one peer in `rows` (`peer_id`, `name`) that `text` matches; a full id need not be in `rows`.

    Raises UsageError if no peer or more than one matches. A peer may choose any name, so one that looks like
    those of two peers selects neither.
    """
    if PEER_ID.fullmatch(text):
        return text
    name = folded_name(text)
    by_name = [row["peer_id"] for row in rows if name and folded_name(str(row.get("name") or "")) == name]
    ids = [row["peer_id"] for row in rows if len(text) >= MIN_PART]
    found = sorted({*by_name, *(one for one in ids if one.startswith(text) or one.endswith(text))})
    if len(found) == 1:
        return str(found[0])
    if found:
        shown = ", ".join(found[:MAX_SHOWN])
        raise UsageError(f"{text!r} fits {len(found)} peers ({shown}): give more of the id")
    raise UsageError(f"no peer {text!r}: give an id, {MIN_PART} or more characters of its start or end, or a name")


def shown_names(names: Mapping[str, str], *, width: int) -> dict[str, str]:
    """Return a name of at most `width` cells for each peer id, with the end of the id if another name looks alike.

    `names` includes this node's own, because an unknown peer may take it. A peer without a name has "".
    """
    counts = Counter(folded_name(name) for name in names.values())
    return {
        peer_id: f"{clipped(name, width - ID_TAIL - 1)} {peer_id[-ID_TAIL:]}"
        if name and counts[folded_name(name)] > 1
        else clipped(name, width)
        for peer_id, name in names.items()
    }
