"""Turns that end at a stop string: sampled by real engines, replayed by a receiver."""

from dataclasses import replace

import numpy as np
import pytest

from ftis_node.records.envelope import Accepted
from ftis_node.records.group import FinishReason, Group
from ftis_node.validation import Refused
from tests.conftest import with_sections
from tests.episodes.played import ITEM, RUN, play, played_group
from tests.episodes.test_episode_groups import assert_engine_logprobs, judged

STRINGS = ("7", "9", "0")
STOPPING = with_sections(RUN, sampling={"max_total_tokens": 400}, episode={"stop": STRINGS})


@pytest.fixture
async def group(identity, source, tokenizer) -> Group:
    (rollouts,) = await play(source, tokenizer, [ITEM], run=STOPPING)
    return played_group(rollouts, identity, tokenizer, run_id=STOPPING.run_id)


def turns_of(group: Group) -> list[list[list[int]]]:
    each = zip(group.tokens.ids_of_each(), group.turn_lengths, strict=True)
    return [[turn.tolist() for turn in np.split(ids, np.cumsum(lengths)[:-1])] for ids, lengths in each]


async def test_a_turn_ends_with_its_first_stop_string_for_all(group, identity, source, tokenizer) -> None:
    """The template's end token follows it, which the model did not sample."""
    accepted = await judged(group, identity, tokenizer, manifest=STOPPING)
    assert isinstance(accepted, Accepted), accepted
    assert accepted.group.rewards == group.rewards
    assert_engine_logprobs(accepted, source, tokenizer)
    observations = iter(accepted.observation_ids)
    num_stopped = 0
    for turns in turns_of(group):
        for turn, observed in zip(turns[:-1], observations, strict=False):
            has_end = turn[-1] in tokenizer.end_ids
            assert has_end != tokenizer.decode(turn).endswith(STRINGS)
            assert not any(string in tokenizer.decode(turn[:-1]) for string in STRINGS)
            start = "" if has_end else "<|im_end|>"
            assert tokenizer.decode(observed, skip_special=False).startswith(f"{start}\n<|im_start|>user\n")
            num_stopped += not has_end
    assert num_stopped > 1, "no turn of the model has a stop string: choose others"


def longer_turn(group: Group, row: int) -> Group:
    """Join the first two turns of a completion."""
    turns = list(group.turn_lengths)
    first, second, *rest = turns[row]
    turns[row] = (first + second, *rest)
    return replace(group, turn_lengths=tuple(turns))


def shorter_turn(group: Group, row: int) -> Group:
    """Remove the last token of the first turn of a completion."""
    completions, (first, *rest) = list(group.completions), group.turn_lengths[row]
    old, turns = completions[row], (first - 1, *rest)
    ids, logprobs = (np.delete(values, first - 1) for values in (old.token_ids, old.logprobs))
    completions[row] = replace(old, token_ids=ids, logprobs=logprobs, turn_lengths=turns)
    return group.with_completions(completions)


def cut_turn(group: Group, row: int) -> Group:
    """Claim that the limit ended the last turn."""
    completions = list(group.completions)
    completions[row] = replace(completions[row], finish_reason=FinishReason.LENGTH)
    return group.with_completions(completions)


@pytest.mark.parametrize(
    ("lie", "of_turn", "detail"),
    [
        (longer_turn, 0, "turn 1 goes on after a stop string"),
        (shorter_turn, 0, "the end of turn 1 does not fit its text"),
        (cut_turn, -1, "does not fit its text"),
    ],
)
async def test_a_false_end_of_a_turn_is_refused_by_name(group, identity, tokenizer, lie, of_turn, detail) -> None:
    ends = [turns[of_turn] for turns in turns_of(group)]
    row = next(row for row, ids in enumerate(ends) if ids[-1] not in tokenizer.end_ids and len(ids) > of_turn + 1)
    refused = await judged(lie(group, row), identity, tokenizer, manifest=STOPPING)
    assert isinstance(refused, Refused)
    assert (refused.refusal.reason, detail in refused.refusal.detail) == ("episode_mismatch", True), refused


async def test_without_stop_strings_such_a_turn_is_refused(group, identity, tokenizer) -> None:
    refused = await judged(replace(group, run_id=RUN.run_id), identity, tokenizer, manifest=RUN)
    assert isinstance(refused, Refused) and refused.refusal.reason == "finish_reason"


async def test_tokens_beyond_a_stop_string_are_removed(source, tokenizer, monkeypatch) -> None:
    """An engine does not see a string whose ids are not the usual ones. The episodes are the same without its help."""
    (helped,) = await play(source, tokenizer, [ITEM], run=STOPPING)
    monkeypatch.setattr(tokenizer, "encode_stops", lambda strings: ())
    (alone,) = await play(source, tokenizer, [ITEM], run=STOPPING)
    assert alone.turn_lengths == helped.turn_lengths
    assert alone.result.tokens.has_same_ids(helped.result.tokens)
