"""What a node tells its trackers: a step's report, the generator's speed and the swarm's counters; evaluations.

Every number of the report and of the status's swarm section is a curve: a new figure there is one without a line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ftis_node.node.loops.status import swarm_status
from ftis_node.telemetry.trackers import TrackedRun
from ftis_node.telemetry.tracking import Tracking, numbers_of

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.learner.messages import StepReport
    from ftis_node.node.context import Parts
    from ftis_node.telemetry.status import EvalStatus


def make_tracking(
    settings: NodeSettings, manifest: RunManifest, home: Home, *, name: str, peer_id: str, model: str
) -> Tracking:
    """The trackers that the settings ask for; that they are installed was checked before."""
    run = TrackedRun(
        project=settings.tracking.project,
        name=settings.tracking.name or name,
        id=f"{manifest.run_id}-{peer_id}",
        folder=home.root.absolute(),
        settings={"run": manifest.model_dump(mode="json"), "run_id": manifest.run_id, "model": model, "peer": peer_id},
    )
    return Tracking.to(settings.tracking.to, run)


async def track_step(parts: Parts, report: StepReport) -> None:
    """The figures of one step."""
    if not parts.tracking:
        return
    swarm = swarm_status(parts, members=await parts.gossip.members())
    report_fields = msgspec.to_builtins(report)
    del report_fields["step"]  # the axis
    figures = numbers_of(report_fields, prefix="learner") | numbers_of(msgspec.to_builtins(swarm), prefix="swarm")
    parts.tracking.log(report.step, {"generation/tokens_per_s": parts.generation.tokens_per_s, **figures})


def track_evaluation(parts: Parts, evaluation: EvalStatus) -> None:
    """One evaluation; tasks are told apart by name."""
    parts.tracking.log(evaluation.step, {f"eval/{evaluation.task}/pass_at_1": evaluation.pass_at_1})
