"""Sleep, wake, weight updates and completions in flight of a vLLM engine core. Does not import vLLM.

The core requires this order of sleep, wake and weight updates:

    awake    --sleep(1)--> asleep, weights in host memory --wake-----------------------> awake
             --sleep(2)--> asleep, weights discarded      --new weights, nothing else--> awake

Level 2 avoids copying all weights to the host and back. vLLM keeps a model's buffers itself. At the wake-up it
allocates the parameters again, uninitialized: nothing may be computed before new weights are loaded.

Weights change only while generation is paused. The core stamps the version on a step's tokens at their output, not at
their computation. So a step in progress would be stamped with a version that it did not use.

Sleep mode uses the driver's virtual memory. With some new cards and drivers it loses data or ends the process. A node
whose workers take turns finds that at its first start on a card (`try_sleep`), not in the middle of a run. A file in
vLLM's cache marks a card that passed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ftis_node.errors import (
    EngineError,
    FtisError,
    NonFiniteError,
    SharingError,
    WorkerTaskError,
    first_line,
    says_out_of_memory,
)
from ftis_node.generation.engines.base import Engine, GenerateRequest, GenerationResult, settle
from ftis_node.records.group import Completion, FinishReason
from ftis_node.workers.weight_store import SharedWeights

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}  # any other reason: aborted
KEEP_LEVEL, DISCARD_LEVEL = 1, 2
PAUSE_LEVEL = 0
TOLERANCE_NATS = 0.01  # of a sleep; the same computation and weights: only another order of sums may differ
WAKE_ORDER = ("weights", "kv_cache")
FAILED = "failed in vLLM: "
DISCARDED = "the engine has discarded its weights: it serves nothing before it is given others"


@dataclass(slots=True, eq=False)
class VllmCompletion:
    """One completion, which is one request for vLLM: it can end before the others of its group.

    `request_id` is vLLM's, `salt` that of the cache of its weights. `version` is the served version when it first was
    passed to the core, the oldest possible one, and `newest` the newest. A completion with an adapter has that one
    version, or one more after each sleep. `adapter` is its number, None for the model's own weights. `num_draws` counts
    the restarts because the first id was no token, `num_pauses` the sleeps of the engine. After a sleep it continues as
    a request whose prompt ends in its tokens.
    """

    job: VllmJob
    index: int
    salt: str = ""
    version: int = 0
    newest: int = 0
    adapter: int | None = None
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_draws: int = 0
    num_pauses: int = 0

    @property
    def seed(self) -> int | None:
        """Return the seed, a new one at each start: the same one would always draw the same numbers."""
        request, num_starts = self.job.request, self.num_draws + self.num_pauses
        return None if request.seed is None else request.seed + self.index + num_starts * request.num_completions

    def pause(self) -> None:
        """Note that the core no longer has it. Its adapter is not needed again."""
        self.num_pauses += 1
        self.adapter = None

    def begin(self, *, salt: str, version: int, adapter: int | None) -> None:
        """Note that the model of `version`, with that adapter, samples the next token."""
        self.salt, self.adapter = salt, adapter
        if not self.token_ids:
            self.version = self.newest = version
        elif adapter is not None:  # tokens with an adapter carry no version
            self.newest = version

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float], *, version: int, vocab_size: int) -> None:
        """Append the next tokens, sampled by `version` of the model's weights or by the adapter if there is one.

        An id that is padding of the embedding ends it before that id.
        """
        num_tokens = next((n for n, token_id in enumerate(token_ids) if token_id >= vocab_size), len(token_ids))
        self.token_ids.extend(token_ids[:num_tokens])
        self.logprobs.extend(logprobs[:num_tokens])
        if self.adapter is None:
            self.newest = max(self.newest, version)
        if num_tokens < len(token_ids):
            self.finish_reason = FinishReason.ABORT
        elif self.job.request.is_stopped(self.token_ids):
            self.finish_reason = FinishReason.STOP

    def completion(self) -> Completion:
        """Return the completion as a record; one in progress counts as aborted. Raises NonFiniteError for NaN
        log-probs.
        """
        if not all(map(math.isfinite, self.logprobs)):
            raise NonFiniteError("the model's logits are not finite: the weights that it serves are damaged")
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.minimum(np.array(self.logprobs, dtype=np.float32), 0.0),  # rounding can leave up to 1e-7
            finish_reason=self.finish_reason or FinishReason.ABORT,
            policy_version=self.version,
            policy_version_newest=self.newest,
        )


@dataclass(slots=True, eq=False)
class VllmJob:
    """A group from its request to its result, a future that any thread may await."""

    request: GenerateRequest
    result: Future[GenerationResult] = field(default_factory=Future)
    partials: list[VllmCompletion] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return len(self.partials) == self.request.num_completions and all(
            partial.finish_reason for partial in self.partials
        )

    def finish(self) -> None:
        try:
            settle(self.result, GenerationResult.from_completions([partial.completion() for partial in self.partials]))
        except NonFiniteError as error:
            settle(self.result, error)


class LoraAdapters:
    """The adapters of one core, one for each version that is served or still has completions in flight.

    Each load gets a new number, because vLLM reuses an adapter with a known number, and the learner repeats a version
    after a crash. With more adapters than `num_places` the core would evict one that is in use, so a place is freed
    first. `current` is the number of the served adapter, None for none. `make_request` is vLLM's `LoRARequest`.
    """

    def __init__(self, make_request: Callable[..., Any], num_places: int) -> None:
        self._make_request = make_request
        self._num_places = num_places
        self._held: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self.current: int | None = None

    def request(self, number: int | None) -> Any:
        """Return the `LoRARequest` shared by all requests with that adapter; None for None."""
        return None if number is None else self._held[number]

    def oldest_in_the_way(self) -> int | None:
        """Return the adapter to drop before another can be loaded; None if a slot is free."""
        if len(self._held) < self._num_places:
            return None
        return min(number for number in self._held if number != self.current)

    def load(self, core: Any, folder: Path, version: int) -> None:
        """Serve the adapter in `folder`. If vLLM refuses it, the call raises and changes nothing."""
        number = next(self._numbers)
        adapter = self._make_request(lora_name=f"{number}-version-{version}", lora_int_id=number, lora_path=str(folder))
        core.add_lora(adapter)
        self._held[number] = adapter
        self.current = number

    def drop_unused(self, core: Any, in_use: Set[int | None]) -> None:
        """Remove all adapters from the core except the current one and those `in_use`."""
        for number in self._held.keys() - in_use - {self.current}:
            core.remove_lora(number)
            del self._held[number]


class VllmCore:
    """An adapter of vLLM's `EngineCoreClient`, for use in one thread. `can_sleep`: it frees memory during sleep.

    `is_asleep`: it computes nothing; `has_weights`: it holds weights.
    """

    def __init__(self, client: Any, *, can_sleep: bool) -> None:
        self._client = client
        self._can_sleep = can_sleep
        self.is_asleep = False
        self.has_weights = True
        self._unmapped: tuple[str, ...] = ()  # the core refuses the whole call if one of the named tags is awake

    def sleep(self, *, discard: bool) -> None:
        """Free memory if supported; with `discard` also the weights. No request may be in flight."""
        if self._can_sleep and not self.is_asleep:
            self.has_weights = not discard
            self._client.sleep(DISCARD_LEVEL if discard else KEEP_LEVEL)
            self._unmapped = WAKE_ORDER
        self.is_asleep = True

    def wake(self) -> None:
        """Continue with the loaded weights. Raises WorkerTaskError if they were discarded: it stays asleep."""
        if not self.has_weights:
            raise WorkerTaskError(DISCARDED)
        self._wake_memory(*WAKE_ORDER)
        self.is_asleep = False

    def load(self, path: str, version: int, *, is_locked: bool = False) -> dict[str, int]:
        """Serve the file at `path` from the next step on, and wake up. Returns the checksums of the first worker, which
        has those of its unsharded tensors.
        """
        return self._load("ftis_load", (path, is_locked), version)

    def load_shared(self, shared: SharedWeights, version: int) -> dict[str, int]:
        """Serve the learner's own tensors, as `load` does. Raises SharingError, without a change, if a worker cannot
        map them.
        """
        for refused in self._client.collective_rpc("ftis_open", args=(msgspec.msgpack.encode(shared),)):
            if refused:
                raise SharingError(refused)
        return self._load("ftis_load_shared", (), version)

    def share_base(self, shapes: Mapping[str, Sequence[int]]) -> SharedWeights:
        """Return the handles of the base's tensors, whose shapes are given by name. Raises SharingError."""
        found, *others = self._client.collective_rpc("ftis_share", args=(dict(shapes),))
        if others or isinstance(found, str):
            raise SharingError("several workers of vLLM hold the base" if others else found)
        return msgspec.msgpack.decode(found, type=SharedWeights)

    def _load(self, method: str, arguments: Sequence[Any], version: int) -> dict[str, int]:
        self._wake_memory("weights")
        if not self.is_asleep:
            self._client.sleep(PAUSE_LEVEL, "keep")  # starts no step, and waits for those in progress
        try:
            checksums: dict[str, int] = self._client.collective_rpc(method, args=tuple(arguments))[0]
        except FtisError:  # of this process, before any weight changed
            if not self.is_asleep:
                self._client.wake_up(["scheduling"])
            raise
        self._client.set_weight_version(str(version))
        self.has_weights = True
        if self.is_asleep:
            self._wake_memory("kv_cache")  # only after the update has freed its temporary memory
            self.is_asleep = False
        else:
            self._client.wake_up(["scheduling"])
        return checksums

    def _wake_memory(self, *tags: str) -> None:
        if due := [tag for tag in tags if tag in self._unmapped]:
            self._unmapped = tuple(tag for tag in self._unmapped if tag not in due)
            self._client.wake_up(due)


def card_marker() -> Path:
    """Return the file that marks this card as tested, with these versions of vLLM and torch."""
    import torch
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    name = re.sub(r"\W+", "-", f"{current_platform.get_device_name()}-{vllm.__version__}-{torch.__version__}")
    return Path(envs.VLLM_CACHE_ROOT) / "ftis-node" / f"slept-{name}"


async def try_sleep(engine: Engine, token_ids: Sequence[int], marker: Path) -> None:
    """Let the engine sleep and wake, and compare the log-probs of `token_ids`. Write the marker if they are equal.

    Raises EngineError with the settings that need no sleep, and the engine's own error if memory was short.
    """
    expected = await engine.probe(token_ids)
    try:
        await engine.sleep()
        await engine.wake()
        got = await engine.probe(token_ids)
    except Exception as error:  # a WorkerTaskError: the engine ended, and knows the cause
        ended = isinstance(error, WorkerTaskError)
        reason = await engine.wait_broken() if ended else first_line(error)
        if says_out_of_memory(reason):
            raise
        raise _refused(reason) from error
    difference = float(np.abs(np.subtract(got, expected)).max())
    if not difference <= TOLERANCE_NATS:  # it may be NaN
        raise _refused(f"log-probs differ by {difference:.3g} afterwards")
    _mark(marker)


def _mark(marker: Path) -> None:
    with suppress(OSError):  # a read-only cache: the next start tries again
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _refused(reason: str) -> EngineError:
    return EngineError(
        f"generation cannot sleep while the learner works on this card ({reason}): "
        'set memory.placement = "shared", or give a smaller model or a second GPU'
    )
