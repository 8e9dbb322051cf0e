"""What `doctor` finds out with plain sockets: ports of ours, ways out, and peers' machines by IPv4 and IPv6.

p2pd dials a peer by the address that it likes best and does not tell which families work; a TCP connection does.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import time
from typing import TYPE_CHECKING

from ftis_node.doctor.check_result import CheckResult, Level
from ftis_node.errors import UsageError
from ftis_node.gossip.multiaddr import parse_listen_address, parse_multiaddr
from ftis_node.gossip.p2pd.ports import check_free
from ftis_node.node.startup.preflight import check_ports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftis_node.gossip.multiaddr import PeerAddress

CONNECT_WITHIN_S = 4.0
NAMES = {socket.AF_INET: "ipv4", socket.AF_INET6: "ipv6"}
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # for documentation; nothing is sent there
CARRIERS_NAT = ipaddress.ip_network("100.64.0.0/10")
NO_CLOCK = 5  # TIME_ERROR of adjtimex(2): nobody tells the kernel the time
TIMEX_BYTES = 256


def check_listen_ports(listen: Iterable[str], status_port: int, *, runs_here: bool) -> Iterator[CheckResult]:
    """Whether a node could listen. `runs_here`: a node of this home is running, and has them itself."""
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
    """Whether there is a way out, by IPv4 and by IPv6."""
    own = {family: own_address(family) for family in NAMES}
    if not any(own.values()):
        text = "no network: this machine has no way to any address outside"
        yield CheckResult("route.ipv4", "warn", text, "connect it to a network; alone it can only train on its own")
        return
    for family, name in NAMES.items():
        if own[family]:
            yield CheckResult(f"route.{name}", "ok", f"a way out by {_written(name)}, from {own[family]}")
        else:
            advice = "nothing need be done unless peers have such addresses only"
            level: Level = "ok" if name == "ipv6" else "warn"
            yield CheckResult(f"route.{name}", level, f"no way out by {_written(name)}", advice)


def own_address(family: socket.AddressFamily) -> str:
    """The address from which this machine would send outside; empty where it has no way there. Sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((OUTSIDE[family], 9))
            return str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return ""


def is_carriers_nat(address: str) -> bool:
    """Whether this address is one of those that carriers give to customers behind a NAT of theirs (RFC 6598)."""
    try:
        return ipaddress.ip_address(address) in CARRIERS_NAT
    except ValueError:
        return False


def check_peers(peers: Iterable[str]) -> Iterator[CheckResult]:
    """A TCP connection to each peer by each family that its address has; QUIC is left to p2pd."""
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
    """Whether anybody tells the kernel the time. Says nothing where it cannot be asked."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return
    if state == NO_CLOCK:
        text = "no time synchronization that the kernel knows of; peers refuse a clock that is 3 s off"
        advice = "switch it on (systemd-timesyncd, chrony), or name --peers to compare with their clocks"
        yield CheckResult("clock.synchronised", "warn", text, advice)
    elif state >= 0:
        yield CheckResult("clock.synchronised", "ok", "the kernel's clock is synchronised")


def _written(name: str) -> str:
    return name.replace("ip", "IP")
