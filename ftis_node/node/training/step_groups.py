"""The groups of a step: taken from the buffer, weighted, in the learner's form; then credits and charges to senders."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ftis_node.config.method_table import CHOICES
from ftis_node.config.step import PeerWeighting, Share
from ftis_node.errors import WorkerCrashedError, WorkerError, WorkerTaskError, says_out_of_memory
from ftis_node.learner.messages import StepReport, TrainGroup
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.peers.node_part import NodePart
from ftis_node.replay.buffer import MAX_FAILED_STEPS, Taken
from ftis_node.replay.group_choice import ChoiceRule, choose_newest, choose_same_prompts, choose_sapo, load_choice
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import HeldGroup
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.reasons import sentence
from ftis_node.swarm.reputation import Behaviour
from ftis_node.telemetry.events import EventLog

log = logging.getLogger(__name__)
UNDERSTATED = "understated_logprobs"
UNREADABLE = "malformed"
MAX_GROUPS = 16_384  # whose ids are kept, those of a hundred steps of usual size
DECAY = 0.8  # of an exponential mean, per step
MIN_STEPS = 2  # measurements of a peer before its weight may fall below 1
MIN_WEIGHT = 0.02
MIN_OWN_AGREEMENT = 0.05
MAX_PEERS = 4096


async def take_groups(
    node: NodePart, step: int, *, own: int, foreign: int, disk: Callable[..., Awaitable[Taken]]
) -> list[StoredGroup]:
    """Take up to `own` and `foreign` groups, by signer: READY -> TAKEN, or RELEASED if the rule discards them.

    `disk` runs the write: the store's disk thread, or its `once` for a caller that does not wait for a full disk.
    """
    events, rule = node.context.events, _rule(node.context, node.peers, step)
    groups, discarded = await disk(node.store.buffer.take, step, own=own, foreign=foreign, rule=rule)
    write_taken(events, groups, step=step)
    for unused in discarded:
        events.write("released", group=unused.id, reason=ReleaseReason.DISCARDED)
    return groups


def _rule(context: NodeContext, peers: PeerManager, step: int) -> ChoiceRule:
    section = context.manifest.step
    if section.group_selection == "sapo":
        return partial(choose_sapo, seed=step)
    if section.group_selection not in CHOICES:
        return partial(load_choice(section.group_selection), step=step)
    neighbor = peers.share_cap().neighbor
    if section.prompt_sharing == "horizontal":
        return partial(choose_same_prompts, neighbor=neighbor)
    return partial(choose_newest, neighbor=neighbor)


def write_taken(events: EventLog, groups: Sequence[StoredGroup], *, step: int) -> None:
    """Write one event per group, with its origin, in case the buffer or the event of its admission gets damaged."""
    for group in groups:
        events.write("taken", group=group.id, step=step, sender=group.sender, number=group.number)


@dataclass(frozen=True, slots=True)
class TrainForm:
    """The learner's form of stored groups. `end_ids` and `observation_form` are those of this node's model.

    With `share` "vertical", advantages compare the completions of one group. With "horizontal", they compare all
    completions of a prompt, over all generators.
    """

    share: Share
    end_ids: tuple[int, ...] = ()
    observation_form: tuple[int, ...] = ()

    def of(self, group: StoredGroup, *, of_own_weights: bool = False, weight: float = 1.0) -> TrainGroup:
        """Return a stored group in this form. For `of_own_weights` see `PeerManager.is_of_own_weights`."""
        return TrainGroup(
            group_id=group.id.hex(),
            advantage_key=group.id.hex() if self.share == "vertical" else group.problem.hex(),
            own=group.own,
            body=group.body,
            prompt_ids=group.prompt_ids,
            rewards=group.rewards,
            text_token_ids=group.text_token_ids,
            observation_ids=group.observation_ids,
            of_own_weights=of_own_weights,
            sender=group.sender,
            weight=weight,
            end_ids=self.end_ids,
            observation_form=self.observation_form,
            task=group.prompt_ref.task,
        )


@dataclass(slots=True)
class RunningMean:
    """Exponential mean with bias correction for the start at 0."""

    total: float = 0.0
    norm: float = 0.0
    steps: int = 0

    def add(self, value: float) -> None:
        self.total = DECAY * self.total + (1 - DECAY) * value
        self.norm = DECAY * self.norm + (1 - DECAY)
        self.steps += 1

    @property
    def value(self) -> float:
        """Return the mean; 0 without a value."""
        return self.total / self.norm if self.norm else 0.0


class PeerCoefficients:
    """Table of the coefficients of peers' groups in the loss of a step: `method.peer_weights`.

    A peer's completions weigh as much as their gradients agree with the node's own:

        agreement   its agreement / the own halves' agreement
        shrinkage   v_o / max(v_o, its distance), v_o the variance of the own gradient

    limited to [MIN_WEIGHT, 1]. All are exponential means over the steps with a measurement
    (`learner/step/agreement.py`). The weight of a peer is 1 before its second measurement, and while the halves of the
    own groups do not agree with each other. The minimum is above 0, since a peer of weight 0 could not be measured
    again. A restart resets all weights to 1.

    Shrinkage minimizes the squared error of the mix (1 - x) g_o + x g_s of the own gradient and that of a peer with
    bias b. The best x is v_o / (v_o + v_s + |b|^2). A weight w in the sum over all completions gives
    x / (1 - x) = w n_s / n_o, so w = v_s / (v_s + |b|^2). The expected distance is v_o + |b|^2 n_s / n_o, which turns
    w into the formula above.

    Above `MAX_PEERS` the table drops the peers that were measured longest ago.
    """

    def __init__(self, weighting: PeerWeighting | None = "agreement") -> None:
        self._weighting = weighting
        self._own = RunningMean()
        self._peers = LruDict[str, RunningMean](MAX_PEERS)

    def note(self, agreement: Mapping[str, float], among_own: float | None) -> None:
        """Add the measurements of a step: agreement by peer id, and the agreement between the own halves."""
        if among_own is not None:
            self._own.add(among_own)
        for peer_id, value in agreement.items():
            mean = self._peers[peer_id] = self._peers.get(peer_id) or RunningMean()
            mean.add(value)

    def weight(self, peer_id: str) -> float:
        mean, own = self._peers.get(peer_id), self._own.value
        if mean is None or mean.steps < MIN_STEPS:
            return 1.0
        if self._weighting == "shrinkage":
            return max(MIN_WEIGHT, own / max(own, mean.value)) if own > 0 else 1.0
        return max(MIN_WEIGHT, min(1.0, mean.value / own)) if own >= MIN_OWN_AGREEMENT else 1.0


@dataclass(eq=False, repr=False)
class StepPeers:
    """Weights the groups of peers before a step, then credits or charges their senders."""

    context: NodeContext
    peers: PeerManager
    form: TrainForm

    def __post_init__(self) -> None:
        self._suspected = LruDict[bytes, int](MAX_GROUPS)
        self._used, self._charged = LruDict[bytes, None](MAX_GROUPS), LruDict[bytes, None](MAX_GROUPS)
        self._coefficients = PeerCoefficients(self.context.manifest.method.peer_weights)

    def batch(self, groups: Sequence[StoredGroup]) -> list[TrainGroup]:
        """Return the groups in the learner's form. The learner reports those whose bodies it cannot unpack."""
        return [
            self.form.of(
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
