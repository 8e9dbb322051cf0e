"""Invariants of processes and files: ended processes leave nothing behind, and running ones do not grow.

Memory and descriptors vary with steps and peers, so growth has a tolerance. The comparison over a whole run finds more:
growth within the tolerance of each single fault.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.chaos.observation.processes import Process, by_role
from tests.chaos.observation.watch import Observation

SINGLE_ROLES = ("daemon", "generation worker", "learner worker", "p2pd")
MIB = 1 << 20


class Tolerance(NamedTuple):
    """The allowed growth of a figure: a share of itself plus an amount."""

    share: float
    amount: float

    def allows(self, after: float, *, before: float) -> bool:
        """Return whether the growth from `before` to `after` is allowed."""
        return after <= before * (1 + self.share) + self.amount


MEMORY = Tolerance(share=0.25, amount=128 * MIB)
DESCRIPTORS = Tolerance(share=0.25, amount=32)
THREADS = Tolerance(share=0.25, amount=16)


def orphans(seen: Observation) -> Iterator[str]:
    """No process of a former daemon, or of a node that does not run, is running."""
    for text in seen.orphans.values():
        yield f"orphan process: {text}"


def zombies(seen: Observation) -> Iterator[str]:
    """The parent of each ended process has waited for it."""
    for process in seen.processes:
        if process.is_zombie:
            yield f"pid {process.pid} is a zombie"


def duplicates(seen: Observation) -> Iterator[str]:
    """There is one daemon, one p2pd, and at most one worker of each kind."""
    for role, members in by_role(seen.processes).items():
        if role in SINGLE_ROLES and len(members) > 1:
            yield f"{len(members)} processes are the {role}: {', '.join(str(member.pid) for member in members)}"


def leftover_files(seen: Observation) -> Iterator[str]:
    """There is no temporary file and no dead socket. A stopped node has no sockets and no weights in memory."""
    has_crashed = not seen.is_running and not seen.ended_in_order
    for path in seen.leftovers.values() if not has_crashed else ():  # after a crash the next start removes them
        yield f"leftover file: {path}"


def growth(before: Observation, after: Observation) -> Iterator[str]:
    """Memory, descriptors and threads of each role do not grow beyond a tolerance."""
    if not (before.is_running and after.is_running):
        return
    old, new = by_role(before.processes), by_role(after.processes)
    for role in (*SINGLE_ROLES, "engine core", "other"):
        if not old.get(role) or not new.get(role):
            continue
        for quantity, unit, tolerance in (
            ("rss_bytes", MIB, MEMORY),
            ("num_fds", 1, DESCRIPTORS),
            ("num_threads", 1, THREADS),
        ):
            was, now = _total(old[role], quantity), _total(new[role], quantity)
            if not tolerance.allows(now, before=was):
                yield f"{quantity} of the {role} grew from {was / unit:.0f} to {now / unit:.0f}"


def _total(processes: list[Process], quantity: str) -> int:
    return sum(getattr(process, quantity) for process in processes)
