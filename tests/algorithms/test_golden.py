"""Losses, gradients and metrics on the fixed batch of `golden.json`, which must not change."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import METHODS

from .make_golden import GOLDEN, entries

STORED: dict[str, Any] = json.loads(GOLDEN.read_text())


def test_the_file_equals_the_output_of_its_script() -> None:
    made = json.loads(json.dumps(entries()))
    assert [entry["method"] for entry in made] == [entry["method"] for entry in STORED["entries"]]
    for new, old in zip(made, STORED["entries"], strict=True):
        assert new == {
            name: value if name in ("method", "params") else pytest.approx(value) for name, value in old.items()
        }


def test_every_method_is_in_the_file() -> None:
    assert {entry["method"] for entry in STORED["entries"]} == set(METHODS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entry", STORED["entries"], ids=lambda entry: entry["method"])
def test_loss_gradient_and_metrics_equal_the_file(entry: dict[str, Any], dtype: torch.dtype) -> None:
    batch = STORED["batch"]
    learner = torch.tensor(batch["lp"], dtype=dtype, requires_grad=True)
    params = dict(entry["params"])
    if "first_pass_logprobs" in params:
        params["first_pass_logprobs"] = torch.tensor(STORED["first_pass"], dtype=dtype)
    loss, metrics = policy_loss(
        entry["method"],
        learner,
        torch.tensor(batch["lg"], dtype=dtype),
        torch.tensor(batch["mask"]),
        torch.tensor(batch["advantages"], dtype=dtype),
        torch.tensor(batch["group_ids"]),
        **params,
    )
    loss.backward()
    assert learner.grad is not None
    digits = 1e-5 if dtype == torch.float32 else 1e-11
    assert loss.item() == pytest.approx(entry["loss"], rel=digits)
    assert learner.grad.norm().item() == pytest.approx(entry["gradient_norm"], rel=digits)
    for name, value in metrics.items():
        assert value == pytest.approx(entry[name], rel=digits)
