"""Facts for the validation rules, passed in, so that every rule is a pure function of envelope and facts."""

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
    from ftis_node.tasks.scoring.cost import ScoringCost


class Scorer(Protocol):
    """Scores completion texts of one problem; one that fails or takes too long is UNSCORED with reward 0."""

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None
    ) -> list[tuple[float, CompletionStatus]]:
        """One reward and status a text, in order; `cost` is added to."""
        ...


@dataclass(frozen=True, slots=True)
class ValidationLimits:
    """Bounds of this node; the bounds that the whole run shares are in its manifest."""

    max_clock_skew_s: float = 60.0
    min_mean_logprob: float = -14.0


@dataclass(frozen=True, slots=True)
class ValidationContext:
    """All facts that validation may use."""

    manifest: RunManifest
    tokenizer: PromptTokenizer
    resolve: Callable[[PromptRef, ScoringCost], Awaitable[TaskItem]]
    """The problem a reference names; KeyError where there is none, TimeoutError where it takes too long to make."""
    scorer: Scorer
    is_known: Callable[[bytes], bool]
    """Whether a group id was admitted before."""
    has_number: Callable[[str, int], bool]
    """Whether a group with this sender and running number was admitted before."""
    is_banned: Callable[[str], bool] = lambda peer_id: False
    """Whether groups of this sender are refused now, whatever is in them."""
    within_quota: Callable[[str], bool] = lambda peer_id: True
    """Whether this sender has any of its allowance left; asking spends nothing."""
    may_score: Callable[[str], bool] = lambda peer_id: True
    """Whether this sender has any scoring time left; asking spends nothing."""
    charge: Callable[[str, float], None] = lambda peer_id, seconds: None
    """Takes seconds of scoring from this sender's allowance."""
    copy_of: Callable[[Group], str | None] = lambda group: None
    """The name of the refusal where completions were here before: `copy` or `copy_ours`."""
    now: Callable[[], float] = time.time
    """Unix time in seconds."""
    reset_at: float = 0.0
    """Unix time of the last reset of the buffer: which groups peers had made until then are used is not known."""
    limits: ValidationLimits = ValidationLimits()
    own_id: str = ""
    """This node's peer id."""
    newest_offered: Callable[[], int | None] = lambda: None
    """The newest version of this node's weights that a follower may name; None where it offers none."""
    run_id: str = field(init=False)
    """The manifest's, at hand: to look it up takes a comparison of all its settings."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", self.manifest.run_id)
