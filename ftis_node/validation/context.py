"""What the rules at the door know: facts handed in, so that every rule is a pure function of envelope and facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.config.manifest import RunManifest
    from ftis_node.models import PromptTokenizer
    from ftis_node.records.group import CompletionStatus, PromptRef
    from ftis_node.tasks.base import TaskItem


class Scorer(Protocol):
    """Scores completion texts of one problem; one that fails or takes too long is UNSCORED with reward 0."""

    async def score(self, item: TaskItem, texts: Sequence[str]) -> list[tuple[float, CompletionStatus]]:
        """One reward and status a text, in order."""
        ...


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
