"""Queries of the directory before this node is a member of any run: a run's manifest, and its members.

A temporary p2pd with a temporary identity runs for the duration of a query.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import NetworkError, RecordError
from ftis_node.gossip.dialer import Dialer
from ftis_node.gossip.p2pd.client import cancel_and_wait
from ftis_node.gossip.p2pd.session import Session, client_only_config, open_session
from ftis_node.records.envelope import PeerRecord, open_peer_record
from ftis_node.swarm.peer_guard import PeerGuard, Place
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.gossip.directory.dht import Directory
    from ftis_node.gossip.settings import NetworkSettings

POLL_S = 1.0
MAX_RECORDS_READ = 200
MAX_READS_IN_FLIGHT = 8
MAX_READING_S = 20.0  # for the records of one run, so that members that have left do not delay the view


@dataclass(frozen=True, slots=True)
class RunSurvey:
    """Directory contents of a run. `manifest` is its canonical text, None if no node has it.

    `num_unreadable` counts members whose record is missing, invalid, encrypted, beyond `MAX_RECORDS_READ`, or not read
    within `MAX_READING_S`.
    """

    run_id: str
    manifest: bytes | None
    records: tuple[PeerRecord, ...]
    num_unreadable: int


class SurveyReader:
    """Reader of records through one directory. A peer whose record raises counts as unreadable."""

    def __init__(self, directory: Directory, *, guard: PeerGuard) -> None:
        self._directory = directory
        self._guard = guard
        self._in_flight = asyncio.Semaphore(MAX_READS_IN_FLIGHT)

    async def read(self, run_id: str) -> RunSurvey:
        """Return the members of a run. Raises TimeoutError if the directory does not answer."""
        manifest = await self._directory.get_manifest(run_id)
        members = list(await self._directory.members(run_id, range(NUM_MEMBER_BUCKETS)))
        records = await self._read_records(run_id, members[:MAX_RECORDS_READ])
        return RunSurvey(run_id, manifest, records, len(members) - len(records))

    async def _read_records(self, run_id: str, members: Sequence[str]) -> tuple[PeerRecord, ...]:
        """Return the records that can be read in time."""
        if not members:
            return ()
        reading = [asyncio.create_task(self._read_record(run_id, member)) for member in members]
        try:
            done, _ = await asyncio.wait(reading, timeout=MAX_READING_S)
        finally:
            await cancel_and_wait(*reading)
        found = await asyncio.gather(*done)
        return tuple(record for record in found if record is not None)

    async def _read_record(self, run_id: str, peer_id: str) -> PeerRecord | None:
        async with self._in_flight:
            with self._guard.work_for(peer_id, Place.RECORD, passes=(OSError, EOFError)):
                return await self._open_record(run_id, peer_id)
        return None

    async def _open_record(self, run_id: str, peer_id: str) -> PeerRecord | None:
        try:
            data = await self._directory.get_record(run_id, peer_id)
            record = None if data is None else open_peer_record(data)
        except (TimeoutError, RecordError):  # no answer, or an invalid or encrypted record: the view omits this member
            return None
        return record if record is not None and (record.peer_id, record.run_id) == (peer_id, run_id) else None


async def find_manifest(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> bytes:
    """Return the canonical text of a run's manifest. Raises NetworkError if no peer provides it in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """
    dialer = Dialer(settings, rng=random.Random())
    async with open_session(client_only_config(settings), listen=settings.listen_addresses) as session:
        try:
            async with asyncio.timeout(timeout_s):
                return await _poll_manifest(session, dialer, run_id)
        except TimeoutError:
            why = dialer.dial_error or "the given peers do not have it"
            problem = f"no manifest of run {run_id} within {timeout_s:.0f} s ({why})"
            raise NetworkError(f"{problem}: check the id and --peers, or give --run FILE") from None


async def _poll_manifest(session: Session, dialer: Dialer, run_id: str) -> bytes:
    while True:
        await dialer.dial_given(session)
        if (canonical := await session.directory.get_manifest(run_id)) is not None:
            return canonical
        await asyncio.sleep(POLL_S)


async def survey_remotely(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> RunSurvey:
    """Return the members of a run. Raises NetworkError if no member is found in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """
    dialer = Dialer(settings, rng=random.Random())
    config = client_only_config(settings)
    async with open_session(config, listen=settings.listen_addresses) as session:
        try:
            async with asyncio.timeout(timeout_s):
                return await _poll_survey(session, dialer, SurveyReader(session.directory, guard=config.guard), run_id)
        except TimeoutError:
            why = dialer.dial_error or "the given peers know none"
            raise NetworkError(f"no member of run {run_id} within {timeout_s:.0f} s ({why})") from None


async def _poll_survey(session: Session, dialer: Dialer, reader: SurveyReader, run_id: str) -> RunSurvey:
    while True:
        await dialer.dial_given(session)
        survey = await reader.read(run_id)
        if survey.records or survey.num_unreadable:
            return survey
        await asyncio.sleep(POLL_S)
