"""A run's task in TRL: prompts and rewards are those of the run's nodes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.integrations.trl.run_dataset import swarm_dataset
from ftis_node.tasks.registry import load_task
from tests.integrations.test_trl import make_trainer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("spec", "form"), [("arithmetic", "{}"), ("rg:chain_sum", "<think> sum </think> <answer> {} </answer>")]
)
def test_prompts_and_rewards_are_those_of_the_task(tmp_path: Path, spec: str, form: str) -> None:
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


def test_the_trainer_steps_on_them(tmp_path: Path) -> None:
    prompts, reward = swarm_dataset("arithmetic-ftis", num_prompts=8)
    trainer = make_trainer(tmp_path, train_dataset=prompts, reward_funcs=reward)
    trainer.train()
    log = trainer.state.log_history[0]
    assert 0 <= log["rewards/task_reward/mean"] <= 1
