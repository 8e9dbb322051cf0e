"""The worker's side of the channel: a worker's `__main__` only calls `run_worker(build, boot_type=...)`.

    @asynccontextmanager
    async def build(boot: EchoBoot, emit: Emitter) -> AsyncIterator[Handlers]:
        model = load(boot.path)                  # may block for minutes: heartbeats continue
        yield {Echo: partial(echo, model)}       # a request's type -> the coroutine that answers it
        model.close()                            # after the last handler ended

    async def echo(model: Model, request: Echo, emit: Emitter) -> EchoReply: ...

    if __name__ == "__main__":
        run_worker(build, boot_type=EchoBoot)

Requests are served concurrently, each as a task. An exception of a handler is sent to its caller, and the worker
continues. The worker ends on `Stop`, on SIGTERM, and with its owner (`liveness.py`). It ignores SIGINT: ctrl-C reaches
every process of the terminal. An error in a background task (`telemetry/faults.py`) ends it at once with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import zmq
import zmq.asyncio

from ftis_node.telemetry.faults import unhandled_errors, watched_task
from ftis_node.telemetry.log import drop_what_cannot_be_written, set_up_logging
from ftis_node.workers import wire
from ftis_node.workers.liveness import ActivityCounter, die_with_owner, heartbeats

logger = logging.getLogger(__name__)

Boot = TypeVar("Boot", bound=msgspec.Struct)
Handler: TypeAlias = Callable[[Any, "Emitter"], Awaitable[wire.Message]]
Handlers: TypeAlias = Mapping[type[wire.Message], Handler]
Build: TypeAlias = Callable[[Boot, "Emitter"], AbstractAsyncContextManager[Handlers]]

FAULT_EXIT_CODE = 1
OUTBOX_CAPACITY = 4096  # messages; if so many are unread, the daemon has stopped or lost the connection
STOP_AFTER_FAILURE_S = 10.0


class Emitter:
    """The worker's event sender, usable from any thread: `emit(event)` sends a typed event."""

    def __init__(self, channel: Channel, activity: ActivityCounter, call_id: int) -> None:
        self._channel = channel
        self._activity = activity
        self._call_id = call_id

    def __call__(self, event: wire.Message) -> None:
        self._activity.progress()
        self._channel.post(wire.Event(call_id=self._call_id), event)

    def progress(self) -> None:
        """Increase the progress counter, which distinguishes a long computation from a hang."""
        self._activity.progress()


class Channel:
    """The worker's connection, which sends messages in the order in which they were posted.

    Events have no reply. While half of the outbox is full, new events are dropped, because a stopped daemon reads none.
    There are at most as many replies as calls.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[bytes]] = asyncio.Queue(OUTBOX_CAPACITY)

    def post(self, control: wire.Control, body: msgspec.Struct | None = None) -> None:
        """Queue a message. Safe from any thread."""
        self._loop.call_soon_threadsafe(self._put, wire.pack(control, body), isinstance(control, wire.Event))

    def _put(self, message: list[bytes], is_event: bool) -> None:
        if not is_event or self._outbox.qsize() < OUTBOX_CAPACITY // 2:
            self._outbox.put_nowait(message)

    async def receive(self) -> tuple[wire.Control, bytes]:
        return wire.unpack(await self._socket.recv_multipart())

    async def send_posted(self) -> None:
        while True:
            await self._socket.send_multipart(await self._outbox.get())


class Server:
    """The request loop: it serves calls concurrently until `Stop`."""

    def __init__(self, channel: Channel, activity: ActivityCounter, handlers: Handlers) -> None:
        self._channel = channel
        self._activity = activity
        self._handlers = handlers
        self._request_types = wire.union_of(list(handlers))
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._is_ending = False

    async def run(self) -> None:
        """Serve until `Stop` or SIGTERM, then end the calls in progress."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(self._receive(tasks), name="receive")
            loop.add_signal_handler(signal.SIGTERM, receiver.cancel)
            await asyncio.wait({receiver})
            loop.remove_signal_handler(signal.SIGTERM)
            self._is_ending = True
            for task in self._calls.values():
                if not task.cancelling():  # a second cancellation would end its handler before the thread that it runs
                    task.cancel()

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            control, body = await self._channel.receive()
            match control:
                case wire.Call(call_id=call_id):
                    task = tasks.create_task(self._answer(call_id, body), name=f"call-{call_id}")
                    self._calls[call_id] = task
                    task.add_done_callback(partial(self._calls.pop, call_id))
                case wire.Cancel(call_id=call_id) if call_id in self._calls:
                    self._calls[call_id].cancel()
                case wire.Stop():
                    return

    async def _answer(self, call_id: int, body: bytes) -> None:
        emit = Emitter(self._channel, self._activity, call_id)
        self._activity.progress(1)
        try:
            request: wire.Message = wire.unpack_body(body, self._request_types)
            reply = await self._handlers[type(request)](request, emit)
            self._channel.post(wire.Reply(call_id=call_id), reply)
        except asyncio.CancelledError as error:
            if not self._is_ending:  # otherwise the caller raises the cause of this worker's end
                self._channel.post(wire.failure_of(error, call_id=call_id))
            raise
        except Exception as error:
            logger.exception("call %d failed", call_id)
            self._channel.post(wire.failure_of(error, call_id=call_id))
        finally:
            self._activity.progress(-1)


async def _wait_for_stop(channel: Channel) -> None:
    """Wait until the daemon has read the failure, so that it gets the cause before it detects the exit."""
    try:
        async with asyncio.timeout(STOP_AFTER_FAILURE_S):
            while not isinstance((await channel.receive())[0], wire.Stop):
                pass
    except TimeoutError:
        logger.warning("the daemon did not say stop in %.0f s; ending", STOP_AFTER_FAILURE_S)


def run_worker(build: Build[Boot], *, boot_type: type[Boot]) -> None:
    """Run a worker until stopped. Reads its endpoint and owner from the command line and exits the process."""
    arguments = _parse_arguments()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_owner(arguments.owner_pid)
    drop_what_cannot_be_written()
    set_up_logging()
    code = asyncio.run(_serve(build, boot_type, arguments.endpoint, arguments.heartbeat_every_s))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # `build` has closed all resources; the interpreter's own clean-up takes seconds with torch


async def _serve(build: Build[Boot], boot_type: type[Boot], endpoint: str, heartbeat_every_s: float) -> int:
    """Connect, receive the boot message, build the worker, serve calls. Returns the process's exit code."""
    activity = ActivityCounter()
    with (
        zmq.asyncio.Context() as context,
        context.socket(zmq.DEALER) as socket,
        heartbeats(activity, endpoint=endpoint, every_s=heartbeat_every_s),
    ):
        socket.setsockopt(zmq.IDENTITY, wire.WORKER_IDENTITY)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        with unhandled_errors(_end_at_once):
            channel = Channel(socket)
            channel.post(wire.Hello())
            sender = watched_task(channel.send_posted(), name="send")  # also while the worker is built
            try:
                return await _build_and_serve(build, boot_type, channel, activity)
            finally:
                sender.cancel()
                await asyncio.wait([sender])


async def _build_and_serve(
    build: Build[Boot], boot_type: type[Boot], channel: Channel, activity: ActivityCounter
) -> int:
    _, body = await channel.receive()
    async with AsyncExitStack() as stack:
        try:
            boot = wire.unpack_body(body, boot_type)
            handlers = await stack.enter_async_context(build(boot, Emitter(channel, activity, call_id=0)))
        except Exception as error:
            logger.exception("the worker could not be built")
            channel.post(wire.failure_of(error, call_id=0))
            await _wait_for_stop(channel)
            return FAULT_EXIT_CODE
        channel.post(wire.Ready())
        await Server(channel, activity, handlers).run()
    return 0


def _end_at_once(where: str, error: BaseException) -> None:
    logger.critical("%s failed (%s: %s): this worker ends", where, type(error).__name__, error)
    logging.shutdown()
    os._exit(FAULT_EXIT_CODE)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A worker of ftis-node; started by its daemon, not by hand.")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--heartbeat-every-s", type=float, required=True)
    return parser.parse_args()
