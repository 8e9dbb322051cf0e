"""The result of the run: figures for the JSON line, and a sentence for each violation."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tests.attacks.endurance import watch  # noqa: F401  adds `bench/` to the path
from tests.attacks.endurance.phases import ratio

from soaking.slopes import Bounds, trend  # isort: skip
from soaking.verdicts import series_of, warm_up_minutes  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from soaking.verdicts import Series
    from tests.attacks.endurance.attacker_process import AttackerProcess
    from tests.attacks.endurance.phases import Phase
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
    share = ratio(phases)
    learner, swarm = status.get("learner", {}), status.get("swarm", {})  # empty if the node has ended
    refused = swarm.get("groups_refused", {})
    shares = attackers.shares()
    attacked = [phase for phase in phases if phase.attacked]
    quiet = [phase for phase in phases if not phase.attacked]
    return {
        "minutes": round(sum(phase.minutes for phase in phases), 1),
        "minutes_attacked": round(sum(phase.minutes for phase in attacked), 1),
        "exit_code": victim.node.process.poll(),
        "starts": len(victim.node.events("start")),  # 0 if the event log was rotated
        "learner_restarts": learner.get("restarts"),
        "steps": learner.get("step"),
        "honest_rate_quiet": _mean_rate(quiet),
        "honest_rate_attacked": _mean_rate(attacked),
        "honest_ratio": None if share is None else round(share[0], 3),
        "honest_ratio_error": None if share is None or math.isnan(share[1]) else round(share[1], 3),
        "honest_rows": [_row(seen, one.peer_id) for one in honest],
        "members_attacking": len(attackers.attack_of),
        "members_banned": len(seen.banned & attackers.attack_of.keys()),
        "accepted_malicious_groups": _accepted_malicious_groups(attackers, seen),
        "honest_banned": sorted(seen.banned & {one.peer_id for one in honest}),
        "faults": refused.get("fault", 0),
        "fault_events": victim.node.events("peer_fault")[:MAX_FAULT_EVENTS],
        "tracebacks": victim.log_text().count("Traceback (most recent call last)"),
        "unanswered_requests": seen.unanswered,
        "refused": refused,
        "serve_errors": swarm.get("serve_errors"),
        "fetch_errors": swarm.get("fetch_errors"),
        "share_of_a_day": {name: round(value, 2) for name, value in sorted(shares.items())},
        "share_of_a_day_mean": round(sum(min(1.0, value) for value in shares.values()) / max(1, len(shares)), 3),
        "actions": attackers.done.total(),
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
    idle = [name for name, share in result["share_of_a_day"].items() if share == 0]
    if idle and result["minutes"] >= LEAST_MINUTES:
        found.append(f"attackers that did nothing: {', '.join(idle)}")
    return found


def _mean_rate(phases: Sequence[Phase]) -> float | None:
    minutes = sum(phase.minutes for phase in phases)
    return round(sum(phase.admitted for phase in phases) / minutes, 2) if minutes else None


def _row(seen: Seen, peer_id: str) -> dict[str, Any]:
    row = seen.rows.get(peer_id, {})
    return {name: row.get(name) for name in ("peer_id", "standing", "groups_accepted", "groups_refused")}


def _accepted_malicious_groups(attackers: AttackerProcess, seen: Seen) -> list[str]:
    rows = {peer_id: seen.rows[peer_id] for peer_id in attackers.malicious & seen.rows.keys()}
    return [
        f"{attackers.attack_of[peer_id]}: {row['groups_accepted']} of {peer_id}"
        for peer_id, row in sorted(rows.items())
        if row["groups_accepted"]
    ]
