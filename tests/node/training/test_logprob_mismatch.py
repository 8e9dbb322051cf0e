"""The daemon's part of the mismatch measurement: which group the learner checks, and when a warning is logged."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ftis_node.errors import WorkerDiedError
from ftis_node.learner.groups import unpack_train_group
from ftis_node.learner.messages import StepReport
from ftis_node.node.loops.logprob_checks import sampled_by
from ftis_node.node.training.logprob_mismatch import LIMITS, warning_of
from ftis_node.node.wiring import Wiring
from ftis_node.node.worker_interfaces import NullLearner
from ftis_node.validation import Accepted
from tests.conftest import make_group
from tests.node.nodes import components, events_of
from tests.replay.test_buffer import accepted


def _measured(kl: float | None, share: float | None) -> StepReport:
    return StepReport(
        step=8, policy_version=8, mismatch_kl=kl, mismatch_share=share, mismatch_tokens=288, mismatch_version=7
    )


async def test_a_reporter_warns_once_and_keeps_the_last_measurement(tmp_path, caplog):
    high = _measured(0.5, 1.0)
    with components(tmp_path) as node, caplog.at_level("WARNING"):
        reporter = Wiring(node).reporter
        for report in (_measured(0.0, 0.0), high, high, _measured(None, None)):
            await reporter.note(report)
        assert [event["event"] for event in events_of(node)] == ["step", "step", "mismatch", "step", "step"]
        assert node.context.counters.mismatch_report is high
    assert [record.message for record in caplog.records] == [warning_of(high, LIMITS["float32"])]


class _Learner(NullLearner):
    """A learner that records the groups that it checks; with `fails`, the first check fails."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__(parameters=1)
        self.sent: list[tuple[int, int]] = []
        self._fails = fails

    async def check(self, group: Any) -> None:
        sent = unpack_train_group(group)
        self.sent.append((sent.policy_version, sent.policy_version_newest))
        if self._fails and len(self.sent) == 1:
            raise WorkerDiedError("the learner worker was killed")


def test_completions_sampled_across_an_update_are_left_out(identity):
    group = make_group(identity, versions=(3, 3))
    whole, mixed = group.completions
    spread = group.with_completions((whole, replace(mixed, policy_version_newest=4)))
    part = sampled_by(spread, 3)
    assert part == group.with_completions((whole,))
    assert (part.policy_version, part.policy_version_newest) == (3, 3)
    assert sampled_by(spread, 4) is None


@pytest.mark.parametrize("fails", [False, True])
async def test_the_first_group_of_each_version_is_checked(tmp_path, identity, fails):
    stored: asyncio.Queue[Accepted] = asyncio.Queue()
    learner = _Learner(fails=fails)
    with components(tmp_path, learner=learner) as node:
        wiring = Wiring(node)
        wiring.intake.next_own = stored.get
        running = asyncio.create_task(wiring.mismatch_loop.run())
        for learners, oldest, newest in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 2), (1, 1, 1), (1, 1, 1)]:
            node.context.state.policy_version = learners
            stored.put_nowait(accepted(identity, 1, versions=(oldest, newest)))
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        assert (learner.sent, len(events_of(node, "check_failed"))) == ([(0, 0), (1, 1)], fails)


async def test_the_status_has_the_mean_shares_of_the_last_steps(tmp_path):
    """A step of few groups without a signal is no reason to advise another task."""
    with components(tmp_path) as node:
        wiring = Wiring(node)
        for step, share in enumerate((0.5, *(0.25,) * 9, 1.0, None), start=1):
            report = StepReport(step=step, policy_version=step, no_signal_fraction=share, cut_fraction=0.0)
            await wiring.reporter.note(report)
        learner = (await wiring.status_loop().refresh()).learner
        assert learner.no_signal_fraction == pytest.approx((8 * 0.25 + 1) / 9)  # of ten steps, one has no own groups
        assert learner.cut_fraction == 0.0
