"""The phases of a run, and a sentence for each violation.

Quiet phases and attacks alternate, so rates and sizes are compared within the run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

Sample = Mapping[tuple[str, str], float]  # by quantity and process

LEAST_RATIO = 0.9
GROWTH_SHARE = 0.1
GROWTH = {"rss_mib": 24.0, "descriptors": 16.0, "threads": 8.0, "disk_mib": 8.0}  # allowed beside that share
LEAST_MINUTES = 20.0  # in shorter runs sizes still grow to their bounds, and some attackers have no turn
PAIR_MINUTES = 9.0  # three quiet, six with attackers
QUIET_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run. `admitted` counts the groups of honest senders that the node stored."""

    attacked: bool
    minutes: float
    admitted: int
    steps: int
    samples: Sequence[Sample] = ()

    @property
    def rate(self) -> float:
        """Admitted honest groups per minute."""
        return self.admitted / self.minutes


@dataclass
class Attacks:
    """What the process of the attackers reported."""

    kinds: set[str] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)  # actions by kind
    errors: Counter[str] = field(default_factory=Counter)
    last_errors: dict[str, str] = field(default_factory=dict)
    kind_of: dict[str, str] = field(default_factory=dict)  # by the peer id of a member
    malicious: set[str] = field(default_factory=set)
    num_attacks: int = 0

    def add(self, message: dict[str, Any]) -> None:
        match message:
            case {"kinds": kinds}:
                self.kinds |= set(kinds)
            case {"member": peer, "kind": kind, "malicious": is_malicious}:
                self.kind_of[peer] = kind
                self.malicious |= {peer} if is_malicious else set()
            case {"kind": kind, "actions": actions}:
                self.num_attacks += 1
                self.done[kind] += actions
            case {"kind": kind, "error": error}:
                self.num_attacks += 1
                self.errors[kind] += 1
                self.last_errors[kind] = error


def plan(minutes: float) -> list[tuple[bool, float]]:
    """Return `(attacked, minutes)` in order. The last phase is quiet, so each attack is between two quiet phases."""
    pairs = max(2, round(minutes / PAIR_MINUTES))
    unit = minutes / (pairs + QUIET_SHARE)
    pair = [(False, unit * QUIET_SHARE), (True, unit * (1 - QUIET_SHARE))]
    return [*pair * pairs, (False, unit * QUIET_SHARE)]


def ratio(phases: Sequence[Phase]) -> float | None:
    """Return the honest rate under attack relative to the adjacent quiet phases; None without such an attack."""
    shares = [
        phase.rate / ((before.rate + after.rate) / 2)
        for before, phase, after in zip(phases, phases[1:], phases[2:], strict=False)
        if phase.attacked and before.rate + after.rate > 0
    ]
    return mean(shares) if shares else None


def growing(phases: Sequence[Phase]) -> list[str]:
    """Return the sizes that grew from the second quiet phase, after the warm-up, to the last one."""
    quiet = [_means(phase.samples) for phase in phases if not phase.attacked and phase.samples]
    if len(quiet) < 3:
        return []
    return [
        f"{quantity} of {part} grows from {before:.1f} to {quiet[-1][quantity, part]:.1f}"
        for (quantity, part), before in quiet[1].items()
        if quiet[-1].get((quantity, part), 0.0) > before * (1 + GROWTH_SHARE) + GROWTH[quantity]
    ]


def _means(samples: Iterable[Sample]) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        for key, value in sample.items():
            values.setdefault(key, []).append(value)
    return {key: mean(some) for key, some in values.items()}


def violations(result: Mapping[str, Any]) -> list[str]:
    found = []
    if result["exit_code"] is not None:
        found.append(f"the node ended with exit code {result['exit_code']}")
    if result["starts"] > 1:
        found.append(f"the node was started {result['starts']} times")
    if result["honest_ratio"] is None or result["honest_ratio"] < LEAST_RATIO:
        found.append(f"honest groups were admitted at {result['honest_ratio']} of the quiet rate, below {LEAST_RATIO}")
    found += [f"the honest peer {peer} was banned" for peer in result["honest_banned"]]
    found += [f"groups of a malicious peer were accepted: {groups}" for groups in result["accepted_malicious_groups"]]
    if result["tracebacks"]:
        found.append(f"{result['tracebacks']} tracebacks in the node's logs")
    if result["minutes"] >= LEAST_MINUTES:
        found += result["growing"]
        found += [f"attackers that did nothing: {', '.join(result['idle_kinds'])}"] if result["idle_kinds"] else []
    return found
