"""Finds the one peer that a user's text names: a full id, the beginning or end of an id, or the peer's name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
MIN_PART = 4
MAX_SHOWN = 3


def find_peer(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the one peer in `rows` (`peer_id`, `name`) that `text` matches; a full id need not be in `rows`.

    Raises UsageError if no peer or more than one matches. A peer may choose any name, so a name that two peers
    have selects neither.
    """
    if PEER_ID.fullmatch(text):
        return text
    by_name = [row["peer_id"] for row in rows if text and row.get("name") == text]
    by_id = [row["peer_id"] for row in rows if len(text) >= MIN_PART and _is_end_of(text, row["peer_id"])]
    found = sorted({*by_name, *by_id})
    if len(found) == 1:
        return str(found[0])
    if found:
        shown = ", ".join(found[:MAX_SHOWN])
        raise UsageError(f"{text!r} fits {len(found)} peers ({shown}): give more of the id")
    raise UsageError(f"no peer {text!r}: give an id, {MIN_PART} or more characters of its start or end, or a name")


def _is_end_of(text: str, peer_id: str) -> bool:
    return peer_id.startswith(text) or peer_id.endswith(text)
