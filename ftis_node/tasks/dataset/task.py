"""Task of a `dataset:` part: its rows as problems, its rewards by weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftis_node.errors import TaskError
from ftis_node.tasks.answers import plain_text
from ftis_node.tasks.dataset.rewards import WeightedRewards, needs_isolation
from ftis_node.tasks.dataset.row_problems import digest_of, load_problems
from ftis_node.tasks.math.equivalence import plain_answer
from ftis_node.tasks.math.think_answer import chat_prompt
from ftis_node.tasks.problem_task import ProblemTask

if TYPE_CHECKING:
    from ftis_node.tasks.base import ChatMessage, TaskItem
    from ftis_node.tasks.dataset.query import DatasetQuery
    from ftis_node.tasks.problems import Problem
    from ftis_node.tasks.spec import TaskPart


class DatasetTask(ProblemTask):
    """Problems of a data set under the rewards of its query.

    The scoring process gets one problem alone, to warm up: a score needs only its item.
    """

    def __init__(self, part: TaskPart, split: str) -> None:
        """Read the problems. Raises TaskError, also if the training problems do not have the run's digest; and
        NetworkError if the hub cannot be reached.
        """
        problems = load_problems(part, split)
        assert part.query is not None
        check_digest(part, problems, split)
        self._set_up(part.name, split, part.query, problems)

    def _set_up(self, name: str, split: str, query: DatasetQuery, problems: tuple[Problem, ...]) -> None:
        self.name = name
        self.split = split
        self.isolate_scoring = needs_isolation(query)
        self._query = query
        self._problems = problems
        self._rewards = WeightedRewards(query)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.name, self.split, self._query, self._problems[:1]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._set_up(*state)

    def prompt_of(self, problem: Problem) -> tuple[ChatMessage, ...]:
        if self._query.style == "plain":
            return ({"role": "user", "content": problem.question},)
        return chat_prompt(problem.question)

    def score(self, item: TaskItem, completion_text: str) -> float:
        return self._rewards.score(item, completion_text)

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the answer, plain numbers normalized if the reward is `math`; None if there is none."""
        answer = self._rewards.answer_in(completion_text)
        is_math = any(name == "math" for name, _ in self._query.reward)
        return plain_answer(answer) if answer and is_math else plain_text(answer or "")


def check_digest(part: TaskPart, problems: tuple[Problem, ...], split: str) -> None:
    """Raise TaskError if the training problems are not those of the run."""
    expected = part.query.sha256 if part.query else ""
    if split != "train" or not expected or (found := digest_of(problems)) == expected:
        return
    raise TaskError(
        f"{part.name}: these {len(problems):,} problems (digest {found}) are not those of the run ({expected}): "
        "get the data of the node that began the run"
    )
