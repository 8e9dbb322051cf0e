"""Visitors of other kinds, over real connections: whatever they are, the victim trains on and honest groups arrive.

A host's key need not be Ed25519, its programs need not be this one, and it need not say anything.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.attacks.victim import goes_on
from tests.attacks.visitors import js_host
from tests.attacks.visitors.connections import ComesAndGoes, ManyStreams, SaysNothing
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
        ForeignAuthor(by_meeting_point=True),
        HivemindClient(),
        Crawler(),
        PlainHost(),
        js_host.JsHost(),
        ManyStreams(),
        SaysNothing(),
        ComesAndGoes(),
    )
}


@pytest.mark.parametrize("visitor", list(VISITORS.values()), ids=list(VISITORS))
async def test_a_visitor_of_another_kind_changes_nothing(
    victim: Victim, honest: Member, maker: GroupMaker, sockets: Path, visitor: Visitor
) -> None:
    if isinstance(visitor, js_host.JsHost) and (why := js_host.missing()):
        pytest.skip(why)
    target = Target.of((await victim.addresses())[0], maker)
    num_before = await _foreign_messages(victim)
    assert await visitor.visit(target, sockets / f"v{next(NUMBERS)}") > 0, "the visitor did what it came for"
    await goes_on(victim, honest)
    if isinstance(visitor, ForeignAuthor):
        assert await _foreign_messages(victim) > num_before, "its announcements came as far as the node"


async def _foreign_messages(victim: Victim) -> int:
    """Messages whose author's key is not Ed25519."""
    return int((await victim.status())["swarm"]["non_ed25519"].get("message", 0))
