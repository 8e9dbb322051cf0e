"""Peer addresses as users type them: checked at once and without a network library.

A dialable address names a way to a machine and the peer expected there, and ends in `/p2p/ID`:

    /ip4/203.0.113.7/tcp/4001/p2p/12D3KooWFLAyEDfpb3cDnXBP7JfUnuKAgz7tPeRwEUSmSunbS8dP
    /dns4/meet.example.org/tcp/4001/p2p/12D3KooW...
    /ip4/203.0.113.7/tcp/4001/p2p/RELAY/p2p-circuit/p2p/ID          (through a relay)

The command line imports this file, so it imports nothing heavy. Format: https://github.com/multiformats/multiaddr
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

import base58

from ftis_node.errors import ConfigError

ED25519_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
ED25519_PREFIX = bytes.fromhex("002408011220")
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
HOST_AND_PORT = re.compile(r"([0-9.]*):?([0-9]+)")  # as other programs are told where to listen
HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
TRANSPORTS = ("tcp", "udp")
MARKERS = ("quic-v1", "ws", "wss", "p2p-circuit")  # protocols without a value
EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and one way to it; `text` is the whole multiaddr with its `/p2p/ID` end."""

    peer_id: str
    text: str

    @property
    def transport(self) -> str:
        """The way without the peer: `text` less its last `/p2p/ID`."""
        return self.text.rsplit("/p2p/", 1)[0]


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a node listens: an IP address, `tcp` or `udp`, and a port (0: any free one)."""

    text: str
    host: str
    transport: str
    port: int

    def with_port(self, port: int) -> ListenAddress:
        """The same address with another port."""
        text = self.text.replace(f"/{self.transport}/{self.port}", f"/{self.transport}/{port}", 1)
        return ListenAddress(text=text, host=self.host, transport=self.transport, port=port)


def parse_multiaddr(text: str) -> PeerAddress:
    """The peer address in `text`. Raises ConfigError, in one line that says what is wrong, for anything else."""
    parts = _split(text)
    if parts[-1][0] != "p2p":
        raise ConfigError(f"the peer address {text!r} does not say which peer: it must end in /p2p/ID, as in {EXAMPLE}")
    if parts[0][0] not in HOSTS or len(parts) < 2 or parts[1][0] not in TRANSPORTS:
        raise ConfigError(f"the peer address {text!r} gives no way to the peer: write it like {EXAMPLE}")
    return PeerAddress(peer_id=parts[-1][1], text=text)


def parse_listen_address(text: str) -> ListenAddress:
    """The listen address in `text`, such as `/ip4/0.0.0.0/tcp/4001`. Raises ConfigError for anything else."""
    if plain := HOST_AND_PORT.fullmatch(text):
        host = plain[1] or "0.0.0.0"  # nosec B104: an example in a message
        raise ConfigError(f"cannot listen on {text!r}: write it as /ip4/{host}/tcp/{plain[2]}")
    parts = _split(text)
    names = [name for name, _ in parts]
    if names[:2] not in (["ip4", "tcp"], ["ip6", "tcp"]) and names not in (
        ["ip4", "udp", "quic-v1"],
        ["ip6", "udp", "quic-v1"],
    ):
        raise ConfigError(f"cannot listen on {text!r}: write it like /ip4/0.0.0.0/tcp/4001 (port 0: any free port)")
    return ListenAddress(text=text, host=parts[0][1], transport=names[1], port=int(parts[1][1]))


def check_announced_address(text: str) -> None:
    """Raises ConfigError unless `text` is a way to this machine without a peer, such as `/dns4/NAME/tcp/4001`."""
    names = [name for name, _ in _split(text)]
    if names[0] not in HOSTS or len(names) < 2 or names[1] not in TRANSPORTS or "p2p" in names:
        raise ConfigError(f"cannot announce {text!r}: write it like /dns4/meet.example.org/tcp/4001, without /p2p/ID")


def _split(text: str) -> list[tuple[str, str]]:
    """Pairs of protocol and value, each checked. Raises ConfigError."""
    words = text.split("/")
    if len(words) < 3 or words[0] != "" or any(word == "" for word in words[1:]):
        raise ConfigError(f"{text!r} is no multiaddr: write it like {EXAMPLE}")
    parts: list[tuple[str, str]] = []
    rest = iter(words[1:])
    for name in rest:
        value = "" if name in MARKERS else next(rest, "")
        _check(text, name, value)
        parts.append((name, value))
    return parts


def _check(text: str, name: str, value: str) -> None:
    """One protocol and its value. Raises ConfigError."""
    if name in ("ip4", "ip6"):
        good = _is_ip(value, version=int(name[2]))
    elif name in ("dns", "dns4", "dns6"):
        good = HOST_NAME.fullmatch(value) is not None
    elif name in TRANSPORTS:
        good = value.isascii() and value.isdecimal() and int(value) <= 65535
    elif name == "p2p":
        good = ED25519_PEER_ID.fullmatch(value) is not None and base58.b58decode(value).startswith(ED25519_PREFIX)
    elif name in MARKERS:
        good = True
    else:
        raise ConfigError(f"the address {text!r} names an unknown protocol {name!r}: write it like {EXAMPLE}")
    if not good:
        raise ConfigError(f"the address {text!r} has a bad value {value!r} for {name!r}: write it like {EXAMPLE}")


def _is_ip(value: str, *, version: int) -> bool:
    try:
        return ipaddress.ip_address(value).version == version
    except ValueError:
        return False
