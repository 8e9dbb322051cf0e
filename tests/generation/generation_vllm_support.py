"""vLLM engines in a separate process, which tests drive through the client of real nodes.

vLLM changes its process permanently (environment, process groups, registries), so it never runs in that of pytest. This
file has both sides. `RemoteEngine` is for the tests. `python -m generation_vllm_support` is a worker that opens engines
one after the other. `make_client` starts the worker of real nodes instead.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from generation_support import PYTHON_PATH, save_model
from torch.nn.functional import linear

from ftis_node.backoff import ExponentialBackoff
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.engines.vllm_options import environment
from ftis_node.generation.messages import (
    Describe,
    Description,
    GenerationBoot,
    LoadWeights,
    Probe,
    Probed,
    WeightsLoaded,
)
from ftis_node.generation.weight_loader import PROOF_TOLERANCES
from ftis_node.generation.worker import Service
from ftis_node.models import resolve_model
from ftis_node.workers.liveness import RestartPolicy, Timing
from ftis_node.workers.weight_store import PublishedWeights
from ftis_node.workers.wire import Done, Message
from ftis_node.workers.worker import Emitter, Handlers, run_worker
from tests import cpu_sharing

# vLLM's attention on a CPU takes no smaller heads. With weights of 0.1, float32 rounds by up to 1.1e-5.
VLLM_MODEL = {"head_dim": 32, "num_layers": 4, "spread": 0.06}
MAX_BATCH = 16
VLLM_SETTINGS = EngineSettings(
    vocab_size=96,
    dtype="float32",
    device="cpu",
    seed=0,
    max_batch=MAX_BATCH,
    max_model_len=512,
    max_version_span=2,
    can_sleep=True,
)
PLAIN = (lambda layer, remove_weight: None, lambda layer, x, weight, bias=None: linear(x, weight, bias))
STALL_S = 10.0  # a busy machine may make no step for seconds


class Open(Message, frozen=True):
    """A request to serve this model with these settings and with the model's own weights."""

    model: str
    settings: EngineSettings
    is_plain: bool = False  # linear layers keep their matrices, as on a GPU: they are not packed for oneDNN


class Break(Message, frozen=True):
    """A request to make the driver fail between two steps. The reply has what `wait_broken` returns."""


class Inspect(Message, frozen=True):
    """A request for `EngineState`."""


class EngineState(Message, frozen=True):
    """The requests in the driver and in vLLM's scheduler, and counters."""

    num_waiting: int = 0
    num_running: int = 0
    num_scheduled: int = 0
    tokens_made: int = 0
    prompt_tokens_cached: int = 0
    broken: str = ""

    @property
    def is_busy(self) -> bool:
        return self.num_running + self.num_waiting + self.num_scheduled > 0


class EngineHost(Service):
    """The worker's handlers, with one engine at a time."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._engine: Any = None
        self._opened: Open | None = None
        self._packed: tuple[Any, Any] | None = None

    async def open(self, request: Open, emit: Emitter) -> Done:
        """Open another engine only for another model or other settings."""
        if request == self._opened:
            await self._engine.load_weights(Path(request.model) / "model.safetensors", 0)
            return Done()
        await self.close()
        os.environ.update(environment(request.settings, device="cpu"))
        from vllm.model_executor.layers import utils

        self._packed = self._packed or (utils.dispatch_cpu_unquantized_gemm, utils.cpu_unquantized_gemm)
        utils.dispatch_cpu_unquantized_gemm, utils.cpu_unquantized_gemm = PLAIN if request.is_plain else self._packed
        self._engine = await choose_engine("vllm")(resolve_model(request.model), request.settings, self._emit.progress)
        self._opened = request
        (Path(request.model) / "COMPLETE").touch()
        return Done()

    async def close(self) -> None:
        self._opened = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()

    async def describe(self, request: Describe, emit: Emitter) -> Description:
        return Description(engine="vllm")

    async def inspect(self, request: Inspect, emit: Emitter) -> EngineState:
        driver = self._engine._driver
        return EngineState(
            num_waiting=len(driver._waiting),
            num_running=len(driver._running),
            num_scheduled=len(driver._core.engine_core.scheduler.requests),
            tokens_made=self._engine.tokens_made,
            prompt_tokens_cached=driver.prompt_tokens_cached,
        )

    async def break_driver(self, request: Break, emit: Emitter) -> EngineState:
        def fail() -> None:
            raise RuntimeError("out of order")

        self._opened = None
        self._engine._driver.call(fail)
        return EngineState(broken=await self._engine.wait_broken())

    def handlers(self) -> Handlers:
        own = {Open: self.open, Inspect: self.inspect, Break: self.break_driver}
        return {**super().handlers(), **own}


@asynccontextmanager
async def build(boot: GenerationBoot, emit: Emitter) -> AsyncIterator[Handlers]:
    host = EngineHost(emit)
    yield host.handlers()
    await host.close()


class RemoteEngine(GenerationClient):
    """The client of that worker. Its processes share weights as on a GPU (`tests/cpu_sharing.py`)."""

    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self._folder = folder
        super().__init__(
            GenerationBoot(model="", settings=VLLM_SETTINGS),
            sockets_dir=folder / "s",
            log_path=folder / "engine.log",
            num_threads=1,
            environment={"PYTHONPATH": f"{cpu_sharing.site_folder(folder / 'site')}:{PYTHON_PATH}"},
            on_problem=self.problems.append,
            worker_module="generation_vllm_support",
        )

    async def open(self, model: Path, settings: EngineSettings, *, is_plain: bool = False) -> None:
        """Serve the model with these settings and its own weights, as version 0."""
        self._loader.newest, self._loader.served_version = None, 0
        self.problems.clear()
        await self.supervisor.call(Open(model=str(model), settings=settings, is_plain=is_plain), Done)

    async def serve(self, *, model: dict[str, Any] = VLLM_MODEL, **changed: Any) -> None:
        """Serve a tiny model of seed 0, with changed settings."""
        folder = self._folder / "-".join(["m", *(f"{key}{value}" for key, value in model.items())])
        if not folder.exists():
            save_model(folder, **model)
        await self.open(folder, msgspec.structs.replace(VLLM_SETTINGS, **changed))

    async def load(self, weights: PublishedWeights, **changed: Any) -> str | None:
        """Load weights without a proof. Returns how the tensors differ from the checksums, or None."""
        load = LoadWeights(weights.path, weights.version, weights.checksums, weights.shared)
        request = msgspec.structs.replace(load, **changed)
        return (await self.supervisor.call(request, WeightsLoaded)).difference

    async def load_weights(self, path: Path, version: int) -> None:
        """Load weights as an engine does."""
        await self.load(PublishedWeights(version, str(path), 0))

    async def probe(self, token_ids: Sequence[int]) -> Sequence[float]:
        return (await self.supervisor.call(Probe(token_ids=tuple(token_ids)), Probed)).logprobs

    async def break_driver(self) -> str:
        return (await self.supervisor.call(Break(), EngineState)).broken

    async def inspect(self) -> EngineState:
        return await self.supervisor.call(Inspect(), EngineState)

    async def wait_for_tokens(self, tokens_made: int, *, num_running: int = 0) -> EngineState:
        """Return when the engine has sampled `tokens_made` tokens in total and has `num_running` completions."""
        async with asyncio.timeout(30):
            while True:
                state = await self.inspect()
                if state.tokens_made >= tokens_made and state.num_running >= num_running:
                    return state
                await asyncio.sleep(0.005)


def make_client(
    folder: Path, *, engine_core: str, problems: list[str] | None = None, **changed: Any
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
            backoff=ExponentialBackoff(first_s=0.05, ceiling_s=0.05),
            quick_death_s=math.inf,  # so that the number of deaths, not a machine's speed, decides
            max_quick_deaths=9,
        ),
        on_problem=None if problems is None else problems.append,
    )


if __name__ == "__main__":
    run_worker(build, boot_type=GenerationBoot)
