"""Export of the metrics of a running node to an OpenTelemetry collector. It never disturbs the node.

The instruments have the names, labels and values that Prometheus would scrape. The OpenTelemetry SDK has a thread that
sends every 60 s and once at the end. Its `OTEL_*` variables set headers, interval, timeout, compression, temporality
and resource attributes. The first fault is logged, the others are not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import util
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ftis_node.errors import ConfigError
from ftis_node.install_hint import how_to_install
from ftis_node.telemetry.metrics import all_metrics, metric_families

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

    from ftis_node.telemetry.status import Status

log = logging.getLogger(__name__)
METRICS_PATH = "/v1/metrics"
LIBRARY = "opentelemetry"
PACKAGES = ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http")
DISABLED = "OTEL_SDK_DISABLED"
CLOSE_LIMIT_S = 1.0
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


@asynccontextmanager
async def exported_metrics(
    endpoint: str, newest: Callable[[], Status], *, version: str, instance: str
) -> AsyncIterator[None]:
    """Export the newest status while the block runs, and once at its end. Does nothing if `endpoint` is empty.

    `endpoint` is the base URL of a collector. `version` and `instance` become resource attributes of the service.
    """
    if not endpoint:
        yield
        return
    faults = _FirstFault(urlsplit(endpoint).netloc)
    with _logged_by(faults):
        provider = None
        try:
            provider = _started(endpoint, newest, version=version, instance=instance)
        except Exception as error:  # such as a value of OTEL_METRIC_EXPORT_INTERVAL that the SDK refuses
            faults.report(f"{type(error).__name__}: {error}")
        try:
            yield
        finally:
            if provider is not None:
                await asyncio.to_thread(_end, provider, faults)


def check_can_export(endpoint: str) -> None:
    """Raise ConfigError if `endpoint` is set and the packages of the extra `otel` are not installed."""
    if endpoint and not all(_is_installed(name) for name in PACKAGES):
        raise ConfigError(
            f"observe.otlp_endpoint needs OpenTelemetry, which is not installed: {how_to_install('otel')}, or remove "
            "the setting"
        )


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _started(endpoint: str, newest: Callable[[], Status], *, version: str, instance: str) -> MeterProvider:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = {"service.name": "ftis-node", "service.version": version, "service.instance.id": instance}
    resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint.rstrip("/") + METRICS_PATH))
    with _enabled():
        provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    StatusInstruments(newest).register(provider.get_meter("ftis_node", version))
    log.info("metrics go to %s by OTLP", urlsplit(endpoint).netloc)
    return provider


@contextmanager
def _enabled() -> Iterator[None]:
    """Remove OTEL_SDK_DISABLED for a moment. `config/no_network_env.py` sets it against the traces of vLLM."""
    value = os.environ.pop(DISABLED, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[DISABLED] = value


def _end(provider: MeterProvider, faults: _FirstFault) -> None:
    try:
        provider.shutdown(CLOSE_LIMIT_S * 1000)
    except Exception as error:
        faults.report(f"{type(error).__name__}: {error}")


@contextmanager
def _logged_by(faults: _FirstFault) -> Iterator[None]:
    """Give the log records of the OpenTelemetry libraries to `faults` alone."""
    library = logging.getLogger(LIBRARY)
    propagates, library.propagate = library.propagate, False
    library.addHandler(faults)
    try:
        yield
    finally:
        library.removeHandler(faults)
        library.propagate = propagates


class _FirstFault(logging.Handler):
    """Handler that logs one line for the first warning."""

    def __init__(self, collector: str) -> None:
        super().__init__(logging.WARNING)
        self._collector = collector
        self._has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self.report(record.getMessage())

    def report(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            what = f"{self._collector} ({cause})"
            log.warning("metrics do not reach %s; the node continues, and further faults are not logged", what)
