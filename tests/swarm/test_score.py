"""Reputation: what lowers it, lengths of bans, decay."""

from __future__ import annotations

import pytest

from ftis_node.config.limits import AccessSection
from ftis_node.swarm.reputation import Behaviour, Reputation, TrustLevel

ACCESS = AccessSection(ban_initial_s=100.0, ban_max_s=350.0)


def after(*deeds: Behaviour, start: Reputation | None = None, now: float = 1000.0) -> Reputation:
    record = start or Reputation()
    for deed in deeds:
        record = record.after(deed, now=now, access=ACCESS, reason=f"reason {deed}")
    return record


@pytest.mark.parametrize(
    ("deed", "number"), [(Behaviour.FALSE_CLAIM, 3), (Behaviour.REFUSED, 5), (Behaviour.RATE_LIMITED, 40)]
)
def test_a_stranger_is_banned_after_so_many_in_a_row(deed: Behaviour, number: int) -> None:
    assert not after(*[deed] * (number - 1)).is_banned(now=1000.0)
    banned = after(*[deed] * number)
    assert banned.trust_level(now=1099.0) is TrustLevel.BANNED
    assert banned.ban_reason == f"reason {deed}"
    assert banned.trust_level(now=1100.0) is TrustLevel.PROBATION, "it comes back, on probation"
    assert banned.score_at(1100.0) == pytest.approx(-5.0)


@pytest.mark.parametrize(
    ("deed", "standing"),
    [
        (Behaviour.HARMLESS, TrustLevel.GOOD),
        (Behaviour.ACCEPTED, TrustLevel.GOOD),
        (Behaviour.PULL_FAILED, TrustLevel.GOOD),
        (Behaviour.COPIED, TrustLevel.PROBATION),
    ],
)
def test_what_may_happen_to_the_honest_bans_nobody(deed: Behaviour, standing: TrustLevel) -> None:
    assert after(*[deed] * 10000).trust_level(now=1000.0) is standing


def test_only_what_taught_makes_credit_and_it_is_bounded() -> None:
    assert after(*[Behaviour.ACCEPTED] * 10000).score == pytest.approx(2.0)
    credit = after(*[Behaviour.CONTRIBUTED] * 10000)
    assert credit.score == pytest.approx(10.0)
    assert after(*[Behaviour.ACCEPTED], start=credit).score == pytest.approx(10.0), "less does not take more away"
    assert after(*[Behaviour.FALSE_CLAIM] * 5, start=credit).is_banned(now=1000.0)
    assert not after(*[Behaviour.FALSE_CLAIM] * 4, start=credit).is_banned(now=1000.0)


def test_bans_double_up_to_the_longest() -> None:
    record, now, lengths = Reputation(), 0.0, []
    for _ in range(4):
        record = after(*[Behaviour.FALSE_CLAIM] * 3, start=record, now=now)
        lengths.append(record.banned_until - now)
        now = record.banned_until
    assert lengths == [100.0, 200.0, 350.0, 350.0]


def test_a_running_ban_is_not_made_longer() -> None:
    banned = after(*[Behaviour.FALSE_CLAIM] * 3)
    assert after(*[Behaviour.FALSE_CLAIM] * 50, start=banned, now=1050.0) == banned


def test_time_forgives_what_is_below_zero_and_one_ban_a_day() -> None:
    low = after(Behaviour.FALSE_CLAIM, Behaviour.FALSE_CLAIM)
    assert low.score_at(1000.0 + 1800.0) == pytest.approx(-4.0)
    good = after(*[Behaviour.CONTRIBUTED] * 20)
    assert good.score_at(1e9) == pytest.approx(2.0), "credit stays"
    banned = after(*[Behaviour.FALSE_CLAIM] * 3)
    day_after = after(*[Behaviour.FALSE_CLAIM] * 3, start=banned, now=1100.0 + 86400.0)
    assert day_after.banned_until == pytest.approx(1100.0 + 86400.0 + 100.0), "as if it were the first"
    assert day_after.num_bans == 1


def test_the_trusted_are_never_banned_and_unban_cleans() -> None:
    trusted = after(*[Behaviour.FALSE_CLAIM] * 3).with_trust(True, now=1001.0)
    assert trusted.trust_level(now=1001.0) is TrustLevel.TRUSTED
    assert after(*[Behaviour.FALSE_CLAIM] * 99, start=trusted).trust_level(now=1000.0) is TrustLevel.TRUSTED
    clean = after(*[Behaviour.FALSE_CLAIM] * 3).unbanned(now=1001.0)
    assert (clean.trust_level(now=1001.0), clean.num_bans) == (TrustLevel.GOOD, 0)


def test_a_stranger_becomes_known_by_its_groups() -> None:
    assert not after(*[Behaviour.ACCEPTED] * 49).is_known(now=1000.0)
    assert after(*[Behaviour.ACCEPTED] * 51).is_known(now=1000.0)
