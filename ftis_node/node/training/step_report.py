"""Reporting of a finished step: state, counters, event log, trackers and log lines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from ftis_node.node.training.logprob_mismatch import MismatchChange, MismatchWatch, limits_of, warning_of
from ftis_node.node.worker_settings import dtype_of
from ftis_node.swarm.peer_guard import Place

if TYPE_CHECKING:
    from ftis_node.learner.messages import StepReport
    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.protocols import Generation
    from ftis_node.node.state import NodeCounters
    from ftis_node.node.training.tracking import StepTracker
    from ftis_node.swarm.peer_guard import PeerGuard

log = logging.getLogger(__name__)

IN_WORDS = {"no signal": "all answers of each group are equally good, so there is nothing to learn from"}


class StepReporter:
    """Records each step's report, and the transitions of the log-prob mismatch."""

    def __init__(
        self,
        *,
        context: NodeContext,
        registry: PeerRegistry,
        counters: NodeCounters,
        generation: Generation,
        tracker: StepTracker,
        guard: PeerGuard,
    ) -> None:
        self._context = context
        self._registry = registry
        self._counters = counters
        self._generation = generation
        self._tracker = tracker
        self._guard = guard
        settings = context.settings
        self._mismatch = MismatchWatch(limits_of(settings.mismatch, dtype=dtype_of(settings)))

    async def note(self, report: StepReport) -> None:
        """Record the report of a finished step in state, counters, event log and trackers."""
        state = self._context.state
        state.step, state.policy_version = report.step, report.policy_version
        self._counters.last_report = report
        generation_tokens_per_s = round(self._generation.tokens_per_s, 1)
        fields = msgspec.to_builtins(report) | {"generation_tokens_per_s": generation_tokens_per_s}
        self._context.events.write("step", **fields)
        self._counters.recent_sources.append({taught.sender: taught.groups for taught in report.by_sender})
        if not report.repeated:
            self._counters.groups_trained_own += report.own_groups
            self._counters.groups_trained_foreign += report.foreign_groups
        for taught in report.by_sender:
            if taught.sender and not taught.own:
                with self._guard.work_for(taught.sender, Place.COUNT):
                    self._registry.entry(taught.sender).note_training(taught)
        if problem := report.refused or report.skipped:
            log.warning("step %d changed nothing: %s", report.step, IN_WORDS.get(problem, problem))
        else:
            log.info(
                "step %d: reward %.3f, %d own and %d foreign groups, %.1f s",
                report.step,
                report.reward_mean or 0.0,
                report.own_groups,
                report.foreign_groups,
                report.duration_s,
                extra={"fields": fields},
            )
        self._note_mismatch(report)
        await self._tracker.track(report)

    def _note_mismatch(self, report: StepReport) -> None:
        """Write an event and a log line if the mismatch rose above its limits, or fell below them again."""
        if report.mismatch_kl is None:
            return
        self._counters.mismatch_report = report
        change = self._mismatch.note(report)
        if change is None:
            return
        self._context.events.write(
            "mismatch",
            step=report.step,
            change=change.value,
            kl=report.mismatch_kl,
            share=report.mismatch_share,
            num_tokens=report.mismatch_tokens,
            version=report.mismatch_version,
        )
        if change is MismatchChange.ROSE:
            log.warning("%s", warning_of(report, self._mismatch.limits))
        else:
            log.info("engine and learner agree again: KL %.2g", report.mismatch_kl)
