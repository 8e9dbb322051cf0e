"""The status of a stopping node, whose learner ends or saves when the test permits it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.node import daemon
from ftis_node.node.daemon import run_node
from ftis_node.node.http_api.monitoring_api import MonitoringApi
from ftis_node.node.protocols import NullLearner
from ftis_node.node.startup.startup_summary import read_last_status
from ftis_node.node.supervision.background import delay_forced_end, until_signalled
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from tests.node.nodes import components
from tests.waiting import eventually

SETTINGS = NodeSettings(model="m", dtype="float32", status_port=0)


class SlowLearner(NullLearner):
    """A learner that ends after `may_end` and saves after `may_save`; `reports` names what its end waits for."""

    def __init__(self, *, reports: str = "") -> None:
        super().__init__(0)
        self.reports = reports
        self.has_begun, self.may_end, self.may_save = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            if self.reports:
                delay_forced_end(self.reports)
            await self.may_end.wait()

    async def save(self) -> int:
        await self.may_save.wait()
        return 0


def scorers() -> dict[str, IsolatedScorer]:
    """Return real scorers; they start no process, because the task does not need one."""
    return {name: IsolatedScorer(load_task("arithmetic")) for name in ("scorer", "new_peers_scorer")}


async def prepare(node: NodeComponents, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Replace the loops of the role by a wait for the returned event, which ends the node's work."""
    done = asyncio.Event()

    async def until_done(wiring: Wiring, *, last_step: int | None) -> None:
        await done.wait()

    monkeypatch.setattr(daemon, "loops_of_role", lambda wiring: {})
    monkeypatch.setattr(daemon, "_until_done", until_done)
    await node.gossip.start()
    return done


@pytest.mark.parametrize("reports", ["", "the checkpoint of step 7"])
async def test_a_stopped_node_waits_for_its_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: str
) -> None:
    learner, observed = SlowLearner(reports=reports), MonitoringApi()
    with components(tmp_path, settings=SETTINGS, learner=learner, **scorers()) as node:
        await prepare(node, monkeypatch)
        work = asyncio.create_task(until_signalled(run_node(node, steps=None, observed=observed)))
        await learner.has_begun.wait()
        assert observed.newest().node.state == "running"
        status = observed.status
        assert status is not None
        assert status.latest.node.waits_for == ""
        asyncio.get_running_loop().call_soon(_raise_sigterm)
        await eventually(lambda: status.latest.node.waits_for == (reports or "learner worker"))
        assert (status.latest.node.state, status.latest.node.end) == ("stopping", "")
        assert (status.latest.health.ready, status.latest.health.waits_for) == (False, "the node is stopping")
        taken_at = status.latest.health.taken_at
        await eventually(lambda: status.latest.health.taken_at > taken_at)
        learner.may_end.set()
        await work
        saved = read_last_status(node.home).node
        assert (saved.state, saved.end, saved.waits_for) == ("stopped", "stopped", "")


async def test_a_finished_node_waits_for_its_last_checkpoint_then_for_its_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, observed = SlowLearner(), MonitoringApi()
    with components(tmp_path, settings=SETTINGS, learner=learner, **scorers()) as node:
        done = await prepare(node, monkeypatch)
        work = asyncio.create_task(run_node(node, steps=None, observed=observed))
        await learner.has_begun.wait()
        assert observed.newest().node.state == "running"
        status = observed.status
        assert status is not None
        done.set()
        await eventually(lambda: status.latest.node.waits_for == "the checkpoint of the last step")
        await eventually(lambda: status.latest.node.state == "stopping")
        learner.may_save.set()
        await eventually(lambda: status.latest.node.waits_for == "learner worker")
        learner.may_end.set()
        await work
        saved = read_last_status(node.home).node
        assert (saved.state, saved.end, saved.waits_for) == ("stopped", "finished", "")


def _raise_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)
