"""Repeated confirmations: all of one sender at once, senders in turn, bounded."""

from __future__ import annotations

from ftis_node.swarm.delivery.reconfirm_queue import ReconfirmQueue


def test_all_of_a_sender_at_once_and_senders_in_turn() -> None:
    queue = ReconfirmQueue()
    for sender, group_id in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", b"1")):
        queue.add(sender, group_id)
    assert queue.take() == ("a", [b"1", b"3"])
    queue.add("a", b"4")
    assert queue.take() == ("b", [b"2"]), "it comes before one that was told a moment ago"
    assert queue.take() == ("a", [b"4"])
    assert queue.take() is None


def test_too_many_are_forgotten() -> None:
    queue = ReconfirmQueue(max_senders=2, max_groups=2)
    for group_id in (b"1", b"2", b"3"):
        queue.add("a", group_id)
    queue.add("b", b"4")
    assert queue.take() == ("a", [b"1", b"2"])
    for sender in ("c", "d"):
        queue.add(sender, b"5")
    assert [queue.take(), queue.take()] == [("c", [b"5"]), ("d", [b"5"])], "b was here longest"
