"""The channel between the node's host and the other hosts of its learner: authenticated, encrypted, without pickles.

    other host                          node's host
      HostHello ---------------------->  every second, until all hosts are there
      <-------------------- Assignment  ranks, the address of rank 0, and how to build the learner
      <--- Heartbeat, every second, in both directions --->
      Failure ------------------------>  a rank ended, or the host cannot take part
      <------------------------ Rejoin  the node's learner has restarted: end the ranks, say hello again
      <-------------------- HostsEnded  the node has ended, or the host was refused
      HostLeft ----------------------->  the answer to HostsEnded: a close right after a message may lose it

All hosts derive the same CURVE key pair (ZeroMQ, CurveZMQ RFC 26) from one secret, and accept that one public key only.
But torch.distributed carries batches and weights without authentication or encryption, so the network between the hosts
must be private.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import psutil
import zmq
import zmq.asyncio
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from ftis_node.errors import NetworkError
from ftis_node.learner.messages import LearnerBoot  # noqa: TC001  msgspec reads the annotations
from ftis_node.workers.liveness import Liveness
from ftis_node.workers.wire import Failure, Heartbeat, Message, dec_hook, enc_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

DOMAIN = b"ftis-node/learner-hosts/1"
KEY_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 20
BEAT_EVERY_S = 1.0

Text = Annotated[str, msgspec.Meta(max_length=256)]


class HostHello(Message, frozen=True):
    """A host that waits for its ranks. `versions` must be those of the node."""

    name: Text
    versions: Text


class Assignment(Message, frozen=True):
    """The ranks of one host, from `first_rank` on, and the address of rank 0. `number` counts the hosts from 1."""

    number: int
    first_rank: int
    address: str
    port: int
    model_fingerprint: str
    boot: LearnerBoot


class Rejoin(Message, frozen=True):
    """The node's process does not know this host: it is another one than before."""


class HostsEnded(Message, frozen=True):
    """No further ranks are needed. `error` is empty after a clean end."""

    error: str = ""


class HostLeft(Message, frozen=True):
    """The host has read `HostsEnded`."""


FromHost: TypeAlias = HostHello | Heartbeat | Failure | HostLeft
ToHost: TypeAlias = Assignment | Heartbeat | Rejoin | HostsEnded

BEAT = Heartbeat(num_in_flight=0, progress=0)

encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
# Both raise msgspec.DecodeError.
decode_from_host: Callable[[bytes], FromHost] = msgspec.msgpack.Decoder(FromHost).decode
decode_to_host: Callable[[bytes], ToHost] = msgspec.msgpack.Decoder(ToHost, dec_hook=dec_hook).decode


def post(channel: zmq.asyncio.Socket, message: FromHost | ToHost, *to: bytes) -> None:
    """Queue a message, on the node's side with the socket identity of the host.

    Without a connection, or if the other side reads nothing, it is lost: heartbeats find out.
    """
    sending = asyncio.ensure_future(channel.send_multipart((*to, encode(message)), flags=zmq.NOBLOCK))
    sending.add_done_callback(_drop_unsent)


def _drop_unsent(sending: asyncio.Future[Any]) -> None:
    if not sending.cancelled() and isinstance(error := sending.exception(), zmq.ZMQError):
        log.debug("a message between the learner's hosts is not sent: %s", error)


def versions() -> str:
    """Return the versions on which all hosts must agree."""
    from importlib.metadata import version

    from ftis_node import __version__

    return f"ftis-node {__version__}, torch {version('torch').partition('+')[0]}"


def liveness_of(timeout_s: float) -> Liveness:
    """Return a failure detector for a host that may be silent for `timeout_s`."""
    return Liveness(max_silent_ticks=max(1, round(timeout_s / BEAT_EVERY_S)))


class HostKey:
    """The CURVE key pair that all hosts derive from their secret (HKDF-SHA256)."""

    def __init__(self, secret: bytes) -> None:
        derived = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=DOMAIN).derive(secret)
        self._private = z85.encode(derived)
        self._public = zmq.curve_public(self._private)

    def secure(self, channel: zmq.asyncio.Socket, *, as_server: bool) -> None:
        """Set the keys of a socket and its limits. Call it before `bind` or `connect`."""
        channel.curve_secretkey, channel.curve_publickey = self._private, self._public
        if as_server:
            channel.curve_server = True
        else:
            channel.curve_serverkey = self._public
        channel.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        channel.setsockopt(zmq.LINGER, int(1000 * BEAT_EVERY_S))
        channel.setsockopt(zmq.IPV6, 1)

    @contextmanager
    def authenticating(self, context: zmq.asyncio.Context) -> Iterator[None]:
        """Inside the block, let servers of this context accept only clients with this key."""
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        try:
            yield
        finally:
            authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's public key (Z85) is this one. pyzmq calls it."""
        return hmac.compare_digest(key, self._public)


def own_address(host: str, port: int) -> str:
    """Return the address of this host from which it reaches `host`. Raises NetworkError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NetworkError(f"{host} cannot be reached: {error}") from None


def interface_environment(address: str) -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL use the interface of this address.

    Raises NetworkError if no interface of this host has it.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    raise NetworkError(f"no interface of this host has the address {address}: set learner.rendezvous to one that has")
