"""A bootstrap node: directory, relay and forwarder for any number of runs, without membership in any.

Two members behind home routers often reach each other only through a relay, and gossipsub does not use relays. So the
bootstrap node subscribes to the topics of the runs in its part of the directory, and forwards their messages.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from itertools import islice

from ftis_node.gossip.dialer import Dialer
from ftis_node.gossip.directory.lookup import RunSurvey, read_survey
from ftis_node.gossip.names import topic
from ftis_node.gossip.p2pd.session import Session
from ftis_node.gossip.p2pd.supervisor import P2pdSupervisor
from ftis_node.gossip.pubsub import Subscriptions
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.gossip.types import PeerConnection
from ftis_node.records.identity import Identity

MAX_RUNS_SURVEYED = 8
MAX_TOPICS = 256
logger = logging.getLogger(__name__)


class BootstrapNode:
    """Bootstrap node; runs until closed. `settings.peers` may name other bootstrap nodes: they share one directory."""

    def __init__(
        self,
        settings: NetworkSettings,
        *,
        identity: Identity,
        pinned_runs: Sequence[str] = (),
    ) -> None:
        """`pinned_runs` are ids of runs that the survey reads, and the node forwards, before all others."""
        parts = SessionParts(settings=settings, identity=identity, is_public=True)
        self._settings = settings
        self.pinned_runs = pinned_runs
        self.guard, self.counters = parts.guard, parts.counters
        self._dialer = Dialer(settings, rng=random.Random(), guard=self.guard)
        self._has_ended = asyncio.Event()
        self._error: BaseException | None = None
        self.peer_id = identity.peer_id
        self.addresses: list[str] = []
        self.num_runs_omitted = 0  # by the last survey
        self._supervisor = P2pdSupervisor(parts, self._work, on_end=self._on_end)

    async def start(self) -> None:
        """Return once this node can be dialed. Raises the same errors as `Gossip.start`."""
        await self._supervisor.start()

    async def run_until_closed(self) -> None:
        """Wait until the node is closed. Raises the error if one ended it earlier."""
        await self._has_ended.wait()
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        await self._supervisor.close()

    async def connected_peers(self) -> list[PeerConnection]:
        return [] if self._supervisor.session is None else await self._supervisor.session.client.connected_peers()

    async def survey(self) -> list[RunSurvey]:
        """Return at most `MAX_RUNS_SURVEYED` runs, pinned ones first, then the largest.

        Those that cannot be read in time are omitted. Raises TimeoutError if no run can be read.
        """
        session = self._supervisor.session
        if session is None:
            return []
        stored = session.directory.stored_runs()
        chosen = list(dict.fromkeys([*self.pinned_runs, *stored]))[:MAX_RUNS_SURVEYED]
        self.num_runs_omitted = len(set(stored) - set(chosen))
        surveys = await asyncio.gather(*(self._read(session, run_id) for run_id in chosen))
        if chosen and not any(surveys):
            raise TimeoutError("no run in the directory could be read")
        return [survey for survey in surveys if survey is not None]

    async def _read(self, session: Session, run_id: str) -> RunSurvey | None:
        """Return the records of a run; None without an answer: anyone may store a run, which must not hide others."""
        try:
            return await read_survey(session.directory, run_id, guard=self.guard)
        except TimeoutError as error:
            logger.debug("the directory has no answer about run %s: %r", run_id, error)
            return None

    async def _work(self, session: Session, on_ready: Callable[[], None]) -> None:
        self.addresses = [f"{address}/p2p/{self.peer_id}" for address in session.listening_on]
        on_ready()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_dialing(session), name="bootstrap-dial")
            group.create_task(self._keep_forwarding(session), name="bootstrap-forward")

    async def _keep_forwarding(self, session: Session) -> None:
        """Subscribe to the topics of pinned runs, then of the largest, in the local part of the directory.

        Discard their messages.

        Raises OSError or EOFError in a group if p2pd is lost.
        """
        subscriptions, forwarded = Subscriptions[str]((), on_message=lambda name, message: None), frozenset[str]()
        async with asyncio.TaskGroup() as group:
            group.create_task(subscriptions.follow(session.client.subscribe))
            while True:
                runs = session.directory.stored_runs()
                runs = {run_id: runs[run_id] for run_id in (*self.pinned_runs, *runs) if run_id in runs}
                of_runs = (topic(run_id, shard) for run_id, run in runs.items() for shard in range(run.num_shards))
                topics = frozenset(islice(of_runs, MAX_TOPICS))
                for name in sorted(topics - forwarded):
                    logger.info("forwarding announcements of %s", name)
                forwarded = topics
                await subscriptions.choose(topics)
                await asyncio.sleep(self._settings.forward_s)

    async def _keep_dialing(self, session: Session) -> None:
        while True:
            await self._dialer.dial_given(session)
            await asyncio.sleep(self._settings.check_s)

    def _on_end(self, error: BaseException | None) -> None:
        self._error = error
        self._has_ended.set()
