"""The only file that imports hivemind; it also undoes the side effects of that import.

hivemind redirects its log lines to its own handler and renames the log level WARNING for the whole process. Only
`libp2p.py`, `bootstrap.py` and the files below them may import this one.
"""

from __future__ import annotations

import logging
import os
import warnings
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.gossip.p2pd.hivemind_parts import only_p2p_and_dht
from ftis_node.records.addresses import AddressError, parse_address, read_address

with warnings.catch_warnings(), only_p2p_and_dht():
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.auth import AuthorizerBase
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

if TYPE_CHECKING:
    from collections.abc import Iterable

use_hivemind_log_handler("nowhere")
logging.addLevelName(logging.WARNING, "WARNING")

UNIX_CODE = b"\x90\x03"  # 400, as a varint

__all__ = [
    "DHTID",
    "P2P",
    "AttachedP2P",
    "AuthorizerBase",
    "DHTNode",
    "DHTRecord",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "PeerID",
    "RecordValidatorBase",
    "Multiaddr",
    "address_bytes",
    "address_texts",
    "dht_pb2",
    "p2pd_path",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "socket_bytes",
    "write_pbmsg",
]


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's client of a running p2pd. It does not log addresses, because hivemind fails on some of them."""

    async def _ping_daemon(self) -> None:
        self.peer_id, self._visible_maddrs = await self._client.identify()


def p2pd_path() -> Path:
    """Return the path of the p2pd program."""
    return Path(str(files("hivemind.hivemind_cli") / "p2pd"))


def address_bytes(text: str) -> bytes:
    """Return a multiaddr in binary form. Raises AddressError, a ValueError, if `parse_address` rejects it.

    hivemind's Multiaddr cannot be used: it rejects host names that libp2p dials, and writes the peer of `/p2p/ID` in a
    form that p2pd rejects.
    """
    return parse_address(text).to_bytes()


def socket_bytes(path: Path) -> bytes:
    """Return the binary multiaddr of a unix socket."""
    raw = os.fsencode(path)
    return UNIX_CODE + bytes([len(raw)]) + raw


def address_texts(raws: Iterable[bytes]) -> tuple[str, ...]:
    """Return multiaddrs as text. Invalid ones and unknown protocols are skipped."""
    texts = []
    for raw in raws:
        try:
            texts.append(read_address(raw).text)
        except AddressError:
            continue
    return tuple(texts)
