"""The verdict of the endurance run finds each violation. No node runs."""

from typing import Any

import pytest

from tests.attacks.endurance.kinds import all_kinds
from tests.attacks.endurance.verdict import Phase, growing, plan, ratio, violations

PASSED: dict[str, Any] = {
    "minutes": 60.0,
    "exit_code": None,
    "starts": 0,  # the event log was rotated
    "honest_ratio": 0.97,
    "honest_banned": [],
    "accepted_malicious_groups": [],
    "tracebacks": 0,
    "growing": [],
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
    "grows": {"growing": ["rss_mib of daemon grows from 100.0 to 200.0"]},
    "did nothing": {"idle_kinds": ["rsa host"]},
}


def test_each_fault_of_a_run_is_one_violation():
    assert violations(PASSED) == []
    for words, changes in VIOLATIONS.items():
        (found,) = violations(PASSED | changes)
        assert words in found


def test_the_rate_and_the_sizes_are_compared_with_those_of_quiet_phases():
    assert [attacked for attacked, _ in plan(45.0)] == [False, True] * 5 + [False]
    assert sum(length for _, length in plan(45.0)) == pytest.approx(45.0)
    rates = [100, 90, 80, 80, 120]  # a machine that is slower for a while
    sizes = [1.0, 400.0, 100.0, 400.0, 150.0]
    phases = [
        Phase(bool(at % 2), 2.0, 2 * rate, 1, [{("rss_mib", "daemon"): size}])
        for at, (rate, size) in enumerate(zip(rates, sizes, strict=True))
    ]
    assert ratio(phases) == pytest.approx((90 / 90 + 80 / 100) / 2)
    assert ratio(phases[:2]) is None
    assert growing(phases) == ["rss_mib of daemon grows from 100.0 to 150.0"]
    assert growing(phases[:3]) == [], "without a warm-up"


def test_kinds_have_different_names():
    names = [kind.name for kind in all_kinds()]
    assert len(names) == len(set(names)) > 60
