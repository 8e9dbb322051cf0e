"""The door: each rule refuses by its own name, and only what is right gets in."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.errors import WorkerDiedError
from ftis_node.records.codec import pack_group
from ftis_node.records.envelope import Envelope, seal_group
from ftis_node.records.group import CompletionStatus, FinishReason, PromptRef, SamplingSettings
from ftis_node.records.identity import Identity
from ftis_node.swarm.reasons import attribute_refusal
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks.base import TaskItem
from ftis_node.validation import Accepted, Refused, ValidationContext, validate
from tests.conftest import EOS, PROMPT_IDS, TOKENIZER, make_completion, make_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.records.group import Group
    from ftis_node.tasks.scoring_worker import ScoringCost

MANIFEST = RunManifest(
    name="test",
    task="arithmetic",
    sampling={"group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6, "max_total_tokens": 12},
)


class _Tokenizer:
    """Ids 0..99; the text of a completion is its ids."""

    fingerprint = TOKENIZER
    vocab_size = 100
    eos_ids = (EOS,)

    def encode_prompt(self, messages: Sequence[object]) -> list[int]:
        return PROMPT_IDS

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class _Scorer:
    """Right is what begins with 10; what begins with 66 takes too long."""

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
    return TaskItem(ref=ref, prompt=({"role": "user", "content": "2+3="},), answer="5")


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
    """Why a group was refused; None if it was accepted."""
    return verdict.refusal.reason if isinstance(verdict, Refused) else None


async def _verdict(identity: Identity, **changes: Any):
    return await validate(seal_group(_ours(identity, **changes), identity).to_bytes(), _context())


async def test_a_good_group_is_accepted_with_prompt_and_rewards_made_here(identity: Identity) -> None:
    verdict = await _verdict(identity)
    assert isinstance(verdict, Accepted)
    assert verdict.prompt_ids == tuple(PROMPT_IDS)
    assert verdict.group.rewards == (1.0, 0.0)


class _CountingScorer(_Scorer):
    num_texts = 0

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None
    ) -> list[tuple[float, CompletionStatus]]:
        self.num_texts += len(texts)
        return await super().score(item, texts, cost=cost)


@pytest.mark.parametrize(("ids", "num_scored"), [((10, 11, EOS), 0), ((10, 12, EOS), 2)])
async def test_a_group_that_this_node_scored_is_not_scored_again(
    identity: Identity, ids: tuple[int, ...], num_scored: int
) -> None:
    scorer, statuses = _CountingScorer(), (CompletionStatus.SCORED, CompletionStatus.UNSCORED)
    sealed = _ours(identity)
    made = replace(
        _ours(identity, completions=(make_completion(*ids, reward=1.0), make_completion(12, 13))), statuses=statuses
    )
    data = seal_group(sealed, identity).to_bytes()
    verdict = await validate(data, _context(scorer=scorer), made=made)
    assert isinstance(verdict, Accepted)
    assert scorer.num_texts == num_scored
    assert verdict.group.rewards == (1.0, 0.0)
    assert (verdict.group.statuses == statuses) is (num_scored == 0)
    assert verdict.group.tokens == sealed.tokens


async def test_an_own_group_with_other_rewards_than_it_was_scored_with_is_refused(identity: Identity) -> None:
    made = _ours(identity)
    data = seal_group(replace(made, rewards=(0.0, 0.0)), identity).to_bytes()
    verdict = await validate(data, _context(), made=made)
    assert reason_of(verdict) == "reward_mismatch"


@pytest.mark.parametrize(("reset_s_ago", "reason"), [(600.0, None), (0.0, "stale"), (-3.0, "stale")])
async def test_a_group_made_before_the_buffer_was_reset_is_refused_without_blame(
    identity: Identity, reset_s_ago: float, reason: str | None
) -> None:
    """The clocks may differ: the allowed skew counts."""
    data = seal_group(_ours(identity), identity).to_bytes()
    verdict = await validate(data, _context(reset_at=time.time() - reset_s_ago))
    assert reason_of(verdict) == reason
    own = await validate(data, _context(reset_at=time.time() - reset_s_ago, own_id=identity.peer_id))
    assert isinstance(own, Accepted)


def _with_logprob(value: float):
    completion = make_completion(10, 11, EOS, reward=1.0)
    logprobs = completion.logprobs.copy()
    logprobs[1] = value
    return (replace(completion, logprobs=logprobs), make_completion(12, 13))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "00" * 16}, "run"),
        ({"number": 0}, "sequence_reused"),
        ({"tokenizer": "ee" * 16}, "tokenizer"),
        ({"completions": (make_completion(10, 11, EOS, reward=1.0),)}, "group_size"),
        ({"sampling": SamplingSettings(temperature=0.9)}, "sampling"),
        ({"sampling": SamplingSettings(top_p=0.9)}, "sampling"),
        ({"sampling": SamplingSettings(top_k=5)}, "sampling"),
        ({"sampling": SamplingSettings(temperature=float("nan"))}, "sampling"),
        ({"sampling": SamplingSettings(top_p=float("nan"))}, "sampling"),
        ({"sampling": SamplingSettings(temperature=float("inf"))}, "sampling"),
        ({"completions": (make_completion(10, 11, EOS, reward=1.0), make_completion(100, 13))}, "token_out_of_range"),
        ({"completions": (make_completion(10, 11, EOS, reward=1.0), make_completion(-1, 13))}, "token_out_of_range"),
        ({"completions": (make_completion(10, 11, EOS, reward=1.0), make_completion(*range(10, 17)))}, "length"),
        ({"completions": _with_logprob(float("nan"))}, "logprobs"),
        ({"completions": _with_logprob(float("-inf"))}, "logprobs"),
        ({"completions": _with_logprob(0.5)}, "logprobs"),
        ({"completions": (make_completion(10, EOS, 11, reward=1.0), make_completion(12, 13))}, "finish_reason"),
        (
            {"completions": (replace(make_completion(10, 11), finish_reason=FinishReason.STOP), make_completion(1, 1))},
            "finish_reason",
        ),
        (
            {
                "completions": (
                    replace(make_completion(1, EOS), finish_reason=FinishReason.LENGTH),
                    make_completion(1, 1),
                )
            },
            "finish_reason",
        ),
        (  # as many end-of-sequence ids as stops, but elsewhere
            {
                "completions": (
                    replace(make_completion(10, EOS, 11, reward=1.0), finish_reason=FinishReason.STOP),
                    make_completion(12, 13),
                )
            },
            "finish_reason",
        ),
        (
            {
                "completions": (
                    replace(make_completion(10, 11), finish_reason=FinishReason.STOP),
                    replace(make_completion(12, EOS), finish_reason=FinishReason.LENGTH),
                )
            },
            "finish_reason",
        ),
        ({"completions": (make_completion(10, 11, EOS, reward=1.5), make_completion(12, 13))}, "reward_range"),
        ({"completions": (make_completion(10, 11, EOS, reward=float("nan")), make_completion(12, 13))}, "reward_range"),
        ({"prompt_ref": PromptRef("arithmetic", "train", 1000)}, "prompt_mismatch"),
        ({"prompt_ref": PromptRef("unheard-of", "train", 1)}, "prompt_mismatch"),
        ({"prompt_hash": bytes(16)}, "prompt_mismatch"),
        (
            {"completions": (make_completion(10, 11, EOS, reward=1.0), make_completion(12, 13, reward=1.0))},
            "reward_mismatch",
        ),
        ({"completions": (make_completion(10, 11, EOS, reward=0.0), make_completion(12, 13))}, "reward_mismatch"),
        ({"completions": (make_completion(66, 11, EOS, reward=1.0), make_completion(12, 13))}, "scoring_failed"),
    ],
)
async def test_each_fault_is_refused_by_its_name(identity: Identity, changes: dict[str, Any], reason: str) -> None:
    verdict = await _verdict(identity, **changes)
    assert isinstance(verdict, Refused)
    assert verdict.refusal.reason == reason
    assert verdict.sender == identity.peer_id


async def test_a_tokenizer_is_told_from_another_by_all_of_its_fingerprint(identity: Identity) -> None:
    near = TOKENIZER[:-1] + "e"
    verdict = await _verdict(identity, tokenizer=near)
    assert isinstance(verdict, Refused)
    assert near in verdict.refusal.detail
    assert TOKENIZER in verdict.refusal.detail


async def test_rounding_above_zero_is_no_fault(identity: Identity) -> None:
    assert isinstance(await _verdict(identity, completions=_with_logprob(5e-4)), Accepted)


async def test_what_cannot_be_scored_counts_zero_on_both_sides(identity: Identity) -> None:
    verdict = await _verdict(identity, completions=(make_completion(66, 11, EOS), make_completion(12, 13)))
    assert isinstance(verdict, Accepted)
    assert verdict.group.completions[0].status is CompletionStatus.UNSCORED


async def test_a_length_that_another_prompt_would_allow_is_refused(identity: Identity) -> None:
    long_prompt = MANIFEST.sampling.max_total_tokens - 3

    class LongPrompt(_Tokenizer):
        def encode_prompt(self, messages: Sequence[object]) -> list[int]:
            return [1] * long_prompt

    from ftis_node.records.codec import hash_prompt

    group = _ours(
        identity,
        prompt_hash=hash_prompt([1] * long_prompt),
        completions=(make_completion(10, 11, 12, 13), make_completion(12, 13)),
    )
    context = _context(tokenizer=LongPrompt())
    verdict = await validate(seal_group(group, identity).to_bytes(), context)
    assert reason_of(verdict) == "length"


async def test_another_peers_signature_is_refused(identity: Identity) -> None:
    body = pack_group(_ours(identity))
    thief = Identity.generate()
    stolen = Envelope(id=b"", body=body, signature=thief.sign(b"ftis-node/envelope/1\n", body))
    verdict = await validate(stolen.to_bytes(), _context())
    assert reason_of(verdict) == "signature"


async def test_what_is_known_is_refused(identity: Identity) -> None:
    data = seal_group(_ours(identity), identity).to_bytes()
    known = await validate(data, _context(is_known=lambda group_id: True))
    assert reason_of(known) == "duplicate"
    used = await validate(data, _context(has_number=lambda sender, number: number == 1))
    assert reason_of(used) == "sequence_reused"


@pytest.mark.parametrize(("data", "reason"), [(b"\xff\xff", "parse"), (b"", "parse"), (bytes(2 << 20), "size")])
async def test_what_is_no_envelope_is_refused(data: bytes, reason: str) -> None:
    verdict = await validate(data, _context())
    assert isinstance(verdict, Refused)
    assert (verdict.refusal.reason, verdict.sender) == (reason, None)


async def test_nothing_is_scored_before_the_cheap_rules_passed(identity: Identity) -> None:
    class Forbidden:
        async def score(self, item: TaskItem, texts: Sequence[str], *, cost: Any = None) -> list[Any]:
            raise AssertionError("scored too early")

    data = seal_group(_ours(identity, prompt_hash=bytes(16)), identity).to_bytes()
    verdict = await validate(data, _context(scorer=Forbidden()))
    assert reason_of(verdict) == "prompt_mismatch"


async def test_what_a_busy_machine_did_not_finish_is_nobodys_fault(identity: Identity) -> None:
    """Also where the sender claims the 0 that it comes out with: it may be pulled again, and costs nothing."""

    class Busy(_Scorer):
        async def score(self, item: TaskItem, texts: Sequence[str], *, cost: Any = None) -> list[Any]:
            cost.num_lost += 1
            return [(0.0, CompletionStatus.UNSCORED)] * len(texts)

    completions = (make_completion(12, 13), make_completion(13, 14))
    data = seal_group(_ours(identity, completions=completions), identity).to_bytes()
    verdict = await validate(data, _context(scorer=Busy()))
    assert reason_of(verdict) == "scoring_failed"
    blame = attribute_refusal("scoring_failed", origin=identity.peer_id, sender=identity.peer_id, signed=True)
    assert blame.conduct is Behaviour.HARMLESS


async def test_the_signer_pays_for_scoring_and_not_beyond_its_allowance(identity: Identity) -> None:
    charged: list[tuple[str, float]] = []
    data = seal_group(_ours(identity), identity).to_bytes()
    context = _context(charge=lambda peer_id, seconds: charged.append((peer_id, seconds)))
    assert isinstance(await validate(data, context), Accepted)
    assert charged == [(identity.peer_id, 0.5)]
    refused = await validate(data, _context(may_score=lambda peer_id: peer_id != identity.peer_id, scorer=None))
    assert isinstance(refused, Refused)
    assert (refused.refusal.reason, refused.signed) == ("scoring_quota", True)


async def test_a_text_that_takes_the_whole_time_limit_refuses_its_group_for_good(identity: Identity) -> None:
    slow = make_completion(99, 99, reward=0.0)
    group = _ours(identity, completions=(_ours(identity).completions[0], slow))
    verdict = await validate(seal_group(group, identity).to_bytes(), _context())
    assert isinstance(verdict, Refused)
    assert (verdict.refusal.reason, verdict.signed) == ("scoring_timeout", True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("no such problem"), "prompt_mismatch"),
        (ValueError("no problem after many attempts"), "prompt_mismatch"),
        (RecursionError(), "prompt_mismatch"),
        (TimeoutError(), "scoring_timeout"),
    ],
)
async def test_whatever_making_the_problem_raises_is_a_refusal(
    identity: Identity, error: Exception, reason: str
) -> None:
    async def failing(ref: PromptRef, cost: ScoringCost) -> TaskItem:
        raise error

    verdict = await validate(seal_group(_ours(identity), identity).to_bytes(), _context(resolve=failing))
    assert reason_of(verdict) == reason


async def test_a_dead_scoring_process_is_no_refusal(identity: Identity) -> None:
    async def dead(ref: PromptRef, cost: ScoringCost) -> TaskItem:
        raise WorkerDiedError("the scoring process does not stay alive")

    with pytest.raises(WorkerDiedError):
        await validate(seal_group(_ours(identity), identity).to_bytes(), _context(resolve=dead))
