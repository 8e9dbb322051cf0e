"""All faults, and the selection that this machine and swarm allow."""

from collections.abc import Collection, Mapping, Sequence

from tests.chaos.faults import clock, files, links, members, power, processes
from tests.chaos.faults.base import Fault
from tests.chaos.swarm import Swarm

ALL_FAULTS: tuple[Fault, ...] = (
    *(*processes.FAULTS, *links.FAULTS, *members.FAULTS),
    *(*files.FAULTS, *clock.FAULTS, *power.FAULTS),
)
KINDS = tuple(dict.fromkeys(fault.kind for fault in ALL_FAULTS))


def chosen(words: Collection[str]) -> dict[str, Fault]:
    """Return the faults of these kinds or names, by name; all if empty. Raises ValueError for an unknown word."""
    by_name = {fault.name: fault for fault in ALL_FAULTS}
    if unknown := set(words) - by_name.keys() - set(KINDS):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such fault; choose from {', '.join((*KINDS, *by_name))}")
    return {name: fault for name, fault in by_name.items() if not words or {name, fault.kind} & set(words)}


def fitting(faults: Mapping[str, Fault], swarm: Swarm) -> Mapping[str, Sequence[str]]:
    return {name: [node.name for node in swarm.nodes if fault.fits(node)] for name, fault in faults.items()}


def table() -> str:
    rows = [f"| `{one.name}` | {one.kind} | {one.ends.value} | {one.promise} |" for one in ALL_FAULTS]
    return "\n".join(["| fault | kind | the daemon then | promise of the node |", "|---|---|---|---|", *rows])
