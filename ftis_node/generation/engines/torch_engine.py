"""The engine for every machine: transformers' own forward pass, batched, in a separate thread.

    generate() --> waiting --(space in the batch)--> decoding --> result
                      ^                                |
                      |   held back while new weights wait for the batch to empty

One thread computes everything, a few tokens at a time. Between two such runs the driver, a task of the worker's event
loop, admits waiting requests, drops canceled ones and returns finished ones. New weights wait until the batch is empty,
and nothing is admitted meanwhile. So every group is sampled by one version.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ftis_node.errors import EngineError, OutOfMemoryError, WorkerTaskError, first_line, says_out_of_memory
from ftis_node.generation.engines.base import AWAKENED, EngineSettings, GenerateRequest, GenerationResult, settle
from ftis_node.generation.engines.decode_loop import ActiveRequest, BatchDecoder
from ftis_node.generation.engines.kv_cache import empty_cache, use_grouped_attention
from ftis_node.generation.engines.published import ServedAdapter, load_in_place, load_shared_in_place, model_shapes
from ftis_node.models import ModelSource, load_causal_lm, pick_device
from ftis_node.models.adapter_folder import ADAPTER_FILE
from ftis_node.models.loading import is_recurrent
from ftis_node.records.group import SamplingSettings
from ftis_node.telemetry.faults import watched_task
from ftis_node.workers.shared_tensors import Exporter, OpenedWeights
from ftis_node.workers.tensor_file import LockedFiles
from ftis_node.workers.weight_store import SharedWeights, probe_logprobs, probe_token_ids

DEFAULT_MAX_BATCH = 128
TOKENS_PER_HOP = 8  # more: less overhead; fewer: lower latency of new requests and cancellations
SEED_BITS = 63
DECODE_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # nats, mean over the tokens of `check_decoding`

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class _Job:
    """A request; `active` is set from its prefill on."""

    request: GenerateRequest
    answer: asyncio.Future[GenerationResult]
    active: ActiveRequest | None = None


class _Load(NamedTuple):
    """A pending weight update, which `work` copies into the model; the answer is the checksums."""

    work: Callable[[], dict[str, int]]
    version: int
    answer: asyncio.Future[dict[str, int]]


class TorchEngine:
    """The engine of a transformers model. `on_progress` is called after every few tokens, in the event loop."""

    name = "torch"

    def __init__(self, model: Any, settings: EngineSettings, on_progress: Callable[[], None] = lambda: None) -> None:
        use_grouped_attention(model)
        self._model = model
        self._settings = settings
        self._on_progress = on_progress
        self._decoder = BatchDecoder(model, vocab_size=settings.vocab_size)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._seeds = random.Random(settings.seed)
        self._waiting: deque[_Job] = deque()
        self._decoding: list[_Job] = []
        self._loads: deque[_Load] = deque()
        self._sleepers: list[asyncio.Future[None]] = []
        self.is_asleep = False
        self._opened = OpenedWeights(next(iter(model.parameters())).device)
        self._exporter = Exporter()
        self._locked = LockedFiles()
        self._adapter = ServedAdapter(model, model_shapes(model), max_rank=settings.lora_rank)
        self._driver: asyncio.Task[None] | None = None
        self.policy_version = 0
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def tokens_made(self) -> int:
        return self._decoder.tokens_made

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Generate one group; see `base.Engine`. Raises ValueError for a prompt with an id outside the vocabulary."""
        if not all(0 <= token_id < self._settings.vocab_size for token_id in request.prompt_ids):
            raise ValueError(f"the prompt has an id outside the vocabulary of {self._settings.vocab_size}")
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._wake_driver()
        return await job.answer

    async def load_weights(self, path: Path, version: int, *, is_locked: bool = False) -> dict[str, int]:
        locked = self._locked if is_locked else None
        return await self._load_by(lambda: self._load_file(path, locked), version)

    def _load_file(self, path: Path, locked: LockedFiles | None) -> dict[str, int]:
        if path.name == ADAPTER_FILE:
            return self._adapter.load(path.parent)
        self._adapter.remove()
        return load_in_place(self._model, path, locked=locked)

    def adapt(self, folder: Path) -> None:
        """Serve the adapter with which training began, before any request. Raises ModelError."""
        self._adapter.load(folder)

    async def load_shared(self, shared: SharedWeights, version: int) -> dict[str, int]:
        return await self._load_by(lambda: load_shared_in_place(self._model, shared, self._opened), version)

    async def share_base(self) -> SharedWeights:
        return await self._compute(lambda: self._exporter.share(self._adapter.base_tensors()))

    async def _load_by(self, work: Callable[[], dict[str, int]], version: int) -> dict[str, int]:
        load = _Load(work, version, asyncio.get_running_loop().create_future())
        self._loads.append(load)
        self._wake_driver()
        return await load.answer

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of fixed tokens under the served weights, computed between two runs; see `base.Engine`."""
        if self.is_asleep:
            raise WorkerTaskError("the engine is asleep: wake it first")
        return list(await self._compute(lambda: probe_logprobs(self._model, token_ids)))

    async def sleep(self, *, discard: bool = False) -> None:
        """Sleep; see `base.Engine`. The weights stay in memory: only torch's cached blocks are freed."""
        asleep: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append(asleep)
        self._wake_driver()
        await asleep

    async def wake(self) -> None:
        self._be_awake()
        self._wake_driver()

    async def wait_broken(self) -> str:
        """Return when the model ran out of memory: the failed allocations are not freed, so a retry would fail too."""
        return await self._broken

    async def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait({self._driver})
        self._decoder.stop()  # eight tokens of a large model on a CPU exceed the time limit of a stop
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        self._opened.close()
        self._locked.close()
        abandoned: list[asyncio.Future[Any]] = [job.answer for job in (*self._waiting, *self._decoding)]
        abandoned += [load.answer for load in self._loads]
        for answer in abandoned + self._sleepers:
            settle(answer, WorkerTaskError("the engine was closed"))

    async def _compute(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _wake_driver(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = watched_task(self._drive(), name="decode")

    async def _drive(self) -> None:
        """Run until no work is left. An error of the model ends the requests in the batch, not the engine."""
        while self._has_work():
            try:
                await self._clear_away()
                if self._loads and not self._decoding:
                    await self._load(self._loads[0])
                    self._loads.popleft()
                elif self._sleepers and not self._decoding:
                    await self._fall_asleep()
                else:
                    await self._hop(self._admit())
            except Exception as error:
                self._decoder.clear()
                for job in self._decoding:
                    settle(job.answer, error)
                ran_out = isinstance(error, torch.OutOfMemoryError) or says_out_of_memory(str(error))
                if ran_out and not self._broken.done():
                    self._broken.set_result("ran out of memory: make generation.max_batch smaller")
            self._on_progress()

    def _has_work(self) -> bool:
        at_once = self._loads or self._decoding or self._sleepers
        return bool(at_once or (self._waiting and not self.is_asleep))

    async def _fall_asleep(self) -> None:
        try:
            await self._compute(torch.cuda.empty_cache)  # no-op without a GPU
        except Exception as error:
            self._end_sleepers(error)
            return
        self.is_asleep = self.is_asleep or not all(asleep.done() for asleep in self._sleepers)
        self._end_sleepers(None)

    def _be_awake(self) -> None:
        self.is_asleep = False
        self._end_sleepers(WorkerTaskError(AWAKENED))

    def _end_sleepers(self, outcome: Exception | None) -> None:
        for asleep in self._sleepers:
            settle(asleep, outcome)
        self._sleepers.clear()

    async def _load(self, load: _Load) -> None:
        try:
            checksums = await self._compute(load.work)
        except Exception as error:
            settle(load.answer, error)
        else:
            self.policy_version = load.version
            self._be_awake()
            settle(load.answer, checksums)

    def _admit(self) -> list[ActiveRequest]:
        """Move jobs from waiting to decoding while the batch has space; admit none while new weights wait."""
        newcomers: list[ActiveRequest] = []
        num_rows, longest = self._decoder.num_rows, 0
        while self._waiting and not (self._loads or self._sleepers or self.is_asleep):
            request = self._waiting[0].request
            num_rows += request.num_completions
            longest = max(longest, len(request.prompt_ids))
            too_many = num_rows > (self._settings.max_batch or DEFAULT_MAX_BATCH)
            too_long = longest * (len(newcomers) + 1) > self._settings.max_prefill_tokens
            if too_many and (newcomers or self._decoding) or too_long and newcomers:
                break
            job = self._waiting.popleft()
            seed = self._seeds.getrandbits(SEED_BITS) if request.seed is None else request.seed
            job.active = ActiveRequest(request, seed=seed, policy_version=self.policy_version)
            self._decoding.append(job)
            newcomers.append(job.active)
        return newcomers

    async def _hop(self, newcomers: Sequence[ActiveRequest]) -> None:
        if newcomers or self._decoding:
            await self._compute(lambda: self._decoder.advance(newcomers, num_steps=TOKENS_PER_HOP))
        for job in self._decoding:
            if job.active is not None and job.active.has_ended:
                settle(job.answer, job.active.result())

    async def _clear_away(self) -> None:
        """Remove requests that have ended or whose caller was canceled."""
        left = [job.active for job in self._decoding if job.answer.done() and job.active is not None]
        if any(not active.has_ended for active in left):
            await self._compute(lambda: self._decoder.drop(left))
        self._decoding = [job for job in self._decoding if not job.answer.done()]
        self._waiting = deque(job for job in self._waiting if not job.answer.done())


async def open_engine(source: ModelSource, settings: EngineSettings, on_progress: Callable[[], None]) -> TorchEngine:
    """Load the model, which blocks for a while. Raises ModelError, MachineError and EngineError.

    If adapters are served, the source's own is not merged into its base.
    """
    serves_adapters = settings.lora_rank is not None
    engine = TorchEngine(load_served_model(source.base if serves_adapters else source, settings), settings, on_progress)
    if source.adapter is not None and serves_adapters:
        engine.adapt(source.adapter)
    return engine


def load_served_model(source: ModelSource, settings: EngineSettings) -> Any:
    """Return the transformers model, in memory. Raises as `open_engine`."""
    device = pick_device(settings.device)
    try:
        model = load_causal_lm(source, dtype=settings.dtype_on(device), device=device, quantize=settings.quantize)
        check_decoding(model, source.name, vocab_size=settings.vocab_size)
    except torch.OutOfMemoryError as error:
        advice = "use a smaller model, or fewer together"
        raise OutOfMemoryError(f"{source.name} does not fit into the GPU's memory: {advice}") from error
    return model


def check_decoding(model: Any, name: str, *, vocab_size: int) -> None:
    """Decode a few tokens with a recurrent model, and compare their log-probs with those of whole passes.

    Rows repeat a prompt, have padding, join a batch and leave it. Raises EngineError for a difference, and for any
    model whose cache is not supported.
    """
    decoder, ids = BatchDecoder(model, vocab_size=vocab_size), probe_token_ids(vocab_size)
    requests = [
        ActiveRequest(
            GenerateRequest(
                prompt_ids=ids[:length],
                num_completions=count,
                sampling=SamplingSettings(),
                max_tokens=num_tokens,
                eos_ids=frozenset(),
            ),
            seed=length,
            policy_version=0,
        )
        for length, count, num_tokens in ((5, 2, 2), (11, 1, 4), (8, 1, 3))
    ]
    differences = []
    try:
        empty_cache(model.config)
        if not is_recurrent(model):
            return
        decoder.advance(requests[:2], num_steps=1)
        decoder.advance(requests[2:], num_steps=1)
        while decoder.num_rows:
            decoder.advance((), num_steps=1)
        for active in requests:
            for partial in active.completions:
                whole = probe_logprobs(model, (*active.request.prompt_ids, *partial.token_ids))
                found = zip(partial.logprobs, whole[-len(partial.logprobs) :], strict=True)
                differences += [abs(one - other) for one, other in found]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the code of another architecture may raise anything
        raise EngineError(f"the torch engine cannot serve {name}: {first_line(error)}") from error
    mean = sum(differences) / len(differences)
    if not mean < DECODE_TOLERANCES[model.dtype]:
        raise EngineError(f"the torch engine cannot serve {name}: its decoded log-probs are off by {mean:.2g}")
