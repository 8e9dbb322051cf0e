"""Nothing is left of the dead, and the living do not grow.

Memory and descriptors differ from moment to moment (a step in progress, peers that come and go), so they are "back to
where they were" within a tolerance; growth that hides in the tolerance of one fault shows over a run's many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.observing.processes import by_role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.observing.observe import Observation
    from tests.chaos.observing.processes import Process

SINGLE_ROLES = ("daemon", "generation worker", "learner worker", "p2pd")
MIB = 1 << 20


class Tolerance(NamedTuple):
    """What a figure may grow by: a share of itself, and so much more."""

    share: float
    amount: float

    def allows(self, after: float, *, before: float) -> bool:
        """Whether `after` is back to `before`."""
        return after <= before * (1 + self.share) + self.amount


MEMORY = Tolerance(share=0.25, amount=128 * MIB)
DESCRIPTORS = Tolerance(share=0.25, amount=32)
THREADS = Tolerance(share=0.25, amount=16)


def strays(seen: Observation) -> Iterator[str]:
    """No process of a former life, or of a node that does not run, is alive."""
    for words in seen.strays.values():
        yield f"outlived its time: {words}"


def zombies(seen: Observation) -> Iterator[str]:
    """Whoever starts a process takes note of its end."""
    for process in seen.processes:
        if process.is_zombie:
            yield f"nobody took note of the end of pid {process.pid}"


def doubles(seen: Observation) -> Iterator[str]:
    """One daemon, one p2pd, at most one worker of a kind."""
    for role, members in by_role(seen.processes).items():
        if role in SINGLE_ROLES and len(members) > 1:
            yield f"{len(members)} processes are the {role}: {', '.join(str(member.pid) for member in members)}"


def leftovers(seen: Observation) -> Iterator[str]:
    """No temporary file, no socket that nobody listens on; of a stopped node no sockets and no weights in memory."""
    has_crashed = not seen.is_running and not seen.ended_in_order
    for words in seen.leftovers.values() if not has_crashed else ():  # then its next start clears them away
        yield f"is left: {words}"


def grown(before: Observation, after: Observation) -> Iterator[str]:
    """Memory, descriptors and threads of each role are back to where they were; a new life may be smaller."""
    if not (before.is_running and after.is_running):
        return
    old, new = by_role(before.processes), by_role(after.processes)
    for role in (*SINGLE_ROLES, "engine core", "other"):
        if not old.get(role) or not new.get(role):
            continue
        for what, unit, tolerance in (
            ("rss_bytes", MIB, MEMORY),
            ("num_fds", 1, DESCRIPTORS),
            ("num_threads", 1, THREADS),
        ):
            was, now = _total(old[role], what), _total(new[role], what)
            if not tolerance.allows(now, before=was):
                yield f"{what} of the {role} went from {was / unit:.0f} to {now / unit:.0f}"


def _total(processes: list[Process], what: str) -> int:
    return sum(getattr(process, what) for process in processes)
