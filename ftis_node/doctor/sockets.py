"""Checks with plain sockets: free ports, routes to the outside, and TCP to peers by IPv4 and IPv6.

p2pd dials a peer by its preferred address and does not report which address families work. A TCP connection shows it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import time
from typing import TYPE_CHECKING

from ftis_node.doctor.table import CheckResult, Level
from ftis_node.errors import UsageError
from ftis_node.gossip.multiaddr import parse_listen_address, parse_multiaddr
from ftis_node.gossip.p2pd.process import check_free
from ftis_node.node.startup.preflight import check_ports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftis_node.gossip.multiaddr import PeerAddress

CONNECT_WITHIN_S = 4.0
NAMES = {socket.AF_INET: "ipv4", socket.AF_INET6: "ipv6"}
OUTSIDE = {
    socket.AF_INET: "192.0.2.1",
    socket.AF_INET6: "2001:db8::1",
}  # reserved for documentation; receives nothing
CARRIERS_NAT = ipaddress.ip_network("100.64.0.0/10")
NO_CLOCK = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronized
TIMEX_BYTES = 256


def check_listen_ports(listen: Iterable[str], status_port: int, *, runs_here: bool) -> Iterator[CheckResult]:
    """Yield whether the node's ports are free. `runs_here`: a node of this home runs and uses them."""
    if runs_here:
        yield CheckResult("port.listen", "ok", "the node that runs on this home listens")
        return
    for text in listen:
        try:
            check_free([parse_listen_address(text)])
        except UsageError as error:
            yield CheckResult("port.listen", "fail", str(error).split("; ")[0], "choose another with --listen")
        else:
            yield CheckResult("port.listen", "ok", f"{text} is free")
    try:
        check_ports((), status_port)
    except UsageError as error:
        yield CheckResult("port.status", "fail", str(error).split(": ")[0], "choose another with --status-port")
    else:
        yield CheckResult("port.status", "ok", f"status port {status_port} is free" if status_port else "any free one")


def check_routes() -> Iterator[CheckResult]:
    """Yield whether there is a route to the outside, by IPv4 and by IPv6."""
    own = {family: own_address(family) for family in NAMES}
    if not any(own.values()):
        text = "no network: this machine has no route to any address outside"
        yield CheckResult(
            "route.ipv4", "warn", text, "connect it to a network; without one it trains only on its own groups"
        )
        return
    for family, name in NAMES.items():
        if own[family]:
            yield CheckResult(f"route.{name}", "ok", f"a route by {_written(name)}, from {own[family]}")
        else:
            advice = "nothing to do, unless peers have such addresses only"
            level: Level = "ok" if name == "ipv6" else "warn"
            yield CheckResult(f"route.{name}", level, f"no route by {_written(name)}", advice)


def own_address(family: socket.AddressFamily) -> str:
    """Return the address from which this machine would send to the outside; empty if it has no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((OUTSIDE[family], 9))
            return str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return ""


def is_carriers_nat(address: str) -> bool:
    """Return whether this address is one that carriers give to customers behind their NAT (RFC 6598)."""
    try:
        return ipaddress.ip_address(address) in CARRIERS_NAT
    except ValueError:
        return False


def check_peers(peers: Iterable[str]) -> Iterator[CheckResult]:
    """Connect by TCP to each peer, by each address family that it has. QUIC is left to p2pd."""
    for text in peers:
        peer = parse_multiaddr(text)
        _, kind, host, transport, port, *_ = peer.text.split("/")
        if transport != "tcp":
            continue
        families = [family for family, name in NAMES.items() if kind in ("dns", f"ip{name[3]}", f"dns{name[3]}")]
        found = [one for family in families for one in _by_family(peer, host, int(port), family)]
        yield from found or [CheckResult("peer.name", "warn", f"{text}: {host} does not resolve", "check the name")]


def _by_family(peer: PeerAddress, host: str, port: int, family: socket.AddressFamily) -> Iterator[CheckResult]:
    try:
        (*_, address) = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    except OSError:
        return
    name = NAMES[family]
    began_at = time.monotonic()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_WITHIN_S)
            probe.connect(address)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        advice = "check address and port, that it runs, and firewalls between"
        yield CheckResult(f"peer.{name}", "warn", f"{peer.transport}: {_written(name)}, {why}", advice)
    else:
        took_ms = (time.monotonic() - began_at) * 1000
        yield CheckResult(f"peer.{name}", "ok", f"{peer.transport}: {_written(name)} connects in {took_ms:.0f} ms")


def check_kernels_clock() -> Iterator[CheckResult]:
    """Yield whether a time service synchronizes the kernel's clock; nothing if the kernel does not report it."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return
    if state == NO_CLOCK:
        text = "the kernel reports no time synchronization; peers refuse a clock that is 3 s off"
        advice = "switch it on (systemd-timesyncd, chrony), or name --peers to compare with their clocks"
        yield CheckResult("clock.synchronised", "warn", text, advice)
    elif state >= 0:
        yield CheckResult("clock.synchronised", "ok", "the kernel's clock is synchronized")


def _written(name: str) -> str:
    return name.replace("ip", "IP")
