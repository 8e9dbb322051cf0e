"""What the KL estimators estimate, by exact enumeration; and M2PO's mask against its loop."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.batch import read_batch
from ftis_node.algorithms.filters import keep_near_or_good, second_moment_mask, sequence_kl

from .by_hand import padded_logs
from .cases import make_case
from .reference import read_rows, set_trusted_tokens

VOCABULARY = 7


@pytest.fixture
def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """A learner and a generator: two softmaxes over a small vocabulary, `[V]` each."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
    learner, behaviour = torch.softmax(logits, dim=1)
    return learner, behaviour


def expectation(estimator: str, learner: torch.Tensor, behaviour: torch.Tensor) -> float:
    """E_gen of the estimator: each token once, as a completion of its own, weighted by the generator's probability."""
    total = 0.0
    for token in range(VOCABULARY):
        _, metrics = policy_loss(
            "nois",
            learner[token].log().view(1, 1),
            behaviour[token].log().view(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            torch.ones(1, dtype=torch.float64),
            torch.zeros(1, dtype=torch.int64),
            kl_estimator=estimator,
        )
        total += behaviour[token].item() * metrics["mean_kl"]
    return total


def kl_divergence(of: torch.Tensor, relative_to: torch.Tensor) -> float:
    return float((of * (of.log() - relative_to.log())).sum())


def test_author_k3_is_chi_squared_less_kl(policies: tuple[torch.Tensor, torch.Tensor]) -> None:
    learner, behaviour = policies
    chi_squared = float((behaviour.square() / learner).sum()) - 1
    expected = chi_squared - kl_divergence(behaviour, learner)
    assert expectation("author_k3", learner, behaviour) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1_fwd", "k3_fwd"])
def test_forward_estimators_give_the_generators_divergence(
    estimator: str, policies: tuple[torch.Tensor, torch.Tensor]
) -> None:
    learner, behaviour = policies
    expected = kl_divergence(behaviour, learner)
    assert expectation(estimator, learner, behaviour) == pytest.approx(expected, rel=1e-12)


def test_rkl_iw_gives_the_learners_divergence(policies: tuple[torch.Tensor, torch.Tensor]) -> None:
    learner, behaviour = policies
    expected = kl_divergence(learner, behaviour)
    assert expectation("rkl_iw", learner, behaviour) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("author_k3", 1 / 4 + math.log(4) - 1),
        ("k1_fwd", -math.log(4)),
        ("k3_fwd", 4 - math.log(4) - 1),
        ("rkl_iw", 4 * math.log(4) - 4 + 1),
    ],
)
def test_one_token_with_rho_four(estimator: str, expected: float) -> None:
    batch = read_batch(
        padded_logs([[0.8, 0.5]]),
        padded_logs([[0.2, 0.5]]),
        torch.tensor([[True, True]]),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int64),
    )
    assert sequence_kl(batch, estimator).tolist() == pytest.approx([expected / 2])


def test_k3_of_nearly_equal_policies_survives_float32() -> None:
    behaviour = torch.full((1, 4), -1.0)
    batch = read_batch(
        behaviour + torch.tensor(2**-10),
        behaviour,
        torch.ones(1, 4, dtype=torch.bool),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int64),
    )
    assert sequence_kl(batch, "k3_fwd").item() == pytest.approx(2**-21, rel=1e-3)


def test_keep_rule() -> None:
    advantages = torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.0])
    kl = torch.tensor([9.0, 1.0, 9.0, 1.0, 9.0, 1.0, 5.0])
    assert keep_near_or_good(advantages, kl, 5.0).tolist() == [True, True, False, True, False, True, False]


@pytest.mark.parametrize("threshold", [1e-6, 0.04, 3.0, 60.0])
@pytest.mark.parametrize("seed", range(12))
def test_second_moment_mask_is_the_loops(seed: int, threshold: float) -> None:
    case = make_case(seed, 6, 9, "mixed")
    batch = read_batch(**case.tensors(torch.float64))
    trusted_rows = read_rows(case.lp, case.lg, case.mask, case.advantages, case.group_ids, None)
    set_trusted_tokens(trusted_rows, threshold)
    trusted = second_moment_mask(batch, threshold)
    for marks, row in zip(trusted.tolist(), trusted_rows, strict=True):
        assert [marks[column] for column in row.columns] == row.trusted
    assert not (trusted & ~batch.mask).any()
