"""All faults, and those of them that can be done here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.faults import clock, files, hostile, links, processes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tests.chaos.faults.base import Fault
    from tests.chaos.swarm import Swarm

ALL_FAULTS: tuple[Fault, ...] = (
    *(*processes.FAULTS, *links.FAULTS, *hostile.FAULTS),
    *(*files.FAULTS, *clock.FAULTS),
)
KINDS = tuple(dict.fromkeys(fault.kind for fault in ALL_FAULTS))


def chosen(words: Collection[str]) -> dict[str, Fault]:
    """The faults of these kinds or names, by name; without any word: all. Raises ValueError for a word that is none."""
    by_name = {fault.name: fault for fault in ALL_FAULTS}
    if unknown := set(words) - by_name.keys() - set(KINDS):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join((*KINDS, *by_name))}")
    return {name: fault for name, fault in by_name.items() if not words or {name, fault.kind} & set(words)}


def missing(faults: Mapping[str, Fault]) -> dict[str, str]:
    """Why faults cannot be done on this machine, by their names; those that can be are not in it."""
    return {name: why for name, fault in faults.items() if (why := fault.missing())}


def fitting(faults: Mapping[str, Fault], swarm: Swarm) -> Mapping[str, Sequence[str]]:
    """The names of the nodes that each fault can be done to; without the faults that cannot be done here."""
    left_out = missing(faults)
    return {
        name: [node.name for node in swarm.nodes if fault.fits(node)]
        for name, fault in faults.items()
        if name not in left_out
    }
