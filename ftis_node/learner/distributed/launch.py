"""The processes of one learner that trains on more than one GPU or process. Imports no torch.

    daemon --- rank 0: the learner's worker, which alone speaks to the daemon
                 |---- rank 1: `python -m ftis_node.learner.distributed.rank_worker`
                 `---- rank 2 ...

Each rank finds its place as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. A process that
torchrun itself started takes the place that it was given. Otherwise rank 0 starts the others, and torchrun does not,
for two reasons: it puts each rank into a session of its own, where the daemon's kill of the worker's process group does
not reach it, and its rendezvous listens on every network interface. Here all ranks are one process group, and the port
where they meet is open on the loopback interface alone.

One dies, all die: followers end with rank 0 (`owner.py`), and rank 0 ends as soon as a follower does. Then the daemon
starts the whole group again, as it does any worker.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

MODULE = "ftis_node.learner.distributed.rank_worker"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# Without these gloo and NCCL choose an interface by the machine's name, which need not be reachable.
COMMUNICATION = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
LOST_FOLLOWER_EXIT_CODE = 1
END_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place among the ranks. `listener` is rank 0's: a socket that listens at `address`, `port` already."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    listener: socket.socket | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Seat | None:
        """The place that torchrun, or rank 0, gave to this process; None where nobody did."""
        if "RANK" not in environment:
            return None
        return cls(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
        )

    def environment_of(self, rank: int) -> dict[str, str]:
        """What tells the process of `rank` its place, as torchrun would."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@contextmanager
def take_seats(num_processes: int) -> Iterator[Seat | None]:
    """The seat of rank 0 with the other ranks' processes started, or the one of torchrun; None: there is one process.

    Call it in the main thread: on Linux a follower dies with the thread that started it. Whoever leaves the context has
    told the followers to end; they get a few seconds for it, and none after an error.
    """
    if num_processes == 1:
        yield None
        return
    given = Seat.from_environment()
    if given is not None and given.size == num_processes:
        yield given
        return
    with socket.create_server((LOOPBACK, 0)) as listener:
        seat = Seat(0, num_processes, 0, LOOPBACK, listener.getsockname()[1], listener)
        followers = _Followers(seat)
        try:
            yield seat
        except BaseException:
            followers.end(within_s=0.0)
            raise
        followers.end(within_s=END_GRACE_S)


class _Followers:
    """The processes of ranks 1 and up, each with a thread that notices its death."""

    def __init__(self, seat: Seat) -> None:
        self._are_ending = threading.Event()
        command = [sys.executable, "-m", MODULE, "--owner-pid", str(os.getpid())]
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, seat.size):
            process = subprocess.Popen(command, env={**os.environ, **seat.environment_of(rank)})
            self._processes.append(process)
            watch = threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}-watch", daemon=True)
            watch.start()

    def end(self, *, within_s: float) -> None:
        """Wait for their exit, then kill."""
        self._are_ending.set()
        deadline = time.monotonic() + within_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code == 0 or self._are_ending.is_set():
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        log.critical("rank %d of the learner %s, and the others with it", rank, how)
        logging.shutdown()
        os._exit(LOST_FOLLOWER_EXIT_CODE)
