"""The scoring process: a text with any fault loses its own score only, and no process outlives its node."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import pytest_asyncio

from ftis_node.errors import TaskError, WorkerDiedError
from ftis_node.records.group import CompletionStatus
from ftis_node.tasks.arithmetic import ArithmeticTask
from ftis_node.tasks.base import MixedTask
from ftis_node.tasks.scorer import UNSCORED, IsolatedScorer, ScoringLimits
from ftis_node.tasks.scoring_worker import ScoringCost
from tests.tasks.hostile_task import DyingTask, HangingTask, HostileTask, UnpicklableTask

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCORED = CompletionStatus.SCORED
ITEM = HostileTask()[0]
LIMITS = ScoringLimits(time_limit_s=0.2, wall_limit_s=3.0, start_limit_s=60, memory_limit_bytes=1 << 30)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scorer():
    """One scorer for all tests: after any fault the next text must be scored."""
    async with IsolatedScorer(HostileTask(), limits=LIMITS) as scorer:
        yield scorer


async def test_scores_are_in_the_order_of_the_texts(scorer):
    assert await scorer.score(ITEM, ["1", "0.25", "0"]) == [(1.0, SCORED), (0.25, SCORED), (0.0, SCORED)]


async def test_a_text_that_ends_the_process_does_not_affect_others(scorer):
    assert await scorer.score(ITEM, ["0.5", "stuck", "exit", "0.75"]) == [
        (0.5, SCORED), UNSCORED, UNSCORED, (0.75, SCORED),
    ]  # fmt: skip


async def test_a_text_without_a_valid_reward_is_unscored(scorer):
    faults = ["memory", "raise", "nan", "1.5", "-1", "no number"]
    assert await scorer.score(ITEM, [*faults, "0.75"]) == [UNSCORED] * len(faults) + [(0.75, SCORED)]


@pytest.mark.parametrize(
    ("fault", "stopped", "lost"), [("stuck", 1, 0), ("segfault", 1, 0), ("sleep", 0, 1), ("raise", 0, 0)]
)
async def test_a_text_is_at_fault_only_for_its_processor_time(scorer, fault, stopped, lost):
    """`sleep` uses no processor time, like a text on a loaded machine: its sender is not at fault."""
    cost = ScoringCost()
    scores = await scorer.score(ITEM, ["0.5", fault, "0.75"], cost=cost)  # the cost of a whole group
    assert scores == [(0.5, SCORED), UNSCORED, UNSCORED if stopped + lost else (0.75, SCORED)]
    assert (cost.num_stopped, cost.num_lost) == (stopped, lost)
    assert cost.seconds == pytest.approx((stopped + lost) * LIMITS.time_limit_s, abs=0.2)


async def test_a_text_is_not_at_fault_if_another_process_kills_its_scorer(scorer):
    ((inverse, _),) = await scorer.score(ITEM, ["pid"])
    cost = ScoringCost()
    scoring = asyncio.create_task(scorer.score(ITEM, ["sleep"], cost=cost))
    await asyncio.sleep(0.3)
    os.kill(round(1 / inverse), signal.SIGKILL)
    assert await scoring == [UNSCORED]
    assert (cost.num_stopped, cost.num_lost) == (0, 1)


async def test_a_group_of_slow_texts_has_a_common_time_limit(caplog):
    limits = ScoringLimits(time_limit_s=0.1, wall_limit_s=5.0, group_limit_s=0.2)
    async with IsolatedScorer(HostileTask(), limits=limits) as scorer:
        await scorer.score(ITEM, ["1"])
        assert await scorer.score(ITEM, ["stuck"] * 50) == [UNSCORED] * 50
    assert "48 texts of one group took too long to score" in caplog.text


async def test_own_texts_have_a_part_of_the_limits():
    """A peer with a machine half as fast then still scores an own group within its limits."""
    limits = ScoringLimits(time_limit_s=60.0, wall_limit_s=5.0)
    async with IsolatedScorer(HostileTask(), limits=limits) as scorer:
        cost = ScoringCost(share=0.01)
        assert await scorer.score(ITEM, ["stuck"], cost=cost) == [UNSCORED]
        assert (cost.num_stopped, cost.num_lost) == (1, 0), "not stopped by its part of the processor time"


async def test_a_process_killed_while_idle_is_replaced(scorer):
    ((inverse, _),) = await scorer.score(ITEM, ["pid"])
    os.kill(round(1 / inverse), signal.SIGKILL)
    assert await scorer.score(ITEM, ["0.5"]) == [(0.5, SCORED)]


async def test_a_process_that_dies_at_the_start_is_a_worker_died_error():
    with pytest.raises(WorkerDiedError, match="does not stay alive"):
        async with IsolatedScorer(DyingTask(), limits=LIMITS) as scorer:
            await scorer.score(ITEM, ["1"])


async def test_a_process_that_is_never_ready_is_a_worker_died_error():
    limits = ScoringLimits(time_limit_s=0.1, wall_limit_s=0.1, start_limit_s=1)
    with pytest.raises(WorkerDiedError, match="not ready within 1 s"):
        async with IsolatedScorer(HangingTask(), limits=limits) as scorer:
            await scorer.score(ITEM, ["1"])


async def test_a_task_that_cannot_be_pickled_is_an_error():
    with pytest.raises(TaskError, match="'hostile' needs isolated scoring but cannot be pickled"):
        IsolatedScorer(UnpicklableTask())


async def test_a_task_without_isolation_is_scored_in_this_process():
    arithmetic = ArithmeticTask("train")
    before = _scoring_processes()
    async with IsolatedScorer(arithmetic) as scorer:
        assert await scorer.score(arithmetic[0], [arithmetic[0].answer, "x"]) == [(1.0, SCORED), (0.0, SCORED)]
        assert _scoring_processes() == before


async def test_an_error_of_a_task_without_isolation_is_contained():
    async with IsolatedScorer(HostileTask(isolate=False)) as scorer:
        assert await scorer.score(ITEM, ["0.5", "raise", "nan"]) == [(0.5, SCORED), UNSCORED, UNSCORED]


async def test_problems_of_evaluations_are_scored_but_not_resolved():
    train, test = ArithmeticTask("train"), ArithmeticTask("test")
    async with IsolatedScorer(train, scored_only=[test]) as scorer:
        assert await scorer.score(test[0], [test[0].answer]) == [(1.0, SCORED)]
        assert await scorer.resolve(train[0].ref) == train[0]
        with pytest.raises(KeyError):
            await scorer.resolve(test[0].ref)


async def test_each_part_of_a_mixture_is_scored_by_its_isolation():
    arithmetic = ArithmeticTask("train")
    mixture = MixedTask([arithmetic, HostileTask()], weights=[1, 1], name="arithmetic+hostile")
    async with IsolatedScorer(mixture, limits=LIMITS) as scorer:
        assert await scorer.score(mixture[1], ["raise", "0.5"]) == [UNSCORED, (0.5, SCORED)]
        assert await scorer.score(mixture[0], [arithmetic[0].answer]) == [(1.0, SCORED)]


async def test_close_ends_busy_processes_within_two_seconds():
    before = _scoring_processes()
    scorer = IsolatedScorer(HostileTask(), limits=ScoringLimits(time_limit_s=60))
    await scorer.score(ITEM, ["1"])
    waiting = asyncio.create_task(scorer.score(ITEM, ["stuck", "1"]))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await scorer.close()
    assert time.monotonic() - began < 2
    assert await waiting == [UNSCORED, UNSCORED]
    assert _scoring_processes() == before


async def test_a_cancelled_caller_is_cancelled(scorer):
    await scorer.score(ITEM, ["1"])
    waiting = asyncio.create_task(scorer.score(ITEM, ["sleep"]))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await scorer.score(ITEM, ["0.5"]) == [(0.5, SCORED)]


def _scoring_processes() -> set[psutil.Process]:
    """Return the spawned children, without Python's tracker of their semaphores."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "spawn_main" in " ".join(child.cmdline())}
