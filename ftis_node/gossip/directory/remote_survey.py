"""Reads the members of a run through given peers, without joining the run."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from ftis_node.errors import NetworkError
from ftis_node.gossip.directory.survey import SurveyReader
from ftis_node.gossip.membership.dialler import Dialler
from ftis_node.gossip.p2pd.session import client_only_config, open_session

if TYPE_CHECKING:
    from ftis_node.gossip.directory.survey import RunSurvey
    from ftis_node.gossip.p2pd.session import Session
    from ftis_node.gossip.settings import NetworkSettings

POLL_S = 1.0


async def survey_remotely(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> RunSurvey:
    """Return the members of a run. Raises NetworkError if no member is found in time.

    Raises UsageError and MachineError as `Gossip.start` does.
    """
    dialler = Dialler(settings, rng=random.Random())
    config = client_only_config(settings)
    async with open_session(config, listen=settings.listen_addresses) as session:
        try:
            async with asyncio.timeout(timeout_s):
                return await _poll(session, dialler, SurveyReader(session.directory, guard=config.guard), run_id)
        except TimeoutError:
            why = dialler.dial_error or "the given peers know none"
            raise NetworkError(f"no member of run {run_id} within {timeout_s:.0f} s ({why})") from None


async def _poll(session: Session, dialler: Dialler, reader: SurveyReader, run_id: str) -> RunSurvey:
    while True:
        await dialler.dial_given(session)
        survey = await reader.read(run_id)
        if survey.records or survey.num_unreadable:
            return survey
        await asyncio.sleep(POLL_S)
