"""Request to a peer for the groups that it holds: by sender and sequence number, or by age."""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import milliseconds, seconds
from ftis_node.records.identity import peer_id_from_text, peer_id_text
from ftis_node.records.parsing import SCHEMA, read_message

MAX_BACKFILL_REQUEST_BYTES = 256


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """Query for groups that meet all given conditions.

    `last_number` None sets no upper bound. `since` is Unix time in seconds.
    """

    sender: str | None = None
    first_number: int = 0
    last_number: int | None = None
    since: float = 0.0

    def to_bytes(self) -> bytes:
        """Return the request as sent."""
        return pb.Question(
            schema=SCHEMA,
            sender=b"" if self.sender is None else peer_id_from_text(self.sender),
            first_number=self.first_number,
            last_number=self.last_number or 0,
            since_ms=milliseconds(self.since),
        ).SerializeToString()


def open_backfill_request(data: bytes) -> BackfillRequest:
    """Return the request in `data`. Raises RecordError (`size`, `parse`, `version`, `malformed`)."""
    message = read_message(pb.Question(), data, max_bytes=MAX_BACKFILL_REQUEST_BYTES)
    if (message.first_number or message.last_number) and not message.sender:
        raise RecordError("malformed", "sequence numbers without a sender")
    return BackfillRequest(
        sender=peer_id_text(message.sender) if message.sender else None,
        first_number=message.first_number,
        last_number=message.last_number or None,
        since=seconds(message.since_ms),
    )
