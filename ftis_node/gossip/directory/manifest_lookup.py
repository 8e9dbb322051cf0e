"""Reads a run's manifest from the directory, before this node is a member of any run.

A temporary p2pd with a temporary identity runs for the duration of the query.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from ftis_node.errors import NetworkError
from ftis_node.gossip.membership.dialler import Dialler
from ftis_node.gossip.p2pd.session import Session, client_only_config, open_session

if TYPE_CHECKING:
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
                return await _poll(session, dialler, run_id)
        except TimeoutError:
            why = dialler.dial_error or "the given peers do not have it"
            problem = f"no manifest of run {run_id} within {timeout_s:.0f} s ({why})"
            raise NetworkError(f"{problem}: check the id and --peers, or give --run FILE") from None


async def _poll(session: Session, dialler: Dialler, run_id: str) -> bytes:
    while True:
        await dialler.dial_given(session)
        if (canonical := await session.directory.get_manifest(run_id)) is not None:
            return canonical
        await asyncio.sleep(POLL_S)
