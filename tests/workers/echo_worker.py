"""A worker for the tests of `workers`: it echoes, fails, sleeps, hangs and dies on request."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ftis_node.errors import EngineError, ModelError, NonFiniteError, OutOfMemoryError
from ftis_node.workers.wire import Message, unpack_body
from ftis_node.workers.worker import Emitter, Handlers, run_worker


class EchoBoot(Message, frozen=True):
    """The worker's settings. `fault`: the fault of its start. `trace`: a folder with a file for each event.

    The faults of `LATER_FAULTS` occur at the first `num_faults` restarts. The first start succeeds, as do later ones.
    `first-memory` occurs at the first `num_faults` starts.
    """

    trace: str
    fault: str = ""
    num_faults: int = 1000


LATER_FAULTS = {
    "later-memory": OutOfMemoryError("the engine does not fit at the moment"),
    "later-text": RuntimeError("CUDA error: out of memory"),
    "later-engine": EngineError("vLLM cannot serve it"),
    "later-model": ModelError("no model there"),
}


class Echo(Message, frozen=True):
    """A request for a reply with the same payload."""

    payload: bytes


class Fail(Message, frozen=True):
    """A request that raises an error of the named kind."""

    kind: str


class Sleep(Message, frozen=True):
    """A request to sleep, with an event at each of `num_events` steps. `blocking` blocks the loop.

    `end_s` is the time from a cancellation to the end.
    """

    seconds: float
    num_events: int = 0
    blocking: bool = False
    end_s: float = 0.0


class Die(Message, frozen=True):
    exit_code: int


class Spawn(Message, frozen=True):
    """A request to start a process that outlives the request. The reply has its pid instead of the worker's."""


class Stray(Message, frozen=True):
    """A request that succeeds and schedules a callback that fails."""


class EchoReply(Message, frozen=True):
    payload: bytes
    pid: int


class Tick(Message, frozen=True):
    """An event of `Sleep`."""

    number: int


async def echo(request: Echo, emit: Emitter) -> EchoReply:
    return EchoReply(payload=request.payload, pid=os.getpid())


async def fail(request: Fail, emit: Emitter) -> EchoReply:
    kinds = {"value": ValueError, "model": ModelError, "nan": NonFiniteError, "cancelled": asyncio.CancelledError}
    raise kinds[request.kind]("this one is on purpose")


async def die(request: Die, emit: Emitter) -> EchoReply:
    os._exit(request.exit_code)


async def spawn(request: Spawn, emit: Emitter) -> EchoReply:
    child = await asyncio.create_subprocess_exec("sleep", "60")
    return EchoReply(payload=b"", pid=child.pid)


async def stray(request: Stray, emit: Emitter) -> EchoReply:
    asyncio.get_running_loop().call_soon(unpack_body, b"no message", Echo)  # fails in code of the package
    return EchoReply(payload=b"", pid=os.getpid())


class Sleeper:
    """The handler of `Sleep`. It writes a file `asleep` at the begin, and `canceled` if it is canceled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    async def sleep(self, request: Sleep, emit: Emitter) -> EchoReply:
        if request.blocking:
            time.sleep(request.seconds)  # noqa: ASYNC251 - blocking is what is tested
        (self.trace / "asleep").touch()
        try:
            for number in range(request.num_events):
                emit(Tick(number=number))
                await asyncio.sleep(request.seconds / request.num_events)
            if not request.num_events:
                await asyncio.sleep(request.seconds)
        except asyncio.CancelledError:
            emit(Tick(number=-1))
            await asyncio.sleep(request.end_s)
            (self.trace / "canceled").touch()
            raise
        return EchoReply(payload=b"slept", pid=os.getpid())


@asynccontextmanager
async def build(boot: EchoBoot, emit: Emitter) -> AsyncIterator[Handlers]:
    trace = Path(boot.trace)
    (trace / f"built-{os.getpid()}").touch()
    if boot.fault == "model":
        raise ModelError("no model there")
    if boot.fault == "bug":
        raise RuntimeError("a bug")
    num_starts = len(list(trace.glob("built-*")))  # noqa: ASYNC240 - a few names
    if boot.fault in LATER_FAULTS and 2 <= num_starts <= 1 + boot.num_faults:
        raise LATER_FAULTS[boot.fault]
    if boot.fault == "first-memory" and num_starts <= boot.num_faults:
        raise OutOfMemoryError("the engine does not fit at the moment")
    if boot.fault == "slow":
        time.sleep(1.5)  # noqa: ASYNC251 - like the loading of a model
    yield {Echo: echo, Fail: fail, Die: die, Stray: stray, Spawn: spawn, Sleep: Sleeper(trace).sleep}
    if boot.fault == "slow-end":
        await asyncio.sleep(0.8)  # like the saving of a model
    if boot.fault == "reported-end":
        (trace / "ending").touch()
        for _ in range(10):
            emit.progress()
            await asyncio.sleep(0.1)
    (trace / "closed").touch()


if __name__ == "__main__":
    run_worker(build, boot_type=EchoBoot)
