"""Supervisor and worker as real processes: calls, faults, deaths, stops."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import psutil
import pytest
from echo_worker import Die, Echo, EchoReply, Fail, Sleep, Spawn, Stray, Tick
from worker_support import QUICK, MakeSupervisor

from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import (
    EngineError,
    FtisError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    WorkerDiedError,
    WorkerTaskError,
)
from ftis_node.telemetry.faults import unhandled_errors
from ftis_node.workers.liveness import RestartPolicy
from ftis_node.workers.process import WorkerProcess
from ftis_node.workers.supervisor import WorkerState
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.workers.supervisor import Supervisor

ECHO = Echo(payload=bytes(range(256)))


def is_gone(pid: int) -> bool:
    """Return whether no process of that id runs any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def num_builds(trace: Path) -> int:
    """How many processes began to build themselves."""
    return len(list(trace.glob("built-*")))


async def test_calls_are_served_side_by_side(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    begun = time.monotonic()
    replies = await asyncio.gather(*(supervisor.call(Sleep(seconds=0.3), EchoReply) for _ in range(20)))
    assert time.monotonic() - begun < 20 * 0.3
    assert {reply.pid for reply in replies} == {supervisor.pid}


async def test_events_of_a_call_arrive_in_order_before_its_reply(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    heard: dict[int, list[int]] = {1: [], 2: []}

    async def sleep(which: int) -> None:
        await supervisor.call(
            Sleep(seconds=0.2, num_events=which + 2), EchoReply, on_event=lambda tick: heard[which].append(tick.number)
        )
        assert heard[which] == list(range(which + 2))

    await asyncio.gather(sleep(1), sleep(2))


async def test_events_without_a_callback_of_the_call_reach_the_supervisors(make_supervisor: MakeSupervisor) -> None:
    heard: list[Tick] = []
    supervisor = make_supervisor(on_event=heard.append)
    await supervisor.start()
    await supervisor.call(Sleep(seconds=0.1, num_events=2), EchoReply)
    assert heard == [Tick(number=0), Tick(number=1)]


async def test_events_of_a_call_that_was_given_up_reach_nobody(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    heard: list[Tick] = []
    supervisor = make_supervisor(on_event=heard.append)
    await supervisor.start()
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply, on_event=heard.append))
    await eventually((tmp_path / "asleep").exists)
    call.cancel()
    await eventually((tmp_path / "cancelled").exists)  # and a tick is on its way
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    assert (heard, supervisor.restarts) == ([], 0)


async def test_a_failed_request_is_typed_and_the_worker_goes_on(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    pid = supervisor.pid
    with pytest.raises(WorkerTaskError, match="echo: ValueError: this one is on purpose"):
        await supervisor.call(Fail(kind="value"), EchoReply)
    with pytest.raises(WorkerTaskError, match="echo: CancelledError"):
        await asyncio.wait_for(supervisor.call(Fail(kind="cancelled"), EchoReply), 5)
    with pytest.raises(NonFiniteError, match="on purpose"):
        await supervisor.call(Fail(kind="nan"), EchoReply)
    with pytest.raises(ModelError) as caught:
        await supervisor.call(Fail(kind="model"), EchoReply)
    assert caught.value.exit_code == 2
    assert (await supervisor.call(ECHO, EchoReply)).pid == pid
    assert supervisor.restarts == 0


async def test_an_unknown_request_fails_alone(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    with pytest.raises(WorkerTaskError, match="Tick"):
        await supervisor.call(Tick(number=1), EchoReply)
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload


async def test_sigkill_ends_every_call_and_the_next_call_meets_a_new_worker(make_supervisor: MakeSupervisor) -> None:
    started: list[int] = []

    async def on_started(life: WorkerProcess) -> None:
        started.append((await life.call(ECHO, EchoReply)).pid)

    supervisor = make_supervisor(on_started=on_started)
    await supervisor.start()
    first = supervisor.pid
    assert first is not None
    calls = [asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply)) for _ in range(3)]
    await supervisor.call(ECHO, EchoReply)
    os.kill(first, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert [type(outcome) for outcome in outcomes] == [WorkerDiedError] * 3
    assert "SIGKILL" in str(outcomes[0])
    second = (await supervisor.call(ECHO, EchoReply)).pid
    assert second != first
    assert started == [first, second]
    assert supervisor.restarts == 1
    assert isinstance(supervisor._last_error, WorkerDiedError)


async def test_an_error_that_nobody_waits_for_ends_the_worker_and_another_comes(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    first = supervisor.pid
    with suppress(WorkerDiedError):  # it may be gone before its reply
        await supervisor.call(Stray(), EchoReply)
    await eventually(lambda: supervisor.restarts == 1, within_s=30)
    assert (await supervisor.call(ECHO, EchoReply)).pid != first
    assert "exited with code 1" in str(supervisor._last_error)
    assert "this worker ends" in (tmp_path / "logs" / "echo.log").read_text()


class Broken(ExponentialBackoff):
    """A back-off with a bug."""

    def delay_s(self, num_failures: int, *, draw: float = 0.5) -> NoReturn:
        raise LookupError("a bug")


async def test_a_keeper_that_fails_ends_its_owner(make_supervisor: MakeSupervisor) -> None:
    heard: list[str] = []
    with unhandled_errors(lambda where, error: heard.append(f"{where}: {error}")):
        supervisor = make_supervisor(restart_policy=RestartPolicy(Broken()))
        running = asyncio.create_task(supervisor.run())
        await supervisor.start()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        with pytest.raises(LookupError, match="a bug"):
            await running
    assert heard == ["the task echo-keeper: a bug"], "and whoever runs no `run` hears of it, too"


async def test_a_call_right_after_a_death_waits_for_the_next_life(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        await supervisor.call(Die(exit_code=7), EchoReply)
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload


async def test_calls_wait_until_on_started_is_done(make_supervisor: MakeSupervisor) -> None:
    order: list[str] = []

    async def on_started(life: WorkerProcess) -> None:
        await life.call(Sleep(seconds=0.5), EchoReply)
        order.append("on_started")

    async def call() -> None:
        await supervisor.call(ECHO, EchoReply)
        order.append("call")

    supervisor = make_supervisor(on_started=on_started)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.start())
        await asyncio.sleep(0)
        tasks.create_task(call())
    assert order == ["on_started", "call"]


async def test_a_stopped_process_is_found_silent_and_killed(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(timing=dataclasses.replace(QUICK, stop_grace_s=30.0))
    await supervisor.start()
    pid = supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match=f"no heartbeat for {QUICK.heartbeat_timeout_s:.0f} s"):
        await asyncio.wait_for(supervisor.call(ECHO, EchoReply), 30)
    await eventually(lambda: is_gone(pid), within_s=15.0)  # at once, not after the grace of a stop
    assert (await supervisor.call(ECHO, EchoReply)).pid != pid


async def test_a_busy_loop_in_the_worker_still_beats(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    await supervisor.call(Sleep(seconds=2.0, blocking=True), EchoReply)
    assert supervisor.restarts == 0


async def test_a_stalled_daemon_does_not_take_its_worker_for_dead(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    time.sleep(QUICK.heartbeat_timeout_s + 0.5)  # noqa: ASYNC251 - the daemon's own loop is blocked
    await asyncio.sleep(0.3)
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    assert supervisor.restarts == 0


async def test_no_progress_is_a_hang_and_progress_is_not(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(timing=dataclasses.replace(QUICK, stall_timeout_s=2.0))
    await supervisor.start()
    await supervisor.call(Sleep(seconds=3.0, num_events=30), EchoReply)
    assert supervisor.restarts == 0
    with pytest.raises(WorkerDiedError, match="no progress"):
        await asyncio.wait_for(supervisor.call(Sleep(seconds=30), EchoReply), 30)


async def test_a_cancelled_caller_cancels_the_handler(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply))
    await eventually((tmp_path / "asleep").exists)
    call.cancel()
    await eventually((tmp_path / "cancelled").exists)
    assert call.cancelled()
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload


async def test_a_users_fault_in_building_is_final(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    supervisor = make_supervisor(fault="model")
    with pytest.raises(ModelError, match="no model there"):
        await supervisor.start()
    assert supervisor.state is WorkerState.FAILED
    assert num_builds(tmp_path) == 1
    with pytest.raises(ModelError):
        await supervisor.call(ECHO, EchoReply)


async def die(supervisor: Supervisor) -> None:
    """Have the worker exit, whose first life is sound."""
    await supervisor.start()
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        await supervisor.call(Die(exit_code=7), EchoReply)


@pytest.mark.parametrize("fault", ["later-memory", "later-text"])
@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_worker_that_lacks_memory_at_its_next_starts_waits_for_room_and_serves_again(
    make_supervisor: MakeSupervisor, tmp_path: Path, fault: str, gives_up: bool
) -> None:
    """Four times, where two quick deaths would be its end; also where whoever has the memory cannot give it back."""
    builds_seen: list[int] = []

    async def free_memory() -> None:
        builds_seen.append(num_builds(tmp_path))
        if gives_up:
            raise WorkerDiedError("the learner worker is not running")

    policy = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05), max_quick_deaths=2)
    supervisor = make_supervisor(fault=fault, num_faults=4, restart_policy=policy, free_memory=free_memory)
    await die(supervisor)
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    assert (supervisor.restarts, supervisor.state) == (5, WorkerState.READY)
    assert builds_seen == [2, 3, 4, 5], "before each new try, and not after an ordinary death"


@pytest.mark.parametrize(
    ("fault", "kind", "num_lives", "message"),
    [
        ("later-memory", OutOfMemoryError, 4, "^the echo worker died 3 times in a row; .* does not fit at the moment$"),
        ("later-text", WorkerDiedError, 4, "^the echo worker died 3 times in a row; .* CUDA error: out of memory$"),
        ("later-engine", EngineError, 3, "^the echo worker died 3 times in a row; .* vLLM cannot serve it$"),
        ("later-model", ModelError, 2, "^no model there$"),
    ],
)
async def test_a_fault_of_a_later_start_that_stays_ends_the_worker_with_its_own_kind_of_error(
    make_supervisor: MakeSupervisor, tmp_path: Path, fault: str, kind: type[FtisError], num_lives: int, message: str
) -> None:
    """The first death is the exit: it counts as a quick one, and as no shortage."""
    policy = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05), max_quick_deaths=3, max_shortages=3)
    supervisor = make_supervisor(fault=fault, restart_policy=policy)
    await die(supervisor)
    with pytest.raises(FtisError, match=message) as caught:
        await supervisor.run()
    assert type(caught.value) is kind
    assert num_builds(tmp_path) == num_lives


@pytest.mark.parametrize(("fault", "message"), [("exit", "exited with code 3"), ("bug", "RuntimeError: a bug")])
async def test_a_worker_that_cannot_start_is_given_up(
    make_supervisor: MakeSupervisor, tmp_path: Path, fault: str, message: str
) -> None:
    supervisor = make_supervisor(fault=fault)
    with pytest.raises(WorkerDiedError, match=f"3 times in a row.*{message}"):
        await supervisor.run()
    assert num_builds(tmp_path) == 3
    assert supervisor.restarts == 2


async def test_a_slow_start_is_no_hang_within_its_grace(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(fault="slow")
    await supervisor.start()
    assert supervisor.restarts == 0


async def test_a_start_beyond_its_grace_is_a_death(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(fault="slow", timing=dataclasses.replace(QUICK, start_grace_s=1.0, stop_grace_s=0.1))
    with pytest.raises(WorkerDiedError, match="not ready within 1 s"):
        await supervisor.start()


async def test_stop_is_clean_and_leaves_nothing(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    supervisor = make_supervisor(timing=dataclasses.replace(QUICK, stop_grace_s=10.0))
    await supervisor.start()
    pid = supervisor.pid
    assert pid is not None
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply))
    await supervisor.call(ECHO, EchoReply)
    begun = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - begun < 10.0, "it had to be forced"
    assert is_gone(pid)
    assert (tmp_path / "closed").exists()
    assert list((tmp_path / "s").iterdir()) == []
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await call
    with pytest.raises(WorkerDiedError, match="not running"):
        await supervisor.call(ECHO, EchoReply)
    assert supervisor.state is WorkerState.STOPPED


async def test_stop_of_a_worker_that_does_not_listen_is_bounded(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    pid = supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(supervisor.stop(), 30)
    assert is_gone(pid)


@pytest.mark.parametrize(
    ("fault", "limit_s", "ends_by_itself"),
    [
        ("reported-end", 60.0, True),
        ("reported-end", 1.0, False),
        ("reported-end", 0.0, False),
        ("slow-end", 60.0, False),
    ],
)
async def test_progress_after_stop_prolongs_the_grace_up_to_a_limit(
    make_supervisor: MakeSupervisor, tmp_path: Path, fault: str, limit_s: float, ends_by_itself: bool
) -> None:
    """Without progress the short grace holds, even if heartbeats arrive."""
    timing = dataclasses.replace(QUICK, stop_grace_s=0.5, save_limit_s=limit_s, terminate_grace_s=0.1)
    supervisor = make_supervisor(fault=fault, timing=timing)
    await supervisor.start()
    await asyncio.wait_for(supervisor.stop(), 30)
    assert (tmp_path / "closed").exists() == ends_by_itself


@pytest.mark.parametrize("was_as_long_before", [True, False])
async def test_a_computation_after_stop_has_the_time_that_one_took_before(
    make_supervisor: MakeSupervisor, tmp_path: Path, was_as_long_before: bool
) -> None:
    """It reports no progress. Without a measured one the short grace holds, as for a worker that hangs."""
    timing = dataclasses.replace(QUICK, stop_grace_s=0.3, save_limit_s=60.0, terminate_grace_s=0.1)
    slow_stops: list[int] = []
    supervisor = make_supervisor(timing=timing, on_slow_stop=lambda: slow_stops.append(1))
    await supervisor.start()
    if was_as_long_before:
        await supervisor.call(Sleep(seconds=2.0, blocking=True, num_events=1), EchoReply)
        (tmp_path / "asleep").unlink()
    call = asyncio.create_task(supervisor.call(Sleep(seconds=2.0, blocking=True), EchoReply))
    assert supervisor._life is not None
    liveness = supervisor._life._liveness
    await eventually(lambda: liveness.is_busy)
    assert (liveness.longest_ticks >= 10) == was_as_long_before
    await asyncio.wait_for(supervisor.stop(), 30)
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await call
    assert (tmp_path / "closed").exists() == was_as_long_before
    assert slow_stops, "the owner does not know why the stop takes long"


async def test_a_worker_that_is_frozen_while_it_ends_has_the_short_grace(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    supervisor = make_supervisor(fault="reported-end", timing=dataclasses.replace(QUICK, save_limit_s=600.0))
    await supervisor.start()
    pid = supervisor.pid
    assert pid is not None
    stopping = asyncio.create_task(supervisor.stop())
    await eventually((tmp_path / "ending").exists)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(stopping, 30)
    assert is_gone(pid)


async def test_stop_at_any_moment_of_the_start(make_supervisor: MakeSupervisor) -> None:
    """Before, during and after the first turns of the loop, in which asyncio spawns."""
    for num_turns in (0, 1, 2, 3, 4, 6, 9, 100):
        supervisor = make_supervisor(fault="slow")
        start = asyncio.create_task(supervisor.start())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(supervisor.stop(), 30)
        with pytest.raises(WorkerDiedError):
            await asyncio.wait_for(start, 30)
        assert not [child for child in psutil.Process().children() if "echo_worker" in " ".join(child.cmdline())]


async def test_a_stop_during_a_spawn_that_fails_ends_the_supervisor(
    make_supervisor: MakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not replace the cancellation: else the supervisor would start the next process."""
    begun = asyncio.Event()

    async def spawn(process: WorkerProcess) -> NoReturn:
        begun.set()
        await asyncio.sleep(0.2)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(WorkerProcess, "_spawn", spawn)
    supervisor = make_supervisor()
    start = asyncio.create_task(supervisor.start())
    await begun.wait()
    await asyncio.wait_for(supervisor.stop(), 10)
    assert supervisor.state is WorkerState.STOPPED
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await start


async def test_run_ends_with_its_task_group(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        await asyncio.sleep(0)
        await supervisor.call(ECHO, EchoReply)
        pid = supervisor.pid
        assert pid is not None
        running.cancel()
    assert is_gone(pid)


async def test_run_returns_when_the_worker_is_stopped(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await asyncio.sleep(0)
        await supervisor.call(ECHO, EchoReply)
        tasks.create_task(supervisor.stop())
    assert supervisor.state is WorkerState.STOPPED


async def test_run_raises_when_a_worker_is_given_up_later(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(restart_policy=RestartPolicy(max_quick_deaths=1))
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        await supervisor.call(Die(exit_code=7), EchoReply)
    with pytest.raises(WorkerDiedError, match="1 times in a row"):
        await running


async def test_a_second_stop_does_not_cut_the_first_one_short(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    supervisor = make_supervisor(fault="slow-end", timing=dataclasses.replace(QUICK, stop_grace_s=10.0))
    await supervisor.start()
    first = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.2)
    await supervisor.stop()
    await first
    assert (tmp_path / "closed").exists()


async def test_a_stopped_worker_can_be_started_again(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    await supervisor.stop()
    await supervisor.start()
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    assert supervisor.restarts == 0


async def test_ctrl_c_does_not_reach_a_worker_and_sigterm_ends_it(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    pid = supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    await asyncio.sleep(0.2)
    assert (await supervisor.call(ECHO, EchoReply)).pid == pid
    os.kill(pid, signal.SIGTERM)
    await eventually((tmp_path / "closed").exists)


async def test_what_a_worker_started_ends_with_it(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    child = (await supervisor.call(Spawn(), EchoReply)).pid
    assert not is_gone(child)
    supervisor.restart("hangs")
    try:
        await eventually(lambda: is_gone(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_restart_on_request(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor()
    await supervisor.start()
    pid = supervisor.pid
    supervisor.restart("failed its proof")
    assert (await supervisor.call(ECHO, EchoReply)).pid != pid
    assert "failed its proof" in str(supervisor._last_error)
