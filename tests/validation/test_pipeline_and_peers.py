"""Validation rules about a peer, the clock or all log-probs of a group, and whether a refused group was signed."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import Completion, FinishReason, TextCompletion
from ftis_node.records.identity import Identity
from ftis_node.validation import Accepted, Refused, ValidationContext, ValidationResult, validate
from tests.conftest import make_completion, make_text_group
from tests.validation.test_pipeline import MANIFEST, _context, _ours, reason_of
from tests.validation.test_text_groups import _context as text_context
from tests.validation.test_text_groups import _group as text_group

ME = Identity.from_seed(bytes(range(32)))


async def verdict_on(context: ValidationContext, **changes: Any) -> ValidationResult:
    return await validate(seal_group(_ours(ME, **changes), ME).to_bytes(), context)


@pytest.mark.parametrize(
    ("facts", "reason", "signed"),
    [
        ({"is_banned": lambda peer_id: peer_id == ME.peer_id}, "banned", False),
        ({"within_quota": lambda peer_id: peer_id != ME.peer_id}, "quota", False),
        ({"now": lambda: time.time() - 61.0}, "clock_skew", True),
        ({"now": lambda: time.time() + MANIFEST.step.max_age_s + 1.0}, "stale", True),
        ({"duplicate_reason": lambda *_: "duplicate_completions"}, "duplicate_completions", True),
        ({"duplicate_reason": lambda *_: "duplicate_of_own"}, "duplicate_of_own", True),
    ],
)
async def test_a_group_is_refused_for_its_peer_or_its_time(facts, reason, signed):
    for refused in (
        await verdict_on(_context(**facts)),
        await validate(seal_group(text_group(ME), ME).to_bytes(), replace(text_context(), **facts)),
    ):
        assert isinstance(refused, Refused)
        assert (refused.refusal.reason, refused.signed) == (reason, signed)
        assert refused.num_tokens > 0


async def test_a_body_claims_no_more_tokens_than_it_has_bytes():
    claim = text_group(ME, completions=(TextCompletion("", -1.0, 100_000, FinishReason.LENGTH, 0.0),))
    refused = await validate(seal_group(claim, ME).to_bytes(), text_context())
    assert isinstance(refused, Refused) and 0 < refused.num_tokens < 1000


@pytest.mark.parametrize("ahead_s", [-59.0, 1799.0])
async def test_a_small_clock_skew_and_a_delay_are_accepted(ahead_s):
    assert isinstance(await verdict_on(_context(now=lambda: time.time() + ahead_s)), Accepted)


def _of(first: list[float], second: list[float], *, same_text: bool = False) -> tuple[Completion, ...]:
    def completion(logprobs: list[float], start: int) -> Completion:
        made = make_completion(*[start] * len(logprobs), reward=float(start == 10))
        return replace(made, logprobs=np.asarray(logprobs, dtype=np.float32), finish_reason=FinishReason.LENGTH)

    return completion(first, 10), completion(second, 10 if same_text else 12)


WIDE = RunManifest.model_validate(
    MANIFEST.model_dump()
    | {"sampling": MANIFEST.sampling.model_dump() | {"max_completion_tokens": 40, "max_total_tokens": 60}}
)


@pytest.mark.parametrize(
    ("completions", "reason"),
    [
        (_of([-0.5] * 9, [-0.5] * 8), "logprobs"),
        (_of([0.0] * 9, [0.0] * 8), "logprobs"),
        (_of([-14.5] * 2, [-14.0] * 2), "logprobs"),
        (_of([-0.5] * 8, [-0.5] * 8), None),  # so few may be equal by chance
        (_of([-0.5] * 9, [-0.5] * 7 + [-0.6]), None),
        (_of([0.0] * 9, [0.0] * 9, same_text=True), None),  # a deterministic policy
        (_of([-13.0] * 2, [-14.9] * 2), None),
    ],
)
async def test_logprobs_that_no_policy_produces_are_refused(completions, reason):
    group = replace(_ours(ME, completions=completions), run_id=WIDE.run_id)
    assert reason_of(await validate(seal_group(group, ME).to_bytes(), _context(manifest=WIDE))) == reason


async def test_a_forged_sender_is_not_charged(identity):
    """The refusal reports that the named sender did not sign."""
    victim = Identity.generate()
    forged = seal_group(_ours(victim), victim)
    data = replace(forged, signature=identity.sign(b"ftis-node/envelope/1\n", forged.body)).to_bytes()
    refused = await validate(data, _context())
    assert isinstance(refused, Refused)
    assert (refused.refusal.reason, refused.sender, refused.signed) == ("signature", victim.peer_id, False)


@pytest.mark.parametrize(("means", "reason"), [((-1.0,) * 4, "logprobs"), ((-15.0,) * 3 + (-14.0,), "logprobs")])
async def test_mean_logprobs_that_no_policy_produces_are_refused(means, reason):
    texts = tuple(
        TextCompletion(f"1{i}", mean_logprob=mean, num_tokens=2, finish_reason=FinishReason.LENGTH)
        for i, mean in enumerate(means)
    )
    context = text_context()
    four = RunManifest.model_validate(
        context.manifest.model_dump() | {"sampling": context.manifest.sampling.model_dump() | {"group_size": 4}}
    )
    group = make_text_group(ME, run_id=four.run_id, completions=texts)
    refused = await validate(seal_group(group, ME).to_bytes(), replace(context, manifest=four))
    assert reason_of(refused) == reason
