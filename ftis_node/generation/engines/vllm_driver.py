"""The thread that drives vLLM's engine core: it submits requests, runs steps and collects tokens.

    other threads --call()--> [queue of an executor with one thread] --> command, turn, command, turn, ...

A turn admits groups, runs one step, takes its tokens, and queues the next turn. So commands run between two steps.
The driver uses the core directly (`EngineCoreClient`, the base of vLLM's own `LLM` and `AsyncLLM`), so a group can end
early with its present tokens. After any error of the core the driver ends, and every waiting caller gets an error.

Groups wait here, not in the core, until the batch has space. Completions that begin with the same weights share the
cache of their prompts, also turns of an episode. Others have another salt: no prompt of old weights serves new ones.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from ftis_node.errors import FtisError, ModelError, WorkerTaskError
from ftis_node.generation.engines.base import AWAKENED, EngineSettings, settle
from ftis_node.generation.engines.vllm_core import (
    FAILED,
    FINISH_REASONS,
    LoraAdapters,
    VllmCompletion,
    VllmCore,
    VllmJob,
)
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH, num_loras, sampling_arguments
from ftis_node.records.group import FinishReason
from ftis_node.workers.weight_store import SharedWeights

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ENDED = "the engine was closed, or failed"
MAX_DRAWS = 100  # draws of a first token; a correct model rarely needs a second
UNUSED_FIELDS = dict.fromkeys(("mm_features", "pooling_params", "data_parallel_rank"))
# For log-probs of a prompt itself. vLLM also samples one token, which is ignored.
PROBE_PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)


class VllmDriver:
    """The driver of one engine core. Other threads use `call` and the attributes; all else runs in its thread."""

    def __init__(self, settings: EngineSettings, on_progress: Callable[[], None]) -> None:
        self._settings = settings
        self._max_batch = settings.max_batch or DEFAULT_MAX_BATCH
        self._on_progress = on_progress
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._has_turn = False  # queued
        self._is_closed = False
        self._waiting: deque[VllmJob] = deque()
        self._running: dict[str, VllmCompletion] = {}
        self._paused: list[VllmCompletion] = []  # interrupted by a sleep
        self._probes: dict[str, tuple[Future[list[float]], int | None]] = {}  # with the number of the adapter
        self._adapters = LoraAdapters(LoRARequest, num_loras(can_sleep=settings.can_sleep))
        self._new_ids = map(str, itertools.count())
        self._salt = next(self._new_ids)  # of the weights that are served
        self._sleepers: list[Future[None]] = []
        self._may_discard = False  # discard the weights, if all callers of `sleep` allow it
        self._core: Any = None
        self._state = VllmCore(None, can_sleep=False)
        self.broken: Future[str] = Future()
        self.policy_version = 0
        self.tokens_made = 0
        self.prompt_tokens_cached = 0  # computed before with the same weights
        self.max_model_len = 0

    def call(self, command: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
        """Run a command between two steps. An error that is no FtisError ends the driver.

        The future raises WorkerTaskError if the driver has ended.
        """
        return self.thread.submit(self._run_command, command, *arguments)

    @property
    def core_is_dead(self) -> bool:
        """Return whether the core's own process ended unexpectedly. A core inside this process never does."""
        resources = getattr(self._core, "resources", None)
        return not self._is_closed and resources is not None and bool(resources.engine_dead)

    @property
    def _has_work(self) -> bool:
        is_due = (self._waiting or self._paused) and not self.is_asleep
        return bool(self._running or self._probes or self._sleepers or is_due)

    @property
    def is_asleep(self) -> bool:
        return self._state.is_asleep

    # The commands.

    def open(self, open_core: Callable[[], tuple[Any, int]]) -> None:
        """Start the core, which `open_core` returns with the maximum length of a sequence."""
        self._core, self.max_model_len = open_core()
        self._state = VllmCore(self._core, can_sleep=self._settings.can_sleep)
        self._core.set_weight_version(str(self.policy_version))

    def submit(self, job: VllmJob) -> None:
        self._waiting.append(job)

    def drop(self, job: VllmJob) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        self._abort([partial for partial in job.partials if partial.finish_reason is None])

    def load(self, load: Callable[[VllmCore], dict[str, int]], version: int) -> dict[str, int]:
        """Serve other full weights, which `load` loads, from the next step on. Returns its result, the checksums.

        Completions that are too old, or that use an adapter, end.
        """
        self._salt = next(self._new_ids)
        checksums = load(self._state)
        self._end_sleepers(WorkerTaskError(AWAKENED))
        self._adapters.current = None
        self._serve(version)
        self._begin(self._cut_off(lambda partial: partial.adapter is not None))
        return checksums

    def share_base(self, shapes: Mapping[str, Sequence[int]]) -> SharedWeights:
        return self._state.share_base(shapes)

    def adapt(self, folder: Path, version: int) -> None:
        """Serve an adapter to all requests that begin from now on; those in flight keep theirs. Raises ModelError."""
        self.wake()
        self._salt = next(self._new_ids)
        self._drop_unused_adapters()
        unbegun: list[VllmCompletion] = []
        if (oldest := self._adapters.oldest_in_the_way()) is not None:
            unbegun = self._cut_off(lambda partial: partial.adapter == oldest)
            self._drop_unused_adapters()
        try:
            self._adapters.load(self._core, folder, version)
        except EngineDeadError:
            raise
        except Exception as error:
            raise ModelError(f"vLLM refuses the adapter in {folder}: {error}") from error
        else:
            self._serve(version)
        finally:
            self._begin(unbegun)
            self._on_progress()  # the first adapter takes seconds without a step

    def probe(self, token_ids: Sequence[int]) -> Future[list[float]]:
        """Return the log-probs of `token_ids[1:]`, computed in the next step. Raises WorkerTaskError during sleep."""
        if self.is_asleep:
            raise WorkerTaskError("the engine is asleep: wake it first")
        request_id, adapter = next(self._new_ids), self._adapters.current
        answer: Future[list[float]] = Future()
        self._probes[request_id] = answer, adapter
        self._send(request_id, token_ids, PROBE_PARAMS, salt=request_id, adapter=adapter)
        return answer

    def sleep(self, asleep: Future[None], discard: bool) -> None:
        """Stop admission. Interrupt all completions until the engine is awake. `asleep`: the memory is free."""
        self._may_discard = discard and (self._may_discard or not self._sleepers)
        self._salt = next(self._new_ids)  # the cache's memory is freed
        self._sleepers.append(asleep)
        self._core.abort_requests([*self._running])
        for partial in self._running.values():
            partial.pause()
        self._paused += self._running.values()
        self._running.clear()

    def wake(self) -> None:
        """Serve the previous weights again; no-op if awake. Raises WorkerTaskError as `VllmCore.wake` does."""
        self._state.wake()
        self._end_sleepers(WorkerTaskError(AWAKENED))

    def end(self) -> None:
        """Fail all requests, and end the core. All later commands raise."""
        if self._is_closed:
            return
        self._is_closed = True
        begun = {partial.job for partial in (*self._running.values(), *self._paused)}
        answers: list[Future[Any]] = [job.result for job in (*begun, *self._waiting)]
        answers += [answer for answer, _ in self._probes.values()] + self._sleepers
        for answer in answers:
            settle(answer, WorkerTaskError(ENDED))
        if self._core is not None:
            self._core.shutdown()

    # The loop.

    def _run_command(self, command: Callable[..., Answer], *arguments: Any) -> Answer:
        """Run a command or a turn, then queue the next turn if there is work."""
        if self._is_closed:
            raise WorkerTaskError(ENDED)
        try:
            return command(*arguments)
        except FtisError:
            raise
        except Exception as error:
            logger.exception("vLLM's engine core failed")
            self.broken.set_result(f"{FAILED}{type(error).__name__}: {error}")
            self.end()
            raise
        finally:
            if self._has_work and not (self._has_turn or self._is_closed):
                self._has_turn = True
                self.call(self._turn)

    def _turn(self) -> None:
        """Admit groups and run one step. Without requests, put the core to sleep if a caller requested it."""
        self._has_turn = False
        self._admit()
        if self._running or self._probes:
            self._take(self._core.get_output())
            self._on_progress()
        elif self._sleepers:
            self._state.sleep(discard=self._may_discard)
            self._end_sleepers(None)

    def _admit(self) -> None:
        """Pass groups to the core while the batch has space. The last may exceed it; its rest waits in the core."""
        self._sleepers = [sleeper for sleeper in self._sleepers if not sleeper.cancelled()]
        if self._sleepers or self.is_asleep:
            return
        paused, self._paused = self._paused, []
        self._begin(paused)
        while self._waiting and len(self._running) < self._max_batch:
            job = self._waiting.popleft()
            if not job.result.cancelled():
                job.partials += (VllmCompletion(job, index) for index in range(job.request.num_completions))
                self._begin(job.partials)

    def _end_sleepers(self, outcome: WorkerTaskError | None) -> None:
        for sleeper in self._sleepers:
            settle(sleeper, outcome)
        self._sleepers.clear()

    def _begin(self, partials: Sequence[VllmCompletion]) -> None:
        """Pass new or interrupted partials to the core."""
        for partial in partials:
            partial.begin(salt=self._salt, version=self.policy_version, adapter=self._adapters.current)
            self._start(partial)

    def _start(self, partial: VllmCompletion) -> None:
        partial.request_id = next(self._new_ids)
        self._running[partial.request_id] = partial
        request, sampled = partial.job.request, partial.token_ids
        params = SamplingParams(**sampling_arguments(request, seed=partial.seed, num_sampled=len(sampled)))
        prompt_ids = (*request.prompt_ids, *sampled)
        self._send(partial.request_id, prompt_ids, params, salt=partial.salt, adapter=partial.adapter)

    def _send(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, salt: str, adapter: int | None
    ) -> None:
        """Pass one sequence to the core. Only requests with equal `salt` share prompts."""
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt_ids),
            sampling_params=params,
            arrival_time=time.time(),
            lora_request=self._adapters.request(adapter),
            cache_salt=salt,
            **UNUSED_FIELDS,
        )
        self._core.add_request(request)

    def _take(self, outputs: EngineCoreOutputs) -> None:
        version = int(outputs.weight_version or 0)
        for output in outputs.outputs:
            if (partial := self._running.get(output.request_id)) is not None:
                self._take_tokens(partial, output, version)
            elif output.new_prompt_logprobs_tensors is not None and output.request_id in self._probes:
                logprobs = output.new_prompt_logprobs_tensors.logprobs[:, 0]
                answer, _ = self._probes.pop(output.request_id)
                settle(answer, logprobs.tolist())
        self._drop_unused_adapters()

    def _take_tokens(self, partial: VllmCompletion, output: EngineCoreOutput, version: int) -> None:
        if output.prefill_stats is not None:
            self.prompt_tokens_cached += output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            partial.finish_reason = FINISH_REASONS.get(str(output.finish_reason), FinishReason.ABORT)
        if output.new_token_ids:
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            partial.take(output.new_token_ids, logprobs, version=version, vocab_size=self._settings.vocab_size)
            self.tokens_made += len(output.new_token_ids)
        if partial.finish_reason is not None:
            if output.finish_reason is None:
                self._core.abort_requests([partial.request_id])
            self._end(partial)

    def _end(self, partial: VllmCompletion) -> None:
        del self._running[partial.request_id]
        if partial.token_ids:
            if partial.job.has_ended:
                partial.job.finish()
            return
        partial.finish_reason = None  # the first id is no token: sample again
        partial.num_draws += 1
        if partial.num_draws < MAX_DRAWS:
            self._start(partial)
        else:
            self.drop(partial.job)
            error = f"the model samples no tokens: {MAX_DRAWS} times an id beyond the tokenizer's"
            settle(partial.job.result, WorkerTaskError(error))

    def _serve(self, version: int) -> None:
        """Stamp `version` on tokens from now on. End completions that began too many versions ago."""
        self.policy_version = version
        oldest = version - self._settings.max_version_span
        self._begin(self._cut_off(lambda partial: partial.version < oldest))

    def _cut_off(self, is_meant: Callable[[VllmCompletion], bool]) -> list[VllmCompletion]:
        """End the matching partials with their present tokens. Returns those without a token, which must restart."""
        ended = [partial for partial in (*self._running.values(), *self._paused) if is_meant(partial)]
        self._abort(ended)
        unbegun = [partial for partial in ended if not partial.token_ids]
        for partial in unbegun:
            partial.finish_reason = None
        for job in {partial.job for partial in ended}:
            if job.has_ended:
                job.finish()
        return unbegun

    def _drop_unused_adapters(self) -> None:
        in_use = {partial.adapter for partial in self._running.values()}
        self._adapters.drop_unused(self._core, in_use | {adapter for _, adapter in self._probes.values()})

    def _abort(self, partials: Sequence[VllmCompletion]) -> None:
        for partial in partials:
            partial.finish_reason = FinishReason.ABORT
            self._running.pop(partial.request_id, None)
        self._paused = [partial for partial in self._paused if partial.finish_reason is None]
        self._core.abort_requests([partial.request_id for partial in partials])
