"""The source of a generation worker's weights: the learner's memory, as long as that works, or its files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError, SharingError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ftis_node.workers.weights.store import PublishedWeights

logger = logging.getLogger(__name__)

DIED_OVER_THEM = "the generation worker died twice over weights in the learner's memory"
MAX_DEATHS = 2  # a single death may have another cause
NO_FILES = "nobody here writes them to a file"


class WeightSource:
    """The record of how weights were passed; it has the learner write files if they cannot be shared.

    `how` describes the way in words. A worker that ends between `begin` and `end` may have died over shared memory. It
    takes a file next, and after the second such death always.
    """

    def __init__(
        self,
        write_weights: Callable[[str], Awaitable[PublishedWeights | None]] | None,
        on_fall_back: Callable[[str], None] | None,
    ) -> None:
        self.how = ""
        self._write_weights = write_weights
        self._on_fall_back = on_fall_back
        self._is_under_way = False
        self._num_deaths = 0
        self._last_reason = ""

    def begin(self, weights: PublishedWeights) -> str | None:
        """Note a load that begins. Returns the reason for `write` if the weights must come from a file, else None."""
        if weights.shared is None:
            return None
        if self._is_under_way:
            self._num_deaths += 1
            return DIED_OVER_THEM if self._num_deaths >= MAX_DEATHS else ""
        self._is_under_way = True
        return None

    def abandon(self) -> None:
        """Note that the weights were refused because they do not fit: that is no death."""
        self._is_under_way = False

    def end(self, weights: PublishedWeights) -> None:
        """Note that the weights were loaded, whatever their proof shows."""
        self._is_under_way = False
        self.how = weights.how()
        self._report(weights.fell_back)

    async def write(self, reason: str) -> PublishedWeights | None:
        """Return the learner's present weights in a file; None if it has only the model's own.

        With a `reason` all later versions come in files, too. Raises SharingError if there will be none.
        """
        self._is_under_way = False
        self._report(reason)
        if self._write_weights is None:
            raise SharingError(f"weights in the learner's memory are not served: {reason or NO_FILES}")
        try:
            return await self._write_weights(reason)
        except FtisError as error:
            raise SharingError(f"the learner writes no weights: {error}") from error

    def _report(self, reason: str) -> None:
        """Report each reason in one line, once."""
        if not reason or reason == self._last_reason:
            return
        self._last_reason = reason
        logger.warning("weights do not cross as planned: %s", reason)
        if self._on_fall_back is not None:
            self._on_fall_back(reason)
