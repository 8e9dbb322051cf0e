"""The daemon's client of the learner's worker process. Imports no torch.

If the worker dies, the call in flight raises WorkerDiedError and the supervisor restarts it. `await client.start()`
then waits for the new process and returns its state, which may be one step ahead of the last report.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from ftis_node.errors import FtisError, SharingError, WorkerDiedError
from ftis_node.learner import messages
from ftis_node.learner.distributed.launch import COMMUNICATION
from ftis_node.learner.messages import AuditReply, CheckpointEvent, LearnerBoot, LearnerState, TrainGroup, TrainReply
from ftis_node.workers.liveness import RestartPolicy, Timing
from ftis_node.workers.preload import KEEPS_FREED_BLOCKS, Preload
from ftis_node.workers.process import WorkerProcess, WorkerSpec
from ftis_node.workers.supervisor import Supervisor, WorkerClient
from ftis_node.workers.weight_store import PublishedWeights, SharedWeights, WeightProof
from ftis_node.workers.wire import Done

OnPublished: TypeAlias = "Callable[[PublishedWeights | WeightProof], None]"

log = logging.getLogger(__name__)
EVENT_TYPES = (messages.CheckpointSkipped, messages.CheckpointInProgress, PublishedWeights, WeightProof)
MODULE = "ftis_node.learner.worker"
# torch's allocator on a GPU: expandable segments fragment less than blocks of fixed sizes.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
GROWING_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class LearnerClient(WorkerClient):
    """The client of one learner's worker, which it keeps alive. Call all methods in one event loop.

    `share_base` returns the handles of the base that the generator holds, when it serves; None: each has its own.
    """

    def __init__(
        self,
        boot: LearnerBoot,
        *,
        sockets_dir: Path,
        log_path: Path,
        timing: Timing | None = None,
        restart_policy: RestartPolicy | None = None,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[CheckpointEvent], None] | None = None,
        on_slow_stop: Callable[[], object] | None = None,
        preload: Preload | None = None,
        worker_module: str = MODULE,
    ) -> None:
        spec = WorkerSpec(
            name="learner",
            module=worker_module,
            boot=boot,
            sockets_dir=sockets_dir,
            log_path=log_path,
            event_types=EVENT_TYPES,
            timing=timing or Timing(),
            on_event=on_event,
            on_slow_stop=on_slow_stop,
            environment=worker_environment(boot) | dict(environment or {}),
            preload=preload,
            complete=self._with_base,
        )
        super().__init__(Supervisor(spec, restart_policy=restart_policy, on_started=self._ask_state))
        self.share_base: Callable[[], Awaitable[SharedWeights]] | None = None
        self._has_base = False  # of the generator's present process, in the learner's
        self.state: LearnerState | None = None  # at the start of its present process
        self._known_restarts = 0  # when the learner was last at the caller's step

    async def start(self) -> LearnerState:
        """Return the learner's state as soon as it takes requests, at the first start or after a restart.

        Raises ModelError, ConfigError, MachineError or NetworkError, and WorkerDiedError if it died too often.
        """
        await self.supervisor.start()
        assert self.state is not None  # `_ask_state` ran before the supervisor called the worker ready
        self._known_restarts = self.restarts
        return self.state

    async def train(
        self, groups: Sequence[TrainGroup], *, step: int, on_published: OnPublished | None = None
    ) -> TrainReply:
        """Do step `step`, one more than the last. For the last step done, the worker returns the stored report.

        `on_published` receives the new weights and then their proof before the reply, while the checkpoint is written.
        Raises WorkerDiedError if the worker died meanwhile, MachineError if memory or disk do not suffice.
        """
        request = messages.TrainRequest(step=step, groups=tuple(groups))
        try:
            reply = await self.supervisor.call(request, messages.TrainReply, on_event=on_published)
        except FtisError as error:
            if self.restarts == self._known_restarts:
                raise
            raise WorkerDiedError(f"the learner died between two steps and was started again: {error}") from error
        self._known_restarts = self.restarts  # an earlier death lost no step
        return reply

    async def check(self, group: TrainGroup) -> None:
        """Measure the mismatch on an own group, for the next step's report. Raises WorkerDiedError."""
        await self.supervisor.call(messages.CheckRequest(group=group), Done)

    async def audit(self, group: TrainGroup) -> AuditReply:
        """Compare a peer's log-probs as `AuditRequest` says. Raises WorkerDiedError or WorkerTaskError."""
        return await self.supervisor.call(messages.AuditRequest(group=group), messages.AuditReply)

    async def give_memory_back(self) -> None:
        """Return when no step is in progress and the learner's cached memory is free. Raises WorkerDiedError."""
        await self.supervisor.call(messages.GiveMemoryBack(), Done)

    async def write_weights(self, refused: str = "") -> PublishedWeights | None:
        """Write the weights after the step in progress, as `WriteWeights` says; None for the starting model.

        Raises MachineError if the disk refuses, or WorkerDiedError.
        """
        request = messages.WriteWeights(refused=refused)
        return (await self.supervisor.call(request, messages.WeightsWritten)).weights

    async def save(self) -> int:
        """Write the newest step to the disk and return its number. Raises MachineError or WorkerDiedError."""
        return (await self.supervisor.call(messages.SaveRequest(), messages.Saved)).step

    async def renew(self) -> None:
        """Save the newest step and start another process: the generator's process, which had the base, has ended."""
        if not self._has_base:
            return
        try:  # a process that does not run yet waits for the generator
            await self.supervisor.call_present(messages.SaveRequest(), messages.Saved)
        except FtisError as error:
            log.warning("the learner goes back to its last checkpoint: %s", error)
        self.restart("is started again, because the generator's process has ended, which had its base")

    async def _with_base(self, boot: LearnerBoot) -> LearnerBoot:
        self._has_base = False
        if self.share_base is None:
            return boot
        try:
            boot = replace(boot, base=await self.share_base())
        except SharingError as error:
            return replace(boot, base_refused=str(error))
        self._has_base = True
        return boot

    async def _ask_state(self, life: WorkerProcess) -> None:
        self.state = await life.call(messages.StateRequest(), messages.LearnerState)


def worker_environment(boot: LearnerBoot) -> dict[str, str]:
    """Return environment variables for the worker's start, because torch and glibc read them when they are loaded.

    Each step frees and allocates the same large blocks. On a CPU glibc keeps them; otherwise the kernel would clear
    their pages each time. It uses one arena, since a thread's separate arena cannot hold a block above 64 MiB. On a GPU
    torch's allocator uses expandable segments, unless the user configured it. If an engine maps the weights, segments
    expand after the weights are allocated, with a share of a GPU (`workers/shared_tensors.py`).
    """
    is_set = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    segments = {} if boot.device == "cpu" or is_set or boot.transfer == "ipc" else GROWING_SEGMENTS
    threads = {} if boot.num_threads is None else {"OMP_NUM_THREADS": str(boot.num_threads)}
    blocks = KEEPS_FREED_BLOCKS if boot.device == "cpu" else {}
    # Otherwise it starts a process for each core, up to 32, each with torch in it, for a layer's few kernels.
    compiler = {} if boot.settings.kernels == "plain" or COMPILE_THREADS in os.environ else {COMPILE_THREADS: "1"}
    return compiler | threads | blocks | segments | (COMMUNICATION if boot.settings.num_ranks > 1 else {})
