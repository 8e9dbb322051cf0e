"""libp2p hosts that are no nodes: a real p2pd with another key type, controlled over its socket."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ftis_node.gossip.p2pd.client import P2pdClient
from ftis_node.gossip.p2pd.hivemind_bindings import P2P, p2pd_pb2
from ftis_node.gossip.p2pd.process import P2pdProcess
from tests.gossip.helpers import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY_TYPES = ("rsa", "secp256k1", "ecdsa")


def write_key(folder: Path, key_type: str) -> None:
    """Create the folder with a new key for p2pd: libp2p's `PrivateKey` message of type and data."""
    folder.mkdir()
    path = folder / "key"
    if key_type == "rsa":
        P2P.generate_identity(str(path))
    elif key_type == "secp256k1":
        number = ec.generate_private_key(ec.SECP256K1()).private_numbers().private_value
        path.write_bytes(b"\x08\x02\x12\x20" + number.to_bytes(32, "big"))
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        data = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        path.write_bytes(b"\x08\x03\x12" + bytes([len(data)]) + data)


@dataclass(frozen=True, slots=True)
class OtherKeyHost:
    """A running host and its raw peer id."""

    control: P2pdClient
    raw_id: bytes

    async def dial(self, address: str) -> None:
        """Connect to a node by its address with `/p2p/ID`."""
        transport, peer_id = address.rsplit("/p2p/", 1)
        await self.control.connect(peer_id, [transport], timeout_s=20)


@asynccontextmanager
async def other_key_host(folder: Path, key_type: str) -> AsyncIterator[OtherKeyHost]:
    write_key(folder, key_type)
    arguments = [
        f"-listen=/unix{folder / 'p2pd.sock'}",
        f"-id={folder / 'key'}",
        f"-hostAddrs={LOOPBACK}",
        "-b=0",
        "-pubsub=1",
        "-pubsubSign=1",
        "-pubsubSignStrict=1",
        "-gossipsubHeartbeatInterval=100ms",
        "-idleTimeout=60s",
    ]
    process = await P2pdProcess.start(arguments, timeout_s=30)
    control = P2pdClient(folder / "p2pd.sock", timeout_s=20)
    try:
        identity = await control._call(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        yield OtherKeyHost(control, bytes(identity.identify.id))
    finally:
        control.close()
        await process.stop(timeout_s=0)
