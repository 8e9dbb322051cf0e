"""Foreign groups of a node's home for a trainer beside that node.

The node pulls, validates and stores the groups. This file only reads its buffer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, RecordError
from ftis_node.records.group import Group
from ftis_node.records.text_codec import unpack_any
from ftis_node.replay.reader import ReplayReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftis_node.replay.reader import PeerGroup

logger = logging.getLogger(__name__)
MAX_ROWS_READ: Final = 256  # rows of the buffer that one draw looks at
MAX_REMEMBERED: Final = 4096  # ids of drawn groups


@dataclass(frozen=True, slots=True)
class Fit:
    """What a trainer can train on. `tokenizer` is a fingerprint, `max_completion_length` in tokens."""

    tokenizer: str
    vocab_size: int
    group_size: int
    temperature: float
    max_completion_length: int


@dataclass(frozen=True, slots=True)
class ForeignGroup:
    """A peer's group: prompt ids int32 `[P]`, the record, and this node's rewards, one per completion."""

    prompt_ids: NDArray[np.int32]
    group: Group
    rewards: tuple[float, ...]


class ForeignSource(Protocol):
    """Interface of a source of foreign groups. It gives at most `per_batch` for a batch."""

    per_batch: int

    def draw(self, fit: Fit) -> list[ForeignGroup]:
        """Return new groups that `fit` accepts."""
        ...


class ForeignGroups:
    """Source of peers' groups in a home, each drawn once."""

    def __init__(
        self, home: str | Path, *, per_batch: int = 1, max_age_s: float = 3600.0, max_prompt_length: int = 2048
    ) -> None:
        """Draw at most `per_batch` groups for a batch, created in the last `max_age_s` seconds.

        `max_prompt_length` is in tokens. Raises ConfigError if the home has no buffer or `per_batch` is below 1.
        """
        if per_batch < 1:
            raise ConfigError(f"per_batch must be at least 1, not {per_batch}")
        self.per_batch = per_batch
        self._path = Home(Path(home).expanduser()).replay
        self._max_age_s = max_age_s
        self._max_prompt_length = max_prompt_length
        self._drawn: deque[bytes] = deque(maxlen=MAX_REMEMBERED)
        ReplayReader(self._path).close()

    def draw(self, fit: Fit) -> list[ForeignGroup]:
        """Return the newest groups that `fit` accepts and that no earlier call returned, at most `per_batch`."""
        reader = ReplayReader(self._path)
        chosen: list[ForeignGroup] = []
        try:
            for stored in islice(reader.newest_foreign(since=time.time() - self._max_age_s), MAX_ROWS_READ):
                is_new = stored.id not in self._drawn
                group = read_foreign(stored, fit, max_prompt_length=self._max_prompt_length) if is_new else None
                if group is None:
                    continue
                self._drawn.append(stored.id)
                chosen.append(group)
                if len(chosen) == self.per_batch:
                    break
        finally:
            reader.close()
        return chosen


def read_foreign(stored: PeerGroup, fit: Fit, *, max_prompt_length: int) -> ForeignGroup | None:
    """Return a stored group for the trainer; None if its body is unreadable or text, or if it does not fit."""
    try:
        group = unpack_any(stored.body)
    except RecordError as error:
        logger.warning("foreign group skipped: %s is unreadable: %s", stored.id.hex()[:12], error)
        return None
    if not isinstance(group, Group):
        return None
    foreign = ForeignGroup(np.array(stored.prompt_ids, dtype=np.int32), group, stored.rewards)
    return foreign if _is_usable(foreign, fit, max_prompt_length=max_prompt_length) else None


def _is_usable(foreign: ForeignGroup, fit: Fit, *, max_prompt_length: int) -> bool:
    """Return whether the trainer can learn from the group: one tokenizer, its sizes, and unequal rewards."""
    group, rewards, prompt = foreign.group, foreign.rewards, foreign.prompt_ids
    return (
        group.tokenizer == fit.tokenizer
        and group.sampling.temperature == fit.temperature
        and len(rewards) == len(group.tokens) == fit.group_size
        and all(map(math.isfinite, rewards))
        and min(rewards) < max(rewards)
        and 0 < len(prompt) <= max_prompt_length
        and max(map(len, group.tokens.ids_of_each())) <= fit.max_completion_length
        and all(0 <= ids.min() and ids.max() < fit.vocab_size for ids in (prompt, *group.tokens.ids_of_each()))
        and all(bool(np.isfinite(values).all()) for values in group.tokens.logprobs_of_each())
    )
