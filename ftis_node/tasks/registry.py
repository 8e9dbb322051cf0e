"""From a spec to the task: each task's file is imported when it is asked for, so that naming one costs nothing.

A package adds tasks of its own by an entry point in the group `ftis_node.tasks`: a callable that takes the split and
returns a `Task` whose name is the entry point's. Built-in names cannot be taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ftis_node.errors import FtisError, TaskError
from ftis_node.tasks.base import Task
from ftis_node.tasks.spec import FILE_TASKS, TaskPart, TaskSpec, parse_spec

if TYPE_CHECKING:
    from collections.abc import Iterable

ENTRY_POINT_GROUP: Final = "ftis_node.tasks"
SPLITS: Final = ("train", "test")


def load_task(spec: str | TaskSpec, split: str = "train") -> Task:
    """The `split` (`train` or `test`) of the task that `spec` names (grammar: `spec.py`).

    A PATH is taken to be the split asked for; where it is a folder, its `train.jsonl` or `test.jsonl`.
    Raises TaskError for an unknown task or split and for a broken data file, NetworkError where the hub cannot be
    reached.
    """
    if split not in SPLITS:
        raise TaskError(f"there is no split {split!r}: use train or test")
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    tasks = [_load_part(part, split) for part in spec.parts]
    if len(tasks) == 1:
        return tasks[0]
    from ftis_node.tasks.mixed import MixedTask

    return MixedTask(tasks, weights=[part.weight for part in spec.parts], name=spec.canonical)


def held_out_spec(spec: str | TaskSpec) -> TaskSpec | None:
    """The parts of a training spec that also have problems which training never shows, None where no part has.

    A single file holds one split, so it has none; a folder does if `test.jsonl` lies in it. Whether a plug-in has a
    test split is its own affair: it is left out.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    parts = [str(part) for part in spec.parts if _has_test_split(part)]
    return parse_spec("+".join(parts)) if parts else None


def _load_part(part: TaskPart, split: str) -> Task:
    family, _, argument = part.name.partition(":")
    if family == "gsm8k":
        from ftis_node.tasks.gsm8k import Gsm8kTask

        return Gsm8kTask(split, path=part.path)
    if family == "math500":
        from ftis_node.tasks.math500 import Math500Task

        return Math500Task(split, path=part.path)
    if family == "arithmetic":
        from ftis_node.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(split, parts=argument or "both")
    if family == "rg" and argument:
        from ftis_node.tasks.rg import ReasoningGymTask

        return ReasoningGymTask(argument, split)
    return _load_plugin(part.name, split)


def _load_plugin(name: str, split: str) -> Task:
    from importlib.metadata import entry_points

    plugins = {plugin.name: plugin for plugin in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in plugins:
        raise TaskError(f"unknown task {name!r}: known are {', '.join(_known_names(plugins))}")
    try:
        task = plugins[name].load()(split)
    except FtisError:
        raise
    except Exception as error:  # somebody else's code: whatever it raises is for its user to read
        raise TaskError(f"the plug-in task {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise TaskError(f"the plug-in task {name!r} gave a {type(task).__name__}, which is no Task")
    if task.name != name:
        raise TaskError(f"the plug-in task {name!r} calls itself {task.name!r}: its prompts could not be found again")
    return task


def _known_names(plugins: Iterable[str]) -> list[str]:
    built_in = ["arithmetic", "arithmetic:add", "arithmetic:sub", "gsm8k", "gsm8k:PATH", "math500", "math500:PATH"]
    return [*built_in, "rg:NAME of reasoning-gym", *sorted(plugins)]


def _has_test_split(part: TaskPart) -> bool:
    family = part.name.partition(":")[0]
    if part.path:
        from ftis_node.tasks.problems import problem_file

        files = {split: problem_file(part.path, split) for split in SPLITS}
        return files["test"] != files["train"] and files["test"].is_file()
    return family in (*FILE_TASKS, "arithmetic", "rg")
