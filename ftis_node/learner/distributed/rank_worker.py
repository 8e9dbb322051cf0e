"""A rank that follows: `python -m ftis_node.learner.distributed.rank_worker`, started by rank 0 (`launch.py`).

It builds the same learner, of which it holds its part of every weight, and then does what rank 0 orders until the end.
It writes no file and speaks to nobody but the other ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError, WorkerTaskError
from ftis_node.learner.distributed.launch import Seat
from ftis_node.telemetry.log import set_up_logging
from ftis_node.workers.owner import die_with_owner

if TYPE_CHECKING:
    from ftis_node.learner.core import Learner
    from ftis_node.learner.distributed.ranks import RankGroup

log = logging.getLogger(__name__)


def follow(seat: Seat) -> None:
    """Build a learner and obey until rank 0 orders the end. Raises FtisError where it cannot be built."""
    from ftis_node.learner.core import Learner
    from ftis_node.learner.distributed.ranks import join

    ranks, boot = join(seat)
    obey(Learner(boot, ranks=ranks), ranks)
    ranks.close()


def obey(learner: Learner, ranks: RankGroup) -> None:
    """Do this rank's part of each order, until the last."""
    from ftis_node.learner.distributed.rank_commands import EndOrder

    while True:
        with ranks.in_step():
            order = ranks.next_order()
            if isinstance(order, EndOrder):
                return
            try:
                learner.take_part(order)
            except WorkerTaskError as error:  # all ranks agreed to stop
                log.info("rank %d: %s", ranks.rank, error)


def main() -> None:
    """Follow, in a process of its own."""
    parser = argparse.ArgumentParser(description="A rank of ftis-node's learner; started by rank 0, not by hand.")
    parser.add_argument("--owner-pid", type=int, required=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides; the kernel ends this process with it
        signal.signal(number, signal.SIG_IGN)
    die_with_owner(parser.parse_args().owner_pid)
    set_up_logging()
    seat = Seat.from_environment()
    assert seat is not None, "rank 0 gives each follower its place"
    try:
        follow(seat)
    except FtisError as error:
        # Rank 0 meets the same, and must live to tell the daemon; then it ends this process.
        log.error("rank %d cannot be built: %s", seat.rank, error)
        while True:
            signal.pause()
    logging.shutdown()
    os._exit(0)  # as the worker does: the interpreter's own clean-up takes seconds


if __name__ == "__main__":
    main()
