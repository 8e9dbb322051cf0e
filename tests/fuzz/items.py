"""A case of a chain: items one after the other, each a tag and bytes. The chain says what a tag means."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ITEMS = 24
HEAD_BYTES = 3


class Item(NamedTuple):
    """`tag` is a byte: who says it, and as what."""

    tag: int
    data: bytes


def split(case: bytes) -> list[Item]:
    """The items of any bytes: one that is cut short ends where the bytes end."""
    items: list[Item] = []
    at = 0
    while at + HEAD_BYTES <= len(case) and len(items) < MAX_ITEMS:
        size = int.from_bytes(case[at + 1 : at + HEAD_BYTES], "little")
        items.append(Item(case[at], case[at + HEAD_BYTES : at + HEAD_BYTES + size]))
        at += HEAD_BYTES + size
    return items


def join(items: Iterable[Item]) -> bytes:
    """The bytes of items, each of at most 65,535 bytes."""
    return b"".join(bytes([item.tag]) + len(item.data).to_bytes(2, "little") + item.data for item in items)
