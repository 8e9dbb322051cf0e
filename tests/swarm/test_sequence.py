"""Gaps in a sender's sequence numbers."""

from ftis_node.swarm.sequence import MAX_GAPS, MAX_TRIES, SequenceGap, SequenceTracker, epoch_base

EPOCH = epoch_base(1_800_000_000)
NEXT = epoch_base(1_800_000_001)
DISTANT = epoch_base(1 << 42)


def tracker_after(*numbers: int) -> SequenceTracker:
    sender = SequenceTracker(at=0.0)
    for number in numbers:
        sender.note(number, at=1.0)
    return sender


def test_numbers_before_the_first_one_are_no_gap():
    assert tracker_after(7, 8, 9).gaps == ()


def test_gaps_are_listed_newest_first_and_filled():
    sender = tracker_after(1, 4, 9)
    assert sender.gaps == (SequenceGap(5, 8), SequenceGap(2, 3))
    sender.note(6, at=2.0)
    assert sender.gaps == (SequenceGap(7, 8), SequenceGap(5, 5), SequenceGap(2, 3))
    for number in (2, 3, 5, 7, 8):
        sender.note(number, at=3.0)
    assert sender.gaps == ()
    assert (sender.highest, sender.at) == (9, 1.0)


def test_only_a_higher_number_ends_a_silence():
    sender = tracker_after(1, 2)
    sender.note(2, at=5.0)
    assert (sender.highest, sender.at) == (2, 1.0)
    sender.note(3, at=6.0)
    assert (sender.highest, sender.at) == (3, 6.0)


def test_a_directory_record_shows_a_missing_tail():
    sender = tracker_after(1, 2)
    sender.note_tail(5)
    assert sender.gaps == (SequenceGap(3, 5),)
    sender.note_tail(5)
    assert sender.gaps == (SequenceGap(3, 5),)
    silent = SequenceTracker(at=0.0)
    silent.note_tail(5)
    assert silent.gaps == (), "earlier groups are queried by time"


def test_a_gap_is_dropped_after_a_final_answer_or_max_tries():
    sender = tracker_after(1, 4, 9)
    sender.note_query(SequenceGap(5, 8), is_final=True)
    assert sender.gaps == (SequenceGap(2, 3),)
    for tries in range(1, MAX_TRIES):
        sender.note_query(SequenceGap(2, 3), is_final=False)
        assert sender.gaps == (SequenceGap(2, 3, tries),)
    sender.note_query(SequenceGap(2, 3), is_final=False)
    assert sender.gaps == ()


def test_the_gaps_of_a_sender_that_skips_every_other_number_are_bounded():
    sender = tracker_after(*range(1, 1001, 2))
    assert (len(sender.gaps), sender.gaps[0]) == (MAX_GAPS, SequenceGap(998, 998))


def test_a_new_epoch_counts_from_one():
    assert tracker_after(EPOCH + 7, NEXT + 1, NEXT + 2).gaps == (), "the end of the last epoch is no gap"
    sender = tracker_after(EPOCH + 7, NEXT + 3)
    assert sender.gaps == (SequenceGap(NEXT + 1, NEXT + 2),)
    sender = tracker_after(EPOCH + 7)
    sender.note_tail(NEXT)
    assert sender.gaps == (), "the sender has begun an epoch without a group"
    sender.note_tail(NEXT + 2)
    assert sender.gaps == (SequenceGap(NEXT + 1, NEXT + 2),)
    assert tracker_after(EPOCH - 1, EPOCH).gaps == (), "counted on by an implementation that knows no epochs"


def test_a_group_of_an_earlier_epoch_is_old():
    sender = tracker_after(EPOCH + 1, EPOCH + 4, NEXT + 1)
    for number in (EPOCH + 2, EPOCH + 9, 5):
        sender.note(number, at=9.0)
    assert sender.gaps == (SequenceGap(EPOCH + 3, EPOCH + 3),), "a late group ends its gap and makes no other"
    assert (sender.highest, sender.at) == (NEXT + 1, 1.0)


def test_a_distant_epoch_hides_only_the_later_gaps_of_its_sender():
    sender = tracker_after(EPOCH + 1, DISTANT + 1, EPOCH + 2, EPOCH + 9)
    assert (sender.gaps, sender.highest) == ((), DISTANT + 1)
    sender.note_tail(2**63 - 1)
    sender.note_tail(EPOCH + 20)
    assert len(sender.gaps) == 1
