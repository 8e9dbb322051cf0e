"""Protocol of a task: prompts that every node can reproduce, and rewards that every node can verify. Mixture of tasks.

A task is deterministic: the same `PromptRef` gives the same messages on every machine. So a node verifies a peer's
rewards by reproducing the prompt and scoring the completion.

In a mixture the parts take turns in a fixed pattern, in proportion to their weights. The pattern is a smooth weighted
round-robin: weights 3 and 1 give A A B A, not A A A B. An index names a turn, so part and problem are equal on every
node. References name the part and not the mixture: a peer with another mixture of the same parts can reproduce the
prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypedDict, runtime_checkable

from ftis_node.errors import MachineError
from ftis_node.plugins import installed_release
from ftis_node.records.group import PromptRef

MAX_GRADER_BYTES: Final = 256


class ChatMessage(TypedDict):
    """One chat message, as chat templates expect it."""

    role: str
    content: str


def asked(question: str, system: str) -> tuple[ChatMessage, ...]:
    """Return the messages of a question after a system message."""
    return {"role": "system", "content": system}, {"role": "user", "content": question}


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem: `prompt` holds its chat messages, `answer` the reference answer as text ("" if it has none)."""

    ref: PromptRef
    prompt: tuple[ChatMessage, ...]
    answer: str


class Problems(Protocol):
    """The problems of one split: `len(problems)` of them, `problems[i]` the i-th."""

    @property
    def name(self) -> str:
        """Return the canonical spec without paths. Tasks with equal names have equal prompts on all nodes."""
        ...

    @property
    def split(self) -> str:
        """Return `train` or `test`."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TaskItem:
        """Return the problem at `index`, 0 <= index < len(self). Raises IndexError outside."""
        ...

    def resolve(self, ref: PromptRef) -> TaskItem:
        """Return the problem that `ref` names. Raises KeyError if the task does not have it."""
        ...


@runtime_checkable
class Task(Problems, Protocol):
    """A set of problems with verifiable rewards.

    Optional members: `isolate_resolving` is True if making a problem may be slow. Then the scoring process makes a
    problem whose index a peer chose. `answer_of(item, completion_text) -> str | None` returns the answer for votes
    (`answers.py`). `grader` names the releases that decide rewards and problem texts, such as `reasoning-gym 0.1.25`,
    joined by ", " (`grader_releases`). `check_grader()` scores a few known answers and raises MachineError if a library
    does not work here. The scoring process calls it at the start of a node (`scorer.IsolatedScorer.check`).

    A task is immutable. A task with `isolate_scoring` is pickled and sent to the scoring process, so it creates
    unpicklable members on first use.
    """

    @property
    def isolate_scoring(self) -> bool:
        """Return whether `score` passes untrusted text to a large third-party parser.

        If so, callers run it in a separate process under a time limit (`scorer.IsolatedScorer`).
        """
        ...

    def score(self, item: TaskItem, completion_text: str) -> float:
        """Return the reward in [0, 1] of a completion's text without special tokens. Never raises."""
        ...


class MixedTask:
    """Parts with whole-number weights under one name.

    Its length lets every part show all its problems. Shorter parts repeat, so the proportions hold to the end.
    """

    def __init__(self, parts: Sequence[Task], *, weights: Sequence[int], name: str) -> None:
        assert len(parts) == len(weights) and all(weight > 0 for weight in weights)
        self.parts = tuple(parts)
        self.name = name
        self.split = self.parts[0].split
        self._weights = tuple(weights)
        self._turns = tuple(_smooth_round(self._weights))
        self._by_name = {part.name: part for part in self.parts}

    @property
    def isolate_scoring(self) -> bool:
        return any(part.isolate_scoring for part in self.parts)

    def __len__(self) -> int:
        num_rounds = max(-(-len(part) // weight) for part, weight in zip(self.parts, self._weights, strict=True))
        return num_rounds * len(self._turns)

    def __getitem__(self, index: int) -> TaskItem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}/{self.split} has no problem {index}")
        num_rounds, place = divmod(index, len(self._turns))
        turn = self._turns[place]
        part, num_earlier = self.parts[turn], self._turns[:place].count(turn)
        return part[(num_rounds * self._weights[turn] + num_earlier) % len(part)]

    def resolve(self, ref: PromptRef) -> TaskItem:
        return self._by_name[ref.task].resolve(ref)

    def score(self, item: TaskItem, completion_text: str) -> float:
        return self._by_name[item.ref.task].score(item, completion_text)


def leaves(task: Task) -> tuple[Task, ...]:
    """Return the tasks that `item.ref.task` can name: a mixture's parts, or the task itself."""
    return task.parts if isinstance(task, MixedTask) else (task,)


def release_of(package: str) -> str:
    """Return the name and version of an installed package."""
    return f"{package} {installed_release(package) or '(not installed)'}"


def broken_grader(releases: str, package: str, error: Exception) -> MachineError:
    """Return the error of a task whose library does not work here."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return MachineError(f"{releases} cannot grade here ({reason}): pip install --force-reinstall {package}")


def grader_releases(task: Task) -> str:
    """Return the releases that decide rewards and problem texts, sorted and joined by ", "; "" for built-in graders.

    Nodes with other releases may give other rewards for the same text.
    """
    named = {release.strip() for leaf in leaves(task) for release in getattr(leaf, "grader", "").split(",")}
    text = ", ".join(sorted(filter(None, named)))
    return text.encode()[:MAX_GRADER_BYTES].decode(errors="ignore")


def _smooth_round(weights: tuple[int, ...]) -> Iterator[int]:
    """Yield the part of each turn in a round.

    Each turn, every part gains its weight; the part with most credit is next and pays the total.
    """
    balance = [0] * len(weights)
    for _ in range(sum(weights)):
        balance = [amount + weight for amount, weight in zip(balance, weights, strict=True)]
        part = balance.index(max(balance))
        balance[part] -= sum(weights)
        yield part
