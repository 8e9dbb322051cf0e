"""An episode from the engine to the gradient: sampled, signed, replayed by a receiver, laid out for the learner."""

import asyncio
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import numpy as np
import pytest
import torch

from ftis_node.errors import ModelError
from ftis_node.generation.rollouts import Playing
from ftis_node.learner.batch import make_batch, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.messages import TrainGroup
from ftis_node.models import ModelSource, PromptTokenizer, load_causal_lm, load_tokenizer
from ftis_node.node.loops.generate import GenerateLoop
from ftis_node.node.training.step_groups import TrainGroupBuilder
from ftis_node.records.codec import hash_observations, unpack_group
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.group import FinishReason, Group
from ftis_node.records.identity import Identity
from ftis_node.replay.export import flat_rows, group_rows
from ftis_node.replay.reader import ReplayReader
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.swarm.reasons import REFUSALS
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.validation import Refused, ValidationContext, validate
from tests.conftest import fill_buffer, with_sections
from tests.episodes.played import ITEM, LIES, RUN, TASK, Lie, longest, one_turn_less, play, played_group, shorter_turn
from tests.validation.test_pipeline import reason_of

ROOMY = with_sections(RUN, sampling={"max_total_tokens": 400})


@pytest.fixture
async def group(identity: Identity, source, tokenizer) -> Group:
    (rollouts,) = await play(source, tokenizer, [ITEM])
    return played_group(rollouts, identity, tokenizer)


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
    assert isinstance(accepted, Accepted)
    assert_engine_logprobs(accepted, source, tokenizer)


def assert_engine_logprobs(accepted: Accepted, source: ModelSource, tokenizer: PromptTokenizer) -> None:
    """Assert that the model finds the log-probs of a group in each layout of the learner."""
    sent = TrainGroupBuilder("vertical", tokenizer.end_ids).build(StoredGroup.from_accepted(accepted, own=True))
    batch = make_batch([sent])
    assert batch.num_tokens == accepted.group.num_tokens
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
        "ab", "ab", own=True, body=seal_group(group, identity).body, prompt_ids=np.array([5, 6], "<i4").tobytes(),
        rewards=group.rewards, observation_ids=observations,
    )  # fmt: skip
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
        make_batch([TrainGroupBuilder("vertical").build(replace(stored, observation_ids=stored.observation_ids[1:]))])


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lie_about_an_episode_is_refused_by_name(group, identity, tokenizer, lie: Lie) -> None:
    verdict = await judged(lie.change(group, ITEM, tokenizer), identity, tokenizer)
    assert (reason_of(verdict), verdict.signed) == (lie.reason, True), verdict


@pytest.mark.parametrize("change", [one_turn_less, shorter_turn])
@pytest.mark.parametrize("other", ["prompt_hash", "end_ids"])
async def test_an_early_end_in_another_form_is_refused_and_costs_nobody(group, identity, tokenizer, change, other):
    """The sender may have had less space, but not half of it."""
    forms: dict[str, Any] = {"prompt_hash": bytes(4), "end_ids": (*group.end_ids, tokenizer.vocab_size - 1)}
    group = replace(change(group, ITEM, tokenizer), **{other: forms[other]})
    verdict = await judged(replace(group, run_id=ROOMY.run_id), identity, tokenizer, manifest=ROOMY)
    assert reason_of(verdict) == "episode_cut"
    assert REFUSALS["episode_cut"].behaviour is Behaviour.HARMLESS


async def test_an_early_end_costs_nobody_if_templates_differ_after_the_first_turn(group, identity, tokenizer, source):
    """Their prompts are equal, and their observations have other numbers of tokens."""
    other = load_tokenizer(source)
    template = other._tokenizer.chat_template
    end = "'<|im_end|>' + '\n'"
    assert end in template
    other._tokenizer.chat_template = template.replace(end, f"{end} * (message['role'] != 'assistant')")
    assert other.encode_prompt(ITEM.prompt) == tokenizer.encode_prompt(ITEM.prompt)
    assert other.end_ids == tokenizer.end_ids
    assert other.observation_form != tokenizer.observation_form
    for change in (one_turn_less, shorter_turn):
        changed = replace(change(group, ITEM, tokenizer), run_id=ROOMY.run_id)
        assert reason_of(await judged(changed, identity, other, manifest=ROOMY)) == "episode_cut"


async def test_episodes_of_own_weights_have_the_same_observation_form(group, identity, tokenizer) -> None:
    stored = StoredGroup.from_accepted(await judged(group, identity, tokenizer), own=False)
    for form, is_own in ((tokenizer.observation_form, True), ((1, 2), False)):
        sent = TrainGroupBuilder("vertical", tokenizer.end_ids, form).build(stored, of_own_weights=True)
        assert make_batch([sent]).of_own_weights.all() == is_own


async def test_a_stopped_turn_is_refused_and_costs_nobody(group, identity, tokenizer) -> None:
    assert reason_of(await judged(stopped(group, tokenizer), identity, tokenizer)) == "episode_cut"


async def test_a_node_keeps_a_group_with_a_stopped_turn_for_itself(group, tokenizer) -> None:
    for made, is_shared in ((group, True), (stopped(group, tokenizer), False)):
        loop: Any = MagicMock()
        loop._generate = AsyncMock(return_value=(made, 0))
        loop.scored = asyncio.Queue()
        await GenerateLoop._make_group(loop, ITEM, [])
        assert (loop.scored.qsize() == 1) is is_shared
        assert loop.slots.cancel.called is not is_shared


def stopped(group: Group, tokenizer) -> Group:
    """Return the group with a turn that its engine stopped."""
    cut = shorter_turn(group, ITEM, tokenizer)
    rows = zip(cut.finish_reasons, cut.turn_lengths, group.turn_lengths, strict=True)
    reasons = [reason if turns == before else FinishReason.ABORT for reason, turns, before in rows]
    return replace(cut, finish_reasons=tuple(reasons))


def test_a_turn_by_older_weights_leaves_possible_versions(group) -> None:
    """A learner that restarts at its checkpoint may lower the version between two turns."""
    row = longest(group)
    playing = Playing(ITEM, "", [1])
    for version in (10, 8):
        playing.take(replace(group.completions[row], policy_version=version, policy_version_newest=version))
    completion = playing.completion()
    assert (completion.policy_version, completion.policy_version_newest) == (8, 10)


async def test_a_sender_with_other_end_tokens_is_not_charged_for_its_length(group, identity, tokenizer) -> None:
    """Its observations may have other tokens than here, so the same turns may be too long here alone."""
    short = with_sections(RUN, sampling={"max_total_tokens": 40})
    here = replace(group, run_id=short.run_id)
    assert reason_of(await judged(here, identity, tokenizer, manifest=short)) == "length"
    other = replace(here, end_ids=(*group.end_ids, tokenizer.vocab_size - 1))
    assert reason_of(await judged(other, identity, tokenizer, manifest=short)) == "too_long_here"


async def test_exported_rows_have_the_turns_and_the_observations_between_them(group, identity, tokenizer, tmp_path):
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
    assert reason_of(await judged(group, identity, tokenizer)) == "scoring_failed"
    assert REFUSALS["scoring_failed"].behaviour is Behaviour.HARMLESS


async def test_the_observation_after_the_last_turn_need_not_be_encodable(group, identity, tokenizer, monkeypatch):
    """It is no part of the group, and a sender that cannot encode it ends the episode."""
    completions = []
    for one in group.completions:
        ids = one.token_ids[: one.turn_lengths[0]]
        has_stopped = len(one.turn_lengths) > 1 or one.finish_reason is FinishReason.STOP
        text = tokenizer.answer_text(ids.tolist(), has_end=has_stopped, opening="")
        reward = TASK.play(ITEM, [text]).reward
        reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH
        completions.append(
            replace(one, token_ids=ids, logprobs=one.logprobs[: len(ids)], finish_reason=reason, reward=reward)
        )
    lengths = tuple((len(one.token_ids),) for one in completions)
    short = replace(group.with_completions(completions), turn_lengths=lengths)
    short = replace(short, observation_hash=hash_observations([()] * len(lengths)))
    monkeypatch.setattr(tokenizer, "encode_observation", Mock(side_effect=ModelError("no embedding")))
    assert isinstance(await judged(short, identity, tokenizer), Accepted)


def test_an_observation_without_an_embedding_is_an_error_of_the_model(tokenizer, monkeypatch) -> None:
    ids = tokenizer.encode_observation("+", opening="", max_tokens=4)
    monkeypatch.setattr(tokenizer, "vocab_size", max(ids))
    with pytest.raises(ModelError, match="embeddings"):
        tokenizer.encode_observation("+", opening="", max_tokens=4)
