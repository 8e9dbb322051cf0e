"""Evaluation of pass@1 by greedy decoding on held-out problems, and the statistics that a node publishes."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import WorkerError
from ftis_node.generation.evaluate import evaluate
from ftis_node.models import PromptTokenizer
from ftis_node.node.context import NodeContext, NodeCounters
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.protocols import Generation
from ftis_node.node.supervision.failures import FailureBoard
from ftis_node.records.bounds import MAX_REFUSED_SENDERS
from ftis_node.records.peer_messages import PeerStats
from ftis_node.swarm.reasons import REFUSALS
from ftis_node.tasks.base import Task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.status import EvalStatus
from ftis_node.telemetry.tracking import TrackedRun, Tracking

log = logging.getLogger(__name__)

MAX_EVALUATIONS = 1024  # in the status, which HTTP clients read every second; the event log has all evaluations
NUM_SAMPLES = 10  # number of directory periods over which the rate of groups averages
MINUTE_S = 60.0
EVALUATION = "evaluation"


def make_tracking(
    settings: NodeSettings, manifest: RunManifest, home: Home, *, name: str, peer_id: str, model: str
) -> Tracking:
    """Return the trackers that the settings name. `startup/prepare.py` checks that they are installed."""
    run = TrackedRun(
        project=settings.tracking.project,
        name=name,
        id=f"{manifest.run_id}-{peer_id}",
        folder=home.root.absolute(),
        settings={"run": manifest.model_dump(mode="json"), "run_id": manifest.run_id, "model": model, "peer": peer_id},
    )
    return Tracking.to(settings.tracking.to, run)


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


@dataclass(kw_only=True, eq=False, repr=False)
class Evaluator:
    """Evaluates the served weights on the run's held-out tasks; each task once a step."""

    context: NodeContext
    generation: Generation
    eval_tasks: Sequence[Task]
    tokenizer: PromptTokenizer
    scorer: IsolatedScorer
    evaluations: EvaluationHistory
    tracking: Tracking
    failures: FailureBoard

    async def evaluate(self, *, step: int) -> None:
        """Evaluate the weights of `step` on each task without a result for that step.

        Raise WorkerError if no evaluation has succeeded since the start, or if the generator does not come back.
        """
        known = {entry.task for entry in self.evaluations.entries if entry.step == step}
        for task in self.eval_tasks:
            if task.name in known:
                continue
            try:
                await self._evaluate(task, step=step)
                self.failures.succeeded(EVALUATION)
            except WorkerError as error:
                is_due = self.failures.failed(EVALUATION, error)
                if not (self.generation.is_alive and self.failures.streak(EVALUATION).has_succeeded):
                    raise
                if is_due:
                    self.context.events.write("eval_failed", step=step, task=task.name, error=str(error))

    async def _evaluate(self, task: Task, *, step: int) -> None:
        began_at, manifest = time.monotonic(), self.context.manifest
        result = await evaluate(
            self.generation.newest,
            task,
            self.tokenizer,
            scorer=self.scorer,
            limit=manifest.eval.limit,
            completion_limit=manifest.sampling.completion_limit,
        )
        entry = EvalStatus(step=step, task=task.name, pass_at_1=result.pass_at_1, n=result.n)
        self.evaluations.add(entry)
        duration_s = round(time.monotonic() - began_at, 3)
        self.context.events.write(
            "eval", step=entry.step, task=entry.task, pass_at_1=entry.pass_at_1, n=entry.n, duration_s=duration_s
        )
        self.tracking.log(entry.step, {f"eval/{entry.task}/pass_at_1": entry.pass_at_1})
        log.info(
            "step %d: pass@1 %.3f on %d problems of %s",
            entry.step,
            entry.pass_at_1,
            entry.n,
            entry.task,
            extra={"fields": msgspec.structs.asdict(entry)},
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OwnStats:
    """Maker of the measurements. `sample` is called once for each directory period, `make` at any time."""

    context: NodeContext
    counters: NodeCounters
    evaluations: EvaluationHistory
    peers: PeerManager
    _turn: int = field(default=0, init=False)
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES), init=False)

    def sample(self, *, last_number: int) -> None:
        """Note how many groups have been sent; the rate is an average since the oldest of the noted numbers."""
        self._samples.append((time.monotonic(), last_number))
        self._turn += 1

    def make(self, *, last_number: int) -> PeerStats | None:
        """Return the measurements; None if `swarm.publish_stats` is false. `last_number` counts the groups sent."""
        if not self.context.settings.swarm.publish_stats:
            return None
        sources: Counter[str] = Counter()
        for groups in self.counters.recent_sources:
            sources.update(groups)
        return PeerStats(
            step=self.context.state.step,
            groups_per_minute=self._groups_per_minute(last_number),
            rejected_groups=sum(self.counters.refused.values()),
            pass_rates=self._pass_rates(),
            sources=tuple((peer_id, groups) for peer_id, groups in sources.most_common() if peer_id and groups > 0),
            trained_groups=sum(sources.values()),
            refused_senders=self._refused_senders(),
        )

    def _refused_senders(self) -> tuple[tuple[str, str, int], ...]:
        """Return as many refused senders as a record holds, others in each turn."""
        refused = self.peers.refused_senders()
        first = self._turn * MAX_REFUSED_SENDERS % max(1, len(refused))
        ordered = [*refused[first:], *refused[:first]][:MAX_REFUSED_SENDERS]
        return tuple((sender.peer_id, _public(sender.reason), sender.num_groups) for sender in ordered)

    def _groups_per_minute(self, last_number: int) -> float:
        if not self._samples:
            return 0.0
        (first_s, first), now_s = self._samples[0], time.monotonic()
        return MINUTE_S * (last_number - first) / (now_s - first_s) if now_s > first_s else 0.0

    def _pass_rates(self) -> tuple[tuple[int, float], ...]:
        entries = self.evaluations.entries
        return tuple((entry.step, entry.pass_at_1) for entry in entries if entry.task == entries[0].task)


def _public(reason: str) -> str:
    """Return the reason for the record: a name that peers know, since a ban may have any reason."""
    return reason if reason in REFUSALS else "banned"
