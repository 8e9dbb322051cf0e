"""Dials peers: first the configured ones, then members found through the directory.

`swarm/topology.py` selects the peers to dial; this file dials them. A round of dialing raises no error, because
the next round repeats failed dials.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node.gossip.membership.reachability import Reachability, reachability_of
from ftis_node.gossip.membership.reconnect import ReconnectSchedule
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.records.addresses import AddressError, parse_address
from ftis_node.swarm.peer_guard import PeerGuard, Place

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ftis_node.gossip.p2pd.session import Session
    from ftis_node.gossip.settings import NetworkSettings

logger = logging.getLogger(__name__)

MAX_LOST_MEMBERS = 64
NUM_PEERS_MET = 8  # connected peers to contact in the directory in one round; they lead to others


def usable_addresses(peer_id: str, claimed: Iterable[str]) -> list[str]:
    """Return the valid addresses among a peer's claims, without the final `/p2p/ID`.

    Addresses that name another peer are dropped.
    """
    believable = []
    for text in claimed:
        try:
            address = parse_address(text)
        except AddressError:
            continue
        if address.peer_id in (peer_id, None) and address.port:
            believable.append(address.without_peer.text)
    return list(dict.fromkeys(believable))


class Dialler:
    """Dialer of peers for one node."""

    def __init__(self, settings: NetworkSettings, *, rng: random.Random, guard: PeerGuard | None = None) -> None:
        self._settings = settings
        self._guard = guard or PeerGuard()
        self._rng = rng
        self.dial_error = ""  # error of a configured peer in the last round

    @property
    def given(self) -> set[str]:
        """Return the peer ids of the configured peers."""
        return {peer.peer_id for peer in self._settings.peer_addresses}

    async def dial_given(self, session: Session) -> None:
        """Dial the configured peers that are not connected, then contact some connected peers in the directory."""
        is_relayed = reachability_of(await session.client.identify()) is Reachability.RELAYED
        session.directory.serve(not (is_relayed or self._settings.is_unreachable))
        connected = await connected_ids(session)
        missing: dict[str, list[str]] = {}
        for peer in self._settings.peer_addresses:
            if peer.peer_id not in connected:
                missing.setdefault(peer.peer_id, []).append(peer.transport)
        errors = [error for error in await self.dial(session, missing) if error]
        real_errors = [error for error in errors if "dial backoff" not in error]  # p2pd pauses after a failed dial
        self.dial_error = real_errors[0] if real_errors else (self.dial_error if errors else "")
        await self._meet_some(session)

    async def keep_redialling(
        self, session: Session, members: Callable[[], Collection[str]], known: Mapping[str, list[str]]
    ) -> None:
        """Redial lost members until canceled, at the addresses in `known` or those that p2pd remembers."""
        settings = self._settings
        schedule = ReconnectSchedule(
            settings.redial, forget_after_s=settings.redial_for_s, capacity=MAX_LOST_MEMBERS, rng=self._rng
        )
        clock = asyncio.get_running_loop().time
        while True:
            schedule.update(members=members(), connected=await connected_ids(session), now=clock())
            await self.dial(session, {peer_id: known.get(peer_id, []) for peer_id in schedule.due(clock())})
            await asyncio.sleep(settings.poll_s)

    async def dial(self, session: Session, peers: Mapping[str, list[str]]) -> list[str]:
        """Dial peers concurrently; return an error or "" for each. Peers paused after a fault are skipped."""
        return list(await asyncio.gather(*(self._dial_one(session, *peer) for peer in peers.items())))

    async def _dial_one(self, session: Session, peer_id: str, addresses: list[str]) -> str:
        if not self._guard.may_work(peer_id):
            return f"{peer_id} is paused after a fault"
        with self._guard.work_for(peer_id, Place.DIAL, passes=(OSError, EOFError)) as work:
            try:
                await session.client.connect(peer_id, addresses, timeout_s=self._settings.dial_timeout_s)
            except P2pdError as error:
                logger.debug("cannot dial %s: %s", peer_id, error)
                return str(error)
        return f"dialling {peer_id} failed unexpectedly" if work.failed else ""

    async def _meet_some(self, session: Session) -> None:
        connected = await connected_ids(session)
        given = connected & self.given
        others = sorted(connected - given)
        self._rng.shuffle(others)
        try:
            await session.directory.join([*given, *others][:NUM_PEERS_MET])
        except TimeoutError:
            logger.debug("the directory did not answer in time")


async def connected_ids(session: Session) -> set[str]:
    """Return the ids of connected peers."""
    return {peer.peer_id for peer in await session.client.connected_peers()}
