"""The ranks that train one policy together, their messages, and the commands that rank 0 broadcasts.

Rank 0 broadcasts a command for each piece of work (`launch.py`), and all ranks execute it in lockstep:

    micro-batches  --deal-->  forward on each rank  --sum-->  log-probs [N, T] on every rank  -->  loss, its gradient
    gradients      <--sum--   backward on each rank  <--------------------------------------------------'

A forward or backward pass gathers each layer's weights from all ranks, so all ranks make the same number of passes. A
rank with less work runs an empty micro-batch. All ranks agree on whether to stop between two micro-batches.

After an error on one rank (a lost connection, out of memory) the others wait inside a collective operation. So that
rank ends its process, all others end with it, and the group restarts at its checkpoint. Messages are never pickles.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from ftis_node.errors import FtisError, WorkerTaskError
from ftis_node.learner.batch import MicroBatch
from ftis_node.learner.messages import AuditRequest, LearnerBoot, TrainRequest
from ftis_node.models import pick_device
from ftis_node.workers.wire import Message

log = logging.getLogger(__name__)

# Called between micro-batches. It raises WorkerTaskError to stop the step.
StepCallback: TypeAlias = "Callable[[], None]"

# A rank may wait days for the next command. `launch.py` detects dead ranks, and the daemon a hang.
COLLECTIVE_TIMEOUT = timedelta(days=1000)
BROKEN_EXIT_CODE = 1
BUDGET_STEPS = (1.0, 1.1, 1.25, 1.5, 2.0)


class Ranks:
    """The null object for a learner of one process: every call does nothing."""

    rank = 0
    size = 1

    def deal(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches of this rank: the same number on every rank, the largest first."""
        return micro_batches

    def fill_in(self, logprobs: Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """Copy the other ranks' results into `logprobs` `[N, T]`. `micro_batches` are those before `deal`."""

    def broadcast(self, message: bytes) -> bytes:
        """Return rank 0's message, on every rank."""
        return message

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Return rank 0's CPU tensor, on every rank. The other ranks pass one to be filled."""
        return tensor

    def any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on at least one rank."""
        return value

    @contextmanager
    def agreed(self, kind: type[Exception] = FtisError) -> Iterator[None]:
        """Raise an error of this kind on every rank if any rank raises it inside."""
        yield

    def between(self, own: StepCallback) -> StepCallback:
        """Return `own`, wrapped so that it raises WorkerTaskError on every rank if it raises on one."""
        return own

    @contextmanager
    def lead(self, command: RankCommand) -> Iterator[None]:
        """Broadcast `command`, then run the block as this rank's part of the command."""
        yield

    def close(self) -> None:
        """Close the connection, on every rank."""


ALONE = Ranks()


class RankGroup(Ranks):
    """Several processes connected by torch.distributed."""

    def __init__(self, rank: int, size: int, store: str, boot: LearnerBoot) -> None:
        """Wait until all ranks are connected. They have the same `boot`, and find each other by the file `store`."""
        self.rank, self.size = rank, size
        on_gpu = pick_device(boot.device) != "cpu"
        if on_gpu:
            torch.cuda.set_device(rank)
        file_store = distributed.FileStore(store, size)  # type: ignore[attr-defined]
        file_store.set_timeout(COLLECTIVE_TIMEOUT)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=file_store,
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        self._device_type = "cuda" if on_gpu else "cpu"

    def mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self._device_type, (self.size,))

    def deal(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        by_size = sorted(micro_batches, key=lambda micro_batch: -micro_batch.token_ids.numel())
        num_missing = -len(by_size) % self.size
        return [*by_size, *[empty_micro_batch()] * num_missing][self.rank :: self.size]

    def fill_in(self, logprobs: Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        found = torch.zeros_like(logprobs).view(-1)
        for micro_batch in self.deal(micro_batches):
            found[micro_batch.cell_index] = logprobs.view(-1)[micro_batch.cell_index]
        distributed.all_reduce(found)
        for micro_batch in micro_batches:
            logprobs.view(-1)[micro_batch.cell_index] = found[micro_batch.cell_index]

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        distributed.broadcast(tensor, src=0)
        return tensor

    def broadcast(self, message: bytes) -> bytes:
        length = torch.tensor([len(message)])
        distributed.broadcast(length, src=0)
        if self.rank:
            message = bytes(int(length))
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        distributed.broadcast(data, src=0)
        return data.numpy().tobytes()

    def any_rank(self, value: bool) -> bool:
        num_true = torch.tensor([int(value)])
        distributed.all_reduce(num_true)
        return bool(num_true)

    def between(self, own: StepCallback) -> StepCallback:
        def together() -> None:
            with self.agreed(WorkerTaskError):
                own()

        return together

    @contextmanager
    def lead(self, command: RankCommand) -> Iterator[None]:
        with self.in_step():
            if self.rank == 0:
                self.broadcast(msgspec.msgpack.encode(command))
            yield

    def next_command(self) -> RankCommand:
        """Wait for rank 0's next command, on another rank."""
        command: RankCommand = msgspec.msgpack.decode(self.broadcast(b""), type=RankCommand)
        return command

    @contextmanager
    def agreed(self, kind: type[Exception] = FtisError) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except kind as error:
            failure = error
        if self.any_rank(failure is not None):
            raise failure or kind("another rank of the learner failed: see its log")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """End this process after an error inside, unless all ranks agreed on the error or it is rank 0's disk error."""
        try:
            yield
        except (FtisError, OSError):
            raise
        except Exception:
            log.critical("rank %d of the learner failed; all other ranks end", self.rank, exc_info=True)
            logging.shutdown()
            os._exit(BROKEN_EXIT_CODE)

    def close(self) -> None:
        distributed.destroy_process_group()


def empty_micro_batch() -> MicroBatch:
    """Return one token that predicts nothing: its pass has no log-probs and a zero gradient."""
    nothing = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        token_ids=torch.zeros((1, 1), dtype=torch.int64),
        predictor_index=nothing,
        target_ids=nothing,
        cell_index=nothing,
    )


def cut_evenly(cut: Callable[[int], list[MicroBatch]], *, max_tokens: int, size: int) -> list[MicroBatch]:
    """Return `cut(budget)` for the smallest budget up to `max_tokens` that needs no extra round of `size` ranks."""
    largest = cut(max_tokens)
    if size == 1:
        return largest
    num_target = -(-len(largest) // size) * size
    num_tokens = sum(micro_batch.token_ids.numel() for micro_batch in largest)
    for step in BUDGET_STEPS:
        budget = int(step * num_tokens / max(1, num_target)) + 1
        if budget >= max_tokens:
            break
        if len(found := cut(budget)) <= num_target:
            return found
    return largest


class RankTask(Message, frozen=True):
    """A command without data.

    check     compute log-probs of the check group, if any; rank 0 broadcasts the group
    prove     compute the log-probs that check published weights
    publish   send rank 0 the full tensors of a publication
    save      send rank 0 the full tensors of a checkpoint
    end       the last command: the rank ends
    """

    what: Literal["check", "prove", "publish", "save", "end"]


RankCommand: TypeAlias = TrainRequest | AuditRequest | RankTask
