"""`policy_loss` against the plain Python reference, on ragged batches."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftis_node.algorithms.methods import METHODS

from .cases import cases, check_case, make_case, make_parameters
from .reference import METHOD_DEFAULTS


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
