"""Which senders count as refused, and what is logged about them. All times are simulated."""

from ftis_node.swarm.refusals import FORGET_S, HOUR_S, LINES_PER_HOUR, RefusalLog, RefusedSender, RefusedSenders


def states(outcomes: str) -> list[bool]:
    """Return whether the sender is refused after each outcome: `r` refused, `.` accepted."""
    table, found = RefusedSenders(), []
    for now, outcome in enumerate(outcomes):
        if outcome == "r":
            table.refused("a", "finish_reason", now=float(now))
        else:
            table.accepted("a")
        found.append(bool(table.present(now=float(now))))
    return found


def test_a_sender_is_refused_after_three_and_until_half_of_its_groups_are_accepted():
    assert states("rr") == [False, False]
    assert states("rrr...") == [False, False, True, True, True, False]
    assert not any(states("....rrrr")), "half of its groups are accepted"
    assert states("." * 16 + "r" * 9)[-2:] == [False, True]


def test_the_reason_is_the_most_frequent_one_and_the_time_that_of_the_beginning():
    table = RefusedSenders()
    for now, reason in enumerate(["banned", "reward_mismatch", "reward_mismatch", "reward_mismatch"]):
        table.refused("a", reason, now=float(now))
    assert table.present(now=10.0) == [RefusedSender("a", "reward_mismatch", 4, 2.0)]
    assert table.present(now=10.0 + FORGET_S) == [], "a sender that has left is still shown"
    table.forget()
    assert table.present(now=10.0) == []


def sender(peer_id: str = "a", reason: str = "finish_reason") -> RefusedSender:
    return RefusedSender(peer_id, reason, 3, 0.0)


def test_a_line_comes_at_the_beginning_and_at_a_new_reason():
    log = RefusalLog()
    reasons = ("finish_reason", "finish_reason", "prompt_mismatch", "prompt_mismatch")
    due = [bool(log.news([sender(reason=reason)], now=float(now))[0]) for now, reason in enumerate(reasons)]
    assert due == [True, False, True, False]
    assert log.news([], now=9.0)[1] == ["a"]
    assert log.news([], now=9.0)[1] == []


def test_many_new_identities_cause_a_bounded_number_of_lines():
    log = RefusalLog()
    crowd = [sender(str(number)) for number in range(1000)]
    assert len(log.news(crowd, now=0.0)[0]) == LINES_PER_HOUR
    assert log.news(crowd, now=HOUR_S - 1)[0] == []
    assert len(log.news(crowd, now=HOUR_S)[0]) == LINES_PER_HOUR
