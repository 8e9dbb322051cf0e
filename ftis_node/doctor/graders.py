"""Check of the libraries that grade answers: they score known answers in the scoring process, as in a node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from ftis_node.doctor.check_result import CheckResult
from ftis_node.errors import FtisError
from ftis_node.tasks import Task, grader_releases, parse_spec
from ftis_node.tasks.problems import Problem
from ftis_node.tasks.scorer import IsolatedScorer

MATH_TASK: Final = "gsm8k"  # `math500` and `dataset:` have the same grader
GENERATED_TASK: Final = "leg_counting"


def check_graders() -> Iterator[CheckResult]:
    """Yield a result for each library that grades a built-in task. No data set is read."""
    for load in (_math_task, _generated_task):
        try:
            task = load()
            asyncio.run(_check(task))
        except FtisError as error:
            yield CheckResult("grader.broken", "fail", str(error))
        else:
            yield CheckResult("grader.works", "ok", f"{grader_releases(task)}: known answers get the right rewards")


async def _check(task: Task) -> None:
    async with IsolatedScorer(task):
        pass


def _math_task() -> Task:
    from ftis_node.tasks.dataset_task import DatasetTask

    return DatasetTask(parse_spec(MATH_TASK).parts[0], "train", problems=(Problem("6 * 7 = ?", "42"),))


def _generated_task() -> Task:
    from ftis_node.tasks.rg import ReasoningGymTask

    return ReasoningGymTask("train", GENERATED_TASK)
