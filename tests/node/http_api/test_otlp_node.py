"""A real node sends its metrics to a real receiver while it trains and at its end. A failed export does no harm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.home import Home
from tests.node.support import ANY_PORT, started, write_manifest
from tests.telemetry.otlp_receiver import OtlpReceiver, points_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="run `pip install -e .[otel]`")
STEPS = 40


@pytest.mark.timeout(600)
def test_a_node_exports_while_it_runs_and_its_last_status(
    tmp_path: Path, tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_manifest(tmp_path / "run.toml", foreign_wait_s=0.1)
    with OtlpReceiver(failing=range(2, 3)) as receiver:
        monkeypatch.setenv("FTIS_OBSERVE__OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=0123456789abcdef")
        arguments = ("join", "--model", str(tiny_models["s"]), "--task", "arithmetic", "--run", str(manifest))
        more = ("--engine", "torch", "--steps", str(STEPS), "--listen", ANY_PORT)
        with started(tmp_path / "node", *arguments, *more) as node:
            assert node.wait(timeout_s=500) == 0, node.log.read_text()[-3000:]
    assert len(receiver.messages) > 2
    assert receiver.headers[-1]["x-key"] == "0123456789abcdef"
    saved = json.loads(Home(node.home).status.read_bytes())
    assert receiver.resource()["service.instance.id"] == saved["node"]["peer_id"]
    last = {point: value for metric in receiver.metrics() for point, value in points_of(metric).items()}
    assert last[("ftis_node_state", ("state", "stopped"))] == 1
    assert last[("ftis_learner_step",)] == saved["learner"]["step"] == STEPS
    assert last[("ftis_swarm_sent_groups_total",)] == saved["swarm"]["groups_sent"]
    log = node.log.read_text()
    assert log.count("metrics do not reach") == 1
    assert log.count("Transient error") == 1  # in that line; the library logs none itself
    assert "0123456789abcdef" not in log
