"""Asks the directory for a run's manifest, before this node is a member of anything.

A p2pd of its own, with an identity made for this, lives for as long as the question takes.
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

LOOK_AGAIN_S = 1.0


async def find_manifest(settings: NetworkSettings, *, run_id: str, timeout_s: float) -> bytes:
    """The canonical text of a run's manifest. Raises NetworkError where nobody who answers has it in time.

    UsageError and MachineError as `Gossip.start`.
    """
    dialler = Dialler(settings, rng=random.Random())
    async with open_session(client_only_config(settings), listen=settings.listen_addresses) as session:
        try:
            async with asyncio.timeout(timeout_s):
                return await _ask_until_answered(session, dialler, run_id)
        except TimeoutError:
            why = dialler.dial_error or "the peers given do not know it"
            said = f"no manifest of run {run_id} within {timeout_s:.0f} s ({why})"
            raise NetworkError(f"{said}: check the id and --peers, or give --run FILE") from None


async def _ask_until_answered(session: Session, dialler: Dialler, run_id: str) -> bytes:
    while True:
        await dialler.dial_given(session)
        if (canonical := await session.directory.get_manifest(run_id)) is not None:
            return canonical
        await asyncio.sleep(LOOK_AGAIN_S)
