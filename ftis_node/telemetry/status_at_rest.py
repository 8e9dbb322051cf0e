"""The status of a node that starts, stops or no longer runs, made from its last snapshot."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from ftis_node.telemetry.status import EndWord, HealthStatus, PauseStatus, Status


def at_rest(status: Status, state: Literal["starting", "stopping", "stopped"], *, resume: str = "") -> Status:
    """Return the last snapshot of a node whose models load, whose process ends, or that no longer runs.

    `resume` is the command that starts a stopped node again.
    """
    end, reason = "", "the node is not running" if state == "stopped" else f"the node is {state}"
    if state == "stopped":
        end = status.node.end or (EndWord.FAILED if status.node.state == "failed" else EndWord.KILLED).value
        resume = resume or status.node.resume
    problems, at_work = [reason] if state == "stopped" else [], "starting" if state == "starting" else "stopped"
    return replace(
        status,
        node=replace(status.node, state=state, end=end, resume=resume, waits_for=""),
        generation=replace(status.generation, state=at_work, tokens_per_s=0.0),
        learner=replace(status.learner, state=at_work),
        pause=PauseStatus(),
        swarm=replace(status.swarm, state=at_work, reason=reason, peers_connected=0),
        health=HealthStatus(healthy=not problems, problems=problems, waits_for=reason, taken_at=status.health.taken_at),
    )
