"""Messages that are no groups: malformed and too many announcements, questions, answers and directory records."""

import os
from functools import partial

import pytest

from tests.attacks.messages import ANNOUNCEMENTS, QUESTIONS, RECORDS, answer_with_the_largest_time, record

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_ANNOUNCEMENTS = 4_000  # a minute's limit is 600
NUM_AT_ONCE = 16


async def test_malformed_announcements_are_counted_and_ban(victim, scene, honest):
    async def announce(victim, attacker, payload, reason):
        async def is_banned():
            await attacker.gossip.announce(payload + os.urandom(4))
            return await victim.is_banned(attacker.peer_id)

        await victim.until(is_banned)
        assert await victim.num_refused_of(attacker.peer_id, reason) >= 5

    await scene.at_once({name: partial(scene.attack, announce, *case) for name, case in ANNOUNCEMENTS.items()})


async def test_of_thousands_of_announcements_of_nonexistent_groups_most_are_not_read(victim, attacker, honest):
    accepted, events = await victim.num_accepted(honest.peer_id), victim.file_bytes("events.jsonl*")
    first = os.urandom(32)
    await attacker.announce_until_requested({first: attacker.claim(first, b"", envelope_bytes=100)})
    await attacker.announce_nonexistent(NUM_ANNOUNCEMENTS, num_at_once=NUM_AT_ONCE)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "announcement_flood"))
    await victim.until_above(accepted, lambda: victim.num_accepted(honest.peer_id))
    grown = victim.file_bytes("events.jsonl*") - events
    assert grown < 100 * NUM_ANNOUNCEMENTS, "the event log has no line for each announcement"


async def test_a_malformed_question_is_counted_and_has_no_answer(victim, attacker):
    for number, question in enumerate(QUESTIONS.values()):
        answered = await attacker.gossip.request_backfill(attacker.victim_id, question)
        assert answered.items == ()
        await victim.until_above(number, lambda: victim.num_refused_of(attacker.peer_id, "question_parse"))


async def test_malformed_records_and_records_out_of_bounds_are_counted(scene, honest):
    async def publish(victim, attacker, reason, changes):
        data = b"\xffrandom" if changes is None else record(attacker, **changes)

        async def is_refused():
            await attacker.gossip.publish_record(data, ttl_s=60)
            return await victim.num_refused_of(attacker.peer_id, reason)

        await victim.until(is_refused)

    invalid = {name: ("record_malformed", changes) for name, changes in RECORDS.items()}
    invalid["random bytes"] = ("record_parse", None)
    await scene.at_once({name: partial(scene.attack, publish, *case) for name, case in invalid.items()})


async def test_answers_with_the_largest_time_are_refused(victim, scene, honest):
    async with scene.member(prepare=answer_with_the_largest_time) as attacker:
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "announcement_malformed"))
    await victim.until_continued()
