r"""Rewards of a data set, each in [0, 1], and their weighted mean.

With the weights math:5,format:1:

    "<think> 48 + 24 </think> <answer> 72 </answer>"     right: 1
    "<think> 48 + 24 </think> <answer> 71 </answer>"     the format alone: 1/6
    "The answer is 72."                                  neither: 0

The mean stays in [0, 1], and is exactly 1 if every reward is 1: only then pass@1 counts a completion as right.

Regular expressions run in RE2 (through pyarrow). Its time is linear in the text, so no completion can make it
backtrack, and it gives the same result on every machine. It has no look-around and no backreferences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ftis_node.errors import TaskError
from ftis_node.plugins import call_plugin
from ftis_node.tasks.dataset.query import BUILT_IN_REWARDS
from ftis_node.tasks.math.equivalence import answers_agree
from ftis_node.tasks.math.think_answer import final_answer
from ftis_node.tasks.plugins import load_reward

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.tasks.base import TaskItem
    from ftis_node.tasks.dataset.query import DatasetQuery


class Scored(NamedTuple):
    """What a reward reads: the problem, the completion, and its answer; None if its format is broken."""

    item: TaskItem
    text: str
    answer: str | None


class WeightedRewards:
    """Weighted mean of the rewards of a query."""

    def __init__(self, query: DatasetQuery) -> None:
        """Raises TaskError for an unknown or faulty plug-in, and for an invalid pattern."""
        self._style = query.style
        self._rewards = [(_reward(name, query), weight) for name, weight in query.reward]
        self._total = sum(weight for _, weight in query.reward)

    def answer_in(self, completion_text: str) -> str | None:
        """Return the answer of a completion; None if it has none."""
        answer = final_answer(completion_text) if self._style == "think" else completion_text.strip()
        return answer or None

    def score(self, item: TaskItem, completion_text: str) -> float:
        """Return the weighted mean. Raises TaskError if a plug-in fails."""
        scored = Scored(item, completion_text, self.answer_in(completion_text))
        return sum(weight * reward(scored) for reward, weight in self._rewards) / self._total


def needs_isolation(query: DatasetQuery) -> bool:
    """Return whether a reward gives untrusted text to a parser or to third-party code."""
    return any(name not in ("exact", "format") for name, _ in query.reward)


def _reward(name: str, query: DatasetQuery) -> Callable[[Scored], float]:
    if name == "regex":
        return RegexReward(query.pattern)
    return _BUILT_IN[name] if name in _BUILT_IN else PluginReward(name)


def _exact(scored: Scored) -> float:
    """Return 1 if the answer equals the reference but for white space."""
    return float(scored.answer is not None and scored.answer.split() == scored.item.answer.split())


def _format(scored: Scored) -> float:
    """Return 1 if the completion is one think block and one answer block that is not empty."""
    return float(scored.answer is not None)


def _math(scored: Scored) -> float:
    """Return 1 if the answer equals the reference as mathematics."""
    return float(scored.answer is not None and answers_agree(scored.item.answer, scored.answer))


class RegexReward:
    """Reward 1 for a completion in which RE2 finds the pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        try:
            self._finds("")
        except Exception as error:
            reason = " ".join(str(error).split())
            raise TaskError(f"pattern={pattern} cannot be used: {reason} (the syntax is that of RE2)") from None

    def __call__(self, scored: Scored) -> float:
        return float(self._finds(scored.text.encode(errors="replace").decode()))

    def _finds(self, text: str) -> bool:
        import pyarrow
        from pyarrow.compute import match_substring_regex

        pool = pyarrow.system_memory_pool()  # the default pool reserves 1 GiB of addresses, all that a scorer has
        found = match_substring_regex(pyarrow.scalar(text, memory_pool=pool), self._pattern, memory_pool=pool)
        return bool(found.as_py())


class PluginReward:
    """Reward of an installed package."""

    def __init__(self, name: str) -> None:
        self._plugin, self._reward = load_reward(name)

    def __call__(self, scored: Scored) -> float:
        result: Any = call_plugin(self._plugin, lambda: self._reward(scored.item, scored.text), error=TaskError)
        reward = float(result)
        if not 0.0 <= reward <= 1.0:
            raise TaskError(f"{self._plugin} gave the reward {reward}, which is not in [0, 1]")
        return reward


_BUILT_IN: dict[str, Callable[[Scored], float]] = {"exact": _exact, "format": _format, "math": _math}
assert {*_BUILT_IN, "regex"} == set(BUILT_IN_REWARDS)
