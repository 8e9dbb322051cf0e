"""Task of a data set: its rows as problems, its rewards by weight. `gsm8k` and `math500` are data sets, too.

Each reward is in [0, 1]. Their weighted mean is exactly 1 if every reward is 1: only then pass@1 counts a completion as
right. The first node of a run writes the digest of its data sets into the manifest, every other node compares it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ftis_node.errors import TaskError
from ftis_node.plugins import call_plugin
from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.answers import (
    answers_agree,
    chat_prompt,
    check_math,
    final_answer,
    math_releases,
    plain_answer,
    plain_text,
)
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.dataset_query import BUILT_IN_REWARDS, DatasetQuery, finds
from ftis_node.tasks.dataset_rows import digest_of, load_problems
from ftis_node.tasks.plugins import load_reward
from ftis_node.tasks.problems import IndexedTask, Problem, Prompt
from ftis_node.tasks.spec import TaskPart, TaskSpec


class DatasetTask(IndexedTask):
    """Problems of a data set under the rewards of its query.

    The scoring process gets one problem alone, to warm up: a score needs only its item.
    """

    def __init__(self, part: TaskPart, split: str, *, problems: tuple[Problem, ...] | None = None) -> None:
        """Read the problems, unless they are given. Raises TaskError, also if the training problems do not have the
        run's digest; and NetworkError if the hub cannot be reached.
        """
        problems = problems or load_problems(part, split)
        assert part.rows is not None
        check_digest(part, problems, split)
        self._set_up(part.problems, split, part.rows, problems)

    def _set_up(self, name: str, split: str, query: DatasetQuery, problems: tuple[Problem, ...]) -> None:
        self.name = name
        self.split = split
        self._query = query
        self._problems = problems
        self._weights = dict(query.reward)
        # Other rewards give untrusted text to a parser or to third-party code.
        self.isolate_scoring = not self._weights.keys() <= {"exact", "format"}
        self._plugins = {name: load_reward(name) for name in self._weights if name not in BUILT_IN_REWARDS}

    def __getstate__(self) -> tuple[Any, ...]:
        return self.name, self.split, self._query, self._problems[:1]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._set_up(*state)

    def __len__(self) -> int:
        return len(self._problems)

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self._problems[index]
        plain: Prompt = ({"role": "user", "content": problem.question},)
        return plain if self._is_plain else chat_prompt(problem.question), problem.answer

    def score(self, item: TaskItem, completion_text: str) -> float:
        """Return the weighted mean of the rewards. Raises TaskError if a plug-in fails."""
        text = after_thinking(completion_text) if self._is_plain else completion_text
        answer = self._final_answer(completion_text)
        rewards = (weight * self._reward(name, item, text, answer) for name, weight in self._weights.items())
        return sum(rewards) / sum(self._weights.values())

    def _reward(self, name: str, item: TaskItem, text: str, answer: str | None) -> float:
        """Return one reward. `answer` is None if the format of the completion is broken."""
        match name:
            case "exact":
                return float(answer is not None and answer.split() == item.answer.split())
            case "format":
                return float(answer is not None)
            case "math":
                return float(answer is not None and answers_agree(item.answer, answer))
            case "regex":  # the process that read the rows has checked the pattern
                return float(finds(self._query.pattern, text.encode(errors="replace").decode()))
        plugin, reward_of = self._plugins[name]
        reward = float(call_plugin(plugin, lambda: reward_of(item, text), error=TaskError))
        if not 0.0 <= reward <= 1.0:
            raise TaskError(f"{plugin} gave the reward {reward}, which is not in [0, 1]")
        return reward

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the answer, plain numbers normalized if the reward is `math`; None if there is none."""
        answer = self._final_answer(completion_text)
        return plain_answer(answer) if answer and "math" in self._weights else plain_text(answer or "")

    @property
    def grader(self) -> str:
        plugins = [plugin.release for plugin, _ in self._plugins.values()]
        return ", ".join([math_releases()] * ("math" in self._weights) + plugins)

    def check_grader(self) -> None:
        """Raise MachineError if the packages of the reward `math` do not work here."""
        if "math" in self._weights:
            check_math()

    def _final_answer(self, completion_text: str) -> str | None:
        if self._is_plain:
            return after_thinking(completion_text).strip() or None
        return final_answer(completion_text) or None

    @property
    def _is_plain(self) -> bool:
        return self._query.style == "plain"


def check_digest(part: TaskPart, problems: tuple[Problem, ...], split: str) -> None:
    """Raise TaskError if the training problems are not those of the run."""
    expected = part.query.sha256 if part.query else ""
    if split != "train" or not expected or (found := digest_of(problems)) == expected:
        return
    raise TaskError(
        f"{part.name}: these {len(problems):,} problems (digest {found}) are not those of the run ({expected}): "
        "get the data of the node that began the run"
    )


def pinned(spec: TaskSpec, run: TaskSpec | None = None) -> TaskSpec:
    """Return the spec with the digest of each data set. A data set of `run` without a query takes the query of `run`.

    Raises TaskError, also if a part has the columns and rewards of `run` but other problems. Raises NetworkError if the
    hub cannot be reached.
    """
    known = {part.name: part for part in run.parts} if run else {}
    return TaskSpec(tuple(_pinned(part, known.get(part.name)) if part.is_dataset else part for part in spec.parts))


def _pinned(part: TaskPart, known: TaskPart | None) -> TaskPart:
    if part.query is None and known is not None:
        part = replace(part, query=known.query)
    if part.query is None or part.query.sha256:
        return part
    problems = load_problems(part, "train")
    run_query = known.query if known else None
    if run_query is None or run_query.without_source() != part.query.without_source():
        return replace(part, query=replace(part.query, sha256=digest_of(problems)))
    part = replace(part, query=run_query)
    check_digest(part, problems, "train")
    return part
