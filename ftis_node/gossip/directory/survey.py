"""Reads all members of a run and their records from the directory, for display."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.gossip.p2pd.cancellation import cancel_and_wait
from ftis_node.records.envelope import PeerRecord, open_peer_record
from ftis_node.swarm.peer_guard import PeerGuard, Place
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.gossip.directory.dht import Directory

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
