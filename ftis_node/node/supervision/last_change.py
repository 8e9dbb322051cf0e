"""Time of the last change of a count."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class LastChange:
    """Time of a count's last change in Unix seconds; None before a change. The first value is no change."""

    at: float | None = None
    _value: int | None = None

    def note(self, value: int) -> None:
        """Note the present count."""
        if self._value is not None and value != self._value:
            self.at = round(time.time(), 3)
        self._value = value
