"""The interface between the generation worker and its engines.

An engine takes one group per request and serves many requests at once. It returns token ids, their log-probs and the
policy versions that sampled them. It does not depend on processes, tasks or rewards.

Log-probs are those of the sampled tokens under the full softmax at the sampling temperature, computed in float32. With
temperature 0 (greedy) they are those at temperature 1. With top_p or top_k the tokens are drawn from the truncated
distribution, and the log-probs are still those of the full softmax. A group's sampling settings record that its
log-probs differ from its sampling distribution.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from ftis_node.config.workers import Quantize
from ftis_node.records.group import (
    Completion,
    FinishReason,
    SamplingSettings,  # msgspec reads the annotations
    join_completions,
)
from ftis_node.records.token_batch import TokenBatch
from ftis_node.workers.weight_store import SharedWeights
from ftis_node.workers.wire import Message

DEFAULT_MAX_VERSION_SPAN = 8
DEFAULT_MAX_PREFILL_TOKENS = 8192
MIN_PREFILL_TOKENS, PREFILL_TOKENS_PER_ROW = 2048, 32
AWAKENED = "the engine was awakened before it slept"


def settle(answer: asyncio.Future[Any] | concurrent.futures.Future[Any], outcome: Any) -> None:
    """Set the result or the exception of a future, unless it is done or its caller was canceled."""
    with suppress(asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
        if isinstance(outcome, Exception):
            answer.set_exception(copy.copy(outcome))  # one error may end many requests, and a raise modifies it
        else:
            answer.set_result(outcome)


def prefill_tokens_of(max_batch: int) -> int:
    """Return the prompt tokens of one forward pass: fewer in an engine of few completions, to save memory."""
    return max(MIN_PREFILL_TOKENS, min(DEFAULT_MAX_PREFILL_TOKENS, PREFILL_TOKENS_PER_ROW * max_batch))


class EngineSettings(Message, frozen=True):
    """The settings of a served model.

    `vocab_size` is the tokenizer's length: ids at or above it are padding of the embedding, never text. `max_batch`
    bounds the completions decoded together (None: the engine's default), `max_prefill_tokens` the padded prompt tokens
    of one forward pass. `max_model_len` bounds prompt and completion together (None: the model's limit). With `seed`
    None each start draws one. `is_truncated_sampling`: requests may use top_p or top_k. An update of weights ends
    completions that began more than `max_version_span` versions ago.

    `lora_rank` is the largest rank of a served adapter; None: none is. `quantize`: the form of the adapter's base.

    The other fields apply to vLLM. `engine_core` selects the process of its core: "auto" is the worker's own on a CPU
    and a separate one on a GPU. `memory_share` is its share of a GPU's memory (None: vLLM's default), `cache_bytes` the
    key-value cache of each GPU (None: the rest of that share). `can_sleep`: it frees memory during sleep; otherwise
    sleep only holds requests back. `options` are further `EngineArgs`.
    """

    vocab_size: int
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batch: int | None = None
    max_prefill_tokens: int = DEFAULT_MAX_PREFILL_TOKENS
    seed: int | None = None
    max_model_len: int | None = None
    max_version_span: int = DEFAULT_MAX_VERSION_SPAN
    is_truncated_sampling: bool = False
    engine_core: Literal["auto", "inside", "separate"] = "auto"
    memory_share: float | None = None
    cache_bytes: int | None = None
    lora_rank: int | None = None
    quantize: Quantize = "none"
    can_sleep: bool = False
    options: dict[str, Any] = {}

    def dtype_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """Return the type of the weights: the setting, else float32 on a CPU and bfloat16 on a GPU."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"


class GenerateRequest(Message, frozen=True, kw_only=True):
    """A request for one group: `num_completions` of one prompt, each up to `max_tokens` or one of `eos_ids`.

    One of `stop_ids`, sequences of ids, ends a completion, too.

    The same record passes from the caller to the engine. With a `seed` the same engine, weights and settings give the
    same tokens, up to rounding that depends on other requests in the batch. Raises ValueError for invalid values.
    """

    prompt_ids: tuple[int, ...]
    num_completions: int
    sampling: SamplingSettings
    max_tokens: int
    eos_ids: frozenset[int]
    stop_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a prompt needs at least one token")
        if self.num_completions < 1 or self.max_tokens < 1:
            raise ValueError("a group needs at least one completion of at least one token")

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """Return whether a completion ends with the last of these ids."""
        has_string = any(tuple(token_ids[-len(stop) :]) == stop for stop in self.stop_ids)
        return has_string or token_ids[-1] in self.eos_ids


class GenerationResult(Message, frozen=True):
    """The sampled completions of a request, unscored. Each tuple has one entry per completion.

    `policy_versions` are the versions that sampled the first tokens, `policy_versions_newest` the last tokens.
    Raises ValueError for fields of inconsistent sizes.
    """

    tokens: TokenBatch
    finish_reasons: tuple[FinishReason, ...]
    policy_versions: tuple[int, ...]
    policy_versions_newest: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = {len(self.finish_reasons), len(self.policy_versions), len(self.policy_versions_newest)}
        num_tokens = int(self.tokens.lengths.sum())
        if counts != {len(self.tokens)} or {self.tokens.num_tokens, len(self.tokens.logprobs)} != {num_tokens}:
            raise ValueError("the fields of a generation result have inconsistent sizes")

    @classmethod
    def from_completions(cls, completions: Sequence[Completion]) -> GenerationResult:
        """Return the result of these completions, with their arrays joined."""
        return cls(
            join_completions(completions),
            tuple(completion.finish_reason for completion in completions),
            tuple(completion.policy_version for completion in completions),
            tuple(completion.policy_version_newest for completion in completions),
        )

    @property
    def policy_version(self) -> int:
        """Return the oldest version that sampled a token of the group."""
        return min(self.policy_versions)

    @property
    def policy_version_newest(self) -> int:
        """Return the newest version that sampled a token of the group."""
        return max(self.policy_versions_newest)


class Engine(Protocol):
    """The interface of every engine. Call all coroutines in the event loop in which the engine was opened.

    `name` is that of the registry. `policy_version` is the served version, 0 before any weights were loaded.
    `tokens_made` counts the completion tokens sampled since the engine was opened. An engine that `is_asleep` admits no
    request until `wake`.
    """

    @property
    def name(self) -> str: ...

    @property
    def policy_version(self) -> int: ...

    @property
    def tokens_made(self) -> int: ...

    @property
    def is_asleep(self) -> bool: ...

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Generate one group. Canceling the caller ends the request.

        Raises NonFiniteError if the model's logits are NaN.
        """
        ...

    async def load_weights(self, path: Path, version: int, *, is_locked: bool = False) -> dict[str, int]:
        """Serve the weights of a published safetensors file from now on. `is_locked`: lock its pages for the GPU.

        Returns `tensor_file.checksum` of the engine's tensors after loading, by their names in the file, except those
        that it packs, converts, shards or merges. Requests in flight end on the weights with which they began, or their
        completions record the newer version. Raises ModelError, with the served weights unchanged, for a file that is
        missing, damaged or of another model.
        """
        ...

    async def load_shared(self, shared: SharedWeights, version: int) -> dict[str, int]:
        """Serve weights in the memory of another process, which keeps them constant meanwhile, as `load_weights` does.

        Raises SharingError if they cannot be mapped: nothing has changed then, and a sleeping engine stays asleep.
        """
        ...

    async def share_base(self) -> SharedWeights:
        """Return the handles of an adapter's base. Its tensors keep place and values until the engine is closed.

        Their names are those of the model's files, without a tied output head. Raises SharingError if CUDA or the
        engine's form of them does not allow it.
        """
        ...

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of `token_ids[1:]`, each given those before it, at temperature 1, under the served weights.

        Raises WorkerTaskError while the engine sleeps.
        """
        ...

    async def sleep(self, *, discard: bool = False) -> None:
        """Admit no more requests, finish or interrupt those in flight, then free memory if possible; no-op if asleep.

        With `discard` the weights need not be kept: new ones arrive before the next computation. Canceling the caller
        withdraws its request to sleep. Raises WorkerTaskError if the engine was awakened before it slept.
        """
        ...

    async def wake(self) -> None:
        """Continue with the served weights; `load_weights` wakes, too. No-op if awake.

        Raises WorkerTaskError if the weights were discarded: the engine stays asleep.
        """
        ...

    async def wait_broken(self) -> str:
        """Return when the engine has failed for good, with the reason, as words that follow "the engine"."""
        ...

    async def close(self) -> None:
        """Free all resources. Requests in flight raise."""
        ...
