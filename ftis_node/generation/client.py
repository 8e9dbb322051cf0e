"""The daemon's client of the generation worker: it supervises one worker and verifies the weights that it serves.

After each update of weights the worker compares the checksums of its tensors with the learner's. The client compares
the log-probs of the learner's probe tokens. One failed proof is retried. A second one restarts the worker, which loads
and proves the newest weights before any call reaches it. So a worker that is READY serves the version that it names.

A worker that dies while it sleeps is restarted only at the next `wake`, because the learner now uses the memory that
its start needs. A sleeping worker may have discarded its weights. Unless new ones arrive, it loads its last ones again
before any other request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ftis_node.errors import EngineError, FtisError, ModelError, SharingError, WorkerDiedError, WorkerTaskError
from ftis_node.generation import messages
from ftis_node.generation.engines.base import GenerateRequest, GenerationResult
from ftis_node.generation.messages import GenerationBoot
from ftis_node.generation.weight_loader import PROOF_TOLERANCES, CallWorker, ProofToCome, WeightLoader, known
from ftis_node.workers.liveness import RestartPolicy, Timing
from ftis_node.workers.preload import Preload
from ftis_node.workers.process import WorkerProcess, WorkerSpec
from ftis_node.workers.supervisor import Preparation, Supervisor, WorkerClient, WorkerState
from ftis_node.workers.weight_store import PublishedWeights, SharedWeights, WeightProof
from ftis_node.workers.wire import Done

logger = logging.getLogger(__name__)

OnProblem: TypeAlias = Callable[[str], None]
OnPhase: TypeAlias = Callable[[str], None]  # takes the phase that begins; "" at the end of the start
WriteWeights: TypeAlias = Callable[[str], Awaitable["PublishedWeights | None"]]

WORKER_MODULE = "ftis_node.generation.worker"
MAX_POINTS = 1024  # of the token rate: a window of seconds needs a few dozen; this bounds them if nobody reads it


class Throughput:
    """A sliding window: the growth of a total per second over `window_s` seconds. The caller passes the time."""

    def __init__(self, *, window_s: float = 15.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque(maxlen=MAX_POINTS)

    def reach(self, total: int, *, at_s: float) -> None:
        """Record the total at a time. A total below the last one restarts the window: it comes from a new worker."""
        if self._points and total < self._points[-1][1]:
            self._points.clear()
        self._points.append((at_s, total))

    def per_second(self, *, now_s: float) -> float:
        """Return the mean rate over the window; 0 without growth in it.

        A gap before the last total counts at most as the window: an idle worker reports no totals.
        """
        while len(self._points) > 1 and self._points[1][0] <= now_s - self._window_s:
            self._points.popleft()
        if len(self._points) < 2:
            return 0.0
        (first_at_s, first), (_, last) = self._points[0], self._points[-1]
        return (last - first) / max(min(now_s - first_at_s, self._window_s), 1e-9)


class Borrower(Protocol):
    """Another worker that uses this worker's memory: the learner's client."""

    async def renew(self) -> None: ...
    async def stop(self) -> None: ...


class GenerationClient(WorkerClient):
    """The client of the generation worker."""

    def __init__(
        self,
        boot: GenerationBoot,
        *,
        sockets_dir: Path,
        log_path: Path,
        num_threads: int | None = None,
        proof_tolerance: float = PROOF_TOLERANCES["float32"],
        timing: Timing | None = None,
        restart_policy: RestartPolicy | None = None,
        environment: Mapping[str, str] | None = None,
        on_problem: OnProblem | None = None,
        free_memory: Preparation | None = None,
        write_weights: WriteWeights | None = None,
        on_fall_back: OnProblem | None = None,
        preload: Preload | None = None,
        borrower: Borrower | None = None,
        worker_module: str = WORKER_MODULE,
    ) -> None:
        """Store the worker's settings and the callbacks, which are those of `WeightLoader` and `Supervisor`.

        `borrower` computes from this worker's base. It starts after this worker, and ends before it.
        """
        self._borrower = borrower
        spec = WorkerSpec(
            name="generation",
            module=worker_module,
            boot=boot,
            sockets_dir=sockets_dir,
            log_path=log_path,
            event_types=(messages.TokensMade, messages.StartPhase, messages.EngineBroken),
            timing=timing or Timing(),
            on_event=self._take_event,
            environment=({} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)})
            | dict(environment or {}),
            preload=preload,
        )
        self._awake = asyncio.Event()
        self._awake.set()
        super().__init__(
            Supervisor(
                spec,
                restart_policy=restart_policy,
                on_started=self._bring_up,
                before_restart=self._before_restart,
                before_stop=None if borrower is None else borrower.stop,
                free_memory=free_memory,
            )
        )
        self._syncing = asyncio.Lock()
        self._loader = WeightLoader(
            proof_tolerance=proof_tolerance,
            on_problem=on_problem,
            write_weights=write_weights,
            on_fall_back=on_fall_back,
        )
        self._has_discarded = False
        self._may_discard = boot.settings.can_sleep and boot.settings.lora_rank is None
        self._throughput = Throughput()
        self._on_phase: OnPhase | None = None
        self.engine: str = boot.engine

    @property
    def policy_version(self) -> int:
        """Return the version that the worker serves; 0 for the starting model."""
        return self._loader.served_version

    @property
    def load_s(self) -> float | None:
        return self._loader.load_s

    @property
    def is_alive(self) -> bool:
        """Return whether the worker serves or will serve again."""
        return self.worker_state not in (WorkerState.STOPPED, WorkerState.FAILED)

    @property
    def is_asleep(self) -> bool:
        """Return whether requests wait until `wake` or new weights."""
        return not self._awake.is_set()

    @property
    def weight_transfer(self) -> str:
        """Return the transfer method of the newest weights, in words: `file` or a faster one; "" before any."""
        return self._loader.how

    @property
    def tokens_per_s(self) -> float:
        """Return the completion tokens per second over the last seconds."""
        return self._throughput.per_second(now_s=time.monotonic())

    async def start(self, on_phase: OnPhase | None = None) -> None:
        """Return when the worker serves. Raises ModelError, EngineError, MachineError, WorkerDiedError.

        `on_phase` is called with each phase of this start and of all restarts; None keeps the previous callback.
        """
        self._on_phase = on_phase or self._on_phase
        await self.supervisor.start()

    async def generate(self, request: GenerateRequest) -> GenerationResult:
        """Generate one unscored group. Raises WorkerDiedError, WorkerTaskError and NonFiniteError."""
        return await self.supervisor.call(request, GenerationResult)

    async def share_base(self) -> SharedWeights:
        """Return the handles of an adapter's base, valid until this worker's process ends; waits until it serves.

        Raises SharingError if the engine cannot share it, WorkerDiedError and the errors of `start`.
        """
        return await self.supervisor.call(messages.ShareBase(), SharedWeights)

    def begin_with(self, weights: PublishedWeights | None, proof: WeightProof) -> None:
        """Let the next process serve these weights; None: the starting model. Call it during a pause."""
        self._loader.newest = None if weights is None else (weights, known(proof))

    async def update_weights(self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None = None) -> None:
        """Return when the worker serves these weights and, if there is a proof, has proved it.

        `proof` may be a future: the worker loads the weights while the learner computes it. Raises ModelError for a
        file that is missing, damaged or of another model: the old weights stay. Raises WorkerDiedError if the worker
        died meanwhile; the next process starts with these weights.
        """
        await self._replace(weights, proof if isinstance(proof, asyncio.Future) else known(proof), is_trial=False)

    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None:
        """Serve weights of another source, as `update_weights` does. If they fail, restore the previous ones.

        Raises ModelError for a file that does not fit, and for weights that failed their proof twice. The worker then
        serves the previous ones, after a restart. Raises WorkerDiedError if the worker died meanwhile, for any reason.
        """
        await self._replace(weights, known(proof), is_trial=True)

    async def _replace(self, weights: PublishedWeights, to_come: ProofToCome, *, is_trial: bool) -> None:
        async with self._syncing:
            self._awake.set()  # loading wakes the worker
            previous, self._loader.newest = self._loader.newest, (weights, to_come)
            try:
                problem = await self._serve_newest(self.supervisor.call)
            except (ModelError, SharingError):
                self._loader.newest = previous
                await self._serve_again()
                raise
            except WorkerDiedError:
                if is_trial:
                    self._loader.newest = previous
                    await self.supervisor.wait_ready()
                raise
            except WorkerTaskError as error:  # it may now serve a mix of old and new weights, or none
                problem = f"failed over weights {weights.version}: {error}"
                self._loader.report(problem)
            if problem is None:
                return
            if is_trial:
                self._loader.newest = previous
            await self._begin_again(problem)
            if is_trial:
                raise ModelError(f"weights {weights.version} are refused, because the worker {problem}")

    async def check_start(self, proof: WeightProof) -> None:
        """Compare the starting model with the learner's. Raises EngineError if their log-probs differ.

        An engine may implement an architecture in another way, or wrongly.
        """
        probe = partial(self.supervisor.call, messages.Probe(token_ids=proof.probe_ids), messages.Probed)
        if (problem := await self._loader.find_difference(probe, proof)) is not None:
            raise EngineError(f"the engine {self.engine} {problem}: use another one with --engine")

    async def sleep(self, *, discard: bool = False) -> None:
        """Return when the worker has freed its memory. Requests, also interrupted ones, wait from now on.

        With `discard` new weights should arrive before the next `wake`. The starting model's weights are not discarded,
        and none are after a failed load of discarded weights. A worker that dies meanwhile has freed its memory, too.
        Raises the supervisor's error if no restart follows.
        """
        async with self._syncing:
            if self.is_asleep:
                return
            discard = discard and self._may_discard and self._loader.newest is not None
            try:
                await self.supervisor.call(messages.Sleep(discard=discard), Done)
                self._has_discarded = discard
            except WorkerDiedError as error:
                if not self.is_alive:
                    raise
                logger.warning("the generation worker is not put to sleep: %s", error)
            self._awake.clear()

    async def wake(self) -> None:
        """Return when the worker serves the previous weights again, after a restart if it died. No-op if awake."""
        async with self._syncing:
            if self.is_asleep:
                self._awake.set()
                await self._serve_again()

    async def _before_restart(self) -> None:
        await self._awake.wait()
        if self._borrower is not None:
            await self._borrower.renew()

    async def _bring_up(self, life: WorkerProcess) -> None:
        self.engine = (await life.call(messages.Describe(), messages.Description)).engine
        self._loader.served_version = 0
        self._has_discarded = False
        newest = self._loader.newest
        if newest is None:
            return
        try:
            problem = await self._serve_newest(life.call, is_new_life=True)
        except (ModelError, SharingError) as error:
            # A learner that died before its checkpoint no longer has these weights; it will publish others.
            self._loader.report(f"serves the model as it came, until there are new weights: {error}")
            if self._loader.newest is newest:  # a later update may already be queued
                self._loader.newest = None
            return
        if problem is not None:
            # Another process may succeed, so the worker is restarted a few times.
            raise EngineError(f"the engine {self.engine} {problem}: use another one with --engine")

    async def _serve_again(self) -> None:
        """Wake the worker with the newest weights, which it may have discarded. After a failure, restart it."""
        problem: str | None = None
        try:
            if self._has_discarded:
                problem = await self._serve_newest(self.supervisor.call)
            else:
                await self.supervisor.call(messages.Wake(), Done)
        except WorkerDiedError:
            await self.supervisor.wait_ready()  # the new process has loaded them and is awake
        except FtisError as error:
            problem = f"cannot take its former weights again: {error}"
        if problem is not None:
            await self._begin_again(problem)

    async def _begin_again(self, problem: str) -> None:
        """Restart the worker. If it failed to load discarded weights, it never discards weights again."""
        self._may_discard = self._may_discard and not self._has_discarded
        self.supervisor.restart(problem)
        await self.supervisor.wait_ready()

    async def _serve_newest(self, call: CallWorker[Any], *, is_new_life: bool = False) -> str | None:
        problem = await self._loader.serve_newest(call, is_new_life=is_new_life)
        if problem is None:
            self._has_discarded = False
        return problem

    def _take_event(self, event: messages.TokensMade | messages.StartPhase | messages.EngineBroken) -> None:
        match event:
            case messages.TokensMade():
                self._throughput.reach(event.total, at_s=time.monotonic())
            case messages.StartPhase():
                if self._on_phase is not None:
                    self._on_phase(event.phase)
            case messages.EngineBroken():
                problem = f"is started again, because its engine {event.reason}"
                self._loader.report(problem)
                self.supervisor.restart(problem)
