"""Phases with and without attackers, figures for the JSON line, and a sentence for each violation.

Quiet phases and attacks alternate, so the honest senders' rate under attack is compared within the run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.attacks.endurance import watch  # noqa: F401  adds `bench/` to the path

from soaking.slopes import Bounds, trend  # isort: skip
from soaking.verdicts import series_of, warm_up_minutes  # isort: skip

from collections.abc import Sequence

from soaking.verdicts import Series
from tests.attacks.endurance.attacker_process import AttackerProcess
from tests.attacks.endurance.watch import Seen
from tests.attacks.member import Member
from tests.attacks.victim import Victim

LEAST_RATIO = 0.9
# Growth per hour. Attacks start and stop, so figures vary more than in a soak test.
BOUNDS = {
    "rss_mib": Bounds(share=0.05, amount=8.0, coarse_share=0.5),
    "descriptors": Bounds(share=0.1, amount=8.0, coarse_share=1.0),
    "threads": Bounds(share=0.1, amount=4.0, coarse_share=1.0),
    "disk_mib": Bounds(share=0.05, amount=4.0, coarse_share=1.0),
}
LEAST_MINUTES = 20.0  # shorter runs never end their warm-up: slopes are reported, not judged
MAX_FAULT_EVENTS = 20
PAIR_MINUTES = 9.0  # three quiet, six with attackers
QUIET_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run. `sent` counts the groups that the honest senders announced, `admitted` those in the buffer."""

    attacked: bool
    minutes: float
    admitted: int
    sent: int
    steps: int

    @property
    def rate(self) -> float:
        """Admitted honest groups per minute."""
        return self.admitted / self.minutes


def plan(minutes: float) -> list[tuple[bool, float]]:
    """Return `(attacked, minutes)` in order. The last phase is quiet, so each attack is between two quiet phases."""
    pairs = max(2, round(minutes / PAIR_MINUTES))
    unit = minutes / (pairs + QUIET_SHARE)
    pair = [(False, unit * QUIET_SHARE), (True, unit * (1 - QUIET_SHARE))]
    return [*pair * pairs, (False, unit * QUIET_SHARE)]


def ratio(phases: Sequence[Phase]) -> tuple[float, float] | None:
    """Return the honest rate under attack relative to the mean of the adjacent quiet phases, and its standard error.

    The ratio is a mean over attacks. It is None without an attack between two quiet phases. With one attack the error
    is NaN.
    """
    shares = [
        phase.rate / ((before.rate + after.rate) / 2)
        for before, phase, after in zip(phases, phases[1:], phases[2:], strict=False)
        if phase.attacked and before.rate + after.rate > 0
    ]
    if not shares:
        return None
    error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return float(np.mean(shares)), error


def trends(seen: Seen) -> list[dict[str, Any]]:
    """Return the hourly slope of each bounded quantity after the warm-up, with its 95 % interval, by process."""
    points = [point for point in seen.points if point.quantity in BOUNDS]
    if not points:
        return []
    after = warm_up_minutes(max(point.minute for point in points))
    return [found for one in series_of(points) if (found := _trend_of(one, after)) is not None]


def _trend_of(one: Series, after: float) -> dict[str, Any] | None:
    late = [(minute, value) for minute, value in zip(one.minutes, one.values, strict=True) if minute >= after]
    known = trend([minute for minute, _ in late], [value for _, value in late])
    if known is None:
        return None
    figures = {name: round(float(getattr(known, name)), 3) for name in ("level", "slope", "low", "high")}
    return {"quantity": one.quantity, "part": one.part, **figures, "verdict": known.verdict(BOUNDS[one.quantity])}


def summary(
    victim: Victim,
    honest: Sequence[Member],
    attackers: AttackerProcess,
    seen: Seen,
    phases: Sequence[Phase],
    status: dict[str, Any],
) -> dict[str, Any]:
    """Return the figures of the run."""
    share, refused = ratio(phases), status.get("swarm", {}).get("groups_refused", {})  # empty if the node has ended
    return {
        "minutes": round(sum(phase.minutes for phase in phases), 1),
        "exit_code": victim.node.process.poll(),
        "starts": len(victim.node.events("start")),  # 0 if the event log was rotated
        "steps": status.get("learner", {}).get("step"),
        "honest_ratio": None if share is None else round(share[0], 3),
        "honest_ratio_error": None if share is None or math.isnan(share[1]) else round(share[1], 3),
        "honest_banned": sorted(seen.banned & {one.peer_id for one in honest}),
        "members_attacking": len(attackers.kind_of),
        "members_banned": len(seen.banned & attackers.kind_of.keys()),
        "accepted_malicious_groups": _accepted_malicious_groups(attackers, seen),
        "fault_events": victim.node.events("peer_fault")[:MAX_FAULT_EVENTS],
        "tracebacks": victim.log_text().count("Traceback (most recent call last)"),
        "unanswered_requests": seen.unanswered,
        "refused": refused,
        "actions": dict(attackers.done),
        "idle_kinds": sorted(set(attackers.kinds) - attackers.done.keys()),
        "attacker_errors": dict(attackers.errors),
        "attacker_last_errors": attackers.last_errors,
        "trends": trends(seen),
    }


def violations(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each violation."""
    found = []
    if result["exit_code"] is not None:
        found.append(f"the node ended with exit code {result['exit_code']}")
    if result["starts"] > 1:
        found.append(f"the node was started {result['starts']} times")
    if result["honest_ratio"] is None or result["honest_ratio"] < LEAST_RATIO:
        found.append(
            f"honest groups were admitted at {result['honest_ratio']} of the undisturbed rate"
            f" (standard error {result['honest_ratio_error']}), below {LEAST_RATIO}"
        )
    found += [f"the honest peer {peer} was banned" for peer in result["honest_banned"]]
    found += [f"groups of a malicious peer were accepted: {groups}" for groups in result["accepted_malicious_groups"]]
    if result["tracebacks"]:
        found.append(f"{result['tracebacks']} tracebacks in the node's logs")
    if result["minutes"] >= LEAST_MINUTES:
        growing = [one for one in result["trends"] if one["verdict"] == "grows"]
        found += [f"{one['quantity']} of {one['part']} grows: {json.dumps(one)}" for one in growing]
    if result["idle_kinds"] and result["minutes"] >= LEAST_MINUTES:
        found.append(f"attackers that did nothing: {', '.join(result['idle_kinds'])}")
    return found


def _accepted_malicious_groups(attackers: AttackerProcess, seen: Seen) -> list[str]:
    rows = {peer_id: seen.rows[peer_id] for peer_id in attackers.malicious & seen.rows.keys()}
    return [
        f"{attackers.kind_of[peer_id]}: {row['groups_accepted']} of {peer_id}"
        for peer_id, row in sorted(rows.items())
        if row["groups_accepted"]
    ]
