"""A generation worker without a model, for the tests of the client: it starts fast and fails on request.

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
import os
import zlib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ftis_node.errors import ModelError, SharingError, WorkerTaskError
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.worker import Service, report_break, report_tokens
from ftis_node.records.group import Completion, FinishReason
from ftis_node.workers.worker import Emitter, Handlers, run_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from ftis_node.workers.shared_weights import SharedWeights

UNANSWERED = 66


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
            os._exit(9)
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

    def cancel(self, request_ids: Iterable[str]) -> None:
        raise NotImplementedError

    async def wait_broken(self) -> str:
        while not (self._folder / "broken").exists():  # noqa: ASYNC110 - the test is in another process
            await asyncio.sleep(0.01)
        return (self._folder / "broken").read_text()

    async def close(self) -> None:
        (self._folder / f"closed-{os.getpid()}").touch()


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


if __name__ == "__main__":
    run_worker(build, boot_type=GenerationBoot)
