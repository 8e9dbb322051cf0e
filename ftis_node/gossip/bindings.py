"""The only file that imports hivemind, with what its import does besides put right.

Importing any part of it imports torch (seconds, hundreds of megabytes), warns of a deprecated torch call, sends its log
lines to a handler of its own and renames the level WARNING for the whole process. Nothing outside `libp2p.py` and the
files under it may import this one.
"""

from __future__ import annotations

import logging
import re
import warnings
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

with warnings.catch_warnings():
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

PEER_PART = re.compile("/p2p/([^/]+)")
P2P_CODE = b"\xa5\x03"  # 421, as a varint

__all__ = [
    "DHTID",
    "P2P",
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
    "write_pbmsg",
]


def p2pd_path() -> Path:
    """Where the p2pd program lies."""
    return Path(str(files("hivemind.hivemind_cli") / "p2pd"))


def address_bytes(text: str) -> bytes:
    """A multiaddr in its binary form.

    hivemind writes the peer of `/p2p/ID` in a form that p2pd refuses: no address through a relay could be dialled.
    """
    raw = b""
    for at, part in enumerate(PEER_PART.split(text)):  # a way, an id, a way, an id ...
        if at % 2:
            peer: bytes = PeerID.from_base58(part).to_bytes()
            raw += P2P_CODE + bytes([len(peer)]) + peer
        elif part:
            raw += Multiaddr(part).to_bytes()
    return raw


def address_texts(raws: Iterable[bytes]) -> tuple[str, ...]:
    """Multiaddrs as text. Those that a stranger made up in a protocol unknown here are left out."""
    texts = []
    for raw in raws:
        try:
            texts.append(str(Multiaddr(raw)))
        except (ValueError, LookupError, EOFError):
            continue
    return tuple(texts)
