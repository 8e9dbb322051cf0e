"""Dials peers: first the configured ones, then members found through the directory; and tests addresses for `doctor`.

A round of dialing raises no error, because the next round repeats failed dials. Lost members are redialed soon, then
less often, so that both halves of a partitioned network reconnect.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftis_node.backoff import BackoffTable
from ftis_node.gossip.multiaddr import PeerAddress, Reachability, reachability_of
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.p2pd.relay_limit import RelayLimit, fetch_limit
from ftis_node.gossip.p2pd.session import Session, open_session
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import PeerGuard, Place

logger = logging.getLogger(__name__)
MAX_LOST_MEMBERS = 64
MAX_REDIALS = 60  # of a lost member, within about 15 minutes
NUM_PEERS_MET = 8  # connected peers to contact in the directory in one round; they lead to others
PROBE_TIMEOUT_S = 8.0


class Dialer:
    def __init__(self, settings: NetworkSettings, *, rng: random.Random, guard: PeerGuard | None = None) -> None:
        self._settings = settings
        self._guard = guard or PeerGuard()
        self._rng = rng
        self.dial_error = ""  # error of a configured peer in the last round

    @property
    def given(self) -> set[str]:
        return {peer.peer_id for peer in self._settings.peer_addresses}

    async def dial_given(self, session: Session) -> None:
        """Dial the configured peers that are not connected, then contact some connected peers in the directory."""
        is_relayed = reachability_of(await session.client.identify()) is Reachability.RELAYED
        session.directory.serve(not is_relayed)
        connected = await connected_ids(session)
        missing: dict[str, list[str]] = {}
        for peer in self._settings.peer_addresses:
            if peer.peer_id not in connected:
                missing.setdefault(peer.peer_id, []).append(peer.transport)
        errors = [error for error in await self.dial(session, missing) if error]
        real_errors = [error for error in errors if "dial backoff" not in error]  # p2pd pauses after a failed dial
        self.dial_error = real_errors[0] if real_errors else (self.dial_error if errors else "")
        connected = await connected_ids(session)
        others = sorted(connected - self.given)
        self._rng.shuffle(others)
        try:
            await session.directory.join([*(connected & self.given), *others][:NUM_PEERS_MET])
        except TimeoutError:
            logger.debug("the directory did not answer in time")

    async def keep_redialing(
        self, session: Session, members: Callable[[], Collection[str]], known: Mapping[str, list[str]]
    ) -> None:
        """Redial lost members until canceled, at the addresses in `known` or those that p2pd remembers."""
        lost = BackoffTable[str](self._settings.redial, capacity=MAX_LOST_MEMBERS, rng=self._rng)
        met = LruDict[str, None](MAX_LOST_MEMBERS)  # the members met last
        clock = asyncio.get_running_loop().time
        while True:
            met.update(dict.fromkeys(members()))
            connected, now = await connected_ids(session), clock()
            for peer_id in met:
                if peer_id in connected:
                    lost.discard(peer_id)
                elif peer_id not in lost:
                    lost.failed(peer_id, now=now)
            due = lost.due(now=now)
            for peer_id, num_dials in due:
                lost.failed(peer_id, now=now)
                if num_dials >= MAX_REDIALS:
                    lost.discard(peer_id)
                    met.pop(peer_id, None)
            await self.dial(session, {peer_id: known.get(peer_id, []) for peer_id, _ in due})
            await asyncio.sleep(self._settings.poll_s)

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
        return f"dialing {peer_id} failed unexpectedly" if work.failed else ""


async def connected_ids(session: Session) -> set[str]:
    return {peer.peer_id for peer in await session.client.connected_peers()}


@dataclass(frozen=True, slots=True)
class AddressProbe:
    """Result of dialing one address. `error` is empty if the dial succeeded.

    `clock_skew_s` is the peer's clock minus ours. `is_in_directory` is true if the peer answers directory queries, so
    that members can be found through it.
    """

    address: str
    error: str = ""
    dial_s: float = 0.0
    is_in_directory: bool = False
    clock_skew_s: float | None = None
    relay_limit: RelayLimit | None = None


@dataclass(frozen=True, slots=True)
class NetworkProbe:
    """Results for all tested addresses, and this machine's reachability according to its own addresses."""

    addresses: tuple[AddressProbe, ...]
    reachability: Reachability


async def probe_network(peers: tuple[PeerAddress, ...], *, listen: tuple[str, ...], sockets_dir: Path) -> NetworkProbe:
    """Dial each address in turn. Raises UsageError and MachineError if our own p2pd does not start."""
    probes = []
    reachability = Reachability.UNKNOWN
    for peer in peers:  # one p2pd for each address: an open connection would hide the next address
        settings = NetworkSettings(sockets_dir=sockets_dir, listen=listen, use_nat_helpers=False, stop_timeout_s=0.5)
        async with open_session(SessionParts(settings=settings), listen=settings.listen_addresses) as session:
            reachability = reachability_of(session.listening_on)
            probes.append(await _probe(session, peer))
    return NetworkProbe(tuple(probes), reachability)


async def _probe(session: Session, peer: PeerAddress) -> AddressProbe:
    began_at = time.monotonic()
    try:
        await session.client.connect(peer.peer_id, [peer.transport], timeout_s=PROBE_TIMEOUT_S)
    except P2pdError as error:
        return AddressProbe(peer.text, error=str(error))
    dial_s = time.monotonic() - began_at
    try:
        is_in_directory = await session.directory.join([peer.peer_id]) > 0
    except TimeoutError:
        is_in_directory = False
    return AddressProbe(
        peer.text,
        dial_s=dial_s,
        is_in_directory=is_in_directory,
        clock_skew_s=next(iter(session.directory.skews_s), None),
        relay_limit=await fetch_limit(session.client, peer.peer_id, timeout_s=PROBE_TIMEOUT_S),
    )
