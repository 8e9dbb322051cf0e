"""The messages of the generation worker. A `GenerateRequest` and its reply, a `GenerationResult`, are the engines'."""

from __future__ import annotations

from typing import Literal

from ftis_node.generation.engines.base import EngineSettings
from ftis_node.workers.weight_store import SharedWeights
from ftis_node.workers.wire import Message


class GenerationBoot(Message, frozen=True):
    """The worker's configuration. `model` is a folder or hub id."""

    model: str
    settings: EngineSettings
    engine: Literal["auto", "vllm", "torch"] = "auto"


class LoadWeights(Message, frozen=True):
    """A request to serve the file at `path` as `version`, and to compare its tensors with `checksums`.

    Without `checksums` they are computed from the file. With `shared` there is no file: the weights are in the
    learner's memory. `is_locked`: lock the file's pages for the copy to the GPU.
    """

    path: str
    version: int
    checksums: dict[str, int] = {}
    shared: SharedWeights | None = None
    is_locked: bool = False


class WeightsLoaded(Message, frozen=True):
    """The version that the engine reports as served, and the seconds that loading took.

    `difference` names the tensors with wrong checksums, as `workers.weight_store.find_difference` does.
    """

    version: int
    load_s: float = 0.0
    difference: str | None = None


class ShareBase(Message, frozen=True):
    """A request for the handles of an adapter's base, `SharedWeights`."""


class Sleep(Message, frozen=True):
    """A request to stop admission, finish or interrupt the requests in flight, and free memory.

    With `discard` the weights are freed, too: only `LoadWeights` wakes the engine then.
    """

    discard: bool = False


class Wake(Message, frozen=True):
    """A request to continue with the served weights. New weights wake the engine, too."""


class Probe(Message, frozen=True):
    """A request for the log-probs of fixed tokens."""

    token_ids: tuple[int, ...]


class Probed(Message, frozen=True):
    """Log-probs of all tokens but the first."""

    logprobs: tuple[float, ...]


class Describe(Message, frozen=True):
    """A request for the name of the opened engine."""


class Description(Message, frozen=True):
    """The engine's name, with "auto" resolved."""

    engine: str


class TokensMade(Message, frozen=True):
    """An event about once a second: completion tokens sampled since this worker started."""

    total: int


class StartPhase(Message, frozen=True):
    """An event: this phase of the start begins; "" at its end."""

    phase: str


class EngineBroken(Message, frozen=True):
    """An event: the engine has failed for good and this worker should be restarted; `reason` follows "the engine"."""

    reason: str
