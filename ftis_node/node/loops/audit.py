"""The audit loop: log-probs of peers that claim the very weights of our learner, against the learner's own.

consumes: foreign groups just stored (intake)     produces: a liar's group released unused, and its standing lowered
waits for: a group that can be compared           unblocked by: intake

A peer may send any log-probs, and what they are decides how much its completions weigh. Where it names weights that we
have too, they are no secret: a sample of such groups is computed here again. Number formats and kernels differ a
little, so the limit is far above what they do. What no audit sees: log-probs of a policy that we do not have; there the
cap and the filter of the loss bound the harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from ftis_node.errors import WorkerError
from ftis_node.models.source import HUB_ID
from ftis_node.node.loops.train import train_group
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.replay.buffer import StoredGroup
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.reputation.score import Behaviour, TrustLevel

if TYPE_CHECKING:
    from ftis_node.learner.messages import TrainGroup
    from ftis_node.node.context import Parts
    from ftis_node.node.loops.intake import IntakeLoop
    from ftis_node.records.envelope import Accepted
    from ftis_node.records.group import Group

log = logging.getLogger(__name__)

MAX_WAITING = 8  # groups; more are let go unaudited
REASON = "audit"


class AuditLoop:
    """A sample of what can be compared; one at a time."""

    def __init__(self, parts: Parts, intake: IntakeLoop, *, dice: random.Random | None = None) -> None:
        """`dice` draws the sample; by default nobody can tell which groups it will be."""
        self._parts = parts
        self._dice = dice or random.SystemRandom()
        self._waiting: asyncio.Queue[Accepted] = asyncio.Queue(MAX_WAITING)
        intake.on_foreign = self.offer

    def offer(self, accepted: Accepted) -> None:
        """Puts a foreign group on the list, if it can be compared and is drawn."""
        if self._waiting.full() or self._parts.arrangement.takes_turns:  # then the generator has the memory
            return
        with self._parts.guard.work_for(accepted.group.sender, Place.AUDIT):  # called by the intake loop
            if self._is_comparable(accepted.group) and self._dice.random() < self._share(accepted.group):
                self._waiting.put_nowait(accepted)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with waiting_for("a group to compare"):
                accepted = await self._waiting.get()
            with self._parts.guard.work_for(accepted.group.sender, Place.AUDIT):
                await self._audit(accepted)

    def _share(self, group: Group) -> float:
        """Of a peer that is watched, and of a stranger that claims this node's own weights, every group."""
        share, peers = self._parts.settings.validation.audit_fraction, self._parts.peers
        is_strangers_claim = group.weights_of is not None and peers.is_stranger(group.sender)
        is_doubtful = is_strangers_claim or peers.standing(group.sender) is TrustLevel.WATCHED
        return 1.0 if share and is_doubtful else share

    def _is_comparable(self, group: Group) -> bool:
        """Whether the group says that it was sampled, from first to last, with weights that our learner has now."""
        parts, version = self._parts, self._parts.state.policy_version
        if group.policy_version != version or group.policy_version_newest != version:
            return False
        if group.mean_logprobs:
            return False
        if group.weights_of == parts.identity.peer_id:  # an honest follower may have the former weights of a number
            return version == 0 or version > parts.state.last_reused_version
        is_named = bool(HUB_ID.fullmatch(parts.source.name)) or parts.settings.validation.audit_folders
        return version == 0 and is_named and group.model == parts.source.name

    async def _audit(self, accepted: Accepted) -> None:
        group, group_id = accepted.group, accepted.envelope.id
        stored = StoredGroup.from_accepted(accepted, own=False)
        try:
            with waiting_for("the learner's comparison"):  # after the step that is under way
                reply = await self._parts.learner.audit(self._as_trained(stored))
        except WorkerError as error:  # the train loop sees to the learner
            self._parts.events.write("audit_failed", group=group_id, error=str(error))
            return
        if reply.kl is None:
            return
        self._parts.events.write("audited", group=group_id, sender=group.sender, kl=reply.kl, tokens=reply.num_tokens)
        if reply.kl > self._parts.settings.validation.audit_max_kl:
            await self._refuse(accepted, reply.kl)

    def _as_trained(self, stored: StoredGroup) -> TrainGroup:
        return train_group(stored, share=self._parts.manifest.step.prompt_sharing)

    async def _refuse(self, accepted: Accepted, kl: float) -> None:
        parts, sender, group_id = self._parts, accepted.group.sender, accepted.envelope.id
        parts.counters.refused[REASON] += 1
        parts.registry.seen(sender).refused[REASON] += 1
        detail = f"{REASON}: a KL of {kl:.3g} from the weights that it claims"
        parts.peers.note(sender, Behaviour.LIED, reason=REASON, detail=detail)
        if await parts.disk(parts.buffer.release_audited, group_id):
            parts.events.write("released", group=group_id, reason=REASON)
        log.warning("%s claims this node's weights, and its log-probs are off by a KL of %.3g", sender, kl)
