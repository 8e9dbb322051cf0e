"""The arithmetic of the endurance run: phases, the honest rate, and violations. No node runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.attacks.endurance.kinds import all_kinds
from tests.attacks.endurance.verdict import Phase, plan, ratio, violations

PASSED: dict[str, Any] = {
    "minutes": 60.0,
    "exit_code": None,
    "starts": 0,  # the event log was rotated
    "honest_ratio": 0.97,
    "honest_ratio_error": 0.01,
    "honest_banned": [],
    "accepted_malicious_groups": [],
    "tracebacks": 0,
    "trends": [{"quantity": "rss_mib", "part": "daemon", "verdict": "flat"}],
    "idle_kinds": [],
}
VIOLATIONS = {
    "the node ended": {"exit_code": 1},
    "the node was started": {"starts": 2},
    "honest groups were admitted": {"honest_ratio": 0.89},
    "honest groups were admitted at None": {"honest_ratio": None},
    "was banned": {"honest_banned": ["12D3KooWHonest"]},
    "of a malicious peer": {"accepted_malicious_groups": ["false NaN: 1 of 12D3KooWMalicious"]},
    "tracebacks": {"tracebacks": 1},
    "grows": {"trends": [{"quantity": "rss_mib", "part": "daemon", "verdict": "grows"}]},
    "did nothing": {"idle_kinds": ["rsa host"]},
}


@pytest.mark.parametrize("minutes", [3.0, 45.0, 60.0])
def test_phases_fill_the_run_and_each_attack_is_between_two_quiet_phases(minutes: float) -> None:
    phases = plan(minutes)
    assert sum(length for _, length in phases) == pytest.approx(minutes)
    assert [attacked for attacked, _ in phases] == [False, True] * (len(phases) // 2) + [False]
    assert 2 <= len(phases) // 2 <= minutes


def test_the_rate_under_attack_is_relative_to_the_adjacent_quiet_phases() -> None:
    rates = [100, 90, 80, 80, 120]  # a machine that is slower for a while
    phases = [Phase(bool(at % 2), 2.0, 2 * rate, 2 * rate, 1) for at, rate in enumerate(rates)]
    share = ratio(phases)
    assert share is not None
    assert share[0] == pytest.approx((90 / 90 + 80 / 100) / 2)
    assert share[1] == pytest.approx(0.1)
    alone = ratio(phases[:3])
    assert alone is not None
    assert math.isnan(alone[1])
    assert ratio(phases[:2]) is None


def test_a_passed_run_has_no_violation() -> None:
    assert violations(PASSED) == []


@pytest.mark.parametrize(("words", "changes"), list(VIOLATIONS.items()), ids=list(VIOLATIONS))
def test_each_fault_is_one_violation(words: str, changes: dict[str, Any]) -> None:
    found = violations(PASSED | changes)
    assert len(found) == 1
    assert words in found[0]


def test_kinds_have_different_names() -> None:
    names = [kind.name for kind in all_kinds()]
    assert len(names) == len(set(names)) > 60
