"""Hosts that are no members visit over real connections. The victim keeps training and admitting honest groups.

The hosts have other key types, run other programs, or send nothing.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.attacks.member import Member, Scene
from tests.attacks.victim import Victim, wait_until_continued
from tests.attacks.visitors.host import Target
from tests.attacks.visitors.visits import AUTHORS, VISITS, Visit, js_missing

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]


async def test_visits_of_other_hosts_have_no_effect(victim: Victim, scene: Scene, honest: Member) -> None:
    target = Target.of((await victim.addresses())[0], scene.maker)

    async def num_foreign() -> int:
        """Return how many messages had an author whose key is not Ed25519."""
        return int((await victim.status())["swarm"]["non_ed25519"].get("message", 0))

    async def make(visit: Visit) -> None:
        assert await visit(target, scene.folder()) > 0, "the visitor did nothing"

    async def announce() -> None:
        for author in AUTHORS.values():
            before = await num_foreign()
            await make(author)
            await victim.until_above(before, num_foreign)

    visits = {name: partial(make, visit) for name, visit in VISITS.items()}
    await scene.at_once({"RSA authors": announce, **visits})
    await wait_until_continued(victim, honest)


@pytest.mark.skipif(bool(js_missing()), reason=js_missing())
def test_a_js_host_is_among_the_visitors() -> None:
    assert "js-libp2p host" in VISITS
