"""Who is forgotten when there are too many peers, and what is told of a change."""

from __future__ import annotations

from ftis_node.swarm.reputation.score import Behaviour, TrustLevel
from ftis_node.swarm.reputation.table import MAX_REASONS, ReputationTable


def note(
    standings: ReputationTable, peer_id: str, conduct: Behaviour, times: int, *, now: float = 1e6
) -> TrustLevel | None:
    changes = [standings.note(peer_id, conduct, now=now) for _ in range(times)]
    return changes[-1]


def test_the_operators_word_and_those_that_taught_are_remembered_longest() -> None:
    standings = ReputationTable(max_peers=16)
    standings.ban("banned by hand", 5.0, now=1e6)
    standings.trust("trusted", True, now=1e6)
    note(standings, "teacher", Behaviour.TAUGHT, 12)
    for number in range(100):
        note(standings, f"liar{number}", Behaviour.LIED, 3)
        note(standings, f"stranger{number}", Behaviour.MISHAP, 1)
    kept = {peer_id for peer_id, _ in standings}
    assert len(kept) <= 16
    assert {"banned by hand", "trusted", "teacher", "liar99"} <= kept
    assert standings.reputation("stranger0").trust_level(now=1e6) is TrustLevel.GOOD
    assert standings.forgotten >= {"stranger0"}
    assert not standings.forgotten & kept


def test_a_change_is_told_once() -> None:
    standings = ReputationTable()
    assert note(standings, "ann", Behaviour.LIED, 1) is TrustLevel.WATCHED
    assert note(standings, "ann", Behaviour.LIED, 1) is None
    assert note(standings, "ann", Behaviour.LIED, 1) is TrustLevel.BANNED
    assert note(standings, "ann", Behaviour.LIED, 5) is None


def test_reasons_are_counted_and_bounded() -> None:
    standings = ReputationTable()
    for number in range(100):
        standings.note("ann", Behaviour.MISHAP, now=1e6, reason=f"reason {number}")
        standings.note("ann", Behaviour.MISHAP, now=1e6, reason="reason 0")
        standings.note("ann", Behaviour.ACCEPTED, now=1e6)
    reasons = standings.record_of("ann").reasons
    assert (len(reasons), reasons["reason 0"]) == (MAX_REASONS, 101)
