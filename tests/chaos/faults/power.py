"""Power loss: all processes of a node end at one instant, also during a start, a checkpoint or a commit.

Before each cut the node acknowledges a ban of many days, which it must keep.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from ftis_node.config.home import Home
from ftis_node.node.http_api.node_client import post_document
from ftis_node.records.identity import Identity
from tests.chaos.faults.base import Ends, Fault, FaultContext, trains
from tests.chaos.swarm import SwarmNode

WORK_S = 5.0
STARTS_S = 12.0  # a start takes about so long
POLL_S = 0.0005
EVENT_WITHIN_S = 20.0  # if no checkpoint or commit begins, the cut comes without it
GONE_S = 20.0
BAN_S = 864_000


def cut_power(node: SwarmNode) -> None:
    """Stop all processes of the node, then kill them."""
    frozen: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        while fresh := [process for process in node.process.processes() if process.pid not in frozen]:
            for process in fresh:
                frozen[process.pid] = process
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
    for process in frozen.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    node.process.wait(timeout_s=GONE_S)
    _, alive = psutil.wait_procs(list(frozen.values()), timeout=GONE_S)
    assert not alive, f"left running: {alive}"


def cut_during_work(context: FaultContext, *, state: Callable[[Path], object], longest_delay_s: float = 0.0) -> None:
    """Cut the power shortly after `state` of the home has changed."""
    home = context.node.home
    _ban_a_peer(home)
    time.sleep(context.rng.uniform(0, WORK_S))
    before, deadline = state(home), time.monotonic() + EVENT_WITHIN_S
    while state(home) == before and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(context.rng.uniform(0, longest_delay_s))
    cut_power(context.node)


def cut_during_start(context: FaultContext) -> None:
    """Cut the power, and once more while the node starts."""
    _ban_a_peer(context.node.home)
    cut_power(context.node)
    context.node.start()
    time.sleep(context.rng.uniform(0, STARTS_S))
    cut_power(context.node)


def _ban_a_peer(home: Path) -> None:
    post_document(Home(home), "/peers/ban", {"peer": Identity.generate().peer_id, "for_s": BAN_S})


def _num_checkpoints_begun(home: Path) -> int:
    return len(list((home / "checkpoints").glob(".step-*")))


def _last_commit(home: Path) -> int:
    return (home / "replay.sqlite-wal").stat().st_mtime_ns


KEEPS = "It resumes at its newest step with every acknowledged group and ban."
_fault = partial(Fault, "power", promise=KEEPS, ends=Ends.RESTARTS)
FAULTS = (
    _fault("power-cut", inject=partial(cut_during_work, state=lambda home: time.monotonic())),
    _fault("power-cut-at-start", inject=cut_during_start),
    _fault("power-cut-at-checkpoint", fits=trains,
           inject=partial(cut_during_work, state=_num_checkpoints_begun, longest_delay_s=0.03)),
    _fault("power-cut-at-commit", inject=partial(cut_during_work, state=_last_commit, longest_delay_s=0.004)),
)  # fmt: skip
