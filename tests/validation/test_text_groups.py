"""Validation of text groups: each rule refuses with its reason, and no text becomes a special token."""

from dataclasses import replace
from typing import Any

import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.models import PromptTokenizer
from ftis_node.records.codec import hash_messages
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import CompletionStatus, FinishReason, TextCompletion, TextGroup
from ftis_node.records.identity import Identity
from ftis_node.swarm.reasons import attribute_refusal
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from ftis_node.validation import Accepted, ValidationContext, validate
from ftis_node.validation.rules import (
    RULES,
    finishes_agree,
    ids_in_vocabulary,
    lengths_in_bounds,
    logprobs_plausible,
    logprobs_possible,
    same_tokenizer,
    turns_allowed,
)
from ftis_node.validation.text_rules import TEXT_RULES
from tests.conftest import make_text_group
from tests.models.tiny_models import make_tokenizer
from tests.validation.test_pipeline import _context as context_of
from tests.validation.test_pipeline import reason_of

TASK = load_task("arithmetic")
ITEM = TASK[0]  # 25-15=
TOKENIZER = PromptTokenizer(make_tokenizer(), name="ours")
EOS = TOKENIZER.eos_id
SPECIAL_IDS = {0, 1, 2}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def _manifest(other_tokenizers: str = "text") -> RunManifest:
    return RunManifest(
        name="test",
        task="arithmetic",
        sampling={"group_size": 2, "max_prompt_tokens": 64, "max_completion_tokens": 24, "max_total_tokens": 96},
        step={"other_tokenizers": other_tokenizers},
    )


MANIFEST = _manifest()


def _completion(text: str, *, reward: float = 0.0, finish: FinishReason = STOP, **changes: Any) -> TextCompletion:
    completion = TextCompletion(text, mean_logprob=-1.0, num_tokens=4, finish_reason=finish, reward=reward)
    return replace(completion, **changes)


TEN = _completion("10", reward=1.0)


def _group(identity: Identity, **changes: Any) -> TextGroup:
    valid = {
        "run_id": MANIFEST.run_id,
        "prompt_ref": ITEM.ref,
        "problem_hash": hash_messages(ITEM.prompt),
        "completions": (TEN, _completion("no, 京 35 ", finish=LENGTH)),
    }
    return make_text_group(identity, **{**valid, **changes})


SCORER = IsolatedScorer(TASK)


def _context(**changes: Any) -> ValidationContext:
    ours = {"tokenizer": TOKENIZER, "resolve": lambda ref, cost: SCORER.resolve(ref, cost=cost), "scorer": SCORER}
    return context_of(**{"manifest": MANIFEST, **ours, **changes})


async def _verdict(identity: Identity, context: ValidationContext | None = None, **changes: Any):
    return await validate(seal_group(_group(identity, **changes), identity).to_bytes(), context or _context())


async def test_a_valid_text_group_is_accepted_in_tokens_of_this_node(identity):
    verdict = await _verdict(identity)
    assert isinstance(verdict, Accepted)
    first, second = verdict.group.completions
    assert first.token_ids.tolist() == [*TOKENIZER.encode_text("10"), EOS]
    assert second.token_ids.tolist() == TOKENIZER.encode_text("no, 京 35 ")
    assert (len(first.logprobs), first.mean_logprob, second.mean_logprob) == (0, -1.0, -1.0)
    assert verdict.group.rewards == (1.0, 0.0)
    assert verdict.prompt_ids == tuple(TOKENIZER.encode_prompt(ITEM.prompt))
    assert verdict.announced_id == verdict.exact_group == bytes(range(32))
    assert verdict.envelope.id != verdict.exact_group


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": TOKENIZER.fingerprint}, "wrong_encoding"),
        ({"completions": (_completion("10", reward=1.0, num_tokens=25), _completion("1"))}, "length"),
        ({"completions": (TEN, _completion("x" * (24 * 64 + 1)))}, "length"),
        ({"completions": (TEN, _completion("京" * 24))}, "too_long_here"),
        ({"completions": (TEN, _completion("", finish=LENGTH))}, "not_encodable"),
        ({"completions": (_completion("10", reward=1.0, mean_logprob=float("nan")), _completion("1"))}, "logprobs"),
        ({"completions": (_completion("10", reward=1.0, mean_logprob=float("-inf")), _completion("1"))}, "logprobs"),
        ({"completions": (_completion("10", reward=1.0, mean_logprob=0.1), _completion("1"))}, "logprobs"),
        ({"completions": (_completion("10", reward=1.0, mean_logprob=-1e30), _completion("1"))}, "logprobs"),
        ({"completions": (TEN, _completion("11", reward=1.0))}, "reward_mismatch"),
    ],
)  # fmt: skip
async def test_each_fault_is_refused_with_its_reason(identity, changes, reason):
    verdict = await _verdict(identity, **changes)
    assert (reason_of(verdict), verdict.sender) == (reason, identity.peer_id)


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "10<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|im_<|im_end|>end|>"]
)
async def test_a_text_like_a_special_token_is_encoded_as_plain_text(identity, text):
    verdict = await _verdict(identity, completions=(_completion(text, finish=LENGTH), TEN))
    assert isinstance(verdict, Accepted)
    assert not SPECIAL_IDS & set(verdict.group.completions[0].token_ids.tolist())
    assert TOKENIZER.decode(verdict.group.completions[0].token_ids.tolist()) == text
    assert verdict.group.rewards == (0.0, 1.0)


async def test_another_end_token_of_this_node_inside_a_text_is_a_token_like_another(identity):
    digits = [TOKENIZER.encode_text(digit)[0] for digit in "01"]
    context = _context(tokenizer=PromptTokenizer(make_tokenizer(), name="many ends", extra_eos_ids=digits))
    verdict = await _verdict(identity, context)
    assert isinstance(verdict, Accepted)
    assert verdict.group.end_ids == (EOS,)


async def test_a_text_or_problem_that_this_model_cannot_read_costs_its_sender_nothing(identity):
    (largest,) = TOKENIZER.encode_text("nt")
    completions = (TEN, _completion("nt"))
    for rows, reason in ((largest, "no_embedding"), (5, "not_encodable")):
        context = _context(tokenizer=PromptTokenizer(make_tokenizer(), name="few rows", num_rows=rows))
        assert reason_of(await _verdict(identity, context, completions=completions)) == reason
        assert attribute_refusal(reason, origin="a", sender="b", signed=True)[1] is Behaviour.HARMLESS


class _WithSpecialTokens(PromptTokenizer):
    """A tokenizer that encodes special tokens in plain text."""

    def encode_text(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


async def test_a_text_that_decodes_differently_is_refused(identity):
    context = _context(tokenizer=_WithSpecialTokens(make_tokenizer(), name="with special tokens"))
    verdict = await _verdict(identity, context, completions=(_completion("10<|im_end|>", reward=1.0), _completion("1")))
    assert reason_of(verdict) == "not_encodable"


async def test_an_empty_completion_that_stopped_is_one_end_of_sequence_token(identity):
    verdict = await _verdict(identity, completions=(TEN, _completion("", num_tokens=1)))
    assert isinstance(verdict, Accepted)
    assert verdict.group.completions[1].token_ids.tolist() == [EOS]


async def test_a_run_that_ignores_other_tokenizers_refuses_text_groups(identity):
    ignoring = _manifest("ignore")
    verdict = await _verdict(identity, _context(manifest=ignoring), run_id=ignoring.run_id)
    assert reason_of(verdict) == "wrong_encoding"


async def test_a_text_that_cannot_be_scored_is_not_a_false_claim(identity):
    class Slow:
        async def score(self, item, texts, *, cost=None):
            return [(0.0, CompletionStatus.UNSCORED)] * len(texts)

    assert reason_of(await _verdict(identity, _context(scorer=Slow()))) == "scoring_failed"


def test_a_text_group_passes_all_rules_but_those_about_tokens():
    assert set(RULES) - set(TEXT_RULES) == {
        *(same_tokenizer, turns_allowed, ids_in_vocabulary, lengths_in_bounds),
        *(logprobs_possible, logprobs_plausible, finishes_agree),
    }
