"""What the rules at the door know: facts handed in, so that every rule is a pure function of envelope and facts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.config.manifest import RunManifest
    from ftis_node.models import PromptTokenizer
    from ftis_node.records.group import CompletionStatus, Group, PromptRef
    from ftis_node.tasks.base import TaskItem


class Scorer(Protocol):
    """Scores completion texts of one problem; one that fails or takes too long is UNSCORED with reward 0."""

    async def score(self, item: TaskItem, texts: Sequence[str]) -> list[tuple[float, CompletionStatus]]:
        """One reward and status a text, in order."""
        ...


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """This node's own bounds; what the whole run agreed on stands in its manifest."""

    max_skew_s: float = 60.0
    min_mean_logprob: float = -14.0


@dataclass(frozen=True, slots=True)
class DoorContext:
    """All that the door may ask about the world."""

    manifest: RunManifest
    tokenizer: PromptTokenizer
    resolve: Callable[[PromptRef], TaskItem]
    """The problem a reference names; raises KeyError where there is none."""
    scorer: Scorer
    is_known: Callable[[bytes], bool]
    """Whether a group id was admitted before."""
    has_number: Callable[[str, int], bool]
    """Whether a group with this sender and running number was admitted before."""
    is_banned: Callable[[str], bool] = lambda peer_id: False
    """Whether groups of this sender are refused now, whatever is in them."""
    within_quota: Callable[[str], bool] = lambda peer_id: True
    """Whether this sender has any of its allowance left; asking spends nothing."""
    copy_of: Callable[[Group], str | None] = lambda group: None
    """The name of the refusal where completions were here before: `copy` or `copy_ours`."""
    now: Callable[[], float] = time.time
    """Unix time in seconds."""
    limits: DoorLimits = DoorLimits()
    run_id: str = field(init=False)
    """The manifest's, at hand: to look it up takes a comparison of all its settings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", self.manifest.run_id)
