"""The door of the directory: what this node stores for others, believes of others, and answers.

hivemind's DHT stores what it is told for as long as it is told, and answers requests of any size. Two of its own hooks
are used against that: a record validator (is this entry its owner's, in its place, in time?) and an authorizer, which
sees every request before it is worked on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftis_node.gossip.bindings import (
    DHTID,
    AuthorizerBase,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RecordValidatorBase,
    dht_pb2,
)
from ftis_node.gossip.entries import is_timely, unseal

if TYPE_CHECKING:
    from ftis_node.gossip.entries import Entry

MAX_KEYS_PER_FIND = 16
MAX_KEYS_PER_STORE = 256
MAX_MEMBERS_PER_BUCKET = 256  # with 512-byte entries: a reply of 16 buckets stays under 3 MiB
MAX_STORED_KEYS = 16384


class EntryValidator(RecordValidatorBase):  # type: ignore[misc]
    """Lets signed entries through, at the place and until the time that their owner signed."""

    def __init__(self, *, max_record_bytes: int, max_ttl_s: float) -> None:
        self._max_record_bytes = max_record_bytes
        self._max_ttl_s = max_ttl_s

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored, or believed when it is read."""
        entry = self._entry(record.value)
        return (
            entry is not None
            and is_timely(entry, expires_at=record.expiration_time, now=time.time(), max_ttl_s=self._max_ttl_s)
            and record.key == DHTID.generate(source=entry.key).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(entry.subkey)
        )

    def _entry(self, packed: bytes) -> Entry | None:
        raw = unpack_bytes(packed)
        return None if raw is None else unseal(raw, max_record_bytes=self._max_record_bytes)


class RequestBounds(AuthorizerBase):  # type: ignore[misc]
    """Cuts down requests that would cost too much work or memory. Signs nothing: entries are signed themselves.

    No request is refused as a whole: hivemind takes a peer that refuses for a dead one, forgets it, meets it again, and
    hands it the same entries once more, without end.
    """

    def __init__(self) -> None:
        self.storage: Any = None  # the node's local storage, once there is one

    async def validate_request(self, request: Any) -> bool:
        """Cuts a peer's request down to what is worked on."""
        if isinstance(request, dht_pb2.FindRequest):
            del request.keys[MAX_KEYS_PER_FIND:]
        if isinstance(request, dht_pb2.StoreRequest):
            for column in (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache):
                del column[MAX_KEYS_PER_STORE:]
            for key in request.keys:
                self._bound_bucket(key)
        return True

    def _bound_bucket(self, key: bytes) -> None:
        """Has a bucket give up the entry that expires first for each one above its bound."""
        stored = self.storage.get(DHTID.from_bytes(key))
        if stored is not None and isinstance(stored.value, DictionaryDHTValue):
            stored.value.maxsize = MAX_MEMBERS_PER_BUCKET

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Nothing to sign."""

    async def sign_response(self, response: Any, request: Any) -> None:
        """Nothing to sign."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Values in responses are checked one by one by `EntryValidator`."""
        return True


def unpack_bytes(packed: bytes) -> bytes | None:
    """The bytes object in a msgpack message, None where there is anything else. Never raises, unlike a full parser."""
    if packed[:1] == b"\xc4" and len(packed) >= 2 and len(packed) == 2 + packed[1]:
        return packed[2:]
    if packed[:1] == b"\xc5" and len(packed) >= 3 and len(packed) == 3 + int.from_bytes(packed[1:3], "big"):
        return packed[3:]
    return None
