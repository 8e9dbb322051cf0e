"""Cases of a chain, and mutation of protobuf fields: one field at a time gets a boundary value of its type.

A case is a sequence of items, each with a tag and bytes. The chain defines the meaning of a tag. Raw mutation mostly
breaks the lengths in a message, but this mutation reaches each field of a signed message.
"""

import copy
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

MAX_ITEMS = 24
HEAD_BYTES = 3
INTEGERS = (0, 1, 2, 3, 63, 64, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
TIMES_MS = (10**12, 10**12 + 60_000, 10**12 - 10**7, 253_402_300_800_000)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e38, float("nan"), float("inf"), -float("inf"))
DOUBLES = (1e308, -1e308, 5e-324, 1e9, 1e15, 1e16)
TEXTS = (
    *("", "a", "arithmetic", "arithmetic:add", "arithmetic:add+arithmetic:sub", "rg:chain_sum", "full", "generator"),
    *("\x00", "\x1b[2J", "\u202e", "\ud7ff\ue000", "\U0010ffff" * 8, "a" * 64, "a" * 65, "n\u0303" * 32, "%s%n{}"),
    *("[@click=app.quit]x[/]", "1e999", "-", "+", ":", "a:b:c", "/" * 40, "NaN", "\n\r\t", " ", "a+a", "gsm8k:/etc"),
)
BROKEN_UTF8 = (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"a\x80")
SIZES = (0, 1, 7, 8, 9, 16, 31, 32, 33, 38, 64)
UNSIGNED32 = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32)
SIGNED = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_ENUM)


class Item(NamedTuple):
    """A part of a case. `tag` is a byte with the sender and the type of the data."""

    tag: int
    data: bytes


def split(case: bytes) -> list[Item]:
    """Return the items in any bytes. An incomplete last item ends with the bytes."""
    items: list[Item] = []
    at = 0
    while at + HEAD_BYTES <= len(case) and len(items) < MAX_ITEMS:
        size = int.from_bytes(case[at + 1 : at + HEAD_BYTES], "little")
        items.append(Item(case[at], case[at + HEAD_BYTES : at + HEAD_BYTES + size]))
        at += HEAD_BYTES + size
    return items


def join(items: Iterable[Item]) -> bytes:
    """Return the bytes of items, each of at most 65,535 bytes."""
    return b"".join(bytes([item.tag]) + len(item.data).to_bytes(2, "little") + item.data for item in items)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove or repeat a few bytes."""
    at, length = rng.randrange(len(data) + 1), rng.randrange(1, 17)
    some = data[at : at + length]
    return data[:at] + rng.choice((rng.randbytes(length), b"", some * 2)) + data[at + length :]


def mutated(
    case: bytes,
    rng: random.Random,
    *,
    kinds: Callable[[int], type | None],
    raw: Callable[[bytes, random.Random], bytes] = change_bytes,
) -> bytes:
    """Return `case` with one to three changes. `kinds` returns the message type of a tag; `raw` changes other bytes."""
    items = split(case) or [Item(rng.randrange(256), b"")]
    for _ in range(rng.randint(1, 3)):
        at, how = rng.randrange(len(items)), rng.random()
        tag, data = items[at]
        if how < 0.08 and len(items) > 1:
            del items[at]
        elif how < 0.2 and len(items) < MAX_ITEMS:
            items.insert(rng.randrange(len(items) + 1), items[at])
        elif how < 0.3:
            items[at] = Item(tag ^ 1 << rng.randrange(8), data)
        else:
            kind = kinds(tag) if rng.random() < 0.9 else None
            items[at] = Item(tag, _changed(kind, data, rng) if kind else raw(data, rng))
    return join(item._replace(data=item.data[:65535]) for item in items)


def parsed(kind: Any, data: bytes) -> Any:
    """Return the message in `data`, or an empty one if it does not parse."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return kind()


def _changed(kind: type, data: bytes, rng: random.Random) -> bytes:
    message = parsed(kind, data)
    change_field(message, rng)
    texts = [field.number for field in message.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_STRING]
    broken = b""
    if texts and rng.random() < 0.03 and (number := rng.choice(texts)) < 16:
        value = rng.choice(BROKEN_UTF8)  # only the wire format can contain it
        broken = bytes([number << 3 | 2, len(value)]) + value
    return message.SerializeToString() + broken


def change_field(message: Any, rng: random.Random, *, field: Any = None) -> None:
    """Set a field, or a random one, to a boundary value, or clear it."""
    field = field or rng.choice(message.DESCRIPTOR.fields)
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.is_repeated:
        items = getattr(message, field.name)
        change_field(items.add() if not items or rng.random() < 0.3 else rng.choice(items), rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        change_field(getattr(message, field.name), rng)
    elif field.is_repeated:
        _change_repeated(getattr(message, field.name), field, rng)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def variants(message: Any, rng: random.Random, *, per_field: int) -> Iterator[Any]:
    """Yield copies of `message` with one changed field: `per_field` of each field, inner ones included."""
    for field in message.DESCRIPTOR.fields:
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        for _ in range(per_field * (len(field.message_type.fields) if is_message else 1)):
            changed = copy.deepcopy(message)
            change_field(changed, rng, field=field)
            yield changed


def _change_repeated(values: Any, field: Any, rng: random.Random) -> None:
    how = rng.random()
    if values and how < 0.2:
        del values[rng.randrange(len(values))]
    elif values and how < 0.8:
        at = rng.randrange(len(values))
        values[at] = _value(field, values[at], rng)
    else:
        values.append(values[0] if values and rng.random() < 0.5 else _value(field, None, rng))


def _value(field: Any, before: Any, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _changed_bytes(before or b"", rng)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice(FLOATS + DOUBLES)
    near = [max(0, (before or 0) + change) for change in (-1, 1, 1000)]
    value = rng.choice((rng.choice(INTEGERS), rng.choice(near), rng.choice(TIMES_MS), rng.randrange(64)))
    if field.type in UNSIGNED32:
        return min(value, 2**32 - 1)
    if field.type in SIGNED:
        return rng.choice((-1, -(2**31), 2**31 - 1, 0, 1, 2, 3, 4, 77))
    return min(value, 2**64 - 1)


def _changed_bytes(before: bytes, rng: random.Random) -> bytes:
    """Return bytes of a boundary length, or the former bytes with a float, an integer or one byte replaced."""
    if not before or rng.random() < 0.3:
        return bytes([rng.randrange(256)]) * rng.choice(SIZES)
    at = rng.randrange(len(before)) // 4 * 4
    word = struct.pack("<I", min(rng.choice(INTEGERS), 2**32 - 1))
    some = rng.choice((struct.pack("<f", rng.choice(FLOATS)), word, rng.randbytes(1)))
    return (before[:at] + some + before[at + len(some) :])[: len(before)]
