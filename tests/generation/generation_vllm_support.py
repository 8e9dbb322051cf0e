"""A vLLM engine in a separate process, which tests drive like a local engine.

vLLM changes its process permanently (environment, process groups, registries), so it never runs in that of pytest. This
file has both sides. `RemoteEngine` is for the tests. `python -m generation_vllm_support` is a worker that opens engines
one after the other and has the methods of `base.Engine`. `make_client` starts the worker of real nodes instead.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import ftis_node
from ftis_node.backoff import ExponentialBackoff
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import EngineSettings, GenerateRequest, GenerationResult
from ftis_node.generation.engines.vllm_engine import VllmEngine
from ftis_node.generation.messages import (
    GenerationBoot,
    LoadWeights,
    Probe,
    Probed,
    WeightsLoaded,
)
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.models import resolve_model
from ftis_node.workers.liveness import RestartPolicy, Timing
from ftis_node.workers.process import WorkerSpec
from ftis_node.workers.supervisor import Supervisor
from ftis_node.workers.weight_store import find_difference
from ftis_node.workers.wire import Message
from ftis_node.workers.worker import Emitter, Handlers, run_worker

# vLLM's attention on a CPU takes no smaller heads. With weights of 0.1, float32 rounds by up to 1.1e-5.
VLLM_MODEL = {"head_dim": 32, "num_layers": 4, "spread": 0.06}
VLLM_SETTINGS = EngineSettings(vocab_size=96, dtype="float32", device="cpu", seed=0, max_model_len=512)
STALL_S = 15.0  # a busy machine may make no step for seconds
PYTHON_PATH = f"{Path(__file__).parent}:{Path(ftis_node.__file__).parents[1]}"


class Boot(Message, frozen=True):
    """An empty message: engines are opened by request."""


class Open(Message, frozen=True):
    """A request to close the open engine and open another."""

    model: str
    settings: EngineSettings


class Cancel(Message, frozen=True):
    """A request to end these requests."""

    request_ids: tuple[str, ...]


class Break(Message, frozen=True):
    """A request to make the driver fail between two steps. The reply is what `wait_broken` returns."""


class Broken(Message, frozen=True):
    """The reply to `Break`."""

    reason: str


class Inspect(Message, frozen=True):
    """A request for `EngineState`."""


class EngineState(Message, frozen=True):
    """The requests in the driver and in vLLM's scheduler, and counters."""

    num_waiting: int = 0
    num_running: int = 0
    num_scheduled: int = 0
    tokens_made: int = 0
    prompt_tokens_cached: int = 0

    @property
    def is_busy(self) -> bool:
        return self.num_running + self.num_waiting + self.num_scheduled > 0


class EngineHost:
    """The worker's handlers, with one engine at a time."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._engine: VllmEngine | None = None

    @property
    def engine(self) -> Any:
        assert self._engine is not None
        return self._engine

    async def open(self, request: Open, emit: Emitter) -> EngineState:
        await self.close()
        source = resolve_model(request.model)
        self._engine = await choose_engine("vllm")(source, request.settings, self._emit.progress)
        # vLLM inspects each further architecture in another process. That takes 20 s and protects only a GPU.
        sys.modules["vllm.model_executor.models.registry"]._run_in_subprocess = lambda inspect: inspect()
        return EngineState()

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()

    async def generate(self, request: GenerateRequest, emit: Emitter) -> GenerationResult:
        return await self.engine.generate(request)

    async def load_weights(self, request: LoadWeights, emit: Emitter) -> WeightsLoaded:
        held = await self.engine.load_weights(Path(request.path), request.version)
        return WeightsLoaded(version=self.engine.policy_version, difference=find_difference(request.checksums, held))

    async def probe(self, request: Probe, emit: Emitter) -> Probed:
        return Probed(logprobs=tuple(await self.engine.probe(request.token_ids)))

    async def cancel(self, request: Cancel, emit: Emitter) -> EngineState:
        self.engine.cancel(request.request_ids)
        return await self.inspect(Inspect(), emit)

    async def inspect(self, request: Inspect, emit: Emitter) -> EngineState:
        driver = self.engine._driver
        scheduler = driver._core.engine_core.scheduler
        return EngineState(
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
    host = EngineHost(emit)
    yield {
        Open: host.open,
        GenerateRequest: host.generate,
        LoadWeights: host.load_weights,
        Probe: host.probe,
        Cancel: host.cancel,
        Inspect: host.inspect,
        Break: host.break_driver,
    }
    await host.close()


class RemoteEngine:
    """The test's side: the methods of `base.Engine`, and `inspect`."""

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
        """Serve the model with these settings. No-op if the engine already does."""
        if self._opened != (str(model), settings):
            self._opened = None
            await self._supervisor.call(Open(model=str(model), settings=settings), EngineState)
            self._opened = (str(model), settings)

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        return await self._supervisor.call(request, GenerationResult)

    async def load_weights(self, path: Path, version: int, *, checksums: Mapping[str, int] | None = None) -> str | None:
        """Load weights. Returns how the loaded tensors differ from the checksums, or None."""
        request = LoadWeights(path=str(path), version=version, checksums=dict(checksums or {}))
        loaded = await self._supervisor.call(request, WeightsLoaded)
        self._opened = None
        return loaded.difference

    async def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        return (await self._supervisor.call(Probe(token_ids=tuple(token_ids)), Probed)).logprobs

    async def cancel(self, request_ids: Iterable[str]) -> None:
        await self._supervisor.call(Cancel(request_ids=tuple(request_ids)), EngineState)

    async def break_driver(self) -> str:
        self._opened = None
        return (await self._supervisor.call(Break(), Broken)).reason

    async def inspect(self) -> EngineState:
        return await self._supervisor.call(Inspect(), EngineState)

    async def wait_for_tokens(self, tokens_made: int, *, num_running: int = 0) -> EngineState:
        """Return when the engine has sampled `tokens_made` tokens in total and has `num_running` completions."""
        async with asyncio.timeout(30):
            while True:
                state = await self.inspect()
                if state.tokens_made >= tokens_made and state.num_running >= num_running:
                    return state
                await asyncio.sleep(0.005)


def make_client(
    folder: Path, *, engine_core: str, problems: list[str] | None = None, max_quick_deaths: int = 9, **changed: Any
) -> GenerationClient:
    """Return a client of the model in `folder`, with the `changed` settings."""
    settings = msgspec.structs.replace(VLLM_SETTINGS, engine_core=engine_core, **changed)
    return GenerationClient(
        GenerationBoot(model=str(folder / "model"), settings=settings, engine="vllm"),
        sockets_dir=folder / "s",
        log_path=folder / "logs" / "generation.log",
        num_threads=1,
        proof_tolerance=PROOF_TOLERANCES[settings.dtype],
        timing=Timing(heartbeat_every_s=0.2, stall_timeout_s=STALL_S),
        restart_policy=RestartPolicy(
            backoff=ExponentialBackoff(first_s=0.05, factor=1.0),
            quick_death_s=math.inf,  # so that the number of deaths, not a machine's speed, decides
            max_quick_deaths=max_quick_deaths,
        ),
        on_problem=None if problems is None else problems.append,
    )


if __name__ == "__main__":
    run_worker(build, boot_type=Boot)
