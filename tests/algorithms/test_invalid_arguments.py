"""Invalid arguments of `policy_loss`: each error names the argument and its valid values."""

import math
from typing import Any

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import METHODS, method_parameters

from .cases import make_case

NAN, INF = math.nan, math.inf


def call(method: str = "ftis", changes: dict[str, Any] | None = None, **params: Any) -> torch.Tensor:
    """Return the loss on a fixed batch of three completions of up to four tokens, with some arguments changed."""
    tensors: dict[str, Any] = dict(make_case(0, 3, 4, "near").tensors(torch.float64))
    tensors["mask"] = torch.tensor([[True] * 4, [True] * 2 + [False] * 2, [True] + [False] * 3])
    for name in ("learner_logprobs", "behaviour_logprobs"):
        tensors[name] = torch.where(tensors["mask"], tensors[name].detach().nan_to_num(-1.0), NAN)
    return policy_loss(method, **(tensors | (changes or {})), **params)[0]


def test_the_unchanged_batch_is_accepted():
    assert call().isfinite()


def test_an_unknown_method_lists_the_known_methods():
    with pytest.raises(ValueError, match="unknown method 'ppo'; known: nois, vis, tis, .*m2po"):
        call("ppo")


def test_an_unknown_parameter_lists_the_parameters_of_the_method():
    with pytest.raises(ValueError, match="'ftis' has no parameter 'kl_treshold'; it takes: cap, .*kl_threshold"):
        call("ftis", kl_treshold=3.0)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("grpo", {"mis_low": 0.1}), ("tis", {"m2_threshold": 0.1}), ("ftis", {"topr_level": "token"}),
        ("topr", {"floor": 0.5}), ("tis", {"sender_ids": torch.zeros(3, dtype=torch.int64)}),
    ],
)  # fmt: skip
def test_a_parameter_of_another_method_is_refused(method, params):
    with pytest.raises(ValueError, match=f"{method}.* has no parameter '{next(iter(params))}'"):
        call(method, **params)


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("grpo", {"cap": 0.0}, r"cap: Input should be greater than 0 \(got 0.0\)"),
        ("grpo", {"cap": NAN}, "cap"),
        ("grpo", {"cap": True}, "cap"),
        ("grpo", {"kl_estimator": "k2"}, "kl_estimator: .*'author_k3', 'k1_fwd', 'k3_fwd' or 'rkl_iw' .got 'k2'"),
        ("grpo", {"kl_threshold": -1.0}, "kl_threshold"),
        ("grpo", {"eps_low": 1.1}, "eps_low"),
        ("grpo", {"denominator": "some"}, "denominator: .*'all' or 'kept'"),
        ("grpo", {"agg": "mean"}, "agg: .*'seq_mean', 'token_mean' or 'max_len'"),
        ("grpo", {"agg": "max_len"}, "max_completion_length"),
        ("grpo", {"max_completion_length": 0}, "max_completion_length"),
        ("grpo", {"max_completion_length": 2.5}, "max_completion_length"),
        ("dr_grpo", {}, "max_completion_length"),
        ("gepo", {"alpha": 1.5}, "alpha"),
        ("gepo", {"clip": 1}, "clip"),
        ("gepo", {"k3_beta": INF}, "k3_beta"),
        ("mis", {"mis_high": "2"}, "mis_high"),
        ("mis", {"mis_low": 3.0}, "mis_low must not exceed mis_high"),
        ("m2po", {"m2_threshold": 0.0}, "m2_threshold"),
        ("tis", {"floor": 1.1}, "floor: Input should be less than or equal to 1 .got 1.1"),
        ("ftis", {"floor": 0.5, "cap": 0.4}, "floor must not exceed cap, but 0.5 > 0.4"),
        ("ftis", {"filter": "far"}, "filter: no filter 'far' is installed: .* built in are 'kl', 'quantile', 'ess'"),
        ("f-vis", {"keep_share": 1.1}, "keep_share: Input should be less than or equal to 1 .got 1.1"),
        ("ftis", {"keep_share": True}, "keep_share"),
        ("ftis", {"sender_ids": torch.zeros(3)}, "sender_ids must be one of int64, .* not float32"),
        ("ftis", {"sender_ids": torch.zeros(4, dtype=torch.int64)}, r"sender_ids must have the shape \[3\], not \[4\]"),
        ("f-vis", {"obrs_lambda": 0.0}, "obrs_lambda: Input should be greater than 0"),
        ("soft_adaptive", {"tau_pos": INF}, "tau_pos: Input should be less than or equal to 1000 .got inf"),
        ("soft_adaptive", {"tau_pos": 1e-40}, "tau_pos"),
        ("soft_adaptive", {"tau_neg": 0}, "tau_neg"),
        ("hacpo", {"foreign_clip": 1.1}, "foreign_clip"),
        ("hacpo", {"ratio_power": -1.0}, "ratio_power: Input should be greater than or equal to 0"),
        ("gspo", {"old_logprobs": "peer"}, "old_logprobs: .*'engine' or 'learner'"),
        ("mis", {"mis_level": "sequence"}, "mis_level: .*'seq_mean', 'seq_sum' or 'token'"),
        ("topr", {"topr_level": "sequence"}, "topr_level: .*'seq_mean', 'seq_sum' or 'token'"),
        ("tis", {"first_pass_logprobs": torch.zeros(3, 3, dtype=torch.float64)}, "first_pass_logprobs"),
        ("tis", {"first_pass_logprobs": torch.full((3, 4), NAN, dtype=torch.float64)},
            "first_pass_logprobs .* inside the mask"),
    ],
)  # fmt: skip
def test_a_parameter_out_of_bounds_is_refused(method, params, named):
    with pytest.raises(ValueError, match=named):
        call(method, **params)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learner_logprobs": torch.zeros(3, 4, dtype=torch.bfloat16)}, "learner_logprobs .*float32.* not bfloat16"),
        ({"learner_logprobs": torch.zeros(12)}, "learner_logprobs"),
        ({"learner_logprobs": [[0.0]]}, "learner_logprobs must be a tensor, not list"),
        ({"behaviour_logprobs": torch.zeros(4, 3)}, r"behaviour_logprobs must have the shape \[3, 4\], not \[4, 3\]"),
        ({"mask": torch.ones(3, 4)}, "mask must be one of bool, not float32"),
        ({"advantages": torch.ones(4)}, "advantages"),
        ({"advantages": torch.tensor([0.0, INF, 0.0])}, r"advantages holds a non-finite value: inf at \[1\]"),
        ({"group_ids": torch.zeros(3)}, "group_ids"),
        ({"group_ids": torch.zeros(3, 1, dtype=torch.int64)}, "group_ids"),
    ],
)  # fmt: skip
def test_a_tensor_of_wrong_shape_or_dtype_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        call(changes=changes)


@pytest.mark.parametrize(("name", "value"), [("learner_logprobs", NAN), ("behaviour_logprobs", -INF)])
@pytest.mark.parametrize("method", ["ftis", "dr_grpo", "gepo"])
def test_a_non_finite_log_prob_is_refused_only_inside_the_mask(method, name, value):
    logprobs = torch.full((3, 4), -1.0, dtype=torch.float64)
    logprobs[1, 1] = value
    limit = {"max_completion_length": 4} if method == "dr_grpo" else {}
    with pytest.raises(ValueError, match=rf"{name} holds a non-finite value inside the mask: .* at \[1, 1\]"):
        call(method, changes={name: logprobs}, **limit)
    logprobs[1, 1], logprobs[1, 2] = -1.0, value  # padding
    assert call(method, changes={name: logprobs}, **limit).isfinite()


@pytest.mark.parametrize("method", METHODS)
def test_every_listed_parameter_is_accepted_with_its_default(method):
    defaults = method_parameters(method)
    limit = {"max_completion_length": 4}
    assert torch.equal(call(method, **(defaults | limit)), call(method, **limit))


def test_only_dr_grpo_and_gepo_scale_advantages_by_mean():
    assert {name for name, method in METHODS.items() if method.advantage_scale == "mean"} == {"dr_grpo", "gepo"}
    assert {name for name, method in METHODS.items() if method.advantage_scale == "capability"} == {"hacpo"}
