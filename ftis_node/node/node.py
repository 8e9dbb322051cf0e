"""The node: eight loops over shared parts. This is the picture of the whole pipeline.

                     +------------------------------ slots freed ------------------------------+
                     v                                                                         |
    task --> [generate] --scored groups--> [publish] --envelope--> [intake] --READY--> [train] +--> weights n+1
                ^                              |                      ^  |  (the door)    |            |
                |                              | announcement         |  v                |            |
                |                              v                      |  replay.sqlite    v            |
                |                           gossip --announcement--> [pull]          checkpoints       |
                |                              ^  bodies, confirmations                                |
                |                              v                                                       |
                |                         [directory] <--> records of peers          [status] --> HTTP |
                +--------------------------------- served and proved <---------------------------------+

| loop      | consumes               | produces                              | waits for            | unblocked by |
|-----------|------------------------|---------------------------------------|----------------------|--------------|
| generate  | prompts                | scored groups                         | a free slot          | train        |
| publish   | scored groups          | envelopes to intake, announcements    | a scored group       | generate     |
| pull      | announcements          | envelopes to intake, confirmations    | an announcement      | gossip       |
| intake    | envelopes              | READY groups, refusals                | an envelope          | publish, pull|
| train     | groups of one step     | weights n+1, evaluations              | groups, or patience  | intake       |
| check     | an own new group       | nothing: the next report has the mismatch | a new version's group | intake  |
| directory | own and peers' records | peer table, catch-up                  | clock                | time         |
| status    | gauges                 | snapshot, metrics                     | clock                | time         |

One TaskGroup owns them all: the first that fails ends the node with its error; the train loop's last step, or a signal,
ends it in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from ftis_node.node.check import CheckLoop
from ftis_node.node.directory import DirectoryLoop
from ftis_node.node.gate import PatientGate
from ftis_node.node.generate import GenerateLoop
from ftis_node.node.http import serve_status
from ftis_node.node.intake import IntakeLoop
from ftis_node.node.publish import PublishLoop
from ftis_node.node.pull import PullLoop
from ftis_node.node.status import StatusLoop
from ftis_node.node.train import TrainLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ftis_node.node.parts import Parts
    from ftis_node.records.group import Group

log = logging.getLogger(__name__)

LINGER_LOOK_S = 0.2


async def run_loops(parts: Parts, *, steps: int | None) -> None:
    """Runs the loops until the last step is done or until cancelled. Raises what a loop raised."""
    intake = IntakeLoop(parts)
    pull = PullLoop(parts, intake)
    train = TrainLoop(parts, PatientGate(parts, intake), last_step=steps)
    status = StatusLoop(parts)
    loops = rollout_loops(parts, intake, pull) | {
        "check": CheckLoop(parts, intake).run(),
        "directory": DirectoryLoop(parts, pull).run(),
        "status": status.run(),
        "generation worker": parts.generation.run(),
        "learner worker": parts.learner.run(),
    }
    async with serve_status(status, port=parts.settings.status_port) as url:
        parts.home.publish_address(url)
        log.info("node %s is up; status at %s/status", parts.name, url)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(loop, name=name) for name, loop in loops.items()]
                await tasks.create_task(train.run(), name="train")
                await _linger(parts)
                for task in running:
                    task.cancel()
        finally:
            await status.refresh(state="stopped")
            await parts.disk(status.save)


def rollout_loops(parts: Parts, intake: IntakeLoop, pull: PullLoop) -> dict[str, Coroutine[None, None, None]]:
    """The loops that bring groups, own and peers', into the buffer: what trains on them is the train loop's affair."""
    scored: asyncio.Queue[Group] = asyncio.Queue(parts.slots.capacity)
    return {
        "generate": GenerateLoop(parts, scored).run(),
        "publish": PublishLoop(parts, scored, intake).run(),
        "pull": pull.run(),
        "intake": intake.run(),
    }


async def _linger(parts: Parts) -> None:
    """Stays a little after the last step, so that peers can fetch what was announced to them."""
    deadline = time.monotonic() + parts.settings.swarm.linger_s
    while time.monotonic() < deadline and parts.figures.groups_confirmed < parts.figures.groups_sent:
        if not await parts.gossip.members():
            return
        await asyncio.sleep(LINGER_LOOK_S)
