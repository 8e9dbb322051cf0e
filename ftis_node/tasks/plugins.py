"""Adapters of the tasks and rewards of other packages (`ftis_node/plugins.py` finds them).

A plug-in's results are validated, and it always runs in the scoring process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from ftis_node.errors import MachineError, TaskError
from ftis_node.plugins import (
    EPISODE_GROUP,
    REWARD_GROUP,
    TASK_GROUP,
    Plugin,
    call_plugin,
    describe,
    find_entry,
    find_plugins,
    load_function,
)
from ftis_node.records.group import PromptRef
from ftis_node.tasks.answers import answer_in, plain_text
from ftis_node.tasks.base import Task, TaskItem, grader_releases
from ftis_node.tasks.episodes.episode import Episode, EpisodeTask, Play, is_episode, plugin_code

Reward = Callable[[TaskItem, str], float]
_call = partial(call_plugin, error=TaskError)

log = logging.getLogger(__name__)


def load_task_plugin(name: str, split: str) -> Task | None:
    """Return the task or episode of the plug-in `name`; None if no package has one.

    Raises TaskError for a faulty one.
    """
    entry = find_entry(TASK_GROUP, name, error=TaskError) or find_entry(EPISODE_GROUP, name, error=TaskError)
    if entry is None:
        return None
    plugin = describe(entry)
    is_of_episodes = entry.group == EPISODE_GROUP
    task = _call(plugin, lambda: entry.load()(split))
    if not isinstance(task, Episode if is_of_episodes else Task):
        wanted = "an Episode" if is_of_episodes else "a Task"
        raise TaskError(f"{plugin} gave a {type(task).__name__}, which is not {wanted}")
    if task.name != name:
        raise TaskError(f"{plugin} has another name, {task.name!r}: peers could not reproduce its prompts")
    if task.split != split:
        raise TaskError(f"{plugin} gave the split {task.split!r} instead of {split!r}")
    made = EpisodeTask(task, code=plugin_code(entry)) if isinstance(task, Episode) else task
    checked = PluginEpisode(made, plugin) if isinstance(made, EpisodeTask) else PluginTask(made, plugin)
    if not len(checked):
        raise TaskError(f"{plugin} has no problem in its split {split!r}")
    first = checked[0]
    if _call(plugin, lambda: task.resolve(first.ref)) != first:
        raise TaskError(f"{plugin} is not deterministic: {first.ref} gives another problem the second time")
    return checked


def load_reward(name: str) -> tuple[Plugin, Reward]:
    """Return the reward of the plug-in `name`. Raises TaskError if it is missing or faulty."""
    plugin, reward = load_function(REWARD_GROUP, name, error=TaskError)
    if plugin is None or reward is None:
        known = ", ".join(plugin.name for plugin in find_plugins(REWARD_GROUP)) or "none: no installed package has one"
        raise TaskError(f"unknown reward {name!r}: known are {known}")
    return plugin, reward


class PluginTask:
    """Adapter of a plug-in's task. It validates results, names the package in errors, and isolates scoring."""

    isolate_scoring: ClassVar[bool] = True

    def __init__(self, task: Task, plugin: Plugin) -> None:
        self.name = task.name
        self.split = task.split
        self._task = task
        self._plugin = plugin

    def __len__(self) -> int:
        return int(_call(self._plugin, lambda: len(self._task)))

    def __getitem__(self, index: int) -> TaskItem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}/{self.split} has no problem {index}")
        item: TaskItem = _call(self._plugin, lambda: self._task[index])
        if not isinstance(item, TaskItem) or (item.ref.task, item.ref.split) != (self.name, self.split):
            raise TaskError(f"{self._plugin} gave no valid TaskItem as problem {index}")
        return item

    def resolve(self, ref: PromptRef) -> TaskItem:
        """Return the problem that a peer's reference names.

        An exception of the plug-in counts as an unknown problem.
        """
        if (ref.task, ref.split) != (self.name, self.split):
            raise KeyError(str(ref))
        try:
            return self._task.resolve(ref)
        except (KeyError, IndexError):
            raise KeyError(str(ref)) from None
        except Exception as error:  # a peer chose the reference, so an error must not end the node
            log.warning("%s failed to resolve %s: %r", self._plugin, ref, error)
            raise KeyError(str(ref)) from error

    def score(self, item: TaskItem, completion_text: str) -> float:
        return float(_call(self._plugin, lambda: self._task.score(item, completion_text)))

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the answer by the task's own `answer_of` if it has one, else the text (see `answers.py`)."""
        answer: str | None = _call(self._plugin, lambda: answer_in(self._task, item, completion_text))
        return answer

    @property
    def grader(self) -> str:
        """Return the release of the package, and those that the task names itself."""
        return f"{self._plugin.release}, {_call(self._plugin, lambda: grader_releases(self._task))}"

    def check_grader(self) -> None:
        """Raise MachineError if the task's own check fails."""
        if check := getattr(self._task, "check_grader", None):
            call_plugin(self._plugin, check, error=MachineError)


class PluginEpisode(PluginTask):
    """Adapter of a plug-in's episode, whose completions are played."""

    _task: EpisodeTask

    def play(self, item: TaskItem, texts: Sequence[str]) -> Play:
        """Return the replay of `texts`. Raises TaskError for any fault of the plug-in."""
        played: Play = _call(self._plugin, lambda: self._task.play(item, texts))
        return played

    @property
    def grader(self) -> str:
        """Return the release of the package and a digest of the episode's code, which decide observations."""
        return f"{self._plugin.release}, {_call(self._plugin, lambda: self._task.grader)}"


class RewardedTask:
    """Problems of `task` with another reward, named `TASK@REWARD` among peers."""

    isolate_scoring: ClassVar[bool] = True

    def __init__(self, task: Task, reward_name: str) -> None:
        """Load the reward. Raises TaskError if it is unknown or faulty."""
        self._plugin, self._reward = load_reward(reward_name)
        if is_episode(task):
            raise TaskError(f"{task.name} has several turns, which only its own reward judges: remove @{reward_name}")
        self._task = task
        self.name = f"{task.name}@{reward_name}"
        self.split = task.split

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> TaskItem:
        return self._renamed(self._task[index])

    def resolve(self, ref: PromptRef) -> TaskItem:
        if ref.task != self.name:
            raise KeyError(str(ref))
        return self._renamed(self._task.resolve(replace(ref, task=self._task.name)))

    def score(self, item: TaskItem, completion_text: str) -> float:
        return float(_call(self._plugin, lambda: self._reward(item, completion_text)))

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the answer to the task's problem, else the text, because this reward may accept it."""
        problem = replace(item, ref=replace(item.ref, task=self._task.name))
        return answer_in(self._task, problem, completion_text) or plain_text(completion_text)

    @property
    def grader(self) -> str:
        return f"{self._plugin.release}, {grader_releases(self._task)}"

    def _renamed(self, item: TaskItem) -> TaskItem:
        return replace(item, ref=replace(item.ref, task=self.name))
