"""The other hosts of a learner, from the side of the node's host (`host_channel.py` has the messages).

    waiting --all have said hello--> complete --assign()--> training --end()--> ended
       ^  |                              |                      |
       +--+ a silent host is dropped     +----------------------+--> a host is lost: this process ends

If a host is lost, the worker reports which one to the daemon and ends. The daemon restarts it at the newest checkpoint,
and it waits for all hosts again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from ftis_node.config.workers import parse_endpoint
from ftis_node.errors import FtisError, NetworkError, WorkerDiedError
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
    decode_from_host,
    interface_environment,
    liveness_of,
    post,
    versions,
)
from ftis_node.learner.distributed.launch import LOST_RANK_EXIT_CODE, ONE_HOST, Hosts
from ftis_node.learner.messages import HostsConnected
from ftis_node.models import model_fingerprint, resolve_model
from ftis_node.telemetry.faults import watched_task
from ftis_node.telemetry.secrets import read_secret
from ftis_node.workers.liveness import Liveness, LivenessVerdict
from ftis_node.workers.wire import Failure, Heartbeat, error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ftis_node.learner.distributed.launch import RankAddress
    from ftis_node.learner.messages import LearnerBoot
    from ftis_node.workers.worker import Emitter

log = logging.getLogger(__name__)

BLAME_S = 3.0  # after the first sign of a lost host; the host that caused it may be another one, and silent
LEAVE_S = 1.5  # below the daemon's limit for a stop
REPORT_S = 0.5  # for the report to reach the daemon before this process ends


@dataclass(slots=True)
class _Host:
    """One connected host. `failure` is its report that it cannot continue."""

    name: str
    liveness: Liveness
    is_silent: bool = False
    failure: FtisError | None = None


class ConnectedHosts(Hosts):
    """The other hosts. Use `connect_hosts`, which also runs the watch."""

    def __init__(self, boot: LearnerBoot, channel: zmq.asyncio.Socket, emit: Emitter, *, listen_on: str) -> None:
        self.listen_on = listen_on
        self._boot = boot
        self._num_wanted = boot.settings.hosts - 1
        self._channel = channel
        self._emit = emit
        self._hosts: dict[bytes, _Host] = {}  # by socket identity
        self._complete, self._all_left = asyncio.Event(), asyncio.Event()
        self._troubled_ticks = 0
        self._versions = versions()
        self._broken = threading.Event()

    async def until_complete(self) -> None:
        """Return when all hosts are connected. Raises NetworkError after `learner.rendezvous_timeout_s`."""
        settings = self._boot.settings
        self._report()
        try:
            async with asyncio.timeout(settings.rendezvous_timeout_s):
                await self._complete.wait()
        except TimeoutError:
            raise NetworkError(
                f"the learner has {self._num_connected} of {settings.hosts} hosts after "
                f"{settings.rendezvous_timeout_s:g} s: start `ftis-node learner-host --rendezvous "
                f"{settings.rendezvous}` with the same secret on each other host"
            ) from None

    def assign(self, address: RankAddress) -> None:
        per_host = self._boot.settings.num_processes
        fingerprint = model_fingerprint(resolve_model(self._boot.model))
        for number, identity in enumerate(self._hosts, start=2):
            first_rank = (number - 1) * per_host
            self._send(identity, Assignment(number, first_rank, self.listen_on, address.port, fingerprint, self._boot))

    def await_blame(self) -> None:
        self._broken.set()
        threading.Event().wait(2 * BLAME_S)

    async def end(self, error: str) -> None:
        """Report the end to all hosts, and wait up to LEAVE_S until they have read it."""
        for identity in self._hosts:
            self._send(identity, HostsEnded(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S if self._hosts else 0.0):
                await self._all_left.wait()

    async def run(self) -> None:
        """Read messages and count ticks until canceled, or until a host is lost after all were connected."""
        loop = asyncio.get_running_loop()
        next_tick = loop.time() + BEAT_EVERY_S
        while True:
            left_s = next_tick - loop.time()
            if left_s > 0 and await self._channel.poll(int(1000 * left_s) + 1):
                identity, data, *_ = await self._channel.recv_multipart()  # a faulty host may send more frames
                self._take(identity, data)
                continue
            if left_s <= 0:
                next_tick = loop.time() + BEAT_EVERY_S
                self._tick()
                if self._troubled_ticks * BEAT_EVERY_S >= BLAME_S:
                    await self._end_process()

    @property
    def _num_connected(self) -> int:
        return 1 + len(self._hosts)

    def _take(self, identity: bytes, data: bytes) -> None:
        """Handle one message, or ignore one that is invalid."""
        try:
            message: FromHost = decode_from_host(data)
        except msgspec.DecodeError as error:
            log.warning("a message of another host of the learner is ignored: %s", error)
            return
        host = self._hosts.get(identity)
        match message:
            case HostHello() if host is None:
                self._admit(identity, message)
            case Heartbeat() if host is None:
                self._send(identity, Rejoin())
            case HostHello() if host is not None:
                host.liveness.beat(BEAT)
            case Heartbeat() if host is not None:
                host.liveness.beat(message)
            case Failure() if host is not None:
                host.failure = error_of(message, worker=host.name)
            case HostLeft() if host is not None:
                del self._hosts[identity]
                if not self._hosts:
                    self._all_left.set()

    def _admit(self, identity: bytes, hello: HostHello) -> None:
        if hello.versions != self._versions:
            problem = f"{hello.name} has {hello.versions} and the node has {self._versions}: install the same"
            log.warning("a host of the learner is refused: %s", problem)
            self._send(identity, HostsEnded(problem))
            return
        if self._complete.is_set():  # it waits until another host is lost and the learner restarts
            self._send(identity, BEAT)
            return
        self._hosts[identity] = _Host(hello.name, liveness_of(self._boot.settings.host_timeout_s))
        self._report()
        if len(self._hosts) == self._num_wanted:
            self._complete.set()

    def _tick(self) -> None:
        """Send heartbeats, and find silent hosts and hosts that failed."""
        for identity, host in list(self._hosts.items()):
            self._send(identity, BEAT)
            if self._broken.is_set():  # the next missing heartbeats are enough
                host.liveness.max_silent_ticks = 1
            host.is_silent = host.liveness.tick() is not LivenessVerdict.ALIVE
            if not self._complete.is_set() and (host.is_silent or host.failure):
                del self._hosts[identity]
                self._report()
        if not self._complete.is_set():
            return
        if self._broken.is_set() or any(host.is_silent or host.failure for host in self._hosts.values()):
            self._troubled_ticks += 1

    async def _end_process(self) -> None:
        error = self._blame()
        log.critical("%s; all ranks end", error)
        self._emit.fail(error)
        await asyncio.sleep(REPORT_S)
        logging.shutdown()
        os._exit(LOST_RANK_EXIT_CODE)

    def _blame(self) -> FtisError:
        """Return the error of the host that is the likely cause: one that cannot take part, else a silent one."""
        numbered = list(enumerate(self._hosts.values(), start=2))
        of = self._boot.settings.hosts
        for number, host in numbered:
            if host.failure is not None and not isinstance(host.failure, WorkerDiedError):
                return type(host.failure)(f"host {number} of {of} of the learner ({host.name}): {host.failure}")
        for number, host in numbered:
            if host.is_silent:
                return WorkerDiedError(f"host {number} of {of} of the learner ({host.name}) is lost: no heartbeat")
        for number, host in numbered:
            if host.failure is not None:
                return WorkerDiedError(f"host {number} of {of} of the learner ({host.name}) is lost: {host.failure}")
        return WorkerDiedError("the learner's ranks failed and all hosts answer; the learner's log has the cause")

    def _report(self) -> None:
        settings = self._boot.settings
        log.info("waiting for hosts: %d of %d are connected", self._num_connected, settings.hosts)
        self._emit(HostsConnected(self._num_connected, settings.hosts, settings.rendezvous))

    def _send(self, identity: bytes, message: ToHost) -> None:
        post(self._channel, message, identity)


@asynccontextmanager
async def connect_hosts(boot: LearnerBoot, emit: Emitter) -> AsyncIterator[Hosts]:
    """Wait for the other hosts and watch them inside the block; for one host yield the null object.

    Raises ConfigError for the secret, NetworkError for the rendezvous address or a missing host.
    """
    settings = boot.settings
    if settings.hosts == 1:
        yield ONE_HOST
        return
    key = _key_of(settings.rendezvous_secret_file)
    name, port = parse_endpoint(settings.rendezvous, name="learner.rendezvous")
    address = await _resolve(name, port)
    os.environ.update(interface_environment(address))  # torch and NCCL read it when they connect
    with zmq.asyncio.Context() as context, key.authenticating(context), context.socket(zmq.ROUTER) as channel:
        key.secure(channel, as_server=True)
        try:
            channel.bind(f"tcp://{f'[{address}]' if ':' in address else address}:{port}")
        except zmq.ZMQError as error:
            raise NetworkError(f"learner.rendezvous {settings.rendezvous} cannot be used: {error}") from None
        hosts = ConnectedHosts(boot, channel, emit, listen_on=address)
        watch = watched_task(hosts.run(), name="hosts-watch")
        try:
            await hosts.until_complete()
            yield hosts
        except BaseException as error:
            await hosts.end(str(error) or type(error).__name__)
            raise
        else:
            await hosts.end("")
        finally:
            watch.cancel()
            await asyncio.wait([watch])


def _key_of(secret_file: str) -> HostKey:
    return HostKey(read_secret(Path(secret_file).expanduser(), name="learner.rendezvous_secret_file"))


async def _resolve(name: str, port: int) -> str:
    """Return the address of this host with that name. Raises NetworkError if the name has none here."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NetworkError(f"learner.rendezvous: {name} has no address: {error}") from None
    return str(found[0][4][0])
