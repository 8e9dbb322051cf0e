"""Well-formed groups with false contents: the reason of their rejection, and the standing of their sender."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftis_node import __version__
from ftis_node.records.codec import pack_group
from tests.attacks.member import change_completion, sign_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.records.group import Group
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

DAY_S = 86400.0
NUM_GROUPS = 6  # five rejections ban, and reputation recovers a little between them


def _logprobs(value: float) -> Callable[[Group], Group]:
    def change(group: Group) -> Group:
        logprobs = group.completions[1].logprobs.copy()
        logprobs[0] = value
        return change_completion(group, logprobs=logprobs)

    return change


def _all_logprobs(value: float) -> Callable[[Group], Group]:
    def change(group: Group) -> Group:
        completions = [replace(one, logprobs=np.full_like(one.logprobs, value)) for one in group.completions]
        return group.with_completions(completions)

    return change


def _ids(value: int) -> Callable[[Group], Group]:
    def change(group: Group) -> Group:
        ids = group.completions[1].token_ids.copy()
        ids[0] = value
        return change_completion(group, token_ids=ids)

    return change


def _sampled(group: Group, **changes: float) -> Group:
    return replace(group, sampling=replace(group.sampling, **changes))


def _with_special_tokens(group: Group) -> Group:
    """Return the group with 20 special tokens, which no text shows, after the first token of its right answer."""
    right = group.completions[0]
    assert right.reward == 1.0
    ids = np.insert(right.token_ids, 1, [HIDDEN_ID] * NUM_HIDDEN).astype(np.int32)
    logprobs = np.insert(right.logprobs, 1, np.linspace(-1.0, -2.0, NUM_HIDDEN)).astype(np.float32)
    return change_completion(group, 0, token_ids=ids, logprobs=logprobs)


HIDDEN_ID, NUM_HIDDEN = 0, 20  # <|endoftext|>
BANNED, NOT_BANNED = True, False
FALSE_CLAIMS: dict[str, tuple[Callable[[Group], Group], str, bool]] = {
    "ids out of range": (_ids(2**31 - 1), "token_out_of_range", BANNED),
    "ids below zero": (_ids(-1), "token_out_of_range", BANNED),
    "NaN": (_logprobs(float("nan")), "logprobs", BANNED),
    "+inf": (_logprobs(float("inf")), "logprobs", BANNED),
    "-inf": (_logprobs(float("-inf")), "logprobs", BANNED),
    "positive log-probs": (_logprobs(0.5), "logprobs", BANNED),
    "constant log-probs": (_all_logprobs(-0.5), "logprobs", BANNED),
    "implausibly low log-probs": (_logprobs(-1e6), "logprobs", BANNED),
    "wrong claimed rewards": (lambda group: change_completion(group, reward=1.0), "reward_mismatch", NOT_BANNED),
    "a changed problem": (lambda group: replace(group, problem_hash=bytes(16)), "prompt_mismatch", NOT_BANNED),
    "special tokens in a right answer": (lambda group: _with_special_tokens(group), "reward_mismatch", NOT_BANNED),
    "an opening that is no think block": (lambda group: replace(group, opening="<answer>"), "opening", BANNED),
    "an end id inside an answer": (
        lambda group: replace(group, end_ids=(*group.end_ids, int(group.tokens.token_ids[0]))),
        "finish_reason",
        BANNED,
    ),
    "an end id out of range": (
        lambda group: replace(group, end_ids=(*group.end_ids, 2**32 - 1)),
        "token_out_of_range",
        BANNED,
    ),
    "groups of one": (lambda group: group.with_completions(group.completions[:1]), "group_size", BANNED),
    "a clock a day ahead": (lambda group: replace(group, created_at=time.time() + DAY_S), "clock_skew", NOT_BANNED),
    "a clock a day behind": (lambda group: replace(group, created_at=time.time() - DAY_S), "stale", NOT_BANNED),
    "another run": (lambda group: replace(group, run_id="ab" * 16), "run", BANNED),
    "a temperature of NaN": (lambda group: _sampled(group, temperature=float("nan")), "sampling", BANNED),
    "a top_p of NaN": (lambda group: _sampled(group, top_p=float("nan")), "sampling", BANNED),
}


@pytest.mark.parametrize(("change", "reason", "banned"), list(FALSE_CLAIMS.values()), ids=list(FALSE_CLAIMS))
async def test_a_false_claim_is_rejected_by_its_name(
    victim: Victim, attacker: Member, change: Callable[[Group], Group], reason: str, banned: bool
) -> None:
    before = await victim.num_refused(reason)
    groups = [change(attacker.group()) for _ in range(NUM_GROUPS)]
    await attacker.offer(*groups)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, reason))

    async def is_counted() -> bool:
        return await victim.num_refused(reason) > before

    await victim.until(is_counted)
    if banned:
        await victim.until(lambda: victim.is_banned(attacker.peer_id))
    else:
        await victim.until(lambda: _settled(victim, attacker, NUM_GROUPS))
        assert not await victim.is_banned(attacker.peer_id)
    assert (await victim.row(attacker.peer_id))["groups_accepted"] == 0


@pytest.mark.parametrize("claim", ["wrong claimed rewards", "a changed problem", "special tokens in a right answer"])
async def test_a_false_claim_by_a_peer_with_this_nodes_releases_is_banned(
    victim: Victim, attacker: Member, claim: str
) -> None:
    """Without a record, or with other releases, the same claim is refused without a charge."""
    change, reason, _ = FALSE_CLAIMS[claim]
    await attacker.publish_record(grader=f"ftis-node {__version__}")
    await attacker.offer(*(change(attacker.group()) for _ in range(NUM_GROUPS)))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    row = await victim.row(attacker.peer_id)
    assert row["groups_accepted"] == 0
    assert row["groups_refused"][reason] >= 3


async def test_a_peer_with_another_grader_is_named_and_not_charged(victim: Victim, attacker: Member) -> None:
    await attacker.publish_record(grader="math-verify 0.8.0")
    await attacker.offer(*(change_completion(attacker.group(), reward=1.0) for _ in range(NUM_GROUPS)))
    row = await victim.until(lambda: _settled(victim, attacker, NUM_GROUPS))
    assert row["groups_refused"] == {"reward_mismatch": NUM_GROUPS}
    assert (row["standing"], row["score"]) == ("good", 0)
    assert f"grades with math-verify 0.8.0, this node with ftis-node {__version__}" in victim.log_text()


async def test_special_tokens_in_an_answer_score_zero(victim: Victim, attacker: Member) -> None:
    """The same groups with the reward 0 are accepted: a base model may write a special token by chance."""
    groups = [change_completion(_with_special_tokens(attacker.group()), 0, reward=0.0) for _ in range(2)]
    await attacker.offer(*groups)
    row = await victim.until(lambda: _settled(victim, attacker, len(groups)))
    assert (row["groups_accepted"], row["groups_refused"]) == (len(groups), {})


async def test_completions_copied_from_an_earlier_group_are_rejected(victim: Victim, attacker: Member) -> None:
    """The copies arrive with the first group, so they are validated before it is on disk."""
    first = attacker.group()
    again = [
        replace(first, number=first.number + at, created_at=time.time() + at / 10) for at in range(1, NUM_GROUPS + 1)
    ]
    await attacker.offer(first, *again)
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "duplicate_completions"))
    row = await victim.until(lambda: _settled(victim, attacker, NUM_GROUPS + 1))
    assert row["groups_accepted"] == 1
    assert row["groups_refused"] == {"duplicate_completions": NUM_GROUPS}
    assert row["standing"] == "probation", "the node cannot know which group is the original, so it bans no sender"


async def _settled(victim: Victim, attacker: Member, count: int) -> dict[str, object] | None:
    row = await victim.row(attacker.peer_id)
    return row if row["groups_accepted"] + sum(row["groups_refused"].values()) >= count else None


async def test_a_replayed_envelope_is_not_admitted_again(victim: Victim, attacker: Member) -> None:
    group = attacker.group()
    envelope = attacker.envelope(group)
    await attacker.offer(envelope)
    await victim.until(lambda: _settled(victim, attacker, 1))
    attacker.requested_ids.clear()
    for _ in range(5):
        await attacker.gossip.announce(attacker.claim(envelope.id, envelope.to_bytes()))
        await asyncio.sleep(0.2)
    assert envelope.id not in attacker.requested_ids, "a stored group is not pulled again"
    await attacker.announce_until_requested(  # new ids, each with the old body
        {bytes([at]) * 32: attacker.claim(bytes([at]) * 32, envelope.to_bytes()) for at in range(NUM_GROUPS)}
    )
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "unsolicited"))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    assert (await victim.row(attacker.peer_id))["groups_accepted"] == 1


async def test_a_sequence_number_is_used_once(victim: Victim, attacker: Member) -> None:
    """The announcements have other numbers, because a node does not request a group with a used number."""
    number = attacker.group().number
    await attacker.offer(*(attacker.envelope(attacker.group(number=number)) for _ in range(3)))
    row = await victim.until(lambda: _settled(victim, attacker, 3))
    assert row["groups_accepted"] == 1
    assert set(row["groups_refused"]) <= {"sequence_reused", "duplicate"}


async def test_two_bodies_under_one_number_in_one_answer_are_rejected(victim: Victim, attacker: Member) -> None:
    """The announcements have other numbers, so both are pulled, and validated before the first is on disk."""
    await attacker.offer(attacker.group())
    pairs = [attacker.group(number=number) for number in range(100, 100 + NUM_GROUPS // 2) for _ in range(2)]
    envelopes = [attacker.envelope(group) for group in pairs]
    await attacker.announce_until_requested({one.id: attacker.claim(one.id, one.to_bytes()) for one in envelopes})
    row = await victim.until(lambda: _settled(victim, attacker, 1 + len(pairs)))
    assert row["groups_accepted"] == 1 + len(pairs) // 2
    assert row["groups_refused"] == {"sequence_reused": len(pairs) // 2}


async def test_a_body_sent_twice_is_one_group(victim: Victim, attacker: Member) -> None:
    lookup = attacker._lookup

    async def twice(ids: list[bytes]) -> list[bytes]:
        return [*await lookup(ids)] * 2

    attacker.gossip.serve(twice)
    await attacker.offer(attacker.group(), attacker.group())  # two requested ids: a limit of two bodies
    row = await victim.until(lambda: _settled(victim, attacker, 1))
    assert row["groups_accepted"] <= 2
    assert "duplicate_completions" not in row["groups_refused"]


async def test_another_peers_body_with_a_new_signature_is_rejected(
    victim: Victim, attacker: Member, honest: Member
) -> None:
    score = (await victim.row(honest.peer_id))["score"]
    bodies = [pack_group(honest.maker.group(honest.identity, 10**6 + at)) for at in range(NUM_GROUPS)]
    await attacker.offer(*(sign_body(body, attacker.identity) for body in bodies))
    await victim.until(lambda: victim.num_refused_of(attacker.peer_id, "signature"))
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    await victim.until(lambda: victim.num_refused("signature"))
    row = await victim.row(honest.peer_id)
    assert row["score"] >= score
    assert row["groups_refused"] == {}


async def test_a_forged_sender_harms_only_the_forger(victim: Victim, attacker: Member, honest: Member) -> None:
    """The announcements name the honest peer as sender, but the node charges the peer that announced them."""
    groups = [honest.maker.group(honest.identity, 2 * 10**6 + at) for at in range(NUM_GROUPS)]
    envelopes = [sign_body(pack_group(group), attacker.identity) for group in groups]
    claims = {
        one.id: attacker.claim(one.id, one.to_bytes(), sender=honest.peer_id, number=3 * 10**6) for one in envelopes
    }
    await attacker.announce_until_requested(claims)
    await victim.until(lambda: victim.is_banned(attacker.peer_id))
    assert await victim.num_refused_of(attacker.peer_id, "signature")
    accepted = (await victim.row(honest.peer_id))["groups_accepted"]

    async def continues() -> bool:
        row = await victim.row(honest.peer_id)
        return bool(row["groups_accepted"] > accepted and not row["groups_refused"] and row["standing"] == "good")

    await victim.until(continues)
