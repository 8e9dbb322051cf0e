"""A simulated internet on one machine: network namespaces as hosts around a namespace as router.

                       +---------- router (IP forwarding, rules for partitions) --------------+
             veth      |                veth                        TUN, slow_link.py, TUN    |
          11.0.1.2  host       11.0.2.2  NAT (masquerade)                 11.0.4.2  slow host
                                          | veth
                                   192.168.3.2  host behind NAT

The outer hosts have public addresses, because p2pd handles private ones differently. No packet leaves the namespaces.
The names of all namespaces contain the id of this process, and `close` removes them.
"""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SLOW_LINK = Path(__file__).with_name("slow_link.py")
INTERNET_NUMBERS = itertools.count()
NAT_RULES = """
table ip nat {{
    chain leaving {{ type nat hook postrouting priority 100
        oifname "wan" masquerade {masquerade}
    }}
}}
table ip firewall {{
    chain passing {{ type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname != "wan" accept
    }}
}}
"""

PROBES = (
    ("ip", "link", "add", "one", "type", "veth", "peer", "name", "other"),
    ("ip", "tuntap", "add", "dev", "tun0", "mode", "tun"),
    ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"),
    ("nft", "add table ip t; add chain ip t c { type nat hook postrouting priority 100; }; add rule ip t c masquerade"),
)


def run(*command: str, text: str | None = None) -> str:
    """Return the output of a command. Raises AssertionError with its error output if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, input=text, check=False, timeout=20)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr.strip()}"
    return result.stdout


@functools.cache
def missing_requirement() -> str:
    """Return why this machine cannot simulate an internet, or "" if it can."""
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"the program {program} is not installed: `apt-get install {package}`"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun does not exist: start the container with `--device /dev/net/tun`"
    namespace = f"ftis-{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", namespace)
        for probe in PROBES:
            run("ip", "netns", "exec", namespace, *probe)
    except AssertionError as error:
        return f"the system does not permit network namespaces (run as root with CAP_NET_ADMIN): {error}"
    finally:
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False, timeout=20)
    return ""


class Host:
    """A namespace with one link to a router."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self.device = ""  # of the router, after a move

    @property
    def listen(self) -> str:
        """The multiaddr on which a node of this host listens."""
        return f"/ip4/{self.address}/tcp/0"

    def inside(self, *command: str) -> list[str]:
        """Return a command line that runs a command on this host without a new process id."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def run(self, *command: str, text: str | None = None) -> str:
        return run(*self.inside(*command), text=text)

    def program(self, original: Path, at: Path) -> Path:
        at.write_text(f'#!/bin/sh\nexec ip netns exec {self.namespace} {original} "$@"\n')
        at.chmod(0o755)
        return at


class Internet:
    """The router and its hosts."""

    def __init__(self) -> None:
        self._prefix = f"ftis-{os.getpid()}-{next(INTERNET_NUMBERS)}"
        self._namespaces: list[str] = []
        self._links: list[subprocess.Popen[str]] = []
        self._networks = itertools.count(1)
        self._router = self._namespace("router", forwards=True)

    def host(self, name: str, *, delay_s: float = 0.0, loss: float = 0.0) -> Host:
        """Add a public host. Each packet is delayed by `delay_s` in each direction and lost with probability `loss`."""
        return self._attach(name, f"11.0.{next(self._networks)}", self._router, delay_s=delay_s, loss=loss)

    def nat(self, name: str, *, keeps_ports: bool = True) -> Host:
        """Add a router that permits only outgoing connections. With `keeps_ports`, hole punching is possible."""
        router = self._attach(name, f"11.0.{next(self._networks)}", self._router, forwards=True)
        masquerade = "" if keeps_ports else "fully-random"
        router.run("nft", "-f", "-", text=NAT_RULES.format(masquerade=masquerade))
        return router

    def behind(self, nat: Host, name: str) -> Host:
        """Add a private host."""
        return self._attach(name, f"192.168.{next(self._networks)}", nat.namespace)

    def cut(self, some: Sequence[Host], others: Sequence[Host]) -> None:
        """Drop all packets between two sets of hosts until `heal`."""
        near, far = (", ".join(host.address for host in hosts) for hosts in (some, others))
        rules = "\n".join(f"ip saddr {{ {a} }} ip daddr {{ {b} }} drop" for a, b in ((near, far), (far, near)))
        chain = f"chain passing {{ type filter hook forward priority 0; policy accept;\n{rules}\n}}"
        self._on_router("nft", "-f", "-", text=f"table ip partition {{\n{chain}\n}}\n")

    def move(self, host: Host) -> str:
        """Give a public host another address, as a laptop gets one in another network. Return the new address."""
        network = f"11.0.{next(self._networks)}"
        device = "to" + host.address.rsplit(".", 1)[0].replace(".", "-")
        for namespace, end, number in ((self._router, host.device or device, 1), (host.namespace, "wan", 2)):
            run("ip", "-n", namespace, "address", "flush", "dev", end)
            run("ip", "-n", namespace, "address", "add", f"{network}.{number}/24", "dev", end)
        run("ip", "-n", host.namespace, "route", "add", "default", "via", f"{network}.1")
        host.device, host.address = host.device or device, f"{network}.2"
        return host.address

    def heal(self) -> None:
        """End the partition."""
        self._on_router("nft", "delete", "table", "ip", "partition")

    def close(self) -> None:
        """Remove all hosts. The callers have already ended the processes on them."""
        for link in self._links:
            link.kill()
            link.communicate()
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False, timeout=20)

    def _namespace(self, name: str, *, forwards: bool = False) -> str:
        namespace = f"{self._prefix}-{name}"
        run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        if forwards:
            run("ip", "netns", "exec", namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        return namespace

    def _attach(
        self, name: str, network: str, router: str, *, delay_s: float = 0.0, loss: float = 0.0, forwards: bool = False
    ) -> Host:
        """Add a namespace whose device `wan` is linked to a router: the router has address .1, the host .2."""
        namespace = self._namespace(name, forwards=forwards)
        device = "to" + network.replace(".", "-")
        if delay_s or loss:
            self._start_link((namespace, "wan"), (router, device), delay_s=delay_s, loss=loss)
        else:
            run(
                *("ip", "-n", router, "link", "add", device, "type", "veth"),
                *("peer", "name", "wan", "netns", namespace),
            )
        for namespace_name, end, number in ((router, device, 1), (namespace, "wan", 2)):
            run("ip", "-n", namespace_name, "address", "add", f"{network}.{number}/24", "dev", end)
            run("ip", "-n", namespace_name, "link", "set", end, "up")
        run("ip", "-n", namespace, "route", "add", "default", "via", f"{network}.1")
        return Host(namespace, f"{network}.2")

    def _start_link(self, near: tuple[str, str], far: tuple[str, str], *, delay_s: float, loss: float) -> None:
        command = [sys.executable, "-I", "-S", str(SLOW_LINK), *near, *far, str(delay_s), str(loss), str(os.getpid())]
        link = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._links.append(link)
        assert link.stdout is not None
        if link.stdout.readline() != "ready\n":
            raise AssertionError(f"the slow link did not start: {link.communicate()[1]}")

    def _on_router(self, *command: str, text: str | None = None) -> None:
        run("ip", "netns", "exec", self._router, *command, text=text)
