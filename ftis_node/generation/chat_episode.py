"""Episodes in a conversation: the environment of a run's task answers what a model writes.

A question is looked up among the task's problems. A built-in environment without a state, such as a calculator, plays
any other question, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ftis_node.config.episode import EpisodeSection
from ftis_node.errors import WorkerDiedError
from ftis_node.tasks import held_out_spec, load_task
from ftis_node.tasks.base import Task, TaskItem, leaves
from ftis_node.tasks.episodes.episode import EpisodeTask, Play, is_episode
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.tasks.scoring_worker import ScoringCost

log = logging.getLogger(__name__)

NUM_SEARCHED: Final = 1000  # problems of a split


@dataclass(slots=True)
class ChatPlay:
    """An episode under way, with the texts so far. `limits` are those of the run."""

    task: Task
    item: TaskItem
    limits: EpisodeSection
    texts: list[str] = field(default_factory=list)

    def observation(self, text: str) -> str | None:
        """Return what the environment answers to the next text; None if the episode ends with it, or fails."""
        self.texts.append(text)
        if len(self.texts) >= self.limits.max_turns:
            return None
        play = asyncio.run(_played(self.task, self.item, self.texts))
        return None if play is None or play.is_over else play.observations[-1]


async def _played(task: Task, item: TaskItem, texts: Sequence[str]) -> Play | None:
    """Return the replay, in a new scoring process if the task needs one; None if it fails."""
    scorer = IsolatedScorer(task)
    try:
        return await scorer.play(item, texts, cost=ScoringCost())
    except WorkerDiedError as error:
        log.warning("%s: its environment ended: %s", item.ref, error)
        return None
    finally:
        await scorer.close()


@dataclass(frozen=True, slots=True)
class ChatEpisode:
    """The environments of a run: the held-out problems, then the others. `limits` are those of the run."""

    tasks: tuple[Task, ...]
    limits: EpisodeSection

    def begin(self, question: str) -> ChatPlay | None:
        """Return the episode of a question; None if no environment has the problem, or plays any question."""
        for task in self.tasks:
            for item in map(task.__getitem__, range(min(NUM_SEARCHED, len(task)))):
                if item.prompt[-1]["content"] == question:
                    return ChatPlay(task, item, self.limits)
        built_in = (task for task in self.tasks if isinstance(task, EpisodeTask))
        free = next((task for task in built_in if not task.has_state(task[0])), None)
        return None if free is None else ChatPlay(free, free[0], self.limits)


def chat_episode(spec: str, limits: EpisodeSection) -> ChatEpisode:
    """Return the environments of a task SPEC whose completions have several turns. Raises TaskError."""
    held_out = held_out_spec(spec)
    splits = [*([load_task(held_out, "test")] if held_out else []), load_task(spec)]
    tasks = [leaf for split in splits for leaf in leaves(split)]
    return ChatEpisode(tuple(filter(is_episode, tasks)), limits)
