"""Rows on their way into a data set for others: counted, and without the senders' ids and names unless asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    Row = dict[str, Any]

OWN_SENDER = "own"


@dataclass(slots=True)
class RowTotals:
    """Totals of the group rows that passed through `counted`.

    Without `with_senders` a row's `sender` becomes `own`, `peer-1`, `peer-2` and so on, by first appearance.
    """

    with_senders: bool
    own_groups: int = 0
    foreign_groups: int = 0
    own_tokens: int = 0
    foreign_tokens: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        """Number of groups, own and foreign."""
        return self.own_groups + self.foreign_groups

    @property
    def num_peers(self) -> int:
        """Number of peers that sent rows."""
        return len(self._numbers)

    def counted(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the group rows, and count them."""
        for row in rows:
            if row["own"]:
                self.own_groups += 1
                self.own_tokens += row["num_tokens"]
            else:
                self.foreign_groups += 1
                self.foreign_tokens += row["num_tokens"]
                self._numbers.setdefault(row["sender"], len(self._numbers) + 1)
            yield row if self.with_senders else self._without_sender(row)

    def _without_sender(self, row: Row) -> Row:
        sender = OWN_SENDER if row["own"] else f"peer-{self._numbers[row['sender']]}"
        return row | {"sender": sender} | ({"sender_name": None} if "sender_name" in row else {})
