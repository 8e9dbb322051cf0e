"""The node counts a buffer of millions of groups outside the event loop."""

from ftis_node.node.storage import node_store
from tests.node.light_swarm import LightSwarm, manifest_of


async def test_no_query_of_the_event_loop_counts_all_groups(tmp_path, monkeypatch):
    async with LightSwarm(tmp_path, manifest_of()).node(1) as alice:
        status, store, queries = alice.wiring.status_loop(), alice.parts.store, list[str]()
        monkeypatch.setattr(node_store, "MAX_KEPT_GROUPS", 0)  # so that it also prunes
        store.reader._db.set_trace_callback(queries.append)
        await store.enforce_bounds(alice.parts.peers.share_cap())
        await status.refresh()
        assert queries
        assert [one for one in queries if "FROM groups" in one and "state = 'ready'" not in one] == []
