"""The view of a swarm through given peers, for a user without a node."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.node.peers.survey_view import view_of

if TYPE_CHECKING:
    from ftis_node.swarm.overview.view import SwarmView

TIMEOUT_S = 60.0


def survey_run(run_id: str, peers: tuple[str, ...]) -> SwarmView:
    """Return the view of a run through `peers` (multiaddrs). Raise NetworkError if no member is found."""
    from ftis_node.gossip.directory.remote_survey import survey_remotely
    from ftis_node.gossip.settings import NetworkSettings

    folder = Path(tempfile.mkdtemp(prefix="ftis-look-"))
    settings = NetworkSettings(sockets_dir=folder, peers=peers)
    try:
        return view_of(asyncio.run(survey_remotely(settings, run_id=run_id, timeout_s=TIMEOUT_S)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
