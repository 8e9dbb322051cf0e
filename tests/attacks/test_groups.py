"""False groups: the reason of their refusal, and the trust_level of their sender. Valid groups in unusual forms."""

import asyncio
import os
import time
from dataclasses import replace
from functools import partial

import pytest

from ftis_node import __version__
from tests.attacks.false_groups import (
    CHANGES,
    FALSE_GROUPS,
    NUM_GROUPS,
    FalseGroup,
    padded_envelope,
    with_claimed_weights,
    with_special_tokens,
    with_wrong_reward,
)
from tests.attacks.member import Member, change_completion
from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

NUM_PADDED = 40
BOMB_MARGIN_BYTES = 50 << 20


async def a_false_claim_by_a_peer_with_this_nodes_releases_is_banned(
    victim: Victim, attacker: Member, name: str
) -> None:
    """Without a record, or with other releases, the same claim is refused without a charge."""
    change, reason, _ = CHANGES[name]
    await attacker.publish_record(grader=f"ftis-node {__version__}")
    await attacker.offer(*(change(attacker.group()) for _ in range(NUM_GROUPS)))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    row = await victim.row(attacker.peer_id)
    assert row["groups_accepted"] == 0 and row["groups_refused"][reason] >= 3


async def a_peer_with_another_grader_is_named_and_not_charged(victim: Victim, attacker: Member) -> None:
    await attacker.publish_record(grader="math-verify 0.8.0")
    await attacker.offer(*(with_wrong_reward(attacker.group()) for _ in range(NUM_GROUPS)))
    row = await victim.until_judged(attacker.peer_id, NUM_GROUPS)
    assert row["groups_refused"] == {"reward_mismatch": NUM_GROUPS}
    assert (row["trust_level"], row["score"]) == ("good", 0)
    assert f"grades with math-verify 0.8.0, this node with ftis-node {__version__}" in victim.log_text()


async def special_tokens_in_an_answer_score_zero(victim: Victim, attacker: Member) -> None:
    """The same groups with the reward 0 are accepted: a base model may write a special token by chance."""
    groups = [change_completion(with_special_tokens(attacker.group()), 0, reward=0.0) for _ in range(2)]
    await attacker.offer(*groups)
    row = await victim.until_judged(attacker.peer_id, len(groups))
    assert (row["groups_accepted"], row["groups_refused"]) == (len(groups), {})


async def completions_copied_from_an_earlier_group_are_refused(victim: Victim, attacker: Member) -> None:
    """The copies arrive with the original and are validated before it is on disk."""
    first, now = attacker.group(), time.time()
    copies = [replace(first, number=first.number + at, created_at=now + at / 10) for at in range(1, NUM_GROUPS + 1)]
    await attacker.offer(first, *copies)
    row = await victim.until_judged(attacker.peer_id, NUM_GROUPS + 1)
    assert row["groups_accepted"] == 1
    assert row["groups_refused"] == {"duplicate_completions": NUM_GROUPS}
    assert row["trust_level"] == "probation", "the node cannot know which group is the original, so it bans no sender"


async def a_replayed_envelope_is_not_admitted_again(victim: Victim, attacker: Member) -> None:
    envelope = attacker.envelope(attacker.group())
    await attacker.offer(envelope)
    await victim.until_judged(attacker.peer_id, 1)
    attacker.requested_ids.clear()
    await attacker.gossip.announce(attacker.claim(envelope.id, envelope.to_bytes()))
    marker = attacker.group()
    await attacker.offer(marker)  # announced later, so the node has handled the replay
    assert envelope.id not in attacker.requested_ids, "a stored group is not pulled again"
    ids = [bytes([at]) * 32 for at in range(NUM_GROUPS)]  # each with the old body
    await attacker.announce_until_requested({one: attacker.claim(one, envelope.to_bytes()) for one in ids})
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "unsolicited"))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    assert await victim.num_accepted(attacker.peer_id) == 2


async def a_sequence_number_is_used_once(victim: Victim, attacker: Member) -> None:
    """The announcements of the groups have other numbers, so that the node requests all."""
    number = attacker.group().number
    await attacker.offer(*(attacker.envelope(attacker.group(number=number)) for _ in range(NUM_GROUPS)))
    row = await victim.until_judged(attacker.peer_id, NUM_GROUPS)
    assert row["groups_accepted"] == 1
    assert set(row["groups_refused"]) <= {"sequence_reused", "duplicate"}


async def two_bodies_under_one_number_in_one_answer_are_refused(victim: Victim, attacker: Member) -> None:
    """The announcements have other numbers, so both are pulled, and validated before the first is on disk."""
    await attacker.offer(attacker.group())
    pairs = [attacker.group(number=number) for number in range(100, 100 + NUM_GROUPS // 2) for _ in range(2)]
    await attacker.offer(*map(attacker.envelope, pairs))
    row = await victim.until_judged(attacker.peer_id, 1 + len(pairs))
    assert row["groups_accepted"] == 1 + len(pairs) // 2
    assert row["groups_refused"] == {"sequence_reused": len(pairs) // 2}


async def a_body_sent_twice_is_one_group(victim: Victim, attacker: Member) -> None:
    async def twice(ids: list[bytes]) -> list[bytes]:
        return [*await attacker._lookup(ids)] * 2

    attacker.gossip.serve(twice)
    await attacker.offer(attacker.group(), attacker.group())  # two requested ids: a limit of two bodies
    row = await victim.until_judged(attacker.peer_id, 1)
    assert row["groups_accepted"] <= 2
    assert "duplicate_completions" not in row["groups_refused"]


async def a_body_above_the_runs_bound_is_not_read_to_its_end(victim: Victim, attacker: Member) -> None:
    """The announced size is too small. A body with its true, large size is not requested."""
    before = await victim.num_errors("fetch_errors", "too_large")
    group_id, large_id, large = os.urandom(32), os.urandom(32), bytes(2 << 20)
    claim = attacker.claim(group_id, large, envelope_bytes=100)
    await attacker.gossip.announce(attacker.claim(large_id, large))
    await attacker.announce_until_requested({group_id: claim})
    await victim.until_above(before, lambda: victim.num_errors("fetch_errors", "too_large"))
    assert large_id not in attacker.requested_ids
    await victim.until_above(0, lambda: _num_failed_pulls(victim, attacker))


async def _num_failed_pulls(victim: Victim, attacker: Member) -> int:
    return int((await victim.row(attacker.peer_id)).get("failed_pulls", 0))


async def padded_groups_within_the_bound_are_admitted(victim: Victim, attacker: Member) -> None:
    await attacker.offer(*(padded_envelope(attacker) for _ in range(NUM_PADDED)))
    await victim.until_above(NUM_PADDED - 1, lambda: victim.num_accepted(attacker.peer_id))


ATTACKS = (
    special_tokens_in_an_answer_score_zero, completions_copied_from_an_earlier_group_are_refused,
    a_replayed_envelope_is_not_admitted_again, a_sequence_number_is_used_once,
    two_bodies_under_one_number_in_one_answer_are_refused, a_body_sent_twice_is_one_group,
    a_body_above_the_runs_bound_is_not_read_to_its_end, padded_groups_within_the_bound_are_admitted,
    a_peer_with_another_grader_is_named_and_not_charged,
)  # fmt: skip


async def test_each_kind_of_false_group_is_refused_by_its_name_and_bans_if_it_is_certain(victim, scene, honest):
    """None harms the honest peer, whose name two kinds misuse, fills the memory, or changes the measured mismatch."""

    async def send(kind):
        def misuse(member):
            member.other = honest.identity

        async with scene.member(prepare=misuse) as attacker:
            await attacker.announce_until_requested(await asyncio.to_thread(kind.make, attacker))
            await victim.until(lambda: victim.num_refused_of(attacker.peer_id, kind.reason))
            if kind.bans:
                await victim.until(lambda: victim.is_banned(attacker.peer_id))
            else:
                await victim.until_judged(attacker.peer_id, NUM_GROUPS)
                assert not await victim.is_banned(attacker.peer_id)
            assert await victim.num_accepted(attacker.peer_id) == 0

    status, resident, row = await victim.status(), victim.resident_bytes(), await victim.row(honest.peer_id)
    claim = partial(with_claimed_weights, version=status["model"]["policy_version"])
    current = FalseGroup(
        lambda member: member.claims(*(claim(member.group(), member.victim_id) for _ in range(NUM_GROUPS))),
        "weights_not_offered",
    )
    kinds = {**FALSE_GROUPS, "current weights of the victim": current}
    attacks = {name: partial(send, kind) for name, kind in kinds.items()} | scene.by_members(*ATTACKS)
    for name in ("wrong claimed rewards", "a changed problem", "special tokens in a right answer"):
        with_record = a_false_claim_by_a_peer_with_this_nodes_releases_is_banned
        attacks[f"{name} with a record"] = partial(scene.attack, with_record, name)
    await scene.at_once(attacks)
    for reason in {kind.reason for kind in kinds.values()}:
        await victim.until(lambda reason=reason: victim.num_refused(reason))
    assert victim.resident_bytes() - resident < BOMB_MARGIN_BYTES, "a zip bomb was unpacked"
    await victim.until_continued()
    after = await victim.row(honest.peer_id)
    assert (after["groups_refused"], after["score"] >= row["score"]) == ({}, True)
    mismatch = (await victim.status())["learner"].get("mismatch_kl")
    before = status["learner"].get("mismatch_kl") or 0.0
    assert not mismatch or mismatch < before + 1.0, "the false claims changed the measured mismatch"
