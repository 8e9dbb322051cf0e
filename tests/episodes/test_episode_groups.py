"""An episode from the engine to the gradient: sampled, signed, replayed by a receiver, laid out for the learner."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ftis_node.config.manifest import load_manifest
from ftis_node.errors import ModelError
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import EngineSettings
from ftis_node.generation.rollouts import Rollouts, Sampler, _Playing
from ftis_node.learner.batch import make_batch, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.messages import TrainGroup
from ftis_node.models import load_causal_lm, load_tokenizer, resolve_model
from ftis_node.models.chat_template import PromptSettings
from ftis_node.node.training.step_peers import train_group
from ftis_node.records.codec import hash_messages, hash_observations, hash_prompt, unpack_group
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.group import FinishReason, Group, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.replay.reader import ReplayReader
from ftis_node.replay.rollout_rows import flat_rows, group_rows
from ftis_node.replay.rows import StoredGroup
from ftis_node.swarm.reasons import REFUSALS
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.validation import Refused, ValidationContext, validate
from tests.conftest import fill_buffer

RUN = load_manifest("guess-ftis")
TASK = load_task("guess")
ITEM = TASK[0]


@pytest.fixture(scope="module")
def source(tiny_models):
    return resolve_model(str(tiny_models["s"]))


@pytest.fixture(scope="module")
def tokenizer(source):
    return load_tokenizer(source, prompts=PromptSettings())


async def play(source, tokenizer, *, num_completions: int = 8) -> Rollouts:
    engine = await choose_engine("torch")(source, EngineSettings(vocab_size=tokenizer.vocab_size, seed=3))

    try:
        async with IsolatedScorer(TASK) as scorer:
            sampler = Sampler(
                generate=engine.generate,
                sampling=SamplingSettings(),
                completion_limit=RUN.sampling.completion_limit,
                eos_ids=frozenset(tokenizer.eos_ids),
                tokenizer=tokenizer,
                scorer=scorer,
                episode=RUN.episode,
            )
            rollouts = await sampler.sample(ITEM, tokenizer.encode_prompt(ITEM.prompt), num_completions)
    finally:
        await engine.close()
    assert rollouts is not None
    return rollouts


@pytest.fixture
async def rollouts(source, tokenizer) -> Rollouts:
    return await play(source, tokenizer)


@pytest.fixture
def group(identity: Identity, source, tokenizer, rollouts: Rollouts) -> Group:
    return Group(
        run_id=RUN.run_id,
        sender=identity.peer_id,
        number=1,
        prompt_ref=ITEM.ref,
        problem_hash=hash_messages(ITEM.prompt),
        prompt_hash=hash_prompt(tokenizer.encode_prompt(ITEM.prompt)),
        tokens=rollouts.result.tokens,
        finish_reasons=rollouts.result.finish_reasons,
        rewards=tuple(reward for reward, _ in rollouts.scores),
        statuses=tuple(status for _, status in rollouts.scores),
        policy_versions=rollouts.result.policy_versions,
        policy_versions_newest=rollouts.result.policy_versions_newest,
        sampling=SamplingSettings(),
        model=str(source.folder),
        tokenizer=tokenizer.fingerprint,
        created_at=round(time.time(), 3),
        end_ids=tokenizer.end_ids,
        turn_lengths=rollouts.turn_lengths,
        observation_hash=rollouts.observation_hash,
    )


async def judged(group: Group, identity: Identity, tokenizer, **changes: Any) -> Accepted | Refused:
    async with IsolatedScorer(TASK) as scorer:
        context = ValidationContext(
            manifest=RUN,
            tokenizer=tokenizer,
            resolve=lambda ref, cost: scorer.resolve(ref, cost=cost),
            scorer=scorer,
            is_known=lambda group_id: False,
            has_number=lambda sender, number: False,
        )
        return await validate(seal_group(group, identity).to_bytes(), replace(context, **changes))


def longest(group: Group) -> int:
    """Return the completion with the most turns, two or more."""
    row = max(range(len(group.turn_lengths)), key=lambda row: len(group.turn_lengths[row]))
    assert len(group.turn_lengths[row]) > 1, "no completion of the model has two turns: choose another seed"
    return row


async def test_an_honest_episode_is_accepted_with_its_rewards_and_observations(group, identity, tokenizer) -> None:
    accepted = await judged(group, identity, tokenizer)
    assert isinstance(accepted, Accepted), accepted
    assert accepted.group.rewards == group.rewards
    assert len(accepted.observation_ids) == sum(len(lengths) - 1 for lengths in group.turn_lengths)
    texts = {tokenizer.decode(ids, skip_special=False) for ids in accepted.observation_ids}
    assert texts <= {f"\n<|im_start|>user\n{sign}<|im_end|>\n<|im_start|>assistant\n" for sign in "+-?"}


@pytest.mark.parametrize("codec", ["exact", "lossless", "lossy"])
def test_turns_travel_in_each_codec(group, identity, codec) -> None:
    again = unpack_group(seal_group(group, identity, codec=codec).body)
    assert (again.turn_lengths, again.observation_hash) == (group.turn_lengths, group.observation_hash)
    assert again.tokens.has_same_ids(group.tokens)


async def test_the_learner_finds_the_log_probs_of_the_engine(source, tokenizer, group, identity) -> None:
    """It sees the observations as the engine did, and only sampled tokens have a cell."""
    accepted = await judged(group, identity, tokenizer)
    sent = train_group(StoredGroup.from_accepted(accepted, own=True), share="vertical", end_ids=tokenizer.end_ids)
    batch = make_batch([sent])
    assert batch.num_tokens == group.num_tokens
    assert max(batch.lengths) > max(
        len(prompt) + len(ids) for prompt, ids in zip(batch.prompts, batch.completions, strict=True)
    )
    model = load_causal_lm(source, dtype=torch.float32)
    engine_logprobs = batch.behaviour_logprobs[batch.mask]
    for parts in (make_micro_batches(batch, max_tokens=64), [one_text_at_a_time(batch, row) for row in range(8)]):
        found = torch.full(batch.mask.shape, torch.nan)
        for part in parts:
            logits = model(input_ids=part.token_ids).logits.flatten(0, 1)[part.predictor_index]
            logprobs = logits.log_softmax(-1).gather(1, part.target_ids[:, None])[:, 0]
            found.view(-1)[part.cell_index] = logprobs.detach()
        assert torch.allclose(found[batch.mask], engine_logprobs, atol=1e-4)
        assert found[~batch.mask].isnan().all()


def one_text_at_a_time(batch, row):
    """Return the packed layout of one completion, which any attention computes as plain text."""
    (part,) = make_packed_micro_batches(batch.only(torch.tensor([row])), max_tokens=1)
    return replace(part, cell_index=part.cell_index % batch.mask.shape[1] + row * batch.mask.shape[1])


def test_packed_texts_have_the_observations_as_context(tokenizer, group, identity, source) -> None:
    """The packed layout of a whole group names for each sampled token the place before it."""
    observations = tuple((3, 4) for lengths in group.turn_lengths for _ in lengths[1:])
    sent = TrainGroup(
        "ab",
        "ab",
        own=True,
        body=seal_group(group, identity).body,
        prompt_ids=np.array([5, 6], "<i4").tobytes(),
        rewards=group.rewards,
        observation_ids=observations,
    )
    batch = make_batch([sent])
    (part,) = make_packed_micro_batches(batch, max_tokens=4096)
    row = longest(group)
    cells = part.cell_index // batch.mask.shape[1] == row
    targets, places = part.target_ids[cells].tolist(), part.predictor_index[cells]
    assert targets == batch.completions[row].tolist()
    first = group.turn_lengths[row][0]
    assert part.token_ids[0, places[first]] == 4, "the last id of an observation predicts the next turn"
    assert part.positions[0, places].tolist() == (1 + batch.sampled_at[row]).tolist()


async def test_a_group_with_other_observations_cannot_be_trained_on(group, identity, tokenizer) -> None:
    accepted = await judged(group, identity, tokenizer)
    stored = StoredGroup.from_accepted(accepted, own=True)
    with pytest.raises(ValueError, match="other observations"):
        make_batch([train_group(replace(stored, observation_ids=stored.observation_ids[1:]), share="vertical")])


def one_turn_less(group: Group) -> Group:
    """Leave out the last turn of a completion, with its observation, as a sender that ends an episode early."""
    row = longest(group)
    completions = list(group.completions)
    kept = sum(group.turn_lengths[row][:-1])
    old = completions[row]
    completions[row] = replace(
        old, token_ids=old.token_ids[:kept], logprobs=old.logprobs[:kept], finish_reason=FinishReason.STOP, reward=0.0
    )
    turns = list(group.turn_lengths)
    turns[row] = turns[row][:-1]
    shorter = replace(group.with_completions(completions), turn_lengths=tuple(turns))
    return replace(shorter, observation_hash=hash_observations(observations_of(shorter)))


def observations_of(group: Group) -> list[tuple[str, ...]]:
    """Return the observations between the turns, played from the texts of the tiny model's tokens."""
    tokenizer = load_tokenizer(resolve_model(group.model), prompts=PromptSettings())
    played = []
    for ids, lengths, reason in zip(group.tokens.ids_of_each(), group.turn_lengths, group.finish_reasons, strict=True):
        turns = np.split(ids, np.cumsum(lengths)[:-1])
        stopped = [*[True] * (len(turns) - 1), reason is FinishReason.STOP]
        texts = [
            tokenizer.answer_text(turn.tolist(), has_stopped=has_stopped, opening="") or ""
            for turn, has_stopped in zip(turns, stopped, strict=True)
        ]
        played.append(TASK.play(ITEM, texts).observations[: len(turns) - 1])
    return played


def shifted_turns(group: Group) -> Group:
    """Move the border between two turns by one token."""
    row = longest(group)
    first, second, *rest = group.turn_lengths[row]
    step = 1 if second > 1 else -1
    turns = list(group.turn_lengths)
    turns[row] = (first + step, second - step, *rest)
    return replace(group, turn_lengths=tuple(turns))


def joined_turns(group: Group) -> Group:
    """Say that two turns were one."""
    row = longest(group)
    first, second, *rest = group.turn_lengths[row]
    turns = list(group.turn_lengths)
    turns[row] = (first + second, *rest)
    return replace(group, turn_lengths=tuple(turns))


def with_reward(group: Group) -> Group:
    return replace(group, rewards=((group.rewards[0] + 0.5) % 1.0, *group.rewards[1:]))


@pytest.mark.parametrize(
    ("lie", "reasons"),
    [
        (lambda group: replace(group, observation_hash=hash_observations([["+"]] * 8)), {"episode_mismatch"}),
        (with_reward, {"reward_mismatch"}),
        (one_turn_less, {"episode_mismatch"}),
        (shifted_turns, {"finish_reason"}),
        (joined_turns, {"finish_reason"}),
        (lambda group: replace(group, turn_lengths=(), observation_hash=b""), {"episode_mismatch"}),
    ],
)
async def test_a_lie_about_an_episode_is_refused_by_name(group, identity, tokenizer, lie, reasons) -> None:
    verdict = await judged(lie(group), identity, tokenizer)
    assert isinstance(verdict, Refused)
    assert verdict.refusal.reason in reasons, verdict.refusal
    assert verdict.signed


async def test_a_turn_by_older_weights_leaves_possible_versions(source, tokenizer, identity, group, rollouts) -> None:
    """A learner that restarts at its checkpoint may lower the version between two turns."""
    row = longest(group)
    playing = _Playing([1])
    for version in (10, 8):
        playing.take(replace(group.completions[row], policy_version=version, policy_version_newest=version))
    completion = playing.completion()
    assert (completion.policy_version, completion.policy_version_newest) == (8, 10)


async def test_a_sender_with_other_end_tokens_is_not_charged_for_its_length(group, identity, tokenizer) -> None:
    """Its observations may have other tokens than here, so the same turns may be too long here alone."""
    short = RUN.model_copy(update={"sampling": RUN.sampling.model_copy(update={"max_total_tokens": 40})})
    here = replace(group, run_id=short.run_id)
    verdict = await judged(here, identity, tokenizer, manifest=short)
    assert isinstance(verdict, Refused)
    assert verdict.refusal.reason == "length"
    other = replace(here, end_ids=(*group.end_ids, tokenizer.vocab_size - 1))
    verdict = await judged(other, identity, tokenizer, manifest=short)
    assert isinstance(verdict, Refused)
    assert verdict.refusal.reason == "too_long_here"


async def test_exported_rows_have_the_turns_and_the_observations_between_them(
    group, identity, tokenizer, tmp_path
) -> None:
    accepted = await judged(group, identity, tokenizer)
    fill_buffer(tmp_path / "replay.sqlite", accepted)
    with closing(ReplayReader(tmp_path / "replay.sqlite")) as reader:
        rows = list(flat_rows(group_rows(reader)))
    assert [tuple(row["turn_lengths"]) for row in rows] == list(group.turn_lengths)
    assert [ids for row in rows for ids in row["observation_ids"]] == list(map(list, accepted.observation_ids))
    assert [len(row["observation_ids"]) for row in rows] == [len(turns) - 1 for turns in group.turn_lengths]


async def test_a_replay_that_takes_long_blames_nobody(group, identity, tokenizer, monkeypatch) -> None:
    """A machine ten times slower would otherwise charge an honest sender."""
    played = IsolatedScorer.play

    async def slowly(self, item, texts, *, cost):
        cost.seconds += 5.0
        return await played(self, item, texts, cost=cost)

    monkeypatch.setattr(IsolatedScorer, "play", slowly)
    verdict = await judged(group, identity, tokenizer)
    assert isinstance(verdict, Refused)
    assert verdict.refusal.reason == "scoring_failed"
    assert REFUSALS["scoring_failed"].behaviour is Behaviour.HARMLESS


def test_an_observation_without_an_embedding_is_an_error_of_the_model(tokenizer, monkeypatch) -> None:
    ids = tokenizer.encode_observation("+", opening="", max_tokens=4)
    monkeypatch.setattr(tokenizer, "vocab_size", max(ids))
    with pytest.raises(ModelError, match="embeddings"):
        tokenizer.encode_observation("+", opening="", max_tokens=4)
