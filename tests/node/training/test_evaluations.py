"""The evaluations that the status keeps over a long run, and the figures of answers that are all cut and wrong."""

import pytest
from msgspec.structs import replace

from ftis_node.node import context
from ftis_node.node.context import EvaluationHistory
from ftis_node.telemetry.health_summary import AnswerWord, summarize_health
from ftis_node.telemetry.status import EvalStatus
from tests.node.training.test_token_budget import manifest_of, run_whole_node


def test_the_status_keeps_the_first_and_the_newest_evaluations(monkeypatch):
    monkeypatch.setattr(context, "MAX_EVALUATIONS", 4)
    history = EvaluationHistory()
    for step in range(0, 50, 5):
        for task in ("a", "b"):
            history.add(EvalStatus(step=step, task=task, pass_at_1=0.5, n=8))
    assert [(entry.step, entry.task) for entry in history.entries] == [(0, "a"), (0, "b"), (45, "a"), (45, "b")]


@pytest.mark.timeout(600)  # includes training the model
async def test_answers_that_are_all_cut_and_wrong_are_reported_with_a_sample(tmp_path, tiny_models):
    manifest = manifest_of(foreign=0)
    cut = manifest.sampling.model_copy(update={"max_completion_tokens": 1})
    manifest = manifest.model_copy(update={"sampling": cut})
    budget = {"generate_tokens": 52 * 4}  # groups of four completions, each of one token
    status = await run_whole_node(tmp_path, tiny_models["s"], manifest=manifest, budget=budget)
    assert status.generation.groups_without_reward >= 52 and status.generation.sample
    assert status.learner.cut_fraction > 0.8  # the others are an end token alone
    assert status.learner.no_signal_fraction == 1.0
    assert status.learner.completion_tokens == 1.0
    assert {(one.completion_tokens, one.cut_fraction) for one in status.eval} == {(1.0, 1.0)}
    running = replace(status, learner=replace(status.learner, state="ready"))
    learning = summarize_health(running, now=status.health.taken_at).learning
    assert learning.word is AnswerWord.NO
    assert learning.why == f"no reward in {status.generation.groups_without_reward} groups"
    assert learning.advice.endswith(f"one completion: {status.generation.sample!r}")
