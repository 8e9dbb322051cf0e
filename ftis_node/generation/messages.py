"""What the generation worker is asked and answers. Arrays are little-endian: int32 ids, float32 log-probs."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from ftis_node.generation.engines.base import EngineSettings, GenerationResult
from ftis_node.records.group import Completion, FinishReason
from ftis_node.workers.weights.shared_weights import SharedWeights  # noqa: TC001  msgspec reads the annotations
from ftis_node.workers.wire import Message


class GenerationBoot(Message, frozen=True):
    """How the worker is built. `model` is a folder or hub id, `eos_ids` the ids that end a completion."""

    model: str
    settings: EngineSettings
    eos_ids: tuple[int, ...]
    engine: Literal["auto", "vllm", "torch"] = "auto"


class Generate(Message, frozen=True):
    """One group; `engines.base.GenerateRequest` says what the fields mean."""

    prompt_ids: tuple[int, ...]
    num_completions: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int | None


class Generated(Message, frozen=True):
    """A group's completions: `lengths` tokens each, all their ids in one array, all their log-probs in another.

    `policy_versions` are the versions that sampled their first, `policy_versions_newest` their last tokens.
    """

    lengths: tuple[int, ...]
    finish_reasons: tuple[FinishReason, ...]
    token_ids: bytes
    logprobs: bytes
    policy_versions: tuple[int, ...]
    policy_versions_newest: tuple[int, ...]


class LoadWeights(Message, frozen=True):
    """Serve the safetensors file at `path` as `version`, and compare what is held then with `checksums`.

    Where there are none, the file's own count. With `shared` there is no file: the weights lie in the learner's memory.
    `is_locked`: the file's pages are worth locking for the way to the GPU.
    """

    path: str
    version: int
    checksums: dict[str, int] = {}
    shared: SharedWeights | None = None
    is_locked: bool = False


class WeightsLoaded(Message, frozen=True):
    """The version that the engine says it serves now, and the seconds that loading took it.

    `difference` says which tensors it holds otherwise, as `workers.weights.store.find_difference` does.
    """

    version: int
    load_s: float = 0.0
    difference: str | None = None


class Sleep(Message, frozen=True):
    """Admit nothing more, let what runs end, give memory back.

    With `discard` the weights go, too: only `LoadWeights` wakes it then.
    """

    discard: bool = False


class Asleep(Message, frozen=True):
    """It is done; requests wait."""


class Wake(Message, frozen=True):
    """Go on with the weights that were served. New weights wake, too."""


class Awake(Message, frozen=True):
    """Requests are served."""


class Probe(Message, frozen=True):
    """Asks for the log-probs of fixed tokens."""

    token_ids: tuple[int, ...]


class Probed(Message, frozen=True):
    """Log-probs of all tokens but the first."""

    logprobs: tuple[float, ...]


class Describe(Message, frozen=True):
    """Asks which engine was opened."""


class Description(Message, frozen=True):
    """The engine's name, after "auto" was resolved."""

    engine: str


class TokensMade(Message, frozen=True):
    """An event about once a second: completion tokens sampled since this worker started."""

    total: int


class EngineBroken(Message, frozen=True):
    """An event: this worker can do nothing more and should be started again; `reason` follows "the engine"."""

    reason: str


def pack_result(result: GenerationResult) -> Generated:
    """A result as it travels."""
    completions = result.completions
    return Generated(
        lengths=tuple(len(completion.token_ids) for completion in completions),
        finish_reasons=tuple(completion.finish_reason for completion in completions),
        token_ids=np.concatenate([completion.token_ids for completion in completions]).astype("<i4").tobytes(),
        logprobs=np.concatenate([completion.logprobs for completion in completions]).astype("<f4").tobytes(),
        policy_versions=tuple(completion.policy_version for completion in completions),
        policy_versions_newest=tuple(completion.policy_version_newest for completion in completions),
    )


def unpack_result(generated: Generated) -> GenerationResult:
    """The inverse of `pack_result`. The arrays are read-only views of the message."""
    token_ids = np.frombuffer(generated.token_ids, dtype="<i4")
    logprobs = np.frombuffer(generated.logprobs, dtype="<f4")
    bounds = pairwise(accumulate(generated.lengths, initial=0))
    versions = zip(generated.policy_versions, generated.policy_versions_newest, strict=True)
    return GenerationResult(
        tuple(
            Completion(
                token_ids=token_ids[start:end],
                logprobs=logprobs[start:end],
                finish_reason=reason,
                policy_version=first,
                policy_version_newest=last,
            )
            for (start, end), reason, (first, last) in zip(bounds, generated.finish_reasons, versions, strict=True)
        )
    )
