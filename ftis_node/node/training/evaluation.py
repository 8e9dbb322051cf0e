"""Greedy pass@1 on held-out problems by the node's own engine: into the status, the event trail and the trackers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ftis_node.generation.evaluate import evaluate
from ftis_node.node.training.tracking import track_evaluation
from ftis_node.telemetry.status import EvalStatus

if TYPE_CHECKING:
    from ftis_node.node.context import Parts
    from ftis_node.tasks.base import Task

log = logging.getLogger(__name__)

MAX_EVALUATIONS = 1024  # in the status, which is sent every second; the event log has all


class EvaluationHistory:
    """Bounded list of evaluations, oldest first."""

    def __init__(self) -> None:
        self.entries: list[EvalStatus] = []

    def add(self, evaluation: EvalStatus) -> None:
        """Add one. Beyond the bound drop the oldest, except those of the first step, the baseline of comparisons."""
        known = [*self.entries, evaluation]
        first = [entry for entry in known if entry.step == known[0].step]
        num_later = max(1, MAX_EVALUATIONS - len(first))
        self.entries = first + known[len(first) :][-num_later:]


async def evaluate_tasks(parts: Parts, *, step: int) -> None:
    """Evaluates what is served, the weights of `step`, on each of the run's tasks that it was not evaluated on yet."""
    known = {entry.task for entry in parts.evaluations.entries if entry.step == step}
    for task in parts.eval_tasks:
        if task.name not in known:
            await _evaluate(parts, task, step=step)


async def _evaluate(parts: Parts, task: Task, *, step: int) -> None:
    began_at = time.monotonic()
    result = await evaluate(
        parts.evaluated,
        task,
        parts.tokenizer,
        scorer=parts.scorer,
        limit=parts.manifest.eval.limit,
        completion_limit=parts.manifest.sampling.completion_limit,
    )
    entry = EvalStatus(step=step, task=task.name, pass_at_1=result.pass_at_1, n=result.n)
    parts.evaluations.add(entry)
    duration_s = round(time.monotonic() - began_at, 3)
    parts.events.write(
        "eval", step=entry.step, task=entry.task, pass_at_1=entry.pass_at_1, n=entry.n, duration_s=duration_s
    )
    track_evaluation(parts, entry)
    log.info("step %d: pass@1 %.3f on %d problems of %s", entry.step, entry.pass_at_1, entry.n, entry.task)
