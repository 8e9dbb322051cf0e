"""What a run of chaos says: a line per fault, its violations below it, and the count at the end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.chaos.faults.catalog import ALL_FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.chaos.faults.base import Fault
    from tests.chaos.runner import Outcome

TABLE_HEAD = "| fault | kind | then the daemon | what the node promises | shown by |\n|---|---|---|---|---|"


def lines_of(outcome: Outcome, *, at_s: float) -> list[str]:
    """`0:42   3 kill-learner on b (pid 812): 0.0 s, well after 6.1 s`, and each violation with how busy it was."""
    planned, notes = outcome.planned, f" ({', '.join(outcome.notes)})" if outcome.notes else ""
    well = "not well again" if outcome.recovered_s is None else f"well after {outcome.recovered_s:.1f} s"
    minutes, seconds = divmod(int(at_s), 60)
    head = f"{minutes:3}:{seconds:02} {planned.number:4} {planned.fault} on {planned.node}{notes}"
    violations = [f"          VIOLATION {one} [{outcome.busy}]" for one in outcome.violations]
    return [f"{head}: {outcome.harm_s:.1f} s, {well}", *violations]


def counts(outcomes: Iterable[Outcome]) -> str:
    """How often each kind came, `links 12, processes 40`."""
    by_kind = Counter(outcome.fault.kind for outcome in outcomes)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(by_kind.items()))


def last_line(outcomes: Sequence[Outcome], end_violations: Sequence[object]) -> str:
    """`N faults, V violations`."""
    violations = sum(len(outcome.violations) for outcome in outcomes) + len(end_violations)
    return f"{len(outcomes)} faults, {violations} violations"


def table(faults: Sequence[Fault] = ALL_FAULTS) -> str:
    """The table of tests/chaos/README.md."""
    rows = [
        f"| `{fault.name}` | {fault.kind} | {fault.ends.value} | {fault.promise} | `{fault.shown_by}` |"
        for fault in faults
    ]
    return "\n".join([TABLE_HEAD, *rows])
