"""One worker process from the daemon's side: spawn, build, calls, death.

Each process has a separate socket, so messages of an earlier process cannot reach a later one. Every call ends exactly
once: with its reply, its failure, the worker's first detected cause of death, or the cancellation of its caller.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from ftis_node.config.no_network_env import NO_TELEMETRY, WORKERS_STAY_OFFLINE
from ftis_node.errors import FtisError, WorkerCrashedError, WorkerDiedError
from ftis_node.files import open_to_write
from ftis_node.workers import wire
from ftis_node.workers.liveness import SILENT, Timing, describe_exit
from ftis_node.workers.preload import ForkedProcess, Preload
from ftis_node.workers.wire import Message

logger = logging.getLogger(__name__)

OnEvent: TypeAlias = Callable[[Any], None]
OnSlowStop: TypeAlias = Callable[[], object]

EXIT_SEEN_S = 1.0  # after a message could not be sent


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The process to spawn: `python -m module`. `boot` is the first message that it receives.

    `complete` adds to it what only another worker has, and waits for that worker: `Timing.start_grace_s` includes it.
    `environment` is added to the daemon's environment. The first process is forked by `preload` if that is possible.
    `on_event` gets each event of no call, or of a call without a callback. During a stop, `on_slow_stop` is called
    repeatedly while the worker still computes.
    """

    name: str
    module: str
    boot: Message
    sockets_dir: Path
    log_path: Path
    event_types: tuple[type[Message], ...] = ()
    timing: Timing = field(default_factory=Timing)
    on_event: OnEvent | None = None
    on_slow_stop: OnSlowStop | None = None
    environment: dict[str, str] = field(default_factory=dict)
    preload: Preload | None = None
    complete: Callable[[Any], Awaitable[Message]] | None = None


@dataclass(slots=True)
class _PendingCall:
    outcome: asyncio.Future[bytes | FtisError]
    on_event: OnEvent | None

    def end(self, outcome: bytes | FtisError) -> None:
        """Set the outcome. Only the first one counts; the caller may be canceled already."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class WorkerProcess:
    """One worker process, a context manager that ends the process on exit.

    `async with WorkerProcess(spec, number=0) as life: await life.until_ready()`
    """

    def __init__(self, spec: WorkerSpec, *, number: int) -> None:
        self._spec = spec
        self._timing = spec.timing
        self._endpoint = wire.endpoint_in(spec.sockets_dir, name=f"{spec.name}-{number}")
        self._liveness = spec.timing.liveness()
        self._event_types = wire.union_of(spec.event_types) if spec.event_types else None
        self._calls: dict[int, _PendingCall] = {}
        self._call_ids = itertools.count(1)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._death: asyncio.Future[FtisError] = asyncio.get_running_loop().create_future()
        self._resources = AsyncExitStack()
        self._socket: zmq.asyncio.Socket
        self._process: asyncio.subprocess.Process | ForkedProcess
        self._preload = spec.preload if number == 0 else None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether no cause of death is known yet."""
        return not self._death.done()

    async def __aenter__(self) -> WorkerProcess:
        async with AsyncExitStack() as stack:
            context = stack.enter_context(zmq.asyncio.Context())
            self._socket = stack.enter_context(context.socket(zmq.ROUTER))
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.bind(self._endpoint)
            stack.callback(wire.remove_socket, self._endpoint)
            if self._preload is not None:
                await self._preload.until_loaded()
            spawning = asyncio.create_task(self._spawn(), name=f"{self._spec.name}-spawn")
            try:
                self._process = await asyncio.shield(spawning)  # a spawn that is canceled halfway may never return
            except asyncio.CancelledError:
                await asyncio.wait({spawning})
                if spawning.exception() is None:  # otherwise the cancellation still counts, and nothing runs
                    self._process = spawning.result()
                    self._kill()
                    await self._process.wait()
                raise
            self._begin(stack, self._receive)  # it ends last: heartbeats after `Stop` prolong the grace
            stack.push_async_callback(self._end_process)
            self._begin(stack, self._watch_exit)
            self._begin(stack, self._watch_heartbeats)
            stack.push_async_callback(self._send_stop)
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._die(WorkerDiedError(f"{self._spec.name} was stopped"))
        await self._resources.aclose()

    async def until_ready(self) -> None:
        """Return when the worker takes calls. Raises the error of its `build`, or WorkerDiedError."""
        ends: tuple[asyncio.Future[Any], ...] = (self._ready, self._death)
        await asyncio.wait(ends, timeout=self._timing.start_grace_s, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise self._death.result()
        if not self._ready.done():
            raise self._die(self._died(f"was not ready within {self._timing.start_grace_s:.0f} s"))

    async def until_death(self) -> FtisError:
        return await asyncio.shield(self._death)

    async def call(
        self, request: wire.Message, reply_type: type[wire.Body], *, on_event: OnEvent | None = None
    ) -> wire.Body:
        """Return the worker's reply to one request. Raises WorkerDiedError or the handler's error (`wire.error_of`)."""
        if self._death.done():
            raise copy.copy(self._death.result())
        call_id = next(self._call_ids)
        pending = _PendingCall(outcome=asyncio.get_running_loop().create_future(), on_event=on_event)
        self._calls[call_id] = pending
        try:
            await self._send(wire.Call(call_id=call_id), request)
            outcome = await pending.outcome
        except asyncio.CancelledError:
            with suppress(WorkerDiedError):  # a dead worker has no call to cancel
                await self._send(wire.Cancel(call_id=call_id))
            raise
        finally:
            del self._calls[call_id]
        if isinstance(outcome, FtisError):
            raise copy.copy(outcome)  # one death ends many calls, and each raise adds its traceback to the object
        return wire.unpack_body(outcome, reply_type)

    def end(self, how: str) -> None:
        """Let `until_ready` and `until_death` return, so that their caller leaves the context: the worker saves."""
        self._die(self._died(how))

    def kill(self, how: str) -> None:
        """Kill the worker at once. `how` follows "the worker" in the error that every call raises."""
        self._die(self._died(how))
        self._kill()

    async def _spawn(self) -> asyncio.subprocess.Process | ForkedProcess:
        """Start the process in a new session, so that ctrl-C does not reach it while it imports."""
        spec = self._spec
        command = [sys.executable, "-m", spec.module, "--endpoint", self._endpoint, "--owner-pid", str(os.getpid())]
        command += ["--heartbeat-every-s", str(self._timing.heartbeat_every_s)]
        environment = {**os.environ, **NO_TELEMETRY, **WORKERS_STAY_OFFLINE, **spec.environment}
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._preload is not None and (forked := await self._preload.fork(command, environment, spec.log_path)):
            return forked
        with os.fdopen(open_to_write(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as worker_log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=worker_log,
                stderr=worker_log,
                env=environment,
                start_new_session=True,
            )

    async def _send_boot(self) -> None:
        boot, complete = self._spec.boot, self._spec.complete
        try:
            await self._send(wire.Start(), boot if complete is None else await complete(boot))
        except FtisError as error:
            self._die(error)

    def _begin(self, stack: AsyncExitStack, watch: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._guard(watch), name=f"{self._spec.name}{watch.__name__}")
        stack.push_async_callback(_cancel, task)

    async def _guard(self, watch: Callable[[], Awaitable[None]]) -> None:
        """Run a watch. On failure (invalid message, failed callback), log the error and end the worker."""
        try:
            await watch()
        except Exception as error:
            logger.exception("the daemon's side of %s failed", self._spec.name)
            self._die(self._died(f"was given up after {type(error).__name__}: {error}"))

    async def _receive(self) -> None:
        while True:
            _, *frames = await self._socket.recv_multipart()
            control, body = wire.unpack(frames)
            await self._take(control, body)

    async def _take(self, control: wire.Control, body: bytes) -> None:
        match control:
            case wire.Heartbeat():
                self._liveness.beat(control)
            case wire.Hello() if self.is_alive:
                self._begin(self._resources, self._send_boot)
            case wire.Ready() if not self._ready.done():
                self._ready.set_result(None)
            case wire.Failure(call_id=0):
                self._die(wire.error_of(control, worker=self._spec.name))
            case wire.Failure(call_id=call_id) if call_id in self._calls:
                self._calls[call_id].end(wire.error_of(control, worker=self._spec.name))
            case wire.Reply(call_id=call_id) if call_id in self._calls:
                self._calls[call_id].end(body)
            case wire.Event(call_id=call_id):
                self._take_event(call_id, body)

    def _take_event(self, call_id: int, body: bytes) -> None:
        """Pass an event to the call's callback, or else the worker's. Drop events of calls that have ended."""
        pending = self._calls.get(call_id)
        if pending is None and call_id != 0:  # 0: an event of the worker itself, of no call
            return
        on_event = self._spec.on_event if pending is None or pending.on_event is None else pending.on_event
        if on_event is not None and self._event_types is not None:
            on_event(wire.unpack_body(body, self._event_types))

    async def _send(self, control: wire.Control, body: msgspec.Struct | None = None) -> None:
        try:
            async with asyncio.timeout(self._timing.heartbeat_timeout_s):  # a stopped worker's queue may be full
                await self._socket.send_multipart([wire.WORKER_IDENTITY, *wire.pack(control, body)])
        except (zmq.ZMQError, TimeoutError) as error:
            await asyncio.wait({self._death}, timeout=EXIT_SEEN_S)  # the exit of a dead process says more
            raise self._die(self._died(f"cannot be reached ({str(error) or 'it reads nothing'})")) from error

    async def _watch_exit(self) -> None:
        code = await self._process.wait()
        was_ended = code in (0, -signal.SIGTERM, -signal.SIGKILL)  # 0: a worker saves after SIGTERM
        kind = WorkerDiedError if was_ended else WorkerCrashedError
        self._die(self._died(describe_exit(code), kind))

    async def _watch_heartbeats(self) -> None:
        timing = self._timing
        await asyncio.wait({self._ready}, timeout=timing.start_grace_s)
        problem = ""
        while not problem:
            await asyncio.sleep(timing.heartbeat_every_s)
            problem = self._liveness.tick()
        after_s = timing.heartbeat_timeout_s if problem == SILENT else timing.stall_timeout_s
        self.kill(f"{problem} for {after_s:.0f} s")

    def _died(self, how: str, kind: type[WorkerDiedError] = WorkerDiedError) -> WorkerDiedError:
        return kind(f"the {self._spec.name} worker {how}; its log is {self._spec.log_path}")

    def _die(self, cause: FtisError) -> FtisError:
        """End every call in flight with the first cause; later causes change nothing. Returns the first cause."""
        if not self._death.done():
            self._death.set_result(cause)
            for pending in self._calls.values():
                pending.end(cause)
        return self._death.result()

    async def _send_stop(self) -> None:
        if self._process.returncode is None:
            with suppress(WorkerDiedError):
                await self._send(wire.Stop())

    async def _end_process(self) -> None:
        """Wait for the exit after `Stop`, then terminate, then kill, even if the caller is canceled meanwhile."""
        try:
            if not self._ready.done():
                self._signal(signal.SIGTERM)  # during its build it reads no messages and has nothing to save
            if await self._exits_after_stop():
                return
            logger.warning("%s does not stop; terminating pid %d", self._spec.name, self.pid)
            self._signal(signal.SIGTERM)
            if not await self._exits_within(self._timing.terminate_grace_s):
                logger.warning("%s does not terminate; killing pid %d", self._spec.name, self.pid)
        finally:
            self._kill()
            await self._process.wait()

    async def _exits_after_stop(self) -> bool:
        """Return whether the process exits within its grace (`Timing`), counted in ticks, as in `liveness.py`."""
        timing, liveness = self._timing, self._liveness
        tick_s = min(timing.heartbeat_every_s, timing.stop_grace_s)
        last_progress, num_ticks = liveness.last_progress, 0
        for _ in range(round(max(timing.stop_grace_s, timing.save_limit_s) / tick_s)):
            if await self._exits_within(tick_s):
                return True
            liveness.tick()
            num_ticks = num_ticks + 1 if liveness.last_progress == last_progress else 0
            last_progress = liveness.last_progress
            longest_s = liveness.longest_ticks * timing.heartbeat_every_s  # a slow machine needs it again
            if num_ticks * tick_s >= max(timing.stop_grace_s, timing.stop_grace_factor * longest_s):
                return False
            if self._spec.on_slow_stop is not None and liveness.is_busy:
                self._spec.on_slow_stop()
        return False

    async def _exits_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def _kill(self) -> None:
        """Kill the worker's process group: itself and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
