"""Energy and power limit of GPUs, with an NVML of two GPUs in the test's memory: no GPU is at hand."""

import logging
from types import SimpleNamespace

import pytest

from ftis_node.config.home import Home
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.node.daemon import run_node
from ftis_node.telemetry import gpu_power
from ftis_node.telemetry.events import read_events
from ftis_node.telemetry.gpu_power import MILLIJOULES_PER_WH, EnergyMeter, limited_power
from tests.node.nodes import whole_node


class FakeNvml:
    """Two GPUs with limits of 100 to 400 W, now 350 W. A setting of another limit needs `is_root`."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})

    def __init__(self, *, is_root: bool = True) -> None:
        self.is_root = is_root
        self.used_between_reads = 0  # millijoules of each GPU
        self.gpus = [SimpleNamespace(number=number, millijoules=0, limit=350_000) for number in range(2)]

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, name):
        return self.gpus[("GPU-a", "GPU-b").index(name)]

    def nvmlDeviceGetIndex(self, gpu):
        return gpu.number

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        if gpu.millijoules is None:
            raise self.NVMLError("not supported")
        gpu.millijoules += self.used_between_reads
        return gpu.millijoules

    def nvmlDeviceGetPowerManagementLimit(self, gpu):
        return gpu.limit

    def nvmlDeviceGetPowerManagementLimitConstraints(self, gpu):
        return [100_000, 400_000]

    def nvmlDeviceSetPowerManagementLimit(self, gpu, milliwatts):
        if not self.is_root:
            raise self.NVMLError_NoPermission("no permission")
        gpu.limit = milliwatts


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr(gpu_power, "opened_nvml", lambda: fake)
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


def test_a_power_limit_holds_while_the_node_runs(nvml):
    with limited_power(200, [1]):
        assert [gpu.limit for gpu in nvml.gpus] == [350_000, 200_000]
    with limited_power(0):
        assert [gpu.limit for gpu in nvml.gpus] == [350_000, 350_000]


def test_a_limit_without_a_gpu_is_one_warning(nvml, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING), limited_power(200, [7]):
        monkeypatch.setattr(gpu_power, "opened_nvml", lambda: None)
        with limited_power(200), limited_power(0):
            pass
    named, missing = caplog.messages
    assert "NVML does not name the node's GPUs" in named and "gpu-figures" in missing
    assert all(message.endswith("Type: sudo nvidia-smi --power-limit=200") for message in caplog.messages)


def test_a_limit_that_cannot_be_set_is_one_warning(nvml, caplog):
    nvml.is_root = False
    with caplog.at_level(logging.WARNING), limited_power(200, [1]), limited_power(50, [0]):
        assert [gpu.limit for gpu in nvml.gpus] == [350_000, 350_000]
    assert caplog.messages == [
        "limits.gpu_watts: only root may change the limit of GPU 1. Type: sudo nvidia-smi --id=1 --power-limit=200",
        "limits.gpu_watts is 50: GPU 0 takes 100 to 400, so its limit stays at 350 W",
    ]


async def test_a_node_limits_the_power_until_it_stops_and_its_steps_have_their_energy(tmp_path, tiny_models, nvml):
    nvml.used_between_reads = MILLIJOULES_PER_WH
    factory = InProcessNodeFactory(LoopbackSwarm(), delay=NO_DELAY, seed=0)
    (home := Home(tmp_path)).create()
    given = {"device": "auto", "limits": {"gpu_watts": 200}}
    async with whole_node(home, tiny_models["s"], factory, **given) as parts:
        assert [gpu.limit for gpu in nvml.gpus] == [200_000, 200_000]
        await run_node(parts, steps=2)
    assert [gpu.limit for gpu in nvml.gpus] == [350_000, 350_000]
    assert [event["gpu_wh"] for event in read_events(home.events, name="step")] == [2, 2]  # 1 of each GPU
