"""Hosts that are no members visit over real connections. The victim keeps training and admitting honest groups.

The hosts have other key types, run other programs, or send nothing.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.attacks.victim import wait_until_continued
from tests.attacks.visitors import js_host
from tests.attacks.visitors.connections import ManyStreams, ReconnectingPeer, SilentPeer
from tests.attacks.visitors.crawlers import Crawler, HivemindClient, PlainHost
from tests.attacks.visitors.foreign import ForeignAuthor, ForeignKeyHost
from tests.attacks.visitors.host import FOREIGN, Target

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stubs.group_maker import GroupMaker
    from tests.attacks.member import Member
    from tests.attacks.victim import Victim
    from tests.attacks.visitors.host import Visitor

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUMBERS = itertools.count()
VISITORS: dict[str, Visitor] = {
    visitor.name: visitor
    for visitor in (
        *map(ForeignKeyHost, FOREIGN),
        ForeignAuthor(),
        ForeignAuthor(is_forwarded=True),
        HivemindClient(),
        Crawler(),
        PlainHost(),
        js_host.JsHost(),
        ManyStreams(),
        SilentPeer(),
        ReconnectingPeer(),
    )
}


@pytest.mark.parametrize("visitor", list(VISITORS.values()), ids=list(VISITORS))
async def test_a_visit_of_another_host_has_no_effect(
    victim: Victim, honest: Member, maker: GroupMaker, sockets: Path, visitor: Visitor
) -> None:
    if isinstance(visitor, js_host.JsHost) and (missing := js_host.missing()):
        pytest.skip(missing)
    target = Target.of((await victim.addresses())[0], maker)
    num_before = await _foreign_messages(victim)
    assert await visitor.visit(target, sockets / f"v{next(NUMBERS)}") > 0, "the visitor did nothing"
    await wait_until_continued(victim, honest)
    if isinstance(visitor, ForeignAuthor):
        assert await _foreign_messages(victim) > num_before, "its announcements did not reach the node"


async def _foreign_messages(victim: Victim) -> int:
    """Return how many messages had an author whose key is not Ed25519."""
    return int((await victim.status())["swarm"]["non_ed25519"].get("message", 0))
