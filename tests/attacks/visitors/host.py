"""A go-libp2p host: p2pd with a key of any type, without the protocols of this project.

A peer id of an Ed25519 or secp256k1 key contains the key; one of an RSA or ECDSA key is a hash.
Format of keys: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#keys
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import base58
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ftis_node.files import replace_file
from ftis_node.gossip.p2pd.client import P2pdClient, P2pdError
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_pb2
from ftis_node.gossip.p2pd.process import P2pdProcess
from ftis_node.gossip.p2pd.session import CONTROL_NAME, KEY_NAME, clear_sockets, prepare_sockets
from ftis_node.records.identity import peer_id_from_text
from tests.attacks.member import varint

Request = p2pd_pb2.Request
START_S, DIAL_S = 60.0, 20.0


class KeyKind(StrEnum):
    """The types of a libp2p host's key."""

    RSA = "rsa"
    ED25519 = "ed25519"
    SECP256K1 = "secp256k1"
    ECDSA = "ecdsa"


FOREIGN = (KeyKind.RSA, KeyKind.SECP256K1, KeyKind.ECDSA)  # all types but that of nodes
_CODES = {KeyKind.RSA: 0, KeyKind.ED25519: 1, KeyKind.SECP256K1: 2, KeyKind.ECDSA: 3}


def private_key(kind: KeyKind) -> bytes:
    """Return a new key as libp2p's `PrivateKey` protobuf."""
    data = _key_data(kind)
    return bytes((0x08, _CODES[kind], 0x12)) + varint(len(data)) + data


def _key_data(kind: KeyKind) -> bytes:
    if kind is KeyKind.ED25519:
        key = ed25519.Ed25519PrivateKey.generate()
        return key.private_bytes_raw() + key.public_key().public_bytes_raw()
    if kind is KeyKind.SECP256K1:
        return ec.generate_private_key(ec.SECP256K1()).private_numbers().private_value.to_bytes(32, "big")
    made = rsa.generate_private_key(65537, 2048) if kind is KeyKind.RSA else ec.generate_private_key(ec.SECP256R1())
    return made.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())


@dataclass(frozen=True, slots=True)
class Target:
    """The visited node. `address` ends in `/p2p/ID`; most visitors do not use the run."""

    address: str
    run_id: str

    @property
    def peer_id(self) -> str:
        return self.address.rsplit("/p2p/", 1)[1]

    @property
    def transport(self) -> str:
        """The address without the peer id."""
        return self.address.rsplit("/p2p/", 1)[0]


@dataclass(frozen=True, slots=True)
class Host:
    """A running host. `peer_id` is its id as text."""

    control: P2pdClient
    peer_id: str

    async def connect(self, target: Target) -> None:
        """Connect. Raises Refused if the target refuses the connection."""
        await self.control.connect(target.peer_id, [target.transport], timeout_s=DIAL_S)

    async def disconnect(self, target: Target) -> None:
        """Close all connections to the target."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_id_from_text(target.peer_id))
        with suppress(P2pdError):
            await self.control._call(Request(type=Request.DISCONNECT, disconnect=request))

    async def request(self, target: Target, protocol: str, message: bytes) -> bytes | None:
        """Return the first bytes of an answer on a stream of `protocol`, or None if the target does not support it."""
        try:
            async with self.control.stream(target.peer_id, protocol, timeout_s=DIAL_S) as (reader, writer):
                writer.write(message)
                return bytes(await reader.read(4096))
        except (OSError, EOFError, P2pdError):
            return None


@asynccontextmanager
async def host(folder: Path, kind: KeyKind = KeyKind.ED25519) -> AsyncIterator[Host]:
    """Run a host with gossipsub on a free port of the loopback."""
    prepare_sockets(folder)
    control_path, key_path = folder / CONTROL_NAME, folder / KEY_NAME
    replace_file(key_path, private_key(kind), mode=0o600)
    arguments = [
        f"-listen=/unix{control_path}", f"-id={key_path}", "-hostAddrs=/ip4/127.0.0.1/tcp/0", "-b=0", "-pubsub=1",
        "-gossipsubHeartbeatInterval=200ms", "-relay=0",
    ]  # fmt: skip
    process = await P2pdProcess.start(arguments, timeout_s=START_S, on_one_core=True)
    control = P2pdClient(control_path, timeout_s=DIAL_S)
    try:
        itself = (await control._call(Request(type=Request.IDENTIFY))).identify
        peer_id = base58.b58encode(itself.id).decode()
        yield Host(control, peer_id)
    finally:
        await process.stop(timeout_s=0)
        clear_sockets(folder)


async def output_of(name: str, *command: str, within_s: float) -> str:
    """Return what a program prints, and kill its session. Raises RuntimeError with its error output if it fails."""
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(within_s):
            out, err = await child.communicate()
    finally:
        with suppress(ProcessLookupError):  # its session, so also the processes that it started
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    if child.returncode != 0:
        raise RuntimeError(f"the {name} failed: {err.decode(errors='replace')[-2000:]}")
    return out.decode()
