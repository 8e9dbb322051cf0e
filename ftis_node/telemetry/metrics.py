"""The status snapshot as Prometheus metrics: every number of it is one metric.

A number's path gives its name (`ftis_learner_step`); a table of counts (`groups_refused`) becomes one metric with the
label `key`. So a new figure in the snapshot is a metric without a line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.registry import Collector

    from ftis_node.telemetry.status import Status


def render_metrics(status: Status) -> bytes:
    """The text that a Prometheus server scrapes."""
    registry = CollectorRegistry()
    registry.register(_collector(status))
    return generate_latest(registry)


def _collector(status: Status) -> Collector:
    class FromStatus:
        def collect(self) -> Iterator[GaugeMetricFamily]:
            for section, fields in msgspec.to_builtins(status).items():
                if isinstance(fields, dict):
                    yield from _section_metrics(section, fields)

    return FromStatus()


def _section_metrics(section: str, fields: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    for name, value in fields.items():
        metric = f"ftis_{section}_{name}"
        if isinstance(value, dict):
            family = GaugeMetricFamily(metric, f"status: {section}.{name}", labels=["key"])
            for key, count in value.items():
                family.add_metric([key], count)
            yield family
        elif isinstance(value, int | float):
            yield GaugeMetricFamily(metric, f"status: {section}.{name}", value=value)
