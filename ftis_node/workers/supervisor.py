"""The supervisor of one worker: it runs the worker's processes in sequence, and routes calls to the present one.

      STOPPED --start()--> STARTING --ready, on_started--> READY
                              ^                              | death
                              |                              v
                              +------ after a delay ---- BACKING_OFF --too many quick deaths--> FAILED
                                                        (an error that no restart can fix --> FAILED)

    any state but FAILED --pause()--> PAUSED, without a process, so all its memory is free --resume()--> STARTING

An error of the user, the machine or the engine at the first start is final. A worker that has served before may lack
memory or disk space for a while, because other processes use it. It then waits longer each time, `free_memory` is
awaited, and it starts again. With `free_memory` the first start is repeated once, too, because another worker may need
more memory during its start than later. An engine that cannot be loaded again is restarted as after any quick death.

A call waits while the worker starts, then goes to the process that is READY, and never moves to another. A call that a
death interrupts raises WorkerDiedError. Before any call reaches a new process, `on_started` calls it directly, for
example to load the newest weights. `before_restart` is awaited before each restart, `before_stop` before the end.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeAlias

from ftis_node.errors import (
    DiskFullError,
    EngineError,
    FtisError,
    MachineError,
    OutOfMemoryError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    says_out_of_memory,
)
from ftis_node.telemetry.faults import watched_task
from ftis_node.workers.liveness import RestartCounter, RestartPolicy
from ftis_node.workers.process import OnEvent, WorkerProcess, WorkerSpec
from ftis_node.workers.wire import Body, Message

logger = logging.getLogger(__name__)
OnStarted: TypeAlias = Callable[[WorkerProcess], Awaitable[None]]
Preparation: TypeAlias = Callable[[], Awaitable[object]]


class WorkerState(StrEnum):
    """The state of a worker; the diagram is at the top of this file."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing-off"
    PAUSED = "paused"
    FAILED = "failed"


class Supervisor:
    """The supervisor of one worker. Call every method in the event loop in which `start` was called.

    `restarts` counts those after a death, since `start`.

    supervisor = Supervisor(WorkerSpec(name="learner", module="ftis_node.learner.worker", boot=boot, ...))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run(), name="learner")
        reply = await supervisor.call(Step(...), StepReply)
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        restart_policy: RestartPolicy | None = None,
        on_started: OnStarted | None = None,
        before_restart: Preparation | None = None,
        before_stop: Preparation | None = None,
        free_memory: Preparation | None = None,
    ) -> None:
        """Store the specification and callbacks. `free_memory` may raise FtisError."""
        self._spec = spec
        self._restart_policy = restart_policy or RestartPolicy()
        self._on_started = on_started
        self._before_restart = before_restart
        self._before_stop = before_stop
        self._free_memory = free_memory
        self.name = spec.name
        self.state = WorkerState.STOPPED
        self.restarts = 0
        self._keeper: asyncio.Task[None] | None = None
        self._gate: asyncio.Future[WorkerProcess | FtisError] | None = None
        self._life: WorkerProcess | None = None
        self._num_lives = 0
        self._has_served = self._is_stopping = False
        self._last_error: FtisError | None = None  # the cause of the last process's end
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._has_paused = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._life is None else self._life.pid

    async def start(self) -> None:
        """Return when the worker takes calls.

        Raises the error of the worker's `build` (ModelError, EngineError, ...), which is final at the first start.
        Raises WorkerDiedError or MachineError after too many quick deaths in a row.
        """
        if self._keeper is None:
            self._close_gate()
            self._num_lives = self.restarts = 0
            self._has_served = False
            self._keeper = watched_task(self._keep(), name=f"{self.name}-keeper")
        await self.wait_ready()

    async def run(self) -> None:
        """Keep the worker alive until canceled or stopped. Raises as `start` does when the worker fails for good."""
        try:
            await self.start()
            if self._keeper is not None:
                await asyncio.wait({self._keeper})
                if not self._keeper.cancelled():
                    self._keeper.result()  # raises the supervisor's own error
            if self.state is WorkerState.FAILED:
                await self.wait_ready()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop the worker: by request, then by force, within the time limits. Calls in flight raise."""
        if self._before_stop is not None and self.state is not WorkerState.FAILED:
            await self._before_stop()
        if (keeper := self._keeper) is not None:
            if not self._is_stopping:  # a second cancellation would interrupt the worker's clean stop
                self._is_stopping = True  # `keeper.cancelling()` also counts the cancellation of a time limit
                try:
                    if self._life is not None and not self._may_run.is_set():
                        await self.pause()  # a cancellation would interrupt the worker that ends for the pause
                finally:
                    keeper.cancel()
            await asyncio.wait({keeper})
            self._keeper, self._is_stopping = None, False
        if self.state is not WorkerState.FAILED:
            self.state = WorkerState.STOPPED
        self._open_gate(WorkerDiedError(f"the {self.name} worker was stopped"))
        self._gate = None

    async def pause(self) -> None:
        """End the present process, which first saves its state, and start none until `resume`.

        Calls in flight raise WorkerDiedError, later ones wait. Before `start` this only delays the first process.
        """
        self._may_run.clear()
        if self.state is WorkerState.BACKING_OFF:  # without a process; `_keep` starts none
            self.state = WorkerState.PAUSED
            return
        if self._life is not None:
            self._life.end("is paused")
        if self._keeper is not None and not self._keeper.done():
            paused = asyncio.ensure_future(self._has_paused.wait())
            await asyncio.wait({paused, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
            paused.cancel()

    def resume(self) -> None:
        """Start the next process after `pause`, unless `stop` is in progress."""
        if not self._is_stopping:
            self._has_paused.clear()
            self._may_run.set()

    def restart(self, how: str) -> None:
        """Kill the present process, if any; the supervisor starts the next. `how` as in `WorkerProcess.kill`.

        A process that ends for a pause or a stop may save first.
        """
        if self._life is not None and self._life.is_alive:
            self._life.kill(how)

    async def call(self, request: Message, reply_type: type[Body], *, on_event: OnEvent | None = None) -> Body:
        """Return the worker's reply to one request, also if the worker is still starting.

        Raises WorkerDiedError if the worker died meanwhile or does not run, and the handler's error (`wire.error_of`).
        """
        life = await self.wait_ready()
        return await life.call(request, reply_type, on_event=on_event)

    async def call_present(self, request: Message, reply_type: type[Body]) -> Body:
        """As `call`, but raise WorkerDiedError where that would wait for a process to start."""
        life = self._life
        if self.state is not WorkerState.READY or life is None or not life.is_alive:
            raise WorkerDiedError(f"the {self.name} worker takes no calls")
        return await life.call(request, reply_type)

    async def wait_ready(self) -> WorkerProcess:
        """Return the present process when it takes calls, also after a death. Raises if none will start."""
        while self._gate is not None:
            passed = await asyncio.shield(self._gate)
            if isinstance(passed, FtisError):
                raise copy.copy(passed)
            if passed.is_alive:
                return passed
            self._close_gate()  # it died in this iteration of the event loop, before `_keep` closed the gate
        raise WorkerDiedError(f"the {self.name} worker is not running")

    def _close_gate(self) -> None:
        if self._gate is None or self._gate.done():
            self._gate = asyncio.get_running_loop().create_future()

    def _open_gate(self, passage: WorkerProcess | FtisError) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(passage)

    async def _keep(self) -> None:
        """Run one process after the other until the policy ends the restarts."""
        restarts = RestartCounter(self._restart_policy)
        while True:
            while not self._may_run.is_set():
                self.state = WorkerState.PAUSED
                self._has_paused.set()
                await self._may_run.wait()
            served_s = await self._live_once()
            restarts.note_service(served_s)
            if not self._may_run.is_set():
                continue
            error = self._last_error
            assert error is not None
            is_quick = served_s < self._restart_policy.quick_death_s
            may_pass = self._has_served or (self._free_memory is not None and restarts.num_shortages == 0)
            is_short = may_pass and is_quick and _is_shortage(error)
            if not is_short and not isinstance(error, WorkerError | EngineError if self._has_served else WorkerError):
                return self._fail(error)
            delay_s = restarts.next_delay_s(served_s=served_s, is_short=is_short)
            if delay_s is None:
                lost = WorkerDiedError if self._has_served else MachineError
                kind = type(error) if isinstance(error, MachineError) else lost
                message = f"the {self.name} worker died {restarts.num_deaths} times in a row; the last time: "
                return self._fail(kind(message + str(error)))
            self.state = WorkerState.BACKING_OFF
            logger.warning("%s; starting it again in %.1f s", error, delay_s)
            await asyncio.sleep(delay_s)
            if self._before_restart is not None:
                await self._before_restart()
            if is_short and self._free_memory is not None:
                try:
                    await self._free_memory()
                except FtisError as failed:  # the worker starts anyway
                    logger.warning("no memory is given back for the %s worker: %s", self.name, failed)
            self.restarts += 1

    async def _live_once(self) -> float:
        """Run one process until it ends. Sets `last_error` to the cause and returns its time in service, in seconds."""
        self.state = WorkerState.STARTING
        self._close_gate()
        ready_at = None
        try:
            number, self._num_lives = self._num_lives, self._num_lives + 1
            async with WorkerProcess(self._spec, number=number) as life:
                self._life = life
                if not self._may_run.is_set():  # `pause` came while the process was spawned
                    life.end("is paused")
                await life.until_ready()
                if self._on_started is not None:
                    await self._bring_up(life, self._on_started)
                ready_at = time.monotonic()
                self.state, self._has_served = WorkerState.READY, True
                self._open_gate(life)
                self._last_error = await life.until_death()
                self._close_gate()  # before the clean-up, which takes a while
        except FtisError as error:
            self._last_error = error
        except Exception as error:
            logger.exception("%s could not be started", self.name)
            message = f"the {self.name} worker could not be started: {type(error).__name__}: {error}"
            self._last_error = WorkerDiedError(message)
        finally:
            self._life = None
        return 0.0 if ready_at is None else time.monotonic() - ready_at

    async def _bring_up(self, life: WorkerProcess, on_started: OnStarted) -> None:
        limit_s = self._spec.timing.start_grace_s
        try:
            async with asyncio.timeout(limit_s):
                await on_started(life)
        except TimeoutError:
            raise WorkerDiedError(f"the {self.name} worker was not made ready within {limit_s:.0f} s") from None

    def _fail(self, error: FtisError) -> None:
        self.state = WorkerState.FAILED
        self._last_error = error
        logger.error("%s", error)
        self._open_gate(error)


class WorkerClient:
    """A worker's client. Its `supervisor` starts, pauses and ends the process. Subclasses add requests."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    @property
    def worker_state(self) -> WorkerState:
        return self.supervisor.state

    @property
    def restarts(self) -> int:
        return self.supervisor.restarts

    @property
    def pid(self) -> int | None:
        return self.supervisor.pid

    async def run(self) -> None:
        await self.supervisor.run()

    async def stop(self) -> None:
        """Stop the worker, which first saves its state. Calls in flight raise WorkerDiedError."""
        await self.supervisor.stop()

    def restart(self, how: str) -> None:
        self.supervisor.restart(how)


def _is_shortage(error: FtisError) -> bool:
    """Return whether memory or disk space was short. A SIGKILL does not count: it may have any cause."""
    is_named = isinstance(error, OutOfMemoryError | DiskFullError)
    return is_named or (isinstance(error, WorkerTaskError) and says_out_of_memory(str(error)))
