"""Hosts that are no members visit over real connections. The victim keeps training and admitting honest groups.

The hosts have other key types, run other programs, or send nothing.
"""

from functools import partial

import pytest

from tests.attacks.victim import wait_until_continued
from tests.attacks.visitors.host import Target
from tests.attacks.visitors.visits import AUTHORS, VISITS, js_missing

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]


async def test_visits_of_other_hosts_have_no_effect(victim, scene, honest):
    target = Target.of((await victim.addresses())[0], scene.maker)

    async def num_foreign():
        """Return how many messages had an author whose key is not Ed25519."""
        return int((await victim.status())["swarm"]["non_ed25519"].get("message", 0))

    async def make(visit):
        assert await visit(target, scene.folder()) > 0, "the visitor did nothing"

    async def announce():
        for author in AUTHORS.values():
            before = await num_foreign()
            await make(author)
            await victim.until_above(before, num_foreign)

    visits = {name: partial(make, visit) for name, visit in VISITS.items()}
    await scene.at_once({"RSA authors": announce, **visits})
    await wait_until_continued(victim, honest)


@pytest.mark.skipif(bool(js_missing()), reason=js_missing())
def test_a_js_host_is_among_the_visitors():
    assert "js-libp2p host" in VISITS
