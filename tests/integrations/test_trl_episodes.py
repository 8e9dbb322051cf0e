"""Episodes of a TRL trainer in a swarm: played turn by turn, shared without observations, trained on with a mask."""

import asyncio
import itertools
import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ftis_node.algorithms import policy_loss
from ftis_node.errors import ConfigError
from ftis_node.integrations.trl.foreign_groups import foreign_rows, join_batches
from ftis_node.integrations.trl.grpo import own_groups
from ftis_node.integrations.trl.run_task import swarm_dataset, swarm_rollout
from ftis_node.integrations.trl.swarm_exchange import ExchangeNode, SwarmExchange, require_agreement, sampling_options
from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.records.codec import unpack_group
from ftis_node.records.envelope import Accepted, open_envelope
from ftis_node.records.identity import Identity
from tests.conftest import EOS, make_completion
from tests.episodes.played import RUN, TASK, play, played_group
from tests.episodes.test_episode_groups import judged
from tests.integrations.test_trl import Recorded, logprobs_by_hand
from tests.integrations.test_trl_exchange import exchange_node, swarm_trainer
from tests.integrations.test_trl_foreign import FIT, read
from tests.node.exchange.parts import MANIFEST
from tests.trained_models import trained_model

pytestmark = pytest.mark.filterwarnings("ignore")
ANN = Identity.from_seed(bytes([2]) * 32)
SIZE = RUN.sampling.group_size
EPISODES = replace(FIT, max_total_tokens=12)
TURNS = {
    "completions": (
        replace(make_completion(10, EOS, 11, 12, EOS, reward=1.0), turn_lengths=(2, 3)),
        replace(make_completion(13, 14), turn_lengths=(2,)),
    ),
    "observation_hash": bytes(16),
}


def test_only_sampled_tokens_are_shared_each_run_of_them_as_a_turn():
    batch = {
        "prompt_ids": torch.tensor([[5], [5]]),
        "prompt_mask": torch.ones(2, 1, dtype=torch.int64),
        "completion_ids": torch.tensor([[7, 2, 20, 21, 8, 9, 2], [9, 2, 0, 0, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1] * 7, [1, 1, 0, 0, 0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1, 1], [1] * 7]),  # TRL pads with 1
    }
    logprobs = -torch.arange(14.0).reshape(2, 7)
    logprobs[0, 2] = torch.nan  # an observed token
    inputs = [{"prompt_index": 4, "prompt": [{"role": "user", "content": "4"}]}] * 2
    fit = replace(EPISODES, observation_form=(20, 21))
    [group] = own_groups(batch, logprobs, inputs, fit, policy_version=7)
    assert (group.lengths, group.turn_lengths, group.observation_form) == ([5, 2], [[2, 3], [2]], [20, 21])
    assert np.frombuffer(group.token_ids, "<i4").tolist() == [7, 2, 8, 9, 2, 9, 2]
    assert np.frombuffer(group.logprobs, "<f4").tolist() == [0, -1, -4, -5, -6, -7, -8]


def test_observations_of_a_foreign_group_are_context_that_no_loss_counts(identity):
    group = read(identity, EPISODES, observation_ids=[[20, 21]], **TURNS)
    assert group is not None
    rows = foreign_rows([group], first_group=1, scale="std")
    assert rows["completion_ids"].tolist() == [[10, EOS, 20, 21, 11, 12, EOS], [13, 14, 0, 0, 0, 0, 0]]
    assert rows["completion_mask"].sum(dim=1).tolist() == [7, 2]
    assert (rows["tool_mask"] * rows["completion_mask"]).tolist() == [[1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    first, second = (one.logprobs.tolist() for one in group.group.completions)
    expected = torch.tensor([[*first[:2], 0, 0, *first[2:]], [*second, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(rows["sampling_per_token_logps"], expected)

    plain = {name: value[:, :3] if value.dim() == 2 else value for name, value in rows.items()}
    del plain["tool_mask"]
    for own, foreign in ((plain, rows), (rows, plain)):
        joined = join_batches(own, foreign, padding_id=0)
        assert joined["tool_mask"].shape == joined["completion_mask"].shape == (4, 7)
        assert int(joined["num_items_in_batch"]) == 5 + 7


@pytest.mark.parametrize(
    ("fit", "changes"),
    [
        (FIT, {}),
        (replace(EPISODES, max_total_tokens=9), {}),
        (replace(EPISODES, max_completion_length=2), {}),
        (replace(EPISODES, vocab_size=21), {}),
        (EPISODES, {"observation_ids": []}),
        (EPISODES, {"completions": None, "observation_hash": b""}),
    ],
    ids=["plain run", "length", "turn", "vocabulary", "observations", "one turn"],
)
def test_episodes_that_do_not_fit_are_not_used(identity, fit, changes):
    assert read(identity, EPISODES, observation_ids=[[20, 21]], **TURNS) is not None
    assert read(identity, fit, **{"observation_ids": [[20, 21]]} | TURNS | changes) is None


async def test_episodes_are_played_with_the_trainers_generation_one_call_for_each_turn():
    """The caller's loop runs, as in a notebook. Two problems have one text, and the third has no space for a turn."""
    tokenizer = load_tokenizer(resolve_model(str(trained_model("s"))))
    pairs = itertools.combinations([TASK[index] for index in range(400)], 2)
    here, there = next((one, two) for one, two in pairs if one.prompt == two.prompt and one.answer < two.answer)
    prompt, end = tokenizer.encode_prompt(here.prompt), tokenizer.end_ids[0]
    won, cut = [*tokenizer.encode_text(here.answer), end], tokenizer.encode_text("1" * 20)
    calls: list[list[list[int]]] = []

    def generate(prompts: list[list[int]], *_: object) -> tuple[list[list[int]], list[list[float]]]:
        calls.append(prompts)
        turn = won if len(calls) == 1 else cut
        return [turn] * len(prompts), [[-1.0] * len(turn)] * len(prompts)

    trainer: Any = SimpleNamespace(
        texts=tokenizer,
        use_vllm=True,
        accelerator=SimpleNamespace(num_processes=1),
        prompt_indices=[here.ref.index, there.ref.index, here.ref.index],
        _tokenize_prompts=lambda prompts: ([prompt, prompt, prompt * 20], None, {}),
        _generate_single_turn=generate,
    )
    found = swarm_rollout("guess-ftis")([here.prompt] * 3, trainer)
    observed = tokenizer.encode_observation("+", opening="", max_tokens=4)
    assert calls == [[prompt] * 2, [[*prompt, *won, *observed]]]
    assert found["prompt_ids"] == [prompt, prompt, prompt * 20]
    assert found["completion_ids"] == [won, [*won, *observed, *cut[:8]], [end]]
    mask = [1] * len(won) + [0] * len(observed) + [1] * 8
    assert found["env_mask"] == [[1] * len(won), mask, [0]]
    assert found["logprobs"] == [[-1.0] * len(won), [-1.0 * value for value in mask], [0.0]]
    texts = [here.answer, "1" * 8]
    assert found["episode_reward"] == [1.0, TASK.play(there, texts).reward, None]  # type: ignore[attr-defined]
    assert found["scored_text"] == [here.answer, "\n> +\n".join(texts), None]
    trainer.use_vllm = False
    assert swarm_rollout("guess-ftis")([here.prompt] * 3, trainer)["logprobs"] is None


async def test_a_real_step_shares_episodes_and_trains_on_those_of_a_peer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tests.integrations.test_trl.SwarmGRPOTrainer", Recorded)
    async with exchange_node(tmp_path / "home", manifest=RUN) as node:
        items = [TASK[index] for index in range(16)]
        played = await play(resolve_model(str(trained_model("m"))), node.tokenizer, items)
        rollouts, item = max(zip(played, items, strict=True), key=lambda each: len(set(each[0].scores)))
        admitted = await judged(played_group(rollouts, ANN, node.tokenizer, item=item), ANN, node.tokenizer)
        assert isinstance(admitted, Accepted) and node.store.buffer.admit(admitted, own=False)

        exchange = await asyncio.to_thread(SwarmExchange, node.home.root)
        grpo = {"per_device_train_batch_size": 3 * SIZE}
        options = {"grpo": grpo, "rollout_func": swarm_rollout("guess-ftis"), "method_params": {"cap": 1.5}}
        trainer = await asyncio.to_thread(swarm_trainer, tmp_path, exchange, **options)
        with caplog.at_level(logging.WARNING, logger="ftis_node.integrations"):
            await asyncio.to_thread(trainer.train)
        exchange.close()
        assert "not shared" not in caplog.text

        [(inputs, loss)] = trainer.seen
        is_foreign = inputs["sender_ids"] == 1
        assert (len(is_foreign), int(is_foreign.sum())) == (3 * SIZE, SIZE)
        sampled = inputs["completion_mask"].bool() & inputs["tool_mask"].bool()
        assert sorted(inputs["completion_ids"][row][sampled[row]].tolist() for row in is_foreign.nonzero()[:, 0]) == (
            sorted(one.token_ids.tolist() for one in admitted.group.completions)
        )
        before = AutoModelForCausalLM.from_pretrained(trained_model("s"))
        before.load_state_dict(trainer.before)
        learner = logprobs_by_hand(before, inputs)
        behaviour = torch.where(is_foreign[:, None], inputs["sampling_per_token_logps"], learner)
        expected, _ = policy_loss(
            "ftis", learner, behaviour, sampled, inputs["advantages"], inputs["group_ids"], cap=1.5
        )
        assert loss == pytest.approx(float(expected), abs=1e-5)

        envelopes = node.store.reader.envelopes(node.store.reader.own_ready())
        groups = sorted((unpack_group(open_envelope(one).body) for one in envelopes), key=lambda group: group.number)
        rewards = [reward for group in groups for reward in group.rewards]
        assert rewards == pytest.approx(list(trainer._logs["rewards"]["task_reward"]))
        turns = [lengths for group in groups for lengths in group.turn_lengths]
        assert len(turns) == 2 * SIZE and max(map(len, turns)) > 1


async def test_a_run_with_episodes_needs_a_rollout_function_and_only_such_a_run_takes_one(tmp_path):
    with pytest.raises(ConfigError, match="has no episodes: omit rollout_func"):
        swarm_rollout("arithmetic-ftis")
    prompts, reward = swarm_dataset("guess-ftis", num_prompts=1)
    with pytest.raises(ConfigError, match=r"give the trainer rollout_func=swarm_rollout\(RUN\)"):
        await reward(completions=[[{"content": "1"}]], prompt_index=[0])
    rollout = swarm_rollout("guess-ftis")
    with pytest.raises(ConfigError, match="need SwarmGRPOTrainer and the column prompt_index"):
        rollout(prompts["prompt"], object())
    arithmetic = MANIFEST.model_copy(update={"name": "plain"})
    for manifest, changes, message in (
        (RUN, {}, None),
        (arithmetic, {"rollout_func": None}, None),
        (RUN, {"rollout_func": None}, r"guess-ftis has episodes: give rollout_func=swarm_rollout\(RUN\)"),
        (arithmetic, {}, "plain has no episodes: omit rollout_func, or exchange"),
        (RUN, {"tools": [print]}, "omit the tools, or exchange"),
        (RUN, {"max_completion_length": 7}, "max_completion_length is 7, and the run guess-ftis has 8: set it to 8"),
    ):
        args = SimpleNamespace(**sampling_options(manifest.sampling) | changes)
        trainer: Any = SimpleNamespace(args=args, tools=(), rollout_func=rollout, train_dataset=prompts)
        vars(trainer).update(changes)
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            require_agreement(trainer, ExchangeNode(manifest, "aa"), tokenizer="aa")
