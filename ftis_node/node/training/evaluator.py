"""Evaluation of pass@1 by greedy decoding on held-out problems."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ftis_node.errors import WorkerError
from ftis_node.generation.evaluate import answer_problems, summarize
from ftis_node.models import PromptTokenizer
from ftis_node.node.context import NodeContext
from ftis_node.node.worker_interfaces import Generation
from ftis_node.tasks.base import Task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.status import EvalStatus
from ftis_node.telemetry.tracking import Tracking

log = logging.getLogger(__name__)

EVALUATION = "evaluation"


@dataclass(eq=False, repr=False)
class Evaluator:
    """Evaluates the served weights on the run's held-out tasks; each task once a step."""

    context: NodeContext
    generation: Generation
    eval_tasks: Sequence[Task]
    tokenizer: PromptTokenizer
    scorer: IsolatedScorer
    tracking: Tracking

    async def evaluate(self, *, step: int) -> None:
        """Evaluate the weights of `step` on each task without a result for that step.

        Raise WorkerError if no evaluation has succeeded since the start, or if the generator does not come back.
        """
        known = {entry.task for entry in self.context.evaluations.entries if entry.step == step}
        for task in self.eval_tasks:
            if task.name in known:
                continue
            try:
                await self._evaluate(task, step=step)
                self.context.failures.succeeded(EVALUATION)
            except WorkerError as error:
                is_due = self.context.failures.failed(EVALUATION, error)
                if not (self.generation.is_alive and self.context.failures.streak(EVALUATION).has_succeeded):
                    raise
                if is_due:
                    self.context.events.write("eval_failed", step=step, task=task.name, error=str(error))

    async def _evaluate(self, task: Task, *, step: int) -> None:
        began_at, manifest = time.monotonic(), self.context.manifest
        answered = await answer_problems(
            self.generation,
            task,
            self.tokenizer,
            scorer=self.scorer,
            limit=manifest.eval.limit,
            completion_limit=manifest.sampling.completion_limit,
            episode=manifest.episode,
        )
        result = summarize(answered, k=1)
        entry = EvalStatus(
            step=step,
            task=task.name,
            pass_at_1=result.pass_at_1,
            n=result.n,
            completion_tokens=result.completion_tokens_mean,
            cut_fraction=result.truncated / result.n,
        )
        self.context.evaluations.add(entry)
        fields, duration_s = msgspec.structs.asdict(entry), round(time.monotonic() - began_at, 3)
        self.context.events.write("eval", **fields, duration_s=duration_s)
        self.tracking.log(entry.step, {f"eval/{entry.task}/pass_at_1": entry.pass_at_1})
        accuracy = f"pass@1 {entry.pass_at_1:.3f} on {entry.n} problems of {entry.task}"
        line = f"step {step}: {accuracy}, {entry.completion_tokens:.0f} tokens an answer"
        log.info("%s", line, extra={"fields": fields})
