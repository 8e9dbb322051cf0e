"""A run's task in TRL: prompts and rewards equal those of the run's nodes."""

import asyncio

import pytest
from transformers import AutoTokenizer

from ftis_node.config.manifest import RunManifest
from ftis_node.errors import TaskError
from ftis_node.integrations.trl.run_dataset import swarm_dataset
from ftis_node.tasks.dataset_task import pinned
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.spec import parse_spec
from tests.integrations.test_trl import GROUP_SIZE, make_trainer
from tests.trained_models import trained_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("spec", "form"), [("arithmetic", "{}"), ("rg:chain_sum", "<think> sum </think> <answer> {} </answer>")]
)
def test_prompts_and_rewards_are_those_of_the_task(tmp_path, spec, form):
    run = tmp_path / "run.toml"
    run.write_text(RunManifest(name="a-run", task=spec).to_toml())
    prompts, reward = swarm_dataset(str(run), num_prompts=3)
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
