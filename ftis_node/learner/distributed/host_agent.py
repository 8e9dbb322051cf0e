"""The agent on each other host of a learner, `ftis-node learner-host`: it starts this host's ranks and watches them.

    waiting --Assignment--> running --HostsEnded--> ended
       ^                       |
       +--- Rejoin, a rank ended, or the node is silent: all ranks of this host are killed

It has no home and connects to the node's host only. A rank gets the model from this host's disk and everything else
from rank 0. If the agent ends, its ranks end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import msgspec
import zmq
import zmq.asyncio

from ftis_node.config.no_network_env import NO_TELEMETRY, WORKERS_STAY_OFFLINE
from ftis_node.errors import ConfigError, FtisError, MachineError, NetworkError, WorkerDiedError
from ftis_node.learner.client import worker_environment
from ftis_node.learner.distributed.host_channel import (
    BEAT,
    BEAT_EVERY_S,
    Assignment,
    FromHost,
    HostHello,
    HostKey,
    HostLeft,
    HostsEnded,
    Rejoin,
    ToHost,
    decode_to_host,
    interface_environment,
    liveness_of,
    own_address,
    post,
    versions,
)
from ftis_node.learner.distributed.launch import END_GRACE_S, LocalRanks, RankAddress
from ftis_node.models import list_accelerators, model_fingerprint, resolve_model
from ftis_node.workers.liveness import LivenessVerdict
from ftis_node.workers.wire import Heartbeat, failure_of

if TYPE_CHECKING:
    from ftis_node.learner.messages import LearnerBoot

log = logging.getLogger(__name__)

END_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The node's rendezvous, and what this host uses. `model` empty: the node's. `threads` 0: all cores, divided."""

    host: str
    port: int
    model: str = ""
    threads: int = 0
    timeout_s: float = 600.0
    waits_again: bool = False


async def run_agent(settings: AgentSettings, secret: bytes) -> None:
    """Take part in the learner of one node until the node ends; with `waits_again` also after its next start.

    Raises NetworkError if the node does not answer for `timeout_s`, ConfigError if it refuses this host, and
    WorkerDiedError if its learner failed for good. Raises any error that keeps this host from taking part.
    """
    key = HostKey(secret)
    agent = asyncio.current_task()
    assert agent is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.cancel)
    while True:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as channel:
            key.secure(channel, as_server=False)
            channel.setsockopt(zmq.IMMEDIATE, 1)  # no queue of old messages for a node that starts later
            channel.connect(f"tcp://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}")
            if await _Life(settings, channel).run() and not settings.waits_again:
                return


class _Life:
    """One participation: from the first hello to the end of the ranks."""

    def __init__(self, settings: AgentSettings, channel: zmq.asyncio.Socket) -> None:
        self._settings = settings
        self._channel = channel
        self._lost = ""  # the first rank that ended, and how; a thread of LocalRanks sets it
        self._ranks: LocalRanks | None = None

    async def run(self) -> bool:
        """Return whether the node has ended; if not, wait for it again. Raises as `run_agent` does."""
        try:
            assignment = await self._wait()
            if assignment is None:
                return True
            self._start(assignment, await self._fit(assignment))
            return await self._watch(assignment)
        except (FtisError, asyncio.CancelledError) as error:
            stopped = isinstance(error, asyncio.CancelledError)
            self._send(failure_of(WorkerDiedError("it was stopped") if stopped else error, call_id=0))
            raise
        finally:
            if self._ranks is not None:
                self._ranks.end(within_s=0.0)

    async def _wait(self) -> Assignment | None:
        """Say hello every second until the node assigns ranks; None if it has ended."""
        settings = self._settings
        log.info("waiting for the node at %s:%d", settings.host, settings.port)
        hello = HostHello(platform.node()[:256], versions())
        left_s, is_known = settings.timeout_s, False
        while left_s > 0:
            self._send(hello)
            for message in await self._receive():
                if isinstance(message, Assignment):
                    return message
                if isinstance(message, HostsEnded):
                    self._send(HostLeft())
                    if message.error:
                        raise ConfigError(f"the node refuses this host: {message.error}")
                    return None
                if not is_known:
                    log.info("connected to the node; waiting for the other hosts")
                left_s, is_known = settings.timeout_s, True
            left_s -= BEAT_EVERY_S
        raise NetworkError(
            f"no node answers at {settings.host}:{settings.port} for {settings.timeout_s:g} s: start `ftis-node join` "
            "there with learner.rendezvous, and give both the same secret"
        )

    async def _fit(self, assignment: Assignment) -> LearnerBoot:
        """Return `_fitted(assignment)`, with heartbeats meanwhile: the model may have to be downloaded."""
        fitting = asyncio.create_task(asyncio.to_thread(self._fitted, assignment))
        while not fitting.done():
            self._send(BEAT)
            await asyncio.wait([fitting], timeout=BEAT_EVERY_S)
        return fitting.result()

    def _start(self, assignment: Assignment, boot: LearnerBoot) -> None:
        interface = interface_environment(own_address(assignment.address, assignment.port))
        os.environ.update(NO_TELEMETRY | WORKERS_STAY_OFFLINE | worker_environment(boot) | interface)
        num_local = boot.settings.num_processes
        first = assignment.first_rank

        def on_lost(rank: int, how: str) -> None:
            self._lost = self._lost or f"rank {rank} {how}"

        self._ranks = LocalRanks(boot, on_lost=on_lost)
        address = RankAddress(first, boot.settings.num_ranks, 0, assignment.address, assignment.port)
        of = boot.settings.hosts
        log.info("host %d of %d: ranks %d to %d start", assignment.number, of, first, first + num_local - 1)
        self._ranks.start(address, {first + local: local for local in range(num_local)}, num_local=num_local)

    def _fitted(self, assignment: Assignment) -> LearnerBoot:
        """Return how to build the learner here: with this host's model folder and cores.

        Raises ModelError, NetworkError or ConfigError without the node's model, MachineError without its GPUs.
        """
        boot = assignment.boot
        of_node = boot.model if os.path.isdir(boot.model) else boot.model_name  # the same folder may exist here
        source = resolve_model(self._settings.model or of_node)
        if model_fingerprint(source) != assignment.model_fingerprint:
            raise ConfigError(f"{source.path} holds another model than the node's {boot.model_name}: give its --model")
        num_local = boot.settings.num_processes
        if boot.device == "cuda" and (seen := len(list_accelerators())) < num_local:
            raise MachineError(
                f"the node runs {num_local} processes on each host, each on one GPU: this host has {seen}"
            )
        threads = self._settings.threads or max(1, (os.cpu_count() or 1) // num_local)
        return msgspec.structs.replace(boot, model=str(source.path), num_threads=threads)

    async def _watch(self, assignment: Assignment) -> bool:
        """Return when the ranks have ended: whether the node has ended, too.

        When the node ends, its connections may close before its message arrives, and a rank reports them broken. So the
        agent waits END_WAIT_S for that message after it has lost a rank.
        """
        node = liveness_of(assignment.boot.settings.host_timeout_s)
        ticks_left: int | None = None
        while ticks_left != 0:
            self._send(BEAT)
            for message in await self._receive():
                match message:
                    case HostsEnded(error=error) if error:
                        self._send(HostLeft())
                        raise WorkerDiedError(f"the node's learner ended: {error}")
                    case HostsEnded():
                        self._send(HostLeft())
                        assert self._ranks is not None
                        self._ranks.end(within_s=END_GRACE_S)
                        log.info("the node has ended")
                        return True
                    case Rejoin():
                        log.warning("the node's learner has restarted; the ranks of this host end")
                        return False
                    case Heartbeat():
                        node.beat(message)
                    case Assignment():
                        pass
                    case _:
                        assert_never(message)
            if ticks_left is not None:
                ticks_left -= 1
            elif self._lost:
                ticks_left = round(END_WAIT_S / BEAT_EVERY_S)
                log.warning("%s; the ranks of this host end", self._lost)
                self._send(failure_of(WorkerDiedError(self._lost), call_id=0))
            if node.tick() is not LivenessVerdict.ALIVE:
                log.warning("no heartbeat from the node; the ranks of this host end")
                return False
        return False

    async def _receive(self) -> list[ToHost]:
        """Return the messages of about one heartbeat interval, or those up to the node's end. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        end, messages = loop.time() + BEAT_EVERY_S, []
        while (left_s := end - loop.time()) > 0:
            if await self._channel.poll(int(1000 * left_s) + 1):
                try:
                    messages.append(decode_to_host(await self._channel.recv()))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"the node has another version than {versions()}: {error}") from None
                if isinstance(messages[-1], HostsEnded):
                    break
        return messages

    def _send(self, message: FromHost) -> None:
        post(self._channel, message)
