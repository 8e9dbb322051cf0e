"""Which peers a full reputation table drops, and which changes of trust it returns."""

from __future__ import annotations

from ftis_node.swarm.reputation import MAX_REASONS, Behaviour, ReputationTable, TrustLevel


def note(
    table: ReputationTable, peer_id: str, behaviour: Behaviour, times: int, *, now: float = 1e6
) -> TrustLevel | None:
    changes = [table.note(peer_id, behaviour, now=now) for _ in range(times)]
    return changes[-1]


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
