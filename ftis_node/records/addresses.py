"""Parser of multiaddrs for the command line, for peers' claims and for dialing.

Every address that `parse_address` accepts survives the conversion to bytes and back. So no address passes one check
and fails at the next. The forms are those with which nodes dial each other:

    address = host / transport [/ p2p / RELAY / p2p-circuit] [/ p2p / PEER]
    host: ip4, ip6 (without a zone), dns, dns4, dns6; transport: tcp [ws | wss], udp quic-v1

Host names may contain `_`, because Docker's do. Format: https://github.com/multiformats/multiaddr
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ftis_node.records.identity import is_peer_id, peer_id_from_text, peer_id_text

MAX_ADDRESS_CHARS = 1024
MAX_NAME_CHARS = 253
SHOWN_CHARS = 80  # shown of an address in an error message
LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
PORT = re.compile(r"0|[1-9][0-9]{0,4}")
MAX_PORT = 65535
IPS = {"ip4": 4, "ip6": 6}
NAMES = ("dns", "dns4", "dns6")
HOSTS = (*IPS, *NAMES)
TRANSPORTS = ("tcp", "udp")
CODES = {
    "ip4": 4,
    "tcp": 6,
    "ip6": 41,
    "dns": 53,
    "dns4": 54,
    "dns6": 55,
    "udp": 273,
    "p2p-circuit": 290,
    "p2p": 421,
    "quic-v1": 461,
    "ws": 477,
    "wss": 478,
}
PROTOCOLS = {code: name for name, code in CODES.items()}
FIXED_BYTES = {"ip4": 4, "ip6": 16, "tcp": 2, "udp": 2, "p2p-circuit": 0, "quic-v1": 0, "ws": 0, "wss": 0}
MARKERS = tuple(name for name, size in FIXED_BYTES.items() if not size)
WAYS = {("tcp",), ("tcp", "ws"), ("tcp", "wss"), ("udp", "quic-v1")}
MAX_VARINT_BYTES = 3
BLOCK_BITS = {4: 24, 6: 48}


class AddressError(ValueError):
    """Invalid address; the message states the defect in a few words."""


@dataclass(frozen=True, slots=True)
class Address:
    """A checked multiaddr: pairs of protocol and value, "" for a protocol without one. Made by `parse_address`."""

    parts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """Return the multiaddr as text, with IP addresses in their short form."""
        return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def host(self) -> str:
        return self.parts[0][1]

    @property
    def port(self) -> int:
        return int(self.parts[1][1])

    def with_port(self, port: int) -> Address:
        (transport, _), rest = self.parts[1], self.parts[2:]
        return Address((self.parts[0], (transport, str(port)), *rest))

    @property
    def peer_id(self) -> str | None:
        """Return the peer id at the end; None if the address names no peer."""
        name, value = self.parts[-1]
        return value if name == "p2p" else None

    @property
    def without_peer(self) -> Address:
        return self if self.peer_id is None else Address(self.parts[:-1])

    def to_bytes(self) -> bytes:
        """Return the binary form that p2pd reads."""
        return b"".join(_part_bytes(name, value) for name, value in self.parts)


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """Return the address in `text`. Raises AddressError if it is invalid or longer than 1024 characters."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise AddressError(f"it has {len(text)} characters; at most {MAX_ADDRESS_CHARS} are taken")
    words = text.split("/")
    if len(words) < 3 or words[0] or not all(words[1:]):
        raise AddressError("it is not a multiaddr")
    parts: list[tuple[str, str]] = []
    rest = iter(words[1:])
    for name in rest:
        if name not in CODES:
            raise AddressError(f"unknown protocol {shown(name)}")
        value = "" if name in MARKERS else next(rest, "")
        parts.append((name, _checked(name, value)))
    return _in_order(Address(tuple(parts)))


def read_address(raw: bytes) -> Address:
    """Return the address with this binary form. Raises AddressError if the bytes are invalid."""
    parts: list[tuple[str, str]] = []
    at = 0
    if not 0 < len(raw) <= MAX_ADDRESS_CHARS:
        raise AddressError(f"it has {len(raw)} bytes")
    while at < len(raw):
        code, at = _varint(raw, at)
        name = PROTOCOLS.get(code, "")
        if not name:
            raise AddressError(f"unknown protocol {code}")
        size = FIXED_BYTES.get(name)
        if size is None:
            size, at = _varint(raw, at)
        value = raw[at : at + size]
        if len(value) != size:
            raise AddressError("it ends too early")
        parts.append((name, _checked(name, _value_text(name, value))))
        at += size
    return _in_order(Address(tuple(parts)))


class AddressBlock(NamedTuple):
    """The typical allocation of one household or small provider, or a DNS name."""

    name: str
    is_public: bool


def block_of(address: str) -> AddressBlock | None:
    """Return the block of a multiaddr; None if it starts with neither an IP address nor a DNS name."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return AddressBlock(host, is_public=True)
    try:
        ip = ipaddress.ip_address(host)
        network = ipaddress.ip_network(f"{ip}/{BLOCK_BITS[ip.version]}", strict=False)
    except ValueError:  # not an IP address, or one with a zone
        return None
    return AddressBlock(str(network), ip.is_global)


def shown(text: str) -> str:
    """Return untrusted text for an error message: shortened, quoted, control characters escaped."""
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")


def _in_order(address: Address) -> Address:
    names = list(address.without_peer.names)
    if names[-1:] == ["p2p-circuit"]:
        if names[-2:-1] != ["p2p"]:
            raise AddressError("p2p-circuit follows the relay's /p2p/ID")
        names = names[:-2]
    if not names or names[0] not in HOSTS or tuple(names[1:]) not in WAYS:
        raise AddressError("it has no host and transport")
    return address


def _checked(name: str, value: str) -> str:
    if name in IPS:
        good = _ip(value, version=IPS[name])
    elif name in NAMES:
        good = value if len(value) <= MAX_NAME_CHARS and all(map(LABEL.fullmatch, value.split("."))) else ""
    elif name in TRANSPORTS:
        good = value if PORT.fullmatch(value) and int(value) <= MAX_PORT else ""
    elif name == "p2p":
        good = _peer(value)
    else:
        return value
    if not good:
        raise AddressError(f"bad value {shown(value)} for {name!r}")
    return good


def _ip(value: str, *, version: int) -> str:
    """Return the IP in its short form; "" if it is invalid, has a zone, or is an IPv4-mapped IPv6 address."""
    try:
        ip = ipaddress.ip_address(value)
    except ValueError:
        return ""
    is_plain = "%" not in value and getattr(ip, "ipv4_mapped", None) is None
    return str(ip) if ip.version == version and is_plain else ""


def _peer(value: str) -> str:
    try:
        peer_id_from_text(value)
    except ValueError:
        return ""
    return value


def _part_bytes(name: str, value: str) -> bytes:
    code = _varint_bytes(CODES[name])
    if name in IPS:
        return code + ipaddress.ip_address(value).packed
    if name in TRANSPORTS:
        return code + int(value).to_bytes(2, "big")
    if name == "p2p":  # the raw 38 bytes; p2pd refuses the content id (CID) that hivemind writes
        raw = peer_id_from_text(value)
        return code + _varint_bytes(len(raw)) + raw
    return code + (_varint_bytes(len(value)) + value.encode("ascii") if value else b"")


def _value_text(name: str, value: bytes) -> str:
    if name in IPS:
        return str(ipaddress.ip_address(value))
    if name in TRANSPORTS:
        return str(int.from_bytes(value, "big"))
    if name == "p2p":
        return peer_id_text(value) if is_peer_id(value) else ""
    return value.decode("ascii", errors="replace")


def _varint_bytes(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a varint of at most three bytes, and the offset behind it. Raises AddressError."""
    number = 0
    for index, byte in enumerate(raw[at : at + MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    raise AddressError("a varint in it has no end")
