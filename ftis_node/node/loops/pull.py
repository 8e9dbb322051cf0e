"""The pull loop: fetches announced groups of peers and submits their envelopes to validation.

                       +--> [listen] (announcements.py) --------+
    gossip --messages--+                                        +--> queue --> [dispatch] --batches--> fetch --> intake
                       +--> [repair] (announcement_backfill.py) +      ^                                 |
                                                                       +----- missed: ask another -------+

A node pulls each envelope once: from its sender, or from another holder if the sender cannot be reached. In a small
swarm a node pulls all groups. In a large one it pulls the groups that the learner will use (`swarm/demand.py`), and the
groups that rendezvous hashing assigns to it.

If the run allows it, a node pulls a group of another tokenizer as text. Only its sender can encode and sign that text.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.gossip import FetchOutcome, GossipLimits, SwarmPhase
from ftis_node.node.loops.announcement_backfill import BackfillLoop
from ftis_node.node.loops.confirmations import ConfirmationLoop
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.peers.announcements import AnnouncementHandler, AssignmentMembers
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.outgoing_slots import MAX_PEERS, PullSlots
from ftis_node.node.supervision.waits import wait_at_most
from ftis_node.node.training.step_shares import StepShares
from ftis_node.swarm.demand import PullDemand, pull_demand
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.pull_queue import PullItem, PullRequest
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.reputation import Behaviour
from ftis_node.validation import Accepted, Refused, ValidationResult

GATHER_S = 0.02  # wait for further announcements, to request several groups at once
RECHECK_INTERVAL_S = 1.0  # no event reports that the learner needs more groups
MAX_BATCH_BYTES = 8 << 20
BUSY_REST_S = 0.5
RETRY_S = 2.0  # first pause of a group that no peer had
MAX_RETRIES = 6
MAX_LATER = 1024  # groups that wait for a retry
TRANSIENT = frozenset({"quota", "scoring_quota", "scoring_failed", "banned"})  # refusals not caused by the group itself
NOT_THE_GROUP = frozenset({"size", "parse", "unsolicited", "signature"})  # the envelope is not of the requested group
WITHOUT_PARTS = (FetchOutcome.COMPLETE, FetchOutcome.BUSY, FetchOutcome.UNREACHABLE)
NO_ANSWER = (FetchOutcome.UNREACHABLE, FetchOutcome.TIMED_OUT, FetchOutcome.BROKEN)
WRONG_FORM = "tokenizer"  # a refusal of token ids, not of the group as text
PULLS_IN_FLIGHT = 4  # peers from which the node pulls at the same time
PULL_BATCH = 16  # groups
PULL_TIMEOUT_S = 30.0  # of one batch
NUM_OTHERS = 3  # members to request a group from if its sender does not have it
NUM_SHOWN = 4  # ids of abandoned groups in one event
BURST_S = 2.0  # seconds of the download budget that one burst may use


@dataclass(eq=False, repr=False)
class PullLoop(NodePart):
    """Loop that pulls queued groups. At most one request for a group is in flight."""

    intake: IntakeLoop
    announcements: AnnouncementHandler
    backfill: BackfillLoop
    step_shares: StepShares

    def __post_init__(self) -> None:
        self._queue = self.announcements.queue
        self._later = BackoffTable[PullItem](doubling(RETRY_S), capacity=MAX_LATER)
        self._confirmations = ConfirmationLoop(announcements=self.announcements, gossip=self.gossip)
        self._slots = PullSlots(num_slots=PULLS_IN_FLIGHT, guard=self.gossip.guard, peers=self.peers)
        largest = self.context.manifest.wire.max_envelope_bytes  # the announced sizes are claims of peers
        self._most = min(PULL_BATCH, GossipLimits().max_request_bytes // largest)
        rate = self.context.settings.swarm.max_download_bytes_per_s
        self._allowance = TokenBucket(rate_per_s=rate, burst=rate * BURST_S) if rate else None
        self._group_s = LruDict[str, float](MAX_PEERS)  # seconds for a group in the last pull from a peer

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.announcements.listen(), name="pull-listen")
            tasks.create_task(self._dispatch(tasks), name="pull-dispatch")
            tasks.create_task(self.backfill.run(), name="pull-repair")
            tasks.create_task(self._confirmations.run(), name="pull-confirm")

    async def _dispatch(self, tasks: asyncio.TaskGroup) -> None:
        """Send requests for queued groups when new ones are queued, and at intervals while any are left."""
        while True:
            is_waiting = len(self._queue) or len(self._later)
            changed = self.announcements.changed
            await wait_at_most(RECHECK_INTERVAL_S if is_waiting else None, changed)
            if self._slots.num_in_use:  # without pulls in flight, send the first request at once
                await asyncio.sleep(GATHER_S)
            changed.clear()
            await self._pull_what_is_needed(tasks)

    async def _pull_what_is_needed(self, tasks: asyncio.TaskGroup) -> None:
        oldest = time.time() - self.context.manifest.step.max_age_s
        self._queue.drop_older(oldest)
        for item, attempt in self._later.due(now=time.monotonic()):
            self._later.discard(item)
            is_missing = item.created_at > oldest and not self.announcements.has(item)
            if is_missing and self.announcements.can_serve(item.sender, item.id):
                again = replace(item, num_retries=attempt, is_announced=item.is_own)  # others only claim the sender
                self._queue.add(again, holder=item.sender)
        self._queue.reroute(self._slots.is_able)
        is_down = self.gossip.state.state is SwarmPhase.STARTING  # then every pull would fail at once
        if is_down or self.store.space.why_full or self.context.pause.is_paused:
            return
        need, num_pulled = (await self._demand()).need, 0  # assigned groups are pulled beside those needed
        while True:
            await self._slots.wait()
            batch = self._queue.next_request(
                most=self._most,
                most_of=self._most_of,
                need=None if need is None else need - num_pulled,
                max_bytes=MAX_BATCH_BYTES,
                may_ask=self._slots.may_ask,
            )
            if batch is None:
                return
            num_pulled += sum(not item.is_assigned for item in batch.items)
            kind = self._slots.take(batch.source.peer_id)
            if self._allowance is not None:
                await asyncio.sleep(self._allowance.spend(_announced_bytes(batch), now=time.monotonic()))
            tasks.create_task(self._pull_and_release(batch, kind), name=f"pull-{batch.source.peer_id[-6:]}")

    def _most_of(self, peer_id: str) -> int:
        """Return how many groups to request from a peer, so that its answer takes half of the time limit."""
        group_s = self._group_s.get(peer_id)
        return max(1, int(PULL_TIMEOUT_S / 2 / group_s)) if group_s else PULL_BATCH

    async def _pull_and_release(self, batch: PullRequest, kind: str) -> None:
        source = batch.source.peer_id
        verdicts: list[ValidationResult] = []
        try:
            with self.gossip.guard.work_for(source, Place.PULL) as work:
                verdicts = await self._pull(batch)
            if work.failed:  # do not request the unsettled groups from this peer again
                self._queue.missed(batch, missing=[item.id for item in batch.items])
        finally:
            self._slots.release(source, kind)
            self.announcements.changed.set()  # this peer can take the next request
        await self._confirmations.confirm(verdicts, source=source)

    async def _demand(self) -> PullDemand:
        _, num_ready = self.store.reader.ready_counts()
        known = await self.gossip.known_members()
        demand = pull_demand(
            self.context.settings.swarm.pull_policy,
            num_members=len(known),
            per_step=self.step_shares.of_next_step()[1],
            num_ready=num_ready,
            num_in_flight=self._queue.num_in_flight,
        )
        takes_assigned = demand.need is not None and demand.takes_assigned
        self.announcements.members = (
            AssignmentMembers(known, await self.gossip.shard_members()) if takes_assigned else None
        )
        return demand

    async def _pull(self, batch: PullRequest) -> list[ValidationResult]:
        peer_id, as_text = batch.source
        ids = [item.id for item in batch.items]
        began_at = time.monotonic()
        fetched = await self.gossip.fetch(peer_id, ids, as_text=as_text, timeout_s=PULL_TIMEOUT_S)
        if fetched.items:
            self._group_s[peer_id] = (time.monotonic() - began_at) / len(fetched.items)
        if self._allowance is not None:  # more bytes than announced let the next pulls wait longer, fewer shorter
            more_bytes = sum(map(len, fetched.items)) - _announced_bytes(batch)
            if fetched.outcome not in WITHOUT_PARTS:  # part of an item came, too
                more_bytes = max(0, more_bytes)
            self._allowance.spend(more_bytes, now=time.monotonic())
        requested = None if as_text else frozenset(ids)  # a group as text has a different id
        judged = [self.intake.submit(data, origin=peer_id, requested=requested) for data in fetched.items]
        verdicts = await asyncio.gather(*judged)
        here = self._settle(batch, verdicts)
        is_partial = fetched.outcome in (FetchOutcome.BROKEN, FetchOutcome.TIMED_OUT) and bool(here)
        if is_partial:  # each such request delivers a group, so this peer gets the rest of it soon, and is not charged
            self._count_failed(batch, fetched.outcome)
        if is_partial and fetched.outcome is FetchOutcome.TIMED_OUT:  # slow peers share a slot
            self._slots.backoff.failed(peer_id, now=time.monotonic(), num_failures=1)
        if is_partial or fetched.outcome is FetchOutcome.BUSY:
            self._slots.backoff.pause(peer_id, BUSY_REST_S * random.uniform(0.75, 1.25), now=time.monotonic())
            self._queue.put_back(batch)
        else:
            missing = [group_id for group_id in ids if group_id not in here]
            self._note_useless(batch, verdicts, fetched.outcome, missing=missing)
            self._note_outcome(batch, fetched.outcome, missing=missing, is_empty=not fetched.items)
            await self._request_from_others(
                batch, missing=missing, is_answered=fetched.outcome is FetchOutcome.COMPLETE
            )
        return verdicts

    def _settle(self, batch: PullRequest, verdicts: Sequence[ValidationResult]) -> set[bytes]:
        """Remove accepted and refused groups from the queue; return their ids."""
        as_text = batch.source.as_text  # then the body names the id that was requested
        accepted = {v.announced_id if as_text else v.envelope.id for v in verdicts if isinstance(v, Accepted)}
        refused = [v for v in verdicts if isinstance(v, Refused) and not _is_useless(v)]
        wrong_form = {v.group_id for v in refused if v.refusal.reason == WRONG_FORM and v.group_id is not None}
        self.announcements.refuse_of(batch.source.peer_id, wrong_form)
        self._queue.missed(batch, missing=wrong_form)  # another holder may have announced it as text
        self.announcements.refuse(
            v.group_id for v in refused if v.refusal.reason not in TRANSIENT and v.group_id not in wrong_form
        )
        judged = accepted | {v.group_id for v in refused}
        here = {item.id for item in batch.items if item.id in judged}
        self._queue.arrived(here - wrong_form)
        self.context.counters.groups_repaired += sum(item.is_repair and item.id in accepted for item in batch.items)
        return here

    def _note_useless(
        self,
        batch: PullRequest,
        verdicts: Sequence[ValidationResult],
        outcome: FetchOutcome,
        *,
        missing: Sequence[bytes],
    ) -> None:
        """Note groups for which this peer sent useless envelopes: do not request them from it again, so it pays once.

        An unreadable envelope does not show which group it is for. So the method notes one missing group for each
        unreadable envelope, in the order of the request.
        """
        useless = [v for v in verdicts if isinstance(v, Refused) and _is_useless(v)]
        named = {v.group_id for v in useless if v.group_id in missing}
        num_others = len(useless) - len(named) + (outcome is FetchOutcome.TOO_LARGE)
        others = [group_id for group_id in missing if group_id not in named][:num_others]
        self.announcements.refuse_of(batch.source.peer_id, [one for one in missing if one in named or one in others])

    def _note_outcome(
        self, batch: PullRequest, outcome: FetchOutcome, *, missing: Sequence[bytes], is_empty: bool
    ) -> None:
        """Charge a peer for a failed pull, or for an answer that lacks groups that it announced as its own.

        A pull that fails while no member is connected costs nothing: this node's own network is down. The node requests
        groups that an answer lacks from the peer no more, so it pays once. Some groups cannot be sent as text, so such
        an answer costs something only if it is empty.
        """
        peer_id, as_text = batch.source
        if outcome is FetchOutcome.COMPLETE:
            own = {item.id for item in batch.items if item.is_own}
            lacked = [one for one in missing if one in own and self.announcements.can_serve(peer_id, one)]
            self.announcements.refuse_of(peer_id, lacked)
            if not lacked or (as_text and not is_empty):
                self._slots.backoff.discard(peer_id)
                return
        self._slots.backoff.failed(peer_id, now=time.monotonic())
        behaviour = Behaviour.REFUSED if outcome is FetchOutcome.TOO_LARGE else Behaviour.PULL_FAILED
        if outcome not in NO_ANSWER or self.gossip.state.state is SwarmPhase.CONNECTED:
            self.peers.note(peer_id, behaviour, reason=f"pull_{outcome.value}")
        self._count_failed(batch, outcome)

    def _count_failed(self, batch: PullRequest, outcome: FetchOutcome) -> None:
        peer_id = batch.source.peer_id
        self.peers.registry.seen(peer_id).failed_pulls += 1
        self.context.events.write("pull_failed", peer=peer_id, outcome=outcome, num_ids=len(batch.items))

    async def _request_from_others(self, batch: PullRequest, *, missing: Sequence[bytes], is_answered: bool) -> None:
        """Queue missing groups for other holders; retry later, or drop, groups that no known peer has.

        A new peer may have invented the groups that it announced and does not have. The node requests them only from
        others that announced them.
        """
        if not missing:
            return
        is_doubtful = is_answered and self.peers.is_new_peer(batch.source.peer_id)
        doubtful = {item.id for item in batch.items if is_doubtful and item.is_announced}.intersection(missing)
        members = await self.gossip.members()
        others = random.sample(members, min(NUM_OTHERS, len(members)))
        can_serve = self.announcements.can_serve
        for_good = self._queue.missed(batch, missing=doubtful, can_serve=can_serve)
        sought = [group_id for group_id in missing if group_id not in doubtful]
        given_up = self._queue.missed(batch, missing=sought, others=others, can_serve=can_serve)
        for_good += [item for item in given_up if not self._is_retried(item)]
        if for_good:  # one event for all: an attacker may announce many groups that no peer has
            shown = [item.id.hex() for item in for_good[:NUM_SHOWN]]
            self.context.events.write("pull_given_up", source=batch.source.peer_id, num=len(for_good), groups=shown)
        self.announcements.changed.set()

    def _is_retried(self, item: PullItem) -> bool:
        """Queue a group that no known peer has for a retry; return False after the last one."""
        if item.as_text or item.num_retries >= MAX_RETRIES:
            return False
        self._later.failed(item, now=time.monotonic(), num_failures=item.num_retries + 1)
        return True


def _is_useless(verdict: ValidationResult) -> bool:
    return isinstance(verdict, Refused) and (verdict.group_id is None or verdict.refusal.reason in NOT_THE_GROUP)


def _announced_bytes(batch: PullRequest) -> int:
    return sum(item.num_bytes for item in batch.items)
