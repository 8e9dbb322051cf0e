"""Energy of GPUs, with an NVML of two GPUs in the test's memory: no GPU is at hand."""

from types import SimpleNamespace

import pytest

from ftis_node.config.home import Home
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.node.daemon import run_node
from ftis_node.telemetry.events import read_events
from ftis_node.telemetry.nvml import MILLIJOULES_PER_WH, EnergyMeter
from tests.node.nodes import whole_node


class FakeNvml:
    """Two GPUs with a counter of energy."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.used_between_reads = 0  # millijoules of each GPU
        self.gpus = [SimpleNamespace(millijoules=0) for _ in range(2)]

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, name):
        return self.gpus[("GPU-a", "GPU-b").index(name)]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        if gpu.millijoules is None:
            raise self.NVMLError("not supported")
        gpu.millijoules += self.used_between_reads
        return gpu.millijoules


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr("ftis_node.telemetry.nvml.opened_nvml", lambda: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.parametrize(
    ("seen", "gpus", "watt_hours"),
    [(None, (), 5), (None, (1,), 3), ("1", (), 3), ("GPU-b, GPU-a", (1,), 2), ("", (), None), (None, (7,), None)],
)
def test_the_energy_of_the_nodes_gpus_is_counted(nvml, monkeypatch, seen, gpus, watt_hours):
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    meter = EnergyMeter(gpus)
    for gpu, energy in zip(nvml.gpus, (2, 3), strict=True):
        gpu.millijoules += energy * MILLIJOULES_PER_WH
    assert (meter.take_wh(), meter.take_wh()) == (watt_hours, None if watt_hours is None else 0)


def test_a_counter_that_begins_again_or_is_missing_gives_no_figure(nvml):
    nvml.gpus[0].millijoules = 9
    meter = EnergyMeter([0])
    nvml.gpus[0].millijoules = 1
    assert meter.take_wh() is None
    nvml.gpus[0].millijoules = None
    assert [meter.take_wh(), EnergyMeter([0]).take_wh(), EnergyMeter([0], is_used=False).take_wh()] == [None] * 3


async def test_the_steps_of_a_node_have_their_energy(tmp_path, tiny_models, nvml):
    nvml.used_between_reads = MILLIJOULES_PER_WH
    factory = InProcessNodeFactory(LoopbackSwarm(), delay=NO_DELAY, seed=0)
    (home := Home(tmp_path)).create()
    async with whole_node(home, tiny_models["s"], factory, device="auto") as parts:
        await run_node(parts, steps=2)
    assert [event["gpu_wh"] for event in read_events(home.events, name="step")] == [2, 2]  # 1 of each GPU
