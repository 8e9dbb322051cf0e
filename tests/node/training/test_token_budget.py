"""Budgets over all starts of a home, the end that a used budget causes, and the evaluations that a status keeps."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import load_node_settings
from ftis_node.config.step import StepSection
from ftis_node.errors import ConfigError
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.node.context import EvaluationHistory
from ftis_node.node.daemon import run_node
from ftis_node.node.training.generation_limits import GenerateBudget
from ftis_node.node.training.step_gate import StepInputs, may_start, never_starts
from ftis_node.node.training.step_shares import substitute_foreign
from ftis_node.node.wiring import Wiring
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.events import read_events
from ftis_node.telemetry.health_summary import AnswerWord, summarize_health
from ftis_node.telemetry.status import EvalStatus, Status
from tests.node.nodes import whole_node
from tests.node.support import manifest_text

GROUP_TOKENS = 4 * 6  # at most: completions per group times tokens per completion
pytestmark = pytest.mark.timeout(600)  # includes training the models


def spend(budget: GenerateBudget, sizes: list[int], *, slots: int) -> list[int]:
    """Make groups of these sizes, `slots` at a time, while the budget permits; return the sizes of the made groups."""
    made: list[int] = []
    in_progress: list[int] = []
    left = list(sizes)
    while left or in_progress:
        while left and len(in_progress) < slots and budget.may_begin:
            budget.begin()
            in_progress.append(left.pop(0))
        if not in_progress:
            break
        made.append(in_progress.pop(0))
        budget.end(made[-1])
    return made


@given(
    limit=st.integers(1, 70),
    sizes=st.lists(st.integers(1, 40), min_size=80, max_size=80),
    slots=st.integers(1, 8),
    starts=st.integers(1, 4),
)
def test_a_budget_is_used_up_with_little_excess_over_any_number_of_starts(limit, sizes, slots, starts):
    made: list[int] = []
    for _ in range(starts):
        budget = GenerateBudget(limit, num_tokens=sum(made), num_groups=len(made))
        made += spend(budget, sizes[len(made) :][: 80 // starts], slots=slots)
    if starts == 1:
        assert sum(made) >= limit
        assert budget.is_used_up
    assert not made or sum(made) - limit < max(made) * slots
    assert sum(made[:-slots]) < limit


NEEDS = StepSection(own_groups=4, foreign_groups=4, foreign_wait_s=30.0)
ALONE = StepSection(own_groups=4, foreign_groups=0, foreign_wait_s=30.0)


def test_a_step_with_few_own_groups_left_takes_foreign_ones():
    own, foreign = substitute_foreign(3 + 2, needs=NEEDS)
    assert may_start(NEEDS, StepInputs(own, foreign, waited_s=30.0, uptime_s=99.0, awaits_sender=True))


@pytest.mark.parametrize(
    ("needs", "changes", "is_over"),
    [
        (NEEDS, {}, False), (NEEDS, {"alone_s": 99.0}, False),
        (NEEDS, {"awaits_sender": False, "alone_s": 29.0}, False),
        (NEEDS, {"awaits_sender": False, "alone_s": 30.0}, True),
        (NEEDS, {"awaits_sender": False, "alone_s": 30.0, "own_ready": 4}, False),
        (ALONE, {}, True), (ALONE, {"own_ready": 3}, True), (ALONE, {"own_ready": 4}, False),
    ],
)  # fmt: skip
def test_a_node_that_generates_no_more_ends_if_no_peer_can_fill_a_step(needs, changes, is_over):
    outlook = StepInputs(own_ready=0, foreign_ready=0, waited_s=0.0, uptime_s=99.0, awaits_sender=True)
    assert never_starts(needs, replace(outlook, **changes)) is is_over


def test_budgets_that_do_not_fit_the_role_are_refused(tmp_path):
    for budget in ({"learn_steps": 3}, {"learn_tokens": 3}):
        with pytest.raises(ConfigError, match="takes no steps: remove --steps and --learn-tokens"):
            load_node_settings(tmp_path / "n", model="m", role="generator", roles={"follow": "x"}, budget=budget)
    with pytest.raises(ConfigError, match="a learner does not generate: remove --generate-tokens"):
        load_node_settings(tmp_path / "n", model="m", role="learner", budget={"generate_tokens": 3})


def manifest_of(*, foreign: int = 4, foreign_wait_s: float = 0.1) -> RunManifest:
    text = manifest_text(foreign_wait_s=foreign_wait_s).replace("foreign_groups = 4", f"foreign_groups = {foreign}")
    return parse_manifest(text, source="test")


async def run_whole_node(
    folder: Path, model: Path, *, manifest: RunManifest, swarm: LoopbackSwarm | None = None, **settings: Any
) -> Status:
    """Run a whole node with real engine and learner until it ends; return its last status."""
    factory = InProcessNodeFactory(swarm or LoopbackSwarm(), delay=NO_DELAY, seed=0)
    threads = {"generation": {"threads": 1}, "learner": {"threads": 1, "checkpoint_every_steps": 100}}  # the end saves
    (home := Home(folder)).create()
    specs = ("arithmetic",)
    async with whole_node(home, model, factory, manifest=manifest, eval_specs=specs, **threads, **settings) as parts:
        for scorer in (parts.scorer, parts.new_peers_scorer):  # a peer's group of an evaluation problem is refused
            with pytest.raises(KeyError):
                await scorer.resolve(parts.eval_tasks[0][0].ref)
        await run_node(parts, steps=parts.context.settings.budget.learn_steps)
        return await Wiring(parts).status_loop().refresh()


async def test_a_node_alone_generates_its_budget_trains_on_it_and_ends(tmp_path, tiny_models, caplog):
    caplog.set_level("INFO")
    limit = 9 * GROUP_TOKENS  # two steps of own groups and one group
    status = await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest_of(), budget={"generate_tokens": limit})
    used = status.budget.generate_tokens
    assert limit <= used.used < limit + 3 * GROUP_TOKENS
    assert (used.limit, used.left) == (limit, 0)
    assert status.learner.step >= 2
    assert status.replay.ready < 4, "too few for another step"
    assert {entry.step for entry in status.eval} >= {0, status.learner.step}, "the last step was not evaluated"
    assert f"the budget of {limit} is used up" in caplog.text

    again = await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest_of(), budget={"generate_tokens": limit})
    assert again.budget.generate_tokens == used, "a new start begins a group"
    assert again.learner.step == status.learner.step
    more = await run_whole_node(
        tmp_path, tiny_models["s"], manifest=manifest_of(), budget={"generate_tokens": used.used + 4 * GROUP_TOKENS}
    )
    assert more.budget.generate_tokens.used > used.used
    assert more.learner.step > status.learner.step


async def test_a_node_with_a_used_budget_trains_on_foreign_groups(tmp_path, tiny_models):
    swarm, manifest = LoopbackSwarm(), manifest_of(foreign_wait_s=1.0)
    limit, steps = 4 * GROUP_TOKENS, 4
    async with asyncio.TaskGroup() as tasks:
        sender = tasks.create_task(
            run_whole_node(tmp_path / "sender", tiny_models["m"], manifest=manifest, swarm=swarm)
        )
        budget = {"generate_tokens": limit, "learn_steps": steps}
        status = await run_whole_node(
            tmp_path / "short", tiny_models["s"], manifest=manifest, swarm=swarm, budget=budget
        )
        sender.cancel()
    assert (status.learner.step, status.budget.learn_steps.left) == (steps, 0)
    assert limit <= status.budget.generate_tokens.used < limit + 3 * GROUP_TOKENS
    last = read_events(tmp_path / "short" / "events.jsonl", name="step")[-1]
    assert last["own_groups"] == 0 and last["foreign_groups"] >= 4, "foreign groups do not replace its own"


async def test_trained_tokens_are_counted_over_starts_with_pruned_groups(tmp_path, tiny_models):
    manifest = manifest_of(foreign=0)
    first = await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest, budget={"learn_steps": 2})
    used = first.budget.learn_tokens.used
    assert used > 0 and first.budget.learn_tokens.left is None
    steps = read_events(tmp_path / "events.jsonl", name="step")
    assert used == sum(event["num_tokens"] for event in steps)
    with closing(ReplayBuffer(tmp_path / "replay.sqlite")) as buffer:
        assert buffer.prune(max_disk_bytes=0) > 0
    with closing(ReplayReader(tmp_path / "replay.sqlite")) as reader:
        assert reader.trained_tokens() == used
    last = await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest, budget={"learn_tokens": used + 1})
    assert last.learner.step == 3, "not exactly the step that exceeds the budget"
    assert last.budget.learn_tokens.left == 0


@pytest.mark.parametrize(("own_ready", "starts"), [(3, False), (4, True)])
def test_a_step_that_draws_groups_waits_for_all_generated_ones(own_ready, starts):
    outlook = StepInputs(own_ready=own_ready, foreign_ready=0, waited_s=0.0, uptime_s=0.0, awaits_sender=False)
    needs = StepSection(own_groups=2, foreign_groups=0, generated_groups=4, group_selection="sapo")
    assert may_start(needs, outlook) is starts


def test_the_status_keeps_the_first_and_the_newest_evaluations(monkeypatch):
    monkeypatch.setattr("ftis_node.node.context.MAX_EVALUATIONS", 4)
    history = EvaluationHistory()
    for step in range(0, 50, 5):
        for task in ("a", "b"):
            history.add(EvalStatus(step=step, task=task, pass_at_1=0.5, n=8))
    assert [(entry.step, entry.task) for entry in history.entries] == [(0, "a"), (0, "b"), (45, "a"), (45, "b")]


async def test_answers_that_are_all_cut_and_wrong_are_reported_with_a_sample(tmp_path, tiny_models):
    manifest = manifest_of(foreign=0)
    cut = manifest.sampling.model_copy(update={"max_completion_tokens": 1})
    manifest = manifest.model_copy(update={"sampling": cut})
    budget = {"generate_tokens": 52 * 4}  # groups of four completions, each of one token
    status = await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest, budget=budget)
    assert status.generation.groups_without_reward >= 52 and status.generation.sample
    assert status.learner.cut_fraction > 0.8  # the others are an end token alone
    assert (status.learner.no_signal_fraction, status.learner.completion_tokens) == (1.0, 1.0)
    assert {(one.completion_tokens, one.cut_fraction) for one in status.eval} == {(1.0, 1.0)}
    running = msgspec.structs.replace(status, learner=msgspec.structs.replace(status.learner, state="ready"))
    learning = summarize_health(running, now=status.health.taken_at).learning
    assert learning.word is AnswerWord.NO
    assert learning.why == f"no reward in {status.generation.groups_without_reward} groups"
    assert learning.advice.endswith(f"one completion: {status.generation.sample!r}")
