"""View of a swarm from only the directory, for a bootstrap node or a user without a node."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.manifest import parse_canonical
from ftis_node.errors import ConfigError
from ftis_node.swarm.overview.view import RunSummary, SwarmView, make_view, swarm_row

if TYPE_CHECKING:
    from ftis_node.gossip.directory.survey import RunSurvey

TIMEOUT_S = 60.0


def view_of(survey: RunSurvey) -> SwarmView:
    """Return the view of the directory's records. The time of a record is by its peer's clock."""
    now = time.time()
    rows = [swarm_row(record, seen_at=min(record.created_at, now)) for record in survey.records]
    return make_view(rows, run=_summary(survey), now=now, num_unreadable=survey.num_unreadable)


def _summary(survey: RunSurvey) -> RunSummary:
    if survey.manifest is None:
        return RunSummary(survey.run_id)
    try:
        return RunSummary.of(parse_canonical(survey.manifest, source=f"run {survey.run_id}"))
    except ConfigError:  # a manifest of another version of ftis-node
        return RunSummary(survey.run_id)


def survey_run(run_id: str, peers: tuple[str, ...]) -> SwarmView:
    """Return the view of a run through `peers` (multiaddrs). Raise NetworkError if no member is found."""
    from ftis_node.gossip.directory.lookup import survey_remotely
    from ftis_node.gossip.settings import NetworkSettings

    folder = Path(tempfile.mkdtemp(prefix="ftis-look-"))
    settings = NetworkSettings(sockets_dir=folder, peers=peers)
    try:
        return view_of(asyncio.run(survey_remotely(settings, run_id=run_id, timeout_s=TIMEOUT_S)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
