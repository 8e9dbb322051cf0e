"""The users of GPUs, with an NVML in the test's memory: no GPU is at hand."""

from __future__ import annotations

import logging
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.config.schedule import ScheduleSection
from ftis_node.node.loops import pause
from ftis_node.node.pausing import machine
from ftis_node.node.pausing.machine import GRAPHICS_BYTES, SETTLE_S, MachineObserver


class FakeNvml:
    """One GPU with a list of computing processes and one of graphical ones; `error` is what the driver says instead."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})

    def __init__(self, *, computing: tuple[int, ...] = (), drawing: dict[int, int] | None = None) -> None:
        self.computing, self.drawing = computing, drawing or {}
        self.error: Exception | None = None

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.computing]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.drawing.items()]


@pytest.mark.parametrize(
    ("wanted", "nvml", "num_warnings"), [("pause", None, 1), ("pause", FakeNvml(), 0), ("run", None, 0)]
)
def test_a_node_that_cannot_see_the_users_of_gpus_warns_at_its_start(
    tmp_path, monkeypatch, caplog, wanted, nvml, num_warnings
):
    for module in (machine, pause):
        monkeypatch.setattr(module, "opened_nvml", lambda: nvml)
    settings = NodeSettings(model="m", schedule=ScheduleSection(when_gpu_is_used=wanted))
    with caplog.at_level(logging.WARNING):
        assert not pause.first_decision(settings, Home(tmp_path)).is_pause
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == num_warnings
    assert all("when_gpu_is_used has no effect" in text and '".[gpu-figures]"' in text for text in warnings)


def test_a_driver_that_fails_has_no_users_and_gives_one_warning(monkeypatch, caplog):
    now = 0.0
    with subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as other:
        monkeypatch.setattr(machine.psutil.Process, "children", lambda *a, **k: [])  # else it is a process of this one
        nvml = FakeNvml(computing=(other.pid,))
        monkeypatch.setattr(machine, "opened_nvml", lambda: nvml)
        observer = MachineObserver(ScheduleSection(when_gpu_is_used="pause"), clock=lambda: now)
        assert observer.facts().gpu_users == ("sleep",)
        nvml.computing, nvml.drawing = (), {other.pid: GRAPHICS_BYTES - 1}
        now += SETTLE_S
        assert observer.facts().gpu_users == (), "a desktop pauses the node"
        nvml.drawing[other.pid] += 1
        assert observer.facts().gpu_users == ("sleep",)
        now += SETTLE_S
        nvml.error = nvml.NVMLError("Driver/library version mismatch")
        with caplog.at_level(logging.WARNING):
            assert (observer.facts().gpu_users, observer.facts().gpu_users) == ((), ())
        assert [record.getMessage() for record in caplog.records] == [
            "schedule.when_gpu_is_used has no effect while the GPU's driver fails: Driver/library version mismatch"
        ]
        nvml.error = nvml.NVMLError_NotSupported("a part of a GPU")
        assert observer.facts().gpu_users == ("sleep",), "the other list is not read"
        other.kill()
