"""Table from a SPEC to its task. A task's file is imported on first use, so that listing names costs nothing.

A name that is not built in belongs to a plug-in (`plugins.py`). Plug-ins cannot take built-in names.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from ftis_node.errors import TaskError
from ftis_node.tasks.spec import FILE_TASKS, TaskPart, TaskSpec, parse_spec

if TYPE_CHECKING:
    from ftis_node.tasks.base import Task

BUILT_IN: Final = (
    "arithmetic",
    "arithmetic:add",
    "arithmetic:sub",
    "arithmetic:easy",
    "arithmetic:medium",
    "arithmetic:hard",
    "arithmetic:no-carry",
    "arithmetic:carry",
    "arithmetic:borrow",
    "sums",
    "sums:long",
    "gsm8k",
    "gsm8k:PATH",
    "math500",
    "math500:PATH",
    "dataset:NAME?prompt=COLUMN&answer=COLUMN",
    "rg:NAME of reasoning-gym",
)
SPLITS: Final = ("train", "test")


def load_task(spec: str | TaskSpec, split: str = "train") -> Task:
    """Return the `split` (`train` or `test`) of the task that `spec` names (grammar: `spec.py`).

    A PATH is a file with that split, or a folder with `train.jsonl` and `test.jsonl`. Raises TaskError for an unknown
    task or split and for a broken data file, NetworkError if the hub cannot be reached.
    """
    if split not in SPLITS:
        raise TaskError(f"unknown split {split!r}: use train or test")
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    tasks = [_load_part(part, split) for part in spec.parts]
    if len(tasks) == 1:
        return tasks[0]
    from ftis_node.tasks.mixed import MixedTask

    return MixedTask(tasks, weights=[part.weight for part in spec.parts], name=spec.canonical)


def held_out_spec(spec: str | TaskSpec) -> TaskSpec | None:
    """Return the parts of a training spec that have held-out problems; None if no part has.

    A single file has only one split, so it has no held-out problems; a folder has them in `test.jsonl`. Plug-ins are
    left out, because they need not have a test split.
    """
    spec = parse_spec(spec) if isinstance(spec, str) else spec
    parts = [str(part) for part in spec.parts if _has_test_split(part)]
    return parse_spec("+".join(parts)) if parts else None


def _load_part(part: TaskPart, split: str) -> Task:
    task = _load_problems(part, split)
    if part.reward is None:
        return task
    from ftis_node.tasks.plugins import RewardedTask

    return RewardedTask(task, part.reward)


def _load_problems(part: TaskPart, split: str) -> Task:
    family, _, argument = part.problems.partition(":")
    if part.is_dataset:
        from ftis_node.tasks.dataset.task import DatasetTask

        return DatasetTask(part, split)
    if family == "gsm8k":
        from ftis_node.tasks.gsm8k import Gsm8kTask

        return Gsm8kTask(split, path=part.path)
    if family == "math500":
        from ftis_node.tasks.math500 import Math500Task

        return Math500Task(split, path=part.path)
    if family == "arithmetic":
        from ftis_node.tasks.arithmetic import ArithmeticTask

        return ArithmeticTask(split, parts=argument or "both")
    if family == "sums":
        from ftis_node.tasks.sums import SumsTask

        return SumsTask(split, name=part.problems)
    if family == "rg" and argument:
        from ftis_node.tasks.rg import ReasoningGymTask

        return ReasoningGymTask(argument, split)
    return _load_plugin(part.problems, split)


def _load_plugin(name: str, split: str) -> Task:
    from ftis_node.plugins import TASK_GROUP, find_plugins
    from ftis_node.tasks.plugins import load_task_plugin

    task = load_task_plugin(name, split)
    if task is None:
        known = [*BUILT_IN, *(plugin.name for plugin in find_plugins(TASK_GROUP))]
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise TaskError(f"unknown task {name!r}: known are {', '.join(known)}{meant}")
    return task


def _has_test_split(part: TaskPart) -> bool:
    family = part.problems.partition(":")[0]
    if part.is_dataset:
        from ftis_node.tasks.dataset.row_problems import has_test_split

        return has_test_split(part)
    if part.path:
        from ftis_node.tasks.problems import problem_file

        files = {split: problem_file(part.path, split) for split in SPLITS}
        return files["test"] != files["train"] and files["test"].is_file()
    return family in (*FILE_TASKS, "arithmetic", "sums", "rg")
