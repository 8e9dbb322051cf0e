"""A rank above 0: `python -m ftis_node.learner.distributed.rank_worker`, started by rank 0.

It reads from its standard input how to build the learner (`launch.py`). It builds the same learner as rank 0 with its
shard of every weight, and executes the commands of rank 0 until the end. It writes no file and connects only to the
other ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from ftis_node.errors import FtisError, WorkerTaskError
from ftis_node.learner.distributed.launch import RankAddress
from ftis_node.learner.messages import LearnerBoot
from ftis_node.telemetry.log import set_up_logging
from ftis_node.workers.liveness import die_with_owner
from ftis_node.workers.wire import dec_hook

if TYPE_CHECKING:
    from ftis_node.learner.distributed.ranks import RankGroup
    from ftis_node.learner.learner import Learner

log = logging.getLogger(__name__)


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
    owner_pid, rank, size, store = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles it; the kernel ends this process with rank 0
        signal.signal(number, signal.SIG_IGN)
    die_with_owner(int(owner_pid))
    set_up_logging()
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LearnerBoot, dec_hook=dec_hook)
    from ftis_node.learner.distributed.ranks import RankGroup
    from ftis_node.learner.learner import Learner

    try:
        ranks = RankGroup(RankAddress(int(rank), int(size), store), boot)
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
