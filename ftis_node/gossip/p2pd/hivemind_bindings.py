"""The only file that imports hivemind; it also undoes the side effects of that import.

hivemind redirects its log lines to its own handler and renames the log level WARNING for the whole process. Its
`__init__` files import torch, which the P2P client and the DHT do not use: 1.5 s of CPU time and 200 MB. While
`only_p2p_and_dht` is active, empty packages with the same search path replace those files.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from importlib.resources import files
from importlib.util import find_spec, module_from_spec
from pathlib import Path

from ftis_node.records.addresses import AddressError, parse_address, read_address

KNOWN_VERSION = "1.1.12"
UTILITIES = {
    "get_logger": "hivemind.utils.logging",
    "MSGPackSerializer": "hivemind.utils.serializer",
    "SerializerBase": "hivemind.utils.serializer",
    "get_dht_time": "hivemind.utils.timed_storage",
}  # the names that `hivemind.dht` imports from `hivemind.utils`, and the modules that define them


@contextmanager
def only_p2p_and_dht() -> Iterator[None]:
    """Import modules of `hivemind.p2p`, `hivemind.dht` and `hivemind.utils` without torch inside this block.

    Does nothing if hivemind is already imported, or has another version than KNOWN_VERSION. The empty packages are
    removed afterwards: a later `import hivemind` runs the real `__init__` and shares the modules imported here.
    """
    if "hivemind" in sys.modules or metadata.version("hivemind") != KNOWN_VERSION:
        yield
        return
    spec = find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("hivemind is not installed", name="hivemind")
    folder = spec.submodule_search_locations[0]
    empty = [_add_empty("hivemind", folder)]
    try:
        empty += [_add_empty(name, f"{folder}/{name.split('.')[1]}") for name in ("hivemind.utils", "hivemind.dht")]
        for name, module in UTILITIES.items():
            setattr(sys.modules["hivemind.utils"], name, getattr(import_module(module), name))
        yield
    finally:
        for name in empty:
            del sys.modules[name]


def _add_empty(name: str, folder: str) -> str:
    spec = ModuleSpec(name, loader=None, is_package=True)
    spec.submodule_search_locations = [folder]
    sys.modules[name] = module_from_spec(spec)
    return name


with warnings.catch_warnings(), only_p2p_and_dht():
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    # `as` marks the names for import from here.
    from hivemind.dht.node import DHTNode as DHTNode
    from hivemind.dht.routing import DHTID as DHTID
    from hivemind.dht.storage import DHTLocalStorage as DHTLocalStorage
    from hivemind.dht.storage import DictionaryDHTValue as DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord as DHTRecord
    from hivemind.dht.validation import RecordValidatorBase as RecordValidatorBase
    from hivemind.p2p import P2P
    from hivemind.p2p import PeerID as PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe as read_pbmsg_safe
    from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg as write_pbmsg
    from hivemind.proto import dht_pb2 as dht_pb2
    from hivemind.proto import p2pd_pb2 as p2pd_pb2
    from hivemind.utils import MSGPackSerializer as MSGPackSerializer
    from hivemind.utils.auth import AuthorizerBase as AuthorizerBase
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr as Multiaddr
use_hivemind_log_handler("nowhere")
logging.addLevelName(logging.WARNING, "WARNING")
UNIX_CODE = b"\x90\x03"  # 400, as a varint


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's client of a running p2pd. It does not log addresses, because hivemind fails on some of them."""

    async def _ping_daemon(self) -> None:
        self.peer_id, self._visible_maddrs = await self._client.identify()


def p2pd_path() -> Path:
    return Path(str(files("hivemind.hivemind_cli") / "p2pd"))


def address_bytes(text: str) -> bytes:
    """Return a multiaddr in binary form. Raises AddressError if `parse_address` refuses it.

    hivemind's Multiaddr refuses host names that libp2p dials, and writes the peer of `/p2p/ID` in a form that p2pd
    refuses.
    """
    return parse_address(text).to_bytes()


def socket_bytes(path: Path) -> bytes:
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
