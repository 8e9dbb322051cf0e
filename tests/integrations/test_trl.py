"""TRL's trainer with a loss of ftis-node: real steps; prompts and rewards of a run are those of its nodes."""

from __future__ import annotations

import asyncio
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ftis_node.algorithms import policy_loss
from ftis_node.config.manifest import RunManifest
from ftis_node.errors import ConfigError, TaskError, UsageError
from ftis_node.integrations import trl
from ftis_node.integrations import trl as integration
from ftis_node.integrations.trl import SwarmGRPOTrainer
from ftis_node.integrations.trl.run_task import swarm_dataset
from ftis_node.tasks.dataset_task import pinned
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.spec import parse_spec
from tests.trained_models import trained_model

pytestmark = pytest.mark.filterwarnings("ignore")
GROUP_SIZE, LENGTH = 4, 6


def parity_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ inside a group for any model: the parity of the sum, and 0.001 of the first id."""
    return [float(sum(ids) % 2) + 0.001 * ids[0] for ids in completion_ids]


def make_trainer(folder: Path, *, grpo: dict[str, Any] | None = None, **options: Any) -> SwarmGRPOTrainer:
    model = trained_model("s")
    settings: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 2 * GROUP_SIZE, "num_generations": GROUP_SIZE,
        "max_completion_length": LENGTH, "max_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    given = {
        "model": str(model), "reward_funcs": parity_reward, "args": GRPOConfig(**settings | (grpo or {})),
        "train_dataset": Dataset.from_dict({"prompt": [f"{number}+{number + 3}=" for number in range(16)]}),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }  # fmt: skip
    return SwarmGRPOTrainer(**given | options)


class Recorded(SwarmGRPOTrainer):
    """A trainer that keeps the micro-batches of a step, their losses, and the weights before it."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.seen: list[tuple[Any, float]] = []
            self.before = copy.deepcopy(model.state_dict())
        loss = super()._compute_loss(model, inputs)
        self.seen.append((inputs, float(loss.detach())))
        return loss


def logprobs_by_hand(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probs `[N, T]` of each row alone and without padding; 0 outside the mask."""
    found = torch.zeros(inputs["completion_ids"].shape)
    for row, (prompt, completion) in enumerate(zip(inputs["prompt_ids"], inputs["completion_ids"], strict=True)):
        prompt = prompt[inputs["prompt_mask"][row].bool()]
        completion = completion[inputs["completion_mask"][row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0]
        logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found[row, : len(completion)] = logps[torch.arange(len(completion)), completion]
    return found


@pytest.mark.parametrize("method", ["ftis", "topr"])
def test_a_real_step_minimizes_the_loss_of_the_method(tmp_path, method, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SwarmGRPOTrainer", Recorded)
    trainer = make_trainer(
        tmp_path,
        method=method,
        method_params={"cap": 1.5},
        grpo={"per_device_train_batch_size": GROUP_SIZE, "gradient_accumulation_steps": 2},
    )
    trainer.train()
    assert isinstance(trainer, Recorded)
    assert len(trainer.seen) == 2
    before = AutoModelForCausalLM.from_pretrained(trained_model("s"))
    before.load_state_dict(trainer.before)
    for inputs, loss in trainer.seen:
        logps = logprobs_by_hand(before, inputs)
        mask = inputs["completion_mask"].bool()
        expected, _ = policy_loss(method, logps, logps, mask, inputs["advantages"], inputs["group_ids"], cap=1.5)
        assert loss == pytest.approx(float(expected) / 2, abs=1e-5)
    assert any(abs(loss) > 1e-4 for _, loss in trainer.seen), "all losses are 0"
    moved = zip(before.parameters(), trainer.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in moved)
    assert "kept_fraction" in trainer.state.log_history[0]


def test_the_gradient_is_that_of_the_method(tmp_path):
    """The loss uses the sampler's log-probs, or the learner's for a row without them."""
    trainer = make_trainer(tmp_path, method_params={"cap": 1.5})
    inputs = trainer._generate_and_score_completions([{"prompt": "1+4="}] * GROUP_SIZE)
    learner, mask = trainer._learner_logprobs(trainer.model, inputs)
    behaviour = learner.detach() - 1
    behaviour[0] = torch.nan
    loss = trainer._compute_loss(trainer.model, {**inputs, "sampling_per_token_logps": behaviour})
    filled = torch.where(behaviour.isnan(), learner.detach(), behaviour)
    group_ids = torch.zeros(GROUP_SIZE, dtype=torch.int64)
    expected, figures = policy_loss("ftis", learner, filled, mask, inputs["advantages"], group_ids, cap=1.5)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    assert 0 < figures["truncated_fraction"] < 1, "not only the rows of the other sampler are truncated"


def test_no_peer_can_know_which_tokens_obrs_rejects(tmp_path, monkeypatch):
    group_ids = []
    loss = "ftis_node.integrations.trl.grpo.policy_loss"
    monkeypatch.setattr(loss, lambda *given, **_: group_ids.append(int(given[5][0])) or (torch.zeros(1), {}))
    for trainer in (make_trainer(tmp_path), make_trainer(tmp_path)):
        batch = trainer._generate_and_score_completions([{"prompt": "1+4="}] * GROUP_SIZE)
        trainer._compute_loss(trainer.model, batch)
    assert group_ids[0] != group_ids[1]


@pytest.mark.parametrize(("top_k", "is_cut"), [(0, False), (3, True)])
def test_no_ratio_has_the_logprobs_of_a_cut_distribution(tmp_path, top_k, is_cut, monkeypatch):
    trainer = make_trainer(tmp_path, grpo={"top_k": top_k})
    sampled = [[19, 20]] * GROUP_SIZE, [[-0.1, -0.1]] * GROUP_SIZE
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda *_: sampled)
    batch = trainer._generate_and_score_completions([{"prompt": "1+4="}] * GROUP_SIZE)
    trainer._compute_loss(trainer.model, batch)
    assert (trainer._metrics["eval"]["mean_kl"] == [0.0]) == is_cut


@pytest.mark.parametrize(
    ("method", "mode", "bounds", "params"),
    [
        ("ftis", "token_truncate", (None, 1.5), {"cap": 1.5, "kl_threshold": math.inf}),
        ("mis", "token_mask", (0.8, 1.5), {"mis_low": 0.8, "mis_high": 1.5}),
    ],
)
def test_a_later_update_has_the_loss_and_gradient_of_trl(tmp_path, method, mode, bounds, params):
    """TRL corrects vLLM's log-probs by the ratio of the first pass, `old_per_token_logps`, to the sampler's.

    `_generate_and_score_completions` makes `importance_sampling_ratio` so, and `_compute_loss` weighs by it.
    """
    trainer = make_trainer(tmp_path, method=method, method_params=params)
    inputs = trainer._generate_and_score_completions([{"prompt": "1+4="}] * GROUP_SIZE)
    model, mask = trainer.model, inputs["completion_mask"]
    now = trainer._learner_logprobs(model, inputs)[0].detach()
    noise = torch.Generator().manual_seed(0)
    old = now - 0.15 * torch.randn(now.shape, generator=noise)
    sampled = old - 0.4 * torch.randn(now.shape, generator=noise)
    ratio = torch.exp((old - sampled) * mask)
    low, high = bounds
    is_outside = (ratio > high) | (ratio < (low or 0.0))
    assert 0 < is_outside[mask.bool()].float().mean() < 1
    assert 0 < ((now - old).exp() > 1.2)[mask.bool()].float().mean() < 1, "PPO's clip is active for some tokens"
    ratio = ratio.clamp(max=high) if mode == "token_truncate" else ratio.masked_fill(is_outside, 0.0)
    inputs |= {"old_per_token_logps": old, "sampling_per_token_logps": sampled, "importance_sampling_ratio": ratio}

    found = []
    for compute_loss in (SwarmGRPOTrainer._compute_loss, GRPOTrainer._compute_loss):
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer.loss_type = "grpo"  # the mean over tokens, then over completions
        model.zero_grad()
        loss = compute_loss(trainer, model, inputs)
        loss.backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        found.append((float(loss), gradient))
    (loss, gradient), (of_trl, gradient_of_trl) = found
    assert gradient_of_trl.norm() > 1e-3
    assert loss == pytest.approx(of_trl, rel=1e-5)
    assert (gradient - gradient_of_trl).norm() < 1e-5 * gradient_of_trl.norm()


@pytest.mark.parametrize(
    ("grpo", "options", "message"),
    [
        ({"beta": 0.1}, {}, "beta has no effect"),
        ({}, {"method_params": {"capp": 2.0}}, "has no parameter 'capp'"),
        ({}, {"method": "dr_grpo"}, "max_completion_length"),
        ({}, {"method": "dr_grpo", "method_params": {"max_completion_length": 6}}, "scale_rewards='none'"),
        ({}, {"method": "hacpo"}, "scale capability, which TRL does not compute"),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 2, "scale_rewards": "none"},
            {"method": "gepo"},
            "steps_per_generation=1",
        ),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 2},
            {"method_params": {"denominator": "kept"}},
            "steps_per_generation=1",
        ),
    ],
)
def test_settings_that_the_loss_cannot_follow_are_refused(tmp_path, grpo, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        make_trainer(tmp_path, grpo=grpo, **options)


def test_the_router_loss_of_a_mixture_of_experts_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(trained_model("s"))
    model.config.update({"output_router_logits": False, "router_aux_loss_coef": 0.001})
    with pytest.raises(ConfigError, match="set router_aux_loss_coef=0"):
        make_trainer(tmp_path, model=model)
    make_trainer(tmp_path, model=model, grpo={"router_aux_loss_coef": 0})


def test_another_release_of_trl_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(trl, "installed_release", lambda _: "1.17.0")
    with pytest.raises(UsageError) as caught:
        integration.SwarmGRPOTrainer  # noqa: B018
    assert str(caught.value) == (
        "ftis_node.integrations.trl needs trl 1.16.0, and trl 1.17.0 is installed: "
        'run `pip install -e ".[trl]"` in the clone of ftis-node'
    )


@pytest.mark.parametrize(
    ("spec", "form"), [("arithmetic", "{}"), ("rg:chain_sum", "<think> sum </think> <answer> {} </answer>")]
)
def test_prompts_and_rewards_are_those_of_the_task(tmp_path, spec, form):
    run = tmp_path / "run.toml"
    run.write_text(RunManifest(name="a-run", task=spec).to_toml())
    prompts, reward = swarm_dataset(str(run), num_prompts=3, seed=0)
    task = load_task(spec)
    items = [task[index] for index in prompts["prompt_index"]]
    assert [tuple(messages) for messages in prompts["prompt"]] == [item.prompt for item in items]
    texts = [form.format(items[0].answer), "no", form.format(items[1].answer)]
    assert items[0].answer != items[1].answer
    found = asyncio.run(
        reward(
            completions=[[{"role": "assistant", "content": text}] for text in texts],
            prompt_index=[prompts[row]["prompt_index"] for row in (0, 1, 1)],
        )
    )
    assert found == [task.score(items[0], texts[0]), task.score(items[1], "no"), task.score(items[1], texts[2])]
    assert found[0] == found[2] == 1.0 > (found[1] or 0.0)


@pytest.mark.parametrize(("seed", "processes", "is_equal"), [({}, 1, False), ({"seed": 1}, 1, True), ({}, 2, True)])
def test_two_trainers_get_other_prompts_unless_a_seed_is_given(seed, processes, is_equal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    one, other = (swarm_dataset("arithmetic-ftis", num_prompts=8, **seed)[0].to_list() for _ in range(2))
    assert (one == other) == is_equal


def test_a_run_with_a_local_data_set_needs_its_path(tmp_path):
    file, run = tmp_path / "mine.csv", tmp_path / "run.toml"
    file.write_text("question,answer\nhow many?,4\nhow few?,2\n")
    spec = pinned(parse_spec(f"dataset:{file}?name=counts&prompt=question&answer=answer&reward=math:3,format:1"))
    run.write_text(RunManifest(name="a-run", task=spec.canonical).to_toml())
    prompts, reward = swarm_dataset(str(run), task=f"dataset:{file}?name=counts")
    assert sorted(prompts["prompt_index"]) == [0, 1]
    texts = ["<think> x </think> <answer> 4 </answer>", "<think> x </think> <answer> 5 </answer>"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert asyncio.run(reward(completions=messages, prompt_index=[0, 0])) == [1.0, 0.25]

    with pytest.raises(TaskError, match=r"needs the run's data file"):
        swarm_dataset(str(run))
    with pytest.raises(TaskError, match="has no part 'dataset:mine'"):
        swarm_dataset(str(run), task=f"dataset:{file}")
    with pytest.raises(TaskError, match="names no local file"):
        swarm_dataset(str(run), task="dataset:counts")
    file.write_text("question,answer\nhow many?,5\n")
    with pytest.raises(TaskError, match="are not those of the run"):
        swarm_dataset(str(run), task=f"dataset:{file}?name=counts")


OPENS = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"


@pytest.mark.parametrize(
    ("template", "answer", "mean"),
    [
        (OPENS, "sum </think> <answer> {} </answer>{end}", 1.0),
        (OPENS, "<think> sum </think> <answer> {} </answer>{end}", 0.0),
        (OPENS.removesuffix("<think>\n"), "<think> sum </think> <answer> {} </answer>{end}", 1.0),
    ],
)
def test_a_trainer_scores_what_a_node_scores(tmp_path, template, answer, mean, monkeypatch):
    """The reward is that of the think block that the prompt opened and the completion together."""
    run = tmp_path / "run.toml"
    run.write_text(RunManifest(name="a-run", task="rg:chain_sum").to_toml())
    prompts, reward = swarm_dataset(str(run), num_prompts=2)
    tokenizer = AutoTokenizer.from_pretrained(trained_model("s"))
    tokenizer.chat_template = template
    trainer = make_trainer(tmp_path, train_dataset=prompts, reward_funcs=reward, processing_class=tokenizer)
    row = prompts[0]
    solution = load_task("rg:chain_sum")[row["prompt_index"]].answer
    ids = tokenizer(answer.format(solution, end=tokenizer.eos_token))["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda prompt_ids, *_: ([ids] * len(prompt_ids), None))
    trainer.model.train()
    trainer._generate_and_score_completions([row] * GROUP_SIZE)
    assert trainer._metrics["train"]["rewards/task_reward/mean"] == [mean]
