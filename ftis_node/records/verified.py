"""An envelope from anywhere to its group: bounded, with its signature verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.records.envelope import open_envelope
from ftis_node.records.text_codec import unpack_any

if TYPE_CHECKING:
    from ftis_node.records.group import Group
    from ftis_node.records.text_group import TextGroup


def decode_envelope(data: bytes) -> Group | TextGroup:
    """Return the group in an envelope of at most 4 MiB, such as a file of `replay export --format envelope`.

    Raises RecordError. Its `reason` is `signature` if the sender that the group names has not signed the bytes.
    Otherwise it names the part that is out of bounds. The contents are not validated further.
    """
    envelope = open_envelope(data)
    group = unpack_any(envelope.body)
    if not envelope.is_signed_by(group.sender):
        raise RecordError("signature", "the sender that the group names has not signed it")
    return group
