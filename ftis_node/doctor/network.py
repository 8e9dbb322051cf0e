"""Checks of ports, routes, the given peers, the clock, and of how peers can reach this machine."""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ftis_node.doctor.check_result import CheckResult, Level
from ftis_node.errors import UsageError
from ftis_node.gossip.dialer import AddressProbe, NetworkProbe, probe_network
from ftis_node.gossip.multiaddr import Reachability, is_public, parse_listen_address, parse_multiaddr
from ftis_node.gossip.p2pd.process import check_free
from ftis_node.telemetry.clock import NOTABLE_SKEW_S, REFUSED_SKEW_S
from ftis_node.telemetry.terminal_text import GIB

P2PDS_PREAMBLE = re.compile(r"^.*all dials failed \* \[[^]]*\] ")
SYNCHRONISE = (
    f"switch on time synchronization (systemd-timesyncd, chrony): peers refuse each other at {REFUSED_SKEW_S:g} s"
)
SMALL_RELAY_BYTES = GIB >> 6
BY_RELAY = "behind NAT give the address of a bootstrap node, which relays; a forwarded port makes transfers faster"
NAMES = {socket.AF_INET: "ipv4", socket.AF_INET6: "ipv6"}
# reserved for documentation (RFC 5737, RFC 3849): nothing receives what is sent to it
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
CARRIERS_NAT = ipaddress.ip_network("100.64.0.0/10")  # addresses of customers behind it (RFC 6598)
NO_CLOCK = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronized
TIMEX_BYTES = 256
ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)  # of the dialer: the node's own may be in use


def check_listen_ports(listen: Iterable[str], *, runs_here: bool) -> Iterator[CheckResult]:
    """Yield whether the ports to listen on are free. `runs_here`: a node of this home runs and uses them."""
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
            yield CheckResult(f"route.{name}", "ok", f"a route by {name.replace('ip', 'IP')}, from {own[family]}")
        else:
            advice = "nothing to do, unless peers have such addresses only"
            level: Level = "ok" if name == "ipv6" else "warn"
            yield CheckResult(f"route.{name}", level, f"no route by {name.replace('ip', 'IP')}", advice)


def own_address(family: socket.AddressFamily) -> str:
    """Return the address from which this machine would send to the outside; empty if it has no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((OUTSIDE[family], 9))
            return str(probe.getsockname()[0]).split("%")[0]
    except OSError:
        return ""


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


def examine_network(peers: tuple[str, ...], limit_s: float) -> Iterator[CheckResult]:
    """Dial each peer and yield the results. Raises ConfigError for an invalid address, UsageError and MachineError as a
    node would.
    """
    if not peers:
        advice = "give --peers ADDRESS as you would to join; without one the node runs alone until a peer dials it"
        yield CheckResult("peer.none", "ok", "no peers were named, so doctor dialed none", advice)
        return
    addresses = tuple(map(parse_multiaddr, peers))
    with tempfile.TemporaryDirectory(prefix="ftis-") as folder:
        probing = probe_network(addresses, listen=ANY_PORT, sockets_dir=Path(folder) / "net")
        try:
            probe = asyncio.run(asyncio.wait_for(probing, limit_s))
        except TimeoutError:
            text = f"dialing the peers took longer than {limit_s:g} s, stopped"
            yield CheckResult("peer.dial", "fail", text, "name one --peers at a time")
            return
    yield from judge(probe)


def judge(probe: NetworkProbe) -> Iterator[CheckResult]:
    """Yield the results: each address, the clock, the reachability."""
    reached = [one for one in probe.addresses if not one.error]
    for one in probe.addresses:
        yield _peer(one, others_are_reached=bool(reached))
    skews = [one.clock_skew_s for one in reached if one.clock_skew_s is not None]
    if skews:
        yield _clock(sorted(skews)[len(skews) // 2])
    yield nat_kind(own_address(socket.AF_INET), own_address(socket.AF_INET6), probe.reachability)


def nat_kind(own_ipv4: str, own_ipv6: str, reachability: Reachability = Reachability.UNKNOWN) -> CheckResult:
    """Return how peers can reach this machine, by its addresses or by p2pd's list of them (`reachability`)."""
    if reachability is Reachability.PUBLIC or any(is_public(f"/ip/{own}") for own in (own_ipv4, own_ipv6) if own):
        return CheckResult(
            "nat.kind", "ok", "this machine has a public address: peers can dial it, unless a firewall blocks them"
        )
    if own_ipv4 and ipaddress.ip_address(own_ipv4) in CARRIERS_NAT:
        return CheckResult(
            "nat.kind", "warn", f"{own_ipv4} is behind its carrier's NAT: no port can be forwarded", BY_RELAY
        )
    if own_ipv4 or own_ipv6 or reachability is Reachability.LOCAL:
        text = "this machine has private addresses only: it is behind NAT, or in an isolated network"
        return CheckResult("nat.kind", "warn", text, BY_RELAY)
    return CheckResult(
        "nat.kind", "warn", "this machine has no address that peers could dial", "connect it to a network"
    )


def _peer(probe: AddressProbe, *, others_are_reached: bool) -> CheckResult:
    if probe.error:
        level: Level = "warn" if others_are_reached else "fail"
        return CheckResult(
            "peer.dial", level, f"{probe.address}: {P2PDS_PREAMBLE.sub('', probe.error)}", _advice(probe.error)
        )
    reached = f"{probe.address}: reached in {probe.dial_s * 1000:.0f} ms"
    if not probe.is_in_directory:
        advice = "give a bootstrap node, or a member of the run, of this version"
        return CheckResult("peer.dial", "warn", f"{reached}, but it does not answer in the directory", advice)
    limit = probe.relay_limit
    if limit is not None and 0 < limit.num_bytes < SMALL_RELAY_BYTES:
        small = f"{reached}; as a relay it cuts connections after {limit.num_bytes / 1024:.0f} KiB"
        return CheckResult("peer.dial", "warn", small, "nodes behind NAT: give the address of a bootstrap node, too")
    return CheckResult("peer.dial", "ok", reached)


def _advice(error: str) -> str:
    if "connection refused" in error:
        return "nothing listens there: check the port, and that the peer runs"
    if "peer id mismatch" in error:
        return "another peer answers at this address: ask the peer's operator for the current one"
    if "no route to host" in error or "network is unreachable" in error:
        return "this machine has no route to it: check the network"
    if "i/o timeout" in error or "deadline exceeded" in error:
        return "no answer: check the address, and firewalls at both ends"
    return "check the address, and that the peer runs"


def _clock(skew_s: float) -> CheckResult:
    if abs(skew_s) < NOTABLE_SKEW_S:
        return CheckResult("clock.peers", "ok", f"within {NOTABLE_SKEW_S:g} s of the peers' clocks ({skew_s:+.2f} s)")
    which = "behind" if skew_s > 0 else "ahead of"
    level: Level = "fail" if abs(skew_s) > REFUSED_SKEW_S else "warn"
    return CheckResult(
        "clock.peers", level, f"this machine's clock is {abs(skew_s):.1f} s {which} the peers'", SYNCHRONISE
    )
