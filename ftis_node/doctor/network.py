"""Checks of the given peers, of the clock, and of how peers can reach this machine. Facts in, results out."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ftis_node.doctor.sockets import is_carriers_nat, own_address
from ftis_node.doctor.table import CheckResult, Level
from ftis_node.gossip import parse_multiaddr
from ftis_node.gossip.membership.reachability import Reachability, is_public
from ftis_node.telemetry.terminal_text import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.gossip.membership.probe import AddressProbe, NetworkProbe

P2PDS_PREAMBLE = re.compile(r"^.*all dials failed \* \[[^]]*\] ")
STATUS_WITHIN_S = 3.0
SKEW_NOTE_S = 1.0
SKEW_PROBLEM_S = 3.0
SYNCHRONISE = "switch on time synchronization (systemd-timesyncd, chrony): peers refuse each other at 3 s"
SMALL_RELAY_BYTES = GIB >> 6
BY_RELAY = "behind NAT give the address of a bootstrap node, which relays; a forwarded port makes transfers faster"


def examine_network(peers: tuple[str, ...], *, listen: tuple[str, ...], limit_s: float) -> Iterator[CheckResult]:
    """Dial each peer and yield the results. Raises ConfigError for an invalid address, UsageError and MachineError as a
    node would.
    """
    from ftis_node.gossip.membership.probe import probe_network

    addresses = tuple(map(parse_multiaddr, peers))
    with tempfile.TemporaryDirectory(prefix="ftis-") as folder:
        probing = probe_network(addresses, listen=listen, sockets_dir=Path(folder) / "net")
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
    if is_carriers_nat(own_ipv4):
        return CheckResult(
            "nat.kind", "warn", f"{own_ipv4} is behind its carrier's NAT: no port can be forwarded", BY_RELAY
        )
    if own_ipv4 or own_ipv6 or reachability is Reachability.LOCAL:
        text = "this machine has private addresses only: it is behind NAT, or in an isolated network"
        return CheckResult("nat.kind", "warn", text, BY_RELAY)
    return CheckResult(
        "nat.kind", "warn", "this machine has no address that peers could dial", "connect it to a network"
    )


def check_running(url: str) -> Iterator[CheckResult]:
    """Yield the reachability that the node on this home has learned from its peers."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=STATUS_WITHIN_S)
    try:
        connection.request("GET", "/status")
        swarm = json.loads(connection.getresponse().read())["swarm"]
        text = f"the running node: reachability {swarm['reachability']}; {swarm['state']}: {swarm['reason']}"
    except (OSError, ValueError, KeyError) as error:
        yield CheckResult("nat.running", "warn", f"the node at {url} does not answer ({error})", "see its logs/")
    else:
        yield CheckResult("nat.running", "ok", text)
    finally:
        connection.close()


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
    """Return what to do about an error of p2pd."""
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
    if abs(skew_s) < SKEW_NOTE_S:
        return CheckResult("clock.peers", "ok", f"within {SKEW_NOTE_S:g} s of the peers' clocks ({skew_s:+.2f} s)")
    which = "behind" if skew_s > 0 else "ahead of"
    level: Level = "fail" if abs(skew_s) > SKEW_PROBLEM_S else "warn"
    return CheckResult(
        "clock.peers", level, f"this machine's clock is {abs(skew_s):.1f} s {which} the peers'", SYNCHRONISE
    )
