"""A generation worker without a model, for the tests of the client: it runs in this process and fails on request.

`tests/workers` tests real processes, their deaths and their heartbeats. `test_generation_worker.py` tests a client with
a real worker.

A "weights file" holds one number, which becomes every log-prob of the probe. Its checksum replaces that of a tensor.
`boot.model` is a folder in which a test and the worker share files:

`stale-weights` holds a count. While it is above 0, a load decrements it and keeps the old weights.
`stale-version` is the same for the version that the worker reports.
`broken`: the engine has failed for good. The text is the reason.
`sharing`: the outcome of loading shared weights, `refused`, `fatal` or `failing`, or the number to read. Without the
file, the id of the export is the number.
`shared` gets a line for each load of shared weights, `slept` for each sleep.

The worker never answers the prompt id 66. Discarded weights are NaN.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from ftis_node.errors import FtisError, ModelError, SharingError, WorkerDiedError, WorkerTaskError
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.worker import Service, report_break, report_tokens
from ftis_node.records.group import Completion, FinishReason
from ftis_node.workers.process import OnEvent, WorkerSpec
from ftis_node.workers.weight_store import SharedWeights
from ftis_node.workers.wire import Body, Message, Ready, error_of, failure_of, pack, unpack_body
from ftis_node.workers.worker import Emitter, Handlers

UNANSWERED = 66
PIDS = itertools.count(1 << 32)  # no process has such an id


class Exited(BaseException):
    """The worker ends at once, as by `os._exit`."""


def checksum_of(number: float) -> int:
    """Return a checksum of the number in place of a tensor's."""
    return zlib.crc32(repr(number).encode())


class FakeEngine:
    """An engine with one number for weights."""

    name = "fake"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weights = 0.0
        self._has_weights = True
        self._awake = asyncio.Event()
        self._awake.set()
        self.policy_version = 0
        self.tokens_made = 0

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        if request.prompt_ids == (UNANSWERED,):
            (self._folder / "unanswered").touch()
            await asyncio.sleep(3600)
        await self._awake.wait()
        tokens = np.array([*request.prompt_ids, *request.eos_ids], dtype=np.int32)
        self.tokens_made += len(tokens) * request.num_completions
        completion = Completion(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            finish_reason=FinishReason.STOP,
            policy_version=self.policy_version,
            policy_version_newest=self.policy_version,
        )
        return GenerationResult.from_completions((completion,) * request.num_completions)

    async def load_weights(self, path: Path, version: int, *, is_locked: bool = False) -> dict[str, int]:
        if not path.exists():  # noqa: ASYNC240 - a local file; engines raise the same error
            raise ModelError(f"{path} is damaged: No such file")
        text = path.read_text()  # noqa: ASYNC240 - a few bytes
        if text == "damaged":
            raise ModelError("weights are damaged")
        self._awake.set()
        if not self._is_stale("stale-version"):
            self.policy_version = version
        if not self._is_stale("stale-weights"):
            self._weights = float(text)
        self._has_weights = True
        return {"number": checksum_of(self._weights)}

    async def load_shared(self, shared: SharedWeights, version: int) -> dict[str, int]:
        script = self._folder / "sharing"
        outcome = script.read_text() if script.exists() else shared.export_id
        with (self._folder / "shared").open("a") as calls:
            calls.write(f"{version} {outcome}\n")
        if outcome == "refused":
            raise SharingError("CUDA IPC cannot open a handle")
        if outcome == "fatal":
            raise Exited
        if outcome == "failing":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._weights, self._has_weights, self.policy_version = float(outcome), True, version
        self._awake.set()
        return {"number": checksum_of(self._weights)}

    def _is_stale(self, name: str) -> bool:
        counter = self._folder / name
        if not counter.exists() or int(counter.read_text()) == 0:
            return False
        counter.write_text(str(int(counter.read_text()) - 1))
        return True

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        return [self._weights] * (len(token_ids) - 1)

    async def sleep(self, *, discard: bool = False) -> None:
        with (self._folder / "slept").open("a") as calls:
            calls.write("discard\n" if discard else "keep\n")
        self._has_weights = not discard
        if discard:
            self._weights = float("nan")
        self._awake.clear()

    async def wake(self) -> None:
        if not self._has_weights:
            raise WorkerTaskError("the engine has discarded its weights")
        self._awake.set()

    @property
    def is_asleep(self) -> bool:
        return not self._awake.is_set()

    async def wait_broken(self) -> str:
        while not (self._folder / "broken").exists():  # noqa: ASYNC110 - the test is in another process
            await asyncio.sleep(0.01)
        return (self._folder / "broken").read_text()

    async def close(self) -> None:
        (self._folder / "closed").touch()


@asynccontextmanager
async def build(boot: GenerationBoot, emit: Emitter) -> AsyncIterator[Handlers]:
    engine = FakeEngine(Path(boot.model))
    reporters = [
        asyncio.create_task(report_tokens(engine, emit, every_s=0.02)),
        asyncio.create_task(report_break(engine, emit)),
    ]
    yield Service(engine).handlers()
    for reporter in reporters:
        reporter.cancel()
    await engine.close()


class InProcessLife:
    """A stand-in for `WorkerProcess` whose handlers run in this process. Messages are encoded, as between processes."""

    def __init__(self, spec: WorkerSpec, *, number: int) -> None:
        self.pid = next(PIDS)
        self.num_reports = 0  # of progress
        self._spec = spec
        self._death: asyncio.Future[FtisError] = asyncio.get_running_loop().create_future()
        self._resources = AsyncExitStack()
        self._handlers: Handlers = {}

    def __call__(self, event: Message) -> None:
        assert self._spec.on_event is not None
        self._spec.on_event(event)

    def progress(self) -> None:
        self.num_reports += 1

    @property
    def is_alive(self) -> bool:
        return not self._death.done()

    async def __aenter__(self) -> InProcessLife:
        assert isinstance(self._spec.boot, GenerationBoot)
        self._handlers = await self._resources.enter_async_context(build(self._spec.boot, self))  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill("was stopped")
        await self._resources.aclose()

    async def until_ready(self) -> None:
        """Return at once: it is built on entry."""

    async def until_death(self) -> FtisError:
        return await asyncio.shield(self._death)

    async def call(self, request: Message, reply_type: type[Body], *, on_event: OnEvent | None = None) -> Body:
        assert on_event is None, "no call of this client has events"
        received: Message = again(request, type(request))
        working = asyncio.ensure_future(self._handlers[type(request)](received, self))  # type: ignore[arg-type]
        try:
            await asyncio.wait({working, self._death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
        if self._death.done():
            raise copy.copy(self._death.result())
        try:
            return again(working.result(), reply_type)
        except Exited:
            self.kill("exited")
            raise copy.copy(self._death.result()) from None
        except Exception as error:
            raise error_of(failure_of(error, call_id=1), worker="generation") from None

    def kill(self, how: str) -> None:
        if not self._death.done():
            self._death.set_result(WorkerDiedError(f"the generation worker {how}"))

    end = kill


def again(message: Message, kind: type[Body]) -> Body:
    """Return the message from its bytes."""
    _, body = pack(Ready(), message)
    return unpack_body(body, kind)


def kill_worker(client: GenerationClient) -> None:
    """Kill the client's worker, as by SIGKILL."""
    life = client.supervisor._life
    assert life is not None
    life.kill("was killed")
