"""Queries of the directory before this node is a member of any run: a run's manifest, and its members.

A temporary p2pd with a temporary identity runs for the duration of a query.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from ftis_node.errors import NetworkError
from ftis_node.gossip.directory.survey import SurveyReader
from ftis_node.gossip.membership.dialler import Dialler
from ftis_node.gossip.p2pd.session import Session, client_only_config, open_session

if TYPE_CHECKING:
    from ftis_node.gossip.directory.survey import RunSurvey
    from ftis_node.gossip.settings import NetworkSettings

POLL_S = 1.0


async def find_manifest(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> bytes:
    """Return the canonical text of a run's manifest. Raises NetworkError if no peer provides it in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """
    dialler = Dialler(settings, rng=random.Random())
    async with open_session(client_only_config(settings), listen=settings.listen_addresses) as session:
        try:
            async with asyncio.timeout(timeout_s):
                return await _poll_manifest(session, dialler, run_id)
        except TimeoutError:
            why = dialler.dial_error or "the given peers do not have it"
            problem = f"no manifest of run {run_id} within {timeout_s:.0f} s ({why})"
            raise NetworkError(f"{problem}: check the id and --peers, or give --run FILE") from None


async def _poll_manifest(session: Session, dialler: Dialler, run_id: str) -> bytes:
    while True:
        await dialler.dial_given(session)
        if (canonical := await session.directory.get_manifest(run_id)) is not None:
            return canonical
        await asyncio.sleep(POLL_S)


async def survey_remotely(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> RunSurvey:
    """Return the members of a run. Raises NetworkError if no member is found in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """
    dialler = Dialler(settings, rng=random.Random())
    config = client_only_config(settings)
    async with open_session(config, listen=settings.listen_addresses) as session:
        try:
            async with asyncio.timeout(timeout_s):
                return await _poll_survey(session, dialler, SurveyReader(session.directory, guard=config.guard), run_id)
        except TimeoutError:
            why = dialler.dial_error or "the given peers know none"
            raise NetworkError(f"no member of run {run_id} within {timeout_s:.0f} s ({why})") from None


async def _poll_survey(session: Session, dialler: Dialler, reader: SurveyReader, run_id: str) -> RunSurvey:
    while True:
        await dialler.dial_given(session)
        survey = await reader.read(run_id)
        if survey.records or survey.num_unreadable:
            return survey
        await asyncio.sleep(POLL_S)
