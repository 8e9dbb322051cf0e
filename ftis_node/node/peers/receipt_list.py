"""The receipts of a node with the signed records that prove them, and the check of such a list by anybody."""

from __future__ import annotations

import base64
import sqlite3
from contextlib import closing, suppress

import msgspec

from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, FileError, RecordError
from ftis_node.records.envelope import PeerRecord, open_peer_record
from ftis_node.records.identity import Identity
from ftis_node.records.peer_messages import Receipt, receipt_key
from ftis_node.replay.integrity import BUSY_TIMEOUT_S, explained

MAX_RECEIPTS_FILE_BYTES = 16 << 20


class ProvenReceipt(msgspec.Struct, frozen=True):
    """One receipt. `record` is the signer's directory record in base64, which has the signature."""

    signer: str
    run_id: str
    groups: int
    tokens: int
    signed_at: float
    record: str


class ReceiptList(msgspec.Struct, frozen=True):
    """All receipts for one node."""

    peer_id: str
    receipts: tuple[ProvenReceipt, ...] = ()


def saved_receipts(home: Home) -> ReceiptList:
    """Return the receipts that a node has saved, those with most groups first; without damaged ones.

    Raises ConfigError, DamagedError, MachineError.
    """
    peer_id = Identity.load(home.identity).peer_id
    if not home.peers.exists():
        raise ConfigError(f"no peers at {home.peers}: has a node run with this home?")
    try:
        uri = f"{home.peers.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as db:
            records = [bytes(record) for (record,) in db.execute("SELECT record FROM receipts")]
    except sqlite3.DatabaseError as error:
        raise explained(error, home.peers) from None
    proven = []
    for record in records:
        with suppress(RecordError):
            proven.append(_proven(peer_id, record))
    return ReceiptList(peer_id, tuple(sorted(proven, key=lambda one: (-one.groups, one.signer))))


def check_receipts(data: bytes, *, source: str) -> ReceiptList:
    """Return the list in `data` with the figures of its signed records. Raises FileError for a false or damaged one."""
    try:
        document = msgspec.json.decode(data, type=ReceiptList)
        proven = tuple(_proven(document.peer_id, base64.b64decode(one.record)) for one in document.receipts)
    except (msgspec.MsgspecError, ValueError, RecordError) as error:
        raise FileError(f"{source} proves nothing: {error}") from None
    for claimed, found in zip(document.receipts, proven, strict=True):
        if claimed != found:
            raise FileError(f"{source} differs from what {found.signer} signed: {_difference(claimed, found)}")
    if len({(one.signer, one.run_id) for one in proven}) < len(proven):
        raise FileError(f"{source} has two receipts of one signer in one run")
    return document


def _proven(peer_id: str, data: bytes) -> ProvenReceipt:
    record = open_peer_record(data)
    receipt = _receipt_for(peer_id, record)
    encoded = base64.b64encode(data).decode()
    return ProvenReceipt(
        record.peer_id, record.run_id, receipt.groups, receipt.tokens, round(record.created_at, 3), encoded
    )


def _receipt_for(peer_id: str, record: PeerRecord) -> Receipt:
    if record.stats is not None and record.peer_id != peer_id:
        for receipt in record.stats.receipts:
            if receipt.key == receipt_key(peer_id):
                return receipt
    raise RecordError("receipt", f"the record of {record.peer_id} has no receipt for {peer_id}")


def _difference(claimed: ProvenReceipt, found: ProvenReceipt) -> str:
    signed = {name: getattr(found, name) for name in ProvenReceipt.__struct_fields__}
    return ", ".join(f"{name} is {value}" for name, value in signed.items() if getattr(claimed, name) != value)
