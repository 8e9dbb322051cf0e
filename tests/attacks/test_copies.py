"""Copies, and groups without a signal: what they earn, and what they do to others."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ftis_node.records.envelope import open_announcement
from ftis_node.records.group import Group
from ftis_node.replay.lifecycle import ReleaseReason
from tests.attacks.member import Member
from tests.attacks.victim import Victim

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_GROUPS = 6
NUM_TOKENS = 44
NUM_WITHOUT_SIGNAL = 40
KNOWN_SCORE = 1.0


def long_groups(member: Member) -> list[Group]:
    return [member.group(num_tokens=NUM_TOKENS) for _ in range(NUM_GROUPS)]


def copies(thief: Member, groups: Sequence[Group], *, change: bool = True) -> list[Group]:
    """Return the groups as the thief's own, with another last token in each long completion."""
    words, made = thief.maker._words, []
    for group in groups:
        completions = []
        for completion in group.completions:
            ids = completion.token_ids.copy()
            if change and len(ids) == NUM_TOKENS:
                ids[-1] = words[int(np.flatnonzero(words == ids[-1])[0]) - 1]
            completions.append(replace(completion, token_ids=ids))
        thief.number += 1
        changes: dict[str, Any] = {"sender": thief.peer_id, "number": thief.number, "created_at": time.time()}
        made.append(replace(group.with_completions(completions), **changes))
    return made


def assert_undecided(row: dict[str, Any]) -> None:
    """Assert that all groups of a peer were refused as copies of unknown origin, without a charge."""
    assert row["groups_refused"] == {"duplicate_undecided": NUM_GROUPS}
    assert (row["score"], row["trust_level"]) == (0.0, "good")


async def copies_with_a_changed_token_are_refused_and_earn_nothing(victim: Victim, original: Member, thief: Member):
    groups = long_groups(original)
    await original.offer(*groups)
    assert (await victim.until_judged(original.peer_id, NUM_GROUPS))["groups_accepted"] == NUM_GROUPS
    await thief.offer(*copies(thief, groups))
    assert_undecided(await victim.until_judged(thief.peer_id, NUM_GROUPS))  # the order of two announcements is not sure


async def a_thief_that_delivers_first_loses_to_the_group_that_was_announced_first(
    victim: Victim, original: Member, thief: Member
):
    """The original's uplink is slow: it delivers after the thief, which has fetched and signed its groups."""
    groups = long_groups(original)
    uplink = SlowUplink(victim, original, groups)
    await uplink.announce()
    await thief.offer(*copies(thief, groups, change=False))
    assert (await victim.until_judged(thief.peer_id, NUM_GROUPS))["groups_accepted"] == NUM_GROUPS
    row = await uplink.deliver()
    assert (row["groups_accepted"], row["groups_refused"]) == (NUM_GROUPS, {})
    assert (await victim.row(original.peer_id))["trust_level"] == "good"

    async def has_no_credit() -> bool:
        return bool((await victim.row(thief.peer_id))["score"] == 0.0)

    await victim.until(has_no_credit)
    copied = {event["group"] for event in victim.node.events("released") if event["reason"] == ReleaseReason.COPY}
    stolen = {event["group"] for event in victim.node.events("admitted") if event["sender"] == thief.peer_id}
    trained = {event["group"] for event in victim.node.events("taken") if event["sender"] == thief.peer_id}
    assert copied & stolen == stolen - trained, "a copy waits for a step no longer"


async def a_peer_whose_announcements_a_relay_stalls_is_refused_without_a_charge(
    victim: Victim, original: Member, thief: Member
):
    groups = long_groups(original)
    await thief.offer(*copies(thief, groups))
    await victim.until_judged(thief.peer_id, NUM_GROUPS)
    await original.offer(*groups)
    assert_undecided(await victim.until_judged(original.peer_id, NUM_GROUPS))


async def a_known_thief_harms_no_new_peer_and_a_new_thief_no_known_one(victim: Victim, original: Member, thief: Member):
    async def is_known() -> bool:
        await thief.offer(*(thief.group() for _ in range(8)))
        return bool((await victim.row(thief.peer_id))["score"] >= KNOWN_SCORE)

    await victim.until(is_known, within_s=120)
    row = await victim.row(thief.peer_id)
    num_before = row["groups_accepted"] + sum(row["groups_refused"].values())
    groups = long_groups(original)
    uplink = SlowUplink(victim, original, groups)
    await uplink.announce()
    await thief.offer(*copies(thief, groups))
    score = (await victim.until_judged(thief.peer_id, num_before + NUM_GROUPS))["score"]
    assert_undecided(await uplink.deliver())  # a newcomer's word against a known peer's
    assert (await victim.row(thief.peer_id))["score"] >= score - 0.01, "nor can a newcomer harm a known peer"


async def groups_without_a_signal_earn_nothing(victim: Victim, attacker: Member):
    await attacker.offer(*(attacker.group(is_solved=False) for _ in range(NUM_WITHOUT_SIGNAL)))
    row = await victim.until_judged(attacker.peer_id, NUM_WITHOUT_SIGNAL)
    assert (row["groups_accepted"], row["score"]) == (NUM_WITHOUT_SIGNAL, 0.0)


class SlowUplink:
    """A member whose announcements arrive at once, and whose groups arrive after `deliver` only."""

    def __init__(self, victim: Victim, member: Member, groups: Sequence[Group]) -> None:
        self._victim, self._member, self._num_groups = victim, member, len(groups)
        self._delivers = asyncio.Event()
        first, *more = map(open_announcement, member.claims(*groups).values())
        self._message = replace(first, more=tuple(more)).to_bytes()
        member.gossip.serve(self._lookup)

    async def announce(self) -> None:
        """Return when the victim has read all announcements: one message has them, and it has requested a group."""
        await self._victim.until(self._requested)

    async def deliver(self) -> dict[str, Any]:
        """Serve the groups, announce them again in case a pull timed out, and return the row after their judgment."""
        self._delivers.set()
        return await self._victim.until_judged(self._member.peer_id, self._num_groups, repeat=self._requested)

    async def _requested(self) -> set[bytes]:
        await self._member.gossip.announce(self._message)
        return self._member.requested_ids

    async def _lookup(self, ids: Sequence[bytes]) -> list[bytes]:
        bodies = await self._member._lookup(ids)
        await self._delivers.wait()
        return bodies


async def test_copies_earn_nothing_and_harm_no_peer(scene, honest):
    async def attack(victim, thief, theft):
        async with scene.member() as original:
            await theft(victim, original, thief)

    thefts = (
        copies_with_a_changed_token_are_refused_and_earn_nothing,
        a_thief_that_delivers_first_loses_to_the_group_that_was_announced_first,
        a_peer_whose_announcements_a_relay_stalls_is_refused_without_a_charge,
        a_known_thief_harms_no_new_peer_and_a_new_thief_no_known_one,
    )
    attacks = {theft.__name__: partial(scene.attack, attack, theft) for theft in thefts}
    await scene.at_once(attacks | scene.by_members(groups_without_a_signal_earn_nothing))
