"""Evaluation of pass@1 by greedy decoding on held-out problems, with the node's own engine."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from ftis_node.generation.evaluate import evaluate
from ftis_node.node.training.tracking import track_evaluation
from ftis_node.telemetry.status import EvalStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.generation.evaluate import Generator
    from ftis_node.models import PromptTokenizer
    from ftis_node.node.context import NodeContext
    from ftis_node.tasks.base import Task
    from ftis_node.tasks.scorer import IsolatedScorer
    from ftis_node.telemetry.tracking import Tracking

log = logging.getLogger(__name__)

MAX_EVALUATIONS = 1024  # in the status, which HTTP clients read every second; the event log has all evaluations


class EvaluationHistory:
    """Bounded list of evaluations, oldest first."""

    def __init__(self) -> None:
        self.entries: list[EvalStatus] = []

    def add(self, evaluation: EvalStatus) -> None:
        """Add an evaluation. Beyond the bound, drop the oldest after the first step, which is the baseline."""
        known = [*self.entries, evaluation]
        first = [entry for entry in known if entry.step == known[0].step]
        num_later = max(1, MAX_EVALUATIONS - len(first))
        self.entries = first + known[len(first) :][-num_later:]


class Evaluator:
    """Evaluates the served weights on the run's held-out tasks; each task once a step."""

    def __init__(
        self,
        *,
        context: NodeContext,
        generator: Generator,
        tasks: Sequence[Task],
        tokenizer: PromptTokenizer,
        scorer: IsolatedScorer,
        history: EvaluationHistory,
        tracking: Tracking,
    ) -> None:
        self._context = context
        self._generator = generator
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._history = history
        self._tracking = tracking

    async def evaluate(self, *, step: int) -> None:
        """Evaluate the weights of `step` on each task without a result for that step."""
        known = {entry.task for entry in self._history.entries if entry.step == step}
        for task in self._tasks:
            if task.name not in known:
                await self._evaluate(task, step=step)

    async def _evaluate(self, task: Task, *, step: int) -> None:
        began_at, manifest = time.monotonic(), self._context.manifest
        result = await evaluate(
            self._generator,
            task,
            self._tokenizer,
            scorer=self._scorer,
            limit=manifest.eval.limit,
            completion_limit=manifest.sampling.completion_limit,
        )
        entry = EvalStatus(step=step, task=task.name, pass_at_1=result.pass_at_1, n=result.n)
        self._history.add(entry)
        duration_s = round(time.monotonic() - began_at, 3)
        self._context.events.write(
            "eval", step=entry.step, task=entry.task, pass_at_1=entry.pass_at_1, n=entry.n, duration_s=duration_s
        )
        track_evaluation(self._tracking, entry)
        log.info(
            "step %d: pass@1 %.3f on %d problems of %s",
            entry.step,
            entry.pass_at_1,
            entry.n,
            entry.task,
            extra={"fields": msgspec.structs.asdict(entry)},
        )
