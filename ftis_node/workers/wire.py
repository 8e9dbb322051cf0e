"""What daemon and worker say to each other, and the two-frame form in which it travels.

A message on the channel has one or two frames: a *control* message of this file, then, where the control says so, the
*body*: a `Message` of the worker's own vocabulary (a boot, a request, a reply, an event). Control stays the same for
every worker; bodies are typed by the room that owns the worker. Both are msgpack, decoded into declared types only, so
nothing that arrives can name code to run.

    daemon                              worker
      <----------------------- Hello           connected; tell me what to be
      Start + boot ------------------->        the first body: how to build yourself
      <----------------------- Ready           built; or Failure(0): could not be built
      Call(7) + request -------------->
      <--------- Event(7) + event, ...         as many as the handler emits
      <--------- Reply(7) + reply              or Failure(7)
      Cancel(7) ---------------------->        nobody waits for 7 any more
      <--- Heartbeat, every second, on a connection of its own
      Stop --------------------------->        end, cleanly
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from ftis_node import errors
from ftis_node.errors import FtisError, WorkerTaskError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that travels. Arrays are fields of type `bytes`, little-endian.

    A subclass says `frozen=True` again, for the type checker's sake.
    """


class Hello(Message, frozen=True):
    """The worker is connected and waits for its boot."""

    pid: int


class Start(Message, frozen=True):
    """The boot is in the body."""


class Ready(Message, frozen=True):
    """The worker is built and takes calls."""


class Call(Message, frozen=True):
    """A request is in the body."""

    call_id: int


class Cancel(Message, frozen=True):
    """Nobody waits for this call any more."""

    call_id: int


class Stop(Message, frozen=True):
    """End yourself."""


class Reply(Message, frozen=True):
    """The answer to a call is in the body."""

    call_id: int


class Event(Message, frozen=True):
    """Something that happened during a call is in the body; `call_id` 0: in the worker itself."""

    call_id: int


class Failure(Message, frozen=True):
    """A call failed; `call_id` 0: the worker could not be built. `kind` is the name of the exception's class."""

    call_id: int
    kind: str
    message: str


class Heartbeat(Message, frozen=True):
    """The worker lives. `progress` only grows; in flight without progress means a hang."""

    num_in_flight: int
    progress: int


Control: TypeAlias = Hello | Start | Ready | Call | Cancel | Stop | Reply | Event | Failure | Heartbeat

Body = TypeVar("Body", bound=msgspec.Struct)

WORKER_IDENTITY = b"worker"
HEARTBEAT_IDENTITY = b"heartbeat"

_encoder = msgspec.msgpack.Encoder()
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def pack(control: Control, body: msgspec.Struct | None = None) -> list[bytes]:
    """The frames of a message."""
    frames = [_encoder.encode(control)]
    if body is not None:
        frames.append(_encoder.encode(body))
    return frames


def unpack(frames: Sequence[bytes]) -> tuple[Control, bytes]:
    """Control message and the body's bytes (empty where there is none). Raises msgspec.DecodeError."""
    control = _control_decoder.decode(frames[0])
    return control, frames[1] if len(frames) > 1 else b""


@lru_cache(maxsize=256)
def _decoder_of(types: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(types)


def unpack_body(body: bytes, body_type: type[Body]) -> Body:
    """The body as a `body_type`. Raises msgspec.DecodeError where the bytes are anything else."""
    decoded: Body = _decoder_of(body_type).decode(body)
    return decoded


def union_of(types: Sequence[type[msgspec.Struct]]) -> Any:
    """The union of message types, for `unpack_body`. Raises ValueError for none at all."""
    if not types:
        raise ValueError("a union needs at least one message type")
    union: Any = types[0]
    for each in types[1:]:
        union = union | each
    return union


def failure_of(error: BaseException, *, call_id: int) -> Failure:
    """How an exception travels."""
    return Failure(call_id=call_id, kind=type(error).__name__, message=str(error))


def error_of(failure: Failure, *, worker: str) -> FtisError:
    """The exception that the caller sees.

    An exception of our own tree comes out as the same class with the same message, so that its exit code survives the
    way between processes; everything else is a `WorkerTaskError` that names the worker and the class.
    """
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, FtisError) and not issubclass(kind, errors.RecordError):
        return kind(failure.message)
    return WorkerTaskError(f"{worker}: {failure.kind}: {failure.message}")
