"""`policy_loss` against the plain Python reference: on ragged batches and on that of `golden.json`."""

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import METHODS

from .cases import cases, check_case, make_case, make_parameters
from .make_golden import GOLDEN, entries
from .reference import METHOD_DEFAULTS

STORED: dict[str, Any] = json.loads(GOLDEN.read_text())


def test_the_reference_has_every_method():
    assert set(METHODS) == set(METHOD_DEFAULTS)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), dtype=st.sampled_from((torch.float32, torch.float64)), seed=st.integers(0, 2**32))
def test_loss_gradient_and_metrics_equal_the_reference(method, case, dtype, seed):
    check_case(method, case, dtype, make_parameters(seed, method))


@pytest.mark.parametrize("regime", ["mixed", "beyond_clamp"])
@pytest.mark.parametrize("method", METHODS)
def test_a_larger_batch_with_default_parameters_equals_the_reference(method, regime):
    limit = {"max_completion_length": 50} if method == "dr_grpo" else {}
    check_case(method, make_case(0, 16, 12, regime), torch.float64, limit)


def test_the_file_equals_the_output_of_its_script():
    made = json.loads(json.dumps(entries()))
    assert [entry["method"] for entry in made] == [entry["method"] for entry in STORED["entries"]]
    for new, old in zip(made, STORED["entries"], strict=True):
        assert new == {
            name: value if name in ("method", "params") else pytest.approx(value) for name, value in old.items()
        }


@pytest.mark.parametrize("entry", STORED["entries"], ids=lambda entry: entry["method"])
def test_loss_gradient_and_metrics_equal_the_file(entry):
    batch, dtype = STORED["batch"], torch.float64
    learner = torch.tensor(batch["lp"], dtype=dtype, requires_grad=True)
    params = dict(entry["params"])
    if "first_pass_logprobs" in params:
        params["first_pass_logprobs"] = torch.tensor(STORED["first_pass"], dtype=dtype)
    if "sender_ids" in params:
        params["sender_ids"] = torch.tensor(STORED["senders"])
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
    digits = 1e-11
    assert loss.item() == pytest.approx(entry["loss"], rel=digits)
    assert learner.grad.norm().item() == pytest.approx(entry["gradient_norm"], rel=digits)
    for name, value in metrics.items():
        assert value == pytest.approx(entry[name], rel=digits)
