"""False groups: the reason of their refusal, and the trust_level of their sender. Valid groups in unusual forms."""

import asyncio
import os
import time
from functools import partial

import pytest

from ftis_node import __version__
from tests.attacks.false_groups import (
    CHANGES,
    FALSE_GROUPS,
    NUM_GROUPS,
    FalseGroup,
    copied_completions,
    padded_envelope,
    used_numbers,
    with_claimed_weights,
    with_special_tokens,
    with_wrong_reward,
)
from tests.attacks.member import Member, Scene, change_completion
from tests.attacks.victim import Victim, wait_until_continued

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]

CHARGED_FOR_S, ANNOUNCED_EVERY_S = 8.0, 0.5
NUM_PADDED = 40
BOMB_MARGIN_BYTES = 50 << 20


async def a_false_claim_by_a_peer_with_this_nodes_releases_is_banned(scene: Scene) -> None:
    """Without a record, or with other releases, the same claim is refused without a charge."""
    victim = scene.victim

    async def send(name: str) -> None:
        change, reason, _ = CHANGES[name]
        async with scene.member() as attacker:
            await attacker.publish_record(grader=f"ftis-node {__version__}")
            await attacker.offer(*(change(attacker.group()) for _ in range(NUM_GROUPS)))
            await victim.until(lambda: victim.is_banned(attacker.peer_id))
            row = await victim.row(attacker.peer_id)
            assert row["groups_accepted"] == 0
            assert row["groups_refused"][reason] >= 3

    names = [name for name, (_, reason, _) in CHANGES.items() if reason in ("reward_mismatch", "prompt_mismatch")]
    assert len(names) == 3
    await scene.at_once({name: partial(send, name) for name in names})


async def a_peer_with_another_grader_is_named_and_not_charged(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        await attacker.publish_record(grader="math-verify 0.8.0")
        await attacker.offer(*(with_wrong_reward(attacker.group()) for _ in range(NUM_GROUPS)))
        row = await victim.until_judged(attacker.peer_id, NUM_GROUPS)
        assert row["groups_refused"] == {"reward_mismatch": NUM_GROUPS}
        assert (row["trust_level"], row["score"]) == ("good", 0)
        assert f"grades with math-verify 0.8.0, this node with ftis-node {__version__}" in victim.log_text()


async def special_tokens_in_an_answer_score_zero(scene: Scene) -> None:
    """The same groups with the reward 0 are accepted: a base model may write a special token by chance."""
    victim = scene.victim
    async with scene.member() as attacker:
        groups = [change_completion(with_special_tokens(attacker.group()), 0, reward=0.0) for _ in range(2)]
        await attacker.offer(*groups)
        row = await victim.until_judged(attacker.peer_id, len(groups))
        assert (row["groups_accepted"], row["groups_refused"]) == (len(groups), {})


async def completions_copied_from_an_earlier_group_are_refused(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        await attacker.announce_until_requested(copied_completions(attacker))
        row = await victim.until_judged(attacker.peer_id, NUM_GROUPS + 1)
        assert row["groups_accepted"] == 1
        assert row["groups_refused"] == {"duplicate_completions": NUM_GROUPS}
        assert row["trust_level"] == "probation", (
            "the node cannot know which group is the original, so it bans no sender"
        )


async def a_replayed_envelope_is_not_admitted_again(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
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


async def a_sequence_number_is_used_once(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        await attacker.announce_until_requested(used_numbers(attacker))
        row = await victim.until_judged(attacker.peer_id, NUM_GROUPS)
        assert row["groups_accepted"] == 1
        assert set(row["groups_refused"]) <= {"sequence_reused", "duplicate"}


async def two_bodies_under_one_number_in_one_answer_are_refused(scene: Scene) -> None:
    """The announcements have other numbers, so both are pulled, and validated before the first is on disk."""
    victim = scene.victim
    async with scene.member() as attacker:
        await attacker.offer(attacker.group())
        pairs = [attacker.group(number=number) for number in range(100, 100 + NUM_GROUPS // 2) for _ in range(2)]
        await attacker.offer(*map(attacker.envelope, pairs))
        row = await victim.until_judged(attacker.peer_id, 1 + len(pairs))
        assert row["groups_accepted"] == 1 + len(pairs) // 2
        assert row["groups_refused"] == {"sequence_reused": len(pairs) // 2}


async def a_body_sent_twice_is_one_group(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:

        async def twice(ids: list[bytes]) -> list[bytes]:
            return [*await attacker._lookup(ids)] * 2

        attacker.gossip.serve(twice)
        await attacker.offer(attacker.group(), attacker.group())  # two requested ids: a limit of two bodies
        row = await victim.until_judged(attacker.peer_id, 1)
        assert row["groups_accepted"] <= 2
        assert "duplicate_completions" not in row["groups_refused"]


async def one_body_that_does_not_parse_is_charged_once(scene: Scene) -> None:
    """A new honest peer with a bug keeps announcing one malformed group."""
    victim = scene.victim
    async with scene.member() as attacker:
        group_id = os.urandom(32)
        claim = attacker.claim(group_id, os.urandom(500))
        await attacker.announce_until_requested({group_id: claim})
        await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "parse"))
        ends_at = time.monotonic() + CHARGED_FOR_S
        while time.monotonic() < ends_at:
            await attacker.gossip.announce(claim)
            await asyncio.sleep(ANNOUNCED_EVERY_S)
        assert await victim.num_refused_of(attacker.peer_id, "parse") == 1
        assert not await victim.is_banned(attacker.peer_id)


async def a_body_above_the_runs_bound_is_not_read_to_its_end(scene: Scene) -> None:
    """The announced size is too small. A body with its true, large size is not requested."""
    victim = scene.victim
    async with scene.member() as attacker:
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


async def padded_groups_within_the_bound_are_admitted(scene: Scene) -> None:
    victim = scene.victim
    async with scene.member() as attacker:
        await attacker.offer(*(padded_envelope(attacker) for _ in range(NUM_PADDED)))
        await victim.until_above(NUM_PADDED - 1, lambda: victim.num_accepted(attacker.peer_id))


ATTACKS = (
    special_tokens_in_an_answer_score_zero,
    completions_copied_from_an_earlier_group_are_refused,
    a_replayed_envelope_is_not_admitted_again,
    a_sequence_number_is_used_once,
    two_bodies_under_one_number_in_one_answer_are_refused,
    a_body_sent_twice_is_one_group,
    one_body_that_does_not_parse_is_charged_once,
    a_body_above_the_runs_bound_is_not_read_to_its_end,
    padded_groups_within_the_bound_are_admitted,
    a_peer_with_another_grader_is_named_and_not_charged,
    a_false_claim_by_a_peer_with_this_nodes_releases_is_banned,
)


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
    others = {attack.__name__: partial(attack, scene) for attack in ATTACKS}
    await scene.at_once({name: partial(send, kind) for name, kind in kinds.items()} | others)
    for reason in {kind.reason for kind in kinds.values()}:
        await victim.until(lambda reason=reason: victim.num_refused(reason))
    assert victim.resident_bytes() - resident < BOMB_MARGIN_BYTES, "a zip bomb was unpacked"
    await wait_until_continued(victim, honest)
    after = await victim.row(honest.peer_id)
    assert (after["groups_refused"], after["score"] >= row["score"]) == ({}, True)
    mismatch = (await victim.status())["learner"].get("mismatch_kl")
    before = status["learner"].get("mismatch_kl") or 0.0
    assert not mismatch or mismatch < before + 1.0, "the false claims changed the measured mismatch"
