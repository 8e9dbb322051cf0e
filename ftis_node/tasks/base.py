"""What a task is: prompts that anyone can make again, and a reward that anyone can check.

A task owns its prompt, its answer extraction and its reward, all in one file. It is deterministic: the same
`PromptRef` gives the same messages on every machine, because a node checks a peer's rewards by making the prompt
again and scoring the completion itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    from ftis_node.records.group import PromptRef


class ChatMessage(TypedDict):
    """One chat message, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem: `prompt` holds its chat messages, `answer` the reference answer as text ("" where it has none)."""

    ref: PromptRef
    prompt: tuple[ChatMessage, ...]
    answer: str


@runtime_checkable
class Task(Protocol):
    """A set of problems with verifiable rewards. `len(task)` problems, `task[i]` the i-th.

    It may also have `isolate_resolving`: True where making a problem may be slow, so that one whose index a peer chose
    is made in the scoring process, too. And `answer_of(item, completion_text) -> str | None`, the answer that a
    completion votes for (`answers.py`).

    A task is never changed after it is made. One with `isolate_scoring` is pickled into the scoring process, so it
    must be picklable: whatever cannot travel is made on first use.
    """

    @property
    def name(self) -> str:
        """The canonical spec without paths: two nodes whose tasks have one name make the same prompts."""
        ...

    @property
    def split(self) -> str:
        """`train` or `test`."""
        ...

    @property
    def isolate_scoring(self) -> bool:
        """Whether `score` runs a large third-party parser over text that may be hostile.

        Callers then run it in a process of its own under a time limit (`scoring.IsolatedScorer`).
        """
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TaskItem:
        """The problem at `index`, 0 <= index < len(self). Raises IndexError outside."""
        ...

    def resolve(self, ref: PromptRef) -> TaskItem:
        """The problem that `ref` names. Raises KeyError where this task has no such problem."""
        ...

    def score(self, item: TaskItem, completion_text: str) -> float:
        """The reward in [0, 1] of a completion's text, without special tokens. Never raises on any text."""
        ...
