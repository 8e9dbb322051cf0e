"""Bytes from a peer into a message: bounded before they are parsed, and of a schema that is spoken here."""

from __future__ import annotations

from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from ftis_node.errors import RecordError, SchemaRecordError

SCHEMA = 1


class Versioned(Protocol):
    """A message that names its schema."""

    @property
    def schema(self) -> int: ...


MessageT = TypeVar("MessageT", bound=Message)


def read_message(message: MessageT, data: bytes, *, max_bytes: int) -> MessageT:
    """`message`, filled from `data`. Raises RecordError: `size` before anything is parsed, `parse`."""
    name = type(message).__name__
    if len(data) > max_bytes:
        raise RecordError("size", f"a {name} of {len(data)} bytes; at most {max_bytes} are taken")
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RecordError("parse", f"no {name} message: {error}") from None
    return message


def require_schema(message: Versioned) -> None:
    """Raises SchemaRecordError (`version`) for another schema than ours."""
    if message.schema != SCHEMA:
        detail = f"schema {message.schema}, this node speaks {SCHEMA}"
        raise SchemaRecordError("version", detail, schema=message.schema)
