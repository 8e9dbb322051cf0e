"""The source of a generation worker's weights: the learner's memory while that works, else its files."""

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
    """Chooses between shared memory and files, and requests files from the learner if sharing fails.

    `how` is the transport in words. If a worker ends between `begin` and `end`, shared memory may be the cause. The
    next load uses a file; after the second such death all loads do.
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
        """Record the start of a load. Returns None, or the reason for `write` if the weights must come from a file."""
        if weights.shared is None:
            return None
        if self._is_under_way:
            self._num_deaths += 1
            return DIED_OVER_THEM if self._num_deaths >= MAX_DEATHS else ""
        self._is_under_way = True
        return None

    def abandon(self) -> None:
        """Record that the load ended with a refusal, so that it does not count as a death."""
        self._is_under_way = False

    def end(self, weights: PublishedWeights) -> None:
        """Record that the weights were loaded, whatever the result of their proof."""
        self._is_under_way = False
        self.how = weights.how()
        self._report(weights.fell_back)

    async def write(self, reason: str) -> PublishedWeights | None:
        """Return the learner's present weights in a file; None while it has the starting model.

        With a `reason` all later versions go through files, too. Raises SharingError if none will be written.
        """
        self._is_under_way = False
        self._report(reason)
        if self._write_weights is None:
            raise SharingError(f"weights in the learner's memory are not served: {reason or NO_FILES}")
        try:
            return await self._write_weights(reason)
        except FtisError as error:
            raise SharingError(f"the learner cannot write weights: {error}") from error

    def _report(self, reason: str) -> None:
        """Report each reason in one line, once."""
        if not reason or reason == self._last_reason:
            return
        self._last_reason = reason
        logger.warning("weights do not cross as planned: %s", reason)
        if self._on_fall_back is not None:
            self._on_fall_back(reason)
