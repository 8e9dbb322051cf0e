"""Who is told that its groups are here: all of one sender at once, senders in turn, and not without bound."""

from __future__ import annotations

from ftis_node.swarm.delivery.reconfirm_queue import ReconfirmQueue


def test_all_of_a_sender_at_once_and_senders_in_turn() -> None:
    reminders = ReconfirmQueue()
    for sender, group_id in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", b"1")):
        reminders.add(sender, group_id)
    assert reminders.take() == ("a", [b"1", b"3"])
    reminders.add("a", b"4")
    assert reminders.take() == ("b", [b"2"]), "it comes before one that was told a moment ago"
    assert reminders.take() == ("a", [b"4"])
    assert reminders.take() is None


def test_too_many_are_forgotten() -> None:
    reminders = ReconfirmQueue(max_senders=2, max_groups=2)
    for group_id in (b"1", b"2", b"3"):
        reminders.add("a", group_id)
    reminders.add("b", b"4")
    assert reminders.take() == ("a", [b"1", b"2"])
    for sender in ("c", "d"):
        reminders.add(sender, b"5")
    assert [reminders.take(), reminders.take()] == [("c", [b"5"]), ("d", [b"5"])], "b was here longest"
