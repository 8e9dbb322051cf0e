"""The view of a run from the directory alone, as a bootstrap node or `ftis-node swarm --peers` shows it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ftis_node.config.manifest import parse_canonical
from ftis_node.errors import ConfigError
from ftis_node.gossip.directory.lookup import RunSurvey, survey_remotely
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.swarm.overview import RunSummary, SwarmView, make_view, swarm_row

SURVEY_TIMEOUT_S = 60.0


def view_of(survey: RunSurvey) -> SwarmView:
    """Return the view of the directory's records. The time of a record is by its peer's clock."""
    now = time.time()
    rows = [swarm_row(record, seen_at=min(record.created_at, now)) for record in survey.records]
    run = RunSummary(survey.run_id)
    if survey.manifest is not None:
        with suppress(ConfigError):  # a manifest of another version of ftis-node
            run = RunSummary.of(parse_canonical(survey.manifest, source=f"run {survey.run_id}"))
    return make_view(rows, run=run, now=now, num_unreadable=survey.num_unreadable)


def survey_run(run_id: str, peers: tuple[str, ...]) -> SwarmView:
    """Return the view of a run through `peers` (multiaddrs). Raise NetworkError if no member is found."""
    with tempfile.TemporaryDirectory(prefix="ftis-look-", ignore_cleanup_errors=True) as folder:
        settings = NetworkSettings(sockets_dir=Path(folder), peers=peers)
        return view_of(asyncio.run(survey_remotely(settings, run_id=run_id, timeout_s=SURVEY_TIMEOUT_S)))
