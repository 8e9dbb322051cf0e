"""The daemon's client of the generation worker: it supervises one worker and checks a proof of the weights it serves.

After each update of weights the worker names the version that it serves, and compares the checksums of its tensors with
the learner's. It also computes the log-probs of the learner's probe tokens, which are compared here. One failed proof
is tried again. A second one restarts the worker, which loads the newest weights and proves them before any call reaches
it. So a worker that is READY serves the version that it names.

A worker that dies asleep is not restarted until it is woken, because the learner now uses the memory that its start
needs. Before each restart after a lack of memory, `make_room` is awaited.

Weights may come without a file (`workers/weights/shared_weights.py`). If the worker cannot map them, the learner is
asked for a file, now and for later versions. A sleeping worker may have discarded its weights. Unless new ones come,
those that it served last are then loaded again before any other request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ftis_node.errors import FtisError, ModelError, SharingError, WorkerDiedError, WorkerTaskError
from ftis_node.generation.messages import (
    Asleep,
    Awake,
    Describe,
    Description,
    EngineBroken,
    Generate,
    Generated,
    LoadWeights,
    Probe,
    Probed,
    Sleep,
    TokensMade,
    Wake,
    WeightsLoaded,
)
from ftis_node.generation.source import WeightSource
from ftis_node.generation.throughput import Throughput
from ftis_node.generation.time_limits import TimeLimits
from ftis_node.workers.spec import WorkerSpec
from ftis_node.workers.supervisor import MakeRoom, Supervisor, WorkerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ftis_node.generation.engines.base import GenerationResult
    from ftis_node.generation.messages import GenerationBoot
    from ftis_node.records.group import SamplingSettings
    from ftis_node.workers.process import WorkerProcess
    from ftis_node.workers.restart_policy import RestartPolicy
    from ftis_node.workers.spec import Timing
    from ftis_node.workers.weights.store import PublishedWeights, WeightProof

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")
CallWorker: TypeAlias = "Callable[[Any, type[Reply]], Awaitable[Reply]]"
OnProblem: TypeAlias = Callable[[str], None]
WriteWeights: TypeAlias = Callable[[str], Awaitable["PublishedWeights | None"]]
ProofToCome: TypeAlias = "asyncio.Future[WeightProof | None]"  # None: the learner could not compute it

WORKER_MODULE = "ftis_node.generation.worker"
PROOF_ATTEMPTS = 2
# The largest root mean square, in nats, of the differences between two correct forward passes of the probe.
# The bound of float32 is ten times what vLLM and torch differ by here. Published for bfloat16, vLLM and a trainer: a
# standard deviation of 0.050, and 0.477 at most among 3,916 tokens. For a trainer and itself: 0.055 and 0.656
# (https://github.com/huggingface/trl/issues/6789), and a root mean square of 0.039
# (https://github.com/ServiceNow/Fast-LLM/pull/525). The bound is more than five times that, for other models. With
# those tails, 1 version in 75,000 exceeds it. It detects gross faults only: checksums detect small ones.
PROOF_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.25}


class GenerationClient:
    """The client of the generation worker. `start`, `run` and `stop` are those of the supervisor."""

    def __init__(
        self,
        boot: GenerationBoot,
        *,
        sockets_dir: Path,
        log_path: Path,
        num_threads: int | None = None,
        request_timeout_s: float | None = None,
        proof_tolerance: float = PROOF_TOLERANCES["float32"],
        timing: Timing | None = None,
        restart_policy: RestartPolicy | None = None,
        environment: Mapping[str, str] | None = None,
        on_problem: OnProblem | None = None,
        make_room: MakeRoom | None = None,
        write_weights: WriteWeights | None = None,
        on_fall_back: OnProblem | None = None,
        worker_module: str = WORKER_MODULE,
    ) -> None:
        """Take the worker's settings and the callbacks.

        `proof_tolerance` is a root mean square in nats. `on_problem` gets one sentence for every failed proof.
        `make_room` returns when other processes have freed memory. `write_weights` has the learner write a file, as its
        method of that name does. `on_fall_back` gets the reason, once, if weights cannot be passed as planned.
        """
        spec = WorkerSpec(
            name="generation",
            module=worker_module,
            boot=boot,
            sockets_dir=sockets_dir,
            log_path=log_path,
            event_types=(TokensMade, EngineBroken),
            environment=({} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)})
            | dict(environment or {}),
        )
        self._awake = asyncio.Event()
        self._awake.set()
        self._supervisor = Supervisor(
            spec,
            timing=timing,
            restart_policy=restart_policy,
            on_started=self._bring_up,
            on_event=self._take_event,
            until_wanted=self._awake.wait,
            make_room=make_room,
        )
        self._request_timeout_s = request_timeout_s
        self._time_limits = TimeLimits(request_timeout_s)
        self._proof_tolerance = proof_tolerance
        self._on_problem = on_problem
        self._handing_over = asyncio.Lock()
        self._newest: tuple[PublishedWeights, ProofToCome] | None = None
        self._source = WeightSource(write_weights, on_fall_back)
        self._has_discarded = False
        self._may_discard = boot.settings.can_sleep and boot.settings.lora_rank is None
        self._throughput = Throughput()
        self.engine: str = boot.engine
        self.policy_version = 0
        self.load_s: float | None = None  # of the newest weights, in the worker
        self.groups_made = 0
        self.tokens_made = 0

    @property
    def newest(self) -> GenerationClient:
        """Return this client, which serves the newest weights."""
        return self

    @property
    def state(self) -> WorkerState:
        """The worker's state."""
        return self._supervisor.state

    @property
    def is_alive(self) -> bool:
        """Return whether the worker serves or will serve again."""
        return self.state not in (WorkerState.STOPPED, WorkerState.FAILED)

    @property
    def is_asleep(self) -> bool:
        """Return whether requests wait until `wake` or new weights."""
        return not self._awake.is_set()

    @property
    def hand_over(self) -> str:
        """How the newest weights came, in words: `file` or a faster way; "" before any."""
        return self._source.how

    @property
    def restarts(self) -> int:
        """The number of restarts after a death."""
        return self._supervisor.restarts

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._supervisor.pid

    @property
    def last_error(self) -> FtisError | None:
        """Why the last worker process ended."""
        return self._supervisor.last_error

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens sampled per second over the last moments."""
        return self._throughput.per_second(now_s=time.monotonic())

    async def start(self) -> None:
        """Return when the worker serves. Raises ModelError, EngineError, MachineError, WorkerDiedError."""
        await self._supervisor.start()

    async def run(self) -> None:
        """Keep the worker alive until canceled, then stop it; raises when it is given up."""
        await self._supervisor.run()

    async def wait_ready(self) -> None:
        """Return when the worker serves, also after a death. Raises when it was given up."""
        await self._supervisor.wait_ready()

    async def stop(self) -> None:
        """End the worker; calls in flight raise WorkerDiedError."""
        await self._supervisor.stop()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        sampling: SamplingSettings,
        max_tokens: int,
        seed: int | None = None,
    ) -> GenerationResult:
        """Generate one group, unscored. Raises WorkerDiedError, WorkerTaskError (the time limit, too) and
        NonFiniteError.

        Time that the worker spends asleep, or falling asleep, does not count toward the limit.
        """
        request = Generate(
            prompt_ids=tuple(prompt_ids),
            num_completions=num_completions,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=max_tokens,
            seed=seed,
        )
        try:
            async with self._time_limits.of_a_call():
                generated = await self._supervisor.call(request, Generated)
        except TimeoutError:
            limit_s = self._request_timeout_s
            raise WorkerTaskError(f"the generation worker did not answer Generate in {limit_s} s") from None
        self.groups_made += 1
        self.tokens_made += sum(generated.lengths)
        return generated.to_result()

    async def update_weights(self, weights: PublishedWeights, proof: ProofToCome | WeightProof | None = None) -> None:
        """Return when the worker serves these weights and, if there is a proof, has proved it.

        The learner may still compute the proof: the worker begins with the weights meanwhile. Raises ModelError for a
        file that is missing, damaged or of another model; the worker then continues with its old weights. Raises
        WorkerDiedError if the worker died meanwhile; the next process begins with these weights.
        """
        async with self._handing_over:
            self._end_sleep()  # loading wakes the worker
            to_come = proof if isinstance(proof, asyncio.Future) else _known(proof)
            previous, self._newest = self._newest, (weights, to_come)
            try:
                problem = await self._serve_newest(self._supervisor.call)
            except (ModelError, SharingError):
                self._newest = previous
                await self._serve_again()
                raise
            except WorkerTaskError as error:  # it may serve neither the old nor the new weights now
                problem = f"failed over weights {weights.version}: {error}"
                self._report(problem)
            if problem is not None:
                await self._begin_again(problem)

    async def try_weights(self, weights: PublishedWeights, proof: WeightProof) -> None:
        """Serve weights of another source, as `update_weights` does. If they fail, the worker serves the previous ones
        again.

        Raises ModelError for a file that does not fit, and for weights that twice failed their proof. The worker was
        then restarted with the previous ones. Raises WorkerDiedError if the worker died meanwhile, for any reason.
        """
        async with self._handing_over:
            self._end_sleep()
            previous, self._newest = self._newest, (weights, _known(proof))
            try:
                problem = await self._serve_newest(self._supervisor.call)
            except (ModelError, SharingError):
                self._newest = previous
                await self._serve_again()
                raise
            except WorkerDiedError:
                self._newest = previous
                await self._supervisor.wait_ready()
                raise
            except WorkerTaskError as error:
                problem = f"fails over them: {error}"
            if problem is None:
                return
            self._newest = previous
            await self._begin_again(problem)
            raise ModelError(f"weights {weights.version} are not taken, because the worker {problem}")

    async def sleep(self, *, discard: bool = False) -> None:
        """Return when the worker has finished its requests and freed its memory. Requests wait from now on.

        With `discard` new weights should come before it is woken; if none come, it loads the last ones again. It does
        not discard weights that came with the model. After a failed load of discarded weights it discards none again. A
        worker that dies meanwhile has freed its memory, too. Raises the supervisor's error if the worker is given up.
        """
        async with self._handing_over:
            if self.is_asleep:
                return
            self._time_limits.halt()
            discard = discard and self._may_discard and self._newest is not None
            try:
                await self._supervisor.call(Sleep(discard=discard), Asleep)
                self._has_discarded = discard
            except WorkerDiedError as error:
                if not self.is_alive:
                    raise
                logger.warning("the generation worker is not put to sleep: %s", error)
            except BaseException:
                self._time_limits.go_on()
                raise
            self._awake.clear()

    async def wake(self) -> None:
        """Return when the worker serves the previous weights again, after a restart if it died. No-op if awake."""
        async with self._handing_over:
            if self.is_asleep:
                self._end_sleep()
                await self._serve_again()

    def _end_sleep(self) -> None:
        self._awake.set()
        self._time_limits.go_on()

    async def _bring_up(self, life: WorkerProcess) -> None:
        """Prepare a new worker process before calls reach it."""
        self.engine = (await life.call(Describe(), Description)).engine
        self.policy_version = 0
        self._has_discarded = False
        newest = self._newest
        if newest is None:
            return
        try:
            problem = await self._serve_newest(life.call, is_new_life=True)
        except (ModelError, SharingError) as error:
            # A learner that died before its checkpoint has taken these weights back; it will publish others.
            self._report(f"serves the model as it came, until there are new weights: {error}")
            if self._newest is newest:  # others may wait at the gate already
                self._newest = None
            return
        if problem is not None:
            raise WorkerTaskError(f"generation: {problem}")  # a worker's fault, so that it is tried again

    async def _serve_again(self) -> None:
        """Wake the worker with the newest weights, which it may have discarded while asleep. After a failure, restart
        it.
        """
        problem: str | None = None
        try:
            if self._has_discarded:
                problem = await self._serve_newest(self._supervisor.call)
            else:
                await self._supervisor.call(Wake(), Awake)
        except WorkerDiedError:
            await self._supervisor.wait_ready()  # the new process has loaded them and is awake
        except FtisError as error:
            problem = f"cannot take its former weights again: {error}"
        if problem is not None:
            await self._begin_again(problem)

    async def _begin_again(self, problem: str) -> None:
        """Restart the worker. After a failure to load discarded weights, none are discarded any more."""
        self._may_discard = self._may_discard and not self._has_discarded
        self._supervisor.restart(problem)
        await self._supervisor.wait_ready()

    async def _serve_newest(self, call: CallWorker[Any], *, is_new_life: bool = False) -> str | None:
        """Serve the newest weights as `_serve` does, from shared memory or from a file.

        A new process may find that the learner's memory has changed, or that its predecessor died over it. Raises
        SharingError if the weights are nowhere.
        """
        newest = self._newest
        assert newest is not None, "called with weights to serve"
        weights, to_come = newest
        reason = self._source.begin(weights)
        if reason is None:
            reason = ""
            try:
                problem = await self._serve(call, weights, to_come)
            except SharingError as error:
                reason = str(error)
            except ModelError:
                self._source.abandon()
                raise
            else:
                self._source.end(weights)
                if problem is None or weights.shared is None or not is_new_life:
                    return problem
        written = await self._source.write(reason)
        if written is None:
            raise SharingError(f"the learner has taken weights {weights.version} back")
        if written.version != weights.version:
            to_come = _known(None)  # its checksums prove it; the log-probs come with its own update
        if self._newest is newest:  # others may wait at the gate already
            self._newest = written, to_come
        problem = await self._serve(call, written, to_come)
        self._source.end(written)
        return problem

    async def _serve(self, call: CallWorker[Any], weights: PublishedWeights, to_come: ProofToCome) -> str | None:
        """Load and prove, at most twice. Returns None, or the fault of what the worker serves."""
        problem: str | None = None
        for _ in range(PROOF_ATTEMPTS):
            load = LoadWeights(
                path=weights.path,
                version=weights.version,
                checksums=weights.checksums,
                shared=weights.shared,
                is_locked=weights.way == "pinned",
            )
            loaded = await call(load, WeightsLoaded)
            self.load_s, problem = loaded.load_s, loaded.difference
            if loaded.version != weights.version:
                problem = f"says it serves version {loaded.version}"
            proof = await asyncio.shield(to_come)
            if problem is None and proof is not None:
                problem = await self._find_difference(partial(call, Probe(token_ids=proof.probe_ids), Probed), proof)
            if problem is None:
                self.policy_version = weights.version
                self._has_discarded = False
                return None
            problem = f"{problem} after it was given version {weights.version}"
            self._report(problem)
        return problem

    async def _find_difference(self, probe: Callable[[], Awaitable[Probed]], proof: WeightProof) -> str | None:
        difference = proof.rms_difference((await probe()).logprobs)
        if difference <= self._proof_tolerance:
            return None
        return (
            f"differs from the learner by {difference:.2g} nats (RMS) on the probe, more than {self._proof_tolerance:g}"
        )

    def _report(self, problem: str) -> None:
        logger.warning("the generation worker %s", problem)
        if self._on_problem is not None:
            self._on_problem(problem)

    def _take_event(self, event: TokensMade | EngineBroken) -> None:
        if isinstance(event, TokensMade):
            self._throughput.reach(event.total, at_s=time.monotonic())
            return
        problem = f"is started again, because its engine {event.reason}"
        self._report(problem)
        self._supervisor.restart(problem)


def _known(proof: WeightProof | None) -> ProofToCome:
    to_come: ProofToCome = asyncio.get_running_loop().create_future()
    to_come.set_result(proof)
    return to_come
