"""The output of a run: one line per fault with its violations below, and the counts at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.faults.base import Fault
from tests.chaos.faults.catalog import ALL_FAULTS
from tests.chaos.runner import Outcome

TABLE_HEAD = "| fault | kind | the daemon then | promise of the node | shown by |\n|---|---|---|---|---|"


def lines_of(outcome: Outcome, *, at_s: float) -> list[str]:
    """Return `0:42   3 kill-learner on b (pid 812): 0.0 s, recovered after 6.1 s` and a line for each violation."""
    planned, notes = outcome.planned, f" ({', '.join(outcome.notes)})" if outcome.notes else ""
    recovered = "not recovered" if outcome.recovered_s is None else f"recovered after {outcome.recovered_s:.1f} s"
    minutes, seconds = divmod(int(at_s), 60)
    head = f"{minutes:3}:{seconds:02} {planned.number:4} {planned.fault} on {planned.node}{notes}"
    violations = [f"          VIOLATION {one} [{outcome.load}]" for one in outcome.violations]
    return [f"{head}: {outcome.fault_s:.1f} s, {recovered}", *violations]


def counts(outcomes: Iterable[Outcome]) -> str:
    """Return the number of faults by kind, as `links 12, processes 40`."""
    by_kind = Counter(outcome.fault.kind for outcome in outcomes)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(by_kind.items()))


def last_line(outcomes: Sequence[Outcome], end_violations: Sequence[object]) -> str:
    """Return `N faults, V violations`."""
    violations = sum(len(outcome.violations) for outcome in outcomes) + len(end_violations)
    return f"{len(outcomes)} faults, {violations} violations"


def table(faults: Sequence[Fault] = ALL_FAULTS) -> str:
    """Return the table of faults in tests/chaos/README.md."""
    rows = [
        f"| `{fault.name}` | {fault.kind} | {fault.ends.value} | {fault.promise} | `{fault.shown_by}` |"
        for fault in faults
    ]
    return "\n".join([TABLE_HEAD, *rows])
