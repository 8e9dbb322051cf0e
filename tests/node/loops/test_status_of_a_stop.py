"""The status of a stopping node, whose learner ends or saves when the test permits it."""

import asyncio

from ftis_node.config.node import NodeSettings
from ftis_node.node import daemon
from ftis_node.node.context import NodeState
from ftis_node.node.daemon import run_node
from ftis_node.node.http_api.routes import MonitoringApi
from ftis_node.node.startup.previous_run import read_last_status
from ftis_node.node.worker_interfaces import NullLearner
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from tests.node.nodes import components
from tests.waiting import eventually


class SlowLearner(NullLearner):
    """A learner that ends after `may_end` and saves after `may_save`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.has_begun, self.may_end, self.may_save = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()

    async def save(self) -> int:
        await self.may_save.wait()
        return 0


async def test_a_finished_node_waits_for_its_last_checkpoint_then_for_its_learner(tmp_path, monkeypatch):
    """The scorers start no process, because the task does not need one."""
    learner, observed, done = SlowLearner(), MonitoringApi(), asyncio.Event()

    async def until_done(wiring, *, last_step):
        await done.wait()

    monkeypatch.setattr(daemon, "loops_of_role", lambda wiring: {})
    monkeypatch.setattr(daemon, "_until_done", until_done)
    settings = NodeSettings(model="m", dtype="float32")
    scorers = {name: IsolatedScorer(load_task("arithmetic")) for name in ("scorer", "new_peers_scorer")}
    with components(tmp_path, settings=settings, learner=learner, **scorers) as node:
        await node.gossip.start()
        work = asyncio.create_task(run_node(node, steps=None, observed=observed))
        await learner.has_begun.wait()
        assert observed.newest().node.state == "running"
        status = observed.status
        assert status is not None
        done.set()
        await eventually(lambda: status.latest.node.waits_for.endswith("the checkpoint of the last step"))
        assert status.latest.node.state == "stopping"
        learner.may_save.set()
        await eventually(lambda: status.latest.node.waits_for == "")
        assert status.latest.node.state == "stopping"
        learner.may_end.set()
        await work
        saved = read_last_status(node.home).node
        assert (saved.state, saved.end, saved.waits_for) == ("stopped", "finished", "")


async def test_a_last_step_that_the_learner_has_lost_is_reported(tmp_path, caplog):
    with components(tmp_path, learner=NullLearner(0), state=NodeState(step=3)) as node:
        await daemon._save(node)
    assert "the last step is not saved: only step 0 of 3 is" in caplog.text
