"""A group of one tokenizer is pulled as text, admitted and trained on under another: real loops and models.

Alice publishes a group as her generator would make it. Bob's learner has another vocabulary. They are connected by the
loopback swarm. Bob's generator only accepts new weights; all other parts are real.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessLearner
from ftis_node.lab.tiny_tokenizer import make_tokenizer as make_alices_tokenizer
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import LearnerBoot
from ftis_node.models import PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import NullGeneration, NullLearner
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.group import Completion, FinishReason, Group
from ftis_node.records.identity import Identity
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.telemetry.events import read_events
from tests.conftest import make_group
from tests.models.tiny_models import save_tiny
from tests.node.nodes import components

TEXTS = ("10", "35", " 10 ", "think: 25 - 15")  # completions of 25-15=; the last one is cut off
REWARDS = (1.0, 0.0, 1.0, 0.0)


MANIFEST = RunManifest(
    name="test",
    task="arithmetic",
    sampling={"group_size": 4, "max_prompt_tokens": 48, "max_completion_tokens": 24, "max_total_tokens": 96},
    step={"own_groups": 0, "foreign_groups": 1, "other_tokenizers": "text"},
    method={"advantage_scale": "mean"},
    eval={"every_steps": 0},
)


class _Generation(NullGeneration):
    """A generation client that accepts new weights and generates nothing."""

    async def update_weights(self, weights: Any, proof: Any) -> None:
        assert proof.version == weights.version


@asynccontextmanager
async def _node(
    root: Path, swarm: LoopbackSwarm, manifest: RunManifest, tokenizer: PromptTokenizer, learner: Any = None
) -> AsyncIterator[NodeComponents]:
    """Yield the components of a node whose loops do not run yet."""
    identity, task = Identity.generate(), load_task("arithmetic")
    gossip = swarm.join(identity.peer_id, run_id=manifest.run_id, num_shards=manifest.wire.announcement_shards)
    with components(
        root,
        identity=identity,
        settings=NodeSettings(model="tiny"),
        manifest=manifest,
        gossip=gossip,
        model="node",
        tokenizer=tokenizer,
        task=task,
        scorer=IsolatedScorer(task),
        new_peers_scorer=IsolatedScorer(task),
        generation=_Generation(lambda: 0),
        learner=learner or NullLearner(0),
        slots=SlotPool(4),
    ) as node:
        Wiring(node).serve_peers()
        await gossip.start()
        yield node
        await gossip.close()


def _sampled(parts: NodeComponents) -> Group:
    """Return a group as the generate loop passes it on: the sender's token ids, with low log-probs."""
    item, tokenizer = parts.task[0], parts.tokenizer
    assert item.answer == "10"
    completions = []
    for text, reward in zip(TEXTS, REWARDS, strict=True):
        stopped = text != TEXTS[-1]
        ids = tokenizer.encode_text(text) + [tokenizer.eos_id] * stopped
        completions.append(
            Completion(
                token_ids=np.array(ids, dtype=np.int32),
                logprobs=np.linspace(-4.0, -6.0 - len(text) / 100, len(ids), dtype=np.float32),
                finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                reward=reward,
            )
        )
    return make_group(
        parts.context.identity,
        run_id=parts.context.manifest.run_id,
        prompt_ref=item.ref,
        problem_hash=hash_messages(item.prompt),
        prompt_hash=hash_prompt(tokenizer.encode_prompt(item.prompt)),
        completions=tuple(completions),
        tokenizer=tokenizer.fingerprint,
        end_ids=tokenizer.end_ids,
    )


@asynccontextmanager
async def _running(*loops: Any) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop) for loop in loops]
        yield
        for task in running:
            task.cancel()


@pytest.fixture(scope="module")
def alices():
    return PromptTokenizer(make_alices_tokenizer(), name="alices")


@pytest.fixture(scope="module")
def bobs_model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("bob") / "tiny")


def _boot(model: Path, home: Path, manifest: RunManifest) -> LearnerBoot:
    return LearnerBoot(
        model=str(model),
        model_name="bobs",
        run_id=manifest.run_id,
        checkpoints_dir=str(home / "checkpoints"),
        weights_dir=str(home / "weights"),
        method=manifest.method,
        num_threads=1,
        device="cpu",
        micro_batch_tokens=64,
    )


def _expected_loss(learner: Learner, tokenizer: PromptTokenizer, group: Group, messages: Any) -> float:
    """Return -1/4 times the sum over the two correct completions of min(exp(mean lp - mean lg), 2) * A."""
    prompt, total = tokenizer.encode_prompt(messages), 0.0
    for text, reward, sampled in zip(TEXTS, REWARDS, group.completions, strict=True):
        if reward == 1.0:
            ids = [*tokenizer.encode_text(text), tokenizer.eos_id]
            with torch.no_grad():
                logits = learner.policy.causal_lm(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
            logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
            mean = logprobs.gather(-1, torch.tensor(ids)[:, None]).mean().item()
            total += min(math.exp(mean - sampled.logprobs.mean().item()), 2.0) * 0.5
    return -total / 4


async def test_a_group_of_another_tokenizer_is_trained_on(tmp_path, alices, bobs_model):
    bobs = load_tokenizer(resolve_model(str(bobs_model)))
    assert bobs.fingerprint != alices.fingerprint
    assert any(bobs.encode_text(text) != alices.encode_text(text) for text in TEXTS)
    manifest, swarm = MANIFEST, LoopbackSwarm()
    learner = InProcessLearner(_boot(bobs_model, tmp_path, manifest))
    await learner.start()
    async with (
        _node(tmp_path / "alice", swarm, manifest, alices) as alice,
        _node(tmp_path / "bob", swarm, manifest, bobs, learner) as bob,
    ):
        group = _sampled(alice)
        expected = _expected_loss(learner._started, bobs, group, alice.task[0].prompt)
        assert 0 < -expected < 0.5, "all importance weights are at the cap"
        sending, wiring = Wiring(alice), Wiring(bob)
        loops = (sending.intake, sending.publish_loop, wiring.intake, wiring.pull)
        async with _running(*(loop.run() for loop in loops)):
            await sending.scored.put(group)
            await asyncio.wait_for(wiring.train_loop(wiring.step_gate(), last_step=1).run(), 30)
            wiring.backfill.catch_up(alice.context.peer_id)  # the reply names the group again: it is not pulled again
            await asyncio.sleep(0.2)
        assert dict(bob.context.counters.refused) == {}
        assert bob.gossip.counters.envelopes_in == alice.gossip.counters.envelopes_out == 1
        report = bob.context.counters.last_report
    assert (report.foreign_groups, report.num_updates, report.kept_fraction) == (1, 1, 0.5)
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert report.grad_norm > 0
    (announced,) = read_events(alice.home.events, name="announced")
    (admitted,) = [event for event in read_events(bob.home.events, name="admitted") if not event["own"]]
    (taken,) = read_events(bob.home.events, name="taken")
    (confirmed,) = read_events(alice.home.events, name="confirmed")
    assert admitted["exact_group"] == announced["group"] == confirmed["group"]
    assert taken["group"] == admitted["group"] != announced["group"]
