"""Hosts that are no members visit over real connections. The victim keeps training and admitting honest groups.

The hosts have other key types, run other programs, or send nothing.
"""

from functools import partial

import pytest

from tests.attacks.visitors.host import Target
from tests.attacks.visitors.visits import VISITS, js_missing

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(400)]


async def test_visits_of_other_hosts_have_no_effect(victim, scene, honest):
    target = Target((await victim.addresses())[0], scene.maker.manifest.run_id)

    async def make(visit):
        assert await visit(target, scene.folder()) > 0, "the visitor did nothing"

    await scene.at_once({name: partial(make, visit) for name, visit in VISITS.items()})
    await victim.until_continued()


@pytest.mark.skipif(bool(js_missing()), reason=js_missing())
def test_a_js_host_is_among_the_visitors():
    assert "js-libp2p host" in VISITS
