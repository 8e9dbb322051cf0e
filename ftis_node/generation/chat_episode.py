"""Episodes in a conversation: the environment of a run's task answers what a model writes.

A question is looked up among the task's problems. An environment without a state, such as a calculator, plays any other
question, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ftis_node.config.episode import EpisodeSection
from ftis_node.tasks import held_out_spec, load_task
from ftis_node.tasks.base import TaskItem, leaves
from ftis_node.tasks.episodes.episode import EpisodeTask
from ftis_node.tasks.scorer import play_here

NUM_SEARCHED: Final = 1000  # problems of a split


@dataclass(slots=True)
class ChatPlay:
    """An episode under way, with the texts so far. `limits` are those of the run."""

    task: EpisodeTask
    item: TaskItem
    limits: EpisodeSection
    texts: list[str] = field(default_factory=list)

    def observation(self, text: str) -> str | None:
        """Return what the environment answers to the next text; None if the episode ends with it, or fails."""
        self.texts.append(text)
        play = play_here(self.task, self.item, self.texts) if len(self.texts) < self.limits.max_turns else None
        return None if play is None or play.is_over else play.observations[-1]


@dataclass(frozen=True, slots=True)
class ChatEpisode:
    """The environments of a run: the held-out problems, then the others. `limits` are those of the run."""

    tasks: tuple[EpisodeTask, ...]
    limits: EpisodeSection

    def begin(self, question: str) -> ChatPlay | None:
        """Return the episode of a question; None if an environment with a state does not have the problem."""
        for task in self.tasks:
            for item in map(task.__getitem__, range(min(NUM_SEARCHED, len(task)))):
                if item.prompt[-1]["content"] == question:
                    return ChatPlay(task, item, self.limits)
        free = next((task for task in self.tasks if not task.has_state(task[0])), None)
        return None if free is None else ChatPlay(free, free[0], self.limits)


def chat_episode(spec: str, limits: EpisodeSection) -> ChatEpisode:
    """Return the environments of a task SPEC whose completions have several turns. Raises TaskError."""
    held_out = held_out_spec(spec)
    splits = [*([load_task(held_out, "test")] if held_out else []), load_task(spec)]
    tasks = [leaf for split in splits for leaf in leaves(split)]
    return ChatEpisode(tuple(task for task in tasks if isinstance(task, EpisodeTask)), limits)
