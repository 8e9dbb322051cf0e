"""Bytes in and out of one host, by what they are for."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What bytes are for."""

    ANNOUNCEMENTS = 0
    BODIES = 1
    QUESTIONS = 2
    CONFIRMATIONS = 3
    DIRECTORY = 4


class ByteCounts:
    """Bytes sent and received by kind."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received = [0.0] * len(Kind)
        self.sent = [0.0] * len(Kind)

    def reset(self) -> None:
        """Counting begins now."""
        self.received = [0.0] * len(Kind)
        self.sent = [0.0] * len(Kind)
