"""The view of a swarm from only the directory, for a bootstrap node or a user without a node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.config.manifest import parse_canonical
from ftis_node.errors import ConfigError
from ftis_node.swarm.overview.view import RunSummary, SwarmView, make_view, swarm_row

if TYPE_CHECKING:
    from ftis_node.gossip.directory.survey import RunSurvey


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
