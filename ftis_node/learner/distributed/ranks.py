"""The ranks that train one policy together, and what they say to each other.

Rank 0 leads: it has the daemon's requests and sends the others an order for each piece (`rank_worker.py`), and all
do that piece in step. What they decide, they decide alike, because they decide on the same numbers:

    micro-batches  --deal-->  forward on each rank  --sum-->  log-probs [N, T] on every rank  -->  loss, its gradient
    gradients      <--sum--   backward on each rank  <--------------------------------------------------'

A forward or backward pass gathers each layer's weights from all ranks, so all must make equally many: a rank that has
less to do runs an empty micro-batch. Whether to stop between two micro-batches is asked of all.

What one rank alone meets (a lost connection, memory that does not suffice) leaves the others waiting in the middle of a
pass, and no message can reach them there. So it ends the process, and with it the group, which begins again at its
checkpoint. Messages are msgspec's bytes, never pickles.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed

from ftis_node.errors import FtisError, WorkerTaskError
from ftis_node.learner.data.batch import MicroBatch
from ftis_node.learner.distributed.rank_commands import Order
from ftis_node.learner.messages import LearnerBoot
from ftis_node.models import pick_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from ftis_node.learner.distributed.launch import Seat
    from ftis_node.learner.step.train_step import Between

log = logging.getLogger(__name__)

# A rank may wait for the next order for days. Dead ranks are noticed by `launch.py`, and a hang by the daemon.
PATIENCE = timedelta(days=1000)
BROKEN_EXIT_CODE = 1
BOOT_KEY = "boot"
BUDGET_STEPS = (1.0, 1.1, 1.25, 1.5, 2.0)


class Ranks:
    """This process and those that train with it. As made here: this process alone, where every call does nothing."""

    rank = 0
    size = 1

    def deal(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Those of this rank, equally many on every rank. The largest come first, and side by side on all ranks."""
        return micro_batches

    def add_up(self, values: Tensor) -> None:
        """Add the other ranks' values, in place. On the CPU."""

    def fill_in(self, logprobs: Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """Put what other ranks computed of these micro-batches, before they were dealt, into `logprobs` `[N, T]`."""

    def broadcast(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank."""
        return message

    def is_any(self, value: bool) -> bool:
        """Whether `value` is true on one rank at least."""
        return value

    @contextmanager
    def agreed(self, kind: type[Exception] = FtisError) -> Iterator[None]:
        """An error of this kind inside of it, on any rank, is one on every rank."""
        yield

    def between(self, own: Between) -> Between:
        """`own`, made to raise on every rank as soon as it raises WorkerTaskError on one."""
        return own

    @contextmanager
    def lead(self, order: Order) -> Iterator[None]:
        """Have all ranks do what `order` says; inside, this rank does its part of it."""
        yield

    def close(self) -> None:
        """End the talk, on every rank."""


ALONE = Ranks()


class RankGroup(Ranks):
    """Several processes, each at its seat. Made by `join`."""

    def __init__(self, seat: Seat, store: Any, *, on_gpu: bool) -> None:
        """Returns when all ranks are there."""
        self.rank, self.size = seat.rank, seat.size
        if on_gpu:
            torch.cuda.set_device(seat.local_rank)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=seat.rank,
            world_size=seat.size,
            timeout=PATIENCE,
        )
        self._device_type = "cuda" if on_gpu else "cpu"

    def mesh(self) -> DeviceMesh:
        """All ranks in a row, for sharding."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self._device_type, (self.size,))

    def deal(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        by_size = sorted(micro_batches, key=lambda micro_batch: -micro_batch.token_ids.numel())
        num_missing = -len(by_size) % self.size
        return [*by_size, *[empty_micro_batch()] * num_missing][self.rank :: self.size]

    def add_up(self, values: Tensor) -> None:
        distributed.all_reduce(values)

    def fill_in(self, logprobs: Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        found = torch.zeros_like(logprobs).view(-1)
        for micro_batch in self.deal(micro_batches):
            found[micro_batch.cell_index] = logprobs.view(-1)[micro_batch.cell_index]
        self.add_up(found)
        for micro_batch in micro_batches:
            logprobs.view(-1)[micro_batch.cell_index] = found[micro_batch.cell_index]

    def broadcast(self, message: bytes) -> bytes:
        length = torch.tensor([len(message)])
        distributed.broadcast(length, src=0)
        if self.rank:
            message = bytes(int(length))
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        distributed.broadcast(data, src=0)
        return data.numpy().tobytes()

    def is_any(self, value: bool) -> bool:
        num_true = torch.tensor([int(value)])
        self.add_up(num_true)
        return bool(num_true)

    def between(self, own: Between) -> Between:
        def together() -> None:
            with self.agreed(WorkerTaskError):
                own()

        return together

    @contextmanager
    def lead(self, order: Order) -> Iterator[None]:
        with self.in_step():
            if self.rank == 0:
                self.broadcast(msgspec.msgpack.encode(order))
            yield

    def next_order(self) -> Order:
        """Rank 0's, on another rank."""
        order: Order = msgspec.msgpack.decode(self.broadcast(b""), type=Order)
        return order

    @contextmanager
    def agreed(self, kind: type[Exception] = FtisError) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except kind as error:
            failure = error
        if self.is_any(failure is not None):
            raise failure or kind("so says another rank of the learner, see its log")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What goes wrong inside ends this process, but for what all ranks agreed on, and the leader's disk."""
        try:
            yield
        except (FtisError, OSError):
            raise
        except Exception:
            log.critical("rank %d of the learner cannot go on, and all others end with it", self.rank, exc_info=True)
            logging.shutdown()
            os._exit(BROKEN_EXIT_CODE)

    def close(self) -> None:
        distributed.destroy_process_group()


def join(seat: Seat, boot: LearnerBoot | None = None) -> tuple[RankGroup, LearnerBoot]:
    """Take a seat among the ranks. Rank 0 brings the boot, the others are told it."""
    store = _open_store(seat)
    if boot is None:
        boot = msgspec.msgpack.decode(store.get(BOOT_KEY), type=LearnerBoot)
    else:
        store.set(BOOT_KEY, msgspec.msgpack.encode(boot))
    return RankGroup(seat, store, on_gpu=pick_device(boot.device) != "cpu"), boot


def empty_micro_batch() -> MicroBatch:
    """One token that predicts nothing: a pass over it has no log-probs, and a gradient of zero."""
    nothing = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        token_ids=torch.zeros((1, 1), dtype=torch.int64),
        predictor_index=nothing,
        target_ids=nothing,
        cell_index=nothing,
    )


def cut_evenly(cut: Callable[[int], list[MicroBatch]], *, max_tokens: int, size: int) -> list[MicroBatch]:
    """`cut(budget)` with the smallest budget, up to `max_tokens`, that takes no more rounds of `size` ranks."""
    largest = cut(max_tokens)
    if size == 1:
        return largest
    num_wanted = -(-len(largest) // size) * size
    num_tokens = sum(micro_batch.token_ids.numel() for micro_batch in largest)
    for step in BUDGET_STEPS:
        budget = int(step * num_tokens / max(1, num_wanted)) + 1
        if budget >= max_tokens:
            break
        if len(found := cut(budget)) <= num_wanted:
            return found
    return largest


def _open_store(seat: Seat) -> Any:
    """Where ranks find each other; rank 0 keeps it. Of ranks that torchrun started, its agent does."""
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return distributed.TCPStore(  # type: ignore[attr-defined]
        seat.address,
        seat.port,
        seat.size,
        is_master=seat.rank == 0 and not is_agents,
        timeout=PATIENCE,
        wait_for_workers=False,
        master_listen_fd=None if seat.listener is None else seat.listener.detach(),
    )
