"""Metrics of a bootstrap node for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECTED = "ftis_bootstrap_peers_connected"
RUNS = "ftis_bootstrap_runs"
MEMBERS = "ftis_bootstrap_members"
REFUSED = "ftis_bootstrap_records_refused_total"
HELP = {
    CONNECTED: "Peers of any run that are connected.",
    RUNS: "Runs with members in the directory, at most 8.",
    MEMBERS: "Members of a run in the directory.",
    REFUSED: "Directory records that were refused since the start.",
}


class RecordCounters(Protocol):
    """Counters of the network that the metrics read."""

    records_refused: int


def render_bootstrap_metrics(*, num_connected: int, members: Mapping[str, int], counters: RecordCounters) -> bytes:
    """Return the text that a Prometheus server scrapes. `members` counts by run id."""

    class FromSurvey:
        def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
            yield GaugeMetricFamily(CONNECTED, HELP[CONNECTED], value=num_connected)
            yield GaugeMetricFamily(RUNS, HELP[RUNS], value=len(members))
            family = GaugeMetricFamily(MEMBERS, HELP[MEMBERS], labels=["run_id"])
            for run_id, count in members.items():
                family.add_metric([run_id], count)
            yield family
            yield CounterMetricFamily(REFUSED, HELP[REFUSED], value=counters.records_refused)

    registry = CollectorRegistry()
    registry.register(FromSurvey())
    return generate_latest(registry)
