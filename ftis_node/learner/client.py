"""The daemon's client of the learner's worker process. Imports no torch.

    client = LearnerClient(boot, sockets_dir=..., log_path=...)
    state = await client.start()                          # where the newest checkpoint left off
    reply = await client.train(groups, step=state.step + 1)
    ...
    await client.stop()                                   # between two micro-batches, with everything saved

If the worker dies, the call in flight raises WorkerDiedError and the supervisor restarts it. `await client.start()`
then waits for the new process and returns its state, which may be one step ahead of the last report.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from ftis_node.errors import FtisError, WorkerDiedError
from ftis_node.learner.distributed.launch import COMMUNICATION
from ftis_node.learner.messages import (
    AuditReply,
    AuditRequest,
    CheckpointSkipped,
    CheckReply,
    CheckRequest,
    ExportReply,
    ExportRequest,
    GiveMemoryBack,
    LearnerState,
    MemoryGivenBack,
    Saved,
    SaveRequest,
    StateRequest,
    TrainReply,
    TrainRequest,
    WeightsWritten,
    WriteWeights,
)
from ftis_node.workers.client import WorkerClient
from ftis_node.workers.spec import WorkerSpec
from ftis_node.workers.supervisor import Supervisor
from ftis_node.workers.weights.store import PublishedWeights, WeightProof

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ftis_node.learner.messages import LearnerBoot, TrainGroup
    from ftis_node.workers.process import WorkerProcess
    from ftis_node.workers.restart_policy import RestartPolicy
    from ftis_node.workers.spec import Timing

OnPublished: TypeAlias = "Callable[[PublishedWeights | WeightProof], None]"

MODULE = "ftis_node.learner.worker"
# torch's allocator on a GPU beside a generator: segments that grow leave fewer holes than blocks of fixed sizes.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
GROWING_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
KEPT_BYTES = str(1 << 40)  # of freed memory, and the size below which a block is taken from it: more than there is
KEEPS_FREED_BLOCKS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES,
    "MALLOC_MMAP_THRESHOLD_": KEPT_BYTES,
}


class LearnerClient(WorkerClient):
    """The client of one learner's worker, which it keeps alive. All methods belong to one event loop."""

    def __init__(
        self,
        boot: LearnerBoot,
        *,
        sockets_dir: Path,
        log_path: Path,
        timing: Timing | None = None,
        restart_policy: RestartPolicy | None = None,
        environment: Mapping[str, str] | None = None,
        on_checkpoint_skipped: Callable[[CheckpointSkipped], None] | None = None,
    ) -> None:
        spec = WorkerSpec(
            name="learner",
            module=MODULE,
            boot=boot,
            sockets_dir=sockets_dir,
            log_path=log_path,
            event_types=(CheckpointSkipped, PublishedWeights, WeightProof),
            environment=worker_environment(boot) | dict(environment or {}),
        )
        super().__init__(
            Supervisor(
                spec,
                timing=timing,
                restart_policy=restart_policy,
                on_started=self._ask_state,
                on_event=on_checkpoint_skipped,
            )
        )
        self._state: LearnerState | None = None
        self._known_restarts = 0  # when the caller last asked for the learner's state

    @property
    def state(self) -> LearnerState | None:
        """The learner's state at the start of its present process; None before the first."""
        return self._state

    async def start(self) -> LearnerState:
        """Return the learner's state when it takes requests, at the first start or after a restart.

        Raises the error of the worker's `build` (ModelError, ConfigError, MachineError, NetworkError), and
        WorkerDiedError if it died too often.
        """
        await self._supervisor.start()
        assert self._state is not None  # `_ask_state` ran before the supervisor called the worker ready
        self._known_restarts = self.restarts
        return self._state

    async def train(
        self, groups: Sequence[TrainGroup], *, step: int, on_published: OnPublished | None = None
    ) -> TrainReply:
        """Do step `step`, one more than the last. If it is the last one, the worker returns the stored report.

        `on_published` is given the new weights and then their proof before the reply, while the checkpoint is written.
        Raises WorkerDiedError if the worker died meanwhile, MachineError if memory or disk do not suffice.
        """
        request = TrainRequest(step=step, groups=tuple(groups))
        try:
            reply = await self._supervisor.call(request, TrainReply, on_event=on_published)
        except FtisError as error:
            if self.restarts == self._known_restarts:
                raise
            raise WorkerDiedError(f"the learner died between two steps and was started again: {error}") from error
        return reply

    async def check(self, group: TrainGroup) -> None:
        """Have the mismatch with the engine measured on an own group; returns when it was measured or dropped.

        The report of the next step has the figures, if the group came before the weights moved on from its version.
        Raises WorkerDiedError if the worker died meanwhile.
        """
        await self._supervisor.call(CheckRequest(group=group), CheckReply)

    async def audit(self, group: TrainGroup) -> AuditReply:
        """Compare a peer's log-probs with the learner's own, if its weights are those that `group` claims.

        Raises WorkerDiedError if the worker died meanwhile, WorkerTaskError if it could not.
        """
        return await self._supervisor.call(AuditRequest(group=group), AuditReply)

    async def give_memory_back(self) -> None:
        """Return when no step is in progress and the memory that the learner kept for later is free.

        Raises WorkerDiedError if the worker died meanwhile: then all of its memory is.
        """
        await self._supervisor.call(GiveMemoryBack(), MemoryGivenBack)

    async def write_weights(self, refused: str = "") -> PublishedWeights | None:
        """Have the present weights written to a file; None for the model as it came. Waits for a step in progress.

        A non-empty `refused` says why no engine can map shared weights: all later versions go through files, too.
        Raises MachineError if the disk refuses, WorkerDiedError if the worker died meanwhile.
        """
        return (await self._supervisor.call(WriteWeights(refused=refused), WeightsWritten)).weights

    async def save(self) -> int:
        """Have the newest step written to the disk, however long that takes; returns its number.

        Raises MachineError if the disk refuses, WorkerDiedError if the worker died meanwhile.
        """
        return (await self._supervisor.call(SaveRequest(), Saved)).step

    async def export(self, out: Path, *, merge: bool = True) -> ExportReply:
        """Write the trained model to `out`; `merge` False: the adapter alone. Raises ConfigError for a used folder."""
        return await self._supervisor.call(ExportRequest(out=str(out), merge=merge), ExportReply)

    async def _ask_state(self, life: WorkerProcess) -> None:
        self._state = await life.call(StateRequest(), LearnerState)


def worker_environment(boot: LearnerBoot) -> dict[str, str]:
    """Return variables that must be set before the worker starts, because torch and glibc read them when they are
    loaded.

    A step frees and takes the same large blocks again and again. On a CPU glibc is set to keep them; else the kernel
    clears their pages each time. It uses one arena, since a thread's separate arena cannot hold a block above 64 MiB.
    With a GPU the large blocks are in torch's allocator, and freed host memory goes back to the system. If the learner
    has a share of a GPU, its segments grow, unless the user set torch's allocator. If an engine maps its weights, they
    grow only once these are allocated (`workers/weights/cuda_ipc.py`).
    """
    is_set = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    segments = {} if boot.memory_share is None or is_set or boot.hand_over == "ipc" else GROWING_SEGMENTS
    threads = {} if boot.num_threads is None else {"OMP_NUM_THREADS": str(boot.num_threads)}
    blocks = KEEPS_FREED_BLOCKS if boot.device == "cpu" else {}
    # Else as many processes as there are cores, up to 32, each with torch in it, for a layer's few kernels.
    compiler = {} if boot.settings.kernels == "plain" or COMPILE_THREADS in os.environ else {COMPILE_THREADS: "1"}
    return compiler | threads | blocks | segments | (COMMUNICATION if boot.settings.num_processes > 1 else {})
