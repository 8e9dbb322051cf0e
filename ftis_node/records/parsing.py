"""Parses bytes from a peer to a message: checks the size before parsing, then the schema and the bounds.

This is the only place where bytes become a message. Every returned message has passed the tables of `bounds.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ftis_node.errors import RecordError, SchemaRecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import BODIES, TABLES, require_bounds

if TYPE_CHECKING:
    from collections.abc import Collection

SCHEMA = 1
CODEC_NAMES = {pb.CODEC_EXACT: "exact", pb.CODEC_TEXT: "text", pb.CODEC_LOSSLESS: "lossless", pb.CODEC_LOSSY: "lossy"}

MessageT = TypeVar("MessageT", bound=Message)


def read_message(message: MessageT, data: bytes, *, max_bytes: int) -> MessageT:
    """Fill `message` from `data` and return it, with every field within its bound.

    Raises RecordError: `size` before parsing, `parse`, `version` (another schema), `malformed`.
    """
    _parse(message, data, max_bytes=max_bytes)
    table = TABLES[type(message)]
    if "schema" in table:
        _require_schema(message)
    require_bounds(message, table)
    return message


def read_body(data: bytes, *, codecs: Collection[str]) -> pb.Body:
    """Return the `Body` in `data`, in one of `codecs` and without fields of another codec.

    Raises RecordError: `parse`, `version`, `codec`, `malformed`.
    """
    body = _parse(pb.Body(), data, max_bytes=len(data))  # the envelope's size was checked
    _require_schema(body)
    name = CODEC_NAMES.get(body.codec)
    if name is None:
        raise RecordError("codec", f"codec {body.codec} is not known here")
    if name not in codecs:
        raise RecordError("codec", f"codec {name!r}, this run takes {', '.join(codecs)}")
    require_bounds(body, BODIES[body.codec])
    return body


def _parse(message: MessageT, data: bytes, *, max_bytes: int) -> MessageT:
    name = type(message).__name__
    if len(data) > max_bytes:
        raise RecordError("size", f"a {name} of {len(data)} bytes; at most {max_bytes} are taken")
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RecordError("parse", f"no {name} message: {error}") from None
    return message


def _require_schema(message: Any) -> None:
    """Raise SchemaRecordError (`version`) for any schema but ours."""
    if message.schema != SCHEMA:
        detail = f"schema {message.schema}, this node speaks {SCHEMA}"
        raise SchemaRecordError("version", detail, schema=message.schema)
