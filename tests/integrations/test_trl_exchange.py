"""A real GRPO step with an exchange node: own groups go to its buffer, and a foreign group comes into the batch."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.errors import ConfigError
from ftis_node.integrations.trl.foreign_groups import Fit
from ftis_node.integrations.trl.grpo import own_groups
from ftis_node.integrations.trl.run_task import swarm_dataset
from ftis_node.integrations.trl.swarm_exchange import (
    MAX_QUEUED,
    ExchangeClient,
    LinkError,
    RefusedGroupError,
    SwarmExchange,
)
from ftis_node.node.wiring import NodeComponents
from ftis_node.records.codec import hash_messages, unpack_group
from ftis_node.records.envelope import Accepted, open_envelope
from ftis_node.records.identity import Identity
from ftis_node.telemetry.status import Status
from tests.conftest import EOS, accept, make_completion, make_group
from tests.integrations.test_trl import Recorded, make_trainer
from tests.node.exchange.parts import GROUP_SIZE, MANIFEST, exchanging, own_group, serving
from tests.node.nodes import ME
from tests.trained_models import trained_model
from tests.waiting import eventually

pytestmark = pytest.mark.filterwarnings("ignore")
ANN = Identity.from_seed(bytes([2]) * 32)
NUM_GROUPS = 3


MASKING = MANIFEST.model_copy(update={"sampling": MANIFEST.sampling.model_copy(update={"mask_truncated": True})})


@asynccontextmanager
async def exchange_node(folder: Path, *, manifest: RunManifest = MANIFEST) -> AsyncIterator[NodeComponents]:
    """An exchange node. Its home looks to the trainer like that of a running node."""
    async with exchanging(folder, manifest=manifest) as (node, exchange), serving(node, exchange) as (url, _):
        node.home.run_toml.write_text(manifest.to_toml())
        with node.home.owned():
            node.home.publish_address(url)
            yield node


def admit_foreign(node: NodeComponents, *, number: int = 1, **changes: Any) -> Accepted:
    """Store a foreign group in the node's buffer, on which the trainer can train."""
    completions = [make_completion(19 + extra, 20, EOS, reward=float(extra)) for extra in range(GROUP_SIZE)]
    given = {"tokenizer": node.tokenizer.fingerprint, "completions": completions} | changes
    accepted = accept(make_group(ANN, number=number, run_id=node.context.manifest.run_id, **given), ANN)
    assert node.store.buffer.admit(accepted, own=False)
    return accepted


def swarm_trainer(folder: Path, exchange: SwarmExchange, **options: Any) -> Any:
    run = folder / "run.toml"
    run.write_text(exchange.node.manifest.to_toml())
    prompts, reward = swarm_dataset(str(run), num_prompts=64, seed=0)
    grpo = exchange.grpo_options() | {"per_device_train_batch_size": NUM_GROUPS * GROUP_SIZE} | options.pop("grpo", {})
    return make_trainer(
        folder / "trl", exchange=exchange, **{"train_dataset": prompts, "reward_funcs": reward} | options, grpo=grpo
    )


def logprobs_at(temperature: float, model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0] / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1][torch.arange(len(completion)), completion]


async def test_a_real_step_shares_its_groups_and_trains_on_a_foreign_one(tmp_path, monkeypatch):
    temperature = 0.7
    monkeypatch.setattr("tests.integrations.test_trl.SwarmGRPOTrainer", Recorded)
    sampling = MANIFEST.sampling.model_copy(update={"temperature": temperature})
    manifest = MANIFEST.model_copy(update={"sampling": sampling})
    async with exchange_node(tmp_path / "home", manifest=manifest) as node:
        settings = make_group(ANN).sampling
        admit_foreign(node, sampling=replace(settings, temperature=temperature))
        exchange = await asyncio.to_thread(SwarmExchange, node.home.root)
        trainer = await asyncio.to_thread(swarm_trainer, tmp_path, exchange)
        await asyncio.to_thread(trainer.train)
        exchange.close()

        [(inputs, _)] = trainer.seen
        is_foreign = inputs["sender_ids"] == 1
        assert (len(is_foreign), int(is_foreign.sum())) == (NUM_GROUPS * GROUP_SIZE, GROUP_SIZE)
        assert node.store.reader.figures().released == {"trained": 1}

        ready = node.store.reader.own_ready()
        assert len(ready) == NUM_GROUPS - 1, "an own group is missing"
        model = AutoModelForCausalLM.from_pretrained(trained_model("s"))
        model.load_state_dict(trainer.before)
        own_ids = {tuple(row) for row in inputs["completion_ids"][~is_foreign].tolist()}
        for group_id in ready:
            [envelope] = node.store.reader.envelopes([group_id])
            group = unpack_group(open_envelope(envelope).body)
            assert (group.sender, group.policy_version, group.sampling.temperature) == (ME.peer_id, 0, temperature)
            prompt = node.tokenizer.encode_prompt(node.task[group.prompt_ref.index].prompt)
            for one in group.completions:
                ids = one.token_ids.tolist()
                assert any(row[: len(ids)] == tuple(ids) for row in own_ids)
                expected = logprobs_at(temperature, model, prompt, ids)
                torch.testing.assert_close(torch.from_numpy(one.logprobs.copy()), expected, atol=1e-4, rtol=0)
        [line] = [line for line in trainer.state.log_history if "foreign_groups" in line]
        assert line["shared_groups"] == 0, "groups are counted with the next batch"
        assert exchange.take_num_shared() == NUM_GROUPS - 1


async def test_an_unusable_group_is_replaced_by_the_next(tmp_path):
    async with exchange_node(tmp_path) as node:
        exchange = await asyncio.to_thread(SwarmExchange, node.home.root, per_batch=2)
        fit = (await asyncio.to_thread(swarm_trainer, tmp_path, exchange))._fit
        equal = [make_completion(19 + extra, 20, EOS) for extra in range(GROUP_SIZE)]
        now = time.time()
        for number, changes in ((1, {}), (2, {"completions": equal}), (3, {"tokenizer": "00" * 16}), (4, {})):
            admit_foreign(node, number=number, created_at=now + number / 100, **changes)
        drawn = await asyncio.to_thread(exchange.draw, fit)
        assert [one.group.number for one in drawn] == [4, 1]
        assert await asyncio.to_thread(exchange.draw, fit) == []
        exchange.close()


async def test_a_trainer_continues_during_an_outage_of_its_exchange_node(tmp_path, caplog, monkeypatch):
    async with exchange_node(tmp_path / "home") as node:
        exchange = await asyncio.to_thread(SwarmExchange, node.home.root, per_batch=1)
        trainer = await asyncio.to_thread(swarm_trainer, tmp_path, exchange)
        group = own_group(node.tokenizer, ["1", "2"])
    calls: list[int] = []
    plain = ExchangeClient.take
    monkeypatch.setattr(ExchangeClient, "take", lambda client, count: calls.append(count) or plain(client, count))
    with caplog.at_level(logging.WARNING, logger="ftis_node.integrations"):
        await asyncio.to_thread(trainer.train)
        for _ in range(3):
            exchange.share(group)
            assert await asyncio.to_thread(exchange.draw, trainer._fit) == []
    assert trainer.state.global_step == 1, "the trainer stopped"
    assert len([record for record in caplog.records if "exchange node unreachable" in record.message]) == 1
    assert len(calls) <= 2, "calls are made during the pause after a failure"
    caplog.clear()
    async with exchange_node(tmp_path / "home") as node:
        admit_foreign(node)
        drawn = await eventually(lambda: asyncio.to_thread(exchange.draw, trainer._fit))
        assert [one.group.number for one in drawn] == [1]
        assert await asyncio.to_thread(exchange.flush, 60.0)
        assert len(node.store.reader.own_ready()) >= 1, "the queue is not sent after the outage"
    exchange.close()
    assert "reachable again" in caplog.text


async def test_a_refused_group_is_logged_once_and_others_are_shared(tmp_path, caplog):
    async with exchange_node(tmp_path) as node:
        exchange = await asyncio.to_thread(SwarmExchange, node.home.root)
        valid, invalid = own_group(node.tokenizer, ["1", "2"]), own_group(node.tokenizer, ["3", "4"], temperature=0.5)
        client = ExchangeClient(node.home.root, timeout_s=30)
        with pytest.raises(RefusedGroupError) as caught:
            await asyncio.to_thread(client.publish, invalid)
        assert caught.value.reason == "sampling"
        with caplog.at_level(logging.WARNING, logger="ftis_node.integrations"):
            for group in (invalid, invalid, valid):
                exchange.share(group)
            assert await asyncio.to_thread(exchange.flush, 60.0)
        assert caplog.text.count("own group not shared (sampling)") == 1
        assert "unreachable" not in caplog.text
        assert exchange.take_num_shared() == 1
        exchange.close()


async def test_the_newest_groups_are_kept_during_an_outage(tmp_path):
    async with exchange_node(tmp_path) as node:
        exchange = await asyncio.to_thread(SwarmExchange, node.home.root)
        groups = [own_group(node.tokenizer, ["1", "2"], policy_version=version) for version in range(MAX_QUEUED + 8)]
    assert await asyncio.to_thread(exchange.draw, None) == [], "a group comes from a stopped node"
    for group in groups:
        exchange.share(group)
    began_at = time.monotonic()
    assert not await asyncio.to_thread(exchange.flush, 600.0)
    assert time.monotonic() - began_at < 60, "flush waits during an outage"
    waiting = [group.policy_version for group in exchange._queue]
    exchange.close()
    assert len(waiting) in (MAX_QUEUED, MAX_QUEUED - 1)  # one may be in flight
    assert waiting[-1] == MAX_QUEUED + 7


async def test_a_wrong_token_is_a_link_error(tmp_path):
    async with exchange_node(tmp_path) as node:
        node.home.control_token.write_text("0" * 32)
        client = ExchangeClient(node.home.root, timeout_s=30)
        with pytest.raises(LinkError, match="token"):
            await asyncio.to_thread(client.take, 1)


async def test_a_missing_exchange_node_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no node runs on .*: start it: ftis-node join --role exchange --home"):
        SwarmExchange(tmp_path)
    async with exchanging(tmp_path) as (node, exchange), serving(node, exchange) as (url, _):
        with Home(tmp_path).owned():
            node.home.publish_address(url.rsplit(":", 1)[0] + ":1")
            with pytest.raises(ConfigError, match="no exchange node answers"):
                await asyncio.to_thread(SwarmExchange, tmp_path)
            node.home.publish_address(url)
            with pytest.raises(ConfigError, match=r"run\.toml"):
                await asyncio.to_thread(SwarmExchange, tmp_path)


def test_a_node_of_another_role_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.integrations.trl.swarm_exchange.read_status", lambda home: Status())
    monkeypatch.setattr(Home, "running_url", lambda home: "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="has the role full: start it"):
        SwarmExchange(tmp_path)
    with pytest.raises(ConfigError, match="per_batch must be 0 to 16"):
        SwarmExchange(tmp_path, per_batch=17)

    def not_readable(home: Home) -> None:
        raise PermissionError("of another user")

    monkeypatch.setattr(Home, "running_url", not_readable)
    with pytest.raises(ConfigError, match="no exchange node answers .of another user.: start it"):
        SwarmExchange(tmp_path)


@pytest.mark.parametrize(
    ("grpo", "options", "message"),
    [
        ({"temperature": 0.5}, {}, "temperature is 0.5, and the run test has 1.0"),
        ({"num_generations": 3}, {}, "num_generations is 3"), ({"top_p": 0.9}, {}, "top_p is 0.9"),
        ({"max_completion_length": 7}, {}, "set it to 6 or less"),
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty"), ({"min_p": 0.1}, {}, "min_p"),
        ({"mask_truncated_completions": True}, {}, "mask_truncated_completions"),
        ({}, {"train_dataset": None}, "prompt_index"), ({}, {"manifest": MASKING}, "sets sampling.mask_truncated"),
    ],
    ids=str,
)  # fmt: skip
async def test_a_trainer_with_other_sampling_settings_is_refused_at_its_start(tmp_path, grpo, options, message):
    async with exchange_node(tmp_path / "home", manifest=options.pop("manifest", MANIFEST)) as node:
        exchange = await asyncio.to_thread(SwarmExchange, node.home.root)
        if "train_dataset" in options:
            options = {"train_dataset": Dataset.from_dict({"prompt": ["1+1="] * 4})}
        with pytest.raises(ConfigError, match=message):
            await asyncio.to_thread(swarm_trainer, tmp_path, exchange, grpo=grpo, **options)
        exchange.close()


def test_an_incomplete_group_is_not_shared():
    batch = {
        "prompt_ids": torch.tensor([[0, 5], [0, 5]] * 3),
        "prompt_mask": torch.tensor([[0, 1], [0, 1]] * 3),
        "completion_ids": torch.tensor([[7, 8, 2], [9, 2, 0]] * 3),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]]),
    }
    logprobs = torch.full((6, 3), -0.5)
    logprobs[1, 2] = torch.nan  # padding
    logprobs[5, 0] = torch.nan
    rows = [{"prompt_index": number, "prompt": [{"role": "user", "content": f"{number}"}]} for number in (4, 5, 6)]
    inputs = [row for row in rows for _ in range(2)]
    [group] = own_groups(batch, logprobs, inputs, Fit("aa", 32, 2, 1.0, 3, end_ids=(2,)), policy_version=7)
    assert (group.problem, group.lengths, group.policy_version) == (4, [3, 2], 7)
    assert (group.problem_hash, group.end_ids) == (hash_messages(rows[0]["prompt"]), [2])
    assert np.frombuffer(group.token_ids, "<i4").tolist() == [7, 8, 2, 9, 2]
    assert np.frombuffer(group.prompt_ids, "<i4").tolist() == [5]
    assert np.frombuffer(group.logprobs, "<f4").tolist() == [-0.5] * 5
