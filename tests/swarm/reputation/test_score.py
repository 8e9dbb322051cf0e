"""Standing: what lowers it, who is banned for how long, and what time forgives."""

from __future__ import annotations

import pytest

from ftis_node.swarm.reputation.score import BanRules, Conduct, Reputation, Standing

RULES = BanRules(first_s=100.0, longest_s=350.0)


def after(*deeds: Conduct, start: Reputation | None = None, now: float = 1000.0) -> Reputation:
    record = start or Reputation()
    for deed in deeds:
        record = record.after(deed, now=now, rules=RULES, reason=f"reason {deed}")
    return record


@pytest.mark.parametrize(("deed", "number"), [(Conduct.LIED, 3), (Conduct.REFUSED, 5), (Conduct.FLOODED, 40)])
def test_a_stranger_is_banned_after_so_many_in_a_row(deed: Conduct, number: int) -> None:
    assert not after(*[deed] * (number - 1)).is_banned(now=1000.0)
    banned = after(*[deed] * number)
    assert banned.standing(now=1099.0) is Standing.BANNED
    assert banned.ban_reason == f"reason {deed}"
    assert banned.standing(now=1100.0) is Standing.WATCHED, "it comes back, and is watched"
    assert banned.score_at(1100.0) == pytest.approx(-5.0)


@pytest.mark.parametrize(
    ("deed", "standing"),
    [
        (Conduct.MISHAP, Standing.GOOD),
        (Conduct.ACCEPTED, Standing.GOOD),
        (Conduct.PULL_FAILED, Standing.GOOD),
        (Conduct.COPIED, Standing.WATCHED),
    ],
)
def test_what_may_happen_to_the_honest_bans_nobody(deed: Conduct, standing: Standing) -> None:
    assert after(*[deed] * 10000).standing(now=1000.0) is standing


def test_only_what_taught_makes_credit_and_it_is_bounded() -> None:
    assert after(*[Conduct.ACCEPTED] * 10000).score == pytest.approx(2.0)
    credit = after(*[Conduct.TAUGHT] * 10000)
    assert credit.score == pytest.approx(10.0)
    assert after(*[Conduct.ACCEPTED], start=credit).score == pytest.approx(10.0), "less does not take more away"
    assert after(*[Conduct.LIED] * 5, start=credit).is_banned(now=1000.0)
    assert not after(*[Conduct.LIED] * 4, start=credit).is_banned(now=1000.0)


def test_bans_double_up_to_the_longest() -> None:
    record, now, lengths = Reputation(), 0.0, []
    for _ in range(4):
        record = after(*[Conduct.LIED] * 3, start=record, now=now)
        lengths.append(record.banned_until - now)
        now = record.banned_until
    assert lengths == [100.0, 200.0, 350.0, 350.0]


def test_a_running_ban_is_not_made_longer() -> None:
    banned = after(*[Conduct.LIED] * 3)
    assert after(*[Conduct.LIED] * 50, start=banned, now=1050.0) == banned


def test_time_forgives_what_is_below_zero_and_one_ban_a_day() -> None:
    low = after(Conduct.LIED, Conduct.LIED)
    assert low.score_at(1000.0 + 1800.0) == pytest.approx(-4.0)
    good = after(*[Conduct.TAUGHT] * 20)
    assert good.score_at(1e9) == pytest.approx(2.0), "credit stays"
    banned = after(*[Conduct.LIED] * 3)
    day_after = after(*[Conduct.LIED] * 3, start=banned, now=1100.0 + 86400.0)
    assert day_after.banned_until == pytest.approx(1100.0 + 86400.0 + 100.0), "as if it were the first"
    assert day_after.num_bans == 1


def test_the_trusted_are_never_banned_and_unban_cleans() -> None:
    trusted = after(*[Conduct.LIED] * 3).with_trust(True, now=1001.0)
    assert trusted.standing(now=1001.0) is Standing.TRUSTED
    assert after(*[Conduct.LIED] * 99, start=trusted).standing(now=1000.0) is Standing.TRUSTED
    clean = after(*[Conduct.LIED] * 3).unbanned(now=1001.0)
    assert (clean.standing(now=1001.0), clean.num_bans) == (Standing.GOOD, 0)


def test_a_stranger_becomes_known_by_its_groups() -> None:
    assert not after(*[Conduct.ACCEPTED] * 49).is_known(now=1000.0)
    assert after(*[Conduct.ACCEPTED] * 51).is_known(now=1000.0)
