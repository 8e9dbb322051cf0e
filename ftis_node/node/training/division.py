"""Shares of the parts of a task mixture in this node's generation, if the run has `step.task_allocation = "advantage"`.

A group has a signal if its advantages are not all 0. The train loop counts such groups of each step, own and foreign.
The generate loop skips problems to match the resulting shares (`algorithms/division.py`). A restart resets the shares
to the mixture's proportions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.algorithms import SignalCount, division_shares, has_signal, keep_chances
from ftis_node.swarm.peer_guard import Place
from ftis_node.tasks import proportions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftis_node.config.manifest import RunManifest
    from ftis_node.replay.buffer import StoredGroup
    from ftis_node.replay.lifecycle import Candidate
    from ftis_node.swarm.peer_guard import PeerGuard
    from ftis_node.telemetry.events import EventLog


class Division:
    """Shares of the parts of one node's domain. It ignores groups of other tasks."""

    def __init__(self, proportions: Mapping[str, float]) -> None:
        """`proportions` of the mixture by part, with sum 1."""
        self._proportions = dict(proportions)
        self._own = dict.fromkeys(proportions, SignalCount())
        self._peers = dict.fromkeys(proportions, SignalCount())
        self.shares = dict(proportions)
        self._chances = keep_chances(self.shares, proportions)

    def note(self, task: str, rewards: Sequence[float], *, own: bool) -> None:
        """Count a group that a step used, or that the selection of the step's groups discarded."""
        counts = self._own if own else self._peers
        if task in counts:
            counts[task] = counts[task].with_group(has_signal=has_signal(rewards))

    def end_step(self) -> dict[str, dict[str, float]]:
        """Compute the shares from the groups of a step. Return them with the signal rates of the parts."""
        self.shares = division_shares(self._proportions, self._own, self._peers)
        self._chances = keep_chances(self.shares, self._proportions)
        own, peers = ({part: count.rate for part, count in counts.items()} for counts in (self._own, self._peers))
        for counts in (self._own, self._peers):
            counts.update({part: count.faded() for part, count in counts.items()})
        return {"shares": self.shares, "own_rates": own, "peer_rates": peers}

    def keeps(self, task: str, draw: float) -> bool:
        """Return whether to generate for a problem of the part `task`; `draw` is uniform in [0, 1)."""
        return draw < self._chances[task]


def division_of(manifest: RunManifest, domain: str) -> Division | None:
    """Return the division of a node that generates for the canonical SPEC `domain`.

    Return None if the run divides tasks evenly, or the domain has only one part.
    """
    if manifest.step.task_allocation == "even" or len(by_part := proportions(domain)) == 1:
        return None
    return Division(by_part)


def note_signals(
    division: Division | None,
    step: int,
    groups: Sequence[StoredGroup],
    discarded: Sequence[Candidate],
    *,
    guard: PeerGuard,
    events: EventLog,
) -> None:
    """Count the groups of a step and the discarded candidates in `division`, and record the new shares.

    A rule may discard groups without a signal. If only used groups counted, every part would have a signal rate of 1.
    """
    if division is None:
        return
    for group in groups:
        with guard.work_for(group.sender, Place.COUNT, passes=(Exception,) if group.own else ()):
            division.note(group.prompt_ref.task, group.rewards, own=group.own)
    for candidate in discarded:
        with guard.work_for(candidate.sender, Place.COUNT, passes=(Exception,) if candidate.own else ()):
            division.note(candidate.task, candidate.rewards, own=candidate.own)
    figures = division.end_step()
    rounded = {name: {part: round(value, 4) for part, value in of.items()} for name, of in figures.items()}
    events.write("division", step=step, **rounded)
