"""Methods for other models' completions, and for completions sent as text, by hand."""

import math

import pytest
import torch

from ftis_node.algorithms.importance_weights import cross_tokenizer_advantages

from .by_hand import evaluate, rows

OWN, PEER = 0, 7


def senders(*ids: int) -> dict[str, torch.Tensor]:
    return {"sender_ids": torch.tensor(ids)}


def test_hacpo_clips_a_peers_ratio_on_both_sides_and_squares_what_remains():
    # s is 0.9, 2 and 1/2. Inside [0.8, 1] the weight is s^2 and its gradient s sg[s]; outside there is none.
    batch = rows([[0.45], [0.8], [0.2]], [[0.5], [0.4], [0.4]], [-1.0, 3.0, -2.0])
    value, gradient, _ = evaluate("hacpo", batch, **senders(PEER, PEER, PEER))
    assert value == pytest.approx((-0.81 + 3.0 - 2 * 0.64) / 3)
    assert gradient == [pytest.approx([-0.81 / 3]), [0.0], [0.0]]
    value, gradient, _ = evaluate("hacpo", batch, foreign_clip=1.0, ratio_power=0.0, **senders(PEER, PEER, PEER))
    assert value == pytest.approx((-0.9 + 3.0 - 2 * 0.5) / 3)
    assert gradient == [pytest.approx([-0.9 / 3]), [0.0], pytest.approx([-1.0 / 3])]


@pytest.mark.parametrize("method", ["gspo", "gspo_token", "hacpo"])
def test_own_completions_can_be_relative_to_the_learners_own_log_probs(method):
    """The engine reported 2 % more than the learner finds. GSPO's clip then silences the failure, not the success."""
    batch = rows([[0.5, 0.5], [0.5, 0.5]], [[0.51, 0.51]] * 2, [1.0, -1.0])
    engine = evaluate(method, batch, old_logprobs="engine", **senders(OWN, OWN))[1]
    assert engine[0][0] > 0 and engine[1] == [0.0, 0.0]
    learner = evaluate(method, batch, old_logprobs="learner", **senders(OWN, OWN))[1]
    assert learner == [pytest.approx([0.25, 0.25]), pytest.approx([-0.25, -0.25])]
    mixed = evaluate("gspo", batch, old_logprobs="learner", **senders(PEER, OWN))[1]
    assert mixed[0][0] == pytest.approx(0.25 * 0.5 / 0.51), "a peer's ratio stays that to the peer"


def test_dppo_masks_by_probability_and_not_by_ratio():
    """A rare token with rho 10 trains with weight 10. A frequent one with rho 1.4 has moved 0.24 along A and is masked.

    Of the same token with A < 0 the move is against A, so it trains.
    """
    batch = rows([[0.01], [0.84], [0.84], [0.3]], [[0.001], [0.6], [0.6], [0.6]], [1.0, 1.0, -1.0, -1.0])
    _, gradient, _ = evaluate("dppo", batch)
    assert [row[0] for row in gradient] == pytest.approx([10 / 4, 0.0, -1.4 / 4, 0.0])
    assert evaluate("dppo", batch, cap=2.0)[1][0][0] == pytest.approx(2 / 4)
    assert evaluate("dppo", batch, eps_low=0.31)[1][3][0] == pytest.approx(-0.5 / 4)


def test_the_soft_gate_has_the_slope_of_rho_on_policy_and_fades_on_both_sides():
    batch = rows([[0.5], [0.5], [0.9], [0.1]], [[0.5], [0.5], [0.3], [0.5]], [1.0, -1.0, 1.0, 1.0])
    value, gradient, _ = evaluate("soft_adaptive", batch)

    def gate(rho):
        return 1 / (1 + math.exp(1 - rho))

    slopes = [4 * gate(rho) * (1 - gate(rho)) * rho for rho in (1.0, 3.0, 0.2)]
    assert slopes[0] == 1.0
    assert [row[0] for row in gradient] == pytest.approx([1 / 4, -1 / 4, slopes[1] / 4, slopes[2] / 4])
    assert value == pytest.approx((2 - 2 / 1.05 + 4 * gate(3.0) + 4 * gate(0.2)) / 4)


def many_tokens(ratio: float, count: int = 4000) -> dict[str, torch.Tensor]:
    """Return 4000 tokens in 40 completions with one ratio; the behaviour log-probs differ by column alone."""
    behaviour = (-1.0 - torch.arange(count // 40, dtype=torch.float64) / (100 * count)).repeat(40, 1)
    return {
        "learner_logprobs": behaviour + math.log(ratio),
        "behaviour_logprobs": behaviour,
        "mask": torch.ones_like(behaviour, dtype=torch.bool),
        "advantages": torch.ones(40, dtype=torch.float64),
        "group_ids": torch.arange(40) // 8,
    }


@pytest.mark.parametrize(
    ("ratio", "threshold", "share", "weight"), [(0.25, 1.0, 0.25, 1.0), (3.0, 1.0, 1.0, 3.0), (0.5, 2.0, 0.25, 2.0)]
)
def test_obrs_accepts_the_share_of_its_formula_and_stays_unbiased(ratio, threshold, share, weight):
    """The share is min(1, rho / lambda), the weight max(rho, lambda), their product rho."""
    batch = many_tokens(ratio)
    gradient = torch.tensor(evaluate("ftis", batch, filter="obrs", obrs_lambda=threshold, cap=9.0)[1])
    is_accepted = gradient != 0
    assert is_accepted.double().mean().item() == pytest.approx(share, abs=0.02)
    assert gradient[is_accepted] * 4000 == pytest.approx(weight)
    assert gradient.sum().item() == pytest.approx(ratio, rel=0.1)
    ignoring = torch.tensor(evaluate("f-nois", batch, filter="obrs", obrs_lambda=threshold)[1])
    assert torch.equal(ignoring != 0, is_accepted), "every method accepts the same tokens"
    assert ignoring[is_accepted] * 4000 == pytest.approx(1.0)
    if share < 1:
        other = batch | {"group_ids": batch["group_ids"] + 5}
        assert not torch.equal(torch.tensor(evaluate("f-nois", other, filter="obrs")[1]) != 0, is_accepted)
        rows_of_one_group = is_accepted[:8]
        assert not (rows_of_one_group == rows_of_one_group[0]).all(), "completions of a group differ"


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_positives_are_weighted_up_to_the_cap_and_others_are_filtered():
    advantages = cross_tokenizer_advantages(
        logs(0.2, 0.5, 0.2, 0.2), logs(0.4, 0.1, 0.4, 0.4), torch.tensor([3.0, 3.0, -3.0, 0.0])
    )
    assert advantages.tolist() == pytest.approx([1.5, 6.0, 0.0, 0.0])
    assert advantages.dtype == torch.float32


def test_an_infinite_cap_is_allowed_and_a_huge_ratio_is_capped():
    one = torch.ones(1, dtype=torch.float64)
    assert cross_tokenizer_advantages(logs(0.8), logs(0.2), one, cap=math.inf).item() == pytest.approx(4.0)
    assert cross_tokenizer_advantages(one * 0, one * -1e6, one).item() == pytest.approx(2.0)
