"""The reputation: reasons, who is at fault, the score, lengths of bans, and which peers a full table drops."""

import re
from pathlib import Path

import pytest

from ftis_node.gossip import FetchOutcome
from ftis_node.swarm.reasons import BEHAVIOUR, REFUSALS, UNKNOWN, attribute_refusal, sentence
from ftis_node.swarm.reputation import (
    BY_OPERATOR,
    GOOD_BEHAVIOUR,
    MAX_REASONS,
    Behaviour,
    Reputation,
    ReputationTable,
    TrustLevel,
)


def after(*behaviours: Behaviour, start: Reputation | None = None, now: float = 1000.0) -> Reputation:
    record = start or Reputation()
    for behaviour in behaviours:
        record = record.after(behaviour, now=now, reason=f"reason {behaviour}")
    return record


@pytest.mark.parametrize(
    ("behaviour", "number"), [(Behaviour.FALSE_CLAIM, 3), (Behaviour.REFUSED, 5), (Behaviour.RATE_LIMITED, 40)]
)
def test_an_unknown_peer_is_banned_after_this_many_in_a_row(behaviour, number):
    assert not after(*[behaviour] * (number - 1)).is_banned(now=1000.0)
    banned = after(*[behaviour] * number)
    assert banned.trust_level(now=1299.0) is TrustLevel.BANNED
    assert banned.ban_reason == f"reason {behaviour}"
    assert banned.trust_level(now=1300.0) is TrustLevel.PROBATION, "it returns on probation"
    assert banned.score_at(1300.0) == pytest.approx(-5.0)


@pytest.mark.parametrize(
    ("behaviour", "level"),
    [
        (Behaviour.HARMLESS, TrustLevel.GOOD), (Behaviour.ACCEPTED, TrustLevel.GOOD),
        (Behaviour.PULL_FAILED, TrustLevel.GOOD), (Behaviour.COPIED, TrustLevel.PROBATION),
    ],
)  # fmt: skip
def test_behavior_of_an_honest_peer_never_leads_to_a_ban(behaviour, level):
    assert after(*[behaviour] * 10000).trust_level(now=1000.0) is level


def test_only_contributions_raise_the_score_far_and_it_is_bounded():
    assert after(*[Behaviour.ACCEPTED] * 10000).score == pytest.approx(2.0)
    credit = after(*[Behaviour.CONTRIBUTED] * 10000)
    assert credit.score == pytest.approx(10.0)
    assert after(*[Behaviour.ACCEPTED], start=credit).score == pytest.approx(10.0), (
        "an accepted group does not lower a high score"
    )
    assert after(*[Behaviour.FALSE_CLAIM] * 5, start=credit).is_banned(now=1000.0)
    assert not after(*[Behaviour.FALSE_CLAIM] * 4, start=credit).is_banned(now=1000.0)


def test_ban_lengths_double_up_to_the_maximum():
    record, now, lengths = Reputation(), 0.0, []
    for _ in range(11):
        record = after(*[Behaviour.FALSE_CLAIM] * 3, start=record, now=now)
        lengths.append(record.banned_until - now)
        now = record.banned_until
    assert lengths == [*(300.0 * 2**number for number in range(9)), 86400.0, 86400.0]


def test_a_running_ban_is_not_extended():
    banned = after(*[Behaviour.FALSE_CLAIM] * 3)
    assert after(*[Behaviour.FALSE_CLAIM] * 50, start=banned, now=1050.0) == banned


def test_a_negative_score_decays_and_one_ban_a_day_is_forgotten():
    assert after(Behaviour.FALSE_CLAIM, Behaviour.FALSE_CLAIM).score_at(1000.0 + 1800.0) == pytest.approx(-4.0)
    good = after(*[Behaviour.CONTRIBUTED] * 20)
    assert good.score_at(1e9) == pytest.approx(2.0), "a positive score does not decay to 0"
    banned = after(*[Behaviour.FALSE_CLAIM] * 3)
    day_after = after(*[Behaviour.FALSE_CLAIM] * 3, start=banned, now=1300.0 + 86400.0)
    assert day_after.banned_until == pytest.approx(1300.0 + 86400.0 + 300.0), "as long as a first ban"
    assert day_after.num_bans == 1


def test_a_trusted_peer_is_never_banned_and_unbanning_resets_the_score():
    trusted = after(*[Behaviour.FALSE_CLAIM] * 3).with_trust(True, now=1001.0)
    assert trusted.trust_level(now=1001.0) is TrustLevel.TRUSTED
    assert after(*[Behaviour.FALSE_CLAIM] * 99, start=trusted).trust_level(now=1000.0) is TrustLevel.TRUSTED
    clean = after(*[Behaviour.FALSE_CLAIM] * 3).unbanned(now=1001.0)
    assert (clean.trust_level(now=1001.0), clean.num_bans) == (TrustLevel.GOOD, 0)


def test_a_peer_becomes_known_by_its_accepted_groups():
    assert not after(*[Behaviour.ACCEPTED] * 49).is_known(now=1000.0)
    assert after(*[Behaviour.ACCEPTED] * 51).is_known(now=1000.0)


PAGE = Path(__file__).parents[2] / "docs/reference/refusals.md"


def test_the_page_of_refusals_has_the_same_sentences():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| reason | the group is refused") : text.index("## Other names")]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", table, flags=re.MULTILINE)) == {
        name: reason.meaning for name, reason in REFUSALS.items()
    }


def test_every_reason_in_a_peers_record_has_a_sentence():
    others = (BY_OPERATOR, "logprob_mismatch", "announcement_flood", "announcement_malformed")
    for reason in (*(set(Behaviour) - GOOD_BEHAVIOUR), *others):
        assert sentence(reason) != UNKNOWN, reason
    for outcome in FetchOutcome:
        assert outcome.value.replace("_", " ") in sentence(f"pull_{outcome.value}")
    assert sentence("nonsense") == UNKNOWN
    assert not set(REFUSALS) & set(BEHAVIOUR)


@pytest.mark.parametrize(
    ("reason", "origin", "signed", "blamed", "behaviour"),
    [
        ("signature", "relay", False, "relay", Behaviour.FALSE_CLAIM),
        ("run", "relay", False, "relay", Behaviour.REFUSED), ("anything", "relay", False, "relay", Behaviour.REFUSED),
        ("quota", "relay", False, "relay", Behaviour.HARMLESS),
        ("quota", "signer", False, "signer", Behaviour.RATE_LIMITED),
        ("scoring_failed", "relay", True, "relay", Behaviour.HARMLESS),
        ("reward_mismatch", "relay", True, "signer", Behaviour.FALSE_CLAIM),
    ],
)  # fmt: skip
def test_a_reason_is_attributed_to_the_peer_that_caused_it(reason, origin, signed, blamed, behaviour):
    assert attribute_refusal(reason, origin=origin, sender="signer", signed=signed) == (blamed, behaviour)


def note(
    table: ReputationTable, peer_id: str, behaviour: Behaviour, times: int, *, now: float = 1e6
) -> TrustLevel | None:
    return [table.note(peer_id, behaviour, now=now) for _ in range(times)][-1]


def test_a_full_table_keeps_decisions_of_the_operator_and_peers_that_contributed():
    table = ReputationTable(max_peers=16)
    table.ban("banned by hand", 5.0, now=1e6)
    table.trust("trusted", True, now=1e6)
    note(table, "contributor", Behaviour.CONTRIBUTED, 12)
    for number in range(100):
        note(table, f"malicious{number}", Behaviour.FALSE_CLAIM, 3)
        note(table, f"unknown{number}", Behaviour.HARMLESS, 1)
    kept = {peer_id for peer_id, _ in table}
    assert len(kept) <= 16
    assert {"banned by hand", "trusted", "contributor", "malicious99"} <= kept
    assert table.reputation("unknown0").trust_level(now=1e6) is TrustLevel.GOOD
    assert table.forgotten >= {"unknown0"}
    assert not table.forgotten & kept


def test_a_change_of_trust_is_returned_once():
    table = ReputationTable()
    assert note(table, "ann", Behaviour.FALSE_CLAIM, 1) is TrustLevel.PROBATION
    assert note(table, "ann", Behaviour.FALSE_CLAIM, 1) is None
    assert note(table, "ann", Behaviour.FALSE_CLAIM, 1) is TrustLevel.BANNED
    assert note(table, "ann", Behaviour.FALSE_CLAIM, 5) is None


def test_reasons_are_counted_and_bounded():
    table = ReputationTable()
    for number in range(100):
        table.note("ann", Behaviour.HARMLESS, now=1e6, reason=f"reason {number}")
        table.note("ann", Behaviour.HARMLESS, now=1e6, reason="reason 0")
        table.note("ann", Behaviour.ACCEPTED, now=1e6)
    reasons = table.record_of("ann").reasons
    assert (len(reasons), reasons["reason 0"]) == (MAX_REASONS, 101)
