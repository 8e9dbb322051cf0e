"""Mixture of tasks: the parts take turns in a fixed pattern, in proportion to their weights.

The pattern is a smooth weighted round-robin: weights 3 and 1 give A A B A, not A A A B. An index names a turn, so part
and problem are equal on every node. References name the part and not the mixture: a peer with another mixture of the
same parts can reproduce the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ftis_node.records.group import PromptRef
    from ftis_node.tasks.base import Task, TaskItem


class _Turn(NamedTuple):
    """One place in the pattern: the part, and the number of its earlier turns in the same round."""

    part: int
    rank: int


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
        part = self.parts[turn.part]
        return part[(num_rounds * self._weights[turn.part] + turn.rank) % len(part)]

    def resolve(self, ref: PromptRef) -> TaskItem:
        return self._by_name[ref.task].resolve(ref)

    def score(self, item: TaskItem, completion_text: str) -> float:
        return self._by_name[item.ref.task].score(item, completion_text)


def leaves(task: Task) -> tuple[Task, ...]:
    """Return the tasks that `item.ref.task` can name: a mixture's parts, or the task itself."""
    return task.parts if isinstance(task, MixedTask) else (task,)


def _smooth_round(weights: tuple[int, ...]) -> Iterator[_Turn]:
    """Yield one round. Each turn, every part gains its weight; the part with most credit is next and pays the total."""
    balance = [0] * len(weights)
    taken = [0] * len(weights)
    for _ in range(sum(weights)):
        balance = [amount + weight for amount, weight in zip(balance, weights, strict=True)]
        part = balance.index(max(balance))
        balance[part] -= sum(weights)
        yield _Turn(part, taken[part])
        taken[part] += 1
