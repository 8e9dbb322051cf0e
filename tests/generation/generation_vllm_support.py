"""A vLLM engine in a process of its own, which tests drive as if it were here.

vLLM leaves much behind in a process (environment, process groups, registries), so it never runs in pytest's own. This
file is both sides: `DistantEngine` here, and `python -m generation_vllm_support` there, a worker that opens one engine
after the other and answers for what `base.Engine` does. `make_client` has the worker that nodes have.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import ftis_node
from ftis_node.backoff import ExponentialBackoff
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import EngineSettings, GenerateRequest
from ftis_node.generation.messages import (
    Generated,
    GenerationBoot,
    LoadWeights,
    Probe,
    Probed,
    WeightsLoaded,
)
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.models import resolve_model
from ftis_node.workers.liveness import RestartPolicy
from ftis_node.workers.preload import Timing, WorkerSpec
from ftis_node.workers.supervisor import Supervisor
from ftis_node.workers.weight_store import find_difference
from ftis_node.workers.wire import Message
from ftis_node.workers.worker import Emitter, Handlers, run_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from ftis_node.generation.engines.base import GenerationResult
    from ftis_node.generation.engines.vllm_engine import VllmEngine

# vLLM's attention on a CPU takes no smaller heads; with weights of 0.1 float32 itself is off by up to 1.1e-5.
VLLM_MODEL = {"head_dim": 32, "num_layers": 4, "spread": 0.06}
VLLM_SETTINGS = EngineSettings(vocab_size=96, dtype="float32", device="cpu", seed=0, max_model_len=512)
STALL_S = 15.0  # a busy machine makes no step for seconds
PYTHON_PATH = f"{Path(__file__).parent}:{Path(ftis_node.__file__).parents[1]}"


class Boot(Message, frozen=True):
    """Nothing: engines are opened by request."""


class Open(Message, frozen=True):
    """Close the engine that is open and open another."""

    model: str
    settings: EngineSettings


class Cancel(Message, frozen=True):
    """Cut these requests."""

    request_ids: tuple[str, ...]


class Break(Message, frozen=True):
    """Make the driver fail between two steps; answers with what `wait_broken` says then."""


class Broken(Message, frozen=True):
    """See `Break`."""

    reason: str


class Look(Message, frozen=True):
    """What is in the engine?"""


class Sight(Message, frozen=True):
    """Requests that the driver and vLLM's scheduler hold, and counters."""

    num_waiting: int = 0
    num_running: int = 0
    num_scheduled: int = 0
    tokens_made: int = 0
    prompt_tokens_cached: int = 0

    @property
    def is_busy(self) -> bool:
        return self.num_running + self.num_waiting + self.num_scheduled > 0


class Holder:
    """The worker's side: one engine at a time."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._engine: VllmEngine | None = None

    @property
    def engine(self) -> Any:
        assert self._engine is not None
        return self._engine

    async def open(self, request: Open, emit: Emitter) -> Sight:
        await self.close()
        source = resolve_model(request.model)
        self._engine = await choose_engine("vllm")(source, request.settings, self._emit.progress)
        return Sight()

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()

    async def generate(self, request: GenerateRequest, emit: Emitter) -> Generated:
        return Generated.from_result(await self.engine.generate(request))

    async def load_weights(self, request: LoadWeights, emit: Emitter) -> WeightsLoaded:
        held = await self.engine.load_weights(Path(request.path), request.version)
        return WeightsLoaded(version=self.engine.policy_version, difference=find_difference(request.checksums, held))

    async def probe(self, request: Probe, emit: Emitter) -> Probed:
        return Probed(logprobs=tuple(await self.engine.probe(request.token_ids)))

    async def cancel(self, request: Cancel, emit: Emitter) -> Sight:
        self.engine.cancel(request.request_ids)
        return await self.look(Look(), emit)

    async def look(self, request: Look, emit: Emitter) -> Sight:
        driver = self.engine._driver
        scheduler = driver._core.engine_core.scheduler
        return Sight(
            num_waiting=len(driver._waiting),
            num_running=len(driver._running),
            num_scheduled=len(scheduler.requests),
            tokens_made=self.engine.tokens_made,
            prompt_tokens_cached=driver.prompt_tokens_cached,
        )

    async def break_driver(self, request: Break, emit: Emitter) -> Broken:
        def fail() -> None:
            raise RuntimeError("out of order")

        self.engine._driver.call(fail)
        return Broken(reason=await self.engine.wait_broken())


@asynccontextmanager
async def build(boot: Boot, emit: Emitter) -> AsyncIterator[Handlers]:
    holder = Holder(emit)
    yield {
        Open: holder.open,
        GenerateRequest: holder.generate,
        LoadWeights: holder.load_weights,
        Probe: holder.probe,
        Cancel: holder.cancel,
        Look: holder.look,
        Break: holder.break_driver,
    }
    await holder.close()


class DistantEngine:
    """The test's side; methods as of `base.Engine`, and a look inside."""

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / "engine.log"
        self._supervisor = Supervisor(
            WorkerSpec(
                name="engine",
                module="generation_vllm_support",
                boot=Boot(),
                sockets_dir=folder / "s",
                log_path=self.log_path,
                environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH},
            )
        )
        self._opened: tuple[str, EngineSettings] | None = None

    async def start(self) -> None:
        await self._supervisor.start()

    async def stop(self) -> None:
        await self._supervisor.stop()

    async def open(self, model: Path, settings: EngineSettings) -> None:
        """Serve that model in these settings; nothing to do where the engine does already, unchanged."""
        if self._opened != (str(model), settings):
            self._opened = None
            await self._supervisor.call(Open(model=str(model), settings=settings), Sight)
            self._opened = (str(model), settings)

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        return (await self._supervisor.call(request, Generated)).to_result()

    async def load_weights(self, path: Path, version: int, *, checksums: Mapping[str, int] | None = None) -> str | None:
        """What the engine holds then differs in so much from these checksums."""
        request = LoadWeights(path=str(path), version=version, checksums=dict(checksums or {}))
        loaded = await self._supervisor.call(request, WeightsLoaded)
        self._opened = None
        return loaded.difference

    async def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        return (await self._supervisor.call(Probe(token_ids=tuple(token_ids)), Probed)).logprobs

    async def cancel(self, request_ids: Iterable[str]) -> None:
        await self._supervisor.call(Cancel(request_ids=tuple(request_ids)), Sight)

    async def break_driver(self) -> str:
        self._opened = None
        return (await self._supervisor.call(Break(), Broken)).reason

    async def look(self) -> Sight:
        return await self._supervisor.call(Look(), Sight)

    async def until(self, tokens_made: int, *, num_running: int = 0) -> Sight:
        """Return when the engine has sampled that many tokens in all, and works on so many completions at once."""
        async with asyncio.timeout(30):
            while True:
                sight = await self.look()
                if sight.tokens_made >= tokens_made and sight.num_running >= num_running:
                    return sight
                await asyncio.sleep(0.005)


def make_client(
    folder: Path, *, engine_core: str, problems: list[str] | None = None, lives: int = 9, **changed: Any
) -> GenerationClient:
    """A client of the model in `folder`, whose groups end at their token limit alone; `changed` settings."""
    settings = msgspec.structs.replace(VLLM_SETTINGS, engine_core=engine_core, **changed)
    return GenerationClient(
        GenerationBoot(model=str(folder / "model"), settings=settings, engine="vllm"),
        sockets_dir=folder / "s",
        log_path=folder / "logs" / "generation.log",
        num_threads=1,
        proof_tolerance=PROOF_TOLERANCES[settings.dtype],
        timing=Timing(heartbeat_every_s=0.2, stall_timeout_s=STALL_S),
        restart_policy=RestartPolicy(backoff=ExponentialBackoff(first_s=0.05, factor=1.0), max_quick_deaths=lives),
        on_problem=None if problems is None else problems.append,
    )


if __name__ == "__main__":
    run_worker(build, boot_type=Boot)
