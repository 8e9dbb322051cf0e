"""Each loop of the daemon, driven for hours with an input that gives nothing: it yields, ends on cancel, writes little.

The loop's clock is a manual one. A loop that does not await would hang its test.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from bench.stubs.stub_node import StubTask, StubTokenizer
from ftis_node.config.node import NodeSettings
from ftis_node.errors import FtisError, TaskError, WorkerDiedError, WorkerTaskError
from ftis_node.node.daemon import loops_of_role
from ftis_node.node.loops.generate import GENERATION, MAX_ATTEMPTS
from ftis_node.node.loops.train import TRAINING
from ftis_node.node.training.evaluator import EVALUATION
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullGeneration, NullLearner
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import Identity
from ftis_node.tasks.base import TaskItem
from tests.loop_clock import LoopClock
from tests.node.nodes import ME, components, events_of
from tests.replay.test_buffer import accepted

ANN = Identity.from_seed(bytes([2]) * 32)
ROUNDS, ROUND_S = 150, 60.0
MAX_EVENTS = 40
NUMBERS = count(1)


class Engine(NullGeneration):
    """A generation worker that is up and fails on every call."""

    is_alive = True
    num_calls = 0

    async def generate(self, request: Any) -> Any:
        self.num_calls += 1
        raise WorkerTaskError("generation: IndexError: list index out of range")

    async def update_weights(self, *args: Any) -> None:
        raise WorkerDiedError("the generation worker was killed")


class Learner(NullLearner):
    """A learner that dies in every request and is back at once."""

    async def train(self, groups: Any, **how: Any) -> Any:
        raise WorkerDiedError("the learner worker was killed")

    check = audit = train


class Task(StubTask):
    name = "stub"

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> TaskItem:
        return self.resolve(PromptRef(self.name, "train", index))


class Tokenizer(StubTokenizer):
    eos_ids = StubTokenizer.end_ids


class LongPrompts(Tokenizer):
    def encode_prompt(self, messages: object) -> list[int]:
        return [0] * 148


@contextmanager
def node_of(folder: Path, role: str = "full", **changes: Any) -> Iterator[NodeComponents]:
    """Yield a node with an engine and a learner that always fail."""
    roles = {"roles": {"follow": ANN.peer_id}} if role == "generator" else {}
    parts: dict[str, Any] = {
        "settings": NodeSettings(model="m", dtype="float32", role=role, **roles),
        "generation": Engine(lambda: 0),
        "learner": Learner(1),
        "domain_task": Task(),
        "tokenizer": Tokenizer(),
    }
    with components(folder, **parts | changes) as node:
        yield node


async def drive(
    node: NodeComponents, loop: Any, patch: pytest.MonkeyPatch, feed: Callable[[], object] = lambda: None
) -> BaseException | None:
    """Run a loop for `ROUNDS` minutes, with `feed()` in each; cancel it. Return the error with which it ended."""
    await node.gossip.start()
    clock = LoopClock(patch)
    running = asyncio.create_task(loop, name="loop")
    for _ in range(ROUNDS):
        await node.store.disk(feed)  # after the calls in the disk thread, which alone changes the buffer
        await clock.advance(ROUND_S)
        if running.done():
            return running.exception()
    running.cancel()
    for _ in range(ROUNDS):
        if running.done():
            break
        await clock.advance(0)
        await node.store.disk(lambda: None)
    assert running.cancelled(), running
    return None


async def test_a_loop_without_input_waits(tmp_path, monkeypatch):
    """Each loop is driven once, as a loop of the first role that has it."""
    monkeypatch.setattr("ftis_node.node.loops.weight_offer.model_fingerprint", lambda source: "0" * 32)
    driven: set[str] = set()
    for role in ("full", "learner", "generator", "exchange"):
        with node_of(tmp_path / role, role) as node:
            names = {"status", *loops_of_role(Wiring(node))} - driven
        driven |= names
        for name in sorted(names):
            with node_of(tmp_path / role / name, role) as node:
                node.context.failures.succeeded(GENERATION)
                wiring = Wiring(node)
                loop = wiring.status_loop().run if name == "status" else loops_of_role(wiring)[name]
                with monkeypatch.context() as patch:
                    assert await drive(node, loop(), patch) is None, name
                assert len(events_of(node)) <= MAX_EVENTS, name
    assert len(driven) > 12


@dataclass(frozen=True)
class Failing:
    """A loop whose work fails for ever. `feed` gives it work in each round; `work` is its name in the status."""

    loop: Callable[[Wiring], Any]
    feed: Callable[[Wiring], object]
    work: str
    role: str = "full"


def _store_foreign(wiring: Wiring) -> None:
    """Store the foreign groups of a step, so that no failure is this node's own."""
    for number in islice(NUMBERS, 8):
        wiring.node.store.buffer.admit(accepted(ANN, number), own=False)


def _offer_own(wiring: Wiring) -> None:
    state = wiring.node.context.state
    state.policy_version += 1
    if wiring.intake._newest_own.empty():
        wiring.intake._newest_own.put_nowait(accepted(ME, 1, versions=(state.policy_version,) * 2))


def _offer_foreign(wiring: Wiring) -> None:
    if not wiring.audit_loop._waiting.full():
        wiring.audit_loop._waiting.put_nowait(accepted(ANN, 1))


async def _evaluate(wiring: Wiring) -> None:
    while True:
        await wiring.evaluator.evaluate(step=1)
        await asyncio.sleep(1)


async def _train(wiring: Wiring) -> None:
    await wiring.train_loop(wiring.step_gate(), last_step=None).run()


FAILING = {
    "generate": Failing(lambda wiring: wiring.generate_loop.run(), lambda wiring: None, GENERATION),
    "check": Failing(lambda wiring: wiring.mismatch_loop.run(), _offer_own, "the mismatch measurement"),
    "audit": Failing(lambda wiring: wiring.audit_loop.run(), _offer_foreign, "the audit of a group"),
    "evaluation": Failing(_evaluate, lambda wiring: None, EVALUATION),
    "train": Failing(_train, _store_foreign, TRAINING, role="learner"),
}


@pytest.mark.parametrize("name", FAILING)
async def test_a_loop_that_always_fails_shows_it_and_writes_few_events(tmp_path, monkeypatch, caplog, name):
    case = FAILING[name]
    monkeypatch.setattr("ftis_node.generation.evaluate.RETRY_PAUSE_S", 0.0)
    with node_of(tmp_path, case.role, **({"eval_tasks": (Task(),)} if name == "evaluation" else {})) as node:
        for work in (GENERATION, EVALUATION, TRAINING):
            node.context.failures.succeeded(work)  # it has worked before, so the node goes on
        wiring = Wiring(node)
        assert await drive(node, case.loop(wiring), monkeypatch, lambda: case.feed(wiring)) is None
        streak = node.context.failures.streak(case.work)
        assert streak.num_in_row > 16, "the loop gave up in silence"
        assert len([event for event in events_of(node) if event["event"].endswith("_failed")]) <= MAX_EVENTS
        (shown,) = (await wiring.status_loop().refresh()).health.failing
        assert shown.startswith(f"{case.work} failed {streak.num_in_row} times in a row: ")
    assert 0 < len([record for record in caplog.records if case.work in record.message]) <= 16


async def test_generation_that_never_succeeds_ends_the_node_with_the_cause(tmp_path, monkeypatch):
    with node_of(tmp_path) as node:
        error = await drive(node, Wiring(node).generate_loop.run(), monkeypatch)
        assert isinstance(error, BaseExceptionGroup)
        (first, *_) = error.exceptions
        assert isinstance(first, WorkerTaskError)
        assert str(first).startswith("generation failed on every call since the start, ")
        assert "IndexError" in str(first)
        num_calls = node.generation.num_calls  # type: ignore[attr-defined]
        assert MAX_ATTEMPTS <= num_calls <= MAX_ATTEMPTS * node.slots.capacity


async def test_a_task_without_a_usable_problem_ends_the_node_after_one_round(tmp_path, monkeypatch):
    with node_of(tmp_path, tokenizer=LongPrompts()) as node:
        monkeypatch.setattr("tests.loop_clock.ITERATIONS", 10_000)
        error = await drive(node, Wiring(node).generate_loop.run(), monkeypatch)
        assert isinstance(error, BaseExceptionGroup)
        (first,) = error.exceptions
        assert isinstance(first, TaskError) and first.exit_code == 2
        line = "none of the 10 problems of stub fits sampling.max_prompt_tokens = 32; the shortest has 148: "
        assert str(first).startswith(line)
        assert len(events_of(node, "prompt_skipped")) <= 4


async def test_own_groups_that_are_all_refused_are_shown(tmp_path, monkeypatch):
    with node_of(tmp_path) as node:
        wiring, group = Wiring(node), accepted(ME, 1).group

        async def publish_and_validate():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(wiring.intake.run())
                tasks.create_task(wiring.publish_loop.run())

        group = replace(group, run_id="ef" * 16)  # of another run

        def feed():
            if not wiring.scored.full():
                node.slots.in_generation += 1
                wiring.scored.put_nowait(group)

        assert await drive(node, publish_and_validate(), monkeypatch, feed) is None
        (shown,) = node.context.failures.failing
        assert "validation of own groups failed" in shown and "run: " in shown


def test_failures_are_reported_at_doublings_and_their_end_once(caplog):
    caplog.set_level("INFO")
    from ftis_node.node.supervision.failure_streaks import FailureStreaks

    streaks = FailureStreaks()
    streaks.succeeded("work")
    due = [number for number in range(1, 33) if streaks.failed("work", FtisError("no\nsecond line"))]
    assert due == [1, 2, 4, 8, 16, 32]
    assert streaks.failing == ["work failed 32 times in a row: no"]
    streaks.succeeded("work")
    streaks.succeeded("work")
    assert streaks.failing == []
    lines = [record.message for record in caplog.records]
    assert [line for line in lines if "again after" in line] == ["work works again after 32 failures"]
    assert len(lines) == 6, "3, 4, 8, 16 and 32 failures, and the end"
