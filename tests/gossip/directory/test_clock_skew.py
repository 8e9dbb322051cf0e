"""The clock skew of this machine is what most peers say; one peer alone is named and not believed."""

import time

import pytest

from ftis_node.gossip.directory.dht import Directory, majority_skew

HOURS = 3 * 3600.0


@pytest.mark.parametrize(
    ("skews_s", "expected"),
    [
        ([], None),
        ([-HOURS], None),
        ([0.1, -HOURS], 0.1),
        ([-HOURS, -HOURS + 1], -HOURS + 1),
        ([0.0, -HOURS, -HOURS], -HOURS),
        ([0.0, 0.2, -HOURS, HOURS], 0.2),
    ],
)
def test_the_skew_is_that_of_most_peers(skews_s, expected):
    assert majority_skew(skews_s) == expected


def test_a_peer_with_another_clock_is_named_once(caplog):
    directory = Directory.__new__(Directory)  # without a network
    directory._skews_s, directory._named = {}, {}  # type: ignore[assignment]
    right_s = time.time() - time.monotonic()
    directory._note_clock("late", right_s - HOURS)
    directory._note_clock("late", right_s - HOURS)
    directory._note_clock("right", right_s)
    directory._note_clock("later", right_s - 2 * HOURS)
    assert [record.getMessage() for record in caplog.records] == [
        "the clock of peer late is -10800 s off this machine's: one of the two is wrong",
        "the clock of peer later is -21600 s off this machine's: most peers disagree with it",
    ]
