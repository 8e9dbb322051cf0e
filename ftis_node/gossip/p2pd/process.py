"""The p2pd process: check of the listen addresses, command line, key file, start, output, stop.

If the daemon is killed, p2pd ends because its last control connection breaks. If the daemon is killed before it has
connected, p2pd ends after `-idleTimeout`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ftis_node.errors import MachineError, UsageError
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_path
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.records.addresses import Address
from ftis_node.records.identity import SEED_BYTES, Identity
from ftis_node.telemetry.faults import watched_task

logger = logging.getLogger(__name__)
READY_MARK = "Peer ID:"
NUM_LINES_KEPT = 20
LAST_OUTPUT_S = 2.0  # to read the last output of a p2pd that has ended
MAX_LINE_BYTES = 1 << 16
_KEY_HEADER = bytes((0x08, 0x01, 0x12, 0x40))  # field 1: key type 1 (Ed25519); field 2: 64 bytes
RELAY_BUFFER_BYTES = 1 << 16  # two for each relayed connection; p2pd's default is 16 MiB


def check_free(addresses: Iterable[Address]) -> None:
    """Raise UsageError, with the remedy, for the first address on which this node cannot listen.

    p2pd does not report a conflict: it listens with SO_REUSEPORT, and each of two nodes gets some of the connections.
    """
    for address in addresses:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        kind = socket.SOCK_STREAM if address.names[1] == "tcp" else socket.SOCK_DGRAM
        try:
            with socket.socket(family, kind) as probe:
                if address.names[1] == "tcp":  # connections in TIME_WAIT do not matter
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address.host, address.port))
        except OSError as error:
            why = {
                errno.EADDRINUSE: f"port {address.port} is taken; choose another",
                errno.EADDRNOTAVAIL: f"this machine has no address {address.host}; choose another",
                errno.EACCES: f"port {address.port} needs rights that this user lacks; choose one above 1023",
            }.get(error.errno or 0, f"{error.strerror}; choose another")
            raise UsageError(f"cannot listen on {address.text}: {why} with --listen") from None


def pin_ports(requested: Sequence[Address], actual: Iterable[str]) -> tuple[Address, ...]:
    """Return `requested` with port 0 replaced by the chosen port, so that a restarted p2pd keeps its address."""
    pinned = []
    for address in requested:
        family = "ip6" if ":" in address.host else "ip4"
        parts = [text.split("/") for text in actual if text.startswith(f"/{family}/")]
        ports = [int(part[4]) for part in parts if part[3] == address.names[1]]
        pinned.append(address.with_port(ports[0]) if address.port == 0 and ports else address)
    return tuple(pinned)


def p2pd_arguments(
    settings: NetworkSettings,
    *,
    listen: Sequence[Address],
    control_path: Path,
    key_path: Path,
    is_public: bool,
) -> list[str]:
    """Return p2pd's command line.

    p2pd starts without bootstrap peers, because it exits if none of those given answers; peers are dialed later.
    `is_public` (a bootstrap node) declares this machine reachable without asking other peers.
    """
    arguments = [
        f"-listen=/unix{control_path}",
        f"-id={key_path}",
        f"-hostAddrs={','.join(address.text for address in listen)}",
        f"-idleTimeout={settings.start_timeout_s:.0f}s",  # p2pd exits if the daemon never connects
        "-b=0",
        "-dhtServer=1",
        "-pubsub=1",
        "-pubsubSign=1",
        "-pubsubSignStrict=1",
        f"-gossipsubHeartbeatInterval={settings.heartbeat_s * 1000:.0f}ms",
        "-connManager=1",
        "-relay=1",
        "-tls=1",
    ]
    if settings.announce:
        arguments.append(f"-announceAddrs={','.join(settings.announce)}")
    if settings.use_nat_helpers:
        arguments.append("-autonat=1")
    if is_public:
        arguments += [
            "-forceReachabilityPublic=1",
            f"-relayDataLimit={settings.relay_bytes}",
            f"-relayMaxCircuits={settings.relay_connections_per_peer}",
            f"-relayMaxReservations={settings.relay_reservations}",
            f"-relayBufferSize={RELAY_BUFFER_BYTES}",
        ]
    elif settings.use_nat_helpers:
        arguments += ["-natPortMap=1", "-autoRelay=1"]
        relays = [peer for peer in settings.peers if "/p2p-circuit/" not in peer]
        if relays:  # only these: with discovery p2pd waits for four candidates, or three minutes
            arguments += ["-relayDiscovery=0", f"-trustedRelays={','.join(relays)}"]
    return arguments


def libp2p_private_key(identity: Identity) -> bytes:
    """Return the serialized `PrivateKey` protobuf of an identity, 68 bytes: 32-byte seed, 32-byte public key.

    Format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#keys
    """
    return _KEY_HEADER + identity.seed + identity.peer[-SEED_BYTES:]


class P2pdProcess:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self._lines: deque[str] = deque(maxlen=NUM_LINES_KEPT)
        self._ready = asyncio.Event()
        self._is_stopping = False
        self._reader = watched_task(self._read_lines(), name="p2pd-output")  # a full pipe would block p2pd

    @classmethod
    async def start(cls, arguments: Sequence[str], *, timeout_s: float, on_one_core: bool = False) -> P2pdProcess:
        """Start p2pd and wait until it is ready. Raises MachineError with its last line of output if that fails."""
        variables = {"GOLOG_LOG_LEVEL": "error", **os.environ, "GOLOG_LOG_FMT": "json"}
        if on_one_core:
            variables["GOMAXPROCS"] = "1"
        try:
            child = await asyncio.create_subprocess_exec(
                str(p2pd_path()),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=variables,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # the daemon handles Ctrl-C
            )
        except OSError as error:
            raise MachineError(f"{p2pd_path()} cannot be started: {error.strerror}; install hivemind again") from None
        process = cls(child)
        try:
            await process._wait_ready(timeout_s=timeout_s)
        except BaseException:
            await process.stop(timeout_s=0)
            raise
        return process

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ended(self) -> str:
        """Wait until p2pd has ended; return a description of its end."""
        code = await self._child.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def stop(self, *, timeout_s: float) -> None:
        """Wait `timeout_s` for p2pd to end by itself, then send SIGTERM, after another `timeout_s` SIGKILL."""
        self._is_stopping = True
        if not await self._has_ended(within_s=timeout_s):
            self._signal(signal.SIGTERM)
            if not await self._has_ended(within_s=timeout_s):
                self._signal(signal.SIGKILL)
                await self._child.wait()
        await asyncio.wait({self._reader}, timeout=LAST_OUTPUT_S)
        self._reader.cancel()  # another process may still have the pipe open

    async def _has_ended(self, *, within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._child.wait()
                return True
        return False

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal. asyncio's `send_signal` may reap the child and then report a wrong exit code."""
        if self._child.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    async def _wait_ready(self, *, timeout_s: float) -> None:
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ready, self._reader}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            how = f"ended with {await self.ended()}" if self._reader.done() else f"was not ready in {timeout_s:g} s"
            last_line = self._lines[-1] if self._lines else "no output"
            raise MachineError(f"the network process p2pd {how}: {last_line}")

    async def _read_lines(self) -> None:
        """Read p2pd's output until its end, so that none of it reaches this process's stdout."""
        assert self._child.stdout is not None
        while True:
            try:
                line = await self._child.stdout.readline()
            except ValueError:  # longer than MAX_LINE_BYTES; the reader dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            if text.startswith(READY_MARK):
                self._ready.set()
            _log(text, is_stopping=self._is_stopping)


def _log(text: str, *, is_stopping: bool) -> None:
    """Log a line of p2pd. Its errors are warnings here; those during shutdown are not relevant."""
    try:
        record = json.loads(text)
        message = f"{record['msg']}: {record['error']}" if "error" in record else str(record["msg"])
        is_error = record["level"] not in ("debug", "info", "warn")
    except (ValueError, LookupError, TypeError):
        message, is_error = text, False
    logger.log(logging.WARNING if is_error and not is_stopping else logging.DEBUG, "p2pd: %s", message)
