"""Start the processes of a learner that trains on several GPUs or in several processes. Imports no torch.

    daemon --- rank 0: the learner's worker, the only one that talks to the daemon
                 |---- rank 1: `python -m ftis_node.learner.distributed.rank_worker`
                 `---- rank 2 ...

Each rank reads its address as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Rank 0 starts the
other ranks itself: torchrun puts each rank into its own session, which the daemon's kill would miss, and listens on
every network interface.

All ranks end together: the others end with rank 0 (`liveness.py`), and rank 0 ends as soon as another rank does.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.wire import enc_hook

log = logging.getLogger(__name__)

MODULE = "ftis_node.learner.distributed.rank_worker"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# Without these gloo and NCCL choose an interface by the host name, which may be unreachable.
COMMUNICATION = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
LOST_RANK_EXIT_CODE = 1
END_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class RankAddress:
    """A rank and the rendezvous address of all ranks. `listener` is rank 0's socket, bound to that address."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    listener: socket.socket | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankAddress | None:
        """Return the address that rank 0 or torchrun set for this process, None without one."""
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
        """Return the variables of torchrun for a rank on this host."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@contextmanager
def start_ranks(boot: LearnerBoot) -> Iterator[RankAddress | None]:
    """Start the other ranks and yield rank 0's address, None if there are no others.

    Call it in the main thread: on Linux a rank dies with the thread that started it. Send the other ranks the task
    "end" before the context ends. They get END_GRACE_S seconds to end, and none after an error.
    """
    num_ranks = boot.settings.num_ranks
    if num_ranks == 1:
        yield None
        return
    with socket.create_server((LOOPBACK, 0)) as listener:
        address = RankAddress(0, num_ranks, 0, LOOPBACK, listener.getsockname()[1], listener)
        others = OtherRanks(boot)
        others.start(address)
        try:
            yield address
        except BaseException:
            others.end(within_s=0.0)
            raise
        others.end(within_s=END_GRACE_S)


class OtherRanks:
    """Processes of the ranks above 0, which get `boot` on their standard input.

    If one ends with an error before `end`, this process ends, too.
    """

    def __init__(self, boot: LearnerBoot) -> None:
        self._boot = msgspec.msgpack.encode(boot, enc_hook=enc_hook)
        self._are_ending = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, address: RankAddress) -> None:
        """Start all ranks above 0."""
        command = [sys.executable, "-m", MODULE, "--owner-pid", str(os.getpid())]
        for rank in range(1, address.size):
            environment = address.environment_of(rank)
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **environment})
            self._processes.append(process)
            watch = threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}-watch", daemon=True)
            watch.start()
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # the watch reports a process that has ended
                process.stdin.write(self._boot)

    def end(self, *, within_s: float) -> None:
        """Wait up to `within_s` seconds for the exit of all, then kill the rest."""
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
        log.critical("rank %d of the learner %s; all other ranks end", rank, how)
        logging.shutdown()
        os._exit(LOST_RANK_EXIT_CODE)
