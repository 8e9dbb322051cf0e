"""What the run found: figures for the JSON line, and every sentence that is a violation."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from tests.attacks.endurance import watch  # noqa: F401  it puts `bench/` on the path
from tests.attacks.endurance.phases import ratio

from soaking.slopes import Bounds, trend  # isort: skip
from soaking.verdicts import series_of, warm_up_minutes  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from soaking.verdicts import Series
    from tests.attacks.endurance.crew import Crew
    from tests.attacks.endurance.phases import Phase
    from tests.attacks.endurance.watch import Seen
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

LEAST_RATIO = 0.9
# An hour. Attacks come and go, so figures are more restless than in a soak; `amount` is what a hundred hours may add.
BOUNDS = {
    "rss_mib": Bounds(share=0.05, amount=8.0, coarse_share=0.5),
    "descriptors": Bounds(share=0.1, amount=8.0, coarse_share=1.0),
    "threads": Bounds(share=0.1, amount=4.0, coarse_share=1.0),
    "disk_mib": Bounds(share=0.05, amount=4.0, coarse_share=1.0),
}
LEAST_MINUTES = 20.0  # shorter runs warm up all the time: slopes are told, and not judged
NUM_FAULTS_TOLD = 20


def trends(seen: Seen) -> list[dict[str, Any]]:
    """The slope of each bounded quantity of each process an hour, with its 95 % interval, after the warm-up."""
    points = [point for point in seen.points if point.quantity in BOUNDS]
    if not points:
        return []
    after = warm_up_minutes(max(point.minute for point in points))
    return [told for one in series_of(points) if (told := _trend_of(one, after)) is not None]


def _trend_of(one: Series, after: float) -> dict[str, Any] | None:
    late = [(minute, value) for minute, value in zip(one.minutes, one.values, strict=True) if minute >= after]
    known = trend([minute for minute, _ in late], [value for _, value in late])
    if known is None:
        return None
    figures = {name: round(float(getattr(known, name)), 3) for name in ("level", "slope", "low", "high")}
    return {"quantity": one.quantity, "part": one.part, **figures, "verdict": known.word(BOUNDS[one.quantity])}


def log_text(victim: Victim) -> str:
    """All that the node wrote into its logs."""
    files = [victim.node.log, *sorted(victim.node.home.glob("logs/*"))]
    return "".join(file.read_text(errors="replace") for file in files if file.is_file())


def summary(
    victim: Victim, honest: Sequence[Member], crew: Crew, seen: Seen, phases: Sequence[Phase], status: dict[str, Any]
) -> dict[str, Any]:
    """The figures of the run."""
    share = ratio(phases)
    learner, swarm = status.get("learner", {}), status.get("swarm", {})  # a node that has ended may have left none
    refused = swarm.get("groups_refused", {})
    shares = crew.shares()
    attacked = [phase for phase in phases if phase.attacked]
    quiet = [phase for phase in phases if not phase.attacked]
    return {
        "minutes": round(sum(phase.minutes for phase in phases), 1),
        "minutes_attacked": round(sum(phase.minutes for phase in attacked), 1),
        "exit_code": victim.node.process.poll(),
        "starts": len(victim.node.events("start")),  # 0 where the trail has turned over
        "learner_restarts": learner.get("restarts"),
        "steps": learner.get("step"),
        "honest_rate_quiet": _mean_rate(quiet),
        "honest_rate_attacked": _mean_rate(attacked),
        "honest_ratio": None if share is None else round(share[0], 3),
        "honest_ratio_error": None if share is None or math.isnan(share[1]) else round(share[1], 3),
        "honest_rows": [_row(seen, one.peer_id) for one in honest],
        "members_attacking": len(crew.attack_of),
        "members_banned": len(seen.banned & crew.attack_of.keys()),
        "liars_with_accepted_groups": _accepted_lies(crew, seen),
        "honest_banned": sorted(seen.banned & {one.peer_id for one in honest}),
        "faults": refused.get("fault", 0),
        "fault_events": victim.node.events("peer_fault")[:NUM_FAULTS_TOLD],
        "tracebacks": log_text(victim).count("Traceback (most recent call last)"),
        "unanswered_looks": seen.unanswered,
        "refused": refused,
        "serve_errors": swarm.get("serve_errors"),
        "fetch_errors": swarm.get("fetch_errors"),
        "share_of_a_day": {name: round(value, 2) for name, value in sorted(shares.items())},
        "share_of_a_day_mean": round(sum(min(1.0, value) for value in shares.values()) / max(1, len(shares)), 3),
        "actions": crew.done.total(),
        "attacker_errors": dict(crew.errors),
        "attacker_last_errors": crew.last_errors,
        "trends": trends(seen),
    }


def violations(result: dict[str, Any]) -> list[str]:
    """One sentence each; none where the node bore it."""
    found = []
    if result["exit_code"] is not None:
        found.append(f"the node ended with exit code {result['exit_code']}")
    if result["starts"] > 1:
        found.append(f"the node was started {result['starts']} times")
    if result["honest_ratio"] is None or result["honest_ratio"] < LEAST_RATIO:
        found.append(
            f"honest groups arrived at {result['honest_ratio']} of the undisturbed rate"
            f" (standard error {result['honest_ratio_error']}), and {LEAST_RATIO} is the least"
        )
    found += [f"the honest peer {peer} was banned" for peer in result["honest_banned"]]
    found += [f"groups of a liar were accepted: {told}" for told in result["liars_with_accepted_groups"]]
    if result["tracebacks"]:
        found.append(f"{result['tracebacks']} tracebacks in the node's logs")
    if result["minutes"] >= LEAST_MINUTES:
        grown = [told for told in result["trends"] if told["verdict"] == "grows"]
        found += [f"{told['quantity']} of {told['part']} grows: {json.dumps(told)}" for told in grown]
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


def _accepted_lies(crew: Crew, seen: Seen) -> list[str]:
    rows = {peer_id: seen.rows[peer_id] for peer_id in crew.liars & seen.rows.keys()}
    return [
        f"{crew.attack_of[peer_id]}: {row['groups_accepted']} of {peer_id}"
        for peer_id, row in sorted(rows.items())
        if row["groups_accepted"]
    ]
