"""Validation rules about rewards: when a group is scored, who is charged, and which failures are refusals."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ftis_node.errors import WorkerDiedError
from ftis_node.records.envelope import seal_group
from ftis_node.records.group import CompletionStatus
from ftis_node.swarm.reasons import attribute_refusal
from ftis_node.swarm.reputation import Behaviour
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.scoring_worker import ScoringCost
from ftis_node.validation import Accepted, Refused, validate
from tests.conftest import EOS, make_completion
from tests.validation.test_pipeline import _context, _ours, _Scorer, _verdict, reason_of


class _CountingScorer(_Scorer):
    num_texts = 0

    async def score(
        self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None
    ) -> list[tuple[float, CompletionStatus]]:
        self.num_texts += len(texts)
        return await super().score(item, texts, cost=cost)


@pytest.mark.parametrize(("ids", "num_scored"), [((10, 11, EOS), 0), ((10, 12, EOS), 2)])
async def test_a_group_that_this_node_scored_is_not_scored_again(identity, ids, num_scored):
    scorer, statuses = _CountingScorer(), (CompletionStatus.SCORED, CompletionStatus.UNSCORED)
    sealed = _ours(identity)
    made = replace(
        _ours(identity, completions=(make_completion(*ids, reward=1.0), make_completion(12, 13))), statuses=statuses
    )
    verdict = await validate(seal_group(sealed, identity).to_bytes(), _context(scorer=scorer), made=made)
    assert isinstance(verdict, Accepted)
    assert scorer.num_texts == num_scored
    assert verdict.group.rewards == (1.0, 0.0)
    assert (verdict.group.statuses == statuses) is (num_scored == 0)
    assert verdict.group.tokens == sealed.tokens


async def test_an_own_group_with_changed_rewards_is_refused(identity):
    made = _ours(identity)
    data = seal_group(replace(made, rewards=(0.0, 0.0)), identity).to_bytes()
    assert reason_of(await validate(data, _context(), made=made)) == "reward_mismatch"


async def test_an_unscored_completion_is_accepted_with_a_claimed_reward_of_zero(identity):
    verdict = await _verdict(identity, completions=(make_completion(66, 11, EOS), make_completion(12, 13)))
    assert isinstance(verdict, Accepted)
    assert verdict.group.completions[0].status is CompletionStatus.UNSCORED


async def test_a_group_is_scored_only_after_the_cheaper_rules(identity):
    class Forbidden:
        async def score(self, item, texts, *, cost=None):
            raise AssertionError("scored too early")

    data = seal_group(_ours(identity, problem_hash=bytes(16)), identity).to_bytes()
    assert reason_of(await validate(data, _context(scorer=Forbidden()))) == "prompt_mismatch"


async def test_scoring_that_a_busy_machine_lost_is_not_charged(identity):
    """This holds even if the claimed reward is the 0 of an unscored completion. The group may be pulled again."""

    class Busy(_Scorer):
        async def score(self, item, texts, *, cost=None):
            cost.num_lost += 1
            return [(0.0, CompletionStatus.UNSCORED)] * len(texts)

    completions = (make_completion(12, 13), make_completion(13, 14))
    data = seal_group(_ours(identity, completions=completions), identity).to_bytes()
    assert reason_of(await validate(data, _context(scorer=Busy()))) == "scoring_failed"
    _, behaviour = attribute_refusal("scoring_failed", origin=identity.peer_id, sender=identity.peer_id, signed=True)
    assert behaviour is Behaviour.HARMLESS


async def test_scoring_time_is_charged_to_the_signer_and_bounded(identity):
    charged: list[tuple[str, float]] = []
    data = seal_group(_ours(identity), identity).to_bytes()
    context = _context(charge=lambda peer_id, seconds: charged.append((peer_id, seconds)))
    assert isinstance(await validate(data, context), Accepted)
    assert charged == [(identity.peer_id, 0.5)]
    refused = await validate(data, _context(may_score=lambda peer_id: peer_id != identity.peer_id, scorer=None))
    assert isinstance(refused, Refused)
    assert (refused.refusal.reason, refused.signed) == ("scoring_quota", True)


async def test_a_text_that_takes_the_whole_time_limit_is_refused_as_a_timeout(identity):
    group = _ours(identity, completions=(_ours(identity).completions[0], make_completion(99, 99, reward=0.0)))
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
async def test_any_error_of_the_task_is_a_refusal(identity, error, reason):
    async def failing(ref, cost):
        raise error

    verdict = await validate(seal_group(_ours(identity), identity).to_bytes(), _context(resolve=failing))
    assert reason_of(verdict) == reason


async def test_a_dead_scoring_process_raises(identity):
    async def dead(ref, cost):
        raise WorkerDiedError("the scoring process does not stay alive")

    with pytest.raises(WorkerDiedError):
        await validate(seal_group(_ours(identity), identity).to_bytes(), _context(resolve=dead))
