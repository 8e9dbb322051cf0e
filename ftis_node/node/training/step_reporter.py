"""Reporting of a finished step: state, counters, peer registry, event log, trackers and log lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from ftis_node.learner.messages import StepReport
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.peers.swarm_reporter import SwarmReporter
from ftis_node.node.training.logprob_mismatch import MismatchMonitor
from ftis_node.node.worker_interfaces import Generation
from ftis_node.telemetry.tracking import Tracking, numbers_of

log = logging.getLogger(__name__)
IN_WORDS = {"no signal": "all answers of each group are equally good, so there is nothing to learn from"}


@dataclass(eq=False, repr=False)
class StepReporter:
    """Records each step's report."""

    context: NodeContext
    peers: PeerManager
    generation: Generation
    swarm: SwarmReporter
    tracking: Tracking

    def __post_init__(self) -> None:
        self._mismatch = MismatchMonitor(self.context)

    async def note(self, report: StepReport) -> None:
        """Record the report of a finished step in state, counters, event log and trackers."""
        state = self.context.state
        state.step = report.step
        state.go_to(report.policy_version)
        self.context.counters.last_reports.append(report)
        if report.kl_to_start is not None or report.kl_from_start is not None:
            self.context.counters.drift_report = report
        generation_tokens_per_s = round(self.generation.tokens_per_s, 1)
        fields = msgspec.to_builtins(report) | {"generation_tokens_per_s": generation_tokens_per_s}
        self.context.events.write("step", **fields)
        self.context.counters.recent_sources.append({stats.sender: stats.groups for stats in report.by_sender})
        if not report.repeated:
            self.context.counters.groups_trained_own += report.own_groups
            self.context.counters.groups_trained_foreign += report.foreign_groups
        for stats in report.by_sender:
            if stats.sender and not stats.own:
                self.peers.registry.entry(stats.sender).note_training(stats)
        if problem := report.refused or report.skipped:
            log.warning("step %d changed nothing: %s", report.step, IN_WORDS.get(problem, problem))
        else:
            groups = f"{report.own_groups} own and {report.foreign_groups} foreign groups"
            line = f"step {report.step}: reward {report.reward_mean or 0.0:.3f}, {groups}, {report.duration_s:.1f} s"
            log.info("%s", line, extra={"fields": fields})
            if report.unfinished:
                log.info("step %d ended after update %d: %s", report.step, report.num_updates, report.unfinished)
        self._mismatch.note(report)
        await self._track(report)

    async def _track(self, report: StepReport) -> None:
        if not self.tracking:
            return
        swarm = self.swarm.status(members=await self.swarm.gossip.members())
        report_fields = msgspec.to_builtins(report)
        del report_fields["step"]  # the axis
        numbers = numbers_of(report_fields, prefix="learner") | numbers_of(msgspec.to_builtins(swarm), prefix="swarm")
        self.tracking.log(report.step, {"generation/tokens_per_s": self.generation.tokens_per_s, **numbers})
