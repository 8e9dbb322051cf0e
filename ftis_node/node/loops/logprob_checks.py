"""The loops that compare the log-probs of groups with those of the learner, under the same weights.

The audit loop checks peers that claim to sample from this node's weights. A peer may send any log-probs, and the
importance weights of its completions depend on them. So the loop recomputes them for a random sample of the groups that
name weights of this node. Results differ a little between dtypes and kernels, so the limit is far above those
differences. No audit covers log-probs of weights that this node does not have. For those, the cap and the filter of the
loss bound the harm.

The mismatch loop checks the engine. It sends the first completions of a new version to the learner, which still has
that version. Generation runs ahead of the learner, so most groups of a step come from an earlier version. If a weight
update interrupted a group, the loop sends only the completions that one version sampled completely.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from ftis_node.errors import WorkerError
from ftis_node.models.hub import HUB_ID
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.node.worker_interfaces import Learning
from ftis_node.records.codec import hash_prompt, pack_group
from ftis_node.records.envelope import Accepted
from ftis_node.records.group import Group
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.reputation import Behaviour, TrustLevel

MAX_WAITING = 8  # groups; further ones are not audited
MAX_AUDIT_KL = 0.1  # nats per token; number formats alone cause up to 0.002
REASON = "logprob_mismatch"
AUDIT, CHECK = "the audit of a group", "the mismatch measurement"
log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class AuditLoop(NodePart):
    """Loop that audits a random sample of the comparable groups, one at a time.

    `dice` draws the sample.
    """

    learner: Learning
    builder: TrainGroupBuilder
    dice: random.Random = field(default_factory=random.SystemRandom)
    _waiting: asyncio.Queue[Accepted] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING), init=False)

    def offer(self, accepted: Accepted) -> None:
        """Queue a foreign group if it can be compared and the sample includes it. The intake loop calls this."""
        if (
            not self._waiting.full()
            and self._is_comparable(accepted)
            and self.dice.random() < self._share(accepted.group)
        ):
            self._waiting.put_nowait(accepted)

    async def run(self) -> None:
        while True:
            accepted = await self._waiting.get()
            with self.gossip.guard.work_for(accepted.group.sender, Place.AUDIT):
                await self._audit(accepted)

    def _share(self, group: Group) -> float:
        """Return the fraction to audit: 1 for a peer on probation, and if a new peer claims this node's weights."""
        share, peers = self.context.settings.validation.audit_fraction, self.peers
        is_new_peers_claim = group.weights_of is not None and peers.is_new_peer(group.sender)
        is_doubtful = is_new_peers_claim or peers.trust_level(group.sender) is TrustLevel.PROBATION
        return 1.0 if share and is_doubtful else share

    def _is_comparable(self, accepted: Accepted) -> bool:
        """Return whether the group claims that the learner's present weights sampled it after the learner's prompt."""
        group, version = accepted.group, self.context.state.policy_version
        form = self.builder.observation_form if group.turn_lengths else ()
        if group.prompt_hash != hash_prompt(accepted.prompt_ids, form):  # the sender's template differs
            return False
        if group.turn_lengths and group.end_ids != self.builder.end_ids:  # its observations may have other tokens here
            return False
        if group.policy_version != version or group.policy_version_newest != version or group.mean_logprobs:
            return False
        if group.weights_of == self.context.peer_id:
            # An honest follower may have other weights of the same version number, from before a learner restart.
            return version == 0 or version > self.context.state.last_reused_version
        name = self.context.about.model
        is_named = bool(HUB_ID.fullmatch(name)) or self.context.settings.validation.audit_folders
        return version == 0 and is_named and group.model == name == self.context.policy_name

    async def _audit(self, accepted: Accepted) -> None:
        group, group_id = accepted.group, accepted.envelope.id
        try:
            reply = await self.learner.audit(self.builder.build(StoredGroup.from_accepted(accepted, own=False)))
        except WorkerError as error:  # the train loop handles the learner's failure
            if self.context.failures.failed(AUDIT, error):
                self.context.events.write("audit_failed", group=group_id, error=str(error))
            return
        self.context.failures.succeeded(AUDIT)
        if reply.kl is None:
            return
        self.context.events.write("audited", group=group_id, sender=group.sender, kl=reply.kl, tokens=reply.num_tokens)
        if reply.kl > MAX_AUDIT_KL:
            await self._refuse(accepted, reply.kl)

    async def _refuse(self, accepted: Accepted, kl: float) -> None:
        sender, group_id = accepted.group.sender, accepted.envelope.id
        detail = f"{REASON}: a KL of {kl:.3g} from the weights that it claims"
        self.peers.refuse(sender, REASON, Behaviour.FALSE_CLAIM, detail=detail)
        await self.store.release_ready(group_id, ReleaseReason.AUDIT)
        log.warning("%s claims weights that this node has, and its log-probs are off by a KL of %.3g", sender, kl)


@dataclass(eq=False, repr=False)
class MismatchLoop(NodePart):
    """Loop that sends the learner at most one group of each version.

    `next_own` waits for the newest stored group of this node's own weights.
    """

    learner: Learning
    builder: TrainGroupBuilder
    next_own: Callable[[], Awaitable[Accepted]]
    _sent_version: int | None = field(default=None, init=False)

    async def run(self) -> None:
        while True:
            accepted = await self.next_own()
            sender = accepted.group.sender  # this node, or a peer that samples with its weights
            passes = (Exception,) if sender == self.context.peer_id else ()
            with self.gossip.guard.work_for(sender, Place.AUDIT, passes=passes):
                version = self.context.state.policy_version
                if version != self._sent_version and (part := sampled_by(accepted.group, version)) is not None:
                    self._sent_version = version
                    await self._send(accepted, part)

    async def _send(self, accepted: Accepted, part: Group) -> None:
        whole = StoredGroup.from_accepted(accepted, own=part.sender == self.context.peer_id)
        stored = replace(whole, body=pack_group(part), rewards=part.rewards)
        try:
            await self.learner.check(self.builder.build(stored, of_own_weights=True))  # after the present step
        except WorkerError as error:  # the train loop handles the failure; the next version gets a new check
            if self.context.failures.failed(CHECK, error):
                self.context.events.write("check_failed", group=stored.id, error=str(error))
            return
        self.context.failures.succeeded(CHECK)


def sampled_by(group: Group, version: int) -> Group | None:
    """Return the group with only the completions that `version` sampled completely; None if there are none.

    Of episodes it takes whole groups alone, because their observations are stored together.
    """
    if group.mean_logprobs:  # sent as text: there are no log-probs of tokens to compare
        return None
    completions = tuple(
        completion
        for completion in group.completions
        if completion.policy_version == completion.policy_version_newest == version
    )
    if not completions or (group.turn_lengths and len(completions) < len(group.tokens)):
        return None
    return group.with_completions(completions)
