"""Inputs of the validation rules. Because callers pass them in, each rule is a pure function."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ftis_node.config.manifest import RunManifest
    from ftis_node.models import PromptTokenizer
    from ftis_node.records.group import CompletionStatus, Group, PromptRef
    from ftis_node.tasks.base import TaskItem
    from ftis_node.tasks.scoring_worker import ScoringCost


class Scorer(Protocol):
    """Scorer of completion texts. A text whose scoring fails or takes too long is UNSCORED with reward 0."""

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None
    ) -> list[tuple[float, CompletionStatus]]:
        """Return one reward and status for each text, in order. Adds the scoring time to `cost`."""
        ...


@dataclass(frozen=True, slots=True)
class ValidationLimits:
    """Limits of this node alone. The manifest holds the limits that all nodes of the run share."""

    max_clock_skew_s: float = 60.0
    min_mean_logprob: float = -14.0


@dataclass(frozen=True, slots=True)
class ValidationContext:
    """All inputs of validation besides the envelope."""

    manifest: RunManifest
    tokenizer: PromptTokenizer
    resolve: Callable[[PromptRef, ScoringCost], Awaitable[TaskItem]]
    """Returns the problem that a reference names. Raises KeyError if there is none, TimeoutError if it is too slow."""
    scorer: Scorer
    is_known: Callable[[bytes], bool]
    """Returns true if this node has admitted a group with this id."""
    has_number: Callable[[str, int], bool]
    """Returns true if this node has admitted a group with this sender and sequence number."""
    is_banned: Callable[[str], bool] = lambda peer_id: False
    """Returns true if this node currently rejects all groups of this sender."""
    within_quota: Callable[[str], bool] = lambda peer_id: True
    """Returns true if the sender is below its rate limit. The call charges nothing."""
    may_score: Callable[[str], bool] = lambda peer_id: True
    """Returns true if the sender has scoring time left. The call charges nothing."""
    charge: Callable[[str, float], None] = lambda peer_id, seconds: None
    """Charges seconds of scoring to the sender."""
    duplicate_reason: Callable[[Group], str | None] = lambda group: None
    """Returns `duplicate_completions` or `duplicate_of_own` for a group with copied completions, else None."""
    now: Callable[[], float] = time.time
    """Unix time in seconds."""
    reset_at: float = 0.0
    """Unix time of the last buffer reset. The node does not know which earlier groups of peers it has used."""
    limits: ValidationLimits = ValidationLimits()
    own_id: str = ""
    """This node's peer id."""
    newest_offered: Callable[[], int | None] = lambda: None
    """Returns the newest version of its weights that this node has offered; None if it offers none."""
    run_id: str = field(init=False)
    """The manifest's run id, cached because each look-up in the manifest compares all its settings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", self.manifest.run_id)
