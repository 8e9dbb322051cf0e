"""Who is forgotten when there are too many peers, and what is told of a change."""

from __future__ import annotations

from ftis_node.swarm.reputation.score import Conduct, Standing
from ftis_node.swarm.reputation.table import MAX_REASONS, Standings


def note(standings: Standings, peer_id: str, conduct: Conduct, times: int, *, now: float = 1e6) -> Standing | None:
    changes = [standings.note(peer_id, conduct, now=now) for _ in range(times)]
    return changes[-1]


def test_the_operators_word_and_those_that_taught_are_remembered_longest() -> None:
    standings = Standings(max_peers=16)
    standings.ban("banned by hand", 5.0, now=1e6)
    standings.trust("trusted", True, now=1e6)
    note(standings, "teacher", Conduct.TAUGHT, 12)
    for number in range(100):
        note(standings, f"liar{number}", Conduct.LIED, 3)
        note(standings, f"stranger{number}", Conduct.MISHAP, 1)
    kept = {peer_id for peer_id, _ in standings}
    assert len(kept) <= 16
    assert {"banned by hand", "trusted", "teacher", "liar99"} <= kept
    assert standings.reputation("stranger0").standing(now=1e6) is Standing.GOOD
    assert standings.forgotten >= {"stranger0"}
    assert not standings.forgotten & kept


def test_a_change_is_told_once() -> None:
    standings = Standings()
    assert note(standings, "ann", Conduct.LIED, 1) is Standing.WATCHED
    assert note(standings, "ann", Conduct.LIED, 1) is None
    assert note(standings, "ann", Conduct.LIED, 1) is Standing.BANNED
    assert note(standings, "ann", Conduct.LIED, 5) is None


def test_reasons_are_counted_and_bounded() -> None:
    standings = Standings()
    for number in range(100):
        standings.note("ann", Conduct.MISHAP, now=1e6, reason=f"reason {number}")
        standings.note("ann", Conduct.MISHAP, now=1e6, reason="reason 0")
        standings.note("ann", Conduct.ACCEPTED, now=1e6)
    reasons = standings.dossier("ann").reasons
    assert (len(reasons), reasons["reason 0"]) == (MAX_REASONS, 101)
