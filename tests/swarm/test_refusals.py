"""Which senders count as refused, and what is logged about them. All times are simulated."""

from ftis_node.swarm.refusals import (
    FORGET_S,
    HOUR_S,
    LINES_PER_HOUR,
    REPEAT_S,
    RefusalLog,
    RefusedSender,
    RefusedSenders,
    RefusingPeers,
)


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


def test_a_line_comes_at_the_beginning_at_a_new_reason_and_after_hours():
    log = RefusalLog()
    due = [
        bool(log.news([sender(reason=reason)], now=now).begun)
        for now, reason in (
            (0.0, "finish_reason"),
            (1.0, "finish_reason"),
            (2.0, "prompt_mismatch"),
            (3.0, "prompt_mismatch"),
            (3.0 + REPEAT_S, "prompt_mismatch"),
        )
    ]
    assert due == [True, False, True, False, True]
    assert log.news([], now=REPEAT_S * 2).ended == ["a"]
    assert log.news([], now=REPEAT_S * 2).ended == []


def test_many_new_identities_cause_a_bounded_number_of_lines():
    log = RefusalLog()
    crowd = [sender(str(number)) for number in range(1000)]
    assert len(log.news(crowd, now=0.0).begun) == LINES_PER_HOUR
    assert log.news(crowd, now=HOUR_S - 1).begun == []
    assert len(log.news(crowd, now=HOUR_S).begun) == LINES_PER_HOUR


def test_a_claim_of_a_peer_has_the_time_at_which_it_came_first():
    peers = RefusingPeers()
    peers.update({"a": ("tokenizer", 3)}, now=5.0)
    assert peers.update({"a": ("tokenizer", 9)}, now=50.0) == [RefusedSender("a", "tokenizer", 9, 5.0)]
    assert peers.update({}, now=60.0) == []
    assert peers.update({"a": ("tokenizer", 1)}, now=70.0)[0].since == 70.0
