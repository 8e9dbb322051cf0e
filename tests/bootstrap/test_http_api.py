"""The page of a bootstrap node."""

from types import SimpleNamespace

from ftis_node.bootstrap import http_api
from ftis_node.swarm.overview import RunSummary, SwarmView


async def test_a_bootstrap_node_with_a_run_shows_no_other_one(monkeypatch):
    shown = []
    monkeypatch.setattr(http_api, "swarm_page", lambda views, **_: shown.extend(view.run.id for view in views) or "")
    for pinned in ((), ("b" * 32,)):
        api = http_api.BootstrapApi(SimpleNamespace(pinned_runs=pinned, num_runs_omitted=3, addresses=[]))
        api._views = [SwarmView(RunSummary(run_id * 32), 0.0) for run_id in "ab"]
        await api.show_page(None)
    assert shown == ["a" * 32, "b" * 32, "b" * 32]
