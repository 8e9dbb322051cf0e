"""Completions in flight and commands of the vLLM engine. Nothing here imports vLLM.

A group becomes one vLLM request for each completion, so that single completions can end early and have their own
versions. `version` is the served version when a completion was passed to the engine. A prompt computed before an update
may be sampled after it, so `version` is the oldest possible one. A completion with an adapter ends with the same
adapter, and has that one version.
"""

from __future__ import annotations

import math
import queue
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ftis_node.errors import FtisError, NonFiniteError, WorkerTaskError
from ftis_node.generation.engines.base import GenerationResult
from ftis_node.records.group import Completion, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.generation.engines.base import GenerateRequest

Answer = TypeVar("Answer")

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}  # any other reason: aborted


@dataclass(slots=True, eq=False)
class VllmCompletion:
    """One completion. `request_id` is vLLM's, `salt` that of its group's cache. `version` and `newest` bound its
    versions.

    `adapter` is the number of the adapter that samples it, None for the model's own weights. `num_draws` counts its
    restarts because the first id was no token.
    """

    job: VllmJob
    index: int
    salt: str
    version: int
    newest: int
    adapter: int | None = None
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_draws: int = 0

    @property
    def seed(self) -> int | None:
        """Return the seed, a new one at each draw: the same one would always give the same id."""
        request = self.job.request
        return None if request.seed is None else request.seed + self.index + self.num_draws * request.num_completions

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
class PendingProbe:
    """A probe in progress: fixed tokens whose log-probs are computed with the adapter of that number."""

    answer: Future[list[float]]
    adapter: int | None


@dataclass(slots=True, eq=False)
class VllmJob:
    """A group from its request to its result, a future that any thread may await."""

    request: GenerateRequest
    result: Future[GenerationResult] = field(default_factory=Future)
    partials: list[VllmCompletion] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Return whether every completion has ended."""
        return len(self.partials) == self.request.num_completions and all(
            partial.finish_reason for partial in self.partials
        )

    def finish(self) -> None:
        """Return the sampled tokens to the caller; completions in progress count as aborted."""
        try:
            result = GenerationResult.from_completions(tuple(partial.completion() for partial in self.partials))
        except NonFiniteError as error:
            self.fail(error)
            return
        if self.result.set_running_or_notify_cancel():
            self.result.set_result(result)

    def fail(self, error: Exception) -> None:
        """Fail the caller's future with an error."""
        fail(self.result, error)


class CommandQueue:
    """A queue of commands from any thread to one. Each command runs, or its answer fails with `refusal`."""

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]] = queue.SimpleQueue()
        self.is_closed = False

    def post(self, command: Callable[[], None], answer: Future[Any] | None = None) -> None:
        """Queue `command` for the next `run`. If it never runs, `answer` fails."""
        self._commands.put((command, answer))
        if self.is_closed:  # the thread may have ended before it could run the command
            self.refuse()

    def call(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Post `work` and return a future of its result. Its errors, except FtisErrors, also propagate out of `run`."""
        answer: Future[Answer] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except FtisError as error:
                answer.set_exception(error)
            except Exception as error:
                answer.set_exception(error)
                raise

        self.post(command, answer)
        return answer

    def run(self, *, wait: bool) -> None:
        """Run the queued commands until one closes the queue. With `wait`, wait for the first one."""
        with suppress(queue.Empty):
            command, _ = self._commands.get(block=wait)
            command()
            while not self.is_closed:
                command, _ = self._commands.get(block=False)
                command()

    def close(self) -> None:
        """Refuse all later commands."""
        self.is_closed = True

    def refuse(self) -> None:
        """Fail the commands that arrived after the end."""
        with suppress(queue.Empty):
            while True:
                _, answer = self._commands.get(block=False)
                fail(answer, WorkerTaskError(self._refusal))


def fail(answer: Future[Any] | None, error: Exception) -> None:
    """Set an exception on `answer`, unless it is None or done."""
    if answer is None or answer.done():
        return
    if answer.running() or answer.set_running_or_notify_cancel():
        answer.set_exception(error)
