"""The node: named loops over shared parts. This is the picture of the whole pipeline.

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
| audit     | a peer's new group     | its standing lowered, where it lies   | one we can compare   | intake       |
| peers     | connected peers        | peers.sqlite, room in a full buffer   | clock                | time         |
| reannounce| what nobody confirmed  | announcements                         | clock                | time         |
| shards    | announcements counted  | subscriptions, catch-up               | clock                | time         |
| directory | own and peers' records | peer table, catch-up                  | clock                | time         |
| room      | the home's files       | room in a full home, else a pause     | clock                | time         |
| status    | gauges                 | snapshot, metrics                     | clock                | time         |

That is a node that generates and learns. Two roles do one of the two, and weights cross the network between them
(docs/train/roles.md); the part that a role lacks is a null object (`null_workers.py`), so that the loops need not know:

    learner     peers --bodies--> [pull] --> [intake] --READY--> [train] --weights n+1--> [offer] --chunks--> generators
    generator   learner --offer, chunks--> [follow] --> engine; task --> [generate] --> [publish] --> [intake], gossip
                                                        slots freed <-- [deliver] <-- confirmations of peers

| loop                          | full | learner | generator | consumes                 | produces                  |
|-------------------------------|------|---------|-----------|--------------------------|---------------------------|
| generate, publish, reannounce | x    | -       | x         | as above                 |                           |
| pull, shards, train, check    | x    | x       | -         | as above                 |                           |
| audit                         | x    | x       | -         | as above                 |                           |
| intake, directory, peers      | x    | x       | x         | as above                 |                           |
| room, status                  | x    | x       | x         | as above                 |                           |
| offer                         | -    | x       | -         | weights n+1, their proof | signed offer, chunks      |
| follow                        | -    | -       | x         | the learner's offers     | weights n+1 in the engine |
| deliver                       | -    | -       | x         | confirmations            | freed slots               |

One TaskGroup owns them all: the first that fails, or ends, ends the node with its error; a budget that is used up (the
train loop's last step, a generator's last group), or a signal, ends it in order: loops, workers, network and scorer all
at once. What each waits for stands on the board (task_monitor.py), and the watchdog tells of one that gets nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError
from ftis_node.node.http_api.health import RunningLoops
from ftis_node.node.http_api.local_api import serve_status
from ftis_node.node.loops.audit import AuditLoop
from ftis_node.node.loops.deliver import DeliverLoop
from ftis_node.node.loops.directory import DirectoryLoop
from ftis_node.node.loops.disk_space import RoomLoop
from ftis_node.node.loops.generate import GenerateLoop
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.loops.logprob_check import CheckLoop
from ftis_node.node.loops.peers import PeersLoop
from ftis_node.node.loops.publish import PublishLoop
from ftis_node.node.loops.pull import PullLoop
from ftis_node.node.loops.reannounce import ReannounceLoop
from ftis_node.node.loops.shards import ShardsLoop
from ftis_node.node.loops.status import StatusLoop
from ftis_node.node.loops.train import TrainLoop
from ftis_node.node.startup.null_workers import NothingToPull
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.node.training.step_gate import PatientGate
from ftis_node.node.training.token_budget import makes_more
from ftis_node.node.weights.follow import FollowLoop
from ftis_node.node.weights.offer import OfferLoop
from ftis_node.swarm.topology.shards import shard_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from ftis_node.config.roles import Role
    from ftis_node.node.context import Parts
    from ftis_node.node.http_api.monitoring_api import Observed
    from ftis_node.node.supervision.watchdog import Watchdog
    from ftis_node.records.group import Group

log = logging.getLogger(__name__)

LINGER_LOOK_S = 0.2
BUDGET_LOOK_S = 0.2


async def run_loops(
    parts: Parts, *, steps: int | None, observed: Observed | None = None, watchdog: Watchdog | None = None
) -> None:
    """Runs the loops until the last step is done or until cancelled. Raises what a loop raised.

    `observed` is shown the status from now on; `watchdog` watches already.
    """
    intake = IntakeLoop(parts)
    health = RunningLoops(intake.turns)
    refused = observed.refused if observed is not None else None
    status = StatusLoop(parts, loops=health, watchdog=watchdog, http_refused=refused)
    await status.refresh()
    work = await WORK_OF_ROLE[parts.settings.role](parts, intake, steps)
    endless = work.loops | {
        "peers": PeersLoop(parts).run(),
        "room": RoomLoop(parts).run(),
        "status": status.run(),
    }
    loops = {name: _without_end(name, loop) for name, loop in endless.items()} | {
        "generation worker": parts.generation.run(),
        "learner worker": parts.learner.run(),
        "network": _ended_by(parts.gossip.close),
        "scorer": _ended_by(parts.scorer.close),
        "scorer of strangers' groups": _ended_by(parts.strangers_scorer.close),
    }
    if observed is not None:
        observed.status = status
    async with serve_status(status, port=parts.settings.status_port) as url:
        parts.home.publish_address(url)
        log.info("node %s is up; watch it with: ftis-node dashboard --home %s", parts.name, parts.home.root)
        log.info("its figures are at %s/status; ctrl-C ends it, and the same command goes on where it was", url)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(loop, name=name) for name, loop in loops.items()]
                health.tasks = running
                await tasks.create_task(work.until_done, name="work")
                await asyncio.gather(_linger(parts), _save(parts))
                for task in running:
                    task.cancel()
        finally:
            health.tasks = ()
            await status.refresh(state="stopped")
            await parts.disk(status.save)


async def _save(parts: Parts) -> None:
    """Has the last step written while nobody waits: a checkpoint takes longer than a worker's end may."""
    try:
        with waiting_for("the checkpoint of the last step"):
            step = await parts.learner.save()
        if parts.settings.learns:
            log.info("step %d is saved", step)
    except FtisError as error:
        log.error("the last step is not saved: %s", error)


async def _without_end(name: str, loop: Coroutine[None, None, None]) -> None:
    """A loop that ends by itself leaves a node that is half alive: that is a fault."""
    await loop
    raise FtisError(f"internal fault: the {name} loop ended by itself; run with --debug and report it")


async def _ended_by(close: Callable[[], Awaitable[None]]) -> None:
    """Takes a part down when the loops are cancelled: at the same time as the workers, not after them."""
    try:
        await asyncio.Event().wait()
    finally:
        await close()


@dataclass(frozen=True, slots=True)
class Work:
    """A role's loops, and what the node is there for: when that is done, the node ends."""

    loops: dict[str, Coroutine[None, None, None]]
    until_done: Coroutine[None, None, None]


async def full_work(parts: Parts, intake: IntakeLoop, steps: int | None) -> Work:
    """Generates, and trains on own and foreign groups."""
    pull = PullLoop(parts, intake)
    loops = rollout_loops(parts, intake, pull) | {
        "check": CheckLoop(parts, intake).run(),
        "audit": AuditLoop(parts, intake).run(),
        "reannounce": ReannounceLoop(parts).run(),
        "shards": ShardsLoop(parts, pull).run(),
        "directory": DirectoryLoop(parts, pull).run(),
    }
    return Work(loops, TrainLoop(parts, PatientGate(parts, intake), last_step=steps).run())


async def learner_work(parts: Parts, intake: IntakeLoop, steps: int | None) -> Work:
    """Trains on groups that others made, and offers them its weights."""
    pull, offers = PullLoop(parts, intake), OfferLoop(parts)
    parts.gossip.serve_weights(offers.give)
    loops = {
        "pull": pull.run(),
        "intake": intake.run(),
        "check": CheckLoop(parts, intake).run(),
        "audit": AuditLoop(parts, intake).run(),
        "shards": ShardsLoop(parts, pull).run(),
        "directory": DirectoryLoop(parts, pull).run(),
        "offer": offers.run(),
    }
    gate = PatientGate(parts, intake)
    return Work(loops, TrainLoop(parts, gate, last_step=steps, give_weights=offers.take).run())


async def generator_work(parts: Parts, intake: IntakeLoop, steps: int | None) -> Work:
    """Generates by the weights of the learner that it follows, until it is stopped or its budget is used up."""
    follow = FollowLoop(parts)
    await follow.resume()
    await parts.gossip.read_shards(
        frozenset({shard_of(parts.identity.peer_id, parts.manifest.wire.announcement_shards)})
    )
    scored: asyncio.Queue[Group] = asyncio.Queue(parts.slots.capacity)
    loops = {
        "follow": follow.run(),
        "generate": GenerateLoop(parts, scored).run(),
        "publish": PublishLoop(parts, scored, intake).run(),
        "intake": intake.run(),
        "deliver": DeliverLoop(parts).run(),
        "reannounce": ReannounceLoop(parts).run(),
        "directory": DirectoryLoop(parts, NothingToPull()).run(),
    }
    return Work(loops, _until_generated(parts))


WORK_OF_ROLE: dict[Role, Callable[[Parts, IntakeLoop, int | None], Awaitable[Work]]] = {
    "full": full_work,
    "learner": learner_work,
    "generator": generator_work,
}


async def _until_generated(parts: Parts) -> None:
    """Until the budget of tokens is used up, and all that was made is published; without a budget never."""
    while makes_more(parts):
        with waiting_for("the clock"):
            await asyncio.sleep(BUDGET_LOOK_S)
    log.info("all that the budget allows is generated and announced: the node ends")


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
    deadline = time.monotonic() + parts.settings.swarm.shutdown_serve_s
    while time.monotonic() < deadline and parts.confirmations.num_confirmed < parts.counters.groups_sent:
        if not await parts.gossip.members():
            return
        await asyncio.sleep(LINGER_LOOK_S)
