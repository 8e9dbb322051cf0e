"""Hosts that are no members visit over real connections. The victim keeps training and admitting honest groups.

The hosts have other key types, run other programs, or send nothing.
"""

import asyncio
from functools import partial
from urllib.parse import urlsplit

import pytest

from ftis_node.config.home import Home
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


async def test_a_client_of_the_events_may_leave_early(victim):
    before = victim.log_text().count("Traceback")
    port = urlsplit(Home(victim.node.home).running_url() or "").port
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.readline()
        writer.transport.abort()
    await asyncio.sleep(2.0)  # the node sends a snapshot each second
    assert victim.log_text().count("Traceback") == before
