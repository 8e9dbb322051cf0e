"""Advantages of completions of a peer with another tokenizer."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.algorithms.importance_weights import cross_tokenizer_advantages


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_positives_are_weighted_up_to_the_cap_and_others_are_filtered() -> None:
    advantages = cross_tokenizer_advantages(
        logs(0.2, 0.5, 0.2, 0.2), logs(0.4, 0.1, 0.4, 0.4), torch.tensor([3.0, 3.0, -3.0, 0.0])
    )
    assert advantages.tolist() == pytest.approx([1.5, 6.0, 0.0, 0.0])
    assert advantages.dtype == torch.float32


def test_an_infinite_cap_is_allowed_and_a_huge_ratio_is_capped() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert cross_tokenizer_advantages(logs(0.8), logs(0.2), one, cap=math.inf).item() == pytest.approx(4.0)
    assert cross_tokenizer_advantages(one * 0, one * -1e6, one).item() == pytest.approx(2.0)
