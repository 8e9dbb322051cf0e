"""A supervisor and a worker in real processes: calls, faults, deaths, stops."""

import asyncio
import dataclasses
import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zmq.asyncio
from echo_worker import Die, Echo, EchoReply, Fail, Sleep, Spawn, Stray, Tick
from worker_support import QUICK, has_ended, pid_of

from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import (
    EngineError,
    FtisError,
    MachineError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    WorkerCrashedError,
    WorkerDiedError,
    WorkerTaskError,
)
from ftis_node.telemetry.faults import unhandled_errors
from ftis_node.workers.liveness import RestartCounter, RestartPolicy
from ftis_node.workers.process import WorkerProcess
from ftis_node.workers.supervisor import Supervisor, WorkerState
from tests.waiting import eventually

ECHO = Echo(payload=bytes(range(256)))


def num_starts(trace: Path) -> int:
    return len(list(trace.glob("built-*")))


async def test_calls_are_served_concurrently(start_supervisor, tmp_path):
    supervisor = await start_supervisor()
    long = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply))
    await eventually((tmp_path / "asleep").exists)
    replies = await asyncio.gather(*(supervisor.call(ECHO, EchoReply) for _ in range(20)))
    assert not long.done()
    assert {(reply.payload, reply.pid) for reply in replies} == {(ECHO.payload, supervisor.pid)}
    long.cancel()


async def test_events_of_a_call_arrive_in_order_before_its_reply(start_supervisor):
    of_no_call: list[Tick] = []
    supervisor = await start_supervisor(on_event=of_no_call.append)
    received: dict[int, list[int]] = {1: [], 2: []}

    async def sleep(which):
        request = Sleep(seconds=0.2, num_events=which + 2)
        await supervisor.call(request, EchoReply, on_event=lambda tick: received[which].append(tick.number))
        assert received[which] == list(range(which + 2))

    await asyncio.gather(sleep(1), sleep(2))
    assert of_no_call == []
    await supervisor.call(Sleep(seconds=0.1, num_events=2), EchoReply)
    assert of_no_call == [Tick(number=0), Tick(number=1)], "the supervisor's callback has events without another one"


async def test_events_of_a_canceled_call_are_dropped(start_supervisor, tmp_path):
    received: list[Tick] = []
    supervisor = await start_supervisor(on_event=received.append)
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply, on_event=received.append))
    await eventually((tmp_path / "asleep").exists)
    call.cancel()
    await eventually((tmp_path / "canceled").exists)  # the worker has sent a tick
    assert call.cancelled()
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    assert (received, supervisor.restarts) == ([], 0)


async def test_a_failed_request_raises_its_error_and_the_worker_continues(start_supervisor):
    supervisor = await start_supervisor()
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
    with pytest.raises(WorkerTaskError, match="Tick"):  # no handler has this type
        await supervisor.call(Tick(number=1), EchoReply)
    assert ((await supervisor.call(ECHO, EchoReply)).pid, supervisor.restarts) == (pid, 0)


async def test_sigkill_ends_every_call_and_the_next_call_reaches_a_new_worker(start_supervisor):
    started: list[int] = []

    async def on_started(process):
        started.append((await process.call(ECHO, EchoReply)).pid)

    supervisor = await start_supervisor(on_started=on_started)
    first = pid_of(supervisor)
    calls = [asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply)) for _ in range(3)]
    await supervisor.call(ECHO, EchoReply)
    os.kill(first, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert [type(outcome) for outcome in outcomes] == [WorkerDiedError] * 3
    assert "SIGKILL" in str(outcomes[0])
    second = (await supervisor.call(ECHO, EchoReply)).pid
    assert (started, supervisor.restarts, second == first) == ([first, second], 1, False)
    assert isinstance(supervisor._last_error, WorkerDiedError)


async def test_a_call_to_a_process_that_was_just_killed_ends_with_the_reason(start_supervisor, monkeypatch):
    """The message cannot be sent before the exit is known."""
    watch_exit = WorkerProcess._watch_exit

    async def watch_exit_late(self):
        await self._process.wait()
        await asyncio.sleep(0.5)
        await watch_exit(self)

    monkeypatch.setattr(WorkerProcess, "_watch_exit", watch_exit_late)
    supervisor = await start_supervisor()
    killed = pid_of(supervisor)
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: has_ended(killed))
    await asyncio.sleep(0.1)  # until the socket knows
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await supervisor.call(ECHO, EchoReply)


async def test_a_call_to_a_worker_that_reads_nothing_ends_with_the_reason(start_supervisor, monkeypatch):
    async def time_out(*_):
        monkeypatch.undo()
        raise TimeoutError

    supervisor = await start_supervisor()
    monkeypatch.setattr(zmq.asyncio.Socket, "send_multipart", time_out)
    with pytest.raises(WorkerDiedError, match=r"cannot be reached \(it reads nothing\)"):
        await supervisor.call(ECHO, EchoReply)


async def test_an_unhandled_error_restarts_the_worker(start_supervisor, tmp_path):
    supervisor = await start_supervisor()
    first = supervisor.pid
    with suppress(WorkerDiedError):  # it may die before it replies
        await supervisor.call(Stray(), EchoReply)
    await eventually(lambda: supervisor.restarts == 1, within_s=30)
    assert (await supervisor.call(ECHO, EchoReply)).pid != first
    assert "exited with code 1" in str(supervisor._last_error)
    assert "this worker ends" in (tmp_path / "logs" / "echo.log").read_text()


async def test_calls_wait_until_on_started_is_done(make_supervisor):
    order: list[str] = []

    async def on_started(process):
        await process.call(Sleep(seconds=0.5), EchoReply)
        order.append("on_started")

    async def call():
        await supervisor.call(ECHO, EchoReply)
        order.append("call")

    supervisor = make_supervisor(on_started=on_started)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.start())
        await asyncio.sleep(0)
        tasks.create_task(call())
    assert order == ["on_started", "call"]


async def test_a_worker_without_heartbeats_is_killed_and_restarted(start_supervisor):
    supervisor = await start_supervisor(timing=dataclasses.replace(QUICK, stop_grace_s=30.0, heartbeat_timeout_s=1.0))
    pid = pid_of(supervisor)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match="no heartbeat for 1 s"):
        await asyncio.wait_for(supervisor.call(ECHO, EchoReply), 30)
    await eventually(lambda: has_ended(pid), within_s=15.0)  # at once, without the grace of a stop
    assert (await supervisor.call(ECHO, EchoReply)).pid != pid


async def test_a_blocked_daemon_does_not_restart_its_worker(start_supervisor):
    supervisor = await start_supervisor(timing=dataclasses.replace(QUICK, heartbeat_timeout_s=1.5))
    time.sleep(2.0)  # noqa: ASYNC251 - it blocks the daemon's loop
    await asyncio.sleep(0.3)
    assert ((await supervisor.call(ECHO, EchoReply)).payload, supervisor.restarts) == (ECHO.payload, 0)


async def test_a_worker_without_progress_is_restarted_and_one_with_progress_is_not(start_supervisor):
    supervisor = await start_supervisor(timing=dataclasses.replace(QUICK, stall_timeout_s=1.0))
    await supervisor.call(Sleep(seconds=1.5, num_events=15), EchoReply)
    assert supervisor.restarts == 0
    with pytest.raises(WorkerDiedError, match="no progress"):
        await asyncio.wait_for(supervisor.call(Sleep(seconds=30), EchoReply), 30)


async def test_a_model_error_at_the_start_is_final(make_supervisor, tmp_path):
    supervisor = make_supervisor(fault="model")
    with pytest.raises(ModelError, match="no model there"):
        await supervisor.start()
    assert (supervisor.state, num_starts(tmp_path)) == (WorkerState.FAILED, 1)
    with pytest.raises(ModelError):
        await supervisor.call(ECHO, EchoReply)


async def die(supervisor: Supervisor) -> None:
    await supervisor.start()
    with pytest.raises(WorkerCrashedError, match="exited with code 7"):
        await supervisor.call(Die(exit_code=7), EchoReply)


@pytest.mark.parametrize(("fault", "memory_is_freed"), [("later-memory", True), ("later-text", False)])
async def test_a_worker_that_lacks_memory_at_a_restart_is_restarted_until_it_serves(
    make_supervisor, tmp_path, fault, memory_is_freed
):
    """Two restarts lack memory, although two quick deaths would be the limit. `free_memory` may also fail."""
    starts_before: list[int] = []

    async def free_memory():
        starts_before.append(num_starts(tmp_path))
        if not memory_is_freed:
            raise WorkerDiedError("the learner worker is not running")

    policy = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05), max_quick_deaths=2)
    supervisor = make_supervisor(fault=fault, num_faults=2, restart_policy=policy, free_memory=free_memory)
    await die(supervisor)
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    assert (supervisor.restarts, supervisor.state) == (3, WorkerState.READY)
    assert starts_before == [2, 3], "memory is freed before each restart, but not after another death"


@pytest.mark.parametrize(("num_faults", "may_free", "num_started"), [(1, True, 2), (2, True, 2), (1, False, 1)])
async def test_a_first_start_that_lacks_memory_is_repeated_once_if_another_worker_can_free_some(
    make_supervisor, tmp_path, num_faults, may_free, num_started
):
    starts_before: list[int] = []

    async def free_memory():
        starts_before.append(num_starts(tmp_path))

    policy = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05))
    supervisor = make_supervisor(
        fault="first-memory",
        num_faults=num_faults,
        restart_policy=policy,
        free_memory=free_memory if may_free else None,
    )
    if num_faults < num_started:
        await supervisor.start()
    else:
        with pytest.raises(OutOfMemoryError, match="^the engine does not fit at the moment$"):
            await supervisor.start()
    assert (num_starts(tmp_path), starts_before) == (num_started, [1] * may_free)


@pytest.mark.parametrize(
    ("fault", "kind", "expected_starts", "message"),
    [
        ("later-memory", OutOfMemoryError, 3, "^the echo worker died 2 times in a row; .* does not fit at the moment$"),
        ("later-engine", EngineError, 2, "^the echo worker died 2 times in a row; .* vLLM cannot serve it$"),
        ("later-model", ModelError, 2, "^no model there$"),
    ],
)
async def test_a_lasting_fault_of_the_restart_is_raised_with_its_class(
    make_supervisor, tmp_path, fault, kind, expected_starts, message
):
    """The first death is an exit, which counts as a quick death, not as a shortage."""
    policy = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05), max_quick_deaths=2, max_shortages=2)
    supervisor = make_supervisor(fault=fault, restart_policy=policy)
    await die(supervisor)
    with pytest.raises(FtisError, match=message) as caught:
        await supervisor.run()
    assert type(caught.value) is kind
    assert num_starts(tmp_path) == expected_starts


async def test_a_worker_that_cannot_start_is_given_up(make_supervisor, tmp_path):
    supervisor = make_supervisor(fault="bug")
    with pytest.raises(MachineError, match="3 times in a row.*RuntimeError: a bug"):
        await supervisor.run()
    assert (num_starts(tmp_path), supervisor.restarts) == (3, 2)


@pytest.mark.parametrize(
    ("has_bug", "error", "message"),
    [(False, WorkerDiedError, "1 times in a row"), (True, LookupError, "a bug of the supervisor")],
)
async def test_run_raises_when_a_worker_will_not_start_again(make_supervisor, monkeypatch, has_bug, error, message):
    """Otherwise the node would go on without its worker."""

    def fail(*_, **how):
        raise LookupError("a bug of the supervisor")

    if has_bug:
        monkeypatch.setattr(RestartCounter, "next_delay_s", fail)
    supervisor = make_supervisor(restart_policy=RestartPolicy(max_quick_deaths=1))
    with unhandled_errors(lambda where, error: None):
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(0)
        with pytest.raises(WorkerDiedError, match="exited with code 7"):
            await supervisor.call(Die(exit_code=7), EchoReply)
        with pytest.raises(error, match=message):
            await running


async def test_a_start_beyond_its_grace_counts_as_a_death(make_supervisor):
    supervisor = make_supervisor(fault="slow", timing=dataclasses.replace(QUICK, start_grace_s=1.0, stop_grace_s=0.1))
    with pytest.raises(MachineError, match="not ready within 1 s"):
        await supervisor.start()


async def test_a_worker_is_built_when_another_worker_has_completed_its_boot_message(make_supervisor, tmp_path):
    errors, gate = [WorkerDiedError("the other worker died")], asyncio.Event()

    async def complete(boot):
        if errors:
            raise errors.pop()
        await gate.wait()
        return boot

    supervisor = make_supervisor()
    supervisor._spec = dataclasses.replace(supervisor._spec, complete=complete)
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: supervisor.restarts == 1 and supervisor.pid is not None)
    await supervisor.pause()
    assert (supervisor.pid, num_starts(tmp_path)) == (None, 0)
    supervisor.resume()
    gate.set()
    await starting
    assert num_starts(tmp_path) == 1


async def test_stop_closes_the_worker_and_removes_its_socket(start_supervisor, tmp_path, caplog):
    supervisor = await start_supervisor(timing=dataclasses.replace(QUICK, stop_grace_s=10.0))
    pid = pid_of(supervisor)
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply))
    await supervisor.call(ECHO, EchoReply)
    await supervisor.stop()
    assert has_ended(pid)
    assert (tmp_path / "closed").exists(), "the worker was killed"
    assert "does not stop" not in caplog.text
    assert list((tmp_path / "s").iterdir()) == []
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await call
    with pytest.raises(WorkerDiedError, match="not running"):
        await supervisor.call(ECHO, EchoReply)
    assert supervisor.state is WorkerState.STOPPED
    await supervisor.start()
    assert ((await supervisor.call(ECHO, EchoReply)).payload, supervisor.restarts) == (ECHO.payload, 0)


async def test_stop_kills_a_frozen_worker(start_supervisor):
    supervisor = await start_supervisor()
    pid = pid_of(supervisor)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(supervisor.stop(), 30)
    assert has_ended(pid)


@pytest.mark.parametrize(
    ("fault", "limit_s", "ends_by_itself"),
    [("reported-end", 60.0, True), ("reported-end", 0.0, False), ("slow-end", 60.0, False)],
)
async def test_progress_after_stop_prolongs_the_grace_up_to_a_limit(
    start_supervisor, tmp_path, fault, limit_s, ends_by_itself
):
    """Without progress the short grace applies, even if heartbeats arrive."""
    timing = dataclasses.replace(QUICK, stop_grace_s=0.5, save_limit_s=limit_s, terminate_grace_s=0.1)
    supervisor = await start_supervisor(fault=fault, timing=timing)
    await asyncio.wait_for(supervisor.stop(), 30)
    assert (tmp_path / "closed").exists() == ends_by_itself


@pytest.mark.parametrize("was_as_long_before", [True, False])
async def test_a_computation_during_a_stop_may_take_as_long_as_an_earlier_one(
    start_supervisor, tmp_path, was_as_long_before
):
    """A computation reports no progress. Without an earlier one the short grace applies, as for a hang."""
    timing = dataclasses.replace(QUICK, stop_grace_s=0.3, save_limit_s=60.0, terminate_grace_s=0.1)
    slow_stops: list[int] = []
    supervisor = await start_supervisor(timing=timing, on_slow_stop=lambda: slow_stops.append(1))
    if was_as_long_before:
        await supervisor.call(Sleep(seconds=1.0, blocking=True, num_events=1), EchoReply)
        (tmp_path / "asleep").unlink()
    call = asyncio.create_task(supervisor.call(Sleep(seconds=1.0, blocking=True), EchoReply))
    liveness = supervisor._life._liveness
    await eventually(lambda: liveness.is_busy)
    assert (liveness.longest_ticks >= 5) == was_as_long_before
    await asyncio.wait_for(supervisor.stop(), 30)
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await call
    assert (tmp_path / "closed").exists() == was_as_long_before
    assert slow_stops, "the slow stop is not reported"


async def test_a_computation_whose_end_is_reported_after_the_stop_counts_as_an_earlier_one(start_supervisor, tmp_path):
    """The first computation ends between two heartbeats, and the stop comes before the second of them."""
    timing = dataclasses.replace(QUICK, heartbeat_every_s=0.3, stop_grace_s=0.3, save_limit_s=60.0)
    supervisor = await start_supervisor(timing=timing)
    await supervisor.call(Sleep(seconds=1.5, blocking=True), EchoReply)
    call = asyncio.create_task(supervisor.call(Sleep(seconds=1.5, blocking=True), EchoReply))
    await asyncio.sleep(0)  # the call is sent
    await asyncio.wait_for(supervisor.stop(), 30)
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await call
    assert (tmp_path / "closed").exists()


async def test_a_stop_waits_for_a_call_that_its_caller_canceled(start_supervisor, tmp_path):
    """Until then the worker is busy, as in a computation that only a thread can end."""
    slow_stops: list[int] = []
    supervisor = await start_supervisor(on_slow_stop=lambda: slow_stops.append(1))
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30, end_s=1.0), EchoReply))
    await eventually((tmp_path / "asleep").exists)
    call.cancel()
    await asyncio.wait({call})
    await supervisor.stop()
    assert (tmp_path / "canceled").exists()
    assert slow_stops, "the slow stop is not reported"


async def test_a_stop_at_any_moment_of_the_start_leaves_no_process(make_supervisor):
    """The stop comes before, during and after the turns of the loop in which asyncio spawns the process."""
    for num_turns in (0, 2, 4, 9):
        supervisor = make_supervisor(fault="slow")
        start = asyncio.create_task(supervisor.start())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(supervisor.stop(), 30)
        with pytest.raises(WorkerDiedError):
            await asyncio.wait_for(start, 30)
        assert not [child for child in psutil.Process().children() if "echo_worker" in " ".join(child.cmdline())]


async def test_a_stop_during_a_spawn_that_fails_ends_the_supervisor(make_supervisor, monkeypatch):
    """The error must not replace the cancellation, or the supervisor would start the next process."""
    begun = asyncio.Event()

    async def spawn(process):
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


async def test_a_second_stop_waits_for_the_first(start_supervisor, tmp_path):
    supervisor = await start_supervisor(fault="slow-end", timing=dataclasses.replace(QUICK, stop_grace_s=10.0))
    first = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.2)
    await supervisor.stop()
    await first
    assert (tmp_path / "closed").exists()


async def test_a_worker_ignores_sigint_and_ends_on_sigterm(start_supervisor, tmp_path):
    supervisor = await start_supervisor()
    pid = pid_of(supervisor)
    os.kill(pid, signal.SIGINT)
    await asyncio.sleep(0.2)
    assert (await supervisor.call(ECHO, EchoReply)).pid == pid
    call = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply))
    await eventually((tmp_path / "asleep").exists)
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(WorkerDiedError, match="exited with code 0") as caught:
        await call
    assert type(caught.value) is WorkerDiedError, "no fault of the request"
    assert (tmp_path / "closed").exists()


async def test_processes_that_a_worker_started_end_with_it(start_supervisor):
    supervisor = await start_supervisor()
    child = (await supervisor.call(Spawn(), EchoReply)).pid
    assert not has_ended(child)
    supervisor.restart("hangs")
    try:
        await eventually(lambda: has_ended(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_a_paused_worker_has_no_process_and_calls_wait_for_its_end(start_supervisor, tmp_path):
    supervisor = await start_supervisor()
    first = pid_of(supervisor)
    interrupted = asyncio.create_task(supervisor.call(Sleep(seconds=30), EchoReply))
    await eventually((tmp_path / "asleep").exists)
    await supervisor.pause()
    assert (supervisor.state, supervisor.pid, has_ended(first)) == (WorkerState.PAUSED, None, True)
    with pytest.raises(WorkerDiedError, match="is paused"):
        await interrupted
    waiting = asyncio.create_task(supervisor.call(ECHO, EchoReply))
    await supervisor.pause()  # changes nothing
    with pytest.raises(WorkerDiedError, match="takes no calls"):
        await asyncio.wait_for(supervisor.call_present(ECHO, EchoReply), 5.0)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    supervisor.resume()
    assert (await waiting).pid not in (None, first)
    assert (supervisor.state, supervisor.restarts) == (WorkerState.READY, 0)


async def test_deaths_before_a_pause_of_a_good_service_do_not_count(make_supervisor):
    policy = RestartPolicy(ExponentialBackoff(first_s=0.05), quick_death_s=1.0, max_quick_deaths=2)
    supervisor = make_supervisor(restart_policy=policy)
    await die(supervisor)
    await supervisor.wait_ready()
    await asyncio.sleep(policy.quick_death_s)
    await supervisor.pause()
    supervisor.resume()
    await die(supervisor)
    await supervisor.wait_ready()


async def test_a_stop_after_a_pause_does_not_wait_for_a_back_off(make_supervisor):
    supervisor = make_supervisor(fault="bug", restart_policy=RestartPolicy(ExponentialBackoff(first_s=60.0)))
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: supervisor.state is WorkerState.BACKING_OFF)
    await supervisor.pause()
    async with asyncio.timeout(30):
        await supervisor.stop()
    await asyncio.gather(starting, return_exceptions=True)


@pytest.mark.parametrize("fault", ["slow", "bug"], ids=["starting", "backing off"])
async def test_a_pause_at_any_moment_ends_the_start(make_supervisor, tmp_path, fault):
    slow = RestartPolicy(ExponentialBackoff(first_s=1.0), max_quick_deaths=9)
    supervisor = make_supervisor(fault=fault, restart_policy=slow)
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: num_starts(tmp_path) == 1)
    if fault == "bug":
        await eventually(lambda: supervisor.state is WorkerState.BACKING_OFF)
    await supervisor.pause()
    assert (supervisor.state, supervisor.pid) == (WorkerState.PAUSED, None)
    await asyncio.sleep(1.5)
    assert (num_starts(tmp_path), starting.done()) == (1, False), "started during the pause"
    supervisor.resume()
    await eventually(lambda: num_starts(tmp_path) == 2)
    await supervisor.stop()
    await asyncio.gather(starting, return_exceptions=True)


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_stop_during_a_pause_lets_the_worker_save(make_supervisor, tmp_path, how):
    supervisor = make_supervisor(fault="slow-end", timing=dataclasses.replace(QUICK, stop_grace_s=10.0))
    running = asyncio.create_task(supervisor.run())
    await supervisor.start()
    pausing = asyncio.create_task(supervisor.pause())
    await asyncio.sleep(0.2)
    assert supervisor.pid is not None, "the worker ended before the stop"
    pausing.cancel()  # as the pause loop at the end of a node
    if how == "stop":
        await supervisor.stop()
    running.cancel()
    await asyncio.gather(running, pausing, return_exceptions=True)
    assert (supervisor.pid, supervisor.state) == (None, WorkerState.STOPPED)
    assert (tmp_path / "closed").exists(), "the worker was killed while it saved"


async def test_a_restart_during_a_pause_lets_the_worker_save(start_supervisor, tmp_path):
    supervisor = await start_supervisor(fault="slow-end", timing=dataclasses.replace(QUICK, stop_grace_s=10.0))
    pausing = asyncio.create_task(supervisor.pause())
    await asyncio.sleep(0.2)
    assert supervisor.pid is not None, "the worker ended before the restart"
    supervisor.restart("hangs")
    await pausing
    assert (tmp_path / "closed").exists(), "the worker was killed while it saved"


async def test_a_supervisor_that_is_paused_before_its_start_starts_no_process(make_supervisor, tmp_path):
    supervisor = make_supervisor()
    await supervisor.pause()
    starting = asyncio.create_task(supervisor.start())
    await asyncio.sleep(0.2)
    assert (supervisor.state, num_starts(tmp_path)) == (WorkerState.PAUSED, 0)
    supervisor.resume()
    await starting
    assert (await supervisor.call(ECHO, EchoReply)).payload == ECHO.payload
    await supervisor.pause()
    await supervisor.stop()
    assert supervisor.state is WorkerState.STOPPED
