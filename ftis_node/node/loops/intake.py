"""The intake loop: validates every envelope, own or foreign, by the same rules, and stores the accepted groups.

    own            --validate, one after the other--+
    known peers'   --validate, one after the other--+--> judged --one commit for all that wait--> verdicts
    unknown peers' --validate, one after the other--+

A peer's group may use its whole time limit in scoring. So own groups have a separate lane, and groups of known peers
leave a third of the scorer's time to own groups. Groups of unknown peers have a separate scoring process, too. The peer
that delivers a group selects the lane, because libp2p has authenticated that peer before the node reads the group.

A commit to disk takes longer than validation. So the loop validates the next envelopes during a commit, and the next
commit stores all groups that passed meanwhile. That is one group on an idle node, and many under load. The loop
returns the verdict of an accepted group only after the group is on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from ftis_node.models import PromptTokenizer
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.peer_manager import FAULT
from ftis_node.node.supervision.waits import to_the_end
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import Group
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.arrivals import AwaitedSenders
from ftis_node.swarm.peer_guard import PeerWork, Place, is_own
from ftis_node.swarm.rate_limits import TokenBucket, known_peers_scoring_s
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.validation import Accepted, Refusal, Refused, ValidationContext, ValidationResult, validate
from ftis_node.validation.rules import not_seen

QUEUE_CAPACITY = 64
COMMIT_CAPACITY = 64  # groups in one commit


@dataclass(frozen=True, slots=True)
class Arrival:
    """An envelope in the queue for validation.

    `origin` is the peer that delivered it; only the signature proves its sender. `requested` holds the ids that this
    node requested from `origin`, None if it did not request by id. `made` is the group if this node generated it.
    """

    data: bytes
    origin: str
    made: Group | None
    requested: Container[bytes] | None
    verdict: asyncio.Future[ValidationResult]

    @property
    def own(self) -> bool:
        return self.made is not None


@dataclass(slots=True)
class _Lane:
    context: ValidationContext
    queue: asyncio.Queue[Arrival] = field(default_factory=lambda: asyncio.Queue(QUEUE_CAPACITY))


@dataclass(eq=False, repr=False)
class IntakeLoop(NodePart):
    """Three lanes, each of which validates one envelope at a time; all feed one bounded queue of accepted groups.

    `newest_offered` returns the newest version of this node's weights that a follower may name, or None. `on_foreign`
    is called with each stored foreign group.
    """

    tokenizer: PromptTokenizer
    scorer: IsolatedScorer
    new_peers_scorer: IsolatedScorer
    awaited_senders: AwaitedSenders
    newest_offered: Callable[[], int | None]
    on_foreign: Callable[[Accepted], None] | None

    def __post_init__(self) -> None:
        self._passed: set[bytes | tuple[str, int]] = set()  # ids and (sender, number) of groups not committed yet
        self._copies: dict[bytes, bytes] = {}  # by id of an original in `_passed`: its copy, which arrived before
        self._judged: asyncio.Queue[tuple[Arrival, Accepted]] = asyncio.Queue(COMMIT_CAPACITY)
        self.stored = asyncio.Event()  # set whenever a group became READY; the step gate clears it
        self._newest_own: asyncio.Queue[Accepted] = asyncio.Queue(1)
        self.own = _Lane(self._checks(self.scorer))
        self._known = _Lane(self._checks(self.scorer, share=known_peers_scoring_s()))
        self._new_peers = _Lane(self._checks(self.new_peers_scorer))

    def _checks(self, scorer: IsolatedScorer, *, share: TokenBucket | None = None) -> ValidationContext:
        """Return a lane's context. `share` bounds the seconds of scoring for all its untrusted senders together."""

        def may_score(sender: str) -> bool:
            has_time = share is None or self.peers.is_trusted(sender) or share.left(now=time.monotonic()) > 0.0
            return has_time and self.peers.may_score(sender)

        def charge(sender: str, seconds: float) -> None:
            if share is not None and not self.peers.is_trusted(sender):
                share.charge(seconds, now=time.monotonic())
            self.peers.charge_scoring(sender, seconds)

        return ValidationContext(
            manifest=self.context.manifest,
            tokenizer=self.tokenizer,
            resolve=lambda ref, cost: scorer.resolve(ref, cost=cost),
            scorer=scorer,
            may_score=may_score,
            charge=charge,
            is_known=lambda group_id: group_id in self._passed or self.store.reader.is_known(group_id),
            has_number=lambda sender, number: (
                (sender, number) in self._passed or self.store.reader.has_number(sender, number)
            ),
            is_banned=self.peers.is_banned,
            within_quota=self.peers.within_quota,
            duplicate_reason=self.peers.copies.duplicate_reason,
            reset_at=self.store.reader.reset_at(),
            own_id=self.context.peer_id,
            newest_offered=self.newest_offered,
        )

    async def submit(
        self, data: bytes, *, origin: str, made: Group | None = None, requested: Container[bytes] | None = None
    ) -> ValidationResult:
        """Submit an envelope (`Arrival`) and wait for its verdict. If it is Accepted, the group is on disk."""
        arrival = Arrival(data, origin, made, requested, asyncio.get_running_loop().create_future())
        lane = self.own if arrival.own else self._new_peers if self.peers.is_new_peer(origin) else self._known
        await lane.queue.put(arrival)
        return await arrival.verdict

    async def next_own(self) -> Accepted:
        """Return the newest stored group that this node's weights sampled, once; wait until there is one."""
        return await self._newest_own.get()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._judge_all(self.own), name="intake-validate-own")
            tasks.create_task(self._judge_all(self._known), name="intake-validate")
            tasks.create_task(self._judge_all(self._new_peers), name="intake-validate-new-peers")
            tasks.create_task(self._commit_all(), name="intake-commit")

    async def _judge_all(self, lane: _Lane) -> None:
        while True:
            arrival = await lane.queue.get()
            accepted = await self._judge(arrival, lane.context)
            if accepted is not None:
                self._passed |= {accepted.envelope.id, (accepted.group.sender, accepted.group.number)}
                await self._judged.put((arrival, accepted))

    async def _judge(self, arrival: Arrival, context: ValidationContext) -> Accepted | None:
        """Return an accepted group; answer for another one. If its validation raises, charge its origin."""
        with self._work_for(arrival, Place.JUDGE):
            verdict = await validate(arrival.data, context, requested=arrival.requested, made=arrival.made)
            if isinstance(verdict, Accepted):
                verdict = self._refuse_if_admitted(verdict, context) or verdict
            if isinstance(verdict, Refused):
                self._answer(arrival, verdict)
                return None
            copy = self.peers.remember(verdict)  # before the next validation: the next envelope may be a copy
            if copy is not None:
                self._copies[verdict.envelope.id] = copy
            return verdict
        self._give_up(arrival)
        return None

    def _refuse_if_admitted(self, accepted: Accepted, context: ValidationContext) -> Refused | None:
        """Return a refusal if another lane has meanwhile admitted the same group, its number, or its completions."""
        refusal = not_seen(accepted.envelope, accepted.group, context)
        if refusal is None and (reason := context.duplicate_reason(accepted.group, accepted.envelope.id)):
            refusal = Refusal(reason, "too many of its completions are duplicates")
        return None if refusal is None else _refused(accepted, refusal)

    def _work_for(self, arrival: Arrival, place: Place) -> PeerWork:
        """Return the guard. It raises the errors of an own group, and charges a peer for those of its group."""
        return self.gossip.guard.work_for(arrival.origin, place, passes=(Exception,) if arrival.own else ())

    def _give_up(self, arrival: Arrival) -> None:
        """Refuse a group that caused an error permanently: other peers would deliver the same bytes."""
        group_id = None
        with self._work_for(arrival, Place.JUDGE):
            group_id = open_envelope(arrival.data, max_bytes=self.context.manifest.wire.max_envelope_bytes).id
        if not arrival.verdict.done():
            arrival.verdict.set_result(Refused(Refusal(FAULT, "see the log"), sender=None, group_id=group_id))

    async def _commit_all(self) -> None:
        while True:
            passed = [await self._judged.get()]
            while not self._judged.empty() and len(passed) < COMMIT_CAPACITY:
                passed.append(self._judged.get_nowait())
            await to_the_end(self._commit(passed))  # a stop must not interrupt between the commit and the counters

    async def _commit(self, passed: Sequence[tuple[Arrival, Accepted]]) -> None:
        for (arrival, accepted), is_new in zip(passed, await self._admit(passed), strict=True):
            self._passed -= {accepted.envelope.id, (accepted.group.sender, accepted.group.number)}
            if is_new is None:
                self._give_up(arrival)
                continue
            with self._work_for(arrival, Place.COUNT) as work:
                self._acknowledge(arrival, accepted, is_new=is_new)
            if work.failed:
                self._give_up(arrival)
        for copy in [self._copies.pop(one.envelope.id) for _, one in passed if one.envelope.id in self._copies]:
            await self.store.release_ready(copy, ReleaseReason.COPY)

    async def _admit(self, passed: Sequence[tuple[Arrival, Accepted]]) -> list[bool | None]:
        """Commit all groups at once; if that fails, each alone. Return whether each is new, None if it fails."""
        groups = [(accepted, arrival.own) for arrival, accepted in passed]
        try:
            return [*await self.store.disk(self.store.buffer.admit_many, groups)]
        except Exception as error:
            if is_own(error):
                raise
        return [await self._admit_one(*each) for each in passed]

    async def _admit_one(self, arrival: Arrival, accepted: Accepted) -> bool | None:
        with self._work_for(arrival, Place.STORE):
            return (await self.store.disk(self.store.buffer.admit_many, [(accepted, arrival.own)]))[0]
        return None

    def _acknowledge(self, arrival: Arrival, accepted: Accepted, *, is_new: bool) -> None:
        group = accepted.group
        if not is_new:
            is_same = self.store.reader.is_known(accepted.envelope.id)
            late = Refusal("duplicate" if is_same else "sequence_reused", "admitted a moment ago")
            self._answer(arrival, _refused(accepted, late))
            return
        self.stored.set()
        if not arrival.own:
            if len(set(group.rewards)) > 1:  # else the group has no gradient, and nobody waits for it
                self.awaited_senders.arrived(group.sender, now=time.monotonic())
            if self.on_foreign is not None:
                self.on_foreign(accepted)
        if arrival.own or self.peers.is_of_own_weights(group):
            if self._newest_own.full():
                self._newest_own.get_nowait()
            self._newest_own.put_nowait(accepted)
        self._answer(arrival, accepted)

    def _answer(self, arrival: Arrival, verdict: ValidationResult) -> None:
        self.peers.settle(verdict, origin=arrival.origin, num_bytes=len(arrival.data))
        if not arrival.verdict.done():
            arrival.verdict.set_result(verdict)


def _refused(accepted: Accepted, refusal: Refusal) -> Refused:
    group = accepted.group
    return Refused(refusal, group.sender, accepted.envelope.id, signed=True, num_tokens=group.num_tokens)
