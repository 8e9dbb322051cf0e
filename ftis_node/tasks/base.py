"""Protocol of a task: prompts that every node can reproduce, and rewards that every node can verify.

One file holds a task's prompt, answer extraction and reward. A task is deterministic: the same `PromptRef` gives the
same messages on every machine. A node verifies a peer's rewards by reproducing the prompt and scoring the completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    from ftis_node.records.group import PromptRef


class ChatMessage(TypedDict):
    """One chat message, as chat templates expect it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem: `prompt` holds its chat messages, `answer` the reference answer as text ("" if it has none)."""

    ref: PromptRef
    prompt: tuple[ChatMessage, ...]
    answer: str


@runtime_checkable
class Task(Protocol):
    """A set of problems with verifiable rewards: `len(task)` problems, `task[i]` the i-th.

    Optional members: `isolate_resolving` is True if making a problem may be slow. Then the scoring process makes a
    problem whose index a peer chose. `answer_of(item, completion_text) -> str | None` returns the answer for votes
    (`answers.py`).

    A task is immutable. A task with `isolate_scoring` is pickled and sent to the scoring process, so it creates
    unpicklable members on first use.
    """

    @property
    def name(self) -> str:
        """Return the canonical spec without paths. Tasks with equal names have equal prompts on all nodes."""
        ...

    @property
    def split(self) -> str:
        """Return `train` or `test`."""
        ...

    @property
    def isolate_scoring(self) -> bool:
        """Return whether `score` passes untrusted text to a large third-party parser.

        If so, callers run it in a separate process under a time limit (`scorer.IsolatedScorer`).
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TaskItem:
        """Return the problem at `index`, 0 <= index < len(self). Raises IndexError outside."""
        ...

    def resolve(self, ref: PromptRef) -> TaskItem:
        """Return the problem that `ref` names. Raises KeyError if the task does not have it."""
        ...

    def score(self, item: TaskItem, completion_text: str) -> float:
        """Return the reward in [0, 1] of a completion's text without special tokens. Never raises."""
        ...
