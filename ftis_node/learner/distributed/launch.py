"""Start the processes of a learner that trains on several GPUs or in several processes. Imports no torch.

    daemon --- rank 0: the learner's worker, the only one that talks to the daemon
                 |---- rank 1: `python -m ftis_node.learner.distributed.launch`
                 `---- rank 2 ...

A rank above 0 reads from its standard input how to build the learner. It builds the same learner as rank 0 with its
shard of every weight, and executes the commands of rank 0 until the end. It writes no file and connects only to the
other ranks.

torchrun is not used: it puts each rank into its own session, which the daemon's kill would miss, and listens on every
network interface.

All ranks end together: the others end with rank 0 (`liveness.py`), and rank 0 ends as soon as another rank does.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from ftis_node.errors import FtisError, WorkerTaskError
from ftis_node.learner.messages import LearnerBoot
from ftis_node.telemetry.log import set_up_logging
from ftis_node.workers.liveness import describe_exit, die_with_owner
from ftis_node.workers.wire import dec_hook, enc_hook

if TYPE_CHECKING:
    from ftis_node.learner.distributed.ranks import RankGroup
    from ftis_node.learner.learner import Learner

log = logging.getLogger(__name__)

MODULE = "ftis_node.learner.distributed.launch"
# Without these gloo and NCCL choose an interface by the host name, which may be unreachable.
COMMUNICATION = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
LOST_RANK_EXIT_CODE = 1
END_GRACE_S = 2.0


@contextmanager
def start_ranks(boot: LearnerBoot) -> Iterator[str | None]:
    """Start the other ranks and yield the file by which all find each other, None if there are no others.

    Call it in the main thread: on Linux a rank dies with the thread that started it. Send the other ranks the task
    "end" before the context ends. They get END_GRACE_S seconds to end, and none after an error.
    """
    num_ranks = boot.settings.num_ranks
    if num_ranks == 1:
        yield None
        return
    are_ending = threading.Event()
    within_s = 0.0
    with TemporaryDirectory(prefix="ftis-ranks-") as folder:
        store = f"{folder}/store"
        others = [_start_rank(boot, rank, store, are_ending) for rank in range(1, num_ranks)]
        try:
            yield store
            within_s = END_GRACE_S
        finally:
            are_ending.set()
            _end(others, within_s=within_s)


def _start_rank(boot: LearnerBoot, rank: int, store: str, are_ending: threading.Event) -> subprocess.Popen[bytes]:
    """Start a rank above 0, which gets `boot` on its standard input."""
    command = [sys.executable, "-m", MODULE, str(os.getpid()), str(rank), store]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    watch = threading.Thread(target=_watch, args=(rank, process, are_ending), name=f"rank-{rank}-watch", daemon=True)
    watch.start()
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # the watch reports a process that has ended
        process.stdin.write(msgspec.msgpack.encode(boot, enc_hook=enc_hook))
    return process


def _end(processes: Sequence[subprocess.Popen[bytes]], *, within_s: float) -> None:
    """Wait up to `within_s` seconds for the exit of all, then kill the rest."""
    deadline = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(rank: int, process: subprocess.Popen[bytes], are_ending: threading.Event) -> None:
    """End this process if the rank ends with an error before the end of all."""
    code = process.wait()
    if code == 0 or are_ending.is_set():
        return
    log.critical("rank %d of the learner %s; all other ranks end", rank, describe_exit(code))
    logging.shutdown()
    os._exit(LOST_RANK_EXIT_CODE)


def run_commands(learner: Learner, ranks: RankGroup) -> None:
    """Execute this rank's part of each command, until the last."""
    from ftis_node.learner.distributed.ranks import RankTask

    while True:
        with ranks.in_step():
            command = ranks.next_command()
            if command == RankTask("end"):
                return
            try:
                learner.take_part(command)
            except WorkerTaskError as error:  # all ranks agreed to stop
                log.info("rank %d: %s", ranks.rank, error)


def main() -> None:
    owner_pid, rank, store = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles it; the kernel ends this process with rank 0
        signal.signal(number, signal.SIG_IGN)
    die_with_owner(int(owner_pid))
    set_up_logging()
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LearnerBoot, dec_hook=dec_hook)
    from ftis_node.learner.distributed.ranks import RankGroup
    from ftis_node.learner.learner import Learner

    try:
        ranks = RankGroup(int(rank), boot.settings.num_ranks, store, boot)
        run_commands(Learner(boot, ranks=ranks), ranks)
        ranks.close()
    except FtisError as error:
        # Rank 0 fails with the same error and must stay alive to report it to the daemon. Its end ends this process.
        log.error("rank %s cannot be built: %s", rank, error)
        while True:
            signal.pause()
    logging.shutdown()
    os._exit(0)  # as the worker does: the interpreter's own clean-up takes seconds


if __name__ == "__main__":
    main()
