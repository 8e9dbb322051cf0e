"""OpenTelemetry metrics at a real receiver: the values of Prometheus, one warning for all faults, no import if off."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ftis_node.cli.app import run
from ftis_node.config.node import load_node_settings
from ftis_node.errors import ConfigError
from ftis_node.telemetry.metrics import all_metrics, help_of, render_metrics
from ftis_node.telemetry.otlp import PACKAGES, exported_metrics
from ftis_node.telemetry.secrets import redacted
from ftis_node.telemetry.status import LearnerStatus
from tests.telemetry.otlp_receiver import OtlpReceiver, kind_of, points_of
from tests.telemetry.test_metrics import STATUS
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftis_node.telemetry.status import Status

pytest.importorskip("opentelemetry.sdk.metrics", reason="run `pip install -e .[otel]`")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="run `pip install -e .[otel]`")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


async def export(
    endpoint: str,
    status: Status = STATUS,
    *,
    until: Callable[[], Any] = lambda: True,
    last: Status | None = None,
) -> None:
    """Export `status` at the interval of the environment until the condition holds, and `last` at the end."""
    present = status
    async with exported_metrics(endpoint, lambda: present, version="1.2.3", instance="12D3Koo"):
        await eventually(until)
        present = last or status


async def test_a_collector_receives_the_metrics_that_prometheus_reads(receiver: OtlpReceiver) -> None:
    await export(receiver.url)
    metrics = receiver.metrics()
    families = list(text_string_to_metric_families(render_metrics(STATUS).decode()))
    scraped = {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }
    assert len(scraped) > 60
    assert {point: value for metric in metrics for point, value in points_of(metric).items()} == scraped
    kinds = {metric.name: metric.kind for metric in all_metrics()}
    assert {metric.name: kind_of(metric) for metric in metrics} == {
        name: kinds[name] for metric in metrics if (name := metric.name)
    }
    assert all(metric.description == help_of(metric.name) for metric in metrics)


async def test_a_metric_without_a_present_value_is_absent(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    later = msgspec.structs.replace(STATUS, learner=LearnerStatus(state="ready", step=8))
    await export(receiver.url, until=lambda: receiver.messages, last=later)
    first, last = receiver.metrics(0), receiver.metrics()
    assert "ftis_learner_loss" in {metric.name for metric in first}
    assert "ftis_learner_loss" not in {metric.name for metric in last}
    (step,) = [points_of(metric) for metric in last if metric.name == "ftis_learner_step"]
    assert step == {("ftis_learner_step",): 8}


async def test_the_resource_names_the_service_and_the_environment_overrides_it(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await export(receiver.url)
    assert receiver.resource().items() >= {
        ("service.name", "ftis-node"), ("service.version", "1.2.3"), ("service.instance.id", "12D3Koo"),
    }  # fmt: skip
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=gpu-7,deployment.environment.name=lab")
    await export(receiver.url)
    assert receiver.resource().items() >= {
        ("service.name", "mine"), ("service.instance.id", "gpu-7"), ("deployment.environment.name", "lab"),
    }  # fmt: skip


async def test_the_environment_variables_of_the_exporter_are_used(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-scope=team-a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "DELTA")
    await export(f"{receiver.url}/collector/")
    assert receiver.paths == ["/collector/v1/metrics"]
    assert receiver.headers[-1]["x-scope"] == "team-a"
    assert receiver.headers[-1]["content-encoding"] == "gzip"
    deltas = [metric.sum.aggregation_temporality for metric in receiver.metrics() if kind_of(metric) == "counter"]
    assert set(deltas) == {1}  # AGGREGATION_TEMPORALITY_DELTA


async def test_the_sdk_is_enabled_for_the_metrics_only(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with exported_metrics(receiver.url, lambda: STATUS, version="1", instance="i"):
        assert os.environ["OTEL_SDK_DISABLED"] == "true"
    assert receiver.metrics()


@pytest.mark.parametrize("fault", ["absent", "503", "400", "variable"])
async def test_a_fault_is_logged_once_and_the_node_continues(
    fault: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "0" if fault == "variable" else "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    receiver.answer = int(fault) if fault.isdigit() else 200
    url = "http://127.0.0.1:9" if fault == "absent" else receiver.url
    caplog.set_level(logging.DEBUG)

    def warnings() -> list[logging.LogRecord]:
        return [one for one in caplog.records if one.levelno >= logging.WARNING]

    await export(url, until=lambda: warnings() and (not fault.isdigit() or len(receiver.paths) > 1))
    assert [one.name for one in warnings()] == ["ftis_node.telemetry.otlp"]
    assert warnings()[0].getMessage().startswith(f"metrics do not reach {url.removeprefix('http://')} (")
    assert logging.getLogger("opentelemetry").propagate
    assert not logging.getLogger("opentelemetry").handlers


async def test_a_status_that_cannot_be_converted_is_logged_once(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    invalid = msgspec.structs.replace(STATUS, learner=LearnerStatus(state="ready", step="seven"))  # type: ignore[arg-type]
    await export(receiver.url, invalid)
    assert [one.levelname for one in caplog.records if one.levelno >= logging.WARNING] == ["WARNING"]


def test_a_node_without_an_endpoint_imports_no_opentelemetry() -> None:
    code = """
import asyncio, sys
import ftis_node.node.startup.run
from ftis_node.telemetry.otlp import check_can_export, exported_metrics
async def off():
    async with exported_metrics("", None, version="", instance=""):
        check_can_export("")
asyncio.run(off())
sys.exit(", ".join(name for name in sys.modules if name.startswith("opentelemetry")) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [*PACKAGES, "opentelemetry"])
def test_a_missing_package_is_reported_before_the_model_is_loaded(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("FTIS_OBSERVE__OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert run(["join", "--model", "missing/model", "--home", str(tmp_path / "home")]) == 2
    assert capsys.readouterr().err == (
        "ftis-node: observe.otlp_endpoint needs OpenTelemetry, which is not installed: "
        'run `pip install -e ".[otel]"` in the clone of ftis-node, '
        "or remove the setting\n"
    )


@pytest.mark.parametrize(
    "value",
    [
        "127.0.0.1:4318",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://me:my-password@host",  # not-a-secret: an example
        "http://host/?token=x",
    ],
)
def test_an_endpoint_is_a_base_url_without_credentials(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTIS_OBSERVE__OTLP_ENDPOINT", value)
    with pytest.raises(ConfigError, match=r"observe\.otlp_endpoint is not http://HOST:PORT") as error:
        load_node_settings(Path("absent.toml"), model="M")
    assert "my-password" not in redacted(str(error.value))
    monkeypatch.setenv("FTIS_OBSERVE__OTLP_ENDPOINT", "https://collector.example.org/otlp")
    assert load_node_settings(Path("absent.toml"), model="M").observe.collector == "collector.example.org"
