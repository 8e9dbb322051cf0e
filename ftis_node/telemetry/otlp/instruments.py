"""Adapter from the Prometheus metrics of a status to OpenTelemetry instruments with the same names and labels.

The instruments are those of the table in `metrics.toml`. The values are the samples that Prometheus would scrape.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from ftis_node.telemetry.metrics import all_metrics, metric_families

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import CallbackOptions, Meter, Observation

    from ftis_node.telemetry.status import Status

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of each sample, by the name of its metric."""


class StatusInstruments:
    """Asynchronous instruments that observe the newest status. The thread of the OpenTelemetry SDK calls them."""

    def __init__(self, newest: Callable[[], Status]) -> None:
        self._newest = newest
        self._seen: Status | None = None
        self._samples: Samples = {}

    def register(self, meter: Meter) -> None:
        """Create one instrument for each metric of the table."""
        for name, metric in {metric.name: metric for metric in all_metrics()}.items():
            is_counter = metric.kind == "counter"
            create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            create(name, callbacks=[partial(self._observe, name)], description=metric.help)

    def _observe(self, name: str, _: CallbackOptions) -> list[Observation]:
        from opentelemetry.metrics import Observation

        return [Observation(value, labels) for labels, value in self._of_newest().get(name, ())]

    def _of_newest(self) -> Samples:
        """Return the samples of the newest status; one export converts each status once."""
        status = self._newest()
        if status is not self._seen:
            self._samples = _samples(status)
            self._seen = status
        return self._samples


def _samples(status: Status) -> Samples:
    samples: Samples = defaultdict(list)
    for family in metric_families(status):
        for sample in family.samples:
            samples[sample.name].append((dict(sample.labels), float(sample.value)))
    return samples
