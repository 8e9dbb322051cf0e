"""The senders of the groups of a step: weighted before it, credited or charged after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.errors import WorkerCrashedError, WorkerError, WorkerTaskError, says_out_of_memory
from ftis_node.learner.messages import StepReport, TrainGroup
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.training.peer_coefficients import PeerCoefficients
from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.replay.buffer import MAX_FAILED_STEPS
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import HeldGroup
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.reasons import sentence
from ftis_node.swarm.reputation import Behaviour

log = logging.getLogger(__name__)

UNDERSTATED = "understated_logprobs"
UNREADABLE = "malformed"
MAX_GROUPS = 16_384  # whose ids are kept, those of a hundred steps of usual size


@dataclass(eq=False, repr=False)
class StepPeers:
    """Weights the groups of peers before a step, then credits or charges their senders."""

    context: NodeContext
    peers: PeerManager
    builder: TrainGroupBuilder

    def __post_init__(self) -> None:
        self._suspected = LruDict[bytes, int](MAX_GROUPS)
        self._used, self._charged = LruDict[bytes, None](MAX_GROUPS), LruDict[bytes, None](MAX_GROUPS)
        self._coefficients = PeerCoefficients(self.context.manifest.method.peer_weights)

    def batch(self, groups: Sequence[StoredGroup]) -> list[TrainGroup]:
        """Return the groups in the learner's form. The learner reports those whose bodies it cannot unpack."""
        return [
            self.builder.build(
                group,
                of_own_weights=self.peers.is_of_own_weights(group),
                weight=1.0 if group.own else self._coefficients.weight(group.sender),
            )
            for group in groups
        ]

    def weigh(self, report: StepReport, batch: Sequence[TrainGroup]) -> None:
        """Record the peer weights of this step, and update them for the next step from the measured agreement."""
        if self.context.manifest.method.peer_weights is None or report.repeated:
            return
        weights = {group.sender: round(group.weight, 4) for group in batch if not group.own}
        self.context.events.write("peer_weights", step=report.step, weights=weights)
        self._coefficients.note(report.agreement, report.own_agreement)

    def settle(self, report: StepReport, groups: Sequence[StoredGroup], *, is_trained: bool) -> None:
        """Credit the senders whose groups a step used, and charge those whose groups it refused.

        A group counts once, also if the learner lost the step and repeats it.
        """
        refused = {*report.understated, *report.unreadable}
        for group in groups if is_trained and not report.skipped else ():
            if group.id.hex() not in refused and group.id not in self._used:
                self._used[group.id] = None
                self.peers.note_used(group)
        for group in groups:
            if group.id.hex() in refused and group.id not in self._charged:
                self._charged[group.id] = None
                if not report.repeated:
                    self._charge(group, report)

    def _charge(self, group: StoredGroup, report: StepReport) -> None:
        if group.id.hex() in report.understated:
            sender, detail = group.sender, f"{UNDERSTATED}: {sentence(UNDERSTATED)}"
            self.peers.refuse(sender, UNDERSTATED, Behaviour.FALSE_CLAIM, detail=detail)
            self.context.events.write("understated", group=group.id, sender=sender, step=report.step)
        if group.id.hex() in report.unreadable:
            log.error("step %d skipped group %s: its body cannot be unpacked", report.step, group.id.hex()[:12])
            if not group.own:
                self.peers.note(group.sender, Behaviour.FAULT, reason=UNREADABLE)

    def note_lost(self, groups: Sequence[StoredGroup], error: WorkerError) -> None:
        """Suspect the groups of a lost step if they are of one peer and the error is not this node's.

        A learner that was killed or fell silent may have lacked memory. Groups of several peers do not show whose is
        guilty.
        """
        is_theirs = isinstance(error, WorkerTaskError | WorkerCrashedError) and not says_out_of_memory(str(error))
        if is_theirs and len({group.sender for group in groups if not group.own}) == 1:
            self._suspected.update({group.id: self._suspected.get(group.id, 0) + 1 for group in groups})

    def note_poisoned(self, group_id: bytes, held: HeldGroup | None) -> None:
        """Charge the sender of a group on which the learner failed repeatedly, if each failure made it suspect.

        The count of failures is on disk, but their causes are not. So a failure before a restart counts as the node's.
        """
        self.context.events.write("released", group=group_id, reason=ReleaseReason.POISONED)
        is_suspect = self._suspected.get(group_id, 0) >= MAX_FAILED_STEPS
        if held is not None and not held.own and is_suspect:
            self.peers.note(held.sender, Behaviour.FAULT, reason=ReleaseReason.POISONED)
