"""The status sections for the two workers and their model.

Health of a node: the responses of `/healthz` (liveness probe) and `/readyz` (readiness probe); the status section.

`/healthz` reports only faults that a restart fixes. They are a worker that stays down and a task that is stuck
(`task_monitor.py`). It does not report an engine that hangs, because the supervisor restarts it, nor peers that do not
answer. If the event loop is blocked, the daemon does not answer and the probe times out.

The functions are pure: the caller passes the states.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.telemetry.status import GenerationStatus, HealthStatus, LearnerStatus, LoopStatus, ModelStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeCounters, NodeDescription
    from ftis_node.node.protocols import Generation, Learning
    from ftis_node.node.supervision.watchdog import Watchdog
    from ftis_node.replay.reader import BufferFigures

STEP_FIGURES = (
    *("loss", "reward_mean", "kept_fraction", "truncated_fraction", "mean_kl", "grad_norm", "tokens_per_s"),
    *("micro_batch_tokens", "out_of_memory", "learning_rate", "kl_to_start"),
)
MISMATCH_FIGURES = ("mismatch_kl", "mismatch_share", "mismatch_version")


@dataclass(slots=True)
class LastChange:
    """Time of a count's last change in Unix seconds; None before a change. The first value is no change."""

    at: float | None = None
    _value: int | None = None

    def note(self, value: int) -> None:
        """Note the present count."""
        if self._value is not None and value != self._value:
            self.at = round(time.time(), 3)
        self._value = value


@dataclass(kw_only=True, eq=False, repr=False)
class WorkerReporter:
    """Builds the sections from the workers' clients and the report of the newest step."""

    context: NodeContext
    about: NodeDescription
    generation: Generation
    learner: Learning
    counters: NodeCounters
    _groups_made: LastChange = field(default_factory=LastChange, init=False)
    _step: LastChange = field(default_factory=LastChange, init=False)

    @property
    def states(self) -> dict[str, str]:
        """Return the state of each worker by name."""
        return {"generation": str(self.generation.state), "learner": str(self.learner.worker_state)}

    def note(self, counts: BufferFigures) -> None:
        """Note the times of the last group and the last step, when their counts change."""
        self._groups_made.note(counts.groups_own)
        self._step.note(self.context.state.step)

    def model_status(self) -> ModelStatus:
        """Return the model's section."""
        learner = self.learner.state
        return ModelStatus(
            name=self.about.model,
            parameters=learner.parameters if learner else 0,
            trainable_parameters=learner.trainable_parameters if learner else 0,
            tokenizer_fingerprint=self.about.tokenizer,
            policy_version=self.context.state.policy_version,
            training=self.about.training,
        )

    def generation_status(self, counts: BufferFigures) -> GenerationStatus:
        """Return the generation worker's section."""
        client = self.generation
        return GenerationStatus(
            engine=client.engine,
            state=str(client.state),
            tokens_per_s=round(client.tokens_per_s, 1),
            groups_made=counts.groups_own,
            tokens_made=counts.tokens_own,
            restarts=client.restarts,
            policy_version=client.policy_version,
            hand_over=client.hand_over,
            last_group_at=self._groups_made.at,
        )

    def learner_status(self, counts: BufferFigures) -> LearnerStatus:
        """Return the learner's section, with the report of its newest step."""
        client, counters = self.learner, self.counters
        fields: dict[str, Any] = {}
        if report := counters.last_report:
            fields |= {name: getattr(report, name) for name in STEP_FIGURES}
        if measured := counters.mismatch_report:
            fields |= {name: getattr(measured, name) for name in MISMATCH_FIGURES}
        return LearnerStatus(
            state=str(client.worker_state),
            step=self.context.state.step,
            own_groups=counts.trained_own,
            foreign_groups=counts.trained_foreign,
            restarts=client.restarts,
            last_step_at=self._step.at,
            layout=client.state.layout if client.state else None,
            kernels=client.state.kernels if client.state else None,
            **fields,
        )


def worker_problems(states: Mapping[str, str]) -> list[str]:
    """Return a sentence for each worker that its supervisor no longer restarts."""
    given_up = [name for name, state in states.items() if state == "failed"]
    return [f"the {name} worker was given up: look into logs/{name}.log" for name in given_up]


def not_ready(states: Mapping[str, str], *, swarm_state: str, swarm_reason: str) -> str:
    """Return why the node cannot contribute yet; "" if it can. The first node of a swarm is ready without peers."""
    for name, state in states.items():
        if state not in ("ready", "off"):
            return f"the {name} worker is {state}"
    return f"the network is starting: {swarm_reason}" if swarm_state == "starting" else ""


@dataclass(kw_only=True, eq=False, repr=False)
class HealthReporter:
    """Builds the section from the states of workers, network and tasks.

    `watchdog` checks that the loops make progress.
    """

    workers: WorkerReporter
    gossip: Gossip
    watchdog: Watchdog

    @property
    def has_fault(self) -> bool:
        """Return whether the watchdog has found a fault."""
        return self.watchdog.has_fault

    def status(self) -> HealthStatus:
        """Return the section."""
        swarm, states = self.gossip.state, self.workers.states
        problems = [*worker_problems(states), *map(str, self.watchdog.board.stuck())]
        waits_for = not_ready(states, swarm_state=str(swarm.state), swarm_reason=swarm.reason)
        return HealthStatus(
            healthy=not problems,
            ready=not waits_for,
            problems=problems,
            waits_for=waits_for,
            taken_at=time.time(),
            event_loop_lag_s=_rounded(self.watchdog.lag.mean_s),
            event_loop_lag_longest_s=_rounded(self.watchdog.lag.longest_s),
            loops=[
                LoopStatus(name=name, waits_for=strand.waits_for, for_s=round(for_s, 1))
                for name, strand, for_s in self.watchdog.board.strands()
            ],
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
