"""A plain go-libp2p host: p2pd with a key of any kind, without anything of this project behind it."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import base58

from ftis_node.gossip.p2pd.client import P2pdClient, P2pdError
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_pb2
from ftis_node.gossip.p2pd.process import P2pdProcess
from ftis_node.gossip.p2pd.session import CONTROL_NAME, KEY_NAME, clear_sockets, prepare_sockets
from ftis_node.records.identity import peer_id_from_text, write_private
from tests.attacks.visitors.keys import KeyKind, private_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ftis_node.lab.group_maker import GroupMaker

Request = p2pd_pb2.Request
START_S, DIAL_S = 60.0, 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a visitor visits. `address` ends in `/p2p/ID`; most visitors know neither the run nor its tokenizer."""

    address: str
    run_id: str
    tokenizer: str

    @classmethod
    def of(cls, address: str, maker: GroupMaker) -> Target:
        """A member of `maker`'s run."""
        return cls(address, maker.manifest.run_id, maker.tokenizer.fingerprint)

    @property
    def peer_id(self) -> str:
        """The visited node's."""
        return self.address.rsplit("/p2p/", 1)[1]

    @property
    def transport(self) -> str:
        """The way to it."""
        return self.address.rsplit("/p2p/", 1)[0]


@dataclass(frozen=True, slots=True)
class Host:
    """A running host. `peer_id` is its id as text, whatever the kind of its key."""

    process: P2pdProcess
    control: P2pdClient
    peer_id: str
    addresses: tuple[str, ...]
    folder: Path

    async def connect(self, target: Target) -> None:
        """Connects. Raises Refused where the target does not let it in."""
        await self.control.connect(target.peer_id, [target.transport], timeout_s=DIAL_S)

    async def disconnect(self, target: Target) -> None:
        """Closes all connections to the target."""
        request = p2pd_pb2.DisconnectRequest(peer=peer_id_from_text(target.peer_id))
        with suppress(P2pdError):
            await self.control._call(Request(type=Request.DISCONNECT, disconnect=request))

    async def say(self, target: Target, protocol: str, message: bytes) -> bytes | None:
        """The first bytes of an answer on a stream of `protocol`; None where the target does not speak it."""
        try:
            async with self.control.stream(target.peer_id, protocol, timeout_s=DIAL_S) as (reader, writer):
                writer.write(message)
                return bytes(await reader.read(4096))
        except (OSError, EOFError, P2pdError):
            return None


@asynccontextmanager
async def host(folder: Path, kind: KeyKind = KeyKind.ED25519) -> AsyncIterator[Host]:
    """Starts a host on a free port of the loopback, with gossipsub; stops it at the end."""
    prepare_sockets(folder)
    control_path, key_path = folder / CONTROL_NAME, folder / KEY_NAME
    write_private(key_path, private_key(kind))
    arguments = [
        f"-listen=/unix{control_path}",
        f"-id={key_path}",
        "-hostAddrs=/ip4/127.0.0.1/tcp/0",
        "-b=0",
        "-pubsub=1",
        "-gossipsubHeartbeatInterval=200ms",
        "-relay=0",
    ]
    process = await P2pdProcess.start(arguments, timeout_s=START_S, on_one_core=True)
    control = P2pdClient(control_path, timeout_s=DIAL_S)
    try:
        itself = (await control._call(Request(type=Request.IDENTIFY))).identify
        peer_id = base58.b58encode(itself.id).decode()
        yield Host(process, control, peer_id, await control.identify(), folder)
    finally:
        control.close()
        await process.stop(timeout_s=0)
        clear_sockets(folder)
