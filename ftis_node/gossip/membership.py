"""Keeps a node connected to the members of its run.

A round dials the configured peers, registers this node in its bucket, reads buckets until it knows enough members, and
dials some of them. It reads all buckets of the node's own shard, because groups are assigned among its members.

Members are the connected peers that answer the run's "hello" request. A subscription to the run's topic does not show
it: bootstrap nodes subscribe, too, and gossipsub does not see members behind a relay.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.gossip.dialer import Dialer, connected_ids
from ftis_node.gossip.directory.entries import pack_member
from ftis_node.gossip.directory.storage import sample_by_block
from ftis_node.gossip.p2pd.session import Session
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.gossip.types import ConnectionFacts, SwarmState
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import PeerGuard, Place
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, buckets_of, choose_dials, shard_of, shards_in_need

logger = logging.getLogger(__name__)
NUM_BUCKETS_PER_READ = 16
CANDIDATES_FACTOR = 2  # read buckets until this many times `num_target_members` are known
MAX_KNOWN = 512
SEEN_TTLS = 2  # an entry outlives its owner by up to one TTL
MAX_LISTED = 1024  # members of the own shard
MAX_HELLOS_IN_FLIGHT = 16


class MemberProbe:
    """Prober that queries each newly connected peer once, and caches the answers. A silent peer is queried again."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[bool | None]],
        *,
        guard: PeerGuard | None = None,
        first_pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` returns whether a peer is a member, or None if it gave no answer.

        `first_pause_s` follows the first request without an answer; each further one doubles it, up to 64 times.
        `clock` is monotonic, in seconds.
        """
        self._ask = ask
        self._guard = guard or PeerGuard()
        self._is_member: dict[str, bool] = {}  # connected peers that answered
        self._asking: set[str] = set()
        self._clock = clock
        self._silent = BackoffTable[str](doubling(first_pause_s))  # connected peers that gave no answer

    @property
    def members(self) -> list[str]:
        return [peer_id for peer_id, is_member in self._is_member.items() if is_member]

    def update(self, connected: Collection[str], group: asyncio.TaskGroup) -> None:
        """Forget disconnected peers; query new ones and paused ones that are due, in tasks of `group`.

        New ones come first. Peers that gave no answer before get half of the requests in flight, so that they do not
        delay new ones. No peer gains by its id, because the order of a set is random.
        """
        for peer_id in set(self._is_member) - set(connected):
            del self._is_member[peer_id]
        self._silent.keep(connected)
        unknown = set(connected) - set(self._is_member) - self._asking
        for peer_id in sorted(unknown, key=self._silent.has_failed):
            if len(self._asking) >= MAX_HELLOS_IN_FLIGHT // (2 if self._silent.has_failed(peer_id) else 1):
                break
            if not (self._guard.may_work(peer_id) and self._silent.is_due(peer_id, now=self._clock())):
                continue
            self._asking.add(peer_id)
            group.create_task(self._ask_one(peer_id), name=f"gossip-hello {peer_id[-6:]}")

    def recheck(self) -> None:
        """Query peers again that answered no, because a node that has just started may not serve its run yet."""
        self._is_member = dict.fromkeys(self.members, True)

    async def _ask_one(self, peer_id: str) -> None:
        is_member = None
        try:
            with self._guard.work_for(peer_id, Place.HELLO, passes=(OSError, EOFError)):
                is_member = await self._ask(peer_id)
        finally:
            self._asking.discard(peer_id)
        if is_member is None:
            self._silent.failed(peer_id, now=self._clock())
        else:
            self._silent.discard(peer_id)
            self._is_member[peer_id] = is_member


class Membership:
    """One node's membership in one run. Outlives p2pd sessions, because known addresses help after a restart."""

    def __init__(
        self,
        settings: NetworkSettings,
        *,
        run_id: str,
        peer_id: str,
        rng: random.Random,
        num_shards: int = 1,
        guard: PeerGuard | None = None,
    ) -> None:
        self._guard = guard or PeerGuard()
        self._settings = settings
        self._run_id = run_id
        self._peer_id = peer_id
        self._rng = rng
        self._num_shards = num_shards
        self._own_shard = shard_of(peer_id, num_shards)
        self._listed: dict[str, None] = {}  # members of the own shard, as last listed in the directory
        self.read_shards: frozenset[int] = frozenset(range(num_shards))
        self._dialer = Dialer(settings, rng=rng, guard=self._guard)
        self._known = LruDict[str, list[str]](MAX_KNOWN)  # members and their addresses, oldest first
        self._seen_at = LruDict[str, float](MAX_KNOWN)  # when the directory last listed them, by the loop's clock
        self._num_rounds_alone = 0
        self._has_looked = False
        self._next_round_at = 0.0  # time of the event loop
        self._hurry = asyncio.Event()  # set: begin the next round now
        self._facts = ConnectionFacts(num_given=len(self._dialer.given))
        self._probe = MemberProbe(_probe_none)
        self.addresses: list[str] = []

    @property
    def members(self) -> list[str]:
        return self._probe.members

    @property
    def shard_members(self) -> list[str]:
        own = [peer for peer in self._probe.members if shard_of(peer, self._num_shards) == self._own_shard]
        return list(dict.fromkeys([*own, *self._listed]))

    def look_again(self) -> None:
        self._hurry.set()

    def known_members(self) -> list[str]:
        seen_after = asyncio.get_running_loop().time() - SEEN_TTLS * self._settings.member_ttl_s
        listed = [peer_id for peer_id, seen_at in self._seen_at.items() if seen_at > seen_after]
        return list(dict.fromkeys([*self._probe.members, *listed]))

    def state(self) -> SwarmState:
        now = asyncio.get_running_loop().time()
        return self._facts.describe(next_try_in_s=self._next_round_at - now)

    async def keep(self, session: Session) -> None:
        """Run all loops for one p2pd session. Raises OSError or EOFError in a group when the session ends."""
        timeout_s = self._settings.dial_timeout_s
        self._probe = MemberProbe(
            lambda peer_id: session.is_member(peer_id, self._run_id, timeout_s=timeout_s),
            guard=self._guard,
            first_pause_s=self._settings.poll_s,
        )
        self._next_round_at = 0.0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(session, group), name="gossip-watch")
            group.create_task(self._rounds(session), name="gossip-rounds")
            redialing = self._dialer.keep_redialing(session, lambda: self.members, self._known)
            group.create_task(redialing, name="gossip-redial")

    async def _watch(self, session: Session, group: asyncio.TaskGroup) -> None:
        while True:
            self._probe.update(await self.poll(session), group)
            await asyncio.sleep(self._settings.poll_s)

    async def poll(self, session: Session) -> set[str]:
        """Poll p2pd: update state and own addresses; return the ids of connected peers."""
        connected = await connected_ids(session)
        num_members = len(connected.intersection(self._probe.members))
        self.addresses = [f"{address}/p2p/{self._peer_id}" for address in await session.client.identify()]
        if self._facts.num_members and not num_members:
            self._hurry.set()
        self._facts = ConnectionFacts(
            num_members=num_members,
            num_connected=len(connected),
            num_given=len(self._dialer.given),
            num_given_connected=len(connected & self._dialer.given),
            dial_error=self._dialer.dial_error,
            has_looked=self._has_looked,
        )
        return connected

    async def _rounds(self, session: Session) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._hurry.clear()
            self._probe.recheck()
            await self._round(session)
            self._has_looked = True
            await self.poll(session)
            if self._facts.num_members:
                self._num_rounds_alone = 0
                delay_s = self._settings.check_s
            else:
                self._num_rounds_alone += 1
                delay_s = self._settings.retry.delay_s(self._num_rounds_alone, draw=self._rng.random())
            self._next_round_at = clock() + delay_s
            try:
                async with asyncio.timeout(delay_s):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    async def _round(self, session: Session) -> None:
        await self._dialer.dial_given(session)
        try:
            entry = pack_member(self.addresses, num_shards=self._num_shards)
            await session.directory.register(self._run_id, entry, ttl_s=self._settings.member_ttl_s)
            await self._learn_members(session)
        except TimeoutError:
            logger.debug("the directory did not answer in time")
        await self._dial_members(session)

    async def _learn_members(self, session: Session) -> None:
        first, others = self._buckets_to_read()
        listed: dict[str, None] = {}
        num_found = 0
        for at in range(0, NUM_MEMBER_BUCKETS, NUM_BUCKETS_PER_READ):
            if at >= len(first) and num_found >= CANDIDATES_FACTOR * self._settings.num_target_members:
                break
            found = await session.directory.members(self._run_id, [*first, *others][at : at + NUM_BUCKETS_PER_READ])
            for peer_id, addresses in found.items():
                self._known[peer_id] = addresses
                self._seen_at[peer_id] = asyncio.get_running_loop().time()
                if shard_of(peer_id, self._num_shards) == self._own_shard and len(listed) < MAX_LISTED:
                    listed[peer_id] = None
            num_found += len(found)
        self._listed = listed

    def _buckets_to_read(self) -> tuple[list[int], list[int]]:
        """Return the own shard's buckets and one of each shard that lacks members; then all others."""
        first = list(buckets_of(self._own_shard, self._num_shards))
        in_need = shards_in_need(self.members, read=self.read_shards, num_shards=self._num_shards)
        lacking = [buckets_of(shard, self._num_shards) for shard in in_need if shard != self._own_shard]
        first += map(self._rng.choice, lacking)
        others = [bucket for bucket in range(NUM_MEMBER_BUCKETS) if bucket not in first]
        return first, self._rng.sample(others, len(others))

    async def _dial_members(self, session: Session) -> None:
        num_target = self._settings.num_target_members
        chosen = choose_dials(
            sample_by_block(self._known, per_block=num_target, rng=self._rng),
            await connected_ids(session),
            members=self.members,
            num_target=num_target,
            rng=self._rng,
            read=self.read_shards,
            num_shards=self._num_shards,
        )
        await self._dialer.dial(session, {peer_id: self._known[peer_id] for peer_id in chosen})


async def _probe_none(peer_id: str) -> bool | None:
    return None
