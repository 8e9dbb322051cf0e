"""When a node pauses: one simulated day, a clock that is set, and what NVML says of other programs."""

from __future__ import annotations

import asyncio
import errno
import logging
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.schedule import ScheduleSection
from ftis_node.config.step import StepSection
from ftis_node.errors import UsageError
from ftis_node.node.context import NodeContext, NodeDescription, NodeState
from ftis_node.node.loops import pause
from ftis_node.node.loops.pause import PauseLoop
from ftis_node.node.pausing import Decision, PauseGate
from ftis_node.node.supervision import machine_observer
from ftis_node.node.supervision.machine_observer import GRAPHICS_BYTES, SETTLE_S, MachineFacts, MachineObserver
from ftis_node.node.training.generation_limits import GenerateBudget, SlotPool
from ftis_node.node.wiring import Wiring
from ftis_node.records.identity import Identity
from ftis_node.telemetry.events import EventLog, read_events
from ftis_node.telemetry.health_summary import summarize_health
from ftis_node.telemetry.status import NodeStatus, Status
from ftis_node.workers.process import WorkerSpec
from ftis_node.workers.supervisor import Supervisor, WorkerState
from tests.node.nodes import components
from tests.waiting import eventually

SCHEDULE = {"hours": "22-07", "when_on_battery": "pause", "while_running": ["steam"]}


WORKERS = Path(__file__).parents[2] / "workers"  # the folder of the echo worker


class Facts(MachineObserver):
    """An observer of a machine whose state the test sets."""

    now = MachineFacts()

    def facts(self) -> MachineFacts:
        return self.now


class Day:
    """One home on one simulated day; `start` is a start of the node."""

    def __init__(self, folder: Path, events: EventLog, patch: pytest.MonkeyPatch) -> None:
        self.home = Home(folder)
        self.home.create()
        self.events = events
        self.settings = NodeSettings(model="m", schedule=SCHEDULE)
        self.unix_s = 0.0
        patch.setattr(time, "time", lambda: self.unix_s)

    def start(self, fault: str = "") -> None:
        about = NodeDescription("node", "m", "")
        manifest = load_manifest("arithmetic-ftis")
        context = NodeContext(self.settings, manifest, Identity.generate(), self.events, NodeState(), about)
        self.worker = self.new_worker("learner", fault)
        self.facts = Facts(self.settings.schedule)
        self.gate = context.pause
        self.loop = PauseLoop(
            context, self.home, (self.worker,), lambda: None, self.home.weights, GenerateBudget(), self.facts
        )

    def new_worker(self, name: str, fault: str = "") -> Supervisor:
        spec = WorkerSpec(
            name=name,
            module="echo_worker",
            boot=echo_boot(self.home.root, fault),
            sockets_dir=self.home.sockets,
            log_path=self.home.logs / f"{name}.log",
            environment={"PYTHONPATH": f"{WORKERS}:{WORKERS.parents[1]}"},
        )
        return Supervisor(spec)

    async def at(self, clock: str, *, battery: bool = False, steam: bool = False) -> str:
        """Set the clock, look once, and return the first two lines of the status: paused or not, and the worker."""
        self.unix_s = datetime.fromisoformat(f"2026-05-{clock}").timestamp()
        self.facts.now = MachineFacts(on_battery=battery, programs=("steam",) * steam)
        await self.loop.check()
        if not self.gate.is_paused:
            await self.worker.wait_ready()
        assert (self.worker.pid is None) == self.gate.is_in_effect
        shown = Status(node=NodeStatus(state="running"), pause=self.gate.status())
        return summarize_health(shown, now=self.unix_s).learning.why if self.gate.is_paused else "runs"

    async def stop(self) -> None:
        await self.worker.stop()
        assert self.worker.pid is None


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.syspath_prepend(str(WORKERS))
    time.tzset()
    with closing(EventLog(tmp_path / "events.jsonl")) as events:
        yield Day(tmp_path, events, monkeypatch)
    monkeypatch.undo()
    time.tzset()


async def test_a_day_of_schedule_battery_program_command_sleep_and_restart(day):
    day.start()
    assert await day.at("04T12:00") == "paused until 22:00: outside schedule.hours 22-07"
    running = asyncio.create_task(day.worker.run())  # a start during a pause: nothing is loaded
    still = {"reason": "outside schedule.hours 22-07", "until": day.unix_s + 36000, "in_effect": True}
    assert day.loop.change("resume", {}) == still
    assert day.loop.change("resume", {"for_s": 1800})["reason"] == ""
    assert await day.at("04T12:10") == "runs", "resume --for does not override the schedule"
    assert day.gate.status().resumed_at == day.unix_s
    assert await day.at("04T12:30") == "paused until 22:00: outside schedule.hours 22-07"
    assert await day.at("04T22:00") == "runs"
    assert await day.at("04T22:30", battery=True) == "paused: the machine runs on its battery"
    assert await day.at("04T22:40", steam=True) == "paused: steam is running", "the reason does not follow the facts"
    assert await day.at("04T23:00") == "runs"
    day.loop.change("pause", {"for_s": 3 * 3600})
    assert await day.at("04T23:01") == "paused until 02:00: by command"
    await day.stop()
    await asyncio.gather(running, return_exceptions=True)

    day.start()  # again, an hour later: the home still has the command
    assert await day.at("05T00:30") == "paused until 02:00: by command"
    running = asyncio.create_task(day.worker.run())
    assert await day.at("05T02:00") == "runs"
    assert await day.at("05T09:30") == "paused until 22:00: outside schedule.hours 22-07", "slept until the morning"
    assert await day.at("05T22:05") == "runs"
    await day.stop()
    await asyncio.gather(running, return_exceptions=True)
    begun = [event["reason"] for event in read_events(day.home.events, name="pause_began")]
    ended = [event["paused_s"] for event in read_events(day.home.events, name="pause_ended")]
    assert begun.count("outside schedule.hours 22-07") == 3
    assert ended == [600.0, 9.5 * 3600, 1800.0, 5400.0, 12 * 3600 + 35 * 60.0]


async def test_a_pause_waits_for_the_step_and_stops_at_a_resume_meanwhile(day):
    day.start()
    starting = asyncio.create_task(day.worker.run())
    await day.at("04T22:00")
    async with day.gate.working():
        day.loop.change("pause", {})
        pausing = asyncio.create_task(day.loop.check())
        await asyncio.sleep(0.05)
        assert (day.gate.is_paused, day.gate.is_in_effect, day.worker.state) == (True, False, WorkerState.READY)
        first = day.worker.pid
        day.loop.change("resume", {})
    await pausing
    await day.loop.check()
    assert (await day.at("04T22:01"), day.worker.pid) == ("runs", first), "the workers were ended for nothing"
    await day.stop()
    await asyncio.gather(starting, return_exceptions=True)


async def test_a_pause_while_the_models_load_after_a_pause_is_not_delayed(day):
    day.start(fault="slow")
    running = asyncio.create_task(day.worker.run())
    await day.at("04T22:00")
    day.loop.change("pause", {})
    assert await day.at("04T22:01") == "paused: by command"
    day.loop.change("resume", {})
    ending = asyncio.create_task(day.loop.check())
    await eventually(lambda: day.worker.state is WorkerState.STARTING)
    await asyncio.sleep(0.2)
    shown = day.gate.status()
    assert (shown.reason, shown.in_effect, day.gate.is_paused) == ("", False, True)
    assert day.loop.change("pause", {})["in_effect"] is False, "the memory is not free"
    await asyncio.wait_for(ending, 30)
    assert (day.worker.state, day.worker.pid) == (WorkerState.PAUSED, None), "it waited for the model"
    assert (day.gate.status().reason, day.gate.is_in_effect) == ("by command", True)
    day.loop.change("resume", {})
    assert await day.at("04T22:05") == "runs"
    assert [event["paused_s"] for event in read_events(day.home.events, name="pause_ended")] == [240.0]
    await day.stop()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_generator_starts_after_the_learner_has_handed_over_its_weights(day):
    day.start()
    generator, states = day.new_worker("generation"), []
    day.loop.workers = (generator, day.worker)
    day.loop.sync_weights = lambda: states.append((day.worker.state, generator.state))
    running = asyncio.gather(day.worker.run(), generator.run(), return_exceptions=True)
    await day.at("04T22:00")
    await generator.wait_ready()
    for name in ("weights-00000006", ".weights-00000007.incomplete-1", "offered", "followed"):
        (day.home.weights / name).mkdir(parents=True)
        (day.home.weights / name / "file").write_text("weights")
    day.loop.change("pause", {"for_s": 60})
    await day.at("04T22:00")
    assert (generator.state, generator.pid) == (WorkerState.PAUSED, None)
    left = {path.name for path in day.home.weights.iterdir()}
    assert left == {"offered", "followed"}, "published weights still use memory"
    assert await day.at("04T22:02") == "runs"
    assert states == [(WorkerState.READY, WorkerState.PAUSED)]
    assert generator.state is WorkerState.READY, "the node runs before its generator"
    await day.stop()
    await generator.stop()
    await running


async def test_a_command_on_a_full_disk_is_done_and_the_log_says_what_it_lacks(day, monkeypatch, caplog):
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    day.start()
    running = asyncio.create_task(day.worker.run())
    await asyncio.sleep(0)
    monkeypatch.setattr(pause, "replace_file", refuse)
    assert await day.at("04T23:00") == "runs"
    assert day.loop.change("pause", {})["reason"] == "by command"
    assert await day.at("04T23:01") == "paused: by command"
    assert "the command pause does not survive a restart of the node: [Errno 28] No space" in caplog.text
    await day.stop()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("length_s", [0, -1, 1e12, True, "2h"])
async def test_a_length_that_is_none_changes_nothing(day, length_s):
    day.start()
    with pytest.raises(UsageError, match=r"--for .*\(366 d\)"):
        day.loop.change("pause", {"for_s": length_s})
    assert not day.home.pause.exists()


def echo_boot(trace: Path, fault: str) -> Any:
    from echo_worker import EchoBoot

    return EchoBoot(trace=str(trace), fault=fault)


class FakeNvml:
    """Two GPUs, the first with computing and graphical processes; `error` is what the driver says instead."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})

    def __init__(self, *, computing: tuple[int, ...] = (), drawing: dict[int, int] | None = None) -> None:
        self.computing, self.drawing = computing, drawing or {}
        self.error: Exception | None = None

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.computing if gpu == 0]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.drawing.items() if gpu == 0]


@pytest.mark.parametrize(
    ("wanted", "nvml", "num_warnings"), [("pause", None, 1), ("pause", FakeNvml(), 0), ("run", None, 0)]
)
def test_a_node_that_cannot_see_the_users_of_gpus_warns_at_its_start(
    tmp_path, monkeypatch, caplog, wanted, nvml, num_warnings
):
    for module in (machine_observer, pause):
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
        monkeypatch.setattr(machine_observer.psutil.Process, "children", lambda *a, **k: [])  # else one of this process
        nvml = FakeNvml(computing=(other.pid,))
        monkeypatch.setattr(machine_observer, "opened_nvml", lambda: nvml)
        observer = MachineObserver(ScheduleSection(when_gpu_is_used="pause"), clock=lambda: now)
        assert observer.facts().gpu_users == ("sleep",)
        of_second = MachineObserver(ScheduleSection(when_gpu_is_used="pause"), gpus=(1,))
        assert of_second.facts().gpu_users == (), "a program on a GPU that the node does not use pauses it"
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


PAUSE = Decision("by command")


async def a_pause(gate: PauseGate, now: list[float], length_s: float) -> None:
    """Pause for a time, with a resume that a second pause interrupts."""
    await gate.begin(PAUSE)
    now[0] += 1.0  # a group in generation ends
    gate.take_effect()
    now[0] += length_s / 2
    gate.lose_effect()
    now[0] += length_s / 2
    gate.take_effect()
    gate.end()


@pytest.fixture
def now(monkeypatch):
    value = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: value[0])
    return value


async def test_the_time_per_group_is_without_a_pause(now):
    gate = PauseGate()
    slots = SlotPool(8, clock=gate.clock)
    await slots.charge()
    now[0] += 2.0
    await a_pause(gate, now, 36000.0)
    now[0] += 3.0
    assert slots.seconds_per_group == 0.0
    slots.fill()
    assert slots.seconds_per_group == 6.0


async def test_the_time_of_a_step_is_without_a_pause(now, tmp_path, monkeypatch):
    with components(tmp_path) as node:
        gate = Wiring(node).step_gate()
        no_groups = StepSection.model_construct(own_groups=0, foreign_groups=0)
        monkeypatch.setattr(gate, "_current_needs", lambda: no_groups)
        assert await gate.wait(1)
        now[0] += 7.0
        await a_pause(node.context.pause, now, 36000.0)
        assert await gate.wait(2)
        assert gate._train_s == 8.0
        now[0] += 500.0
        assert await gate.wait(2), "the groups were ready, but a pause began before the step"
        assert gate._train_s == 8.0, "a step that was not done counts"
