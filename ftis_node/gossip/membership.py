"""Keeps a node among the members of its run.

| loop | consumes | produces | waits for |
|---|---|---|---|
| watch | p2pd's list of peers | questions to new ones; members, the standing | a second |
| rounds | the given peers, the run's buckets | connections, our entry | its time, or the loss of the last member |

A round dials the given peers, registers this node in its bucket, reads buckets until it knows enough members, and dials
some of them. A node alone has its next round after a back-off; one with members once a minute.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node.gossip.dialling import Dialler, believable_addresses, choose_dials, connected_ids
from ftis_node.gossip.entries import pack_addresses
from ftis_node.gossip.names import NUM_MEMBER_BUCKETS
from ftis_node.gossip.roster import Roster
from ftis_node.gossip.standing import Standing

if TYPE_CHECKING:
    import random

    from ftis_node.gossip.base import SwarmState
    from ftis_node.gossip.session import Session
    from ftis_node.gossip.settings import NetworkSettings

logger = logging.getLogger(__name__)

NUM_BUCKETS_PER_READ = 16
CANDIDATES_FACTOR = 2  # buckets are read until this many times the wanted members are known
MAX_KNOWN = 256


class Membership:
    """One node's place in one run. Outlives p2pd: what it learned of members helps after a restart."""

    def __init__(self, settings: NetworkSettings, *, run_id: str, peer_id: str, rng: random.Random) -> None:
        self._settings = settings
        self._run_id = run_id
        self._peer_id = peer_id
        self._rng = rng
        self._dialler = Dialler(settings, rng=rng)
        self._known: dict[str, list[str]] = {}  # members and their addresses, oldest first
        self._num_lonely_rounds = 0
        self._has_looked = False
        self._next_round_at = 0.0  # time of the event loop
        self._alone = asyncio.Event()
        self._standing = Standing(num_given=len(self._dialler.given))
        self._roster = Roster(_ask_nobody)
        self.addresses: list[str] = []

    @property
    def members(self) -> list[str]:
        """Connected members, as of the last look."""
        return self._roster.members

    def state(self) -> SwarmState:
        """Where the node stands, as of the last look."""
        now = asyncio.get_running_loop().time()
        return self._standing.describe(next_try_in_s=self._next_round_at - now)

    async def keep(self, session: Session) -> None:
        """Both loops, for one life of p2pd. Raises OSError or EOFError in a group where that life ends."""
        timeout_s = self._settings.dial_timeout_s
        self._roster = Roster(lambda peer_id: session.speaks_run(peer_id, self._run_id, timeout_s=timeout_s))
        self._next_round_at = 0.0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(session, group), name="gossip-watch")
            group.create_task(self._rounds(session), name="gossip-rounds")

    async def _watch(self, session: Session, group: asyncio.TaskGroup) -> None:
        while True:
            self._roster.update(await self.look(session), group)
            await asyncio.sleep(self._settings.poll_s)

    async def look(self, session: Session) -> set[str]:
        """Sees who is connected, which it returns, and by which addresses this node can be dialled."""
        connected = await connected_ids(session)
        num_members = len(connected.intersection(self._roster.members))
        self.addresses = [f"{address}/p2p/{self._peer_id}" for address in await session.control.identify()]
        if self._standing.num_members and not num_members:
            self._alone.set()
        self._standing = Standing(
            num_members=num_members,
            num_connected=len(connected),
            num_given=len(self._dialler.given),
            num_given_connected=len(connected & self._dialler.given),
            dial_error=self._dialler.dial_error,
            has_looked=self._has_looked,
        )
        return connected

    async def _rounds(self, session: Session) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._alone.clear()
            self._roster.ask_again()
            await self._round(session)
            self._has_looked = True
            await self.look(session)
            if self._standing.num_members:
                self._num_lonely_rounds = 0
                delay_s = self._settings.check_s
            else:
                self._num_lonely_rounds += 1
                delay_s = self._settings.retry.delay_s(self._num_lonely_rounds, draw=self._rng.random())
            self._next_round_at = clock() + delay_s
            try:
                async with asyncio.timeout(delay_s):
                    await self._alone.wait()
            except TimeoutError:
                continue

    async def _round(self, session: Session) -> None:
        await self._dialler.dial_given(session)
        try:
            addresses = pack_addresses(self.addresses)
            await session.directory.register(self._run_id, addresses, ttl_s=self._settings.member_ttl_s)
            await self._learn_members(session)
        except TimeoutError:
            logger.debug("the directory did not answer in time")
        await self._dial_members(session)

    async def _learn_members(self, session: Session) -> None:
        """Reads buckets in random order until enough members are known: a few in a large run, all in a small one."""
        buckets = self._rng.sample(range(NUM_MEMBER_BUCKETS), NUM_MEMBER_BUCKETS)
        num_found = 0
        for at in range(0, NUM_MEMBER_BUCKETS, NUM_BUCKETS_PER_READ):
            found = await session.directory.members(self._run_id, buckets[at : at + NUM_BUCKETS_PER_READ])
            for peer_id, claimed in found.items():
                self._known.pop(peer_id, None)
                self._known[peer_id] = believable_addresses(peer_id, claimed)
            num_found += len(found)
            if num_found >= CANDIDATES_FACTOR * self._settings.num_members_wanted:
                break
        for peer_id in list(self._known)[:-MAX_KNOWN]:
            del self._known[peer_id]

    async def _dial_members(self, session: Session) -> None:
        chosen = choose_dials(
            self._known,
            await connected_ids(session),
            num_members=len(self.members),
            num_wanted=self._settings.num_members_wanted,
            rng=self._rng,
        )
        await self._dialler.dial(session, {peer_id: self._known[peer_id] for peer_id in chosen})


async def _ask_nobody(peer_id: str) -> bool | None:
    return None
