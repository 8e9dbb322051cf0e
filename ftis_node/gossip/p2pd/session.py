"""One p2pd session: p2pd, control client, directory and stream server, opened and closed together.

| part | duty |
|---|---|
| control client | sends our requests, receives gossipsub's messages |
| directory | our node of the DHT; its persistent connection keeps p2pd alive |
| stream server | serves incoming streams |

The folder of p2pd's unix sockets is private, has a short path, and is emptied at each start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.errors import MachineError, UsageError
from ftis_node.gossip.directory.dht import Directory
from ftis_node.gossip.encryption import NO_CIPHER
from ftis_node.gossip.interface import GossipCounters, GossipLimits
from ftis_node.gossip.p2pd.client import P2pdClient
from ftis_node.gossip.p2pd.process import P2pdProcess, check_free, p2pd_arguments, write_identity_file
from ftis_node.gossip.p2pd.relay_limit import fetch_own_limit
from ftis_node.gossip.services import AdmissionControl
from ftis_node.gossip.streams import Caller, StreamServer, serves
from ftis_node.gossip.wire_format import RpcService
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from ftis_node.gossip.encryption import PayloadCipher
    from ftis_node.gossip.multiaddr import ListenAddress
    from ftis_node.gossip.p2pd.relay_limit import RelayLimit
    from ftis_node.gossip.services import Handler
    from ftis_node.gossip.settings import NetworkSettings

MAX_SOCKET_PATH_BYTES = 107  # the kernel's limit on the path of a unix socket
CONTROL_NAME = "p2pd.sock"
STREAMS_NAME = "streams.sock"
PROBE_NAME = "probe.sock"
KEY_NAME = "p2pd.key"
_NAMES = (CONTROL_NAME, STREAMS_NAME, PROBE_NAME, KEY_NAME, KEY_NAME + ".new")
logger = logging.getLogger(__name__)

EXIT_GRACE_S = 0.2  # p2pd closes its sockets shortly before it exits


def prepare_sockets(folder: Path) -> None:
    """Create the folder, readable by its owner only, and remove files that a killed process left.

    Raises UsageError if its path is too long, it cannot be created, or it belongs to another user.
    """
    longest = max(len(os.fsencode(folder.absolute() / name)) for name in _NAMES[:2])
    if longest > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"the path {folder} is too long for a unix socket ({longest} bytes, {MAX_SOCKET_PATH_BYTES} allowed): "
            "choose a shorter one"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(f"{folder} must be a folder of this user's: remove it, or choose another")
        folder.chmod(0o700)
        clear_sockets(folder)
    except OSError as error:
        raise UsageError(f"cannot use {folder} for sockets: {error.strerror}") from None


def clear_sockets(folder: Path) -> None:
    """Remove our files and keep others."""
    for name in _NAMES:
        (folder / name).unlink(missing_ok=True)


def remove_socket(folder: Path, name: str) -> None:
    """Remove one of our files, so that the next start does not find it."""
    (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class P2pdConfig:
    """Settings that all sessions of one node share. `is_public` is true for a bootstrap node.

    `on_duplicate_identity` is called when another node with this identity is detected.
    """

    settings: NetworkSettings
    identity: Identity
    limits: GossipLimits
    counters: GossipCounters
    handlers: Mapping[str, Handler]
    admission: AdmissionControl
    cipher: PayloadCipher = NO_CIPHER
    is_public: bool = False
    guard: PeerGuard = field(default_factory=PeerGuard)
    on_duplicate_identity: Callable[[], None] = lambda: None


def client_only_config(settings: NetworkSettings) -> P2pdConfig:
    """Return the configuration of a node that only queries: a temporary identity, no services."""
    limits = GossipLimits()
    return P2pdConfig(
        settings=settings,
        identity=Identity.generate(),
        limits=limits,
        counters=GossipCounters(),
        handlers={},
        admission=AdmissionControl(limits),
    )


@dataclass(frozen=True, slots=True)
class Session:
    """A running p2pd with its client, directory and stream server."""

    process: P2pdProcess
    client: P2pdClient
    directory: Directory
    caller: Caller
    listening_on: tuple[str, ...]

    async def is_run_member(self, peer_id: str, run_name: str, *, timeout_s: float) -> bool | None:
        """Return whether a connected peer is a member of the run with this wire name; None if it did not answer."""
        return await serves(self.caller, peer_id, run_name, RpcService.HELLO, timeout_s=timeout_s)

    async def reads_batches(self, peer_id: str, run_name: str, *, timeout_s: float) -> bool | None:
        """Return whether a member of the run reads announcements of several groups; None if it did not answer."""
        return await serves(self.caller, peer_id, run_name, RpcService.BATCHES, timeout_s=timeout_s)

    async def lost(self) -> str:
        """Wait until the session is over; return the cause of its end."""
        ended = asyncio.create_task(self.process.ended())
        cut = asyncio.create_task(self.directory.lost())
        try:
            await asyncio.wait({ended, cut}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=EXIT_GRACE_S)
            return ended.result() if ended.done() else "its control connection broke"
        finally:
            ended.cancel()
            cut.cancel()


@asynccontextmanager
async def open_session(config: P2pdConfig, *, listen: Sequence[ListenAddress]) -> AsyncIterator[Session]:
    """Start p2pd on `listen`, with client, directory and server. Raises the same errors as `Gossip.start`."""
    settings = config.settings
    folder = settings.sockets_dir.absolute()
    control_path, streams_path = folder / CONTROL_NAME, folder / STREAMS_NAME
    async with AsyncExitStack() as stack:
        prepare_sockets(folder)
        stack.callback(clear_sockets, folder)
        write_identity_file(config.identity, folder / KEY_NAME)
        process = await (_start_relay if config.is_public else _start_p2pd)(config, listen=listen)
        stack.push_async_callback(process.stop, timeout_s=settings.stop_timeout_s)
        async with asyncio.timeout(
            settings.control_timeout_s
        ):  # hivemind would wait forever for a p2pd that ends in the meantime
            directory = await Directory.attach(
                control_path,
                identity=config.identity,
                limits=config.limits,
                counters=config.counters,
                cipher=config.cipher,
                guard=config.guard,
                on_duplicate_identity=config.on_duplicate_identity,
                rpc_timeout_s=settings.directory_rpc_timeout_s,
                timeout_s=settings.directory_timeout_s,
            )
        stack.push_async_callback(directory.close)
        server = StreamServer(
            config.handlers,
            peer_id=config.identity.peer_id,
            limits=config.limits,
            counters=config.counters,
            admission=config.admission,
            cipher=config.cipher,
            guard=config.guard,
        )
        await server.listen(streams_path)
        stack.push_async_callback(server.close)
        client = P2pdClient(
            control_path, timeout_s=settings.control_timeout_s, counters=config.counters, guard=config.guard
        )
        stack.callback(client.close)
        if config.handlers:
            await client.handle_streams(tuple(config.handlers), streams_path)
        caller = Caller(client, config.identity.peer_id, config.cipher)
        yield Session(process, client, directory, caller, await client.identify())


async def _start_relay(config: P2pdConfig, *, listen: Sequence[ListenAddress]) -> P2pdProcess:
    """Start p2pd, usually one or two times, until its relay has our limits (`relay_limit.py`)."""
    settings = config.settings
    for num_tries in range(1, settings.num_relay_tries + 1):
        process = await _start_p2pd(config, listen=listen)
        try:
            limit = await _own_relay_limit(config)
        except BaseException:
            await process.stop(timeout_s=0)
            raise
        if limit is None or limit.num_bytes >= settings.relay_bytes:
            break
        if num_tries == settings.num_relay_tries:
            logger.warning(
                "relay limit is %d bytes for each connection: p2pd did not apply the configured limit", limit.num_bytes
            )
            break
        await process.stop(timeout_s=0)
        (settings.sockets_dir / CONTROL_NAME).unlink(missing_ok=True)
    return process


async def _own_relay_limit(config: P2pdConfig) -> RelayLimit | None:
    folder = config.settings.sockets_dir.absolute()
    client = P2pdClient(folder / CONTROL_NAME, timeout_s=config.settings.control_timeout_s)
    try:
        return await fetch_own_limit(
            client,
            folder / PROBE_NAME,
            peer_id=config.identity.peer_id,
            timeout_s=config.settings.dial_timeout_s,
        )
    finally:
        client.close()
        remove_socket(folder, PROBE_NAME)


async def _start_p2pd(config: P2pdConfig, *, listen: Sequence[ListenAddress]) -> P2pdProcess:
    """Start p2pd with a few retries: on a busy machine the first start may be slow."""
    settings = config.settings
    folder = settings.sockets_dir.absolute()
    check_free(listen)
    arguments = p2pd_arguments(
        settings,
        listen=listen,
        control_path=folder / CONTROL_NAME,
        key_path=folder / KEY_NAME,
        is_public=config.is_public,
    )
    failures = []
    for _ in range(settings.num_start_tries):
        try:
            return await P2pdProcess.start(arguments, timeout_s=settings.start_timeout_s, on_one_core=config.is_public)
        except MachineError as error:
            failures.append(str(error))
            (folder / CONTROL_NAME).unlink(missing_ok=True)
    where = ", ".join(address.text for address in listen)
    raise MachineError(f"cannot listen on {where}: {failures[-1]} ({len(failures)} tries)")
