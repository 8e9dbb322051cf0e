"""Trials of a few steps: nodes in one process, each with an engine, validation, a buffer and a learner."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ftis_node.config.manifest import load_manifest
from ftis_node.config.workers import LoraSection
from ftis_node.errors import ModelError
from ftis_node.lab.experiment import byzantine, runner
from ftis_node.lab.experiment import trial as trial_module
from ftis_node.lab.experiment.pairs import Pair, TrialMember
from ftis_node.lab.experiment.runner import run_trials, with_keys
from ftis_node.lab.experiment.trial import Trial, run_trial
from ftis_node.lab.experiment.trial_matrix import Experiment
from ftis_node.lab.experiment.trial_result import SENDER_FIGURES, STEP_FIGURES
from ftis_node.learner.groups import unpack_train_group
from ftis_node.learner.step.train_step import Passes
from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.node.loops.generate import PromptOrder
from ftis_node.node.training.evaluator import Evaluator
from tests.conftest import with_sections

STEPS = 3
PROMPTS = 8  # per update, over all nodes
GROUP_SIZE = 8
TWO_SPECS = ("arithmetic:add", "arithmetic:sub")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def experiment(tiny_models):
    base = load_manifest("arithmetic-compare")
    groups = {"own_groups": PROMPTS // 2, "foreign_groups": PROMPTS // 2}
    return Experiment(
        base=with_sections(base, step=groups, eval={"every_steps": 1, "limit": 2}),
        pairs=(Pair("size", tuple(TrialMember(name, str(path)) for name, path in tiny_models.items())),),
        methods=("ftis",),
        task_spec="arithmetic:add",
        eval_specs=("arithmetic:add",),
        steps=STEPS,
        seeds=range(1),
        lora_adapter=LoraSection(rank=4, alpha=8),
    )


def only(experiment: Experiment, **changes: Any) -> Trial:
    (trial,) = replace(experiment, **changes).trials()
    return trial


@pytest.fixture(scope="module")
def usual(experiment):
    """The result of the experiment with two evaluations."""
    return run_trial(only(experiment, eval_specs=TWO_SPECS))


def test_two_nodes_train_on_each_others_groups_in_rounds(usual):
    small, medium = usual.members
    for member, peer in ((small, medium), (medium, small)):
        assert (member.own_groups, member.foreign_groups) == (STEPS * PROMPTS // 2, STEPS * PROMPTS // 2)
        points = [(point.step, point.task) for point in member.evaluations]
        assert points == list(itertools.product(range(STEPS + 1), TWO_SPECS))
        ours, theirs = member.curve("arithmetic:add"), peer.curve("arithmetic:add")
        assert [point.tokens_received for point in ours] == [point.tokens_generated for point in theirs]
        assert ours[-1].tokens_generated >= STEPS * PROMPTS // 2 * GROUP_SIZE
        assert not member.refused
        assert all(norm is not None and norm > 0 for norm in member.steps["grad_norm"])  # real gradient steps
    assert small.parameters < medium.parameters
    for member in usual.members:
        assert set(member.steps) == {*STEP_FIGURES, *SENDER_FIGURES}
        assert {len(values) for values in member.steps.values()} == {STEPS}
        assert all(value is not None and value > 0 for value in member.steps["foreign_mean_kl"])
        assert any(value is not None and value > 0 for value in member.steps["foreign_weight_variance"])
        assert member.steps["own_mean_kl"][0] == pytest.approx(0, abs=1e-6)
        assert all(entropy is not None and entropy > 0 for entropy in member.steps["entropy"])


def test_a_trial_is_reproducible_even_if_a_member_evaluates_slowly(experiment, usual, monkeypatch):
    evaluate, pauses = Evaluator.evaluate, itertools.cycle((0.0, 0.5))

    async def evaluate_late(evaluator, *, step):
        await asyncio.sleep(next(pauses))  # one of two nodes; the other trains its step in this time
        await evaluate(evaluator, step=step)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate_late)
    for one, other in zip(usual.members, run_trial(only(experiment, eval_specs=TWO_SPECS)).members, strict=True):
        assert (one.steps, one.evaluations) == (other.steps, other.evaluations), "to the last bit"


def test_two_updates_weigh_by_the_first_pass(experiment, monkeypatch):
    seen = []

    gradients = Passes.gradients

    def noted(*args, **how):
        found = gradients(*args, **how)
        seen.append((how["first_pass"], found.learner_logprobs))
        return found

    monkeypatch.setattr(Passes, "gradients", noted)
    run_trial(only(experiment, base=with_sections(experiment.base, optimizer={"updates_per_batch": 2}), steps=1))
    assert len(seen) == 4
    for (none, first), (given, later) in zip(seen[::2], seen[1::2], strict=True):
        assert none is None and given is first and not (later == first).all()


def test_late_weights_generate_off_policy_groups_and_evaluations_use_the_newest(experiment):
    base = with_sections(experiment.base, optimizer={"learning_rate": 3e-3}, eval={"limit": 16})
    trial = replace(experiment, base=base, methods=("alone",), delays=("fixed:2",)).trials()[0]
    (member,) = run_trial(trial).members
    late = [abs(value or 0.0) for value in member.steps["mean_kl"]]
    assert late[0] < 1e-4  # sampled by the current policy, up to rounding
    assert late[1] > 1e-3  # sampled by version 0, trained on by version 1
    assert len({point.pass_at_1 for point in member.curve("arithmetic:add")[:3]}) > 1  # version 0 is served until then


@pytest.fixture
def trained(monkeypatch):
    """Return the groups of each step, with the name of the node that trains on them."""
    seen: list[tuple[str, int, list[Any]]] = []
    make_learner = trial_module.InProcessNodeFactory.learner

    def spying(self, of, **parts):
        learner = make_learner(self, of, **parts)
        inner = learner.train

        async def watched(groups, *, step, **how):
            seen.append((of.settings.name, step, [unpack_train_group(group) for group in groups]))
            return await inner(groups, step=step, **how)

        learner.train = watched
        return learner

    monkeypatch.setattr(trial_module.InProcessNodeFactory, "learner", spying)
    return seen


def test_a_model_alone_has_the_prompts_and_samples_that_it_has_in_the_swarm(experiment, trained):
    setting = replace(experiment, methods=("ftis", "alone:own"), seeds=range(1, 2), steps=1)
    for trial in setting.trials():
        run_trial(trial)
    for name in ("s", "m"):
        swarm, alone = (
            sorted((group.sent.prompt_ids, group.tokens.token_ids.tolist()) for group in groups if group.sent.own)
            for member, _, groups in trained
            if member == name
        )
        assert swarm == alone and len(alone) == PROMPTS // 2


def test_groups_of_one_prompt_are_different(experiment, trained, monkeypatch):
    monkeypatch.setattr(PromptOrder, "index", lambda order, place: 0)
    run_trial(replace(experiment, methods=("alone",), steps=1).trials()[0])
    ((_, _, groups),) = trained
    assert len({group.sent.prompt_ids for group in groups}) == 1
    assert len({group.tokens.token_ids.tobytes() for group in groups}) == PROMPTS


def test_groups_of_the_late_node_are_late_for_both_nodes(experiment, trained):
    run_trial(only(experiment, delays=("fixed:2@peer",), steps=3))
    versions = {
        (name, step, own): {group.policy_version for group in groups if group.sent.own == own}
        for name, step, groups in trained
        for own in (True, False)
    }
    prompt, late = ({step: {max(0, step - 1 - lag)} for step in range(1, 4)} for lag in (0, 2))
    for name, own, expected in (("s", True, prompt), ("s", False, late), ("m", True, late), ("m", False, prompt)):
        assert {step: versions[name, step, own] for step in range(1, 4)} == expected, (name, own)


def test_nodes_without_a_barrier_train_at_their_speed_on_what_is_there(experiment, trained):
    setting = only(experiment, speeds=(3, 1), steps=6)
    first = run_trial(setting)
    seen = {
        (name, step, own): [group.policy_version for group in groups if group.sent.own == own]
        for name, step, groups in trained
        for own in (True, False)
    }
    for step in range(1, 7):
        assert seen["s", step, True] == [step - 1] * 4
        assert seen["s", step, False] == [step > 3] * (1 + (step in (3, 6))), "of the slow node's last step"
    for step in (1, 2):
        assert seen["m", step, True] == [step - 1] * 4
        assert seen["m", step, False] == [3 * step - 1] * 4, "the newest of twelve"
    assert len(seen) == 2 * (6 + 2)
    for one, other in zip(first.members, run_trial(setting).members, strict=True):
        assert (one.steps, one.evaluations) == (other.steps, other.evaluations), "to the last bit"


def test_horizontal_nodes_answer_the_same_prompts(experiment, trained):
    result = run_trial(only(experiment, shares=("horizontal",), steps=1))
    assert [member.own_groups for member in result.members] == [PROMPTS, PROMPTS]
    for _, _, groups in trained:
        keys = [group.sent.advantage_key for group in groups]
        assert len(groups) == 2 * PROMPTS
        assert all(keys.count(key) == 2 for key in keys)  # one own and one of the peer
        assert {len(group.sent.rewards) for group in groups} == {GROUP_SIZE // 2}


def test_a_sapo_node_draws_some_of_its_generated_groups(experiment):
    result = run_trial(only(experiment, shares=("sapo:1/2/3",), methods=("ftis:peer_weights=agreement",)))
    for member in result.members:
        assert member.own_groups <= STEPS
        assert STEPS * 3 * GROUP_SIZE <= member.tokens_generated  # all three per step
        (peer,) = {other.name for other in result.members} - {member.name}
        assert [set(weights) <= {peer} for weights in member.peer_weights] == [True] * STEPS
        assert all(weight == 1.0 for weights in member.peer_weights[:2] for weight in weights.values())


@pytest.mark.parametrize("lie", ["logprobs", "positives"])
def test_false_log_probs_are_refused_or_truncated(experiment, lie):
    result = run_trial(only(experiment, attacks=(lie,), num_nodes=(4,), steps=2 if lie == "positives" else 1))
    assert [member.name for member in result.members] == ["s", "m", "s~2"]  # the malicious node has no curve
    for member in result.members:
        assert (member.steps["truncated_fraction"][0] or 0) > 0
        if lie == "positives":
            assert member.refused["understated_logprobs"] >= 1, "the learner finds them far likelier than claimed"
        else:
            assert not member.refused
            assert member.foreign_groups == PROMPTS * 3 // 4


def test_padded_right_answers_with_likely_log_probs_pass_all_checks(experiment, trained, tiny_models, monkeypatch):
    monkeypatch.setattr(byzantine, "MIN_RIGHT_REWARD", 0.0)  # all answers are padded
    result = run_trial(only(experiment, attacks=("padded",), num_nodes=(4,), steps=1))
    for member in result.members:
        assert not member.refused
        assert member.foreign_groups == PROMPTS * 3 // 4
    padded = [
        token_ids.tolist()
        for _, _, groups in trained
        for group in groups
        for token_ids, logprobs in zip(group.tokens.ids_of_each(), group.tokens.logprobs_of_each(), strict=True)
        if not group.sent.own and logprobs.min() >= 2 * byzantine.LIKELY_LOGPROB
    ]
    assert len(padded) >= 3 * PROMPTS // 4 * GROUP_SIZE, "each honest node trains on all of them"
    tokenizer = load_tokenizer(resolve_model(str(tiny_models["s"])))
    texts = [tokenizer.decode(ids) for ids in padded]
    assert sum(text != text.rstrip() for text in texts) > len(texts) / 2, "most have space behind the answer"


def test_copied_log_probs_of_a_learner_pass_all_its_checks(experiment):
    setting = only(experiment, methods=("ftis:peer_weights=agreement",), attacks=("mimic",), num_nodes=(4,), steps=1)
    mimicked = run_trial(setting).members[0]
    assert not mimicked.refused, "likelihoods do not distinguish its completions from honest ones"
    assert mimicked.foreign_groups == PROMPTS * 3 // 4
    assert mimicked.peer_weights[0] == dict.fromkeys(("attacker", "m", "s~2"), 1.0), "1 before a measurement"


def test_honest_nodes_replace_the_groups_of_a_malicious_node_in_a_filled_swarm(experiment):
    result = run_trial(only(experiment, shares=("filled",), attacks=("rewards",), num_nodes=(4,), steps=3))
    own = PROMPTS // 4
    for member in result.members:
        others = [other for other in result.members if other is not member]
        assert member.own_groups == own + 2 * (own + 1), "from the second step, each honest node generates one more"
        assert member.own_groups + member.foreign_groups == PROMPTS - own + 2 * PROMPTS
        received = member.curve("arithmetic:add")[-1].tokens_received
        assert received == sum(other.curve("arithmetic:add")[-1].tokens_generated for other in others)
        assert member.refused["reward_mismatch"] == 3, "a ban after three false claims"


def test_an_adapter_and_a_full_model_learn_together(experiment, tiny_models):
    model = str(tiny_models["s"])
    pair = Pair("peft", (TrialMember("full", model), TrialMember("lora", model, lora=True)))
    full, adapter = run_trial(only(experiment, pairs=(pair,), steps=1)).members
    assert full.trainable_parameters == full.parameters
    assert adapter.trainable_parameters < adapter.parameters / 2


def test_stored_results_are_reused(experiment, usual, tmp_path, monkeypatch):
    trials = with_keys(replace(experiment, methods=("ftis", "nois")).trials())
    same = replace(trials[0], labels=trials[0].labels | {"share": "filled"})
    made: list[str] = []

    def in_this_process(function, calls, **_):
        made.extend(calls)
        for arguments in calls.values():
            function(*arguments)

    monkeypatch.setattr(runner, "call_in_processes", in_this_process)
    stored = msgspec.structs.replace
    monkeypatch.setattr(runner, "run_trial", lambda trial, *_, **__: stored(usual, key=trial.key))
    for chosen in (trials[:1], [*trials, same]):
        results = run_trials(chosen, tmp_path, jobs=1, watch=lambda *_: None)
    assert made == [trial.key for trial in trials], "a finished trial is run again"
    expected = [(trial.key, trial.labels) for trial in (*trials, same)]
    assert [(result.key, result.labels) for result in results] == expected, "a result for each label of a trial"
    assert results[0].members == usual.members


def test_a_missing_model_is_named_in_the_error(experiment, tmp_path):
    members = tuple(TrialMember(name, str(tmp_path / "nothing")) for name in "ab")
    with pytest.raises(ModelError, match="nothing"):
        run_trial(only(experiment, pairs=(Pair("size", members),)))
