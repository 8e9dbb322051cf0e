"""Queries of the directory before this node is a member of any run: a run's manifest, and its members."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ftis_node.errors import NetworkError, RecordError
from ftis_node.gossip.dialer import Dialer
from ftis_node.gossip.directory.dht import Directory
from ftis_node.gossip.p2pd.client import cancel_and_wait
from ftis_node.gossip.p2pd.session import Session, open_session
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.records.envelope import PeerRecord, open_peer_record
from ftis_node.swarm.peer_guard import PeerGuard, Place
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS

T = TypeVar("T")
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


async def read_survey(directory: Directory, run_id: str, *, guard: PeerGuard) -> RunSurvey:
    """Return the members of a run. A peer whose record raises counts as unreadable.

    Raises TimeoutError if the directory does not answer.
    """
    manifest = await directory.get_manifest(run_id)
    members = list(await directory.members(run_id, range(NUM_MEMBER_BUCKETS)))
    in_flight = asyncio.Semaphore(MAX_READS_IN_FLIGHT)

    async def read(peer_id: str) -> PeerRecord | None:
        async with in_flight:
            with (
                guard.work_for(peer_id, Place.RECORD, passes=(OSError, EOFError)),
                suppress(TimeoutError, RecordError),  # no answer, or an invalid or encrypted record
            ):
                data = await directory.get_record(run_id, peer_id)
                record = None if data is None else open_peer_record(data)
                if record is not None and (record.peer_id, record.run_id) == (peer_id, run_id):
                    return record
        return None

    reading = [asyncio.create_task(read(member)) for member in members[:MAX_RECORDS_READ]]
    try:
        done, _ = await asyncio.wait(reading, timeout=MAX_READING_S) if reading else ((), ())
    finally:
        await cancel_and_wait(*reading)
    records = tuple(record for task in done if (record := task.result()) is not None)
    return RunSurvey(run_id, manifest, records, len(members) - len(records))


async def find_manifest(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> bytes:
    """Return the canonical text of a run's manifest. Raises NetworkError if no peer provides it in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """

    async def look(session: Session, _: PeerGuard) -> bytes | None:
        return await session.directory.get_manifest(run_id)

    found, dial_error = await _poll(settings, look, timeout_s=timeout_s)
    if found is None:
        problem = f"no manifest of run {run_id} within {timeout_s:.0f} s"
        why = dial_error or "the given peers do not have it"
        raise NetworkError(f"{problem} ({why}): check the id and --peers, or give --run FILE")
    return found


async def survey_remotely(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> RunSurvey:
    """Return the members of a run. Raises NetworkError if no member is found in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """

    async def look(session: Session, guard: PeerGuard) -> RunSurvey | None:
        survey = await read_survey(session.directory, run_id, guard=guard)
        return survey if survey.records or survey.num_unreadable else None

    found, dial_error = await _poll(settings, look, timeout_s=timeout_s)
    if found is None:
        why = dial_error or "the given peers know none"
        raise NetworkError(f"no member of run {run_id} within {timeout_s:.0f} s ({why})")
    return found


async def _poll(
    settings: NetworkSettings, look: Callable[[Session, PeerGuard], Awaitable[T | None]], *, timeout_s: float
) -> tuple[T | None, str]:
    """Call `look` in a temporary session until it finds something, or until `timeout_s` has passed.

    Return what it found, and the last error of dialing the configured peers.
    """
    dialer, parts = Dialer(settings, rng=random.Random()), SessionParts(settings=settings)
    found = None
    async with open_session(parts, listen=settings.listen_addresses) as session:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    await dialer.dial_given(session)
                    if (found := await look(session, parts.guard)) is not None:
                        break
                    await asyncio.sleep(POLL_S)
    return found, dialer.dial_error
