"""The four plug-ins of the example package against their definitions."""

import math
import random

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import is_separable
from ftis_node.algorithms.scored_batch import ScoredBatch, load_advantage
from ftis_node.replay.group_choice import Candidate, load_choice

from ..reference_advantages import learner_advantages

pytestmark = pytest.mark.usefixtures("methods_package", "fresh_plugins")


def _loss(method: str, **params: object) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Return loss, metrics and gradient of four completions of two tokens. rho is 4 at two of them, 1/4 at two."""
    behaviour = torch.full((4, 2), -3.0, dtype=torch.float64)
    shift = torch.tensor([4.0, 4.0, 0.25, 0.25], dtype=torch.float64).log()
    learner = (behaviour + shift[:, None]).requires_grad_()
    mask, advantages = torch.ones(4, 2, dtype=torch.bool), torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    loss, metrics = policy_loss(method, learner, behaviour, mask, advantages, torch.tensor([0, 0, 1, 1]), **params)
    loss.backward()
    assert learner.grad is not None
    return loss, metrics, learner.grad


def test_the_balance_weight_is_the_ratio_to_the_mixture_of_both_generators():
    """rho is 4 and 1/4; half of the completions are own, so the weights are 4 / 2.5 and 1/4 / 0.625."""
    gradient = _loss("balance", sender_ids=torch.tensor([0, 0, 5, 5]))[2]
    assert gradient[:, 0].tolist() == pytest.approx([-1.6 / 8, 1.6 / 8, -0.4 / 8, 0.4 / 8])
    assert _loss("balance", cap=3.0)[2][:, 0].tolist() == pytest.approx([-3 / 8, 3 / 8, -0.25 / 8, 0.25 / 8])
    assert not is_separable("balance", {})
    assert not is_separable("ftis", {"filter": "window"})


@pytest.mark.parametrize("estimator", ["author_k3", "k1_fwd"])
@pytest.mark.parametrize("seed", range(4))
def test_the_window_filter_equals_its_definition(seed, estimator):
    generator = torch.Generator().manual_seed(seed)
    size, lengths = (6, 90), torch.tensor([90, 33, 32, 31, 3, 0])
    learner, behaviour = -3 * torch.rand(2, *size, generator=generator, dtype=torch.float64)
    mask = torch.arange(90) < lengths[:, None]
    mask[0] &= torch.arange(90) % 7 != 3
    expected = []
    for lp, lg, marks in zip(learner, behaviour, mask, strict=True):
        ratios = (lp - lg)[marks]
        values = torch.exp(-ratios) + ratios - 1 if estimator == "author_k3" else -ratios
        windows = values.unfold(0, min(32, len(values)), 1).mean(dim=1) if len(values) else torch.tensor([-math.inf])
        expected.append(windows.max().item())
    advantages = torch.full((6,), -1.0, dtype=torch.float64)
    for threshold in sorted(expected)[1:]:
        settings = {"filter": "window", "kl_estimator": estimator, "kl_threshold": max(0.0, threshold - 1e-9)}
        batch = (learner, torch.where(mask, behaviour, math.nan), mask, advantages, torch.zeros(6).long())
        _, metrics = policy_loss("f-nois", *batch, **settings)
        kept = sum(value < settings["kl_threshold"] for value in expected)
        assert metrics["kept_fraction"] == pytest.approx(kept / 6)


def test_learner_advantages_by_hand():
    """p is 1/4. The peer's group is all right: b = (4/4 + 2) / (4 + 2), and A = (1 - b) / 0.25."""
    scored = ScoredBatch(
        rewards=torch.tensor([1.0, 0, 0, 0, 1, 1], dtype=torch.float64),
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1]),
        sender_ids=torch.tensor([0, 0, 0, 0, 3, 3]),
        task_ids=torch.zeros(6, dtype=torch.int64),
        ratios=torch.ones(6, dtype=torch.float64),
    )
    assert load_advantage("learner")(scored).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 2.0, 2.0])


@pytest.mark.parametrize("seed", range(20))
def test_learner_advantages_equal_their_definition_and_are_bounded(seed):
    generator = random.Random(seed)
    size = generator.randrange(1, 25)
    ids, senders, tasks = ([generator.randrange(count) for _ in range(size)] for count in (5, 3, 2))
    rewards = [generator.choice((0.0, 1.0, generator.random())) for _ in range(size)]
    ratios = [math.exp(generator.choice((0.0, 1.0, -1.0, 80.0, -1000.0))) for _ in range(size)]
    columns = [torch.tensor(each) for each in (ids, senders, tasks)]
    scored = ScoredBatch(
        torch.tensor(rewards, dtype=torch.float64), *columns, torch.tensor(ratios, dtype=torch.float64)
    )
    advantages = load_advantage("learner")(scored)
    expected = learner_advantages(rewards, ids, senders, tasks, ratios)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert bool((advantages.abs() <= 5.0).all())


def group(sender: str, task: str, *rewards: float) -> Candidate:
    number = len(GROUPS)
    GROUPS.append(number)
    name, when = str(number).encode(), {"arrival": number, "created_at": float(number), "policy_version": 0}
    return Candidate(name, sender, own=sender == "me", problem=name, task=task, rewards=rewards, **when)


GROUPS: list[int] = []


def test_need_takes_groups_of_the_tasks_at_which_the_node_fails():
    """Needs: (1 - 3/4) x 1/2 = 1/8 for `easy`, (1 - 1/4) x 1/2 = 3/8 for `hard`: it has 3 of 4 places."""
    mine = [group("me", "easy", 1.0, 1.0), group("me", "hard", 0.0, 0.0)]
    theirs = [group(sender, task, 0.0, 1.0) for task in ("easy", "hard") for sender in ("a", "b") for _ in range(3)]
    chosen = load_choice("need")([*theirs, *mine], 1, 4, step=1).taken
    assert [(each.sender, each.task) for each in chosen][:1] == [("me", "easy")]
    assert sorted(each.task for each in chosen[1:]) == ["easy", "hard", "hard", "hard"]
    assert {each.sender for each in chosen[1:]} == {"a", "b"}


def test_need_takes_groups_without_a_signal_last():
    flat = [group("a", "easy", 0.0, 0.0) for _ in range(3)]
    useful = group("b", "easy", 0.0, 1.0)
    for places, expected in ((1, 0), (3, 2)):
        chosen = load_choice("need")([*flat, useful], 0, places, step=1).taken
        assert chosen[0] == useful and sum(each in flat for each in chosen) == expected
    assert load_choice("need")([], 4, 4, step=1).taken == ()
