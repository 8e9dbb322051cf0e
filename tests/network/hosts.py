"""A small internet on one machine: network namespaces as hosts, round a router that is a namespace, too.

                       +---------- router (IP forwarding; partitions are its rules) ----------+
             veth      |                veth                        TUN, slow_link.py, TUN    |
          11.0.1.2  host       11.0.2.2  NAT (masquerade)                 11.0.4.2  slow host
                                          | veth
                                   192.168.3.2  host behind it

The addresses of the outer hosts are public ones, because p2pd tells those from private ones; no packet leaves the
namespaces. Everything is named after this process and removed by `close`.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW_LINK = Path(__file__).with_name("slow_link.py")
INTERNET_NUMBERS = itertools.count()
NAT_RULES = """
table ip nat {{
    chain leaving {{ type nat hook postrouting priority 100
        oifname "wan" masquerade {masquerade}
    }}
}}
table ip wall {{
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
    """A command's output. Fails with what it complained of."""
    done = subprocess.run(command, capture_output=True, text=True, input=text, check=False, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


@functools.cache
def what_is_missing() -> str:
    """Why this machine cannot play the internet; empty where it can."""
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            return f"the program {program} is not installed: `apt-get install {package}`"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    namespace = f"ftis-{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", namespace)
        for probe in PROBES:
            run("ip", "netns", "exec", namespace, *probe)
    except AssertionError as error:
        return f"the system refuses what is needed: {error}"
    finally:
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False, timeout=20)
    return ""


class Host:
    """One namespace with one way up."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address

    @property
    def listen(self) -> str:
        """A multiaddr on which a node here listens."""
        return f"/ip4/{self.address}/tcp/0"

    def inside(self, *command: str) -> list[str]:
        """A command line that runs a command on this host, under the process id of the one that is started."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def run(self, *command: str, text: str | None = None) -> str:
        return run(*self.inside(*command), text=text)

    def program(self, original: Path, at: Path) -> Path:
        at.write_text(f'#!/bin/sh\nexec ip netns exec {self.namespace} {original} "$@"\n')
        at.chmod(0o755)
        return at


class Internet:
    """Makes hosts; removes them all."""

    def __init__(self) -> None:
        self._prefix = f"ftis-{os.getpid()}-{next(INTERNET_NUMBERS)}"
        self._namespaces: list[str] = []
        self._links: list[subprocess.Popen[str]] = []
        self._networks = itertools.count(1)
        self._router = self._namespace("router", forwards=True)

    def host(self, name: str, *, delay_s: float = 0.0, loss: float = 0.0) -> Host:
        """A host on the outside. With `delay_s`, each packet takes so long each way, and the part `loss` gets lost."""
        return self._attach(name, f"11.0.{next(self._networks)}", self._router, delay_s=delay_s, loss=loss)

    def nat(self, name: str, *, keeps_ports: bool = True) -> Host:
        """A router that lets connections out and none in. `keeps_ports`: hole punching has a chance."""
        router = self._attach(name, f"11.0.{next(self._networks)}", self._router, forwards=True)
        masquerade = "" if keeps_ports else "fully-random"
        router.run("nft", "-f", "-", text=NAT_RULES.format(masquerade=masquerade))
        return router

    def behind(self, nat: Host, name: str) -> Host:
        return self._attach(name, f"192.168.{next(self._networks)}", nat.namespace)

    def cut(self, some: Sequence[Host], others: Sequence[Host]) -> None:
        """No packet passes between some and others, until `heal`."""
        near, far = (", ".join(host.address for host in hosts) for hosts in (some, others))
        rules = "\n".join(f"ip saddr {{ {a} }} ip daddr {{ {b} }} drop" for a, b in ((near, far), (far, near)))
        chain = f"chain passing {{ type filter hook forward priority 0; policy accept;\n{rules}\n}}"
        self._on_router("nft", "-f", "-", text=f"table ip partition {{\n{chain}\n}}\n")

    def heal(self) -> None:
        """Ends the partition."""
        self._on_router("nft", "delete", "table", "ip", "partition")

    def close(self) -> None:
        """Removes all hosts. Processes on them have been ended by whoever started them."""
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
        """A namespace whose device `wan` leads to a router's; the router has the address .1, the host .2."""
        namespace = self._namespace(name, forwards=forwards)
        device = "to" + network.replace(".", "-")
        if delay_s or loss:
            self._start_link((namespace, "wan"), (router, device), delay_s=delay_s, loss=loss)
        else:
            run(
                *("ip", "-n", router, "link", "add", device, "type", "veth"),
                *("peer", "name", "wan", "netns", namespace),
            )
        for place, end, number in ((router, device, 1), (namespace, "wan", 2)):
            run("ip", "-n", place, "address", "add", f"{network}.{number}/24", "dev", end)
            run("ip", "-n", place, "link", "set", end, "up")
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
