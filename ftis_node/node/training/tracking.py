"""Sends step reports, the generation rate, swarm counters and evaluations to the experiment trackers.

Each numeric field of the report and of the status section `swarm` becomes a curve, including new fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ftis_node.telemetry.tracking import TrackedRun, Tracking, numbers_of

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.gossip.interface import Gossip
    from ftis_node.learner.messages import StepReport
    from ftis_node.node.peers.swarm_status import SwarmReporter
    from ftis_node.node.protocols import Generation
    from ftis_node.telemetry.status import EvalStatus


def make_tracking(
    settings: NodeSettings, manifest: RunManifest, home: Home, *, name: str, peer_id: str, model: str
) -> Tracking:
    """Return the trackers that the settings name. `startup/prepare.py` checks that they are installed."""
    run = TrackedRun(
        project=settings.tracking.project,
        name=settings.tracking.name or name,
        id=f"{manifest.run_id}-{peer_id}",
        folder=home.root.absolute(),
        settings={"run": manifest.model_dump(mode="json"), "run_id": manifest.run_id, "model": model, "peer": peer_id},
    )
    return Tracking.to(settings.tracking.to, run)


class StepTracker:
    """Sends one step's report, the generation rate and the swarm section to the trackers."""

    def __init__(self, *, tracking: Tracking, generation: Generation, gossip: Gossip, swarm: SwarmReporter) -> None:
        self._tracking = tracking
        self._generation = generation
        self._gossip = gossip
        self._swarm = swarm

    async def track(self, report: StepReport) -> None:
        """Log the numbers of one step. Does nothing without a tracker."""
        if not self._tracking:
            return
        swarm = self._swarm.status(members=await self._gossip.members())
        report_fields = msgspec.to_builtins(report)
        del report_fields["step"]  # the axis
        numbers = numbers_of(report_fields, prefix="learner") | numbers_of(msgspec.to_builtins(swarm), prefix="swarm")
        self._tracking.log(report.step, {"generation/tokens_per_s": self._generation.tokens_per_s, **numbers})


def track_evaluation(tracking: Tracking, evaluation: EvalStatus) -> None:
    """Log one evaluation under a key with the task's name."""
    tracking.log(evaluation.step, {f"eval/{evaluation.task}/pass_at_1": evaluation.pass_at_1})
