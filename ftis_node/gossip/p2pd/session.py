"""One p2pd session: p2pd, control client, directory and stream server, opened and closed together.

The directory's persistent connection keeps p2pd alive. The folder of p2pd's unix sockets is private, has a short path,
and is emptied at each start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ftis_node.errors import MachineError, RecordError, UsageError
from ftis_node.files import replace_file
from ftis_node.gossip.directory.dht import Directory
from ftis_node.gossip.frames import Frame, ItemCollector, outcome_of, read_frame, write_frame
from ftis_node.gossip.names import RpcService, protocol
from ftis_node.gossip.p2pd.client import P2pdClient, P2pdError, first_done
from ftis_node.gossip.p2pd.process import P2pdProcess, check_free, libp2p_private_key, p2pd_arguments
from ftis_node.gossip.p2pd.relay_limit import fetch_own_limit
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.streams import StreamServer
from ftis_node.gossip.types import Fetched, FetchOutcome
from ftis_node.records.addresses import Address

MAX_SOCKET_PATH_BYTES = 107  # the kernel's limit on the path of a unix socket
CONTROL_NAME = "p2pd.sock"
STREAMS_NAME = "streams.sock"
PROBE_NAME = "probe.sock"
KEY_NAME = "p2pd.key"
_NAMES = (CONTROL_NAME, STREAMS_NAME, PROBE_NAME, KEY_NAME, f"{KEY_NAME}.tmp")
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


@dataclass(frozen=True, slots=True)
class Session:
    process: P2pdProcess
    client: P2pdClient
    directory: Directory
    parts: SessionParts
    listening_on: tuple[str, ...]

    async def pull(
        self, peer_id: str, protocol: str, request: bytes, *, items: ItemCollector, idle_s: float, timeout_s: float
    ) -> Fetched:
        """Send `request` to a peer and collect its items. Raises no exception for a peer's behavior."""
        own_id, cipher = self.parts.identity.peer_id, self.parts.cipher
        ciphertext = cipher.encrypt(request, "request", own_id, peer_id, protocol)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.client.stream(peer_id, protocol, timeout_s=timeout_s) as (reader, writer),
            ):
                await write_frame(writer, Frame.REQUEST, ciphertext, idle_s=idle_s)
                while True:
                    max_bytes = items.next_max_bytes + cipher.overhead_bytes
                    kind, item = await read_frame(reader, max_bytes=max_bytes, idle_s=idle_s)
                    if kind is Frame.END:
                        return items.end(FetchOutcome.COMPLETE)
                    if kind is Frame.BUSY:
                        return items.end(FetchOutcome.BUSY)
                    if kind is not Frame.ITEM:
                        raise RecordError("frame_kind", f"{kind.name} in an answer")
                    items.add(cipher.decrypt(item, "item", peer_id, own_id, protocol, ciphertext))
        except P2pdError:
            return items.end(FetchOutcome.UNREACHABLE)
        except TimeoutError:
            return items.end(FetchOutcome.TIMED_OUT)
        except (OSError, EOFError):
            return items.end(FetchOutcome.BROKEN)
        except RecordError as error:
            return items.end(outcome_of(error))

    async def is_member(self, peer_id: str, run_name: str, *, timeout_s: float) -> bool | None:
        """Return whether a connected peer is a member of the run with this wire name; None if that stays open."""
        items = ItemCollector(max_items=1, max_item_bytes=0, max_bytes=0)
        name = protocol(run_name, RpcService.HELLO)
        hello = await self.pull(peer_id, name, b"", items=items, idle_s=timeout_s, timeout_s=timeout_s)
        if hello.outcome in (FetchOutcome.COMPLETE, FetchOutcome.BUSY):
            return True
        return False if hello.outcome is FetchOutcome.UNREACHABLE else None

    async def lost(self) -> str:
        """Wait until the session is over; return the cause of its end."""
        async with first_done(self.process.ended(), self.directory.lost()) as (ended, _):
            await asyncio.wait({ended}, timeout=EXIT_GRACE_S)
            return str(ended.result()) if ended.done() else "its control connection broke"


@asynccontextmanager
async def open_session(parts: SessionParts, *, listen: Sequence[Address]) -> AsyncIterator[Session]:
    """Start p2pd on `listen`, with client, directory and server. Raises the same errors as `Gossip.start`."""
    settings = parts.settings
    folder = settings.sockets_dir.absolute()
    control_path, streams_path = folder / CONTROL_NAME, folder / STREAMS_NAME
    async with AsyncExitStack() as stack:
        prepare_sockets(folder)
        stack.callback(clear_sockets, folder)
        replace_file(folder / KEY_NAME, libp2p_private_key(parts.identity), mode=0o600)
        process = await (_start_relay if parts.is_public else _start_p2pd)(parts, listen=listen)
        stack.push_async_callback(process.stop, timeout_s=settings.stop_timeout_s)
        async with asyncio.timeout(settings.control_timeout_s):  # p2pd may have ended; hivemind would wait forever
            directory = await Directory.attach(control_path, parts)
        stack.push_async_callback(directory.close)
        server = StreamServer(parts)
        await server.listen(streams_path)
        stack.push_async_callback(server.close)
        client = P2pdClient(
            control_path, timeout_s=settings.control_timeout_s, counters=parts.counters, guard=parts.guard
        )
        if parts.handlers:
            await client.handle_streams(tuple(parts.handlers), streams_path)
        yield Session(process, client, directory, parts, await client.identify())


async def _start_relay(parts: SessionParts, *, listen: Sequence[Address]) -> P2pdProcess:
    """Start p2pd, usually one or two times, until its relay has our limits (`relay_limit.py`)."""
    settings, folder = parts.settings, parts.settings.sockets_dir.absolute()
    for num_tries in range(1, settings.num_relay_tries + 1):
        process = await _start_p2pd(parts, listen=listen)
        try:
            limit = await fetch_own_limit(parts, control_path=folder / CONTROL_NAME, probe_path=folder / PROBE_NAME)
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
        (folder / CONTROL_NAME).unlink(missing_ok=True)
    return process


async def _start_p2pd(parts: SessionParts, *, listen: Sequence[Address]) -> P2pdProcess:
    """Start p2pd with a few retries: on a busy machine the first start may be slow."""
    settings = parts.settings
    folder = settings.sockets_dir.absolute()
    check_free(listen)
    arguments = p2pd_arguments(
        settings,
        listen=listen,
        control_path=folder / CONTROL_NAME,
        key_path=folder / KEY_NAME,
        is_public=parts.is_public,
    )
    failures = []
    for _ in range(settings.num_start_tries):
        try:
            return await P2pdProcess.start(arguments, timeout_s=settings.start_timeout_s, on_one_core=parts.is_public)
        except MachineError as error:
            failures.append(str(error))
            (folder / CONTROL_NAME).unlink(missing_ok=True)
    where = ", ".join(address.text for address in listen)
    raise MachineError(f"cannot listen on {where}: {failures[-1]} ({len(failures)} tries)")
