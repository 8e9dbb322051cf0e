"""Validation of groups in tokens: a valid group is accepted, and each rule refuses with its reason.

`tests/conformance/messages.json` has further groups, at least one for each rule.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.records.codec import hash_prompt
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import Completion, CompletionStatus, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.records.token_batch import TokenBatch
from ftis_node.tasks.arithmetic import ArithmeticTask
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation import Accepted, Refused, ValidationContext, validate
from tests.conftest import EOS, PROMPT_IDS, TOKENIZER, make_completion, make_group

MANIFEST = RunManifest(
    name="test",
    task="arithmetic",
    sampling={"group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6, "max_total_tokens": 12},
)


class _Tokenizer:
    """A tokenizer with the ids 0 to 99; the text of a completion is its ids."""

    fingerprint = TOKENIZER
    num_ids = vocab_size = 100
    end_ids = (EOS,)

    def encode_prompt(self, messages: Sequence[object], *, opening: str | None = None) -> list[int]:
        return PROMPT_IDS

    def answer_texts(self, tokens: TokenBatch, finish_reasons: object, *, opening: str = "") -> list[str]:
        return [opening + " ".join(map(str, ids)) for ids in tokens.ids_of_each()]


class _Scorer:
    """A scorer: a text that starts with 10 is right, one that starts with 66 is not scored in time."""

    async def resolve(self, ref: PromptRef, *, cost: ScoringCost | None = None) -> TaskItem:
        return await _resolve(ref)

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None
    ) -> list[tuple[float, CompletionStatus]]:
        if cost is not None:
            cost.seconds += 0.25 * len(texts)
            cost.num_stopped += sum(text.startswith("99 99") for text in texts)
        return [
            (0.0, CompletionStatus.UNSCORED)
            if text.startswith("66")
            else (float(text.startswith("10 ")), CompletionStatus.SCORED)
            for text in texts
        ]


async def _resolve(ref: PromptRef, cost: ScoringCost | None = None) -> TaskItem:
    if ref.index >= 1000 or ref.task != "arithmetic":
        raise KeyError(ref)
    return TaskItem(ref=ref, prompt=ArithmeticTask()[ref.index].prompt, answer="5")


def _context(**changes: Any) -> ValidationContext:
    context = ValidationContext(
        manifest=MANIFEST,
        tokenizer=_Tokenizer(),  # type: ignore[arg-type]
        resolve=_resolve,
        scorer=_Scorer(),
        is_known=lambda group_id: False,
        has_number=lambda sender, number: False,
    )
    return replace(context, **changes)


def _ours(identity: Identity, **changes: Any) -> Group:
    return make_group(identity, **{"run_id": MANIFEST.run_id, **changes})


def reason_of(verdict: object) -> str | None:
    """Return the reason of a refusal; None for an accepted group."""
    return verdict.refusal.reason if isinstance(verdict, Refused) else None


async def _verdict(identity: Identity, **changes: Any):
    return await validate(seal_group(_ours(identity, **changes), identity).to_bytes(), _context())


async def test_a_valid_group_is_accepted_with_the_prompt_and_rewards_of_this_node(identity):
    verdict = await _verdict(identity)
    assert isinstance(verdict, Accepted)
    assert verdict.prompt_ids == tuple(PROMPT_IDS)
    assert verdict.group.rewards == (1.0, 0.0)


@pytest.mark.parametrize(("reset_s_ago", "reason"), [(600.0, None), (0.0, "stale"), (-3.0, "stale")])
async def test_a_group_from_before_a_reset_is_stale_except_an_own_one(identity, reset_s_ago, reason):
    """The allowed clock skew counts, because the sender's clock may differ."""
    data = seal_group(_ours(identity), identity).to_bytes()
    assert reason_of(await validate(data, _context(reset_at=time.time() - reset_s_ago))) == reason
    own = await validate(data, _context(reset_at=time.time() - reset_s_ago, own_id=identity.peer_id))
    assert isinstance(own, Accepted)


RIGHT, WRONG = make_completion(10, 11, EOS, reward=1.0), make_completion(12, 13)


def _with_logprob(value: float) -> tuple[Completion, ...]:
    logprobs = RIGHT.logprobs.copy()
    logprobs[1] = value
    return replace(RIGHT, logprobs=logprobs), WRONG


def _ending(*ids: int, reason: FinishReason) -> Completion:
    return replace(make_completion(*ids), finish_reason=reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"number": 0}, "sequence_reused"),
        ({"sampling": SamplingSettings(temperature=0.9)}, "sampling"),
        ({"sampling": SamplingSettings(top_p=0.9)}, "sampling"),
        ({"sampling": SamplingSettings(top_k=5)}, "sampling"),
        ({"sampling": SamplingSettings(temperature=float("nan"))}, "sampling"),
        ({"sampling": SamplingSettings(top_p=float("nan"))}, "sampling"),
        ({"completions": (RIGHT, make_completion(100, 13))}, "token_out_of_range"),
        ({"completions": (RIGHT, make_completion(-1, 13))}, "token_out_of_range"),
        ({"completions": _with_logprob(float("nan"))}, "logprobs"),
        ({"completions": _with_logprob(float("-inf"))}, "logprobs"),
        ({"completions": _with_logprob(0.5)}, "logprobs"),
        # As many end-of-sequence ids as stops, but in the wrong place.
        ({"completions": (_ending(10, EOS, 11, reason=FinishReason.STOP), WRONG)}, "finish_reason"),
        (
            {"completions": (_ending(10, 11, reason=FinishReason.STOP), _ending(12, EOS, reason=FinishReason.LENGTH))},
            "finish_reason",
        ),
        ({"problem_hash": bytes(16)}, "prompt_mismatch"),
        ({"end_ids": (EOS, 100)}, "token_out_of_range"),
        ({"end_ids": ()}, "finish_reason"),
        ({"completions": (RIGHT, replace(WRONG, reward=1.0))}, "reward_mismatch"),
        ({"completions": (replace(RIGHT, reward=0.0), WRONG)}, "reward_mismatch"),
        ({"completions": (make_completion(66, 11, EOS, reward=1.0), WRONG)}, "scoring_failed"),
    ],
)
async def test_each_fault_is_refused_with_its_reason(identity, changes, reason):
    verdict = await _verdict(identity, **changes)
    assert (reason_of(verdict), verdict.sender) == (reason, identity.peer_id)


async def test_a_refusal_names_both_tokenizer_fingerprints_in_full(identity):
    near = TOKENIZER[:-1] + "e"
    verdict = await _verdict(identity, tokenizer=near)
    assert isinstance(verdict, Refused)
    assert near in verdict.refusal.detail
    assert TOKENIZER in verdict.refusal.detail


async def test_a_logprob_above_zero_by_rounding_is_accepted(identity):
    assert isinstance(await _verdict(identity, completions=_with_logprob(5e-4)), Accepted)


async def test_the_length_limit_depends_on_the_prompt(identity):
    long_prompt = MANIFEST.sampling.max_total_tokens - 3

    class LongPrompt(_Tokenizer):
        def encode_prompt(self, messages, *, opening=None):
            return [1] * long_prompt

    group = _ours(
        identity,
        prompt_hash=hash_prompt([1] * long_prompt),
        completions=(make_completion(10, 11, 12, 13), make_completion(12, 13)),
    )
    verdict = await validate(seal_group(group, identity).to_bytes(), _context(tokenizer=LongPrompt()))
    assert reason_of(verdict) == "length"


async def test_a_known_group_or_a_used_number_is_refused(identity):
    data = seal_group(_ours(identity), identity).to_bytes()
    assert reason_of(await validate(data, _context(is_known=lambda group_id: True))) == "duplicate"
    used = await validate(data, _context(has_number=lambda sender, number: number == 1))
    assert reason_of(used) == "sequence_reused"


@pytest.mark.parametrize(("data", "reason"), [(b"\xff\xff", "parse"), (b"", "parse"), (bytes(2 << 20), "size")])
async def test_bytes_that_are_no_envelope_are_refused(data, reason):
    verdict = await validate(data, _context())
    assert isinstance(verdict, Refused)
    assert (verdict.refusal.reason, verdict.sender) == (reason, None)
