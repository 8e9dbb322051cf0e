"""A generation worker without a model, for the tests of the client: it starts fast, and lies when told to.

A "weights file" holds one number, which becomes every log-prob of the probe, and whose checksum stands for a tensor's.
`boot.model` is a folder; as long as the file `lies` in it holds a number above 0, a load counts it down and keeps the
old weights while claiming the new ones (`lie-about-version`: it also names the old version). Prompt id 66 is never
answered. When a file `broken` appears, the engine is beyond use, for the reason in it.

Shared weights have their number for an id, unless a file `sharing` says otherwise: `refused`, `fatal`, `failing`, or
the number that is seen instead, because the learner has moved on. `slept` has a line for each sleep; weights that were
discarded are NaN.
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
    """Stands for that of a tensor."""
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
        if not path.exists():  # noqa: ASYNC240 - what engines say of it
            raise ModelError(f"{path} is damaged: No such file")
        text = path.read_text()  # noqa: ASYNC240 - a few bytes
        if text == "damaged":
            raise ModelError("weights are damaged")
        self._awake.set()
        if not self._lies("lie-about-version"):
            self.policy_version = version
        if not self._lies("lies"):
            self._weights = float(text)
        self._has_weights = True
        return {"number": checksum_of(self._weights)}

    async def load_shared(self, shared: SharedWeights, version: int) -> dict[str, int]:
        said = self._folder / "sharing"
        what = said.read_text() if said.exists() else shared.export_id
        with (self._folder / "shared").open("a") as calls:
            calls.write(f"{version} {what}\n")
        if what == "refused":
            raise SharingError("CUDA IPC cannot open a handle")
        if what == "fatal":
            os._exit(9)
        if what == "failing":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._weights, self._has_weights, self.policy_version = float(what), True, version
        self._awake.set()
        return {"number": checksum_of(self._weights)}

    def _lies(self, about: str) -> bool:
        counter = self._folder / about
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
