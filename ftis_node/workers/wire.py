"""The messages between daemon and worker, encoded as one or two frames.

The first is a *control* message of this file. If the control needs one, the *body* follows: a `Message` type of the
worker (a boot, a request, a reply, an event). The package that owns the worker defines it. Both are msgpack, decoded
into declared types only, so no received bytes can name code to run.

    daemon                              worker
      <----------------------- Hello           connected, waits for the boot message
      Start + boot ------------------->        the boot message, the first body
      <----------------------- Ready           built; or Failure(0): could not be built
      Call(7) + request -------------->
      <--------- Event(7) + event, ...         as many as the handler emits
      <--------- Reply(7) + reply              or Failure(7)
      Cancel(7) ---------------------->        the caller of 7 was canceled
      <--- Heartbeat, every second, on a connection of its own
      Stop --------------------------->        end, cleanly
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from ftis_node import errors
from ftis_node.config.section import Section
from ftis_node.errors import ConfigError, FtisError, WorkerTaskError


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages. A field `NDArray[...]` crosses as its bytes, in the byte order of this machine.

    A subclass repeats `frozen=True`, which the type checker needs.
    """


class Done(Message, frozen=True):
    """The reply to a request that has no other result."""


class Hello(Message, frozen=True):
    """The worker is connected and waits for its boot message."""


class Start(Message, frozen=True):
    """The body is the boot message."""


class Ready(Message, frozen=True):
    """The worker is built and takes calls."""


class Call(Message, frozen=True):
    """The body is a request."""

    call_id: int


class Cancel(Message, frozen=True):
    """The caller no longer waits for this call."""

    call_id: int


class Stop(Message, frozen=True):
    """The worker must end."""


class Reply(Message, frozen=True):
    """The body is the reply to a call."""

    call_id: int


class Event(Message, frozen=True):
    """The body is an event of a call in progress; with `call_id` 0 it is an event of the worker itself."""

    call_id: int


class Failure(Message, frozen=True):
    """A call failed; with `call_id` 0 the worker could not be built. `kind` is the name of the exception's class."""

    call_id: int
    kind: str
    message: str


class Heartbeat(Message, frozen=True):
    """The worker is alive. `progress` never decreases; requests in flight without progress mean a hang."""

    num_in_flight: int
    progress: int


Control: TypeAlias = Hello | Start | Ready | Call | Cancel | Stop | Reply | Event | Failure | Heartbeat

Body = TypeVar("Body", bound=msgspec.Struct)

WORKER_IDENTITY = b"worker"
HEARTBEAT_IDENTITY = b"heartbeat"
SCHEME = "ipc://"
MAX_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with the final zero; zmq's error does not name the path


def endpoint_in(sockets_dir: Path, *, name: str) -> str:
    """Return a zmq endpoint in `sockets_dir`, which is created. Raises ConfigError for a path that is too long."""
    path = Path(sockets_dir).absolute() / f"{name}.sock"
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} is {num_bytes} bytes long, the system's limit is {MAX_SOCKET_PATH_BYTES}: "
            "choose a home with a shorter path"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"{SCHEME}{path}"


def remove_socket(endpoint: str) -> None:
    """Remove an endpoint's socket file, which zmq does not remove."""
    Path(endpoint.removeprefix(SCHEME)).unlink(missing_ok=True)


def enc_hook(value: Any) -> Any:
    """Return the bytes of a flat array, or the fields of a configuration section, which messages contain as a map."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data
    if isinstance(value, Section):
        return value.model_dump()
    raise NotImplementedError(f"a {type(value).__name__} cannot be serialized")


def dec_hook(expected: type[Any], value: Any) -> Any:
    """Return a read-only array of these bytes, or the section with these fields. Raises ValueError for others."""
    if get_origin(expected) is np.ndarray:
        (value_type,) = get_args(get_args(expected)[1])
        return np.frombuffer(value, value_type)
    if issubclass(expected, Section):
        return expected.model_validate(value)
    raise NotImplementedError(f"a {expected.__name__} cannot be serialized")


_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def pack(control: Control, body: msgspec.Struct | None = None) -> list[bytes]:
    return [_encoder.encode(each) for each in (control, body) if each is not None]


def unpack(frames: Sequence[bytes]) -> tuple[Control, bytes]:
    """Return the control message and the body's bytes (empty if there is none). Raises msgspec.DecodeError."""
    control = _control_decoder.decode(frames[0])
    return control, frames[1] if len(frames) > 1 else b""


@lru_cache(maxsize=256)
def _decoder_of(types: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(types, dec_hook=dec_hook)


def unpack_body(body: bytes, body_type: type[Body]) -> Body:
    """Return the body as a `body_type`. Raises msgspec.DecodeError for other bytes."""
    decoded: Body = _decoder_of(body_type).decode(body)
    return decoded


def union_of(types: Sequence[type[msgspec.Struct]]) -> Any:
    """Return the union of one or more message types, for `unpack_body`."""
    return reduce(or_, types)


def failure_of(error: BaseException, *, call_id: int) -> Failure:
    kind = type(error).__name__
    if getattr(errors, kind, type(error)) is not type(error):  # torch.OutOfMemoryError is no error of ours
        kind = f"{type(error).__module__}.{kind}"
    return Failure(call_id=call_id, kind=kind, message=str(error))


def error_of(failure: Failure, *, worker: str) -> FtisError:
    """Return the caller's exception: the same `FtisError`, else a `WorkerTaskError` that names the class."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, FtisError) and not issubclass(kind, errors.RecordError):
        return kind(failure.message)
    return WorkerTaskError(f"{worker}: {failure.kind}: {failure.message}")
