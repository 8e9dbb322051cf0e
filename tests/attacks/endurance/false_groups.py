"""Attackers that send false groups: the cases of `test_contents.py` and `test_bodies.py`, several per identity."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import pack_group
from ftis_node.records.identity import Identity
from tests.attacks import test_bodies, test_contents
from tests.attacks.member import padded_envelope, sign_body
from tests.attacks.test_weights_claims import UNPUBLISHED_VERSION, with_claimed_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.records.envelope import Envelope
    from tests.attacks.endurance.target import Scene
    from tests.attacks.member import Member

NUM_GROUPS = 8  # of one identity, more than a ban needs
WITHIN_S = 40.0
VALIDATED_WITHIN_S = 6.0
NUM_PADDED = 20

FALSE_CLAIMS = [*test_contents.FALSE_CLAIMS, "weights of the victim"]


async def _send(member: Member, claims: dict[bytes, bytes]) -> int:
    """Announce until the node has requested all groups or banned the member; return how many it requested."""
    with suppress(TimeoutError):
        await member.announce_until_requested(claims, within_s=WITHIN_S)
    num_requested = len(claims.keys() & member.requested_ids)
    await asyncio.sleep(VALIDATED_WITHIN_S if num_requested else 0)
    return num_requested


def _claims(member: Member, envelopes: list[Envelope]) -> dict[bytes, bytes]:
    return {one.id: member.claim(one.id, one.to_bytes()) for one in envelopes}


async def send_false_claims(name: str, scene: Scene) -> int:
    """Send well-formed groups with one false claim."""
    async with scene.member() as member:
        if name in test_contents.FALSE_CLAIMS:
            change = test_contents.FALSE_CLAIMS[name][0]
        else:
            change = partial(with_claimed_weights, weights_of=member.victim_id, version=UNPUBLISHED_VERSION)
        return await _send(
            member, _claims(member, [member.envelope(change(member.group())) for _ in range(NUM_GROUPS)])
        )


def _random_bodies(make: Callable[[], bytes], member: Member) -> dict[bytes, bytes]:
    return {one: member.claim(one, make()) for one in (os.urandom(32) for _ in range(NUM_GROUPS))}


def _changed(change: Callable[[pb.Body], object], codec: str, member: Member) -> dict[bytes, bytes]:
    envelopes = []
    for _ in range(NUM_GROUPS):
        body = pb.Body.FromString(pack_group(member.group(), codec=codec))
        change(body)
        envelopes.append(sign_body(body.SerializeToString(), member.identity))
    return _claims(member, envelopes)


def _of_another_sender(member: Member) -> dict[bytes, bytes]:
    """Return bodies of another sender with the member's signature."""
    owner = Identity.generate()
    bodies = [pack_group(member.maker.group(owner, number)) for number in range(1, NUM_GROUPS + 1)]
    return _claims(member, [sign_body(body, member.identity) for body in bodies])


def _unsolicited(member: Member) -> dict[bytes, bytes]:
    data = member.envelope(member.group(run_id="cd" * 16)).to_bytes()
    return {one: member.claim(one, data) for one in (os.urandom(32) for _ in range(NUM_GROUPS))}


def _add(fields: dict[str, object], body: pb.Body) -> None:
    body.MergeFrom(pb.Body(**fields))


BODIES: dict[str, Callable[[Member], dict[bytes, bytes]]] = {
    **{f"{name} for a body": partial(_random_bodies, make) for name, make in test_bodies.BODIES.items()},
    **{name: partial(_changed, make(value), "lossless") for name, (make, value, _) in test_bodies.BOMBS.items()},
    **{
        f"a body with {name}": partial(_changed, partial(_add, fields), "exact")
        for name, fields in test_bodies.FOREIGN_FIELDS.items()
    },
    "a codec that the run does not allow": partial(_changed, lambda body: None, "lossy"),
    "another peer's body": _of_another_sender,
    "unsolicited bodies": _unsolicited,
}


async def send_invalid_bodies(name: str, scene: Scene) -> int:
    """Send bodies that are no groups, or groups of another sender."""
    async with scene.member() as member:
        return await _send(member, await asyncio.to_thread(BODIES[name], member))


async def copied_completions(scene: Scene) -> int:
    """Send one valid group and copies of its completions."""
    async with scene.member() as member:
        first, now = member.group(), time.time()
        again = [replace(first, number=1 + at, created_at=now + at / 10) for at in range(1, NUM_GROUPS + 1)]
        return await _send(member, _claims(member, [member.envelope(one) for one in (first, *again)]))


async def used_numbers(scene: Scene) -> int:
    """Send different groups with one sequence number."""
    async with scene.member() as member:
        groups = [member.group(number=1) for _ in range(NUM_GROUPS)]
        return await _send(member, _claims(member, [member.envelope(one) for one in groups]))


async def forged_senders(scene: Scene) -> int:
    """Announce groups in the name of another sender."""
    async with scene.member() as member:
        owner = Identity.generate()
        claims = {}
        for number in range(1, NUM_GROUPS + 1):
            one = sign_body(pack_group(member.maker.group(owner, number)), member.identity)
            claims[one.id] = member.claim(one.id, one.to_bytes(), sender=owner.peer_id, number=number)
        return await _send(member, claims)


async def padded_groups(scene: Scene) -> int:
    """Send valid groups that are padded to the largest size."""
    async with scene.member() as member:
        envelopes = [padded_envelope(member.group(), member.identity) for _ in range(NUM_PADDED)]
        return await _send(member, _claims(member, envelopes))
