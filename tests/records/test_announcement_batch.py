"""Announcements of several groups: reading them, and refusing malformed ones."""

from dataclasses import replace

import pytest

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import MAX_ENVELOPE_BYTES, MAX_INTEGER, MAX_MORE_GROUPS, MAX_TOKENS
from ftis_node.records.envelope import MAX_ANNOUNCEMENT_BYTES, Announcement, join_announcements, open_announcement

from . import wire_example as example

PEER = example.IDENTITY.peer_id


def announced(number: int) -> Announcement:
    return Announcement(bytes([number]) * 32, number, 500 + number, 24, b"tokenizr", 3, 1.76e9 + number / 8)


def flat(announcements: list[Announcement]) -> list[Announcement]:
    return [replace(one, more=()) for first in announcements for one in (first, *first.more)]


def test_several_groups_are_read_one_by_one():
    groups = [announced(number) for number in range(1, 31)]
    sent = [announcement.to_bytes() for announcement in join_announcements(groups)]
    assert len(sent) == 3
    assert flat([open_announcement(data) for data in sent]) == groups


def test_a_batch_of_the_largest_values_fits_in_one_announcement():
    largest = [
        replace(
            announced(number),
            number=MAX_INTEGER - 20 + number,
            envelope_bytes=MAX_ENVELOPE_BYTES if number == 1 else 1 << 14,
            num_tokens=MAX_TOKENS if number == 1 else 1 << 12,
            policy_version=MAX_INTEGER,
            created_at=1.76e9 + number * 60,
        )
        for number in range(1, MAX_MORE_GROUPS + 2)
    ]
    (joined,) = join_announcements(largest)
    assert len(joined.more) == MAX_MORE_GROUPS
    assert len(joined.to_bytes()) <= MAX_ANNOUNCEMENT_BYTES


@pytest.mark.parametrize(
    "change", [{"number": 3}, {"policy_version": 4}, {"tokenizer": b"another1"}, {"attempt": 1}, {"sender": PEER}]
)
def test_groups_that_differ_in_a_shared_field_are_not_joined(change):
    groups = [announced(1), replace(announced(2), **change)]  # type: ignore[arg-type]
    assert join_announcements(groups) == groups


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message.more_ids.append(bytes(32)),
        lambda message: message.more_ids.__setitem__(0, bytes(31)),
        lambda message: message.more_ids.extend([b""] * MAX_MORE_GROUPS),
        lambda message: message.more_envelope_bytes.__setitem__(0, MAX_ENVELOPE_BYTES + 1),
        lambda message: message.more_num_tokens.__setitem__(0, MAX_TOKENS + 1),
        lambda message: message.more_created_ms.__setitem__(0, 86_400_001),
        lambda message: setattr(message, "number", MAX_INTEGER),
        lambda message: setattr(message, "sender", example.IDENTITY.peer),
    ],
)
def test_a_malformed_batch_is_refused(change):
    (batch,) = join_announcements([announced(1), announced(2)])
    message = pb.Announcement.FromString(batch.to_bytes())
    change(message)
    with pytest.raises(RecordError) as caught:
        open_announcement(message.SerializeToString())
    assert caught.value.reason == "malformed"
