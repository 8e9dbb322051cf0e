"""Tasks and rewards of other packages, found by their entry points.

| entry-point group | names | its object is called with | and gives |
|---|---|---|---|
| `ftis_node.tasks` | the SPEC `NAME` | the split | a `Task` whose name is NAME |
| `ftis_node.rewards` | the SPEC `TASK@NAME` | a `TaskItem` and the text of a completion | its reward in [0, 1] |

A plug-in is somebody else's code. Finding one imports nothing of it, so a broken one disturbs nobody who does not name
it. Whatever it raises becomes one line that names its package; what it makes is checked; and it is always scored in the
scoring process, whatever it says of itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ftis_node.errors import FtisError, TaskError
from ftis_node.tasks.answers import answer_in, plain_text
from ftis_node.tasks.base import Task, TaskItem

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    from ftis_node.records.group import PromptRef

    Reward = Callable[[TaskItem, str], float]

log = logging.getLogger(__name__)

TASK_GROUP: Final = "ftis_node.tasks"
REWARD_GROUP: Final = "ftis_node.rewards"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in as its package declares it; nothing of it is imported yet. `target` is MODULE:OBJECT."""

    kind: str
    name: str
    package: str
    version: str
    target: str

    def __str__(self) -> str:
        return f"the plug-in {self.kind} {self.name!r} of {self.package} {self.version}"


def find_plugins(group: str) -> list[Plugin]:
    """All plug-ins of a group, sorted by name and package."""
    return sorted((_describe(entry) for entry in entry_points(group=group)), key=lambda one: (one.name, one.package))


def load_task_plugin(name: str, split: str) -> Task | None:
    """The task of the plug-in `name`, None where no package has one. Raises TaskError for one that is no good."""
    entry = _entry(TASK_GROUP, name)
    if entry is None:
        return None
    plugin = _describe(entry)
    task = _call(plugin, lambda: entry.load()(split))
    if not isinstance(task, Task):
        raise TaskError(f"{plugin} gave a {type(task).__name__}, which is no Task")
    if task.name != name:
        raise TaskError(f"{plugin} calls itself {task.name!r}: its prompts could not be found again")
    if task.split != split:
        raise TaskError(f"{plugin} gave its split {task.split!r} where {split!r} was asked for")
    return PluginTask(task, plugin).checked()


def load_reward(name: str) -> tuple[Plugin, Reward]:
    """The reward of the plug-in `name`. Raises TaskError where no package has one, or it is no good."""
    entry = _entry(REWARD_GROUP, name)
    if entry is None:
        known = ", ".join(plugin.name for plugin in find_plugins(REWARD_GROUP)) or "none: no installed package has one"
        raise TaskError(f"unknown reward {name!r}: known are {known}")
    plugin = _describe(entry)
    reward = _call(plugin, entry.load)
    if not callable(reward):
        raise TaskError(f"{plugin} is a {type(reward).__name__}, which cannot be called")
    return plugin, reward


class PluginTask:
    """A plug-in's task, held to its promises: errors name the package, and scoring is isolated."""

    isolate_scoring: ClassVar[bool] = True

    def __init__(self, task: Task, plugin: Plugin) -> None:
        self.name = task.name
        self.split = task.split
        self._task = task
        self._plugin = plugin

    def checked(self) -> PluginTask:
        """Itself, after a look at its first problem. Raises TaskError where that could not be made again."""
        if not len(self):
            raise TaskError(f"{self._plugin} has no problem in its split {self.split!r}")
        first = self[0]
        if _call(self._plugin, lambda: self._task.resolve(first.ref)) != first:
            raise TaskError(f"{self._plugin} makes another problem of {first.ref} when it is asked for it again")
        return self

    def __len__(self) -> int:
        return int(_call(self._plugin, lambda: len(self._task)))

    def __getitem__(self, index: int) -> TaskItem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}/{self.split} has no problem {index}")
        item: TaskItem = _call(self._plugin, lambda: self._task[index])
        if not isinstance(item, TaskItem) or (item.ref.task, item.ref.split) != (self.name, self.split):
            raise TaskError(f"{self._plugin} gave no TaskItem of its own as problem {index}")
        return item

    def resolve(self, ref: PromptRef) -> TaskItem:
        """The problem that a peer's reference names. A plug-in that fails over it has no such problem."""
        if (ref.task, ref.split) != (self.name, self.split):
            raise KeyError(str(ref))
        try:
            return self._task.resolve(ref)
        except (KeyError, IndexError):
            raise KeyError(str(ref)) from None
        except Exception as error:  # a stranger chose the reference: it must not end the node
            log.warning("%s failed to resolve %s: %r", self._plugin, ref, error)
            raise KeyError(str(ref)) from error

    def score(self, item: TaskItem, completion_text: str) -> float:
        return float(_call(self._plugin, lambda: self._task.score(item, completion_text)))

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """The task's own answer where it says how to find one, else the text; see `answers.py`."""
        answer: str | None = _call(self._plugin, lambda: answer_in(self._task, item, completion_text))
        return answer


class RewardedTask:
    """The problems of `task` under another reward: `TASK@REWARD`, which is a name of its own to peers."""

    isolate_scoring: ClassVar[bool] = True

    def __init__(self, task: Task, reward_name: str) -> None:
        """Raises TaskError where there is no such reward."""
        self._plugin, self._reward = load_reward(reward_name)
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
        """The answer to the task's problem; where there is none the text, which this reward may like all the same."""
        problem = replace(item, ref=replace(item.ref, task=self._task.name))
        return answer_in(self._task, problem, completion_text) or plain_text(completion_text)

    def _renamed(self, item: TaskItem) -> TaskItem:
        return replace(item, ref=replace(item.ref, task=self.name))


def _entry(group: str, name: str) -> EntryPoint | None:
    """The one entry point of this name. Raises TaskError where two packages have it."""
    found = list(entry_points(group=group, name=name))
    if len(found) > 1:
        packages = " and ".join(sorted(_describe(entry).package for entry in found))
        raise TaskError(f"{packages} both have a plug-in {name!r}: uninstall one of them")
    return found[0] if found else None


def _describe(entry: EntryPoint) -> Plugin:
    kind = "task" if entry.group == TASK_GROUP else "reward"
    package, version = (entry.dist.name, entry.dist.version) if entry.dist else ("an unnamed package", "?")
    return Plugin(kind=kind, name=entry.name, package=package, version=version, target=entry.value)


def _call(plugin: Plugin, work: Callable[[], Any]) -> Any:
    """What the plug-in's code gives. Raises TaskError, in one line, for whatever it raises, also SystemExit."""
    try:
        return work()
    except FtisError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TaskError(f"{plugin} failed: {reason}; tell its authors, or uninstall it") from error
